//! The strict lane: `muser_core::strict`, vectorised, bit for bit. A lane here is one of the contract's 32.

use crate::isa::Isa;
use crate::kernels::attend::{Attention, Span};
use crate::kernels::matmul::Context;
use crate::kv::{Cache, decode, padded};
use crate::math::{exp, sigmoid};
use crate::pool::Pool;
use crate::shared::SharedMut;
use crate::simd::{Kernel, Simd, dispatch};
use muser_core::strict::{LANES, dot, fold, sum};
use muser_core::{ModelError, Slot, TensorView};
use std::cell::RefCell;
use std::sync::Mutex;

thread_local! {
    static ROW: RefCell<Vec<f32>> = const { RefCell::new(vec![]) };
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// A weight of the file and the rows (`tensor.rows` wide) that take its products.
pub struct Job<'a> {
    /// Which weight.
    pub slot: Slot,
    /// Result.
    pub out: &'a mut [f32],
}

/// Rows of a weight that one unit takes.
const UNIT: usize = 16;

/// Each weight, dequantised row by row, times every row of `input`.
pub fn project(ctx: Context<'_>, input: &[f32], jobs: &mut [Job<'_>]) -> Result<(), ModelError> {
    let jobs = jobs
        .iter_mut()
        .map(|j| Ok((ctx.model.tensor(j.slot)?, SharedMut::new(&mut *j.out))))
        .collect::<Result<Vec<(TensorView<'_>, SharedMut<'_, f32>)>, ModelError>>()?;
    let units: usize = jobs.iter().map(|(t, _)| t.rows.div_ceil(UNIT)).sum();
    let error = Mutex::new(None);
    ctx.pool.run(units, |mut unit| {
        for (t, out) in &jobs {
            let here = t.rows.div_ceil(UNIT);
            if unit >= here {
                unit -= here;
                continue;
            }
            let rows = unit * UNIT..t.rows.min((unit + 1) * UNIT);
            let done = ROW.with_borrow_mut(|weights| weight_rows(ctx.isa, t, rows, input, weights, out));
            if let (Err(e), Ok(mut slot)) = (done, error.lock()) {
                slot.get_or_insert(e);
            }
            return;
        }
    });
    error.into_inner().ok().flatten().map_or(Ok(()), Err)
}

fn weight_rows(
    isa: Isa,
    t: &TensorView<'_>,
    rows: std::ops::Range<usize>,
    input: &[f32],
    weights: &mut Vec<f32>,
    out: &SharedMut<'_, f32>,
) -> Result<(), ModelError> {
    let bytes = t.row_bytes();
    weights.resize(t.cols, 0.0);
    for r in rows {
        muser_format::dequantize(t.dtype, &t.data[r * bytes..(r + 1) * bytes], weights)?;
        for (first, x) in input.chunks(4 * t.cols).enumerate() {
            let mut y = [0.0; 4];
            if t.cols.is_multiple_of(LANES) {
                match x.len() / t.cols {
                    1 => y[..1].copy_from_slice(&dispatch(isa, Dots::<1> { w: weights, x })),
                    2 => y[..2].copy_from_slice(&dispatch(isa, Dots::<2> { w: weights, x })),
                    3 => y[..3].copy_from_slice(&dispatch(isa, Dots::<3> { w: weights, x })),
                    _ => y = dispatch(isa, Dots::<4> { w: weights, x }),
                }
            } else {
                y.iter_mut().zip(x.chunks_exact(t.cols)).for_each(|(y, x)| *y = dot(weights, x));
            }
            for (c, y) in y[..x.len() / t.cols].iter().enumerate() {
                // SAFETY: each unit has its own weight rows, so its own element of every row.
                let to = unsafe { out.part((4 * first + c) * t.rows + r, 1) };
                to[0] = if t.scale == 1.0 { *y } else { y * t.scale };
            }
        }
    }
    Ok(())
}

/// Dot products of `w` with `NC` rows; the length is a multiple of 32.
struct Dots<'a, const NC: usize> {
    w: &'a [f32],
    x: &'a [f32],
}

impl<const NC: usize> Kernel for Dots<'_, NC> {
    type Out = [f32; NC];
    #[inline(always)]
    fn eval<S: Simd>(self, s: S) -> [f32; NC] {
        let n = self.w.len();
        let x: [&[[f32; 16]]; NC] = std::array::from_fn(|c| self.x[c * n..][..n].as_chunks().0);
        let mut acc = [[s.splat_f(0.0); 2]; NC];
        for (i, w) in self.w.as_chunks::<LANES>().0.iter().enumerate() {
            let w = w.as_chunks::<16>().0;
            for half in 0..2 {
                let w = s.load_f(&w[half]);
                for c in 0..NC {
                    acc[c][half] = s.fma(w, s.load_f(&x[c][2 * i + half]), acc[c][half]);
                }
            }
        }
        acc.map(|[low, high]| {
            let mut lanes = [0.0; LANES];
            let halves = lanes.as_chunks_mut::<16>().0;
            s.store_f(&mut halves[0], low);
            s.store_f(&mut halves[1], high);
            fold(lanes)
        })
    }
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
                weights.push(
                    if n.is_multiple_of(LANES) { Dots::<1> { w: q, x: key }.eval(s)[0] } else { dot(q, key) }
                        * a.scale,
                );
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
