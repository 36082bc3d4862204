//! One event, read in place.

use super::attrs::Attrs;
use super::data::{EventData, MIXED_INT, MIXED_UINT, Origin, Row, flag};
use super::same::same_value;
use crate::hash::{HashRef, le_u64};
use crate::msgpack;

/// The three kinds of event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum EventKind {
    /// `BlockStored`
    Stored = 0,
    /// `BlockRemoved`
    Removed = 1,
    /// `AllBlocksCleared`
    Cleared = 2,
}

/// How an event's hashes are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum HashForm {
    /// 8 bytes each, little endian, none negative.
    Uint = 0,
    /// 8 bytes each, little endian, signed.
    Int = 1,
    /// `width` bytes each.
    Bytes = 2,
    /// A count of 4 bytes, then a tag (a length, or one of two for integers) and the bytes of each.
    Mixed = 3,
}

impl HashForm {
    pub(super) fn of_flags(flags: u16) -> Self {
        match flags >> flag::FORM_SHIFT & 0b11 {
            0 => Self::Uint,
            1 => Self::Int,
            2 => Self::Bytes,
            _ => Self::Mixed,
        }
    }
}

/// Fields that few events carry; kept as msgpack bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Rare {
    /// Token ids that are not unsigned 32-bit integers: pairs, strings, larger or negative ones.
    Tokens = 0,
    /// `extra_keys` with something in them.
    ExtraKeys = 1,
    /// `lookahead_token_ids`
    Lookahead = 2,
    /// `metadata`, a map
    Metadata = 3,
    /// Fields that are not known, a map
    Other = 4,
}

impl Rare {
    pub(super) const COUNT: u32 = 5;
}

/// Token ids of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tokens<'a> {
    /// Unsigned 32-bit integers.
    Plain(&'a [u32]),
    /// Anything else: the msgpack array in which they came.
    Wide(&'a [u8]),
}

impl<'a> Tokens<'a> {
    /// Number of ids in the column (0 for the wide form).
    pub const fn len(&self) -> usize {
        match self {
            Self::Plain(t) => t.len(),
            Self::Wide(_) => 0,
        }
    }

    /// Whether [`Self::len`] is 0.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes of the wide form.
    pub const fn raw(&self) -> Option<&'a [u8]> {
        match *self {
            Self::Plain(_) => None,
            Self::Wide(raw) => Some(raw),
        }
    }
}

/// Extra keys of a store, one entry per block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtraKeys<'a> {
    /// The field is not set.
    Absent,
    /// One nil per block.
    AllNil,
    /// A msgpack array.
    Raw(&'a [u8]),
}

impl<'a> ExtraKeys<'a> {
    /// The bytes of the raw form.
    pub const fn raw(&self) -> Option<&'a [u8]> {
        match *self {
            Self::Raw(raw) => Some(raw),
            _ => None,
        }
    }
}

/// A borrowed event.
#[derive(Clone, Copy, Debug)]
pub struct EventView<'a> {
    pub(super) data: &'a EventData,
    pub(super) index: usize,
}

