//! `Matches`: an answer of the index. `Match` objects are made when somebody looks.

use std::sync::Arc;

use kvevents_core::index::Match;
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyIterator, PyList, PyType};

/// See `_core.pyi`.
#[pyclass(name = "Matches", module = "kvevents._core", frozen, sequence)]
pub struct PyMatches {
    found: Vec<Match>,
    tiers: Arc<Vec<String>>,
}

impl PyMatches {
    /// An answer; `tiers` are the index's names.
    pub fn new(found: Vec<Match>, tiers: Arc<Vec<String>>) -> Self {
        Self { found, tiers }
    }

    fn item<'py>(&self, py: Python<'py>, m: &Match) -> PyResult<Bound<'py, PyAny>> {
        static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        let class = CLASS.import(py, "kvevents.index", "Match")?;
        let tiers = |list: &[(usize, u32)]| -> PyResult<Bound<'py, PyDict>> {
            let d = PyDict::new(py);
            for &(tier, tokens) in list {
                d.set_item(self.tiers.get(tier), tokens)?;
            }
            Ok(d)
        };
        class.call1((
            &m.id.name,
            m.id.rank,
            m.tokens,
            m.block_size,
            tiers(&m.alone)?,
            tiers(&m.cumulative)?,
            m.complete,
            m.id.is_owner,
            m.expected,
        ))
    }

    fn items<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let items = self.found.iter().map(|m| self.item(py, m)).collect::<PyResult<Vec<_>>>()?;
        PyList::new(py, items)
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
        self.items(py)?.try_iter()
    }

    fn to_list<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.items(py)
    }

    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let d = PyDict::new(py);
        for m in self.found.iter().filter(|m| !m.id.is_owner) {
            d.set_item((&m.id.name, m.id.rank), m.tokens)?;
        }
        Ok(d)
    }

    fn __repr__(&self) -> String {
        let parts = self.found.iter().take(5).map(|m| {
            let partial = if m.complete { "" } else { " (incomplete)" };
            format!("{}/{}: {} tokens{partial}", m.id.name, m.id.rank, m.tokens)
        });
        let more = if self.found.len() > 5 { ", ..." } else { "" };
        format!("Matches({}: {}{more})", self.found.len(), parts.collect::<Vec<_>>().join(", "))
    }
}
