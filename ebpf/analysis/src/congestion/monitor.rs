//! What is known of one link, and what that says.

use super::bins::{self, BIN, BINS, Bins, QueueSample, add, begin_of, length, number_at};
use super::cause::{CauseState, Outcome};
use super::hysteresis::{HysteresisState, MILD};
use super::starved::{RttHistory, RttSample};
use super::windowed::WindowedMinMax;
use super::{Capacity, Limits, Link, Path, Signals};
use crate::nanos;
use harmonaize_abi::{CongestionCause, CongestionLevel, Nanos};
use std::time::Duration;

/// A measure is renewed after this.
const OLD: Duration = Duration::from_millis(10);
/// A round trip longer than this counts as this.
pub(super) const MAX_RTT: Duration = Duration::from_secs(60);
/// Bins that rates, marks and losses are taken over.
const WINDOW: u64 = 8;
/// Bins that the load and the shares in it are taken over.
const SHORT_WINDOW: u64 = 4;
/// Bins that the least of the round trips is taken over.
const RTT_BINS: u64 = 3;
/// How many estimates of the capacity are kept.
const ESTIMATES: usize = 7;
/// Known queues nearer than so many bins to each other say little of what came between.
const MIN_ANCHOR_DISTANCE: u64 = 8;
/// After so many empty bins there is no queue of what was seen.
const QUIET: u64 = 2;
/// Bins that what a link carried without a queue is taken over.
const CLEAR: u64 = 24;
/// So many of the shortest queues that are news make a long one.
pub(super) const SEVERE_UNITS: u32 = 10;
/// So many times what round trips differ by at least is no accident.
pub(super) const JITTERS: u32 = 2;
/// Round trips in a row whose spread is taken.
const SPREAD_RTTS: u32 = 16;
/// Of a queue, the part that is ours from which we are the cause, and below which others are.
const OWN_PART: f64 = 0.75;
const CROSS_PART: f64 = 0.65;
/// A link's recent past, its rest, its capacity and its state.
#[derive(Debug, Clone)]
pub(super) struct Monitor {
    pub(super) link: Link,
    pub(super) bins: Bins,
    pub(super) hysteresis: HysteresisState,
    pub(super) cause: CauseState,
    pub(super) measure: Measure,
    /// Flows that name it.
    pub(super) flows: u32,
    pub(super) active: bool,
    /// Something was added since it was looked at.
    pub(super) updated: bool,
    /// It is looked at this time.
    pub(super) due: bool,
    /// Up to when it was looked at.
    pub(super) measured: Nanos,
    /// When something crossed it last.
    pub(super) last_seen: Nanos,
    /// The least round trip.
    pub(super) min_rtt: WindowedMinMax<Duration>,
    rtt: Option<LastRtt>,
    /// By how much round trips in a row differed at least, and those of now.
    jitter: WindowedMinMax<Duration>,
    spread: Spread,
    /// What it takes for [`Limits::queue_bytes`], and at least what its jitter makes of queues.
    pub(super) unit: Duration,
    /// The shortest queue that is news: a unit, and at most [`Limits::delay`].
    mild: Duration,
    /// A round trip so much longer than at rest is late, where own bursts make queues too.
    pub(super) late: Duration,
    /// What it carried while a queue stood, and while none did.
    max_queued: WindowedMinMax<u64>,
    max_unqueued: WindowedMinMax<u64>,
    unqueued_since: Nanos,
    candidate: u64,
    /// What passed in a second between queues that are known, the newest last. `estimated` is when what gave the newest was sent.
    estimates: [u64; ESTIMATES],
    estimated: Nanos,
    /// Which part of the queue was ours, the newest last.
    shares: [f64; 3],
    evidence: u64,
    /// Of a million, the most that it used of what is stated over a while.
    pub(super) max_utilization_ppm: WindowedMinMax<u64>,
    pub(super) rtt_history: RttHistory,
    /// Its queue leapt up since it was looked at.
    pub(super) queue_jumped: bool,
    /// What it can carry, in bytes a second, as last measured; 0 where that is not known.
    capacity: u64,
    /// The packets that told of its queue since it was looked at.
    news: Option<Anchors>,
}

#[derive(Debug, Clone, Copy)]
struct LastRtt {
    at: Nanos,
    rtt: Duration,
}

