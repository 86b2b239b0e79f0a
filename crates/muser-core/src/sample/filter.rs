//! The stages that select among tokens, each linear in the number of candidates.

use super::TokenMask;
use super::scan::Row;
use std::cmp::Ordering;

/// A token that may still be chosen. Candidates stand in the order of their ids between stages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Candidate {
    pub token: u32,
    pub logit: f32,
    /// Probability relative to the most probable candidate, in units of 1 / [`UNIT`].
    pub weight: u64,
}

/// Weight of the most probable candidate. Integers make sums exact in any order, so the outcome cannot depend on how
/// they are added up; 2^24 candidates of this weight still fit in 64 bits. What is 2^41 times less probable than the best
/// candidate gets weight 0.
pub(super) const UNIT: u64 = 1 << 40;

/// Larger logits first, equal ones by id.
pub(super) fn by_rank(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.partial_cmp(&a.logit).unwrap_or(Ordering::Equal).then(a.token.cmp(&b.token))
}

/// Collects the `k` largest logits, all if `k` is 0. `out` is left in order of ids.
pub(super) fn top_k(row: Row<'_>, mask: Option<&TokenMask>, k: usize, out: &mut Vec<Candidate>) {
    out.clear();
    if k == 0 || k >= row.len() {
        row.above(mask, f32::NEG_INFINITY, |token, logit| {
            out.push(Candidate { token, logit, weight: 0 });
            f32::NEG_INFINITY
        });
        return;
    }
    // A buffer of a few times k is cut to k whenever it is full: each cut is paid for by the tokens since the last one.
    let room = 4 * k.max(64);
    let mut floor = if mask.is_none() { row.below(k) } else { f32::NEG_INFINITY };
    row.above(mask, floor, |token, logit| {
        out.push(Candidate { token, logit, weight: 0 });
        if out.len() == room {
            floor = out.select_nth_unstable_by(k - 1, by_rank).1.logit;
            out.truncate(k);
        }
        floor
    });
    keep_largest(out, k);
}

/// Keeps the `k` largest logits, in order of ids.
pub(super) fn keep_largest(candidates: &mut Vec<Candidate>, k: usize) {
    if candidates.len() > k {
        candidates.select_nth_unstable_by(k - 1, by_rank);
        candidates.truncate(k);
    }
    candidates.sort_unstable_by_key(|candidate| candidate.token);
}

/// The largest logit, of equal ones the first.
pub(super) fn best(row: Row<'_>, mask: Option<&TokenMask>, out: &mut Vec<Candidate>) {
    out.clear();
    let floor = if mask.is_none() { row.below(1) } else { f32::NEG_INFINITY };
    row.above(mask, floor, |token, logit| {
        out.clear();
        out.push(Candidate { token, logit, weight: UNIT });
        logit
    });
}

/// Sets the weights at a temperature.
pub(super) fn weigh(candidates: &mut [Candidate], temperature: f32) {
    let best = candidates.iter().fold(f32::NEG_INFINITY, |best, c| best.max(c.logit));
    for candidate in candidates {
        let x = (f64::from(candidate.logit) - f64::from(best)) / f64::from(temperature);
        // Adding 2^52 rounds to an integer, which is then the fraction's bits.
        const ROUND: f64 = (1u64 << 52) as f64;
        candidate.weight = (exp(x) * UNIT as f64 + ROUND).to_bits() - ROUND.to_bits();
    }
}

/// Sum of the weights.
pub(super) fn mass(candidates: &[Candidate]) -> u64 {
    candidates.iter().map(|candidate| candidate.weight).sum()
}

