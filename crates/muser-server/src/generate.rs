//! The one way from a request to its events: tokens, text, stop texts, channels.

use crate::constrain::{Answer, NoMoreReasoning, Turn};
use crate::error::{ApiError, Kind};
use crate::intake::Share;
use crate::metrics::Metrics;
use crate::post::Post;
use crate::request::{Input, Request};
use crate::slots::{End, Refusal, Report, Sink, Slots, Work};
use crate::text::{TextModel, blocking};
use muser_core::sample::{Logprobs, Sampled};
use muser_core::session::{Constraint, Flow};
use muser_core::stop::StopStrings;
use muser_text::channels::Collector;
use muser_text::{ChannelParser, Detokenizer, Event};
use serde_json::Value;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::Instant;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Why a generation ended, as clients are told.
#[derive(Clone, Debug, PartialEq)]
pub enum Finish {
    /// The model ended its turn.
    Stop,
    /// This stop text came.
    StopText(String),
    /// The limit of new tokens, or the end of the context.
    Length,
    /// The turn ends with calls.
    ToolCalls,
    /// It did not come to its end.
    Failed(ApiError),
}

/// What a generation cost.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// Counts and times.
    pub report: Report,
    /// New tokens that were reasoning.
    pub reasoning: usize,
}

/// A token as it was chosen.
#[derive(Clone, Debug)]
pub struct TokenReport {
    /// Its id.
    pub token: u32,
    /// Log probabilities, if they were asked for.
    pub logprobs: Option<Logprobs>,
    /// Whether it is part of the answer's text.
    pub content: bool,
}

/// What comes out of a generation, in order.
#[derive(Clone, Debug)]
pub enum Output {
    /// A slot works on it; so many prompt tokens were known.
    Started(usize),
    /// A token; comes before the text that it completes.
    Token(TokenReport),
    /// Text, reasoning, calls.
    Event(Event),
    /// The last output.
    End(Finish, Usage),
}

/// A running generation of one or more choices. Dropping it cancels them.
pub struct Generation {
    receiver: UnboundedReceiver<(usize, Output)>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// How many choices.
    pub n: usize,
    open: usize,
    /// The memory that the request keeps.
    _share: Option<Arc<Share>>,
}

impl Generation {
    /// The next output with its choice; none once all choices have ended.
    pub async fn next(&mut self) -> Option<(usize, Output)> {
        std::future::poll_fn(|cx| self.poll_next(cx)).await
    }

    /// The same, to be polled.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<(usize, Output)>> {
        if self.open == 0 {
            return Poll::Ready(None);
        }
        let next = ready!(self.receiver.poll_recv(cx));
        Poll::Ready(self.note(next))
    }

    fn note(&mut self, next: Option<(usize, Output)>) -> Option<(usize, Output)> {
        if let Some((_, Output::End(..))) = next {
            self.open -= 1;
        }
        next
    }
}

/// Runs requests.
pub struct Generator {
    /// The model's text side.
    pub text: Arc<TextModel>,
    /// The engine's side.
    pub slots: Slots,
    /// What happened so far.
    pub metrics: Arc<Metrics>,
    /// Most choices of a request.
    pub max_n: usize,
    /// Time that a request has if it asks for none.
    pub timeout: Option<std::time::Duration>,
    /// Calls that the model is free to make are not held to the tools' grammar.
    pub free_calls: bool,
    /// Hands outputs out; opened by the first request.
    pub post: OnceLock<Post<(usize, Output)>>,
}

impl Generator {
    /// Tokens of a request's prompt.
    pub fn count(&self, request: &Request) -> Result<usize, ApiError> {
        match &request.input {
            Input::Tokens(tokens) => Ok(tokens.len()),
            Input::Chat(chat) => Ok(self.text.prompt(chat, &request.answer, self.free_calls)?.tokens.len()),
        }
    }

