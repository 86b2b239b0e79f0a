//! Rows of one sequence far behind its beginning, which read its keys together, beside rows that each read them alone.

use crate::{Record, rows, tiny_geometry};
use muser_core::model::{QuantMix, Synthetic};
use muser_core::{Buf, Device, Geometry, Model, Net, Pass};
use muser_cuda::{CudaDevice, CudaOptions};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Positions from which on sixteen rows read a sequence's keys together, and more.
const DEPTH: usize = 2100;
/// Share of its largest value by which attention may be off: rounding costs a tenth of it, a part of the keys that is left out four times as much.
const MOST: f32 = 0.01;

/// What attention gives such passes in each layer, local ones whose rings have turned, too.
pub fn deep() -> bool {
    let g = Geometry { heads: 16, kv_heads: 1, window: 300, context: 2304, ..tiny_geometry() };
    let weights = Synthetic::new(Net::Target, g.clone(), 0, QuantMix::from_name("q8_0").unwrap(), 3);
    let model = Arc::new(Model::new(g, Box::new(weights), None).unwrap());
    let tokens: Vec<u32> = (0..2304).map(|i| (i * 37 + i * i * 11) % 760).collect();
    let mut both = vec![];
    for batch_invariant in [false, true] {
        let options = CudaOptions { max_rows: Some(128), batch_invariant, ..CudaOptions::default() };
        let mut card = CudaDevice::load(model.clone(), &options, &mut |_, _| {}).unwrap();
        let seq = card.open(2304).unwrap();
        for first in (0..DEPTH).step_by(100) {
            let part = rows(seq, first, &tokens[first..first + 100], false);
            card.run(Pass::Target, &part, None).unwrap();
        }
        let mut seen = vec![];
        for n in [12, 16, 40, 100] {
            let mut record = Record { model: &model, pass: Pass::Target, seen: BTreeMap::new() };
            let batch = rows(seq, DEPTH, &tokens[DEPTH..DEPTH + n], true);
            card.run(Pass::Target, &batch, Some(&mut record)).unwrap();
            let attention = record.seen.into_values().filter(|(buf, _)| *buf == Buf::A);
            seen.push((n, attention.map(|(_, values)| values).collect::<Vec<_>>()));
        }
        both.push(seen);
    }
    let mut right = true;
    for ((n, together), (_, alone)) in both[0].iter().zip(&both[1]) {
        let off = |(a, b): (&Vec<f32>, &Vec<f32>)| {
            let size = b.iter().fold(0f32, |most, x| most.max(x.abs()));
            let worst = a
                .iter()
                .zip(b)
                .fold(0f32, |w, (a, b)| if a.is_finite() { w.max((a - b).abs()) } else { f32::MAX });
            if a.len() == b.len() { worst / size } else { f32::MAX }
        };
        let worst = together.iter().zip(alone).map(off).fold(0f32, f32::max);
        let is_right = worst <= MOST && together.len() == model.geometry().layers.len();
        println!(
            "{n} rows behind {DEPTH} others: attention {worst:.5} of its size off{}",
            if is_right { "" } else { ": TOO MUCH" }
        );
        right &= is_right;
    }
    right
}
