//! Receipts: SHA-256 of what a run computed, so that other hardware can check it.

use crate::device::{Device, DeviceError, Observer, Row, SeqId};
use crate::geometry::Geometry;
use crate::model::Model;
use crate::plan::{Buf, Op, Pass};
use sha2::{Digest, Sha256};
use std::fmt;
use std::ops::Range;

/// Digests of one prompt's run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Receipt {
    /// The prompt.
    pub tokens: Vec<u32>,
    /// Positions that one digest of logits covers.
    pub span: usize,
    /// Of the logits as little-endian f32, `span` positions a digest, the last one what is left.
    pub logits: Vec<String>,
    /// Of the residual stream after the embedding and after each layer, all positions in order.
    pub residuals: Vec<String>,
}

/// The first part of a receipt that another does not share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mismatch {
    /// The receipts are of different prompts or spans.
    Prompt,
    /// The residual stream after this layer, or after the embedding.
    Residual(Option<usize>),
    /// Logits of these positions, while all residuals are the same.
    Logits(Range<usize>),
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mismatch::Prompt => f.write_str("the prompt is another"),
            Mismatch::Residual(None) => f.write_str("the embedding differs"),
            Mismatch::Residual(Some(layer)) => {
                write!(f, "layer {layer} is the first whose residual differs")
            }
            Mismatch::Logits(at) if at.len() == 1 => {
                write!(f, "all layers are the same, the logits of position {} differ", at.start)
            }
            Mismatch::Logits(at) => {
                write!(
                    f,
                    "all layers are the same, logits of positions {} to {} differ",
                    at.start,
                    at.end - 1
                )
            }
        }
    }
}

impl Receipt {
    /// Where two receipts of one prompt part first, in the order of the computation.
    pub fn mismatch(&self, other: &Receipt) -> Option<Mismatch> {
        let shape = |r: &Receipt| (r.span, r.logits.len(), r.residuals.len());
        if self.tokens != other.tokens || shape(self) != shape(other) {
            return Some(Mismatch::Prompt);
        }
        let first = |a: &[String], b: &[String]| a.iter().zip(b).position(|(a, b)| a != b);
        if let Some(at) = first(&self.residuals, &other.residuals) {
            return Some(Mismatch::Residual(at.checked_sub(1)));
        }
        let at = first(&self.logits, &other.logits)? * self.span;
        Some(Mismatch::Logits(at..(at + self.span).min(self.tokens.len())))
    }
}

/// Lengths of the built-in prompts.
const LENGTHS: [usize; 3] = [24, 100, 300];

/// Prompts that any model has: 24, 100 and 300 ids spread over the vocabulary, cut where the context is shorter.
pub fn prompts(geometry: &Geometry) -> Vec<Vec<u32>> {
    // 7919 is a prime: neighbouring positions get distant ids, and they repeat late.
    let id = |i: usize| ((i * 7919 + 11) % geometry.vocab) as u32;
    let starts = LENGTHS.iter().scan(0, |start, len| Some(std::mem::replace(start, *start + len)));
    starts
        .zip(LENGTHS)
        .map(|(start, len)| (start..start + len.min(geometry.context)).map(id).collect())
        .collect()
}

/// SHA-256 of consecutive parts, in hexadecimal.
pub fn hex_digest<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut hash = Sha256::new();
    parts.into_iter().for_each(|part| hash.update(part));
    hex(hash)
}

fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

fn add(hash: &mut Sha256, values: &[f32]) {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    hash.update(bytes);
}

/// For each step of the target's plan: which residual it completes, 0 after the embedding and l + 1 after layer l.
pub fn layer_ends(model: &Model) -> Vec<Option<usize>> {
    let steps = &model.plans.target.steps;
    let end = |op: &Op, stage, layer: Option<usize>| match op {
        Op::Embed { .. } => Some(0),
        // A layer's first tail follows attention.
        Op::Tail { .. } if stage == "ffn" => layer.map(|l| l + 1),
        _ => None,
    };
    steps.iter().map(|s| end(&s.op, s.stage, s.layer)).collect()
}

/// Feeds the residual after the embedding and after each layer into one digest each.
struct Residuals {
    ends: Vec<Option<usize>>,
    hashes: Vec<Sha256>,
}

impl Observer for Residuals {
    fn reads(&self) -> bool {
        true
    }

    fn after(&mut self, steps: Range<usize>, _seconds: f64, read: &mut dyn FnMut(Buf) -> Vec<f32>) {
        if let Some(hash) = self.ends[steps].iter().flatten().last() {
            add(&mut self.hashes[*hash], &read(Buf::X));
        }
    }
}

/// Runs `tokens` on a new sequence, `chunk` rows at a time, and digests logits (`span` positions each) and residuals.
pub fn receipt(
    model: &Model,
    device: &mut dyn Device,
    tokens: &[u32],
    chunk: usize,
    span: usize,
) -> Result<Receipt, DeviceError> {
    let seq = device.open(tokens.len())?;
    let digested = digest(model, device, seq, tokens, chunk.max(1), span.max(1));
    device.close(seq);
    digested
}

fn digest(
    model: &Model,
    device: &mut dyn Device,
    seq: SeqId,
    tokens: &[u32],
    chunk: usize,
    span: usize,
) -> Result<Receipt, DeviceError> {
    let layers = model.geometry().layers.len();
    let mut residuals = Residuals { ends: layer_ends(model), hashes: vec![Sha256::new(); layers + 1] };
    let mut logits = vec![Sha256::new(); tokens.len().div_ceil(span)];
    for (c, part) in tokens.chunks(chunk).enumerate() {
        let first = c * chunk;
        device.run(Pass::Target, &rows(seq, first, part), Some(&mut residuals))?;
        for i in 0..part.len() {
            add(&mut logits[(first + i) / span], device.logits(i)?);
        }
    }
    Ok(Receipt {
        tokens: tokens.to_vec(),
        span,
        logits: logits.into_iter().map(hex).collect(),
        residuals: residuals.hashes.into_iter().map(hex).collect(),
    })
}

/// Consecutive rows of one sequence from position `first` on, all asking for logits.
pub(crate) fn rows(seq: SeqId, first: usize, tokens: &[u32]) -> Vec<Row> {
    let row = |(i, t): (usize, &u32)| Row {
        feature: i as u32,
        ..Row::new(seq, (first + i) as u32, *t).with_logits()
    };
    tokens.iter().enumerate().map(row).collect()
}
