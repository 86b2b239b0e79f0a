//! Times of passes of the release's geometry, with random weights.

use crate::rows;
use muser_core::model::{QuantMix, Synthetic, muse_glimmer_30b, muse_glimmer_30b_drafter};
use muser_core::sample::{Sampler, SamplerOptions, TokenMask};
use muser_core::{Buf, Device, DeviceError, KvType, Lane, Model, Net, Observer, Pass, Row, SeqId};
use muser_cuda::{CudaDevice, CudaOptions};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

struct Times {
    seconds: BTreeMap<String, (usize, f64)>,
    names: Vec<String>,
}

impl Observer for Times {
    fn reads(&self) -> bool {
        false
    }
    fn after(&mut self, steps: Range<usize>, seconds: f64, _: &mut dyn FnMut(Buf) -> Vec<f32>) {
        let entry = self.seconds.entry(self.names[steps.start].clone()).or_default();
        entry.0 += 1;
        entry.1 += seconds;
    }
}

/// The release's geometry with random weights, on the card; says how long that took.
pub fn load(
    quant: &str,
    layers: usize,
    lane: Lane,
    kv: KvType,
    batch_invariant: bool,
) -> (Arc<Model>, CudaDevice) {
    let mix = QuantMix::from_name(quant).unwrap();
    let g = muse_glimmer_30b(layers);
    let (dg, spec) = muse_glimmer_30b_drafter(layers);
    let start = Instant::now();
    let target = Synthetic::new(Net::Target, g.clone(), 0, mix, 1);
    let drafter = Synthetic::new(Net::Draft, dg.clone(), spec.target_layers.len(), mix, 2);
    let model = Arc::new(Model::new(g, Box::new(target), Some((dg, spec, Box::new(drafter)))).unwrap());
    let bytes = model.weight_bytes() as f64;
    println!("random weights: {:.1} s, {:.2} GB", start.elapsed().as_secs_f64(), bytes / 1e9);
    let max_rows = Some(if lane == Lane::Strict { 64 } else { 2048 });
    let options = CudaOptions { max_rows, lane, kv, batch_invariant, ..CudaOptions::default() };
    let mut loaded = None;
    for what in ["loaded", "loaded again, kernels cached,"] {
        drop(loaded.take());
        let start = Instant::now();
        let (mut first, mut last) = (0.0, 0.0);
        let mut progress = |_, _| {
            last = start.elapsed().as_secs_f64();
            if first == 0.0 {
                first = last;
            }
        };
        loaded = Some(CudaDevice::load(model.clone(), &options, &mut progress).unwrap());
        println!(
            "{what} in {:.2} s: {first:.2} s up to the first piece, {:.2} s up to the last ({:.1} GB/s)",
            start.elapsed().as_secs_f64(),
            last - first,
            bytes / 1e9 / (last - first)
        );
    }
    let device = loaded.unwrap();
    println!("{}", device.info().name);
    (model, device)
}

/// Median time of a pass and its greedy choices.
fn time(device: &mut CudaDevice, name: &str, batch: &[Row], pass: Pass, repeats: usize) {
    let greedy = &mut |device: &mut CudaDevice| device.best().and_then(|_| device.finish());
    time_with(device, name, batch, (pass, repeats), greedy);
}

