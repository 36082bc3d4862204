//! Columns of events: nothing is lost in bytes, slices and copies, and damaged bytes are refused.

use kvevents_core::error::EventsError;
use kvevents_core::events::{
    Attrs, CommonParts, EventData, EventKind, EventList, ExtraKeys, Hashes, Origin, Rare, Skipped,
    StoredParts, Tokens,
};
use kvevents_core::hash::{BlockHash, HashRef};
use proptest::prelude::*;

#[derive(Clone, Debug)]
struct Event {
    kind: u8,
    hashes: Vec<BlockHash>,
    parent: Option<BlockHash>,
    tokens: Vec<u32>,
    wide: bool,
    attrs: Attrs,
    extra: u8,
    metadata: bool,
}

fn hash() -> impl Strategy<Value = BlockHash> {
    let bytes = |n| proptest::collection::vec(any::<u8>(), n).prop_map(|b| BlockHash::Bytes(b.into()));
    prop_oneof![
        any::<u64>().prop_map(BlockHash::Uint),
        any::<i64>().prop_map(BlockHash::Int),
        bytes(0..=64),
        bytes(32..=32),
    ]
}

fn event() -> impl Strategy<Value = Event> {
    let attrs = (0u32..3, proptest::option::of(-2i64..3), proptest::option::of("[a-z]{0,3}")).prop_map(
        |(block_size, group_idx, medium)| Attrs {
            block_size,
            group_idx,
            medium: medium.as_deref().map(Into::into),
            ..Attrs::default()
        },
    );
    let parts = (0u8..3, proptest::collection::vec(hash(), 0..4), proptest::option::of(hash()), attrs);
    (parts, proptest::collection::vec(any::<u32>(), 0..6), any::<bool>(), 0u8..3, any::<bool>()).prop_map(
        |((kind, hashes, parent, attrs), tokens, wide, extra, metadata)| Event {
            kind,
            hashes,
            parent,
            tokens,
            wide,
            attrs,
            extra,
            metadata,
        },
    )
}

fn refs(hashes: &[BlockHash]) -> Vec<HashRef<'_>> {
    hashes.iter().map(BlockHash::as_ref).collect()
}

fn build(events: &[Event]) -> EventList {
    let mut data = EventData::new();
    for e in events {
        let refs = refs(&e.hashes);
        let common = CommonParts { metadata: e.metadata.then_some(&[0x81, 0xa1, b'k', 7]), other: None };
        let id = data.intern(&e.attrs);
        match e.kind {
            0 => {
                let extra_keys = match e.extra {
                    0 => ExtraKeys::Absent,
                    1 => ExtraKeys::AllNil,
                    _ => ExtraKeys::Raw(&[0x91, 0x91, 0xa1, b's']),
                };
                let tokens = if e.attrs.block_size == 0 {
                    Tokens::Plain(&[])
                } else if e.wide {
                    Tokens::Wide(&[0x92, 0x92, 1, 2, 0xff])
                } else {
                    Tokens::Plain(&e.tokens)
                };
                let parts = StoredParts {
                    hashes: Hashes::Mixed(&refs),
                    parent: e.parent.as_ref().map(BlockHash::as_ref),
                    tokens,
                    extra_keys,
                    lookahead: None,
                    common,
                };
                data.push_stored(id, &parts).expect("fits");
            }
            1 => data.push_removed(id, Hashes::Mixed(&refs), &common).expect("fits"),
            _ => data.push_cleared(&common).expect("fits"),
        }
    }
    data.into()
}

