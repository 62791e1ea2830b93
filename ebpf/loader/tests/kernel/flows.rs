//! What is counted and reported of TCP and RoCE v2. Traces written by hand are run through the programs in the kernel.

mod late;

use crate::support::collector;
use crate::support::packets::{ACK, CWR, ECE, FIN, RST, SYN, Segment, Transfer, ip};
use harmonaize_events::{
    Direction::{self, Egress, Ingress},
    Event, EventKind, FlowKey, RoceCounters, TcpFlow,
};
use harmonaize_loader::{Counters, Flows, Options, Programs, Trial};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::net::IpAddr;
use std::time::{Duration, Instant};

const HERE: [u8; 4] = [10, 0, 0, 1];
const THERE: [u8; 4] = [10, 0, 0, 2];
const FOREVER: Duration = Duration::MAX;

/// A conversation between this side of an interface and the other.
struct Line {
    collector: Programs,
    begun: Instant,
}

impl Line {
    /// Nothing is idle, and the first signal of congestion is the only first one.
    fn quiet() -> Option<Self> {
        Self::with(Options { idle_gap: FOREVER, clean: FOREVER, ..Options::default() })
    }

    fn with(options: Options) -> Option<Self> {
        Some(Self { collector: collector(options)?, begun: Instant::now() })
    }

    fn pass(&mut self, direction: Direction, packet: &[u8], segments: Option<(u32, u32)>) {
        self.collector.trial(Trial { direction, packet, segments, repeat: 1 }).unwrap();
    }

    fn tcp(&mut self, direction: Direction, segment: Segment) {
        self.tcp_with_ecn(direction, segment, 0);
    }

    fn tcp_with_ecn(&mut self, direction: Direction, mut segment: Segment, ecn: u8) {
        (segment.source, segment.destination) = if direction == Egress { (1000, 2000) } else { (2000, 1000) };
        let (source, destination) = ends(direction);
        self.pass(direction, &ip(source, destination, 6, ecn, &segment.bytes()), None);
    }

    fn roce(&mut self, direction: Direction, transfer: Transfer) {
        let (source, destination) = ends(direction);
        self.pass(direction, &ip(source, destination, 17, 2, &transfer.bytes(50_000)), None);
    }

    fn flows(&mut self) -> Flows {
        let mut flows = Flows::default();
        self.collector.read_flows(&mut flows).unwrap();
        for (key, flow) in &flows.tcp {
            assert_eq!(self.collector.read_flow(key).unwrap(), Some(Counters::Tcp(*flow)));
            let none = FlowKey { remote_port: 9, ..*key };
            assert_eq!(self.collector.read_flow(&none).unwrap(), None);
        }
        for (key, counters) in &flows.roce {
            assert_eq!(self.collector.read_flow(key).unwrap(), Some(Counters::Roce(*counters)));
        }
        flows
    }

    /// The only connection.
    fn connection(&mut self) -> TcpFlow {
        let flows = self.flows();
        let [(_, flow)] = flows.tcp[..] else { panic!("one connection: {flows:?}") };
        flow
    }

    fn queue_pair(&mut self, direction: Direction, number: u32) -> RoceCounters {
        let flows = self.flows();
        let mut found =
            flows.roce.iter().filter(|(key, _)| (key.direction, key.queue_pair) == (direction as u8, number));
        let one = found.next().unwrap_or_else(|| panic!("no queue pair {number}: {flows:?}")).1;
        assert_eq!(found.next(), None);
        one
    }

    fn events(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        while self.collector.read_events(16, |event| events.push(*event)).unwrap() == 16 {}
        events
    }

    /// Kinds and totals of the events since the last look, without those of flows that began.
    fn event_totals(&mut self) -> Vec<(EventKind, u64)> {
        let kind = |event: &Event| EventKind::from_number(event.kind).unwrap();
        let events = self.events();
        let of_note = events.iter().filter(|event| kind(event) != EventKind::FlowBegan);
        of_note.map(|event| (kind(event), event.total)).collect()
    }
}

