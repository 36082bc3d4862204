//! vLLM up to 0.23, and `SGLang` before it wrote maps: arrays, by position.
//!
//! A dialect is named by the number of fields of its stores. All of them are written, nil where unset.

use crate::events::{Attrs, EventKind};
use crate::msgpack::{write_int, write_nil, write_str, write_uint};

use super::encode::{Family, NO_PLACE, NoPlace, Suffix};
use super::writer::Writer;

/// vLLM's arrays.
pub struct VllmArray {
    /// Fields of a store, 5 to 11.
    pub fields: u8,
}

pub fn put_str(out: &mut Vec<u8>, value: Option<&str>) {
    match value {
        Some(s) => write_str(out, s),
        None => write_nil(out),
    }
}

pub fn put_int(out: &mut Vec<u8>, value: Option<i64>) {
    match value {
        Some(v) => write_int(out, v),
        None => write_nil(out),
    }
}

/// The first of these that is set.
pub fn first_set(fields: &[(&'static str, bool)]) -> Option<NoPlace> {
    fields.iter().find(|(_, set)| *set).map(|&(field, _)| NoPlace { field, reason: NO_PLACE })
}

impl VllmArray {
    /// Fields of a removal: it grew with the stores.
    fn removed_fields(&self) -> u8 {
        match self.fields {
            ..6 => 1,
            6..9 => 2,
            _ => 3,
        }
    }
}

impl Family for VllmArray {
    const STORED: &'static [u8] = b"\xabBlockStored";
    const PARENT: &'static [u8] = b"";
    const TOKENS: &'static [u8] = b"";
    const REMOVED: &'static [u8] = b"\xacBlockRemoved";
    const CLEARED: &'static [u8] = b"\xb0AllBlocksCleared";
    const EXTRA_KEYS: &'static [u8] = b"";
    const NAMED: bool = false;
    const STORED_FIELDS: usize = 4;

    #[inline]
    fn header(&self, w: &mut Writer<'_>, kind: EventKind, _fields: usize) {
        let fields = match kind {
            EventKind::Stored => self.fields,
            EventKind::Removed => self.removed_fields(),
            EventKind::Cleared => 0,
        };
        w.array(1 + usize::from(fields));
    }

    fn stored(&self, a: &Attrs) -> Suffix {
        let n = self.fields;
        let mut s = Suffix::default();
        write_uint(&mut s.before, u64::from(a.block_size));
        put_int(&mut s.before, a.lora_id);
        if n >= 6 {
            put_str(&mut s.before, a.medium.as_deref());
        }
        if n >= 7 {
            put_str(&mut s.before, a.lora_name.as_deref());
        }
        if n >= 9 {
            put_int(&mut s.after, a.group_idx);
        }
        if n >= 10 {
            put_str(&mut s.after, a.spec_kind.as_deref());
        }
        if n >= 11 {
            put_int(&mut s.after, a.sliding_window);
        }
        s.fault = first_set(&[
            ("medium", n < 6 && a.medium.is_some()),
            ("lora_name", n < 7 && a.lora_name.is_some()),
            ("group_idx", n < 9 && a.group_idx.is_some()),
            ("kv_cache_spec_kind", n < 10 && a.spec_kind.is_some()),
            ("kv_cache_spec_sliding_window", n < 11 && a.sliding_window.is_some()),
            ("locality", a.locality.is_some()),
            ("ownership", a.ownership.is_some()),
            ("session_id", a.session_id.is_some()),
            ("cache_salt", a.cache_salt.is_some()),
        ]);
        s
    }

    fn removed(&self, a: &Attrs) -> Suffix {
        let n = self.removed_fields();
        let mut s = Suffix::default();
        if n >= 2 {
            put_str(&mut s.before, a.medium.as_deref());
        }
        if n >= 3 {
            put_int(&mut s.before, a.group_idx);
        }
        s.fault = first_set(&[
            ("medium", n < 2 && a.medium.is_some()),
            ("group_idx", n < 3 && a.group_idx.is_some()),
            ("locality", a.locality.is_some()),
            ("ownership", a.ownership.is_some()),
        ]);
        s
    }

    fn has_extra_keys(&self) -> bool {
        self.fields >= 8
    }

    fn lookahead(&self) -> Option<&'static [u8]> {
        None
    }
}
