//! Control's configuration file, and the topology that it names.

mod error;

pub use error::{ConfigError, ContentError, ValueError};

use crate::access::{Access, Role};
use crate::state::{
    AllocatorSettings, LivePolicy, MarketSettings, Settings, TenantAlgorithm, TenantCongestion, Terms,
};
use harmonaize_abi::session::{MAX_WEIGHT, Price};
use harmonaize_abi::{Collective, CongestionControlError};
use harmonaize_allocator::OperatorCost;
use harmonaize_api::is_tenant_name;
use harmonaize_identity::Protection;
use harmonaize_plan::Algorithm;
use harmonaize_planner::{
    AlgorithmOverride, Bytes, CongestionOverride, Nanos, RouteClass, Topology, parse_toml,
};
use harmonaize_store::etcd::Members;
use harmonaize_units::unchanged_but;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Most ranks of a communicator that agents take.
const MOST_RANKS: u32 = 1024;

/// Where metrics are by default: on loopback alone.
const METRICS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9476);

/// Where the page is by default: on loopback alone.
const PAGE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9479);

/// What the operator decided, and where control listens.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where agents and aggregators connect.
    pub listen: SocketAddr,
    /// Where operators' tools connect; none: where agents do.
    pub listen_operators: Option<SocketAddr>,
    /// Where Prometheus reads metrics over HTTP.
    pub metrics: SocketAddr,
    /// Where operators' browsers read the page.
    pub page: SocketAddr,
    /// Where a scheduler of Kubernetes asks about hosts; none: nowhere.
    pub scheduler_extender: Option<SocketAddr>,
    /// How long a silent session lives.
    pub session_timeout: Duration,
    /// Who may do what.
    pub access: Access,
    /// Everything that steers decisions.
    pub settings: Settings,
    /// What outlives a restart, and where; nothing does where absent.
    pub store: Option<StoreConfig>,
    /// Where all this was read, to be read again; none: it never is.
    pub source: Option<Source>,
}

/// Keys that may change while control runs.
const CHANGEABLE: [&str; 5] =
    ["tenant", "operator", "algorithm", "congestion_control", "scheduler_namespaces"];

/// Where a configuration was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The file.
    pub path: PathBuf,
    /// What it said.
    pub text: String,
    /// The topology's file.
    pub topology: PathBuf,
}

impl Source {
    /// Reads the configuration and its topology again.
    ///
    /// # Errors
    /// As of [`Config::load`]; and where a key has changed that cannot change at run time, with its line.
    pub fn read_again(&self) -> Result<Config, ConfigError> {
        let config = Config::load(&self.path)?;
        let text = config.source.as_ref().map_or("", |source| &source.text);
        unchanged_but(&CHANGEABLE, &self.text, text)
            .map_err(|error| ConfigError::Text { path: self.path.clone(), error: error.into() })?;
        Ok(config)
    }
}

/// Where control keeps what must outlive it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreConfig {
    /// Where.
    pub place: Place,
    /// Text of the topology's file, which is kept too: after a restart control says what has changed.
    pub topology: String,
}

/// What keeps what must outlive control.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A file, for one control.
    File(PathBuf),
    /// etcd, for several of which one leads.
    Etcd(Members),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    listen: SocketAddr,
    listen_operators: Option<toml::Spanned<SocketAddr>>,
    metrics: Option<SocketAddr>,
    page: Option<toml::Spanned<SocketAddr>>,
    scheduler_extender: Option<toml::Spanned<SocketAddr>>,
    #[serde(default)]
    scheduler_namespaces: BTreeMap<String, toml::Spanned<Vec<String>>>,
    topology: PathBuf,
    store: Option<PathBuf>,
    etcd: Option<toml::Spanned<Vec<String>>>,
    tls: Option<PathBuf>,
    #[serde(default)]
    insecure_loopback: bool,
    #[serde(default)]
    operator: Vec<FileOperator>,
    #[serde(default)]
    tenant: Vec<FileTenant>,
    #[serde(default = "seconds::<60>")]
    join_timeout: toml::Spanned<Nanos>,
    #[serde(default = "seconds::<10>")]
    prepare_timeout: toml::Spanned<Nanos>,
    #[serde(default = "seconds::<300>")]
    lease: toml::Spanned<Nanos>,
    #[serde(default = "seconds::<5>")]
    session_timeout: toml::Spanned<Nanos>,
    #[serde(default = "number::<1>")]
    paths: toml::Spanned<u32>,
    source_ports: Option<toml::Spanned<String>>,
    #[serde(default = "number::<MOST_RANKS>")]
    most_ranks: toml::Spanned<u32>,
    #[serde(default = "most_communicators")]
    most_communicators: usize,
    #[serde(default = "time::<1>")]
    telemetry_interval: Nanos,
    #[serde(default = "yes")]
    replan: bool,
    #[serde(default = "yes")]
    turns: bool,
    #[serde(default = "yes")]
    compression: bool,
    #[serde(default)]
    algorithm: Vec<FileAlgorithm>,
    #[serde(default)]
    congestion_control: Vec<FileCongestion>,
    #[serde(default = "number::<8>")]
    most_weight: toml::Spanned<u32>,
    #[serde(default = "time::<600>")]
    longest_regroup: Nanos,
    allocator: Option<FileAllocator>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileAllocator {
    policy: toml::Spanned<String>,
    #[serde(default = "seconds::<30>")]
    round: toml::Spanned<Nanos>,
    #[serde(default = "seconds::<10>")]
    notice: toml::Spanned<Nanos>,
    #[serde(default = "time::<600>")]
    longest_wait: Nanos,
    #[serde(default)]
    kind: Vec<FileKind>,
}

