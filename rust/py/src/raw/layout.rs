//! Exact integers in lists, read where they lie in memory.
//!
//! Through the stable ABI an element of a list costs two calls. In the releases of `CPython` whose layout of
//! `list` and `int` is known (3.11 to 3.14, 64 bits, with the interpreter lock) integers are read directly,
//! once a check at the first use has found that this interpreter's objects look as expected. Anything else,
//! any other interpreter and every element that is no exact `int` goes through the ABI.

use std::mem::MaybeUninit;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyList};

/// Bytes of what every object starts with.
const HEADER: usize = 16;
/// Where the fields stand that this file reads: words of 8 bytes, digits of 4.
const INT_SIZE: usize = HEADER / 8;
const INT_DIGITS: usize = (HEADER + 8) / 4;
const LIST_ITEMS: usize = (HEADER + 8) / 8;

/// What stands at [`INT_SIZE`].
#[derive(Clone, Copy, PartialEq, Eq)]
enum Layout {
    /// Number of digits, negative for negative integers (3.11).
    Signed,
    /// Number of digits times 8, and the sign in the low two bits: 0 positive, 1 zero, 2 negative (3.12 on).
    Tagged,
}

const SIGNED: bool = false;
const TAGGED: bool = true;

/// The value of an exact `int` from 0 to 2^64 - 1.
///
/// # Safety
/// `item` is a live object, and the layout was found to be this one.
#[inline]
unsafe fn value<const TAG: bool>(item: *mut ffi::PyObject, int: *mut ffi::PyTypeObject) -> Option<u64> {
    // SAFETY: every object has a type; the fields behind it are read only of an exact `int`, which has a
    // size and as many digits of 30 bits as it says.
    unsafe {
        if ffi::Py_TYPE(item) != int {
            return None;
        }
        let size = item.cast::<usize>().add(INT_SIZE).read();
        let digits = if TAG {
            if size & 3 == 2 {
                return None;
            }
            size >> 3
        } else {
            size
        };
        let digit = |i: usize| u64::from(item.cast::<u32>().add(INT_DIGITS + i).read());
        match digits {
            0 => Some(0),
            1 => Some(digit(0)),
            2 => Some(digit(0) | digit(1) << 30),
            3 if digit(2) < 16 => Some(digit(0) | digit(1) << 30 | digit(2) << 60),
            _ => None,
        }
    }
}

/// An unsigned integer of the width that is asked for.
pub(super) trait Unsigned: Copy {
    /// `None` where it does not fit.
    fn of(value: u64) -> Option<Self>;
}

impl Unsigned for u32 {
    #[inline]
    fn of(value: u64) -> Option<Self> {
        Self::try_from(value).ok()
    }
}

impl Unsigned for u64 {
    #[inline]
    fn of(value: u64) -> Option<Self> {
        Some(value)
    }
}

/// # Safety
/// As for [`value`]; `list` is a list of at least `from + cells.len()` elements.
unsafe fn run<T: Unsigned, const TAG: bool>(
    list: *mut ffi::PyObject,
    from: usize,
    cells: &mut [MaybeUninit<T>],
) -> usize {
    // SAFETY: the list has a pointer to its elements, which are live objects; nothing runs in this loop that
    // could change it.
    unsafe {
        let int = &raw mut ffi::PyLong_Type;
        let items = list.cast::<*mut *mut ffi::PyObject>().add(LIST_ITEMS).read().add(from);
        for (i, cell) in cells.iter_mut().enumerate() {
            match value::<TAG>(items.add(i).read(), int).and_then(T::of) {
                Some(v) => cell.write(v),
                None => return i,
            };
        }
    }
    cells.len()
}

fn layout(py: Python<'_>) -> Option<Layout> {
    static FOUND: PyOnceLock<Option<Layout>> = PyOnceLock::new();
    *FOUND.get_or_init(py, || find(py).unwrap_or_default())
}

/// Writes the elements from `from` on to `cells` as long as they are exact integers that fit. Returns how
/// many it wrote: 0 where nothing is known about the layout. No Python code runs.
#[inline]
pub(super) fn leading<T: Unsigned>(
    list: &Bound<'_, PyList>,
    from: usize,
    cells: &mut [MaybeUninit<T>],
) -> usize {
    let room = list.len().saturating_sub(from).min(cells.len());
    let (at, cells) = (list.as_ptr(), &mut cells[..room]);
    // SAFETY: `list` is a list with that many elements, and the layout was checked.
    unsafe {
        match layout(list.py()) {
            Some(Layout::Signed) => run::<T, SIGNED>(at, from, cells),
            Some(Layout::Tagged) => run::<T, TAGGED>(at, from, cells),
            None => 0,
        }
    }
}

/// The layout by the release, if objects of this interpreter are found to look like it.
fn find(py: Python<'_>) -> PyResult<Option<Layout>> {
    let name: String = py.import("sys")?.getattr("implementation")?.getattr("name")?.extract()?;
    let version = py.version_info();
    let supposed = match (version.major, version.minor) {
        (3, 11) => Layout::Signed,
        (3, 12..=14) => Layout::Tagged,
        _ => return Ok(None),
    };
    if name != "cpython" || cfg!(not(target_pointer_width = "64")) || size_of::<ffi::PyObject>() != HEADER {
        return Ok(None);
    }
    Ok(looks_like(py, supposed)?.then_some(supposed))
}

/// Whether integers of every length and sign, in a list, are found to be what they are.
fn looks_like(py: Python<'_>, layout: Layout) -> PyResult<bool> {
    let mut wanted: Vec<i128> = vec![0, 1, 5, 255, 256, 257, -1, -5, -6, i128::from(u64::MAX) + 1];
    for bits in [15, 16, 29, 30, 31, 32, 45, 59, 60, 61, 63, 64, 90] {
        wanted.extend([(1 << bits) - 1, 1 << bits, -(1 << bits)]);
    }
    let list = PyList::new(py, &wanted)?;
    list.append(PyBool::new(py, true))?;
    for (i, item) in list.iter().enumerate() {
        let expected = wanted.get(i).and_then(|&v| u64::try_from(v).ok());
        let mut cell = [MaybeUninit::<u64>::uninit()];
        // SAFETY: the element `i` is there. A release that is laid out in another way than it is known to be
        // gives wrong numbers here, read from the object itself or right behind it.
        let found = unsafe {
            let n = match layout {
                Layout::Signed => run::<u64, SIGNED>(list.as_ptr(), i, &mut cell),
                Layout::Tagged => run::<u64, TAGGED>(list.as_ptr(), i, &mut cell),
            };
            (n == 1).then(|| cell[0].assume_init())
        };
        let unequal = match found {
            Some(v) => !item.eq(v)? || item.is_instance_of::<PyBool>(),
            None => false,
        };
        if found != expected || unequal {
            return Ok(false);
        }
    }
    Ok(true)
}
