//! Events exactly as engines write them: compared with what is expected, not parsed.
//!
//! Engines write an event's keys in one order, and what follows the token ids hardly differs from event
//! to event. So a store is: a known run of bytes, hashes, a known key, the parent, a known key, token ids,
//! and then the bytes that followed the ids of an event before it, whose attributes are known. Whatever is
//! not that (other order, other integers, anything odd) is left to [`super::shape`] and
//! [`super::fields`], which also find what is wrong; nothing here complains.

use crate::events::{AttrId, EventData, EventKind, ExtraKeys, HashForm, Parent, Written};
use crate::msgpack;

use super::encode::Family;
use super::fields;
use super::reader;
use super::shape::Fields;
use super::tokens;
use super::vllm_array::VllmArray;
use super::vllm_map::VllmMap;

/// The columns are addressed by 32 bits: below this size of a payload they cannot be full.
pub const MAX_PAYLOAD: usize = 1 << 28;

/// Different endings that are remembered.
const REMEMBERED: usize = 4;

/// How an event ended: positions in the payload of what stood around its extra keys, and what that meant.
#[derive(Clone, Copy, Debug)]
struct Ending {
    kind: EventKind,
    map: bool,
    /// Fields of the event as in its header.
    fields: usize,
    before: (usize, usize),
    /// Whether `extra_keys` stood between.
    extra_keys: bool,
    after: (usize, usize),
    attrs: AttrId,
}

/// What is remembered while one payload is read.
#[derive(Default)]
pub struct Fast {
    endings: [Option<Ending>; REMEMBERED],
}

/// Whether `buf` has `want` at `at`; then the position after it.
#[inline]
fn after(buf: &[u8], at: usize, want: &[u8]) -> Option<usize> {
    buf.get(at..)?.starts_with(want).then_some(at + want.len())
}

#[inline]
fn be_u64(b: &[u8]) -> Option<u64> {
    b.first_chunk().map(|b| u64::from_be_bytes(*b))
}

/// A parent: what it is, its bits (where it is an integer) or bytes, and the position after it.
#[inline]
fn parent(buf: &[u8], at: usize) -> Option<(Parent, u64, &[u8], usize)> {
    let rest = buf.get(at..)?;
    match *rest.first()? {
        0xc0 => Some((Parent::None, 0, &[], at + 1)),
        0xcf => Some((Parent::Uint, be_u64(&rest[1..])?, &[], at + 9)),
        0xd3 => {
            let bits = be_u64(&rest[1..])?;
            // A positive number in a signed coding is for the general reader.
            (bits >> 63 == 1).then_some((Parent::Int, bits, &[], at + 9))
        }
        0xc4 => {
            let n = *rest.get(1)?;
            let bytes = rest.get(2..2 + usize::from(n))?;
            (1..=64).contains(&n).then_some((Parent::Bytes(n), 0, bytes, at + 2 + usize::from(n)))
        }
        _ => None,
    }
}

/// `count` hashes at `at`, all integers of nine bytes or all byte strings of one length: how they are
/// stored, and the bytes of one on the wire. Looks at the first only.
#[inline]
fn stride(buf: &[u8], at: usize, count: usize) -> Option<(Written, usize)> {
    if count == 0 {
        return Some((Written { form: HashForm::Uint, width: 8, count }, 0));
    }
    match *buf.get(at)? {
        0xcf | 0xd3 => Some((Written { form: HashForm::Uint, width: 8, count }, 9)),
        0xc4 => {
            let width = *buf.get(at + 1)?;
            (1..=64)
                .contains(&width)
                .then_some((Written { form: HashForm::Bytes, width, count }, 2 + usize::from(width)))
        }
        _ => None,
    }
}

/// Writes the hashes, which stand in `wire`, into the column; `None` where one is not as the first.
#[inline]
fn hashes(wire: &[u8], written: &mut Written, stride: usize, column: &mut Vec<u8>) -> Option<()> {
    if written.count == 0 {
        return Some(());
    }
    if written.form == HashForm::Bytes {
        let head = [0xc4, written.width];
        for one in wire.chunks_exact(stride) {
            column.extend_from_slice(one.strip_prefix(&head)?);
        }
        return Some(());
    }
    let start = column.len();
    column.resize(start + written.count * 8, 0);
    let (mut odd, mut negative, mut above) = (false, false, false);
    for (one, slot) in wire.chunks_exact(9).zip(column[start..].chunks_exact_mut(8)) {
        let bits = be_u64(&one[1..])?;
        let (unsigned, signed, top) = (one[0] == 0xcf, one[0] == 0xd3, bits >> 63 == 1);
        let known = unsigned || signed && top;
        odd |= !known;
        negative |= signed;
        above |= unsigned && top;
        slot.copy_from_slice(&bits.to_le_bytes());
    }
    if odd || negative && above {
        return None;
    }
    if negative {
        written.form = HashForm::Int;
    }
    Some(())
}

