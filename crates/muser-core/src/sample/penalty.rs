//! Changes to single logits: bias, and penalties for what was already said.

use super::SamplerOptions;
use std::collections::HashMap;

/// The tokens so far, and how often each is among the last `window`.
#[derive(Clone, Debug, Default)]
pub(super) struct History {
    tokens: Vec<u32>,
    window: usize,
    counts: HashMap<u32, u32>,
}

impl History {
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    pub fn set_window(&mut self, window: usize) {
        if self.window != window {
            self.window = window;
            self.count();
        }
    }

    pub fn replace(&mut self, tokens: &[u32]) {
        self.tokens.clear();
        self.tokens.extend_from_slice(tokens);
        self.count();
    }

    fn count(&mut self) {
        self.counts.clear();
        let first = self.tokens.len().saturating_sub(self.window);
        for token in &self.tokens[first..] {
            *self.counts.entry(*token).or_default() += 1;
        }
    }

    pub fn accept(&mut self, token: u32) {
        self.tokens.push(token);
        if self.window == 0 {
            return;
        }
        *self.counts.entry(token).or_default() += 1;
        let leaving = self.tokens.len().checked_sub(self.window.saturating_add(1)).map(|i| self.tokens[i]);
        if let Some(count) = leaving.and_then(|token| self.counts.get_mut(&token)) {
            *count -= 1;
            // A token with count 0 would still be touched by the repetition penalty.
            if *count == 0 {
                leaving.map(|token| self.counts.remove(&token));
            }
        }
    }
}

/// Whether [`adjust`] would change anything.
pub(super) fn adjusts(options: &SamplerOptions, history: &History) -> bool {
    !options.logit_bias.is_empty() || !history.counts.is_empty()
}

/// Bias, then repetition, frequency and presence penalties.
pub(super) fn adjust(options: &SamplerOptions, history: &History, logits: &mut [f32]) {
    for (token, bias) in &options.logit_bias {
        if let Some(logit) = logits.get_mut(*token as usize) {
            *logit += bias;
        }
    }
    for (token, count) in &history.counts {
        if let Some(logit) = logits.get_mut(*token as usize) {
            *logit = penalised(options, *count, *logit);
        }
    }
}

/// What [`adjust`] makes of one token's logit.
pub(super) fn adjusted(options: &SamplerOptions, history: &History, token: u32, mut logit: f32) -> f32 {
    for (_, bias) in options.logit_bias.iter().filter(|(biased, _)| *biased == token) {
        logit += bias;
    }
    history.counts.get(&token).map_or(logit, |count| penalised(options, *count, logit))
}

/// The logit of a token that is `count` times in the history.
fn penalised(options: &SamplerOptions, count: u32, logit: f32) -> f32 {
    let factor = options.repetition_penalty;
    let repeated = if logit <= 0.0 { logit * factor } else { logit / factor };
    let penalty = count as f32 * options.frequency_penalty + options.presence_penalty;
    // Huge logits must not overflow to infinity, where ranks end.
    (repeated - penalty).min(f32::MAX)
}
