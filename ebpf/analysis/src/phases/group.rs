//! Which connections make up a job: those that are active together, and meet at a host.

use super::activity::{SCALES, Signature};
use super::finding::Address;
use super::flow::Burst;
use super::iterations::{IterationPattern, Span, find, is_multiple, joined, median};
use super::job::SIZE_TOLERANCE;
use super::sends;
use super::sides::{Hosts, Kinds};
use super::table::{Connection, Table};
use harmonaize_abi::Nanos;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Connections that correlate less do not belong together.
const MIN_CORRELATION: f64 = 0.5;
/// Connections that are compared at once.
const MAX_COMPARED: usize = 256;
/// How long to wait after a group turned out to have no rhythm: at first, and at most.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(4));
/// The least ratio of what a host of a job sends and receives, the smaller to the larger. Every host that is watched all around
/// has at least this ratio.
const MIN_REVERSE_PART: f64 = 0.2;

/// A connection that could be part of a job.
struct Candidate {
    place: u32,
    hosts: [Address; 2],
    signatures: [Signature; SCALES.len()],
    due: bool,
}

/// Connections with a rhythm, and their bursts.
pub(super) struct DetectedJob {
    pub(super) hosts: BTreeSet<Address>,
    /// Every host both sends and receives; else it is a part of a job at most.
    is_job: bool,
    pub(super) connections: Vec<u32>,
    pub(super) pattern: IterationPattern,
    /// Its side groups are told from its AllReduces.
    pub(super) has_sides: bool,
    /// Those of its connections that carry sends alone.
    pub(super) sends: BTreeSet<u32>,
    pub(super) kinds: Kinds,
    pub(super) bursts: Vec<Burst>,
    /// Numbers of jobs that turn out to be its sends.
    pub(super) absorbs: Vec<u64>,
}

/// The least number of periods that a job is seen for where it may have more traffic. That is traffic between its hosts that may
/// be part of it.
const CERTAIN_PERIODS: u32 = 14;

impl DetectedJob {
    /// The same of a job that is found, which began when groups of bursts did. A group has one part in so many of the job's bytes, and
    /// the job's gap parts it from others. Of sends the gap is an eighth of the period at most, as those of pipelines fill all else.
    fn found(&self, sends: bool) -> FoundJob {
        let IterationPattern { period, bytes, gap, .. } = self.pattern;
        let main = self.bursts.iter().filter(|burst| !self.sends.contains(&burst.connection));
        let (gap, parts) = if sends { (gap.min(period / 8), 16) } else { (gap, 2) };
        let groups = joined(&spans(main), gap);
        let starts = groups.iter().filter(|group| group.bytes >= bytes / parts).map(|group| group.began);
        let (hosts, sends) = (self.hosts.clone(), BTreeSet::new());
        FoundJob { number: u64::MAX, hosts, sends, period, bytes, starts: starts.collect() }
    }

    fn is_certain(&self) -> bool {
        let (first, last) = (self.bursts.first(), self.bursts.last());
        let seen = first.zip(last).map_or(Duration::ZERO, |(first, last)| last.ended.since(first.began));
        seen >= self.pattern.period.saturating_mul(CERTAIN_PERIODS)
    }
}

/// A job that was found before.
pub(super) struct FoundJob {
    pub(super) number: u64,
    pub(super) hosts: BTreeSet<Address>,
    /// Those of its connections that carry sends alone.
    pub(super) sends: BTreeSet<u32>,
    pub(super) period: Duration,
    pub(super) bytes: u64,
    /// When its last phases began.
    pub(super) starts: Vec<Nanos>,
}

impl FoundJob {
    /// Whether it is sends of another one. What comes far more often than phases do is in step with all of them, and says nothing.
    fn is_sends_of(&self, of: &Self) -> bool {
        self.hosts.is_subset(&of.hosts)
            && self.bytes < of.bytes
            && self.period > of.period / 2
            && is_multiple(self.period, of.period)
            && in_step(&self.starts, &of.starts, of.period)
    }
}

/// Sends of a job come at the same time after its phases, to within the period divided by this. The median deviation counts.
const IN_STEP: u32 = 50;
/// So many of them are believed.
const MIN_IN_STEP: usize = 5;

