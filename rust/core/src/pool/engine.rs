//! What an engine's own pool class needs beyond the methods that the pool shares with it: groups that are
//! not known in advance, hashes that connectors put in, and looking at everything.

use std::sync::Arc;

use super::block_pool::BlockPool;
use super::blocks::CACHED;
use super::config::Group;
use super::request::{KeyForm, NIL};
use crate::error::PoolError;
use crate::hash::HashRef;

/// One hash of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held<'a> {
    /// The hash.
    pub hash: HashRef<'a>,
    /// Its group.
    pub group: u16,
    /// Tokens from the beginning of the sequence to the end of what the hash names; 0 where nobody said.
    pub num_tokens: u32,
}

impl BlockPool {
    /// The group is there, with blocks of this size from here on.
    ///
    /// # Errors
    /// [`PoolError::Config`] for a size that is no multiple of what a hash stands for, and for numbers of
    /// groups that cannot be.
    #[inline]
    pub fn ensure_group(&mut self, group: usize, block_size: usize) -> Result<(), PoolError> {
        match self.config.groups.get(group) {
            Some(g) if g.block_size as usize == block_size => Ok(()),
            _ => self.set_size(group, block_size),
        }
    }

    #[cold]
    fn set_size(&mut self, group: usize, block_size: usize) -> Result<(), PoolError> {
        let step = self.config.block_size;
        let size = u32::try_from(block_size).ok().filter(|s| *s > 0 && s.is_multiple_of(step));
        let Some(block_size) = size.filter(|_| group < usize::from(u16::MAX)) else {
            return Err(PoolError::Config(format!(
                "group {group}: 0 to {} and blocks of a multiple of {step} tokens were expected, saw {block_size}",
                u16::MAX - 1
            )));
        };
        let kind: Arc<str> = "".into();
        while self.config.groups.len() <= group {
            self.config.groups.push(Group { block_size, kind: Arc::clone(&kind), sliding_window: None });
            if let Some(e) = &mut self.events {
                e.retained.add_group(block_size);
            }
        }
        self.config.groups[group].block_size = block_size;
        self.groups_changed();
        Ok(())
    }

    /// What stores of a group say about it from here on.
    ///
    /// # Errors
    /// As [`Self::ensure_group`].
    pub fn set_group_kind(
        &mut self,
        group: usize,
        kind: Arc<str>,
        sliding_window: Option<u32>,
    ) -> Result<(), PoolError> {
        let size = self.config.groups.get(group).map_or(self.config.block_size, |g| g.block_size);
        self.ensure_group(group, size as usize)?;
        self.config.groups[group].kind = kind;
        self.config.groups[group].sliding_window = sliding_window;
        self.groups_changed();
        Ok(())
    }

    fn groups_changed(&mut self) {
        if let Some(e) = &mut self.events {
            e.emit.set_groups(&self.config.groups);
        }
    }

    /// Makes a block reachable by one more hash, without an event: whoever calls this announces it. Returns
    /// whether the block did not have it.
    ///
    /// # Errors
    /// Any [`PoolError`] of arguments; nothing was changed then.
    pub fn insert_hash(
        &mut self,
        block: u32,
        form: KeyForm,
        hash: &[u8],
        group: usize,
        num_tokens: u32,
    ) -> Result<bool, PoolError> {
        self.group(group)?;
        self.check_id(0, block)?;
        if block == 0 {
            return Err(PoolError::NullBlock { index: 0 });
        }
        if self.keys.form().is_some_and(|f| f != form) {
            return Err(PoolError::HashForm(format!(
                "this pool's hashes are {}, saw {}",
                self.form().describe(),
                form.describe()
            )));
        }
        let group = group as u16;
        let cached = self.blocks.node(block).has(CACHED);
        if !self.config.enable_caching || cached && self.keys.owned(block, hash, group).is_some() {
            return Ok(false);
        }
        self.keys.set_form(form);
        let slot = if cached { self.keys.further_slot() } else { block };
        let fingerprint = self.keys.fingerprint(hash, group);
        let is_first = self.keys.insert(slot, fingerprint, hash, group, block, num_tokens);
        if cached {
            self.keys.chain(block, slot);
        } else {
            self.blocks.node_mut(block).flags |= CACHED;
        }
        self.counters.stored += u64::from(is_first);
        Ok(true)
    }

    /// Removes all hashes of one block; whether it had any.
    ///
    /// # Errors
    /// [`PoolError::BlockRange`].
    pub fn evict_block(&mut self, block: u32) -> Result<bool, PoolError> {
        self.check_id(0, block)?;
        let cached = self.blocks.node(block).has(CACHED);
        if cached {
            self.forget(block);
            self.flush();
        }
        Ok(cached)
    }

