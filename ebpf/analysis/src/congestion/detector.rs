//! From records to links: which flow crosses what, and who is asked when.

mod completions;
mod ports;
mod sweep;

use super::bins::{add, number_at};
use super::cause::Outcome;
use super::completion::CompletionMonitor;
use super::flow::{Change, FlowHistory};
use super::monitor::{Measure, Monitor};
use super::port::PortMonitor;
use super::queue_jump::QueueJump;
use super::starved::{LatePeriod, RttHistory};
use super::{Congestion, Limits, Link, Path};
use crate::trace::{Label, LostKind, Record};
use harmonaize_abi::{CongestionCause, CongestionLevel, Nanos};
use harmonaize_events::{Direction, Event, EventKind, FlowKey, InterfaceTotals, Protocol};
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

/// Without news the windows end this long before now.
const SILENCE: Duration = Duration::from_millis(10);
const SWEEP: Duration = Duration::from_secs(10);
/// A path with nothing measured, or less than this part of its interface's bytes, does not speak for the interface. Where there are many
/// paths, neither does one with less than half of an equal part.
const MIN_PATH_SHARE: u64 = 20;

const NO_MONITOR: u32 = u32::MAX;

#[derive(Debug, Clone)]
struct Flow {
    history: FlowHistory,
    port: u16,
    egress: FlowMonitors,
    ingress: FlowMonitors,
}

/// The monitors of one way of a flow.
#[derive(Debug, Clone, Copy)]
struct FlowMonitors {
    path: u32,
    whole: u32,
}

#[derive(Debug, Clone, Default)]
struct Interface {
    bytes_per_second: u64,
    totals: Option<(Nanos, InterfaceTotals)>,
    least_congested: [Option<Measure>; 2],
    whole: [Option<u32>; 2],
    /// Paths that something crosses.
    paths: [u64; 2],
}

const fn direction_index(direction: Direction) -> usize {
    match direction {
        Direction::Egress => 0,
        Direction::Ingress => 1,
    }
}

/// Finds congestion of one host's links from its records.
#[derive(Debug, Clone)]
pub struct Detector {
    limits: Limits,
    host: Option<u64>,
    listens: bool,
    flows: HashMap<FlowKey, Flow>,
    interfaces: BTreeMap<u32, Interface>,
    /// By interface, device and number.
    ports: BTreeMap<(u32, Label, u32), PortMonitor>,
    /// Of own queue pairs.
    completions: BTreeMap<Link, CompletionMonitor>,
    monitors: Vec<Option<Monitor>>,
    free: Vec<u32>,
    monitor_by_link: HashMap<Link, u32>,
    active: Vec<u32>,
    found: VecDeque<Congestion>,
    /// Paths that are starved again, by which nothing changed.
    starved_again: BTreeMap<Link, Congestion>,
    now: Nanos,
    last_record: Nanos,
    last_poll: Nanos,
    last_sweep: Nanos,
    urgent: bool,
    pending: bool,
    unplaced: u64,
    lost: u64,
}

