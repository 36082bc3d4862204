//! `EventList`, and the only place where Python event objects are made.

use kvevents_core::events::{EventKind, EventList, EventView, ExtraKeys, Origin, Rare, Tokens};
use kvevents_core::hash::HashRef;
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::{PyIndexError, PyOverflowError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyList, PySlice, PyTuple, PyType};
use std::sync::Arc;

use crate::errors::events_error;
use crate::event_reader::{extract_events, single};
use crate::raw;

/// What is looked up in Python once.
pub struct Classes {
    pub stored: Py<PyType>,
    pub removed: Py<PyType>,
    pub cleared: Py<PyType>,
    skipped: Py<PyType>,
    pub encode: Py<PyAny>,
    decode: Py<PyAny>,
    freeze: Py<PyAny>,
}

pub fn classes(py: Python<'_>) -> PyResult<&'static Classes> {
    static CLASSES: PyOnceLock<Classes> = PyOnceLock::new();
    CLASSES.get_or_try_init(py, || {
        let events = py.import("kvevents.events")?;
        let class = |name: &str| -> PyResult<Py<PyType>> {
            Ok(events.getattr(name)?.cast_into::<PyType>()?.unbind())
        };
        let msgpack = py.import("msgspec.msgpack")?;
        Ok(Classes {
            stored: class("BlockStored")?,
            removed: class("BlockRemoved")?,
            cleared: class("AllBlocksCleared")?,
            skipped: class("Skipped")?,
            encode: msgpack.getattr("encode")?.unbind(),
            decode: msgpack.getattr("decode")?.unbind(),
            freeze: events.getattr("_freeze")?.unbind(),
        })
    })
}

// ---------------------------------------------------------------- columns to Python objects

/// A hash as Python sees it.
pub fn hash_to_py<'py>(py: Python<'py>, h: HashRef<'_>) -> PyResult<Bound<'py, PyAny>> {
    match h {
        HashRef::Uint(v) => v.into_bound_py_any(py),
        HashRef::Int(v) => v.into_bound_py_any(py),
        HashRef::Bytes(b) => Ok(PyBytes::new(py, b).into_any()),
    }
}

fn str_to_py<'py>(py: Python<'py>, s: Option<&Arc<str>>) -> PyResult<Bound<'py, PyAny>> {
    s.map(|s| &**s).into_bound_py_any(py)
}

/// A value that is kept as msgpack bytes; `freeze` makes tuples of the lists in it.
pub fn rare_to_py<'py>(py: Python<'py>, raw: Option<&[u8]>, freeze: bool) -> PyResult<Bound<'py, PyAny>> {
    let Some(raw) = raw else { return Ok(py.None().into_bound(py)) };
    let c = classes(py)?;
    let value = c.decode.bind(py).call1((PyBytes::new(py, raw),))?;
    if freeze { c.freeze.bind(py).call1((value,)) } else { Ok(value) }
}

/// The Struct of one event.
pub fn event_to_py<'py>(py: Python<'py>, v: EventView<'_>) -> PyResult<Bound<'py, PyAny>> {
    let c = classes(py)?;
    let a = v.attrs();
    let event = match v.kind() {
        EventKind::Cleared => c.cleared.bind(py).call0()?,
        EventKind::Removed => {
            let hashes = hashes_to_py(py, &v)?;
            c.removed.bind(py).call1((
                hashes,
                str_to_py(py, a.medium.as_ref())?,
                a.group_idx,
                str_to_py(py, a.locality.as_ref())?,
                str_to_py(py, a.ownership.as_ref())?,
            ))?
        }
        EventKind::Stored => {
            let parent = v.parent().map(|h| hash_to_py(py, h)).transpose()?;
            let tokens = match v.tokens() {
                Tokens::Plain(t) => PyList::new(py, t)?.into_any(),
                Tokens::Wide(raw) => rare_to_py(py, Some(raw), false)?,
            };
            let extra = match v.extra_keys() {
                ExtraKeys::Absent => py.None().into_bound(py),
                ExtraKeys::AllNil => PyList::new(py, vec![None::<bool>; v.num_hashes()])?.into_any(),
                ExtraKeys::Raw(raw) => rare_to_py(py, Some(raw), true)?,
            };
            let args: [Bound<'py, PyAny>; 15] = [
                hashes_to_py(py, &v)?.into_any(),
                parent.into_bound_py_any(py)?,
                tokens,
                a.block_size.into_bound_py_any(py)?,
                a.lora_id.into_bound_py_any(py)?,
                str_to_py(py, a.medium.as_ref())?,
                str_to_py(py, a.lora_name.as_ref())?,
                extra,
                a.group_idx.into_bound_py_any(py)?,
                str_to_py(py, a.spec_kind.as_ref())?,
                a.sliding_window.into_bound_py_any(py)?,
                str_to_py(py, a.locality.as_ref())?,
                str_to_py(py, a.ownership.as_ref())?,
                str_to_py(py, a.session_id.as_ref())?,
                rare_to_py(py, v.rare(Rare::Lookahead), false)?,
            ];
            let event = c.stored.bind(py).call1(PyTuple::new(py, args)?)?;
            if let Some(salt) = &a.cache_salt {
                event.setattr(intern!(py, "cache_salt"), &**salt)?;
            }
            event
        }
    };
    if v.has_rare() {
        if let Some(raw) = v.rare(Rare::Metadata) {
            event.setattr(intern!(py, "metadata"), rare_to_py(py, Some(raw), false)?)?;
        }
        if let Some(raw) = v.rare(Rare::Other) {
            event.setattr(intern!(py, "other_fields"), rare_to_py(py, Some(raw), false)?)?;
        }
    }
    Ok(event)
}

