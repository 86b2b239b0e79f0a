//! What a device is: it loads a model, keeps sequences, and runs passes over rows.

use crate::plan::{Buf, Pass};
use crate::sample::TokenMask;
use std::ops::Range;
use thiserror::Error;

/// Which arithmetic a device uses; chosen once for an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Lane {
    /// The fastest that keeps quality.
    #[default]
    Serving,
    /// The same bits on every device ([`crate::strict`]).
    Strict,
}

/// A sequence's place on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SeqId(pub u32);

/// One row of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Token id (unused by [`Pass::Inject`]).
    pub token: u32,
    /// The row's sequence.
    pub seq: SeqId,
    /// The row's position in its sequence.
    pub pos: u32,
    /// Whether the row's logits are wanted.
    pub logits: bool,
    /// The row of [`Buf::Features`] that this row's captures are written to ([`Pass::Target`]) or read from
    /// ([`Pass::Inject`]). Features have `2 * max_rows` rows and keep them until they are written again.
    pub feature: u32,
}

impl Row {
    /// A row without logits.
    pub fn new(seq: SeqId, pos: u32, token: u32) -> Self {
        Row { token, seq, pos, logits: false, feature: 0 }
    }
    /// The same row, asking for logits.
    pub fn with_logits(self) -> Self {
        Row { logits: true, ..self }
    }
}

/// What a device says of itself.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// `cpu`, `cuda`, `reference`; of a [`crate::Split`] also how it is split.
    pub kind: String,
    /// Model of the processor or card, instruction set, threads.
    pub name: String,
    /// Arithmetic.
    pub lane: Lane,
    /// Rows that one pass takes at most; also the room of a ring beyond its window.
    pub max_rows: usize,
    /// Rows that a decode step takes at most: fewer where a row's bits must not, but in larger passes would, depend on the rows beside it.
    pub step_rows: usize,
    /// Bytes held for weights.
    pub weight_bytes: u64,
}

/// One kernel of a compiled pass: a row of `muser kernels`.
#[derive(Clone, Debug)]
pub struct Route {
    /// The plan's steps that the kernel serves, in order (several where it fuses).
    pub steps: Range<usize>,
    /// Kernel's name, `{what}-{dtype}-{isa}`.
    pub kernel: String,
    /// Library and lane, such as `muser-cpu S`.
    pub library: &'static str,
    /// Source file within the library's crate.
    pub file: &'static str,
    /// Each kernel that could have served, with its condition; the one marked true was taken.
    pub ladder: Vec<(String, String, bool)>,
}

/// Watches a pass kernel by kernel; used by trace, receipts and verification.
pub trait Observer {
    /// Whether `after` will read buffers (a device may then have to wait for each kernel).
    fn reads(&self) -> bool;
    /// Called after the kernel that serves `steps`; `seconds` is the kernel's own time; `read` copies a buffer's rows out.
    fn after(&mut self, steps: Range<usize>, seconds: f64, read: &mut dyn FnMut(Buf) -> Vec<f32>);
}

/// Why a device refused or failed.
#[derive(Debug, Error)]
pub enum DeviceError {
    /// Memory that was needed is not there; computed before anything was allocated.
    #[error("{what} needs {need} bytes and {have} are free; {mend}")]
    #[allow(missing_docs)]
    Memory { what: String, need: u64, have: u64, mend: String },
    /// The device has no kernel for a step of the plan.
    #[error("no kernel for step {step} ({why}) on {device}; {mend}")]
    #[allow(missing_docs)]
    NoKernel { step: String, why: String, device: String, mend: String },
    /// A row that does not fit the sequence or the batch; a fault of the caller.
    #[error("row {row}: {why}")]
    #[allow(missing_docs)]
    BadRow { row: usize, why: String },
    /// An unknown sequence.
    #[error("sequence {0} is not open on this device")]
    NoSequence(u32),
    /// A saved state that does not fit this device.
    #[error("saved state: {0}")]
    BadState(String),
    /// A weight that the plan needs cannot be read.
    #[error(transparent)]
    Model(#[from] crate::model::ModelError),
    /// The driver, the compiler or the hardware.
    #[error("{0}")]
    Backend(String),
}

/// What a device's hardware can do at most, measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Bytes a second, read from its memory.
    pub bytes_per_second: f64,
    /// Multiplications and additions a second of the units that multiply matrices.
    pub operations_per_second: f64,
}

