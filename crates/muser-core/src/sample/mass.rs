//! Weights: probabilities as integers, of many tokens at once, the same with every instruction set.

use super::wide;

/// Weight of the most probable token. Integers make sums exact in any order, so the outcome cannot depend on how they
/// are added up; 2^24 tokens of this weight still fit in 64 bits. What is 2^41 times less probable than the best token
/// gets weight 0.
pub(super) const UNIT: u64 = 1 << 40;

/// What turns a logit into a weight: the largest logit, whose weight is [`UNIT`], and the temperature.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    best: f64,
    temperature: f64,
}

impl Scale {
    pub fn new(best: f32, temperature: f32) -> Self {
        Scale { best: f64::from(best), temperature: f64::from(temperature) }
    }

    /// Whether this logit and all below it weigh 0; e^-29 is a quarter of a unit.
    pub fn vanishes(self, logit: f32) -> bool {
        (f64::from(logit) - self.best) / self.temperature < -29.0
    }

    /// A logit so low that it and all below it weigh less than `weight`, which is above 0.
    pub fn below(self, weight: f64) -> f32 {
        // Rounding adds half a unit at most, which is less than a division by e takes, or gives 0.
        let x = ln(UNIT as f64 / weight).min(28.0) + 1.0;
        ((self.best - x * self.temperature) as f32).next_down()
    }

    /// Writes the weights of `logits` and returns their sum; minus infinity weighs 0.
    pub fn weigh(self, logits: &[f32], weights: &mut [u64]) -> u64 {
        wide::run(Weigh { scale: self, logits, weights })
    }
}

struct Weigh<'a> {
    scale: Scale,
    logits: &'a [f32],
    weights: &'a mut [u64],
}

impl wide::Loop for Weigh<'_> {
    type Out = u64;

    #[inline(always)]
    fn run(self) -> u64 {
        let Scale { best, temperature } = self.scale;
        // A division by 1 changes nothing and would be a fifth of the time.
        if temperature == 1.0 {
            return write(self.logits, self.weights, |logit| logit - best);
        }
        write(self.logits, self.weights, |logit| (logit - best) / temperature)
    }
}

#[inline(always)]
fn write(logits: &[f32], weights: &mut [u64], x: impl Fn(f64) -> f64) -> u64 {
    // Adding 2^52 rounds to an integer, which is then the fraction's bits.
    const ROUND: f64 = (1u64 << 52) as f64;
    let mut sum = 0;
    for (logit, weight) in logits.iter().zip(weights) {
        *weight = (exp(x(f64::from(*logit))) * UNIT as f64 + ROUND).to_bits() - ROUND.to_bits();
        sum += *weight;
    }
    sum
}

/// The token with which the sum of the weights exceeds `left`.
pub(super) fn at(tokens: impl Iterator<Item = (u32, u64)>, mut left: u64) -> Option<u32> {
    for (token, weight) in tokens {
        if left < weight {
            return Some(token);
        }
        left -= weight;
    }
    None
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
/// No branch and no conversion: the loops around it become vectors.
#[inline(always)]
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
    let [lower @ .., last] = INVERSE_FACTORIALS;
    let sum = lower.iter().rev().fold(last, |sum, c| sum * r + c);
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

    /// The definition of a weight.
    fn weight(scale: Scale, logit: f32) -> u64 {
        let units = exp((f64::from(logit) - scale.best) / scale.temperature) * UNIT as f64;
        units.round_ties_even() as u64
    }

    /// Weights and their sum.
    struct Weights<'a>(Scale, &'a [f32]);

    impl wide::Loop for Weights<'_> {
        type Out = (Vec<u64>, u64);

        #[inline(always)]
        fn run(self) -> (Vec<u64>, u64) {
            let mut weights = vec![0; self.1.len()];
            let sum = Weigh { scale: self.0, logits: self.1, weights: &mut weights }.run();
            (weights, sum)
        }
    }

    proptest! {
        #[test]
        fn every_instruction_set_weighs_the_same(
            below in proptest::collection::vec(0f32..40.0, 0..300),
            best in prop_oneof![Just(0f32), -20f32..60.0, Just(f32::MAX)],
            temperature in prop_oneof![Just(1f32), 0.01f32..4.0, Just(1e-30), Just(f32::MAX)],
        ) {
            let mut logits: Vec<f32> = below.iter().map(|below| best - below * temperature.min(4.0)).collect();
            logits.extend([best, f32::NEG_INFINITY, f32::MIN, best.next_down()]);
            let scale = Scale::new(best, temperature);
            let want: Vec<u64> = logits.iter().map(|logit| weight(scale, *logit)).collect();
            let sum = want.iter().sum::<u64>();
            for weighed in wide::each(|| Weights(scale, &logits)) {
                prop_assert_eq!(weighed, (want.clone(), sum));
            }
            for (logit, weight) in logits.iter().zip(&want) {
                prop_assert!(!scale.vanishes(*logit) || *weight == 0);
                for limit in [0.3, 1.0, 7.0, 1e6, UNIT as f64] {
                    prop_assert!(*logit > scale.below(limit) || (*weight as f64) < limit);
                }
            }
        }
    }
}
