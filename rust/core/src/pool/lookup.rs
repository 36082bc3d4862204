//! Reads: what is cached. They never make events.

use super::block_pool::BlockPool;
use super::config::GroupKind;
use super::request::{HashColumn, KeyForm};
use crate::error::PoolError;
use crate::hash::HashRef;

impl BlockPool {
    /// The block that a hit on this hash takes: the first that was stored with it.
    ///
    /// # Errors
    /// [`PoolError::Group`].
    pub fn cached_block(&self, form: KeyForm, hash: &[u8], group: usize) -> Result<Option<u32>, PoolError> {
        self.group(group)?;
        if self.keys.form() != Some(form) {
            return Ok(None);
        }
        Ok(self.keys.get(hash, group as u16).map(|slot| self.keys.key(slot).owner))
    }

    /// The hash by which a block is known, if it has one.
    ///
    /// # Errors
    /// [`PoolError::BlockRange`].
    pub fn block_hash(&self, block: u32) -> Result<Option<HashRef<'_>>, PoolError> {
        self.check_id(0, block)?;
        let cached = self.blocks.node(block).has(super::blocks::CACHED);
        Ok(cached.then(|| self.form().hash(self.keys.digest(block))))
    }

    /// Appends the blocks of the longest prefix that is cached, at most `max_blocks`. For a group with
    /// a sliding window: the longest prefix whose last window is cached, with the null block for what
    /// lies before the window.
    ///
    /// # Errors
    /// [`PoolError::Group`].
    pub fn find_longest_cache_hit(
        &self,
        hashes: &HashColumn<'_>,
        max_blocks: usize,
        group: usize,
        out: &mut Vec<u32>,
    ) -> Result<(), PoolError> {
        let g = self.group(group)?;
        if self.keys.form() != Some(hashes.form) {
            return Ok(());
        }
        let scale = (g.block_size / self.config.block_size) as usize;
        let n = max_blocks.min(hashes.end() / scale);
        let hit = |i: usize| {
            let slot = self.keys.get(hashes.get((i + 1) * scale - 1), group as u16)?;
            Some(self.keys.key(slot).owner)
        };
        match g.lookup() {
            GroupKind::Prefix => out.extend((0..n).map_while(hit)),
            GroupKind::Window { window } => {
                // The next token sees `window - 1` tokens before it.
                let needed = ((window as usize - 1).div_ceil(g.block_size as usize)).max(1);
                let from = out.len();
                out.resize(from + n, 0);
                let found = &mut out[from..];
                let (mut end, mut run) = (n, 0);
                for i in (0..n).rev() {
                    if let Some(block) = hit(i) {
                        found[i] = block;
                        run += 1;
                        if run == needed {
                            break;
                        }
                    } else {
                        found[i..end].fill(0);
                        (end, run) = (i, 0);
                    }
                }
                out.truncate(from + end);
            }
        }
        Ok(())
    }
}