/// The same with what `answer` asks for.
fn time_with(
    device: &mut CudaDevice,
    name: &str,
    batch: &[Row],
    (pass, repeats): (Pass, usize),
    answer: &mut dyn FnMut(&mut CudaDevice) -> Result<(), DeviceError>,
) {
    let mut times = vec![];
    for _ in 0..repeats + 2 {
        let start = Instant::now();
        device.run(pass, batch, None).unwrap();
        if pass == Pass::Inject {
            device.run(Pass::Target, &batch[..1], None).unwrap();
        }
        answer(device).unwrap();
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    let median = times[times.len() / 2];
    println!("{name}: {:.3} ms, {:.1} tok/s", median * 1e3, batch.len() as f64 / median);
}

/// Passes of many rows: as long as the server's chunks, beside decoding and alone, and longer.
pub const PREFILL: [usize; 5] = [64, 128, 256, 512, 2048];

pub fn prefill(device: &mut CudaDevice, seq: SeqId, lengths: &[usize]) {
    for depth in [0, 8192, 32_768, 128_000] {
        for n in lengths {
            let tokens: Vec<u32> = (0..*n as u32).map(|i| i * 97 % 200_000).collect();
            let mut batch = rows(seq, depth, &tokens, false);
            batch[n - 1].logits = true;
            let name =
                if depth == 0 { format!("prefill {n}") } else { format!("prefill {n} at depth {depth}") };
            time(device, &name, &batch, Pass::Target, 5);
        }
    }
}

/// The time of each kind of step, one after another.
pub fn kernels(model: &Model, device: &mut CudaDevice, seq: SeqId, lengths: &[usize]) {
    for n in lengths {
        let mut batch = rows(seq, 0, &vec![5; *n], false);
        batch[n - 1].logits = true;
        table(device, model, &batch);
    }
}

/// Time of each kind of step in one pass.
fn table(device: &mut CudaDevice, model: &Model, batch: &[Row]) {
    let names = model.plans.target.steps.iter().map(|s| s.name.clone()).collect();
    let mut times = Times { seconds: BTreeMap::new(), names };
    device.run(Pass::Target, batch, Some(&mut times)).unwrap();
    let mut table: Vec<_> = times.seconds.into_iter().collect();
    table.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
    println!("kernels of a pass of {} rows at depth {}:", batch.len(), batch[0].pos);
    for (name, (count, seconds)) in table {
        println!(
            "  {name:24} {count:4} x {:9.1} us = {:8.3} ms",
            seconds / count as f64 * 1e6,
            seconds * 1e3
        );
    }
}

/// Decode steps of one row at growing depth and of more rows.
fn passes(device: &mut CudaDevice) {
    let seq = device.open(131_072).unwrap();
    for depth in [0u32, 8192, 32_768, 131_000] {
        let batch = [Row::new(seq, depth, 17).with_logits()];
        time(device, &format!("decode at depth {depth}"), &batch, Pass::Target, 60);
    }
    for n in [2usize, 4, 5, 8, 16, 17, 24, 32, 48, 64] {
        let batch = rows(seq, 100, &vec![33; n], true);
        time(device, &format!("{n} rows"), &batch, Pass::Target, 20);
    }
    // Drafts of several sequences, far behind their beginnings.
    let others: Vec<SeqId> = (0..3).map(|_| device.open(33_000).unwrap()).collect();
    for depth in [8192, 32_768] {
        let group = std::iter::once(&seq).chain(&others).enumerate();
        let batch: Vec<Row> = group
            .flat_map(|(i, seq)| {
                let row = move |row: Row| Row { feature: row.feature + 4 * i as u32, ..row };
                rows(*seq, depth, &[33; 4], true).into_iter().map(row)
            })
            .collect();
        time(device, &format!("4 rows of each of 4 sequences at depth {depth}"), &batch, Pass::Target, 20);
    }
    others.into_iter().for_each(|seq| device.close(seq));
    // As an engine samples: from the largest logits, under a mask that leaves every tenth token from those that it allows, and, for who
    // wants log probabilities, from all.
    let vocab = device.logits(0).unwrap().len();
    let mut sampler = Sampler::new(SamplerOptions::default(), vocab).unwrap();
    let k = sampler.looks_at().unwrap();
    let mut mask = TokenMask::none(vocab);
    (0..vocab as u32).filter(|t| t % 10 == 0).for_each(|t| mask.allow(t));
    for n in [1, 4, 16] {
        let batch = rows(seq, 100, &vec![33; n], true);
        for (what, mask) in [("sampled", None), ("sampled under a mask", Some(&mask))] {
            let sampled = &mut |device: &mut CudaDevice| {
                (0..n).try_for_each(|i| {
                    let largest = device.largest(i, k, mask)?.unwrap();
                    assert!(sampler.sample_largest(largest, mask).unwrap().is_some());
                    Ok(())
                })
            };
            time_with(device, &format!("{n} rows, {what}"), &batch, (Pass::Target, 20), sampled);
        }
        let all = &mut |device: &mut CudaDevice| {
            (0..n).try_for_each(|i| device.logits(i).map(|row| drop(sampler.sample(row, None))))
        };
        time_with(device, &format!("{n} rows, sampled from all logits"), &batch, (Pass::Target, 20), all);
    }
    device.close(seq);
}

/// What the release's geometry takes.
pub fn speed(quant: &str, layers: usize, lane: Lane, kv: KvType, even: bool) {
    let (model, mut device) = load(quant, layers, lane, kv, even);
    let seq = device.open(131_072).unwrap();
    let one = |pos: u32| vec![Row::new(seq, pos, 17).with_logits()];
    if lane == Lane::Strict {
        time(&mut device, "decode at depth 0", &one(0), Pass::Target, 10);
        time(&mut device, "decode at depth 8192", &one(8192), Pass::Target, 10);
        for n in [8, 64] {
            time(&mut device, &format!("{n} rows"), &rows(seq, 100, &vec![33; n], true), Pass::Target, 3);
        }
        table(&mut device, &model, &one(0));
        table(&mut device, &model, &one(8192));
        return;
    }
    passes(&mut device);
    if even {
        // What the option costs: the same passes without it.
        drop(device);
        println!("without the option:");
        let options = CudaOptions { kv, ..CudaOptions::default() };
        return passes(&mut CudaDevice::load(model, &options, &mut |_, _| {}).unwrap());
    }
    let mut batch = rows(seq, 2000, &[33; 16], true);
    batch[0].logits = false;
    time(&mut device, "draft block of 16", &batch, Pass::Draft, 20);
    let batch = rows(seq, 2000, &[33; 4], false);
    time(&mut device, "inject 4 and one plain step without logits", &batch, Pass::Inject, 20);
    prefill(&mut device, seq, &PREFILL);
    kernels(&model, &mut device, seq, &[1, 16, 64, 2048]);
}
