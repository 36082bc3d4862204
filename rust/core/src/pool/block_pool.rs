//! Allocation, release and eviction.

use std::collections::BTreeSet;

use super::blocks::{Blocks, CACHED, WATCHED};
use super::config::{Config, Group, Report};
use super::emit::Emitter;
use super::keys::Keys;
use super::request::{KeyForm, NIL};
use super::retained::Retained;
use crate::error::PoolError;
use crate::events::EventList;

/// What is there only while events are on.
#[derive(Clone, Debug)]
pub(super) struct Events {
    pub emit: Emitter,
    pub retained: Retained,
    pub every_copy: bool,
}

/// What a pool has counted, and how much it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Blocks, the null block included.
    pub num_blocks: usize,
    /// Blocks in the free queue, cached ones included.
    pub free_blocks: usize,
    /// Different keys that are resident.
    pub resident_hashes: usize,
    /// Pairs of block and key: more than the keys where blocks hold copies.
    pub copies: usize,
    /// Blocks given out since the pool was made.
    pub allocated_blocks: u64,
    /// Blocks that lost their hashes by allocation, `evict_blocks` or replacement.
    pub evicted_blocks: u64,
    /// Keys that became resident.
    pub stored_hashes: u64,
    /// Keys that stopped being resident, those of resets not counted.
    pub removed_hashes: u64,
    /// Successful resets.
    pub resets: u64,
    /// Events that wait to be taken.
    pub queued_events: usize,
    /// How often a full event queue was replaced by a resync mark.
    pub resyncs: u64,
    /// Events dropped by that.
    pub dropped_events: u64,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counters {
    allocated: u64,
    evicted: u64,
    pub stored: u64,
    removed: u64,
    resets: u64,
}

/// Blocks, their hashes, and the events that say what happened to them. See the module.
#[derive(Clone, Debug)]
pub struct BlockPool {
    pub(super) config: Config,
    pub(super) blocks: Blocks,
    pub(super) keys: Keys,
    pub(super) events: Option<Events>,
    pub(super) counters: Counters,
    watched: BTreeSet<u32>,
    reused: Vec<u32>,
    scratch: Vec<u32>,
    pub(super) fingerprints: Vec<u32>,
    pub(super) bytes: Vec<u8>,
}

impl BlockPool {
    /// A pool of free blocks.
    ///
    /// # Errors
    /// [`PoolError::Config`] for settings that cannot work.
    pub fn new(config: Config) -> Result<Self, PoolError> {
        let config = config.checked()?;
        let n = config.num_blocks as u32;
        let every_copy = config.report == Report::EveryCopy;
        let events = (config.enable_events && config.enable_caching).then(|| Events {
            emit: Emitter::new(&config, !every_copy),
            retained: Retained::new(config.groups.iter().map(|g| g.block_size)),
            every_copy,
        });
        Ok(Self {
            blocks: Blocks::new(n),
            keys: Keys::new(if config.enable_caching { n } else { 0 }, events.is_some()),
            events,
            counters: Counters::default(),
            watched: BTreeSet::new(),
            reused: Vec::new(),
            scratch: Vec::new(),
            fingerprints: Vec::new(),
            bytes: Vec::new(),
            config,
        })
    }

    /// The settings, with the groups filled in.
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// A group.
    ///
    /// # Errors
    /// [`PoolError::Group`] where there is no such group.
    pub fn group(&self, group: usize) -> Result<&Group, PoolError> {
        self.config.groups.get(group).ok_or(PoolError::Group { group, groups: self.config.groups.len() })
    }

    /// Blocks that can be given out, cached ones included.
    pub const fn num_free_blocks(&self) -> usize {
        self.blocks.num_free()
    }

    /// The share of blocks in use, 0 to 1; the null block does not count.
    #[allow(clippy::cast_precision_loss)]
    pub fn usage(&self) -> f64 {
        match self.blocks.len() - 1 {
            0 => 0.0,
            total => 1.0 - self.num_free_blocks() as f64 / total as f64,
        }
    }

    /// The free blocks in the order in which they will be given out.
    pub fn free_order(&self) -> Vec<u32> {
        self.blocks.free_order()
    }

    /// How many users a block has.
    ///
    /// # Errors
    /// [`PoolError::BlockRange`].
    pub fn ref_count(&self, block: u32) -> Result<u32, PoolError> {
        self.check_id(0, block)?;
        Ok(self.blocks.node(block).refs)
    }

