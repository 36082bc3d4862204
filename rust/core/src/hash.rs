//! Block hashes: opaque keys of 64-bit integers or up to 64 bytes.
//!
//! On the wire a hash is an unsigned integer (vLLM), a signed one (`SGLang`) or a byte string. The
//! *form* is kept so that a hash is written back as it came in; the *key* ignores the sign: -1 and
//! 2^64-1 are the same block.

use std::hash::{Hash, Hasher};

/// Longest byte-string hash that is accepted.
pub const MAX_HASH_BYTES: usize = 64;

/// A block hash borrowed from where it is stored, in the form in which it came.
#[derive(Clone, Copy, Debug)]
pub enum HashRef<'a> {
    /// An integer that was not negative.
    Uint(u64),
    /// An integer that was signed; `Int(n)` with `n >= 0` equals `Uint(n)`.
    Int(i64),
    /// A byte string of at most [`MAX_HASH_BYTES`].
    Bytes(&'a [u8]),
}

impl HashRef<'_> {
    /// The 64 bits of an integer hash, or `None` for bytes.
    #[inline]
    pub const fn bits(&self) -> Option<u64> {
        match *self {
            Self::Uint(v) => Some(v),
            Self::Int(v) => Some(v.cast_unsigned()),
            Self::Bytes(_) => None,
        }
    }

    /// An owned copy.
    pub fn to_owned(&self) -> BlockHash {
        match *self {
            Self::Uint(v) => BlockHash::Uint(v),
            Self::Int(v) => BlockHash::Int(v),
            Self::Bytes(b) => BlockHash::Bytes(b.into()),
        }
    }

    /// Whether the hash is written with a minus sign.
    pub const fn is_negative(&self) -> bool {
        matches!(self, Self::Int(v) if *v < 0)
    }

    /// Equal in form as well as in key: what decides whether two events are equal to a user.
    pub fn same_form(&self, other: &HashRef<'_>) -> bool {
        self == other && self.is_negative() == other.is_negative()
    }

    /// The narrowing rule of vLLM: the low (last) 8 bytes, big endian. Integers are their own bits.
    /// Shorter byte strings are read as a big-endian number.
    pub fn narrow_low(&self) -> u64 {
        self.bits().unwrap_or_else(|| match self {
            HashRef::Bytes(b) => be_bytes(&b[b.len().saturating_sub(8)..]),
            _ => 0,
        })
    }

    /// The narrowing rule of `SGLang`: the first 8 bytes, big endian. Integers are their own bits.
    pub fn narrow_first(&self) -> u64 {
        self.bits().unwrap_or_else(|| match self {
            HashRef::Bytes(b) => be_bytes(&b[..b.len().min(8)]),
            _ => 0,
        })
    }
}

/// Eight little-endian bytes of a hash column.
#[inline]
pub(crate) fn le_u64(b: &[u8]) -> u64 {
    let mut a = [0; 8];
    a.copy_from_slice(b);
    u64::from_le_bytes(a)
}

fn be_bytes(b: &[u8]) -> u64 {
    b.iter().fold(0, |acc, &x| acc << 8 | u64::from(x))
}

/// Equality of keys: the sign is ignored, integers never equal bytes.
impl PartialEq for HashRef<'_> {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (HashRef::Bytes(a), HashRef::Bytes(b)) => a == b,
            (HashRef::Bytes(_), _) | (_, HashRef::Bytes(_)) => false,
            _ => self.bits() == other.bits(),
        }
    }
}

impl Eq for HashRef<'_> {}

impl Hash for HashRef<'_> {
    #[inline]
    fn hash<H: Hasher>(&self, state: &mut H) {
        match self {
            HashRef::Bytes(b) => b.hash(state),
            _ => self.bits().unwrap_or_default().hash(state),
        }
    }
}

/// An owned block hash; equality and hashing are those of the key, as for [`HashRef`].
#[derive(Clone, Debug)]
pub enum BlockHash {
    /// See [`HashRef::Uint`].
    Uint(u64),
    /// See [`HashRef::Int`].
    Int(i64),
    /// See [`HashRef::Bytes`].
    Bytes(Box<[u8]>),
}

impl BlockHash {
    /// The borrowed form.
    #[inline]
    pub fn as_ref(&self) -> HashRef<'_> {
        match self {
            Self::Uint(v) => HashRef::Uint(*v),
            Self::Int(v) => HashRef::Int(*v),
            Self::Bytes(b) => HashRef::Bytes(b),
        }
    }
}

impl PartialEq for BlockHash {
    fn eq(&self, other: &Self) -> bool {
        self.as_ref() == other.as_ref()
    }
}

impl Eq for BlockHash {}

impl Hash for BlockHash {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_ref().hash(state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minus_one_and_all_ones_are_one_key_but_two_forms() {
        let (a, b) = (HashRef::Int(-1), HashRef::Uint(u64::MAX));
        assert_eq!(a, b);
        assert!(!a.same_form(&b));
        assert!(HashRef::Int(7).same_form(&HashRef::Uint(7)));
    }

    #[test]
    fn narrowing_takes_the_stated_end() {
        let bytes: Vec<u8> = (1..=32).collect();
        let h = HashRef::Bytes(&bytes);
        assert_eq!(h.narrow_low(), 0x191a_1b1c_1d1e_1f20);
        assert_eq!(h.narrow_first(), 0x0102_0304_0506_0708);
        assert_eq!(HashRef::Bytes(&[1, 2]).narrow_low(), 0x0102);
    }
}
