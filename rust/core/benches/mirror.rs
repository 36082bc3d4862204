//! What the mirror costs a block, in a set that stays as large as it is.
#![allow(missing_docs)] // criterion's macros make functions

mod workloads;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvevents_core::events::{
    Attrs, CommonParts, EventData, EventList, ExtraKeys, Hashes, StoredParts, Tokens,
};
use kvevents_core::publish::Mirror;
use std::hint::black_box;
use workloads::{BLOCK, byte_hashes, token_ids};

/// A store of so many blocks with hashes of 32 bytes, and its removal.
fn pair(seed: u64, blocks: usize) -> (EventList, EventList) {
    let (hashes, tokens) = (byte_hashes(seed, blocks), token_ids(seed, blocks * BLOCK));
    let attrs = Attrs {
        block_size: BLOCK as u32,
        group_idx: Some(0),
        medium: Some("GPU".into()),
        spec_kind: Some("full_attention".into()),
        ..Attrs::default()
    };
    let hashes = Hashes::Bytes { width: 32, data: &hashes };
    let mut stored = EventData::new();
    let id = stored.intern(&attrs);
    let parts = StoredParts {
        hashes,
        parent: None,
        tokens: Tokens::Plain(&tokens),
        extra_keys: ExtraKeys::AllNil,
        lookahead: None,
        common: CommonParts::default(),
    };
    stored.push_stored(id, &parts).expect("a regular event");
    let mut removed = EventData::new();
    let id = removed.intern(&Attrs::of_scope(&attrs.scope()));
    removed.push_removed(id, hashes, &CommonParts::default()).expect("a regular event");
    (stored.into(), removed.into())
}

fn mirror(c: &mut Criterion) {
    let mut group = c.benchmark_group("mirror");
    for events in [64, 2000] {
        let pairs: Vec<_> = (0..events).map(|i| pair(i + 1, 64)).collect();
        group.throughput(Throughput::Elements(events * 64));
        for keep_tokens in [true, false] {
            let mut mirror = Mirror::new(0, keep_tokens);
            let name = |what: &str| format!("{what}/{}k/tokens={keep_tokens}", events * 64 / 1000);
            let mut seq = 0;
            let mut each = |mirror: &mut Mirror, removed: bool| {
                for (s, r) in &pairs {
                    mirror.record(seq, black_box(if removed { r } else { s }), &[]);
                    seq += 1;
                }
            };
            each(&mut mirror, false);
            group.bench_function(name("remove and store"), |b| {
                b.iter(|| {
                    each(&mut mirror, true);
                    each(&mut mirror, false);
                });
            });
            assert_eq!(mirror.len() as u64, events * 64);
            group.bench_function(name("store again"), |b| b.iter(|| each(&mut mirror, false)));
        }
    }
    let pairs: Vec<_> = (0..2000).map(|i| pair(i + 1, 64)).collect();
    group.throughput(Throughput::Elements(2000 * 64));
    let mut mirror = Mirror::new(0, true);
    pairs.iter().enumerate().for_each(|(i, (s, _))| mirror.record(i as u64, s, &[]));
    group.bench_function("snapshot/128k", |b| {
        b.iter(|| {
            mirror.begin_snapshot(1 << 20);
            while mirror.walk_snapshot(512).is_some_and(|s| black_box(s).more) {}
        });
    });
    group.finish();
}

criterion_group!(benches, mirror);
criterion_main!(benches);
