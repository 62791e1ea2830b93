//! A training on four emulated hosts, over Gloo or ours, with what is done to it meanwhile, and its log.

use crate::lab::Lab;
use crate::peers::Gloo;
use anyhow::{Context, Result, bail};
use harmonaize_testkit::clock::monotonic_ns;
use harmonaize_testkit::process::Process;
use harmonaize_testkit::truth::{Injection, Iteration, Library, RankLocation, Truth, log_of};
use harmonaize_testkit::workspace::root;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Ranks, one a host.
pub(super) const RANKS: usize = 4;
/// The rate of the links at the beginning, in bits per second.
pub(super) const RATE: u64 = 1_000_000_000;
/// How long a training may take.
const LIMIT: Duration = Duration::from_secs(180);

/// A rank that computes longer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Slow {
    /// Which.
    pub(super) rank: usize,
    /// The first iteration that it does.
    pub(super) from: usize,
    /// How much longer.
    pub(super) by_ms: f64,
}

/// A rank whose host's link becomes slower.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Narrow {
    /// Whose.
    pub(super) rank: usize,
    /// After so many iterations of its.
    pub(super) after: usize,
    /// Its rate then, in bits per second.
    pub(super) rate: u64,
}

/// How a training goes.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Course {
    pub(super) iterations: usize,
    pub(super) buckets: usize,
    /// Width of a layer: a bucket has `width * (width + 1)` elements of `f32`.
    pub(super) width: usize,
    pub(super) forward_ms: f64,
    pub(super) backward_ms: f64,
    /// Bytes that rank 0 broadcasts before each forward pass, over Gloo alone.
    pub(super) buffer_bytes: usize,
    pub(super) slow: Option<Slow>,
    pub(super) narrow: Option<Narrow>,
}

impl Course {
    /// A training to which nothing is done.
    pub(super) fn clean(iterations: usize) -> Self {
        Self {
            iterations,
            buckets: 3,
            width: 320,
            forward_ms: 20.0,
            backward_ms: 6.0,
            buffer_bytes: 0,
            slow: None,
            narrow: None,
        }
    }

    fn bucket_bytes(&self) -> usize {
        4 * self.width * (self.width + 1)
    }

    /// What both libraries' programs take alike.
    fn arguments(&self) -> Vec<String> {
        let numbers = [("--iterations", self.iterations), ("--buckets", self.buckets)];
        let times = [("--forward-ms", self.forward_ms), ("--backward-ms", self.backward_ms)];
        let numbers = numbers.into_iter().map(|(name, number)| (name, number.to_string()));
        let times = times.into_iter().map(|(name, time)| (name, time.to_string()));
        numbers.chain(times).flat_map(|(name, value)| [name.to_owned(), value]).collect()
    }

    fn slow_arguments(slow: &Slow) -> Vec<String> {
        vec!["--slow-from".to_owned(), slow.from.to_string(), "--slow-ms".to_owned(), slow.by_ms.to_string()]
    }
}

/// Runs it over torch and Gloo, beside the agents.
pub(super) fn gloo(lab: &mut Lab, gloo: &Gloo, course: &Course) -> Result<Truth> {
    let store = lab.logs().join("gloo-store");
    let _ = std::fs::remove_file(&store);
    let mut ranks = Vec::new();
    for (rank, host) in lab.fabric().hosts().iter().take(RANKS).enumerate() {
        let mut command = Command::new(gloo.python());
        command.arg(root().join("bench/peers/training.py")).arg(&store);
        command.args([rank, RANKS].map(|number| number.to_string())).args(course.arguments());
        command.args(["--width", &course.width.to_string()]);
        command.args(["--buffer-bytes", &course.buffer_bytes.to_string()]);
        if let Some(slow) = course.slow.as_ref().filter(|slow| slow.rank == rank) {
            command.args(Course::slow_arguments(slow));
        }
        // The device towards the switch; each rank computes on one core.
        command.env("GLOO_SOCKET_IFNAME", "eth0").env("OMP_NUM_THREADS", "1");
        let log = lab.logs().join(format!("gloo-{rank}.log"));
        let name = format!("rank {rank} of a training over Gloo");
        ranks.push(Process::start(&name, &mut command, &host.namespace, &log)?);
    }
    let logs: Vec<PathBuf> = ranks.iter().map(|rank| rank.log().to_path_buf()).collect();
    let ended = move || -> Result<bool> {
        let mut all = true;
        for rank in &mut ranks {
            match rank.status()? {
                None => all = false,
                Some(status) if status.success() => {}
                Some(status) => {
                    bail!("{} ended with {status}; its last lines:\n{}", rank.name(), rank.log_tail(2048))
                }
            }
        }
        Ok(all)
    };
    watched(lab, course, Library::Gloo, &logs, ended)
}

