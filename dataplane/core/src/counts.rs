//! How many elements each block of an uneven operation has, as local ranks have reported.

use harmonaize_abi::{Collective, Rank};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// What local ranks have reported of an operation's counts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Counts {
    collective: Collective,
    ranks: u32,
    reported: Vec<(Rank, Arc<[u64]>)>,
}

impl Counts {
    pub(crate) fn new(collective: Collective, ranks: u32) -> Self {
        Self { collective, ranks, reported: Vec::new() }
    }

    pub(crate) fn collective(&self) -> Collective {
        self.collective
    }

    pub(crate) fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Takes in what a rank says. `Err` tells of a count of which another has reported something else, and what both did.
    pub(crate) fn record(&mut self, rank: Rank, counts: Arc<[u64]>) -> Result<(), (u32, Vec<(Rank, u64)>)> {
        self.reported.push((rank, counts));
        let all = 0..self.ranks;
        let indices: Vec<u32> = if self.collective.is_pairwise() {
            let of_input = |to| self.collective.count_of_input(rank, to, self.ranks);
            let of_output = |from| self.collective.count_of_output(rank, from, self.ranks);
            all.clone().map(of_input).chain(all.map(of_output)).collect()
        } else {
            all.collect()
        };
        for index in indices {
            let mut reported = self.reports(index);
            let Some(first) = reported.next() else { continue };
            if let Some(other) = reported.find(|(_, count)| *count != first.1) {
                return Err((index, vec![first, other]));
            }
        }
        Ok(())
    }

    /// One of the [`Collective::counts`], and who has reported it; nothing where no local rank knows of it.
    pub(crate) fn get(&self, index: u32) -> Option<(Rank, u64)> {
        self.reports(index).next()
    }

    /// What local ranks have reported of one of the counts.
    fn reports(&self, index: u32) -> impl Iterator<Item = (Rank, u64)> {
        let ranks = self.ranks.max(1);
        let (from, to) = (index / ranks, index % ranks);
        let pairwise = self.collective.is_pairwise();
        self.reported.iter().flat_map(move |(rank, counts)| {
            let places = match pairwise {
                true => {
                    [(rank.0 == from).then_some(to), (rank.0 == to).then_some(ranks.saturating_add(from))]
                }
                false => [Some(index), None],
            };
            let count = move |place: u32| Some((*rank, *counts.get(place as usize)?));
            places.into_iter().flatten().filter_map(count)
        })
    }
}
