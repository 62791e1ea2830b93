//! Hosts of a testbed by their names. Their agents run already, and their programs are those of the installed package.

use super::launcher::{self, Launcher};
use super::peers::{self, Figure, PeerRun};
use super::perftest::End;
use super::testbed::{FOLDER, Host, SSH};
use anyhow::{Context, Result, bail, ensure};
use harmonaize_program::remote::is_host;
use harmonaize_testkit::workspace;
use serde_json::Value;
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The longest run of anything.
const LIMIT: Duration = Duration::from_secs(180);
/// The program that measures.
const PERF: &str = "harmonaize-perf";

/// Looks for what each host needs: `$1` the program, `$2` the agent's socket.
const CHECK: &str = r#"test -x "$1" || { echo "no program $1: install the package harmonaize there, or say --programs" >&2; exit 1; }
test -S "$2" || { echo "no socket $2: start the agent there, add the tenant, or say --agent" >&2; exit 1; }"#;

/// Prints the first active port that has a RoCEv2 GID with an IPv4 address. It prints the port's folder, the GID's
/// index, and the GID.
const FIND_DEVICE: &str = r#"for port in /sys/class/infiniband/*/ports/*; do
  read -r state 2>/dev/null <"$port/state" || continue
  case "$state" in *ACTIVE*) ;; *) continue;; esac
  for file in "$port"/gids/*; do
    read -r gid 2>/dev/null <"$file" || continue
    case "$gid" in 0000:0000:0000:0000:0000:ffff:*) ;; *) continue;; esac
    read -r kind 2>/dev/null <"$port/gid_attrs/types/${file##*/}" || continue
    case "$kind" in *v2*) echo "$port ${file##*/} $gid"; exit 0;; esac
  done
done
echo "no RDMA device with an active port and a RoCEv2 GID of an IPv4 address" >&2
exit 1"#;

/// Compiles the program of Open MPI's ranks from standard input into the folder `$1`. It prints mpirun's name, and whether it has
/// UCC.
const SET_UP: &str = r#"mkdir -m 700 -p "$1" && test -O "$1" && ! test -L "$1" || { echo "$1 is another user's" >&2; exit 1; }
cat >"$1/mpi.c" || exit 1
for end in .openmpi ''; do
  mpirun$end --version 2>/dev/null </dev/null | grep -q 'Open MPI' || continue
  command -v "mpicc$end" >/dev/null || continue
  "mpicc$end" -O2 -o "$1/mpi" "$1/mpi.c" || exit 1
  has=plain
  ompi_info 2>/dev/null </dev/null | grep -q 'MCA coll: ucc' && has=ucc
  echo "mpirun$end $has"
  exit 0
done
echo "no Open MPI with mpicc: install openmpi-bin, libopenmpi-dev and gcc there" >&2
exit 1"#;

/// The hosts, with the agents' socket and the programs' folder, which are the same on all.
#[derive(Debug)]
pub struct Hosts {
    names: Vec<String>,
    launchers: Vec<Launcher>,
    agent: String,
    programs: PathBuf,
}

/// Open MPI as all of the hosts have it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenMpi {
    /// The name of its `mpirun`.
    pub mpirun: String,
    /// Whether it has collectives by UCC.
    pub ucc: bool,
}

impl OpenMpi {
    /// What is shown of it where no host was asked.
    pub(crate) fn assumed() -> Self {
        Self { mpirun: "mpirun".to_owned(), ucc: true }
    }
}

/// The names in a value of `--hosts`; `None` where it is a file. A file has a slash, or ends in `.toml`.
pub fn names(value: &str) -> Option<Vec<&str>> {
    let file = value.contains('/') || value.ends_with(".toml");
    (!file).then(|| value.split(',').collect())
}

