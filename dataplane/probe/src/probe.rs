//! Probing: a source port whose packets cross given switches, and trains over that way.

use crate::packet::Protocol;
use crate::sys::{enable_gso, enlarge_send_buffer};
use crate::trace::{Question, TracedRoute};
use crate::tracer::Tracer;
use crate::train::{CrossTraffic, Head, Kind, MOST, OVERHEAD_BYTES, PAYLOAD, TrainKey};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Source ports that are tried at a time, and how often others are.
const PORTS: usize = 8;
const ROUNDS: usize = 8;
/// How long the tracing of some ports may take.
const TRACE: Duration = Duration::from_millis(150);
/// How long a train may take to leave, and its answer to come.
const LEAVE: Duration = Duration::from_millis(500);
const ANSWER: Duration = Duration::from_millis(400);
/// How often is asked.
const ASK: Duration = Duration::from_millis(20);
/// Bytes of a train of which no length is asked for.
const USUAL: u32 = 64 << 10;
/// Datagrams that are handed to the kernel together, so that nothing of this host gets between them. They have about 16 KiB,
/// since they may arrive as one, and a train is to arrive as several.
const TOGETHER: u32 = 11;
/// What the kernel counts for a train that waits to leave is more than its bytes.
const ROOM: u32 = 4 * super::MAX_TRAIN;
/// Time between two trains and how much of it is chance, in milliseconds. So trains meet what comes in bursts at
/// different moments.
const APART_MS: (u64, u64) = (2, 8);
/// No further train after this.
const ENOUGH_TIME: Duration = Duration::from_millis(1200);

/// Ways that are remembered.
const MAX_ROUTES: usize = 64;

/// How much is sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrainConfig {
    /// Bytes of each: 0 for 64 KiB, at most [`super::MAX_TRAIN`].
    pub bytes: u32,
    /// How many, at most; 0 for one.
    pub count: u32,
    /// The first that arrives at this rate, in bits a second, is the last; 0 if all are wanted.
    pub enough_bps: u64,
    /// The first of which no third arrived quicker than this is the last too. Others were in its way all the while. 0 if all are
    /// wanted.
    pub spread_bps: u64,
}

/// What came of the train that arrived best: others' steady traffic spreads all of them, bursts only some.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeResult {
    /// The source port that it left from.
    pub source_port: u16,
    /// The rate at which its second half arrived, in bits on the wire a second. It counts Ethernet's header. It is 0
    /// where fewer than two packets arrived, or all at one moment.
    pub received_bps: u64,
    /// At which rate it was handed to the kernel, likewise.
    pub sent_bps: u64,
    /// How many packets left.
    pub sent: u32,
    /// How many arrived.
    pub received: u32,
    /// The rate at which other packets came into the answering host meanwhile, in bits a second. None where that host
    /// does not know.
    pub cross_traffic_bps: Option<u64>,
    /// The rate at which the quickest third of its second half arrived, or more of it. None where the answering host
    /// does not report it.
    pub peak_bps: Option<u64>,
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// No port was found whose packets cross the switches.
    #[error("of {tried} source ports none leads over these switches")]
    Unreachable {
        /// How many were tried.
        tried: usize,
    },
    /// Nobody answered.
    #[error("{0} did not answer; {1} packets were sent to it")]
    Silent(SocketAddrV4, u32),
    /// The kernel refused something.
    #[error("{0}: {1}")]
    Kernel(&'static str, #[source] io::Error),
}

/// Sends trains, and remembers by which of its ports it came over which switches. Searching for a port sends packets
/// over other switches too.
#[derive(Debug)]
pub struct Prober {
    source: Ipv4Addr,
    /// The latest last.
    routes: Vec<Route>,
}

/// A socket whose packets took a way when it was last looked at.
#[derive(Debug)]
struct Route {
    to: SocketAddrV4,
    via: Vec<Vec<Ipv4Addr>>,
    socket: UdpSocket,
    together: bool,
}

