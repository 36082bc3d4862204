//! A mirror against the plain resident set, and its snapshots against both, at random interleavings.

use std::collections::{BTreeMap, BTreeSet};

use kvevents_core::codec::{Dialect, EncodeOptions, Timestamp, encode};
use kvevents_core::events::{
    Attrs, CommonParts, EventData, EventKind, EventList, EventView, ExtraKeys, Hashes, StoredParts, Tokens,
};
use kvevents_core::hash::HashRef;
use kvevents_core::publish::{Mirror, SnapshotHead};
use kvevents_core::resident::{ApplyCounts, ResidentSet};

/// A key as text: scope and hash.
type Key = String;

/// What a store said of a block: parent, tokens, extra keys, attributes.
#[derive(Clone, Debug, PartialEq)]
struct Content {
    parent: Option<Key>,
    parent_sign: bool,
    tokens: Vec<u32>,
    wide: Option<Vec<u8>>,
    extra: Option<Vec<u8>>,
    attrs: Attrs,
    regular: bool,
}

struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
    fn chance(&mut self, one_in: u64) -> bool {
        self.below(one_in) == 0
    }
}

fn key(hash: HashRef<'_>, attrs: &Attrs) -> Key {
    let hash = match hash {
        HashRef::Bytes(b) => format!("{b:?}"),
        h => format!("{}", h.bits().unwrap()),
    };
    format!("{hash} {:?}", attrs.scope())
}

/// The entries of the extra keys that the test makes: nil, or `["a", n]`.
fn extra_entries(n: usize, extra: ExtraKeys<'_>) -> Vec<Option<Vec<u8>>> {
    match extra {
        ExtraKeys::Absent => vec![None; n],
        ExtraKeys::AllNil => vec![Some(vec![0xc0]); n],
        ExtraKeys::Raw(raw) => {
            let mut at = 1 + 2 * usize::from(raw[0] == 0xdc);
            (0..n)
                .map(|_| {
                    let len = if raw[at] == 0xc0 { 1 } else { 4 };
                    at += len;
                    Some(raw[at - len..at].to_vec())
                })
                .collect()
        }
    }
}

fn contents(view: &EventView<'_>, keep_tokens: bool) -> Vec<(Key, Content)> {
    let attrs = view.attrs();
    let size = attrs.block_size as usize;
    let regular = !view.is_irregular();
    let extra = if regular { extra_entries(view.num_hashes(), view.extra_keys()) } else { Vec::new() };
    view.hashes()
        .enumerate()
        .map(|(i, h)| {
            let parent = if regular { view.parent_of(i) } else { None };
            let (tokens, wide) = match view.tokens() {
                Tokens::Plain(t) if regular && keep_tokens => (t[i * size..(i + 1) * size].to_vec(), None),
                // The test's wide ids are pairs of three bytes each.
                Tokens::Wide(raw) if regular && keep_tokens => {
                    let head = 1 + 2 * usize::from(raw[0] == 0xdc);
                    (vec![], Some(raw[head + i * size * 3..head + (i + 1) * size * 3].to_vec()))
                }
                _ => (vec![], None),
            };
            let content = Content {
                parent: parent.map(|p| key(p, attrs)),
                parent_sign: parent.is_some_and(|p| p.is_negative()),
                tokens,
                wide,
                extra: extra.get(i).cloned().flatten(),
                attrs: attrs.clone(),
                regular,
            };
            (key(h, attrs), content)
        })
        .collect()
}

/// The stream, the naive state, and the mirror under test.
struct World {
    rng: Rng,
    keep_tokens: bool,
    seq: u64,
    mirror: Mirror,
    set: ResidentSet,
    content: BTreeMap<Key, Content>,
    wide_hashes: Vec<[u8; 32]>,
}

impl World {
    fn new(seed: u64, keep_tokens: bool) -> Self {
        Self {
            rng: Rng(seed),
            keep_tokens,
            seq: 0,
            mirror: Mirror::new(0, keep_tokens),
            set: ResidentSet::new(),
            content: BTreeMap::new(),
            wide_hashes: (0..200).map(|i| [i as u8; 32]).collect(),
        }
    }

    fn attrs(&mut self) -> Attrs {
        let pick = |rng: &mut Rng, names: &[&str]| names[rng.below(names.len() as u64) as usize].into();
        Attrs {
            block_size: [2, 2, 2, 4, 0][self.rng.below(5) as usize],
            group_idx: Some(self.rng.below(2).cast_signed()),
            medium: Some(pick(&mut self.rng, &["GPU", "GPU", "CPU"])),
            lora_name: self.rng.chance(4).then(|| pick(&mut self.rng, &["a", "b"])),
            session_id: self.rng.chance(20).then(|| format!("s{}", self.rng.below(1000)).into()),
            ..Attrs::default()
        }
    }

