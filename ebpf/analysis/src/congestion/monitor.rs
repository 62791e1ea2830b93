//! What is known of one link, and what that says.

use super::bins::{BIN_NS, BINS, Bins, add};
use super::level::{Level, MILD};
use super::{Capacity, Cause, Limits, Link, Path, Signals, State};
use harmonaize_events::Direction;

/// A round trip longer than this counts as this.
const LONGEST_TRIP_NS: u64 = 60_000_000_000;
/// Bins that rates, marks and losses are taken over.
const WINDOW: u64 = 8;
/// Bins that the load and the shares in it are taken over.
const SHORT: u64 = 4;
/// Bins that the least of the round trips is taken over.
const TRIPS: u64 = 3;
/// Bins that what a link carried without a queue is taken over.
const CLEAR: u64 = 24;

/// A link's recent past, its rest, its capacity and its state.
#[derive(Debug, Clone)]
pub(super) struct Monitor {
    pub(super) link: Link,
    pub(super) bins: Bins,
    pub(super) level: Level,
    pub(super) cause: Cause,
    pub(super) measure: Measure,
    /// Flows that name it.
    pub(super) flows: u32,
    pub(super) active: bool,
    /// When something crossed it last.
    pub(super) heard_ns: u64,
    /// The least round trip.
    pub(super) rest: Aged,
    trip: Option<Trip>,
    /// What it carried while a queue stood, and while none did.
    full: Aged,
    clear: Aged,
    clear_since_ns: u64,
    candidate: u64,
    estimates: [u64; 3],
    evidence: u64,
    turning: Option<(Cause, u64)>,
    turn_ns: u64,
    turned_ns: u64,
}

#[derive(Debug, Clone, Copy)]
struct Trip {
    at_ns: u64,
    trip_ns: u64,
}

/// The least, or the most, of the last while: between one and two ages.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Aged {
    now: Option<u64>,
    before: Option<u64>,
    since_ns: u64,
}

impl Aged {
    fn merged(&self, choose: fn(u64, u64) -> u64) -> Option<u64> {
        match (self.now, self.before) {
            (Some(one), Some(other)) => Some(choose(one, other)),
            (one, other) => one.or(other),
        }
    }

    pub(super) fn least(&self) -> Option<u64> {
        self.merged(u64::min)
    }

    pub(super) fn most(&self) -> Option<u64> {
        self.merged(u64::max)
    }

    pub(super) fn take(&mut self, now_ns: u64, age_ns: u64, value: u64, choose: fn(u64, u64) -> u64) {
        if now_ns.saturating_sub(self.since_ns) >= age_ns {
            // Nothing is forgotten for want of news.
            *self = Self { now: None, before: self.now.or(self.before), since_ns: now_ns };
        }
        self.now = Some(self.now.map_or(value, |now| choose(now, value)));
    }
}

/// What a link's recent past says.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Measure {
    /// Of what its queue says: at 1 mildly congested, at 2 severely.
    pub(super) pressure: f64,
    /// What round trips alone say.
    pub(super) delay: f64,
    pub(super) signals: Signals,
    pub(super) own_rate: u64,
    pub(super) other_rate: u64,
    /// Bytes over the short window.
    pub(super) bytes: u64,
    /// Of those, own ones.
    pub(super) own_bytes: u64,
    pub(super) trip_ns: u64,
    pub(super) marked_ppm: u32,
    pub(super) lost_ppm: u32,
    pub(super) used_ppm: u32,
    pub(super) capacity: u64,
    /// Of what must have come to the bottleneck to make its queue, the part that was ours.
    pub(super) explained: Option<f64>,
    /// The path has carried as much without a queue before.
    pub(super) carried_before: bool,
    pub(super) evidence: u64,
}

/// Parts of a million.
fn ppm(part: u64, whole: u64) -> u32 {
    let ppm = u128::from(part) * 1_000_000 / u128::from(whole.max(1));
    u32::try_from(ppm).unwrap_or(u32::MAX)
}

/// A signal in units of pressure: 1 at `mild`, 2 at `severe`.
fn pressure(value: f64, mild: f64, severe: f64) -> f64 {
    if value < mild { value / mild } else { 1.0 + (value - mild) / (severe - mild).max(f64::MIN_POSITIVE) }
}

fn per_second(bytes: u64, span_ns: u64) -> u64 {
    u64::try_from(u128::from(bytes) * 1_000_000_000 / u128::from(span_ns.max(1))).unwrap_or(u64::MAX)
}

