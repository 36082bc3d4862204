//! A pool that anybody can check by reading it, a reader that replays events, and a driver that asks
//! both the same things.

use std::collections::BTreeMap;

use hashbrown::HashMap;
use kvevents_core::events::{EventKind, EventList, EventView, Scope, Tokens};
use kvevents_core::hash::HashRef;
use kvevents_core::pool::{BlockPool, Config, Group, HashColumn, KeyForm, Report, Request};
use kvevents_core::resident::{Digest, key_digest};
use xxhash_rust::xxh3::{xxh3_64_with_seed, xxh3_128};

/// `(hash, group)`
pub type Key = (Vec<u8>, u16);

/// Hash of `step` tokens after `parent`; stands for any chained hash.
pub fn chain(parent: Option<&[u8]>, tokens: &[u32], form: KeyForm) -> Vec<u8> {
    let mut text = parent.unwrap_or(b"root").to_vec();
    text.extend(tokens.iter().flat_map(|t| t.to_le_bytes()));
    match form {
        KeyForm::Int => xxh3_64_with_seed(&text, 7).to_le_bytes().to_vec(),
        KeyForm::Bytes(w) => {
            let mut h = xxh3_128(&text).to_be_bytes().repeat(4);
            h.truncate(usize::from(w));
            h
        }
    }
}

/// A small, seeded generator: every run of a seed is the same.
pub struct Rng(pub u64);

impl Rng {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize * n) >> 31
    }

    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// The naive pool: lists and maps, searched from end to end.
#[derive(Clone, Default)]
pub struct Naive {
    pub refs: Vec<u32>,
    pub free: Vec<u32>,
    /// Hashes of a block, its own first, with the tokens of its own.
    pub owned: BTreeMap<u32, (Vec<Key>, usize)>,
    /// Blocks of a key, in the order in which they were stored.
    pub holders: HashMap<Key, Vec<u32>>,
}

impl Naive {
    pub fn new(n: u32) -> Self {
        Self { refs: vec![0; n as usize], free: (1..n).collect(), ..Self::default() }
    }

    pub fn forget(&mut self, block: u32) {
        let Some((keys, _)) = self.owned.remove(&block) else { return };
        for key in keys {
            let holders = self.holders.get_mut(&key).expect("held");
            holders.retain(|&b| b != block);
            if holders.is_empty() {
                self.holders.remove(&key);
            }
        }
    }

    pub fn own(&mut self, block: u32, key: Key, tokens: usize) {
        self.holders.entry(key.clone()).or_default().push(block);
        self.owned.entry(block).or_insert((Vec::new(), tokens)).0.push(key);
    }

    pub fn allocate(&mut self, n: usize) -> Vec<u32> {
        let taken: Vec<u32> = self.free.drain(..n).collect();
        for &b in &taken {
            self.refs[b as usize] = 1;
            self.forget(b);
        }
        taken
    }

    pub fn touch(&mut self, blocks: &[u32]) {
        for &b in blocks.iter().filter(|&&b| b != 0) {
            self.free.retain(|&f| f != b);
            self.refs[b as usize] += 1;
        }
    }

    pub fn release(&mut self, blocks: &[u32]) {
        let mut front = Vec::new();
        for &b in blocks.iter().filter(|&&b| b != 0) {
            self.refs[b as usize] -= 1;
            if self.refs[b as usize] == 0 {
                if self.owned.contains_key(&b) { self.free.push(b) } else { front.push(b) }
            }
        }
        self.free.splice(0..0, front);
    }
}

/// A reader that counts copies and checks every event against its content.
#[derive(Default)]
pub struct Reader {
    pub counts: HashMap<Key, usize>,
    /// The events are those of one partial block.
    pub partial: bool,
}

impl Reader {
    fn key(h: HashRef<'_>, v: &EventView<'_>) -> Key {
        let bytes = match h {
            HashRef::Bytes(b) => b.to_vec(),
            h => h.bits().expect("an integer").to_le_bytes().to_vec(),
        };
        (bytes, v.attrs().group_idx.expect("a group") as u16)
    }

