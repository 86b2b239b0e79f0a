//! The strict contract's functions without branches, so that loops over them become vector code. Bits equal those of
//! `muser_core::strict`; a test compares them.

use crate::simd::{Kernel, Simd};

/// `muser_core::strict::exp`.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LN2_HI: f32 = 0.693_145_75;
    const LN2_LO: f32 = 1.428_606_8e-6;
    const ROUND: f32 = 12_582_912.0;
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    // The low bits of the shifted number are the integer itself.
    let i = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let r = n.mul_add(-LN2_LO, n.mul_add(-LN2_HI, x));
    let mut p = 1.0 / 720.0f32;
    p = p.mul_add(r, 1.0 / 120.0);
    p = p.mul_add(r, 1.0 / 24.0);
    p = p.mul_add(r, 1.0 / 6.0);
    p = p.mul_add(r, 0.5);
    p = p.mul_add(r, 1.0);
    p = p.mul_add(r, 1.0);
    let half = i >> 1;
    let pow2 = |k: i32| f32::from_bits((k.wrapping_add(127) as u32) << 23);
    let y = p * pow2(half) * pow2(i.wrapping_sub(half));
    let y = if x > 88.722_83 { f32::INFINITY } else { y };
    let y = if x < -87.336_54 { 0.0 } else { y };
    if x.is_nan() { x } else { y }
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// x / (1 + e^-x).
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// cap * tanh(x * scale / cap).
#[inline(always)]
pub fn cap(x: f32, scale: f32, cap: f32) -> f32 {
    let y = x * scale / cap;
    let e = exp(-2.0 * y.abs());
    cap * ((1.0 - e) / (1.0 + e)).copysign(y)
}

/// `gate = silu(gate) * up`.
pub struct SiluMul<'a> {
    /// Gate, overwritten.
    pub gate: &'a mut [f32],
    /// Up.
    pub up: &'a [f32],
}

impl Kernel for SiluMul<'_> {
    type Out = ();
    #[inline(always)]
    fn eval<S: Simd>(self, _: S) {
        self.gate.iter_mut().zip(self.up).for_each(|(g, u)| *g = silu(*g) * u);
    }
}

/// `a = a * sigmoid(gate)`.
pub struct Gate<'a> {
    /// Attention output.
    pub a: &'a mut [f32],
    /// Gate before the sigmoid.
    pub gate: &'a [f32],
}

impl Kernel for Gate<'_> {
    type Out = ();
    #[inline(always)]
    fn eval<S: Simd>(self, _: S) {
        self.a.iter_mut().zip(self.gate).for_each(|(a, g)| *a *= sigmoid(*g));
    }
}

/// `x = cap * tanh(x * scale / cap)`, or `x * scale`.
pub struct ScaleCap<'a> {
    /// Logits.
    pub x: &'a mut [f32],
    /// Factor.
    pub scale: f32,
    /// Soft cap.
    pub cap: Option<f32>,
}

impl Kernel for ScaleCap<'_> {
    type Out = ();
    #[inline(always)]
    fn eval<S: Simd>(self, _: S) {
        match self.cap {
            Some(c) => self.x.iter_mut().for_each(|x| *x = cap(*x, self.scale, c)),
            None => self.x.iter_mut().for_each(|x| *x *= self.scale),
        }
    }
}

/// `to = from * factor * weight`, in that order.
pub struct Scale<'a> {
    /// Row to scale.
    pub from: &'a [f32],
    /// Factor of the whole row.
    pub factor: f32,
    /// Weight of each element.
    pub weight: &'a [f32],
    /// Result.
    pub to: &'a mut [f32],
}

impl Kernel for Scale<'_> {
    type Out = ();
    #[inline(always)]
    fn eval<S: Simd>(self, _: S) {
        for ((to, x), w) in self.to.iter_mut().zip(self.from).zip(self.weight) {
            *to = x * self.factor * w;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use crate::simd::dispatch;
    use muser_core::strict;

    struct Exp<'a>(&'a mut [f32]);

    impl Kernel for Exp<'_> {
        type Out = ();
        #[inline(always)]
        fn eval<S: Simd>(self, _: S) {
            self.0.iter_mut().for_each(|x| *x = exp(*x));
        }
    }

    #[test]
    fn bits_equal_the_contract() {
        let special =
            [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, 88.8, -87.4, 1e-40, 3e38, -3e38];
        // A stride through all floats.
        let all: Vec<f32> =
            (0..200_003u32).map(|i| f32::from_bits(i.wrapping_mul(21_477))).chain(special).collect();
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            let mut got = all.clone();
            dispatch(isa, Exp(&mut got));
            let (mut gate, mut silued, mut capped) = (vec![1.0; all.len()], all.clone(), all.clone());
            dispatch(isa, Gate { a: &mut gate, gate: &all });
            dispatch(isa, SiluMul { gate: &mut silued, up: &vec![1.0; all.len()] });
            dispatch(isa, ScaleCap { x: &mut capped, scale: 0.196, cap: Some(20.0) });
            for (i, x) in all.iter().enumerate() {
                let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                assert!(same(got[i], strict::exp(*x)), "{isa}: exp {x}");
                assert!(same(gate[i], strict::sigmoid(*x)), "{isa}: sigmoid {x}");
                assert!(same(silued[i], strict::silu(*x)), "{isa}: silu {x}");
                assert!(same(capped[i], strict::scale_cap(*x, 0.196, Some(20.0))), "{isa}: cap {x}");
            }
        }
    }
}
