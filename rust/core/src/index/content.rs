//! Content keys: what a block holds, independent of how an engine hashes it.
//!
//! A block's key is XXH3-64 over its token ids (4 bytes each, little endian) and, where it has any, its
//! extra keys in a canonical form; the seed is the key of the block before it. LoRA name and cache salt
//! enter at the root, whose seed is the index's own, and so are part of every key down the chain. Engines
//! with different hash functions or seeds therefore share one index, and two tenants never share an entry.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::events::{Attrs, ExtraKeys};
use crate::msgpack;

/// The key of a block's content. Never 0.
pub type ContentKey = u64;

/// What stands at the root of a sequence, beside its tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Root<'a> {
    /// Name of the LoRA adapter.
    pub lora_name: Option<&'a str>,
    /// Number of an adapter whose engine does not tell its name: never equal to the base model.
    pub lora_id: Option<i64>,
    /// Tenant salt.
    pub cache_salt: Option<&'a str>,
}

impl<'a> Root<'a> {
    /// What a store says of its sequence.
    pub fn of(attrs: &'a Attrs, salt: Option<&'a str>) -> Self {
        let lora_name = attrs.lora_name.as_deref();
        let lora_id = attrs.lora_id.filter(|&id| lora_name.is_none() && id != 0);
        Self { lora_name, lora_id, cache_salt: attrs.cache_salt.as_deref().or(salt) }
    }

    /// The key that the first block hangs on.
    pub fn key(&self, seed: u64) -> ContentKey {
        let mut bytes = vec![b'R'];
        for part in [self.lora_name, self.cache_salt] {
            // A length before each, so that no two pairs give the same bytes.
            bytes.extend_from_slice(&part.map_or(u64::MAX, |s| s.len() as u64).to_le_bytes());
            bytes.extend_from_slice(part.unwrap_or_default().as_bytes());
        }
        if let Some(id) = self.lora_id {
            bytes.extend_from_slice(&id.to_le_bytes());
        }
        xxh3_64_with_seed(&bytes, seed).max(1)
    }
}

/// The key of the block with `tokens` after `parent`; `extra` is its canonical extra keys.
#[inline]
pub fn block_key(parent: ContentKey, tokens: &[u32], extra: &[u8]) -> ContentKey {
    if extra.is_empty() && cfg!(target_endian = "little") {
        return xxh3_64_with_seed(bytemuck::cast_slice(tokens), parent).max(1);
    }
    let mut bytes = Vec::with_capacity(tokens.len() * 4 + extra.len() + 1);
    for t in tokens {
        bytes.extend_from_slice(&t.to_le_bytes());
    }
    if !extra.is_empty() {
        // Not a multiple of four bytes: no block of tokens alone has these.
        bytes.extend_from_slice(extra);
        bytes.resize(bytes.len().next_multiple_of(4) + 1, b'X');
    }
    xxh3_64_with_seed(&bytes, parent).max(1)
}

/// Reads the untagged extra keys of a store, block by block.
///
/// The LoRA name is in the attributes; `(identifier, offset)` pairs are multimodal; a string in the first
/// block of a sequence is the salt; other values (digests of prompt embeddings) stay with their block.
#[derive(Clone, Debug)]
pub struct ExtraReader<'a> {
    raw: &'a [u8],
    /// Where the next block's keys begin, and how many blocks are left.
    at: usize,
    left: usize,
    lora_name: Option<&'a str>,
    is_root: bool,
    salt: Option<&'a str>,
    buffer: Vec<u8>,
}

impl<'a> ExtraReader<'a> {
    /// For a store's extra keys; `is_root` says that its first block begins a sequence.
    pub fn new(extra: ExtraKeys<'a>, attrs: &'a Attrs, is_root: bool) -> Self {
        let raw = extra.raw().unwrap_or_default();
        let (left, at) = msgpack::array_header(raw, 0).unwrap_or((0, 0));
        let lora_name = attrs.lora_name.as_deref();
        let salt = attrs.cache_salt.as_deref();
        let mut reader = Self { raw, at, left, lora_name, is_root, salt, buffer: Vec::new() };
        if is_root && left > 0 && salt.is_none() {
            reader.salt = reader.find_salt();
        }
        reader
    }

