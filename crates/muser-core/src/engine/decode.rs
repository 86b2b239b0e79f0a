//! One decode step of a group: drafts where they pay, one target pass for all rows, acceptance, injection.

use super::{Engine, EngineError};
use crate::accept::verify;
use crate::adapt::{Outcome, Seat, blocks, settle};
use crate::device::Row;
use crate::plan::Pass;
use crate::sample::Sampled;
use crate::session::{Flow, Session};
use std::time::Instant;

/// A session in a step, with the receiver of its tokens.
pub struct Active<'a> {
    /// The session; exactly one token waits in it.
    pub session: &'a mut Session,
    /// Called for each new token, in order.
    pub sink: &'a mut dyn FnMut(&Sampled) -> Flow,
}

/// What one session gained in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepStats {
    /// Rows that the drafter proposed.
    pub drafted: usize,
    /// Proposed rows that the target confirmed.
    pub accepted: usize,
    /// Tokens handed to the sink.
    pub tokens: usize,
    /// The sink asked to stop.
    pub stopped: bool,
}

/// What the drafter proposed.
struct Drafts {
    /// Tokens of each session; none where it did not draft.
    tokens: Vec<Vec<u32>>,
    /// Rows of the draft pass, and of context that it needed before; seconds of both.
    rows: usize,
    owed: Vec<usize>,
    seconds: f64,
}

