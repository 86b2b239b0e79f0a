//! The strict contract as scalar functions: the one definition that every device's strict lane copies, bit for bit.
//!
//! Every operation is a correctly rounded f32 `+ - * /`, `sqrt` or fused multiply-add. Nothing is reassociated.

/// Lanes of every sum.
pub const LANES: usize = 32;

/// Sums 32 lanes pairwise at distances 16, 8, 4, 2, 1.
pub fn fold(mut lanes: [f32; LANES]) -> f32 {
    let mut distance = LANES / 2;
    while distance > 0 {
        for i in 0..distance {
            lanes[i] += lanes[i + distance];
        }
        distance /= 2;
    }
    lanes[0]
}

/// Dot product: lane l takes elements l, l+32, ... in order, one fused multiply-add each.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("fma") && std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: both features were just detected.
        return unsafe { dot_fma(a, b) };
    }
    dot_lanes(a, b)
}

/// The same operations, compiled where a fused multiply-add is one instruction instead of a call.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn dot_fma(a: &[f32], b: &[f32]) -> f32 {
    dot_lanes(a, b)
}

#[inline(always)]
fn dot_lanes(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let mut step = |x: &[f32], y: &[f32]| {
        for (lane, (x, y)) in lanes.iter_mut().zip(x.iter().zip(y)) {
            *lane = x.mul_add(*y, *lane);
        }
    };
    let n = a.len().min(b.len());
    let (a, b) = (a[..n].chunks_exact(LANES), b[..n].chunks_exact(LANES));
    let (rest_a, rest_b) = (a.remainder(), b.remainder());
    a.zip(b).for_each(|(x, y)| step(x, y));
    step(rest_a, rest_b);
    fold(lanes)
}

/// Sum with the same lanes as [`dot`], by plain additions.
pub fn sum(a: impl Iterator<Item = f32>) -> f32 {
    let mut lanes = [0f32; LANES];
    for (i, x) in a.enumerate() {
        lanes[i % LANES] += x;
    }
    fold(lanes)
}

/// 1 / sqrt(mean of squares + eps): the factor of an RMS norm.
pub fn rms_factor(x: &[f32], eps: f32) -> f32 {
    1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt()
}

/// e^x by range reduction to |r| <= ln2/2 and a degree-6 polynomial; 0 below -87.3, infinity above 88.7.
pub fn exp(x: f32) -> f32 {
    // Cody-Waite split of ln 2; 1.5 * 2^23 rounds to the nearest integer, ties to even.
    const LN2_HI: f32 = 0.693_145_75;
    const LN2_LO: f32 = 1.428_606_8e-6;
    const ROUND: f32 = 12_582_912.0;
    if x.is_nan() {
        return x;
    }
    if x > 88.722_83 {
        return f32::INFINITY;
    }
    if x < -87.336_54 {
        return 0.0;
    }
    let n = x.mul_add(std::f32::consts::LOG2_E, ROUND) - ROUND;
    let r = n.mul_add(-LN2_LO, n.mul_add(-LN2_HI, x));
    // Taylor coefficients 1/6!, 1/5!, ...: the remainder at ln2/2 is below half a unit in the last place.
    let mut p = 1.0 / 720.0f32;
    p = p.mul_add(r, 1.0 / 120.0);
    p = p.mul_add(r, 1.0 / 24.0);
    p = p.mul_add(r, 1.0 / 6.0);
    p = p.mul_add(r, 0.5);
    p = p.mul_add(r, 1.0);
    p = p.mul_add(r, 1.0);
    // n is in -126..=128: two factors, so that 2^128 never has to be a float of its own.
    let half = (n as i32) >> 1;
    let pow2 = |k: i32| f32::from_bits(((k + 127) as u32) << 23);
    p * pow2(half) * pow2(n as i32 - half)
}

/// 1 / (1 + e^-x).
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// x / (1 + e^-x).
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// tanh by e^(-2|x|): (1 - e) / (1 + e) with the sign of x.
pub fn tanh(x: f32) -> f32 {
    let e = exp(-2.0 * x.abs());
    ((1.0 - e) / (1.0 + e)).copysign(x)
}

/// cap * tanh(x * scale / cap), or x * scale without a cap.
pub fn scale_cap(x: f32, scale: f32, cap: Option<f32>) -> f32 {
    match cap {
        Some(cap) => cap * tanh(x * scale / cap),
        None => x * scale,
    }
}

/// Rotates the pair (a, b) by the angle whose cosine and sine are given.
pub fn rotate(a: f32, b: f32, cos: f32, sin: f32) -> (f32, f32) {
    (a.mul_add(cos, -(b * sin)), a.mul_add(sin, b * cos))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The platform's f64 functions, rounded: an independent reference.
    #[test]
    fn functions_are_close_to_f64() {
        let mut worst = 0f64;
        for i in -8_700..8_800 {
            let x = i as f32 * 0.01;
            let want = (x as f64).exp();
            worst = worst.max(((exp(x) as f64 - want) / want).abs());
            assert!((tanh(x) as f64 - (x as f64).tanh()).abs() < 3e-7, "tanh {x}");
            assert!((sigmoid(x) as f64 - 1.0 / (1.0 + (-x as f64).exp())).abs() < 3e-7, "sigmoid {x}");
        }
        assert!(worst < 2.5e-7, "worst relative error of exp: {worst}");
        assert_eq!((exp(0.0), exp(-100.0), exp(100.0)), (1.0, 0.0, f32::INFINITY));
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn dot_follows_the_lane_order() {
        // 1e8 in lane 0 twice with opposite signs cancels exactly only if both go through one lane.
        let mut a = vec![0f32; 64];
        (a[0], a[32], a[1]) = (1e8, -1e8, 1.0);
        assert_eq!(dot(&a, &[1.0; 64]), 1.0);
        (a[32], a[33]) = (0.0, -1e8);
        assert_eq!(dot(&a, &[1.0; 64]), 1e8 + (1.0 - 1e8));
    }
}
