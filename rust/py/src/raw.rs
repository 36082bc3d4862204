//! All raw list loops, and the one place that reads foreign buffers. `unsafe` is allowed only here.
//!
//! Lists are read through the stable ABI element by element; `PyO3`'s typed extraction costs about
//! twice as much. Any integer buffer (array, numpy, memoryview) is read by its format.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

/// An element that is not what was asked for.
pub struct BadElement {
    /// Its position.
    pub index: usize,
    /// What was seen there, for a person.
    #[allow(dead_code)]
    pub seen: String,
}

/// A short, safe description of any value.
pub fn preview(value: &Bound<'_, PyAny>) -> String {
    let kind = value.get_type().name().map_or_else(|_| "object".to_owned(), |n| n.to_string());
    let mut text = value.repr().map_or_else(|_| String::from("?"), |r| r.to_string_lossy().into_owned());
    if text.len() > 60 {
        let mut cut = 57;
        while !text.is_char_boundary(cut) {
            cut -= 1;
        }
        text.truncate(cut);
        text.push_str("...");
    }
    format!("{kind} {text}")
}

/// Reads integers of a list, tuple or integer buffer, restricted to `range`, as unsigned 32 bits.
/// `Ok(Err(bad))` names the first element that is not one; `Err` is for things that are no sequence.
pub fn read_u32s(
    obj: &Bound<'_, PyAny>,
    range: Option<std::ops::Range<usize>>,
    out: &mut Vec<u32>,
) -> PyResult<Result<(), BadElement>> {
    if let Ok(list) = obj.cast::<PyList>() {
        return Ok(list_u32s(list, range, out));
    }
    if let Ok(tuple) = obj.cast::<PyTuple>() {
        let list = tuple.to_list();
        return Ok(list_u32s(&list, range, out));
    }
    if let Ok(buffer) = PyUntypedBuffer::get(obj) {
        return buffer_u32s(obj.py(), &buffer, range, out);
    }
    let list = obj.try_iter()?.collect::<PyResult<Vec<_>>>()?;
    let list = PyList::new(obj.py(), list)?;
    Ok(list_u32s(&list, range, out))
}

fn list_u32s(
    list: &Bound<'_, PyList>,
    range: Option<std::ops::Range<usize>>,
    out: &mut Vec<u32>,
) -> Result<(), BadElement> {
    let len = list.len();
    let range = range.unwrap_or(0..len);
    let range = range.start.min(len)..range.end.min(len);
    out.reserve(range.len());
    for i in range {
        // SAFETY: `list` is a list and stays alive; an index out of range (the list shrank under an
        // `__index__`) gives null, which is handled. The item is borrowed and used at once.
        let value = unsafe {
            let item = ffi::PyList_GetItem(list.as_ptr(), i.cast_signed());
            if item.is_null() { -1 } else { ffi::PyLong_AsLongLong(item) }
        };
        match u32::try_from(value) {
            Ok(v) => out.push(v),
            Err(_) => {
                drop(PyErr::take(list.py()));
                let seen = list.get_item(i).map_or_else(|_| "nothing".to_owned(), |v| preview(&v));
                return Err(BadElement { index: i, seen });
            }
        }
    }
    Ok(())
}

macro_rules! read_typed {
    ($py:ident, $obj:expr, $t:ty, $range:ident, $out:ident) => {{
        let typed = $obj.as_typed::<$t>()?;
        let cells = typed.to_vec($py)?;
        let len = cells.len();
        let range = $range.unwrap_or(0..len);
        let range = range.start.min(len)..range.end.min(len);
        let first = range.start;
        $out.reserve(range.len());
        for (i, v) in cells[range].iter().enumerate() {
            match u32::try_from(*v) {
                Ok(v) => $out.push(v),
                Err(_) => return Ok(Err(BadElement { index: first + i, seen: format!("int {v}") })),
            }
        }
        Ok(Ok(()))
    }};
}

fn buffer_u32s(
    py: Python<'_>,
    buffer: &PyUntypedBuffer,
    range: Option<std::ops::Range<usize>>,
    out: &mut Vec<u32>,
) -> PyResult<Result<(), BadElement>> {
    use pyo3::buffer::ElementType::{SignedInteger, UnsignedInteger};
    if buffer.dimensions() != 1 {
        return Err(PyTypeError::new_err(format!(
            "a buffer of integers must have one dimension, this one has {}",
            buffer.dimensions()
        )));
    }
    match pyo3::buffer::ElementType::from_format(buffer.format()) {
        SignedInteger { bytes: 1 } => read_typed!(py, buffer, i8, range, out),
        SignedInteger { bytes: 2 } => read_typed!(py, buffer, i16, range, out),
        SignedInteger { bytes: 4 } => read_typed!(py, buffer, i32, range, out),
        SignedInteger { bytes: 8 } => read_typed!(py, buffer, i64, range, out),
        UnsignedInteger { bytes: 1 } => read_typed!(py, buffer, u8, range, out),
        UnsignedInteger { bytes: 2 } => read_typed!(py, buffer, u16, range, out),
        UnsignedInteger { bytes: 4 } => read_typed!(py, buffer, u32, range, out),
        UnsignedInteger { bytes: 8 } => read_typed!(py, buffer, u64, range, out),
        _ => Err(PyTypeError::new_err(format!(
            "a buffer of integers was expected, this one has format {:?}",
            buffer.format()
        ))),
    }
}

/// One block hash of Python, copied.
pub enum OwnedHash {
    /// Not negative.
    Uint(u64),
    /// Negative.
    Int(i64),
    /// Bytes.
    Bytes(Vec<u8>),
}

/// Reads one hash: an `int` of 64 bits (either sign) or `bytes` of at most 64.
pub fn read_hash(obj: &Bound<'_, PyAny>) -> Result<OwnedHash, String> {
    use kvevents_core::hash::MAX_HASH_BYTES;
    if let Ok(b) = obj.cast::<PyBytes>() {
        let b = b.as_bytes();
        return if b.len() <= MAX_HASH_BYTES {
            Ok(OwnedHash::Bytes(b.to_vec()))
        } else {
            Err(format!("a hash has at most {MAX_HASH_BYTES} bytes, saw {}", b.len()))
        };
    }
    // `__index__` is what makes something an integer; floats and strings have none.
    match obj.extract::<u64>() {
        Ok(v) => Ok(OwnedHash::Uint(v)),
        Err(e) if e.is_instance_of::<PyOverflowError>(obj.py()) => obj
            .extract::<i64>()
            .map(OwnedHash::Int)
            .map_err(|_| format!("a hash is a 64-bit integer or bytes, saw {}", preview(obj))),
        Err(_) => Err(format!("a hash is a 64-bit integer or bytes, saw {}", preview(obj))),
    }
}
