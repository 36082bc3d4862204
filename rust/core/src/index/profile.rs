//! What kind of cache a source has, and what that makes of residency: groups, scopes, tiers.
//!
//! Matching is a pure function of a profile and of the masks that the blocks of a prompt have in the
//! source. It holds no lock.

use std::sync::Arc;

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

impl GroupKind {
    /// By the engine's name and window. Whatever is not known needs its whole prefix: an answer may be too
    /// short, never too long.
    pub fn of(kind: Option<&str>, window: Option<i64>) -> Self {
        let window = window.filter(|&w| w > 0).map(|w| u32::try_from(w).unwrap_or(u32::MAX));
        let is = |names: &[&str]| kind.is_some_and(|k| names.iter().any(|n| k.contains(n)));
        match window {
            // Recurrent state: only the last block before the end counts.
            _ if is(&["mamba", "linear", "recurrent", "ssm"]) => Self::Window(1),
            Some(w) if kind.is_none() || is(&["sliding"]) => Self::Window(w),
            _ => Self::Full,
        }
    }
}

/// Blocks of one size of one KV cache group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupInfo {
    /// The group's index; `None` where the engine names none.
    pub group: Option<i64>,
    /// How it matches.
    pub kind: GroupKind,
    /// Tokens in a block.
    pub block_size: u32,
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

/// Who a source is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SourceId {
    /// Its name.
    pub name: String,
    /// Its data-parallel rank.
    pub rank: u32,
    /// Whether it is the owner of a shared tier rather than an engine.
    pub is_owner: bool,
}

/// How much of a prompt one source holds. All lengths are in tokens, from the start of the prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Match {
    /// The source's number in the index.
    pub source: usize,
    /// Who it is.
    pub id: Arc<SourceId>,
    /// Usable over all tiers together.
    pub tokens: u32,
    /// Usable once the blocks that are expected have come; at least `tokens`.
    pub expected: u32,
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
    /// Groups and their block sizes, as they were first seen.
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

fn to_tokens(length: u64) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

impl Profile {
    /// What a store tells of its group, where that is new.
    pub fn new_group(&self, attrs: &Attrs) -> Option<GroupInfo> {
        let (group, block_size) = (attrs.group_idx, attrs.block_size);
        if block_size == 0 || self.groups.iter().any(|g| g.group == group && g.block_size == block_size) {
            return None;
        }
        let same = self.groups.iter().find(|g| g.group == group);
        let kind = same.map_or(GroupKind::of(attrs.spec_kind.as_deref(), attrs.sliding_window), |g| g.kind);
        Some(GroupInfo { group, kind, block_size })
    }

    /// The size of the blocks into which a store's prefix is cut: its group's, or a multiple of that in a
    /// tier with larger blocks. (A part of a block hangs on whole ones.)
    pub fn unit_of(&self, attrs: &Attrs) -> u32 {
        let of_group = self.groups.iter().find(|g| g.group == attrs.group_idx).map(|g| g.block_size);
        match (of_group, attrs.block_size) {
            (Some(own), size) if size % own != 0 || size == 0 => own,
            (_, size) => size,
        }
    }

