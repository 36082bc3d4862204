//! One event's values into the columns, each checked.

use std::borrow::Cow;
use std::sync::Arc;

use crate::error::EventsError;
use crate::events::{Attrs, CommonParts, EventData, EventKind, ExtraKeys, Hashes, StoredParts, Tokens};
use crate::hash::{HashRef, MAX_HASH_BYTES};
use crate::msgpack;

use super::reader;
use super::shape::{Fault, Fields, value_fault};
use super::tokens;

/// More hashes than any event has; a bound on what is kept while one is read.
const MAX_HASHES: usize = 1 << 22;

/// What can go wrong while an event is added: the event's fault, or the columns are full.
pub enum PushError {
    /// The event cannot be used.
    Fault(Fault),
    /// The columns cannot hold it.
    Columns(EventsError),
}

impl From<Fault> for PushError {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl From<EventsError> for PushError {
    fn from(e: EventsError) -> Self {
        Self::Columns(e)
    }
}

/// Adds the event whose fields are `f`; nothing is added on an error.
pub fn push(buf: &[u8], f: &Fields, out: &mut EventData) -> Result<(), PushError> {
    let metadata = raw(buf, f.metadata, "metadata", &|at| reader::map_header(buf, at).is_some(), "a map")?;
    let common = CommonParts { metadata, other: (!f.other.is_empty()).then_some(&f.other) };
    match f.kind {
        None | Some(EventKind::Cleared) => Ok(out.push_cleared(&common)?),
        Some(EventKind::Removed) => {
            let hashes = hashes(buf, f)?;
            let id = out.intern(&attrs(buf, f)?);
            Ok(out.push_removed(id, Hashes::Mixed(&hashes), &common)?)
        }
        Some(EventKind::Stored) => stored(buf, f, common, out),
    }
}

/// The attributes of a store or a removal.
pub fn attrs(buf: &[u8], f: &Fields) -> Result<Attrs, Fault> {
    if f.kind == Some(EventKind::Stored) { stored_attrs(buf, f) } else { scope(buf, f) }
}

fn stored(buf: &[u8], f: &Fields, common: CommonParts<'_>, out: &mut EventData) -> Result<(), PushError> {
    let hashes = hashes(buf, f)?;
    let parent = f.parent.map(|at| hash(buf, at, "parent_block_hash")).transpose()?.map(|(h, _)| h);
    let attrs = attrs(buf, f)?;
    let is_array = |at| msgpack::array_header(buf, at).is_some();
    let extra = raw(buf, f.extra_keys, "extra_keys", &is_array, "an array")?;
    let extra_keys = extra.map_or(ExtraKeys::Absent, |raw| match msgpack::array_header(raw, 0) {
        Some((n, at)) if n == hashes.len() && raw[at..].iter().all(|&b| b == 0xc0) => ExtraKeys::AllNil,
        _ => ExtraKeys::Raw(raw),
    });
    let lookahead = raw(buf, f.lookahead, "lookahead_token_ids", &is_array, "an array")?;
    let mut plain = Vec::new();
    let tokens = match f.tokens {
        None => Tokens::Plain(&[]),
        Some(at) => token_ids(buf, at, &mut plain)?,
    };
    let count = tokens.raw().map_or(tokens.len(), |raw| msgpack::array_header(raw, 0).map_or(0, |(n, _)| n));
    if attrs.block_size == 0 && count > 0 {
        let at = f.block_size.unwrap_or(f.start);
        return Err(Fault::bad("block_size", format!("a size was expected for {count} token ids"), at).into());
    }
    let id = out.intern(&attrs);
    let parts = StoredParts { hashes: Hashes::Mixed(&hashes), parent, tokens, extra_keys, lookahead, common };
    Ok(out.push_stored(id, &parts)?)
}

/// A value that is kept as it stands.
fn raw<'a>(
    buf: &'a [u8],
    at: Option<usize>,
    field: &'static str,
    fits: &dyn Fn(usize) -> bool,
    what: &str,
) -> Result<Option<&'a [u8]>, Fault> {
    let Some(at) = at else { return Ok(None) };
    if !fits(at) {
        return Err(Fault::bad(field, format!("{what} was expected"), at));
    }
    let end = reader::check(buf, at).map_err(|bad| value_fault(bad, at, field))?;
    Ok(Some(&buf[at..end]))
}

fn hash(buf: &[u8], at: usize, field: impl Into<Cow<'static, str>>) -> Result<(HashRef<'_>, usize), Fault> {
    reader::hash(buf, at).ok_or_else(|| {
        Fault::bad(field, format!("a hash of 64 bits or at most {MAX_HASH_BYTES} bytes was expected"), at)
    })
}

