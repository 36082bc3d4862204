//! The hash functions, and the loop that is hot: message of a block into a reused buffer, then hash.

use sha2::block_api::compress256;
use xxhash_rust::xxh3::xxh3_64;

use super::extra::ExtraKey;
use super::{cbor, pickle};
use crate::hash::HashRef;

/// What vLLM derives the first parent from where `PYTHONHASHSEED` is not set.
pub const DEFAULT_SEED: &str = "vllm-none-hash";

/// The widest hash.
pub(super) const MAX_WIDTH: usize = 32;

/// A chained block hash function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Algorithm {
    /// SHA-256 of `CPython`'s pickle (protocol 5, C pickler): vLLM's default.
    Sha256,
    /// SHA-256 of canonical CBOR: vLLM's choice for readers that are not Python.
    #[default]
    Sha256Cbor,
    /// XXH3-64, this package's own; for pools whose hashes nobody else recomputes.
    Xxh3,
}

impl Algorithm {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Sha256, Self::Sha256Cbor, Self::Xxh3];

    /// The name that users write.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sha256 => "sha256",
            Self::Sha256Cbor => "sha256_cbor",
            Self::Xxh3 => "xxh3_64",
        }
    }

    /// The algorithm of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|a| a.name() == name)
    }

    /// Bytes a hash.
    pub const fn width(self) -> usize {
        match self {
            Self::Sha256 | Self::Sha256Cbor => 32,
            Self::Xxh3 => 8,
        }
    }

    /// Whether hashes are 64-bit integers.
    pub const fn is_int(self) -> bool {
        matches!(self, Self::Xxh3)
    }

    /// The bytes of a column as a hash.
    pub(super) fn as_hash(self, bytes: &[u8]) -> HashRef<'_> {
        match self {
            Self::Sha256 | Self::Sha256Cbor => HashRef::Bytes(bytes),
            Self::Xxh3 => HashRef::Uint(bytes.iter().rev().fold(0, |acc, &b| acc << 8 | u64::from(b))),
        }
    }

    /// What stands for the parent of a first block.
    pub(super) fn none_hash(self, seed: Option<&str>) -> Box<[u8]> {
        let seed = seed.unwrap_or(DEFAULT_SEED);
        let mut message = Vec::new();
        match self {
            Self::Sha256 => {
                pickle::string(seed, &mut message);
                sha256_of(&mut message).into()
            }
            Self::Sha256Cbor => {
                cbor::string(seed, &mut message);
                sha256_of(&mut message).into()
            }
            Self::Xxh3 => xxh3_64(seed.as_bytes()).to_le_bytes().into(),
        }
    }
}

/// Hashes one block after the other.
pub(super) struct Hasher<'a> {
    algorithm: Algorithm,
    /// Room for the message of a block without extra keys; 0 where that has no way of its own.
    room: usize,
    message: &'a mut Vec<u8>,
}

impl<'a> Hasher<'a> {
    pub(super) fn new(algorithm: Algorithm, block_size: usize, message: &'a mut Vec<u8>) -> Self {
        let room = match algorithm {
            Algorithm::Sha256 => pickle::max_len(block_size),
            Algorithm::Sha256Cbor => cbor::max_len(block_size),
            Algorithm::Xxh3 => 0,
        };
        Self { algorithm, room, message }
    }

    /// Replaces the parent's hash in `hash` by the block's.
    #[inline]
    pub(super) fn block(&mut self, hash: &mut [u8], tokens: &[u32], keys: &[ExtraKey<'_>]) {
        let message = &mut *self.message;
        let Some(digest) = hash.first_chunk_mut() else {
            return xxh3_block(hash, tokens, keys, message);
        };
        let cbor = self.algorithm == Algorithm::Sha256Cbor;
        if keys.is_empty() && self.room > 0 {
            // The buffer keeps its length from block to block: nothing is cleared or grown.
            message.resize(self.room + PADDING, 0);
            let len = if cbor {
                cbor::plain(digest, tokens, message)
            } else {
                pickle::plain(digest, tokens, message)
            };
            *digest = sha256(message, len);
            return;
        }
        message.clear();
        if cbor {
            cbor::block(digest, tokens, keys, message);
        } else {
            pickle::block(digest, tokens, keys, message);
        }
        *digest = sha256_of(message);
    }
}

fn xxh3_block(hash: &mut [u8], tokens: &[u32], keys: &[ExtraKey<'_>], message: &mut Vec<u8>) {
    message.clear();
    message.extend_from_slice(hash);
    let start = message.len();
    message.resize(start + tokens.len() * 4, 0);
    for (cell, t) in message[start..].as_chunks_mut().0.iter_mut().zip(tokens) {
        *cell = t.to_le_bytes();
    }
    if !keys.is_empty() {
        cbor::extra_keys(keys, message);
    }
    hash.copy_from_slice(&xxh3_64(message).to_le_bytes());
}

const INITIAL: [u32; 8] =
    [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19];

/// Most bytes that padding takes.
const PADDING: usize = 72;

/// SHA-256 of the first `len` bytes of a buffer that has [`PADDING`] more: padded in place and compressed
/// in one go, without the copies through a block buffer that an incremental hasher makes.
fn sha256(buffer: &mut [u8], len: usize) -> [u8; 32] {
    const ONE_BIT: [u8; 64] = {
        let mut bytes = [0; 64];
        bytes[0] = 0x80;
        bytes
    };
    let padded = (len + 9).next_multiple_of(64);
    buffer[len..len + 64].copy_from_slice(&ONE_BIT);
    buffer[padded - 8..padded].copy_from_slice(&(len as u64 * 8).to_be_bytes());
    let mut state = INITIAL;
    compress256(&mut state, buffer[..padded].as_chunks().0);
    let mut out = [0; 32];
    for (o, word) in out.as_chunks_mut::<4>().0.iter_mut().zip(state) {
        *o = word.to_be_bytes();
    }
    out
}

/// SHA-256 of a whole buffer, which is padded.
fn sha256_of(message: &mut Vec<u8>) -> [u8; 32] {
    let len = message.len();
    message.resize(len + PADDING, 0);
    sha256(message, len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sha2::Digest;

    #[test]
    fn padding_is_right_at_every_length() {
        for n in 0..200u8 {
            let message: Vec<u8> = (0..n).collect();
            let expected: [u8; 32] = sha2::Sha256::digest(&message).into();
            assert_eq!(sha256_of(&mut message.clone()), expected, "length {n}");
        }
    }

    #[test]
    fn names_are_one_to_one() {
        for a in Algorithm::ALL {
            assert_eq!(Algorithm::from_name(a.name()), Some(a));
        }
        assert_eq!(Algorithm::from_name("xxhash"), None);
    }
}