    /// Whether a block may count although an earlier one of its size is not resident.
    pub fn needs_all_blocks(&self) -> bool {
        self.groups.iter().any(|g| g.kind != GroupKind::Full || g.block_size != self.groups[0].block_size)
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

    /// Which scopes count: those of `group`, in the tiers of `tiers` (a bit each). A scope without a group
    /// (a connector's, say) holds whole blocks and counts for every group.
    fn scopes_mask(&self, group: Option<i64>, tiers: u32) -> u32 {
        self.scopes
            .iter()
            .enumerate()
            .filter(|(_, s)| {
                let of_group = s.scope.group_idx.is_none() || s.scope.group_idx == group;
                !s.shared && of_group && tiers >> s.tier & 1 == 1
            })
            .fold(0, |m, (i, _)| m | 1 << i)
    }

    /// The groups that bound an answer, each with its first block size.
    fn needed(&self) -> impl Iterator<Item = &GroupInfo> {
        let numbered = self.groups.iter().any(|g| g.group.is_some());
        self.groups
            .iter()
            .enumerate()
            .filter(move |(i, g)| {
                let first = self.groups[..*i].iter().all(|h| h.group != g.group);
                first && (g.group.is_some() || !numbered)
            })
            .map(|(_, g)| g)
    }

    /// How far the blocks of a full-attention group reach from the start without a hole; tiers with blocks
    /// of other sizes fill in for one another.
    fn reach(&self, group: Option<i64>, scopes: u32, all: &[Masks]) -> u64 {
        let of_group = |g: &&GroupInfo| g.group == group || g.group.is_none();
        let mut at = 0;
        loop {
            let next = self
                .groups
                .iter()
                .filter(of_group)
                .filter_map(|g| {
                    let size = u64::from(g.block_size);
                    let i = at / size;
                    let mask = *masks_of(all, g.block_size).get(usize::try_from(i).ok()?)?;
                    (mask & scopes != 0).then_some((i + 1) * size)
                })
                .max();
            match next {
                Some(next) => at = next,
                None => return at,
            }
        }
    }

    /// The same where all blocks have one size, as is usual.
    fn reach_of_one_size(size: u32, scopes: u32, masks: &[u32]) -> u64 {
        masks.iter().take_while(|m| **m & scopes != 0).count() as u64 * u64::from(size)
    }

    /// The usable length in tokens with only these tiers.
    fn usable(&self, tiers: u32, all: &[Masks]) -> u64 {
        let one_size = self.groups.iter().all(|g| g.block_size == self.groups[0].block_size);
        // Full-attention groups bound the answer; every one must hold the whole prefix.
        let mut limit: Option<u64> = None;
        for g in self.needed().filter(|g| g.kind == GroupKind::Full) {
            let scopes = self.scopes_mask(g.group, tiers);
            let held = if one_size {
                Self::reach_of_one_size(g.block_size, scopes, masks_of(all, g.block_size))
            } else {
                self.reach(g.group, scopes, all)
            };
            limit = Some(limit.map_or(held, |l| l.min(held)));
        }
        if self.needed().all(|g| g.kind == GroupKind::Full) {
            return limit.unwrap_or(0);
        }
        self.longest_with_windows(limit, tiers, all)
    }

    /// The longest length up to `limit` that ends a block of every group and before which each window is
    /// held.
    fn longest_with_windows(&self, limit: Option<u64>, tiers: u32, all: &[Masks]) -> u64 {
        let step = self.needed().fold(1, |a, g| lcm(a, u64::from(g.block_size)));
        let longest = self
            .needed()
            .map(|g| masks_of(all, g.block_size).len() as u64 * u64::from(g.block_size))
            .min()
            .unwrap_or(0);
        let windows: Vec<Window> = self
            .needed()
            .filter_map(|g| {
                let GroupKind::Window(window) = g.kind else { return None };
                let scopes = self.scopes_mask(g.group, tiers);
                Some(Window::new(g.block_size, window, scopes, masks_of(all, g.block_size)))
            })
            .collect();
        let mut length = limit.unwrap_or(longest).min(longest) / step * step;
        while length > 0 && !windows.iter().all(|w| w.held_before(length)) {
            length -= step;
        }
        length
    }

    /// What the source holds of a prompt; `None` where that is nothing and nothing is expected.
    /// `with_expected` are the masks with every bit set where a block is expected.
    pub fn matches(
        &self,
        source: usize,
        id: &Arc<SourceId>,
        all: &[Masks],
        with_expected: Option<&[Masks]>,
    ) -> Option<Match> {
        let present = self.scopes.iter().filter(|s| !s.shared).fold(0u32, |m, s| m | 1 << s.tier);
        let tokens = to_tokens(self.usable(present, all));
        let expected = with_expected.map_or(tokens, |e| to_tokens(self.usable(present, e)).max(tokens));
        if expected == 0 {
            return None;
        }
        let alone_is = |tiers| if tiers == present { tokens } else { to_tokens(self.usable(tiers, all)) };
        let (mut alone, mut cumulative) = (Vec::new(), Vec::new());
        let mut nearer = 0;
        for tier in (0..MAX_TIERS).filter(|t| present >> t & 1 == 1) {
            nearer |= 1 << tier;
            alone.push((tier, alone_is(1 << tier)));
            cumulative.push((tier, alone_is(nearer)));
        }
        let full = self.groups.iter().find(|g| g.kind == GroupKind::Full);
        let block_size = full.or(self.groups.first()).map_or(0, |g| g.block_size);
        let (id, complete) = (Arc::clone(id), self.complete);
        Some(Match { source, id, tokens, expected, block_size, alone, cumulative, complete })
    }
}

/// A window group over one prompt.
struct Window {
    block_size: u64,
    /// Blocks that must be held before an end.
    need: u64,
    /// How many blocks in a row are held up to and with each.
    runs: Vec<u64>,
}

impl Window {
    fn new(block_size: u32, window: u32, scopes: u32, masks: &[u32]) -> Self {
        let mut run = 0;
        let runs = masks.iter().map(|m| {
            run = if m & scopes == 0 { 0 } else { run + 1 };
            run
        });
        Self {
            block_size: u64::from(block_size),
            // The next token sees itself and window - 1 before it.
            need: u64::from(window.saturating_sub(1).max(1).div_ceil(block_size)),
            runs: runs.collect(),
        }
    }

    fn held_before(&self, length: u64) -> bool {
        let end = length / self.block_size;
        end == 0 || self.runs.get(end as usize - 1).is_some_and(|&run| run >= self.need.min(end))
    }
}

fn lcm(a: u64, b: u64) -> u64 {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x.max(1)).saturating_mul(b).max(1)
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

