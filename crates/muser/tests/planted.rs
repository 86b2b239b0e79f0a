//! Planted errors: one unit in the last place, anywhere, is found and located.
#![allow(clippy::unwrap_used)]

use muser_core::compare::{Difference, first_difference};
use muser_core::model::Weights;
use muser_core::plan::Kind;
use muser_core::receipt::{Mismatch, receipt};
use muser_core::{
    Buf, Device, DeviceError, DeviceInfo, KvType, Lane, Model, Net, Observer, Op, Pass, Reference, Route,
    Row, SeqId, Slot, TensorView,
};
use muser_cpu::{CpuDevice, CpuOptions};
use muser_testkit::suite::Watch;
use muser_testkit::{model, prompts};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

const CHUNK: usize = 7;

fn cpu(model: &Arc<Model>, lane: Lane) -> CpuDevice {
    let options = CpuOptions { lane, max_rows: 32, ..CpuOptions::default() };
    CpuDevice::load(model.clone(), &options, &mut |_, _| {}).unwrap()
}

/// Where an error stands.
#[derive(Clone, Copy, Debug)]
struct Place {
    pass: Pass,
    step: usize,
    buf: Buf,
    position: usize,
    element: usize,
}

/// A device whose results are one unit in the last place off in one element.
struct Planted<'a> {
    inner: &'a mut dyn Device,
    width: usize,
    place: Place,
}

struct Bent<'a> {
    observer: &'a mut dyn Observer,
    width: usize,
    place: Place,
    first: usize,
}

impl Observer for Bent<'_> {
    fn reads(&self) -> bool {
        self.observer.reads()
    }
    fn after(&mut self, steps: Range<usize>, seconds: f64, read: &mut dyn FnMut(Buf) -> Vec<f32>) {
        let Bent { width, place, first, .. } = *self;
        self.observer.after(steps.clone(), seconds, &mut |buf| {
            let mut values = read(buf);
            if steps.contains(&place.step) && buf == place.buf && place.position >= first {
                let at = (place.position - first) * width + place.element;
                if let Some(value) = values.get_mut(at) {
                    *value = f32::from_bits(value.to_bits() ^ 1);
                }
            }
            values
        });
    }
}

impl Device for Planted<'_> {
    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }
    fn open(&mut self, context: usize) -> Result<SeqId, DeviceError> {
        self.inner.open(context)
    }
    fn close(&mut self, seq: SeqId) {
        self.inner.close(seq)
    }
    fn copy(&mut self, from: SeqId, to: SeqId, len: usize) -> Result<(), DeviceError> {
        self.inner.copy(from, to, len)
    }
    fn save(&mut self, seq: SeqId, len: usize) -> Result<Vec<u8>, DeviceError> {
        self.inner.save(seq, len)
    }
    fn restore(&mut self, seq: SeqId, len: usize, state: &[u8]) -> Result<(), DeviceError> {
        self.inner.restore(seq, len, state)
    }
    fn run(
        &mut self,
        pass: Pass,
        rows: &[Row],
        observer: Option<&mut dyn Observer>,
    ) -> Result<(), DeviceError> {
        let observer = observer.unwrap();
        let first = rows[0].pos as usize;
        if pass != self.place.pass {
            return self.inner.run(pass, rows, Some(observer));
        }
        let mut bent = Bent { observer, width: self.width, place: self.place, first };
        self.inner.run(pass, rows, Some(&mut bent))
    }
    fn logits(&mut self, index: usize) -> Result<&[f32], DeviceError> {
        self.inner.logits(index)
    }
    fn best(&mut self) -> Result<Vec<u32>, DeviceError> {
        self.inner.best()
    }
    fn routes(&self, pass: Pass, rows: usize, depth: usize) -> Vec<Route> {
        self.inner.routes(pass, rows, depth)
    }
}

