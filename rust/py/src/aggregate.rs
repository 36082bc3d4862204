//! `Aggregator`: what enough workers hold.

use std::sync::{Arc, Mutex, PoisonError};

use kvevents_core::aggregate::{Aggregator, Limits, Notice, Rule, Rules};
use kvevents_core::events::{EventList, Scope};
use kvevents_core::hash::HashRef;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyInt, PyList, PyString, PyTuple};

use crate::errors::{Exc, aggregate_error, events_error};
use crate::events::{PyEventList, hash_to_py};
use crate::raw::{self, OwnedHash};

/// See `_core.pyi`.
#[pyclass(name = "Aggregator", module = "kvevents._core", frozen)]
pub struct PyAggregator {
    inner: Mutex<Aggregator>,
    /// What a step that changes nothing gives back.
    nothing: Py<PyEventList>,
}

fn bad_rule(rule: &Bound<'_, PyAny>) -> PyErr {
    Exc::AggregatorTypeError.err(format!(
        "rule: 'all', 'any', a number of workers, or Quorum([(workers, k), ...]) was expected, saw {}",
        raw::preview(rule)
    ))
}

fn bad_value(rule: &Bound<'_, PyAny>) -> PyErr {
    Exc::AggregatorError.err(format!("rule: numbers of workers are 1 to 1024, saw {}", raw::preview(rule)))
}

fn number(value: &Bound<'_, PyAny>) -> Option<PyResult<u32>> {
    if value.is_instance_of::<PyBool>() || !value.is_instance_of::<PyInt>() {
        return None;
    }
    Some(value.extract().map_err(|_| bad_value(value)))
}

fn read_rule(rule: &Bound<'_, PyAny>) -> PyResult<Rule> {
    if let Ok(name) = rule.cast::<PyString>() {
        return match &*name.to_cow()? {
            "all" => Ok(Rule::All),
            "any" => Ok(Rule::Any),
            _ => Err(Exc::AggregatorError.err(format!(
                "rule: {name:?} is not known; use 'all', 'any', a number of workers, or Quorum([...])"
            ))),
        };
    }
    if let Some(k) = number(rule) {
        return k.map(Rule::KOf);
    }
    let parts = rule.cast::<PyTuple>().map_err(|_| bad_rule(rule))?;
    let mut quorum = Vec::new();
    for part in parts {
        let (workers, k): (Bound<'_, PyAny>, Bound<'_, PyAny>) =
            part.extract().map_err(|_| bad_rule(rule))?;
        let k = number(&k).ok_or_else(|| bad_rule(rule))??;
        let mut members = Vec::new();
        for w in workers.try_iter()? {
            members.push(number(&w?).ok_or_else(|| bad_rule(rule))??);
        }
        quorum.push((members, k));
    }
    Ok(Rule::Quorum(quorum))
}

