//! The blocks of one source: found by the engine's hash and by content.
//!
//! Entries of 24 bytes stand in 64 pieces chosen by the hash, so that no growth moves more than a
//! sixty-fourth at once. Two tables of 4-byte ids point at them: one by hash (pieces as the entries), one
//! by content key (pieces by the key). Byte hashes stand beside the entries, `width` bytes each.
//!
//! An entry whose last copy is gone stays for a while as a *ghost*: its hash still leads to its content,
//! so that a child that arrives later finds its parent. Ghosts are bounded and are never matched.

use std::collections::VecDeque;
use std::hash::BuildHasher;

use foldhash::quality::FixedState;
use hashbrown::HashTable;

use super::content::ContentKey;
use crate::hash::HashRef;

const PIECES: usize = 64;
const PIECE_SHIFT: u32 = 26;
const INDEX_MASK: u32 = (1 << PIECE_SHIFT) - 1;

/// Number of an entry: its piece and its place in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Id(u32);

impl Id {
    fn new(piece: usize, index: usize) -> Self {
        Self((piece as u32) << PIECE_SHIFT | index as u32)
    }

    fn piece(self) -> usize {
        (self.0 >> PIECE_SHIFT) as usize
    }

    fn index(self) -> usize {
        (self.0 & INDEX_MASK) as usize
    }
}

/// One block of the source.
#[derive(Clone, Copy, Debug, Default)]
pub struct Entry {
    /// The integer hash; unused for byte hashes.
    bits: u64,
    /// What it holds; 0 where that is not known (yet).
    pub content: ContentKey,
    /// The scopes in which it is resident, a bit each; 0 for ghosts and free places.
    pub mask: u32,
    /// When it was last stored, in the caller's seconds.
    pub stored_at: u32,
}

#[derive(Clone, Debug, Default)]
struct Piece {
    entries: Vec<Entry>,
    bytes: Vec<u8>,
    free: Vec<u32>,
    by_hash: HashTable<u32>,
    by_content: HashTable<u32>,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Store {
    /// Bytes of a hash; 0 for integers.
    width: usize,
    state: FixedState,
    pieces: Box<[Piece]>,
    live: usize,
    ghosts: VecDeque<u32>,
}

/// Ghosts kept at least, whatever the number of blocks; beyond it one per [`GHOST_SHARE`] blocks.
const MIN_GHOSTS: usize = 1024;
const GHOST_SHARE: usize = 16;

fn piece_of(hash: u64) -> usize {
    (hash >> 58) as usize
}

impl Store {
    /// No blocks; `width` is 0 for integer hashes.
    pub fn new(width: usize, seed: u64) -> Self {
        Self {
            width,
            state: FixedState::with_seed(seed),
            pieces: vec![Piece::default(); PIECES].into_boxed_slice(),
            live: 0,
            ghosts: VecDeque::new(),
        }
    }

    /// Whether hashes of this form belong here.
    pub fn takes(&self, hash: HashRef<'_>) -> bool {
        match hash {
            HashRef::Bytes(b) => b.len() == self.width && self.width != 0,
            _ => self.width == 0,
        }
    }

    /// Resident blocks.
    pub fn len(&self) -> usize {
        self.live
    }

    fn mix(&self, hash: HashRef<'_>) -> u64 {
        match hash {
            HashRef::Bytes(b) => self.state.hash_one(b),
            h => self.state.hash_one(h.bits().unwrap_or_default()),
        }
    }

    fn mix_content(&self, content: ContentKey) -> u64 {
        self.state.hash_one(content)
    }

    fn same(piece: &Piece, index: usize, width: usize, hash: HashRef<'_>) -> bool {
        match hash {
            HashRef::Bytes(b) => &piece.bytes[index * width..(index + 1) * width] == b,
            h => Some(piece.entries[index].bits) == h.bits(),
        }
    }

    /// The entry with this hash: resident, or a ghost.
    #[inline]
    pub fn find(&self, hash: HashRef<'_>) -> Option<Id> {
        let mixed = self.mix(hash);
        let p = piece_of(mixed);
        let piece = &self.pieces[p];
        let i = piece.by_hash.find(mixed, |&i| Self::same(piece, i as usize, self.width, hash))?;
        Some(Id::new(p, *i as usize))
    }

    /// The entry's fields.
    #[inline]
    pub fn entry(&self, id: Id) -> &Entry {
        &self.pieces[id.piece()].entries[id.index()]
    }

    fn entry_mut(&mut self, id: Id) -> &mut Entry {
        &mut self.pieces[id.piece()].entries[id.index()]
    }

    /// The entry's hash.
    pub fn hash(&self, id: Id) -> HashRef<'_> {
        let piece = &self.pieces[id.piece()];
        match self.width {
            0 => HashRef::Uint(piece.entries[id.index()].bits),
            w => HashRef::Bytes(&piece.bytes[id.index() * w..(id.index() + 1) * w]),
        }
    }

    /// The scopes, over all entries with this content, in which it is resident.
    #[inline]
    pub fn mask_of_content(&self, content: ContentKey) -> u32 {
        let mixed = self.mix_content(content);
        let table = &self.pieces[piece_of(mixed)].by_content;
        table
            .iter_hash(mixed)
            .map(|&id| self.entry(Id(id)))
            .filter(|e| e.content == content)
            .fold(0, |mask, e| mask | e.mask)
    }