impl Hosts {
    /// From two to 64 names, each a name or an address that ssh takes, behind a user's name or not.
    ///
    /// # Errors
    /// Where there are fewer or more, two are the same, or one is none that ssh could be given.
    pub fn new(names: &[&str], agent: &Path, programs: &Path) -> Result<Self> {
        let all = names.join(",");
        ensure!(
            (2..=64).contains(&names.len()),
            "--hosts {all}: two to 64 names with commas between them, or a file, which ends in .toml or has a slash"
        );
        if let Some(bad) = names.iter().find(|name| !is_host(name)) {
            bail!("--hosts {all}: {bad:?} is no name or address of a host");
        }
        ensure!(
            names.iter().collect::<BTreeSet<_>>().len() == names.len(),
            "--hosts {all}: one is there twice"
        );
        let absolute = |path: &Path, option: &str| {
            let text = path.to_str().filter(|_| path.is_absolute());
            text.map(str::to_owned).with_context(|| format!("{option} {}: no absolute path", path.display()))
        };
        absolute(programs, "--programs")?;
        Ok(Self {
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            launchers: names.iter().map(|name| Launcher::new(SSH, name)).collect::<Result<_>>()?,
            agent: absolute(agent, "--agent")?,
            programs: programs.to_owned(),
        })
    }

    /// How many they are.
    pub fn count(&self) -> usize {
        self.names.len()
    }

    fn program(&self) -> String {
        self.programs.join(PERF).display().to_string()
    }

    /// What each of them needs, for a person to read.
    pub(crate) fn needs(&self) -> String {
        format!(
            "# On this machine and on each host: {}. On each host: the agent's socket {}.\n\
             # Open MPI takes part where each host has it with mpicc, which compiles bench/peers/mpi.c into {FOLDER}.\n",
            self.program(),
            self.agent
        )
    }

    /// Looks whether this machine and each of them has what is needed.
    pub(crate) fn check(&self) -> Result<()> {
        let program = self.program();
        let here = "harmonaize-perf starts its ranks by its own path";
        ensure!(
            Path::new(&program).exists(),
            "this machine has no {program}, and {here}: install the package here"
        );
        for (name, launcher) in self.names.iter().zip(&self.launchers) {
            launcher.shell(CHECK, &[&program, &self.agent], b"").with_context(|| format!("host {name}"))?;
        }
        Ok(())
    }

    /// The command of `harmonaize-perf` with a rank on each of the first `ranks` hosts.
    pub(crate) fn perf(&self, ranks: usize, collective: &str, arguments: &str) -> Vec<String> {
        let hosts = self.names.iter().take(ranks).map(String::as_str).collect::<Vec<_>>().join(",");
        let start = [self.program(), collective.to_owned(), "--hosts".to_owned(), hosts];
        let agent = ["--agent".to_owned(), self.agent.clone()];
        start.into_iter().chain(agent).chain(arguments.split_whitespace().map(str::to_owned)).collect()
    }

    /// Runs a command of [`Self::perf`] on this machine; what it printed.
    pub(crate) fn run_perf(&self, command: &[String]) -> Result<Vec<String>> {
        run(&Launcher::new("local", "")?, PERF, command)
    }

    /// The same with one size; what it tells of that out of place.
    pub(crate) fn measure(&self, command: &[String]) -> Result<Value> {
        let command = [command, &["--json".to_owned(), "-".to_owned()]].concat();
        figures_of(&self.run_perf(&command)?)
    }

    /// A command on a host as a person would type it here.
    pub(crate) fn shown_on(&self, host: usize, command: &[String]) -> String {
        let command: Vec<&str> = command.iter().map(String::as_str).collect();
        self.launchers.get(host).map_or_else(String::new, |launcher| launcher.shown_command(&command)) + "\n"
    }

    /// The hosts' RDMA devices as they say themselves, with perftest beside them.
    ///
    /// # Errors
    /// Where a host has none, or not all of perftest's programs.
    pub(crate) fn ends(&self) -> Result<Vec<End>> {
        let end = |(name, launcher): (&String, &Launcher)| {
            let found = launcher.shell(FIND_DEVICE, &[], b"").with_context(|| format!("host {name}"))?;
            let host = device(name, launcher, &found)
                .with_context(|| format!("host {name}: no device in {found:?}"))?;
            End::check(&host)
        };
        self.names.iter().zip(&self.launchers).map(end).collect()
    }

    /// What is shown of the devices where no host was asked.
    pub(crate) fn assumed_ends(&self) -> Vec<End> {
        let end = |((name, launcher), last): ((&String, &Launcher), u8)| {
            let address = IpAddr::V4(Ipv4Addr::new(192, 0, 2, last));
            let launcher = launcher.clone();
            End::assumed(Host {
                name: name.clone(),
                launcher,
                address,
                device: "DEVICE".to_owned(),
                port: 1,
                gid_index: Some(3),
            })
        };
        self.names.iter().zip(&self.launchers).zip(1..).map(end).collect()
    }

