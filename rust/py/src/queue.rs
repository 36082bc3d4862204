//! `EventQueue`; see `_core.pyi`.

use std::sync::{Mutex, MutexGuard, PoisonError};

use kvevents_core::events::{Attrs, CommonParts, EventData, EventList, Hashes};
use kvevents_core::pool::EventQueue;
use pyo3::prelude::*;

use crate::errors::{Exc, events_error};
use crate::event_args::{Removed, Stored, StoredLists, read_metadata, text};
use crate::event_reader::{extract_events, push_event};
use crate::events::PyEventList;

/// The bounded queue of events; see `_core.pyi`.
#[pyclass(name = "EventQueue", module = "kvevents._core", frozen, subclass)]
pub struct PyEventQueue {
    inner: Mutex<EventQueue>,
    max_queued_events: usize,
}

impl PyEventQueue {
    fn lock(&self) -> MutexGuard<'_, EventQueue> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push_all(&self, events: &EventList) -> PyResult<()> {
        self.lock().extend(events).map_err(|e| events_error(&e))
    }
}

#[pymethods]
impl PyEventQueue {
    #[new]
    #[pyo3(signature = (*, max_queued_events = 100_000))]
    fn new(max_queued_events: i64) -> PyResult<Self> {
        let n = usize::try_from(max_queued_events).ok().filter(|&n| n > 0).ok_or_else(|| {
            Exc::ConfigError
                .err(format!("max_queued_events: at least 1 was expected, saw {max_queued_events}"))
        })?;
        Ok(Self { inner: Mutex::new(EventQueue::new(n)), max_queued_events: n })
    }

    #[pyo3(signature = (block_hashes, parent_block_hash, token_ids, block_size, *, lora_id = None,
        medium = Some("GPU"), lora_name = None, extra_keys = None, group_idx = None,
        kv_cache_spec_kind = None, kv_cache_spec_sliding_window = None, locality = None, ownership = None,
        session_id = None, cache_salt = None, metadata = None))]
    #[allow(clippy::too_many_arguments)] // the fields of an event, by keyword
    fn push_stored(
        &self,
        block_hashes: &Bound<'_, PyAny>,
        parent_block_hash: Option<&Bound<'_, PyAny>>,
        token_ids: &Bound<'_, PyAny>,
        block_size: u32,
        lora_id: Option<i64>,
        medium: Option<&str>,
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
    ) -> PyResult<()> {
        let attrs = Attrs {
            block_size,
            lora_id,
            group_idx,
            sliding_window: kv_cache_spec_sliding_window,
            medium: text(medium),
            lora_name: text(lora_name),
            spec_kind: text(kv_cache_spec_kind),
            locality: text(locality),
            ownership: text(ownership),
            session_id: text(session_id),
            cache_salt: text(cache_salt),
        };
        let lists =
            StoredLists { block_hashes, parent_block_hash, token_ids, extra_keys, metadata, blocks: None };
        let stored = Stored::read(&lists, attrs)?;
        stored.with(|attrs, parts| self.lock().push_stored(attrs, parts)).map_err(|e| events_error(&e))
    }

    #[pyo3(signature = (block_hashes, *, medium = Some("GPU"), group_idx = None, locality = None,
        ownership = None, metadata = None))]
    fn push_removed(
        &self,
        block_hashes: &Bound<'_, PyAny>,
        medium: Option<&str>,
        group_idx: Option<i64>,
        locality: Option<&str>,
        ownership: Option<&str>,
        metadata: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let attrs = Attrs {
            group_idx,
            medium: text(medium),
            locality: text(locality),
            ownership: text(ownership),
            ..Attrs::default()
        };
        let removed = Removed::read(block_hashes, metadata, attrs)?;
        let push = |attrs: &Attrs, hashes: Hashes<'_>, common: &CommonParts<'_>| {
            self.lock().push_removed(attrs, hashes, common)
        };
        removed.with(push).map_err(|e| events_error(&e))
    }

    #[pyo3(signature = (*, metadata = None))]
    fn push_cleared(&self, metadata: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let metadata = read_metadata(metadata)?;
        let common = CommonParts { metadata: metadata.as_deref(), other: None };
        self.lock().push_cleared(&common).map_err(|e| events_error(&e))
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
        self.lock().len()
    }

    #[getter]
    fn overflows(&self) -> u64 {
        self.lock().losses().0
    }

    #[getter]
    fn dropped_events(&self) -> u64 {
        self.lock().losses().1
    }

    #[getter]
    fn max_queued_events(&self) -> usize {
        self.max_queued_events
    }

    fn __repr__(&self) -> String {
        let queue = self.lock();
        format!(
            "EventQueue({} of {} events, {} overflows)",
            queue.len(),
            self.max_queued_events,
            queue.losses().0
        )
    }
}
