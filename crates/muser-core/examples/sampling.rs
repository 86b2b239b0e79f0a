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
    let rotated = |row: &[f32]| -> Vec<Vec<f32>> {
        (0..100).map(|i| [&row[i * 977..], &row[..i * 977]].concat()).collect()
    };
    let rows = rotated(&row);
    // Thousands of those tokens are likely; where a model has something to say, few are.
    let mut sure = row.clone();
    (0..30).for_each(|i| sure[i * 5051] = 14.0 + 0.3 * i as f32);
    let sure = rotated(&sure);
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
    let mut half = TokenMask::none(VOCAB);
    (0..VOCAB as u32)
        .filter(|token| token.wrapping_mul(2_654_435_761) >> 31 == 1)
        .for_each(|token| half.allow(token));
    let usual = SamplerOptions::default;
    let top_p = SamplerOptions { top_k: 0, ..usual() };
    let plain = SamplerOptions { top_p: 1.0, ..top_p.clone() };
    for (name, options, mask, rows) in [
        ("default options", usual(), None, &rows),
        ("top-k off", top_p.clone(), None, &rows),
        ("top-k off, few likely", top_p.clone(), None, &sure),
        ("top-k off, temperature 0.7", SamplerOptions { temperature: 0.7, ..top_p.clone() }, None, &rows),
        ("top-k off, a mask that allows half", top_p, Some(&half), &rows),
        ("top-k and top-p off, min-p 0.05", SamplerOptions { min_p: 0.05, ..plain.clone() }, None, &rows),
        ("nothing but temperature 1", plain.clone(), None, &rows),
        ("nothing but temperature 0.7", SamplerOptions { temperature: 0.7, ..plain }, None, &rows),
        ("default options, a mask that allows all", usual(), Some(&all), &rows),
        ("greedy, such a mask", SamplerOptions::greedy(), Some(&all), &rows),
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
