//! An `EventList` as one byte string: what crosses a process border.
//!
//! Little endian: magic, version, a checksum of the rest, then sections that each start with their
//! length in bytes. Everything is checked on the way in, so that bytes from anywhere are safe to load.

use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::attrs::Attrs;
use super::data::{EventData, MIXED_INT, MIXED_UINT, Origin, RareEntry, Row, Skipped, flag};
use super::list::EventList;
use super::view::{EventKind, HashForm, Rare, has_ids, mixed_count};
use crate::error::EventsError;
use crate::hash::{MAX_HASH_BYTES, le_u64};
use crate::msgpack;

/// Version of the byte format. Raised whenever older builds could misread it.
pub const FORMAT_VERSION: u16 = 1;

const MAGIC: &[u8; 4] = b"KVEL";
const HEADER: usize = 4 + 2 + 2 + 8;
const NONE: u32 = u32::MAX;

/// Reasons that a decoder may give (one word each, for counters); others are read back as `other`.
pub const REASONS: &[&str] = &[
    "truncated",
    "unknown_tag",
    "bad_field",
    "missing_field",
    "not_an_event",
    "too_deep",
    "trailing_bytes",
    "other",
];

fn corrupt<T>(what: impl Into<String>) -> Result<T, EventsError> {
    Err(EventsError::Corrupt(what.into()))
}

fn put_u32(out: &mut Vec<u8>, v: u32) {
    out.extend_from_slice(&v.to_le_bytes());
}

fn put_opt_str(out: &mut Vec<u8>, s: Option<&str>) {
    match s {
        None => put_u32(out, NONE),
        Some(s) => {
            put_u32(out, s.len() as u32);
            out.extend_from_slice(s.as_bytes());
        }
    }
}

fn put_opt_int(out: &mut Vec<u8>, v: Option<i64>) {
    out.push(u8::from(v.is_some()));
    out.extend_from_slice(&v.unwrap_or_default().to_le_bytes());
}

fn put_attrs(out: &mut Vec<u8>, a: &Attrs) {
    put_u32(out, a.block_size);
    for v in [a.lora_id, a.group_idx, a.sliding_window] {
        put_opt_int(out, v);
    }
    for s in [&a.medium, &a.lora_name, &a.spec_kind, &a.locality, &a.ownership, &a.session_id, &a.cache_salt]
    {
        put_opt_str(out, s.as_deref());
    }
}

/// The parts of a list as they stand in its bytes: measured first, then written into memory of that size.
#[derive(Debug)]
pub struct Encoded<'a> {
    rows: Vec<Row>,
    hashes: &'a [u8],
    tokens: &'a [u32],
    rare: Vec<RareEntry>,
    rare_bytes: &'a [u8],
    /// Attributes, origins and what was skipped.
    tail: Vec<u8>,
    overflowed: bool,
}

impl Encoded<'_> {
    fn sections(&self) -> [&[u8]; 5] {
        [
            bytemuck::cast_slice(&self.rows),
            self.hashes,
            bytemuck::cast_slice(self.tokens),
            bytemuck::cast_slice(&self.rare),
            self.rare_bytes,
        ]
    }

    /// How many bytes [`Self::write`] fills.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        HEADER + self.sections().iter().map(|s| 8 + s.len()).sum::<usize>() + self.tail.len()
    }

    /// Fills `out`, which has [`Self::len`] bytes.
    pub fn write(&self, out: &mut [u8]) {
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            out[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        put(MAGIC);
        put(&FORMAT_VERSION.to_le_bytes());
        put(&[u8::from(cfg!(target_endian = "big")), u8::from(self.overflowed)]);
        put(&[0; 8]);
        for section in self.sections() {
            put(&(section.len() as u64).to_le_bytes());
            put(section);
        }
        put(&self.tail);
        let sum = checksum(out);
        out[8..16].copy_from_slice(&sum.to_le_bytes());
    }
}

impl EventList {
    /// The events as bytes, in [`FORMAT_VERSION`].
    pub fn to_bytes(&self) -> Vec<u8> {
        let encoded = self.encoded();
        let mut out = vec![0; encoded.len()];
        encoded.write(&mut out);
        out
    }

