//! Acceptance at depth: glimmer-mini's goldens at once, and behind as many tokens of other text as are given:
//! `depth [tokens,... [drafted rows]]`.
//!
//! Other text is that of other goldens, each begun by its own begin-of-text token as in training. It is computed once, and each prompt
//! goes on from a fork. Always so many rows are drafted, so that the policy has no part in it. Three answers are counted:
//! the target's own; that of the first depth, every token forced; and the own one, forced where nothing stands before.
#![allow(clippy::unwrap_used)]

use muser_core::sample::{SampleError, TokenMask};
use muser_core::session::Constraint;
use muser_core::{DraftMode, Engine, Flow, Lane, Session};
use muser_cpu::{CpuDevice, CpuOptions};
use muser_testkit::drafting::{Golden, decode, goldens, greedy, prefill};
use muser_testkit::fixtures::mini;
use std::sync::Arc;

const ANSWER: usize = 64;
/// The file says 8,192; the model was trained on 2,048.
const CONTEXT: usize = 32_768;

/// Allows one text.
struct Only {
    mask: TokenMask,
    text: Vec<u32>,
    done: usize,
}

impl Only {
    fn text(vocab: usize, text: Vec<u32>) -> Box<dyn Constraint> {
        Box::new(Only { mask: TokenMask::none(vocab), text, done: 0 })
    }
}

impl Constraint for Only {
    fn mask(&mut self) -> Result<Option<&TokenMask>, SampleError> {
        self.mask = TokenMask::none(self.mask.vocab());
        self.text.get(self.done).into_iter().for_each(|token| self.mask.allow(*token));
        Ok(Some(&self.mask))
    }

    fn accept(&mut self, _: u32) -> Result<(), SampleError> {
        self.done += 1;
        Ok(())
    }
}

/// What some answers came to.
#[derive(Default)]
struct Sum {
    answers: f64,
    lengths: f64,
    accepted: usize,
    drafted: usize,
}

impl Sum {
    fn add(&mut self, tokens: usize, (passes, accepted): (usize, usize), rows: usize) {
        self.answers += 1.0;
        self.lengths += (tokens - 1) as f64 / passes.max(1) as f64;
        self.accepted += accepted;
        self.drafted += rows * passes;
    }

    fn text(&self) -> String {
        let share = 100.0 * self.accepted as f64 / self.drafted.max(1) as f64;
        format!("{:5.2} tokens a pass, {share:4.1} % of rows", self.lengths / self.answers)
    }
}

/// Goldens in two halves, each to be the text before the other.
fn halves(prose: bool) -> [Vec<Golden>; 2] {
    let mut halves = [vec![], vec![]];
    for (i, golden) in goldens().into_iter().filter(|g| g.name.starts_with("prose") == prose).enumerate() {
        halves[i % 2].push(golden);
    }
    halves
}

/// Prompts of a half; of prose also beginnings of them, for there are few.
fn prompts(half: &[Golden], prose: bool) -> Vec<Vec<u32>> {
    let cuts = if prose { 4 } else { 1 };
    let cut = |g: &Golden, n: usize| g.prompt[..g.prompt.len() * n / cuts].to_vec();
    half.iter().flat_map(|g| (1..=cuts).map(move |n| cut(g, n))).collect()
}

/// The last `depth` tokens of a half's texts, repeated.
fn before(half: &[Golden], depth: usize) -> Vec<u32> {
    let texts: Vec<u32> = half.iter().flat_map(|g| [&g.prompt[..], &g.output].concat()).collect();
    let mut before: Vec<u32> = texts.iter().rev().cycle().take(depth).copied().collect();
    before.reverse();
    before
}

/// An answer to a prompt behind what `root` holds, free or a given one.
fn answer(
    engine: &mut Engine,
    root: &mut Session,
    prompt: &[u32],
    text: Option<&Vec<u32>>,
) -> (Vec<u32>, (usize, usize)) {
    let (len, vocab) = (root.tokens().len(), engine.model().geometry().vocab);
    let mut session = engine.fork(root, len).unwrap();
    session.constrain(text.map(|text| Only::text(vocab, text.clone())));
    let mut out = vec![];
    prefill(engine, &mut session, prompt, &mut out);
    let mut outs = [out];
    let stats = decode(engine, std::slice::from_mut(&mut session), &mut outs, ANSWER)[0];
    engine.close(session);
    let [out] = outs;
    assert!(text.is_none_or(|text| out == *text));
    (out, stats)
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let depths = args.get(1).map_or("0,1024,4096,16384", String::as_str);
    let rows = args.get(2).map_or(15, |rows| rows.parse().unwrap());
    let mut model = mini();
    Arc::get_mut(&mut model).unwrap().plans.target.geometry.context = CONTEXT;
    let options = CpuOptions { lane: Lane::Serving, ..CpuOptions::default() };
    let device = CpuDevice::load(model.clone(), &options, &mut |_, _| {}).unwrap();
    let mut engine = Engine::new(Box::new(device), model, DraftMode::Fixed(rows));
    let mut nothing = engine.session(0, greedy()).unwrap();
    for prose in [false, true] {
        let halves = halves(prose);
        let mut first: Vec<Vec<u32>> = vec![];
        for depth in depths.split(',').map(|d| d.parse::<usize>().unwrap()) {
            let (mut own, mut forced, mut alone) = (Sum::default(), Sum::default(), Sum::default());
            let (mut same, mut n) = (0, 0);
            for (half, other) in [(0, 1), (1, 0)] {
                let mut root = engine.session(0, greedy()).unwrap();
                root.push(&before(&halves[other], depth));
                while root.waiting() > 0
                    && engine.prefill(&mut root, 512, &mut |_| Flow::Continue).unwrap() > 0
                {}
                for prompt in prompts(&halves[half], prose) {
                    let (out, stats) = answer(&mut engine, &mut root, &prompt, None);
                    own.add(out.len(), stats, rows);
                    let (out, stats) = answer(&mut engine, &mut nothing, &prompt, Some(&out));
                    alone.add(out.len(), stats, rows);
                    if first.len() == n {
                        first.push(out.clone());
                    }
                    same += usize::from(out == first[n]);
                    let (out, stats) = answer(&mut engine, &mut root, &prompt, Some(&first[n]));
                    forced.add(out.len(), stats, rows);
                    n += 1;
                }
                engine.close(root);
            }
            let kind = if prose { "prose" } else { "chat" };
            let [own, forced, alone] = [own, forced, alone].map(|sum| sum.text());
            println!(
                "{kind:5} behind {depth:5} tokens: own answers {own} ({same} of {n} as at first; forced where nothing \
                 stands before {alone}); the first answers {forced}"
            );
        }
    }
}