fn ends(direction: Direction) -> (IpAddr, IpAddr) {
    if direction == Egress { (HERE.into(), THERE.into()) } else { (THERE.into(), HERE.into()) }
}

/// A segment with so many bytes from a sequence number.
fn data(sequence: u32, payload: usize) -> Segment {
    Segment { source: 0, destination: 0, sequence, acknowledgement: 0, flags: ACK, window: 256, payload }
}

/// An acknowledgement alone.
fn ack(acknowledgement: u32) -> Segment {
    Segment { acknowledgement, ..data(0, 0) }
}

#[test]
fn tcp_retransmissions_are_found_by_sequence_numbers() {
    let Some(mut line) = Line::quiet() else { return };
    let start = u32::MAX - 150;
    line.tcp(Egress, Segment { flags: SYN, ..data(start, 0) });
    line.tcp(Egress, Segment { flags: SYN, ..data(start, 0) });
    assert_eq!(line.connection().egress.retransmissions, 1, "a SYN again");
    // Over the end of the numbers, with a hole that is filled later.
    for (sequence, payload) in [(1, 100), (101, 100), (301, 100), (401, 0)] {
        line.tcp(Egress, data(start.wrapping_add(sequence), payload));
    }
    let own = line.connection().egress;
    assert_eq!((own.retransmissions, own.next_sequence), (1, start.wrapping_add(401)));
    line.tcp(Egress, data(start.wrapping_add(201), 100));
    line.tcp(Egress, data(start.wrapping_add(101), 100));
    assert_eq!(line.connection().egress.retransmissions, 3, "what comes before the highest end");
    // Half of it old, and the end of the connection twice.
    line.tcp(Egress, data(start.wrapping_add(351), 100));
    line.tcp(Egress, Segment { flags: ACK | FIN, ..data(start.wrapping_add(451), 0) });
    line.tcp(Egress, Segment { flags: ACK | FIN, ..data(start.wrapping_add(451), 0) });
    let own = line.connection().egress;
    assert_eq!((own.retransmissions, own.jumps, own.next_sequence), (5, 0, start.wrapping_add(452)));
    let told: Vec<_> = (1..6).map(|total| (EventKind::Retransmission, total)).collect();
    assert_eq!(line.event_totals(), told);
    // What cannot belong to it begins anew instead of being counted as anything.
    line.tcp(Egress, data(start.wrapping_add(1 << 31), 100));
    line.tcp(Egress, data(start.wrapping_add((1 << 31) + 100), 100));
    line.tcp(Egress, Segment { flags: RST, ..data(7, 100) });
    let own = line.connection().egress;
    assert_eq!((own.retransmissions, own.jumps), (5, 1));
    assert_eq!(own.traffic.packets, 14);
}

#[test]
fn tcp_rtts_exclude_retransmissions() {
    let Some(mut line) = Line::quiet() else { return };
    line.tcp(Egress, data(0, 100));
    line.tcp(Egress, data(100, 100));
    line.tcp(Ingress, ack(99));
    assert_eq!(line.connection().egress.rtt.count, 0, "not yet all of it");
    line.tcp(Ingress, ack(200));
    let trips = line.connection().egress.rtt;
    let most = u64::try_from(line.begun.elapsed().as_nanos()).unwrap();
    assert_eq!((trips.count, trips.last_ns, trips.sum_ns), (1, trips.min_ns, trips.min_ns));
    assert!(trips.last_ns > 0 && trips.last_ns < most, "{trips:?}");
    // Karn: sent again, and acknowledged.
    line.tcp(Egress, data(200, 100));
    line.tcp(Egress, data(200, 100));
    line.tcp(Ingress, ack(300));
    assert_eq!(line.connection().egress.rtt.count, 1);
    line.tcp(Egress, data(300, 100));
    line.tcp(Ingress, ack(400));
    // The other direction has its own.
    line.tcp(Ingress, data(0, 1));
    line.tcp(Egress, Segment { acknowledgement: 1, ..data(400, 0) });
    let flow = line.connection();
    assert_eq!((flow.egress.rtt.count, flow.ingress.rtt.count), (2, 1));
    assert!(flow.egress.rtt.min_ns <= flow.egress.rtt.last_ns);
}

