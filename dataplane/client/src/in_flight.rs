//! Operations between submission and claim: what keeps their tensors alive, and how they ended.

use crate::feedback::InUse;
use crate::journal::Watched;
use crate::tensor::{Block, Tensor};
use harmonaize_abi::{Completion, Cookie, Region, Status};
use std::sync::Arc;

/// A tensor of an operation: its piece of the arena, and which bytes are read or written.
type Used = Option<(Arc<Block>, Region)>;

/// The tensors of an operation, and its feedback.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    /// What is read, and what is written.
    pub(crate) tensors: [Used; 2],
    /// Whether one of them is a part of a tensor.
    pub(crate) sliced: bool,
    pub(crate) feedback: Option<InUse>,
    /// Where the counts of an uneven one lie.
    pub(crate) counts: Option<Tensor>,
    /// What notes its end in the journal.
    pub(crate) watched: Option<Box<Watched>>,
}

impl Buffers {
    /// The bytes that another operation may not have at the same time. Both operations use them, and one of the two
    /// writes them.
    fn conflict(&self, other: &Self) -> Option<Region> {
        let [input, output] = &self.tensors;
        let [their_input, their_output] = &other.tensors;
        let pairs = [(output, their_output), (output, their_input), (input, their_output)];
        let shared = |(one, other): (&Used, &Used)| {
            let ((block, one), (theirs, other)) = one.as_ref().zip(other.as_ref())?;
            let begin = one.offset.max(other.offset);
            let end = one.offset.saturating_add(one.bytes).min(other.offset.saturating_add(other.bytes));
            (Arc::ptr_eq(block, theirs) && begin < end).then(|| Region { offset: begin, bytes: end - begin })
        };
        pairs.into_iter().find_map(shared)
    }
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
    /// Operations submitted that have slices.
    sliced: u32,
}

impl InFlight {
    pub(crate) fn new(entries: u32) -> Self {
        let slots = (0..entries).map(|_| Slot { generation: 0, state: State::Free }).collect();
        Self { slots, free: (0..entries).rev().collect(), sliced: 0 }
    }

    /// The bytes that an operation must wait for, where a slice is concerned.
    pub(crate) fn conflict(&self, buffers: &Buffers) -> Option<Region> {
        if self.sliced == 0 && !buffers.sliced {
            return None;
        }
        self.slots.iter().find_map(|slot| match &slot.state {
            State::Submitted { buffers: other, .. } if buffers.sliced || other.sliced => {
                buffers.conflict(other)
            }
            _ => None,
        })
    }

    fn slot(&mut self, cookie: Cookie) -> Option<(u32, &mut Slot)> {
        let (index, generation) = (cookie.0 as u32, (cookie.0 >> 32) as u32);
        let slot = self.slots.get_mut(index as usize)?;
        (slot.generation == generation).then_some((index, slot))
    }

    /// A slot for an operation on these buffers; its cookie.
    pub(crate) fn start(&mut self, buffers: Buffers) -> Option<Cookie> {
        let index = self.free.pop()?;
        let slot = self.slots.get_mut(index as usize)?;
        self.sliced += u32::from(buffers.sliced);
        slot.generation = slot.generation.wrapping_add(1);
        slot.state = State::Submitted { buffers, abandoned: false };
        Some(Cookie(u64::from(slot.generation) << 32 | u64::from(index)))
    }

    fn release(&mut self, cookie: Cookie) -> Option<State> {
        let (index, slot) = self.slot(cookie)?;
        let state = std::mem::replace(&mut slot.state, State::Free);
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(index);
        Some(state)
    }

    /// Forgets an operation that was never submitted.
    pub(crate) fn cancel(&mut self, cookie: Cookie) {
        if let Some(State::Submitted { buffers, .. }) = self.release(cookie) {
            self.sliced -= u32::from(buffers.sliced);
        }
    }

