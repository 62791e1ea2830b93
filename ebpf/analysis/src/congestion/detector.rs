//! From records to links: which flow crosses what, and who is asked when.

mod sweep;

use super::bins::{BIN_NS, add};
use super::flow::{Change, Memory};
use super::leap::Leap;
use super::monitor::{Measure, Monitor};
use super::starved::{Late, Trail};
use super::{Cause, Congestion, Limits, Link, Path, State};
use crate::trace::{LostKind, Record};
use harmonaize_events::{Direction, Event, EventKind, FlowKey, InterfaceTotals, Protocol};
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, VecDeque};

/// Without news the windows end this long before now.
const SILENCE_NS: u64 = 10_000_000;
const SWEEP_NS: u64 = 10_000_000_000;
/// A path with nothing measured, or less than this part of its interface's bytes, does not speak for the interface; where there are many paths, one with
/// less than half of an equal part.
const SPEAKS: u64 = 20;

const NOBODY: u32 = u32::MAX;

#[derive(Debug, Clone)]
struct Flow {
    memory: Memory,
    port: u16,
    out: Places,
    into: Places,
}

/// The monitors of one way of a flow.
#[derive(Debug, Clone, Copy)]
struct Places {
    path: u32,
    whole: u32,
}

#[derive(Debug, Clone, Default)]
struct Interface {
    bytes_per_second: u64,
    totals: Option<(u64, InterfaceTotals)>,
    least: [Option<Measure>; 2],
    whole: [Option<u32>; 2],
    /// Paths that something crosses.
    paths: [u64; 2],
}

