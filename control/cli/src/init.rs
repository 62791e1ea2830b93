//! `harmonaize init`: certificates for a deployment that has no authority of its own.

use crate::Failure;
use harmonaize_identity::{Authority, CONTROL, ETCD, Folder, Use, write_file};
use harmonaize_planner::Topology;
use std::fs::Permissions;
use std::net::IpAddr;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

/// Where a machine with the package has its certificates, and control its topology.
pub(crate) const FOLDER: &str = "/etc/harmonaize/tls";
const TOPOLOGY: &str = "/etc/harmonaize/topology.toml";
/// The operator of a deployment that names none.
const ADMIN: &str = "admin";

pub(crate) const HELP: &str = "\
Examples:
  harmonaize init                                       for the topology in /etc/harmonaize, into /etc/harmonaize/tls
  harmonaize init tls --topology topology.toml --operator alice
  harmonaize init tls --topology topology.toml          again: for hosts that are new, nothing else changes
  harmonaize init tls --topology topology.toml --renew  new certificates for all, by the same authority
  harmonaize init tls --topology topology.toml --etcd 10.0.0.1 --etcd 10.0.0.2 --etcd 10.0.0.3

It makes:
  tls/authority/       the authority; keep its key where no host can read it
  tls/control/         for control.toml: tls = \"tls/control\"
  tls/hosts/NAME/      for the agent or aggregator of that name in the topology
  tls/etcd/ADDRESS/    for the member of etcd there
  tls/operators/NAME/  for who uses this program: --tls tls/operators/NAME, or HARMONAIZE_TLS
Certificates are good for a year. Control and agents read new ones by themselves, while operations run.";

pub(crate) const REVOKE_HELP: &str = "\
Examples:
  harmonaize revoke tls --operator alice            whose key is lost
  harmonaize revoke tls --host h3 --host h4         hosts that are gone
  harmonaize revoke tls --certificate old/tls.crt   one that was renewed meanwhile

  harmonaize revoke tls --certificate tls/control/tls.crt
                                                    control's own, which was stolen

It adds certificates to tls/authority/ca.crl, and copies that list into each folder of tls. Control reads it within a second
where tls/control is its `tls` folder: nobody connects with a certificate on it, and connections made with it end. Copy the file
to each machine with a control. Where control's own is on it, copy it to agents, aggregators and operators too: they connect with
no control that has such a certificate.";

/// What `harmonaize revoke` takes.
#[derive(clap::Args)]
#[command(group(clap::ArgGroup::new("whose").required(true).multiple(true)))]
pub(crate) struct Revoke {
    /// What `harmonaize init` made
    folder: PathBuf,
    /// An operator whose certificate is good no longer; may be given several times
    #[arg(long, value_name = "NAME", group = "whose")]
    operator: Vec<String>,
    /// A host or aggregator whose certificate is good no longer; may be given several times
    #[arg(long, value_name = "NAME", group = "whose")]
    host: Vec<String>,
    /// A certificate that is good no longer; may be given several times
    #[arg(long, value_name = "FILE", group = "whose")]
    certificate: Vec<PathBuf>,
}

impl Revoke {
    pub(crate) fn run(&self) -> Result<String, Failure> {
        let refused = |error: harmonaize_identity::Error| Failure::Refused(error.to_string());
        let of = |kind: &str, name: &String| Folder(self.folder.join(kind).join(name)).certificate();
        let operators = self.operator.iter().map(|name| of("operators", name));
        let hosts = self.host.iter().map(|name| of("hosts", name));
        let certificates: Vec<PathBuf> =
            operators.chain(hosts).chain(self.certificate.iter().cloned()).collect();
        let folder = self.folder.join("authority");
        let list = Folder(folder.clone()).revoked();
        let authority = Authority::open(&folder).map_err(refused)?;
        let count = authority.revoke(&list, &certificates).map_err(refused)?;
        let text = std::fs::read(&list).map_err(|error| Failure::Refused(error.to_string()))?;
        let of = if count == 1 { "certificate is" } else { "certificates are" };
        let mut said = format!("{}: {count} {of} revoked\n", list.display());
        for folder in self.folders() {
            let copy = folder.revoked();
            write_file(&copy, &text, 0o644).map_err(refused)?;
            said += &format!("{}: the same\n", copy.display());
        }
        Ok(said)
    }

    /// The folders with certificates that `harmonaize init` made.
    fn folders(&self) -> Vec<Folder> {
        let mut folders = vec![Folder(self.folder.join("control"))];
        for kind in ["hosts", "operators"] {
            let entries = std::fs::read_dir(self.folder.join(kind)).into_iter().flatten().flatten();
            let mut found: Vec<Folder> = entries.map(|entry| Folder(entry.path())).collect();
            found.retain(|folder| folder.authorities().is_file());
            found.sort_by(|one, other| one.0.cmp(&other.0));
            folders.append(&mut found);
        }
        folders
    }
}

