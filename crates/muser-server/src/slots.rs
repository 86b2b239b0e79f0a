//! Slots: one thread that owns the engine, shares its passes among requests, and keeps what they computed for the next.
//!
//! Each turn of the loop admits what fits, computes at most one chunk of one prompt, and decodes one step of every
//! session that is past its prompt. So a token waits for at most one short chunk of somebody else's prompt.

mod act;
mod admit;
mod host;
mod run;

pub use act::SlotFault;

use crate::metrics::Metrics;
use muser_core::engine::EngineError;
use muser_core::sample::{SampleError, Sampled, SamplerOptions};
use muser_core::session::{Constraint, Flow};
use muser_core::{Engine, Session};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Stack of the engine's thread: masks are made there, of grammars whose rules lead far down.
const STACK: usize = 64 << 20;

/// Sizes of the scheduler.
#[derive(Clone, Debug)]
pub struct SlotOptions {
    /// Requests that run at the same time.
    pub slots: usize,
    /// Tokens that each slot holds at most; 0: the model's context.
    pub context: usize,
    /// Requests that may wait for a slot; more are refused.
    pub queue: usize,
    /// Bytes of host memory for saved sessions.
    pub host_bytes: usize,
    /// Rows of a prompt chunk while nobody decodes.
    pub idle_chunk: usize,
    /// Rows of a prompt chunk while somebody decodes.
    pub busy_chunk: usize,
}

impl Default for SlotOptions {
    fn default() -> Self {
        SlotOptions { slots: 4, context: 0, queue: 64, host_bytes: 0, idle_chunk: 512, busy_chunk: 64 }
    }
}

/// Why a generation ended.
#[derive(Clone, Debug, PartialEq)]
pub enum End {
    /// The sink asked for it: an end token, a stop string.
    Stop,
    /// The limit of new tokens, or the end of the context.
    Length,
    /// The request's time was up.
    Deadline,
    /// The server is shutting down.
    Shutdown,
    /// The request's own schema or grammar allows nothing more, or costs too much to follow.
    Refused(String),
    /// The engine failed.
    Failed(String),
}

impl From<EngineError> for End {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::Sample(error @ (SampleError::Constraint(_) | SampleError::NothingAllowed)) => {
                End::Refused(error.to_string())
            }
            other => End::Failed(other.to_string()),
        }
    }
}

/// Counts and times of one generation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Those of them that were already computed.
    pub cached: usize,
    /// New tokens.
    pub generated: usize,
    /// Tokens that were proposed and that the target accepted.
    pub drafted: usize,
    /// See `drafted`.
    pub accepted: usize,
    /// Those of both that lookups proposed.
    pub looked_up: usize,
    /// See `looked_up`.
    pub looked_up_accepted: usize,
    /// Seconds in the queue.
    pub queue_seconds: f64,
    /// Seconds from admission to the first token.
    pub prompt_seconds: f64,
    /// Seconds from the first token to the last.
    pub decode_seconds: f64,
}

/// Receives a generation's tokens on the engine's thread; must not block.
pub trait Sink: Send {
    /// A slot has been found; `cached` tokens of the prompt need not be computed.
    fn started(&mut self, cached: usize);
    /// A new token.
    fn token(&mut self, sampled: &Sampled) -> Flow;
    /// What was given so far is to be passed on: the engine computes next.
    fn flush(&self) {}
    /// False once nobody reads any more.
    fn wanted(&self) -> bool;
    /// The last call.
    fn finish(self: Box<Self>, end: End, report: Report);
}

/// A generation to be run.
pub struct Work {
    /// At least one token, fewer than the slot's context.
    pub prompt: Vec<u32>,
    /// Positions in the prompt that other prompts are likely to share up to: checkpoints are made there before a ring
    /// forgets them.
    pub marks: Vec<usize>,
    /// How to choose tokens.
    pub options: SamplerOptions,
    /// What the tokens must follow.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Most new tokens.
    pub max_tokens: usize,
    /// Whether earlier sessions may be continued.
    pub reuse: bool,
    /// Most drafted rows a step.
    pub draft_rows: usize,
    /// Who asks; among those who wait, the one with fewest running requests is next.
    pub client: u64,
    /// When to give up.
    pub deadline: Option<Instant>,
    /// Receives the tokens.
    pub sink: Box<dyn Sink>,
}

/// Why work was not accepted.
#[derive(Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The queue is full.
    Full,
    /// The server is shutting down.
    ShuttingDown,
}

