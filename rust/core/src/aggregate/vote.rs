//! Applying a worker's events.

use super::rule;
use super::run::{READY, Run, Runs, WHOLE};
use super::space::{ANNOUNCED, FREE, MAX_RUN, NONE, Space, hash_key};
use super::stats::Notice;
use super::{Aggregator, rule::words_for};
use crate::events::{Attrs, EventList, EventView, HashForm, Tokens};
use crate::hash::HashRef;

/// Buffers that are reused between calls.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    ids: Vec<u32>,
}

/// The list that is being applied.
pub(super) struct Source<'a> {
    pub list: &'a EventList,
    /// Its slot among the pinned lists, once a block needs its fields.
    slot: u32,
    /// Room was made for its blocks.
    reserved: bool,
    /// Space by number of attributes: integers, and bytes of the width seen last.
    spaces: Vec<[(u8, u32); 2]>,
}

impl<'a> Source<'a> {
    pub fn new(list: &'a EventList) -> Self {
        Self { list, slot: NONE, reserved: false, spaces: Vec::new() }
    }

    /// From here on only runs keep the list.
    pub fn release(self, runs: &mut Runs) {
        runs.unpin(self.slot);
    }
}

/// One store event, of one worker or of several that say the same.
#[derive(Clone, Copy)]
pub(super) struct Report<'a> {
    pub workers: &'a [u32],
    pub view: EventView<'a>,
    /// Its position in the list.
    pub row: usize,
}

/// A run that is being collected from consecutive blocks of one event.
struct Segment {
    first: usize,
    run: u32,
    /// No block of it was known before.
    fresh: bool,
}

impl Aggregator {
    /// The space for hashes of this form in the scope of `attrs`; made if need be.
    fn space_for(&mut self, attrs: &Attrs, integers: bool, width: usize) -> u32 {
        let key = (attrs.scope(), integers, width as u8);
        if let Some(&s) = self.space_numbers.get(&key) {
            return s;
        }
        // The rules were checked for this number of workers, so the fallback is never taken.
        let test = self.rules.of_group(attrs.group_idx).test(self.workers);
        let test = test.unwrap_or(rule::Test::AtLeast(self.workers));
        let s = self.spaces.len() as u32;
        let words = words_for(self.workers);
        self.spaces.push(Space::new(key.0.clone(), integers, width, words, test));
        self.space_numbers.insert(key, s);
        s
    }

    #[inline]
    fn space_of(&mut self, view: EventView<'_>, integers: bool, width: usize, src: &mut Source<'_>) -> u32 {
        let at = view.attrs_index();
        if at >= src.spaces.len() {
            src.spaces.resize(at + 1, [(0, NONE); 2]);
        }
        let (cached_width, cached) = src.spaces[at][usize::from(integers)];
        if cached != NONE && usize::from(cached_width) == width {
            return cached;
        }
        let s = self.space_for(view.attrs(), integers, width);
        src.spaces[at][usize::from(integers)] = (width as u8, s);
        s
    }

    pub(super) fn store(&mut self, report: Report<'_>, src: &mut Source<'_>) {
        let view = report.view;
        let (form, width, bytes) = view.raw_hashes();
        match form {
            HashForm::Mixed => {
                for (i, h) in view.hashes().enumerate() {
                    let bits = h.bits().map(u64::to_le_bytes);
                    let key = match (&bits, h) {
                        (None, HashRef::Bytes(b)) if !b.is_empty() => b,
                        (Some(b), _) => b,
                        _ => continue,
                    };
                    let s = self.space_of(view, bits.is_some(), key.len(), src);
                    self.store_blocks(report, s, i, key, None, src);
                }
            }
            _ if bytes.is_empty() || width == 0 => {}
            _ => {
                let s = self.space_of(view, form != HashForm::Bytes, width, src);
                let space = &self.spaces[s as usize];
                let hash = hash_key(&self.state, &bytes[..width]);
                let first = space.find(hash, &bytes[..width]);
                if let Some(id) = first
                    && self.vote_as_run(report, s, id, bytes)
                {
                    return;
                }
                for (i, keys) in bytes.chunks(width * MAX_RUN).enumerate() {
                    self.store_blocks(report, s, i * MAX_RUN, keys, Some(hash), src);
                }
            }
        }
    }

