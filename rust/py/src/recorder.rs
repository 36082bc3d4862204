//! `KVEventRecorder`: what a connector's worker half records; see `_core.pyi`.

use std::ffi::CString;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use kvevents_core::events::{Attrs, CommonParts, EventData, EventList, Hashes};
use kvevents_core::record::{Done, Medium, Recorder, read_medium};
use pyo3::exceptions::PyUserWarning;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::errors::{Exc, events_error, record_error};
use crate::event_args::{Removed, Stored, StoredLists, read_metadata, text};
use crate::event_reader::{extract_events, push_event};
use crate::events::PyEventList;
use crate::raw;

/// Records events and stores that finish later; see `_core.pyi`.
#[pyclass(name = "KVEventRecorder", module = "kvevents._core", frozen)]
pub struct PyKVEventRecorder {
    inner: Mutex<Recorder>,
}

impl PyKVEventRecorder {
    fn lock(&self) -> MutexGuard<'_, Recorder> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push_all(&self, events: &EventList) -> PyResult<()> {
        self.lock().queue().extend(events).map_err(|e| events_error(&e))
    }
}

fn at_least_one(name: &str, n: i64) -> PyResult<usize> {
    usize::try_from(n)
        .ok()
        .filter(|&n| n > 0)
        .ok_or_else(|| Exc::ConfigError.err(format!("{name}: at least 1 was expected, saw {n}")))
}

/// The medium as it goes out: a warning where it was meant otherwise, an error where it means nothing.
struct Tier(Option<Arc<str>>);

impl Tier {
    fn cpu() -> Self {
        Self::named("CPU")
    }

    /// The usual names are shared: a store allocates nothing for them.
    fn named(name: &str) -> Self {
        static USUAL: LazyLock<[Arc<str>; 3]> = LazyLock::new(|| ["CPU", "STORAGE", "GPU"].map(Arc::from));
        let usual = USUAL.iter().find(|usual| &***usual == name);
        Self(Some(usual.cloned().unwrap_or_else(|| Arc::from(name))))
    }
}

impl<'py> FromPyObject<'_, 'py> for Tier {
    type Error = PyErr;

    fn extract(medium: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if medium.is_none() {
            return Ok(Self(None));
        }
        let Ok(name) = medium.cast::<PyString>() else {
            return Err(Exc::EventTypeError.err(format!(
                "medium: the name of a tier was expected ('GPU', 'CPU', 'STORAGE'), saw {}",
                raw::preview(&medium)
            )));
        };
        let name = name.to_cow()?;
        match read_medium(&name).map_err(|e| record_error(&e))? {
            Medium::Canonical(name) => Ok(Self::named(name)),
            Medium::Means(tier) => {
                let message =
                    format!("medium {name:?} is announced as {tier:?}; give the tier's name in upper case");
                let py = medium.py();
                let category = py.get_type::<PyUserWarning>();
                PyErr::warn(py, &category, &CString::new(message)?, 1)?;
                Ok(Self::named(tier))
            }
        }
    }
}

/// Blocks `start..end` of the lists; `None` for all of them.
fn range(
    start: usize,
    end: Option<usize>,
    hashes: &Bound<'_, PyAny>,
) -> PyResult<Option<std::ops::Range<usize>>> {
    if start == 0 && end.is_none() {
        return Ok(None);
    }
    let len = hashes.len()?;
    let end = end.unwrap_or(len);
    if start > end || end > len {
        return Err(Exc::EventError.err(format!("blocks {start} to {end} of {len} hashes")));
    }
    Ok(Some(start..end))
}

#[pymethods]
impl PyKVEventRecorder {
    #[new]
    #[pyo3(signature = (*, max_queued_events = 100_000, max_open_stores = 100_000))]
    fn new(max_queued_events: i64, max_open_stores: i64) -> PyResult<Self> {
        let events = at_least_one("max_queued_events", max_queued_events)?;
        let open = at_least_one("max_open_stores", max_open_stores)?;
        Ok(Self { inner: Mutex::new(Recorder::new(events, open)) })
    }

