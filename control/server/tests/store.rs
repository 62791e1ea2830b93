//! What outlives control: in one process, and in processes that are killed at any moment. `HARMONAIZE_SEED` chooses the moments,
//! `HARMONAIZE_RUNS` how many there are.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_api::v1::operator_client::OperatorClient;
use harmonaize_api::v1::{self, WithdrawalKind};
use harmonaize_server::{Config, Server, StartError};
use harmonaize_testkit::draw::number;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha20Rng;
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::Code;
use tonic::transport::Channel;

const LIMIT: Duration = Duration::from_secs(30);

const CONFIG: &str = "listen = \"127.0.0.1:0\"\ninsecure_loopback = true\ntopology = \"topology.toml\"\nstore = \"control.redb\"\n\
                      [[tenant]]\nname = \"a\"\n";

const TOPOLOGY: &str = r#"
host = [{ name = "h0" }, { name = "h1" }]
switch = [{ name = "s0" }, { name = "s1" }]
link = [
    { from = "h0", to = "s0", rate = "1Gbit/s" }, { from = "h1", to = "s0", rate = "1Gbit/s" },
    { from = "h0", to = "s1", rate = "1Gbit/s" }, { from = "h1", to = "s1", rate = "1Gbit/s" },
]
"#;

fn configure(folder: &Path) -> PathBuf {
    std::fs::write(folder.join("topology.toml"), TOPOLOGY).unwrap();
    let path = folder.join("control.toml");
    std::fs::write(&path, CONFIG).unwrap();
    path
}

async fn client(address: &str) -> OperatorClient<Channel> {
    OperatorClient::connect(format!("http://{address}")).await.unwrap()
}

struct Control {
    client: OperatorClient<Channel>,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Control {
    async fn start(config: &Path) -> Self {
        let server = Server::bind(Config::load(config).unwrap()).await.unwrap();
        let client = client(&server.local_address().to_string()).await;
        let (stop, stopped) = oneshot::channel::<()>();
        let shutdown = async {
            let _ = stopped.await;
        };
        let task = tokio::spawn(async move { server.run(shutdown).await.unwrap() });
        Self { client, stop, task }
    }

    async fn stop(self) {
        self.stop.send(()).unwrap();
        tokio::time::timeout(LIMIT, self.task).await.unwrap().unwrap();
    }
}

fn drain(target: &str) -> v1::WithdrawRequest {
    let (targets, kind) = (vec![target.to_owned()], WithdrawalKind::Drain.into());
    v1::WithdrawRequest { targets, kind, ..Default::default() }
}

async fn drained(client: &mut OperatorClient<Channel>) -> BTreeSet<String> {
    let reply = client.withdrawals(v1::WithdrawalsRequest {}).await.unwrap().into_inner();
    reply.withdrawals.into_iter().map(|record| record.target).collect()
}

async fn tenants(client: &mut OperatorClient<Channel>) -> BTreeSet<String> {
    let reply = client.tenants(v1::TenantsRequest {}).await.unwrap().into_inner();
    reply.tenants.into_iter().map(|tenant| tenant.name).collect()
}

#[tokio::test]
async fn what_is_answered_is_there_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let config = configure(folder.path());
    let mut control = Control::start(&config).await;
    let client = &mut control.client;
    client.add_tenant(v1::AddTenantRequest { name: "b".to_owned(), ..Default::default() }).await.unwrap();
    let [record] = &client.withdraw(drain("s0")).await.unwrap().into_inner().withdrawals[..] else {
        panic!("one")
    };
    assert_eq!(
        (record.target.as_str(), record.target_kind.as_str(), record.in_effect),
        ("s0", "switch", true)
    );
    let kind = WithdrawalKind::Maintenance.into();
    let until_ns = u64::MAX;
    let window = v1::WithdrawRequest { kind, until_ns, from_ns: until_ns - 1, ..drain("h1") };
    client.withdraw(window).await.unwrap();
    control.stop().await;

    let mut control = Control::start(&config).await;
    let client = &mut control.client;
    assert_eq!(tenants(client).await, ["a", "b"].map(str::to_owned).into());
    let records = client.withdrawals(v1::WithdrawalsRequest {}).await.unwrap().into_inner().withdrawals;
    let records: Vec<(&str, bool)> =
        records.iter().map(|record| (record.target.as_str(), record.in_effect)).collect();
    assert_eq!(records, [("h1", false), ("s0", true)]);
    let links = client.topology(v1::TopologyRequest {}).await.unwrap().into_inner().links;
    let withdrawn = links.iter().filter(|link| link.state() == v1::LinkState::Withdrawn);
    assert_eq!(withdrawn.count(), 4, "two links of s0, each way");
    let kind = WithdrawalKind::Drain.into();
    client.restore(v1::RestoreRequest { targets: vec!["s0".to_owned()], kind }).await.unwrap();
    control.stop().await;

