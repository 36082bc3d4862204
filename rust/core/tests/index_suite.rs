//! The index against a naive one, over random streams of several sources.

use std::collections::{BTreeMap, BTreeSet};

use kvevents_core::events::{Attrs, CommonParts, EventData, ExtraKeys, Hashes, StoredParts, Tokens};
use kvevents_core::hash::HashRef;
use kvevents_core::index::{Bounds, Match, PrefixIndex, Query, Seq, SourceStats};

const SIZE: usize = 4;

struct Rng(u64);

impl Rng {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }
}

/// How engine `e` hashes the block that ends these tokens.
fn hash_of(engine: usize, tokens: &[u32]) -> u64 {
    tokens.iter().fold((engine as u64).wrapping_mul(0x1234_5678_9abc_def1) | 1, |h, t| {
        (h ^ u64::from(*t)).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23)
    })
}

fn stored(engine: usize, tokens: &[u32], from: usize, to: usize, medium: &str) -> EventData {
    let mut data = EventData::new();
    let hashes: Vec<u64> = (from..to).map(|i| hash_of(engine, &tokens[..(i + 1) * SIZE])).collect();
    let id = data.intern(&Attrs { block_size: SIZE as u32, medium: Some(medium.into()), ..Attrs::default() });
    let parts = StoredParts {
        hashes: Hashes::Uint(&hashes),
        parent: (from > 0).then(|| HashRef::Uint(hash_of(engine, &tokens[..from * SIZE]))),
        tokens: Tokens::Plain(&tokens[from * SIZE..to * SIZE]),
        extra_keys: ExtraKeys::Absent,
        lookahead: None,
        common: CommonParts::default(),
    };
    data.push_stored(id, &parts).unwrap();
    data
}

fn removed(hash: u64, medium: &str) -> EventData {
    let mut data = EventData::new();
    let id = data.intern(&Attrs { medium: Some(medium.into()), ..Attrs::default() });
    data.push_removed(id, Hashes::Uint(&[hash]), &CommonParts::default()).unwrap();
    data
}

fn find(index: &PrefixIndex, tokens: &[u32]) -> Vec<Match> {
    index.find(&Query { tokens, ..Query::default() }, 0)
}

fn apply(index: &PrefixIndex, source: usize, data: EventData) {
    index.apply(source, Seq::None, &data.into(), 0);
}

fn source(index: &PrefixIndex, name: &str) -> usize {
    index.source(name, 0).unwrap()
}

fn stats(index: &PrefixIndex) -> SourceStats {
    index.stats()[0].clone()
}

