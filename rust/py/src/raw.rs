//! All raw list loops, and the one place that reads and exports buffers. `unsafe` is allowed only here.
//!
//! Lists are read through the stable ABI element by element; `PyO3`'s typed extraction costs up to three
//! times as much. Buffers (array, numpy, memoryview, our handles) are read by their format: the copy and
//! the range check are one loop without a branch an element, which the compiler vectorises.
//!
//! Readers append to their output only when everything was good.

mod layout;

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::Arc;

use kvevents_core::events::Hashes;
use pyo3::buffer::{ElementType, PyUntypedBuffer};
use pyo3::exceptions::{PyBufferError, PyOverflowError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString, PyTuple};

use crate::engine_block::{PyEngineBlock, Shared};
use crate::tokens::PyBlockHashes;

/// An element that is not what was asked for.
pub struct BadElement {
    /// Its position.
    pub index: usize,
    /// What was seen there, for a person.
    pub seen: String,
    /// Whether it is of the wrong type, rather than a value that is out of range.
    pub wrong_type: bool,
}

/// The outer error is for things that are no sequence at all (or what an `__index__` raised), the inner
/// one names the first bad element.
pub type Elements = PyResult<Result<(), BadElement>>;

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

/// Room for `n` more elements. Whoever fills them all calls `set_len`.
fn spare<T>(out: &mut Vec<T>, n: usize) -> &mut [MaybeUninit<T>] {
    out.reserve(n);
    &mut out.spare_capacity_mut()[..n]
}

/// `range`, or everything, cut to what is there.
pub fn clamp(range: Option<Range<usize>>, len: usize) -> Range<usize> {
    let range = range.unwrap_or(0..len);
    let end = range.end.min(len);
    range.start.min(end)..end
}

/// An `int` from 0 to the largest signed size, without the detour through `__index__` that anything else
/// takes (`None`).
#[inline]
pub fn small_int(obj: &Bound<'_, PyAny>) -> Option<usize> {
    // SAFETY: both are given a valid object; the second only a real `int`, for which it fails on overflow
    // alone, and then the error that it set is taken.
    let value = unsafe {
        if ffi::PyLong_Check(obj.as_ptr()) == 0 {
            return None;
        }
        ffi::PyLong_AsSsize_t(obj.as_ptr())
    };
    if value == -1 {
        drop(PyErr::take(obj.py()));
    }
    usize::try_from(value).ok()
}

/// Hands the bytes of `bytes` or of any contiguous buffer to `f`, which calls no Python.
pub fn with_bytes<T>(obj: &Bound<'_, PyAny>, f: impl FnOnce(&[u8]) -> T) -> PyResult<T> {
    if let Ok(bytes) = obj.cast::<PyBytes>() {
        return Ok(f(bytes.as_bytes()));
    }
    let buffer = PyUntypedBuffer::get(obj)?;
    if !buffer.is_c_contiguous() {
        return Err(PyBufferError::new_err("a contiguous buffer was expected"));
    }
    // SAFETY: the buffer is contiguous, has `len_bytes` bytes and is held meanwhile, and nobody else runs
    // Python code; an empty one may have no address.
    let bytes = unsafe {
        match buffer.len_bytes() {
            0 => &[][..],
            n => std::slice::from_raw_parts(buffer.buf_ptr().cast::<u8>(), n),
        }
    };
    Ok(f(bytes))
}

// ---------------------------------------------------------------- integers of 32 bits

/// Appends the integers of a list, tuple, integer buffer or other iterable, restricted to `range` (cut to
/// what is there), as unsigned 32 bits.
pub fn read_u32s(obj: &Bound<'_, PyAny>, range: Option<Range<usize>>, out: &mut Vec<u32>) -> Elements {
    if let Ok(list) = obj.cast::<PyList>() {
        return list_u32s(list, range, out);
    }
    if let Ok(tuple) = obj.cast::<PyTuple>() {
        return list_u32s(&tuple.to_list(), range, out);
    }
    if let Ok(buffer) = PyUntypedBuffer::get(obj) {
        return buffer_u32s(&buffer, range, out);
    }
    let list = obj.try_iter()?.collect::<PyResult<Vec<_>>>()?;
    list_u32s(&PyList::new(obj.py(), list)?, range, out)
}

