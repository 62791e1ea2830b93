//! Records in, phases out.

use super::finding::{Job as Seen, Phase};
use super::flow::{Burst, Ended};
use super::job::Job;
use super::sides::Hosts;
use super::table::Table;
use super::{describe, group};
use crate::trace::{LostKind, Owner, Record};
use harmonaize_abi::Nanos;
use harmonaize_events::{Direction, Event, EventKind, FlowKey, RoceCounters, TcpFlow, Traffic};
use std::collections::VecDeque;
use std::time::Duration;

/// What may be remembered at most, and how long is waited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Flows, each at each interface; no others are followed until some are silent.
    pub max_flows: usize,
    /// Connections whose bursts are kept: those with heavy traffic; 0.13 MiB each at most.
    pub max_watched: usize,
    /// Jobs at once.
    pub jobs: usize,
    /// Phases that wait to be polled; the oldest goes.
    pub findings: usize,
    /// A flow is forgotten when nothing was heard of it for so long.
    pub forget_after: Duration,
    /// A burst that no snapshot told of is taken for ended after so long.
    pub timeout: Duration,
    /// How often jobs are looked for.
    pub search_interval: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_flows: 1 << 15,
            max_watched: 256,
            jobs: 64,
            findings: 4096,
            forget_after: Duration::from_secs(120),
            timeout: Duration::from_millis(100),
            search_interval: Duration::from_millis(250),
        }
    }
}

/// What was noticed on the way.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Phases told.
    pub phases: u64,
    /// Phases that nobody polled in time.
    pub dropped: u64,
    /// Records of flows that were not followed for want of room.
    pub unplaced: u64,
    /// Jobs found so far.
    pub jobs: u64,
}

/// How often what is silent is looked for.
const FORGET_EVERY: Duration = Duration::from_secs(10);
/// A job is over when no phase of it was found for so many periods, and so long.
const JOB_TIMEOUT: (u32, Duration) = (12, Duration::from_secs(5));
/// A job is looked at no more often.
const MIN_CUT_INTERVAL: Duration = Duration::from_millis(2);

/// Finds the jobs and phases of cross traffic. For each record: a look-up, and a few comparisons; a job is looked at when it is
/// silent, and other traffic four times a second.
#[derive(Debug, Default)]
pub struct Phases {
    limits: Limits,
    observer: u64,
    table: Table,
    jobs: Vec<Job>,
    found: VecDeque<Phase>,
    counts: Counts,
    next_search: Nanos,
    next_forget: Nanos,
    running: Vec<(Burst, bool)>,
}

impl Phases {
    /// Nothing seen yet.
    pub fn new(limits: Limits) -> Self {
        Self { limits, ..Self::default() }
    }

    /// Takes a record in. Records come in the order of their times, but for a little.
    pub fn take(&mut self, record: &Record) {
        match record {
            Record::Observer(observer) => self.observer = observer.host,
            Record::Event(event) => self.event(event),
            Record::Tcp { time_ns, key, flow } => self.tcp(Nanos(*time_ns), key, flow),
            Record::Roce { time_ns, key, counters } => self.roce(Nanos(*time_ns), key, counters),
            Record::Totals { time_ns, .. } => self.table.sweep(self.observer, Nanos(*time_ns)),
            Record::Owner(owner) => self.owner(owner),
            Record::Lost(lost) if !matches!(lost.kind, LostKind::Marks) => {
                self.jobs.iter_mut().for_each(|job| job.lossy = true);
            }
            Record::Lost(_) | Record::Mark(_) | Record::Link(_) | Record::Port(_) => {}
        }
    }

    /// Tells what can be told by `now`. To be called once the records until then are taken in, the more often the sooner
    /// phases are told.
    pub fn advance(&mut self, now: Nanos) {
        if now >= self.next_search {
            self.next_search = now.after(self.limits.search_interval);
            self.search(now);
        }
        if now >= self.next_forget {
            self.next_forget = now.after(FORGET_EVERY);
            self.table.forget(now.before(self.limits.forget_after), now);
        }
        for at in 0..self.jobs.len() {
            self.cut_phases(at, now);
        }
        self.end(now);
        while self.found.len() > self.limits.findings {
            self.found.pop_front();
            self.counts.dropped += 1;
        }
    }

    /// The next phase that was found, in the order of their ends within a job.
    pub fn poll(&mut self) -> Option<Phase> {
        self.found.pop_front()
    }