/// Which prefixes (as tokens) one source holds, by medium.
#[derive(Default)]
struct Naive(BTreeMap<&'static str, BTreeSet<Vec<u32>>>);

impl Naive {
    fn run(&self, q: &[u32], media: &[&str]) -> u32 {
        let held =
            |i: usize| media.iter().any(|m| self.0.get(m).is_some_and(|s| s.contains(&q[..(i + 1) * SIZE])));
        (0..q.len() / SIZE).take_while(|i| held(*i)).count() as u32 * SIZE as u32
    }

    fn knows(&self, prefix: &[u32]) -> bool {
        self.0.values().any(|s| s.contains(prefix))
    }
}

fn random_prompts(rng: &mut Rng) -> Vec<Vec<u32>> {
    let mut prompts: Vec<Vec<u32>> = Vec::new();
    for _ in 0..12 {
        let mut p = Vec::new();
        if !prompts.is_empty() && rng.below(3) > 0 {
            let base = &prompts[rng.below(prompts.len())];
            p.extend_from_slice(&base[..rng.below(base.len() / SIZE + 1) * SIZE]);
        }
        for _ in 0..(1 + rng.below(5)) * SIZE {
            p.push(rng.below(50) as u32);
        }
        prompts.push(p);
    }
    prompts
}

#[test]
fn answers_equal_a_naive_index_at_every_step() {
    for seed in 0..20u64 {
        let mut rng = Rng(seed);
        let index = PrefixIndex::new(seed, Bounds::default(), true);
        let sources: Vec<usize> =
            (0..3).map(|i| index.source(&format!("w{}", i / 2), i % 2).unwrap()).collect();
        let mut truth: Vec<Naive> = (0..3).map(|_| Naive::default()).collect();
        let prompts = random_prompts(&mut rng);
        for _ in 0..400 {
            let s = rng.below(3);
            let medium = ["GPU", "CPU"][rng.below(2)];
            let p = &prompts[rng.below(prompts.len())];
            let blocks = p.len() / SIZE;
            let data = match rng.below(20) {
                0 => {
                    truth[s] = Naive::default();
                    let mut data = EventData::new();
                    data.push_cleared(&CommonParts::default()).unwrap();
                    data
                }
                1..=12 => {
                    // The parent is resident somewhere in the source; orphans are a test of their own.
                    let mut from = rng.below(blocks);
                    while from > 0 && !truth[s].knows(&p[..from * SIZE]) {
                        from -= 1;
                    }
                    let to = from + 1 + rng.below(blocks - from);
                    let held = truth[s].0.entry(medium).or_default();
                    held.extend((from..to).map(|i| p[..(i + 1) * SIZE].to_vec()));
                    stored(s, p, from, to, medium)
                }
                _ => {
                    let prefix = &p[..(rng.below(blocks) + 1) * SIZE];
                    truth[s].0.entry(medium).or_default().remove(prefix);
                    removed(hash_of(s, prefix), medium)
                }
            };
            apply(&index, sources[s], data);

            let q = &prompts[rng.below(prompts.len())];
            let found = find(&index, q);
            for (naive, source) in truth.iter().zip(&sources) {
                let got = found.iter().find(|m| m.source == *source);
                assert_eq!(got.map_or(0, |m| m.tokens), naive.run(q, &["GPU", "CPU"]), "seed {seed}");
                if let Some(m) = got {
                    let alone = |t| m.alone.iter().find(|x| x.0 == t).map_or(0, |x| x.1);
                    assert_eq!((alone(0), alone(1)), (naive.run(q, &["GPU"]), naive.run(q, &["CPU"])));
                    assert!(m.complete);
                }
            }
            assert!(found.is_sorted_by_key(|m| std::cmp::Reverse(m.tokens)));
        }
        let (loaded, then, note) = PrefixIndex::load(&index.dump(7, b"n"), Bounds::default(), true).unwrap();
        assert_eq!((then, &note[..]), (7, &b"n"[..]));
        assert!(loaded.stats().iter().all(|s| !s.complete && loaded.digest(s.source).is_none()));
        loaded.stats().iter().filter(|s| !s.id.is_owner).for_each(|s| loaded.confirm(s.source));
        for (q, s) in prompts.iter().zip(sources.iter().cycle()) {
            assert_eq!(find(&index, q), find(&loaded, q));
            assert_eq!(index.digest(*s), loaded.digest(*s));
        }
    }
}

#[test]
fn orphans_are_never_matched_as_roots_and_are_adopted_in_any_order() {
    let tokens: Vec<u32> = (0..6 * SIZE as u32).collect();
    for first in 0..6 {
        let index = PrefixIndex::new(7, Bounds::default(), true);
        let s = source(&index, "w");
        for k in 0..6 {
            let i = (first + k * 5) % 6;
            apply(&index, s, stored(1, &tokens, i, i + 1, "GPU"));
        }
        assert_eq!(find(&index, &tokens)[0].tokens, tokens.len() as u32, "first {first}");
        let stats = stats(&index);
        assert_eq!((stats.counters.adopted, stats.waiting), (stats.counters.orphaned, 0));
    }
}

#[test]
fn orphans_are_bounded_and_their_loss_is_said() {
    let index = PrefixIndex::new(7, Bounds { orphan_blocks: 10, ..Bounds::default() }, true);
    let s = source(&index, "w");
    for n in 0..100u32 {
        let tokens: Vec<u32> = (0..2 * SIZE as u32).map(|t| t + n * 100).collect();
        apply(&index, s, stored(1, &tokens, 1, 2, "GPU"));
    }
    let stats = stats(&index);
    assert_eq!((stats.waiting, stats.counters.orphans_dropped, stats.complete), (10, 90, false));
    assert_eq!(index.digest(s), None);
}

#[test]
fn a_parent_known_of_another_source_is_enough() {
    let tokens: Vec<u32> = (0..4 * SIZE as u32).collect();
    let index = PrefixIndex::new(7, Bounds::default(), true);
    let (a, b) = (source(&index, "a"), source(&index, "b"));
    apply(&index, a, stored(1, &tokens, 0, 2, "GPU"));
    apply(&index, b, stored(1, &tokens, 2, 4, "GPU"));
    assert!(find(&index, &tokens).iter().all(|m| m.source == a), "b does not hold the start");
    apply(&index, b, stored(1, &tokens, 0, 2, "GPU"));
    assert_eq!(find(&index, &tokens)[0].source, b);
}

#[test]
fn damaged_dumps_are_refused() {
    let index = PrefixIndex::new(7, Bounds::default(), true);
    let s = source(&index, "w");
    let tokens: Vec<u32> = (0..4 * SIZE as u32).collect();
    apply(&index, s, stored(1, &tokens, 0, 4, "CXL"));
    let mut dump = index.dump(7, b"");
    for cut in 0..dump.len() {
        assert!(PrefixIndex::load(&dump[..cut], Bounds::default(), true).is_err());
    }
    for i in 0..dump.len() {
        dump[i] ^= 0x41;
        assert!(PrefixIndex::load(&dump, Bounds::default(), true).is_err());
        dump[i] ^= 0x41;
    }
}
