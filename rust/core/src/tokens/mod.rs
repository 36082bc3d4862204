//! A request's tokens cut into blocks, each with a hash that is chained to its parent's.
//!
//! The hashes are those of vLLM 0.32 (`sha256`, `sha256_cbor`) or this package's own (`xxh3_64`);
//! `docs/hashes.md` defines them and holds test vectors.

mod algorithm;
mod cbor;
mod extra;
mod pickle;

pub use algorithm::{Algorithm, DEFAULT_SEED};
pub use extra::MmFeature;

use std::ops::Range;
use std::sync::Arc;

use crate::error::TokensError;
use crate::hash::HashRef;
use crate::msgpack;
use algorithm::Hasher;
use extra::{ExtraKey, ExtraKeys};

/// What goes into the hashes beside the tokens. All fields are fixed for the life of a request.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The hash function.
    pub algorithm: Algorithm,
    /// Name of the `LoRA` adapter; enters every block.
    pub lora_name: Option<Arc<str>>,
    /// Path of the adapter, as the engine knows it; part of the hash, never of an event.
    pub lora_path: Option<Arc<str>>,
    /// The engine's number of the adapter; part of events only, never of a hash.
    pub lora_id: Option<i64>,
    /// Keeps tenants apart; enters the first block. An empty salt is none.
    pub cache_salt: Option<Arc<str>>,
    /// Images and the like, sorted by offset.
    pub mm: Vec<MmFeature>,
    /// What the parent of a first block is derived from: the value of `PYTHONHASHSEED` of the engine,
    /// or `None` where that is not set.
    pub seed: Option<Arc<str>>,
}

/// A request's tokens in blocks of a fixed size with their chained hashes; grows by [`extend`](Self::extend).
#[derive(Clone, Debug)]
pub struct TokenBlocks {
    block_size: usize,
    algorithm: Algorithm,
    lora_id: Option<i64>,
    seed: Option<Arc<str>>,
    extra: ExtraKeys,
    none_hash: Box<[u8]>,
    tokens: Vec<u32>,
    /// Shared with handles that were given out; copied on the next write only where one is alive.
    hashes: Arc<Vec<u8>>,
    /// Reused for the message of each block.
    scratch: Vec<u8>,
}

impl TokenBlocks {
    /// An empty request.
    pub fn new(block_size: usize, options: Options) -> Result<Self, TokensError> {
        // The upper bound keeps every length inside 32 bits.
        if block_size == 0 || block_size > 1 << 24 {
            return Err(TokensError::BlockSize { seen: block_size });
        }
        let Options { algorithm, lora_name, lora_path, lora_id, cache_salt, mm, seed } = options;
        let extra = ExtraKeys::new(lora_name, lora_path, cache_salt, mm)?;
        let none_hash = algorithm.none_hash(seed.as_deref());
        Ok(Self {
            block_size,
            algorithm,
            lora_id,
            seed,
            extra,
            none_hash,
            tokens: Vec::new(),
            hashes: Arc::default(),
            scratch: Vec::new(),
        })
    }

    /// Appends tokens; hashes every block that they fill.
    pub fn extend(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
        let (from, to) = (self.num_blocks(), self.tokens.len() / self.block_size);
        if from == to {
            return;
        }
        let width = self.hash_width();
        let hashes = Arc::make_mut(&mut self.hashes);
        if to - from > 1 {
            hashes.reserve_exact((to - from) * width);
        }
        let mut function = Hasher::new(self.algorithm, self.block_size, &mut self.scratch);
        let mut keys: Vec<ExtraKey<'_>> = Vec::new();
        let mut parent = [0; algorithm::MAX_WIDTH];
        let parent = &mut parent[..width];
        parent.copy_from_slice(if from == 0 { &self.none_hash } else { &hashes[(from - 1) * width..] });
        let blocks = self.tokens[from * self.block_size..].chunks_exact(self.block_size);
        for (i, block) in (from..).zip(blocks) {
            keys.clear();
            let start = i * self.block_size;
            self.extra.collect(start..start + self.block_size, &mut keys);
            function.block(parent, block, &keys);
            hashes.extend_from_slice(parent);
        }
    }

