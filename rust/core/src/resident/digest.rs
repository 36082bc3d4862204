//! The digest of a resident set: drift is found by comparing sixteen bytes.
//!
//! It is the sum modulo 2^128 of XXH3-128 (seed 0) over the msgpack array
//! `[hash, medium, group_idx, locality, ownership]` of each resident key, in shortest form, absent
//! fields nil, integers as unsigned 64 bits. A sum does not depend on order and is kept incrementally.

use xxhash_rust::xxh3::xxh3_128;

use super::short_key::ShortScope;
use crate::events::Scope;
use crate::hash::HashRef;
use crate::msgpack;

/// Digest of one resident key.
pub fn key_digest(hash: HashRef<'_>, scope: &Scope) -> u128 {
    KeyWriter::new(scope).digest(hash)
}

/// Digests of many keys of one scope: what all of them share is written once.
#[derive(Clone, Debug)]
pub struct KeyWriter {
    scope: Box<[u8]>,
    short: Option<ShortScope>,
    key: Vec<u8>,
}

impl KeyWriter {
    /// For keys of `scope`.
    pub fn new(scope: &Scope) -> Self {
        let mut tail = Vec::with_capacity(24);
        let put_str = |out: &mut Vec<u8>, s: Option<&str>| match s {
            Some(s) => msgpack::write_str(out, s),
            None => msgpack::write_nil(out),
        };
        put_str(&mut tail, scope.medium.as_deref());
        match scope.group_idx {
            Some(g) => msgpack::write_int(&mut tail, g),
            None => msgpack::write_nil(&mut tail),
        }
        put_str(&mut tail, scope.locality.as_deref());
        put_str(&mut tail, scope.ownership.as_deref());
        Self { short: ShortScope::new(&tail), scope: tail.into(), key: Vec::with_capacity(96) }
    }

    /// Digest of one key.
    #[inline]
    pub fn digest(&mut self, hash: HashRef<'_>) -> u128 {
        if let Some(short) = &self.short {
            match hash {
                HashRef::Bytes(b) => {
                    if let Ok(b) = b.try_into() {
                        return short.digest_bytes(b);
                    }
                }
                h => {
                    let v = h.bits().unwrap_or_default();
                    if v > u64::from(u32::MAX) && short.is_wide {
                        return short.digest_int(v);
                    }
                }
            }
        }
        self.lay_out(hash);
        xxh3_128(&self.key)
    }

    fn lay_out(&mut self, hash: HashRef<'_>) {
        self.key.clear();
        msgpack::write_array_header(&mut self.key, 5);
        match hash {
            HashRef::Bytes(b) => msgpack::write_bin(&mut self.key, b),
            h => msgpack::write_uint(&mut self.key, h.bits().unwrap_or_default()),
        }
        self.key.extend_from_slice(&self.scope);
    }
}

/// A sum of key digests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Digest(u128);

impl From<u128> for Digest {
    fn from(sum: u128) -> Self {
        Self(sum)
    }
}

impl Digest {
    /// A key became resident.
    pub fn add(&mut self, key: u128) {
        self.0 = self.0.wrapping_add(key);
    }

    /// A key stopped being resident.
    pub fn sub(&mut self, key: u128) {
        self.0 = self.0.wrapping_sub(key);
    }

    /// Sixteen bytes, big endian.
    pub fn to_bytes(self) -> [u8; 16] {
        self.0.to_be_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sign_does_not_matter_and_order_does_not_matter() {
        let scope = Scope { medium: Some("GPU".into()), group_idx: Some(0), ..Scope::default() };
        let (a, b) = (key_digest(HashRef::Int(-1), &scope), key_digest(HashRef::Uint(5), &scope));
        assert_eq!(a, key_digest(HashRef::Uint(u64::MAX), &scope));
        let (mut x, mut y) = (Digest::default(), Digest::default());
        x.add(a);
        x.add(b);
        y.add(b);
        y.add(a);
        assert_eq!(x, y);
        x.sub(a);
        x.sub(b);
        assert_eq!(x.to_bytes(), [0; 16]);
    }

    #[test]
    fn what_was_digested_before_does_not_matter() {
        let hashes = [
            HashRef::Uint(1 << 40),
            HashRef::Bytes(&[]),
            HashRef::Uint(3 << 40),
            HashRef::Uint(7),
            HashRef::Uint(1 << 32),
            HashRef::Bytes(&[1; 32]),
            HashRef::Bytes(&[2; 32]),
            HashRef::Bytes(&[]),
            HashRef::Bytes(&[3; 20]),
            HashRef::Bytes(&[4; 20]),
            HashRef::Int(-9),
        ];
        for medium in [None, Some("CPU".into()), Some("a name that is longer than that".into())] {
            let scope = Scope { medium, ..Scope::default() };
            let mut writer = KeyWriter::new(&scope);
            for a in hashes {
                for b in hashes {
                    writer.digest(a);
                    assert_eq!(writer.digest(b), key_digest(b, &scope), "{b:?} after {a:?}");
                }
            }
        }
    }
}
