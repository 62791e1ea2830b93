//! Records become a timeline: communicators with their operations and segments, hosts with their flows and bursts.

mod communicator;
mod host;

use super::track::Track;
use communicator::Communicators;
use harmonaize_analysis::trace::Record;
use harmonaize_planner::Nanos;
use host::Host;
use std::collections::BTreeMap;

/// A host within several traces: which trace, and the number that the host has in it.
type HostKey = (usize, u64);

/// What the records said so far.
#[derive(Debug, Default)]
pub(crate) struct Builder {
    hosts: BTreeMap<HostKey, Host>,
    communicators: Communicators,
    source: usize,
    observer: u64,
    records: u64,
}

/// Turns a host's CLOCK_MONOTONIC into CLOCK_REALTIME; 0 stays 0.
#[derive(Clone, Copy, Debug, Default)]
struct Shift(i64);

impl Shift {
    fn real(self, time: Nanos) -> Nanos {
        if time == Nanos(0) { time } else { Nanos(time.0.saturating_add_signed(self.0)) }
    }
}

impl Builder {
    /// What follows comes from another trace. `offset_ns` is CLOCK_REALTIME less CLOCK_MONOTONIC there, where the trace
    /// does not say; 0 where it is not known.
    pub(crate) fn begin(&mut self, source: usize, offset_ns: i64) {
        (self.source, self.observer) = (source, 0);
        self.host().offset_ns = offset_ns;
    }

    /// How many records were taken.
    pub(crate) fn records(&self) -> u64 {
        self.records
    }

    fn host(&mut self) -> &mut Host {
        self.hosts.entry((self.source, self.observer)).or_default()
    }

    /// Takes the next record of the trace.
    pub(crate) fn take(&mut self, record: &Record) {
        self.records += 1;
        match record {
            Record::Observer(observer) => {
                self.observer = observer.host;
                let host = self.host();
                if observer.realtime_offset_ns != 0 {
                    host.offset_ns = observer.realtime_offset_ns;
                }
            }
            Record::Mark(mark) => self.communicators.mark((self.source, self.observer), mark),
            record => self.host().take(record),
        }
    }

    /// Moves the times of hosts whose clocks are further apart than messages take. Returns which hosts' by how many nanoseconds.
    pub(crate) fn align(&mut self) -> Vec<(String, i64)> {
        let names = named(&self.hosts);
        let mut moved = Vec::new();
        for (place, by) in self.communicators.corrections(&shifts(&self.hosts)) {
            let Some(host) = self.hosts.get_mut(&place).filter(|_| by != 0) else { continue };
            host.offset_ns = host.offset_ns.saturating_add(by);
            moved.push((names.get(&place).cloned().unwrap_or_default(), by));
        }
        moved
    }

    /// The timeline.
    pub(crate) fn finish(self) -> Vec<Track> {
        let Self { mut hosts, communicators, .. } = self;
        let shifts = shifts(&hosts);
        hosts.retain(|_, host| !host.is_empty());
        let tenants = hosts.values().flat_map(Host::tenants).collect();
        let names: BTreeMap<HostKey, String> = named(&hosts);
        let (mut tracks, operations) = communicators.finish(&shifts, &tenants, &names);
        for (place, host) in hosts {
            let name = names.get(&place).cloned().unwrap_or_default();
            let operations = operations.get(&place);
            let mut track = Track::named(name);
            track.tracks = host.finish(operations);
            if !track.tracks.is_empty() {
                tracks.push(track);
            }
        }
        tracks
    }
}

fn shifts(hosts: &BTreeMap<HostKey, Host>) -> BTreeMap<HostKey, Shift> {
    hosts.iter().map(|(place, host)| (*place, Shift(host.offset_ns))).collect()
}

/// Hosts have numbers, and addresses that they were seen with.
fn named(hosts: &BTreeMap<HostKey, Host>) -> BTreeMap<HostKey, String> {
    let alone = hosts.len() == 1;
    let name = |(number, (place, host)): (usize, (&HostKey, &Host))| {
        let name = match host.address() {
            Some(address) => format!("host {address}"),
            None if alone => "host".to_owned(),
            None => format!("host {}", number + 1),
        };
        (*place, name)
    };
    hosts.iter().enumerate().map(name).collect()
}
