//! Operations on a publisher's log, mirror and snapshots and on its readers, against lists and sets.

use std::collections::{BTreeMap, BTreeSet};

use kvevents_core::codec::{Dialect, EncodeOptions, Timestamp, decode, encode};
use kvevents_core::events::{EventKind, EventList, HashForm};
use kvevents_core::publish::{Mirror, ReplayLog, SnapshotHead};
use kvevents_core::resident::{ApplyCounts, ResidentSet};

use super::batches::{Content, Key, batch, contents, key};
use super::input::Input;

/// See the module.
pub fn stream(data: &[u8]) {
    let mut input = Input::new(data);
    let mut world = World::new(input.byte());
    while !input.is_empty() {
        world.step(&mut input);
        world.check();
    }
    world.repair();
}

/// A snapshot that is being made, and all that must come of it.
struct Making {
    head: SnapshotHead,
    truth: BTreeMap<Key, Content>,
    pieces: Vec<EventList>,
    later: Vec<EventList>,
}

struct World {
    setting: u8,
    log: ReplayLog,
    mirror: Mirror,
    /// The number of the next batch.
    next: u64,
    /// What the log must hold: every batch that was sent, and the bounds.
    sent: Vec<(u64, Vec<u8>)>,
    bounds: (usize, usize),
    /// What is resident, and what was said of it.
    resident: BTreeMap<Key, Content>,
    /// A reader that misses nothing.
    set: ResidentSet,
    /// Its digests since the mirror last knew everything.
    digests: BTreeMap<u64, kvevents_core::resident::Digest>,
    known: bool,
    making: Option<Making>,
    /// A reader behind a link that loses messages, and the number that it expects.
    reader: ResidentSet,
    reader_next: u64,
}

impl World {
    fn new(setting: u8) -> Self {
        let bounds = [(4, 1 << 20), (1000, 600), (0, 1 << 20), (1000, 0)][usize::from(setting & 3)];
        Self {
            setting,
            log: ReplayLog::new(bounds.0, bounds.1),
            mirror: Mirror::new(0, setting & 4 == 0),
            next: 0,
            sent: Vec::new(),
            bounds,
            resident: BTreeMap::new(),
            set: ResidentSet::new(),
            digests: BTreeMap::new(),
            known: true,
            making: None,
            reader: ResidentSet::new(),
            reader_next: 0,
        }
    }

    fn keeps_tokens(&self) -> bool {
        self.setting & 4 == 0
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.below(16) {
            0..=7 => {
                let how = input.below(8);
                let events = batch(input);
                self.publish(&events, how);
            }
            8 => self.number(|mirror, seq| mirror.advance(seq)),
            9 => self.repair(),
            10 => self.begin(input.pick(&[1 << 20, 1000, 400])),
            11 | 12 => self.walk(1 + input.below(16)),
            13 => {
                self.mirror.abort_snapshot();
                self.making = None;
            }
            14 => {
                self.mirror.lose();
                self.known = false;
                self.digests.clear();
            }
            _ => *self = Self::new(self.setting),
        }
    }

    /// The next number, whatever happens under it.
    fn number(&mut self, f: impl FnOnce(&mut Mirror, u64)) {
        f(&mut self.mirror, self.next);
        if self.known {
            self.digests.insert(self.next, self.set.digest());
        }
        self.next += 1;
    }

    /// A batch: sent, lost on its way, dropped before it was sent, or without its first event, which could
    /// not be encoded.
    fn publish(&mut self, events: &EventList, how: usize) {
        let except: &[usize] = if how == 7 && !events.is_empty() { &[0] } else { &[] };
        let kept = events.slice(except.len()..events.len());
        self.apply(&kept);
        if let Some(making) = &mut self.making {
            making.later.push(kept.clone());
        }
        let seq = self.next;
        let payload =
            encode(&kept, Timestamp::Uint(seq), None, Dialect::VllmMap033, EncodeOptions::default())
                .expect("the newest dialect has a place for everything");
        let read = decode(&payload, true).expect("its own").events;
        assert!(read.same(&kept), "{read:?} {kept:?}");
        if how != 6 {
            self.log.append(seq, &payload).expect("numbers grow");
            self.sent.push((seq, payload));
        }
        self.number(|mirror, seq| mirror.record(seq, events, except));
        if how < 5 && self.reader_next == seq {
            self.reader.apply(&read);
            self.reader_next = self.next;
        }
    }

