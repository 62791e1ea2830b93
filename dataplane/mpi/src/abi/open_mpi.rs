//! Open MPI's ABI: handles are addresses of objects that its library exports.

use super::{Abi, Handle, Type, tables};
use crate::pmpi::symbol;
use harmonaize_client::{Dtype, ReduceOp};
use std::ffi::{CStr, c_int};

/// Types that need no packing: name, object, bytes, and as what they are reduced.
pub(super) const TYPES: &[(&str, &CStr, usize, Option<Dtype>)] = &[
    ("MPI_CHAR", c"ompi_mpi_char", 1, None),
    ("MPI_SIGNED_CHAR", c"ompi_mpi_signed_char", 1, Some(Dtype::I8)),
    ("MPI_UNSIGNED_CHAR", c"ompi_mpi_unsigned_char", 1, Some(Dtype::U8)),
    ("MPI_BYTE", c"ompi_mpi_byte", 1, None),
    ("MPI_SHORT", c"ompi_mpi_short", 2, Some(Dtype::I16)),
    ("MPI_UNSIGNED_SHORT", c"ompi_mpi_unsigned_short", 2, Some(Dtype::U16)),
    ("MPI_INT", c"ompi_mpi_int", 4, Some(Dtype::I32)),
    ("MPI_UNSIGNED", c"ompi_mpi_unsigned", 4, Some(Dtype::U32)),
    ("MPI_LONG", c"ompi_mpi_long", 8, Some(Dtype::I64)),
    ("MPI_UNSIGNED_LONG", c"ompi_mpi_unsigned_long", 8, Some(Dtype::U64)),
    ("MPI_LONG_LONG_INT", c"ompi_mpi_long_long_int", 8, Some(Dtype::I64)),
    ("MPI_UNSIGNED_LONG_LONG", c"ompi_mpi_unsigned_long_long", 8, Some(Dtype::U64)),
    ("MPI_FLOAT", c"ompi_mpi_float", 4, Some(Dtype::F32)),
    ("MPI_DOUBLE", c"ompi_mpi_double", 8, Some(Dtype::F64)),
    ("MPI_INT8_T", c"ompi_mpi_int8_t", 1, Some(Dtype::I8)),
    ("MPI_INT16_T", c"ompi_mpi_int16_t", 2, Some(Dtype::I16)),
    ("MPI_INT32_T", c"ompi_mpi_int32_t", 4, Some(Dtype::I32)),
    ("MPI_INT64_T", c"ompi_mpi_int64_t", 8, Some(Dtype::I64)),
    ("MPI_UINT8_T", c"ompi_mpi_uint8_t", 1, Some(Dtype::U8)),
    ("MPI_UINT16_T", c"ompi_mpi_uint16_t", 2, Some(Dtype::U16)),
    ("MPI_UINT32_T", c"ompi_mpi_uint32_t", 4, Some(Dtype::U32)),
    ("MPI_UINT64_T", c"ompi_mpi_uint64_t", 8, Some(Dtype::U64)),
    ("MPI_C_BOOL", c"ompi_mpi_c_bool", 1, None),
    ("MPI_C_FLOAT_COMPLEX", c"ompi_mpi_c_float_complex", 8, Some(Dtype::Complex64)),
    ("MPI_C_DOUBLE_COMPLEX", c"ompi_mpi_c_double_complex", 16, Some(Dtype::Complex128)),
    ("MPI_AINT", c"ompi_mpi_aint", 8, Some(Dtype::I64)),
    ("MPI_OFFSET", c"ompi_mpi_offset", 8, Some(Dtype::I64)),
    ("MPI_COUNT", c"ompi_mpi_count", 8, Some(Dtype::I64)),
    ("MPI_INTEGER", c"ompi_mpi_integer", 4, Some(Dtype::I32)),
    ("MPI_REAL", c"ompi_mpi_real", 4, Some(Dtype::F32)),
    ("MPI_DOUBLE_PRECISION", c"ompi_mpi_dblprec", 8, Some(Dtype::F64)),
    ("MPI_COMPLEX", c"ompi_mpi_cplex", 8, Some(Dtype::Complex64)),
    ("MPI_DOUBLE_COMPLEX", c"ompi_mpi_dblcplex", 16, Some(Dtype::Complex128)),
];

/// Operations that the provider has: name, object.
pub(super) const OPERATIONS: &[(&str, &CStr, ReduceOp)] = &[
    ("MPI_MAX", c"ompi_mpi_op_max", ReduceOp::Max),
    ("MPI_MIN", c"ompi_mpi_op_min", ReduceOp::Min),
    ("MPI_SUM", c"ompi_mpi_op_sum", ReduceOp::Sum),
    ("MPI_PROD", c"ompi_mpi_op_prod", ReduceOp::Product),
    ("MPI_BAND", c"ompi_mpi_op_band", ReduceOp::BitAnd),
    ("MPI_BOR", c"ompi_mpi_op_bor", ReduceOp::BitOr),
    ("MPI_BXOR", c"ompi_mpi_op_bxor", ReduceOp::BitXor),
];

/// Communicators: name, object.
pub(super) const COMMUNICATORS: [(&str, &CStr); 3] = [
    ("MPI_COMM_WORLD", c"ompi_mpi_comm_world"),
    ("MPI_COMM_SELF", c"ompi_mpi_comm_self"),
    ("MPI_COMM_NULL", c"ompi_mpi_comm_null"),
];

pub(super) const IN_PLACE: usize = 1;
pub(super) const STATUS_IGNORE: usize = 0;
pub(super) const OTHER_ERROR: c_int = 16;

/// The whole; an error names the object that the library does not export.
pub(super) fn abi() -> Result<Abi, String> {
    let object = |name: &CStr| {
        let found = symbol(name).map(|address| Handle(address.addr()));
        found.ok_or_else(|| format!("this Open MPI has no {}", name.to_string_lossy()))
    };
    // One that lacks a type, as those without Fortran do, has no program that uses it.
    let types = TYPES.iter().filter_map(|(_, name, bytes, dtype)| {
        Some((symbol(name)?.addr(), Type { bytes: *bytes, dtype: *dtype }))
    });
    let operations = OPERATIONS.iter().filter_map(|(_, name, reduce)| Some((symbol(name)?.addr(), *reduce)));
    let (types, operations) = tables(types, operations);
    let [world, own, null] = COMMUNICATORS.map(|(_, name)| object(name));
    Ok(Abi {
        narrow: false,
        comm_world: world?,
        comm_self: own?,
        comm_null: null?,
        byte: object(c"ompi_mpi_byte")?,
        int: object(c"ompi_mpi_int")?,
        int64: object(c"ompi_mpi_int64_t")?,
        min: object(c"ompi_mpi_op_min")?,
        max: object(c"ompi_mpi_op_max")?,
        in_place: IN_PLACE,
        status_ignore: STATUS_IGNORE,
        other_error: OTHER_ERROR,
        types,
        operations,
    })
}
