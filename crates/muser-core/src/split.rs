//! One model on two devices: the first layers on one, the others with head and drafter on the other.

use crate::device::{Device, DeviceError, DeviceInfo, Largest, Limits, Observer, Route, Row, SeqId};
use crate::model::Model;
use crate::plan::{Buf, Op, Pass};
use crate::sample::TokenMask;
use std::collections::HashMap;
use std::ops::Range;
use std::time::Instant;

/// Two devices, each with its part of [`Model::split`]. In the target's pass the first hands its rows to the second; a drafter's passes
/// are the second's alone, which has the head that they share, so features that the first captured go over with the rows.
pub struct Split {
    devices: [Box<dyn Device>; 2],
    /// Steps and layers of the first.
    border: usize,
    layers: usize,
    /// Layers of both.
    all_layers: usize,
    /// Whether the first captures features.
    captures: bool,
    /// Each device numbers its sequences itself.
    sequences: HashMap<SeqId, [SeqId; 2]>,
    next: u32,
}

impl Split {
    /// `devices` have loaded the two parts.
    pub fn new(parts: [&Model; 2], devices: [Box<dyn Device>; 2]) -> Result<Self, DeviceError> {
        let [a, b] = [devices[0].info().lane, devices[1].info().lane];
        if a != b {
            return Err(DeviceError::Backend(format!("a pass has one lane, not {a:?} and {b:?}")));
        }
        let steps = &parts[0].plans.target.steps;
        Ok(Split {
            devices,
            border: steps.len(),
            layers: parts[0].plans.caches.len(),
            all_layers: parts[0].geometry().layers.len(),
            captures: steps.iter().any(|s| matches!(s.op, Op::Capture { .. })),
            sequences: HashMap::new(),
            next: 0,
        })
    }

    fn both(&self, seq: SeqId) -> Result<[SeqId; 2], DeviceError> {
        self.sequences.get(&seq).copied().ok_or(DeviceError::NoSequence(seq.0))
    }

    /// Rows as device `which` numbers their sequences.
    fn rows(&self, which: usize, rows: &[Row]) -> Result<Vec<Row>, DeviceError> {
        rows.iter().map(|row| Ok(Row { seq: self.both(row.seq)?[which], ..*row })).collect()
    }

    /// Hands over what lives where the first part ends.
    fn hand_over(&mut self, rows: &[Row]) -> Result<(), DeviceError> {
        let [first, last] = &mut self.devices;
        for buf in [Buf::X, Buf::P] {
            last.place(buf, 0, &first.fetch(buf, 0..rows.len())?)?;
        }
        if self.captures {
            // What the second captures itself of these rows, it writes afterwards.
            for run in rows.chunk_by(|a, b| a.feature.checked_add(1) == Some(b.feature)) {
                let at = run[0].feature as usize;
                last.place(Buf::Features, at, &first.fetch(Buf::Features, at..at + run.len())?)?;
            }
        }
        Ok(())
    }
}

/// The routes of the parts as those of the whole; the first has `border` steps.
pub fn join_routes(border: usize, mut first: Vec<Route>, last: Vec<Route>) -> Vec<Route> {
    first.extend(last.into_iter().map(|route| Route { steps: moved(route.steps, border), ..route }));
    first
}

fn moved(steps: Range<usize>, by: usize) -> Range<usize> {
    steps.start + by..steps.end + by
}

/// Tells an observer of the second part's kernels; the first took over the rows.
struct After<'a> {
    observer: &'a mut dyn Observer,
    border: usize,
    handed: f64,
}

impl Observer for After<'_> {
    fn reads(&self) -> bool {
        self.observer.reads()
    }
    fn after(&mut self, steps: Range<usize>, seconds: f64, read: &mut dyn FnMut(Buf) -> Vec<f32>) {
        let handed = std::mem::take(&mut self.handed);
        self.observer.after(moved(steps, self.border), seconds + handed, read);
    }
}

impl Device for Split {
    fn info(&self) -> DeviceInfo {
        let [first, last] = [self.devices[0].info(), self.devices[1].info()];
        DeviceInfo {
            kind: format!("{} --gpu-layers {}", last.kind, self.all_layers - self.layers),
            name: format!(
                "{} of {} layers on {}, the rest on {}",
                self.layers, self.all_layers, first.name, last.name
            ),
            lane: last.lane,
            max_rows: first.max_rows.min(last.max_rows),
            step_rows: first.step_rows.min(last.step_rows),
            weight_bytes: first.weight_bytes + last.weight_bytes,
        }
    }

