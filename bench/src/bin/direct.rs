//! AllReduce of several ranks' f32 in one process by the plan alone; prints nccl-tests' columns.
#![forbid(unsafe_code)]

use anyhow::{Result, ensure};
use clap::Parser;
use harmonaize_bench::direct::Direct;
use harmonaize_bench::measure::{Measured, Repetitions};
use harmonaize_client::Collective;
use std::time::Instant;

/// Times an AllReduce without agent, rings or engine.
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    repetitions: Repetitions,
    /// How many ranks
    #[arg(long, default_value_t = 2)]
    ranks: u32,
    /// Bytes of a rank's tensor; several sizes with commas
    #[arg(long, value_delimiter = ',', default_value = "32768")]
    bytes: Vec<usize>,
    /// Print a line of JSON per size instead of columns
    #[arg(long)]
    json: bool,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if !arguments.json {
        println!("{}", Measured::HEADING);
    }
    for bytes in &arguments.bytes {
        let direct = Direct::new(arguments.ranks, *bytes)?;
        direct.run()?;
        let wrong = direct.wrong()? as u64;
        for _ in 0..arguments.repetitions.warmup {
            direct.run()?;
        }
        let mut times_us = Vec::with_capacity(arguments.repetitions.iterations);
        for _ in 0..arguments.repetitions.iterations {
            let began = Instant::now();
            direct.run()?;
            times_us.push(began.elapsed().as_secs_f64() * 1e6);
        }
        let measured = Measured { bytes: *bytes as u64, times_us, wrong, ..Measured::default() };
        measured.print(arguments.json, Collective::AllReduce, arguments.ranks as usize)?;
        ensure!(wrong == 0, "{wrong} elements are wrong");
    }
    Ok(())
}
