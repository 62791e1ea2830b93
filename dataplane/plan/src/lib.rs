//! Collective algorithms as pure step programs, one per participant, and the symbolic checker that a program must pass
//! before it may run.
//!
//! Architecture invariant: no clock, socket, thread, file or async runtime; an algorithm is data.
#![forbid(unsafe_code)]

mod program;

pub use program::{
    Access, Form, Group, Operand, Part, Participant, Place, Program, Retention, Slot, Step, StepKind,
};
