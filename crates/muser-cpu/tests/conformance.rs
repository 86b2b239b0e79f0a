//! The conformance suite over this device: both lanes, every instruction set that the processor has.
#![allow(clippy::unwrap_used)]

use muser_core::{Device, KvType, Lane, Model, Reference};
use muser_cpu::{CpuDevice, CpuOptions, Isa};
use muser_testkit::suite::{self, Exactness};
use muser_testkit::{fixtures, model, prompts};
use std::sync::Arc;

const FILES: [&str; 3] = ["tiny-Q8_0", "tiny-Q4_K_M-scalar", "tiny-mix"];

/// Results of a batch never depend on the batch, so regrouping changes no bit. Distances are those of 8-bit activations.
const SERVING: Exactness = Exactness { regroup: 0.0, reference: 1.0, kl: 0.0 };

fn load(model: Arc<Model>, options: CpuOptions) -> CpuDevice {
    CpuDevice::load(model, &options, &mut |_, _| {}).unwrap()
}

fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.available())
}

fn serving(isa: Isa) -> impl Fn(Arc<Model>) -> Box<dyn Device> {
    move |model| {
        Box::new(load(model, CpuOptions { isa: Some(isa), threads: Some(2), ..CpuOptions::default() }))
    }
}

fn strict(isa: Isa, threads: usize) -> impl Fn(Arc<Model>) -> Box<dyn Device> {
    let options =
        CpuOptions { isa: Some(isa), threads: Some(threads), lane: Lane::Strict, ..CpuOptions::default() };
    move |model| Box::new(load(model, options.clone()))
}

#[test]
fn serving_is_no_further_from_the_weights_than_llama_cpp() {
    for file in FILES {
        suite::dequant_goldens(&serving(Isa::best()), file, SERVING, 1.05);
    }
}

#[test]
fn serving_does_not_depend_on_chunks() {
    for file in ["gguf/tiny-Q4_K_M-scalar.gguf", "gguf/tiny-mix.gguf"] {
        suite::chunking(&serving(Isa::best()), file, SERVING);
    }
}

#[test]
fn serving_rows_do_not_see_each_other() {
    suite::groups(&serving(Isa::best()), "gguf/tiny-Q4_K_M-scalar.gguf", SERVING);
}

#[test]
fn serving_state_is_exact() {
    suite::state(&serving(Isa::best()), "gguf/tiny-Q4_K_M-scalar.gguf", SERVING);
}

/// Every instruction set, any number of threads, packed or mapped: the same bits.
#[test]
fn serving_bits_are_the_same_everywhere() {
    let (_, tokens) = &prompts()[1];
    for file in ["gguf/tiny-mix.gguf", "gguf/tiny-Q4_K_M-scalar.gguf"] {
        let mut want =
            load(model(file, None), CpuOptions { isa: Some(Isa::Scalar), ..CpuOptions::default() });
        let (_, want) = suite::prefill(&mut want, tokens, 25);
        for isa in isas() {
            for (threads, mapped) in [(1, false), (3, false), (2, true)] {
                let options =
                    CpuOptions { isa: Some(isa), threads: Some(threads), mapped, ..CpuOptions::default() };
                let mut device = load(model(file, None), options);
                let (_, got) = suite::prefill(&mut device, tokens, 64);
                assert!(bits(&want) == bits(&got), "{file}: {isa}, {threads} threads, mapped {mapped}");
            }
        }
    }
}

#[test]
fn strict_is_the_reference() {
    let (_, tokens) = &prompts()[1];
    for file in FILES {
        let file = format!("gguf/{file}.gguf");
        let mut reference = Reference::new(model(&file, None), KvType::F16, 128);
        let (_, want) = suite::prefill(&mut reference, tokens, 64);
        for (isa, threads, chunk) in isas().flat_map(|isa| [(isa, 1, 100), (isa, 2, 7)]) {
            let mut device = strict(isa, threads)(model(&file, None));
            let (_, got) = suite::prefill(device.as_mut(), tokens, chunk);
            assert!(bits(&want) == bits(&got), "{file}: {isa}, {threads} threads, chunks of {chunk}");
        }
    }
}