impl Prober {
    /// Will send from this address.
    pub fn new(source: Ipv4Addr) -> Self {
        Self { source, routes: Vec::new() }
    }

    /// Sends trains to an [`super::Answerer`] over exactly the switches that `via` names in order. It names each by the
    /// addresses that its ICMP may come from. Blocks for up to some two seconds.
    ///
    /// # Errors
    /// If no port leads there, nobody answers, or the kernel refuses a socket (raw ones need CAP_NET_RAW).
    pub fn probe(
        &mut self,
        to: SocketAddrV4,
        via: &[Vec<Ipv4Addr>],
        key: &TrainKey,
        trains: TrainConfig,
    ) -> Result<ProbeResult, ProbeError> {
        if let Some(at) = self.routes.iter().position(|way| way.to == to && way.via == via) {
            let way = self.routes.remove(at);
            if let Some(found) = self.probe_again(&way, key, trains)? {
                self.routes.push(way);
                return found;
            }
        }
        let way = self.find_route(to, via)?;
        let found = measure(&way, key, trains);
        if self.routes.len() >= MAX_ROUTES {
            self.routes.remove(0);
        }
        self.routes.push(way);
        found
    }

    /// Trains over a way that is known; none if it leads elsewhere by now. That is looked at always, for a switch that fails sends its
    /// packets over others, where trains would find all well; and meanwhile, for where a queue stands it takes as long as a train.
    fn probe_again(
        &self,
        route: &Route,
        key: &TrainKey,
        trains: TrainConfig,
    ) -> Result<Option<Result<ProbeResult, ProbeError>>, ProbeError> {
        if route.via.is_empty() {
            return Ok(Some(measure(route, key, trains)));
        }
        let kernel = |what| move |error| ProbeError::Kernel(what, error);
        let mut tracer = Tracer::open(self.source).map_err(kernel("no raw socket"))?;
        let socket = std::slice::from_ref(&route.socket);
        let (leads, found) = std::thread::scope(|scope| {
            let found = std::thread::Builder::new().spawn_scoped(scope, || measure(route, key, trains));
            let leads = find_crossing(&mut tracer, self.source, route.to, &route.via, socket);
            (leads, found.map(|found| found.join()))
        });
        let found = found.map_err(kernel("no thread"))?;
        let found = found.map_err(|_| ProbeError::Kernel("measuring", io::Error::other("a panic")))?;
        Ok(leads?.1.map(|_| found))
    }

    /// Looks for a way.
    fn find_route(&self, to: SocketAddrV4, via: &[Vec<Ipv4Addr>]) -> Result<Route, ProbeError> {
        let kernel = |what| move |error| ProbeError::Kernel(what, error);
        let socket = find(self.source, to, via)?;
        socket.connect(to).map_err(kernel("cannot send there"))?;
        socket.set_nonblocking(true).map_err(kernel("cannot wait for room"))?;
        enlarge_send_buffer(&socket, ROOM);
        let together = enable_gso(&socket, PAYLOAD as u16).is_ok();
        Ok(Route { to, via: via.to_vec(), socket, together })
    }
}

/// Sends the trains over a way.
fn measure(way: &Route, key: &TrainKey, trains: TrainConfig) -> Result<ProbeResult, ProbeError> {
    let kernel = |what| move |error| ProbeError::Kernel(what, error);
    let (socket, to) = (&way.socket, way.to);
    let begun = Instant::now();
    let mut best: Option<ProbeResult> = None;
    let mut seed = [0; 32];
    for number in 0..trains.count.max(1) {
        if number > 0 && begun.elapsed() > ENOUGH_TIME {
            break;
        }
        if number > 0 {
            let chance = u64::from(seed.last().copied().unwrap_or_default()) % APART_MS.1;
            std::thread::sleep(Duration::from_millis(APART_MS.0 + chance));
        }
        getrandom::fill(&mut seed).map_err(io::Error::other).map_err(kernel("no random numbers"))?;
        let name = seed.first_chunk().copied().unwrap_or_default();
        let found = match one((socket, key), to, name, trains.bytes, way.together) {
            Err(ProbeError::Silent(..)) if best.is_some() => continue,
            found => found?,
        };
        best = Some(best.map_or(found, |best| if found.merit() > best.merit() { found } else { best }));
        let quick = trains.enough_bps > 0 && found.received_bps >= trains.enough_bps;
        let spread = found.peak_bps.is_some_and(|quickest| quickest <= trains.spread_bps);
        if found.lost_little() && (quick || spread) {
            break;
        }
    }
    best.ok_or(ProbeError::Silent(to, 0))
}

