//! What a pool is made of.

use std::sync::Arc;

use crate::error::PoolError;

/// What the pool's events describe.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Report {
    /// Whether a hash is resident: a store when its first copy appears, a removal when the last goes.
    #[default]
    Residency,
    /// Every physical copy, as vLLM reports.
    EveryCopy,
}

/// How a group's blocks are looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupKind {
    /// The whole prefix must be resident.
    Prefix,
    /// The blocks of the last window must be resident.
    Window {
        /// Tokens.
        window: u32,
    },
}

/// One group of layers that share blocks (hybrid models have several).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Tokens in a block of this group; a multiple of the size over which hashes are made.
    pub block_size: u32,
    /// vLLM's name: `full_attention`, `sliding_window`, ...; empty where it is not known, and then not said.
    pub kind: Arc<str>,
    /// Tokens, for sliding windows.
    pub sliding_window: Option<u32>,
}

impl Group {
    /// How look-ups treat the group.
    pub fn lookup(&self) -> GroupKind {
        match self.sliding_window {
            Some(window) if self.kind.starts_with("sliding_window") => GroupKind::Window { window },
            _ => GroupKind::Prefix,
        }
    }
}

/// Settings of a [`super::BlockPool`].
#[derive(Clone, Debug)]
#[allow(clippy::struct_excessive_bools)] // switches that are set independently, by name
pub struct Config {
    /// Blocks, the null block included.
    pub num_blocks: usize,
    /// Tokens over which one hash is made.
    pub block_size: u32,
    /// Whether blocks keep their hashes at all.
    pub enable_caching: bool,
    /// Whether events are made; where not, nothing for them is built or kept.
    pub enable_events: bool,
    /// Tier, as on the wire.
    pub medium: Arc<str>,
    /// What events describe.
    pub report: Report,
    /// Whether `emit_cached_block_events` announces reuse.
    pub report_hits: bool,
    /// Whether events carry the low 64 bits of a digest instead of the digest.
    pub narrow: bool,
    /// Whether a boundary that its block's hash covers already is kept in residency too, as vLLM keeps it.
    pub covered_boundaries: bool,
    /// Groups; one of full attention where empty.
    pub groups: Vec<Group>,
    /// Events that may wait before the queue is replaced by a resync mark.
    pub max_queued_events: usize,
}

impl Config {
    /// vLLM's defaults: caching on, one group, `GPU`.
    pub fn new(num_blocks: usize, block_size: u32) -> Self {
        Self {
            num_blocks,
            block_size,
            enable_caching: true,
            enable_events: true,
            medium: "GPU".into(),
            report: Report::Residency,
            report_hits: false,
            narrow: false,
            covered_boundaries: false,
            groups: Vec::new(),
            max_queued_events: 100_000,
        }
    }

    /// Checks, and fills in the default group.
    pub(super) fn checked(mut self) -> Result<Self, PoolError> {
        let bad = |what: String| Err(PoolError::Config(what));
        if self.num_blocks == 0 || self.num_blocks >= (1 << 30) {
            return bad(format!("num_blocks: 1 to 2^30 - 1 was expected, saw {}", self.num_blocks));
        }
        if self.block_size == 0 {
            return bad("block_size: at least 1 was expected, saw 0".to_owned());
        }
        if self.max_queued_events == 0 {
            return bad("max_queued_events: at least 1 was expected, saw 0".to_owned());
        }
        if self.groups.is_empty() {
            let kind = "full_attention".into();
            self.groups.push(Group { block_size: self.block_size, kind, sliding_window: None });
        }
        if self.groups.len() > usize::from(u16::MAX) {
            return bad(format!("groups: at most {} were expected, saw {}", u16::MAX, self.groups.len()));
        }
        for (i, g) in self.groups.iter().enumerate() {
            if g.block_size == 0 || !g.block_size.is_multiple_of(self.block_size) {
                return bad(format!(
                    "groups[{i}].block_size: a multiple of {} (the size over which hashes are made) was \
                     expected, saw {}",
                    self.block_size, g.block_size
                ));
            }
            if g.sliding_window == Some(0) {
                return bad(format!("groups[{i}].sliding_window: at least 1 was expected, saw 0"));
            }
        }
        Ok(self)
    }
}
