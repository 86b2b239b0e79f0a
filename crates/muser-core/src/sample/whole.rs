//! The selecting stages for all tokens of a row: they look for what they keep without making a candidate of each token.

use super::TokenMask;
use super::filter::{self, Candidate, Steps};
use super::mass::{self, Scale, UNIT};
use super::scan::{BLOCK, Row};

/// The most probable tokens, weighed, whose probabilities reach `p`.
pub(super) fn top_p(
    row: Row<'_>,
    mask: Option<&TokenMask>,
    p: f32,
    out: &mut Vec<Candidate>,
    scratch: &mut Vec<Candidate>,
) {
    let Some(best) = best(row, mask, out) else { return };
    let scale = Scale::new(best, 1.0);
    // A few tokens of each block tell about how low the last one kept will be.
    const SAMPLE: usize = BLOCK / 64;
    let (mut total, mut steps) = (0, Steps::new(best));
    masses(row, mask, scale, |logits, weights, mass| {
        total += mass;
        logits.iter().zip(weights).take(SAMPLE).for_each(|(logit, weight)| steps.add(*logit, *weight));
    });
    let (total, p) = (total as f64, f64::from(p));
    let spared = (1.0 - p) * total;
    // Where many tokens share the mass that is not kept, the sample sees it; where few do, it is among the largest logits.
    let seen = 0.9 * SAMPLE as f64 / BLOCK as f64;
    let likely = steps.sparing(spared * seen).min(row.below(64));
    // Tokens below (1 - p) / n together hold less than 1 - p: the sum is reached without them.
    let certain = scale.below(spared / row.len() as f64);
    for floor in [likely, certain] {
        filter::above(row, mask, floor, out);
        filter::weigh(out, 1.0);
        if filter::mass(out) as f64 >= p * total {
            break;
        }
    }
    filter::top_p(out, scratch, p * total);
}

/// All tokens at least `p` times as probable as the best, and some others.
pub(super) fn min_p(row: Row<'_>, mask: Option<&TokenMask>, p: f32, out: &mut Vec<Candidate>) {
    if let Some(best) = best(row, mask, out) {
        filter::above(row, mask, Scale::new(best, 1.0).below(f64::from(p) * UNIT as f64), out);
    }
}

/// The largest logit.
fn best(row: Row<'_>, mask: Option<&TokenMask>, out: &mut Vec<Candidate>) -> Option<f32> {
    filter::best(row, mask, out);
    out.first().map(|best| best.logit)
}

/// Shows `visit` each block's logits, weights and mass; of a block without mass nothing but that.
fn masses(row: Row<'_>, mask: Option<&TokenMask>, scale: Scale, mut visit: impl FnMut(&[f32], &[u64], u64)) {
    let (mut room, mut weights) = ([0.0; BLOCK], [0; BLOCK]);
    for (i, largest) in row.largest().iter().enumerate() {
        let logits = if scale.vanishes(*largest) { &[] } else { row.block(i, mask, &mut room) };
        let mass = scale.weigh(logits, &mut weights);
        visit(logits, &weights, mass);
    }
}

/// All tokens of a row, at a temperature.
#[derive(Clone, Copy, Debug)]
pub(super) struct Whole<'a> {
    row: Row<'a>,
    mask: Option<&'a TokenMask>,
    scale: Scale,
    /// Mass of each block.
    masses: &'a [u64],
}

impl<'a> Whole<'a> {
    /// None where no token is allowed. `out` is for the best one, `room` for the masses of the blocks.
    pub fn new(
        row: Row<'a>,
        mask: Option<&'a TokenMask>,
        temperature: f32,
        out: &mut Vec<Candidate>,
        room: &'a mut Vec<u64>,
    ) -> Option<Self> {
        let scale = Scale::new(best(row, mask, out)?, temperature);
        room.clear();
        masses(row, mask, scale, |_, _, mass| room.push(mass));
        Some(Whole { row, mask, scale, masses: room })
    }

    /// Sum of the weights.
    pub fn mass(self) -> u64 {
        self.masses.iter().sum()
    }

    /// Tokens that are neither forbidden nor have a logit of minus infinity, with their weights, in order of ids.
    pub fn weights(self) -> impl Iterator<Item = (u32, u64)> + 'a {
        (0..self.masses.len()).flat_map(move |i| self.block(i))
    }

    /// The token at which the cumulative sum of the weights exceeds `left`, in order of ids.
    pub fn at(self, mut left: u64) -> Option<u32> {
        let block = self.masses.iter().position(|mass| {
            let here = left < *mass;
            left -= if here { 0 } else { *mass };
            here
        });
        mass::at(self.block(block?), left)
    }

    fn block(self, i: usize) -> impl Iterator<Item = (u32, u64)> {
        let (mut room, mut weights) = ([0.0; BLOCK], [0; BLOCK]);
        let logits = self.row.block(i, self.mask, &mut room);
        self.scale.weigh(logits, &mut weights);
        let allowed = logits.iter().map(|logit| *logit > f32::NEG_INFINITY).collect::<Vec<_>>();
        let tokens = ((i * BLOCK) as u32..).zip(weights).zip(allowed);
        tokens.filter(|(_, allowed)| *allowed).map(|(token, _)| token)
    }
}

#[cfg(test)]
mod tests {
    use super::super::mass::exp;
    use super::super::{Mt19937, SampleError, Sampler, SamplerOptions};
    use super::*;
    use proptest::prelude::*;

