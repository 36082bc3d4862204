//! The hash map from a key to the first of its copies.
//!
//! Open addressing with linear probing over 8-byte words: a 32-bit fingerprint and a slot number.
//! A probe touches one cache line, a removal shifts back instead of leaving a mark, and growing needs
//! the words only. Whether a fingerprint's slot really holds the key is the caller's comparison.

/// Fingerprints of keys, each with the slot of the key's first copy.
#[derive(Clone, Debug)]
pub(super) struct KeyTable {
    words: Vec<u64>,
    mask: usize,
    len: usize,
}

const fn word(fingerprint: u32, slot: u32) -> u64 {
    (fingerprint as u64) << 32 | (slot as u64 + 1)
}

const fn slot_of(word: u64) -> u32 {
    (word as u32).wrapping_sub(1)
}

impl KeyTable {
    /// A table that holds `keys` keys before it grows.
    pub fn with_capacity(keys: usize) -> Self {
        let n = (keys.max(4) * 2).next_power_of_two();
        Self { words: vec![0; n], mask: n - 1, len: 0 }
    }

    /// Number of keys.
    pub const fn len(&self) -> usize {
        self.len
    }

    const fn home(&self, fingerprint: u32) -> usize {
        fingerprint as usize & self.mask
    }

    /// The slot with this fingerprint for which `is_key` holds.
    #[inline]
    pub fn find(&self, fingerprint: u32, is_key: impl Fn(u32) -> bool) -> Option<u32> {
        let mut at = self.home(fingerprint);
        loop {
            let w = self.words[at];
            if w == 0 {
                return None;
            }
            if (w >> 32) as u32 == fingerprint && is_key(slot_of(w)) {
                return Some(slot_of(w));
            }
            at = (at + 1) & self.mask;
        }
    }

    /// Adds a key that is not there.
    #[inline]
    pub fn insert(&mut self, fingerprint: u32, slot: u32) {
        if (self.len + 1) * 2 > self.words.len() {
            self.grow();
        }
        self.len += 1;
        self.put(word(fingerprint, slot));
    }

    #[inline]
    fn put(&mut self, w: u64) {
        let mut at = self.home((w >> 32) as u32);
        while self.words[at] != 0 {
            at = (at + 1) & self.mask;
        }
        self.words[at] = w;
    }

    #[cold]
    fn grow(&mut self) {
        let n = self.words.len() * 2;
        let old = std::mem::replace(&mut self.words, vec![0; n]);
        self.mask = n - 1;
        old.into_iter().filter(|&w| w != 0).for_each(|w| self.put(w));
    }

    #[inline]
    fn position(&self, w: u64) -> usize {
        let mut at = self.home((w >> 32) as u32);
        // The word is there: slots are removed only by their owner.
        while self.words[at] != w {
            debug_assert_ne!(self.words[at], 0);
            at = (at + 1) & self.mask;
        }
        at
    }

    /// Another copy is now the key's first.
    pub fn replace(&mut self, fingerprint: u32, old: u32, new: u32) {
        let at = self.position(word(fingerprint, old));
        self.words[at] = word(fingerprint, new);
    }

    /// Removes the key whose first copy is `slot`.
    #[inline]
    pub fn remove(&mut self, fingerprint: u32, slot: u32) {
        let mut hole = self.position(word(fingerprint, slot));
        let mut at = hole;
        loop {
            at = (at + 1) & self.mask;
            let w = self.words[at];
            if w == 0 {
                break;
            }
            let from_home = at.wrapping_sub(self.home((w >> 32) as u32)) & self.mask;
            if from_home >= at.wrapping_sub(hole) & self.mask {
                self.words[hole] = w;
                hole = at;
            }
        }
        self.words[hole] = 0;
        self.len -= 1;
    }

    /// Touches the lines that the next look-ups need, all at once, so that their misses overlap. The
    /// result only keeps the loads alive.
    #[inline]
    pub fn warm(&self, fingerprints: &[u32]) -> u64 {
        fingerprints.iter().fold(0, |acc, &f| acc ^ self.words[self.home(f)])
    }

    /// Forgets all keys.
    pub fn clear(&mut self) {
        self.words.fill(0);
        self.len = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// Few fingerprints and many keys: long clusters, wrap-around, shifts.
    #[test]
    fn agrees_with_a_map_under_crowding() {
        let mut table = KeyTable::with_capacity(4);
        let mut naive: BTreeMap<u32, u32> = BTreeMap::new();
        let mut x = 1_u64;
        for step in 0..20_000_u32 {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let slot = (x >> 33) as u32 % 200;
            let fingerprint = slot % 23 * 0x0100_0001 + 60;
            if let Some(f) = naive.remove(&slot) {
                table.remove(f, slot);
            } else {
                naive.insert(slot, fingerprint);
                table.insert(fingerprint, slot);
            }
            assert_eq!(table.len(), naive.len());
            if step % 100 == 0 {
                for s in 0..200 {
                    let f = s % 23 * 0x0100_0001 + 60;
                    assert_eq!(table.find(f, |x| x == s).is_some(), naive.contains_key(&s));
                }
            }
        }
    }
}