    /// What [`Self::to_bytes`] writes, for memory of one's own.
    pub fn encoded(&self) -> Encoded<'_> {
        let (data, range) = self.parts();
        let base = |i: usize| {
            i.checked_sub(1).map_or((0, 0), |i| {
                let r = &data.rows[i];
                (r.hash_end as usize, r.token_end as usize)
            })
        };
        let (hash_from, token_from) = base(range.start);
        let (hash_to, token_to) = base(range.end);
        let rows: Vec<Row> = data.rows[range.clone()]
            .iter()
            .map(|r| Row {
                hash_end: r.hash_end - hash_from as u32,
                token_end: r.token_end - token_from as u32,
                ..*r
            })
            .collect();
        let first = data.rare.partition_point(|e| (e.row as usize) < range.start);
        let last = data.rare.partition_point(|e| (e.row as usize) < range.end);
        let rare_from = data.rare.get(first).map_or(0, |e| e.start);
        let rare_to = if last > first { data.rare[last - 1].end } else { rare_from };
        let rare: Vec<RareEntry> = data.rare[first..last]
            .iter()
            .map(|e| RareEntry {
                row: e.row - range.start as u32,
                field: e.field,
                start: e.start - rare_from,
                end: e.end - rare_from,
            })
            .collect();

        let mut tail = Vec::with_capacity(128 + data.attrs.len() * 96);
        put_u32(&mut tail, data.attrs.len() as u32);
        for a in &data.attrs {
            put_attrs(&mut tail, a);
        }
        match &data.origins {
            None => tail.push(0),
            Some(origins) => {
                tail.push(1);
                for o in &origins[range] {
                    put_opt_str(&mut tail, o.source.as_deref());
                    put_opt_int(&mut tail, o.worker.map(i64::from));
                }
            }
        }
        put_u32(&mut tail, data.skipped.len() as u32);
        for s in &data.skipped {
            tail.extend_from_slice(&(s.index as u64).to_le_bytes());
            put_opt_str(&mut tail, Some(s.reason));
            put_opt_str(&mut tail, Some(&s.detail));
        }
        Encoded {
            rows,
            hashes: &data.hashes[hash_from..hash_to],
            tokens: &data.tokens[token_from..token_to],
            rare,
            rare_bytes: &data.rare_bytes[rare_from as usize..rare_to as usize],
            tail,
            overflowed: data.overflowed,
        }
    }

    /// Reads what [`Self::to_bytes`] wrote. Never panics, whatever the bytes; refuses other versions.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, EventsError> {
        if bytes.len() < HEADER || &bytes[..4] != MAGIC {
            return corrupt(format!("{} bytes that do not start with {MAGIC:?}", bytes.len()));
        }
        let seen = u16::from_le_bytes([bytes[4], bytes[5]]);
        if seen != FORMAT_VERSION {
            return Err(EventsError::Version { seen, known: FORMAT_VERSION });
        }
        if (bytes[6] == 1) != cfg!(target_endian = "big") {
            return corrupt("written on a machine of the other byte order");
        }
        let mut sum = [0; 8];
        sum.copy_from_slice(&bytes[8..16]);
        let sum = u64::from_le_bytes(sum);
        if sum != checksum(bytes) {
            return corrupt("checksum does not match");
        }
        let mut r = Reader { bytes: &bytes[HEADER..] };
        let mut data = EventData {
            rows: r.pods()?,
            hashes: r.section()?.to_vec(),
            tokens: r.pods()?,
            rare: r.pods()?,
            rare_bytes: r.section()?.to_vec(),
            overflowed: bytes[7] != 0,
            ..EventData::default()
        };
        let n = r.u32()? as usize;
        for _ in 0..n {
            data.attrs.push(r.attrs()?);
        }
        if r.u8()? != 0 {
            let mut origins = Vec::new();
            for _ in 0..data.rows.len() {
                let source = r.opt_str()?;
                let worker = r.opt_int()?.and_then(|v| u32::try_from(v).ok());
                origins.push(Origin { source, worker });
            }
            data.origins = Some(origins);
        }
        let n = r.u32()?;
        for _ in 0..n {
            let index = r.u64()? as usize;
            let reason = r.opt_str()?.unwrap_or_default();
            let detail = r.opt_str()?.unwrap_or_default();
            let known = REASONS.iter().find(|k| **k == &*reason);
            data.skipped.push(Skipped {
                index,
                reason: known.copied().unwrap_or("other"),
                detail: detail.to_string(),
            });
        }
        if !r.bytes.is_empty() {
            return corrupt(format!("{} bytes too many", r.bytes.len()));
        }
        check(&mut data)?;
        Ok(Self::of_bytes(data, sum))
    }
}

