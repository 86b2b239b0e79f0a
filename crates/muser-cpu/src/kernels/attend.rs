//! Attention of the serving lane: a lane is a query (a row of the batch and one of its heads), so 16 queries that share
//! a KV head read each key once.
//!
//! Keys come in tiles of 32 and chunks of 1,024, both counted from position 0; a chunk has its own running maximum, and
//! chunks are merged in order. What a query gets depends on what it sees and on nothing else, neither the batch nor the
//! threads: a tile that it does not see leaves its numbers as they were.

use crate::isa::Isa;
use crate::kv::{Cache, decode, padded};
use crate::math::{exp, sigmoid};
use crate::pool::Pool;
use crate::shared::SharedMut;
use crate::simd::{Kernel, LANES, Simd, dispatch};
use muser_core::{KvType, SeqId};
use std::cell::RefCell;
use std::ops::Range;

/// Keys of a tile.
const TILE: usize = 32;
/// Keys of a chunk.
const CHUNK: usize = 1024;
/// Vectors of queries that share one conversion of a tile.
const GROUPS: usize = 4;
/// Below every score that is seen; finite, so that differences of maxima are numbers.
const NONE: f32 = -1e30;

/// Rows of one sequence in the batch.
#[derive(Clone, Debug)]
pub struct Span {
    /// The sequence.
    pub seq: SeqId,
    /// Rows of the batch.
    pub rows: Range<usize>,
}

/// Shape and operands of one attention step.
#[derive(Clone, Copy)]
pub struct Attention<'a> {
    /// Elements of a head.
    pub head_dim: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Query heads that share a key head.
    pub group: usize,
    /// Factor on scores.
    pub scale: f32,
    /// Storage of keys and values.
    pub kv: KvType,
    /// Positions that each row of the batch sees.
    pub visible: &'a [Range<usize>],
    /// Queries, `rows x heads x head_dim`.
    pub q: &'a [f32],
    /// Gates of the same shape.
    pub gate: Option<&'a [f32]>,
}

/// Running softmax of the queries of a unit: maxima, denominators, outputs `[vector][element][lane]`.
#[derive(Default, Clone)]
struct Partial {
    max: Vec<[f32; LANES]>,
    sum: Vec<[f32; LANES]>,
    out: Vec<[f32; LANES]>,
}

impl Partial {
    fn reset(&mut self, vectors: usize, elements: usize) {
        self.max.clear();
        self.max.resize(vectors, [NONE; LANES]);
        self.sum.clear();
        self.sum.resize(vectors, [0.0; LANES]);
        self.out.clear();
        self.out.resize(vectors * elements, [0.0; LANES]);
    }
}