impl Fast {
    /// Adds the event at `at` and returns the position after it, or `None` where it is not one that is
    /// known; then `out` is as before.
    #[inline]
    pub fn event(&mut self, buf: &[u8], at: usize, out: &mut EventData) -> Option<usize> {
        let mark = out.mark();
        let end = match *buf.get(at)? {
            0x80..=0x8f | 0xde => {
                let (fields, at) = reader::map_header(buf, at)?;
                self.body::<VllmMap, true>(buf, at, fields, out)
            }
            0x90..=0x9f => {
                let (fields, at) = msgpack::array_header(buf, at)?;
                self.body::<VllmArray, false>(buf, at, fields, out)
            }
            _ => None,
        };
        if end.is_none() {
            out.roll_back(mark);
        }
        end
    }

    #[inline]
    fn body<F: Family, const MAP: bool>(
        &mut self,
        buf: &[u8],
        at: usize,
        fields: usize,
        out: &mut EventData,
    ) -> Option<usize> {
        if let Some(at) = after(buf, at, F::STORED) {
            self.stored::<F, MAP>(buf, at, fields, out)
        } else {
            let at = after(buf, at, F::REMOVED)?;
            self.removed::<F, MAP>(buf, at, fields, out)
        }
    }

    #[inline]
    fn stored<F: Family, const MAP: bool>(
        &mut self,
        buf: &[u8],
        at: usize,
        fields: usize,
        out: &mut EventData,
    ) -> Option<usize> {
        let (count, at) = msgpack::array_header(buf, at)?;
        let (mut written, stride) = stride(buf, at, count)?;
        let hashes_end = at + count.checked_mul(stride)?;
        let wire = buf.get(at..hashes_end)?;
        let (parent, bits, bytes, at) = parent(buf, after(buf, hashes_end, F::PARENT)?)?;
        let (hash_column, token_column) = out.columns();
        match parent {
            Parent::None => {}
            Parent::Uint | Parent::Int => hash_column.extend_from_slice(&bits.to_le_bytes()),
            Parent::Bytes(_) => hash_column.extend_from_slice(bytes),
        }
        hashes(wire, &mut written, stride, hash_column)?;
        let (n, at) = msgpack::array_header(buf, after(buf, at, F::TOKENS)?)?;
        if n > buf.len() - at {
            return None;
        }
        let start = token_column.len();
        token_column.resize(start + n, 0);
        let at = tokens::read(buf, at, &mut token_column[start..]).ok()?;
        let event = Event { buf, at, fields, count };
        let (attrs, extra_keys, end) = self.ending::<F, MAP>(EventKind::Stored, &event, out)?;
        if n > 0 && out.attrs_of(attrs).block_size == 0 {
            return None;
        }
        out.close_stored(attrs, written, parent, n, extra_keys);
        Some(end)
    }

    #[inline]
    fn removed<F: Family, const MAP: bool>(
        &mut self,
        buf: &[u8],
        at: usize,
        fields: usize,
        out: &mut EventData,
    ) -> Option<usize> {
        let (count, at) = msgpack::array_header(buf, at)?;
        let (mut written, stride) = stride(buf, at, count)?;
        let hashes_end = at + count.checked_mul(stride)?;
        hashes(buf.get(at..hashes_end)?, &mut written, stride, out.columns().0)?;
        let event = Event { buf, at: hashes_end, fields, count };
        let (attrs, _, end) = self.ending::<F, MAP>(EventKind::Removed, &event, out)?;
        out.close_removed(attrs, written);
        Some(end)
    }

    /// What an event's ending says, and the position after it.
    #[inline]
    fn ending<'a, F: Family, const MAP: bool>(
        &mut self,
        kind: EventKind,
        event: &Event<'a>,
        out: &mut EventData,
    ) -> Option<(AttrId, ExtraKeys<'a>, usize)> {
        for i in 0..REMEMBERED {
            let Some(known) = &self.endings[i] else { break };
            if known.kind == kind
                && known.map == MAP
                && known.fields == event.fields
                && let Some((extra_keys, end)) = known.matches::<F, MAP>(event)
            {
                let attrs = known.attrs;
                if i > 0 {
                    self.endings.swap(0, i);
                }
                return Some((attrs, extra_keys, end));
            }
        }
        let new = Ending::read::<MAP>(kind, event, out)?;
        self.endings.rotate_right(1);
        self.endings[0] = Some(new);
        let (extra_keys, end) = new.matches::<F, MAP>(event)?;
        Some((new.attrs, extra_keys, end))
    }
}