    /// Starts a request.
    pub fn start(&self, request: Request) -> Result<Generation, ApiError> {
        let mut rendered = None;
        let tokens = match &request.input {
            Input::Tokens(tokens) => tokens.clone(),
            Input::Chat(chat) => {
                let mut prompt = self.text.prompt(chat, &request.answer, self.free_calls)?;
                let tokens = std::mem::take(&mut prompt.tokens);
                rendered = Some(prompt);
                tokens
            }
        };
        let context = self.slots.context();
        if tokens.is_empty() {
            return Err(ApiError::new(Kind::Invalid, "the prompt is empty; give at least one token"));
        }
        let vocab = self.text.grammars.vocab();
        if let Some(token) = tokens.iter().find(|t| **t as usize >= vocab) {
            return Err(ApiError::new(
                Kind::Invalid,
                format!("token {token} does not exist; ids go up to {}", vocab - 1),
            ));
        }
        if tokens.len() >= context {
            let message = format!(
                "the prompt of {} tokens exceeds the available context size of {context} tokens; shorten the conversation or start the server with a larger --context",
                tokens.len()
            );
            return Err(ApiError::new(Kind::Context, message));
        }
        if request.n == 0 || request.n > self.max_n {
            return Err(ApiError::field("n", format!("n must be 1 to {}", self.max_n)));
        }
        let mut sampling = request.sampling.clone();
        if request.ignore_end {
            let ends = self.text.tokenizer.end_ids();
            sampling.logit_bias.extend(ends.iter().map(|end| (*end, f32::NEG_INFINITY)));
        }
        // Options are checked here, where the request can still be refused.
        muser_core::sample::Sampler::new(sampling.clone(), vocab)?;
        let stop = StopStrings::new(&request.stop).map_err(|e| ApiError::field("stop", e.to_string()))?;
        let raw = match (&rendered, &request.answer) {
            (None, answer) if *answer != Answer::Free => {
                Some(blocking(|| answer.compile(&self.text.grammars))?)
            }
            _ => None,
        };
        let room = context - tokens.len();
        let max_tokens = request.max_tokens.unwrap_or(room).min(room);
        let budget = match &request.input {
            Input::Chat(chat) => chat.reasoning.budget,
            Input::Tokens(_) => None,
        };
        let timeout = request.timeout.or(self.timeout);
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        let (sender, receiver) = unbounded_channel();
        let post = self.post.get_or_init(Post::open);
        let (tools, committed, marks, grammar) = match rendered {
            Some(p) => (p.tools, p.committed, p.marks, p.grammar.map(Arc::new)),
            None => (None, false, vec![tokens.len()], None),
        };
        let parser = matches!(request.input, Input::Chat(_)).then(|| parser(tools.as_ref(), committed));
        let work = |choice: usize| {
            let spent = NoMoreReasoning::default();
            let grammars = self.text.grammars.clone();
            let constraint: Option<Box<dyn Constraint>> = match (&grammar, &raw) {
                (Some(message), _) => Some(Box::new(Turn::new(grammars, message.clone(), spent.clone()))),
                (None, Some(grammar)) => Some(Box::new(Turn::raw(grammars, grammar.clone()))),
                (None, None) => None,
            };
            let pipeline = Pipeline {
                text: self.text.clone(),
                detokenizer: self.text.tokenizer.decoder(),
                parser: parser.clone(),
                stop: stop.clone(),
                sender: sender.clone(),
                post: post.clone(),
                choice,
                budget,
                // Without a grammar the answer's header can be given; with one the model chooses among the rest.
                end_reasoning: self.text.end_reasoning[usize::from(constraint.is_none())].clone(),
                spent,
                reasoning: 0,
                calls: 0,
                finish: None,
                report_tokens: request.report_tokens,
                ignore_end: request.ignore_end,
            };
            let mut options = sampling.clone();
            options.seed = options.seed.map(|seed| seed.wrapping_add(choice as u64));
            Work {
                prompt: tokens.clone(),
                marks: marks.clone(),
                options,
                constraint,
                max_tokens,
                reuse: request.reuse,
                draft_rows: request.draft_rows.unwrap_or(usize::MAX),
                client: request.caller.as_ref().map_or(0, |caller| caller.id),
                deadline,
                sink: Box::new(pipeline),
            }
        };
        let works = (0..request.n).map(work).collect();
        self.metrics.requests.add(request.n as u64);
        if let Err(refusal) = self.slots.submit(works) {
            self.metrics.refused.add(request.n as u64);
            return Err(match refusal {
                Refusal::Full => ApiError::new(
                    Kind::Busy,
                    "all slots are busy and the queue is full; try again in a moment",
                ),
                Refusal::ShuttingDown => closing(),
            });
        }
        let (n, share) = (request.n, request.caller.as_ref().map(|caller| caller.share.clone()));
        drop(request);
        share.iter().for_each(|share| share.settle());
        Ok(Generation { receiver, prompt_tokens: tokens.len(), n, open: n, _share: share })
    }
}

