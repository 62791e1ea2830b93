//! The agent's coarse report to control. It goes as often as control asks for it, and as soon as it may when a finding
//! changes.

use crate::telemetry::clock::realtime_ns;
use crate::telemetry::finding::{Finding, Found};
use crate::telemetry::names::Names;
use crate::telemetry::reading::Reading;
use crate::telemetry::to_proto::{self, Clock};
use crate::telemetry::{Handle, view};
use harmonaize_abi::{CommunicatorId, CongestionLevel, Nanos};
use harmonaize_analysis::marks::{Operation, RankCall};
use harmonaize_api::v1;
use harmonaize_api::v1::from_agent::Message;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

/// What control takes of each.
const LINKS: usize = 64;
const CHANGES: usize = 64;
const STRAGGLERS: usize = 64;
const OPERATIONS: usize = 256;
const ENDS: usize = 1024;
const OPERATIONS_PER_COMMUNICATOR: usize = 64;
const OPEN: usize = 64;
/// How often what was found is gathered: who is woken for each operation takes more time than it is worth. While nothing is found,
/// nothing wakes for it.
const GATHERED: Duration = Duration::from_millis(50);
/// Operations that are remembered until the next report.
const REMEMBERED: usize = 16 << 10;

/// Reports into `to` until the thread or whoever takes the messages is gone.
pub(crate) async fn run(handle: Handle, to: mpsc::WeakSender<Message>) {
    let mut wanted = handle.report_interval();
    let (_, mut findings) = handle.findings().listen();
    loop {
        let interval = *wanted.borrow_and_update();
        let Some(interval) = interval else {
            // Nobody wants any: what is found meanwhile is not told.
            if wanted.changed().await.is_err() {
                return;
            }
            findings = findings.resubscribe();
            continue;
        };
        let Some(before) = handle.read(false).await else { return };
        let mut reports = Reports { sequence: 0, before, pending: Pending::default(), interval };
        loop {
            let last = Instant::now();
            let (mut due, soonest) = (last + interval, last + interval / 2 + interval / 16);
            let session = loop {
                tokio::select! {
                    changed = wanted.changed() => match changed {
                        Ok(()) => break false,
                        Err(_) => return,
                    },
                    gathered = reports.pending.gather(&mut findings, due) => match gathered {
                        Some(true) => due = due.min(soonest),
                        Some(false) => {}
                        None => return,
                    },
                }
                if Instant::now() >= due {
                    break true;
                }
            };
            if !session {
                break;
            }
            let Some(now) = handle.read(false).await else { return };
            let report = reports.next(now, &handle.names());
            let Some(to) = to.upgrade() else { return };
            // Control that does not keep up misses this one: the next has a higher number.
            let _ = to.try_send(Message::Telemetry(report));
        }
    }
}

/// The reports of a session.
struct Reports {
    sequence: u64,
    before: Arc<Reading>,
    pending: Pending,
    interval: Duration,
}

/// What was found since the last report.
#[derive(Default)]
struct Pending {
    changes: Vec<Arc<Finding>>,
    over: Vec<Arc<Finding>>,
    operations: BTreeMap<CommunicatorId, Vec<Arc<Finding>>>,
    count: usize,
    dropped: u64,
    /// Whether something was found when it was last gathered.
    found: bool,
}

impl Pending {
    /// Takes what is found for a while, but not longer than `until`. Where nothing was found before, it waits for the first. Returns whether
    /// control should get it at once, or none when nothing will be found any more.
    async fn gather(&mut self, findings: &mut Receiver<Arc<Finding>>, until: Instant) -> Option<bool> {
        let mut at_once = false;
        if !self.found {
            tokio::select! {
                first = findings.recv() => match first {
                    Ok(finding) => at_once = self.take(&finding),
                    Err(RecvError::Lagged(count)) => self.dropped += count,
                    Err(RecvError::Closed) => return None,
                },
                () = sleep_until(until) => return Some(false),
            }
        }
        self.found = false;
        sleep_until(until.min(Instant::now() + GATHERED)).await;
        loop {
            match findings.try_recv() {
                Ok(finding) => at_once |= self.take(&finding),
                Err(TryRecvError::Empty) => return Some(at_once),
                Err(TryRecvError::Lagged(count)) => self.dropped += count,
                Err(TryRecvError::Closed) => return None,
            }
            self.found = true;
        }
    }

