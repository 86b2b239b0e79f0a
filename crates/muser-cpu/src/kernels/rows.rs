//! What is done row by row between multiplications: embedding, norms, tails, QK-norm and rotation.

use crate::isa::Isa;
use crate::math::Scale;
use crate::simd::{Kernel, Simd, dispatch};
use muser_core::RopePairs;
use muser_core::strict::rms_factor;

/// `to = rms(from) * weight`.
pub fn norm(isa: Isa, from: &[f32], weight: &[f32], eps: f32, to: &mut [f32]) {
    dispatch(isa, Scale { from, factor: rms_factor(from, eps), weight, to });
}

/// `x += rms(p) * post` (or `x += p`), then `h = rms(x) * next`. `h` is used as scratch before.
pub fn tail(
    isa: Isa,
    p: &[f32],
    post: Option<(&[f32], f32)>,
    next: (&[f32], f32),
    x: &mut [f32],
    h: &mut [f32],
) {
    match post {
        Some((weight, eps)) => {
            norm(isa, p, weight, eps, h);
            x.iter_mut().zip(&*h).for_each(|(x, p)| *x += p);
        }
        None => x.iter_mut().zip(p).for_each(|(x, p)| *x += p),
    }
    norm(isa, x, next.0, next.1, h);
}

/// RMS norm of every head in place, then rotation by the row's angles: `angles` holds (cosine, sine) of each pair.
pub fn norm_rotate(
    isa: Isa,
    heads: &mut [f32],
    weight: &[f32],
    eps: f32,
    rope: Option<(RopePairs, &[(f32, f32)])>,
) {
    dispatch(isa, NormRotate { heads, weight, eps, rope });
}

struct NormRotate<'a> {
    heads: &'a mut [f32],
    weight: &'a [f32],
    eps: f32,
    rope: Option<(RopePairs, &'a [(f32, f32)])>,
}

impl Kernel for NormRotate<'_> {
    type Out = ();
    #[inline(always)]
    fn eval<S: Simd>(self, _: S) {
        for head in self.heads.chunks_exact_mut(self.weight.len()) {
            let factor = rms_factor(head, self.eps);
            head.iter_mut().zip(self.weight).for_each(|(v, w)| *v = *v * factor * w);
            let Some((pairs, angles)) = self.rope else { continue };
            let rotate = |a: f32, b: f32, (cos, sin): (f32, f32)| {
                (a.mul_add(cos, -(b * sin)), a.mul_add(sin, b * cos))
            };
            match pairs {
                RopePairs::Interleaved => {
                    for ([a, b], angle) in head.as_chunks_mut::<2>().0.iter_mut().zip(angles) {
                        (*a, *b) = rotate(*a, *b, *angle);
                    }
                }
                RopePairs::Halves => {
                    let (first, second) = head.split_at_mut(angles.len());
                    for ((a, b), angle) in first.iter_mut().zip(second).zip(angles) {
                        (*a, *b) = rotate(*a, *b, *angle);
                    }
                }
            }
        }
    }
}
