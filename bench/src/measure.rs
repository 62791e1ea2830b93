//! What a rank process of a benchmark measures and prints: nccl-tests' columns for people, a line of JSON for programs.

use crate::statistics::median;
use anyhow::Result;
use clap::Args;
use harmonaize_abi::Collective;
use serde::{Deserialize, Serialize};
use std::io::Write;

/// How often.
#[derive(Args, Clone, Copy, Debug)]
pub struct Repetitions {
    /// Operations before the first that is timed
    #[arg(long, default_value_t = 2)]
    pub warmup: usize,
    /// Operations that are timed
    #[arg(long, default_value_t = 5)]
    pub iterations: usize,
}

/// A size of the sweep and how often it is timed at most, as its programs read them: BYTES:ROUNDS.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Bytes of a rank's larger tensor.
    pub bytes: usize,
    /// Timed operations at most.
    pub rounds: usize,
}

impl std::str::FromStr for Effort {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text
            .split_once(':')
            .and_then(|(bytes, rounds)| Some((bytes.parse().ok()?, rounds.parse().ok()?)));
        let (bytes, rounds) = parts.ok_or_else(|| format!("{text} is not BYTES:ROUNDS"))?;
        Ok(Self { bytes, rounds })
    }
}

/// A collective by its name.
pub fn collective(text: &str) -> Result<Collective, String> {
    let names = || Collective::ALL.iter().map(|one| one.name()).collect::<Vec<_>>().join(", ");
    text.parse().map_err(|()| format!("none of {}", names()))
}

/// One size's result, as in the line of JSON. `bytes` is a rank's larger tensor, as in nccl-tests.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Bytes of a rank's larger tensor.
    pub bytes: u64,
    /// Each timed operation, in microseconds.
    pub times_us: Vec<f64>,
    /// Elements that were not what they had to be.
    pub wrong: u64,
    /// Tensor bytes that this rank's host sent in one operation, from the receipt.
    pub wire_bytes: u64,
    /// The part of all processors' time that was spent while operations were timed. It is from 0 to 1, and 0 where
    /// nobody measured it.
    #[serde(default)]
    pub busy: f64,
}

/// Seconds that all processors of this machine were busy since it started, over their number. Source: proc(5), /proc/stat, in ticks of a
/// hundredth: user, nice, system, then idle and waiting, then interrupts, soft ones, and what others took.
pub fn busy() -> f64 {
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let processors = text.lines().filter(|line| line.starts_with("cpu")).count().saturating_sub(1).max(1);
    let fields = text.lines().next().unwrap_or_default().split_whitespace().skip(1).take(8);
    let ticks: Vec<f64> = fields.filter_map(|field| field.parse().ok()).collect();
    let idle: f64 = ticks.iter().skip(3).take(2).sum();
    (ticks.iter().sum::<f64>() - idle) / 100.0 / processors as f64
}

impl Measured {
    /// The columns' heading.
    pub const HEADING: &'static str =
        "    size(B)       count   type  redop    time(us)  algbw(GB/s)  busbw(GB/s)  wrong";

    /// A line under the heading: the median operation.
    pub fn columns(&self, collective: Collective, ranks: usize) -> String {
        let time = median(&mut self.times_us.clone());
        let algbw = if time > 0.0 { self.bytes as f64 / time / 1e3 } else { 0.0 };
        format!(
            "{:>11} {:>11}  float {:>6} {:>11.1} {:>12.3} {:>12.3} {:>6}",
            self.bytes,
            self.bytes / 4,
            if collective.reduces() { "sum" } else { "none" },
            time,
            algbw,
            algbw * collective.bus_factor(u32::try_from(ranks).unwrap_or(u32::MAX)),
            self.wrong
        )
    }

    /// Prints it one way or the other.
    pub fn print(&self, json: bool, collective: Collective, ranks: usize) -> Result<()> {
        let mut out = std::io::stdout().lock();
        if json {
            writeln!(out, "{}", serde_json::to_string(self)?)?;
        } else {
            writeln!(out, "{}", self.columns(collective, ranks))?;
        }
        Ok(out.flush()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn collectives_go_by_their_names() {
        assert!(Collective::ALL.iter().all(|one| collective(one.name()) == Ok(*one)));
        assert!(collective("sum").unwrap_err().contains("allreduce, alltoall"));
    }

    #[test]
    fn columns_are_nccl_tests() {
        let measured =
            Measured { bytes: 8_000_000, times_us: vec![1000.0, 9000.0, 2000.0], ..Measured::default() };
        let line = measured.columns(Collective::AllReduce, 4);
        let columns: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(columns, ["8000000", "2000000", "float", "sum", "2000.0", "4.000", "6.000", "0"]);
    }
}
