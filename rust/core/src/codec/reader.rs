//! Reading msgpack that anybody may have sent.
//!
//! Positions are byte offsets into the whole payload, so that every complaint can say where.

use crate::hash::{HashRef, MAX_HASH_BYTES};
use crate::msgpack::MAX_DEPTH;

/// An integer of the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Int {
    /// Not negative.
    Uint(u64),
    /// Negative.
    Neg(i64),
}

impl Int {
    /// As a signed number, where it fits.
    pub fn signed(self) -> Option<i64> {
        match self {
            Self::Uint(v) => i64::try_from(v).ok(),
            Self::Neg(v) => Some(v),
        }
    }

    /// As an unsigned 32-bit number, where it fits.
    pub fn u32(self) -> Option<u32> {
        match self {
            Self::Uint(v) => u32::try_from(v).ok(),
            Self::Neg(_) => None,
        }
    }
}

#[inline]
fn bytes<const N: usize>(buf: &[u8], at: usize) -> Option<[u8; N]> {
    buf.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn be(buf: &[u8], at: usize, n: usize) -> Option<usize> {
    let b = buf.get(at..at + n)?;
    Some(b.iter().fold(0usize, |acc, &b| acc << 8 | usize::from(b)))
}

/// An integer in any coding, and the position after it.
#[inline]
pub fn int(buf: &[u8], at: usize) -> Option<(Int, usize)> {
    let signed = |v: i64| if v < 0 { Int::Neg(v) } else { Int::Uint(v.cast_unsigned()) };
    Some(match *buf.get(at)? {
        t @ 0x00..=0x7f => (Int::Uint(u64::from(t)), at + 1),
        t @ 0xe0..=0xff => (Int::Neg(i64::from(t.cast_signed())), at + 1),
        0xcc => (Int::Uint(u64::from(*buf.get(at + 1)?)), at + 2),
        0xcd => (Int::Uint(u64::from(u16::from_be_bytes(bytes(buf, at + 1)?))), at + 3),
        0xce => (Int::Uint(u64::from(u32::from_be_bytes(bytes(buf, at + 1)?))), at + 5),
        0xcf => (Int::Uint(u64::from_be_bytes(bytes(buf, at + 1)?)), at + 9),
        0xd0 => (signed(i64::from(buf.get(at + 1)?.cast_signed())), at + 2),
        0xd1 => (signed(i64::from(i16::from_be_bytes(bytes(buf, at + 1)?))), at + 3),
        0xd2 => (signed(i64::from(i32::from_be_bytes(bytes(buf, at + 1)?))), at + 5),
        0xd3 => (signed(i64::from_be_bytes(bytes(buf, at + 1)?)), at + 9),
        _ => return None,
    })
}

/// A float of either width.
pub fn float(buf: &[u8], at: usize) -> Option<(f64, usize)> {
    match *buf.get(at)? {
        0xca => Some((f64::from(f32::from_be_bytes(bytes(buf, at + 1)?)), at + 5)),
        0xcb => Some((f64::from_be_bytes(bytes(buf, at + 1)?), at + 9)),
        _ => None,
    }
}

/// A string's bytes (not yet known to be UTF-8).
#[inline]
pub fn raw_str(buf: &[u8], at: usize) -> Option<(&[u8], usize)> {
    let (from, n) = match *buf.get(at)? {
        t @ 0xa0..=0xbf => (at + 1, usize::from(t & 0x1f)),
        0xd9 => (at + 2, be(buf, at + 1, 1)?),
        0xda => (at + 3, be(buf, at + 1, 2)?),
        0xdb => (at + 5, be(buf, at + 1, 4)?),
        _ => return None,
    };
    Some((buf.get(from..from + n)?, from + n))
}

/// A string.
pub fn str(buf: &[u8], at: usize) -> Option<(&str, usize)> {
    let (raw, end) = raw_str(buf, at)?;
    Some((std::str::from_utf8(raw).ok()?, end))
}

/// A byte string.
#[inline]
pub fn bin(buf: &[u8], at: usize) -> Option<(&[u8], usize)> {
    let (from, n) = match *buf.get(at)? {
        0xc4 => (at + 2, be(buf, at + 1, 1)?),
        0xc5 => (at + 3, be(buf, at + 1, 2)?),
        0xc6 => (at + 5, be(buf, at + 1, 4)?),
        _ => return None,
    };
    Some((buf.get(from..from + n)?, from + n))
}

/// A map's claimed number of entries, and the position after the header.
#[inline]
pub fn map_header(buf: &[u8], at: usize) -> Option<(usize, usize)> {
    match *buf.get(at)? {
        t @ 0x80..=0x8f => Some((usize::from(t & 0x0f), at + 1)),
        0xde => Some((be(buf, at + 1, 2)?, at + 3)),
        0xdf => Some((be(buf, at + 1, 4)?, at + 5)),
        _ => None,
    }
}

/// A block hash: an integer or at most [`MAX_HASH_BYTES`] bytes.
#[inline]
pub fn hash(buf: &[u8], at: usize) -> Option<(HashRef<'_>, usize)> {
    if let Some((v, end)) = int(buf, at) {
        let h = match v {
            Int::Uint(v) => HashRef::Uint(v),
            Int::Neg(v) => HashRef::Int(v),
        };
        return Some((h, end));
    }
    bin(buf, at).filter(|(b, _)| b.len() <= MAX_HASH_BYTES).map(|(b, end)| (HashRef::Bytes(b), end))
}

/// Why a value could not be taken as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bad {
    /// The payload ends inside it.
    Truncated,
    /// It nests deeper than [`MAX_DEPTH`].
    TooDeep,
    /// What stands at this position cannot be given to a user: text that is not UTF-8, a map key that
    /// is neither text nor an integer, a time stamp extension, or the reserved byte.
    Invalid(usize),
}

