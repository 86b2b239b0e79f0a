//! The engine: one device, any number of sessions, passes shared among them.

mod decode;
mod state;

use crate::adapt::{Costs, Pace};
use crate::cost::{Batch, cost};
use crate::device::{Device, DeviceError, DeviceInfo, Row};
use crate::geometry::KvType;
use crate::lookup::Lookup;
use crate::model::Model;
use crate::plan::{Pass, Plan};
use crate::sample::{SampleError, Sampled, Sampler, SamplerOptions};
use crate::session::{DrafterSide, Drafting, Flow, Session};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;
use thiserror::Error;

pub use decode::{Active, StepStats};

/// Why a step did not happen.
#[derive(Debug, Error)]
pub enum EngineError {
    /// The device refused or failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Sampling failed: bad options, no token allowed, or logits that are not numbers.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// The session is full.
    #[error(
        "the context of {context} tokens is full: {used} are used and {wanted} more were given; shorten the prompt or give a larger context"
    )]
    #[allow(missing_docs)]
    ContextFull { context: usize, used: usize, wanted: usize },
    /// A call that does not fit the session's state.
    #[error("{0}")]
    Misuse(&'static str),
    /// A saved session that cannot be used here.
    #[error("saved session: {0}")]
    BadState(String),
}

/// Whether sessions draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftMode {
    /// Never.
    Off,
    /// By drafter and by lookup, as measured cost and acceptance say.
    Auto,
    /// Always this many drafted rows, the drafter's; in a model without one a lookup's wherever it finds a match (for tests and
    /// measurements).
    Fixed(usize),
    /// The same by lookup wherever it finds a match, by the drafter elsewhere.
    Mixed(usize),
}

/// One device with its model.
pub struct Engine {
    device: Box<dyn Device>,
    model: Arc<Model>,
    draft: DraftMode,
    info: DeviceInfo,
    /// Feature rows beyond a batch's own, free for sessions that keep what the drafter is given later.
    free_features: Vec<u32>,
    /// Measured seconds of passes, which decide how many rows are drafted.
    costs: Costs,
    /// Multiplications that give the drafter a row, as a share of the row's own.
    context_share: f64,
}