    /// `step`: tokens over which one hash is made. `exact`: no store of what is there, no removal of
    /// what is not; a parent of a partial block is there.
    pub fn apply(&mut self, events: &EventList, step: usize, form: KeyForm, exact: bool) {
        for v in events.iter() {
            match v.kind() {
                EventKind::Cleared => self.counts.clear(),
                EventKind::Removed => {
                    for h in v.hashes() {
                        let key = Self::key(h, &v);
                        let n = self.counts.get_mut(&key).expect("removed what is there");
                        *n -= 1;
                        if *n == 0 {
                            self.counts.remove(&key);
                        }
                    }
                }
                EventKind::Stored => self.stored(&v, step, form, exact),
            }
        }
    }

    fn stored(&mut self, v: &EventView<'_>, step: usize, form: KeyForm, exact: bool) {
        let Tokens::Plain(tokens) = v.tokens() else { panic!("plain tokens") };
        let size = v.attrs().block_size as usize;
        let mut before = v.parent().map(|h| Self::key(h, v).0);
        let hashes: Vec<Key> = v.hashes().map(|h| Self::key(h, v)).collect();
        if exact {
            assert!(!v.is_irregular());
            assert_eq!(tokens.len(), hashes.len() * size);
            if self.partial {
                // A boundary inside a block continues what the reader has, or starts at the root.
                let parent = before.clone().map(|h| (h, v.attrs().group_idx.expect("a group") as u16));
                assert!(parent.is_none_or(|p| self.counts.contains_key(&p)));
            }
        }
        if tokens.len() == hashes.len() * size {
            for (key, tokens) in hashes.iter().zip(tokens.chunks(size)) {
                for part in tokens.chunks(step) {
                    before = Some(chain(before.as_deref(), part, form));
                }
                // Tokens, parent and hash fit together.
                assert_eq!(before.as_ref(), Some(&key.0));
            }
        }
        for key in hashes {
            let n = self.counts.entry(key).or_default();
            *n += 1;
            assert!(!exact || *n == 1, "stored what is there already");
        }
    }
}

/// A sequence that is being served.
struct Live {
    tokens: Vec<u32>,
    hashes: Vec<u8>,
    blocks: Vec<u32>,
    cached: usize,
}

/// The pool, the naive pool, the reader, and what is being served.
pub struct Driver {
    pub pool: BlockPool,
    pub naive: Naive,
    pub reader: Reader,
    pub rng: Rng,
    live: Vec<Live>,
    form: KeyForm,
    every_copy: bool,
    /// Take events after each operation, or only now and then.
    eager: bool,
}

const STEP: usize = 2;

impl Driver {
    pub fn new(seed: u64) -> Self {
        let mut rng = Rng(seed ^ 0x9e37_79b9_7f4a_7c15);
        let num_blocks = 8 + rng.below(57);
        let mut config = Config::new(num_blocks, STEP as u32);
        if rng.one_in(2) {
            config.report = Report::EveryCopy;
        }
        let group = |block_size, kind: &str| Group { block_size, kind: kind.into(), sliding_window: None };
        config.groups = match rng.below(3) {
            0 => vec![],
            1 => vec![group(2, "full_attention"), group(4, "mamba")],
            _ => vec![group(4, "full_attention"), group(8, "full_attention"), group(2, "mamba")],
        };
        let form = [KeyForm::Int, KeyForm::Bytes(32), KeyForm::Bytes(20)][rng.below(3)];
        let eager = rng.below(4) != 0;
        if !eager {
            config.max_queued_events = 1 + rng.below(40);
        }
        let every_copy = config.report == Report::EveryCopy;
        let pool = BlockPool::new(config).expect("a good configuration");
        let naive = Naive::new(num_blocks as u32);
        Self { pool, naive, reader: Reader::default(), rng, live: Vec::new(), form, every_copy, eager }
    }

    fn group(&mut self) -> (usize, usize) {
        let groups = &self.pool.config().groups;
        let g = self.rng.below(groups.len());
        (g, groups[g].block_size as usize)
    }

    /// One operation, and the checks after it.
    pub fn step(&mut self, full_check: bool) {
        let op = self.rng.below(20);
        match op {
            0..=6 => self.admit(),
            7..=9 => self.decode(),
            10..=13 => self.finish(),
            14 => self.evict(),
            15..=16 => self.partial(),
            17 => self.copy_on_write(),
            18 => self.mistake(),
            _ => self.rare(),
        }
        let lazy = !self.eager && !self.rng.one_in(12);
        if !lazy || full_check {
            let events = self.pool.take_events();
            self.reader.partial = self.eager && matches!(op, 15..=16);
            self.reader.apply(&events, STEP, self.form, !self.every_copy);
            let held = self.naive.holders.iter();
            if self.every_copy {
                assert!(held.clone().all(|(k, v)| self.reader.counts.get(k) == Some(&v.len())));
            } else {
                assert!(held.clone().all(|(k, _)| self.reader.counts.contains_key(k)));
            }
            assert_eq!(self.reader.counts.len(), self.naive.holders.len());
        }
        assert_eq!(self.pool.num_free_blocks(), self.naive.free.len());
        if full_check {
            self.check_everything();
        }
    }