impl Detector {
    /// One that decides by `limits`.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            host: None,
            listens: true,
            flows: HashMap::new(),
            interfaces: BTreeMap::new(),
            ports: BTreeMap::new(),
            completions: BTreeMap::new(),
            monitors: Vec::new(),
            free: Vec::new(),
            monitor_by_link: HashMap::new(),
            active: Vec::new(),
            found: VecDeque::new(),
            starved_again: BTreeMap::new(),
            now: Nanos(0),
            last_record: Nanos(0),
            last_poll: Nanos(0),
            last_sweep: Nanos(0),
            urgent: false,
            pending: false,
            unplaced: 0,
            lost: 0,
        }
    }

    /// Takes in a record. Of a merged trace, those of the host that speaks first; indices of interfaces are its own.
    ///
    /// Cost: two look-ups of a key of 48 bytes at most, and some additions; memory for a flow's first record alone.
    pub fn take(&mut self, record: &Record) {
        if let Record::Observer(observer) = record {
            let host = *self.host.get_or_insert(observer.host);
            self.listens = host == observer.host;
        }
        if !self.listens {
            return;
        }
        match record {
            Record::Tcp { time_ns, key, flow } => {
                let time = Nanos(*time_ns);
                self.snapshot(time, key, 0, |memory| memory.tcp(time, flow));
            }
            Record::Roce { time_ns, key, counters } => {
                let direction = match key.direction {
                    direction if direction == Direction::Ingress as u8 => Direction::Ingress,
                    _ => Direction::Egress,
                };
                let port = counters.source_port as u16;
                let time = Nanos(*time_ns);
                self.snapshot(time, key, port, |memory| memory.roce(time, direction, counters));
            }
            Record::Event(event) => self.event(event),
            Record::Owner(owner) => self.set_owner(Nanos(owner.time_ns), &owner.flow, owner.owned),
            Record::Link(link) => {
                let known = self.interfaces.contains_key(&link.interface);
                if known || self.interfaces.len() < self.limits.max_links {
                    let bytes_per_second = if link.watched { link.bytes_per_second } else { 0 };
                    self.interfaces.entry(link.interface).or_default().bytes_per_second = bytes_per_second;
                }
            }
            Record::Totals { time_ns, totals } => self.totals(Nanos(*time_ns), totals),
            Record::Port(port) => self.port(port),
            Record::Completion(completion) => self.completion(completion),
            Record::Lost(lost) if lost.kind == LostKind::Gap => self.reset_after_gap(),
            Record::Lost(_) | Record::Mark(_) | Record::Observer(_) => {}
        }
    }

    /// The time is now so late. Call it when all records up to then were taken, every millisecond or as often as there are
    /// records.
    ///
    /// Cost: once in a millisecond, a look at each link that something crossed since the last, or whose state is not none.
    pub fn advance(&mut self, now: Nanos) {
        self.now = self.now.max(now);
        let end = self.last_record.max(self.now.before(SILENCE));
        if number_at(end) == number_at(self.last_poll) && !self.urgent {
            return;
        }
        (self.last_poll, self.urgent) = (end, false);
        let mut active = std::mem::take(&mut self.active);
        self.measure(end, &active);
        self.evaluate(&active);
        let monitors = &mut self.monitors;
        active.retain(|place| {
            let monitor = monitors.get_mut(*place as usize).and_then(Option::as_mut);
            monitor.is_some_and(|monitor| {
                monitor.active = !monitor.is_idle(end);
                if !monitor.active {
                    monitor.measure = Measure::default();
                }
                monitor.active
            })
        });
        self.active = active;
        self.forget_ports();
        self.end_completions();
        if self.now.since(self.last_sweep) >= SWEEP {
            self.sweep();
        }
    }

    /// The next change of a link's state or cause, oldest first.
    pub fn poll(&mut self) -> Option<Congestion> {
        self.found.pop_front()
    }

    /// The next path that is starved again, after a while in which it was not, while its state and cause stand. That is no finding: it is
    /// said boldly, for whoever has it proven. Of each path the newest is kept.
    pub fn poll_starved_again(&mut self) -> Option<Congestion> {
        self.starved_again.pop_first().map(|(_, congestion)| congestion)
    }

    /// How every link stands that something crossed in the last minute, every port that is read, and every own queue pair that is timed.
    pub fn links(&self) -> impl Iterator<Item = Congestion> {
        let links = self.monitors.iter().flatten().map(|monitor| monitor.finding(self.now));
        let ports = self.ports.values().flat_map(PortMonitor::findings);
        links.chain(ports).chain(self.completions.values().map(CompletionMonitor::finding))
    }

    /// How a link stands; none where nothing crossed it.
    pub fn link(&self, link: &Link) -> Option<Congestion> {
        let place = self.monitor_by_link.get(link)?;
        let monitor = self.monitors.get(*place as usize)?.as_ref()?;
        Some(monitor.finding(self.now))
    }

    /// Whether a finding is in the making: who looks at flows more closely now has it sooner.
    pub fn has_pending_report(&self) -> bool {
        self.pending
    }

    /// Snapshots that were left out because too many flows or links are known.
    pub const fn unplaced(&self) -> u64 {
        self.unplaced
    }

    /// Findings that were dropped because nobody fetched them.
    pub const fn lost(&self) -> u64 {
        self.lost
    }

    fn snapshot(
        &mut self,
        time: Nanos,
        key: &FlowKey,
        port: u16,
        change: impl FnOnce(&mut FlowHistory) -> Option<(Change, Change)>,
    ) {
        self.last_record = self.last_record.max(time);
        let Some(flow) = self.flow(time, key, port) else { return };
        let changes = change(&mut flow.history);
        let (own, out_places, into_places) = (flow.history.own, flow.egress, flow.ingress);
        if let Some((out, into)) = changes {
            self.account(time, own, out_places, &out);
            self.account(time, own, into_places, &into);
        }
    }

    /// The flow with a key, made known if it is not; none where there are too many.
    fn flow(&mut self, time: Nanos, key: &FlowKey, port: u16) -> Option<&mut Flow> {
        let roce = key.protocol == Protocol::Roce as u8;
        let known = self.flows.get(key).map(|flow| flow.port);
        if known.is_some_and(|known| !roce || port == 0 || known == port) {
            return self.flows.get_mut(key);
        }
        if known.is_none() && self.flows.len() >= self.limits.max_flows {
            self.unplaced += 1;
            return None;
        }
        let told = if key.direction == Direction::Ingress as u8 { (0, port) } else { (port, 0) };
        let (out, into) = if roce { told } else { (0, 0) };
        let path = |port| Path::Remote { address: key.remote, port };
        self.assign_paths(time, key, port, [path(out), path(into)])
    }

    /// An own connection takes a path of its own; when it is none any more, that of all others.
    fn set_owner(&mut self, time: Nanos, key: &FlowKey, holds: bool) {
        let Some(flow) = self.flow(time, key, 0) else { return };
        let changes = flow.history.own != holds;
        flow.history.own = holds;
        if !changes || key.protocol != Protocol::Tcp as u8 {
            return;
        }
        let (address, local, remote) = (key.remote, key.local_port, key.remote_port);
        let path = if holds {
            Path::Connection { address, local, remote }
        } else {
            Path::Remote { address, port: 0 }
        };
        // Where there is no room for it, it goes on with the others.
        self.assign_paths(time, key, 0, [path, path]);
    }

    /// Gives a flow its paths, outwards and inwards; none where there are too many.
    fn assign_paths(&mut self, time: Nanos, key: &FlowKey, port: u16, paths: [Path; 2]) -> Option<&mut Flow> {
        let [out, into] = paths;
        let out = self.assign_both_paths(time, key, Direction::Egress, out)?;
        let into = self.assign_both_paths(time, key, Direction::Ingress, into)?;
        let flow = match self.flows.entry(*key) {
            Entry::Occupied(flow) => {
                let flow = flow.into_mut();
                for place in [flow.egress.path, flow.ingress.path] {
                    count_flow(&mut self.monitors, place, u32::saturating_sub);
                }
                (flow.port, flow.egress, flow.ingress) = (port, out, into);
                flow
            }
            Entry::Vacant(entry) => {
                entry.insert(Flow { history: FlowHistory::default(), port, egress: out, ingress: into })
            }
        };
        for place in [out.path, into.path] {
            count_flow(&mut self.monitors, place, u32::saturating_add);
        }
        Some(flow)
    }

    fn assign_both_paths(
        &mut self,
        time: Nanos,
        key: &FlowKey,
        direction: Direction,
        path: Path,
    ) -> Option<FlowMonitors> {
        let whole = self.monitor_of(time, Link { interface: key.interface, direction, path: Path::Whole })?;
        let path = self.monitor_of(time, Link { interface: key.interface, direction, path })?;
        Some(FlowMonitors { path, whole })
    }

    /// The least round trip on any path to the same end. Equal paths are as long as each other, and one that is new may have
    /// a queue already.
    fn min_rtt_of(&self, link: &Link) -> Option<Duration> {
        let to = link.path.address()?;
        let beside = self.monitors.iter().flatten().filter(|monitor| {
            let other = monitor.link;
            let way = (other.interface, other.direction, other.path.address());
            way == (link.interface, link.direction, Some(to))
        });
        beside.filter_map(|monitor| monitor.min_rtt.min()).min()
    }

    /// Where a link's monitor is, made if it is not there; none where there are too many.
    fn monitor_of(&mut self, time: Nanos, link: Link) -> Option<u32> {
        if let Some(place) = self.monitor_by_link.get(&link) {
            return Some(*place);
        }
        if self.monitor_by_link.len() >= self.limits.max_links {
            self.unplaced += 1;
            return None;
        }
        let mut monitor = Monitor::new(link, time, &self.limits);
        if let Some(rest) = self.min_rtt_of(&link) {
            monitor.min_rtt.update(time, self.limits.min_rtt_window, rest, Duration::min);
        }
        let place = match self.free.pop() {
            Some(place) => place,
            None => {
                self.monitors.push(None);
                u32::try_from(self.monitors.len() - 1).unwrap_or(NO_MONITOR)
            }
        };
        *self.monitors.get_mut(place as usize)? = Some(monitor);
        self.monitor_by_link.insert(link, place);
        if link.path == Path::Whole {
            let interface = self.interfaces.entry(link.interface).or_default();
            if let Some(whole) = interface.whole.get_mut(direction_index(link.direction)) {
                *whole = Some(place);
            }
        }
        Some(place)
    }

    /// What changed on a flow crosses its path and its interface.
    fn account(&mut self, time: Nanos, own: bool, places: FlowMonitors, change: &Change) {
        if *change == Change::default() {
            return;
        }
        let limits = &self.limits;
        let mut queue = None;
        for place in [places.path, places.whole] {
            let Some(monitor) = self.monitors.get_mut(place as usize).and_then(Option::as_mut) else {
                continue;
            };
            monitor.updated = true;
            if !monitor.active {
                monitor.active = true;
                self.active.push(place);
            }
            if change.bytes > 0 {
                monitor.last_seen = time;
                for (from, to, bytes) in change.spans.into_iter().filter(|(.., bytes)| *bytes > 0) {
                    monitor.bins.spread(from, to, bytes, |bin, bytes| {
                        let class = if own { &mut bin.own } else { &mut bin.cross_traffic };
                        add(class, bytes);
                    });
                }
                if let Some(bin) = monitor.bins.at(change.to) {
                    add(&mut bin.packets, change.packets);
                }
            }
            if monitor.is_interface() {
                if let Some(queue) = queue {
                    monitor.record_queue(queue);
                }
                continue;
            }
            monitor.record_signals(time, change.ecn_ce, change.lost);
            if let Some(least) = change.min_rtt {
                monitor.min_rtt.update(time, limits.min_rtt_window, least, Duration::min);
            }
            change.rtt_samples.into_iter().flatten().for_each(|leg| monitor.rtt_history.push(leg));
            if let Some(leg) = change.rtt {
                queue = Some(monitor.record_rtt(time, leg, limits));
            } else if let Some(pending) = change.pending_rtt {
                monitor.record_pending_rtt(time, pending);
            }
        }
    }

    /// A packet of a connection was sent again: this need not wait for the next snapshot. Or one was acknowledged late.
    fn event(&mut self, event: &Event) {
        let kind = EventKind::from_number(event.kind);
        let told = matches!(kind, Some(EventKind::Retransmission | EventKind::LateRtt));
        if !told || event.flow.protocol != Protocol::Tcp as u8 {
            return;
        }
        let direction = match event.flow.direction {
            direction if direction == Direction::Ingress as u8 => Direction::Ingress,
            _ => Direction::Egress,
        };
        let Some(flow) = self.flows.get_mut(&FlowKey { direction: 0, ..event.flow }) else { return };
        if kind == Some(EventKind::LateRtt) {
            flow.history.handle_late_rtt(event);
            let place = flow.egress.path;
            return self.handle_late_rtt(place, &QueueJump::from_event(event));
        }
        let lost = flow.history.lost(Nanos(event.time_ns), direction, event.total);
        let place = if direction == Direction::Egress { flow.egress.path } else { flow.ingress.path };
        let monitor = self.monitors.get_mut(place as usize).and_then(Option::as_mut);
        if let Some(monitor) = monitor.filter(|_| lost > 0) {
            monitor.record_signals(Nanos(event.time_ns), 0, lost);
            monitor.updated = true;
            self.urgent = true;
            if !monitor.active {
                monitor.active = true;
                self.active.push(place);
            }
        }
    }

    /// A round trip on a path was late, and the one before was not. The queue may have leapt up, which need not wait for the next snapshot
    /// either.
    fn handle_late_rtt(&mut self, place: u32, leap: &QueueJump) {
        let at = |place: u32| self.monitors.get(place as usize).and_then(Option::as_ref);
        let Some(monitor) = at(place) else { return };
        let Some(interface) = self.interfaces.get(&monitor.link.interface) else { return };
        let whole =
            interface.whole.get(direction_index(monitor.link.direction)).copied().flatten().and_then(at);
        let stated = interface.bytes_per_second;
        if whole.is_none_or(|whole| !monitor.is_queue_jump(leap, whole, self.now, stated)) {
            return;
        }
        let Some(Some(monitor)) = self.monitors.get_mut(place as usize) else { return };
        monitor.on_queue_jump(leap, &self.limits);
        self.urgent = true;
        if !monitor.active {
            monitor.active = true;
            self.active.push(place);
        }
    }

    fn totals(&mut self, time: Nanos, totals: &InterfaceTotals) {
        self.last_record = self.last_record.max(time);
        let Ok(index) = u32::try_from(totals.interface) else { return };
        if !self.interfaces.contains_key(&index) && self.interfaces.len() >= self.limits.max_links {
            return;
        }
        let before = self.interfaces.entry(index).or_default().totals.replace((time, *totals));
        let Some((from, before)) = before else { return };
        let bytes = [
            (Direction::Egress, totals.egress.bytes.checked_sub(before.egress.bytes)),
            (Direction::Ingress, totals.ingress.bytes.checked_sub(before.ingress.bytes)),
        ];
        for (direction, bytes) in bytes {
            let Some(bytes) = bytes.filter(|bytes| *bytes > 0) else { continue };
            let link = Link { interface: index, direction, path: Path::Whole };
            let Some(place) = self.monitor_of(time, link) else { continue };
            let monitor = self.monitors.get_mut(place as usize).and_then(Option::as_mut);
            let Some(monitor) = monitor else { continue };
            monitor.last_seen = time;
            monitor.bins.spread(from, time, bytes, |bin, bytes| {
                add(&mut bin.total, bytes);
            });
            if !monitor.active {
                monitor.active = true;
                self.active.push(place);
            }
        }
    }

    /// Nothing was observed for a while: what comes next says nothing of the last milliseconds.
    fn reset_after_gap(&mut self) {
        for flow in self.flows.values_mut() {
            flow.history.reset_baseline();
        }
        for monitor in self.monitors.iter_mut().flatten() {
            monitor.bins.clear();
            monitor.rtt_history = RttHistory::default();
        }
        for interface in self.interfaces.values_mut() {
            interface.totals = None;
        }
    }

    /// Measures: rates, then queues of paths, then what the paths of an interface have in common.
    fn measure(&mut self, end: Nanos, active: &[u32]) {
        for interface in self.interfaces.values_mut() {
            (interface.least_congested, interface.paths) = ([None; 2], [0; 2]);
        }
        for place in active {
            if let Some(Some(monitor)) = self.monitors.get_mut(*place as usize) {
                monitor.due = monitor.is_due(end);
                if monitor.due {
                    monitor.rates(end);
                }
                if monitor.measure.bytes > 0 && !monitor.is_interface() {
                    let interface = self.interfaces.get_mut(&monitor.link.interface);
                    let paths =
                        interface.and_then(|one| one.paths.get_mut(direction_index(monitor.link.direction)));
                    paths.into_iter().for_each(|paths| *paths += 1);
                }
            }
        }
        for place in active {
            let Some(Some(monitor)) = self.monitors.get(*place as usize) else { continue };
            let Some(interface) = self.interfaces.get_mut(&monitor.link.interface) else { continue };
            let way = direction_index(monitor.link.direction);
            let whole = interface.whole.get(way).copied().flatten();
            let whole = whole.and_then(|whole| self.monitors.get(whole as usize)?.as_ref());
            let bytes = whole.map_or(0, |whole| whole.measure.bytes);
            let stated = interface.bytes_per_second;
            // What else leaves by its interface must not be what it waits for.
            let starved = |late: LatePeriod| {
                let whole = whole.is_some_and(|whole| {
                    let had_room = || monitor.dominates(whole) || whole.had_room(&late, stated);
                    whole.has_room(&late, stated) && had_room()
                });
                whole && monitor.has_room(&late, stated) && monitor.has_traffic(&late, stated)
            };
            let starved = monitor.due
                && stated > 0
                && (monitor.queue_jumped || monitor.late_period(end).is_some_and(starved));
            let parts =
                interface.paths.get(way).map_or(MIN_PATH_SHARE, |paths| MIN_PATH_SHARE.max(2 * paths));
            let Some(Some(monitor)) = self.monitors.get_mut(*place as usize) else { continue };
            if monitor.is_interface() {
                continue;
            }
            if monitor.due {
                monitor.measure_queue(end, stated, starved, &self.limits);
                monitor.queue_jumped = false;
            }
            let path = self.monitors.get(*place as usize).and_then(Option::as_ref);
            let whole = interface.whole.get(way).copied().flatten();
            let whole = whole.and_then(|whole| self.monitors.get(whole as usize)?.as_ref());
            let of_interface = whole.zip(path).and_then(|(whole, path)| whole.own_part_beside(path));
            let Some(Some(monitor)) = self.monitors.get_mut(*place as usize) else { continue };
            if let Some(part) = of_interface.filter(|_| monitor.due) {
                monitor.raise_own_part(part, &self.limits);
            }
            let measure = monitor.measure;
            let mute = measure.rtt.is_zero() && measure.pressure == 0.0;
            if mute || measure.bytes == 0 || measure.bytes < bytes / parts {
                continue;
            }
            if let Some(least) = interface.least_congested.get_mut(way)
                && least.is_none_or(|least| measure.pressure < least.pressure)
            {
                *least = Some(measure);
            }
        }
        for place in active {
            let Some(Some(monitor)) = self.monitors.get_mut(*place as usize) else { continue };
            if monitor.is_interface()
                && let Some(interface) = self.interfaces.get(&monitor.link.interface)
            {
                let least = interface
                    .least_congested
                    .get(direction_index(monitor.link.direction))
                    .and_then(Option::as_ref);
                monitor.inherit_queue(end, interface.bytes_per_second, least, &self.limits);
            }
        }
    }

    /// Judges: interfaces, then paths, whose cause is the interface's where that is congested itself.
    fn evaluate(&mut self, active: &[u32]) {
        self.pending = false;
        for wholes in [true, false] {
            for place in active {
                let Some(Some(monitor)) = self.monitors.get(*place as usize) else { continue };
                if monitor.is_interface() != wholes {
                    continue;
                }
                let interface = self.interface_of(monitor);
                let cause = match self.common_cause(monitor) {
                    CongestionCause::Unknown => {
                        monitor.attribute_cause(interface.map(|interface| &interface.measure))
                    }
                    cause => cause,
                };
                let Some(Some(monitor)) = self.monitors.get_mut(*place as usize) else { continue };
                let pressure = monitor.measure.pressure;
                let outcome = monitor.decide(self.now, pressure, cause, &self.limits);
                self.pending |= monitor.has_pending_report();
                match outcome {
                    Outcome::Same => {}
                    Outcome::StarvedAgain => {
                        self.starved_again.insert(monitor.link, monitor.finding(self.now));
                    }
                    Outcome::Changed => {
                        push(&mut self.found, &mut self.lost, &self.limits, monitor.finding(self.now));
                    }
                }
            }
        }
    }

    /// What is known of a path's interface the same way.
    fn interface_of(&self, monitor: &Monitor) -> Option<&Monitor> {
        let interface = self.interfaces.get(&monitor.link.interface)?;
        let whole = (*interface.whole.get(direction_index(monitor.link.direction))?)?;
        self.monitors.get(whole as usize)?.as_ref()
    }

    /// The cause of the congestion of a path's interface.
    fn common_cause(&self, monitor: &Monitor) -> CongestionCause {
        if monitor.is_interface() {
            return CongestionCause::Unknown;
        }
        self.interface_of(monitor)
            .filter(|whole| whole.hysteresis.level != CongestionLevel::None)
            .map_or(CongestionCause::Unknown, |whole| whole.cause.get())
    }
}

/// Has a finding wait to be fetched, in place of the oldest where too many wait.
fn push(found: &mut VecDeque<Congestion>, lost: &mut u64, limits: &Limits, finding: Congestion) {
    if found.len() >= limits.max_findings.max(1) {
        found.pop_front();
        *lost += 1;
    }
    found.push_back(finding);
}

/// Counts a flow more, or one less, at a monitor.
fn count_flow(monitors: &mut [Option<Monitor>], place: u32, count: fn(u32, u32) -> u32) {
    if let Some(Some(monitor)) = monitors.get_mut(place as usize) {
        monitor.flows = count(monitor.flows, 1);
    }
}
