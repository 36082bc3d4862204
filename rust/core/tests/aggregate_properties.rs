//! Random workers against per-worker ledgers: after every step, what the output implies is what the
//! rule says of the ledgers, and replaying the output never removes what is not there, never stores
//! what is, and never names a parent after its child.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use kvevents_core::aggregate::{Aggregator, Limits, Rule, Rules};
use kvevents_core::events::{
    Attrs, CommonParts, EventData, EventKind, EventList, EventView, ExtraKeys, Hashes, StoredParts, Tokens,
};
use kvevents_core::hash::{BlockHash, HashRef};

const BLOCK: u32 = 4;
const MEDIA: [Option<&str>; 3] = [Some("CPU"), Some("STORAGE"), None];
const GROUPS: [Option<i64>; 2] = [Some(0), Some(1)];

/// Seeded numbers; no more is needed of them than that they differ.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// Block `i` of sequence `q`; hash, tokens and extra keys follow from both.
type Block = (u64, usize);
type Place = (usize, usize);

fn hash_of(b: Block, wide: bool) -> BlockHash {
    let n = b.0 << 8 | b.1 as u64;
    if wide {
        let mut bytes = vec![0xab; 32];
        bytes[..8].copy_from_slice(&n.to_be_bytes());
        BlockHash::Bytes(bytes.into())
    } else if b.0.is_multiple_of(3) {
        BlockHash::Int((n | 1 << 63).cast_signed())
    } else {
        BlockHash::Uint(n)
    }
}

fn attrs(place: Place, stored: bool) -> Attrs {
    Attrs {
        block_size: if stored { BLOCK } else { 0 },
        medium: MEDIA[place.0].map(Arc::from),
        group_idx: GROUPS[place.1],
        ..Attrs::default()
    }
}

fn push(data: &mut EventData, place: Place, blocks: &[Block], stored: bool, wide: bool) {
    let owned: Vec<BlockHash> = blocks.iter().map(|&b| hash_of(b, wide)).collect();
    let hashes: Vec<HashRef<'_>> = owned.iter().map(BlockHash::as_ref).collect();
    let id = data.intern(&attrs(place, stored));
    if !stored {
        data.push_removed(id, Hashes::Mixed(&hashes), &CommonParts::default()).unwrap();
        return;
    }
    let first = blocks[0];
    let parent = first.1.checked_sub(1).map(|i| hash_of((first.0, i), wide));
    let token = |b: &Block, t: u32| (b.0 as u32) << 16 | (b.1 as u32) << 4 | t;
    let tokens: Vec<u32> = blocks.iter().flat_map(|b| (0..BLOCK).map(move |t| token(b, t))).collect();
    let mut extra = vec![0x90 | blocks.len() as u8];
    extra.extend(blocks.iter().map(|b| b.1 as u8 & 7));
    let parts = StoredParts {
        hashes: Hashes::Mixed(&hashes),
        parent: parent.as_ref().map(BlockHash::as_ref),
        tokens: Tokens::Plain(&tokens),
        extra_keys: if first.0 % 4 == 1 { ExtraKeys::Raw(&extra) } else { ExtraKeys::AllNil },
        lookahead: None,
        common: CommonParts::default(),
    };
    data.push_stored(id, &parts).unwrap();
}

type Key = (Vec<u8>, Option<Arc<str>>, Option<i64>);

fn key(h: HashRef<'_>, medium: Option<&Arc<str>>, group: Option<i64>) -> Key {
    let bytes = match h {
        HashRef::Bytes(b) => b.to_vec(),
        h => h.bits().unwrap().to_le_bytes().to_vec(),
    };
    (bytes, medium.cloned(), group)
}

fn keys(place: Place, blocks: &[Block], wide: bool) -> Vec<Key> {
    let a = attrs(place, false);
    blocks.iter().map(|&b| key(hash_of(b, wide).as_ref(), a.medium.as_ref(), a.group_idx)).collect()
}

