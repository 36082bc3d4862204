//! Blocks of which nobody announces that they leave.

/// How long blocks live in the tiers of a source that never announces removals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expiry {
    /// Their life after the last store, in the caller's time.
    pub ttl: u32,
    /// Those tiers, a bit each.
    pub tiers: u32,
}

impl Expiry {
    /// In every tier, whichever there will be.
    pub const ALL: u32 = u32::MAX;

    /// Both of them, with this one's life.
    #[must_use]
    pub fn and(self, other: Option<Self>) -> Self {
        Self { ttl: self.ttl, tiers: self.tiers | other.map_or(0, |o| o.tiers) }
    }

    /// Whether blocks of this tier expire.
    pub fn covers(self, tier: usize) -> bool {
        self.tiers == Self::ALL || self.tiers >> tier & 1 == 1
    }
}
