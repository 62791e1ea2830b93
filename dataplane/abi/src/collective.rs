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
    /// Element type of a tensor. `F16` is IEEE 754 binary16, `Bf16` is bfloat16.
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
    }
}

impl Dtype {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::I8 | Self::U8 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }
}

wire_enum! {
    /// Element-wise reduction. Integers wrap; `Average` is the sum divided by the number of ranks (integers: the wrapped
    /// sum, divided with truncation towards zero). `Min` and `Max` of floats give NaN if any operand is NaN.
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
    }
}

impl Collective {
    /// Blocks of [`Signature::count`] elements of a rank's input and of its output, among so many ranks.
    pub const fn blocks(self, ranks: u32) -> [u32; 2] {
        match self {
            Self::AllReduce | Self::Broadcast => [1, 1],
            Self::AllToAll => [ranks, ranks],
            Self::Barrier => [0, 0],
            Self::AllGather => [1, ranks],
            Self::ReduceScatter => [ranks, 1],
        }
    }

    /// In place: which block of a rank's input is which block of its output. `None`: it is never in place.
    pub const fn shared_block(self, rank: Rank) -> Option<[u32; 2]> {
        match self {
            Self::AllReduce | Self::Broadcast => Some([0, 0]),
            Self::AllToAll | Self::Barrier => None,
            Self::AllGather => Some([0, rank.0]),
            Self::ReduceScatter => Some([rank.0, 0]),
        }
    }

    /// Bus bandwidth over the bytes a second of the larger of a rank's tensors, among so many ranks: how often a byte crosses the slowest
    /// link in the best algorithm. Source: NVIDIA, nccl-tests, doc/PERFORMANCE.md. A Barrier has no bytes.
    pub fn bus_factor(self, ranks: u32) -> f64 {
        let part = 1.0 - 1.0 / f64::from(ranks.max(1));
        match self {
            Self::AllReduce => 2.0 * part,
            Self::AllToAll | Self::AllGather | Self::ReduceScatter => part,
            Self::Broadcast => 1.0,
            Self::Barrier => 0.0,
        }
    }

    /// Whether elements are reduced.
    pub const fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter)
    }
}

/// What all ranks of a communicator must agree on for one operation. `count` is in elements: of the whole tensor for
/// AllReduce and Broadcast, 0 for Barrier, and of one block for the others, whose larger tensors have `ranks * count`
/// ([`Collective::blocks`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Signature {
    /// Which collective.
    pub collective: Collective,
    /// Element type (`U8` for Barrier).
    pub dtype: Dtype,
    /// Reduction (`Sum` where the collective does not reduce).
    pub reduce: ReduceOp,
    /// Root of a Broadcast, else 0.
    pub root: Rank,
    /// Elements, see above.
    pub count: u64,
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.collective {
            Collective::AllReduce => {
                write!(f, "allreduce({} x {}, {})", self.count, self.dtype, self.reduce)
            }
            Collective::AllToAll | Collective::AllGather => {
                write!(f, "{}({} x {} a rank)", self.collective, self.count, self.dtype)
            }
            Collective::ReduceScatter => {
                write!(f, "reducescatter({} x {} a rank, {})", self.count, self.dtype, self.reduce)
            }
            Collective::Broadcast => {
                write!(f, "broadcast({} x {}, root {})", self.count, self.dtype, self.root)
            }
            Collective::Barrier => f.write_str("barrier()"),
        }
    }
}
