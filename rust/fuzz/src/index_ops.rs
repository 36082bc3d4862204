//! Operations on an index, against a naive one: digests and an answer after every operation, all at the end.

use std::collections::{BTreeMap, BTreeSet};

use kvevents_core::events::{
    Attrs, CommonParts, EventData, EventList, ExtraKeys, Hashes, Scope, StoredParts, Tokens,
};
use kvevents_core::hash::{BlockHash, HashRef};
use kvevents_core::index::{Bounds, Expiry, Match, PrefixIndex, Query, Seq};
use kvevents_core::resident::{Digest, key_digest};

use super::input::Input;
use super::naive_index::{Answer, Contents, Event, Hash, Sized, Source, Stored, World};

/// Engines: name and rank. Their hashes are integers, signed integers and digests.
const ENGINES: [(&str, u32); 3] = [("a", 0), ("a", 1), ("b", 0)];
const PROMPT: usize = 8;
const ASKED: [(Option<&str>, Option<&str>); 3] = [(None, None), (Some("lora"), None), (None, Some("salt"))];

/// See the module.
pub fn index_ops(data: &[u8]) {
    let mut input = Input::new(data);
    let mut both = Both::new(if input.one_in(4) { 3 } else { 65_536 });
    let mut asked = 0;
    while !input.is_empty() {
        both.step(&mut input);
        both.compare();
        both.ask(asked);
        asked += 1;
    }
    (0..8 * ASKED.len()).for_each(|number| both.ask(number));
}

/// Eight prompts that share prefixes, and whose blocks repeat.
fn prompt(number: usize) -> [u32; PROMPT] {
    let bit = |i: usize| 1 + (number >> i & 1) as u32;
    let (a, b, c) = (bit(0), bit(1), bit(2));
    [a, b, c, 1, 2, 3 - c, 1, c]
}

/// An engine's hash of the block that ends these tokens.
fn hash_of(engine: usize, size: u32, tokens: &[u32]) -> Hash {
    let seed = (engine as u64 * 8 + u64::from(size)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mix = |h: u64, t: &u32| (h ^ u64::from(*t)).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
    let h = tokens.iter().fold(seed, mix);
    if engine == 2 { Hash::Bytes(h.to_le_bytes().repeat(4)) } else { Hash::Int(h) }
}

/// The hash as the engine writes it.
fn written(engine: usize, hash: &Hash) -> BlockHash {
    match hash {
        Hash::Int(v) if engine == 1 => BlockHash::Int(v.cast_signed()),
        Hash::Int(v) => BlockHash::Uint(*v),
        Hash::Bytes(b) => BlockHash::Bytes(b.as_slice().into()),
    }
}

fn as_ref(hash: &Hash) -> HashRef<'_> {
    match hash {
        Hash::Int(v) => HashRef::Uint(*v),
        Hash::Bytes(b) => HashRef::Bytes(b),
    }
}

fn all_scopes() -> Vec<Scope> {
    let mut all = Vec::new();
    for (locality, ownership) in [(None, None), (Some("REMOTE"), Some("store")), (Some("remote"), None)] {
        for medium in [None, Some("GPU"), Some("cpu"), Some("CXL")] {
            for group_idx in [None, Some(0), Some(1)] {
                let [medium, locality, ownership] =
                    [medium, locality, ownership].map(|s: Option<&str>| s.map(Into::into));
                all.push(Scope { medium, group_idx, locality, ownership });
            }
        }
    }
    all
}

struct Both {
    real: PrefixIndex,
    naive: World,
    contents: Contents,
    bounds: Bounds,
}

