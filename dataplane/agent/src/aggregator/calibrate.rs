//! What one core of this machine does as an aggregator: packets taken, believed, added, and as many sent.

use harmonaize_abi::{Dtype, GrantId, ReduceOp};
use harmonaize_aggregator::packet::{HEADER_BYTES, Header, Kind, seal};
use harmonaize_aggregator::{Aggregator, Grant, Key, PayloadFormat, Pool, Recipient, Share};
use harmonaize_transport::datagram::{DatagramConfig, Datagrams};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

const WORKERS: u16 = 4;
/// Chunks of a round, all of one window.
const CHUNKS: u64 = 16;
const GRANT: GrantId = GrantId(1);
const SECRET: [u8; 32] = [1; 32];

/// Time of a packet in and a packet out, on one core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Calibration {
    /// In the kernel: sent and received through a socket of the loopback device.
    pub kernel: Duration,
    /// In the aggregator: read, tag, sum, and a tag for the answer.
    pub aggregator: Duration,
}

impl Calibration {
    /// Packets a second in, and as many out, that one core can do.
    pub fn packets_per_second(&self) -> u64 {
        (1e9 / (self.kernel + self.aggregator).as_nanos().max(1) as f64) as u64
    }
}

/// Measures with parts of `bytes` bytes, for about `time` in all; the shortest rounds count. None where the machine has no loopback
/// device, or `bytes` is no part's length.
pub fn calibrate(bytes: usize, time: Duration) -> Option<Calibration> {
    let half = time / 2;
    Some(Calibration { kernel: kernel(bytes + HEADER_BYTES, half)?, aggregator: own(bytes, half)? })
}

/// The shortest of some rounds, for each of `packets`.
fn shortest(time: Duration, packets: u32, mut round: impl FnMut() -> Option<Duration>) -> Option<Duration> {
    let (begun, mut best) = (Instant::now(), Duration::MAX);
    while begun.elapsed() < time || best == Duration::MAX {
        best = best.min(round()?);
    }
    Some(best / packets)
}

fn kernel(bytes: usize, time: Duration) -> Option<Duration> {
    let config = DatagramConfig { bytes, ..DatagramConfig::default() };
    let mut socket = Datagrams::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), config).ok()?;
    let to = socket.local_address();
    let packets = 64;
    shortest(time, packets, || {
        let begun = Instant::now();
        for _ in 0..packets {
            socket.push(|_| Some((to, bytes)));
        }
        socket.flush();
        let mut left = packets as usize;
        // What the loopback device takes is there when the call returns; what it drops does not come.
        while left > 0 {
            let taken = socket.receive(&mut |_, datagram| {
                std::hint::black_box(datagram.first());
            });
            if taken == 0 {
                break;
            }
            left = left.saturating_sub(taken);
        }
        Some(begun.elapsed())
    })
}

fn packet(kind: Kind, worker: u16, session: u64, chunk: u64, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; HEADER_BYTES];
    packet.extend_from_slice(payload);
    let header = Header {
        kind,
        worker,
        count: 1,
        communicator: GRANT,
        session,
        incarnation: 7,
        sequence: chunk + 1,
        chunk,
        had: 0,
        window: 0,
        note: 0,
    };
    seal(&header, &Key::derive(&SECRET, GRANT, worker), &mut packet);
    packet
}

fn own(bytes: usize, time: Duration) -> Option<Duration> {
    let units = 2 * CHUNKS as u32;
    let mut aggregator = Aggregator::new(7, Pool::new(units, bytes));
    let grant = Grant {
        communicator: GRANT,
        secret: SECRET,
        workers: WORKERS,
        format: PayloadFormat::Tensor { dtype: Dtype::F32, op: ReduceOp::Sum },
        elements: u32::try_from(bytes / 4).ok()?,
        ordered: false,
        share: Share { tenant: 1, weight: 1, guaranteed: units, most: units },
        parent: None,
    };
    aggregator.grant(grant).ok()?;
    let payload = vec![0; bytes / 4 * 4];
    let mut session = 0;
    shortest(time, CHUNKS as u32 * u32::from(WORKERS), || {
        session += 1;
        // Each round is a session of its own, so that its chunks are new.
        let parts: Vec<Vec<u8>> = (0..CHUNKS)
            .flat_map(|chunk| (0..WORKERS).map(move |worker| (chunk, worker)))
            .map(|(chunk, worker)| packet(Kind::Contribution, worker, session, chunk, &payload))
            .collect();
        let mut answers = 0;
        let mut sink = |_: Recipient, answer: &[u8]| answers += usize::from(!answer.is_empty());
        aggregator.receive(Duration::ZERO, &packet(Kind::Begin, 0, session, 0, &[]), &mut sink);
        let begun = Instant::now();
        for part in &parts {
            aggregator.receive(Duration::ZERO, part, &mut sink);
        }
        let took = begun.elapsed();
        (answers == parts.len() + 1).then_some(took)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_says_what_it_does() {
        let measured = calibrate(1024, Duration::from_millis(2)).unwrap();
        assert!(measured.kernel > Duration::ZERO && measured.aggregator > Duration::ZERO, "{measured:?}");
        assert!(measured.packets_per_second() > 0);
        assert_eq!(calibrate(0, Duration::ZERO), None, "no part has no bytes");
    }
}
