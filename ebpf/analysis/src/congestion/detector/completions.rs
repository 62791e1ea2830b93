//! Own queue pairs, whose messages the engine times.

use super::{Detector, push};
use crate::congestion::completion::CompletionMonitor;
use crate::congestion::{Link, Path};
use crate::trace::Completion;
use harmonaize_events::Direction;
use std::collections::btree_map::Entry;

impl Detector {
    /// A message over an own queue pair has completed.
    pub(super) fn completion(&mut self, message: &Completion) {
        let flow = &message.flow;
        let stated = self.interfaces.get(&flow.interface).map_or(0, |one| one.bytes_per_second);
        if stated == 0 {
            return;
        }
        let path = Path::QueuePair { address: flow.remote, number: flow.queue_pair };
        let link = Link { interface: flow.interface, direction: Direction::Egress, path };
        let full = self.completions.len() >= self.limits.max_links;
        let monitor = match self.completions.entry(link) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(_) if full => {
                self.unplaced += 1;
                return;
            }
            Entry::Vacant(place) => place.insert(CompletionMonitor::new(link, &self.limits)),
        };
        if let Some(found) = monitor.take(message, stated, &self.limits) {
            push(&mut self.found, &mut self.lost, &self.limits, found);
        }
    }

    /// Ends states of queue pairs that send nothing, and forgets those that were silent for long.
    pub(super) fn end_completions(&mut self) {
        let Self { completions, found, lost, limits, now, .. } = self;
        completions.retain(|_, monitor| {
            if let Some(ended) = monitor.advance(*now, limits) {
                push(found, lost, limits, ended);
            }
            !monitor.is_old(*now, limits)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::congestion::{Congestion, Limits};
    use crate::trace::{self, Label, Record};
    use harmonaize_abi::{CongestionCause, CongestionLevel, Nanos};
    use harmonaize_events::{FlowKey, Protocol};

    const MS: u64 = 1_000_000;
    const US: u64 = 1_000;
    /// Of 10 Gbit/s, in bytes a second.
    const RATE: u64 = 1_250_000_000;
    /// What the link takes for a message.
    const MIB: u64 = 1 << 20;
    const SENDING: u64 = MIB * 1_000_000_000 / RATE;

    struct World {
        detector: Detector,
        time_ns: u64,
    }

    impl World {
        /// An interface with a rate, or none.
        fn new(bytes_per_second: u64) -> Self {
            let mut detector = Detector::new(Limits::default());
            let (interface, name) = (7, Label::new("eth0"));
            let link = trace::Link { time_ns: 0, interface, name, bytes_per_second, watched: true };
            detector.take(&Record::Link(link));
            Self { detector, time_ns: 1000 * MS }
        }

        fn pass(&mut self, ms: u64) -> Vec<CongestionLevel> {
            self.time_ns += ms * MS;
            self.detector.advance(Nanos(self.time_ns));
            self.found().iter().map(|found| found.level).collect()
        }

        /// What was found after messages, a millisecond apart, that took so long.
        fn send(&mut self, took_ns: &[u64], bytes: u64) -> Vec<CongestionLevel> {
            let mut levels = Vec::new();
            for took_ns in took_ns {
                let flow = FlowKey {
                    interface: 7,
                    remote: FlowKey::mapped(2),
                    queue_pair: 18,
                    protocol: Protocol::Roce as u8,
                    direction: Direction::Egress as u8,
                    ..FlowKey::default()
                };
                let time_ns = self.time_ns + MS;
                self.detector.take(&Record::Completion(Completion {
                    time_ns,
                    flow,
                    took_ns: *took_ns,
                    bytes,
                }));
                levels.extend(self.pass(1));
            }
            levels
        }

        fn found(&mut self) -> Vec<Congestion> {
            std::iter::from_fn(|| self.detector.poll()).collect()
        }
    }

    #[test]
    fn messages_that_wait_make_levels_of_their_queue_pair() {
        use CongestionLevel::*;
        let mut world = World::new(RATE);
        assert_eq!(world.send(&[SENDING + 20 * US; 50], MIB), [], "at rest");
        assert_eq!(world.send(&[SENDING + 500 * US; 50], MIB), [], "a short queue");
        assert_eq!(world.send(&[SENDING + 920 * US; 3], MIB), [], "too few");
        assert_eq!(world.send(&[SENDING + 920 * US; 3], MIB), [Mild]);
        let standing: Vec<Congestion> = world.detector.links().collect();
        let [found] = standing[..] else { panic!("{standing:?}") };
        let path = Path::QueuePair { address: FlowKey::mapped(2), number: 18 };
        assert_eq!(found.link, Link { interface: 7, direction: Direction::Egress, path });
        assert_eq!((found.level, found.cause, found.capacity), (Mild, CongestionCause::Unknown, RATE));
        assert!(found.signals.delay && !found.signals.load, "{found:?}");
        let queue = found.rtt - found.min_rtt;
        assert!((899..=901).contains(&queue.as_micros()), "{found:?}");
        assert_eq!(world.send(&[SENDING + 9000 * US; 8], MIB), [Severe]);
        // Rest again.
        assert_eq!(world.send(&[SENDING + 20 * US; 200], MIB).last(), Some(&None));
    }

    #[test]
    fn own_bytes_and_single_late_polls_are_no_queue() {
        let mut world = World::new(RATE);
        world.send(&[SENDING + 20 * US; 50], MIB);
        // As many again were carried out meanwhile, by this queue pair or others.
        assert_eq!(world.send(&[8 * SENDING + 20 * US; 50], 8 * MIB), []);
        let late = [SENDING + 20 * US, SENDING + 3000 * US, SENDING + 3000 * US, SENDING + 3000 * US];
        assert_eq!(world.send(&late.repeat(20), MIB), []);
        // A host on which waits differ by 2 ms at any time finds queues of more alone.
        let mut busy = World::new(RATE);
        let waits = [0, 700, 2000, 1400].map(|wait| SENDING + wait * US);
        assert_eq!(busy.send(&waits.repeat(20), MIB), []);
        assert_eq!(busy.send(&[SENDING + 3000 * US; 12], MIB), []);
        assert_eq!(busy.send(&[SENDING + 4500 * US; 8], MIB), [CongestionLevel::Mild]);
        // A device that does half of what is stated is no queue either: the most that it showed counts.
        let mut slow = World::new(2 * RATE);
        let sizes = [1, 4, 16];
        for bytes in sizes.repeat(40) {
            assert_eq!(slow.send(&[bytes * SENDING + 20 * US], bytes * MIB), [], "{bytes} MiB");
        }
    }

    #[test]
    fn a_device_slower_than_stated_is_no_congestion() {
        let mut world = World::new(RATE);
        // What it does at 60% of the rate, beside as much that is posted behind it: that looks like the whole rate.
        let slow = |mib: u64| mib * SENDING * 10 / 6 + 20 * US;
        assert_eq!(world.send(&[slow(4); 50], 8 * MIB), []);
        // Then alone.
        for mib in [1, 2, 4, 8, 16] {
            assert_eq!(world.send(&[slow(mib); 50], mib * MIB), [], "{mib} MiB");
        }
        // A queue of three times what the message takes is one.
        let queued = 4 * SENDING * 4 + 20 * US;
        assert_eq!(world.send(&[queued; 8], 4 * MIB), [CongestionLevel::Mild]);
    }

    #[test]
    fn a_state_ends_with_its_traffic() {
        let mut world = World::new(RATE);
        world.send(&[SENDING; 50], MIB);
        assert_eq!(world.send(&[SENDING + 900 * US; 8], MIB), [CongestionLevel::Mild]);
        assert_eq!(world.pass(40), [], "a short pause");
        let ended: Vec<_> = (0..300).flat_map(|_| world.pass(1)).collect();
        assert_eq!(ended, [CongestionLevel::None]);
        assert_eq!(world.detector.links().count(), 1);
        world.pass(121_000);
        assert_eq!(world.detector.links().count(), 0);
    }

    #[test]
    fn odd_messages_are_no_congestion() {
        let mut world = World::new(0);
        assert_eq!(world.send(&[u64::MAX; 20], 1), [], "no rate is stated");
        assert_eq!(world.detector.links().count(), 0);
        let mut world = World::new(RATE);
        assert_eq!(world.send(&[0; 20], u64::MAX), []);
        assert_eq!(world.send(&[u64::MAX; 2], 0), []);
        let flow = FlowKey { interface: 7, ..FlowKey::default() };
        for time_ns in [u64::MAX, 5, 0] {
            let odd = Completion { time_ns, flow, took_ns: u64::MAX, bytes: u64::MAX };
            world.detector.take(&Record::Completion(odd));
        }
        assert_eq!(world.found(), []);
    }
}