    fn open(&mut self, context: usize) -> Result<SeqId, DeviceError> {
        let [a, b] = &mut self.devices;
        let first = a.open(context)?;
        let last = b.open(context).inspect_err(|_| a.close(first))?;
        let id = SeqId(self.next);
        self.next += 1;
        self.sequences.insert(id, [first, last]);
        Ok(id)
    }

    fn close(&mut self, seq: SeqId) {
        let parts = self.sequences.remove(&seq).into_iter().flatten();
        self.devices.iter_mut().zip(parts).for_each(|(device, seq)| device.close(seq));
    }

    fn copy(&mut self, from: SeqId, to: SeqId, len: usize) -> Result<(), DeviceError> {
        let pairs = self.both(from)?.into_iter().zip(self.both(to)?);
        self.devices.iter_mut().zip(pairs).try_for_each(|(device, (from, to))| device.copy(from, to, len))
    }

    fn save(&mut self, seq: SeqId, len: usize) -> Result<Vec<u8>, DeviceError> {
        let [first, last] = self.both(seq)?;
        let state = self.devices[0].save(first, len)?;
        let mut out = (state.len() as u64).to_le_bytes().to_vec();
        out.extend(state);
        out.extend(self.devices[1].save(last, len)?);
        Ok(out)
    }

    fn restore(&mut self, seq: SeqId, len: usize, state: &[u8]) -> Result<(), DeviceError> {
        let [a, b] = self.both(seq)?;
        let cut = state
            .split_first_chunk::<8>()
            .and_then(|(size, rest)| rest.split_at_checked(usize::try_from(u64::from_le_bytes(*size)).ok()?));
        let (first, last) =
            cut.ok_or_else(|| DeviceError::BadState("it is truncated; prefill the prompt again".into()))?;
        self.devices[0].restore(a, len, first)?;
        self.devices[1].restore(b, len, last)
    }

    fn run(
        &mut self,
        pass: Pass,
        rows: &[Row],
        mut observer: Option<&mut dyn Observer>,
    ) -> Result<(), DeviceError> {
        let mine = self.rows(1, rows)?;
        if pass != Pass::Target {
            return self.devices[1].run(pass, &mine, observer);
        }
        let mut before = self.rows(0, rows)?;
        before.iter_mut().for_each(|row| row.logits = false);
        match observer.as_mut() {
            Some(observer) => self.devices[0].run(pass, &before, Some(&mut **observer))?,
            None => self.devices[0].run(pass, &before, None)?,
        }
        let start = Instant::now();
        self.hand_over(&before)?;
        let Some(observer) = observer else { return self.devices[1].run(pass, &mine, None) };
        let mut after = After { observer, border: self.border, handed: start.elapsed().as_secs_f64() };
        self.devices[1].run(pass, &mine, Some(&mut after))
    }

    fn logits(&mut self, index: usize) -> Result<&[f32], DeviceError> {
        self.devices[1].logits(index)
    }

    fn largest(
        &mut self,
        index: usize,
        k: usize,
        mask: Option<&TokenMask>,
    ) -> Result<Option<Largest<'_>>, DeviceError> {
        self.devices[1].largest(index, k, mask)
    }

    fn finish(&mut self) -> Result<(), DeviceError> {
        self.devices[1].finish()
    }

    fn best(&mut self) -> Result<Vec<u32>, DeviceError> {
        self.devices[1].best()
    }

    fn routes(&self, pass: Pass, rows: usize, depth: usize) -> Vec<Route> {
        let [first, last] = &self.devices;
        let last = last.routes(pass, rows, depth);
        if pass == Pass::Target {
            join_routes(self.border, first.routes(pass, rows, depth), last)
        } else {
            last
        }
    }

    fn limits(&mut self, pass: Pass) -> Result<Vec<(usize, Option<Limits>)>, DeviceError> {
        let [first, last] = &mut self.devices;
        let last = last.limits(pass)?;
        if pass != Pass::Target {
            return Ok(last);
        }
        let mut all = first.limits(pass)?;
        all.extend(last.into_iter().map(|(step, limits)| (step + self.border, limits)));
        Ok(all)
    }
}
