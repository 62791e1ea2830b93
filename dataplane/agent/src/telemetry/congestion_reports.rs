//! Congestion reports that control gets at once, on the paths of own connections and queue pairs. It gets the newest of each path, and
//! no more than it wants.

use crate::telemetry::analysis::Analysis;
use crate::telemetry::cpu_budget::nanoseconds;
use crate::telemetry::finding::Found;
use crate::telemetry::names::Names;
use crate::telemetry::own_flows::OwnFlows;
use crate::telemetry::to_proto::{self, Clock};
use harmonaize_abi::{CongestionLevel, Nanos};
use harmonaize_analysis::congestion::{Congestion, Link, Path, Signals};
use harmonaize_api::v1;
use harmonaize_api::v1::from_agent::Message;
use harmonaize_events::{Direction, Protocol};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

const SECOND: Duration = Duration::from_secs(1);
/// However many control wants, no more in a second.
const MAX_PER_SECOND: u32 = 100;
/// So many of a second's may go at once.
const BURST_DIVISOR: u64 = 10;
/// How often a report is said again while own traffic is held up, and while its path is starved.
const REPEAT: Duration = Duration::from_millis(500);
const STARVED_REPEAT: Duration = Duration::from_millis(50);
/// The least share of own traffic that shows who holds it up, as one part in so many. Less of what the path can carry, or of what
/// queue pairs send on it, shows nothing of that.
const MIN_OWN_PART: u64 = 8;
/// How long the end of a congestion waits for own traffic that shows it.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(60);
/// Paths that are kept in mind.
const MAX_PATHS: usize = 4096;

/// Where reports go, and how many in a second at most.
#[derive(Clone, Debug)]
pub(crate) struct ReportSink {
    pub(crate) to: mpsc::WeakSender<Message>,
    pub(crate) per_second: u32,
    /// Where other agents connect: of two ports, this is not the one that chooses the path.
    pub(crate) listen: u16,
    /// Also what queue pairs take: control knows their ways.
    pub(crate) queue_pairs: bool,
}

/// A path of which something was found.
#[derive(Clone, Copy, Debug)]
struct PathReport {
    newest: Congestion,
    /// Since when control has not heard the newest.
    pending_since: Option<Nanos>,
    reported: Option<Nanos>,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct CongestionReports {
    sink: Option<ReportSink>,
    paths: BTreeMap<Link, PathReport>,
    /// In thousandths of a report: what may go now.
    credit: u64,
    credited: Nanos,
}

impl CongestionReports {
    /// Control wants reports from now on, or none; it hears anew of every own path that is congested.
    pub(crate) fn set_sink(&mut self, now: Nanos, wanted: ReportSink, analysis: &Analysis) {
        self.sink = Some(wanted).filter(|wanted| wanted.per_second > 0);
        self.paths.clear();
        (self.credit, self.credited) = (BURST_DIVISOR * 1000, now);
        let congested = analysis.links().filter(|link| link.level > CongestionLevel::None);
        congested.for_each(|congestion| self.take(now, &Found::Congestion(congestion)));
    }

    /// Takes a finding in.
    pub(crate) fn take(&mut self, now: Nanos, found: &Found) {
        let Found::Congestion(found) = found else { return };
        let link = found.link;
        let Some(sink) = &self.sink else { return };
        let may_be_own = match link.path {
            Path::Connection { .. } => true,
            // Whether queue pairs that send from a port are own ones is seen once it is to be told.
            Path::Remote { port, .. } => port != 0 && sink.queue_pairs,
            _ => false,
        };
        if !may_be_own || link.direction != Direction::Egress {
            return;
        }
        let full = self.paths.len() >= MAX_PATHS;
        match self.paths.get_mut(&link) {
            Some(known) => {
                known.newest = *found;
                known.pending_since.get_or_insert(now);
            }
            // Of what control never heard to be congested, it need not hear that it is not.
            None if found.level == CongestionLevel::None || full => {}
            None => {
                let known = PathReport { newest: *found, pending_since: Some(now), reported: None };
                self.paths.insert(link, known);
            }
        }
    }

