//! `EnginePool`: the block pool behind an engine's own pool class; see `_core.pyi`.
//!
//! The engine's calls come with its own objects: its request, and the blocks that it was given here. Each
//! call reads what it needs in place and is one call of the core. What the core cannot do (a block of
//! another pool, a hash of another form, a count below zero) changes nothing, and the whole pool is handed
//! over to the engine's own code, which then does the same call.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use kvevents_core::pool::{BlockPool, Config, KeyForm, Report};
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::engine_block::{PyEngineBlock, Shared, key_bytes};
use crate::engine_calls::{Done, Full, Partial, Why, by_engine, split};
use crate::engine_events::Structs;
use crate::errors::{Exc, pool_error};
use crate::events::PyEventList;
use crate::pool_args::with_scratch;

/// Somebody wants to know of single blocks: a collector of metrics, or who waits for one to be used again.
const HOOKED: u8 = 1;
/// Events go into a list of the engine's at once, since others write into it too.
const SHARED_QUEUE: u8 = 1 << 1;

/// The block pool of an engine; see `_core.pyi`.
#[pyclass(name = "EnginePool", module = "kvevents._core", frozen, subclass)]
pub struct PyEnginePool {
    pub shared: Arc<Shared>,
    blocks: Vec<Py<PyEngineBlock>>,
    structs: Structs,
    /// The engine's own code for extra keys of blocks.
    pub extra_keys: Py<PyAny>,
    /// Tokens over which one hash is made.
    pub step: usize,
    pub events: bool,
    flags: AtomicU8,
}

impl PyEnginePool {
    #[inline]
    fn has(&self, flag: u8) -> bool {
        self.flags.load(Ordering::Relaxed) & flag != 0
    }

    fn set(&self, flag: u8, on: bool) {
        if on {
            self.flags.fetch_or(flag, Ordering::Relaxed);
        } else {
            self.flags.fetch_and(!flag, Ordering::Relaxed);
        }
    }

    fn list<'py>(&self, py: Python<'py>, ids: &[u32]) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, ids.iter().map(|&id| self.blocks[id as usize].bind(py)))
    }

    /// The end of a call that may have made events.
    #[inline]
    fn settle(slf: &Bound<'_, Self>) -> PyResult<()> {
        if slf.get().has(SHARED_QUEUE) { Self::share(slf) } else { Ok(()) }
    }

    #[cold]
    fn share(slf: &Bound<'_, Self>) -> PyResult<()> {
        let events = slf.get().to_events(slf.py())?;
        if !events.is_empty() {
            slf.getattr(intern!(slf.py(), "kv_event_queue"))?.call_method1("extend", (events,))?;
        }
        Ok(())
    }

    /// What a call answers, or the same call by the engine's own code.
    fn done<'py, A, T>(
        slf: &Bound<'py, Self>,
        name: &str,
        args: A,
        result: Done<T>,
    ) -> PyResult<Bound<'py, PyAny>>
    where
        A: IntoPyObject<
                'py,
                Target = pyo3::types::PyTuple,
                Output = Bound<'py, pyo3::types::PyTuple>,
                Error = PyErr,
            >,
        T: IntoPyObject<'py>,
    {
        match result {
            Ok(value) => {
                Self::settle(slf)?;
                value.into_bound_py_any(slf.py())
            }
            Err(why) => by_engine(slf, why, name, args),
        }
    }
}

