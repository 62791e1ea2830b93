//! The field's nouns: ranks, element types, reductions, collectives, and the signature all ranks must agree on.

use core::fmt;
use serde::{Deserialize, Serialize};

/// A member of a communicator, counted from 0. The only name of a peer that a tenant ever sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Rank(pub u32);

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

macro_rules! wire_enum {
    ($(#[$meta:meta])* $name:ident { $($(#[$vmeta:meta])* $variant:ident = $code:literal, $text:literal;)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[repr(u8)]
        pub enum $name { $($(#[$vmeta])* $variant = $code,)* }

        impl $name {
            /// Every value, in order of its code.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// The value behind a code received from elsewhere, or `None` if this version does not know it.
            pub const fn from_code(code: u8) -> Option<Self> {
                match code { $($code => Some(Self::$variant),)* _ => None }
            }

            /// The code that stands in descriptors and on the wire.
            pub const fn code(self) -> u8 { self as u8 }

            /// The name that people read and type.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { f.write_str(self.name()) }
        }

        impl core::str::FromStr for $name {
            type Err = ();
            fn from_str(text: &str) -> Result<Self, ()> {
                match text { $($text => Ok(Self::$variant),)* _ => Err(()) }
            }
        }
    };
}

wire_enum! {
    /// Element type of a tensor. Rust types for those that the language lacks are [`crate::Bool`], [`crate::F8E4M3`], [`crate::F8E5M2`],
    /// [`crate::Complex64`] and [`crate::Complex128`].
    Dtype {
        /// 8-bit signed integer.
        I8 = 0, "i8";
        /// 8-bit unsigned integer.
        U8 = 1, "u8";
        /// 32-bit signed integer.
        I32 = 2, "i32";
        /// 32-bit unsigned integer.
        U32 = 3, "u32";
        /// 64-bit signed integer.
        I64 = 4, "i64";
        /// 64-bit unsigned integer.
        U64 = 5, "u64";
        /// IEEE 754 binary16.
        F16 = 6, "f16";
        /// bfloat16.
        Bf16 = 7, "bf16";
        /// IEEE 754 binary32.
        F32 = 8, "f32";
        /// IEEE 754 binary64.
        F64 = 9, "f64";
        /// 16-bit signed integer.
        I16 = 10, "i16";
        /// 16-bit unsigned integer.
        U16 = 11, "u16";
        /// A byte that is false where it is 0, else true. Results are 0 or 1.
        Bool = 12, "bool";
        /// A real and an imaginary part, each of IEEE 754 binary32.
        Complex64 = 13, "complex64";
        /// A real and an imaginary part, each of IEEE 754 binary64.
        Complex128 = 14, "complex128";
        /// The 8-bit float E4M3 of the Open Compute Project (e4m3fn): no infinities, at most 448.
        F8E4M3 = 15, "f8e4m3";
        /// The 8-bit float E5M2 of the Open Compute Project: the upper half of a binary16.
        F8E5M2 = 16, "f8e5m2";
    }
}

impl Dtype {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::I8 | Self::U8 | Self::Bool | Self::F8E4M3 | Self::F8E5M2 => 1,
            Self::I16 | Self::U16 | Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 | Self::Complex64 => 8,
            Self::Complex128 => 16,
        }
    }

    /// Whether each addition rounds to fewer bits than it is computed in.
    pub const fn is_narrow(self) -> bool {
        matches!(self, Self::F16 | Self::Bf16 | Self::F8E4M3 | Self::F8E5M2)
    }
}

wire_enum! {
    /// Element-wise reduction. Integers wrap; `Average` is the sum divided by the number of ranks (integers: the wrapped
    /// sum, divided with truncation towards zero). `Min` and `Max` of floats give NaN if any operand is NaN. Not every type has all
    /// of them: [`ReduceOp::takes`].
    ReduceOp {
        /// Sum.
        Sum = 0, "sum";
        /// Product.
        Product = 1, "product";
        /// Smallest.
        Min = 2, "min";
        /// Largest.
        Max = 3, "max";
        /// Sum divided by the number of ranks.
        Average = 4, "average";
        /// Bitwise and; of bools the conjunction.
        BitAnd = 5, "band";
        /// Bitwise or; of bools the disjunction.
        BitOr = 6, "bor";
        /// Bitwise exclusive or; of bools whether an odd number is true.
        BitXor = 7, "bxor";
        /// Sum of all ranks' inputs, each times its rank's own factor ([`crate::Submission::factor`]). Integers are multiplied by the factor's
        /// whole part, and wrap.
        PremulSum = 8, "premulsum";
    }
}

impl ReduceOp {
    /// Whether elements of this type can be so reduced. Bools have a `Sum` and a `Max` (both or), a `Product` and a `Min` (both and), but
    /// neither averages nor factors; complex numbers have no order, and only integers and bools have bits.
    pub const fn takes(self, dtype: Dtype) -> bool {
        use Dtype::{Bf16, Bool, Complex64, Complex128, F8E4M3, F8E5M2, F16, F32, F64};
        match self {
            Self::Sum | Self::Product => true,
            Self::Min | Self::Max => !matches!(dtype, Complex64 | Complex128),
            Self::Average | Self::PremulSum => !matches!(dtype, Bool),
            Self::BitAnd | Self::BitOr | Self::BitXor => {
                !matches!(dtype, F16 | Bf16 | F32 | F64 | F8E4M3 | F8E5M2 | Complex64 | Complex128)
            }
        }
    }
}

wire_enum! {
    /// A collective operation.
    Collective {
        /// Every rank ends with the reduction of all ranks' inputs.
        AllReduce = 0, "allreduce";
        /// Rank `r` ends with block `r` of every rank's input, in rank order.
        AllToAll = 1, "alltoall";
        /// Every rank ends with the root's input.
        Broadcast = 2, "broadcast";
        /// No data; nobody leaves before everybody has entered.
        Barrier = 3, "barrier";
        /// Every rank ends with all ranks' inputs, in rank order.
        AllGather = 4, "allgather";
        /// Rank `r` ends with the reduction of block `r` of all ranks' inputs.
        ReduceScatter = 5, "reducescatter";
        /// The root ends with the reduction of all ranks' inputs.
        Reduce = 6, "reduce";
        /// The root ends with all ranks' inputs, in rank order.
        Gather = 7, "gather";
        /// Rank `r` ends with block `r` of the root's input.
        Scatter = 8, "scatter";
    }
}

/// Blocks of [`Signature::count`] elements in a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocks {
    /// There is no tensor.
    None,
    /// One.
    One,
    /// One for each rank of the communicator.
    PerRank,
}

/// The ranks that have a tensor; what the others give is not looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holders {
    /// Every rank.
    All,
    /// The root alone.
    Root,
}

