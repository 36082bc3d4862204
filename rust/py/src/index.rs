//! `PrefixIndex`: payloads in, answers out; no Python object per block on the way.

use std::sync::Arc;

use kvevents_core::codec;
use kvevents_core::events::EventList;
use kvevents_core::hash::HashRef;
use kvevents_core::index::{Bounds, Match, PrefixIndex, Query};
use kvevents_core::tokens::MmFeature;
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict, PyIterator, PyList, PyType};

use crate::errors::{decode_error, index_error};
use crate::events::PyEventList;
use crate::raw::{self, HashColumn};
use crate::tokens::{feature, hash_error, read_tokens};

/// From about 200 us of work on the interpreter lock is released: bytes of a payload,
const DETACH_PAYLOAD: usize = 32 << 10;
/// bytes of columns,
const DETACH_COLUMNS: usize = 64 << 10;
/// and tokens of a prompt.
const DETACH_TOKENS: usize = 32 << 10;

/// See `_core.pyi`.
#[pyclass(name = "PrefixIndex", module = "kvevents._core", frozen)]
pub struct PyPrefixIndex {
    inner: Arc<PrefixIndex>,
}

/// What is asked besides the tokens.
struct Asked {
    tokens: Vec<u32>,
    lora_name: Option<String>,
    cache_salt: Option<String>,
    mm: Vec<MmFeature>,
}

impl Asked {
    fn query(&self) -> Query<'_> {
        Query {
            tokens: &self.tokens,
            lora_name: self.lora_name.as_deref(),
            cache_salt: self.cache_salt.as_deref(),
            mm: &self.mm,
        }
    }
}

fn features(mm: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<MmFeature>> {
    let Some(mm) = mm else { return Ok(Vec::new()) };
    let mut out = Vec::new();
    for (i, item) in mm.try_iter()?.enumerate() {
        out.push(feature(&item?, i)?);
    }
    Ok(out)
}

impl PyPrefixIndex {
    fn wrap(inner: PrefixIndex) -> Self {
        Self { inner: Arc::new(inner) }
    }

    fn answer(&self, found: Vec<Match>) -> PyMatches {
        PyMatches { found, index: Arc::clone(&self.inner) }
    }

    fn bounds(orphan_blocks: usize) -> Bounds {
        Bounds { orphan_blocks }
    }
}

#[pymethods]
impl PyPrefixIndex {
    #[new]
    #[pyo3(signature = (*, seed = 0, orphan_blocks = 65_536, digests = true))]
    fn new(seed: u64, orphan_blocks: usize, digests: bool) -> Self {
        Self::wrap(PrefixIndex::new(seed, Self::bounds(orphan_blocks), digests))
    }

    fn source(&self, name: &str, rank: u32) -> usize {
        self.inner.source(name, rank)
    }

    #[pyo3(signature = (source, seq, payload, *, now))]
    fn apply(
        &self,
        py: Python<'_>,
        source: usize,
        seq: Option<u64>,
        payload: &Bound<'_, PyBytes>,
        now: u32,
    ) -> PyResult<usize> {
        let bytes = payload.as_bytes();
        let work = || {
            codec::decode(bytes, false).map(|d| {
                self.inner.apply(source, seq, &d.events, now);
                d.events.len()
            })
        };
        let done = if bytes.len() < DETACH_PAYLOAD { work() } else { py.detach(work) };
        done.map_err(|e| {
            self.inner.mark_incomplete(source);
            decode_error(py, &e)
        })
    }

    #[pyo3(signature = (source, seq, events, *, now, snapshot = false))]
    fn apply_events(
        &self,
        py: Python<'_>,
        source: usize,
        seq: Option<u64>,
        events: &PyEventList,
        now: u32,
        snapshot: bool,
    ) {
        let events: &EventList = &events.inner;
        let work = || {
            if snapshot {
                self.inner.apply_snapshot(source, seq, events, now);
            } else {
                self.inner.apply(source, seq, events, now);
            }
        };
        if events.nbytes() < DETACH_COLUMNS { work() } else { py.detach(work) }
    }

    #[pyo3(signature = (token_ids, *, lora_name = None, cache_salt = None, mm = None))]
    fn find(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        lora_name: Option<String>,
        cache_salt: Option<String>,
        mm: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyMatches> {
        let mut asked = Asked { tokens: Vec::new(), lora_name, cache_salt, mm: features(mm)? };
        read_tokens(token_ids, &mut asked.tokens)?;
        let work = || self.inner.find(&asked.query());
        let found = if asked.tokens.len() < DETACH_TOKENS { work() } else { py.detach(work) };
        Ok(self.answer(found))
    }

    #[pyo3(signature = (prompts, *, lora_name = None, cache_salt = None))]
    fn to_find_many<'py>(
        &self,
        py: Python<'py>,
        prompts: &Bound<'py, PyAny>,
        lora_name: Option<String>,
        cache_salt: Option<String>,
    ) -> PyResult<Bound<'py, PyList>> {
        let mut asked = Vec::new();
        for prompt in prompts.try_iter()? {
            let mut tokens = Vec::new();
            read_tokens(&prompt?, &mut tokens)?;
            asked.push(tokens);
        }
        let (lora_name, cache_salt) = (lora_name.as_deref(), cache_salt.as_deref());
        let found: Vec<Vec<Match>> = py.detach(|| {
            let one = |tokens: &Vec<u32>| self.inner.find(&Query { tokens, lora_name, cache_salt, mm: &[] });
            asked.iter().map(one).collect()
        });
        PyList::new(py, found.into_iter().map(|f| self.answer(f)))
    }

    fn find_hashes(&self, source: usize, block_hashes: &Bound<'_, PyAny>) -> PyResult<PyMatches> {
        let mut column = HashColumn::default();
        if let Err(bad) = raw::read_hashes(block_hashes, None, 32, &mut column)? {
            return Err(hash_error(&bad));
        }
        let hashes: Vec<HashRef<'_>> = match column.width {
            0 => column.ints.iter().map(|&h| HashRef::Uint(h)).collect(),
            w => column.bytes.chunks_exact(w).map(HashRef::Bytes).collect(),
        };
        Ok(self.answer(self.inner.find_hashes(source, &hashes).into_iter().collect()))
    }

    fn digest<'py>(&self, py: Python<'py>, source: usize) -> Option<Bound<'py, PyBytes>> {
        self.inner.digest(source).map(|d| PyBytes::new(py, &d))
    }

    fn mark_incomplete(&self, source: usize) {
        self.inner.mark_incomplete(source);
    }

    fn reset(&self, source: usize) {
        self.inner.reset(source);
    }

    fn drop_source(&self, source: usize) -> bool {
        self.inner.drop_source(source)
    }

    fn clear_tier(&self, py: Python<'_>, source: usize, tier: &str) -> usize {
        let Some(t) = self.inner.tier_names().iter().position(|n| n == tier) else { return 0 };
        py.detach(|| self.inner.clear_tier(source, t))
    }

    fn expire(&self, py: Python<'_>, source: usize, before: u32) -> usize {
        py.detach(|| self.inner.expire(source, before))
    }

    #[getter]
    fn tiers(&self) -> Vec<String> {
        self.inner.tier_names()
    }

    fn to_stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let out = PyList::empty(py);
        for (number, s) in self.inner.stats() {
            let d = PyDict::new(py);
            d.set_item("source", number)?;
            d.set_item("name", &s.name)?;
            d.set_item("rank", s.rank)?;
            d.set_item("owner", self.inner.source_name(number).is_some_and(|n| n.2))?;
            d.set_item("blocks", s.blocks)?;
            d.set_item("nbytes", s.nbytes)?;
            d.set_item("waiting", s.waiting)?;
            d.set_item("complete", s.complete)?;
            d.set_item("last_seq", s.last_seq)?;
            d.set_item("last_seen", s.last_seen)?;
            for (name, count) in s.counters.items() {
                d.set_item(name, count)?;
            }
            out.append(d)?;
        }
        Ok(out)
    }

    fn dump<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let bytes = py.detach(|| self.inner.dump());
        PyBytes::new(py, &bytes)
    }

    #[staticmethod]
    #[pyo3(signature = (data, *, orphan_blocks = 65_536, digests = true))]
    fn load(
        py: Python<'_>,
        data: &Bound<'_, PyBytes>,
        orphan_blocks: usize,
        digests: bool,
    ) -> PyResult<Self> {
        let bytes = data.as_bytes();
        py.detach(|| PrefixIndex::load(bytes, Self::bounds(orphan_blocks), digests))
            .map(Self::wrap)
            .map_err(|e| index_error(&e))
    }
}

