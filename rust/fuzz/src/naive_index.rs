//! The oracle for the index: maps and lists, and lengths found token by token.
//!
//! Contents are numbers from one table of `(what is before it, tokens, extra keys)`, compared as such. The
//! rules are those of `kvevents.testing.NaivePrefixIndex`, with a clock and upkeep.

use std::collections::{BTreeMap, BTreeSet};

use kvevents_core::events::Scope;
use kvevents_core::index::fold_medium;

/// A hash as a key: integers by their bits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hash {
    Int(u64),
    Bytes(Vec<u8>),
}

/// A hash, and the size of the blocks into which the prefix before it is cut: one may end several cuts.
pub type Sized = (Hash, u32);

/// A store.
#[derive(Clone, Debug)]
pub struct Stored {
    pub hashes: Vec<Hash>,
    pub parent: Option<Hash>,
    pub tokens: Vec<u32>,
    pub block_size: u32,
    pub scope: usize,
    pub window: Option<u32>,
    pub lora: Option<&'static str>,
    pub salt: Option<&'static str>,
    /// Per block: an identifier that is neither LoRA name nor salt.
    pub extra: Vec<Option<u8>>,
}

/// One event.
#[derive(Clone, Debug)]
pub enum Event {
    Stored(Stored),
    Removed(Vec<Hash>, usize),
    Cleared,
}

/// Where contents come from: all that is before a block, as a number; 0 and below are roots.
#[derive(Debug, Default)]
pub struct Contents {
    roots: BTreeMap<(Option<&'static str>, Option<&'static str>), usize>,
    blocks: BTreeMap<(usize, Vec<u32>, Option<u8>), usize>,
}

impl Contents {
    pub fn root(&mut self, lora: Option<&'static str>, salt: Option<&'static str>) -> usize {
        let next = self.roots.len() * 2;
        *self.roots.entry((lora, salt)).or_insert(next)
    }

    pub fn block(&mut self, parent: usize, tokens: &[u32], extra: Option<u8>) -> usize {
        let next = self.blocks.len() * 2 + 1;
        *self.blocks.entry((parent, tokens.to_vec(), extra)).or_insert(next)
    }

    /// A prompt in blocks of this size.
    pub fn chain(&mut self, root: usize, tokens: &[u32], size: u32) -> Vec<usize> {
        let mut at = root;
        tokens
            .chunks_exact(size as usize)
            .map(|block| {
                at = self.block(at, block, None);
                at
            })
            .collect()
    }
}

/// What one source said.
#[derive(Clone, Debug, Default)]
pub struct Source {
    pub name: String,
    pub rank: u32,
    pub owner: bool,
    pub ttl: Option<u32>,
    pub resident: BTreeMap<Sized, (BTreeSet<usize>, u32)>,
    pub content: BTreeMap<Sized, usize>,
    /// Sizes that were seen.
    pub units: Vec<u32>,
    pub orphans: Vec<Stored>,
    /// In the order in which they came; whether they belong to an owner.
    pub scopes: Vec<(usize, bool)>,
    pub groups: Vec<(Option<i64>, u32, Option<u32>)>,
    pub expected: BTreeMap<usize, u32>,
    pub incomplete: bool,
    pub invalid: bool,
    pub last_seq: Option<u64>,
}

/// What is asked of a source.
#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    pub tokens: u32,
    pub expected: u32,
    pub block_size: u32,
    pub alone: Vec<(usize, u32)>,
    pub cumulative: Vec<(usize, u32)>,
    pub complete: bool,
}

impl Source {
    /// As after a clear.
    pub fn clear(&mut self) {
        self.resident.clear();
        self.content.clear();
        self.orphans.clear();
        self.expected.clear();
        self.units.clear();
        (self.incomplete, self.invalid) = (false, false);
    }

    /// As after a restart.
    pub fn reset(&mut self) {
        self.clear();
        self.scopes.clear();
        self.groups.clear();
        self.last_seq = None;
    }

