//! Reduction and copying against memcpy, for each instruction set of this CPU: 64 KiB (cache), 1 MiB, 64 MiB (memory).
//! Throughput counts bytes touched: every source and every destination once; memcpy's, twice the length.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use harmonaize_abi::{Dtype, ReduceOp, View, ViewMut};
use harmonaize_kernels::{Isa, PassOptions, copy, reduce_with};
use std::time::Duration;

const LENGTHS: [(usize, &str); 3] = [(64 << 10, "64 KiB"), (1 << 20, "1 MiB"), (64 << 20, "64 MiB")];

#[derive(Clone, Copy)]
#[repr(align(4096))]
struct Page(#[expect(dead_code, reason = "read through pointers")] [u8; 4096]);

/// Pages that exist, of bytes that are an ordinary number near 1 in every float type.
struct Memory {
    base: *mut u8,
    bytes: usize,
    /// Owns what `base` points to, and is not touched.
    _pages: Vec<Page>,
}

impl Memory {
    fn new(bytes: usize) -> Self {
        let mut pages = vec![Page([0x3c; 4096]); bytes.div_ceil(4096)];
        Self { base: pages.as_mut_ptr().cast(), bytes, _pages: pages }
    }

    fn view(&self) -> View<'_> {
        self.view_mut().as_view()
    }

    fn view_mut(&self) -> ViewMut<'_> {
        // SAFETY: allocated while `self` lives, and not behind a reference.
        unsafe { ViewMut::new(self.base, self.bytes) }
    }
}

struct Shape {
    name: &'static str,
    dtype: Dtype,
    op: ReduceOp,
    sources: usize,
    destinations: usize,
    in_place: bool,
}

const fn shape(name: &'static str, dtype: Dtype, op: ReduceOp, sources: usize, destinations: usize) -> Shape {
    Shape { name, dtype, op, sources, destinations, in_place: false }
}

const SHAPES: &[Shape] = &[
    shape("f32 sum 2 to 1", Dtype::F32, ReduceOp::Sum, 2, 1),
    Shape { in_place: true, ..shape("f32 sum 2 to 1 in place", Dtype::F32, ReduceOp::Sum, 2, 1) },
    shape("f32 sum 8 to 1", Dtype::F32, ReduceOp::Sum, 8, 1),
    Shape { in_place: true, ..shape("f32 sum 4 to 4 in place", Dtype::F32, ReduceOp::Sum, 4, 4) },
    shape("bf16 sum 2 to 1", Dtype::Bf16, ReduceOp::Sum, 2, 1),
    shape("f16 sum 2 to 1", Dtype::F16, ReduceOp::Sum, 2, 1),
    shape("f8e4m3 sum 2 to 1", Dtype::F8E4M3, ReduceOp::Sum, 2, 1),
    shape("f8e5m2 sum 2 to 1", Dtype::F8E5M2, ReduceOp::Sum, 2, 1),
    shape("complex64 product 2 to 1", Dtype::Complex64, ReduceOp::Product, 2, 1),
    shape("f32 max 2 to 1", Dtype::F32, ReduceOp::Max, 2, 1),
    shape("i8 product 2 to 1", Dtype::I8, ReduceOp::Product, 2, 1),
];

fn reductions(criterion: &mut Criterion) {
    for shape in SHAPES {
        for (bytes, length) in LENGTHS {
            let memories: Vec<_> =
                (0..shape.sources + shape.destinations).map(|_| Memory::new(bytes)).collect();
            let sources: Vec<_> = memories.iter().take(shape.sources).map(Memory::view).collect();
            let skipped = if shape.in_place { 0 } else { shape.sources };
            let destinations: Vec<_> =
                memories.iter().skip(skipped).take(shape.destinations).map(Memory::view_mut).collect();
            let mut group = criterion.benchmark_group(shape.name);
            group.throughput(Throughput::Bytes((bytes * (shape.sources + shape.destinations)) as u64));
            for isa in Isa::ALL.iter().copied().filter(|isa| isa.is_available()) {
                group.bench_function(BenchmarkId::new(format!("{isa:?}"), length), |bencher| {
                    bencher.iter(|| {
                        reduce_with(
                            PassOptions::by(isa),
                            shape.op,
                            shape.dtype,
                            &sources,
                            &destinations,
                            None,
                        )
                    });
                });
            }
            group.finish();
        }
    }
}

fn copies(criterion: &mut Criterion) {
    for (bytes, length) in LENGTHS {
        let [from, to, too] = [(); 3].map(|()| Memory::new(bytes));
        let mut group = criterion.benchmark_group("copy 1 to 1");
        group.throughput(Throughput::Bytes(2 * bytes as u64));
        group.bench_function(BenchmarkId::new("memcpy", length), |bencher| {
            // SAFETY: both hold `bytes` bytes.
            bencher
                .iter(|| unsafe { std::hint::black_box(to.base).copy_from_nonoverlapping(from.base, bytes) });
        });
        group.bench_function(BenchmarkId::new("copy", length), |bencher| {
            bencher.iter(|| copy(from.view(), &[to.view_mut()]));
        });
        group.finish();
        let mut group = criterion.benchmark_group("copy 1 to 2");
        group.throughput(Throughput::Bytes(3 * bytes as u64));
        group.bench_function(BenchmarkId::new("copy", length), |bencher| {
            bencher.iter(|| copy(from.view(), &[to.view_mut(), too.view_mut()]));
        });
        group.finish();
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600))
        .without_plots();
    targets = copies, reductions
}
criterion_main!(benches);
