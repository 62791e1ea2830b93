//! Drains and windows of maintenance: what hosts, switches and links carry nothing now.

use super::{InstructionError, MOST_TARGETS, Operator, REASON_CHARS};
use crate::state::State;
use crate::state::decisions::Trigger;
use crate::state::events::NOTICE;
use harmonaize_planner::{Drains, HostId, Link, LinkId, Node, SwitchId, Topology};
use harmonaize_store::{Change, Withdrawal, WithdrawalKind};
use std::collections::BTreeSet;
use std::time::Duration;

/// What a target is in the topology.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::state) enum Target {
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
pub(in crate::state) fn find(topology: &Topology, name: &str) -> Option<(Target, String)> {
    let node = |name: &str| {
        let switch = || topology.switches().iter().position(|switch| switch.name == name);
        topology.host(name).map(Node::Host).or_else(|| Some(Node::Switch(SwitchId(switch()?))))
    };
    let Some((one, other)) = name.split_once(':') else {
        return node(name).map(|node| (Target::Node(node), name.to_owned()));
    };
    let ends = [node(one)?, node(other)?];
    let joins = |link: &Link| ends == [link.from, link.to] || ends == [link.to, link.from];
    let id = LinkId(topology.links().iter().position(joins)?);
    Some((Target::Link(id), link_name(topology, id)))
}

/// A link's name: its ends as the topology's file has them.
pub(in crate::state) fn link_name(topology: &Topology, id: LinkId) -> String {
    topology.links().get(id.0).map_or_else(String::new, |link| {
        format!("{}:{}", topology.node_name(link.from), topology.node_name(link.to))
    })
}

impl State {
    /// What is to carry nothing now.
    pub fn withdrawn(&self) -> &Drains {
        &self.operator.withdrawn
    }

    /// Whether a host is to get no new communicators.
    pub(in crate::state) fn is_withdrawn(&self, host: HostId) -> bool {
        self.operator.withdrawn.hosts.contains(&host)
    }

    /// What would be withdrawn if these were too.
    ///
    /// # Errors
    /// Where the topology has no such thing.
    pub fn withdrawn_with(&self, targets: &[String]) -> Result<Drains, InstructionError> {
        let mut drains = self.operator.withdrawn.clone();
        for name in targets {
            insert(&mut drains, self.target(name)?.0);
        }
        Ok(drains)
    }

    fn target(&self, name: &str) -> Result<(Target, String), InstructionError> {
        find(&self.settings.topology, name).ok_or_else(|| {
            let shown: String = name.chars().take(130).collect();
            InstructionError::Unknown(match name.contains(':') {
                true => format!("link `{shown}`; a link is named by its ends, such as leaf0:spine0"),
                false => format!("host or switch `{shown}`"),
            })
        })
    }

    pub(super) fn consider_withdrawal(
        &self,
        now: Duration,
        targets: &[String],
        kind: WithdrawalKind,
        (from_ns, until_ns): (u64, u64),
        reason: &str,
    ) -> Result<Vec<Change>, InstructionError> {
        if !(1..=MOST_TARGETS).contains(&targets.len()) {
            return Err(InstructionError::Targets(targets.len()));
        }
        let clock = self.operator.realtime(now);
        let (from_ns, until_ns) = match kind {
            WithdrawalKind::Drain => (clock, 0),
            WithdrawalKind::Maintenance if until_ns <= from_ns => {
                return Err(InstructionError::Window("ends before it begins"));
            }
            WithdrawalKind::Maintenance if until_ns <= clock => {
                return Err(InstructionError::Window("is over already"));
            }
            WithdrawalKind::Maintenance => (from_ns, until_ns),
        };
        let reason: String =
            reason.chars().map(|c| if c.is_control() { ' ' } else { c }).take(REASON_CHARS).collect();
        let mut changes = Vec::with_capacity(targets.len());
        for name in targets {
            let (_, target) = self.target(name)?;
            // Said again, it goes on from when it was said first.
            let known = self.operator.withdrawals.get(&(target.clone(), kind));
            let from_ns = match known {
                Some(known) if kind == WithdrawalKind::Drain => known.from_ns,
                _ => from_ns,
            };
            let record = Withdrawal { target, kind: kind.into(), from_ns, until_ns, reason: reason.clone() };
            changes.push(Change::Withdraw(record));
        }
        Ok(changes)
    }

