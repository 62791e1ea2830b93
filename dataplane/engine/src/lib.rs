//! The poll loop's work: attachments of tenants, their communicators, and the bytes that the programs move.
//!
//! An [`Engine`] is driven by one thread through [`Engine::progress`]; [`run`] is that thread's loop, which spins for a
//! moment when there is nothing to do and then sleeps on everything that can wake it. Control reaches it through
//! [`Command`]s, and learns of what happens through [`Notice`]s.
//!
//! Architecture invariant: a panic in work for one communicator ends that one alone, as `containment` says.
//!
//! Architecture invariant: no async runtime; queues are bounded, but that of attachments that end; nothing is allocated on the path of a tensor's bytes once a
//! communicator is up and has run an operation of each kind and size that it uses.
#![forbid(unsafe_code)]

// By this name the tests' common parts have it.
#[cfg(test)]
extern crate self as harmonaize_engine;

mod aggregated;
mod attachment;
mod backlog;
mod coded;
mod command;
mod communicator_state;
mod containment;
mod context;
mod engine;
mod error;
mod execute;
mod feedback;
mod formation;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod gaps;
mod handover;
mod marks;
mod p2p;
mod passes;
mod reaper;
mod run;
mod sharing;
mod slices;
mod step;
mod table;
mod transfer;
mod turns;
mod validate;
mod wake;

pub use command::{
    Aggregator, AttachmentId, AttachmentStatus, Command, CommunicatorStatus, Formation, LocalRank,
    MAX_PATIENCE, Notice, Peer, Status,
};
pub use containment::PanicScope;
pub use engine::Engine;
pub use error::{HandOverError, LinkError, PrepareError};
pub use formation::landing_bytes;
pub use handover::{EngineImage, InheritedEpoch, Leases};
pub use harmonaize_abi::{CommunicatorId, Epoch, SlotId};
pub use marks::{MarkReader, MarkWriter, marks};
pub use passes::PassSharing;
pub use run::{Handle, NotTaken, Runner, prepare, start};
pub use transfer::MAX_CHANNELS;