    /// One vote for all blocks, where the event says what a waiting run says. Returns whether it did.
    #[inline]
    fn vote_as_run(&mut self, report: Report<'_>, s: u32, id: u32, bytes: &[u8]) -> bool {
        let Report { workers, view, .. } = report;
        let record = self.spaces[s as usize].records[id as usize];
        if record.run == NONE || record.pos() != 0 {
            return false;
        }
        let run = self.runs.get(record.run);
        if !run.is(WHOLE) || run.first != 0 {
            return false;
        }
        let len = run.len as usize;
        let Some(old) = self.runs.view(record.run) else { return false };
        if old.raw_hashes().2 != bytes
            || len * self.spaces[s as usize].width != bytes.len()
            || old.is_irregular() != view.is_irregular()
        {
            return false;
        }
        let same_parent = old.parent() == view.parent();
        let same_tokens = view.is_irregular() || old.tokens() == view.tokens();
        if !(same_parent && same_tokens) {
            self.note_disagreement(workers, s, id, same_tokens);
        }
        self.vote_run(workers, record.run);
        true
    }

    #[inline]
    fn vote_run(&mut self, workers: &[u32], run: u32) {
        let len = self.runs.get(run).len as usize;
        let was = self.run_holds(run);
        let votes = self.runs.votes_mut(run);
        for &worker in workers {
            if rule::is_set(votes, worker) {
                self.counters.duplicates += len as u64;
                continue;
            }
            rule::set(votes, worker);
            self.held[worker as usize] += len as u64;
            self.counters.votes += len as u64;
        }
        if !was && self.run_holds(run) {
            self.waiting -= len;
            self.make_ready(run);
        }
    }

    #[inline]
    pub(super) fn run_holds(&self, run: u32) -> bool {
        self.spaces[self.runs.get(run).space as usize].test.holds(self.runs.votes(run))
    }

    #[inline]
    pub(super) fn make_ready(&mut self, run: u32) {
        self.runs.unlink(run);
        let r = self.runs.get_mut(run);
        if !r.is(READY) {
            r.flags |= READY;
            self.ready.push(run);
        }
    }

    /// Blocks of one event from position `first` on, one by one. `hash` is that of the first key,
    /// where it is known already.
    fn store_blocks(
        &mut self,
        report: Report<'_>,
        s: u32,
        first: usize,
        keys: &[u8],
        hash: Option<u32>,
        src: &mut Source<'_>,
    ) {
        let Report { workers, view, .. } = report;
        let width = self.spaces[s as usize].width;
        let mut ids = std::mem::take(&mut self.scratch.ids);
        let mut segment: Option<Segment> = None;
        let negative = |key: &[u8]| view.raw_hashes().0 == HashForm::Int && key[7] & 0x80 != 0;
        if !std::mem::replace(&mut src.reserved, true) {
            // Where one block of a list is new, most are. Bounded by what the list itself takes.
            self.spaces[s as usize].reserve(src.list.hash_bytes() / width);
        }
        self.spaces[s as usize].prepare(keys.len() / width);
        for (k, key) in keys.chunks_exact(width).enumerate() {
            let space = &mut self.spaces[s as usize];
            let hash = match hash {
                Some(h) if k == 0 && first == 0 => h,
                _ => hash_key(&self.state, key),
            };
            let known = space.find(hash, key);
            if let Some(id) = known {
                let record = space.records[id as usize];
                let collected = segment.as_ref().is_some_and(|seg| record.run == seg.run);
                if collected || record.is(ANNOUNCED) || self.has_fields(record.run, view) {
                    if let Some(seg) = segment.take() {
                        self.finish(report, s, &seg, &mut ids, src);
                    }
                    self.explode(record.run);
                    self.compare(workers, s, id, view, first + k);
                    self.vote(workers, s, id);
                    continue;
                }
                // Known, but its fields are not: they come from here.
                self.explode(record.run);
                if record.run != NONE {
                    self.runs.leave(record.run);
                }
            }
            let next = self.runs.next_id();
            let seg = segment.get_or_insert(Segment { first: first + k, run: next, fresh: true });
            seg.fresh &= known.is_none();
            let space = &mut self.spaces[s as usize];
            let id = known.unwrap_or_else(|| {
                let minus = space.integers && (negative(key) || is_negative_at(view, first + k));
                space.insert(hash, key, minus)
            });
            // A slot that a run left in the meantime must not be taken for this segment's.
            if seg.run != next {
                seg.run = next;
                for (pos, &other) in ids.iter().enumerate() {
                    space.records[other as usize].place(next, pos as u32);
                }
            }
            space.records[id as usize].place(next, ids.len() as u32);
            ids.push(id);
        }
        if let Some(seg) = segment.take() {
            self.finish(report, s, &seg, &mut ids, src);
        }
        self.scratch.ids = ids;
    }

