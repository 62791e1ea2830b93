//! Which flows are under way: those are looked at often, one by one; all of them seldom. Of those under way the ones that move much
//! tell of congestion, and a ring has few: they are looked at more often than those that carry answers alone.
//!
//! A flow has changed since a reading if a packet of it passed later. So nothing is remembered of flows that rest, however
//! many the programs know.

use crate::telemetry::Failed;
use harmonaize_abi::Nanos;
use harmonaize_analysis::trace::Record;
use harmonaize_events::{FlowKey, Protocol};
use harmonaize_loader::{Collector, Counters, Flows};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::time::Duration;

/// Flows that are looked at one by one; the others wait until all are read.
const MAX_FLOWS: usize = 256;
/// A flow that was silent for so long rests.
const IDLE: Duration = Duration::from_millis(100);

/// A flow that moved so many bytes in 20 ms, since all under way were looked at, moves much.
const HEAVY_BYTES: u64 = 16 << 10;
const HEAVY_WINDOW: Duration = Duration::from_millis(20);

/// A flow under way.
#[derive(Clone, Copy, Debug)]
struct ActiveFlow {
    /// When its last packet had passed.
    seen: Nanos,
    /// Bytes that it had moved when all were looked at.
    bytes: u64,
    /// Whether it moves much, as far as is known.
    heavy: bool,
}

impl Default for ActiveFlow {
    fn default() -> Self {
        Self { seen: Nanos(0), bytes: 0, heavy: true }
    }
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct ActiveFlows {
    active: HashMap<FlowKey, ActiveFlow>,
    /// When all under way were last looked at.
    last_full_sample: Nanos,
    /// When all were last read.
    last_read: Nanos,
    flows: Flows,
}

/// The key of a flow's entry in the programs' tables, from that of an event.
pub(crate) fn entry(flow: &FlowKey) -> FlowKey {
    let tcp = flow.protocol == Protocol::Tcp as u8;
    FlowKey { direction: if tcp { 0 } else { flow.direction }, ..*flow }
}

impl ActiveFlows {
    /// A packet of a flow has passed. Whether it had rested, and is looked at from now on.
    pub(crate) fn activate(&mut self, flow: &FlowKey) -> bool {
        if self.active.len() >= MAX_FLOWS {
            return false;
        }
        match self.active.entry(entry(flow)) {
            // It has begun to move something: it is looked at until all have been.
            Entry::Occupied(mut place) => {
                place.get_mut().heavy = true;
                false
            }
            Entry::Vacant(place) => {
                place.insert(ActiveFlow::default());
                true
            }
        }
    }

    /// Whether a flow is among those under way that move much, as far as is known.
    pub(crate) fn is_heavy(&self, flow: &FlowKey) -> bool {
        self.active.get(&entry(flow)).is_some_and(|awake| awake.heavy)
    }

    /// Whether any flow is under way, as far as it is known.
    pub(crate) fn any_active(&self) -> bool {
        !self.active.is_empty()
    }

    /// All flows as they were last read.
    pub(crate) fn flows(&self) -> &Flows {
        &self.flows
    }

    /// When all were last read.
    pub(crate) fn last_read(&self) -> Nanos {
        self.last_read
    }

    /// Samples the flows under way that move much, or the `whole` of them. Appends those that have changed.
    pub(crate) fn sample(
        &mut self,
        source: &dyn Collector,
        now: Nanos,
        whole: bool,
        into: &mut Vec<Record>,
    ) -> Result<(), Failed> {
        let mut failed = Ok(());
        let passed = now.since(self.last_full_sample).max(HEAVY_WINDOW);
        let much = u128::from(HEAVY_BYTES) * passed.as_nanos() / HEAVY_WINDOW.as_nanos();
        self.last_full_sample = if whole { now } else { self.last_full_sample };
        self.active.retain(|key, awake| {
            if !whole && !awake.heavy {
                return true;
            }
            match source.read_flow(key) {
                Ok(Some(counters)) => {
                    let last = last_packet(&counters);
                    if last > awake.seen {
                        awake.seen = last;
                        into.push(record(now, *key, counters));
                    }
                    if whole {
                        let bytes = bytes(&counters);
                        awake.heavy = u128::from(bytes.saturating_sub(awake.bytes)) >= much;
                        awake.bytes = bytes;
                    }
                    now.since(last) < IDLE
                }
                // Evicted, or its interface is gone.
                Ok(None) => false,
                Err(error) => {
                    failed = Err(error);
                    true
                }
            }
        });
        failed
    }