/// Whether what begins at some times does so in step with phases that begin at others. The first time after a phase counts.
fn in_step(starts: &[Nanos], phases: &[Nanos], period: Duration) -> bool {
    let first = |phase: &Nanos| starts.get(starts.partition_point(|start| start < phase));
    let since = phases.iter().filter_map(|phase| Some(first(phase)?.since(*phase)));
    let mut since: Vec<Duration> = since.filter(|since| *since < period).collect();
    let enough = since.len() >= MIN_IN_STEP;
    let Some(usual) = median(&mut since).filter(|_| enough) else { return false };
    let mut off: Vec<Duration> = since.iter().map(|one| one.abs_diff(usual)).collect();
    median(&mut off).is_some_and(|off| IN_STEP * off <= period)
}

fn correlate(one: &Candidate, two: &Candidate) -> bool {
    if !one.hosts.iter().any(|host| two.hosts.contains(host)) {
        return false;
    }
    // A tree's levels take turns, so that the finest scale may say nothing.
    let mut pairs = one.signatures.iter().zip(&two.signatures);
    pairs
        .any(|(one, two)| one.has_evidence() && two.has_evidence() && one.correlation(two) >= MIN_CORRELATION)
}

fn candidate(place: u32, connection: &mut Connection, now: Nanos) -> Option<Candidate> {
    let hosts = [connection.ends.first.0, connection.ends.second.0];
    let watched = connection.history.as_mut()?;
    let mut slots = SCALES.into_iter();
    let signatures =
        watched.activity.each_mut().map(|one| one.signature(now.0 / slots.next().unwrap_or(u64::MAX)));
    let due = watched.retry_at <= now;
    signatures.iter().any(Signature::has_evidence).then_some(Candidate { place, hosts, signatures, due })
}

