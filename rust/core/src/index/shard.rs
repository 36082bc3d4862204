//! One source: what its stream says is resident, and what its blocks hold.

use std::sync::{Arc, Mutex, PoisonError};

use super::content::{ContentKey, ExtraReader, Root, block_key};
use super::counters::{Bounds, Counters};
use super::expected::Expected;
use super::expiry::Expiry;
use super::orphans::{Orphan, Orphans};
use super::profile::{Profile, ScopeInfo};
use super::store::{Id, Layout, Sized, Store, mask};
use super::tiers::Tiers;
use super::wanted::Wanted;
use crate::events::{Attrs, EventData, EventKind, EventList, EventView, Tokens};
use crate::hash::HashRef;
use crate::resident::{Digest, KeyWriter};

/// Most scopes (medium, group, locality, ownership) of one source, a bit of a mask each; and most groups
/// with their block sizes.
pub const MAX_SCOPES: usize = 32;

/// See the module.
#[derive(Clone, Debug)]
pub struct Shard {
    pub(super) seed: u64,
    pub(super) stores: Vec<Store>,
    profile: Arc<Profile>,
    pub(super) writers: Vec<KeyWriter>,
    pub(super) digest: Option<Digest>,
    digest_on: bool,
    orphans: Orphans,
    /// What orphans of all sources wait for, and what became known of it here.
    wanted: Arc<Wanted>,
    pub(super) told: Vec<(Sized, ContentKey)>,
    pub(super) expected: Expected,
    pub(super) bounds: Bounds,
    /// Whether this stands for the owner of a shared tier, whose blocks count here.
    is_owner: bool,
    /// How long blocks live, and in which tiers, where nobody announces that they leave.
    pub(super) expiry: Option<Expiry>,
    /// The scopes of those tiers.
    pub(super) expiring: u32,
    /// For a source of a dump, until its publisher is known to live still: whether it is complete then.
    pub(super) unconfirmed: Option<bool>,
    /// Counts what was applied, so that a slow reader sees whether anything changed.
    pub(super) version: u64,
    pub(super) counters: Counters,
    pub(super) last_seq: Option<u64>,
    pub(super) last_seen: u32,
}

/// Whether an event speaks of a tier that belongs to an owner of its own and not to the engine. A locality
/// that is not known is not taken for the engine's own.
pub fn is_shared(attrs: &Attrs) -> bool {
    let local = |l: &Arc<str>| l.eq_ignore_ascii_case("local");
    attrs.ownership.is_some() || attrs.locality.as_ref().is_some_and(|l| !local(l))
}

/// Where and when a store makes blocks resident.
#[derive(Clone, Copy)]
struct At {
    /// The size of its blocks, see [`Profile::unit_of`].
    unit: u32,
    /// Its scope.
    bit: usize,
    now: u32,
}

impl Shard {
    /// An empty source. `seed` and `wanted` are the index's.
    pub fn new(seed: u64, bounds: Bounds, digest: bool, is_owner: bool, wanted: &Arc<Wanted>) -> Self {
        Self {
            seed,
            stores: Vec::new(),
            profile: Arc::new(Profile { complete: true, ..Profile::default() }),
            writers: Vec::new(),
            digest: Some(Digest::default()),
            digest_on: digest,
            orphans: Orphans::default(),
            wanted: Arc::clone(wanted),
            told: Vec::new(),
            expected: Expected::default(),
            bounds,
            is_owner,
            expiry: None,
            expiring: 0,
            unconfirmed: None,
            version: 0,
            counters: Counters::default(),
            last_seq: None,
            last_seen: 0,
        }
    }

    /// An empty one with the same settings, numbering and counters.
    pub fn emptied(&self) -> Self {
        let mut new = Self::new(self.seed, self.bounds, self.digest_on, self.is_owner, &self.wanted);
        new.expiry = self.expiry;
        new.mark_expiring();
        new.version = self.version + 1;
        new.counters = self.counters;
        new.last_seq = self.last_seq;
        new.last_seen = self.last_seen;
        new
    }

    /// Resident blocks, each hash once whatever its scopes.
    pub fn len(&self) -> usize {
        self.stores.iter().map(Store::len).sum()
    }

    /// Bytes that the structures use.
    pub fn nbytes(&self) -> usize {
        self.stores.iter().map(Store::nbytes).sum::<usize>() + self.orphans.blocks() * 96
    }