/// Of everything but itself: the first eight bytes are the seed for what follows the sum.
fn checksum(bytes: &[u8]) -> u64 {
    xxh3_64_with_seed(&bytes[HEADER..], le_u64(&bytes[..8]))
}

/// Checks every invariant that views rely on, and recounts what is derived.
fn check(data: &mut EventData) -> Result<(), EventsError> {
    let (mut hash, mut token) = (0usize, 0usize);
    for (i, r) in data.rows.iter().enumerate() {
        let (hash_end, token_end) = (r.hash_end as usize, r.token_end as usize);
        let hashes_from = hash + usize::from(r.parent_width);
        let parent_form = r.flags >> flag::PARENT_SHIFT & 0b11;
        let parent_ok = match parent_form {
            0 => r.parent_width == 0,
            3 => usize::from(r.parent_width) <= MAX_HASH_BYTES,
            _ => r.parent_width == 8,
        };
        if hash_end < hashes_from
            || hash_end > data.hashes.len()
            || token_end < token
            || token_end > data.tokens.len()
            || r.attrs as usize >= data.attrs.len()
            || r.flags & flag::KIND == 0b11
            || !parent_ok
        {
            return corrupt(format!("event {i} points outside the columns"));
        }
        let segment = &data.hashes[hashes_from..hash_end];
        let width = usize::from(r.width);
        let fits = match HashForm::of_flags(r.flags) {
            HashForm::Uint | HashForm::Int => width == 8 && segment.len().is_multiple_of(8),
            HashForm::Bytes => (1..=MAX_HASH_BYTES).contains(&width) && segment.len().is_multiple_of(width),
            HashForm::Mixed => width == 0 && mixed_fits(segment),
        };
        if !fits {
            return corrupt(format!("event {i} has damaged hashes"));
        }
        if !kind_fits(r, hash_end == hashes_from, token_end == token, &data.attrs[r.attrs as usize]) {
            return corrupt(format!("event {i} has what events of its kind have not"));
        }
        (hash, token) = (hash_end, token_end);
    }
    if hash != data.hashes.len() || token != data.tokens.len() {
        return corrupt("columns are longer than the events");
    }
    let mut before = (0, 0);
    let mut fields = vec![0u8; data.len()];
    for e in &data.rare {
        let value = data.rare_bytes.get(e.start as usize..e.end as usize);
        let whole = value.is_some_and(|v| msgpack::skip_value(v, 0) == Ok(v.len()));
        let flagged = data.rows.get(e.row as usize).is_some_and(|r| r.flags & flag::RARE != 0);
        if !whole || !flagged || e.field >= Rare::COUNT || (e.row, e.start) < before {
            return corrupt(format!("a rare field of event {} is damaged", e.row));
        }
        before = (e.row, e.start);
        let seen = &mut fields[e.row as usize];
        if *seen >> e.field & 1 == 1 || !value.is_some_and(|v| rare_fits(e.field, v)) {
            return corrupt(format!("a rare field of event {} is there twice, or of another type", e.row));
        }
        *seen |= 1 << e.field;
    }
    for (i, (r, &seen)) in data.rows.iter().zip(&fields).enumerate() {
        let has = |field: Rare| seen >> field as u32 & 1 == 1;
        let store_only = has(Rare::Tokens) || has(Rare::ExtraKeys) || has(Rare::Lookahead);
        if store_only && r.flags & flag::KIND != EventKind::Stored as u16
            || has(Rare::Tokens) != (r.flags & flag::WIDE != 0)
            || has(Rare::ExtraKeys) && r.flags & flag::EXTRA_NIL != 0
        {
            return corrupt(format!("event {i} does not say itself which rare fields it has"));
        }
    }
    // Readers use the token ids of an event that calls itself regular.
    let mut irregular = 0;
    for i in 0..data.len() {
        let v = data.view(i);
        let claimed = v.is_irregular();
        if claimed == v.fits() {
            return corrupt(format!("event {i} says wrongly whether it is regular"));
        }
        if v.kind() == EventKind::Stored && v.attrs().block_size == 0 && has_ids(v.tokens()) {
            return corrupt(format!("event {i} has token ids and no block size"));
        }
        irregular += u32::from(claimed);
    }
    data.irregular = irregular;
    Ok(())
}

