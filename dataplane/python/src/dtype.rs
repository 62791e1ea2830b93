//! Names of element types and reductions, as Python's libraries have them.

use harmonaize_client::{Dtype, ReduceOp};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use std::ffi::CStr;

/// Our name and code, NumPy's and torch's, the buffer protocol's letter where it has one, and DLPack's code and bits.
struct Row {
    dtype: Dtype,
    names: &'static [&'static str],
    format: Option<&'static CStr>,
    dlpack: (u8, u8),
}

const fn row(
    dtype: Dtype,
    names: &'static [&'static str],
    format: Option<&'static CStr>,
    dlpack: (u8, u8),
) -> Row {
    Row { dtype, names, format, dlpack }
}

const ROWS: &[Row] = &[
    row(Dtype::I8, &["int8", "i8"], Some(c"b"), (0, 8)),
    row(Dtype::U8, &["uint8", "u8"], Some(c"B"), (1, 8)),
    row(Dtype::I16, &["int16", "i16"], Some(c"h"), (0, 16)),
    row(Dtype::U16, &["uint16", "u16"], Some(c"H"), (1, 16)),
    row(Dtype::I32, &["int32", "i32"], Some(c"i"), (0, 32)),
    row(Dtype::U32, &["uint32", "u32"], Some(c"I"), (1, 32)),
    row(Dtype::I64, &["int64", "i64", "int"], Some(c"q"), (0, 64)),
    row(Dtype::U64, &["uint64", "u64"], Some(c"Q"), (1, 64)),
    row(Dtype::F16, &["float16", "f16", "half"], Some(c"e"), (2, 16)),
    row(Dtype::Bf16, &["bfloat16", "bf16"], None, (4, 16)),
    row(Dtype::F32, &["float32", "f32"], Some(c"f"), (2, 32)),
    row(Dtype::F64, &["float64", "f64", "float"], Some(c"d"), (2, 64)),
    row(Dtype::Bool, &["bool"], Some(c"?"), (6, 8)),
    row(Dtype::Complex64, &["complex64"], Some(c"Zf"), (5, 64)),
    row(Dtype::Complex128, &["complex128", "complex"], Some(c"Zd"), (5, 128)),
    row(Dtype::F8E4M3, &["float8_e4m3fn", "f8e4m3"], None, (10, 8)),
    row(Dtype::F8E5M2, &["float8_e5m2", "f8e5m2"], None, (12, 8)),
];

fn find(dtype: Dtype) -> Option<&'static Row> {
    ROWS.iter().find(|row| row.dtype == dtype)
}

/// The buffer protocol's format; none where it has no letter for the type.
pub(crate) fn format(dtype: Dtype) -> Option<&'static CStr> {
    find(dtype)?.format
}

/// DLPack's type code and bits.
pub(crate) fn dlpack(dtype: Dtype) -> (u8, u8) {
    find(dtype).map_or((1, 8), |row| row.dlpack)
}

/// NumPy's name.
pub(crate) fn numpy_name(dtype: Dtype) -> &'static str {
    find(dtype).and_then(|row| row.names.first().copied()).unwrap_or("uint8")
}

/// An element type by its name, or by an object of NumPy's or torch's that stands for it.
pub(crate) fn parse(given: &Bound<'_, PyAny>) -> PyResult<Dtype> {
    let text = match given.getattr("__name__") {
        Ok(name) => name.str()?.to_string(),
        Err(_) => given.str()?.to_string(),
    };
    let name = text.strip_prefix("torch.").unwrap_or(&text).to_ascii_lowercase();
    let row = ROWS.iter().find(|row| row.names.contains(&name.as_str()));
    row.map(|row| row.dtype).ok_or_else(|| {
        let names = ROWS.iter().filter_map(|row| row.names.first().copied());
        let known = names.collect::<Vec<_>>().join(", ");
        PyTypeError::new_err(format!("tensors of {text} cannot be; there are {known}"))
    })
}

/// An element type by the buffer protocol's format and an element's size.
pub(crate) fn of_buffer(format: &CStr, bytes: usize) -> PyResult<Dtype> {
    let text = format.to_str().unwrap_or_default().trim_start_matches(['@', '=', '<', '|']);
    let found = match (text, bytes) {
        ("l", 8) => Some(Dtype::I64),
        ("L", 8) => Some(Dtype::U64),
        ("l", 4) => Some(Dtype::I32),
        ("L", 4) => Some(Dtype::U32),
        _ => ROWS
            .iter()
            .find(|row| row.format.is_some_and(|own| own.to_str() == Ok(text)) && row.dtype.size() == bytes)
            .map(|row| row.dtype),
    };
    found.ok_or_else(|| PyTypeError::new_err(format!("a buffer of format {text:?} cannot be a tensor")))
}

/// A reduction by its name.
pub(crate) fn reduction(name: &str) -> PyResult<ReduceOp> {
    let known = match name.to_ascii_lowercase().as_str() {
        "avg" | "mean" => Some(ReduceOp::Average),
        "prod" => Some(ReduceOp::Product),
        name => name.parse().ok(),
    };
    known.ok_or_else(|| {
        let names = ReduceOp::ALL.iter().map(|reduce| reduce.name()).collect::<Vec<_>>().join(", ");
        PyValueError::new_err(format!("there is no reduction {name:?}; there are {names}"))
    })
}