    pub(super) fn consider_restoring(
        &self,
        targets: &[String],
        kind: WithdrawalKind,
    ) -> Result<Vec<Change>, InstructionError> {
        if !(1..=MOST_TARGETS).contains(&targets.len()) {
            return Err(InstructionError::Targets(targets.len()));
        }
        let mut changes = Vec::with_capacity(targets.len());
        for name in targets {
            // What another topology had may be given back as it was written.
            let target = find(&self.settings.topology, name).map_or_else(|| name.clone(), |(_, name)| name);
            if !self.operator.withdrawals.contains_key(&(target.clone(), kind)) {
                self.target(name)?;
                return Err(InstructionError::NotWithdrawn(match kind {
                    WithdrawalKind::Drain => format!("{target} is not drained"),
                    WithdrawalKind::Maintenance => format!("{target} has no maintenance"),
                }));
            }
            changes.push(Change::Restore(target, kind));
        }
        Ok(changes)
    }

    /// Hosts that are withdrawn, or will be, and since or from when, CLOCK_REALTIME.
    pub(in crate::state) fn host_withdrawals(&self, clock: u64) -> impl Iterator<Item = (HostId, u64)> {
        let records = self.operator.withdrawals.values();
        let open = records.filter(move |record| record.until_ns == 0 || record.until_ns > clock);
        open.filter_map(|record| match find(&self.settings.topology, &record.target)?.0 {
            Target::Node(Node::Host(host)) => Some((host, record.from_ns)),
            Target::Node(Node::Switch(_)) | Target::Link(_) => None,
        })
    }

    /// Brings into effect what has begun, and ends what is over. Returns whether a window's time had come.
    pub(in crate::state) fn update_windows(&mut self, now: Duration) -> bool {
        let clock = self.operator.realtime(now);
        let due = self.operator.next.is_some_and(|at| at <= now);
        let notice = u64::try_from(NOTICE.as_nanos()).unwrap_or(u64::MAX);
        let mut drains = Drains::default();
        let mut next = u64::MAX;
        for record in self.operator.withdrawals.values() {
            let until = if record.until_ns == 0 { u64::MAX } else { record.until_ns };
            if record.from_ns > clock && record.kind() == WithdrawalKind::Maintenance {
                let told = record.from_ns.saturating_sub(notice);
                next = next.min(if told > clock { told } else { record.from_ns });
            } else if until > clock {
                next = next.min(until);
                // A target that the topology has no longer is kept, and without effect.
                if let Some((target, _)) = find(&self.settings.topology, &record.target) {
                    insert(&mut drains, target);
                }
            }
        }
        self.operator.next =
            (next != u64::MAX).then(|| Duration::from_nanos(next.saturating_sub(self.operator.began_ns)));
        if drains != self.operator.withdrawn {
            self.operator.withdrawn = drains;
            self.want_plan(Trigger::Withdrawn);
        }
        due
    }

    /// Windows that are over: what is to be removed from the store. Not those that what is `waiting` to be stored goes on with: it would
    /// be stored first, and removed.
    pub fn expired_withdrawals<'a>(
        &self,
        now: Duration,
        waiting: impl Iterator<Item = &'a Change>,
    ) -> Vec<Change> {
        let clock = self.operator.realtime(now);
        let longer: BTreeSet<(&str, WithdrawalKind)> = waiting
            .filter_map(|change| match change {
                Change::Withdraw(record) => Some((record.target.as_str(), record.kind())),
                _ => None,
            })
            .collect();
        let over = self.operator.withdrawals.values();
        let over = over.filter(|record| record.until_ns != 0 && record.until_ns <= clock);
        let over = over.filter(|record| !longer.contains(&(record.target.as_str(), record.kind())));
        over.map(|record| Change::Restore(record.target.clone(), record.kind())).collect()
    }
}

impl Operator {
    /// Returns what is to carry nothing now.
    pub(in crate::state) fn withdrawn(&self) -> &Drains {
        &self.withdrawn
    }

    /// When a window begins or ends next.
    pub(in crate::state) fn deadline(&self) -> Option<Duration> {
        self.next.into_iter().chain(self.plans_until).min()
    }
}
