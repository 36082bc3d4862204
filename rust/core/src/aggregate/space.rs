//! The blocks of one scope whose hashes have one form: a record, a key and a bit set each.

use std::hash::{BuildHasher, Hasher};

use foldhash::fast::RandomState;

use super::rule::Test;
use super::table::Table;
use crate::events::Scope;
use crate::hash::HashRef;

/// No run, no list, end of a chain.
pub(super) const NONE: u32 = u32::MAX;

/// What is known of one block beside its key and its votes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    /// The run that has its fields, or [`NONE`].
    pub run: u32,
    /// Position in that run, and flags.
    pub meta: u32,
}

/// The readers were told that it is resident.
pub(super) const ANNOUNCED: u32 = 1;
/// It is in the list of those whose state may differ from what was announced.
pub(super) const DIRTY: u32 = 2;
/// It goes into the output that is being made.
pub(super) const TO_STORE: u32 = 4;
/// The record is free.
pub(super) const FREE: u32 = 8;
/// The integer was written with a minus sign.
pub(super) const NEGATIVE: u32 = 16;
/// It has its place in the output that is being made.
pub(super) const PLACED: u32 = 32;
const POS_SHIFT: u32 = 6;

/// Longest run that a record can address.
pub(super) const MAX_RUN: usize = 1 << (32 - POS_SHIFT);

impl Record {
    #[inline]
    pub fn is(self, flag: u32) -> bool {
        self.meta & flag != 0
    }

    #[inline]
    pub fn pos(self) -> u32 {
        self.meta >> POS_SHIFT
    }

    #[inline]
    pub fn place(&mut self, run: u32, pos: u32) {
        self.run = run;
        self.meta = self.meta & ((1 << POS_SHIFT) - 1) | pos << POS_SHIFT;
    }
}

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Space {
    pub scope: Scope,
    /// Hashes are integers of 64 bits.
    pub integers: bool,
    /// Bytes of a hash.
    pub width: usize,
    /// Words of a bit set.
    pub words: usize,
    pub test: Test,
    pub records: Vec<Record>,
    table: Table,
    keys: Vec<u8>,
    votes: Vec<u64>,
    free: Vec<u32>,
}

/// Grows by a quarter: the state is large, lives long, and half of it should not be empty.
fn reserve<T>(v: &mut Vec<T>, more: usize) {
    if v.capacity() - v.len() < more {
        v.reserve_exact(more.max(v.len() / 4));
    }
}

/// Hash of a key.
#[inline]
pub(super) fn hash_key(state: &RandomState, key: &[u8]) -> u32 {
    let mut h = state.build_hasher();
    match <[u8; 8]>::try_from(key) {
        Ok(k) => h.write_u64(u64::from_le_bytes(k)),
        Err(_) => h.write(key),
    }
    let full = h.finish();
    (full ^ full >> 32) as u32
}

impl Space {
    pub fn new(scope: Scope, integers: bool, width: usize, words: usize, test: Test) -> Self {
        Self {
            scope,
            integers,
            width,
            words,
            test,
            records: Vec::new(),
            table: Table::default(),
            keys: Vec::new(),
            votes: Vec::new(),
            free: Vec::new(),
        }
    }

    pub fn nbytes(&self) -> usize {
        size_of::<Self>()
            + self.table.nbytes()
            + self.keys.capacity()
            + self.votes.capacity() * 8
            + self.records.capacity() * size_of::<Record>()
            + self.free.capacity() * 4
    }

    #[inline]
    pub fn key(&self, id: u32) -> &[u8] {
        let at = id as usize * self.width;
        &self.keys[at..at + self.width]
    }

    /// The key as a hash, in the form in which it came.
    pub fn hash_ref(&self, id: u32) -> HashRef<'_> {
        let key = self.key(id);
        match <[u8; 8]>::try_from(key) {
            Ok(k) if self.integers && self.records[id as usize].is(NEGATIVE) => {
                HashRef::Int(i64::from_le_bytes(k))
            }
            Ok(k) if self.integers => HashRef::Uint(u64::from_le_bytes(k)),
            _ => HashRef::Bytes(key),
        }
    }

    #[inline]
    pub fn find(&self, hash: u32, key: &[u8]) -> Option<u32> {
        self.table.find(hash, |id| self.key(id) == key)
    }

    #[inline]
    pub fn votes(&self, id: u32) -> &[u64] {
        let at = id as usize * self.words;
        &self.votes[at..at + self.words]
    }

    #[inline]
    pub fn votes_mut(&mut self, id: u32) -> &mut [u64] {
        let at = id as usize * self.words;
        &mut self.votes[at..at + self.words]
    }

    #[inline]
    pub fn holds(&self, id: u32) -> bool {
        self.test.holds(self.votes(id))
    }

    /// Lets the next `n` free records be handed out in the order in which they were freed: what was
    /// one run becomes one run again, with consecutive records.
    pub fn prepare(&mut self, n: usize) {
        let from = self.free.len().saturating_sub(n);
        self.free[from..].reverse();
    }

    /// Makes room for about `n` blocks more, none of which may come.
    pub fn reserve(&mut self, n: usize) {
        let n = n.saturating_sub(self.free.len());
        self.table.reserve(n);
        reserve(&mut self.records, n);
        reserve(&mut self.keys, n * self.width);
        reserve(&mut self.votes, n * self.words);
    }

    /// A record without votes for a key that is not there.
    pub fn insert(&mut self, hash: u32, key: &[u8], negative: bool) -> u32 {
        let record = Record { run: NONE, meta: if negative { NEGATIVE } else { 0 } };
        let id = if let Some(id) = self.free.pop() {
            let at = id as usize * self.width;
            self.keys[at..at + self.width].copy_from_slice(key);
            self.votes_mut(id).fill(0);
            self.records[id as usize] = record;
            id
        } else {
            reserve(&mut self.records, 1);
            reserve(&mut self.keys, self.width);
            reserve(&mut self.votes, self.words);
            self.records.push(record);
            self.keys.extend_from_slice(key);
            self.votes.resize(self.votes.len() + self.words, 0);
            (self.records.len() - 1) as u32
        };
        self.table.insert(hash, id);
        id
    }

    pub fn delete(&mut self, state: &RandomState, id: u32) {
        let hash = hash_key(state, self.key(id));
        self.table.remove(hash, id);
        self.records[id as usize] = Record { run: NONE, meta: FREE };
        self.free.push(id);
    }

    /// Changes the number of words of a bit set.
    pub fn set_words(&mut self, words: usize) {
        let mut votes = Vec::with_capacity(self.records.len() * words);
        for old in self.votes.chunks_exact(self.words) {
            votes.extend((0..words).map(|i| old.get(i).copied().unwrap_or(0)));
        }
        (self.votes, self.words) = (votes, words);
    }
}