impl Limits {
    /// The better of two measurements: other work on the machine only ever takes away.
    pub fn best(self, other: Limits) -> Limits {
        Limits {
            bytes_per_second: self.bytes_per_second.max(other.bytes_per_second),
            operations_per_second: self.operations_per_second.max(other.operations_per_second),
        }
    }
}

/// The largest logits of a row, for who needs no others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Largest<'a> {
    /// All tokens whose logit is at least `floor`, of those that were allowed, in no order. Every logit of the row is finite.
    pub tokens: &'a [(u32, f32)],
    /// Minus infinity where these are all that were allowed.
    pub floor: f32,
}

/// A processor that holds one model (and its drafter) and any number of sequences.
///
/// Rows of one sequence stand together in a batch, in rising consecutive positions. A pass first stores K and V of all
/// rows, then attends; a ring has `window + max_rows` rows, so nothing that a row still sees is overwritten. For the same
/// reason a sequence may be continued from any earlier position within `max_rows` of its end: positions alone decide what
/// is visible, so rolling back needs no call.
pub trait Device: Send {
    /// What this is.
    fn info(&self) -> DeviceInfo;
    /// Opens a sequence of at most `context` positions.
    fn open(&mut self, context: usize) -> Result<SeqId, DeviceError>;
    /// Frees a sequence; unknown ones are ignored.
    fn close(&mut self, seq: SeqId);
    /// Makes `to`'s state equal to the first `len` positions of `from`.
    fn copy(&mut self, from: SeqId, to: SeqId, len: usize) -> Result<(), DeviceError>;
    /// The state of the first `len` positions (for rings: what a row at `len` or later can see) as bytes.
    fn save(&mut self, seq: SeqId, len: usize) -> Result<Vec<u8>, DeviceError>;
    /// Restores what [`Device::save`] gave, on the same kind of device with the same model. Where that fails, what the sequence holds
    /// can't be used.
    fn restore(&mut self, seq: SeqId, len: usize, state: &[u8]) -> Result<(), DeviceError>;
    /// Runs a pass over `rows`.
    fn run(
        &mut self,
        pass: Pass,
        rows: &[Row],
        observer: Option<&mut dyn Observer>,
    ) -> Result<(), DeviceError>;
    /// Logits of the `index`-th row that asked for them in the last pass, `vocab` values.
    fn logits(&mut self, index: usize) -> Result<&[f32], DeviceError>;
    /// At least the `k` largest of these logits, or of those that a mask allows, where that costs less than all of them; none elsewhere, or
    /// where a logit isn't finite.
    fn largest(
        &mut self,
        _index: usize,
        _k: usize,
        _mask: Option<&TokenMask>,
    ) -> Result<Option<Largest<'_>>, DeviceError> {
        Ok(None)
    }
    /// Waits until the last pass is done, and what was asked of it.
    fn finish(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }
    /// Index of the largest logit of each row that asked (the lowest index among equals).
    fn best(&mut self) -> Result<Vec<u32>, DeviceError>;
    /// The kernels that a pass over `rows` rows at depth `depth` runs, in order.
    fn routes(&self, pass: Pass, rows: usize, depth: usize) -> Vec<Route>;
    /// What the hardware can do, measured now: from which step of a pass on, and `None` where this is the host's processor.
    fn limits(&mut self, _pass: Pass) -> Result<Vec<(usize, Option<Limits>)>, DeviceError> {
        Ok(vec![(0, None)])
    }
    /// Rows of a buffer as the last pass of the first part of a model left them ([`crate::Split`]).
    fn fetch(&mut self, _buf: Buf, _rows: Range<usize>) -> Result<Vec<f32>, DeviceError> {
        Err(DeviceError::Backend("this device can't run the first part of a model".into()))
    }
    /// Rows of a buffer, from row `first` on, for the next pass of the second part.
    fn place(&mut self, _buf: Buf, _first: usize, _values: &[f32]) -> Result<(), DeviceError> {
        Err(DeviceError::Backend("this device can't run the second part of a model".into()))
    }
}