    /// Tokens a block.
    pub const fn block_size(&self) -> usize {
        self.block_size
    }

    /// The hash function.
    pub const fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Tokens so far, those of an unfinished block included.
    pub const fn num_tokens(&self) -> usize {
        self.tokens.len()
    }

    /// Full blocks; each has a hash.
    pub fn num_blocks(&self) -> usize {
        self.hashes.len() / self.hash_width()
    }

    /// All tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Bytes a hash: 32 for the SHA-256 kinds, 8 for `xxh3_64`.
    pub const fn hash_width(&self) -> usize {
        self.algorithm.width()
    }

    /// Whether hashes are 64-bit integers.
    pub const fn is_int_hash(&self) -> bool {
        self.algorithm.is_int()
    }

    /// All hashes, one after the other; integers as 8 bytes, little endian, as in the columns of events.
    pub fn hash_bytes(&self) -> &[u8] {
        &self.hashes
    }

    /// [`hash_bytes`](Self::hash_bytes) for a handle that may outlive this borrow.
    pub fn shared_hashes(&self) -> Arc<Vec<u8>> {
        Arc::clone(&self.hashes)
    }

    /// The hash of full block `i`.
    ///
    /// # Panics
    /// If there is no such block.
    pub fn hash(&self, i: usize) -> HashRef<'_> {
        let width = self.hash_width();
        self.algorithm.as_hash(&self.hashes[i * width..(i + 1) * width])
    }

    /// What stands for the parent in the hash of a first block. Events say "no parent" instead.
    pub fn none_hash(&self) -> HashRef<'_> {
        self.algorithm.as_hash(&self.none_hash)
    }

    /// Name of the `LoRA` adapter.
    pub const fn lora_name(&self) -> Option<&Arc<str>> {
        self.extra.lora_name.as_ref()
    }

    /// Path of the adapter.
    pub const fn lora_path(&self) -> Option<&Arc<str>> {
        self.extra.lora_path.as_ref()
    }

    /// The engine's number of the adapter.
    pub const fn lora_id(&self) -> Option<i64> {
        self.lora_id
    }

    /// The salt of the first block.
    pub const fn cache_salt(&self) -> Option<&Arc<str>> {
        self.extra.cache_salt.as_ref()
    }

    /// The multimodal features.
    pub fn mm(&self) -> &[MmFeature] {
        self.extra.features()
    }

    /// The seed as given.
    pub const fn seed(&self) -> Option<&Arc<str>> {
        self.seed.as_ref()
    }

    /// Whether any block can have extra keys.
    pub fn has_extra_keys(&self) -> bool {
        !self.extra.is_empty()
    }

    /// Appends a msgpack array with one entry a block, nil or an array of untagged keys as events carry
    /// them: `LoRA` name, multimodal `[id, offset in the block]`, salt.
    pub fn write_extra_keys(&self, blocks: Range<usize>, out: &mut Vec<u8>) {
        self.write_extra_keys_sized(blocks, self.block_size, out);
    }

    /// [`write_extra_keys`](Self::write_extra_keys) for blocks of another size, as groups of hybrid models
    /// have: block `i` spans tokens `i * block_size .. (i + 1) * block_size`.
    pub fn write_extra_keys_sized(&self, blocks: Range<usize>, block_size: usize, out: &mut Vec<u8>) {
        msgpack::write_array_header(out, blocks.len());
        for i in blocks {
            self.write_span_extra_keys(i * block_size..(i + 1) * block_size, out);
        }
    }

    /// Appends the entry of one block that spans any range of tokens (partial blocks): nil or an array.
    pub fn write_span_extra_keys(&self, tokens: Range<usize>, out: &mut Vec<u8>) {
        let mut keys = Vec::new();
        self.extra.collect(tokens, &mut keys);
        extra::write_event_entry(&keys, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(algorithm: Algorithm, tokens: &[u32]) -> TokenBlocks {
        let mut t = TokenBlocks::new(4, Options { algorithm, ..Options::default() }).unwrap();
        t.extend(tokens);
        t
    }

    #[test]
    fn chunking_does_not_matter() {
        let tokens: Vec<u32> = (0..103u32).map(|i| i.wrapping_mul(0x9e37_79b9)).collect();
        for algorithm in Algorithm::ALL {
            let whole = blocks(algorithm, &tokens);
            assert_eq!((whole.num_blocks(), whole.num_tokens()), (25, 103));
            for chunk in [1, 2, 3, 5, 17, 50] {
                let mut t = blocks(algorithm, &[]);
                tokens.chunks(chunk).for_each(|c| t.extend(c));
                assert_eq!(t.hash_bytes(), whole.hash_bytes(), "{algorithm:?} by {chunk}");
                assert_eq!(t.tokens(), whole.tokens());
            }
        }
    }

    #[test]
    fn the_seed_of_the_first_parent() {
        let t = blocks(Algorithm::Sha256Cbor, &[]);
        // hashlib.sha256(cbor2.dumps("vllm-none-hash")).digest()
        assert_eq!(t.none_hash().narrow_first(), 0x9bd9_6a48_5ad8_4efd);
        let mut seeded =
            TokenBlocks::new(4, Options { seed: Some("0".into()), ..Options::default() }).unwrap();
        assert_ne!(seeded.none_hash(), t.none_hash());
        seeded.extend(&[1, 2, 3, 4]);
        assert_ne!(seeded.hash(0), blocks(Algorithm::Sha256Cbor, &[1, 2, 3, 4]).hash(0));
    }

    #[test]
    fn a_handle_that_was_given_out_does_not_change() {
        let mut t = blocks(Algorithm::Sha256Cbor, &[1, 2, 3, 4]);
        let handle = t.shared_hashes();
        t.extend(&[5, 6, 7, 8]);
        assert_eq!((handle.len(), t.hash_bytes().len()), (32, 64));
        assert_eq!(handle[..], t.hash_bytes()[..32]);
    }

    #[test]
    fn extra_keys_follow_the_blocks() {
        let feature = |id: &str, offset, length| MmFeature { id: id.into(), offset, length };
        let options = Options {
            lora_name: Some("l".into()),
            lora_path: Some("p".into()),
            cache_salt: Some("s".into()),
            mm: vec![feature("a", 2, 4), feature("b", 6, 1)],
            ..Options::default()
        };
        let mut t = TokenBlocks::new(4, options).unwrap();
        t.extend(&[0; 12]);
        let mut out = Vec::new();
        t.write_extra_keys(0..3, &mut out);
        // [["l", ["a", 2], "s"], ["l", ["a", -2], ["b", 2]], ["l"]]
        let expected = b"\x93\x93\xa1l\x92\xa1a\x02\xa1s\x93\xa1l\x92\xa1a\xfe\x92\xa1b\x02\x91\xa1l";
        assert_eq!(out, expected);
        out.clear();
        t.write_extra_keys_sized(0..1, 8, &mut out);
        assert_eq!(out, b"\x91\x94\xa1l\x92\xa1a\x02\x92\xa1b\x06\xa1s");
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        let new = |size, options| TokenBlocks::new(size, options).map(|_| ());
        assert_eq!(new(0, Options::default()), Err(TokensError::BlockSize { seen: 0 }));
        let path = Options { lora_path: Some("p".into()), ..Options::default() };
        assert_eq!(new(4, path), Err(TokensError::LoraPathAlone));
        let feature = |offset, length| MmFeature { id: "x".into(), offset, length };
        let unsorted = Options { mm: vec![feature(4, 1), feature(3, 1)], ..Options::default() };
        assert_eq!(new(4, unsorted), Err(TokensError::MmOrder { index: 1, offset: 3, before: 4 }));
        let long = Options { mm: vec![feature(u32::MAX, 1)], ..Options::default() };
        assert_eq!(new(4, long), Ok(()));
    }
}
