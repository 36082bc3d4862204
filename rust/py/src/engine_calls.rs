//! The calls of an engine's pool that read the engine's request: hashes, tokens and extra keys.

use std::fmt::Display;

use kvevents_core::pool::KeyForm;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::engine_block::PyEngineBlock;
use crate::engine_pool::PyEnginePool;
use crate::engine_request::{Said, read_hashes, read_rest};
use crate::pool_args::{Scratch, read_entries, with_scratch};
use crate::raw;

/// Why a call has to be done by the engine's own code.
pub struct Why(pub String);

impl<T: Display> From<T> for Why {
    fn from(e: T) -> Self {
        Self(e.to_string())
    }
}

pub type Done<T> = Result<T, Why>;

fn foreign() -> Why {
    Why("a block that is not this pool's".to_owned())
}

/// The pool is handed over, and the call is made again: now to the engine's own code.
#[cold]
pub fn by_engine<'py, A>(
    slf: &Bound<'py, PyEnginePool>,
    why: Why,
    name: &str,
    args: A,
) -> PyResult<Bound<'py, PyAny>>
where
    A: IntoPyObject<'py, Target = PyTuple, Output = Bound<'py, PyTuple>, Error = PyErr>,
{
    slf.call_method1(intern!(slf.py(), "_hand_over"), (why.0,))?;
    slf.as_any().getattr(name)?.call1(args.into_pyobject(slf.py())?)
}

/// A hash and its group out of an engine's key.
pub fn split(key: &[u8]) -> Done<(KeyForm, &[u8], u16)> {
    let Some((hash, group)) = key.split_last_chunk::<4>() else {
        return Err(Why(format!("a key of {} bytes", key.len())));
    };
    Ok((KeyForm::bytes(hash.len())?, hash, u16::try_from(u32::from_be_bytes(*group))?))
}

/// A call about blocks `cached..full` of a request.
pub struct Full<'a, 'py> {
    pub request: &'a Bound<'py, PyAny>,
    pub blocks: &'a Bound<'py, PyAny>,
    pub cached: usize,
    pub until: usize,
    pub size: usize,
    pub group: usize,
    pub mask: Option<&'a Bound<'py, PyAny>>,
}

/// A call about a boundary inside a block.
pub struct Partial<'a, 'py> {
    pub request: &'a Bound<'py, PyAny>,
    pub block: &'a Bound<'py, PyAny>,
    pub num_tokens: usize,
    pub group: usize,
    pub size: usize,
    pub replace: bool,
}

impl PyEnginePool {
    /// The blocks of a list or of any other iterable, as ids.
    pub fn ids(&self, blocks: &Bound<'_, PyAny>, scratch: &mut Scratch) -> Done<()> {
        let given = match blocks.cast::<PyList>() {
            Ok(list) => list.clone(),
            Err(_) => PyList::new(blocks.py(), blocks.try_iter()?.collect::<PyResult<Vec<_>>>()?)?,
        };
        if raw::read_engine_blocks(&given, None, &self.shared, &mut scratch.blocks) {
            Ok(())
        } else {
            Err(foreign())
        }
    }

    pub fn id(&self, block: &Bound<'_, PyAny>) -> Done<u32> {
        match block.cast::<PyEngineBlock>() {
            Ok(b) if b.get().is_of(&self.shared) => Ok(b.get().id()),
            _ => Err(foreign()),
        }
    }

