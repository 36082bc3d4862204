//! Where the fields of one event stand, whatever its shape.
//!
//! | shape | told by | names |
//! |---|---|---|
//! | map | a map with `type` | vLLM's and `SGLang`'s keys, in any order |
//! | Mooncake map | the same, or `event_type` | `seq_hashes` before `block_hashes`, `parent_hash` |
//! | array | an array that starts with a tag | by position; `SGLang`'s salt is a map at index 7 |

use std::borrow::Cow;

use crate::events::EventKind;
use crate::msgpack;

use super::reader;

/// Why an event cannot be used.
#[derive(Debug)]
pub struct Fault {
    /// One of [`crate::events::REASONS`].
    pub reason: &'static str,
    /// The field, by its name on the wire.
    pub field: Cow<'static, str>,
    /// What was expected.
    pub what: Cow<'static, str>,
    /// Where the value stands.
    pub at: usize,
}

impl Fault {
    /// Constant words are not copied: most faults of a payload that is full of them are only counted.
    pub fn new(
        reason: &'static str,
        field: impl Into<Cow<'static, str>>,
        what: impl Into<Cow<'static, str>>,
        at: usize,
    ) -> Self {
        Self { reason, field: field.into(), what: what.into(), at }
    }

    pub fn bad(field: impl Into<Cow<'static, str>>, what: impl Into<Cow<'static, str>>, at: usize) -> Self {
        Self::new("bad_field", field, what, at)
    }
}

/// Positions of an event's values; `None` where a field is absent or nil.
#[derive(Debug, Default)]
pub struct Fields {
    pub kind: Option<EventKind>,
    pub hashes: Option<usize>,
    /// The name under which the hashes stand.
    pub hashes_name: &'static str,
    pub parent: Option<usize>,
    pub tokens: Option<usize>,
    pub block_size: Option<usize>,
    pub lora_id: Option<usize>,
    pub medium: Option<usize>,
    pub lora_name: Option<usize>,
    pub extra_keys: Option<usize>,
    pub group_idx: Option<usize>,
    pub spec_kind: Option<usize>,
    pub window: Option<usize>,
    pub locality: Option<usize>,
    pub ownership: Option<usize>,
    pub session_id: Option<usize>,
    pub lookahead: Option<usize>,
    pub cache_salt: Option<usize>,
    pub metadata: Option<usize>,
    /// Fields that are not known: a msgpack map, or empty.
    pub other: Vec<u8>,
    /// Where the event itself stands.
    pub start: usize,
}

impl Fields {
    /// Takes what is nil as absent.
    pub fn drop_nils(&mut self, buf: &[u8]) {
        for slot in [
            &mut self.block_size,
            &mut self.lora_id,
            &mut self.medium,
            &mut self.lora_name,
            &mut self.group_idx,
            &mut self.spec_kind,
            &mut self.window,
            &mut self.locality,
            &mut self.ownership,
            &mut self.session_id,
            &mut self.cache_salt,
        ] {
            *slot = slot.filter(|&at| !is_nil(buf, at));
        }
    }
}

/// The keys of a map event; also the names that `other_fields` cannot have.
pub const STORED_KEYS: [&str; 18] = [
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
    "lookahead_token_ids",
    "cache_salt",
    "metadata",
];

/// The same for a removal.
pub const REMOVED_KEYS: [&str; 7] =
    ["type", "block_hashes", "medium", "group_idx", "locality", "ownership", "metadata"];

/// The same for a clear.
pub const CLEARED_KEYS: [&str; 2] = ["type", "metadata"];

/// The keys that an event of this kind has a place for.
pub const fn known_keys(kind: EventKind) -> &'static [&'static str] {
    match kind {
        EventKind::Stored => &STORED_KEYS,
        EventKind::Removed => &REMOVED_KEYS,
        EventKind::Cleared => &CLEARED_KEYS,
    }
}

/// Unknown fields, gathered into one msgpack map.
#[derive(Default)]
struct Others {
    count: usize,
    body: Vec<u8>,
}

impl Others {
    fn add(&mut self, key: &[u8], value: &[u8]) {
        self.count += 1;
        self.body.extend_from_slice(key);
        self.body.extend_from_slice(value);
    }

    fn finish(self) -> Vec<u8> {
        let mut map = Vec::new();
        if self.count > 0 {
            map.reserve(self.body.len() + 5);
            msgpack::write_map_header(&mut map, self.count);
            map.extend_from_slice(&self.body);
        }
        map
    }
}

