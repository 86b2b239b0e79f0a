//! One decode step of a group: drafts where they pay, one target pass for all rows, acceptance, injection.

use super::{Engine, EngineError};
use crate::accept::verify;
use crate::adapt::{Block, Outcome, Seat, Source, blocks, settle};
use crate::device::Row;
use crate::plan::Pass;
use crate::sample::Sampled;
use crate::session::{Flow, Session};
use std::time::Instant;

/// Rows that a lookup proposes at most: beyond, a row costs as much as a plain step on most machines.
const LOOKUP_ROWS: usize = 31;

/// A session in a step, with the receiver of its tokens.
pub struct Active<'a> {
    /// The session; exactly one token waits in it.
    pub session: &'a mut Session,
    /// Called for each new token, in order.
    pub sink: &'a mut dyn FnMut(&Sampled) -> Flow,
}

/// What one session gained in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepStats {
    /// Whence its drafts came.
    pub source: Source,
    /// Rows that were proposed.
    pub drafted: usize,
    /// Proposed rows that the target confirmed.
    pub accepted: usize,
    /// Tokens handed to the sink.
    pub tokens: usize,
    /// The sink asked to stop.
    pub stopped: bool,
}

/// What was proposed.
struct Drafts {
    /// Tokens of each session; none where it did not draft.
    tokens: Vec<Vec<u32>>,
    blocks: Vec<Block>,
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
        self.make_room(group, &drafts.blocks)?;
        let (rows, starts) = self.verification_rows(group, &drafts);

        let start = Instant::now();
        self.device.run(Pass::Target, &rows, None).inspect_err(|_| self.give_back(&rows))?;
        // A card only begins here, and has finished where its logits are asked for.
        group.iter_mut().for_each(|active| active.session.prepare_mask());
        let greedy = group.iter().all(|a| a.session.plain_greedy());
        // Either way the device has finished when the time is taken.
        let mut best = vec![];
        if greedy {
            best = self.device.best()?;
        } else {
            // A card searches all rows as soon as they are there.
            if let Some(k) = group.iter().find_map(|active| active.session.looks_at()) {
                self.device.largest(0, k, None)?;
            }
            self.device.finish()?;
        }
        self.costs.target(rows.len(), start.elapsed().as_secs_f64());

        let mut all = vec![];
        let mut inject = vec![];
        let mut failed = None;
        let proposed = drafts.tokens.iter().zip(&drafts.blocks);
        for ((active, (draft, block)), first) in group.iter_mut().zip(proposed).zip(starts) {
            let best = if greedy { &best[first..first + draft.len() + 1] } else { &[][..] };
            active.session.high = active.session.high.max(active.session.tokens.len() + draft.len() + 1);
            let len = active.session.tokens.len();
            let stats = match self.accept(active, draft, block.source, first, best) {
                Ok(stats) => stats,
                Err(error) => {
                    // As if its rows and those of the sessions after it had not been computed.
                    active.session.tokens.truncate(len);
                    active.session.forget(len, &mut self.free_features);
                    self.give_back(&rows[first..]);
                    failed = Some(error);
                    break;
                }
            };
            let (kept, rejected) = rows[first..=first + draft.len()].split_at(1 + stats.accepted);
            self.keep_features(active.session, kept, &mut inject);
            self.give_back(rejected);
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
        for (((active, stats), block), owed) in group.iter_mut().zip(&all).zip(drafts.blocks).zip(drafts.owed)
        {
            let pace = active.session.drafting.as_mut().map(|d| &mut d.pace);
            outcomes.push(Outcome { pace, block, accepted: stats.accepted, owed });
        }
        settle(&self.costs, begin.elapsed().as_secs_f64(), outcomes);
        Ok(all)
    }