impl<'a> EventView<'a> {
    #[inline]
    fn row(&self) -> &'a Row {
        &self.data.rows[self.index]
    }

    #[inline]
    fn previous(&self) -> (usize, usize) {
        match self.index.checked_sub(1) {
            Some(i) => {
                let r = &self.data.rows[i];
                (r.hash_end as usize, r.token_end as usize)
            }
            None => (0, 0),
        }
    }

    /// Which kind of event it is.
    #[inline]
    pub fn kind(&self) -> EventKind {
        match self.row().flags & flag::KIND {
            0 => EventKind::Stored,
            1 => EventKind::Removed,
            _ => EventKind::Cleared,
        }
    }

    /// What it shares with others.
    #[inline]
    pub fn attrs(&self) -> &'a Attrs {
        &self.data.attrs[self.row().attrs as usize]
    }

    /// The number of its attributes in the table; equal numbers mean equal attributes, within one
    /// list.
    #[inline]
    pub fn attrs_index(&self) -> usize {
        self.row().attrs as usize
    }

    /// Whether its lengths do not fit together; then only its hashes may be used.
    #[inline]
    pub fn is_irregular(&self) -> bool {
        self.row().flags & flag::IRREGULAR != 0
    }

    /// Whether its lengths fit together, found anew. A clear always fits.
    pub(super) fn fits(&self) -> bool {
        let n = self.num_hashes();
        match self.kind() {
            EventKind::Cleared => true,
            EventKind::Removed => n > 0,
            EventKind::Stored => store_fits(
                n,
                self.attrs().block_size,
                self.tokens(),
                self.extra_keys(),
                self.rare(Rare::Lookahead),
            ),
        }
    }

    /// Whether any rare field is set.
    #[inline]
    pub fn has_rare(&self) -> bool {
        self.row().flags & flag::RARE != 0
    }

    /// The parent of the first block, if it was named.
    #[inline]
    pub fn parent(&self) -> Option<HashRef<'a>> {
        let row = self.row();
        let start = self.previous().0;
        let bytes = &self.data.hashes[start..start + usize::from(row.parent_width)];
        match row.flags >> flag::PARENT_SHIFT & 0b11 {
            0 => None,
            3 => Some(HashRef::Bytes(bytes)),
            2 => Some(HashRef::Int(le_u64(bytes).cast_signed())),
            _ => Some(HashRef::Uint(le_u64(bytes))),
        }
    }

    /// Form, width and bytes of the hashes.
    #[inline]
    pub fn raw_hashes(&self) -> (HashForm, usize, &'a [u8]) {
        let row = self.row();
        let start = self.previous().0 + usize::from(row.parent_width);
        let bytes = &self.data.hashes[start..row.hash_end as usize];
        (HashForm::of_flags(row.flags), usize::from(row.width), bytes)
    }

    /// The hashes, in order.
    #[inline]
    pub fn hashes(&self) -> HashIter<'a> {
        let (form, width, bytes) = self.raw_hashes();
        match form {
            HashForm::Mixed => HashIter { form, width, left: mixed_count(bytes), bytes: &bytes[4..] },
            _ => HashIter { form, width, left: count(width, bytes.len()), bytes },
        }
    }

    /// Number of hashes.
    #[inline]
    pub fn num_hashes(&self) -> usize {
        self.hashes().left
    }

    /// The last hash.
    pub fn last_hash(&self) -> Option<HashRef<'a>> {
        let (form, width, bytes) = self.raw_hashes();
        match form {
            HashForm::Mixed => self.hashes().last(),
            _ if bytes.is_empty() => None,
            _ => HashIter { form, width, left: 1, bytes: &bytes[bytes.len() - width..] }.next(),
        }
    }

    /// The hash at `index`, which must be below [`Self::num_hashes`].
    pub fn hash_at(&self, index: usize) -> HashRef<'a> {
        let (form, width, bytes) = self.raw_hashes();
        let mut from = match form {
            HashForm::Mixed => self.hashes(),
            _ => HashIter { form, width, left: 1, bytes: &bytes[index * width..] },
        };
        let hash = if form == HashForm::Mixed { from.nth(index) } else { from.next() };
        hash.unwrap_or(HashRef::Bytes(&[]))
    }

    /// The hash before the block at `index`: of the block before, or the event's parent.
    pub fn parent_of(&self, index: usize) -> Option<HashRef<'a>> {
        if index == 0 { self.parent() } else { Some(self.hash_at(index - 1)) }
    }

    /// The token ids of a store; empty for others.
    #[inline]
    pub fn tokens(&self) -> Tokens<'a> {
        let row = self.row();
        if row.flags & flag::WIDE != 0 {
            return Tokens::Wide(self.rare(Rare::Tokens).unwrap_or(&[0x90]));
        }
        Tokens::Plain(&self.data.tokens[self.previous().1..row.token_end as usize])
    }

    /// The extra keys of a store.
    #[inline]
    pub fn extra_keys(&self) -> ExtraKeys<'a> {
        if self.row().flags & flag::EXTRA_NIL != 0 {
            return ExtraKeys::AllNil;
        }
        self.rare(Rare::ExtraKeys).map_or(ExtraKeys::Absent, ExtraKeys::Raw)
    }

    /// The bytes of a rare field.
    #[inline]
    pub fn rare(&self, field: Rare) -> Option<&'a [u8]> {
        if !self.has_rare() {
            return None;
        }
        let table = &self.data.rare;
        let from = table.partition_point(|e| (e.row as usize) < self.index);
        table[from..]
            .iter()
            .take_while(|e| e.row as usize == self.index)
            .find(|e| e.field == field as u32)
            .map(|e| &self.data.rare_bytes[e.start as usize..e.end as usize])
    }

    /// Where it came from, if that is known.
    pub fn origin(&self) -> Option<&'a Origin> {
        self.data.origins.as_ref().map(|o| &o[self.index])
    }

    /// Equal in every field, metadata included; where they came from does not count.
    pub fn same(&self, other: &EventView<'_>) -> bool {
        let kind = self.kind();
        if kind != other.kind() || self.attrs() != other.attrs() {
            return false;
        }
        let (a, b) = (self.raw_hashes(), other.raw_hashes());
        // Bit-equal storage means equal; a non-negative list may be stored as either integer form.
        let hashes = a == b
            || (self.num_hashes() == other.num_hashes()
                && self.hashes().zip(other.hashes()).all(|(x, y)| x.same_form(&y)));
        let parent = match (self.parent(), other.parent()) {
            (Some(x), Some(y)) => x.same_form(&y),
            (x, y) => x.is_none() && y.is_none(),
        };
        hashes
            && parent
            && self.same_tokens(other)
            && self.same_extra_keys(other)
            && [Rare::Lookahead, Rare::Metadata, Rare::Other]
                .iter()
                .all(|&f| same_value(self.rare(f), other.rare(f)))
    }

    fn same_tokens(&self, other: &EventView<'_>) -> bool {
        match (self.tokens(), other.tokens()) {
            (Tokens::Plain(a), Tokens::Plain(b)) => a == b,
            (Tokens::Wide(a), Tokens::Wide(b)) => same_value(Some(a), Some(b)),
            _ => false,
        }
    }

    fn same_extra_keys(&self, other: &EventView<'_>) -> bool {
        let all_nil = |v: &EventView<'_>| match v.extra_keys() {
            ExtraKeys::Absent => false,
            ExtraKeys::AllNil => true,
            ExtraKeys::Raw(raw) => msgpack::array_header(raw, 0)
                .is_some_and(|(n, at)| n == v.num_hashes() && raw[at..].iter().all(|&b| b == 0xc0)),
        };
        match (self.extra_keys(), other.extra_keys()) {
            (ExtraKeys::Absent, ExtraKeys::Absent) => true,
            (ExtraKeys::Absent, _) | (_, ExtraKeys::Absent) => false,
            (ExtraKeys::Raw(a), ExtraKeys::Raw(b)) => same_value(Some(a), Some(b)),
            _ => all_nil(self) && all_nil(other) && self.num_hashes() == other.num_hashes(),
        }
    }
}

