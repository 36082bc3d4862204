//! All sources, each behind a lock of its own.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::content::{ContentHasher, ContentKey};
use super::profile::{Masks, Match, Profile};
use super::query::Query;
use super::shard::{Bounds, Counters, Shard, is_shared};
use super::tiers::Tiers;
use crate::events::{EventData, EventKind, EventList};
use crate::hash::{BlockHash, HashRef};

/// Most look-ups that a reader makes before it lets go of a source's lock.
pub const LOOKUPS_PER_LOCK: usize = 128;

/// One source's state, for operators.
#[derive(Clone, Debug)]
pub struct SourceStats {
    /// Its name.
    pub name: String,
    /// Its data-parallel rank.
    pub rank: u32,
    /// Resident blocks (each hash once).
    pub blocks: usize,
    /// Bytes used.
    pub nbytes: usize,
    /// Blocks that wait for a parent.
    pub waiting: usize,
    /// Whether everything that it said is known.
    pub complete: bool,
    /// The last sequence number applied.
    pub last_seq: Option<u64>,
    /// When it was last heard, in the caller's seconds.
    pub last_seen: u32,
    /// Counters.
    pub counters: Counters,
}

#[derive(Debug)]
pub(super) struct Source {
    pub(super) name: String,
    pub(super) rank: u32,
    pub(super) is_owner: bool,
    pub(super) shard: RwLock<Shard>,
}

/// See the module. All methods take shared access; any number of threads may read and write.
#[derive(Debug)]
pub struct PrefixIndex {
    pub(super) seed: u64,
    pub(super) bounds: Bounds,
    pub(super) digests: bool,
    /// A dropped source leaves its place empty: numbers are never used again.
    pub(super) sources: RwLock<Vec<Option<Arc<Source>>>>,
    pub(super) tiers: Mutex<Tiers>,
}

// A panic while a lock is held is a bug, and must not make every later call fail: the data is counters
// and tables that stay in a valid state between the calls made on them.
fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

impl PrefixIndex {
    /// An empty index. `seed` (secret where prompts are hostile) enters all content keys.
    pub fn new(seed: u64, bounds: Bounds, digests: bool) -> Self {
        Self { seed, bounds, digests, sources: RwLock::default(), tiers: Mutex::default() }
    }

    pub(super) fn tiers(&self) -> MutexGuard<'_, Tiers> {
        self.tiers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Names of tiers by number.
    pub fn tier_names(&self) -> Vec<String> {
        self.tiers().names().to_vec()
    }

    /// The number of a source, made where it is new.
    pub fn source(&self, name: &str, rank: u32) -> usize {
        self.source_or_owner(name, rank, false)
    }

    fn source_or_owner(&self, name: &str, rank: u32, is_owner: bool) -> usize {
        let same = |s: &Arc<Source>| s.rank == rank && s.is_owner == is_owner && s.name == name;
        let position = |v: &[Option<Arc<Source>>]| v.iter().position(|s| s.as_ref().is_some_and(same));
        if let Some(i) = position(&read(&self.sources)) {
            return i;
        }
        let mut sources = write(&self.sources);
        // Another thread may have made it in between.
        if let Some(i) = position(&sources) {
            return i;
        }
        let shard = RwLock::new(Shard::new(self.seed, self.bounds, self.digests, is_owner));
        sources.push(Some(Arc::new(Source { name: name.to_owned(), rank, is_owner, shard })));
        sources.len() - 1
    }

    fn get(&self, source: usize) -> Option<Arc<Source>> {
        read(&self.sources).get(source)?.clone()
    }

    /// All sources that were not dropped, with their numbers.
    pub(super) fn all(&self) -> Vec<(usize, Arc<Source>)> {
        read(&self.sources)
            .iter()
            .enumerate()
            .filter_map(|(i, s)| Some((i, Arc::clone(s.as_ref()?))))
            .collect()
    }

    /// Name, rank and whether it is the owner of a shared tier.
    pub fn source_name(&self, source: usize) -> Option<(String, u32, bool)> {
        self.get(source).map(|s| (s.name.clone(), s.rank, s.is_owner))
    }

    /// Applies a batch of a source. Events of a source that was dropped are ignored.
    ///
    /// `seq` is the batch's number where it has one: a number that does not follow the last one marks
    /// the source as not complete. `now` is the caller's seconds.
    pub fn apply(&self, source: usize, seq: Option<u64>, events: &EventList, now: u32) {
        let Some(src) = self.get(source) else { return };
        let wanted = {
            let mut shard = write(&src.shard);
            if let (Some(seq), Some(last)) = (seq, shard.last_seq)
                && seq != last.wrapping_add(1)
            {
                shard.mark_incomplete();
            }
            if seq.is_some() {
                shard.last_seq = seq;
            }
            shard.apply(events, &mut self.tiers(), now)
        };
        self.resolve(source, &src, wanted);
        if !src.is_owner {
            self.apply_shared(events, now);
        }
    }

    /// Replaces all that is known of a source by a snapshot that is exact at `resume_seq`.
    pub fn apply_snapshot(&self, source: usize, resume_seq: Option<u64>, events: &EventList, now: u32) {
        let Some(src) = self.get(source) else { return };
        let wanted = {
            let mut shard = write(&src.shard);
            shard.clear();
            shard.last_seq = resume_seq;
            shard.apply(events, &mut self.tiers(), now)
        };
        self.resolve(source, &src, wanted);
        if !src.is_owner {
            self.apply_shared(events, now);
        }
    }

