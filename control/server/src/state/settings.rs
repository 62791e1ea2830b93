//! What the operator decided before control started.

use harmonaize_abi::session::Price;
use harmonaize_planner::{AlgorithmOverride, CongestionOverride, HostId, Topology};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// What the operator decided.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Hosts and links.
    pub topology: Topology,
    /// Names of tenants.
    pub tenants: Vec<String>,
    /// Hosts on which a tenant's processes may be, by the file; every one for a tenant that is not named.
    pub hosts: BTreeMap<String, BTreeSet<String>>,
    /// How long the first rank to join waits for the last.
    pub join_timeout: Duration,
    /// How long agents may take to prepare an epoch.
    pub prepare_timeout: Duration,
    /// How long an agent without a session is waited for, and keeps its ranks; also after control restarted.
    pub lease: Duration,
    /// Paths of a link.
    pub paths: u32,
    /// Source ports that links take, first and last; any where absent.
    pub source_ports: Option<(u16, u16)>,
    /// Most ranks of a communicator.
    pub most_ranks: u32,
    /// Most communicators of a job of a tenant, waiting ones included.
    pub most_communicators: usize,
    /// How often agents are asked to report what they measure; zero for never.
    pub telemetry_interval: Duration,
    /// Whether control makes new plans while communicators run; else only operators do.
    pub replan: bool,
    /// Whether periodic communicators take turns on links that they share.
    pub turns: bool,
    /// Whether tensors may travel in fewer bits where tenants let something be lost.
    pub compression: bool,
    /// How operations of a collective and a range of sizes go; as control decides where none says so.
    pub algorithms: Vec<TenantAlgorithm>,
    /// By which TCP congestion control links go; by each host's own where none says so.
    pub congestion_controls: Vec<TenantCongestion>,
    /// What tenants may have, where that is another than usual.
    pub terms: BTreeMap<String, Terms>,
    /// The largest weight that a tenant can have promised.
    pub most_weight: u32,
    /// How long a communicator that failed is kept at most for its members to regroup. What was promised for it is
    /// kept as long.
    pub longest_regroup: Duration,
    /// How hosts are given to jobs; none: they are not.
    pub allocator: Option<AllocatorSettings>,
    /// What hosts cost, by policy `market`.
    pub market: MarketSettings,
}

/// How long a control that begins to lead waits at most for agents of the one before.
const RETURN: Duration = Duration::from_secs(30);

impl Settings {
    /// How long after its start control takes an agent that is away to come back. A first round waits as long for runners.
    pub fn return_time(&self) -> Duration {
        self.allocator.map_or(RETURN, |allocator| allocator.round.min(RETURN))
    }
}

/// How hosts are given to jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocatorSettings {
    /// By which policy.
    pub policy: LivePolicy,
    /// How long what is given stands at least.
    pub round: Duration,
    /// How long a worker has to end when it is asked to.
    pub notice: Duration,
}

/// What the operator decided about prices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MarketSettings {
    /// What an hour of a host costs at least, by kind; nothing for kinds that are not named.
    pub base_prices: BTreeMap<String, Price>,
    /// How long a job that is outbid waits at most for a moment that is cheap for it.
    pub longest_wait: Duration,
}

/// The allocator's policies that need no measured speeds, which live jobs do not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LivePolicy {
    /// First in, first out.
    Fifo,
    /// Whoever has had the least goes first.
    LeastAttained,
    /// Whoever bids most goes first, at one price for all hosts of a kind.
    Market,
}

/// A name that no policy of live jobs has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no policy of live jobs: {all}", all = LivePolicy::ALL.map(LivePolicy::name).join(", "))]
pub struct UnknownPolicy(String);

impl LivePolicy {
    /// All.
    pub const ALL: [Self; 3] = [Self::Fifo, Self::LeastAttained, Self::Market];

    /// The name in the configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fifo => "fifo",
            Self::LeastAttained => "least-attained",
            Self::Market => "market",
        }
    }

    /// The policy of this name.
    ///
    /// # Errors
    /// There is none.
    pub fn named(name: &str) -> Result<Self, UnknownPolicy> {
        let found = Self::ALL.into_iter().find(|policy| policy.name() == name);
        found.ok_or_else(|| UnknownPolicy(name.chars().take(63).collect()))
    }
}

/// An operator's choice for a tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantChoice<C> {
    /// Whose; everybody's who has none of their own where absent.
    pub tenant: Option<String>,
    /// What it is for, and what is chosen.
    pub choice: C,
}

/// How operations of a collective and a range of sizes go.
pub type TenantAlgorithm = TenantChoice<AlgorithmOverride>;

/// By which congestion control links go.
pub type TenantCongestion = TenantChoice<CongestionOverride>;

/// Those of a tenant: its own choices, then everybody's.
fn choices_of<C: Copy>(chosen: &[TenantChoice<C>], tenant: &str) -> Vec<C> {
    let own = chosen.iter().filter(|one| one.tenant.as_deref() == Some(tenant));
    let all = chosen.iter().filter(|one| one.tenant.is_none());
    own.chain(all).map(|one| one.choice).collect()
}

impl Settings {
    /// Returns what operators chose for a tenant's operations: its own choices, then everybody's.
    pub(crate) fn algorithms_of(&self, tenant: &str) -> Vec<AlgorithmOverride> {
        choices_of(&self.algorithms, tenant)
    }

    /// Returns what operators chose for a tenant's links: its own choices, then everybody's.
    pub(crate) fn congestion_controls_of(&self, tenant: &str) -> Vec<CongestionOverride> {
        choices_of(&self.congestion_controls, tenant)
    }

    pub(crate) fn terms(&self, tenant: &str) -> Terms {
        self.terms.get(tenant).copied().unwrap_or_default()
    }

    /// Returns the name of a host.
    pub(crate) fn host_name(&self, host: HostId) -> String {
        self.topology.hosts().get(host.0).map_or_else(String::new, |host| host.name.clone())
    }
}

/// What a tenant may have, by the operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Whether its communicators may use aggregators.
    pub allowed: bool,
    /// Its weight where tenants compete, at least 1.
    pub weight: u32,
    /// Most communicators on all hosts together; none: no limit.
    pub communicators: Option<usize>,
    /// Most ranks of all its communicators together; none: no limit.
    pub ranks: Option<u32>,
    /// Most bytes of tensor memory of its processes on the hosts where it has ranks; none: no limit.
    pub arena: Option<u64>,
    /// Most entries of the rings of its processes on those hosts, one for each operation in flight; none: no limit.
    pub operations: Option<u32>,
    /// Most descriptors of agents for its processes on those hosts and for its links; none: no limit.
    pub descriptors: Option<u32>,
    /// Most bytes of agents' memory for its communicators; none: no limit.
    pub landing: Option<u64>,
    /// Most ranks that join in a second, on all hosts together; none: no limit.
    pub joins: Option<u32>,
}

impl Terms {
    /// Whether what agents say of its processes has a limit.
    pub(crate) fn bound_processes(&self) -> bool {
        self.arena.is_some() || self.operations.is_some() || self.descriptors.is_some()
    }
}

impl Default for Terms {
    fn default() -> Self {
        Self {
            allowed: true,
            weight: 1,
            communicators: None,
            ranks: None,
            arena: None,
            operations: None,
            descriptors: None,
            landing: None,
            joins: None,
        }
    }
}
