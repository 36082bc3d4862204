//! Boundaries inside a block, and hashes that move from one block to another.

use super::block_pool::BlockPool;
use super::blocks::CACHED;
use super::emit::{Stored, extra_list};
use super::request::{NIL, Request};
use super::retained::Record;
use crate::error::PoolError;
use crate::events::ExtraKeys;

impl BlockPool {
    /// Makes a block reachable by the hash of the prefix of `num_tokens` tokens, which ends inside it.
    /// Returns whether the block owns that hash now; the null block never does.
    ///
    /// A block whose hash names a shorter prefix is promoted: what it owned leaves. With `replace` all
    /// that it owned leaves. In residency a boundary that the block's hash covers already is refused
    /// (unless `covered_boundaries`), so that the stream never stores again what a promotion removed, and
    /// the event spans from the last ancestor that is resident; as copies, the boundary becomes a further
    /// hash of the block.
    ///
    /// # Errors
    /// Any [`PoolError`] of arguments; nothing was changed then.
    pub fn cache_partial_block(
        &mut self,
        r: &Request<'_>,
        block: u32,
        num_tokens: usize,
        replace: bool,
        group: usize,
    ) -> Result<bool, PoolError> {
        self.group(group)?;
        let step = self.config.block_size as usize;
        if num_tokens == 0 || !num_tokens.is_multiple_of(step) {
            return Err(PoolError::Boundary { num_tokens, step });
        }
        if block == 0 || !self.config.enable_caching {
            return Ok(false);
        }
        self.check_id(0, block)?;
        if self.blocks.node(block).refs == 0 {
            return Err(PoolError::NotInUse { index: 0, block });
        }
        let needed = num_tokens / step;
        if r.hashes.end() < needed {
            return Err(PoolError::TooFewHashes { given: r.hashes.end(), needed });
        }
        self.check_form(r)?;
        let given = r.first_token + r.tokens.len();
        if self.events.is_some() && given < num_tokens {
            return Err(PoolError::TooFewTokens { given, needed: num_tokens });
        }
        let group = group as u16;
        let hash = r.hashes.get(needed - 1);
        let cached = self.blocks.node(block).has(CACHED);
        let owned = cached && self.keys.owned(block, hash, group).is_some();
        if owned && !replace {
            return Ok(true);
        }
        let every_copy = self.events.as_ref().is_some_and(|e| e.every_copy);
        if cached {
            if replace || (self.keys.key(block).num_tokens as usize) < num_tokens {
                self.forget(block);
            } else if !every_copy && !self.config.covered_boundaries {
                return Ok(false);
            }
        }
        self.keys.set_form(r.hashes.form);
        self.put_partial(r, block, num_tokens, group, every_copy);
        self.flush();
        Ok(true)
    }

    /// Where the event of a boundary begins: whoever has extra keys of spans gives those of this one.
    ///
    /// # Errors
    /// [`PoolError::Group`], [`PoolError::Boundary`], [`PoolError::TooFewHashes`].
    pub fn boundary_start(
        &self,
        r: &Request<'_>,
        num_tokens: usize,
        group: usize,
    ) -> Result<usize, PoolError> {
        self.group(group)?;
        let step = self.config.block_size as usize;
        if num_tokens == 0 || !num_tokens.is_multiple_of(step) {
            return Err(PoolError::Boundary { num_tokens, step });
        }
        let needed = num_tokens / step;
        if r.hashes.end() < needed {
            return Err(PoolError::TooFewHashes { given: r.hashes.end(), needed });
        }
        let ancestor = self.boundary_ancestor(r, needed - 1, group as u16);
        Ok(ancestor.map_or(0, |i| (i + 1) * step))
    }

    /// The last announced ancestor; as copies, the boundary before this one, announced or not.
    fn boundary_ancestor(&self, r: &Request<'_>, last: usize, group: u16) -> Option<usize> {
        let every_copy = self.events.as_ref().is_some_and(|e| e.every_copy);
        (0..last).rev().find(|&i| every_copy || self.keys.get(r.hashes.get(i), group).is_some())
    }