/// An event whose hashes and token ids were read.
struct Event<'a> {
    buf: &'a [u8],
    /// Where its ending starts.
    at: usize,
    /// Fields as in its header.
    fields: usize,
    /// Hashes.
    count: usize,
}

impl Ending {
    /// Whether the event ends like this, but for the extra keys: these, and the position after all.
    #[inline]
    fn matches<'a, F: Family, const MAP: bool>(&self, event: &Event<'a>) -> Option<(ExtraKeys<'a>, usize)> {
        let buf = event.buf;
        let at = after(buf, event.at, &buf[self.before.0..self.before.1])?;
        let tail = &buf[self.after.0..self.after.1];
        if !self.extra_keys {
            return Some((ExtraKeys::Absent, after(buf, at, tail)?));
        }
        let at = after(buf, at, F::EXTRA_KEYS)?;
        if !MAP && buf.get(at) == Some(&0xc0) {
            return Some((ExtraKeys::Absent, after(buf, at + 1, tail)?));
        }
        let (n, first) = msgpack::array_header(buf, at)?;
        if n == event.count && buf.get(first..first.checked_add(n)?)?.iter().all(|&b| b == 0xc0) {
            return Some((ExtraKeys::AllNil, after(buf, first + n, tail)?));
        }
        let end = reader::check(buf, at).ok()?;
        Some((ExtraKeys::Raw(&buf[at..end]), after(buf, end, tail)?))
    }

    /// Reads an ending that was not seen yet.
    fn read<const MAP: bool>(kind: EventKind, event: &Event<'_>, out: &mut EventData) -> Option<Self> {
        let Event { buf, mut at, fields, .. } = *event;
        let stored = kind == EventKind::Stored;
        let mut ending = Self {
            kind,
            map: MAP,
            fields,
            before: (at, at),
            extra_keys: false,
            after: (at, at),
            attrs: AttrId::default(),
        };
        let mut f = Fields { kind: Some(kind), start: at, ..Fields::default() };
        // A map's header counts the tag among its fields, and so does an array's.
        let first = if stored { 4 } else { 2 };
        for index in first..fields {
            let value = if MAP {
                let (key, value) = reader::raw_str(buf, at)?;
                if stored && key == b"extra_keys" {
                    f.extra_keys = Some(value);
                } else {
                    *named(&mut f, key, stored)? = Some(value);
                }
                value
            } else {
                if stored && index == 8 {
                    f.extra_keys = Some(at);
                } else {
                    *placed(&mut f, index, stored)? = Some(at);
                }
                at
            };
            let end = reader::skip(buf, value)?;
            if f.extra_keys == Some(value) {
                if ending.extra_keys {
                    return None;
                }
                ending.extra_keys = true;
                ending.after = (end, end);
            } else if ending.extra_keys {
                ending.after.1 = end;
            } else {
                ending.before.1 = end;
                ending.after = (end, end);
            }
            at = end;
        }
        f.drop_nils(buf);
        ending.attrs = out.intern(&fields::attrs(buf, &f).ok()?);
        Some(ending)
    }
}

/// The slot of a key that may stand in an ending.
fn named<'a>(f: &'a mut Fields, key: &[u8], stored: bool) -> Option<&'a mut Option<usize>> {
    Some(match key {
        b"medium" => &mut f.medium,
        b"group_idx" => &mut f.group_idx,
        b"locality" => &mut f.locality,
        b"ownership" => &mut f.ownership,
        _ if !stored => return None,
        b"block_size" => &mut f.block_size,
        b"lora_id" => &mut f.lora_id,
        b"lora_name" => &mut f.lora_name,
        b"kv_cache_spec_kind" => &mut f.spec_kind,
        b"kv_cache_spec_sliding_window" => &mut f.window,
        b"session_id" => &mut f.session_id,
        b"cache_salt" => &mut f.cache_salt,
        _ => return None,
    })
}

/// The slot of a position that may stand in an ending.
fn placed(f: &mut Fields, index: usize, stored: bool) -> Option<&mut Option<usize>> {
    Some(match (stored, index) {
        (true, 4) => &mut f.block_size,
        (true, 5) => &mut f.lora_id,
        (true, 6) | (false, 2) => &mut f.medium,
        (true, 7) => &mut f.lora_name,
        (true, 9) | (false, 3) => &mut f.group_idx,
        (true, 10) => &mut f.spec_kind,
        (true, 11) => &mut f.window,
        (true, 12) | (false, 4) => &mut f.locality,
        (true, 13) | (false, 5) => &mut f.ownership,
        (true, 14) => &mut f.session_id,
        _ => return None,
    })
}