const fn way(direction: Direction) -> usize {
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
    monitors: Vec<Option<Monitor>>,
    free: Vec<u32>,
    places: HashMap<Link, u32>,
    active: Vec<u32>,
    found: VecDeque<Congestion>,
    now_ns: u64,
    heard_ns: u64,
    looked_ns: u64,
    swept_ns: u64,
    urgent: bool,
    unsettled: bool,
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
            monitors: Vec::new(),
            free: Vec::new(),
            places: HashMap::new(),
            active: Vec::new(),
            found: VecDeque::new(),
            now_ns: 0,
            heard_ns: 0,
            looked_ns: 0,
            swept_ns: 0,
            urgent: false,
            unsettled: false,
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
                self.snapshot(*time_ns, key, 0, |memory| memory.tcp(*time_ns, flow));
            }
            Record::Roce { time_ns, key, counters } => {
                let direction = match key.direction {
                    direction if direction == Direction::Ingress as u8 => Direction::Ingress,
                    _ => Direction::Egress,
                };
                let port = counters.source_port as u16;
                self.snapshot(*time_ns, key, port, |memory| memory.roce(*time_ns, direction, counters));
            }
            Record::Event(event) => self.event(event),
            Record::Owner(owner) => self.owned(owner.time_ns, &owner.flow, owner.holds),
            Record::Link(link) => {
                let known = self.interfaces.contains_key(&link.interface);
                if known || self.interfaces.len() < self.limits.links {
                    let bytes_per_second = if link.watched { link.bytes_per_second } else { 0 };
                    self.interfaces.entry(link.interface).or_default().bytes_per_second = bytes_per_second;
                }
            }
            Record::Totals { time_ns, totals } => self.totals(*time_ns, totals),
            Record::Lost(lost) if lost.what == LostKind::Gap => self.interrupted(),
            Record::Lost(_) | Record::Mark(_) | Record::Observer(_) => {}
        }
    }

    /// The time is now so late; call it when all records up to then were taken, every millisecond or as often as there are
    /// records.
    ///
    /// Cost: once in a millisecond, a look at each link that something crossed since the last, or whose state is not none.
    pub fn advance(&mut self, now_ns: u64) {
        self.now_ns = self.now_ns.max(now_ns);
        let end_ns = self.heard_ns.max(self.now_ns.saturating_sub(SILENCE_NS));
        if end_ns / BIN_NS == self.looked_ns / BIN_NS && !self.urgent {
            return;
        }
        (self.looked_ns, self.urgent) = (end_ns, false);
        let mut active = std::mem::take(&mut self.active);
        self.look(end_ns, &active);
        self.decide(&active);
        let monitors = &mut self.monitors;
        active.retain(|place| {
            let monitor = monitors.get_mut(*place as usize).and_then(Option::as_mut);
            monitor.is_some_and(|monitor| {
                monitor.active = !monitor.rests(end_ns);
                if !monitor.active {
                    monitor.measure = Measure::default();
                }
                monitor.active
            })
        });
        self.active = active;
        if self.now_ns.saturating_sub(self.swept_ns) >= SWEEP_NS {
            self.sweep();
        }
    }

    /// The next change of a link's state or cause, oldest first.
    pub fn poll(&mut self) -> Option<Congestion> {
        self.found.pop_front()
    }

    /// How every link stands that something crossed in the last minute.
    pub fn links(&self) -> impl Iterator<Item = Congestion> {
        self.monitors.iter().flatten().map(|monitor| monitor.finding(self.now_ns))
    }

    /// How a link stands; none where nothing crossed it.
    pub fn link(&self, link: &Link) -> Option<Congestion> {
        let place = self.places.get(link)?;
        let monitor = self.monitors.get(*place as usize)?.as_ref()?;
        Some(monitor.finding(self.now_ns))
    }

    /// Whether a verdict is in the making: who looks at flows more closely now has it sooner.
    pub fn is_unsettled(&self) -> bool {
        self.unsettled
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
        time_ns: u64,
        key: &FlowKey,
        port: u16,
        change: impl FnOnce(&mut Memory) -> Option<(Change, Change)>,
    ) {
        self.heard_ns = self.heard_ns.max(time_ns);
        let Some(flow) = self.flow(time_ns, key, port) else { return };
        let changes = change(&mut flow.memory);
        let (own, out_places, into_places) = (flow.memory.own, flow.out, flow.into);
        if let Some((out, into)) = changes {
            self.cross(time_ns, own, out_places, &out);
            self.cross(time_ns, own, into_places, &into);
        }
    }

    /// The flow with a key, made known if it is not; none where there are too many.
    fn flow(&mut self, time_ns: u64, key: &FlowKey, port: u16) -> Option<&mut Flow> {
        let roce = key.protocol == Protocol::Roce as u8;
        let known = self.flows.get(key).map(|flow| flow.port);
        if known.is_some_and(|known| !roce || port == 0 || known == port) {
            return self.flows.get_mut(key);
        }
        if known.is_none() && self.flows.len() >= self.limits.flows {
            self.unplaced += 1;
            return None;
        }
        let told = if key.direction == Direction::Ingress as u8 { (0, port) } else { (port, 0) };
        let (out, into) = if roce { told } else { (0, 0) };
        let path = |port| Path::Remote { address: key.remote, port };
        self.settle(time_ns, key, port, [path(out), path(into)])
    }

    /// An own connection takes a path of its own; when it is none any more, that of all others.
    fn owned(&mut self, time_ns: u64, key: &FlowKey, holds: bool) {
        let Some(flow) = self.flow(time_ns, key, 0) else { return };
        let changes = flow.memory.own != holds;
        flow.memory.own = holds;
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
        self.settle(time_ns, key, 0, [path, path]);
    }

    /// Gives a flow its paths, outwards and inwards; none where there are too many.
    fn settle(&mut self, time_ns: u64, key: &FlowKey, port: u16, paths: [Path; 2]) -> Option<&mut Flow> {
        let [out, into] = paths;
        let out = self.both(time_ns, key, Direction::Egress, out)?;
        let into = self.both(time_ns, key, Direction::Ingress, into)?;
        let flow = match self.flows.entry(*key) {
            Entry::Occupied(flow) => {
                let flow = flow.into_mut();
                for place in [flow.out.path, flow.into.path] {
                    named(&mut self.monitors, place, u32::saturating_sub);
                }
                (flow.port, flow.out, flow.into) = (port, out, into);
                flow
            }
            Entry::Vacant(entry) => entry.insert(Flow { memory: Memory::default(), port, out, into }),
        };
        for place in [out.path, into.path] {
            named(&mut self.monitors, place, u32::saturating_add);
        }
        Some(flow)
    }

    fn both(&mut self, time_ns: u64, key: &FlowKey, direction: Direction, path: Path) -> Option<Places> {
        let whole = self.place(time_ns, Link { interface: key.interface, direction, path: Path::Whole })?;
        let path = self.place(time_ns, Link { interface: key.interface, direction, path })?;
        Some(Places { path, whole })
    }

    /// The least round trip on any path to the same end: equal paths are as long as each other, and one that is new may have
    /// a queue already.
    fn rest_of(&self, link: &Link) -> Option<u64> {
        let to = link.path.address()?;
        let beside = self.monitors.iter().flatten().filter(|monitor| {
            let other = monitor.link;
            let way = (other.interface, other.direction, other.path.address());
            way == (link.interface, link.direction, Some(to))
        });
        beside.filter_map(|monitor| monitor.rest.least()).min()
    }

    /// Where a link's monitor is, made if it is not there; none where there are too many.
    fn place(&mut self, time_ns: u64, link: Link) -> Option<u32> {
        if let Some(place) = self.places.get(&link) {
            return Some(*place);
        }
        if self.places.len() >= self.limits.links {
            self.unplaced += 1;
            return None;
        }
        let mut monitor = Monitor::new(link, time_ns, &self.limits);
        if let Some(rest_ns) = self.rest_of(&link) {
            monitor.rest.take(time_ns, self.limits.rest_age_ns, rest_ns, u64::min);
        }
        let place = match self.free.pop() {
            Some(place) => place,
            None => {
                self.monitors.push(None);
                u32::try_from(self.monitors.len() - 1).unwrap_or(NOBODY)
            }
        };
        *self.monitors.get_mut(place as usize)? = Some(monitor);
        self.places.insert(link, place);
        if link.path == Path::Whole {
            let interface = self.interfaces.entry(link.interface).or_default();
            if let Some(whole) = interface.whole.get_mut(way(link.direction)) {
                *whole = Some(place);
            }
        }
        Some(place)
    }

    /// What changed on a flow crosses its path and its interface.
    fn cross(&mut self, time_ns: u64, own: bool, places: Places, change: &Change) {
        if *change == Change::default() {
            return;
        }
        let limits = &self.limits;
        let mut queue = None;
        for place in [places.path, places.whole] {
            let Some(monitor) = self.monitors.get_mut(place as usize).and_then(Option::as_mut) else {
                continue;
            };
            monitor.fresh = true;
            if !monitor.active {
                monitor.active = true;
                self.active.push(place);
            }
            if change.bytes > 0 {
                monitor.heard_ns = time_ns;
                for (from_ns, to_ns, bytes) in change.spans.into_iter().filter(|(.., bytes)| *bytes > 0) {
                    monitor.bins.spread(from_ns, to_ns, bytes, |bin, bytes| {
                        let class = if own { &mut bin.own } else { &mut bin.other };
                        add(class, bytes);
                    });
                }
                if let Some(bin) = monitor.bins.at(change.to_ns) {
                    add(&mut bin.packets, change.packets);
                }
            }
            if monitor.is_whole() {
                if let Some(queue) = queue {
                    monitor.queue(queue);
                }
                continue;
            }
            monitor.signals(time_ns, change.marks, change.lost);
            if let Some(least) = change.least {
                monitor.rest.take(time_ns, limits.rest_age_ns, least, u64::min);
            }
            change.legs.into_iter().flatten().for_each(|leg| monitor.trail.ended(leg));
            if let Some(leg) = change.trip {
                queue = Some(monitor.trip(time_ns, leg, limits));
            } else if let Some(pending_ns) = change.pending {
                monitor.pending(time_ns, pending_ns, limits);
            }
        }
    }

    /// A packet of a connection was sent again: this need not wait for the next snapshot. Or one was acknowledged late.
    fn event(&mut self, event: &Event) {
        let kind = EventKind::from_number(event.kind);
        let told = matches!(kind, Some(EventKind::Retransmission | EventKind::LateRoundTrip));
        if !told || event.flow.protocol != Protocol::Tcp as u8 {
            return;
        }
        let direction = match event.flow.direction {
            direction if direction == Direction::Ingress as u8 => Direction::Ingress,
            _ => Direction::Egress,
        };
        let Some(flow) = self.flows.get_mut(&FlowKey { direction: 0, ..event.flow }) else { return };
        if kind == Some(EventKind::LateRoundTrip) {
            flow.memory.late(event);
            let place = flow.out.path;
            return self.late(place, &Leap::of(event));
        }
        let lost = flow.memory.lost(event.time_ns, direction, event.total);
        let place = if direction == Direction::Egress { flow.out.path } else { flow.into.path };
        let monitor = self.monitors.get_mut(place as usize).and_then(Option::as_mut);
        if let Some(monitor) = monitor.filter(|_| lost > 0) {
            monitor.signals(event.time_ns, 0, lost);
            monitor.fresh = true;
            self.urgent = true;
            if !monitor.active {
                monitor.active = true;
                self.active.push(place);
            }
        }
    }

    /// A round trip on a path was late, and the one before was not: the queue may have leapt up, which need not wait for the next snapshot either.
    fn late(&mut self, place: u32, leap: &Leap) {
        let at = |place: u32| self.monitors.get(place as usize).and_then(Option::as_ref);
        let Some(monitor) = at(place) else { return };
        let Some(interface) = self.interfaces.get(&monitor.link.interface) else { return };
        let whole = interface.whole.get(way(monitor.link.direction)).copied().flatten().and_then(at);
        let stated = interface.bytes_per_second;
        if whole.is_none_or(|whole| !monitor.leaps(leap, whole, self.now_ns, stated)) {
            return;
        }
        let Some(Some(monitor)) = self.monitors.get_mut(place as usize) else { return };
        monitor.leapt(leap, &self.limits);
        self.urgent = true;
        if !monitor.active {
            monitor.active = true;
            self.active.push(place);
        }
    }

    fn totals(&mut self, time_ns: u64, totals: &InterfaceTotals) {
        self.heard_ns = self.heard_ns.max(time_ns);
        let Ok(index) = u32::try_from(totals.interface) else { return };
        if !self.interfaces.contains_key(&index) && self.interfaces.len() >= self.limits.links {
            return;
        }
        let before = self.interfaces.entry(index).or_default().totals.replace((time_ns, *totals));
        let Some((from_ns, before)) = before else { return };
        let bytes = [
            (Direction::Egress, totals.egress.bytes.checked_sub(before.egress.bytes)),
            (Direction::Ingress, totals.ingress.bytes.checked_sub(before.ingress.bytes)),
        ];
        for (direction, bytes) in bytes {
            let Some(bytes) = bytes.filter(|bytes| *bytes > 0) else { continue };
            let link = Link { interface: index, direction, path: Path::Whole };
            let Some(place) = self.place(time_ns, link) else { continue };
            let monitor = self.monitors.get_mut(place as usize).and_then(Option::as_mut);
            let Some(monitor) = monitor else { continue };
            monitor.heard_ns = time_ns;
            monitor.bins.spread(from_ns, time_ns, bytes, |bin, bytes| {
                add(&mut bin.total, bytes);
            });
            if !monitor.active {
                monitor.active = true;
                self.active.push(place);
            }
        }
    }

    /// Nothing was observed for a while: what comes next says nothing of the last milliseconds.
    fn interrupted(&mut self) {
        for flow in self.flows.values_mut() {
            flow.memory.interrupted();
        }
        for monitor in self.monitors.iter_mut().flatten() {
            monitor.bins.clear();
            monitor.trail = Trail::default();
        }
        for interface in self.interfaces.values_mut() {
            interface.totals = None;
        }
    }

    /// Measures: rates, then queues of paths, then what the paths of an interface have in common.
    fn look(&mut self, end_ns: u64, active: &[u32]) {
        for interface in self.interfaces.values_mut() {
            (interface.least, interface.paths) = ([None; 2], [0; 2]);
        }
        for place in active {
            if let Some(Some(monitor)) = self.monitors.get_mut(*place as usize) {
                monitor.due = monitor.is_due(end_ns);
                if monitor.due {
                    monitor.rates(end_ns);
                }
                if monitor.measure.bytes > 0 && !monitor.is_whole() {
                    let interface = self.interfaces.get_mut(&monitor.link.interface);
                    let paths = interface.and_then(|one| one.paths.get_mut(way(monitor.link.direction)));
                    paths.into_iter().for_each(|paths| *paths += 1);
                }
            }
        }
        for place in active {
            let Some(Some(monitor)) = self.monitors.get(*place as usize) else { continue };
            let Some(interface) = self.interfaces.get_mut(&monitor.link.interface) else { continue };
            let way = way(monitor.link.direction);
            let whole = interface.whole.get(way).copied().flatten();
            let whole = whole.and_then(|whole| self.monitors.get(whole as usize)?.as_ref());
            let bytes = whole.map_or(0, |whole| whole.measure.bytes);
            let stated = interface.bytes_per_second;
            // What else leaves by its interface must not be what it waits for.
            let starved = |late: Late| {
                let whole = whole.is_some_and(|whole| whole.has_room(&late, stated));
                whole && monitor.has_room(&late, stated) && monitor.has_traffic(&late, stated)
            };
            let starved = monitor.due
                && stated > 0
                && (monitor.leapt || monitor.late(end_ns, &self.limits).is_some_and(starved));
            let parts = interface.paths.get(way).map_or(SPEAKS, |paths| SPEAKS.max(2 * paths));
            let Some(Some(monitor)) = self.monitors.get_mut(*place as usize) else { continue };
            if monitor.is_whole() {
                continue;
            }
            if monitor.due {
                monitor.look(end_ns, stated, starved, &self.limits);
                monitor.leapt = false;
            }
            let measure = monitor.measure;
            let mute = measure.trip_ns == 0 && measure.pressure == 0.0;
            if mute || measure.bytes == 0 || measure.bytes < bytes / parts {
                continue;
            }
            if let Some(least) = interface.least.get_mut(way)
                && least.is_none_or(|least| measure.pressure < least.pressure)
            {
                *least = Some(measure);
            }
        }
        for place in active {
            let Some(Some(monitor)) = self.monitors.get_mut(*place as usize) else { continue };
            if monitor.is_whole()
                && let Some(interface) = self.interfaces.get(&monitor.link.interface)
            {
                let least = interface.least.get(way(monitor.link.direction)).and_then(Option::as_ref);
                monitor.share(end_ns, interface.bytes_per_second, least, &self.limits);
            }
        }
    }

    /// Judges: interfaces, then paths, whose cause is the interface's where that is congested itself.
    fn decide(&mut self, active: &[u32]) {
        self.unsettled = false;
        for wholes in [true, false] {
            for place in active {
                let Some(Some(monitor)) = self.monitors.get(*place as usize) else { continue };
                if monitor.is_whole() != wholes {
                    continue;
                }
                let cause = match self.common_cause(monitor) {
                    Cause::Unknown => monitor.blame(),
                    cause => cause,
                };
                let Some(Some(monitor)) = self.monitors.get_mut(*place as usize) else { continue };
                let pressure = monitor.measure.pressure;
                let changed = monitor.decide(self.now_ns, pressure, cause, &self.limits);
                self.unsettled |= monitor.is_unsettled(&self.limits);
                if changed {
                    if self.found.len() >= self.limits.findings.max(1) {
                        self.found.pop_front();
                        self.lost += 1;
                    }
                    self.found.push_back(monitor.finding(self.now_ns));
                }
            }
        }
    }

    /// The cause of the congestion of a path's interface.
    fn common_cause(&self, monitor: &Monitor) -> Cause {
        if monitor.is_whole() {
            return Cause::Unknown;
        }
        let interface = self.interfaces.get(&monitor.link.interface);
        let whole = interface.and_then(|interface| *interface.whole.get(way(monitor.link.direction))?);
        let whole = whole.and_then(|whole| self.monitors.get(whole as usize)?.as_ref());
        whole.filter(|whole| whole.level.state != State::None).map_or(Cause::Unknown, |whole| whole.cause)
    }
}

/// Counts a flow more, or one less, at a monitor.
fn named(monitors: &mut [Option<Monitor>], place: u32, count: fn(u32, u32) -> u32) {
    if let Some(Some(monitor)) = monitors.get_mut(place as usize) {
        monitor.flows = count(monitor.flows, 1);
    }
}
