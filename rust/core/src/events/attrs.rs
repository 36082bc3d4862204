//! What many events share.

use std::sync::Arc;

/// The fields of an event that repeat from event to event. For a removal only the four of
/// [`Scope`] are set, for a clear none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Attrs {
    /// Tokens in a block; 0 where a store names none (lower tiers).
    pub block_size: u32,
    /// Number of the LoRA adapter (old engines).
    pub lora_id: Option<i64>,
    /// Index of the KV cache group in hybrid models.
    pub group_idx: Option<i64>,
    /// Window of a sliding-window group, in tokens.
    pub sliding_window: Option<i64>,
    /// `GPU`, `CPU`, `STORAGE` or another tier, as on the wire.
    pub medium: Option<Arc<str>>,
    /// Name of the LoRA adapter.
    pub lora_name: Option<Arc<str>>,
    /// `full_attention`, `sliding_window`, ...
    pub spec_kind: Option<Arc<str>>,
    /// Whether the tier is local to the engine.
    pub locality: Option<Arc<str>>,
    /// Who owns a shared tier.
    pub ownership: Option<Arc<str>>,
    /// Session that the blocks belong to.
    pub session_id: Option<Arc<str>>,
    /// Tenant salt (`SGLang`'s field; vLLM puts it into `extra_keys`).
    pub cache_salt: Option<Arc<str>>,
}

/// The part of an event that, with the hash, is the key of a resident block.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Scope {
    /// See [`Attrs::medium`].
    pub medium: Option<Arc<str>>,
    /// See [`Attrs::group_idx`].
    pub group_idx: Option<i64>,
    /// See [`Attrs::locality`].
    pub locality: Option<Arc<str>>,
    /// See [`Attrs::ownership`].
    pub ownership: Option<Arc<str>>,
}

impl Attrs {
    /// Whether both share their texts, so that they are equal without a look at them. `false` says
    /// nothing.
    pub(super) fn is_twin(&self, other: &Self) -> bool {
        let shared = |a: &Option<Arc<str>>, b: &Option<Arc<str>>| match (a, b) {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            (a, b) => a.is_none() && b.is_none(),
        };
        self.block_size == other.block_size
            && self.lora_id == other.lora_id
            && self.group_idx == other.group_idx
            && self.sliding_window == other.sliding_window
            && shared(&self.medium, &other.medium)
            && shared(&self.lora_name, &other.lora_name)
            && shared(&self.spec_kind, &other.spec_kind)
            && shared(&self.locality, &other.locality)
            && shared(&self.ownership, &other.ownership)
            && shared(&self.session_id, &other.session_id)
            && shared(&self.cache_salt, &other.cache_salt)
    }

    /// The scope in which the event's hashes are resident.
    pub fn scope(&self) -> Scope {
        Scope {
            medium: self.medium.clone(),
            group_idx: self.group_idx,
            locality: self.locality.clone(),
            ownership: self.ownership.clone(),
        }
    }

    /// Whether the event's scope is `scope`; allocates nothing.
    pub fn in_scope(&self, scope: &Scope) -> bool {
        self.group_idx == scope.group_idx
            && self.medium == scope.medium
            && self.locality == scope.locality
            && self.ownership == scope.ownership
    }

    /// The attributes of a removal in `scope`.
    pub fn of_scope(scope: &Scope) -> Self {
        Self {
            medium: scope.medium.clone(),
            group_idx: scope.group_idx,
            locality: scope.locality.clone(),
            ownership: scope.ownership.clone(),
            ..Self::default()
        }
    }
}
