//! From what every worker holds to what the engine holds.
//!
//! Each tensor- or pipeline-parallel worker stores its own part of a block; a block is usable when
//! enough workers hold it. The unit is the block, not the event: workers may cut runs differently and
//! report in different steps. The state is, for every `(hash, scope)`, the set of workers that hold
//! it; what [`Aggregator::drain`] returns is the difference between what the rule says now and what it
//! said at the last drain. A worker that says nothing changes nothing.
//!
//! | file | what it has |
//! |---|---|
//! | `rule` | the rules, and asking them of a bit set |
//! | `table` | hash to record |
//! | `space` | records of one scope: key, votes, flags |
//! | `run` | events that give waiting blocks their fields; the chain of those that wait |
//! | `vote` | applying a worker's events |
//! | `drain` | what changed, parents first |
//! | `order` | the order of the output, and copying fields into it |
//! | `stats` | who waits for whom, since when |

mod drain;
mod order;
mod rule;
mod run;
mod space;
mod stats;
mod table;
mod vote;

use std::ops::Range;

use foldhash::fast::RandomState;
use hashbrown::HashMap;

pub use rule::{MAX_WORKERS, Rule, Rules};
pub use stats::{Notice, Stats};

use crate::error::AggregateError;
use crate::events::{EventKind, EventList, EventView, Scope};
use crate::hash::HashRef;
use rule::words_for;
use run::Runs;
use space::{ANNOUNCED, DIRTY, FREE, NONE, Space, hash_key};
use stats::Counters;

/// Bounds of an [`Aggregator`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Blocks that may wait for more workers; beyond it the oldest lose their votes.
    pub max_waiting: usize,
    /// Steps that a block may wait; then it loses its votes.
    pub max_age: u64,
    /// Steps that bring stores and no agreement before [`Notice::NothingAgrees`].
    pub warn_after: u64,
    /// Keep the fields of resident blocks, so that they can be announced again
    /// ([`Aggregator::snapshot`], or after a worker was replaced) with their tokens.
    pub keep_content: bool,
    /// Forget a block, with its votes, as soon as it is announced: for workers that never say that one
    /// left. It goes out again each time that it is agreed on.
    pub forget: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self { max_waiting: 1 << 20, max_age: 10_000, warn_after: 100, keep_content: false, forget: false }
    }
}

/// Whose an event is.
#[derive(Clone, Copy)]
enum Whose<'a> {
    Workers(&'a [u32]),
    Origin,
}

fn worker_of(view: EventView<'_>) -> Option<u32> {
    view.origin().and_then(|o| o.worker)
}

