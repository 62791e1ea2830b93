//! The page at a fabric of many made-up agents: served until this program is ended, or measured in headless Chromium.
//!
//! `cargo run -p harmonaize-server --example page -- RACKS HOSTS SPINES COMMUNICATORS [MINUTES FOLDER]`: HOSTS stand in each rack, and a
//! communicator has eight of them. Without MINUTES it prints where the page is and serves it. With them it measures first paint, the time
//! from an event until it is seen, and the tab's memory over so long, leaves pictures in FOLDER, and ends with a line of JSON.

use anyhow::{Context, Result};
use harmonaize_api::v1::operator_client::OperatorClient;
use harmonaize_api::v1::{self, CongestionCause, CongestionLevel, from_agent};
use harmonaize_planner::Topology;
use harmonaize_server::{Config, Server};
use harmonaize_testkit::agents::{LeafSpine, Played};
use harmonaize_testkit::chromium::Chromium;
use serde_json::json;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};
use tokio::time::{MissedTickBehavior, interval};
use tonic::transport::Channel;

/// Hosts of a communicator.
const RANKS: usize = 8;

/// How long anything may take that is no figure.
const PATIENCE: Duration = Duration::from_secs(300);

/// Most communicators for which plans are made again. With more, each keeps its first plan. All of them form one after another, and each
/// would have all planned again.
const MOST_PLANNED: usize = 100;

/// How many events are timed.
const EVENTS: usize = 20;

/// Pixels of the window.
const WINDOW: (u32, u32) = (1200, 1100);

fn main() -> Result<()> {
    harmonaize_identity::raise_open_files();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |position: usize| -> Result<usize> {
        let argument =
            arguments.get(position).context("RACKS HOSTS SPINES COMMUNICATORS [MINUTES FOLDER]")?;
        argument.parse().context("a number is expected")
    };
    let fabric = LeafSpine { racks: number(0)?, hosts: number(1)?, spines: number(2)? };
    let (communicators, (ready, addresses)) = (number(3)?, channel());
    let served = std::thread::spawn(move || serve(fabric, communicators, &ready));
    let Ok((control, page)) = addresses.recv() else {
        return served.join().map_err(|_| anyhow::anyhow!("control ended"))?;
    };
    println!("http://{page}/ shows {} hosts and {communicators} communicators", fabric.len());
    match arguments.get(5) {
        Some(folder) => measure(control, page, number(4)?, Path::new(folder)),
        None => served.join().map_err(|_| anyhow::anyhow!("control ended"))?,
    }
}

/// Control and all agents, for as long as this program runs.
fn serve(fabric: LeafSpine, communicators: usize, ready: &Sender<(SocketAddr, SocketAddr)>) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let tenants: String = (0..10).map(|tenant| format!("{{ name = \"team{tenant}\" }},")).collect();
        let text = format!(
            "listen = \"127.0.0.1:0\"\npage = \"127.0.0.1:0\"\nmetrics = \"127.0.0.1:0\"\ntopology = \"\"\ninsecure_loopback = true\n\
             session_timeout = \"300s\"\nprepare_timeout = \"300s\"\njoin_timeout = \"300s\"\nsource_ports = \"20000-29999\"\n\
             most_communicators = 1024\nreplan = {}\ntenant = [{tenants}]\n",
            communicators <= MOST_PLANNED
        );
        let config = Config::parse(&text, Topology::parse(&fabric.topology())?)?;
        let server = Server::bind(config).await?;
        let (control, page) = (server.local_address(), server.page_address().context("no page")?);
        tokio::spawn(server.run(std::future::pending()));
        let mut played = fabric.connect(control).await?;
        let began = Instant::now();
        let mut formed = Vec::new();
        for communicator in 0..communicators {
            // Each in several racks, next to each other.
            let first = communicator * 37;
            let host = |rank: usize| (first + rank / 2 * fabric.hosts + rank % 2) % fabric.len();
            let hosts: Vec<usize> = (0..RANKS).map(host).collect();
            let (tenant, name) = (format!("team{}", communicator % 10), format!("job{communicator}"));
            formed.push((played.form(&tenant, &name, &hosts, PATIENCE).await?, hosts));
        }
        println!("{communicators} communicators formed in {:.1} s", began.elapsed().as_secs_f64());
        let mut operator = OperatorClient::connect(format!("http://{control}")).await?;
        let drain = v1::WithdrawRequest {
            targets: vec!["leaf1:spine0".to_owned(), format!("spine{}", fabric.spines.saturating_sub(1))],
            kind: v1::WithdrawalKind::Drain.into(),
            reason: "optics are replaced".to_owned(),
            ..v1::WithdrawRequest::default()
        };
        operator.withdraw(drain).await?;
        ready.send((control, page))?;
        report(fabric, &mut played, &formed).await
    })
}