/// What an hour of a host of a kind costs its operator.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileKind {
    name: toml::Spanned<String>,
    #[serde(default)]
    hire: f64,
    #[serde(default)]
    kilowatts: f64,
    #[serde(default)]
    energy: f64,
    #[serde(default)]
    carbon: f64,
    #[serde(default)]
    carbon_price: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileTenant {
    name: toml::Spanned<String>,
    #[serde(default = "yes")]
    aggregation: bool,
    weight: Option<toml::Spanned<u32>>,
    hosts: Option<Vec<toml::Spanned<String>>>,
    communicators: Option<toml::Spanned<u32>>,
    ranks: Option<toml::Spanned<u32>>,
    arena: Option<toml::Spanned<Bytes>>,
    operations: Option<toml::Spanned<u32>>,
    descriptors: Option<toml::Spanned<u32>>,
    landing: Option<toml::Spanned<Bytes>>,
    joins: Option<toml::Spanned<u32>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileAlgorithm {
    tenant: Option<toml::Spanned<String>>,
    collective: toml::Spanned<String>,
    from: Option<toml::Spanned<Bytes>>,
    to: Option<toml::Spanned<Bytes>>,
    algorithm: toml::Spanned<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileCongestion {
    tenant: Option<toml::Spanned<String>>,
    route: Option<toml::Spanned<String>>,
    name: toml::Spanned<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileOperator {
    name: toml::Spanned<String>,
    role: Role,
}

const fn time<const SECONDS: u64>() -> Nanos {
    Nanos(SECONDS * 1_000_000_000)
}

fn seconds<const N: u64>() -> toml::Spanned<Nanos> {
    toml::Spanned::new(0..0, time::<N>())
}

fn number<const N: u32>() -> toml::Spanned<u32> {
    toml::Spanned::new(0..0, N)
}

const fn yes() -> bool {
    true
}

const fn most_communicators() -> usize {
    256
}

impl Config {
    /// Reads a configuration file and its topology, whose path is relative to it. The operator's guide has all keys with their defaults.
    ///
    /// # Errors
    /// Where a file cannot be read, or is wrong: which, and at which line.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let read = |path: &Path| {
            std::fs::read_to_string(path)
                .map_err(|source| ConfigError::Read { path: path.to_owned(), source })
        };
        let text = read(path)?;
        let wrong = |error| ConfigError::Text { path: path.to_owned(), error };
        let file: File = parse_toml(&text).map_err(|error| wrong(error.into()))?;
        let folder = path.parent().unwrap_or(Path::new(""));
        let topology_path = folder.join(&file.topology);
        let topology_text = read(&topology_path)?;
        let topology = Topology::parse(&topology_text)
            .map_err(|error| ConfigError::Topology { path: topology_path.clone(), error })?;
        let place = file.place(&text, folder).map_err(wrong)?;
        let store = place.map(|place| StoreConfig { place, topology: topology_text });
        let config = file.into_config(&text, folder, topology, store).map_err(wrong)?;
        let source = Source { path: path.to_owned(), text: text.clone(), topology: topology_path };
        Ok(Config { source: Some(source), ..config })
    }

    /// Reads a configuration's text as [`Config::load`] does, for this topology. What it says goes into no store, and is not read again.
    ///
    /// # Errors
    /// Where it is wrong: what, and at which line.
    pub fn parse(text: &str, topology: Topology) -> Result<Self, ContentError> {
        let file: File = parse_toml(text)?;
        file.into_config(text, Path::new(""), topology, None)
    }
}

impl File {
    /// Where what must outlive control is kept, if anywhere.
    fn place(&self, text: &str, folder: &Path) -> Result<Option<Place>, ContentError> {
        let Some(etcd) = &self.etcd else {
            return Ok(self.store.as_ref().map(|store| Place::File(folder.join(store))));
        };
        let wrong = |error: ValueError| error.at(text, etcd.span().start);
        if self.store.is_some() {
            return Err(wrong(ValueError::TwoStores));
        }
        let tls = || self.tls.as_ref().map(|tls| folder.join(tls));
        let mut chosen = None;
        for address in etcd.get_ref() {
            let complete = address.rsplit_once(':').is_some_and(|(host, port)| {
                !host.is_empty() && !host.contains('/') && port.parse::<u16>().is_ok()
            });
            if !complete {
                return Err(wrong(ValueError::MemberAddress(address.clone())));
            }
            let protection = Protection::choose(tls(), self.insecure_loopback, address);
            chosen = Some(protection.map_err(|error| wrong(error.into()))?);
        }
        let protection = chosen.ok_or_else(|| wrong(ValueError::NoMember))?;
        Ok(Some(Place::Etcd(Members { addresses: etcd.get_ref().clone(), protection })))
    }

    fn into_config(
        self,
        text: &str,
        folder: &Path,
        topology: Topology,
        store: Option<StoreConfig>,
    ) -> Result<Config, ContentError> {
        let wrong = |byte: usize, error: ValueError| error.at(text, byte);
        let within = |what, at, value: u32, within: RangeInclusive<u32>| match within.contains(&value) {
            true => Ok(()),
            false => Err(wrong(at, ValueError::OutOfRange { what, within, value })),
        };
        let listen = self.listen.to_string();
        let tls = self.tls.map(|tls| folder.join(tls));
        let protection = Protection::choose(tls, self.insecure_loopback, &listen);
        let protection = protection.map_err(|error| wrong(0, error.into()))?;
        let listen_operators = listen_operators(text, self.listen, self.listen_operators, &protection)?;
        let page = match self.page {
            Some(page) => operators_only(text, page, &protection)?,
            None => PAGE,
        };
        let scheduler_extender =
            self.scheduler_extender.map(|address| operators_only(text, address, &protection)).transpose()?;
        let mut access = Access::new(protection);
        access.namespaces = namespaces(text, self.scheduler_namespaces)?;
        for FileOperator { name, role } in self.operator {
            let (at, name) = (name.span().start, name.into_inner());
            if topology.host(&name).is_some() || topology.aggregator(&name).is_some() {
                return Err(wrong(at, ValueError::OperatorIsHost(name)));
            }
            if access.operators.insert(name.clone(), role).is_some() {
                return Err(wrong(at, ValueError::OperatorTwice(name)));
            }
        }
        let (mut tenants, mut terms): (Vec<String>, BTreeMap<String, Terms>) = Default::default();
        for tenant in self.tenant {
            let (at, name) = (tenant.name.span().start, tenant.name.into_inner());
            if !is_tenant_name(&name) {
                return Err(wrong(at, ValueError::TenantName(name)));
            }
            if tenants.contains(&name) {
                return Err(wrong(at, ValueError::TenantTwice(name)));
            }
            let weight = tenant.weight.as_ref().map_or(1, |weight| *weight.get_ref());
            let at_weight = tenant.weight.map_or(at, |weight| weight.span().start);
            within("a weight", at_weight, weight, 1..=1000)?;
            let some = |what: &'static str, most: Option<toml::Spanned<u32>>| match most {
                Some(most) if *most.get_ref() == 0 => Err(wrong(most.span().start, ValueError::NoneOf(what))),
                most => Ok(most.map(toml::Spanned::into_inner)),
            };
            let some_bytes = |what: &'static str, most: Option<toml::Spanned<Bytes>>| match most {
                Some(most) if most.get_ref().0 == 0 => {
                    Err(wrong(most.span().start, ValueError::NoBytes(what)))
                }
                most => Ok(most.map(|most| most.into_inner().0)),
            };
            let own = Terms {
                allowed: tenant.aggregation,
                weight,
                communicators: some("communicators", tenant.communicators)?.map(|most| most as usize),
                ranks: some("ranks", tenant.ranks)?,
                arena: some_bytes("arena", tenant.arena)?,
                operations: some("operations", tenant.operations)?,
                descriptors: some("descriptors", tenant.descriptors)?,
                landing: some_bytes("landing", tenant.landing)?,
                joins: some("joins", tenant.joins)?,
            };
            terms.extend((own != Terms::default()).then(|| (name.clone(), own)));
            if let Some(hosts) = tenant.hosts {
                let unknown = hosts.iter().find(|host| topology.host(host.get_ref()).is_none());
                if let Some(unknown) = unknown {
                    let error = ValueError::UnknownHost(unknown.get_ref().clone());
                    return Err(wrong(unknown.span().start, error));
                }
                let hosts: BTreeSet<String> = hosts.into_iter().map(toml::Spanned::into_inner).collect();
                access.hosts.insert(name.clone(), hosts);
            }
            tenants.push(name);
        }
        let algorithms = algorithms(text, &tenants, self.algorithm)?;
        let congestion_controls = congestion_controls(text, &tenants, self.congestion_control)?;
        let (at, paths) = (self.paths.span().start, self.paths.into_inner());
        within("paths", at, paths, 1..=64)?;
        let (at, most_ranks) = (self.most_ranks.span().start, self.most_ranks.into_inner());
        if !(1..=MOST_RANKS).contains(&most_ranks) {
            return Err(wrong(at, ValueError::MostRanks { most: MOST_RANKS, value: most_ranks }));
        }
        let (at, most_weight) = (self.most_weight.span().start, self.most_weight.into_inner());
        within("most_weight", at, most_weight, 1..=MAX_WEIGHT)?;
        let source_ports = self.source_ports.map(|ports| {
            let range = ports.get_ref().split_once('-').and_then(|(first, last)| {
                let range = (first.trim().parse().ok()?, last.trim().parse().ok()?);
                (range.0 > 0 && range.0 <= range.1).then_some(range)
            });
            range.ok_or_else(|| wrong(ports.span().start, ValueError::SourcePorts(ports.get_ref().clone())))
        });
        let time = |what: &'static str, time: toml::Spanned<Nanos>| longer_than_nothing(text, what, &time);
        let session_timeout = time("session_timeout", self.session_timeout)?;
        let market =
            self.allocator.as_ref().map(|allocator| allocator.market(text, &topology)).transpose()?;
        let settings = Settings {
            topology,
            tenants,
            hosts: access.hosts.clone(),
            join_timeout: time("join_timeout", self.join_timeout)?,
            prepare_timeout: time("prepare_timeout", self.prepare_timeout)?,
            lease: time("lease", self.lease)?,
            paths,
            source_ports: source_ports.transpose()?,
            most_ranks,
            most_communicators: self.most_communicators,
            telemetry_interval: self.telemetry_interval.into(),
            replan: self.replan,
            turns: self.turns,
            compression: self.compression,
            algorithms,
            congestion_controls,
            terms,
            most_weight,
            longest_regroup: self.longest_regroup.into(),
            market: market.unwrap_or_default(),
            allocator: self.allocator.map(|allocator| allocator.settings(text)).transpose()?,
        };
        Ok(Config {
            listen: self.listen,
            listen_operators,
            metrics: self.metrics.unwrap_or(METRICS),
            page,
            scheduler_extender,
            session_timeout,
            access,
            settings,
            store,
            source: None,
        })
    }
}

