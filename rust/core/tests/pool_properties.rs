//! Random operations: what the events say is resident equals what the pool holds, after each of them.

mod pool_oracle;

use pool_oracle::Driver;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// Short runs from any seed; proptest finds the shortest run that fails.
    #[test]
    fn short_runs_agree_with_the_naive_pool(seed: u64, steps in 1_usize..250) {
        let mut driver = Driver::new(seed);
        (0..steps).for_each(|_| driver.step(true));
    }
}

/// Long runs, seeded: 10^6 operations together.
#[test]
fn long_runs_agree_with_the_naive_pool() {
    for seed in 0..100 {
        let mut driver = Driver::new(seed);
        for step in 1..=10_000 {
            driver.step(step % 1_000 == 0);
        }
    }
}
