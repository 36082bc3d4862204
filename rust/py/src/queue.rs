//! `EventQueue`; see `_core.pyi`.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvevents_core::events::{
    Attrs, CommonParts, EventData, EventList, EventView, ExtraKeys, Hashes, StoredParts, Tokens,
};
use kvevents_core::hash::HashRef;
use kvevents_core::msgpack;
use kvevents_core::pool::EventQueue;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMapping, PyString};

use crate::errors::{Exc, events_error};
use crate::events::{PyEventList, extract_events, push_event, to_msgpack};
use crate::raw::{self, OwnedHash};

/// The bounded queue of events; see `_core.pyi`.
#[pyclass(name = "EventQueue", module = "kvevents._core", frozen, subclass)]
pub struct PyEventQueue {
    inner: Mutex<EventQueue>,
    max_queued_events: usize,
}

fn bad(field: &str, what: &str) -> PyErr {
    Exc::EventError.err(format!("{field}: {what}"))
}

fn element(name: &str, what: &str, obj: &Bound<'_, PyAny>, read: raw::Elements) -> PyResult<()> {
    match read {
        Ok(Ok(())) => Ok(()),
        Ok(Err(b)) => {
            let kind = if b.wrong_type { Exc::EventTypeError } else { Exc::EventError };
            Err(kind.err(format!("{name}[{}]: {what} was expected, saw {}", b.index, b.seen)))
        }
        Err(e) if e.is_instance_of::<pyo3::exceptions::PyTypeError>(obj.py()) => {
            Err(Exc::EventTypeError.err(format!("{name}: {}", e.value(obj.py()))))
        }
        Err(e) => Err(e),
    }
}

/// Hashes of any one form; lists of several forms are read one by one.
enum AnyHashes {
    Column(raw::HashColumn),
    Mixed(Vec<OwnedHash>),
}

fn read_any(obj: &Bound<'_, PyAny>) -> PyResult<AnyHashes> {
    let mut column = raw::HashColumn::default();
    if matches!(raw::read_hashes(obj, None, 32, &mut column), Ok(Ok(()))) && !column.negative {
        return Ok(AnyHashes::Column(column));
    }
    if obj.is_instance_of::<PyString>() {
        return Err(Exc::EventTypeError
            .err(format!("block_hashes: a list of hashes was expected, saw {}", raw::preview(obj))));
    }
    let mut hashes = Vec::new();
    for (i, item) in obj.try_iter()?.enumerate() {
        hashes.push(raw::read_hash(&item?).map_err(|what| bad(&format!("block_hashes[{i}]"), &what))?);
    }
    Ok(AnyHashes::Mixed(hashes))
}

fn as_ref(h: &OwnedHash) -> HashRef<'_> {
    match h {
        OwnedHash::Uint(v) => HashRef::Uint(*v),
        OwnedHash::Int(v) => HashRef::Int(*v),
        OwnedHash::Bytes(b) => HashRef::Bytes(b),
    }
}

impl AnyHashes {
    fn with<T>(&self, f: impl FnOnce(usize, Hashes<'_>) -> T) -> T {
        match self {
            Self::Column(c) if c.width == 0 => f(c.ints.len(), Hashes::Uint(&c.ints)),
            Self::Column(c) => f(c.len(), Hashes::Bytes { width: c.width, data: &c.bytes }),
            Self::Mixed(v) => {
                let refs: Vec<HashRef<'_>> = v.iter().map(as_ref).collect();
                f(refs.len(), Hashes::Mixed(&refs))
            }
        }
    }
}

fn read_metadata(metadata: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Vec<u8>>> {
    let Some(m) = metadata else { return Ok(None) };
    let Ok(mapping) = m.cast::<PyMapping>() else {
        return Err(Exc::EventTypeError
            .err(format!("metadata: a mapping or None was expected, saw {}", raw::preview(m))));
    };
    let copy = PyDict::new(m.py());
    copy.update(mapping)?;
    to_msgpack(copy.as_any())?.map(Some).map_err(|what| bad("metadata", &what))
}

impl PyEventQueue {
    fn lock(&self) -> MutexGuard<'_, EventQueue> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push_all<'a>(&self, views: impl Iterator<Item = EventView<'a>>) -> PyResult<()> {
        let mut queue = self.lock();
        for view in views {
            queue.push_view(view).map_err(|e| events_error(&e))?;
        }
        Ok(())
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
        let hashes = read_any(block_hashes)?;
        let parent = parent_block_hash
            .map(|p| raw::read_hash(p).map_err(|what| bad("parent_block_hash", &what)))
            .transpose()?;
        let mut tokens = Vec::new();
        element("token_ids", "0 to 2^32-1", token_ids, raw::read_u32s(token_ids, None, &mut tokens))?;
        let extra = extra_keys
            .filter(|k| !k.is_none())
            .map(|k| to_msgpack(k)?.map_err(|what| bad("extra_keys", &what)))
            .transpose()?;
        let metadata = read_metadata(metadata)?;
        let text = |s: Option<&str>| s.map(Arc::from);
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
        hashes.with(|n, hashes| {
            if n == 0 {
                return Err(bad("block_hashes", "at least one hash was expected, saw none"));
            }
            if block_size == 0 || n.checked_mul(block_size as usize) != Some(tokens.len()) {
                return Err(bad(
                    "token_ids",
                    &format!("{n} blocks of {block_size} tokens were expected, saw {} ids", tokens.len()),
                ));
            }
            let extra_keys = match &extra {
                None => ExtraKeys::Absent,
                Some(raw) => match msgpack::array_header(raw, 0) {
                    Some((m, at)) if m == n && raw[at..].iter().all(|&b| b == 0xc0) => ExtraKeys::AllNil,
                    Some((m, _)) if m == n => ExtraKeys::Raw(raw),
                    _ => return Err(bad("extra_keys", &format!("a list of {n} entries was expected"))),
                },
            };
            let parts = StoredParts {
                hashes,
                parent: parent.as_ref().map(as_ref),
                tokens: Tokens::Plain(&tokens),
                extra_keys,
                lookahead: None,
                common: CommonParts { metadata: metadata.as_deref(), other: None },
            };
            self.lock().push_stored(&attrs, &parts).map_err(|e| events_error(&e))
        })
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
        let hashes = read_any(block_hashes)?;
        let metadata = read_metadata(metadata)?;
        let attrs = Attrs {
            group_idx,
            medium: medium.map(Arc::from),
            locality: locality.map(Arc::from),
            ownership: ownership.map(Arc::from),
            ..Attrs::default()
        };
        hashes.with(|n, hashes| {
            if n == 0 {
                return Err(bad("block_hashes", "at least one hash was expected, saw none"));
            }
            let common = CommonParts { metadata: metadata.as_deref(), other: None };
            self.lock().push_removed(&attrs, hashes, &common).map_err(|e| events_error(&e))
        })
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
        self.push_all(EventList::from(data).iter())
    }

    fn extend(&self, events: &Bound<'_, PyAny>) -> PyResult<()> {
        self.push_all(extract_events(events)?.iter())
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