proptest! {
    #[test]
    fn every_slice_survives_bytes_and_copies(
        events in proptest::collection::vec(event(), 0..8),
        from in 0usize..9,
        len in 0usize..9,
    ) {
        let list = build(&events).slice(from..from + len);
        let back = EventList::from_bytes(&list.to_bytes()).expect("own bytes");
        prop_assert!(back.same(&list));
        prop_assert_eq!(back.irregular(), list.irregular());
        let joined = list.slice(0..1).concat(&list.slice(1..list.len())).expect("fits");
        prop_assert!(joined.same(&list));
        prop_assert_eq!(joined.irregular(), list.irregular());
    }

    #[test]
    fn hashes_keep_their_form_and_order(hashes in proptest::collection::vec(hash(), 0..6), parent in hash()) {
        let refs = refs(&hashes);
        let mut data = EventData::new();
        let id = data.intern(&Attrs::default());
        let parts = StoredParts {
            hashes: Hashes::Mixed(&refs),
            parent: Some(parent.as_ref()),
            tokens: Tokens::Plain(&[]),
            extra_keys: ExtraKeys::Absent,
            lookahead: None,
            common: CommonParts::default(),
        };
        data.push_stored(id, &parts).expect("fits");
        let v = data.view(0);
        prop_assert_eq!(v.num_hashes(), refs.len());
        prop_assert!(v.hashes().zip(&refs).all(|(a, b)| a.same_form(b)));
        prop_assert!(v.parent().is_some_and(|p| p.same_form(&parent.as_ref())));
        let last_fits = match (v.last_hash(), refs.last()) {
            (Some(a), Some(b)) => a.same_form(b),
            (a, b) => a.is_none() && b.is_none(),
        };
        prop_assert!(last_fits);
    }

    #[test]
    fn damage_is_found(events in proptest::collection::vec(event(), 0..5), at in any::<usize>(), bit in 0u8..8) {
        let mut bytes = build(&events).to_bytes();
        let at = at % bytes.len();
        bytes[at] ^= 1 << bit;
        prop_assert!(EventList::from_bytes(&bytes).is_err(), "bit {bit} of byte {at}");
        prop_assert!(EventList::from_bytes(&bytes[..at]).is_err());
    }

    /// Bytes of somebody who knows the checksum: refused, or a list that can be used safely.
    #[test]
    fn forged_bytes_never_panic(
        events in proptest::collection::vec(event(), 1..5),
        changes in proptest::collection::vec((any::<usize>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = build(&events).to_bytes();
        for (at, value) in changes {
            let at = 16 + at % (bytes.len() - 16);
            bytes[at] = value;
        }
        let seed = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes"));
        let sum = xxhash_rust::xxh3::xxh3_64_with_seed(&bytes[16..], seed);
        bytes[8..16].copy_from_slice(&sum.to_le_bytes());
        if let Ok(list) = EventList::from_bytes(&bytes) {
            let again = EventList::from_bytes(&list.to_bytes()).expect("what was read can be written");
            prop_assert!(again.same(&list));
            for v in list.iter() {
                let blocks = v.hashes().count();
                let tokens = v.tokens();
                if v.kind() == EventKind::Stored && !v.is_irregular() && tokens.raw().is_none() {
                    prop_assert_eq!(tokens.len(), blocks * v.attrs().block_size as usize);
                }
                _ = (v.parent(), v.last_hash(), v.extra_keys(), v.rare(Rare::Metadata));
            }
        }
    }
}

#[test]
fn other_versions_are_refused_by_name() {
    let mut bytes = EventList::default().to_bytes();
    bytes[4] = 9;
    assert!(matches!(EventList::from_bytes(&bytes), Err(EventsError::Version { seen: 9, .. })));
}

#[test]
fn what_is_beside_the_events_survives() {
    let mut data = EventData::new();
    data.push_cleared(&CommonParts::default()).expect("fits");
    data.set_origin(0, Origin { source: Some("cpu".into()), worker: Some(3) });
    data.push_skipped(Skipped { index: 4, reason: "unknown_tag", detail: "saw BlockMoved".to_owned() });
    data.set_overflowed();
    let list = EventList::from(data);
    let back = EventList::from_bytes(&list.to_bytes()).expect("own bytes");
    assert!(back.overflowed());
    assert_eq!(back.skipped(), list.skipped());
    assert_eq!(back.view(0).origin().and_then(|o| o.worker), Some(3));

    // Also where there is no event at all on one side.
    let mut only_skipped = EventData::new();
    only_skipped.push_skipped(Skipped { index: 0, reason: "bad_field", detail: String::new() });
    let only_skipped = EventList::from(only_skipped);
    assert_eq!(back.concat(&only_skipped).expect("fits").skipped().len(), 2);
    assert_eq!(EventList::default().concat(&only_skipped).expect("fits").skipped().len(), 1);
}

fn store<'a>(hashes: &'a [u64], parent: Option<u64>, tokens: &'a [u32]) -> StoredParts<'a> {
    StoredParts {
        hashes: Hashes::Uint(hashes),
        parent: parent.map(HashRef::Uint),
        tokens: Tokens::Plain(tokens),
        extra_keys: ExtraKeys::AllNil,
        lookahead: None,
        common: CommonParts::default(),
    }
}

#[test]
fn only_events_that_chain_and_agree_are_joined() {
    let mut data = EventData::new();
    let id = data.intern(&Attrs { block_size: 2, ..Attrs::default() });
    let other = data.intern(&Attrs { block_size: 2, group_idx: Some(1), ..Attrs::default() });
    assert!(!data.try_extend_stored(id, &store(&[1], None, &[1, 2])), "nothing to extend");
    data.push_stored(id, &store(&[1], None, &[1, 2])).expect("fits");

    assert!(!data.try_extend_stored(id, &store(&[2], None, &[3, 4])), "a new root");
    assert!(!data.try_extend_stored(id, &store(&[2], Some(7), &[3, 4])), "another parent");
    assert!(!data.try_extend_stored(other, &store(&[2], Some(1), &[3, 4])), "another group");
    assert!(!data.try_extend_stored(id, &store(&[2], Some(1), &[3])), "irregular");
    let tagged = StoredParts {
        common: CommonParts { metadata: Some(&[0x80]), other: None },
        ..store(&[2], Some(1), &[3, 4])
    };
    assert!(!data.try_extend_stored(id, &tagged), "other metadata");
    assert_eq!(data.len(), 1);
    assert!(data.try_extend_stored(id, &store(&[2, 3], Some(1), &[3, 4, 5, 6])));

    let mut whole = EventData::new();
    let id = whole.intern(&Attrs { block_size: 2, ..Attrs::default() });
    whole.push_stored(id, &store(&[1, 2, 3], None, &[1, 2, 3, 4, 5, 6])).expect("fits");
    assert!(EventList::from(data).same(&whole.into()));
}

#[test]
fn removals_of_one_scope_are_joined() {
    let mut data = EventData::new();
    let gpu = data.intern(&Attrs { medium: Some("GPU".into()), ..Attrs::default() });
    let cpu = data.intern(&Attrs { medium: Some("CPU".into()), ..Attrs::default() });
    data.push_removed(gpu, Hashes::Uint(&[1]), &CommonParts::default()).expect("fits");
    assert!(data.try_extend_removed(gpu, Hashes::Uint(&[2, 3])));
    assert!(!data.try_extend_removed(cpu, Hashes::Uint(&[4])));
    assert!(!data.try_extend_removed(gpu, Hashes::Bytes { width: 2, data: &[4, 4] }));
    let list = EventList::from(data);
    assert_eq!(list.view(0).num_hashes(), 3);
}

#[test]
fn token_ids_without_a_block_size_are_refused_before_anything_changes() {
    let mut data = EventData::new();
    let id = data.intern(&Attrs::default());
    let wide = StoredParts { tokens: Tokens::Wide(&[0x91, 0x90]), ..store(&[1], None, &[]) };
    for parts in [store(&[1], Some(2), &[3]), wide] {
        let refused = data.push_stored(id, &parts);
        assert!(matches!(refused, Err(EventsError::Field { field: "block_size", .. })), "{refused:?}");
    }
    assert_eq!((data.len(), data.num_hash_bytes()), (0, 0));
    data.push_stored(id, &store(&[1], Some(2), &[])).expect("a tier that names hashes only");
}
