//! Codes that add, in the simulation: what hosts encode, and what comes of it bit for bit.

use super::scenario::Scenario;
use harmonaize_aggregator::PayloadFormat;
use harmonaize_kernels::Isa;
use harmonaize_kernels::codes::{Code, Squares, Store, add_shared, decode, encode_shared, ranges};
use std::collections::BTreeMap;
use std::sync::Arc;

/// By segment and offset of a chunk: the sum of all hosts' codes.
pub(crate) type Sums = Arc<BTreeMap<(u64, u64), Vec<u8>>>;

/// Elements of a block.
pub(crate) const BLOCK: usize = 64;
const BITS: usize = 4;

pub(crate) fn form(workers: usize) -> PayloadFormat {
    PayloadFormat::Shared { bits: BITS as u8, block: BLOCK as u16, ranks: workers as u16 }
}

/// A host's elements as floats.
fn floats(words: &[i32]) -> Vec<f32> {
    words.iter().map(|word| (word >> 16) as f32).collect()
}

pub(crate) fn norms(words: &[i32], to: &mut [u8]) {
    ranges(Isa::detect(), BLOCK, floats(words).as_slice().into(), to.into()).unwrap();
}

fn seed(segment: u64, offset: u64) -> u64 {
    segment << 32 | offset
}

pub(crate) fn encode(
    host: usize,
    segment: u64,
    offset: u64,
    codes: &[i32],
    of_all: &[u8],
    to: &mut [u8],
) -> Squares {
    let (values, seed) = (floats(codes), seed(segment, offset));
    let noise = seed ^ (host as u64 + 1) << 48;
    let from = values.as_slice().into();
    encode_shared(Isa::detect(), BITS, BLOCK, seed, noise, of_all.into(), from, to.into()).unwrap()
}

/// The sum of a chunk in codes, and as what it is decoded.
fn sum(hosts: &[&[i32]], segment: u64, offset: u64) -> (Vec<u8>, Vec<i32>) {
    let elements = hosts[0].len();
    let mut greatest = vec![0_f32; elements.div_ceil(BLOCK)];
    for words in hosts {
        let mut own = vec![0; 4 * greatest.len()];
        norms(words, &mut own);
        let own = own.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
        greatest.iter_mut().zip(own).for_each(|(most, own)| *most = most.max(own));
    }
    let of_all: Vec<u8> = greatest.iter().flat_map(|range| range.to_le_bytes()).collect();
    let [one, all] = [1, hosts.len()].map(|ranks| Code::Shared { bits: BITS, block: BLOCK, ranks });
    let mut total = vec![0_u8; all.bytes(elements).unwrap()];
    for (host, words) in hosts.iter().enumerate() {
        let mut own = vec![0_u8; one.bytes(elements).unwrap()];
        encode(host, segment, offset, words, &of_all, &mut own);
        let (from, to) = (own.as_slice().into(), total.as_mut_slice().into());
        add_shared(Isa::detect(), BITS, BLOCK, hosts.len(), elements, from, host == 0, to).unwrap();
    }
    let mut values = vec![0_f32; elements];
    let seed = seed(segment, offset);
    decode(Isa::detect(), all, seed, total.as_slice().into(), Store::Set, values.as_mut_slice().into())
        .unwrap();
    (total, values.iter().map(|value| value.to_bits() as i32).collect())
}

/// What comes of codes: the values of all segments, and each chunk's sum.
pub(crate) fn of(scenario: &Scenario, inputs: &[Vec<Vec<i32>>]) -> (Vec<Vec<i32>>, Option<Sums>) {
    let (mut values, mut codes) = (Vec::new(), BTreeMap::new());
    for (segment, elements) in scenario.segments.iter().enumerate() {
        let mut of_segment = Vec::new();
        for at in (0..*elements as usize).step_by(scenario.elements as usize) {
            let end = (at + scenario.elements as usize).min(*elements as usize);
            let hosts: Vec<&[i32]> = inputs.iter().map(|input| &input[segment][at..end]).collect();
            let (codes_of_all, decoded) = sum(&hosts, segment as u64, at as u64);
            codes.insert((segment as u64, at as u64), codes_of_all);
            of_segment.extend(decoded);
        }
        values.push(of_segment);
    }
    (values, Some(Arc::new(codes)))
}

impl Scenario {
    /// Sums of codes; by one aggregator, for codes do not add twice.
    pub(crate) fn coded(mut self) -> Self {
        let blocks = |elements: u32| elements.div_ceil(3).max(1);
        let before = u64::from(self.elements);
        self.elements = blocks(self.elements) * BLOCK as u32;
        for segment in &mut self.segments {
            *segment = (*segment * u64::from(self.elements) / before).max(1);
        }
        (self.leaves, self.ordered, self.coded) = (0, false, true);
        self
    }
}