    /// Tells what is news, and what stands, as far as it may now.
    ///
    /// Cost: nothing without a path that is, or was until now, congested; else a look at each of those.
    pub(crate) fn poll_reports(
        &mut self,
        now: Nanos,
        offset_ns: i64,
        (own, analysis): (&OwnFlows, &Analysis),
        names: &Mutex<Names>,
    ) {
        let Some(wanted) = self.sink.clone().filter(|_| !self.paths.is_empty()) else { return };
        let passed = nanoseconds(now.since(self.credited).min(SECOND));
        let rate = u64::from(wanted.per_second.min(MAX_PER_SECOND));
        self.credit = (self.credit + passed * rate / 1_000_000).min(BURST_DIVISOR * 1000);
        // What is too little to count waits for the next time.
        if passed * rate >= 1_000_000 {
            self.credited = now;
        }
        let mut due: Vec<(Nanos, Link)> = Vec::new();
        self.paths.retain(|link, known| {
            let stands = known.newest.level > CongestionLevel::None;
            let told = known.reported.map(|told| now.since(told));
            let unshown = stands && !shows_own(&known.newest);
            let due_again = stands && told.is_some_and(|told| told >= STARVED_REPEAT);
            let current = if unshown || due_again { analysis.link(link) } else { None };
            if let Some(current) = current.filter(shows_own)
                && (unshown && is_impeded(&current)
                    || due_again && current.signals.starved
                    || told.is_some_and(|told| told >= REPEAT) && is_congested(&current))
            {
                known.newest = Congestion { level: known.newest.level, cause: known.newest.cause, ..current };
                known.pending_since.get_or_insert(now);
            }
            let Some(news) = known.pending_since else { return true };
            let waited = now.since(news);
            if !stands && (waited >= RECOVERY_TIMEOUT || known.reported.is_none()) {
                return false;
            }
            // That nothing of ours is held up says something only where something of ours passes.
            let passes = stands || analysis.link(link).is_some_and(|current| current.own_rate > 0);
            due.extend(passes.then_some((news, *link)));
            true
        });
        due.sort_unstable();
        for (_, link) in due {
            if self.credit < 1000 || !self.send_report(now, offset_ns, &link, own, names, &wanted) {
                return;
            }
        }
    }

