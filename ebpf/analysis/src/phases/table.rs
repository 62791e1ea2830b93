//! All flows and connections that are known, within bounds.

use super::activity::{Activity, SCALES};
use super::finding::Address;
use super::flow::{Burst, Ended, Ends, Flow, Quality, Side};
use foldhash::fast::RandomState;
use harmonaize_abi::Nanos;
use harmonaize_events::{Direction, FlowKey, Protocol};
use std::collections::{HashMap, VecDeque};
use std::time::Duration;

/// A burst of fewer bytes is chatter by itself.
pub(super) const HEAVY_BYTES: u64 = 4096;
/// Bursts that are kept of a connection without a job.
const HISTORY: usize = 4096;
/// Bursts that are kept of a connection that has had no heavy one.
const MAX_LIGHT: usize = 4;
/// A heavy connection that has been silent for so long is one no longer.
const SILENT: Duration = Duration::from_secs(60);

/// A connection.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) ends: Ends,
    pub(super) flows: Vec<u32>,
    /// By direction, forward and reverse: who tells of its bytes, and whether as what leaves.
    pub(super) byte_sources: [Option<(u64, bool)>; 2],
    pub(super) owned: bool,
    /// Its job's number.
    pub(super) job: Option<u64>,
    pub(super) history: Option<Box<BurstHistory>>,
    /// The last bursts before the first heavy one: words that come before the bytes.
    light: [Burst; MAX_LIGHT],
}

/// What is kept of a connection with heavy traffic.
#[derive(Debug, Default)]
pub(super) struct BurstHistory {
    pub(super) activity: [Activity; SCALES.len()],
    pub(super) history: VecDeque<Burst>,
    pub(super) last_heavy: Nanos,
    /// Heavy bytes, forward and reverse.
    pub(super) bytes: [u64; 2],
    /// When to look at it again, and how long to wait after that.
    pub(super) retry_at: Nanos,
    pub(super) backoff: Duration,
}

/// Who observes.
#[derive(Debug, Clone, Copy, Default)]
struct Sweeps {
    latest: Nanos,
    /// The end of the last reading of all flows that is complete.
    swept: Nanos,
}

/// Flows and connections.
#[derive(Debug, Default)]
pub(super) struct Table {
    by_key: HashMap<(u64, FlowKey), u32, RandomState>,
    by_ends: HashMap<Ends, u32, RandomState>,
    pub(super) flows: Vec<Option<Flow>>,
    pub(super) connections: Vec<Option<Connection>>,
    free_flows: Vec<u32>,
    free_connections: Vec<u32>,
    sweeps: HashMap<u64, Sweeps>,
    pub(super) history: usize,
}

/// A reading of all flows is complete when so long nothing more came of it.
const SWEEP: Duration = Duration::from_millis(5);
/// Observers whose readings are told apart.
const OBSERVERS: usize = 4096;

impl Table {
    /// The flow of a key at an observer, made if there is room.
    pub(super) fn flow(&mut self, observer: u64, key: &FlowKey, now: Nanos, most: usize) -> Option<u32> {
        let mut key = *key;
        if key.protocol == Protocol::Tcp as u8 {
            key.direction = 0;
        }
        if let Some(place) = self.by_key.get(&(observer, key)) {
            return Some(*place);
        }
        if self.by_key.len() >= most {
            return None;
        }
        let (ends, reverse) = Ends::of(&key);
        let connection = match self.by_ends.get(&ends) {
            Some(place) => *place,
            None => {
                let connection = Connection {
                    ends,
                    flows: Vec::with_capacity(2),
                    byte_sources: [None; 2],
                    owned: false,
                    job: None,
                    history: None,
                    light: [Burst::default(); MAX_LIGHT],
                };
                let place = put(&mut self.connections, &mut self.free_connections, connection)?;
                self.by_ends.insert(ends, place);
                place
            }
        };
        let flow = Flow {
            observer,
            key,
            connection,
            reverse,
            ingress: Side::default(),
            egress: Side::default(),
            last_seen: now,
            owned: false,
        };
        let place = put(&mut self.flows, &mut self.free_flows, flow)?;
        self.by_key.insert((observer, key), place);
        if let Some(connection) = self.connection_mut(connection) {
            connection.flows.push(place);
        }
        Some(place)
    }

