//! The columns themselves, and how events are added to them.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::attrs::Attrs;
use super::view::{EventKind, EventView, ExtraKeys, HashForm, Rare, Tokens, has_ids, store_fits};
use crate::error::EventsError;
use crate::hash::{HashRef, MAX_HASH_BYTES};

/// Index into the table of attributes of one [`EventData`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttrId(pub(super) u32);

/// Where an event came from: the connector, by its name or position, and the worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// Connector or other source; `None` where it is not known.
    pub source: Option<Arc<str>>,
    /// Worker rank; `None` where it is not known.
    pub worker: Option<u32>,
}

/// An event of a decoded batch that was left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skipped {
    /// Its position in the batch as it was on the wire.
    pub index: usize,
    /// One word: the counter it goes into.
    pub reason: &'static str,
    /// What was seen, and where.
    pub detail: String,
}

/// The hashes of an event that is being added.
#[derive(Clone, Copy, Debug)]
pub enum Hashes<'a> {
    /// Unsigned integers.
    Uint(&'a [u64]),
    /// Integers of which some are negative and none is above 2^63 - 1.
    Int(&'a [u64]),
    /// Byte strings of `width` each, back to back.
    Bytes {
        /// Length of each, 1 to [`MAX_HASH_BYTES`].
        width: usize,
        /// `n * width` bytes.
        data: &'a [u8],
    },
    /// Integers as they stand in the columns: 8 bytes each, little endian.
    IntBytes {
        /// Some are negative, and none is above 2^63 - 1.
        signed: bool,
        /// `n * 8` bytes.
        data: &'a [u8],
    },
    /// Anything else.
    Mixed(&'a [HashRef<'a>]),
}

/// What every kind of event may carry beside its own fields, as msgpack bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct CommonParts<'a> {
    /// The package's own `metadata`: a msgpack map.
    pub metadata: Option<&'a [u8]>,
    /// Fields that are not known, as a msgpack map.
    pub other: Option<&'a [u8]>,
}

/// A `BlockStored` that is being added.
#[derive(Clone, Copy, Debug)]
pub struct StoredParts<'a> {
    /// The blocks' hashes, in order.
    pub hashes: Hashes<'a>,
    /// The hash of the block before the first; `None` for the root.
    pub parent: Option<HashRef<'a>>,
    /// The token ids.
    pub tokens: Tokens<'a>,
    /// The blocks' extra keys.
    pub extra_keys: ExtraKeys<'a>,
    /// `lookahead_token_ids`, a msgpack array.
    pub lookahead: Option<&'a [u8]>,
    /// Fields that any event may carry.
    pub common: CommonParts<'a>,
}

pub(super) mod flag {
    pub const KIND: u16 = 0b11;
    pub const PARENT_SHIFT: u16 = 2;
    pub const FORM_SHIFT: u16 = 4;
    pub const RARE: u16 = 1 << 6;
    pub const EXTRA_NIL: u16 = 1 << 7;
    pub const IRREGULAR: u16 = 1 << 8;
    pub const WIDE: u16 = 1 << 9;
}

/// One event. Its arenas' segments start where those of the row before end; the parent's bytes
/// stand right before the hashes.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Row {
    pub hash_end: u32,
    pub token_end: u32,
    pub attrs: u32,
    pub flags: u16,
    pub width: u8,
    pub parent_width: u8,
}

/// A rare field of one event: bytes `start..end` of the arena of rare bytes.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct RareEntry {
    pub row: u32,
    pub field: u32,
    pub start: u32,
    pub end: u32,
}

/// Events in columns, growing. [`super::EventList`] is the finished, shared form.
#[derive(Clone, Debug, Default)]
pub struct EventData {
    pub(super) rows: Vec<Row>,
    pub(super) hashes: Vec<u8>,
    pub(super) tokens: Vec<u32>,
    pub(super) attrs: Vec<Attrs>,
    pub(super) rare: Vec<RareEntry>,
    pub(super) rare_bytes: Vec<u8>,
    pub(super) origins: Option<Vec<Origin>>,
    pub(super) skipped: Vec<Skipped>,
    pub(super) irregular: u32,
    pub(super) overflowed: bool,
}

/// Attributes are looked up among this many of the most recent ones before a new entry is made.
const INTERN_WINDOW: usize = 8;

