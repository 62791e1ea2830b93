//! `harmonaize trace`: records agents' telemetry, or reads recorded files, and writes a trace for Perfetto; or compares two.

use crate::agent::{Agent, Socket};
use crate::control::ControlArguments;
use crate::operate::Operate;
use crate::perfetto::{Builder, encode};
use crate::text::{bytes, clean, duration, number_of};
use crate::{Failure, WatchTarget};
use harmonaize_analysis::trace::{Record, Replayed, diff_records, replay};
use harmonaize_api::v1::{AskReply, AskRequest, RowKind, TracePart};
use harmonaize_planner::Nanos;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

/// More about the command.
pub(crate) const HELP: &str = "\
Open the file at https://ui.perfetto.dev, or with trace_processor. It holds a track for each communicator
(operations, each rank's calls, segments by channel, what passed to and from each participant) and one for
each host (rates of its interfaces, flows, and the bursts of each, out and in, with what was marked, lost
or sent again). Arrows join an operation with its bursts. Times are wall time. Where by the hosts' clocks messages arrive
before they are sent, hosts are moved so that operations end everywhere at the same time.

With --diff two recorded files are compared instead. The JSON has `first` and `second`, the records that only
the one and only the other has, each with its kind as `record`, its `time_ns` (CLOCK_MONOTONIC of its host) and
what it `says`; `common`, how many pairs say the same within the tolerance; and `largest_ns`, how far apart in
time the furthest of them are.

Without --agent, control has the agents of all hosts, or of those of --host, record, and hands on what they send: 512 MiB in all.

Examples:
  harmonaize trace --seconds 5 --out all.pftrace    of all hosts, through control
  harmonaize trace --host h0,h1 --seconds 5 --out both.pftrace
  harmonaize trace --agent unix:/run/harmonaize/telemetry.sock --seconds 5 --out a.pftrace
  harmonaize trace --agent unix:/run/h0.sock,unix:/run/h1.sock --seconds 5 --out both.pftrace
  harmonaize trace --from h0.trace --from h1.trace --out both.pftrace
  harmonaize trace --diff before.trace after.trace --tolerance 1ms | jq .common";

/// Most bytes that are recorded, or read from a file.
const MAX_BYTES: u64 = 4 << 30;

/// What a host's agent recorded.
#[derive(Default)]
struct Recorded {
    bytes: Vec<u8>,
    /// What turns its times into CLOCK_REALTIME.
    offset_ns: i64,
}

impl Recorded {
    /// Takes a part in, of a trace that has `most` bytes at most.
    fn append(&mut self, part: &TracePart, most: u64) -> Result<(), Failure> {
        self.bytes.extend_from_slice(&part.bytes);
        if part.realtime_offset_ns != 0 {
            self.offset_ns = part.realtime_offset_ns;
        }
        match self.bytes.len() as u64 > most {
            true => Err(Failure::Refused(format!("more than {} were recorded", bytes(most)))),
            false => Ok(()),
        }
    }
}

/// What each agent recorded, by a name of it.
type Sources = Vec<(String, Recorded)>;

/// Records from agents, all at the same time: those of the sockets, else those of hosts through control.
///
/// # Errors
/// Nothing was recorded, or the file cannot be written. Where control broke off, what came before is in the file.
pub(crate) async fn record(
    control: &ControlArguments,
    (agents, hosts): (Vec<WatchTarget>, Vec<String>),
    seconds: u32,
    out: &Path,
    keep: Option<&Path>,
) -> Result<String, Failure> {
    let sockets = agents.iter().filter_map(|target| match target {
        WatchTarget::Agent(socket) => Some(socket.clone()),
        WatchTarget::Control => None,
    });
    let sockets: Vec<Socket> = sockets.collect();
    if !sockets.is_empty() && (sockets.len() < agents.len() || !hosts.is_empty()) {
        let text = "an agent has one host: --host asks control; leave --agent out, or set it to control";
        return Err(Failure::Usage(text.to_owned()));
    }
    let sources = if sockets.is_empty() { hosts.len() } else { sockets.len() };
    if keep.is_some() && sources != 1 {
        return Err(Failure::Usage("--keep keeps what one agent sends".to_owned()));
    }
    let (recorded, ended) = match sockets.is_empty() {
        true => record_through_control(control, hosts, seconds).await?,
        false => (record_from(&sockets, seconds).await?, Ok(())),
    };
    let (mut builder, mut all) = (Builder::default(), Vec::new());
    for (source, (shown, Recorded { bytes, offset_ns })) in recorded.into_iter().enumerate() {
        if let Some(keep) = keep {
            write(keep, &bytes)?;
        }
        builder.begin(source, offset_ns);
        match add(&mut builder, &bytes, &shown) {
            Ok(replayed) => all.push((shown, replayed)),
            // It costs no other host's: an agent may be of a version whose traces this program does not read.
            Err(failure) if sockets.is_empty() => eprintln!("harmonaize: {failure}"),
            Err(failure) => return Err(failure),
        }
    }
    if all.is_empty() {
        ended?;
        return Err(Failure::Refused("no host has a trace that can be read".to_owned()));
    }
    let text = finish(builder, out, &all)?;
    ended.map(|()| text)
}

/// What each of these agents records, with its name.
async fn record_from(sockets: &[Socket], seconds: u32) -> Result<Sources, Failure> {
    let most = MAX_BYTES / sockets.len().max(1) as u64;
    let tasks = sockets.iter().map(|socket| tokio::spawn(record_one(socket.clone(), seconds, most)));
    let tasks: Vec<_> = tasks.collect();
    let mut all = Vec::new();
    for (socket, task) in sockets.iter().zip(tasks) {
        let recorded = task.await.map_err(|error| Failure::Refused(error.to_string()))??;
        all.push((format!("the agent at {}", socket.0.display()), recorded));
    }
    Ok(all)
}

async fn record_one(socket: Socket, seconds: u32, most: u64) -> Result<Recorded, Failure> {
    let mut agent = Agent::connect(&socket).await?;
    let mut stream = agent.trace(nanos(seconds)).await?;
    let mut recorded = Recorded::default();
    while let Some(part) = stream.message().await.map_err(|status| agent.failure(&status))? {
        recorded.append(&part, most)?;
    }
    Ok(recorded)
}

/// Returns what the agents of these hosts record, or of all, with the host's name. Also returns whether control has handed on all
/// of it. Hosts that do not answer are named on standard error.
async fn record_through_control(
    control: &ControlArguments,
    hosts: Vec<String>,
    seconds: u32,
) -> Result<(Sources, Result<(), Failure>), Failure> {
    let mut control = Operate::connect(control).await?;
    let (kind, duration_ns) = (RowKind::Trace.into(), nanos(seconds).0);
    let request = AskRequest { kind, hosts, duration_ns, ..AskRequest::default() };
    let mut replies = control.ask(request).await?;
    let mut all: BTreeMap<String, Recorded> = BTreeMap::new();
    let ended = loop {
        let AskReply { host, trace, end, .. } = match replies.message().await {
            Ok(Some(reply)) => reply,
            Ok(None) => break Ok(()),
            Err(status) => break Err(control.failure(&status)),
        };
        let host = clean(&host);
        if let Some(end) = end.filter(|end| !end.failure.is_empty()) {
            let failure: String = end.failure.chars().filter(|c| !c.is_control()).collect();
            eprintln!("harmonaize: {host}: {failure}");
        }
        if let Some(part) = trace {
            all.entry(host).or_default().append(&part, MAX_BYTES)?;
        }
    };
    match ended {
        Err(failure) if all.is_empty() => Err(failure),
        Ok(()) if all.is_empty() => Err(Failure::Refused("no host has recorded anything".to_owned())),
        ended => Ok((all.into_iter().collect(), ended)),
    }
}

fn nanos(seconds: u32) -> Nanos {
    Nanos(u64::from(seconds) * 1_000_000_000)
}

/// Converts recorded files, one for each host.
pub(crate) fn convert(from: &[PathBuf], out: &Path) -> Result<String, Failure> {
    let mut builder = Builder::default();
    let mut all = Vec::new();
    for (source, path) in from.iter().enumerate() {
        let shown = path.display().to_string();
        let recorded = read(path)?;
        builder.begin(source, 0);
        let replayed = add(&mut builder, &recorded, &shown)?;
        all.push((shown, replayed));
    }
    finish(builder, out, &all)
}

/// What two recorded files do not have in common.
pub(crate) fn diff(first: &Path, second: &Path, tolerance: Nanos) -> Result<String, Failure> {
    let records = |path: &Path| {
        let mut records = Vec::new();
        let replayed = replay(&read(path)?, |record| records.push(*record));
        replayed.map_err(|error| Failure::Refused(format!("{}: {error}", path.display())))?;
        Ok::<_, Failure>(records)
    };
    let difference = diff_records(&records(first)?, &records(second)?, tolerance.into());
    let side = |records: &[Record]| records.iter().map(stats).collect::<Vec<_>>();
    let told = json!({
        "first": side(&difference.first), "second": side(&difference.second),
        "common": difference.common, "largest_ns": Nanos::from(difference.largest).0,
    });
    Ok(format!("{told:#}\n"))
}

fn stats(record: &Record) -> Value {
    let (kind, says) = match record {
        Record::Observer(observer) => ("observer", format!("{observer:?}")),
        Record::Event(event) => ("event", format!("{event:?}")),
        Record::Tcp { key, flow, .. } => ("tcp", format!("{key:?} {flow:?}")),
        Record::Roce { key, counters, .. } => ("roce", format!("{key:?} {counters:?}")),
        Record::Totals { totals, .. } => ("totals", format!("{totals:?}")),
        Record::Mark(mark) => ("mark", format!("{mark:?}")),
        Record::Owner(owner) => ("owner", format!("{owner:?}")),
        Record::Link(link) => ("link", format!("{link:?}")),
        Record::Lost(lost) => ("lost", format!("{lost:?}")),
        Record::Port(port) => ("port", format!("{port:?}")),
        Record::Completion(completion) => ("completion", format!("{completion:?}")),
    };
    json!({"record": kind, "time_ns": record.time().0, "says": says})
}

fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    let shown = path.display();
    let refused = |error: std::io::Error| Failure::Refused(format!("{shown}: {error}"));
    let mut recorded = Vec::new();
    let file = std::fs::File::open(path).map_err(refused)?;
    file.take(MAX_BYTES + 1).read_to_end(&mut recorded).map_err(refused)?;
    if recorded.len() as u64 > MAX_BYTES {
        return Err(Failure::Refused(format!("{shown}: more than {}", bytes(MAX_BYTES))));
    }
    Ok(recorded)
}

