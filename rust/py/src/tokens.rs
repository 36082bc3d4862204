//! `TokenBlocks`, the request handle, and `BlockHashes`, its hashes.

use std::fmt::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvevents_core::hash::HashRef;
use kvevents_core::tokens::{Algorithm, MmFeature, Options, TokenBlocks};
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::{PyIndexError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyIterator, PyList, PySlice, PyTuple};

use crate::errors::{Exc, tokens_error};
use crate::events::{hash_to_py, rare_to_py};
use crate::raw::{self, BadElement, HashColumn, Memory, PyMemory};

/// First byte of a pickled state.
const STATE_VERSION: u8 = 1;

/// A request's tokens with chained hashes; see `_core.pyi`.
#[pyclass(name = "TokenBlocks", module = "kvevents._core", frozen)]
pub struct PyTokenBlocks {
    inner: Mutex<TokenBlocks>,
}

impl PyTokenBlocks {
    /// The request; a panic elsewhere leaves it as it was after the last whole call.
    pub fn lock(&self) -> MutexGuard<'_, TokenBlocks> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `(identifier, offset, length)`.
pub fn feature(item: &Bound<'_, PyAny>, index: usize) -> PyResult<MmFeature> {
    let bad = || {
        Exc::ConfigError.err(format!(
            "mm[{index}]: (identifier, offset, length) was expected, a str and two integers of 32 bits, saw {}",
            raw::preview(item)
        ))
    };
    // JSON gives lists.
    let tuple = item.cast::<PyList>().map(PyListMethods::to_tuple);
    let parts = tuple.as_ref().map_or(item, |t| t.as_any());
    let (id, offset, length): (String, u32, u32) = parts.extract().map_err(|_| bad())?;
    Ok(MmFeature { id: id.into(), offset, length })
}

/// A bad token as an exception that names its position.
fn token_error(bad: &BadElement) -> PyErr {
    let (kind, what) =
        if bad.wrong_type { (Exc::TokenTypeError, "an integer") } else { (Exc::TokenError, "0 to 2^32-1") };
    kind.err(format!("token_ids[{}]: {what} was expected, saw {}", bad.index, bad.seen))
}

/// A bad hash as an exception that names its position.
pub fn hash_error(bad: &BadElement) -> PyErr {
    let kind = if bad.wrong_type { Exc::EventTypeError } else { Exc::EventError };
    kind.err(format!(
        "block_hashes[{}]: integers of 64 bits, or bytes of one length up to 64, were expected, saw {}",
        bad.index, bad.seen
    ))
}

/// Token ids of any form, all or nothing.
pub fn read_tokens(token_ids: &Bound<'_, PyAny>, out: &mut Vec<u32>) -> PyResult<()> {
    match raw::read_u32s(token_ids, None, out) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(bad)) => Err(token_error(&bad)),
        Err(e) if e.is_instance_of::<PyTypeError>(token_ids.py()) => Err(Exc::TokenTypeError.err(format!(
            "token_ids: a list or a buffer of integers was expected, saw {} ({})",
            raw::preview(token_ids),
            e.value(token_ids.py())
        ))),
        Err(e) => Err(e),
    }
}

