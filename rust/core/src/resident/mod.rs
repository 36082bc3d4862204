//! What a stream of events says is resident.

mod digest;
mod set;
mod short_key;

pub use digest::{Digest, KeyWriter, key_digest};
pub use set::{ApplyCounts, ResidentSet};