    /// The jobs that are there now.
    pub fn jobs(&self) -> impl Iterator<Item = Seen> {
        self.jobs.iter().map(|job| Seen {
            job: job.number,
            hosts: job.hosts.clone(),
            flows: u32::try_from(job.connections.len()).unwrap_or(u32::MAX),
            period: (job.iterations > 1).then(|| job.period()),
            since: job.since,
            iterations: job.iterations,
            ring: job.ring,
        })
    }

    /// The job that a flow of this host (that of the last [`Record::Observer`]) belongs to.
    pub fn job_of(&self, key: &FlowKey) -> Option<u64> {
        let flow = self.table.find_flow(self.observer, key)?;
        self.table.connection(flow.connection)?.job
    }

    /// What was noticed so far.
    pub const fn counts(&self) -> Counts {
        self.counts
    }

    fn flow_slot(&mut self, key: &FlowKey, now: Nanos) -> Option<u32> {
        let place = self.table.flow(self.observer, key, now, self.limits.max_flows);
        self.counts.unplaced += u64::from(place.is_none());
        if let Some(flow) = place.and_then(|place| self.table.flow_mut(place)) {
            flow.last_seen = flow.last_seen.max(now);
        }
        place
    }

    fn event(&mut self, event: &Event) {
        let kind = EventKind::from_number(event.kind);
        if !matches!(kind, Some(EventKind::FlowBegan | EventKind::BurstBegan)) {
            return;
        }
        let Some(place) = self.flow_slot(&event.flow, Nanos(event.time_ns)) else { return };
        let Some(flow) = self.table.flow_mut(place) else { return };
        let leaving = event.flow.direction == Direction::Egress as u8;
        let (side, direction) = if leaving {
            (&mut flow.egress, Direction::Egress)
        } else {
            (&mut flow.ingress, Direction::Ingress)
        };
        if kind == Some(EventKind::FlowBegan) {
            side.flow_began(Nanos(event.time_ns));
            return;
        }
        let mut lost = false;
        let ended = side.burst_began(event, &mut lost);
        let connection = flow.connection;
        for ended in ended.into_iter().flatten() {
            self.ended(place, direction, ended, lost);
        }
        self.record_activity(connection, Nanos(event.time_ns));
    }

    fn tcp(&mut self, time: Nanos, key: &FlowKey, counters: &TcpFlow) {
        self.table.sweep(self.observer, time);
        let Some(place) = self.flow_slot(key, time) else { return };
        for (direction, one) in
            [(Direction::Egress, &counters.egress), (Direction::Ingress, &counters.ingress)]
        {
            let (trips, again) = (&one.rtt, one.retransmissions);
            self.snapshot(
                place,
                direction,
                time,
                &one.traffic,
                (trips.count, Duration::from_nanos(trips.sum_ns), again),
            );
        }
    }

    fn roce(&mut self, time: Nanos, key: &FlowKey, counters: &RoceCounters) {
        self.table.sweep(self.observer, time);
        let Some(place) = self.flow_slot(key, time) else { return };
        let leaving = key.direction == Direction::Egress as u8;
        let direction = if leaving { Direction::Egress } else { Direction::Ingress };
        let trips = &counters.rtt;
        let quality = (trips.count, Duration::from_nanos(trips.sum_ns), counters.retransmissions);
        self.snapshot(place, direction, time, &counters.traffic, quality);
    }

    fn snapshot(
        &mut self,
        place: u32,
        direction: Direction,
        time: Nanos,
        traffic: &Traffic,
        quality: (u64, Duration, u64),
    ) {
        let Some(flow) = self.table.flow_mut(place) else { return };
        let side = if direction == Direction::Egress { &mut flow.egress } else { &mut flow.ingress };
        let (round_trips, rtt_sum, retransmissions) = quality;
        side.quality = super::flow::Quality { rtt_count: round_trips, rtt_sum, retransmissions };
        let mut lost = false;
        let ended = side.snapshot(time, traffic, &mut lost);
        let (connection, last) = (flow.connection, Nanos(traffic.last_ns));
        if let Some(ended) = ended {
            self.ended(place, direction, ended, lost);
        }
        self.record_activity(connection, last);
    }

    fn ended(&mut self, place: u32, direction: Direction, ended: Ended, lost: bool) {
        let told = self.table.ended(place, direction, ended, self.limits.max_watched);
        if let Some((number, burst)) = told
            && let Some(job) = self.jobs.iter_mut().find(|job| job.number == number)
        {
            job.lossy |= lost;
            job.take(burst);
        }
    }