impl Holders {
    /// Whether a rank is one of them.
    pub const fn include(self, rank: Rank, root: Rank) -> bool {
        match self {
            Self::All => true,
            Self::Root => rank.0 == root.0,
        }
    }
}

/// How data moves between ranks: it decides on the cut into segments, the choice of algorithms, and the costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// A reduction and its distribution: ring, one shot, or two.
    ReduceDistribute,
    /// Each rank's block goes to all, or comes from all and is reduced on its way: ring, or one shot.
    Gather,
    /// A block from each rank that has an input to each that has an output: pairwise.
    Pairwise,
    /// One tensor from the root to all, or from all to the root and reduced on its way. It goes part by part along a
    /// chain, or in one shot.
    Chain,
    /// No data: dissemination, or one shot.
    Dissemination,
}

/// What an aggregator does for a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AggregatorTask {
    /// It adds the inputs up.
    Sum,
    /// It hands on the root's input.
    Broadcast,
    /// It waits for all.
    Barrier,
}

/// What everybody else asks of a collective: a row of the table in [`Collective::traits`].
#[derive(Clone, Copy, Debug)]
pub struct CollectiveTraits {
    /// A rank's input.
    pub input: Blocks,
    /// The ranks whose input matters.
    pub input_of: Holders,
    /// A rank's output.
    pub output: Blocks,
    /// The ranks whose output is written.
    pub output_of: Holders,
    /// Whether elements are reduced.
    pub reduces: bool,
    /// Whether it may travel compressed; a reduction only if it adds.
    pub compressible: bool,
    /// What an aggregator does for it, if it can.
    pub aggregator: Option<AggregatorTask>,
    /// How its data moves.
    pub pattern: Pattern,
    /// busbw over algbw, from `1 - 1/ranks`.
    bus_factor: fn(f64) -> f64,
    /// The name of nccl-tests' program without its end; empty where it has none.
    pub nccl_tests: &'static str,
}