fn hashes<'a>(buf: &'a [u8], f: &Fields) -> Result<Vec<HashRef<'a>>, Fault> {
    let name = f.hashes_name;
    let at = f
        .hashes
        .ok_or_else(|| Fault::new("missing_field", name, "an array of hashes was expected", f.start))?;
    let (n, mut at) = msgpack::array_header(buf, at)
        .ok_or_else(|| Fault::bad(name, "an array of hashes was expected", at))?;
    if n > MAX_HASHES {
        return Err(Fault::bad(name, format!("at most {MAX_HASHES} hashes were expected"), at));
    }
    // `buf` ends with the event, which was walked to its end: `n` items are really there.
    let mut out = Vec::with_capacity(n.min(buf.len() - at));
    for i in 0..n {
        let (h, next) = reader::hash(buf, at).map_or_else(|| hash(buf, at, format!("{name}[{i}]")), Ok)?;
        out.push(h);
        at = next;
    }
    Ok(out)
}

/// Plain ids into `plain`, or the array as it stands.
fn token_ids<'a>(buf: &'a [u8], at: usize, plain: &'a mut Vec<u32>) -> Result<Tokens<'a>, Fault> {
    let (n, first) = msgpack::array_header(buf, at)
        .ok_or_else(|| Fault::bad("token_ids", "an array of token ids was expected", at))?;
    plain.resize(n.min(buf.len() - first), 0);
    if tokens::read(buf, first, plain).is_ok() {
        return Ok(Tokens::Plain(plain));
    }
    let mut next = first;
    for i in 0..n {
        let item = next;
        next = token(buf, item).ok_or_else(|| {
            let what = "an integer, a pair of integers or a str was expected";
            Fault::bad(format!("token_ids[{i}]"), what, item)
        })?;
    }
    Ok(Tokens::Wide(&buf[at..next]))
}

/// The position after one token id of any legal kind.
fn token(buf: &[u8], at: usize) -> Option<usize> {
    if let Some((_, end)) = reader::int(buf, at) {
        return Some(end);
    }
    if let Some((_, end)) = reader::str(buf, at) {
        return Some(end);
    }
    let (n, mut at) = msgpack::array_header(buf, at)?;
    for _ in 0..n {
        at = reader::int(buf, at)?.1;
    }
    Some(at)
}

fn opt_int(buf: &[u8], at: Option<usize>, field: &'static str) -> Result<Option<i64>, Fault> {
    let Some(at) = at else { return Ok(None) };
    match reader::int(buf, at).and_then(|(v, _)| v.signed()) {
        Some(v) => Ok(Some(v)),
        None => Err(Fault::bad(field, "an integer of 64 bits or nil was expected", at)),
    }
}

fn opt_str(buf: &[u8], at: Option<usize>, field: &'static str) -> Result<Option<Arc<str>>, Fault> {
    let Some(at) = at else { return Ok(None) };
    match reader::str(buf, at) {
        Some((s, _)) => Ok(Some(Arc::from(s))),
        None => Err(Fault::bad(field, "a str or nil was expected", at)),
    }
}

fn scope(buf: &[u8], f: &Fields) -> Result<Attrs, Fault> {
    Ok(Attrs {
        medium: opt_str(buf, f.medium, "medium")?,
        group_idx: opt_int(buf, f.group_idx, "group_idx")?,
        locality: opt_str(buf, f.locality, "locality")?,
        ownership: opt_str(buf, f.ownership, "ownership")?,
        ..Attrs::default()
    })
}

fn stored_attrs(buf: &[u8], f: &Fields) -> Result<Attrs, Fault> {
    let block_size = match f.block_size {
        None => 0,
        Some(at) => reader::int(buf, at)
            .and_then(|(v, _)| v.u32())
            .ok_or_else(|| Fault::bad("block_size", "0 to 2^32-1 or nil was expected", at))?,
    };
    Ok(Attrs {
        block_size,
        lora_id: opt_int(buf, f.lora_id, "lora_id")?,
        lora_name: opt_str(buf, f.lora_name, "lora_name")?,
        spec_kind: opt_str(buf, f.spec_kind, "kv_cache_spec_kind")?,
        sliding_window: opt_int(buf, f.window, "kv_cache_spec_sliding_window")?,
        session_id: opt_str(buf, f.session_id, "session_id")?,
        cache_salt: opt_str(buf, f.cache_salt, "cache_salt")?,
        ..scope(buf, f)?
    })
}
