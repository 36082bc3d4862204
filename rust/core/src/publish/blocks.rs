//! The resident blocks of one scope and one form of hash: a table of keys, and their records in arenas.
//!
//! A record is a run of words: when it was stored, which attributes, hash, parent, token ids. Blocks of one
//! block size lie in one arena, so that records have one length and a freed place fits the next block.

use hashbrown::HashMap;
use std::hash::BuildHasher;

use crate::events::Scope;
use crate::hash::{BlockHash, HashRef, le_u64};
use crate::resident::KeyWriter;

/// Records of a chunk of an arena.
const CHUNK: usize = 1024;
/// Bits of an address that number the record in its arena; those above number the arena.
const SLOT_BITS: u32 = 28;
/// Arenas of one table: blocks of still another size are kept by their hashes only.
const MAX_ARENAS: usize = 15;
/// An entry of the table without a block.
const EMPTY: u64 = u64::MAX;
/// The attributes of a record that holds no block.
const FREE: u32 = u32::MAX;
/// Words of a record before its hash.
const HEAD: usize = 2;

/// How hashes are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// 64 bits.
    Int,
    /// So many bytes.
    Bytes(u8),
}

impl Kind {
    pub fn of(hash: HashRef<'_>) -> Self {
        match hash {
            HashRef::Bytes(b) => Self::Bytes(b.len() as u8),
            _ => Self::Int,
        }
    }

    /// Bytes of a hash.
    pub fn width(self) -> usize {
        match self {
            Self::Int => 8,
            Self::Bytes(w) => usize::from(w),
        }
    }
}

/// Flags in the low bits of a record's first word; the generation stands above them.
pub(super) mod flag {
    /// It has a parent of the same kind, in the record.
    pub const PARENT: u32 = 1;
    /// Its `extra_keys` are set.
    pub const EXTRA: u32 = 2;
    /// It has something in the side table.
    pub const RARE: u32 = 4;
    /// Hash and parent are written with a sign.
    pub const SIGNED: u32 = 8;
    pub const BITS: u32 = 4;
    pub const ALL: u32 = (1 << BITS) - 1;
}

/// What few blocks have.
#[derive(Debug, Default)]
pub(super) struct RareParts {
    /// A parent of another kind than the block's hash.
    pub parent: Option<BlockHash>,
    /// The block's entry of `extra_keys`: one msgpack value.
    pub extra: Option<Box<[u8]>>,
    /// Token ids that are no plain integers: so many msgpack values as the block has tokens.
    pub tokens: Option<Box<[u8]>>,
}

impl RareParts {
    pub fn is_empty(&self) -> bool {
        self.parent.is_none() && self.extra.is_none() && self.tokens.is_none()
    }
}

/// A block that is being added.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewBlock<'a> {
    pub hash: &'a [u8],
    pub parent: Option<&'a [u8]>,
    pub tokens: &'a [u32],
    pub flags: u32,
    pub attrs: u32,
}

/// A block as it is kept.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block<'a> {
    pub flags: u32,
    pub attrs: u32,
    /// Whether parent and tokens were kept.
    pub chained: bool,
    pub hash: &'a [u8],
    pub parent: Option<&'a [u8]>,
    pub tokens: &'a [u32],
    pub rare: Option<&'a RareParts>,
}

#[derive(Debug)]
struct Arena {
    /// Words of a record.
    stride: usize,
    /// Whether records have room for a parent.
    chained: bool,
    /// Token ids of a block.
    tokens: usize,
    chunks: Vec<Box<[u32]>>,
    used: u32,
    free: Vec<u32>,
}

impl Arena {
    fn at(&self, slot: u32) -> (usize, usize) {
        (slot as usize / CHUNK, slot as usize % CHUNK * self.stride)
    }

    #[inline]
    fn record(&self, slot: u32) -> &[u32] {
        let (chunk, from) = self.at(slot);
        &self.chunks[chunk][from..from + self.stride]
    }

    #[inline]
    fn record_mut(&mut self, slot: u32) -> &mut [u32] {
        let (chunk, from) = self.at(slot);
        &mut self.chunks[chunk][from..from + self.stride]
    }

