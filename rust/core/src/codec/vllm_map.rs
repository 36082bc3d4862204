//! vLLM from 0.24 on: maps, `type` first.
//!
//! `lora_id`, `medium` and `lora_name` of a store and `medium` of a removal are always written, the rest
//! when it is set. The width of a header follows the number of *declared* fields (msgspec chooses it
//! before it leaves defaults out): 0.33 declares 16 for a store, so its header is three bytes wide
//! however few fields follow.

use crate::events::{Attrs, EventKind};
use crate::msgpack::{write_str, write_uint};

use super::encode::{Family, Suffix};
use super::vllm_array::{first_set, put_int, put_str};
use super::writer::Writer;

/// vLLM's maps.
pub struct VllmMap {
    /// 0.33: the wide header of a store, and `lookahead_token_ids`.
    pub v033: bool,
}

/// Collects named values.
#[derive(Default)]
pub struct Pairs {
    pub bytes: Vec<u8>,
    pub fields: usize,
}

impl Pairs {
    pub fn name(&mut self, name: &str) -> &mut Vec<u8> {
        self.fields += 1;
        write_str(&mut self.bytes, name);
        &mut self.bytes
    }

    /// A text that is written also when it is not set.
    pub fn str(&mut self, name: &str, value: Option<&str>) {
        put_str(self.name(name), value);
    }

    pub fn opt_str(&mut self, name: &str, value: Option<&str>) {
        if value.is_some() {
            self.str(name, value);
        }
    }

    /// A number that is written also when it is not set.
    pub fn int(&mut self, name: &str, value: Option<i64>) {
        put_int(self.name(name), value);
    }

    pub fn opt_int(&mut self, name: &str, value: Option<i64>) {
        if value.is_some() {
            self.int(name, value);
        }
    }
}

impl Family for VllmMap {
    const STORED: &'static [u8] = b"\xa4type\xabBlockStored\xacblock_hashes";
    const PARENT: &'static [u8] = b"\xb1parent_block_hash";
    const TOKENS: &'static [u8] = b"\xa9token_ids";
    const REMOVED: &'static [u8] = b"\xa4type\xacBlockRemoved\xacblock_hashes";
    const CLEARED: &'static [u8] = b"\xa4type\xb0AllBlocksCleared";
    const EXTRA_KEYS: &'static [u8] = b"\xaaextra_keys";
    const NAMED: bool = true;
    const STORED_FIELDS: usize = 4;

    #[inline]
    fn header(&self, w: &mut Writer<'_>, kind: EventKind, fields: usize) {
        if self.v033 && kind == EventKind::Stored { w.map16(fields) } else { w.map(fields) }
    }

    fn stored(&self, a: &Attrs) -> Suffix {
        let mut before = Pairs::default();
        write_uint(before.name("block_size"), u64::from(a.block_size));
        before.int("lora_id", a.lora_id);
        before.str("medium", a.medium.as_deref());
        before.str("lora_name", a.lora_name.as_deref());
        let mut after = Pairs::default();
        after.opt_int("group_idx", a.group_idx);
        after.opt_str("kv_cache_spec_kind", a.spec_kind.as_deref());
        after.opt_int("kv_cache_spec_sliding_window", a.sliding_window);
        after.opt_str("locality", a.locality.as_deref());
        after.opt_str("ownership", a.ownership.as_deref());
        after.opt_str("session_id", a.session_id.as_deref());
        Suffix {
            fields: before.fields + after.fields,
            before: before.bytes,
            after: after.bytes,
            fault: first_set(&[("cache_salt", a.cache_salt.is_some())]),
        }
    }

    fn removed(&self, a: &Attrs) -> Suffix {
        let mut p = Pairs::default();
        p.str("medium", a.medium.as_deref());
        p.opt_int("group_idx", a.group_idx);
        p.opt_str("locality", a.locality.as_deref());
        p.opt_str("ownership", a.ownership.as_deref());
        Suffix { fields: p.fields, before: p.bytes, ..Suffix::default() }
    }

    fn has_extra_keys(&self) -> bool {
        true
    }

    fn lookahead(&self) -> Option<&'static [u8]> {
        self.v033.then_some(b"\xb3lookahead_token_ids")
    }
}
