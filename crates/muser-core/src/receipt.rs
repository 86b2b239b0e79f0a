//! Receipts: SHA-256 of what a run computed, so that other hardware can check it.

use crate::device::{Device, DeviceError, Observer, Row};
use crate::model::Model;
use crate::plan::{Buf, Op, Pass};
use sha2::{Digest, Sha256};
use std::ops::Range;

/// Digests of one prompt's run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Receipt {
    /// The prompt.
    pub tokens: Vec<u32>,
    /// Of the logits at each position, as little-endian f32.
    pub logits: Vec<String>,
    /// Of the residual stream after the embedding and after each layer, all positions in order.
    pub residuals: Vec<String>,
}

/// SHA-256 in hexadecimal.
pub fn hex_digest(bytes: impl IntoIterator<Item = u8>) -> String {
    let mut hash = Sha256::new();
    let mut block = Vec::with_capacity(1 << 16);
    for byte in bytes {
        block.push(byte);
        if block.len() == block.capacity() {
            hash.update(&block);
            block.clear();
        }
    }
    hash.update(&block);
    hex(hash)
}

fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

/// Feeds the residual after the embedding and after each layer into one digest each.
struct Residuals {
    /// Index into `hashes` of the step that ends a layer.
    ends: Vec<Option<usize>>,
    hashes: Vec<Sha256>,
}

impl Residuals {
    fn new(model: &Model) -> Self {
        let mut hashes = vec![];
        let mut layer = None;
        let mut ends = vec![None; model.plans.target.steps.len()];
        for (i, step) in model.plans.target.steps.iter().enumerate() {
            let ends_layer =
                matches!(step.op, Op::Tail { .. }) && step.stage == "ffn" && layer != Some(step.layer);
            if matches!(step.op, Op::Embed { .. }) || ends_layer {
                layer = Some(step.layer);
                ends[i] = Some(hashes.len());
                hashes.push(Sha256::new());
            }
        }
        Residuals { ends, hashes }
    }
}

impl Observer for Residuals {
    fn reads(&self) -> bool {
        true
    }

    fn after(&mut self, steps: Range<usize>, _seconds: f64, read: &mut dyn FnMut(Buf) -> Vec<f32>) {
        if let Some(hash) = self.ends[steps].iter().flatten().last() {
            let bytes: Vec<u8> = read(Buf::X).into_iter().flat_map(f32::to_le_bytes).collect();
            self.hashes[*hash].update(bytes);
        }
    }
}

/// Runs `tokens` on a new sequence, `chunk` rows at a time, and digests logits and residuals.
pub fn receipt(
    model: &Model,
    device: &mut dyn Device,
    tokens: &[u32],
    chunk: usize,
) -> Result<Receipt, DeviceError> {
    let seq = device.open(tokens.len())?;
    let mut residuals = Residuals::new(model);
    let mut logits = vec![];
    for (c, part) in tokens.chunks(chunk.max(1)).enumerate() {
        let first = c * chunk.max(1);
        let row = |(i, t): (usize, &u32)| Row {
            feature: i as u32,
            ..Row::new(seq, (first + i) as u32, *t).with_logits()
        };
        let rows: Vec<Row> = part.iter().enumerate().map(row).collect();
        device.run(Pass::Target, &rows, Some(&mut residuals))?;
        for i in 0..rows.len() {
            logits.push(hex_digest(device.logits(i)?.iter().flat_map(|l| l.to_le_bytes())));
        }
    }
    device.close(seq);
    let residuals = residuals.hashes.into_iter().map(hex).collect();
    Ok(Receipt { tokens: tokens.to_vec(), logits, residuals })
}
