//! What an aggregator does on one core, beside what the machine can: parts summed in GB/s and packets a second, without a network.
//!
//! `cargo run --release -p harmonaize-aggregator --example rate`: for each size of chunk, in the same run and in turns: the ceiling (one pass of
//! the kernel over a long vector in the cache), the sum loop (the same kernel, slot by slot), tags (a digest of each part), and the
//! whole (`Aggregator::receive`: parse, tag, sum, the sum to all). The fastest of all rounds counts.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // a measurement of its own inputs

use harmonaize_abi::{Dtype, ReduceOp, View, ViewMut};
use harmonaize_aggregator::packet::{HEADER_BYTES, Header, Kind, Sealed, seal};
use harmonaize_aggregator::{Aggregator, Grant, Key, PayloadFormat, Pool, Recipient, Share};
use harmonaize_kernels::reduce;
use std::hint::black_box;
use std::time::{Duration, Instant};

const WORKERS: u16 = 8;
const WINDOW: u64 = 32;
const ROUNDS: usize = 30;
const SECRET: [u8; 32] = [1; 32];
/// Bytes of all parts of a round: they fit the cache of a core, and were there before.
const PARTS: usize = 1 << 20;

fn grant(bytes: usize) -> Grant {
    Grant {
        communicator: 1,
        secret: SECRET,
        workers: WORKERS,
        format: PayloadFormat::Tensor { dtype: Dtype::F32, op: ReduceOp::Sum },
        elements: (bytes / 4) as u32,
        ordered: false,
        share: Share { tenant: 1, weight: 1, guaranteed: 2 * WINDOW as u32, most: 2 * WINDOW as u32 },
        parent: None,
    }
}

fn packet(kind: Kind, worker: u16, chunk: u64, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; HEADER_BYTES];
    packet.extend_from_slice(payload);
    let header = Header {
        kind,
        worker,
        count: 1,
        communicator: 1,
        session: 1,
        incarnation: if kind == Kind::Begin { 0 } else { 7 },
        sequence: chunk + 1,
        chunk,
        had: (chunk + 1).saturating_sub(WINDOW),
        window: 0,
        note: 0,
    };
    seal(&header, &Key::derive(&SECRET, 1, worker), &mut packet);
    packet
}

fn timed(work: impl FnOnce()) -> Duration {
    let begun = Instant::now();
    work();
    begun.elapsed()
}

fn main() {
    println!("{WORKERS} workers, f32, one core; GB/s of parts (of the ceiling)");
    println!("chunk    ceiling  sum loop       tags   whole          packets in/s");
    for bytes in [1024, 4096, 8192] {
        let chunks = PARTS / bytes / usize::from(WORKERS);
        let part: Vec<f32> = (0..bytes / 4).map(|at| at as f32).collect();
        let payload: Vec<u8> = part.iter().flat_map(|value| value.to_le_bytes()).collect();
        let packets: Vec<Vec<u8>> = (0..chunks as u64)
            .flat_map(|chunk| (0..WORKERS).map(move |worker| (chunk, worker)))
            .map(|(chunk, worker)| packet(Kind::Contribution, worker, chunk, &payload))
            .collect();
        let keys: Vec<Key> = (0..WORKERS).map(|worker| Key::derive(&SECRET, 1, worker)).collect();
        let begin = packet(Kind::Begin, 0, 0, &[]);
        let long = vec![1.0_f32; PARTS / 8];
        let mut sum = vec![0.0_f32; PARTS / 8];
        let mut slots = vec![vec![0.0_f32; bytes / 4]; 2 * WINDOW as usize];
        let mut best = [Duration::MAX; 4];
        for _ in 0..ROUNDS {
            let mut aggregator = Aggregator::new(7, Pool::new(2 * WINDOW as u32, bytes));
            aggregator.grant(grant(bytes)).unwrap();
            let mut sent = 0_usize;
            aggregator.receive(Duration::ZERO, &begin, &mut |_: Recipient, _: &[u8]| ());
            let took = [
                timed(|| {
                    // Twice half of the parts: sum and source together take as much cache as the parts do.
                    for _ in 0..2 {
                        let to = ViewMut::from(&mut sum[..]);
                        reduce(
                            ReduceOp::Sum,
                            Dtype::F32,
                            &[to.as_view(), View::from(&long[..])],
                            &[to],
                            None,
                        )
                        .unwrap();
                    }
                }),
                timed(|| {
                    for (at, packet) in packets.iter().enumerate() {
                        let slot = &mut slots[at / usize::from(WORKERS) % (2 * WINDOW as usize)];
                        let (to, part) = (ViewMut::from(&mut slot[..]), View::from(&packet[HEADER_BYTES..]));
                        reduce(ReduceOp::Sum, Dtype::F32, &[to.as_view(), part], &[to], None).unwrap();
                    }
                }),
                timed(|| {
                    for (at, packet) in packets.iter().enumerate() {
                        black_box(
                            Sealed::read(packet).unwrap().open(&keys[at % usize::from(WORKERS)]).is_ok(),
                        );
                    }
                }),
                timed(|| {
                    for packet in &packets {
                        aggregator.receive(Duration::ZERO, packet, &mut |_: Recipient, packet: &[u8]| {
                            sent += packet.len()
                        });
                    }
                }),
            ];
            let counters = aggregator.counters(1).unwrap();
            assert_eq!(
                (counters.sums, sent),
                (chunks as u64, (HEADER_BYTES + bytes) * packets.len()),
                "all summed"
            );
            best.iter_mut().zip(took).for_each(|(best, took)| *best = took.min(*best));
        }
        let [ceiling, alone, tags, whole] = best.map(|took| PARTS as f64 / took.as_secs_f64() / 1e9);
        let share = |rate: f64| format!("{rate:6.2} ({:3.0}%)", 100.0 * rate / ceiling);
        let packets = packets.len() as f64 / best[3].as_secs_f64();
        println!(
            "{bytes:5} B  {ceiling:6.2}   {}  {tags:6.2}   {}  {packets:.0}",
            share(alone),
            share(whole)
        );
    }
}
