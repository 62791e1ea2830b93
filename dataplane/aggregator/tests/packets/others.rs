//! Elements of other types, and other reductions, than a communicator's form says, in the same session as what it says.

use crate::{COMMUNICATOR, answers, grant, quick};
use harmonaize_abi::{Dtype, ReduceOp, SegmentIndex};
use harmonaize_aggregator::packet::HEADER_BYTES;
use harmonaize_aggregator::{
    Aggregator, Event, Grant, PayloadFormat, Pool, Reason, Share, Task, Tensors, Worker, WorkerConfig,
};
use std::time::Duration;

const WORKERS: usize = 3;
const FORMAT: PayloadFormat = PayloadFormat::Tensor { dtype: Dtype::F32, op: ReduceOp::Sum };

/// Bytes of each segment: what a worker gives, and what it has got.
struct Memory {
    sizes: Vec<usize>,
    inputs: Vec<Vec<u8>>,
    outputs: Vec<Vec<u8>>,
}

impl Tensors for Memory {
    fn read(&self, SegmentIndex(segment): SegmentIndex, offset: u64, elements: usize, bytes: &mut [u8]) {
        let size = self.sizes[segment as usize];
        assert_eq!(bytes.len(), elements * size);
        bytes.copy_from_slice(&self.inputs[segment as usize][offset as usize * size..][..bytes.len()]);
    }
    fn write(&mut self, SegmentIndex(segment): SegmentIndex, offset: u64, elements: usize, bytes: &[u8]) {
        let size = self.sizes[segment as usize];
        assert_eq!(bytes.len(), elements * size);
        self.outputs[segment as usize][offset as usize * size..][..bytes.len()].copy_from_slice(bytes);
    }
}

fn aggregator(elements: u32, ordered: bool) -> Aggregator {
    let mut aggregator = Aggregator::new(7, Pool::new(64, 16));
    let share = Share { tenant: 1, weight: 1, guaranteed: 12, most: 48 };
    aggregator.grant(Grant { format: FORMAT, elements, ordered, share, ..grant() }).unwrap();
    aggregator
}

fn worker(worker: usize, elements: u32) -> Worker {
    let mut worker =
        Worker::new(WorkerConfig { format: FORMAT, elements, segments: 8, ..quick(worker as u16) });
    worker.begin(Duration::ZERO, 1);
    worker
}

/// Hands packets to and fro; what the workers tell.
fn run(aggregator: &mut Aggregator, workers: &mut [Worker], memories: &mut [Memory]) -> Vec<Vec<Event>> {
    let mut told = vec![Vec::new(); workers.len()];
    let mut packet = [0; HEADER_BYTES + 16];
    for step in 0..100 {
        let now = Duration::from_micros(20 * step);
        for index in 0..workers.len() {
            while let Some(bytes) = workers[index].poll_transmit(now, &memories[index], &mut packet) {
                for (to, packet) in answers(aggregator, now, &packet[..bytes]) {
                    workers[to].receive(now, &packet, &mut memories[to]);
                }
            }
            told[index].extend(std::iter::from_fn(|| workers[index].poll_event()));
        }
    }
    told
}

fn bytes<const N: usize, T>(values: impl Iterator<Item = T>, of: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.flat_map(of).collect()
}