    /// Has the program of Open MPI's ranks compiled on each host.
    ///
    /// # Errors
    /// Where a host has no Open MPI with its compiler, or another's `mpirun` has another name.
    pub(crate) fn open_mpi(&self) -> Result<OpenMpi> {
        let path = workspace::root().join("bench/peers/mpi.c");
        let source = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let mut common: Option<OpenMpi> = None;
        for (name, launcher) in self.names.iter().zip(&self.launchers) {
            let said = launcher.shell(SET_UP, &[FOLDER], &source).with_context(|| format!("host {name}"))?;
            let own = open_mpi(&said).with_context(|| format!("host {name}: no mpirun in {said:?}"))?;
            let ucc = own.ucc && common.as_ref().is_none_or(|before| before.ucc);
            if let Some(before) = common.replace(OpenMpi { ucc, ..own.clone() }) {
                ensure!(
                    before.mpirun == own.mpirun,
                    "host {name} has {}, and those before it {}: all need the same",
                    own.mpirun,
                    before.mpirun
                );
            }
        }
        common.context("no host")
    }

    /// The command of Open MPI's ranks, one a host, for the first of them.
    pub(crate) fn mpi(&self, mpi: &OpenMpi, ucc: bool, of: &PeerRun<'_>) -> Vec<String> {
        let bare = |name: &String| name.rsplit('@').next().unwrap_or(name).to_owned();
        let hosts: Vec<String> = self.names.iter().map(bare).collect();
        peers::open_mpi(&mpi.mpirun, &hosts, ucc, &format!("{FOLDER}/mpi"), of)
    }

    /// Runs a command of [`Self::mpi`] on the first host.
    pub(crate) fn run_mpi(&self, command: &[String]) -> Result<Vec<Figure>> {
        let lines = run(self.launchers.first().context("no host")?, "mpirun", command)?;
        peers::figures(&lines.join("\n"))
    }
}

/// Runs a command to its end; an error has its last lines.
fn run(launcher: &Launcher, name: &str, command: &[String]) -> Result<Vec<String>> {
    let command: Vec<&str> = command.iter().map(String::as_str).collect();
    launcher.start(name, &command)?.finish(Instant::now() + LIMIT)
}

/// A command on this machine as a person would type it.
pub(crate) fn shown(command: &[String]) -> String {
    launcher::quoted(command) + "\n"
}

/// What `harmonaize-perf` tells of its one size, out of place.
fn figures_of(lines: &[String]) -> Result<Value> {
    let line = lines.iter().find(|line| line.starts_with('{')).context("harmonaize-perf told no figures")?;
    let all: Value = serde_json::from_str(line).context("harmonaize-perf told what is no JSON")?;
    let place = all.pointer("/results/0/out_of_place").filter(|place| !place.is_null());
    place.cloned().with_context(|| format!("harmonaize-perf told no figure: {line}"))
}

/// The host in what [`FIND_DEVICE`] prints.
fn device(name: &str, launcher: &Launcher, found: &str) -> Option<Host> {
    let mut fields = found.split_whitespace();
    let (port, index, gid) = (fields.next()?, fields.next()?, fields.next()?);
    let mut folders = port.rsplit('/');
    let (port, device) = (folders.next()?.parse().ok()?, folders.nth(1)?.to_owned());
    let digits: String = gid.split(':').skip(6).collect();
    let address = u32::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 8)?;
    let gid_index = Some(index.parse().ok()?);
    let address = IpAddr::V4(Ipv4Addr::from(address));
    Some(Host { name: name.to_owned(), launcher: launcher.clone(), address, device, port, gid_index })
}

/// What [`SET_UP`] prints, which is the last line.
fn open_mpi(said: &str) -> Option<OpenMpi> {
    let (mpirun, has) = said.lines().next_back()?.split_once(' ')?;
    mpirun.starts_with("mpirun").then(|| OpenMpi { mpirun: mpirun.to_owned(), ucc: has == "ucc" })
}

/// Two hosts for tests.
#[cfg(test)]
pub(crate) fn pair() -> Hosts {
    let (agent, programs) = (Path::new("/run/harmonaize/tenants/bench.sock"), Path::new("/usr/bin"));
    Hosts::new(&["n1", "root@n2"], agent, programs).unwrap()
}