/// What a strict reader of the output believes.
#[derive(Default)]
struct Reader {
    resident: BTreeSet<Key>,
}

impl Reader {
    fn apply(&mut self, out: &EventList, all_have_content: bool) {
        let mut stored_at: BTreeMap<Key, usize> = BTreeMap::new();
        for (i, v) in out.iter().enumerate().filter(|(_, v)| v.kind() == EventKind::Stored) {
            for h in v.hashes() {
                stored_at.insert(key(h, v.attrs().medium.as_ref(), v.attrs().group_idx), i);
            }
        }
        for (i, v) in out.iter().enumerate() {
            let a = v.attrs();
            match v.kind() {
                EventKind::Cleared => panic!("an aggregator never clears a shared stream"),
                EventKind::Removed => {
                    for h in v.hashes() {
                        let k = key(h, a.medium.as_ref(), a.group_idx);
                        assert!(self.resident.remove(&k), "removed what is not there: {h:?}");
                    }
                }
                EventKind::Stored => {
                    if let Some(p) = v.parent() {
                        let at = stored_at.get(&key(p, a.medium.as_ref(), a.group_idx));
                        assert!(at.is_none_or(|&at| at < i), "child before its parent in one output");
                    }
                    if all_have_content || !v.is_irregular() {
                        check_content(&v);
                    }
                    for h in v.hashes() {
                        let k = key(h, a.medium.as_ref(), a.group_idx);
                        assert!(self.resident.insert(k), "stored what is there: {h:?}");
                    }
                }
            }
        }
    }
}

/// Tokens and extra keys are those of the blocks, however the run was cut.
fn check_content(v: &EventView<'_>) {
    assert!(!v.is_irregular());
    let Tokens::Plain(tokens) = v.tokens() else { panic!("plain tokens") };
    let mut extra = Vec::new();
    for (h, t) in v.hashes().zip(tokens.chunks(BLOCK as usize)) {
        let n = match h {
            HashRef::Bytes(b) => u64::from_be_bytes(b[..8].try_into().unwrap()),
            h => h.bits().unwrap() & !(1 << 63),
        };
        assert_eq!(t[0], ((n >> 8) << 16 | (n & 0xff) << 4) as u32, "{h:?}");
        extra.push(n as u8 & 7);
    }
    if let ExtraKeys::Raw(raw) = v.extra_keys() {
        assert_eq!(&raw[1..], &extra[..]);
    }
}

type Decide = fn(&Rule, &BTreeSet<u32>, u32) -> bool;

fn by_ledger(rule: &Rule, holders: &BTreeSet<u32>, workers: u32) -> bool {
    match rule {
        Rule::All => holders.len() == workers as usize,
        Rule::Any => !holders.is_empty(),
        Rule::KOf(k) => holders.len() >= *k as usize,
        Rule::Quorum(parts) => {
            parts.iter().all(|(who, k)| who.iter().filter(|w| holders.contains(w)).count() >= *k as usize)
        }
    }
}

fn random_rule(rng: &mut Rng, workers: u32) -> Rule {
    match rng.below(4) {
        0 => Rule::Any,
        1 => Rule::KOf(1 + rng.below(u64::from(workers)) as u32),
        2 if workers > 1 => {
            let cut = 1 + rng.below(u64::from(workers) - 1) as u32;
            let first = 1 + rng.below(u64::from(cut)) as u32;
            Rule::Quorum(vec![((0..cut).collect(), first), ((cut..workers).collect(), 1)])
        }
        _ => Rule::All,
    }
}

#[derive(Clone)]
enum Op {
    Store(Place, Vec<Block>),
    Remove(Place, Vec<Block>),
    Clear,
}

struct World {
    rng: Rng,
    workers: u32,
    rules: Rules,
    keep: bool,
    wide: bool,
    aggregator: Aggregator,
    reader: Reader,
    ledgers: Vec<BTreeSet<Key>>,
    /// What each worker does next, by its own pace.
    queues: Vec<VecDeque<Op>>,
    events: usize,
}

