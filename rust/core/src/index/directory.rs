//! The sources of an index, by name and by number.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use hashbrown::{Equivalent, HashMap, HashSet};

use super::profile::SourceId;
use super::shard::Shard;

/// Most dropped sources whose names are remembered; beyond it the oldest knowledge goes, all at once.
const MAX_DROPPED: usize = 65_536;

/// One source: who it is, and what it holds behind a lock of its own.
#[derive(Debug)]
pub struct Source {
    pub(super) number: usize,
    pub(super) id: Arc<SourceId>,
    shard: RwLock<Shard>,
}

// A panic while a lock is held is a bug, and must not make every later call fail: the data is counters
// and tables that stay in a valid state between the calls made on them.
pub(super) fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

impl Source {
    pub(super) fn read(&self) -> RwLockReadGuard<'_, Shard> {
        read(&self.shard)
    }

    pub(super) fn write(&self) -> RwLockWriteGuard<'_, Shard> {
        write(&self.shard)
    }
}

#[derive(Hash)]
struct Key<'a>(&'a str, u32, bool);

impl Equivalent<SourceId> for Key<'_> {
    fn equivalent(&self, id: &SourceId) -> bool {
        (self.0, self.1, self.2) == (id.name.as_str(), id.rank, id.is_owner)
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct Directory {
    by_id: HashMap<SourceId, Arc<Source>, foldhash::fast::RandomState>,
    /// A dropped source leaves its place empty: numbers are never used again.
    by_number: Vec<Option<Arc<Source>>>,
    /// For whoever asks all of them.
    all: Arc<Vec<Arc<Source>>>,
    dropped: HashSet<SourceId, foldhash::fast::RandomState>,
}

impl Directory {
    /// The source of this name.
    pub fn find(&self, name: &str, rank: u32, is_owner: bool) -> Option<&Arc<Source>> {
        self.by_id.get(&Key(name, rank, is_owner))
    }

    /// Whether it was dropped and not added again.
    pub fn was_dropped(&self, name: &str, rank: u32, is_owner: bool) -> bool {
        !self.dropped.is_empty() && self.dropped.contains(&Key(name, rank, is_owner))
    }

    /// The source with this number.
    pub fn get(&self, number: usize) -> Option<&Arc<Source>> {
        self.by_number.get(number)?.as_ref()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// All of them, in order of their numbers.
    pub fn all(&self) -> Arc<Vec<Arc<Source>>> {
        Arc::clone(&self.all)
    }

    /// Adds a source; one that was dropped begins anew.
    pub fn add(&mut self, id: SourceId, shard: Shard) -> Arc<Source> {
        self.dropped.remove(&id);
        let number = self.by_number.len();
        let source = Arc::new(Source { number, id: Arc::new(id.clone()), shard: RwLock::new(shard) });
        self.by_number.push(Some(Arc::clone(&source)));
        Arc::make_mut(&mut self.all).push(Arc::clone(&source));
        self.by_id.insert(id, Arc::clone(&source));
        source
    }

    /// Takes a source out and remembers that it was dropped.
    pub fn drop_source(&mut self, number: usize) -> Option<Arc<Source>> {
        let source = self.by_number.get_mut(number)?.take()?;
        self.by_id.remove(&*source.id);
        Arc::make_mut(&mut self.all).retain(|s| s.number != number);
        if self.dropped.len() >= MAX_DROPPED {
            self.dropped.clear();
        }
        self.dropped.insert((*source.id).clone());
        Some(source)
    }
}
