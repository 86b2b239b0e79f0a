//! One turn's computing: a chunk of a prompt, a step of the group, checkpoints before a ring forgets.

use super::{Running, Scheduler, Slot};
use muser_core::Source;
use muser_core::engine::{Active, EngineError, StepStats};
use muser_core::sample::Sampled;
use muser_core::session::{Flow, Session};
use std::time::Instant;

impl Scheduler {
    /// Computes one chunk of one prompt; prompts take turns.
    pub(super) fn prefill(&mut self) {
        let is = |slot: &Slot, prefilling| slot.running.as_ref().is_some_and(|r| r.prefilling == prefilling);
        let decoding = self.slots.iter().any(|s| is(s, false));
        let rows = if decoding { self.options.busy_chunk } else { self.options.idle_chunk };
        let n = self.slots.len();
        let next = (0..n).map(|i| (self.next_prefill + i) % n).find(|i| is(&self.slots[*i], true));
        let Some(index) = next else { return };
        self.next_prefill = index + 1;
        self.checkpoint(index, rows);
        let slot = &mut self.slots[index];
        let (Some(session), Some(running)) = (slot.session.as_mut(), slot.running.as_mut()) else { return };
        let before = session.tokens().len();
        let start = Instant::now();
        let result = self.engine.prefill(session, rows, &mut |sampled| running.take(sampled));
        self.metrics.prefilled(session.tokens().len() - before, start.elapsed());
        match result {
            Ok(left) => running.prefilling = left > 0,
            Err(error) => running.end = Some(error.into()),
        }
    }

    /// One step of all sessions that decode.
    pub(super) fn step(&mut self) {
        let going = |slot: &Slot| slot.running.as_ref().is_some_and(|r| !r.prefilling && r.end.is_none());
        let decoding: Vec<usize> = (0..self.slots.len()).filter(|i| going(&self.slots[*i])).collect();
        if decoding.is_empty() {
            return;
        }
        let rows = self.engine.info().max_rows;
        decoding.iter().for_each(|i| self.checkpoint(*i, rows));
        let start = Instant::now();
        let Err(error) = self.step_group(&decoding) else {
            self.metrics.stepped(decoding.len(), start.elapsed());
            return;
        };
        // The group's error does not say whose it is: whoever fails alone has failed.
        let alone = decoding.len() == 1;
        let mut error = Some(error);
        for index in &decoding {
            let result = if alone { error.take().map_or(Ok(()), Err) } else { self.step_alone(*index) };
            if let (Err(error), Some(running)) = (result, self.slots[*index].running.as_mut()) {
                running.end = Some(error.into());
            }
        }
    }

    fn step_alone(&mut self, index: usize) -> Result<(), EngineError> {
        if self.slots[index].running.as_ref().is_none_or(|r| r.end.is_some()) {
            return Ok(());
        }
        self.step_group(&[index])
    }

    fn step_group(&mut self, members: &[usize]) -> Result<(), EngineError> {
        type Receiver<'a> = Box<dyn FnMut(&Sampled) -> Flow + 'a>;
        let mut reports = vec![];
        let mut parts: Vec<(&mut Session, Receiver<'_>)> = vec![];
        for (index, slot) in self.slots.iter_mut().enumerate() {
            let Slot { session: Some(session), running: Some(running), .. } = slot else { continue };
            if members.contains(&index) {
                let Running { report, .. } = running;
                reports.push(*report);
                parts.push((session, Box::new(|sampled| running.take(sampled))));
            }
        }
        let mut group: Vec<Active<'_>> =
            parts.iter_mut().map(|(session, sink)| Active { session, sink: sink.as_mut() }).collect();
        let stats = self.engine.step(&mut group)?;
        drop(group);
        drop(parts);
        self.count(members, &stats);
        Ok(())
    }

    fn count(&mut self, members: &[usize], stats: &[StepStats]) {
        for (index, stats) in members.iter().zip(stats) {
            self.metrics.drafted.add(stats.drafted as u64);
            self.metrics.accepted.add(stats.accepted as u64);
            let (looked_up, looked_up_accepted) = match stats.source {
                Source::Lookup => (stats.drafted, stats.accepted),
                Source::Drafter => (0, 0),
            };
            self.metrics.looked_up.add(looked_up as u64);
            self.metrics.looked_up_accepted.add(looked_up_accepted as u64);
            if let Some(running) = self.slots[*index].running.as_mut() {
                running.report.drafted += stats.drafted;
                running.report.accepted += stats.accepted;
                running.report.looked_up += looked_up;
                running.report.looked_up_accepted += looked_up_accepted;
            }
        }
    }

    /// Saves the session's state at a mark that `rows` more rows would make unreachable.
    fn checkpoint(&mut self, index: usize, rows: usize) {
        let slot = &mut self.slots[index];
        let (Some(session), Some(running)) = (slot.session.as_mut(), slot.running.as_mut()) else { return };
        let len = session.tokens().len();
        let lost = |mark: &usize| *mark <= len && !self.engine.can_rewind_after(session, *mark, rows);
        let due: Vec<usize> = running.work.marks.iter().copied().filter(lost).collect();
        running.work.marks.retain(|mark| !due.contains(mark));
        for mark in due {
            self.save_prefix(index, mark);
        }
    }

    /// Puts the first `len` tokens of a slot's session into the host tier, if they are still reachable and worth it.
    pub(super) fn save_prefix(&mut self, index: usize, len: usize) {
        let Some(session) = self.slots[index].session.as_mut() else { return };
        let worth = len >= super::admit::MIN_REUSE && self.host.fits(self.engine.state_bytes(len));
        if !worth || !self.engine.can_rewind(session, len) || self.host.holds(&session.tokens()[..len]) {
            return;
        }
        match self.engine.save_prefix(session, len) {
            Ok(state) => self.host.insert(session.tokens()[..len].to_vec(), state),
            Err(error) => tracing::warn!(%error, "a session could not be saved to host memory"),
        }
    }
}