impl World {
    fn new(seed: u64, many: u32) -> Self {
        let mut rng = Rng(seed);
        let workers = if many > 0 { many } else { 1 + rng.below(9) as u32 };
        let rules = Rules {
            default: random_rule(&mut rng, workers),
            groups: vec![(Some(1), random_rule(&mut rng, workers))],
        };
        let keep = rng.chance(50);
        let limits = Limits { keep_content: keep, ..Limits::default() };
        Self {
            workers,
            keep,
            wide: rng.chance(50),
            aggregator: Aggregator::new(workers, rules.clone(), limits).unwrap(),
            rules,
            reader: Reader::default(),
            ledgers: vec![BTreeSet::new(); workers as usize],
            queues: vec![VecDeque::new(); workers as usize],
            rng,
            events: 0,
        }
    }

    fn plan(&mut self) {
        for _ in 0..=self.rng.below(3) {
            let place = (self.rng.below(3) as usize, self.rng.below(2) as usize);
            let (sequence, from) = (self.rng.below(12), self.rng.below(12) as usize);
            let len = self.rng.below(8) as usize;
            let blocks: Vec<Block> = (from..=from + len).map(|i| (sequence, i)).collect();
            let remove = self.rng.chance(35);
            for w in 0..self.workers as usize {
                if self.rng.chance(10) {
                    continue; // this worker's store failed, or it kept the block
                }
                if !remove && self.rng.chance(30) && blocks.len() > 1 {
                    let cut = 1 + self.rng.below(blocks.len() as u64 - 1) as usize;
                    let (a, b) = (blocks[..cut].to_vec(), blocks[cut..].to_vec());
                    let halves = if self.rng.chance(30) { [b, a] } else { [a, b] };
                    self.queues[w].extend(halves.map(|half| Op::Store(place, half)));
                    continue;
                }
                let op = if remove { Op::Remove } else { Op::Store }(place, blocks.clone());
                if self.rng.chance(5) {
                    self.queues[w].push_back(op.clone());
                }
                self.queues[w].push_back(op);
            }
        }
    }

    fn report(&mut self, worker: usize) -> EventList {
        let mut data = EventData::new();
        let n = if self.rng.chance(20) { 0 } else { self.rng.below(4) as usize + 1 };
        for _ in 0..n {
            let Some(op) = self.queues[worker].pop_front() else { break };
            self.events += 1;
            let ledger = &mut self.ledgers[worker];
            match if self.rng.chance(1) { Op::Clear } else { op } {
                Op::Store(place, blocks) => {
                    ledger.extend(keys(place, &blocks, self.wide));
                    push(&mut data, place, &blocks, true, self.wide);
                }
                Op::Remove(place, blocks) => {
                    for k in keys(place, &blocks, self.wide) {
                        ledger.remove(&k);
                    }
                    push(&mut data, place, &blocks, false, self.wide);
                }
                Op::Clear => {
                    ledger.clear();
                    data.push_cleared(&CommonParts::default()).unwrap();
                }
            }
        }
        data.into()
    }

    fn truth(&self, decide: Decide) -> BTreeSet<Key> {
        let mut holders: BTreeMap<&Key, BTreeSet<u32>> = BTreeMap::new();
        for (w, ledger) in self.ledgers.iter().enumerate() {
            for k in ledger {
                holders.entry(k).or_default().insert(w as u32);
            }
        }
        let rule = |group| if group == Some(1) { &self.rules.groups[0].1 } else { &self.rules.default };
        holders
            .into_iter()
            .filter(|(k, who)| decide(rule(k.2), who, self.workers))
            .map(|(k, _)| k.clone())
            .collect()
    }