impl FileAllocator {
    fn settings(self, text: &str) -> Result<AllocatorSettings, ContentError> {
        let (at, name) = (self.policy.span().start, self.policy.into_inner());
        let policy = LivePolicy::named(&name).map_err(|error| ValueError::from(error).at(text, at))?;
        let round = longer_than_nothing(text, "round", &self.round)?;
        let notice = longer_than_nothing(text, "notice", &self.notice)?;
        Ok(AllocatorSettings { policy, round, notice })
    }

    fn market(&self, text: &str, topology: &Topology) -> Result<MarketSettings, ContentError> {
        let kinds: BTreeSet<&str> =
            topology.hosts().iter().map(|host| host.kind.as_deref().unwrap_or_default()).collect();
        let mut base_prices = BTreeMap::new();
        for kind in &self.kind {
            let name = kind.name.get_ref();
            let wrong = |error: ValueError| error.at(text, kind.name.span().start);
            if !kinds.contains(name.as_str()) {
                let known = kinds.iter().map(|kind| (*kind).to_owned()).collect();
                return Err(wrong(ValueError::UnknownKind { kind: name.clone(), known }));
            }
            let FileKind { hire, kilowatts, energy, carbon, carbon_price, .. } = *kind;
            let costs = [
                ("hire", hire),
                ("kilowatts", kilowatts),
                ("energy", energy),
                ("carbon", carbon),
                ("carbon_price", carbon_price),
            ];
            if let Some((what, value)) = costs.iter().find(|(_, value)| !value.is_finite() || *value < 0.0) {
                return Err(wrong(ValueError::Cost { what, kind: name.clone(), value: value.to_string() }));
            }
            let cost = OperatorCost { hire, kilowatts, energy, carbon, carbon_price };
            let base_price = Price::new(cost.base_price()).map_err(|error| {
                let cost = cost.base_price().to_string();
                wrong(ValueError::BasePrice { kind: name.clone(), cost, error })
            })?;
            if base_prices.insert(name.clone(), base_price).is_some() {
                return Err(wrong(ValueError::KindTwice(name.clone())));
            }
        }
        Ok(MarketSettings { base_prices, longest_wait: self.longest_wait.into() })
    }
}

