//! Runs: blocks whose fields stand in one event that a worker reported.
//!
//! The event is not copied: the run names the list and the row. While every block of a run has the
//! same votes, they are kept once, and a worker that reports the same event votes once for all.
//! Waiting runs form a chain, oldest first.

use std::ops::Range;

use super::space::NONE;
use crate::error::EventsError;
use crate::events::{EventData, EventList, EventView};

/// See the module.
#[derive(Clone, Debug, Default)]
pub(super) struct Run {
    /// Slot of the list, or [`NONE`] where the fields are not known any more.
    pub list: u32,
    pub row: u32,
    /// Position of the first block in the event.
    pub first: u32,
    pub len: u32,
    pub space: u32,
    /// Records that still belong to it; 0 where the slot is free.
    pub members: u32,
    /// Step in which it began to wait.
    pub step: u64,
    pub flags: u8,
    pub(super) first_id: u32,
    /// Records, where they are not consecutive.
    pub(super) ids: Option<Box<[u32]>>,
    pub(super) older: u32,
    pub(super) newer: u32,
}

/// All blocks have the same votes, those of the run.
pub(super) const WHOLE: u8 = 1;
/// Whole, the rule holds, and it is in the list of those.
pub(super) const READY: u8 = 2;
/// It is in the chain.
const LINKED: u8 = 4;
/// It has blocks for the output that is being made.
pub(super) const EMIT: u8 = 8;

impl Run {
    #[inline]
    pub fn is(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    #[inline]
    pub fn id(&self, pos: u32) -> u32 {
        self.ids.as_ref().map_or(self.first_id + pos, |ids| ids[pos as usize])
    }
}

/// The lists that runs point into, the runs, and their votes.
#[derive(Clone, Debug)]
pub(super) struct Runs {
    table: Vec<Run>,
    free: Vec<u32>,
    votes: Vec<u64>,
    words: usize,
    lists: Vec<Pinned>,
    free_lists: Vec<u32>,
    /// Rows that are kept in memory, and how many of them are needed.
    rows: usize,
    needed: usize,
    oldest: u32,
    newest: u32,
}

#[derive(Clone, Debug, Default)]
struct Pinned {
    list: EventList,
    /// Runs that point into it, and whoever is adding some.
    runs: u32,
}

impl Runs {
    pub fn new(words: usize) -> Self {
        Self {
            table: Vec::new(),
            free: Vec::new(),
            votes: Vec::new(),
            words,
            lists: Vec::new(),
            free_lists: Vec::new(),
            rows: 0,
            needed: 0,
            oldest: NONE,
            newest: NONE,
        }
    }

    pub fn nbytes(&self) -> usize {
        let lists: usize = self.lists.iter().filter(|p| p.runs > 0).map(|p| p.list.nbytes()).sum();
        let ids: usize = self.table.iter().filter_map(|r| r.ids.as_ref()).map(|ids| ids.len() * 4).sum();
        lists + ids + self.table.capacity() * size_of::<Run>() + self.votes.capacity() * 8
    }

    #[inline]
    pub fn get(&self, run: u32) -> &Run {
        &self.table[run as usize]
    }

    #[inline]
    pub fn get_mut(&mut self, run: u32) -> &mut Run {
        &mut self.table[run as usize]
    }

    /// Numbers of the runs in use.
    pub fn alive(&self) -> impl Iterator<Item = u32> + use<'_> {
        (0..self.table.len() as u32).filter(|&r| self.get(r).members > 0)
    }

    #[inline]
    pub fn votes(&self, run: u32) -> &[u64] {
        let at = run as usize * self.words;
        &self.votes[at..at + self.words]
    }

    #[inline]
    pub fn votes_mut(&mut self, run: u32) -> &mut [u64] {
        let at = run as usize * self.words;
        &mut self.votes[at..at + self.words]
    }

