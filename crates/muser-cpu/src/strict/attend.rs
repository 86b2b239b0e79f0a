//! Attention of the strict lane.

use super::dot::dots;
use crate::isa::Isa;
use crate::kernels::attend::{Attention, Span};
use crate::kv::{Cache, decode, padded};
use crate::math::{exp, sigmoid};
use crate::pool::Pool;
use crate::shared::SharedMut;
use crate::simd::{Kernel, Simd, dispatch};
use muser_core::strict::{LANES, dot, sum};
use std::cell::RefCell;

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// A thread's memory for attention.
#[derive(Default)]
struct Scratch {
    row: Vec<f32>,
    /// `[query head][key]`.
    weights: Vec<Vec<f32>>,
    /// `[query head][lane][element]`.
    out: Vec<f32>,
}

/// A = attention * sigmoid(gate), for all rows; one row and KV head a unit.
pub fn attend(pool: &Pool, isa: Isa, a: Attention<'_>, spans: &[Span], caches: &[&Cache], out: &mut [f32]) {
    let out = SharedMut::new(out);
    let rows: Vec<(usize, usize)> =
        spans.iter().enumerate().flat_map(|(s, span)| span.rows.clone().map(move |r| (s, r))).collect();
    pool.run(rows.len() * a.kv_heads, |unit| {
        let ((span, row), kv_head) = (rows[unit / a.kv_heads], unit % a.kv_heads);
        let width = a.group * a.head_dim;
        let at = (row * a.kv_heads + kv_head) * width;
        // SAFETY: each row and KV head belongs to one unit.
        let to = unsafe { out.part(at, width) };
        SCRATCH.with_borrow_mut(|scratch| {
            dispatch(
                isa,
                Attend { a: &a, cache: caches[span], row, kv_head, q: &a.q[at..at + width], scratch, to },
            );
        });
        if let Some(gate) = a.gate {
            to.iter_mut().zip(&gate[at..]).for_each(|(a, g)| *a *= sigmoid(*g));
        }
    });
}

struct Attend<'a> {
    a: &'a Attention<'a>,
    cache: &'a Cache,
    row: usize,
    kv_head: usize,
    q: &'a [f32],
    scratch: &'a mut Scratch,
    to: &'a mut [f32],
}

impl Kernel for Attend<'_> {
    type Out = ();
    #[inline(always)]
    fn eval<S: Simd>(self, s: S) {
        let Attend { a, cache, row, kv_head, q, scratch, to } = self;
        let n = a.head_dim;
        scratch.row.resize(padded(a.kv, n), 0.0);
        scratch.weights.resize(a.group, vec![]);
        scratch.weights.iter_mut().for_each(Vec::clear);
        for pos in a.visible[row].clone() {
            decode(s, a.kv, cache.head(0, pos, kv_head), &mut scratch.row);
            let key = &scratch.row[..n];
            for (q, weights) in q.chunks_exact(n).zip(&mut scratch.weights) {
                weights.push(if n.is_multiple_of(LANES) { dots(s, q, key) } else { dot(q, key) } * a.scale);
            }
        }
        for weights in &mut scratch.weights {
            let max = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            weights.iter_mut().for_each(|w| *w = exp(*w - max));
        }
        scratch.out.clear();
        scratch.out.resize(a.group * LANES * n, 0.0);
        for (j, pos) in a.visible[row].clone().enumerate() {
            decode(s, a.kv, cache.head(1, pos, kv_head), &mut scratch.row);
            for (weights, lanes) in scratch.weights.iter().zip(scratch.out.chunks_exact_mut(LANES * n)) {
                let weight = weights[j];
                let lane = &mut lanes[j % LANES * n..][..n];
                lane.iter_mut().zip(&scratch.row).for_each(|(out, v)| *out = weight.mul_add(*v, *out));
            }
        }
        let heads = to.chunks_exact_mut(n).zip(&scratch.weights).zip(scratch.out.chunks_exact_mut(LANES * n));
        for ((to, weights), lanes) in heads {
            let total = sum(weights.iter().copied());
            let mut distance = LANES / 2;
            while distance > 0 {
                let (near, far) = lanes.split_at_mut(distance * n);
                near.iter_mut().zip(far).for_each(|(near, far)| *near += *far);
                distance /= 2;
            }
            to.iter_mut().zip(&*lanes).for_each(|(to, out)| *to = out / total);
        }
    }
}
