//! The main job over RDMA: control and four agents on hosts that are devices, as `cargo xtask softroce test` makes them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use anyhow::Result;
use harmonaize_client::{Access, AgentAddress, AttachOptions, Client, Rank, RdmaOptions};
use harmonaize_tests::job::{Worker, options, run_with};
use harmonaize_tests::star;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const HOSTS: usize = 4;
const CONTROL: &str = "127.0.0.1:7100";
/// For a guest whose processor is emulated.
const PATIENCE: Duration = Duration::from_secs(60);

/// MiB of an arena: registered memory is all there from the start, and the guest has little.
const ARENA: u64 = 24;

/// Beside the agents' configurations: the tenant's secret.
const SECRET: &str = "a.secret";

/// One test at a time: addresses and devices are the guest's.
static ALONE: Mutex<()> = Mutex::new(());

/// A program that ends with this value.
struct Program(Child);

impl Program {
    fn start(name: &str, config: &Path, text: &str) -> Self {
        std::fs::write(config, text).unwrap();
        let folder = std::env::var_os("HARMONAIZE_BINARIES").expect("the guest's job names the folder");
        let mut command = Command::new(Path::new(&folder).join(name));
        Self(command.arg("--config").arg(config).env("NO_COLOR", "1").spawn().unwrap())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Control and agents; `None`, loudly, without a device for each host.
struct Provider {
    agents: Vec<Program>,
    _control: Program,
    folder: tempfile::TempDir,
}

impl Provider {
    fn start() -> Option<Self> {
        if !(0..HOSTS).all(|host| Path::new(&format!("/sys/class/infiniband/rxe{host}")).exists()) {
            println!("SKIPPED: this test needs the devices rxe0 to rxe3, as in `cargo xtask softroce test`");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("topology.toml"), star(HOSTS, "1Gbit/s")).unwrap();
        let secret = folder.path().join(SECRET);
        std::fs::write(&secret, "tenant a and the agents of this test").unwrap();
        std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).unwrap();
        let text =
            format!("listen = \"{CONTROL}\"\ntopology = \"topology.toml\"\n[[tenant]]\nname = \"a\"\n");
        let control = Program::start("harmonaize-control", &folder.path().join("control.toml"), &text);
        until("control does not listen", || TcpStream::connect(CONTROL).is_ok());
        let mut provider = Self { agents: Vec::new(), _control: control, folder };
        provider.agents = (0..HOSTS).map(|host| provider.agent(host)).collect();
        until("an agent has no socket", || {
            provider.sockets().iter().all(|socket| UnixStream::connect(socket).is_ok())
        });
        Some(provider)
    }

    fn agent(&self, host: usize) -> Program {
        let text = format!(
            "host = \"h{host}\"\ncontrol = \"{CONTROL}\"\nlisten = \"10.0.0.{}:7200\"\npeer_timeout = \"10s\"\n\
             connect_timeout = \"30s\"\n[verbs]\n[rdma]\ndevice = \"rxe{host}\"\nlisten = \"{}\"\n\
             [[tenant]]\nname = \"a\"\nsocket = {:?}\nuids = [0]\nremote = true\n\
             rdma = true\nsecret = \"{SECRET}\"\naddresses = [\"10.0.0.1\", \"10.0.0.4\"]\n",
            host + 1,
            tenants(host),
            self.socket(host)
        );
        Program::start("harmonaize-agent", &self.folder.path().join(format!("agent{host}.toml")), &text)
    }

    fn socket(&self, host: usize) -> PathBuf {
        self.folder.path().join(format!("h{host}.sock"))
    }

    fn sockets(&self) -> Vec<PathBuf> {
        (0..HOSTS).map(|host| self.socket(host)).collect()
    }
}

/// Where the agent of a host listens for tenants over TCP.
fn tenants(host: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, host as u8 + 1], 7300))
}

fn until(wrong: &str, done: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "{wrong}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn right<T>(results: Vec<Result<T>>) {
    for (rank, result) in results.into_iter().enumerate() {
        result.unwrap_or_else(|error| panic!("rank {rank}: {error:#}"));
    }
}

