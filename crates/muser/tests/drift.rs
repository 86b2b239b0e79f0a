//! How far the serving lane is from the strict one, layer by layer: it may not grow.
#![allow(clippy::unwrap_used)]

use muser_core::receipt::{layer_ends, prompts};
use muser_core::{Buf, Device, Lane, Model, Observer, Pass, Row};
use muser_cpu::{CpuDevice, CpuOptions};
use serde_json::Value;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// A distance may be this many times what is kept: other kernels round elsewhere.
const TOLERANCE: f64 = 1.25;

/// The residual after the embedding and after each layer, then the logits.
struct Rows {
    ends: Vec<Option<usize>>,
    seen: Vec<Vec<f32>>,
}

impl Observer for Rows {
    fn reads(&self) -> bool {
        true
    }
    fn after(&mut self, steps: Range<usize>, _seconds: f64, read: &mut dyn FnMut(Buf) -> Vec<f32>) {
        if self.ends[steps].iter().flatten().last().is_some() {
            self.seen.push(read(Buf::X));
        }
    }
}

fn rows(model: &Arc<Model>, lane: Lane) -> Vec<Vec<f32>> {
    let options = CpuOptions { lane, max_rows: 128, ..CpuOptions::default() };
    let mut device = CpuDevice::load(model.clone(), &options, &mut |_, _| {}).unwrap();
    let tokens = &prompts(model.geometry())[1];
    let seq = device.open(tokens.len()).unwrap();
    let row = |(i, t): (usize, &u32)| Row::new(seq, i as u32, *t).with_logits();
    let batch: Vec<Row> = tokens.iter().enumerate().map(row).collect();
    let mut rows = Rows { ends: layer_ends(model), seen: vec![] };
    device.run(Pass::Target, &batch, Some(&mut rows)).unwrap();
    let logits = (0..batch.len()).flat_map(|i| device.logits(i).unwrap().to_vec()).collect();
    rows.seen.push(logits);
    rows.seen
}

/// Root mean square of the differences, as a share of that of the exact values.
fn distance(exact: &[f32], other: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let apart: f64 = exact.iter().zip(other).map(|(a, b)| square(f64::from(a - b))).sum();
    (apart / exact.iter().map(|a| square(f64::from(*a))).sum::<f64>()).sqrt()
}

#[test]
fn the_serving_lane_has_not_drifted() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let kept: Value =
        serde_json::from_slice(&std::fs::read(root.join("tests/receipts/serving.json")).unwrap()).unwrap();
    let mut drifted = vec![];
    for (file, kept) in kept.as_object().unwrap() {
        let model = Arc::new(muser_core::model::open(&root.join(file), None).unwrap().0);
        let (exact, serving) = (rows(&model, Lane::Strict), rows(&model, Lane::Serving));
        let measured: Vec<f64> = exact.iter().zip(&serving).map(|(a, b)| distance(a, b)).collect();
        let kept: Vec<f64> = kept.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect();
        let last = measured.len() - 1;
        let beyond = |i: &usize| kept.get(*i).is_none_or(|kept| measured[*i] > TOLERANCE * kept + 1e-5);
        if let Some(first) = (0..=last).find(beyond) {
            let name = match first {
                0 => "the embedding".to_string(),
                i if i == last => "logits".to_string(),
                i => format!("layer {}", i - 1),
            };
            drifted.push(format!(
                "{file}: {name}: {:.5} of its size from the strict lane; kept {:.5?}; measured {measured:.5?}",
                measured[first],
                kept.get(first)
            ));
        }
    }
    assert!(drifted.is_empty(), "{drifted:#?}");
}