/// The shortest and the longest of some round trips.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Spread {
    count: u32,
    least: Duration,
    most: Duration,
}

impl Spread {
    /// Takes a round trip; returns by how much they differed once there are enough, and begins anew.
    pub(super) fn add(&mut self, trip: Duration) -> Option<Duration> {
        let first = self.count == 0;
        self.least = if first { trip } else { self.least.min(trip) };
        self.most = if first { trip } else { self.most.max(trip) };
        self.count = (self.count + 1) % SPREAD_RTTS;
        (self.count == 0).then(|| self.most.saturating_sub(self.least))
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
    pub(super) cross_traffic_rate: u64,
    /// Bytes over the short window.
    pub(super) bytes: u64,
    /// Of those, own ones.
    pub(super) own_bytes: u64,
    /// The most in a millisecond lately, as a rate.
    pub(super) peak: u64,
    pub(super) rtt: Duration,
    pub(super) ecn_ce_ppm: u32,
    pub(super) lost_ppm: u32,
    pub(super) used_ppm: u32,
    pub(super) capacity: u64,
    /// The capacity is what was seen, or agrees with it.
    pub(super) capacity_confirmed: bool,
    /// Of what must have come to the bottleneck to make its queue, the part that was ours.
    pub(super) own_part: Option<f64>,
    pub(super) evidence: u64,
}

impl Measure {
    /// The most that passed in a millisecond, as a part of the capacity; 0 where that is not known.
    fn peak_part(&self) -> f64 {
        if self.capacity_confirmed { f64::from(ppm(self.peak, self.capacity)) / 1e6 } else { 0.0 }
    }
}

/// Parts of a million.
pub(super) fn ppm(part: u64, whole: u64) -> u32 {
    let ppm = u128::from(part) * 1_000_000 / u128::from(whole.max(1));
    u32::try_from(ppm).unwrap_or(u32::MAX)
}

/// A signal in units of pressure: 1 at `mild`, 2 at `severe`.
pub(super) fn pressure(value: f64, mild: f64, severe: f64) -> f64 {
    if value < mild { value / mild } else { 1.0 + (value - mild) / (severe - mild).max(f64::MIN_POSITIVE) }
}

/// The pressure of so many packets with a sign, and of their part of a million. The last pair has the parts that are mild and
/// severe.
pub(super) fn signal_pressure(count: u64, part: u32, (mild, severe): (u32, u32)) -> f64 {
    let part = pressure(f64::from(part), f64::from(mild), f64::from(severe));
    part.min(pressure(count as f64, 2.0, 8.0))
}

/// The pressure of a load. However full, load alone is no severe congestion.
pub(super) fn load_pressure(used_ppm: u32, limits: &Limits) -> f64 {
    pressure(f64::from(used_ppm) / 1e6, limits.load, 1.0).min(1.5)
}

/// The median; of nothing known, 0.
fn median<const N: usize>(values: &[u64; N]) -> u64 {
    let mut values = *values;
    values.sort_unstable();
    values.get(N.saturating_sub(1) / 2).copied().unwrap_or_default()
}

pub(super) fn per_second(bytes: u64, span: Duration) -> u64 {
    u64::try_from(u128::from(bytes) * 1_000_000_000 / span.as_nanos().max(1)).unwrap_or(u64::MAX)
}

impl Monitor {
    pub(super) fn new(link: Link, now: Nanos, limits: &Limits) -> Self {
        Self {
            link,
            bins: Bins::new(now),
            hysteresis: HysteresisState::new(limits),
            cause: CauseState::new(limits),
            measure: Measure::default(),
            flows: 0,
            active: false,
            updated: false,
            due: false,
            measured: Nanos(0),
            last_seen: now,
            min_rtt: WindowedMinMax::default(),
            rtt: None,
            jitter: WindowedMinMax::default(),
            spread: Spread::default(),
            unit: limits.delay,
            mild: limits.delay,
            late: limits.delay,
            max_queued: WindowedMinMax::default(),
            max_unqueued: WindowedMinMax::default(),
            unqueued_since: now,
            candidate: 0,
            estimates: [0; ESTIMATES],
            estimated: Nanos(0),
            shares: [f64::NAN; 3],
            evidence: 0,
            max_utilization_ppm: WindowedMinMax::default(),
            rtt_history: RttHistory::default(),
            queue_jumped: false,
            capacity: 0,
            news: None,
        }
    }

