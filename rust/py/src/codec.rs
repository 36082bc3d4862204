//! Payloads to `EventList` and back.
//!
//! A payload is `bytes`, which nobody can change while the interpreter lock is released; any other buffer
//! is copied by the caller first. The lock is released only where the work is longer than the wait to
//! get it back may be.

use std::cell::RefCell;

use kvevents_core::codec::{self, Decoded, Dialect, EncodeOptions, Encoder, Timestamp};
use kvevents_core::events::EventList;
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyFloat, PyInt};

use crate::errors::{Exc, decode_error, encode_error};
use crate::events::{PyEventList, extract_events};

/// From this size on (about 200 us of work) the interpreter lock is released.
const DETACH_DECODE: usize = 256 * 1024;
/// The same for columns that are encoded, in bytes.
const DETACH_ENCODE: usize = 512 * 1024;
/// Memory that a thread keeps for its next payload.
const KEEP: usize = 4 << 20;

thread_local! {
    static ENCODER: RefCell<Encoder> = RefCell::new(Encoder::new());
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

/// Runs `work` with this thread's encoder.
pub(crate) fn with_encoder<R>(work: impl FnOnce(&mut Encoder) -> R) -> R {
    ENCODER.with_borrow_mut(|encoder| {
        let result = work(encoder);
        if encoder.capacity() > KEEP {
            *encoder = Encoder::new();
        }
        result
    })
}

struct Job {
    events: EventList,
    ts: Timestamp,
    rank: Option<i64>,
    dialect: Dialect,
    options: EncodeOptions,
}

impl Job {
    /// Whether the lock is to be released: told by the caller, else by size.
    fn detach(&self, asked: Option<bool>) -> bool {
        asked.unwrap_or_else(|| self.events.nbytes() >= DETACH_ENCODE)
    }
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
    let job = Job {
        events: extract_events(events)?,
        ts: ts_from_py(ts)?,
        rank,
        dialect: self::dialect(dialect)?,
        options: EncodeOptions { lossy, metadata },
    };
    if job.detach(detach) {
        let payload = py.detach(|| codec::encode(&job.events, job.ts, job.rank, job.dialect, job.options));
        return payload.map(|p| PyBytes::new(py, &p)).map_err(|e| encode_error(py, &e));
    }
    with_encoder(|encoder| {
        encoder
            .encode(&job.events, job.ts, job.rank, job.dialect, job.options)
            .map(|p| PyBytes::new(py, p))
            .map_err(|e| encode_error(py, &e))
    })
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
    let job = Job {
        events: extract_events(events)?,
        ts: ts_from_py(ts)?,
        rank,
        dialect: self::dialect(dialect)?,
        options: EncodeOptions { lossy, metadata },
    };
    let (payload, losses) = if job.detach(detach) {
        let (p, losses) =
            py.detach(|| codec::encode_reporting(&job.events, job.ts, job.rank, job.dialect, job.options));
        (PyBytes::new(py, &p), losses)
    } else {
        with_encoder(|encoder| {
            let (p, losses) =
                encoder.encode_reporting(&job.events, job.ts, job.rank, job.dialect, job.options);
            (PyBytes::new(py, p), losses)
        })
    };
    Ok((payload, losses.into_iter().map(|l| (l.index, l.field, l.reason)).collect()))
}

/// The names that `encode_batch` knows.
#[pyfunction]
pub fn dialects() -> Vec<&'static str> {
    Dialect::ALL.iter().map(|d| d.name()).collect()
}
