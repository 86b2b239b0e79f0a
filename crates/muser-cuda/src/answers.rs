//! What the host reads of a pass, in page-locked memory: greedy choices, which a kernel writes there, and a row of logits.

use crate::gpu::{Gpu, Memory, Received};
use crate::launch::Args;
use muser_core::DeviceError;

/// Parts of a row whose largest logits are found side by side.
const PARTS: usize = 8;

pub(crate) struct Answers {
    /// Largest logit and its token, for each part of each row.
    best: Received<u32>,
    row: Received<f32>,
    /// Comes while `row` is sampled from.
    next: Received<f32>,
    /// The rows that these two hold.
    held: [Option<usize>; 2],
}

impl Answers {
    /// For passes of at most `rows` rows and a vocabulary.
    pub fn new(gpu: &Gpu, rows: usize, vocab: usize) -> Result<Self, DeviceError> {
        Ok(Answers {
            best: gpu.received(rows * PARTS * 2)?,
            row: gpu.received(vocab)?,
            next: gpu.received(vocab)?,
            held: [None; 2],
        })
    }

    /// A new pass begins.
    pub fn forget(&mut self) {
        self.held = [None; 2];
    }

    /// Row `index` of the last pass' `rows` rows of logits; asked for again, it is not copied again.
    pub fn row(
        &mut self,
        gpu: &Gpu,
        logits: &Memory,
        index: usize,
        rows: usize,
    ) -> Result<&[f32], DeviceError> {
        let bytes = self.row.len() * 4;
        if self.held[1] == Some(index) {
            std::mem::swap(&mut self.row, &mut self.next);
            self.held.swap(0, 1);
        }
        if self.held[0] != Some(index) {
            self.held[0] = None;
            gpu.receive(logits, index * bytes, &mut self.row)?;
            self.held[0] = Some(index);
        }
        let next = Some(index + 1).filter(|next| *next < rows);
        if next.is_some() && self.held[1] != next {
            self.held[1] = None;
            gpu.receive(logits, (index + 1) * bytes, &mut self.next)?;
            self.held[1] = next;
        }
        self.row.read()
    }

    /// The largest logit's token for each of `rows` rows.
    pub fn best(&mut self, gpu: &Gpu, logits: &Memory, rows: usize) -> Result<Vec<u32>, DeviceError> {
        let args = Args::default().ptr(logits.ptr).int(self.row.len()).ptr(self.best.address()?);
        gpu.launch(gpu.kernel("argmax")?, (rows as u32, PARTS as u32, 1), 1024, 0, &args.0)?;
        gpu.fills(&self.best)?;
        // Of equal parts the first has the lowest index.
        let largest = |row: &[u32]| {
            let parts = row.chunks_exact(2).map(|part| (f32::from_bits(part[0]), part[1]));
            parts.reduce(|a, b| if b.0 > a.0 { b } else { a }).map_or(0, |best| best.1)
        };
        Ok(self.best.read()?.chunks_exact(PARTS * 2).take(rows).map(largest).collect())
    }
}