/// What a block of an output holds in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockContent {
    /// Nothing that the collective wrote.
    Unwritten,
    /// This block of this rank's input.
    Input(Rank, u32),
    /// The reduction of this block of all ranks' inputs.
    Reduction(u32),
}

impl Collective {
    /// The table: a row for each collective.
    pub const fn traits(self) -> CollectiveTraits {
        use {Blocks::*, Holders::*};
        match self {
            Self::AllReduce => CollectiveTraits {
                input: One,
                input_of: All,
                output: One,
                output_of: All,
                reduces: true,
                compressible: true,
                aggregator: Some(AggregatorTask::Sum),
                pattern: Pattern::ReduceDistribute,
                bus_factor: |part| 2.0 * part,
                nccl_tests: "all_reduce",
            },
            Self::AllToAll => CollectiveTraits {
                input: PerRank,
                input_of: All,
                output: PerRank,
                output_of: All,
                reduces: false,
                compressible: true,
                aggregator: Option::None,
                pattern: Pattern::Pairwise,
                bus_factor: |part| part,
                nccl_tests: "alltoall",
            },
            Self::Broadcast => CollectiveTraits {
                input: One,
                input_of: Root,
                output: One,
                output_of: All,
                reduces: false,
                compressible: false,
                aggregator: Some(AggregatorTask::Broadcast),
                pattern: Pattern::Chain,
                bus_factor: |_| 1.0,
                nccl_tests: "broadcast",
            },
            Self::Barrier => CollectiveTraits {
                input: Blocks::None,
                input_of: All,
                output: Blocks::None,
                output_of: All,
                reduces: false,
                compressible: false,
                aggregator: Some(AggregatorTask::Barrier),
                pattern: Pattern::Dissemination,
                bus_factor: |_| 0.0,
                nccl_tests: "",
            },
            Self::AllGather => CollectiveTraits {
                input: One,
                input_of: All,
                output: PerRank,
                output_of: All,
                reduces: false,
                compressible: true,
                aggregator: Option::None,
                pattern: Pattern::Gather,
                bus_factor: |part| part,
                nccl_tests: "all_gather",
            },
            Self::ReduceScatter => CollectiveTraits {
                input: PerRank,
                input_of: All,
                output: One,
                output_of: All,
                reduces: true,
                compressible: false,
                aggregator: Option::None,
                pattern: Pattern::Gather,
                bus_factor: |part| part,
                nccl_tests: "reduce_scatter",
            },
            Self::Reduce => CollectiveTraits {
                input: One,
                input_of: All,
                output: One,
                output_of: Root,
                reduces: true,
                compressible: false,
                aggregator: Option::None,
                pattern: Pattern::Chain,
                bus_factor: |_| 1.0,
                nccl_tests: "reduce",
            },
            Self::Gather => CollectiveTraits {
                input: One,
                input_of: All,
                output: PerRank,
                output_of: Root,
                reduces: false,
                compressible: false,
                aggregator: Option::None,
                pattern: Pattern::Pairwise,
                bus_factor: |part| part,
                nccl_tests: "gather",
            },
            Self::Scatter => CollectiveTraits {
                input: PerRank,
                input_of: Root,
                output: One,
                output_of: All,
                reduces: false,
                compressible: false,
                aggregator: Option::None,
                pattern: Pattern::Pairwise,
                bus_factor: |part| part,
                nccl_tests: "scatter",
            },
        }
    }

