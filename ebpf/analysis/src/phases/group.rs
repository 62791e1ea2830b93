//! Which connections make up a job: those that are active together, and meet at a host.

use super::activity::{SCALES, Signature};
use super::finding::Address;
use super::flow::Burst;
use super::iterations::{IterationPattern, Span, find};
use super::table::{Connection, Table};
use std::collections::BTreeMap;

/// Connections that correlate less do not belong together.
const MIN_CORRELATION: f64 = 0.5;
/// Connections that are compared at once.
const MAX_COMPARED: usize = 256;
/// How long to wait after a group turned out to have no rhythm: at first, and at most.
const BACKOFF_NS: (u64, u64) = (250_000_000, 4_000_000_000);
/// Some host of a job receives at least this part of what it sends, or sends this part of what it receives.
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
    pub(super) connections: Vec<u32>,
    pub(super) pattern: IterationPattern,
    pub(super) bursts: Vec<Burst>,
}

fn correlate(one: &Candidate, two: &Candidate) -> bool {
    if !one.hosts.iter().any(|host| two.hosts.contains(host)) {
        return false;
    }
    // The finest scale that tells.
    let pairs = one.signatures.iter().zip(&two.signatures);
    let mut telling = pairs.filter(|(one, two)| one.has_evidence() && two.has_evidence());
    telling.next().is_some_and(|(one, two)| one.correlation(two) >= MIN_CORRELATION)
}

fn candidate(place: u32, connection: &mut Connection, now_ns: u64) -> Option<Candidate> {
    let hosts = [connection.ends.first.0, connection.ends.second.0];
    let watched = connection.history.as_mut()?;
    let [fine, coarse] = &mut watched.activity;
    let [fine_slot, coarse_slot] = SCALES;
    let signatures = [fine.signature(now_ns / fine_slot), coarse.signature(now_ns / coarse_slot)];
    let due = watched.retry_ns <= now_ns;
    signatures.iter().any(Signature::has_evidence).then_some(Candidate { place, hosts, signatures, due })
}

/// Looks for jobs among connections without one. `joins` is told of each that belongs to a job that is known.
pub(super) fn search(table: &mut Table, now_ns: u64, mut joins: impl FnMut(u64, u32)) -> Vec<DetectedJob> {
    let (mut free, mut members) = (Vec::new(), Vec::new());
    for (place, connection) in (0..).zip(&mut table.connections) {
        let Some(connection) = connection.as_mut().filter(|one| one.history.is_some() && !one.owned) else {
            continue;
        };
        let job = connection.job;
        let Some(candidate) = candidate(place, connection, now_ns) else { continue };
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
        let job = members.iter().find(|(_, member)| candidate.due && correlate(candidate, member));
        if let Some((job, _)) = job {
            joins(*job, candidate.place);
        }
        job.is_none()
    });
    let mut found = Vec::new();
    for component in components(&free) {
        if !component.iter().any(|candidate| candidate.due) {
            continue;
        }
        match detect_job(table, &component) {
            Some(job) => found.push(job),
            None => component.iter().for_each(|candidate| back_off(table, candidate.place, now_ns)),
        }
    }
    found
}

fn back_off(table: &mut Table, place: u32, now_ns: u64) {
    let watched = table.connection_mut(place).and_then(|connection| connection.history.as_mut());
    if let Some(watched) = watched {
        let (first, most) = BACKOFF_NS;
        watched.backoff_ns = (watched.backoff_ns * 2).clamp(first, most);
        watched.retry_ns = now_ns.saturating_add(watched.backoff_ns);
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
    let mut moved: BTreeMap<Address, (u64, u64)> = BTreeMap::new();
    let mut bursts = Vec::new();
    for candidate in component {
        let watched = table.connection(candidate.place)?.history.as_ref()?;
        let ([first, second], [forward, reverse]) = (candidate.hosts, watched.bytes);
        for (from, to, bytes) in [(first, second, forward), (second, first, reverse)] {
            let (sent, _) = moved.entry(from).or_default();
            *sent = sent.saturating_add(bytes);
            let (_, received) = moved.entry(to).or_default();
            *received = received.saturating_add(bytes);
        }
        bursts.extend(watched.history.iter().copied());
    }
    let two_way = |(sent, received): &(u64, u64)| {
        *sent.min(received) as f64 >= MIN_REVERSE_PART * *sent.max(received) as f64 && *sent > 0
    };
    if !moved.values().any(two_way) {
        return None;
    }
    bursts.sort_unstable_by_key(|burst| (burst.began_ns, burst.connection, burst.reverse));
    let spans: Vec<Span> = bursts
        .iter()
        .map(|burst| Span {
            began_ns: burst.began_ns,
            ended_ns: burst.ended_ns,
            bytes: if burst.is_counted { burst.bytes } else { 0 },
        })
        .collect();
    Some(DetectedJob { connections, pattern: find(&spans)?, bursts })
}