    /// The digest of what is resident; `None` where something could not be applied or digests are off.
    pub fn digest(&self) -> Option<[u8; 16]> {
        self.digest.filter(|_| self.digest_on && self.unconfirmed.is_none()).map(Digest::to_bytes)
    }

    /// Says that something is missing: answers are not complete and the digest is not valid.
    pub fn mark_incomplete(&mut self) {
        self.unconfirmed = self.unconfirmed.map(|_| false);
        self.set_complete(false);
        self.digest = None;
    }

    /// Whether this is what a dump says, and nobody has seen the publisher alive since.
    pub fn hold_back(&mut self) {
        self.unconfirmed = Some(self.profile.complete);
        self.set_complete(false);
    }

    /// The publisher still lives the life that the dump tells of.
    pub fn confirm(&mut self) {
        if let Some(complete) = self.unconfirmed.take() {
            self.set_complete(complete);
        }
    }

    /// The rows of a hash, one for each size of blocks.
    fn find(&self, hash: HashRef<'_>) -> impl Iterator<Item = (&Store, Id)> {
        self.stores.iter().filter(move |s| s.takes(hash)).filter_map(move |s| Some((s, s.find(hash)?)))
    }

    /// Where a block of this size belongs; one whose size nobody said (`unit` 0) where its hash is known.
    fn store_for(&mut self, hash: HashRef<'_>, unit: u32) -> &mut Store {
        let mut at = self.stores.iter().position(|s| s.takes(hash) && s.layout.unit == unit);
        if at.is_none() && unit == 0 {
            at = self.stores.iter().position(|s| s.takes(hash) && s.find(hash).is_some());
            at = at.or_else(|| self.stores.iter().position(|s| s.takes(hash)));
        } else if at.is_none() {
            // What is there by hash only may be of any size.
            at = self.stores.iter().position(|s| s.takes(hash) && s.layout.unit == 0);
            if let Some(at) = at {
                self.stores[at].layout.unit = unit;
            }
        }
        let at = at.unwrap_or_else(|| {
            let mut store = Store::new(Layout::of(hash, self.expiry.is_some(), unit), self.seed);
            store.expiring = self.expiring;
            self.stores.push(store);
            self.stores.len() - 1
        });
        &mut self.stores[at]
    }

    /// The content of a block that is, or recently was, resident.
    pub fn content_of(&self, hash: HashRef<'_>, unit: u32) -> Option<ContentKey> {
        let (store, id) = self.find(hash).find(|(s, _)| s.layout.unit == unit)?;
        Some(store.content(id)).filter(|&c| c != 0)
    }

    /// The scopes in which a hash is resident; not those that expire where it was last stored before `cutoff`.
    pub fn mask_of_hash(&self, hash: HashRef<'_>, cutoff: u32) -> u32 {
        self.find(hash).fold(0, |m, (s, id)| m | s.mask_after(id, cutoff))
    }

    /// The scopes in which a content is resident; not those that expire where it was last stored before
    /// `cutoff`.
    #[inline]
    pub fn mask_of_content(&self, content: ContentKey, cutoff: u32) -> u32 {
        self.stores.iter().fold(0, |m, s| m | s.mask_of_content(content, cutoff))
    }

    /// What is older than this has expired at `now`.
    pub fn cutoff(&self, now: u32) -> u32 {
        self.expiry.map_or(0, |e| now.saturating_sub(e.ttl))
    }

    /// Scopes and groups, for matching without a lock.
    pub fn profile(&self) -> Arc<Profile> {
        Arc::clone(&self.profile)
    }

    fn set_complete(&mut self, complete: bool) {
        if self.profile.complete != complete {
            Arc::make_mut(&mut self.profile).complete = complete;
        }
    }

    fn scope_bit(&self, attrs: &Attrs) -> Option<usize> {
        self.profile.scopes.iter().position(|s| attrs.in_scope(&s.scope))
    }

