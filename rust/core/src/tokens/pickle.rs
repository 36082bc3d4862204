//! The bytes that `CPython`'s C pickler writes, protocol 5, for `(parent, tokens, extra keys)` and for a
//! string: opcodes by size, frames, and the memo.
//!
//! The memo goes by identity: an object that was written before is written as a reference. In an engine
//! that gets its requests from another process (vLLM's default) the objects that one block can share
//! are the tags, which are constants, and strings that `CPython` keeps one copy of: the empty one and
//! those of a single Latin-1 character. Everything else is an object of its own, however equal.

use super::extra::ExtraKey;

const FRAME_HEADER: usize = 9;
/// At the next object after so many bytes a frame is closed.
const FRAME_TARGET: usize = 64 * 1024;
/// A frame of fewer bytes has no header.
const FRAME_MIN: usize = 4;
/// Fewer tokens than these fit into one frame.
const ONE_FRAME: usize = FRAME_TARGET / 8;

/// Appends the pickle of a block's tuple.
pub(super) fn block(parent: &[u8], tokens: &[u32], keys: &[ExtraKey<'_>], out: &mut Vec<u8>) {
    let mut p = Pickler::new(out);
    p.boundary();
    p.bytes(parent);
    p.boundary();
    p.tokens(tokens);
    p.boundary();
    if keys.is_empty() {
        p.put(b"N");
    } else {
        p.keys(keys);
    }
    p.tuple_end(3);
    p.finish();
}

/// Room that [`plain`] needs, or 0 where it cannot be used.
pub(super) const fn max_len(tokens: usize) -> usize {
    if tokens > 3 && tokens < ONE_FRAME { tokens * 7 + 72 } else { 0 }
}

/// Writes the pickle of a block without extra keys, of a usual size; returns its length.
#[inline]
pub(super) fn plain(parent: &[u8; 32], tokens: &[u32], cells: &mut [u8]) -> usize {
    cells[..13].copy_from_slice(b"\x80\x05\x95________C\x20");
    cells[13..45].copy_from_slice(parent);
    cells[45..47].copy_from_slice(b"\x94(");
    let end = 47 + write_tokens(tokens, &mut cells[47..]);
    cells[end..end + 6].copy_from_slice(b"t\x94N\x87\x94.");
    let end = end + 6;
    cells[3..11].copy_from_slice(&(end as u64 - 11).to_le_bytes());
    end
}

/// Appends the pickle of a string.
pub(super) fn string(s: &str, out: &mut Vec<u8>) {
    let mut p = Pickler::new(out);
    p.str(s);
    p.finish();
}

struct Pickler<'a, 's> {
    out: &'a mut Vec<u8>,
    /// Where the open frame's header stands.
    frame: Option<usize>,
    memo: u32,
    /// Strings of which there is one object, and their places in the memo.
    shared: Vec<(&'s str, u32)>,
}

impl<'a, 's> Pickler<'a, 's> {
    fn new(out: &'a mut Vec<u8>) -> Self {
        out.extend_from_slice(b"\x80\x05");
        Self { out, frame: None, memo: 0, shared: Vec::new() }
    }

    fn open(&mut self) {
        if self.frame.is_none() {
            self.frame = Some(self.out.len());
            self.out.extend_from_slice(&[0x95; FRAME_HEADER]);
        }
    }

    fn put(&mut self, bytes: &[u8]) {
        self.open();
        self.out.extend_from_slice(bytes);
    }

    fn close(&mut self) {
        let Some(at) = self.frame.take() else { return };
        let body = at + FRAME_HEADER;
        let len = self.out.len() - body;
        if len < FRAME_MIN {
            self.out.drain(at..body);
        } else {
            self.out[at + 1..body].copy_from_slice(&(len as u64).to_le_bytes());
        }
    }

    /// Before each object.
    fn boundary(&mut self) {
        if self.frame.is_some_and(|at| self.out.len() - at - FRAME_HEADER >= FRAME_TARGET) {
            self.close();
        }
    }

    fn finish(mut self) {
        self.put(b".");
        self.close();
    }

    fn memoize(&mut self) {
        self.put(b"\x94");
        self.memo += 1;
    }

    /// Large payloads stand outside of frames.
    fn payload(&mut self, opcode: &[u8], payload: &[u8]) {
        if payload.len() < FRAME_TARGET {
            self.put(opcode);
            self.out.extend_from_slice(payload);
        } else {
            self.close();
            self.out.extend_from_slice(opcode);
            self.out.extend_from_slice(payload);
        }
        self.memoize();
    }

    /// At most 32 bytes here: a hash.
    fn bytes(&mut self, b: &[u8]) {
        self.payload(&[b'C', b.len() as u8], b);
    }

    fn str(&mut self, s: &'s str) {
        let n = s.len();
        if n <= 0xff {
            self.payload(&[0x8c, n as u8], s.as_bytes());
        } else if let Ok(n) = u32::try_from(n) {
            let le = n.to_le_bytes();
            self.payload(&[b'X', le[0], le[1], le[2], le[3]], s.as_bytes());
        } else {
            let mut opcode = vec![0x8d];
            opcode.extend_from_slice(&(n as u64).to_le_bytes());
            self.payload(&opcode, s.as_bytes());
        }
    }

    /// A string of which there is one object.
    fn constant(&mut self, s: &'s str) {
        self.boundary();
        if let Some(&(_, at)) = self.shared.iter().find(|(known, _)| *known == s) {
            let le = at.to_le_bytes();
            if at <= 0xff {
                self.put(&[b'h', le[0]]);
            } else {
                self.put(&[b'j', le[0], le[1], le[2], le[3]]);
            }
            return;
        }
        self.shared.push((s, self.memo));
        self.str(s);
    }

    /// A string of the request.
    fn value(&mut self, s: &'s str) {
        let mut chars = s.chars();
        match (chars.next(), chars.next()) {
            (None, _) | (Some('\0'..='\u{ff}'), None) => self.constant(s),
            _ => {
                self.boundary();
                self.str(s);
            }
        }
    }

    fn int(&mut self, v: i64) {
        self.boundary();
        let le = v.to_le_bytes();
        if (0..0x100).contains(&v) {
            self.put(&[b'K', le[0]]);
        } else if (0..0x1_0000).contains(&v) {
            self.put(&[b'M', le[0], le[1]]);
        } else if i32::try_from(v).is_ok() {
            self.put(&[b'J', le[0], le[1], le[2], le[3]]);
        } else {
            // Offsets beyond 31 bits: the fewest bytes that keep the sign.
            let mut n = 8;
            while (v << (64 - 8 * (n - 1))) >> (64 - 8 * (n - 1)) == v {
                n -= 1;
            }
            self.put(&[0x8a, n as u8]);
            self.out.extend_from_slice(&le[..n]);
        }
    }

    /// The opcode of a tuple whose elements stand on the stack.
    fn tuple_end(&mut self, n: usize) {
        let opcode = match n {
            1 => b'\x85',
            2 => b'\x86',
            3 => b'\x87',
            _ => b't',
        };
        self.put(&[opcode]);
        self.memoize();
    }

    fn tokens(&mut self, tokens: &[u32]) {
        if tokens.len() > 3 {
            self.put(b"(");
        }
        // So many tokens may need several frames.
        let step = if tokens.len() < ONE_FRAME { tokens.len() } else { 1 };
        for part in tokens.chunks(step) {
            if step == 1 {
                self.boundary();
            }
            self.open();
            let start = self.out.len();
            self.out.resize(start + part.len() * 7 + 8, 0);
            let len = write_tokens(part, &mut self.out[start..]);
            self.out.truncate(start + len);
        }
        self.tuple_end(tokens.len());
    }

    fn keys(&mut self, keys: &[ExtraKey<'s>]) {
        if keys.len() > 3 {
            self.put(b"(");
        }
        for key in keys {
            self.boundary();
            match *key {
                ExtraKey::Lora(name, path) => {
                    self.constant("lora");
                    self.value(name);
                    if let Some(path) = path {
                        self.value(path);
                    } else {
                        self.boundary();
                        self.put(b"N");
                    }
                    self.tuple_end(3);
                }
                ExtraKey::Mm(id, offset) => {
                    self.constant("mm");
                    self.value(id);
                    self.int(offset);
                    self.tuple_end(3);
                }
                ExtraKey::Salt(salt) => {
                    self.constant("cache_salt");
                    self.value(salt);
                    self.tuple_end(2);
                }
            }
        }
        self.tuple_end(keys.len());
    }
}

/// Writes integers; returns their length. Each takes 2, 3, 5 or 7 bytes; see the CBOR writer for why there is
/// no branch.
#[inline]
fn write_tokens(tokens: &[u32], cells: &mut [u8]) -> usize {
    const LEN: [u8; 4] = [2, 3, 5, 7];
    const TAG: [u64; 4] = [b'K' as u64, b'M' as u64, b'J' as u64, 0x058a];
    const SHIFT: [u8; 4] = [8, 8, 8, 16];
    let mut at = 0usize;
    for &t in tokens {
        let class = usize::from(t > 0xff) + usize::from(t > 0xffff) + usize::from(t > 0x7fff_ffff);
        let word = TAG[class] | u64::from(t).wrapping_shl(SHIFT[class].into());
        cells[at..at.wrapping_add(8)].copy_from_slice(&word.to_le_bytes());
        at = at.wrapping_add(LEN[class].into());
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_block() {
        let mut out = Vec::new();
        block(b"ab", &[1, 300, 70_000, 1 << 31], &[], &mut out);
        // pickle.dumps((b"ab", (1, 300, 70000, 2**31), None), 5)
        let body = b"C\x02ab\x94(K\x01M\x2c\x01J\x70\x11\x01\x00\x8a\x05\x00\x00\x00\x80\x00t\x94N\x87\x94.";
        let mut expected = b"\x80\x05\x95".to_vec();
        expected.extend_from_slice(&(body.len() as u64).to_le_bytes());
        expected.extend_from_slice(body);
        assert_eq!(out, expected);
    }

    #[test]
    fn the_short_way_writes_the_same() {
        for n in [4, 5, 16, 300, ONE_FRAME - 1] {
            let tokens: Vec<u32> = (0..n as u32).map(|i| i.wrapping_mul(0x9e37_79b9) >> (i % 32)).collect();
            let mut long = Vec::new();
            block(&[3; 32], &tokens, &[], &mut long);
            let mut cells = vec![0xaa; max_len(n)];
            let len = plain(&[3; 32], &tokens, &mut cells);
            assert_eq!(cells[..len], long, "{n} tokens");
        }
    }

    #[test]
    fn a_tag_that_comes_again_is_a_reference() {
        let mut out = Vec::new();
        block(b"", &[1], &[ExtraKey::Mm("x1", 0), ExtraKey::Mm("x1", -3)], &mut out);
        let body = b"C\x00\x94K\x01\x85\x94\x8c\x02mm\x94\x8c\x02x1\x94K\x00\x87\x94\
            h\x02\x8c\x02x1\x94J\xfd\xff\xff\xff\x87\x94\x86\x94\x87\x94.";
        assert_eq!(&out[11..], body);
    }
}
