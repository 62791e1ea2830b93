//! Flows and findings of all hosts through control, or of one agent: filters, and what is printed.

use crate::Failure;
use crate::agent::{Agent, Socket};
use crate::control::{ControlArguments, Target};
use crate::flows::FlowTable;
use crate::operate::Operate;
use crate::output::Format;
use crate::phases::finding_text;
use crate::rotated::Rotated;
use crate::text::{clean, number_of, put};
use harmonaize_api::CAUSES;
use harmonaize_api::v1::{AskReply, AskRequest, Finding, Flow, HostEnd, RowFilter, RowKind};
use harmonaize_planner::{Bytes, Nanos};
use serde::Serialize;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, SystemTime};
use tonic::Streaming;

/// Version of the rows as JSON and YAML: `docs/rows.schema.json`. A field that is added leaves it as it is.
const SCHEMA: &str = "harmonaize.rows/1";

/// Which rows, of whom, and how they are printed.
#[derive(clap::Args)]
pub(crate) struct RowArguments {
    /// The socket of one agent's telemetry; else, or for `control`, all hosts through control.
    #[arg(long, env = "HARMONAIZE_AGENT", value_name = "unix:PATH|control")]
    agent: Option<crate::WatchTarget>,
    /// Only of these hosts.
    #[arg(long, value_name = "HOST", value_delimiter = ',')]
    host: Vec<String>,
    /// Only of these tenants.
    #[arg(long, value_name = "TENANT", value_delimiter = ',')]
    tenant: Vec<String>,
    /// Only of these communicators: an id, or tenant/name.
    #[arg(long, value_name = "COMMUNICATOR", value_delimiter = ',')]
    communicator: Vec<Target>,
    /// Only to and from these addresses; of findings, those on a path or a host of this address.
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',')]
    peer: Vec<IpAddr>,
    /// Only with these causes: of flows own or cross_traffic; of findings also unknown, compute or network.
    #[arg(long, value_name = "CAUSE", value_delimiter = ',', value_parser = clap::builder::PossibleValuesParser::new(CAUSES))]
    cause: Vec<String>,
    /// Only of this interface.
    #[arg(long, value_name = "NAME", default_value = "")]
    interface: String,
    /// Only what was seen since then: a time (UTC), or so long ago, such as 5min.
    #[arg(long, value_name = "TIME|DURATION")]
    since: Option<Past>,
    /// Only what was seen until then.
    #[arg(long, value_name = "TIME|DURATION")]
    until: Option<Past>,
    /// The last N alone; 0 for all.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 0)]
    last: u32,
    /// Go on with what is seen from now on.
    #[arg(short, long)]
    follow: bool,
    /// How long agents may take to answer; at most 1min.
    #[arg(long, value_name = "DURATION", default_value = "5s")]
    patience: Nanos,
    /// How rows are printed: table, wide, json (an object a line), yaml (a document a row), or by a template, such as
    /// `jsonpath={.host} {.remote}`.
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    output: Format,
    /// The same as `-o json`.
    #[arg(long)]
    json: bool,
    /// Rows go to the end of this file, as JSON. When it is full it becomes FILE.1, that one FILE.2, and a new one begins.
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// When it is full.
    #[arg(long, value_name = "SIZE", default_value = "64MiB", requires = "file")]
    max_bytes: Bytes,
    /// How many full ones stay.
    #[arg(long, value_name = "N", default_value_t = 4, requires = "file", value_parser = clap::value_parser!(u32).range(0..=1000))]
    keep: u32,
}

/// Where rows go.
enum Sink {
    Terminal,
    File(PathBuf, Rotated),
}

impl Sink {
    fn open(file: Option<PathBuf>, max_bytes: Bytes, keep: u32) -> Result<Self, Failure> {
        let Some(path) = file else { return Ok(Self::Terminal) };
        let opened = Rotated::open(path.clone(), max_bytes.0, keep);
        let rotated = opened.map_err(|error| Failure::Refused(format!("{}: {error}", path.display())))?;
        Ok(Self::File(path, rotated))
    }

    /// Returns whether somebody reads.
    fn put(&mut self, rows: &str) -> Result<bool, Failure> {
        match self {
            Self::Terminal => Ok(put(rows)),
            Self::File(path, rotated) => {
                let written = rotated.write(rows);
                written.map_err(|error| Failure::Refused(format!("{}: {error}", path.display())))?;
                Ok(true)
            }
        }
    }
}

/// A time in the past.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Past(SystemTime);

