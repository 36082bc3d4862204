//! Which block holds which hash.
//!
//! A *slot* is one (block, hash, group). A block's first hash has the block's own number as its slot,
//! further ones (boundaries inside a block) have slots above. All slots of one key form a ring in the
//! order in which they were stored; the table knows the first.

use std::hash::{BuildHasher, Hasher};

use foldhash::fast::RandomState;

use super::request::{KeyForm, NIL, copy_hash, same_hash};
use super::retained::Kept;
use super::table::KeyTable;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Key {
    fingerprint: u32,
    /// The ring of copies.
    prev: u32,
    next: u32,
    /// The block.
    pub owner: u32,
    /// The block's next further slot.
    pub sibling: u32,
    /// Tokens from the beginning of the sequence to the end of what the hash names.
    pub num_tokens: u32,
    pub group: u16,
    live: bool,
    has_parent: bool,
    /// Where the rest of the block's record is, while events are on.
    pub kept: Kept,
}

impl Key {
    /// The key's next copy; the last one leads to the first again.
    pub const fn next(&self) -> u32 {
        self.next
    }
}

/// All slots.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    table: KeyTable,
    slots: Vec<Key>,
    /// A slot's digest and, where parents are kept, right behind it the parent's: one cache line for the
    /// digests of most engines.
    digests: Vec<u8>,
    keep_parents: bool,
    form: Option<KeyForm>,
    width: usize,
    stride: usize,
    spare: Vec<u32>,
    num_blocks: u32,
    copies: usize,
    seed: RandomState,
}

impl Keys {
    /// No keys yet; `num_blocks` 0 where caching is off.
    pub fn new(num_blocks: u32, keep_parents: bool) -> Self {
        Self {
            table: KeyTable::with_capacity(num_blocks as usize),
            slots: vec![Key::default(); num_blocks as usize],
            digests: Vec::new(),
            keep_parents,
            form: None,
            width: 0,
            stride: 0,
            spare: Vec::new(),
            num_blocks,
            copies: 0,
            seed: RandomState::default(),
        }
    }

    /// Number of different keys.
    pub const fn len(&self) -> usize {
        self.table.len()
    }

    /// Number of slots in use.
    pub const fn copies(&self) -> usize {
        self.copies
    }

    /// Upper bound of slot numbers.
    pub fn num_slots(&self) -> usize {
        self.slots.len()
    }

    pub const fn form(&self) -> Option<KeyForm> {
        self.form
    }

    /// The first hash decides the form of all.
    #[inline]
    pub fn set_form(&mut self, form: KeyForm) {
        if self.form.is_none() {
            self.form = Some(form);
            self.width = form.width();
            self.stride = self.width * (1 + usize::from(self.keep_parents));
            self.digests = vec![0; self.slots.len() * self.stride];
        }
    }

    #[inline]
    pub fn fingerprint(&self, hash: &[u8], group: u16) -> u32 {
        let mut h = self.seed.build_hasher();
        // The two widths that engines use, in straight lines: a loop keeps the state of the hasher from
        // being known while compiling, and costs four times as much.
        let word = |b: &[u8; 16]| u128::from_le_bytes(*b);
        match hash.as_chunks() {
            ([a, b], []) => {
                h.write_u128(word(a));
                h.write_u128(word(b));
            }
            ([], rest) if rest.len() == 8 => h.write_u64(super::request::le(rest)),
            _ => h.write(hash),
        }
        h.write_u16(group);
        (h.finish() >> 32) as u32
    }

    #[inline]
    pub fn key(&self, slot: u32) -> &Key {
        &self.slots[slot as usize]
    }

    #[inline]
    pub fn is_live(&self, slot: u32) -> bool {
        self.slots[slot as usize].live
    }

    #[inline]
    pub fn digest(&self, slot: u32) -> &[u8] {
        &self.digests[slot as usize * self.stride..][..self.width]
    }

    /// The digest of the parent that was named when the key was stored.
    pub fn parent(&self, slot: u32) -> Option<&[u8]> {
        let from = slot as usize * self.stride + self.width;
        self.key(slot).has_parent.then(|| &self.digests[from..][..self.width])
    }