    /// Takes a round trip that ended now; returns the queue that it found.
    pub(super) fn record_rtt(&mut self, now: Nanos, leg: RttSample, limits: &Limits) -> QueueSample {
        let sent = leg.sent;
        let trip = leg.took().min(MAX_RTT);
        let age = if self.hysteresis.level == CongestionLevel::None {
            limits.min_rtt_window
        } else {
            10 * limits.min_rtt_window
        };
        self.min_rtt.update(now, age, trip, Duration::min);
        if let Some(spread) = self.spread.add(trip) {
            self.jitter.update(now, age, spread, Duration::min);
        }
        let rest = self.min_rtt.min().unwrap_or(trip);
        let queue = QueueSample { sent, delay: trip.saturating_sub(rest) };
        if queue.delay >= self.mild.max(rest / 2) {
            add(&mut self.evidence, 1);
        }
        self.rtt = Some(LastRtt { at: now, rtt: trip });
        if let Some(bin) = self.bins.at(now) {
            bin.rtt = Some(bin.rtt.map_or(trip, |least| least.min(trip)));
        }
        self.record_queue(queue);
        queue
    }

    /// Takes the least that a round trip under way will be. It counts where nothing better is known, and for no small queue.
    pub(super) fn record_pending_rtt(&mut self, now: Nanos, trip: Duration) {
        let Some(rest) = self.min_rtt.min() else { return };
        let trip = trip.min(MAX_RTT);
        self.rtt_history.set_pending(now.before(trip), now);
        if trip.saturating_sub(rest) >= 2 * self.mild.max(rest / 2) && self.recent_rtt(now).is_none() {
            add(&mut self.evidence, 1);
            self.rtt = Some(LastRtt { at: now, rtt: trip });
        }
    }

    /// What was sent at a time found a queue.
    pub(super) fn record_queue(&mut self, queue: QueueSample) {
        if let Some(bin) = self.bins.at(queue.sent)
            && bin.queue.is_none_or(|least| queue.delay < least.delay)
        {
            bin.queue = Some(queue);
        }
    }

    /// Takes marks and losses.
    pub(super) fn record_signals(&mut self, now: Nanos, marks: u64, lost: u64) {
        if marks == 0 && lost == 0 {
            return;
        }
        add(&mut self.evidence, marks.saturating_add(lost));
        if let Some(bin) = self.bins.at(now) {
            add(&mut bin.ecn_ce, marks);
            add(&mut bin.lost, lost);
        }
    }

    fn recent_rtt(&self, now: Nanos) -> Option<Duration> {
        let number = number_at(now);
        self.bins.before(number, RTT_BINS).filter_map(|(_, bin)| bin.rtt).min()
    }

    /// Whether it is to be sampled. It is where there is news, or a state to leave, and else now and then, as rates grow old.
    pub(super) fn is_due(&mut self, end: Nanos) -> bool {
        let old = end.since(self.measured) >= OLD;
        let due = self.is_interface() || self.updated || old || !self.hysteresis.is_idle();
        if due {
            (self.updated, self.measured) = (false, end);
        }
        due
    }

    /// Begins a new [`Measure`], as of the end of what was heard, with the rates.
    pub(super) fn rates(&mut self, end: Nanos) {
        self.bins.advance(end);
        // The last bin that is whole.
        let number = number_at(end).saturating_sub(1);
        let mut measure = Measure { evidence: self.evidence, ..Measure::default() };
        for (_, bin) in self.bins.before(number, SHORT_WINDOW) {
            measure.own_bytes += bin.own;
            measure.bytes += bin.observed_bytes();
        }
        let busiest = self.bins.before(number, 2 * WINDOW).map(|(_, bin)| bin.observed_bytes()).max();
        measure.peak = per_second(busiest.unwrap_or_default(), BIN);
        let others = measure.bytes.saturating_sub(measure.own_bytes);
        measure.own_rate = per_second(measure.own_bytes, length(SHORT_WINDOW));
        measure.cross_traffic_rate = per_second(others, length(SHORT_WINDOW));
        self.measure = measure;
    }

