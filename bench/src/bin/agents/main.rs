//! Made-up agents of a topology's hosts on one control: how soon it does what it is told.
#![forbid(unsafe_code)]

mod tls;

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, ValueEnum};
use harmonaize_api::v1::operator_client::OperatorClient;
use harmonaize_api::v1::{self, CongestionCause, CongestionLevel, from_agent, to_agent};
use harmonaize_identity::{CONTROL, Folder, Protection, Remote, raise_open_files};
use harmonaize_planner::{HostId, Path, SwitchId, Topology};
use harmonaize_testkit::agents::{Agent, LIMIT, hello_of};
use harmonaize_testkit::usage::{processor_time, resident_bytes};
use prost::Message;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::path::{self, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;

/// Handshakes under way at once: control takes 64 from an address.
const HANDSHAKES: usize = 32;
/// Rate of the topology's links, and what is left of a congested one, in bits a second.
const RATE: u64 = 1_000_000_000;
const CONGESTED_RATE: u64 = RATE / 2;
/// How long control has to find the paths of what is new, and to see that links are free again.
const PAUSE: Duration = Duration::from_secs(1);
/// Reports on one communicator: the more often control has changed it of late, the more a change must gain.
const REPORTS: usize = 5;
/// From one join to the next: all of them take several times as long as a silent session lives.
const BETWEEN: Duration = Duration::from_millis(20);
const TRACING: Duration = Duration::from_secs(3);
/// Whose certificate an operator's has, and how many flows are new on a host each second where he follows them.
const OPERATOR: &str = "operator";
const FLOWS: u32 = 10;
/// Bytes before a message: HTTP/2's header of a frame (RFC 9113, 4.1), and gRPC's of a message.
const FRAME: usize = 9 + 5;

/// What is timed.
#[derive(Clone, Copy, ValueEnum)]
enum What {
    /// Communicators of two hosts that form and end, pairs of hosts at the same time
    Joins,
    /// From a report of congestion on a spine until every agent of the communicator across has another plan
    Reactions,
    /// Communicators of two hosts that form and end one after the other while every host has its session
    Sessions,
    /// What control takes of processors while an operator follows the flows of all hosts
    Streams,
    /// The messages of one such communicator, opened and sealed by control's end of a TLS connection in memory
    Records,
}

/// Connects an agent for each host, and prints what was timed as a line of JSON.
#[derive(Parser)]
struct Arguments {
    what: What,
    /// Where control listens
    #[arg(long)]
    control: String,
    /// The folder that has one for each host, with its certificate; no TLS without it
    #[arg(long)]
    tls: Option<PathBuf>,
    /// Control's topology
    #[arg(long)]
    topology: PathBuf,
    /// How many communicators, reports, or seconds
    #[arg(long)]
    count: usize,
    /// What is timed in memory: the folder with control's certificate
    #[arg(long)]
    records: Option<PathBuf>,
    /// Control's process, to see what memory a session takes, or time a stream
    #[arg(long)]
    pid: Option<u32>,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    raise_open_files();
    let topology = Topology::parse(&std::fs::read_to_string(&arguments.topology)?)?;
    let line = match arguments.what {
        What::Joins => joins(&arguments, &topology).await?,
        What::Reactions => reactions(&arguments, topology).await?,
        What::Sessions => sessions(&arguments, &topology).await?,
        What::Streams => streams(&arguments, &topology).await?,
        What::Records => records(&arguments, &topology).await?,
    };
    println!("{line}");
    Ok(())
}

/// The session of a host's agent, which says `hello`.
async fn connect(control: String, tls: Option<PathBuf>, hello: v1::Hello) -> Result<Agent> {
    let channel = remote(&control, tls.as_deref(), &hello.host)?.connect().await?;
    Ok(Agent::hello(channel, hello).await?.0)
}

/// Control, for who has a certificate of this name in a folder of such.
fn remote(control: &str, tls: Option<&path::Path>, name: &str) -> Result<Remote> {
    let protection = match tls {
        Some(folder) => Protection::Mutual(Folder(folder.join(name))),
        None => Protection::InsecureLoopback,
    };
    Ok(Remote::at(&protection, CONTROL, control)?)
}

/// A session for each host of the topology, in its order.
async fn connect_all(arguments: &Arguments, hellos: Vec<v1::Hello>) -> Result<Vec<Agent>> {
    let (places, mut opening) = (Arc::new(Semaphore::new(HANDSHAKES)), JoinSet::new());
    for (number, hello) in hellos.into_iter().enumerate() {
        let place = Arc::clone(&places).acquire_owned().await?;
        let (control, tls) = (arguments.control.clone(), arguments.tls.clone());
        opening.spawn(async move {
            let agent = connect(control, tls, hello).await;
            drop(place);
            agent.map(|agent| (number, agent))
        });
    }
    let mut agents = opening.join_all().await.into_iter().collect::<Result<Vec<_>>>()?;
    agents.sort_by_key(|(number, _)| *number);
    Ok(agents.into_iter().map(|(_, agent)| agent).collect())
}

fn hellos(topology: &Topology) -> Vec<v1::Hello> {
    topology.hosts().iter().map(|host| hello_of(&host.name)).collect()
}

fn join_of(name: &str, rank: usize, ranks: usize) -> Result<from_agent::Message> {
    let (rank, ranks, communicator) = (u32::try_from(rank)?, u32::try_from(ranks)?, name.to_owned());
    let request = u64::from(rank) + 1;
    Ok(from_agent::Message::Join(v1::Join {
        request,
        tenant: "a".to_owned(),
        communicator,
        rank,
        ranks,
        ..v1::Join::default()
    }))
}

/// Two agents' communicator forms and ends: how long it took until both may use it.
async fn form(pair: [&mut Agent; 2], name: &str) -> Result<Duration> {
    let ([one, other], begun) = (pair, Instant::now());
    one.send(join_of(name, 0, 2)?).await?;
    other.send(join_of(name, 1, 2)?).await?;
    let communicator = one.form().await?.communicator;
    ensure!(other.form().await?.communicator == communicator, "two communicators where one should be");
    Agent::prepare(&mut [one, other], communicator, 1).await?;
    let took = begun.elapsed();
    for agent in [one, other] {
        agent.send(from_agent::Message::Closed(v1::Closed { communicator })).await?;
    }
    Ok(took)
}

async fn joins(arguments: &Arguments, topology: &Topology) -> Result<Value> {
    let mut agents = connect_all(arguments, hellos(topology)).await?.into_iter();
    let each = arguments.count.div_ceil(topology.hosts().len() / 2);
    let mut pairs = JoinSet::new();
    let begun = Instant::now();
    for pair in 0.. {
        let (Some(mut one), Some(mut other)) = (agents.next(), agents.next()) else { break };
        pairs.spawn(async move {
            for number in 0..each {
                form([&mut one, &mut other], &format!("{pair}-{number}")).await?;
            }
            anyhow::Ok(each)
        });
    }
    let formed: usize = pairs.join_all().await.into_iter().sum::<Result<usize>>()?;
    Ok(json!({ "joins_per_second": formed as f64 / begun.elapsed().as_secs_f64() }))
}

/// Bytes of the messages by which a communicator of two hosts forms and ends: to control, and from it.
async fn sizes(arguments: &Arguments, topology: &Topology) -> Result<[Vec<usize>; 2]> {
    let mut agents = connect_all(arguments, hellos(topology).into_iter().take(2).collect()).await?;
    let [mut up, mut down] = [Vec::new(), Vec::new()];
    let mut communicator = 0;
    for (rank, agent) in agents.iter().enumerate() {
        let join = v1::FromAgent::from(join_of("sizes", rank, 2)?);
        up.push(join.encoded_len());
        agent.up.send(join).await?;
    }
    for agent in &mut agents {
        let recipe = agent.form().await?;
        communicator = recipe.communicator;
        down.push(v1::ToAgent::from(to_agent::Message::Form(recipe)).encoded_len());
        let prepared = from_agent::Message::Prepared(v1::Prepared { communicator, epoch: 1, links: None });
        let closed = from_agent::Message::Closed(v1::Closed { communicator });
        up.extend([prepared, closed].map(|message| v1::FromAgent::from(message).encoded_len()));
        let ready = to_agent::Message::Ready(v1::Ready { communicator, epoch: 1 });
        down.push(v1::ToAgent::from(ready).encoded_len());
    }
    for agent in &agents {
        agent.send(from_agent::Message::Closed(v1::Closed { communicator })).await?;
    }
    Ok([up, down])
}

/// The time that control's end of TLS takes for those messages, if nothing else is done. Each message is a frame, in a
/// record of its own.
async fn records(arguments: &Arguments, topology: &Topology) -> Result<Value> {
    let folder = arguments.records.clone().context("give --records")?;
    let [up, down] = sizes(arguments, topology).await?;
    let (mut ends, mut took) = (tls::Ends::shake_hands(folder)?, Duration::ZERO);
    let frames = |sizes: Vec<usize>| sizes.into_iter().map(|size| vec![0; FRAME + size]).collect::<Vec<_>>();
    let (mut up, mut down) = (frames(up), frames(down));
    for _ in 0..arguments.count {
        for frame in &mut up {
            took += ends.up(frame)?;
        }
        for frame in &mut down {
            took += ends.down(frame)?;
        }
    }
    let us = took.as_secs_f64() * 1e6 / arguments.count as f64;
    Ok(json!({ "us_a_join": us, "messages": up.len() + down.len() }))
}

async fn sessions(arguments: &Arguments, topology: &Topology) -> Result<Value> {
    let pid = arguments.pid.context("give --pid")?;
    let before = resident_bytes(pid)?;
    let begun = Instant::now();
    let mut agents = connect_all(arguments, hellos(topology)).await?;
    let opened = begun.elapsed();
    tokio::time::sleep(PAUSE).await;
    let memory = resident_bytes(pid)?.saturating_sub(before);
    let (hosts, mut took) = (agents.len(), Vec::new());
    for number in 0..arguments.count {
        let (one, other) = (number % (hosts / 2), hosts / 2 + number * 7 % (hosts / 2));
        let pair = agents.get_disjoint_mut([one, other])?;
        took.push(form(pair, &number.to_string()).await?.as_secs_f64() * 1e3);
        tokio::time::sleep(BETWEEN).await;
    }
    let open = agents.iter().filter(|agent| !agent.up.is_closed()).count();
    ensure!(open == hosts, "of {hosts} sessions {open} are open at the end");
    Ok(json!({
        "bytes_a_session": memory as f64 / hosts as f64,
        "opened_s": opened.as_secs_f64(),
        "joins_ms": took,
    }))
}

/// A host's agent: answers the first question with new flows every second, as long as control takes them.
async fn stream(mut agent: Agent, host: String) -> Result<()> {
    let question = loop {
        if let to_agent::Message::Question(question) = agent.next().await? {
            break question;
        }
    };
    let (parts, call) = agent.answer();
    let feed = async {
        let mut ticks = tokio::time::interval(Duration::from_secs(1));
        for second in 0.. {
            ticks.tick().await;
            let flows = (0..FLOWS).map(|flow| new_flow(second * FLOWS + flow)).collect();
            let part =
                v1::AnswerPart { id: question.id, host: host.clone(), flows, ..v1::AnswerPart::default() };
            if parts.send(part).await.is_err() {
                break;
            }
        }
    };
    tokio::select! {
        ended = call => Ok(ended?),
        () = feed => Ok(()),
    }
}

/// A flow of TCP as an agent tells of it.
fn new_flow(number: u32) -> v1::Flow {
    let direction = || v1::FlowDirection {
        packets: 1_000_000,
        bytes: 1 << 30,
        rate_bps: RATE,
        first_ns: u64::MAX / 16,
        last_ns: u64::MAX / 8,
        min_rtt_ns: 50_000,
        ..v1::FlowDirection::default()
    };
    v1::Flow {
        interface: "eth0".to_owned(),
        local: "10.0.0.1".to_owned(),
        local_port: number % 65_536,
        remote: "10.0.0.2".to_owned(),
        remote_port: 4000,
        egress: Some(direction()),
        ingress: Some(direction()),
        ..v1::Flow::default()
    }
}

async fn streams(arguments: &Arguments, topology: &Topology) -> Result<Value> {
    let pid = arguments.pid.context("give --pid")?;
    let agents = connect_all(arguments, hellos(topology)).await?;
    let (hosts, mut streams) = (agents.len(), JoinSet::new());
    for (agent, host) in agents.into_iter().zip(topology.hosts()) {
        streams.spawn(stream(agent, host.name.clone()));
    }
    let channel = remote(&arguments.control, arguments.tls.as_deref(), OPERATOR)?.connect().await?;
    let patience_ns = u64::try_from(LIMIT.as_nanos())?;
    let request = v1::AskRequest {
        kind: v1::RowKind::Flow.into(),
        follow: true,
        patience_ns,
        ..v1::AskRequest::default()
    };
    let mut replies = OperatorClient::new(channel).ask(request).await?.into_inner();
    let mut answering = BTreeSet::new();
    while answering.len() < hosts {
        let reply =
            tokio::time::timeout(LIMIT, replies.message()).await.context("not all hosts answer")??;
        answering.insert(whole(reply)?.host);
    }
    let (before, begun, mut flows) = (processor_time(pid)?, Instant::now(), 0);
    let until = tokio::time::Instant::now() + Duration::from_secs(arguments.count as u64);
    while let Ok(reply) = tokio::time::timeout_at(until, replies.message()).await {
        flows += whole(reply?)?.flows.len();
    }
    let (took, elapsed) = (processor_time(pid)?.saturating_sub(before), begun.elapsed().as_secs_f64());
    let (rate, expected) = (flows as f64 / elapsed, hosts as f64 * f64::from(FLOWS));
    Ok(json!({ "processors": took.as_secs_f64() / elapsed, "flows_per_second": rate, "expected": expected }))
}

/// A reply of a stream that nothing ends.
fn whole(reply: Option<v1::AskReply>) -> Result<v1::AskReply> {
    let reply = reply.context("control ends the stream")?;
    match &reply.end {
        Some(end) => bail!("{} answers no more: {}", reply.host, end.failure),
        None => Ok(reply),
    }
}

/// The wires between agents of which one spine is congested.
struct Fabric {
    topology: Topology,
    congested: AtomicUsize,
}

/// A recipe that has come to a host.
struct Delivered {
    host: HostId,
    at: Instant,
    recipe: v1::Recipe,
}

impl Fabric {
    /// Where an agent is, of which control knows that it traces and probes.
    fn hellos(&self) -> Vec<v1::Hello> {
        let hello = |(number, host): (u8, &harmonaize_planner::Host)| {
            let address = Ipv4Addr::new(10, 0, 0, number);
            let capabilities = v1::Capabilities {
                trace: true,
                probe: true,
                probe_address: format!("{address}:4001"),
                probe_key: vec![number; 32],
                congestion_reports: true,
                ..v1::Capabilities::default()
            };
            v1::Hello {
                listen: format!("{address}:4000"),
                capabilities: Some(capabilities),
                ..hello_of(&host.name)
            }
        };
        (1..).zip(self.topology.hosts()).map(hello).collect()
    }

    /// The host at an address, which may have a port.
    fn host_at(&self, address: &str) -> Result<HostId> {
        let [.., number] = address.split(':').next().unwrap_or_default().parse::<Ipv4Addr>()?.octets();
        Ok(HostId(usize::from(number).checked_sub(1).context("no host's address")?))
    }

    /// Which way the packets of a connection go.
    fn path(&self, from: HostId, to: HostId, ports: [u32; 2]) -> Result<Path> {
        let mut paths = self.topology.equal_cost_paths(from, to);
        let count = paths.len();
        ensure!(count > 0, "no path");
        Ok(paths.swap_remove(ports.iter().sum::<u32>() as usize % count))
    }

    fn trace(&self, host: HostId, question: v1::TracePaths) -> Result<v1::PathsTraced> {
        let to = self.host_at(&question.address)?;
        let traced = |pair: v1::PortPair| {
            let v1::PortPair { source_port, destination_port } = pair;
            let path = self.path(host, to, [source_port, destination_port])?;
            let switches = self.topology.switches_of(&path).into_iter();
            let hops = switches
                .filter_map(|id| Some(self.topology.switches().get(id.0)?.addresses.first()?.to_string()));
            Ok(v1::TracedPath { source_port, destination_port, hops: hops.collect() })
        };
        let paths = question.ports.into_iter().map(traced).collect::<Result<_>>()?;
        Ok(v1::PathsTraced { request: question.request, paths, error: String::new() })
    }

    /// What a train of packets tells, and how long it is on its way.
    fn probe(&self, question: &v1::ProbePath) -> (v1::PathProbed, Duration) {
        let congested = SwitchId(self.congested.load(Ordering::Relaxed));
        let switch = |hop: &v1::Hop| self.topology.switch_at(hop.addresses.first()?.parse().ok()?);
        let slow = question.via.iter().filter_map(switch).any(|switch| switch == congested);
        let received_bps = if slow { CONGESTED_RATE } else { RATE };
        let time = Duration::from_secs_f64(f64::from(question.bytes) * 8.0 / received_bps as f64);
        let told = v1::PathProbed {
            request: question.request,
            received_bps,
            sent_bps: RATE,
            packets_sent: 46,
            packets_received: 46,
            source_port: 50_000,
            cross_traffic_bps: Some(0),
            ..v1::PathProbed::default()
        };
        (told, time)
    }

    /// Answers what control asks of a host's agent until the session ends.
    async fn serve(&self, host: HostId, mut agent: Agent, told: mpsc::Sender<Delivered>) -> Result<()> {
        while let Some(message) = agent.next_or_end().await? {
            let answer = match message {
                to_agent::Message::Form(recipe) | to_agent::Message::Change(recipe) => {
                    let v1::Recipe { communicator, epoch, .. } = recipe;
                    told.send(Delivered { host, at: Instant::now(), recipe }).await.ok().context("over")?;
                    from_agent::Message::Prepared(v1::Prepared { communicator, epoch, links: None })
                }
                to_agent::Message::Ready(v1::Ready { communicator, epoch }) if epoch > 1 => {
                    from_agent::Message::Switched(v1::Switched { communicator, epoch, first_segment: 1 })
                }
                to_agent::Message::TracePaths(question) => {
                    from_agent::Message::PathsTraced(self.trace(host, question)?)
                }
                to_agent::Message::ProbePath(question) => {
                    let ((answer, time), up) = (self.probe(&question), agent.up.clone());
                    // The runtime's own timer knows whole milliseconds alone.
                    tokio::task::spawn_blocking(move || {
                        std::thread::sleep(time);
                        // Nobody waits for it where the session is over.
                        let _ = up.blocking_send(from_agent::Message::PathProbed(answer).into());
                    });
                    continue;
                }
                _ => continue,
            };
            agent.send(answer).await?;
        }
        Ok(())
    }

    /// The connection along the ring by which a host leaves for another rack. Returns the peer, its port, and the spine
    /// on its path.
    fn across(&self, host: HostId, recipe: &v1::Recipe) -> Result<Option<(u32, u32, SwitchId)>> {
        let own = recipe.order.iter().position(|at| *at == recipe.me).context("not on the ring")?;
        let next = recipe.order.get((own + 1) % recipe.order.len()).context("no ring")?;
        let peer = recipe.peers.iter().find(|peer| peer.participant == *next).context("no peer")?;
        let port = *peer.source_ports.first().context("no port")?;
        let ports = if peer.initiate { [port, 4000] } else { [4000, port] };
        let path = self.path(host, self.host_at(&peer.address)?, ports)?;
        Ok(match self.topology.switches_of(&path).as_slice() {
            [_, spine, _] => Some((*next, port, *spine)),
            _ => None,
        })
    }
}

async fn reactions(arguments: &Arguments, topology: Topology) -> Result<Value> {
    let fabric = Arc::new(Fabric { topology, congested: AtomicUsize::new(usize::MAX) });
    let agents = connect_all(arguments, fabric.hellos()).await?;
    let (hosts, ups) = (agents.len(), agents.iter().map(|agent| agent.up.clone()).collect::<Vec<_>>());
    let (told, mut tells) = mpsc::channel(2 * hosts);
    let mut serving = JoinSet::new();
    for (number, agent) in agents.into_iter().enumerate() {
        let (fabric, told) = (Arc::clone(&fabric), told.clone());
        serving.spawn(async move { fabric.serve(HostId(number), agent, told).await });
    }
    tokio::time::sleep(TRACING).await;
    let (mut recipes, mut took) = (Vec::new(), Vec::new());
    for number in 0..arguments.count {
        if number % REPORTS == 0 {
            recipes = replaced(&ups, &recipes, &mut tells, &number.to_string()).await?;
        }
        let (host, epoch, communicator, (peer, source_port, spine)) = recipes
            .iter()
            .find_map(|told| {
                let across = fabric.across(told.host, &told.recipe).transpose()?;
                Some(across.map(|across| (told.host, told.recipe.epoch, told.recipe.communicator, across)))
            })
            .context("the ring stays in its rack")??;
        fabric.congested.store(spine.0, Ordering::Relaxed);
        let congestion = v1::Congestion {
            interface: "eth0".to_owned(),
            level: CongestionLevel::Severe.into(),
            cause: CongestionCause::CrossTraffic.into(),
            delay: true,
            own_bps: CONGESTED_RATE,
            capacity_bps: RATE,
            starved: true,
            ..v1::Congestion::default()
        };
        let congestion = Some(congestion);
        let report =
            v1::CongestionReport { congestion, communicator, epoch, peer, source_port, queue_pair: false };
        let (up, begun) = (ups.get(host.0).context("no such host")?, Instant::now());
        up.send(from_agent::Message::CongestionReport(report).into()).await?;
        recipes = all_delivered(&mut tells, hosts).await?;
        let last = recipes.iter().map(|told| told.at).max().context("no recipe")?;
        took.push(last.saturating_duration_since(begun).as_secs_f64() * 1e6);
        tokio::time::sleep(PAUSE).await;
        if let Ok(other) = tells.try_recv() {
            bail!("epoch {} was proposed, and nobody had reported anything", other.recipe.epoch);
        }
        if let Some(ended) = serving.try_join_next() {
            ended??;
        }
    }
    Ok(json!({ "reactions_us": took }))
}

/// A communicator of all hosts in place of the one that they had.
async fn replaced(
    ups: &[mpsc::Sender<v1::FromAgent>],
    before: &[Delivered],
    tells: &mut mpsc::Receiver<Delivered>,
    name: &str,
) -> Result<Vec<Delivered>> {
    for Delivered { host, recipe: v1::Recipe { communicator, .. }, .. } in before {
        let closed = from_agent::Message::Closed(v1::Closed { communicator: *communicator });
        ups.get(host.0).context("no such host")?.send(closed.into()).await?;
    }
    for (rank, up) in ups.iter().enumerate() {
        up.send(join_of(name, rank, ups.len())?.into()).await?;
    }
    let recipes = all_delivered(tells, ups.len()).await?;
    tokio::time::sleep(PAUSE).await;
    Ok(recipes)
}

/// What all hosts are told next.
async fn all_delivered(tells: &mut mpsc::Receiver<Delivered>, hosts: usize) -> Result<Vec<Delivered>> {
    let mut all = Vec::new();
    while all.len() < hosts {
        let next = tokio::time::timeout(LIMIT, tells.recv()).await.context("control proposes nothing")?;
        all.push(next.context("all sessions are over")?);
    }
    Ok(all)
}