fn closing() -> ApiError {
    ApiError::new(Kind::Closing, "the server is shutting down; try again once it is back")
}

fn parser(tools: Option<&Value>, committed: bool) -> ChannelParser {
    if committed { ChannelParser::committed(tools, "user") } else { ChannelParser::new(tools) }
}

/// One choice's way from tokens to outputs; runs on the engine's thread.
struct Pipeline {
    text: Arc<TextModel>,
    detokenizer: Detokenizer,
    /// None for raw completions.
    parser: Option<ChannelParser>,
    stop: StopStrings,
    sender: UnboundedSender<(usize, Output)>,
    post: Post<(usize, Output)>,
    choice: usize,
    /// Tokens of reasoning that are left.
    budget: Option<usize>,
    end_reasoning: Vec<u32>,
    spent: NoMoreReasoning,
    reasoning: usize,
    calls: usize,
    finish: Option<Finish>,
    report_tokens: bool,
    ignore_end: bool,
}

impl Pipeline {
    fn send(&self, output: Output) {
        self.post.put(&self.sender, (self.choice, output));
    }

    /// Passes events on; the answer's text through the stop filter. False once a stop text has come.
    fn pass(&mut self, events: Vec<Event>) -> bool {
        for event in events {
            let event = match event {
                Event::Content(text) => {
                    let text = self.stop.push(&text);
                    if !text.is_empty() {
                        self.send(Output::Event(Event::Content(text)));
                    }
                    if let Some(hit) = self.stop.hit() {
                        self.finish = Some(Finish::StopText(hit.to_string()));
                        return false;
                    }
                    continue;
                }
                other => other,
            };
            self.release();
            self.calls += usize::from(matches!(event, Event::ToolEnd { .. }));
            self.send(Output::Event(event));
        }
        true
    }

    /// Text that was held back because a stop text might begin in it.
    fn release(&mut self) {
        let text = self.stop.release();
        if !text.is_empty() {
            self.send(Output::Event(Event::Content(text)));
        }
    }

    fn report(&mut self, sampled: &Sampled, content: bool) {
        if self.report_tokens || sampled.logprobs.is_some() {
            let (token, logprobs) = (sampled.token, sampled.logprobs.clone());
            self.send(Output::Token(TokenReport { token, logprobs, content }));
        }
    }
}

/// What it still has in the post goes out with it, also when the engine's thread panics: a message that lies there keeps its
/// sender alive, and so its client waiting.
impl Drop for Pipeline {
    fn drop(&mut self) {
        self.post.send();
    }
}

impl Sink for Pipeline {
    fn started(&mut self, cached: usize) {
        self.send(Output::Started(cached));
    }