fn read_rules(rule: Option<&Bound<'_, PyAny>>, groups: &Bound<'_, PyTuple>) -> PyResult<Rules> {
    let default = rule.map(read_rule).transpose()?.unwrap_or_default();
    let mut rules = Rules { default, groups: Vec::new() };
    for item in groups {
        let (group, rule): (Option<i64>, Bound<'_, PyAny>) = item.extract()?;
        rules.groups.push((group, read_rule(&rule)?));
    }
    Ok(rules)
}

fn read_count(what: &str, n: i64) -> PyResult<u32> {
    u32::try_from(n).map_err(|_| Exc::AggregatorError.err(format!("{n} {what}: 1 to 1024 can be aggregated")))
}

impl PyAggregator {
    fn with<T>(&self, f: impl FnOnce(&mut Aggregator) -> T) -> T {
        f(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A number that no worker has stays one on its way to the core.
    fn worker(&self, worker: i64) -> PyResult<u32> {
        u32::try_from(worker).map_err(|_| {
            let workers = self.with(|a| a.workers());
            aggregate_error(&kvevents_core::error::AggregateError::Worker { seen: worker, workers })
        })
    }

    fn finish(&self, py: Python<'_>, out: EventList) -> PyResult<Py<PyEventList>> {
        if out.is_empty() { Ok(self.nothing.clone_ref(py)) } else { Py::new(py, PyEventList::from(out)) }
    }
}

#[pymethods]
impl PyAggregator {
    #[new]
    #[pyo3(signature = (num_workers, *, rule = None, group_rules = None, max_waiting = 1_048_576,
                        max_age = 10_000, warn_after = 100, keep_content = false, forget = false))]
    #[allow(clippy::too_many_arguments)] // settings, by keyword
    fn new(
        py: Python<'_>,
        num_workers: i64,
        rule: Option<&Bound<'_, PyAny>>,
        group_rules: Option<&Bound<'_, PyTuple>>,
        max_waiting: usize,
        max_age: u64,
        warn_after: u64,
        keep_content: bool,
        forget: bool,
    ) -> PyResult<Self> {
        let groups = group_rules.cloned().unwrap_or_else(|| PyTuple::empty(py));
        let rules = read_rules(rule, &groups)?;
        let limits = Limits { max_waiting, max_age, warn_after, keep_content, forget };
        let inner = Aggregator::new(read_count("workers", num_workers)?, rules, limits)
            .map_err(|e| aggregate_error(&e))?;
        let nothing = Py::new(py, PyEventList::from(EventList::default()))?;
        Ok(Self { inner: Mutex::new(inner), nothing })
    }

    fn add(&self, worker: i64, events: &PyEventList) -> PyResult<()> {
        let worker = self.worker(worker)?;
        self.with(|a| a.add(worker, &events.inner)).map_err(|e| aggregate_error(&e))
    }

    fn add_all(&self, reports: &Bound<'_, PyList>) -> PyResult<()> {
        let mut lists = Vec::with_capacity(reports.len());
        for (i, report) in reports.iter().enumerate() {
            let (worker, events) = report.extract::<(i64, PyEventList)>().map_err(|_| {
                PyTypeError::new_err(format!(
                    "report {i}: a pair of a worker and an EventList was expected, saw {}",
                    raw::preview(&report)
                ))
            })?;
            lists.push((self.worker(worker)?, events.inner));
        }
        self.with(|a| a.add_all(&lists)).map_err(|e| aggregate_error(&e))
    }

    fn add_tagged(&self, events: &PyEventList) -> PyResult<()> {
        self.with(|a| a.add_tagged(&events.inner)).map_err(|e| aggregate_error(&e))
    }

    fn step(&self, py: Python<'_>, reports: &Bound<'_, PyList>) -> PyResult<Py<PyEventList>> {
        let mut lists = Vec::new();
        for (worker, report) in reports.iter().enumerate() {
            if report.is_none() {
                continue;
            }
            let list = report.cast::<PyEventList>().map_err(|_| {
                PyTypeError::new_err(format!(
                    "report of worker {worker}: an EventList or None was expected, saw {}",
                    raw::preview(&report)
                ))
            })?;
            if !list.get().inner.is_empty() {
                lists.push((worker as u32, list.get().inner.clone()));
            }
        }
        let given = reports.len();
        let out = self.with(|a| {
            if given > a.workers() as usize {
                return Err(aggregate_error(&kvevents_core::error::AggregateError::Worker {
                    seen: i64::try_from(given).unwrap_or(i64::MAX) - 1,
                    workers: a.workers(),
                }));
            }
            if !lists.is_empty() {
                a.add_all(&lists).map_err(|e| aggregate_error(&e))?;
            }
            a.drain().map_err(|e| events_error(&e))
        })?;
        self.finish(py, out)
    }

    fn drain(&self, py: Python<'_>) -> PyResult<Py<PyEventList>> {
        let out = self.with(Aggregator::drain).map_err(|e| events_error(&e))?;
        self.finish(py, out)
    }

    fn snapshot(&self, py: Python<'_>) -> PyResult<Py<PyEventList>> {
        let out = self.with(Aggregator::snapshot).map_err(|e| events_error(&e))?;
        self.finish(py, out)
    }

    fn forget_worker(&self, worker: i64) -> PyResult<()> {
        let worker = self.worker(worker)?;
        self.with(|a| a.forget_worker(worker)).map_err(|e| aggregate_error(&e))
    }

    #[pyo3(signature = (num_workers, *, rule = None, group_rules = None))]
    fn resize(
        &self,
        py: Python<'_>,
        num_workers: i64,
        rule: Option<&Bound<'_, PyAny>>,
        group_rules: Option<&Bound<'_, PyTuple>>,
    ) -> PyResult<()> {
        let workers = read_count("workers", num_workers)?;
        let groups = group_rules.cloned().unwrap_or_else(|| PyTuple::empty(py));
        let given = (rule.is_some() || group_rules.is_some()).then(|| read_rules(rule, &groups));
        let given = given.transpose()?;
        self.with(|a| {
            let rules = given.map(|mut r| {
                // What was not given stays.
                if rule.is_none() {
                    r.default = a.rules().default.clone();
                }
                if group_rules.is_none() {
                    r.groups.clone_from(&a.rules().groups);
                }
                r
            });
            a.resize(workers, rules)
        })
        .map_err(|e| aggregate_error(&e))
    }

    fn held(&self, worker: i64) -> PyResult<u64> {
        let index = self.worker(worker)?;
        let (held, workers) = self.with(|a| (a.held(index), a.workers()));
        held.ok_or_else(|| {
            aggregate_error(&kvevents_core::error::AggregateError::Worker { seen: worker, workers })
        })
    }

    #[pyo3(signature = (block_hash, medium, *, group_idx = None, locality = None, ownership = None))]
    fn holders<'py>(
        &self,
        py: Python<'py>,
        block_hash: &Bound<'py, PyAny>,
        medium: Option<&str>,
        group_idx: Option<i64>,
        locality: Option<&str>,
        ownership: Option<&str>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let hash = raw::read_hash(block_hash).map_err(|what| Exc::EventTypeError.err(what))?;
        let hash = match &hash {
            OwnedHash::Uint(v) => HashRef::Uint(*v),
            OwnedHash::Int(v) => HashRef::Int(*v),
            OwnedHash::Bytes(b) => HashRef::Bytes(b),
        };
        let scope = Scope {
            medium: medium.map(Arc::from),
            group_idx,
            locality: locality.map(Arc::from),
            ownership: ownership.map(Arc::from),
        };
        PyTuple::new(py, self.with(|a| a.holders(hash, &scope)))
    }

    fn __len__(&self) -> usize {
        self.with(|a| a.resident())
    }

    #[getter]
    fn num_workers(&self) -> u32 {
        self.with(|a| a.workers())
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.with(|a| a.nbytes())
    }

    #[getter]
    fn has_notices(&self) -> bool {
        self.with(|a| a.has_notices())
    }

    fn take_notices<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let out = PyList::empty(py);
        for notice in self.with(Aggregator::take_notices) {
            match notice {
                Notice::Disagreement { worker, field, hash } => {
                    out.append((field, worker, hash_to_py(py, hash.as_ref())?))?;
                }
                Notice::NothingAgrees { steps, waiting } => out.append(("nothing_agrees", steps, waiting))?,
            }
        }
        Ok(out)
    }

    fn to_stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let s = self.with(|a| a.stats());
        let d = PyDict::new(py);
        d.set_item("workers", s.workers)?;
        d.set_item("steps", s.steps)?;
        d.set_item("resident", s.resident)?;
        d.set_item("waiting", s.waiting)?;
        d.set_item("oldest_waiting_steps", s.oldest_waiting_steps)?;
        d.set_item("waiting_for", PyTuple::new(py, &s.waiting_for)?)?;
        d.set_item("held", PyTuple::new(py, &s.held)?)?;
        d.set_item("votes", s.votes)?;
        d.set_item("duplicates", s.duplicates)?;
        d.set_item("unknown_removals", s.unknown_removals)?;
        d.set_item("dropped_by_count", s.dropped_by_count)?;
        d.set_item("dropped_by_age", s.dropped_by_age)?;
        d.set_item("disagreeing_tokens", s.disagreeing_tokens)?;
        d.set_item("disagreeing_parents", s.disagreeing_parents)?;
        d.set_item("without_content", s.without_content)?;
        d.set_item("steps_without_agreement", s.steps_without_agreement)?;
        d.set_item("nbytes", s.nbytes)?;
        Ok(d)
    }
}
