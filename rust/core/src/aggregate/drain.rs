//! What changed since the last drain.

use super::Aggregator;
use super::order::Output;
use super::rule;
use super::run::{EMIT, READY, Run, WHOLE};
use super::space::{ANNOUNCED, DIRTY, FREE, NEGATIVE, NONE, PLACED, TO_STORE};
use crate::error::EventsError;
use crate::events::{Attrs, CommonParts, EventData, EventList, Hashes};
use crate::hash::HashRef;

impl Aggregator {
    /// Ends a step: removals of what the rule stopped to accept, then stores of what it began to
    /// accept, parents first. What changed and changed back in between is not in it.
    pub fn drain(&mut self) -> Result<EventList, EventsError> {
        self.step += 1;
        if self.dirty.is_empty() && self.ready.is_empty() {
            self.note_step(false);
            self.expire()?;
            return Ok(self.nothing.clone());
        }
        let mut out = EventData::new();
        let mut gone = Vec::new();
        let runs = self.changed(&mut gone);
        self.put_removals(&gone, &mut out)?;
        self.settle_removals(&gone);
        self.reserve_for(&runs, &mut out);
        self.put_stores(&runs, Output::Drain, &mut out)?;
        for &run in &runs {
            if self.limits.forget {
                self.forget_stores(run);
            } else {
                self.settle_stores(run);
            }
        }
        self.note_step(!runs.is_empty());
        self.expire()?;
        Ok(out.into())
    }

    /// Everything that is resident, as stores with parents first: what a new reader needs. Blocks
    /// whose fields are not kept have neither tokens nor parent.
    pub fn snapshot(&mut self) -> Result<EventList, EventsError> {
        let mut out = EventData::new();
        let mut runs = Vec::new();
        let mut bare = Vec::new();
        for s in 0..self.spaces.len() {
            for id in 0..self.spaces[s].records.len() {
                let record = &mut self.spaces[s].records[id];
                if !record.is(ANNOUNCED) {
                    continue;
                }
                if record.run == NONE {
                    bare.push((s as u32, id as u32));
                    continue;
                }
                record.meta |= TO_STORE;
                let run = record.run;
                let r = self.runs.get_mut(run);
                if !r.is(EMIT) {
                    r.flags |= EMIT;
                    runs.push(run);
                }
            }
        }
        let done = self.put_stores(&runs, Output::Snapshot, &mut out);
        for &run in &runs {
            self.runs.get_mut(run).flags &= !EMIT;
            for pos in self.runs.positions(run) {
                let r = self.runs.get(run);
                self.spaces[r.space as usize].records[r.id(pos) as usize].meta &= !(TO_STORE | PLACED);
            }
        }
        done?;
        self.put_bare(&bare, &mut out)?;
        Ok(out.into())
    }

    /// Makes room for whole runs at once: growing in steps copies and clears as much memory again.
    fn reserve_for(&self, runs: &[u32], out: &mut EventData) {
        let (mut hashes, mut tokens) = (0, 0);
        for &run in runs {
            let r = self.runs.get(run);
            let size = self.runs.view(run).map_or(0, |v| v.attrs().block_size as usize);
            hashes += (r.len as usize + 1) * self.spaces[r.space as usize].width;
            tokens += r.len as usize * size;
        }
        out.reserve(runs.len(), hashes, tokens);
    }

    /// Sorts what may have changed: blocks that are gone into `gone`, runs with blocks that are new
    /// into the result.
    fn changed(&mut self, gone: &mut Vec<(u32, u32)>) -> Vec<u32> {
        let mut runs = Vec::new();
        for (s, id) in std::mem::take(&mut self.dirty) {
            let space = &mut self.spaces[s as usize];
            let holds = space.holds(id);
            let record = &mut space.records[id as usize];
            record.meta &= !DIRTY;
            let run = record.run;
            // A record that was freed may have become one of a whole run.
            if record.is(FREE) || (run != NONE && self.runs.get(run).is(WHOLE)) {
                continue;
            }
            match (record.is(ANNOUNCED), holds) {
                (true, false) => gone.push((s, id)),
                (false, true) => {
                    record.meta |= TO_STORE;
                    let r = self.runs.get_mut(run);
                    if !r.is(EMIT) {
                        r.flags |= EMIT;
                        runs.push(run);
                    }
                }
                _ => {}
            }
        }
        for run in std::mem::take(&mut self.ready) {
            if !self.runs.get(run).is(READY) || self.runs.get(run).is(EMIT) {
                continue;
            }
            let holds = self.run_holds(run);
            let r = self.runs.get_mut(run);
            r.flags &= !READY;
            if holds {
                r.flags |= EMIT;
                runs.push(run);
            }
        }
        runs
    }

    fn put_removals(&self, gone: &[(u32, u32)], out: &mut EventData) -> Result<(), EventsError> {
        self.by_space(gone, |s, hashes| {
            let attrs = out.intern(&Attrs::of_scope(&self.spaces[s as usize].scope));
            out.push_removed(attrs, hashes, &CommonParts::default())
        })
    }

    /// Stores of blocks whose fields are not known: hashes and scope only.
    pub(super) fn put_bare(&self, blocks: &[(u32, u32)], out: &mut EventData) -> Result<(), EventsError> {
        self.by_space(blocks, |s, hashes| {
            let attrs = out.intern(&Attrs::of_scope(&self.spaces[s as usize].scope));
            out.push_bare(attrs, hashes)
        })
    }