    /// Reads all flows, and appends those that have changed since the last time.
    pub(crate) fn read_all(
        &mut self,
        source: &mut dyn Collector,
        now: Nanos,
        into: &mut Vec<Record>,
    ) -> Result<(), Failed> {
        source.read_flows(&mut self.flows)?;
        let since = std::mem::replace(&mut self.last_read, now);
        let Self { active: awake, flows, .. } = self;
        let mut changed = |key: &FlowKey, counters: Counters| {
            let last = last_packet(&counters);
            if last < since {
                return;
            }
            if awake.get(key).is_none_or(|awake| awake.seen < last) {
                into.push(record(now, *key, counters));
            }
            if now.since(last) < IDLE && (awake.len() < MAX_FLOWS || awake.contains_key(key)) {
                let fresh = ActiveFlow { bytes: bytes(&counters), ..ActiveFlow::default() };
                awake.entry(*key).or_insert(fresh).seen = last;
            }
        };
        flows.tcp.iter().for_each(|(key, flow)| changed(key, Counters::Tcp(*flow)));
        flows.roce.iter().for_each(|(key, counters)| changed(key, Counters::Roce(*counters)));
        Ok(())
    }
}

/// When the last packet passed, in either direction.
fn last_packet(counters: &Counters) -> Nanos {
    Nanos(match counters {
        Counters::Tcp(flow) => flow.ingress.traffic.last_ns.max(flow.egress.traffic.last_ns),
        Counters::Roce(counters) => counters.traffic.last_ns,
    })
}

/// What has passed, in both directions.
fn bytes(counters: &Counters) -> u64 {
    match counters {
        Counters::Tcp(flow) => flow.ingress.traffic.bytes.saturating_add(flow.egress.traffic.bytes),
        Counters::Roce(counters) => counters.traffic.bytes,
    }
}

fn record(time: Nanos, key: FlowKey, counters: Counters) -> Record {
    let time_ns = time.0;
    match counters {
        Counters::Tcp(flow) => Record::Tcp { time_ns, key, flow },
        Counters::Roce(counters) => Record::Roce { time_ns, key, counters },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::cpu_budget::nanoseconds;
    use harmonaize_events::{Direction, RoceCounters, TcpFlow};
    use harmonaize_loader::fake::Fake;

    fn tcp(port: u16) -> FlowKey {
        FlowKey { local_port: port, interface: 7, protocol: Protocol::Tcp as u8, ..FlowKey::default() }
    }

    fn sampled_ports(records: &mut Vec<Record>) -> Vec<u16> {
        let port = |record: Record| match record {
            Record::Tcp { key, .. } | Record::Roce { key, .. } => key.local_port,
            other => panic!("{other:?}"),
        };
        let mut ports: Vec<u16> = records.drain(..).map(port).collect();
        ports.sort_unstable();
        ports
    }

    #[test]
    fn changes_are_reported_once_and_idle_flows_skipped() {
        let mut fake = Fake::default();
        let pass = |fake: &Fake, port: u16, last_ns| {
            let mut scene = fake.scene();
            scene.flows.tcp.retain(|(key, _)| *key != tcp(port));
            let mut flow = TcpFlow::default();
            flow.egress.traffic.last_ns = last_ns;
            scene.flows.tcp.push((tcp(port), flow));
        };
        let idle = nanoseconds(IDLE);
        let (mut looks, mut records) = (ActiveFlows::default(), Vec::new());
        pass(&fake, 1, 100);
        pass(&fake, 2, 100);
        looks.read_all(&mut fake, Nanos(200), &mut records).unwrap();
        assert_eq!(sampled_ports(&mut records), [1, 2]);
        looks.sample(&fake, Nanos(300), true, &mut records).unwrap();
        assert_eq!(sampled_ports(&mut records), [0; 0], "nothing passed");
        pass(&fake, 2, 350);
        looks.sample(&fake, Nanos(400), true, &mut records).unwrap();
        assert_eq!(sampled_ports(&mut records), [2]);
        looks.read_all(&mut fake, Nanos(500), &mut records).unwrap();
        assert_eq!(sampled_ports(&mut records), [0; 0], "it was told when it was looked at");
        // Both have rested; a packet of one passes, which an event tells.
        looks.sample(&fake, Nanos(350 + idle), true, &mut records).unwrap();
        assert!(!looks.any_active());
        pass(&fake, 1, 400 + idle);
        let packet = FlowKey { direction: Direction::Egress as u8, ..tcp(1) };
        assert_eq!([looks.activate(&packet), looks.activate(&packet)], [true, false]);
        looks.sample(&fake, Nanos(410 + idle), true, &mut records).unwrap();
        assert_eq!(sampled_ports(&mut records), [1]);
        // One that is gone is not looked at any more.
        fake.scene().flows.tcp.clear();
        looks.sample(&fake, Nanos(420 + idle), true, &mut records).unwrap();
        assert!(!looks.any_active());
    }

    #[test]
    fn heavy_flows_are_sampled_each_time_others_rarely() {
        let mut fake = Fake::default();
        let pass = |fake: &Fake, port: u16, last_ns: u64, bytes| {
            let mut scene = fake.scene();
            scene.flows.tcp.retain(|(key, _)| *key != tcp(port));
            let mut flow = TcpFlow::default();
            (flow.egress.traffic.last_ns, flow.egress.traffic.bytes) = (last_ns, bytes);
            scene.flows.tcp.push((tcp(port), flow));
        };
        let (mut looks, mut records) = (ActiveFlows::default(), Vec::new());
        let mut looked = [0, 0];
        for step in 1..=100 {
            let now = step * nanoseconds(HEAVY_WINDOW) / 10;
            pass(&fake, 1, now, step * HEAVY_BYTES);
            pass(&fake, 2, now, step * 66);
            if step == 1 {
                looks.read_all(&mut fake, Nanos(now), &mut records).unwrap();
            } else {
                looks.sample(&fake, Nanos(now), step.is_multiple_of(10), &mut records).unwrap();
            }
            let told = sampled_ports(&mut records);
            looked = [looked[0] + usize::from(told.contains(&1)), looked[1] + usize::from(told.contains(&2))];
        }
        // Whatever is new counts as moving much until all have been looked at.
        assert!(looked[0] == 100 && (10..=20).contains(&looked[1]), "{looked:?}");
    }

    #[test]
    fn flows_beyond_those_looked_at_are_told_when_all_are_read() {
        let mut fake = Fake::default();
        let many = MAX_FLOWS as u16 + 50;
        for port in 0..many {
            let mut counters = RoceCounters::default();
            counters.traffic.last_ns = 10;
            let key = FlowKey {
                local_port: port,
                protocol: Protocol::Roce as u8,
                direction: Direction::Ingress as u8,
                ..FlowKey::default()
            };
            fake.scene().flows.roce.push((key, counters));
        }
        let (mut looks, mut records) = (ActiveFlows::default(), Vec::new());
        looks.read_all(&mut fake, Nanos(20), &mut records).unwrap();
        assert_eq!(sampled_ports(&mut records), (0..many).collect::<Vec<_>>());
        fake.scene().flows.roce.iter_mut().for_each(|(_, counters)| counters.traffic.last_ns = 30);
        looks.sample(&fake, Nanos(40), true, &mut records).unwrap();
        assert_eq!(sampled_ports(&mut records).len(), MAX_FLOWS);
        looks.read_all(&mut fake, Nanos(50), &mut records).unwrap();
        assert_eq!(sampled_ports(&mut records).len(), 50, "the rest");
    }
}
