//! The set that a reader rebuilds, and the digest that proves it.

use hashbrown::{HashMap, HashSet};

use super::digest::{Digest, KeyWriter};
use crate::error::EventsError;
use crate::events::{
    Attrs, CommonParts, EventData, EventKind, EventList, EventView, HashForm, Hashes, Scope,
};
use crate::hash::{HashRef, le_u64};

type Set<K> = HashSet<K, foldhash::fast::RandomState>;

/// Width of the digests that engines send today; these lie in the table without a pointer each.
const DIGEST: usize = 32;

/// Empty scopes are swept when there are more than this many scopes, then at each doubling.
const SWEEP_AT: usize = 64;

/// What applying events met that a contiguous stream of residency never holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ApplyCounts {
    /// Stores of a key that was resident already.
    pub duplicate_stores: u64,
    /// Removals of a key that was not resident.
    pub unknown_removals: u64,
}

/// The keys of one scope. The three tables differ in how a key is stored, never in meaning.
#[derive(Clone, Debug)]
struct ScopeSet {
    scope: Scope,
    writer: KeyWriter,
    ints: Set<u64>,
    digests: Set<[u8; DIGEST]>,
    others: Set<Box<[u8]>>,
}

impl ScopeSet {
    fn new(scope: Scope) -> Self {
        Self {
            writer: KeyWriter::new(&scope),
            scope,
            ints: Set::default(),
            digests: Set::default(),
            others: Set::default(),
        }
    }

    fn len(&self) -> usize {
        self.ints.len() + self.digests.len() + self.others.len()
    }

    fn nbytes(&self) -> usize {
        self.ints.allocation_size()
            + self.digests.allocation_size()
            + self.others.allocation_size()
            + self.others.iter().map(|k| k.len()).sum::<usize>()
    }

    fn clear(&mut self) {
        self.ints.clear();
        self.digests.clear();
        self.others.clear();
    }

    #[inline]
    fn insert(&mut self, hash: HashRef<'_>) -> bool {
        match hash {
            HashRef::Bytes(b) => match <&[u8; DIGEST]>::try_from(b) {
                Ok(d) => self.digests.insert(*d),
                Err(_) => !self.others.contains(b) && self.others.insert(b.into()),
            },
            h => self.ints.insert(h.bits().unwrap_or_default()),
        }
    }

    #[inline]
    fn remove(&mut self, hash: HashRef<'_>) -> bool {
        match hash {
            HashRef::Bytes(b) => match <&[u8; DIGEST]>::try_from(b) {
                Ok(d) => self.digests.remove(d),
                Err(_) => self.others.remove(b),
            },
            h => self.ints.remove(&h.bits().unwrap_or_default()),
        }
    }

    fn contains(&self, hash: HashRef<'_>) -> bool {
        match hash {
            HashRef::Bytes(b) => match <&[u8; DIGEST]>::try_from(b) {
                Ok(d) => self.digests.contains(d),
                Err(_) => self.others.contains(b),
            },
            h => self.ints.contains(&h.bits().unwrap_or_default()),
        }
    }

    fn iter(&self) -> impl Iterator<Item = HashRef<'_>> {
        self.ints
            .iter()
            .map(|&v| HashRef::Uint(v))
            .chain(self.digests.iter().map(|d| HashRef::Bytes(d)))
            .chain(self.others.iter().map(|b| HashRef::Bytes(b)))
    }
}

/// The resident keys `(hash, medium, group_idx, locality, ownership)` of one source.
///
/// A store adds its keys, a removal takes them out, a clear empties the set; the digest is kept
/// along the way. Repeating a store changes nothing: this is a set, not a count of copies. Hashes of
/// irregular events count like any others.
#[derive(Clone, Debug)]
pub struct ResidentSet {
    scopes: Vec<ScopeSet>,
    by_scope: HashMap<Scope, u32, foldhash::fast::RandomState>,
    sweep_at: usize,
    digest: Digest,
    counts: ApplyCounts,
}

impl Default for ResidentSet {
    fn default() -> Self {
        Self {
            scopes: Vec::new(),
            by_scope: HashMap::default(),
            sweep_at: SWEEP_AT,
            digest: Digest::default(),
            counts: ApplyCounts::default(),
        }
    }
}