    /// The entry with this hash, made (without residency) where there is none.
    #[inline]
    pub fn find_or_insert(&mut self, hash: HashRef<'_>) -> Id {
        let mixed = self.mix(hash);
        let p = piece_of(mixed);
        let (width, state) = (self.width, self.state.clone());
        let piece = &mut self.pieces[p];
        if let Some(&i) = piece.by_hash.find(mixed, |&i| Self::same(piece, i as usize, width, hash)) {
            return Id::new(p, i as usize);
        }
        let entry = Entry { bits: hash.bits().unwrap_or_default(), ..Entry::default() };
        let index = if let Some(i) = piece.free.pop() {
            piece.entries[i as usize] = entry;
            if let HashRef::Bytes(b) = hash {
                piece.bytes[i as usize * width..(i as usize + 1) * width].copy_from_slice(b);
            }
            i as usize
        } else {
            // Grows by an eighth: memory a block matters more here than the copies.
            if piece.entries.len() == piece.entries.capacity() {
                let more = (piece.entries.len() / 8).max(16);
                piece.entries.reserve_exact(more);
                piece.bytes.reserve_exact(more * width);
            }
            piece.entries.push(entry);
            if let HashRef::Bytes(b) = hash {
                piece.bytes.extend_from_slice(b);
            }
            piece.entries.len() - 1
        };
        let Piece { entries, bytes, by_hash, .. } = piece;
        by_hash.insert_unique(mixed, index as u32, |&i| match width {
            0 => state.hash_one(entries[i as usize].bits),
            w => state.hash_one(&bytes[i as usize * w..(i as usize + 1) * w]),
        });
        Id::new(p, index)
    }

    /// Makes the entry resident in the scopes `bits`, with this content where it is known. Returns the
    /// bits that were new. A content that differs from the known one is not taken: `Err` holds the known.
    #[inline]
    pub fn set(
        &mut self,
        id: Id,
        bits: u32,
        content: ContentKey,
        now: u32,
    ) -> Result<u32, (u32, ContentKey)> {
        let e = self.entry_mut(id);
        let (old_mask, old_content) = (e.mask, e.content);
        e.mask |= bits;
        e.stored_at = now;
        let clash = content != 0 && old_content != 0 && old_content != content;
        if old_content == 0 {
            e.content = content;
        }
        let (mask, now_content) = (e.mask, e.content);
        if old_mask == 0 && mask != 0 {
            self.live += 1;
        }
        // In the content table stand resident entries whose content is known.
        let was_listed = old_mask != 0 && old_content != 0;
        if !was_listed && mask != 0 && now_content != 0 {
            self.list(id, now_content);
        }
        let new = mask & !old_mask;
        if clash { Err((new, old_content)) } else { Ok(new) }
    }

    /// Takes scopes from the entry; returns those that it had. The last one makes it a ghost.
    #[inline]
    pub fn unset(&mut self, id: Id, bits: u32) -> u32 {
        let e = self.entry_mut(id);
        let had = e.mask & bits;
        if had == 0 {
            return 0;
        }
        e.mask &= !bits;
        let (mask, content) = (e.mask, e.content);
        if mask == 0 {
            self.live -= 1;
            if content == 0 {
                self.forget(id);
            } else {
                self.unlist(id, content);
                self.ghosts.push_back(id.0);
                self.bound_ghosts();
            }
        }
        had
    }

    fn list(&mut self, id: Id, content: ContentKey) {
        let mixed = self.mix_content(content);
        let p = piece_of(mixed);
        // The table is taken out, since growing it reads entries of all pieces.
        let mut table = std::mem::take(&mut self.pieces[p].by_content);
        table.insert_unique(mixed, id.0, |&i| self.mix_content(self.entry(Id(i)).content));
        self.pieces[p].by_content = table;
    }

    fn unlist(&mut self, id: Id, content: ContentKey) {
        let mixed = self.mix_content(content);
        if let Ok(found) = self.pieces[piece_of(mixed)].by_content.find_entry(mixed, |&i| i == id.0) {
            found.remove();
        }
    }

    fn bound_ghosts(&mut self) {
        while self.ghosts.len() > MIN_GHOSTS.max(self.live / GHOST_SHARE) {
            if let Some(id) = self.ghosts.pop_front().map(Id)
                && self.entry(id).mask == 0
                && self.entry(id).content != 0
            {
                self.forget(id);
            }
        }
    }

    /// Removes an entry that is resident nowhere from the table of hashes.
    fn forget(&mut self, id: Id) {
        let mixed = self.mix(self.hash(id));
        let piece = &mut self.pieces[id.piece()];
        if let Ok(found) = piece.by_hash.find_entry(mixed, |&i| i as usize == id.index()) {
            found.remove();
            piece.entries[id.index()] = Entry::default();
            piece.free.push(id.index() as u32);
        }
    }

    /// All resident entries, in no order.
    pub fn iter(&self) -> impl Iterator<Item = Id> + '_ {
        self.pieces.iter().enumerate().flat_map(|(p, piece)| {
            piece.entries.iter().enumerate().filter(|(_, e)| e.mask != 0).map(move |(i, _)| Id::new(p, i))
        })
    }

    /// Forgets everything, ghosts too.
    pub fn clear(&mut self) {
        self.pieces = vec![Piece::default(); PIECES].into_boxed_slice();
        self.ghosts.clear();
        self.live = 0;
    }

    /// Bytes that the structures use.
    pub fn nbytes(&self) -> usize {
        let piece = |p: &Piece| {
            p.entries.capacity() * size_of::<Entry>()
                + p.bytes.capacity()
                + p.free.capacity() * 4
                + (p.by_hash.capacity() + p.by_content.capacity()) * 6
        };
        self.pieces.iter().map(piece).sum::<usize>() + self.ghosts.capacity() * 4
    }
}