/// Checks a batch against the [`Device`] contract; every device calls it first. `context` gives an open sequence's length.
pub fn check_rows(
    model: &crate::Model,
    pass: Pass,
    rows: &[Row],
    max_rows: usize,
    context: impl Fn(SeqId) -> Option<usize>,
) -> Result<(), DeviceError> {
    let bad = |row: usize, why: String| Err(DeviceError::BadRow { row, why });
    if rows.is_empty() || rows.len() > max_rows {
        return bad(rows.len(), format!("a batch holds 1 to {max_rows} rows"));
    }
    let vocab = model.geometry().vocab;
    for (i, row) in rows.iter().enumerate() {
        let length = context(row.seq).ok_or(DeviceError::NoSequence(row.seq.0))?;
        if row.pos as usize >= length {
            return bad(i, format!("position {} is outside the sequence's {length}", row.pos));
        }
        if pass != Pass::Inject && row.token as usize >= vocab {
            return bad(i, format!("token {} is outside the vocabulary of {vocab}", row.token));
        }
        if row.feature as usize >= 2 * max_rows {
            return bad(
                i,
                format!("feature row {} is outside the {} that are kept", row.feature, 2 * max_rows),
            );
        }
        if i > 0 && rows[i - 1].seq == row.seq {
            if rows[i - 1].pos + 1 != row.pos {
                return bad(i, format!("position {} does not follow {}", row.pos, rows[i - 1].pos));
            }
        } else if rows[..i].iter().any(|r| r.seq == row.seq) {
            return bad(i, "rows of one sequence must stand together".into());
        }
    }
    Ok(())
}

/// Rows of what a pass left in a buffer, for [`Device::fetch`] of devices that keep buffers in the host's memory.
pub fn kept_rows(
    kept: Option<&[f32]>,
    buf: Buf,
    rows: Range<usize>,
    width: usize,
) -> Result<Vec<f32>, DeviceError> {
    let found = kept.and_then(|kept| kept.get(rows.start * width..rows.end * width));
    found
        .map(<[f32]>::to_vec)
        .ok_or_else(|| DeviceError::Backend(format!("no pass left rows {rows:?} of {buf:?}")))
}

/// Index of the largest value, the lowest among equals; NaN never wins. Without any number, the last index.
pub fn argmax(values: &[f32]) -> u32 {
    // A block's maximum is vector code; only the best block is searched for its place.
    const BLOCK: usize = 4096;
    let (mut best, mut first) = (f32::NEG_INFINITY, 0);
    for (b, block) in values.chunks(BLOCK).enumerate() {
        let most = largest(block);
        if most > best {
            (best, first) = (most, b * BLOCK);
        }
    }
    let found = values[first..].iter().position(|v| *v == best);
    found.map_or(values.len().saturating_sub(1), |at| first + at) as u32
}

/// Largest value that is a number. Sixteen running maxima: none waits for another.
fn largest(values: &[f32]) -> f32 {
    let greater = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; 16];
    let (blocks, rest) = values.as_chunks::<16>();
    for block in blocks {
        for (lane, v) in lanes.iter_mut().zip(block) {
            *lane = greater(*lane, *v);
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |a, b| greater(a, *b))
}

#[cfg(test)]
mod tests {
    use super::argmax;

    fn plain(values: &[f32]) -> u32 {
        let mut best = 0;
        for (i, v) in values.iter().enumerate() {
            if *v > values[best] || values[best].is_nan() {
                best = i;
            }
        }
        best as u32
    }

    #[test]
    fn argmax_is_the_plain_loops() {
        let mut seed = 1u32;
        let mut next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            seed >> 8
        };
        let odd = [f32::NAN, f32::NEG_INFINITY, f32::INFINITY, -0.0, 0.0];
        for len in (0..70).chain([4095, 4096, 4097, 8192, 10_007]) {
            // Of how many values one is odd, and how many of those may occur.
            for (one_of, kinds) in [(u32::MAX, 1), (1, 1), (1, 2), (9, 2), (40, 5), (1, 5)] {
                let value = |r: u32, which: u32| match r % one_of {
                    0 => odd[which as usize % kinds],
                    _ => (r % 1999) as f32 - 1500.0,
                };
                let values: Vec<f32> = (0..len).map(|_| value(next(), next())).collect();
                assert_eq!(argmax(&values), plain(&values), "{len} values, one odd of {one_of}");
            }
        }
    }
}
