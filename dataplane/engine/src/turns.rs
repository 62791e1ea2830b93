//! Which communicator runs next: tenants by their weights, and within a tenant classes and deadlines.

use crate::table::Key;
use harmonaize_core::Nanos;
use harmonaize_transport::{Scheduler, TrafficClass};
use std::cmp::Reverse;

/// Engine time after which the network and new descriptors are looked at again, with any tenant's work left. A turn lasts that long, and
/// until the [slice](crate::slices) of an action that is under way is done.
pub(crate) const SLICE: Nanos = Nanos(50_000);

/// Bytes to and from peers that count as much as a nanosecond. They count beside the time that they took here: the kernel moves
/// them in the network's turn.
const CARRIED_PER_NANOSECOND: u64 = 4;

/// Bytes of memory read and written that count as a nanosecond. They count where that is more than the time that they took. No memory is
/// as slow, so tenants share by bytes, whosever tensors are in the cache; who makes bytes slower than that is charged for the time.
const TOUCHED_PER_NANOSECOND: u64 = 8;

/// The classes' weights within a tenant. An urgent operation has the next turn, and many of them leave something to the others.
const CLASS_WEIGHTS: [u32; CLASSES] = [64, 8, 1];

pub(crate) const CLASSES: usize = TrafficClass::ALL.len();

/// The class below the others, as descriptors name it. To the network it is bulk.
const BACKGROUND: u8 = 4;

/// Sizes of operations that name no class, in bytes. Up to the first they are of the class latency, and above the
/// other of the class bulk.
const SMALL: u64 = 64 << 10;
const LARGE: u64 = 1 << 20;

/// How urgent an operation is among its tenant's: the least goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub(crate) struct Urgency {
    /// Below every class: it waits for [gaps](crate::gaps). After a hand-over it is of the class bulk.
    #[serde(skip)]
    pub(crate) background: bool,
    pub(crate) class: TrafficClass,
    pub(crate) priority: Reverse<u8>,
    /// When it is to end; the last of all times where it does not say.
    pub(crate) deadline: Nanos,
    /// The step of the tenant's job that it belongs to. It is the last of all where the operation does not say, and
    /// after a hand-over.
    #[serde(skip, default = "no_iteration")]
    pub(crate) iteration: u64,
}

/// Of an operation that does not say its iteration.
fn no_iteration() -> u64 {
    u64::MAX
}

impl Default for Urgency {
    fn default() -> Self {
        Self::IDLE
    }
}

impl Urgency {
    /// From a descriptor: class and priority as it says, the deadline from now, and no iteration.
    pub(crate) fn new(now: Nanos, bytes: u64, (class, priority, deadline_ns): (u8, u8, u64)) -> Self {
        let background = class == BACKGROUND;
        let class = match class {
            1 => TrafficClass::Latency,
            2 => TrafficClass::Normal,
            3 | BACKGROUND => TrafficClass::Bulk,
            _ if bytes <= SMALL => TrafficClass::Latency,
            _ if bytes <= LARGE => TrafficClass::Normal,
            _ => TrafficClass::Bulk,
        };
        let deadline = match deadline_ns {
            0 => Nanos(u64::MAX),
            within => Nanos(now.0.saturating_add(within)),
        };
        Self { background, class, priority: Reverse(priority), deadline, ..Self::IDLE }
    }

    /// The same of a step of the job; 0: it does not say of which.
    pub(crate) fn of_iteration(self, iteration: u64) -> Self {
        Self { iteration: if iteration == 0 { u64::MAX } else { iteration }, ..self }
    }

    /// That of a communicator without operations: what it has to do is short.
    pub(crate) const IDLE: Self = Self {
        background: false,
        class: TrafficClass::Latency,
        priority: Reverse(0),
        deadline: Nanos(u64::MAX),
        iteration: u64::MAX,
    };

    /// Takes the higher priority, the earlier deadline and the earlier iteration.
    pub(crate) fn raise(&mut self, other: &Self) {
        self.priority = self.priority.min(other.priority);
        self.deadline = self.deadline.min(other.deadline);
        self.iteration = self.iteration.min(other.iteration);
    }

