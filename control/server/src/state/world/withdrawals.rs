//! Drains and windows of maintenance: what hosts, switches and links carry nothing now.

use harmonaize_planner::{Drains, HostId, Link, LinkId, Nanos, Node, Topology};
use harmonaize_store::{Change, Withdrawal, WithdrawalKind};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Most tenants, those of the configuration included.
pub(crate) const MOST_TENANTS: usize = 10_000;

/// Most targets of one instruction.
const MOST_TARGETS: usize = 1024;

/// Most characters of a reason.
const REASON_CHARS: usize = 200;

/// How long before a window of maintenance begins its hosts' ranks hear of it. It is enough to save in, and
/// by then few are called off.
pub(crate) const NOTICE: Duration = Duration::from_secs(120);

/// Until it is taken back.
const FOREVER: Nanos = Nanos(u64::MAX);

/// What a target is in the topology.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Node(Node),
    Link(LinkId),
}

fn insert(drains: &mut Drains, target: Target) {
    match target {
        Target::Node(Node::Host(host)) => drop(drains.hosts.insert(host)),
        Target::Node(Node::Switch(switch)) => drop(drains.switches.insert(switch)),
        Target::Link(link) => drop(drains.links.insert(link)),
    }
}

/// Finds what a target names, and its name as it is kept.
pub(crate) fn find(topology: &Topology, name: &str) -> Option<(Target, String)> {
    let node =
        |name: &str| topology.host(name).map(Node::Host).or_else(|| topology.switch(name).map(Node::Switch));
    let Some((one, other)) = name.split_once(':') else {
        return node(name).map(|node| (Target::Node(node), name.to_owned()));
    };
    let ends = [node(one)?, node(other)?];
    let joins = |link: &Link| ends == [link.from, link.to] || ends == [link.to, link.from];
    let (id, _) = topology.links_there().find(|found| joins(found.1))?;
    Some((Target::Link(id), link_name(topology, id)))
}

/// A link's name: its ends as the topology's file has them.
pub(crate) fn link_name(topology: &Topology, id: LinkId) -> String {
    topology.links().get(id.0).map_or_else(String::new, |link| {
        format!("{}:{}", topology.node_name(link.from), topology.node_name(link.to))
    })
}

/// Why an instruction is not followed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InstructionError {
    /// A name that no tenant can have.
    #[error("`{0}` is not a usable name: 1 to 63 visible ASCII characters, no slash")]
    BadName(String),
    /// The tenant is there.
    #[error("tenant `{0}` is there already")]
    TenantThere(String),
    /// The tenant is not there.
    #[error("there is no tenant `{0}`")]
    NoTenant(String),
    /// The tenant is the configuration's.
    #[error("tenant `{0}` stands in the configuration file: take it out there, which control reads again")]
    Configured(String),
    /// The tenant has communicators.
    #[error("tenant `{0}` has {1} communicators; dissolve them first")]
    TenantBusy(String, usize),
    /// Users of a tenant.
    #[error("a tenant's users are at most 64 uids, and 0 is none of them")]
    Users,
    /// A quota that no agent would hear of.
    #[error(
        "without uids agents serve a tenant by their own configuration, which has its quota; name uids, or no quota"
    )]
    QuotaOfNobody,
    /// No room.
    #[error("there are {MOST_TENANTS} tenants already")]
    TooManyTenants,
    /// Nothing, or too much, is named.
    #[error("name 1 to {MOST_TARGETS} hosts, switches or links, not {0}")]
    Targets(usize),
    /// The topology has no such thing.
    #[error("the topology has no {0}")]
    Unknown(String),
    /// A window that ends before it begins, or is over.
    #[error("the window {0}")]
    Window(&'static str),
    /// Nothing of the kind.
    #[error("{0}")]
    NotWithdrawn(String),
}

/// Withdrawals by target and kind.
type Withdrawals = BTreeMap<(String, WithdrawalKind), Withdrawal>;

/// What of the withdrawals is in effect.
#[derive(Clone, Debug, Default)]
pub(crate) struct Windows {
    /// In effect now.
    pub withdrawn: Drains,
    /// When a window begins or ends next.
    pub next: Option<Duration>,
}

/// Returns what would be withdrawn if these targets were too.
///
/// # Errors
/// Where the topology has no such thing.
pub(crate) fn withdrawn_with(
    topology: &Topology,
    withdrawn: &Drains,
    targets: &[String],
) -> Result<Drains, InstructionError> {
    let mut drains = withdrawn.clone();
    for name in targets {
        insert(&mut drains, target(topology, name)?.0);
    }
    Ok(drains)
}

fn target(topology: &Topology, name: &str) -> Result<(Target, String), InstructionError> {
    find(topology, name).ok_or_else(|| {
        let shown: String = name.chars().take(130).collect();
        InstructionError::Unknown(match name.contains(':') {
            true => format!("link `{shown}`; a link is named by its ends, such as leaf0:spine0"),
            false => format!("host or switch `{shown}`"),
        })
    })
}

