//! The conformance suite: what every device must do, whatever its kernels are called.

use crate::fixtures::{Arrays, json, model, prompts};
use crate::{max_difference, mean_kl};
use muser_core::{Buf, Device, Model, Observer, Op, Pass, Row, SeqId, Split};
use std::ops::Range;
use std::sync::Arc;

/// Makes a device for a model.
pub type Make<'a> = &'a dyn Fn(Arc<Model>) -> Box<dyn Device>;

/// How exact a device's arithmetic is.
#[derive(Clone, Copy, Debug)]
pub struct Exactness {
    /// Results of the same rows computed in other batches: equal bits (0) or at most this far apart.
    pub regroup: f32,
    /// Distance of logits to the same computation in f32.
    pub reference: f32,
    /// Mean KL of logits to the same computation in f32.
    pub kl: f64,
}

impl Exactness {
    /// The strict lane and the reference: f32 with f16 KV.
    pub const STRICT: Exactness = Exactness { regroup: 0.0, reference: 0.02, kl: 1e-6 };
}

/// The first `layer` layers on one device, the rest on the other.
pub fn split<'a>(
    first: Make<'a>,
    last: Make<'a>,
    layer: usize,
) -> impl Fn(Arc<Model>) -> Box<dyn Device> + 'a {
    move |model| {
        let [a, b] = model.split(layer).unwrap().map(Arc::new);
        let devices = [first(a.clone()), last(b.clone())];
        Box::new(Split::new([&a, &b], devices).unwrap())
    }
}

/// Consecutive rows of one sequence, all asking for logits.
pub fn rows(seq: SeqId, first: usize, tokens: &[u32]) -> Vec<Row> {
    let row = |(i, t): (usize, &u32)| Row {
        feature: i as u32,
        ..Row::new(seq, (first + i) as u32, *t).with_logits()
    };
    tokens.iter().enumerate().map(row).collect()
}

/// Runs rows and returns the logits of those that asked, in order.
pub fn run(device: &mut dyn Device, pass: Pass, rows: &[Row]) -> Vec<f32> {
    device.run(pass, rows, None).unwrap();
    let wanted = rows.iter().filter(|r| r.logits).count();
    (0..wanted).flat_map(|i| device.logits(i).unwrap().to_vec()).collect()
}

/// Logits of every position on a new sequence, `chunk` rows at a time. The sequence stays open.
pub fn prefill(device: &mut dyn Device, tokens: &[u32], chunk: usize) -> (SeqId, Vec<f32>) {
    let seq = device.open(tokens.len() + 64).unwrap();
    let mut logits = vec![];
    for (i, part) in tokens.chunks(chunk).enumerate() {
        logits.extend(run(device, Pass::Target, &rows(seq, i * chunk, part)));
    }
    (seq, logits)
}

/// Invariant 1 and 3: any chunking gives the same logits, across many wraps of the rings (window 32, 300 tokens).
pub fn chunking(make: Make, target: &str, exact: Exactness) {
    let mut device = make(model(target, None));
    let (_, tokens) = &prompts()[2];
    let most = device.info().max_rows;
    let (_, whole) = prefill(device.as_mut(), tokens, 64.min(most));
    for chunk in [1, 7, 33, 300] {
        let (seq, logits) = prefill(device.as_mut(), tokens, chunk.min(most));
        let apart = max_difference(&whole, &logits);
        assert!(apart <= exact.regroup, "{target}, chunk {chunk}: {apart} apart");
        device.close(seq);
    }
}

/// Invariant 2: a group's rows do not see each other.
pub fn groups(make: Make, target: &str, exact: Exactness) {
    let mut device = make(model(target, None));
    let prompts = prompts();
    let alone: Vec<Vec<f32>> =
        prompts.iter().map(|(_, p)| prefill(device.as_mut(), &p[..24], 24).1).collect();
    let seqs: Vec<SeqId> = prompts.iter().map(|_| device.open(64).unwrap()).collect();
    let vocab = alone[0].len() / 24;
    for pos in 0..24 {
        let group: Vec<Row> = prompts
            .iter()
            .zip(&seqs)
            .map(|((_, p), seq)| Row::new(*seq, pos as u32, p[pos]).with_logits())
            .collect();
        let logits = run(device.as_mut(), Pass::Target, &group);
        for (got, want) in logits.chunks_exact(vocab).zip(&alone) {
            let apart = max_difference(got, &want[pos * vocab..][..vocab]);
            assert!(apart <= exact.regroup, "{target}, position {pos}: {apart} apart");
        }
    }
}