    /// Whether it asks for more than its class.
    pub(crate) fn is_special(&self) -> bool {
        let of = |urgency: &Self| (urgency.priority, urgency.deadline, urgency.iteration);
        of(self) != of(&Self::IDLE)
    }
}

/// The order of turns.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    scheduler: Scheduler,
    tenants: Vec<Tenant>,
}

/// A tenant's communicators here that do not rest.
#[derive(Debug, Default)]
struct Tenant {
    /// In the order in which equals have turns.
    communicators: Vec<Key>,
    classes: Scheduler,
    /// Those of one turn, by urgency.
    order: Vec<(Urgency, usize, Key)>,
}

/// What a turn of a communicator came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Turn {
    /// Actions and frames.
    pub(crate) worked: usize,
    /// Bytes to and from peers.
    pub(crate) carried: u64,
    /// Bytes of memory that were read and written.
    pub(crate) touched: u64,
    /// Nanoseconds that other threads took for it meanwhile.
    pub(crate) helped: u64,
    /// Whether it ended for want of time, with work left.
    pub(crate) unfinished: bool,
}

impl Turn {
    /// What it costs its tenant, in nanoseconds, if it took so many.
    fn cost(&self, took: u64) -> u64 {
        let took = took.saturating_add(self.helped);
        took.max(self.touched / TOUCHED_PER_NANOSECOND) + self.carried / CARRIED_PER_NANOSECOND
    }
}

/// What a turn of a tenant came to.
#[derive(Clone, Copy, Debug, Default)]
struct Spent {
    worked: usize,
    /// In nanoseconds.
    cost: u64,
    /// Whether it ended for want of time, with work left.
    unfinished: bool,
}

/// What [`Turns::run`] drives.
pub(crate) trait Work {
    /// The time, which never goes back.
    fn now(&self) -> Nanos;
    /// Whether there is a single communicator, whether or not it rests.
    fn alone(&self) -> bool;
    /// How urgent a communicator is; none if it is gone.
    fn urgency(&self, key: Key) -> Option<Urgency>;
    /// Runs a communicator until it has no more to do, or the time has come. Without a time it ends after a bounded
    /// number of actions.
    fn run(&mut self, now: Nanos, key: Key, until: Option<Nanos>) -> Turn;
}

impl Turns {
    /// A communicator has formed. It is forgotten in the first turn after its end.
    pub(crate) fn enter(&mut self, tenant: u32, weight: u32, key: Key) {
        let index = tenant as usize;
        if self.tenants.len() <= index {
            self.tenants.resize_with(index + 1, Tenant::default);
        }
        self.scheduler.set_weight(tenant, weight);
        if let Some(tenant) = self.tenants.get_mut(index) {
            for (class, weight) in (0..).zip(CLASS_WEIGHTS) {
                tenant.classes.set_weight(class, weight);
            }
        }
        self.wake(tenant, key);
    }

    /// A communicator that has formed has turns again.
    pub(crate) fn wake(&mut self, tenant: u32, key: Key) {
        if let Some(tenant) = self.tenants.get_mut(tenant as usize) {
            tenant.communicators.push(key);
            tenant.order.reserve(tenant.communicators.len());
        }
    }

    /// Puts communicators that have turns into `order`, of each tenant the most urgent first. Those for which `urgency` is none are left out.
    ///
    /// Cost: a look at each, and a sort of each tenant's.
    pub(crate) fn sort(
        &self,
        order: &mut Vec<(Urgency, usize, Key)>,
        mut urgency: impl FnMut(Key) -> Option<Urgency>,
    ) {
        order.clear();
        for tenant in &self.tenants {
            let first = order.len();
            let known = tenant.communicators.iter().enumerate();
            order.extend(known.filter_map(|(at, key)| Some((urgency(*key)?, at, *key))));
            if let Some(own) = order.get_mut(first..) {
                own.sort_unstable_by_key(|(urgency, at, _)| (*urgency, *at));
            }
        }
    }

