//! The blocks of one source: found by the engine's hash and by content.
//!
//! A row is `content (8) | scopes (4) | hash (width)`, and `| time (4)` where the source's blocks expire.
//! Rows stand in 64 pieces chosen by the hash, so that no growth moves more than a sixty-fourth at once.
//! Two tables of 4-byte ids point at them: one by hash (pieces as the rows), one by content key (pieces by
//! the key).
//!
//! A row whose last copy is gone stays for a while as a *ghost*: its hash still leads to its content, so
//! that a child that arrives later finds its parent. Ghosts are bounded and are never matched.

use std::collections::VecDeque;
use std::hash::BuildHasher;

use foldhash::fast::FixedState;
use hashbrown::HashTable;

use super::content::ContentKey;
use crate::hash::{BlockHash, HashRef, le_u64};

pub(super) const PIECES: usize = 64;
const PIECE_SHIFT: u32 = 26;
const INDEX_MASK: u32 = (1 << PIECE_SHIFT) - 1;

/// Where the parts of a row begin.
const MASK: usize = 8;
const HASH: usize = 12;

/// Ghosts kept at least, whatever the number of blocks; beyond it one per [`GHOST_SHARE`] blocks.
pub(super) const MIN_GHOSTS: usize = 1024;
const GHOST_SHARE: usize = 16;

/// Rows for which a piece has room at first, and from which on it grows by a sixteenth.
const SMALL_PIECE: usize = 28;
const LARGE_PIECE: usize = 4096;

/// Number of a row: its piece and its place in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Id(u32);

impl Id {
    pub(super) fn new(piece: usize, index: usize) -> Self {
        Self((piece as u32) << PIECE_SHIFT | index as u32)
    }

    fn piece(self) -> usize {
        (self.0 >> PIECE_SHIFT) as usize
    }

    fn index(self) -> usize {
        (self.0 & INDEX_MASK) as usize
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Piece {
    pub(super) rows: Vec<u8>,
    free: Vec<u32>,
    by_hash: HashTable<u32>,
}

/// How the rows of a store are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Whether hashes are integers.
    pub is_int: bool,
    /// Bytes of a hash.
    pub width: usize,
    /// Whether a row says when it was last stored.
    pub timed: bool,
    /// Tokens in the blocks into which a prefix is cut here; 0 where nobody said. One hash may end the
    /// same prefix cut into blocks of several sizes (groups of a hybrid model, a tier with larger blocks),
    /// and its content is another for each.
    pub unit: u32,
}

/// A block where its size matters: its hash, and its store's [`Layout::unit`].
pub type Sized = (BlockHash, u32);

impl Layout {
    /// For hashes of this form.
    pub fn of(hash: HashRef<'_>, timed: bool, unit: u32) -> Self {
        match hash {
            HashRef::Bytes(b) => Self { is_int: false, width: b.len(), timed, unit },
            _ => Self { is_int: true, width: 8, timed, unit },
        }
    }

    /// Bytes of a row.
    pub fn stride(self) -> usize {
        HASH + self.width + if self.timed { 4 } else { 0 }
    }

    /// The hash of a row.
    #[inline]
    pub fn hash(self, row: &[u8]) -> HashRef<'_> {
        let bytes = &row[HASH..HASH + self.width];
        if self.is_int { HashRef::Uint(le_u64(bytes)) } else { HashRef::Bytes(bytes) }
    }
}

/// The content key of a row; 0 where it is not known (yet).
#[inline]
pub(super) fn content(row: &[u8]) -> ContentKey {
    le_u64(&row[..8])
}

/// The scopes in which a row is resident, a bit each; 0 for ghosts and free places.
#[inline]
pub(super) fn mask(row: &[u8]) -> u32 {
    u32::from_le_bytes([row[MASK], row[MASK + 1], row[MASK + 2], row[MASK + 3]])
}

/// What [`Store::set`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Set {
    /// Whether it was not resident in that scope before.
    pub new: bool,
    /// Whether it is known with another content, which stays.
    pub clash: bool,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Store {
    pub(super) layout: Layout,
    stride: usize,
    state: FixedState,
    pub(super) pieces: Box<[Piece]>,
    by_content: Box<[HashTable<u32>]>,
    live: usize,
    ghosts: VecDeque<u32>,
    /// The scopes whose blocks expire.
    pub(super) expiring: u32,
}

#[inline]
fn mix(state: &FixedState, hash: HashRef<'_>) -> u64 {
    match hash {
        HashRef::Bytes(b) => state.hash_one(b),
        h => state.hash_one(h.bits().unwrap_or_default()),
    }
}