    /// True if control should hear of it at once.
    fn take(&mut self, finding: &Arc<Finding>) -> bool {
        match &finding.found {
            Found::Congestion(found) => {
                if self.changes.len() == CHANGES {
                    self.changes.remove(0);
                }
                self.changes.push(Arc::clone(finding));
                found.level == CongestionLevel::Severe || found.level == CongestionLevel::None
            }
            Found::Straggler(late) => {
                if late.straggler.ended.is_some() && self.over.len() < STRAGGLERS / 2 {
                    self.over.push(Arc::clone(finding));
                }
                true
            }
            Found::Operation(operation) => {
                if self.count < REMEMBERED && is_reportable(operation) {
                    self.count += 1;
                    self.operations.entry(operation.communicator).or_default().push(Arc::clone(finding));
                } else {
                    self.dropped += 1;
                }
                false
            }
            Found::Phase(_) => false,
        }
    }
}

/// Whether control can lay it together with what other agents say of it.
fn is_reportable(operation: &Operation) -> bool {
    let ended = operation.ranks.iter().all(|rank| rank.called <= rank.ended && rank.ended.is_some());
    operation.whole && ended && operation.ranks.len() <= ENDS && operation.edges.len() <= ENDS
}

/// Of each communicator the operation that has run longest, oldest first. Its ranks here must all have called it by `before`, and not all
/// have ended it.
fn open(now: &Reading, before: Nanos) -> Vec<v1::Operation> {
    let mut communicators = BTreeSet::new();
    let stands = |one: &&Operation| {
        let called = |rank: &RankCall| rank.called.is_some_and(|at| at <= before);
        let runs = one.ranks.iter().any(|rank| rank.ended.is_none());
        one.whole && runs && one.ranks.len() <= ENDS && one.ranks.iter().all(called)
    };
    let open = now.operations.iter().filter(stands);
    let open = open.filter(|one| communicators.insert(one.communicator)).take(OPEN);
    let told = |one| v1::Operation { edges: Vec::new(), ..to_proto::operation(one, Clock(now.offset_ns)) };
    open.map(told).collect()
}

/// Of a communicator's operations at most so many, evenly by number: those that the least sufficient power of two divides.
fn sample(operations: &[Arc<Finding>], most: usize) -> Vec<&Operation> {
    let all: Vec<&Operation> = operations
        .iter()
        .filter_map(|finding| match &finding.found {
            Found::Operation(operation) => Some(operation),
            _ => None,
        })
        .collect();
    for power in 0..64 {
        let kept: Vec<&Operation> = all
            .iter()
            .copied()
            .filter(|one| one.operation.0.trailing_zeros() >= power || one.operation.0 == 0)
            .collect();
        if kept.len() <= most {
            return kept;
        }
    }
    all.into_iter().take(most).collect()
}

/// The operations of each communicator, and how many of them are reported. Each gets as much of what is left as those that come after
/// it, so that nobody's are left out because others are busy. Where there are more communicators than are reported, others are left
/// out in another `second`, the same by all agents' clocks.
fn shares(
    operations: &BTreeMap<CommunicatorId, Vec<Arc<Finding>>>,
    second: u64,
) -> Vec<(&[Arc<Finding>], usize)> {
    let count = operations.len();
    let first = usize::try_from(second % count.max(1) as u64).unwrap_or(0);
    let mut left = OPERATIONS;
    let turned = operations.values().cycle().skip(first).take(count).enumerate();
    turned
        .map(|(place, of_one)| {
            let room = (left / (count - place)).max(1).min(left).min(OPERATIONS_PER_COMMUNICATOR);
            left -= room.min(of_one.len());
            (of_one.as_slice(), room)
        })
        .collect()
}

