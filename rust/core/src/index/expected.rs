//! Blocks that a router expects a source to store soon, since it sent a prompt there: never resident.

use hashbrown::HashMap;

use super::content::ContentKey;

/// Expected blocks, each until its time; bounded.
#[derive(Clone, Debug, Default)]
pub struct Expected {
    until: HashMap<ContentKey, u32, foldhash::fast::RandomState>,
}

impl Expected {
    /// Whether nothing is expected.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.until.is_empty()
    }

    /// Expects a block until a time. Beyond `bound` first what is overdue is let go, then nothing is added.
    pub fn add(&mut self, key: ContentKey, until: u32, now: u32, bound: usize) -> bool {
        if self.until.len() >= bound && !self.until.contains_key(&key) {
            self.until.retain(|_, &mut t| t >= now);
            if self.until.len() >= bound {
                return false;
            }
        }
        let at = self.until.entry(key).or_default();
        *at = until.max(*at);
        true
    }

    /// The block came.
    #[inline]
    pub fn came(&mut self, key: ContentKey) {
        if !self.until.is_empty() {
            self.until.remove(&key);
        }
    }

    /// Whether the block is expected now.
    pub fn has(&self, key: ContentKey, now: u32) -> bool {
        self.until.get(&key).is_some_and(|&t| t >= now)
    }

    /// Nothing is expected any more.
    pub fn clear(&mut self) {
        self.until.clear();
    }
}