    let mut control = Control::start(&config).await;
    assert_eq!(drained(&mut control.client).await, ["h1".to_owned()].into());
    control.stop().await;
}

/// Makes the store of a copy by the program; what it said.
fn restore(config: &Path, copy: &Path) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_harmonaize-control"));
    let output = command.arg("--config").arg(config).arg("--restore").arg(copy).output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(said).unwrap())
}

#[tokio::test]
async fn a_copy_of_a_running_control_is_restored() {
    let folder = tempfile::tempdir().unwrap();
    let (config, copy) = (configure(folder.path()), folder.path().join("copy"));
    let mut control = Control::start(&config).await;
    let client = &mut control.client;
    client.add_tenant(v1::AddTenantRequest { name: "b".to_owned(), ..Default::default() }).await.unwrap();
    client.withdraw(drain("s0")).await.unwrap();
    let mut chunks = client.backup(v1::BackupRequest {}).await.unwrap().into_inner();
    let mut bytes = Vec::new();
    while let Some(chunk) = chunks.message().await.unwrap() {
        bytes.extend(chunk.bytes);
    }
    std::fs::write(&copy, bytes).unwrap();
    client.add_tenant(v1::AddTenantRequest { name: "c".to_owned(), ..Default::default() }).await.unwrap();
    let (done, said) = restore(&config, &copy);
    assert!(!done && said.contains("is in use by another process"), "{said}");
    control.stop().await;
    let (done, said) = restore(&config, &copy);
    assert!(
        done && said.contains("1 tenants, 1 withdrawals") && said.contains("control.redb.replaced"),
        "{said}"
    );

    let mut control = Control::start(&config).await;
    assert_eq!(tenants(&mut control.client).await, ["a", "b"].map(str::to_owned).into());
    assert_eq!(drained(&mut control.client).await, ["s0".to_owned()].into());
    control.stop().await;
    std::fs::write(&copy, "no store").unwrap();
    let (done, said) = restore(&config, &copy);
    assert!(!done && said.contains("is no store, or damaged"), "{said}");
    let mut control = Control::start(&config).await;
    assert_eq!(tenants(&mut control.client).await.len(), 2, "the store is as it was");
    control.stop().await;
}

#[tokio::test]
async fn refusals_are_precise_and_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut control = Control::start(&configure(folder.path())).await;
    let client = &mut control.client;
    let refused = client.withdraw(drain("s9")).await.unwrap_err();
    assert_eq!(
        (refused.code(), refused.message()),
        (Code::NotFound, "the topology has no host or switch `s9`")
    );
    let nothing = v1::WithdrawRequest { targets: vec![], ..drain("s0") };
    assert_eq!(client.withdraw(nothing).await.unwrap_err().code(), Code::InvalidArgument);
    let neither = v1::WithdrawRequest { kind: 0, ..drain("s0") };
    assert_eq!(client.withdraw(neither).await.unwrap_err().code(), Code::InvalidArgument);
    let add = |name: &str| v1::AddTenantRequest { name: name.to_owned(), ..Default::default() };
    assert_eq!(client.add_tenant(add("a")).await.unwrap_err().code(), Code::AlreadyExists);
    let remove = v1::RemoveTenantRequest { name: "a".to_owned() };
    let refused = client.remove_tenant(remove).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.message().contains("stands in the configuration file"), "{refused}");
    let unknown = v1::PlansRequest { communicator: 77 };
    assert_eq!(client.plans(unknown).await.unwrap_err().code(), Code::NotFound);
    let dry = v1::DryRunRequest { targets: vec!["s1".to_owned()] };
    let reply = client.dry_run(dry).await.unwrap().into_inner();
    assert_eq!((reply.plans.len(), reply.changed.len()), (0, 0));
    assert_eq!(reply.reason_code, "nothing_better");
    let dry = v1::DryRunRequest { targets: vec!["s0:s1".to_owned()] };
    assert_eq!(client.dry_run(dry).await.unwrap_err().code(), Code::NotFound);
    assert_eq!(drained(client).await, BTreeSet::new());
    control.stop().await;
}

#[tokio::test]
async fn a_second_server_on_the_store_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let config = configure(folder.path());
    let mut control = Control::start(&config).await;
    let Err(error) = Server::bind(Config::load(&config).unwrap()).await else { panic!("two servers") };
    assert!(matches!(error, StartError::Store(_)), "{error}");
    let path = folder.path().join("control.redb").display().to_string();
    let text = error.to_string();
    assert!(text.starts_with(&format!("{path} is in use by another process")), "{text}");
    control.client.withdraw(drain("s0")).await.expect("the first goes on");
    control.stop().await;
    Control::start(&config).await.stop().await;
}

