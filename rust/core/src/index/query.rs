//! A prompt, cut into blocks and keyed.

use super::content::{ContentHasher, ContentKey};
use crate::msgpack;
use crate::tokens::MmFeature;

/// What is asked: the start of a prompt.
#[derive(Clone, Copy, Debug, Default)]
pub struct Query<'a> {
    /// Token ids.
    pub tokens: &'a [u32],
    /// Name of the LoRA adapter.
    pub lora_name: Option<&'a str>,
    /// Tenant salt.
    pub cache_salt: Option<&'a str>,
    /// Multimodal features, in order of their offsets.
    pub mm: &'a [MmFeature],
}

impl Query<'_> {
    /// The content keys of the whole blocks of this size.
    pub fn keys(&self, hasher: &mut ContentHasher, block_size: usize) -> Vec<ContentKey> {
        let mut key = hasher.root(self.lora_name, self.cache_salt);
        let mut extra = Vec::new();
        self.tokens
            .chunks_exact(block_size)
            .enumerate()
            .map(|(i, block)| {
                extra.clear();
                self.write_extra(i * block_size, block_size, &mut extra);
                key = hasher.block(key, block, &extra);
                key
            })
            .collect()
    }

    /// The features of a block in the form in which events carry them: `[id, offset in the block]`.
    fn write_extra(&self, start: usize, block_size: usize, out: &mut Vec<u8>) {
        let (start, end) = (start as u64, (start + block_size) as u64);
        for f in self.mm.iter().take_while(|f| u64::from(f.offset) < end) {
            if u64::from(f.offset) + u64::from(f.length) > start {
                msgpack::write_array_header(out, 2);
                msgpack::write_str(out, &f.id);
                msgpack::write_int(out, i64::from(f.offset) - start.cast_signed());
            }
        }
    }
}
