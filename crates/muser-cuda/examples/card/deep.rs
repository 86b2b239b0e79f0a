//! Rows of a sequence far behind its beginning, which read its keys together, beside rows that each read them alone.

use crate::{Record, rows, tiny_geometry};
use muser_core::model::{QuantMix, Synthetic};
use muser_core::{Buf, Device, Geometry, Model, Net, Pass, Row};
use muser_cuda::{CudaDevice, CudaOptions};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Passes: of each sequence the positions before its rows, and how many these are. Few rows read together from some depth on, many always.
const PASSES: [&[(usize, usize)]; 9] = [
    &[(2100, 16)],
    &[(2100, 40)],
    &[(8300, 12)],
    &[(8300, 16)],
    &[(8300, 17)],
    &[(8300, 100)],
    &[(8300, 9), (40, 7)],
    &[(40, 11), (8300, 30), (2100, 1)],
    &[(20_000, 8)],
];
/// Share of its largest value by which attention may be off: rounding costs a tenth of it, a part of the keys that is left out four times as much.
const MOST: f32 = 0.01;

/// Whether attention gives the same in each layer, local ones, whose rings have turned, too.
pub fn deep() -> bool {
    let g = Geometry { heads: 32, kv_heads: 2, window: 300, context: 20_480, ..tiny_geometry() };
    let weights = Synthetic::new(Net::Target, g.clone(), 0, QuantMix::from_name("q8_0").unwrap(), 3);
    let model = Arc::new(Model::new(g.clone(), Box::new(weights), None).unwrap());
    let both = [false, true].map(|batch_invariant| {
        let options = CudaOptions { max_rows: Some(128), batch_invariant, ..CudaOptions::default() };
        attention(&mut CudaDevice::load(model.clone(), &options, &mut |_, _| {}).unwrap(), &model)
    });
    let mut right = true;
    for ((what, together), (_, alone)) in both[0].iter().zip(&both[1]) {
        let off = |(a, b): (&Vec<f32>, &Vec<f32>)| {
            let size = b.iter().fold(0f32, |most, x| most.max(x.abs()));
            let apart =
                |w: f32, (a, b): (&f32, &f32)| if a.is_finite() { w.max((a - b).abs()) } else { f32::MAX };
            if a.len() == b.len() { a.iter().zip(b).fold(0f32, apart) / size } else { f32::MAX }
        };
        let worst = together.iter().zip(alone).map(off).fold(0f32, f32::max);
        let is_right = worst <= MOST && together.len() == g.layers.len();
        let verdict = if is_right { "" } else { ": TOO MUCH" };
        println!("{what}: attention {worst:.5} of its size off{verdict}");
        right &= is_right;
    }
    right
}

/// What attention leaves in each layer, for each pass.
fn attention(card: &mut CudaDevice, model: &Model) -> Vec<(String, Vec<Vec<f32>>)> {
    let g = model.geometry();
    let tokens: Vec<u32> = (0..100).map(|i| (i * 37 + i * i * 11) % 760).collect();
    let mut found = vec![];
    for pass in PASSES {
        let mut batch = vec![];
        for (depth, n) in pass {
            let seq = card.open(g.context).unwrap();
            // Keys and values between 0.5 and 1 and their negatives, as halves.
            let held = model
                .plans
                .caches
                .iter()
                .map(|c| c.window.map_or(*depth, |w| w.min(*depth)) * c.kv_heads * c.head_dim);
            let random = |i: usize| (i as u64 ^ i as u64 >> 7).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
            let half = |i| (0x3800 | random(i) & 0x83ff) as u16;
            let state: Vec<u8> = (0..2 * held.sum::<usize>()).flat_map(|i| half(i).to_le_bytes()).collect();
            card.restore(seq, *depth, &state).unwrap();
            let first = batch.len() as u32;
            let mine = rows(seq, *depth, &tokens[..*n], true).into_iter();
            batch.extend(mine.map(|row| Row { feature: first + row.feature, ..row }));
        }
        let mut record = Record { model, pass: Pass::Target, seen: BTreeMap::new() };
        card.run(Pass::Target, &batch, Some(&mut record)).unwrap();
        let left = record.seen.into_values().filter(|(buf, _)| *buf == Buf::A).map(|(_, values)| values);
        let sizes: Vec<String> = pass.iter().map(|(depth, n)| format!("{n} rows behind {depth}")).collect();
        found.push((sizes.join(", "), left.collect()));
        batch.chunk_by(|a, b| a.seq == b.seq).for_each(|of| card.close(of[0].seq));
    }
    found
}
