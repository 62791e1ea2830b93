//! Why the MPI carries a call.

use std::fmt;

/// Why the MPI carries a call, as a fact that is the same at all its ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Reason {
    /// The call names no communicator.
    NoCommunicator,
    /// Its communicator is freed already.
    GoneCommunicator,
    /// The provider's communicator forms in a call that blocks, and none has come.
    NoBlockingCall,
    /// Two groups, which the provider has not.
    Intercommunicator,
    /// Nobody to exchange anything with.
    OneRank,
    /// Not all ranks have joined at the provider.
    NotJoined,
    /// It takes several operations one after the other, and does not block.
    LargeNonblocking,
    /// The MPI says what is wrong with them.
    Arguments,
    /// No byte.
    Nothing,
    /// The job leaves so few bytes to the MPI.
    Few,
    /// Blocks that differ go in one piece, which has a limit.
    LargeUneven,
    /// No count of the MPI's could say how many.
    Huge,
    /// No reduction of the provider's.
    Reduction,
    /// Each message takes an operation in flight.
    TooManyRanks,
    /// Some of an exchange's blocks go by the MPI, and the others do not.
    SomeBlocks,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoCommunicator => "no communicator",
            Self::GoneCommunicator => "a communicator that has gone",
            Self::NoBlockingCall => "no collective that blocks came before on this communicator",
            Self::Intercommunicator => "an intercommunicator",
            Self::OneRank => "one rank alone",
            Self::NotJoined => "its ranks could not join at the provider",
            Self::LargeNonblocking => "an operation that does not block is large",
            Self::Arguments => "arguments that the MPI refuses",
            Self::Nothing => "nothing to move",
            Self::Few => "fewer bytes than HARMONAIZE_MPI_MIN_BYTES",
            Self::LargeUneven => "blocks of different sizes that are large together",
            Self::Huge => "more bytes than an int counts",
            Self::Reduction => "a type or an operation that the provider does not reduce",
            Self::TooManyRanks => "messages to more ranks than may be in flight at once",
            Self::SomeBlocks => "blocks of few bytes, or large ones",
        })
    }
}