impl Engine {
    /// An engine that drafts as `draft` says; a model without a drafter only by lookup.
    pub fn new(device: Box<dyn Device>, model: Arc<Model>, draft: DraftMode) -> Self {
        let info = device.info();
        let free_features = (info.max_rows as u32..2 * info.max_rows as u32).collect();
        let work = |plan: &Plan| {
            let row = Batch { rows: 1, sequences: 1, depth: 0, logits: 0, kv: KvType::F16 };
            plan.steps.iter().map(|step| cost(&model, plan.pass, step, row).operations as f64).sum::<f64>()
        };
        let inject = model.plans.draft.as_ref().map_or(0.0, |draft| work(&draft.inject));
        let context_share = inject / work(&model.plans.target);
        Engine { device, model, draft, info, free_features, costs: Costs::default(), context_share }
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// What the device says of itself.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// The device, for traces, receipts and the conformance suite.
    pub fn device(&mut self) -> &mut dyn Device {
        self.device.as_mut()
    }

    /// How sessions draft.
    pub fn draft_mode(&self) -> DraftMode {
        self.draft
    }

    /// Opens a session of at most `context` tokens (0 or more than the model's: the model's own context).
    pub fn session(&mut self, context: usize, options: SamplerOptions) -> Result<Session, EngineError> {
        let most = self.model.geometry().context;
        let context = if context == 0 { most } else { context.min(most) };
        let sampler = Sampler::new(options, self.model.geometry().vocab)?;
        let seq = self.device.open(context)?;
        let drafting = self.drafting();
        Ok(Session {
            seq,
            context,
            tokens: vec![],
            waiting: VecDeque::new(),
            forced: VecDeque::new(),
            high: 0,
            floor: 0,
            sampler,
            constraint: None,
            drafting,
            wanted: usize::MAX,
        })
    }

    fn drafting(&self) -> Option<Drafting> {
        let draft = self.model.plans.draft.as_ref();
        let pace = match self.draft {
            DraftMode::Off => return None,
            DraftMode::Auto => Pace::auto(draft.map_or(0, |draft| draft.spec.block - 1)),
            DraftMode::Fixed(rows) => Pace::fixed(rows, false),
            DraftMode::Mixed(rows) => Pace::fixed(rows, true),
        };
        let drafter = draft.map(|_| DrafterSide::default());
        Some(Drafting { drafter, lookup: Lookup::default(), pace, most: usize::MAX, prompt: (0, 0.0) })
    }

    /// Frees a session's place on the device.
    pub fn close(&mut self, session: Session) {
        self.device.close(session.seq);
        self.free_features
            .extend(session.drafting.and_then(|d| d.drafter).into_iter().flat_map(|d| d.parked));
    }

    /// Computes up to `rows` waiting tokens. When none is left, samples the first new token, hands it to `sink` and keeps
    /// it waiting for [`Engine::step`]. Returns how many tokens still wait as prompt.
    pub fn prefill(
        &mut self,
        session: &mut Session,
        rows: usize,
        sink: &mut dyn FnMut(&Sampled) -> Flow,
    ) -> Result<usize, EngineError> {
        if session.waiting.is_empty() {
            return Err(EngineError::Misuse("prefill needs at least one token"));
        }
        let (used, wanted) = (session.tokens.len(), session.waiting.len());
        if used + wanted > session.context {
            return Err(EngineError::ContextFull { context: session.context, used, wanted });
        }
        let n = rows.clamp(1, self.info.max_rows).min(wanted);
        let last = n == wanted;
        let start = Instant::now();
        let parked = self.park(session, n)?;
        let row = |i: usize, token: u32| Row {
            logits: last && i + 1 == n,
            feature: parked.get(i).map_or(i as u32, |feature| *feature),
            ..Row::new(session.seq, (used + i) as u32, token)
        };
        let batch: Vec<Row> = session.waiting.iter().take(n).enumerate().map(|(i, t)| row(i, *t)).collect();
        let (sampled, chance) = match self.prompt_pass(session, &batch) {
            Ok(last) => last.unzip(),
            Err(error) => {
                self.free_features.extend(parked);
                return Err(error);
            }
        };
        session.tokens.extend(session.waiting.drain(..n));
        if let Some(drafting) = session.drafting.as_mut() {
            match drafting.drafter.as_mut() {
                Some(drafter) if parked.is_empty() => {
                    self.device.run(Pass::Inject, &batch, None)?;
                    drafter.injected = session.tokens.len();
                }
                Some(drafter) => drafter.parked.extend(parked),
                None => {}
            }
            drafting.prompt.0 += n;
            drafting.prompt.1 += start.elapsed().as_secs_f64();
            if let Some(chance) = chance {
                let (rows, seconds) = std::mem::take(&mut drafting.prompt);
                self.costs.prompt(rows, seconds, self.context_share);
                drafting.pace.begin(seconds, chance);
            }
        }
        if let Some(sampled) = sampled {
            let sampled = sampled?;
            session.waiting.push_back(sampled.token);
            if let Flow::Force(tokens) = sink(&sampled) {
                session.forced.extend(tokens);
            }
        }
        Ok(if last { 0 } else { session.waiting.len() })
    }

    /// Computes rows of a prompt. After its last one: what was sampled, and the target's chance of the likeliest token.
    #[allow(clippy::type_complexity)]
    fn prompt_pass(
        &mut self,
        session: &mut Session,
        batch: &[Row],
    ) -> Result<Option<(Result<Sampled, EngineError>, f64)>, EngineError> {
        self.device.run(Pass::Target, batch, None)?;
        session.high = session.high.max(session.tokens.len() + batch.len());
        if batch.last().is_none_or(|row| !row.logits) {
            return Ok(None);
        }
        session.prepare_mask();
        // Logits are those of the last pass: sampled before the next one.
        let chance = if session.drafter().is_some() { likeliest(self.device.logits(0)?) } else { 0.0 };
        Ok(Some((session.choose(self.device.as_mut(), 0), chance)))
    }

    /// Drops what stands after the first `len` tokens, waiting ones too. False if a ring no longer holds what a row at
    /// `len` would see; the session is then unchanged.
    pub fn rewind(&mut self, session: &mut Session, len: usize) -> bool {
        if len > session.tokens.len() || !self.can_rewind(session, len) {
            return false;
        }
        session.tokens.truncate(len);
        if len == 0 {
            (session.high, session.floor) = (0, 0);
        }
        session.waiting.clear();
        session.forced.clear();
        session.sampler.set_history(&session.tokens);
        session.forget(len, &mut self.free_features);
        true
    }

    /// Whether [`Engine::rewind`] to `len` would succeed: a ring of window + max_rows rows still holds every position that a row at `len` sees.
    pub fn can_rewind(&self, session: &Session, len: usize) -> bool {
        self.can_rewind_after(session, len, 0)
    }

    /// Whether [`Engine::rewind`] to `len` would still succeed once `rows` more rows were computed.
    pub fn can_rewind_after(&self, session: &Session, len: usize, rows: usize) -> bool {
        let room = self.info.max_rows;
        let high = session.high.max(session.tokens.len() + rows);
        let kept = |window: usize| high <= window + room || len + room >= high;
        len == 0
            || (len >= session.floor && self.model.plans.caches.iter().filter_map(|c| c.window).all(kept))
    }

    /// Bytes of the keys and values of `len` positions, as [`Engine::save_prefix`] would write them in f16.
    pub fn state_bytes(&self, len: usize) -> usize {
        let rows = |window: Option<usize>| window.map_or(len, |w| w.min(len));
        self.model.plans.caches.iter().map(|c| rows(c.window) * c.kv_heads * c.head_dim * 2 * 2).sum()
    }

    /// Logits of every position of `tokens` on a fresh sequence, computed `chunk` rows at a time.
    pub fn logits(
        &mut self,
        tokens: &[u32],
        chunk: usize,
        sink: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), EngineError> {
        let seq = self.device.open(tokens.len().max(1))?;
        let result = self.logits_on(seq, tokens, chunk.clamp(1, self.info.max_rows), sink);
        self.device.close(seq);
        result
    }

    fn logits_on(
        &mut self,
        seq: crate::SeqId,
        tokens: &[u32],
        chunk: usize,
        sink: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), EngineError> {
        for (c, part) in tokens.chunks(chunk).enumerate() {
            let first = c * chunk;
            let row = |(i, t): (usize, &u32)| Row::new(seq, (first + i) as u32, *t).with_logits();
            self.device.run(Pass::Target, &part.iter().enumerate().map(row).collect::<Vec<_>>(), None)?;
            for i in 0..part.len() {
                sink(first + i, self.device.logits(i)?);
            }
        }
        Ok(())
    }

    /// Feature rows for the next `n` rows of a prompt, which the drafter is given with the first draft; of what was kept
    /// before, the oldest rows make room. None where other sessions keep too much: the drafter is then given the rows at once.
    fn park(&mut self, session: &mut Session, n: usize) -> Result<Vec<u32>, EngineError> {
        let Some(drafter) = session.drafter() else { return Ok(vec![]) };
        let (free, mine) = (self.free_features.len(), drafter.parked.len());
        if n > free + mine {
            self.inject(session, mine)?;
            return Ok(vec![]);
        }
        self.inject(session, n.saturating_sub(free))?;
        Ok(self.free_features.split_off(self.free_features.len() - n))
    }

    /// Gives the drafter all that a session has kept back.
    fn inject_parked(&mut self, session: &mut Session) -> Result<(), EngineError> {
        self.inject(session, session.owed())
    }

    /// Gives the drafter the oldest `n` of the rows that a session has kept back.
    fn inject(&mut self, session: &mut Session, n: usize) -> Result<(), EngineError> {
        let seq = session.seq;
        let Some(drafter) = session.drafter_mut().filter(|_| n > 0) else { return Ok(()) };
        let row = |(i, feature): (usize, &u32)| Row {
            feature: *feature,
            ..Row::new(seq, (drafter.injected + i) as u32, 0)
        };
        let rows: Vec<Row> = drafter.parked.iter().take(n).enumerate().map(row).collect();
        self.device.run(Pass::Inject, &rows, None)?;
        drafter.injected += rows.len();
        self.free_features.extend(drafter.parked.drain(..n));
        Ok(())
    }
}

/// The share of the likeliest token.
fn likeliest(logits: &[f32]) -> f64 {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    1.0 / f64::from(logits.iter().map(|x| (x - most).exp()).sum::<f32>())
}
