//! Bytes: tensors and what they must become, and the arithmetic of a step.

use harmonaize_abi::{BlockContent, Dtype, OperationId, Rank, ReduceOp, Signature};
use std::ops::Range;

/// What memory holds that nobody may rely on.
pub(crate) const POISON: u8 = 0xd5;

/// How many elements each block of an operation has, where that differs: all of [`Collective::counts`].
pub(crate) fn counts(
    seed: u64,
    operation: OperationId,
    signature: &Signature,
    ranks: u32,
) -> Option<Vec<u64>> {
    let count = |index: u32| {
        let value = mix(seed ^ mix(operation.0 ^ mix(u64::from(index) + 0x5eed)));
        // Every third is of the most, or of none.
        match value % 6 {
            0 => signature.count,
            1 => 0,
            _ => mix(value) % (signature.count + 1),
        }
    };
    signature.uneven.then(|| (0..signature.collective.counts(ranks)).map(count).collect())
}

/// Those that a rank passes with its call.
pub(crate) fn own_counts(counts: &[u64], signature: &Signature, rank: Rank, ranks: u32) -> Vec<u64> {
    let collective = signature.collective;
    if !collective.is_pairwise() {
        return counts.to_vec();
    }
    let sent = (0..ranks).map(|to| collective.count_of_input(rank, to, ranks));
    let received = (0..ranks).map(|from| collective.count_of_output(rank, from, ranks));
    sent.chain(received).map(|index| counts[index as usize]).collect()
}

/// Where the blocks of a rank's tensor lie, in bytes.
fn bounds(
    counts: Option<&[u64]>,
    signature: &Signature,
    rank: Rank,
    ranks: u32,
    output: bool,
) -> Vec<Range<usize>> {
    let collective = signature.collective;
    let [inputs, outputs] = collective.blocks(ranks, rank, signature.root);
    let mut end = 0;
    let block = |block| {
        let index = match output {
            false => collective.count_of_input(rank, block, ranks),
            true => collective.count_of_output(rank, block, ranks),
        };
        let count = counts.map_or(signature.count, |counts| counts[index as usize]);
        let start = end;
        end += count as usize * signature.dtype.size();
        start..end
    };
    (0..if output { outputs } else { inputs }).map(block).collect()
}

/// One rank's tensors of one operation.
#[derive(Debug)]
pub(crate) struct Tensor {
    /// In place, what holds both.
    pub(crate) input: Vec<u8>,
    /// None if in place.
    pub(crate) output: Option<Vec<u8>>,
    /// In place, where in the memory input and output lie.
    lies: [Range<usize>; 2],
}

impl Tensor {
    pub(crate) fn new(
        seed: u64,
        operation: OperationId,
        rank: Rank,
        signature: &Signature,
        ranks: u32,
        in_place: bool,
        counts: Option<&[u64]>,
    ) -> Self {
        let places = [false, true].map(|output| bounds(counts, signature, rank, ranks, output));
        let [inputs, outputs] = places.each_ref().map(|blocks| blocks.last().map_or(0, |last| last.end));
        let input = content(seed, operation, rank, signature, inputs);
        let shared = signature.collective.shared_block(rank, signature.root).filter(|_| in_place);
        let Some([of_input, of_output]) = shared else {
            return Self { input, output: Some(vec![POISON; outputs]), lies: [0..inputs, 0..outputs] };
        };
        let [of_inputs, of_outputs] = &places;
        let [from, to] = [of_outputs[of_output as usize].start, of_inputs[of_input as usize].start];
        let mut memory = vec![POISON; inputs.max(outputs)];
        memory[from..from + inputs].copy_from_slice(&input);
        Self { input: memory, output: None, lies: [from..from + inputs, to..to + outputs] }
    }

    pub(crate) fn input_mut(&mut self) -> &mut [u8] {
        let [lies, _] = self.lies.clone();
        &mut self.input[lies]
    }

    pub(crate) fn output(&self) -> &[u8] {
        let [_, lies] = self.lies.clone();
        &self.output.as_ref().unwrap_or(&self.input)[lies]
    }

    pub(crate) fn output_mut(&mut self) -> &mut [u8] {
        let [_, lies] = self.lies.clone();
        &mut self.output.as_mut().unwrap_or(&mut self.input)[lies]
    }
}

fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A rank's input.
pub(crate) fn input(
    seed: u64,
    operation: OperationId,
    rank: Rank,
    signature: &Signature,
    ranks: u32,
) -> Vec<u8> {
    let counts = counts(seed, operation, signature, ranks);
    let blocks = bounds(counts.as_deref(), signature, rank, ranks, false);
    content(seed, operation, rank, signature, blocks.last().map_or(0, |last| last.end))
}

/// What a rank's input of a `PremulSum` is multiplied by.
fn factor(rank: Rank) -> i8 {
    [1, 2, -1, 3][rank.0 as usize % 4]
}

/// A rank's input as it is added: of a `PremulSum` times its factor.
pub(crate) fn scaled(signature: &Signature, rank: Rank, bytes: Vec<u8>) -> Vec<u8> {
    if signature.reduce != ReduceOp::PremulSum {
        return bytes;
    }
    let factor = factor(rank);
    let narrow = |bytes: &[u8]| -> Vec<u8> {
        let mut value = [0; 8];
        value[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(value).wrapping_mul(factor as u64).to_le_bytes()[..bytes.len()].to_vec()
    };
    let parts = |bytes: &[u8]| match signature.dtype {
        Dtype::F32 => {
            (f32::from_le_bytes(bytes.try_into().unwrap()) * f32::from(factor)).to_le_bytes().to_vec()
        }
        Dtype::Complex128 => bytes
            .chunks_exact(8)
            .flat_map(|part| (f64::from_le_bytes(part.try_into().unwrap()) * f64::from(factor)).to_le_bytes())
            .collect(),
        _ => narrow(bytes),
    };
    bytes.chunks_exact(signature.dtype.size()).flat_map(parts).collect()
}

/// So many bytes of an input. Integers are any. Floats are small ones whose sums and products are exact. Of complex products no part is
/// ever zero, whose sign would tell in which order they were made.
fn content(seed: u64, operation: OperationId, rank: Rank, signature: &Signature, length: usize) -> Vec<u8> {
    let base = mix(seed ^ mix(operation.0 ^ mix(u64::from(rank.0) + 1)));
    let mut bytes = Vec::with_capacity(length);
    for i in 0..(length / signature.dtype.size()) as u64 {
        let value = mix(base.wrapping_add(i));
        match signature.dtype {
            Dtype::F32 => {
                let value = match signature.reduce {
                    ReduceOp::Product => [1.0, -1.0, 2.0, 1.0][(value % 4) as usize],
                    _ => (value % 1001) as f32 - 500.0,
                };
                bytes.extend_from_slice(&f32::to_le_bytes(value));
            }
            Dtype::Complex128 => {
                let (re, im) = match signature.reduce {
                    ReduceOp::Product => [(2.0, 1.0), (-2.0, -1.0)][(value % 2) as usize],
                    _ => ((value % 1001) as f64 - 500.0, (value % 999) as f64 - 400.0),
                };
                bytes.extend_from_slice(&f64::to_le_bytes(re));
                bytes.extend_from_slice(&f64::to_le_bytes(im));
            }
            dtype => bytes.extend_from_slice(&value.to_le_bytes()[..dtype.size()]),
        }
    }
    bytes
}

/// What a rank must end with.
pub(crate) fn expected(
    seed: u64,
    operation: OperationId,
    rank: Rank,
    signature: &Signature,
    ranks: u32,
) -> Vec<u8> {
    let input = |rank| input(seed, operation, rank, signature, ranks);
    let counts = counts(seed, operation, signature, ranks);
    let bounds = |rank, output| bounds(counts.as_deref(), signature, rank, ranks, output);
    let reduced = |part: Range<usize>| {
        let inputs: Vec<_> =
            (0..ranks).map(|rank| scaled(signature, Rank(rank), input(Rank(rank)))).collect();
        let sources: Vec<&[u8]> = inputs.iter().map(|input| &input[part.clone()]).collect();
        reduce(signature, &sources, Some(ranks))
    };
    let content =
        |(block, place): (u32, Range<usize>)| match signature.collective.content(rank, block, signature.root)
        {
            BlockContent::Unwritten => vec![POISON; place.len()],
            BlockContent::Input(of, block) => input(of)[bounds(of, false)[block as usize].clone()].to_vec(),
            BlockContent::Reduction(block) => reduced(bounds(rank, false)[block as usize].clone()),
        };
    (0..).zip(bounds(rank, true)).flat_map(content).collect()
}

/// Reduces sources, and divides where the reduction is an average and complete.
pub(crate) fn reduce(signature: &Signature, sources: &[&[u8]], last_of: Option<u32>) -> Vec<u8> {
    let divisor = last_of.filter(|_| signature.reduce == ReduceOp::Average);
    macro_rules! fold {
        ($type:ty, $add:expr, $multiply:expr) => {{
            const SIZE: usize = size_of::<$type>();
            let read = |bytes: &[u8], i: usize| {
                <$type>::from_le_bytes(bytes[i * SIZE..(i + 1) * SIZE].try_into().unwrap())
            };
            let mut result = Vec::with_capacity(sources[0].len());
            for i in 0..sources[0].len() / SIZE {
                let values = sources.iter().map(|source| read(source, i));
                let mut value = match signature.reduce {
                    ReduceOp::Sum | ReduceOp::Average | ReduceOp::PremulSum => values.reduce($add),
                    ReduceOp::Product => values.reduce($multiply),
                    ReduceOp::Min => values.reduce(|a, b| if b < a { b } else { a }),
                    ReduceOp::Max => values.reduce(|a, b| if b > a { b } else { a }),
                    ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => unreachable!("numbers"),
                }
                .unwrap();
                if let Some(divisor) = divisor {
                    value /= divisor as $type;
                }
                result.extend_from_slice(&value.to_le_bytes());
            }
            result
        }};
    }
    assert!(sources.iter().all(|source| source.len() == sources[0].len()), "sources of different lengths");
    let bytes = |of: &dyn Fn(&mut dyn Iterator<Item = u8>) -> u8| -> Vec<u8> {
        (0..sources[0].len()).map(|i| of(&mut sources.iter().map(|source| source[i]))).collect()
    };
    match (signature.dtype, signature.reduce) {
        (Dtype::Bool, ReduceOp::BitXor) => {
            return bytes(&|values| (values.filter(|value| *value != 0).count() % 2) as u8);
        }
        (Dtype::Bool, ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr) => {
            return bytes(&|values| values.filter(|value| *value != 0).count().min(1) as u8);
        }
        (Dtype::Bool, _) => {
            return bytes(&|values| u8::from(values.filter(|value| *value == 0).count() == 0));
        }
        (_, ReduceOp::BitAnd) => return bytes(&|values| values.fold(0xff, |a, b| a & b)),
        (_, ReduceOp::BitOr) => return bytes(&|values| values.fold(0, |a, b| a | b)),
        (_, ReduceOp::BitXor) => return bytes(&|values| values.fold(0, |a, b| a ^ b)),
        (Dtype::Complex128, ReduceOp::Product) => return complex_product(sources),
        _ => {}
    }
    match signature.dtype {
        Dtype::Complex128 => fold!(f64, |a, b| a + b, |a, b| a * b),
        Dtype::U64 => fold!(u64, u64::wrapping_add, u64::wrapping_mul),
        Dtype::U32 => fold!(u32, u32::wrapping_add, u32::wrapping_mul),
        Dtype::U8 => fold!(u8, u8::wrapping_add, u8::wrapping_mul),
        Dtype::F32 => fold!(f32, |a, b| a + b, |a, b| a * b),
        other => unreachable!("no scenario has {other}"),
    }
}

fn complex_product(sources: &[&[u8]]) -> Vec<u8> {
    let part = |source: &[u8], i: usize| f64::from_le_bytes(source[8 * i..][..8].try_into().unwrap());
    let product = |i: usize| {
        let values = sources.iter().map(|source| (part(source, 2 * i), part(source, 2 * i + 1)));
        let (re, im) = values.reduce(|(a, b), (c, d)| (a * c - b * d, a * d + b * c)).unwrap();
        [re.to_le_bytes(), im.to_le_bytes()].concat()
    };
    (0..sources[0].len() / 16).flat_map(product).collect()
}
