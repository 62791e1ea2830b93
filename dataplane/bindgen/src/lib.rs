//! Today's bindgen under the version that rdma-sys asks for, whose own reads no libclang newer than 14.
#![forbid(unsafe_code)]

pub use current::*;