/// Keeps the candidates nearest to the distribution's own surprise whose probabilities reach `p`.
///
/// The surprise of a token is logsumexp - logit, its expectation logsumexp - mean logit: the distance is |logit - mean|.
pub(super) fn typical(candidates: &mut Vec<Candidate>, scratch: &mut Vec<Candidate>, p: f32) {
    weigh(candidates, 1.0);
    let total = mass(candidates) as f64;
    let mean = candidates.iter().map(|c| c.weight as f64 * f64::from(c.logit)).sum::<f64>() / total;
    let distance = |c: &Candidate| (f64::from(c.logit) - mean).abs();
    scratch.clear();
    scratch.extend_from_slice(candidates);
    keep(candidates, scratch, f64::from(p) * total, |a, b| {
        distance(a).total_cmp(&distance(b)).then(by_rank(a, b))
    });
}

/// Keeps the most probable candidates whose probabilities reach `p`.
pub(super) fn top_p(candidates: &mut Vec<Candidate>, scratch: &mut Vec<Candidate>, p: f32) {
    weigh(candidates, 1.0);
    let total = mass(candidates) as f64;
    // Candidates below (1 - p) / n together hold less than 1 - p: the sum is reached without them.
    let least = (1.0 - f64::from(p)) * total / candidates.len() as f64;
    scratch.clear();
    scratch.extend(candidates.iter().filter(|c| c.weight as f64 >= least));
    keep(candidates, scratch, f64::from(p) * total, by_rank);
}

/// Keeps the shortest prefix in `order` whose mass reaches `wanted`, at least one candidate. `scratch` holds the
/// candidates that may be in it; its last one is found by bisection, each step partitioning what is left.
fn keep(
    candidates: &mut Vec<Candidate>,
    scratch: &mut [Candidate],
    wanted: f64,
    order: impl Fn(&Candidate, &Candidate) -> Ordering,
) {
    let mut left = scratch;
    let mut before = 0;
    while left.len() > 1 {
        let middle = (left.len() - 1) / 2;
        left.select_nth_unstable_by(middle, &order);
        let (low, high) = left.split_at_mut(middle + 1);
        let reached = before + mass(low);
        if reached as f64 >= wanted {
            left = low;
        } else {
            before = reached;
            left = high;
        }
    }
    if let Some(last) = left.first() {
        candidates.retain(|c| order(c, last) != Ordering::Greater);
    }
}

/// Keeps candidates at least `p` times as probable as the best.
pub(super) fn min_p(candidates: &mut Vec<Candidate>, p: f32) {
    weigh(candidates, 1.0);
    candidates.retain(|c| c.weight as f64 >= f64::from(p) * UNIT as f64);
}

/// 1 / k!, the coefficients of the exponential series. At |r| = ln(2) / 2 the first term left out is 2e-13.
const INVERSE_FACTORIALS: [f64; 11] = {
    let mut c = [1.0; 11];
    let mut k = 1;
    while k < c.len() {
        c[k] = c[k - 1] / k as f64;
        k += 1;
    }
    c
};

/// e^x for x <= 0, to 1e-12, by additions and multiplications alone: the same bits everywhere. 1e-304 below -700.
///
/// No branch and no conversion: the loops around it stay short.
pub(super) fn exp(x: f64) -> f64 {
    // Cody-Waite split of ln 2: the upper part has 32 bits, so that its products with small integers are exact.
    const LN2_HIGH: f64 = 0.693_147_180_369_123_8;
    const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    // Adding 1.5 * 2^52 rounds to an integer, which then stands in the lowest bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    let x = if x > -700.0 { x } else { -700.0 };
    let shifted = x * std::f64::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    let sum = INVERSE_FACTORIALS.iter().rev().fold(0.0, |sum, c| sum * r + c);
    sum * f64::from_bits(shifted.to_bits().wrapping_add(1023) << 52)
}