    /// The scope of a store, and its group, made known where they are new.
    fn learn(&mut self, attrs: &Attrs, tiers: &Mutex<Tiers>) -> Option<usize> {
        let (group, known) = (self.profile.new_group(attrs), self.scope_bit(attrs));
        if group.is_some() && self.profile.groups.len() == MAX_SCOPES
            || known.is_none() && self.profile.scopes.len() == MAX_SCOPES
        {
            self.counters.scopes_dropped += 1;
            self.mark_incomplete();
            return None;
        }
        if let Some(group) = group {
            Arc::make_mut(&mut self.profile).groups.push(group);
        }
        if known.is_some() {
            return known;
        }
        let scope = attrs.scope();
        if super::tiers::fold(scope.medium.as_deref()).is_none() {
            self.counters.unknown_media += 1;
        }
        self.writers.push(KeyWriter::new(&scope));
        let tier = tiers.lock().unwrap_or_else(PoisonError::into_inner).of(scope.medium.as_deref());
        let shared = !self.is_owner && is_shared(attrs);
        let profile = Arc::make_mut(&mut self.profile);
        profile.scopes.push(ScopeInfo { scope, tier, shared });
        let bit = profile.scopes.len() - 1;
        self.mark_expiring();
        Some(bit)
    }

    /// Applies events in order. `now` is the caller's time. Returns the parents that are not known here
    /// and may be known of other sources: [`Self::adopt`] takes the answers.
    pub fn apply(&mut self, events: &EventList, tiers: &Mutex<Tiers>, now: u32) -> Vec<Sized> {
        self.last_seen = now;
        self.version += 1;
        if events.overflowed() {
            self.mark_incomplete();
        }
        let mut wanted = Vec::new();
        // Attributes repeat from event to event.
        let mut last = (usize::MAX, EventKind::Cleared, None);
        for v in events.iter() {
            self.counters.events += 1;
            let kind = v.kind();
            if kind == EventKind::Cleared {
                self.clear();
                self.counters.cleared += 1;
                last.0 = usize::MAX;
                continue;
            }
            if (last.0, last.1) != (v.attrs_index(), kind) {
                let bit = match kind {
                    EventKind::Stored => self.learn(v.attrs(), tiers),
                    _ => self.scope_bit(v.attrs()),
                };
                last = (v.attrs_index(), kind, bit);
            }
            match (last.2, kind) {
                (Some(bit), EventKind::Stored) => self.store(&v, bit, now, &mut wanted),
                (Some(bit), _) => self.remove(&v, bit),
                (None, EventKind::Stored) => {}
                (None, _) => self.counters.unknown_removed += v.num_hashes() as u64,
            }
        }
        // Even where a clear came after it: what was left out may have come after the clear.
        if !events.skipped().is_empty() {
            self.counters.skipped += events.skipped().len() as u64;
            self.mark_incomplete();
        }
        wanted
    }

    fn remove(&mut self, v: &EventView<'_>, bit: usize) {
        for hash in v.hashes() {
            let mut stores = self.stores.iter_mut().filter(|s| s.takes(hash));
            if !stores.any(|s| s.find(hash).is_some_and(|id| s.unset(id, 1 << bit) != 0)) {
                self.counters.unknown_removed += 1;
                continue;
            }
            self.counters.removed += 1;
            if self.digest_on
                && let Some(d) = &mut self.digest
            {
                d.sub(self.writers[bit].digest(hash));
            }
        }
    }

    fn store(&mut self, v: &EventView<'_>, bit: usize, now: u32, wanted: &mut Vec<Sized>) {
        let unit = self.profile.unit_of(v.attrs());
        let at = At { unit, bit, now };
        let tokens = match v.tokens() {
            Tokens::Plain(t) if !v.is_irregular() && !t.is_empty() => t,
            _ => {
                if v.attrs().block_size == 0 {
                    self.counters.hash_only += 1;
                } else {
                    self.counters.irregular += 1;
                }
                return self.put_hashes(v, 0, at);
            }
        };
        let extra = ExtraReader::new(v.extra_keys(), v.attrs(), v.parent().is_none());
        let Some(parent) = v.parent() else {
            let root = Root::of(v.attrs(), extra.salt()).key(self.seed);
            return self.put_run(v, tokens, extra, root, at);
        };
        if let Some(content) = self.content_of(parent, unit) {
            return self.put_run(v, tokens, extra, content, at);
        }
        // Resident by hash; what it holds follows from its own first block, where that is known (another
        // tier of it, say), or when its parent's is.
        self.put_hashes(v, 0, at);
        let first = v.hash_at(0);
        if first == parent {
            self.counters.self_parent += 1;
        } else if let Some(content) = self.content_of(first, unit) {
            self.fill_run(v, tokens, 1, content, unit, &mut Vec::new());
        } else {
            wanted.push((parent.to_owned(), unit));
            self.wait(v, (parent.to_owned(), unit));
        }
    }