/// What a slot does, for `/slots`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotStatus {
    /// Whether a request runs in it.
    pub busy: bool,
    /// Whether that request's prompt is still being computed.
    pub prefilling: bool,
    /// Tokens in its caches.
    pub tokens: usize,
    /// Tokens of the running request's prompt.
    pub prompt: usize,
    /// Tokens that the running request has generated.
    pub generated: usize,
}

enum Message {
    Work(Box<Work>),
    /// Something that needs the engine.
    Act(Box<dyn FnOnce(&mut Scheduler) + Send>),
    Stop(Instant),
}

/// The handle of the engine's thread.
pub struct Slots {
    sender: Sender<Message>,
    waiting: Arc<AtomicUsize>,
    queue: usize,
    status: Arc<Mutex<Vec<SlotStatus>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    context: usize,
}

/// A running request.
struct Running {
    work: Work,
    generated: usize,
    end: Option<End>,
    report: Report,
    admitted: Instant,
    first_token: Option<Instant>,
    prefilling: bool,
}

/// A place for a session, kept after its request for prompts that begin alike.
#[derive(Default)]
struct Slot {
    session: Option<Session>,
    running: Option<Running>,
    /// The last request's marks, for a checkpoint when the slot is given away.
    marks: Vec<usize>,
    used: u64,
}

struct Queued {
    work: Box<Work>,
    since: Instant,
}

struct Scheduler {
    engine: Engine,
    options: SlotOptions,
    slots: Vec<Slot>,
    queue: Vec<Queued>,
    host: host::HostCache,
    metrics: Arc<Metrics>,
    waiting: Arc<AtomicUsize>,
    status: Arc<Mutex<Vec<SlotStatus>>>,
    clock: u64,
    next_prefill: usize,
    stopping: Option<Instant>,
}

impl Slots {
    /// Starts the engine's thread.
    pub fn start(engine: Engine, options: SlotOptions, metrics: Arc<Metrics>) -> std::io::Result<Self> {
        let (sender, receiver) = channel();
        let waiting = Arc::new(AtomicUsize::new(0));
        let slots = options.slots.max(1);
        let status = Arc::new(Mutex::new(vec![SlotStatus::default(); slots]));
        let model = engine.model().clone();
        let most = model.geometry().context;
        let context = if options.context == 0 { most } else { options.context.min(most) };
        let window = model.plans.caches.iter().filter_map(|c| c.window).min().unwrap_or(usize::MAX);
        let queue = options.queue;
        let mut scheduler = Scheduler {
            engine,
            slots: std::iter::repeat_with(Slot::default).take(slots).collect(),
            queue: vec![],
            host: host::HostCache::new(options.host_bytes, window),
            metrics,
            waiting: waiting.clone(),
            status: status.clone(),
            clock: 0,
            next_prefill: 0,
            stopping: None,
            options: SlotOptions { context, ..options },
        };
        let thread = std::thread::Builder::new().name("engine".into()).stack_size(STACK);
        let thread = thread.spawn(move || scheduler.serve(&receiver))?;
        Ok(Slots { sender, waiting, queue, status, thread: Mutex::new(Some(thread)), context })
    }

    /// Tokens that a slot holds at most.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Whether the engine's thread runs.
    pub fn alive(&self) -> bool {
        self.thread.lock().unwrap_or_else(|e| e.into_inner()).as_ref().is_some_and(|t| !t.is_finished())
    }

    /// Requests that wait for a slot.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// What each slot does.
    pub fn status(&self) -> Vec<SlotStatus> {
        self.status.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }

    /// Hands works over, all or none of them.
    pub fn submit(&self, works: Vec<Work>) -> Result<(), Refusal> {
        let count = works.len();
        let room = |waiting: usize| (waiting + count <= self.queue.max(count)).then_some(waiting + count);
        self.waiting.fetch_update(Ordering::AcqRel, Ordering::Acquire, room).map_err(|_| Refusal::Full)?;
        for work in works {
            self.sender.send(Message::Work(Box::new(work))).map_err(|_| Refusal::ShuttingDown)?;
        }
        Ok(())
    }

    /// Refuses new work, lets running requests go on for at most `grace`, and waits for the thread.
    pub fn shut_down(&self, grace: Duration) {
        let _ = self.sender.send(Message::Stop(Instant::now() + grace));
        if let Some(thread) = self.thread.lock().unwrap_or_else(|e| e.into_inner()).take() {
            let _ = thread.join();
        }
    }
}

impl Scheduler {
    fn serve(&mut self, receiver: &Receiver<Message>) {
        while self.receive(receiver) {
            self.drop_unwanted();
            self.admit();
            self.prefill();
            self.step();
            self.retire();
            self.publish();
            self.slots.iter().filter_map(|s| s.running.as_ref()).for_each(|r| r.work.sink.flush());
        }
        self.publish();
    }