#[test]
fn strict_conforms() {
    let make = strict(Isa::best(), 2);
    suite::chunking(&make, "gguf/tiny-Q8_0.gguf", Exactness::STRICT);
    suite::groups(&make, "gguf/tiny-mix.gguf", Exactness::STRICT);
    suite::state(&make, "gguf/tiny-Q8_0.gguf", Exactness::STRICT);
    suite::residuals(&make, "gguf/tiny-mix.gguf", "goldens/dequant-residual-p24-tiny-mix.safetensors", 0.02);
    // Draft logits are five times as large as the target's, and f16 keys and values cost 0.09.
    suite::drafter(&make, 0.2);
}

#[test]
fn strict_drafts_like_the_reference() {
    let draft = |device: &mut dyn Device| {
        let spec_mask = 968;
        let (_, tokens) = &prompts()[0];
        let seq = device.open(64).unwrap();
        let rows = suite::rows(seq, 0, tokens);
        device.run(muser_core::Pass::Target, &rows, None).unwrap();
        device.run(muser_core::Pass::Inject, &rows, None).unwrap();
        let block: Vec<u32> = std::iter::once(5).chain([spec_mask; 7]).collect();
        suite::run(device, muser_core::Pass::Draft, &suite::rows(seq, tokens.len(), &block))
    };
    let both = || model("gguf/tiny-Q8_0.gguf", Some("dflash/tiny-dflash-Q8_0.gguf"));
    let want = draft(&mut Reference::new(both(), KvType::F16, 32));
    for isa in isas() {
        assert!(bits(&want) == bits(&draft(strict(isa, 2)(both()).as_mut())), "{isa}");
    }
    // The serving lane drafts too, close by; scaled as the target's logits are.
    let scaled = |x: &[f32]| x.iter().map(|v| v * 0.196).collect::<Vec<_>>();
    let got = draft(serving(Isa::best())(both()).as_mut());
    let kl = muser_testkit::mean_kl(&scaled(&want), &scaled(&got), 1024);
    assert!(kl < 0.01, "mean KL of the serving lane's drafts: {kl}");
}

#[test]
fn q8_keys_and_values_stay_close() {
    let (_, tokens) = &prompts()[2];
    let file = "gguf/tiny-Q8_0.gguf";
    let (_, want) = suite::prefill(&mut load(model(file, None), CpuOptions::default()), tokens, 64);
    let options = CpuOptions { kv: KvType::Q8_0, ..CpuOptions::default() };
    let (_, got) = suite::prefill(&mut load(model(file, None), options), tokens, 64);
    let kl = muser_testkit::mean_kl(&want, &got, 1024);
    assert!(kl < 0.01, "mean KL of q8_0 keys and values: {kl}");
    assert_ne!(bits(&want), bits(&got), "q8_0 was not used");
    let (_, want) = suite::prefill(&mut Reference::new(model(file, None), KvType::Q8_0, 64), tokens, 64);
    let kl = muser_testkit::mean_kl(&want, &got, 1024);
    assert!(kl < 0.01, "mean KL to f32 activations: {kl}");
}

/// The shipped model: columns that are no multiple of 256, and a drafter.
#[test]
fn the_shipped_model_runs() {
    let (_, tokens) = &prompts()[0];
    let mini = fixtures::mini();
    let (_, want) = suite::prefill(&mut Reference::new(mini.clone(), KvType::F16, 32), tokens, 32);
    let (_, got) = suite::prefill(&mut load(mini.clone(), CpuOptions::default()), tokens, 32);
    let kl = muser_testkit::mean_kl(&want, &got, mini.geometry().vocab);
    assert!(kl < 0.01, "mean KL to f32 activations: {kl}");
}

#[test]
fn refusals_say_what_to_do() {
    let file = "gguf/tiny-Q8_0.gguf";
    let refuse = |options| match CpuDevice::load(model(file, None), &options, &mut |_, _| {}) {
        Ok(_) => panic!("taken"),
        Err(e) => e.to_string(),
    };
    assert!(refuse(CpuOptions { kv: KvType::F32, ..CpuOptions::default() }).contains("f16 or q8_0"));
    let strict = CpuOptions { kv: KvType::Q8_0, lane: Lane::Strict, ..CpuOptions::default() };
    assert!(refuse(strict).contains("strict"));
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}
