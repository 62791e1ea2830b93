//! Why an aggregator sums for a group, or none does.

use harmonaize_units::{Bytes, Nanos};
use std::fmt;

/// Why an aggregator sums for a group, or none does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AggregationReason {
    /// Nothing was decided: the topology has no aggregators.
    #[default]
    Undecided,
    /// An epoch of an earlier control has one.
    Recovered,
    /// The tenant may have none.
    NotAllowed,
    /// The tenant wants none.
    NotWanted,
    /// Some agents cannot send to aggregators.
    NotAllAgents,
    /// There are more hosts than an aggregator serves.
    TooManyHosts,
    /// Tensors travel in a codec that aggregators do not add.
    Compressed,
    /// Aggregators refused; their texts.
    Refused(String),
    /// There is one host.
    OneHost,
    /// No aggregator can serve it now.
    NoOffer,
    /// The network passes nothing now.
    NothingPasses,
    /// This one is faster, for operations of so many bytes and more.
    Faster(AggregationTimes, Bytes),
    /// None is faster; the drawback of each.
    NoneFaster(Vec<Drawback>),
}

/// Why an aggregator is of no use to a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Drawback {
    /// Not all hosts reach the aggregator of this name.
    Unreachable(String),
    /// It is no faster than the hosts.
    Slower(AggregationTimes),
}

/// How long an operation is predicted to take by an aggregator, and by the hosts among themselves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AggregationTimes {
    /// The size of the operation.
    pub bytes: Bytes,
    /// Whether tensors go in codes.
    pub coded: bool,
    /// The aggregator's name and place; of several all.
    pub aggregator: String,
    /// The time by the aggregator.
    pub aggregated: Nanos,
    /// The time by the hosts.
    pub by_hosts: Nanos,
}

impl fmt::Display for AggregationReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Self::Undecided => "",
            Self::Recovered => "as before control restarted",
            Self::NotAllowed => "the tenant has none",
            Self::NotWanted => "the tenant wants none",
            Self::NotAllAgents => "not all agents can",
            Self::TooManyHosts => "too many hosts",
            Self::Compressed => "tensors travel in fewer bits",
            Self::Refused(why) => why.as_str(),
            Self::OneHost => "nothing crosses a wire",
            Self::NoOffer => "no aggregator is there",
            Self::NothingPasses => "nothing passes now",
            Self::Faster(times, least) => return write!(f, "{times}; from {least} on"),
            Self::NoneFaster(drawbacks) => {
                for (at, drawback) in drawbacks.iter().enumerate() {
                    let between = if at == 0 { "" } else { "; " };
                    write!(f, "{between}{drawback}")?;
                }
                return Ok(());
            }
        };
        f.write_str(text)
    }
}

impl fmt::Display for Drawback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable(name) => write!(f, "not all hosts reach {name} over open links"),
            Self::Slower(times) => write!(f, "{times}"),
        }
    }
}

impl fmt::Display for AggregationTimes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, coded, aggregator, aggregated, by_hosts } = self;
        let codes = if *coded { " in codes that add" } else { "" };
        write!(f, "{bytes}{codes} in {aggregated} by {aggregator}, {by_hosts} by the hosts")
    }
}