impl ResidentSet {
    /// An empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.scopes.iter().map(ScopeSet::len).sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.scopes.iter().all(|s| s.len() == 0)
    }

    /// The digest of the set.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// What was met since the set was made; clears do not reset it.
    pub fn counts(&self) -> ApplyCounts {
        self.counts
    }

    /// Bytes held by the tables.
    pub fn nbytes(&self) -> usize {
        self.scopes.iter().map(ScopeSet::nbytes).sum()
    }

    /// Applies events in order; says whether there was a clear among them, which makes the set known
    /// whatever was missed before.
    pub fn apply(&mut self, events: &EventList) -> bool {
        // Attributes repeat from event to event: each entry of the table is looked up once.
        const UNKNOWN: u32 = u32::MAX;
        let mut cleared = false;
        let mut cache = vec![UNKNOWN; events.attrs_table().len()];
        for view in events.iter() {
            let kind = view.kind();
            if kind == EventKind::Cleared {
                self.clear();
                cleared = true;
                // Clearing may drop scopes.
                cache.fill(UNKNOWN);
                continue;
            }
            let slot = &mut cache[view.attrs_index()];
            if *slot == UNKNOWN {
                *slot = match self.find(view.attrs()) {
                    Some(at) => at,
                    None if kind == EventKind::Stored => self.add_scope(view.attrs().scope()),
                    None => {
                        self.counts.unknown_removals += view.num_hashes() as u64;
                        continue;
                    }
                };
            }
            let at = *slot as usize;
            if kind == EventKind::Stored { self.store(at, &view) } else { self.remove(at, &view) }
        }
        if self.scopes.len() > self.sweep_at {
            self.sweep();
        }
        cleared
    }

    /// Empties the set.
    pub fn clear(&mut self) {
        self.digest = Digest::default();
        if self.scopes.len() > SWEEP_AT {
            self.scopes.clear();
            self.by_scope.clear();
            self.sweep_at = SWEEP_AT;
        }
        for s in &mut self.scopes {
            s.clear();
        }
    }

    /// Whether the key is resident.
    pub fn contains(&self, hash: HashRef<'_>, scope: &Scope) -> bool {
        self.by_scope.get(scope).is_some_and(|&at| self.scopes[at as usize].contains(hash))
    }

    /// Whether the hash is resident in any scope.
    pub fn contains_anywhere(&self, hash: HashRef<'_>) -> bool {
        self.scopes.iter().any(|s| s.contains(hash))
    }

    /// All keys, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (HashRef<'_>, &Scope)> {
        self.scopes.iter().flat_map(|s| s.iter().map(move |h| (h, &s.scope)))
    }

    /// Whether both hold the same keys.
    pub fn same(&self, other: &Self) -> bool {
        self.digest == other.digest
            && self.len() == other.len()
            && self.iter().all(|(h, scope)| other.contains(h, scope))
    }

    /// The keys of `self` that `other` has not, as removals: one event a scope, hashes sorted.
    pub fn difference(&self, other: &Self) -> Result<EventList, EventsError> {
        let mut data = EventData::new();
        for s in &self.scopes {
            let theirs = other.by_scope.get(&s.scope).map(|&at| &other.scopes[at as usize]);
            let mut hashes: Vec<HashRef<'_>> =
                s.iter().filter(|h| theirs.is_none_or(|t| !t.contains(*h))).collect();
            if hashes.is_empty() {
                continue;
            }
            hashes.sort_unstable_by_key(|h| match *h {
                HashRef::Bytes(b) => (1, 0, b),
                h => (0, h.bits().unwrap_or_default(), &[][..]),
            });
            let id = data.intern(&Attrs::of_scope(&s.scope));
            data.push_removed(id, Hashes::Mixed(&hashes), &CommonParts::default())?;
        }
        Ok(data.into())
    }

    fn find(&self, attrs: &Attrs) -> Option<u32> {
        // Real streams have one to four scopes; many only happen in hostile ones.
        if self.scopes.len() <= 8 {
            return self.scopes.iter().position(|s| attrs.in_scope(&s.scope)).map(|at| at as u32);
        }
        self.by_scope.get(&attrs.scope()).copied()
    }

    fn add_scope(&mut self, scope: Scope) -> u32 {
        let at = self.scopes.len() as u32;
        self.by_scope.insert(scope.clone(), at);
        self.scopes.push(ScopeSet::new(scope));
        at
    }

    fn sweep(&mut self) {
        self.scopes.retain(|s| s.len() > 0);
        self.by_scope = self.scopes.iter().enumerate().map(|(at, s)| (s.scope.clone(), at as u32)).collect();
        self.sweep_at = SWEEP_AT.max(self.scopes.len() * 2);
    }

    fn store(&mut self, at: usize, view: &EventView<'_>) {
        let Self { scopes, digest, counts, .. } = self;
        let s = &mut scopes[at];
        for_each_hash(view, |hash| {
            if s.insert(hash) {
                digest.add(s.writer.digest(hash));
            } else {
                counts.duplicate_stores += 1;
            }
        });
    }

    fn remove(&mut self, at: usize, view: &EventView<'_>) {
        let Self { scopes, digest, counts, .. } = self;
        let s = &mut scopes[at];
        for_each_hash(view, |hash| {
            if s.remove(hash) {
                digest.sub(s.writer.digest(hash));
            } else {
                counts.unknown_removals += 1;
            }
        });
    }
}

