//! Operations between submission and claim: what keeps their tensors alive, and how they ended.

use crate::feedback::InUse;
use crate::tensor::Block;
use harmonaize_abi::{Completion, Status};
use std::sync::Arc;

/// The tensors of an operation, and its feedback.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    pub(crate) tensors: [Option<Arc<Block>>; 2],
    pub(crate) feedback: Option<InUse>,
}

#[derive(Debug)]
struct Slot {
    /// Upper half of the cookie, so that a cookie never comes back soon.
    generation: u32,
    state: State,
}

#[derive(Debug)]
enum State {
    Free,
    /// The agent may read and write the buffers.
    Submitted {
        buffers: Buffers,
        /// Nobody will claim the completion.
        abandoned: bool,
    },
    Done(Completion),
}

/// As many operations as a ring has entries. A slot is taken from submission until its completion is claimed, or has
/// arrived for an operation that was given up.
#[derive(Debug)]
pub(crate) struct InFlight {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

impl InFlight {
    pub(crate) fn new(entries: u32) -> Self {
        let slots = (0..entries).map(|_| Slot { generation: 0, state: State::Free }).collect();
        Self { slots, free: (0..entries).rev().collect() }
    }

    fn slot(&mut self, cookie: u64) -> Option<(u32, &mut Slot)> {
        let (index, generation) = (cookie as u32, (cookie >> 32) as u32);
        let slot = self.slots.get_mut(index as usize)?;
        (slot.generation == generation).then_some((index, slot))
    }

    /// A slot for an operation on these buffers; its cookie.
    pub(crate) fn start(&mut self, buffers: Buffers) -> Option<u64> {
        let index = self.free.pop()?;
        let slot = self.slots.get_mut(index as usize)?;
        slot.generation = slot.generation.wrapping_add(1);
        slot.state = State::Submitted { buffers, abandoned: false };
        Some(u64::from(slot.generation) << 32 | u64::from(index))
    }

    fn release(&mut self, cookie: u64) -> Option<State> {
        let (index, slot) = self.slot(cookie)?;
        let state = std::mem::replace(&mut slot.state, State::Free);
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(index);
        Some(state)
    }

    /// Forgets an operation that was never submitted.
    pub(crate) fn cancel(&mut self, cookie: u64) {
        drop(self.release(cookie));
    }

    /// Notes how an operation ended. `None`: no such operation is in flight. `Some` brings the buffers.
    pub(crate) fn complete(&mut self, completion: Completion) -> Option<Buffers> {
        let (_, slot) = self.slot(completion.cookie)?;
        match std::mem::replace(&mut slot.state, State::Done(completion)) {
            State::Submitted { buffers, abandoned } => {
                if abandoned {
                    self.release(completion.cookie);
                }
                if let Some(feedback) = &buffers.feedback
                    && completion.status == Status::Ok.code()
                {
                    feedback.commit();
                }
                Some(buffers)
            }
            other => {
                slot.state = other;
                None
            }
        }
    }

    /// How an operation ended, once; its slot is free then.
    pub(crate) fn claim(&mut self, cookie: u64) -> Option<Completion> {
        let (_, slot) = self.slot(cookie)?;
        let State::Done(completion) = slot.state else { return None };
        self.release(cookie);
        Some(completion)
    }

    /// Nobody will claim this operation. Its buffers stay until it has ended.
    pub(crate) fn abandon(&mut self, cookie: u64) {
        match self.slot(cookie) {
            Some((_, Slot { state: State::Submitted { abandoned, .. }, .. })) => *abandoned = true,
            Some((_, Slot { state: State::Done(_), .. })) => drop(self.release(cookie)),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cookie_ends_once() {
        let mut table = InFlight::new(2);
        let (first, second) =
            (table.start(Buffers::default()).unwrap(), table.start(Buffers::default()).unwrap());
        assert!(table.start(Buffers::default()).is_none());
        let ended = |cookie| Completion { cookie, ..Default::default() };
        assert_eq!(table.claim(first), None);
        assert!(table.complete(ended(first)).is_some());
        assert!(table.complete(ended(first)).is_none());
        assert_eq!(table.claim(first).unwrap().cookie, first);
        assert_eq!(table.claim(first), None);
        let third = table.start(Buffers::default()).unwrap();
        assert_ne!(third, first);
        table.abandon(second);
        assert!(table.start(Buffers::default()).is_none());
        assert!(table.complete(ended(second)).is_some());
        assert!(table.complete(ended(second)).is_none());
        assert!(table.start(Buffers::default()).is_some());
        assert!(table.complete(ended(u64::MAX)).is_none());
        assert!(table.complete(ended(0)).is_none());
    }
}