#[test]
fn tcp_congestion_is_counted_and_reported_once() {
    let Some(mut line) = Line::quiet() else { return };
    line.tcp(Egress, Segment { flags: SYN | ECE | CWR, window: 0, ..data(0, 0) });
    line.tcp_with_ecn(Ingress, data(0, 10), 3);
    line.tcp_with_ecn(Ingress, data(10, 10), 3);
    line.tcp_with_ecn(Ingress, data(20, 10), 1);
    line.tcp(Egress, Segment { flags: ACK | ECE, ..ack(30) });
    line.tcp(Ingress, Segment { flags: ACK | CWR, window: 0, ..data(30, 10) });
    let flow = line.connection();
    assert_eq!((flow.ingress.traffic.ecn_ce, flow.egress.traffic.ecn_ce), (2, 0));
    assert_eq!((flow.egress.ece, flow.egress.cwr, flow.egress.zero_windows), (1, 0, 0));
    assert_eq!((flow.ingress.ece, flow.ingress.cwr, flow.ingress.zero_windows), (0, 1, 1));
    assert_eq!(line.event_totals(), [(EventKind::CongestionBegan, 1)]);
}

#[test]
fn buffers_of_several_segments_count_as_those() {
    let Some(mut line) = Line::quiet() else { return };
    for address in [IpAddr::from(THERE), "fd00::2".parse().unwrap()] {
        let own = if address.is_ipv4() { HERE.into() } else { "fd00::1".parse().unwrap() };
        let whole = data(0, 3000).bytes();
        let packet = ip(own, address, 6, 3, &whole);
        let headers = (packet.len() - 3000) as u64;
        line.pass(Egress, &packet, Some((3, 1000)));
        // Who handed it in did not count; and then it is sent again.
        line.pass(Egress, &packet, Some((0, 1000)));
        let flows = line.flows();
        let (key, flow) = flows.tcp.iter().find(|(key, _)| key.remote_address() == address).unwrap();
        assert_eq!(key.local_address(), own);
        let traffic = flow.egress.traffic;
        assert_eq!((traffic.packets, traffic.bytes, traffic.ecn_ce), (6, 2 * (3000 + 3 * headers), 6));
        assert_eq!(flow.egress.retransmissions, 3);
    }
    let totals = line.collector.totals(Programs::TRIAL_INTERFACE).unwrap().egress;
    assert_eq!((totals.buffers, totals.packets, totals.tcp), (4, 12, 12));
    assert_eq!(totals.buffer_bytes, 2 * (3054 + 3074));
    assert_eq!(totals.bytes, 2 * (3000 + 3 * 54) + 2 * (3000 + 3 * 74));
}

#[test]
fn partly_retransmitted_buffers_count_old_segments() {
    let Some(mut line) = Line::quiet() else { return };
    line.tcp(Egress, data(0, 1500));
    let mut again = data(0, 3000);
    (again.source, again.destination) = (1000, 2000);
    line.pass(Egress, &ip(HERE.into(), THERE.into(), 6, 0, &again.bytes()), Some((3, 1000)));
    let own = line.connection().egress;
    assert_eq!((own.retransmissions, own.traffic.packets, own.next_sequence), (2, 4, 3000));
}

/// Events can be waited for by the descriptor.
#[test]
fn events_make_the_fd_readable() {
    let Some(mut line) = Line::quiet() else { return };
    let ready = |line: &Line| {
        let mut polled = [PollFd::new(&line.collector, PollFlags::IN)];
        poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap()
    };
    assert_eq!(ready(&line), 0);
    line.tcp(Egress, data(0, 10));
    assert_eq!(ready(&line), 1);
    assert_eq!(line.events().len(), 1);
    assert_eq!(ready(&line), 0);
}