    /// Communicators that have turns.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Key> {
        self.tenants.iter().flat_map(|tenant| tenant.communicators.iter().copied())
    }

    /// Has those rest for which `goes_on` is false.
    pub(crate) fn retain(&mut self, mut goes_on: impl FnMut(Key) -> bool) {
        self.tenants.iter_mut().for_each(|tenant| tenant.communicators.retain(|key| goes_on(*key)));
    }

    /// Gives turns until nobody has work, or a slice is used up. Returns how much was done.
    ///
    /// Cost: beside the work a look at each tenant, each communicator that does not rest, and two at the clock for each turn; with a single communicator
    /// there is nothing to choose, and none of that.
    pub(crate) fn run(&mut self, now: Nanos, work: &mut dyn Work) -> usize {
        if work.alone() {
            // Those that have ended are among these until the next tick.
            let left = self.iter().find(|key| work.urgency(*key).is_some());
            return left.map_or(0, |key| work.run(now, key, None).worked);
        }
        for (number, tenant) in (0..).zip(&self.tenants) {
            if !tenant.communicators.is_empty() {
                self.scheduler.activate(number);
            }
        }
        let mut worked = 0;
        let mut clock = work.now();
        let until = Nanos(clock.0.saturating_add(SLICE.0));
        while let Some(number) = self.scheduler.next_turn() {
            let Some(tenant) = self.tenants.get_mut(number as usize) else { break };
            let Spent { worked: done, cost, unfinished } = tenant.run(&mut clock, until, work);
            if done > 0 {
                self.scheduler.charge(number, cost);
                worked += done;
            }
            if !unfinished {
                self.scheduler.deactivate(number);
            }
            if clock >= until {
                break;
            }
        }
        worked
    }
}

