//! The index: all sources, each behind a lock of its own.

use std::sync::{Arc, Mutex, PoisonError, RwLock};

use super::content::ContentKey;
use super::counters::{Bounds, Counters};
use super::directory::{Directory, Source, read, write};
use super::expiry::Expiry;
use super::profile::SourceId;
use super::query::Query;
use super::shard::{Shard, is_shared};
use super::store::PIECES;
use super::store::Sized;
use super::tiers::Tiers;
use super::wanted::Wanted;
use crate::events::{EventData, EventKind, EventList};

/// The number of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seq {
    /// It has none.
    None,
    /// It should follow the last one; where it does not, something is missing.
    Follows(u64),
    /// Whoever calls has seen to it that nothing is missing, or said so.
    At(u64),
}

/// One source's state, for operators.
#[derive(Clone, Debug)]
pub struct SourceStats {
    /// Its number.
    pub source: usize,
    /// Who it is.
    pub id: Arc<SourceId>,
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
    /// When it was last heard, in the caller's time.
    pub last_seen: u32,
    /// Counters.
    pub counters: Counters,
}

/// See the module. All methods take shared access; any number of threads may read and write.
#[derive(Debug)]
pub struct PrefixIndex {
    pub(super) seed: u64,
    pub(super) bounds: Bounds,
    pub(super) digests: bool,
    pub(super) directory: RwLock<Directory>,
    pub(super) tiers: Mutex<Tiers>,
    pub(super) wanted: Arc<Wanted>,
}

impl PrefixIndex {
    /// An empty index. `seed` (secret where prompts are hostile) enters all content keys.
    pub fn new(seed: u64, bounds: Bounds, digests: bool) -> Self {
        let (directory, tiers, wanted) = (RwLock::default(), Mutex::default(), Arc::default());
        Self { seed, bounds, digests, directory, tiers, wanted }
    }

    /// Names of tiers by number.
    pub fn tier_names(&self) -> Vec<String> {
        self.tiers.lock().unwrap_or_else(PoisonError::into_inner).names().to_vec()
    }

    /// The number of a source, made where it is new; `None` for one that was dropped and not added again.
    pub fn source(&self, name: &str, rank: u32) -> Option<usize> {
        {
            let directory = read(&self.directory);
            if let Some(source) = directory.find(name, rank, false) {
                return Some(source.number);
            }
            if directory.was_dropped(name, rank, false) {
                return None;
            }
        }
        Some(self.add(name, rank, false).number)
    }

    /// The number of a source that is there.
    pub fn known_source(&self, name: &str, rank: u32, is_owner: bool) -> Option<usize> {
        read(&self.directory).find(name, rank, is_owner).map(|s| s.number)
    }

    /// The number of a source, made where it is new or was dropped. The blocks of one that never announces
    /// removals live as `expiry` says. `first_seq` is the number with which it begins.
    pub fn add_source(
        &self,
        name: &str,
        rank: u32,
        expiry: Option<Expiry>,
        first_seq: u64,
        now: u32,
    ) -> usize {
        let source = self.add(name, rank, false);
        let mut shard = source.write();
        if shard.expiry != expiry {
            shard.set_expiry(expiry, now);
        }
        if shard.last_seq.is_none() {
            shard.last_seq = first_seq.checked_sub(1);
        }
        source.number
    }

