//! The aggregator's steady work: workers that agree, one late vote in a large state, a silent step.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use kvevents_core::aggregate::{Aggregator, Limits, Rules};
use kvevents_core::events::{
    Attrs, CommonParts, EventData, EventList, ExtraKeys, Hashes, StoredParts, Tokens,
};

const WORKERS: u32 = 8;

/// `events` stores of `blocks` blocks of 16 tokens with 32-byte hashes; each list has its own memory.
fn stores(first: u64, events: u64, blocks: u64) -> EventList {
    let mut data = EventData::new();
    let attrs = data.intern(&Attrs { block_size: 16, medium: Some(Arc::from("CPU")), ..Attrs::default() });
    for e in first..first + events {
        let mut hashes = Vec::new();
        for b in 0..blocks {
            let n = (e * blocks + b + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            hashes.extend(
                [n, n.rotate_left(17) ^ 5, n.rotate_left(31), e].map(u64::to_le_bytes).as_flattened(),
            );
        }
        let tokens: Vec<u32> =
            (0..blocks as u32 * 16).map(|t| t.wrapping_mul(e as u32 + 7) % 128_000).collect();
        let parts = StoredParts {
            hashes: Hashes::Bytes { width: 32, data: &hashes },
            parent: None,
            tokens: Tokens::Plain(&tokens),
            extra_keys: ExtraKeys::AllNil,
            lookahead: None,
            common: CommonParts::default(),
        };
        data.push_stored(attrs, &parts).expect("room");
    }
    data.into()
}

fn aggregator(max_waiting: usize) -> Aggregator {
    let limits = Limits { max_waiting, ..Limits::default() };
    Aggregator::new(WORKERS, Rules::default(), limits).expect("good rules")
}

fn agreement(c: &mut Criterion) {
    let mut group = c.benchmark_group("aggregate_8_workers_1000_events");
    for blocks in [16, 1] {
        let reports: Vec<EventList> = (0..WORKERS).map(|_| stores(0, 1000, blocks)).collect();
        group.throughput(Throughput::Elements(u64::from(WORKERS) * 1000));
        group.bench_function(format!("{blocks}_blocks"), |b| {
            b.iter_batched_ref(
                || aggregator(1 << 20),
                |a| {
                    for (w, list) in (0..).zip(&reports) {
                        a.add(w, list).expect("known worker");
                    }
                    let out = a.drain().expect("room");
                    assert_eq!(a.resident(), 1000 * blocks as usize);
                    out
                },
                BatchSize::LargeInput,
            );
        });
    }
    group.finish();
}

/// The last of eight votes for 1,000 events of 16 blocks, spread over what is held.
fn vote(c: &mut Criterion) {
    let mut group = c.benchmark_group("aggregate_vote");
    for held in [4_000u64, 400_000] {
        let events = held / 16;
        let list = stores(0, events, 16);
        let sample = 250;
        group.throughput(Throughput::Elements(sample * 16));
        group.bench_function(format!("{held}_held"), |b| {
            let mut a = aggregator(1 << 20);
            for w in 0..WORKERS {
                a.add(w, &list).expect("known worker");
            }
            a.drain().expect("room");
            eprintln!(
                "{held} held: {} bytes a block beside its hash",
                (a.nbytes() - held as usize * 32) / held as usize
            );
            let step = events / sample;
            let mut picked = EventData::new();
            for i in 0..sample {
                picked.push_view(list.view(((i * 7919) % sample * step) as usize)).expect("room");
            }
            let picked = EventList::from(picked);
            b.iter(|| a.add(black_box(3), black_box(&picked)).expect("known worker"));
        });
    }
    group.finish();
}

fn silence(c: &mut Criterion) {
    let mut a = aggregator(1 << 20);
    let nothing = EventList::default();
    c.bench_function("aggregate_silent_step", |b| {
        b.iter(|| {
            for w in 0..WORKERS {
                a.add(w, &nothing).expect("known worker");
            }
            a.drain().expect("room")
        });
    });
}

criterion_group!(benches, agreement, vote, silence);
criterion_main!(benches);