    /// Adds to the measure of a path, which is `starved` or not, what its queues say.
    pub(super) fn measure_queue(&mut self, end: Nanos, stated: u64, starved: bool, limits: &Limits) {
        let mut measure = self.measure;
        let (mut packets, mut marks, mut lost) = (0, 0, 0);
        for (_, bin) in self.bins.before(number_at(end), WINDOW) {
            packets += bin.packets;
            marks += bin.ecn_ce;
            lost += bin.lost;
        }
        let packets = packets.max(marks).max(lost);
        (measure.ecn_ce_ppm, measure.lost_ppm) = (ppm(marks, packets), ppm(lost, packets));
        let marks = signal_pressure(marks, measure.ecn_ce_ppm, limits.ecn_ce_ppm);
        let losses = signal_pressure(lost, measure.lost_ppm, limits.lost_ppm);
        measure.delay = self.delay(end, &mut measure);
        // What stands in a queue was sent before a round trip that tells of it: by then the sender may have paused.
        let span = SHORT_WINDOW + bins::count((measure.rtt / 2).saturating_mul(3));
        if span < BINS as u64 && measure.rtt > length(SHORT_WINDOW) {
            let bins = self.bins.before(number_at(end).saturating_sub(1), span);
            let own: u64 = bins.map(|(_, bin)| bin.own).sum();
            measure.own_rate = measure.own_rate.max(per_second(own, length(span)));
        }
        self.update_carried(end, stated, limits);
        measure.signals = Signals {
            delay: measure.delay >= MILD,
            ecn_ce: marks >= MILD,
            loss: losses >= MILD,
            load: false,
            starved,
        };
        measure.pressure = measure.delay.max(marks).max(losses);
        self.measure = measure;
        self.update_capacity(end, stated, limits);
    }

    /// Gives the interface the queues of the path that has the least: what all paths have is the interface's. With its load.
    pub(super) fn inherit_queue(
        &mut self,
        end: Nanos,
        stated: u64,
        least: Option<&Measure>,
        limits: &Limits,
    ) {
        let (own, least) = (self.measure, least.copied().unwrap_or_default());
        self.measure = Measure {
            evidence: own.evidence,
            bytes: own.bytes,
            own_bytes: own.own_bytes,
            own_rate: own.own_rate,
            cross_traffic_rate: own.cross_traffic_rate,
            peak: own.peak,
            ..least
        };
        self.measure.signals.starved = false;
        self.update_capacity(end, stated, limits);
        // Queues of several paths may lie apart: then packets of one path tell how its queue grew, and those of all do not.
        let (of_all, of_path) = (self.measure.own_part, least.own_part);
        self.measure.own_part = of_all.map_or(of_path, |all| Some(of_path.map_or(all, |path| path.max(all))));
        let load = load_pressure(self.measure.used_ppm, limits);
        self.measure.signals.load = load >= MILD;
        self.measure.pressure = self.measure.pressure.max(load);
        if self.measure.signals != Signals::default() {
            self.evidence += 1;
        }
    }

    fn delay(&self, end: Nanos, measure: &mut Measure) -> f64 {
        // A round trip says how things are for about as long as it took.
        let held =
            self.rtt.filter(|trip| end.since(trip.at) <= (2 * trip.rtt).clamp(length(RTT_BINS), length(100)));
        let trip = self.recent_rtt(end).or(held.map(|trip| trip.rtt));
        let Some((trip, rest)) = trip.zip(self.min_rtt.min()) else { return 0.0 };
        measure.rtt = trip;
        let mild = nanos(self.mild.max(rest / 2)) as f64;
        let severe = nanos((SEVERE_UNITS * self.mild).max(2 * rest)) as f64;
        pressure(nanos(trip.saturating_sub(rest)) as f64, mild, severe)
    }

