//! Bytes: tensors and what they must become, and the arithmetic of a step.

use harmonaize_abi::{BlockContent, Dtype, Rank, ReduceOp, Signature};
use std::ops::Range;

/// What memory holds that nobody may rely on.
pub(crate) const POISON: u8 = 0xd5;

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
        operation: u64,
        rank: Rank,
        signature: &Signature,
        ranks: u32,
        in_place: bool,
    ) -> Self {
        let input = input(seed, operation, rank, signature, ranks);
        let block = signature.count as usize * signature.dtype.size();
        let blocks = signature.collective.blocks(ranks, rank, signature.root);
        let [inputs, outputs] = blocks.map(|blocks| blocks as usize * block);
        let shared = signature.collective.shared_block(rank, signature.root).filter(|_| in_place);
        let Some([of_input, of_output]) = shared else {
            return Self { input, output: Some(vec![POISON; outputs]), lies: [0..inputs, 0..outputs] };
        };
        let [from, to] = [of_output, of_input].map(|at| at as usize * block);
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

/// A rank's input: any integers; for floats small ones whose sums and products are exact.
pub(crate) fn input(seed: u64, operation: u64, rank: Rank, signature: &Signature, ranks: u32) -> Vec<u8> {
    let [blocks, _] = signature.collective.blocks(ranks, rank, signature.root).map(u64::from);
    let base = mix(seed ^ mix(operation ^ mix(u64::from(rank.0) + 1)));
    let mut bytes = Vec::with_capacity((signature.count * blocks) as usize * signature.dtype.size());
    for i in 0..signature.count * blocks {
        let value = mix(base.wrapping_add(i));
        match signature.dtype {
            Dtype::F32 => {
                let value = match signature.reduce {
                    ReduceOp::Product => [1.0, -1.0, 2.0, 1.0][(value % 4) as usize],
                    _ => (value % 1001) as f32 - 500.0,
                };
                bytes.extend_from_slice(&f32::to_le_bytes(value));
            }
            dtype => bytes.extend_from_slice(&value.to_le_bytes()[..dtype.size()]),
        }
    }
    bytes
}

/// What a rank must end with.
pub(crate) fn expected(seed: u64, operation: u64, rank: Rank, signature: &Signature, ranks: u32) -> Vec<u8> {
    let input = |rank| input(seed, operation, rank, signature, ranks);
    let bytes = signature.count as usize * signature.dtype.size();
    let reduced = |part: Range<usize>| {
        let inputs: Vec<_> = (0..ranks).map(|rank| input(Rank(rank))).collect();
        let sources: Vec<&[u8]> = inputs.iter().map(|input| &input[part.clone()]).collect();
        reduce(signature, &sources, Some(ranks))
    };
    let part = |block: u32| block as usize * bytes..(block as usize + 1) * bytes;
    let [_, blocks] = signature.collective.blocks(ranks, rank, signature.root);
    let content = |block| match signature.collective.content(rank, block, signature.root) {
        BlockContent::Unwritten => vec![POISON; bytes],
        BlockContent::Input(of, block) => input(of)[part(block)].to_vec(),
        BlockContent::Reduction(block) => reduced(part(block)),
    };
    (0..blocks).flat_map(content).collect()
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
                    ReduceOp::Sum | ReduceOp::Average => values.reduce($add),
                    ReduceOp::Product => values.reduce($multiply),
                    ReduceOp::Min => values.reduce(|a, b| if b < a { b } else { a }),
                    ReduceOp::Max => values.reduce(|a, b| if b > a { b } else { a }),
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
    match signature.dtype {
        Dtype::U64 => fold!(u64, u64::wrapping_add, u64::wrapping_mul),
        Dtype::U32 => fold!(u32, u32::wrapping_add, u32::wrapping_mul),
        Dtype::U8 => fold!(u8, u8::wrapping_add, u8::wrapping_mul),
        Dtype::F32 => fold!(f32, |a, b| a + b, |a, b| a * b),
        other => unreachable!("no scenario has {other}"),
    }
}
