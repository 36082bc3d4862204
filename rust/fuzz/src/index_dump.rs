//! Any bytes as the dump of an index, as they are and with a checksum that fits.

use kvevents_core::events::{CommonParts, EventData, Hashes};
use kvevents_core::hash::HashRef;
use kvevents_core::index::{Bounds, PrefixIndex, Query, Seq};
use xxhash_rust::xxh3::xxh3_64;

/// See the module.
pub fn index_dump(data: &[u8]) {
    load(data);
    if data.len() >= 16 {
        let mut forged = data.to_vec();
        forged[8..16].copy_from_slice(&xxh3_64(&data[16..]).to_le_bytes());
        load(&forged);
    }
}

fn load(bytes: &[u8]) {
    let Ok((index, now, note)) = PrefixIndex::load(bytes, Bounds::default(), true) else { return };
    let dump = index.dump(now, &note);
    let (again, later, noted) = PrefixIndex::load(&dump, Bounds::default(), true).expect("its own dump");
    assert_eq!((later, noted), (now, note));
    let tokens: Vec<u32> = (0..32).map(|t| t % 3).collect();
    let query = Query { tokens: &tokens, ..Query::default() };
    for (a, b) in index.stats().iter().zip(&again.stats()) {
        assert_eq!((&a.id, a.blocks, a.complete, a.last_seq), (&b.id, b.blocks, b.complete, b.last_seq));
        assert_eq!(index.digest(a.source), again.digest(b.source));
    }
    assert_eq!(index.num_sources(), again.num_sources());
    assert_eq!(index.find(&query, now), again.find(&query, now));

    // Everything that may be done to it, as it came from somebody else.
    let hashes = [HashRef::Uint(1), HashRef::Bytes(&[7; 32]), HashRef::Bytes(&[])];
    let mut data = EventData::new();
    let id = data.intern(&kvevents_core::events::Attrs::default());
    data.push_removed(id, Hashes::Mixed(&hashes), &CommonParts::default()).expect("small");
    let events = data.into();
    for s in index.stats() {
        index.confirm(s.source);
        _ = index.find_hashes(s.source, &hashes, now);
        index.expect(s.source, &query, now, now);
        index.apply(s.source, Seq::Follows(s.last_seq.unwrap_or(0).wrapping_add(1)), &events, now);
        for tier in 0..index.tier_names().len() {
            index.clear_tier(s.source, tier);
        }
    }
    index.find(&query, u32::MAX);
    index.expire(u32::MAX);
    for s in index.stats() {
        index.reset(s.source);
        assert!(index.drop_source(s.source));
    }
    assert_eq!(index.num_sources(), 0);
}