    /// The salt of the sequence, where its first block is among these.
    pub fn salt(&self) -> Option<&'a str> {
        self.salt
    }

    /// The first string of the first block that is not the LoRA name.
    fn find_salt(&self) -> Option<&'a str> {
        let (items, mut at) = msgpack::array_header(self.raw, self.at)?;
        let mut lora_seen = self.lora_name.is_none();
        for _ in 0..items {
            let end = msgpack::skip_value(self.raw, at).ok()?;
            match msgpack::read_str(&self.raw[at..end]) {
                Some(s) if !lora_seen && self.lora_name == Some(s) => lora_seen = true,
                Some(s) => return Some(s),
                None => {}
            }
            at = end;
        }
        None
    }

    /// The canonical extra keys of the next block: those that are neither LoRA name nor salt.
    #[inline]
    pub fn next_block(&mut self) -> &[u8] {
        self.buffer.clear();
        if self.left > 0 {
            self.left -= 1;
            // Nesting too deep to skip cannot come from the decoder; whatever it is, it ends the list.
            if self.read_block().is_none() {
                self.left = 0;
            }
            self.is_root = false;
        }
        &self.buffer
    }

    fn read_block(&mut self) -> Option<()> {
        if let Some((items, mut at)) = msgpack::array_header(self.raw, self.at) {
            let mut lora_seen = self.lora_name.is_none();
            for _ in 0..items {
                let end = msgpack::skip_value(self.raw, at).ok()?;
                let item = &self.raw[at..end];
                match msgpack::read_str(item) {
                    Some(s) if !lora_seen && self.lora_name == Some(s) => lora_seen = true,
                    Some(s) if self.is_root && self.salt == Some(s) => {}
                    _ => self.buffer.extend_from_slice(item),
                }
                at = end;
            }
        }
        self.at = msgpack::skip_value(self.raw, self.at).ok()?;
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roots_differ_by_every_part() {
        let root = |lora_name, cache_salt, lora_id| Root { lora_name, lora_id, cache_salt }.key(1);
        let keys = [
            root(None, None, None),
            root(Some("a"), None, None),
            root(None, Some("a"), None),
            root(Some("ab"), Some("c"), None),
            root(Some("a"), Some("bc"), None),
            root(None, None, Some(7)),
            root(Some(""), None, None),
        ];
        for (i, a) in keys.iter().enumerate() {
            assert!(keys[i + 1..].iter().all(|b| a != b));
        }
        assert_ne!(Root::default().key(2), keys[0]);
    }

    #[test]
    fn extra_keys_are_part_of_the_content_and_the_salt_only_at_the_root() {
        let mut raw = Vec::new();
        msgpack::write_array_header(&mut raw, 3);
        msgpack::write_array_header(&mut raw, 2);
        msgpack::write_str(&mut raw, "lora");
        msgpack::write_str(&mut raw, "salt");
        msgpack::write_array_header(&mut raw, 2);
        msgpack::write_str(&mut raw, "lora");
        msgpack::write_array_header(&mut raw, 2);
        msgpack::write_str(&mut raw, "image");
        msgpack::write_uint(&mut raw, 3);
        msgpack::write_nil(&mut raw);
        let attrs = Attrs { lora_name: Some("lora".into()), ..Attrs::default() };
        let mut e = ExtraReader::new(ExtraKeys::Raw(&raw), &attrs, true);
        assert_eq!(e.salt(), Some("salt"));
        assert!(e.next_block().is_empty());
        assert!(!e.next_block().is_empty());
        assert!(e.next_block().is_empty() && e.next_block().is_empty());
        let mut e = ExtraReader::new(ExtraKeys::Raw(&raw), &attrs, false);
        assert_eq!(e.salt(), None);
        assert!(!e.next_block().is_empty());
        for cut in 0..raw.len() {
            let mut e = ExtraReader::new(ExtraKeys::Raw(&raw[..cut]), &attrs, true);
            for _ in 0..5 {
                e.next_block();
            }
        }
    }

    #[test]
    fn no_extra_keys_look_like_tokens() {
        let tokens = [1, 2, 3, 4];
        let plain = block_key(1, &tokens, &[]);
        assert_ne!(plain, block_key(1, &tokens, &[0xc0]));
        assert_ne!(block_key(1, &tokens[..3], &[4, 0, 0, 0]), plain);
        assert_ne!(block_key(2, &tokens, &[]), plain);
    }
}
