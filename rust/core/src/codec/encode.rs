//! A batch of columns to one payload.
//!
//! What follows the token ids of an event depends, almost always, on its attributes alone. It is built
//! once for each entry of the table of attributes and copied from then on.

use std::ops::Range;

use crate::error::EncodeError;
use crate::events::{Attrs, EventKind, EventList, EventView, ExtraKeys, HashForm, Rare, Tokens};
use crate::msgpack;

use super::sglang::SglangMap;
use super::shape::known_keys;
use super::tokens;
use super::vllm_array::VllmArray;
use super::vllm_map::VllmMap;
use super::writer::{BLOCK, SLACK, Writer};
use super::{Dialect, Timestamp, reader};

/// What may be left out, and what is added, when events are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Fields without a place in the dialect are left out instead of being an error.
    pub lossy: bool,
    /// `metadata` is written, under its name.
    pub metadata: bool,
}

/// An event that was left out of a payload because one of its fields has no place in the dialect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// Its position in what was given.
    pub index: usize,
    /// The field, by vLLM's name.
    pub field: &'static str,
    /// Why it cannot be written.
    pub reason: &'static str,
}

/// Why a field cannot be written.
#[derive(Clone, Copy, Debug)]
pub struct NoPlace {
    pub field: &'static str,
    pub reason: &'static str,
}

/// The usual reason.
pub const NO_PLACE: &str = "has no place";

/// Values that follow the token ids (or, in a removal, the hashes), as bytes.
#[derive(Debug, Default)]
pub struct Suffix {
    /// What stands before `extra_keys`.
    pub before: Vec<u8>,
    /// What stands after it.
    pub after: Vec<u8>,
    /// Number of fields in both.
    pub fields: usize,
    /// An attribute without a place.
    pub fault: Option<NoPlace>,
}

/// A suffix, and its bytes as a whole for the extra keys that came last.
struct Prepared {
    parts: Suffix,
    /// The parts around this many nils, where they were joined last.
    nils: Option<usize>,
    blocks: Vec<[u8; BLOCK]>,
    len: usize,
}

/// Extra keys of longer runs are written in place.
const JOINED_NILS: usize = 64;

impl Prepared {
    fn new(parts: Suffix) -> Self {
        let mut new = Self { parts, nils: None, blocks: Vec::new(), len: 0 };
        new.join(&[]);
        new
    }

    fn join(&mut self, between: &[u8]) {
        let whole = [&self.parts.before, between, &self.parts.after].concat();
        self.len = whole.len();
        self.blocks.clear();
        self.blocks.extend(whole.chunks(BLOCK).map(|part| {
            let mut block = [0; BLOCK];
            block[..part.len()].copy_from_slice(part);
            block
        }));
    }

    /// Without extra keys.
    #[inline]
    fn write_plain(&mut self, w: &mut Writer<'_>) {
        if self.nils.take().is_some() {
            self.join(&[]);
        }
        w.blocks(&self.blocks, self.len);
    }

    /// With extra keys that are all nil.
    #[inline]
    fn write_nils<F: Family>(&mut self, n: usize, w: &mut Writer<'_>) {
        if n > JOINED_NILS {
            w.bytes(&self.parts.before);
            w.bytes(F::EXTRA_KEYS);
            w.array(n);
            w.buf[w.at..w.at + n].fill(0xc0);
            w.at += n;
            w.bytes(&self.parts.after);
            return;
        }
        if self.nils != Some(n) {
            let mut keys = F::EXTRA_KEYS.to_vec();
            msgpack::write_array_header(&mut keys, n);
            keys.resize(keys.len() + n, 0xc0);
            self.join(&keys);
            self.nils = Some(n);
        }
        w.blocks(&self.blocks, self.len);
    }
}

/// How one family of dialects writes an event. The constants are whole pieces of the wire, so that they
/// are copied with a length the compiler knows.
pub trait Family {
    /// From behind the header of a store to its hashes.
    const STORED: &'static [u8];
    /// From the hashes of a store to its parent.
    const PARENT: &'static [u8];
    /// From the parent to the token ids.
    const TOKENS: &'static [u8];
    /// From behind the header of a removal to its hashes.
    const REMOVED: &'static [u8];
    /// A clear, behind its header.
    const CLEARED: &'static [u8];
    /// The name of `extra_keys`.
    const EXTRA_KEYS: &'static [u8];
    /// Whether further fields can follow under their names.
    const NAMED: bool;
    /// Fields of a store that the constants hold.
    const STORED_FIELDS: usize;