/// Plants an error in every result of every kernel of a pass over `chunk` rows; returns the kernels' names.
fn plant_everywhere(
    lane: Lane,
    pass: Pass,
    chunk: usize,
    other: &mut dyn Device,
    model: &Arc<Model>,
) -> BTreeSet<String> {
    let (_, tokens) = &prompts()[0];
    let mut device = cpu(model, lane);
    let plan = model.plans.get(pass).unwrap();
    // A drafter's block follows the tokens, and its first row has no logits.
    let block = model.plans.draft.as_ref().map_or(1, |draft| draft.spec.block);
    let (first, rows, positions) = match pass {
        Pass::Draft => (tokens.len(), block, block - 1),
        _ => (0, chunk, tokens.len()),
    };
    let kernels = device.routes(pass, rows, 0);
    let mut covered = BTreeSet::new();
    for (k, kernel) in kernels.iter().enumerate() {
        let step = kernel.steps.end - 1;
        for buf in plan.steps[step].op.writes().into_iter().filter(|buf| *buf != Buf::Features) {
            let width = model.plans.width(pass, buf);
            let position = first + k * 5 % positions;
            let place = Place { pass, step, buf, position, element: k * 6971 % width };
            let mut bent = Planted { inner: &mut device, width, place };
            let found = first_difference(model, [&mut bent, &mut *other], tokens, chunk, 0.0).unwrap();
            let found = found.unwrap_or_else(|| panic!("{lane:?}, {chunk} rows: {place:?} was not found"));
            let Difference { layer, values: (a, b), .. } = found;
            assert_eq!(
                (found.pass, found.step, found.buf, found.position, found.element),
                (place.pass, place.step, place.buf, place.position, place.element)
            );
            assert_eq!(layer, plan.steps[step].layer);
            assert_eq!(a.to_bits() ^ b.to_bits(), 1);
            covered.insert(kernel.kernel.clone());
        }
    }
    assert_eq!(first_difference(model, [&mut device, other], tokens, chunk, 0.0).unwrap(), None);
    // What stores keys and values leaves nothing but what attention reads, what captures features what the drafter reads.
    let silent = ["kv-store", "capture"];
    for kernel in kernels.iter().filter(|k| !covered.contains(&k.kernel)) {
        assert!(silent.iter().any(|s| kernel.kernel.starts_with(s)), "no error was planted in {kernel:?}");
    }
    covered
}

/// A unit in the last place of any result of any kernel of the CPU: the strict lane beside the reference, the serving lane
/// beside itself, with passes of one row, of a few and of many.
#[test]
fn an_error_in_any_step_is_located() {
    let model = model("gguf/tiny-mix.gguf", None);
    let mut reference = Reference::new(model.clone(), KvType::F16, 32);
    for chunk in [1, CHUNK] {
        plant_everywhere(Lane::Strict, Pass::Target, chunk, &mut reference, &model);
    }
    let mut serving = BTreeSet::new();
    for chunk in [1, CHUNK, 24] {
        let mut other = cpu(&model, Lane::Serving);
        serving.extend(plant_everywhere(Lane::Serving, Pass::Target, chunk, &mut other, &model));
    }
    for kind in ["embed", "norm", "matvec", "rows", "gemm", "matvec-silu", "qk-norm-rope", "attend", "tail"] {
        assert!(serving.iter().any(|name| name.starts_with(kind)), "{kind} is not in {serving:?}");
    }
}

/// The same in the drafter's passes.
#[test]
fn an_error_in_any_step_of_the_drafter_is_located() {
    let model = model("gguf/tiny-Q8_0.gguf", Some("dflash/tiny-dflash-Q8_0.gguf"));
    let mut reference = Reference::new(model.clone(), KvType::F16, 32);
    for pass in [Pass::Inject, Pass::Draft] {
        let mut other = cpu(&model, Lane::Serving);
        plant_everywhere(Lane::Strict, pass, CHUNK, &mut reference, &model);
        plant_everywhere(Lane::Serving, pass, CHUNK, &mut other, &model);
    }
}

