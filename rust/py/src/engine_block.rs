//! `EngineBlock`: what an engine's code holds of a block of an [`crate::engine_pool::PyEnginePool`]; see
//! `_core.pyi`.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvevents_core::hash::HashRef;
use kvevents_core::pool::{BlockPool, Held};
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::PyReferenceError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyBytes, PyInt};

/// What a pool and its blocks share.
pub struct Shared {
    pool: Mutex<BlockPool>,
    /// A weak reference to the pool's Python object: blocks do not keep it alive.
    owner: PyOnceLock<Py<PyAny>>,
    /// The engine's own class of blocks.
    class: Py<PyAny>,
}

impl Shared {
    pub fn new(pool: BlockPool, class: Py<PyAny>) -> Self {
        Self { pool: Mutex::new(pool), owner: PyOnceLock::new(), class }
    }

    /// Held for one call of the core, in which no Python code runs.
    pub fn lock(&self) -> MutexGuard<'_, BlockPool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn bind(&self, py: Python<'_>, owner: Py<PyAny>) {
        // Only the first counts: a pool is bound when it is made.
        let _ = self.owner.set(py, owner);
    }

    fn owner<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Some(owner) = self.owner.get(py) else { return Ok(None) };
        Ok(Some(owner.bind(py).call0()?).filter(|o| !o.is_none()))
    }
}

/// The key of a hash in an engine: the hash, and the group in four bytes, big endian.
pub fn key_bytes(held: Held<'_>) -> Vec<u8> {
    let mut key = match held.hash {
        HashRef::Bytes(b) => b.to_vec(),
        HashRef::Uint(v) => v.to_be_bytes().to_vec(),
        HashRef::Int(v) => v.to_be_bytes().to_vec(),
    };
    key.extend_from_slice(&u32::from(held.group).to_be_bytes());
    key
}

/// One block; see `_core.pyi`.
#[pyclass(name = "EngineBlock", module = "kvevents._core", frozen)]
pub struct PyEngineBlock {
    #[pyo3(get)]
    block_id: Py<PyInt>,
    #[pyo3(get)]
    is_null: Py<PyBool>,
    /// The same number.
    id: u32,
    shared: Arc<Shared>,
    /// The engine's own block behind this one, once the pool was handed over to the engine's own code.
    own: PyOnceLock<Py<PyAny>>,
}

impl PyEngineBlock {
    pub fn make(py: Python<'_>, id: u32, shared: &Arc<Shared>) -> PyResult<Py<Self>> {
        let is_null = PyBool::new(py, id == 0).to_owned().unbind();
        let block_id = id.into_pyobject(py)?.unbind();
        Py::new(py, Self { block_id, is_null, id, shared: Arc::clone(shared), own: PyOnceLock::new() })
    }

    #[inline]
    pub const fn id(&self) -> u32 {
        self.id
    }

    /// Whether this is a block of that pool.
    #[inline]
    pub fn is_of(&self, shared: &Arc<Shared>) -> bool {
        Arc::ptr_eq(&self.shared, shared)
    }

    pub fn adopt(&self, py: Python<'_>, own: Py<PyAny>) {
        let _ = self.own.set(py, own);
    }

    fn own<'py>(&self, py: Python<'py>) -> Option<&Bound<'py, PyAny>> {
        self.own.get(py).map(|own| own.bind(py))
    }

    /// The engine's own block; the pool is handed over for it.
    fn hand_over<'py>(&self, py: Python<'py>, why: &str) -> PyResult<&Bound<'py, PyAny>> {
        if let Some(own) = self.own(py) {
            return Ok(own);
        }
        let gone = || PyReferenceError::new_err("the pool of this block is gone");
        let owner = self.shared.owner(py)?.ok_or_else(gone)?;
        owner.call_method1(intern!(py, "_hand_over"), (format!("a block's {why} was used"),))?;
        self.own(py).ok_or_else(gone)
    }
}

