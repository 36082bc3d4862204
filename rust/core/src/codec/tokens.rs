//! Runs of integers: where most of a batch's bytes, and so most of the time, are.

use super::reader;

/// Reads `out.len()` unsigned 32-bit integers from `at` on and returns the position after the last;
/// `Err` has the index of the first that is none.
#[inline]
pub fn read(buf: &[u8], mut at: usize, out: &mut [u32]) -> Result<usize, usize> {
    let mut done = 0;
    // Ids of a large vocabulary take 16 or 32 bits, without a pattern that a processor could learn. So
    // four at a time are told apart by arithmetic: bit 1 of the tag is the difference in length, 0 or 2.
    for four in out.chunks_exact_mut(4) {
        let Some(w) = buf.get(at..).and_then(|b| b.first_chunk::<24>()) else { break };
        let size = |at: usize| 3 + usize::from(w[at] & 2);
        let second = size(0);
        let third = second + size(second);
        let fourth = third + size(third);
        let known = |at: usize| w[at].wrapping_sub(0xcd) < 2;
        if [second, third, fourth].iter().fold(known(0), |all, &at| all & known(at)) {
            let value = |at: usize| {
                let mut word = [0; 8];
                word.copy_from_slice(&w[at..at + 8]);
                ((u64::from_be_bytes(word) << 8) >> (72 - 8 * size(at))) as u32
            };
            four.copy_from_slice(&[value(0), value(second), value(third), value(fourth)]);
            at = at.wrapping_add(fourth + size(fourth));
        } else {
            at = singly(buf, at, four).map_err(|i| done + i)?;
        }
        done += 4;
    }
    singly(buf, at, &mut out[done..]).map_err(|i| done + i)
}

/// The same, one by one.
fn singly(buf: &[u8], mut at: usize, out: &mut [u32]) -> Result<usize, usize> {
    for (i, slot) in out.iter_mut().enumerate() {
        // Eight bytes hold every coding of 32 bits; near the end of the payload they may not be there.
        if let Some(bytes) = buf.get(at..).and_then(|b| b.first_chunk()) {
            let word = u64::from_be_bytes(*bytes);
            let (value, size) = match bytes[0] {
                0x00..=0x7f => (u64::from(bytes[0]), 1),
                0xcc => (word >> 48 & 0xff, 2),
                0xcd => (word >> 40 & 0xffff, 3),
                0xce => (word >> 24 & 0xffff_ffff, 5),
                _ => (0, 0),
            };
            if size != 0 {
                *slot = value as u32;
                at += size;
                continue;
            }
        }
        let (value, end) = reader::int(buf, at).ok_or(i)?;
        *slot = value.u32().ok_or(i)?;
        at = end;
    }
    Ok(at)
}

/// The shortest coding of `v`, left-aligned in eight bytes, and its length.
#[inline]
pub fn coding(v: u32) -> (u64, usize) {
    // By the highest bit: the tag, how far the value moves left to stand behind it, and the length.
    const fn table() -> [(u64, u32, u32); 32] {
        let mut t = [(0, 56, 1); 32];
        let mut top = 7;
        while top < 32 {
            t[top] = match top {
                7 => (0xcc << 56, 48, 2),
                8..=15 => (0xcd << 56, 40, 3),
                _ => (0xce << 56, 24, 5),
            };
            top += 1;
        }
        t
    }
    static TABLE: [(u64, u32, u32); 32] = table();
    let (tag, shift, size) = TABLE[(v | 1).ilog2() as usize];
    (tag | u64::from(v) << shift, size as usize)
}

/// Writes `tokens` at `at`, each in its shortest form, and returns the position after the last. `buf`
/// must have five bytes for each and 24 more.
#[inline]
pub fn write(buf: &mut [u8], mut at: usize, tokens: &[u32]) -> usize {
    // Four at a time need one look at the room that is left: the first three take 15 bytes at most.
    let (fours, rest) = tokens.as_chunks::<4>();
    for four in fours {
        let Some(room) = buf.get_mut(at..).and_then(|b| b.first_chunk_mut::<24>()) else {
            unreachable!("room was made for five bytes each");
        };
        let mut used = 0usize;
        for &v in four {
            let (word, size) = coding(v);
            let place = used & 15;
            room[place..place + 8].copy_from_slice(&word.to_be_bytes());
            used = used.wrapping_add(size);
        }
        at = at.wrapping_add(used);
    }
    for &v in rest {
        let (word, size) = coding(v);
        buf[at..at + 8].copy_from_slice(&word.to_be_bytes());
        at += size;
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::msgpack;

    fn edges() -> Vec<u32> {
        let mut v = vec![0, u32::MAX];
        for shift in [7, 8, 16, 24, 31] {
            v.extend([(1u32 << shift) - 1, 1 << shift, (1 << shift) + 1]);
        }
        v
    }

    #[test]
    fn written_as_msgpack_writes_them_and_read_back() {
        let tokens = edges();
        let mut want = Vec::new();
        for &t in &tokens {
            msgpack::write_uint(&mut want, u64::from(t));
        }
        let mut buf = vec![0; tokens.len() * 5 + 24];
        let end = write(&mut buf, 0, &tokens);
        assert_eq!(buf[..end], want);
        let mut back = vec![0; tokens.len()];
        assert_eq!(read(&want, 0, &mut back), Ok(want.len()));
        assert_eq!(back, tokens);
        for cut in 0..want.len() {
            assert!(read(&want[..cut], 0, &mut back).is_err(), "cut at {cut}");
        }
    }

    #[test]
    fn long_codings_of_small_numbers_are_read() {
        let bytes = [0xcf, 0, 0, 0, 0, 0, 0, 0, 9, 0xd1, 0, 5, 0xd3, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff];
        let mut back = [0; 3];
        assert_eq!(read(&bytes, 0, &mut back), Ok(bytes.len()));
        assert_eq!(back, [9, 5, u32::MAX]);
        assert_eq!(read(&[1, 0xff], 0, &mut back[..2]), Err(1));
    }
}