impl Monitor {
    pub(super) fn new(link: Link, now_ns: u64, limits: &Limits) -> Self {
        Self {
            link,
            bins: Bins::new(now_ns),
            level: Level::new(limits),
            cause: Cause::Unknown,
            measure: Measure::default(),
            flows: 0,
            active: false,
            heard_ns: now_ns,
            rest: Aged::default(),
            trip: None,
            full: Aged::default(),
            clear: Aged::default(),
            clear_since_ns: now_ns,
            candidate: 0,
            estimates: [0; 3],
            evidence: 0,
            turning: None,
            turn_ns: limits.turn_ns,
            turned_ns: 0,
        }
    }

    /// Takes a round trip that ended now; returns how much of it is beyond rest. What has not ended is `pending`.
    pub(super) fn trip(&mut self, now_ns: u64, trip_ns: u64, pending: bool, limits: &Limits) -> u64 {
        let trip_ns = trip_ns.min(LONGEST_TRIP_NS);
        if !pending {
            let age_ns =
                if self.level.state == State::None { limits.rest_age_ns } else { 10 * limits.rest_age_ns };
            self.rest.take(now_ns, age_ns, trip_ns, u64::min);
        }
        let rest = self.rest.least().unwrap_or(trip_ns);
        let queue = trip_ns.saturating_sub(rest);
        let threshold = limits.delay_ns.max(rest / 2);
        if queue >= threshold {
            self.evidence += 1;
        }
        // What is under way tells no more than a least; it counts where nothing better is known.
        if pending && (queue < 2 * threshold || self.recent_trip(now_ns).is_some()) {
            return queue;
        }
        self.trip = Some(Trip { at_ns: now_ns, trip_ns });
        if let Some(bin) = self.bins.at(now_ns) {
            bin.trip = Some(bin.trip.map_or(trip_ns, |trip| trip.min(trip_ns)));
        }
        self.queue(now_ns.saturating_sub(trip_ns), queue);
        queue
    }

    /// What was sent at a time found a queue of so much time.
    pub(super) fn queue(&mut self, sent_ns: u64, queue_ns: u64) {
        if let Some(bin) = self.bins.at(sent_ns) {
            bin.queue = Some(bin.queue.map_or(queue_ns, |queue| queue.min(queue_ns)));
        }
    }

    /// Takes marks and losses.
    pub(super) fn signals(&mut self, now_ns: u64, marks: u64, lost: u64) {
        if marks == 0 && lost == 0 {
            return;
        }
        add(&mut self.evidence, marks.saturating_add(lost));
        if let Some(bin) = self.bins.at(now_ns) {
            add(&mut bin.marks, marks);
            add(&mut bin.lost, lost);
        }
    }

    fn recent_trip(&self, now_ns: u64) -> Option<u64> {
        let number = now_ns / BIN_NS;
        self.bins.before(number, TRIPS).filter_map(|(_, bin)| bin.trip).min()
    }

    /// Begins a new [`Measure`], as of the end of what was heard, with the rates.
    pub(super) fn rates(&mut self, end_ns: u64) {
        self.bins.advance(end_ns);
        // The last bin that is whole.
        let number = (end_ns / BIN_NS).saturating_sub(1);
        let mut measure = Measure { evidence: self.evidence, ..Measure::default() };
        for (_, bin) in self.bins.before(number, SHORT) {
            measure.own_bytes += bin.own;
            measure.bytes += bin.seen();
        }
        let others = measure.bytes.saturating_sub(measure.own_bytes);
        measure.own_rate = per_second(measure.own_bytes, SHORT * BIN_NS);
        measure.other_rate = per_second(others, SHORT * BIN_NS);
        self.measure = measure;
    }

    /// Adds to the measure of a path what its queues say.
    pub(super) fn look(&mut self, end_ns: u64, stated: u64, limits: &Limits) {
        let mut measure = self.measure;
        let (mut packets, mut marks, mut lost) = (0, 0, 0);
        for (_, bin) in self.bins.before(end_ns / BIN_NS, WINDOW) {
            packets += bin.packets;
            marks += bin.marks;
            lost += bin.lost;
        }
        let packets = packets.max(marks).max(lost);
        (measure.marked_ppm, measure.lost_ppm) = (ppm(marks, packets), ppm(lost, packets));
        let enough = |count: u64, part: u32, (mild, severe): (u32, u32)| {
            let part = pressure(f64::from(part), f64::from(mild), f64::from(severe));
            part.min(pressure(count as f64, 2.0, 8.0))
        };
        let marks = enough(marks, measure.marked_ppm, limits.marked_ppm);
        let losses = enough(lost, measure.lost_ppm, limits.lost_ppm);
        measure.delay = self.delay(end_ns, &mut measure, limits);
        let signals = (measure.delay >= MILD, marks >= MILD, losses >= MILD);
        measure.signals = Signals { delay: signals.0, marks: signals.1, loss: signals.2, load: false };
        measure.pressure = measure.delay.max(marks).max(losses);
        self.measure = measure;
        self.learn(end_ns, stated, limits);
    }

