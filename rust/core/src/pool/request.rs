//! What a call to the pool is given of a request: hashes, tokens and what else is in a block's key.

use std::ops::Range;
use std::sync::Arc;

use crate::error::PoolError;
use crate::hash::{HashRef, MAX_HASH_BYTES};
use crate::tokens::TokenBlocks;

/// No slot, no block.
pub const NIL: u32 = u32::MAX;

/// The form of all hashes of one pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyForm {
    /// 64-bit integers, 8 bytes each, little endian.
    Int,
    /// Byte strings of this many bytes.
    Bytes(u8),
}

impl KeyForm {
    /// Bytes of one hash in a column.
    #[inline]
    pub const fn width(self) -> usize {
        match self {
            Self::Int => 8,
            Self::Bytes(w) => w as usize,
        }
    }

    /// The bytes of a column of integers.
    #[cfg(target_endian = "little")]
    pub fn int_bytes(hashes: &[u64]) -> &[u8] {
        bytemuck::cast_slice(hashes)
    }

    /// A column's bytes as a hash.
    #[inline]
    pub fn hash(self, bytes: &[u8]) -> HashRef<'_> {
        match self {
            Self::Int => HashRef::Uint(le(bytes)),
            Self::Bytes(_) => HashRef::Bytes(bytes),
        }
    }

    pub(super) fn describe(self) -> String {
        match self {
            Self::Int => "64-bit integers".to_owned(),
            Self::Bytes(w) => format!("byte strings of {w}"),
        }
    }

    /// The form of byte strings of `width`.
    pub fn bytes(width: usize) -> Result<Self, PoolError> {
        if (1..=MAX_HASH_BYTES).contains(&width) {
            Ok(Self::Bytes(width as u8))
        } else {
            Err(PoolError::HashForm(format!("1 to {MAX_HASH_BYTES} bytes were expected, saw {width}")))
        }
    }
}

#[inline]
pub(super) fn le(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |b: &[u8; 8]| u64::from_le_bytes(*b))
}

/// Copies one hash; fixed sizes for the two widths that engines use, since a `memcpy` of unknown
/// length costs as much as the rest.
#[inline]
pub(super) fn copy_hash(to: &mut [u8], from: &[u8]) {
    if let (Ok(a), Ok(b)) = (<&mut [u8; 32]>::try_from(&mut *to), <&[u8; 32]>::try_from(from)) {
        *a = *b;
    } else if let (Ok(a), Ok(b)) = (<&mut [u8; 8]>::try_from(&mut *to), <&[u8; 8]>::try_from(from)) {
        *a = *b;
    } else {
        to.copy_from_slice(from);
    }
}

/// Equality of two hashes of one width.
#[inline]
pub(super) fn same_hash(a: &[u8], b: &[u8]) -> bool {
    match (<&[u8; 32]>::try_from(a), <&[u8; 32]>::try_from(b)) {
        (Ok(a), Ok(b)) => a == b,
        _ => a == b,
    }
}

/// Hashes of a request, one per `block_size` tokens of the pool.
#[derive(Clone, Copy, Debug)]
pub struct HashColumn<'a> {
    /// Their form.
    pub form: KeyForm,
    /// Their bytes, back to back.
    pub data: &'a [u8],
    /// The number of the first that is here.
    pub first: usize,
}

impl<'a> HashColumn<'a> {
    /// The number of hashes of the request, as far as is known here.
    #[inline]
    pub fn end(&self) -> usize {
        self.first + self.data.len() / self.form.width()
    }

    /// The hash with this number, which must be here.
    #[inline]
    pub fn get(&self, index: usize) -> &'a [u8] {
        let w = self.form.width();
        &self.data[(index - self.first) * w..][..w]
    }
}

/// Where the extra keys (`LoRA` name, multimodal identifiers, salt) of a request's blocks come from.
pub trait ExtraKeySource {
    /// Appends the entry of the block that holds these tokens, a msgpack array; `false` where the
    /// block has none.
    fn write_entry(&self, tokens: Range<usize>, out: &mut Vec<u8>) -> bool;
}

/// A request, or the part of it that a call needs.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// Hashes.
    pub hashes: HashColumn<'a>,
    /// Tokens; not looked at while events are off.
    pub tokens: &'a [u32],
    /// The number of the first token that is here.
    pub first_token: usize,
    /// Extra keys, if any block has some.
    pub extra: Option<&'a dyn ExtraKeySource>,
    /// `LoRA` adapter.
    pub lora_name: Option<&'a Arc<str>>,
    /// Its number (old readers).
    pub lora_id: Option<i64>,
    /// Session.
    pub session_id: Option<&'a str>,
}

impl<'a> Request<'a> {
    /// Hashes and tokens only, from the beginning.
    pub fn plain(form: KeyForm, hashes: &'a [u8], tokens: &'a [u32]) -> Self {
        Self {
            hashes: HashColumn { form, data: hashes, first: 0 },
            tokens,
            first_token: 0,
            extra: None,
            lora_name: None,
            lora_id: None,
            session_id: None,
        }
    }

    /// A whole request.
    #[inline]
    pub fn of(tokens: &'a TokenBlocks, session_id: Option<&'a str>) -> Self {
        let form =
            if tokens.is_int_hash() { KeyForm::Int } else { KeyForm::Bytes(tokens.hash_width() as u8) };
        Self {
            hashes: HashColumn { form, data: tokens.hash_bytes(), first: 0 },
            tokens: tokens.tokens(),
            first_token: 0,
            extra: tokens.has_extra_keys().then_some(tokens),
            lora_name: tokens.lora_name(),
            lora_id: tokens.lora_id(),
            session_id,
        }
    }

    /// These tokens, which must be here.
    #[inline]
    pub(super) fn tokens_of(&self, range: Range<usize>) -> &'a [u32] {
        &self.tokens[range.start - self.first_token..range.end - self.first_token]
    }
}

impl ExtraKeySource for TokenBlocks {
    fn write_entry(&self, tokens: Range<usize>, out: &mut Vec<u8>) -> bool {
        let at = out.len();
        self.write_span_extra_keys(tokens, out);
        let some = out[at..] != [0xc0];
        if !some {
            out.truncate(at);
        }
        some
    }
}