    /// A flow that is known, by its key.
    pub(super) fn find_flow(&self, observer: u64, key: &FlowKey) -> Option<&Flow> {
        let mut key = *key;
        if key.protocol == Protocol::Tcp as u8 {
            key.direction = 0;
        }
        self.flows.get(*self.by_key.get(&(observer, key))? as usize)?.as_ref()
    }

    pub(super) fn flow_mut(&mut self, place: u32) -> Option<&mut Flow> {
        self.flows.get_mut(place as usize)?.as_mut()
    }

    pub(super) fn connection(&self, place: u32) -> Option<&Connection> {
        self.connections.get(place as usize)?.as_ref()
    }

    pub(super) fn connection_mut(&mut self, place: u32) -> Option<&mut Connection> {
        self.connections.get_mut(place as usize)?.as_mut()
    }

    /// The ends of a connection at which a flow of it is watched.
    pub(super) fn local_ends(&self, connection: &Connection) -> impl Iterator<Item = Address> {
        let flows = connection.flows.iter().filter_map(|flow| self.flows.get(*flow as usize)?.as_ref());
        let ends = connection.ends;
        flows.map(move |flow| if flow.reverse { ends.second.0 } else { ends.first.0 })
    }

    /// A reading of flows goes on at this time.
    pub(super) fn sweep(&mut self, observer: u64, time: Nanos) {
        if self.sweeps.len() >= OBSERVERS && !self.sweeps.contains_key(&observer) {
            return;
        }
        let sweeps = self.sweeps.entry(observer).or_default();
        if time > sweeps.latest {
            sweeps.swept = sweeps.latest;
            sweeps.latest = time;
        }
    }

    fn swept(&self, observer: u64, now: Nanos) -> Nanos {
        let sweeps = self.sweeps.get(&observer).copied().unwrap_or_default();
        if now >= sweeps.latest.after(SWEEP) { sweeps.latest } else { sweeps.swept }
    }

    /// The burst of a flow's side that has ended: notes it for the connection. Handed back for its job, if it has one, or none.
    pub(super) fn ended(
        &mut self,
        flow: u32,
        direction: Direction,
        (began, ended, bytes): Ended,
        most: usize,
    ) -> Option<(u64, Burst)> {
        let Flow { connection: place, reverse, observer, .. } = *self.flows.get(flow as usize)?.as_ref()?;
        let leaving = direction == Direction::Egress;
        let reverse = reverse == leaving;
        let burst = Burst { began, ended, bytes, connection: place, reverse, leaving, is_counted: false };
        let room = self.history < most;
        let connection = self.connections.get_mut(place as usize)?.as_mut()?;
        let tells = connection.byte_sources.get_mut(usize::from(reverse))?;
        if tells.is_none_or(|(_, by_sender)| leaving && !by_sender) {
            *tells = Some((observer, leaving));
        }
        let burst = Burst { is_counted: *tells == Some((observer, leaving)), ..burst };
        if connection.owned {
            return None;
        }
        if connection.history.is_none() {
            if bytes >= HEAVY_BYTES && room {
                let history = connection.light.into_iter().filter(|light| light.began != Nanos(0)).collect();
                connection.history = Some(Box::new(BurstHistory { history, ..BurstHistory::default() }));
                self.history += 1;
            } else {
                connection.light.rotate_left(1);
                let [.., last] = &mut connection.light;
                *last = burst;
            }
        }
        if let Some(watched) = &mut connection.history {
            if bytes >= HEAVY_BYTES {
                watched.last_heavy = watched.last_heavy.max(ended);
                if burst.is_counted
                    && let Some(sum) = watched.bytes.get_mut(usize::from(reverse))
                {
                    *sum = sum.saturating_add(bytes);
                }
                for (activity, slot) in watched.activity.iter_mut().zip(SCALES) {
                    activity.note(began.0 / slot, ended.0 / slot);
                }
            }
            if connection.job.is_none() {
                if watched.history.len() >= HISTORY {
                    watched.history.pop_front();
                }
                watched.history.push_back(burst);
            }
        }
        connection.job.map(|job| (job, burst))
    }

