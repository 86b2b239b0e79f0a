//! What the machine's memory and its dot units can do now: the limits beside which speeds are printed.

use crate::activations::{Prepared, tiles};
use crate::arena::Arena;
use crate::forms::{FormKind, table};
use crate::isa::Isa;
use crate::kernels::matmul::{PANELS, Panels, all_tiles, scales, span};
use crate::plain::view;
use crate::pool::Pool;
use crate::simd::{Kernel, LANES, Simd, dispatch};
use muser_format::DType;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Bytes a second that `threads` threads read together from `bytes` of memory (on 2 MB pages where the system gives
/// them): the best of the sweeps that fit into half a second. 0 where memory or threads cannot be had.
pub fn read_bandwidth(threads: usize, bytes: usize) -> f64 {
    const PIECE: usize = 1 << 20;
    let bytes = bytes.next_multiple_of(PIECE);
    let (Ok(mut arena), Ok(pool)) = (Arena::new(bytes), Pool::new(threads)) else { return 0.0 };
    arena.bytes_mut().fill(1);
    let isa = Isa::best();
    let all = view::<[u8; 64], u8>(arena.bytes());
    let sweep = || {
        let start = Instant::now();
        pool.run(bytes / PIECE, |i| {
            black_box(dispatch(isa, Read(&all[i * PIECE / 64..][..PIECE / 64])));
        });
        bytes as f64 / start.elapsed().as_secs_f64()
    };
    best(sweep)
}

/// Multiplications and additions a second that `threads` threads do together with the dot instruction that the
/// kernels use, from registers. 0 where threads cannot be had.
pub fn int8_peak(threads: usize) -> f64 {
    const ROUNDS: usize = 20_000;
    let Ok(pool) = Pool::new(threads) else { return 0.0 };
    let isa = Isa::best();
    let run = || {
        let start = Instant::now();
        pool.run(threads * 8, |_| {
            black_box(dispatch(isa, Dot { rounds: black_box(ROUNDS), x: black_box(0x0102_0304) }));
        });
        // 12 dots of 64 products and 64 sums a round.
        (threads * 8 * ROUNDS * 12 * 128) as f64 / start.elapsed().as_secs_f64()
    };
    best(run)
}

/// Multiplications and additions a second that one thread does in a type's kernel for `columns` columns, with weights in
/// the second-level cache: four panels of `cols` columns.
pub fn kernel(isa: Isa, dtype: DType, columns: usize, cols: usize) -> f64 {
    let Ok(pool) = Pool::new(1) else { return 0.0 };
    let form = FormKind::of(dtype);
    let panels = vec![0i32; PANELS * form.panel_bytes(cols) / 4];
    let panels = view::<u8, i32>(&panels);
    let mut x = Prepared::default();
    let picks: Vec<usize> = (0..columns).collect();
    x.fill(
        &pool,
        isa,
        &vec![1.0; columns * cols],
        cols,
        &picks,
        &[scales(isa, form, tiles(columns, isa).len())],
    );
    let (table, blocks) = (table(dtype), cols.div_ceil(form.cols()));
    let panels = Panels { bytes: panels, form, table: &table, blocks, band: PANELS };
    let mut sums = vec![];
    // Some milliseconds between two looks at the clock: shorter than what other programs take at once.
    let rounds = (96 / columns).max(1);
    let run = || {
        let start = Instant::now();
        for _ in 0..rounds {
            all_tiles(isa, black_box(panels), span(isa, form, PANELS), &x, &mut sums);
            black_box(&mut sums);
        }
        let operations = 2 * PANELS * LANES * cols * columns * rounds;
        operations as f64 / start.elapsed().as_secs_f64()
    };
    best(run)
}

fn best(mut run: impl FnMut() -> f64) -> f64 {
    let start = Instant::now();
    let mut best = 0f64;
    while start.elapsed() < Duration::from_millis(500) {
        best = best.max(run());
    }
    best
}

/// Bytes between a load and its prefetch.
const AHEAD: usize = crate::forms::NEAR;

pub(crate) struct Read<'a>(pub &'a [[u8; 64]]);

impl Kernel for Read<'_> {
    type Out = [f32; 16];
    #[inline(always)]
    fn eval<S: Simd>(self, s: S) -> [f32; 16] {
        let mut acc = [s.splat_i(0); 8];
        for lines in self.0.as_chunks::<8>().0 {
            for (acc, line) in acc.iter_mut().zip(lines) {
                *acc = s.dot(*acc, s.load_b(line, AHEAD), 0x0101_0101);
            }
        }
        let mut out = [0.0; 16];
        let sum = acc.into_iter().reduce(|a, b| s.add_i(a, b));
        s.store_f(&mut out, s.to_f(sum.unwrap_or(s.splat_i(0))));
        out
    }
}

struct Dot {
    rounds: usize,
    x: i32,
}

impl Kernel for Dot {
    type Out = [f32; 16];
    #[inline(always)]
    fn eval<S: Simd>(self, s: S) -> [f32; 16] {
        let w = s.table(&[3; 16]);
        let mut acc = [s.splat_i(0); 12];
        for _ in 0..self.rounds {
            for acc in &mut acc {
                *acc = s.dot(*acc, w, self.x);
            }
        }
        let mut out = [0.0; 16];
        let sum = acc.into_iter().reduce(|a, b| s.add_i(a, b));
        s.store_f(&mut out, s.to_f(sum.unwrap_or(s.splat_i(0))));
        out
    }
}
