//! The finest ranges that the programs' parts divide a segment into. Parts are fractions, and where two fractions meet the
//! rounded element positions meet too, so what holds for these ranges holds for every number of elements.

use crate::program::{Part, Program};
use std::collections::{BTreeMap, BTreeSet};

/// Most boundaries that the parts may have together.
const MAX_BOUNDARIES: u64 = 1 << 20;

pub(super) struct Grid {
    atoms: u32,
    /// For each `of`, the atom at which each of its parts begins, and the end.
    boundaries: BTreeMap<u32, Vec<u32>>,
}

impl Grid {
    /// The grid of all programs' parts and of so many, or `None` if it is too fine.
    pub(super) fn new(programs: &[Program], parts: u32) -> Option<Self> {
        let steps = programs.iter().flat_map(|program| &program.steps);
        let operands = steps.flat_map(|step| step.sources.iter().chain(&step.destinations));
        let slots = programs.iter().flat_map(|program| program.slots.iter().copied());
        let all = operands.map(|operand| operand.part.of).chain(slots).chain([parts, 1]);
        let divisors: BTreeSet<u32> = all.map(|of| of.max(1)).collect();
        let total = divisors.iter().fold(0_u64, |sum, of| sum.saturating_add(u64::from(*of) + 1));
        if total > MAX_BOUNDARIES {
            return None;
        }
        let mut fractions: Vec<(u32, u32)> =
            divisors.iter().flat_map(|of| (0..=*of).map(move |index| (index, *of))).collect();
        fractions.sort_by_key(|(index, of)| Fraction(*index, *of));
        let mut boundaries: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        let (mut atom, mut previous) = (0, Fraction(0, 1));
        for (index, of) in fractions {
            let fraction = Fraction(index, of);
            if fraction > previous {
                atom += 1;
                previous = fraction;
            }
            boundaries.entry(of).or_default().push(atom);
        }
        Some(Self { atoms: atom, boundaries })
    }

    /// How many ranges there are.
    pub(super) fn atoms(&self) -> u32 {
        self.atoms
    }

    /// The ranges that a part covers; none of a part that does not exist.
    pub(super) fn range(&self, part: Part) -> core::ops::Range<u32> {
        let index = part.index as usize;
        match self.boundaries.get(&part.of).and_then(|starts| starts.get(index..=index + 1)) {
            Some([lo, hi]) => *lo..*hi,
            _ => 0..0,
        }
    }
}

/// Index of divisor, compared as numbers.
#[derive(Clone, Copy)]
struct Fraction(u32, u32);

impl Ord for Fraction {
    fn cmp(&self, other: &Self) -> core::cmp::Ordering {
        (u64::from(self.0) * u64::from(other.1)).cmp(&(u64::from(other.0) * u64::from(self.1)))
    }
}
impl PartialOrd for Fraction {
    fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl PartialEq for Fraction {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}
impl Eq for Fraction {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::{Buffer, Operand, Participant, Step, StepKind};

    #[test]
    fn halves_and_thirds_make_four_ranges() {
        let operand = |of| Operand::exact(Buffer::Peer(Participant(0)), Part { block: 0, index: 0, of });
        let step = Step {
            kind: StepKind::Move,
            sources: vec![operand(2)],
            destinations: vec![operand(3)],
            after: vec![],
            committed: false,
        };
        let grid = Grid::new(&[Program { steps: vec![step], slots: vec![], copying: 0 }], 1).unwrap();
        assert_eq!(grid.atoms(), 4); // 0 1/3 1/2 2/3 1
        assert_eq!(grid.range(Part { block: 0, index: 1, of: 2 }), 2..4);
        assert_eq!(grid.range(Part { block: 0, index: 1, of: 3 }), 1..3);
        assert_eq!(grid.range(Part::whole(0)), 0..4);
        assert_eq!(grid.range(Part { block: 0, index: 3, of: 3 }), 0..0);
    }
}