    /// Gives the interface the queues of the path that has the least: what all paths have is the interface's. With its load.
    pub(super) fn share(&mut self, end_ns: u64, stated: u64, least: Option<&Measure>, limits: &Limits) {
        let (own, least) = (self.measure, least.copied().unwrap_or_default());
        self.measure = Measure {
            evidence: own.evidence,
            bytes: own.bytes,
            own_bytes: own.own_bytes,
            own_rate: own.own_rate,
            other_rate: own.other_rate,
            ..least
        };
        self.learn(end_ns, stated, limits);
        let load = f64::from(self.measure.used_ppm) / 1e6;
        // However full, load alone is no severe congestion.
        let load = pressure(load, limits.load, 1.0).min(1.5);
        self.measure.signals.load = load >= MILD;
        self.measure.pressure = self.measure.pressure.max(load);
        if self.measure.signals != Signals::default() {
            self.evidence += 1;
        }
    }

    fn delay(&self, end_ns: u64, measure: &mut Measure, limits: &Limits) -> f64 {
        // A round trip says how things are for about as long as it took.
        let held = self.trip.filter(|trip| {
            end_ns.saturating_sub(trip.at_ns) <= (2 * trip.trip_ns).clamp(TRIPS * BIN_NS, 100 * BIN_NS)
        });
        let trip = self.recent_trip(end_ns).or(held.map(|trip| trip.trip_ns));
        let Some((trip_ns, rest)) = trip.zip(self.rest.least()) else { return 0.0 };
        measure.trip_ns = trip_ns;
        let mild = limits.delay_ns.max(rest / 2) as f64;
        pressure(trip_ns.saturating_sub(rest) as f64, mild, limits.severe_delay_ns.max(2 * rest) as f64)
    }

    /// What the link can carry, and which part of its queue is ours.
    fn learn(&mut self, end_ns: u64, stated: u64, limits: &Limits) {
        let delay = self.measure.delay;
        let most = if stated == 0 { u64::MAX } else { stated };
        if delay < 0.5 && self.level.state == State::None {
            // A burst may still show in round trips that are under way: what seems clear waits.
            let settled = end_ns.saturating_sub(self.clear_since_ns) >= BINS as u64 * BIN_NS;
            let number = (end_ns / BIN_NS).saturating_sub(1);
            let bytes: u64 = self.bins.before(number, CLEAR).map(|(_, bin)| bin.seen()).sum();
            let rate = per_second(bytes, CLEAR * BIN_NS);
            if settled {
                if self.candidate > 0 {
                    self.clear.take(end_ns, limits.rest_age_ns, self.candidate.min(most), u64::max);
                }
                (self.candidate, self.clear_since_ns) = (rate, end_ns);
            }
            self.candidate = self.candidate.max(rate);
            self.estimates = [0; 3];
        } else if delay >= MILD {
            (self.candidate, self.clear_since_ns) = (0, end_ns);
        }
        let came = self.came();
        if let Some(came) = came.filter(|came| delay >= MILD && came.whole) {
            let estimate = per_second(came.seen, came.span_ns).min(most);
            let [_, second, third] = self.estimates;
            self.estimates = [second, third, estimate];
            let sure = self.estimates.iter().copied().min().unwrap_or_default();
            if sure > 0 {
                self.full.take(end_ns, 10 * limits.rest_age_ns, sure, u64::max);
            }
        }
        let learned = self.full.most().max(self.clear.most()).unwrap_or_default();
        let capacity = match limits.capacity {
            Capacity::Stated if stated > 0 => stated,
            _ if stated > 0 && (learned == 0 || learned as f64 >= 0.7 * stated as f64) => stated,
            _ => learned,
        };
        self.measure.capacity = capacity;
        let rate = per_second(self.measure.bytes, SHORT * BIN_NS);
        self.measure.used_ppm = if capacity == 0 { 0 } else { ppm(rate, capacity) };
        if let Some(came) = came.filter(|_| capacity > 0 && delay >= MILD) {
            let needed = capacity as f64 * came.span_ns as f64 / 1e9;
            self.measure.explained = Some(came.own as f64 / needed.max(1.0));
        }
        // Slower than ever without a queue, and yet there is one.
        let before = self.clear.most().unwrap_or_default();
        self.measure.carried_before =
            came.is_some_and(|came| per_second(came.seen, came.span_ns) as f64 <= 0.75 * before as f64);
    }

