//! `PrefixIndex`: payloads in, answers out; no Python object per block on the way.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use kvevents_core::codec;
use kvevents_core::hash::HashRef;
use kvevents_core::index::{Bounds, Match, PrefixIndex, Query, Seq};
use kvevents_core::tokens::MmFeature;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::errors::{Exc, decode_error, index_error};
use crate::events::extract_events;
use crate::matches::PyMatches;
use crate::raw::{self, HashColumn};
use crate::tokens::{feature, hash_error, read_tokens};

/// From about 200 us of work on the interpreter lock is released: bytes of a payload,
const DETACH_PAYLOAD: usize = 32 << 10;
/// bytes of columns,
const DETACH_COLUMNS: usize = 64 << 10;
/// and tokens of a prompt times the sources that are asked.
const DETACH_TOKENS: usize = 32 << 10;

/// Times are kept in tenths of a second, 32 bits of them: 13 years.
const TICKS: f64 = 10.0;

/// See `_core.pyi`.
#[pyclass(name = "PrefixIndex", module = "kvevents._core", frozen, subclass)]
pub struct PyPrefixIndex {
    inner: PrefixIndex,
    /// Life of the blocks of sources that never announce removals, in ticks.
    ttl: u32,
    /// A clock of the caller's own, and the time at which this index (or the one that was dumped) began.
    clock: Option<Py<PyAny>>,
    start: f64,
    began: Instant,
    /// Names of tiers, as answers carry them.
    tiers: Mutex<Arc<Vec<String>>>,
}

/// What is asked besides the tokens.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Unused;

fn ticks(seconds: f64) -> u32 {
    // Saturates; not a number is 0.
    (seconds * TICKS) as u32
}

fn features(mm: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<MmFeature>> {
    let Some(mm) = mm else { return Ok(Vec::new()) };
    let mut out = Vec::new();
    for (i, item) in mm.try_iter()?.enumerate() {
        out.push(feature(&item?, i)?);
    }
    out.sort_by_key(|f| f.offset);
    Ok(out)
}
