//! Agents and tenants' processes are killed, stopped and cut off, links are slow, and agents start again. The order is drawn. No
//! operation waits for longer than its time-out and a second, nobody on other hosts hears of it, and nothing stays behind.
//! `HARMONAIZE_SEED` chooses the faults, `HARMONAIZE_RUNS` how many there are.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_testkit::deployment::{Deployment, socket};
use harmonaize_testkit::draw::{self, Draw};
use harmonaize_testkit::fabric::{self, Host};
use harmonaize_testkit::process::Process;
use harmonaize_tests::job::{deploy, sockets};
use harmonaize_tests::load::{forms_anew, noticed_soon, under_load};
use harmonaize_tests::{STEP, star};
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Hosts of the job that faults befall, and of the bystanders' beside them.
const HOSTS: usize = 3;
const OTHERS: usize = 2;
/// The time-out of operations, and what one may take beyond it.
const TIMEOUT: Duration = Duration::from_secs(1);
const MORE: Duration = Duration::from_secs(1);
/// How long what is no longer used may take to be let go.
const LET_GO: Duration = Duration::from_secs(5);

/// What happens at one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// A tenant's process dies in an operation.
    KillRank,
    /// It stands still, and goes on later.
    StopRank,
    /// The agent dies, and another one is started.
    KillAgent,
    /// The agent stands still, and goes on later.
    StopAgent,
    /// The agent is ended in good order, and started again.
    RestartAgent,
    /// The host's link is cut, and later joined.
    Cut,
    /// The host's link is slow for a while.
    Slow,
}

const FAULTS: [Fault; 7] = [
    Fault::KillRank,
    Fault::StopRank,
    Fault::KillAgent,
    Fault::StopAgent,
    Fault::RestartAgent,
    Fault::Cut,
    Fault::Slow,
];

/// Bits a second of a slow link: an operation takes a second.
const SLOW: u64 = 10_000_000;

/// What a rank has printed.
#[derive(Debug, Default)]
struct RankLog {
    /// How long each of its operations took, in milliseconds.
    took: Vec<u64>,
    /// Why it has ended.
    ended: Option<String>,
}

fn read_log(rank: &Process) -> RankLog {
    let text = std::fs::read_to_string(rank.log()).unwrap();
    // The last line may be half written.
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let ended = whole.lines().find_map(|line| line.strip_prefix("ended: ")).map(str::to_owned);
    RankLog { took: whole.lines().filter_map(|line| line.parse().ok()).collect(), ended }
}

/// A rank on each host, as processes.
fn start(deployment: &Deployment, name: &str, logs: &Path) -> Vec<Process> {
    let hosts = deployment.hosts().iter().take(HOSTS).enumerate();
    let rank = |(rank, host): (usize, &Host)| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_summing"));
        command.arg("--socket").arg(socket(host, "a")).args(["--name", name]);
        command.args(["--rank", &rank.to_string(), "--ranks", &HOSTS.to_string()]);
        command.args(["--timeout", &TIMEOUT.as_millis().to_string()]);
        Process::start_here(&format!("rank {rank} of {name}"), &mut command, &logs.join(format!("{rank}")))
            .unwrap()
    };
    hosts.map(rank).collect()
}