fn hashes_to_py<'py>(py: Python<'py>, v: &EventView<'_>) -> PyResult<Bound<'py, PyList>> {
    let hashes = v.hashes().map(|h| hash_to_py(py, h)).collect::<PyResult<Vec<_>>>()?;
    PyList::new(py, hashes)
}

// ---------------------------------------------------------------- the class

/// Events in columns; see `_core.pyi`.
#[pyclass(name = "EventList", module = "kvevents._core", frozen, sequence, from_py_object)]
#[derive(Clone)]
pub struct PyEventList {
    pub inner: EventList,
}

impl From<EventList> for PyEventList {
    fn from(inner: EventList) -> Self {
        Self { inner }
    }
}

#[pymethods]
impl PyEventList {
    #[new]
    #[pyo3(signature = (events = None, /))]
    fn new(events: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let inner = events.map(extract_events).transpose()?.unwrap_or_default();
        Ok(Self { inner })
    }

    fn same_blocks(&self, other: &Self) -> bool {
        self.inner.same_blocks(&other.inner)
    }

    fn to_originals<'py>(
        &self,
        py: Python<'py>,
        columns: &Self,
        events: &Bound<'py, PyList>,
    ) -> PyResult<Bound<'py, PyList>> {
        let out = PyList::empty(py);
        for (i, row) in self.inner.rows_in(&columns.inner).into_iter().enumerate() {
            out.append(match row {
                Some(row) => events.get_item(row)?,
                None => event_to_py(py, self.inner.view(i))?,
            })?;
        }
        Ok(out)
    }

    fn __len__(&self) -> usize {
        self.inner.len()
    }

    fn __getitem__<'py>(&self, py: Python<'py>, key: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let n = self.inner.len();
        if let Ok(slice) = key.cast::<PySlice>() {
            let i = slice.indices(n.cast_signed())?;
            if i.step == 1 {
                let (from, to) = (i.start.cast_unsigned(), i.stop.max(i.start).cast_unsigned());
                return Self::from(self.inner.slice(from..to)).into_bound_py_any(py);
            }
            let rows = (0..i.slicelength).map(|k| (i.start + k.cast_signed() * i.step).cast_unsigned());
            let picked = self.inner.select(rows).map_err(|e| events_error(&e))?;
            return Self::from(picked).into_bound_py_any(py);
        }
        let i: isize = key.extract().map_err(|e: PyErr| {
            let too_large = e.is_instance_of::<PyOverflowError>(py);
            if too_large { PyIndexError::new_err(format!("event {} of {n}", raw::preview(key))) } else { e }
        })?;
        let at = if i < 0 { i + n.cast_signed() } else { i };
        if at < 0 || at >= n.cast_signed() {
            return Err(PyIndexError::new_err(format!("event {i} of {n}")));
        }
        event_to_py(py, self.inner.view(at.cast_unsigned()))
    }

    fn __iter__(slf: &Bound<'_, Self>) -> PyEventIter {
        PyEventIter { list: slf.get().inner.clone(), next: std::sync::atomic::AtomicUsize::new(0) }
    }

    fn __eq__<'py>(&self, py: Python<'py>, other: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let other = if let Ok(o) = other.cast::<Self>() {
            o.get().inner.clone()
        } else if other.is_instance_of::<PyList>() || other.is_instance_of::<PyTuple>() {
            // A list with something that is no event is simply not equal.
            match extract_events(other) {
                Ok(o) => o,
                Err(_) => return false.into_bound_py_any(py),
            }
        } else {
            return Ok(py.NotImplemented().into_bound(py));
        };
        self.inner.same(&other).into_bound_py_any(py)
    }

    fn __add__<'py>(&self, py: Python<'py>, other: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        if other.cast::<Self>().is_err()
            && !other.is_instance_of::<PyList>()
            && !other.is_instance_of::<PyTuple>()
        {
            return Ok(py.NotImplemented().into_bound(py));
        }
        let joined = self.inner.concat(&extract_events(other)?).map_err(|e| events_error(&e))?;
        Self::from(joined).into_bound_py_any(py)
    }

    fn __radd__<'py>(&self, py: Python<'py>, other: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        if !other.is_instance_of::<PyList>() && !other.is_instance_of::<PyTuple>() {
            return Ok(py.NotImplemented().into_bound(py));
        }
        let joined = extract_events(other)?.concat(&self.inner).map_err(|e| events_error(&e))?;
        Self::from(joined).into_bound_py_any(py)
    }

    #[pyo3(signature = (value, start = 0, stop = None, /))]
    fn index(&self, value: &Bound<'_, PyAny>, start: isize, stop: Option<isize>) -> PyResult<usize> {
        let n = self.inner.len().cast_signed();
        let clamp = |i: isize| if i < 0 { (i + n).max(0) } else { i.min(n) }.cast_unsigned();
        let stop = clamp(stop.unwrap_or(n));
        let wanted = single(value);
        (clamp(start)..stop)
            .find(|&i| wanted.as_ref().is_some_and(|w| self.inner.slice(i..i + 1).same(w)))
            .ok_or_else(|| PyValueError::new_err(format!("{} is not in the list", raw::preview(value))))
    }

    #[pyo3(signature = (value, /))]
    fn count(&self, value: &Bound<'_, PyAny>) -> usize {
        let Some(wanted) = single(value) else { return 0 };
        (0..self.inner.len()).filter(|&i| self.inner.slice(i..i + 1).same(&wanted)).count()
    }

    fn __repr__(&self) -> String {
        describe(&self.inner)
    }

    fn __copy__(&self) -> Self {
        self.clone()
    }

    fn __deepcopy__(&self, _memo: &Bound<'_, PyAny>) -> Self {
        self.clone()
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyBytes>,))> {
        let from_bytes = py.get_type::<Self>().getattr(intern!(py, "from_bytes"))?;
        Ok((from_bytes, (self.to_bytes(py)?,)))
    }

    fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let encoded = self.inner.encoded();
        PyBytes::new_with(py, encoded.len(), |out| {
            encoded.write(out);
            Ok(())
        })
    }

    #[staticmethod]
    fn from_bytes(data: &Bound<'_, PyAny>) -> PyResult<Self> {
        raw::with_bytes(data, EventList::from_bytes)?.map(Self::from).map_err(|e| events_error(&e))
    }

    #[getter]
    fn irregular(&self) -> usize {
        self.inner.irregular()
    }

    #[getter]
    fn overflowed(&self) -> bool {
        self.inner.overflowed()
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.inner.nbytes()
    }

    fn split_at_clears(&self) -> Vec<Self> {
        let clears = self.inner.iter().enumerate().filter(|(_, v)| v.kind() == EventKind::Cleared);
        let ends = clears.map(|(i, _)| i).chain([self.inner.len()]);
        let mut start = 0;
        ends.map(|end| {
            let part = self.inner.slice(start..end);
            start = end + 1;
            part.into()
        })
        .collect()
    }

    #[getter]
    fn num_blocks(&self) -> (usize, usize) {
        let count = |kind| self.inner.iter().filter(|v| v.kind() == kind).map(|v| v.num_hashes()).sum();
        (count(EventKind::Stored), count(EventKind::Removed))
    }

    #[getter]
    fn stored_media(&self) -> Vec<String> {
        let mut media: Vec<String> = Vec::new();
        for v in self.inner.iter().filter(|v| v.kind() == EventKind::Stored) {
            if let Some(medium) = v.attrs().medium.as_deref()
                && !media.iter().any(|m| m == medium)
            {
                media.push(medium.to_owned());
            }
        }
        media
    }

    fn is_irregular(&self, index: usize) -> PyResult<bool> {
        self.check(index)?;
        Ok(self.inner.view(index).is_irregular())
    }

    fn origin(&self, index: usize) -> PyResult<(Option<String>, Option<u32>)> {
        self.check(index)?;
        let origin = self.inner.view(index).origin().cloned().unwrap_or_default();
        Ok((origin.source.map(|s| s.to_string()), origin.worker))
    }

    #[pyo3(signature = (*, source = None, worker = None))]
    fn with_origin(&self, source: Option<&str>, worker: Option<u32>) -> PyResult<Self> {
        let origin = Origin { source: source.map(Arc::from), worker };
        self.inner.with_origin(&origin).map(Self::from).map_err(|e| events_error(&e))
    }

    fn by_worker(&self) -> PyResult<Vec<(Option<u32>, Self)>> {
        let parts = self.inner.by_worker().map_err(|e| events_error(&e))?;
        Ok(parts.into_iter().map(|(worker, list)| (worker, list.into())).collect())
    }

    fn by_source(&self) -> PyResult<Vec<(Option<String>, Self)>> {
        let parts = self.inner.by_source().map_err(|e| events_error(&e))?;
        Ok(parts.into_iter().map(|(source, list)| (source.map(|s| s.to_string()), list.into())).collect())
    }

    #[pyo3(signature = (source, *, nest = false))]
    fn with_source(&self, source: Option<&str>, nest: bool) -> PyResult<Self> {
        self.inner.with_source(source, nest).map(Self::from).map_err(|e| events_error(&e))
    }

    #[getter]
    fn skipped<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let class = classes(py)?.skipped.bind(py);
        let all = self.inner.skipped().iter();
        let all = all.map(|s| class.call1((s.index, s.reason, &s.detail))).collect::<PyResult<Vec<_>>>()?;
        PyList::new(py, all)
    }
}