    /// The header of an event with this many fields, tag included.
    fn header(&self, w: &mut Writer<'_>, kind: EventKind, fields: usize);
    /// What the attributes of a store say.
    fn stored(&self, a: &Attrs) -> Suffix;
    /// What the attributes of a removal say.
    fn removed(&self, a: &Attrs) -> Suffix;
    /// Whether a store has a place for extra keys.
    fn has_extra_keys(&self) -> bool;
    /// The name of `lookahead_token_ids`, where it has a place.
    fn lookahead(&self) -> Option<&'static [u8]>;
}

/// Writes batches; keeps its memory from one to the next.
#[derive(Debug, Default)]
pub struct Encoder {
    buf: Vec<u8>,
    payload: Range<usize>,
}

/// The events' bytes start here; the header of the batch is put right before them when their number is
/// known.
const HEAD_ROOM: usize = 24;

impl Encoder {
    /// An encoder without memory yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Bytes that it keeps.
    pub fn capacity(&self) -> usize {
        self.buf.capacity()
    }

    /// The last payload; empty where the last call failed.
    pub fn payload(&self) -> &[u8] {
        &self.buf[self.payload.clone()]
    }

    /// One payload, valid until the next call. The first field without a place is an error, unless
    /// `options.lossy`.
    pub fn encode(
        &mut self,
        events: &EventList,
        ts: Timestamp,
        rank: Option<i64>,
        dialect: Dialect,
        options: EncodeOptions,
    ) -> Result<&[u8], EncodeError> {
        let mut fail = |loss: Loss| {
            Err(EncodeError {
                index: loss.index,
                field: loss.field,
                reason: loss.reason,
                dialect: dialect.name(),
            })
        };
        self.run(events, ts, rank, dialect, options, &mut fail)
    }

    /// One payload with every event that can be written, and the others.
    pub fn encode_reporting(
        &mut self,
        events: &EventList,
        ts: Timestamp,
        rank: Option<i64>,
        dialect: Dialect,
        options: EncodeOptions,
    ) -> (&[u8], Vec<Loss>) {
        let mut losses = Vec::new();
        let mut note = |loss: Loss| -> Result<(), std::convert::Infallible> {
            losses.push(loss);
            Ok(())
        };
        let Ok(payload) = self.run(events, ts, rank, dialect, options, &mut note);
        (payload, losses)
    }

    fn run<E>(
        &mut self,
        events: &EventList,
        ts: Timestamp,
        rank: Option<i64>,
        dialect: Dialect,
        options: EncodeOptions,
        on_loss: &mut impl FnMut(Loss) -> Result<(), E>,
    ) -> Result<&[u8], E> {
        self.payload = 0..0;
        let (end, written) = match dialect {
            Dialect::VllmMap033 => self.events(&VllmMap { v033: true }, events, options, on_loss)?,
            Dialect::VllmMap032 => self.events(&VllmMap { v033: false }, events, options, on_loss)?,
            Dialect::VllmArray(n) => self.events(&VllmArray { fields: n }, events, options, on_loss)?,
            Dialect::SglangMap => self.events(&SglangMap, events, options, on_loss)?,
            Dialect::SglangArray => self.events(&VllmArray { fields: 5 }, events, options, on_loss)?,
        };
        let mut head = Vec::with_capacity(HEAD_ROOM);
        head.push(0x93);
        match ts {
            Timestamp::Float(v) => {
                head.push(0xcb);
                head.extend_from_slice(&v.to_be_bytes());
            }
            Timestamp::Int(v) => msgpack::write_int(&mut head, v),
            Timestamp::Uint(v) => msgpack::write_uint(&mut head, v),
        }
        msgpack::write_array_header(&mut head, written);
        let start = HEAD_ROOM - head.len();
        self.buf[start..HEAD_ROOM].copy_from_slice(&head);
        let mut w = Writer { buf: &mut self.buf, at: end };
        match rank {
            Some(rank) => w.int(rank),
            None => w.byte(0xc0),
        }
        let end = w.at;
        self.payload = start..end;
        Ok(self.payload())
    }

    /// All events from [`HEAD_ROOM`] on: the position after the last, and their number.
    fn events<F: Family, E>(
        &mut self,
        family: &F,
        events: &EventList,
        options: EncodeOptions,
        on_loss: &mut impl FnMut(Loss) -> Result<(), E>,
    ) -> Result<(usize, usize), E> {
        let mut suffixes: Vec<Option<Prepared>> = Vec::new();
        // A removal and a store may have equal attributes, and say different things by them.
        suffixes.resize_with(events.attrs_table().len() * 3, || None);
        self.room(HEAD_ROOM, 0);
        let (mut at, mut written) = (HEAD_ROOM, 0);
        for (index, v) in events.iter().enumerate() {
            let event = Seen::of(v);
            let slot = &mut suffixes[v.attrs_index() * 3 + event.kind as usize];
            let suffix = slot.get_or_insert_with(|| {
                Prepared::new(match event.kind {
                    EventKind::Stored => family.stored(v.attrs()),
                    EventKind::Removed => family.removed(v.attrs()),
                    EventKind::Cleared => Suffix::default(),
                })
            });
            if !options.lossy
                && let Some(NoPlace { field, reason }) = event.fault(family, &suffix.parts, options)
            {
                on_loss(Loss { index, field, reason })?;
                continue;
            }
            self.room(at, event.size(&suffix.parts, options));
            let mut w = Writer { buf: &mut self.buf, at };
            event.write(family, suffix, options, &mut w);
            at = w.at;
            written += 1;
        }
        self.room(at, 0);
        Ok((at, written))
    }

