//! What connections are held to: along a ring to what the plan says, and those to other participants so that all of them together leave
//! others what they are promised, for exchanges use these alike and no plan counts them. Of communicators with more hosts than those whose exchanges
//! are looked at for codecs the rings alone are held.

use super::State;
use super::communicator::{Communicator, Member};
use super::replan::Planned;
use harmonaize_planner::{DirectedLink, Rate};
use std::collections::{BTreeMap, BTreeSet};

/// A pace is other than that in use where it differs by more than this part.
const SAME: f64 = 0.1;

/// The least part of what its hosts' own links carry that exchanges are held to: promises have at most 90% of a link.
const LEAST: f64 = 0.01;

/// What a communicator's connections are held to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Held {
    /// From each participant to the next along the ring.
    pub ring: Option<Rate>,
    /// From each to all others together.
    pub others: Option<Rate>,
}

impl Held {
    /// Whether a change from this is worth an epoch.
    pub(super) fn is_other(&self, wanted: &Self) -> bool {
        let differs = |now: Option<Rate>, wanted: Option<Rate>| match (now, wanted) {
            (Some(now), Some(wanted)) => (wanted.0 as f64 - now.0 as f64).abs() > SAME * now.0 as f64,
            (now, wanted) => now != wanted,
        };
        differs(self.ring, wanted.ring) || differs(self.others, wanted.others)
    }
}

/// A link on which somebody has a promise.
#[derive(Debug, Default)]
struct Beside {
    /// Bits a second, by communicator.
    promised: BTreeMap<u64, f64>,
    /// Who has no promise, and would exchange over it.
    takers: u32,
}

/// Whether pairs of its hosts are not next to each other in its ring.
fn exchanges(known: &Communicator) -> bool {
    known.members.len() > 2
}

impl State {
    /// What communicators are held to by the last plan, and by what is promised to others on the links between their hosts.
    pub(super) fn held(&self) -> BTreeMap<u64, Held> {
        let beside = self.beside();
        let all = self.communicators.iter().map(|(id, known)| {
            let ring = known.plan.as_ref().and_then(|plan| plan.pace);
            (*id, Held { ring, others: self.exchange_held(*id, known, &beside) })
        });
        all.collect()
    }

    /// The same for one that is to run by this plan.
    pub(super) fn held_by(&self, id: u64, plan: Option<&Planned>) -> Held {
        let known = self.communicators.get(&id);
        let others = known.and_then(|known| self.exchange_held(id, known, &self.beside()));
        Held { ring: plan.and_then(|plan| plan.pace), others }
    }

    /// The links on which somebody has a promise.
    fn beside(&self) -> BTreeMap<DirectedLink, Beside> {
        let mut links: BTreeMap<DirectedLink, Beside> = BTreeMap::new();
        let (with, without): (Vec<_>, Vec<_>) =
            self.communicators.iter().partition(|(id, _)| self.agreements.promised(**id).0 > 0);
        for (id, known) in with {
            let rate = self.agreements.promised(*id).0 as f64;
            for (link, part) in self.on_links(known) {
                *links.entry(link).or_default().promised.entry(*id).or_default() += rate * part;
            }
        }
        if !links.is_empty() {
            for (_, known) in without.into_iter().filter(|(_, known)| exchanges(known)) {
                for (link, _) in &known.coding.usage {
                    links.entry(*link).and_modify(|link| link.takers += 1);
                }
            }
        }
        links
    }

    /// What each host may send in all where all send to all alike, for a communicator that crosses links on which others have a promise:
    /// who has none shares alike there what promises leave. Not what strangers leave: it comes and goes, and each change of it would be
    /// an epoch.
    fn exchange_held(
        &self,
        id: u64,
        known: &Communicator,
        beside: &BTreeMap<DirectedLink, Beside>,
    ) -> Option<Rate> {
        let usage = known.coding.usage.iter().filter(|_| exchanges(known));
        let rates = usage.filter_map(|(link, part)| {
            let Beside { promised, takers } = beside.get(link)?;
            let others = promised.iter().filter(|(other, _)| **other != id).map(|(_, rate)| rate);
            let others = Some(others.sum::<f64>()).filter(|rate| *rate > 0.0)?;
            let rate = self.settings.topology.links().get(link.link.0)?.rate.0 as f64;
            let takers = takers + u32::from(promised.contains_key(&id));
            Some((rate - others).max(rate * LEAST) / (part * f64::from(takers.max(1))))
        });
        rates.min_by(f64::total_cmp).map(|rate| Rate(rate as u64))
    }

    /// The part of a ring's rate on each link that it crosses, as far as the ways of its connections are known.
    fn on_links(&self, known: &Communicator) -> BTreeMap<DirectedLink, f64> {
        let (order, links) = match &known.pending {
            Some(pending) => (&pending.order, &pending.links),
            None => (&known.order, &known.links),
        };
        let mut parts = BTreeMap::new();
        for hop in self.hops(known, order, links) {
            let part = 1.0 / hop.paths.len().max(1) as f64;
            for link in hop.paths.iter().flat_map(|path| path.links()) {
                *parts.entry(*link).or_default() += part;
            }
        }
        parts
    }

    /// By sender and receiver: what is held, where the sender can.
    pub(super) fn paces(&self, id: u64, order: &[u32], held: Held) -> BTreeMap<(u32, u32), u64> {
        let mut paces = BTreeMap::new();
        let Some(known) = self.communicators.get(&id).filter(|_| held != Held::default()) else {
            return paces;
        };
        let can = |member: &Member| {
            let session = member.session.and_then(|session| self.sessions.get(&session));
            session.is_some_and(|session| session.abilities.pace)
        };
        let able = (0_u32..).zip(&known.members).filter(|(_, member)| can(member));
        let able: BTreeSet<u32> = able.map(|(at, _)| at).collect();
        if let Some(Rate(others)) = held.others {
            let each = (others / (order.len() as u64).saturating_sub(1).max(1)).max(1);
            for from in &able {
                paces.extend(order.iter().filter(|to| *to != from).map(|to| ((*from, *to), each)));
            }
        }
        for hop @ (from, to) in order.iter().copied().zip(order.iter().copied().cycle().skip(1)) {
            paces.remove(&hop);
            if let Some(Rate(pace)) = held.ring.filter(|_| from != to && able.contains(&from)) {
                paces.insert(hop, pace);
            }
        }
        paces
    }
}
