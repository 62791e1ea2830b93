//! What a pass refuses, having written nothing.

use super::memory::Memory;
use crate::{Isa, KernelError, MAX_SOURCES, PassOptions, copy, reduce, reduce_with, sum_scaled};
use harmonaize_abi::{Dtype, ReduceOp};

#[test]
fn a_pass_that_cannot_be_is_refused_and_writes_nothing() {
    let (from, to) = (Memory::new(0, &[1; 12]), Memory::new(0, &[2; 12]));
    let (source, destination) = (from.view().as_view(), to.view());
    let short = source.range(0, 8).unwrap();
    let run = |sources: &[_], destinations: &[_], dtype, divide| {
        let error = reduce(ReduceOp::Average, dtype, sources, destinations, divide).unwrap_err();
        assert_eq!(to.bytes(), [2; 12], "{error}");
        error
    };
    let none = KernelError::Sources { given: 0 };
    assert_eq!(run(&[], &[destination], Dtype::U8, None), none);
    let many = KernelError::Sources { given: MAX_SOURCES + 1 };
    assert_eq!(run(&[source; MAX_SOURCES + 1], &[destination], Dtype::U8, None), many);
    assert_eq!(run(&[source], &[], Dtype::U8, None), KernelError::NoDestination);
    let shorter = KernelError::Length { expected: 12, given: 8 };
    assert_eq!(run(&[source, short], &[destination], Dtype::U8, None), shorter);
    let longer = KernelError::Length { expected: 8, given: 12 };
    assert_eq!(run(&[short], &[destination], Dtype::U8, None), longer);
    let partial = KernelError::PartialElement { bytes: 12, dtype: Dtype::F64 };
    assert_eq!(run(&[source], &[destination], Dtype::F64, None), partial);
    assert_eq!(run(&[source], &[destination], Dtype::F32, Some(0)), KernelError::DivideByZero);
    let bools = KernelError::Reduction { op: ReduceOp::Average, dtype: Dtype::Bool };
    assert_eq!(run(&[source], &[destination], Dtype::Bool, Some(2)), bools);
    let refused = |op, dtype, divide| {
        let error = reduce(op, dtype, &[source], &[destination], divide).unwrap_err();
        assert_eq!((error, to.bytes()), (KernelError::Reduction { op, dtype }, vec![2; 12]));
    };
    refused(ReduceOp::Min, Dtype::Complex64, None);
    refused(ReduceOp::BitXor, Dtype::F32, None);
    refused(ReduceOp::BitXor, Dtype::U32, Some(2));
    refused(ReduceOp::Sum, Dtype::Bool, Some(2));
    refused(ReduceOp::Max, Dtype::F32, Some(2));
    let scaled = |dtype, factors: &[f64]| sum_scaled(dtype, &[source], factors, &[destination]).unwrap_err();
    assert_eq!(scaled(Dtype::F32, &[1.0; 2]), KernelError::Factors { expected: 1, given: 2 });
    let bools = KernelError::Reduction { op: ReduceOp::PremulSum, dtype: Dtype::Bool };
    assert_eq!((scaled(Dtype::Bool, &[1.0]), to.bytes()), (bools, vec![2; 12]));
}

#[test]
fn a_copy_that_cannot_be_is_refused_and_writes_nothing() {
    let (from, to) = (Memory::new(0, &[1; 12]), Memory::new(0, &[2; 11]));
    assert_eq!(copy(from.view().as_view(), &[]), Err(KernelError::NoDestination));
    let shorter = KernelError::Length { expected: 12, given: 11 };
    assert_eq!(copy(from.view().as_view(), &[from.view(), to.view()]), Err(shorter));
    assert_eq!(to.bytes(), [2; 11]);
}

#[test]
fn a_foreign_instruction_set_is_refused() {
    let memory = Memory::new(0, &[1; 4]);
    let foreign = if cfg!(target_arch = "x86_64") { Isa::Neon } else { Isa::Avx2 };
    let (source, destination) = (memory.view().as_view(), memory.view());
    let refused =
        reduce_with(PassOptions::by(foreign), ReduceOp::Sum, Dtype::U8, &[source], &[destination], None);
    assert_eq!(refused, Err(KernelError::Isa { isa: foreign }));
    assert!(Isa::detect().is_available() && Isa::Scalar.is_available());
}

#[test]
fn error_texts_name_the_fault() {
    let error = KernelError::PartialElement { bytes: 10, dtype: Dtype::F32 };
    assert_eq!(error.to_string(), "10 bytes are not a whole number of f32 elements");
    assert_eq!(KernelError::Sources { given: 9 }.to_string(), "a pass reads 1 to 8 sources, not 9");
}
