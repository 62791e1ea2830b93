//! The identities of a communicator and of an operation, each a type of its own: none passes for another.
//! Descriptors and the messages of a session, whose layout a tenant's ABI describes, keep integers.

use core::fmt;
use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

macro_rules! ids {
    ($add:ident: $($(#[$meta:meta])* $name:ident($int:ty);)*) => {$(
        $(#[$meta])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
            FromBytes, IntoBytes, Immutable, KnownLayout,
        )]
        #[repr(transparent)]
        #[serde(transparent)]
        pub struct $name(pub $int);

        impl $name {
            /// Returns the number that follows. The largest has none and returns itself, but of numbers that begin again.
            #[must_use]
            pub const fn next(self) -> Self {
                Self(self.0.$add(1))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }

        impl fmt::LowerHex for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::LowerHex::fmt(&self.0, f)
            }
        }

        impl From<$int> for $name {
            fn from(number: $int) -> Self {
                Self(number)
            }
        }

        impl From<$name> for $int {
            fn from(id: $name) -> Self {
                id.0
            }
        }
    )*};
}

ids! { saturating_add:
    /// Identifies a communicator at every agent and at control, for good: control never gives a number twice.
    CommunicatorId(u64);
    /// What a process calls a communicator in its attachment's descriptors. The agent gives it at joining, from 1; control
    /// does not know it.
    CommunicatorHandle(u32);
    /// Identifies what control grants a communicator's epoch at its aggregators, drawn at random. Packets carry it in the communicator's place.
    GrantId(u64);
    /// Numbers the plans of a communicator, from 1. Agents' messages carry it in 32 bits, protobuf in 64.
    Epoch(u32);
    /// Numbers the operations of a communicator, from 0. Where a message's number stands in its place: the messages between its two
    /// ranks in its direction.
    OperationId(u64);
    /// Numbers the segments of a communicator, from 0.
    SegmentId(u64);
    /// Numbers the segments that are given to an aggregator in one session, from 0.
    SegmentIndex(u64);
    /// Numbers a communicator's channels, from 0. Behind those of segments is the one of messages from rank to rank.
    ChannelId(u16);
    /// Numbers the steps of a program, from 0. Where what has ended is a piece of a message, it names that piece.
    StepId(u32);
    /// What a tenant's process knows its operation by, in descriptor and completion ([`crate::Submission::cookie`]).
    Cookie(u64);
    /// The engine's name for a local rank's call in flight.
    Token(u64);
    /// Names what a frame's payload, or a transfer of a tenant's memory, is for. It comes back to whoever began that, once
    /// the memory may be overwritten; nobody else reads it.
    Tag(u64);
    /// Numbers the interleave slots that a participant asks for.
    SlotId(u64);
}

ids! { wrapping_add:
    /// Numbers the messages of a stream, from 0 and again from 0. A stream is what one participant sends another on a channel by the
    /// links of an epoch.
    Sequence(u32);
}

impl Sequence {
    /// Returns the number of the message that comes `ahead` messages later.
    #[must_use]
    pub const fn ahead(self, ahead: u32) -> Self {
        Self(self.0.wrapping_add(ahead))
    }

    /// Returns which of the receiver's landing slots the message's payload has, of at least one.
    pub fn slot(self, slots: u32) -> u32 {
        self.0.checked_rem(slots).unwrap_or(0)
    }
}

impl Epoch {
    /// Returns the epoch that a 64-bit field of a message carries.
    ///
    /// # Errors
    /// If it needs more than 32 bits.
    pub fn from_wire(number: u64) -> Result<Self, core::num::TryFromIntError> {
        u32::try_from(number).map(Self)
    }
}

impl From<Epoch> for u64 {
    fn from(epoch: Epoch) -> Self {
        epoch.0.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn epochs_fit_their_field_or_are_refused() {
        assert_eq!(Epoch::from_wire(7), Ok(Epoch(7)));
        assert!(Epoch::from_wire(1 << 32).is_err());
        assert_eq!(u64::from(Epoch(u32::MAX)), u64::from(u32::MAX));
    }

    #[test]
    fn sequences_begin_again_and_go_round_their_slots() {
        let last = Sequence(u32::MAX);
        assert_eq!((last.next(), last.ahead(3)), (Sequence(0), Sequence(2)));
        assert_eq!((Sequence(7).slot(4), Sequence(7).slot(0)), (3, 0));
    }

    #[test]
    fn ids_show_their_number_and_end_at_the_largest() {
        assert_eq!(
            (CommunicatorId(42).to_string(), alloc::format!("{:04x}", GrantId(42))),
            ("42".into(), "002a".into())
        );
        assert_eq!((SlotId(3).next(), SlotId(u64::MAX).next()), (SlotId(4), SlotId(u64::MAX)));
    }
}