/// One value's head: how long it is without its children, and how many children follow.
struct Head {
    size: usize,
    children: u64,
    is_map: bool,
}

fn head(buf: &[u8], at: usize) -> Option<Head> {
    let tag = *buf.get(at)?;
    let len = |n: usize| be(buf, at + 1, n);
    let leaf = |size| Head { size, children: 0, is_map: false };
    let list = |size, n: usize| Head { size, children: n as u64, is_map: false };
    let map = |size, n: usize| Head { size, children: n as u64 * 2, is_map: true };
    let head = match tag {
        0x00..=0x7f | 0xe0..=0xff | 0xc0..=0xc3 => leaf(1),
        0x80..=0x8f => map(1, usize::from(tag & 0x0f)),
        0x90..=0x9f => list(1, usize::from(tag & 0x0f)),
        0xa0..=0xbf => leaf(1 + usize::from(tag & 0x1f)),
        0xc4 | 0xd9 => leaf(2 + len(1)?),
        0xc5 | 0xda => leaf(3 + len(2)?),
        0xc6 | 0xdb => leaf(5 + len(4)?),
        0xc7 => leaf(3 + len(1)?),
        0xc8 => leaf(4 + len(2)?),
        0xc9 => leaf(6 + len(4)?),
        0xcc | 0xd0 => leaf(2),
        0xcd | 0xd1 | 0xd4 => leaf(3),
        0xd5 => leaf(4),
        0xca | 0xce | 0xd2 => leaf(5),
        0xd6 => leaf(6),
        0xcb | 0xcf | 0xd3 => leaf(9),
        0xd7 => leaf(10),
        0xd8 => leaf(18),
        0xdc => list(3, len(2)?),
        0xdd => list(5, len(4)?),
        0xde => map(3, len(2)?),
        0xdf => map(5, len(4)?),
    };
    Some(head)
}

/// The position after the value at `at`, however deep it is; `None` where the payload ends first.
///
/// Only a count of values that are still to come is kept, so depth costs nothing.
pub fn skip(buf: &[u8], mut at: usize) -> Option<usize> {
    let mut left = 1u64;
    while left > 0 {
        let head = head(buf, at)?;
        at += head.size;
        left = left - 1 + head.children;
        // Every value takes at least one byte, so a claim beyond that ends the walk at once.
        if at > buf.len() || left > (buf.len() - at) as u64 {
            return None;
        }
    }
    Some(at)
}

/// The position after the value at `at`, which is then safe to keep and to hand to any msgpack reader.
pub fn check(buf: &[u8], mut at: usize) -> Result<usize, Bad> {
    // Per level: children that are still to come, and whether the level is a map.
    let mut open = [(0u64, false); MAX_DEPTH];
    let mut depth = 0;
    open[0] = (1, false);
    loop {
        let (left, in_map) = open[depth];
        if left == 0 {
            if depth == 0 {
                return Ok(at);
            }
            depth -= 1;
            continue;
        }
        open[depth].0 = left - 1;
        let head = head(buf, at).ok_or(Bad::Truncated)?;
        let end = at + head.size;
        if end > buf.len() || head.children > (buf.len() - end) as u64 {
            return Err(Bad::Truncated);
        }
        let tag = buf[at];
        let is_key = in_map && left % 2 == 0;
        let text = raw_str(buf, at);
        let fine = match tag {
            0xc1 => false,
            // Extension type -1 is a time stamp, which not every value of its bytes is.
            0xc7 => buf[at + 2] != 0xff,
            0xc8 => buf[at + 3] != 0xff,
            0xc9 => buf[at + 5] != 0xff,
            0xd4..=0xd8 => buf[at + 1] != 0xff,
            _ => text.is_none_or(|(raw, _)| std::str::from_utf8(raw).is_ok()),
        };
        if !fine || (is_key && text.is_none() && int(buf, at).is_none()) {
            return Err(Bad::Invalid(at));
        }
        at = end;
        if head.children > 0 {
            if depth + 1 == MAX_DEPTH {
                return Err(Bad::TooDeep);
            }
            depth += 1;
            open[depth] = (head.children, head.is_map);
        }
    }
}