impl ProbeResult {
    fn lost_little(&self) -> bool {
        u64::from(self.received) * 20 >= u64::from(self.sent) * 19
    }

    /// What was lost did not come out later: the rest may seem quicker than it was.
    fn merit(&self) -> (bool, u64) {
        (self.lost_little(), self.received_bps)
    }
}

/// Sends a train, and asks what came of it.
fn one(
    (socket, key): (&UdpSocket, &TrainKey),
    to: SocketAddrV4,
    name: [u8; 16],
    bytes: u32,
    together: bool,
) -> Result<ProbeResult, ProbeError> {
    let kernel = |what| move |error| ProbeError::Kernel(what, error);
    let source_port = socket.local_addr().map_err(kernel("no local address"))?.port();
    let bytes = if bytes == 0 { USUAL } else { bytes };
    let count = bytes.div_ceil(PAYLOAD as u32).clamp(2, MOST);
    let (sent, took) = send((socket, key), name, count, together).map_err(kernel("sending"))?;
    let wire =
        u128::from(sent.saturating_sub(1)) * u128::from(PAYLOAD as u64 + OVERHEAD_BYTES) * 8_000_000_000;
    let sent_bits = wire.checked_div(took.as_nanos()).unwrap_or_default();
    let answer = ask((socket, key), name, count).map_err(kernel("asking"))?;
    let Some((answer, more)) = answer else { return Err(ProbeError::Silent(to, sent)) };
    Ok(ProbeResult {
        source_port,
        received_bps: answer.bits.get(),
        sent_bps: u64::try_from(sent_bits).unwrap_or(u64::MAX),
        sent,
        received: answer.received.get().min(sent),
        cross_traffic_bps: more.cross_bps(),
        peak_bps: more.peak_bps(),
    })
}

/// A socket whose packets to `to` cross the switches.
fn find(source: Ipv4Addr, to: SocketAddrV4, via: &[Vec<Ipv4Addr>]) -> Result<UdpSocket, ProbeError> {
    let kernel = |what| move |error| ProbeError::Kernel(what, error);
    let bind = || UdpSocket::bind(SocketAddr::from((source, 0))).map_err(kernel("no socket"));
    if via.is_empty() {
        return bind();
    }
    let mut tracer = Tracer::open(source).map_err(kernel("no raw socket"))?;
    let mut tried = 0;
    // Those that did not fit are kept, so that the kernel gives out others.
    let mut kept = Vec::new();
    for _ in 0..ROUNDS {
        let sockets = (0..PORTS).map(|_| bind()).collect::<Result<Vec<_>, _>>()?;
        let (ways, fitting) = find_crossing(&mut tracer, source, to, via, &sockets)?;
        tried += ways.len();
        for socket in sockets {
            if fitting.is_some() && socket.local_addr().ok().map(|local| local.port()) == fitting {
                return Ok(socket);
            }
            kept.push(socket);
        }
        // Nobody says anything: other ports would not change that.
        if ways.iter().all(|way| way.hops.iter().all(Option::is_none)) {
            break;
        }
    }
    Err(ProbeError::Unreachable { tried })
}

