//! Test support: fixtures and one conformance suite for every device.
//!
//! A device's tests hand [`suite`] a way to make the device; the cases and their tolerances stand here, once.
#![allow(clippy::unwrap_used, missing_docs)]

pub mod drafting;
pub mod fixtures;
pub mod suite;

pub use fixtures::{Arrays, fixture, model, prompts};

/// Largest absolute difference; panics where lengths differ or a value is not a number.
pub fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len(), "lengths differ");
    a.iter().zip(b).fold(0.0, |worst: f32, (x, y)| {
        assert!(x.is_finite() && y.is_finite(), "not a number: {x} against {y}");
        worst.max((x - y).abs())
    })
}

/// Mean Kullback-Leibler divergence of softmax rows: the law of `want` against that of `got`.
pub fn mean_kl(want: &[f32], got: &[f32], vocab: usize) -> f64 {
    let softmax = |row: &[f32]| {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
        let total: f64 = row.iter().map(|x| (*x as f64 - max).exp()).sum();
        row.iter().map(|x| *x as f64 - max - total.ln()).collect::<Vec<f64>>()
    };
    let rows = want.len() / vocab;
    let kl = |(w, g): (&[f32], &[f32])| -> f64 {
        softmax(w).iter().zip(softmax(g)).map(|(w, g)| w.exp() * (w - g)).sum()
    };
    want.chunks_exact(vocab).zip(got.chunks_exact(vocab)).map(kl).sum::<f64>() / rows as f64
}