    /// What the events say, on the side of the model.
    fn apply(&mut self, events: &EventList) {
        self.set.apply(events);
        for v in events.iter() {
            match v.kind() {
                EventKind::Cleared => {
                    self.resident.clear();
                    self.known = true;
                }
                EventKind::Removed => {
                    v.hashes().for_each(|h| drop(self.resident.remove(&key(h, v.attrs()))));
                }
                EventKind::Stored => {
                    let by_hash = v.raw_hashes().0 == HashForm::Mixed;
                    for (key, mut content) in contents(&v) {
                        if by_hash {
                            content.chain = None;
                        }
                        self.resident.entry(key).or_insert(content);
                    }
                }
            }
        }
    }

    fn begin(&mut self, piece_bytes: usize) {
        let head = self.mirror.begin_snapshot(piece_bytes);
        assert_eq!(head.is_some(), self.known);
        let Some(head) = head else { return };
        assert_eq!((head.resume_seq, head.blocks), (self.next, self.resident.len() as u64));
        assert_eq!(head.digest, self.set.digest());
        let (truth, pieces, later) = (self.resident.clone(), Vec::new(), Vec::new());
        self.making = Some(Making { head, truth, pieces, later });
    }

    fn walk(&mut self, blocks: usize) {
        let step = self.mirror.walk_snapshot(blocks);
        assert_eq!(step.is_some(), self.making.is_some());
        let (Some(step), Some(making)) = (step, &mut self.making) else { return };
        making.pieces.extend(step.piece);
        if !step.more
            && let Some(making) = self.making.take()
        {
            let mut set = self.loaded(&making);
            for events in &making.later {
                set.apply(events);
            }
            assert!(set.same(&self.set), "a snapshot and what follows it give something else");
        }
    }

    /// A reader that has only the snapshot.
    fn loaded(&self, making: &Making) -> ResidentSet {
        let mut set = ResidentSet::new();
        let mut seen = BTreeSet::new();
        for piece in &making.pieces {
            set.apply(piece);
            for v in piece.iter() {
                for (key, mut content) in contents(&v) {
                    let truth = making.truth.get(&key).unwrap_or_else(|| panic!("{key:?} is no part"));
                    let mut truth = truth.clone();
                    if !self.keeps_tokens() {
                        (truth.chain, content.chain) = (None, None);
                    }
                    assert_eq!(content, truth, "{key:?}");
                    assert!(seen.insert(key), "twice");
                }
            }
        }
        assert_eq!((set.digest(), set.len() as u64), (making.head.digest, making.head.blocks));
        assert_eq!(set.counts(), ApplyCounts::default());
        set
    }

    /// The lossy reader catches up: by replay, or where that has a hole by a snapshot.
    fn repair(&mut self) {
        if (self.reader_next..self.next).any(|seq| self.log.get(seq).is_none()) {
            let Some(head) = self.mirror.begin_snapshot(700) else { return };
            self.making = None;
            self.reader = ResidentSet::new();
            while let Some(step) = self.mirror.walk_snapshot(9) {
                if let Some(piece) = &step.piece {
                    self.reader.apply(piece);
                }
            }
            self.reader_next = head.resume_seq;
        }
        for (seq, payload) in self.log.from(self.reader_next) {
            assert_eq!(seq, self.reader_next);
            let events = decode(&payload.to_vec(), true).expect("as it was sent").events;
            self.reader.apply(&events);
            self.reader_next += 1;
        }
        assert_eq!(self.reader_next, self.next);
        assert!(self.reader.same(&self.set), "the reader that was repaired holds something else");
    }

    fn check(&mut self) {
        assert_eq!((self.mirror.digest(), self.mirror.len()), (self.set.digest(), self.set.len()));
        assert_eq!(self.set.len(), self.resident.len());
        assert_eq!(self.mirror.resume_seq(), self.next);
        assert_eq!(self.mirror.is_known(), self.known);
        for seq in self.next.saturating_sub(8)..self.next + 2 {
            let at = if seq < self.next { self.digests.range(..=seq).next_back() } else { None };
            assert_eq!(self.mirror.digest_at(seq), at.map(|(_, d)| *d), "digest at {seq}");
        }
        self.check_log();
    }

    fn check_log(&mut self) {
        let (batches, bytes) = self.bounds;
        let total = |sent: &[(u64, Vec<u8>)]| sent.iter().map(|(_, p)| p.len()).sum::<usize>();
        // One that alone is too large is not kept, and nothing goes for it.
        if self.sent.last().is_some_and(|(_, p)| p.len() > bytes || batches == 0) {
            self.sent.pop();
        }
        while self.sent.len() > batches || total(&self.sent) > bytes {
            self.sent.remove(0);
        }
        let held: Vec<(u64, Vec<u8>)> = self.log.from(0).map(|(seq, p)| (seq, p.to_vec())).collect();
        assert_eq!(held, self.sent);
        assert_eq!(self.log.oldest(), self.sent.first().map(|s| s.0));
        assert_eq!((self.log.len(), self.log.payload_bytes()), (held.len(), total(&held)));
    }
}