#[pymethods]
impl PyTokenBlocks {
    #[new]
    #[pyo3(signature = (block_size, *, algorithm = "sha256_cbor", lora_name = None, lora_path = None,
        lora_id = None, cache_salt = None, mm = None, seed = None))]
    #[allow(clippy::too_many_arguments)] // the options of a request, by keyword
    fn new(
        block_size: i64,
        algorithm: &str,
        lora_name: Option<&str>,
        lora_path: Option<&str>,
        lora_id: Option<i64>,
        cache_salt: Option<&str>,
        mm: Option<&Bound<'_, PyAny>>,
        seed: Option<&str>,
    ) -> PyResult<Self> {
        let Some(algorithm) = Algorithm::from_name(algorithm) else {
            let known = Algorithm::ALL.map(Algorithm::name).join(", ");
            return Err(
                Exc::ConfigError.err(format!("algorithm: one of {known} was expected, saw {algorithm:?}"))
            );
        };
        let mut features = Vec::new();
        if let Some(mm) = mm {
            for (i, item) in mm.try_iter()?.enumerate() {
                features.push(feature(&item?, i)?);
            }
        }
        let options = Options {
            algorithm,
            lora_name: lora_name.map(Arc::from),
            lora_path: lora_path.map(Arc::from),
            lora_id,
            cache_salt: cache_salt.map(Arc::from),
            mm: features,
            seed: seed.map(Arc::from),
        };
        let size = usize::try_from(block_size).map_err(|_| {
            Exc::ConfigError.err(format!("block_size: 1 or more was expected, saw {block_size}"))
        })?;
        let inner = TokenBlocks::new(size, options).map_err(|e| tokens_error(&e))?;
        Ok(Self { inner: Mutex::new(inner) })
    }

    fn extend(&self, token_ids: &Bound<'_, PyAny>) -> PyResult<()> {
        // Read first, without the lock: an `__index__` may run any code, this method included.
        let mut tokens = Vec::new();
        read_tokens(token_ids, &mut tokens)?;
        self.lock().extend(&tokens);
        Ok(())
    }

    #[getter]
    fn block_size(&self) -> usize {
        self.lock().block_size()
    }

    #[getter]
    fn algorithm(&self) -> &'static str {
        self.lock().algorithm().name()
    }

    #[getter]
    fn num_tokens(&self) -> usize {
        self.lock().num_tokens()
    }

    #[getter]
    fn num_blocks(&self) -> usize {
        self.lock().num_blocks()
    }

    #[getter]
    fn block_hashes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBlockHashes>> {
        let inner = self.lock();
        let width = if inner.is_int_hash() { 0 } else { inner.hash_width() };
        PyBlockHashes::make(py, inner.shared_hashes(), width)
    }

    #[getter]
    fn none_hash<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        hash_to_py(py, self.lock().none_hash())
    }

    #[getter]
    fn lora_name(&self) -> Option<String> {
        self.lock().lora_name().map(ToString::to_string)
    }

    #[getter]
    fn lora_path(&self) -> Option<String> {
        self.lock().lora_path().map(ToString::to_string)
    }

    #[getter]
    fn lora_id(&self) -> Option<i64> {
        self.lock().lora_id()
    }

    #[getter]
    fn cache_salt(&self) -> Option<String> {
        self.lock().cache_salt().map(ToString::to_string)
    }

    #[getter]
    fn seed(&self) -> Option<String> {
        self.lock().seed().map(ToString::to_string)
    }

    #[getter]
    fn mm<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.lock().mm().iter().map(|f| (&*f.id, f.offset, f.length)))
    }

    fn to_token_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.lock().tokens())
    }

    fn to_extra_keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let mut raw = Vec::new();
        let inner = self.lock();
        inner.write_extra_keys(0..inner.num_blocks(), &mut raw);
        drop(inner);
        rare_to_py(py, Some(&raw), true)
    }

    fn __repr__(&self) -> String {
        let t = self.lock();
        let mut text = format!(
            "TokenBlocks({} tokens, {} blocks of {}, {}",
            t.num_tokens(),
            t.num_blocks(),
            t.block_size(),
            t.algorithm().name()
        );
        for (name, value) in [("lora_name", t.lora_name()), ("cache_salt", t.cache_salt())] {
            if let Some(value) = value {
                _ = write!(text, ", {name}={value:?}");
            }
        }
        if !t.mm().is_empty() {
            _ = write!(text, ", {} features", t.mm().len());
        }
        text + ")"
    }

    fn __copy__(&self) -> Self {
        Self { inner: Mutex::new(self.lock().clone()) }
    }

    fn __deepcopy__(&self, _memo: &Bound<'_, PyAny>) -> Self {
        self.__copy__()
    }

    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<((usize,), Bound<'py, PyDict>)> {
        let options = PyDict::new(py);
        for name in ["algorithm", "lora_name", "lora_path", "lora_id", "cache_salt", "mm", "seed"] {
            let value = match name {
                "algorithm" => self.algorithm().into_bound_py_any(py)?,
                "lora_name" => self.lora_name().into_bound_py_any(py)?,
                "lora_path" => self.lora_path().into_bound_py_any(py)?,
                "lora_id" => self.lora_id().into_bound_py_any(py)?,
                "cache_salt" => self.cache_salt().into_bound_py_any(py)?,
                "mm" => self.mm(py)?.into_any(),
                _ => self.seed().into_bound_py_any(py)?,
            };
            options.set_item(name, value)?;
        }
        Ok(((self.block_size(),), options))
    }

    /// The tokens; hashes are made anew, so that a damaged pickle cannot carry wrong ones.
    fn __getstate__<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let mut state = vec![STATE_VERSION];
        state.extend(self.lock().tokens().iter().flat_map(|t| t.to_le_bytes()));
        PyBytes::new(py, &state)
    }

    fn __setstate__(&self, state: &Bound<'_, PyBytes>) -> PyResult<()> {
        let (version, tokens) = match state.as_bytes() {
            [version, tokens @ ..] if tokens.len() % 4 == 0 => (*version, tokens),
            _ => return Err(Exc::PickleError.err("not a valid pickled TokenBlocks")),
        };
        if version != STATE_VERSION {
            return Err(Exc::PickleError.err(format!(
                "this TokenBlocks was pickled in format version {version}, this build reads version \
                 {STATE_VERSION}; run the same kvevents release in every process"
            )));
        }
        let mut inner = self.lock();
        if inner.num_tokens() > 0 {
            return Err(Exc::PickleError.err("this TokenBlocks has tokens already"));
        }
        let tokens: Vec<u32> = tokens.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        inner.extend(&tokens);
        Ok(())
    }
}