/// Whether a row has only what its kind of event has, each part in one form.
fn kind_fits(r: &Row, no_hashes: bool, no_tokens: bool, attrs: &Attrs) -> bool {
    let of_stores = flag::WIDE | flag::EXTRA_NIL | 0b11 << flag::PARENT_SHIFT;
    let known = r.flags >> 10 == 0;
    let kind = r.flags & flag::KIND;
    known
        && if kind == EventKind::Stored as u16 {
            no_tokens || r.flags & flag::WIDE == 0
        } else {
            let bare = r.flags & of_stores == 0 && no_tokens;
            bare && (kind == EventKind::Removed as u16 || no_hashes && *attrs == Attrs::default())
        }
}

/// Whether a rare field is of its type.
fn rare_fits(field: u32, value: &[u8]) -> bool {
    if field == Rare::Metadata as u32 || field == Rare::Other as u32 {
        matches!(value[0], 0x80..=0x8f | 0xde | 0xdf)
    } else {
        msgpack::array_header(value, 0).is_some()
    }
}

fn mixed_fits(segment: &[u8]) -> bool {
    if segment.len() < 4 {
        return false;
    }
    let mut at = 4;
    for _ in 0..mixed_count(segment) {
        let Some(&tag) = segment.get(at) else { return false };
        at += 1 + match tag {
            MIXED_UINT | MIXED_INT => 8,
            n if usize::from(n) <= MAX_HASH_BYTES => usize::from(n),
            _ => return false,
        };
    }
    at == segment.len()
}

struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], EventsError> {
        let Some((head, rest)) = self.bytes.split_at_checked(n) else {
            return corrupt(format!("{n} bytes expected, {} left", self.bytes.len()));
        };
        self.bytes = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], EventsError> {
        let mut a = [0; N];
        a.copy_from_slice(self.take(N)?);
        Ok(a)
    }

    fn u8(&mut self) -> Result<u8, EventsError> {
        Ok(self.array::<1>()?[0])
    }

    fn u32(&mut self) -> Result<u32, EventsError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, EventsError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn section(&mut self) -> Result<&'a [u8], EventsError> {
        let n = self.u64()?;
        self.take(usize::try_from(n).unwrap_or(usize::MAX))
    }

    fn pods<T: bytemuck::AnyBitPattern + bytemuck::NoUninit>(&mut self) -> Result<Vec<T>, EventsError> {
        let s = self.section()?;
        if s.len() % size_of::<T>() != 0 {
            return corrupt("a column has a broken length");
        }
        Ok(bytemuck::allocation::pod_collect_to_vec(s))
    }

    fn opt_str(&mut self) -> Result<Option<Arc<str>>, EventsError> {
        let n = self.u32()?;
        if n == NONE {
            return Ok(None);
        }
        match std::str::from_utf8(self.take(n as usize)?) {
            Ok(s) => Ok(Some(s.into())),
            Err(e) => corrupt(format!("a string is not UTF-8: {e}")),
        }
    }

    fn opt_int(&mut self) -> Result<Option<i64>, EventsError> {
        let set = self.u8()? != 0;
        let v = i64::from_le_bytes(self.array()?);
        Ok(set.then_some(v))
    }

    fn attrs(&mut self) -> Result<Attrs, EventsError> {
        Ok(Attrs {
            block_size: self.u32()?,
            lora_id: self.opt_int()?,
            group_idx: self.opt_int()?,
            sliding_window: self.opt_int()?,
            medium: self.opt_str()?,
            lora_name: self.opt_str()?,
            spec_kind: self.opt_str()?,
            locality: self.opt_str()?,
            ownership: self.opt_str()?,
            session_id: self.opt_str()?,
            cache_salt: self.opt_str()?,
        })
    }
}