/// Two hosts for tests, with a program in place of `harmonaize-perf` that tells this of each size.
#[cfg(test)]
pub(crate) fn written(place: &str) -> (tempfile::TempDir, Hosts) {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join(PERF);
    let line = format!("{{\"results\": [{{\"out_of_place\": {place}}}]}}");
    std::fs::write(&program, format!("#!/bin/sh\necho '# a text'\necho '{line}'\n")).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let hosts = Hosts::new(&["n1", "n2"], Path::new("/a.sock"), folder.path()).unwrap();
    (folder, hosts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrong(value: &str) -> String {
        let names = names(value).unwrap();
        Hosts::new(&names, Path::new("/a.sock"), Path::new("/usr/bin")).unwrap_err().to_string()
    }

    #[test]
    fn names_files_and_options_differ() {
        assert_eq!(names("testbed.toml"), None);
        assert_eq!(names("./testbed"), None);
        assert_eq!(names("n1,root@n2"), Some(vec!["n1", "root@n2"]));
        assert!(wrong("testbed").contains("two to 64 names"));
        assert!(wrong("n1,n1").contains("twice"));
        for bad in
            ["n1,", "n1,-oProxyCommand=x", "n1,root@-x", "n1,n2;reboot", "n1,$(reboot)", "n1,n 2", "n1,@n2"]
        {
            assert!(wrong(bad).contains("is no name or address of a host"), "{bad}: {}", wrong(bad));
        }
        let error = Hosts::new(&["a", "b"], Path::new("a.sock"), Path::new("/usr/bin")).unwrap_err();
        assert!(error.to_string().contains("--agent a.sock"), "{error}");
    }

    #[test]
    fn devices_are_read_from_what_a_host_prints() {
        let launcher = Launcher::new("local", "n1").unwrap();
        let printed = "/sys/class/infiniband/mlx5_1/ports/2 3 0000:0000:0000:0000:0000:ffff:0a01:0002\n";
        let host = device("n1", &launcher, printed).unwrap();
        assert_eq!((host.device.as_str(), host.port, host.gid_index), ("mlx5_1", 2, Some(3)));
        assert_eq!(host.address.to_string(), "10.1.0.2");
        for bad in ["", "/sys 3 0:0", "/sys/class/infiniband/a/ports/1 x 0:0:0:0:0:ffff:0a01:0002"] {
            assert!(device("n1", &launcher, bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn open_mpi_is_read_from_what_a_host_prints() {
        let of = |mpirun: &str, ucc| Some(OpenMpi { mpirun: mpirun.to_owned(), ucc });
        assert_eq!(open_mpi("mpirun.openmpi ucc\n"), of("mpirun.openmpi", true));
        assert_eq!(open_mpi("a warning\nmpirun plain\n"), of("mpirun", false));
        assert_eq!(open_mpi("reboot ucc\n"), None);
        assert_eq!(open_mpi(""), None);
    }

    #[test]
    fn figures_are_found_among_the_text() {
        let lines = ["# nccl", "n2: a warning", "{\"results\":[{\"out_of_place\":{\"p50_us\":4.5}}]}"];
        let figures_of =
            |lines: &[&str]| figures_of(&lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>());
        assert_eq!(figures_of(&lines).unwrap()["p50_us"], 4.5);
        assert!(figures_of(&lines[..2]).is_err());
        assert!(figures_of(&["{\"results\":[{\"out_of_place\":null}]}"]).is_err());
    }

    #[test]
    fn scripts_are_what_a_shell_reads() {
        for script in [CHECK, FIND_DEVICE, SET_UP] {
            let read = std::process::Command::new("sh").args(["-n", "-c", script]).status().unwrap();
            assert!(read.success(), "{script}");
        }
        let local = Launcher::new("local", "n1").unwrap();
        let error = local.shell(CHECK, &["/nowhere/harmonaize-perf", "/a.sock"], b"").unwrap_err();
        assert!(error.to_string().contains("no program /nowhere/harmonaize-perf"), "{error}");
        let error = local.shell(CHECK, &["/bin/sh", "/nowhere/a.sock"], b"").unwrap_err();
        assert!(error.to_string().contains("no socket /nowhere/a.sock"), "{error}");
    }
}