/// Looks for jobs among connections without one. `joins` is told of each that belongs to a job that is known, and whether it carries sends.
pub(super) fn search(
    table: &mut Table,
    found_before: &[FoundJob],
    now: Nanos,
    mut joins: impl FnMut(u64, u32, bool),
) -> Vec<DetectedJob> {
    let (mut free, mut members) = (Vec::new(), Vec::new());
    for (place, connection) in (0..).zip(&mut table.connections) {
        let Some(connection) = connection.as_mut().filter(|one| one.history.is_some() && !one.owned) else {
            continue;
        };
        let job = connection.job;
        let Some(candidate) = candidate(place, connection, now) else { continue };
        match job {
            Some(job) => members.push((job, candidate)),
            None => free.push(candidate),
        }
    }
    // The busy ones come first round and round, by their backoff.
    free.sort_by_key(|candidate| !candidate.due);
    free.truncate(MAX_COMPARED);
    members.truncate(MAX_COMPARED);
    free.retain(|candidate| {
        let near = members.iter().filter(|(_, member)| candidate.due && correlate(candidate, member));
        let known = near.map(|(job, member)| {
            let of = found_before.iter().find(|one| one.number == *job);
            (of.is_some_and(|of| of.sends.contains(&member.place)), *job)
        });
        // What is busy with sends alone carries sends, too.
        let job = known.min_by_key(|(sends, _)| *sends);
        if let Some((sends, job)) = job {
            joins(job, candidate.place, sends);
        }
        job.is_none()
    });
    let is_due = |component: &Vec<&Candidate>| component.iter().any(|candidate| candidate.due);
    let (mut jobs, mut parts, mut others) = (Vec::new(), Vec::new(), Vec::new());
    let (due, not_due): (Vec<_>, Vec<_>) = components(&free).into_iter().partition(is_due);
    for component in due {
        match detect_job(table, &component) {
            Some(detected) if detected.is_job => jobs.push((detected, component)),
            Some(detected) => parts.push((detected, component)),
            None => {
                component.iter().for_each(|candidate| back_off(table, candidate.place, now));
                others.push(component);
            }
        }
    }
    if !jobs.is_empty() {
        for component in not_due {
            match detect_job(table, &component) {
                Some(detected) if detected.is_job => jobs.push((detected, component)),
                Some(detected) => parts.push((detected, component)),
                None => others.push(component),
            }
        }
    }
    // What may turn out to be part of a job is waited for.
    jobs.retain(|(job, component)| {
        let within = |one: &&Candidate| one.hosts.iter().all(|host| job.hosts.contains(host));
        // Or it is part of what reaches more hosts.
        let around = |other: &Vec<&Candidate>| {
            let reaches = |host: &Address| other.iter().any(|one| one.hosts.contains(host));
            job.hosts.iter().all(reaches)
        };
        let waits = !job.is_certain() && others.iter().any(|other| other.iter().all(within) || around(other));
        if waits {
            component.iter().for_each(|candidate| back_off(table, candidate.place, now));
        }
        !waits
    });
    // Sends between a job's hosts are no job: they join it, if it is larger, and in step.
    let mut merged: Vec<(DetectedJob, Vec<&Candidate>)> = Vec::new();
    jobs.sort_by_key(|(job, _)| std::cmp::Reverse(job.pattern.bytes));
    for (job, component) in jobs {
        let found = job.found(true);
        if let Some(of) = found_before.iter().find(|of| found.is_sends_of(of)) {
            component.iter().for_each(|candidate| joins(of.number, candidate.place, true));
            continue;
        }
        match merged.iter_mut().find(|(of, _)| found.is_sends_of(&of.found(false))) {
            Some((of, all)) => {
                of.sends.extend(&job.connections);
                of.connections.extend(job.connections);
                of.bursts.extend(job.bursts);
                all.extend(component);
            }
            None => merged.push((job, component)),
        }
    }
    let mut jobs = merged;
    // Connections that broadcast or gather alone come and go with a job on the same hosts, once in an iteration.
    for (part, component) in parts {
        let is_of = |hosts: &BTreeSet<Address>, period: Duration| {
            part.hosts.is_subset(hosts) && part.pattern.has_period(period)
        };
        if let Some(job) = found_before.iter().find(|job| is_of(&job.hosts, job.period)) {
            component.iter().for_each(|candidate| joins(job.number, candidate.place, false));
        } else if let Some((_, of)) = jobs.iter_mut().find(|(job, _)| is_of(&job.hosts, job.pattern.period)) {
            of.extend(component);
        } else {
            component.iter().for_each(|candidate| back_off(table, candidate.place, now));
        }
    }
    let whole = |(job, all): (DetectedJob, Vec<&Candidate>)| {
        if job.connections.len() == all.len() { Some(job) } else { detect_job(table, &all).or(Some(job)) }
    };
    let mut jobs: Vec<DetectedJob> = jobs.into_iter().filter_map(whole).collect();
    for job in &mut jobs {
        let found = job.found(false);
        let sends = found_before.iter().filter(|one| one.is_sends_of(&found));
        job.absorbs = sends.map(|one| one.number).collect();
    }
    jobs
}

fn back_off(table: &mut Table, place: u32, now: Nanos) {
    let watched = table.connection_mut(place).and_then(|connection| connection.history.as_mut());
    if let Some(watched) = watched {
        let (first, most) = BACKOFF;
        watched.backoff = (watched.backoff * 2).clamp(first, most);
        watched.retry_at = now.after(watched.backoff);
    }
}

/// Candidates that belong together, directly or by others.
fn components(free: &[Candidate]) -> Vec<Vec<&Candidate>> {
    let mut left: Vec<&Candidate> = free.iter().collect();
    let mut components = Vec::new();
    while let Some(first) = left.pop() {
        let mut component = vec![first];
        let mut at = 0;
        while let Some(one) = component.get(at).copied() {
            let (near, far) = left.into_iter().partition(|other| correlate(one, other));
            left = far;
            component.extend::<Vec<_>>(near);
            at += 1;
        }
        components.push(component);
    }
    components
}

