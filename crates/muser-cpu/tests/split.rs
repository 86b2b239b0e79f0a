//! One model on two devices: wherever it is cut, the very bits of one.
#![allow(clippy::unwrap_used)]

use muser_core::compare::first_difference;
use muser_core::{Buf, Device, DraftMode, KvType, Lane, Model, Observer, Pass, Reference, Split};
use muser_cpu::{CpuDevice, CpuOptions};
use muser_testkit::drafting::{self, generate, goldens, greedy};
use muser_testkit::fixtures::mini;
use muser_testkit::suite::{self, Exactness, Make, split};
use muser_testkit::{model, prompts};
use std::ops::Range;
use std::sync::Arc;

fn load(model: Arc<Model>, options: CpuOptions) -> Box<dyn Device> {
    Box::new(CpuDevice::load(model, &CpuOptions { threads: Some(2), ..options }, &mut |_, _| {}).unwrap())
}

fn strict(model: Arc<Model>) -> Box<dyn Device> {
    load(model, CpuOptions { lane: Lane::Strict, max_rows: 128, ..CpuOptions::default() })
}

fn serving(model: Arc<Model>) -> Box<dyn Device> {
    load(model, CpuOptions::default())
}

fn q8_0(model: Arc<Model>) -> Box<dyn Device> {
    load(model, CpuOptions { kv: KvType::Q8_0, ..CpuOptions::default() })
}

fn reference(model: Arc<Model>) -> Box<dyn Device> {
    Box::new(Reference::new(model, KvType::F16, 128))
}

fn drafting_model() -> Arc<Model> {
    model("gguf/tiny-Q8_0.gguf", Some("dflash/tiny-dflash-Q8_0.gguf"))
}

fn borders(model: &Model) -> Range<usize> {
    1..model.geometry().layers.len()
}

/// Every step that both report, the drafter's passes too.
#[test]
fn strict_is_the_reference_at_every_border() {
    let (_, tokens) = &prompts()[1];
    for model in [drafting_model(), model("gguf/tiny-mix.gguf", None)] {
        for layer in borders(&model) {
            let pairs: [[Make; 2]; 3] = [[&strict, &strict], [&reference, &strict], [&strict, &reference]];
            for (i, [first, last]) in pairs.into_iter().enumerate() {
                let mut one = reference(model.clone());
                let mut two = split(first, last, layer)(model.clone());
                let found = first_difference(&model, [one.as_mut(), two.as_mut()], &tokens[..40], 17, 0.0);
                assert_eq!(found.unwrap(), None, "layer {layer}, pair {i}");
            }
        }
    }
}

#[test]
fn serving_is_one_device_at_every_border() {
    let (_, tokens) = &prompts()[1];
    for whole in [&serving as Make, &q8_0] {
        let model = model("gguf/tiny-mix.gguf", None);
        let (_, want) = suite::prefill(whole(model.clone()).as_mut(), tokens, 64);
        for layer in borders(&model) {
            let mut device = split(whole, whole, layer)(model.clone());
            let (_, got) = suite::prefill(device.as_mut(), tokens, 33);
            let equal = want.iter().zip(&got).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(equal && want.len() == got.len(), "layer {layer}");
        }
    }
}

/// Routes of the whole plan, and in the same pieces what an observer is told.
#[test]
fn every_step_is_told_once() {
    struct Seen(Vec<Range<usize>>);
    impl Observer for Seen {
        fn reads(&self) -> bool {
            false
        }
        fn after(&mut self, steps: Range<usize>, _: f64, _: &mut dyn FnMut(Buf) -> Vec<f32>) {
            self.0.push(steps);
        }
    }
    let model = drafting_model();
    for layer in borders(&model) {
        let mut device = split(&serving, &serving, layer)(model.clone());
        let seq = device.open(64).unwrap();
        for pass in [Pass::Target, Pass::Inject, Pass::Draft] {
            let mut seen = Seen(vec![]);
            device.run(pass, &suite::rows(seq, 0, &[1, 2, 3]), Some(&mut seen)).unwrap();
            let routes: Vec<Range<usize>> = device.routes(pass, 3, 0).into_iter().map(|r| r.steps).collect();
            assert_eq!(routes, seen.0, "layer {layer}, {pass:?}");
            let all: Vec<usize> = routes.into_iter().flatten().collect();
            assert!(
                all.into_iter().eq(0..model.plans.get(pass).unwrap().steps.len()),
                "layer {layer}, {pass:?}"
            );
        }
    }
}