/// What the agent of a host reports of an operation of each communicator, given with its ranks' hosts. One rank is late.
fn operations(formed: &[(u64, Vec<usize>)], host: usize, number: u64) -> Vec<v1::Operation> {
    let of = |(communicator, hosts): &(u64, Vec<usize>)| {
        let mut participants: Vec<usize> = Vec::new();
        hosts.iter().for_each(|at| {
            if !participants.contains(at) {
                participants.push(*at);
            }
        });
        let participant = participants.iter().position(|at| *at == host)?;
        let began = number * 1_000_000_000;
        let timing = |rank: u32| v1::RankTiming {
            rank,
            called_ns: began + if rank == 5 { 8_000_000 } else { u64::from(rank) * 300_000 },
            ended_ns: began + 20_000_000,
            ..v1::RankTiming::default()
        };
        Some(v1::Operation {
            communicator: *communicator,
            operation: number,
            bytes: 64 << 20,
            participant: u32::try_from(participant).ok()?,
            ranks: (0..).zip(hosts).filter(|(_, at)| **at == host).map(|(rank, _)| timing(rank)).collect(),
            complete: true,
            ..v1::Operation::default()
        })
    };
    formed.iter().filter_map(of).collect()
}

/// Each agent says once a second what crosses its interface: another load each time, and cross traffic at some. It reports an operation
/// of each of its communicators, too.
async fn report(fabric: LeafSpine, played: &mut Played, formed: &[(u64, Vec<usize>)]) -> Result<()> {
    let mut ticks = interval(Duration::from_secs(1));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for sequence in 1.. {
        ticks.tick().await;
        for host in 0..fabric.len() {
            let load = (host as u64 * 7919 + sequence * 13 * (host as u64 % 5)) % 95;
            let busy = host % 29 == 3;
            let congestion = v1::Congestion {
                interface: "eth0".to_owned(),
                level: if busy { CongestionLevel::Severe } else { CongestionLevel::None }.into(),
                cause: if busy { CongestionCause::CrossTraffic } else { CongestionCause::Unspecified }.into(),
                since_ns: 1,
                found_ns: 1,
                ..v1::Congestion::default()
            };
            let link = v1::Link {
                interface: "eth0".to_owned(),
                capacity_bps: 100_000_000_000,
                egress_bps: load * 1_000_000_000,
                ingress_bps: load * 900_000_000,
                own_egress_bps: if busy { 0 } else { load * 1_000_000_000 },
                congestion: Some(congestion),
                ..v1::Link::default()
            };
            let message = v1::TelemetryReport {
                sequence,
                interval_ns: 1_000_000_000,
                links: vec![link],
                operations: operations(formed, host, sequence),
                ..v1::TelemetryReport::default()
            };
            let agent = played.agents.get(host).context("no such host")?;
            agent.send(from_agent::Message::Telemetry(message).into()).await?;
        }
    }
    Ok(())
}

/// Processor time of this process so far, user's and system's: of control and all agents.
fn cpu() -> Result<Duration> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
    let ticks = |position: usize| -> Result<u64> { Ok(fields.get(position).context("no times")?.parse()?) };
    // utime and stime, in hundredths of a second on Linux.
    Ok(Duration::from_millis((ticks(11)? + ticks(12)?) * 10))
}

