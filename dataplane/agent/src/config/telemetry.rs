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

/// What makes no sense in the table on telemetry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TelemetryError {
    /// A name that the kernel gives no interface.
    #[error("`{0}` is no name of an interface: 1 to {MAX_NAME} bytes without / and :")]
    InterfaceName(String),
    /// More interfaces than are measured.
    #[error("`interfaces` of [telemetry] has {0} names; at most {MAX_INTERFACES}")]
    ManyInterfaces(usize),
    /// An interface is named twice.
    #[error("`interfaces` of [telemetry] has {0} twice")]
    InterfaceTwice(String),
    /// An interface would carry nothing.
    #[error("`rate` of {0} in [telemetry] is 0; leave it out if it is not known")]
    NoRate(String),
    /// The rate of an interface that is not measured.
    #[error("`rate` of {0} in [telemetry], which is not among `interfaces`")]
    RateOfOther(String),
    /// Users may connect, but nowhere.
    #[error("`uids` of [telemetry] without `socket`")]
    UidsWithoutSocket,
    /// Too few bytes for recordings.
    #[error("`record_limit` of [telemetry] is {0} bytes; 1MiB at least")]
    RecordLimit(u64),
    /// Too few or too many connections.
    #[error("`flows` of [telemetry] is {flows}; {} to {}", FLOWS.start(), FLOWS.end())]
    Flows {
        /// How many.
        flows: u32,
    },
    /// Too short or too long.
    #[error("`{key}` of [telemetry] is {value}; {least} to {most}")]
    Time {
        /// The key.
        key: &'static str,
        /// What it is.
        value: Nanos,
        /// The least that it may be.
        least: Nanos,
        /// The most.
        most: Nanos,
    },
}

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
    pub(super) fn check(self) -> Result<Telemetry, TelemetryError> {
        for name in self.interfaces.iter().chain(self.rate.keys()) {
            check_name(name)?;
        }
        if self.interfaces.len() > MAX_INTERFACES {
            return Err(TelemetryError::ManyInterfaces(self.interfaces.len()));
        }
        for (at, name) in self.interfaces.iter().enumerate() {
            if self.interfaces.iter().take(at).any(|other| other == name) {
                return Err(TelemetryError::InterfaceTwice(name.clone()));
            }
        }
        for (name, rate) in &self.rate {
            if rate.0 == 0 {
                return Err(TelemetryError::NoRate(name.clone()));
            }
            if !self.interfaces.is_empty() && !self.interfaces.contains(name) {
                return Err(TelemetryError::RateOfOther(name.clone()));
            }
        }
        if self.socket.is_none() && !self.uids.is_empty() {
            return Err(TelemetryError::UidsWithoutSocket);
        }
        let usual = Telemetry::default();
        let record_bytes = self.record_limit.map_or(usual.record_bytes, |limit| limit.0);
        if record_bytes < MIN_RECORD_BYTES {
            return Err(TelemetryError::RecordLimit(record_bytes));
        }
        let flows = self.flows.unwrap_or(usual.flows);
        if !FLOWS.contains(&flows) {
            return Err(TelemetryError::Flows { flows });
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
pub(crate) fn check_name(name: &str) -> Result<(), TelemetryError> {
    let wrong = name.is_empty()
        || name.len() > MAX_NAME
        || name == "."
        || name == ".."
        || name.contains(|c: char| c == '/' || c == ':' || c.is_whitespace() || c.is_control());
    if wrong {
        return Err(TelemetryError::InterfaceName(name.chars().take(40).collect()));
    }
    Ok(())
}

fn within(
    key: &'static str,
    value: Option<Nanos>,
    usual: Duration,
    range: &std::ops::RangeInclusive<u64>,
) -> Result<Duration, TelemetryError> {
    let Some(value) = value else { return Ok(usual) };
    if range.contains(&value.0) {
        return Ok(value.into());
    }
    let (least, most) = (Nanos(*range.start()), Nanos(*range.end()));
    Err(TelemetryError::Time { key, value, least, most })
}
