//! Finding the first place where two devices differ: pass, step, buffer, row, element.

use crate::device::{Device, DeviceError, Observer, SeqId};
use crate::model::Model;
use crate::plan::{Buf, Pass};
use crate::receipt::rows;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

/// Where two runs part.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Which pass.
    pub pass: Pass,
    /// Index of the step in the pass's plan.
    pub step: usize,
    /// The step's name.
    pub name: String,
    /// The step's layer.
    pub layer: Option<usize>,
    /// The buffer whose values differ.
    pub buf: Buf,
    /// Row of the batch, counted from the first position.
    pub position: usize,
    /// Element of the row.
    pub element: usize,
    /// The two values.
    pub values: (f32, f32),
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Difference { step, name, layer, buf, position, element, values: (a, b), .. } = self;
        if let Some(layer) = layer {
            write!(f, "layer {layer}, ")?;
        }
        write!(f, "step {step} ({name}), buffer {buf:?}, position {position}, element {element}: ")?;
        write!(f, "{a:?} (bits {:08x}) against {b:?} (bits {:08x})", a.to_bits(), b.to_bits())
    }
}

/// What each step left in the buffers that it writes.
#[derive(Default)]
struct Record {
    steps: BTreeMap<usize, Vec<(Buf, Vec<f32>)>>,
}

struct Recorder<'a> {
    model: &'a Model,
    pass: Pass,
    record: Record,
}

impl Observer for Recorder<'_> {
    fn reads(&self) -> bool {
        true
    }

    fn after(&mut self, steps: Range<usize>, _seconds: f64, read: &mut dyn FnMut(Buf) -> Vec<f32>) {
        let Some(plan) = self.model.plans.get(self.pass) else { return };
        let Some(last) = steps.clone().last() else { return };
        // Buffers inside a fused kernel never leave it; what the range's last step writes does.
        let written = plan.steps[last].op.writes().into_iter().filter(|b| *b != Buf::Features);
        let values = written.map(|buf| (buf, read(buf))).collect();
        self.record.steps.insert(last, values);
    }
}

/// Runs `tokens` on both devices, `chunk` rows at a time, and compares every step that both report, bit by bit
/// (`tolerance` 0) or by absolute difference.
pub fn first_difference(
    model: &Model,
    devices: [&mut dyn Device; 2],
    tokens: &[u32],
    chunk: usize,
    tolerance: f32,
) -> Result<Option<Difference>, DeviceError> {
    let [a, b] = devices;
    let seq_a = a.open(tokens.len())?;
    let seq_b = match b.open(tokens.len()) {
        Ok(seq) => seq,
        Err(error) => {
            a.close(seq_a);
            return Err(error);
        }
    };
    let found = run_both(model, [(a, seq_a), (b, seq_b)], tokens, chunk.max(1), tolerance);
    a.close(seq_a);
    b.close(seq_b);
    found
}

fn run_both(
    model: &Model,
    devices: [(&mut dyn Device, SeqId); 2],
    tokens: &[u32],
    chunk: usize,
    tolerance: f32,
) -> Result<Option<Difference>, DeviceError> {
    let [(a, seq_a), (b, seq_b)] = devices;
    for (c, part) in tokens.chunks(chunk).enumerate() {
        let first = c * chunk;
        let mut one = Recorder { model, pass: Pass::Target, record: Record::default() };
        let mut two = Recorder { model, pass: Pass::Target, record: Record::default() };
        a.run(Pass::Target, &rows(seq_a, first, part), Some(&mut one))?;
        b.run(Pass::Target, &rows(seq_b, first, part), Some(&mut two))?;
        let found = compare(model, &one.record, &two.record, first, tolerance);
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

fn compare(model: &Model, a: &Record, b: &Record, first: usize, tolerance: f32) -> Option<Difference> {
    for (step, ours) in &a.steps {
        let Some(theirs) = b.steps.get(step) else { continue };
        for ((buf, x), (_, y)) in ours.iter().zip(theirs) {
            let width = model.plans.width(Pass::Target, *buf).max(1);
            let differs = |(x, y): (&f32, &f32)| {
                if tolerance == 0.0 {
                    x.to_bits() != y.to_bits()
                } else {
                    (x - y).abs() > tolerance || x.is_nan() != y.is_nan()
                }
            };
            let missing = (x.len() != y.len()).then_some(x.len().min(y.len()));
            if let Some(at) = x.iter().zip(y).position(differs).or(missing) {
                let info = &model.plans.target.steps[*step];
                let value = |v: &[f32]| v.get(at).copied().unwrap_or(f32::NAN);
                return Some(Difference {
                    pass: Pass::Target,
                    step: *step,
                    name: info.name.clone(),
                    layer: info.layer,
                    buf: *buf,
                    position: first + at / width,
                    element: at % width,
                    values: (value(x), value(y)),
                });
            }
        }
    }
    None
}
