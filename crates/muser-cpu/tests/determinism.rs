//! Equal SHA-256 of the logits, however they are computed: instruction set, threads, chunks, alone or in a group.
#![allow(clippy::unwrap_used)]

use muser_core::model::{QuantMix, Synthetic};
use muser_core::receipt::{hex_digest, prompts};
use muser_core::{
    Device, Geometry, KvType, Lane, LayerKind, Model, Net, Pass, Reference, RopePairs, Row, SeqId,
};
use muser_cpu::{CpuDevice, CpuOptions, Isa};
use std::sync::Arc;

const TYPES: [&str; 6] = ["f32", "bf16", "q4_k_m", "q6_k", "iq4_xs", "nvfp4"];
const CHUNKS: [usize; 4] = [1, 7, 64, 512];

fn model(quant: &str) -> Arc<Model> {
    let geometry = Geometry {
        layers: vec![LayerKind::Local, LayerKind::Full],
        hidden: 256,
        ff: 256,
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        vocab: 256,
        context: 512,
        window: 32,
        norm_eps: 1e-5,
        post_norm_eps: 1e-8,
        rope_theta: 500_000.0,
        rope_pairs: RopePairs::Interleaved,
        logit_scale: 0.196_116,
        softcap: Some(20.0),
    };
    let mix = QuantMix::from_name(quant).unwrap();
    let weights = Synthetic::new(Net::Target, geometry.clone(), 0, mix, 5);
    Arc::new(Model::new(geometry, Box::new(weights), None).unwrap())
}

/// One cell of the table.
#[derive(Clone, Copy, Debug)]
struct Cell {
    isa: Isa,
    threads: usize,
    chunk: usize,
    /// Sequences that are computed together; the first is looked at.
    group: usize,
}

fn cells(isa: Isa) -> Vec<Cell> {
    let mut cells = vec![];
    for threads in [1, 2] {
        for chunk in CHUNKS {
            let groups: &[usize] = if chunk == 1 { &[1, 4, 16] } else { &[1, 4] };
            cells.extend(groups.iter().map(|group| Cell { isa, threads, chunk, group: *group }));
        }
    }
    cells
}

/// Of the prompts of 24, 100 and 300 tokens one cell in so many, counted through all types: every cell but where this
/// build takes too long. The steps have no factor in common with a type's 18 cells.
fn steps(isa: Isa, lane: Lane) -> [usize; 3] {
    match (isa, lane) {
        (Isa::Scalar, _) => [5, 19, 53],
        (_, Lane::Strict) => [1, 1, 5],
        (Isa::Avx2, Lane::Serving) => [1, 5, 17],
        (_, Lane::Serving) => [1, 1, 1],
    }
}

/// SHA-256 of the logits at all positions. The other sequences of a group hold the same tokens, turned.
fn digest(device: &mut dyn Device, tokens: &[u32], chunk: usize, group: usize) -> String {
    let n = tokens.len();
    let seqs: Vec<SeqId> = (0..group).map(|_| device.open(n).unwrap()).collect();
    let mut bytes = vec![];
    for first in (0..n).step_by(chunk) {
        let positions = first..(first + chunk).min(n);
        let count = positions.len();
        let row = |(s, p): (usize, usize)| Row::new(seqs[s], p as u32, tokens[(p + s) % n]).with_logits();
        let rows: Vec<Row> =
            (0..group).flat_map(|s| positions.clone().map(move |p| (s, p))).map(row).collect();
        device.run(Pass::Target, &rows, None).unwrap();
        for i in 0..count {
            bytes.extend(device.logits(i).unwrap().iter().flat_map(|l| l.to_le_bytes()));
        }
    }
    seqs.into_iter().for_each(|seq| device.close(seq));
    hex_digest([&bytes[..]])
}

fn run(model: &Arc<Model>, lane: Lane, tokens: &[u32], cell: Cell) -> String {
    // Rings are as short as the batches allow, so that they wrap often.
    let max_rows = cell.group * cell.chunk.min(tokens.len());
    let options = CpuOptions {
        lane,
        isa: Some(cell.isa),
        threads: Some(cell.threads),
        max_rows,
        ..CpuOptions::default()
    };
    let mut device = CpuDevice::load(model.clone(), &options, &mut |_, _| {}).unwrap();
    digest(&mut device, tokens, cell.chunk, cell.group)
}

fn table(lane: Lane) {
    for (t, quant) in TYPES.iter().enumerate() {
        let model = model(quant);
        for (p, tokens) in prompts(model.geometry()).iter().enumerate() {
            let best = Cell { isa: Isa::best(), threads: 2, chunk: 64, group: 1 };
            let want = match lane {
                Lane::Serving => run(&model, lane, tokens, best),
                Lane::Strict => digest(&mut Reference::new(model.clone(), KvType::F16, 512), tokens, 512, 1),
            };
            for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
                let step = steps(isa, lane)[p];
                for (c, cell) in cells(isa).into_iter().enumerate() {
                    if (18 * t + c) % step != 0 {
                        continue;
                    }
                    let got = run(&model, lane, tokens, cell);
                    assert!(
                        got == want,
                        "{quant}, {} tokens, {lane:?}: {cell:?} gives other bits",
                        tokens.len()
                    );
                }
            }
        }
    }
}

#[test]
fn strict_digests_are_the_references_in_every_cell() {
    table(Lane::Strict);
}

#[test]
fn serving_digests_are_equal_in_every_cell() {
    table(Lane::Serving);
}