/// Invariant 4: save, restore, copy and roll back leave the next logits unchanged, at lengths around the wrap.
pub fn state(make: Make, target: &str, exact: Exactness) {
    let mut device = make(model(target, None));
    let (_, tokens) = &prompts()[2];
    let step = |device: &mut dyn Device, seq, pos: usize| {
        run(device, Pass::Target, &rows(seq, pos, &tokens[pos..pos + 1]))
    };
    for len in [1, 31, 32, 33, 64, 65, 200] {
        let (seq, _) = prefill(device.as_mut(), &tokens[..len], 16);
        let saved = device.save(seq, len).unwrap();
        let copy = device.open(300).unwrap();
        device.copy(seq, copy, len).unwrap();
        let want = step(device.as_mut(), seq, len);
        // Roll back: 16 rejected rows, then the same step again.
        let wrong: Vec<u32> = (0..16).map(|i| 5 + i).collect();
        run(device.as_mut(), Pass::Target, &rows(seq, len, &wrong));
        let again = step(device.as_mut(), seq, len);
        let copied = step(device.as_mut(), copy, len);
        let restored = device.open(300).unwrap();
        device.restore(restored, len, &saved).unwrap();
        let restored = step(device.as_mut(), restored, len);
        for (what, got) in [("rolled back", again), ("copied", copied), ("restored", restored)] {
            let apart = max_difference(&want, &got);
            assert!(apart <= exact.regroup, "{target}, length {len}, {what}: {apart} apart");
        }
        for cut in [0, saved.len() / 2, saved.len() - 1] {
            let fresh = device.open(300).unwrap();
            assert!(device.restore(fresh, len, &saved[..cut]).is_err(), "a state cut at {cut} was taken");
            device.close(fresh);
        }
    }
}

/// Logits of the fixtures' prompts against the dequantised weights in f32 (transformers), and no worse than `kl_factor`
/// times llama.cpp's own distance.
pub fn dequant_goldens(make: Make, name: &str, exact: Exactness, kl_factor: f64) {
    let mut device = make(model(&format!("gguf/{name}.gguf"), None));
    let goldens = Arrays::open(&format!("goldens/llamacpp-{name}.safetensors"));
    let vocab = 1024;
    let chunk = device.info().max_rows.min(64);
    for (prompt, tokens) in prompts() {
        let (seq, logits) = prefill(device.as_mut(), &tokens, chunk);
        let every = prompt == "p100";
        let want = goldens.get(&format!("{prompt}.dequant.{}", if every { "all" } else { "last" }));
        let apart = max_difference(&want[want.len() - vocab..], &logits[logits.len() - vocab..]);
        assert!(apart <= exact.reference, "{name} {prompt}: {apart} from the dequantised weights");
        if every {
            let kl = mean_kl(&want, &logits, vocab);
            let theirs = mean_kl(&want, &goldens.get("p100.all"), vocab);
            let limit = exact.kl.max(theirs * kl_factor);
            eprintln!("{name}: mean KL {kl:.6}, llama.cpp {theirs:.6}");
            assert!(kl <= limit, "{name}: mean KL {kl} is over {limit}");
        }
        device.close(seq);
    }
}

/// Copies one buffer after every step that writes it.
pub struct Watch {
    buf: Buf,
    steps: Vec<bool>,
    pub seen: Vec<Vec<f32>>,
}

