//! Engines and tenants in one process: whole operations over every transport, changes of plan, aggregation, marks.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

mod aggregated;
mod ahead;
mod blocks;
mod carried;
mod coded;
mod collectives;
mod common;
mod counting;
mod feedback;
mod gaps;
mod interleave;
mod marks;
mod middle;
mod offloaded;
mod p2p;
mod regions;
mod senders;
mod served;
mod sliced;
mod succession;
mod sums;
mod tampering;
mod tap;
mod turns;
mod uneven;
mod verbs_allocations;
