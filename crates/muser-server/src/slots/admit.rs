//! Who runs next, in which slot, and what of its prompt is already computed.

use super::host::common;
use super::{Queued, Report, Running, Scheduler};
use muser_core::engine::EngineError;
use muser_core::session::Session;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Shorter common prefixes are not worth a copy or a wait.
pub const MIN_REUSE: usize = 32;

/// Where the beginning of a prompt can be had.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Source {
    Nothing,
    /// A slot, busy or idle, whose session begins like the prompt.
    Slot(usize),
    /// A saved session.
    Host(usize),
}

impl Scheduler {
    /// Starts waiting requests while there are free slots.
    pub(super) fn admit(&mut self) {
        while self.slots.iter().any(|s| s.running.is_none()) {
            let Some(next) = self.next() else { return };
            let Queued { work, since } = self.queue.remove(next);
            self.waiting.fetch_sub(1, Ordering::AcqRel);
            let report = Report {
                prompt: work.prompt.len(),
                queue_seconds: since.elapsed().as_secs_f64(),
                ..Report::default()
            };
            let admitted = Instant::now();
            let mut running = Running {
                work: *work,
                generated: 0,
                end: None,
                report,
                admitted,
                first_token: None,
                prefilling: true,
            };
            match self.place(&mut running) {
                Ok(index) => self.slots[index].running = Some(running),
                Err(error) => running.finish(error.into(), &self.metrics),
            }
        }
    }

    /// The waiting request whose client has fewest running ones, the oldest among equals. One whose prefix is being
    /// computed right now waits for it.
    fn next(&self) -> Option<usize> {
        let running = |client: u64| {
            self.slots.iter().filter_map(|s| s.running.as_ref()).filter(|r| r.work.client == client).count()
        };
        let ready = (0..self.queue.len()).filter(|i| !self.prefix_is_coming(*i));
        ready.min_by_key(|i| running(self.queue[*i].work.client))
    }

    fn prefix_is_coming(&self, queued: usize) -> bool {
        let work = &self.queue[queued].work;
        if !work.reuse {
            return false;
        }
        let have = self.source(&work.prompt).1;
        self.slots.iter().any(|slot| {
            let Some(running) = slot.running.as_ref().filter(|r| r.prefilling) else { return false };
            let shared = common(&running.work.prompt, &work.prompt).min(work.prompt.len() - 1);
            let done = slot.session.as_ref().map_or(0, |s| s.tokens().len());
            shared >= have + MIN_REUSE && done < shared
        })
    }

    /// The best source of a prompt's beginning and its length.
    fn source(&self, prompt: &[u32]) -> (Source, usize) {
        let most = prompt.len().saturating_sub(1);
        let mut best = (Source::Nothing, MIN_REUSE - 1);
        for (index, slot) in self.slots.iter().enumerate() {
            let Some(session) = slot.session.as_ref() else { continue };
            let len = common(session.tokens(), prompt).min(most);
            // Among equals an idle slot, which needs no copy.
            let better = len > best.1 || len == best.1 && slot.running.is_none();
            if better && self.engine.can_rewind(session, len) {
                best = (Source::Slot(index), len);
            }
        }
        match self.host.find(prompt) {
            Some((entry, len)) if len > best.1 => (Source::Host(entry), len),
            _ if best.0 == Source::Nothing => (Source::Nothing, 0),
            _ => best,
        }
    }

    /// Makes a session for the request, with as much of its prompt as is known, and puts it in a slot.
    fn place(&mut self, running: &mut Running) -> Result<usize, EngineError> {
        let prompt = &running.work.prompt;
        let (source, mut cached) =
            if running.work.reuse { self.source(prompt) } else { (Source::Nothing, 0) };
        let target = match source {
            Source::Slot(index) if self.may_continue(index, cached) => index,
            _ => self.free_slot(source),
        };
        let session = match source {
            Source::Slot(index) if index == target => None,
            Source::Slot(index) => {
                self.clear(target);
                let from = self.slots[index].session.as_mut();
                from.map(|from| self.engine.fork(from, cached)).transpose()?
            }
            Source::Host(entry) => {
                self.clear(target);
                let mut session = self.fresh()?;
                let state = self.host.state(entry).unwrap_or_default();
                if let Err(error) = self.engine.restore(&mut session, state) {
                    tracing::warn!(%error, "a saved session could not be restored");
                    self.engine.close(session);
                    session = self.fresh()?;
                    cached = 0;
                }
                Some(session)
            }
            Source::Nothing => {
                self.clear(target);
                Some(self.fresh()?)
            }
        };
        let slot = &mut self.slots[target];
        slot.session = session.or(slot.session.take());
        let Some(session) = slot.session.as_mut() else {
            return Err(EngineError::Misuse("the slot has no session"));
        };
        if !self.engine.rewind(session, cached) {
            cached = 0;
            self.engine.rewind(session, 0);
        }
        session.sampler().set_options(running.work.options.clone())?;
        session.constrain(running.work.constraint.take());
        session.draft_at_most(running.work.draft_rows);
        session.want_at_most(running.work.max_tokens);
        session.push(&prompt[cached..]);
        running.report.cached = cached;
        running.work.sink.started(cached);
        self.metrics.admitted(prompt.len(), cached, source != Source::Nothing);
        Ok(target)
    }

    pub(super) fn fresh(&mut self) -> Result<Session, EngineError> {
        self.engine.session(self.options.context, Default::default())
    }

    /// Whether a request may go on in an idle slot itself. What stands there after the common prefix is lost, so a long
    /// tail is kept if another slot is empty.
    fn may_continue(&self, index: usize, cached: usize) -> bool {
        let slot = &self.slots[index];
        let tail = slot.session.as_ref().map_or(0, |s| s.tokens().len()) - cached;
        let empty = self.slots.iter().any(|s| s.session.is_none());
        slot.running.is_none() && (tail < cached.max(MIN_REUSE) || !empty)
    }

    /// An empty slot, or else the idle one that was used longest ago, but the source only as a last resort.
    fn free_slot(&self, source: Source) -> usize {
        let idle = (0..self.slots.len()).filter(|i| self.slots[*i].running.is_none());
        let key =
            |i: &usize| (source == Source::Slot(*i), self.slots[*i].session.is_some(), self.slots[*i].used);
        idle.min_by_key(key).unwrap_or(0)
    }

    /// Empties an idle slot; what it held goes to the host tier.
    pub(super) fn clear(&mut self, index: usize) {
        let Some(len) = self.slots[index].session.as_ref().map(|s| s.tokens().len()) else { return };
        for mark in std::mem::take(&mut self.slots[index].marks) {
            if mark <= len {
                self.save_prefix(index, mark);
            }
        }
        self.save_prefix(index, len);
        if let Some(session) = self.slots[index].session.take() {
            self.engine.close(session);
        }
    }
}
