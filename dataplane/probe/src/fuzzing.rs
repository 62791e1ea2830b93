//! What fuzzers call: readers of datagrams, which are private otherwise.

use crate::packet::parse_time_exceeded;
use crate::train::{CrossTraffic, Head, TrainKey};

/// Reads a datagram of a train, and a message of a switch.
///
/// # Panics
/// Where bytes that nobody has signed pass for signed ones.
pub fn datagram(bytes: &[u8]) {
    if let Some((_, head)) = Head::read(bytes) {
        let behind = bytes.get(size_of::<Head>()..).unwrap_or_default();
        assert!(!head.is_by(&TrainKey([7; 32]), behind), "the tag of a key that nobody has");
        let signed = head.sign(&TrainKey([7; 32]), behind);
        assert!(signed.is_by(&TrainKey([7; 32]), behind), "its own tag is wrong");
    }
    if let Some(more) = CrossTraffic::read(bytes) {
        let _ = (more.cross_bps(), more.peak_bps());
    }
    if let Some((_, doomed)) = parse_time_exceeded(bytes) {
        let mut packet = [0; crate::packet::MOST];
        assert!(doomed.sound().write(1, &mut packet) > 0, "{doomed:?} is not written");
    }
}