    /// Makes the blocks from the one at `from` on resident by hash only.
    fn put_hashes(&mut self, v: &EventView<'_>, from: usize, at: At) {
        for hash in v.hashes().skip(from) {
            self.put(hash, at, 0);
        }
    }

    /// Stores a run whose start is known: computes the contents down the chain.
    fn put_run(
        &mut self,
        v: &EventView<'_>,
        tokens: &[u32],
        mut extra: ExtraReader<'_>,
        parent: ContentKey,
        at: At,
    ) {
        let mut content = parent;
        let mut before = v.parent();
        let mut adopt = Vec::new();
        let blocks = tokens.chunks_exact(v.attrs().block_size as usize);
        for (i, (hash, block)) in v.hashes().zip(blocks).enumerate() {
            if before == Some(hash) {
                // Whatever it is, the chain is broken here: this block and the rest count by hash.
                self.counters.self_parent += 1;
                self.put_hashes(v, i, at);
                break;
            }
            content = block_key(content, block, extra.next_block());
            let took = self.put(hash, at, content);
            before = Some(hash);
            if took && self.orphans.want(hash, at.unit) {
                adopt.push(((hash.to_owned(), at.unit), content));
            }
            if took && self.wanted.wants(hash, at.unit) {
                self.told.push(((hash.to_owned(), at.unit), content));
            }
        }
        if !adopt.is_empty() {
            self.adopt(adopt);
        }
    }

    /// Makes one block resident, with its content where that is known; whether it has that content now.
    #[inline]
    fn put(&mut self, hash: HashRef<'_>, at: At, content: ContentKey) -> bool {
        // Resident already under another size: a scope has each hash once.
        let other = self.stores.len() > 1;
        let other = other.then(|| self.stores.iter().position(|s| s.has(hash, 1 << at.bit))).flatten();
        let store = match other {
            Some(other) => &mut self.stores[other],
            None => self.store_for(hash, at.unit),
        };
        let set = store.put(hash, 1 << at.bit, content, at.now);
        self.counters.conflicts += u64::from(set.clash);
        if content != 0 {
            self.expected.came(content);
        }
        if !set.new {
            self.counters.duplicate_stored += 1;
            return !set.clash;
        }
        self.counters.stored += 1;
        if self.digest_on
            && let Some(d) = &mut self.digest
        {
            d.add(self.writers[at.bit].digest(hash));
        }
        !set.clash
    }

    fn wait(&mut self, v: &EventView<'_>, parent: Sized) {
        let mut event = EventData::new();
        if event.push_view(*v).is_err() {
            return self.mark_incomplete();
        }
        self.counters.orphaned += v.num_hashes() as u64;
        let dropped = self.orphans.push(event, parent, self.bounds.orphan_blocks);
        for orphan in dropped {
            let v = orphan.event.view(0);
            self.counters.orphans_dropped += v.num_hashes() as u64;
            // What has gone, or is known by another way, is no loss.
            let unknown = |(s, id): (&Store, Id)| s.mask(id) != 0 && s.content(id) == 0;
            if v.hashes().any(|h| self.find(h).any(unknown)) {
                self.mark_incomplete();
            }
        }
    }

    /// Gives orphans of these parents their contents, and their own orphans after them.
    pub fn adopt(&mut self, mut known: Vec<(Sized, ContentKey)>) {
        while let Some((parent, content)) = known.pop() {
            for Orphan { event, .. } in self.orphans.take(&parent) {
                let v = event.view(0);
                self.counters.adopted += v.num_hashes() as u64;
                if let Tokens::Plain(tokens) = v.tokens() {
                    self.fill_run(&v, tokens, 0, content, parent.1, &mut known);
                }
            }
        }
    }

