//! Equality of rare values (free-form msgpack) as a user of the decoded values sees it.
//!
//! The bytes differ where the values do not: other encoders write integers wide, and a map in another order.

use std::cmp::Ordering;

use crate::msgpack;

/// A value without its children.
#[derive(PartialEq)]
enum Head<'a> {
    Nil,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(&'a [u8]),
    Bin(&'a [u8]),
    Ext(&'a [u8]),
    Array(usize),
    Map(usize),
}

fn be(b: &[u8]) -> u64 {
    b.iter().fold(0, |acc, &x| acc << 8 | u64::from(x))
}

fn signed(b: &[u8]) -> i128 {
    let bits = 64 - 8 * b.len() as u32;
    i128::from((be(b) << bits).cast_signed() >> bits)
}

/// The value that starts `b`, and what follows its own bytes (its children, or the next value).
fn head(b: &[u8]) -> Option<(Head<'_>, &[u8])> {
    let (&tag, rest) = b.split_first()?;
    // A length of `n` bytes, then that many bytes (and `more`, for the type of an extension).
    let sized = |n: usize, more: usize| {
        let (len, rest) = rest.split_at_checked(n)?;
        rest.split_at_checked(be(len) as usize + more)
    };
    let count = |n: usize| rest.split_at_checked(n).map(|(len, rest)| (be(len) as usize, rest));
    let fixed = |n: usize| rest.split_at_checked(n);
    Some(match tag {
        0x00..=0x7f => (Head::Int(i128::from(tag)), rest),
        0xe0..=0xff => (Head::Int(i128::from(tag.cast_signed())), rest),
        0x80..=0x8f => (Head::Map(usize::from(tag & 0x0f)), rest),
        0x90..=0x9f => (Head::Array(usize::from(tag & 0x0f)), rest),
        0xa0..=0xbf => fixed(usize::from(tag & 0x1f)).map(|(s, rest)| (Head::Str(s), rest))?,
        0xc0 => (Head::Nil, rest),
        0xc1 => return None,
        0xc2 | 0xc3 => (Head::Bool(tag == 0xc3), rest),
        0xc4..=0xc6 => sized(1 << (tag - 0xc4), 0).map(|(s, rest)| (Head::Bin(s), rest))?,
        0xc7..=0xc9 => sized(1 << (tag - 0xc7), 1).map(|(s, rest)| (Head::Ext(s), rest))?,
        0xca => fixed(4).map(|(s, rest)| (Head::Float(f64::from(f32::from_bits(be(s) as u32))), rest))?,
        0xcb => fixed(8).map(|(s, rest)| (Head::Float(f64::from_bits(be(s))), rest))?,
        0xcc..=0xcf => fixed(1 << (tag - 0xcc)).map(|(s, rest)| (Head::Int(i128::from(be(s))), rest))?,
        0xd0..=0xd3 => fixed(1 << (tag - 0xd0)).map(|(s, rest)| (Head::Int(signed(s)), rest))?,
        0xd4..=0xd8 => fixed(1 + (1 << (tag - 0xd4))).map(|(s, rest)| (Head::Ext(s), rest))?,
        0xd9..=0xdb => sized(1 << (tag - 0xd9), 0).map(|(s, rest)| (Head::Str(s), rest))?,
        0xdc | 0xdd => count(2 << (tag - 0xdc)).map(|(n, rest)| (Head::Array(n), rest))?,
        0xde | 0xdf => count(2 << (tag - 0xde)).map(|(n, rest)| (Head::Map(n), rest))?,
    })
}

/// Whether two whole msgpack values are equal. Nesting is bounded, since both were read by
/// [`msgpack::skip_value`] before.
pub(super) fn same_value(a: Option<&[u8]>, b: Option<&[u8]>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => a == b || prefix_same(a, b, msgpack::MAX_DEPTH).is_some(),
        (a, b) => a.is_none() && b.is_none(),
    }
}

/// What follows two equal values, or `None` where they differ.
fn prefix_same<'a, 'b>(left: &'a [u8], right: &'b [u8], depth: usize) -> Option<(&'a [u8], &'b [u8])> {
    let depth = depth.checked_sub(1)?;
    let ((x, mut left), (y, mut right)) = (head(left)?, head(right)?);
    let equal = match (&x, &y) {
        // A list that was copied equals the original, NaN or not.
        (Head::Float(a), Head::Float(b)) => {
            a.partial_cmp(b) == Some(Ordering::Equal) || a.to_bits() == b.to_bits()
        }
        _ => x == y,
    };
    if !equal {
        return None;
    }
    match x {
        Head::Array(n) => {
            for _ in 0..n {
                (left, right) = prefix_same(left, right, depth)?;
            }
        }
        Head::Map(n) => {
            // Keys are searched from where they are expected: maps mostly have one order.
            let entries = entries(right, n)?;
            for i in 0..n {
                left = (0..n).find_map(|k| {
                    let (key, value, _) = entries[(i + k) % n];
                    let (value_of_left, _) = prefix_same(left, key, depth)?;
                    Some(prefix_same(value_of_left, value, depth)?.0)
                })?;
            }
            right = entries.last().map_or(right, |e| e.2);
        }
        _ => {}
    }
    Some((left, right))
}

/// Where key, value and what follows start.
type Entry<'a> = (&'a [u8], &'a [u8], &'a [u8]);

/// The `n` entries of a map.
fn entries(mut b: &[u8], n: usize) -> Option<Vec<Entry<'_>>> {
    let mut out = Vec::new();
    for _ in 0..n {
        let value = &b[msgpack::skip_value(b, 0).ok()?..];
        let after = &value[msgpack::skip_value(value, 0).ok()?..];
        out.push((b, value, after));
        b = after;
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn same(a: &[u8], b: &[u8]) -> bool {
        assert_eq!(same_value(Some(a), Some(b)), same_value(Some(b), Some(a)), "equality has no direction");
        same_value(Some(a), Some(b))
    }

    #[test]
    fn integers_are_equal_in_every_width() {
        for wide in
            [&[0xcc, 5][..], &[0xcd, 0, 5], &[0xce, 0, 0, 0, 5], &[0xd0, 5], &[0xd3, 0, 0, 0, 0, 0, 0, 0, 5]]
        {
            assert!(same(&[5], wide));
        }
        assert!(same(&[0xff], &[0xd1, 0xff, 0xff]));
        assert!(!same(&[0xff], &[0xcc, 0xff]));
        assert!(!same(&[5], &[0xca, 0x40, 0xa0, 0, 0]), "5 and 5.0 are written differently");
        assert!(same(&[0xca, 0x40, 0xa0, 0, 0], &[0xcb, 0x40, 0x14, 0, 0, 0, 0, 0, 0]));
    }

    #[test]
    fn maps_are_equal_in_every_order_and_differ_by_any_value() {
        let a = [0x82, 0xa1, b'x', 1, 0xa1, b'y', 0x91, 2];
        let b = [0x82, 0xa1, b'y', 0x91, 0xcc, 2, 0xd9, 1, b'x', 1];
        assert!(same(&a, &b));
        assert!(!same(&a, &[0x82, 0xa1, b'y', 0x91, 3, 0xa1, b'x', 1]));
        assert!(!same(&a, &[0x82, 0xa1, b'z', 0x91, 2, 0xa1, b'x', 1]));
        assert!(!same(&a, &[0x81, 0xa1, b'x', 1]));
    }

    #[test]
    fn text_is_not_bytes() {
        assert!(!same(&[0xa1, b'x'], &[0xc4, 1, b'x']));
        assert!(!same_value(Some(&[0xc0]), None));
        assert!(same_value(None, None));
    }
}
