//! The attributes of resident blocks, each once, for as long as a block has them.

use hashbrown::HashMap;

use crate::events::Attrs;

/// Up to so many, looking at each is faster than hashing.
const SCAN: usize = 8;

/// Unused ones are looked for when there are more than this many, then at each doubling.
const SWEEP_AT: usize = 64;

/// Attributes by number, with the blocks counted that have them.
#[derive(Debug, Default)]
pub(super) struct AttrTable {
    entries: Vec<(Attrs, usize)>,
    free: Vec<u32>,
    by_attrs: HashMap<Attrs, u32, foldhash::fast::RandomState>,
    sweep_at: usize,
}

impl AttrTable {
    pub fn get(&self, id: u32) -> &Attrs {
        &self.entries[id as usize].0
    }

    /// The number of `attrs`, which stays theirs while [`Self::release`] has not taken the last block.
    pub fn find_or_add(&mut self, attrs: &Attrs) -> u32 {
        if self.entries.len() <= SCAN
            && let Some(at) = self.entries.iter().position(|(a, _)| a == attrs)
            && !self.free.contains(&(at as u32))
        {
            return at as u32;
        }
        if let Some(&id) = self.by_attrs.get(attrs) {
            return id;
        }
        let entry = (attrs.clone(), 0);
        let id = match self.free.pop() {
            Some(id) => {
                self.entries[id as usize] = entry;
                id
            }
            None => {
                self.entries.push(entry);
                self.entries.len() as u32 - 1
            }
        };
        self.by_attrs.insert(attrs.clone(), id);
        id
    }

    /// So many more blocks have them.
    pub fn hold(&mut self, id: u32, blocks: usize) {
        self.entries[id as usize].1 += blocks;
    }

    /// So many blocks less have them.
    pub fn release(&mut self, id: u32, blocks: usize) {
        self.entries[id as usize].1 -= blocks;
    }

    /// Forgets what no block has, if there are many. Numbers found before are void.
    pub fn sweep(&mut self) {
        if self.by_attrs.len() <= self.sweep_at.max(SWEEP_AT) {
            return;
        }
        let Self { entries, free, by_attrs, .. } = self;
        by_attrs.retain(|_, id| {
            let used = entries[*id as usize].1 > 0;
            if !used {
                free.push(*id);
            }
            used
        });
        self.sweep_at = by_attrs.len() * 2;
    }

    pub fn nbytes(&self) -> usize {
        self.entries.capacity() * size_of::<(Attrs, usize)>() * 2
    }
}
