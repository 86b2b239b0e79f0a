//! The stages that select among tokens, each linear in the number of candidates.

use super::TokenMask;
use super::mass::{Scale, UNIT};
use super::scan::{BLOCK, Row};
use std::cmp::Ordering;

/// A token that may still be chosen. Candidates stand in the order of their ids between stages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Candidate {
    pub token: u32,
    pub logit: f32,
    /// Probability relative to the most probable candidate, in units of 1 / [`UNIT`].
    pub weight: u64,
}

/// Larger logits first, equal ones by id.
pub(super) fn by_rank(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.partial_cmp(&a.logit).unwrap_or(Ordering::Equal).then(a.token.cmp(&b.token))
}

/// Collects the `k` largest logits, all if `k` is 0. `out` is left in order of ids.
pub(super) fn top_k(row: Row<'_>, mask: Option<&TokenMask>, k: usize, out: &mut Vec<Candidate>) {
    if k == 0 || k >= row.len() {
        above(row, mask, f32::NEG_INFINITY, out);
        return;
    }
    out.clear();
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

/// Collects all logits above a floor.
pub(super) fn above(row: Row<'_>, mask: Option<&TokenMask>, floor: f32, out: &mut Vec<Candidate>) {
    out.clear();
    row.above(mask, floor, |token, logit| {
        out.push(Candidate { token, logit, weight: 0 });
        floor
    });
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
    let scale = Scale::new(best, temperature);
    let (mut logits, mut weights) = ([0.0; BLOCK], [0; BLOCK]);
    for some in candidates.chunks_mut(BLOCK) {
        some.iter().zip(&mut logits).for_each(|(c, logit)| *logit = c.logit);
        scale.weigh(&logits[..some.len()], &mut weights);
        some.iter_mut().zip(&weights).for_each(|(c, weight)| c.weight = *weight);
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
    let order = |a: &Candidate, b: &Candidate| distance(a).total_cmp(&distance(b)).then(by_rank(a, b));
    if let Some(last) = reaching(scratch, 0, f64::from(p) * total, order) {
        candidates.retain(|c| order(c, &last) != Ordering::Greater);
    }
}

/// Keeps the most probable of the weighed candidates whose mass reaches `wanted`.
pub(super) fn top_p(candidates: &mut Vec<Candidate>, scratch: &mut Vec<Candidate>, wanted: f64) {
    let best = candidates.iter().fold(f32::NEG_INFINITY, |best, c| best.max(c.logit));
    let mut steps = Steps::new(best);
    candidates.iter().for_each(|c| steps.add(c.logit, c.weight));
    // The last one kept is on the step that reaches the sum.
    let (step, before) = steps.reaching(wanted);
    scratch.clear();
    scratch.extend(candidates.iter().filter(|c| steps.of(c.logit) == step));
    if let Some(last) = reaching(scratch, before, wanted, by_rank) {
        candidates.retain(|c| c.logit > last.logit || c.logit == last.logit && c.token <= last.token);
    }
}

/// Masses by how far logits are below the best, so that few candidates have to be ranked.
pub(super) struct Steps {
    best: f32,
    masses: [u64; Steps::COUNT],
}

impl Steps {
    const COUNT: usize = 256;
    /// Of a unit of logits: what is beyond the last step weighs nothing.
    const WIDTH: f32 = 0.125;

    pub fn new(best: f32) -> Self {
        Steps { best, masses: [0; Steps::COUNT] }
    }

    /// A smaller logit is on the same step or a later one.
    fn of(&self, logit: f32) -> usize {
        // Adding 2^23 rounds to an integer, which then stands in the lowest bits.
        const ROUND: f32 = (1u32 << 23) as f32;
        let steps = (self.best - logit) / Steps::WIDTH;
        let last = (Steps::COUNT - 1) as f32;
        ((if steps < last { steps } else { last }) + ROUND).to_bits() as usize % Steps::COUNT
    }

    pub fn add(&mut self, logit: f32, weight: u64) {
        self.masses[self.of(logit)] += weight;
    }

    /// The step with which the sum from the best on reaches `wanted`, the last one if none does, and the sum before it.
    fn reaching(&self, wanted: f64) -> (usize, u64) {
        let mut before = 0;
        for (step, mass) in self.masses.iter().enumerate() {
            if (before + mass) as f64 >= wanted {
                return (step, before);
            }
            before += mass;
        }
        (Steps::COUNT - 1, before)
    }

    /// A logit below all of a step, which is as low as the sum from the last step on stays within `spared`.
    pub fn sparing(&self, spared: f64) -> f32 {
        let mut sum = 0;
        let step = self.masses.iter().rposition(|mass| {
            sum += mass;
            sum as f64 > spared
        });
        (self.best - (step.unwrap_or(0) as f32 + 0.5) * Steps::WIDTH).next_down()
    }
}

/// The candidate with which the mass in `order` reaches `wanted`, `before` being that of all that precede these; it is found
/// by bisection, each step partitioning what is left.
fn reaching(
    candidates: &mut [Candidate],
    mut before: u64,
    wanted: f64,
    order: impl Fn(&Candidate, &Candidate) -> Ordering,
) -> Option<Candidate> {
    let mut left = candidates;
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
    left.first().copied()
}

/// Keeps the weighed candidates at least `p` times as probable as the best.
pub(super) fn min_p(candidates: &mut Vec<Candidate>, p: f32) {
    candidates.retain(|c| c.weight as f64 >= f64::from(p) * UNIT as f64);
}

#[cfg(test)]
mod tests {
    use super::super::scan;
    use super::*;
    use proptest::prelude::*;

    /// Logits with many equal values, so that ranks by id matter.
    fn logits() -> impl Strategy<Value = Vec<f32>> {
        proptest::collection::vec((-40i32..40).prop_map(|x| x as f32 * 0.25), 1..700)
    }

    fn row<'a>(logits: &'a [f32], largest: &'a mut Vec<f32>) -> Row<'a> {
        scan::scan(logits, largest);
        Row::of(logits, largest)
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
            weigh(&mut kept, 1.0);
            let wanted = f64::from(p) * mass(&all) as f64;
            top_p(&mut kept, &mut vec![], wanted);
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
