//! A stream of payloads, or a ping-pong, between two processes over one link without agents; prints lines of JSON.
#![forbid(unsafe_code)]

use anyhow::{Result, ensure};
use clap::{Args, Parser, Subcommand};
use harmonaize_bench::link::{End, EndEvent, Ends, Header, stamp, stamped};
use harmonaize_bench::statistics::percentile;
use harmonaize_shm::{Memory, Span};
use serde_json::json;
use std::time::{Duration, Instant};

/// Measures one link between two processes: start the end without --connect first, the other with what it printed. Both
/// need HARMONAIZE_LINK_SECRET, 64 hexadecimal digits.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// The end that connects sends payloads as fast as they go
    Stream(Stream),
    /// One payload goes to and fro; half a round trip is told, as ib_write_lat does
    Latency(Latency),
}

#[derive(Args)]
struct Stream {
    #[command(flatten)]
    ends: Ends,
    /// Bytes of a payload, at least 16
    #[arg(long, default_value_t = 1 << 20)]
    bytes: u32,
    /// Payloads under way at most
    #[arg(long, default_value_t = 16)]
    depth: u32,
    /// How long is measured
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// How long before
    #[arg(long, default_value_t = 0.3)]
    warmup: f64,
}

#[derive(Args)]
struct Latency {
    #[command(flatten)]
    ends: Ends,
    /// Bytes of a payload, at least 16
    #[arg(long, default_value_t = 64)]
    bytes: u32,
    /// Round trips that are measured
    #[arg(long, default_value_t = 1000)]
    iterations: u64,
    /// Round trips before
    #[arg(long, default_value_t = 100)]
    warmup: u64,
}

/// Slots of a ping-pong's ring.
const FEW: u32 = 4;

fn main() -> Result<()> {
    match Arguments::parse().what {
        What::Stream(stream) => {
            ensure!(
                stream.bytes >= 16 && stream.depth >= 1,
                "a payload has at least 16 bytes, and one is under way"
            );
            // So that the credit that comes back never holds a sender up that has its depth under way.
            let end = End::open(&stream.ends, 2 * stream.depth, stream.bytes)?;
            if stream.ends.connect.is_some() { send(&stream, end) } else { receive(&stream, end) }
        }
        What::Latency(latency) => {
            ensure!(latency.bytes >= 16, "a payload has at least 16 bytes");
            let end = End::open(&latency.ends, FEW, latency.bytes)?;
            if latency.ends.connect.is_some() { ping(&latency, end) } else { pong(&latency, end) }
        }
    }
}

/// How far a sender is: by count of payloads.
#[derive(Default)]
struct Sender {
    next: u64,
    sent: u64,
    credited: u64,
    corrupt: Option<u64>,
}

impl Sender {
    fn run_once(&mut self, end: &mut End) -> Result<()> {
        end.run_once(&mut |heard| {
            match heard {
                EndEvent::Sent => self.sent += 1,
                EndEvent::Header(Header::Credit(count)) => self.credited = count,
                EndEvent::Header(Header::Corrupt(count)) => self.corrupt = Some(count),
                EndEvent::Header(_) => {}
            }
            Ok(())
        })
    }
}

fn send(stream: &Stream, mut end: End) -> Result<()> {
    let (bytes, depth) = (u64::from(stream.bytes), u64::from(stream.depth));
    let source = Span::new(&Memory::private(usize::try_from(bytes * depth)?)?, 0, bytes * depth)?;
    let (warmup, seconds) = (Duration::from_secs_f64(stream.warmup), Duration::from_secs_f64(stream.seconds));
    let mut sender = Sender::default();
    let begun = Instant::now();
    // Both marks are set when payloads have just left, so that whole batches lie between.
    let (mut first, mut last) = (None, None);
    while last.is_none() {
        while sender.next - sender.sent < depth && sender.next - sender.credited < 2 * depth {
            let payload = source.range(sender.next % depth * bytes, bytes)?;
            stamp(&payload, sender.next)?;
            if !end.send(sender.next, payload)? {
                break;
            }
            sender.next += 1;
        }
        let before = sender.sent;
        sender.run_once(&mut end)?;
        if sender.sent == before {
            continue;
        }
        let now = Instant::now();
        match first {
            None if now - begun >= warmup => first = Some((now, sender.sent)),
            Some((since, _)) if now - since >= seconds => last = Some((now, sender.sent)),
            _ => {}
        }
    }
    while !end.send_header(Header::Done(sender.next))? {
        sender.run_once(&mut end)?;
    }
    while sender.corrupt.is_none() {
        sender.run_once(&mut end)?;
    }
    let wrong = sender.corrupt.unwrap_or(0);
    if let (Some((since, first)), Some((until, last))) = (first, last) {
        let (took, count) = ((until - since).as_secs_f64(), last - first);
        let rate = (count * bytes) as f64 / took;
        println!("{}", json!({"bytes_per_second": rate, "payloads": count, "seconds": took, "wrong": wrong}));
    }
    ensure!(wrong == 0, "{wrong} payloads were not what was sent");
    Ok(())
}