    /// Notes how an operation ended. `None`: no such operation is in flight. `Some` brings the buffers.
    pub(crate) fn complete(&mut self, completion: Completion) -> Option<Buffers> {
        let cookie = Cookie(completion.cookie);
        let (_, slot) = self.slot(cookie)?;
        match std::mem::replace(&mut slot.state, State::Done(completion)) {
            State::Submitted { mut buffers, abandoned } => {
                self.sliced -= u32::from(buffers.sliced);
                if let Some(watched) = buffers.watched.take() {
                    watched.end(completion);
                }
                if abandoned {
                    self.release(cookie);
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

    /// Whether an operation has ended and [`Self::claim`] will say how.
    pub(crate) fn has_ended(&self, cookie: Cookie) -> bool {
        let slot = self.slots.get(cookie.0 as u32 as usize);
        slot.is_some_and(|slot| {
            slot.generation == (cookie.0 >> 32) as u32 && matches!(slot.state, State::Done(_))
        })
    }

    /// How an operation ended, once; its slot is free then.
    pub(crate) fn claim(&mut self, cookie: Cookie) -> Option<Completion> {
        let (_, slot) = self.slot(cookie)?;
        let State::Done(completion) = slot.state else { return None };
        self.release(cookie);
        Some(completion)
    }

    /// Nobody will claim this operation. Its buffers stay until it has ended.
    pub(crate) fn abandon(&mut self, cookie: Cookie) {
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
    use crate::pool::Pool;
    use harmonaize_abi::Dtype;
    use harmonaize_shm::{ForkGuard, Memory};

    #[test]
    fn a_cookie_ends_once() {
        let mut table = InFlight::new(2);
        let (first, second) =
            (table.start(Buffers::default()).unwrap(), table.start(Buffers::default()).unwrap());
        assert!(table.start(Buffers::default()).is_none());
        let ended = |cookie: Cookie| Completion { cookie: cookie.0, ..Default::default() };
        assert_eq!(table.claim(first), None);
        assert!(table.complete(ended(first)).is_some());
        assert!(table.complete(ended(first)).is_none());
        assert_eq!(table.claim(first).unwrap().cookie, first.0);
        assert_eq!(table.claim(first), None);
        let third = table.start(Buffers::default()).unwrap();
        assert_ne!(third, first);
        table.abandon(second);
        assert!(table.start(Buffers::default()).is_none());
        assert!(table.complete(ended(second)).is_some());
        assert!(table.complete(ended(second)).is_none());
        assert!(table.start(Buffers::default()).is_some());
        assert!(table.complete(ended(Cookie(u64::MAX))).is_none());
        assert!(table.complete(ended(Cookie(0))).is_none());
    }

    #[test]
    fn slices_wait_for_what_is_written() {
        let pool = Pool::fixed(Memory::private(4096).unwrap(), ForkGuard::new().unwrap());
        let tensor = Tensor::new(&pool, Dtype::U8, 256).unwrap();
        let of = |tensor: &Tensor| Some((Arc::clone(&tensor.block), tensor.region()));
        let part = |range: std::ops::Range<u64>| tensor.slice(range).unwrap();
        let buffers = |input: &Tensor, output: &Tensor| Buffers {
            tensors: [of(input), of(output)],
            sliced: input.is_slice() || output.is_slice(),
            ..Buffers::default()
        };
        let mut table = InFlight::new(8);
        let conflict = |table: &InFlight, input: &Tensor, output: &Tensor| {
            table.conflict(&buffers(input, output)).map(|region| region.bytes)
        };
        let other = Tensor::new(&pool, Dtype::U8, 256).unwrap();
        let reads = table.start(buffers(&part(0..64), &other)).unwrap();
        let third = Tensor::new(&pool, Dtype::U8, 256).unwrap();
        assert_eq!(conflict(&table, &part(32..96), &third), None, "both read");
        assert_eq!(conflict(&table, &third, &part(32..96)), Some(32));
        assert_eq!(conflict(&table, &tensor, &tensor), Some(64), "a whole one has the slice");
        assert_eq!(conflict(&table, &third, &part(64..256)), None, "they only touch");
        assert_eq!(conflict(&table, &third, &part(10..10)), None);
        assert_eq!(conflict(&table, &other.slice(1..2).unwrap(), &third), Some(1), "it is written");
        assert!(table.complete(Completion { cookie: reads.0, ..Default::default() }).is_some());
        assert_eq!(conflict(&table, &third, &part(32..96)), None);
        let whole = table.start(buffers(&tensor, &tensor)).unwrap();
        assert_eq!(conflict(&table, &tensor, &tensor), None, "their order is the caller's");
        assert_eq!(conflict(&table, &part(255..256), &third), Some(1));
        table.cancel(whole);
        let sliced = table.start(buffers(&part(0..1), &part(1..2))).unwrap();
        table.cancel(sliced);
        assert_eq!(table.sliced, 0);
        let nested = part(100..200).slice(10..=19).unwrap();
        assert_eq!((nested.elements(), nested.region().offset - tensor.region().offset), (10, 110));
    }
}
