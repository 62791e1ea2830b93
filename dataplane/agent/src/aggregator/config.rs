//! The configuration file of an aggregator.

use super::grant::ParentConfig;
use crate::config::{ConfigError, Controls, ValueError, Verbs, control_session};
use crate::sandbox::Sandbox;
use harmonaize_aggregator::packet::{HEADER_BYTES, MAX_PAYLOAD};
use harmonaize_identity::Protection;
use harmonaize_units::{Bytes, Nanos, parse_toml};
use serde::Deserialize;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where metrics are by default: on loopback alone.
const METRICS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9478);

/// Bytes of the headers of IP and UDP, of the two versions of IP.
const HEADERS: (usize, usize) = (28, 48);
/// The pool where the processor says nothing of its caches.
const POOL: u64 = 4 << 20;
/// What a pool may be.
const POOLS: std::ops::RangeInclusive<u64> = 64 << 10..=4 << 30;
/// What a frame may carry.
const MTUS: std::ops::RangeInclusive<u32> = 576..=9216;
/// How an aggregator above is dealt with, if nothing is configured. Together with a worker's longest question and one more it is
/// given up before hosts would be.
const PARENT: ParentConfig =
    ParentConfig { timeout: Duration::from_millis(100), retry_after: Duration::from_millis(2) };
/// What it may be.
const TIMES: std::ops::RangeInclusive<Duration> = Duration::from_micros(100)..=Duration::from_secs(10);
/// Units are whole elements of every type.
const ALIGN: usize = 8;

/// What the operator decided for an aggregator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AggregatorConfig {
    /// Its name in control's topology.
    pub name: String,
    /// Where each control listens, "host:port": one, or several of which one leads.
    pub control: Vec<String>,
    /// How the session with control is protected.
    pub protection: Protection,
    /// Where workers' datagrams come, UDP.
    pub listen: SocketAddr,
    /// Bytes of memory for sums.
    pub pool: u64,
    /// What a frame carries on the way between it and the workers: no datagram is longer.
    pub mtu: u32,
    /// How long it looks for datagrams before it sleeps.
    pub spin: Duration,
    /// The rate that control takes it to do, in packets a second in and as many out. None: it is measured at the start.
    pub packets_per_second: Option<u64>,
    /// How it deals with an aggregator above it.
    pub parent: ParentConfig,
    /// Where Prometheus reads metrics over HTTP.
    pub metrics: SocketAddr,
    /// Workers' datagrams come over RDMA too; none: over UDP alone.
    pub verbs: Option<Verbs>,
    /// What the process gives up at its start.
    pub sandbox: Sandbox,
    /// The file that it was read from, which is read again while the aggregator runs.
    pub source: Option<PathBuf>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    name: String,
    control: Controls,
    tls: Option<PathBuf>,
    #[serde(default)]
    insecure_loopback: bool,
    listen: SocketAddr,
    pool: Option<Bytes>,
    mtu: Option<u32>,
    spin: Option<Nanos>,
    packets_per_second: Option<u64>,
    patience: Option<Nanos>,
    again: Option<Nanos>,
    metrics: Option<SocketAddr>,
    verbs: Option<Verbs>,
    #[serde(default)]
    sandbox: Sandbox,
}