    /// What the link can carry, and which part of its queue is ours.
    fn update_capacity(&mut self, end: Nanos, stated: u64, limits: &Limits) {
        let delay = self.measure.delay;
        let most = if stated == 0 { u64::MAX } else { stated };
        if delay < 0.5 && self.hysteresis.level == CongestionLevel::None {
            self.update_unqueued(end, most, limits);
        } else if delay >= MILD {
            (self.candidate, self.unqueued_since) = (0, end);
        }
        // Each packet of which the queue is known tells once.
        let anchors = self.anchors().filter(|_| delay >= MILD);
        let news = anchors.filter(|anchors| self.estimated != anchors.until.sent);
        if let Some(news) = news {
            self.estimated = news.until.sent;
            self.estimate(end, news, most, limits);
        }
        let lately = median(&self.estimates.last_chunk::<3>().copied().unwrap_or_default());
        let clear = self.max_unqueued.max().unwrap_or_default();
        // Below what it has carried without a queue, ours does not fill it.
        let full = self.max_queued.max().filter(|full| full / 11 * 10 > clear).unwrap_or_default();
        let carried = clear.max(full).max(lately);
        let capacity = match limits.capacity {
            Capacity::Stated if stated > 0 => stated,
            _ if stated > 0 && carried >= stated / 10 * 7 => stated,
            _ => full,
        };
        let rate = per_second(self.measure.bytes, length(SHORT_WINDOW));
        let known = if capacity == 0 { stated } else { capacity };
        // Hosts lengthen round trips by no more than what is taken for a queue where nothing is known: more is a queue.
        let jitter = self.jitter.min().map_or(limits.delay, |jitter| JITTERS * jitter);
        self.unit = limits.queue_unit(known).max(jitter.min(limits.delay));
        self.mild = self.unit.min(limits.delay);
        self.late = self.unit.max(jitter);
        (self.measure.capacity, self.measure.capacity_confirmed) = (known, capacity > 0);
        self.measure.used_ppm = if known == 0 { 0 } else { ppm(rate, known) };
        (self.capacity, self.news) = (capacity, news);
        if let Some(news) = news {
            self.shares.rotate_left(1);
            // Where all that is known is what was carried without a queue: no more than that explains none.
            let share = match (capacity, clear) {
                (0, 0) => f64::NAN,
                (0, clear) => (self.needed(news) / clear as f64 - 0.35).clamp(0.0, 1.0),
                (capacity, _) => self.own_part(news, capacity),
            };
            if let Some(last) = self.shares.last_mut() {
                *last = share;
            }
        }
        self.measure.own_part = anchors.and_then(|_| self.own_share());
    }

    /// Which part of the queue was ours: the median of the last three; none where the last is not known.
    fn own_share(&self) -> Option<f64> {
        let [one, two, three] = self.shares;
        (!three.is_nan()).then(|| one.max(two).min(one.min(two).max(three)))
    }

    /// Takes what passed between two packets of which the queue is known as what the link carries.
    fn estimate(&mut self, end: Nanos, anchors: Anchors, most: u64, limits: &Limits) {
        let Anchors { since, until, steady } = anchors;
        if !steady {
            return;
        }
        let mut seen = 0;
        self.between(anchors, |_, bytes, _| seen += bytes);
        let apart = until.sent.since(since.sent);
        let served = apart.saturating_add(until.delay).saturating_sub(since.delay);
        // Two packets of an interface may be of two paths, and the shorter queue another one.
        let span = if self.is_interface() { served.max(apart) } else { served };
        self.estimates.rotate_left(1);
        if let Some(last) = self.estimates.last_mut() {
            *last = per_second(seen, span.max(BIN)).min(most);
        }
        // One that is full for long, not one that a burst overruns.
        let mut estimates = self.estimates;
        estimates.sort_unstable();
        let sure = estimates.get(ESTIMATES / 3).copied().unwrap_or_default();
        if sure > 0 {
            self.max_queued.update(end, 10 * limits.min_rtt_window, sure, u64::max);
        }
    }

    /// What the link carries while no queue stands.
    fn update_unqueued(&mut self, end: Nanos, most: u64, limits: &Limits) {
        // A burst may still show in round trips that are under way: what seems clear waits.
        let settled = end.since(self.unqueued_since) >= length(BINS as u64);
        let number = number_at(end).saturating_sub(1);
        let bytes: u64 = self.bins.before(number, CLEAR).map(|(_, bin)| bin.observed_bytes()).sum();
        if settled {
            if self.candidate > 0 {
                self.max_unqueued.update(end, limits.min_rtt_window, self.candidate.min(most), u64::max);
            }
            (self.candidate, self.unqueued_since) = (0, end);
        }
        self.candidate = self.candidate.max(per_second(bytes, length(CLEAR)));
        self.estimates = [0; ESTIMATES];
    }