impl Both {
    fn new(orphan_blocks: usize) -> Self {
        let bounds = Bounds { orphan_blocks, ..Bounds::default() };
        Self {
            real: PrefixIndex::new(7, bounds, true),
            naive: World::new(all_scopes(), orphan_blocks),
            contents: Contents::default(),
            bounds,
        }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let engine = input.below(3);
        let (name, rank) = ENGINES[engine];
        match input.below(24) {
            0 => self.naive.now += input.below(8) as u32,
            1 => self.expire(),
            2 => self.clear_tier(engine, input.below(5)),
            3 => {
                let known = self.real.known_source(name, rank, false);
                if let Some(at) = known {
                    assert!(self.real.drop_source(at));
                    self.naive.sources.retain(|s| (s.name.as_str(), s.rank, s.owner) != (name, rank, false));
                    self.naive.dropped.insert((name.to_owned(), rank));
                }
            }
            4 => {
                let (ttl, first) = (input.pick(&[None, Some(2), Some(6)]), input.pick(&[0, 5]));
                let expiry = ttl.map(|ttl| Expiry { ttl, tiers: Expiry::ALL });
                self.real.add_source(name, rank, expiry, first, self.naive.now);
                self.naive.dropped.remove(&(name.to_owned(), rank));
                let at = self.naive.source(name, rank, false);
                if self.naive.sources[at].ttl != ttl {
                    self.naive.set_ttl(at, ttl);
                }
                let last = &mut self.naive.sources[at].last_seq;
                *last = last.or(first.checked_sub(1));
            }
            5 => {
                if let Some((real, naive)) = self.known(engine) {
                    self.real.reset(real);
                    self.naive.sources[naive].reset();
                }
            }
            6 => {
                if let Some((real, naive)) = self.known(engine) {
                    self.real.gap(real, 9);
                    self.naive.sources[naive].mark_incomplete();
                    self.naive.sources[naive].last_seq = Some(9);
                }
            }
            7 => self.expect(engine, input),
            8 => self.restart(),
            9 => {
                let resume = input.pick(&[None, Some(0), Some(4), Some(20)]);
                let events = self.batch(engine, input);
                self.snapshot(engine, resume, &events);
            }
            what => {
                let seq = [Seq::None, Seq::None, Seq::Follows(1), Seq::At(3)][what % 4];
                let events = self.batch(engine, input);
                self.apply(engine, seq, &events);
            }
        }
    }

    /// Both numbers of an engine that both know.
    fn known(&mut self, engine: usize) -> Option<(usize, usize)> {
        let (name, rank) = ENGINES[engine];
        let real = self.real.known_source(name, rank, false)?;
        Some((real, self.naive.source(name, rank, false)))
    }

    /// Both numbers of an engine, made where it is new.
    fn source(&mut self, engine: usize) -> Option<(usize, usize)> {
        let (name, rank) = ENGINES[engine];
        let real = self.real.source(name, rank);
        assert_eq!(real.is_none(), self.naive.dropped.contains(&(name.to_owned(), rank)));
        Some((real?, self.naive.source(name, rank, false)))
    }

    fn apply(&mut self, engine: usize, seq: Seq, events: &[Event]) {
        let Some((real, naive)) = self.source(engine) else { return };
        let source = &mut self.naive.sources[naive];
        let seq = match seq {
            // Mostly the next one.
            Seq::Follows(n) => Seq::Follows(source.last_seq.map_or(0, |last| last + n)),
            other => other,
        };
        if let Seq::Follows(n) = seq
            && n != source.last_seq.map_or(0, |last| last + 1)
        {
            source.mark_incomplete();
        }
        if let Seq::Follows(n) | Seq::At(n) = seq {
            source.last_seq = Some(n);
        }
        self.real.apply(real, seq, &self.columns(engine, events), self.naive.now);
        self.naive.apply(naive, events, &mut self.contents);
    }

    fn snapshot(&mut self, engine: usize, resume: Option<u64>, events: &[Event]) {
        let Some((real, naive)) = self.source(engine) else { return };
        let columns = self.columns(engine, events);
        let taken = self.real.apply_snapshot(real, resume, &columns, self.naive.now);
        let last = resume.and_then(|r| r.checked_sub(1));
        let source = &mut self.naive.sources[naive];
        assert_eq!(taken, resume.is_none() || source.last_seq <= last);
        if taken {
            source.reset();
            source.last_seq = last;
            self.naive.apply(naive, events, &mut self.contents);
        }
    }

