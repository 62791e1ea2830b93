//! Ports of RDMA devices by the devices' own counters. Metrics show all of them; evidence of congestion are those whose packets the
//! programs in the kernel do not see.

use crate::telemetry::links::MeasuredInterface;
use harmonaize_abi::Nanos;
use harmonaize_analysis::trace::{Label, Port, PortDirection, Record};
use harmonaize_api::v1::TelemetrySource;
use harmonaize_loader::{Collector, PortCounter, RdmaPort};
use std::time::Duration;

/// The interval between two readings while no counter changes.
const IDLE_INTERVAL: Duration = Duration::from_millis(200);

/// A port at its last reading.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortReading {
    /// What was read.
    pub port: RdmaPort,
    /// What its congestion is found by; unspecified where its interface is not measured.
    pub source: TelemetrySource,
    /// Packets that the programs had seen, and that the device had counted, when both were first read.
    pub(crate) begin: (u64, u64),
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct RdmaPorts {
    ports: Vec<PortReading>,
    /// Where they are read into.
    buffer: Vec<RdmaPort>,
    read_at: Nanos,
    /// Whether a counter changed between the last two readings.
    changed: bool,
}

impl RdmaPorts {
    /// All ports, as last read.
    pub(crate) fn readings(&self) -> &[PortReading] {
        &self.ports
    }

    /// Whether an interface's port was read since a time, and the programs saw too few of its packets by then.
    pub(crate) fn bypasses(&self, interface: &str, since: Nanos) -> bool {
        let mut ports = self.ports.iter().filter(|one| one.port.interface == interface);
        self.read_at >= since && ports.any(|one| one.source == TelemetrySource::RdmaCounters)
    }

    /// Returns when they are read next for what nothing else shows, once the budget is `due`. None where there is no
    /// such port.
    pub(crate) fn next_reading(&self, due: Nanos) -> Option<Nanos> {
        let next = if self.changed { due } else { due.max(self.read_at.after(IDLE_INTERVAL)) };
        let evidence = self.ports.iter().any(|one| one.source == TelemetrySource::RdmaCounters);
        evidence.then_some(next)
    }

    /// Reads all ports, and appends a record of those that are evidence.
    pub(crate) fn read(
        &mut self,
        source: &mut dyn Collector,
        measured: &[MeasuredInterface],
        now: Nanos,
        into: &mut Vec<Record>,
    ) {
        source.read_ports(&mut self.buffer);
        let before = std::mem::take(&mut self.ports);
        (self.read_at, self.changed) = (now, false);
        for port in self.buffer.drain(..) {
            let last = before.iter().find(|one| is_same(&one.port, &port));
            self.changed |= last.is_none_or(|last| last.port.counters != port.counters);
            let link = measured.iter().find(|link| link.name == port.interface);
            let totals = link.and_then(|link| Some((link, source.totals(link.index).ok()?)));
            let Some((link, totals)) = totals else {
                self.ports.push(PortReading { port, ..PortReading::default() });
                continue;
            };
            let seen = totals.ingress.roce.saturating_add(totals.egress.roce);
            let counted = port.counters.sum(&[PortCounter::SentPackets, PortCounter::ReceivedPackets]);
            let measured_before = last.filter(|last| last.source != TelemetrySource::Unspecified);
            // The programs may have been attached anew, or the device made anew.
            let begin =
                measured_before.map(|last| last.begin).filter(|begin| seen >= begin.0 && counted >= begin.1);
            let begin = begin.unwrap_or((seen, counted));
            let reading = PortReading { source: source_of((seen - begin.0, counted - begin.1)), begin, port };
            if reading.source == TelemetrySource::RdmaCounters {
                into.push(Record::Port(record(now, link.index, &reading.port)));
            }
            self.ports.push(reading);
        }
    }
}

fn is_same(one: &RdmaPort, other: &RdmaPort) -> bool {
    (&one.device, one.number, &one.interface) == (&other.device, other.number, &other.interface)
}

/// What shows a port's traffic: the programs where they have seen half of the packets that the device has counted. Each packet is evidence
/// once.
fn source_of((seen, counted): (u64, u64)) -> TelemetrySource {
    if seen > 0 && seen >= counted / 2 {
        TelemetrySource::KernelPrograms
    } else {
        TelemetrySource::RdmaCounters
    }
}