    fn step(&mut self, decide: Decide) -> Result<(), String> {
        self.plan();
        let reports: Vec<(u32, EventList)> =
            (0..self.workers).map(|w| (w, self.report(w as usize))).collect();
        if self.rng.chance(50) {
            self.aggregator.add_all(&reports).unwrap();
        } else {
            for (w, events) in &reports {
                self.aggregator.add(*w, events).unwrap();
            }
        }
        if self.rng.chance(3) {
            let w = self.rng.below(u64::from(self.workers)) as usize;
            self.aggregator.forget_worker(w as u32).unwrap();
            self.ledgers[w].clear();
        }
        if self.rng.chance(2) && self.workers < 9 {
            self.workers += 1;
            self.aggregator.resize(self.workers, None).unwrap();
            self.ledgers.push(BTreeSet::new());
            self.queues.push(VecDeque::new());
        }
        let out = self.aggregator.drain().unwrap();
        self.reader.apply(&out, self.keep);
        let truth = self.truth(decide);
        if truth != self.reader.resident {
            let both = truth.intersection(&self.reader.resident).count();
            let announced = self.reader.resident.len();
            return Err(format!("{} in the ledgers, {announced} announced, {both} in both", truth.len()));
        }
        assert_eq!(self.aggregator.resident(), truth.len());
        let held: Vec<u64> = self.ledgers.iter().map(|l| l.len() as u64).collect();
        let stats = self.aggregator.stats();
        assert_eq!(stats.held, held);
        let any = self.truth(|_, who, _| !who.is_empty()).len();
        assert_eq!(stats.waiting, any - truth.len());
        Ok(())
    }
}

/// Worker events of the long test; `make chaos` raises it.
#[expect(clippy::disallowed_methods, reason = "the length of a test is no configuration")]
fn budget() -> usize {
    std::env::var("KVEVENTS_WORKER_EVENTS").ok().and_then(|v| v.parse().ok()).unwrap_or(100_000)
}

#[test]
fn what_the_output_implies_is_what_the_rule_says_of_the_ledgers() {
    let (mut events, mut seed) = (0, 1);
    while events < budget() {
        let mut world = World::new(seed, 0);
        for step in 0..60 {
            if let Err(e) = world.step(by_ledger) {
                panic!("seed {seed}, step {step}, {:?}: {e}", world.rules);
            }
            if step % 20 == 7 {
                let mut fresh = Reader::default();
                fresh.apply(&world.aggregator.snapshot().unwrap(), world.keep);
                assert_eq!(fresh.resident, world.reader.resident, "seed {seed}, step {step}");
            }
        }
        events += world.events;
        seed += 1;
    }
}

#[test]
fn bit_sets_of_many_words() {
    for (seed, workers) in [(3, 64), (4, 65), (5, 200), (6, 1024)] {
        let mut world = World::new(seed, workers);
        for step in 0..12 {
            world.step(by_ledger).unwrap_or_else(|e| panic!("{workers} workers, step {step}: {e}"));
        }
    }
}

/// Workers that report the very same list vote together; nothing may tell that from voting one by one.
#[test]
fn workers_that_say_the_same_count_as_each_alone() {
    let rules = || Rules { default: Rule::All, groups: vec![(Some(1), Rule::KOf(2))] };
    let mut rng = Rng(11);
    for wide in [false, true] {
        let make = || Aggregator::new(4, rules(), Limits::default()).unwrap();
        let (mut together, mut alone) = (make(), make());
        let (mut reader, mut other) = (Reader::default(), Reader::default());
        let mut announced = 0;
        for step in 0..400 {
            let mut lists: Vec<EventList> = Vec::new();
            for _ in 0..2 {
                let mut data = EventData::new();
                for _ in 0..rng.below(5) {
                    let place = (rng.below(2) as usize, rng.below(2) as usize);
                    let (sequence, first) = (rng.below(6), rng.below(5) as usize);
                    let blocks: Vec<Block> =
                        (first..first + 1 + rng.below(3) as usize).map(|i| (sequence, i)).collect();
                    if rng.chance(3) {
                        data.push_cleared(&CommonParts::default()).unwrap();
                    }
                    push(&mut data, place, &blocks, rng.chance(60), wide);
                }
                lists.push(data.into());
            }
            let reports: Vec<(u32, EventList)> = (0..4)
                .map(|w| {
                    let list = &lists[usize::from(!rng.chance(80))];
                    // Some are the same columns, some another copy of them.
                    let copy = rng.chance(50).then(|| list.select(0..list.len()).unwrap());
                    (w, copy.unwrap_or_else(|| list.clone()))
                })
                .collect();
            together.add_all(&reports).unwrap();
            for (w, events) in &reports {
                alone.add(*w, events).unwrap();
            }
            let (out, expected) = (together.drain().unwrap(), alone.drain().unwrap());
            announced += out.len();
            reader.apply(&out, false);
            other.apply(&expected, false);
            assert_eq!(reader.resident, other.resident, "step {step}");
            let (mut a, b) = (together.stats(), alone.stats());
            a.nbytes = b.nbytes;
            assert_eq!(a, b, "step {step}");
        }
        assert!(announced > 100, "{announced}");
    }
}

