//! The fields of an event as the arguments of a call: for queues and recorders.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

use kvevents_core::events::{Attrs, CommonParts, ExtraKeys, Hashes, StoredParts, Tokens};
use kvevents_core::hash::HashRef;
use kvevents_core::msgpack;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMapping, PyString};

use crate::errors::Exc;
use crate::event_reader::to_msgpack;
use crate::raw::{self, OwnedHash};

pub fn bad(field: &str, what: &str) -> PyErr {
    Exc::EventError.err(format!("{field}: {what}"))
}

fn element(name: &str, what: &str, obj: &Bound<'_, PyAny>, read: raw::Elements) -> PyResult<()> {
    match read {
        Ok(Ok(())) => Ok(()),
        Ok(Err(b)) => {
            let kind = if b.wrong_type { Exc::EventTypeError } else { Exc::EventError };
            Err(kind.err(format!("{name}[{}]: {what} was expected, saw {}", b.index, b.seen)))
        }
        Err(e) if e.is_instance_of::<pyo3::exceptions::PyTypeError>(obj.py()) => {
            Err(Exc::EventTypeError.err(format!("{name}: {}", e.value(obj.py()))))
        }
        Err(e) => Err(e),
    }
}

/// Hashes of any one form; lists of several forms are read one by one.
enum AnyHashes {
    Column(raw::HashColumn),
    Mixed(Vec<OwnedHash>),
}

fn read_any(
    obj: &Bound<'_, PyAny>,
    range: Option<Range<usize>>,
    mut column: raw::HashColumn,
) -> PyResult<AnyHashes> {
    if matches!(raw::read_hashes(obj, range.clone(), 32, &mut column), Ok(Ok(()))) && !column.negative {
        return Ok(AnyHashes::Column(column));
    }
    if obj.is_instance_of::<PyString>() {
        return Err(Exc::EventTypeError
            .err(format!("block_hashes: a list of hashes was expected, saw {}", raw::preview(obj))));
    }
    let mut hashes = Vec::new();
    for (i, item) in obj.try_iter()?.enumerate() {
        if range.as_ref().is_some_and(|r| !r.contains(&i)) {
            continue;
        }
        hashes.push(raw::read_hash(&item?).map_err(|what| bad(&format!("block_hashes[{i}]"), &what))?);
    }
    Ok(AnyHashes::Mixed(hashes))
}

fn as_ref(h: &OwnedHash) -> HashRef<'_> {
    match h {
        OwnedHash::Uint(v) => HashRef::Uint(*v),
        OwnedHash::Int(v) => HashRef::Int(*v),
        OwnedHash::Bytes(b) => HashRef::Bytes(b),
    }
}

impl AnyHashes {
    fn len(&self) -> usize {
        match self {
            Self::Column(c) => c.len(),
            Self::Mixed(v) => v.len(),
        }
    }

    fn first(&self) -> Option<HashRef<'_>> {
        match self {
            Self::Column(c) if c.width == 0 => c.ints.first().map(|v| HashRef::Uint(*v)),
            Self::Column(c) => c.bytes.get(..c.width).map(HashRef::Bytes),
            Self::Mixed(v) => v.first().map(as_ref),
        }
    }

    /// All hashes from the `from`th on.
    fn with<T>(&self, from: usize, f: impl FnOnce(Hashes<'_>) -> T) -> T {
        match self {
            Self::Column(c) => f(c.hashes(from)),
            Self::Mixed(v) => {
                let refs: Vec<HashRef<'_>> = v[from..].iter().map(as_ref).collect();
                f(Hashes::Mixed(&refs))
            }
        }
    }
}

thread_local! {
    /// Buffers of the last call: a store is read into memory that is warm.
    static SPARE: Cell<(Vec<u32>, raw::HashColumn)> = Cell::default();
}

/// Buffers larger than this are given back.
const SPARE_TOKENS: usize = 1 << 16;

