//! One conversation's state: what stands in the caches, what waits to be computed, and how the next token is chosen.

use crate::adapt::Pace;
use crate::device::{Device, SeqId};
use crate::engine::EngineError;
use crate::lookup::{Lookup, Match};
use crate::sample::{SampleError, Sampled, Sampler, TokenMask};
use std::collections::VecDeque;

/// Allows tokens step by step: a grammar, a schema, a forced tool call.
pub trait Constraint: Send {
    /// Tokens that may come next; `None` leaves every token free. Asked for while the device computes the logits, and again
    /// once they are there: the second time it costs nothing.
    fn mask(&mut self) -> Result<Option<&TokenMask>, SampleError>;
    /// Moves past a token that was chosen.
    fn accept(&mut self, token: u32) -> Result<(), SampleError>;
}

/// What the receiver of a token wants next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Flow {
    /// Go on.
    Continue,
    /// This was the last token: nothing after it is sampled, and the session's state ends with it.
    Stop,
    /// Go on, but the next tokens are these instead of sampled ones (the end of a reasoning budget, say).
    Force(Vec<u32>),
}

/// A sequence on the engine's device with its sampler. Made by [`crate::Engine::session`], freed by [`crate::Engine::close`].
pub struct Session {
    pub(crate) seq: SeqId,
    pub(crate) context: usize,
    /// Tokens whose keys and values are stored, in order.
    pub(crate) tokens: Vec<u32>,
    /// Tokens that wait for the next pass: a prompt, or the one token sampled last.
    pub(crate) waiting: VecDeque<u32>,
    /// Tokens that replace sampling.
    pub(crate) forced: VecDeque<u32>,
    /// One past the highest position that was ever written: decides how far back a ring still holds rows.
    pub(crate) high: usize,
    /// Shortest length that can be rewound to, besides 0: a restored or forked ring holds no more than its window.
    pub(crate) floor: usize,
    pub(crate) sampler: Sampler,
    pub(crate) constraint: Option<Box<dyn Constraint>>,
    pub(crate) drafting: Option<Drafting>,
    /// New tokens that are still wanted at most, so that no draft goes beyond.
    pub(crate) wanted: usize,
}

/// What a session needs to draft.
pub(crate) struct Drafting {
    /// The drafter's side; none in a model without one.
    pub drafter: Option<DrafterSide>,
    /// The session's own tokens, up to the one that waits. Tokens that were dropped from the session must be dropped here.
    pub lookup: Lookup,
    /// What this session's drafts were worth.
    pub pace: Pace,
    /// Rows that it may draft at most.
    pub most: usize,
    /// Rows and seconds of the prompt's chunks so far.
    pub prompt: (usize, f64),
}

/// What the drafter knows of a session.
#[derive(Default)]
pub(crate) struct DrafterSide {
    /// Positions whose features are in the drafter's caches: `0..injected`.
    pub injected: usize,
    /// Feature rows of the positions `injected..tokens.len()`, which the drafter is given with the next draft.
    pub parked: Vec<u32>,
}

/// Tokens of a prompt's end that teach how far lookups are to be trusted.
const LESSON: usize = 512;

impl Drafting {
    /// Adds new tokens to the lookup, and learns from each what a match before it was worth.
    fn learn(&mut self, new: &[u32]) {
        let untaught = new.len().saturating_sub(LESSON);
        for (i, token) in new.iter().enumerate() {
            if i >= untaught
                && let Some(found) = self.lookup.find()
            {
                self.pace.foretold(found.length, self.lookup.follow(found.next, 1) == [*token]);
            }
            self.lookup.push(*token);
        }
    }
}

impl Session {
    /// Tokens in the caches.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens that wait for the next pass.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Positions that are left, counting waiting tokens as used.
    pub fn room(&self) -> usize {
        self.context.saturating_sub(self.tokens.len() + self.waiting.len())
    }

    /// Longest length of the session.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Adds tokens to be computed by the next prefill.
    pub fn push(&mut self, tokens: &[u32]) {
        self.waiting.extend(tokens);
        tokens.iter().for_each(|token| self.sampler.accept(*token));
    }

    /// The sampler, to replace its options between turns or to look at its state.
    pub fn sampler(&mut self) -> &mut Sampler {
        &mut self.sampler
    }

    /// Sets or removes what constrains the coming tokens.
    pub fn constrain(&mut self, constraint: Option<Box<dyn Constraint>>) {
        self.constraint = constraint;
    }

