//! Who holds the longest prefix of these tokens?
//!
//! | file | what it does |
//! |---|---|
//! | `content.rs` | content keys: what a block holds, whatever hash its engine gives it |
//! | `tiers.rs` | media folded into tiers by a stated rule |
//! | `store.rs` | the blocks of one source, found by hash and by content |
//! | `orphans.rs` | stores that wait for their parent, within a bound |
//! | `profile.rs` | groups, scopes and tiers of a source; matching as a pure function |
//! | `shard.rs` | one source: applies events, keeps its digest |
//! | `query.rs` | a prompt cut into blocks and keyed |
//! | `prefix.rs` | all sources, each behind a lock of its own |
//! | `dump.rs` | an index as bytes, for a restart without a cold start |
//!
//! Each source has its own lock. A writer holds it for one batch; a reader holds it for at most
//! [`LOOKUPS_PER_LOCK`] look-ups at a time, so that no prompt, however long, keeps a writer waiting.

mod content;
mod dump;
mod orphans;
mod prefix;
mod profile;
mod query;
mod shard;
mod store;
mod tiers;

pub use content::{ContentHasher, ContentKey};
pub use prefix::{LOOKUPS_PER_LOCK, PrefixIndex, SourceStats};
pub use profile::Match;
pub use query::Query;
pub use shard::{Bounds, Counters};
pub use tiers::{KNOWN as KNOWN_TIERS, fold as fold_medium};
