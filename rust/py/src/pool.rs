//! `BlockPool`; see `_core.pyi`.
//!
//! Arguments are read before the pool is locked (an `__index__` may run any code, the pool's own methods
//! included), into buffers that are kept for the next call.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvevents_core::error::PoolError;
use kvevents_core::pool::{BlockPool, Config, ExtraKeySource, Group, KeyForm, Report, Request};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::errors::{Exc, pool_error};
use crate::events::{PyEventList, hash_to_py};
use crate::ids::PyBlockIds;
use crate::pool_args::{
    Count, Lists, Needed, Scratch, argument, column, read_blocks, read_entries, with_scratch,
};
use crate::raw::{self, OwnedHash};
use crate::tokens::PyTokenBlocks;

struct State {
    pool: BlockPool,
    watchers: BTreeMap<u32, Py<PyAny>>,
}

/// The block pool; see `_core.pyi`.
#[pyclass(name = "BlockPool", module = "kvevents._core", frozen, subclass)]
pub struct PyBlockPool {
    inner: Mutex<State>,
    /// Tokens over which one hash is made, and of a block of each group.
    block_size: usize,
    sizes: Box<[usize]>,
    events: bool,
}

/// Counters of a pool; see `_core.pyi`.
#[pyclass(name = "PoolStats", module = "kvevents._core", frozen, get_all, eq)]
#[derive(PartialEq, Eq)]
pub struct PyPoolStats {
    num_blocks: usize,
    free_blocks: usize,
    resident_hashes: usize,
    copies: usize,
    allocated_blocks: u64,
    evicted_blocks: u64,
    stored_hashes: u64,
    removed_hashes: u64,
    resets: u64,
    queued_events: usize,
    resyncs: u64,
    dropped_events: u64,
}

#[pymethods]
impl PyPoolStats {
    fn __repr__(&self) -> String {
        format!(
            "PoolStats(num_blocks={}, free_blocks={}, resident_hashes={}, copies={}, allocated_blocks={}, \
             evicted_blocks={}, stored_hashes={}, removed_hashes={}, resets={}, queued_events={}, \
             resyncs={}, dropped_events={})",
            self.num_blocks,
            self.free_blocks,
            self.resident_hashes,
            self.copies,
            self.allocated_blocks,
            self.evicted_blocks,
            self.stored_hashes,
            self.removed_hashes,
            self.resets,
            self.queued_events,
            self.resyncs,
            self.dropped_events
        )
    }
}

fn read_groups(groups: &Bound<'_, PyAny>) -> PyResult<Vec<Group>> {
    let mut out = Vec::new();
    for (i, group) in groups.try_iter()?.enumerate() {
        let group = group?;
        let bad = |_| {
            Exc::ConfigError
                .err(format!("groups[{i}]: a KVCacheGroup was expected, saw {}", raw::preview(&group)))
        };
        let kind: String = group.getattr("kind").and_then(|v| v.extract()).map_err(bad)?;
        out.push(Group {
            block_size: group.getattr("block_size").and_then(|v| v.extract()).map_err(bad)?,
            kind: kind.into(),
            sliding_window: group.getattr("sliding_window").and_then(|v| v.extract()).map_err(bad)?,
        });
    }
    Ok(out)
}

