//! Status codes of completions and refusals.

macro_rules! statuses {
    ($($(#[$meta:meta])* $name:ident = $code:literal, $text:literal;)*) => {
        /// How an operation or a request ended. Codes are stable; a reader of an older version sees `None` from
        /// [`Status::from_code`] for a code it does not know.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
        #[repr(u16)]
        pub enum Status { $($(#[$meta])* $name = $code,)* }

        impl Status {
            /// The status behind a code.
            pub const fn from_code(code: u16) -> Option<Self> {
                match code { $($code => Some(Self::$name),)* _ => None }
            }
            /// The code in a completion.
            pub const fn code(self) -> u16 { self as u16 }
            /// One short sentence.
            pub const fn text(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

statuses! {
    /// Done, results are in place.
    Ok = 0, "done";
    /// Descriptor of a version that this agent does not speak.
    BadVersion = 1, "descriptor version not supported";
    /// Unknown collective, element type, reduction or flag.
    BadKind = 2, "unknown collective, element type, reduction or flag";
    /// No such communicator on this attachment.
    BadCommunicator = 3, "no such communicator on this attachment";
    /// Root rank outside the communicator.
    BadRank = 4, "rank outside the communicator";
    /// Buffer outside the arena, misaligned, or its size overflows.
    OutOfRange = 5, "buffer outside the arena, misaligned, or too large";
    /// Input and output overlap without being the same buffer.
    Overlap = 6, "input and output overlap";
    /// Too many operations in flight.
    Busy = 7, "too many operations in flight";
    /// Ranks called different operations; the communicator has ended.
    Mismatch = 8, "ranks called different operations";
    /// Some ranks did not arrive in time; the communicator has ended.
    Timeout = 9, "ranks did not arrive in time";
    /// A rank's process or host was lost; the communicator has ended.
    RankLost = 10, "a rank was lost";
    /// The communicator was destroyed with the operation in flight.
    Destroyed = 11, "communicator destroyed";
    /// The provider ended the communicator.
    Dissolved = 12, "ended by the provider";
    /// A bug or broken invariant in the agent; the communicator has ended.
    Internal = 13, "internal error of the agent";
    /// A rank aborted the communicator.
    Aborted = 14, "aborted by a rank";
    /// The operation's time-out is longer than the operator allows.
    TimeoutTooLong = 15, "time-out longer than the operator allows";
}

impl core::fmt::Display for Status {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.text())
    }
}
