//! Canonical CBOR (RFC 8949, shortest lengths) of `(parent, tokens, extra keys)`.

use super::extra::ExtraKey;

const BYTES: u8 = 0x40;
const TEXT: u8 = 0x60;
const ARRAY: u8 = 0x80;
const NULL: u8 = 0xf6;

/// Appends the message of a block.
#[inline]
pub(super) fn block(parent: &[u8; 32], tokens: &[u32], keys: &[ExtraKey<'_>], out: &mut Vec<u8>) {
    out.resize(max_len(tokens.len()), 0);
    let end = plain(parent, tokens, out);
    if keys.is_empty() {
        out.truncate(end);
    } else {
        out.truncate(end - 1);
        extra_keys(keys, out);
    }
}

/// Room that [`plain`] needs.
pub(super) const fn max_len(tokens: usize) -> usize {
    tokens * 5 + 64
}

/// Writes the message of a block without extra keys; returns its length.
#[inline]
pub(super) fn plain(parent: &[u8; 32], tokens: &[u32], cells: &mut [u8]) -> usize {
    cells[..3].copy_from_slice(&[ARRAY | 3, BYTES | 0x18, 32]);
    cells[3..35].copy_from_slice(parent);
    let n = tokens.len();
    let at = if n < 24 {
        cells[35] = ARRAY | n as u8;
        36
    } else {
        35 + write_tokens_as(ARRAY, &[n as u32], &mut cells[35..])
    };
    let end = at + write_tokens_as(0, tokens, &mut cells[at..]);
    cells[end] = NULL;
    end + 1
}

/// Writes integers of a major type (0 for token ids); returns their length. Each takes 1, 2, 3 or 5 bytes: all
/// 8 bytes of a word are stored and the position moves by what counts, so that no branch depends on a value.
#[inline]
fn write_tokens_as(major: u8, tokens: &[u32], cells: &mut [u8]) -> usize {
    const LEN: [u8; 4] = [1, 2, 3, 5];
    const TAG: [u64; 4] = [0, 0x18 << 56, 0x19 << 56, 0x1a << 56];
    const SHIFT: [u8; 4] = [56, 48, 40, 24];
    let major = u64::from(major) << 56;
    let mut at = 0usize;
    for &t in tokens {
        let class = usize::from(t >= 24) + usize::from(t > 0xff) + usize::from(t > 0xffff);
        let word = major | TAG[class] | u64::from(t).wrapping_shl(SHIFT[class].into());
        cells[at..at.wrapping_add(8)].copy_from_slice(&word.to_be_bytes());
        at = at.wrapping_add(LEN[class].into());
    }
    at
}

/// Appends the array of tagged keys.
pub(super) fn extra_keys(keys: &[ExtraKey<'_>], out: &mut Vec<u8>) {
    head(ARRAY, keys.len() as u64, out);
    for key in keys {
        match *key {
            ExtraKey::Lora(name, path) => {
                out.push(ARRAY | 3);
                string("lora", out);
                string(name, out);
                match path {
                    Some(path) => string(path, out),
                    None => out.push(NULL),
                }
            }
            ExtraKey::Mm(id, offset) => {
                out.push(ARRAY | 3);
                string("mm", out);
                string(id, out);
                int(offset, out);
            }
            ExtraKey::Salt(salt) => {
                out.push(ARRAY | 2);
                string("cache_salt", out);
                string(salt, out);
            }
        }
    }
}

/// Appends a text string.
pub(super) fn string(s: &str, out: &mut Vec<u8>) {
    head(TEXT, s.len() as u64, out);
    out.extend_from_slice(s.as_bytes());
}

fn int(v: i64, out: &mut Vec<u8>) {
    if v < 0 { head(0x20, !v.cast_unsigned(), out) } else { head(0, v.cast_unsigned(), out) }
}

/// A major type with its argument in the fewest bytes.
fn head(major: u8, n: u64, out: &mut Vec<u8>) {
    match n {
        0..24 => out.push(major | n as u8),
        24..0x100 => out.extend_from_slice(&[major | 0x18, n as u8]),
        0x100..0x1_0000 => {
            out.push(major | 0x19);
            out.extend_from_slice(&(n as u16).to_be_bytes());
        }
        0x1_0000..0x1_0000_0000 => {
            out.push(major | 0x1a);
            out.extend_from_slice(&(n as u32).to_be_bytes());
        }
        _ => {
            out.push(major | 0x1b);
            out.extend_from_slice(&n.to_be_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_take_the_shortest_form() {
        for t in [0, 23, 24, 255, 256, 65_535, 65_536, u32::MAX] {
            for n in [1, 23, 24, 300] {
                let tokens = vec![t; n];
                let (mut fast, mut plain) = (Vec::new(), vec![0x83]);
                block(&[9; 32], &tokens, &[], &mut fast);
                head(BYTES, 32, &mut plain);
                plain.extend_from_slice(&[9; 32]);
                head(ARRAY, n as u64, &mut plain);
                for v in tokens {
                    head(0, u64::from(v), &mut plain);
                }
                plain.push(NULL);
                assert_eq!(fast, plain, "{n} times token {t}");
            }
        }
    }

    #[test]
    fn negative_integers() {
        let write = |v| {
            let mut out = Vec::new();
            int(v, &mut out);
            out
        };
        assert_eq!(write(-1), [0x20]);
        assert_eq!(write(-25), [0x38, 24]);
        assert_eq!(write(-500), [0x39, 0x01, 0xf3]);
    }
}