    /// Whether one rank is the root.
    pub const fn is_rooted(self) -> bool {
        let traits = self.traits();
        matches!((traits.input_of, traits.output_of), (Holders::Root, _) | (_, Holders::Root))
    }

    /// Whether elements are reduced.
    pub const fn reduces(self) -> bool {
        self.traits().reduces
    }

    /// Whether there are tensors.
    pub const fn has_data(self) -> bool {
        !matches!(self.traits().input, Blocks::None)
    }

    /// Whether all ranks end with the same.
    pub const fn replicates(self) -> bool {
        let traits = self.traits();
        matches!((traits.input, traits.output_of), (Blocks::One, Holders::All))
    }

    /// Whether a rank can keep in a residual what compression leaves out.
    pub const fn takes_feedback(self) -> bool {
        self.reduces() && self.traits().compressible
    }

    /// Returns how many blocks a rank's input and its output have among so many ranks. A block has [`Signature::count`]
    /// elements. A tensor that the rank does not have has 0 blocks.
    pub const fn blocks(self, ranks: u32, rank: Rank, root: Rank) -> [u32; 2] {
        let traits = self.traits();
        let input = if traits.input_of.include(rank, root) { traits.input.count(ranks) } else { 0 };
        let output = if traits.output_of.include(rank, root) { traits.output.count(ranks) } else { 0 };
        [input, output]
    }

    /// Blocks of the largest tensor of any rank.
    pub const fn max_blocks(self, ranks: u32) -> u32 {
        let [input, output] = self.blocks(ranks, Rank(0), Rank(0));
        if input > output { input } else { output }
    }

    /// In place: which block of a rank's input is which block of its output. `None`: this rank is never in place.
    pub const fn shared_block(self, rank: Rank, root: Rank) -> Option<[u32; 2]> {
        let traits = self.traits();
        if !(traits.input_of.include(rank, root) && traits.output_of.include(rank, root)) {
            return None;
        }
        match (traits.input, traits.output) {
            (Blocks::One, Blocks::One) => Some([0, 0]),
            (Blocks::One, Blocks::PerRank) => Some([0, rank.0]),
            (Blocks::PerRank, Blocks::One) => Some([rank.0, 0]),
            (Blocks::PerRank, Blocks::PerRank) | (Blocks::None, _) | (_, Blocks::None) => None,
        }
    }

    /// Whether it can be in place, at some rank.
    pub const fn can_be_in_place(self) -> bool {
        self.shared_block(Rank(0), Rank(0)).is_some()
    }

    /// Whether ranks' blocks may have different counts.
    pub const fn can_be_uneven(self) -> bool {
        let traits = self.traits();
        matches!((traits.input, traits.output), (Blocks::PerRank, _) | (_, Blocks::PerRank))
    }

    /// Whether each pair of ranks has a count of its own where counts differ; else each rank has one.
    pub const fn is_pairwise(self) -> bool {
        let traits = self.traits();
        matches!((traits.input, traits.output), (Blocks::PerRank, Blocks::PerRank))
    }

    /// Returns how many counts its blocks have among so many ranks. It is one for each rank or pair, and 1 where all
    /// blocks are alike. Pairs are numbered by sender, then by receiver.
    pub const fn counts(self, ranks: u32) -> u32 {
        match (self.is_pairwise(), self.can_be_uneven()) {
            (true, _) => ranks.saturating_mul(ranks),
            (_, true) => ranks,
            _ => 1,
        }
    }

    /// How many counts a rank gives among so many. All of them, or where it is pairwise what it sends to each rank, then what
    /// it receives from each.
    pub const fn said_counts(self, ranks: u32) -> u32 {
        if self.is_pairwise() { ranks.saturating_mul(2) } else { self.counts(ranks) }
    }

