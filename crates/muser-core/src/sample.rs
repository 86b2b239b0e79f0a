//! Choosing the next token from a row of logits.
//!
//! The order of the stages is [`ORDER`]. It is llama.cpp's default order, and each stage means what it means there, with
//! these differences: a grammar's mask comes before the selecting stages, so that they choose among allowed tokens only;
//! probabilities are sums of integers (see [`Distribution`]) instead of `f32`; equal logits are ranked by token id; a
//! temperature of 0 picks the largest logit after bias, penalties and mask, whatever the selecting stages say; drawing
//! walks the candidates by token id.
//!
//! Penalties count every token that was accepted, those of the prompt too, as in llama.cpp.
//!
//! A step takes time linear in the vocabulary, mostly one pass over the logits: nothing is sorted, ranks come from
//! partial selection. Choice and log probabilities depend on logits, options, history and seed alone and use no
//! function of the platform's mathematics library, so equal logits give equal text on every machine.

mod chain;
mod filter;
mod logprobs;
mod mask;
mod mass;
mod options;
mod penalty;
mod rng;
mod scan;
mod whole;
mod wide;

pub use chain::{Distribution, ORDER};
pub use logprobs::{Logprobs, MAX_LOGPROBS, TokenLogprob};
pub use mask::TokenMask;
pub use options::SamplerOptions;
pub use rng::Mt19937;

use crate::device::Largest;
use chain::Scratch;
use penalty::History;
use std::hash::{BuildHasher, Hasher};
use thiserror::Error;

/// Why no token was chosen.
#[derive(Clone, Debug, Error, PartialEq)]
#[allow(missing_docs)]
pub enum SampleError {
    /// An option outside its range.
    #[error("sampling option {field} is {value}; allowed: {allowed}")]
    Option { field: &'static str, value: String, allowed: &'static str },
    /// A bias or a forced token that the model does not have.
    #[error("token {token} does not exist: the vocabulary has {vocab} tokens, numbered from 0")]
    NoSuchToken { token: u32, vocab: usize },
    /// A row or a mask of the wrong length.
    #[error(
        "{what} covers {got} tokens, the vocabulary has {vocab}; both must come from the same model file"
    )]
    Length { what: &'static str, got: usize, vocab: usize },
    /// Logits that are no numbers.
    #[error(
        "the logit of token {token} is {value}: the model's weights or the device are broken; check the file, or try another device"
    )]
    NotFinite { token: u32, value: f32 },
    /// Mask and bias leave nothing.
    #[error("no token is left to choose: the grammar or the logit bias forbids every one; loosen them")]
    NothingAllowed,
    /// A saved sampler that cannot be used.
    #[error("saved sampler: {0}; start it anew")]
    BadState(&'static str),
    /// A grammar or schema failed while it was followed.
    #[error("constraint: {0}")]
    Constraint(String),
}

/// A chosen token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// Its id.
    pub token: u32,
    /// Log probabilities, if the options ask for them.
    pub logprobs: Option<Logprobs>,
}

impl Sampled {
    /// A token that a device chose as the largest logit.
    pub fn greedy(token: u32) -> Self {
        Sampled { token, logprobs: None }
    }
}

/// Samples one sequence: options, random numbers, and the history that penalties count.
///
/// A clone continues with the same random numbers as the original.
#[derive(Clone, Debug)]
pub struct Sampler {
    options: SamplerOptions,
    vocab: usize,
    seed: u64,
    rng: Mt19937,
    history: History,
    scratch: Scratch,
}

/// First bytes of a saved sampler, with the version of its layout.
const MAGIC: &[u8; 8] = b"sampler1";

impl Sampler {
    /// A sampler for rows of `vocab` logits; refuses options outside their ranges.
    pub fn new(options: SamplerOptions, vocab: usize) -> Result<Self, SampleError> {
        let mut sampler = Sampler {
            options: SamplerOptions::greedy(),
            vocab,
            seed: 0,
            rng: Mt19937::new(0),
            history: History::default(),
            scratch: Scratch::default(),
        };
        sampler.set_options(options)?;
        Ok(sampler)
    }

    /// Replaces the options and starts the random numbers anew from their seed; the history stays. Bad options change
    /// nothing.
    pub fn set_options(&mut self, options: SamplerOptions) -> Result<(), SampleError> {
        options.check(self.vocab)?;
        // The standard library's hash keys are random per process and differ from call to call.
        self.seed = options
            .seed
            .unwrap_or_else(|| std::hash::RandomState::new().build_hasher().finish() & 0xffff_ffff);
        self.rng = Mt19937::new(self.seed);
        self.history.set_window(options.penalty_window());
        self.options = options;
        Ok(())
    }

    /// The options.
    pub fn options(&self) -> &SamplerOptions {
        &self.options
    }

