//! Late round trips: which are told, and what of them.

use super::{Line, SEND_ONLY, ack, answer, asking, data, ends};
use crate::support::packets::{Segment, ip};
use harmonaize_events::{
    Direction::{Egress, Ingress},
    EventKind, RttStats,
};
use harmonaize_loader::Options;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::time::{Duration, Instant};

/// Whether the latest round trip is told.
fn is_late(late: Duration, trips: &RttStats) -> bool {
    let late_ns = (late.as_nanos() as u64).max(trips.min_ns);
    !late.is_zero() && (late_ns..30_000_000).contains(&(trips.last_ns - trips.min_ns))
}

/// The fields of an event of a late round trip. They are the bytes, since when they left, for how long none was measured before,
/// and what it measures.
type Passed = (u64, u64, u64, u32, u32);

/// The round trip before: how long it took, and when it had ended, as the programs count that.
#[derive(Clone, Copy, Default)]
struct Before {
    took_ns: u64,
    ended: u32,
}

/// So many quick and slow round trips of one flow, by `pass` and its argument, whether to wait. What was measured says what must be
/// reported, however slow this machine is.
fn late_rtts(
    line: &mut Line,
    late: Duration,
    mut pass: impl FnMut(&mut Line, usize, bool),
    measured: impl Fn(&mut Line) -> (RttStats, u32),
    // By what was sent when, and the round trip before.
    passed: impl Fn(usize, u64, Before) -> Passed,
) {
    let (mut told, mut before) = (0, Before::default());
    for at in 0..60 {
        pass(line, at, matches!(at % 6, 3 | 4));
        let (trips, ended) = measured(line);
        assert_eq!(trips.count, at as u64 + 1);
        let events = line.events();
        let events: Vec<_> = events.iter().filter(|event| event.kind == EventKind::LateRtt as u32).collect();
        if is_late(late, &trips) {
            let [event] = events[..] else { panic!("{trips:?}: {events:?}") };
            let sent_ns = event.time_ns - trips.last_ns;
            assert_eq!((event.burst_ended_ns, event.count), (sent_ns, trips.count as u32));
            let bytes = (event.total, event.burst_bytes, event.burst_began_ns);
            let said = (bytes.0, bytes.1, bytes.2, event.paused_ns, event.size);
            assert_eq!(said, passed(at, sent_ns, before));
            assert_eq!(event.flow.direction, Egress as u8);
            told += 1;
        } else {
            assert!(events.is_empty(), "{trips:?}: {events:?}");
        }
        before = Before { took_ns: trips.last_ns, ended };
    }
    // A busy machine makes others late, too, or so late that they count as delayed.
    eprintln!("{told} told, of 20 that waited");
    assert_eq!(told > 0, !late.is_zero());
}

/// Twice the threshold, and less than what may be a delayed acknowledgement.
const WAIT: Duration = Duration::from_millis(8);

fn wait_for(wait: bool) {
    let begun = Instant::now();
    while wait && begun.elapsed() < WAIT {
        std::hint::spin_loop();
    }
}

#[test]
fn tcp_late_rtts_report_bytes_since_previous() {
    for late in [Duration::from_millis(4), Duration::ZERO] {
        let Some(mut line) = Line::with(Options { late_rtt: late, ..Options::default() }) else {
            return;
        };
        let pass = |line: &mut Line, at: usize, wait| {
            let start = at as u32 * 5000;
            line.tcp(Egress, data(start, 2500));
            line.tcp(Egress, data(start + 2500, 2500));
            wait_for(wait);
            line.tcp(Ingress, ack(start + 5000));
            // What comes in is measured too, to what is told of it; but that is this side's own time.
            line.tcp(Ingress, Segment { acknowledgement: start + 5000, ..data(start, 100) });
            wait_for(wait);
            line.tcp(Egress, Segment { acknowledgement: start + 100, ..data(start + 5000, 0) });
        };
        let measured = |line: &mut Line| {
            let egress = line.connection().egress;
            (egress.rtt, egress.ended)
        };
        // Each time twice 2554 bytes with data, and 54 of an acknowledgement.
        let passed = |at: usize, sent_ns: u64, before: Before| {
            let paused_ns = ((sent_ns >> 10) as u32).wrapping_sub(before.ended) << 10;
            (at as u64 * 5162 + 2554, 5162, sent_ns - before.took_ns, paused_ns, 2554)
        };
        late_rtts(&mut line, late, pass, measured, passed);
    }
}

