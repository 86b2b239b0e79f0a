//! Finding the first place where two devices differ: pass, step, buffer, row, element.

use crate::device::{Device, DeviceError, Observer, Row, SeqId};
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
        let Difference { pass, step, name, layer, buf, position, element, values: (a, b) } = self;
        f.write_str(match pass {
            Pass::Target => "",
            Pass::Inject => "features for the drafter, ",
            Pass::Draft => "drafter's block, ",
        })?;
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
/// (`tolerance` 0) or by absolute difference. With a drafter its passes are compared too: each chunk's features, and a
/// block of masks after the last token.
pub fn first_difference(
    model: &Model,
    devices: [&mut dyn Device; 2],
    tokens: &[u32],
    chunk: usize,
    tolerance: f32,
) -> Result<Option<Difference>, DeviceError> {
    let [a, b] = devices;
    let block = block(model, [&*a, &*b], tokens.len());
    let context = tokens.len() + block;
    let seq_a = a.open(context)?;
    let seq_b = match b.open(context) {
        Ok(seq) => seq,
        Err(error) => {
            a.close(seq_a);
            return Err(error);
        }
    };
    let found = run_both(model, [(a, seq_a), (b, seq_b)], tokens, block, chunk.max(1), tolerance);
    a.close(seq_a);
    b.close(seq_b);
    found
}

/// Rows of a drafter's block after `len` tokens: no more than both devices take and the model has positions for.
fn block(model: &Model, devices: [&dyn Device; 2], len: usize) -> usize {
    let Some(draft) = &model.plans.draft else { return 0 };
    let room = model.geometry().context.saturating_sub(len);
    devices.iter().map(|d| d.info().max_rows).fold(draft.spec.block.min(room), usize::min)
}

fn run_both(
    model: &Model,
    devices: [(&mut dyn Device, SeqId); 2],
    tokens: &[u32],
    block: usize,
    chunk: usize,
    tolerance: f32,
) -> Result<Option<Difference>, DeviceError> {
    let [(a, seq_a), (b, seq_b)] = devices;
    let mut differ = |pass: Pass, first: usize, batch: &dyn Fn(SeqId) -> Vec<Row>| {
        let recorder = || Recorder { model, pass, record: Record::default() };
        let (mut one, mut two) = (recorder(), recorder());
        a.run(pass, &batch(seq_a), Some(&mut one))?;
        b.run(pass, &batch(seq_b), Some(&mut two))?;
        Ok::<_, DeviceError>(compare(model, pass, &one.record, &two.record, first, tolerance))
    };
    for (c, part) in tokens.chunks(chunk).enumerate() {
        let first = c * chunk;
        let mut found = differ(Pass::Target, first, &|seq| rows(seq, first, part))?;
        if found.is_none() && model.plans.draft.is_some() {
            let silent = |row: Row| Row { logits: false, ..row };
            found =
                differ(Pass::Inject, first, &|seq| rows(seq, first, part).into_iter().map(silent).collect())?;
        }
        if found.is_some() {
            return Ok(found);
        }
    }
    let (Some(draft), Some(anchor)) = (&model.plans.draft, tokens.last().filter(|_| block > 1)) else {
        return Ok(None);
    };
    differ(Pass::Draft, tokens.len(), &|seq| {
        let mut all = vec![draft.spec.mask_token; block];
        all[0] = *anchor;
        let mut rows = rows(seq, tokens.len(), &all);
        rows[0].logits = false;
        rows
    })
}

fn compare(
    model: &Model,
    pass: Pass,
    a: &Record,
    b: &Record,
    first: usize,
    tolerance: f32,
) -> Option<Difference> {
    let plan = model.plans.get(pass)?;
    for (step, ours) in &a.steps {
        let Some(theirs) = b.steps.get(step) else { continue };
        for ((buf, x), (_, y)) in ours.iter().zip(theirs) {
            let width = model.plans.width(pass, *buf).max(1);
            let differs = |(x, y): (&f32, &f32)| {
                if tolerance == 0.0 {
                    x.to_bits() != y.to_bits()
                } else {
                    (x - y).abs() > tolerance || x.is_nan() != y.is_nan()
                }
            };
            let missing = (x.len() != y.len()).then_some(x.len().min(y.len()));
            if let Some(at) = x.iter().zip(y).position(differs).or(missing) {
                let info = &plan.steps[*step];
                let value = |v: &[f32]| v.get(at).copied().unwrap_or(f32::NAN);
                return Some(Difference {
                    pass,
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