/// Bits that the tables use neither for the bucket (low) nor for the tag (top).
#[inline]
pub(super) fn piece_of(mixed: u64) -> usize {
    (mixed >> 48) as usize % PIECES
}

impl Store {
    /// No blocks.
    pub fn new(layout: Layout, seed: u64) -> Self {
        Self {
            layout,
            stride: layout.stride(),
            state: FixedState::with_seed(seed),
            pieces: vec![Piece::default(); PIECES].into_boxed_slice(),
            by_content: vec![HashTable::new(); PIECES].into_boxed_slice(),
            live: 0,
            ghosts: VecDeque::new(),
            expiring: 0,
        }
    }

    /// Whether hashes of this form belong here.
    #[inline]
    pub fn takes(&self, hash: HashRef<'_>) -> bool {
        match hash {
            HashRef::Bytes(b) => !self.layout.is_int && b.len() == self.layout.width,
            _ => self.layout.is_int,
        }
    }

    /// Resident blocks.
    pub fn len(&self) -> usize {
        self.live
    }

    #[inline]
    fn row_of(&self, piece: &'_ Piece, index: usize) -> std::ops::Range<usize> {
        debug_assert!(index * self.stride < piece.rows.len());
        index * self.stride..(index + 1) * self.stride
    }

    /// The bytes of a row.
    #[inline]
    pub(super) fn row(&self, id: Id) -> &[u8] {
        let piece = &self.pieces[id.piece()];
        &piece.rows[self.row_of(piece, id.index())]
    }

    fn row_mut(&mut self, id: Id) -> &mut [u8] {
        let range = self.row_of(&self.pieces[id.piece()], id.index());
        &mut self.pieces[id.piece()].rows[range]
    }

    #[inline]
    fn lookup(&self, mixed: u64, hash: HashRef<'_>) -> Option<Id> {
        let p = piece_of(mixed);
        let piece = &self.pieces[p];
        let same = |&i: &u32| self.layout.hash(&piece.rows[self.row_of(piece, i as usize)]) == hash;
        piece.by_hash.find(mixed, same).map(|&i| Id::new(p, i as usize))
    }

    /// The row with this hash: resident, or a ghost.
    #[inline]
    pub fn find(&self, hash: HashRef<'_>) -> Option<Id> {
        self.lookup(mix(&self.state, hash), hash)
    }

    /// Whether this hash is resident here in any of these scopes.
    pub fn has(&self, hash: HashRef<'_>, bits: u32) -> bool {
        self.takes(hash) && self.find(hash).is_some_and(|id| self.mask(id) & bits != 0)
    }

    /// What the row holds; 0 where that is not known.
    #[inline]
    pub fn content(&self, id: Id) -> ContentKey {
        content(self.row(id))
    }

    /// The scopes in which the row is resident.
    #[inline]
    pub fn mask(&self, id: Id) -> u32 {
        mask(self.row(id))
    }

    /// The scopes, over all rows with this content, in which it is resident; not those that expire where it
    /// was last stored before `cutoff`.
    #[inline]
    pub fn mask_of_content(&self, key: ContentKey, cutoff: u32) -> u32 {
        // Content keys are hashes already.
        let table = &self.by_content[piece_of(key)];
        table
            .iter_hash(key)
            .map(|&id| self.row(Id(id)))
            .filter(|row| content(row) == key)
            .fold(0, |all, row| all | self.left_of(row, cutoff))
    }

    /// The scopes in which a row is resident at a time of which `cutoff` is the oldest store that counts.
    #[inline]
    fn left_of(&self, row: &[u8], cutoff: u32) -> u32 {
        let expired = self.time(row).is_some_and(|t| t < cutoff);
        if expired { mask(row) & !self.expiring } else { mask(row) }
    }

    /// The same by the row's number.
    pub fn mask_after(&self, id: Id, cutoff: u32) -> u32 {
        self.left_of(self.row(id), cutoff)
    }

