//! Speculation: drafted output is the undrafted output, and state after a block is as if nothing had been rejected.

use crate::fixtures::{fixture, ids};
use crate::suite::Make;
use muser_core::sample::{Sampled, SamplerOptions};
use muser_core::{Active, DraftMode, Engine, Flow, Model, Session};
use std::sync::Arc;

/// One line of glimmer-mini's goldens.
pub struct Golden {
    pub name: String,
    pub prompt: Vec<u32>,
    pub output: Vec<u32>,
    /// Smallest gap between the two best logits along the output.
    pub margin: f64,
    /// Mean tokens a target pass with the drafter, greedy, full depth.
    pub accepted: f64,
}

/// glimmer-mini's goldens (PyTorch, f32).
pub fn goldens() -> Vec<Golden> {
    let text = std::fs::read_to_string(fixture("mini/goldens.jsonl")).unwrap();
    let golden = |line: &str| {
        let v: serde_json::Value = serde_json::from_str(line).unwrap();
        Golden {
            name: v["name"].as_str().unwrap().to_string(),
            prompt: ids(&v["ids_in"]),
            output: ids(&v["ids_out"]),
            margin: v["margin"].as_f64().unwrap(),
            accepted: v["spec_len"].as_f64().unwrap(),
        }
    };
    text.lines().map(golden).collect()
}

/// End tokens of glimmer-mini: `<|end_of_text|>` and `<|eot|>`.
pub const MINI_END: [u32; 2] = [6145, 6152];

/// Greedy sampling.
pub fn greedy() -> SamplerOptions {
    SamplerOptions { temperature: 0.0, ..SamplerOptions::default() }
}

/// Opens an engine.
pub fn engine(make: Make, model: &Arc<Model>, draft: DraftMode) -> Engine {
    Engine::new(make(model.clone()), model.clone(), draft)
}

/// Prefills a session with a prompt; the first new token goes to `out`.
pub fn prefill(engine: &mut Engine, session: &mut Session, prompt: &[u32], out: &mut Vec<u32>) {
    session.push(prompt);
    let mut sink = |s: &Sampled| {
        out.push(s.token);
        Flow::Continue
    };
    while engine.prefill(session, 64, &mut sink).unwrap() > 0 {}
}

/// Decodes a group until every session has `count` tokens or an end token. Returns (target passes, accepted rows) a session.
pub fn decode(
    engine: &mut Engine,
    sessions: &mut [Session],
    outs: &mut [Vec<u32>],
    count: usize,
) -> Vec<(usize, usize)> {
    let done = |out: &Vec<u32>| out.len() >= count || out.last().is_some_and(|t| MINI_END.contains(t));
    let mut stats = vec![(0, 0); sessions.len()];
    loop {
        let mut which = vec![];
        let mut sinks = vec![];
        for (i, out) in outs.iter_mut().enumerate() {
            if !done(out) {
                which.push(i);
                sinks.push(move |s: &Sampled| {
                    out.push(s.token);
                    if done(out) { Flow::Stop } else { Flow::Continue }
                });
            }
        }
        if which.is_empty() {
            return stats;
        }
        let active = sessions.iter_mut().enumerate().filter(|(i, _)| which.contains(i)).map(|(_, s)| s);
        let mut group: Vec<Active<'_>> =
            active.zip(&mut sinks).map(|(session, sink)| Active { session, sink }).collect();
        for (i, s) in which.iter().zip(engine.step(&mut group).unwrap()) {
            stats[*i].0 += 1;
            stats[*i].1 += s.accepted;
        }
    }
}

/// Output of one prompt, `count` tokens at most, with (target passes, accepted rows).
pub fn generate(
    make: Make,
    model: &Arc<Model>,
    draft: DraftMode,
    options: &SamplerOptions,
    prompt: &[u32],
    count: usize,
) -> (Vec<u32>, (usize, usize)) {
    let mut engine = engine(make, model, draft);
    let mut session = engine.session(0, options.clone()).unwrap();
    let mut out = vec![];
    prefill(&mut engine, &mut session, prompt, &mut out);
    let mut outs = [out];
    let stats = decode(&mut engine, std::slice::from_mut(&mut session), &mut outs, count);
    let [out] = outs;
    (out, stats[0])
}

/// With equal bits for equal rows, drafting changes nothing but the time: greedy and seeded, alone and in groups.
pub fn drafted_is_undrafted(make: Make, model: &Arc<Model>, prompts: &[Vec<u32>], count: usize) {
    let sampled = SamplerOptions { seed: Some(7), ..SamplerOptions::default() };
    let penalised = SamplerOptions { repetition_penalty: 1.2, presence_penalty: 0.3, ..sampled.clone() };
    for options in [greedy(), sampled, penalised] {
        let plain: Vec<Vec<u32>> =
            prompts.iter().map(|p| generate(make, model, DraftMode::Off, &options, p, count).0).collect();
        for draft in [DraftMode::Fixed(4), DraftMode::Fixed(15), DraftMode::Mixed(7), DraftMode::Auto] {
            for (chunk, want) in prompts.chunks(4).zip(plain.chunks(4)) {
                let mut engine = engine(make, model, draft);
                let mut sessions = vec![];
                let mut outs = vec![];
                for prompt in chunk {
                    let mut session = engine.session(0, options.clone()).unwrap();
                    let mut out = vec![];
                    prefill(&mut engine, &mut session, prompt, &mut out);
                    sessions.push(session);
                    outs.push(out);
                }
                decode(&mut engine, &mut sessions, &mut outs, count);
                assert_eq!(outs, want, "{draft:?} changed the output");
            }
        }
    }
}

