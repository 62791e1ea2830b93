//! Why a communicator gets another epoch, or takes no turns any more.

use harmonaize_codec::Codec;
use harmonaize_planner::{AggregationReason, AssignmentReason, CodecChoice, CodecReason, Rate};
use std::fmt;

/// Why a communicator gets another epoch.
#[derive(Clone, Debug, PartialEq)]
pub enum Reason {
    /// It forms.
    Formed,
    /// An operator chose its order.
    Ordered,
    /// The planner moves it, for what it says.
    Planned(AssignmentReason),
    /// Its connections leave paths that pass nothing or are withdrawn; its order stays.
    ClosedPaths,
    /// Another codec is the fastest within its budget.
    Codec {
        /// The codec.
        codec: Codec,
        /// Why that one.
        why: CodecReason,
    },
    /// Its ranks agreed on another budget.
    Budget {
        /// The budget.
        budget: String,
        /// The codec within it.
        codec: Codec,
        /// Why that one.
        why: CodecReason,
    },
    /// Its tenant was promised another reduction.
    Reduction,
    /// An aggregator serves it, or none does any more; why.
    Aggregation(AggregationReason),
    /// Its connections are held to other rates.
    Rates(RateChange),
    /// Links of an agent that hands over to its successor go over TCP alone.
    OverTcp,
    /// They go over RDMA again.
    OverRdma,
}

/// What connections are held to from an epoch on, and for whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RateChange {
    /// Less, for communicators that matter more to the same tenant.
    GivesWay(Rate),
    /// So that others have what they are promised.
    Promised(Rate),
    /// What each host exchanges with all others, so that others have what they are promised.
    PromisedExchange(Rate),
    /// Nothing any more.
    Unlimited,
}

impl Reason {
    /// Returns why an epoch with this codec follows one with the other.
    pub(crate) fn of_codec(chosen: CodecChoice, before: &CodecChoice) -> Self {
        let CodecChoice { codec, budget, reason: why, .. } = chosen;
        match budget == before.budget {
            true => Self::Codec { codec, why },
            false => Self::Budget { budget: budget.to_string(), codec, why },
        }
    }

    /// Returns a name for programs that never changes with the text.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Formed => "formed",
            Self::Ordered => "ordered",
            Self::Planned(_) => "planned",
            Self::ClosedPaths => "closed_paths",
            Self::Codec { .. } => "codec",
            Self::Budget { .. } => "budget",
            Self::Reduction => "reduction",
            Self::Aggregation(_) => "aggregation",
            Self::Rates(RateChange::GivesWay(_)) => "rate_gives_way",
            Self::Rates(RateChange::Promised(_)) => "rate_promised",
            Self::Rates(RateChange::PromisedExchange(_)) => "rate_promised_exchange",
            Self::Rates(RateChange::Unlimited) => "rate_unlimited",
            Self::OverTcp => "over_tcp",
            Self::OverRdma => "over_rdma",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Planned(why) => write!(f, "{why}"),
            Self::Aggregation(why) => write!(f, "{why}"),
            Self::Formed => f.write_str("all its ranks have joined"),
            Self::Ordered => f.write_str("an operator chose its order"),
            Self::ClosedPaths => {
                f.write_str("its connections leave what passes nothing or is withdrawn; its order stays")
            }
            Self::Codec { codec, why } => write!(f, "{}: {why}", codec.name()),
            Self::Budget { budget, codec, why } => {
                write!(f, "the budget is {budget} now; {}: {why}", codec.name())
            }
            Self::Reduction => f.write_str("another reduction was agreed on"),
            Self::Rates(RateChange::GivesWay(rate)) => {
                write!(f, "held to {rate}: it gives way to what matters more to its tenant")
            }
            Self::Rates(RateChange::Promised(rate)) => {
                write!(f, "held to {rate}, so that others have what they are promised")
            }
            Self::Rates(RateChange::PromisedExchange(rate)) => {
                write!(f, "exchanges held to {rate} a host, so that others have what they are promised")
            }
            Self::Rates(RateChange::Unlimited) => f.write_str("held to no rate any more"),
            Self::OverTcp => {
                f.write_str("an agent hands over to its successor: its links go over TCP until then")
            }
            Self::OverRdma => f.write_str("links that went over TCP for a hand-over go over RDMA again"),
        }
    }
}

/// Why a communicator takes no turns any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TurnsEnd {
    /// Nothing is gained.
    NoGain,
    /// Its operations wait longer for turns than others would make them wait.
    WaitsLess,
    /// Its agent asks for too many.
    TooFast,
    /// Its operations take much longer than was predicted.
    MuchLonger,
}

impl fmt::Display for TurnsEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoGain => "nothing is gained by it any more",
            Self::WaitsLess => "its operations would wait less if they shared the link",
            Self::TooFast => "its agent asks for turns faster than it may",
            Self::MuchLonger => "its operations take much longer than they would alone",
        })
    }
}
