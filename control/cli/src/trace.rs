//! `harmonaize trace`: records an agent's telemetry, or reads recorded files, and writes a trace for Perfetto; or compares two.

use crate::Failure;
use crate::agent::{Agent, Socket};
use crate::perfetto::{Builder, encode};
use crate::text::{bytes, duration, number_of};
use harmonaize_analysis::trace::{Record, Replayed, diff_records, replay};
use harmonaize_planner::Nanos;
use serde_json::{Value, json};
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

Examples:
  harmonaize trace --agent unix:/run/harmonaize/telemetry.sock --seconds 5 --out a.pftrace
  harmonaize trace --agent unix:/run/h0.sock,unix:/run/h1.sock --seconds 5 --out both.pftrace
  harmonaize trace --from h0.trace --from h1.trace --out both.pftrace
  harmonaize trace --diff before.trace after.trace --tolerance 1ms | jq .common";

/// Most bytes that are recorded, or read from a file.
const MAX_BYTES: u64 = 4 << 30;

/// Records from agents, all at the same time.
pub(crate) async fn record(
    sockets: &[Socket],
    seconds: u32,
    out: &Path,
    keep: Option<&Path>,
) -> Result<String, Failure> {
    let most = MAX_BYTES / sockets.len().max(1) as u64;
    let tasks = sockets.iter().map(|socket| tokio::spawn(record_one(socket.clone(), seconds, most)));
    let tasks: Vec<_> = tasks.collect();
    let (mut builder, mut all) = (Builder::default(), Vec::new());
    for (source, (socket, task)) in sockets.iter().zip(tasks).enumerate() {
        let (recorded, offset_ns) = task.await.map_err(|error| Failure::Refused(error.to_string()))??;
        if let Some(keep) = keep {
            write(keep, &recorded)?;
        }
        let shown = format!("the agent at {}", socket.0.display());
        builder.begin(source, offset_ns);
        let replayed = add(&mut builder, &recorded, &shown)?;
        all.push((shown, replayed));
    }
    finish(builder, out, &all)
}

/// Records from an agent, and what turns their times into CLOCK_REALTIME.
async fn record_one(socket: Socket, seconds: u32, most: u64) -> Result<(Vec<u8>, i64), Failure> {
    let mut agent = Agent::connect(&socket).await?;
    let mut stream = agent.trace(Nanos(u64::from(seconds) * 1_000_000_000)).await?;
    let (mut recorded, mut offset_ns) = (Vec::new(), 0);
    while let Some(part) = stream.message().await.map_err(|status| agent.failure(&status))? {
        recorded.extend_from_slice(&part.bytes);
        if part.realtime_offset_ns != 0 {
            offset_ns = part.realtime_offset_ns;
        }
        if recorded.len() as u64 > most {
            return Err(Failure::Refused(format!("more than {} were recorded", bytes(most))));
        }
    }
    Ok((recorded, offset_ns))
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