    pub fn mark_incomplete(&mut self) {
        (self.incomplete, self.invalid) = (true, true);
    }

    /// The size of its group's blocks, or a multiple of that in a tier with larger ones.
    fn unit(&self, e: &Stored, world: &World) -> u32 {
        let group = world.scopes[e.scope].group_idx;
        let own = self.groups.iter().find(|g| g.0 == group).map_or(0, |g| g.1);
        if own > 0 && (e.block_size == 0 || !e.block_size.is_multiple_of(own)) { own } else { e.block_size }
    }

    /// Where a block belongs; one whose size nobody said, where its hash is known.
    fn place(&mut self, h: &Hash, unit: u32) -> Sized {
        if self.units.contains(&unit) {
            return (h.clone(), unit);
        }
        if unit == 0 && !self.units.is_empty() {
            let known = |u: &&u32| {
                let key = (h.clone(), **u);
                self.resident.contains_key(&key) || self.content.contains_key(&key)
            };
            return (h.clone(), *self.units.iter().find(known).unwrap_or(&self.units[0]));
        }
        if let Some(i) = self.units.iter().position(|&u| u == 0) {
            self.units[i] = unit;
            let sized = |(h, u): Sized| (h, if u == 0 { unit } else { u });
            let resident = std::mem::take(&mut self.resident);
            self.resident = resident.into_iter().map(|(key, held)| (sized(key), held)).collect();
            let content = std::mem::take(&mut self.content);
            self.content = content.into_iter().map(|(key, content)| (sized(key), content)).collect();
        } else {
            self.units.push(unit);
        }
        (h.clone(), unit)
    }

    fn put(&mut self, h: &Hash, scope: usize, unit: u32, content: Option<usize>, now: u32) {
        let here =
            |u: &&u32| self.resident.get(&(h.clone(), **u)).is_some_and(|held| held.0.contains(&scope));
        let there = self.units.iter().find(here).map(|u| (h.clone(), *u));
        let key = there.unwrap_or_else(|| self.place(h, unit));
        let was = self.resident.contains_key(&key);
        if let Some(content) = content {
            if !was || !self.content.contains_key(&key) {
                self.content.insert(key.clone(), content);
            }
            self.expected.remove(&content);
        }
        let entry = self.resident.entry(key).or_default();
        entry.0.insert(scope);
        entry.1 = now;
    }

    /// Takes scopes from a hash; how many blocks had one of them.
    pub fn unset(&mut self, h: &Hash, scopes: &BTreeSet<usize>) -> usize {
        let mut had = 0;
        for key in self.units.iter().map(|u| (h.clone(), *u)) {
            let Some((held, _)) = self.resident.get_mut(&key) else { continue };
            let before = held.len();
            held.retain(|s| !scopes.contains(s));
            had += usize::from(held.len() != before);
            if held.is_empty() {
                self.resident.remove(&key);
            }
        }
        had
    }

    /// A block that waited: resident still, or remembered.
    fn learn(&mut self, key: Sized, content: usize) {
        if self.resident.contains_key(&key) != self.content.contains_key(&key) {
            self.content.insert(key, content);
        }
    }

    /// The contents down a chain from block `from` on; without `now` those of blocks stored before.
    fn run(
        &mut self,
        e: &Stored,
        unit: u32,
        parent: usize,
        from: usize,
        now: Option<u32>,
        all: &mut Contents,
    ) {
        let size = e.block_size as usize;
        let mut content = parent;
        let mut before = e.parent.as_ref();
        for (i, h) in e.hashes.iter().enumerate() {
            if i < from {
                before = Some(h);
                continue;
            }
            if before == Some(h) {
                if let Some(now) = now {
                    e.hashes[i..].iter().for_each(|h| self.put(h, e.scope, unit, None, now));
                }
                return;
            }
            content = all.block(content, &e.tokens[i * size..(i + 1) * size], e.extra[i]);
            match now {
                Some(now) => self.put(h, e.scope, unit, Some(content), now),
                None => self.learn((h.clone(), unit), content),
            }
            before = Some(h);
        }
    }

