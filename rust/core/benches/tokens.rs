//! Chained hashes: a prompt at once, and one token a call.
#![allow(missing_docs)] // criterion's macros make functions

mod workloads;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use kvevents_core::tokens::{Algorithm, Options, TokenBlocks};
use std::hint::black_box;

fn chains(c: &mut Criterion) {
    workloads::check();
    let mut group = c.benchmark_group("tokens");
    let tokens = workloads::token_ids(1, 128 * workloads::BLOCK);
    for algorithm in Algorithm::ALL {
        let new = |lora: bool| {
            let lora_name = lora.then(|| "adapter".into());
            let lora_path = lora.then(|| "/adapters/one".into());
            let options = Options { algorithm, lora_name, lora_path, ..Options::default() };
            TokenBlocks::new(workloads::BLOCK, options).expect("good options")
        };
        let mut whole = new(false);
        whole.extend(&tokens);
        assert_eq!(whole.num_blocks(), 128);
        group.throughput(Throughput::Elements(128));
        for (name, lora) in [("prompt", false), ("prompt_lora", true)] {
            group.bench_function(format!("{name}/{}", algorithm.name()), |b| {
                b.iter_batched_ref(|| new(lora), |t| t.extend(black_box(&tokens)), BatchSize::SmallInput);
            });
        }
        group.bench_function(format!("decode/{}", algorithm.name()), |b| {
            b.iter_batched_ref(
                || new(false),
                |t| {
                    for token in black_box(&tokens) {
                        t.extend(std::slice::from_ref(token));
                    }
                    assert_eq!(t.hash_bytes(), whole.hash_bytes());
                },
                BatchSize::SmallInput,
            );
        });
    }
    group.finish();
}

criterion_group!(benches, chains);
criterion_main!(benches);
