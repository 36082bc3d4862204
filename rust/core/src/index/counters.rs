//! What a source's stream held, counted.

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        /// Counters of one source.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64),+
        }

        impl Counters {
            /// Names and values.
            pub fn items(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),+].into_iter()
            }
        }
    };
}

counters! {
    /// Events applied.
    events,
    /// Blocks that became resident in a scope.
    stored,
    /// Blocks that ceased to be.
    removed,
    /// Removals of blocks that were not resident.
    unknown_removed,
    /// Stores of blocks that were resident in that scope.
    duplicate_stored,
    /// Clears.
    cleared,
    /// Irregular events, used by hash only.
    irregular,
    /// Stores without tokens: another tier of known blocks.
    hash_only,
    /// Blocks that named a hash known with other tokens; the first content stays.
    conflicts,
    /// Blocks named as their own parent, or twice in a row in one store.
    self_parent,
    /// Blocks whose parent was not known when they came.
    orphaned,
    /// Orphans that found their parent.
    adopted,
    /// Orphans that were given up since too many waited.
    orphans_dropped,
    /// Events that could not be kept since the source uses too many scopes or block sizes.
    scopes_dropped,
    /// Media that no rule folds.
    unknown_media,
    /// Events that the decoder left out.
    skipped,
    /// Sequence numbers that did not follow the one before.
    gaps,
    /// Blocks whose time ran out.
    expired,
}

/// Bounds of what one source may keep waiting.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Blocks of stores whose parent is not known.
    pub orphan_blocks: usize,
    /// Blocks that are expected to be stored soon.
    pub expected_blocks: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { orphan_blocks: 65_536, expected_blocks: 65_536 }
    }
}