#[test]
fn bursts_are_reported_when_the_next_begins() {
    // Any time at all between two packets is a gap.
    let Some(mut line) = Line::with(Options { idle_gap: Duration::ZERO, ..Options::default() }) else {
        return;
    };
    line.tcp(Egress, data(0, 46));
    line.tcp(Egress, data(46, 146));
    line.tcp(Egress, data(192, 46));
    let traffic = line.connection().egress.traffic;
    let events = line.events();
    let kinds: Vec<_> = events.iter().map(|event| EventKind::from_number(event.kind).unwrap()).collect();
    assert_eq!(kinds, [EventKind::FlowBegan, EventKind::BurstBegan, EventKind::BurstBegan]);
    let [first, second, third] = &events[..] else { unreachable!() };
    assert_eq!(
        (second.burst_began_ns, second.burst_ended_ns, second.burst_bytes),
        (first.time_ns, first.time_ns, 100)
    );
    assert_eq!(
        (third.burst_began_ns, third.burst_ended_ns, third.burst_bytes),
        (second.time_ns, second.time_ns, 200)
    );
    assert_eq!((traffic.first_ns, traffic.last_ns), (first.time_ns, third.time_ns));
    assert_eq!((traffic.burst_began_ns, traffic.bytes - traffic.burst_after), (third.time_ns, 100));
    assert!(first.time_ns < second.time_ns && second.time_ns < third.time_ns);
    assert!(events.iter().all(|event| event.flow.direction == Egress as u8 && event.flow.local_port == 1000));
}

const SEND_ONLY: u8 = 4;
const WRITE_FIRST: u8 = 6;
const WRITE_MIDDLE: u8 = 7;
const WRITE_LAST: u8 = 8;
const READ: u8 = 12;
const RESPONSE_FIRST: u8 = 13;
const RESPONSE_MIDDLE: u8 = 14;
const RESPONSE_LAST: u8 = 15;
const ACKNOWLEDGE: u8 = 17;
const ATOMIC_RESPONSE: u8 = 18;
const FETCH_ADD: u8 = 20;
const CNP: u8 = 0x81;

fn transfer(opcode: u8, queue_pair: u32, sequence: u32) -> Transfer {
    Transfer { opcode, queue_pair, sequence, asks: false, extended: 0, payload: 16 }
}

fn asking(opcode: u8, queue_pair: u32, sequence: u32) -> Transfer {
    Transfer { asks: true, ..transfer(opcode, queue_pair, sequence) }
}

/// An ACK, or a NAK by its syndrome.
fn answer(queue_pair: u32, sequence: u32, syndrome: u8) -> Transfer {
    Transfer {
        extended: u32::from(syndrome) << 24,
        payload: 0,
        ..transfer(ACKNOWLEDGE, queue_pair, sequence)
    }
}

#[test]
fn roce_requests_are_measured_to_their_answers() {
    let Some(mut line) = Line::quiet() else { return };
    // Over the end of the numbers.
    line.roce(Egress, transfer(WRITE_FIRST, 7, 0xff_fffe));
    line.roce(Egress, transfer(WRITE_MIDDLE, 7, 0xff_ffff));
    line.roce(Egress, asking(WRITE_LAST, 7, 0));
    line.roce(Ingress, answer(9, 0, 0x1f));
    line.roce(Egress, transfer(READ, 7, 1));
    line.roce(Ingress, transfer(RESPONSE_FIRST, 9, 1));
    line.roce(Ingress, transfer(RESPONSE_MIDDLE, 9, 2));
    line.roce(Ingress, transfer(RESPONSE_LAST, 9, 3));
    line.roce(Egress, transfer(FETCH_ADD, 7, 4));
    line.roce(Ingress, transfer(ATOMIC_RESPONSE, 9, 4));
    // Nobody asked for the one; the other has been answered.
    line.roce(Ingress, answer(9, 5, 0));
    line.roce(Ingress, answer(9, 0, 0x1f));
    let most = u64::try_from(line.begun.elapsed().as_nanos()).unwrap();
    let (own, other) = (line.queue_pair(Egress, 7), line.queue_pair(Ingress, 9));
    assert_eq!((own.writes, own.reads, own.atomics, own.traffic.packets), (3, 1, 1, 5));
    assert_eq!((other.acknowledgements, other.read_responses, other.atomics), (3, 3, 1));
    assert_eq!((own.gaps, own.retransmissions, other.gaps, other.retransmissions), (0, 0, 0, 0));
    assert_eq!((own.rtt.count, other.rtt.count), (3, 0));
    assert!(own.rtt.min_ns > 0 && own.rtt.sum_ns < most);
    assert_eq!((own.source_port, own.next_request), (50_000, 5));
    assert_eq!(line.event_totals(), []);
    assert_eq!(line.collector.losses().unwrap().ambiguous, 0);
}

