//! The stages in order, and the distribution that comes out of them.

use super::filter::{self, Candidate};
use super::mass::{self, UNIT};
use super::penalty::{self, History};
use super::scan::{self, Row};
use super::whole::{self, Whole};
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
    masses: Vec<u64>,
}

/// A clone starts with memory of its own.
impl Clone for Scratch {
    fn clone(&self) -> Self {
        Scratch::default()
    }
}

/// Reads a row's blocks' largest values; refuses a row of another vocabulary, and values that are not finite.
pub(super) fn read(logits: &[f32], vocab: usize, largest: &mut Vec<f32>) -> Result<(), SampleError> {
    if logits.len() != vocab {
        return Err(SampleError::Length { what: "a row of logits", got: logits.len(), vocab });
    }
    if scan::scan(logits, largest) {
        return Ok(());
    }
    let token = logits.iter().position(|x| !x.is_finite()).unwrap_or(0);
    Err(SampleError::NotFinite { token: token as u32, value: logits[token] })
}

impl Scratch {
    pub fn distribution<'a>(
        &'a mut self,
        options: &SamplerOptions,
        history: &History,
        vocab: usize,
        mut logits: &'a [f32],
        mask: Option<&'a TokenMask>,
    ) -> Result<Distribution<'a>, SampleError> {
        let Scratch { logits: adjusted, largest, candidates, selection, masses } = self;
        read(logits, vocab, largest)?;
        if let Some(mask) = mask.filter(|mask| mask.vocab() != vocab) {
            return Err(SampleError::Length { what: "the grammar's mask", got: mask.vocab(), vocab });
        }
        if penalty::adjusts(options, history) {
            adjusted.clear();
            adjusted.extend_from_slice(logits);
            penalty::adjust(options, history, adjusted);
            logits = adjusted;
            // A bias may be minus infinity.
            scan::scan(logits, largest);
        }
        let row = Row::of(logits, largest);
        let (k, o) = (options.top_k as usize, options);
        if o.temperature == 0.0 {
            filter::best(row, mask, candidates);
            return Distribution::of(candidates);
        }
        if k > 0 && k < vocab || o.typical_p < 1.0 {
            filter::top_k(row, mask, k, candidates);
            return select(options, candidates, selection);
        }
        if o.top_p < 1.0 {
            whole::top_p(row, mask, o.top_p, candidates, selection);
        } else if o.min_p > 0.0 {
            whole::min_p(row, mask, o.min_p, candidates);
        } else {
            let whole = Whole::new(row, mask, o.temperature, candidates, masses);
            let whole = whole.ok_or(SampleError::NothingAllowed)?;
            return Ok(Distribution { tokens: Tokens::All(whole), total: whole.mass() });
        }
        finish(options, candidates)
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
        if options.temperature == 0.0 {
            return Distribution::of(&self.candidates).map(Some);
        }
        select(options, &mut self.candidates, &mut self.selection).map(Some)
    }
}

/// The stages behind top-k.
fn select<'a>(
    options: &SamplerOptions,
    candidates: &'a mut Vec<Candidate>,
    scratch: &mut Vec<Candidate>,
) -> Result<Distribution<'a>, SampleError> {
    if options.typical_p < 1.0 {
        filter::typical(candidates, scratch, options.typical_p);
    }
    if options.top_p < 1.0 {
        filter::weigh(candidates, 1.0);
        let total = filter::mass(candidates) as f64;
        filter::top_p(candidates, scratch, f64::from(options.top_p) * total);
    }
    finish(options, candidates)
}

/// The stages behind top-p.
fn finish<'a>(
    options: &SamplerOptions,
    candidates: &'a mut Vec<Candidate>,
) -> Result<Distribution<'a>, SampleError> {
    // Top-p and min-p weigh at temperature 1 and keep the best, so that weights stay what they are.
    let mut weighed = options.top_p < 1.0;
    if options.min_p > 0.0 {
        if !weighed {
            filter::weigh(candidates, 1.0);
            weighed = true;
        }
        filter::min_p(candidates, options.min_p);
    }
    if !weighed || options.temperature != 1.0 {
        filter::weigh(candidates, options.temperature);
    }
    Distribution::of(candidates)
}

/// The tokens that may be chosen, with their probabilities.
///
/// A probability is an integer weight, relative to 2^40 for the most probable token, over the sum of the weights.
#[derive(Clone, Copy, Debug)]
pub struct Distribution<'a> {
    tokens: Tokens<'a>,
    total: u64,
}

/// At least one token.
#[derive(Clone, Copy, Debug)]
enum Tokens<'a> {
    /// In order of ids.
    Kept(&'a [Candidate]),
    All(Whole<'a>),
}

impl<'a> Distribution<'a> {
    fn of(kept: &'a [Candidate]) -> Result<Self, SampleError> {
        if kept.is_empty() {
            return Err(SampleError::NothingAllowed);
        }
        Ok(Distribution { tokens: Tokens::Kept(kept), total: filter::mass(kept) })
    }

    /// Tokens and probabilities, in order of token ids.
    pub fn iter(self) -> impl Iterator<Item = (u32, f64)> + 'a {
        self.weights().map(move |(token, weight)| (token, weight as f64 / self.total as f64))
    }

    fn weights(self) -> impl Iterator<Item = (u32, u64)> + 'a {
        let (kept, all) = match self.tokens {
            Tokens::Kept(kept) => (kept, None),
            Tokens::All(whole) => (&[][..], Some(whole)),
        };
        kept.iter().map(|c| (c.token, c.weight)).chain(all.into_iter().flat_map(Whole::weights))
    }

    /// The candidate with the lowest id.
    pub(super) fn first(self) -> u32 {
        self.weights().next().map_or(0, |(token, _)| token)
    }

    /// Inverts the cumulative distribution, in order of token ids, at `bits` / 2^53.
    pub(super) fn draw(self, bits: u64) -> u32 {
        let left = ((u128::from(bits) * u128::from(self.total)) >> 53) as u64;
        let token = match self.tokens {
            Tokens::Kept(kept) => mass::at(kept.iter().map(|c| (c.token, c.weight)), left),
            Tokens::All(whole) => whole.at(left),
        };
        // There is one: `left` started below the sum.
        token.unwrap_or_else(|| self.first())
    }
}
