//! Communicators: what each runs by, what it should run by, and how it gets there.

pub(crate) mod aggregation;
pub(crate) mod algorithm;
pub(crate) mod codec;
pub(crate) mod coding;
pub(crate) mod communicator;
pub(crate) mod communicators;
pub(crate) mod congestion_control;
pub(crate) mod datagrams;
pub(crate) mod decisions;
pub(crate) mod ended;
pub(crate) mod grant;
pub(crate) mod group;
pub(crate) mod lifecycle;
pub(crate) mod link_reuse;
pub(crate) mod over_tcp;
pub(crate) mod planning;
pub(crate) mod rate_limits;
pub(crate) mod reconcile;
pub(crate) mod reduction;
pub(crate) mod refusals;
pub(crate) mod stored;
