//! The block pool: which blocks of a KV cache are free, which hold what, and the events that say so.
//!
//! [`BlockPool`] behaves as vLLM's pool does: block 0 is the null block, free blocks form a queue in
//! eviction order, allocation evicts, one hash may be held by several physical blocks, and one block
//! may own several hashes. [`EventQueue`] is the event half alone, for engines with their own pool.

mod block_pool;
mod blocks;
mod cache;
mod config;
mod emit;
mod engine;
mod keys;
mod lookup;
mod partial;
mod queue;
mod request;
mod retained;
mod snapshot;
mod table;

pub use block_pool::{BlockPool, Stats};
pub use config::{Config, Group, GroupKind, Report};
pub use engine::Held;
pub use queue::EventQueue;
pub use request::{ExtraKeySource, HashColumn, KeyForm, NIL, Request};