impl PyBlockPool {
    /// Held for one call of the core. A panic elsewhere leaves the pool as that call left it.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn size(&self, group: usize) -> PyResult<usize> {
        let groups = self.sizes.len();
        self.sizes.get(group).copied().ok_or_else(|| pool_error(&PoolError::Group { group, groups }))
    }

    /// Runs `f` with the pool and the request, which is a handle or lists.
    #[inline]
    fn with_request<T>(
        &self,
        request: Option<&Bound<'_, PyAny>>,
        lists: &Lists<'_, '_>,
        scratch: &mut Scratch,
        needed: impl FnOnce() -> Needed,
        f: impl FnOnce(&mut BlockPool, &Request<'_>, &[u32]) -> Result<T, PoolError>,
    ) -> PyResult<T> {
        if let Some(request) = request {
            let handle = request.cast::<PyTokenBlocks>().map_err(|_| {
                Exc::BlockTypeError.err(format!(
                    "request: a TokenBlocks was expected (or None, with block_hashes= and token_ids=), saw {}",
                    raw::preview(request)
                ))
            })?;
            if lists.any() {
                return Err(Exc::BlockTypeError.err(
                    "request: a TokenBlocks carries its own hashes, tokens and keys; give either it or lists",
                ));
            }
            let mut state = self.lock();
            let tokens = handle.get().lock();
            if tokens.block_size() != self.block_size {
                let (seen, expected) = (tokens.block_size(), self.block_size);
                return Err(pool_error(&PoolError::BlockSize { seen, expected }));
            }
            let request = Request::of(&tokens, lists.session_id);
            return f(&mut state.pool, &request, &scratch.blocks).map_err(|e| pool_error(&e));
        }
        let needed = needed();
        self.with_lists(lists, scratch, &needed, f)
    }

    fn with_lists<T>(
        &self,
        lists: &Lists<'_, '_>,
        scratch: &mut Scratch,
        needed: &Needed,
        f: impl FnOnce(&mut BlockPool, &Request<'_>, &[u32]) -> Result<T, PoolError>,
    ) -> PyResult<T> {
        let hashes = lists.block_hashes.ok_or_else(|| {
            Exc::BlockTypeError.err("a request is needed, or block_hashes= (and token_ids=) in its place")
        })?;
        let read = raw::read_hashes(hashes, Some(needed.hashes.clone()), 32, &mut scratch.hashes);
        argument("block_hashes", "a hash of the same form as the others", hashes, read)?;
        if let Some(tokens) = lists.token_ids
            && self.events
        {
            let read = raw::read_u32s(tokens, Some(needed.tokens.clone()), &mut scratch.tokens);
            argument("token_ids", "0 to 2^32-1", tokens, read)?;
        }
        let (blocks, size) = &needed.entries;
        let entries = match lists.extra_keys {
            Some(keys) if self.events => read_entries(keys, blocks.clone(), *size)?,
            _ => None,
        };
        let lora_name = lists.lora_name.map(Arc::from);
        // A list that ends before the range has nothing of it: what is missing is counted from its end.
        let first = |range: &Range<usize>, read: usize, list: Option<&Bound<'_, PyAny>>| match (read, list) {
            (0, Some(list)) => list.len().unwrap_or(range.start).min(range.start),
            (0, None) => 0,
            _ => range.start,
        };
        let request = Request {
            hashes: column(&scratch.hashes, first(&needed.hashes, scratch.hashes.len(), Some(hashes)))
                .map_err(|e| pool_error(&e))?,
            tokens: &scratch.tokens,
            first_token: first(&needed.tokens, scratch.tokens.len(), lists.token_ids),
            extra: entries.as_ref().map(|e| e as &dyn ExtraKeySource),
            lora_name: lora_name.as_ref(),
            lora_id: lists.lora_id,
            session_id: lists.session_id,
        };
        f(&mut self.lock().pool, &request, &scratch.blocks).map_err(|e| pool_error(&e))
    }

    /// Tells all who wait for blocks that these were given out (or reset). What one of them raises must
    /// not cost the caller its blocks: it goes to `sys.unraisablehook`.
    fn notify(py: Python<'_>, reused: Vec<(u32, Py<PyAny>)>) {
        for (block, watcher) in reused {
            let watcher = watcher.bind(py);
            if let Err(e) = watcher.call1((block,)) {
                e.write_unraisable(py, Some(watcher));
            }
        }
    }
}

impl State {
    fn reused(&mut self) -> Vec<(u32, Py<PyAny>)> {
        let watchers = &mut self.watchers;
        let reused = self.pool.take_reused();
        reused.into_iter().filter_map(|b| watchers.remove(&b).map(|w| (b, w))).collect()
    }
}

