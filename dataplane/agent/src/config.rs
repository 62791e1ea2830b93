//! The agent's configuration file.

use crate::session::{Quota, TenantSocket};
use harmonaize_planner::{Bytes, Nanos, TextError, parse_toml};
use serde::Deserialize;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What the operator decided for this host.
#[derive(Clone, Debug)]
pub struct Config {
    /// This host's name in control's topology.
    pub host: String,
    /// Where control listens, "host:port".
    pub control: String,
    /// Where other agents connect; the address also leaves in the introduction.
    pub listen: SocketAddr,
    /// How long the poll loop looks for work before it sleeps.
    pub spin: Duration,
    /// How long a peer may be silent before its communicators end.
    pub peer_timeout: Duration,
    /// How long the links of a communicator may take to come up.
    pub connect_timeout: Duration,
    /// TCP congestion control by name, else the system's.
    pub congestion: Option<String>,
    /// Links to other agents go over RDMA; none: over TCP. All agents of a communicator must do the same.
    pub verbs: Option<Verbs>,
    /// Tenants and their sockets.
    pub tenants: Vec<TenantSocket>,
}

/// How links go over RDMA. What is left out is found out, or as usual.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Verbs {
    /// Devices, "mlx5_0" or with their port "mlx5_0:1"; none: the one that has the address of `listen`.
    pub devices: Vec<String>,
    /// Entry of the ports' GID tables.
    pub gid_index: Option<u8>,
    /// Most bytes per packet: 256, 512, 1024, 2048 or 4096.
    pub mtu: Option<usize>,
    /// DSCP and ECN bits of packets.
    pub traffic_class: Option<u8>,
    /// How often a device repeats a request that is not answered, at most 6.
    pub retries: Option<u8>,
    /// How long it waits for the answer: 4.096 us times two to this power, 1 to 31.
    pub timeout: Option<u8>,
}

/// What is wrong with a configuration file.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// It cannot be read.
    #[error("{path}: {source}", path = path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A key or value is wrong; says the line.
    #[error("{path}: {error}", path = path.display())]
    Text {
        /// Which.
        path: PathBuf,
        /// Where and what.
        error: TextError,
    },
    /// A value that is of its kind but makes no sense.
    #[error("{path}: {message}", path = path.display())]
    Value {
        /// Which.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    host: String,
    control: String,
    listen: SocketAddr,
    spin: Option<Nanos>,
    peer_timeout: Option<Nanos>,
    connect_timeout: Option<Nanos>,
    congestion: Option<String>,
    verbs: Option<Verbs>,
    #[serde(default)]
    tenant: Vec<FileTenant>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileTenant {
    name: String,
    socket: PathBuf,
    uids: Vec<u32>,
    #[serde(default)]
    remote: bool,
    arena: Option<Bytes>,
    attachments: Option<u32>,
    communicators: Option<u32>,
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

    fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let file: File =
            parse_toml(text).map_err(|error| ConfigError::Text { path: path.to_owned(), error })?;
        let value = |message: String| ConfigError::Value { path: path.to_owned(), message };
        if file.listen.ip().is_unspecified() {
            return Err(value(format!(
                "`listen` is {}, which other agents cannot connect to; give this host's fabric address",
                file.listen
            )));
        }
        let verbs = file.verbs.as_ref();
        if let Some(retries) = verbs.and_then(|verbs| verbs.retries).filter(|retries| *retries > 6) {
            return Err(value(format!(
                "`retries` of [verbs] is {retries}; at most 6 (7 would mean for ever)"
            )));
        }
        if let Some(timeout) =
            verbs.and_then(|verbs| verbs.timeout).filter(|timeout| !(1..=31).contains(timeout))
        {
            return Err(value(format!("`timeout` of [verbs] is {timeout}; 1 to 31 (0 would mean for ever)")));
        }
        for (index, tenant) in file.tenant.iter().enumerate() {
            if file.tenant.iter().take(index).any(|t| t.name == tenant.name || t.socket == tenant.socket) {
                return Err(value(format!("tenant `{}`: name or socket is there twice", tenant.name)));
            }
            if tenant.uids.is_empty() {
                return Err(value(format!("tenant `{}`: `uids` is empty, nobody could attach", tenant.name)));
            }
        }
        let or =
            |value: Option<Nanos>, otherwise| value.map_or(otherwise, |nanos| Duration::from_nanos(nanos.0));
        Ok(Self {
            host: file.host,
            control: file.control.trim_start_matches("http://").to_owned(),
            listen: file.listen,
            spin: or(file.spin, Duration::from_micros(50)),
            peer_timeout: or(file.peer_timeout, Duration::from_secs(5)),
            connect_timeout: or(file.connect_timeout, Duration::from_secs(10)),
            congestion: file.congestion,
            verbs: file.verbs,
            tenants: file.tenant.into_iter().map(FileTenant::socket).collect(),
        })
    }
}

