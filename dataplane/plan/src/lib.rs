//! Collective algorithms as pure step programs, one per participant. The symbolic checker must pass a program before
//! it may run.
//!
//! Architecture invariant: no clock, socket, thread, file or async runtime; an algorithm is data.
#![forbid(unsafe_code)]

mod algorithm_table;
mod allgather;
mod allreduce;
mod barrier;
mod broadcast;
mod builder;
mod check;
mod direct;
mod hierarchical;
mod one_two_shot;
mod pairwise;
mod plan;
mod program;
mod recursive;
mod reduce;
mod reducescatter;
mod segmentation;
mod staging;
mod tree;

pub use algorithm_table::{AlgorithmRange, AlgorithmTable, MAX_RANGES, TableError};
pub use check::{CheckError, Fault, Found, Report, Usage, Wait, check, check_own};
pub use plan::{Algorithm, Coding, Edges, Local, Plan, PlanError, Request, algorithm_code, edges, program};
pub use program::{
    Access, Buffer, CODED_ROOM, Encoding, Group, MAX_SOURCES, MAX_STEP_PEERS, Operand, Part, Participant,
    Program, Retention, Slot, Stage, Step, StepKind,
};
pub use segmentation::{Segmentation, Tuning, max_segment_bytes, retention, segmentation, select_algorithm};
pub use staging::StagingSize;
