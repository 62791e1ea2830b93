//! What control decides from the provider's topology and from what is measured on it. That is how rings are ordered, which
//! paths their connections take, who has which share, who waits for whom, and which sizes segments have. Pure: values in,
//! values out.
//!
//! Architecture invariant: no clock, socket, thread or file; a topology comes as text, time as a number.
#![forbid(unsafe_code)]

mod aggregation;
mod algorithm;
mod all_to_all;
mod coflow;
mod conditions;
mod estimates;
mod hose;
mod host_scores;
mod interleave;
mod iterations;
mod plan;
mod policy;
mod ring_order;
mod tuning;

pub use aggregation::{
    AggregationDecision, AggregationPlan, AggregationReason, AggregationTimes, AggregatorOffer, Drawback,
    LeafAggregator, decide_aggregation,
};
pub use algorithm::{GroupCosts, HostCosts, RackCosts, delays, hop_delay, max_delay};
pub use all_to_all::{exchange_rate, exchange_usage, line_rate};
pub use coflow::{
    Coflow, CoflowError, Contender, Discipline, Remaining, Sharing, Transfer, Workload, service_order,
    simulate,
};
pub use conditions::{Conditions, Drains, LinkUse};
pub use estimates::{CongestionReport, Connection, Estimate, Estimates, Probe};
pub use harmonaize_topology::{
    Aggregator, AggregatorId, DirectedLink, Host, HostId, Link, LinkId, MAX_NODES, MAX_PATHS, Node, Path,
    PathFinder, Switch, SwitchId, SwitchKind, Topology, TopologyError, TraceError,
};
pub use harmonaize_units::{Bytes, Nanos, Position, Rate, TextError, UnitError, parse_toml};
pub use hose::{Guarantee, GuaranteeCapacity, HoseModel};
pub use host_scores::{Beside, HostScores, MAX_HOST_SCORE, MAX_PREDICTED_HOSTS};
pub use interleave::{InterleaveReason, InterleaveSlot, Overlap, isolated_time, plan_interleaving};
pub use iterations::{IterationPattern, Operation};
pub use plan::{
    Assignment, AssignmentReason, Bottleneck, CheckError, Current, Job, Plan, PlanReason, Policy, Request,
    RingChange, RingEdge, Routes, Score, Task, apply_priorities, check, off_ring_paths, plan,
};
pub use policy::algorithm::{AlgorithmChoice, AlgorithmOverride, AlgorithmReason, AlgorithmStatus};
pub use policy::codec::{
    CodecChoice, CodecRates, CodecReason, CodecRequest, coded_ratio, common_levels, nonzero_ratio,
};
pub use policy::codes::{CodeShape, codes_rate};
pub use policy::congestion_control::{
    CongestionChoice, CongestionChoices, CongestionOverride, CongestionReason, RouteClass,
};
pub use policy::rate_limits::{RateLimits, Reservations, Sharer};
pub use ring_order::{Racks, order, racks, ring_crossings};
pub use tuning::{Tuning, tuning};