/// Which ways the packets of sockets take, and the port of the first that leads over the switches.
fn find_crossing(
    tracer: &mut Tracer,
    source: Ipv4Addr,
    to: SocketAddrV4,
    via: &[Vec<Ipv4Addr>],
    sockets: &[UdpSocket],
) -> Result<(Vec<TracedRoute>, Option<u16>), ProbeError> {
    let ports = |socket: &UdpSocket| Some((socket.local_addr().ok()?.port(), to.port()));
    let question = Question {
        protocol: Protocol::Udp,
        source,
        destination: *to.ip(),
        pairs: sockets.iter().filter_map(ports).collect(),
        hops: u8::try_from(via.len()).unwrap_or(u8::MAX),
    };
    let ways = tracer.trace(question, TRACE).map_err(|error| ProbeError::Kernel("tracing", error))?;
    let fitting = ways.iter().find(|way| crosses(way, via)).map(|way| way.ports.0);
    Ok((ways, fitting))
}

fn crosses(way: &TracedRoute, via: &[Vec<Ipv4Addr>]) -> bool {
    way.hops.len() == via.len()
        && way.hops.iter().zip(via).all(|(hop, switch)| hop.is_some_and(|hop| switch.contains(&hop)))
}

/// Sends the train, many datagrams at a time where the kernel can (`together`). Returns how many of it left, and in
/// which time.
fn send(
    (socket, key): (&UdpSocket, &TrainKey),
    name: [u8; 16],
    count: u32,
    together: bool,
) -> io::Result<(u32, Duration)> {
    let mut datagrams = vec![0; PAYLOAD * TOGETHER as usize];
    let head = Head::new(Kind::Data, name, count).sign(key, &[]);
    for datagram in datagrams.chunks_mut(PAYLOAD) {
        let _ = head.write_to_prefix(datagram);
    }
    let mut most = if together { TOGETHER } else { 1 };
    let begun = Instant::now();
    let (mut sent, mut last) = (0, begun);
    while sent < count && begun.elapsed() < LEAVE {
        let some = most.min(count - sent);
        match socket.send(datagrams.get(..PAYLOAD * some as usize).unwrap_or_default()) {
            Ok(_) => {
                sent += some;
                last = Instant::now();
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                wait(socket, PollFlags::OUT, Duration::from_millis(5));
            }
            // The queue of the interface is full; or what an earlier one met on its way is told here.
            Err(error)
                if error.raw_os_error() == Some(libc::ENOBUFS)
                    || error.kind() == io::ErrorKind::Interrupted
                    || error.kind() == io::ErrorKind::ConnectionRefused => {}
            // The interface, or the way, does not take so many together.
            Err(_) if most > 1 => most = 1,
            Err(error) => return Err(error),
        }
    }
    Ok((sent, last.saturating_duration_since(begun)))
}

/// Asks until there is an answer, with what more is known; none if none came in time.
fn ask(
    (socket, key): (&UdpSocket, &TrainKey),
    name: [u8; 16],
    count: u32,
) -> io::Result<Option<(Head, CrossTraffic)>> {
    let head = Head::new(Kind::Request, name, count).sign(key, &[]);
    let question = [head.as_bytes(), CrossTraffic::UNKNOWN.as_bytes()].concat();
    let deadline = Instant::now() + ANSWER;
    let mut datagram = [0; PAYLOAD];
    while Instant::now() < deadline {
        // Lost, or too much: it is asked again.
        let _ = socket.send(&question);
        let again = Instant::now() + ASK;
        while let Some(left) = again.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            wait(socket, PollFlags::IN, left);
            let bytes = match socket.recv(&mut datagram) {
                Ok(bytes) => bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => break,
                Err(error) => return Err(error),
            };
            let datagram = datagram.get(..bytes).unwrap_or_default();
            let answer = Head::read(datagram);
            let ours = answer.filter(|(kind, head)| *kind == Kind::Answer && head.name == name);
            let ours = ours.and_then(|(_, head)| Some((head, CrossTraffic::read(datagram)?)));
            let ours = ours.filter(|(head, more)| head.is_by(key, more.as_bytes()));
            if ours.is_some() {
                return Ok(ours);
            }
        }
        if let Some(left) = again.checked_duration_since(Instant::now()) {
            std::thread::sleep(left);
        }
    }
    Ok(None)
}