#[test]
fn segments_of_all_types_follow_one_another() {
    let other = |elements, dtype, op| Task::Other { elements, dtype, op };
    let tasks = [
        Task::Sum(10),
        other(11, Dtype::F64, ReduceOp::Sum),
        other(33, Dtype::U8, ReduceOp::Max),
        other(3, Dtype::I64, ReduceOp::Product),
        other(9, Dtype::F32, ReduceOp::Min),
        other(18, Dtype::U32, ReduceOp::Sum),
        Task::Sum(1),
    ];
    let tensors = |rank: u64| {
        vec![
            bytes(0..10, |at: u8| (f32::from(at) + rank as f32).to_le_bytes()),
            bytes(0..11, |at: u8| (f64::from(at) * 0.5 + rank as f64).to_le_bytes()),
            bytes(0..33, |at: u8| [at.wrapping_mul(91).wrapping_add(rank as u8 * 70)]),
            bytes(1..4, |at: i64| ((at - 5) * (rank as i64 + 2)).to_le_bytes()),
            bytes(0..9, |at: i8| (f32::from(at) - 4.0 * rank as f32).to_le_bytes()),
            bytes(0..18, |at: u32| (at << 29).wrapping_add(rank as u32).to_le_bytes()),
            bytes(0..1, |_: u8| 2.5_f32.to_le_bytes()),
        ]
    };
    let expected = vec![
        bytes(0..10, |at: u8| (3.0 * f32::from(at) + 3.0).to_le_bytes()),
        bytes(0..11, |at: u8| (1.5 * f64::from(at) + 3.0).to_le_bytes()),
        bytes(0..33, |at: u8| {
            [(0..3_u8).map(|rank| at.wrapping_mul(91).wrapping_add(rank * 70)).max().unwrap()]
        }),
        bytes(1..4, |at: i64| ((at - 5).pow(3) * 24).to_le_bytes()),
        bytes(0..9, |at: i8| (f32::from(at) - 8.0).to_le_bytes()),
        bytes(0..18, |at: u32| (at << 29).wrapping_mul(3).wrapping_add(3).to_le_bytes()),
        bytes(0..1, |_: u8| 7.5_f32.to_le_bytes()),
    ];
    for ordered in [false, true] {
        let mut aggregator = aggregator(4, ordered);
        let mut workers: Vec<Worker> = (0..WORKERS).map(|index| worker(index, 4)).collect();
        let memory = |index: usize| {
            let inputs = tensors(index as u64);
            let outputs = inputs.iter().map(|input| vec![0; input.len()]).collect();
            Memory { sizes: vec![4, 8, 1, 8, 4, 4, 4], inputs, outputs }
        };
        let mut memories: Vec<Memory> = (0..WORKERS).map(memory).collect();
        for worker in &mut workers {
            assert!((0..).zip(tasks).all(|(segment, task)| worker.submit(SegmentIndex(segment), task)));
        }
        let told = run(&mut aggregator, &mut workers, &mut memories);
        for (told, memory) in told.iter().zip(&memories) {
            assert!(
                told.len() == tasks.len() && told.iter().all(|it| matches!(it, Event::Done { .. })),
                "{told:?}"
            );
            assert_eq!(memory.outputs, expected, "in order: {ordered}");
        }
        // Of 16 bytes a chunk: 3 of f32, 6 of f64, 3 of u8, 2 of i64, 3, 5 and 1.
        assert_eq!(aggregator.counters(COMMUNICATOR).unwrap().sums, 23);
    }
}

#[test]
fn differing_workers_lose_the_session() {
    let mut aggregator = aggregator(4, false);
    let mut workers: Vec<Worker> = (0..WORKERS).map(|index| worker(index, 4)).collect();
    let memory = |_| Memory { sizes: vec![4], inputs: vec![vec![0; 16]], outputs: vec![vec![0; 16]] };
    let mut memories: Vec<Memory> = (0..WORKERS).map(memory).collect();
    for (index, worker) in workers.iter_mut().enumerate() {
        let op = if index == 1 { ReduceOp::Max } else { ReduceOp::Min };
        assert!(worker.submit(SegmentIndex(0), Task::Other { elements: 4, dtype: Dtype::I32, op }));
    }
    for told in run(&mut aggregator, &mut workers, &mut memories) {
        assert_eq!(told, [Event::Ended(Reason::Lost)]);
    }
    let mut small = worker(0, 1);
    assert!(
        !small.submit(SegmentIndex(0), Task::Other { elements: 4, dtype: Dtype::F64, op: ReduceOp::Sum })
    );
    assert!(small.submit(SegmentIndex(0), Task::Other { elements: 4, dtype: Dtype::U8, op: ReduceOp::Sum }));
}