    fn id() -> Arc<SourceId> {
        Arc::new(SourceId { name: "w".into(), rank: 0, is_owner: false })
    }

    fn profile(scopes: Vec<ScopeInfo>, groups: Vec<GroupInfo>) -> Profile {
        Profile { scopes, groups, complete: true }
    }

    fn tokens(p: &Profile, all: &[Masks]) -> u32 {
        p.matches(0, &id(), all, None).map_or(0, |m| m.tokens)
    }

    #[test]
    fn tiers_add_up_and_a_hole_hides_what_follows() {
        let p = profile(vec![scope(None, 0), scope(None, 1)], vec![group(None, GroupKind::Full)]);
        let m = p.matches(0, &id(), &masks(&[1, 1, 3, 2, 0, 1]), None).unwrap();
        assert_eq!(
            (m.tokens, &m.alone[..], &m.cumulative[..]),
            (16, &[(0, 12), (1, 0)][..], &[(0, 12), (1, 16)][..])
        );
        assert!(p.matches(0, &id(), &masks(&[0, 1]), None).is_none());
        let expected = p.matches(0, &id(), &masks(&[0, 1]), Some(&masks(&[u32::MAX, 1]))).unwrap();
        assert_eq!((expected.tokens, expected.expected), (0, 8));
    }

    #[test]
    fn window_groups_need_their_window_only() {
        let p = profile(
            vec![scope(Some(0), 0), scope(Some(1), 0)],
            vec![group(Some(0), GroupKind::Full), group(Some(1), GroupKind::Window(8))],
        );
        // Full: five blocks. The window of 8 tokens (7 before the next) spans two blocks.
        let at = |m: &[u32]| tokens(&p, &masks(m));
        assert_eq!(at(&[1, 1, 3, 3, 1]), 16);
        assert_eq!(at(&[1, 1, 1, 1, 3]), 0);
        assert_eq!(at(&[3, 3, 1, 1, 1]), 8);
        assert_eq!(at(&[3, 1, 1]), 4);
    }

    #[test]
    fn a_scope_without_a_group_counts_for_every_group() {
        let p = profile(
            vec![scope(Some(0), 0), scope(None, 1)],
            vec![group(Some(0), GroupKind::Full), group(None, GroupKind::Full)],
        );
        assert_eq!(tokens(&p, &masks(&[1, 2, 1, 3])), 16);
        assert_eq!(tokens(&p, &masks(&[1, 1, 1])), 12);
    }

    #[test]
    fn tiers_with_larger_blocks_fill_in() {
        let mut large = group(None, GroupKind::Full);
        large.block_size = 12;
        let p = profile(vec![scope(None, 0), scope(None, 1)], vec![group(None, GroupKind::Full), large]);
        let all = |small: &[u32], large: &[u32]| {
            vec![
                Masks { block_size: 4, masks: small.to_vec() },
                Masks { block_size: 12, masks: large.to_vec() },
            ]
        };
        assert_eq!(tokens(&p, &all(&[1, 0, 0, 1, 1, 0], &[2, 0])), 20);
        assert_eq!(tokens(&p, &all(&[1, 0, 0, 1], &[0, 2])), 4);
    }

    #[test]
    fn numbers_of_any_size_take_no_time() {
        for window in [0, 1, u32::MAX] {
            for size in [1, 7, u32::MAX] {
                let mut groups = vec![group(Some(0), GroupKind::Full), group(Some(1), GroupKind::Full)];
                groups[1] = GroupInfo { group: Some(1), kind: GroupKind::Window(window), block_size: size };
                let p = profile(vec![scope(Some(0), 0), scope(Some(1), 0)], groups);
                let all = vec![
                    Masks { block_size: 4, masks: vec![3; 100_000] },
                    Masks { block_size: size, masks: vec![3; 100_000] },
                ];
                tokens(&p, &all);
            }
        }
        assert_eq!(lcm(u64::MAX, u64::MAX - 1), u64::MAX);
    }

    #[test]
    fn kinds_are_told_apart_and_unknown_ones_need_everything() {
        use GroupKind::{Full, Window};
        for (kind, window, wanted) in [
            (None, None, Full),
            (None, Some(128), Window(128)),
            (Some("full_attention"), Some(128), Full),
            (Some("sliding_window_mla"), Some(128), Window(128)),
            (Some("mla_attention"), None, Full),
            (Some("sliding_window"), None, Full),
            (Some("sliding_window"), Some(i64::MAX), Window(u32::MAX)),
            (Some("sliding_window"), Some(-1), Full),
            (Some("mamba"), None, Window(1)),
            (Some("chunked_local_attention"), None, Full),
            (Some("hitherto_unknown"), Some(5), Full),
        ] {
            assert_eq!(GroupKind::of(kind, window), wanted, "{kind:?} {window:?}");
        }
    }
}
