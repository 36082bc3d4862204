//! The extension module `kvevents._core`: extract, call the core, wrap. Nothing else.
#![deny(unsafe_code)]
// The names of the Python classes' methods are documented in `_core.pyi`, where users see them.
#![allow(missing_docs)]
// PyO3 hands arguments over by value.
#![allow(clippy::needless_pass_by_value)]

mod aggregate;
mod codec;
mod engine_block;
mod engine_calls;
mod engine_events;
mod engine_pool;
mod engine_request;
mod errors;
mod event_args;
mod event_reader;
mod events;
mod ids;
mod index;
mod matches;
mod mirror;
mod pool;
mod pool_args;
mod publish;
mod queue;
#[allow(unsafe_code)]
mod raw;
mod recorder;
mod resident;
mod tokens;

use pyo3::prelude::*;

/// Each part registers its own names.
#[pymodule(name = "_core", gil_used = false)]
mod core_module {
    use super::{Bound, PyModule, PyModuleMethods, PyResult};

    #[pymodule_export]
    use crate::aggregate::PyAggregator;
    #[pymodule_export]
    use crate::codec::{decode_batch, dialects, encode_batch, encode_batch_reporting};
    #[pymodule_export]
    use crate::engine_block::PyEngineBlock;
    #[pymodule_export]
    use crate::engine_pool::PyEnginePool;
    #[pymodule_export]
    use crate::events::PyEventList;
    #[pymodule_export]
    use crate::ids::PyBlockIds;
    #[pymodule_export]
    use crate::index::PyPrefixIndex;
    #[pymodule_export]
    use crate::matches::PyMatches;
    #[pymodule_export]
    use crate::mirror::PyMirror;
    #[pymodule_export]
    use crate::pool::{PyBlockPool, PyPoolStats};
    #[pymodule_export]
    use crate::publish::PyReplayLog;
    #[pymodule_export]
    use crate::queue::PyEventQueue;
    #[pymodule_export]
    use crate::recorder::PyKVEventRecorder;
    #[pymodule_export]
    use crate::resident::PyResidentSet;
    #[pymodule_export]
    use crate::tokens::{PyBlockHashes, PyTokenBlocks};

    #[pymodule_init]
    fn init(m: &Bound<'_, PyModule>) -> PyResult<()> {
        m.add("__version__", env!("CARGO_PKG_VERSION"))?;
        m.add("BUILD_PROFILE", if cfg!(debug_assertions) { "debug" } else { "release" })?;
        Ok(())
    }
}