    /// Whether drafts may be tried for this session.
    pub fn drafts(&self) -> bool {
        self.drafting.is_some()
    }

    /// The drafter's side.
    pub(crate) fn drafter(&self) -> Option<&DrafterSide> {
        self.drafting.as_ref()?.drafter.as_ref()
    }

    /// The drafter's side, to change it.
    pub(crate) fn drafter_mut(&mut self) -> Option<&mut DrafterSide> {
        self.drafting.as_mut()?.drafter.as_mut()
    }

    /// Rows that are kept for the drafter.
    pub(crate) fn owed(&self) -> usize {
        self.drafter().map_or(0, |drafter| drafter.parked.len())
    }

    /// Drops what stands after the first `len` tokens from the drafts' bookkeeping; feature rows that nobody needs any more
    /// are appended to `free`.
    pub(crate) fn forget(&mut self, len: usize, free: &mut Vec<u32>) {
        let Some(drafting) = self.drafting.as_mut() else { return };
        drafting.lookup.truncate(len);
        if let Some(drafter) = drafting.drafter.as_mut() {
            let keep = len.saturating_sub(drafter.injected).min(drafter.parked.len());
            free.extend(drafter.parked.drain(keep..));
            drafter.injected = drafter.injected.min(len);
        }
    }

    /// Drafts at most so many rows a step from now on. With 0 it drafts nothing, and can again later.
    pub fn draft_at_most(&mut self, rows: usize) {
        self.drafting.iter_mut().for_each(|drafting| drafting.most = rows);
    }

    /// Says that no more than so many new tokens will be wanted; drafts then end there. The sink's [`Flow::Stop`] still ends the answer.
    pub fn want_at_most(&mut self, tokens: usize) {
        self.wanted = tokens;
    }

    /// Where the last tokens, the waiting one with them, stood before.
    pub(crate) fn look_up(&mut self) -> Option<Match> {
        let drafting = self.drafting.as_mut()?;
        let all = self.tokens.iter().chain(&self.waiting);
        let new: Vec<u32> = all.skip(drafting.lookup.len()).copied().collect();
        drafting.learn(&new);
        drafting.lookup.find()
    }

    /// Has the next token's mask made, while the device is busy. An error is met again where the mask is used.
    pub(crate) fn prepare_mask(&mut self) {
        if let Some(constraint) = self.constraint.as_mut().filter(|_| self.forced.is_empty()) {
            let _ = constraint.mask();
        }
    }

    /// Takes the next token, by the target's `index`-th row of logits, which come after all earlier tokens.
    pub(crate) fn choose(&mut self, device: &mut dyn Device, index: usize) -> Result<Sampled, EngineError> {
        let sampled = match self.forced.pop_front() {
            Some(token) => self.sampler.forced(token, device.logits(index)?)?,
            None => self.sample(device, index)?,
        };
        Ok(self.take(sampled)?)
    }

    fn sample(&mut self, device: &mut dyn Device, index: usize) -> Result<Sampled, EngineError> {
        let mask = match self.constraint.as_mut() {
            Some(constraint) => constraint.mask()?,
            None => None,
        };
        if let Some(k) = self.sampler.looks_at() {
            // A mask often allows enough of the largest; else they are searched among what it allows.
            for searched in [None, mask].into_iter().take(1 + usize::from(mask.is_some())) {
                let Some(largest) = device.largest(index, k, searched)? else { break };
                if let Some(sampled) = self.sampler.sample_largest(largest, mask)? {
                    return Ok(sampled);
                }
            }
        }
        Ok(self.sampler.sample(device.logits(index)?, mask)?)
    }

    /// How many of a row's largest logits may decide the next token, without the others.
    pub(crate) fn looks_at(&self) -> Option<usize> {
        self.sampler.looks_at().filter(|_| self.forced.is_empty())
    }

    /// Records a chosen token in the sampler's history and in the constraint.
    pub(crate) fn take(&mut self, sampled: Sampled) -> Result<Sampled, SampleError> {
        self.sampler.accept(sampled.token);
        self.wanted = self.wanted.saturating_sub(1);
        if let Some(constraint) = self.constraint.as_mut() {
            constraint.accept(sampled.token)?;
        }
        Ok(sampled)
    }

    /// Whether the next token is the plain argmax, so that the device may choose it.
    pub(crate) fn plain_greedy(&self) -> bool {
        self.forced.is_empty() && self.constraint.is_none() && self.sampler.plain_greedy()
    }
}