    fn batch(&mut self) -> EventList {
        let mut data = EventData::new();
        for _ in 0..self.rng.below(5) {
            let attrs = self.attrs();
            if self.rng.chance(400) {
                data.push_cleared(&CommonParts::default()).unwrap();
            } else if self.rng.chance(3) {
                let id = data.intern(&Attrs::of_scope(&attrs.scope()));
                self.hashes(|h| data.push_removed(id, h, &CommonParts::default()).unwrap());
            } else {
                let id = data.intern(&attrs);
                self.store(&mut data, id, &attrs);
            }
        }
        data.into()
    }

    /// Some hashes: a run of small numbers, in one form or mixed.
    fn hashes(&mut self, f: impl FnOnce(Hashes<'_>)) -> usize {
        let (from, n) = (self.rng.below(150), 1 + self.rng.below(12));
        match self.rng.below(8) {
            0..3 => f(Hashes::Bytes {
                width: 32,
                data: self.wide_hashes[from as usize..(from + n) as usize].as_flattened(),
            }),
            3..5 => f(Hashes::Uint(&(from..from + n).map(|i| i | 1 << 63).collect::<Vec<_>>())),
            5 => f(Hashes::Int(
                &(from..from + n).map(|i| (50 - i.cast_signed()).cast_unsigned()).collect::<Vec<_>>(),
            )),
            6 => f(Hashes::Mixed(&[
                HashRef::Bytes(&self.wide_hashes[from as usize]),
                HashRef::Uint(from | 1 << 63),
                HashRef::Bytes(&[]),
                HashRef::Int(-5),
            ])),
            _ => {
                let short: Vec<u8> = (from..from + n).flat_map(|i| [i as u8, 1, 2]).collect();
                f(Hashes::Bytes { width: 3, data: &short });
            }
        }
        n as usize
    }

    fn store(&mut self, data: &mut EventData, id: kvevents_core::events::AttrId, attrs: &Attrs) {
        let mut given: Vec<Vec<u8>> = Vec::new();
        let mut owned = Vec::new();
        self.hashes(|h| {
            let mut probe = EventData::new();
            let id = probe.intern(&Attrs::default());
            probe.push_removed(id, h, &CommonParts::default()).unwrap();
            owned.extend(probe.view(0).hashes().map(|h| h.to_owned()));
        });
        let refs: Vec<HashRef<'_>> = owned.iter().map(|h| h.as_ref()).collect();
        let n = refs.len();
        let parent = match self.rng.below(5) {
            0 => None,
            1 => Some(HashRef::Int(-7)),
            2 => Some(HashRef::Bytes(&[9; 5])),
            // The hash before the run, so that runs chain up.
            _ => match refs[0] {
                HashRef::Bytes(b) if !b.is_empty() => {
                    given.push(
                        b.iter()
                            .enumerate()
                            .map(|(i, &x)| x.wrapping_sub(u8::from(i == 0 || b.len() == 32)))
                            .collect(),
                    );
                    Some(HashRef::Bytes(&given[0]))
                }
                HashRef::Int(v) => Some(HashRef::Int(v + 1)),
                h => h.bits().map(|v| HashRef::Uint(v - 1)),
            },
        };
        let size = attrs.block_size as usize;
        let count = if self.rng.chance(8) && size > 0 { 1 } else { n * size };
        let plain: Vec<u32> = (0..count).map(|_| self.rng.below(100_000) as u32).collect();
        let mut wide = Vec::new();
        let tokens = if self.rng.chance(8) {
            wide.extend([0xdc, 0, count as u8]);
            (0..count).for_each(|i| wide.extend([0x92, i as u8, 7]));
            Tokens::Wide(&wide)
        } else {
            Tokens::Plain(&plain)
        };
        let mut raw = Vec::new();
        let extra_keys = match self.rng.below(4) {
            0 => ExtraKeys::Absent,
            1 => {
                raw.extend([0xdc, 0, n as u8]);
                for _ in 0..n {
                    if self.rng.chance(2) {
                        raw.push(0xc0);
                    } else {
                        raw.extend([0x92, 0xa1, b'a', self.rng.below(100) as u8]);
                    }
                }
                ExtraKeys::Raw(&raw)
            }
            _ => ExtraKeys::AllNil,
        };
        let hashes = Hashes::Mixed(&refs);
        let common = CommonParts::default();
        data.push_stored(id, &StoredParts { hashes, parent, tokens, extra_keys, lookahead: None, common })
            .unwrap();
    }

    fn advance(&mut self) -> EventList {
        let events = self.batch();
        self.mirror.record(self.seq, &events, &[]);
        self.seq += 1;
        self.set.apply(&events);
        for view in events.iter() {
            match view.kind() {
                EventKind::Cleared => self.content.clear(),
                EventKind::Removed => {
                    view.hashes().for_each(|h| drop(self.content.remove(&key(h, view.attrs()))));
                }
                EventKind::Stored => {
                    // A block of mixed hashes is kept by its hash.
                    let mixed = matches!(view.raw_hashes().0, kvevents_core::events::HashForm::Mixed);
                    for (key, mut content) in contents(&view, self.keep_tokens) {
                        if mixed || !content.regular {
                            content = hash_only(content);
                        }
                        self.content.entry(key).or_insert(content);
                    }
                }
            }
        }
        assert_eq!(self.mirror.digest(), self.set.digest());
        assert_eq!(self.mirror.len(), self.set.len());
        assert_eq!(self.mirror.resume_seq(), self.seq);
        assert_eq!(self.mirror.digest_at(self.seq - 1), Some(self.set.digest()));
        events
    }

    fn check(&self, head: SnapshotHead, pieces: &[EventList], truth: &BTreeMap<Key, Content>) -> ResidentSet {
        let mut set = ResidentSet::new();
        let mut seen = BTreeSet::new();
        for view in pieces.iter().flat_map(EventList::iter) {
            assert_eq!(view.kind(), EventKind::Stored);
            for (key, content) in contents(&view, self.keep_tokens) {
                let expected = &truth.get(&key).unwrap_or_else(|| panic!("{key} is not of the snapshot"));
                let content = if expected.regular && !self.keep_tokens {
                    let i = view.hashes().position(|h| self::key(h, view.attrs()) == key).unwrap();
                    Content {
                        parent: view.parent_of(i).map(|p| self::key(p, view.attrs())),
                        parent_sign: view.parent_of(i).is_some_and(|p| p.is_negative()),
                        extra: extra_entries(view.num_hashes(), view.extra_keys())[i].clone(),
                        regular: true,
                        ..content
                    }
                } else {
                    content
                };
                assert_eq!(&&content, expected, "{key}");
                // Integers and byte strings are two worlds: no engine chains one to the other.
                let comes_first =
                    |p: &Key| truth.contains_key(p) && p.starts_with('[') == key.starts_with('[');
                if let Some(parent) = content.parent.filter(comes_first) {
                    assert!(
                        seen.contains(&parent) || parent == key || loops(&parent, truth),
                        "{key} before {parent}"
                    );
                }
                assert!(seen.insert(key), "twice");
            }
        }
        for piece in pieces {
            set.apply(piece);
        }
        assert_eq!((set.digest(), set.len() as u64), (head.digest, head.blocks));
        assert_eq!(set.counts(), ApplyCounts::default());
        set
    }
}

fn hash_only(content: Content) -> Content {
    Content {
        parent: None,
        parent_sign: false,
        tokens: vec![],
        wide: None,
        extra: None,
        regular: false,
        ..content
    }
}

/// Whether following parents comes back: then no order is right.
fn loops(start: &Key, truth: &BTreeMap<Key, Content>) -> bool {
    let mut at = start;
    for _ in 0..=truth.len() {
        match truth.get(at).and_then(|c| c.parent.as_ref()) {
            Some(p) => at = p,
            None => return false,
        }
    }
    true
}

fn run(seed: u64, keep_tokens: bool, piece_bytes: usize) {
    let mut world = World::new(seed, keep_tokens);
    for round in 0..6 {
        for _ in 0..world.rng.below(80) {
            world.advance();
        }
        let head = world.mirror.begin_snapshot(piece_bytes).expect("known");
        assert_eq!(head.resume_seq, world.seq);
        let truth = world.content.clone();
        let mut pieces = Vec::new();
        let mut later = Vec::new();
        loop {
            for _ in 0..world.rng.below(4) {
                later.push(world.advance());
            }
            let blocks = 1 + world.rng.below(40) as usize;
            let step = world.mirror.walk_snapshot(blocks).expect("begun");
            pieces.extend(step.piece);
            if !step.more {
                break;
            }
        }
        assert!(world.mirror.walk_snapshot(1).is_none());
        let mut set = world.check(head, &pieces, &truth);
        for events in &later {
            set.apply(events);
        }
        assert!(set.same(&world.set), "seed {seed}, round {round}");
        for piece in &pieces {
            let options = EncodeOptions { lossy: true, metadata: false };
            let payload =
                encode(piece, Timestamp::Float(0.0), Some(0), Dialect::VllmMap033, options).unwrap();
            let one = piece.len() == 1 && piece.view(0).num_hashes() == 1;
            assert!(payload.len() <= piece_bytes + 64 || one, "{} of {piece_bytes} bytes", payload.len());
        }
    }
}

#[test]
fn snapshots_and_what_follows_give_the_resident_set() {
    let seeds = if std::env::var_os("KVEVENTS_CHAOS").is_some() { 3000 } else { 12 };
    for seed in 0..seeds {
        run(seed, true, 1000);
        run(seed, true, 1 << 20);
        run(seed, false, 2000);
    }
}