/// A length of time that is not none. `what` is its key.
fn longer_than_nothing(
    text: &str,
    what: &'static str,
    time: &toml::Spanned<Nanos>,
) -> Result<Duration, ContentError> {
    match time.get_ref() {
        Nanos(0) => Err(ValueError::NoTime(what).at(text, time.span().start)),
        time => Ok(Duration::from(*time)),
    }
}

/// Tenants of pods by their namespaces. Who they are may be decided later.
fn namespaces(
    text: &str,
    file: BTreeMap<String, toml::Spanned<Vec<String>>>,
) -> Result<BTreeMap<String, Vec<String>>, ContentError> {
    let checked = file.into_iter().map(|(namespace, tenants)| {
        let wrong = |error: ValueError| error.at(text, tenants.span().start);
        if tenants.get_ref().is_empty() {
            return Err(wrong(ValueError::EmptyNamespace(namespace)));
        }
        match tenants.get_ref().iter().find(|tenant| !is_tenant_name(tenant)) {
            Some(tenant) => Err(wrong(ValueError::NamespaceTenant(tenant.clone()))),
            None => Ok((namespace, tenants.into_inner())),
        }
    });
    checked.collect()
}

/// The tenant that a choice is for, which is one of the file's; none where it is for all.
fn known_tenant(
    text: &str,
    tenants: &[String],
    tenant: Option<toml::Spanned<String>>,
) -> Result<Option<String>, ContentError> {
    let Some(tenant) = tenant else { return Ok(None) };
    let (at, tenant) = (tenant.span().start, tenant.into_inner());
    if !tenants.contains(&tenant) {
        return Err(ValueError::UnknownTenant(tenant).at(text, at));
    }
    Ok(Some(tenant))
}

/// The algorithms that an operator has chosen, which do not contradict each other.
fn algorithms(
    text: &str,
    tenants: &[String],
    chosen: Vec<FileAlgorithm>,
) -> Result<Vec<TenantAlgorithm>, ContentError> {
    let wrong = |at: usize, error: ValueError| error.at(text, at);
    let mut overrides: Vec<TenantAlgorithm> = Vec::new();
    for FileAlgorithm { tenant, collective, from, to, algorithm } in chosen {
        let tenant = known_tenant(text, tenants, tenant)?;
        let (at, name) = (collective.span().start, collective.into_inner());
        let collective: Collective =
            name.parse().map_err(|()| wrong(at, ValueError::UnknownCollective(name)))?;
        let (by, name) = (algorithm.span().start, algorithm.into_inner());
        let can = Algorithm::of(collective.traits().pattern);
        let chosen = name.parse().ok().filter(|algorithm| can.contains(algorithm));
        let algorithm = chosen.ok_or_else(|| wrong(by, ValueError::NotItsAlgorithm { name, collective }))?;
        let first = from.as_ref().map_or(Bytes(0), |from| *from.get_ref());
        let last = to.as_ref().map_or(Bytes(u64::MAX), |to| *to.get_ref());
        if first > last {
            let at = to.map_or(at, |to| to.span().start);
            return Err(wrong(at, ValueError::Sizes { first, last }));
        }
        let same = || {
            let those = overrides.iter().filter(|one| one.tenant == tenant);
            those.map(|one| one.choice).filter(|one| one.collective == collective)
        };
        if same().any(|one| one.from <= last && first <= one.to) {
            return Err(wrong(at, ValueError::AlgorithmTwice(collective)));
        }
        if same().count() == AlgorithmOverride::MAX {
            return Err(wrong(at, ValueError::TooManyRanges(collective)));
        }
        let choice = AlgorithmOverride { collective, from: first, to: last, algorithm };
        overrides.push(TenantAlgorithm { tenant, choice });
    }
    Ok(overrides)
}

/// The congestion controls that an operator has chosen, which do not contradict each other.
fn congestion_controls(
    text: &str,
    tenants: &[String],
    chosen: Vec<FileCongestion>,
) -> Result<Vec<TenantCongestion>, ContentError> {
    let wrong = |at: usize, error: ValueError| error.at(text, at);
    let mut overrides: Vec<TenantCongestion> = Vec::new();
    for FileCongestion { tenant, route, name } in chosen {
        let tenant = known_tenant(text, tenants, tenant)?;
        let class = |route: toml::Spanned<String>| {
            let known = RouteClass::ALL.into_iter().find(|class| class.as_str() == route.get_ref());
            known.ok_or_else(|| wrong(route.span().start, ValueError::UnknownRoute(route.get_ref().clone())))
        };
        let route = route.map(class).transpose()?;
        let at = name.span().start;
        let control = name.get_ref().parse();
        let control = control.map_err(|error: CongestionControlError| wrong(at, error.into()))?;
        let choice = CongestionOverride { route, control };
        let both = |one: &TenantCongestion| {
            let covers = |class: &RouteClass| choice.covers(*class) && one.choice.covers(*class);
            one.tenant == tenant && RouteClass::ALL.iter().any(covers)
        };
        if overrides.iter().any(both) {
            return Err(wrong(at, ValueError::CongestionControlTwice));
        }
        overrides.push(TenantCongestion { tenant, choice });
    }
    Ok(overrides)
}