    /// The last packet of which the queue is known, and one before it. Where there is none before it, the first bytes after a
    /// silence stand for it.
    fn anchors(&self) -> Option<Anchors> {
        let (last, until) =
            self.bins.before(self.bins.latest(), BINS as u64).find_map(|(at, bin)| Some((at, bin.queue?)))?;
        let (mut silence, mut began) = (0, None);
        for (number, bin) in self.bins.before(last, BINS as u64) {
            silence = if bin.observed_bytes() == 0 { silence + 1 } else { 0 };
            if silence == QUIET && began.is_none() {
                began = Some(begin_of(number + QUIET));
            }
            if let Some(since) = bin.queue.filter(|_| last - number >= MIN_ANCHOR_DISTANCE) {
                return Some(Anchors { since, until, steady: began.is_none() });
            }
        }
        // Silent for as long as is known.
        let since =
            QueueSample { sent: began.filter(|_| silence + 8 >= BINS as u64)?, delay: Duration::ZERO };
        Some(Anchors { since, until, steady: true })
    }

    /// The capacity that a link would need for its queue to be of what was seen alone. It is in bytes a second.
    fn needed(&self, anchors: Anchors) -> f64 {
        let Anchors { since, until, steady } = anchors;
        // By then nothing was left of the queue that is known before.
        let drained = since.sent.after(since.delay);
        let (since, from) = if steady || drained >= until.sent {
            (since, drained)
        } else {
            (QueueSample { sent: drained, delay: Duration::ZERO }, until.sent)
        };
        let span = until.sent.after(until.delay).since(from).max(BIN);
        let mut seen = 0;
        self.between(Anchors { since, ..anchors }, |_, bytes, _| seen += bytes);
        seen as f64 * 1e9 / nanos(span) as f64
    }

    /// Hands out own bytes, bytes and nanoseconds, bin by bin, between two packets.
    fn between(&self, anchors: Anchors, each: impl FnMut(u64, u64, u64)) {
        self.sent_between(anchors.since.sent, anchors.until.sent, each);
    }

    /// The same between two times.
    pub(super) fn sent_between(&self, since: Nanos, until: Nanos, mut each: impl FnMut(u64, u64, u64)) {
        let (first, last) = (number_at(since), number_at(until));
        for number in first..=last.min(first.saturating_add(BINS as u64)) {
            let Some(bin) = self.bins.number(number) else { continue };
            let begin = begin_of(number);
            let from = begin.max(since);
            let length = begin.after(BIN).min(until).0.saturating_sub(from.0);
            let part = |bytes: u64| bytes / 1000 * length / 1000;
            each(part(bin.own), part(bin.observed_bytes()), length);
        }
    }

    /// Which part of what came to a link of a capacity was ours. It is own bytes, of all that were seen and of those that the
    /// queue shows beyond them.
    fn own_part(&self, anchors: Anchors, capacity: u64) -> f64 {
        let capacity = capacity as f64 / 1e9;
        let (mut own, mut seen, mut queue) = (0.0, 0.0, nanos(anchors.since.delay) as f64);
        self.between(anchors, |ours, all, length| {
            own += ours as f64;
            seen += all as f64;
            queue = (queue + all as f64 / capacity - length as f64).max(0.0);
        });
        let unseen = (nanos(anchors.until.delay) as f64 - queue).max(0.0) * capacity;
        own / (seen + unseen).max(1.0)
    }

    /// The part of what this interface can carry that its own bytes took, between the packets that just told of a path's queue. None where
    /// none did, or what the interface can carry is not known.
    pub(super) fn own_part_beside(&self, path: &Self) -> Option<f64> {
        let news = path.news.filter(|_| self.capacity > 0)?;
        let mut own = 0;
        self.between(news, |ours, _, _| own += ours);
        // What the queue got shorter by was sent before.
        let shorter = news.since.delay.saturating_sub(news.until.delay);
        let rate = per_second(own, news.until.sent.since(news.since.sent).saturating_sub(shorter).max(BIN));
        Some((rate as f64 / self.capacity as f64).min(1.0))
    }

