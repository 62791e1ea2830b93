//! Answers that are late are not lost: a whole window is asked for again, and the session goes on. What is lost is found and sent again
//! without waiting for time-outs, and nothing else is.

use crate::{Zeros, answers, config, grant};
use harmonaize_abi::SegmentIndex;
use harmonaize_aggregator::packet::{HEADER_BYTES, Kind, Sealed};
use harmonaize_aggregator::{
    Aggregator, Codes, Event, Grant, PayloadFormat, Pool, Reason, Share, Task, Worker, WorkerConfig,
};
use harmonaize_kernels::codes::Squares;
use std::time::Duration;

const WINDOW: u16 = 256;

fn done(segment: u64) -> Option<Event> {
    Some(Event::Done { segment: SegmentIndex(segment), squares: Squares::default() })
}

/// Who is ahead of others sends ranges of segments that they have not come to. It still sends the codes that they wait
/// for.
#[test]
fn ranges_of_segments_to_come_hold_up_no_codes() {
    let form = PayloadFormat::Shared { bits: 4, block: 64, ranks: 2 };
    let mut aggregator = Aggregator::new(1, Pool::new(64, 512));
    let share = Share { tenant: 1, weight: 1, guaranteed: 64, most: 64 };
    let grant = Grant { workers: 2, format: form, elements: 64, share, ..grant() };
    aggregator.grant(grant).unwrap();
    let worker = |worker: u16| {
        Worker::new(WorkerConfig {
            format: form,
            elements: 64,
            window: 2,
            codes: Codes { segment_elements: 128, ..Codes::default() },
            hosts: 2,
            ..config(worker)
        })
    };
    let mut workers = [worker(0), worker(1)];
    workers.iter_mut().for_each(|worker| worker.begin(Duration::ZERO, 1));
    let (mut done, mut called) = ([0; 2], [0; 2]);
    for step in 0..20 {
        let now = Duration::from_micros(100 * step);
        for at in 0..2 {
            // One has called all its operations, the other one after the other.
            let ahead = if at == 0 { 4 } else { (done[1] + 1).min(4) };
            while called[at] < ahead && workers[at].submit(SegmentIndex(called[at]), Task::Sum(128)) {
                called[at] += 1;
            }
            let mut packet = [0; HEADER_BYTES + 512];
            while let Some(bytes) = workers[at].poll_transmit(now, &Zeros, &mut packet) {
                for (to, packet) in answers(&mut aggregator, now, &packet[..bytes]) {
                    workers[to].receive(now, &packet, &mut Zeros);
                }
            }
            while let Some(Event::Done { .. }) = workers[at].poll_event() {
                done[at] += 1;
            }
        }
    }
    assert_eq!(done, [4, 4]);
}

/// An aggregator and its only worker.
struct Ends {
    aggregator: Aggregator,
    worker: Worker,
}

impl Ends {
    fn config() -> WorkerConfig {
        WorkerConfig { window: WINDOW, segments: 1, hosts: 1, ..config(0) }
    }

    /// In a session, of which a short chunk has told the worker how fast sums usually come.
    fn in_session(now: Duration) -> Self {
        Self::with(now, Self::config())
    }

    fn with(now: Duration, config: WorkerConfig) -> Self {
        let most = 2 * u32::from(WINDOW);
        let mut aggregator = Aggregator::new(1, Pool::new(most, 64));
        let share = Share { tenant: 1, weight: 1, guaranteed: most, most };
        aggregator.grant(Grant { workers: 1, share, ..grant() }).unwrap();
        let mut ends = Self { aggregator, worker: Worker::new(config) };
        ends.worker.begin(now, 1);
        let begin = ends.sent(now);
        ends.answer(now, &begin);
        assert!(ends.worker.submit(SegmentIndex(0), Task::Sum(4)));
        let quick = ends.sent(now);
        ends.answer(now, &quick);
        assert_eq!(ends.worker.poll_event(), done(0));
        ends
    }