    /// What came to the bottleneck until the last packet was sent of which the queue is known, and in which time a link that
    /// was busy throughout would have sent it on: the span, and by how much its queue grew.
    fn came(&self) -> Option<Came> {
        let latest = self.bins.latest();
        let (sent, queue_ns) = self.bins.before(latest, 60).find_map(|(at, bin)| Some((at, bin.queue?)))?;
        let (mut own, mut seen, mut first) = (0, 0, sent);
        for (number, bin) in self.bins.before(sent, WINDOW) {
            own += bin.own;
            seen += bin.seen();
            if bin.seen() > 0 {
                first = number;
            }
        }
        let length = (sent - first + 1) * BIN_NS;
        let whole = sent - first + 1 >= WINDOW / 2;
        let earlier = first.checked_sub(1)?;
        // Had nothing come before, there was no queue, or none of ours; where it is not known, it stood.
        let began = if sent - first + 1 < WINDOW {
            0
        } else {
            self.bins.before(earlier, WINDOW).find_map(|(_, bin)| bin.queue).unwrap_or(queue_ns)
        };
        let span_ns = (length + queue_ns).saturating_sub(began).max(BIN_NS);
        Some(Came { own, seen, span_ns, whole })
    }

    /// Takes the pressure at which the link stands, and who is the cause as of now. Whether its state or cause has changed.
    pub(super) fn decide(&mut self, now_ns: u64, pressure: f64, cause: Cause, limits: &Limits) -> bool {
        let before = self.level.state;
        let changed = self.level.step(now_ns, pressure, self.measure.evidence, limits);
        if self.level.state == State::None {
            (self.cause, self.turning) = (Cause::Unknown, None);
            return changed;
        }
        if before == State::None {
            self.cause = cause;
            self.turning = None;
            return changed;
        }
        // Without pressure, as after it, nobody is the cause anew.
        if cause == self.cause || cause == Cause::Unknown || pressure < MILD {
            self.turning = None;
            return changed;
        }
        let (turning, since_ns) = *self.turning.get_or_insert((cause, now_ns));
        if turning != cause {
            self.turning = Some((cause, now_ns));
        } else if now_ns.saturating_sub(since_ns) >= self.turn_ns || self.cause == Cause::Unknown {
            let soon = now_ns.saturating_sub(self.turned_ns) < (16 * self.turn_ns).max(limits.calm_ns);
            self.turn_ns = if soon { (2 * self.turn_ns).min(limits.longest_hold_ns) } else { limits.turn_ns };
            (self.cause, self.turning, self.turned_ns) = (cause, None, now_ns);
            return true;
        }
        changed
    }

    /// Who the measure says is the cause.
    pub(super) fn blame(&self) -> Cause {
        let measure = &self.measure;
        let others = measure.bytes.saturating_sub(measure.own_bytes);
        if measure.bytes == 0 {
            return self.cause;
        }
        if others as f64 >= 0.15 * measure.bytes as f64 {
            return Cause::Others;
        }
        if measure.carried_before && measure.signals.delay {
            return Cause::Others;
        }
        let part = match measure.explained {
            Some(explained) if self.link.direction == Direction::Egress => explained,
            _ if measure.capacity > 0 => f64::from(measure.used_ppm) / 1e6,
            _ => return Cause::Unknown,
        };
        match part {
            part if part < 0.75 => Cause::Others,
            part if part >= 0.85 => Cause::Own,
            _ => self.cause,
        }
    }

    /// Whether it may be left alone until something crosses it.
    pub(super) fn rests(&self, end_ns: u64) -> bool {
        self.level.rests() && end_ns.saturating_sub(self.heard_ns) > BINS as u64 * BIN_NS
    }

    pub(super) fn is_whole(&self) -> bool {
        self.link.path == Path::Whole
    }
}

#[derive(Debug, Clone, Copy)]
struct Came {
    own: u64,
    seen: u64,
    span_ns: u64,
    /// It lasted long enough to tell a rate.
    whole: bool,
}