fn fits(what: &'static str, size: usize) -> Result<u32, EventsError> {
    u32::try_from(size).map_err(|_| EventsError::TooLarge { what, seen: size, limit: u32::MAX as usize })
}

pub(super) fn write_hash(out: &mut Vec<u8>, h: HashRef<'_>) -> u8 {
    match h {
        HashRef::Bytes(b) => {
            out.extend_from_slice(b);
            b.len() as u8
        }
        _ => {
            out.extend_from_slice(&h.bits().unwrap_or_default().to_le_bytes());
            8
        }
    }
}

/// Tags of the general form; other tags are lengths.
pub(super) const MIXED_UINT: u8 = 0xff;
pub(super) const MIXED_INT: u8 = 0xfe;

impl EventData {
    /// No events yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Number of events.
    #[inline]
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there are no events.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Bytes that the columns use.
    pub fn nbytes(&self) -> usize {
        size_of::<Self>()
            + self.rows.capacity() * size_of::<Row>()
            + self.hashes.capacity()
            + self.tokens.capacity() * 4
            + self.attrs.capacity() * size_of::<Attrs>()
            + self.rare.capacity() * size_of::<RareEntry>()
            + self.rare_bytes.capacity()
    }

    /// Number of token ids held, over all events.
    pub fn num_tokens(&self) -> usize {
        self.tokens.len()
    }

    /// Bytes of hashes and parents held, over all events.
    pub fn num_hash_bytes(&self) -> usize {
        self.hashes.len()
    }

    /// Makes room for what is about to be added.
    pub fn reserve(&mut self, events: usize, hash_bytes: usize, tokens: usize) {
        self.rows.reserve(events);
        self.hashes.reserve(hash_bytes);
        self.tokens.reserve(tokens);
    }

    /// Gives back what the columns reserved and do not use.
    pub fn shrink(&mut self) {
        self.rows.shrink_to_fit();
        self.hashes.shrink_to_fit();
        self.tokens.shrink_to_fit();
        self.attrs.shrink_to_fit();
        self.rare.shrink_to_fit();
        self.rare_bytes.shrink_to_fit();
    }