    /// Tokens that may be drawn and their weights, by the stages' definitions: all tokens, sorted.
    fn definition(o: &SamplerOptions, logits: &[f32], mask: Option<&TokenMask>) -> Vec<(u32, u64)> {
        let mut all: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
        o.logit_bias.iter().for_each(|(token, bias)| all[*token as usize].1 += bias);
        all.retain(|(token, logit)| {
            *logit > f32::NEG_INFINITY && mask.is_none_or(|mask| mask.allows(*token))
        });
        all.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap().then(a.0.cmp(&b.0)));
        let best = f64::from(all.first().map_or(0.0, |best| best.1));
        let weigh = |logit: f32, temperature: f32| {
            let units = exp((f64::from(logit) - best) / f64::from(temperature)) * UNIT as f64;
            units.round_ties_even() as u64
        };
        if o.top_p < 1.0 {
            let total: u64 = all.iter().map(|(_, logit)| weigh(*logit, 1.0)).sum();
            let mut sum = 0;
            let last = all.iter().position(|(_, logit)| {
                sum += weigh(*logit, 1.0);
                sum as f64 >= f64::from(o.top_p) * total as f64
            });
            all.truncate(last.map_or(all.len(), |last| last + 1));
        }
        if o.min_p > 0.0 {
            all.retain(|(_, logit)| weigh(*logit, 1.0) as f64 >= f64::from(o.min_p) * UNIT as f64);
        }
        all.sort_by_key(|(token, _)| *token);
        all.into_iter().map(|(token, logit)| (token, weigh(logit, o.temperature))).collect()
    }

    /// Compares probabilities and some draws with the definition's.
    fn check(o: SamplerOptions, logits: &[f32], mask: Option<&TokenMask>) {
        let want = definition(&o, logits, mask);
        let total: u64 = want.iter().map(|(_, weight)| weight).sum();
        let mut rng = Mt19937::new(5);
        let mut sampler = Sampler::new(SamplerOptions { seed: Some(5), ..o }, logits.len()).unwrap();
        if want.is_empty() {
            assert_eq!(sampler.sample(logits, mask), Err(SampleError::NothingAllowed));
            return;
        }
        let ours: Vec<(u32, f64)> = sampler.distribution(logits, mask).unwrap().iter().collect();
        let want_p: Vec<(u32, f64)> = want.iter().map(|(t, w)| (*t, *w as f64 / total as f64)).collect();
        assert_eq!(ours, want_p);
        for _ in 0..20 {
            let mut left = ((u128::from(rng.bits53()) * u128::from(total)) >> 53) as u64;
            let drawn = want.iter().find(|(_, weight)| {
                let here = left < *weight;
                left -= if here { 0 } else { *weight };
                here
            });
            assert_eq!(Some(sampler.sample(logits, mask).unwrap().token), drawn.map(|(token, _)| *token));
        }
    }

    /// Noise of several widths, few different values, one value, a peak over a tail that weighs little or nothing.
    fn rows() -> impl Strategy<Value = Vec<f32>> {
        let noise = || proptest::collection::vec(-1f32..1.0, 1..2000);
        let scaled = |by: f32| noise().prop_map(move |row| row.iter().map(|x| x * by).collect::<Vec<_>>());
        let few = noise().prop_map(|row| row.iter().map(|x| (x * 4.0).round() * 0.5).collect());
        let peak = (noise(), 5f32..40.0, any::<u16>()).prop_map(|(mut row, peak, at)| {
            let at = usize::from(at) % row.len();
            row[at] = peak;
            row
        });
        let cubed = noise().prop_map(|row| row.iter().map(|x| 30.0 * x * x * x).collect());
        let flat = (1usize..2000, -9f32..9.0).prop_map(|(n, x)| vec![x; n]);
        prop_oneof![scaled(1.0), scaled(10.0), scaled(1e30), few, peak, cubed, flat]
    }

    proptest! {
        #[test]
        fn whole_rows_are_selected_from_as_defined(
            logits in rows(),
            top_p in prop_oneof![3 => Just(1f32), 3 => 0.3f32..1.0, 1 => Just(0.0), 1 => Just(1f32.next_down())],
            min_p in prop_oneof![3 => Just(0f32), 2 => 0f32..0.2, 1 => Just(1.0), 1 => Just(1e-9), 1 => Just(1e-12), 1 => Just(1e-44)],
            temperature in prop_oneof![3 => Just(1f32), 3 => 0.1f32..3.0, 1 => Just(1e-30), 1 => Just(1e30)],
            words in proptest::collection::vec(prop_oneof![Just(0), Just(u32::MAX), any::<u32>()], 0..70),
            forbidden in proptest::collection::vec(any::<u32>(), 0..4),
        ) {
            let mut mask = TokenMask::none(logits.len());
            mask.set_words(&words);
            let mask = Some(&mask).filter(|_| words.len() > 8);
            let n = logits.len() as u32;
            let logit_bias = forbidden.iter().map(|token| (token % n, f32::NEG_INFINITY)).collect();
            let o = SamplerOptions { top_k: 0, top_p, min_p, temperature, logit_bias, ..SamplerOptions::default() };
            check(o, &logits, mask);
        }
    }

    /// Where the few tokens that are looked at first are unlike all others, the last one kept is found all the same.
    #[test]
    fn a_sample_that_deceives_changes_nothing() {
        let logits: Vec<f32> = (0..60_000u32)
            .map(|i| match i as usize % BLOCK {
                0..16 => -60.0,
                _ => (i.wrapping_mul(2_654_435_761) >> 12) as f32 * 1e-5,
            })
            .collect();
        for top_p in [0.5, 0.95, 0.999_99] {
            check(SamplerOptions { top_k: 0, top_p, ..SamplerOptions::default() }, &logits, None);
        }
    }
}
