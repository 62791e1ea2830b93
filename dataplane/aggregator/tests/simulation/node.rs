//! A host in the simulation: its worker, its memory, and what it knows of the others.

use super::coded;
use super::scenario::{PATIENCE, RETRY_MOST, Scenario};
use harmonaize_abi::SegmentIndex;
use harmonaize_aggregator::{Codes, Key, Summation, Tensors, Worker, WorkerConfig};
use harmonaize_kernels::codes::Squares;
use std::collections::BTreeSet;
use std::time::Duration;

/// A tenant's tensors, segment by segment; they outlive restarts of the worker.
pub(crate) struct Memory {
    pub(crate) inputs: Vec<Vec<i32>>,
    pub(crate) outputs: Vec<Vec<Option<i32>>>,
    pub(crate) expected: Vec<Vec<i32>>,
    /// Where the current session has written.
    pub(crate) written: BTreeSet<(u64, u64)>,
    /// Which host this is, and where payloads are codes their sums.
    pub(crate) host: usize,
    pub(crate) codes: Option<coded::Sums>,
}

impl Tensors for Memory {
    fn read(&self, SegmentIndex(segment): SegmentIndex, offset: u64, elements: usize, bytes: &mut [u8]) {
        let from = &self.inputs[segment as usize][offset as usize..][..elements];
        for (to, value) in bytes.chunks_exact_mut(4).zip(from) {
            to.copy_from_slice(&value.to_le_bytes());
        }
    }

    fn write(&mut self, SegmentIndex(segment): SegmentIndex, offset: u64, elements: usize, bytes: &[u8]) {
        if let Some(codes) = &self.codes {
            assert!(bytes == codes[&(segment, offset)], "segment {segment} at {offset}: other codes");
            assert!(self.written.insert((segment, offset)), "written twice: segment {segment} at {offset}");
            let expected = &self.expected[segment as usize][offset as usize..][..elements];
            let outputs = &mut self.outputs[segment as usize][offset as usize..][..elements];
            outputs.iter_mut().zip(expected).for_each(|(to, value)| *to = Some(*value));
            return;
        }
        assert_eq!(bytes.len(), 4 * elements);
        self.put(segment, offset, bytes);
    }

    fn read_broadcast(&self, SegmentIndex(segment): SegmentIndex, offset: u64, bytes: &mut [u8]) {
        assert!(offset.is_multiple_of(4) && !bytes.is_empty());
        self.read(SegmentIndex(segment), offset / 4, bytes.len() / 4, bytes);
    }

    fn write_broadcast(&mut self, SegmentIndex(segment): SegmentIndex, offset: u64, bytes: &[u8]) {
        assert!(offset.is_multiple_of(4) && !bytes.is_empty());
        self.put(segment, offset / 4, bytes);
    }

    fn ranges(&self, SegmentIndex(segment): SegmentIndex, offset: u64, elements: usize, bytes: &mut [u8]) {
        coded::norms(&self.inputs[segment as usize][offset as usize..][..elements], bytes);
    }

    fn encode(
        &self,
        SegmentIndex(segment): SegmentIndex,
        offset: u64,
        elements: usize,
        ranges: &[u8],
        bytes: &mut [u8],
    ) -> Squares {
        let words = &self.inputs[segment as usize][offset as usize..][..elements];
        coded::encode(self.host, segment, offset, words, ranges, bytes)
    }
}

impl Memory {
    fn put(&mut self, segment: u64, offset: u64, bytes: &[u8]) {
        assert!(self.written.insert((segment, offset)), "written twice: segment {segment} at {offset}");
        for (index, value) in bytes.chunks_exact(4).enumerate() {
            let at = offset as usize + index;
            let value = i32::from_le_bytes(value.try_into().unwrap());
            assert_eq!(value, self.expected[segment as usize][at], "segment {segment} element {at}");
            self.outputs[segment as usize][at] = Some(value);
        }
    }

    /// Whether the outputs of all segments below are there.
    pub(crate) fn holds(&self, below: u64) -> bool {
        self.outputs.iter().take(below as usize).flatten().all(Option::is_some)
    }
}

pub(crate) struct Node {
    pub(crate) incarnation: u32,
    pub(crate) worker: Worker,
    pub(crate) memory: Memory,
    /// The session that it is in, or was asked to stop for.
    pub(crate) session: u64,
    pub(crate) summation: Option<Summation>,
    pub(crate) done: u64,
    pub(crate) done_everywhere: u64,
    /// The next segment to submit, or to sum among hosts.
    pub(crate) next: u64,
    /// It has come to all segments below this one.
    pub(crate) entered: u64,
    /// The earliest timer that is set.
    pub(crate) timer: Option<Duration>,
    /// Its worker asks whether the aggregator is back.
    pub(crate) knocks: bool,
}

pub(crate) fn worker(scenario: &Scenario, worker: u16, key: Key) -> Worker {
    Worker::new(WorkerConfig {
        communicator: super::world::COMMUNICATOR,
        worker,
        key,
        format: scenario.form(),
        elements: scenario.elements,
        window: 64,
        segments: 3,
        codes: Codes { segment_elements: 12 * u64::from(scenario.elements), ..Codes::default() },
        hosts: scenario.workers as u16,
        timeout: PATIENCE,
        min_retry: Duration::from_micros(100),
        max_retry: RETRY_MOST,
        max_loss_permille: 950,
    })
}