/// The hashes of an event; the two common forms without a branch on the form for each.
#[inline]
fn for_each_hash(view: &EventView<'_>, mut f: impl FnMut(HashRef<'_>)) {
    let (form, width, bytes) = view.raw_hashes();
    match form {
        HashForm::Uint | HashForm::Int => bytes.chunks_exact(8).for_each(|b| f(HashRef::Uint(le_u64(b)))),
        HashForm::Bytes if width > 0 => bytes.chunks_exact(width).for_each(|b| f(HashRef::Bytes(b))),
        _ => view.hashes().for_each(f),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::events::{ExtraKeys, StoredParts, Tokens};
    use crate::resident::key_digest;

    fn attrs(medium: Option<&str>, group: Option<i64>) -> Attrs {
        Attrs { medium: medium.map(Into::into), group_idx: group, ..Attrs::default() }
    }

    fn push(data: &mut EventData, stored: bool, attrs: &Attrs, hashes: &[HashRef<'_>]) {
        let id = data.intern(attrs);
        let common = CommonParts::default();
        if stored {
            let parts = StoredParts {
                hashes: Hashes::Mixed(hashes),
                parent: None,
                tokens: Tokens::Plain(&[]),
                extra_keys: ExtraKeys::Absent,
                lookahead: None,
                common,
            };
            data.push_stored(id, &parts).unwrap();
        } else {
            data.push_removed(id, Hashes::Mixed(hashes), &common).unwrap();
        }
    }

    #[test]
    fn random_streams_agree_with_an_ordered_set() {
        let mut state = 7_u64;
        let mut rng = |n: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % n
        };
        let wide: Vec<[u8; 32]> = (0..20).map(|i| [i; 32]).collect();
        let (mut set, mut naive) = (ResidentSet::new(), BTreeSet::new());
        let (mut duplicates, mut unknown) = (0, 0);
        for _ in 0..400 {
            let mut data = EventData::new();
            for _ in 0..rng(6) {
                if rng(60) == 0 {
                    data.push_cleared(&CommonParts::default()).unwrap();
                    naive.clear();
                    continue;
                }
                let (stored, group) = (rng(2) == 0, rng(30));
                let a = attrs(Some("GPU"), Some(group.cast_signed() / 10));
                let mut hashes = Vec::new();
                for _ in 0..rng(4) {
                    let i = rng(20);
                    let key = (i, rng(3), group / 10);
                    hashes.push(match key.1 {
                        0 => HashRef::Int(-i.cast_signed() - 1),
                        1 => HashRef::Bytes(&wide[i as usize]),
                        _ => HashRef::Bytes(&wide[i as usize][..5]),
                    });
                    match (stored, naive.contains(&key)) {
                        (true, false) => drop(naive.insert(key)),
                        (false, true) => drop(naive.remove(&key)),
                        (true, true) => duplicates += 1,
                        (false, false) => unknown += 1,
                    }
                }
                push(&mut data, stored, &a, &hashes);
            }
            set.apply(&data.into());
            assert_eq!(set.len(), naive.len());
            let mut digest = Digest::default();
            set.iter().for_each(|(h, scope)| digest.add(key_digest(h, scope)));
            assert_eq!(set.digest(), digest);
        }
        assert_eq!(set.counts(), ApplyCounts { duplicate_stores: duplicates, unknown_removals: unknown });
        for &(i, form, group) in &naive {
            let hash = match form {
                0 => HashRef::Uint((-i.cast_signed() - 1).cast_unsigned()),
                1 => HashRef::Bytes(&wide[i as usize]),
                _ => HashRef::Bytes(&wide[i as usize][..5]),
            };
            assert!(set.contains(hash, &attrs(Some("GPU"), Some(group.cast_signed())).scope()));
        }
    }

    #[test]
    fn the_difference_names_keys_by_scope() {
        let (gpu, cpu) = (attrs(Some("GPU"), None), attrs(Some("CPU"), None));
        let mut data = EventData::new();
        push(&mut data, true, &gpu, &[HashRef::Uint(2), HashRef::Uint(1)]);
        push(&mut data, true, &cpu, &[HashRef::Uint(1)]);
        let mut a = ResidentSet::new();
        a.apply(&data.into());
        let mut b = a.clone();
        assert!(a.same(&b));
        let mut data = EventData::new();
        push(&mut data, false, &gpu, &[HashRef::Uint(1), HashRef::Uint(2)]);
        b.apply(&data.into());
        assert!(!a.same(&b));
        let missing = a.difference(&b).unwrap();
        assert_eq!(missing.len(), 1);
        assert!(missing.view(0).hashes().eq([HashRef::Uint(1), HashRef::Uint(2)]));
        assert!(b.difference(&a).unwrap().is_empty());
    }

    #[test]
    fn scopes_that_come_and_go_do_not_stay() {
        let mut set = ResidentSet::new();
        for i in 0..1000 {
            let a = attrs(Some("GPU"), Some(i));
            let mut data = EventData::new();
            push(&mut data, true, &a, &[HashRef::Uint(1)]);
            push(&mut data, false, &a, &[HashRef::Uint(1)]);
            set.apply(&data.into());
        }
        assert!(set.is_empty() && set.scopes.len() <= SWEEP_AT + 1);
        assert_eq!(set.digest(), Digest::default());
    }
}
