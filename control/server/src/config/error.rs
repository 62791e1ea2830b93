//! What is wrong with control's configuration.

use crate::state::UnknownPolicy;
use harmonaize_abi::session::BidError;
use harmonaize_abi::{Collective, CongestionControlError};
use harmonaize_identity::ProtectionError;
use harmonaize_plan::Algorithm;
use harmonaize_planner::{AlgorithmOverride, Bytes, Position, TextError, TopologyError};
use std::ops::RangeInclusive;
use std::path::PathBuf;

/// What is wrong with a configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A file cannot be read.
    #[error("{path}: {source}", path = path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The configuration is not TOML, or has unknown keys or bad values.
    #[error("{path}: {error}", path = path.display())]
    Text {
        /// Which file.
        path: PathBuf,
        /// Where and what.
        error: ContentError,
    },
    /// The topology is wrong.
    #[error("{path}: {error}", path = path.display())]
    Topology {
        /// Which file.
        path: PathBuf,
        /// Where and what.
        error: TopologyError,
    },
}

/// What is wrong with a configuration's text, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ContentError {
    /// It is not TOML, or a key is unknown, missing, unchangeable or not of its kind.
    #[error(transparent)]
    Text(#[from] TextError),
    /// A value that is of its kind but makes no sense.
    #[error("{at}: {error}")]
    Value {
        /// Where.
        at: Position,
        /// What is wrong.
        error: ValueError,
    },
}

