//! The table on telemetry: where this host's traffic is measured, and who may see what was found.

use harmonaize_units::{Bytes, Nanos, Rate};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// Longest name that the kernel gives an interface.
const MAX_NAME: usize = 15;
/// Most interfaces that are measured.
const MAX_INTERFACES: usize = 64;
/// Connections in the programs' tables: fewer tell little, more fill the memory (about 700 bytes each).
const FLOWS: std::ops::RangeInclusive<u32> = 64..=1 << 22;
/// The least that recordings are bounded by.
const MIN_RECORD_BYTES: u64 = 1 << 20;
/// How often flows under way may be looked at.
const INTERVALS: std::ops::RangeInclusive<u64> = 1_000_000..=10_000_000_000;
/// What may end a burst.
const GAPS: std::ops::RangeInclusive<u64> = 1_000..=10_000_000_000;
/// What may be late; the programs tell of nothing beyond.
const LATE: std::ops::RangeInclusive<u64> = 0..=30_000_000;

/// What is measured, and where it is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Telemetry {
    /// Interfaces; none: the one that has the address of `listen`.
    pub interfaces: Vec<String>,
    /// Where operators' tools connect; none: nowhere.
    pub socket: Option<PathBuf>,
    /// Who may connect beside the agent's own user.
    pub uids: Vec<u32>,
    /// A gap of this length between two packets of a flow ends a burst.
    pub idle_gap: Duration,
    /// The excess over the least RTT from which an RTT is late. One that is longer than the least by this, and by the
    /// least, has flows sampled at once. Zero: none does. Without it: by the rates of the links.
    pub late_rtt: Option<Duration>,
    /// Connections that are kept; the least recently used are evicted beyond.
    pub flows: u32,
    /// How often flows under way are looked at, at most.
    pub interval: Duration,
    /// What links carry, in bits a second, by interface; else as the driver says.
    pub rates: BTreeMap<String, u64>,
    /// Everything that is measured is written to this file as well.
    pub record: Option<PathBuf>,
    /// What that file and the one before it take together, at most.
    pub record_bytes: u64,
    /// The kernel takes the time of every run of its BPF programs, which costs each some 30 ns more.
    pub run_time: bool,
    /// What the kernel itself knows of the flows' ends is followed too: sockets of this network namespace, and queue pairs.
    pub kernel: bool,
    /// The log says why packets are of no flow, or found no place: the programs are those built for that.
    pub diagnosis: bool,
    /// What comes in is counted on XDP, before the stack, in place of traffic control.
    pub xdp: bool,
}

impl Default for Telemetry {
    fn default() -> Self {
        Self {
            interfaces: Vec::new(),
            socket: None,
            uids: Vec::new(),
            idle_gap: Duration::from_micros(500),
            late_rtt: None,
            flows: 1 << 15,
            interval: Duration::from_millis(5),
            rates: BTreeMap::new(),
            record: None,
            record_bytes: 1 << 30,
            run_time: false,
            kernel: true,
            diagnosis: false,
            xdp: false,
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FileTelemetry {
    #[serde(default)]
    interfaces: Vec<String>,
    socket: Option<PathBuf>,
    #[serde(default)]
    uids: Vec<u32>,
    idle_gap: Option<Nanos>,
    late_round_trip: Option<Nanos>,
    flows: Option<u32>,
    interval: Option<Nanos>,
    #[serde(default)]
    rate: BTreeMap<String, Rate>,
    record: Option<PathBuf>,
    record_limit: Option<Bytes>,
    #[serde(default)]
    run_time: bool,
    kernel: Option<bool>,
    #[serde(default)]
    diagnosis: bool,
    #[serde(default)]
    xdp: bool,
}

impl FileTelemetry {
    /// Checks the table.
    pub(super) fn check(self) -> Result<Telemetry, String> {
        for name in self.interfaces.iter().chain(self.rate.keys()) {
            check_name(name)?;
        }
        if self.interfaces.len() > MAX_INTERFACES {
            let count = self.interfaces.len();
            return Err(format!("`interfaces` of [telemetry] has {count} names; at most {MAX_INTERFACES}"));
        }
        for (at, name) in self.interfaces.iter().enumerate() {
            if self.interfaces.iter().take(at).any(|other| other == name) {
                return Err(format!("`interfaces` of [telemetry] has {name} twice"));
            }
        }
        for (name, rate) in &self.rate {
            if rate.0 == 0 {
                return Err(format!("`rate` of {name} in [telemetry] is 0; leave it out if it is not known"));
            }
            if !self.interfaces.is_empty() && !self.interfaces.contains(name) {
                return Err(format!("`rate` of {name} in [telemetry], which is not among `interfaces`"));
            }
        }
        if self.socket.is_none() && !self.uids.is_empty() {
            return Err("`uids` of [telemetry] without `socket`".into());
        }
        let usual = Telemetry::default();
        let record_bytes = self.record_limit.map_or(usual.record_bytes, |limit| limit.0);
        if record_bytes < MIN_RECORD_BYTES {
            return Err(format!("`record_limit` of [telemetry] is {record_bytes} bytes; 1MiB at least"));
        }
        let flows = self.flows.unwrap_or(usual.flows);
        if !FLOWS.contains(&flows) {
            return Err(format!("`flows` of [telemetry] is {flows}; {} to {}", FLOWS.start(), FLOWS.end()));
        }
        let late = |value| within("late_round_trip", Some(value), Duration::ZERO, &LATE);
        Ok(Telemetry {
            interfaces: self.interfaces,
            socket: self.socket,
            uids: self.uids,
            idle_gap: within("idle_gap", self.idle_gap, usual.idle_gap, &GAPS)?,
            late_rtt: self.late_round_trip.map(late).transpose()?,
            flows,
            interval: within("interval", self.interval, usual.interval, &INTERVALS)?,
            rates: self.rate.into_iter().map(|(name, rate)| (name, rate.0)).collect(),
            record: self.record,
            record_bytes,
            run_time: self.run_time,
            kernel: self.kernel.unwrap_or(usual.kernel),
            diagnosis: self.diagnosis,
            xdp: self.xdp,
        })
    }
}

/// A name that an interface can have.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    let wrong = name.is_empty()
        || name.len() > MAX_NAME
        || name == "."
        || name == ".."
        || name.contains(|c: char| c == '/' || c == ':' || c.is_whitespace() || c.is_control());
    if wrong {
        let shown: String = name.chars().take(40).collect();
        return Err(format!("`{shown}` is no name of an interface: 1 to {MAX_NAME} bytes without / and :"));
    }
    Ok(())
}

fn within(
    key: &str,
    value: Option<Nanos>,
    usual: Duration,
    range: &std::ops::RangeInclusive<u64>,
) -> Result<Duration, String> {
    let Some(value) = value else { return Ok(usual) };
    if range.contains(&value.0) {
        return Ok(value.into());
    }
    let (least, most) = (Nanos(*range.start()), Nanos(*range.end()));
    Err(format!("`{key}` of [telemetry] is {value}; {least} to {most}"))
}
