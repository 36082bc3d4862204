//! The truth: what is resident, from the pool's own tables.

use super::block_pool::BlockPool;
use super::emit::{Emitter, Stored, extra_list};
use crate::error::PoolError;
use crate::events::{EventList, ExtraKeys, Scope};
use crate::resident::{Digest, key_digest};

impl BlockPool {
    pub(super) fn is_first_copy(&self, slot: u32) -> bool {
        let keys = &self.keys;
        keys.is_live(slot)
            && keys.find(keys.fingerprint_of(slot), keys.digest(slot), keys.key(slot).group) == Some(slot)
    }

    /// The digest of the resident set, computed from the table of hashes, not from events.
    pub fn digest(&self) -> [u8; 16] {
        let scopes: Vec<Scope> = (0..self.config.groups.len())
            .map(|g| Scope {
                medium: Some(self.config.medium.clone()),
                group_idx: i64::try_from(g).ok(),
                ..Scope::default()
            })
            .collect();
        let form = self.form();
        let hashes = Emitter::unbounded(&self.config);
        let mut digest = Digest::default();
        for slot in (0..self.keys.num_slots() as u32).filter(|&s| self.is_first_copy(s)) {
            let scope = &scopes[usize::from(self.keys.key(slot).group)];
            digest.add(key_digest(hashes.event_hash(form, self.keys.digest(slot)), scope));
        }
        digest.to_bytes()
    }

    /// Stores of everything that is resident, a parent before its children where it is resident.
    ///
    /// # Errors
    /// [`PoolError::EventsOff`]: tokens are kept only while events are on.
    pub fn snapshot(&self) -> Result<EventList, PoolError> {
        let mut out = Emitter::unbounded(&self.config);
        self.announce_all(&mut out, false)?;
        Ok(out.take())
    }

    /// After the queue overflowed: a clear, then everything that is resident; as copies, every copy.
    pub(super) fn resync(&mut self) -> EventList {
        let mut out = Emitter::unbounded(&self.config);
        out.cleared();
        let copies = self.events.as_ref().is_some_and(|e| e.every_copy);
        if self.announce_all(&mut out, copies).is_ok()
            && let Some(e) = &mut self.events
        {
            e.emit.recovered();
        }
        out.take()
    }

    fn announce_all(&self, out: &mut Emitter, copies: bool) -> Result<(), PoolError> {
        if self.events.is_none() {
            return Err(PoolError::EventsOff);
        }
        let slots = self.keys.num_slots() as u32;
        let mut seen = vec![false; slots as usize];
        let mut chain = Vec::new();
        for slot in 0..slots {
            if !self.is_first_copy(slot) {
                continue;
            }
            let mut at = Some(slot);
            while let Some(s) = at.filter(|&s| !seen[s as usize]) {
                seen[s as usize] = true;
                chain.push(s);
                at = self.parent_slot(s);
            }
            while let Some(s) = chain.pop() {
                self.announce_slot(s, out)?;
            }
        }
        if copies {
            let others = (0..slots).filter(|&s| self.keys.is_live(s) && !seen[s as usize]);
            for slot in others {
                self.announce_slot(slot, out)?;
            }
        }
        Ok(())
    }

    fn parent_slot(&self, slot: u32) -> Option<u32> {
        self.keys.parent(slot).and_then(|p| self.keys.get(p, self.keys.key(slot).group))
    }

    fn announce_slot(&self, slot: u32, out: &mut Emitter) -> Result<(), PoolError> {
        let e = self.events.as_ref().ok_or(PoolError::EventsOff)?;
        let key = self.keys.key(slot);
        let record = e.retained.record(slot, key.group, key.kept);
        let Some(meta) = e.retained.meta(record.meta) else { return Ok(()) };
        let mut list = Vec::new();
        let extra = match record.extra {
            Some(entry) => {
                extra_list(1, entry, &mut list);
                ExtraKeys::Raw(&list)
            }
            None => ExtraKeys::AllNil,
        };
        let stored = Stored {
            meta: record.meta,
            parent: self.keys.parent(slot),
            hashes: self.keys.digest(slot),
            tokens: record.tokens,
            extra,
            metadata: None,
            chain: true,
        };
        out.stored(self.form(), meta, &stored);
        Ok(())
    }
}