    /// The running bursts of a connection, each with whether all of it is known.
    pub(super) fn running(
        &self,
        place: u32,
        timeout: Duration,
        now: Nanos,
        mut tell: impl FnMut(Burst, bool),
    ) {
        let Some(connection) = self.connection(place) else { return };
        for flow in &connection.flows {
            let Some(flow) = self.flows.get(*flow as usize).and_then(Option::as_ref) else { continue };
            let swept = self.swept(flow.observer, now);
            for (side, leaving) in [(&flow.egress, true), (&flow.ingress, false)] {
                let Some(((began, ended, bytes), whole)) = side.running(swept, timeout, now) else {
                    continue;
                };
                let reverse = flow.reverse == leaving;
                let tells = connection.byte_sources.get(usize::from(reverse)).copied().flatten();
                let counts = tells == Some((flow.observer, leaving));
                tell(
                    Burst { began, ended, bytes, connection: place, reverse, leaving, is_counted: counts },
                    whole,
                );
            }
        }
    }

    /// What has come to a connection's quality counters, forward and reverse, since it was last asked; as senders see it.
    pub(super) fn quality(&mut self, place: u32) -> [Quality; 2] {
        let mut sums = [Quality::default(); 2];
        let Some(connection) = self.connections.get(place as usize).and_then(Option::as_ref) else {
            return sums;
        };
        for flow in &connection.flows {
            let Some(flow) = self.flows.get_mut(*flow as usize).and_then(Option::as_mut) else { continue };
            let fresh = flow.egress.quality_since();
            if let Some(sum) = sums.get_mut(usize::from(flow.reverse)) {
                sum.rtt_count += fresh.rtt_count;
                sum.rtt_sum = sum.rtt_sum.saturating_add(fresh.rtt_sum);
                sum.retransmissions += fresh.retransmissions;
            }
        }
        sums
    }

    /// Forgets flows without a job of which nothing came since `since`. Also forgets what was kept of connections that are heavy
    /// no longer.
    pub(super) fn forget(&mut self, since: Nanos, now: Nanos) {
        for place in 0..self.flows.len() {
            let Some(Some(flow)) = self.flows.get(place) else { continue };
            let in_job = self.connection(flow.connection).is_some_and(|connection| connection.job.is_some());
            if flow.last_seen >= since || in_job {
                continue;
            }
            let (name, connection) = ((flow.observer, flow.key), flow.connection);
            let place = place as u32;
            self.by_key.remove(&name);
            if let Some(slot) = self.flows.get_mut(place as usize) {
                *slot = None;
                self.free_flows.push(place);
            }
            let Some(known) = self.connection_mut(connection) else { continue };
            known.flows.retain(|flow| *flow != place);
            if known.flows.is_empty() {
                let (ends, was_watched) = (known.ends, known.history.is_some());
                self.history -= usize::from(was_watched);
                self.by_ends.remove(&ends);
                if let Some(slot) = self.connections.get_mut(connection as usize) {
                    *slot = None;
                    self.free_connections.push(connection);
                }
            }
        }
        let silent = now.before(SILENT);
        for connection in self.connections.iter_mut().flatten() {
            let gone = |watched: &BurstHistory| watched.last_heavy < silent;
            if connection.job.is_none() && connection.history.as_deref().is_some_and(gone) {
                connection.history = None;
                self.history -= 1;
            }
        }
    }
}

fn put<T>(slots: &mut Vec<Option<T>>, free: &mut Vec<u32>, value: T) -> Option<u32> {
    if let Some(place) = free.pop() {
        *slots.get_mut(place as usize)? = Some(value);
        return Some(place);
    }
    let place = u32::try_from(slots.len()).ok()?;
    slots.push(Some(value));
    Some(place)
}