fn everything(worker: &Worker) -> Result<()> {
    for (salt, count) in [(1, 0), (2, 1), (3, 100), (4, 10_000), (5, 200_000)] {
        worker.sum(salt, count, false, PATIENCE)?;
        worker.sum(salt, count, true, PATIENCE)?;
        worker.exchange(salt, count.min(20_000), PATIENCE)?;
        let root = Rank(salt as u32 % worker.ranks);
        let tensor = worker.tensor(&Worker::input(worker.rank, salt, count))?;
        worker.communicator.broadcast(&tensor, root)?.wait(PATIENCE)?;
        anyhow::ensure!(worker.contents(&tensor)? == Worker::input(root.0, salt, count), "wrong broadcast");
        worker.communicator.barrier()?.wait(PATIENCE)?;
    }
    Ok(())
}

#[test]
fn every_collective_is_right() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(provider) = Provider::start() else { return };
    right(run_with(&provider.sockets(), "mapped", 1, |_| options(Access::Mapped, ARENA), everything));
    right(run_with(&provider.sockets(), "remote", 1, |_| options(Access::Remote, ARENA), everything));
}

/// A rank on each host through the agent's socket, on its agent's device or on one across the switch, and one over TCP.
#[test]
fn every_collective_is_right_for_ranks_attached_over_rdma() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(provider) = Provider::start() else { return };
    let secret = provider.folder.path().join(SECRET);
    let rank = |rank: usize| -> Result<()> {
        let (at, device) = match rank {
            0 | 1 => (provider.socket(rank).into(), None),
            2 | 3 => (provider.socket(rank).into(), Some(format!("rxe{}", (rank + 1) % HOSTS))),
            _ => (AgentAddress::tcp(tenants(0), "a", &secret)?, Some("rxe3:1".to_owned())),
        };
        let rdma = RdmaOptions { device, ..RdmaOptions::default() };
        let timeout = PATIENCE;
        let client = Client::attach(at, AttachOptions { rdma, timeout, ..options(Access::Rdma, ARENA) })?;
        everything(&Worker::of(client, "rdma", rank as u32, HOSTS as u32 + 1, PATIENCE)?)
    };
    let results = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..=HOSTS)
            .map(|number| {
                scope.spawn({
                    let rank = &rank;
                    move || rank(number)
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    right(results);
}

#[test]
fn an_agent_that_dies_costs_its_communicator_an_error_and_no_other() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(mut provider) = Provider::start() else { return };
    let sockets = provider.sockets();
    let (doomed, others) = (&mut provider.agents[3], &sockets[..2]);
    let (ready, started) = std::sync::mpsc::sync_channel::<()>(0);
    std::thread::scope(|scope| {
        let lost = scope.spawn(|| {
            run_with(
                &sockets,
                "all",
                1,
                |_| options(Access::Mapped, ARENA),
                |worker| {
                    // The others may be done, and the fourth agent gone, before its own rank has heard of it.
                    let first = worker.sum(1, 1000, false, PATIENCE);
                    if first.is_err() && worker.rank == 3 {
                        return Ok(());
                    }
                    first?;
                    if worker.rank == 0 {
                        let _ = ready.send(());
                    }
                    let begun = Instant::now();
                    while begun.elapsed() < PATIENCE {
                        if worker.sum(2, 10_000, false, PATIENCE).is_err() {
                            return Ok(());
                        }
                    }
                    anyhow::bail!("no error in {} s", PATIENCE.as_secs())
                },
            )
        });
        let spared = scope.spawn(|| {
            let sums = |worker: &Worker| (0..30).try_for_each(|i| worker.sum(i, 10_000, true, PATIENCE));
            run_with(others, "some", 1, |_| options(Access::Mapped, ARENA), sums)
        });
        started.recv().unwrap();
        doomed.0.kill().unwrap();
        right(lost.join().unwrap());
        right(spared.join().unwrap());
    });
}