pub fn read_metadata(metadata: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Vec<u8>>> {
    let Some(m) = metadata else { return Ok(None) };
    let Ok(mapping) = m.cast::<PyMapping>() else {
        return Err(Exc::EventTypeError
            .err(format!("metadata: a mapping or None was expected, saw {}", raw::preview(m))));
    };
    let copy = PyDict::new(m.py());
    copy.update(mapping)?;
    to_msgpack(copy.as_any())?.map(Some).map_err(|what| bad("metadata", &what))
}

/// The fields of a store, read from Python and owned.
pub struct Stored {
    hashes: AnyHashes,
    /// Whether the first of the hashes is no block of the store but its parent.
    parent_first: bool,
    parent: Option<OwnedHash>,
    tokens: Vec<u32>,
    extra: Option<Vec<u8>>,
    metadata: Option<Vec<u8>>,
    attrs: Attrs,
}

/// What a store's lists are given as: whole, with the range of blocks that is meant.
pub struct StoredLists<'a, 'py> {
    pub block_hashes: &'a Bound<'py, PyAny>,
    pub parent_block_hash: Option<&'a Bound<'py, PyAny>>,
    pub token_ids: &'a Bound<'py, PyAny>,
    pub extra_keys: Option<&'a Bound<'py, PyAny>>,
    pub metadata: Option<&'a Bound<'py, PyAny>>,
    pub blocks: Option<Range<usize>>,
}

impl Stored {
    /// Reads and checks everything; nothing is changed where that fails.
    pub fn read(lists: &StoredLists<'_, '_>, attrs: Attrs) -> PyResult<Self> {
        let size = attrs.block_size as usize;
        let blocks = lists.blocks.clone();
        let (mut tokens, column) = SPARE.take();
        tokens.clear();
        // The run begins inside the lists: its parent is the block before it there.
        let parent_first = blocks.as_ref().is_some_and(|b| b.start > 0 && b.start < b.end);
        let with_parent = blocks.clone().map(|b| b.start - usize::from(parent_first)..b.end);
        let hashes = read_any(lists.block_hashes, with_parent, column)?;
        let parent = match lists.parent_block_hash.filter(|_| !parent_first) {
            Some(p) => Some(raw::read_hash(p).map_err(|what| bad("parent_block_hash", &what))?),
            None => None,
        };
        let span = blocks.as_ref().map(|b| b.start.saturating_mul(size)..b.end.saturating_mul(size));
        let read = raw::read_u32s(lists.token_ids, span, &mut tokens);
        element("token_ids", "0 to 2^32-1", lists.token_ids, read)?;
        let extra = match lists.extra_keys.filter(|k| !k.is_none()) {
            None => None,
            Some(keys) => {
                let keys = match &blocks {
                    None => keys.clone(),
                    Some(b) => keys.get_item(pyo3::types::PySlice::new(
                        keys.py(),
                        b.start.cast_signed(),
                        b.end.cast_signed(),
                        1,
                    ))?,
                };
                Some(to_msgpack(&keys)?.map_err(|what| bad("extra_keys", &what))?)
            }
        };
        let metadata = read_metadata(lists.metadata)?;
        let stored = Self { hashes, parent_first, parent, tokens, extra, metadata, attrs };
        stored.check()?;
        Ok(stored)
    }

    fn check(&self) -> PyResult<()> {
        let n = self.hashes.len().saturating_sub(usize::from(self.parent_first));
        let (size, have) = (self.attrs.block_size, self.tokens.len());
        if n == 0 {
            return Err(bad("block_hashes", "at least one hash was expected, saw none"));
        }
        if size == 0 || n.checked_mul(size as usize) != Some(have) {
            return Err(bad(
                "token_ids",
                &format!("{n} blocks of {size} tokens were expected, saw {have} ids"),
            ));
        }
        match self.extra.as_deref().map(|raw| msgpack::array_header(raw, 0)) {
            None => Ok(()),
            Some(Some((m, _))) if m == n => Ok(()),
            Some(_) => Err(bad("extra_keys", &format!("a list of {n} entries was expected"))),
        }
    }

    /// Hands the fields to the core.
    pub fn with<T>(&self, f: impl FnOnce(&Attrs, &StoredParts<'_>) -> T) -> T {
        let nil = |raw: &[u8]| {
            msgpack::array_header(raw, 0).is_some_and(|(_, at)| raw[at..].iter().all(|&b| b == 0xc0))
        };
        let extra_keys = match self.extra.as_deref() {
            None => ExtraKeys::Absent,
            Some(raw) if nil(raw) => ExtraKeys::AllNil,
            Some(raw) => ExtraKeys::Raw(raw),
        };
        let parent = self.parent.as_ref().map(as_ref);
        self.hashes.with(usize::from(self.parent_first), |hashes| {
            let parts = StoredParts {
                hashes,
                parent: if self.parent_first { self.hashes.first() } else { parent },
                tokens: Tokens::Plain(&self.tokens),
                extra_keys,
                lookahead: None,
                common: CommonParts { metadata: self.metadata.as_deref(), other: None },
            };
            f(&self.attrs, &parts)
        })
    }
}

impl Drop for Stored {
    fn drop(&mut self) {
        if self.tokens.capacity() > SPARE_TOKENS {
            return;
        }
        if let AnyHashes::Column(column) = &mut self.hashes {
            SPARE.set((std::mem::take(&mut self.tokens), std::mem::take(column)));
        }
    }
}

/// The fields of a removal.
pub struct Removed {
    hashes: AnyHashes,
    metadata: Option<Vec<u8>>,
    attrs: Attrs,
}

impl Removed {
    /// Reads and checks everything.
    pub fn read(
        block_hashes: &Bound<'_, PyAny>,
        metadata: Option<&Bound<'_, PyAny>>,
        attrs: Attrs,
    ) -> PyResult<Self> {
        let hashes = read_any(block_hashes, None, raw::HashColumn::default())?;
        if hashes.len() == 0 {
            return Err(bad("block_hashes", "at least one hash was expected, saw none"));
        }
        Ok(Self { hashes, metadata: read_metadata(metadata)?, attrs })
    }

    /// Hands the fields to the core.
    pub fn with<T>(&self, f: impl FnOnce(&Attrs, Hashes<'_>, &CommonParts<'_>) -> T) -> T {
        let common = CommonParts { metadata: self.metadata.as_deref(), other: None };
        self.hashes.with(0, |hashes| f(&self.attrs, hashes, &common))
    }
}

/// A string of Python as the core keeps it.
pub fn text(s: Option<&str>) -> Option<Arc<str>> {
    s.map(Arc::from)
}
