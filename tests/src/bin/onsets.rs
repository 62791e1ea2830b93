//! When recorded traces show that a path is starved. It compares what agents' analysis makes of them with the times at which cross
//! flows began.

#![forbid(unsafe_code)]

use anyhow::{Context, Result};
use clap::Parser;
use harmonaize_analysis::Nanos;
use harmonaize_analysis::congestion::{Detector, Limits, Path};
use harmonaize_analysis::trace::{Record, replay};
use harmonaize_events::Direction;
use std::collections::HashMap;
use std::path::PathBuf;

/// Prints when recorded traces show that an own connection is starved.
#[derive(Parser)]
#[command(after_help = "Example, with the times that `xtask bench control --only onset` printed:
  onsets --began 1795409211722758807,1795409219811596807 /tmp/traces/h*.trace")]
struct Arguments {
    /// When cross traffic began, in nanoseconds of CLOCK_REALTIME
    #[arg(long, value_delimiter = ',')]
    began: Vec<i64>,
    /// For how long after it began a flow may be the cause, in milliseconds
    #[arg(long, default_value_t = 200)]
    span: i64,
    /// The traces, each of one host
    #[arg(required = true)]
    traces: Vec<PathBuf>,
}

/// A while in which the analysis says the same of a connection.
#[derive(Debug, Clone, Copy)]
struct StarvedSpan {
    from_ns: i64,
    ports: (u16, u16),
}

/// A connection is said to be starved anew after so long without.
const ANEW_NS: i64 = 50_000_000;

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    for path in &arguments.traces {
        let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let (said, looks, span_ns) = starved_spans(&bytes).with_context(|| path.display().to_string())?;
        let seconds = span_ns as f64 / 1e9;
        println!("{}: {looks} looks in {seconds:.1} s, starved {} times", path.display(), said.len());
        let of = |began: &i64, said: &StarvedSpan| {
            (0..arguments.span * 1_000_000).contains(&(said.from_ns - began))
        };
        for began in &arguments.began {
            let first = said.iter().find(|said| of(began, said));
            let first = first.map(|said| ((said.from_ns - began) as f64 / 1e6, said.ports));
            if let Some((after, (local, remote))) = first {
                println!("  {began}: after {after:.1} ms, {local} to {remote}");
            }
        }
        for said in said.iter().filter(|said| !arguments.began.iter().any(|began| of(began, said))) {
            println!("  {}: of {} to {}, after no onset", said.from_ns, said.ports.0, said.ports.1);
        }
    }
    Ok(())
}

/// When own connections are said to be starved, at CLOCK_REALTIME; how often flows were looked at, and over which time.
fn starved_spans(bytes: &[u8]) -> Result<(Vec<StarvedSpan>, u64, u64)> {
    let mut detector = Detector::new(Limits::default());
    let (mut spans, mut last) = (Vec::new(), HashMap::new());
    let (mut now_ns, mut offset_ns, mut samples, mut first_ns) = (0, 0_i64, 0, None);
    replay(bytes, |record| {
        if let Record::Observer(observer) = record {
            offset_ns = observer.realtime_offset_ns;
        }
        samples += u64::from(matches!(record, Record::Totals { .. }));
        first_ns.get_or_insert(record.time().0);
        // As agents do: all that a look brought, and then what it means.
        if record.time().0 > now_ns {
            detector.advance(Nanos(now_ns));
            while detector.poll().is_some() {}
            let starved =
                detector.links().filter(|one| one.signals.starved && one.link.direction == Direction::Egress);
            for one in starved {
                let Path::Connection { local, remote, .. } = one.link.path else { continue };
                let (at_ns, ports) = (now_ns.cast_signed().saturating_add(offset_ns), (local, remote));
                let before = last.insert(ports, at_ns);
                if before.is_none_or(|before| at_ns - before >= ANEW_NS) {
                    spans.push(StarvedSpan { from_ns: at_ns, ports });
                }
            }
            now_ns = record.time().0;
        }
        detector.take(record);
    })?;
    Ok((spans, samples, now_ns.saturating_sub(first_ns.unwrap_or_default())))
}
