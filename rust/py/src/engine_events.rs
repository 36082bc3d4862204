//! Columns to an engine's own event Structs: what `take_events` of an engine's pool gives.

use kvevents_core::events::{Attrs, EventKind, EventList, EventView, ExtraKeys, Tokens};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString, PyTuple};

use crate::events::{hash_to_py, rare_to_py};

/// The engine's classes of events, and what their fields share.
pub struct Structs {
    stored: Py<PyAny>,
    removed: Py<PyAny>,
    cleared: Py<PyAny>,
}

fn text<'py>(py: Python<'py>, s: Option<&str>) -> Bound<'py, PyAny> {
    s.map_or_else(|| py.None().into_bound(py), |s| PyString::intern(py, s).into_any())
}

impl Structs {
    pub const fn new(stored: Py<PyAny>, removed: Py<PyAny>, cleared: Py<PyAny>) -> Self {
        Self { stored, removed, cleared }
    }

    /// One Struct per event, in order.
    pub fn of<'py>(&self, py: Python<'py>, events: &EventList) -> PyResult<Bound<'py, PyList>> {
        let none = py.None().into_bound(py);
        let mut medium = none.clone();
        let mut group = none.clone();
        let mut last: Option<&Attrs> = None;
        let mut out = Vec::with_capacity(events.len());
        for v in events.iter() {
            let a = v.attrs();
            // Removals come in rows that say the same.
            if !last.is_some_and(|l| std::ptr::eq(l, a)) {
                medium = text(py, a.medium.as_deref());
                group = a.group_idx.into_bound_py_any(py)?;
                last = Some(a);
            }
            out.push(match v.kind() {
                EventKind::Cleared => self.cleared.bind(py).call0()?,
                EventKind::Removed => {
                    self.removed.bind(py).call1((hashes(py, &v)?, medium.clone(), group.clone()))?
                }
                EventKind::Stored => self.stored(py, &v, &medium, &group, &none)?,
            });
        }
        PyList::new(py, out)
    }

    fn stored<'py>(
        &self,
        py: Python<'py>,
        v: &EventView<'_>,
        medium: &Bound<'py, PyAny>,
        group: &Bound<'py, PyAny>,
        none: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let a = v.attrs();
        let tokens = match v.tokens() {
            Tokens::Plain(t) => PyList::new(py, t)?.into_any(),
            Tokens::Wide(raw) => rare_to_py(py, Some(raw), false)?,
        };
        let extra = match v.extra_keys() {
            ExtraKeys::Absent => none.clone(),
            ExtraKeys::AllNil => PyList::new(py, vec![none; v.num_hashes()])?.into_any(),
            ExtraKeys::Raw(raw) => rare_to_py(py, Some(raw), true)?,
        };
        let parent = v.parent().map(|h| hash_to_py(py, h)).transpose()?.unwrap_or_else(|| none.clone());
        let args = [
            hashes(py, v)?.into_any(),
            parent,
            tokens,
            a.block_size.into_bound_py_any(py)?,
            a.lora_id.into_bound_py_any(py)?,
            medium.clone(),
            text(py, a.lora_name.as_deref()),
            extra,
            group.clone(),
            text(py, a.spec_kind.as_deref()),
            a.sliding_window.into_bound_py_any(py)?,
            none.clone(),
            none.clone(),
            text(py, a.session_id.as_deref()),
        ];
        self.stored.bind(py).call1(PyTuple::new(py, args)?)
    }
}

fn hashes<'py>(py: Python<'py>, v: &EventView<'_>) -> PyResult<Bound<'py, PyList>> {
    if v.num_hashes() == 1
        && let Some(h) = v.hashes().next()
    {
        return PyList::new(py, [hash_to_py(py, h)?]);
    }
    PyList::new(py, v.hashes().map(|h| hash_to_py(py, h)).collect::<PyResult<Vec<_>>>()?)
}