impl AggregatorConfig {
    /// Reads a file.
    ///
    /// # Errors
    /// If it cannot be read, a key is unknown or missing, or a value makes no sense; with the line, where there is one.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Self::parse(path, &text)
    }

    fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let file: File =
            parse_toml(text).map_err(|error| ConfigError::Text { path: path.to_owned(), error })?;
        let value = |error: ValueError| ConfigError::Value { path: path.to_owned(), error };
        if file.listen.ip().is_unspecified() {
            return Err(value(ValueError::AggregatorListensAnywhere(file.listen)));
        }
        let pool = file.pool.map_or_else(|| half_of_cache().unwrap_or(POOL), |pool| pool.0);
        if !POOLS.contains(&pool) {
            return Err(value(ValueError::Pool { within: POOLS }));
        }
        let mtu = file.mtu.unwrap_or(1500);
        if !MTUS.contains(&mtu) {
            return Err(value(ValueError::Mtu { within: MTUS }));
        }
        let time = |told: Option<Nanos>, usual| told.map_or(usual, |time| Duration::from_nanos(time.0));
        let upwards = ParentConfig {
            timeout: time(file.patience, PARENT.timeout),
            retry_after: time(file.again, PARENT.retry_after),
        };
        let within = [upwards.timeout, upwards.retry_after].iter().all(|time| TIMES.contains(time));
        if !within || upwards.retry_after > upwards.timeout {
            return Err(value(ValueError::ParentTimes));
        }
        file.verbs.iter().try_for_each(Verbs::check).map_err(|error| value(error.into()))?;
        let (control, protection) =
            control_session(path, file.control, file.tls, file.insecure_loopback).map_err(value)?;
        Ok(Self {
            name: file.name,
            control,
            protection,
            listen: file.listen,
            pool,
            mtu,
            spin: file.spin.map_or(Duration::from_micros(50), |spin| Duration::from_nanos(spin.0)),
            packets_per_second: file.packets_per_second,
            parent: upwards,
            metrics: file.metrics.unwrap_or(METRICS),
            verbs: file.verbs,
            sandbox: file.sandbox.beside(path),
            source: Some(path.to_owned()),
        })
    }

    /// Reads its file again, and takes over what may change while it runs. That is how an aggregator above is dealt with, from the next
    /// grant on. The certificate's files are read by every connection anyhow, and must be usable.
    ///
    /// # Errors
    /// As of [`AggregatorConfig::read`], if another key has changed, or if no certificate could be shown; nothing changes then.
    pub(super) fn reload(&mut self) -> Result<(), ConfigError> {
        let Some(path) = &self.source else { return Ok(()) };
        let again = Self::read(path)?;
        let value = |error: ValueError| ConfigError::Value { path: path.clone(), error };
        if (Self { parent: self.parent, ..again.clone() }) != *self {
            return Err(value(ValueError::Unchangeable));
        }
        let shown = again.protection.certificate_ends();
        shown.map_err(|error| value(ValueError::Certificate(error)))?;
        self.parent = again.parent;
        Ok(())
    }

    /// Bytes of payload of the longest datagram, whole elements of any type.
    pub fn unit_bytes(&self) -> usize {
        let headers = if self.listen.is_ipv4() { HEADERS.0 } else { HEADERS.1 };
        (self.mtu as usize - headers - HEADER_BYTES).min(MAX_PAYLOAD) / ALIGN * ALIGN
    }

    /// Units in the pool.
    pub fn units(&self) -> u32 {
        u32::try_from(self.pool / (self.unit_bytes() + HEADER_BYTES) as u64).unwrap_or(u32::MAX)
    }
}

/// Half of the last-level cache of the first processor, bytes: the rest is for what passes through.
fn half_of_cache() -> Option<u64> {
    let caches = std::fs::read_dir("/sys/devices/system/cpu/cpu0/cache").ok()?;
    let sizes = caches.filter_map(|cache| {
        let text = std::fs::read_to_string(cache.ok()?.path().join("size")).ok()?;
        cache_bytes(text.trim())
    });
    sizes.max().map(|bytes| (bytes / 2).clamp(*POOLS.start(), 64 << 20))
}