    fn expire(&mut self) {
        let mut gone = 0;
        let now = self.naive.now;
        for source in &mut self.naive.sources {
            let Some(ttl) = source.ttl else { continue };
            let before = source.resident.len();
            source.resident.retain(|_, (_, at)| *at >= now.saturating_sub(ttl));
            let here = before - source.resident.len();
            source.invalid |= here > 0;
            gone += here;
        }
        assert_eq!(self.real.expire(now), gone);
    }

    fn clear_tier(&mut self, engine: usize, tier: usize) {
        let Some((real, naive)) = self.known(engine) else { return };
        let mine = &self.naive.sources[naive].scopes;
        let bits: BTreeSet<usize> =
            mine.iter().map(|s| s.0).filter(|s| self.naive.tier(*s) == tier).collect();
        let source = &mut self.naive.sources[naive];
        let hashes: BTreeSet<Hash> = source.resident.keys().map(|key| key.0.clone()).collect();
        let gone = hashes.iter().map(|h| source.unset(h, &bits)).sum();
        source.invalid |= gone > 0;
        assert_eq!(self.real.clear_tier(real, tier), gone);
    }

    fn expect(&mut self, engine: usize, input: &mut Input<'_>) {
        let tokens = prompt(input.below(8));
        let until = self.naive.now + input.below(4) as u32;
        let Some((real, naive)) = self.known(engine) else { return };
        let source = &mut self.naive.sources[naive];
        let mut missing = Vec::new();
        if let Some(group) = source.groups.first() {
            let root = self.contents.root(None, None);
            missing = self.contents.chain(root, &tokens, group.1);
            let here: BTreeSet<usize> =
                source.resident.keys().filter_map(|h| source.content.get(h)).copied().collect();
            missing.retain(|c| !here.contains(c));
        }
        for content in &missing {
            let at = source.expected.entry(*content).or_default();
            *at = until.max(*at);
        }
        let query = Query { tokens: &tokens, ..Query::default() };
        assert_eq!(self.real.expect(real, &query, until, self.naive.now), missing.len());
    }

    /// The router ends and begins anew from its dump: what waited, was expected or only remembered is gone.
    fn restart(&mut self) {
        let (loaded, now, _) =
            PrefixIndex::load(&self.real.dump(self.naive.now, b""), self.bounds, true).expect("its own");
        assert_eq!(now, self.naive.now);
        // Their publishers live on.
        loaded.stats().iter().for_each(|s| loaded.confirm(s.source));
        self.real = loaded;
        self.naive.dropped.clear();
        for source in &mut self.naive.sources {
            if source.waiting() > 0 {
                source.mark_incomplete();
            }
            source.orphans.clear();
            source.expected.clear();
            source.content.retain(|key, _| source.resident.contains_key(key));
        }
    }

    // ---------------------------------------------------------------- bytes to events

    fn batch(&self, engine: usize, input: &mut Input<'_>) -> Vec<Event> {
        (0..=input.below(3))
            .map(|_| match input.below(16) {
                0 => Event::Cleared,
                1..=5 => {
                    let e = self.stored(engine, input);
                    Event::Removed(e.hashes.into_iter().take(1 + input.below(3)).collect(), e.scope)
                }
                _ => Event::Stored(self.stored(engine, input)),
            })
            .collect()
    }

    fn stored(&self, engine: usize, input: &mut Input<'_>) -> Stored {
        let scope = input.below(self.naive.scopes.len());
        // Mostly tiers of the engine's own.
        let scope = if input.one_in(4) { scope } else { scope % 12 };
        let windowed = self.naive.scopes[scope].group_idx == Some(1);
        let size: u32 = if windowed && engine == 1 { 4 } else { 2 };
        let tokens = prompt(input.below(8));
        let run = input.byte();
        let blocks = PROMPT / size as usize;
        let from = usize::from(run) % blocks;
        let to = from + 1 + usize::from(run >> 4) % (blocks - from);
        let hash = |i: usize| hash_of(engine, size, &tokens[..(i + 1) * size as usize]);
        let kind = input.byte();
        let mut e = Stored {
            hashes: (from..to).map(hash).collect(),
            parent: from.checked_sub(1).map(hash),
            tokens: tokens[from * size as usize..to * size as usize].to_vec(),
            block_size: size,
            scope,
            window: windowed.then_some(3),
            lora: (kind & 0x30 == 0x10).then_some("lora"),
            salt: (kind & 0x30 == 0x20 && from == 0).then_some("salt"),
            extra: vec![None; to - from],
        };
        match kind & 0x0f {
            0 => drop(e.hashes.pop()),
            1 => e.parent = e.hashes.first().cloned(),
            2 if e.hashes.len() > 1 => {
                e.hashes.pop();
                e.hashes.push(e.hashes[0].clone());
            }
            3 => (e.tokens, e.block_size, e.parent) = (Vec::new(), 0, None),
            4 => e.extra[0] = Some(input.byte() & 1),
            _ => {}
        }
        e
    }

