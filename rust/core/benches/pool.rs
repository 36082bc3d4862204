//! The block pool without Python: churn, decoding, large pools. The same workloads as
//! `benches/test_bench_pool.py`.
#![allow(missing_docs)] // criterion's macros make functions

mod workloads;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvevents_core::pool::{BlockPool, Config, KeyForm, Report, Request};
use std::hint::black_box;
use workloads::BLOCK;

const BLOCKS: usize = 128;

/// Hashes and tokens of requests that share nothing.
struct Served {
    hashes: Vec<u8>,
    tokens: Vec<u32>,
}

fn served(n: usize) -> Vec<Served> {
    let tokens = workloads::requests(n, BLOCKS, BLOCK, 1);
    let hash = |i| workloads::byte_hashes(1_000_000 + i as u64, BLOCKS);
    tokens.into_iter().enumerate().map(|(i, tokens)| Served { hashes: hash(i), tokens }).collect()
}

fn config(blocks: usize) -> Config {
    Config::new(blocks + 1, BLOCK as u32)
}

fn serve(pool: &mut BlockPool, s: &Served, ids: &mut Vec<u32>) {
    ids.clear();
    pool.get_new_blocks(BLOCKS, ids).expect("enough");
    let request = Request::plain(KeyForm::Bytes(32), &s.hashes, &s.tokens);
    pool.cache_full_blocks(&request, ids, 0, BLOCKS, 0).expect("a good call");
    ids.reverse();
    pool.free_blocks(ids).expect("in use");
    black_box(pool.take_events());
}

fn churn(c: &mut Criterion) {
    workloads::check();
    let mut group = c.benchmark_group("pool churn");
    group.throughput(Throughput::Elements(BLOCKS as u64));
    let base = config(4096);
    let shapes = [
        ("residency", base.clone()),
        ("every_copy", Config { report: Report::EveryCopy, ..base.clone() }),
        ("integers", Config { narrow: true, ..base.clone() }),
        ("events off", Config { enable_events: false, ..base }),
    ];
    let requests = served(40);
    for (name, config) in shapes {
        let mut pool = BlockPool::new(config).expect("a good configuration");
        let (mut ids, mut turn) = (Vec::new(), 0);
        let mut next = || {
            serve(&mut pool, &requests[turn], &mut ids);
            turn = (turn + 1) % requests.len();
        };
        (0..80).for_each(|_| next());
        group.bench_function(name, |b| b.iter(&mut next));
        assert_eq!(pool.stats().resident_hashes, 4096);
    }
    group.finish();
}

fn decode(c: &mut Criterion) {
    let mut group = c.benchmark_group("pool decode");
    group.throughput(Throughput::Elements(BLOCKS as u64));
    let requests = served(1);
    let request = Request::plain(KeyForm::Bytes(32), &requests[0].hashes, &requests[0].tokens);
    for (name, events) in [("events", true), ("events off", false)] {
        let config = Config { enable_events: events, ..config(BLOCKS) };
        let mut pool = BlockPool::new(config).expect("a good configuration");
        let mut ids = Vec::new();
        pool.get_new_blocks(BLOCKS, &mut ids).expect("enough");
        group.bench_function(name, |b| {
            b.iter(|| {
                for (i, id) in ids.iter().enumerate() {
                    pool.cache_full_blocks(&request, &[*id], i, i + 1, 0).expect("a good call");
                    black_box(pool.take_events());
                }
                pool.evict_blocks(&ids).expect("in range");
            });
        });
    }
    group.finish();
}

fn resident(c: &mut Criterion) {
    let mut group = c.benchmark_group("pool resident");
    group.throughput(Throughput::Elements(BLOCKS as u64));
    for blocks in [1 << 12, 1 << 16, 1 << 19] {
        let requests = served(blocks / BLOCKS + 8);
        let mut pool = BlockPool::new(config(blocks)).expect("a good configuration");
        let (mut ids, mut turn) = (Vec::new(), 0);
        let mut next = || {
            serve(&mut pool, &requests[turn], &mut ids);
            turn = (turn + 1) % requests.len();
        };
        (0..requests.len()).for_each(|_| next());
        group.bench_function(BenchmarkId::from_parameter(blocks), |b| b.iter(&mut next));
        assert_eq!(pool.stats().resident_hashes, blocks);
    }
    group.finish();
}

criterion_group!(benches, churn, decode, resident);
criterion_main!(benches);
