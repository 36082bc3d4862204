//! Content keys: what a block holds, independent of how an engine hashes it.
//!
//! A block's key is XXH3-64, with the index's own seed, over the key of the block before it, its token
//! ids (4 bytes each, little endian) and its extra keys in a canonical form. LoRA name and cache salt
//! enter at the root and so are part of every key down the chain. Engines with different hash functions
//! or seeds therefore share one index, and two tenants never share an entry.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::events::{Attrs, ExtraKeys};
use crate::msgpack;

/// The key of a block's content. Never 0.
pub type ContentKey = u64;

/// Computes content keys; holds the seed and a buffer.
#[derive(Clone, Debug)]
pub struct ContentHasher {
    seed: u64,
    buffer: Vec<u8>,
}

impl ContentHasher {
    /// A hasher of the index with this seed.
    pub fn new(seed: u64) -> Self {
        Self { seed, buffer: Vec::new() }
    }

    fn finish(&self) -> ContentKey {
        xxh3_64_with_seed(&self.buffer, self.seed).max(1)
    }

    /// The key that the first block of a sequence hangs on.
    pub fn root(&mut self, lora_name: Option<&str>, cache_salt: Option<&str>) -> ContentKey {
        self.buffer.clear();
        self.buffer.push(b'R');
        for part in [lora_name, cache_salt] {
            // A length before each, so that no two pairs give the same bytes.
            self.buffer.extend_from_slice(&part.map_or(u32::MAX, |s| s.len() as u32).to_le_bytes());
            self.buffer.extend_from_slice(part.unwrap_or_default().as_bytes());
        }
        self.finish()
    }

    /// The key of the block with `tokens` after `parent`; `extra` is its canonical extra keys.
    #[inline]
    pub fn block(&mut self, parent: ContentKey, tokens: &[u32], extra: &[u8]) -> ContentKey {
        self.buffer.clear();
        self.buffer.extend_from_slice(&parent.to_le_bytes());
        if cfg!(target_endian = "little") {
            self.buffer.extend_from_slice(bytemuck::cast_slice(tokens));
        } else {
            for t in tokens {
                self.buffer.extend_from_slice(&t.to_le_bytes());
            }
        }
        if !extra.is_empty() {
            self.buffer.extend_from_slice(extra);
            self.buffer.push(b'X');
        }
        self.finish()
    }
}

/// The parts of a store's extra keys that belong to its content.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extra {
    /// The salt of the sequence, where its first block is among these.
    pub salt: Option<String>,
    /// Per block the canonical bytes of what is neither LoRA name nor salt; empty where nothing is.
    pub blocks: Vec<Vec<u8>>,
}

/// Sorts out the untagged extra keys of a store: the LoRA name is in `attrs`, `(identifier, offset)`
/// pairs are multimodal, a string in the first block of a sequence is the salt; other strings (digests
/// of prompt embeddings) stay with their block.
pub fn read_extra(extra: ExtraKeys<'_>, attrs: &Attrs, is_root: bool) -> Extra {
    let mut out = Extra { salt: attrs.cache_salt.as_deref().map(str::to_owned), ..Extra::default() };
    let ExtraKeys::Raw(raw) = extra else { return out };
    let Some((n, mut at)) = msgpack::array_header(raw, 0) else { return out };
    for block in 0..n {
        let mut bytes = Vec::new();
        let mut lora_seen = attrs.lora_name.is_none();
        if let Some((items, mut pos)) = msgpack::array_header(raw, at) {
            for _ in 0..items {
                let Ok(end) = msgpack::skip_value(raw, pos) else { return out };
                let item = &raw[pos..end];
                match msgpack::read_str(item) {
                    Some(s) if !lora_seen && attrs.lora_name.as_deref() == Some(s) => lora_seen = true,
                    Some(s) if is_root && block == 0 && out.salt.is_none() => out.salt = Some(s.to_owned()),
                    Some(s) if is_root && block == 0 && out.salt.as_deref() == Some(s) => {}
                    _ => bytes.extend_from_slice(item),
                }
                pos = end;
            }
        }
        let Ok(end) = msgpack::skip_value(raw, at) else { return out };
        at = end;
        out.blocks.push(bytes);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roots_differ_by_every_part() {
        let mut h = ContentHasher::new(1);
        let keys = [
            h.root(None, None),
            h.root(Some("a"), None),
            h.root(None, Some("a")),
            h.root(Some("ab"), Some("c")),
        ];
        let other = h.root(Some("a"), Some("bc"));
        for (i, a) in keys.iter().enumerate() {
            assert!(keys[i + 1..].iter().all(|b| a != b) && *a != other);
        }
        assert_ne!(ContentHasher::new(2).root(None, None), keys[0]);
    }

    #[test]
    fn extra_keys_are_part_of_the_content_and_the_salt_only_at_the_root() {
        let mut raw = Vec::new();
        msgpack::write_array_header(&mut raw, 2);
        msgpack::write_array_header(&mut raw, 2);
        msgpack::write_str(&mut raw, "lora");
        msgpack::write_str(&mut raw, "salt");
        msgpack::write_array_header(&mut raw, 2);
        msgpack::write_str(&mut raw, "lora");
        msgpack::write_array_header(&mut raw, 2);
        msgpack::write_str(&mut raw, "image");
        msgpack::write_uint(&mut raw, 3);
        let attrs = Attrs { lora_name: Some("lora".into()), ..Attrs::default() };
        let e = read_extra(ExtraKeys::Raw(&raw), &attrs, true);
        assert_eq!(e.salt.as_deref(), Some("salt"));
        assert!(e.blocks[0].is_empty() && !e.blocks[1].is_empty());
        let e = read_extra(ExtraKeys::Raw(&raw), &attrs, false);
        assert!(e.salt.is_none() && !e.blocks[0].is_empty());
    }
}
