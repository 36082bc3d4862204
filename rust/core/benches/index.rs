//! The prefix index: a stream in, answers out, dump and load.
#![allow(missing_docs)] // criterion's macros make functions

mod workloads;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use kvevents_core::events::{EventList, Tokens};
use kvevents_core::index::{Bounds, PrefixIndex, Query, Seq};
use std::hint::black_box;

const BLOCKS: usize = 2048;

fn empty() -> (PrefixIndex, usize) {
    let index = PrefixIndex::new(1, Bounds::default(), true);
    let source = index.add_source("w", 0, None, 0, 0);
    (index, source)
}

fn filled(events: &EventList) -> PrefixIndex {
    let (index, source) = empty();
    index.apply(source, Seq::None, events, 0);
    index
}

fn tokens(events: &EventList) -> Vec<u32> {
    let plain = |t| if let Tokens::Plain(t) = t { t } else { &[][..] };
    events.iter().flat_map(|v| plain(v.tokens()).to_vec()).collect()
}

fn index(c: &mut Criterion) {
    workloads::check();
    let mut group = c.benchmark_group("index");
    for per_event in [64, 1] {
        let events = workloads::stored_events(BLOCKS / per_event, per_event, 1);
        group.throughput(Throughput::Elements(BLOCKS as u64));
        group.bench_function(format!("apply/{per_event}"), |b| {
            b.iter_batched_ref(
                empty,
                |(index, source)| index.apply(*source, Seq::None, black_box(&events), 0),
                BatchSize::SmallInput,
            );
        });
    }
    let events = workloads::stored_events(BLOCKS / 64, 64, 1);
    let (index, all) = (filled(&events), tokens(&events));
    for blocks in [64, 1024] {
        let query = Query { tokens: &all[..blocks * workloads::BLOCK], ..Query::default() };
        assert_eq!(index.find(&query, 0)[0].tokens as usize, query.tokens.len());
        group.throughput(Throughput::Elements(blocks as u64));
        group.bench_function(format!("find/{blocks}"), |b| b.iter(|| index.find(black_box(&query), 0)));
    }
    group.throughput(Throughput::Elements(BLOCKS as u64));
    let dump = index.dump(0, b"");
    group.bench_function("dump", |b| b.iter(|| index.dump(0, b"")));
    group.bench_function("load", |b| b.iter(|| PrefixIndex::load(black_box(&dump), Bounds::default(), true)));
    group.finish();
}

criterion_group!(benches, index);
criterion_main!(benches);