fn measure(control: SocketAddr, page: SocketAddr, minutes: usize, folder: &Path) -> Result<()> {
    let program = Chromium::program().context("Debian's package chromium is missing")?;
    std::fs::create_dir_all(folder)?;
    let idle = share_of_a_core(Duration::from_secs(5))?;
    let profile = tempfile::tempdir()?;
    let mut browser = Chromium::start(&program, profile.path(), WINDOW)?;
    browser.call("Page.enable", json!({}))?;
    browser.load(&format!("http://{page}/"))?;
    browser.wait_until("document.documentElement?.dataset.number !== undefined", PATIENCE)?;
    let paint = browser.evaluate(
        "new Promise((done) => requestAnimationFrame(() => setTimeout(() => done([performance.getEntriesByName('first-contentful-paint')[0]?.startTime, \
         performance.getEntriesByName('drawn')[0]?.startTime]), 50)))",
    )?;
    let of = |place: usize| paint.get(place).and_then(serde_json::Value::as_f64).unwrap_or(f64::NAN);
    println!("first paint after {:.0} ms; the fabric drawn after {:.0} ms", of(0), of(1));
    let bytes = browser
        .evaluate("fetch('snapshot').then((answer) => answer.arrayBuffer()).then((all) => all.byteLength)")?;
    println!("the first snapshot has {bytes} bytes");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut operator: OperatorClient<Channel> =
        runtime.block_on(OperatorClient::connect(format!("http://{control}")))?;
    let mut times = Vec::new();
    for event in 0..EVENTS {
        let name = format!("new{event}");
        let add = v1::AddTenantRequest { name: name.clone(), ..v1::AddTenantRequest::default() };
        let began = Instant::now();
        runtime.block_on(operator.add_tenant(add))?;
        let seen = format!("document.getElementById('tenants-table').textContent.includes('{name}added')");
        browser.wait_until(&seen, PATIENCE)?;
        times.push(began.elapsed().as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    let at = |place: usize| times.get(place).copied().unwrap_or_default();
    println!(
        "{EVENTS} events: seen after {:.0} ms in the median, {:.0} ms at most",
        at(EVENTS / 2),
        at(EVENTS - 1)
    );
    let looked = share_of_a_core(Duration::from_secs(10))?;
    println!("control and agents take {idle:.2} of a core without a browser, {looked:.2} with one");
    // A communicator's route is part of the pictures.
    browser.evaluate("document.querySelector('#communicators-table button')?.click()")?;
    for scheme in ["light", "dark"] {
        browser.prefer(scheme)?;
        std::thread::sleep(Duration::from_secs(1));
        std::fs::write(folder.join(format!("page-{scheme}.png")), browser.picture()?)?;
    }
    browser.call("Performance.enable", json!({}))?;
    let (began, mut heaps) = (Instant::now(), Vec::new());
    loop {
        let (heap, nodes) = memory(&mut browser)?;
        println!("{:.1} min: {heap:.1} MB of heap, {nodes} nodes", began.elapsed().as_secs_f64() / 60.0);
        heaps.push(heap);
        if began.elapsed() >= Duration::from_secs(minutes as u64 * 60) {
            break;
        }
        std::thread::sleep(Duration::from_secs(30));
    }
    println!("{}", json!({ "first_paint_ms": of(0), "events_ms": times, "heaps_mb": heaps }));
    Ok(())
}

fn share_of_a_core(time: Duration) -> Result<f64> {
    let (before, began) = (cpu()?, Instant::now());
    std::thread::sleep(time);
    Ok((cpu()?.saturating_sub(before)).as_secs_f64() / began.elapsed().as_secs_f64())
}

/// What the tab's heap holds after a collection, in MB, and how many nodes its documents have.
fn memory(browser: &mut Chromium) -> Result<(f64, f64)> {
    browser.call("HeapProfiler.collectGarbage", json!({}))?;
    let all = browser.call("Performance.getMetrics", json!({}))?;
    let of = |name: &str| {
        let mut metrics = all.get("metrics")?.as_array()?.iter();
        metrics.find(|metric| metric.get("name").is_some_and(|own| own == name))?.get("value")?.as_f64()
    };
    let (heap, nodes) = (of("JSHeapUsedSize").context("no heap")?, of("Nodes").context("no nodes")?);
    Ok((heap / 1e6, nodes))
}