    fn token(&mut self, sampled: &Sampled) -> Flow {
        let token = sampled.token;
        let tokenizer = &self.text.tokenizer;
        let end = tokenizer.is_end(token) && !self.ignore_end;
        let special = tokenizer.is_special(token);
        let Some(parser) = self.parser.as_mut() else {
            // A raw completion is text; control tokens have none.
            let text = if special { String::new() } else { self.detokenizer.push(tokenizer, token) };
            self.report(sampled, !end);
            let events = if text.is_empty() { vec![] } else { vec![Event::Content(text)] };
            let going = self.pass(events);
            return if end || !going { Flow::Stop } else { Flow::Continue };
        };
        let text = self.detokenizer.push(tokenizer, token);
        let (before, answered) = (parser.reasoning(), parser.answering());
        let events = parser.push_token(&text, special);
        let (reasoning, finished) = (parser.reasoning(), parser.finished());
        let content = (answered || parser.answering()) && !special;
        self.reasoning += usize::from(before || reasoning);
        self.report(sampled, content);
        if !self.pass(events) || end || finished {
            return Flow::Stop;
        }
        // The header's own tokens cost one of the budget: reasoning begins with `<|message|>`.
        if reasoning && self.budget.is_some_and(|budget| self.reasoning > budget) {
            self.budget = None;
            self.spent.store(true, Ordering::Relaxed);
            return Flow::Force(self.end_reasoning.clone());
        }
        Flow::Continue
    }

    fn flush(&self) {
        self.post.send();
    }

    fn wanted(&self) -> bool {
        !self.sender.is_closed()
    }

    fn finish(mut self: Box<Self>, end: End, report: Report) {
        if self.finish.is_none() {
            let rest = self.detokenizer.finish();
            let events = match self.parser.as_mut() {
                Some(parser) => {
                    let mut events = parser.push(&rest);
                    events.extend(parser.finish());
                    events
                }
                None if rest.is_empty() => vec![],
                None => vec![Event::Content(rest)],
            };
            if self.pass(events) {
                self.release();
            }
        }
        let failed = |kind, message: String| Finish::Failed(ApiError::new(kind, message));
        let finish = match end {
            End::Stop if self.calls > 0 && self.finish.is_none() => Finish::ToolCalls,
            End::Stop => self.finish.take().unwrap_or(Finish::Stop),
            End::Length => Finish::Length,
            End::Deadline => failed(
                Kind::Timeout,
                format!("the request's time was up after {} new tokens", report.generated),
            ),
            End::Shutdown => Finish::Failed(closing()),
            End::Refused(why) => failed(Kind::Invalid, why),
            End::Failed(why) => failed(Kind::Internal, format!("the engine failed: {why}")),
        };
        self.send(Output::End(finish, Usage { report, reasoning: self.reasoning }));
    }
}

/// A choice that has come to its end.
#[derive(Debug)]
pub struct Collected {
    /// The message.
    pub message: muser_text::Message,
    /// Tokens, if they were asked for.
    pub tokens: Vec<TokenReport>,
    /// Why it ended.
    pub finish: Finish,
    /// What it cost.
    pub usage: Usage,
}

impl Generation {
    /// Waits for all choices. A choice that failed fails them all.
    pub async fn collect(mut self) -> Result<Vec<Collected>, ApiError> {
        let mut open: Vec<_> =
            std::iter::repeat_with(|| (Collector::default(), vec![])).take(self.n).collect();
        let mut done: Vec<Option<Collected>> = std::iter::repeat_with(|| None).take(self.n).collect();
        while let Some((choice, output)) = self.next().await {
            let (Some((collector, tokens)), Some(slot)) = (open.get_mut(choice), done.get_mut(choice)) else {
                continue;
            };
            match output {
                Output::Started(_) => {}
                Output::Token(token) => tokens.push(token),
                Output::Event(event) => collector.take(vec![event]),
                Output::End(Finish::Failed(error), _) => return Err(error),
                Output::End(finish, usage) => {
                    let message = std::mem::take(collector).message(finish != Finish::Length);
                    *slot = Some(Collected { message, tokens: std::mem::take(tokens), finish, usage });
                }
            }
        }
        done.into_iter().collect::<Option<Vec<_>>>().ok_or_else(closing)
    }
}
