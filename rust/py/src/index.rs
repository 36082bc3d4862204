//! `PrefixIndex`: payloads in, answers out; no Python object per block on the way.

// The clock that the core must not have.
#![allow(clippy::disallowed_types)]

use std::cell::Cell;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use kvevents_core::codec;
use kvevents_core::error::DecodeError;
use kvevents_core::events::EventList;
use kvevents_core::hash::HashRef;
use kvevents_core::index::{Bounds, Expiry, Match, PrefixIndex, Query, Seq};
use kvevents_core::tokens::MmFeature;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::errors::{Exc, decode_error, index_error};
use crate::event_reader::extract_events;
use crate::matches::PyMatches;
use crate::raw::{self, HashColumn};
use crate::tokens::{feature, hash_error, read_tokens};

/// From about 200 us of work on the interpreter lock is released: bytes of a payload,
const DETACH_PAYLOAD: usize = 32 << 10;
/// bytes of columns,
const DETACH_COLUMNS: usize = 64 << 10;
/// and tokens of a prompt times the sources that are asked.
const DETACH_TOKENS: usize = 32 << 10;

thread_local! {
    /// The columns of the last payload: their memory serves the next one, up to a size.
    static COLUMNS: Cell<EventList> = Cell::default();
}
const MAX_KEPT: usize = 1 << 20;

/// Times are kept in tenths of a second, 32 bits of them: 13 years.
const TICKS: f64 = 10.0;

/// See `_core.pyi`.
#[pyclass(name = "PrefixIndex", module = "kvevents._core", frozen, subclass)]
pub struct PyPrefixIndex {
    inner: PrefixIndex,
    /// Life of the blocks of sources that never announce removals, in ticks.
    ttl: u32,
    /// A clock of the caller's own, and the time at which this index (or the one that was dumped) began.
    clock: Option<Py<PyAny>>,
    start: f64,
    began: Instant,
    /// What the one who made the dump wanted to remember.
    note: Vec<u8>,
    /// Names of tiers, as answers carry them.
    tiers: Mutex<Arc<Vec<String>>>,
}

fn ticks(seconds: f64) -> u32 {
    // Saturates; not a number is 0.
    (seconds * TICKS) as u32
}