    /// Makes a run of the collected blocks and votes for them.
    fn finish(
        &mut self,
        report: Report<'_>,
        s: u32,
        seg: &Segment,
        ids: &mut Vec<u32>,
        src: &mut Source<'_>,
    ) {
        if src.slot == NONE {
            src.slot = self.runs.pin(src.list);
        }
        let run = self.runs.add(
            Run {
                list: src.slot,
                row: report.row as u32,
                first: seg.first as u32,
                space: s,
                step: self.step,
                flags: if seg.fresh { WHOLE } else { 0 },
                ..Run::default()
            },
            ids,
        );
        debug_assert_eq!(run, seg.run);
        if seg.fresh {
            self.waiting += ids.len();
            self.vote_run(report.workers, run);
        } else {
            for &id in ids.iter() {
                self.vote(report.workers, s, id);
            }
        }
        ids.clear();
    }

    /// Whether a run's event says at least as much of its blocks as `view`.
    fn has_fields(&self, run: u32, view: EventView<'_>) -> bool {
        run != NONE && self.runs.view(run).is_some_and(|old| !old.is_irregular() || view.is_irregular())
    }

    /// Gives every block of a whole run votes of its own.
    pub(super) fn explode(&mut self, run: u32) {
        if run == NONE || !self.runs.get(run).is(WHOLE) {
            return;
        }
        let ready = self.runs.get(run).is(READY);
        let s = self.runs.get(run).space;
        for pos in self.runs.positions(run) {
            let id = self.runs.get(run).id(pos);
            self.spaces[s as usize].votes_mut(id).copy_from_slice(self.runs.votes(run));
            if ready {
                self.mark_dirty(s, id);
            }
        }
        self.runs.get_mut(run).flags &= !(WHOLE | READY);
        self.runs.link(run);
    }

    /// Votes for one block; its run is not whole.
    fn vote(&mut self, workers: &[u32], s: u32, id: u32) {
        let space = &mut self.spaces[s as usize];
        let (was, held) = (space.holds(id), space.votes(id).iter().any(|&v| v != 0));
        for &worker in workers {
            if rule::is_set(space.votes(id), worker) {
                self.counters.duplicates += 1;
                continue;
            }
            rule::set(space.votes_mut(id), worker);
            self.held[worker as usize] += 1;
            self.counters.votes += 1;
        }
        self.waiting += usize::from(!held);
        if !was && space.holds(id) {
            self.waiting -= 1;
            self.mark_dirty(s, id);
        }
    }

    /// Takes a vote back; the block's run is not whole. The last vote takes the block with it, unless
    /// the readers have to be told first.
    fn unvote(&mut self, worker: u32, s: u32, id: u32) {
        let space = &mut self.spaces[s as usize];
        let was = space.holds(id);
        rule::unset(space.votes_mut(id), worker);
        let holds = space.holds(id);
        let empty = space.votes(id).iter().all(|&v| v == 0);
        self.held[worker as usize] -= 1;
        if was && !holds {
            self.waiting += 1;
            self.mark_dirty(s, id);
        }
        if empty {
            self.waiting -= 1;
            if !self.spaces[s as usize].records[id as usize].is(ANNOUNCED) {
                self.delete(s, id);
            }
        }
    }

    pub(super) fn delete(&mut self, s: u32, id: u32) {
        let space = &mut self.spaces[s as usize];
        let run = space.records[id as usize].run;
        space.delete(&self.state, id);
        if run != NONE {
            self.runs.leave(run);
        }
    }

    pub(super) fn remove(&mut self, workers: &[u32], view: EventView<'_>, src: &mut Source<'_>) {
        let (form, width, bytes) = view.raw_hashes();
        if form == HashForm::Mixed {
            for h in view.hashes() {
                match (h.bits(), h) {
                    (Some(bits), _) => {
                        let s = self.space_of(view, true, 8, src);
                        self.remove_block(workers, s, &bits.to_le_bytes());
                    }
                    (None, HashRef::Bytes(b)) if !b.is_empty() => {
                        let s = self.space_of(view, false, b.len(), src);
                        self.remove_block(workers, s, b);
                    }
                    _ => {}
                }
            }
        } else if width > 0 && !bytes.is_empty() {
            let s = self.space_of(view, form != HashForm::Bytes, width, src);
            for key in bytes.chunks_exact(width) {
                self.remove_block(workers, s, key);
            }
        }
    }

    fn remove_block(&mut self, workers: &[u32], s: u32, key: &[u8]) {
        let space = &self.spaces[s as usize];
        let Some(id) = space.find(hash_key(&self.state, key), key) else {
            self.counters.unknown_removals += workers.len() as u64;
            return;
        };
        self.explode(space.records[id as usize].run);
        for &worker in workers {
            let space = &self.spaces[s as usize];
            // The last vote may have taken the record with it.
            if !space.records[id as usize].is(FREE) && rule::is_set(space.votes(id), worker) {
                self.unvote(worker, s, id);
            } else {
                self.counters.unknown_removals += 1;
            }
        }
    }

