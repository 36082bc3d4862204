//! Which record belongs to a key: open addressing, eight bytes a slot.
//!
//! A slot is 32 bits of the key's hash beside the number of its record, so that a look-up touches one
//! line of the table and the record, and growing touches no keys. The place of a hash is monotonic in
//! the hash, which lets the table grow by halves instead of doubling. At most two of three slots are taken:
//! looking for a key that is not there, what most votes do, would take three times as long at four of five.

/// 0 is an empty slot; others are `hash << 32 | id + 1`.
#[derive(Clone, Debug, Default)]
pub(super) struct Table {
    slots: Vec<u64>,
    len: usize,
}

const FIRST: usize = 16;

impl Table {
    pub fn nbytes(&self) -> usize {
        self.slots.capacity() * 8
    }

    #[inline]
    fn home(&self, hash: u32) -> usize {
        ((u64::from(hash) * self.slots.len() as u64) >> 32) as usize
    }

    #[inline]
    fn after(&self, at: usize) -> usize {
        if at + 1 == self.slots.len() { 0 } else { at + 1 }
    }

    /// The record with this hash for which `same` says yes.
    #[inline]
    pub fn find(&self, hash: u32, same: impl Fn(u32) -> bool) -> Option<u32> {
        if self.len == 0 {
            return None;
        }
        let mut at = self.home(hash);
        loop {
            let slot = self.slots[at];
            if slot == 0 {
                return None;
            }
            if (slot >> 32) as u32 == hash {
                let id = (slot as u32) - 1;
                if same(id) {
                    return Some(id);
                }
            }
            at = self.after(at);
        }
    }

    /// Adds a record whose key is not there yet.
    pub fn insert(&mut self, hash: u32, id: u32) {
        if (self.len + 1) * 3 > self.slots.len() * 2 {
            self.grow();
        }
        self.place(u64::from(hash) << 32 | u64::from(id + 1));
        self.len += 1;
    }

    fn place(&mut self, slot: u64) {
        let mut at = self.home((slot >> 32) as u32);
        while self.slots[at] != 0 {
            at = self.after(at);
        }
        self.slots[at] = slot;
    }

    /// Makes room for `more` records at once.
    pub fn reserve(&mut self, more: usize) {
        if (self.len + more) * 3 > self.slots.len() * 2 {
            self.grow_to((self.slots.len() * 3 / 2).max((self.len + more) * 3 / 2 + 1));
        }
    }

    fn grow(&mut self) {
        self.grow_to(self.slots.len() * 3 / 2);
    }

    fn grow_to(&mut self, size: usize) {
        let size = size.max(FIRST);
        let old = std::mem::replace(&mut self.slots, vec![0; size]);
        old.into_iter().filter(|&s| s != 0).for_each(|s| self.place(s));
    }

    /// Takes a record out; what stood behind it moves up, so that no marks of the dead remain.
    pub fn remove(&mut self, hash: u32, id: u32) {
        let gone = u64::from(hash) << 32 | u64::from(id + 1);
        let mut hole = self.home(hash);
        while self.slots[hole] != gone {
            if self.slots[hole] == 0 {
                return;
            }
            hole = self.after(hole);
        }
        self.len -= 1;
        let mut at = hole;
        loop {
            at = self.after(at);
            let slot = self.slots[at];
            if slot == 0 {
                break;
            }
            let wants = self.home((slot >> 32) as u32);
            let stays = if hole <= at { hole < wants && wants <= at } else { hole < wants || wants <= at };
            if !stays {
                self.slots[hole] = slot;
                hole = at;
            }
        }
        self.slots[hole] = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hashbrown::HashMap;

    #[test]
    fn agrees_with_a_map_under_collisions() {
        let (mut table, mut truth) = (Table::default(), HashMap::new());
        let mut x = 1u64;
        for round in 0..20_000u32 {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let key = (x >> 33) as u32 % 700;
            // Few distinct hashes at both ends: long clusters that wrap around.
            let hash = if key.is_multiple_of(2) { u32::MAX - key % 5 } else { key.wrapping_mul(0x9e37_79b9) };
            match truth.remove(&key) {
                Some(id) if round % 3 != 0 => table.remove(hash, id),
                Some(id) => drop(truth.insert(key, id)),
                None => {
                    truth.insert(key, key);
                    table.insert(hash, key);
                }
            }
            assert_eq!(table.find(hash, |id| id == key), truth.get(&key).copied());
        }
        assert_eq!(table.len, truth.len());
    }
}