    /// Takes messages, waiting for one if there is nothing to do. False once the thread is to end.
    fn receive(&mut self, receiver: &Receiver<Message>) -> bool {
        loop {
            let idle = self.queue.is_empty() && self.slots.iter().all(|s| s.running.is_none());
            if idle && self.stopping.is_some() {
                return false;
            }
            let message = if idle {
                let Ok(message) = receiver.recv() else { return false };
                message
            } else {
                let Ok(message) = receiver.try_recv() else { return true };
                message
            };
            match message {
                Message::Work(work) if self.stopping.is_some() => {
                    self.waiting.fetch_sub(1, Ordering::AcqRel);
                    let report = Report { prompt: work.prompt.len(), ..Report::default() };
                    work.sink.finish(End::Shutdown, report);
                }
                Message::Work(work) => self.queue.push(Queued { work, since: Instant::now() }),
                Message::Act(act) => act(self),
                Message::Stop(limit) => self.stopping = Some(limit),
            }
        }
    }

    /// Ends what nobody reads any more and what is out of time, queued or running.
    fn drop_unwanted(&mut self) {
        let now = Instant::now();
        let stopped = self.stopping.is_some_and(|limit| now >= limit);
        let over = |work: &Work| match work.deadline {
            _ if !work.sink.wanted() => Some(End::Stop),
            _ if stopped => Some(End::Shutdown),
            Some(deadline) if now >= deadline => Some(End::Deadline),
            _ => None,
        };
        for queued in std::mem::take(&mut self.queue) {
            match over(&queued.work) {
                None => self.queue.push(queued),
                Some(end) => {
                    self.waiting.fetch_sub(1, Ordering::AcqRel);
                    let queue_seconds = queued.since.elapsed().as_secs_f64();
                    let report =
                        Report { prompt: queued.work.prompt.len(), queue_seconds, ..Report::default() };
                    queued.work.sink.finish(end, report);
                }
            }
        }
        for running in self.slots.iter_mut().filter_map(|s| s.running.as_mut()) {
            running.end = running.end.take().or_else(|| over(&running.work));
        }
        self.retire();
    }

    /// Frees the slots whose requests have ended; their sessions stay for later prompts.
    fn retire(&mut self) {
        let mut ended = vec![];
        for slot in &mut self.slots {
            let Some(end) = slot.running.as_mut().and_then(|r| r.end.take()) else { continue };
            let Some(mut running) = slot.running.take() else { continue };
            self.clock += 1;
            slot.used = self.clock;
            slot.marks = std::mem::take(&mut running.work.marks);
            if let Some(session) = slot.session.as_mut() {
                session.constrain(None);
            }
            // After a failure nobody knows what the caches hold.
            if matches!(end, End::Failed(_) | End::Refused(_))
                && let Some(session) = slot.session.take()
            {
                self.engine.close(session);
            }
            ended.push((running, end));
        }
        if !ended.is_empty() {
            // Whoever sees the end sees the slot free.
            self.publish();
        }
        ended.into_iter().for_each(|(running, end)| running.finish(end, &self.metrics));
    }

    fn publish(&mut self) {
        let of = |slot: &Slot| SlotStatus {
            busy: slot.running.is_some(),
            prefilling: slot.running.as_ref().is_some_and(|r| r.prefilling),
            tokens: slot.session.as_ref().map_or(0, |s| s.tokens().len()),
            prompt: slot.running.as_ref().map_or(0, |r| r.work.prompt.len()),
            generated: slot.running.as_ref().map_or(0, |r| r.generated),
        };
        *self.status.lock().unwrap_or_else(|e| e.into_inner()) = self.slots.iter().map(of).collect();
        self.metrics.host_cache_bytes.set(self.host.bytes() as u64);
    }
}

impl Running {
    fn take(&mut self, sampled: &Sampled) -> Flow {
        self.first_token.get_or_insert_with(Instant::now);
        self.generated += 1;
        let flow = self.work.sink.token(sampled);
        if flow == Flow::Stop {
            self.end = Some(End::Stop);
        } else if self.generated >= self.work.max_tokens {
            self.end = Some(End::Length);
            return Flow::Stop;
        }
        flow
    }

    fn finish(mut self, end: End, metrics: &Metrics) {
        let first = self.first_token.unwrap_or_else(Instant::now);
        self.report.generated = self.generated;
        self.report.prompt_seconds = (first - self.admitted).as_secs_f64();
        self.report.decode_seconds = first.elapsed().as_secs_f64();
        metrics.finished(&end, &self.report);
        self.work.sink.finish(end, self.report);
    }
}