impl FromStr for Past {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(ago) = text.parse::<Nanos>() {
            return Ok(Self(
                SystemTime::now().checked_sub(Duration::from(ago)).unwrap_or(SystemTime::UNIX_EPOCH),
            ));
        }
        let wrong =
            |_| "neither a time, such as 2026-11-22T22:00:00Z (UTC), nor a duration such as 5min".to_owned();
        humantime::parse_rfc3339_weak(text).map(Self).map_err(wrong)
    }
}

impl Past {
    fn nanos(self) -> u64 {
        let since = self.0.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    }
}

/// A row with all its fields, for programs.
#[derive(Serialize)]
#[serde(untagged)]
enum Complete<'a> {
    Flow {
        schema: &'static str,
        host: &'a str,
        kind: &'static str,
        time_ns: u64,
        #[serde(flatten)]
        flow: &'a Flow,
    },
    Finding {
        schema: &'static str,
        host: &'a str,
        #[serde(flatten)]
        finding: &'a Finding,
    },
    Host {
        schema: &'static str,
        host: &'a str,
        kind: &'static str,
        failure: &'a str,
        omitted: u64,
    },
}

/// Replies, as they come.
enum Replies {
    Control(Box<Operate>, Streaming<AskReply>),
    AgentFlows(Option<AskReply>),
    AgentFindings(Box<Agent>, Streaming<Finding>, Box<RowFilter>),
}

impl Replies {
    async fn next(&mut self) -> Result<Option<AskReply>, Failure> {
        match self {
            Self::Control(control, stream) => {
                stream.message().await.map_err(|status| control.failure(&status))
            }
            Self::AgentFlows(reply) => Ok(reply.take()),
            Self::AgentFindings(agent, stream, filter) => loop {
                let next = stream.message().await.map_err(|status| agent.failure(&status))?;
                match next {
                    Some(finding) if !filter.matches_finding(&finding) => {}
                    next => {
                        return Ok(
                            next.map(|finding| AskReply { findings: vec![finding], ..AskReply::default() })
                        );
                    }
                }
            },
        }
    }
}

/// Asks, and prints rows as they come where it follows; else at the end, in the order of time.
pub(crate) async fn run(
    control: &ControlArguments,
    arguments: RowArguments,
    kind: RowKind,
) -> Result<String, Failure> {
    let output = if arguments.json { Format::Json } else { arguments.output.clone() };
    if arguments.file.is_some() && output != Format::Json {
        return Err(Failure::Usage("--file takes rows as JSON: say -o json too".to_owned()));
    }
    let sink = Sink::open(arguments.file.clone(), arguments.max_bytes, arguments.keep)?;
    let (last, follow) = (arguments.last as usize, arguments.follow);
    let mut replies = ask(control, arguments, kind).await?;
    let mut rows = Rows {
        flows: Vec::new(),
        findings: Vec::new(),
        table: FlowTable::new(output == Format::Wide),
        output,
        sink,
    };
    let (mut answered, mut failed) = (0, 0);
    loop {
        let reply = match replies.next().await {
            Ok(Some(reply)) => reply,
            Ok(None) => break,
            Err(failure) => {
                // What came before is worth something.
                rows.print(last)?;
                return Err(failure);
            }
        };
        if let Some(end) = &reply.end {
            let counter = if end.failure.is_empty() { &mut answered } else { &mut failed };
            *counter += 1;
            if !rows.end(&reply.host, end)? {
                return Ok(String::new());
            }
        }
        rows.add(reply);
        if follow && !rows.print(0)? {
            return Ok(String::new());
        }
    }
    if failed > 0 && answered == 0 {
        return Err(Failure::Refused("no host has answered".to_owned()));
    }
    if kind == RowKind::Flow && !rows.output.is_for_programs() && rows.flows.is_empty() && !follow {
        return Ok("no flow has been seen\n".to_owned());
    }
    rows.print(last)?;
    Ok(String::new())
}