/// What stands at `at`, in a few words.
pub fn preview(buf: &[u8], at: usize) -> String {
    const SHOWN: usize = 40;
    let Some(&tag) = buf.get(at) else { return format!("the end of {} bytes", buf.len()) };
    if let Some((v, _)) = int(buf, at) {
        return match v {
            Int::Uint(v) => format!("int {v}"),
            Int::Neg(v) => format!("int {v}"),
        };
    }
    if let Some((v, _)) = float(buf, at) {
        return format!("float {v}");
    }
    if let Some((raw, _)) = raw_str(buf, at) {
        let cut = &raw[..raw.len().min(SHOWN)];
        let dots = if raw.len() > SHOWN { "..." } else { "" };
        return format!("str {:?}{dots}", String::from_utf8_lossy(cut));
    }
    if let Some((raw, _)) = bin(buf, at) {
        return format!("bytes of length {}", raw.len());
    }
    match tag {
        0xc0 => "nil".to_owned(),
        0xc1 => "the reserved byte c1".to_owned(),
        0xc2 => "false".to_owned(),
        0xc3 => "true".to_owned(),
        0x80..=0x8f | 0xde | 0xdf => {
            map_header(buf, at).map_or_else(|| "a cut map".to_owned(), |(n, _)| format!("map of {n}"))
        }
        0x90..=0x9f | 0xdc | 0xdd => crate::msgpack::array_header(buf, at)
            .map_or_else(|| "a cut array".to_owned(), |(n, _)| format!("array of {n}")),
        0xc7..=0xc9 | 0xd4..=0xd8 => "an extension type".to_owned(),
        _ => format!("a value of type {tag:02x} that is cut short"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::msgpack;

    #[test]
    fn every_integer_coding_is_read() {
        for (bytes, want) in [
            (&[0x07][..], Int::Uint(7)),
            (&[0xcc, 0x07], Int::Uint(7)),
            (&[0xcd, 0, 7], Int::Uint(7)),
            (&[0xce, 0, 0, 0, 7], Int::Uint(7)),
            (&[0xcf, 0, 0, 0, 0, 0, 0, 0, 7], Int::Uint(7)),
            (&[0xd0, 7], Int::Uint(7)),
            (&[0xd1, 0, 7], Int::Uint(7)),
            (&[0xd2, 0, 0, 0, 7], Int::Uint(7)),
            (&[0xd3, 0, 0, 0, 0, 0, 0, 0, 7], Int::Uint(7)),
            (&[0xff], Int::Neg(-1)),
            (&[0xd0, 0xff], Int::Neg(-1)),
            (&[0xd3, 255, 255, 255, 255, 255, 255, 255, 255], Int::Neg(-1)),
        ] {
            assert_eq!(int(bytes, 0), Some((want, bytes.len())));
            assert_eq!(int(&bytes[..bytes.len() - 1], 0), None);
        }
    }

    #[test]
    fn skip_goes_through_any_depth_and_check_does_not() {
        let mut deep = vec![0x91; 1_000_000];
        deep.push(0xc0);
        assert_eq!(skip(&deep, 0), Some(deep.len()));
        assert_eq!(check(&deep, 0), Err(Bad::TooDeep));
        assert_eq!(skip(&deep[..1_000_000], 0), None);
    }

    #[test]
    fn check_refuses_what_a_user_could_not_hold() {
        assert_eq!(check(&[0xa1, 0xff], 0), Err(Bad::Invalid(0)));
        assert_eq!(check(&[0x81, 0x90, 0xc0], 0), Err(Bad::Invalid(1)));
        assert_eq!(check(&[0xd6, 0xff, 0, 0, 0, 0], 0), Err(Bad::Invalid(0)));
        assert_eq!(check(&[0xd6, 0x05, 0, 0, 0, 0], 0), Ok(6));
        assert_eq!(check(&[0x81, 0xa1, b'a', 0xc1], 0), Err(Bad::Invalid(3)));
        assert_eq!(check(&[0xdd, 0xff, 0xff, 0xff, 0xff], 0), Err(Bad::Truncated));
    }

    #[test]
    fn skip_and_check_agree_with_the_writer() {
        let mut b = Vec::new();
        msgpack::write_map_header(&mut b, 1);
        msgpack::write_str(&mut b, "a");
        msgpack::write_array_header(&mut b, 2);
        msgpack::write_bin(&mut b, &[1; 300]);
        msgpack::write_int(&mut b, -77);
        for cut in 0..b.len() {
            assert_eq!(skip(&b[..cut], 0), None);
            assert_eq!(check(&b[..cut], 0), Err(Bad::Truncated));
        }
        assert_eq!(skip(&b, 0), Some(b.len()));
        assert_eq!(check(&b, 0), Ok(b.len()));
    }

    #[test]
    fn previews_are_short_and_never_panic() {
        for tag in 0..=255u8 {
            assert!(preview(&[tag], 0).len() < 60);
            assert!(preview(&[tag, 0xff, 0xff, 0xff, 0xff, 0xff], 0).len() < 60);
        }
        assert!(preview(&[], 0).starts_with("the end"));
    }
}
