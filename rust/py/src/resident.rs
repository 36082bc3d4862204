//! `ResidentSet`: the keys that a stream says are resident.

use std::sync::{Arc, Mutex, PoisonError};

use kvevents_core::events::{EventList, Scope};
use kvevents_core::hash::HashRef;
use kvevents_core::resident::ResidentSet;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::{Exc, events_error};
use crate::events::PyEventList;
use crate::raw::{self, OwnedHash};

/// From this many bytes of columns on, applying takes long enough (about 200 us) to let other threads run.
const DETACH_BYTES: usize = 256 << 10;

/// See `_core.pyi`.
#[pyclass(name = "ResidentSet", module = "kvevents._core", frozen)]
pub struct PyResidentSet {
    inner: Mutex<ResidentSet>,
}

impl PyResidentSet {
    fn with<T>(&self, f: impl FnOnce(&mut ResidentSet) -> T) -> T {
        // A panic while applying is a bug, but it leaves a set that can still be read.
        f(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A copy of the other set, so that two locks are never held together.
    fn snapshot(&self) -> ResidentSet {
        self.with(|s| s.clone())
    }
}

fn with_hash<T>(hash: &Bound<'_, PyAny>, f: impl FnOnce(HashRef<'_>) -> T) -> PyResult<T> {
    let hash = raw::read_hash(hash).map_err(|what| Exc::EventTypeError.err(what))?;
    Ok(f(match &hash {
        OwnedHash::Uint(v) => HashRef::Uint(*v),
        OwnedHash::Int(v) => HashRef::Int(*v),
        OwnedHash::Bytes(b) => HashRef::Bytes(b),
    }))
}

#[pymethods]
impl PyResidentSet {
    #[new]
    fn new() -> Self {
        Self { inner: Mutex::new(ResidentSet::new()) }
    }

    fn apply(&self, py: Python<'_>, events: &PyEventList) -> bool {
        let events: &EventList = &events.inner;
        if events.nbytes() < DETACH_BYTES {
            self.with(|s| s.apply(events))
        } else {
            py.detach(|| self.with(|s| s.apply(events)))
        }
    }

    fn clear(&self) {
        self.with(ResidentSet::clear);
    }

    fn digest<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.with(|s| s.digest()).to_bytes())
    }

    fn __len__(&self) -> usize {
        self.with(|s| s.len())
    }

    #[pyo3(signature = (block_hash, medium, group_idx = None, locality = None, ownership = None))]
    fn contains(
        &self,
        block_hash: &Bound<'_, PyAny>,
        medium: Option<&str>,
        group_idx: Option<i64>,
        locality: Option<&str>,
        ownership: Option<&str>,
    ) -> PyResult<bool> {
        let scope = Scope {
            medium: medium.map(Arc::from),
            group_idx,
            locality: locality.map(Arc::from),
            ownership: ownership.map(Arc::from),
        };
        with_hash(block_hash, |h| self.with(|s| s.contains(h, &scope)))
    }

    fn __contains__(&self, block_hash: &Bound<'_, PyAny>) -> PyResult<bool> {
        with_hash(block_hash, |h| self.with(|s| s.contains_anywhere(h)))
    }

    fn difference(&self, py: Python<'_>, other: &Self) -> PyResult<PyEventList> {
        let gone = py.detach(|| {
            let other = other.snapshot();
            self.with(|s| s.difference(&other))
        });
        gone.map(PyEventList::from).map_err(|e| events_error(&e))
    }

    fn __eq__<'py>(&self, py: Python<'py>, other: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        use pyo3::IntoPyObjectExt;
        let Ok(other) = other.cast::<Self>() else { return Ok(py.NotImplemented().into_bound(py)) };
        let other = other.get();
        let same = py.detach(|| {
            let other = other.snapshot();
            self.with(|s| s.same(&other))
        });
        same.into_bound_py_any(py)
    }

    fn copy(&self, py: Python<'_>) -> Self {
        Self { inner: Mutex::new(py.detach(|| self.snapshot())) }
    }

    fn __copy__(&self, py: Python<'_>) -> Self {
        self.copy(py)
    }

    fn __deepcopy__(&self, py: Python<'_>, _memo: &Bound<'_, PyAny>) -> Self {
        self.copy(py)
    }

    fn __repr__(&self) -> String {
        self.with(|s| {
            format!(
                "ResidentSet({} keys, digest {:032x})",
                s.len(),
                u128::from_be_bytes(s.digest().to_bytes())
            )
        })
    }

    #[getter]
    fn duplicate_stores(&self) -> u64 {
        self.with(|s| s.counts().duplicate_stores)
    }

    #[getter]
    fn unknown_removals(&self) -> u64 {
        self.with(|s| s.counts().unknown_removals)
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.with(|s| s.nbytes())
    }
}
