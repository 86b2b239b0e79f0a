//! Log probabilities, as OpenAI's interface reports them: of the model's own distribution, at temperature 1 and before
//! bias, penalties, masks and selection.

use super::scan::{self, Row};
use super::{filter, mass};

/// Most alternatives that are reported.
pub const MAX_LOGPROBS: usize = 20;

/// A token and its log probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLogprob {
    /// Token id.
    pub token: u32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
}

/// Log probabilities at one position.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// Of the chosen token.
    pub logprob: f32,
    /// The most probable tokens, best first; equal ones by id.
    pub top: Vec<TokenLogprob>,
}

impl Logprobs {
    /// `token` is in range and the logits are finite.
    pub(super) fn new(token: u32, top: usize, logits: &[f32]) -> Self {
        let (mut best, mut largest) = (vec![], vec![]);
        scan::scan(logits, &mut largest);
        filter::top_k(Row::of(logits, &largest), None, top.max(1), &mut best);
        best.sort_unstable_by(filter::by_rank);
        let largest = best.first().map_or(0.0, |c| f64::from(c.logit));
        let sum: f64 = logits.iter().map(|x| mass::exp(f64::from(*x) - largest)).sum();
        let normaliser = largest + mass::ln(sum);
        let logprob = |logit: f32| (f64::from(logit) - normaliser) as f32;
        let top = best.iter().take(top).map(|c| TokenLogprob { token: c.token, logprob: logprob(c.logit) });
        Logprobs { logprob: logprob(logits[token as usize]), top: top.collect() }
    }
}
