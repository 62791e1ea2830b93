//! Results written out by hand for the reference, and every instruction set against the reference, bit for bit.

mod agreement;
mod codes;
mod memory;
mod reference;
mod refusals;

use crate::element::{Divisor, Factor};
use crate::pass::Pass;
use crate::{Isa, reduce};
use harmonaize_abi::{Dtype, ReduceOp, View, ViewMut};
use memory::Memory;

/// Everything but the reference that this CPU runs.
fn vector_isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.iter().copied().filter(|isa| *isa != Isa::Scalar && isa.is_available())
}

/// One reduction to compute on several instruction sets.
#[derive(Clone, Debug)]
struct Case {
    op: ReduceOp,
    dtype: Dtype,
    elements: usize,
    /// Bytes past an address that is a multiple of 64, one for each source.
    source_offsets: Vec<usize>,
    /// The same for each destination.
    destination_offsets: Vec<usize>,
    divide: Option<u32>,
    /// Of a `PremulSum`, in place of the sum that it goes on as.
    factors: Option<Vec<f64>>,
    stream_from: usize,
    seed: u64,
}

impl Case {
    fn bytes(&self) -> usize {
        self.elements * self.dtype.size()
    }

    /// What each source holds: made once for all instruction sets, for making it takes longer than a pass.
    fn contents(&self) -> Vec<Vec<u8>> {
        let seeds = (self.seed..).take(self.source_offsets.len());
        seeds.map(|seed| memory::elements(self.dtype, self.elements, seed)).collect()
    }

    fn sources(&self, contents: &[Vec<u8>]) -> Vec<Memory> {
        self.source_offsets.iter().zip(contents).map(|(offset, bytes)| Memory::new(*offset, bytes)).collect()
    }

    fn run(&self, isa: Isa, sources: &[View<'_>], destinations: &[ViewMut<'_>]) {
        let divisor = self.divide.map(|ranks| Divisor::new(ranks).unwrap());
        let pass =
            Pass::new(self.dtype, sources, destinations, divisor.as_ref(), (0, self.stream_from)).unwrap();
        let factors = self.factors.as_ref().map(|factors| factors.iter().copied().map(Factor::new));
        // SAFETY: of one `dtype`.
        unsafe {
            match factors {
                Some(by) => reduce::run_scaled(isa, self.dtype, &pass, &by.collect::<Vec<_>>()),
                None => reduce::run(isa, self.op, self.dtype, &pass),
            }
        }
        .unwrap();
    }

    /// What each destination holds after the pass, having checked that nothing else was written.
    fn results(&self, isa: Isa, contents: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let sources = self.sources(contents);
        let before: Vec<_> = sources.iter().map(Memory::bytes).collect();
        let views: Vec<_> = sources.iter().map(|memory| memory.view().as_view()).collect();
        let stale = vec![0xa5; self.bytes()];
        let destinations: Vec<_> =
            self.destination_offsets.iter().map(|offset| Memory::new(*offset, &stale)).collect();
        let to: Vec<_> = destinations.iter().map(Memory::view).collect();
        self.run(isa, &views, &to);
        assert!(sources.iter().map(Memory::bytes).eq(before), "{isa} wrote a source: {self:?}");
        for memory in sources.iter().chain(&destinations) {
            assert!(memory.is_intact_around(), "{isa} wrote outside its views: {self:?}");
        }
        destinations.iter().map(Memory::bytes).collect()
    }

    /// What each source holds after a pass in place, each being a destination.
    fn results_in_place(&self, isa: Isa, contents: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let memories = self.sources(contents);
        let views: Vec<_> = memories.iter().map(|memory| memory.view().as_view()).collect();
        let to: Vec<_> = memories.iter().map(Memory::view).collect();
        self.run(isa, &views, &to);
        for memory in &memories {
            assert!(memory.is_intact_around(), "{isa} wrote outside its views: {self:?}");
        }
        memories.iter().map(Memory::bytes).collect()
    }
}