/// Waits until all ranks have done so many operations more than `before`, or have ended.
fn settled(job: &mut [Process], before: &[usize], within: Duration, what: &str) {
    let deadline = Instant::now() + within;
    loop {
        let all: Vec<RankLog> = job.iter().map(read_log).collect();
        let gone = job.iter_mut().map(|rank| rank.status().unwrap().is_some()).collect::<Vec<_>>();
        let goes_on = all.iter().zip(before).all(|(log, before)| log.took.len() > before + 2);
        if gone.iter().all(|gone| *gone) || goes_on {
            return;
        }
        assert!(Instant::now() < deadline, "{what}: an operation hangs; {all:?}, gone {gone:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Descriptors of a process by their kind, mappings of memory files, and kilobytes of shared memory.
fn resources(process: u32) -> BTreeMap<String, u64> {
    let mut found = BTreeMap::new();
    let folder = format!("/proc/{process}");
    for entry in std::fs::read_dir(format!("{folder}/fd")).unwrap().flatten() {
        // One that is closed meanwhile is none.
        let Ok(target) = std::fs::read_link(entry.path()) else { continue };
        let target = target.to_string_lossy();
        let kind = match target.split_once(':') {
            Some((kind, _)) => kind.trim_start_matches('/'),
            None => "file",
        };
        *found.entry(kind.to_owned()).or_default() += 1;
    }
    let maps = std::fs::read_to_string(format!("{folder}/maps")).unwrap();
    found.insert("mapped".into(), maps.lines().filter(|line| line.contains("/memfd:")).count() as u64);
    let status = std::fs::read_to_string(format!("{folder}/status")).unwrap();
    let shared = status.lines().find_map(|line| line.strip_prefix("RssShmem:")).unwrap();
    let kilobytes = shared.split_whitespace().next().unwrap().parse().unwrap();
    found.insert("RssShmem".into(), kilobytes);
    found
}

/// Waits until the agent has no more than before it ever served anybody.
fn lets_go(deployment: &mut Deployment, at: usize, fresh: &BTreeMap<String, u64>, what: &str) {
    let (process, deadline) = (deployment.agent(at).unwrap().id(), Instant::now() + LET_GO);
    loop {
        let now = resources(process);
        let more = |(kind, count): (&String, &u64)| *count > fresh.get(kind).copied().unwrap_or(0);
        if !now.iter().any(more) {
            return;
        }
        assert!(Instant::now() < deadline, "{what}: the agent of host {at} has {now:?}, and had {fresh:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Has a fault befall a host, and mends it after a while. Returns whether the agent is another one.
fn inflict(
    deployment: &mut Deployment,
    job: &mut [Process],
    (fault, at): (Fault, usize),
    duration: Duration,
) -> bool {
    let host = deployment.hosts()[at].name.clone();
    let wait = || std::thread::sleep(duration);
    match fault {
        Fault::KillRank => job[at].signal(Signal::KILL).unwrap(),
        Fault::StopRank => {
            job[at].signal(Signal::STOP).unwrap();
            wait();
            job[at].signal(Signal::CONT).unwrap();
        }
        Fault::KillAgent | Fault::RestartAgent => {
            if fault == Fault::KillAgent {
                deployment.agent(at).unwrap().signal(Signal::KILL).unwrap();
            }
            deployment.start_agent(at).unwrap();
            return true;
        }
        Fault::StopAgent => {
            deployment.agent(at).unwrap().signal(Signal::STOP).unwrap();
            wait();
            deployment.agent(at).unwrap().signal(Signal::CONT).unwrap();
        }
        Fault::Cut => {
            deployment.fabric().set_links(&host, false).unwrap();
            wait();
            deployment.fabric().set_links(&host, true).unwrap();
        }
        Fault::Slow => {
            deployment.fabric().set_rate(&host, Some(SLOW)).unwrap();
            wait();
            deployment.fabric().set_rate(&host, Some(1_000_000_000)).unwrap();
        }
    }
    false
}

#[test]
fn random_faults_hang_nobody_and_leave_nothing() {
    let (seed, runs) = (draw::seed(), draw::number("HARMONAIZE_RUNS", 20));
    let prepared = deploy(&star(HOSTS + OTHERS, "1Gbit/s"), noticed_soon);
    let Some(mut deployment) = prepared else { return };
    println!("run again: HARMONAIZE_SEED={seed} HARMONAIZE_RUNS={runs}");
    let mut drawn = Draw::new(seed);
    let logs = tempfile::tempdir().unwrap();
    let mut fresh: Vec<_> = (0..HOSTS).map(|at| resources(deployment.agent(at).unwrap().id())).collect();
    let bystanders = sockets(&deployment, "b").split_off(HOSTS);
    under_load(&bystanders, |load| {
        load.goes_on();
        for run in 0..runs {
            let kinds = FAULTS.len() as u64;
            // Each kind comes as often as the others, in an order that is drawn.
            let fault = FAULTS[if run < kinds { run } else { drawn.below(kinds) } as usize];
            let at = drawn.below(HOSTS as u64) as usize;
            let duration = Duration::from_millis(100 + drawn.below(1200));
            let what = format!("fault {run}, {fault:?} of {duration:?} at host {at}");
            println!("{what}");
            let mut job = start(&deployment, &format!("job{run}"), logs.path());
            settled(&mut job, &[0; HOSTS], STEP, &format!("before {what}"));
            let begun: Vec<usize> = job.iter().map(|rank| read_log(rank).took.len()).collect();
            assert!(begun.iter().all(|count| *count > 0), "{what}: no operation; {}", job[0].log_tail(999));
            std::thread::sleep(Duration::from_millis(drawn.below(200)));
            let inflicted = Instant::now();
            let renewed = inflict(&mut deployment, &mut job, (fault, at), duration);
            let longest = inflicted.elapsed() + TIMEOUT + MORE;
            let before: Vec<usize> = job.iter().map(|rank| read_log(rank).took.len()).collect();
            settled(&mut job, &before, TIMEOUT + MORE + LET_GO, &what);
            for rank in &mut job {
                let log = read_log(rank);
                let slowest = log.took.iter().max().copied().map_or(Duration::ZERO, Duration::from_millis);
                assert!(slowest <= longest, "{what}: {} waited for {slowest:?}; {log:?}", rank.name());
                rank.signal(Signal::KILL).unwrap();
                let status = rank.wait_until(Instant::now() + STEP).unwrap().unwrap();
                // By itself only with a word why.
                assert!(!status.success() || log.ended.is_some(), "{what}: {}", rank.log_tail(999));
                assert!(status.code().is_none_or(|code| code == 0), "{what}: {}", rank.log_tail(999));
            }
            deployment.wait_until_ready().unwrap();
            if renewed {
                fresh[at] = resources(deployment.agent(at).unwrap().id());
            }
            for (at, fresh) in fresh.iter().enumerate() {
                lets_go(&mut deployment, at, fresh, &what);
            }
            load.goes_on();
        }
        forms_anew(&deployment, "new");
    });
    let ended = deployment.end().unwrap();
    let name = ended.name().to_owned();
    drop(ended);
    assert!(!fabric::standing().unwrap().contains(&name), "namespaces of {name} are still there");
}