    fn parent_content(&self, e: &Stored, unit: u32) -> Option<usize> {
        self.content.get(&(e.parent.clone()?, unit)).copied()
    }

    /// Gives every orphan whose parent is known its contents, and so on.
    fn adopt(&mut self, world: &World, all: &mut Contents) {
        let known = |s: &Self, o: &Stored| s.parent_content(o, s.unit(o, world));
        while let Some(i) = self.orphans.iter().position(|o| known(self, o).is_some()) {
            let orphan = self.orphans.remove(i);
            let content = known(self, &orphan).expect("just found");
            self.run(&orphan, self.unit(&orphan, world), content, 0, None, all);
        }
    }

    fn store(&mut self, e: &Stored, world: &World, now: u32, bound: usize, all: &mut Contents) {
        let scope = &world.scopes[e.scope];
        if self.scopes.iter().all(|s| s.0 != e.scope) {
            self.scopes.push((e.scope, !self.owner && is_shared(scope)));
        }
        let group = scope.group_idx;
        if e.block_size > 0 && !self.groups.iter().any(|g| (g.0, g.1) == (group, e.block_size)) {
            let window = self.groups.iter().find(|g| g.0 == group).map_or(e.window, |g| g.2);
            self.groups.push((group, e.block_size, window));
        }
        let (n, unit) = (e.hashes.len(), self.unit(e, world));
        if n == 0 || e.block_size == 0 || e.tokens.len() != n * e.block_size as usize {
            e.hashes.iter().for_each(|h| self.put(h, e.scope, unit, None, now));
        } else if e.parent.is_none() {
            let root = all.root(e.lora, e.salt);
            self.run(e, unit, root, 0, Some(now), all);
        } else if let Some(content) = self.parent_content(e, unit) {
            self.run(e, unit, content, 0, Some(now), all);
        } else {
            e.hashes.iter().for_each(|h| self.put(h, e.scope, unit, None, now));
            if let Some(&content) = self.content.get(&(e.hashes[0].clone(), unit)) {
                self.run(e, unit, content, 1, None, all);
            } else if Some(&e.hashes[0]) != e.parent.as_ref() {
                self.orphans.push(e.clone());
                while self.waiting() > bound {
                    let gone = self.orphans.remove(0);
                    let mut keys =
                        gone.hashes.iter().flat_map(|h| self.units.iter().map(|u| (h.clone(), *u)));
                    if keys.any(|key| self.resident.contains_key(&key) && !self.content.contains_key(&key)) {
                        self.mark_incomplete();
                    }
                }
            }
        }
        self.adopt(world, all);
    }

    /// Blocks that wait for a parent.
    pub fn waiting(&self) -> usize {
        self.orphans.iter().map(|o| o.hashes.len()).sum()
    }