impl Tenant {
    /// One turn of the tenant. Moves the clock on.
    fn run(&mut self, clock: &mut Nanos, until: Nanos, work: &mut dyn Work) -> Spent {
        self.communicators.retain(|key| work.urgency(*key).is_some());
        self.order.clear();
        let known = self.communicators.iter().enumerate();
        self.order.extend(known.filter_map(|(at, key)| Some((work.urgency(*key)?, at, *key))));
        self.order.sort_unstable_by_key(|(urgency, at, _)| (*urgency, *at));
        self.order.iter().for_each(|(urgency, ..)| self.classes.activate(urgency.class as u32));
        let mut sum = Spent::default();
        while let Some(class) = self.classes.next_turn() {
            let mut unfinished = false;
            for (_, at, key) in self.order.iter().filter(|(urgency, ..)| urgency.class as u32 == class) {
                if *clock >= until {
                    unfinished = true;
                    break;
                }
                let turn = work.run(*clock, *key, Some(until));
                if turn.worked == 0 {
                    continue;
                }
                let began = std::mem::replace(clock, work.now());
                let cost = turn.cost(clock.0.saturating_sub(began.0));
                self.classes.charge(class, cost);
                sum.worked += turn.worked;
                sum.cost += cost;
                if turn.unfinished {
                    unfinished = true;
                    // Equals take turns: the next begins behind this one.
                    let behind = (*at + 1) % self.communicators.len().max(1);
                    self.communicators.rotate_left(behind);
                    break;
                }
            }
            if !unfinished {
                self.classes.deactivate(class);
            }
            if *clock >= until {
                sum.unfinished = self.classes.any_active();
                break;
            }
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Communicators that have so much work, and a clock that work alone moves.
    #[derive(Default)]
    struct Fake {
        clock: u64,
        members: Vec<Member>,
    }

    struct Member {
        urgency: Urgency,
        /// Actions that it has to do, each of which lasts so long and moves so many bytes.
        actions: u64,
        lasts: u64,
        bytes: u64,
        /// What another thread takes for each.
        helped: u64,
        /// Actions done, and time used.
        done: u64,
        used: u64,
        /// When it had its last action.
        last: u64,
        gone: bool,
    }

    impl Fake {
        fn enter(
            &mut self,
            turns: &mut Turns,
            (tenant, weight): (u32, u32),
            (actions, lasts): (u64, u64),
        ) -> usize {
            let at = self.members.len();
            let urgency = Urgency::IDLE;
            let (bytes, helped, done, used, last, gone) = (0, 0, 0, 0, 0, false);
            let member = Member { urgency, actions, lasts, bytes, helped, done, used, last, gone };
            self.members.push(member);
            turns.enter(tenant, weight, Key { index: at as u16, generation: 1 });
            at
        }

        fn run_for(&mut self, turns: &mut Turns, nanoseconds: u64) {
            let end = self.clock + nanoseconds;
            while self.clock < end {
                if turns.run(Nanos(self.clock), self) == 0 {
                    self.clock += 1000;
                }
            }
        }

        fn used(&self, members: &[usize]) -> f64 {
            members.iter().map(|at| self.members[*at].used).sum::<u64>() as f64
        }
    }

    impl Work for Fake {
        fn now(&self) -> Nanos {
            Nanos(self.clock)
        }

        fn alone(&self) -> bool {
            self.members.iter().filter(|member| !member.gone).count() <= 1
        }

        fn urgency(&self, key: Key) -> Option<Urgency> {
            let member = &self.members[usize::from(key.index)];
            (!member.gone).then_some(member.urgency)
        }

        fn run(&mut self, _: Nanos, key: Key, until: Option<Nanos>) -> Turn {
            let member = &mut self.members[usize::from(key.index)];
            let (mut worked, mut bytes, mut helped) = (0, 0, 0);
            while member.actions > 0 && !member.gone {
                member.actions -= 1;
                self.clock += member.lasts;
                (member.done, member.used, member.last) =
                    (member.done + 1, member.used + member.lasts, self.clock);
                worked += 1;
                bytes += member.bytes;
                helped += member.helped;
                if until.map_or(worked == 32, |until| self.clock >= until.0) {
                    return Turn { worked, carried: bytes, touched: 0, helped, unfinished: true };
                }
            }
            Turn { worked, carried: bytes, touched: 0, helped, unfinished: false }
        }
    }

    const ENDLESS: u64 = u64::MAX;

    fn close(used: f64, due: f64) -> bool {
        (used - due).abs() <= 0.05 * due
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn tenants_share_by_weight_whatever_they_have_and_do(
            communicators in proptest::array::uniform3(1..=64_usize),
            lasts in proptest::array::uniform3(500..200_000_u64),
        ) {
            let (mut turns, mut fake) = (Turns::default(), Fake::default());
            let mut of = [const { Vec::new() }; 3];
            for (tenant, weight) in [(0_u32, 1_u32), (1, 2), (2, 4)] {
                for _ in 0..communicators[tenant as usize] {
                    let work = (ENDLESS, lasts[tenant as usize]);
                    of[tenant as usize].push(fake.enter(&mut turns, (tenant, weight), work));
                }
            }
            fake.run_for(&mut turns, 2_000_000_000);
            let all: f64 = of.iter().map(|of| fake.used(of)).sum();
            for (of, weight) in of.iter().zip([1.0, 2.0, 4.0]) {
                prop_assert!(close(fake.used(of), all * weight / 7.0), "{} of {all} by {weight}", fake.used(of));
                let least = of.iter().map(|at| fake.members[*at].done).min().unwrap();
                let most = of.iter().map(|at| fake.members[*at].done).max().unwrap();
                prop_assert!(most <= 2 * least + 200, "equals of a tenant have {least} to {most} actions");
            }
        }

        #[test]
        fn what_a_tenant_says_of_urgency_changes_nothing_for_others(
            class in 0..=4_u8,
            priority in any::<u8>(),
            deadline_ns in any::<u64>(),
            iteration in any::<u64>(),
        ) {
            let (mut turns, mut fake) = (Turns::default(), Fake::default());
            let honest = fake.enter(&mut turns, (0, 1), (ENDLESS, 30_000));
            let liars: Vec<_> = (0..8).map(|_| fake.enter(&mut turns, (1, 1), (ENDLESS, 30_000))).collect();
            for at in &liars {
                let urgency = Urgency::new(Nanos(0), 1, (class, priority, deadline_ns));
                fake.members[*at].urgency = urgency.of_iteration(iteration);
            }
            fake.members[honest].urgency = Urgency::new(Nanos(0), 1, (3, 0, 0));
            fake.run_for(&mut turns, 500_000_000);
            prop_assert!(close(fake.used(&[honest]), fake.used(&liars)));
        }
    }

    #[test]
    fn bytes_to_peers_count_beside_time() {
        let (mut turns, mut fake) = (Turns::default(), Fake::default());
        let [here, there] = [0, 1].map(|tenant| fake.enter(&mut turns, (tenant, 1), (ENDLESS, 10_000)));
        fake.members[there].bytes = 10_000 * CARRIED_PER_NANOSECOND;
        fake.run_for(&mut turns, 200_000_000);
        assert!(close(fake.used(&[here]), 2.0 * fake.used(&[there])));
    }

    #[test]
    fn time_of_helping_threads_counts_as_its_own() {
        let (mut turns, mut fake) = (Turns::default(), Fake::default());
        let [alone, helped] = [0, 1].map(|tenant| fake.enter(&mut turns, (tenant, 1), (ENDLESS, 10_000)));
        fake.members[helped].helped = 10_000;
        fake.run_for(&mut turns, 200_000_000);
        assert!(close(fake.used(&[alone]), 2.0 * fake.used(&[helped])));
    }

    #[test]
    fn a_small_tenant_waits_for_a_slice_at_most() {
        let (mut turns, mut fake) = (Turns::default(), Fake::default());
        let small = fake.enter(&mut turns, (0, 1), (0, 1000));
        for _ in 0..64 {
            fake.enter(&mut turns, (1, 1), (ENDLESS, 40_000));
        }
        for _ in 0..200 {
            fake.run_for(&mut turns, 333_000);
            let asked = fake.clock;
            fake.members[small].actions = 3;
            let work = turns.run(Nanos(asked), &mut fake);
            assert!(work > 0);
            if fake.members[small].actions > 0 {
                turns.run(Nanos(fake.clock), &mut fake);
            }
            let waited = fake.members[small].last - asked;
            assert!(fake.members[small].actions == 0 && waited <= SLICE.0 + 43_000, "waits {waited} ns");
        }
    }

    #[test]
    fn urgent_operations_go_first_and_leave_something() {
        let (mut turns, mut fake) = (Turns::default(), Fake::default());
        let bulk = fake.enter(&mut turns, (0, 1), (ENDLESS, 20_000));
        let latency = fake.enter(&mut turns, (0, 1), (0, 2000));
        fake.members[bulk].urgency = Urgency::new(Nanos(0), 64 << 20, (0, 0, 0));
        for _ in 0..100 {
            fake.run_for(&mut turns, 100_000);
            fake.members[latency].actions = 1;
            let asked = fake.clock;
            turns.run(Nanos(asked), &mut fake);
            assert_eq!(fake.members[latency].last, asked + 2000, "the first action is the urgent one");
        }
        fake.members[latency].actions = ENDLESS;
        let before = fake.members[bulk].used;
        fake.run_for(&mut turns, 500_000_000);
        let bulk = fake.members[bulk].used - before;
        assert!((3_000_000..30_000_000).contains(&bulk), "bulk has {bulk} ns of 500 ms");
    }

    /// The places of what has class, priority and deadline like this, in the order of its turns.
    fn order_of<const N: usize>(says: [(u8, u8, u64); N]) -> [usize; N] {
        let (mut turns, mut fake) = (Turns::default(), Fake::default());
        let members = says.map(|says| {
            let at = fake.enter(&mut turns, (0, 1), (1, 1000));
            fake.members[at].urgency = Urgency::new(Nanos(0), 1, says);
            at
        });
        turns.run(Nanos(0), &mut fake);
        let mut order = std::array::from_fn(|place| place);
        order.sort_unstable_by_key(|place: &usize| fake.members[members[*place]].last);
        order
    }

    #[test]
    fn within_a_class_priority_then_deadline_decide() {
        let says = [(3, 0, 0), (3, 0, 9_000_000), (3, 0, 5_000_000), (3, 1, 0), (1, 0, 0)];
        assert_eq!(order_of(says), [4, 3, 2, 1, 0]);
    }

    #[test]
    fn what_is_below_every_class_goes_last() {
        assert_eq!(order_of([(4, 255, 1), (3, 0, 0), (4, 0, 0), (2, 0, 0)]), [3, 1, 0, 2]);
    }

    #[test]
    fn among_equals_the_smallest_iteration_goes_first() {
        let (mut turns, mut fake) = (Turns::default(), Fake::default());
        // Class and deadline, iteration.
        let says =
            [((3, 0), 0), ((3, 0), 12), ((3, 0), 7), ((3, 9_000), 12), ((3, 5_000), 99), ((2, 0), 100)];
        let members = says.map(|((class, deadline), iteration)| {
            let at = fake.enter(&mut turns, (0, 1), (1, 1000));
            let urgency = Urgency::new(Nanos(0), 1, (class, 0, deadline));
            fake.members[at].urgency = urgency.of_iteration(iteration);
            at
        });
        turns.run(Nanos(0), &mut fake);
        let mut order = members;
        order.sort_unstable_by_key(|at| fake.members[*at].last);
        assert_eq!(order, [5, 4, 3, 2, 1, 0].map(|at: usize| members[at]));
    }

    #[test]
    fn a_communicator_is_of_its_oldest_iteration() {
        let call = |iteration| Urgency::new(Nanos(0), 1, (3, 0, 0)).of_iteration(iteration);
        let mut all = Urgency::IDLE;
        assert!(!call(0).is_special() && call(5).is_special());
        [0, 9, 5, 7].into_iter().for_each(|iteration| all.raise(&call(iteration)));
        assert_eq!(all, Urgency { iteration: 5, ..Urgency::IDLE });
    }

    #[test]
    fn packets_go_in_the_order_of_urgency_within_each_tenant() {
        let (mut turns, mut fake) = (Turns::default(), Fake::default());
        let classes = [(1, 3), (0, 3), (1, 1), (0, 2), (0, 3), (1, 2)];
        for (tenant, class) in classes {
            let at = fake.enter(&mut turns, (tenant, 1), (1, 1000));
            fake.members[at].urgency = Urgency::new(Nanos(0), 1, (class, 0, 0));
        }
        let mut order = Vec::new();
        turns.sort(&mut order, |key| (key.index != 4).then(|| fake.members[usize::from(key.index)].urgency));
        let keys: Vec<_> = order.iter().map(|(_, _, key)| key.index).collect();
        assert_eq!(keys, [3, 1, 2, 5, 0], "equals as they came, and one left out");
    }

    #[test]
    fn a_communicator_that_is_gone_is_forgotten() {
        let (mut turns, mut fake) = (Turns::default(), Fake::default());
        let members = [0, 1, 2].map(|tenant| fake.enter(&mut turns, (tenant, 1), (100, 1000)));
        fake.members[members[0]].gone = true;
        while turns.run(Nanos(fake.clock), &mut fake) > 0 {}
        assert_eq!(members.map(|at| fake.members[at].done), [0, 100, 100]);
        assert_eq!(turns.iter().count(), 2);
    }

    /// Else its loop would find no work, and sleep over what it has.
    #[test]
    fn who_is_left_alone_has_the_next_turn() {
        let (mut turns, mut fake) = (Turns::default(), Fake::default());
        let [gone, stays] = [0, 1].map(|tenant| fake.enter(&mut turns, (tenant, 1), (100, 1000)));
        fake.members[gone].gone = true;
        assert_eq!((turns.run(Nanos(0), &mut fake), fake.members[stays].done), (32, 32));
    }
}