    /// The tiers of these media, a bit each.
    pub fn tiers_of<'a>(&self, media: impl IntoIterator<Item = &'a str>) -> u32 {
        let mut tiers = self.tiers.lock().unwrap_or_else(PoisonError::into_inner);
        media.into_iter().fold(0, |all, medium| all | 1 << tiers.of(Some(medium)))
    }

    /// The publisher of a source of a dump is known to live the same life still; until then what the dump
    /// says is not complete. With the last such source the owners of shared tiers are confirmed too.
    pub fn confirm(&self, source: usize) {
        _ = self.with(source, Shard::confirm);
        let all = self.all();
        if !all.iter().any(|s| !s.id.is_owner && s.read().unconfirmed.is_some()) {
            all.iter().filter(|s| s.id.is_owner).for_each(|s| s.write().confirm());
        }
    }

    /// What a source of a dump told of shared tiers since is not known: their owners stay incomplete.
    fn not_confirmed(&self, src: &Source) {
        if src.read().unconfirmed.is_some() {
            let owners = self.all();
            for owner in owners.iter().filter(|s| s.id.is_owner) {
                let mut shard = owner.write();
                shard.unconfirmed = shard.unconfirmed.map(|_| false);
            }
        }
    }

    fn add(&self, name: &str, rank: u32, is_owner: bool) -> Arc<Source> {
        let mut directory = write(&self.directory);
        // Another thread may have made it in between.
        if let Some(source) = directory.find(name, rank, is_owner) {
            return Arc::clone(source);
        }
        let shard = Shard::new(self.seed, self.bounds, self.digests, is_owner, &self.wanted);
        directory.add(SourceId { name: name.to_owned(), rank, is_owner }, shard)
    }

    pub(super) fn get(&self, source: usize) -> Option<Arc<Source>> {
        read(&self.directory).get(source).cloned()
    }

    /// All sources that were not dropped.
    pub(super) fn all(&self) -> Arc<Vec<Arc<Source>>> {
        read(&self.directory).all()
    }

    /// How many sources there are.
    pub fn num_sources(&self) -> usize {
        read(&self.directory).len()
    }

    /// The numbers of all ranks of a name.
    pub fn ranks_of(&self, name: &str) -> Vec<usize> {
        self.all().iter().filter(|s| s.id.name == name && !s.id.is_owner).map(|s| s.number).collect()
    }

    /// Applies a batch of a source. Events of a source that was dropped are ignored. `now` is the caller's
    /// time.
    pub fn apply(&self, source: usize, seq: Seq, events: &EventList, now: u32) {
        let Some(src) = self.get(source) else { return };
        let (wanted, told, expiry) = {
            let mut shard = src.write();
            if let Seq::Follows(seq) = seq
                && seq != shard.last_seq.map_or(0, |last| last.wrapping_add(1))
            {
                shard.counters.gaps += 1;
                shard.mark_incomplete();
            }
            if let Seq::Follows(seq) | Seq::At(seq) = seq {
                shard.last_seq = Some(seq);
            }
            (shard.apply(events, &self.tiers, now), std::mem::take(&mut shard.told), shard.expiry)
        };
        self.resolve(&src, wanted, told);
        self.apply_shared(&src, events, expiry, now);
    }

    /// Replaces all that is known of a source by a snapshot that is exact at `resume_seq`, the first number
    /// that it does not contain. One older than what was applied is left alone.
    pub fn apply_snapshot(
        &self,
        source: usize,
        resume_seq: Option<u64>,
        events: &EventList,
        now: u32,
    ) -> bool {
        let Some(src) = self.get(source) else { return false };
        let mut fresh = src.read().emptied();
        let last = resume_seq.and_then(|r| r.checked_sub(1));
        if resume_seq.is_some() && fresh.last_seq > last {
            return false;
        }
        // Made aside, so that nobody is asked to wait and nobody sees a half of it.
        fresh.last_seq = last;
        let wanted = fresh.apply(events, &self.tiers, now);
        let (told, expiry) = (std::mem::take(&mut fresh.told), fresh.expiry);
        self.not_confirmed(&src);
        let old = std::mem::replace(&mut *src.write(), fresh);
        drop(old);
        self.resolve(&src, wanted, told);
        self.apply_shared(&src, events, expiry, now);
        true
    }

    /// Looks for the unknown parents of a source's orphans in the other sources, since blocks that came by
    /// transfer were announced there; and tells others what they waited for.
    fn resolve(&self, src: &Source, wanted: Vec<Sized>, mut told: Vec<(Sized, ContentKey)>) {
        if !wanted.is_empty() {
            // Before looking, so that nobody can make one of them known unnoticed in between.
            self.wanted.add(&wanted, src.number);
            let others = self.all();
            told.extend(wanted.into_iter().filter_map(|hash| {
                let mut others = others.iter().filter(|s| s.number != src.number);
                let content = others.find_map(|s| s.read().content_of(hash.0.as_ref(), hash.1))?;
                Some((hash, content))
            }));
        }
        // Whatever is taken is not wanted any more, so that this comes to an end.
        while let Some((hash, content)) = told.pop() {
            for waiting in self.wanted.take(&hash).into_iter().filter_map(|number| self.get(number)) {
                let mut shard = waiting.write();
                shard.adopt(vec![(hash.clone(), content)]);
                told.append(&mut shard.told);
            }
        }
    }

    /// Blocks of shared tiers belong to their owner, whatever becomes of the engine that told of them.
    fn apply_shared(&self, src: &Source, events: &EventList, expiry: Option<Expiry>, now: u32) {
        if src.id.is_owner || !events.attrs_table().iter().any(is_shared) {
            return;
        }
        for v in events.iter().filter(|v| v.kind() != EventKind::Cleared && is_shared(v.attrs())) {
            let owner = self.add(v.attrs().ownership.as_deref().unwrap_or("shared"), 0, true);
            if let Some(expiry) = expiry.filter(|e| e.covers(self.tier_of(v.attrs().medium.as_deref()))) {
                let expiry = expiry.and(owner.read().expiry);
                if owner.read().expiry != Some(expiry) {
                    owner.write().set_expiry(Some(expiry), now);
                }
            }
            let mut one = EventData::new();
            if one.push_view(v).is_ok() {
                self.apply(owner.number, Seq::None, &one.into(), now);
            }
        }
    }

    fn tier_of(&self, medium: Option<&str>) -> usize {
        self.tiers.lock().unwrap_or_else(PoisonError::into_inner).of(medium)
    }

    /// Expects that a source will soon store the blocks of this prompt, until a time. Returns how many are
    /// expected: none for a source whose block size is not known.
    pub fn expect(&self, source: usize, query: &Query<'_>, until: u32, now: u32) -> usize {
        let Some(src) = self.get(source) else { return 0 };
        let Some(block_size) = src.read().profile().groups.first().map(|g| g.block_size) else { return 0 };
        let mut keys = query.keys(self.seed, block_size);
        let n = keys.len().min(self.bounds.expected_blocks);
        let keys = keys.first(n);
        let mut shard = src.write();
        let bound = self.bounds.expected_blocks;
        keys.iter()
            .filter(|&&key| shard.mask_of_content(key, 0) == 0)
            .copied()
            .collect::<Vec<_>>()
            .into_iter()
            .filter(|&key| shard.expected.add(key, until, now, bound))
            .count()
    }

    fn with<R>(&self, source: usize, f: impl FnOnce(&mut Shard) -> R) -> Option<R> {
        self.get(source).map(|s| f(&mut s.write()))
    }

    /// The digest of what a source holds; `None` where it is not valid.
    pub fn digest(&self, source: usize) -> Option<[u8; 16]> {
        self.get(source).and_then(|s| s.read().digest())
    }

    /// Says that something of a source is missing.
    pub fn mark_incomplete(&self, source: usize) {
        _ = self.with(source, Shard::mark_incomplete);
    }

    /// Says that the batches up to `last` will not come.
    pub fn gap(&self, source: usize, last: u64) {
        _ = self.with(source, |s| {
            s.counters.gaps += 1;
            s.last_seq = Some(last);
            s.mark_incomplete();
        });
    }

    /// Forgets what a source holds, as after its restart; its numbering starts anew.
    pub fn reset(&self, source: usize) {
        let Some(src) = self.get(source) else { return };
        self.not_confirmed(&src);
        let mut fresh = src.read().emptied();
        fresh.last_seq = None;
        let old = std::mem::replace(&mut *src.write(), fresh);
        drop(old);
    }

    /// Forgets a source. Its events that arrive later are ignored, until it is added again.
    pub fn drop_source(&self, source: usize) -> bool {
        if let Some(src) = self.get(source) {
            self.not_confirmed(&src);
        }
        let dropped = write(&self.directory).drop_source(source);
        dropped.is_some()
    }

    /// Forgets what a source holds in one tier. Returns the number of blocks.
    pub fn clear_tier(&self, source: usize, tier: usize) -> usize {
        let Some(src) = self.get(source) else { return 0 };
        let bits = src.read().bits_of(|s| s.tier == tier);
        // One piece at a time, so that nobody waits for the whole.
        (0..PIECES).map(|p| src.write().forget(p, bits, None)).sum()
    }

    /// Forgets blocks of store-only sources and tiers past their time. Returns their number.
    pub fn expire(&self, now: u32) -> usize {
        let mut gone = 0;
        for src in self.all().iter() {
            let cutoff = src.read().cutoff(now);
            if cutoff == 0 {
                continue;
            }
            for p in 0..PIECES {
                let mut shard = src.write();
                let expiring = shard.expiring;
                let n = shard.forget(p, expiring, Some(cutoff));
                shard.counters.expired += n as u64;
                gone += n;
            }
        }
        gone
    }

    /// State of every source.
    pub fn stats(&self) -> Vec<SourceStats> {
        let stats = |src: &Arc<Source>| {
            let s = src.read();
            SourceStats {
                source: src.number,
                id: Arc::clone(&src.id),
                blocks: s.len(),
                nbytes: s.nbytes(),
                waiting: s.waiting(),
                complete: s.profile().complete,
                last_seq: s.last_seq,
                last_seen: s.last_seen,
                counters: s.counters,
            }
        };
        self.all().iter().map(stats).collect()
    }
}
