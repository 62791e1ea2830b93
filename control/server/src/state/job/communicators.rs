//! All communicators, and when something of each is due.

use crate::state::job::communicator::Communicator;
use crate::state::output::SessionId;
use harmonaize_abi::CommunicatorId;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;
use std::time::Duration;

/// Communicators by id. Whoever is lent to be changed is noted: its time is read anew until the next refresh.
#[derive(Debug, Default)]
pub(crate) struct Communicators {
    all: BTreeMap<CommunicatorId, Communicator>,
    /// When something of each is due, as of the last refresh.
    times: BTreeMap<CommunicatorId, Duration>,
    /// The same, the earliest first.
    by_time: BTreeSet<(Duration, CommunicatorId)>,
    /// Those that were added, lent or removed since.
    changed: BTreeSet<CommunicatorId>,
}

impl Deref for Communicators {
    type Target = BTreeMap<CommunicatorId, Communicator>;

    fn deref(&self) -> &Self::Target {
        &self.all
    }
}

impl Communicators {
    /// Adds a communicator, in place of any of this id.
    pub(crate) fn insert(&mut self, id: CommunicatorId, communicator: Communicator) {
        self.changed.insert(id);
        self.all.insert(id, communicator);
    }

    /// Removes a communicator and returns it.
    pub(crate) fn remove(&mut self, id: &CommunicatorId) -> Option<Communicator> {
        self.changed.insert(*id);
        self.all.remove(id)
    }

    /// Lends a communicator to be changed.
    pub(crate) fn get_mut(&mut self, id: &CommunicatorId) -> Option<&mut Communicator> {
        let communicator = self.all.get_mut(id)?;
        self.changed.insert(*id);
        Some(communicator)
    }

    /// Lends all to be changed.
    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut Communicator> {
        self.changed.extend(self.all.keys().copied());
        self.all.values_mut()
    }

    /// Returns when the next thing of any of them is due.
    pub(crate) fn next_timeout(&self) -> Option<Duration> {
        let unchanged = self.by_time.iter().find(|(_, id)| !self.changed.contains(id));
        let changed = self.changed.iter().filter_map(|id| self.all.get(id)?.next_timeout());
        changed.chain(unchanged.map(|(at, _)| *at)).min()
    }

    /// Returns those of which something is due by now, ascending.
    pub(crate) fn due(&self, now: Duration) -> Vec<CommunicatorId> {
        let unchanged = self.by_time.range(..=(now, CommunicatorId(u64::MAX))).map(|(_, id)| *id);
        let unchanged = unchanged.filter(|id| !self.changed.contains(id));
        let time = |id: &CommunicatorId| self.all.get(id)?.next_timeout();
        let changed = self.changed.iter().copied().filter(|id| time(id).is_some_and(|at| at <= now));
        let mut due: Vec<CommunicatorId> = unchanged.chain(changed).collect();
        due.sort_unstable();
        due
    }

    /// Notes the times of those that were changed.
    pub(crate) fn refresh(&mut self) {
        for id in std::mem::take(&mut self.changed) {
            let time = self.all.get(&id).and_then(Communicator::next_timeout);
            let before = match time {
                Some(at) => self.times.insert(id, at),
                None => self.times.remove(&id),
            };
            if let Some(before) = before {
                self.by_time.remove(&(before, id));
            }
            self.by_time.extend(time.map(|at| (at, id)));
        }
    }

    /// Waits until then for an agent whose session has ended: in communicators that are in use data go on.
    /// Returns how many those are, and the others, which form, with its ranks.
    pub(crate) fn await_agent(
        &mut self,
        session: SessionId,
        until: Duration,
    ) -> (usize, Vec<(CommunicatorId, Vec<u32>)>) {
        let (mut in_use, mut forming) = (0, Vec::new());
        let theirs = self.all.iter().filter(|(_, communicator)| communicator.index_of(session).is_some());
        for id in theirs.map(|(id, _)| *id).collect::<Vec<_>>() {
            let Some(communicator) = self.get_mut(&id) else { continue };
            let forms = communicator.is_forming();
            let member = communicator.members.iter_mut().find(|member| member.session == Some(session));
            let Some(member) = member.filter(|member| !member.closed) else { continue };
            if forms {
                forming.push((id, member.ranks.clone()));
            } else {
                (member.session, member.lease) = (None, Some(until));
                in_use += 1;
            }
        }
        (in_use, forming)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::job::codec::CodecState;
    use crate::state::job::communicator::Member;
    use crate::state::job::lifecycle::Lifecycle;
    use crate::state::job::refusals::Refusals;
    use harmonaize_abi::Epoch;
    use harmonaize_codec::Budget;
    use harmonaize_planner::{AggregatorId, Bytes, HostId, Tuning};
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha20Rng;
    use std::collections::VecDeque;

    fn idle() -> Communicator {
        let bytes = Bytes(1);
        Communicator {
            tenant: String::new(),
            name: String::new(),
            ranks: 1,
            members: vec![Member {
                host: HostId(0),
                session: None,
                lease: None,
                ranks: vec![0],
                requests: Vec::new(),
                departed: BTreeSet::new(),
                closed: false,
            }],
            tuning: Tuning {
                channels: 1,
                chunk: bytes,
                segment: bytes,
                copy_threshold: bytes,
                landing_slots: 1,
            },
            lifecycle: Lifecycle::New,
            next_epoch: Epoch(1),
            last_change: String::new(),
            pinned: false,
            changes: VecDeque::new(),
            backoff_until: None,
            failures: 0,
            coding: CodecState::new(Budget::Exact),
            refused: Refusals::default(),
            before: Vec::new(),
            succeeds: None,
            restarted: false,
        }
    }

    /// Changes one of the things by which a communicator is due: to `at`, or so that it is not by that.
    fn change(communicator: &mut Communicator, which: u64, at: Option<Duration>) {
        match (which, at) {
            (0, _) => communicator.backoff_until = at,
            (1, _) => communicator.coding.again = at,
            (2, _) => communicator.members.iter_mut().for_each(|member| member.lease = at),
            (_, Some(at)) => communicator.refused.refuse(at, AggregatorId(0), "full"),
            (_, None) => communicator.refused.forget(AggregatorId(0)),
        }
    }

    #[test]
    fn times_are_those_of_a_scan() {
        for seed in 0..100_u64 {
            let mut random = ChaCha20Rng::seed_from_u64(seed);
            let mut draw = |below: u64| random.next_u64() % below;
            let mut all = Communicators::default();
            for step in 0..300 {
                let id = CommunicatorId(draw(8));
                let at = Some(Duration::from_secs(draw(40))).filter(|_| draw(3) > 0);
                match draw(8) {
                    0 => all.insert(id, idle()),
                    1 => drop(all.remove(&id)),
                    2 => all.refresh(),
                    3 => all.values_mut().for_each(|communicator| change(communicator, draw(4), at)),
                    _ => {
                        if let Some(communicator) = all.get_mut(&id) {
                            change(communicator, draw(4), at);
                        }
                    }
                }
                let now = Duration::from_secs(draw(40));
                let due =
                    |communicator: &Communicator| communicator.next_timeout().is_some_and(|at| at <= now);
                let scanned: Vec<CommunicatorId> =
                    all.iter().filter(|(_, communicator)| due(communicator)).map(|(id, _)| *id).collect();
                let first = all.values().filter_map(Communicator::next_timeout).min();
                assert_eq!((all.next_timeout(), all.due(now)), (first, scanned), "seed {seed}, step {step}");
            }
        }
    }
}
