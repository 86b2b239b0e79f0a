//! Speculation on the CPU: in the strict lane drafted output is the undrafted output, bit for bit.
#![allow(clippy::unwrap_used)]

use muser_core::{Device, DraftMode, Lane, Model};
use muser_cpu::{CpuDevice, CpuOptions};
use muser_testkit::drafting::{self, generate, goldens, greedy};
use muser_testkit::fixtures::mini;
use std::sync::Arc;

fn strict(model: Arc<Model>) -> Box<dyn Device> {
    let options = CpuOptions { lane: Lane::Strict, max_rows: 128, ..CpuOptions::default() };
    Box::new(CpuDevice::load(model, &options, &mut |_, _| {}).unwrap())
}

fn serving(model: Arc<Model>) -> Box<dyn Device> {
    let options = CpuOptions { max_rows: 128, ..CpuOptions::default() };
    Box::new(CpuDevice::load(model, &options, &mut |_, _| {}).unwrap())
}

#[test]
fn greedy_output_is_pytorch_where_the_margin_is_clear() {
    // Q8_0 weights against float32 goldens: a step closer than the quantisation's distance may differ.
    let model = mini();
    let clear: Vec<_> = goldens().into_iter().filter(|g| g.margin > 0.6).collect();
    assert!(clear.len() >= 5, "too few clear goldens: {}", clear.len());
    for golden in clear {
        let (out, _) = generate(&strict, &model, DraftMode::Off, &greedy(), &golden.prompt, 64);
        assert_eq!(out, golden.output, "{}", golden.name);
    }
}

#[test]
fn drafting_changes_nothing() {
    let prompts: Vec<Vec<u32>> =
        goldens().into_iter().map(|g| g.prompt).filter(|p| p.len() < 300).take(4).collect();
    drafting::drafted_is_undrafted(&strict, &mini(), &prompts, 24);
}

#[test]
fn context_given_late_is_the_same_context() {
    let few = |model: Arc<Model>| -> Box<dyn Device> {
        let options = CpuOptions { lane: Lane::Strict, max_rows: 64, ..CpuOptions::default() };
        Box::new(CpuDevice::load(model, &options, &mut |_, _| {}).unwrap())
    };
    let many = |model: Arc<Model>| -> Box<dyn Device> {
        let options = CpuOptions { lane: Lane::Strict, ..CpuOptions::default() };
        Box::new(CpuDevice::load(model, &options, &mut |_, _| {}).unwrap())
    };
    let prompt: Vec<u32> = goldens().into_iter().flat_map(|g| g.prompt).take(300).collect();
    assert_eq!(prompt.len(), 300);
    drafting::late_context(&few, &many, &mini(), &prompt);
}

#[test]
fn a_stop_inside_a_block_clips_state_exactly() {
    let prompt = goldens().into_iter().find(|g| g.name == "repeat").unwrap().prompt;
    drafting::clipped_blocks(&strict, &mini(), &prompt);
}

#[test]
fn a_session_drafts_no_more_than_it_may() {
    let model = mini();
    let prompt = goldens().into_iter().find(|g| g.name == "repeat").unwrap().prompt;
    let mut engine = drafting::engine(&strict, &model, DraftMode::Fixed(15));
    let mut passes = |most: usize| {
        let mut session = engine.session(0, greedy()).unwrap();
        session.draft_at_most(most);
        let mut out = vec![];
        drafting::prefill(&mut engine, &mut session, &prompt, &mut out);
        let mut outs = [out];
        let stats = drafting::decode(&mut engine, std::slice::from_mut(&mut session), &mut outs, 20)[0];
        engine.close(session);
        stats
    };
    assert_eq!(passes(0), (19, 0));
    let (some, accepted) = passes(2);
    assert!(some + accepted == 19 && accepted > 0 && accepted <= 2 * some, "{accepted} in {some}");
    assert!(passes(usize::MAX).0 < some);
}

#[test]
fn acceptance_is_the_model_cards() {
    // The card's figures are of F16 weights: 9.4 tokens a target pass on chat, 2.6 on prose.
    let (chat, prose) = drafting::acceptance(&serving, &mini());
    eprintln!("tokens a target pass: chat {chat:.2}, prose {prose:.2}");
    assert!(
        (chat / 9.4 - 1.0).abs() < 0.05 && (prose / 2.6 - 1.0).abs() < 0.05,
        "chat {chat}, prose {prose}"
    );
}