    /// What it holds of a prompt: `chain` by block size, each block by its content or its hash.
    pub fn answer<T: Ord + Clone>(
        &self,
        world: &World,
        groups: &[(Option<i64>, u32, Option<u32>)],
        chains: &BTreeMap<u32, Vec<T>>,
        name: impl Fn(&Self, &Sized) -> Option<T>,
        expected: &BTreeSet<T>,
    ) -> Option<Answer> {
        let cutoff = self.ttl.map_or(0, |ttl| world.now.saturating_sub(ttl));
        let mut held: BTreeMap<T, BTreeSet<usize>> = BTreeMap::new();
        for (h, (scopes, at)) in &self.resident {
            if let Some(name) = name(self, h)
                && *at >= cutoff
            {
                held.entry(name).or_default().extend(scopes);
            }
        }
        let mine: Vec<usize> = self.scopes.iter().filter(|s| !s.1).map(|s| s.0).collect();
        let tiers: BTreeSet<usize> = mine.iter().map(|s| world.tier(*s)).collect();
        let usable = |allowed: &BTreeSet<usize>, also: &BTreeSet<T>| {
            let scopes: Vec<usize> =
                mine.iter().copied().filter(|s| allowed.contains(&world.tier(*s))).collect();
            let has = |group: Option<i64>, block: &T| {
                let counts = |s: &&usize| {
                    let of = world.scopes[**s].group_idx;
                    of.is_none() || of == group
                };
                let here = |s: &usize| held.get(block).is_some_and(|at| at.contains(s));
                scopes.iter().filter(counts).any(|s| also.contains(block) || here(s))
            };
            usable(groups, chains, has)
        };
        let tokens = usable(&tiers, &BTreeSet::new());
        let soon = usable(&tiers, expected);
        if soon == 0 {
            return None;
        }
        let full = groups.iter().find(|g| g.2.is_none()).or(groups.first());
        let nearer = |t: usize| tiers.iter().copied().filter(|u| *u <= t).collect();
        Some(Answer {
            tokens,
            expected: soon,
            block_size: full.map_or(0, |g| g.1),
            alone: tiers.iter().map(|&t| (t, usable(&BTreeSet::from([t]), &BTreeSet::new()))).collect(),
            cumulative: tiers.iter().map(|&t| (t, usable(&nearer(t), &BTreeSet::new()))).collect(),
            complete: !self.incomplete,
        })
    }
}

/// Whether a tier has an owner of its own.
pub fn is_shared(scope: &Scope) -> bool {
    scope.ownership.is_some() || scope.locality.as_deref().is_some_and(|l| !l.eq_ignore_ascii_case("local"))
}

/// The longest usable length in tokens.
fn usable<T>(
    groups: &[(Option<i64>, u32, Option<u32>)],
    chains: &BTreeMap<u32, Vec<T>>,
    has: impl Fn(Option<i64>, &T) -> bool,
) -> u32 {
    let numbered = groups.iter().any(|g| g.0.is_some());
    let mut needed: Vec<(Option<i64>, u32, Option<u32>)> = Vec::new();
    for g in groups.iter().filter(|g| g.0.is_some() || !numbered) {
        if needed.iter().all(|n| n.0 != g.0) {
            needed.push(*g);
        }
    }
    let reach = |group: Option<i64>| {
        let covers = |at: u32, size: u32| {
            chains[&size].get((at / size) as usize).is_some_and(|block| has(group, block))
        };
        let sizes: Vec<u32> = groups.iter().filter(|g| g.0.is_none() || g.0 == group).map(|g| g.1).collect();
        (0..u32::MAX).find(|&at| !sizes.iter().any(|&size| covers(at, size))).expect("prompts end")
    };
    let longest = needed.iter().map(|g| chains[&g.1].len() as u32 * g.1).min().unwrap_or(0);
    let limit = needed.iter().filter(|g| g.2.is_none()).map(|g| reach(g.0)).min().unwrap_or(longest);
    if needed.iter().all(|g| g.2.is_none()) {
        return if needed.is_empty() { 0 } else { limit };
    }
    let in_window = |length: u32| {
        needed.iter().all(|&(group, size, window)| {
            let Some(window) = window else { return true };
            let end = length / size;
            let need = window.saturating_sub(1).div_ceil(size).max(1);
            (end.saturating_sub(need)..end).all(|i| has(group, &chains[&size][i as usize]))
        })
    };
    let ends_blocks = |length: u32| needed.iter().all(|g| length.is_multiple_of(g.1));
    (1..=limit.min(longest)).rev().find(|&l| ends_blocks(l) && in_window(l)).unwrap_or(0)
}

/// All sources, in the order in which they came.
#[derive(Debug)]
pub struct World {
    pub scopes: Vec<Scope>,
    pub sources: Vec<Source>,
    pub dropped: BTreeSet<(String, u32)>,
    pub now: u32,
    pub bound: usize,
    /// Media that no rule folds, in the order in which they were seen.
    pub odd_media: Vec<String>,
}

