//! Speculation on the CPU: in the strict lane drafted output is the undrafted output, bit for bit.
#![allow(clippy::unwrap_used)]

use muser_core::{Device, DraftMode, Lane, Model, Session};
use muser_cpu::{CpuDevice, CpuOptions};
use muser_testkit::drafting::{self, generate, goldens, greedy};
use muser_testkit::fixtures::{mini, mini_alone};
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
    let alone = mini_alone();
    let mut looked_up = 0;
    for golden in clear {
        let (out, _) = generate(&strict, &model, DraftMode::Off, &greedy(), &golden.prompt, 64);
        assert_eq!(out, golden.output, "{}", golden.name);
        let (out, (_, accepted)) =
            generate(&strict, &alone, DraftMode::Fixed(7), &greedy(), &golden.prompt, 64);
        assert_eq!(out, golden.output, "{} by lookup", golden.name);
        looked_up += accepted;
    }
    assert!(looked_up > 0);
}

#[test]
fn drafting_changes_nothing() {
    let prompts: Vec<Vec<u32>> =
        goldens().into_iter().map(|g| g.prompt).filter(|p| p.len() < 300).take(4).collect();
    drafting::drafted_is_undrafted(&strict, &mini(), &prompts, 24);
    drafting::drafted_is_undrafted(&strict, &mini_alone(), &prompts, 24);
}

#[test]
fn state_after_drafts_of_both_sources_is_the_plain_one() {
    let small = |model: Arc<Model>| -> Box<dyn Device> {
        let options = CpuOptions { lane: Lane::Strict, max_rows: 64, ..CpuOptions::default() };
        Box::new(CpuDevice::load(model, &options, &mut |_, _| {}).unwrap())
    };
    // A sum that is written down in steps, which look alike but differ in their numbers.
    let prompt = goldens().into_iter().find(|g| g.name == "mul").unwrap().prompt;
    let counts = drafting::state_after_drafts(&small, &mini(), &prompt, 60);
    assert!(counts.iter().all(|(proposed, stayed)| 0 < *stayed && stayed < proposed), "{counts:?}");
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
fn a_rewound_session_looks_up_what_is_left() {
    let prompt = goldens().into_iter().find(|g| g.name == "prose-3").unwrap().prompt;
    let mut engine = drafting::engine(&strict, &mini_alone(), DraftMode::Fixed(7));
    let mut session = engine.session(0, greedy()).unwrap();
    let mut run = |session: &mut Session, rest: &[u32], count: usize| {
        let mut out = vec![];
        drafting::prefill(&mut engine, session, rest, &mut out);
        let mut outs = [out];
        let stats = drafting::decode(&mut engine, std::slice::from_mut(session), &mut outs, count);
        let kept = prompt.len() - 1;
        assert!(engine.rewind(session, kept));
        (outs, stats)
    };
    let first = run(&mut session, &prompt, 40);
    assert!(first.1[0].1 > 0);
    for count in [25, 40] {
        let again = run(&mut session, &prompt[prompt.len() - 1..], count);
        assert!(count < 40 || again == first, "{again:?} {first:?}");
    }
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
