//! Turns as whoever gives them may behave: never, late, twice, of another number, taken away again.

use super::scenario::{Incident, MILLISECOND, Scenario, generator};
use super::world::{Event, Input, World};
use harmonaize_core::{Interleaving, SlotId};
use harmonaize_plan::Participant;
use rand::RngExt;
use std::time::Duration;

/// What a participant has asked for.
#[derive(Debug, Default)]
pub(crate) struct SlotRequests {
    /// The turn that is not over, and when it was asked for.
    pub(crate) open: Option<(u64, u64)>,
    /// Whether it was given in time.
    pub(crate) given: bool,
    /// The highest so far.
    pub(crate) highest: Option<u64>,
}

impl Scenario {
    /// A participant takes turns, most often the first one. The rules change, and are given up in the end or not.
    pub(crate) fn turning(mut self) -> Self {
        let mut rng = generator(self.seed, 40);
        let all = self.group.participants();
        let leader = Participant(if rng.random_bool(0.8) { 0 } else { rng.random_range(0..all) });
        let mut at = 0;
        for _ in 0..rng.random_range(1..=4) {
            let rules = Interleaving {
                max_wait: Duration::from_nanos(rng.random_range(0..4 * MILLISECOND)),
                min_bytes: [0, 200, 2000][rng.random_range(0..3)],
                operations: rng.random_range(0..4),
                idle_timeout: Duration::from_nanos(
                    [0, MILLISECOND / 10, 2 * MILLISECOND][rng.random_range(0..3)],
                ),
            };
            let rules = rng.random_bool(0.8).then_some(rules);
            self.incidents.push((at, Incident::Turns(leader, rules)));
            at += rng.random_range(0..8 * MILLISECOND);
        }
        self
    }
}

impl World {
    pub(crate) fn ask_turn(&mut self, p: Participant, turn: u64) {
        let asked = &mut self.nodes[p.0 as usize].slot_requests;
        assert!(asked.open.is_none(), "turn {turn} is asked for while {asked:?}");
        assert!(
            asked.highest.is_none_or(|highest| highest < turn),
            "turn {turn} is asked for after {asked:?}"
        );
        *asked = SlotRequests { open: Some((turn, self.now)), given: false, highest: Some(turn) };
        self.statistics.slots[0] += 1;
        let soon = |world: &mut Self| world.now + world.rng.random_range(0..6 * MILLISECOND);
        match self.rng.random_range(0..4) {
            0 => {}
            kind => {
                // The last is given twice, and another that nobody waits for before.
                let others = [turn + 1, turn.wrapping_sub(1), turn];
                for other in others.iter().take(if kind == 3 { 3 } else { 0 }) {
                    let at = soon(self);
                    self.at(at, Event::Input(p, Input::TurnGiven(*other)));
                }
                let at = soon(self);
                self.at(at, Event::Input(p, Input::TurnGiven(turn)));
            }
        }
    }

    pub(crate) fn end_turn(&mut self, p: Participant, turn: u64) {
        let asked = &mut self.nodes[p.0 as usize].slot_requests;
        let open = asked.open.take();
        assert!(open.is_some_and(|(of, _)| of == turn), "turn {turn} ends, of {open:?}");
        self.statistics.slots[1] += u64::from(asked.given);
    }

    pub(crate) fn give_turn(&mut self, p: Participant, turn: u64) {
        let node = &mut self.nodes[p.0 as usize];
        node.slot_requests.given |= node.slot_requests.open.is_some_and(|(of, _)| of == turn);
        node.core.handle_slot_granted(SlotId(turn));
    }
}