/// The job that candidates are, if they have a rhythm and some host both sends and receives.
fn detect_job(table: &Table, component: &[&Candidate]) -> Option<DetectedJob> {
    let connections: Vec<u32> = component.iter().map(|candidate| candidate.place).collect();
    let mut bursts = Vec::new();
    for candidate in component {
        bursts.extend(table.connection(candidate.place)?.history.as_ref()?.history.iter().copied());
    }
    bursts.sort_unstable_by_key(|burst| (burst.began, burst.connection, burst.reverse));
    let sends = sends::connections(&bursts, &Hosts::of(&connections, table), table);
    let is_main = |place: &u32| !sends.contains(place);
    let mut moved: BTreeMap<Address, (u64, u64)> = BTreeMap::new();
    for candidate in component.iter().filter(|candidate| is_main(&candidate.place)) {
        let watched = table.connection(candidate.place)?.history.as_ref()?;
        let ([first, second], [forward, reverse]) = (candidate.hosts, watched.bytes);
        for (from, to, bytes) in [(first, second, forward), (second, first, reverse)] {
            let (sent, _) = moved.entry(from).or_default();
            *sent = sent.saturating_add(bytes);
            let (_, received) = moved.entry(to).or_default();
            *received = received.saturating_add(bytes);
        }
    }
    let two_way = |(sent, received): &(u64, u64)| {
        *sent.min(received) as f64 >= MIN_REVERSE_PART * *sent.max(received) as f64 && *sent > 0
    };
    let hosts = Hosts::of(connections.iter().filter(|place| is_main(place)), table);
    let is_job = moved.iter().all(|(host, moved)| two_way(moved) || !hosts.watched.contains(host));
    let all: Vec<(Burst, bool)> =
        bursts.iter().filter(|burst| is_main(&burst.connection)).map(|burst| (*burst, true)).collect();
    let spans = |bursts: &[(Burst, bool)]| spans(bursts.iter().map(|(burst, _)| burst));
    let all_spans = spans(&all);
    let whole = find(&all_spans);
    let (mut main, mut kinds) = (all.clone(), Kinds::default());
    let side_groups = hosts.take(&mut main, &mut kinds, table, (Nanos(u64::MAX), Duration::MAX, true));
    let without = if is_job && !side_groups.is_empty() { find(&spans(&main)) } else { None };
    // Where most is beside, nothing is: a server of parameters gathers and broadcasts in turn. Nor is it where the rest is less regular.
    let bytes = |list: &[Span]| list.iter().map(|span| span.bytes).sum::<u64>();
    let balances = 2 * hosts.imbalance(&main, table) < hosts.imbalance(&all, table);
    let most = balances && 2 * bytes(&spans(&main)) > bytes(&all_spans);
    let regular = |pattern: &IterationPattern| pattern.spread as f64 / pattern.bytes.max(1) as f64;
    let bar = whole.as_ref().map_or(f64::INFINITY, regular).max(SIZE_TOLERANCE.0);
    let without = without.filter(|pattern| most && regular(pattern) <= bar);
    let has_sides = without.is_some();
    let pattern = without.or(whole)?;
    Some(DetectedJob {
        connections,
        hosts: hosts.all,
        is_job,
        pattern,
        has_sides,
        sends,
        kinds,
        bursts,
        absorbs: Vec::new(),
    })
}

fn spans<'a>(bursts: impl Iterator<Item = &'a Burst>) -> Vec<Span> {
    let counted = |burst: &Burst| if burst.is_counted { burst.bytes } else { 0 };
    let span = |burst: &Burst| Span { began: burst.began, ended: burst.ended, bytes: counted(burst) };
    bursts.map(span).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A job that begins a phase each so many milliseconds, from the third one on.
    fn job(bytes: u64, milliseconds: u64) -> FoundJob {
        let starts = (0..1000 / milliseconds).map(|phase| Nanos((3 + phase * milliseconds) * 1_000_000));
        let (hosts, sends, period) =
            (BTreeSet::from([[1; 4]]), BTreeSet::new(), Duration::from_millis(milliseconds));
        FoundJob { number: 1, hosts, sends, period, bytes, starts: starts.collect() }
    }

    #[test]
    fn a_faster_job_is_not_taken_for_sends() {
        let slow = job(1_000_000, 100);
        for sends in [job(1000, 100), job(1000, 200)] {
            assert!(sends.is_sends_of(&slow));
        }
        for other in [job(1000, 1), job(1000, 2), job(1000, 150), job(2_000_000, 100)] {
            assert!(!other.is_sends_of(&slow), "{:?}", other.period);
        }
    }
}