    #[pyo3(signature = (block_hashes, parent_block_hash, token_ids, block_size, *, start = 0, end = None,
        lora_id = None, medium = Tier::cpu(), lora_name = None, extra_keys = None, group_idx = None,
        kv_cache_spec_kind = None, kv_cache_spec_sliding_window = None, locality = None, ownership = None,
        session_id = None, cache_salt = None, metadata = None))]
    #[allow(clippy::too_many_arguments)] // the fields of an event, by keyword
    fn begin_store(
        &self,
        block_hashes: &Bound<'_, PyAny>,
        parent_block_hash: Option<&Bound<'_, PyAny>>,
        token_ids: &Bound<'_, PyAny>,
        block_size: u32,
        start: usize,
        end: Option<usize>,
        lora_id: Option<i64>,
        medium: Tier,
        lora_name: Option<&str>,
        extra_keys: Option<&Bound<'_, PyAny>>,
        group_idx: Option<i64>,
        kv_cache_spec_kind: Option<&str>,
        kv_cache_spec_sliding_window: Option<i64>,
        locality: Option<&str>,
        ownership: Option<&str>,
        session_id: Option<&str>,
        cache_salt: Option<&str>,
        metadata: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<u64> {
        let attrs = Attrs {
            block_size,
            lora_id,
            group_idx,
            sliding_window: kv_cache_spec_sliding_window,
            medium: medium.0,
            lora_name: text(lora_name),
            spec_kind: text(kv_cache_spec_kind),
            locality: text(locality),
            ownership: text(ownership),
            session_id: text(session_id),
            cache_salt: text(cache_salt),
        };
        let blocks = range(start, end, block_hashes)?;
        let lists = StoredLists { block_hashes, parent_block_hash, token_ids, extra_keys, metadata, blocks };
        let stored = Stored::read(&lists, attrs)?;
        stored.with(|attrs, parts| self.lock().begin(attrs, parts)).map_err(|e| record_error(&e))
    }

    #[pyo3(signature = (ticket, stored = None))]
    fn complete(&self, ticket: u64, stored: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let mut positions = Vec::new();
        let done = match stored {
            None => Done::All,
            Some(n) => match n.extract::<usize>() {
                Ok(n) => Done::First(n),
                Err(_) => {
                    if let Err(bad) = raw::read_u32s(n, None, &mut positions)? {
                        return Err(Exc::EventError.err(format!(
                            "stored[{}]: a position of a block was expected, saw {}",
                            bad.index, bad.seen
                        )));
                    }
                    Done::At(&positions)
                }
            },
        };
        self.lock().complete(ticket, done).map_err(|e| record_error(&e))
    }

    fn fail(&self, ticket: u64) -> PyResult<()> {
        self.lock().fail(ticket).map_err(|e| record_error(&e))
    }

    #[pyo3(signature = (block_hashes, *, medium = Tier::cpu(), group_idx = None, locality = None,
        ownership = None, metadata = None))]
    fn removed(
        &self,
        block_hashes: &Bound<'_, PyAny>,
        medium: Tier,
        group_idx: Option<i64>,
        locality: Option<&str>,
        ownership: Option<&str>,
        metadata: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let attrs = Attrs {
            group_idx,
            medium: medium.0,
            locality: text(locality),
            ownership: text(ownership),
            ..Attrs::default()
        };
        let removed = Removed::read(block_hashes, metadata, attrs)?;
        let push = |attrs: &Attrs, hashes: Hashes<'_>, common: &CommonParts<'_>| {
            self.lock().queue().push_removed(attrs, hashes, common)
        };
        removed.with(push).map_err(|e| events_error(&e))
    }

    #[pyo3(signature = (*, metadata = None))]
    fn cleared(&self, metadata: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let metadata = read_metadata(metadata)?;
        let common = CommonParts { metadata: metadata.as_deref(), other: None };
        self.lock().queue().push_cleared(&common).map_err(|e| events_error(&e))
    }

    fn append(&self, event: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut data = EventData::new();
        push_event(event, 0, &mut data)?;
        self.push_all(&data.into())
    }

    fn extend(&self, events: &Bound<'_, PyAny>) -> PyResult<()> {
        self.push_all(&extract_events(events)?)
    }

    fn take(&self) -> PyEventList {
        self.lock().take().into()
    }

    fn __len__(&self) -> usize {
        self.lock().queue().len()
    }

    #[getter]
    fn open_stores(&self) -> usize {
        self.lock().open()
    }

    #[getter]
    fn dropped_events(&self) -> u64 {
        self.lock().queue().losses().1
    }

    fn __repr__(&self) -> String {
        let mut recorder = self.lock();
        let (open, waiting) = (recorder.open(), recorder.queue().len());
        format!("KVEventRecorder({waiting} events, {open} open stores)")
    }
}