    fn check_everything(&self) {
        assert_eq!(self.pool.free_order(), self.naive.free);
        let mut digest = Digest::default();
        for ((hash, group), holders) in &self.naive.holders {
            let (medium, group_idx) = (Some("GPU".into()), Some(i64::from(*group)));
            let scope = Scope { medium, group_idx, ..Scope::default() };
            digest.add(key_digest(self.form.hash(hash), &scope));
            let hit = self.pool.cached_block(self.form, hash, usize::from(*group));
            assert_eq!(hit, Ok(Some(holders[0])), "a hit takes the first that was stored");
        }
        assert_eq!(self.pool.digest(), digest.to_bytes());
        let mut reader = Reader::default();
        reader.apply(&self.pool.snapshot().expect("events are on"), STEP, self.form, true);
        assert_eq!(reader.counts.len(), self.naive.holders.len());
        assert!(self.naive.holders.keys().all(|k| reader.counts.contains_key(k)));
        let stats = self.pool.stats();
        assert_eq!(stats.resident_hashes, self.naive.holders.len());
        assert_eq!(stats.copies, self.naive.holders.values().map(Vec::len).sum::<usize>());
    }

    /// Tokens from a small alphabet: prefixes are shared often.
    fn tokens(&mut self, n: usize) -> Vec<u32> {
        let (a, b) = (self.rng.below(3) as u32, self.rng.below(4));
        (0..n).map(|i| if b > 0 && i >= n / b { a + self.rng.below(2) as u32 } else { a }).collect()
    }

    fn hashes(&self, tokens: &[u32]) -> Vec<u8> {
        let mut out: Vec<u8> = Vec::new();
        let w = self.form.width();
        for part in tokens.chunks_exact(STEP) {
            let parent = out.len().checked_sub(w).map(|at| out[at..].to_vec());
            out.extend(chain(parent.as_deref(), part, self.form));
        }
        out
    }

    fn admit(&mut self) {
        let n = 1 + self.rng.below(40);
        let tokens = self.tokens(n);
        let hashes = self.hashes(&tokens);
        let (g, size) = self.group();
        let mut hits = Vec::new();
        let column = HashColumn { form: self.form, data: &hashes, first: 0 };
        let use_hits = !self.rng.one_in(4);
        if use_hits {
            let limit = (n - 1) / size;
            self.pool.find_longest_cache_hit(&column, limit, g, &mut hits).expect("a group");
            let naive: Vec<u32> = (0..limit.min(hashes.len() / self.form.width() * STEP / size))
                .map_while(|i| {
                    let key = (column.get((i + 1) * size / STEP - 1).to_vec(), g as u16);
                    self.naive.holders.get(&key).map(|h| h[0])
                })
                .collect();
            assert_eq!(hits, naive);
        }
        let free_hits = hits.iter().filter(|&&b| self.naive.refs[b as usize] == 0).count();
        let needed = n.div_ceil(size) - hits.len();
        if needed + free_hits > self.naive.free.len() {
            return;
        }
        self.pool.touch(&hits).expect("hits");
        self.naive.touch(&hits);
        let mut blocks = hits.clone();
        self.pool.get_new_blocks(needed, &mut blocks).expect("enough");
        assert_eq!(blocks[hits.len()..], self.naive.allocate(needed));
        // Now and then a hole, as windows leave them: the block itself is given back at once.
        let cached = hits.len();
        if self.rng.one_in(6) && cached < blocks.len() {
            let at = cached + self.rng.below(blocks.len() - cached);
            let block = std::mem::replace(&mut blocks[at], 0);
            self.pool.free_blocks(&[block]).expect("in use");
            self.naive.release(&[block]);
        }
        let mut live = Live { tokens, hashes, blocks, cached };
        self.cache(&mut live, n / size, g, size);
        self.live.push(live);
        self.live_groups_fit(g);
    }

