//! The main job over RDMA, and what becomes of it when devices break. Control and four agents are on hosts that are devices,
//! as `cargo xtask softroce test` makes them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

mod aggregated;
mod congested;
mod faults;
mod flaps;
mod host;
mod links;
mod provider;
mod spines;
mod training;
mod upgrade;

use anyhow::Result;
use harmonaize_abi::session::{
    Hello, Offer, PairEnd, RefusalKind, Refused, Registered, Welcome, decode, decode_first, encode,
    encode_first, length,
};
use harmonaize_client::{Access, AgentAddress, AttachOptions, Client, RdmaOptions};
use harmonaize_tests::job::{Worker, at_all, options, run_with, succeeded};
use harmonaize_tests::scrape::{PORTS, scrape_here};
use harmonaize_verbs::Gid;
use host::{Host, PATIENCE, until};
use provider::{ARENA, HOSTS, Provider, tenants};
use std::io::{Read, Write};
use std::net::Ipv4Addr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// A job of mapped ranks, one on each of these hosts.
fn ranks<T: Send>(
    sockets: &[PathBuf],
    name: &str,
    work: impl Fn(&Worker) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    run_with(sockets, name, 1, |_| options(Access::Mapped, ARENA), work)
}

/// Where an agent shows metrics by default.
const AGENT_METRICS: u16 = PORTS[1];

/// One test at a time: addresses and devices are the guest's.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn everything(worker: &Worker) -> Result<()> {
    worker.everything(&[0, 1, 100, 10_000, 200_000], PATIENCE)
}

#[test]
fn every_collective_is_right() {
    let _alone = alone();
    let Some(provider) = Provider::start() else { return };
    succeeded(ranks(&provider.sockets(), "mapped", everything));
    succeeded(run_with(&provider.sockets(), "remote", 1, |_| options(Access::Remote, ARENA), everything));
}

/// Ranks on every host attach through the agent's socket, and one over TCP. Their device is their agent's or one across
/// the switch.
#[test]
fn every_collective_is_right_over_rdma_attach() {
    let _alone = alone();
    let Some(provider) = Provider::start() else { return };
    let secret = provider.secret();
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
    succeeded(at_all(0..=HOSTS, rank));
}

/// What a device counts itself grows as operations run, and an agent's metrics have it.
#[test]
fn metrics_show_what_devices_count() {
    let _alone = alone();
    let Some(provider) = Provider::start() else { return };
    let sent = || (0..HOSTS).map(|host| Host(host as u32).counter("sent_pkts"));
    let before: Vec<u64> = sent().collect();
    succeeded(ranks(&provider.sockets(), "counted", everything));
    let after: Vec<u64> = sent().collect();
    assert!(after.iter().zip(&before).all(|(after, before)| after > before), "{before:?}, {after:?}");
    // Of the agents, which share the guest's loopback, one shows metrics: each sees all devices.
    until("no metrics have what the devices had sent", || {
        let Ok(page) = scrape_here(AGENT_METRICS) else { return false };
        let shown = |host: usize| {
            let series = format!(
                "harmonaize_rdma_port_packets_total{{device=\"rxe{host}\",port=\"1\",direction=\"egress\"}} "
            );
            page.lines().find_map(|line| line.strip_prefix(&series)?.parse::<u64>().ok())
        };
        // rxe has no counters by queue pair, which its metrics say; and the engine has timed messages.
        let unsupported = |host: usize| {
            page.contains(&format!(
                "harmonaize_rdma_queue_pair_counters{{device=\"rxe{host}\",state=\"unsupported\"}} 1\n"
            ))
        };
        let timed = |line: &str| {
            let labels = line.strip_prefix("harmonaize_rdma_completion_seconds_count{")?;
            labels.rsplit_once(' ')?.1.parse::<u64>().ok()
        };
        after.iter().enumerate().all(|(host, sent)| shown(host) >= Some(*sent) && unsupported(host))
            && page.lines().filter_map(timed).sum::<u64>() > 0
    });
}

/// The agent's device sends to no queue pair of another host for a process that names one.
#[test]
fn a_queue_pair_of_another_host_is_refused() {
    let _alone = alone();
    let Some(provider) = Provider::start() else { return };
    let mut session = UnixStream::connect(provider.socket(0)).unwrap();
    session.set_read_timeout(Some(PATIENCE)).unwrap();
    let hello = Hello { access: Access::Rdma, arena_bytes: 1 << 16, entries: 4 };
    session.write_all(&encode_first(&hello).unwrap()).unwrap();
    let mut message = || {
        let mut prefix = [0; 4];
        session.read_exact(&mut prefix).unwrap();
        let mut message = vec![0; length(prefix).unwrap()];
        session.read_exact(&mut message).unwrap();
        message
    };
    decode_first::<Result<Welcome, Refused>>(&message()).unwrap().unwrap();
    let end: PairEnd = decode(&message()).unwrap();
    let end = PairEnd { gid: Gid::from(Ipv4Addr::new(10, 0, 0, 77)).0, ..end };
    let arena = Registered { address: 1 << 20, ..end.mailbox };
    session.write_all(&encode(&Offer { end, arena }).unwrap()).unwrap();
    let mut refusal = Vec::new();
    session.read_to_end(&mut refusal).unwrap();
    let refused = decode::<Result<(), Refused>>(&refusal[4..]).unwrap().unwrap_err();
    assert_eq!(refused.kind, RefusalKind::User, "{}", refused.text);
}

#[test]
fn a_dead_agent_ends_its_communicator_only() {
    let _alone = alone();
    let Some(mut provider) = Provider::start() else { return };
    let sockets = provider.sockets();
    let (doomed, others) = (&mut provider.agents[3], &sockets[..2]);
    let (ready, started) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let lost = scope.spawn(|| {
            ranks(&sockets, "all", |worker| {
                worker.sum(1, 1000, false, PATIENCE)?;
                ready.send(())?;
                let begun = Instant::now();
                while begun.elapsed() < PATIENCE {
                    if worker.sum(2, 10_000, false, PATIENCE).is_err() {
                        return Ok(());
                    }
                }
                anyhow::bail!("no error in {} s", PATIENCE.as_secs())
            })
        });
        let spared = scope.spawn(|| {
            ranks(others, "some", |worker| (0..30).try_for_each(|i| worker.sum(i, 10_000, true, PATIENCE)))
        });
        // One rank may be done before another has heard of it, which the agent's end would then keep from it.
        (0..HOSTS).for_each(|_| started.recv_timeout(PATIENCE).unwrap());
        doomed.kill();
        succeeded(lost.join().unwrap());
        succeeded(spared.join().unwrap());
    });
}