/// What `harmonaize init` takes.
#[derive(clap::Args)]
pub(crate) struct Init {
    /// Where to put everything; made if need be.
    #[arg(default_value = FOLDER)]
    folder: PathBuf,
    /// Control's topology, whose hosts and aggregators get certificates.
    #[arg(long, value_name = "FILE", default_value = TOPOLOGY)]
    topology: PathBuf,
    /// An operator who gets one; may be given several times. `admin` where nobody is named and nobody has one.
    #[arg(long, value_name = "NAME")]
    operator: Vec<String>,
    /// The address of a member of etcd, which gets one; may be given several times.
    #[arg(long, value_name = "ADDRESS")]
    etcd: Vec<IpAddr>,
    /// Replace certificates that are there.
    #[arg(long)]
    renew: bool,
}

impl Init {
    pub(crate) fn run(&self) -> Result<String, Failure> {
        let refused = |error: String| Failure::Refused(error);
        let path = self.topology.display();
        let text = std::fs::read_to_string(&self.topology)
            .map_err(|error| Failure::Usage(format!("{path}: {error}")))?;
        let topology = Topology::parse(&text).map_err(|error| Failure::Usage(format!("{path}: {error}")))?;
        let hosts = topology.hosts().iter().map(|host| host.name.as_str());
        let machines: Vec<&str> =
            hosts.chain(topology.aggregators().iter().map(|aggregator| aggregator.name.as_str())).collect();
        let mut operators: Vec<&str> = self.operator.iter().map(String::as_str).collect();
        if operators.is_empty() && !self.folder.join("operators").exists() {
            operators.push(ADMIN);
        }
        for operator in &operators {
            if machines.contains(operator) {
                let message =
                    format!("`{operator}` cannot be an operator's name: a host or an aggregator has it");
                return Err(Failure::Usage(message));
            }
        }
        let folder = self.folder.join("authority");
        let authority = if folder.exists() {
            Authority::open(&folder).map_err(|error| refused(error.to_string()))?
        } else {
            let made = Authority::create().and_then(|made| made.save(&folder).map(|()| made));
            made.map_err(|error| refused(error.to_string()))?
        };
        let control = [(CONTROL, Use::Control, self.folder.join("control"))];
        let at = |kind: &str, name: &str| self.folder.join(kind).join(name);
        let machines = machines.iter().map(|name| (*name, Use::Session, at("hosts", name)));
        let operators = operators.iter().map(|name| (*name, Use::Session, at("operators", name)));
        let etcd =
            self.etcd.iter().map(|address| (ETCD, Use::Etcd(*address), at("etcd", &address.to_string())));
        let daemons = ["control", "hosts"].map(|kind| self.folder.join(kind));
        let mut said = String::new();
        for (name, purpose, folder) in control.into_iter().chain(machines).chain(operators).chain(etcd) {
            // Made first: it says what is wrong with a name before that is part of a path.
            let issued = authority.issue(name, purpose).map_err(|error| Failure::Usage(error.to_string()))?;
            if folder.exists() && !self.renew {
                said += &format!("{}: there already\n", folder.display());
                continue;
            }
            let folder = Folder(folder);
            issued.write(&folder).map_err(|error| refused(error.to_string()))?;
            if daemons.iter().any(|kind| folder.0.starts_with(kind)) {
                let shared = share(&folder, &self.folder);
                shared.map_err(|error| refused(format!("{}: {error}", folder.0.display())))?;
            }
            said += &format!("{}: made\n", folder.0.display());
        }
        Ok(said)
    }
}

/// Lets the group of the folder with everything read a daemon's files, where root has made them. The package gives that folder to
/// the group of its daemons.
fn share(made: &Folder, everything: &Path) -> std::io::Result<()> {
    let group = std::fs::metadata(everything)?.gid();
    if group == 0 || !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    for path in [made.0.clone(), made.authorities(), made.certificate(), made.key()] {
        chown(path, None, Some(group))?;
    }
    std::fs::set_permissions(made.key(), Permissions::from_mode(0o640))
}

/// The folder with an operator's certificate: this one, or where `harmonaize init` made it, that of `admin`.
pub(crate) fn operator_in(folder: &Path) -> PathBuf {
    let admin = folder.join("operators").join(ADMIN);
    let made_here = !Folder(folder.to_owned()).certificate().exists() && admin.is_dir();
    if made_here { admin } else { folder.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operators_certificate_is_found_where_init_made_it() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(operator_in(folder.path()), folder.path());
        std::fs::create_dir_all(folder.path().join("operators/admin")).unwrap();
        assert_eq!(operator_in(folder.path()), folder.path().join("operators/admin"));
        std::fs::write(folder.path().join("tls.crt"), "").unwrap();
        assert_eq!(operator_in(folder.path()), folder.path());
    }
}
