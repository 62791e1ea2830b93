//! The agent's configuration file.

mod control_tenants;
mod engine;
mod error;
mod links;
mod quota;
mod rdma;
mod telemetry;
mod tenant;
#[cfg(test)]
mod tests;

pub use control_tenants::ControlTenants;
pub use error::{ConfigError, ValueError};
pub use links::Links;
pub use quota::QuotaError;
pub(crate) use rdma::SourceError;
pub use rdma::{Rdma, RdmaError, Verbs};
pub(crate) use telemetry::check_name;
pub use telemetry::{Telemetry, TelemetryError};
pub(crate) use tenant::HANDSHAKE;
pub use tenant::{SecretError, TenantError};

use crate::sandbox::Sandbox;
use crate::session::TenantRules;
use harmonaize_identity::Protection;
use harmonaize_units::{Nanos, parse_toml, unchanged_but};
use serde::Deserialize;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tonic::transport::Endpoint;

/// The least `peer_timeout`: a busy host is silent for longer than it should be now and then.
const LEAST_PEER_TIMEOUT: Duration = Duration::from_secs(1);

/// Where metrics are by default: on loopback alone.
const METRICS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9477);

/// What the operator decided for this host.
#[derive(Clone, Debug)]
pub struct Config {
    /// This host's name in control's topology.
    pub host: String,
    /// Where each control listens, "host:port": one, or several of which one leads.
    pub control: Vec<String>,
    /// How the session with control is protected.
    pub protection: Protection,
    /// Where other agents connect; the address also leaves in the introduction.
    pub listen: SocketAddr,
    /// How long the poll loop looks for work before it sleeps.
    pub spin: Duration,
    /// How many threads serve attachments and links, each with the tenants that are placed on it.
    pub engine_threads: usize,
    /// Whether each of them has a sender beside it, which writes what large operations send over TCP.
    pub engine_senders: bool,
    /// How long a peer may be silent before its communicators end.
    pub peer_timeout: Duration,
    /// How long the links of a communicator may take to come up.
    pub connect_timeout: Duration,
    /// How links to other agents go over TCP.
    pub links: Links,
    /// TCP congestion control by name, else the system's.
    pub congestion: Option<String>,
    /// Links to other agents go over RDMA; none: over TCP. All agents of a communicator must do the same.
    pub verbs: Option<Verbs>,
    /// Tenants may attach over RDMA; none: nobody can.
    pub rdma: Option<Rdma>,
    /// Where Prometheus reads metrics over HTTP.
    pub metrics: SocketAddr,
    /// This host's traffic is measured; none: it is not.
    pub telemetry: Option<Telemetry>,
    /// Tenants, and where they come in.
    pub tenants: Vec<TenantRules>,
    /// The socket where a successor asks for this agent's place; none: it cannot.
    pub handover: Option<PathBuf>,
    /// Within which bounds control may have more tenants served; none: it may not.
    pub control_tenants: Option<ControlTenants>,
    /// What the process gives up at its start.
    pub sandbox: Sandbox,
    /// Where all this was read, to be read again; none: it never is.
    pub source: Option<Source>,
}

/// Keys that may change while the agent runs.
const CHANGEABLE: [&str; 2] = ["tenant", "control_tenants"];

/// Where a configuration was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The file.
    pub path: PathBuf,
    /// What it said.
    pub text: String,
    /// It, and the files with secrets that it names.
    pub files: Vec<PathBuf>,
}

impl Source {
    /// Reads the configuration again.
    ///
    /// # Errors
    /// As of [`Config::read`]; and where a key has changed that cannot change at run time, with its line.
    pub fn read_again(&self) -> Result<Config, ConfigError> {
        let config = Config::read(&self.path)?;
        let text = config.source.as_ref().map_or("", |source| &source.text);
        unchanged_but(&CHANGEABLE, &self.text, text)
            .map_err(|error| ConfigError::Text { path: self.path.clone(), error })?;
        Ok(config)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    host: String,
    control: Controls,
    tls: Option<PathBuf>,
    #[serde(default)]
    insecure_loopback: bool,
    listen: SocketAddr,
    spin: Option<Nanos>,
    #[serde(default)]
    engine: engine::FileEngine,
    #[serde(default)]
    links: links::FileLinks,
    peer_timeout: Option<Nanos>,
    connect_timeout: Option<Nanos>,
    congestion: Option<String>,
    handover: Option<PathBuf>,
    verbs: Option<Verbs>,
    rdma: Option<Rdma>,
    metrics: Option<SocketAddr>,
    telemetry: Option<telemetry::FileTelemetry>,
    #[serde(default)]
    tenant: Vec<tenant::FileTenant>,
    control_tenants: Option<control_tenants::FileControlTenants>,
    #[serde(default)]
    sandbox: Sandbox,
}

impl Config {
    /// Reads a file.
    ///
    /// # Errors
    /// If it cannot be read, a key is unknown or missing, or a value is none of its kind; with the line.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Self::parse(path, &text)
    }