impl Watch {
    /// Watches the steps of a plan for which `wanted` holds.
    pub fn new(model: &Model, pass: Pass, buf: Buf, wanted: impl Fn(&Op, usize) -> bool) -> Self {
        let plan = model.plans.get(pass).unwrap();
        let steps = plan.steps.iter().enumerate().map(|(i, s)| wanted(&s.op, i)).collect();
        Watch { buf, steps, seen: vec![] }
    }
}

impl Observer for Watch {
    fn reads(&self) -> bool {
        true
    }
    fn after(&mut self, steps: Range<usize>, _seconds: f64, read: &mut dyn FnMut(Buf) -> Vec<f32>) {
        if self.steps[steps].iter().any(|wanted| *wanted) {
            self.seen.push(read(self.buf));
        }
    }
}

/// The residual stream after the embedding and after every layer, for the last twelve tokens of the 24-token prompt: what came before
/// reaches them through attention.
pub fn residuals(make: Make, target: &str, goldens: &str, tolerance: f32) {
    let model = model(target, None);
    let mut device = make(model.clone());
    let (_, tokens) = &prompts()[0];
    let seq = device.open(64).unwrap();
    // Every second tail ends a layer.
    let tails: Vec<usize> = (0..model.plans.target.steps.len())
        .filter(|i| {
            matches!(model.plans.target.steps[*i].op, Op::Tail { .. })
                && model.plans.target.steps[*i].stage == "ffn"
        })
        .collect();
    let mut watch = Watch::new(&model, Pass::Target, Buf::X, |op, i| {
        matches!(op, Op::Embed { .. }) || tails.contains(&i)
    });
    device.run(Pass::Target, &rows(seq, 0, tokens), Some(&mut watch)).unwrap();
    let goldens = Arrays::open(goldens);
    let layers = model.geometry().layers.len();
    assert_eq!(watch.seen.len(), layers + 1);
    let names = std::iter::once("embed".to_string()).chain((0..layers).map(|i| format!("layer{i}")));
    for (name, got) in names.zip(&watch.seen) {
        let want = goldens.get(&name);
        let apart = max_difference(&want, &got[got.len() - want.len()..]);
        assert!(apart <= tolerance, "{target}: {name} is {apart} off");
    }
}

/// The drafter against transformers: context features in growing steps, then a block, six times.
pub fn drafter(make: Make, tolerance: f32) {
    let model = model("gguf/tiny-Q8_0.gguf", Some("dflash/tiny-dflash-Q8_0.gguf"));
    let mut device = make(model.clone());
    let spec = &model.plans.draft.as_ref().unwrap().spec;
    let about = json("dflash/goldens.json");
    let goldens = Arrays::open("dflash/goldens.safetensors");
    let sequence = crate::fixtures::ids(&about["sequence"]);
    let seq = device.open(256).unwrap();
    let hidden = model.geometry().hidden;
    let is_capture = |op: &Op| matches!(op, Op::Capture { index } if *index + 1 == spec.target_layers.len());
    let mut done = 0;
    for (b, block) in about["blocks"].as_array().unwrap().iter().enumerate() {
        let len = block["context_len"].as_u64().unwrap() as usize;
        let context = rows(seq, done, &sequence[done..len]);
        let mut watch = Watch::new(&model, Pass::Target, Buf::Features, |op, _| is_capture(op));
        device.run(Pass::Target, &context, Some(&mut watch)).unwrap();
        let width = hidden * spec.target_layers.len();
        let want = goldens.get("target_features");
        let got = &watch.seen[0][..(len - done) * width];
        let apart = max_difference(&want[done * width..len * width], got);
        assert!(apart <= tolerance, "block {b}: features are {apart} off");
        device.run(Pass::Inject, &context, None).unwrap();

        let anchor = block["anchor"].as_u64().unwrap() as u32;
        let tokens: Vec<u32> = std::iter::once(anchor).chain(vec![spec.mask_token; spec.block - 1]).collect();
        let logits = run(device.as_mut(), Pass::Draft, &rows(seq, len, &tokens));
        let apart = max_difference(&goldens.get(&format!("block{b}.draft_logits_strict")), &logits);
        assert!(apart <= tolerance, "block {b}: draft logits are {apart} off");
        done = len;
    }
}
