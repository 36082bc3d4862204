//! `SGLang` 0.5.23: maps in its own order.
//!
//! `lora_id` is always written; `medium`, `cache_salt`, `session_id` and `lora_name` only when set.

use crate::events::{Attrs, EventKind};
use crate::msgpack::write_uint;

use super::encode::{Family, Suffix};
use super::vllm_array::first_set;
use super::vllm_map::{Pairs, VllmMap};
use super::writer::Writer;

/// `SGLang`'s maps.
pub struct SglangMap;

impl Family for SglangMap {
    const STORED: &'static [u8] = VllmMap::STORED;
    const PARENT: &'static [u8] = VllmMap::PARENT;
    const TOKENS: &'static [u8] = VllmMap::TOKENS;
    const REMOVED: &'static [u8] = VllmMap::REMOVED;
    const CLEARED: &'static [u8] = VllmMap::CLEARED;
    const EXTRA_KEYS: &'static [u8] = VllmMap::EXTRA_KEYS;
    const NAMED: bool = true;
    const STORED_FIELDS: usize = VllmMap::STORED_FIELDS;

    #[inline]
    fn header(&self, w: &mut Writer<'_>, _kind: EventKind, fields: usize) {
        w.map(fields);
    }

    fn stored(&self, a: &Attrs) -> Suffix {
        let mut p = Pairs::default();
        write_uint(p.name("block_size"), u64::from(a.block_size));
        p.int("lora_id", a.lora_id);
        p.opt_str("medium", a.medium.as_deref());
        p.opt_str("cache_salt", a.cache_salt.as_deref());
        p.opt_str("session_id", a.session_id.as_deref());
        p.opt_str("lora_name", a.lora_name.as_deref());
        let fault = first_set(&[
            ("group_idx", a.group_idx.is_some()),
            ("kv_cache_spec_kind", a.spec_kind.is_some()),
            ("kv_cache_spec_sliding_window", a.sliding_window.is_some()),
            ("locality", a.locality.is_some()),
            ("ownership", a.ownership.is_some()),
        ]);
        Suffix { fields: p.fields, before: p.bytes, fault, ..Suffix::default() }
    }

    fn removed(&self, a: &Attrs) -> Suffix {
        let mut p = Pairs::default();
        p.opt_str("medium", a.medium.as_deref());
        let fault = first_set(&[
            ("group_idx", a.group_idx.is_some()),
            ("locality", a.locality.is_some()),
            ("ownership", a.ownership.is_some()),
        ]);
        Suffix { fields: p.fields, before: p.bytes, fault, ..Suffix::default() }
    }

    fn has_extra_keys(&self) -> bool {
        false
    }

    fn lookahead(&self) -> Option<&'static [u8]> {
        None
    }
}