/// Where operators' tools connect, if that is not where agents do: on the loopback unless the file says so.
fn listen_operators(
    text: &str,
    listen: SocketAddr,
    address: Option<toml::Spanned<SocketAddr>>,
    protection: &Protection,
) -> Result<Option<SocketAddr>, ContentError> {
    let Some(address) = address else {
        return match listen.ip() {
            ip if ip.is_loopback() => Ok(None),
            ip if ip.is_unspecified() => Err(ValueError::NoOperatorsListener.at(text, 0)),
            _ => Ok(Some(SocketAddr::from((Ipv4Addr::LOCALHOST, listen.port())))),
        };
    };
    let address = operators_only(text, address, protection)?;
    Ok((address != listen).then_some(address))
}

/// An address that operators alone connect to: without certificates one of the loopback.
fn operators_only(
    text: &str,
    address: toml::Spanned<SocketAddr>,
    protection: &Protection,
) -> Result<SocketAddr, ContentError> {
    let (at, address) = (address.span().start, address.into_inner());
    if *protection == Protection::InsecureLoopback && !address.ip().is_loopback() {
        return Err(ValueError::NotLoopback.at(text, at));
    }
    Ok(address)
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_abi::session::BidError;
    use harmonaize_identity::ProtectionError;
    use std::fmt::Debug;

    fn load(config: &str) -> Result<Config, ConfigError> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("topology.toml"), "[[host]]\nname = \"h0\"\n").unwrap();
        std::fs::write(folder.path().join("kinds.toml"), hosts(&["", "a100"])).unwrap();
        std::fs::write(folder.path().join("broken.toml"), "[[host]]\nnmae = \"h0\"\n").unwrap();
        let path = folder.path().join("control.toml");
        std::fs::write(&path, config).unwrap();
        Config::load(&path)
    }

    /// A topology of hosts of these kinds at one switch.
    fn hosts(kinds: &[&str]) -> String {
        let host = |(at, kind): (usize, &&str)| {
            let link = format!("[[link]]\nfrom = \"h{at}\"\nto = \"s\"\nrate = \"1Gbit/s\"\n");
            let kind = if kind.is_empty() { String::new() } else { format!("kind = \"{kind}\"\n") };
            format!("[[host]]\nname = \"h{at}\"\n{kind}{link}")
        };
        kinds
            .iter()
            .enumerate()
            .map(host)
            .fold("[[switch]]\nname = \"s\"\n".to_owned(), |all, each| all + &each)
    }

    /// Line and column of a value that makes no sense, and why it does not.
    fn flaw<T: Debug>(loaded: Result<T, ConfigError>) -> (usize, usize, ValueError) {
        match loaded {
            Err(ConfigError::Text { error: ContentError::Value { at, error }, .. }) => {
                (at.line, at.column, error)
            }
            other => panic!("{other:?}"),
        }
    }

    /// Line and column of what is no key, or no value of its kind.
    fn unread<T: Debug>(loaded: Result<T, ConfigError>) -> (usize, usize) {
        match loaded {
            Err(ConfigError::Text { error: ContentError::Text(error), .. }) => {
                (error.at.line, error.at.column)
            }
            other => panic!("{other:?}"),
        }
    }

    const GOOD: &str = r#"listen = "127.0.0.1:0"
