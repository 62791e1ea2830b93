//! Whose turn it is: flows share a resource by weight, in any units of cost.

/// A weight's share of one unit of cost, as a fraction of this.
const SCALE: u64 = 1 << 10;

/// Start-time fair queueing by weight (Goyal, Vin, Cheng, SIGCOMM 1996), with costs that are known only after a turn.
///
/// Each flow has a start: what it has used, over its weight. The active flow with the least start has the next turn. A flow that
/// becomes active begins where the others are, so that it keeps no credit for the time in which it was idle, and keeps its debt.
/// With `n` active flows, a flow waits at most for one turn of each of the others per turn of the same cost over weight.
///
/// Cost: a look at each active flow in [`Scheduler::next_turn`], and no allocation but for a new flow.
#[derive(Debug, Default)]
pub struct Scheduler {
    flows: Vec<Flow>,
    /// Those with work, in no order.
    active: Vec<u32>,
    /// The start of the flow that had the last turn.
    now: u64,
}

#[derive(Clone, Copy, Debug)]
struct Flow {
    weight: u32,
    /// Wraps around; differences count.
    start: u64,
    active: bool,
}

impl Flow {
    /// How far its start is behind another.
    fn behind(&self, other: u64) -> i64 {
        self.start.wrapping_sub(other).cast_signed()
    }
}

impl Scheduler {
    /// Gives a flow its weight, at least 1. Flows are numbered from 0, densely.
    pub fn set_weight(&mut self, flow: u32, weight: u32) {
        let index = flow as usize;
        if self.flows.len() <= index {
            self.flows.resize(index + 1, Flow { weight: 1, start: self.now, active: false });
        }
        if let Some(flow) = self.flows.get_mut(index) {
            flow.weight = weight.max(1);
        }
        let more = self.flows.len().saturating_sub(self.active.len());
        self.active.reserve(more);
    }

    /// A flow has work. One that was never given a weight is not known.
    pub fn activate(&mut self, flow: u32) {
        let Some(known) = self.flows.get_mut(flow as usize).filter(|known| !known.active) else { return };
        if known.behind(self.now) < 0 {
            known.start = self.now;
        }
        known.active = true;
        self.active.push(flow);
    }

    /// A flow has no work any more.
    pub fn deactivate(&mut self, flow: u32) {
        let Some(known) = self.flows.get_mut(flow as usize).filter(|known| known.active) else { return };
        known.active = false;
        if let Some(at) = self.active.iter().position(|active| *active == flow) {
            self.active.swap_remove(at);
        }
    }

    /// The flow whose turn it is, if any is active. It stays so until it is charged or deactivated.
    pub fn next_turn(&mut self) -> Option<u32> {
        let starts = self.active.iter().filter_map(|flow| Some((self.flows.get(*flow as usize)?, *flow)));
        let (flow, number) = starts.min_by_key(|(flow, _)| flow.behind(self.now))?;
        self.now = flow.start;
        Some(number)
    }

    /// A flow has had a turn that cost so much; nothing counts as 1.
    pub fn charge(&mut self, flow: u32, cost: u64) {
        if let Some(flow) = self.flows.get_mut(flow as usize) {
            let cost = cost.clamp(1, u64::MAX >> 24).wrapping_mul(SCALE);
            flow.start = flow.start.wrapping_add((cost / u64::from(flow.weight)).max(1));
        }
    }