fn list_u32s(list: &Bound<'_, PyList>, range: Option<Range<usize>>, out: &mut Vec<u32>) -> Elements {
    let range = clamp(range, list.len());
    let n = range.len();
    let cells = spare(out, n);
    let mut done = layout::leading(list, range.start, cells);
    while done < n {
        let i = range.start + done;
        // SAFETY: `list` is a list and stays alive; an index out of range (the list shrank under an
        // `__index__`) gives null, which is handled. The item is borrowed and used at once; an `__index__`
        // that takes it out of the list runs with its own reference.
        let value = unsafe {
            let item = ffi::PyList_GetItem(list.as_ptr(), i.cast_signed());
            if item.is_null() { -1 } else { ffi::PyLong_AsLongLong(item) }
        };
        match u32::try_from(value) {
            Ok(v) => {
                cells[done].write(v);
            }
            Err(_) => return bad_item(list, i),
        }
        done += 1 + layout::leading(list, i + 1, &mut cells[done + 1..]);
    }
    // SAFETY: the loop wrote `n` elements behind the length, or returned.
    unsafe { out.set_len(out.len() + n) };
    Ok(Ok(()))
}

/// Why the conversion of `list[index]` failed; the error that is set (if any) is taken.
fn bad_item(list: &Bound<'_, PyList>, index: usize) -> Elements {
    let py = list.py();
    let wrong_type = match PyErr::take(py) {
        None => false,
        Some(e) if e.is_instance_of::<PyOverflowError>(py) => false,
        Some(e) if e.is_instance_of::<PyTypeError>(py) => true,
        // The list shrank meanwhile.
        Some(_) if index >= list.len() => false,
        Some(e) => return Err(e),
    };
    let seen = list.get_item(index).map_or_else(|_| "nothing".to_owned(), |v| preview(&v));
    Ok(Err(BadElement { index, seen, wrong_type }))
}

/// An element type of buffers.
trait BufferInt: Copy + std::fmt::Display {
    /// No bit set.
    const ZERO: Self;
    /// The bits of both: a range check of one value is one of many.
    fn or(self, other: Self) -> Self;
    /// Whether a value, or any of many values that were combined by `or`, is outside of 32 bits.
    fn outside(self) -> bool;
    /// The low 32 bits.
    fn low(self) -> u32;
}

macro_rules! buffer_int {
    ($($t:ty: $v:ident $outside:expr),+ $(,)?) => {$(
        impl BufferInt for $t {
            const ZERO: Self = 0;
            #[inline(always)]
            fn or(self, other: Self) -> Self { self | other }
            #[inline(always)]
            fn outside(self) -> bool { let $v = self; $outside }
            #[inline(always)]
            #[allow(clippy::cast_lossless)]
            fn low(self) -> u32 { self as u32 }
        }
    )+};
}

buffer_int! {
    i8: v v < 0, i16: v v < 0, i32: v v < 0, i64: v v as u64 >> 32 != 0,
    u8: _v false, u16: _v false, u32: _v false, u64: v v >> 32 != 0,
}

fn buffer_u32s(buffer: &PyUntypedBuffer, range: Option<Range<usize>>, out: &mut Vec<u32>) -> Elements {
    use ElementType::{SignedInteger, UnsignedInteger};
    if buffer.dimensions() != 1 {
        return Err(PyTypeError::new_err(format!(
            "a buffer of integers must have one dimension, this one has {}",
            buffer.dimensions()
        )));
    }
    let read = match ElementType::from_format(buffer.format()) {
        SignedInteger { bytes: 1 } => copy_ints::<i8>,
        SignedInteger { bytes: 2 } => copy_ints::<i16>,
        SignedInteger { bytes: 4 } => copy_ints::<i32>,
        SignedInteger { bytes: 8 } => copy_ints::<i64>,
        UnsignedInteger { bytes: 1 } => copy_ints::<u8>,
        UnsignedInteger { bytes: 2 } => copy_ints::<u16>,
        UnsignedInteger { bytes: 4 } => copy_ints::<u32>,
        UnsignedInteger { bytes: 8 } => copy_ints::<u64>,
        _ => return Err(not_integers(buffer)),
    };
    Ok(read(buffer, range, out))
}

