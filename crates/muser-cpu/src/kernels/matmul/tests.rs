//! Products beside plain arithmetic.

use super::*;
use crate::activations::{Scales, count, widths};
use crate::forms::{pack_panel, table};
use muser_format::DType;

/// Blocks of every type with random bits and sane scales.
fn blocks(dtype: DType) -> Vec<u8> {
    let file = std::fs::read(muser_testkit::fixture("quant-blocks/blocks.safetensors")).unwrap();
    let all = safetensors::SafeTensors::deserialize(&file).unwrap();
    match all.tensor(&format!("{}.blocks", dtype.name())) {
        Ok(t) => t.data().to_vec(),
        Err(_) => (0..4096u32).flat_map(|i| ((i as f32 * 0.7).sin() * 3.0).to_le_bytes()).collect(),
    }
}

/// 16 rows of `cols` values, made of the fixture's blocks in a shuffled order.
fn rows(dtype: DType, cols: usize) -> Vec<Vec<u8>> {
    let blocks = blocks(dtype);
    let size = dtype.block_bytes();
    let count = blocks.len() / size;
    let row = |r: usize| {
        (0..cols / dtype.block_len())
            .flat_map(|b| blocks[(r * 37 + b * 11) % count * size..][..size].to_vec())
            .collect()
    };
    (0..LANES).map(row).collect()
}

/// Every type, width and instruction set against the dequantised weights times the quantised activations in f64.
#[test]
fn every_kernel_multiplies() {
    let pool = Pool::new(1).unwrap();
    let cols = 512;
    let x: Vec<f32> =
        (0..18 * cols).map(|i| ((i * i % 1013) as f32 * 0.37).sin() * (1.0 + (i % 7) as f32)).collect();
    for dtype in DType::ALL.iter().copied() {
        let rows = rows(dtype, cols);
        let form = FormKind::of(dtype);
        let mut panel = vec![0i32; 2 * form.panel_bytes(cols) / 4];
        let panel = crate::plain::view_mut::<u8, i32>(&mut panel);
        // The second panel has the rows in the other order.
        for at in 0..2 {
            let row = |r: usize| rows[if at == 0 { r } else { LANES - 1 - r }].as_slice();
            pack_panel(dtype, &std::array::from_fn(row), panel, at, 2);
        }
        let twice: &[u8] = panel;
        let weights: Vec<Vec<f32>> = rows
            .iter()
            .map(|r| {
                let mut w = vec![0.0; cols];
                muser_format::dequantize(dtype, r, &mut w).unwrap();
                w
            })
            .collect();
        let mut scalar: Vec<Vec<u32>> = vec![];
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            // 18 columns: two whole tiles and what is left.
            for width in widths(isa).iter().copied().chain([18]) {
                let mut prepared = Prepared::default();
                let picks: Vec<usize> = (0..width).collect();
                let open_scales = form.open_scales(isa);
                prepared.fill(&pool, isa, &x, cols, &picks, &[form.scales(), open_scales]);
                let mut results: Vec<[f32; LANES]> = vec![];
                for tile in &prepared.tiles {
                    let mut out = [Out::default(); 2];
                    let words = prepared.tile(form.scales(), tile);
                    let (table, blocks) = (table(dtype), cols / form.cols());
                    // In two runs, as a span of the cache would cut it.
                    let panels = Panels { bytes: twice, form, table: &table, blocks, band: 2 };
                    for (run, stream) in [(0..blocks / 2, true), (blocks / 2..blocks, false)] {
                        let piece = Piece { panels, opened: false, stream, run };
                        multiply(isa, piece, tile.width, words, &mut out);
                    }
                    if let Some(bytes) = form.open_bytes(isa) {
                        let mut lines = vec![Line([0; 64]); 2 * blocks * bytes / 64];
                        open(isa, panels, 0..blocks, &mut lines);
                        let panels = Panels { bytes: view(&lines), band: 1, ..panels };
                        let mut opened = [Out::default(); 2];
                        let piece = Piece { panels, opened: true, stream: false, run: 0..blocks };
                        multiply(isa, piece, tile.width, prepared.tile(open_scales, tile), &mut opened);
                        assert_eq!(opened, out, "{} {isa} unpacked first", dtype.name());
                    }
                    let [first, mut second] = out;
                    second.iter_mut().for_each(|column| column.reverse());
                    assert_eq!(first, second, "two panels of the same rows");
                    results.extend(&out[0][..tile.used]);
                }
                for (c, result) in results.iter().enumerate() {
                    let xq = quantised(&x[c * cols..][..cols], form.scales());
                    for (r, w) in weights.iter().enumerate() {
                        let products = || w.iter().zip(&xq).map(|(w, x)| *w as f64 * x);
                        let (want, size) = (products().sum::<f64>(), products().map(f64::abs).sum::<f64>());
                        let apart = (result[r] as f64 - want).abs();
                        assert!(
                            apart <= 2e-6 * size,
                            "{} {isa} width {width}, column {c}, row {r}: {} for {want}",
                            dtype.name(),
                            result[r]
                        );
                    }
                    let bits: Vec<u32> = result.iter().map(|v| v.to_bits()).collect();
                    if scalar.len() == c {
                        scalar.push(bits.clone());
                    }
                    assert!(
                        scalar[c] == bits,
                        "{} {isa} width {width}, column {c}: bits differ",
                        dtype.name()
                    );
                }
            }
        }
    }
}