/// A port's counters as the signs of congestion that flows give: notifications that come in are about what leaves.
fn record(time: Nanos, interface: u32, port: &RdmaPort) -> Port {
    use PortCounter::*;
    let get = |counter| port.counters.get(counter).unwrap_or(0);
    Port {
        time_ns: time.0,
        interface,
        number: port.number,
        device: Label::new(&port.device),
        not_ready: get(ReceiverNotReady),
        egress: PortDirection {
            packets: get(SentPackets),
            bytes: get(SentBytes),
            ecn_ce: get(NotificationsReceived),
            // A retry follows on each of the others, where the device counts it.
            lost: port.counters.sum(&[SequenceNaks, Timeouts]).max(get(Retries)),
        },
        ingress: PortDirection {
            packets: get(ReceivedPackets),
            bytes: get(ReceivedBytes),
            ecn_ce: get(EcnMarked),
            lost: get(OutOfSequence).max(get(DuplicateRequests)),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_events::{InterfaceTotals, Totals};
    use harmonaize_loader::fake::Fake;

    const MS: u64 = 1_000_000;

    fn port(interface: &str, counted: &[(PortCounter, u64)]) -> RdmaPort {
        let counters = counted.iter().copied().collect();
        RdmaPort { device: "mlx5_0".into(), number: 1, interface: interface.into(), counters }
    }

    /// Reads a port of eth0, of whose packets the programs have seen so many.
    fn read(ports: &mut RdmaPorts, seen: u64, counted: &[(PortCounter, u64)], time_ns: u64) -> Vec<Record> {
        let mut fake = Fake::default();
        let ingress = Totals { roce: seen, ..Totals::default() };
        fake.scene().totals.insert(7, InterfaceTotals { ingress, ..InterfaceTotals::default() });
        fake.scene().ports = vec![port("eth0", counted), port("eth9", counted)];
        let measured = [MeasuredInterface { name: "eth0".into(), index: 7, bits: None }];
        let mut records = Vec::new();
        ports.read(&mut fake, &measured, Nanos(time_ns), &mut records);
        records
    }

    fn sources(ports: &RdmaPorts) -> Vec<TelemetrySource> {
        ports.readings().iter().map(|one| one.source).collect()
    }

    #[test]
    fn counters_become_signs_of_each_direction() {
        use PortCounter::*;
        let counted = [
            (SentPackets, 10),
            (SentBytes, 4000),
            (NotificationsReceived, 1),
            (NotificationsSent, 99),
            (SequenceNaks, 2),
            (Timeouts, 3),
            (Retries, 4),
            (RetriesExceeded, 99),
            (ReceivedPackets, 20),
            (ReceivedBytes, 8000),
            (EcnMarked, 6),
            (OutOfSequence, 7),
            (DuplicateRequests, 8),
            (ReceiverNotReady, 9),
        ];
        let mut ports = RdmaPorts::default();
        let expected = Port {
            time_ns: 5,
            interface: 7,
            number: 1,
            device: Label::new("mlx5_0"),
            not_ready: 9,
            egress: PortDirection { packets: 10, bytes: 4000, ecn_ce: 1, lost: 5 },
            ingress: PortDirection { packets: 20, bytes: 8000, ecn_ce: 6, lost: 8 },
        };
        assert_eq!(read(&mut ports, 0, &counted, 5), [Record::Port(expected)]);
        assert_eq!(sources(&ports), [TelemetrySource::RdmaCounters, TelemetrySource::Unspecified]);
    }

    #[test]
    fn packets_that_the_programs_see_are_evidence_once() {
        let mut ports = RdmaPorts::default();
        let counted = |packets| [(PortCounter::SentPackets, packets)];
        // Both began earlier, the device long before.
        assert_eq!(read(&mut ports, 50, &counted(1_000_000), 0).len(), 1);
        assert_eq!(read(&mut ports, 149, &counted(1_000_100), 1).len(), 0);
        assert_eq!(sources(&ports)[0], TelemetrySource::KernelPrograms);
        assert_eq!(ports.next_reading(Nanos(3)), None);
        // Attached anew, from where on a few packets alone pass the kernel, as over an offloaded switch.
        assert_eq!(read(&mut ports, 0, &counted(1_000_200), 2).len(), 1);
        assert_eq!(read(&mut ports, 3, &counted(1_009_000), 3).len(), 1);
        assert_eq!(sources(&ports)[0], TelemetrySource::RdmaCounters);
    }

    #[test]
    fn idle_ports_are_read_seldom() {
        let mut ports = RdmaPorts::default();
        assert_eq!(ports.next_reading(Nanos(0)), None, "there is none");
        read(&mut ports, 0, &[(PortCounter::SentPackets, 1)], MS);
        assert_eq!(ports.next_reading(Nanos(20 * MS)), Some(Nanos(20 * MS)));
        read(&mut ports, 0, &[(PortCounter::SentPackets, 1)], 20 * MS);
        assert_eq!(ports.next_reading(Nanos(40 * MS)), Some(Nanos(220 * MS)));
        assert_eq!(ports.next_reading(Nanos(900 * MS)), Some(Nanos(900 * MS)));
    }
}