    /// Takes the part of the interface that own bytes took. Where they fill it, those of other paths may be what this one waits for.
    pub(super) fn raise_own_part(&mut self, of_interface: f64, limits: &Limits) {
        if of_interface < limits.load {
            return;
        }
        if let Some(last) = self.shares.last_mut() {
            *last = last.max(of_interface);
        }
        self.measure.own_part = self.own_share();
    }

    /// Takes the pressure at which the link stands, and who is the cause as of now. Returns what that changes.
    pub(super) fn decide(
        &mut self,
        now: Nanos,
        pressure: f64,
        cause: CongestionCause,
        limits: &Limits,
    ) -> Outcome {
        debug_assert!(self.measure.own_bytes <= self.measure.bytes, "own bytes are of all bytes");
        debug_assert!(self.measure.own_part.is_none_or(|part| (0.0..=1.0).contains(&part)));
        debug_assert!(!self.measure.capacity_confirmed || self.measure.capacity > 0);
        let before = self.hysteresis.level;
        let mut changed = self.hysteresis.step(now, pressure, self.measure.evidence, limits);
        if self.measure.signals.starved {
            changed |= self.hysteresis.begin(now, limits);
        }
        let outcome = match self.hysteresis.level {
            CongestionLevel::None => self.cause.clear(),
            _ if self.measure.signals.starved => self.cause.note_starved(now, limits),
            _ if before == CongestionLevel::None => self.cause.begin(cause),
            // Without pressure, as after it, nobody is the cause anew.
            _ if pressure < MILD => self.cause.step(now, CongestionCause::Unknown, limits),
            _ => self.cause.step(now, cause, limits),
        };
        if changed { Outcome::Changed } else { outcome }
    }

    /// Who the measure says is the cause. The interface's bytes may be what a path's marks and losses are of.
    pub(super) fn attribute_cause(&self, interface: Option<&Measure>) -> CongestionCause {
        let measure = &self.measure;
        let others = measure.bytes.saturating_sub(measure.own_bytes);
        if measure.bytes == 0 {
            return self.cause.get();
        }
        if others as f64 >= 0.15 * measure.bytes as f64 {
            return CongestionCause::CrossTraffic;
        }
        let part = match measure.own_part {
            Some(explained) if measure.signals.delay => explained,
            _ if measure.signals.delay || !measure.capacity_confirmed => return CongestionCause::Unknown,
            // Bursts of ours mark too: what they reach counts, not what is left of them in a longer while.
            _ => measure.peak_part().max(interface.map_or(0.0, Measure::peak_part)),
        };
        match part {
            part if part < CROSS_PART => CongestionCause::CrossTraffic,
            part if part >= OWN_PART => CongestionCause::Own,
            _ => self.cause.get(),
        }
    }

    /// Whether more records would decide something. It is pressure that is no state yet, a state whose cause is not
    /// settled, or a path that may be starved.
    pub(super) fn has_pending_report(&self) -> bool {
        if self.may_be_starved() {
            return true;
        }
        match self.hysteresis.level {
            CongestionLevel::None => !self.hysteresis.is_idle(),
            _ => self.cause.is_pending(),
        }
    }

    /// Whether it may be left alone until something crosses it.
    pub(super) fn is_idle(&self, end: Nanos) -> bool {
        self.hysteresis.is_idle() && !self.updated && end.since(self.last_seen) > 3 * OLD
    }

    pub(super) fn is_interface(&self) -> bool {
        self.link.path == Path::Whole
    }
}

/// Two packets of which the queue is known.
#[derive(Debug, Clone, Copy)]
struct Anchors {
    since: QueueSample,
    until: QueueSample,
    /// There was no silence between.
    steady: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_is_of_so_many_round_trips() {
        let mut spread = Spread::default();
        let mut found: Vec<Duration> = Vec::new();
        for trip in (0..2 * SPREAD_RTTS)
            .map(|at| Duration::from_micros(if at < SPREAD_RTTS { 100 + at } else { 900 }.into()))
        {
            found.extend(spread.add(trip));
        }
        assert_eq!(found, [Duration::from_micros(15), Duration::ZERO]);
    }
}