    /// Proposes tokens where that pays and there is room, running the drafter if it is asked for any.
    fn draft(&mut self, group: &mut [Active<'_>]) -> Result<Drafts, EngineError> {
        let (blocks, mut tokens) = self.choose_blocks(group);
        let mut owed = vec![0; group.len()];
        let asks = |block: &Block| block.source == Source::Drafter && block.rows > 0;
        let Some(spec) = self.model.plans.draft.as_ref().map(|d| &d.spec).filter(|_| blocks.iter().any(asks))
        else {
            return Ok(Drafts { tokens, blocks, rows: 0, owed, seconds: 0.0 });
        };
        let mask = spec.mask_token;
        let start = Instant::now();
        let mut rows = vec![];
        for (i, active) in group.iter_mut().enumerate().filter(|(i, _)| asks(&blocks[*i])) {
            owed[i] = active.session.owed();
            self.inject_parked(active.session)?;
            let s = &active.session;
            let anchor = s.tokens.len();
            rows.push(Row::new(s.seq, anchor as u32, s.waiting[0]));
            // The masks' keys stand in the drafter's ring until real features replace them.
            let masks = 1..=blocks[i].rows;
            rows.extend(masks.map(|i| Row::new(s.seq, (anchor + i) as u32, mask).with_logits()));
        }
        self.device.run(Pass::Draft, &rows, None)?;
        let mut best = self.device.best()?.into_iter();
        let seconds = start.elapsed().as_secs_f64();
        for (tokens, block) in tokens.iter_mut().zip(&blocks).filter(|(_, block)| asks(block)) {
            tokens.extend(best.by_ref().take(block.rows));
        }
        Ok(Drafts { tokens, blocks, rows: rows.len(), owed, seconds })
    }

    /// Where fewer feature rows are free than the group may keep, the session that keeps most gives its to the drafter.
    fn make_room(&mut self, group: &mut [Active<'_>], blocks: &[Block]) -> Result<(), EngineError> {
        let kept: usize = blocks.iter().map(rows_to_keep).sum();
        if self.free_features.len() >= kept {
            return Ok(());
        }
        let most = group.iter_mut().max_by_key(|active| active.session.owed());
        most.map_or(Ok(()), |most| self.inject_parked(most.session))
    }

    /// What each session drafts, and what a lookup proposes of it.
    fn choose_blocks(&self, group: &mut [Active<'_>]) -> (Vec<Block>, Vec<Vec<u32>>) {
        let share = (self.info.step_rows / group.len().max(1)).saturating_sub(1);
        let block = self.model.plans.draft.as_ref().map_or(0, |draft| draft.spec.block - 1);
        let mut blocks_of = vec![Block::PLAIN; group.len()];
        let mut tokens = vec![vec![]; group.len()];
        let (mut seats, mut which) = (vec![], vec![]);
        for (i, active) in group.iter_mut().enumerate() {
            let session = &mut *active.session;
            // A block brings a token more than it drafts.
            let wanted = session.wanted.saturating_sub(1);
            let room = (session.context - session.tokens.len() - 1).min(share).min(wanted);
            let most = session.drafting.as_ref().map_or(0, |drafting| drafting.most.min(room));
            let found = if most > 0 { session.look_up() } else { None };
            let owed = session.owed();
            if let Some(drafting) = session.drafting.as_mut() {
                let matched = found.map(|found| (found.length, most.min(LOOKUP_ROWS)));
                seats.push(Seat { pace: &mut drafting.pace, room: most.min(block), matched, owed });
                which.push((i, found, &drafting.lookup));
            }
        }
        for ((i, found, lookup), block) in which.into_iter().zip(blocks(&self.costs, &mut seats)) {
            blocks_of[i] = block;
            if let Some(found) = found.filter(|_| block.source == Source::Lookup) {
                tokens[i] = lookup.follow(found.next, block.rows);
            }
        }
        (blocks_of, tokens)
    }

    /// Rows of the target pass, and where each session's rows begin.
    fn verification_rows(&mut self, group: &mut [Active<'_>], drafts: &Drafts) -> (Vec<Row>, Vec<usize>) {
        let mut rows: Vec<Row> = vec![];
        let mut starts = vec![];
        for ((active, draft), block) in group.iter_mut().zip(&drafts.tokens).zip(&drafts.blocks) {
            let start = rows.len();
            starts.push(start);
            let s = &active.session;
            for (i, token) in s.waiting.iter().chain(draft).enumerate() {
                let feature = rows.len() as u32;
                rows.push(Row {
                    feature,
                    ..Row::new(s.seq, (s.tokens.len() + i) as u32, *token).with_logits()
                });
            }
            // What the drafter has not proposed keeps its features until it does.
            let (kept, free) = (rows_to_keep(block), self.free_features.len());
            if s.drafter().is_some() && (1..=free).contains(&kept) {
                let features = self.free_features.split_off(free - kept);
                rows[start..].iter_mut().zip(features).for_each(|(row, feature)| row.feature = feature);
            }
        }
        (rows, starts)
    }

    /// Chooses tokens while they equal the drafted ones, and moves the session past them.
    fn accept(
        &mut self,
        active: &mut Active<'_>,
        draft: &[u32],
        source: Source,
        first: usize,
        best: &[u32],
    ) -> Result<StepStats, EngineError> {
        let session = &mut *active.session;
        let mut stats = StepStats { source, drafted: draft.len(), accepted: 0, tokens: 0, stopped: false };
        let waiting = session.waiting.pop_front();
        session.tokens.extend(waiting);
        let verified = verify(draft, |i| {
            // Forced tokens may have been asked for since the device chose.
            let sampled = match best.get(i).filter(|_| session.plain_greedy()) {
                Some(token) => session.take(Sampled::greedy(*token))?,
                None => session.choose(self.device.as_mut(), first + i)?,
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
        let (seq, len) = (session.seq, session.tokens.len());
        let Some(drafter) = session.drafter_mut() else { return };
        if rows.iter().all(|row| row.feature as usize >= self.info.max_rows) {
            drafter.parked.extend(rows.iter().map(|row| row.feature));
            return;
        }
        let first = drafter.injected as u32;
        let parked = drafter.parked.iter().enumerate();
        inject.extend(parked.map(|(i, f)| Row { feature: *f, ..Row::new(seq, first + i as u32, 0) }));
        inject.extend(rows);
        self.free_features.append(&mut drafter.parked);
        drafter.injected = len;
    }
}

/// Rows of a block, the waiting token's with them, whose features wait for the next draft.
fn rows_to_keep(block: &Block) -> usize {
    match block.source {
        Source::Drafter if block.rows > 0 => 0,
        _ => 1 + block.rows,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::DraftMode;
    use crate::geometry::KvType;
    use crate::oracle::Reference;
    use crate::sample::SamplerOptions;
    use std::path::PathBuf;
    use std::sync::Arc;

    /// Whatever was drafted, confirmed and rejected, feature rows are kept for tokens that the drafter has not been given, and no
    /// others.
    #[test]
    fn no_feature_row_is_lost() {
        let fixture = |name: &str| {
            PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures")).join(name)
        };
        let (target, drafter) = (fixture("gguf/tiny-Q8_0.gguf"), fixture("dflash/tiny-dflash-Q8_0.gguf"));
        let model = Arc::new(crate::model::open(&target, Some(&drafter)).unwrap().0);
        let device = Box::new(Reference::new(model.clone(), KvType::F16, 64));
        let mut engine = Engine::new(device, model, DraftMode::Mixed(3));
        let mut sessions: Vec<Session> =
            (0..2).map(|_| engine.session(0, SamplerOptions::greedy()).unwrap()).collect();
        let mut looked_up = (0, 0);
        for (session, period) in sessions.iter_mut().zip([5, 9]) {
            session.push(&(0..30).map(|i| i % period).collect::<Vec<u32>>());
            while engine.prefill(session, 64, &mut |_| Flow::Continue).unwrap() > 0 {}
        }
        for _ in 0..30 {
            let mut sinks = [(); 2].map(|()| |_: &Sampled| Flow::Continue);
            let members = sessions.iter_mut().zip(&mut sinks);
            let mut group: Vec<Active<'_>> =
                members.map(|(session, sink)| Active { session, sink }).collect();
            for stats in
                engine.step(&mut group).unwrap().iter().filter(|stats| stats.source == Source::Lookup)
            {
                looked_up = (looked_up.0 + stats.drafted, looked_up.1 + stats.accepted);
            }
            let kept: usize = sessions.iter().map(Session::owed).sum();
            assert_eq!(kept + engine.free_features.len(), 64);
            for session in &sessions {
                let drafter = session.drafter().unwrap();
                assert_eq!(drafter.injected + drafter.parked.len(), session.tokens.len());
            }
        }
        assert!(looked_up.0 > looked_up.1, "{looked_up:?}");
        sessions.into_iter().for_each(|session| engine.close(session));
        engine.free_features.sort_unstable();
        assert_eq!(engine.free_features, (64..128).collect::<Vec<u32>>());
    }
}