impl PyEventList {
    fn check(&self, index: usize) -> PyResult<()> {
        let n = self.inner.len();
        if index < n { Ok(()) } else { Err(PyIndexError::new_err(format!("event {index} of {n}"))) }
    }
}

/// Iterator; makes one object at a time.
#[pyclass(module = "kvevents._core", frozen)]
pub struct PyEventIter {
    list: EventList,
    next: std::sync::atomic::AtomicUsize,
}

#[pymethods]
impl PyEventIter {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let i = self.next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        if i >= self.list.len() {
            // Stays at the end, however often it is asked.
            self.next.store(self.list.len(), std::sync::atomic::Ordering::Relaxed);
            return Ok(None);
        }
        event_to_py(py, self.list.view(i)).map(Some)
    }

    fn __length_hint__(&self) -> usize {
        self.list.len().saturating_sub(self.next.load(std::sync::atomic::Ordering::Relaxed))
    }
}

/// A few events in words, for `repr`.
fn describe(list: &EventList) -> String {
    const SHOWN: usize = 5;
    let hash = |h: HashRef<'_>| match h {
        HashRef::Uint(v) => format!("{v:#x}"),
        HashRef::Int(v) => format!("{v}"),
        HashRef::Bytes(b) => b.iter().take(4).map(|x| format!("{x:02x}")).collect::<String>() + "..",
    };
    let hashes = |v: &EventView<'_>| {
        let first = v.hashes().next().map_or_else(String::new, hash);
        match v.num_hashes() {
            0 => "no blocks".to_owned(),
            1 => first,
            n => format!("{n} blocks from {first}"),
        }
    };
    let medium = |v: &EventView<'_>| v.attrs().medium.as_deref().unwrap_or("no medium").to_owned();
    let mut parts: Vec<String> = list
        .iter()
        .take(SHOWN)
        .map(|v| match v.kind() {
            EventKind::Cleared => "cleared".to_owned(),
            EventKind::Removed => format!("removed {} {}", hashes(&v), medium(&v)),
            EventKind::Stored => {
                let parent = v.parent().map_or_else(|| "root".to_owned(), hash);
                format!("stored {} after {parent} {}", hashes(&v), medium(&v))
            }
        })
        .collect();
    if list.len() > SHOWN {
        parts.push(format!("... {} more", list.len() - SHOWN));
    }
    let mut text = format!("EventList({}", list.len());
    if !parts.is_empty() {
        text.push_str(": ");
        text.push_str(&parts.join("; "));
    }
    if list.overflowed() {
        text.push_str("; overflowed");
    }
    text.push(')');
    text
}
