//! Bytes as batches of events over few hashes, scopes and forms, so that operations meet one another.

use std::sync::Arc;

use kvevents_core::events::{
    Attrs, CommonParts, EventData, EventList, EventView, ExtraKeys, Hashes, Scope, StoredParts, Tokens,
};
use kvevents_core::hash::{BlockHash, HashRef};

use super::input::Input;

/// Up to four events.
pub fn batch(input: &mut Input<'_>) -> EventList {
    let mut data = EventData::new();
    for _ in 0..input.below(5) {
        match input.below(16) {
            0 => data.push_cleared(&CommonParts::default()).expect("small"),
            1..=5 => removal(input, &mut data),
            _ => store(input, &mut data),
        }
    }
    data.into()
}

fn attrs(input: &mut Input<'_>) -> Attrs {
    let scope = input.byte();
    let rare = input.byte();
    Attrs {
        medium: [None, Some("GPU"), Some("CPU"), Some("cxl")][usize::from(scope & 3)].map(Into::into),
        group_idx: [None, Some(0), Some(1), Some(-1)][usize::from(scope >> 2 & 3)],
        locality: (rare & 0x0f == 1).then(|| "REMOTE".into()),
        ownership: (rare & 0x0f == 1).then(|| "store".into()),
        // Many of them, so that those that nobody has any more are swept.
        session_id: (rare & 0x0f == 2).then(|| format!("s{}", input.byte()).into()),
        lora_name: (rare & 0x0f == 3).then(|| "lora".into()),
        lora_id: (rare & 0x0f == 4).then_some(7),
        ..Attrs::default()
    }
}

/// A run of hashes in one of the forms, in the order in which a chain has them.
fn hashes(input: &mut Input<'_>) -> Vec<BlockHash> {
    let (form, from, n) = (input.below(8), i64::from(input.byte() % 32), 1 + i64::from(input.byte() % 4));
    let one = |i: i64| match form {
        0..=2 => BlockHash::Uint(i.cast_unsigned()),
        3 => BlockHash::Uint(i.cast_unsigned() | 1 << 63),
        4 => BlockHash::Int(8 - i),
        5 => BlockHash::Bytes([i as u8; 32].into()),
        6 => BlockHash::Bytes([i as u8, 1, 2].into()),
        _ if i % 4 == 0 => BlockHash::Bytes([].into()),
        _ if i % 4 == 1 => BlockHash::Uint(u64::MAX),
        _ if i % 4 == 2 => BlockHash::Int(-1),
        _ => BlockHash::Bytes([i as u8; 64].into()),
    };
    (from..from + n).map(one).collect()
}

fn removal(input: &mut Input<'_>, data: &mut EventData) {
    let attrs = Attrs { session_id: None, lora_name: None, lora_id: None, ..attrs(input) };
    let id = data.intern(&attrs);
    let owned = hashes(input);
    let refs: Vec<HashRef<'_>> = owned.iter().map(|h| h.as_ref()).collect();
    data.push_removed(id, Hashes::Mixed(&refs), &CommonParts::default()).expect("small");
}

fn store(input: &mut Input<'_>, data: &mut EventData) {
    let size = input.pick(&[2, 2, 1, 3, 0]);
    let id = data.intern(&Attrs { block_size: size, ..attrs(input) });
    let owned = hashes(input);
    let refs: Vec<HashRef<'_>> = owned.iter().map(|h| h.as_ref()).collect();
    let before = match refs[0] {
        HashRef::Uint(v) => BlockHash::Uint(v.wrapping_sub(1)),
        HashRef::Int(v) => BlockHash::Int(v.wrapping_add(1)),
        HashRef::Bytes(b) => BlockHash::Bytes(b.iter().map(|&x| x.wrapping_sub(1)).collect()),
    };
    let parent = match input.below(8) {
        0 | 1 => None,
        2 => Some(HashRef::Int(-1)),
        3 => Some(HashRef::Bytes(&[9; 3])),
        4 => Some(refs[0]),
        _ => Some(before.as_ref()),
    };
    let shape = input.byte();
    let count = if shape & 7 == 7 && size > 0 { 1 } else { refs.len() * size as usize };
    let plain: Vec<u32> = (0..count as u32).map(|i| u32::from(shape) + i * 1000).collect();
    let mut wide = vec![0x90 | (count % 16) as u8];
    (0..count % 16).for_each(|i| wide.extend([0x92, i as u8, shape & 0x7f]));
    let mut raw = vec![0x90 | refs.len() as u8];
    for i in 0..refs.len() {
        raw.extend(if i % 2 == 0 { &[0x92, 0xa1, b'a', 9][..] } else { &[0xc0] });
    }
    let parts = StoredParts {
        hashes: Hashes::Mixed(&refs),
        parent,
        tokens: if shape >> 3 & 7 == 7 && size > 0 { Tokens::Wide(&wide) } else { Tokens::Plain(&plain) },
        extra_keys: match shape >> 6 {
            0 | 1 => ExtraKeys::Absent,
            2 => ExtraKeys::AllNil,
            _ => ExtraKeys::Raw(&raw),
        },
        lookahead: None,
        common: CommonParts::default(),
    };
    data.push_stored(id, &parts).expect("small");
}

