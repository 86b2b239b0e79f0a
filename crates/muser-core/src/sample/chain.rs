//! The stages in order, and the distribution that comes out of them.

use super::filter::{self, Candidate, UNIT};
use super::penalty::{self, History};
use super::scan::Row;
use super::{SampleError, SamplerOptions, TokenMask};
use crate::device::Largest;

/// The stages of sampling in their order, each with what switches it off.
pub const ORDER: [(&str, &str); 8] = [
    ("logit bias", "no bias"),
    ("penalties: repetition, frequency, presence", "1, 0, 0, or repeat_last_n 0"),
    ("grammar mask", "no grammar"),
    ("top-k", "0"),
    ("typical-p", "1"),
    ("top-p", "1"),
    ("min-p", "0"),
    ("temperature", "1; 0 takes the largest logit after the mask"),
];

/// Memory that is used again from step to step.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    logits: Vec<f32>,
    largest: Vec<f32>,
    candidates: Vec<Candidate>,
    selection: Vec<Candidate>,
}

/// A clone starts with memory of its own.
impl Clone for Scratch {
    fn clone(&self) -> Self {
        Scratch::default()
    }
}

/// Reads a row; refuses one of another vocabulary, and values that are not finite.
pub(super) fn read<'a>(
    logits: &'a [f32],
    vocab: usize,
    largest: &'a mut Vec<f32>,
) -> Result<Row<'a>, SampleError> {
    if logits.len() != vocab {
        return Err(SampleError::Length { what: "a row of logits", got: logits.len(), vocab });
    }
    let (row, finite) = Row::read(logits, largest);
    if finite {
        return Ok(row);
    }
    let token = logits.iter().position(|x| !x.is_finite()).unwrap_or(0);
    Err(SampleError::NotFinite { token: token as u32, value: logits[token] })
}

impl Scratch {
    pub fn distribution(
        &mut self,
        options: &SamplerOptions,
        history: &History,
        vocab: usize,
        logits: &[f32],
        mask: Option<&TokenMask>,
    ) -> Result<Distribution<'_>, SampleError> {
        let mut row = read(logits, vocab, &mut self.largest)?;
        if let Some(mask) = mask.filter(|mask| mask.vocab() != vocab) {
            return Err(SampleError::Length { what: "the grammar's mask", got: mask.vocab(), vocab });
        }
        if penalty::adjusts(options, history) {
            self.logits.clear();
            self.logits.extend_from_slice(logits);
            penalty::adjust(options, history, &mut self.logits);
            // A bias may be minus infinity.
            row = Row::read(&self.logits, &mut self.largest).0;
        }
        if options.temperature == 0.0 {
            filter::best(row, mask, &mut self.candidates);
        } else {
            filter::top_k(row, mask, options.top_k as usize, &mut self.candidates);
        }
        self.select(options)
    }

    /// The same from the largest logits of a row; none where another token might be among the `k` largest, of which there is one at least.
    pub fn of_largest(
        &mut self,
        options: &SamplerOptions,
        history: &History,
        largest: Largest<'_>,
        mask: Option<&TokenMask>,
        k: usize,
    ) -> Result<Option<Distribution<'_>>, SampleError> {
        let adjusts = penalty::adjusts(options, history);
        self.candidates.clear();
        for (token, logit) in largest.tokens {
            if mask.is_some_and(|mask| !mask.allows(*token)) {
                continue;
            }
            let logit = if adjusts { penalty::adjusted(options, history, *token, *logit) } else { *logit };
            // No other token's logit grows, so who is still above the floor is above all others. A bias may be minus infinity.
            if logit >= largest.floor && logit > f32::NEG_INFINITY {
                self.candidates.push(Candidate { token: *token, logit, weight: UNIT });
            }
        }
        if self.candidates.len() < k && largest.floor > f32::NEG_INFINITY {
            return Ok(None);
        }
        filter::keep_largest(&mut self.candidates, k);
        self.select(options).map(Some)
    }

    /// The stages behind top-k.
    fn select(&mut self, options: &SamplerOptions) -> Result<Distribution<'_>, SampleError> {
        let candidates = &mut self.candidates;
        if options.temperature > 0.0 {
            if options.typical_p < 1.0 {
                filter::typical(candidates, &mut self.selection, options.typical_p);
            }
            if options.top_p < 1.0 {
                filter::top_p(candidates, &mut self.selection, options.top_p);
            }
            if options.min_p > 0.0 {
                filter::min_p(candidates, options.min_p);
            }
            filter::weigh(candidates, options.temperature);
        }
        if candidates.is_empty() {
            return Err(SampleError::NothingAllowed);
        }
        Ok(Distribution { candidates, total: filter::mass(candidates) })
    }
}

/// The tokens that may be chosen, with their probabilities.
///
/// A probability is an integer weight, relative to 2^40 for the most probable token, over the sum of the weights.
#[derive(Clone, Copy, Debug)]
pub struct Distribution<'a> {
    /// In order of ids, at least one.
    candidates: &'a [Candidate],
    total: u64,
}

impl<'a> Distribution<'a> {
    /// Tokens and probabilities, in order of token ids.
    pub fn iter(self) -> impl Iterator<Item = (u32, f64)> + 'a {
        self.candidates.iter().map(move |c| (c.token, c.weight as f64 / self.total as f64))
    }

    /// The candidate with the lowest id.
    pub(super) fn first(self) -> u32 {
        self.candidates[0].token
    }

    /// Inverts the cumulative distribution, in order of token ids, at `bits` / 2^53.
    pub(super) fn draw(self, bits: u64) -> u32 {
        let mut left = ((u128::from(bits) * u128::from(self.total)) >> 53) as u64;
        for c in self.candidates {
            if left < c.weight {
                return c.token;
            }
            left -= c.weight;
        }
        // Not reached: `left` started below the sum.
        self.first()
    }
}
