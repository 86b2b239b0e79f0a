//! Saving, restoring and forking sessions.

use super::{Engine, EngineError};
use crate::session::Session;
use std::collections::VecDeque;

/// First bytes of a saved session, with the version of its layout.
const MAGIC: &[u8; 8] = b"muser\0s1";

impl Engine {
    /// The whole session as bytes: tokens, caches of target and drafter, sampler. A constraint is not saved.
    pub fn save(&mut self, session: &mut Session) -> Result<Vec<u8>, EngineError> {
        self.inject_parked(session)?;
        let state = self.device.save(session.seq, session.tokens.len())?;
        let waiting: Vec<u32> = session.waiting.iter().copied().collect();
        let forced: Vec<u32> = session.forced.iter().copied().collect();
        Ok(pack([&session.tokens, &waiting, &forced], &session.sampler.save(), &state))
    }

    /// The session as it was after its first `len` tokens, as bytes for [`Engine::restore`]; the session goes on.
    pub fn save_prefix(&mut self, session: &mut Session, len: usize) -> Result<Vec<u8>, EngineError> {
        if len > session.tokens.len() || !self.can_rewind(session, len) {
            return Err(EngineError::Misuse("the session no longer holds that prefix"));
        }
        self.inject_parked(session)?;
        let state = self.device.save(session.seq, len)?;
        let tokens = &session.tokens[..len];
        let mut sampler = session.sampler.clone();
        sampler.set_history(tokens);
        Ok(pack([tokens, &[], &[]], &sampler.save(), &state))
    }

    /// Restores what [`Engine::save`] gave into a session of the same model and device kind.
    pub fn restore(&mut self, session: &mut Session, state: &[u8]) -> Result<(), EngineError> {
        let bad = |why: &str| EngineError::BadState(format!("{why}; prefill the prompt again"));
        let mut rest =
            state.strip_prefix(MAGIC).ok_or_else(|| bad("it was not written by this version of muser"))?;
        let mut part = || {
            let (len, after) = rest.split_first_chunk::<8>()?;
            let len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
            let (part, after) = after.split_at_checked(len)?;
            rest = after;
            Some(part)
        };
        let mut parts = [&[][..]; 5];
        for p in &mut parts {
            *p = part().ok_or_else(|| bad("it is truncated"))?;
        }
        let vocab = self.model.geometry().vocab as u32;
        let ids = |bytes: &[u8]| -> Result<Vec<u32>, EngineError> {
            let ids: Vec<u32> =
                bytes.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect();
            if !bytes.len().is_multiple_of(4) || ids.iter().any(|id| *id >= vocab) {
                return Err(bad("its tokens are not this model's"));
            }
            Ok(ids)
        };
        let (tokens, waiting, forced) = (ids(parts[0])?, ids(parts[1])?, ids(parts[2])?);
        if tokens.len() + waiting.len() > session.context {
            return Err(EngineError::ContextFull {
                context: session.context,
                used: tokens.len(),
                wanted: waiting.len(),
            });
        }
        let mut sampler = session.sampler.clone();
        sampler.restore(parts[3])?;
        self.device.restore(session.seq, tokens.len(), parts[4])?;
        self.adopt(session, tokens);
        session.waiting = VecDeque::from(waiting);
        session.forced = VecDeque::from(forced);
        session.sampler = sampler;
        Ok(())
    }

    /// A new session whose first `len` tokens are those of `from`; nothing is computed again.
    pub fn fork(&mut self, from: &mut Session, len: usize) -> Result<Session, EngineError> {
        if len > from.tokens.len() || !self.can_rewind(from, len) {
            return Err(EngineError::Misuse("the session no longer holds that prefix"));
        }
        self.inject_parked(from)?;
        let seq = self.device.open(from.context)?;
        if let Err(error) = self.device.copy(from.seq, seq, len) {
            self.device.close(seq);
            return Err(error.into());
        }
        let mut session = Session {
            seq,
            context: from.context,
            tokens: vec![],
            waiting: VecDeque::new(),
            forced: VecDeque::new(),
            high: 0,
            floor: 0,
            sampler: from.sampler.clone(),
            constraint: None,
            drafting: from.drafting.is_some().then(|| self.drafting()).flatten(),
            wanted: usize::MAX,
        };
        self.adopt(&mut session, from.tokens[..len].to_vec());
        session.sampler.set_history(&session.tokens);
        Ok(session)
    }

    /// Makes a session's bookkeeping follow caches that hold exactly `tokens`.
    fn adopt(&mut self, session: &mut Session, tokens: Vec<u32>) {
        session.high = tokens.len();
        // The state holds what a row at its end can see, so a ring that has wrapped goes on from there only.
        let whole =
            self.model.plans.caches.iter().filter_map(|c| c.window).all(|window| tokens.len() <= window);
        session.floor = if whole { 0 } else { tokens.len() };
        session.forget(0, &mut self.free_features);
        if let Some(drafter) = session.drafter_mut() {
            drafter.injected = tokens.len();
        }
        session.tokens = tokens;
    }
}

/// The parts of a saved session, each with its length before it.
fn pack(ids: [&[u32]; 3], sampler: &[u8], state: &[u8]) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    let mut put = |part: &[u8]| {
        out.extend((part.len() as u64).to_le_bytes());
        out.extend(part);
    };
    for tokens in ids {
        put(&tokens.iter().flat_map(|token| token.to_le_bytes()).collect::<Vec<u8>>());
    }
    put(sampler);
    put(state);
    out
}