    fn by_space(
        &self,
        blocks: &[(u32, u32)],
        mut put: impl FnMut(u32, Hashes<'_>) -> Result<(), EventsError>,
    ) -> Result<(), EventsError> {
        let mut blocks = blocks.to_vec();
        blocks.sort_by_key(|b| b.0);
        for group in blocks.chunk_by(|a, b| a.0 == b.0) {
            let s = group[0].0;
            let space = &self.spaces[s as usize];
            if group.iter().any(|&(_, id)| space.records[id as usize].is(NEGATIVE)) {
                let hashes: Vec<HashRef<'_>> = group.iter().map(|&(_, id)| space.hash_ref(id)).collect();
                put(s, Hashes::Mixed(&hashes))?;
                continue;
            }
            let mut data = Vec::with_capacity(group.len() * space.width);
            for &(_, id) in group {
                data.extend_from_slice(space.key(id));
            }
            put(
                s,
                if space.integers {
                    Hashes::IntBytes { signed: false, data: &data }
                } else {
                    Hashes::Bytes { width: space.width, data: &data }
                },
            )?;
        }
        Ok(())
    }

    /// What is gone is no longer announced; what some worker still holds waits again.
    fn settle_removals(&mut self, gone: &[(u32, u32)]) {
        self.resident -= gone.len();
        let mut lapsed: Vec<(u32, u32)> = Vec::new();
        for &(s, id) in gone {
            let space = &mut self.spaces[s as usize];
            space.records[id as usize].meta &= !ANNOUNCED;
            if space.votes(id).iter().all(|&v| v == 0) {
                self.delete(s, id);
                continue;
            }
            let record = space.records[id as usize];
            if record.run == NONE {
                lapsed.push((s, id));
            } else {
                self.runs.unlink(record.run);
                self.runs.get_mut(record.run).step = self.step;
                self.runs.link(record.run);
            }
        }
        lapsed.sort_by_key(|b| b.0);
        for group in lapsed.chunk_by(|a, b| a.0 == b.0) {
            let space = group[0].0;
            let ids: Vec<u32> = group.iter().map(|b| b.1).collect();
            let bare = Run { list: NONE, space, step: self.step, ..Run::default() };
            let run = self.runs.add(bare, &ids);
            for (pos, &id) in ids.iter().enumerate() {
                self.spaces[space as usize].records[id as usize].place(run, pos as u32);
            }
        }
    }

    /// What went out is announced; its run is not needed any more, unless fields are kept.
    fn settle_stores(&mut self, run: u32) {
        let keep = self.limits.keep_content;
        let whole = self.runs.get(run).is(WHOLE);
        let s = self.runs.get(run).space as usize;
        let mut left = self.runs.get(run).members;
        for pos in self.runs.positions(run) {
            let id = self.runs.get(run).id(pos);
            let space = &mut self.spaces[s];
            let record = &mut space.records[id as usize];
            let ours = record.run == run && record.pos() == pos && record.is(TO_STORE);
            if !whole && !ours {
                continue;
            }
            record.meta = record.meta & !(TO_STORE | PLACED) | ANNOUNCED;
            self.resident += 1;
            if !keep {
                record.run = NONE;
                left -= 1;
            }
            if whole {
                space.votes_mut(id).copy_from_slice(self.runs.votes(run));
            }
        }
        let r = self.runs.get_mut(run);
        r.flags &= !(EMIT | WHOLE);
        r.members = left;
        if left == 0 {
            self.runs.retire(run);
        } else if whole {
            self.runs.unlink(run);
        }
    }

    /// What went out is forgotten, as if all workers had let it go.
    fn forget_stores(&mut self, run: u32) {
        let s = self.runs.get(run).space;
        if self.runs.get(run).is(WHOLE) {
            let len = self.runs.get(run).len;
            for w in 0..self.workers {
                self.held[w as usize] -= u64::from(rule::is_set(self.runs.votes(run), w)) * u64::from(len);
            }
            for pos in self.runs.positions(run) {
                let id = self.runs.get(run).id(pos);
                self.spaces[s as usize].delete(&self.state, id);
            }
            self.runs.retire(run);
            return;
        }
        self.runs.get_mut(run).flags &= !EMIT;
        for pos in self.runs.positions(run) {
            let id = self.runs.get(run).id(pos);
            let space = &self.spaces[s as usize];
            let record = space.records[id as usize];
            if record.is(FREE) || record.run != run || record.pos() != pos || !record.is(TO_STORE) {
                continue;
            }
            for w in 0..self.workers {
                self.held[w as usize] -= u64::from(rule::is_set(space.votes(id), w));
            }
            let last = self.runs.get(run).members == 1;
            self.delete(s, id);
            if last {
                break;
            }
        }
    }

    /// Drops what has waited too long, and memory that is held for nothing.
    fn expire(&mut self) -> Result<(), EventsError> {
        while let Some(run) = self.runs.oldest() {
            if self.step - self.runs.get(run).step <= self.limits.max_age {
                break;
            }
            let dropped = self.drop_waiting(run);
            self.counters.dropped_by_age += dropped;
        }
        self.runs.compact()
    }
}