/// The reports, those of workers that say the same as one.
fn alike(reports: &[(u32, EventList)]) -> Vec<(Vec<u32>, vote::Source<'_>)> {
    // So many different ones are compared with: where workers differ, comparing all would cost more than it
    // saves.
    const LOOK_AT: usize = 4;
    let mut groups: Vec<(Vec<u32>, vote::Source<'_>)> = Vec::new();
    for (worker, events) in reports {
        match groups.iter_mut().take(LOOK_AT).find(|(_, source)| source.list.is_twin(events)) {
            Some((workers, _)) => workers.push(*worker),
            None => groups.push((vec![*worker], vote::Source::new(events))),
        }
    }
    groups
}

/// See the module.
#[derive(Debug)]
pub struct Aggregator {
    workers: u32,
    rules: Rules,
    limits: Limits,
    state: RandomState,
    spaces: Vec<Space>,
    space_numbers: HashMap<(Scope, bool, u8), u32, RandomState>,
    runs: Runs,
    /// Blocks by `(space, record)` whose state may differ from what was announced.
    dirty: Vec<(u32, u32)>,
    /// Whole runs for which the rule began to hold.
    ready: Vec<u32>,
    /// Blocks that each worker holds.
    held: Vec<u64>,
    /// Blocks that some worker holds and the rule does not accept.
    waiting: usize,
    /// Blocks that are announced.
    resident: usize,
    step: u64,
    counters: Counters,
    /// What a drain gives that has nothing to say.
    nothing: EventList,
    /// Reused between calls.
    scratch: vote::Scratch,
}

impl Aggregator {
    /// An aggregator of one source with workers `0..workers`.
    pub fn new(workers: u32, rules: Rules, limits: Limits) -> Result<Self, AggregateError> {
        rules.check(workers)?;
        let words = words_for(workers);
        Ok(Self {
            workers,
            rules,
            limits,
            state: RandomState::default(),
            spaces: Vec::new(),
            space_numbers: HashMap::with_hasher(RandomState::default()),
            runs: Runs::new(words),
            dirty: Vec::new(),
            ready: Vec::new(),
            held: vec![0; workers as usize],
            waiting: 0,
            resident: 0,
            step: 0,
            counters: Counters::default(),
            nothing: EventList::default(),
            scratch: vote::Scratch::default(),
        })
    }

    /// Number of workers.
    pub fn workers(&self) -> u32 {
        self.workers
    }

    /// The rules.
    pub fn rules(&self) -> &Rules {
        &self.rules
    }

    /// Number of blocks that were announced and not taken back.
    pub fn resident(&self) -> usize {
        self.resident
    }

    fn check_worker(&self, worker: u32) -> Result<(), AggregateError> {
        if worker < self.workers {
            return Ok(());
        }
        Err(AggregateError::Worker { seen: i64::from(worker), workers: self.workers })
    }

    /// Applies what one worker reports. The worker's stores and removals count in their order; a
    /// clear takes all its votes.
    pub fn add(&mut self, worker: u32, events: &EventList) -> Result<(), AggregateError> {
        self.check_worker(worker)?;
        self.apply(events, Whose::Workers(&[worker]));
        Ok(())
    }

    /// Applies events of which each names its worker. Nothing changes if one does not.
    pub fn add_tagged(&mut self, events: &EventList) -> Result<(), AggregateError> {
        for (i, view) in events.iter().enumerate() {
            self.check_worker(worker_of(view).ok_or(AggregateError::Untagged { index: i })?)?;
        }
        self.apply(events, Whose::Origin);
        Ok(())
    }

    /// Applies reports of workers; the same as adding them one by one. Workers that say the same, the
    /// usual case, vote together. Where each worker is named once, the others' reports are applied in
    /// chunks, so that what workers say alike is compared while it is near: of fields on which they
    /// differ, those that stand earlier in a report count as first.
    pub fn add_all(&mut self, reports: &[(u32, EventList)]) -> Result<(), AggregateError> {
        const CHUNK: usize = 16;
        for (worker, _) in reports {
            self.check_worker(*worker)?;
        }
        let mut named = vec![0u64; words_for(self.workers)];
        for (worker, _) in reports {
            if rule::is_set(&named, *worker) {
                // Its reports count in their order.
                for (worker, events) in reports {
                    self.apply(events, Whose::Workers(&[*worker]));
                }
                return Ok(());
            }
            rule::set(&mut named, *worker);
        }
        let mut groups = alike(reports);
        let longest = groups.iter().map(|(_, source)| source.list.len()).max().unwrap_or(0);
        for start in (0..longest).step_by(CHUNK) {
            for (workers, source) in &mut groups {
                let end = (start + CHUNK).min(source.list.len());
                self.apply_part(start..end, source, Whose::Workers(workers));
            }
        }
        for (_, source) in groups {
            source.release(&mut self.runs);
        }
        self.bound_waiting();
        Ok(())
    }

    fn apply(&mut self, events: &EventList, whose: Whose<'_>) {
        if events.is_empty() {
            return;
        }
        let mut source = vote::Source::new(events);
        self.apply_part(0..events.len(), &mut source, whose);
        source.release(&mut self.runs);
        self.bound_waiting();
    }

    fn apply_part(&mut self, part: Range<usize>, source: &mut vote::Source<'_>, whose: Whose<'_>) {
        let events = source.list;
        for i in part {
            let view = events.view(i);
            let one;
            let workers = match whose {
                Whose::Workers(workers) => workers,
                Whose::Origin => {
                    one = [worker_of(view).unwrap_or_default()];
                    &one
                }
            };
            match view.kind() {
                EventKind::Stored => self.store(vote::Report { workers, view, row: i }, source),
                EventKind::Removed => self.remove(workers, view, source),
                EventKind::Cleared => {
                    for &worker in workers {
                        self.drop_votes(worker);
                    }
                }
            }
        }
    }

    /// A worker left or restarted: its votes are gone, and [`Self::drain`] says what went with them.
    pub fn forget_worker(&mut self, worker: u32) -> Result<(), AggregateError> {
        self.check_worker(worker)?;
        self.drop_votes(worker);
        Ok(())
    }

    /// Another number of workers, and other rules where they are given. Workers that would be cut off
    /// must have been forgotten.
    pub fn resize(&mut self, workers: u32, rules: Option<Rules>) -> Result<(), AggregateError> {
        let rules = rules.unwrap_or_else(|| self.rules.clone());
        rules.check(workers)?;
        for (w, &blocks) in self.held.iter().enumerate().skip(workers as usize) {
            if blocks > 0 {
                return Err(AggregateError::StillVotes { worker: w as u32, blocks, workers });
            }
        }
        let words = words_for(workers);
        for space in &mut self.spaces {
            space.test = rules.of_group(space.scope.group_idx).test(workers)?;
            if words != space.words {
                space.set_words(words);
            }
        }
        self.runs.set_words(words);
        (self.workers, self.rules) = (workers, rules);
        self.held.resize(workers as usize, 0);
        self.recount();
        Ok(())
    }

    /// Finds anew what the rules accept.
    fn recount(&mut self) {
        self.waiting = 0;
        let alive: Vec<u32> = self.runs.alive().filter(|&r| self.runs.get(r).is(run::WHOLE)).collect();
        for run in alive {
            let len = self.runs.get(run).len as usize;
            if self.run_holds(run) {
                self.make_ready(run);
            } else {
                self.waiting += len;
            }
        }
        for s in 0..self.spaces.len() {
            for id in 0..self.spaces[s].records.len() as u32 {
                let record = self.spaces[s].records[id as usize];
                if record.is(FREE) || (record.run != NONE && self.runs.get(record.run).is(run::WHOLE)) {
                    continue;
                }
                let space = &self.spaces[s];
                let holds = space.holds(id);
                if !holds && space.votes(id).iter().any(|&v| v != 0) {
                    self.waiting += 1;
                }
                if holds != record.is(ANNOUNCED) {
                    self.mark_dirty(s as u32, id);
                }
            }
        }
    }

    #[inline]
    fn mark_dirty(&mut self, space: u32, id: u32) {
        let record = &mut self.spaces[space as usize].records[id as usize];
        if !record.is(DIRTY) {
            record.meta |= DIRTY;
            self.dirty.push((space, id));
        }
    }

    /// The workers that hold a block; empty where none does.
    pub fn holders(&self, hash: HashRef<'_>, scope: &Scope) -> Vec<u32> {
        let bits = hash.bits().map(u64::to_le_bytes);
        let (integers, key): (bool, &[u8]) = match (&bits, hash) {
            (Some(b), _) => (true, b),
            (None, HashRef::Bytes(b)) => (false, b),
            (None, _) => return Vec::new(),
        };
        let Some(&s) = self.space_numbers.get(&(scope.clone(), integers, key.len() as u8)) else {
            return Vec::new();
        };
        let space = &self.spaces[s as usize];
        let Some(id) = space.find(hash_key(&self.state, key), key) else { return Vec::new() };
        let record = space.records[id as usize];
        let whole = record.run != NONE && self.runs.get(record.run).is(run::WHOLE);
        let votes = if whole { self.runs.votes(record.run) } else { space.votes(id) };
        (0..self.workers).filter(|&w| rule::is_set(votes, w)).collect()
    }

    /// Bytes of the state: what grows with the number of blocks.
    pub fn nbytes(&self) -> usize {
        self.spaces.iter().map(Space::nbytes).sum::<usize>()
            + self.runs.nbytes()
            + self.dirty.capacity() * 8
            + self.ready.capacity() * 4
    }
}