    pub fn full(&self, call: &Full<'_, '_>) -> Done<()> {
        let &Full { request, cached, until: full, size, group, .. } = call;
        let Ok(list) = call.blocks.cast::<PyList>() else { return Err(Why("blocks in no list".to_owned())) };
        with_scratch(|scratch| {
            if !raw::read_engine_blocks(list, Some(cached..full), &self.shared, &mut scratch.blocks) {
                return Err(foreign());
            }
            if scratch.blocks.len() != full - cached {
                return Err(Why(format!("{} blocks where {full} were said", list.len())));
            }
            if let Some(mask) = call.mask {
                let mask = mask.try_iter()?.map(|on| on?.is_truthy()).collect::<PyResult<Vec<_>>>()?;
                if mask.len() != scratch.blocks.len() {
                    return Err(Why(format!("a mask of {} for {} blocks", mask.len(), full - cached)));
                }
                for (id, _) in scratch.blocks.iter_mut().zip(mask).filter(|(_, on)| !on) {
                    *id = 0;
                }
            }
            let scale = size / self.step;
            let hashes = cached.saturating_mul(scale).saturating_sub(1)..full.saturating_mul(scale);
            let tokens = cached.saturating_mul(size)..full.saturating_mul(size);
            let mut said = read_hashes(request, hashes, scratch)?;
            if self.events && read_rest(request, tokens, scratch, &mut said)? {
                let holes = scratch.blocks.iter().map(|&id| id == 0).collect();
                self.add_keys(request, cached, size, holes, &mut said)?;
            }
            let request = said.request(scratch)?;
            let mut pool = self.shared.lock();
            pool.ensure_group(group, size)?;
            Ok(pool.cache_full_blocks(&request, &scratch.blocks, cached, full, group)?)
        })
    }

    /// Extra keys of the blocks from `first` on, by the engine's own code; none for holes.
    fn add_keys(
        &self,
        request: &Bound<'_, PyAny>,
        first: usize,
        size: usize,
        holes: Vec<bool>,
        said: &mut Said,
    ) -> PyResult<()> {
        let n = holes.len();
        let keys = self.extra_keys.bind(request.py()).call1((request, first * size, size, holes))?;
        said.set_entries(read_entries(&keys, 0..n, size)?.map(|e| e.starting_at(first)));
        Ok(())
    }

    /// The key that the block has then; `None` for the null block.
    pub fn partial(&self, call: &Partial<'_, '_>) -> Done<Option<Vec<u8>>> {
        let &Partial { request, num_tokens, group, size, .. } = call;
        let id = self.id(call.block)?;
        if id == 0 {
            return Ok(None);
        }
        with_scratch(|scratch| {
            let needed = num_tokens / self.step;
            let mut said = read_hashes(request, 0..needed, scratch)?;
            if self.events && read_rest(request, 0..num_tokens, scratch, &mut said)? {
                let start = {
                    let request = said.request(scratch)?;
                    let mut pool = self.shared.lock();
                    pool.ensure_group(group, size)?;
                    pool.boundary_start(&request, num_tokens, group)?
                };
                let keys = self.extra_keys.bind(request.py());
                let keys = keys.call1((request, start, num_tokens - start, vec![false]))?;
                said.set_entries(read_entries(&keys, 0..1, 0)?);
            }
            let request = said.request(scratch)?;
            let mut pool = self.shared.lock();
            pool.ensure_group(group, size)?;
            pool.cache_partial_block(&request, id, num_tokens, call.replace, group)?;
            let mut key = request.hashes.get(needed - 1).to_vec();
            key.extend_from_slice(&u32::try_from(group)?.to_be_bytes());
            Ok(Some(key))
        })
    }

    pub fn hits(&self, request: &Bound<'_, PyAny>, n: usize, size: usize, group: usize) -> Done<()> {
        with_scratch(|scratch| {
            let hashes = 0..n.saturating_mul(size / self.step);
            let mut said = read_hashes(request, hashes, scratch)?;
            if read_rest(request, 0..n.saturating_mul(size), scratch, &mut said)? {
                self.add_keys(request, 0, size, vec![false; n], &mut said)?;
            }
            let request = said.request(scratch)?;
            let mut pool = self.shared.lock();
            pool.ensure_group(group, size)?;
            Ok(pool.emit_cached_block_events(&request, n, group)?)
        })
    }
}
