//! Payloads to `EventList` and back.
//!
//! A payload is `bytes`, which nobody can change while the interpreter lock is released; any other buffer
//! is copied by the caller first. The lock is released only where the work is longer than the wait to
//! get it back may be.

use std::cell::Cell;

use kvevents_core::codec::{self, Decoded, Dialect, EncodeOptions, Encoder, Loss, Timestamp};
use kvevents_core::error::EncodeError;
use kvevents_core::events::EventList;
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyFloat, PyInt};

use crate::errors::{Exc, decode_error, encode_error};
use crate::event_reader::extract_events;
use crate::events::PyEventList;

/// From this size on (about 200 us of work) the interpreter lock is released.
const DETACH_DECODE: usize = 256 * 1024;
/// The same for columns that are encoded, in bytes.
const DETACH_ENCODE: usize = 512 * 1024;
/// Memory that a thread keeps for its next payload.
const KEEP: usize = 4 << 20;

thread_local! {
    static ENCODER: Cell<Encoder> = Cell::new(Encoder::new());
}

fn ts_to_py(py: Python<'_>, ts: Timestamp) -> PyResult<Bound<'_, PyAny>> {
    match ts {
        Timestamp::Float(v) => v.into_bound_py_any(py),
        Timestamp::Int(v) => v.into_bound_py_any(py),
        Timestamp::Uint(v) => v.into_bound_py_any(py),
    }
}

pub(crate) fn ts_from_py(ts: &Bound<'_, PyAny>) -> PyResult<Timestamp> {
    if let Ok(v) = ts.cast::<PyFloat>() {
        return Ok(Timestamp::Float(v.value()));
    }
    if ts.is_instance_of::<PyInt>() {
        if let Ok(v) = ts.extract::<i64>() {
            return Ok(Timestamp::Int(v));
        }
        if let Ok(v) = ts.extract::<u64>() {
            return Ok(Timestamp::Uint(v));
        }
    } else if let Ok(v) = ts.extract::<f64>() {
        // numpy's floats and whatever else can say itself as one.
        return Ok(Timestamp::Float(v));
    }
    Err(Exc::EventTypeError
        .err(format!("ts: a float or an integer of 64 bits was expected, saw {}", crate::raw::preview(ts))))
}

pub(crate) fn dialect(name: &str) -> PyResult<Dialect> {
    Dialect::from_name(name).ok_or_else(|| {
        let known: Vec<&str> = Dialect::ALL.iter().map(|d| d.name()).collect();
        Exc::ConfigError.err(format!("dialect {name:?} is not known; known are {}", known.join(", ")))
    })
}

/// `(ts, rank, events)` of a payload.
#[pyfunction]
#[pyo3(signature = (payload, strict = false))]
pub fn decode_batch<'py>(
    py: Python<'py>,
    payload: &Bound<'py, PyBytes>,
    strict: bool,
) -> PyResult<(Bound<'py, PyAny>, Option<i64>, PyEventList)> {
    let bytes = payload.as_bytes();
    let decoded = if bytes.len() < DETACH_DECODE {
        codec::decode(bytes, strict)
    } else {
        py.detach(|| codec::decode(bytes, strict))
    };
    let Decoded { ts, rank, events } = decoded.map_err(|e| decode_error(py, &e))?;
    Ok((ts_to_py(py, ts)?, rank, events.into()))
}

/// Runs `work` with this thread's encoder. It is taken out meanwhile, so whatever Python may run in
/// between can encode too.
pub(crate) fn with_encoder<R>(work: impl FnOnce(&mut Encoder) -> R) -> R {
    let mut encoder = ENCODER.take();
    let result = work(&mut encoder);
    if encoder.capacity() <= KEEP {
        ENCODER.set(encoder);
    }
    result
}

struct Job {
    events: EventList,
    ts: Timestamp,
    rank: Option<i64>,
    dialect: Dialect,
    options: EncodeOptions,
    detach: bool,
}

impl Job {
    fn encode(&self, encoder: &mut Encoder) -> Result<(), EncodeError> {
        encoder.encode(&self.events, self.ts, self.rank, self.dialect, self.options).map(|_| ())
    }

    fn encode_reporting(&self, encoder: &mut Encoder) -> Vec<Loss> {
        encoder.encode_reporting(&self.events, self.ts, self.rank, self.dialect, self.options).1
    }

    /// What `work` made of the job, and the payload.
    fn run<'py, R: Send>(
        &self,
        py: Python<'py>,
        work: impl Fn(&Self, &mut Encoder) -> R + Sync,
    ) -> (R, Bound<'py, PyBytes>) {
        with_encoder(|encoder| {
            let result = if self.detach { py.detach(|| work(self, encoder)) } else { work(self, encoder) };
            (result, PyBytes::new(py, encoder.payload()))
        })
    }
}

#[allow(clippy::too_many_arguments)]
fn job(
    events: &Bound<'_, PyAny>,
    ts: &Bound<'_, PyAny>,
    rank: Option<i64>,
    dialect: &str,
    lossy: bool,
    metadata: bool,
    detach: Option<bool>,
) -> PyResult<Job> {
    let events = extract_events(events)?;
    let detach = detach.unwrap_or_else(|| events.nbytes() >= DETACH_ENCODE);
    let options = EncodeOptions { lossy, metadata };
    Ok(Job { events, ts: ts_from_py(ts)?, rank, dialect: self::dialect(dialect)?, options, detach })
}

/// The bytes of one batch.
#[pyfunction]
#[pyo3(signature = (events, ts, rank, dialect, *, lossy = false, metadata = false, detach = None))]
#[allow(clippy::too_many_arguments)]
pub fn encode_batch<'py>(
    py: Python<'py>,
    events: &Bound<'py, PyAny>,
    ts: &Bound<'py, PyAny>,
    rank: Option<i64>,
    dialect: &str,
    lossy: bool,
    metadata: bool,
    detach: Option<bool>,
) -> PyResult<Bound<'py, PyBytes>> {
    let job = job(events, ts, rank, dialect, lossy, metadata, detach)?;
    let (result, payload) = job.run(py, Job::encode);
    result.map(|()| payload).map_err(|e| encode_error(py, &e))
}

/// The bytes of every event that can be written, and `(index, field, reason)` of the others.
#[pyfunction]
#[pyo3(signature = (events, ts, rank, dialect, *, lossy = false, metadata = false, detach = None))]
#[allow(clippy::too_many_arguments, clippy::type_complexity)]
pub fn encode_batch_reporting<'py>(
    py: Python<'py>,
    events: &Bound<'py, PyAny>,
    ts: &Bound<'py, PyAny>,
    rank: Option<i64>,
    dialect: &str,
    lossy: bool,
    metadata: bool,
    detach: Option<bool>,
) -> PyResult<(Bound<'py, PyBytes>, Vec<(usize, &'static str, &'static str)>)> {
    let job = job(events, ts, rank, dialect, lossy, metadata, detach)?;
    let (losses, payload) = job.run(py, Job::encode_reporting);
    Ok((payload, losses.into_iter().map(|l| (l.index, l.field, l.reason)).collect()))
}

/// The names that `encode_batch` knows.
#[pyfunction]
pub fn dialects() -> Vec<&'static str> {
    Dialect::ALL.iter().map(|d| d.name()).collect()
}