    /// Looks for unknown parents in the other sources: blocks that came by transfer were announced there.
    fn resolve(&self, source: usize, src: &Source, mut wanted: Vec<BlockHash>) {
        if wanted.is_empty() {
            return;
        }
        let mut known: Vec<(BlockHash, ContentKey)> = Vec::new();
        for (_, other) in self.all().into_iter().filter(|(i, _)| *i != source) {
            let shard = read(&other.shard);
            wanted.retain(|h| match shard.content_of(h.as_ref()) {
                Some(c) => {
                    known.push((h.clone(), c));
                    false
                }
                None => true,
            });
        }
        if !known.is_empty() {
            write(&src.shard).adopt(known);
        }
    }

    /// Blocks of shared tiers belong to their owner, whatever becomes of the engine that told of them.
    fn apply_shared(&self, events: &EventList, now: u32) {
        if !events.attrs_table().iter().any(is_shared) {
            return;
        }
        for v in events.iter().filter(|v| v.kind() != EventKind::Cleared && is_shared(v.attrs())) {
            let name = v.attrs().ownership.as_deref().unwrap_or("shared");
            let owner = self.source_or_owner(name, 0, true);
            let mut one = EventData::new();
            if one.push_view(v).is_ok() {
                self.apply(owner, None, &one.into(), now);
            }
        }
    }

    /// The masks of a chain of look-ups, letting go of the lock now and then. Ends at the first block
    /// that is not resident where nothing after it can count.
    fn masks(
        source: &Source,
        n: usize,
        profile: &Profile,
        lookup: impl Fn(&Shard, usize) -> u32,
    ) -> Vec<u32> {
        let mut masks = Vec::new();
        let whole = profile.has_windows();
        while masks.len() < n {
            let shard = read(&source.shard);
            for i in masks.len()..n.min(masks.len() + LOOKUPS_PER_LOCK) {
                let mask = lookup(&shard, i);
                masks.push(mask);
                if mask == 0 && !whole {
                    return masks;
                }
            }
        }
        masks
    }

    /// Who holds a prefix of this prompt: longest first, then by number of the source.
    pub fn find(&self, query: &Query<'_>) -> Vec<Match> {
        let mut hasher = ContentHasher::new(self.seed);
        let mut keyed: Vec<(u32, Vec<ContentKey>)> = Vec::new();
        let mut found = Vec::new();
        for (i, source) in self.all() {
            let profile = read(&source.shard).profile();
            let mut all = Vec::new();
            for g in &profile.groups {
                if all.iter().any(|m: &Masks| m.block_size == g.block_size) {
                    continue;
                }
                let k = keyed.iter().position(|k| k.0 == g.block_size).unwrap_or_else(|| {
                    keyed.push((g.block_size, query.keys(&mut hasher, g.block_size as usize)));
                    keyed.len() - 1
                });
                let keys = &keyed[k].1;
                let masks =
                    Self::masks(&source, keys.len(), &profile, |shard, i| shard.mask_of_content(keys[i]));
                all.push(Masks { block_size: g.block_size, masks });
            }
            found.extend(profile.matches(i, &all));
        }
        found.sort_by(|a, b| b.tokens.cmp(&a.tokens).then(a.source.cmp(&b.source)));
        found
    }

    /// How much of a chain of its own hashes one source holds.
    pub fn find_hashes(&self, source: usize, hashes: &[HashRef<'_>]) -> Option<Match> {
        let src = self.get(source)?;
        let mut profile = read(&src.shard).profile();
        if profile.groups.is_empty() {
            // A stream of hashes only never names a block size: lengths are in blocks then.
            Arc::make_mut(&mut profile).assume_full_groups();
        }
        let masks = Self::masks(&src, hashes.len(), &profile, |shard, i| shard.mask_of_hash(hashes[i]));
        profile.matches(source, &[Masks { block_size: 0, masks }])
    }

    fn with<R>(&self, source: usize, f: impl FnOnce(&mut Shard) -> R) -> Option<R> {
        self.get(source).map(|s| f(&mut write(&s.shard)))
    }

    /// The digest of what a source holds; `None` where it is not valid.
    pub fn digest(&self, source: usize) -> Option<[u8; 16]> {
        self.get(source).and_then(|s| read(&s.shard).digest())
    }

    /// Says that something of a source is missing.
    pub fn mark_incomplete(&self, source: usize) {
        _ = self.with(source, Shard::mark_incomplete);
    }

    /// Forgets what a source holds, as after its restart; its numbering starts anew.
    pub fn reset(&self, source: usize) {
        _ = self.with(source, |s| {
            s.clear();
            s.last_seq = None;
        });
    }

    /// Forgets a source. Events that arrive for its number later are ignored.
    pub fn drop_source(&self, source: usize) -> bool {
        write(&self.sources).get_mut(source).and_then(Option::take).is_some()
    }

    /// Forgets what a source holds in one tier. Returns the number of blocks.
    pub fn clear_tier(&self, source: usize, tier: usize) -> usize {
        self.with(source, |s| s.forget_scopes(|scope| scope.tier == tier)).unwrap_or(0)
    }

    /// Forgets a source's blocks that were last stored before `before`. Returns their number.
    pub fn expire(&self, source: usize, before: u32) -> usize {
        self.with(source, |s| s.expire(before)).unwrap_or(0)
    }

    /// State of every source.
    pub fn stats(&self) -> Vec<(usize, SourceStats)> {
        self.all()
            .into_iter()
            .map(|(i, src)| {
                let s = read(&src.shard);
                let stats = SourceStats {
                    name: src.name.clone(),
                    rank: src.rank,
                    blocks: s.len(),
                    nbytes: s.nbytes(),
                    waiting: s.waiting(),
                    complete: s.profile().complete,
                    last_seq: s.last_seq,
                    last_seen: s.last_seen,
                    counters: s.counters,
                };
                (i, stats)
            })
            .collect()
    }
}