    /// Makes room for `size` bytes behind `at`, and for what a writer touches beyond.
    fn room(&mut self, at: usize, size: usize) {
        let need = at + size + SLACK;
        if self.buf.len() < need {
            self.buf.resize(need.max(self.buf.len() * 2), 0);
        }
    }
}

/// One payload; see [`Encoder::encode`].
pub fn encode(
    events: &EventList,
    ts: Timestamp,
    rank: Option<i64>,
    dialect: Dialect,
    options: EncodeOptions,
) -> Result<Vec<u8>, EncodeError> {
    Encoder::new().encode(events, ts, rank, dialect, options).map(<[u8]>::to_vec)
}

/// One payload with every event that can be written, and the others; see
/// [`Encoder::encode_reporting`].
pub fn encode_reporting(
    events: &EventList,
    ts: Timestamp,
    rank: Option<i64>,
    dialect: Dialect,
    options: EncodeOptions,
) -> (Vec<u8>, Vec<Loss>) {
    let mut encoder = Encoder::new();
    let (payload, losses) = encoder.encode_reporting(events, ts, rank, dialect, options);
    (payload.to_vec(), losses)
}

/// An event, taken apart once.
struct Seen<'a> {
    view: EventView<'a>,
    kind: EventKind,
    form: HashForm,
    width: usize,
    hashes: &'a [u8],
    count: usize,
    tokens: Tokens<'a>,
    extra_keys: ExtraKeys<'a>,
    has_rare: bool,
}

impl<'a> Seen<'a> {
    #[inline]
    fn of(view: EventView<'a>) -> Self {
        let (form, width, hashes) = view.raw_hashes();
        Self {
            view,
            kind: view.kind(),
            form,
            width,
            hashes,
            count: view.num_hashes(),
            tokens: view.tokens(),
            extra_keys: view.extra_keys(),
            has_rare: view.has_rare(),
        }
    }

    /// The first thing that the event says and the dialect cannot.
    #[inline]
    fn fault<F: Family>(&self, family: &F, suffix: &Suffix, options: EncodeOptions) -> Option<NoPlace> {
        if suffix.fault.is_some() {
            return suffix.fault;
        }
        let no_place = |field| Some(NoPlace { field, reason: NO_PLACE });
        if !family.has_extra_keys() && self.extra_keys != ExtraKeys::Absent {
            return no_place("extra_keys");
        }
        if !self.has_rare {
            return None;
        }
        if self.view.rare(Rare::Lookahead).is_some() && family.lookahead().is_none() {
            return no_place("lookahead_token_ids");
        }
        if options.metadata && !F::NAMED && self.view.rare(Rare::Metadata).is_some() {
            return no_place("metadata");
        }
        let other = self.view.rare(Rare::Other)?;
        if !F::NAMED {
            return no_place("other_fields");
        }
        other_entries(other, self.kind)
            .any(|entry| !entry.fits)
            .then_some(NoPlace { field: "other_fields", reason: "names a known field, or a name is no str," })
    }

    /// It takes no more bytes than this.
    #[inline]
    fn size(&self, suffix: &Suffix, options: EncodeOptions) -> usize {
        // The names of all fields together, the headers and the parent.
        const NAMES: usize = 512;
        // A tag and a length, or a tag, before each hash; a general one has its tag in the column.
        let hashes = self.hashes.len() * 2 + self.count * 2;
        let mut size =
            NAMES + hashes + self.tokens.len() * 5 + suffix.before.len() + suffix.after.len() + self.count;
        if self.has_rare {
            for field in [Rare::Tokens, Rare::ExtraKeys, Rare::Lookahead, Rare::Other] {
                size += self.view.rare(field).map_or(0, <[u8]>::len);
            }
            if options.metadata {
                size += self.view.rare(Rare::Metadata).map_or(0, <[u8]>::len);
            }
        }
        size
    }