    /// Makes the block with this hash resident in the scopes `bits`: a new row, or [`Self::set`].
    #[inline]
    pub fn put(&mut self, hash: HashRef<'_>, bits: u32, key: ContentKey, now: u32) -> Set {
        let mixed = mix(&self.state, hash);
        if let Some(id) = self.lookup(mixed, hash) {
            return self.set(id, bits, key, now);
        }
        let (p, stride, layout) = (piece_of(mixed), self.stride, self.layout);
        let Piece { rows, free, by_hash } = &mut self.pieces[p];
        let index = free.pop().map_or(rows.len() / stride, |i| i as usize);
        if index * stride == rows.len() {
            if rows.len() == rows.capacity() {
                // From some size on memory a block matters more than the copies.
                let more = if index < LARGE_PIECE { index.max(SMALL_PIECE) } else { index / 16 };
                rows.reserve_exact(more * stride);
            }
            rows.resize(rows.len() + stride, 0);
        }
        let row = &mut rows[index * stride..][..stride];
        row[..MASK].copy_from_slice(&key.to_le_bytes());
        row[MASK..HASH].copy_from_slice(&bits.to_le_bytes());
        match hash {
            HashRef::Bytes(b) => row[HASH..HASH + b.len()].copy_from_slice(b),
            h => row[HASH..HASH + 8].copy_from_slice(&h.bits().unwrap_or_default().to_le_bytes()),
        }
        if layout.timed {
            row[stride - 4..].copy_from_slice(&now.to_le_bytes());
        }
        let state = &self.state;
        let mix_of = |&i: &u32| mix(state, layout.hash(&rows[i as usize * stride..][..stride]));
        if by_hash.capacity() == 0 {
            by_hash.reserve(SMALL_PIECE, mix_of);
        }
        by_hash.insert_unique(mixed, index as u32, mix_of);
        self.live += 1;
        if key != 0 {
            self.list(Id::new(p, index), key);
        }
        Set { new: true, clash: false }
    }

    /// Makes the row resident in the scopes `bits` (none for a row that only learns its content), with
    /// this content where it is known. A content that differs from the known one is not taken, except by
    /// a ghost.
    #[inline]
    pub fn set(&mut self, id: Id, bits: u32, key: ContentKey, now: u32) -> Set {
        let timed = self.layout.timed && bits & self.expiring != 0;
        let stride = self.stride;
        let row = self.row_mut(id);
        let (old_mask, old) = (mask(row), content(row));
        let new_mask = old_mask | bits;
        let learned = key != 0 && (old == 0 || old_mask == 0 && old != key);
        let known = if learned { key } else { old };
        row[MASK..HASH].copy_from_slice(&new_mask.to_le_bytes());
        if learned {
            row[..8].copy_from_slice(&key.to_le_bytes());
        }
        if timed {
            row[stride - 4..].copy_from_slice(&now.to_le_bytes());
        }
        if old_mask == 0 && new_mask != 0 {
            self.live += 1;
        }
        // In the content table stand resident rows whose content is known.
        if new_mask != 0 && known != 0 && (old_mask == 0 || old == 0) {
            self.list(id, known);
        }
        let clash = key != 0 && known != key;
        Set { new: new_mask != old_mask, clash }
    }

    /// Takes scopes from the row; returns those that it had. The last one makes it a ghost.
    #[inline]
    pub fn unset(&mut self, id: Id, bits: u32) -> u32 {
        let row = self.row_mut(id);
        let (old, key) = (mask(row), content(row));
        let had = old & bits;
        if had == 0 {
            return 0;
        }
        let left = old & !bits;
        row[MASK..HASH].copy_from_slice(&left.to_le_bytes());
        if left == 0 {
            self.live -= 1;
            if key == 0 {
                self.forget(id);
            } else {
                self.unlist(id, key);
                self.ghosts.push_back(id.0);
                self.bound_ghosts();
            }
        }
        had
    }

    #[inline]
    fn list(&mut self, id: Id, key: ContentKey) {
        let (pieces, stride) = (&self.pieces, self.stride);
        let key_of = |&i: &u32| {
            let id = Id(i);
            content(&pieces[id.piece()].rows[id.index() * stride..][..stride])
        };
        let table = &mut self.by_content[piece_of(key)];
        if table.capacity() == 0 {
            table.reserve(SMALL_PIECE, key_of);
        }
        table.insert_unique(key, id.0, key_of);
    }

    fn unlist(&mut self, id: Id, key: ContentKey) {
        if let Ok(found) = self.by_content[piece_of(key)].find_entry(key, |&i| i == id.0) {
            found.remove();
        }
    }

    fn bound_ghosts(&mut self) {
        while self.ghosts.len() > MIN_GHOSTS.max(self.live / GHOST_SHARE) {
            if let Some(id) = self.ghosts.pop_front().map(Id)
                && self.mask(id) == 0
                && self.content(id) != 0
            {
                self.forget(id);
            }
        }
    }

