//! The operator's answer to 'why do I see no events'.

use super::Aggregator;
use super::rule;
use super::run::WHOLE;
use super::space::{FREE, NONE};
use crate::hash::BlockHash;

/// Something to tell a person, once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A worker gave other tokens, or another parent, for a hash than the first did. The first
    /// worker's fields are published. Told for the first time only; all are counted.
    Disagreement {
        /// The worker that differs.
        worker: u32,
        /// The field, by vLLM's name.
        field: &'static str,
        /// The block.
        hash: BlockHash,
    },
    /// Steps went by in which stores came and no block was agreed on.
    NothingAgrees {
        /// Number of those steps.
        steps: u64,
        /// Blocks that wait.
        waiting: usize,
    },
}

/// What is counted while events are applied.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub votes: u64,
    pub duplicates: u64,
    pub unknown_removals: u64,
    pub dropped_by_count: u64,
    pub dropped_by_age: u64,
    pub disagreeing_tokens: u64,
    pub disagreeing_parents: u64,
    pub without_content: u64,
    pub steps_without_agreement: u64,
    pub votes_at_last_step: u64,
    pub warned: bool,
    pub notices: Vec<Notice>,
}

/// A report; see [`Aggregator::stats`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Number of workers.
    pub workers: u32,
    /// Number of drains.
    pub steps: u64,
    /// Blocks that are announced.
    pub resident: usize,
    /// Blocks that some worker holds and the rule does not accept.
    pub waiting: usize,
    /// Steps that the oldest of them has waited; 0 where none waits.
    pub oldest_waiting_steps: u64,
    /// For each worker, how many of the waiting blocks it does not hold.
    pub waiting_for: Vec<u64>,
    /// For each worker, how many blocks it holds.
    pub held: Vec<u64>,
    /// Votes counted: a block that a worker did not hold before.
    pub votes: u64,
    /// Stores of blocks that the worker held already.
    pub duplicates: u64,
    /// Removals of blocks that the worker did not hold.
    pub unknown_removals: u64,
    /// Blocks that lost their votes because too many waited.
    pub dropped_by_count: u64,
    /// Blocks that lost their votes because they waited too long.
    pub dropped_by_age: u64,
    /// Blocks for which a worker gave other tokens than the first.
    pub disagreeing_tokens: u64,
    /// Blocks for which a worker gave another parent than the first.
    pub disagreeing_parents: u64,
    /// Blocks that had to be announced without tokens, because those had been dropped.
    pub without_content: u64,
    /// Steps with new stores since a block was agreed on.
    pub steps_without_agreement: u64,
    /// Bytes of the state.
    pub nbytes: usize,
}

impl Aggregator {
    /// How many blocks wait, for whom and since when, and everything that is counted. Looks at every
    /// block: for people, not for every step.
    pub fn stats(&self) -> Stats {
        let mut waiting_for = vec![0; self.workers as usize];
        let mut missing = |votes: &[u64], blocks: u64| {
            for (w, n) in waiting_for.iter_mut().enumerate() {
                *n += if rule::is_set(votes, w as u32) { 0 } else { blocks };
            }
        };
        let mut oldest = None;
        for run in self.runs.waiting() {
            let r = self.runs.get(run);
            oldest = oldest.into_iter().chain([r.step]).min();
            if r.is(WHOLE) && !self.run_holds(run) {
                missing(self.runs.votes(run), u64::from(r.len));
            }
        }
        for space in &self.spaces {
            for (id, record) in space.records.iter().enumerate() {
                let whole = record.run != NONE && self.runs.get(record.run).is(WHOLE);
                let votes = space.votes(id as u32);
                let held = votes.iter().any(|&v| v != 0);
                if !record.is(FREE) && !whole && held && !space.holds(id as u32) {
                    missing(votes, 1);
                }
            }
        }
        let c = &self.counters;
        Stats {
            workers: self.workers,
            steps: self.step,
            resident: self.resident,
            waiting: self.waiting,
            oldest_waiting_steps: oldest.map_or(0, |s| self.step - s),
            waiting_for,
            held: self.held.clone(),
            votes: c.votes,
            duplicates: c.duplicates,
            unknown_removals: c.unknown_removals,
            dropped_by_count: c.dropped_by_count,
            dropped_by_age: c.dropped_by_age,
            disagreeing_tokens: c.disagreeing_tokens,
            disagreeing_parents: c.disagreeing_parents,
            without_content: c.without_content,
            steps_without_agreement: c.steps_without_agreement,
            nbytes: self.nbytes(),
        }
    }

    /// Number of blocks that a worker holds.
    pub fn held(&self, worker: u32) -> Option<u64> {
        self.held.get(worker as usize).copied()
    }

    /// What a person should be told and was not yet.
    pub fn take_notices(&mut self) -> Vec<Notice> {
        std::mem::take(&mut self.counters.notices)
    }

    /// Whether [`Self::take_notices`] has something.
    #[inline]
    pub fn has_notices(&self) -> bool {
        !self.counters.notices.is_empty()
    }

    /// Notes whether the step that ends brought votes, and agreement.
    pub(super) fn note_step(&mut self, agreed: bool) {
        let c = &mut self.counters;
        if agreed {
            c.steps_without_agreement = 0;
        } else if c.votes > c.votes_at_last_step {
            c.steps_without_agreement += 1;
            if c.steps_without_agreement >= self.limits.warn_after && !c.warned {
                c.warned = true;
                c.notices
                    .push(Notice::NothingAgrees { steps: c.steps_without_agreement, waiting: self.waiting });
            }
        }
        c.votes_at_last_step = c.votes;
    }
}
