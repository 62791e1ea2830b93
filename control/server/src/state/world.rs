//! Facts, and nothing decided: agents, aggregators, links, operations, and what operators withdrew.

pub(crate) mod agents;
pub(crate) mod aggregators;
pub(crate) mod handovers;
pub(crate) mod iterations;
pub(crate) mod link_state;
pub(crate) mod operator;
pub(crate) mod telemetry;
pub(crate) mod withdrawals;