fn not_integers(buffer: &PyUntypedBuffer) -> PyErr {
    PyTypeError::new_err(format!(
        "a buffer of integers in this machine's byte order was expected, this one has format {:?}",
        buffer.format()
    ))
}

/// Where the elements of a one-dimensional buffer lie: the first one, their number, bytes between them.
fn elements(buffer: &PyUntypedBuffer) -> (*const u8, usize, isize) {
    let stride = buffer.strides().first().copied().unwrap_or(buffer.item_size().cast_signed());
    let len = buffer.len_bytes() / buffer.item_size().max(1);
    (buffer.buf_ptr().cast::<u8>(), len, stride)
}

fn copy_ints<T: BufferInt>(
    buffer: &PyUntypedBuffer,
    range: Option<Range<usize>>,
    out: &mut Vec<u32>,
) -> Result<(), BadElement> {
    let (first, len, stride) = elements(buffer);
    let range = clamp(range, len);
    let (from, n) = (range.start, range.len());
    let cells = spare(out, n);
    let contiguous = stride == size_of::<T>().cast_signed();
    let step = if contiguous { size_of::<T>().cast_signed() } else { stride };
    // SAFETY: the exporter promises `len` elements of this format, `stride` bytes apart, for as long as the
    // buffer is held; `range` is inside of `len`; reads are unaligned because views need not be aligned.
    let read = |i: usize| unsafe {
        first.wrapping_offset((from + i).cast_signed() * step).cast::<T>().read_unaligned()
    };
    let mut seen = T::ZERO;
    if contiguous {
        // The same with a distance that the compiler knows.
        let start = first.wrapping_add(from * size_of::<T>()).cast::<T>();
        for (i, cell) in cells.iter_mut().enumerate() {
            // SAFETY: as for `read`.
            let v = unsafe { start.add(i).read_unaligned() };
            seen = seen.or(v);
            cell.write(v.low());
        }
    } else {
        for (i, cell) in cells.iter_mut().enumerate() {
            let v = read(i);
            seen = seen.or(v);
            cell.write(v.low());
        }
    }
    if seen.outside() {
        let i = (0..n).find(|&i| read(i).outside()).unwrap_or_default();
        return Err(BadElement { index: from + i, seen: format!("int {}", read(i)), wrong_type: false });
    }
    // SAFETY: both loops wrote `n` elements behind the length.
    unsafe { out.set_len(out.len() + n) };
    Ok(())
}

/// Appends the ids of an engine's blocks, all of this pool, restricted to `range` (cut to what is there);
/// `false`, and nothing appended, where one is something else.
pub fn read_engine_blocks(
    list: &Bound<'_, PyList>,
    range: Option<Range<usize>>,
    shared: &Arc<Shared>,
    out: &mut Vec<u32>,
) -> bool {
    let range = clamp(range, list.len());
    let n = range.len();
    for (i, cell) in range.zip(spare(out, n)) {
        // SAFETY: `list` is a list and stays alive; no Python code runs in this loop, so the index is inside
        // of it and the borrowed item lives as long as its turn.
        let item =
            unsafe { Borrowed::from_ptr(list.py(), ffi::PyList_GetItem(list.as_ptr(), i.cast_signed())) };
        match item.cast::<PyEngineBlock>() {
            Ok(block) if block.get().is_of(shared) => {
                cell.write(block.get().id());
            }
            _ => return false,
        }
    }
    // SAFETY: the loop wrote `n` elements behind the length, or returned.
    unsafe { out.set_len(out.len() + n) };
    true
}

