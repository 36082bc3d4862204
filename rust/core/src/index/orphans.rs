//! Stores that wait for their parent, within a bound.

use std::collections::{BTreeSet, VecDeque};

use hashbrown::HashMap;

use super::store::Sized;
use crate::events::EventData;
use crate::hash::HashRef;

/// One waiting store: a copy, so that it does not keep its whole batch in memory.
#[derive(Clone, Debug)]
pub struct Orphan {
    /// The event.
    pub event: EventData,
    parent: Sized,
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Orphans {
    waiting: HashMap<u64, Orphan>,
    by_parent: HashMap<Sized, BTreeSet<u64>>,
    /// Oldest first; numbers that no longer wait are passed over.
    order: VecDeque<u64>,
    next: u64,
    blocks: usize,
}

impl Orphans {
    /// Blocks that wait.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Whether a store waits for this block.
    #[inline]
    pub fn want(&self, parent: HashRef<'_>, unit: u32) -> bool {
        !self.waiting.is_empty() && self.by_parent.contains_key(&(parent.to_owned(), unit))
    }

    /// Adds a store; gives up the oldest ones beyond `bound` blocks and returns them.
    pub fn push(&mut self, event: EventData, parent: Sized, bound: usize) -> Vec<Orphan> {
        self.blocks += event.view(0).num_hashes();
        self.by_parent.entry(parent.clone()).or_default().insert(self.next);
        self.waiting.insert(self.next, Orphan { event, parent });
        self.order.push_back(self.next);
        self.next += 1;
        let mut dropped = Vec::new();
        while self.blocks > bound
            && let Some(oldest) = self.order.pop_front()
        {
            dropped.extend(self.remove(oldest));
        }
        dropped
    }

    /// Takes the stores that wait for this block.
    pub fn take(&mut self, parent: &Sized) -> Vec<Orphan> {
        let ids = self.by_parent.remove(parent).unwrap_or_default();
        let found: Vec<Orphan> = ids.iter().filter_map(|id| self.waiting.remove(id)).collect();
        self.blocks -= found.iter().map(|o| o.event.view(0).num_hashes()).sum::<usize>();
        // The order keeps numbers that are gone; it is rebuilt when those are the most.
        if self.order.len() > 64 + 2 * self.waiting.len() {
            self.order.retain(|id| self.waiting.contains_key(id));
        }
        found
    }

    fn remove(&mut self, id: u64) -> Option<Orphan> {
        let orphan = self.waiting.remove(&id)?;
        self.blocks -= orphan.event.view(0).num_hashes();
        if let Some(ids) = self.by_parent.get_mut(&orphan.parent) {
            ids.remove(&id);
            if ids.is_empty() {
                self.by_parent.remove(&orphan.parent);
            }
        }
        Some(orphan)
    }
}
