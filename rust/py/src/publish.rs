//! The replay log: appended by the sender's thread, read by the replay server's.

use std::sync::{Mutex, MutexGuard, PoisonError};

use kvevents_core::codec::EncodeOptions;
use kvevents_core::error::ReplayLogError;
use kvevents_core::publish::{Payload, ReplayLog};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::codec::{dialect, ts_from_py, with_encoder};
use crate::errors::replay_log_error;
use crate::event_reader::extract_events;
use crate::mirror::PyMirror;

/// Payloads by sequence number; see `_core.pyi`.
#[pyclass(name = "ReplayLog", module = "kvevents._core", frozen)]
pub struct PyReplayLog {
    inner: Mutex<ReplayLog>,
}

fn to_bytes<'py>(py: Python<'py>, payload: Payload<'_>) -> PyResult<Bound<'py, PyBytes>> {
    PyBytes::new_with(py, payload.len(), |out| {
        payload.copy_to(out);
        Ok(())
    })
}

impl PyReplayLog {
    /// Held for a copy at most, and never while the interpreter lock is being waited for.
    fn lock(&self) -> MutexGuard<'_, ReplayLog> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl PyReplayLog {
    #[new]
    fn new(max_batches: usize, max_bytes: usize) -> Self {
        Self { inner: Mutex::new(ReplayLog::new(max_batches, max_bytes)) }
    }

    fn append(&self, seq: u64, payload: &Bound<'_, PyBytes>) -> PyResult<bool> {
        self.lock().append(seq, payload.as_bytes()).map_err(|e| replay_log_error(&e))
    }

    /// Encoding, the copy into the log and the mirror run without the interpreter lock; what is left under it is one
    /// copy into the `bytes` that is sent.
    #[pyo3(signature = (seq, events, ts, rank, dialect, *, lossy = false, mirror = None))]
    #[allow(clippy::too_many_arguments, clippy::type_complexity)]
    fn append_encoded<'py>(
        &self,
        py: Python<'py>,
        seq: u64,
        events: &Bound<'py, PyAny>,
        ts: &Bound<'py, PyAny>,
        rank: Option<i64>,
        dialect: &str,
        lossy: bool,
        mirror: Option<&Bound<'py, PyMirror>>,
    ) -> PyResult<(Bound<'py, PyBytes>, Vec<(usize, &'static str, &'static str)>)> {
        let events = extract_events(events)?;
        let ts = ts_from_py(ts)?;
        let dialect = self::dialect(dialect)?;
        let options = EncodeOptions { lossy, metadata: false };
        let mirror = mirror.map(Bound::get);
        with_encoder(|encoder| {
            let (payload, losses) = py
                .detach(|| {
                    let (payload, losses) = encoder.encode_reporting(&events, ts, rank, dialect, options);
                    self.lock().append(seq, payload)?;
                    if let Some(mirror) = mirror {
                        let lost: Vec<usize> = losses.iter().map(|l| l.index).collect();
                        mirror.record_batch(seq, &events, &lost);
                    }
                    Ok((payload, losses))
                })
                .map_err(|e: ReplayLogError| replay_log_error(&e))?;
            let losses = losses.into_iter().map(|l| (l.index, l.field, l.reason)).collect();
            Ok((PyBytes::new(py, payload), losses))
        })
    }

    fn get<'py>(&self, py: Python<'py>, seq: u64) -> PyResult<Option<Bound<'py, PyBytes>>> {
        self.lock().get(seq).map(|p| to_bytes(py, p)).transpose()
    }

    /// Each batch's number is given as the eight bytes that travel.
    #[pyo3(signature = (start, last, max_batches, max_bytes))]
    fn read<'py>(
        &self,
        py: Python<'py>,
        start: u64,
        last: u64,
        max_batches: usize,
        max_bytes: usize,
    ) -> PyResult<Vec<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)>> {
        let log = self.lock();
        let mut out = Vec::new();
        let mut bytes = 0;
        for (seq, payload) in log.from(start).take(max_batches).take_while(|(seq, _)| *seq <= last) {
            bytes += payload.len();
            if !out.is_empty() && bytes > max_bytes {
                break;
            }
            out.push((PyBytes::new(py, &seq.to_be_bytes()), to_bytes(py, payload)?));
        }
        Ok(out)
    }

    fn __len__(&self) -> usize {
        self.lock().len()
    }

    #[getter]
    fn oldest(&self) -> Option<u64> {
        self.lock().oldest()
    }

    #[getter]
    fn newest(&self) -> Option<u64> {
        self.lock().newest()
    }

    #[getter]
    fn evicted(&self) -> u64 {
        self.lock().evicted()
    }

    #[getter]
    fn payload_bytes(&self) -> usize {
        self.lock().payload_bytes()
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.lock().nbytes()
    }
}
