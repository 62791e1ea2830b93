//! Probes that wait for an answer, and how long connections are left alone after trains were sent for them.

use crate::state::job::decisions::Noticed;
use crate::state::output::SessionId;
use crate::state::timed::{Due, Timed};
use harmonaize_planner::{CongestionReport, Connection, DirectedLink, HostId, Path};
use harmonaize_units::{Gcra, Quota};
use std::collections::BTreeMap;
use std::time::Duration;

/// How long a connection is left alone after trains were sent for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backoff {
    /// The shortest time.
    least: Duration,
    /// The time after trains that found cross traffic. On average also the time after trains that found none more often
    /// than `in_vain`.
    most: Duration,
    /// How often trains may find none before that lengthens the time.
    in_vain: u32,
}

/// A connection whose path others congest, as its agent says.
pub(crate) const BACKOFF: Backoff =
    Backoff { least: Duration::from_millis(250), most: Duration::from_secs(2), in_vain: 1 };

/// The same where the connection is starved: that is seldom said without cause.
pub(crate) const STARVED_BACKOFF: Backoff =
    Backoff { least: Duration::from_millis(40), most: Duration::from_millis(500), in_vain: 4 };

/// When a connection of which nobody complained is forgotten.
const FORGOTTEN: Duration = Duration::from_secs(10);

/// Questions that are open.
#[derive(Debug, Default)]
pub(crate) struct Probes {
    pub next_probe: u64,
    pub open: BTreeMap<u64, PendingProbe>,
    /// Who was asked last about a link: the next time it is another, where there is one as good.
    pub last: BTreeMap<DirectedLink, HostId>,
    pub reported: Timed<Connection, Reported>,
    /// Reports of starved connections that wait for trains under way; each is of one in `reported`.
    pub blocked: BTreeMap<Connection, PendingReport>,
    /// Reports of starved connections that wait for the end of a pause; each is of one in `reported`.
    pub paused: Timed<Connection, Paused>,
}

/// A probe that waits for its answer.
#[derive(Debug)]
pub(crate) struct PendingProbe {
    pub of: SessionId,
    pub from: HostId,
    pub to: HostId,
    pub path: Path,
    pub deadline: Duration,
    pub verifies: Option<PendingReport>,
}

/// What an agent says of what it reports.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claim {
    /// Whether little passes and a queue stands.
    pub starved: bool,
    /// Whether it is a queue pair. Others' may send from its port, so that loss alone proves nothing.
    pub queue_pair: bool,
}

/// A report that trains are to verify.
#[derive(Clone, Debug)]
pub(crate) struct PendingReport {
    pub report: CongestionReport,
    pub noticed: Noticed,
    /// That it is starved only where nobody else of ours takes the rest.
    pub claim: Claim,
}

/// A connection whose path others are said to congest.
#[derive(Clone, Debug)]
pub(crate) struct Reported {
    pub usual: Pause,
    pub starved: Pause,
    pub received_at: Duration,
}

impl Due for Reported {
    fn next_timeout(&self) -> Option<Duration> {
        Some(self.received_at.saturating_add(FORGOTTEN))
    }
}

/// A report that waits for the end of a pause.
#[derive(Debug)]
pub(crate) struct Paused {
    pub report: PendingReport,
    pub until: Duration,
}

impl Due for Paused {
    fn next_timeout(&self) -> Option<Duration> {
        Some(self.until)
    }
}

/// When trains may be sent for a connection again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pause {
    pub not_before: Duration,
    /// What was sent in vain of late.
    in_vain: Gcra,
    limits: Backoff,
}

impl Pause {
    pub(crate) fn new(now: Duration, limits: Backoff) -> Self {
        Self { not_before: now, in_vain: Gcra::default(), limits }
    }

    /// Trains told: where nobody was there too often in a row, it is left alone for longer.
    pub(crate) fn record_result(&mut self, now: Duration, clean: bool) {
        let Backoff { least, most, in_vain } = self.limits;
        if !clean {
            (self.not_before, self.in_vain) = (now.saturating_add(most), Gcra::default());
            return;
        }
        let quota = Quota { interval: most, burst: in_vain.saturating_add(1) };
        self.not_before = now.saturating_add(least).max(self.in_vain.charge(now, quota));
    }

    /// Trains met our own traffic, which has pauses: this belongs to no row.
    pub(crate) fn record_no_result(&mut self, now: Duration) {
        self.not_before = now.saturating_add(self.limits.least);
    }
}

impl Probes {
    pub(crate) fn deadline(&self) -> Option<Duration> {
        self.open.values().map(|asked| asked.deadline).chain(self.paused.next_timeout()).min()
    }