    /// A sequence belongs to one group here; remembered by the driver as its last block size.
    fn live_groups_fit(&mut self, g: usize) {
        if let Some(live) = self.live.last_mut() {
            live.tokens.insert(0, g as u32);
        }
    }

    fn cache(&mut self, live: &mut Live, full: usize, g: usize, size: usize) {
        let cached = live.cached.min(full);
        let request = Request::plain(self.form, &live.hashes, &live.tokens);
        self.pool.cache_full_blocks(&request, &live.blocks[cached..], cached, full, g).expect("a good call");
        for i in cached..full {
            let block = live.blocks[i];
            if block == 0 {
                continue;
            }
            let hash = request.hashes.get((i + 1) * size / STEP - 1).to_vec();
            let key = (hash, g as u16);
            if self.naive.owned.get(&block).is_some_and(|(keys, _)| keys[0] == key) {
                continue;
            }
            self.naive.forget(block);
            self.naive.own(block, key, (i + 1) * size);
        }
        live.cached = full;
    }

    /// A live sequence without its group mark, and its group.
    fn pick(&mut self) -> Option<(Live, usize, usize)> {
        if self.live.is_empty() {
            return None;
        }
        let at = self.rng.below(self.live.len());
        let mut live = self.live.swap_remove(at);
        let g = live.tokens.remove(0) as usize;
        let size = self.pool.config().groups[g].block_size as usize;
        Some((live, g, size))
    }

    fn put_back(&mut self, mut live: Live, g: usize) {
        live.tokens.insert(0, g as u32);
        self.live.push(live);
    }

    fn decode(&mut self) {
        let Some((mut live, g, size)) = self.pick() else { return };
        for _ in 0..=self.rng.below(2 * size) {
            if live.tokens.len() % size == 0 {
                if self.naive.free.is_empty() {
                    break;
                }
                self.pool.get_new_blocks(1, &mut live.blocks).expect("one");
                assert_eq!(live.blocks.last(), self.naive.allocate(1).last());
            }
            live.tokens.push(self.rng.below(2) as u32);
        }
        live.hashes = self.hashes(&live.tokens);
        let full = live.tokens.len() / size;
        self.cache(&mut live, full, g, size);
        self.put_back(live, g);
    }

    fn finish(&mut self) {
        let Some((mut live, _, _)) = self.pick() else { return };
        live.blocks.reverse();
        if self.rng.one_in(8) {
            live.blocks.retain(|&b| b != 0);
            self.pool.unpin_blocks(&live.blocks).expect("in use");
            for &b in &live.blocks {
                self.naive.refs[b as usize] -= 1;
                if self.naive.refs[b as usize] == 0 {
                    self.naive.free.push(b);
                }
            }
            return;
        }
        self.pool.free_blocks(&live.blocks).expect("in use");
        self.naive.release(&live.blocks);
    }

    fn evict(&mut self) {
        let n = self.naive.refs.len();
        let blocks: Vec<u32> = (0..self.rng.below(4)).map(|_| self.rng.below(n) as u32).collect();
        self.pool.evict_blocks(&blocks).expect("in range");
        for b in blocks {
            self.naive.forget(b);
        }
    }

    fn partial(&mut self) {
        let Some((live, g, size)) = self.pick() else { return };
        let boundaries = live.hashes.len() / self.form.width();
        if boundaries > 0 {
            let tokens = (1 + self.rng.below(boundaries)) * STEP;
            let block = live.blocks[(tokens - 1) / size];
            let replace = self.rng.one_in(5);
            let request = Request::plain(self.form, &live.hashes, &live.tokens);
            let got =
                self.pool.cache_partial_block(&request, block, tokens, replace, g).expect("a good call");
            let key = (request.hashes.get(tokens / STEP - 1).to_vec(), g as u16);
            assert_eq!(got, self.naive_partial(block, key, tokens, replace));
        }
        self.put_back(live, g);
    }

    fn naive_partial(&mut self, block: u32, key: Key, tokens: usize, replace: bool) -> bool {
        if block == 0 {
            return false;
        }
        let own = self.naive.owned.get(&block).cloned();
        if let Some((keys, own_tokens)) = own {
            if keys.contains(&key) && !replace {
                return true;
            }
            if replace || own_tokens < tokens {
                self.naive.forget(block);
            } else if !self.every_copy {
                return false;
            }
        }
        self.naive.own(block, key, tokens);
        true
    }