topology = "topology.toml"
join_timeout = "1.5s"
source_ports = "20000-29999"
insecure_loopback = true
[[tenant]]
name = "a"
"#;

    /// The same for two hosts, of which one has a kind.
    fn kinds() -> String {
        GOOD.replace("topology.toml", "kinds.toml")
    }

    #[test]
    fn hosts_are_allocated_by_policies_of_live_jobs() {
        let allocator = |section: &str| {
            load(&format!("{GOOD}[allocator]\n{section}\n")).map(|config| config.settings.allocator)
        };
        assert_eq!(load(GOOD).unwrap().settings.allocator, None);
        let (policy, round) = (LivePolicy::LeastAttained, Duration::from_secs(30));
        let expected = AllocatorSettings { policy, round, notice: Duration::from_secs(2) };
        assert_eq!(allocator("policy = \"least-attained\"\nnotice = \"2s\"").unwrap(), Some(expected));
        let sia = LivePolicy::named("sia").unwrap_err();
        assert_eq!(flaw(allocator("policy = \"sia\"")), (9, 10, ValueError::Policy(sia)));
        let none = "policy = \"fifo\"\nround = \"0s\"";
        assert_eq!(flaw(allocator(none)), (10, 9, ValueError::NoTime("round")));
        unread(allocator(""));
    }

    #[test]
    fn base_prices_have_power_and_carbon() {
        let market = |section: &str| {
            load(&format!("{}[allocator]\npolicy = \"market\"\n{section}\n", kinds()))
                .map(|config| config.settings.market)
        };
        let known = market(
            "longest_wait = \"2min\"\n[[allocator.kind]]\nname = \"a100\"\nhire = 0.5\nkilowatts = 0.5\n\
             energy = 0.2\ncarbon = 0.4\ncarbon_price = 0.1\n[[allocator.kind]]\nname = \"\"\nhire = 1",
        );
        let base_prices =
            BTreeMap::from([("a100".to_owned(), Price(620_000)), (String::new(), Price(1_000_000))]);
        let expected = MarketSettings { base_prices, longest_wait: Duration::from_secs(120) };
        assert_eq!(known.unwrap(), expected);
        let of_kind = |line: &str| flaw(market(&format!("[[allocator.kind]]\nname = \"a100\"\n{line}"))).2;
        let cost =
            |what, value: &str| ValueError::Cost { what, kind: "a100".to_owned(), value: value.to_owned() };
        assert_eq!(of_kind("hire = -1"), cost("hire", "-1"));
        assert_eq!(of_kind("carbon = nan"), cost("carbon", "NaN"));
        assert_eq!(of_kind("kilowatts = inf"), cost("kilowatts", "inf"));
        let dear = of_kind("hire = 1e7");
        assert!(matches!(dear, ValueError::BasePrice { error: BidError::Value, .. }), "{dear}");
        assert_eq!(of_kind("[[allocator.kind]]\nname = \"a100\""), ValueError::KindTwice("a100".to_owned()));
    }

    #[test]
    fn the_last_host_of_a_kind_with_a_price_goes_at_no_reload() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write("kinds.toml", &hosts(&["h100", "a100", "a100"]));
        let section = "[allocator]\npolicy = \"market\"\n[[allocator.kind]]\nname = \"a100\"\nhire = 0.5\n";
        write("control.toml", &(kinds() + section));
        let source = Config::load(&folder.path().join("control.toml")).unwrap().source.unwrap();
        write("kinds.toml", &hosts(&["h100", "a100"]));
        assert_eq!(source.read_again().unwrap().settings.topology.hosts().len(), 2);
        write("kinds.toml", &hosts(&["h100"]));
        let (.., error) = flaw(source.read_again());
        let (kind, known) = ("a100".to_owned(), vec!["h100".to_owned()]);
        assert_eq!(error, ValueError::UnknownKind { kind, known });
    }

    #[test]
    fn a_kind_without_hosts_has_no_price() {
        let of = |file: &str, kind: &str| {
            let section = format!("[allocator]\npolicy = \"market\"\n[[allocator.kind]]\nname = \"{kind}\"");
            load(&format!("{file}{section}\nhire = 0.5\n")).map(|config| config.settings.market)
        };
        let (line, column, error) = flaw(of(&kinds(), "a10"));
        assert_eq!((line, column), (11, 8));
        assert_eq!(error.to_string(), "the topology has no host of kind `a10`; its kinds are: ``, `a100`");
        let (.., error) = flaw(of(GOOD, "a100"));
        let text = "the topology has no host of kind `a100`; its kinds are: ``";
        assert_eq!(error.to_string(), text);
        assert_eq!(of(GOOD, "").unwrap().base_prices, BTreeMap::from([(String::new(), Price(500_000))]));
    }

    #[test]
    fn roles_of_operators() {
        let secured = GOOD.replace("insecure_loopback = true", "tls = \"tls\"");
        let more = "hosts = [\"h0\"]\n[[operator]]\nname = \"alice\"\nrole = \"admin\"\n";
        let access = load(&format!("{secured}{more}")).unwrap().access;
        let Protection::Mutual(folder) = &access.protection else { panic!("{access:?}") };
        assert!(folder.0.is_absolute() && folder.0.ends_with("tls"), "{folder:?}");
        assert_eq!(access.operators.get("alice"), Some(&Role::Admin));
        assert!(access.hosts["a"].contains("h0"));
        let wrong = |from: &str, to: &str| load(&format!("{secured}{more}").replacen(from, to, 1));
        let both = wrong("tls = \"tls\"", "tls = \"tls\"\ninsecure_loopback = true");
        for (loaded, expected) in [
            (wrong("tls = \"tls\"", ""), ValueError::Protection(ProtectionError::Neither)),
            (both, ValueError::Protection(ProtectionError::Both)),
            (wrong("[\"h0\"]", "[\"h1\"]"), ValueError::UnknownHost("h1".to_owned())),
            (wrong("alice", "h0"), ValueError::OperatorIsHost("h0".to_owned())),
        ] {
            assert_eq!(flaw(loaded).2, expected);
        }
        unread(wrong("\"admin\"", "\"root\""));
        let (.., open) = flaw(load(&GOOD.replace("127.0.0.1", "10.0.0.1")));
        let address = "10.0.0.1:0".to_owned();
        assert_eq!(open, ValueError::Protection(ProtectionError::NotLoopback { address }));
    }

    #[test]
    fn operators_have_a_listener_of_their_own_on_the_loopback() {
        let secured = GOOD.replace("insecure_loopback = true", "tls = \"tls\"");
        let listen = |listen: &str, more: &str| {
            load(&format!("{more}{}", secured.replace("127.0.0.1:0", listen)))
                .map(|config| config.listen_operators)
        };
        let loopback = Some("127.0.0.1:7000".parse().unwrap());
        assert_eq!(listen("10.0.0.1:7000", "").unwrap(), loopback);
        assert_eq!(listen("127.0.0.1:7000", "").unwrap(), None);
        let same = listen("10.0.0.1:7000", "listen_operators = \"10.0.0.1:7000\"\n");
        assert_eq!(same.unwrap(), None);
        let other = listen("0.0.0.0:7000", "listen_operators = \"10.0.0.1:7001\"\n");
        assert_eq!(other.unwrap(), Some("10.0.0.1:7001".parse().unwrap()));
        assert_eq!(flaw(listen("0.0.0.0:7000", "")), (1, 1, ValueError::NoOperatorsListener));
        let open = load(&format!("listen_operators = \"10.0.0.1:7001\"\n{GOOD}"));
        assert_eq!(flaw(open), (1, 20, ValueError::NotLoopback));
        let open = load(&format!("page = \"10.0.0.1:9479\"\n{GOOD}"));
        assert_eq!(flaw(open), (1, 8, ValueError::NotLoopback));
        assert_eq!(load(GOOD).unwrap().page, PAGE);
    }

    #[test]
    fn schedulers_ask_nowhere_unless_configured() {
        assert_eq!(load(GOOD).unwrap().scheduler_extender, None);
        let address = "127.0.0.1:9480";
        let asked = load(&format!("scheduler_extender = \"{address}\"\n{GOOD}")).unwrap();
        assert_eq!(asked.scheduler_extender, Some(address.parse().unwrap()));
        let open = load(&format!("scheduler_extender = \"0.0.0.0:9480\"\n{GOOD}"));
        assert_eq!(flaw(open), (1, 22, ValueError::NotLoopback));
        let secured = GOOD.replace("insecure_loopback = true", "tls = \"tls\"");
        assert!(load(&format!("scheduler_extender = \"0.0.0.0:9480\"\n{secured}")).is_ok());
    }

    #[test]
    fn namespaces_name_their_tenants() {
        assert_eq!(load(GOOD).unwrap().access.namespaces, BTreeMap::new());
        let namespaces = |text: &str| load(&format!("scheduler_namespaces = {{ {text} }}\n{GOOD}"));
        let known = namespaces("team-b = [\"b\", \"c\"]").unwrap().access.namespaces;
        assert_eq!(known, BTreeMap::from([("team-b".to_owned(), vec!["b".to_owned(), "c".to_owned()])]));
        let (.., none) = flaw(namespaces("team-b = []"));
        assert_eq!(none, ValueError::EmptyNamespace("team-b".to_owned()));
        let (.., slash) = flaw(namespaces("team-b = [\"b/c\"]"));
        assert_eq!(slash, ValueError::NamespaceTenant("b/c".to_owned()));
    }

    #[test]
    fn reads_a_good_file() {
        let config = load(GOOD).unwrap();
        assert_eq!(config.settings.join_timeout, Duration::from_millis(1500));
        assert_eq!(config.settings.prepare_timeout, Duration::from_secs(10));
        assert_eq!(config.settings.source_ports, Some((20000, 29999)));
        assert_eq!(config.settings.tenants, ["a"]);
        assert_eq!(config.store, None);
        let kept = load(&format!("store = \"state/control.redb\"\n{GOOD}")).unwrap().store.unwrap();
        assert_eq!(kept.topology, "[[host]]\nname = \"h0\"\n");
        let Place::File(path) = kept.place else { panic!("{kept:?}") };
        assert!(path.ends_with("state/control.redb") && path.is_absolute(), "{path:?}");
    }

    #[test]
    fn etcd_is_shared_by_several_controls() {
        let etcd = |line: &str, text: &str| load(&format!("{line}\n{text}")).map(|config| config.store);
        let here = etcd("etcd = [\"127.0.0.1:1\", \"[::1]:2\"]", GOOD).unwrap().unwrap().place;
        let Place::Etcd(members) = here else { panic!("{here:?}") };
        assert_eq!(members.protection, Protection::InsecureLoopback);
        assert_eq!(members.addresses, ["127.0.0.1:1", "[::1]:2"]);
        let secured = GOOD.replace("insecure_loopback = true", "tls = \"tls\"");
        let far = etcd("etcd = [\"10.0.0.1:2379\"]", &secured).unwrap().unwrap().place;
        let Place::Etcd(Members { protection: Protection::Mutual(folder), .. }) = far else {
            panic!("{far:?}")
        };
        assert!(folder.0.ends_with("tls"));
        let open = ProtectionError::NotLoopback { address: "10.0.0.1:2379".to_owned() };
        let no_address = ValueError::MemberAddress("http://127.0.0.1:1".to_owned());
        for (line, expected) in [
            ("etcd = [\"10.0.0.1:2379\"]", (1, 8, ValueError::Protection(open))),
            ("etcd = []", (1, 8, ValueError::NoMember)),
            ("etcd = [\"http://127.0.0.1:1\"]", (1, 8, no_address)),
            ("store = \"x\"\netcd = [\"127.0.0.1:1\"]", (2, 8, ValueError::TwoStores)),
        ] {
            assert_eq!(flaw(etcd(line, GOOD)), expected);
        }
    }

    #[test]
    fn operators_choose_algorithms_by_size() {
        let one = "[[algorithm]]\ncollective = \"allreduce\"\nfrom = \"64KiB\"\nto = \"1MiB\"\nalgorithm = \"recursive-halving\"\n";
        let all_of = |text: &str| load(&format!("{GOOD}{text}")).map(|config| config.settings);
        let chosen = |text: &str| all_of(text).map(|settings| settings.algorithms_of("a"));
        let expected = AlgorithmOverride {
            collective: Collective::AllReduce,
            from: Bytes(64 << 10),
            to: Bytes(1 << 20),
            algorithm: Algorithm::RecursiveHalving,
        };
        assert_eq!(chosen(one).unwrap(), [expected]);
        let all = one.replace("from = \"64KiB\"\nto = \"1MiB\"\n", "");
        let all = chosen(&all).unwrap();
        assert_eq!((all[0].from, all[0].to), (Bytes(0), Bytes(u64::MAX)));
        let beside = one.replace("64KiB", "1048577B").replace("1MiB", "2MiB");
        assert_eq!(chosen(&format!("{one}{beside}")).unwrap().len(), 2);
        // A tenant's own come before everybody's, which another tenant keeps.
        let own =
            one.replace("collective", "tenant = \"a\"\ncollective").replace("recursive-halving", "ring");
        let both = all_of(&format!("{one}{own}")).unwrap();
        let ring = AlgorithmOverride { algorithm: Algorithm::Ring, ..expected };
        assert_eq!(
            (both.algorithms_of("a"), both.algorithms_of("b")),
            (vec![ring, expected], vec![expected])
        );
        let wrong = |from: &str, to: &str| chosen(&one.replacen(from, to, 1));
        let not_of =
            |name: &str, collective| ValueError::NotItsAlgorithm { name: name.to_owned(), collective };
        let (first, last) = (Bytes(64 << 10), Bytes(1 << 10));
        let unknown = ValueError::UnknownCollective("allredcue".to_owned());
        let stranger = wrong("collective", "tenant = \"c\"\ncollective");
        for (loaded, expected) in [
            (wrong("allreduce", "allredcue"), (9, 14, unknown)),
            (wrong("1MiB", "1KiB"), (11, 6, ValueError::Sizes { first, last })),
            (wrong("recursive-halving", "tree"), (12, 13, not_of("tree", Collective::AllReduce))),
            (wrong("allreduce", "broadcast"), (12, 13, not_of("recursive-halving", Collective::Broadcast))),
            (stranger, (9, 10, ValueError::UnknownTenant("c".to_owned()))),
            (chosen(&format!("{one}{one}")), (14, 14, ValueError::AlgorithmTwice(Collective::AllReduce))),
        ] {
            assert_eq!(flaw(loaded), expected);
        }
        assert_eq!(unread(wrong("64KiB", "64")), (10, 8));
        assert_eq!(unread(wrong("from", "form")), (10, 1));
    }

    #[test]
    fn operators_choose_congestion_controls_by_route() {
        let one = "[[congestion_control]]\nroute = \"racks\"\nname = \"bbr\"\n";
        let load = |text: &str| load(&format!("{GOOD}{text}")).map(|config| config.settings);
        let over = |route, name: &str| CongestionOverride { route, control: name.parse().unwrap() };
        let far = over(Some(RouteClass::Racks), "bbr");
        assert_eq!(load(one).unwrap().congestion_controls_of("a"), [far]);
        let all = load(&one.replace("route = \"racks\"\n", "")).unwrap();
        assert_eq!(all.congestion_controls_of("a"), [over(None, "bbr")]);
        // A tenant's own come before everybody's, which another tenant keeps.
        let own = one.replace("route", "tenant = \"a\"\nroute").replace("bbr", "reno");
        let near = one.replace("racks", "rack").replace("bbr", "dctcp");
        let both = load(&format!("{one}{near}{own}")).unwrap();
        let everybody = [far, over(Some(RouteClass::Rack), "dctcp")];
        let own = over(Some(RouteClass::Racks), "reno");
        assert_eq!(both.congestion_controls_of("a"), [own, everybody[0], everybody[1]]);
        assert_eq!(both.congestion_controls_of("b"), everybody);
        let wrong = |from: &str, to: &str| load(&one.replacen(from, to, 1));
        let twice = load(&format!("{one}[[congestion_control]]\nname = \"cubic\"\n"));
        let stranger = wrong("route", "tenant = \"c\"\nroute");
        for (loaded, expected) in [
            (wrong("\"racks\"", "\"site\""), (9, 9, ValueError::UnknownRoute("site".to_owned()))),
            (wrong("bbr", "b b r"), (10, 8, ValueError::CongestionControl(CongestionControlError))),
            (stranger, (9, 10, ValueError::UnknownTenant("c".to_owned()))),
            (twice, (12, 8, ValueError::CongestionControlTwice)),
        ] {
            assert_eq!(flaw(loaded), expected);
        }
        assert_eq!(unread(wrong("route", "links")), (9, 1));
    }

    #[test]
    fn says_what_is_wrong_and_where() {
        let change = |from: &str, to: &str| load(&GOOD.replacen(from, to, 1));
        let first = |line: &str| load(&format!("{line}\n{GOOD}"));
        let last = |lines: &str| load(&format!("{GOOD}{lines}\n"));
        // What a person reads, behind the file's folder.
        let expect = |loaded: Result<Config, ConfigError>, expected: &str| {
            let error = loaded.unwrap_err().to_string();
            assert!(error.contains(&format!("/{expected}")), "{error}\n{expected}");
        };
        for (loaded, expected) in [
            (change("join_timeout", "join_timeuot"), "line 3, column 1: unknown field `join_timeuot`"),
            (
                change("join_timeout = \"1.5s\"", "peer_timeout = \"5s\""),
                "line 3, column 1: unknown field `peer_timeout`",
            ),
            (change("1.5s", "1.5"), "line 3, column 16: `1.5` is not a duration"),
            (change("1.5s", "0s"), "line 3, column 16: join_timeout must be longer than nothing"),
            (change("127.0.0.1:0", "localhost"), "line 1, column 10: invalid socket address"),
            (change("20000-29999", "29999-20000"), "line 4, column 16: `29999-20000` is not a range"),
            (change("\"a\"", "\"a b\""), "line 7, column 8: `a b` is not a usable name"),
            (change("\"a\"", "\"a/b\""), "line 7, column 8: `a/b` is not a usable name"),
            (change("\"a\"", "\"\""), "line 7, column 8: `` is not a usable name"),
            (first("paths = 0"), "line 1, column 9: paths must be 1 to 64"),
            (first("most_ranks = 0"), "line 1, column 14: most_ranks must be 1 to 1024"),
            (first("most_ranks = 1025"), "line 1, column 14: most_ranks must be 1 to 1024"),
            (first("most_weight = 65"), "line 1, column 15: most_weight must be 1 to 64, not 65"),
            (last("weight = 0"), "line 8, column 10: a weight must be 1 to 1000"),
            (last("[[tenant]]\nname = \"a\""), "line 9, column 8: tenant `a`"),
        ] {
            expect(loaded, &format!("control.toml: {expected}"));
        }
        for time in ["prepare_timeout", "lease", "session_timeout"] {
            let column = time.len() + 4;
            let expected =
                format!("control.toml: line 1, column {column}: {time} must be longer than nothing");
            expect(first(&format!("{time} = \"0s\"")), &expected);
        }
        for what in ["communicators", "ranks", "operations", "descriptors", "joins"] {
            let column = what.len() + 4;
            let expected =
                format!("control.toml: line 8, column {column}: {what} must be at least 1; leave it out");
            expect(last(&format!("{what} = 0")), &expected);
        }
        for what in ["arena", "landing"] {
            let column = what.len() + 4;
            let expected =
                format!("control.toml: line 8, column {column}: {what} must be more than nothing; leave it");
            expect(last(&format!("{what} = \"0B\"")), &expected);
        }
        expect(change("topology.toml", "broken.toml"), "broken.toml: line 2, column 1: unknown field `nmae`");
        expect(change("topology.toml", "none.toml"), "none.toml: No such file");
    }

    #[test]
    fn limits_are_read_up_to_the_largest() {
        let terms = |lines: &str| load(&format!("{GOOD}{lines}")).unwrap().settings.terms.remove("a");
        let own = terms("aggregation = false\nweight = 3\n");
        assert_eq!(own, Some(Terms { allowed: false, weight: 3, ..Terms::default() }));
        let own = terms(
            "communicators = 5\nranks = 40\narena = \"2GiB\"\noperations = 6\ndescriptors = 8\nlanding = \"1GiB\"\n\
             joins = 7\n",
        );
        let (communicators, ranks, arena) = (Some(5), Some(40), Some(2 << 30));
        let (operations, descriptors, landing, joins) = (Some(6), Some(8), Some(1 << 30), Some(7));
        let own = own.unwrap();
        assert_eq!((own.communicators, own.ranks, own.arena), (communicators, ranks, arena));
        assert_eq!((own.operations, own.descriptors), (operations, descriptors));
        assert_eq!((own.landing, own.joins), (landing, joins));
        assert_eq!(load(&format!("most_ranks = 1024\n{GOOD}")).unwrap().settings.most_ranks, 1024);
        let short = load(&format!("longest_regroup = \"0s\"\n{GOOD}")).unwrap().settings;
        assert_eq!((short.longest_regroup, short.most_weight), (Duration::ZERO, 8));
    }
}