    /// Takes all votes of a worker.
    pub(super) fn drop_votes(&mut self, worker: u32) {
        if self.held[worker as usize] == 0 {
            return;
        }
        let whole: Vec<u32> = self.runs.alive().filter(|&r| self.runs.get(r).is(WHOLE)).collect();
        for run in whole.into_iter().filter(|&r| rule::is_set(self.runs.votes(r), worker)).collect::<Vec<_>>()
        {
            self.drop_vote_of_run(worker, run);
        }
        for s in 0..self.spaces.len() as u32 {
            for id in 0..self.spaces[s as usize].records.len() as u32 {
                let record = self.spaces[s as usize].records[id as usize];
                let whole = record.run != NONE && self.runs.get(record.run).is(WHOLE);
                if !record.is(FREE) && !whole && rule::is_set(self.spaces[s as usize].votes(id), worker) {
                    self.unvote(worker, s, id);
                }
            }
        }
    }

    fn drop_vote_of_run(&mut self, worker: u32, run: u32) {
        let was = self.run_holds(run);
        let (len, s) = (self.runs.get(run).len as usize, self.runs.get(run).space);
        rule::unset(self.runs.votes_mut(run), worker);
        self.held[worker as usize] -= len as u64;
        if was && !self.run_holds(run) {
            self.waiting += len;
            self.runs.link(run);
        }
        if self.runs.votes(run).iter().all(|&v| v == 0) {
            self.waiting -= len;
            for pos in self.runs.positions(run) {
                let id = self.runs.get(run).id(pos);
                self.spaces[s as usize].delete(&self.state, id);
            }
            self.runs.retire(run);
        }
    }

    /// Drops the blocks that have waited longest while too many wait.
    pub(super) fn bound_waiting(&mut self) {
        while self.waiting > self.limits.max_waiting {
            let Some(run) = self.runs.oldest() else { break };
            let dropped = self.drop_waiting(run);
            self.counters.dropped_by_count += dropped;
        }
    }

    /// Takes the votes of the blocks of a run for which the rule does not hold. Returns how many.
    pub(super) fn drop_waiting(&mut self, run: u32) -> u64 {
        self.explode(run);
        self.runs.unlink(run);
        let s = self.runs.get(run).space;
        let mut dropped = 0;
        for pos in self.runs.positions(run) {
            let id = self.runs.get(run).id(pos);
            let space = &self.spaces[s as usize];
            let record = space.records[id as usize];
            let ours = !record.is(FREE) && record.run == run && record.pos() == pos;
            if !ours || record.is(ANNOUNCED) || space.holds(id) {
                continue;
            }
            for w in 0..self.workers {
                self.held[w as usize] -= u64::from(rule::is_set(space.votes(id), w));
            }
            self.waiting -= 1;
            dropped += 1;
            let last = self.runs.get(run).members == 1;
            self.delete(s, id);
            if last {
                break;
            }
        }
        dropped
    }

    /// Counts a block whose tokens or parent are not those that were given first.
    fn compare(&mut self, workers: &[u32], s: u32, id: u32, view: EventView<'_>, at: usize) {
        let record = self.spaces[s as usize].records[id as usize];
        if record.run == NONE {
            return;
        }
        let Some(old) = self.runs.view(record.run) else { return };
        let old_at = (self.runs.get(record.run).first + record.pos()) as usize;
        let same_parent = old.parent_of(old_at) == view.parent_of(at);
        let same_tokens = match (block_tokens(old, old_at), block_tokens(view, at)) {
            (Some(a), Some(b)) => a == b,
            _ => true,
        };
        if !(same_parent && same_tokens) {
            self.note_disagreement(workers, s, id, same_tokens);
        }
    }

    #[cold]
    fn note_disagreement(&mut self, workers: &[u32], s: u32, id: u32, same_tokens: bool) {
        let c = &mut self.counters;
        let first = c.disagreeing_parents + c.disagreeing_tokens == 0;
        let (count, field) = if same_tokens {
            (&mut c.disagreeing_parents, "parent_block_hash")
        } else {
            (&mut c.disagreeing_tokens, "token_ids")
        };
        *count += workers.len() as u64;
        if first && let Some(&worker) = workers.first() {
            let hash = self.spaces[s as usize].hash_ref(id).to_owned();
            self.counters.notices.push(Notice::Disagreement { worker, field, hash });
        }
    }
}

fn is_negative_at(view: EventView<'_>, at: usize) -> bool {
    view.raw_hashes().0 == HashForm::Mixed && view.hashes().nth(at).is_some_and(|h| h.is_negative())
}

/// The tokens of one block, where the event says them block by block.
fn block_tokens(view: EventView<'_>, at: usize) -> Option<&[u32]> {
    let size = view.attrs().block_size as usize;
    match view.tokens() {
        Tokens::Plain(t) if !view.is_irregular() => Some(&t[at * size..(at + 1) * size]),
        _ => None,
    }
}