    /// The seed in use: the options', or the one that was drawn in its place.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Whether the choice is the row's largest logit and nothing else is asked for, so that a device may make it.
    pub fn plain_greedy(&self) -> bool {
        let o = &self.options;
        o.temperature == 0.0 && o.logit_bias.is_empty() && o.penalty_window() == 0 && o.logprobs.is_none()
    }

    /// Chooses a token. Uses one random number, or none at temperature 0. The token enters the history by
    /// [`Sampler::accept`].
    pub fn sample(&mut self, logits: &[f32], mask: Option<&TokenMask>) -> Result<Sampled, SampleError> {
        let greedy = self.options.temperature == 0.0;
        let distribution =
            self.scratch.distribution(&self.options, &self.history, self.vocab, logits, mask)?;
        let token = if greedy { distribution.first() } else { distribution.draw(self.rng.bits53()) };
        Ok(self.with_logprobs(token, logits))
    }

    /// How many of a row's largest logits decide, with nothing else of it, what [`Sampler::sample`] chooses; none where all may matter.
    pub fn looks_at(&self) -> Option<usize> {
        let o = &self.options;
        let k = if o.temperature == 0.0 { 1 } else { o.top_k as usize };
        Some(k).filter(|k| *k > 0 && o.logprobs.is_none() && !o.raises())
    }

    /// Chooses as [`Sampler::sample`] would from the whole row. None, and no random number used, where a token that is not there might be
    /// chosen.
    pub fn sample_largest(
        &mut self,
        largest: Largest<'_>,
        mask: Option<&TokenMask>,
    ) -> Result<Option<Sampled>, SampleError> {
        let Some(k) = self.looks_at() else { return Ok(None) };
        let greedy = self.options.temperature == 0.0;
        let chosen = self.scratch.of_largest(&self.options, &self.history, largest, mask, k)?;
        let token = chosen.map(|d| if greedy { d.first() } else { d.draw(self.rng.bits53()) });
        Ok(token.map(|token| Sampled { token, logprobs: None }))
    }

    /// Takes a token that is not to be chosen, with its log probabilities; uses no random number.
    pub fn forced(&mut self, token: u32, logits: &[f32]) -> Result<Sampled, SampleError> {
        if token as usize >= self.vocab {
            return Err(SampleError::NoSuchToken { token, vocab: self.vocab });
        }
        chain::read(logits, self.vocab, &mut vec![])?;
        Ok(self.with_logprobs(token, logits))
    }

    /// What [`Sampler::sample`] would draw from at this point.
    pub fn distribution<'a>(
        &'a mut self,
        logits: &'a [f32],
        mask: Option<&'a TokenMask>,
    ) -> Result<Distribution<'a>, SampleError> {
        self.scratch.distribution(&self.options, &self.history, self.vocab, logits, mask)
    }

    fn with_logprobs(&mut self, token: u32, logits: &[f32]) -> Sampled {
        let logprobs = self.options.logprobs.map(|top| Logprobs::new(token, top, logits));
        Sampled { token, logprobs }
    }

    /// Adds a token of prompt or answer to the history.
    pub fn accept(&mut self, token: u32) {
        self.history.accept(token);
    }

    /// Makes `tokens` the history, for a sequence that was rewound.
    pub fn set_history(&mut self, tokens: &[u32]) {
        self.history.replace(tokens);
    }

    /// Random numbers and history as bytes. Options are the opener's affair and not saved.
    pub fn save(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend(self.rng.save());
        out.extend((self.history.tokens().len() as u64).to_le_bytes());
        out.extend(self.history.tokens().iter().flat_map(|token| token.to_le_bytes()));
        out
    }

    /// Takes up what [`Sampler::save`] gave; a state that is refused changes nothing.
    pub fn restore(&mut self, state: &[u8]) -> Result<(), SampleError> {
        let rest = state.strip_prefix(MAGIC).ok_or(SampleError::BadState("it has another layout"))?;
        let truncated = SampleError::BadState("it is truncated");
        let (rng, rest) = rest.split_at_checked(Mt19937::SAVED_BYTES).ok_or(truncated.clone())?;
        let (count, tokens) = rest.split_first_chunk::<8>().ok_or(truncated.clone())?;
        let rng = Mt19937::restore(rng).ok_or(SampleError::BadState("its random numbers are damaged"))?;
        let (tokens, odd) = tokens.as_chunks::<4>();
        let tokens: Vec<u32> = tokens.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        if !odd.is_empty() || tokens.len() as u64 != u64::from_le_bytes(*count) {
            return Err(truncated);
        }
        if tokens.iter().any(|token| *token as usize >= self.vocab) {
            return Err(SampleError::BadState("its history is not this model's"));
        }
        self.rng = rng;
        self.history.replace(&tokens);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
