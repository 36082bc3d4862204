//! `BlockIds`; see `_core.pyi`.

use pyo3::IntoPyObjectExt;
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyIterator, PyList, PySlice, PyTuple};

use crate::errors::Exc;
use crate::pool_args::read_blocks;
use crate::raw::{self, Memory, PyMemory};

/// Block ids as a handle; see `_core.pyi`.
#[pyclass(name = "BlockIds", module = "kvevents._core", extends = PyMemory, frozen, sequence)]
pub struct PyBlockIds;

impl PyBlockIds {
    /// A handle of these ids.
    pub fn make<'py>(py: Python<'py>, ids: &[u32]) -> PyResult<Bound<'py, Self>> {
        let ids = ids.iter().map(|&b| b.cast_signed()).collect();
        let base = PyMemory::new(Memory::Ints(ids));
        Bound::new(py, PyClassInitializer::from(base).add_subclass(Self))
    }
}

/// The ids, none of them negative.
pub fn ints<'a>(ids: &'a Bound<'_, PyBlockIds>) -> &'a [i32] {
    ids.as_super().get().ints()
}

fn unsigned(ids: &Bound<'_, PyBlockIds>) -> Vec<u32> {
    ints(ids).iter().map(|b| b.cast_unsigned()).collect()
}

#[pymethods]
impl PyBlockIds {
    #[new]
    #[pyo3(signature = (ids = None, /))]
    fn new(ids: Option<&Bound<'_, PyAny>>) -> PyResult<PyClassInitializer<Self>> {
        let mut out = Vec::new();
        if let Some(ids) = ids {
            read_blocks(ids, None, &mut out)?;
        }
        if let Some(i) = out.iter().position(|&b| b > i32::MAX.cast_unsigned()) {
            return Err(Exc::BlockError.err(format!("blocks[{i}]: 0 to 2^31-1 was expected, saw {}", out[i])));
        }
        let ids = out.iter().map(|&b| b.cast_signed()).collect();
        Ok(PyClassInitializer::from(PyMemory::new(Memory::Ints(ids))).add_subclass(Self))
    }

    fn __len__(slf: &Bound<'_, Self>) -> usize {
        ints(slf).len()
    }

    fn __getitem__<'py>(slf: &Bound<'py, Self>, key: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let (py, ids) = (slf.py(), ints(slf));
        let n = ids.len();
        if let Ok(slice) = key.cast::<PySlice>() {
            let i = slice.indices(n.cast_signed())?;
            let at = |k: isize| ids[(i.start + k * i.step).cast_unsigned()].cast_unsigned();
            let part: Vec<u32> = (0..i.slicelength.cast_signed()).map(at).collect();
            return Ok(Self::make(py, &part)?.into_any());
        }
        let i: isize = key.extract()?;
        let at = if i < 0 { i + n.cast_signed() } else { i };
        if at < 0 || at >= n.cast_signed() {
            return Err(PyIndexError::new_err(format!("block {i} of {n}")));
        }
        ids[at.cast_unsigned()].into_bound_py_any(py)
    }

    fn __iter__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyIterator>> {
        Self::to_list(slf)?.try_iter()
    }

    fn __contains__(slf: &Bound<'_, Self>, value: &Bound<'_, PyAny>) -> bool {
        value.extract::<i32>().is_ok_and(|v| ints(slf).contains(&v))
    }

    fn __eq__<'py>(slf: &Bound<'py, Self>, other: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        if let Ok(other) = other.cast::<Self>() {
            return (ints(slf) == ints(other)).into_bound_py_any(py);
        }
        if other.is_instance_of::<PyList>() {
            return Self::to_list(slf)?.eq(other)?.into_bound_py_any(py);
        }
        if other.is_instance_of::<PyTuple>() {
            return Self::to_list(slf)?.to_tuple().eq(other)?.into_bound_py_any(py);
        }
        Ok(py.NotImplemented().into_bound(py))
    }

    fn __add__<'py>(slf: &Bound<'py, Self>, other: &Bound<'py, PyAny>) -> PyResult<Bound<'py, Self>> {
        let mut ids = unsigned(slf);
        read_blocks(other, None, &mut ids)?;
        Self::make(slf.py(), &ids)
    }

    fn __radd__<'py>(slf: &Bound<'py, Self>, other: &Bound<'py, PyAny>) -> PyResult<Bound<'py, Self>> {
        let mut ids = Vec::new();
        read_blocks(other, None, &mut ids)?;
        ids.extend(unsigned(slf));
        Self::make(slf.py(), &ids)
    }

    fn to_list<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(slf.py(), ints(slf))
    }

    #[pyo3(signature = (value, start = 0, stop = None, /))]
    fn index(
        slf: &Bound<'_, Self>,
        value: &Bound<'_, PyAny>,
        start: isize,
        stop: Option<isize>,
    ) -> PyResult<usize> {
        Self::to_list(slf)?
            .call_method1("index", (value, start, stop.unwrap_or(isize::MAX)))
            .map_err(|_| PyValueError::new_err(format!("{} is not among the blocks", raw::preview(value))))?
            .extract()
    }

    #[pyo3(signature = (value, /))]
    fn count(slf: &Bound<'_, Self>, value: &Bound<'_, PyAny>) -> PyResult<usize> {
        Self::to_list(slf)?.call_method1("count", (value,))?.extract()
    }

    fn __repr__(slf: &Bound<'_, Self>) -> String {
        format!("BlockIds({:?})", ints(slf))
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyTuple>> {
        (slf.get_type(), (Self::to_list(slf)?,)).into_pyobject(slf.py())
    }
}
