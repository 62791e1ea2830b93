//! The programs that were built for diagnosis report why a packet is of no flow. They count as the others do.

use crate::support::packets::{ACK, Segment, ip};
use crate::support::{collector, object};
use harmonaize_events::Direction;
use harmonaize_loader::{Error, Options, Programs, Trial};
use std::io::Write;
use std::sync::{Arc, Mutex};
use tracing_subscriber::fmt::MakeWriter;

/// Keeps what is logged.
#[derive(Clone, Default)]
struct CapturedLog(Arc<Mutex<Vec<u8>>>);

impl Write for CapturedLog {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for CapturedLog {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// What is logged while events are read.
fn logged(collector: &mut Programs) -> String {
    let kept = CapturedLog::default();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(kept.clone()).finish();
    tracing::subscriber::with_default(subscriber, || collector.read_events(1000, |_| {}).unwrap());
    String::from_utf8(kept.0.lock().unwrap().clone()).unwrap()
}

fn segment() -> Vec<u8> {
    let segment = Segment {
        source: 1,
        destination: 2,
        sequence: 0,
        acknowledgement: 0,
        flags: ACK,
        window: 1,
        payload: 10,
    };
    ip([10, 0, 0, 1].into(), [10, 0, 0, 2].into(), 6, 0, &segment.bytes())
}

fn run(collector: &mut Programs, packet: &[u8], repeat: u32) {
    collector.trial(Trial { direction: Direction::Egress, packet, segments: None, repeat }).unwrap();
}

#[test]
fn malformed_packets_are_logged_with_reason() {
    let Some(mut collector) = collector(Options { diagnosis: true, xdp: true, ..Options::default() }) else {
        return;
    };
    run(&mut collector, &segment(), 5);
    assert_eq!(logged(&mut collector), "", "nothing is odd about it");
    let mut hostile = segment();
    // TCP's header would be longer than the packet.
    hostile[14 + 20 + 12] = 0xf0;
    run(&mut collector, &hostile, 1000);
    let text = logged(&mut collector);
    let reason =
        "interface 1, egress 1: the TCP header contradicts the packet; 64 bytes, headers known up to 34";
    assert!(text.contains(reason), "{text}");
    assert!(text.contains("WARN") && text.contains("program=\"telemetry::diagnosis::told\""), "{text}");
    assert!(text.lines().count() < 100, "a thousand packets within milliseconds are few records");
    let totals = collector.totals(1).unwrap().egress;
    assert_eq!((totals.tcp, totals.malformed, totals.packets), (5, 1000, 1005));
}

#[test]
fn suppressed_records_are_counted_per_processor() {
    let Some(mut collector) = collector(Options { diagnosis: true, ..Options::default() }) else { return };
    let mut fragment = segment();
    fragment[14 + 6] = 0x20;
    // Until a record says that there were others before it that were not told.
    for _ in 0..10_000 {
        run(&mut collector, &fragment, 1000);
        let text = logged(&mut collector);
        if text.lines().any(|line| line.contains("a fragment") && !line.contains("untold before 0 ")) {
            return;
        }
    }
    panic!("ten million fragments, and none of them went untold");
}

#[test]
fn production_programs_log_nothing() {
    let Some(_) = collector(Options::default()) else { return };
    let object = std::fs::read(object("telemetry.o")).unwrap();
    let options = Options { diagnosis: true, object: Some(object.into()), ..Options::default() };
    let error = Programs::open(&options).unwrap_err();
    assert!(matches!(error, Error::Object { .. }), "{error}");
}