    /// Sets the contents of a run, from its block `from` on, that is (as far as it still is) resident.
    fn fill_run(
        &mut self,
        v: &EventView<'_>,
        tokens: &[u32],
        from: usize,
        parent: ContentKey,
        unit: u32,
        known: &mut Vec<(Sized, ContentKey)>,
    ) {
        let mut extra = ExtraReader::new(v.extra_keys(), v.attrs(), false);
        let mut content = parent;
        let mut before = v.parent();
        let blocks = tokens.chunks_exact(v.attrs().block_size as usize);
        for (i, (hash, block)) in v.hashes().zip(blocks).enumerate() {
            let keys = extra.next_block();
            if i < from {
                before = Some(hash);
                continue;
            }
            if before == Some(hash) {
                self.counters.self_parent += 1;
                break;
            }
            before = Some(hash);
            content = block_key(content, block, keys);
            let store = self.store_for(hash, unit);
            let mut took = false;
            if let Some(id) = store.find(hash) {
                let set = store.set(id, 0, content, 0);
                took = !set.clash;
                self.counters.conflicts += u64::from(set.clash);
            }
            if took && self.orphans.want(hash, unit) {
                known.push(((hash.to_owned(), unit), content));
            }
            if took && self.wanted.wants(hash, unit) {
                self.told.push(((hash.to_owned(), unit), content));
            }
        }
    }

    /// Nothing is resident any more; what is known from here on is complete.
    pub fn clear(&mut self) {
        self.version += 1;
        self.stores.clear();
        self.orphans = Orphans::default();
        self.expected.clear();
        self.digest = Some(Digest::default());
        self.unconfirmed = None;
        self.set_complete(true);
        if self.profile.scopes.len() == MAX_SCOPES || self.profile.groups.len() == MAX_SCOPES {
            // Whoever needed so many may need others from now on.
            self.profile = Arc::new(Profile { complete: true, ..Profile::default() });
            self.writers.clear();
            self.mark_expiring();
        }
    }

    /// The bits of the scopes that `wanted` names.
    pub fn bits_of(&self, wanted: impl Fn(&ScopeInfo) -> bool) -> u32 {
        let scopes = self.profile.scopes.iter().enumerate();
        scopes.filter(|(_, s)| wanted(s)).fold(0, |m, (i, _)| m | 1 << i)
    }

    /// Forgets, in one piece of every store, what is resident in `bits` and was last stored before
    /// `before` (`None`: whenever). Not something that the source said, so the digest is no longer
    /// comparable. Returns the number of blocks.
    pub fn forget(&mut self, piece: usize, bits: u32, before: Option<u32>) -> usize {
        let mut gone = 0;
        for store in &mut self.stores {
            for id in (0..store.rows_in(piece)).map(|i| Id::new(piece, i)) {
                let old = before.is_none_or(|b| store.stored_at(id).is_some_and(|t| t < b));
                if old && store.unset(id, bits) != 0 {
                    gone += 1;
                }
            }
        }
        if gone > 0 {
            self.version += 1;
            self.digest = None;
        }
        gone
    }

    /// Sets how long blocks live, and where; those that are there live from now on.
    pub fn set_expiry(&mut self, expiry: Option<Expiry>, now: u32) {
        self.expiry = expiry;
        for store in self.stores.iter_mut().filter(|s| s.layout.timed != expiry.is_some()) {
            *store = store.with_time(expiry.is_some(), now);
        }
        self.mark_expiring();
    }

    /// Lets every store know which of its scopes expire.
    fn mark_expiring(&mut self) {
        self.expiring = match self.expiry {
            None => 0,
            Some(e) if e.tiers == Expiry::ALL => u32::MAX,
            Some(e) => self.bits_of(|s| e.covers(s.tier)),
        };
        for store in &mut self.stores {
            store.expiring = self.expiring;
        }
    }

    /// Puts back what a dump says of scopes and groups; before its rows.
    pub(super) fn restore_profile(&mut self, profile: Profile) {
        self.writers = profile.scopes.iter().map(|s| KeyWriter::new(&s.scope)).collect();
        self.profile = Arc::new(profile);
        self.mark_expiring();
    }

    /// The digest of all rows, computed anew.
    pub(super) fn digest_of_rows(&mut self) -> Digest {
        let mut sum = Digest::default();
        for store in &self.stores {
            for row in store.resident() {
                let hash = store.layout.hash(row);
                for (_, w) in self.writers.iter_mut().enumerate().filter(|(i, _)| mask(row) >> i & 1 == 1) {
                    sum.add(w.digest(hash));
                }
            }
        }
        sum
    }

    /// How many blocks wait for a parent.
    pub fn waiting(&self) -> usize {
        self.orphans.blocks()
    }
}
