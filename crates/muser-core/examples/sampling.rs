//! How long sampling from a row of the release's 202,048 logits takes, from the caches and from memory.
#![allow(clippy::unwrap_used)]

use muser_core::sample::{Sampler, SamplerOptions, TokenMask};
use std::time::Instant;

const VOCAB: usize = 202_048;

fn main() {
    // About normal, by a generator of its own so that every run has the same.
    let mut state = 12345u64;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 24) as f32
    };
    let row: Vec<f32> = (0..VOCAB).map(|_| 3.0 * ((0..12).map(|_| uniform()).sum::<f32>() - 6.0)).collect();
    // More than a processor's caches hold.
    let rows: Vec<Vec<f32>> = (0..100)
        .map(|i| {
            let mut row = row.clone();
            row.rotate_left(i * 977);
            row
        })
        .collect();
    let mut all = TokenMask::none(VOCAB);
    all.set_words(&[u32::MAX; VOCAB / 32]);
    let usual = SamplerOptions::default;
    for (name, options, mask) in [
        ("default options", usual(), None),
        ("top-k off", SamplerOptions { top_k: 0, ..usual() }, None),
        ("default options, a mask that allows all", usual(), Some(&all)),
        ("greedy, such a mask", SamplerOptions::greedy(), Some(&all)),
    ] {
        let mut sampler = Sampler::new(options, VOCAB).unwrap();
        let mut median = |of: &dyn Fn(usize) -> usize| {
            let mut times: Vec<f64> = (0..rows.len())
                .map(|i| {
                    let start = Instant::now();
                    sampler.sample(&rows[of(i)], mask).unwrap();
                    start.elapsed().as_secs_f64()
                })
                .collect();
            times.sort_by(f64::total_cmp);
            times[times.len() / 2] * 1e6
        };
        println!("{name}: one row again {:.0} us, others {:.0} us", median(&|_| 0), median(&|i| i));
    }
}