    fn columns(&self, engine: usize, events: &[Event]) -> EventList {
        let mut data = EventData::new();
        let common = CommonParts::default();
        for event in events {
            match event {
                Event::Cleared => data.push_cleared(&common),
                Event::Removed(hashes, scope) => {
                    let owned: Vec<BlockHash> = hashes.iter().map(|h| written(engine, h)).collect();
                    let refs: Vec<HashRef<'_>> = owned.iter().map(|h| h.as_ref()).collect();
                    let id = data.intern(&Attrs::of_scope(&self.naive.scopes[*scope]));
                    data.push_removed(id, Hashes::Mixed(&refs), &common)
                }
                Event::Stored(e) => {
                    let owned: Vec<BlockHash> = e.hashes.iter().map(|h| written(engine, h)).collect();
                    let refs: Vec<HashRef<'_>> = owned.iter().map(|h| h.as_ref()).collect();
                    let parent = e.parent.as_ref().map(|h| written(engine, h));
                    let raw = extra_keys(e);
                    let id = data.intern(&Attrs {
                        block_size: e.block_size,
                        lora_name: e.lora.map(Into::into),
                        sliding_window: e.window.map(i64::from),
                        spec_kind: e.window.map(|_| "sliding_window".into()),
                        ..Attrs::of_scope(&self.naive.scopes[e.scope])
                    });
                    let parts = StoredParts {
                        hashes: Hashes::Mixed(&refs),
                        parent: parent.as_ref().map(BlockHash::as_ref),
                        tokens: Tokens::Plain(&e.tokens),
                        extra_keys: raw.as_deref().map_or(ExtraKeys::Absent, ExtraKeys::Raw),
                        lookahead: None,
                        common,
                    };
                    data.push_stored(id, &parts)
                }
            }
            .expect("small");
        }
        data.into()
    }

    // ---------------------------------------------------------------- answers

    fn compare(&mut self) {
        let stats = self.real.stats();
        assert_eq!(stats.len(), self.naive.sources.len());
        for (s, source) in stats.iter().zip(&self.naive.sources) {
            assert_eq!(
                (s.id.name.as_str(), s.id.rank, s.id.is_owner),
                (source.name.as_str(), source.rank, source.owner)
            );
            assert_eq!((s.blocks, s.waiting), (source.resident.len(), source.waiting()), "{}", s.id.name);
            assert_eq!((s.complete, s.last_seq), (!source.incomplete, source.last_seq), "{}", s.id.name);
            assert_eq!(self.real.digest(s.source), self.digest_of(source), "{}", s.id.name);
        }
    }

    /// One of the prompts, as one of those who may ask.
    fn ask(&mut self, number: usize) {
        let tokens = prompt(number);
        let (lora_name, cache_salt) = ASKED[number / 8 % ASKED.len()];
        let query = Query { tokens: &tokens, lora_name, cache_salt, mm: &[] };
        let found = self.real.find(&query, self.naive.now);
        let found = found.iter().map(|m| (m.source, answer_of(m))).collect::<Vec<_>>();
        assert_eq!(found, self.answers(&tokens, lora_name, cache_salt), "{query:?}");
        self.compare_hashes(number % ENGINES.len(), &tokens);
    }

    fn digest_of(&self, source: &Source) -> Option<[u8; 16]> {
        let mut sum = Digest::default();
        for ((h, _), (scopes, _)) in &source.resident {
            for s in scopes {
                sum.add(key_digest(as_ref(h), &self.naive.scopes[*s]));
            }
        }
        (!source.invalid).then(|| sum.to_bytes())
    }