impl World {
    pub fn new(scopes: Vec<Scope>, bound: usize) -> Self {
        let (sources, dropped, odd_media) = (Vec::new(), BTreeSet::new(), Vec::new());
        Self { scopes, sources, dropped, now: 0, bound, odd_media }
    }

    /// The tier of a scope.
    pub fn tier(&self, scope: usize) -> usize {
        let medium = self.scopes[scope].medium.as_deref();
        let odd = |m: &str| 4 + self.odd_media.iter().position(|o| o == m).expect("seen before");
        fold_medium(medium).unwrap_or_else(|| odd(medium.unwrap_or_default()))
    }

    /// Where a source stands; made where it is new.
    pub fn source(&mut self, name: &str, rank: u32, owner: bool) -> usize {
        let same = |s: &Source| (s.name.as_str(), s.rank, s.owner) == (name, rank, owner);
        if let Some(i) = self.sources.iter().position(same) {
            return i;
        }
        self.sources.push(Source { name: name.to_owned(), rank, owner, ..Source::default() });
        self.sources.len() - 1
    }

    /// Applies events in order.
    pub fn apply(&mut self, at: usize, events: &[Event], all: &mut Contents) {
        for event in events {
            let (now, bound) = (self.now, self.bound);
            match event {
                Event::Cleared => self.sources[at].clear(),
                Event::Removed(hashes, scope) => {
                    let scopes = BTreeSet::from([*scope]);
                    for h in hashes {
                        self.sources[at].unset(h, &scopes);
                    }
                }
                Event::Stored(e) => {
                    let medium = self.scopes[e.scope].medium.as_deref().unwrap_or_default().to_owned();
                    if fold_medium(self.scopes[e.scope].medium.as_deref()).is_none()
                        && !self.odd_media.contains(&medium)
                    {
                        self.odd_media.push(medium);
                    }
                    let mut source = std::mem::take(&mut self.sources[at]);
                    source.store(e, self, now, bound, all);
                    self.sources[at] = source;
                }
            }
        }
        self.settle(all);
        if self.sources[at].owner {
            return;
        }
        for event in events {
            let (Event::Stored(Stored { scope, .. }) | Event::Removed(_, scope)) = event else { continue };
            let scope = self.scopes[*scope].clone();
            if is_shared(&scope) {
                let owner = self.source(scope.ownership.as_deref().unwrap_or("shared"), 0, true);
                if let Some(ttl) = self.sources[at].ttl {
                    self.set_ttl(owner, Some(ttl));
                }
                self.apply(owner, std::slice::from_ref(event), all);
            }
        }
    }

    /// Blocks that are there live from now on.
    pub fn set_ttl(&mut self, at: usize, ttl: Option<u32>) {
        let (now, source) = (self.now, &mut self.sources[at]);
        if source.ttl.is_none() {
            source.resident.values_mut().for_each(|held| held.1 = now);
        }
        source.ttl = ttl;
    }

    /// What is known of one source counts for whatever waits in another.
    fn settle(&mut self, all: &mut Contents) {
        while let Some((s, i, unit, content)) = self.answered() {
            let mut source = std::mem::take(&mut self.sources[s]);
            let orphan = source.orphans.remove(i);
            source.run(&orphan, unit, content, 0, None, all);
            source.adopt(self, all);
            self.sources[s] = source;
        }
    }

    /// An orphan whose parent another source knows: its source, its place, and the parent's content.
    fn answered(&self) -> Option<(usize, usize, u32, usize)> {
        self.sources.iter().enumerate().find_map(|(s, source)| {
            source.orphans.iter().enumerate().find_map(|(i, orphan)| {
                let unit = source.unit(orphan, self);
                let mut others = self.sources.iter().enumerate().filter(|(o, _)| *o != s);
                let content = others.find_map(|(_, o)| o.parent_content(orphan, unit))?;
                Some((s, i, unit, content))
            })
        })
    }
}
