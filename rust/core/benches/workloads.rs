//! Seeded workloads, the same as in `benches/workloads.py`: the difference of two figures is the seam.
#![allow(dead_code)] // each benchmark takes what it needs

use kvevents_core::events::{
    Attrs, CommonParts, EventData, EventList, ExtraKeys, Hashes, StoredParts, Tokens,
};
use kvevents_core::hash::HashRef;

/// Number of different token ids.
pub const VOCABULARY: u64 = 128_000;
/// Tokens in a block.
pub const BLOCK: usize = 16;
/// The first numbers of seed 0.
pub const FIRST: [u64; 3] = [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4, 0x06c4_5d18_8009_454f];

/// A small generator that is the same in every language.
pub struct SplitMix64(pub u64);

impl SplitMix64 {
    /// 64 random bits.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = self.0;
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`, by the high bits of a product.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.draw()) * u128::from(n)) >> 64) as u64
    }
}

/// Ids over a vocabulary of 128,000.
pub fn token_ids(seed: u64, n: usize) -> Vec<u32> {
    let mut rng = SplitMix64(seed);
    (0..n).map(|_| rng.below(VOCABULARY) as u32).collect()
}

/// Integer block hashes.
pub fn int_hashes(seed: u64, n: usize) -> Vec<u64> {
    let mut rng = SplitMix64(seed ^ 0x5eed);
    (0..n).map(|_| rng.draw()).collect()
}

/// Digests of 32 bytes, one after the other.
pub fn byte_hashes(seed: u64, n: usize) -> Vec<u8> {
    let mut rng = SplitMix64(seed ^ 0x5eed);
    (0..n * 4).flat_map(|_| rng.draw().to_le_bytes()).collect()
}

/// Token ids of `n` requests without shared prefixes, each filling `blocks` blocks.
pub fn requests(n: usize, blocks: usize, block_size: usize, seed: u64) -> Vec<Vec<u32>> {
    (0..n as u64).map(|i| token_ids(seed * 1_000_003 + i, blocks * block_size)).collect()
}

/// Stores of `per_event` integer hashes each, as vLLM 0.32 fills their fields.
pub fn stored_events(events: usize, per_event: usize, seed: u64) -> EventList {
    let hashes = int_hashes(seed, events * per_event);
    let ids = token_ids(seed, events * per_event * BLOCK);
    let mut data = EventData::new();
    let attrs = data.intern(&Attrs {
        block_size: BLOCK as u32,
        group_idx: Some(0),
        medium: Some("GPU".into()),
        spec_kind: Some("full_attention".into()),
        ..Attrs::default()
    });
    for e in 0..events {
        let run = e * per_event..(e + 1) * per_event;
        let parts = StoredParts {
            hashes: Hashes::Uint(&hashes[run.clone()]),
            parent: e.checked_sub(1).map(|_| HashRef::Uint(hashes[run.start - 1])),
            tokens: Tokens::Plain(&ids[run.start * BLOCK..run.end * BLOCK]),
            extra_keys: ExtraKeys::AllNil,
            lookahead: None,
            common: CommonParts::default(),
        };
        data.push_stored(attrs, &parts).expect("a regular event");
    }
    data.into()
}

/// The two sides draw the same numbers; called before anything is timed.
pub fn check() {
    let mut rng = SplitMix64(0);
    assert_eq!([rng.draw(), rng.draw(), rng.draw()], FIRST);
}