    fn record_activity(&mut self, connection: u32, time: Nanos) {
        let number = self.table.connection(connection).and_then(|connection| connection.job);
        if let Some(number) = number
            && let Some(job) = self.jobs.iter_mut().find(|job| job.number == number)
            && !job.sends.contains(&connection)
        {
            job.last_seen = job.last_seen.max(time);
        }
    }

    fn owner(&mut self, owner: &Owner) {
        let Some(place) = self.flow_slot(&owner.flow, Nanos(owner.time_ns)) else { return };
        let Some(flow) = self.table.flow_mut(place) else { return };
        flow.owned = owner.owned;
        let connection = flow.connection;
        let Some(connection_of) = self.table.connection_mut(connection) else { return };
        connection_of.owned = owner.owned;
        if owner.owned {
            let job = connection_of.job.take();
            let was_watched = connection_of.history.take().is_some();
            self.table.history -= usize::from(was_watched);
            for job in self.jobs.iter_mut().filter(|one| Some(one.number) == job) {
                job.connections.retain(|member| *member != connection);
                // Its place may be another connection's later.
                job.sends.remove(&connection);
            }
        }
    }

    fn search(&mut self, now: Nanos) {
        let mut joined = Vec::new();
        let before = self.jobs.iter().filter(|job| job.iterations > 1).map(|job| group::FoundJob {
            number: job.number,
            hosts: Hosts::of(&job.connections, &self.table).all,
            sends: job.sends.clone(),
            period: job.period(),
            bytes: job.pattern.bytes,
            starts: job.starts.iter().map(|(_, began)| *began).collect(),
        });
        let before: Vec<group::FoundJob> = before.collect();
        let found = group::search(&mut self.table, &before, now, |job, connection, sends| {
            joined.push((job, connection, sends));
        });
        for (number, connection, sends) in joined {
            let Some(job) = self.jobs.iter_mut().find(|job| job.number == number) else { continue };
            let Some(joining) = self.table.connection_mut(connection) else { continue };
            joining.job = Some(number);
            job.connections.push(connection);
            if sends {
                job.sends.insert(connection);
            }
            let history = joining.history.as_mut().map(|watched| std::mem::take(&mut watched.history));
            history.unwrap_or_default().into_iter().for_each(|burst| job.take(burst));
        }
        for found in found {
            if self.jobs.len() >= self.limits.jobs {
                return;
            }
            let number = self.counts.jobs;
            self.counts.jobs += 1;
            for place in &found.connections {
                let Some(connection) = self.table.connection_mut(*place) else { continue };
                connection.job = Some(number);
                if let Some(watched) = &mut connection.history {
                    watched.history = VecDeque::new();
                }
            }
            let absorbs = found.absorbs.clone();
            let mut job = Job::new(number, found, now);
            for absorbed in absorbs {
                let Some(at) = self.jobs.iter().position(|one| one.number == absorbed) else { continue };
                for place in self.jobs.remove(at).connections {
                    let Some(connection) = self.table.connection_mut(place) else { continue };
                    connection.job = Some(number);
                    job.connections.push(place);
                    job.sends.insert(place);
                }
            }
            self.jobs.push(job);
        }
    }

    /// Cuts what has ended of a job.
    fn cut_phases(&mut self, at: usize, now: Nanos) {
        let Some(job) = self.jobs.get_mut(at) else { return };
        let silent = now > job.last_seen.after(job.pattern.gap);
        let crowded = job.pending_bursts.len() > 4096;
        if now < job.next_cut || !(silent || crowded || job.iterations == 0) {
            return;
        }
        job.next_cut = now.after(MIN_CUT_INTERVAL);
        self.running.clear();
        for place in &job.connections {
            let running = &mut self.running;
            self.table.running(*place, self.limits.timeout, now, |burst, whole| running.push((burst, whole)));
        }
        while let Some(cut) = job.cut(&self.running, &self.table, now) {
            self.found.push_back(describe::phase(job, &cut, &mut self.table));
            self.counts.phases += 1;
        }
    }

    /// Jobs without phases are over; what they were of may become another.
    fn end(&mut self, now: Nanos) {
        let (periods, least) = JOB_TIMEOUT;
        let table = &mut self.table;
        self.jobs.retain(|job| {
            let patience = job.period().saturating_mul(periods).max(least);
            let over = now > job.reported.after(patience) || job.connections.is_empty();
            if over {
                for place in &job.connections {
                    if let Some(connection) = table.connection_mut(*place) {
                        connection.job = None;
                    }
                }
            }
            !over
        });
    }
}