/// A thread's memory.
#[derive(Default)]
struct Scratch {
    q: Vec<[f32; LANES]>,
    keys: Vec<f32>,
    weights: Vec<[f32; LANES]>,
    chunk: Partial,
    total: Partial,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// A unit's queries: up to `GROUPS` vectors of one span and KV head.
#[derive(Clone, Copy)]
struct Unit {
    span: usize,
    kv_head: usize,
    /// First query of the span and KV head, counted row by row.
    first: usize,
    /// Queries.
    count: usize,
}

/// A = attention * sigmoid(gate), for all rows.
pub fn attend(pool: &Pool, isa: Isa, a: Attention<'_>, spans: &[Span], caches: &[&Cache], out: &mut [f32]) {
    let mut units = vec![];
    for (s, span) in spans.iter().enumerate() {
        let queries = span.rows.len() * a.group;
        for kv_head in 0..a.kv_heads {
            for first in (0..queries).step_by(GROUPS * LANES) {
                units.push(Unit { span: s, kv_head, first, count: (GROUPS * LANES).min(queries - first) });
            }
        }
    }
    let out = SharedMut::new(out);
    let run = |unit: &Unit, chunks: Option<usize>, partial: Option<&mut Partial>| {
        SCRATCH.with_borrow_mut(|scratch| {
            let queries = Queries::new(&a, &spans[unit.span], unit);
            dispatch(
                isa,
                Attend { a: &a, queries: &queries, cache: caches[unit.span], only: chunks, scratch },
            );
            match partial {
                Some(partial) => std::mem::swap(partial, &mut scratch.chunk),
                None => dispatch(isa, Finish { a: &a, queries: &queries, total: &scratch.total, out: &out }),
            }
        });
    };
    // With fewer units than threads can share, a unit's chunks are spread too, and merged afterwards.
    let chunks = |unit: &Unit| Queries::new(&a, &spans[unit.span], unit).chunks();
    let longest = units.iter().map(|u| chunks(u).len()).max().unwrap_or(0);
    if pool.threads() == 1 || units.len() >= 4 * pool.threads() || longest < 2 {
        pool.run(units.len(), |i| run(&units[i], None, None));
        return;
    }
    let pieces: Vec<(usize, usize)> =
        units.iter().enumerate().flat_map(|(u, unit)| chunks(unit).map(move |c| (u, c))).collect();
    let mut partials = vec![Partial::default(); pieces.len()];
    let shared = SharedMut::new(&mut partials);
    pool.run(pieces.len(), |i| {
        // SAFETY: each unit has its own element.
        let partial = unsafe { shared.part(i, 1) };
        run(&units[pieces[i].0], Some(pieces[i].1), partial.first_mut());
    });
    let partials = &partials;
    pool.run(units.len(), |u| {
        let queries = Queries::new(&a, &spans[units[u].span], &units[u]);
        let mut total = Partial::default();
        total.reset(queries.vectors, queries.elements);
        for (_, partial) in pieces.iter().zip(partials).filter(|((unit, _), _)| *unit == u) {
            dispatch(isa, Merge { total: &mut total, part: partial, elements: queries.elements });
        }
        dispatch(isa, Finish { a: &a, queries: &queries, total: &total, out: &out });
    });
}

/// Where a unit's lanes stand.
struct Queries {
    /// Row of the batch of each lane, the last one repeated past the end.
    rows: Vec<usize>,
    /// Query head of each lane.
    heads: Vec<usize>,
    /// Lanes that mean something.
    count: usize,
    kv_head: usize,
    vectors: usize,
    /// Elements of a head, padded.
    elements: usize,
    /// Visible positions of each lane.
    visible: Vec<Range<usize>>,
    /// Positions that any lane sees.
    all: Range<usize>,
    /// Positions that every lane sees.
    common: Range<usize>,
}

impl Queries {
    fn new(a: &Attention<'_>, span: &Span, unit: &Unit) -> Self {
        let vectors = unit.count.div_ceil(LANES);
        let lane = |i: usize| unit.first + i.min(unit.count - 1);
        let rows: Vec<usize> = (0..vectors * LANES).map(|i| span.rows.start + lane(i) / a.group).collect();
        let heads = (0..vectors * LANES).map(|i| unit.kv_head * a.group + lane(i) % a.group).collect();
        let visible: Vec<_> = rows.iter().map(|r| a.visible[*r].clone()).collect();
        let one = visible[0].clone();
        let all = visible.iter().fold(one.clone(), |r, v| r.start.min(v.start)..r.end.max(v.end));
        let common = visible.iter().fold(one, |r, v| r.start.max(v.start)..r.end.min(v.end));
        let elements = padded(a.kv, a.head_dim);
        Queries {
            rows,
            heads,
            count: unit.count,
            kv_head: unit.kv_head,
            vectors,
            elements,
            visible,
            all,
            common,
        }
    }

    fn chunks(&self) -> Range<usize> {
        self.all.start / CHUNK..self.all.end.div_ceil(CHUNK)
    }
}

/// Chunks of a unit: all of them merged into `scratch.total`, or one into `scratch.chunk`.
struct Attend<'a> {
    a: &'a Attention<'a>,
    queries: &'a Queries,
    cache: &'a Cache,
    only: Option<usize>,
    scratch: &'a mut Scratch,
}