/// Returns what must be stored for targets to be withdrawn.
pub(crate) fn consider_withdrawal(
    topology: &Topology,
    known: &Withdrawals,
    clock: Nanos,
    (targets, kind, (from, until), reason): (&[String], WithdrawalKind, (Nanos, Nanos), &str),
) -> Result<Vec<Change>, InstructionError> {
    if !(1..=MOST_TARGETS).contains(&targets.len()) {
        return Err(InstructionError::Targets(targets.len()));
    }
    let (from, until) = match kind {
        WithdrawalKind::Drain => (clock, Nanos(0)),
        WithdrawalKind::Maintenance if until <= from => {
            return Err(InstructionError::Window("ends before it begins"));
        }
        WithdrawalKind::Maintenance if until <= clock => {
            return Err(InstructionError::Window("is over already"));
        }
        WithdrawalKind::Maintenance => (from, until),
    };
    let reason: String =
        reason.chars().map(|c| if c.is_control() { ' ' } else { c }).take(REASON_CHARS).collect();
    let mut changes = Vec::with_capacity(targets.len());
    for name in targets {
        let (_, target) = target(topology, name)?;
        // Said again, it goes on from when it was said first.
        let said = known.get(&(target.clone(), kind));
        let from_ns = match said {
            Some(said) if kind == WithdrawalKind::Drain => said.from_ns,
            _ => from.0,
        };
        let record =
            Withdrawal { target, kind: kind.into(), from_ns, until_ns: until.0, reason: reason.clone() };
        changes.push(Change::Withdraw(record));
    }
    Ok(changes)
}

/// Returns what must be stored for targets to carry again.
pub(crate) fn consider_restoring(
    topology: &Topology,
    known: &Withdrawals,
    targets: &[String],
    kind: WithdrawalKind,
) -> Result<Vec<Change>, InstructionError> {
    if !(1..=MOST_TARGETS).contains(&targets.len()) {
        return Err(InstructionError::Targets(targets.len()));
    }
    let mut changes = Vec::with_capacity(targets.len());
    for name in targets {
        // What another topology had may be given back as it was written.
        let target = find(topology, name).map_or_else(|| name.clone(), |(_, name)| name);
        if !known.contains_key(&(target.clone(), kind)) {
            self::target(topology, name)?;
            return Err(InstructionError::NotWithdrawn(match kind {
                WithdrawalKind::Drain => format!("{target} is not drained"),
                WithdrawalKind::Maintenance => format!("{target} has no maintenance"),
            }));
        }
        changes.push(Change::Restore(target, kind));
    }
    Ok(changes)
}

/// Returns the hosts that are withdrawn, or will be, and since or from when, CLOCK_REALTIME.
pub(crate) fn hosts<'a>(
    topology: &Topology,
    records: impl Iterator<Item = &'a Withdrawal>,
    clock: Nanos,
) -> Vec<(HostId, Nanos)> {
    let open = records.filter(move |record| record.until_ns == 0 || record.until_ns > clock.0);
    open.filter_map(|record| match find(topology, &record.target)?.0 {
        Target::Node(Node::Host(host)) => Some((host, Nanos(record.from_ns))),
        Target::Node(Node::Switch(_)) | Target::Link(_) => None,
    })
    .collect()
}

/// Returns what is to carry nothing at a time. It also returns when that changes or a window is announced
/// next. Both times are by CLOCK_REALTIME.
pub(crate) fn in_effect<'a>(
    topology: &Topology,
    records: impl Iterator<Item = &'a Withdrawal>,
    clock: Nanos,
) -> (Drains, Option<Nanos>) {
    let mut drains = Drains::default();
    let mut next = FOREVER;
    for record in records {
        let from = Nanos(record.from_ns);
        let until = if record.until_ns == 0 { FOREVER } else { Nanos(record.until_ns) };
        if from > clock && record.kind() == WithdrawalKind::Maintenance {
            let announced = from.before(NOTICE);
            next = next.min(if announced > clock { announced } else { from });
        } else if until > clock {
            next = next.min(until);
            // A target that the topology has no longer is kept, and without effect.
            if let Some((target, _)) = find(topology, &record.target) {
                insert(&mut drains, target);
            }
        }
    }
    (drains, Some(next).filter(|next| *next != FOREVER))
}

/// Returns what is to be removed from the store of windows that are over. Not those that what is `waiting` to
/// be stored goes on with: it would be stored first, and removed.
pub(crate) fn expired<'a, 'b>(
    records: impl Iterator<Item = &'b Withdrawal>,
    clock: Nanos,
    waiting: impl Iterator<Item = &'a Change>,
) -> Vec<Change> {
    let longer: BTreeSet<(&str, WithdrawalKind)> = waiting
        .filter_map(|change| match change {
            Change::Withdraw(record) => Some((record.target.as_str(), record.kind())),
            _ => None,
        })
        .collect();
    let over = records.filter(|record| record.until_ns != 0 && record.until_ns <= clock.0);
    let over = over.filter(|record| !longer.contains(&(record.target.as_str(), record.kind())));
    over.map(|record| Change::Restore(record.target.clone(), record.kind())).collect()
}