    /// Takes everything out and keeps the memory.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.hashes.clear();
        self.tokens.clear();
        self.attrs.clear();
        self.rare.clear();
        self.rare_bytes.clear();
        self.origins = None;
        self.skipped.clear();
        self.irregular = 0;
        self.overflowed = false;
    }

    /// Marks that events are missing before the first of these.
    pub fn set_overflowed(&mut self) {
        self.overflowed = true;
    }

    /// Notes an event that was left out.
    pub fn push_skipped(&mut self, skipped: Skipped) {
        self.skipped.push(skipped);
    }

    /// The number of `attrs` in this list. Valid until the list is taken.
    pub fn intern(&mut self, attrs: &Attrs) -> AttrId {
        let n = self.attrs.len();
        if self.attrs.last().is_some_and(|last| last.is_twin(attrs)) {
            return AttrId((n - 1) as u32);
        }
        let from = n.saturating_sub(INTERN_WINDOW);
        if let Some(back) = self.attrs[from..].iter().rev().position(|a| a == attrs) {
            return AttrId((n - 1 - back) as u32);
        }
        self.attrs.push(attrs.clone());
        AttrId(n as u32)
    }

    /// The attributes with this number.
    pub fn attrs_of(&self, id: AttrId) -> &Attrs {
        &self.attrs[id.0 as usize]
    }

    /// The event at `index`, which must be below [`Self::len`].
    #[inline]
    pub fn view(&self, index: usize) -> EventView<'_> {
        EventView { data: self, index }
    }

    fn same_attrs(&self, last: u32, attrs: AttrId) -> bool {
        last == attrs.0 || self.attrs[last as usize] == self.attrs[attrs.0 as usize]
    }

    fn push_hashes(&mut self, hashes: Hashes<'_>) -> (HashForm, u8, usize) {
        match hashes {
            Hashes::Uint(v) | Hashes::Int(v) => {
                if cfg!(target_endian = "little") {
                    self.hashes.extend_from_slice(bytemuck::cast_slice(v));
                } else {
                    for h in v {
                        self.hashes.extend_from_slice(&h.to_le_bytes());
                    }
                }
                let form = if matches!(hashes, Hashes::Uint(_)) { HashForm::Uint } else { HashForm::Int };
                (form, 8, v.len())
            }
            Hashes::Bytes { width, data } if (1..=MAX_HASH_BYTES).contains(&width) => {
                debug_assert_eq!(data.len() % width, 0);
                self.hashes.extend_from_slice(data);
                (HashForm::Bytes, width as u8, data.len() / width)
            }
            Hashes::Bytes { .. } => (HashForm::Bytes, 8, 0),
            Hashes::IntBytes { signed, data } => {
                debug_assert_eq!(data.len() % 8, 0);
                self.hashes.extend_from_slice(data);
                (if signed { HashForm::Int } else { HashForm::Uint }, 8, data.len() / 8)
            }
            Hashes::Mixed(v) => self.push_mixed(v),
        }
    }

    fn push_mixed(&mut self, v: &[HashRef<'_>]) -> (HashForm, u8, usize) {
        // The uniform forms first: a later reader should not have to care how the list was given.
        let all_ints = v.iter().all(|h| h.bits().is_some());
        let negative = v.iter().any(HashRef::is_negative);
        let above = v.iter().any(|h| matches!(h, HashRef::Uint(x) if *x > i64::MAX as u64));
        if all_ints && !(negative && above) {
            for h in v {
                write_hash(&mut self.hashes, *h);
            }
            return (if negative { HashForm::Int } else { HashForm::Uint }, 8, v.len());
        }
        if let Some(HashRef::Bytes(first)) = v.first() {
            let w = first.len();
            if w > 0 && v.iter().all(|h| matches!(h, HashRef::Bytes(b) if b.len() == w)) {
                for h in v {
                    write_hash(&mut self.hashes, *h);
                }
                return (HashForm::Bytes, w as u8, v.len());
            }
        }
        self.hashes.extend_from_slice(&(v.len() as u32).to_le_bytes());
        for h in v {
            self.hashes.push(match h {
                HashRef::Bytes(b) => b.len() as u8,
                h if h.is_negative() => MIXED_INT,
                _ => MIXED_UINT,
            });
            write_hash(&mut self.hashes, *h);
        }
        (HashForm::Mixed, 0, v.len())
    }

    pub(super) fn push_rare(&mut self, field: Rare, bytes: Option<&[u8]>) -> u16 {
        let Some(bytes) = bytes else { return 0 };
        let start = self.rare_bytes.len() as u32;
        self.rare_bytes.extend_from_slice(bytes);
        self.rare.push(RareEntry {
            row: self.rows.len() as u32,
            field: field as u32,
            start,
            end: self.rare_bytes.len() as u32,
        });
        flag::RARE
    }

    fn push_common(&mut self, common: &CommonParts<'_>) -> u16 {
        self.push_rare(Rare::Metadata, common.metadata) | self.push_rare(Rare::Other, common.other)
    }

    fn check_room(&self, hash_bytes: usize, tokens: usize, rare: usize) -> Result<(), EventsError> {
        fits("events", self.rows.len() + 1)?;
        fits("hash bytes", self.hashes.len() + hash_bytes)?;
        fits("token ids", self.tokens.len() + tokens)?;
        fits("bytes of rare fields", self.rare_bytes.len() + rare)?;
        Ok(())
    }

    #[inline]
    pub(super) fn push_row(&mut self, attrs: AttrId, flags: u16, width: u8, parent_width: u8) {
        if flags & flag::IRREGULAR != 0 {
            self.irregular += 1;
        }
        if let Some(origins) = &mut self.origins {
            origins.push(Origin::default());
        }
        self.rows.push(Row {
            hash_end: self.hashes.len() as u32,
            token_end: self.tokens.len() as u32,
            attrs: attrs.0,
            flags,
            width,
            parent_width,
        });
    }

    /// Adds a `BlockStored`; one with token ids and no block size is refused. Whether it is regular (token count and per-block lists fit the hashes) is
    /// found here and remembered. Raw parts must each be one msgpack value.
    pub fn push_stored(&mut self, attrs: AttrId, s: &StoredParts<'_>) -> Result<(), EventsError> {
        let raw = |b: Option<&[u8]>| b.map_or(0, <[u8]>::len);
        let rare = raw(s.extra_keys.raw())
            + raw(s.lookahead)
            + raw(s.common.metadata)
            + raw(s.common.other)
            + raw(s.tokens.raw());
        self.check_room(hashes_size(s.hashes) + MAX_HASH_BYTES, s.tokens.len(), rare)?;
        let block_size = self.attrs[attrs.0 as usize].block_size;
        if block_size == 0 && has_ids(s.tokens) {
            // No reader takes it: what its blocks hold would be anybody's guess.
            let (index, field) = (self.len(), "block_size");
            return Err(EventsError::Field { index, field, seen: "0 with token ids".to_owned() });
        }

        let (parent_form, parent_width) = match s.parent {
            None => (0, 0),
            Some(h) => {
                let width = write_hash(&mut self.hashes, h);
                let form = match h {
                    HashRef::Bytes(_) => 3,
                    h if h.is_negative() => 2,
                    _ => 1,
                };
                (form, width)
            }
        };
        let (form, width, n) = self.push_hashes(s.hashes);
        let mut flags =
            EventKind::Stored as u16 | parent_form << flag::PARENT_SHIFT | (form as u16) << flag::FORM_SHIFT;
        match s.tokens {
            Tokens::Plain(t) => self.tokens.extend_from_slice(t),
            Tokens::Wide(raw) => flags |= flag::WIDE | self.push_rare(Rare::Tokens, Some(raw)),
        }
        match s.extra_keys {
            ExtraKeys::Absent => {}
            ExtraKeys::AllNil => flags |= flag::EXTRA_NIL,
            ExtraKeys::Raw(raw) => flags |= self.push_rare(Rare::ExtraKeys, Some(raw)),
        }
        flags |= self.push_rare(Rare::Lookahead, s.lookahead) | self.push_common(&s.common);
        if !store_fits(n, block_size, s.tokens, s.extra_keys, s.lookahead) {
            flags |= flag::IRREGULAR;
        }
        self.push_row(attrs, flags, width, parent_width);
        Ok(())
    }

    /// Adds blocks to the last event instead of adding an event, where that says the same: the last
    /// event is a regular store with these attributes, its last hash is `s.parent`, and neither
    /// carries anything rare. Returns whether it did.
    pub fn try_extend_stored(&mut self, attrs: AttrId, s: &StoredParts<'_>) -> bool {
        if s.parent.is_none() {
            return false;
        }
        let Some(last) = self.rows.last().copied() else { return false };
        let same_extra = match s.extra_keys {
            ExtraKeys::Absent => last.flags & flag::EXTRA_NIL == 0,
            ExtraKeys::AllNil => last.flags & flag::EXTRA_NIL != 0,
            ExtraKeys::Raw(_) => false,
        };
        let bad = flag::RARE | flag::WIDE | flag::IRREGULAR;
        if last.flags & (flag::KIND | bad) != EventKind::Stored as u16
            || !same_extra
            || !self.same_attrs(last.attrs, attrs)
            || s.lookahead.is_some()
            || s.common.metadata.is_some()
            || s.common.other.is_some()
        {
            return false;
        }
        let form = HashForm::of_flags(last.flags);
        let (bytes, width): (&[u8], usize) = match (s.hashes, form) {
            (Hashes::Uint(v), HashForm::Uint) if cfg!(target_endian = "little") => {
                (bytemuck::cast_slice(v), 8)
            }
            (Hashes::IntBytes { signed: false, data }, HashForm::Uint) => (data, 8),
            (Hashes::Bytes { width, data }, HashForm::Bytes) => (data, width),
            _ => return false,
        };
        let Tokens::Plain(tokens) = s.tokens else { return false };
        let n = bytes.len() / width.max(1);
        let block_size = self.attrs[attrs.0 as usize].block_size as usize;
        let chained = self.view(self.rows.len() - 1).last_hash() == s.parent;
        if width != usize::from(last.width)
            || n == 0
            || n * block_size != tokens.len()
            || !chained
            || self.check_room(bytes.len(), tokens.len(), 0).is_err()
        {
            return false;
        }
        self.hashes.extend_from_slice(bytes);
        self.tokens.extend_from_slice(tokens);
        let (hash_end, token_end) = (self.hashes.len() as u32, self.tokens.len() as u32);
        if let Some(row) = self.rows.last_mut() {
            row.hash_end = hash_end;
            row.token_end = token_end;
        }
        true
    }

    /// Adds a `BlockRemoved`.
    pub fn push_removed(
        &mut self,
        attrs: AttrId,
        hashes: Hashes<'_>,
        common: &CommonParts<'_>,
    ) -> Result<(), EventsError> {
        let rare = common.metadata.map_or(0, <[u8]>::len) + common.other.map_or(0, <[u8]>::len);
        self.check_room(hashes_size(hashes), 0, rare)?;
        let (form, width, n) = self.push_hashes(hashes);
        let mut flags = EventKind::Removed as u16 | (form as u16) << flag::FORM_SHIFT;
        flags |= self.push_common(common);
        if n == 0 {
            flags |= flag::IRREGULAR;
        }
        self.push_row(attrs, flags, width, 0);
        Ok(())
    }

    /// Adds hashes to the last event instead of adding an event, where the last event is a plain
    /// removal with these attributes and hashes of this form. Returns whether it did.
    pub fn try_extend_removed(&mut self, attrs: AttrId, hashes: Hashes<'_>) -> bool {
        let Some(last) = self.rows.last().copied() else { return false };
        if last.flags & (flag::KIND | flag::RARE | flag::IRREGULAR) != EventKind::Removed as u16
            || !self.same_attrs(last.attrs, attrs)
        {
            return false;
        }
        let bytes: &[u8] = match (hashes, HashForm::of_flags(last.flags)) {
            (Hashes::Uint(v), HashForm::Uint) if cfg!(target_endian = "little") => bytemuck::cast_slice(v),
            (Hashes::IntBytes { signed: false, data }, HashForm::Uint) => data,
            (Hashes::Bytes { width, data }, HashForm::Bytes) if width == usize::from(last.width) => data,
            _ => return false,
        };
        if self.check_room(bytes.len(), 0, 0).is_err() {
            return false;
        }
        self.hashes.extend_from_slice(bytes);
        let hash_end = self.hashes.len() as u32;
        if let Some(row) = self.rows.last_mut() {
            row.hash_end = hash_end;
        }
        true
    }

    /// Adds an `AllBlocksCleared`.
    pub fn push_cleared(&mut self, common: &CommonParts<'_>) -> Result<(), EventsError> {
        let rare = common.metadata.map_or(0, <[u8]>::len) + common.other.map_or(0, <[u8]>::len);
        self.check_room(0, 0, rare)?;
        let attrs = self.intern(&Attrs::default());
        let flags = EventKind::Cleared as u16 | self.push_common(common);
        self.push_row(attrs, flags, 8, 0);
        Ok(())
    }

    /// Adds a copy of an event of another list, with its origin.
    pub fn push_view(&mut self, v: EventView<'_>) -> Result<(), EventsError> {
        let common = CommonParts { metadata: v.rare(Rare::Metadata), other: v.rare(Rare::Other) };
        let attrs = self.intern(v.attrs());
        let mixed: Vec<HashRef<'_>>;
        let hashes = match v.raw_hashes() {
            (HashForm::Bytes, width, data) => Hashes::Bytes { width, data },
            (HashForm::Uint, _, data) => Hashes::IntBytes { signed: false, data },
            (HashForm::Int, _, data) => Hashes::IntBytes { signed: true, data },
            (HashForm::Mixed, ..) => {
                mixed = v.hashes().collect();
                Hashes::Mixed(&mixed)
            }
        };
        match v.kind() {
            EventKind::Stored => self.push_stored(
                attrs,
                &StoredParts {
                    hashes,
                    parent: v.parent(),
                    tokens: v.tokens(),
                    extra_keys: v.extra_keys(),
                    lookahead: v.rare(Rare::Lookahead),
                    common,
                },
            )?,
            EventKind::Removed => self.push_removed(attrs, hashes, &common)?,
            EventKind::Cleared => self.push_cleared(&common)?,
        }
        if let Some(origin) = v.origin() {
            self.set_origin(self.len() - 1, origin.clone());
        }
        Ok(())
    }

    /// Says where the event at `index` came from.
    pub fn set_origin(&mut self, index: usize, origin: Origin) {
        let n = self.rows.len();
        self.origins.get_or_insert_with(|| vec![Origin::default(); n])[index] = origin;
    }
}

fn hashes_size(h: Hashes<'_>) -> usize {
    match h {
        Hashes::Uint(v) | Hashes::Int(v) => v.len() * 8,
        Hashes::Bytes { data, .. } | Hashes::IntBytes { data, .. } => data.len(),
        Hashes::Mixed(v) => 4 + v.len() * (1 + MAX_HASH_BYTES),
    }
}