#[test]
fn a_worker_that_is_named_twice_counts_in_the_order_of_its_reports() {
    let list = |stored| {
        let mut data = EventData::new();
        push(&mut data, (0, 0), &[(1, 0)], stored, false);
        EventList::from(data)
    };
    let mut votes = Aggregator::new(1, Rules::default(), Limits::default()).unwrap();
    votes.add_all(&[(0, list(true)), (0, list(false)), (0, list(true))]).unwrap();
    assert_eq!(votes.drain().unwrap().len(), 1);
    votes.add_all(&[(0, list(false)), (0, list(true)), (0, list(false))]).unwrap();
    assert_eq!(votes.drain().unwrap().view(0).kind(), EventKind::Removed);
}

#[test]
fn what_is_forgotten_is_announced_each_time_that_it_is_agreed_on() {
    let limits = Limits { forget: true, ..Limits::default() };
    let mut votes = Aggregator::new(2, Rules::default(), limits).unwrap();
    let stored = |blocks: &[usize]| {
        let mut data = EventData::new();
        for &i in blocks {
            push(&mut data, (0, 0), &[(1, i)], true, false);
        }
        EventList::from(data)
    };
    for _ in 0..3 {
        votes.add_all(&[(0, stored(&[0, 1])), (1, stored(&[0, 1]))]).unwrap();
        assert_eq!(votes.drain().unwrap().iter().map(|v| v.num_hashes()).sum::<usize>(), 2);
        assert_eq!((votes.resident(), votes.stats().held), (0, vec![0, 0]));
    }
    // A run of which a part is agreed on: the rest waits on.
    let mut run = EventData::new();
    push(&mut run, (0, 0), &[(1, 0), (1, 1), (1, 2)], true, false);
    votes.add_all(&[(0, run.into()), (1, stored(&[1]))]).unwrap();
    let out = votes.drain().unwrap();
    assert_eq!((out.len(), out.view(0).num_hashes()), (1, 1));
    assert_eq!((votes.stats().held, votes.stats().waiting), (vec![2, 0], 2));
    votes.add(1, &stored(&[0, 2])).unwrap();
    assert_eq!(votes.drain().unwrap().iter().map(|v| v.num_hashes()).sum::<usize>(), 2);
    assert_eq!((votes.stats().held, votes.stats().waiting), (vec![0, 0], 0));
    assert!(votes.drain().unwrap().is_empty());
}

/// Negative control: with an oracle that wants one worker less, the suite fails.
#[test]
fn an_oracle_that_wants_one_worker_less_is_told_apart() {
    let wrong: Decide = |rule, who, workers| match rule {
        Rule::All => who.len() + 1 >= workers as usize,
        other => by_ledger(other, who, workers),
    };
    let caught = (1..40).any(|seed| {
        let mut world = World::new(seed, 0);
        (0..30).any(|_| world.step(wrong).is_err())
    });
    assert!(caught);
}