// ---------------------------------------------------------------- hashes

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

/// Hashes of one form, in one piece; reused from call to call.
#[derive(Default)]
pub struct HashColumn {
    /// Bytes a hash; 0 for integers, and where nothing was read.
    pub width: usize,
    /// Byte hashes, one after the other.
    pub bytes: Vec<u8>,
    /// Integer hashes by their 64 bits.
    pub ints: Vec<u64>,
    /// Whether an integer had a minus sign.
    pub negative: bool,
}

impl HashColumn {
    /// How many hashes there are.
    pub fn len(&self) -> usize {
        self.bytes.len().checked_div(self.width).unwrap_or(self.ints.len())
    }

    /// All hashes from the `from`th on.
    pub fn hashes(&self, from: usize) -> Hashes<'_> {
        match self.width {
            0 => Hashes::Uint(&self.ints[from..]),
            width => Hashes::Bytes { width, data: &self.bytes[from * width..] },
        }
    }

    fn clear(&mut self) {
        self.width = 0;
        self.bytes.clear();
        self.ints.clear();
        self.negative = false;
    }
}

/// Reads hashes, all of one form, restricted to `range` (cut to what is there): a handle (`BlockHashes`), a
/// list or other iterable of integers or of byte strings of one width, a buffer of 64-bit integers, or a
/// buffer of bytes: `(n, width)`, or flat, then of `flat_width` bytes a hash. Replaces what is in `out`.
pub fn read_hashes(
    obj: &Bound<'_, PyAny>,
    range: Option<Range<usize>>,
    flat_width: usize,
    out: &mut HashColumn,
) -> Elements {
    out.clear();
    if let Ok(list) = obj.cast::<PyList>() {
        return list_hashes(list, range, out);
    }
    if let Ok(handle) = obj.cast::<PyBlockHashes>() {
        handle.get().copy_to(range, out);
        return Ok(Ok(()));
    }
    if let Ok(tuple) = obj.cast::<PyTuple>() {
        return list_hashes(&tuple.to_list(), range, out);
    }
    if obj.is_instance_of::<PyString>() {
        return Err(PyTypeError::new_err(format!("a list of hashes was expected, saw {}", preview(obj))));
    }
    if let Ok(buffer) = PyUntypedBuffer::get(obj) {
        return buffer_hashes(&buffer, range, flat_width, out).map(Ok);
    }
    let list = obj.try_iter()?.collect::<PyResult<Vec<_>>>()?;
    list_hashes(&PyList::new(obj.py(), list)?, range, out)
}

fn list_hashes(list: &Bound<'_, PyList>, range: Option<Range<usize>>, out: &mut HashColumn) -> Elements {
    let range = clamp(range, list.len());
    let Some(first) = range.clone().next() else { return Ok(Ok(())) };
    match list.get_item(first)?.cast::<PyBytes>() {
        Ok(b) if b.as_bytes().is_empty() || b.as_bytes().len() > kvevents_core::hash::MAX_HASH_BYTES => {
            let seen = format!("bytes of length {}", b.as_bytes().len());
            Ok(Err(BadElement { index: first, seen, wrong_type: false }))
        }
        Ok(b) => list_bytes(list, range, b.as_bytes().len(), out),
        Err(_) => list_u64s(list, range, out),
    }
}