/// A value of a configuration that is of its kind but makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// What outlives control would be in two places.
    #[error("give `store` or `etcd`, not both")]
    TwoStores,
    /// etcd has nobody to ask.
    #[error("`etcd` names no member")]
    NoMember,
    /// A member of etcd cannot be reached so.
    #[error("`{0}` is no address and port, such as \"10.0.0.1:2379\"")]
    MemberAddress(String),
    /// How sessions are protected is not chosen, or cannot be so.
    #[error(transparent)]
    Protection(#[from] ProtectionError),
    /// Others could reach what nothing protects.
    #[error("`insecure_loopback` is for a loopback address alone, which this is not")]
    NotLoopback,
    /// The loopback's port is taken, which operators' tools would connect to.
    #[error(
        "`listen_operators` is missing: with `listen` on all addresses the port is taken on the loopback; \
         give another, or the same address to serve both at one"
    )]
    NoOperatorsListener,
    /// A host's certificate would be an operator's.
    #[error("`{0}` is a host or an aggregator, whose certificate is no operator's")]
    OperatorIsHost(String),
    /// An operator is there twice.
    #[error("operator `{0}` is there already")]
    OperatorTwice(String),
    /// No tenant can have this name.
    #[error("`{0}` is not a usable name: 1 to 63 visible ASCII characters, no slash")]
    TenantName(String),
    /// A tenant is there twice.
    #[error("tenant `{0}` is there already")]
    TenantTwice(String),
    /// A number that is too small or too large.
    #[error("{what} must be {} to {}, not {value}", within.start(), within.end())]
    OutOfRange {
        /// Of what.
        what: &'static str,
        /// What it may be.
        within: RangeInclusive<u32>,
        /// What it is.
        value: u32,
    },
    /// Communicators would have none, or more ranks than agents take.
    #[error("most_ranks must be 1 to {most}, as agents take no more, not {value}")]
    MostRanks {
        /// What agents take.
        most: u32,
        /// What it is.
        value: u32,
    },
    /// A tenant's limit that leaves it none. Says of what.
    #[error("{0} must be at least 1; leave it out for no limit")]
    NoneOf(&'static str),
    /// A tenant's limit that leaves it no byte. Says of what.
    #[error("{0} must be more than nothing; leave it out for no limit")]
    NoBytes(&'static str),
    /// A length of time that is none. Says which.
    #[error("{0} must be longer than nothing")]
    NoTime(&'static str),
    /// A host of a tenant's that is not there.
    #[error("the topology has no host `{0}`")]
    UnknownHost(String),
    /// A choice is for a tenant that is not there.
    #[error("there is no tenant `{0}`")]
    UnknownTenant(String),
    /// No two numbers of ports, the first the smaller.
    #[error("`{0}` is not a range of ports, such as \"20000-29999\"")]
    SourcePorts(String),
    /// Live jobs have no such policy.
    #[error(transparent)]
    Policy(#[from] UnknownPolicy),
    /// What a host of a kind costs is no number.
    #[error("{what} of kind `{kind}` is {value}; it must be a number, 0 or more")]
    Cost {
        /// Which cost.
        what: &'static str,
        /// Of which kind.
        kind: String,
        /// What it is.
        value: String,
    },
    /// What an hour of a kind costs in all is no price.
    #[error("an hour of kind `{kind}` costs {cost}: {error}")]
    BasePrice {
        /// Which kind.
        kind: String,
        /// What it costs.
        cost: String,
        /// Why that is none.
        error: BidError,
    },
    /// What hosts of a kind cost, of which there are none.
    #[error("the topology has no host of kind `{kind}`; its kinds are: {}", kinds(known))]
    UnknownKind {
        /// What is said to be a kind.
        kind: String,
        /// The kinds that there are, in order; an empty name is that of hosts without one.
        known: Vec<String>,
    },
    /// A kind has two prices.
    #[error("kind `{0}` has two prices; name it once")]
    KindTwice(String),
    /// A namespace's pods would be nobody's.
    #[error("namespace `{0}` names no tenant; leave it out for the one of its own name")]
    EmptyNamespace(String),
    /// A namespace names what can be no tenant.
    #[error("`{0}` is no tenant's name: 1 to 63 visible ASCII characters, no slash")]
    NamespaceTenant(String),
    /// There is no such collective.
    #[error("`{0}` is not a collective: {all}", all = names(Collective::ALL, |one| one.name()))]
    UnknownCollective(String),
    /// A collective does not go by it, if it is an algorithm at all.
    #[error("`{name}` is not an algorithm of {collective}, which takes {can}", can = algorithms_of(*collective))]
    NotItsAlgorithm {
        /// What was chosen.
        name: String,
        /// For which.
        collective: Collective,
    },
    /// A range of sizes ends before it begins.
    #[error("the largest size, {last}, is below the smallest, {first}")]
    Sizes {
        /// Where it begins.
        first: Bytes,
        /// Where it ends.
        last: Bytes,
    },
    /// Two choices are for the same sizes of a collective.
    #[error("an algorithm for some of these sizes of {0} is there already")]
    AlgorithmTwice(Collective),
    /// More choices than a collective may have.
    #[error("{0} has {most} ranges of sizes already, which is the most", most = AlgorithmOverride::MAX)]
    TooManyRanges(Collective),
    /// Links have no such class.
    #[error("`{0}` is no route: \"rack\" or \"racks\"")]
    UnknownRoute(String),
    /// No congestion control can have this name.
    #[error(transparent)]
    CongestionControl(#[from] CongestionControlError),
    /// Two choices are for the same links.
    #[error("a congestion control for some of these links is there already")]
    CongestionControlTwice,
}

impl ValueError {
    /// The error with its place, given by a byte of the configuration's text.
    pub(super) fn at(self, text: &str, byte: usize) -> ContentError {
        ContentError::Value { at: Position::of(text, byte), error: self }
    }
}

fn algorithms_of(collective: Collective) -> String {
    names(Algorithm::of(collective.traits().pattern), |one| one.name())
}

/// Kinds by name; hosts without one are of kind ``.
fn kinds(known: &[String]) -> String {
    let quoted: Vec<String> = known.iter().map(|kind| format!("`{kind}`")).collect();
    if quoted.is_empty() { "none".to_owned() } else { quoted.join(", ") }
}

fn names<T>(all: &[T], name: impl Fn(&T) -> &'static str) -> String {
    all.iter().map(name).collect::<Vec<_>>().join(", ")
}