/// Hashes of full blocks, fixed when they were asked for; see `_core.pyi`.
#[pyclass(name = "BlockHashes", module = "kvevents._core", extends = PyMemory, frozen, sequence)]
pub struct PyBlockHashes {
    data: Arc<Vec<u8>>,
    /// 0 for integers of 8 bytes.
    width: usize,
}

impl PyBlockHashes {
    fn init(data: Arc<Vec<u8>>, width: usize) -> PyClassInitializer<Self> {
        // An element of the buffer is a byte, or an integer.
        let (item_size, format) = if width == 0 { (8, c"Q") } else { (1, c"B") };
        let base = PyMemory::new(Memory::Bytes { data: Arc::clone(&data), item_size, format });
        PyClassInitializer::from(base).add_subclass(Self { data, width })
    }

    fn make(py: Python<'_>, data: Arc<Vec<u8>>, width: usize) -> PyResult<Bound<'_, Self>> {
        Bound::new(py, Self::init(data, width))
    }

    fn size(&self) -> usize {
        if self.width == 0 { 8 } else { self.width }
    }

    fn len(&self) -> usize {
        self.data.len() / self.size()
    }

    fn at(&self, i: usize) -> &[u8] {
        let size = self.size();
        &self.data[i * size..(i + 1) * size]
    }

    fn get(&self, i: usize) -> HashRef<'_> {
        let cell = self.at(i);
        if self.width == 0 {
            HashRef::Uint(cell.iter().rev().fold(0, |acc, &b| acc << 8 | u64::from(b)))
        } else {
            HashRef::Bytes(cell)
        }
    }

    /// For `raw::read_hashes`.
    pub fn copy_to(&self, range: Option<std::ops::Range<usize>>, out: &mut HashColumn) {
        let range = raw::clamp(range, self.len());
        let size = self.size();
        let cells = &self.data[range.start * size..range.end * size];
        out.width = self.width;
        if self.width == 0 {
            out.ints.extend(cells.as_chunks().0.iter().map(|b| u64::from_le_bytes(*b)));
        } else {
            out.bytes.extend_from_slice(cells);
        }
    }

    fn list<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let items = (0..self.len()).map(|i| hash_to_py(py, self.get(i))).collect::<PyResult<Vec<_>>>()?;
        PyList::new(py, items)
    }
}

