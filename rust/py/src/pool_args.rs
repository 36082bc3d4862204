//! What calls to the pool are given: counts, blocks, and a request as a handle or as lists.

use std::cell::Cell;
use std::ops::Range;

use kvevents_core::error::PoolError;
use kvevents_core::pool::{ExtraKeySource, HashColumn, KeyForm};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::errors::Exc;
use crate::event_reader::to_msgpack;
use crate::ids::{PyBlockIds, ints};
use crate::raw::{self, BadElement, Elements};

/// Buffers for the arguments of one call.
#[derive(Default)]
pub struct Scratch {
    pub blocks: Vec<u32>,
    pub tokens: Vec<u32>,
    pub hashes: raw::HashColumn,
}

thread_local! {
    static SCRATCH: Cell<Option<Box<Scratch>>> = const { Cell::new(None) };
}

/// Runs `f` with this thread's buffers; a call inside a call gets its own.
pub fn with_scratch<T>(f: impl FnOnce(&mut Scratch) -> T) -> T {
    let mut scratch = SCRATCH.take().unwrap_or_default();
    scratch.blocks.clear();
    scratch.tokens.clear();
    let result = f(&mut scratch);
    SCRATCH.set(Some(scratch));
    result
}

/// A count or an index: negative and huge ones are the pool's errors, not the interpreter's.
pub struct Count(pub usize);

impl<'py> FromPyObject<'_, 'py> for Count {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Some(n) = raw::small_int(&obj) {
            return Ok(Self(n));
        }
        match obj.extract::<usize>() {
            Ok(n) => Ok(Self(n)),
            Err(e) if e.is_instance_of::<PyTypeError>(obj.py()) => {
                Err(Exc::BlockTypeError.err(format!("an integer was expected, saw {}", raw::preview(&obj))))
            }
            Err(_) => Err(Exc::BlockError.err(format!("a count was expected, saw {}", raw::preview(&obj)))),
        }
    }
}

/// An element, or a whole argument, that is wrong.
pub fn argument(name: &str, what: &str, obj: &Bound<'_, PyAny>, read: Elements) -> PyResult<()> {
    let bad: BadElement = match read {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(bad)) => bad,
        Err(e) if e.is_instance_of::<PyTypeError>(obj.py()) => {
            return Err(Exc::BlockTypeError.err(format!(
                "{name}: a list or a buffer was expected, saw {} ({})",
                raw::preview(obj),
                e.value(obj.py())
            )));
        }
        Err(e) => return Err(e),
    };
    let kind = if bad.wrong_type { Exc::BlockTypeError } else { Exc::BlockError };
    Err(kind.err(format!("{name}[{}]: {what} was expected, saw {}", bad.index, bad.seen)))
}

/// Block ids of any form, restricted to `range`.
#[inline]
pub fn read_blocks(obj: &Bound<'_, PyAny>, range: Option<Range<usize>>, out: &mut Vec<u32>) -> PyResult<()> {
    if let Ok(ids) = obj.cast::<PyBlockIds>() {
        let ids = ints(ids);
        let range = raw::clamp(range, ids.len());
        out.extend(ids[range].iter().map(|b| b.cast_unsigned()));
        return Ok(());
    }
    argument("blocks", "a block id", obj, raw::read_u32s(obj, range, out))
}

/// The one place where hashes of Python become a column. The first in it has number `first`.
pub fn column(hashes: &raw::HashColumn, first: usize) -> Result<HashColumn<'_>, PoolError> {
    Ok(if hashes.width == 0 {
        HashColumn { form: KeyForm::Int, data: KeyForm::int_bytes(&hashes.ints), first }
    } else {
        HashColumn { form: KeyForm::bytes(hashes.width)?, data: &hashes.bytes, first }
    })
}

/// Extra keys that were given as a list: entries of blocks of `size` tokens, or one entry for all.
pub struct Entries {
    size: usize,
    first: usize,
    list: Vec<Option<Vec<u8>>>,
}

impl Entries {
    /// The list begins with the entry of this block.
    pub const fn starting_at(mut self, block: usize) -> Self {
        self.first = block;
        self
    }
}

impl ExtraKeySource for Entries {
    fn write_entry(&self, tokens: Range<usize>, out: &mut Vec<u8>) -> bool {
        let at = tokens.start.checked_div(self.size).map_or(0, |block| block - self.first);
        let entry = self.list.get(at).and_then(Option::as_ref);
        if let Some(entry) = entry {
            out.extend_from_slice(entry);
        }
        entry.is_some()
    }
}

pub fn read_entries(obj: &Bound<'_, PyAny>, range: Range<usize>, size: usize) -> PyResult<Option<Entries>> {
    let given = obj.len().map_err(|_| {
        Exc::BlockTypeError.err(format!("extra_keys: a list was expected, saw {}", raw::preview(obj)))
    })?;
    if given < range.end {
        return Err(Exc::BlockError
            .err(format!("extra_keys: one entry a block is needed, {} in all, saw {given}", range.end)));
    }
    let first = range.start;
    let mut list = Vec::with_capacity(range.len());
    for i in range {
        let entry = obj.get_item(i)?;
        if entry.is_none() {
            list.push(None);
            continue;
        }
        if !entry.is_instance_of::<PyTuple>() && !entry.is_instance_of::<PyList>() {
            return Err(Exc::BlockTypeError.err(format!(
                "extra_keys[{i}]: a tuple or None was expected, saw {}",
                raw::preview(&entry)
            )));
        }
        let bytes = to_msgpack(&entry)?.map_err(|w| Exc::BlockError.err(format!("extra_keys[{i}]: {w}")))?;
        list.push(Some(bytes));
    }
    Ok(list.iter().any(Option::is_some).then_some(Entries { size, first, list }))
}

/// What stands in place of a request handle.
pub struct Lists<'a, 'py> {
    pub block_hashes: Option<&'a Bound<'py, PyAny>>,
    pub token_ids: Option<&'a Bound<'py, PyAny>>,
    pub lora_name: Option<&'a str>,
    pub lora_id: Option<i64>,
    pub extra_keys: Option<&'a Bound<'py, PyAny>>,
    pub session_id: Option<&'a str>,
}

impl Lists<'_, '_> {
    pub fn any(&self) -> bool {
        self.block_hashes.is_some()
            || self.token_ids.is_some()
            || self.lora_name.is_some()
            || self.lora_id.is_some()
            || self.extra_keys.is_some()
    }
}

/// Which part of the lists a call needs.
pub struct Needed {
    pub hashes: Range<usize>,
    pub tokens: Range<usize>,
    /// Blocks, and tokens of each; size 0: the list is one entry.
    pub entries: (Range<usize>, usize),
}