    #[inline]
    fn write<F: Family>(
        &self,
        family: &F,
        suffix: &mut Prepared,
        options: EncodeOptions,
        w: &mut Writer<'_>,
    ) {
        let kind = self.kind;
        let named = if F::NAMED && self.has_rare { Named::of(&self.view, options) } else { Named::default() };
        match kind {
            EventKind::Cleared => {
                family.header(w, kind, 1 + named.fields());
                w.bytes(F::CLEARED);
            }
            EventKind::Removed => {
                family.header(w, kind, 2 + suffix.parts.fields + named.fields());
                w.bytes(F::REMOVED);
                self.write_hashes(w);
                suffix.write_plain(w);
            }
            EventKind::Stored => {
                let extra = if family.has_extra_keys() { self.extra_keys } else { ExtraKeys::Absent };
                let lookahead = if self.has_rare {
                    family.lookahead().and_then(|name| Some((name, self.view.rare(Rare::Lookahead)?)))
                } else {
                    None
                };
                let fields = F::STORED_FIELDS
                    + suffix.parts.fields
                    + usize::from(extra != ExtraKeys::Absent)
                    + usize::from(lookahead.is_some())
                    + named.fields();
                family.header(w, kind, fields);
                w.bytes(F::STORED);
                self.write_hashes(w);
                w.bytes(F::PARENT);
                match self.view.parent() {
                    Some(h) => w.hash(h),
                    None => w.byte(0xc0),
                }
                w.bytes(F::TOKENS);
                match self.tokens {
                    Tokens::Plain(t) => {
                        w.array(t.len());
                        w.at = tokens::write(w.buf, w.at, t);
                    }
                    Tokens::Wide(raw) => w.bytes(raw),
                }
                match extra {
                    ExtraKeys::Absent if F::NAMED || !family.has_extra_keys() => suffix.write_plain(w),
                    ExtraKeys::AllNil => suffix.write_nils::<F>(self.count, w),
                    ExtraKeys::Absent => {
                        w.bytes(&suffix.parts.before);
                        w.byte(0xc0);
                        w.bytes(&suffix.parts.after);
                    }
                    ExtraKeys::Raw(raw) => {
                        w.bytes(&suffix.parts.before);
                        w.bytes(F::EXTRA_KEYS);
                        w.bytes(raw);
                        w.bytes(&suffix.parts.after);
                    }
                }
                if let Some((name, raw)) = lookahead {
                    w.bytes(name);
                    w.bytes(raw);
                }
            }
        }
        named.write(w);
    }

    #[inline]
    fn write_hashes(&self, w: &mut Writer<'_>) {
        w.array(self.count);
        match self.form {
            HashForm::Uint => {
                let (words, _) = self.hashes.as_chunks();
                for word in words {
                    w.uint(u64::from_le_bytes(*word));
                }
            }
            HashForm::Bytes if self.width == 32 => {
                let (digests, _) = self.hashes.as_chunks();
                for digest in digests {
                    w.digest(digest);
                }
            }
            _ => self.view.hashes().for_each(|h| w.hash(h)),
        }
    }
}

/// One unknown field: its bytes, and whether it can stand beside the known ones.
struct OtherEntry<'a> {
    bytes: &'a [u8],
    fits: bool,
}

fn other_entries(map: &[u8], kind: EventKind) -> impl Iterator<Item = OtherEntry<'_>> {
    let (n, mut at) = reader::map_header(map, 0).unwrap_or((0, 0));
    (0..n).map_while(move |_| {
        let value = reader::skip(map, at)?;
        let end = reader::skip(map, value)?;
        let fits = reader::str(map, at).is_some_and(|(key, _)| !known_keys(kind).contains(&key));
        let bytes = &map[at..end];
        at = end;
        Some(OtherEntry { bytes, fits })
    })
}

/// Fields that stand behind the known ones, under their own names.
#[derive(Default)]
struct Named<'a> {
    metadata: Option<&'a [u8]>,
    other: Option<(&'a [u8], EventKind)>,
    others: usize,
}

impl<'a> Named<'a> {
    fn of(v: &EventView<'a>, options: EncodeOptions) -> Self {
        let metadata = if options.metadata { v.rare(Rare::Metadata) } else { None };
        let other = v.rare(Rare::Other).map(|raw| (raw, v.kind()));
        let others = other.map_or(0, |(raw, kind)| other_entries(raw, kind).filter(|e| e.fits).count());
        Self { metadata, other, others }
    }

    fn fields(&self) -> usize {
        self.others + usize::from(self.metadata.is_some())
    }

    fn write(&self, w: &mut Writer<'_>) {
        if let Some(raw) = self.metadata {
            w.bytes(b"\xa8metadata");
            w.bytes(raw);
        }
        if let Some((raw, kind)) = self.other {
            other_entries(raw, kind).filter(|e| e.fits).for_each(|e| w.bytes(e.bytes));
        }
    }
}
