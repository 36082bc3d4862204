//! Any bytes as a pickled `EventList`, as they are and with a checksum that fits.

use kvevents_core::codec::{Dialect, EncodeOptions, Timestamp, decode, encode};
use kvevents_core::error::EventsError;
use kvevents_core::events::{EventKind, EventList, Origin, Rare};
use kvevents_core::index::{Bounds, PrefixIndex, Seq};
use kvevents_core::publish::Mirror;
use kvevents_core::resident::ResidentSet;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// See the module.
pub fn event_list(data: &[u8]) {
    load(data);
    if data.len() >= 16 {
        let mut forged = data.to_vec();
        let seed = u64::from_le_bytes(data[..8].try_into().expect("8 bytes"));
        let sum = xxh3_64_with_seed(&data[16..], seed);
        forged[8..16].copy_from_slice(&sum.to_le_bytes());
        load(&forged);
    }
}

fn load(bytes: &[u8]) {
    let list = match EventList::from_bytes(bytes) {
        Ok(list) => list,
        Err(EventsError::Corrupt(_) | EventsError::Version { .. }) => return,
        Err(e) => panic!("not how damage is told: {e}"),
    };
    let written = list.to_bytes();
    let again = EventList::from_bytes(&written).expect("what was read can be written");
    assert!(again.same(&list));
    assert_eq!(again.to_bytes(), written);
    assert_eq!((again.skipped(), again.overflowed()), (list.skipped(), list.overflowed()));
    use_it(&list);
}

/// Everything that a list may be used for, as it came from somebody else.
fn use_it(list: &EventList) {
    for v in list.iter() {
        let n = v.num_hashes();
        assert_eq!(v.hashes().count(), n);
        for i in 0..n {
            _ = (v.hash_at(i), v.parent_of(i));
        }
        let tokens = v.tokens();
        if v.kind() == EventKind::Stored && !v.is_irregular() && tokens.raw().is_none() {
            assert_eq!(tokens.len(), n * v.attrs().block_size as usize);
        }
        _ = (v.parent(), v.last_hash(), v.extra_keys(), v.rare(Rare::Metadata), v.rare(Rare::Lookahead));
        _ = v.origin();
    }
    let half = list.len() / 2;
    if let Ok(joined) = list.slice(0..half).concat(&list.slice(half..list.len())) {
        assert!(joined.same(list));
    }
    _ = (list.by_worker(), list.by_source(), list.with_origin(&Origin::default()));

    let options = EncodeOptions { lossy: true, metadata: true };
    for dialect in [Dialect::VllmMap033, Dialect::VllmArray(11), Dialect::SglangArray] {
        if let Ok(payload) = encode(list, Timestamp::Float(0.0), None, dialect, options) {
            // Forged text in a rare field may cost its event, never the batch.
            let read = decode(&payload, false).expect("a batch").events;
            assert_eq!(read.len() + read.skipped().len(), list.len());
        }
    }
    let (mut mirror, mut set) = (Mirror::new(0, true), ResidentSet::new());
    mirror.record(0, list, &[]);
    set.apply(list);
    assert_eq!((mirror.len(), mirror.digest()), (set.len(), set.digest()));
    let index = PrefixIndex::new(1, Bounds { orphan_blocks: 64, expected_blocks: 64 }, true);
    let source = index.source("w", 0).expect("new");
    index.apply(source, Seq::None, list, 0);
    if let Some(digest) = index.digest(source) {
        assert_eq!(digest, set.digest().to_bytes());
    }
    let loaded = PrefixIndex::load(&index.dump(0, b""), Bounds::default(), true);
    assert!(loaded.is_ok(), "its own dump is refused: {:?}", loaded.err());
}
