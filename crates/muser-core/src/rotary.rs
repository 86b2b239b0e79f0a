//! The angles of rotary embeddings, the same bits on every machine: no function of the platform's mathematics library.
//!
//! A frequency is a power of the `head_dim / 2`-th root of 1 / theta, found by Newton's method and multiplied up in pairs of f64, of which
//! the sum counts (double-double). An angle is a position times a frequency, rounded to f64; its cosine and sine are rounded to f32.

/// Cosines and sines of a head's pairs at every position.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotary {
    frequencies: Vec<f64>,
}

impl Rotary {
    /// For heads of `head_dim` values, the pair i of which turns by theta^(-2i / head_dim) a position.
    pub fn new(head_dim: usize, theta: f64) -> Self {
        let pairs = head_dim / 2;
        let base = root(theta, pairs);
        let powers = std::iter::successors(Some(Pair(1.0, 0.0)), |power| Some(power.times(base)));
        Rotary { frequencies: powers.take(pairs).map(|power| power.0).collect() }
    }

    /// Cosine and sine of pair `i` at a position.
    pub fn at(&self, position: u32, i: usize) -> (f32, f32) {
        cos_sin(f64::from(position) * self.frequencies[i])
    }
}

/// A number as the sum of two, the second at most half the last bit of the first.
#[derive(Clone, Copy)]
struct Pair(f64, f64);

impl Pair {
    /// `a + b`, of which `a` is the larger.
    fn sum(a: f64, b: f64) -> Self {
        let sum = a + b;
        Pair(sum, b - (sum - a))
    }

    fn times(self, other: Pair) -> Pair {
        let product = self.0 * other.0;
        let rest = self.0.mul_add(other.0, -product);
        Pair::sum(product, rest + (self.0 * other.1 + self.1 * other.0))
    }
}

/// (1 / theta)^(1 / n).
fn root(theta: f64, n: usize) -> Pair {
    let mut x = Pair(1.0, 0.0);
    // From 1 downwards each step takes off a share of 1 / n at most, then the digits double.
    for _ in 0..n.saturating_mul(16).max(64) {
        let power = (1..n).fold(x, |power, _| power.times(x));
        let unit = power.times(Pair(theta, 0.0));
        let step = ((unit.0 - 1.0) + unit.1) / (n as f64 * unit.0);
        x = Pair::sum(x.0, x.1 - x.0 * step);
        if step.abs() < 1e-25 {
            break;
        }
    }
    x
}

/// 1 / k!, the coefficients of both series. At a quarter of a turn's half the first term left out is 8e-20.
const INVERSE_FACTORIALS: [f64; 19] = {
    let mut c = [1.0; 19];
    let mut k = 1;
    while k < c.len() {
        c[k] = c[k - 1] / k as f64;
        k += 1;
    }
    c
};

/// Cosine and sine of an angle from 0 to 2^18.
fn cos_sin(angle: f64) -> (f32, f32) {
    // A quarter of a turn in three parts. The first two have 33 bits, so that their products with a number of quarters are exact.
    const QUARTER: [f64; 3] =
        [1.570_796_326_734_125_6, 6.077_100_506_303_966e-11, 2.022_266_248_795_950_6e-21];
    let quarters = (angle * std::f64::consts::FRAC_2_PI).round();
    let rest = angle - quarters * QUARTER[0];
    let taken = quarters * QUARTER[1];
    let high = rest - taken;
    let low = (rest - high) - taken - quarters * QUARTER[2];
    let Pair(x, low) = Pair::sum(high, low);
    let square = x * x;
    let series = |first: usize| {
        let terms = INVERSE_FACTORIALS.iter().skip(first).step_by(2).rev();
        terms.fold(0.0, |sum, c| c - square * sum)
    };
    let sin = x + (low * (1.0 - square / 2.0) - x * square * series(3));
    let cos = 1.0 - (square * series(2) + x * low);
    let (cos, sin) = match quarters as u32 % 4 {
        0 => (cos, sin),
        1 => (-sin, cos),
        2 => (-cos, -sin),
        _ => (sin, -cos),
    };
    (cos as f32, sin as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bits of cosine and sine at the release's theta: power, cosine and sine with 60 digits, the angle and the results rounded once.
    #[test]
    fn angles_have_the_bits_of_exact_ones() {
        let rotary = Rotary::new(128, 500_000.0);
        for (position, i, cos, sin) in [
            (0, 5, 0x3f80_0000, 0),
            (1, 0, 0x3f0a_5140, 0x3f57_6aa4),
            (1, 63, 0x3f80_0000, 0x3624_c2ff),
            (7, 13, 0x3f62_3e03, 0x3eef_9636),
            (2047, 1, 0xbf49_92da, 0x3f1d_cf6b),
            (32_767, 20, 0xbf27_1a8e, 0x3f41_f064),
            (65_537, 40, 0x3f23_de55, 0xbf44_ae25),
            // Nearly a whole number of half turns.
            (104_348, 0, 0xbf80_0000, 0xb738_cd24),
            (131_071, 0, 0xbf51_675e, 0xbf13_430a),
            (131_071, 1, 0xbf51_3ba2, 0x3f13_8127),
            (131_071, 63, 0x3f72_dbee, 0x3ea1_ee7a),
        ] {
            let (c, s) = rotary.at(position, i);
            assert_eq!((c.to_bits(), s.to_bits()), (cos, sin), "position {position}, pair {i}: {c} {s}");
        }
    }

    /// The platform's functions, within a step of f32.
    #[test]
    fn angles_are_close_to_the_platforms() {
        for (head_dim, theta) in [(128, 500_000.0), (64, 1e4), (96, 500_000.0), (2, 7.0), (64, 0.5)] {
            let rotary = Rotary::new(head_dim, theta);
            for position in (0..131_072).step_by(97) {
                for i in 0..head_dim / 2 {
                    let angle = f64::from(position) * f64::powf(theta, -2.0 * i as f64 / head_dim as f64);
                    let (cos, sin) = rotary.at(position, i);
                    let apart =
                        (f64::from(cos) - angle.cos()).abs().max((f64::from(sin) - angle.sin()).abs());
                    assert!(
                        apart < 6.1e-8,
                        "{head_dim}, {theta}: position {position}, pair {i} is {apart} off"
                    );
                }
            }
        }
    }
}