    /// Whether any flow is active.
    pub fn any_active(&self) -> bool {
        !self.active.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn scheduler(weights: &[u32]) -> Scheduler {
        let mut scheduler = Scheduler::default();
        for (flow, weight) in (0..).zip(weights) {
            scheduler.set_weight(flow, *weight);
        }
        scheduler
    }

    #[test]
    fn nobody_has_a_turn_where_nobody_is_active() {
        let mut scheduler = scheduler(&[1, 1]);
        assert_eq!(scheduler.next_turn(), None);
        scheduler.activate(1);
        scheduler.activate(7);
        assert_eq!((scheduler.next_turn(), scheduler.any_active()), (Some(1), true));
        scheduler.deactivate(1);
        assert_eq!((scheduler.next_turn(), scheduler.any_active()), (None, false));
    }

    #[test]
    fn who_comes_back_from_idleness_has_no_credit() {
        let mut scheduler = scheduler(&[1, 1]);
        scheduler.activate(0);
        for _ in 0..1000 {
            assert_eq!(scheduler.next_turn(), Some(0));
            scheduler.charge(0, 100);
        }
        scheduler.activate(1);
        let turns = std::iter::repeat_with(|| {
            let turn = scheduler.next_turn().unwrap();
            scheduler.charge(turn, 100);
            turn
        });
        let turns: Vec<_> = turns.take(100).collect();
        let of_newcomer = turns.iter().filter(|turn| **turn == 1).count();
        assert!((50..=51).contains(&of_newcomer), "{of_newcomer} of 100 turns");
        assert!(turns.iter().take(2).any(|turn| *turn == 1), "who was idle has one of the next turns");
    }

    #[test]
    fn who_is_idle_for_a_moment_keeps_its_debt() {
        let mut scheduler = scheduler(&[1, 1]);
        [0, 1].into_iter().for_each(|flow| scheduler.activate(flow));
        let first = scheduler.next_turn().unwrap();
        scheduler.charge(first, 1000);
        scheduler.deactivate(first);
        scheduler.activate(first);
        for _ in 0..10 {
            let turn = scheduler.next_turn().unwrap();
            assert_ne!(turn, first);
            scheduler.charge(turn, 100);
        }
    }

    #[test]
    fn starts_may_wrap_around() {
        let mut scheduler = scheduler(&[1, 1]);
        scheduler.now = u64::MAX - 1000 * SCALE;
        [0, 1].into_iter().for_each(|flow| {
            scheduler.flows[flow as usize].start = scheduler.now;
            scheduler.activate(flow);
        });
        let mut used = [0; 2];
        for _ in 0..10_000 {
            let turn = scheduler.next_turn().unwrap();
            scheduler.charge(turn, 1);
            used[turn as usize] += 1;
        }
        assert_eq!(used, [5000, 5000]);
    }

    proptest! {
        #[test]
        fn shares_are_by_weight_whatever_a_turn_costs(
            weights in proptest::collection::vec(1..=64_u32, 2..8),
            costs in proptest::collection::vec(1..200_000_u64, 64),
        ) {
            let mut scheduler = scheduler(&weights);
            let mut used = vec![0_u64; weights.len()];
            (0..weights.len() as u32).for_each(|flow| scheduler.activate(flow));
            for cost in costs.iter().cycle().take(100_000) {
                let turn = scheduler.next_turn().unwrap();
                scheduler.charge(turn, *cost);
                used[turn as usize] += cost;
            }
            let (all, whole) = (used.iter().sum::<u64>() as f64, weights.iter().sum::<u32>());
            for (used, weight) in used.iter().zip(&weights) {
                let due = all * f64::from(*weight) / f64::from(whole);
                prop_assert!((*used as f64 - due).abs() <= due * 0.05 + 400_000.0, "{used} of {due}");
            }
        }

        #[test]
        fn nobody_starves_beside_flows_that_come_and_go(
            seed in proptest::collection::vec((0..4_u32, any::<bool>(), 1..1000_u64), 1000),
        ) {
            let mut scheduler = scheduler(&[64, 8, 1, 1]);
            let (mut waited, mut turns) = (0_u64, 0);
            for (flow, comes, cost) in seed {
                // Flow 3 always has work.
                scheduler.activate(3);
                if comes { scheduler.activate(flow) } else { scheduler.deactivate(flow) }
                scheduler.activate(3);
                let turn = scheduler.next_turn().unwrap();
                scheduler.charge(turn, cost);
                if turn == 3 { (waited, turns) = (0, turns + 1) } else { waited += cost }
                // Its longest turn, times the others' weights over its own, and a last turn of each.
                prop_assert!(waited <= 1000 * (64 + 8 + 1) + 3 * 1000, "waits for {waited}");
            }
            prop_assert!(turns > 0);
        }
    }
}
