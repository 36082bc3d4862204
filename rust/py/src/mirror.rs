//! The mirror: kept by the sender's thread, asked and walked by the replay server's.

#![allow(clippy::disallowed_types)] // the core has no clock, but how long a lock was waited for is found here

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use kvevents_core::codec::{self, EncodeOptions, Timestamp};
use kvevents_core::events::EventList;
use kvevents_core::publish::{Mirror, SnapshotStep};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::codec::{dialect, ts_from_py, with_encoder};
use crate::event_reader::extract_events;

/// Blocks that are walked over at once while the sender may be waiting (about 0.1 ms).
const CHUNK: usize = 512;

/// The resident set of a publisher's stream; see `_core.pyi`.
#[pyclass(name = "Mirror", module = "kvevents._core", frozen)]
pub struct PyMirror {
    /// Whoever wants `inner` next holds this while waiting for it. Without it the walk, which lets go for
    /// moments only, would get the lock again before a sender that waits is even awake.
    next: Mutex<()>,
    inner: Mutex<Mirror>,
    /// Nanoseconds for which a batch waited at most.
    longest_wait: AtomicU64,
}

impl PyMirror {
    fn lock(&self) -> MutexGuard<'_, Mirror> {
        let _turn = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sender's part of `append_encoded`; without the interpreter lock.
    pub(crate) fn record_batch(&self, seq: u64, events: &EventList, except: &[usize]) {
        // Nobody else is there, almost always.
        if let Ok(mut mirror) = self.inner.try_lock() {
            mirror.record(seq, events, except);
            return;
        }
        let asked = Instant::now();
        let mut mirror = self.lock();
        let waited = u64::try_from(asked.elapsed().as_nanos()).unwrap_or(u64::MAX);
        mirror.record(seq, events, except);
        drop(mirror);
        self.longest_wait.fetch_max(waited, Ordering::Relaxed);
    }
}

#[pymethods]
impl PyMirror {
    #[new]
    #[pyo3(signature = (first = 0, *, keep_tokens = true))]
    fn new(first: u64, keep_tokens: bool) -> Self {
        Self {
            next: Mutex::new(()),
            inner: Mutex::new(Mirror::new(first, keep_tokens)),
            longest_wait: AtomicU64::new(0),
        }
    }

    fn record(&self, py: Python<'_>, seq: u64, events: &Bound<'_, PyAny>) -> PyResult<()> {
        let events = extract_events(events)?;
        py.detach(|| self.record_batch(seq, &events, &[]));
        Ok(())
    }

    /// Reading, too, without the interpreter lock, however small the payload is.
    fn record_payload(&self, py: Python<'_>, seq: u64, payload: &Bound<'_, PyBytes>) -> bool {
        let bytes = payload.as_bytes();
        py.detach(|| match codec::decode(bytes, false) {
            Ok(decoded) if decoded.events.skipped().is_empty() => {
                self.record_batch(seq, &decoded.events, &[]);
                true
            }
            _ => {
                let mut mirror = self.lock();
                mirror.lose();
                mirror.advance(seq);
                false
            }
        })
    }

    fn advance(&self, py: Python<'_>, seq: u64) {
        py.detach(|| self.lock().advance(seq));
    }

    fn lose(&self, py: Python<'_>) {
        py.detach(|| self.lock().lose());
    }

    /// One lock for both, so that they belong together.
    #[pyo3(signature = (seq = None))]
    fn digest<'py>(&self, py: Python<'py>, seq: Option<u64>) -> Option<(u64, Bound<'py, PyBytes>)> {
        let (next, digest) = py.detach(|| {
            let mirror = self.lock();
            let digest = match seq {
                _ if !mirror.is_known() => None,
                None => Some(mirror.digest()),
                Some(seq) => mirror.digest_at(seq),
            };
            (seq.map_or(mirror.resume_seq(), |s| s + 1), digest)
        });
        digest.map(|d| (next, PyBytes::new(py, &d.to_bytes())))
    }

    fn begin_snapshot<'py>(
        &self,
        py: Python<'py>,
        piece_bytes: usize,
    ) -> Option<(u64, Bound<'py, PyBytes>, u64)> {
        let head = py.detach(|| {
            let mut mirror = self.lock();
            let old = mirror.abort_snapshot();
            let head = mirror.begin_snapshot(piece_bytes);
            drop(mirror);
            drop(old);
            head
        });
        head.map(|h| (h.resume_seq, PyBytes::new(py, &h.digest.to_bytes()), h.blocks))
    }

    /// Encoding happens outside the lock.
    fn next_piece<'py>(
        &self,
        py: Python<'py>,
        ts: &Bound<'py, PyAny>,
        rank: Option<i64>,
        dialect: &str,
        max_blocks: usize,
    ) -> PyResult<(Option<Bound<'py, PyBytes>>, bool)> {
        let ts: Timestamp = ts_from_py(ts)?;
        let dialect = self::dialect(dialect)?;
        let options = EncodeOptions { lossy: true, metadata: false };
        let found = py.detach(|| {
            let mut walked = 0;
            loop {
                let step = self.lock().walk_snapshot(CHUNK);
                walked += CHUNK;
                match step {
                    Some(SnapshotStep { piece: None, more: true, .. }) if walked < max_blocks => {}
                    step => break step,
                }
            }
        });
        let Some(SnapshotStep { piece, more, frozen }) = found else { return Ok((None, false)) };
        let payload = with_encoder(|encoder| {
            let payload = py.detach(|| {
                drop(frozen);
                piece.map(|p| encoder.encode_reporting(&p, ts, rank, dialect, options).0)
            });
            payload.map(|p| PyBytes::new(py, p))
        });
        Ok((payload, more))
    }

    fn abort_snapshot(&self, py: Python<'_>) {
        py.detach(|| {
            let old = self.lock().abort_snapshot();
            drop(old);
        });
    }

    fn __len__(&self) -> usize {
        self.lock().len()
    }

    #[getter]
    fn resume_seq(&self) -> u64 {
        self.lock().resume_seq()
    }

    #[getter]
    fn known(&self) -> bool {
        self.lock().is_known()
    }

    #[getter]
    fn longest_wait_ns(&self) -> u64 {
        self.longest_wait.load(Ordering::Relaxed)
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.lock().nbytes()
    }
}
