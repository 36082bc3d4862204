//! Events in columns.
//!
//! An [`EventList`] holds any number of `BlockStored`, `BlockRemoved` and `AllBlocksCleared` without
//! an object per event: one 16-byte row each, and arenas of hash bytes and token ids. What many
//! events share (medium, block size, LoRA name, ...) is an [`Attrs`] in a small table; what is rare
//! (odd token ids, multimodal keys, metadata, unknown fields) is kept as the msgpack bytes in which
//! it came.

mod alike;
mod attrs;
mod bytes;
mod data;
mod direct;
mod list;
mod part;
mod same;
mod view;

pub use attrs::{Attrs, Scope};
pub use bytes::{Encoded, FORMAT_VERSION, REASONS};
pub use data::{AttrId, CommonParts, EventData, Hashes, Origin, Skipped, StoredParts};
pub(crate) use direct::{Parent, Written};
pub use list::EventList;
pub use view::{EventKind, EventView, ExtraKeys, HashForm, HashIter, Rare, Tokens};