    #[inline]
    fn take(&mut self) -> u32 {
        if let Some(slot) = self.free.pop() {
            return slot;
        }
        let slot = self.used;
        assert!(slot < 1 << SLOT_BITS, "more blocks than a mirror can hold");
        if slot as usize == self.chunks.len() * CHUNK {
            self.chunks.push(vec![0; CHUNK * self.stride].into());
        }
        self.used += 1;
        slot
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Blocks {
    pub scope: Scope,
    pub kind: Kind,
    writer: KeyWriter,
    /// Words of a hash.
    words: usize,
    seed: u64,
    /// `tag << 32 | address`, in open addressing by the tag's high bits; a power of two of them.
    table: Vec<u64>,
    shift: u32,
    live: usize,
    arenas: Vec<Arena>,
    rare: HashMap<u32, RareParts, foldhash::fast::RandomState>,
}

/// A hash, looked at: what the table needs, and the key's digest.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Probe {
    pub digest: u128,
    tag: u32,
}

/// An empty place of the table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Vacancy {
    at: usize,
    tag: u32,
}

impl Blocks {
    pub fn new(scope: Scope, kind: Kind) -> Self {
        Self {
            writer: KeyWriter::new(&scope),
            scope,
            kind,
            words: kind.width().div_ceil(4),
            seed: foldhash::fast::RandomState::default().hash_one(0_u64) | 1,
            table: vec![EMPTY; 16],
            shift: 28,
            live: 0,
            arenas: Vec::new(),
            rare: HashMap::default(),
        }
    }

    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.live
    }

    /// Bytes allocated.
    pub fn nbytes(&self) -> usize {
        let rare = |r: &RareParts| {
            64 + r.extra.as_ref().map_or(0, |b| b.len()) + r.tokens.as_ref().map_or(0, |b| b.len())
        };
        let arena = |a: &Arena| a.chunks.len() * CHUNK * a.stride * 4 + a.free.capacity() * 4;
        self.table.capacity() * 8
            + self.arenas.iter().map(arena).sum::<usize>()
            + self.rare.values().map(rare).sum::<usize>()
    }

    pub fn hash_ref<'a>(&self, bytes: &'a [u8], flags: u32) -> HashRef<'a> {
        match self.kind {
            Kind::Bytes(_) => HashRef::Bytes(bytes),
            Kind::Int if flags & flag::SIGNED != 0 => HashRef::Int(le_u64(bytes).cast_signed()),
            Kind::Int => HashRef::Uint(le_u64(bytes)),
        }
    }

    /// Looks at hashes that stand back to back, and fetches their places in the table: reads that do not
    /// depend on one another overlap, those of a look-up after the other do not.
    pub fn probe(&mut self, hashes: &[u8], out: &mut Vec<Probe>) {
        out.clear();
        let width = self.kind.width();
        let seed = self.seed;
        let writer = &mut self.writer;
        let mut look = |hash: HashRef<'_>| {
            let digest = writer.digest(hash);
            let mixed = (digest as u64 ^ (digest >> 64) as u64).wrapping_mul(seed);
            Probe { digest, tag: (mixed >> 32) as u32 }
        };
        match self.kind {
            Kind::Bytes(0) => out.push(look(HashRef::Bytes(&[]))),
            // The usual width, with a length that the compiler knows.
            Kind::Bytes(32) => out.extend(hashes.as_chunks::<32>().0.iter().map(|h| look(HashRef::Bytes(h)))),
            Kind::Bytes(_) => out.extend(hashes.chunks_exact(width).map(|h| look(HashRef::Bytes(h)))),
            Kind::Int => out.extend(hashes.chunks_exact(8).map(|h| look(HashRef::Uint(le_u64(h))))),
        }
        let mut fetched = 0;
        for p in &*out {
            fetched ^= self.table[(p.tag >> self.shift) as usize];
        }
        std::hint::black_box(fetched);
    }

    /// The same for the records that the table names: before removals.
    pub fn fetch_records(&self, probes: &[Probe]) {
        let mut fetched = 0;
        for p in probes {
            let entry = self.table[(p.tag >> self.shift) as usize];
            if (entry >> 32) as u32 == p.tag && entry != EMPTY {
                fetched ^= self.record(entry as u32)[0];
            }
        }
        std::hint::black_box(fetched);
    }

    /// The block with this hash.
    #[inline]
    pub fn find(&self, probe: Probe, hash: &[u8]) -> Option<u32> {
        self.position(probe, hash).ok().map(|at| self.table[at] as u32)
    }

    /// The block with this hash, by the hash alone.
    pub fn find_hash(&mut self, hash: &[u8], scratch: &mut Vec<Probe>) -> Option<u32> {
        self.probe(hash, scratch);
        self.find(scratch[0], hash)
    }

    /// Where a block is to go, if it is not there.
    #[inline]
    pub fn vacancy(&self, probe: Probe, hash: &[u8]) -> Option<Vacancy> {
        self.position(probe, hash).err().map(|at| Vacancy { at, tag: probe.tag })
    }

    /// Place of the block's entry in the table, or the empty place where it would be.
    #[inline]
    fn position(&self, probe: Probe, hash: &[u8]) -> Result<usize, usize> {
        let mask = self.table.len() - 1;
        let mut at = (probe.tag >> self.shift) as usize;
        loop {
            let entry = self.table[at];
            if entry == EMPTY {
                return Err(at);
            }
            if (entry >> 32) as u32 == probe.tag && same(self.hash_of(entry as u32), hash) {
                return Ok(at);
            }
            at = (at + 1) & mask;
        }
    }

    /// Makes room, so that the next `more` insertions find some.
    pub fn reserve(&mut self, more: usize) {
        while (self.live + more) * 8 > self.table.len() * 5 {
            self.grow();
        }
    }

    fn grow(&mut self) {
        let larger = vec![EMPTY; self.table.len() * 2];
        let old = std::mem::replace(&mut self.table, larger);
        self.shift -= 1;
        for entry in old.into_iter().filter(|&e| e != EMPTY) {
            self.put(entry);
        }
    }

    #[inline]
    fn put(&mut self, entry: u64) {
        let mask = self.table.len() - 1;
        let mut at = ((entry >> 32) as u32 >> self.shift) as usize;
        while self.table[at] != EMPTY {
            at = (at + 1) & mask;
        }
        self.table[at] = entry;
    }

    /// Number of the arena for blocks with so many token ids each, or for hashes only; made where it is new.
    /// Whether its records have parents and tokens is said by [`Self::is_chained`].
    pub fn arena(&mut self, tokens: Option<u32>) -> usize {
        let (size, chained) = (tokens.unwrap_or(0) as usize, tokens.is_some());
        if let Some(at) = self.arenas.iter().position(|a| a.tokens == size && a.chained == chained) {
            return at;
        }
        if chained && self.arenas.len() + 1 >= MAX_ARENAS {
            return self.arena(None);
        }
        let parent = if chained { self.words } else { 0 };
        self.arenas.push(Arena {
            stride: HEAD + self.words + parent + size,
            chained,
            tokens: size,
            chunks: Vec::new(),
            used: 0,
            free: Vec::new(),
        });
        self.arenas.len() - 1
    }

    /// Whether blocks of this arena have parents and tokens.
    pub fn is_chained(&self, arena: usize) -> bool {
        self.arenas[arena].chained
    }

    /// Adds a block where [`Self::vacancy`] said, after [`Self::reserve`] and before anything else changes.
    #[inline]
    pub fn insert(&mut self, vacancy: Vacancy, arena: usize, generation: u32, block: NewBlock<'_>) -> u32 {
        let words = self.words;
        let a = &mut self.arenas[arena];
        let slot = a.take();
        let chained = a.chained;
        let record = a.record_mut(slot);
        record[0] = generation << flag::BITS | block.flags;
        record[1] = block.attrs;
        let (hash, rest) = record[HEAD..].split_at_mut(words);
        copy_bytes(hash, block.hash);
        if chained {
            let (parent, tokens) = rest.split_at_mut(words);
            if let Some(p) = block.parent {
                copy_bytes(parent, p);
            }
            copy_words(tokens, block.tokens);
        }
        let address = (arena as u32) << SLOT_BITS | slot;
        self.table[vacancy.at] = u64::from(vacancy.tag) << 32 | u64::from(address);
        self.live += 1;
        address
    }

    pub fn set_rare(&mut self, address: u32, parts: RareParts) {
        self.rare.insert(address, parts);
        self.record_mut(address)[0] |= flag::RARE;
    }

    /// Takes a block out and says which attributes it had.
    pub fn remove(&mut self, probe: Probe, hash: &[u8]) -> Option<u32> {
        let mut hole = self.position(probe, hash).ok()?;
        let address = self.table[hole] as u32;
        let mask = self.table.len() - 1;
        let mut at = hole;
        loop {
            at = (at + 1) & mask;
            let entry = self.table[at];
            if entry == EMPTY {
                break;
            }
            let wanted = ((entry >> 32) as u32 >> self.shift) as usize;
            if at.wrapping_sub(wanted) & mask >= at.wrapping_sub(hole) & mask {
                self.table[hole] = entry;
                hole = at;
            }
        }
        self.table[hole] = EMPTY;
        self.live -= 1;
        let record = self.record_mut(address);
        let attrs = std::mem::replace(&mut record[1], FREE);
        let rare = record[0] & flag::RARE != 0;
        if rare {
            self.rare.remove(&address);
        }
        self.arenas[(address >> SLOT_BITS) as usize].free.push(address & ((1 << SLOT_BITS) - 1));
        Some(attrs)
    }

    #[inline]
    fn record(&self, address: u32) -> &[u32] {
        self.arenas[(address >> SLOT_BITS) as usize].record(address & ((1 << SLOT_BITS) - 1))
    }

    #[inline]
    fn record_mut(&mut self, address: u32) -> &mut [u32] {
        self.arenas[(address >> SLOT_BITS) as usize].record_mut(address & ((1 << SLOT_BITS) - 1))
    }

    #[inline]
    fn hash_of(&self, address: u32) -> &[u8] {
        let hash = &self.record(address)[HEAD..HEAD + self.words];
        &bytemuck::cast_slice(hash)[..self.kind.width()]
    }

    /// The generation in which a block was stored or marked last.
    pub fn generation(&self, address: u32) -> u32 {
        self.record(address)[0] >> flag::BITS
    }

    pub fn set_generation(&mut self, address: u32, generation: u32) {
        let word = &mut self.record_mut(address)[0];
        *word = generation << flag::BITS | *word & flag::ALL;
    }

    /// The block at an address that is in use.
    pub fn block(&self, address: u32) -> Block<'_> {
        let a = &self.arenas[(address >> SLOT_BITS) as usize];
        let record = a.record(address & ((1 << SLOT_BITS) - 1));
        let width = self.kind.width();
        let flags = record[0] & flag::ALL;
        let (hash, rest) = record[HEAD..].split_at(self.words);
        let (parent, tokens) = if a.chained { rest.split_at(self.words) } else { (rest, rest) };
        Block {
            flags,
            attrs: record[1],
            chained: a.chained,
            hash: &bytemuck::cast_slice(hash)[..width],
            parent: (flags & flag::PARENT != 0).then(|| &bytemuck::cast_slice(parent)[..width]),
            tokens: &tokens[..a.tokens],
            rare: if flags & flag::RARE == 0 { None } else { self.rare.get(&address) },
        }
    }

    /// The address behind `address` in the order of a walk, and `None` behind the last.
    pub fn next_address(&self, address: u32) -> Option<u32> {
        let mut arena = (address >> SLOT_BITS) as usize;
        let mut slot = address & ((1 << SLOT_BITS) - 1);
        while let Some(a) = self.arenas.get(arena) {
            if slot < a.used {
                return Some((arena as u32) << SLOT_BITS | slot);
            }
            arena += 1;
            slot = 0;
        }
        None
    }

    /// Whether two addresses lie in one arena.
    pub fn is_same_arena(a: u32, b: u32) -> bool {
        a >> SLOT_BITS == b >> SLOT_BITS
    }

    /// Whether a record holds a block.
    pub fn is_live(&self, address: u32) -> bool {
        self.record(address)[1] != FREE
    }
}

