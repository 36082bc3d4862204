//! Who holds the longest prefix of these tokens?
//!
//! | file | what it does |
//! |---|---|
//! | `content.rs` | content keys: what a block holds, whatever hash its engine gives it |
//! | `tiers.rs` | media folded into tiers by a stated rule |
//! | `store.rs` | the blocks of one source, found by hash and by content |
//! | `orphans.rs` | stores that wait for their parent, within a bound |
//! | `wanted.rs` | parents that orphans of any source wait for |
//! | `expected.rs` | blocks that a router expects soon |
//! | `expiry.rs` | tiers of which nobody announces what leaves |
//! | `profile.rs` | groups, scopes and tiers of a source; matching as a pure function |
//! | `shard.rs` | one source: applies events, keeps its digest |
//! | `counters.rs` | what its stream held, counted |
//! | `directory.rs` | all sources by name and by number, each behind a lock of its own |
//! | `query.rs` | a prompt cut into blocks and keyed |
//! | `prefix.rs` | the index: events in, upkeep |
//! | `find.rs` | answers out |
//! | `dump.rs`, `bytes.rs` | an index as bytes, for a restart without a cold start |
//!
//! Each source has its own lock. A writer holds it for one batch; a reader holds it for at most
//! [`LOOKUPS_PER_LOCK`] look-ups at a time, so that no prompt, however long, keeps a writer waiting.

mod bytes;
mod content;
mod counters;
mod directory;
mod dump;
mod expected;
mod expiry;
mod find;
mod orphans;
mod prefix;
mod profile;
mod query;
mod shard;
mod store;
mod tiers;
mod wanted;

pub use content::{ContentKey, Root, block_key};
pub use counters::{Bounds, Counters};
pub use expiry::Expiry;
pub use find::LOOKUPS_PER_LOCK;
pub use prefix::{PrefixIndex, Seq, SourceStats};
pub use profile::{Match, SourceId};
pub use query::Query;
pub use tiers::{KNOWN as KNOWN_TIERS, fold as fold_medium};