/// The fields of the event at `at`. `buf` ends where the event ends.
pub fn fields(buf: &[u8], at: usize) -> Result<Fields, Fault> {
    if let Some((n, first)) = reader::map_header(buf, at) {
        return map(buf, at, n, first);
    }
    if let Some((n, first)) = msgpack::array_header(buf, at) {
        return array(buf, at, n, first);
    }
    Err(Fault::new("not_an_event", "event", "a map or an array was expected", at))
}

fn cut(at: usize) -> Fault {
    Fault::new("truncated", "event", "the event is cut short", at)
}

fn is_nil(buf: &[u8], at: usize) -> bool {
    buf.get(at) == Some(&0xc0)
}

fn kind_of_tag(buf: &[u8], at: usize) -> Result<EventKind, Fault> {
    match reader::raw_str(buf, at) {
        Some((b"BlockStored", _)) => Ok(EventKind::Stored),
        Some((b"BlockRemoved", _)) => Ok(EventKind::Removed),
        Some((b"AllBlocksCleared", _)) => Ok(EventKind::Cleared),
        Some(_) => Err(Fault::new(
            "unknown_tag",
            "type",
            "BlockStored, BlockRemoved or AllBlocksCleared was expected",
            at,
        )),
        None => Err(Fault::bad("type", "a str was expected", at)),
    }
}

fn checked(buf: &[u8], at: usize, field: &str) -> Result<usize, Fault> {
    reader::check(buf, at).map_err(|bad| value_fault(bad, at, field))
}

/// The fault of a value that cannot be kept.
pub fn value_fault(bad: reader::Bad, at: usize, field: &str) -> Fault {
    let field = field.to_owned();
    match bad {
        reader::Bad::Truncated => cut(at),
        reader::Bad::TooDeep => {
            Fault::new("too_deep", field, format!("at most {} levels are read", msgpack::MAX_DEPTH), at)
        }
        reader::Bad::Invalid(inner) => Fault::bad(field, "text in UTF-8 and plain keys were expected", inner),
    }
}

/// More fields than any event has; a bound on what is kept while one is read.
const MAX_FIELDS: usize = 256;

fn map(buf: &[u8], start: usize, n: usize, mut at: usize) -> Result<Fields, Fault> {
    if n > MAX_FIELDS {
        return Err(Fault::bad("event", format!("at most {MAX_FIELDS} fields were expected"), start));
    }
    // Keys and values first: the tag may stand anywhere.
    let mut entries: Vec<(&[u8], usize, usize, usize)> = Vec::with_capacity(n.min(24));
    let (mut tag, mut event_type) = (None, None);
    for _ in 0..n {
        let (key, value) = reader::raw_str(buf, at)
            .ok_or_else(|| Fault::bad("key", "a str was expected as the name of a field", at))?;
        let end = reader::skip(buf, value).ok_or_else(|| cut(value))?;
        match key {
            b"type" => tag = Some(value),
            b"event_type" => event_type = Some(value),
            _ => {}
        }
        entries.push((key, at, value, end));
        at = end;
    }
    let kind = match (tag, event_type.and_then(|at| reader::raw_str(buf, at))) {
        (Some(at), _) => kind_of_tag(buf, at)?,
        (None, Some((b"stored", _))) => EventKind::Stored,
        (None, Some((b"removed", _))) => EventKind::Removed,
        (None, Some((b"cleared", _))) => EventKind::Cleared,
        (None, _) => {
            return Err(Fault::new("missing_field", "type", "a map with a tag was expected", start));
        }
    };
    let mut f = Fields { kind: Some(kind), start, hashes_name: "block_hashes", ..Fields::default() };
    let (mut seq_hashes, mut parent_hash) = (None, None);
    let mut others = Others::default();
    for (key, key_at, at, end) in entries {
        let value = (!is_nil(buf, at)).then_some(at);
        let blocks = kind != EventKind::Cleared;
        let stored = kind == EventKind::Stored;
        match key {
            b"type" => {}
            b"metadata" => f.metadata = value,
            b"block_hashes" if blocks => f.hashes = value,
            b"seq_hashes" if blocks => seq_hashes = value,
            b"medium" if blocks => f.medium = value,
            b"group_idx" if blocks => f.group_idx = value,
            b"locality" if blocks => f.locality = value,
            b"ownership" if blocks => f.ownership = value,
            b"parent_block_hash" if stored => f.parent = value,
            b"token_ids" if stored => f.tokens = value,
            b"block_size" if stored => f.block_size = value,
            b"lora_id" if stored => f.lora_id = value,
            b"lora_name" if stored => f.lora_name = value,
            b"extra_keys" if stored => f.extra_keys = value,
            b"kv_cache_spec_kind" if stored => f.spec_kind = value,
            b"kv_cache_spec_sliding_window" if stored => f.window = value,
            b"session_id" if stored => f.session_id = value,
            b"lookahead_token_ids" if stored => f.lookahead = value,
            b"cache_salt" if stored => f.cache_salt = value,
            _ => {
                if stored && key == b"parent_hash" {
                    parent_hash = value;
                }
                let name = String::from_utf8_lossy(key);
                checked(buf, key_at, &name)?;
                checked(buf, at, &name)?;
                others.add(&buf[key_at..at], &buf[at..end]);
            }
        }
    }
    if seq_hashes.is_some() {
        // The same blocks under RFC 1527's name: unsigned, where the alias is signed.
        f.hashes = seq_hashes;
        f.hashes_name = "seq_hashes";
    }
    f.parent = f.parent.or(parent_hash);
    f.other = others.finish();
    Ok(f)
}

