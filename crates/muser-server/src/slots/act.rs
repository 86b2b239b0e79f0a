//! What may be done with an idle slot's session from outside: save it, restore one, erase it.

use super::{Message, Scheduler, Slots};
use crate::saved::SavedSession;
use muser_core::engine::EngineError;
use thiserror::Error;
use tokio::sync::oneshot::channel;

/// Why nothing was done.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum SlotFault {
    #[error("there is no slot {0}")]
    Unknown(usize),
    #[error("slot {0} runs a request; try again once it is idle")]
    Busy(usize),
    #[error("slot {0} is empty, there is nothing to save")]
    Empty(usize),
    /// The state does not fit.
    #[error("{0}")]
    Refused(String),
    #[error("the server is shutting down")]
    Closing,
}

impl From<EngineError> for SlotFault {
    fn from(error: EngineError) -> Self {
        SlotFault::Refused(error.to_string())
    }
}

impl Slots {
    /// Gives out what an idle slot holds.
    pub async fn save(&self, slot: usize) -> Result<SavedSession, SlotFault> {
        self.act(move |scheduler| scheduler.save(slot)).await
    }

    /// Puts a session into an idle slot; how many tokens it has. On an error everything is as it was.
    pub async fn restore(&self, slot: usize, saved: SavedSession) -> Result<usize, SlotFault> {
        self.act(move |scheduler| scheduler.restore(slot, &saved)).await
    }

    /// Empties an idle slot; how many tokens were in it.
    pub async fn erase(&self, slot: usize) -> Result<usize, SlotFault> {
        self.act(move |scheduler| scheduler.erase(slot)).await
    }

    /// Runs something on the engine's thread, between two steps.
    async fn act<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Scheduler) -> Result<T, SlotFault> + Send + 'static,
    ) -> Result<T, SlotFault> {
        let (reply, done) = channel();
        let act = move |scheduler: &mut Scheduler| {
            let result = act(scheduler);
            scheduler.publish();
            // Who no longer waits for the answer has left.
            let _ = reply.send(result);
        };
        self.sender.send(Message::Act(Box::new(act))).map_err(|_| SlotFault::Closing)?;
        done.await.unwrap_or(Err(SlotFault::Closing))
    }
}

impl Scheduler {
    fn idle(&self, slot: usize) -> Result<(), SlotFault> {
        match self.slots.get(slot) {
            None => Err(SlotFault::Unknown(slot)),
            Some(s) if s.running.is_some() => Err(SlotFault::Busy(slot)),
            Some(_) => Ok(()),
        }
    }

    fn save(&mut self, slot: usize) -> Result<SavedSession, SlotFault> {
        self.idle(slot)?;
        let session = self.slots[slot].session.as_mut().filter(|s| !s.tokens().is_empty());
        let session = session.ok_or(SlotFault::Empty(slot))?;
        let tokens = session.tokens().to_vec();
        let state = self.engine.save_prefix(session, tokens.len())?;
        Ok(SavedSession { tokens, state })
    }

    fn restore(&mut self, slot: usize, saved: &SavedSession) -> Result<usize, SlotFault> {
        self.idle(slot)?;
        // What is in the slot stays until the new session has proved good.
        let mut session = self.fresh()?;
        let restored = match self.engine.restore(&mut session, &saved.state) {
            Ok(()) if session.tokens() == saved.tokens => Ok(()),
            Ok(()) => Err(SlotFault::Refused("saved session: its state is of other tokens".into())),
            Err(error) => Err(error.into()),
        };
        if let Err(fault) = restored {
            self.engine.close(session);
            return Err(fault);
        }
        self.clear(slot);
        self.clock += 1;
        self.slots[slot].used = self.clock;
        self.slots[slot].session = Some(session);
        Ok(saved.tokens.len())
    }

    fn erase(&mut self, slot: usize) -> Result<usize, SlotFault> {
        self.idle(slot)?;
        self.slots[slot].marks.clear();
        let Some(session) = self.slots[slot].session.take() else { return Ok(0) };
        let tokens = session.tokens().len();
        self.engine.close(session);
        Ok(tokens)
    }
}
