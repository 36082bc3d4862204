//! A prompt, cut into blocks and keyed.

use super::content::{ContentKey, Root, block_key};
use crate::msgpack;
use crate::tokens::MmFeature;

/// What is asked: the start of a prompt.
#[derive(Clone, Copy, Debug, Default)]
pub struct Query<'a> {
    /// Token ids.
    pub tokens: &'a [u32],
    /// Name of the LoRA adapter.
    pub lora_name: Option<&'a str>,
    /// Tenant salt; an empty one is none.
    pub cache_salt: Option<&'a str>,
    /// Multimodal features, in order of their offsets.
    pub mm: &'a [MmFeature],
}

/// The content keys of a prompt's whole blocks of one size, computed as far as they are asked for.
#[derive(Debug)]
pub struct Keys<'a> {
    query: Query<'a>,
    block_size: usize,
    next: ContentKey,
    known: Vec<ContentKey>,
}

impl<'a> Query<'a> {
    /// Its keys in blocks of this size, in an index with this seed.
    pub fn keys(&self, seed: u64, block_size: u32) -> Keys<'a> {
        let cache_salt = self.cache_salt.filter(|s| !s.is_empty());
        let next = Root { lora_name: self.lora_name, lora_id: None, cache_salt }.key(seed);
        Keys { query: *self, block_size: block_size as usize, next, known: Vec::new() }
    }
}

impl Keys<'_> {
    /// Tokens in a block.
    pub fn block_size(&self) -> u32 {
        self.block_size as u32
    }

    /// Whole blocks of the prompt.
    pub fn len(&self) -> usize {
        self.query.tokens.len() / self.block_size
    }

    /// The keys of the first `n` blocks; at most [`Self::len`].
    pub fn first(&mut self, n: usize) -> &[ContentKey] {
        let mut extra = Vec::new();
        for i in self.known.len()..n {
            let start = i * self.block_size;
            if !self.query.mm.is_empty() {
                extra.clear();
                write_extra(self.query.mm, start, self.block_size, &mut extra);
            }
            self.next = block_key(self.next, &self.query.tokens[start..start + self.block_size], &extra);
            self.known.push(self.next);
        }
        &self.known[..n]
    }
}

/// The features of a block in the form in which events carry them: `[id, offset in the block]`.
fn write_extra(features: &[MmFeature], start: usize, block_size: usize, out: &mut Vec<u8>) {
    let (start, end) = (start as u64, (start + block_size) as u64);
    for f in features.iter().take_while(|f| u64::from(f.offset) < end) {
        if u64::from(f.offset) + u64::from(f.length) > start {
            msgpack::write_array_header(out, 2);
            msgpack::write_str(out, &f.id);
            msgpack::write_int(out, i64::from(f.offset) - start.cast_signed());
        }
    }
}