#[pymethods]
impl PyEngineBlock {
    #[getter]
    fn ref_cnt<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match self.own(py) {
            Some(own) => own.getattr(intern!(py, "ref_cnt")),
            None => self.shared.lock().ref_count(self.id).unwrap_or_default().into_bound_py_any(py),
        }
    }

    #[setter]
    fn set_ref_cnt(&self, py: Python<'_>, value: &Bound<'_, PyAny>) -> PyResult<()> {
        if self.own(py).is_none()
            && let Ok(users) = value.extract()
            && self.shared.lock().set_ref_count(self.id, users).is_ok()
        {
            return Ok(());
        }
        self.hand_over(py, "count of users")?.setattr(intern!(py, "ref_cnt"), value)
    }

    #[getter]
    fn block_hash<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        if let Some(own) = self.own(py) {
            return own.getattr(intern!(py, "block_hash"));
        }
        let key = self.shared.lock().held(self.id).next().map(key_bytes);
        key.map(|key| PyBytes::new(py, &key)).into_bound_py_any(py)
    }

    #[getter]
    fn block_hash_num_tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        if let Some(own) = self.own(py) {
            return own.getattr(intern!(py, "block_hash_num_tokens"));
        }
        let tokens = self.shared.lock().held(self.id).next().map(|held| held.num_tokens);
        tokens.filter(|&n| n > 0).into_bound_py_any(py)
    }

    #[getter]
    fn pool<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.shared.owner(py)
    }

    #[getter(_block_hash)]
    fn own_hash<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.block_hash(py)
    }

    #[setter(_block_hash)]
    fn set_own_hash(&self, py: Python<'_>, value: &Bound<'_, PyAny>) -> PyResult<()> {
        self.hand_over(py, "hash")?.setattr(intern!(py, "_block_hash"), value)
    }

    #[getter(_block_hash_num_tokens)]
    fn own_hash_num_tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.block_hash_num_tokens(py)
    }

    #[setter(_block_hash_num_tokens)]
    fn set_own_hash_num_tokens(&self, py: Python<'_>, value: &Bound<'_, PyAny>) -> PyResult<()> {
        self.hand_over(py, "hash")?.setattr(intern!(py, "_block_hash_num_tokens"), value)
    }

    #[pyo3(signature = (block_hash, num_tokens = None))]
    fn set_block_hash<'py>(
        &self,
        py: Python<'py>,
        block_hash: &Bound<'py, PyAny>,
        num_tokens: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.hand_over(py, "hash")?.call_method1(intern!(py, "set_block_hash"), (block_hash, num_tokens))
    }

    fn reset_hash<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.hand_over(py, "hash")?.call_method0(intern!(py, "reset_hash"))
    }

    #[getter]
    fn prev_free_block<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.hand_over(py, "place in the queue")?.getattr(intern!(py, "prev_free_block"))
    }

    #[setter]
    fn set_prev_free_block(&self, py: Python<'_>, value: &Bound<'_, PyAny>) -> PyResult<()> {
        self.hand_over(py, "place in the queue")?.setattr(intern!(py, "prev_free_block"), value)
    }

    #[getter]
    fn next_free_block<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.hand_over(py, "place in the queue")?.getattr(intern!(py, "next_free_block"))
    }

    #[setter]
    fn set_next_free_block(&self, py: Python<'_>, value: &Bound<'_, PyAny>) -> PyResult<()> {
        self.hand_over(py, "place in the queue")?.setattr(intern!(py, "next_free_block"), value)
    }

    /// The engine asks `isinstance(block, ...)` of its own class.
    #[getter(__class__)]
    fn class<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        self.shared.class.bind(py).clone()
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        if let Some(own) = self.own(py) {
            return Ok(own.repr()?.to_string());
        }
        let hash = self.block_hash(py)?.repr()?.to_string();
        Ok(format!("EngineBlock(block_id={}, ref_cnt={}, block_hash={hash})", self.id, self.ref_cnt(py)?))
    }
}