#[test]
fn roce_gaps_repeats_and_refusals_are_found() {
    let Some(mut line) = Line::quiet() else { return };
    // 12 and 13 are lost; the receiver asks for them; the sender goes back to 12, and to 11 once.
    for sequence in [10, 11, 14, 12, 13, 14, 15, 11, 16] {
        line.roce(Ingress, transfer(SEND_ONLY, 5, sequence));
    }
    line.roce(Egress, answer(6, 12, 0x60));
    line.roce(Egress, answer(6, 12, 0x21));
    line.roce(Egress, answer(6, 12, 0x62));
    line.roce(Egress, answer(6, 12, 0x40));
    let (own, other) = (line.queue_pair(Ingress, 5), line.queue_pair(Egress, 6));
    assert_eq!((own.sends, own.gaps, own.retransmissions), (9, 2, 4));
    assert_eq!((other.sequence_naks, other.not_ready_naks, other.fatal_naks, other.unknown), (1, 1, 1, 1));
    let mut told = vec![(EventKind::Gap, 2)];
    told.extend((1..5).map(|total| (EventKind::Retransmission, total)));
    told.extend((1..4).map(|total| (EventKind::Refusal, total)));
    assert_eq!(line.event_totals(), told);
}

#[test]
fn roce_reads_skip_sequence_numbers_responses_do_not() {
    let Some(mut line) = Line::quiet() else { return };
    line.roce(Egress, transfer(READ, 7, 100));
    line.roce(Egress, transfer(SEND_ONLY, 7, 164));
    line.roce(Egress, transfer(SEND_ONLY, 7, 166));
    // A response of 64 packets, of which two are lost, and one comes twice.
    line.roce(Ingress, transfer(RESPONSE_FIRST, 9, 100));
    for sequence in (101..163).filter(|sequence| ![110, 120].contains(sequence)) {
        line.roce(Ingress, transfer(RESPONSE_MIDDLE, 9, sequence));
    }
    line.roce(Ingress, transfer(RESPONSE_MIDDLE, 9, 110));
    line.roce(Ingress, transfer(RESPONSE_LAST, 9, 163));
    let (own, other) = (line.queue_pair(Egress, 7), line.queue_pair(Ingress, 9));
    assert_eq!(
        (own.gaps, own.retransmissions),
        (1, 0),
        "behind the READ any number may come, behind a SEND the next"
    );
    assert_eq!((other.gaps, other.retransmissions, other.read_responses), (2, 1, 63));
}

#[test]
fn roce_sequences_apply_to_connections_not_datagrams() {
    let Some(mut line) = Line::quiet() else { return };
    for sequence in [5, 900, 3] {
        line.roce(Egress, asking(0x60 | SEND_ONLY, 1, sequence));
        line.roce(Egress, asking(0x20 | SEND_ONLY, 2, sequence));
    }
    // No such operation: a READ or an invalidation on an unreliable connection, an RDMA WRITE in a datagram, the reliable
    // datagram, vendors'.
    for (queue_pair, opcode) in
        [(3, 0x20 | READ), (3, 0x60 | WRITE_FIRST), (3, 0x20 | 22), (3, 0x40), (3, 0xe0), (3, 31)]
    {
        line.roce(Egress, transfer(opcode, queue_pair, 1));
    }
    let (datagrams, connected) = (line.queue_pair(Egress, 1), line.queue_pair(Egress, 2));
    assert_eq!((datagrams.sends, datagrams.gaps, datagrams.retransmissions), (3, 0, 0));
    assert_eq!((connected.sends, connected.gaps, connected.retransmissions), (3, 894, 1));
    assert_eq!(line.queue_pair(Egress, 3).unknown, 6);
    // Neither is acknowledged.
    line.roce(Ingress, answer(4, 900, 0));
    assert_eq!(line.queue_pair(Egress, 2).rtt.count, 0);
}