impl Engine {
    /// Decodes at least one token for each session of the group, several where drafts are confirmed.
    pub fn step(&mut self, group: &mut [Active<'_>]) -> Result<Vec<StepStats>, EngineError> {
        for active in group.iter() {
            let s = &active.session;
            if s.waiting.len() != 1 {
                return Err(EngineError::Misuse(
                    "a session in a group has exactly one waiting token: prefill it first",
                ));
            }
            if s.tokens.len() >= s.context {
                return Err(EngineError::ContextFull { context: s.context, used: s.tokens.len(), wanted: 1 });
            }
        }
        let begin = Instant::now();
        let drafts = self.draft(group)?;
        self.make_room(group)?;
        let (rows, starts) = self.verification_rows(group, &drafts.tokens);

        let start = Instant::now();
        self.device.run(Pass::Target, &rows, None).inspect_err(|_| self.give_back(&rows))?;
        // A card only begins here, and has finished where its logits are asked for.
        group.iter_mut().for_each(|active| active.session.prepare_mask());
        let greedy = group.iter().all(|a| a.session.plain_greedy());
        // Either way the device has finished when the time is taken.
        let best = match greedy {
            true => self.device.best()?,
            false => self.device.logits(0).map(|_| vec![])?,
        };
        self.costs.target(rows.len(), start.elapsed().as_secs_f64());

        let mut all = vec![];
        let mut inject = vec![];
        let mut failed = None;
        for ((active, draft), first) in group.iter_mut().zip(&drafts.tokens).zip(starts) {
            let best = if greedy { &best[first..first + draft.len() + 1] } else { &[][..] };
            active.session.high = active.session.high.max(active.session.tokens.len() + draft.len() + 1);
            let len = active.session.tokens.len();
            let stats = match self.accept(active, draft, first, best) {
                Ok(stats) => stats,
                Err(error) => {
                    // As if its rows and those of the sessions after it had not been computed.
                    active.session.tokens.truncate(len);
                    self.give_back(&rows[first..]);
                    failed = Some(error);
                    break;
                }
            };
            self.keep_features(active.session, &rows[first..=first + stats.accepted], &mut inject);
            all.push(stats);
        }
        let start = Instant::now();
        for part in inject.chunks(self.info.max_rows) {
            self.device.run(Pass::Inject, part, None)?;
        }
        if let Some(error) = failed {
            return Err(error);
        }
        if drafts.rows > 0 {
            let seconds = drafts.seconds + start.elapsed().as_secs_f64();
            self.costs.draft(drafts.rows, seconds, drafts.owed.iter().sum());
        }
        let mut outcomes = vec![];
        for ((active, stats), owed) in group.iter_mut().zip(&all).zip(drafts.owed) {
            let pace = active.session.drafting.as_mut().map(|d| &mut d.pace);
            outcomes.push(Outcome { pace, drafted: stats.drafted, accepted: stats.accepted, owed });
        }
        settle(&self.costs, begin.elapsed().as_secs_f64(), outcomes);
        Ok(all)
    }

    /// Runs the drafter where drafting is on, not parked, and has room.
    fn draft(&mut self, group: &mut [Active<'_>]) -> Result<Drafts, EngineError> {
        let none = vec![0; group.len()];
        let nothing = Drafts { tokens: vec![vec![]; group.len()], rows: 0, owed: none.clone(), seconds: 0.0 };
        let Some(spec) = self.model.plans.draft.as_ref().map(|d| d.spec.clone()) else {
            return Ok(nothing);
        };
        let counts = self.block_lengths(group, spec.block - 1);
        if counts.iter().all(|count| *count == 0) {
            return Ok(nothing);
        }
        let start = Instant::now();
        let mut rows = vec![];
        let mut owed = none;
        for (i, (active, count)) in group.iter_mut().zip(&counts).enumerate().filter(|(_, (_, n))| **n > 0) {
            owed[i] = active.session.drafting.as_ref().map_or(0, |d| d.parked.len());
            self.inject_parked(active.session)?;
            let s = &active.session;
            let anchor = s.tokens.len();
            rows.push(Row::new(s.seq, anchor as u32, s.waiting[0]));
            // The masks' keys stand in the drafter's ring until real features replace them.
            rows.extend(
                (1..=*count).map(|i| Row::new(s.seq, (anchor + i) as u32, spec.mask_token).with_logits()),
            );
        }
        self.device.run(Pass::Draft, &rows, None)?;
        let mut best = self.device.best()?.into_iter();
        let seconds = start.elapsed().as_secs_f64();
        let tokens = counts.iter().map(|count| best.by_ref().take(*count).collect()).collect();
        Ok(Drafts { tokens, rows: rows.len(), owed, seconds })
    }

    /// Where fewer feature rows are free than the group may keep, the session that keeps most gives its to the drafter.
    fn make_room(&mut self, group: &mut [Active<'_>]) -> Result<(), EngineError> {
        let kept = |active: &&mut Active<'_>| active.session.drafting.as_ref().map_or(0, |d| d.parked.len());
        if self.free_features.len() >= group.len() {
            return Ok(());
        }
        group.iter_mut().max_by_key(kept).map_or(Ok(()), |most| self.inject_parked(most.session))
    }

    /// How many rows each session drafts, at most `most`.
    fn block_lengths(&self, group: &mut [Active<'_>], most: usize) -> Vec<usize> {
        let share = (self.info.step_rows / group.len().max(1)).saturating_sub(1);
        let mut counts = vec![0; group.len()];
        let mut seats = vec![];
        let mut which = vec![];
        for (i, active) in group.iter_mut().enumerate() {
            let session = &mut *active.session;
            let room = (session.context - session.tokens.len() - 1).min(share).min(most);
            if let Some(drafting) = session.drafting.as_mut() {
                let room = room.min(drafting.most);
                seats.push(Seat { pace: &mut drafting.pace, room, owed: drafting.parked.len() });
                which.push(i);
            }
        }
        for (i, count) in which.into_iter().zip(blocks(&self.costs, &mut seats)) {
            counts[i] = count;
        }
        counts
    }

    /// Rows of the target pass, and where each session's rows begin.
    fn verification_rows(&mut self, group: &mut [Active<'_>], drafts: &[Vec<u32>]) -> (Vec<Row>, Vec<usize>) {
        let mut rows: Vec<Row> = vec![];
        let mut starts = vec![];
        for (active, draft) in group.iter_mut().zip(drafts) {
            starts.push(rows.len());
            let s = &active.session;
            for (i, token) in s.waiting.iter().chain(draft).enumerate() {
                let feature = rows.len() as u32;
                rows.push(Row {
                    feature,
                    ..Row::new(s.seq, (s.tokens.len() + i) as u32, *token).with_logits()
                });
            }
            // A plain row keeps its features until the next draft.
            if draft.is_empty()
                && s.drafting.is_some()
                && let (Some(row), Some(feature)) = (rows.last_mut(), self.free_features.pop())
            {
                row.feature = feature;
            }
        }
        (rows, starts)
    }

    /// Chooses tokens while they equal the drafted ones, and moves the session past them.
    fn accept(
        &mut self,
        active: &mut Active<'_>,
        draft: &[u32],
        first: usize,
        best: &[u32],
    ) -> Result<StepStats, EngineError> {
        let session = &mut *active.session;
        let mut stats = StepStats { drafted: draft.len(), ..StepStats::default() };
        let waiting = session.waiting.pop_front();
        session.tokens.extend(waiting);
        let verified = verify(draft, |i| {
            // Forced tokens may have been asked for since the device chose.
            let sampled = match best.get(i).filter(|_| session.plain_greedy()) {
                Some(token) => session.take(Sampled::greedy(*token))?,
                None => session.choose(self.device.logits(first + i)?)?,
            };
            stats.tokens += 1;
            let flow = (active.sink)(&sampled);
            stats.stopped = flow == Flow::Stop;
            if let Flow::Force(tokens) = flow {
                session.forced.extend(tokens);
            }
            Ok::<_, EngineError>((sampled.token, stats.stopped))
        })?;
        session.tokens.extend(&draft[..verified.accepted]);
        session.waiting.push_back(verified.next);
        stats.accepted = verified.accepted;
        Ok(stats)
    }

    /// Frees the feature rows of a pass that came to nothing.
    fn give_back(&mut self, rows: &[Row]) {
        let kept = |feature: &u32| *feature as usize >= self.info.max_rows;
        self.free_features.extend(rows.iter().map(|row| row.feature).filter(kept));
    }

    /// Decides for a session's confirmed rows whether their features are injected now or wait.
    fn keep_features(&mut self, session: &mut Session, rows: &[Row], inject: &mut Vec<Row>) {
        let Some(drafting) = session.drafting.as_mut() else { return };
        match rows {
            [row] if row.feature as usize >= self.info.max_rows => drafting.parked.push(row.feature),
            _ => {
                let first = drafting.injected as u32;
                let parked = drafting.parked.iter().enumerate();
                inject.extend(
                    parked.map(|(i, f)| Row { feature: *f, ..Row::new(session.seq, first + i as u32, 0) }),
                );
                inject.extend(rows);
                self.free_features.append(&mut drafting.parked);
                drafting.injected = session.tokens.len();
            }
        }
    }
}
