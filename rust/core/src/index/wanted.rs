//! Parents that some source's orphans wait for and that no source knew when they came.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use hashbrown::HashMap;

use super::store::Sized;
use crate::hash::HashRef;

/// Most parents that are remembered; beyond it all are forgotten, and their orphans wait for their own
/// source alone.
const MAX_WANTED: usize = 65_536;

type Map = HashMap<Sized, Vec<usize>, foldhash::fast::RandomState>;

/// By parent the numbers of the sources that wait.
#[derive(Debug, Default)]
pub struct Wanted {
    by_parent: Mutex<Map>,
    /// How many there are, so that nobody takes the lock where there are none.
    count: AtomicUsize,
}

impl Wanted {
    fn change<R>(&self, f: impl FnOnce(&mut Map) -> R) -> R {
        let mut map: MutexGuard<'_, Map> = self.by_parent.lock().unwrap_or_else(PoisonError::into_inner);
        let result = f(&mut map);
        self.count.store(map.len(), Ordering::Release);
        result
    }

    /// Whether somebody waits for this block.
    #[inline]
    pub fn wants(&self, hash: HashRef<'_>, unit: u32) -> bool {
        self.count.load(Ordering::Acquire) > 0
            && self.change(|map| map.contains_key(&(hash.to_owned(), unit)))
    }

    /// A source waits for these blocks.
    pub fn add(&self, hashes: &[Sized], source: usize) {
        self.change(|map| {
            if map.len() + hashes.len() > MAX_WANTED {
                map.clear();
            }
            for hash in hashes.iter().take(MAX_WANTED) {
                let waiting = map.entry(hash.clone()).or_default();
                if !waiting.contains(&source) {
                    waiting.push(source);
                }
            }
        });
    }

    /// The block is known: who waited for it?
    pub fn take(&self, hash: &Sized) -> Vec<usize> {
        self.change(|map| map.remove(hash)).unwrap_or_default()
    }
}
