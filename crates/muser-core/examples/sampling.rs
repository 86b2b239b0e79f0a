//! How long sampling from a row of the release's 202,048 logits takes, from the caches and from memory.
#![allow(clippy::unwrap_used)]

use muser_core::Largest;
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
    // What a card finds of it, in any order.
    let mut largest: Vec<(u32, f32)> = (0..).zip(row.iter().copied()).collect();
    largest.sort_by(|a, b| b.1.total_cmp(&a.1));
    largest.truncate(130);
    let floor = largest[129].1;
    largest.sort_by_key(|token| token.0 % 1009);
    let mut sampler = Sampler::new(SamplerOptions::default(), VOCAB).unwrap();
    let start = Instant::now();
    for _ in 0..1000 {
        sampler.sample_largest(Largest { tokens: &largest, floor }, None).unwrap().unwrap();
    }
    println!("default options, the 130 largest logits: {:.1} us", start.elapsed().as_secs_f64() * 1e3);
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
