//! What a connector's worker half records: events, and stores that finish later.
//!
//! A store is announced when it is done, not when it begins. Its fields are captured at the beginning,
//! since the request may be gone at the end; a store that fails announces nothing, and one that was done
//! in part announces that part.

mod medium;

use foldhash::fast::RandomState;
use hashbrown::HashMap;

use crate::error::RecordError;
use crate::events::{Attrs, EventData, EventList, StoredParts};
use crate::pool::EventQueue;

pub use medium::{Medium, read_medium};

/// Which blocks of a store were done.
#[derive(Clone, Copy, Debug)]
pub enum Done<'a> {
    /// All.
    All,
    /// The first so many.
    First(usize),
    /// Those at these positions, in ascending order.
    At(&'a [u32]),
}

/// Finished stores whose memory is kept, and how large one may be.
const SPARE: usize = 16;
const SPARE_BYTES: usize = 1 << 18;

/// See the module. Bounded as [`EventQueue`] is; stores that wait are bounded by `max_open`.
#[derive(Clone, Debug)]
pub struct Recorder {
    queue: EventQueue,
    open: HashMap<u64, EventData, RandomState>,
    spare: Vec<EventData>,
    max_open: usize,
    next: u64,
}

impl Recorder {
    /// Nothing recorded yet.
    pub fn new(max_events: usize, max_open: usize) -> Self {
        Self {
            queue: EventQueue::new(max_events),
            open: HashMap::default(),
            spare: Vec::new(),
            max_open,
            next: 0,
        }
    }

    /// The events that wait to be taken.
    pub fn queue(&mut self) -> &mut EventQueue {
        &mut self.queue
    }

    /// Stores that began and neither completed nor failed.
    pub fn open(&self) -> usize {
        self.open.len()
    }

    /// A store begins; returns its ticket.
    ///
    /// # Errors
    /// [`RecordError::TooMany`] where stores are begun and never ended.
    pub fn begin(&mut self, attrs: &Attrs, parts: &StoredParts<'_>) -> Result<u64, RecordError> {
        if self.open.len() >= self.max_open {
            return Err(RecordError::TooMany { open: self.open.len() });
        }
        let mut data = self.spare.pop().unwrap_or_default();
        let id = data.intern(attrs);
        data.push_stored(id, parts)?;
        let ticket = self.next;
        self.next += 1;
        self.open.insert(ticket, data);
        Ok(ticket)
    }

    /// A store is done, or a part of it: announces what is.
    ///
    /// # Errors
    /// [`RecordError::Ticket`] for a ticket that is not open, [`RecordError::Blocks`] for blocks that the
    /// store has not; nothing changed then.
    pub fn complete(&mut self, ticket: u64, done: Done<'_>) -> Result<(), RecordError> {
        let data = self.open.get(&ticket).ok_or(RecordError::Ticket { ticket })?;
        let n = data.view(0).num_hashes();
        match done {
            Done::First(k) if k > n => return Err(RecordError::Blocks { index: k, blocks: n }),
            Done::At(at) => check_positions(at, n)?,
            _ => {}
        }
        let Some(data) = self.open.remove(&ticket) else { return Ok(()) };
        let whole = data.view(0);
        match done {
            Done::All => self.queue.push_view(whole)?,
            Done::First(0) => {}
            Done::First(k) => self.push_blocks(&data, 0..k)?,
            Done::At(at) => {
                let mut from = 0;
                while from < at.len() {
                    let mut to = from + 1;
                    while to < at.len() && at[to] == at[to - 1] + 1 {
                        to += 1;
                    }
                    self.push_blocks(&data, at[from] as usize..at[to - 1] as usize + 1)?;
                    from = to;
                }
            }
        }
        self.recycle(data);
        Ok(())
    }

    /// Keeps the memory of a finished store for the next ones.
    fn recycle(&mut self, mut data: EventData) {
        if self.spare.len() < SPARE && data.nbytes() < SPARE_BYTES {
            data.clear();
            self.spare.push(data);
        }
    }