/// A control server that is a process.
struct Process {
    child: Child,
    address: String,
}

impl Process {
    fn start(config: &Path) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_harmonaize-control"));
        command.arg("--config").arg(config).env_remove("RUST_LOG").arg("--log-json");
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut seen = String::new();
        let address = loop {
            let begin = seen.len();
            assert_ne!(log.read_line(&mut seen).unwrap(), 0, "control ended: {seen}");
            let line = &seen[begin..];
            if let Some((_, rest)) = line.split_once("\"listen\":\"") {
                break rest.split_once('"').unwrap().0.to_owned();
            }
        };
        // Nobody reads on; the log must not fill up.
        std::thread::spawn(move || log.read_to_end(&mut Vec::new()));
        Self { child, address }
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One operator's doings until control dies: what is there for sure, and what perhaps is.
async fn operate(
    answers: Arc<AtomicU64>,
    address: String,
    who: usize,
    before: BTreeSet<String>,
) -> (BTreeSet<String>, Option<String>) {
    let mut there = before;
    let Ok(mut client) = OperatorClient::connect(format!("http://{address}")).await else {
        return (there, None);
    };
    for count in 0.. {
        let name = format!("{who}-{}", count % 5);
        let outcome = if there.contains(&name) {
            client.remove_tenant(v1::RemoveTenantRequest { name: name.clone() }).await.map(drop)
        } else {
            client
                .add_tenant(v1::AddTenantRequest { name: name.clone(), ..Default::default() })
                .await
                .map(drop)
        };
        match outcome {
            Ok(()) if there.contains(&name) => drop(there.remove(&name)),
            Ok(()) => drop(there.insert(name)),
            Err(_) => return (there, Some(name)),
        }
        answers.fetch_add(1, Ordering::Relaxed);
    }
    (there, None)
}

#[tokio::test]
async fn killed_at_any_moment_it_keeps_what_it_answered() {
    let (seed, runs) = (number("HARMONAIZE_SEED", 1), number("HARMONAIZE_RUNS", 4));
    println!("seed {seed}");
    let mut random = ChaCha20Rng::seed_from_u64(seed);
    let folder = tempfile::tempdir().unwrap();
    let config = configure(folder.path());
    let mut known: Vec<BTreeSet<String>> = vec![BTreeSet::new(); 3];
    for run in 0..runs {
        let process = Process::start(&config);
        let answers = Arc::new(AtomicU64::new(0));
        let operators: Vec<_> = known
            .iter()
            .cloned()
            .enumerate()
            .map(|(who, there)| {
                tokio::spawn(operate(Arc::clone(&answers), process.address.clone(), who, there))
            })
            .collect();
        let until = Instant::now() + LIMIT;
        while answers.load(Ordering::Relaxed) == 0 {
            assert!(Instant::now() < until, "nothing is answered");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // Somewhere within the next writes, whatever they are doing.
        tokio::time::sleep(Duration::from_micros(random.random_range(0..50_000))).await;
        process.kill();
        let after = Process::start(&config);
        let found = tenants(&mut client(&after.address).await).await;
        for (who, operator) in operators.into_iter().enumerate() {
            let (there, perhaps) = tokio::time::timeout(LIMIT, operator).await.unwrap().unwrap();
            let of = format!("{who}-");
            let own: BTreeSet<String> = found.iter().filter(|name| name.starts_with(&of)).cloned().collect();
            let differs: Vec<&String> = own.symmetric_difference(&there).collect();
            assert!(
                differs.is_empty() || differs == perhaps.iter().collect::<Vec<_>>(),
                "run {run}: {differs:?} differ, {perhaps:?} may; run again: HARMONAIZE_SEED={seed} HARMONAIZE_RUNS={runs} \
                 cargo test -p harmonaize-server --test store"
            );
            known[who] = own;
        }
        after.kill();
    }
}

#[test]
fn a_store_that_is_damaged_stops_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let config = configure(folder.path());
    std::fs::write(folder.path().join("control.redb"), "no store at all".repeat(1000)).unwrap();
    let begun = Instant::now();
    let mut command = Command::new(env!("CARGO_BIN_EXE_harmonaize-control"));
    let output = command.arg("--config").arg(&config).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("control.redb is no store, or damaged") && text.contains("restore a copy"),
        "{text}"
    );
    assert!(begun.elapsed() < LIMIT);
}
