//! Extra keys: what tells two blocks with the same tokens apart.

use std::ops::Range;
use std::sync::Arc;

use crate::error::TokensError;
use crate::msgpack;

/// An image, a piece of audio and the like: its tokens are placeholders, its identifier is its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MmFeature {
    /// Identifier of the content.
    pub id: Arc<str>,
    /// Its first token in the request.
    pub offset: u32,
    /// Its number of tokens.
    pub length: u32,
}

/// One extra key of one block. In the hash it is tagged, in an event it is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExtraKey<'a> {
    /// `("lora", name, path)`.
    Lora(&'a str, Option<&'a str>),
    /// `("mm", id, offset)`; the offset is relative to the block, negative where the feature began before.
    Mm(&'a str, i64),
    /// `("cache_salt", salt)`.
    Salt(&'a str),
}

/// A request's extra keys, by token.
#[derive(Clone, Debug)]
pub(super) struct ExtraKeys {
    pub(super) lora_name: Option<Arc<str>>,
    pub(super) lora_path: Option<Arc<str>>,
    pub(super) cache_salt: Option<Arc<str>>,
    mm: Vec<MmFeature>,
    /// For each feature the furthest end of it and those before it, so that a block finds its features
    /// by bisection even where they overlap.
    ends: Vec<u64>,
}

impl ExtraKeys {
    pub(super) fn new(
        lora_name: Option<Arc<str>>,
        lora_path: Option<Arc<str>>,
        cache_salt: Option<Arc<str>>,
        mm: Vec<MmFeature>,
    ) -> Result<Self, TokensError> {
        if lora_path.is_some() && lora_name.is_none() {
            return Err(TokensError::LoraPathAlone);
        }
        for (i, pair) in mm.windows(2).enumerate() {
            let (before, offset) = (pair[0].offset, pair[1].offset);
            if offset < before {
                return Err(TokensError::MmOrder { index: i + 1, offset, before });
            }
        }
        let ends = mm
            .iter()
            .scan(0, |furthest, f| {
                *furthest = (*furthest).max(u64::from(f.offset) + u64::from(f.length));
                Some(*furthest)
            })
            .collect();
        let cache_salt = cache_salt.filter(|s| !s.is_empty());
        Ok(Self { lora_name, lora_path, cache_salt, mm, ends })
    }

    pub(super) fn features(&self) -> &[MmFeature] {
        &self.mm
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lora_name.is_none() && self.cache_salt.is_none() && self.mm.is_empty()
    }

    /// Appends the keys of a block that spans these tokens, in vLLM's order: `LoRA`, multimodal, salt.
    #[inline]
    pub(super) fn collect<'a>(&'a self, tokens: Range<usize>, out: &mut Vec<ExtraKey<'a>>) {
        if let Some(name) = &self.lora_name {
            out.push(ExtraKey::Lora(name, self.lora_path.as_deref()));
        }
        if !self.mm.is_empty() {
            self.collect_mm(&tokens, out);
        }
        if tokens.start == 0
            && let Some(salt) = &self.cache_salt
        {
            out.push(ExtraKey::Salt(salt));
        }
    }

    fn collect_mm<'a>(&'a self, tokens: &Range<usize>, out: &mut Vec<ExtraKey<'a>>) {
        let (start, end) = (tokens.start as u64, tokens.end as u64);
        let first = self.ends.partition_point(|&e| e <= start);
        for f in self.mm[first..].iter().take_while(|f| u64::from(f.offset) < end) {
            if u64::from(f.offset) + u64::from(f.length) > start {
                out.push(ExtraKey::Mm(&f.id, i64::from(f.offset) - start.cast_signed()));
            }
        }
    }
}

/// Appends one block's entry of an event: nil, or an array of the keys without tags (and without the
/// adapter's path).
pub(super) fn write_event_entry(keys: &[ExtraKey<'_>], out: &mut Vec<u8>) {
    if keys.is_empty() {
        return msgpack::write_nil(out);
    }
    msgpack::write_array_header(out, keys.len());
    for key in keys {
        match *key {
            ExtraKey::Lora(s, _) | ExtraKey::Salt(s) => msgpack::write_str(out, s),
            ExtraKey::Mm(id, offset) => {
                msgpack::write_array_header(out, 2);
                msgpack::write_str(out, id);
                msgpack::write_int(out, offset);
            }
        }
    }
}