    fn put_partial(&mut self, r: &Request<'_>, block: u32, num_tokens: usize, group: u16, every_copy: bool) {
        let step = self.config.block_size as usize;
        let last = num_tokens / step - 1;
        let hash = r.hashes.get(last);
        let has_primary = self.blocks.node(block).has(CACHED);
        let slot = if has_primary { self.keys.further_slot() } else { block };
        let fingerprint = self.keys.fingerprint(hash, group);
        let is_first = self.keys.insert(slot, fingerprint, hash, group, block, num_tokens as u32);
        if has_primary {
            self.keys.chain(block, slot);
        }
        self.blocks.node_mut(block).flags |= CACHED;
        self.counters.stored += u64::from(is_first);
        if self.events.is_none() {
            return;
        }
        let ancestor = self.boundary_ancestor(r, last, group);
        let start = ancestor.map_or(0, |i| (i + 1) * step);
        let parent = ancestor.map(|i| r.hashes.get(i));
        let tokens = r.tokens_of(start..num_tokens);
        let mut entry = Vec::new();
        let some = r.extra.is_some_and(|x| x.write_entry(start..num_tokens, &mut entry));
        let extra = some.then_some(&*entry);

        let Some(e) = &mut self.events else { return };
        let meta = e.retained.begin(r, group, tokens.len() as u32);
        let kept = e.retained.put(slot, group, &Record { meta, tokens, extra });
        self.keys.keep(slot, kept, parent);
        if is_first || every_copy {
            let mut entries = Vec::new();
            let extra = match extra {
                Some(entry) => {
                    extra_list(1, entry, &mut entries);
                    ExtraKeys::Raw(&entries)
                }
                None => ExtraKeys::AllNil,
            };
            if let Some(m) = e.retained.meta(meta) {
                let stored =
                    Stored { meta, parent, hashes: hash, tokens, extra, metadata: None, chain: false };
                e.emit.stored(r.hashes.form, m, &stored);
            }
        }
        self.finish(meta);
    }

    /// Moves all hashes of `src` to `dst`, which has none: the cache keeps its copy there while the
    /// owner of `src` writes on. No event: what is resident stays the same.
    ///
    /// # Errors
    /// Any [`PoolError`] of arguments; nothing was changed then.
    pub fn move_block_hashes(&mut self, src: u32, dst: u32) -> Result<(), PoolError> {
        for (index, block) in [(0, src), (1, dst)] {
            self.check_id(index, block)?;
            if block == 0 {
                return Err(PoolError::NullBlock { index });
            }
        }
        if self.blocks.node(dst).refs == 0 {
            return Err(PoolError::NotInUse { index: 1, block: dst });
        }
        if self.blocks.node(dst).has(CACHED) {
            let tokens = self.keys.key(dst).num_tokens as usize;
            return Err(PoolError::AlreadyCached { index: 1, block: dst, tokens });
        }
        if !self.blocks.node(src).has(CACHED) {
            return Ok(());
        }
        let mut from = src;
        while from != NIL {
            let key = *self.keys.key(from);
            let fingerprint = self.keys.fingerprint_of(from);
            let hash = self.keys.digest(from).to_vec();
            let parent = self.keys.parent(from).map(<[u8]>::to_vec);
            self.keys.remove(from);
            // A further hash gets the slot again that it just gave up.
            let to = if from == src { dst } else { self.keys.further_slot() };
            self.keys.insert(to, fingerprint, &hash, key.group, dst, key.num_tokens);
            if to != dst {
                self.keys.chain(dst, to);
            }
            if let Some(e) = &mut self.events {
                self.keys.keep(to, key.kept, parent.as_deref());
                e.retained.rename(from, to);
            }
            from = key.sibling;
        }
        self.blocks.node_mut(src).flags &= !CACHED;
        self.blocks.node_mut(dst).flags |= CACHED;
        Ok(())
    }
}
