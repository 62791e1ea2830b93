//! The tenant's library for C: `libharmonaize` and `harmonaize.h`, over the client in Rust.
//!
//! Each function is one entry: it looks at what it was given, calls the client, and answers by a status. No panic leaves
//! it. The header is made from these files by cbindgen, so comments here are in C's terms.
//!
//! Architecture invariant: handles come as `Option<&T>` and go as `Option<Box<T>>`, which C sees as pointers. What is behind a
//! raw pointer is read or written in an unsafe block that says what the caller has promised.
#![allow(non_camel_case_types)] // the names of the header
#![allow(clippy::not_unsafe_ptr_arg_deref)] // all callers are C's, to whom the header says what pointers point to

// In the order of the header.
pub mod status;

pub mod error;
pub mod options;

pub mod client;
pub mod tensor;

pub mod communicator;

pub mod collectives;
pub mod operation;

pub mod completions;
pub mod feedback;
pub mod group;
pub mod protection;

pub mod events;

pub mod agreement;
pub mod iteration;