    /// Whether its only user may write into a block: it has no hash, and is not the null block.
    ///
    /// # Errors
    /// [`PoolError::BlockRange`].
    pub fn is_writable(&self, block: u32) -> Result<bool, PoolError> {
        self.check_id(0, block)?;
        let node = self.blocks.node(block);
        Ok(block != 0 && node.refs == 1 && !node.has(CACHED))
    }

    #[inline]
    pub(super) fn check_id(&self, index: usize, block: u32) -> Result<(), PoolError> {
        if (block as usize) < self.blocks.len() {
            Ok(())
        } else {
            Err(PoolError::BlockRange { index, block, num_blocks: self.blocks.len() })
        }
    }

    #[inline]
    pub(super) fn form(&self) -> KeyForm {
        self.keys.form().unwrap_or(KeyForm::Int)
    }

    /// Appends `n` blocks from the head of the free queue to `out`, evicting what they held.
    ///
    /// # Errors
    /// [`PoolError::NoFreeBlocks`].
    pub fn get_new_blocks(&mut self, n: usize, out: &mut Vec<u32>) -> Result<(), PoolError> {
        let free = self.num_free_blocks();
        if n > free {
            return Err(PoolError::NoFreeBlocks { asked: n, free });
        }
        let from = out.len();
        self.blocks.pop(n, out);
        self.counters.allocated += n as u64;
        self.warm(&out[from..]);
        for &block in &out[from..] {
            let node = self.blocks.node_mut(block);
            node.refs = 1;
            if node.flags != 0 {
                self.reuse(block);
            }
        }
        self.flush();
        Ok(())
    }

    /// A larger table misses the cache for every key; touching the lines first lets the misses overlap.
    fn warm(&mut self, blocks: &[u32]) {
        if blocks.len() < 8 || self.keys.num_slots() < 1 << 14 {
            return;
        }
        self.fingerprints.clear();
        let keys = &self.keys;
        self.fingerprints.extend(blocks.iter().map(|&b| keys.fingerprint_of(b)));
        std::hint::black_box(self.keys.warm(&self.fingerprints));
    }

    #[inline]
    fn reuse(&mut self, block: u32) {
        let node = self.blocks.node(block);
        let (watched, cached) = (node.has(WATCHED), node.has(CACHED));
        if watched {
            self.blocks.node_mut(block).flags &= !WATCHED;
            self.watched.remove(&block);
            self.reused.push(block);
        }
        if cached {
            self.forget(block);
        }
    }

    /// The one way out of the cache: all keys of a cached block leave, with the events that this
    /// means. The caller flushes the events when its call is done.
    #[inline]
    pub(super) fn forget(&mut self, block: u32) {
        let form = self.form();
        let mut slot = block;
        while slot != NIL {
            let key = *self.keys.key(slot);
            let last = self.keys.remove(slot);
            self.counters.removed += u64::from(last);
            if let Some(e) = &mut self.events {
                if last || e.every_copy {
                    e.emit.removed(form, self.keys.digest(slot), key.group);
                }
                if let Some(meta) = e.retained.remove(slot, key.group, key.kept) {
                    e.emit.forget_meta(meta);
                }
            }
            slot = key.sibling;
        }
        self.blocks.node_mut(block).flags &= !CACHED;
        self.counters.evicted += 1;
    }

    #[inline]
    pub(super) fn flush(&mut self) {
        let form = self.form();
        if let Some(e) = &mut self.events {
            e.emit.flush(form);
        }
    }

    /// Adds a user to each block, taking free ones out of the queue. The null block is skipped.
    ///
    /// # Errors
    /// [`PoolError::BlockRange`].
    pub fn touch(&mut self, blocks: &[u32]) -> Result<(), PoolError> {
        for (i, &block) in blocks.iter().enumerate() {
            self.check_id(i, block)?;
        }
        for &block in blocks {
            if block == 0 {
                continue;
            }
            if self.blocks.node(block).refs == 0 {
                self.blocks.unlink(block);
            }
            self.blocks.node_mut(block).refs += 1;
        }
        Ok(())
    }

