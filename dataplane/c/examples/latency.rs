//! What a small AllReduce takes from Rust: the median and the 99th percentile in nanoseconds, of as many as the argument says.
//! `latency.c` is the same in C.
#![forbid(unsafe_code)]

use harmonaize_client::{AttachOptions, Client, Dtype, Rank, ReduceOp};
use std::error::Error;
use std::time::{Duration, Instant};

const ELEMENTS: u64 = 256;
const WARM_UP: usize = 1000;
const STEP: Duration = Duration::from_secs(30);

fn number(name: &str, usual: u32) -> u32 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

fn main() -> Result<(), Box<dyn Error>> {
    let count: usize = std::env::args().nth(1).map_or(Ok(10_000), |text| text.parse())?;
    let client = Client::attach(std::env::var("HARMONAIZE_SOCKET")?, AttachOptions::default())?;
    let job =
        client.join("latency", Rank(number("RANK", 0)), number("WORLD_SIZE", 1), Duration::from_secs(60))?;
    let tensor = client.tensor(Dtype::F32, ELEMENTS)?;
    let mut times = Vec::with_capacity(count);
    for call in 0..WARM_UP + count {
        let begun = Instant::now();
        job.all_reduce_in_place(&tensor, ReduceOp::Max)?.wait(STEP)?;
        if call >= WARM_UP {
            times.push(begun.elapsed().as_nanos());
        }
    }
    times.sort_unstable();
    let at = |index: usize| times.get(index).copied().ok_or("no calls");
    println!("{} {}", at(count / 2)?, at(count.saturating_sub(1 + count / 100))?);
    Ok(())
}
