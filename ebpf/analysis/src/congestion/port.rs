//! Congestion of an RDMA device's port by what the device itself counts. Where packets bypass the kernel, nothing else shows it.

use super::hysteresis::{HysteresisState, MILD};
use super::monitor::{load_pressure, per_second, ppm, signal_pressure};
use super::{Congestion, Limits, Link, Path, Signals};
use crate::trace::{Port, PortDirection};
use harmonaize_abi::{CongestionLevel, Nanos};
use harmonaize_events::Direction;
use std::time::Duration;

/// The longest time between readings that say something of it. A port that was not read for so long is forgotten.
const MAX_INTERVAL: Duration = Duration::from_secs(2);

/// A port's last reading, and the state of each direction.
#[derive(Debug, Clone)]
pub(super) struct PortMonitor {
    last: Port,
    egress: PortState,
    ingress: PortState,
}

#[derive(Debug, Clone)]
struct PortState {
    hysteresis: HysteresisState,
    /// Readings that spoke for congestion so far.
    evidence: u64,
    finding: Congestion,
}

impl PortMonitor {
    /// A port of which this is the first reading.
    pub(super) fn new(port: &Port, limits: &Limits) -> Self {
        let state = |direction| PortState::new(port, direction, limits);
        Self { last: *port, egress: state(Direction::Egress), ingress: state(Direction::Ingress) }
    }

    /// Takes a reading; returns the changes of either direction's level. The interface carries `stated` bytes a second, 0 where that
    /// is not known.
    pub(super) fn take(&mut self, port: &Port, stated: u64, limits: &Limits) -> [Option<Congestion>; 2] {
        let before = std::mem::replace(&mut self.last, *port);
        let now = Nanos(port.time_ns);
        let interval = now.since(Nanos(before.time_ns));
        if interval.is_zero() || interval > MAX_INTERVAL {
            return [None; 2];
        }
        // What a receiver that was not ready held up says nothing of the network.
        let limited = port.not_ready != before.not_ready;
        let window = Window { now, interval, limited, stated };
        [
            self.egress.step(&before.egress, &port.egress, &window, limits),
            self.ingress.step(&before.ingress, &port.ingress, &window, limits),
        ]
    }

    /// Whether nothing was read of it for so long that it is forgotten.
    pub(super) fn is_old(&self, now: Nanos) -> bool {
        now.since(Nanos(self.last.time_ns)) > MAX_INTERVAL
    }

    /// How both directions stand.
    pub(super) fn findings(&self) -> impl Iterator<Item = Congestion> {
        [self.egress.finding, self.ingress.finding].into_iter()
    }

    /// What changes where the port is forgotten: each direction that was congested is so no longer.
    pub(super) fn ended(&self, now: Nanos) -> impl Iterator<Item = Congestion> {
        let congested = self.findings().filter(|found| found.level > CongestionLevel::None);
        congested.map(move |found| Congestion::none(found.link, now))
    }
}

/// The time between two readings.
struct Window {
    now: Nanos,
    interval: Duration,
    limited: bool,
    stated: u64,
}

impl PortState {
    fn new(port: &Port, direction: Direction, limits: &Limits) -> Self {
        let link = Link { interface: port.interface, direction, path: Path::Rdma };
        let finding = Congestion::none(link, Nanos(port.time_ns));
        Self { hysteresis: HysteresisState::new(limits), evidence: 0, finding }
    }

    /// Judges what was counted between two readings as a path's last milliseconds are judged.
    fn step(
        &mut self,
        before: &PortDirection,
        counted: &PortDirection,
        window: &Window,
        limits: &Limits,
    ) -> Option<Congestion> {
        let change = difference(before, counted)?;
        let lost = if window.limited { 0 } else { change.lost };
        let packets = change.packets.max(change.ecn_ce).max(lost);
        let (ecn_ce_ppm, lost_ppm) = (ppm(change.ecn_ce, packets), ppm(lost, packets));
        let rate = per_second(change.bytes, window.interval);
        let used_ppm = if window.stated == 0 { 0 } else { ppm(rate, window.stated) };
        let marks = signal_pressure(change.ecn_ce, ecn_ce_ppm, limits.ecn_ce_ppm);
        let losses = signal_pressure(lost, lost_ppm, limits.lost_ppm);
        let load = load_pressure(used_ppm, limits);
        let signals =
            Signals { ecn_ce: marks >= MILD, loss: losses >= MILD, load: load >= MILD, ..Signals::default() };
        self.evidence += u64::from(signals != Signals::default());
        let changed = self.hysteresis.step(window.now, marks.max(losses).max(load), self.evidence, limits);
        self.finding = Congestion {
            level: self.hysteresis.level,
            since: self.hysteresis.since,
            signals,
            capacity: window.stated,
            ecn_ce_ppm,
            lost_ppm,
            used_ppm,
            // Whose the bytes of a port are is not known, nor is any round trip.
            ..Congestion::none(self.finding.link, window.now)
        };
        changed.then_some(self.finding)
    }
}

/// What was counted meanwhile; none where a counter went back, as when the device was made anew.
fn difference(before: &PortDirection, now: &PortDirection) -> Option<PortDirection> {
    Some(PortDirection {
        packets: now.packets.checked_sub(before.packets)?,
        bytes: now.bytes.checked_sub(before.bytes)?,
        ecn_ce: now.ecn_ce.checked_sub(before.ecn_ce)?,
        lost: now.lost.checked_sub(before.lost)?,
    })
}