fn wait(socket: &UdpSocket, what: PollFlags, left: Duration) {
    let left = Timespec {
        tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: left.subsec_nanos().into(),
    };
    // An interrupted sleep is a short one.
    let _ = poll(&mut [PollFd::from_borrowed_fd(socket.as_fd(), what)], Some(&left));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Answerer;

    const HERE: Ipv4Addr = Ipv4Addr::LOCALHOST;
    const KEY: TrainKey = TrainKey([7; 32]);

    #[test]
    fn a_train_is_answered() {
        let answerer = Answerer::bind(SocketAddrV4::new(HERE, 0), true, |_| KEY).unwrap();
        let trains = |bytes| TrainConfig { bytes, ..TrainConfig::default() };
        let mut prober = Prober::new(HERE);
        let probed = prober.probe(answerer.address(), &[], &KEY, trains(100_000)).unwrap();
        assert_eq!((probed.sent, probed.received), (68, 68));
        assert!(probed.received_bps > 0 && probed.sent_bps > 0 && probed.source_port > 0, "{probed:?}");
        let again = prober.probe(answerer.address(), &[], &KEY, trains(0)).unwrap();
        assert_eq!((again.sent, again.source_port), (45, probed.source_port));
        assert_eq!(prober.probe(answerer.address(), &[], &KEY, trains(1)).unwrap().sent, 2);
        let several = TrainConfig { count: 3, ..trains(400_000) };
        let probed = prober.probe(answerer.address(), &[], &KEY, several).unwrap();
        assert_eq!((probed.sent, probed.received), (272, 272));
        // Whoever has no key, or another address's, hears nothing.
        let stranger = prober.probe(answerer.address(), &[], &TrainKey([8; 32]), trains(0));
        assert!(matches!(stranger, Err(ProbeError::Silent(..))), "{stranger:?}");
        // All of it came quicker than that, and slower than this.
        for last in
            [TrainConfig { enough_bps: 1, ..several }, TrainConfig { spread_bps: u64::MAX, ..several }]
        {
            assert!(prober.probe(answerer.address(), &[], &KEY, last).is_ok());
        }
    }

    #[test]
    fn the_best_train_counts_and_one_that_lost_much_is_none() {
        let of = |received, received_bits| ProbeResult {
            source_port: 1,
            received_bps: received_bits,
            sent_bps: 0,
            sent: 100,
            received,
            cross_traffic_bps: None,
            peak_bps: None,
        };
        assert!(of(95, 10).merit() > of(94, 90).merit());
        assert!(of(100, 11).merit() > of(95, 10).merit());
    }

    #[test]
    fn silence_and_ways_that_are_not_there_are_told() {
        let silent = UdpSocket::bind((HERE, 0)).unwrap();
        let SocketAddr::V4(address) = silent.local_addr().unwrap() else { panic!("another family") };
        let trains = TrainConfig { bytes: 3000, ..TrainConfig::default() };
        let mut prober = Prober::new(HERE);
        assert!(matches!(prober.probe(address, &[], &KEY, trains), Err(ProbeError::Silent(_, 3))));
        drop(silent);
        assert!(matches!(prober.probe(address, &[], &KEY, trains), Err(ProbeError::Silent(..))));
        let error = prober.probe(address, &[vec![Ipv4Addr::new(10, 0, 0, 1)]], &KEY, trains).unwrap_err();
        let unprivileged = matches!(error, ProbeError::Kernel("no raw socket", _));
        let expected = unprivileged && !rustix::process::geteuid().is_root();
        assert!(expected || matches!(error, ProbeError::Unreachable { tried: 8 }), "{error}");
    }
}