/// An answer: who holds how much, longest first.
#[pyclass(name = "Matches", module = "kvevents._core", frozen, sequence)]
pub struct PyMatches {
    found: Vec<Match>,
    index: Arc<PrefixIndex>,
}

impl PyMatches {
    fn item<'py>(&self, py: Python<'py>, m: &Match) -> PyResult<Bound<'py, PyAny>> {
        static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        let class = CLASS.import(py, "kvevents.index", "Match")?;
        let names = self.index.tier_names();
        let tiers = |list: &[(usize, u32)]| -> PyResult<Bound<'py, PyDict>> {
            let d = PyDict::new(py);
            for &(tier, tokens) in list {
                d.set_item(names.get(tier), tokens)?;
            }
            Ok(d)
        };
        // A source that was dropped since then has no name any more.
        let (name, rank, owner) = self.index.source_name(m.source).unwrap_or_default();
        class.call1((
            name,
            rank,
            m.tokens,
            m.block_size,
            tiers(&m.alone)?,
            tiers(&m.cumulative)?,
            m.complete,
            owner,
        ))
    }
}

#[pymethods]
impl PyMatches {
    fn __len__(&self) -> usize {
        self.found.len()
    }

    fn __getitem__<'py>(&self, py: Python<'py>, index: isize) -> PyResult<Bound<'py, PyAny>> {
        let n = self.found.len();
        let at = if index < 0 { index + n.cast_signed() } else { index };
        let m = usize::try_from(at)
            .ok()
            .and_then(|i| self.found.get(i))
            .ok_or_else(|| PyIndexError::new_err(format!("match {index} of {n}")))?;
        self.item(py, m)
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        let items = self.found.iter().map(|m| self.item(py, m)).collect::<PyResult<Vec<_>>>()?;
        PyList::new(py, items)?.try_iter()
    }

    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let d = PyDict::new(py);
        for m in &self.found {
            let (name, rank, _) = self.index.source_name(m.source).unwrap_or_default();
            d.set_item((name, rank), m.tokens)?;
        }
        Ok(d)
    }

    fn __repr__(&self) -> String {
        let parts: Vec<String> = self
            .found
            .iter()
            .take(5)
            .map(|m| {
                let (name, rank, _) = self.index.source_name(m.source).unwrap_or_default();
                let partial = if m.complete { "" } else { " (incomplete)" };
                format!("{name}/{rank}: {} tokens{partial}", m.tokens)
            })
            .collect();
        format!("Matches({}: {})", self.found.len(), parts.join(", "))
    }

    fn __bool__(&self) -> bool {
        !self.found.is_empty()
    }
}