fn features(mm: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<MmFeature>> {
    let Some(mm) = mm else { return Ok(Vec::new()) };
    let mut out = Vec::new();
    for (i, item) in mm.try_iter()?.enumerate() {
        out.push(feature(&item?, i)?);
    }
    out.sort_by_key(|f| f.offset);
    Ok(out)
}

impl PyPrefixIndex {
    fn now(&self, py: Python<'_>) -> PyResult<u32> {
        let time = match &self.clock {
            Some(clock) => clock.call0(py)?.extract::<f64>(py)?,
            None => self.began.elapsed().as_secs_f64(),
        };
        Ok(ticks(time - self.start))
    }

    /// The number of a source; `None` for one that was dropped.
    fn number(&self, source: &str, rank: u32) -> Option<usize> {
        self.inner.source(source, rank)
    }

    fn answer(&self, found: Vec<Match>) -> PyMatches {
        let mut tiers = self.tiers.lock().unwrap_or_else(PoisonError::into_inner);
        let most = found.iter().filter_map(|m| m.alone.last()).map(|&(tier, _)| tier).max();
        if most.is_some_and(|tier| tier >= tiers.len()) {
            *tiers = Arc::new(self.inner.tier_names());
        }
        PyMatches::new(found, Arc::clone(&tiers))
    }

    fn detach_find(&self, tokens: usize) -> bool {
        tokens.saturating_mul(self.inner.num_sources()) >= DETACH_TOKENS
    }
}

#[pymethods]
impl PyPrefixIndex {
    #[new]
    #[pyo3(signature = (*, seed = None, orphan_blocks = 65_536, expected_blocks = 65_536, digests = true,
        expires_s = 600.0, clock = None, data = None))]
    #[allow(clippy::too_many_arguments)] // the options, by keyword
    fn new(
        py: Python<'_>,
        seed: Option<u64>,
        orphan_blocks: usize,
        expected_blocks: usize,
        digests: bool,
        expires_s: f64,
        clock: Option<Py<PyAny>>,
        data: Option<&Bound<'_, PyBytes>>,
    ) -> PyResult<Self> {
        if expires_s.is_nan() || expires_s <= 0.0 {
            return Err(Exc::ConfigError.err(format!("expires_s: above 0 was expected, saw {expires_s}")));
        }
        let bounds = Bounds { orphan_blocks, expected_blocks };
        let (inner, then, note) = match data {
            Some(data) => {
                let bytes = data.as_bytes();
                py.detach(|| PrefixIndex::load(bytes, bounds, digests)).map_err(|e| index_error(&e))?
            }
            None => (PrefixIndex::new(seed.unwrap_or_else(random_seed), bounds, digests), 0, Vec::new()),
        };
        let time = clock.as_ref().map_or(Ok(0.0), |c| c.call0(py)?.extract::<f64>(py))?;
        Ok(Self {
            tiers: Mutex::new(Arc::new(inner.tier_names())),
            inner,
            note,
            ttl: ticks(expires_s).max(1),
            clock,
            start: time - f64::from(then) / TICKS,
            began: Instant::now(),
        })
    }

    #[pyo3(signature = (source, rank = 0, *, emits_removals = true, store_only = Vec::new(), first_seq = 0))]
    #[allow(clippy::needless_pass_by_value)] // as it is extracted
    fn add_source(
        &self,
        py: Python<'_>,
        source: &str,
        rank: u32,
        emits_removals: bool,
        store_only: Vec<String>,
        first_seq: u64,
    ) -> PyResult<()> {
        let now = self.now(py)?;
        let tiers = if emits_removals {
            self.inner.tiers_of(store_only.iter().map(String::as_str))
        } else {
            Expiry::ALL
        };
        let expiry = (tiers != 0).then_some(Expiry { ttl: self.ttl, tiers });
        py.detach(|| self.inner.add_source(source, rank, expiry, first_seq, now));
        Ok(())
    }

    #[pyo3(signature = (source, rank = None))]
    fn confirm(&self, source: &str, rank: Option<u32>) {
        self.numbers(source, rank).into_iter().for_each(|number| self.inner.confirm(number));
    }

    fn apply(
        &self,
        py: Python<'_>,
        source: &str,
        rank: u32,
        seq: Option<u64>,
        payload: &Bound<'_, PyBytes>,
    ) -> PyResult<usize> {
        let Some(number) = self.number(source, rank) else { return Ok(0) };
        let (bytes, now) = (payload.as_bytes(), self.now(py)?);
        let work = || -> Result<usize, DecodeError> {
            let mut events = COLUMNS.take();
            events.refill(|columns| codec::decode_into(bytes, false, columns))?;
            self.inner.apply(number, seq.map_or(Seq::None, Seq::Follows), &events, now);
            let n = events.len();
            if events.nbytes() <= MAX_KEPT {
                COLUMNS.set(events);
            }
            Ok(n)
        };
        let done = if bytes.len() < DETACH_PAYLOAD { work() } else { py.detach(work) };
        done.map_err(|e| {
            match seq {
                Some(seq) => self.inner.gap(number, seq),
                None => self.inner.mark_incomplete(number),
            }
            decode_error(py, &e)
        })
    }

    #[pyo3(signature = (source, rank, events, *, seq = None, checked = true))]
    fn apply_events(
        &self,
        py: Python<'_>,
        source: &str,
        rank: u32,
        events: &Bound<'_, PyAny>,
        seq: Option<u64>,
        checked: bool,
    ) -> PyResult<()> {
        let events = extract_events(events)?;
        let Some(number) = self.number(source, rank) else { return Ok(()) };
        let now = self.now(py)?;
        let seq = match seq {
            None => Seq::None,
            Some(seq) if checked => Seq::Follows(seq),
            Some(seq) => Seq::At(seq),
        };
        let work = || self.inner.apply(number, seq, &events, now);
        if events.nbytes() < DETACH_COLUMNS {
            work();
        } else {
            py.detach(work);
        }
        Ok(())
    }

    #[pyo3(signature = (source, rank, events, *, resume_seq = None))]
    fn apply_snapshot(
        &self,
        py: Python<'_>,
        source: &str,
        rank: u32,
        events: &Bound<'_, PyAny>,
        resume_seq: Option<u64>,
    ) -> PyResult<bool> {
        let events = extract_events(events)?;
        let Some(number) = self.number(source, rank) else { return Ok(false) };
        let now = self.now(py)?;
        Ok(py.detach(|| self.inner.apply_snapshot(number, resume_seq, &events, now)))
    }

    #[pyo3(signature = (token_ids = None, *, block_hashes = None, source = None, rank = 0, lora_name = None,
        cache_salt = None, mm = None))]
    #[allow(clippy::too_many_arguments)] // the parts of a question, by keyword
    fn find(
        &self,
        py: Python<'_>,
        token_ids: Option<&Bound<'_, PyAny>>,
        block_hashes: Option<&Bound<'_, PyAny>>,
        source: Option<&str>,
        rank: u32,
        lora_name: Option<&str>,
        cache_salt: Option<&str>,
        mm: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyMatches> {
        let now = self.now(py)?;
        match (token_ids, block_hashes, source) {
            (Some(token_ids), None, None) => {
                let (mut tokens, mm) = (Vec::new(), features(mm)?);
                read_tokens(token_ids, &mut tokens)?;
                let query = Query { tokens: &tokens, lora_name, cache_salt, mm: &mm };
                let work = || self.inner.find(&query, now);
                let found = if self.detach_find(tokens.len()) { py.detach(work) } else { work() };
                Ok(self.answer(found))
            }
            (None, Some(block_hashes), Some(source)) => self.find_hashes(source, rank, block_hashes, now),
            _ => Err(Exc::EventTypeError.err(
                "find() takes token_ids, to ask all sources, or block_hashes with source=, whose hashes they are",
            )),
        }
    }

    #[pyo3(signature = (prompts, *, lora_name = None, cache_salt = None))]
    fn find_many<'py>(
        &self,
        py: Python<'py>,
        prompts: &Bound<'py, PyAny>,
        lora_name: Option<&str>,
        cache_salt: Option<&str>,
    ) -> PyResult<Bound<'py, PyList>> {
        let (mut tokens, mut ends) = (Vec::new(), Vec::new());
        for prompt in prompts.try_iter()? {
            read_tokens(&prompt?, &mut tokens)?;
            ends.push(tokens.len());
        }
        let now = self.now(py)?;
        let found: Vec<Vec<Match>> = py.detach(|| {
            let mut start = 0;
            let mut one = |&end: &usize| {
                let tokens = &tokens[start..end];
                start = end;
                self.inner.find(&Query { tokens, lora_name, cache_salt, mm: &[] }, now)
            };
            ends.iter().map(&mut one).collect()
        });
        PyList::new(py, found.into_iter().map(|f| self.answer(f)))
    }

    #[pyo3(signature = (source, rank, token_ids, ttl_s, *, lora_name = None, cache_salt = None, mm = None))]
    #[allow(clippy::too_many_arguments)] // as in find
    fn expect(
        &self,
        py: Python<'_>,
        source: &str,
        rank: u32,
        token_ids: &Bound<'_, PyAny>,
        ttl_s: f64,
        lora_name: Option<&str>,
        cache_salt: Option<&str>,
        mm: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<usize> {
        let (mut tokens, mm) = (Vec::new(), features(mm)?);
        read_tokens(token_ids, &mut tokens)?;
        let Some(number) = self.number(source, rank) else { return Ok(0) };
        let now = self.now(py)?;
        let query = Query { tokens: &tokens, lora_name, cache_salt, mm: &mm };
        let until = now.saturating_add(ticks(ttl_s));
        Ok(py.detach(|| self.inner.expect(number, &query, until, now)))
    }

    #[pyo3(signature = (source, rank = 0, *, owner = false))]
    fn digest<'py>(
        &self,
        py: Python<'py>,
        source: &str,
        rank: u32,
        owner: bool,
    ) -> Option<Bound<'py, PyBytes>> {
        let number = self.inner.known_source(source, rank, owner)?;
        self.inner.digest(number).map(|d| PyBytes::new(py, &d))
    }

    #[pyo3(signature = (source, rank = None, *, last_seq = None))]
    fn mark_incomplete(&self, source: &str, rank: Option<u32>, last_seq: Option<u64>) -> bool {
        let numbers = self.numbers(source, rank);
        for &number in &numbers {
            match last_seq {
                Some(last) => self.inner.gap(number, last),
                None => self.inner.mark_incomplete(number),
            }
        }
        !numbers.is_empty()
    }

    #[pyo3(signature = (source, rank = None))]
    fn reset(&self, py: Python<'_>, source: &str, rank: Option<u32>) {
        py.detach(|| self.numbers(source, rank).into_iter().for_each(|number| self.inner.reset(number)));
    }

    #[pyo3(signature = (source, rank = None, *, owner = false))]
    fn drop(&self, py: Python<'_>, source: &str, rank: Option<u32>, owner: bool) -> bool {
        py.detach(|| {
            let numbers = if owner {
                self.inner.known_source(source, 0, true).into_iter().collect()
            } else {
                self.numbers(source, rank)
            };
            numbers.into_iter().filter(|&number| self.inner.drop_source(number)).count() > 0
        })
    }

    #[pyo3(signature = (source, tier, rank = 0, *, owner = false))]
    fn clear_tier(
        &self,
        py: Python<'_>,
        source: &str,
        tier: &str,
        rank: u32,
        owner: bool,
    ) -> PyResult<usize> {
        let names = self.inner.tier_names();
        let Some(t) = names.iter().position(|n| n == tier) else {
            let known = names.join(", ");
            return Err(Exc::ConfigError.err(format!("tier: one of {known} was expected, saw {tier:?}")));
        };
        let number = self.inner.known_source(source, rank, owner);
        Ok(py.detach(|| number.map_or(0, |n| self.inner.clear_tier(n, t))))
    }

    fn expire(&self, py: Python<'_>) -> PyResult<usize> {
        let now = self.now(py)?;
        Ok(py.detach(|| self.inner.expire(now)))
    }

    fn to_tiers(&self) -> Vec<String> {
        self.inner.tier_names()
    }

    fn to_stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let now = self.now(py)?;
        let out = PyList::empty(py);
        for s in py.detach(|| self.inner.stats()) {
            let d = PyDict::new(py);
            d.set_item("source", &s.id.name)?;
            d.set_item("rank", s.id.rank)?;
            d.set_item("owner", s.id.is_owner)?;
            d.set_item("blocks", s.blocks)?;
            d.set_item("nbytes", s.nbytes)?;
            d.set_item("waiting", s.waiting)?;
            d.set_item("complete", s.complete)?;
            d.set_item("last_seq", s.last_seq)?;
            d.set_item("idle_s", f64::from(now.saturating_sub(s.last_seen)) / TICKS)?;
            for (name, count) in s.counters.items() {
                d.set_item(name, count)?;
            }
            out.append(d)?;
        }
        Ok(out)
    }

    #[pyo3(signature = (note = None))]
    fn to_dump<'py>(&self, py: Python<'py>, note: Option<&[u8]>) -> PyResult<Bound<'py, PyBytes>> {
        let now = self.now(py)?;
        let bytes = py.detach(|| self.inner.dump(now, note.unwrap_or_default()));
        Ok(PyBytes::new(py, &bytes))
    }

    #[getter]
    fn note<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.note)
    }
}

impl PyPrefixIndex {
    fn numbers(&self, source: &str, rank: Option<u32>) -> Vec<usize> {
        match rank {
            Some(rank) => self.inner.known_source(source, rank, false).into_iter().collect(),
            None => self.inner.ranks_of(source),
        }
    }

    fn find_hashes(
        &self,
        source: &str,
        rank: u32,
        block_hashes: &Bound<'_, PyAny>,
        now: u32,
    ) -> PyResult<PyMatches> {
        let mut column = HashColumn::default();
        if let Err(bad) = raw::read_hashes(block_hashes, None, 32, &mut column)? {
            return Err(hash_error(&bad));
        }
        let hashes: Vec<HashRef<'_>> = match column.width {
            0 => column.ints.iter().map(|&h| HashRef::Uint(h)).collect(),
            w => column.bytes.chunks_exact(w).map(HashRef::Bytes).collect(),
        };
        let number = self.inner.known_source(source, rank, false);
        let found = number.and_then(|n| self.inner.find_hashes(n, &hashes, now));
        Ok(self.answer(found.into_iter().collect()))
    }
}

/// From the hasher's random keys, which come from the system.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0)
}
