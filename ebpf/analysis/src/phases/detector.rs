//! Records in, phases out.

use super::finding::{Job as Seen, Phase};
use super::flow::Burst;
use super::job::Job;
use super::sides::Hosts;
use super::table::Table;
use super::{describe, group};
use crate::trace::{LostKind, Owner, Record};
use harmonaize_events::{Direction, Event, EventKind, FlowKey, RoceCounters, TcpFlow, Traffic};
use std::collections::VecDeque;

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
    pub forget_ns: u64,
    /// A burst that no snapshot told of is taken for ended after so long.
    pub timeout_ns: u64,
    /// How often jobs are looked for.
    pub search_ns: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_flows: 1 << 15,
            max_watched: 256,
            jobs: 64,
            findings: 4096,
            forget_ns: 120_000_000_000,
            timeout_ns: 100_000_000,
            search_ns: 250_000_000,
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
const FORGET_EVERY_NS: u64 = 10_000_000_000;
/// A job is over when no phase of it was found for so many periods, and so long.
const JOB_TIMEOUT: (u64, u64) = (12, 5_000_000_000);
/// A job is looked at no more often.
const MIN_CUT_INTERVAL_NS: u64 = 2_000_000;

/// Finds the jobs and phases of foreign traffic. For each record: a look-up, and a few comparisons; a job is looked at when it is
/// silent, and other traffic four times a second.
#[derive(Debug, Default)]
pub struct Phases {
    limits: Limits,
    observer: u64,
    table: Table,
    jobs: Vec<Job>,
    found: VecDeque<Phase>,
    counts: Counts,
    search_ns: u64,
    forget_ns: u64,
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
            Record::Tcp { time_ns, key, flow } => self.tcp(*time_ns, key, flow),
            Record::Roce { time_ns, key, counters } => self.roce(*time_ns, key, counters),
            Record::Totals { time_ns, .. } => self.table.sweep(self.observer, *time_ns),
            Record::Owner(owner) => self.owner(owner),
            Record::Lost(lost) if !matches!(lost.kind, LostKind::Marks) => {
                self.jobs.iter_mut().for_each(|job| job.lossy = true);
            }
            Record::Lost(_) | Record::Mark(_) | Record::Link(_) => {}
        }
    }

    /// Tells what can be told by `now_ns`. To be called once the records until then are taken in, the more often the sooner
    /// phases are told.
    pub fn advance(&mut self, now_ns: u64) {
        if now_ns >= self.search_ns {
            self.search_ns = now_ns.saturating_add(self.limits.search_ns);
            self.search(now_ns);
        }
        if now_ns >= self.forget_ns {
            self.forget_ns = now_ns.saturating_add(FORGET_EVERY_NS);
            self.table.forget(now_ns.saturating_sub(self.limits.forget_ns), now_ns);
        }
        for at in 0..self.jobs.len() {
            self.cut_phases(at, now_ns);
        }
        self.end(now_ns);
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
            period_ns: (job.iterations > 1).then(|| job.period_ns()),
            since_ns: job.since_ns,
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

    fn flow_slot(&mut self, key: &FlowKey, now_ns: u64) -> Option<u32> {
        let place = self.table.flow(self.observer, key, now_ns, self.limits.max_flows);
        self.counts.unplaced += u64::from(place.is_none());
        if let Some(flow) = place.and_then(|place| self.table.flow_mut(place)) {
            flow.last_seen_ns = flow.last_seen_ns.max(now_ns);
        }
        place
    }

    fn event(&mut self, event: &Event) {
        let kind = EventKind::from_number(event.kind);
        if !matches!(kind, Some(EventKind::FlowBegan | EventKind::BurstBegan)) {
            return;
        }
        let Some(place) = self.flow_slot(&event.flow, event.time_ns) else { return };
        let Some(flow) = self.table.flow_mut(place) else { return };
        let leaving = event.flow.direction == Direction::Egress as u8;
        let (side, direction) = if leaving {
            (&mut flow.egress, Direction::Egress)
        } else {
            (&mut flow.ingress, Direction::Ingress)
        };
        if kind == Some(EventKind::FlowBegan) {
            side.flow_began(event.time_ns);
            return;
        }
        let mut lost = false;
        let ended = side.burst_began(event, &mut lost);
        let connection = flow.connection;
        for ended in ended.into_iter().flatten() {
            self.ended(place, direction, ended, lost);
        }
        self.record_activity(connection, event.time_ns);
    }

    fn tcp(&mut self, time_ns: u64, key: &FlowKey, counters: &TcpFlow) {
        self.table.sweep(self.observer, time_ns);
        let Some(place) = self.flow_slot(key, time_ns) else { return };
        for (direction, one) in
            [(Direction::Egress, &counters.egress), (Direction::Ingress, &counters.ingress)]
        {
            let (trips, again) = (&one.rtt, one.retransmissions);
            self.snapshot(place, direction, time_ns, &one.traffic, (trips.count, trips.sum_ns, again));
        }
    }

    fn roce(&mut self, time_ns: u64, key: &FlowKey, counters: &RoceCounters) {
        self.table.sweep(self.observer, time_ns);
        let Some(place) = self.flow_slot(key, time_ns) else { return };
        let leaving = key.direction == Direction::Egress as u8;
        let direction = if leaving { Direction::Egress } else { Direction::Ingress };
        let trips = &counters.rtt;
        let quality = (trips.count, trips.sum_ns, counters.retransmissions);
        self.snapshot(place, direction, time_ns, &counters.traffic, quality);
    }

    fn snapshot(
        &mut self,
        place: u32,
        direction: Direction,
        time_ns: u64,
        traffic: &Traffic,
        quality: (u64, u64, u64),
    ) {
        let Some(flow) = self.table.flow_mut(place) else { return };
        let side = if direction == Direction::Egress { &mut flow.egress } else { &mut flow.ingress };
        let (round_trips, round_trips_ns, retransmissions) = quality;
        side.quality =
            super::flow::Quality { rtt_count: round_trips, rtt_sum_ns: round_trips_ns, retransmissions };
        let mut lost = false;
        let ended = side.snapshot(time_ns, traffic, &mut lost);
        let (connection, last_ns) = (flow.connection, traffic.last_ns);
        if let Some(ended) = ended {
            self.ended(place, direction, ended, lost);
        }
        self.record_activity(connection, last_ns);
    }

    fn ended(&mut self, place: u32, direction: Direction, ended: (u64, u64, u64), lost: bool) {
        let told = self.table.ended(place, direction, ended, self.limits.max_watched);
        if let Some((number, burst)) = told
            && let Some(job) = self.jobs.iter_mut().find(|job| job.number == number)
        {
            job.lossy |= lost;
            job.take(burst);
        }
    }

    fn record_activity(&mut self, connection: u32, time_ns: u64) {
        let number = self.table.connection(connection).and_then(|connection| connection.job);
        if let Some(number) = number
            && let Some(job) = self.jobs.iter_mut().find(|job| job.number == number)
        {
            job.last_seen_ns = job.last_seen_ns.max(time_ns);
        }
    }

    fn owner(&mut self, owner: &Owner) {
        let Some(place) = self.flow_slot(&owner.flow, owner.time_ns) else { return };
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
            }
        }
    }

    fn search(&mut self, now_ns: u64) {
        let mut joined = Vec::new();
        let before = self.jobs.iter().filter(|job| job.iterations > 1).map(|job| group::FoundJob {
            number: job.number,
            hosts: Hosts::of(&job.connections, &self.table).all,
            period_ns: job.period_ns(),
        });
        let before: Vec<group::FoundJob> = before.collect();
        let found =
            group::search(&mut self.table, &before, now_ns, |job, connection| joined.push((job, connection)));
        for (number, connection) in joined {
            let Some(job) = self.jobs.iter_mut().find(|job| job.number == number) else { continue };
            let Some(joining) = self.table.connection_mut(connection) else { continue };
            joining.job = Some(number);
            job.connections.push(connection);
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
            self.jobs.push(Job::new(number, found, now_ns));
        }
    }

    /// Cuts what has ended of a job.
    fn cut_phases(&mut self, at: usize, now_ns: u64) {
        let Some(job) = self.jobs.get_mut(at) else { return };
        let silent = now_ns > job.last_seen_ns.saturating_add(job.pattern.gap_ns);
        let crowded = job.pending_bursts.len() > 4096;
        if now_ns < job.next_cut_ns || !(silent || crowded || job.iterations == 0) {
            return;
        }
        job.next_cut_ns = now_ns.saturating_add(MIN_CUT_INTERVAL_NS);
        self.running.clear();
        for place in &job.connections {
            let running = &mut self.running;
            self.table
                .running(*place, self.limits.timeout_ns, now_ns, |burst, whole| running.push((burst, whole)));
        }
        while let Some(cut) = job.cut(&self.running, &self.table, now_ns) {
            self.found.push_back(describe::phase(job, &cut, &mut self.table));
            self.counts.phases += 1;
        }
    }

    /// Jobs without phases are over; what they were of may become another.
    fn end(&mut self, now_ns: u64) {
        let (periods, least) = JOB_TIMEOUT;
        let table = &mut self.table;
        self.jobs.retain(|job| {
            let patience = job.period_ns().saturating_mul(periods).max(least);
            let over = now_ns > job.reported_ns.saturating_add(patience) || job.connections.is_empty();
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
