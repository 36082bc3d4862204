//! What a stream of events says is resident.

mod digest;

pub use digest::{Digest, key_digest};