#[test]
fn ambiguous_roce_requests_are_not_measured() {
    let Some(mut line) = Line::quiet() else { return };
    // Two queue pairs to one host with the same number under way: whose ACK is it?
    line.roce(Egress, asking(SEND_ONLY, 1, 50));
    line.roce(Egress, asking(SEND_ONLY, 2, 50));
    line.roce(Ingress, answer(8, 50, 0));
    line.roce(Ingress, answer(9, 50, 0));
    // The same request twice: which one is answered (Karn)?
    line.roce(Egress, asking(SEND_ONLY, 1, 51));
    line.roce(Egress, asking(SEND_ONLY, 1, 51));
    line.roce(Ingress, answer(8, 51, 0));
    assert_eq!(line.queue_pair(Egress, 1).rtt.count, 0);
    assert_eq!(line.queue_pair(Egress, 2).rtt.count, 0);
    assert_eq!(line.collector.losses().unwrap().ambiguous, 1);
    line.roce(Egress, asking(SEND_ONLY, 1, 52));
    line.roce(Ingress, answer(8, 52, 0));
    assert_eq!(line.queue_pair(Egress, 1).rtt.count, 1, "and afterwards all is well");
}

#[test]
fn roce_cnps_are_reported_once() {
    let Some(mut line) = Line::quiet() else { return };
    for _ in 0..3 {
        line.roce(Ingress, transfer(CNP, 3, 0));
    }
    let own = line.queue_pair(Ingress, 3);
    assert_eq!((own.notifications, own.traffic.packets, own.gaps, own.unknown), (3, 3, 0, 0));
    assert_eq!(line.event_totals(), [(EventKind::CongestionBegan, 1)]);
}

/// Runs 100,000 short flows through a table of 1,024 and a ring of 630 events. What is lost is counted, to the last one.
#[test]
fn full_tables_and_rings_lose_nothing_silently() {
    const FLOWS: u32 = 100_000;
    let options = Options { flows: 1024, ring: 1, idle_gap: FOREVER, ..Options::default() };
    let Some(mut line) = Line::with(options) else { return };
    let mut segment = Segment { flags: SYN, ..data(0, 0) };
    for flow in 0..FLOWS {
        (segment.source, segment.destination) = ((flow % 1000) as u16, (flow / 1000) as u16);
        let packet = ip(HERE.into(), THERE.into(), 6, 0, &segment.bytes());
        line.pass(Egress, &packet, None);
    }
    let flows = line.flows();
    let (losses, told) = (line.collector.losses().unwrap(), line.events().len() as u64);
    assert_eq!(losses.entries, u64::from(FLOWS));
    assert_eq!(flows.evicted + flows.tcp.len() as u64, u64::from(FLOWS));
    assert!((1..=1024).contains(&flows.tcp.len()), "{}", flows.tcp.len());
    assert!(told > 0 && losses.events > 0, "{told} {losses:?}");
    assert_eq!(told + losses.events, u64::from(FLOWS));
    let totals = line.collector.totals(Programs::TRIAL_INTERFACE).unwrap().egress;
    assert_eq!((totals.tcp, totals.unplaced, totals.bytes), (FLOWS.into(), 0, u64::from(FLOWS) * 54));
    // What is over may be forgotten, and is not evicted then.
    assert!(line.collector.forget(&flows.tcp[0].0).unwrap());
    assert!(!line.collector.forget(&flows.tcp[0].0).unwrap());
    assert_eq!(line.flows().evicted, flows.evicted);
}
