//! What it costs control to pass on the rows of many made-up agents to a reader who follows.
//!
//! `cargo run --release -p harmonaize-server --example rows -- AGENTS ROWS SECONDS`: each agent sends so many rows a second. Control is a
//! process of its own, whose processor time is read. The connections have no TLS.

use anyhow::{Context, Result, bail};
use harmonaize_api::v1::operator_client::OperatorClient;
use harmonaize_api::v1::provider_client::ProviderClient;
use harmonaize_api::v1::{AnswerPart, AskRequest, Flow, FlowDirection, FlowOwner, RowKind, to_agent};
use harmonaize_planner::Topology;
use harmonaize_server::{Config, Server};
use harmonaize_testkit::agents::{Agent, hello_of};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};

/// How long all agents may take to answer.
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> Result<()> {
    harmonaize_identity::raise_open_files();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |position: usize| -> Result<u64> {
        arguments.get(position).context("AGENTS ROWS SECONDS")?.parse().context("a number is expected")
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match arguments.first().map(String::as_str) {
        Some("control") => runtime.block_on(control(number(1)?)),
        _ => runtime.block_on(measure(number(0)?, number(1)?, number(2)?)),
    }
}

async fn control(hosts: u64) -> Result<()> {
    let mut topology = "switch = [{ name = \"s\" }]\n".to_owned();
    let each = |text: &dyn Fn(u64) -> String| (0..hosts).map(text).collect::<String>();
    topology += &format!("host = [{}]\n", each(&|host| format!("{{ name = \"h{host}\" }},")));
    let link = |host| format!("{{ from = \"h{host}\", to = \"s\", rate = \"1Gbit/s\" }},");
    topology += &format!("link = [{}]\n", each(&link));
    let text =
        "listen = \"127.0.0.1:0\"\ntopology = \"\"\ninsecure_loopback = true\nsession_timeout = \"60s\"\n";
    let server = Server::bind(Config::parse(text, Topology::parse(&topology)?)?).await?;
    println!("{}", server.local_address());
    server.run(std::future::pending()).await?;
    Ok(())
}

/// Control, until this is dropped.
struct Control(Child);

impl Drop for Control {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Control {
    /// Its processor time so far, user's and system's.
    fn cpu(&self) -> Result<Duration> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.0.id()))?;
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
        let ticks =
            |position: usize| -> Result<u64> { Ok(fields.get(position).context("no times")?.parse()?) };
        // utime and stime, in hundredths of a second on Linux.
        Ok(Duration::from_millis((ticks(11)? + ticks(12)?) * 10))
    }

    /// The memory that it has taken at most, in KiB.
    fn memory(&self) -> Result<String> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        Ok(line.context("no VmHWM")?.trim().to_owned())
    }
}

async fn measure(agents: u64, rows: u64, seconds: u64) -> Result<()> {
    let mut child = Command::new(std::env::current_exe()?)
        .args(["control", &agents.to_string()])
        .stdout(Stdio::piped())
        .spawn()?;
    let mut address = String::new();
    BufReader::new(child.stdout.take().context("no output")?).read_line(&mut address)?;
    let control = Control(child);
    let endpoint = Endpoint::from_shared(format!("http://{}", address.trim()))?;
    for host in 0..agents {
        let channel = endpoint.connect().await?;
        let (agent, _) = Agent::hello(channel.clone(), hello_of(&format!("h{host}"))).await?;
        tokio::spawn(play(agent, channel, format!("h{host}"), rows));
    }
    let request = AskRequest {
        kind: RowKind::Flow.into(),
        follow: true,
        patience_ns: u64::try_from(PATIENCE.as_nanos())?,
        ..AskRequest::default()
    };
    let mut replies = OperatorClient::connect(endpoint).await?.ask(request).await?.into_inner();
    let mut seen: BTreeMap<String, u64> = BTreeMap::new();
    let deadline = Instant::now() + PATIENCE;
    while (seen.len() as u64) < agents {
        let reply = replies.message().await?.context("the answer has ended")?;
        if let Some(end) = reply.end {
            bail!("{}: {}", reply.host, end.failure);
        }
        seen.insert(reply.host, 0);
        if Instant::now() > deadline {
            bail!("{} of {agents} agents answer", seen.len());
        }
    }
    let (began, before) = (Instant::now(), control.cpu()?);
    let mut count = 0;
    while began.elapsed() < Duration::from_secs(seconds) {
        let reply = replies.message().await?.context("the answer has ended")?;
        count += reply.flows.len();
    }
    let (took, cpu) = (began.elapsed(), control.cpu()?.saturating_sub(before));
    println!(
        "{agents} agents, {rows} rows a second each: {:.0} rows/s arrived in {:.1} s; control took {:.3} of a core, {} at most",
        count as f64 / took.as_secs_f64(),
        took.as_secs_f64(),
        cpu.as_secs_f64() / took.as_secs_f64(),
        control.memory()?,
    );
    Ok(())
}

/// An agent that answers the first question for as long as it is read.
async fn play(mut agent: Agent, channel: Channel, host: String, rows: u64) -> Result<()> {
    let question = loop {
        // Nothing is said to an agent that nobody asks.
        match agent.next_or_end().await {
            Ok(Some(to_agent::Message::Question(question))) => break question,
            Ok(None) => return Ok(()),
            _ => {}
        }
    };
    let (parts, queue) = mpsc::channel(1);
    let mut client = ProviderClient::new(channel);
    let call = tokio::spawn(async move { client.answer(ReceiverStream::new(queue)).await });
    let way = FlowDirection { packets: 1, bytes: 1500, first_ns: 1, last_ns: 1, ..FlowDirection::default() };
    let owner = FlowOwner { tenant: "tenant".to_owned(), communicator: 7, ..FlowOwner::default() };
    let flow = |port| Flow {
        interface: "eth0".to_owned(),
        local: "10.64.0.1".to_owned(),
        local_port: port,
        remote: "10.64.0.2".to_owned(),
        remote_port: 7200,
        egress: Some(way),
        ingress: Some(way),
        owner: Some(owner.clone()),
        ..Flow::default()
    };
    let mut ticks = interval(Duration::from_secs(1));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let flows = (0..u32::try_from(rows)?).map(flow).collect();
        let part =
            AnswerPart { id: question.id, host: host.clone(), time_ns: 1, flows, ..AnswerPart::default() };
        if parts.send(part).await.is_err() {
            let _ = call.await;
            return Ok(());
        }
    }
}