    /// Which of the [`Self::counts`] is that of a block of a rank's input.
    pub const fn count_of_input(self, rank: Rank, block: u32, ranks: u32) -> u32 {
        let traits = self.traits();
        match (traits.input, traits.output) {
            (Blocks::PerRank, Blocks::PerRank) => rank.0.saturating_mul(ranks).saturating_add(block),
            (Blocks::PerRank, _) => block,
            (_, Blocks::PerRank) => rank.0,
            _ => 0,
        }
    }

    /// Which of the [`Self::counts`] is that of a block of a rank's output.
    pub const fn count_of_output(self, rank: Rank, block: u32, ranks: u32) -> u32 {
        let traits = self.traits();
        match (traits.input, traits.output) {
            (Blocks::PerRank, Blocks::PerRank) => block.saturating_mul(ranks).saturating_add(rank.0),
            (Blocks::PerRank, _) => rank.0,
            (_, Blocks::PerRank) => block,
            _ => 0,
        }
    }

    /// What a block of a rank's output holds in the end.
    pub fn content(self, rank: Rank, block: u32, root: Rank) -> BlockContent {
        let traits = self.traits();
        match (traits.input, traits.input_of) {
            (Blocks::None, _) => BlockContent::Unwritten,
            _ if !traits.output_of.include(rank, root) => BlockContent::Unwritten,
            (Blocks::One, _) if traits.reduces => BlockContent::Reduction(block),
            (Blocks::PerRank, _) if traits.reduces => BlockContent::Reduction(rank.0),
            (Blocks::One, Holders::All) => BlockContent::Input(Rank(block), 0),
            (Blocks::PerRank, Holders::All) => BlockContent::Input(Rank(block), rank.0),
            (Blocks::One, Holders::Root) => BlockContent::Input(root, 0),
            (Blocks::PerRank, Holders::Root) => BlockContent::Input(root, rank.0),
        }
    }

    /// Bus bandwidth over the bytes a second of the larger of a rank's tensors, among so many ranks. It is how often a byte crosses the
    /// slowest link in the best algorithm. Source: NVIDIA, nccl-tests, doc/PERFORMANCE.md. A Barrier has no bytes.
    pub fn bus_factor(self, ranks: u32) -> f64 {
        (self.traits().bus_factor)(1.0 - 1.0 / f64::from(ranks.max(1)))
    }
}

impl Blocks {
    const fn count(self, ranks: u32) -> u32 {
        match self {
            Self::None => 0,
            Self::One => 1,
            Self::PerRank => ranks,
        }
    }
}

/// What all ranks of a communicator must agree on for one operation. `count` is in elements of one block ([`Collective::blocks`]): of
/// the whole tensor where none has a block for each rank, and 0 where there is none. Where ranks' counts differ it is the most that any is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Signature {
    /// Which collective.
    pub collective: Collective,
    /// Element type (`U8` for Barrier).
    pub dtype: Dtype,
    /// Reduction (`Sum` where the collective does not reduce).
    pub reduce: ReduceOp,
    /// The root, where the collective has one, else 0.
    pub root: Rank,
    /// Elements, see above.
    pub count: u64,
    /// Whether each rank's block, or that of each pair of ranks, has a count of its own.
    pub uneven: bool,
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { collective, dtype, reduce, root, count, uneven } = self;
        if !collective.has_data() {
            return write!(f, "{collective}()");
        }
        let each = if collective.max_blocks(2) == 1 { "" } else { " a rank" };
        let (v, most) = if *uneven { ("v", "up to ") } else { ("", "") };
        write!(f, "{collective}{v}({most}{count} x {dtype}{each}")?;
        if collective.reduces() {
            write!(f, ", {reduce}")?;
        }
        if collective.is_rooted() {
            write!(f, ", root {root}")?;
        }
        f.write_str(")")
    }
}
