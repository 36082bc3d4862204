//! Some blocks of an event of another list.

use std::ops::Range;

use super::data::{AttrId, CommonParts, EventData, Hashes, StoredParts};
use super::view::{EventView, ExtraKeys, HashForm, Rare, Tokens};
use crate::error::EventsError;
use crate::hash::HashRef;
use crate::msgpack;

/// Elements `range` of a msgpack array, as an array.
fn array_part(raw: &[u8], range: Range<usize>) -> Option<Vec<u8>> {
    let (_, mut at) = msgpack::array_header(raw, 0)?;
    let mut start = at;
    for i in 0..range.end {
        if i == range.start {
            start = at;
        }
        at = msgpack::skip_value(raw, at).ok()?;
    }
    let mut out = Vec::with_capacity(at - start + 5);
    msgpack::write_array_header(&mut out, range.len());
    out.extend_from_slice(&raw[start..at]);
    Some(out)
}

impl EventData {
    /// Adds a copy of some blocks of a store: their hashes, tokens and extra keys, with the block
    /// before as parent. Joins the last event where both say the same. `attrs` are the store's, in
    /// this list. Of an irregular store a part has no tokens, as it is not known whose they are.
    pub fn push_part(
        &mut self,
        attrs: AttrId,
        v: EventView<'_>,
        blocks: Range<usize>,
    ) -> Result<(), EventsError> {
        let (form, width, bytes) = v.raw_hashes();
        let mixed: Vec<HashRef<'_>>;
        let data = || &bytes[blocks.start * width..blocks.end * width];
        let hashes = match form {
            HashForm::Mixed => {
                mixed = v.hashes().skip(blocks.start).take(blocks.len()).collect();
                Hashes::Mixed(&mixed)
            }
            HashForm::Uint => Hashes::IntBytes { signed: false, data: data() },
            HashForm::Int => Hashes::IntBytes { signed: true, data: data() },
            HashForm::Bytes => Hashes::Bytes { width, data: data() },
        };
        let parent = v.parent_of(blocks.start);
        let common = CommonParts { metadata: v.rare(Rare::Metadata), other: v.rare(Rare::Other) };
        let whole = blocks.len() == v.num_hashes();
        let size = v.attrs().block_size as usize;
        let sliced =
            |raw: &[u8], per_block: usize| array_part(raw, blocks.start * per_block..blocks.end * per_block);
        let wide: Option<Vec<u8>>;
        let extra: Option<Vec<u8>>;
        let ahead: Option<Vec<u8>>;
        let mut parts = StoredParts {
            hashes,
            parent,
            tokens: v.tokens(),
            extra_keys: v.extra_keys(),
            lookahead: v.rare(Rare::Lookahead),
            common,
        };
        if !whole && v.is_irregular() {
            parts.tokens = Tokens::Plain(&[]);
            (parts.extra_keys, parts.lookahead) = (ExtraKeys::Absent, None);
        } else if !whole {
            parts.tokens = match v.tokens() {
                Tokens::Plain(t) => Tokens::Plain(&t[blocks.start * size..blocks.end * size]),
                Tokens::Wide(raw) => {
                    wide = sliced(raw, size);
                    wide.as_deref().map_or(Tokens::Plain(&[]), Tokens::Wide)
                }
            };
            if let ExtraKeys::Raw(raw) = v.extra_keys() {
                extra = sliced(raw, 1);
                parts.extra_keys = extra.as_deref().map_or(ExtraKeys::Absent, ExtraKeys::Raw);
            }
            if let Some(raw) = v.rare(Rare::Lookahead) {
                ahead = sliced(raw, 1);
                parts.lookahead = ahead.as_deref();
            }
        }
        if parent.is_some() && self.try_extend_stored(attrs, &parts) {
            return Ok(());
        }
        self.push_stored(attrs, &parts)
    }

    /// Adds a store that says hashes and scope only: no tokens, no parent, block size 0.
    pub fn push_bare(&mut self, attrs: AttrId, hashes: Hashes<'_>) -> Result<(), EventsError> {
        let parts = StoredParts {
            hashes,
            parent: None,
            tokens: Tokens::Plain(&[]),
            extra_keys: ExtraKeys::Absent,
            lookahead: None,
            common: CommonParts::default(),
        };
        self.push_stored(attrs, &parts)
    }
}