fn list_bytes(list: &Bound<'_, PyList>, range: Range<usize>, width: usize, out: &mut HashColumn) -> Elements {
    let total = range.len() * width;
    for (i, cells) in range.zip(spare(&mut out.bytes, total).chunks_exact_mut(width)) {
        let (mut data, mut len) = (std::ptr::null_mut(), 0);
        // SAFETY: `list` is a list and stays alive, and no Python code runs in this loop, so the borrowed
        // item does too. What is no bytes (or null) gives -1 and an error that is taken below. The bytes
        // are copied at once, `width` of them, where that is their length.
        unsafe {
            let item = ffi::PyList_GetItem(list.as_ptr(), i.cast_signed());
            if item.is_null() || ffi::PyBytes_AsStringAndSize(item, &raw mut data, &raw mut len) != 0 {
                return bad_item(list, i);
            }
            if len.cast_unsigned() == width {
                std::ptr::copy_nonoverlapping(data.cast(), cells.as_mut_ptr(), width);
                continue;
            }
        }
        let seen = format!("bytes of length {len} among hashes of {width}");
        return Ok(Err(BadElement { index: i, seen, wrong_type: false }));
    }
    // SAFETY: the loop wrote all `total` bytes, or returned.
    unsafe { out.bytes.set_len(out.bytes.len() + total) };
    out.width = width;
    Ok(Ok(()))
}

fn list_u64s(list: &Bound<'_, PyList>, range: Range<usize>, out: &mut HashColumn) -> Elements {
    let n = range.len();
    let cells = spare(&mut out.ints, n);
    let mut done = layout::leading(list, range.start, cells);
    while done < n {
        let i = range.start + done;
        // SAFETY: as in `list_u32s`; `PyLong_AsUnsignedLongLong` runs no Python code.
        let mut value = unsafe {
            let item = ffi::PyList_GetItem(list.as_ptr(), i.cast_signed());
            if item.is_null() { u64::MAX } else { ffi::PyLong_AsUnsignedLongLong(item) }
        };
        if value == u64::MAX {
            // All ones, a negative integer, something with an `__index__`, or an error.
            drop(PyErr::take(list.py()));
            let item = list.get_item(i)?;
            value = match read_hash(&item) {
                Ok(OwnedHash::Uint(v)) => v,
                Ok(OwnedHash::Int(v)) => {
                    out.negative = true;
                    v.cast_unsigned()
                }
                Ok(OwnedHash::Bytes(_)) => {
                    let seen = format!("{} among integers", preview(&item));
                    return Ok(Err(BadElement { index: i, seen, wrong_type: true }));
                }
                Err(seen) => {
                    let wrong_type = !item.is_instance_of::<pyo3::types::PyInt>();
                    return Ok(Err(BadElement { index: i, seen, wrong_type }));
                }
            };
        }
        cells[done].write(value);
        done += 1 + layout::leading(list, i + 1, &mut cells[done + 1..]);
    }
    // SAFETY: the loop wrote `n` elements, or returned.
    unsafe { out.ints.set_len(out.ints.len() + n) };
    Ok(Ok(()))
}

fn buffer_hashes(
    buffer: &PyUntypedBuffer,
    range: Option<Range<usize>>,
    flat_width: usize,
    out: &mut HashColumn,
) -> PyResult<()> {
    use ElementType::{SignedInteger, UnsignedInteger};
    if !buffer.is_c_contiguous() {
        return Err(PyTypeError::new_err("a buffer of hashes must be contiguous"));
    }
    let shape = buffer.shape();
    let (width, len) = match (ElementType::from_format(buffer.format()), shape) {
        (SignedInteger { bytes: 8 } | UnsignedInteger { bytes: 8 }, &[n]) => (8, n),
        (UnsignedInteger { bytes: 1 }, &[n, width]) => (width, n),
        (UnsignedInteger { bytes: 1 }, &[n]) if n % flat_width == 0 => (flat_width, n / flat_width),
        (UnsignedInteger { bytes: 1 }, &[n]) => {
            return Err(PyTypeError::new_err(format!(
                "a flat buffer of hashes of {flat_width} bytes was expected, {n} is no multiple"
            )));
        }
        _ => {
            return Err(PyTypeError::new_err(format!(
                "a buffer of hashes has format 'Q', 'q' or 'B', this one has {:?} and shape {shape:?}",
                buffer.format()
            )));
        }
    };
    if width == 0 || width > kvevents_core::hash::MAX_HASH_BYTES {
        return Err(PyTypeError::new_err(format!("a hash has 1 to 64 bytes, the buffer says {width}")));
    }
    let range = clamp(range, len);
    // SAFETY: the buffer is contiguous and has `len` hashes of `width` bytes; it is held meanwhile, and
    // nobody else runs Python code.
    let bytes = unsafe {
        let first = buffer.buf_ptr().cast::<u8>().wrapping_add(range.start * width);
        if range.is_empty() { &[][..] } else { std::slice::from_raw_parts(first, range.len() * width) }
    };
    if buffer.item_size() == 8 {
        out.ints.extend(bytes.as_chunks().0.iter().map(|b| u64::from_ne_bytes(*b)));
    } else {
        out.width = width;
        out.bytes.extend_from_slice(bytes);
    }
    Ok(())
}

