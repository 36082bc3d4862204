//! Columns of events: to bytes and back, compare, copy.
#![allow(missing_docs)] // criterion's macros make functions

mod workloads;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvevents_core::events::{EventData, EventList};
use std::hint::black_box;

fn columns(c: &mut Criterion) {
    workloads::check();
    let mut group = c.benchmark_group("events");
    for (events, per_event) in [(256, 1), (64, 16)] {
        let list = workloads::stored_events(events, per_event, 1);
        let other = workloads::stored_events(events, per_event, 1);
        let bytes = list.to_bytes();
        assert!(EventList::from_bytes(&bytes).expect("own bytes").same(&list));
        assert!(list.same(&other));
        group.throughput(Throughput::Elements(events as u64));
        let name = |what: &str| format!("{what}/{events}x{per_event}");
        group.bench_function(name("to_bytes"), |b| b.iter(|| black_box(&list).to_bytes()));
        group.bench_function(name("from_bytes"), |b| b.iter(|| EventList::from_bytes(black_box(&bytes))));
        group.bench_function(name("same"), |b| b.iter(|| black_box(&list).same(&other)));
        group.bench_function(name("push_view"), |b| {
            b.iter(|| {
                let mut data = EventData::new();
                for v in black_box(&list).iter() {
                    data.push_view(v).expect("a regular event");
                }
                data
            });
        });
    }
    group.finish();
}

criterion_group!(benches, columns);
criterion_main!(benches);
