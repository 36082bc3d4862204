//! One source: what its stream says is resident, and what its blocks hold.

use std::sync::Arc;

use super::content::{ContentHasher, ContentKey, read_extra};
use super::orphans::{Orphan, Orphans};
use super::profile::{GroupInfo, Profile, ScopeInfo};
use super::store::{Id, Store};
use super::tiers::Tiers;
use crate::events::{Attrs, EventKind, EventList, EventView, Tokens};
use crate::hash::{BlockHash, HashRef};
use crate::resident::{Digest, KeyWriter};

/// Most scopes (medium, group, locality, ownership) of one source; a bit of a mask each.
pub const MAX_SCOPES: usize = 32;

/// Bounds of what one source may keep waiting.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Blocks of stores whose parent is not known.
    pub orphan_blocks: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { orphan_blocks: 65_536 }
    }
}

/// Counters of one source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Events applied.
    pub events: u64,
    /// Blocks that became resident in a scope.
    pub stored: u64,
    /// Blocks that ceased to be.
    pub removed: u64,
    /// Removals of blocks that were not resident.
    pub unknown_removed: u64,
    /// Stores of blocks that were resident in that scope.
    pub duplicate_stored: u64,
    /// Clears.
    pub cleared: u64,
    /// Irregular events, used by hash only.
    pub irregular: u64,
    /// Stores without tokens: another tier of known blocks.
    pub hash_only: u64,
    /// Blocks that named a hash known with other tokens; the first content stays.
    pub conflicts: u64,
    /// Blocks named as their own parent, or twice in one store.
    pub self_parent: u64,
    /// Blocks whose parent was not known when they came.
    pub orphaned: u64,
    /// Orphans that found their parent.
    pub adopted: u64,
    /// Orphans that were given up since too many waited.
    pub orphans_dropped: u64,
    /// Keys that could not be kept since the source uses too many scopes.
    pub scopes_dropped: u64,
    /// Media that no rule folds.
    pub unknown_media: u64,
    /// Events that the decoder left out.
    pub skipped: u64,
}