fn receive(stream: &Stream, mut end: End) -> Result<()> {
    let (mut came, mut wrong, mut told, mut announced) = (0_u64, 0_u64, 0_u64, None);
    let batch = u64::from(stream.depth.div_ceil(2));
    while announced != Some(came) {
        let mut numbers = Vec::new();
        end.run_once(&mut |heard| {
            match heard {
                EndEvent::Header(Header::Data(number)) => numbers.push(number),
                EndEvent::Header(Header::Done(count)) => announced = Some(count),
                _ => {}
            }
            Ok(())
        })?;
        for number in numbers {
            wrong += u64::from(number != came || !stamped(&end.slot(number)?, number)?);
            came += 1;
        }
        if came - told >= batch && end.send_header(Header::Credit(came))? {
            told = came;
        }
    }
    println!("{}", json!({"payloads": came, "wrong": wrong}));
    while !end.send_header(Header::Corrupt(wrong))? {
        end.run_once(&mut |_| Ok(()))?;
    }
    // The other end closes when it has heard that.
    while end.run_once(&mut |_| Ok(())).is_ok() {}
    Ok(())
}

/// Waits for the payload of a number, and checks it.
fn await_payload(end: &mut End, number: u64) -> Result<()> {
    let mut came = false;
    while !came {
        end.run_once(&mut |heard| {
            came |= heard == EndEvent::Header(Header::Data(number));
            Ok(())
        })?;
    }
    ensure!(stamped(&end.slot(number)?, number)?, "payload {number} is not what was sent");
    Ok(())
}

/// A payload may be written again when it has left; with several slots that is long before its turn.
fn source(latency: &Latency) -> Result<Vec<Span>> {
    let bytes = u64::from(latency.bytes);
    let memory = Memory::private(usize::try_from(bytes * u64::from(FEW))?)?;
    Ok((0..u64::from(FEW)).map(|slot| Span::new(&memory, slot * bytes, bytes)).collect::<Result<_, _>>()?)
}

fn ping(latency: &Latency, mut end: End) -> Result<()> {
    let payloads = source(latency)?;
    // One look at the clock a round trip, as perftest does: where a clock is slow, two would be told.
    let mut marks = Vec::with_capacity(usize::try_from(latency.iterations)? + 1);
    for (number, payload) in (0..latency.warmup + latency.iterations).zip(payloads.iter().cycle()) {
        if number >= latency.warmup {
            marks.push(Instant::now());
        }
        stamp(payload, number)?;
        while !end.send(number, payload.clone())? {
            end.run_once(&mut |_| Ok(()))?;
        }
        await_payload(&mut end, number)?;
    }
    marks.push(Instant::now());
    let trips = marks.iter().zip(marks.iter().skip(1));
    let mut times: Vec<f64> = trips.map(|(from, to)| (*to - *from).as_secs_f64() * 1e6 / 2.0).collect();
    let mean = times.iter().sum::<f64>() / times.len().max(1) as f64;
    let mut at = |share| percentile(&mut times, share);
    let line = json!({"median_us": at(0.5), "mean_us": mean, "least_us": at(0.0), "p99_us": at(0.99),
                      "iterations": latency.iterations});
    println!("{line}");
    Ok(())
}

fn pong(latency: &Latency, mut end: End) -> Result<()> {
    let payloads = source(latency)?;
    for (number, payload) in (0..latency.warmup + latency.iterations).zip(payloads.iter().cycle()) {
        await_payload(&mut end, number)?;
        stamp(payload, number)?;
        while !end.send(number, payload.clone())? {
            end.run_once(&mut |_| Ok(()))?;
        }
    }
    while end.run_once(&mut |_| Ok(())).is_ok() {}
    Ok(())
}