fn array(buf: &[u8], start: usize, n: usize, mut at: usize) -> Result<Fields, Fault> {
    if n == 0 {
        return Err(Fault::new("not_an_event", "event", "an array with a tag was expected", start));
    }
    let kind = kind_of_tag(buf, at)?;
    let mut f = Fields { kind: Some(kind), start, hashes_name: "block_hashes", ..Fields::default() };
    if kind == EventKind::Stored && n < 5 {
        return Err(Fault::new("missing_field", "block_size", "at least four fields were expected", start));
    }
    let mut others = Others::default();
    for i in 0..n {
        let end = reader::skip(buf, at).ok_or_else(|| cut(at))?;
        let value = (!is_nil(buf, at)).then_some(at);
        match (kind, i) {
            (_, 0) => {}
            (EventKind::Stored | EventKind::Removed, 1) => f.hashes = value,
            (EventKind::Stored, 2) => f.parent = value,
            (EventKind::Stored, 3) => f.tokens = value,
            (EventKind::Stored, 4) => f.block_size = value,
            (EventKind::Stored, 5) => f.lora_id = value,
            (EventKind::Stored, 6) | (EventKind::Removed, 2) => f.medium = value,
            (EventKind::Stored, 7) => match reader::map_header(buf, at) {
                Some((entries, first)) => salt_map(buf, entries, first, &mut f, &mut others)?,
                None => f.lora_name = value,
            },
            (EventKind::Stored, 8) => f.extra_keys = value,
            (EventKind::Stored, 9) | (EventKind::Removed, 3) => f.group_idx = value,
            (EventKind::Stored, 10) => f.spec_kind = value,
            (EventKind::Stored, 11) => f.window = value,
            (EventKind::Stored, 12) | (EventKind::Removed, 4) => f.locality = value,
            (EventKind::Stored, 13) | (EventKind::Removed, 5) => f.ownership = value,
            (EventKind::Stored, 14) => f.session_id = value,
            (EventKind::Stored, 15) => f.lookahead = value,
            // Positions that no engine has yet: kept under their number.
            _ if value.is_some() => {
                let name = i.to_string();
                checked(buf, at, &name)?;
                let mut key = Vec::new();
                msgpack::write_str(&mut key, &name);
                others.add(&key, &buf[at..end]);
            }
            _ => {}
        }
        at = end;
    }
    f.other = others.finish();
    Ok(f)
}

/// `SGLang`'s map at index 7: the salt, and what else it may hold.
fn salt_map(buf: &[u8], n: usize, mut at: usize, f: &mut Fields, others: &mut Others) -> Result<(), Fault> {
    for _ in 0..n {
        let (key, value) = reader::raw_str(buf, at)
            .ok_or_else(|| Fault::bad("metadata", "a str was expected as a key", at))?;
        let end = reader::skip(buf, value).ok_or_else(|| cut(value))?;
        if key == b"cache_salt" {
            f.cache_salt = (!is_nil(buf, value)).then_some(value);
        } else {
            checked(buf, at, "metadata")?;
            checked(buf, value, "metadata")?;
            others.add(&buf[at..value], &buf[value..end]);
        }
        at = end;
    }
    Ok(())
}