impl Reports {
    fn next(&mut self, now: Arc<Reading>, names: &Names) -> v1::TelemetryReport {
        self.sequence += 1;
        let pending = std::mem::take(&mut self.pending);
        let mut stragglers: Vec<v1::Straggler> =
            now.stragglers.iter().map(|one| to_proto::straggler(one, Clock(now.offset_ns))).collect();
        stragglers.truncate(STRAGGLERS / 2);
        stragglers.extend(pending.over.iter().filter_map(|finding| match &finding.found {
            Found::Straggler(over) => Some(to_proto::straggler(over, Clock(finding.offset_ns))),
            _ => None,
        }));
        let changes = pending.changes.iter().filter_map(|finding| match &finding.found {
            Found::Congestion(found) => Some(to_proto::congestion(found, names, Clock(finding.offset_ns))),
            _ => None,
        });
        let (mut operations, mut left_out) = (Vec::new(), pending.dropped);
        let second = realtime_ns(now.time, now.offset_ns) / 1_000_000_000;
        for (of_one, room) in shares(&pending.operations, second) {
            let kept = sample(of_one, room);
            left_out += (of_one.len() - kept.len()) as u64;
            operations.extend(kept.into_iter().map(|one| to_proto::operation(one, Clock(now.offset_ns))));
        }
        let mut links = view::links(&self.before, &now);
        links.truncate(LINKS);
        links.iter_mut().for_each(|link| link.counters = None);
        let report = v1::TelemetryReport {
            sequence: self.sequence,
            time_ns: realtime_ns(now.time, now.offset_ns),
            interval_ns: u64::try_from(self.interval.as_nanos()).unwrap_or(u64::MAX),
            links,
            changes: changes.collect(),
            stragglers,
            operations,
            open: open(&now, self.before.time),
            flow_count: now.flow_count,
            losses: Some(view::losses(&now)),
            cost: Some(view::cost(&self.before, &now)),
            operations_omitted: left_out,
            begun_ns: now.time.before(now.uptime).0,
        };
        self.before = now;
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_abi::{Epoch, OperationId};

    fn finding(operation: u64) -> Arc<Finding> {
        let ranks = vec![RankCall {
            rank: 0,
            called: Some(Nanos(5)),
            ended: Some(Nanos(9)),
            failed: false,
            bytes: 1,
            zero_input: None,
            zero_output: None,
        }];
        let found = Operation {
            communicator: CommunicatorId(7),
            operation: OperationId(operation),
            participant: 0,
            collective: Some(4),
            epochs: (Epoch(1), Epoch(1)),
            began: Nanos(5),
            ended: Nanos(9),
            ranks,
            edges: Vec::new(),
            segments: 1,
            first_segment: Some(Nanos(6)),
            coded: None,
            whole: true,
        };
        Arc::new(Finding { time: Nanos(10), offset_ns: 0, found: Found::Operation(found) })
    }

    #[test]
    fn agents_that_see_different_operations_choose_the_same_ones() {
        let numbers = |range: std::ops::Range<u64>| -> Vec<u64> {
            let all: Vec<_> = range.map(finding).collect();
            sample(&all, 64).iter().map(|one| one.operation.0).collect()
        };
        assert_eq!(numbers(0..64), (0..64).collect::<Vec<_>>());
        assert_eq!(numbers(0..1_000), (0..1_000).step_by(16).collect::<Vec<_>>());
        assert_eq!(numbers(3..1_003), (16..1_003).step_by(16).collect::<Vec<_>>());
    }

    #[test]
    fn each_communicator_is_told_of_however_busy_others_are() {
        let told = |communicators: u64, each: u64, second| -> Vec<usize> {
            let of = |_| (0..each).map(finding).collect::<Vec<_>>();
            let operations = (0..communicators).map(|id| (CommunicatorId(id), of(id))).collect();
            shares(&operations, second).into_iter().map(|(of_one, room)| sample(of_one, room).len()).collect()
        };
        for second in [0, 1, 12_345] {
            assert_eq!(told(1, 1_000, second), [64 - 1]);
            assert!(told(6, 1_000, second).iter().all(|count| (16..=64).contains(count)));
            assert_eq!(told(256, 1_000, second), [1; 256]);
            let many = told(300, 1_000, second);
            assert_eq!(
                (many.iter().sum::<usize>(), many.iter().filter(|count| **count == 0).count()),
                (256, 44)
            );
        }
        // Who has little to tell leaves its room to those that come after it.
        let mut operations: BTreeMap<CommunicatorId, Vec<Arc<Finding>>> =
            (0..7).map(|id| (CommunicatorId(id), vec![finding(id)])).collect();
        operations.insert(CommunicatorId(7), (0..1_000).map(finding).collect());
        assert_eq!(shares(&operations, 0).last().map(|(_, room)| *room), Some(OPERATIONS_PER_COMMUNICATOR));
        assert!(shares(&BTreeMap::new(), 7).is_empty());
    }

    #[test]
    fn what_has_run_longest_is_told_before_it_ends() {
        let open = |communicator, operation, called, ended: Option<u64>| {
            let found = finding(operation);
            let Found::Operation(found) = &found.found else { panic!("{found:?}") };
            let mut found = found.clone();
            let second =
                RankCall { rank: 1, called: Some(Nanos(called)), ended: ended.map(Nanos), ..found.ranks[0] };
            found.ranks.push(second);
            Operation { communicator: CommunicatorId(communicator), whole: operation != 9, ..found }
        };
        let mut now = Reading { time: Nanos(3_000), offset_ns: 1_000, ..Reading::default() };
        now.operations = vec![
            open(7, 1, 900, Some(950)), // ended, and about to be told
            open(7, 9, 901, None),      // something of it was lost
            open(7, 2, 910, None),
            open(7, 3, 920, None),   // after one that was open longer
            open(8, 0, 1_001, None), // called after the last report
        ];
        let told = super::open(&now, Nanos(1_000));
        assert_eq!(told.len(), 1);
        assert_eq!((told[0].communicator, told[0].operation, told[0].collective), (7, 2, Some(4)));
        let times: Vec<_> = told[0].ranks.iter().map(|rank| (rank.called_ns, rank.ended_ns)).collect();
        assert_eq!(times, [(1_005, 1_009), (1_910, 0)]);
        now.operations = (0..100).map(|number| open(number, 0, 900, None)).collect();
        assert_eq!(super::open(&now, Nanos(1_000)).len(), OPEN);
    }

    #[tokio::test]
    async fn what_is_found_ends_a_wait_and_is_gathered_together() {
        let (to, mut findings) = tokio::sync::broadcast::channel(16);
        let mut pending = Pending::default();
        let soon = Instant::now() + Duration::from_millis(5);
        assert_eq!(pending.gather(&mut findings, soon).await, Some(false));
        assert_eq!(pending.count, 0);
        // Far beyond the test: what is found ends the wait.
        let late = Instant::now() + Duration::from_secs(3600);
        let found = async { (0..3).for_each(|number| drop(to.send(finding(number)))) };
        let (gathered, ()) = tokio::join!(pending.gather(&mut findings, late), found);
        assert_eq!((gathered, pending.count), (Some(false), 3));
        // More may come, which is waited for no longer than before.
        assert_eq!(pending.gather(&mut findings, late).await, Some(false));
        assert!(!pending.found, "from here on it waits for the first");
        drop(to);
        assert_eq!(pending.gather(&mut findings, late).await, None);
    }

    #[test]
    fn a_report_keeps_to_what_control_takes() {
        let mut pending = Pending::default();
        for number in 0..2 * REMEMBERED as u64 {
            assert!(!pending.take(&finding(number)));
        }
        assert_eq!((pending.count, pending.dropped), (REMEMBERED, REMEMBERED as u64));
        let before = Arc::new(Reading::default());
        let interval = Duration::from_secs(1);
        let mut reports = Reports { sequence: 0, before: Arc::clone(&before), pending, interval };
        let report = reports.next(Arc::clone(&before), &Names::default());
        assert_eq!((report.sequence, report.operations.len()), (1, 64));
        assert_eq!(report.operations_omitted, 2 * REMEMBERED as u64 - 64);
        let report = reports.next(before, &Names::default());
        assert_eq!((report.sequence, report.operations.len(), report.operations_omitted), (2, 0, 0));
    }
}