/// As sysfs writes it: "32768K".
fn cache_bytes(text: &str) -> Option<u64> {
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let factor = match unit {
        "" => 1,
        "K" => 1 << 10,
        "M" => 1 << 20,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(factor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RdmaError;

    const GOOD: &str =
        "name = \"agg0\"\ncontrol = \"10.0.0.1:7000\"\ntls = \"tls\"\nlisten = \"10.1.0.9:7400\"\n";

    fn parse(text: &str) -> Result<AggregatorConfig, ConfigError> {
        AggregatorConfig::parse(Path::new("a.toml"), text)
    }

    /// What is wrong with a value of this configuration.
    fn value(text: &str) -> ValueError {
        match parse(text).unwrap_err() {
            ConfigError::Value { error, .. } => error,
            other => panic!("{other}"),
        }
    }

    #[test]
    fn a_file_with_the_least_has_the_rest_by_default() {
        let config = parse(GOOD).unwrap();
        assert_eq!(
            (config.name.as_str(), config.control.as_slice()),
            ("agg0", &["10.0.0.1:7000".to_owned()][..])
        );
        assert_eq!((config.mtu, config.unit_bytes()), (1500, 1392));
        assert!(POOLS.contains(&config.pool), "{config:?}");
        assert_eq!(u64::from(config.units()), config.pool / 1472);
        assert_eq!(parse(&format!("{GOOD}pool = \"1MiB\"\n")).unwrap().units(), 712);
        let upwards = parse(&format!("{GOOD}patience = \"50ms\"\nagain = \"1ms\"\n")).unwrap().parent;
        assert_eq!((config.parent, upwards.timeout), (PARENT, Duration::from_millis(50)));
        let jumbo = parse(&format!("{GOOD}mtu = 9000\n")).unwrap();
        assert_eq!(jumbo.unit_bytes(), MAX_PAYLOAD);
        let v6 = parse(&GOOD.replace("10.1.0.9:7400", "[fd00::9]:7400")).unwrap();
        assert_eq!(v6.unit_bytes(), 1368, "a frame carries a unit with its headers");
    }

    #[test]
    fn what_makes_no_sense_is_refused_and_named() {
        type Is = fn(&ValueError) -> bool;
        let cases: [(&str, Is); 5] = [
            ("mtu = 100", |error| matches!(error, ValueError::Mtu { .. })),
            ("pool = \"1KiB\"", |error| matches!(error, ValueError::Pool { .. })),
            ("[verbs]\nmtu = 1000", |error| {
                matches!(error, ValueError::Rdma(RdmaError::Mtu { table: "verbs", mtu: 1000 }))
            }),
            ("again = \"1us\"", |error| matches!(error, ValueError::ParentTimes)),
            ("patience = \"1ms\"", |error| matches!(error, ValueError::ParentTimes)),
        ];
        for (change, expected) in cases {
            let error = value(&format!("{GOOD}{change}\n"));
            assert!(expected(&error), "{error}");
        }
        let error = value(&GOOD.replace("10.1.0.9", "0.0.0.0"));
        assert_eq!(
            error.to_string(),
            "`listen` is 0.0.0.0:7400, where no worker can send to; give this machine's fabric address"
        );
        for (text, expected) in [
            (&*format!("{GOOD}slots = 7\n"), "line 5, column 1: unknown field `slots`"),
            ("", "missing field `name`"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_reload_takes_what_may_change_and_nothing_of_the_rest() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("aggregator.toml");
        let good =
            "name = \"agg0\"\ncontrol = \"10.0.0.1:7000\"\ntls = \"tls\"\nlisten = \"10.1.0.9:7400\"\n";
        let quick = format!("{good}patience = \"50ms\"\n");
        std::fs::write(&path, good).unwrap();
        let mut config = AggregatorConfig::read(&path).unwrap();
        let mut reload = |text: &str, expected: fn(&Result<(), ConfigError>) -> bool| {
            std::fs::write(&path, text).unwrap();
            let outcome = config.reload();
            assert!(expected(&outcome), "{outcome:?}");
            config.parent.timeout
        };
        let certificate = |outcome: &Result<(), ConfigError>| {
            matches!(outcome, Err(ConfigError::Value { error: ValueError::Certificate(_), .. }))
        };
        assert_eq!(reload(&quick, certificate), PARENT.timeout);
        let issued = harmonaize_identity::Authority::create().unwrap();
        let issued = issued.issue("agg0", harmonaize_identity::Use::Session).unwrap();
        issued.write(&harmonaize_identity::Folder(folder.path().join("tls"))).unwrap();
        assert_eq!(reload(&quick, Result::is_ok), Duration::from_millis(50));
        let unchangeable = |outcome: &Result<(), ConfigError>| {
            matches!(outcome, Err(ConfigError::Value { error: ValueError::Unchangeable, .. }))
        };
        assert_eq!(reload(&format!("{good}mtu = 9000\n"), unchangeable), Duration::from_millis(50));
        let text = |outcome: &Result<(), ConfigError>| matches!(outcome, Err(ConfigError::Text { .. }));
        assert_eq!(reload("name = 7", text), Duration::from_millis(50));
        assert_eq!(reload(good, Result::is_ok), PARENT.timeout);
    }

    #[test]
    fn sizes_of_caches_are_read_as_the_kernel_writes_them() {
        assert_eq!(
            ["48K", "2M", "512", "x", "9G"].map(cache_bytes),
            [Some(48 << 10), Some(2 << 20), Some(512), None, None]
        );
    }
}
