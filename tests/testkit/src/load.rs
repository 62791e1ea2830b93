//! What the links of switches carry over time: counters read again and again by a thread of its own.

use crate::clock::realtime_ns;
use crate::counters::Counters;
use crate::fabric::Fabric;
use anyhow::{Context, Result, anyhow};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// One direction of a link, seen at a switch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Load {
    /// Whence, by the node's name.
    pub from: String,
    /// Where to.
    pub to: String,
    /// Time by CLOCK_REALTIME in nanoseconds, and bytes carried until then.
    pub samples: Vec<(u64, u64)>,
}

impl Load {
    /// Rate in bits a second between each sample and the one before, at the later one's time.
    pub fn rates(&self) -> Vec<(u64, f64)> {
        let pairs = self.samples.iter().zip(self.samples.iter().skip(1));
        let rate = |((t0, b0), (t1, b1)): (&(u64, u64), &(u64, u64))| {
            let seconds = t1.saturating_sub(*t0).max(1) as f64 / 1e9;
            (*t1, b1.saturating_sub(*b0) as f64 * 8.0 / seconds)
        };
        pairs.map(rate).collect()
    }

    /// Bytes carried from one time to another, to a sample's precision. What was carried before the first sample is not counted.
    pub fn between(&self, from_ns: u64, to_ns: u64) -> u64 {
        let first = self.samples.first();
        let until = |time: u64| {
            let last = self.samples.iter().rev().find(|(at, _)| *at <= time);
            last.or(first).map_or(0, |(_, bytes)| *bytes)
        };
        until(to_ns).saturating_sub(until(from_ns))
    }

    /// When it last carried more than `bytes` from one sample to the next.
    pub fn last_over(&self, bytes: u64) -> Option<u64> {
        let pairs = self.samples.iter().zip(self.samples.iter().skip(1));
        pairs
            .rev()
            .find(|((_, before), (_, after))| after.saturating_sub(*before) > bytes)
            .map(|(_, (at, _))| *at)
    }
}

/// A switch's port: its device, and the node at the other end.
type Port = (String, String);

/// The thread; its readings come with [`Watch::finish`].
#[derive(Debug)]
pub struct Watch {
    stop: Arc<AtomicBool>,
    reader: Option<JoinHandle<Result<Vec<Load>>>>,
}

impl Watch {
    /// Reads all links of the named switches every so often.
    pub fn start(fabric: &Fabric, switches: &[&str], every: Duration) -> Result<Self> {
        let mut watched = Vec::new();
        for name in switches {
            let nodes = &fabric.topology().nodes;
            let node = nodes.iter().position(|node| node.name == *name);
            let node = node.with_context(|| format!("the fabric has no switch named {name}"))?;
            let far = |node: usize| nodes.get(node).map_or_else(String::new, |node| node.name.clone());
            let ends = fabric.layout().ends_of(node);
            let ports: Vec<Port> = ends.map(|(_, own, end)| (own.device.clone(), far(end.node))).collect();
            watched.push(((*name).to_owned(), Counters::of(&fabric.namespace(name))?, ports));
        }
        let stop = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&stop);
        let reader = std::thread::spawn(move || read(&watched, every, &ended));
        Ok(Self { stop, reader: Some(reader) })
    }

    /// Ends it: both directions of every link, in the order of switches and their ports.
    pub fn finish(mut self) -> Result<Vec<Load>> {
        self.stop.store(true, Ordering::Relaxed);
        let reader = self.reader.take().context("finished already")?;
        reader.join().map_err(|_| anyhow!("the reader of links' loads has panicked"))?
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn read(watched: &[(String, Counters, Vec<Port>)], every: Duration, stop: &AtomicBool) -> Result<Vec<Load>> {
    let load = |from: &str, to: &str| Load { from: from.into(), to: to.into(), samples: Vec::new() };
    let pair = |switch: &str, (_, far): &Port| [load(switch, far), load(far, switch)];
    let mut loads: Vec<[Load; 2]> =
        watched.iter().flat_map(|(switch, _, ports)| ports.iter().map(|port| pair(switch, port))).collect();
    while !stop.load(Ordering::Relaxed) {
        let mut slots = loads.iter_mut();
        for (_, counters, ports) in watched {
            let carried = counters.read()?;
            let at = realtime_ns()?;
            for ((device, _), [down, up]) in ports.iter().zip(slots.by_ref()) {
                let carried = carried.get(device).copied().unwrap_or_default();
                down.samples.push((at, carried.sent));
                up.samples.push((at, carried.received));
            }
        }
        std::thread::sleep(every);
    }
    Ok(loads.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_and_silence_come_from_samples() {
        let samples = vec![(0, 0), (1_000_000_000, 1_000), (2_000_000_000, 1_000), (2_500_000_000, 1_060)];
        let load = Load { from: "a".into(), to: "b".into(), samples };
        assert_eq!(load.rates(), [(1_000_000_000, 8_000.0), (2_000_000_000, 0.0), (2_500_000_000, 960.0)]);
        assert_eq!(load.last_over(100), Some(1_000_000_000));
        assert_eq!(load.last_over(0), Some(2_500_000_000));
        assert_eq!(load.last_over(5_000), None);
        assert_eq!(load.between(900_000_000, 2_000_000_000), 1_000);
        let samples = vec![(1_000, 5_000), (2_000, 5_070)];
        let load = Load { samples, ..load };
        assert_eq!((load.between(0, u64::MAX), load.between(0, 1_500), load.between(0, 500)), (70, 0, 0));
    }
}