    /// All that the worker sends now.
    fn sent(&mut self, now: Duration) -> Vec<Vec<u8>> {
        let (mut packet, mut packets) = ([0; 512], Vec::new());
        while let Some(bytes) = self.worker.poll_transmit(now, &Zeros, &mut packet) {
            packets.push(packet[..bytes].to_vec());
        }
        packets
    }

    /// The aggregator gets these, and the worker its answers.
    fn answer(&mut self, now: Duration, packets: &[Vec<u8>]) {
        let sums: Vec<_> =
            packets.iter().flat_map(|packet| answers(&mut self.aggregator, now, packet)).collect();
        sums.iter().for_each(|(_, packet)| self.worker.receive(now, packet, &mut Zeros));
    }
}

fn kinds(packets: &[Vec<u8>]) -> Vec<Kind> {
    packets.iter().map(|packet| Sealed::read(packet).unwrap().kind()).collect()
}

#[test]
fn a_window_that_is_answered_late_ends_no_session() {
    let mut now = Duration::from_millis(1);
    let mut ends = Ends::in_session(now);
    assert!(ends.worker.submit(SegmentIndex(1), Task::Sum(4 * u64::from(WINDOW))));
    let mut late = ends.sent(now);
    assert!(late.len() >= usize::from(WINDOW));
    now += Duration::from_millis(30);
    let again = ends.sent(now);
    assert_eq!(again.len(), usize::from(WINDOW), "all are asked for");
    assert!(again.iter().all(|packet| packet.len() == HEADER_BYTES), "and none is sent again");
    late.extend(again);
    assert_eq!(ends.worker.poll_event(), None, "the session has ended");
    ends.answer(now, &late);
    assert_eq!(ends.worker.poll_event(), done(1));
}

#[test]
fn losses_are_asked_for_at_once_and_repaired() {
    let now = Duration::from_millis(1);
    let mut ends = Ends::in_session(now);
    assert!(ends.worker.submit(SegmentIndex(1), Task::Sum(4 * 16)));
    let mut parts = ends.sent(now);
    parts.retain(|packet| packet.len() > HEADER_BYTES);
    assert_eq!(parts.len(), 16);
    // Two are lost, far from each other; of the last ones nothing comes after them that would tell.
    parts.remove(9);
    parts.remove(2);
    ends.answer(now, &parts);
    let questions = ends.sent(now);
    assert_eq!(kinds(&questions), [Kind::Acknowledge; 2], "no time has passed");
    ends.answer(now, &questions);
    let missing = ends.sent(now);
    assert_eq!(kinds(&missing), [Kind::Contribution; 2]);
    assert_eq!(ends.worker.counters().retransmits, 2);
    ends.answer(now, &missing);
    assert_eq!(ends.worker.poll_event(), done(1));
}

#[test]
fn a_lost_sum_alone_is_sent_again() {
    let now = Duration::from_millis(1);
    let mut ends = Ends::in_session(now);
    assert!(ends.worker.submit(SegmentIndex(1), Task::Sum(4 * 8)));
    let parts = ends.sent(now);
    let mut sums: Vec<_> =
        parts.iter().flat_map(|packet| answers(&mut ends.aggregator, now, packet)).collect();
    sums.remove(1);
    sums.iter().for_each(|(_, packet)| ends.worker.receive(now, packet, &mut Zeros));
    let questions = ends.sent(now);
    assert_eq!(kinds(&questions), [Kind::Acknowledge]);
    ends.answer(now, &questions);
    assert_eq!(ends.worker.counters().retransmits, 0);
    assert_eq!(ends.worker.poll_event(), done(1));
}

/// What waits in queues that are full is not lost. Each question about it is answered by a sum that is on its way already, and fills them more.
#[test]
fn waits_adapt_to_sums_that_take_longer() {
    let mut now = Duration::from_millis(1);
    let mut ends = Ends::in_session(now);
    let mut questions = Vec::new();
    for segment in 1..=20 {
        assert!(ends.worker.submit(SegmentIndex(segment), Task::Sum(4 * 8)));
        let mut late = ends.sent(now);
        let parts = late.len();
        for _ in 0..20 {
            now += Duration::from_millis(1);
            late.extend(ends.sent(now));
        }
        questions.push(late.len() - parts);
        ends.answer(now, &late);
        assert_eq!(ends.worker.poll_event(), done(segment));
    }
    assert!(questions[0] > 0 && questions[5..].iter().all(|asked| *asked == 0), "{questions:?}");
}