async fn ask(control: &ControlArguments, arguments: RowArguments, kind: RowKind) -> Result<Replies, Failure> {
    let mut filter = RowFilter {
        tenants: arguments.tenant,
        communicators: Vec::new(),
        peers: arguments.peer.iter().map(ToString::to_string).collect(),
        causes: arguments.cause,
        since_ns: arguments.since.map_or(0, Past::nanos),
        until_ns: arguments.until.map_or(0, Past::nanos),
        interface: arguments.interface,
    };
    let (last, follow) = (arguments.last, arguments.follow);
    if let Some(crate::WatchTarget::Agent(socket)) = arguments.agent {
        let usage = |text: &str| Failure::Usage(format!("{text}; leave --agent out, or set it to control"));
        if !arguments.host.is_empty() {
            return Err(usage("an agent has one host: --host asks control"));
        }
        for target in &arguments.communicator {
            let Target::Id(id) = target else {
                return Err(usage("an agent has ids of communicators, and no names"));
            };
            filter.communicators.push(id.0);
        }
        return match kind {
            RowKind::Flow if follow => Err(usage("--follow of flows asks control")),
            RowKind::Flow => agent_flows(&socket, filter).await,
            _ if !filter.tenants.is_empty() => Err(usage("--tenant of findings asks control")),
            _ => {
                let mut agent = Agent::connect(&socket).await?;
                // A filter is the reader's own here: what it takes is counted behind it.
                let all = filter == RowFilter::default();
                let stream = agent.phases(if all { last } else { 0 }, follow).await?;
                Ok(Replies::AgentFindings(Box::new(agent), stream, Box::new(filter)))
            }
        };
    }
    let mut operate = Box::new(Operate::connect(control).await?);
    for target in &arguments.communicator {
        filter.communicators.push(operate.resolve(target).await?.0);
    }
    let request = AskRequest {
        kind: kind.into(),
        filter: Some(filter),
        hosts: arguments.host,
        last,
        follow,
        patience_ns: arguments.patience.0,
        duration_ns: 0,
    };
    let stream = operate.ask(request).await?;
    Ok(Replies::Control(operate, stream))
}

async fn agent_flows(socket: &Socket, filter: RowFilter) -> Result<Replies, Failure> {
    let (time_ns, mut flows) = Agent::connect(socket).await?.flows(filter.interface.clone()).await?;
    flows.retain(|flow| filter.matches_flow(flow));
    Ok(Replies::AgentFlows(Some(AskReply { time_ns, flows, ..AskReply::default() })))
}

/// Rows that are to be printed.
struct Rows {
    flows: Vec<(String, u64, Flow)>,
    findings: Vec<(String, Finding)>,
    table: FlowTable,
    output: Format,
    sink: Sink,
}

impl Rows {
    fn add(&mut self, reply: AskReply) {
        let AskReply { host, time_ns, flows, findings, .. } = reply;
        self.flows.extend(flows.into_iter().map(|flow| (host.clone(), time_ns, flow)));
        self.findings.extend(findings.into_iter().map(|finding| (host.clone(), finding)));
    }

    /// Says what is missing of a host. Returns whether somebody reads.
    fn end(&mut self, host: &str, end: &HostEnd) -> Result<bool, Failure> {
        let HostEnd { failure, omitted } = end;
        if failure.is_empty() && *omitted == 0 {
            return Ok(true);
        }
        // A template of flows or findings selects nothing here.
        if matches!(self.output, Format::Json | Format::Yaml) {
            return self.sink.put(&self.output.row(&Complete::Host {
                schema: SCHEMA,
                host,
                kind: "host",
                failure,
                omitted: *omitted,
            }));
        }
        let host = clean(host);
        if !failure.is_empty() {
            let failure: String = failure.chars().filter(|c| !c.is_control()).collect();
            eprintln!("harmonaize: {host}: {failure}");
        }
        if *omitted > 0 {
            let rows = number_of(*omitted, "row is", "rows are");
            eprintln!("harmonaize: {host}: {rows} missing, beyond the agent's limit");
        }
        Ok(true)
    }

    /// Prints rows in the order of time, the last so many where that is not 0. Returns whether somebody reads.
    fn print(&mut self, last: usize) -> Result<bool, Failure> {
        let (mut flows, mut findings) = (std::mem::take(&mut self.flows), std::mem::take(&mut self.findings));
        findings.sort_by_key(|(_, finding)| finding.time_ns);
        if last > 0 {
            flows.sort_by_key(|(_, _, flow)| flow.last_packet_ns());
            flows.drain(..flows.len().saturating_sub(last));
            findings.drain(..findings.len().saturating_sub(last));
        }
        let mut text = String::new();
        if self.output.is_for_programs() {
            for (host, time_ns, flow) in &flows {
                let row = Complete::Flow { schema: SCHEMA, host, kind: "flow", time_ns: *time_ns, flow };
                text += &self.output.row(&row);
            }
            for (host, finding) in &findings {
                text += &self.output.row(&Complete::Finding { schema: SCHEMA, host, finding });
            }
        } else {
            text += &self.table.rows(&flows);
            text.extend(findings.iter().map(|(host, finding)| finding_text(host, finding)));
        }
        self.sink.put(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_past() {
        assert_eq!("1970-01-01T00:00:01Z".parse::<Past>().unwrap().nanos(), 1_000_000_000);
        let ago = "5min".parse::<Past>().unwrap().0.elapsed().unwrap();
        assert!(ago >= Duration::from_secs(300) && ago < Duration::from_secs(360));
        assert!("yesterday".parse::<Past>().is_err());
    }
}