    /// Reads a configuration's text, of the file at this path.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let file: File =
            parse_toml(text).map_err(|error| ConfigError::Text { path: path.to_owned(), error })?;
        let value = |error: ValueError| ConfigError::Value { path: path.to_owned(), error };
        if file.listen.ip().is_unspecified() {
            return Err(value(ValueError::AgentListensAnywhere(file.listen)));
        }
        let or =
            |value: Option<Nanos>, otherwise| value.map_or(otherwise, |nanos| Duration::from_nanos(nanos.0));
        let peer_timeout = or(file.peer_timeout, Duration::from_secs(5));
        if peer_timeout < LEAST_PEER_TIMEOUT {
            let (timeout, least) = (peer_timeout, LEAST_PEER_TIMEOUT);
            return Err(value(ValueError::PeerTimeout { timeout, least }));
        }
        let connect_timeout = or(file.connect_timeout, Duration::from_secs(10));
        if connect_timeout.is_zero() {
            return Err(value(ValueError::ConnectTimeout));
        }
        let (control, protection) =
            control_session(path, file.control, file.tls, file.insecure_loopback).map_err(value)?;
        file.verbs.iter().try_for_each(Verbs::check).map_err(|error| value(error.into()))?;
        file.rdma.iter().try_for_each(Rdma::check).map_err(|error| value(error.into()))?;
        let engine_threads = file.engine.threads().map_err(value)?;
        let telemetry = file.telemetry.map(telemetry::FileTelemetry::check).transpose();
        let telemetry = telemetry.map_err(|error| value(error.into()))?;
        let folder = path.parent().unwrap_or(Path::new("."));
        let secrets = file.tenant.iter().filter_map(|tenant| tenant.secret_file(folder));
        let files = std::iter::once(path.to_owned()).chain(secrets).collect();
        let source = Source { path: path.to_owned(), text: text.to_owned(), files };
        let tenants = tenant::read_all(file.tenant, file.rdma.as_ref(), folder)
            .map_err(|(name, error)| value(ValueError::Tenant { name, error }))?;
        let control_tenants =
            file.control_tenants.map(|table| table.check(folder)).transpose().map_err(value)?;
        Ok(Self {
            host: file.host,
            control,
            protection,
            listen: file.listen,
            spin: or(file.spin, Duration::from_micros(50)),
            engine_threads,
            engine_senders: file.engine.senders(engine_threads),
            peer_timeout,
            connect_timeout,
            links: file.links.links(),
            congestion: file.congestion,
            verbs: file.verbs,
            rdma: file.rdma,
            metrics: file.metrics.unwrap_or(METRICS),
            telemetry,
            tenants,
            handover: file.handover,
            control_tenants,
            sandbox: file.sandbox.beside(path),
            source: Some(source),
        })
    }
}

/// One address, or a list.
#[derive(Deserialize)]
#[serde(untagged)]
pub(crate) enum Controls {
    One(String),
    Several(Vec<String>),
}

/// Where each control listens, "host:port", and how sessions with them are protected, from keys of the configuration at `path`.
pub(crate) fn control_session(
    path: &Path,
    control: Controls,
    tls: Option<PathBuf>,
    insecure_loopback: bool,
) -> Result<(Vec<String>, Protection), ValueError> {
    let addresses = match control {
        Controls::One(address) => vec![address],
        Controls::Several(addresses) => addresses,
    };
    let tls = tls.map(|folder| path.parent().unwrap_or(Path::new(".")).join(folder));
    let mut chosen = None;
    for address in &addresses {
        let complete = address.rsplit_once(':').is_some_and(|(host, port)| {
            !host.is_empty() && !host.contains('/') && port.parse::<u16>().is_ok_and(|port| port > 0)
        });
        if !complete || Endpoint::from_shared(format!("http://{address}")).is_err() {
            return Err(ValueError::ControlAddress(address.clone()));
        }
        chosen = Some(Protection::choose(tls.clone(), insecure_loopback, address)?);
    }
    let protection = chosen.ok_or(ValueError::NoControl)?;
    Ok((addresses, protection))
}
