//! KV-cache events without Python: columns of events, the engines' wire codecs, the block pool that
//! makes events and the structures that readers rebuild from them.
//!
//! Nothing here knows Python, sockets, clocks, threads or async. Time and sequence numbers are
//! arguments, which makes every structure testable and every simulation repeatable.
#![deny(unsafe_code)]

pub mod aggregate;
pub mod codec;
pub mod error;
pub mod events;
pub mod hash;
pub mod index;
pub mod msgpack;
pub mod pool;
pub mod publish;
pub mod record;
pub mod resident;
pub mod tokens;