    /// Forgets connections of which nobody has complained for a while.
    pub(crate) fn forget(&mut self, now: Duration) {
        for connection in self.reported.due(now) {
            self.reported.remove(&connection);
            self.withdraw(&connection);
        }
    }

    /// Withdraws what was said of a connection and waits.
    pub(crate) fn withdraw(&mut self, connection: &Connection) {
        self.blocked.remove(connection);
        self.paused.remove(connection);
    }

    /// Takes the reports that wait for trains, or for a pause that is over.
    pub(crate) fn take_waiting(&mut self, now: Duration) -> BTreeMap<Connection, PendingReport> {
        let mut waiting = std::mem::take(&mut self.blocked);
        for connection in self.paused.due(now) {
            waiting.extend(self.paused.remove(&connection).map(|paused| (connection, paused.report)));
        }
        waiting
    }

    /// Whether a train under way crosses a link of a path, or leaves the same host.
    pub(crate) fn meets(&self, from: HostId, path: &Path) -> bool {
        let crosses = |other: &Path| other.links().iter().any(|link| path.links().contains(link));
        self.open.values().any(|asked| asked.from == from || crosses(&asked.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_abi::{CommunicatorId, CongestionCause, CongestionLevel, Nanos};
    use harmonaize_planner::{Rate, Topology};

    #[test]
    fn several_clean_results_lengthen_the_pause() {
        let ms = Duration::from_millis;
        let mut pause = Pause::new(ms(0), STARVED_BACKOFF);
        let mut alone = |now: u64, clean| {
            pause.record_result(ms(now), clean);
            (pause.not_before - ms(now)).as_millis()
        };
        assert_eq!([0, 40, 80, 120].map(|now| alone(now, true)), [40; 4]);
        assert_eq!([160, 500, 1000].map(|now| alone(now, true)), [340, 500, 500], "one in half a second");
        assert_eq!([3000, 3040].map(|now| alone(now, true)), [40; 2], "what was long ago is made up for");
        assert_eq!(alone(3080, false), 500);
        assert_eq!([3580, 3620, 3660, 3700].map(|now| alone(now, true)), [40; 4], "it was right meanwhile");
        pause.record_no_result(ms(5600));
        assert_eq!(pause.not_before, ms(5640));
    }

    #[test]
    fn a_report_waits_until_its_pause_is_over() {
        let text = "[[host]]\nname = \"a\"\n[[host]]\nname = \"b\"\n[[link]]\nfrom = \"a\"\nto = \"b\"\nrate = \"1Gbit/s\"\n";
        let path = Topology::parse(text).unwrap().equal_cost_paths(HostId(0), HostId(1))[0].clone();
        let (communicator, from, to) = (CommunicatorId(1), HostId(0), HostId(1));
        let connection = |port: u16| Connection { communicator, from, to, port };
        let pending = |port| PendingReport {
            report: CongestionReport {
                connection: connection(port),
                path: path.clone(),
                level: CongestionLevel::Severe,
                cause: CongestionCause::CrossTraffic,
                own_rate: Rate(0),
                had_loss: true,
                cross_traffic: None,
            },
            noticed: Noticed {
                host: String::new(),
                path: String::new(),
                what: String::new(),
                since: Nanos(0),
                found: Nanos(0),
                received: Duration::ZERO,
            },
            claim: Claim { starved: true, queue_pair: false },
        };
        let (ms, mut probes) = (Duration::from_millis, Probes::default());
        for port in 1..=3 {
            let [usual, starved] = [BACKOFF, STARVED_BACKOFF].map(|limits| Pause::new(ms(0), limits));
            let received_at = ms(u64::from(port));
            probes.reported.insert(connection(port), Reported { usual, starved, received_at });
        }
        probes.blocked.insert(connection(3), pending(3));
        for (port, until) in [(2, ms(40)), (1, ms(60))] {
            probes.paused.insert(connection(port), Paused { report: pending(port), until });
        }
        let ports = |taken: BTreeMap<Connection, PendingReport>| -> Vec<u16> {
            taken.into_keys().map(|connection| connection.port).collect()
        };
        assert_eq!(probes.deadline(), Some(ms(40)));
        assert_eq!(ports(probes.take_waiting(ms(40))), [2, 3]);
        assert_eq!((ports(probes.take_waiting(ms(59))), probes.deadline()), (vec![], Some(ms(60))));
        probes.forget(ms(10_000));
        assert_eq!((probes.reported.len(), probes.deadline()), (3, Some(ms(60))));
        probes.forget(ms(10_001));
        assert_eq!((probes.reported.len(), probes.deadline()), (2, None), "the first with what waits of it");
    }
}