    /// Takes one user from each block, in the given order; blocks that lose their last user become
    /// free. The null block is skipped. On an error nothing was changed.
    fn release(&mut self, blocks: &[u32], allow_null: bool) -> Result<Vec<u32>, PoolError> {
        let mut released = std::mem::take(&mut self.scratch);
        released.clear();
        let mut failed = None;
        for (i, &block) in blocks.iter().enumerate() {
            if block == 0 && allow_null {
                continue;
            }
            let error = match self.check_id(i, block) {
                Err(e) => e,
                Ok(()) if block == 0 => PoolError::NullBlock { index: i },
                Ok(()) => {
                    let node = self.blocks.node_mut(block);
                    if node.refs > 0 {
                        node.refs -= 1;
                        if node.refs == 0 {
                            released.push(block);
                        }
                        continue;
                    }
                    PoolError::NotInUse { index: i, block }
                }
            };
            failed = Some((i, error));
            break;
        }
        let Some((at, error)) = failed else { return Ok(released) };
        for &block in blocks[..at].iter().filter(|&&b| b != 0) {
            self.blocks.node_mut(block).refs += 1;
        }
        self.scratch = released;
        Err(error)
    }

    /// Releases blocks in the given order (engines give the last block of a sequence first): blocks
    /// without a hash go to the head of the free queue, cached ones to its tail.
    ///
    /// # Errors
    /// [`PoolError::BlockRange`], [`PoolError::NotInUse`] for a block without a user, also where the
    /// list names a block more often than it has users.
    pub fn free_blocks(&mut self, blocks: &[u32]) -> Result<(), PoolError> {
        let released = self.release(blocks, true)?;
        self.blocks.release(&released);
        self.scratch = released;
        Ok(())
    }

    /// Releases blocks that stay readable until they are given out again: they go to the tail of the
    /// free queue with or without a hash, and [`Self::take_reused`] names them when that happens.
    ///
    /// # Errors
    /// As [`Self::free_blocks`], and [`PoolError::NullBlock`].
    pub fn unpin_blocks(&mut self, blocks: &[u32]) -> Result<(), PoolError> {
        let released = self.release(blocks, false)?;
        for &block in blocks {
            self.blocks.node_mut(block).flags |= WATCHED;
            self.watched.insert(block);
        }
        for &block in &released {
            self.blocks.push_back(block);
        }
        self.scratch = released;
        Ok(())
    }

    /// Unpinned blocks that were given out or reset since the last call.
    pub fn take_reused(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.reused)
    }

    /// Removes all hashes of these blocks; the blocks stay where they are.
    ///
    /// # Errors
    /// [`PoolError::BlockRange`].
    pub fn evict_blocks(&mut self, blocks: &[u32]) -> Result<(), PoolError> {
        for (i, &block) in blocks.iter().enumerate() {
            self.check_id(i, block)?;
        }
        for &block in blocks {
            if self.blocks.node(block).has(CACHED) {
                self.forget(block);
            }
        }
        self.flush();
        Ok(())
    }

    /// Forgets all hashes, unless blocks are in use: then nothing happens and the answer is `false`.
    /// Free blocks keep their order.
    pub fn reset_prefix_cache(&mut self) -> bool {
        if self.num_free_blocks() != self.blocks.len() - 1 {
            return false;
        }
        self.keys.clear();
        for block in 0..self.blocks.len() as u32 {
            self.blocks.node_mut(block).flags = 0;
        }
        self.reused.extend(std::mem::take(&mut self.watched));
        self.counters.resets += 1;
        if let Some(e) = &mut self.events {
            e.retained.clear();
            e.emit.cleared();
        }
        true
    }

    /// All events since the last call; constant work, except after the queue overflowed: then a clear
    /// and stores of everything that is resident.
    pub fn take_events(&mut self) -> EventList {
        match &mut self.events {
            None => EventList::default(),
            Some(e) if !e.emit.is_lost() => e.emit.take(),
            Some(_) => self.resync(),
        }
    }

    /// What was counted.
    pub fn stats(&self) -> Stats {
        let c = self.counters;
        let (resyncs, dropped_events) = self.events.as_ref().map_or((0, 0), |e| e.emit.losses());
        Stats {
            num_blocks: self.blocks.len(),
            free_blocks: self.num_free_blocks(),
            resident_hashes: self.keys.len(),
            copies: self.keys.copies(),
            allocated_blocks: c.allocated,
            evicted_blocks: c.evicted,
            stored_hashes: c.stored,
            removed_hashes: c.removed,
            resets: c.resets,
            queued_events: self.events.as_ref().map_or(0, |e| e.emit.len()),
            resyncs,
            dropped_events,
        }
    }
}