/// Until the session ends; when, and why.
fn ended(ends: &mut Ends, mut now: Duration) -> (Duration, Option<Event>) {
    loop {
        now = now.max(ends.worker.poll_timeout().unwrap());
        ends.sent(now);
        if let Some(event) = ends.worker.poll_event() {
            return (now, Some(event));
        }
    }
}

/// Whoever says that nobody is there, the aggregator is asked; it is given up only if it does not answer.
#[test]
fn a_refusal_is_believed_only_if_nobody_answers() {
    let mut now = Duration::from_millis(1);
    let mut ends = Ends::in_session(now);
    ends.worker.handle_refused(now);
    now += Duration::from_secs(1);
    ends.sent(now);
    assert_eq!(ends.worker.poll_event(), None, "nothing is waited for");
    for segment in 1..=50 {
        assert!(ends.worker.submit(SegmentIndex(segment), Task::Sum(4 * 8)));
        let parts = ends.sent(now);
        ends.worker.handle_refused(now);
        let questions = ends.sent(now);
        assert_eq!(kinds(&questions), [Kind::Acknowledge], "at once, and not for everything");
        ends.answer(now, &questions);
        now += Duration::from_millis(10);
        ends.answer(now, &parts);
        assert_eq!(ends.worker.poll_event(), done(segment), "a lie changes nothing");
    }
    let (refused, fifth) = (Some(Event::Ended(Reason::Refused)), Duration::from_millis(30));
    assert!(ends.worker.submit(SegmentIndex(51), Task::Sum(4 * 8)));
    ends.sent(now);
    ends.worker.handle_refused(now);
    assert_eq!(ended(&mut ends, now), (now + fifth, refused));
    // A session that begins where nobody is.
    ends.worker.begin(now, 2);
    assert_eq!(ends.sent(now).len(), 1);
    ends.worker.handle_refused(now);
    assert_eq!(ended(&mut ends, now), (now + fifth, refused));
    ends.worker.begin(now, 3);
    let silent = Some(Event::Ended(Reason::Silent));
    assert_eq!(ended(&mut ends, now), (now + 5 * fifth, silent), "as long where nobody says so");
}

/// Sums through a network that loses this part of all packets, each way; how the session ended, if it did.
fn through(lost: f64, loss_most: u32) -> Option<Event> {
    let mut now = Duration::from_millis(1);
    let mut ends = Ends::with(now, WorkerConfig { max_loss_permille: loss_most, ..Ends::config() });
    let mut state = 1_u64;
    let mut drops = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) as f64) < lost * (1_u64 << 31) as f64
    };
    for segment in 1..20 {
        assert!(ends.worker.submit(SegmentIndex(segment), Task::Sum(4 * u64::from(WINDOW))));
        loop {
            now += Duration::from_micros(500);
            let mut sums = Vec::new();
            for packet in ends.sent(now).into_iter().filter(|_| !drops()) {
                sums.extend(answers(&mut ends.aggregator, now, &packet));
            }
            for (_, packet) in sums.into_iter().filter(|_| !drops()) {
                ends.worker.receive(now, &packet, &mut Zeros);
            }
            match ends.worker.poll_event() {
                Some(Event::Done { .. }) => break,
                None => {}
                ended => return ended,
            }
        }
    }
    None
}

#[test]
fn a_session_losing_almost_everything_is_left() {
    let losses = Some(Event::Ended(Reason::Losses));
    for lost in [0.0, 0.01, 0.05] {
        assert_eq!(through(lost, 900), None, "{lost}");
    }
    for lost in [0.2, 0.3, 0.5] {
        assert_ne!(through(lost, 900), losses, "{lost}");
    }
    assert_eq!(through(0.9, 900), losses);
    assert_ne!(through(0.9, 1000), losses, "none is too much");
}
