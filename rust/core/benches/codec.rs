//! Payloads to columns and back.
#![allow(missing_docs)] // criterion's macros make functions

mod workloads;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvevents_core::codec::{Dialect, EncodeOptions, Encoder, Timestamp, decode};
use std::hint::black_box;

fn codec(c: &mut Criterion) {
    workloads::check();
    let mut group = c.benchmark_group("codec");
    let ts = Timestamp::Float(1.5);
    for (events, per_event) in [(256, 1), (64, 1), (64, 16), (1, 64)] {
        let list = workloads::stored_events(events, per_event, 1);
        let mut encoder = Encoder::new();
        group.throughput(Throughput::Elements(events as u64));
        for dialect in [Dialect::VllmMap033, Dialect::VllmArray(11)] {
            let name = |what: &str| format!("{what}/{}/{events}x{per_event}", dialect.name());
            let options = EncodeOptions::default();
            let payload =
                encoder.encode(&list, ts, Some(0), dialect, options).expect("no odd field").to_vec();
            assert!(decode(&payload, true).expect("own bytes").events.same(&list));
            group.bench_function(name("encode"), |b| {
                b.iter(|| encoder.encode(black_box(&list), ts, Some(0), dialect, options).map(<[u8]>::len));
            });
            group.bench_function(name("decode"), |b| b.iter(|| decode(black_box(&payload), false)));
        }
    }
    group.finish();
}

criterion_group!(benches, codec);
criterion_main!(benches);