#[test]
fn roce_late_rtts_are_reported() {
    for late in [Duration::from_millis(4), Duration::ZERO] {
        let Some(mut line) = Line::with(Options { late_rtt: late, ..Options::default() }) else {
            return;
        };
        let pass = |line: &mut Line, at: usize, wait| {
            line.roce(Egress, asking(SEND_ONLY, 7, at as u32));
            wait_for(wait);
            line.roce(Ingress, answer(9, at as u32, 0x1f));
        };
        let measured = |line: &mut Line| (line.queue_pair(Egress, 7).rtt, 0);
        late_rtts(&mut line, late, pass, measured, |_, _, _| Passed::default());
    }
}

#[test]
fn late_rtts_are_limited_to_one_per_millisecond() {
    let late = Duration::from_millis(4);
    let Some(mut line) = Line::with(Options { late_rtt: late, ..Options::default() }) else { return };
    let pass = |line: &mut Line, direction, port: u16, segment: Segment| {
        let (source, destination) = if direction == Egress { (port, 2000) } else { (2000, port) };
        let (from, to) = ends(direction);
        let segment = Segment { source, destination, ..segment };
        line.pass(direction, &ip(from, to, 6, 0, &segment.bytes()), None);
    };
    for port in 1..=100 {
        pass(&mut line, Egress, port, data(0, 2500));
        pass(&mut line, Egress, port, data(2500, 2500));
        pass(&mut line, Ingress, port, ack(5000));
        pass(&mut line, Egress, port, data(5000, 2500));
    }
    line.events();
    wait_for(true);
    let begun = Instant::now();
    (1..=100).for_each(|port| pass(&mut line, Ingress, port, ack(7500)));
    let passed = begun.elapsed().as_millis() as usize;
    let told = line.event_totals().into_iter().filter(|(kind, _)| *kind == EventKind::LateRtt).count();
    assert!(told <= passed + 1, "{told} in {passed} ms");
    assert_eq!(line.collector.losses().unwrap().events, 0, "nobody lost one");
}

/// Late round trips can be waited for by themselves.
#[test]
fn late_rtts_have_their_own_fd() {
    let late = Duration::from_millis(4);
    let Some(mut line) = Line::with(Options { late_rtt: late, ..Options::default() }) else { return };
    let ready = |line: &Line| {
        let mut polled = [PollFd::from_borrowed_fd(line.collector.late_rtt_fd(), PollFlags::IN)];
        poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap()
    };
    line.tcp(Egress, data(0, 10));
    line.tcp(Ingress, ack(10));
    assert_eq!(ready(&line), 0, "flows that began do not");
    let mut sequence = 10;
    let mut turn = |line: &mut Line, bytes: u32, wait| {
        for _ in 0..2 {
            line.tcp(Egress, data(sequence, bytes as usize));
            sequence += bytes;
        }
        wait_for(wait);
        line.tcp(Ingress, ack(sequence));
    };
    // Who sends next to nothing makes no queue, and may have waited for a delayed acknowledgement.
    (0..20).for_each(|at| turn(&mut line, 1500, at % 2 == 0));
    assert_eq!(ready(&line), 0, "connections that hardly move do not");
    // One that took too long, on a busy machine, is none.
    let mut turns = 0..100;
    while ready(&line) == 0 {
        let at = turns.next().expect("none is told");
        turn(&mut line, 2500, at % 2 == 0);
    }
    let events = line.events();
    assert_eq!(events[0].kind, EventKind::LateRtt as u32, "before the others");
    assert_eq!(ready(&line), 0);
}