/// Copies whole words with lengths that the compiler knows, for the usual sizes.
#[inline]
fn copy_words(to: &mut [u32], from: &[u32]) {
    match (<&mut [u32; 16]>::try_from(&mut *to), <&[u32; 16]>::try_from(from)) {
        (Ok(to), Ok(from)) => *to = *from,
        _ => to.copy_from_slice(from),
    }
}

#[inline]
fn copy_bytes(to: &mut [u32], from: &[u8]) {
    let to: &mut [u8] = bytemuck::cast_slice_mut(to);
    match (<&mut [u8; 32]>::try_from(&mut *to), <&[u8; 32]>::try_from(from)) {
        (Ok(to), Ok(from)) => *to = *from,
        _ => to[..from.len()].copy_from_slice(from),
    }
}

#[inline]
fn same(a: &[u8], b: &[u8]) -> bool {
    match (<&[u8; 32]>::try_from(a), <&[u8; 32]>::try_from(b)) {
        // In halves: of the whole array the compiler makes a call.
        (Ok(a), Ok(b)) => {
            let (a, b) = (a.as_chunks::<16>().0, b.as_chunks::<16>().0);
            let differ = |i: usize| u128::from_ne_bytes(a[i]) ^ u128::from_ne_bytes(b[i]);
            differ(0) | differ(1) == 0
        }
        _ => a == b,
    }
}