#[pymethods]
impl PyBlockPool {
    #[new]
    #[pyo3(signature = (num_blocks, block_size, *, enable_caching = true, enable_kv_cache_events = true,
        medium = "GPU", report = "residency", report_hits = false, hash_form = "bytes", groups = None,
        max_queued_events = Count(100_000)))]
    #[allow(clippy::too_many_arguments, clippy::fn_params_excessive_bools)] // settings, by keyword
    fn new(
        num_blocks: Count,
        block_size: Count,
        enable_caching: bool,
        enable_kv_cache_events: bool,
        medium: &str,
        report: &str,
        report_hits: bool,
        hash_form: &str,
        groups: Option<&Bound<'_, PyAny>>,
        max_queued_events: Count,
    ) -> PyResult<Self> {
        let unknown = |name: &str, known: &str, seen: &str| {
            Exc::ConfigError.err(format!("{name}: one of {known} was expected, saw {seen:?}"))
        };
        let size = u32::try_from(block_size.0).map_err(|_| {
            Exc::ConfigError.err(format!("block_size: 1 to 2^32-1 was expected, saw {}", block_size.0))
        })?;
        let config = Config {
            enable_caching,
            enable_events: enable_kv_cache_events,
            medium: medium.into(),
            report: match report {
                "residency" => Report::Residency,
                "every_copy" => Report::EveryCopy,
                seen => return Err(unknown("report", "residency, every_copy", seen)),
            },
            report_hits,
            narrow: match hash_form {
                "bytes" => false,
                "int" => true,
                seen => return Err(unknown("hash_form", "bytes, int", seen)),
            },
            groups: groups.map(read_groups).transpose()?.unwrap_or_default(),
            max_queued_events: max_queued_events.0,
            ..Config::new(num_blocks.0, size)
        };
        let pool = BlockPool::new(config).map_err(|e| pool_error(&e))?;
        let sizes = pool.config().groups.iter().map(|g| g.block_size as usize).collect();
        let events = enable_caching && enable_kv_cache_events;
        let state = State { pool, watchers: BTreeMap::new() };
        Ok(Self { inner: Mutex::new(state), block_size: block_size.0, sizes, events })
    }

    fn get_new_blocks<'py>(&self, py: Python<'py>, num_blocks: Count) -> PyResult<Bound<'py, PyBlockIds>> {
        with_scratch(|scratch| {
            let mut state = self.lock();
            state.pool.get_new_blocks(num_blocks.0, &mut scratch.blocks).map_err(|e| pool_error(&e))?;
            let reused = if state.watchers.is_empty() { Vec::new() } else { state.reused() };
            drop(state);
            let ids = PyBlockIds::make(py, &scratch.blocks)?;
            Self::notify(py, reused);
            Ok(ids)
        })
    }

    #[pyo3(signature = (block_hash, kv_cache_group_ids = None))]
    fn get_cached_block<'py>(
        &self,
        py: Python<'py>,
        block_hash: &Bound<'_, PyAny>,
        kv_cache_group_ids: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyBlockIds>>> {
        let hash = raw::read_hash(block_hash)
            .map_err(|what| Exc::BlockTypeError.err(format!("block_hash: {what}")))?;
        let (form, bytes) = match hash {
            OwnedHash::Uint(v) => (KeyForm::Int, v.to_le_bytes().to_vec()),
            OwnedHash::Int(v) => (KeyForm::Int, v.to_le_bytes().to_vec()),
            OwnedHash::Bytes(b) => (KeyForm::bytes(b.len()).map_err(|e| pool_error(&e))?, b),
        };
        let mut groups = Vec::new();
        match kv_cache_group_ids {
            None => groups.push(0),
            Some(ids) => {
                let read = raw::read_u32s(ids, None, &mut groups);
                argument("kv_cache_group_ids", "a group", ids, read)?;
            }
        }
        let mut blocks = Vec::with_capacity(groups.len());
        let state = self.lock();
        for group in groups {
            match state.pool.cached_block(form, &bytes, group as usize).map_err(|e| pool_error(&e))? {
                Some(block) => blocks.push(block),
                None => return Ok(None),
            }
        }
        drop(state);
        PyBlockIds::make(py, &blocks).map(Some)
    }

    #[pyo3(signature = (request, max_blocks = None, group = Count(0)))]
    fn find_longest_cache_hit<'py>(
        &self,
        py: Python<'py>,
        request: &Bound<'_, PyAny>,
        max_blocks: Option<Count>,
        group: Count,
    ) -> PyResult<Bound<'py, PyBlockIds>> {
        let max = max_blocks.map_or(usize::MAX, |n| n.0);
        with_scratch(|scratch| {
            if let Ok(handle) = request.cast::<PyTokenBlocks>() {
                let state = self.lock();
                let tokens = handle.get().lock();
                if tokens.block_size() != self.block_size {
                    let (seen, expected) = (tokens.block_size(), self.block_size);
                    return Err(pool_error(&PoolError::BlockSize { seen, expected }));
                }
                let hashes = Request::of(&tokens, None).hashes;
                state.pool.find_longest_cache_hit(&hashes, max, group.0, &mut scratch.blocks)
            } else {
                let read = raw::read_hashes(request, None, 32, &mut scratch.hashes);
                argument("request", "a hash of the same form as the others", request, read)?;
                let hashes = column(&scratch.hashes, 0).map_err(|e| pool_error(&e))?;
                self.lock().pool.find_longest_cache_hit(&hashes, max, group.0, &mut scratch.blocks)
            }
            .map_err(|e| pool_error(&e))?;
            PyBlockIds::make(py, &scratch.blocks)
        })
    }

    #[pyo3(signature = (request, blocks, num_cached_blocks, num_full_blocks, *, group = Count(0),
        block_hashes = None, token_ids = None, lora_name = None, lora_id = None, extra_keys = None,
        session_id = None))]
    #[allow(clippy::too_many_arguments)] // a request, or its parts by keyword
    fn cache_full_blocks(
        &self,
        request: Option<&Bound<'_, PyAny>>,
        blocks: &Bound<'_, PyAny>,
        num_cached_blocks: Count,
        num_full_blocks: Count,
        group: Count,
        block_hashes: Option<&Bound<'_, PyAny>>,
        token_ids: Option<&Bound<'_, PyAny>>,
        lora_name: Option<&str>,
        lora_id: Option<i64>,
        extra_keys: Option<&Bound<'_, PyAny>>,
        session_id: Option<&str>,
    ) -> PyResult<()> {
        let (cached, full, group) = (num_cached_blocks.0, num_full_blocks.0, group.0);
        let size = self.size(group)?;
        if cached > full {
            return Err(pool_error(&PoolError::Range { cached, full }));
        }
        let lists = Lists { block_hashes, token_ids, lora_name, lora_id, extra_keys, session_id };
        with_scratch(|scratch| {
            read_blocks(blocks, Some(cached..full), &mut scratch.blocks)?;
            if scratch.blocks.len() < full - cached {
                let given = blocks.len()?;
                return Err(pool_error(&PoolError::TooFewBlocks { given, needed: full }));
            }
            let scale = size / self.block_size;
            let needed = || Needed {
                // The parent of the first block stands before it.
                hashes: (cached.saturating_mul(scale)).saturating_sub(1)..full.saturating_mul(scale),
                tokens: cached.saturating_mul(size)..full.saturating_mul(size),
                entries: (cached..full, size),
            };
            self.with_request(request, &lists, scratch, needed, |pool, request, blocks| {
                pool.cache_full_blocks(request, blocks, cached, full, group)
            })
        })
    }

    #[pyo3(signature = (request, block, num_tokens, *, group = Count(0), replace_existing_hashes = false,
        block_hashes = None, token_ids = None, lora_name = None, lora_id = None, extra_keys = None,
        session_id = None))]
    #[allow(clippy::too_many_arguments)] // a request, or its parts by keyword
    fn cache_partial_block<'py>(
        &self,
        py: Python<'py>,
        request: Option<&Bound<'_, PyAny>>,
        block: Count,
        num_tokens: Count,
        group: Count,
        replace_existing_hashes: bool,
        block_hashes: Option<&Bound<'_, PyAny>>,
        token_ids: Option<&Bound<'_, PyAny>>,
        lora_name: Option<&str>,
        lora_id: Option<i64>,
        extra_keys: Option<&Bound<'_, PyAny>>,
        session_id: Option<&str>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let lists = Lists { block_hashes, token_ids, lora_name, lora_id, extra_keys, session_id };
        let (num_tokens, group) = (num_tokens.0, group.0);
        let block = u32::try_from(block.0).unwrap_or(u32::MAX);
        with_scratch(|scratch| {
            let needed = || Needed {
                hashes: 0..num_tokens / self.block_size,
                tokens: 0..num_tokens,
                entries: (0..1, 0),
            };
            self.with_request(request, &lists, scratch, needed, |pool, request, _| {
                let owns =
                    pool.cache_partial_block(request, block, num_tokens, replace_existing_hashes, group)?;
                let last = num_tokens / self.block_size - 1;
                Ok(owns.then(|| hash_to_py(py, request.hashes.form.hash(request.hashes.get(last)))))
            })?
            .transpose()
        })
    }

    fn move_block_hashes(&self, src_block: Count, dst_block: Count) -> PyResult<()> {
        let id = |b: usize| u32::try_from(b).unwrap_or(u32::MAX);
        self.lock().pool.move_block_hashes(id(src_block.0), id(dst_block.0)).map_err(|e| pool_error(&e))
    }

    fn touch(&self, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        with_scratch(|scratch| {
            read_blocks(blocks, None, &mut scratch.blocks)?;
            self.lock().pool.touch(&scratch.blocks).map_err(|e| pool_error(&e))
        })
    }

    fn free_blocks(&self, blocks: &Bound<'_, PyAny>) -> PyResult<()> {
        with_scratch(|scratch| {
            read_blocks(blocks, None, &mut scratch.blocks)?;
            self.lock().pool.free_blocks(&scratch.blocks).map_err(|e| pool_error(&e))
        })
    }

    fn evict_blocks(&self, block_ids: &Bound<'_, PyAny>) -> PyResult<()> {
        with_scratch(|scratch| {
            read_blocks(block_ids, None, &mut scratch.blocks)?;
            self.lock().pool.evict_blocks(&scratch.blocks).map_err(|e| pool_error(&e))
        })
    }

    #[pyo3(signature = (blocks, on_reuse = None))]
    fn unpin_blocks(&self, blocks: &Bound<'_, PyAny>, on_reuse: Option<Bound<'_, PyAny>>) -> PyResult<()> {
        if let Some(f) = on_reuse.as_ref().filter(|f| !f.is_callable()) {
            return Err(Exc::BlockTypeError
                .err(format!("on_reuse: a callable or None was expected, saw {}", raw::preview(f))));
        }
        with_scratch(|scratch| {
            read_blocks(blocks, None, &mut scratch.blocks)?;
            let mut state = self.lock();
            state.pool.unpin_blocks(&scratch.blocks).map_err(|e| pool_error(&e))?;
            let mut replaced = Vec::new();
            for &block in &scratch.blocks {
                replaced.push(match &on_reuse {
                    Some(f) => state.watchers.insert(block, f.clone().unbind()),
                    None => state.watchers.remove(&block),
                });
            }
            // What is dropped may run code; not while the pool is locked.
            drop(state);
            drop(replaced);
            Ok(())
        })
    }

    #[pyo3(signature = (request, num_cached_blocks, *, group = Count(0), block_hashes = None,
        token_ids = None, lora_name = None, lora_id = None, extra_keys = None, session_id = None))]
    #[allow(clippy::too_many_arguments)] // a request, or its parts by keyword
    fn emit_cached_block_events(
        &self,
        request: Option<&Bound<'_, PyAny>>,
        num_cached_blocks: Count,
        group: Count,
        block_hashes: Option<&Bound<'_, PyAny>>,
        token_ids: Option<&Bound<'_, PyAny>>,
        lora_name: Option<&str>,
        lora_id: Option<i64>,
        extra_keys: Option<&Bound<'_, PyAny>>,
        session_id: Option<&str>,
    ) -> PyResult<()> {
        let (n, group) = (num_cached_blocks.0, group.0);
        let size = self.size(group)?;
        let lists = Lists { block_hashes, token_ids, lora_name, lora_id, extra_keys, session_id };
        with_scratch(|scratch| {
            let needed = || Needed {
                hashes: 0..n.saturating_mul(size / self.block_size),
                tokens: 0..n.saturating_mul(size),
                entries: (0..n, size),
            };
            self.with_request(request, &lists, scratch, needed, |pool, request, _| {
                pool.emit_cached_block_events(request, n, group)
            })
        })
    }

    fn reset_prefix_cache(&self, py: Python<'_>) -> bool {
        let mut state = self.lock();
        let done = state.pool.reset_prefix_cache();
        let reused = state.reused();
        drop(state);
        Self::notify(py, reused);
        done
    }

    fn get_num_free_blocks(&self) -> usize {
        self.lock().pool.num_free_blocks()
    }

    fn get_usage(&self) -> f64 {
        self.lock().pool.usage()
    }

    fn take_events(&self) -> PyEventList {
        self.lock().pool.take_events().into()
    }

    fn digest<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.lock().pool.digest())
    }

    fn snapshot(&self) -> PyResult<PyEventList> {
        self.lock().pool.snapshot().map(PyEventList::from).map_err(|e| pool_error(&e))
    }

    fn stats(&self) -> PyPoolStats {
        let s = self.lock().pool.stats();
        PyPoolStats {
            num_blocks: s.num_blocks,
            free_blocks: s.free_blocks,
            resident_hashes: s.resident_hashes,
            copies: s.copies,
            allocated_blocks: s.allocated_blocks,
            evicted_blocks: s.evicted_blocks,
            stored_hashes: s.stored_hashes,
            removed_hashes: s.removed_hashes,
            resets: s.resets,
            queued_events: s.queued_events,
            resyncs: s.resyncs,
            dropped_events: s.dropped_events,
        }
    }

    fn free_order<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBlockIds>> {
        let order = self.lock().pool.free_order();
        PyBlockIds::make(py, &order)
    }

    fn ref_count(&self, block: Count) -> PyResult<u32> {
        let block = u32::try_from(block.0).unwrap_or(u32::MAX);
        self.lock().pool.ref_count(block).map_err(|e| pool_error(&e))
    }

    fn is_block_writable(&self, block: Count) -> PyResult<bool> {
        let block = u32::try_from(block.0).unwrap_or(u32::MAX);
        self.lock().pool.is_writable(block).map_err(|e| pool_error(&e))
    }

    fn block_hash<'py>(&self, py: Python<'py>, block: Count) -> PyResult<Option<Bound<'py, PyAny>>> {
        let block = u32::try_from(block.0).unwrap_or(u32::MAX);
        let state = self.lock();
        let hash = state.pool.block_hash(block).map_err(|e| pool_error(&e))?;
        hash.map(|h| hash_to_py(py, h)).transpose()
    }

    #[getter]
    fn num_blocks(&self) -> usize {
        self.lock().pool.config().num_blocks
    }

    #[getter]
    fn block_size(&self) -> usize {
        self.block_size
    }

    #[getter]
    fn medium<'py>(&self, py: Python<'py>) -> Bound<'py, PyString> {
        PyString::new(py, &self.lock().pool.config().medium)
    }

    #[getter]
    fn report(&self) -> &'static str {
        match self.lock().pool.config().report {
            Report::Residency => "residency",
            Report::EveryCopy => "every_copy",
        }
    }

    #[getter]
    fn enable_caching(&self) -> bool {
        self.lock().pool.config().enable_caching
    }

    #[getter]
    fn enable_kv_cache_events(&self) -> bool {
        self.lock().pool.config().enable_events
    }

    #[classattr]
    const NULL_BLOCK: u32 = 0;

    fn __repr__(&self) -> String {
        let s = self.lock().pool.stats();
        format!(
            "BlockPool({} blocks of {} tokens, {} free, {} hashes)",
            s.num_blocks, self.block_size, s.free_blocks, s.resident_hashes
        )
    }
}