impl Kernel for Attend<'_> {
    type Out = ();
    #[inline(always)]
    fn eval<S: Simd>(self, s: S) {
        let Attend { a, queries, cache, only, scratch } = self;
        let (n, vectors) = (queries.elements, queries.vectors);
        // Queries as [vector][element][lane], scaled.
        scratch.q.clear();
        scratch.q.resize(vectors * n, [0.0; LANES]);
        for (lane, (row, head)) in queries.rows.iter().zip(&queries.heads).enumerate() {
            let width = a.group * a.kv_heads * a.head_dim;
            let q = &a.q[row * width + head * a.head_dim..][..a.head_dim];
            for (to, q) in scratch.q[lane / LANES * n..][..a.head_dim].iter_mut().zip(q) {
                to[lane % LANES] = q * a.scale;
            }
        }
        scratch.keys.resize(TILE * n, 0.0);
        scratch.weights.resize(vectors * TILE, [0.0; LANES]);
        if let Some(chunk) = only {
            scratch.chunk.reset(vectors, n);
            one_chunk(s, a, queries, cache, chunk, scratch);
            return;
        }
        scratch.total.reset(vectors, n);
        for chunk in queries.chunks() {
            scratch.chunk.reset(vectors, n);
            one_chunk(s, a, queries, cache, chunk, scratch);
            Merge { total: &mut scratch.total, part: &scratch.chunk, elements: n }.eval(s);
        }
    }
}

#[inline(always)]
fn one_chunk<S: Simd>(
    s: S,
    a: &Attention<'_>,
    queries: &Queries,
    cache: &Cache,
    chunk: usize,
    scratch: &mut Scratch,
) {
    let n = queries.elements;
    let keys = queries.all.start.max(chunk * CHUNK)..queries.all.end.min((chunk + 1) * CHUNK);
    for tile in keys.start / TILE..keys.end.div_ceil(TILE) {
        let first = tile * TILE;
        let held = keys.start.max(first)..keys.end.min(first + TILE);
        let rows = held.start - first..held.end - first;
        let at = rows.start * n..rows.end * n;
        load(s, a.kv, cache, (0, queries.kv_head), held.clone(), &mut scratch.keys[at.clone()]);
        let masked = held.start < queries.common.start || held.end > queries.common.end || held.len() < TILE;
        for v in 0..queries.vectors {
            let weights = scratch.weights[v * TILE..][..TILE].as_chunks_mut::<TILE>().0;
            let Some(weights) = weights.first_mut() else { continue };
            scores(s, &scratch.q[v * n..][..n], &scratch.keys, n, weights);
            if masked {
                for (lane, visible) in queries.visible[v * LANES..][..LANES].iter().enumerate() {
                    for (j, w) in weights.iter_mut().enumerate() {
                        // Rows of the tile that are not loaded hold whatever was there before.
                        let pos = first + j;
                        if pos < visible.start || pos >= visible.end {
                            w[lane] = f32::NEG_INFINITY;
                        }
                    }
                }
            }
            let part = &mut scratch.chunk;
            let factor = softmax(weights, &mut part.max[v], &mut part.sum[v]);
            // Most tiles raise no maximum.
            if factor != [1.0; LANES] {
                let factor = s.load_f(&factor);
                for out in &mut part.out[v * n..][..n] {
                    let scaled = s.mul_f(s.load_f(out), factor);
                    s.store_f(out, scaled);
                }
            }
        }
        load(s, a.kv, cache, (1, queries.kv_head), held, &mut scratch.keys[at.clone()]);
        for v in 0..queries.vectors {
            let weights = &scratch.weights[v * TILE..][..TILE];
            values(
                s,
                &weights[rows.clone()],
                &scratch.keys[at.clone()],
                n,
                &mut scratch.chunk.out[v * n..][..n],
            );
        }
    }
}

/// Keys (0) or values (1) of a head at `positions` as floats. A function, not a closure: a closure does not inherit
/// the instruction set.
#[inline(always)]
fn load<S: Simd>(
    s: S,
    kv: KvType,
    cache: &Cache,
    (which, head): (usize, usize),
    positions: Range<usize>,
    to: &mut [f32],
) {
    let n = to.len() / positions.len();
    for (pos, to) in positions.zip(to.chunks_exact_mut(n)) {
        decode(s, kv, cache.head(which, pos, head), to);
    }
}

/// `weights[j] = sum of q * key j`, eight keys at a time.
#[inline(always)]
fn scores<S: Simd>(s: S, q: &[[f32; LANES]], keys: &[f32], n: usize, weights: &mut [[f32; LANES]; TILE]) {
    for (weights, keys) in weights.as_chunks_mut::<8>().0.iter_mut().zip(keys.chunks_exact(8 * n)) {
        let mut acc = [s.splat_f(0.0); 8];
        // Heads are padded to whole sixteens: the bounds are checked once for each.
        for (i, q) in q.as_chunks::<16>().0.iter().enumerate() {
            let mut rows = [&[0.0; 16]; 8];
            for k in 0..8 {
                rows[k] = &keys[k * n + 16 * i..].as_chunks().0[0];
            }
            for d in 0..16 {
                let q = s.load_f(&q[d]);
                for k in 0..8 {
                    acc[k] = s.fma(q, s.splat_f(rows[k][d]), acc[k]);
                }
            }
        }
        for (w, acc) in weights.iter_mut().zip(acc) {
            s.store_f(w, acc);
        }
    }
}

