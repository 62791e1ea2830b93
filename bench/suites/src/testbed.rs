//! The hosts of a testbed, as a file describes them.

use super::launcher::Launcher;
use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

/// How a command gets to a host when the file does not say.
pub(crate) const SSH: &str = "ssh -o BatchMode=yes -o ConnectTimeout=5 {host}";
/// Where things stand on a host when the file does not say.
pub(crate) const FOLDER: &str = "/tmp/harmonaize-bench";
/// The first TCP port when the file does not say.
pub(crate) const PORTS: u16 = 18_500;
/// The rate of the links when the file does not say.
const RATE: &str = "100Gbit/s";

/// The file, read and found sound.
#[derive(Debug, Clone)]
pub struct Testbed {
    /// At least two.
    pub hosts: Vec<Host>,
    /// A folder on each host for programs, configurations and sockets.
    pub folder: PathBuf,
    /// Where the programs are installed on each host; none: they are copied into the folder.
    pub programs: Option<PathBuf>,
    /// The address at which the agents reach control, which runs on the first host.
    pub control: IpAddr,
    /// From here on TCP ports are free on all hosts.
    pub ports: u16,
    /// What control is told of the links: units as in its topology.
    pub rate: String,
    /// How packets are lost, and ports lost, on purpose; without it those rows are left out.
    pub faults: Option<Faults>,
}

/// A host with an RDMA device.
#[derive(Debug, Clone)]
pub struct Host {
    /// Its name in reports and in control's topology.
    pub name: String,
    /// How commands get there.
    pub launcher: Launcher,
    /// Its address on the fabric.
    pub address: IpAddr,
    /// The device that has it.
    pub device: String,
    /// The port of the device.
    pub port: u8,
    /// The entry of the port's GID table; none: the one for RoCEv2 with the address, which is looked for.
    pub gid_index: Option<u8>,
}

/// Shell commands that a host runs; `{index}` is its place in the file from 0, `{host}` its name.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Faults {
    /// From now on some packets to the host are lost.
    pub lossy: String,
    /// No more.
    pub lossless: String,
    /// The host's link is so slow that no processor is: for devices that are emulated. Without it those rows are left out.
    pub slow: Option<String>,
    /// No more.
    pub fast: Option<String>,
    /// The host's port goes down.
    pub down: String,
    /// And up again.
    pub up: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    launcher: Option<String>,
    folder: Option<PathBuf>,
    programs: Option<PathBuf>,
    control: Option<IpAddr>,
    ports: Option<u16>,
    rate: Option<String>,
    faults: Option<Faults>,
    #[serde(default)]
    host: Vec<FileHost>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileHost {
    name: String,
    ssh: Option<String>,
    launcher: Option<String>,
    address: IpAddr,
    device: String,
    gid_index: Option<u8>,
}

impl Testbed {
    /// Reads a file; an error names it and what is wrong.
    pub fn read(path: &Path) -> Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&text).with_context(|| format!("{} describes no testbed", path.display()))
    }

    fn parse(text: &str) -> Result<Self> {
        let file: File = toml::from_str(text)?;
        ensure!(file.host.len() >= 2, "{} hosts: a testbed has at least two `[[host]]`", file.host.len());
        ensure!(file.host.len() <= 64, "{} hosts are more than 64", file.host.len());
        let (mut names, mut addresses) = (BTreeSet::new(), BTreeSet::new());
        let mut hosts = Vec::new();
        for host in file.host {
            let Some(name) = Some(host.name.clone()).filter(|name| plain(name)) else {
                bail!("a host is named {:?}; a name is letters, digits, - and _", host.name);
            };
            ensure!(names.insert(name.clone()), "two hosts are named {name}");
            ensure!(addresses.insert(host.address), "two hosts have the address {}", host.address);
            hosts.push(host.read(file.launcher.as_deref()).with_context(|| format!("host {name}"))?);
        }
        let first = hosts.first().context("no host")?.address;
        let folder = file.folder.unwrap_or_else(|| FOLDER.into());
        ensure!(folder.is_absolute(), "`folder` is {}, which is no absolute path", folder.display());
        let ports = file.ports.unwrap_or(PORTS);
        ensure!((1024..=60_000).contains(&ports), "`ports` is {ports}; it must be from 1024 to 60000");
        Ok(Self {
            hosts,
            folder,
            programs: file.programs,
            control: file.control.unwrap_or(first),
            ports,
            rate: file.rate.unwrap_or_else(|| RATE.into()),
            faults: file.faults,
        })
    }
}