fn add(builder: &mut Builder, recorded: &[u8], from: &str) -> Result<Replayed, Failure> {
    let replayed = replay(recorded, |record| builder.take(record));
    replayed.map_err(|error| Failure::Refused(format!("{from}: {error}")))
}

fn finish(mut builder: Builder, out: &Path, from: &[(String, Replayed)]) -> Result<String, Failure> {
    let records = number_of(builder.records(), "record", "records");
    let moved = builder.align();
    let encoded = encode(&builder.finish());
    write(out, &encoded)?;
    let mut said = format!("{}: {} from {records}\n", out.display(), bytes(encoded.len() as u64));
    for (name, by) in moved {
        let (by, later) = (duration(by.unsigned_abs()), if by > 0 { "later" } else { "earlier" });
        said += &format!(
            "{name}: shown {by} {later} than by its clock, where messages arrive before they are sent\n"
        );
    }
    for (name, replayed) in from {
        if let Some(at) = replayed.torn {
            said += &format!("{name} ends within a record, at byte {at}: what is before it was used\n");
        }
        if replayed.skipped > 0 {
            let skipped = number_of(replayed.skipped, "record", "records");
            said += &format!("{name} has {skipped} of kinds that this build does not know\n");
        }
    }
    Ok(said)
}

fn write(path: &Path, content: &[u8]) -> Result<(), Failure> {
    let refused = |error: std::io::Error| Failure::Refused(format!("{}: {error}", path.display()));
    std::fs::write(path, content).map_err(refused)
}
