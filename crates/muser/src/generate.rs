//! One generation: prefill, decode, stop conditions, statistics.

use crate::engine::Loaded;
use crate::output::Progress;
use crate::text::Text;
use anyhow::Result;
use muser_core::engine::Active;
use muser_core::sample::Sampled;
use muser_core::{Flow, Session, Source};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model ended its turn.
    End,
    /// A stop string was written.
    Stop,
    /// The limit of new tokens.
    Length,
    /// The context is full.
    Context,
    /// The user interrupted.
    Interrupted,
}

impl Finish {
    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Finish::End => "end",
            Finish::Stop => "stop",
            Finish::Length => "length",
            Finish::Context => "context",
            Finish::Interrupted => "interrupted",
        }
    }
}

/// Counts and times.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    /// Tokens that were computed as prompt.
    pub prompt: usize,
    /// Tokens of the prompt that were still in the caches.
    pub cached: usize,
    /// New tokens.
    pub generated: usize,
    /// Tokens that were proposed, and those of them that the target confirmed.
    pub drafted: usize,
    pub accepted: usize,
    /// Those of both that lookups proposed.
    pub looked_up: usize,
    pub looked_up_accepted: usize,
    /// Passes of the target that decoded.
    pub steps: usize,
    /// Seconds of the prompt, and of decoding after the first token.
    pub prompt_seconds: f64,
    pub decode_seconds: f64,
    /// Steps without a draft, and their seconds: what plain decoding costs.
    plain_steps: usize,
    plain_seconds: f64,
}

impl Stats {
    /// Prompt tokens a second.
    pub fn prompt_rate(&self) -> f64 {
        self.prompt as f64 / self.prompt_seconds.max(1e-9)
    }

    /// New tokens a second, the first not counted: it comes with the prompt.
    pub fn decode_rate(&self) -> f64 {
        self.generated.saturating_sub(1) as f64 / self.decode_seconds.max(1e-9)
    }

    /// Share of proposed tokens that were confirmed.
    pub fn acceptance(&self) -> Option<f64> {
        (self.drafted > 0).then(|| self.accepted as f64 / self.drafted as f64)
    }

    /// Tokens a target pass.
    pub fn mean_length(&self) -> Option<f64> {
        (self.steps > 0).then(|| self.generated.saturating_sub(1) as f64 / self.steps as f64)
    }

    /// How many times faster decoding was than its own steps without a draft.
    pub fn gain(&self) -> Option<f64> {
        let plain = self.plain_seconds / self.plain_steps as f64;
        (self.plain_steps > 0 && self.drafted > 0).then(|| self.decode_rate() * plain)
    }

    /// One line for people.
    pub fn line(&self) -> String {
        let mut line = format!("{} prompt tokens", self.prompt);
        if self.prompt > 0 {
            line += &format!(" at {:.0}/s", self.prompt_rate());
        }
        if self.cached > 0 {
            line += &format!(" ({} cached)", self.cached);
        }
        line += &format!(", {} new tokens", self.generated);
        if self.steps > 0 {
            line += &format!(" at {:.1}/s", self.decode_rate());
        }
        if let (Some(acceptance), Some(length)) = (self.acceptance(), self.mean_length()) {
            line += &format!("; drafts: {:.0} % accepted", 100.0 * acceptance);
            if self.looked_up > 0 {
                let share = 100.0 * self.looked_up_accepted as f64 / self.looked_up as f64;
                line += &format!(" (lookup: {share:.0} % of {})", self.looked_up);
            }
            line += &format!(", {length:.2} tokens a pass");
            if let Some(gain) = self.gain() {
                line += &format!(", gain {gain:.2}x");
            }
        }
        line
    }

    /// For JSON output.
    pub fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "prompt_tokens": self.prompt,
            "cached_tokens": self.cached,
            "new_tokens": self.generated,
            "prompt_seconds": self.prompt_seconds,
            "decode_seconds": self.decode_seconds,
            "prompt_tok_s": self.prompt_rate(),
            "decode_tok_s": (self.steps > 0).then(|| self.decode_rate()),
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "lookup_drafted": self.looked_up,
            "lookup_accepted": self.looked_up_accepted,
            "acceptance": self.acceptance(),
            "mean_length": self.mean_length(),
            "gain": self.gain(),
        })
    }
}

/// What a generation gave.
pub struct Generation {
    /// New tokens, the end token with them.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
    /// Counts and times.
    pub stats: Stats,
}

/// Generates after the tokens that wait in `session`. `text` gets each token's text in whole characters, and whether the token
/// is special; it says false to stop. `interrupted` is looked at between passes.
pub fn generate(
    loaded: &mut Loaded,
    session: &mut Session,
    max_tokens: Option<usize>,
    interrupted: Option<&AtomicBool>,
    text: &mut dyn FnMut(&str, bool) -> bool,
) -> Result<Generation> {
    let Loaded { text: Text { tokenizer, .. }, engine, .. } = loaded;
    session.want_at_most(max_tokens.unwrap_or(usize::MAX));
    let mut stats = Stats { prompt: session.waiting(), cached: session.tokens().len(), ..Stats::default() };
    let mut decoder = tokenizer.decoder();
    let mut tokens = vec![];
    let finish = Cell::new(None);
    let mut sink = |sampled: &Sampled| {
        tokens.push(sampled.token);
        let piece = decoder.push(tokenizer, sampled.token);
        let wanted = piece.is_empty() || text(&piece, tokenizer.is_special(sampled.token));
        finish.set(match () {
            () if tokenizer.is_end(sampled.token) => Some(Finish::End),
            () if !wanted => Some(Finish::Stop),
            () if max_tokens.is_some_and(|most| tokens.len() >= most) => Some(Finish::Length),
            () => None,
        });
        if finish.get().is_some() { Flow::Stop } else { Flow::Continue }
    };
    let stop = || interrupted.is_some_and(|i| i.load(Ordering::Relaxed));

    let start = Instant::now();
    let mut bar = Some(Progress::new("prompt", false));
    let mut left = stats.prompt;
    // A chunk that is not the last gives no token, so the bar is gone before the first piece of text.
    let mut none = |_: &Sampled| Flow::Continue;
    while left > 0 && !stop() {
        let rows = engine.info().max_rows;
        if left <= rows {
            bar = None;
        }
        left = engine.prefill(session, rows, if left <= rows { &mut sink } else { &mut none })?;
        if let Some(bar) = &mut bar {
            bar.at((stats.prompt - left) as u64, stats.prompt as u64);
        }
    }
    stats.prompt_seconds = start.elapsed().as_secs_f64();

    let start = Instant::now();
    let mut last = start;
    while left == 0 && finish.get().is_none() && !stop() {
        if session.tokens().len() >= session.context() {
            finish.set(Some(Finish::Context));
            break;
        }
        let step = engine.step(&mut [Active { session, sink: &mut sink }])?;
        let now = Instant::now();
        for one in step {
            stats.drafted += one.drafted;
            stats.accepted += one.accepted;
            if one.source == Source::Lookup {
                stats.looked_up += one.drafted;
                stats.looked_up_accepted += one.accepted;
            }
            if one.drafted == 0 {
                stats.plain_steps += 1;
                stats.plain_seconds += (now - last).as_secs_f64();
            }
        }
        stats.steps += 1;
        last = now;
    }
    stats.decode_seconds = start.elapsed().as_secs_f64();
    let rest = decoder.finish();
    if !rest.is_empty() {
        text(&rest, false);
    }
    stats.generated = tokens.len();
    Ok(Generation { tokens, finish: finish.get().unwrap_or(Finish::Interrupted), stats })
}
