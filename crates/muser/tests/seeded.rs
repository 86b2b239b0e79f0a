//! In the strict lane text sampled with a seed is the same on every device, drafted or not, free or by a grammar.
#![allow(clippy::unwrap_used)]

use muser_core::sample::SamplerOptions;
use muser_core::{Device, DraftMode, KvType, Lane, Model, Reference};
use muser_cpu::{CpuDevice, CpuOptions, Isa};
use muser_cuda::{CudaDevice, CudaOptions};
use muser_format::Gguf;
use muser_server::constrain::{Answer, Choice, Grammars, MessageGrammar, NoMoreReasoning, Turn};
use muser_testkit::drafting::{decode, engine, prefill};
use muser_testkit::fixtures::{mini, shipped};
use muser_testkit::suite::Make;
use muser_text::{Specials, Tokenizer, Vocab};
use std::sync::Arc;

/// What glimmer-mini says with these seeds: freely with every option of the sampler, then by a schema. Any machine is to say the same.
const SAID: [&str; 2] = [
    " to=self<|message|>A simple message.<|eom|><|start|>assistant to=user<|message|>H",
    " to=user<|message|>{\"name\": \"Say hello\", \"old",
];

/// Text of both kinds, some tokens long, with drafts of `draft` rows.
fn said(make: Make, model: &Arc<Model>, draft: DraftMode) -> [String; 2] {
    let file = Gguf::open(&shipped("glimmer-mini-Q8_0.gguf")).unwrap();
    let tokenizer = Tokenizer::new(Vocab::from_gguf(&file).unwrap()).unwrap();
    let prompt = "<|start|>user<|message|>Say hello<|eot|><|start|>assistant";
    let prompt = tokenizer.encode(prompt, Specials::Parse);
    let grammars = Arc::new(Grammars::new(&tokenizer, model.geometry().vocab).unwrap());
    let schema = r#"{"type": "object", "properties": {"name": {"type": "string"}, "old": {"type": "integer"}}, "required": ["name", "old"]}"#;
    let schema = Answer::JsonSchema(serde_json::from_str(schema).unwrap());
    let message = MessageGrammar::compile(&grammars, None, &Choice::Auto, true, &schema, true, true);
    let turn = Turn::new(grammars, Arc::new(message.unwrap().unwrap()), NoMoreReasoning::default());
    let free = SamplerOptions {
        temperature: 1.3,
        top_k: 50,
        top_p: 0.97,
        min_p: 0.01,
        typical_p: 0.98,
        repetition_penalty: 1.1,
        presence_penalty: 0.2,
        frequency_penalty: 0.1,
        seed: Some(11),
        ..SamplerOptions::default()
    };
    let constrained = SamplerOptions { temperature: 0.8, seed: Some(5), ..SamplerOptions::default() };

    let mut engine = engine(make, model, draft);
    let mut session = engine.session(128, free).unwrap();
    let mut outs = [vec![]];
    prefill(&mut engine, &mut session, &prompt, &mut outs[0]);
    let mut sessions = [session];
    decode(&mut engine, &mut sessions, &mut outs, 16);
    let text = |ids: &[u32]| String::from_utf8(tokenizer.decode(ids)).unwrap();
    let freely = text(&outs[0]);

    let [session] = &mut sessions;
    assert!(engine.rewind(session, prompt.len() - 1));
    session.sampler().set_options(constrained).unwrap();
    session.constrain(Some(Box::new(turn)));
    let mut outs = [vec![]];
    prefill(&mut engine, session, &prompt[prompt.len() - 1..], &mut outs[0]);
    decode(&mut engine, &mut sessions, &mut outs, 16);
    [freely, text(&outs[0])]
}

/// Without drafts, and with some.
fn check(make: Make) {
    let model = mini();
    for draft in [DraftMode::Off, DraftMode::Fixed(4), DraftMode::Mixed(4)] {
        assert_eq!(said(make, &model, draft), SAID, "{draft:?}");
    }
}

fn cpu(model: Arc<Model>, threads: usize, isa: Isa) -> Box<dyn Device> {
    let options = CpuOptions {
        lane: Lane::Strict,
        threads: Some(threads),
        isa: Some(isa),
        max_rows: 64,
        ..CpuOptions::default()
    };
    Box::new(CpuDevice::load(model, &options, &mut |_, _| {}).unwrap())
}

#[test]
fn the_reference_says_it() {
    check(&|model| Box::new(Reference::new(model, KvType::F16, 64)));
}

#[test]
fn the_processor_says_it() {
    check(&|model| cpu(model, 2, Isa::best()));
    check(&|model| cpu(model, 1, Isa::Scalar));
}

#[test]
#[ignore = "needs a card; scripts/emulate-cuda.py runs it on an emulated one"]
fn a_card_says_it() {
    check(&|model| {
        let options = CudaOptions { lane: Lane::Strict, max_rows: Some(64), ..CudaOptions::default() };
        Box::new(CudaDevice::load(model, &options, &mut |_, _| {}).unwrap())
    });
}