    /// Sets the number of users of a block that has some and keeps some.
    ///
    /// # Errors
    /// [`PoolError::NotInUse`] where there are none before or after, [`PoolError::NullBlock`],
    /// [`PoolError::BlockRange`].
    pub fn set_ref_count(&mut self, block: u32, users: u32) -> Result<(), PoolError> {
        self.check_id(0, block)?;
        if block == 0 {
            return Err(PoolError::NullBlock { index: 0 });
        }
        if users == 0 || self.blocks.node(block).refs == 0 {
            return Err(PoolError::NotInUse { index: 0, block });
        }
        self.blocks.node_mut(block).refs = users;
        Ok(())
    }

    /// The free block that is given out after `after`; the first one for `None`. Nothing after a block
    /// that is not free.
    pub fn next_free(&self, after: Option<u32>) -> Option<u32> {
        match after {
            Some(block) if self.check_id(0, block).is_err() || block == 0 => None,
            Some(block) if self.blocks.node(block).refs > 0 => None,
            after => self.blocks.next_free(after),
        }
    }

    /// All hashes of a block, its own first, then those of boundaries in the order in which they came.
    pub fn held(&self, block: u32) -> impl Iterator<Item = Held<'_>> {
        let cached = self.check_id(0, block).is_ok() && self.blocks.node(block).has(CACHED);
        let slots = std::iter::successors(cached.then_some(block), |&slot| {
            Some(self.keys.key(slot).sibling).filter(|&s| s != NIL)
        });
        let form = self.form();
        slots.map(move |slot| {
            let key = self.keys.key(slot);
            Held { hash: form.hash(self.keys.digest(slot)), group: key.group, num_tokens: key.num_tokens }
        })
    }

    /// The blocks that hold a hash, the one that a hit takes first.
    pub fn copies_of(&self, form: KeyForm, hash: &[u8], group: u16) -> impl Iterator<Item = u32> {
        let first = if self.keys.form() == Some(form) { self.keys.get(hash, group) } else { None };
        let slots = std::iter::successors(first, move |&slot| {
            Some(self.keys.key(slot).next()).filter(|&next| Some(next) != first)
        });
        slots.map(|slot| self.keys.key(slot).owner)
    }

    /// Every different hash that is resident, in no particular order.
    pub fn resident_keys(&self) -> impl Iterator<Item = Held<'_>> {
        let form = self.form();
        (0..self.keys.num_slots() as u32).filter(|&s| self.is_first_copy(s)).map(move |slot| {
            let key = self.keys.key(slot);
            Held { hash: form.hash(self.keys.digest(slot)), group: key.group, num_tokens: key.num_tokens }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::{Config, Report};

    fn pool(report: Report) -> BlockPool {
        BlockPool::new(Config { report, ..Config::new(8, 4) }).unwrap()
    }

    #[test]
    fn a_hash_that_was_put_in_leaves_with_an_event_and_without_a_record() {
        for report in [Report::EveryCopy, Report::Residency] {
            let mut p = pool(report);
            let mut blocks = Vec::new();
            p.get_new_blocks(2, &mut blocks).unwrap();
            p.ensure_group(3, 8).unwrap();
            let form = KeyForm::Bytes(2);
            for (block, hash, group) in [(1, b"aa", 0), (1, b"bb", 3), (2, b"bb", 3)] {
                assert!(p.insert_hash(block, form, hash, group, 4).unwrap());
                assert!(!p.insert_hash(block, form, hash, group, 4).unwrap());
            }
            assert_eq!(p.copies_of(form, b"bb", 3).collect::<Vec<_>>(), [1, 2]);
            assert_eq!(p.held(1).map(|h| h.group).collect::<Vec<_>>(), [0, 3]);
            assert_eq!(p.resident_keys().count(), 2);
            assert!(p.take_events().is_empty());
            assert!(p.snapshot().unwrap().is_empty());
            assert!(p.evict_block(1).unwrap());
            assert!(p.evict_block(2).unwrap());
            assert!(!p.evict_block(2).unwrap());
            let removed: usize = p.take_events().iter().map(|v| v.num_hashes()).sum();
            assert_eq!(removed, if report == Report::EveryCopy { 3 } else { 2 });
        }
    }

    #[test]
    fn groups_and_counts_that_cannot_be_change_nothing() {
        let mut p = pool(Report::EveryCopy);
        assert!(p.ensure_group(0, 6).is_err());
        assert!(p.ensure_group(0, 0).is_err());
        assert!(p.ensure_group(usize::from(u16::MAX), 4).is_err());
        assert!(p.ensure_group(0, 1 << 40).is_err());
        assert_eq!(p.config().groups.len(), 1);
        assert!(p.set_ref_count(1, 1).is_err());
        assert!(p.insert_hash(0, KeyForm::Bytes(1), b"a", 0, 0).is_err());
        assert!(p.insert_hash(1, KeyForm::Bytes(1), b"a", 1, 0).is_err());
        assert_eq!(p.next_free(Some(99)), None);
        assert_eq!(p.next_free(Some(7)), None);
        assert_eq!(p.next_free(Some(3)), Some(4));
    }
}