impl Counters {
    /// Names and values.
    pub fn items(&self) -> [(&'static str, u64); 16] {
        [
            ("events", self.events),
            ("stored", self.stored),
            ("removed", self.removed),
            ("unknown_removed", self.unknown_removed),
            ("duplicate_stored", self.duplicate_stored),
            ("cleared", self.cleared),
            ("irregular", self.irregular),
            ("hash_only", self.hash_only),
            ("conflicts", self.conflicts),
            ("self_parent", self.self_parent),
            ("orphaned", self.orphaned),
            ("adopted", self.adopted),
            ("orphans_dropped", self.orphans_dropped),
            ("scopes_dropped", self.scopes_dropped),
            ("unknown_media", self.unknown_media),
            ("skipped", self.skipped),
        ]
    }
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Shard {
    seed: u64,
    stores: Vec<Store>,
    profile: Arc<Profile>,
    writers: Vec<KeyWriter>,
    hasher: ContentHasher,
    digest: Option<Digest>,
    digest_on: bool,
    orphans: Orphans,
    bounds: Bounds,
    /// Whether this stands for the owner of a shared tier, whose blocks count here.
    is_owner: bool,
    pub(super) counters: Counters,
    pub(super) last_seq: Option<u64>,
    pub(super) last_seen: u32,
}

/// Whether an event speaks of a tier that belongs to an owner of its own and not to the engine.
pub fn is_shared(attrs: &Attrs) -> bool {
    attrs.ownership.is_some() || attrs.locality.as_deref().is_some_and(|l| l.eq_ignore_ascii_case("remote"))
}

impl Shard {
    /// An empty source. `seed` is the index's.
    pub fn new(seed: u64, bounds: Bounds, digest: bool, is_owner: bool) -> Self {
        Self {
            seed,
            stores: Vec::new(),
            profile: Arc::new(Profile { complete: true, ..Profile::default() }),
            writers: Vec::new(),
            hasher: ContentHasher::new(seed),
            digest: Some(Digest::default()),
            digest_on: digest,
            orphans: Orphans::default(),
            bounds,
            is_owner,
            counters: Counters::default(),
            last_seq: None,
            last_seen: 0,
        }
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
        if self.digest_on { self.digest.map(Digest::to_bytes) } else { None }
    }

    /// Says that something is missing: answers are not complete and the digest is not valid.
    pub fn mark_incomplete(&mut self) {
        self.set_complete(false);
        self.digest = None;
    }

    fn store_of(&mut self, hash: HashRef<'_>) -> usize {
        if let Some(i) = self.stores.iter().position(|s| s.takes(hash)) {
            return i;
        }
        let width = if let HashRef::Bytes(b) = hash { b.len() } else { 0 };
        self.stores.push(Store::new(width, self.seed));
        self.stores.len() - 1
    }

    fn find(&self, hash: HashRef<'_>) -> Option<(usize, Id)> {
        let s = self.stores.iter().position(|s| s.takes(hash))?;
        Some((s, self.stores[s].find(hash)?))
    }

    /// The content of a block that is, or recently was, resident.
    pub fn content_of(&self, hash: HashRef<'_>) -> Option<ContentKey> {
        let (s, id) = self.find(hash)?;
        Some(self.stores[s].entry(id).content).filter(|&c| c != 0)
    }

    /// The scopes in which a hash is resident.
    pub fn mask_of_hash(&self, hash: HashRef<'_>) -> u32 {
        self.find(hash).map_or(0, |(s, id)| self.stores[s].entry(id).mask)
    }

    /// The scopes in which a content is resident.
    #[inline]
    pub fn mask_of_content(&self, content: ContentKey) -> u32 {
        self.stores.iter().fold(0, |m, s| m | s.mask_of_content(content))
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

    fn scope_bit(&mut self, attrs: &Attrs, tiers: &mut Tiers) -> Option<usize> {
        if let Some(i) = self.profile.scopes.iter().position(|s| attrs.in_scope(&s.scope)) {
            return Some(i);
        }
        if self.profile.scopes.len() == MAX_SCOPES {
            self.counters.scopes_dropped += 1;
            self.mark_incomplete();
            return None;
        }
        let scope = attrs.scope();
        if super::tiers::fold(scope.medium.as_deref()).is_none() {
            self.counters.unknown_media += 1;
        }
        self.writers.push(KeyWriter::new(&scope));
        let tier = tiers.of(scope.medium.as_deref());
        let shared = !self.is_owner && is_shared(attrs);
        let profile = Arc::make_mut(&mut self.profile);
        profile.scopes.push(ScopeInfo { scope, tier, shared });
        Some(profile.scopes.len() - 1)
    }

    fn learn_group(&mut self, attrs: &Attrs) {
        if let Some(group) = GroupInfo::of(attrs)
            && self.profile.groups.iter().all(|g| g.group != group.group)
        {
            Arc::make_mut(&mut self.profile).groups.push(group);
        }
    }

    /// Applies events in order. `now` is the caller's seconds. Returns the parents that are not known
    /// here and may be known of other sources: [`Self::adopt`] takes the answers.
    pub fn apply(&mut self, events: &EventList, tiers: &mut Tiers, now: u32) -> Vec<BlockHash> {
        self.last_seen = now;
        if !events.skipped().is_empty() || events.overflowed() {
            self.counters.skipped += events.skipped().len() as u64;
            self.mark_incomplete();
        }
        let mut wanted = Vec::new();
        let mut last_scope = (usize::MAX, None);
        for (i, v) in events.iter().enumerate() {
            self.counters.events += 1;
            if v.kind() == EventKind::Cleared {
                self.clear();
                self.counters.cleared += 1;
                continue;
            }
            if last_scope.0 != v.attrs_index() {
                let bit = self.scope_bit(v.attrs(), tiers);
                if v.kind() == EventKind::Stored {
                    self.learn_group(v.attrs());
                }
                last_scope = (v.attrs_index(), bit);
            }
            let Some(bit) = last_scope.1 else { continue };
            if v.kind() == EventKind::Removed {
                self.remove(&v, bit);
            } else {
                self.store(&v, bit, now, &mut wanted, || events.slice(i..i + 1));
            }
        }
        wanted
    }

    fn remove(&mut self, v: &EventView<'_>, bit: usize) {
        for hash in v.hashes() {
            let had = match self.find(hash) {
                Some((s, id)) => self.stores[s].unset(id, 1 << bit),
                None => 0,
            };
            if had == 0 {
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

    fn store(
        &mut self,
        v: &EventView<'_>,
        bit: usize,
        now: u32,
        wanted: &mut Vec<BlockHash>,
        event: impl Fn() -> EventList,
    ) {
        let tokens = match v.tokens() {
            Tokens::Plain(t) if !v.is_irregular() && !t.is_empty() => t,
            _ => {
                if v.attrs().block_size == 0 {
                    self.counters.hash_only += 1;
                } else {
                    self.counters.irregular += 1;
                }
                for hash in v.hashes() {
                    self.put(hash, bit, 0, now);
                }
                return;
            }
        };
        let parent = match v.parent() {
            None => None,
            Some(p) if self.content_of(p).is_some() => self.content_of(p),
            Some(p) => {
                // Resident by hash; its content follows when the parent's is known.
                for hash in v.hashes() {
                    self.put(hash, bit, 0, now);
                }
                if v.hashes().next() == Some(p) {
                    self.counters.self_parent += 1;
                } else {
                    wanted.push(p.to_owned());
                    self.wait(event(), p.to_owned(), v.num_hashes());
                }
                return;
            }
        };
        self.put_run(v, tokens, parent, bit, now);
    }

    /// Stores a run whose start is known: computes the contents down the chain.
    fn put_run(
        &mut self,
        v: &EventView<'_>,
        tokens: &[u32],
        parent: Option<ContentKey>,
        bit: usize,
        now: u32,
    ) {
        let attrs = v.attrs();
        let extra = read_extra(v.extra_keys(), attrs, v.parent().is_none());
        let mut content =
            parent.unwrap_or_else(|| self.hasher.root(attrs.lora_name.as_deref(), extra.salt.as_deref()));
        let size = attrs.block_size as usize;
        let mut before = v.parent();
        let mut adopt = Vec::new();
        for (i, (hash, block)) in v.hashes().zip(tokens.chunks_exact(size)).enumerate() {
            if before == Some(hash) {
                self.counters.self_parent += 1;
                break;
            }
            content = self.hasher.block(content, block, extra.blocks.get(i).map_or(&[], Vec::as_slice));
            content = self.put(hash, bit, content, now);
            before = Some(hash);
            if self.orphans.want(hash) {
                adopt.push((hash.to_owned(), content));
            }
        }
        if !adopt.is_empty() {
            self.adopt(adopt);
        }
    }

    /// Makes one block resident; returns the content that it is known by.
    #[inline]
    fn put(&mut self, hash: HashRef<'_>, bit: usize, content: ContentKey, now: u32) -> ContentKey {
        let s = self.store_of(hash);
        let store = &mut self.stores[s];
        let id = store.find_or_insert(hash);
        let (new, content) = match store.set(id, 1 << bit, content, now) {
            Ok(new) => (new, content),
            Err((new, known)) => {
                self.counters.conflicts += 1;
                (new, known)
            }
        };
        if new == 0 {
            self.counters.duplicate_stored += 1;
        } else {
            self.counters.stored += 1;
            if self.digest_on
                && let Some(d) = &mut self.digest
            {
                d.add(self.writers[bit].digest(hash));
            }
        }
        content
    }

    fn wait(&mut self, event: EventList, parent: BlockHash, blocks: usize) {
        self.counters.orphaned += blocks as u64;
        let dropped = self.orphans.push(event, parent, self.bounds.orphan_blocks);
        if dropped > 0 {
            self.counters.orphans_dropped += dropped as u64;
            self.mark_incomplete();
        }
    }

    /// Gives orphans of these parents their contents, and their own orphans after them.
    pub fn adopt(&mut self, mut known: Vec<(BlockHash, ContentKey)>) {
        while let Some((parent, content)) = known.pop() {
            for Orphan { event, .. } in self.orphans.take(&parent) {
                let v = event.view(0);
                self.counters.adopted += v.num_hashes() as u64;
                if let Tokens::Plain(tokens) = v.tokens() {
                    self.fill_run(&v, tokens, content, &mut known);
                }
            }
        }
    }

    /// Sets the contents of a run that is (as far as it still is) resident.
    fn fill_run(
        &mut self,
        v: &EventView<'_>,
        tokens: &[u32],
        parent: ContentKey,
        known: &mut Vec<(BlockHash, ContentKey)>,
    ) {
        let extra = read_extra(v.extra_keys(), v.attrs(), false);
        let mut content = parent;
        for (i, (hash, block)) in
            v.hashes().zip(tokens.chunks_exact(v.attrs().block_size as usize)).enumerate()
        {
            content = self.hasher.block(content, block, extra.blocks.get(i).map_or(&[], Vec::as_slice));
            if let Some((s, id)) = self.find(hash) {
                let stored_at = self.stores[s].entry(id).stored_at;
                match self.stores[s].set(id, 0, content, stored_at) {
                    Ok(_) => {}
                    Err((_, old)) => {
                        self.counters.conflicts += 1;
                        content = old;
                    }
                }
            }
            if self.orphans.want(hash) {
                known.push((hash.to_owned(), content));
            }
        }
    }

    /// Nothing is resident any more; what is known from here on is complete.
    pub fn clear(&mut self) {
        self.stores.iter_mut().for_each(Store::clear);
        self.orphans = Orphans::default();
        self.digest = Some(Digest::default());
        self.set_complete(true);
    }

    /// Forgets what is resident in scopes that `drop` names; not something the source said, so the
    /// digest is no longer comparable. Returns the number of blocks.
    pub fn forget_scopes(&mut self, drop: impl Fn(&ScopeInfo) -> bool) -> usize {
        let bits =
            self.profile.scopes.iter().enumerate().filter(|(_, s)| drop(s)).fold(0, |m, (i, _)| m | 1 << i);
        self.forget_where(bits, |_| true)
    }

    /// Forgets blocks that were last stored before `before`. Returns their number.
    pub fn expire(&mut self, before: u32) -> usize {
        self.forget_where(u32::MAX, |stored_at| stored_at < before)
    }

    fn forget_where(&mut self, bits: u32, old: impl Fn(u32) -> bool) -> usize {
        let mut n = 0;
        for store in &mut self.stores {
            let gone: Vec<Id> = store
                .iter()
                .filter(|&id| store.entry(id).mask & bits != 0 && old(store.entry(id).stored_at))
                .collect();
            n += gone.len();
            for id in gone {
                store.unset(id, bits);
            }
        }
        if n > 0 {
            self.digest = None;
        }
        n
    }

    /// All resident entries: hash, content (0 where unknown), scopes, time.
    pub fn entries(&self) -> impl Iterator<Item = (HashRef<'_>, ContentKey, u32, u32)> + '_ {
        self.stores.iter().flat_map(|s| {
            s.iter().map(move |id| {
                let e = s.entry(id);
                (s.hash(id), e.content, e.mask, e.stored_at)
            })
        })
    }

    /// Puts back an entry of a dump.
    pub(super) fn restore(&mut self, hash: HashRef<'_>, content: ContentKey, mask: u32, stored_at: u32) {
        let s = self.store_of(hash);
        let id = self.stores[s].find_or_insert(hash);
        _ = self.stores[s].set(id, mask, content, stored_at);
    }

    /// Puts back what a dump says of scopes and groups; before its entries.
    pub(super) fn restore_profile(&mut self, profile: Profile) {
        self.writers = profile.scopes.iter().map(|s| KeyWriter::new(&s.scope)).collect();
        self.profile = Arc::new(profile);
    }

    pub(super) fn set_digest(&mut self, digest: Option<Digest>) {
        self.digest = digest;
    }

    /// How many blocks wait for a parent.
    pub fn waiting(&self) -> usize {
        self.orphans.blocks()
    }
}
