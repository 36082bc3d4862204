//! What kind of cache a source has, and what that makes of residency: groups, scopes, tiers.
//!
//! Matching is a pure function of a profile and of the masks that the blocks of a prompt have in the
//! source. It holds no lock.

use super::tiers::MAX_TIERS;
use crate::events::{Attrs, Scope};

/// How a group's blocks make a prefix usable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupKind {
    /// The whole prefix must be resident.
    Full,
    /// The last tokens before the end of the prefix must be: this many.
    Window(u32),
}

/// What is known of one KV cache group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupInfo {
    /// The group's index; `None` where the engine names none.
    pub group: Option<i64>,
    /// How it matches.
    pub kind: GroupKind,
    /// Tokens in a block.
    pub block_size: u32,
}

impl GroupInfo {
    /// What a store tells of its group; `None` where it names no block size.
    pub fn of(attrs: &Attrs) -> Option<Self> {
        let kind = match (attrs.spec_kind.as_deref(), attrs.sliding_window) {
            (None, None) => GroupKind::Full,
            (Some(k), _) if ["full", "mla", "sink"].iter().any(|f| k.contains(f)) => GroupKind::Full,
            (_, Some(w)) => GroupKind::Window(u32::try_from(w).unwrap_or(u32::MAX)),
            // Recurrent state: only the last block before the end counts.
            (Some(_), None) => GroupKind::Window(1),
        };
        let block_size = attrs.block_size;
        (block_size > 0).then_some(Self { group: attrs.group_idx, kind, block_size })
    }
}

/// What is known of one scope.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScopeInfo {
    /// The part of the key beside the hash.
    pub scope: Scope,
    /// Its tier.
    pub tier: usize,
    /// Whether its blocks belong to an owner of their own, and do not count for this source.
    pub shared: bool,
}

/// How much of a prompt one source holds. All lengths are in tokens, from the start of the prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Match {
    /// The source's number in the index.
    pub source: usize,
    /// Usable over all tiers together.
    pub tokens: u32,
    /// Tokens in a block, for whoever counts in blocks; of the full-attention group, or the first.
    pub block_size: u32,
    /// By tier: what that tier holds alone.
    pub alone: Vec<(usize, u32)>,
    /// By tier: usable from this tier and all nearer ones together.
    pub cumulative: Vec<(usize, u32)>,
    /// Whether everything that the source said is known.
    pub complete: bool,
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    /// Scopes; a scope's place is its bit in a mask.
    pub scopes: Vec<ScopeInfo>,
    /// Groups, as they were first seen.
    pub groups: Vec<GroupInfo>,
    /// Whether everything that the source said since its last clear or snapshot is known.
    pub complete: bool,
}

/// The masks of a prompt's blocks, cut into blocks of one size.
#[derive(Clone, Debug)]
pub struct Masks {
    /// Tokens in a block; 0 where it is any group's (the prompt was given as hashes).
    pub block_size: u32,
    /// One mask a block; may end early where nothing further can count.
    pub masks: Vec<u32>,
}

fn masks_of(all: &[Masks], block_size: u32) -> &[u32] {
    all.iter().find(|m| m.block_size == block_size || m.block_size == 0).map_or(&[], |m| &m.masks)
}

impl Profile {
    /// Whether a prefix may be usable although an earlier block is not resident.
    pub fn has_windows(&self) -> bool {
        self.groups.iter().any(|g| g.kind != GroupKind::Full)
    }

    /// Takes every group that a scope names for one of full attention with blocks of one token.
    pub fn assume_full_groups(&mut self) {
        for s in &self.scopes {
            let group = GroupInfo { group: s.scope.group_idx, kind: GroupKind::Full, block_size: 1 };
            if !self.groups.contains(&group) {
                self.groups.push(group);
            }
        }
    }

    /// Which scopes count: those of `group`, in the tiers of `tiers` (a bit each).
    fn scopes_mask(&self, group: Option<i64>, tiers: u32) -> u32 {
        self.scopes
            .iter()
            .enumerate()
            .filter(|(_, s)| !s.shared && s.scope.group_idx == group && tiers >> s.tier & 1 == 1)
            .fold(0, |m, (i, _)| m | 1 << i)
    }