impl FileHost {
    fn read(self, launcher: Option<&str>) -> Result<Host> {
        if self.ssh.is_some() && self.launcher.is_some() {
            bail!("it has both `ssh` and `launcher`");
        }
        let target = self.ssh.as_deref().unwrap_or(&self.name);
        let template = match (&self.ssh, &self.launcher, launcher) {
            (Some(_), ..) => SSH,
            (None, Some(own), _) => own,
            (None, None, Some(all)) => all,
            (None, None, None) => SSH,
        };
        let (device, port) = match self.device.split_once(':') {
            None => (self.device.clone(), 1),
            Some((name, port)) => {
                let port = port
                    .parse()
                    .with_context(|| format!("`device` is {:?}, whose port is no number", self.device))?;
                (name.to_owned(), port)
            }
        };
        ensure!(plain(&device), "`device` is {device:?}; it is a name as mlx5_0");
        let launcher = Launcher::new(template, target)?;
        let Self { name, address, gid_index, .. } = self;
        Ok(Host { name, launcher, address, device, port, gid_index })
    }
}

/// Whether a name may stand in commands and paths as it is.
fn plain(name: &str) -> bool {
    let fine = |letter: char| letter.is_ascii_alphanumeric() || letter == '-' || letter == '_';
    !name.is_empty() && !name.starts_with('-') && name.chars().all(fine)
}

impl Faults {
    /// A command for the host at `index`.
    pub fn command(template: &str, index: usize, host: &str) -> String {
        template.replace("{index}", &index.to_string()).replace("{host}", host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &str = "[[host]]\nname = 'a'\naddress = '10.0.0.1'\ndevice = 'mlx5_0'\n\
                       [[host]]\nname = 'b'\nssh = 'root@far'\naddress = '10.0.0.2'\ndevice = 'mlx5_1:2'\ngid_index = 3\n";

    fn wrong(text: &str) -> String {
        format!("{:#}", Testbed::parse(text).unwrap_err())
    }

    #[test]
    fn what_is_left_out_is_as_usual() {
        let testbed = Testbed::parse(TWO).unwrap();
        let [a, b] = &testbed.hosts[..] else { panic!("{testbed:?}") };
        assert_eq!((a.device.as_str(), a.port, a.gid_index), ("mlx5_0", 1, None));
        assert_eq!((b.device.as_str(), b.port, b.gid_index), ("mlx5_1", 2, Some(3)));
        assert_eq!(testbed.control, a.address);
        assert!(testbed.programs.is_none() && testbed.faults.is_none());
    }

    #[test]
    fn what_is_wrong_is_named() {
        assert!(wrong("").contains("0 hosts"));
        assert!(wrong(&TWO.replace("'b'", "'a'")).contains("two hosts are named a"));
        assert!(wrong(&TWO.replace("10.0.0.2", "10.0.0.1")).contains("two hosts have the address 10.0.0.1"));
        assert!(wrong(&TWO.replace("'b'", "'b c'")).contains("b c"));
        assert!(wrong(&TWO.replace("mlx5_1:2", "mlx5_1:x")).contains("host b: `device`"));
        assert!(wrong(&format!("prots = 1\n{TWO}")).contains("prots"));
        assert!(wrong(&format!("ports = 80\n{TWO}")).contains("1024"));
        assert!(wrong(&TWO.replace("ssh =", "launcher = 'x'\nssh =")).contains("both"));
        assert!(
            wrong(&TWO.replace("'10.0.0.2'", "'far'")).contains("line 8"),
            "{}",
            wrong(&TWO.replace("'10.0.0.2'", "'far'"))
        );
    }

    #[test]
    fn faults_name_their_host() {
        assert_eq!(Faults::command("ip link set p{index} down # {host}", 3, "h"), "ip link set p3 down # h");
    }
}
