//! Runs of integers: where most of a batch's bytes, and so most of the time, are.

use super::reader;

/// Reads `out.len()` unsigned 32-bit integers from `at` on and returns the position after the last;
/// `Err` has the index of the first that is none.
pub fn read(buf: &[u8], mut at: usize, out: &mut [u32]) -> Result<usize, usize> {
    for (i, slot) in out.iter_mut().enumerate() {
        // Eight bytes hold every coding of 32 bits; near the end of the payload they may not be there.
        if let Some(word) = buf.get(at..at + 8).and_then(|b| b.try_into().ok()).map(u64::from_be_bytes) {
            let tag = (word >> 56) as u8;
            let (value, size) = match tag {
                0xcd => ((word >> 40) as u32 & 0xffff, 3),
                0xce => ((word >> 24) as u32, 5),
                0x00..=0x7f => (u32::from(tag), 1),
                0xcc => ((word >> 48) as u32 & 0xff, 2),
                _ => (0, 0),
            };
            if size != 0 {
                *slot = value;
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
    // By the number of significant bits: what stands before the value, and how far the whole moves left.
    const fn table() -> [(u64, u8); 33] {
        let mut t = [(0, 56); 33];
        let mut bits = 8;
        while bits <= 32 {
            t[bits] = match bits {
                8 => (0xcc << 8, 48),
                9..=16 => (0xcd << 16, 40),
                _ => (0xce << 32, 24),
            };
            bits += 1;
        }
        t
    }
    const TABLE: [(u64, u8); 33] = table();
    let (tag, shift) = TABLE[(32 - v.leading_zeros()) as usize];
    ((tag | u64::from(v)) << shift, 8 - usize::from(shift) / 8)
}

/// Writes `tokens` at `at`, each in its shortest form, and returns the position after the last. `buf`
/// must have five bytes for each and eight more.
#[inline]
pub fn write(buf: &mut [u8], mut at: usize, tokens: &[u32]) -> usize {
    for &v in tokens {
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
        let mut buf = vec![0; tokens.len() * 5 + 8];
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
