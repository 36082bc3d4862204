//! The engines' wire formats: bytes to columns and columns to bytes.
//!
//! A batch is a msgpack array `[ts, events, rank]` (for a short time it was a map); an event is a tagged map
//! or a tagged array, which may stand packed inside a byte string. Which of them a payload holds is told by
//! its shape, event by event, so a reader needs no setting. Writing names a [`Dialect`]; the bytes equal
//! those of the engine's own encoder.
//!
//! | file | what |
//! |---|---|
//! | `reader` | bounded msgpack reading: nothing is allocated by a claimed length, nothing recurses |
//! | `decode` | a batch; what to do with an event that cannot be read |
//! | `shape` | where the fields of one event stand, for maps, arrays and Mooncake's names |
//! | `fields` | those fields into the columns |
//! | `fast` | the same for events exactly as engines write them, compared instead of parsed |
//! | `tokens` | runs of integers, both ways |
//! | `encode` | a batch; what to do with a field that has no place |
//! | `vllm_map`, `vllm_array`, `sglang` | one event in each family of dialects |

mod decode;
mod encode;
mod fast;
mod fields;
mod reader;
mod sglang;
mod shape;
mod tokens;
mod vllm_array;
mod vllm_map;
mod writer;

pub use decode::{Decoded, decode, decode_into};
pub use encode::{EncodeOptions, Encoder, Loss, encode, encode_reporting};

/// A wire format that can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// vLLM 0.33: maps; the header of a store is always three bytes wide.
    VllmMap033,
    /// vLLM 0.24 to 0.32: maps.
    VllmMap032,
    /// vLLM up to 0.23: arrays with this many fields in a store, 5 to 11.
    VllmArray(u8),
    /// `SGLang` 0.5.23: maps.
    SglangMap,
    /// Older `SGLang`: arrays with five fields in a store.
    SglangArray,
}

impl Dialect {
    /// Every dialect, newest first.
    pub const ALL: [Self; 11] = [
        Self::VllmMap033,
        Self::VllmMap032,
        Self::VllmArray(11),
        Self::VllmArray(10),
        Self::VllmArray(9),
        Self::VllmArray(8),
        Self::VllmArray(7),
        Self::VllmArray(6),
        Self::VllmArray(5),
        Self::SglangMap,
        Self::SglangArray,
    ];

    /// Its public name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::VllmMap033 => "vllm-map-0.33",
            Self::VllmMap032 => "vllm-map-0.32",
            Self::VllmArray(11..) => "vllm-array-11",
            Self::VllmArray(10) => "vllm-array-10",
            Self::VllmArray(9) => "vllm-array-9",
            Self::VllmArray(8) => "vllm-array-8",
            Self::VllmArray(7) => "vllm-array-7",
            Self::VllmArray(6) => "vllm-array-6",
            Self::VllmArray(_) => "vllm-array-5",
            Self::SglangMap => "sglang-map",
            Self::SglangArray => "sglang-array",
        }
    }

    /// The dialect of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|d| d.name() == name)
    }
}

/// A time stamp, in the form in which it stands on the wire.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Timestamp {
    /// Seconds (every engine).
    Float(f64),
    /// An integer: Mooncake's milliseconds.
    Int(i64),
    /// An integer above 2^63 - 1.
    Uint(u64),
}
