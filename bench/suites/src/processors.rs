//! How busy this machine's processors are, and what a process takes of them.

use anyhow::{Context, Result};

/// All cores' time since a moment.
#[derive(Debug)]
pub(crate) struct Busy {
    idle: u64,
    all: u64,
}

impl Busy {
    /// From now on.
    pub(crate) fn now() -> Result<Self> {
        let text = std::fs::read_to_string("/proc/stat")?;
        let line = text.lines().next().context("an empty /proc/stat")?;
        Self::read(line).with_context(|| format!("not a line of processors' times: {line}"))
    }

    /// A line `cpu user nice system idle iowait ...` (proc(5), /proc/stat).
    fn read(line: &str) -> Option<Self> {
        let times: Vec<u64> =
            line.split_whitespace().skip(1).take(8).map_while(|word| word.parse().ok()).collect();
        Some(Self { idle: times.get(3)? + times.get(4)?, all: times.iter().sum() })
    }

    /// The share of all cores' time since then that something ran.
    pub(crate) fn share(&self) -> Result<f64> {
        let now = Self::now()?;
        let all = now.all.saturating_sub(self.all).max(1) as f64;
        Ok(1.0 - now.idle.saturating_sub(self.idle) as f64 / all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_includes_iowait() {
        let read = Busy::read("cpu  10 0 20 60 10 0 0 0 5 0").unwrap();
        assert_eq!((read.idle, read.all), (70, 100));
        assert!(Busy::read("cpu 1 2").is_none());
    }
}
