//! What control asks of the routes to other agents. It asks which route a connection takes, and how much of a route is
//! free. Threads of their own find that out, for both takes its time.

use crate::config::SourceError;
use crossbeam::channel::{Receiver, Sender, bounded};
use harmonaize_api::v1::from_agent::Message;
use harmonaize_api::v1::{self, Capabilities};
use harmonaize_api::{SECRET_BYTES, train_key};
use harmonaize_probe::{
    Answerer, MAX_HOPS, MAX_PAIRS, MAX_TRAIN, MAX_TRAINS, ProbeError, Prober, Protocol, Question,
    TracedRoute, Tracer, TrainConfig, TrainKey,
};
use harmonaize_verbs::{flow_label, source_port_on_wire};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::time::Duration;
use tokio::sync::mpsc;

/// Questions of a kind that may wait.
const QUESTIONS: usize = 256;
/// How long a trace may take.
const PATIENCE: Duration = Duration::from_millis(1800);
/// Most addresses of a switch.
const ADDRESSES: usize = 256;

/// The ends of both threads' queues, and what the agent can do. The threads end when this is dropped.
#[derive(Debug)]
pub struct Paths {
    source: Option<Ipv4Addr>,
    listen: u16,
    answerer: Option<Answerer>,
    /// Whether ways of queue pairs are traced.
    queue_pairs: bool,
    /// By which it is known whose trains are answered.
    key: [u8; SECRET_BYTES],
    missing: Vec<String>,
    queues: Option<(Sender<v1::TracePaths>, Sender<v1::ProbePath>)>,
}

impl Paths {
    /// Finds what this agent can do, and answers other agents' trains from now on. It answers on UDP at the address and port at
    /// which it listens for their connections. What is missing is said in the log and to control. `counts`: the kernel's interfaces
    /// count all that comes from other agents.
    pub fn begin(listen: SocketAddr, counts: bool) -> Self {
        let mut paths = Self {
            source: None,
            listen: listen.port(),
            answerer: None,
            queue_pairs: false,
            key: [0; SECRET_BYTES],
            missing: Vec::new(),
            queues: None,
        };
        let IpAddr::V4(address) = listen.ip() else {
            paths.record_missing("ways are traced and probed over IPv4 alone");
            return paths;
        };
        match Tracer::open(address) {
            Ok(_) => paths.source = Some(address),
            Err(error) => paths.record_missing(&format!(
                "ways cannot be traced without raw sockets, which need CAP_NET_RAW: {error}; control plans without them"
            )),
        }
        if let Err(error) = getrandom::fill(&mut paths.key) {
            paths.record_missing(&format!(
                "no random numbers, so no other agent can probe the way here: {error}"
            ));
            return paths;
        }
        let key = paths.key;
        let keys = move |source| TrainKey(train_key(&key, source));
        match Answerer::bind(SocketAddrV4::new(address, listen.port()), counts, keys) {
            Ok(answerer) => paths.answerer = Some(answerer),
            Err(error) => paths.record_missing(&format!(
                "UDP {listen} cannot be had, so no other agent can probe the way here: {error}"
            )),
        }
        paths
    }

    /// Links go by queue pairs. Their ways are traced where all send from the address at which this agent listens; else `found` says why
    /// not.
    pub(crate) fn set_queue_pairs(&mut self, found: Result<(), SourceError>) {
        match found {
            Ok(()) => self.queue_pairs = true,
            Err(error) => self.record_missing(&format!("ways of queue pairs are not traced: {error}")),
        }
    }

    /// Whether ways of queue pairs are traced.
    pub(crate) fn traces_queue_pairs(&self) -> bool {
        self.queue_pairs && self.source.is_some()
    }

    fn record_missing(&mut self, what: &str) {
        tracing::warn!("{what}");
        self.missing.push(what.chars().take(200).collect());
    }

