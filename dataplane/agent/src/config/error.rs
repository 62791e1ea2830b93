//! What is wrong with a configuration, of an agent or of an aggregator.

use super::quota::QuotaError;
use super::rdma::RdmaError;
use super::telemetry::TelemetryError;
use super::tenant::TenantError;
use harmonaize_identity::ProtectionError;
use harmonaize_units::TextError;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

/// What is wrong with a configuration file.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// It cannot be read.
    #[error("{path}: {source}", path = path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A key or value is wrong; says the line.
    #[error("{path}: {error}", path = path.display())]
    Text {
        /// Which.
        path: PathBuf,
        /// Where and what.
        error: TextError,
    },
    /// A value that is of its kind but makes no sense.
    #[error("{path}: {error}", path = path.display())]
    Value {
        /// Which.
        path: PathBuf,
        /// What is wrong.
        error: ValueError,
    },
}

/// A value of a configuration that is of its kind but makes no sense.
#[derive(Debug, thiserror::Error)]
pub enum ValueError {
    /// An agent would listen on all addresses, none of which others could be given.
    #[error("`listen` is {0}, which other agents cannot connect to; give this host's fabric address")]
    AgentListensAnywhere(SocketAddr),
    /// An aggregator would, likewise.
    #[error("`listen` is {0}, where no worker can send to; give this machine's fabric address")]
    AggregatorListensAnywhere(SocketAddr),
    /// A peer would be lost too soon.
    #[error("`peer_timeout` is {timeout:?}; it must be at least {least:?}")]
    PeerTimeout {
        /// What it is.
        timeout: Duration,
        /// What it must be.
        least: Duration,
    },
    /// No link could come up.
    #[error("`connect_timeout` must be longer than nothing")]
    ConnectTimeout,
    /// Where control listens is no address.
    #[error("`control` is `{0}`; give address and port, such as \"10.0.0.1:7000\"")]
    ControlAddress(String),
    /// Control listens nowhere.
    #[error("`control` names no address")]
    NoControl,
    /// How the session with control is protected is not chosen.
    #[error(transparent)]
    Protection(#[from] ProtectionError),
    /// A table on RDMA.
    #[error(transparent)]
    Rdma(#[from] RdmaError),
    /// Too few or too many threads.
    #[error("`threads` of [engine] is {threads}; {} to {}", within.start(), within.end())]
    EngineThreads {
        /// How many.
        threads: usize,
        /// How many there may be.
        within: RangeInclusive<usize>,
    },
    /// The table on telemetry.
    #[error(transparent)]
    Telemetry(#[from] TelemetryError),
    /// A tenant's table.
    #[error("tenant `{name}`: {error}")]
    Tenant {
        /// The tenant.
        name: String,
        /// What is wrong.
        error: TenantError,
    },
    /// Processes of root could attach for a tenant that control adds.
    #[error("`least_uid` of [control_tenants] is 0: no process of root attaches for a tenant of control's")]
    LeastUid,
    /// The most that a tenant which control adds may have.
    #[error("[control_tenants]: {0}")]
    ControlTenantsQuota(QuotaError),
    /// An aggregator's pool is too small or too large, in bytes.
    #[error("`pool` must be {} to {} bytes", within.start(), within.end())]
    Pool {
        /// What it may be.
        within: RangeInclusive<u64>,
    },
    /// What a frame carries to an aggregator is too little or too much, in bytes.
    #[error("`mtu` must be {} to {}", within.start(), within.end())]
    Mtu {
        /// What it may be.
        within: RangeInclusive<u32>,
    },
    /// How an aggregator deals with one above it.
    #[error("`patience` and `again` must be 100us to 10s, and `again` the shorter")]
    ParentTimes,
    /// An aggregator's key has changed that cannot change at run time.
    #[error("only `patience` and `again` can change while the aggregator runs; restart it")]
    Unchangeable,
    /// The certificate's files are not usable.
    #[error("no certificate can be shown: {0}")]
    Certificate(harmonaize_identity::Error),
}
