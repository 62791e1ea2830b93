//! One rank of an inference-like job: small AllReduces at a steady rate, with a target for their 99th percentile.
#![forbid(unsafe_code)]

use anyhow::{Context, Result, ensure};
use clap::Parser;
use harmonaize_bench::report::{Line, now_us};
use harmonaize_bench::tenant::{Participant, Seat};
use harmonaize_client::{Constraints, Negotiated, ReduceOp};
use signal_hook::consts::{SIGINT, SIGTERM};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Answers requests: an AllReduce for each, whose result is checked, and a line of JSON. Rank 0 has agreed on a target for them before,
/// with the provider's counter-offer where the target cannot be had. SIGTERM to any rank ends all of them after the same one.
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    seat: Seat,
    /// Bytes of an AllReduce of f32
    #[arg(long, default_value_t = 16 << 10)]
    bytes: usize,
    /// From one request to the next, in milliseconds
    #[arg(long, default_value_t = 50)]
    every_ms: u64,
    /// 99 of 100 end within so many milliseconds
    #[arg(long, default_value_t = 25)]
    p99_ms: u64,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    let elements = arguments.bytes / 4;
    ensure!(elements >= 2, "a request has at least 8 bytes");
    let member = Participant::join(&arguments.seat, arguments.bytes as u64 + 4096)?;
    let tensor = member.tensor::<f32>(elements)?;
    let (rank, ranks) = (member.rank(), member.ranks());
    Line::Start { at_us: now_us(), rank, ranks }.print()?;
    if rank == 0 {
        member.print_events()?;
        agree(&member, &arguments)?;
    }
    member.barrier()?;
    let every = Duration::from_millis(arguments.every_ms);
    let (mut values, mut next) = (vec![0.0; elements], Instant::now());
    for request in 0_u64.. {
        next += every;
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        let own = (request % 1000) as f32 + rank as f32;
        values.fill(own);
        let wish = values.last_mut().context("no element")?;
        *wish = if stop.load(Ordering::Relaxed) { 1.0 } else { 0.0 };
        tensor.write(0, &values)?;
        let (_, took) = member.all_reduce(&tensor, ReduceOp::Sum)?;
        tensor.read(0, &mut values)?;
        let expected = (request % 1000) as f32 * ranks as f32 + (ranks * (ranks - 1) / 2) as f32;
        let (wish, sums) = values.split_last().context("no element")?;
        ensure!(sums.iter().all(|sum| *sum == expected), "request {request}: a sum is not {expected}");
        Line::Served { at_us: now_us(), request, collective_us: took.as_micros() as u64 }.print()?;
        if *wish > 0.0 {
            break;
        }
    }
    if rank == 0 {
        let record = member.client().agreement(&arguments.seat.name)?.record;
        let (operations, late, breaches) = (record.operations, record.late, record.breaches);
        Line::Compliance { at_us: now_us(), operations, late, breaches }.print()?;
        if breaches > 0 {
            // One that came about just now is told within a second: whoever reads these lines is to find it.
            std::thread::sleep(Duration::from_secs(3));
        }
    }
    member.barrier()
}

fn agree(member: &Participant, arguments: &Arguments) -> Result<()> {
    let wanted = Constraints::new().p99(arguments.bytes as u64, Duration::from_millis(arguments.p99_ms));
    let outcome =
        member.client().negotiate(&arguments.seat.name, &wanted, |counter, _| Some(counter.clone()))?;
    let target = |agreed: &Constraints| agreed.completions.first().map(|target| target.p99);
    let p99_us = match &outcome {
        Negotiated::Agreed(agreement) => target(&agreement.constraints).map(|p99| p99.as_micros() as u64),
        Negotiated::Refused { .. } => None,
    };
    Line::Promised { at_us: now_us(), requested_us: arguments.p99_ms * 1000, p99_us: p99_us.unwrap_or(0) }
        .print()
}
