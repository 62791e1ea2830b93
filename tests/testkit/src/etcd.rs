//! Members of etcd, which is Debian's: one alone on the loopback, or several with certificates.

use crate::job::printed;
use crate::namespace::Namespace;
use crate::packages::{self, ETCD};
use crate::process::Process;
use crate::strict;
use crate::workspace;
use anyhow::Result;
use harmonaize_identity::Folder;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// How long a member that is alone may take to listen.
const READY: Duration = Duration::from_secs(20);

/// Whether etcd is installed; says that the calling test is skipped where it is not.
///
/// # Panics
/// Where it is not, and nothing may be skipped.
pub fn is_installed() -> bool {
    let missing = packages::missing(ETCD);
    if !missing.is_empty() {
        strict::skip_test(format!("it needs Debian's package {}", missing.join(", ")));
    }
    missing.is_empty()
}

/// One member.
#[derive(Debug, Clone)]
pub struct Member {
    /// Its name among them.
    pub name: String,
    /// Where its clients connect.
    pub clients: SocketAddr,
    /// Where the other members do.
    pub peers: SocketAddr,
    /// Its data and log.
    pub folder: PathBuf,
    /// Its certificate; nothing is protected where it has none.
    pub tls: Option<Folder>,
}

impl Member {
    /// A member that will be alone, at ports of the loopback that are free.
    pub fn alone(folder: &Path) -> Result<Self> {
        let here = (Ipv4Addr::LOCALHOST, 0);
        let (first, second) = (TcpListener::bind(here)?, TcpListener::bind(here)?);
        let (clients, peers) = (first.local_addr()?, second.local_addr()?);
        Ok(Self { name: "alone".to_owned(), clients, peers, folder: folder.to_owned(), tls: None })
    }

    /// Starts it, on the data that it has; `all` are the members, this one among them. It is in a namespace, or here.
    pub fn start(&self, all: &[Self], namespace: Option<&Namespace>) -> Result<Process> {
        let url = |address| self.url(address);
        std::fs::create_dir_all(&self.folder)?;
        let mut command = Command::new("etcd");
        command.arg("--data-dir").arg(self.folder.join("data"));
        for (key, value) in [
            ("name", self.name.clone()),
            ("listen-client-urls", url(self.clients)),
            ("advertise-client-urls", url(self.clients)),
            ("listen-peer-urls", url(self.peers)),
            ("initial-advertise-peer-urls", url(self.peers)),
            ("initial-cluster", Self::cluster(all)),
            ("auto-compaction-mode", "revision".to_owned()),
            ("auto-compaction-retention", "1000".to_owned()),
            ("logger", "zap".to_owned()),
            ("log-level", "warn".to_owned()),
        ] {
            command.arg(format!("--{key}={value}"));
        }
        if let Some(tls) = &self.tls {
            for (prefix, allowed) in
                [("", "client-cert-allowed-hostname=control"), ("peer-", "peer-cert-allowed-hostname=etcd")]
            {
                command.arg(format!("--{allowed}")).arg(format!("--{prefix}client-cert-auth"));
                let files =
                    [("cert", tls.certificate()), ("key", tls.key()), ("trusted-ca", tls.authorities())];
                for (what, file) in files {
                    command.arg(format!("--{prefix}{what}-file={}", file.display()));
                }
            }
        }
        let log = self.folder.join("log");
        match namespace {
            Some(namespace) => Process::start(&self.name, &mut command, namespace, &log),
            None => Process::start_here(&self.name, &mut command, &log),
        }
    }

    /// Starts a member that is alone, and waits until it listens.
    pub fn start_alone(&self) -> Result<Process> {
        let mut process = self.start(std::slice::from_ref(self), None)?;
        let deadline = Instant::now() + READY;
        while TcpStream::connect(self.clients).is_err() {
            let ended = process.status()?;
            anyhow::ensure!(
                ended.is_none() && Instant::now() < deadline,
                "etcd does not listen; its last lines:\n{}",
                process.log_tail(4096)
            );
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(process)
    }

    fn url(&self, address: SocketAddr) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://{address}")
    }

    fn cluster(all: &[Self]) -> String {
        let member = |member: &Self| format!("{}={}", member.name, member.url(member.peers));
        all.iter().map(member).collect::<Vec<_>>().join(",")
    }

    /// Makes the data of a member that does not run from a snapshot of `etcdctl snapshot save`. All `all` are made of the same.
    ///
    /// What it had is removed. The folder of its data stays, which may be a disk of its own.
    ///
    /// # Errors
    /// If the snapshot is none, or the disk is full.
    pub fn restore(&self, all: &[Self], snapshot: &Path) -> Result<()> {
        let (data, made) = (self.folder.join("data"), self.folder.join("restored"));
        let mut command = Command::new("etcdctl");
        command.env("ETCDCTL_API", "3").args(["snapshot", "restore"]).arg(snapshot);
        command.arg("--data-dir").arg(&made).arg(format!("--name={}", self.name));
        command.arg(format!("--initial-cluster={}", Self::cluster(all)));
        command.arg(format!("--initial-advertise-peer-urls={}", self.url(self.peers)));
        printed(&mut command)?;
        for old in std::fs::read_dir(&data)? {
            std::fs::remove_dir_all(old?.path())?;
        }
        workspace::run(Command::new("cp").arg("-a").arg(made.join("member")).arg(&data))?;
        Ok(std::fs::remove_dir_all(made)?)
    }

    /// Runs `etcdctl`'s command on this member, and returns what it printed. Where the member has a certificate, `client` is that of
    /// who asks.
    ///
    /// # Errors
    /// If the command fails; the error is what it printed.
    pub fn etcdctl(&self, client: Option<&Folder>, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new("etcdctl");
        command.env("ETCDCTL_API", "3").arg(format!("--endpoints={}", self.url(self.clients)));
        if let Some(tls) = client {
            let files = [("cert", tls.certificate()), ("key", tls.key()), ("cacert", tls.authorities())];
            for (what, file) in files {
                command.arg(format!("--{what}={}", file.display()));
            }
        }
        printed(command.args(arguments))
    }
}