    /// The event that a run's fields stand in, unless they are not known.
    #[inline]
    pub fn view(&self, run: u32) -> Option<EventView<'_>> {
        let r = self.get(run);
        if r.list == NONE { None } else { Some(self.lists[r.list as usize].list.view(r.row as usize)) }
    }

    /// Keeps a list until [`Self::unpin`] and until its last run goes.
    pub fn pin(&mut self, list: &EventList) -> u32 {
        self.rows += list.rows_in_memory();
        self.needed += 1;
        let pinned = Pinned { list: list.clone(), runs: 1 };
        if let Some(slot) = self.free_lists.pop() {
            self.lists[slot as usize] = pinned;
            return slot;
        }
        self.lists.push(pinned);
        (self.lists.len() - 1) as u32
    }

    /// A new run, last in the chain, of the given records.
    pub fn add(&mut self, mut run: Run, ids: &[u32]) -> u32 {
        run.len = ids.len() as u32;
        run.members = run.len;
        run.first_id = ids[0];
        (run.older, run.newer) = (NONE, NONE);
        if ids.iter().zip(ids[0]..).any(|(&a, b)| a != b) {
            run.ids = Some(ids.into());
        }
        if run.list != NONE {
            self.lists[run.list as usize].runs += 1;
            self.needed += 1;
        }
        let id = if let Some(id) = self.free.pop() {
            self.table[id as usize] = run;
            self.votes_mut(id).fill(0);
            id
        } else {
            self.table.push(run);
            self.votes.resize(self.votes.len() + self.words, 0);
            (self.table.len() - 1) as u32
        };
        self.link(id);
        id
    }

    /// The number that the next run will get.
    pub fn next_id(&self) -> u32 {
        self.free.last().copied().unwrap_or(self.table.len() as u32)
    }

    /// One record less; the last one takes the run with it.
    pub fn leave(&mut self, run: u32) {
        let r = self.get_mut(run);
        r.members -= 1;
        if r.members == 0 {
            self.retire(run);
        }
    }

    /// Frees a run, whose records must not point to it any more.
    pub fn retire(&mut self, run: u32) {
        self.unlink(run);
        let list = std::mem::take(self.get_mut(run)).list;
        self.unpin(list);
        self.free.push(run);
    }

    /// One use of a list less.
    pub fn unpin(&mut self, list: u32) {
        if list == NONE {
            return;
        }
        self.needed -= 1;
        let pinned = &mut self.lists[list as usize];
        pinned.runs -= 1;
        if pinned.runs == 0 {
            self.rows -= pinned.list.rows_in_memory();
            pinned.list = EventList::default();
            self.free_lists.push(list);
        }
    }

    /// The run that has waited longest.
    pub fn oldest(&self) -> Option<u32> {
        (self.oldest != NONE).then_some(self.oldest)
    }

    /// Waiting runs, oldest first.
    pub fn waiting(&self) -> impl Iterator<Item = u32> + use<'_> {
        std::iter::successors(self.oldest(), |&r| {
            let newer = self.get(r).newer;
            (newer != NONE).then_some(newer)
        })
    }

    pub fn link(&mut self, run: u32) {
        if self.get(run).is(LINKED) {
            return;
        }
        let newest = self.newest;
        let r = self.get_mut(run);
        r.flags |= LINKED;
        (r.older, r.newer) = (newest, NONE);
        match newest {
            NONE => self.oldest = run,
            n => self.get_mut(n).newer = run,
        }
        self.newest = run;
    }

    pub fn unlink(&mut self, run: u32) {
        let r = self.get_mut(run);
        if !r.is(LINKED) {
            return;
        }
        r.flags &= !LINKED;
        let (older, newer) = (r.older, r.newer);
        match older {
            NONE => self.oldest = newer,
            o => self.get_mut(o).newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            n => self.get_mut(n).older = older,
        }
    }

    /// Copies the rows that are needed out of lists that are mostly not, once more than half of the
    /// memory is held for nothing.
    pub fn compact(&mut self) -> Result<(), EventsError> {
        const SLACK: usize = 1024;
        if self.rows <= self.needed * 2 + SLACK {
            return Ok(());
        }
        let sparse = |p: &Pinned| (p.runs as usize) * 2 < p.list.rows_in_memory();
        let mut moved: Vec<u32> = self
            .alive()
            .filter(|&r| self.get(r).list != NONE && sparse(&self.lists[self.get(r).list as usize]))
            .collect();
        if moved.is_empty() {
            return Ok(());
        }
        moved.sort_by_key(|&r| (self.get(r).list, self.get(r).row));
        let mut data = EventData::new();
        let mut rows = Vec::with_capacity(moved.len());
        let mut last = None;
        for &run in &moved {
            let from = (self.get(run).list, self.get(run).row);
            if let Some(view) = self.view(run)
                && last != Some(from)
            {
                data.push_view(view)?;
                last = Some(from);
            }
            rows.push(data.len() as u32 - 1);
        }
        data.shrink();
        let slot = self.pin(&data.into());
        for (&row, &run) in rows.iter().zip(&moved) {
            let r = self.get_mut(run);
            let old = std::mem::replace(&mut r.list, slot);
            r.row = row;
            self.unpin(old);
            self.needed += 1;
            self.lists[slot as usize].runs += 1;
        }
        self.unpin(slot);
        Ok(())
    }

    /// Positions of a run, for loops that change what the run belongs to.
    pub fn positions(&self, run: u32) -> Range<u32> {
        0..self.get(run).len
    }

    /// Changes the number of words of a bit set.
    pub fn set_words(&mut self, words: usize) {
        let mut votes = Vec::with_capacity(self.table.len() * words);
        for old in self.votes.chunks_exact(self.words) {
            votes.extend((0..words).map(|i| old.get(i).copied().unwrap_or(0)));
        }
        (self.votes, self.words) = (votes, words);
    }
}
