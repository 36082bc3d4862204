//! Canonical CBOR (RFC 8949, shortest lengths) of `(parent, tokens, extra keys)`.

use super::extra::ExtraKey;

const BYTES: u8 = 0x40;
const TEXT: u8 = 0x60;
const ARRAY: u8 = 0x80;
const NULL: u8 = 0xf6;

/// Appends the message of a block.
#[inline]
pub(super) fn block(parent: &[u8], tokens: &[u32], keys: &[ExtraKey<'_>], out: &mut Vec<u8>) {
    out.push(ARRAY | 3);
    head(BYTES, parent.len() as u64, out);
    out.extend_from_slice(parent);
    head(ARRAY, tokens.len() as u64, out);
    write_tokens(tokens, out);
    if keys.is_empty() {
        out.push(NULL);
    } else {
        extra_keys(keys, out);
    }
}

/// Each token takes 1, 2, 3 or 5 bytes. All 8 bytes of a word are stored and the position moves by what
/// counts, so that there is no branch on the value.
#[inline]
fn write_tokens(tokens: &[u32], out: &mut Vec<u8>) {
    const LEN: [u8; 4] = [1, 2, 3, 5];
    const TAG: [u64; 4] = [0, 0x18 << 56, 0x19 << 56, 0x1a << 56];
    const SHIFT: [u8; 4] = [56, 48, 40, 24];
    let start = out.len();
    out.resize(start + tokens.len() * 5 + 8, 0);
    let cells = &mut out[start..];
    let mut at = 0;
    for &t in tokens {
        let class = usize::from(t >= 24) + usize::from(t > 0xff) + usize::from(t > 0xffff);
        let word = TAG[class] | u64::from(t) << SHIFT[class];
        cells[at..at + 8].copy_from_slice(&word.to_be_bytes());
        at += usize::from(LEN[class]);
    }
    out.truncate(start + at);
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
    fn tokens_take_the_shortest_form() {
        for t in [0, 23, 24, 255, 256, 65_535, 65_536, u32::MAX] {
            let (mut fast, mut plain) = (vec![7], vec![7]);
            write_tokens(&[t, 1, t], &mut fast);
            for v in [t, 1, t] {
                head(0, u64::from(v), &mut plain);
            }
            assert_eq!(fast, plain, "token {t}");
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
