//! A turn as a [`Constraint`]: which message may come, what it may hold, and when it may end.

use super::message::Channel;
use super::{Compiled, ControlTokens, Grammars, MessageGrammar};
use llguidance::Matcher;
use muser_core::sample::{SampleError, TokenMask};
use muser_core::session::Constraint;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Set once the reasoning budget is spent: later headers of the turn may not name `self`.
pub type NoMoreReasoning = Arc<AtomicBool>;

enum State {
    /// Before the first token. A request that waits has no follower of its own yet.
    Waiting,
    /// In the header, and in the body where that is constrained.
    Message { matcher: Box<Matcher>, header: Vec<u8>, channel: Option<Channel> },
    /// In a body that may say anything.
    Free(Channel),
    /// After `<|eom|>`: this many tokens of `<|start|>assistant` have come.
    Between(usize),
    /// The turn is over.
    Over,
}

/// Follows one generation.
pub struct Turn {
    grammars: Arc<Grammars>,
    message: Option<Arc<MessageGrammar>>,
    raw: Option<Compiled>,
    no_more_reasoning: NoMoreReasoning,
    state: State,
    words: Vec<u32>,
    mask: TokenMask,
    /// What `mask` is worth until the next token is accepted.
    ready: Ready,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Ready {
    /// Not made yet.
    No,
    /// Every token is free.
    Free,
    /// It holds.
    Masked,
}

impl Turn {
    /// A turn that begins after `<|start|>assistant`.
    pub fn new(
        grammars: Arc<Grammars>,
        message: Arc<MessageGrammar>,
        no_more_reasoning: NoMoreReasoning,
    ) -> Self {
        Self::begin(grammars, Some(message), None, no_more_reasoning)
    }

    /// An output that follows one grammar from its first token on.
    pub fn raw(grammars: Arc<Grammars>, grammar: Compiled) -> Self {
        Self::begin(grammars, None, Some(grammar), NoMoreReasoning::default())
    }

    fn begin(
        grammars: Arc<Grammars>,
        message: Option<Arc<MessageGrammar>>,
        raw: Option<Compiled>,
        no_more_reasoning: NoMoreReasoning,
    ) -> Self {
        let mask = TokenMask::none(grammars.vocab());
        let (state, words, ready) = (State::Waiting, vec![], Ready::No);
        Turn { grammars, message, raw, no_more_reasoning, state, words, mask, ready }
    }

    /// Leaves [`State::Waiting`].
    fn start(&mut self) {
        if !matches!(self.state, State::Waiting) {
            return;
        }
        self.state = match (&self.raw, &self.message) {
            (Some(raw), _) => {
                let matcher = Box::new(raw.matcher());
                State::Message { matcher, header: vec![], channel: Some(Channel::Raw) }
            }
            (None, Some(message)) => header(message, &self.no_more_reasoning),
            (None, None) => State::Over,
        };
    }

    /// Tokens that may end a message of `channel`.
    fn ends(&self, channel: Channel) -> Vec<u32> {
        let ControlTokens { eom, eot, ends, .. } = self.grammars.control();
        let more = self.message.as_ref().is_some_and(|m| m.another_after(channel));
        match channel {
            Channel::Raw => ends.clone(),
            _ if more => vec![*eot, *eom],
            _ => vec![*eot],
        }
    }

    fn set(&mut self, token: u32, allowed: bool) {
        if let Some(word) = self.words.get_mut(token as usize / 32) {
            let bit = 1 << (token % 32);
            *word = if allowed { *word | bit } else { *word & !bit };
        }
    }
}

fn header(message: &MessageGrammar, no_more_reasoning: &NoMoreReasoning) -> State {
    let matcher = message.matcher(no_more_reasoning.load(Ordering::Relaxed));
    State::Message { matcher: Box::new(matcher), header: vec![], channel: None }
}

fn failed(error: impl std::fmt::Display) -> SampleError {
    SampleError::Constraint(format!("{error}; simplify the schema or grammar"))
}

impl Constraint for Turn {
    fn mask(&mut self) -> Result<Option<&TokenMask>, SampleError> {
        if self.ready == Ready::No {
            self.ready = self.make()?;
        }
        Ok(Some(&self.mask).filter(|_| self.ready == Ready::Masked))
    }

    fn accept(&mut self, token: u32) -> Result<(), SampleError> {
        self.ready = Ready::No;
        self.start();
        let control = self.grammars.control();
        let ended = match &mut self.state {
            State::Free(_) => token == control.eom || control.ends.contains(&token),
            State::Message { matcher, header, channel } => {
                let ends = token == control.eom || control.ends.contains(&token);
                if !ends {
                    matcher.consume_token(token).map_err(failed)?;
                    if channel.is_none() && token == control.message {
                        let named = MessageGrammar::channel(header);
                        *channel = Some(named);
                        if self.message.as_ref().is_some_and(|m| m.is_free(named)) {
                            self.state = State::Free(named);
                        }
                    } else if channel.is_none() {
                        header.extend(self.grammars.bytes(token));
                    }
                }
                ends
            }
            State::Between(at) => {
                *at += 1;
                if *at >= control.start.len()
                    && let Some(message) = &self.message
                {
                    self.state = header(message, &self.no_more_reasoning);
                }
                false
            }
            State::Over | State::Waiting => false,
        };
        if ended {
            self.state = if token == control.eom { State::Between(0) } else { State::Over };
        }
        Ok(())
    }
}

impl Turn {
    fn make(&mut self) -> Result<Ready, SampleError> {
        self.start();
        let all = self.grammars.vocab().div_ceil(32);
        let control = self.grammars.control().clone();
        self.words.clear();
        match &mut self.state {
            State::Free(Channel::Reasoning) => {
                // A turn that ends in its reasoning would answer nothing.
                self.words.resize(all, u32::MAX);
                control.ends.iter().for_each(|end| self.set(*end, false));
            }
            State::Free(_) => return Ok(Ready::Free),
            State::Between(at) => {
                let next = control.start.get(*at).copied();
                self.words.resize(all, 0);
                next.into_iter().for_each(|token| self.set(token, true));
            }
            State::Over | State::Waiting => {
                self.words.resize(all, 0);
                self.set(control.eot, true);
            }
            State::Message { matcher, channel, .. } => {
                let over = matcher.is_stopped();
                if !over {
                    self.words.extend(matcher.compute_mask().map_err(failed)?.as_slice());
                }
                self.words.resize(all, 0);
                let ending = channel.filter(|_| over || matcher.is_accepting().unwrap_or(false));
                [control.eom].iter().chain(&control.ends).for_each(|token| self.set(*token, false));
                let ends = ending.map(|channel| self.ends(channel)).unwrap_or_default();
                ends.into_iter().for_each(|end| self.set(end, true));
            }
        }
        self.mask.set_words(&self.words);
        Ok(Ready::Masked)
    }
}
