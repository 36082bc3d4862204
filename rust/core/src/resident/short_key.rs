//! XXH3-128 of keys as most streams have them, from registers.
//!
//! The general function reads a key that was put together in memory just before, where reads that straddle two
//! writes wait for both. A hash of 32 bytes, or of 64 bits, with a short scope behind it needs no memory at all.

const PRIME_1: u64 = 0x9e37_79b1_85eb_ca87;
const PRIME_2: u64 = 0xc2b2_ae3d_27d4_eb4f;
const PRIME_4: u64 = 0x85eb_ca77_c2b2_ae63;
const AVALANCHE: u64 = 0x1656_6791_9e37_79f9;
/// The first 64 bytes of XXH3's secret, in words.
const SECRET: [u64; 8] = [
    0xbe4b_a423_396c_feb8,
    0x1cad_21f7_2c81_017c,
    0xdb97_9083_e96d_d4de,
    0x1f67_b3b7_a4a4_4072,
    0x78e5_c0cc_4ee6_79cb,
    0x2172_ffcc_7dd0_5a82,
    0x8e24_43f7_7446_08b8,
    0x4c26_3a81_e690_35e0,
];
/// What stands before a hash of 32 bytes: an array of five, and 32 bytes.
const BYTES_HEAD: u128 = 0x20_c495;
/// What stands before an integer of eight bytes.
const INT_HEAD: u128 = 0xcf95;

/// What follows the hash in a key: at most 15 bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct ShortScope {
    len: usize,
    /// The bytes, the last of them on top.
    high: u128,
    /// The bytes, the first of them at the bottom.
    low: u128,
    /// A key with an integer has at least 17 bytes; below that the function is another one.
    pub is_wide: bool,
}

impl ShortScope {
    pub fn new(scope: &[u8]) -> Option<Self> {
        let len = scope.len();
        if !(1..16).contains(&len) {
            return None;
        }
        let mut bytes = [0; 16];
        bytes[..len].copy_from_slice(scope);
        let low = u128::from_le_bytes(bytes);
        Some(Self { len, high: low << (8 * (16 - len)), low, is_wide: len >= 7 })
    }

    /// Digest of `[hash, scope...]`; a key of 36 to 50 bytes.
    #[inline]
    pub fn digest_bytes(&self, hash: &[u8; 32]) -> u128 {
        let t = self.len;
        let first = word(hash, 0) << 24 | BYTES_HEAD;
        let second = word(hash, 13);
        let third = word(hash, t);
        let last = word(hash, 16) >> (8 * t) | self.high;
        let len = 35 + t as u64;
        let acc = mix((len.wrapping_mul(PRIME_1), 0), second, third, 4);
        finish(mix(acc, first, last, 0), len)
    }

    /// Digest of `[hash, scope...]` for a hash of more than 32 bits; a key of 17 to 25 bytes. Only where
    /// [`Self::is_wide`].
    #[inline]
    pub fn digest_int(&self, hash: u64) -> u128 {
        let t = self.len;
        let hash = u128::from(hash.swap_bytes());
        let first = INT_HEAD | hash << 16 | self.low << 80;
        // It starts behind so many bytes of the key; the hash behind two.
        let from = t - 6;
        let hash = if from < 2 { hash << 8 | INT_HEAD >> 8 } else { hash >> (8 * (from - 2)) };
        let last = hash | self.high;
        let len = 10 + t as u64;
        finish(mix((len.wrapping_mul(PRIME_1), 0), first, last, 0), len)
    }
}

#[inline]
fn word(bytes: &[u8; 32], at: usize) -> u128 {
    bytes[at..].first_chunk().map_or(0, |b| u128::from_le_bytes(*b))
}

#[inline]
fn fold(word: u128, a: u64, b: u64) -> u64 {
    let product = u128::from(word as u64 ^ a) * u128::from((word >> 64) as u64 ^ b);
    product as u64 ^ (product >> 64) as u64
}

#[inline]
fn halves(word: u128) -> u64 {
    (word as u64).wrapping_add((word >> 64) as u64)
}

#[inline]
fn mix((low, high): (u64, u64), a: u128, b: u128, secret: usize) -> (u64, u64) {
    let s = &SECRET[secret..secret + 4];
    (low.wrapping_add(fold(a, s[0], s[1])) ^ halves(b), high.wrapping_add(fold(b, s[2], s[3])) ^ halves(a))
}

#[inline]
fn finish((low, high): (u64, u64), len: u64) -> u128 {
    let top = low
        .wrapping_mul(PRIME_1)
        .wrapping_add(high.wrapping_mul(PRIME_4))
        .wrapping_add(len.wrapping_mul(PRIME_2));
    let top = 0_u64.wrapping_sub(avalanche(top));
    u128::from(top) << 64 | u128::from(avalanche(low.wrapping_add(high)))
}

#[inline]
fn avalanche(mut x: u64) -> u64 {
    x ^= x >> 37;
    x = x.wrapping_mul(AVALANCHE);
    x ^ x >> 32
}

#[cfg(test)]
mod tests {
    use xxhash_rust::xxh3::xxh3_128;

    use super::*;

    #[test]
    fn equals_the_function_over_the_bytes() {
        let mut state = 1_u64;
        let mut next = || {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            (state >> 56) as u8
        };
        for len in 1..16 {
            for _ in 0..200 {
                let scope: Vec<u8> = (0..len).map(|_| next()).collect();
                let hash: [u8; 32] = std::array::from_fn(|_| next());
                let short = ShortScope::new(&scope).expect("a short scope");
                let key = [&[0x95, 0xc4, 32][..], &hash, &scope].concat();
                assert_eq!(short.digest_bytes(&hash), xxh3_128(&key), "{len}");
                if short.is_wide {
                    let key = [&[0x95, 0xcf][..], &hash[..8], &scope].concat();
                    let hash = u64::from_be_bytes(*hash.first_chunk().expect("eight bytes"));
                    assert_eq!(short.digest_int(hash), xxh3_128(&key), "{len}");
                }
            }
        }
    }

    #[test]
    fn longer_and_empty_scopes_are_left_to_the_general_function() {
        assert!(ShortScope::new(&[]).is_none());
        assert!(ShortScope::new(&[0xc0; 16]).is_none());
    }
}
