//! What a publisher keeps beside its sockets: the bytes that were sent, for replay, and what they say is
//! resident, for snapshots and the digest.

mod attr_table;
mod blocks;
mod mirror;
mod replay_log;
mod snapshot;

pub use mirror::{HISTORY, Mirror};
pub use replay_log::{Payload, ReplayLog};
pub use snapshot::{Frozen, SnapshotHead, SnapshotStep};