#[pymethods]
impl PyEnginePool {
    #[new]
    #[pyo3(signature = (num_blocks, block_size, *, enable_caching, enable_kv_cache_events, medium, report,
        narrow, block_class, event_classes, extra_keys))]
    #[allow(clippy::too_many_arguments, clippy::fn_params_excessive_bools)] // settings, by keyword
    fn new(
        py: Python<'_>,
        num_blocks: usize,
        block_size: usize,
        enable_caching: bool,
        enable_kv_cache_events: bool,
        medium: &str,
        report: &str,
        narrow: bool,
        block_class: Py<PyAny>,
        event_classes: (Py<PyAny>, Py<PyAny>, Py<PyAny>),
        extra_keys: Py<PyAny>,
    ) -> PyResult<Self> {
        let size = u32::try_from(block_size).map_err(|_| {
            Exc::ConfigError.err(format!("block_size: 1 to 2^32-1 was expected, saw {block_size}"))
        })?;
        let config = Config {
            enable_caching,
            enable_events: enable_kv_cache_events,
            medium: medium.into(),
            report: if report == "residency" { Report::Residency } else { Report::EveryCopy },
            report_hits: true,
            narrow,
            covered_boundaries: true,
            // The engine's own queue has no bound either; it is taken once a step.
            max_queued_events: usize::MAX,
            ..Config::new(num_blocks, size)
        };
        let mut pool = BlockPool::new(config).map_err(|e| pool_error(&e))?;
        pool.set_group_kind(0, "".into(), None).map_err(|e| pool_error(&e))?;
        let shared = Arc::new(Shared::new(pool, block_class));
        let ids = 0..u32::try_from(num_blocks)?;
        let blocks = ids.map(|id| PyEngineBlock::make(py, id, &shared)).collect::<PyResult<_>>()?;
        let (stored, removed, cleared) = event_classes;
        Ok(Self {
            shared,
            blocks,
            structs: Structs::new(stored, removed, cleared),
            extra_keys,
            step: block_size,
            events: enable_caching && enable_kv_cache_events,
            flags: AtomicU8::new(0),
        })
    }

    // ------------------------------------------------------------ the engine's methods

    fn get_new_blocks<'py>(slf: &Bound<'py, Self>, num_blocks: usize) -> PyResult<Bound<'py, PyAny>> {
        if slf.get().has(HOOKED) {
            return slf.call_method1(intern!(slf.py(), "_get_new_blocks_hooked"), (num_blocks,));
        }
        Self::_take_blocks(slf, num_blocks)
    }

    fn get_cached_block<'py>(
        slf: &Bound<'py, Self>,
        block_hash: &Bound<'py, PyAny>,
        kv_cache_group_ids: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, this) = (slf.py(), slf.get());
        let find = |ids: &mut Vec<u32>| -> Done<Option<Bound<'py, PyList>>> {
            let hash = block_hash.cast::<PyBytes>()?.as_bytes();
            let form = KeyForm::bytes(hash.len())?;
            for group in kv_cache_group_ids.try_iter()? {
                let group: usize = group?.extract()?;
                // There is no group for which nothing was stored yet.
                match this.shared.lock().cached_block(form, hash, group).unwrap_or(None) {
                    Some(id) => ids.push(id),
                    None => return Ok(None),
                }
            }
            Ok(Some(this.list(py, ids)?))
        };
        match with_scratch(|scratch| find(&mut scratch.blocks)) {
            Ok(found) => found.into_bound_py_any(py),
            Err(why) => by_engine(slf, why, "get_cached_block", (block_hash, kv_cache_group_ids)),
        }
    }

    #[pyo3(signature = (request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id,
        block_mask = None))]
    #[allow(clippy::too_many_arguments)] // vLLM's
    fn cache_full_blocks<'py>(
        slf: &Bound<'py, Self>,
        request: &Bound<'py, PyAny>,
        blocks: &Bound<'py, PyAny>,
        num_cached_blocks: usize,
        num_full_blocks: usize,
        block_size: usize,
        kv_cache_group_id: usize,
        block_mask: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (cached, full, size, group) = (num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id);
        if cached >= full {
            return Ok(slf.py().None().into_bound(slf.py()));
        }
        let call = Full { request, blocks, cached, until: full, size, group, mask: block_mask };
        let done = slf.get().full(&call);
        Self::done(
            slf,
            "cache_full_blocks",
            (request, blocks, cached, full, size, group, block_mask),
            done.map(|()| None::<bool>),
        )
    }

    #[pyo3(signature = (request, block, num_tokens, kv_cache_group_id, block_size,
        replace_existing_hashes = false))]
    #[allow(clippy::too_many_arguments)] // vLLM's
    fn cache_partial_block<'py>(
        slf: &Bound<'py, Self>,
        request: &Bound<'py, PyAny>,
        block: &Bound<'py, PyAny>,
        num_tokens: usize,
        kv_cache_group_id: usize,
        block_size: usize,
        replace_existing_hashes: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (group, size, replace) = (kv_cache_group_id, block_size, replace_existing_hashes);
        let done = slf.get().partial(&Partial { request, block, num_tokens, group, size, replace });
        let key = done.map(|key| key.map(|key| PyBytes::new(slf.py(), &key)));
        Self::done(slf, "cache_partial_block", (request, block, num_tokens, group, size, replace), key)
    }

    fn emit_cached_block_events<'py>(
        slf: &Bound<'py, Self>,
        request: &Bound<'py, PyAny>,
        num_cached_blocks: usize,
        block_size: usize,
        kv_cache_group_id: usize,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (n, size, group) = (num_cached_blocks, block_size, kv_cache_group_id);
        let this = slf.get();
        let done = if n == 0 || !this.events { Ok(()) } else { this.hits(request, n, size, group) };
        Self::done(slf, "emit_cached_block_events", (request, n, size, group), done.map(|()| None::<bool>))
    }

    fn move_block_hashes<'py>(
        slf: &Bound<'py, Self>,
        src_block: &Bound<'py, PyAny>,
        dst_block: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let this = slf.get();
        let done = || -> Done<Option<bool>> {
            let (src, dst) = (this.id(src_block)?, this.id(dst_block)?);
            this.shared.lock().move_block_hashes(src, dst)?;
            Ok(None)
        };
        Self::done(slf, "move_block_hashes", (src_block, dst_block), done())
    }

    fn touch<'py>(slf: &Bound<'py, Self>, blocks: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        if slf.get().has(HOOKED) {
            return slf.call_method1(intern!(slf.py(), "_touch_hooked"), (blocks,));
        }
        Self::_touch(slf, blocks)
    }

    fn free_blocks<'py>(
        slf: &Bound<'py, Self>,
        ordered_blocks: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, this) = (slf.py(), slf.get());
        // An iterator is read once, also where the engine's own code has to do it.
        let blocks = match ordered_blocks.cast::<PyList>() {
            Ok(list) => list.clone(),
            Err(_) => PyList::new(py, ordered_blocks.try_iter()?.collect::<PyResult<Vec<_>>>()?)?,
        };
        let done = with_scratch(|scratch| -> Done<Option<bool>> {
            this.ids(blocks.as_any(), scratch)?;
            this.shared.lock().free_blocks(&scratch.blocks)?;
            Ok(None)
        });
        match done {
            Ok(nothing) => nothing.into_bound_py_any(py),
            Err(why) => slf.call_method1(intern!(py, "_free_mixed"), (blocks, why.0)),
        }
    }

    fn evict_blocks<'py>(
        slf: &Bound<'py, Self>,
        block_ids: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, this) = (slf.py(), slf.get());
        if this.has(HOOKED) {
            return slf.call_method1(intern!(py, "_evict_blocks_hooked"), (block_ids,));
        }
        let done = || -> Done<Option<bool>> {
            let ids = block_ids.try_iter()?.map(|id| id?.extract()).collect::<PyResult<Vec<u32>>>()?;
            this.shared.lock().evict_blocks(&ids)?;
            Ok(None)
        };
        Self::done(slf, "evict_blocks", (block_ids,), done())
    }

    fn is_block_writable<'py>(
        slf: &Bound<'py, Self>,
        block: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let this = slf.get();
        let done = || -> Done<bool> { Ok(this.shared.lock().is_writable(this.id(block)?)?) };
        Self::done(slf, "is_block_writable", (block,), done())
    }

    fn get_num_free_blocks(&self) -> usize {
        self.shared.lock().num_free_blocks()
    }

    fn get_usage(&self) -> f64 {
        self.shared.lock().usage()
    }

    fn _insert_block_hash<'py>(
        slf: &Bound<'py, Self>,
        block_hash_with_group_id: &Bound<'py, PyAny>,
        block: &Bound<'py, PyAny>,
        num_tokens: Option<u32>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let this = slf.get();
        let done = || -> Done<Option<bool>> {
            let (form, hash, group) = split(block_hash_with_group_id.cast::<PyBytes>()?.as_bytes())?;
            let id = this.id(block)?;
            let mut pool = this.shared.lock();
            if pool.group(usize::from(group)).is_err() {
                pool.ensure_group(usize::from(group), this.step)?;
            }
            pool.insert_hash(id, form, hash, usize::from(group), num_tokens.unwrap_or_default())?;
            Ok(None)
        };
        let args = (block_hash_with_group_id, block, num_tokens);
        Self::done(slf, "_insert_block_hash", args, done())
    }

    fn _maybe_evict_cached_block<'py>(
        slf: &Bound<'py, Self>,
        block: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let this = slf.get();
        let done = || -> Done<bool> { Ok(this.shared.lock().evict_block(this.id(block)?)?) };
        Self::done(slf, "_maybe_evict_cached_block", (block,), done())
    }

    // ------------------------------------------------------------ what the engine's class is made of

    fn _bind(&self, py: Python<'_>, owner: Py<PyAny>) {
        self.shared.bind(py, owner);
    }

    fn _set_hooked(&self, on: bool) {
        self.set(HOOKED, on);
    }

    fn _set_shared_queue(&self, on: bool) {
        self.set(SHARED_QUEUE, on);
    }

    fn _set_group(&self, group: usize, kind: &str, sliding_window: Option<u32>) -> PyResult<()> {
        let mut pool = self.shared.lock();
        pool.set_group_kind(group, kind.into(), sliding_window).map_err(|e| pool_error(&e))
    }

    fn _take_blocks<'py>(slf: &Bound<'py, Self>, num_blocks: usize) -> PyResult<Bound<'py, PyAny>> {
        let (py, this) = (slf.py(), slf.get());
        let blocks = with_scratch(|scratch| {
            let mut pool = this.shared.lock();
            let got = pool.get_new_blocks(num_blocks, &mut scratch.blocks);
            drop(pool);
            match got {
                Ok(()) => this.list(py, &scratch.blocks),
                // The engine's own words: it is its error to handle.
                Err(_) => {
                    Err(PyValueError::new_err(format!("Cannot get {num_blocks} free blocks from the pool")))
                }
            }
        })?;
        Self::settle(slf)?;
        Ok(blocks.into_any())
    }

    fn _touch<'py>(slf: &Bound<'py, Self>, blocks: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let this = slf.get();
        let done = with_scratch(|scratch| -> Done<Option<bool>> {
            this.ids(blocks, scratch)?;
            this.shared.lock().touch(&scratch.blocks)?;
            Ok(None)
        });
        Self::done(slf, "touch", (blocks,), done)
    }

    fn _unpin<'py>(
        slf: &Bound<'py, Self>,
        blocks: &Bound<'py, PyAny>,
        on_reuse: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let this = slf.get();
        let done = with_scratch(|scratch| -> Done<Option<bool>> {
            this.ids(blocks, scratch)?;
            let mut pool = this.shared.lock();
            pool.unpin_blocks(&scratch.blocks)?;
            // Who waits stands in the engine's class.
            pool.take_reused();
            Ok(None)
        });
        Self::done(slf, "unpin_blocks", (blocks, on_reuse), done)
    }

    fn _reset(slf: &Bound<'_, Self>) -> PyResult<bool> {
        let mut pool = slf.get().shared.lock();
        let done = pool.reset_prefix_cache();
        pool.take_reused();
        drop(pool);
        Self::settle(slf)?;
        Ok(done)
    }

    fn _take_columns(&self) -> PyEventList {
        self.shared.lock().take_events().into()
    }

    fn to_events<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let events = self.shared.lock().take_events();
        self.structs.of(py, &events)
    }

    fn to_blocks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.blocks.iter().map(|b| b.bind(py)))
    }

    fn to_free_blocks<'py>(&self, py: Python<'py>, at_most: usize) -> PyResult<Bound<'py, PyList>> {
        let pool = self.shared.lock();
        let ids = std::iter::successors(pool.next_free(None), |&id| pool.next_free(Some(id)));
        let ids: Vec<u32> = ids.take(at_most).collect();
        drop(pool);
        self.list(py, &ids)
    }

    fn _next_free(
        &self,
        py: Python<'_>,
        after: Option<&Bound<'_, PyEngineBlock>>,
    ) -> Option<Py<PyEngineBlock>> {
        let next = self.shared.lock().next_free(after.map(|b| b.get().id()));
        next.map(|id| self.blocks[id as usize].clone_ref(py))
    }

    fn _num_keys(&self) -> usize {
        self.shared.lock().stats().resident_hashes
    }

    fn to_keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let keys: Vec<Vec<u8>> = self.shared.lock().resident_keys().map(key_bytes).collect();
        PyList::new(py, keys.iter().map(|key| PyBytes::new(py, key)))
    }

    fn to_keys_of<'py>(
        &self,
        py: Python<'py>,
        block: usize,
    ) -> PyResult<Vec<(Bound<'py, PyBytes>, Option<u32>)>> {
        let held: Vec<(Vec<u8>, u32)> = {
            let pool = self.shared.lock();
            pool.held(u32::try_from(block)?).map(|h| (key_bytes(h), h.num_tokens)).collect()
        };
        let tokens = |n: u32| (n > 0).then_some(n);
        Ok(held.into_iter().map(|(key, n)| (PyBytes::new(py, &key), tokens(n))).collect())
    }

    fn to_copies<'py>(&self, py: Python<'py>, key: &Bound<'_, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let ids: Vec<u32> = match key.cast::<PyBytes>().map_err(Why::from).and_then(|k| split(k.as_bytes())) {
            Ok((form, hash, group)) => self.shared.lock().copies_of(form, hash, group).collect(),
            Err(_) => Vec::new(),
        };
        self.list(py, &ids)
    }

    fn _adopt(&self, py: Python<'_>, own: &Bound<'_, PyList>) {
        for (block, own) in self.blocks.iter().zip(own.iter()) {
            block.get().adopt(py, own.unbind());
        }
    }
}