/// ln x for finite x >= 1, to 1e-13, by the same means: the exponent's share, and the series of artanh (m - 1) / (m + 1) for the rest m.
pub(super) fn ln(x: f64) -> f64 {
    let (exponent, m) =
        ((x.to_bits() >> 52) as f64 - 1023.0, f64::from_bits(x.to_bits() << 12 >> 12 | 1023 << 52));
    let s = (m - 1.0) / (m + 1.0);
    let series = (0..16).rev().fold(0.0, |sum, k| sum * (s * s) + 1.0 / f64::from(2 * k + 1));
    exponent * std::f64::consts::LN_2 + 2.0 * s * series
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn exp_and_ln_are_close_to_the_platforms() {
        for i in 0..70_000 {
            let x = -f64::from(i) * 0.01;
            assert!((exp(x) / x.exp() - 1.0).abs() < 1e-12, "{x}");
        }
        for x in (0..70_000).map(|i| 1.0 + f64::from(i) * f64::from(i) * 0.001) {
            assert!((ln(x) - x.ln()).abs() < 1e-13 * x.ln().max(1.0), "{x}");
        }
        assert_eq!((exp(0.0), ln(1.0)), (1.0, 0.0));
        assert!(exp(f64::NEG_INFINITY) < 1e-303);
    }

    /// Logits with many equal values, so that ranks by id matter.
    fn logits() -> impl Strategy<Value = Vec<f32>> {
        proptest::collection::vec((-40i32..40).prop_map(|x| x as f32 * 0.25), 1..700)
    }

    fn row<'a>(logits: &'a [f32], largest: &'a mut Vec<f32>) -> Row<'a> {
        Row::read(logits, largest).0
    }

    fn sorted(logits: &[f32]) -> Vec<Candidate> {
        let (mut all, mut largest) = (vec![], vec![]);
        top_k(row(logits, &mut largest), None, 0, &mut all);
        weigh(&mut all, 1.0);
        all.sort_by(by_rank);
        all
    }

    fn ids(candidates: &[Candidate]) -> Vec<u32> {
        let mut ids: Vec<u32> = candidates.iter().map(|c| c.token).collect();
        ids.sort_unstable();
        ids
    }

    proptest! {
        #[test]
        fn selection_equals_sorting(logits in logits(), k in 1usize..200, p in 0f32..1.0) {
            let all = sorted(&logits);
            let (mut kept, mut largest) = (vec![], vec![]);
            top_k(row(&logits, &mut largest), None, k, &mut kept);
            prop_assert!(kept.is_sorted_by_key(|c| c.token));
            prop_assert_eq!(ids(&kept), ids(&all[..k.min(all.len())]));

            top_k(row(&logits, &mut largest), None, 0, &mut kept);
            top_p(&mut kept, &mut vec![], p);
            let wanted = f64::from(p) * mass(&all) as f64;
            let n = (1..=all.len()).find(|n| mass(&all[..*n]) as f64 >= wanted).unwrap_or(all.len());
            prop_assert!(kept.is_sorted_by_key(|c| c.token));
            prop_assert_eq!(ids(&kept), ids(&all[..n]));
        }

        /// Rows of many blocks, of few different values.
        #[test]
        fn long_rows_have_the_same_largest(seed in prop::collection::vec(-40i32..40, 64), n in 1usize..9000, k in 1usize..40) {
            let logits: Vec<f32> = (0..n).map(|i| (seed[i * i % 61] + (i / 97) as i32 % 23) as f32 * 0.25).collect();
            let all = sorted(&logits);
            let (mut kept, mut largest) = (vec![], vec![]);
            top_k(row(&logits, &mut largest), None, k, &mut kept);
            prop_assert_eq!(ids(&kept), ids(&all[..k.min(n)]));
            best(row(&logits, &mut largest), None, &mut kept);
            prop_assert_eq!(ids(&kept), ids(&all[..1]));
        }

        #[test]
        fn masked_tokens_are_never_seen(logits in logits(), words in proptest::collection::vec(any::<u32>(), 0..24)) {
            let mut mask = TokenMask::none(logits.len());
            mask.set_words(&words);
            let (mut seen, mut largest) = (vec![], vec![]);
            top_k(row(&logits, &mut largest), Some(&mask), 0, &mut seen);
            let allowed: Vec<u32> = (0..logits.len() as u32).filter(|t| mask.allows(*t)).collect();
            prop_assert_eq!(ids(&seen), allowed);
        }
    }
}