/// Runs its iterations over the agents.
pub(super) fn ours(lab: &mut Lab, course: &Course) -> Result<Truth> {
    let mut arguments = course.arguments();
    arguments.extend(["--bytes".to_owned(), course.bucket_bytes().to_string()]);
    if let Some(slow) = &course.slow {
        arguments.extend(Course::slow_arguments(slow));
        arguments.extend(["--slow-rank".to_owned(), slow.rank.to_string()]);
    }
    let hosts: Vec<usize> = (0..RANKS).collect();
    let mut job = lab.start("periodic", &hosts, &arguments)?;
    let logs = job.logs();
    watched(lab, course, Library::Ours, &logs, || job.ended())
}

/// Follows a training to its end, makes a link slower in time, and gathers the logs.
fn watched(
    lab: &mut Lab,
    course: &Course,
    library: Library,
    logs: &[PathBuf],
    mut ended: impl FnMut() -> Result<bool>,
) -> Result<Truth> {
    let deadline = Instant::now() + LIMIT;
    let mut narrowed = None;
    let done = loop {
        match ended() {
            Ok(true) => break Ok(()),
            Ok(false) if Instant::now() > deadline => {
                break Err(anyhow::anyhow!("not ended within {LIMIT:?}"));
            }
            Ok(false) => {}
            Err(error) => break Err(error),
        }
        lab.check()?;
        if let Some(narrow) = course.narrow.filter(|_| narrowed.is_none())
            && lines(logs.get(narrow.rank).context("no such rank")?)? > narrow.after
        {
            set_rate(lab, narrow.rank, narrow.rate)?;
            narrowed = Some(monotonic_ns()?);
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    if let Some(narrow) = course.narrow {
        set_rate(lab, narrow.rank, RATE)?;
    }
    done?;
    let ranks: Vec<Vec<Iteration>> =
        logs.iter().map(|log| log_of(&std::fs::read_to_string(log)?)).collect::<Result<_>>()?;
    let injections = injections(course, narrowed, &ranks);
    let places = lab.fabric().hosts().iter().take(RANKS);
    let places = places.map(|host| {
        let address = *host.addresses.first().context("a host without address")?;
        Ok(RankLocation { host: host.name.clone(), address })
    });
    Ok(Truth {
        library,
        places: places.collect::<Result<_>>()?,
        bits_per_second: RATE,
        buckets: course.buckets,
        bucket_bytes: course.bucket_bytes() as u64,
        injections,
        ranks,
    })
}

fn injections(course: &Course, narrowed: Option<u64>, ranks: &[Vec<Iteration>]) -> Vec<Injection> {
    let slow = course.slow.as_ref().map(|slow| Injection::Compute {
        rank: slow.rank,
        from: slow.from,
        by_ns: (slow.by_ms * 1e6) as u64,
    });
    let narrow = course.narrow.zip(narrowed).map(|(narrow, at_ns)| {
        let begins =
            |number: usize| ranks.iter().filter_map(|log| log.get(number)).map(|one| one.called_ns).min();
        let from = (0..course.iterations).find(|number| begins(*number).is_some_and(|time| time >= at_ns));
        Injection::Network {
            rank: narrow.rank,
            from: from.unwrap_or(course.iterations),
            at_ns,
            bits_per_second: narrow.rate,
        }
    });
    slow.into_iter().chain(narrow).collect()
}

fn set_rate(lab: &Lab, rank: usize, rate: u64) -> Result<()> {
    let host = lab.fabric().hosts().get(rank).context("no such rank")?.name.clone();
    lab.fabric().set_rate(&host, Some(rate))
}

/// Iterations that a log has so far.
fn lines(log: &Path) -> Result<usize> {
    let text = std::fs::read_to_string(log).with_context(|| format!("cannot read {}", log.display()))?;
    Ok(text.lines().filter(|line| line.contains("\"called_ns\"")).count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_link_starts_at_its_first_communication() {
        let log = |shift: u64| -> Vec<Iteration> {
            let times = (0..4).map(|number| number * 100 + shift);
            times.map(|time| Iteration { began_ns: time, called_ns: time + 50, done_ns: time + 70 }).collect()
        };
        let ranks = [log(0), log(10)];
        let narrow = Some(Narrow { rank: 1, after: 1, rate: 5 });
        let course = Course { narrow, ..Course::clean(4) };
        let found = injections(&course, Some(155), &ranks);
        assert_eq!(found, [Injection::Network { rank: 1, from: 2, at_ns: 155, bits_per_second: 5 }]);
        let late = injections(&course, Some(1000), &ranks);
        assert!(matches!(late[..], [Injection::Network { from: 4, .. }]));
        let slow = Some(Slow { rank: 3, from: 2, by_ms: 1.5 });
        let found = injections(&Course { slow, ..Course::clean(4) }, None, &ranks);
        assert_eq!(found, [Injection::Compute { rank: 3, from: 2, by_ns: 1_500_000 }]);
    }
}