    fn answers(
        &mut self,
        tokens: &[u32],
        lora: Option<&'static str>,
        salt: Option<&'static str>,
    ) -> Vec<(usize, Answer)> {
        let root = self.contents.root(lora, salt);
        let sizes = [2, 4].map(|size| (size, self.contents.chain(root, tokens, size)));
        let chains = BTreeMap::from(sizes);
        let mut found = Vec::new();
        for s in &self.naive.sources {
            let cutoff = s.ttl.map_or(0, |ttl| self.naive.now.saturating_sub(ttl));
            let fresh = s.resident.iter().filter(|(_, held)| held.1 >= cutoff);
            let here: BTreeSet<usize> = fresh.filter_map(|(h, _)| s.content.get(h)).copied().collect();
            let soon = s.expected.iter().filter(|(_, until)| **until >= self.naive.now).map(|(c, _)| *c);
            let soon = soon.filter(|c| !here.contains(c)).collect();
            let name = |s: &Source, key: &Sized| s.content.get(key).copied();
            if let Some(answer) = s.answer(&self.naive, &s.groups, &chains, name, &soon) {
                let number = self.real.known_source(&s.name, s.rank, s.owner).expect("both know it");
                found.push((number, answer));
            }
        }
        found.sort_by_key(|(number, a)| (std::cmp::Reverse((a.tokens, a.expected)), *number));
        found
    }

    fn compare_hashes(&mut self, engine: usize, tokens: &[u32]) {
        let Some((real, naive)) = self.known(engine) else { return };
        let chain: Vec<Hash> = (1..=PROMPT / 2).map(|n| hash_of(engine, 2, &tokens[..n * 2])).collect();
        let source = &self.naive.sources[naive];
        let mut groups = source.groups.clone();
        if groups.is_empty() {
            for (scope, _) in &source.scopes {
                let group = (self.naive.scopes[*scope].group_idx, 1, None);
                if !groups.contains(&group) {
                    groups.push(group);
                }
            }
        }
        let chains = groups.iter().map(|g| (g.1, chain.clone())).collect();
        let name = |_: &Source, key: &Sized| Some(key.0.clone());
        let wanted = source.answer(&self.naive, &groups, &chains, name, &BTreeSet::new());
        let refs: Vec<HashRef<'_>> = chain.iter().map(as_ref).collect();
        let found = self.real.find_hashes(real, &refs, self.naive.now);
        assert_eq!(found.as_ref().map(answer_of), wanted, "by hashes, engine {engine}");
    }
}

/// The extra keys of a store as engines write them: LoRA name, multimodal, salt.
fn extra_keys(e: &Stored) -> Option<Vec<u8>> {
    if e.salt.is_none() && e.extra.iter().all(Option::is_none) || e.hashes.is_empty() {
        return None;
    }
    let mut raw = vec![0x90 | e.extra.len() as u8];
    for (i, image) in e.extra.iter().enumerate() {
        let salt = e.salt.filter(|_| i == 0);
        let count = [e.lora.is_some(), image.is_some(), salt.is_some()].into_iter().filter(|b| *b).count();
        if count == 0 {
            raw.push(0xc0);
            continue;
        }
        raw.push(0x90 | count as u8);
        let put = |raw: &mut Vec<u8>, s: &str| {
            raw.push(0xa0 | s.len() as u8);
            raw.extend_from_slice(s.as_bytes());
        };
        if let Some(lora) = e.lora {
            put(&mut raw, lora);
        }
        if let Some(image) = image {
            raw.push(0x92);
            put(&mut raw, "image");
            raw.push(*image);
        }
        if let Some(salt) = salt {
            put(&mut raw, salt);
        }
    }
    Some(raw)
}

fn answer_of(m: &Match) -> Answer {
    Answer {
        tokens: m.tokens,
        expected: m.expected,
        block_size: m.block_size,
        alone: m.alone.clone(),
        cumulative: m.cumulative.clone(),
        complete: m.complete,
    }
}
