//! Answers: who holds how much of a prompt.

use std::sync::Arc;

use super::directory::Source;
use super::prefix::PrefixIndex;
use super::profile::{Masks, Match};
use super::query::{Keys, Query};
use crate::hash::HashRef;

/// Most look-ups that a reader makes before it lets go of a source's lock.
pub const LOOKUPS_PER_LOCK: usize = 128;

/// What the blocks of a prompt have in one source.
#[derive(Default)]
struct Found {
    masks: Vec<Masks>,
    /// The same with every bit set where a block is expected.
    expected: Vec<Masks>,
    any_expected: bool,
}

impl Found {
    /// Looks up blocks of one size, letting go of the lock now and then. Ends at the first block that is
    /// not resident, unless `all` of them count.
    fn look_up(&mut self, source: &Source, keys: &mut Keys<'_>, all: bool, now: u32) {
        let (n, block_size) = (keys.len(), keys.block_size());
        let (mut masks, mut expected) = (Vec::new(), Vec::new());
        let mut go_on = true;
        while go_on && masks.len() < n {
            let from = masks.len();
            // Hashed before the lock is taken.
            let part = &keys.first(n.min(from + LOOKUPS_PER_LOCK))[from..];
            let shard = source.read();
            let cutoff = shard.cutoff(now);
            for &key in part {
                let mask = shard.mask_of_content(key, cutoff);
                let soon = mask == 0 && !shard.expected.is_empty() && shard.expected.has(key, now);
                masks.push(mask);
                expected.push(if soon { u32::MAX } else { mask });
                self.any_expected |= soon;
                if mask == 0 && !soon && !all {
                    go_on = false;
                    break;
                }
            }
        }
        self.masks.push(Masks { block_size, masks });
        self.expected.push(Masks { block_size, masks: expected });
    }
}

impl PrefixIndex {
    /// Who holds a prefix of this prompt: longest first, then by number of the source. `now` is the
    /// caller's time.
    pub fn find(&self, query: &Query<'_>, now: u32) -> Vec<Match> {
        let mut sizes: Vec<Keys<'_>> = Vec::new();
        let mut matches = Vec::new();
        for source in self.all().iter() {
            let profile = source.read().profile();
            let all = profile.needs_all_blocks();
            let mut found = Found::default();
            for (i, g) in profile.groups.iter().enumerate() {
                if profile.groups[..i].iter().any(|h| h.block_size == g.block_size) {
                    continue;
                }
                let at = sizes.iter().position(|k| k.block_size() == g.block_size).unwrap_or_else(|| {
                    sizes.push(query.keys(self.seed, g.block_size));
                    sizes.len() - 1
                });
                found.look_up(source, &mut sizes[at], all, now);
            }
            let expected = found.any_expected.then_some(&found.expected[..]);
            matches.extend(profile.matches(source.number, &source.id, &found.masks, expected));
        }
        matches.sort_by(|a, b| {
            (b.tokens, b.expected).cmp(&(a.tokens, a.expected)).then(a.source.cmp(&b.source))
        });
        matches
    }

    /// How much of a chain of its own hashes one source holds.
    pub fn find_hashes(&self, source: usize, hashes: &[HashRef<'_>], now: u32) -> Option<Match> {
        let source = self.get(source)?;
        let mut profile = source.read().profile();
        if profile.groups.is_empty() {
            // A stream of hashes only never names a block size: lengths are in blocks then.
            Arc::make_mut(&mut profile).assume_full_groups();
        }
        let all = profile.needs_all_blocks();
        let mut masks = Vec::new();
        'parts: for part in hashes.chunks(LOOKUPS_PER_LOCK) {
            let shard = source.read();
            let cutoff = shard.cutoff(now);
            for &hash in part {
                let mask = shard.mask_of_hash(hash, cutoff);
                masks.push(mask);
                if mask == 0 && !all {
                    break 'parts;
                }
            }
        }
        profile.matches(source.number, &source.id, &[Masks { block_size: 0, masks }], None)
    }
}
