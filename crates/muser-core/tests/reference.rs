//! The f32 reference against Hugging Face transformers, and the suite's invariants.
#![allow(clippy::unwrap_used)]

use muser_core::{Device, KvType, Model, Reference};
use muser_testkit::fixtures::{Arrays, ids, json, model, prompts};
use muser_testkit::max_difference;
use muser_testkit::suite::{self, Exactness, Make};
use std::sync::Arc;

const Q8: &str = "gguf/tiny-Q8_0.gguf";

fn with(kv: KvType) -> impl Fn(Arc<Model>) -> Box<dyn Device> {
    move |model| Box::new(Reference::new(model, kv, 512))
}

fn on(kv: KvType, test: impl Fn(Make)) {
    test(&with(kv));
}

#[test]
fn logits_are_transformers_at_every_position() {
    // tiny-Q8_0 holds the Hugging Face checkpoint losslessly.
    let mut device = with(KvType::F32)(model(Q8, None));
    let goldens = Arrays::open("goldens/hf-logits.safetensors");
    for (name, tokens) in prompts() {
        let (_, logits) = suite::prefill(device.as_mut(), &tokens, 300);
        // Of the longest prompt the file has the last 200 positions.
        let want = goldens.get(name);
        let apart = max_difference(&want, &logits[logits.len() - want.len()..]);
        assert!(apart <= 1e-3, "{name}: {apart} apart");
    }
}

#[test]
fn residuals_are_transformers_at_every_layer() {
    on(KvType::F32, |make| suite::residuals(make, Q8, "goldens/hf-residual-p24.safetensors", 1e-3));
}

#[test]
fn every_block_type_is_right_layer_by_layer() {
    let goldens = "goldens/dequant-residual-p24-tiny-mix.safetensors";
    on(KvType::F32, |make| suite::residuals(make, "gguf/tiny-mix.gguf", goldens, 1e-3));
}

#[test]
fn dequantised_weights_give_the_dequant_goldens() {
    let exact = Exactness { reference: 1e-3, ..Exactness::STRICT };
    for name in ["tiny-Q8_0", "tiny-Q4_K_M-scalar", "tiny-mix"] {
        on(KvType::F32, |make| suite::dequant_goldens(make, name, exact, 0.0));
    }
}

#[test]
fn greedy_continuations_are_transformers() {
    let goldens = json("goldens/greedy.json");
    for (name, prompt) in prompts() {
        let mut device = with(KvType::F32)(model(Q8, None));
        let want = ids(&goldens["hf-f32"][name]);
        let (seq, logits) = suite::prefill(device.as_mut(), &prompt, 300);
        let mut last = logits[logits.len() - 1024..].to_vec();
        let mut got = vec![];
        for i in 0..want.len() {
            got.push(muser_core::device::argmax(&last));
            let row = suite::rows(seq, prompt.len() + i, &got[i..]);
            last = suite::run(device.as_mut(), muser_core::Pass::Target, &row);
        }
        assert_eq!(got, want, "{name}");
    }
}

#[test]
fn any_chunking_gives_the_same_bits() {
    on(KvType::F16, |make| suite::chunking(make, Q8, Exactness::STRICT));
}

#[test]
fn rows_of_a_group_do_not_see_each_other() {
    on(KvType::F16, |make| suite::groups(make, Q8, Exactness::STRICT));
}

#[test]
fn state_survives_saving_copying_and_rolling_back() {
    on(KvType::F16, |make| suite::state(make, Q8, Exactness::STRICT));
    on(KvType::Q8_0, |make| suite::state(make, Q8, Exactness::STRICT));
}

#[test]
fn the_drafter_is_transformers() {
    // The window's edge follows llama.cpp and the drafter's training (distance < window), not transformers (<= window).
    on(KvType::F32, |make| suite::drafter(make, 1e-3));
}