    /// What Hello says of paths: whether connections can be paced, and congestion be reported, the caller knows.
    pub fn abilities(&self, pace: bool, congestion_reports: bool) -> Capabilities {
        let probe_address = self.answerer.as_ref().map(|answerer| answerer.address().to_string());
        Capabilities {
            trace: self.source.is_some(),
            probe: self.source.is_some() && self.answerer.is_some(),
            probe_address: probe_address.unwrap_or_default(),
            rate_limit: pace,
            congestion_reports,
            missing: self.missing.clone(),
            codecs: Vec::new(),
            aggregation: false,
            datagram_bytes: 0,
            probe_key: self.key.to_vec(),
            costs: None,
            congestion_controls: Vec::new(),
            racks: true,
            links_over_tcp: false,
            queue_pair_routes: self.traces_queue_pairs(),
        }
    }

    /// The port at which this agent takes connections.
    pub fn listen(&self) -> u16 {
        self.listen
    }

    /// Starts the threads; their answers go into `to`.
    ///
    /// # Errors
    /// If the kernel grants no thread.
    pub fn answer_into(&mut self, to: mpsc::WeakSender<Message>) -> std::io::Result<()> {
        let Some(source) = self.source else { return Ok(()) };
        let (traces, to_trace) = bounded(QUESTIONS);
        let (probes, to_probe) = bounded(QUESTIONS);
        let also = to.clone();
        spawn("traces", move || {
            answer(&to_trace, &also, |asked| Message::PathsTraced(trace(source, &asked)))
        })?;
        let mut prober = Prober::new(source);
        spawn("probes", move || {
            answer(&to_probe, &to, |asked| Message::PathProbed(probed(&mut prober, &asked)))
        })?;
        self.queues = Some((traces, probes));
        Ok(())
    }

    /// Takes a question; the answer, where there is one at once.
    pub fn trace(&self, asked: v1::TracePaths) -> Option<v1::PathsTraced> {
        let question = asked.request;
        if asked.queue_pairs && !self.traces_queue_pairs() {
            let error = PathError::QueuePairs.to_string();
            return Some(v1::PathsTraced { request: question, paths: Vec::new(), error });
        }
        let taken = self.queues.as_ref().is_some_and(|(traces, _)| traces.try_send(asked).is_ok());
        let error = self.refusal();
        (!taken).then(|| v1::PathsTraced { request: question, paths: Vec::new(), error })
    }

    /// As [`Paths::trace`].
    pub fn probe(&self, asked: v1::ProbePath) -> Option<v1::PathProbed> {
        let question = asked.request;
        let taken = self.queues.as_ref().is_some_and(|(_, probes)| probes.try_send(asked).is_ok());
        let error = self.refusal();
        (!taken).then(|| v1::PathProbed { request: question, error, ..v1::PathProbed::default() })
    }