#[pymethods]
impl PyBlockHashes {
    #[new]
    #[pyo3(signature = (hashes, *, width = 32))]
    fn new(hashes: &Bound<'_, PyAny>, width: usize) -> PyResult<PyClassInitializer<Self>> {
        let mut column = HashColumn::default();
        raw::read_hashes(hashes, None, width, &mut column)?.map_err(|bad| hash_error(&bad))?;
        let data = if column.width == 0 {
            let mut data = vec![0; column.ints.len() * 8];
            for (cell, v) in data.as_chunks_mut().0.iter_mut().zip(&column.ints) {
                *cell = v.to_le_bytes();
            }
            data
        } else {
            column.bytes
        };
        Ok(Self::init(Arc::new(data), column.width))
    }

    fn __len__(&self) -> usize {
        self.len()
    }

    fn __getitem__<'py>(&self, py: Python<'py>, key: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let n = self.len();
        if let Ok(slice) = key.cast::<PySlice>() {
            let i = slice.indices(n.cast_signed())?;
            let mut data = Vec::with_capacity(i.slicelength * self.size());
            for k in 0..i.slicelength.cast_signed() {
                data.extend_from_slice(self.at((i.start + k * i.step).cast_unsigned()));
            }
            return Ok(Self::make(py, Arc::new(data), self.width)?.into_any());
        }
        let i: isize = key.extract()?;
        let at = if i < 0 { i + n.cast_signed() } else { i };
        if at < 0 || at >= n.cast_signed() {
            return Err(PyIndexError::new_err(format!("hash {i} of {n}")));
        }
        hash_to_py(py, self.get(at.cast_unsigned()))
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        self.list(py)?.try_iter()
    }

    fn __contains__(&self, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        self.list(value.py())?.contains(value)
    }

    fn __eq__<'py>(&self, py: Python<'py>, other: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        if let Ok(o) = other.cast::<Self>() {
            let o = o.get();
            return (self.width == o.width && self.data == o.data).into_bound_py_any(py);
        }
        if other.is_instance_of::<PyList>() {
            return self.list(py)?.eq(other)?.into_bound_py_any(py);
        }
        if other.is_instance_of::<PyTuple>() {
            return self.list(py)?.to_tuple().eq(other)?.into_bound_py_any(py);
        }
        Ok(py.NotImplemented().into_bound(py))
    }

    #[pyo3(signature = (value, start = 0, stop = None, /))]
    fn index(&self, value: &Bound<'_, PyAny>, start: isize, stop: Option<isize>) -> PyResult<usize> {
        let py = value.py();
        let stop = stop.unwrap_or(isize::MAX);
        self.list(py)?
            .call_method1("index", (value, start, stop))
            .map_err(|_| PyValueError::new_err(format!("{} is not among the hashes", raw::preview(value))))?
            .extract()
    }

    #[pyo3(signature = (value, /))]
    fn count(&self, value: &Bound<'_, PyAny>) -> PyResult<usize> {
        self.list(value.py())?.call_method1("count", (value,))?.extract()
    }

    fn __repr__(&self) -> String {
        let kind = if self.width == 0 { "integers".to_owned() } else { format!("{} bytes each", self.width) };
        format!("BlockHashes({}, {kind})", self.len())
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let from_bytes = py.get_type::<Self>().getattr("from_bytes")?;
        (from_bytes, (PyBytes::new(py, &self.data), self.width)).into_pyobject(py)
    }

    #[staticmethod]
    fn from_bytes<'py>(data: &Bound<'py, PyBytes>, width: usize) -> PyResult<Bound<'py, Self>> {
        let py = data.py();
        let data = data.as_bytes();
        if width > kvevents_core::hash::MAX_HASH_BYTES
            || data.len() % (if width == 0 { 8 } else { width }) != 0
        {
            return Err(Exc::PickleError.err(format!("{} bytes are no hashes of width {width}", data.len())));
        }
        Self::make(py, Arc::new(data.to_vec()), width)
    }
}