/// A stop inside a block clips state exactly: continuing gives what an undrafted session gives; so does a session that was
/// saved, restored or forked between blocks.
pub fn clipped_blocks(make: Make, model: &Arc<Model>, prompt: &[u32]) {
    let whole = generate(make, model, DraftMode::Off, &greedy(), prompt, 40).0;
    for cut in 1..whole.len().min(20) {
        // Both sources at every third cut.
        let mode = if cut % 3 == 0 { DraftMode::Mixed(15) } else { DraftMode::Fixed(15) };
        let mut engine = engine(make, model, mode);
        let mut session = engine.session(0, greedy()).unwrap();
        let mut out = vec![];
        prefill(&mut engine, &mut session, prompt, &mut out);
        let mut outs = [out];
        decode(&mut engine, std::slice::from_mut(&mut session), &mut outs, cut);
        assert_eq!(outs[0], whole[..cut], "cut at {cut}");
        assert_eq!(session.tokens().len(), prompt.len() + cut - 1);
        let saved = engine.save(&mut session).unwrap();
        let mut restored = engine.session(0, greedy()).unwrap();
        engine.restore(&mut restored, &saved).unwrap();
        let mut sessions = [session, restored];
        let mut outs = [outs[0].clone(), outs[0].clone()];
        let stats = decode(&mut engine, &mut sessions, &mut outs, 40);
        assert_eq!(stats[0], stats[1], "passes and accepted rows of a restored drafter");
        assert_eq!(outs[0], whole, "continued after a cut at {cut}");
        assert_eq!(outs[1], whole, "restored after a cut at {cut}");
    }
}

/// Tokens a target pass over glimmer-mini's goldens at full depth: (chat, prose).
pub fn acceptance(make: Make, model: &Arc<Model>) -> (f64, f64) {
    let mean = |prose: bool| {
        let all: Vec<f64> = goldens()
            .iter()
            .filter(|g| g.name.starts_with("prose") == prose)
            .map(|g| {
                let (out, (passes, _)) =
                    generate(make, model, DraftMode::Fixed(15), &greedy(), &g.prompt, 64);
                (out.len() - 1) as f64 / passes.max(1) as f64
            })
            .collect();
        all.iter().sum::<f64>() / all.len() as f64
    };
    (mean(false), mean(true))
}

/// Whatever was drafted, and by whom, a session's state is that of one which drafted nothing, its drafter's caches with it; also
/// where another session keeps so many feature rows that none are left to wait in. Returns how many rows drafter and
/// lookup proposed, and how many of these stayed.
pub fn state_after_drafts(
    make: Make,
    model: &Arc<Model>,
    prompt: &[u32],
    count: usize,
) -> [(usize, usize); 2] {
    let options = SamplerOptions { seed: Some(1), ..greedy() };
    let mut proposed = [(0, 0); 2];
    let mut state = |mode: DraftMode, most: usize, idle: usize| {
        let mut engine = engine(make, model, mode);
        let mut other = engine.session(0, options.clone()).unwrap();
        prefill(&mut engine, &mut other, &prompt[..idle], &mut vec![]);
        let mut session = engine.session(0, options.clone()).unwrap();
        session.draft_at_most(most);
        session.want_at_most(count);
        let mut out = vec![];
        prefill(&mut engine, &mut session, prompt, &mut out);
        while out.len() < count {
            let mut sink = |s: &Sampled| {
                out.push(s.token);
                Flow::Continue
            };
            let stats = engine.step(&mut [Active { session: &mut session, sink: &mut sink }]).unwrap()[0];
            let of = &mut proposed[stats.source as usize];
            *of = (of.0 + stats.drafted, of.1 + stats.accepted);
        }
        assert_eq!(out.len(), count, "a draft went beyond what was wanted");
        engine.save(&mut session).unwrap()
    };
    let want = state(DraftMode::Auto, 0, 1);
    let all = engine(make, model, DraftMode::Off).info().max_rows;
    for mode in [DraftMode::Fixed(4), DraftMode::Mixed(4), DraftMode::Mixed(15)] {
        for idle in [1, all.min(prompt.len()) - 3] {
            assert!(state(mode, usize::MAX, idle) == want, "{mode:?} beside {idle} rows that are kept");
        }
    }
    proposed
}

/// The drafter is given a prompt's context when it drafts, or earlier where feature rows run out; its caches are the same. `few` and
/// `many` make devices whose passes take fewer and more rows than `prompt` has.
pub fn late_context(few: Make, many: Make, model: &Arc<Model>, prompt: &[u32]) {
    let options = SamplerOptions { seed: Some(1), ..greedy() };
    let state = |make: Make, chunk: usize, cut: Option<usize>| {
        let mut engine = engine(make, model, DraftMode::Auto);
        // One that keeps feature rows and never drafts.
        let mut idle = engine.session(0, options.clone()).unwrap();
        prefill(&mut engine, &mut idle, &prompt[..40], &mut vec![]);
        let mut session = engine.session(0, options.clone()).unwrap();
        session.push(prompt);
        while engine.prefill(&mut session, chunk, &mut |_| Flow::Continue).unwrap() > 0 {}
        if let Some(cut) = cut {
            assert!(engine.rewind(&mut session, cut));
            prefill(&mut engine, &mut session, &prompt[cut..], &mut vec![]);
        }
        engine.save(&mut session).unwrap()
    };
    let want = state(many, prompt.len(), None);
    for (make, chunk, cut) in [
        (many, 7, None),
        (many, 64, Some(prompt.len() - 20)),
        (few, 64, None),
        (few, 33, Some(prompt.len() - 30)),
        (few, 50, Some(prompt.len() - 1)),
    ] {
        assert!(state(make, chunk, cut) == want, "chunks of {chunk}, rewound to {cut:?}");
    }
}