#[test]
fn a_split_conforms() {
    let make = split(&strict, &reference, 2);
    suite::groups(&make, "gguf/tiny-mix.gguf", Exactness::STRICT);
    suite::residuals(&make, "gguf/tiny-mix.gguf", "goldens/dequant-residual-p24-tiny-mix.safetensors", 0.02);
    let make = split(&strict, &strict, 3);
    suite::chunking(&make, "gguf/tiny-Q8_0.gguf", Exactness::STRICT);
    suite::state(&make, "gguf/tiny-Q8_0.gguf", Exactness::STRICT);
    for layer in borders(&drafting_model()) {
        suite::drafter(&split(&strict, &strict, layer), 0.2);
    }
    let exact = Exactness { regroup: 0.0, reference: 1.0, kl: 0.0 };
    suite::dequant_goldens(&split(&serving, &serving, 2), "tiny-Q4_K_M-scalar", exact, 1.05);
}

#[test]
fn drafting_changes_nothing() {
    let mini = mini();
    let prompts: Vec<Vec<u32>> =
        goldens().into_iter().map(|g| g.prompt).filter(|p| p.len() < 300).take(2).collect();
    let half = mini.geometry().layers.len() / 2;
    drafting::drafted_is_undrafted(&split(&strict, &strict, half), &mini, &prompts, 16);
    let repeat = goldens().into_iter().find(|g| g.name == "repeat").unwrap();
    drafting::clipped_blocks(&split(&strict, &strict, half), &mini, &repeat.prompt[..40]);
}

/// Tokens and acceptance are those of one device: a drafter that was given wrong features would guess worse.
#[test]
fn drafts_are_accepted_as_on_one_device() {
    let mini = mini();
    let golden = goldens().into_iter().find(|g| g.name == "repeat").unwrap();
    let run = |make: Make| generate(make, &mini, DraftMode::Fixed(15), &greedy(), &golden.prompt, 48);
    let want = run(&serving);
    assert!(want.1.1 > 16, "one device accepts {} rows", want.1.1);
    for layer in borders(&mini) {
        assert_eq!(run(&split(&serving, &serving, layer)), want, "layer {layer}");
    }
}

#[test]
fn each_part_holds_its_own() {
    let whole = model("gguf/tiny-mix.gguf", None);
    let layers = whole.geometry().layers.len();
    for layer in 1..layers {
        let [a, b] = whole.split(layer).unwrap();
        assert_eq!(a.weight_bytes() + b.weight_bytes(), whole.weight_bytes(), "layer {layer}");
        assert_eq!((a.plans.caches.len(), b.plans.caches.len()), (layer, layers - layer));
    }
    assert!([0, layers, layers + 1].iter().all(|layer| whole.split(*layer).is_none()));
    // The second part can give more of its layers away.
    let [_, b] = whole.split(2).unwrap();
    let [_, direct] = whole.split(3).unwrap();
    assert_eq!(b.split(3).unwrap()[1].plans, direct.plans);
    assert!(b.split(2).is_none());
}

#[test]
fn lanes_are_not_mixed() {
    let [a, b] = model("gguf/tiny-mix.gguf", None).split(2).unwrap().map(Arc::new);
    let devices = [strict(a.clone()), serving(b.clone())];
    assert!(Split::new([&a, &b], devices).is_err_and(|e| e.to_string().contains("one lane")));
}