// ---------------------------------------------------------------- exporting

/// Memory that never moves or changes once it is here.
pub enum Memory {
    /// Bytes, with the size and format of an element (`B`, `Q`).
    Bytes {
        /// The memory.
        data: Arc<Vec<u8>>,
        /// Bytes an element.
        item_size: usize,
        /// `struct` format of an element.
        format: &'static CStr,
    },
    /// Signed 32 bits (`i`).
    Ints(Box<[i32]>),
}

/// Base of the handles that are buffers: one dimension, read only. (`__getbuffer__` has to be an unsafe
/// function, and those stand here only.)
#[pyclass(name = "_Buffer", module = "kvevents._core", frozen, subclass)]
pub struct PyMemory {
    memory: Memory,
    shape: [isize; 1],
}

impl PyMemory {
    /// A base to which a handle adds itself.
    pub fn new(memory: Memory) -> Self {
        let len = match &memory {
            Memory::Bytes { data, item_size, .. } => data.len() / item_size,
            Memory::Ints(v) => v.len(),
        };
        Self { memory, shape: [len.cast_signed()] }
    }

    /// The integers of [`Memory::Ints`].
    pub fn ints(&self) -> &[i32] {
        match &self.memory {
            Memory::Ints(v) => v,
            Memory::Bytes { .. } => &[],
        }
    }
}

#[pymethods]
impl PyMemory {
    /// # Safety
    /// The interpreter calls it with a view to be filled.
    unsafe fn __getbuffer__(
        slf: &Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: std::ffi::c_int,
    ) -> PyResult<()> {
        let this = slf.get();
        if view.is_null() {
            return Err(PyBufferError::new_err("no view to fill"));
        }
        if flags & ffi::PyBUF_WRITABLE == ffi::PyBUF_WRITABLE {
            // SAFETY: not null; an exporter that fails must leave no object.
            unsafe { (*view).obj = std::ptr::null_mut() };
            return Err(PyBufferError::new_err("this buffer is read-only"));
        }
        let (data, bytes, item_size, format) = match &this.memory {
            Memory::Bytes { data, item_size, format } => (data.as_ptr(), data.len(), *item_size, *format),
            Memory::Ints(v) => (v.as_ptr().cast(), size_of_val(&**v), 4, c"i"),
        };
        let asked = |flag| flags & flag == flag;
        // SAFETY: the interpreter hands over a view to be filled. The reference in it keeps this object
        // alive, and with it the data and the shape, which never change.
        let v = unsafe { &mut *view };
        v.obj = slf.clone().into_any().into_ptr();
        v.buf = data.cast_mut().cast();
        v.len = bytes.cast_signed();
        v.readonly = 1;
        v.itemsize = item_size.cast_signed();
        v.format = if asked(ffi::PyBUF_FORMAT) { format.as_ptr().cast_mut() } else { std::ptr::null_mut() };
        v.ndim = 1;
        v.shape = if asked(ffi::PyBUF_ND) { this.shape.as_ptr().cast_mut() } else { std::ptr::null_mut() };
        v.strides = if asked(ffi::PyBUF_STRIDES) { &raw mut v.itemsize } else { std::ptr::null_mut() };
        v.suboffsets = std::ptr::null_mut();
        v.internal = std::ptr::null_mut();
        Ok(())
    }
}
