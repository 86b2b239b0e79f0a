//! The largest logits of a pass' rows, which kernels/largest.cu finds and leaves in page-locked memory.

use crate::gpu::{Gpu, Memory, Received};
use crate::launch::Args;
use muser_core::sample::TokenMask;
use muser_core::{DeviceError, Largest};

/// Largest logits of a row that are found; the kernel's `k`.
const MOST: usize = 128;
/// Tokens that may reach the floor: more do where logits are equal, or several large ones are neighbours.
const ROOM: usize = 1024;
/// Rows that are searched at once at most.
const ROWS: usize = 256;
/// Tokens of a span, and spans of a row: mirrors of kernels/largest.cu.
const SPAN: usize = 256;
const SPANS: usize = 1024;
/// Words that a row leaves.
const FOUND: usize = 2 + 2 * ROOM;

pub(crate) struct Search {
    vocab: usize,
    rows: usize,
    spans: Memory,
    /// A place for each row, and behind them one for a row with a mask.
    found: Received<u32>,
    mask: Received<u32>,
    tokens: Vec<(u32, f32)>,
    /// Whether the places hold what the last pass left.
    done: bool,
}

impl Search {
    /// For passes of at most `rows` rows and a vocabulary.
    pub fn new(gpu: &Gpu, rows: usize, vocab: usize) -> Result<Self, DeviceError> {
        let rows = rows.min(ROWS);
        Ok(Search {
            vocab,
            rows,
            spans: gpu.alloc((rows + 1) * SPANS * 4)?,
            found: gpu.received((rows + 1) * FOUND)?,
            mask: gpu.received(vocab.div_ceil(32))?,
            tokens: vec![],
            done: false,
        })
    }

    /// A new pass begins.
    pub fn forget(&mut self) {
        self.done = false;
    }

    /// What [`muser_core::Device::largest`] gives for row `index` of the last pass' `rows` rows of logits. Without a mask all rows are
    /// searched at once.
    pub fn row(
        &mut self,
        gpu: &Gpu,
        logits: &Memory,
        (index, rows): (usize, usize),
        k: usize,
        mask: Option<&TokenMask>,
    ) -> Result<Option<Largest<'_>>, DeviceError> {
        if k > MOST || rows > self.rows || self.vocab > SPAN * SPANS {
            return Ok(None);
        }
        let place = if mask.is_some() { self.rows } else { index };
        if let Some(mask) = mask {
            let words = self.mask.write()?;
            if mask.words().len() != words.len() {
                return Ok(None);
            }
            words.copy_from_slice(mask.words());
            self.launch(gpu, logits, index, (place, 1), self.mask.address()?)?;
        } else if !self.done {
            self.launch(gpu, logits, 0, (0, rows), 0)?;
            self.done = true;
        }
        let found = &self.found.read()?[place * FOUND..][..FOUND];
        let (count, floor) = (found[0] as usize, f32::from_bits(found[1]));
        if count > ROOM {
            return Ok(None);
        }
        self.tokens.clear();
        self.tokens.extend(found[2..][..2 * count].chunks_exact(2).map(|t| (t[0], f32::from_bits(t[1]))));
        Ok(Some(Largest { tokens: &self.tokens, floor }))
    }

    /// Searches rows of logits from `first` on, and leaves what it finds from a place on.
    fn launch(
        &self,
        gpu: &Gpu,
        logits: &Memory,
        first: usize,
        (place, rows): (usize, usize),
        mask: u64,
    ) -> Result<(), DeviceError> {
        let row = Args::default().ptr(logits.ptr).int(self.vocab).int(first).ptr(mask);
        let spans = self.spans.ptr + (place * SPANS * 4) as u64;
        let grid = (rows as u32, self.vocab.div_ceil(8 * SPAN) as u32, 1);
        gpu.launch(gpu.kernel("span_largest")?, grid, 256, 0, &row.clone().ptr(spans).0)?;
        let found = self.found.address()? + (place * FOUND * 4) as u64;
        let args = row.ptr(spans).int(MOST).int(ROOM).ptr(found);
        gpu.launch(gpu.kernel("largest_found")?, (rows as u32, 1, 1), 1024, 0, &args.0)?;
        gpu.fills(&self.found)
    }
}