    /// The usable length in tokens with only these tiers.
    fn usable(&self, tiers: u32, all: &[Masks]) -> u32 {
        // Full-attention groups bound the answer; every one must hold the whole prefix.
        let mut limit: Option<u32> = None;
        for g in self.groups.iter().filter(|g| g.kind == GroupKind::Full) {
            let scopes = self.scopes_mask(g.group, tiers);
            let most = limit.map_or(usize::MAX, |l| (l / g.block_size) as usize);
            let held =
                masks_of(all, g.block_size).iter().take(most).take_while(|m| **m & scopes != 0).count();
            limit = Some(held as u32 * g.block_size);
        }
        if !self.has_windows() {
            return limit.unwrap_or(0);
        }
        // A length counts when it ends a block of every group and each window before it is held.
        let step = self.groups.iter().fold(1, |a, g| lcm(a, g.block_size));
        let longest = self
            .groups
            .iter()
            .map(|g| masks_of(all, g.block_size).len() as u32 * g.block_size)
            .min()
            .unwrap_or(0);
        let mut length = limit.unwrap_or(longest).min(longest) / step * step;
        while length > 0 && !self.windows_held(tiers, all, length) {
            length -= step;
        }
        length
    }

    fn windows_held(&self, tiers: u32, all: &[Masks], length: u32) -> bool {
        self.groups.iter().all(|g| {
            let GroupKind::Window(window) = g.kind else { return true };
            let scopes = self.scopes_mask(g.group, tiers);
            let end = (length / g.block_size) as usize;
            let need = window.saturating_sub(1).max(1).div_ceil(g.block_size) as usize;
            masks_of(all, g.block_size)[end.saturating_sub(need)..end].iter().all(|m| m & scopes != 0)
        })
    }

    /// What the source holds of a prompt; `None` where that is nothing.
    pub fn matches(&self, source: usize, all: &[Masks]) -> Option<Match> {
        let present = self.scopes.iter().filter(|s| !s.shared).fold(0u32, |m, s| m | 1 << s.tier);
        let tokens = self.usable(present, all);
        if tokens == 0 {
            return None;
        }
        let (mut alone, mut cumulative) = (Vec::new(), Vec::new());
        let mut nearer = 0;
        for tier in (0..MAX_TIERS).filter(|t| present >> t & 1 == 1) {
            nearer |= 1 << tier;
            alone.push((tier, if present == 1 << tier { tokens } else { self.usable(1 << tier, all) }));
            cumulative.push((tier, if nearer == present { tokens } else { self.usable(nearer, all) }));
        }
        let full = self.groups.iter().find(|g| g.kind == GroupKind::Full);
        let block_size = full.or(self.groups.first()).map_or(0, |g| g.block_size);
        Some(Match { source, tokens, block_size, alone, cumulative, complete: self.complete })
    }
}

fn lcm(a: u32, b: u32) -> u32 {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x).saturating_mul(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scope(group: Option<i64>, tier: usize) -> ScopeInfo {
        ScopeInfo { scope: Scope { group_idx: group, ..Scope::default() }, tier, shared: false }
    }

    fn group(group: Option<i64>, kind: GroupKind) -> GroupInfo {
        GroupInfo { group, kind, block_size: 4 }
    }

    fn masks(m: &[u32]) -> Vec<Masks> {
        vec![Masks { block_size: 4, masks: m.to_vec() }]
    }

    #[test]
    fn tiers_add_up_and_a_hole_hides_what_follows() {
        let p = Profile {
            scopes: vec![scope(None, 0), scope(None, 1)],
            groups: vec![group(None, GroupKind::Full)],
            complete: true,
        };
        let m = p.matches(0, &masks(&[1, 1, 3, 2, 0, 1])).unwrap();
        assert_eq!(
            (m.tokens, &m.alone[..], &m.cumulative[..]),
            (16, &[(0, 12), (1, 0)][..], &[(0, 12), (1, 16)][..])
        );
        assert!(p.matches(0, &masks(&[0, 1])).is_none());
    }

    #[test]
    fn window_groups_need_their_window_only() {
        let p = Profile {
            scopes: vec![scope(Some(0), 0), scope(Some(1), 0)],
            groups: vec![group(Some(0), GroupKind::Full), group(Some(1), GroupKind::Window(8))],
            complete: true,
        };
        // Full: five blocks. The window of 8 tokens (7 before the next) spans two blocks.
        let at = |m: &[u32]| p.matches(0, &masks(m)).map_or(0, |m| m.tokens);
        assert_eq!(at(&[1, 1, 3, 3, 1]), 16);
        assert_eq!(at(&[1, 1, 1, 1, 3]), 0);
        assert_eq!(at(&[3, 3, 1, 1, 1]), 8);
        assert_eq!(at(&[3, 1, 1]), 4);
    }
}
