//! What the fuzz targets do with their input.
//!
//! Each body is a function of bytes that panics if something is wrong. The fuzzers call it with bytes that
//! they make up; the core's own tests (`rust/core/tests/fuzz_corpus.rs`) include this module and call it
//! with the bytes in `corpus/`, so that whatever was found once is tested on every compiler.
//!
//! | target | input | what must hold |
//! |---|---|---|
//! | `decode_any` | a payload | no panic, bounded memory, strict and lenient reading agree |
//! | `roundtrip` | a payload | what was read can be written in every dialect and then stays as it is |
//! | `event_list` | a pickled `EventList` | refused, or safe to use and written again as it was |
//! | `index_dump` | the dump of an index | refused, or safe to use and dumped again as it was |
//! | `stream` | operations | log, mirror, snapshots and readers against sets and lists |
//! | `index_ops` | operations | every answer and digest of the index against a naive one |

mod batches;
mod decode_any;
mod event_list;
mod index_dump;
mod index_ops;
mod input;
mod naive_index;
mod roundtrip;
mod stream;

pub use decode_any::decode_any;
use decode_any::same_time;
pub use event_list::event_list;
pub use index_dump::index_dump;
pub use index_ops::index_ops;
pub use roundtrip::roundtrip;
pub use stream::stream;

/// A target: its name, which is also that of its folder in `corpus/`, and its body.
pub type Target = (&'static str, fn(&[u8]));

/// All of them.
pub const TARGETS: [Target; 6] = [
    ("decode_any", decode_any),
    ("roundtrip", roundtrip),
    ("event_list", event_list),
    ("index_dump", index_dump),
    ("stream", stream),
    ("index_ops", index_ops),
];
