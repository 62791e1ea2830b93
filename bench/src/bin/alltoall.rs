//! Keeps exchanging by AllToAll and checks every received byte, until it is told to stop by SIGTERM or SIGINT.
#![forbid(unsafe_code)]

use anyhow::{Context, Result, bail};
use clap::Parser;
use harmonaize_bench::payload::{Block, block_bytes};
use harmonaize_bench::report::{Line, now_us};
use harmonaize_bench::tenant::{Participant, Seat};
use signal_hook::consts::{SIGINT, SIGTERM};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Exchanges payloads that prove themselves and prints a line of JSON per round; SIGTERM to any rank ends all of them
/// after the same round.
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    seat: Seat,
    /// Seed of the payloads
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Stop after so many rounds at the latest
    #[arg(long, default_value_t = u64::MAX)]
    rounds: u64,
    /// Rest after each round, in milliseconds
    #[arg(long, default_value_t = 0)]
    pause_ms: u64,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    let ranks = arguments.seat.ranks;
    let arena = 4 * ranks as u64 * (1 << 20) + (1 << 20);
    let member = Participant::join(&arguments.seat, arena)?;
    Line::Start { at_us: now_us(), rank: member.rank(), ranks }.print()?;
    let mut exchange = Exchange { participant: member, seed: arguments.seed, bytes: Vec::new(), verified: 0 };
    let (mut round, mut stopping) = (0, false);
    while !stopping {
        let last = arguments.rounds.saturating_sub(1) <= round;
        stopping = exchange.round(round, last || stop.load(Ordering::Relaxed))?;
        round += 1;
        std::thread::sleep(Duration::from_millis(arguments.pause_ms));
    }
    Line::Stopped { at_us: now_us(), rounds: round, verified_bytes: exchange.verified }.print()
}

struct Exchange {
    participant: Participant,
    seed: u64,
    bytes: Vec<u8>,
    verified: u64,
}

impl Exchange {
    /// One AllToAll, checked; says whether any rank wants to stop.
    fn round(&mut self, round: u64, stop: bool) -> Result<bool> {
        let (rank, ranks) = (self.participant.rank(), self.participant.ranks());
        let block = block_bytes(round);
        self.bytes.resize(block * ranks, 0);
        let name = |source, destination| Block { seed: self.seed, round, source, destination };
        for (destination, bytes) in self.bytes.chunks_exact_mut(block).enumerate() {
            name(rank, destination).fill(bytes, stop);
        }
        let input = self.participant.tensor::<u8>(self.bytes.len())?;
        let output = self.participant.tensor::<u8>(self.bytes.len())?;
        input.write(0, &self.bytes)?;
        let (receipt, took) =
            self.participant.run(|all| all.all_to_all(&input, &output)).context("AllToAll")?;
        // What was sent must not pass for what was received.
        self.bytes.fill(0);
        output.read(0, &mut self.bytes)?;
        let mut stopping = false;
        for (source, bytes) in self.bytes.chunks_exact(block).enumerate() {
            match name(source, rank).verify(bytes) {
                Ok(wish) => stopping |= wish,
                Err(damaged) => {
                    Line::Damaged { at_us: now_us(), what: damaged.to_string() }.print()?;
                    bail!("{damaged}");
                }
            }
        }
        self.verified += self.bytes.len() as u64;
        Line::Round {
            at_us: now_us(),
            round,
            bytes: self.bytes.len() as u64,
            collective_us: took.as_micros() as u64,
            wire_bytes: receipt.wire_bytes,
        }
        .print()?;
        Ok(stopping)
    }
}