    /// False if there is no room.
    fn send_report(
        &mut self,
        now: Nanos,
        offset_ns: i64,
        link: &Link,
        own: &OwnFlows,
        names: &Mutex<Names>,
        sink: &ReportSink,
    ) -> bool {
        let Some(known) = self.paths.get_mut(link) else { return true };
        let Some((owner, source_port)) = own.owner_of(link.path, sink.listen) else {
            // It is gone, or others' queue pairs.
            self.paths.remove(link);
            return true;
        };
        let newest = known.newest;
        if newest.level > CongestionLevel::None && !shows_own(&newest) {
            // Until own traffic shows it.
            return true;
        }
        let congestion = {
            let names = names.lock().unwrap_or_else(PoisonError::into_inner);
            to_proto::congestion(&newest, &names, Clock(offset_ns))
        };
        let message = v1::CongestionReport {
            congestion: Some(congestion),
            communicator: owner.communicator.0,
            epoch: owner.epoch.into(),
            peer: owner.to,
            source_port: source_port.into(),
            queue_pair: owner.flow.protocol == Protocol::Roce as u8,
        };
        let Some(sender) = sink.to.upgrade() else { return false };
        match sender.try_send(Message::CongestionReport(message)) {
            Ok(()) => {}
            Err(TrySendError::Full(_) | TrySendError::Closed(_)) => return false,
        }
        self.credit -= 1000;
        (known.pending_since, known.reported) = (None, Some(now));
        if newest.level == CongestionLevel::None {
            self.paths.remove(link);
        }
        true
    }
}

/// Whether own traffic is held up on a path now. A state outlasts what led to it, and a job pauses: what is measured then says nothing.
fn is_congested(current: &Congestion) -> bool {
    is_impeded(current) && current.own_rate > current.capacity / MIN_OWN_PART
}

fn is_impeded(current: &Congestion) -> bool {
    let Signals { delay, ecn_ce: marks, loss, .. } = current.signals;
    delay || marks || loss
}

/// Whether own traffic had a part in a finding. Nobody else's takes a connection's path. Others' queue pairs may send from the port of an
/// own one to the same host.
fn shows_own(found: &Congestion) -> bool {
    let all = found.own_rate.saturating_add(found.cross_traffic_rate);
    matches!(found.link.path, Path::Connection { .. }) || found.own_rate > all / MIN_OWN_PART
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::own_flows::{EpochLinks, sent_key};
    use harmonaize_abi::{CommunicatorId, CongestionCause, Epoch};
    use harmonaize_analysis::trace::{self, Label, Record};
    use harmonaize_events::{FlowKey, RoceCounters, TcpFlow};
    use harmonaize_transport::Flow;

    const MS: u64 = 1_000_000;
    const BEGIN: u64 = 1000 * MS;
    const LISTEN: u16 = 7100;

    struct World {
        reports: CongestionReports,
        own: OwnFlows,
        analysis: Analysis,
        names: Mutex<Names>,
        to: mpsc::Sender<Message>,
        received: mpsc::Receiver<Message>,
    }

    impl World {
        /// An agent with connections, local and remote port of each, that may say so much.
        fn new(ports: &[(u16, u16)], per_second: u32, room: usize) -> Self {
            let flow = |&(local, remote): &(u16, u16)| {
                let local = format!("10.0.0.1:{local}").parse().unwrap();
                (3, Flow::Tcp { local, remote: format!("10.0.0.2:{remote}").parse().unwrap() })
            };
            Self::with_flows(ports.iter().map(flow).collect(), per_second, room)
        }

        /// The same with flows to participants.
        fn with_flows(flows: Vec<(u32, Flow)>, per_second: u32, room: usize) -> Self {
            let (to, heard) = mpsc::channel(room);
            let formed = EpochLinks {
                communicator: CommunicatorId(7),
                tenant: "a".into(),
                name: "world".into(),
                ranks: vec![0],
                size: 2,
                epoch: Epoch(2),
                participant: 1,
                flows,
            };
            let mut world = Self {
                reports: CongestionReports::default(),
                own: OwnFlows::default(),
                analysis: Analysis::default(),
                names: Mutex::default(),
                to,
                received: heard,
            };
            let mut records = Vec::new();
            world.own.formed(&formed, Nanos(BEGIN), &[5], &mut records);
            records.iter().for_each(|record| world.analysis.take(record));
            let wanted =
                ReportSink { to: world.to.downgrade(), per_second, listen: LISTEN, queue_pairs: true };
            world.reports.set_sink(Nanos(BEGIN), wanted, &world.analysis);
            world
        }

        fn find(&mut self, now_ns: u64, (local, remote): (u16, u16), level: CongestionLevel) {
            let found = Found::Congestion(found(now_ns, (local, remote), level));
            self.reports.take(Nanos(now_ns), &found);
        }

        fn reports(&mut self, now_ns: u64) -> Vec<v1::CongestionReport> {
            self.reports.poll_reports(Nanos(now_ns), 0, (&self.own, &self.analysis), &self.names);
            let next = || match self.received.try_recv().ok()? {
                Message::CongestionReport(told) => Some(told),
                other => panic!("{other:?}"),
            };
            std::iter::from_fn(next).collect()
        }

        /// Lets own bytes pass until a time.
        fn pass(&mut self, (local_port, remote_port): (u16, u16), from_ns: u64, until_ns: u64) {
            let mut flow = TcpFlow::default();
            let key = FlowKey { local_port, remote_port, ..key() };
            for time_ns in (from_ns..until_ns).step_by(MS as usize) {
                let traffic = &mut flow.egress.traffic;
                (traffic.bytes, traffic.packets) = (traffic.bytes + 15_000, traffic.packets + 10);
                (traffic.last_ns, traffic.first_ns) = (time_ns, from_ns);
                self.analysis.take(&Record::Tcp { time_ns, key, flow });
                self.analysis.advance(Nanos(time_ns));
            }
        }
    }

    fn key() -> FlowKey {
        FlowKey {
            local: FlowKey::words([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 10, 0, 0, 1]),
            remote: FlowKey::words([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 10, 0, 0, 2]),
            interface: 5,
            protocol: Protocol::Tcp as u8,
            ..FlowKey::default()
        }
    }

    /// One to the other host that was opened with this port.
    fn queue_pair(source_port: u16) -> Flow {
        let [local, remote] = [[10, 0, 0, 1], [10, 0, 0, 2]].map(std::net::IpAddr::from);
        Flow::Roce { local, remote, local_pair: 17, remote_pair: 18, source_port }
    }

    fn found(now_ns: u64, (local, remote): (u16, u16), level: CongestionLevel) -> Congestion {
        let path = Path::Connection { address: key().remote, local, remote };
        let link = Link { interface: 5, direction: Direction::Egress, path };
        let cause = CongestionCause::CrossTraffic;
        Congestion { level, cause, own_rate: 1000, ..Congestion::none(link, Nanos(now_ns)) }
    }

    fn level(told: &[v1::CongestionReport]) -> Vec<v1::CongestionLevel> {
        told.iter().map(|told| told.congestion.as_ref().unwrap().level()).collect()
    }

    #[test]
    fn a_report_names_its_connection_and_port() {
        let ports = [(40_001, LISTEN), (LISTEN, 40_002)];
        let mut world = World::new(&ports, 100, 8);
        world.find(BEGIN, ports[0], CongestionLevel::Mild);
        world.find(BEGIN, ports[1], CongestionLevel::Severe);
        world.find(BEGIN, (40_009, LISTEN), CongestionLevel::Severe);
        let told = world.reports(BEGIN);
        let of = |told: &v1::CongestionReport| (told.communicator, told.epoch, told.peer, told.source_port);
        assert_eq!(told.iter().map(of).collect::<Vec<_>>(), [(7, 2, 3, 40_002), (7, 2, 3, 40_001)]);
        assert_eq!(level(&told), [v1::CongestionLevel::Severe, v1::CongestionLevel::Mild]);
        assert!(told.iter().all(|told| !told.queue_pair));
        assert_eq!(world.reports(BEGIN + 999 * MS), []);
        assert_eq!(world.reports(BEGIN + 1001 * MS), [], "nothing of ours is held up now");
        let whole = Link { path: Path::Whole, ..found(0, ports[0], CongestionLevel::Mild).link };
        let ingress =
            Link { direction: Direction::Ingress, ..found(0, ports[0], CongestionLevel::Mild).link };
        for link in [whole, ingress] {
            let other = Congestion { link, ..found(BEGIN, ports[0], CongestionLevel::Severe) };
            world.reports.take(Nanos(BEGIN), &Found::Congestion(other));
        }
        assert_eq!(world.reports(BEGIN + 1002 * MS), []);
    }

    #[test]
    fn a_report_names_the_port_that_its_queue_pair_was_opened_with() {
        let mut world = World::with_flows(vec![(3, queue_pair(20_000))], 100, 8);
        // Others' queue pairs, what comes in, and what goes over TCP that is not ours.
        let (out, into) = (Direction::Egress, Direction::Ingress);
        for (port, direction) in [(52_768, out), (52_769, out), (20_000, out), (52_768, into), (0, out)] {
            let path = Path::Remote { address: key().remote, port };
            let link = Link { interface: 5, direction, path };
            let found = found(BEGIN, (1, 2), CongestionLevel::Severe);
            world.reports.take(Nanos(BEGIN), &Found::Congestion(Congestion { link, ..found }));
        }
        let told = world.reports(BEGIN);
        let of = |told: &v1::CongestionReport| (told.communicator, told.epoch, told.peer, told.source_port);
        assert_eq!(told.iter().map(of).collect::<Vec<_>>(), [(7, 2, 3, 20_000)]);
        assert!(told.iter().all(|told| told.queue_pair));
        assert_eq!(world.reports.paths.len(), 1, "others' are not kept in mind");
        let unwanted = ReportSink { queue_pairs: false, ..world.reports.sink.clone().unwrap() };
        world.reports.set_sink(Nanos(BEGIN), unwanted, &world.analysis);
        let path = Path::Remote { address: key().remote, port: 52_768 };
        let link = Link { interface: 5, direction: out, path };
        let found = found(BEGIN, (1, 2), CongestionLevel::Severe);
        world.reports.take(Nanos(BEGIN), &Found::Congestion(Congestion { link, ..found }));
        assert!(world.reports.paths.is_empty(), "control knows no ways of queue pairs");
    }

    #[test]
    fn what_others_lose_from_the_same_port_is_not_reported() {
        let mut world = World::with_flows(vec![(3, queue_pair(50_000))], 100, 8);
        let path = Path::Remote { address: key().remote, port: 50_000 };
        let link = Link { interface: 5, direction: Direction::Egress, path };
        let mut told = |now_ns: u64, level, own_rate, cross_traffic_rate| {
            let found = found(now_ns, (1, 2), level);
            let found = Congestion { link, own_rate, cross_traffic_rate, ..found };
            world.reports.take(Nanos(now_ns), &Found::Congestion(found));
            (world.reports(now_ns).len(), world.reports.paths.len())
        };
        let severe = CongestionLevel::Severe;
        assert_eq!(told(BEGIN, severe, 0, 1_000_000), (0, 1), "ours is quiet");
        assert_eq!(told(BEGIN + MS, severe, 1000, 1_000_000), (0, 1), "next to nothing is ours");
        assert_eq!(told(BEGIN + 2 * MS, CongestionLevel::None, 0, 0), (0, 0), "control never heard of it");
        assert_eq!(told(BEGIN + 3 * MS, severe, 0, 0), (0, 1));
        assert_eq!(told(BEGIN + 4 * MS, severe, 500_000, 1_000_000), (1, 1));
    }

    #[test]
    fn a_queue_pairs_loss_is_reported_once_it_sends() {
        let flow = queue_pair(50_000);
        let mut world = World::with_flows(vec![(3, flow)], 100, 64);
        let key = FlowKey { interface: 5, ..sent_key(&flow).unwrap() };
        let others = FlowKey { queue_pair: 99, ..key };
        let send = |world: &mut World, key: FlowKey, times: std::ops::Range<u64>| {
            let (mut counters, mut told) = (RoceCounters { source_port: 50_000, ..Default::default() }, 0);
            for ms in times {
                let time_ns = BEGIN + ms * MS;
                let traffic = &mut counters.traffic;
                (traffic.bytes, traffic.packets) = (traffic.bytes + 15_000, traffic.packets + 10);
                (traffic.last_ns, traffic.first_ns) = (time_ns, BEGIN);
                counters.retransmissions += 5;
                world.analysis.take(&Record::Roce { time_ns, key, counters });
                world.analysis.advance(Nanos(time_ns));
                for found in world.analysis.found() {
                    world.reports.take(Nanos(time_ns), &found);
                }
                told += world.reports(time_ns).len();
            }
            told
        };
        assert_eq!(send(&mut world, others, 0..400), 0, "only others send");
        assert_eq!(world.reports.paths.len(), 1, "what they lose is seen");
        assert!(send(&mut world, key, 400..800) > 0);
    }

    /// What is reported of a connection, and when, in milliseconds. At each it sends so many packets and its round trips take so
    /// long. A `link` of 15 MB/s is stated or not.
    fn reported_sends(stated: bool, sends: impl Fn(u64) -> (u64, u64)) -> Vec<(u64, v1::Congestion)> {
        let (local_port, remote_port) = (40_001, LISTEN);
        let mut world = World::new(&[(local_port, remote_port)], 100, 64);
        let name = Label::new("eth0");
        let link =
            trace::Link { time_ns: BEGIN, interface: 5, name, bytes_per_second: 15_000_000, watched: true };
        if stated {
            world.analysis.take(&Record::Link(link));
        }
        let key = FlowKey { local_port, remote_port, ..key() };
        let (mut flow, mut told) = (TcpFlow::default(), Vec::new());
        for ms in 0..2000 {
            let (packets, trip_ns) = sends(ms);
            let time_ns = BEGIN + ms * MS;
            let (traffic, trips) = (&mut flow.egress.traffic, &mut flow.egress.rtt);
            if packets > 0 {
                (traffic.bytes, traffic.packets) =
                    (traffic.bytes + packets * 1500, traffic.packets + packets);
                (traffic.last_ns, traffic.first_ns) = (time_ns, BEGIN);
                if ms % 5 == 0 {
                    (trips.count, trips.sum_ns) = (trips.count + 1, trips.sum_ns + trip_ns);
                    (trips.last_ns, trips.min_ns) = (trip_ns, MS / 5);
                }
                world.analysis.take(&Record::Tcp { time_ns, key, flow });
            }
            world.analysis.advance(Nanos(time_ns));
            for found in world.analysis.found() {
                world.reports.take(Nanos(time_ns), &found);
            }
            told.extend(world.reports(time_ns).into_iter().map(|told| (ms, told.congestion.unwrap())));
        }
        told
    }

    #[test]
    fn a_path_is_told_of_often_while_it_is_starved() {
        // It fills the link; then half of it, and a queue stands; then nothing.
        let told = reported_sends(true, |ms| match ms {
            0..400 => (10, MS / 5),
            400..1000 => (5, 10 * MS),
            _ => (0, 0),
        });
        let starved: Vec<u64> =
            told.iter().filter(|(_, congestion)| congestion.starved).map(|(ms, _)| *ms).collect();
        assert!(starved.first().is_some_and(|ms| (405..430).contains(ms)), "{told:#?}");
        assert!((10..=14).contains(&starved.len()), "each 50 ms: {starved:?}");
        let causes = told.iter().filter(|(_, congestion)| congestion.starved);
        assert!(causes.clone().all(|(_, told)| told.cause() == v1::CongestionCause::CrossTraffic));
    }

    #[test]
    fn a_report_is_repeated_while_own_traffic_is_held_up() {
        // Steps of 100 ms, in the first 20 of which it sends, and finds a queue from 400 ms on, until 1600.
        let sends = |ms: u64| match ms % 100 {
            0..20 if (400..1600).contains(&ms) => (6, 10 * MS),
            0..20 => (6, MS / 5),
            _ => (0, 0),
        };
        let told = reported_sends(false, sends);
        let held: Vec<u64> = told
            .iter()
            .filter(|(_, congestion)| congestion.level() > v1::CongestionLevel::None && congestion.delay)
            .map(|(ms, _)| *ms)
            .collect();
        assert!(held.first().is_some_and(|ms| (400..430).contains(ms)), "{told:#?}");
        assert!(held.windows(2).any(|two| two[1] - two[0] >= 500), "again while it stands: {held:?}");
        assert!(held.iter().all(|ms| ms % 100 < 30), "only while it sends: {told:#?}");
        let standing = |told: &&(u64, v1::Congestion)| told.1.level() > v1::CongestionLevel::None;
        assert!(told.iter().filter(standing).all(|(_, congestion)| congestion.own_bps > 0), "{told:#?}");
    }

    #[test]
    fn the_end_is_told_when_own_traffic_shows_it() {
        let port = (40_001, LISTEN);
        let mut world = World::new(&[port], 100, 8);
        world.find(BEGIN, port, CongestionLevel::None);
        assert_eq!(world.reports(BEGIN), [], "control never heard of any");
        world.find(BEGIN, port, CongestionLevel::Severe);
        assert_eq!(world.reports(BEGIN).len(), 1);
        world.find(BEGIN + 100 * MS, port, CongestionLevel::None);
        assert_eq!(world.reports(BEGIN + 3000 * MS), [], "nothing of ours passes");
        world.pass(port, BEGIN + 3000 * MS, BEGIN + 3050 * MS);
        assert_eq!(level(&world.reports(BEGIN + 3050 * MS)), [v1::CongestionLevel::None]);
        assert!(world.reports(BEGIN + 9000 * MS).is_empty() && world.reports.paths.is_empty());
        world.find(BEGIN, port, CongestionLevel::Severe);
        world.reports(BEGIN + 10_000 * MS);
        world.find(BEGIN, port, CongestionLevel::None);
        assert!(
            world.reports(BEGIN + nanoseconds(RECOVERY_TIMEOUT) + 10_000 * MS).is_empty()
                && world.reports.paths.is_empty()
        );
    }

    #[test]
    fn each_paths_newest_report_survives_a_storm() {
        let ports: Vec<(u16, u16)> = (0..50).map(|port| (40_000 + port, LISTEN)).collect();
        let mut world = World::new(&ports, 1_000_000, 1024);
        let mut told = Vec::new();
        for ms in 0..1000 {
            for (at, port) in ports.iter().enumerate() {
                let level = if (ms + at as u64).is_multiple_of(2) {
                    CongestionLevel::Mild
                } else {
                    CongestionLevel::Severe
                };
                world.find(BEGIN + ms * MS, *port, level);
            }
            told.extend(world.reports(BEGIN + ms * MS));
        }
        assert!((95..=110).contains(&told.len()), "{} in a second", told.len());
        let each = |port: u32| told.iter().filter(|told| told.source_port == port).count();
        assert!((40_000..40_050).all(|port| each(port) >= 1), "some path was never told of");
        ports.iter().for_each(|port| world.find(BEGIN + 1000 * MS, *port, CongestionLevel::Severe));
        let last: Vec<_> = (1000..2000).flat_map(|ms| world.reports(BEGIN + ms * MS)).collect();
        let mut newest = std::collections::BTreeMap::new();
        last.iter().for_each(|told| drop(newest.insert(told.source_port, level(std::slice::from_ref(told)))));
        assert!(newest.len() == 50 && newest.values().all(|one| *one == [v1::CongestionLevel::Severe]));
    }

    #[test]
    fn reports_without_room_wait_for_the_next_turn() {
        let ports = [(40_001, LISTEN), (40_002, LISTEN)];
        let mut world = World::new(&ports, 100, 1);
        ports.iter().for_each(|port| world.find(BEGIN, *port, CongestionLevel::Mild));
        assert_eq!(
            (world.reports(BEGIN).len(), world.reports(BEGIN).len(), world.reports(BEGIN).len()),
            (1, 1, 0)
        );
        let mut records = Vec::new();
        world.own.ended(CommunicatorId(7), Nanos(BEGIN), &[5], &mut records);
        world.find(BEGIN, ports[0], CongestionLevel::Severe);
        assert!(world.reports(BEGIN).is_empty() && world.reports.paths.len() == 1, "the connection is gone");
        let mut none = World::new(&ports, 0, 8);
        none.find(BEGIN, ports[0], CongestionLevel::Severe);
        assert!(none.reports(BEGIN).is_empty() && none.reports.paths.is_empty());
    }
}