/// How many hashes of this width `len` bytes are. A division is dear, and widths are few.
#[inline]
fn count(width: usize, len: usize) -> usize {
    match width {
        8 => len / 8,
        32 => len / 32,
        _ => len / width.max(1),
    }
}

/// Whether there are token ids, in any form.
pub(super) fn has_ids(tokens: Tokens<'_>) -> bool {
    match tokens {
        Tokens::Plain(ids) => !ids.is_empty(),
        Tokens::Wide(raw) => msgpack::array_header(raw, 0).is_none_or(|(n, _)| n > 0),
    }
}

/// Whether a store of `n` hashes is regular: as many blocks of tokens, and one entry for each in lists by block.
pub(super) fn store_fits(
    n: usize,
    block_size: u32,
    tokens: Tokens<'_>,
    extra_keys: ExtraKeys<'_>,
    lookahead: Option<&[u8]>,
) -> bool {
    let per_block = |raw: &[u8]| msgpack::array_header(raw, 0).is_some_and(|(m, _)| m == n);
    let num_tokens = match tokens {
        Tokens::Plain(ids) => Some(ids.len()),
        Tokens::Wide(raw) => msgpack::array_header(raw, 0).map(|(m, _)| m),
    };
    n > 0
        && block_size > 0
        && n.checked_mul(block_size as usize) == num_tokens
        && extra_keys.raw().is_none_or(per_block)
        && lookahead.is_none_or(per_block)
}

/// Iterator over the hashes of an event.
#[derive(Clone, Debug)]
pub struct HashIter<'a> {
    form: HashForm,
    width: usize,
    left: usize,
    bytes: &'a [u8],
}

impl<'a> Iterator for HashIter<'a> {
    type Item = HashRef<'a>;

    #[inline]
    fn next(&mut self) -> Option<HashRef<'a>> {
        if self.left == 0 {
            return None;
        }
        self.left -= 1;
        let tag = match self.form {
            HashForm::Mixed => {
                let (tag, rest) = self.bytes.split_first()?;
                self.bytes = rest;
                *tag
            }
            HashForm::Uint => MIXED_UINT,
            HashForm::Int => MIXED_INT,
            HashForm::Bytes => self.width as u8,
        };
        let width = if tag >= MIXED_INT { 8 } else { usize::from(tag) };
        let (head, rest) = self.bytes.split_at(width);
        self.bytes = rest;
        Some(match tag {
            MIXED_UINT => HashRef::Uint(le_u64(head)),
            MIXED_INT => HashRef::Int(le_u64(head).cast_signed()),
            _ => HashRef::Bytes(head),
        })
    }

    #[inline]
    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for HashIter<'_> {}

pub(super) fn mixed_count(b: &[u8]) -> usize {
    let mut a = [0; 4];
    a.copy_from_slice(&b[..4]);
    u32::from_le_bytes(a) as usize
}
