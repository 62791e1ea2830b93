//! MPICH's ABI, which Intel MPI and MVAPICH share: handles are numbers.

use super::{Abi, Handle, Type, tables};
use harmonaize_client::{Dtype, ReduceOp};

/// Types that need no packing: name, handle, bytes, and as what they are reduced.
pub(super) const TYPES: &[(&str, u32, usize, Option<Dtype>)] = &[
    ("MPI_CHAR", 0x4c000101, 1, None),
    ("MPI_SIGNED_CHAR", 0x4c000118, 1, Some(Dtype::I8)),
    ("MPI_UNSIGNED_CHAR", 0x4c000102, 1, Some(Dtype::U8)),
    ("MPI_BYTE", 0x4c00010d, 1, None),
    ("MPI_SHORT", 0x4c000203, 2, Some(Dtype::I16)),
    ("MPI_UNSIGNED_SHORT", 0x4c000204, 2, Some(Dtype::U16)),
    ("MPI_INT", 0x4c000405, 4, Some(Dtype::I32)),
    ("MPI_UNSIGNED", 0x4c000406, 4, Some(Dtype::U32)),
    ("MPI_LONG", 0x4c000807, 8, Some(Dtype::I64)),
    ("MPI_UNSIGNED_LONG", 0x4c000808, 8, Some(Dtype::U64)),
    ("MPI_LONG_LONG_INT", 0x4c000809, 8, Some(Dtype::I64)),
    ("MPI_UNSIGNED_LONG_LONG", 0x4c000819, 8, Some(Dtype::U64)),
    ("MPI_FLOAT", 0x4c00040a, 4, Some(Dtype::F32)),
    ("MPI_DOUBLE", 0x4c00080b, 8, Some(Dtype::F64)),
    ("MPI_INT8_T", 0x4c000137, 1, Some(Dtype::I8)),
    ("MPI_INT16_T", 0x4c000238, 2, Some(Dtype::I16)),
    ("MPI_INT32_T", 0x4c000439, 4, Some(Dtype::I32)),
    ("MPI_INT64_T", 0x4c00083a, 8, Some(Dtype::I64)),
    ("MPI_UINT8_T", 0x4c00013b, 1, Some(Dtype::U8)),
    ("MPI_UINT16_T", 0x4c00023c, 2, Some(Dtype::U16)),
    ("MPI_UINT32_T", 0x4c00043d, 4, Some(Dtype::U32)),
    ("MPI_UINT64_T", 0x4c00083e, 8, Some(Dtype::U64)),
    ("MPI_C_BOOL", 0x4c00013f, 1, None),
    ("MPI_C_FLOAT_COMPLEX", 0x4c000840, 8, Some(Dtype::Complex64)),
    ("MPI_C_DOUBLE_COMPLEX", 0x4c001041, 16, Some(Dtype::Complex128)),
    ("MPI_AINT", 0x4c000843, 8, Some(Dtype::I64)),
    ("MPI_OFFSET", 0x4c000844, 8, Some(Dtype::I64)),
    ("MPI_COUNT", 0x4c000845, 8, Some(Dtype::I64)),
    ("MPI_INTEGER", 0x4c00041b, 4, Some(Dtype::I32)),
    ("MPI_REAL", 0x4c00041c, 4, Some(Dtype::F32)),
    ("MPI_DOUBLE_PRECISION", 0x4c00081f, 8, Some(Dtype::F64)),
    ("MPI_COMPLEX", 0x4c00081e, 8, Some(Dtype::Complex64)),
    ("MPI_DOUBLE_COMPLEX", 0x4c001022, 16, Some(Dtype::Complex128)),
];

/// Operations that the provider has: name, handle.
pub(super) const OPERATIONS: &[(&str, u32, ReduceOp)] = &[
    ("MPI_MAX", 0x58000001, ReduceOp::Max),
    ("MPI_MIN", 0x58000002, ReduceOp::Min),
    ("MPI_SUM", 0x58000003, ReduceOp::Sum),
    ("MPI_PROD", 0x58000004, ReduceOp::Product),
    ("MPI_BAND", 0x58000006, ReduceOp::BitAnd),
    ("MPI_BOR", 0x58000008, ReduceOp::BitOr),
    ("MPI_BXOR", 0x5800000a, ReduceOp::BitXor),
];

/// The whole.
pub(super) fn abi() -> Abi {
    let types = TYPES
        .iter()
        .map(|(_, handle, bytes, dtype)| (*handle as usize, Type { bytes: *bytes, dtype: *dtype }));
    let operations = OPERATIONS.iter().map(|(_, handle, reduce)| (*handle as usize, *reduce));
    let (types, operations) = tables(types, operations);
    Abi {
        narrow: true,
        comm_world: Handle(0x4400_0000),
        comm_self: Handle(0x4400_0001),
        comm_null: Handle(0x0400_0000),
        byte: Handle(0x4c00_010d),
        int: Handle(0x4c00_0405),
        int64: Handle(0x4c00_083a),
        min: Handle(0x5800_0002),
        max: Handle(0x5800_0001),
        in_place: usize::MAX,
        status_ignore: 1,
        other_error: 15,
        types,
        operations,
    }
}