/// Scores to weights under the running maximum; returns the factor on what was summed before.
#[inline(always)]
fn softmax(
    weights: &mut [[f32; LANES]; TILE],
    max: &mut [f32; LANES],
    sum: &mut [f32; LANES],
) -> [f32; LANES] {
    let mut new = *max;
    for w in weights.iter() {
        for (m, w) in new.iter_mut().zip(w) {
            *m = if *w > *m { *w } else { *m };
        }
    }
    let mut factor = [0.0; LANES];
    for i in 0..LANES {
        factor[i] = exp(max[i] - new[i]);
        sum[i] *= factor[i];
    }
    for w in weights.iter_mut() {
        for i in 0..LANES {
            w[i] = exp(w[i] - new[i]);
            sum[i] += w[i];
        }
    }
    *max = new;
    factor
}

/// `out += weights x values`, eight elements at a time.
#[inline(always)]
fn values<S: Simd>(s: S, weights: &[[f32; LANES]], rows: &[f32], n: usize, out: &mut [[f32; LANES]]) {
    for (d, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let mut acc = [s.splat_f(0.0); 8];
        for (acc, out) in acc.iter_mut().zip(&*out) {
            *acc = s.load_f(out);
        }
        for (w, row) in weights.iter().zip(rows.chunks_exact(n)) {
            let w = s.load_f(w);
            let row = &row[8 * d..][..8];
            for i in 0..8 {
                acc[i] = s.fma(w, s.splat_f(row[i]), acc[i]);
            }
        }
        for (out, acc) in out.iter_mut().zip(acc) {
            s.store_f(out, acc);
        }
    }
}

/// Adds a chunk to the total.
struct Merge<'a> {
    total: &'a mut Partial,
    part: &'a Partial,
    elements: usize,
}

impl Kernel for Merge<'_> {
    type Out = ();
    #[inline(always)]
    fn eval<S: Simd>(self, s: S) {
        let (total, part) = (self.total, self.part);
        for v in 0..part.max.len() {
            let (mut old, mut new) = ([0.0; LANES], [0.0; LANES]);
            for i in 0..LANES {
                let (a, b) = (total.max[v][i], part.max[v][i]);
                let max = if b > a { b } else { a };
                old[i] = exp(a - max);
                new[i] = exp(b - max);
                total.max[v][i] = max;
                total.sum[v][i] = total.sum[v][i] * old[i] + part.sum[v][i] * new[i];
            }
            let (old, new) = (s.load_f(&old), s.load_f(&new));
            let at = v * self.elements..(v + 1) * self.elements;
            for (to, from) in total.out[at.clone()].iter_mut().zip(&part.out[at]) {
                let sum = s.add_f(s.mul_f(s.load_f(to), old), s.mul_f(s.load_f(from), new));
                s.store_f(to, sum);
            }
        }
    }
}

/// Divides by the denominators, gates, and writes each query's head.
struct Finish<'a> {
    a: &'a Attention<'a>,
    queries: &'a Queries,
    total: &'a Partial,
    out: &'a SharedMut<'a, f32>,
}

impl Kernel for Finish<'_> {
    type Out = ();
    #[inline(always)]
    fn eval<S: Simd>(self, _: S) {
        let (a, q) = (self.a, self.queries);
        for lane in 0..q.count {
            let (v, l) = (lane / LANES, lane % LANES);
            let at = (q.rows[lane] * a.group * a.kv_heads + q.heads[lane]) * a.head_dim;
            // SAFETY: each query belongs to one unit.
            let to = unsafe { self.out.part(at, a.head_dim) };
            let sum = self.total.sum[v][l];
            for (to, out) in to.iter_mut().zip(&self.total.out[v * q.elements..]) {
                *to = out[l] / sum;
            }
            if let Some(gate) = a.gate {
                to.iter_mut().zip(&gate[at..]).for_each(|(a, g)| *a *= sigmoid(*g));
            }
        }
    }
}