    fn refusal(&self) -> String {
        match self.queues {
            Some(_) => "too many questions wait".to_owned(),
            None => self.missing.join("; "),
        }
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    std::thread::Builder::new().name(name.to_owned()).spawn(work).map(drop)
}

/// Answers questions until nobody asks any more.
fn answer<T>(asked: &Receiver<T>, to: &mpsc::WeakSender<Message>, mut find: impl FnMut(T) -> Message) {
    for question in asked {
        let answer = find(question);
        let Some(to) = to.upgrade() else { return };
        // Until there is room. Without control's session the agent is ending.
        if to.blocking_send(answer).is_err() {
            return;
        }
    }
}

/// Why a question of control is not answered.
#[derive(Debug, thiserror::Error)]
enum PathError {
    #[error("{0} is no port")]
    Port(u32),
    #[error("{0:?} is no IPv4 address")]
    Address(String),
    #[error("a key of {0} bytes, not {SECRET_BYTES}")]
    Key(usize),
    #[error("{0:?} is no address with a port")]
    Target(String),
    #[error("{0} hops")]
    Hops(u32),
    #[error("{0} pairs of ports; at most {MAX_PAIRS} are traced at a time")]
    Pairs(usize),
    #[error("a train of {0} bytes; at most {MAX_TRAIN}")]
    TrainBytes(u32),
    #[error("{0} trains; at most {MAX_TRAINS}")]
    Trains(u32),
    #[error("this agent does not trace the ways of queue pairs")]
    QueuePairs,
    #[error("more switches, or addresses of one, than a way has")]
    Switches,
    #[error("no raw socket: {0}")]
    Socket(std::io::Error),
    #[error("tracing: {0}")]
    Trace(std::io::Error),
}

fn port(number: u32) -> Result<u16, PathError> {
    u16::try_from(number).map_err(|_| PathError::Port(number))
}

fn address(text: &str) -> Result<Ipv4Addr, PathError> {
    text.parse().map_err(|_| PathError::Address(text.to_owned()))
}

fn trace(source: Ipv4Addr, asked: &v1::TracePaths) -> v1::PathsTraced {
    let found = question(source, asked).and_then(|question| {
        let mut tracer = Tracer::open(source).map_err(PathError::Socket)?;
        tracer.trace(question, PATIENCE).map_err(PathError::Trace)
    });
    let (paths, error) = match found {
        Ok(ways) => (to_traced_paths(asked, &ways), String::new()),
        Err(error) => (Vec::new(), error.to_string()),
    };
    v1::PathsTraced { request: asked.request, paths, error }
}

fn question(source: Ipv4Addr, asked: &v1::TracePaths) -> Result<Question, PathError> {
    let hops = u8::try_from(asked.hops).ok().filter(|hops| (1..=MAX_HOPS).contains(hops));
    let hops = hops.ok_or(PathError::Hops(asked.hops))?;
    if asked.ports.len() > MAX_PAIRS {
        return Err(PathError::Pairs(asked.ports.len()));
    }
    let pair = |pair: &v1::PortPair| Ok((port(pair.source_port)?, port(pair.destination_port)?));
    let pairs = asked.ports.iter().map(pair).collect::<Result<Vec<_>, PathError>>()?;
    let pairs = pairs.into_iter().filter_map(|pair| on_wire(asked.queue_pairs, pair)).collect();
    let protocol = if asked.queue_pairs { Protocol::Udp } else { Protocol::Tcp };
    Ok(Question { protocol, source, destination: address(&asked.address)?, pairs, hops })
}

/// The ports of packets of a connection or of a queue pair that is opened with these; none where the device chooses its port.
fn on_wire(queue_pair: bool, (source_port, destination_port): (u16, u16)) -> Option<(u16, u16)> {
    match queue_pair {
        false => Some((source_port, destination_port)),
        true if flow_label(source_port) == 0 => None,
        true => Some((source_port_on_wire(source_port), destination_port)),
    }
}

/// What was asked for, as far as it was traced. Nobody answers on the way of a queue pair whose device chooses the port.
fn to_traced_paths(asked: &v1::TracePaths, ways: &[TracedRoute]) -> Vec<v1::TracedPath> {
    let ports = |pair: &v1::PortPair| Some((port(pair.source_port).ok()?, port(pair.destination_port).ok()?));
    let traced = asked.ports.iter().filter_map(|pair| {
        let hops = match on_wire(asked.queue_pairs, ports(pair)?) {
            Some(ports) => ways.iter().find(|way| way.ports == ports)?.hops.as_slice(),
            None => &[],
        };
        let hops = hops.iter().map(|hop| hop.map_or_else(String::new, |hop| hop.to_string())).collect();
        let v1::PortPair { source_port, destination_port } = *pair;
        Some(v1::TracedPath { source_port, destination_port, hops })
    });
    traced.collect()
}

fn probed(prober: &mut Prober, asked: &v1::ProbePath) -> v1::PathProbed {
    let failed =
        |error: String| v1::PathProbed { request: asked.request, error, ..v1::PathProbed::default() };
    let (to, via, key) = match target(asked) {
        Ok(target) => target,
        Err(error) => return failed(error.to_string()),
    };
    let v1::ProbePath { bytes, trains: count, enough_bps: enough_bits, spread_bps: spread_bits, .. } = *asked;
    let trains = TrainConfig { bytes, count, enough_bps: enough_bits, spread_bps: spread_bits };
    match prober.probe(to, &via, &key, trains) {
        Ok(probed) => v1::PathProbed {
            request: asked.request,
            received_bps: probed.received_bps,
            sent_bps: probed.sent_bps,
            packets_sent: probed.sent,
            packets_received: probed.received,
            source_port: probed.source_port.into(),
            unreachable: false,
            error: String::new(),
            cross_traffic_bps: probed.cross_traffic_bps,
        },
        Err(error) => {
            let unreachable = matches!(error, ProbeError::Unreachable { .. });
            v1::PathProbed { unreachable, ..failed(error.to_string()) }
        }
    }
}

fn target(asked: &v1::ProbePath) -> Result<(SocketAddrV4, Vec<Vec<Ipv4Addr>>, TrainKey), PathError> {
    let to = asked.address.parse().map_err(|_| PathError::Target(asked.address.clone()))?;
    if asked.bytes > MAX_TRAIN {
        return Err(PathError::TrainBytes(asked.bytes));
    }
    if asked.trains > MAX_TRAINS {
        return Err(PathError::Trains(asked.trains));
    }
    if asked.via.len() > usize::from(MAX_HOPS) || asked.via.iter().any(|hop| hop.addresses.len() > ADDRESSES)
    {
        return Err(PathError::Switches);
    }
    let switch =
        |hop: &v1::Hop| hop.addresses.iter().map(|text| address(text)).collect::<Result<Vec<_>, _>>();
    let via = asked.via.iter().map(switch).collect::<Result<_, _>>()?;
    let key = asked.key.as_slice().try_into().map_err(|_| PathError::Key(asked.key.len()))?;
    Ok((to, via, TrainKey(key)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: Ipv4Addr = Ipv4Addr::LOCALHOST;

    fn trace_request(ports: Vec<(u32, u32)>, hops: u32, address: &str) -> v1::TracePaths {
        let pair = |(source_port, destination_port)| v1::PortPair { source_port, destination_port };
        let ports = ports.into_iter().map(pair).collect();
        v1::TracePaths { request: 7, address: address.to_owned(), ports, hops, queue_pairs: false }
    }

    #[test]
    fn queue_pairs_are_traced_as_their_devices_send() {
        // Of the last no label is made.
        let ports = vec![(50_000, 4791), (20_000, 4791), (49_152, 4791)];
        let asked = v1::TracePaths { queue_pairs: true, ..trace_request(ports, 3, "10.0.0.2") };
        let asking = question(HERE, &asked).unwrap();
        assert_eq!((asking.protocol, asking.pairs), (Protocol::Udp, vec![(50_000, 4791), (52_768, 4791)]));
        let ways = [TracedRoute { ports: (52_768, 4791), hops: vec![Some([10, 0, 0, 9].into()), None] }];
        let told = to_traced_paths(&asked, &ways);
        let path = |path: &v1::TracedPath| (path.source_port, path.destination_port, path.hops.join(" "));
        assert_eq!(
            told.iter().map(path).collect::<Vec<_>>(),
            [(20_000, 4791, "10.0.0.9 ".to_owned()), (49_152, 4791, String::new())]
        );
    }

    #[test]
    fn questions_that_make_no_sense_are_answered_with_what_is_wrong() {
        let wrong = [
            (trace_request(vec![(1, 65_536)], 3, "10.0.0.1"), "65536 is no port"),
            (trace_request(vec![(1, 2)], 0, "10.0.0.1"), "0 hops"),
            (trace_request(vec![(1, 2)], 17, "10.0.0.1"), "17 hops"),
            (trace_request(vec![(1, 2); 65], 3, "10.0.0.1"), "65 pairs of ports"),
            (trace_request(vec![(1, 2)], 3, "10.0.0.1:7100"), "is no IPv4 address"),
        ];
        for (asked, what) in wrong {
            let answer = trace(HERE, &asked);
            assert!(
                answer.request == 7 && answer.paths.is_empty() && answer.error.contains(what),
                "{answer:?}"
            );
        }
        let hop = |addresses: usize| v1::Hop { addresses: vec!["10.0.0.1".to_owned(); addresses] };
        let probe = |address: &str, via, bytes| v1::ProbePath {
            request: 8,
            address: address.to_owned(),
            via,
            bytes,
            ..v1::ProbePath::default()
        };
        let many = v1::ProbePath { trains: 5, ..probe("10.0.0.1:7", vec![], 0) };
        let mut prober = Prober::new(HERE);
        assert!(probed(&mut prober, &many).error.contains("5 trains; at most 4"));
        let wrong = [
            (probe("10.0.0.1", vec![], 0), "no address with a port"),
            (probe("10.0.0.1:7", vec![], MAX_TRAIN + 1), "a train of 1048577 bytes"),
            (probe("10.0.0.1:7", vec![], 0), "a key of 0 bytes, not 32"),
            (probe("10.0.0.1:7", vec![hop(1); 17], 0), "more switches"),
            (probe("10.0.0.1:7", vec![hop(257)], 0), "more switches"),
            (probe("10.0.0.1:7", vec![v1::Hop { addresses: vec!["s0".to_owned()] }], 0), "\"s0\""),
        ];
        for (asked, what) in wrong {
            let answer = probed(&mut prober, &asked);
            assert!(answer.request == 8 && !answer.unreachable && answer.error.contains(what), "{answer:?}");
        }
    }

    #[test]
    fn an_agent_that_cannot_says_so() {
        let paths = Paths::begin("[::1]:7100".parse().unwrap(), true);
        let abilities = paths.abilities(true, false);
        assert!(!abilities.trace && !abilities.probe && abilities.rate_limit, "{abilities:?}");
        assert_eq!(abilities.missing.len(), 1);
        let answer = paths.trace(trace_request(vec![(1, 2)], 3, "10.0.0.1")).unwrap();
        assert!(answer.request == 7 && answer.error.contains("IPv4"), "{answer:?}");
        assert!(paths.probe(v1::ProbePath::default()).is_some());
    }

    #[test]
    fn an_agent_whose_queue_pairs_send_from_elsewhere_says_so() {
        let mut paths = Paths::begin(SocketAddr::from((HERE, 0)), false);
        let missing = paths.abilities(false, true).missing.len();
        let (device, gid) = ("mlx5_1".to_owned(), Ipv4Addr::new(10, 0, 1, 1).into());
        paths.set_queue_pairs(Err(SourceError::Other { device, gid, listen: HERE.into() }));
        let abilities = paths.abilities(false, true);
        assert!(!abilities.queue_pair_routes && abilities.missing.len() == missing + 1);
        assert!(abilities.missing.last().is_some_and(|missing| missing.contains("mlx5_1")), "{abilities:?}");
        let asked =
            v1::TracePaths { queue_pairs: true, ..trace_request(vec![(50_000, 4791)], 3, "10.0.0.2") };
        let answer = paths.trace(asked).unwrap();
        assert!(answer.request == 7 && answer.error.contains("queue pairs"), "{answer:?}");
        paths.set_queue_pairs(Ok(()));
        assert_eq!(paths.abilities(false, true).queue_pair_routes, abilities.trace);
    }

    #[tokio::test]
    async fn trains_between_two_agents_are_answered() {
        let other = Paths::begin(SocketAddr::from((HERE, 0)), true);
        let mut paths = Paths::begin(SocketAddr::from((HERE, 0)), true);
        let abilities = other.abilities(false, false);
        if !abilities.probe {
            return harmonaize_testkit::strict::skip_test("it needs CAP_NET_RAW");
        }
        let (to, mut answers) = mpsc::channel(8);
        paths.answer_into(to.downgrade()).unwrap();
        let address = abilities.probe_address.clone();
        let key = train_key(abilities.probe_key.as_slice().try_into().unwrap(), HERE).to_vec();
        let asked =
            v1::ProbePath { request: 5, address, bytes: 200_000, trains: 2, key, ..v1::ProbePath::default() };
        assert!(paths.probe(asked).is_none());
        let answer = tokio::time::timeout(Duration::from_secs(30), answers.recv()).await.unwrap();
        let Some(Message::PathProbed(probed)) = answer else { panic!("{answer:?}") };
        assert_eq!(
            (probed.request, probed.packets_sent, probed.packets_received),
            (5, 136, 136),
            "{probed:?}"
        );
        assert!(probed.error.is_empty() && probed.received_bps > 0);
    }
}
