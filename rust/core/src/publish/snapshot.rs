//! A snapshot of a mirror, made while the mirror goes on.
//!
//! It is exact at the sequence number at which it began. The walk goes through the records in chunks, so
//! nobody waits long for the mirror. A block that is about to be removed is written out first if the walk
//! has not come to it; a block that is stored later carries the walk's generation and is passed over; a clear
//! hands all tables over to the walk.

use std::collections::VecDeque;

use super::attr_table::AttrTable;
use super::blocks::{Block, Blocks, Kind, Probe, flag};
use super::mirror::{Mirror, Tables};
use crate::events::{
    AttrId, Attrs, CommonParts, EventData, EventList, ExtraKeys, Hashes, StoredParts, Tokens,
};
use crate::hash::{BlockHash, HashRef, MAX_HASH_BYTES};
use crate::msgpack;
use crate::resident::Digest;

/// Bytes that an event costs beside hashes, tokens, extra keys and names, generously.
const EVENT_BYTES: usize = 320;

/// What a snapshot is a snapshot of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotHead {
    /// The first sequence number that it does not contain.
    pub resume_seq: u64,
    /// The digest of what it holds.
    pub digest: Digest,
    /// Number of keys.
    pub blocks: u64,
}

/// A snapshot that is being made.
#[derive(Debug)]
pub(super) struct Walk {
    head: SnapshotHead,
    generation: u32,
    /// The tables as they were at a clear.
    frozen: Option<Tables>,
    table: usize,
    address: u32,
    out: Output,
    emitted: u64,
    chain: Vec<u32>,
    probes: Vec<Probe>,
}

impl Walk {
    pub fn freeze(&mut self, tables: Tables) {
        if self.frozen.is_none() {
            self.out.end_run();
            self.frozen = Some(tables);
        }
    }

    pub fn is_frozen(&self) -> bool {
        self.frozen.is_some()
    }

    /// Writes out the block, and before it those of its ancestors that are resident and were not written yet.
    pub fn emit_chain(&mut self, blocks: &mut Blocks, table: usize, address: u32, attrs: &AttrTable) {
        let mut at = Some(address);
        while let Some(a) = at.filter(|&a| blocks.generation(a) != self.generation) {
            // Marked at once: a chain that bites its tail ends here.
            blocks.set_generation(a, self.generation);
            self.chain.push(a);
            at = parent_of(blocks, a, &mut self.probes);
        }
        while let Some(a) = self.chain.pop() {
            self.emitted += 1;
            self.out.push(blocks, table, &blocks.block(a), attrs);
        }
    }
}

/// The resident block before this one, among those of the same scope and kind of hash.
fn parent_of(blocks: &mut Blocks, address: u32, probes: &mut Vec<Probe>) -> Option<u32> {
    let block = blocks.block(address);
    let mut copy = [0; MAX_HASH_BYTES];
    if let Some(parent) = block.parent {
        // Blocks of a run lie one behind the other.
        if let Some(before) = address.checked_sub(1)
            && Blocks::is_same_arena(before, address)
            && blocks.is_live(before)
            && blocks.block(before).hash == parent
        {
            return Some(before);
        }
        copy[..parent.len()].copy_from_slice(parent);
    } else {
        // Of another sign, but maybe the same key.
        let bits = block.rare?.parent.as_ref()?.as_ref().bits().filter(|_| blocks.kind == Kind::Int)?;
        copy[..8].copy_from_slice(&bits.to_le_bytes());
    }
    let width = blocks.kind.width();
    blocks.find_hash(&copy[..width], probes)
}

impl Mirror {
    /// Begins a snapshot in pieces of at most about `piece_bytes` payload bytes. `None` while the mirror
    /// cannot say what is resident ([`Self::is_known`]). One that was being made is given up.
    pub fn begin_snapshot(&mut self, piece_bytes: usize) -> Option<SnapshotHead> {
        if !self.is_known() {
            return None;
        }
        let head =
            SnapshotHead { resume_seq: self.resume_seq(), digest: self.digest(), blocks: self.len() as u64 };
        self.generation = (self.generation + 1) & (u32::MAX >> flag::BITS);
        self.walk = Some(Box::new(Walk {
            head,
            generation: self.generation,
            frozen: None,
            table: 0,
            address: 0,
            out: Output::new(piece_bytes),
            emitted: 0,
            chain: Vec::new(),
            probes: Vec::new(),
        }));
        Some(head)
    }