    /// Removes a row that is resident nowhere from the table of hashes.
    fn forget(&mut self, id: Id) {
        let mixed = mix(&self.state, self.layout.hash(self.row(id)));
        let found = self.pieces[id.piece()].by_hash.find_entry(mixed, |&i| i as usize == id.index());
        if let Ok(found) = found {
            found.remove();
            self.row_mut(id).fill(0);
            self.pieces[id.piece()].free.push(id.index() as u32);
        }
    }

    /// All scopes in which any row is resident.
    pub(super) fn all_scopes(&self) -> u32 {
        self.resident().fold(0, |all, row| all | mask(row))
    }

    /// The bytes of all resident rows.
    pub(super) fn resident(&self) -> impl Iterator<Item = &[u8]> {
        let rows = self.pieces.iter().flat_map(|p| p.rows.chunks_exact(self.stride));
        rows.filter(|row| mask(row) != 0)
    }

    /// Rows in a piece, free ones and ghosts among them.
    pub fn rows_in(&self, piece: usize) -> usize {
        self.pieces[piece].rows.len() / self.stride
    }

    /// When the row was last stored; `None` where that is not kept.
    pub fn stored_at(&self, id: Id) -> Option<u32> {
        self.time(self.row(id))
    }

    #[inline]
    fn time(&self, row: &[u8]) -> Option<u32> {
        let at = row.len() - 4;
        self.layout.timed.then(|| u32::from_le_bytes([row[at], row[at + 1], row[at + 2], row[at + 3]]))
    }

    /// The same blocks, with or without the time at which they were stored (`now`).
    pub fn with_time(&self, timed: bool, now: u32) -> Self {
        let layout = Layout { timed, ..self.layout };
        let mut new = Self { layout, stride: layout.stride(), ..self.clone() };
        let kept = self.stride.min(new.stride);
        for piece in &mut new.pieces {
            let mut rows = Vec::with_capacity(piece.rows.len() / self.stride * new.stride);
            for row in piece.rows.chunks_exact(self.stride) {
                rows.extend_from_slice(&row[..kept]);
                rows.extend_from_slice(&now.to_le_bytes()[..new.stride - kept]);
            }
            piece.rows = rows;
        }
        new
    }

    /// Puts back rows of a dump into a piece, without its tables: see [`Self::index_rows`].
    pub(super) fn restore_rows(&mut self, piece: usize, rows: &[u8]) {
        let all = &mut self.pieces[piece].rows;
        all.reserve_exact(rows.len());
        all.extend_from_slice(rows);
    }

    /// Builds the tables of restored rows. Rows with the same hash (a dump that was written while the
    /// source changed) become one, the later.
    pub(super) fn index_rows(&mut self) {
        let (stride, layout) = (self.stride, self.layout);
        let mut listed: Vec<Vec<(ContentKey, u32)>> = vec![Vec::new(); PIECES];
        for p in 0..PIECES {
            let Piece { rows, free, .. } = &mut self.pieces[p];
            let n = rows.len() / stride;
            let mut table = HashTable::with_capacity(n);
            for i in 0..n {
                let (earlier, row) = rows[..(i + 1) * stride].split_at_mut(i * stride);
                let mixed = mix(&self.state, layout.hash(row));
                let at = |j: u32| &earlier[j as usize * stride..][..stride];
                if let Some(&j) = table.find(mixed, |&j: &u32| layout.hash(at(j)) == layout.hash(row)) {
                    earlier[j as usize * stride..][..stride].copy_from_slice(row);
                    row.fill(0);
                    free.push(i as u32);
                } else {
                    table.insert_unique(mixed, i as u32, |&j| {
                        mix(&self.state, layout.hash(&rows[j as usize * stride..][..stride]))
                    });
                }
            }
            for (i, row) in rows.chunks_exact(stride).enumerate().filter(|(_, row)| mask(row) != 0) {
                self.live += 1;
                let key = content(row);
                if key != 0 {
                    listed[piece_of(key)].push((key, Id::new(p, i).0));
                }
            }
            self.pieces[p].by_hash = table;
        }
        for (p, ids) in listed.into_iter().enumerate() {
            let mut table = HashTable::with_capacity(ids.len());
            for (key, id) in ids {
                table.insert_unique(key, id, |&i| self.content(Id(i)));
            }
            self.by_content[p] = table;
        }
    }

    /// Bytes that the structures use.
    pub fn nbytes(&self) -> usize {
        let piece = |p: &Piece| p.rows.capacity() + p.free.capacity() * 4 + p.by_hash.allocation_size();
        self.pieces.iter().map(piece).sum::<usize>()
            + self.by_content.iter().map(HashTable::allocation_size).sum::<usize>()
            + self.ghosts.capacity() * 4
    }
}