/// Stored keys or values that are one unit off are seen where attention reads them.
#[test]
fn an_error_in_a_stored_key_is_seen_by_attention() {
    let model = model("gguf/tiny-mix.gguf", None);
    let (_, tokens) = &prompts()[0];
    let last = tokens.len() - 1;
    for lane in [Lane::Strict, Lane::Serving] {
        let mut device = cpu(&model, lane);
        let seq = device.open(tokens.len()).unwrap();
        let row = |(i, token): (usize, &u32)| Row::new(seq, i as u32, *token);
        let rows: Vec<Row> = tokens.iter().enumerate().map(row).collect();
        device.run(Pass::Target, &rows, None).unwrap();
        let right = device.save(seq, last).unwrap();
        let mut attended = |state: &[u8]| {
            device.restore(seq, last, state).unwrap();
            let mut watch = Watch::new(&model, Pass::Target, Buf::A, |op, _| matches!(op, Op::Attend { .. }));
            device.run(Pass::Target, &rows[last..], Some(&mut watch)).unwrap();
            watch.seen
        };
        let want = attended(&right);
        // Half-precision values stand after the eight bytes of the length: sixteen of the first key, of a row between, of the last
        // value. One alone may weigh too little to change a sum of floats.
        for at in [8, right.len() / 2, right.len() - 32] {
            let mut bent = right.clone();
            bent[at..at + 32].iter_mut().step_by(2).for_each(|low| *low ^= 1);
            assert!(attended(&bent) != want, "{lane:?}: bytes from {at} on, of {}", right.len());
        }
        assert!(attended(&right) == want);
    }
}

/// A model with one changed weight.
struct OneBit {
    model: Arc<Model>,
    slot: Slot,
    data: Vec<u8>,
}

impl Weights for OneBit {
    fn get(&self, slot: Slot) -> Option<TensorView<'_>> {
        let view = self.model.tensor(slot).ok()?;
        Some(if slot == self.slot { TensorView { data: &self.data, ..view } } else { view })
    }
}

/// An error inside a kernel, which all later steps inherit: the scale of one block, an f16, is one unit in the last place
/// off. The first step and the row of the matrix are named, and a receipt names the layer.
#[test]
fn an_error_that_spreads_is_located_at_its_source() {
    let whole = model("gguf/tiny-Q8_0.gguf", None);
    let (_, tokens) = &prompts()[0];
    let mut reference = Reference::new(whole.clone(), KvType::F16, 32);
    let right = receipt(&whole, &mut cpu(&whole, Lane::Strict), tokens, CHUNK, 1).unwrap();
    for (layer, kind, row) in [
        (0, Kind::AttnQ, 3),
        (2, Kind::AttnV, 17),
        (3, Kind::AttnOutput, 200),
        (5, Kind::FfnUp, 90),
        (7, Kind::FfnDown, 255),
        (0, Kind::Output, 1000),
    ] {
        let slot = Slot { net: Net::Target, layer, kind };
        let tensor = whole.tensor(slot).unwrap();
        let mut data = tensor.data.to_vec();
        data[row * tensor.row_bytes()] ^= 1;
        let bits = Box::new(OneBit { model: whole.clone(), slot, data });
        let bent = Arc::new(Model::new(whole.geometry().clone(), bits, None).unwrap());
        let mut device = cpu(&bent, Lane::Strict);
        let found = first_difference(&whole, [&mut device, &mut reference], tokens, CHUNK, 0.0).unwrap();
        let found = found.unwrap_or_else(|| panic!("{slot} was not found"));
        let step = &whole.plans.target.steps[found.step];
        let source = match &step.op {
            Op::Project { outs, .. } => outs.iter().find(|(_, buf)| *buf == found.buf).map(|(s, _)| *s),
            Op::GateUp { up, .. } => Some(*up),
            // The CPU's head scales and caps at once.
            Op::ScaleCap { .. } => Some(Slot { net: Net::Target, layer: 0, kind: Kind::Output }),
            _ => None,
        };
        assert_eq!(source, Some(slot), "{found}");
        assert_eq!(found.element, row, "{found}");
        let mismatch = receipt(&whole, &mut device, tokens, CHUNK, 1).unwrap().mismatch(&right);
        match kind {
            Kind::Output => assert!(matches!(mismatch, Some(Mismatch::Logits(_))), "{mismatch:?}"),
            _ => assert_eq!(mismatch, Some(Mismatch::Residual(Some(layer.into()))), "{slot}"),
        }
    }
}