    fn copy_on_write(&mut self) {
        let Some((mut live, g, _)) = self.pick() else { return };
        let cached = live.blocks.iter().rposition(|b| self.naive.owned.contains_key(b));
        if let Some(at) = cached
            && !self.naive.free.is_empty()
        {
            let src = live.blocks[at];
            let mut dst = Vec::new();
            self.pool.get_new_blocks(1, &mut dst).expect("one");
            assert_eq!(dst, self.naive.allocate(1));
            self.pool.move_block_hashes(src, dst[0]).expect("a fresh block");
            if let Some((keys, tokens)) = self.naive.owned.get(&src).cloned() {
                self.naive.forget(src);
                for key in keys {
                    self.naive.own(dst[0], key, tokens);
                }
            }
            // The copy stays with the cache alone; the sequence goes on in its own block.
            self.pool.free_blocks(&dst).expect("in use");
            self.naive.release(&dst);
            live.cached = live.cached.max(at + 1);
        }
        self.put_back(live, g);
    }

    fn rare(&mut self) {
        if self.rng.one_in(3) {
            while !self.live.is_empty() {
                self.finish();
            }
        }
        let idle = self.naive.free.len() + 1 == self.naive.refs.len();
        assert_eq!(self.pool.reset_prefix_cache(), idle);
        if idle {
            self.naive.owned.clear();
            self.naive.holders.clear();
        }
    }

    /// Something that no caller may do: an error, and nothing has changed.
    fn mistake(&mut self) {
        let before = (self.pool.digest(), self.pool.free_order(), self.pool.stats());
        let refs: Vec<u32> = self.naive.refs.clone();
        let n = refs.len() as u32;
        let used = (1..n).find(|&b| refs[b as usize] > 0);
        let free = self.naive.free.first().copied();
        let tokens = self.tokens(16);
        let hashes = self.hashes(&tokens);
        let request = Request::plain(self.form, &hashes, &tokens);
        let pool = &mut self.pool;
        let mut out = Vec::new();
        assert!(pool.get_new_blocks(self.naive.free.len() + 1, &mut out).is_err());
        assert!(out.is_empty());
        assert!(pool.touch(&[1, n]).is_err());
        assert!(pool.evict_blocks(&[1, 2, n + 3]).is_err());
        assert!(pool.cache_full_blocks(&request, &[1], 2, 1, 0).is_err());
        assert!(pool.cache_full_blocks(&request, &[], 0, 1, 0).is_err());
        assert!(pool.cache_full_blocks(&request, &[1], usize::MAX - 1, usize::MAX, 0).is_err());
        assert!(pool.cache_full_blocks(&request, &[n], 0, 1, 0).is_err());
        assert!(pool.cache_full_blocks(&request, &[1], 0, 1, 9).is_err());
        assert!(pool.move_block_hashes(0, 1).is_err());
        assert!(pool.move_block_hashes(1, n).is_err());
        assert!(pool.unpin_blocks(&[0]).is_err());
        if let Some(used) = used {
            let too_often = vec![used; refs[used as usize] as usize + 1];
            assert!(pool.free_blocks(&too_often).is_err());
            assert!(pool.unpin_blocks(&too_often).is_err());
            assert!(pool.free_blocks(&[used, n]).is_err());
            assert!(pool.cache_full_blocks(&request, &[used, used], 0, 2, 0).is_err());
            assert!(pool.cache_partial_block(&request, used, 1, false, 0).is_err());
            assert!(pool.cache_partial_block(&request, used, 1000, false, 0).is_err());
            let short = Request { tokens: &tokens[..1], ..request };
            assert!(pool.cache_full_blocks(&short, &[used], 0, 1, 0).is_err());
            let short = Request::plain(self.form, &[], &tokens);
            assert!(pool.cache_full_blocks(&short, &[used], 0, 1, 0).is_err());
            if let Some(free) = free {
                assert!(pool.free_blocks(&[used, 0, free]).is_err());
                assert!(pool.cache_full_blocks(&request, &[used, free], 0, 2, 0).is_err());
            }
        }
        if let Some(free) = free {
            assert!(pool.free_blocks(&[free]).is_err());
            assert!(pool.cache_partial_block(&request, free, STEP, false, 0).is_err());
        }
        assert_eq!((self.pool.digest(), self.pool.free_order(), self.pool.stats()), before);
    }
}