impl FileTenant {
    fn socket(self) -> TenantSocket {
        let usual = Quota::default();
        TenantSocket {
            tenant: self.name,
            path: self.socket,
            uids: self.uids,
            quota: Quota {
                attachments: self.attachments.unwrap_or(usual.attachments),
                arena_bytes: self.arena.map_or(usual.arena_bytes, |bytes| bytes.0),
                communicators: self.communicators.unwrap_or(usual.communicators),
                ..usual
            },
            remote: self.remote,
            handshake: Duration::from_secs(5),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "host = \"h0\"\ncontrol = \"127.0.0.1:7000\"\nlisten = \"127.0.0.1:0\"\n";

    fn error(text: &str) -> String {
        Config::parse(Path::new("agent.toml"), text).unwrap_err().to_string()
    }

    #[test]
    fn defaults_and_units() {
        let tenant =
            "[[tenant]]\nname = \"a\"\nsocket = \"/run/a.sock\"\nuids = [1000]\narena = \"256MiB\"\n";
        let text = format!("{GOOD}spin = \"20us\"\n{tenant}");
        let config = Config::parse(Path::new("agent.toml"), &text).unwrap();
        assert_eq!(config.spin, Duration::from_micros(20));
        assert_eq!(config.peer_timeout, Duration::from_secs(5));
        assert_eq!(config.tenants[0].quota.arena_bytes, 256 << 20);
    }

    #[test]
    fn a_table_asks_for_rdma() {
        let parse = |text: &str| Config::parse(Path::new("agent.toml"), &format!("{GOOD}{text}"));
        assert_eq!(parse("").unwrap().verbs, None);
        assert_eq!(parse("[verbs]\n").unwrap().verbs, Some(Verbs::default()));
        let full = "[verbs]\ndevices = [\"mlx5_0:1\"]\ngid_index = 3\nmtu = 4096\ntraffic_class = 106\nretries = 6\n";
        let verbs = parse(full).unwrap().verbs.unwrap();
        assert_eq!((verbs.devices, verbs.gid_index), (vec!["mlx5_0:1".to_owned()], Some(3)));
        assert!(parse("[verbs]\nretries = 7\n").unwrap_err().to_string().contains("at most 6"));
        assert!(parse("[verbs]\ntimeout = 0\n").unwrap_err().to_string().contains("1 to 31"));
        assert!(parse("[verbs]\ngid = 7\n").unwrap_err().to_string().contains("line 5"));
    }

    #[test]
    fn errors_name_file_line_and_key() {
        let unknown = error(&format!("{GOOD}spinn = \"20us\"\n"));
        assert!(unknown.starts_with("agent.toml: line 4") && unknown.contains("spinn"), "{unknown}");
        let bad = error(&format!("{GOOD}spin = \"20\"\n"));
        assert!(bad.contains("line 4") && bad.contains("20"), "{bad}");
        let missing = error("host = \"h0\"\n");
        assert!(missing.contains("control"), "{missing}");
        let anywhere = error(&GOOD.replace("127.0.0.1:0", "0.0.0.0:7100"));
        assert!(anywhere.contains("listen"), "{anywhere}");
        let nobody = format!("{GOOD}[[tenant]]\nname = \"a\"\nsocket = \"/a\"\nuids = []\n");
        assert!(error(&nobody).contains("uids"), "{}", error(&nobody));
    }
}