    /// Goes on with the snapshot, over about `blocks` blocks: its next piece if one is full, or the last
    /// ones. `more` says whether there is anything behind it. `None` if no snapshot is being made.
    pub fn walk_snapshot(&mut self, blocks: usize) -> Option<SnapshotStep> {
        let (slot, live) = self.walk_parts();
        let walk = slot.as_mut()?;
        if walk.out.ready.is_empty() {
            walk.step(live, blocks as u64);
        }
        let done = walk.is_done() && walk.out.ready.len() <= 1;
        let piece = walk.out.ready.pop_front();
        if done {
            let frozen = walk.frozen.take();
            *slot = None;
            return Some(SnapshotStep { piece, more: false, frozen: Frozen(frozen) });
        }
        Some(SnapshotStep { piece, more: true, frozen: Frozen(None) })
    }

    /// Gives the snapshot up. What is returned may be large: drop it where nobody waits.
    pub fn abort_snapshot(&mut self) -> Option<Frozen> {
        self.walk.take().map(|w| Frozen(w.frozen))
    }
}

/// What was cleared while a snapshot still needed it. Dropping it may take milliseconds.
#[derive(Debug)]
pub struct Frozen(#[allow(dead_code)] Option<Tables>);

/// What [`Mirror::walk_snapshot`] got done.
#[derive(Debug)]
pub struct SnapshotStep {
    /// Stores, parents first; `None` if no piece is full yet.
    pub piece: Option<EventList>,
    /// Whether the snapshot goes on.
    pub more: bool,
    /// What the walk needed until now.
    pub frozen: Frozen,
}

impl Walk {
    fn is_done(&self) -> bool {
        self.emitted == self.head.blocks
    }

    fn step(&mut self, live: &mut Tables, blocks: u64) {
        let mut frozen = self.frozen.take();
        let tables = frozen.as_mut().unwrap_or(live);
        let until = self.emitted + blocks;
        // Places without a due block cost little, but something.
        let mut passed = 0;
        while self.emitted < until && passed < blocks * 8 && self.table < tables.list.len() {
            let list = &mut tables.list[self.table];
            let Some(address) = list.next_address(self.address) else {
                self.table += 1;
                self.address = 0;
                continue;
            };
            self.address = address + 1;
            passed += 1;
            if list.is_live(address) {
                self.emit_chain(list, self.table, address, &tables.attrs);
            }
        }
        if self.is_done() || self.table >= tables.list.len() {
            debug_assert!(self.is_done(), "{} of {} blocks", self.emitted, self.head.blocks);
            self.emitted = self.head.blocks;
            self.out.seal();
        }
        self.frozen = frozen;
    }
}

/// Blocks into runs, runs into events, events into pieces.
#[derive(Debug)]
struct Output {
    piece_bytes: usize,
    data: EventData,
    /// About what the events, and the run, are as a payload.
    bytes: usize,
    ready: VecDeque<EventList>,
    run: Run,
}

/// Blocks that become one event.
#[derive(Debug, Default)]
struct Run {
    len: usize,
    table: usize,
    kind: Option<Kind>,
    attrs: u32,
    id: AttrId,
    chained: bool,
    /// The flags that all blocks of a run share.
    flags: u32,
    wide: bool,
    parent: Option<BlockHash>,
    hashes: Vec<u8>,
    tokens: Vec<u32>,
    /// Token ids as values, their number, and entries of extra keys.
    values: Vec<u8>,
    num_values: usize,
    extra: Vec<u8>,
    any_extra: bool,
}

impl Output {
    fn new(piece_bytes: usize) -> Self {
        Self { piece_bytes, data: EventData::new(), bytes: 0, ready: VecDeque::new(), run: Run::default() }
    }

    fn push(&mut self, blocks: &Blocks, table: usize, block: &Block<'_>, attrs: &AttrTable) {
        let rare = block.rare;
        let size = block.hash.len()
            + 3
            + tokens_size(block.tokens)
            + rare.map_or(1, |r| {
                r.tokens.as_ref().map_or(0, |t| t.len()) + r.extra.as_ref().map_or(1, |e| e.len())
            });
        if self.bytes > 0 && self.bytes + size > self.piece_bytes {
            self.seal();
        }
        let wide = rare.is_some_and(|r| r.tokens.is_some());
        let shared = block.flags & (flag::EXTRA | flag::SIGNED);
        let run = &self.run;
        let follows = run.len > 0
            && run.table == table
            && run.attrs == block.attrs
            && run.chained == block.chained
            && run.flags == shared
            && run.wide == wide
            && (!block.chained
                || block.parent.is_some_and(|p| {
                    p.len() <= run.hashes.len() && &run.hashes[run.hashes.len() - p.len()..] == p
                }));
        if !follows {
            self.end_run();
            self.bytes += EVENT_BYTES + names_size(attrs.get(block.attrs));
            let parent = match (block.parent, rare.and_then(|r| r.parent.as_ref())) {
                (Some(p), _) => Some(blocks.hash_ref(p, block.flags).to_owned()),
                (None, other) => other.cloned(),
            };
            let run = &mut self.run;
            run.table = table;
            run.kind = Some(blocks.kind);
            run.attrs = block.attrs;
            run.id = self.data.intern(attrs.get(block.attrs));
            run.chained = block.chained;
            run.flags = shared;
            run.wide = wide;
            run.parent = parent;
        }
        self.bytes += size;
        let run = &mut self.run;
        run.len += 1;
        run.hashes.extend_from_slice(block.hash);
        run.tokens.extend_from_slice(block.tokens);
        if let Some(values) = rare.and_then(|r| r.tokens.as_ref()) {
            run.values.extend_from_slice(values);
            run.num_values += attrs.get(block.attrs).block_size as usize;
        }
        match rare.and_then(|r| r.extra.as_ref()) {
            Some(entry) => {
                run.extra.extend_from_slice(entry);
                run.any_extra = true;
            }
            None => run.extra.push(0xc0),
        }
    }

    fn end_run(&mut self) {
        let run = &mut self.run;
        if run.len == 0 {
            return;
        }
        let signed = run.flags & flag::SIGNED != 0;
        let hashes = match run.kind {
            Some(Kind::Bytes(0)) => Hashes::Mixed(&[HashRef::Bytes(&[])]),
            Some(Kind::Bytes(w)) => Hashes::Bytes { width: usize::from(w), data: &run.hashes },
            _ => Hashes::IntBytes { signed, data: &run.hashes },
        };
        let mut listed = Vec::new();
        let extra_keys = if !run.chained || run.flags & flag::EXTRA == 0 {
            ExtraKeys::Absent
        } else if run.any_extra {
            msgpack::write_array_header(&mut listed, run.len);
            listed.extend_from_slice(&run.extra);
            ExtraKeys::Raw(&listed)
        } else {
            ExtraKeys::AllNil
        };
        let mut values = Vec::new();
        let tokens = if run.wide {
            msgpack::write_array_header(&mut values, run.num_values);
            values.extend_from_slice(&run.values);
            Tokens::Wide(&values)
        } else {
            Tokens::Plain(&run.tokens)
        };
        let parts = StoredParts {
            hashes,
            parent: run.parent.as_ref().map(BlockHash::as_ref),
            tokens,
            extra_keys,
            lookahead: None,
            common: CommonParts::default(),
        };
        let pushed = self.data.push_stored(run.id, &parts);
        debug_assert!(pushed.is_ok(), "a piece is far below what columns can hold");
        run.len = 0;
        run.hashes.clear();
        run.tokens.clear();
        run.values.clear();
        run.num_values = 0;
        run.extra.clear();
        run.any_extra = false;
    }

    /// What there is becomes a piece.
    fn seal(&mut self) {
        self.end_run();
        if !self.data.is_empty() {
            self.ready.push_back(std::mem::take(&mut self.data).into());
        }
        self.bytes = 0;
    }
}

fn names_size(a: &Attrs) -> usize {
    [&a.medium, &a.lora_name, &a.spec_kind, &a.locality, &a.ownership, &a.session_id, &a.cache_salt]
        .into_iter()
        .flatten()
        .map(|s| s.len())
        .sum()
}

/// Bytes of token ids as msgpack integers.
fn tokens_size(tokens: &[u32]) -> usize {
    tokens
        .iter()
        .map(|&t| 1 + usize::from(t > 127) + usize::from(t > 255) + 2 * usize::from(t > 0xffff))
        .sum()
}
