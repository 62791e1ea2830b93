//! What a process takes of the machine.

use anyhow::{Context, Result};
use std::time::Duration;

/// The memory that a process has resident, in bytes.
///
/// # Errors
/// Where there is no such process.
pub fn resident_bytes(process: u32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kib * 1024)
}

/// Processor time that the threads which a process has now have taken.
///
/// # Errors
/// Where there is no such process.
pub fn processor_time(process: u32) -> Result<Duration> {
    times(process, |_| true)
}

/// The same of those threads alone that have a name.
///
/// # Errors
/// Where there is no such process, or it has no such thread.
pub fn processor_time_of(process: u32, thread: &str) -> Result<Duration> {
    let mut found = false;
    let taken = times(process, |name| {
        found |= name == thread;
        name == thread
    })?;
    anyhow::ensure!(found, "process {process} has no thread named {thread}");
    Ok(taken)
}

fn times(process: u32, mut counts: impl FnMut(&str) -> bool) -> Result<Duration> {
    let tasks = format!("/proc/{process}/task");
    let mut all = Duration::ZERO;
    for task in std::fs::read_dir(&tasks).with_context(|| format!("cannot read {tasks}"))? {
        let task = task?.path();
        if counts(std::fs::read_to_string(task.join("comm"))?.trim()) {
            let text = std::fs::read_to_string(task.join("schedstat"))?;
            let first = text.split_whitespace().next().context("an empty schedstat")?;
            all += Duration::from_nanos(first.parse()?);
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::TryRecvError;

    #[test]
    fn a_process_has_memory_and_takes_time() {
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let named = std::thread::Builder::new().name("counted".into());
        let thread = named.spawn(move || while ended.try_recv() == Err(TryRecvError::Empty) {});
        let own = std::process::id();
        assert!(resident_bytes(own).unwrap() > 1 << 20);
        let limit = std::time::Instant::now() + Duration::from_secs(30);
        while processor_time_of(own, "counted").unwrap_or_default() < Duration::from_millis(10) {
            assert!(std::time::Instant::now() < limit, "the thread took nothing");
            std::thread::yield_now();
        }
        assert!(processor_time(own).unwrap() >= Duration::from_millis(10));
        assert!(processor_time_of(own, "none").is_err() && resident_bytes(u32::MAX).is_err());
        drop(end);
        thread.unwrap().join().unwrap();
    }
}