    fn push_blocks(&mut self, data: &EventData, blocks: std::ops::Range<usize>) -> Result<(), RecordError> {
        let v = data.view(0);
        let mut part = EventData::new();
        let id = part.intern(v.attrs());
        part.push_part(id, v, blocks)?;
        self.queue.push_view(part.view(0))?;
        Ok(())
    }

    /// A store failed: nothing is announced.
    ///
    /// # Errors
    /// [`RecordError::Ticket`] for a ticket that is not open.
    pub fn fail(&mut self, ticket: u64) -> Result<(), RecordError> {
        let data = self.open.remove(&ticket).ok_or(RecordError::Ticket { ticket })?;
        self.recycle(data);
        Ok(())
    }

    /// Everything since the last call.
    pub fn take(&mut self) -> EventList {
        self.queue.take()
    }
}

fn check_positions(at: &[u32], n: usize) -> Result<(), RecordError> {
    for (i, &p) in at.iter().enumerate() {
        if p as usize >= n {
            return Err(RecordError::Blocks { index: p as usize, blocks: n });
        }
        if i > 0 && at[i - 1] >= p {
            return Err(RecordError::Order { index: i, before: at[i - 1], position: p });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::{CommonParts, ExtraKeys, Hashes, Tokens};
    use crate::hash::HashRef;

    fn begin(r: &mut Recorder, hashes: &[u64], parent: Option<u64>) -> u64 {
        let tokens: Vec<u32> = hashes.iter().flat_map(|h| [*h as u32, *h as u32 + 1]).collect();
        let parts = StoredParts {
            hashes: Hashes::Uint(hashes),
            parent: parent.map(HashRef::Uint),
            tokens: Tokens::Plain(&tokens),
            extra_keys: ExtraKeys::AllNil,
            lookahead: None,
            common: CommonParts::default(),
        };
        let attrs = Attrs { block_size: 2, medium: Some("CPU".into()), ..Attrs::default() };
        r.begin(&attrs, &parts).unwrap()
    }

    fn runs(list: &EventList) -> Vec<(Option<u64>, Vec<u64>, usize)> {
        let bits = |h: HashRef<'_>| h.bits().unwrap();
        list.iter()
            .map(|v| (v.parent().map(bits), v.hashes().map(bits).collect(), v.tokens().len()))
            .collect()
    }

    #[test]
    fn a_store_is_announced_when_it_is_done_and_only_what_is() {
        let mut r = Recorder::new(100, 10);
        let all = begin(&mut r, &[10, 20, 30], Some(5));
        let some = begin(&mut r, &[40, 50, 60, 70], Some(30));
        let none = begin(&mut r, &[80], None);
        assert!(r.take().is_empty() && r.open() == 3);
        r.complete(some, Done::At(&[0, 2, 3])).unwrap();
        r.fail(none).unwrap();
        assert_eq!(runs(&r.take()), [(Some(30), vec![40], 2), (Some(50), vec![60, 70], 4)]);
        r.complete(all, Done::First(2)).unwrap();
        assert_eq!(runs(&r.take()), [(Some(5), vec![10, 20], 4)]);
        assert_eq!(r.open(), 0);
    }

    #[test]
    fn wrong_tickets_and_positions_change_nothing() {
        let mut r = Recorder::new(100, 2);
        let t = begin(&mut r, &[1, 2], None);
        assert!(matches!(r.complete(t, Done::First(3)), Err(RecordError::Blocks { .. })));
        assert!(matches!(r.complete(t, Done::At(&[1, 0])), Err(RecordError::Order { .. })));
        assert!(matches!(r.complete(t + 1, Done::All), Err(RecordError::Ticket { .. })));
        r.complete(t, Done::All).unwrap();
        assert!(matches!(r.fail(t), Err(RecordError::Ticket { .. })));
        assert_eq!(runs(&r.take()), [(None, vec![1, 2], 4)]);
    }
}
