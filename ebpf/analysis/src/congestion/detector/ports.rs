//! Ports of RDMA devices, which their devices' own counters show.

use super::{Detector, push};
use crate::congestion::port::PortMonitor;
use crate::trace::Port;
use std::collections::btree_map::Entry;

impl Detector {
    /// What a device has counted at a port.
    pub(super) fn port(&mut self, port: &Port) {
        let stated = self.interfaces.get(&port.interface).map_or(0, |one| one.bytes_per_second);
        let full = self.ports.len() >= self.limits.max_links;
        let monitor = match self.ports.entry((port.interface, port.device, port.number)) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(_) if full => {
                self.unplaced += 1;
                return;
            }
            Entry::Vacant(place) => place.insert(PortMonitor::new(port, &self.limits)),
        };
        for found in monitor.take(port, stated, &self.limits).into_iter().flatten() {
            push(&mut self.found, &mut self.lost, &self.limits, found);
        }
    }

    /// Forgets ports that are not read any more: they are gone, or programs see their packets.
    pub(super) fn forget_ports(&mut self) {
        let Self { ports, found, lost, limits, now, .. } = self;
        ports.retain(|_, port| {
            let old = port.is_old(*now);
            if old {
                port.ended(*now).for_each(|ended| push(found, lost, limits, ended));
            }
            !old
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::congestion::{Congestion, Limits, Path};
    use crate::trace::{Label, Link, PortDirection, Record};
    use harmonaize_abi::{CongestionCause, CongestionLevel, Nanos};
    use harmonaize_events::Direction;

    const MS: u64 = 1_000_000;

    /// A port of an interface of 1 Gbit/s, read each 20 ms.
    struct World {
        detector: Detector,
        port: Port,
    }

    impl World {
        fn new() -> Self {
            let mut detector = Detector::new(Limits::default());
            let (interface, name) = (7, Label::new("eth0"));
            let link = Link { time_ns: 0, interface, name, bytes_per_second: 125_000_000, watched: true };
            detector.take(&Record::Link(link));
            let device = Label::new("mlx5_0");
            let port = Port { time_ns: 1000 * MS, interface, number: 1, device, ..Port::default() };
            detector.take(&Record::Port(port));
            Self { detector, port }
        }

        /// What was found so many readings later, after a thousand packets out and in. Between each two there are marks on what leaves and
        /// losses of what comes in.
        fn read(&mut self, times: u64, marks: u64, lost: u64) -> Vec<(Direction, CongestionLevel)> {
            for _ in 0..times {
                self.port.time_ns += 20 * MS;
                for one in [&mut self.port.egress, &mut self.port.ingress] {
                    one.packets += 1000;
                }
                self.port.egress.ecn_ce += marks;
                self.port.ingress.lost += lost;
                self.detector.take(&Record::Port(self.port));
                self.detector.advance(Nanos(self.port.time_ns));
            }
            self.found().iter().map(|found| (found.link.direction, found.level)).collect()
        }

        fn found(&mut self) -> Vec<Congestion> {
            std::iter::from_fn(|| self.detector.poll()).collect()
        }
    }

    #[test]
    fn marks_and_losses_make_levels_of_each_direction() {
        use {CongestionLevel::*, Direction::*};
        let mut world = World::new();
        assert_eq!(world.read(50, 19, 9), [], "less than mild");
        assert_eq!(world.read(1, 30, 0), []);
        assert_eq!(world.read(5, 0, 0), [], "one reading alone");
        assert_eq!(world.read(2, 30, 0), [(Egress, Mild)]);
        assert_eq!(world.read(2, 300, 60), [(Egress, Severe), (Ingress, Severe)]);
        let standing: Vec<Congestion> = world.detector.links().collect();
        assert!(standing.iter().all(|found| found.link.path == Path::Rdma));
        let egress = standing.iter().find(|found| found.link.direction == Egress).unwrap();
        assert_eq!(
            (egress.ecn_ce_ppm, egress.lost_ppm, egress.cause),
            (300_000, 0, CongestionCause::Unknown)
        );
        assert!(egress.signals.ecn_ce && !egress.signals.loss);
        let ended = world.read(200, 0, 0);
        assert!(ended.contains(&(Egress, None)) && ended.contains(&(Ingress, None)), "{ended:?}");
    }

    #[test]
    fn full_ports_are_mildly_congested() {
        let mut world = World::new();
        // 95% of what the interface carries.
        let found: Vec<_> = (0..2)
            .flat_map(|_| {
                world.port.egress.bytes += 125_000_000 / 50 / 100 * 95;
                world.read(1, 0, 0)
            })
            .collect();
        assert_eq!(found, [(Direction::Egress, CongestionLevel::Mild)]);
        let found = world.detector.links().find(|found| found.link.direction == Direction::Egress).unwrap();
        assert_eq!((found.used_ppm, found.capacity, found.signals.load), (950_000, 125_000_000, true));
    }

    #[test]
    fn receivers_and_new_devices_are_no_congestion() {
        let mut world = World::new();
        for _ in 0..9 {
            world.port.not_ready += 1;
            assert_eq!(world.read(1, 0, 500), [], "its receiver was not ready");
        }
        let (egress, ingress) = (world.port.egress, world.port.ingress);
        (world.port.egress, world.port.ingress) = Default::default();
        assert_eq!(world.read(1, 500, 500), [], "made anew");
        // What was counted while nobody read is of no known time.
        world.port.time_ns += 3000 * MS;
        (world.port.egress, world.port.ingress) = (egress, ingress);
        assert_eq!(world.read(1, 500, 500), []);
        let wild = PortDirection { packets: u64::MAX, bytes: u64::MAX, ecn_ce: u64::MAX, lost: u64::MAX };
        let time_ns = world.port.time_ns + 1;
        world.detector.take(&Record::Port(Port { time_ns, egress: wild, ingress: wild, ..world.port }));
        world.detector.take(&Record::Port(Port { time_ns: u64::MAX, ..world.port }));
        assert_eq!(world.found(), []);
    }

    #[test]
    fn a_port_that_nobody_reads_is_forgotten() {
        let mut world = World::new();
        assert_eq!(world.read(2, 500, 0), [(Direction::Egress, CongestionLevel::Severe)]);
        let later = world.port.time_ns + 1900 * MS;
        world.detector.advance(Nanos(later));
        assert_eq!((world.found().len(), world.detector.links().count()), (0, 2));
        world.detector.advance(Nanos(later + 200 * MS));
        let found: Vec<_> = world.found().iter().map(|found| (found.link.direction, found.level)).collect();
        assert_eq!(found, [(Direction::Egress, CongestionLevel::None)]);
        assert_eq!(world.detector.links().count(), 0);
    }
}