    /// Keeps the rest of a slot's record.
    #[inline]
    pub fn keep(&mut self, slot: u32, kept: Kept, parent: Option<&[u8]>) {
        let key = &mut self.slots[slot as usize];
        key.kept = kept;
        key.has_parent = parent.is_some();
        if let Some(parent) = parent {
            let from = slot as usize * self.stride + self.width;
            copy_hash(&mut self.digests[from..][..self.width], parent);
        }
    }

    /// The first copy of a key.
    #[inline]
    pub fn find(&self, fingerprint: u32, hash: &[u8], group: u16) -> Option<u32> {
        self.table.find(fingerprint, |s| self.key(s).group == group && same_hash(self.digest(s), hash))
    }

    /// The first copy of a key of which the fingerprint is not known.
    pub fn get(&self, hash: &[u8], group: u16) -> Option<u32> {
        if self.width != hash.len() {
            return None;
        }
        self.find(self.fingerprint(hash, group), hash, group)
    }

    #[inline]
    pub fn warm(&self, fingerprints: &[u32]) -> u64 {
        self.table.warm(fingerprints)
    }

    /// A slot for a further hash of a block.
    pub fn further_slot(&mut self) -> u32 {
        self.spare.pop().unwrap_or_else(|| {
            let slot = self.slots.len() as u32;
            self.slots.push(Key::default());
            self.digests.resize(self.slots.len() * self.stride, 0);
            slot
        })
    }

    /// Fills a slot; `true` if this is the key's only copy.
    #[inline]
    pub fn insert(
        &mut self,
        slot: u32,
        fingerprint: u32,
        hash: &[u8],
        group: u16,
        owner: u32,
        num_tokens: u32,
    ) -> bool {
        let first = self.find(fingerprint, hash, group);
        let (mut prev, mut next) = (slot, slot);
        if let Some(first) = first {
            prev = self.key(first).prev;
            next = first;
            self.slots[prev as usize].next = slot;
            self.slots[next as usize].prev = slot;
        } else {
            self.table.insert(fingerprint, slot);
        }
        copy_hash(&mut self.digests[slot as usize * self.stride..][..self.width], hash);
        self.slots[slot as usize] = Key {
            fingerprint,
            prev,
            next,
            owner,
            sibling: NIL,
            num_tokens,
            group,
            live: true,
            ..Key::default()
        };
        self.copies += 1;
        first.is_none()
    }

    /// Empties a slot; `true` if it was the key's last copy. The digest can still be read.
    #[inline]
    pub fn remove(&mut self, slot: u32) -> bool {
        let Key { fingerprint, prev, next, .. } = *self.key(slot);
        self.slots[slot as usize].live = false;
        self.copies -= 1;
        if slot >= self.num_blocks {
            self.spare.push(slot);
        }
        if next == slot {
            self.table.remove(fingerprint, slot);
            return true;
        }
        self.slots[prev as usize].next = next;
        self.slots[next as usize].prev = prev;
        // Only the first copy stands in the table.
        let hash = self.digest(slot);
        let group = self.key(slot).group;
        let is_first = self.table.find(fingerprint, |s| {
            s == slot || (self.key(s).group == group && same_hash(self.digest(s), hash))
        }) == Some(slot);
        if is_first {
            self.table.replace(fingerprint, slot, next);
        }
        false
    }

    /// Gives a block a further slot.
    pub fn chain(&mut self, block: u32, slot: u32) {
        let mut at = block;
        while self.key(at).sibling != NIL {
            at = self.key(at).sibling;
        }
        self.slots[at as usize].sibling = slot;
    }

    #[inline]
    pub fn fingerprint_of(&self, slot: u32) -> u32 {
        self.key(slot).fingerprint
    }

    /// The slot by which a cached block owns a key.
    pub fn owned(&self, block: u32, hash: &[u8], group: u16) -> Option<u32> {
        let mut at = block;
        while at != NIL {
            if self.key(at).group == group && same_hash(self.digest(at), hash) {
                return Some(at);
            }
            at = self.key(at).sibling;
        }
        None
    }

    /// Forgets everything, the form of hashes too.
    pub fn clear(&mut self) {
        self.table.clear();
        self.slots.truncate(self.num_blocks as usize);
        self.slots.fill(Key::default());
        self.digests = Vec::new();
        self.spare.clear();
        self.form = None;
        (self.width, self.stride) = (0, 0);
        self.copies = 0;
    }
}