/// What the quantised activations stand for.
fn quantised(x: &[f32], scales: Scales) -> Vec<f64> {
    let len = match scales {
        Scales::Per256 | Scales::Crossed => 256,
        Scales::Per32 => 32,
        Scales::Float => return x.iter().map(|v| *v as f64).collect(),
    };
    let block = |x: &[f32]| {
        let (least, greatest) = x.iter().fold((0f32, 0f32), |(a, b), v| (a.min(*v), b.max(*v)));
        let (most, steps) = if len == 256 { count(least, greatest) } else { (greatest.max(-least), 127.0) };
        let inverse = steps / most;
        x.iter().map(|v| ((v * inverse).round_ties_even() * (most / steps)) as f64).collect::<Vec<_>>()
    };
    x.chunks(len).flat_map(block).collect()
}

/// Seven panels in bands of one, three and four: the same results for few and many columns.
#[test]
fn bands_change_nothing() {
    let (pool, isa, model) = (Pool::new(2).unwrap(), Isa::best(), muser_testkit::fixtures::mini());
    let (panels, cols) = (7, 512);
    let x: Vec<f32> = (0..40 * cols).map(|i| ((i * i % 1013) as f32 * 0.37).sin()).collect();
    for dtype in [DType::Q4K, DType::Q6K, DType::Q8_0] {
        let rows: Vec<Vec<u8>> = (0..panels).flat_map(|_| rows(dtype, cols)).collect();
        let form = FormKind::of(dtype);
        let panel_bytes = form.panel_bytes(cols);
        for columns in [1, 5, 12, 40] {
            let mut prepared = Prepared::default();
            let picks: Vec<usize> = (0..columns).collect();
            let scales = scales(isa, form, crate::activations::tiles(columns, isa).len());
            prepared.fill(&pool, isa, &x, cols, &picks, &[scales]);
            let results = [1, 3, 4].map(|band| {
                let mut arena = Arena::new(panels * panel_bytes).unwrap();
                for first in (0..panels).step_by(band) {
                    let count = band.min(panels - first);
                    let to = &mut arena.bytes_mut()[first * panel_bytes..][..count * panel_bytes];
                    for at in 0..count {
                        // Each panel's rows begin elsewhere.
                        let row = |r: usize| rows[(first + at) * 3 + r].as_slice();
                        pack_panel(dtype, &std::array::from_fn(row), to, at, count);
                    }
                }
                let (slot, rows, at) = (*model.slots.keys().next().unwrap(), panels * LANES - 5, Some(0));
                let table = table(dtype);
                let matrix = Matrix { slot, dtype, form, rows, scale: 1.0, table, panel_bytes, band, at };
                let ctx = Context { pool: &pool, isa, arena: &arena, model: &model };
                let mut out = vec![0.0; columns * rows];
                project(ctx, &prepared, &mut [(&matrix, &mut out)]).unwrap();
                out
            });
            assert!(results.iter().all(|r| r == &results[0] && r.iter().any(|v| *v != 0.0)));
        }
    }
}

/// Past the caches or not, where columns stand on lines of the cache and where they don't: the same results.
#[test]
fn results_past_the_caches_are_the_same() {
    for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
        for rows in [64usize, 50] {
            let tile = Tile { first: 1, used: 4, width: 5, before: 0 };
            let panels: Vec<Out> = (0..4)
                .map(|p| std::array::from_fn(|c| std::array::from_fn(|r| (1 + p * 256 + c * 16 + r) as f32)))
                .collect();
            let stored = |past: bool| {
                let mut lines = vec![Line([0; 64]); (5 * rows).div_ceil(16)];
                let all = view_mut::<f32, Line>(&mut lines);
                let out = &SharedMut::new(all);
                for (panel, results) in [(0, &panels[..3]), (3, &panels[3..])] {
                    dispatch(isa, Store { rows, panel, tile: &tile, results, out, past });
                }
                all[..5 * rows].to_vec()
            };
            let results = stored(true);
            assert_eq!(results, stored(false), "{isa}, {rows} rows");
            for (i, v) in results.iter().enumerate() {
                let (column, row) = (i / rows, i % rows);
                let want = if column == 0 { 0.0 } else { panels[row / 16][column - 1][row % 16] };
                assert_eq!(*v, want, "{isa}, column {column}, row {row}");
            }
        }
    }
}