/// A resident key: the bits of an integer, the bytes of another hash, and the scope.
pub type Key = (Option<u64>, Vec<u8>, Name, Option<i64>, Name, Name);
type Name = Option<Arc<str>>;

/// The key of a hash in the scope of these attributes.
pub fn key(hash: HashRef<'_>, attrs: &Attrs) -> Key {
    let Scope { medium, group_idx, locality, ownership } = attrs.scope();
    let bytes = if let HashRef::Bytes(b) = hash { b.to_vec() } else { Vec::new() };
    (hash.bits(), bytes, medium, group_idx, locality, ownership)
}

/// What a store says of one of its blocks, beside the key.
#[derive(Clone, Debug, PartialEq)]
pub struct Content {
    pub attrs: Attrs,
    /// The rest, where the store is regular.
    pub chain: Option<Chain>,
}

/// The part that only a regular store says.
#[derive(Clone, Debug, PartialEq)]
pub struct Chain {
    /// Whether it has a minus sign, and what it is.
    pub parent: Option<(bool, BlockHash)>,
    pub tokens: Vec<u32>,
    pub wide: Vec<u8>,
    pub extra: Option<Vec<u8>>,
}

/// What a store of [`batch`], or of a snapshot of such stores, says of its blocks.
pub fn contents(v: &EventView<'_>) -> Vec<(Key, Content)> {
    let attrs = v.attrs();
    let size = attrs.block_size as usize;
    let regular = !v.is_irregular();
    let mut values = v.tokens().raw().map(values).unwrap_or_default().into_iter();
    let mut extra = match v.extra_keys() {
        ExtraKeys::Raw(raw) => values_or_none(raw),
        ExtraKeys::AllNil => vec![Some(vec![0xc0]); v.num_hashes()],
        ExtraKeys::Absent => vec![None; v.num_hashes()],
    }
    .into_iter();
    let one = |(i, hash): (usize, HashRef<'_>)| {
        let chain = regular.then(|| Chain {
            parent: v.parent_of(i).map(|p| p.to_owned()).map(|p| (p.as_ref().is_negative(), p)),
            tokens: match v.tokens() {
                Tokens::Plain(t) => t[i * size..(i + 1) * size].to_vec(),
                Tokens::Wide(_) => Vec::new(),
            },
            wide: values.by_ref().take(size).flatten().collect(),
            extra: extra.next().flatten(),
        });
        (key(hash, attrs), Content { attrs: attrs.clone(), chain })
    };
    v.hashes().enumerate().map(one).collect()
}

fn values_or_none(raw: &[u8]) -> Vec<Option<Vec<u8>>> {
    values(raw).into_iter().map(Some).collect()
}

/// The values of a msgpack array.
fn values(raw: &[u8]) -> Vec<Vec<u8>> {
    let (n, mut at) = kvevents_core::msgpack::array_header(raw, 0).expect("an array");
    let one = |_| {
        let from = at;
        at = kvevents_core::msgpack::skip_value(raw, at).expect("whole");
        raw[from..at].to_vec()
    };
    (0..n).map(one).collect()
}
