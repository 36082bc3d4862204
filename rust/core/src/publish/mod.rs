//! What a publisher keeps beside its sockets: the bytes that were sent, for replay.

mod replay_log;

pub use replay_log::{Payload, ReplayLog};
