//! AllReduce by racks, in three phases. Each rack's participants add parts up along a ring of theirs. The owners of the same part then
//! do so along a ring through the racks. At last complete parts go round each rack. Source: Cho, Finkler, Kung, Hunter, "BlueConnect:
//! decomposing all-reduce for deep learning on heterogeneous network hierarchy", 2019.
//!
//! Each rack owns as many parts as the smallest has participants: its first so many own one each, and the others pass them on. So
//! racks may differ in size, and between racks each part crosses once for a rack, however many hosts that has. Where racks are not known all
//! stand in one, and it is a ring.
//!
//! A part that goes round a ring begins behind its owner, and is complete, or that rack's, when it gets there: each part is added up by
//! one in the end, so all ranks end with the same bits. As in [`crate::allreduce`] a message is consumed before the next is sent, and each
//! phase follows on the one before: one landing slot a peer is enough.

use crate::builder::{peer, staged};
use crate::plan::{Local, Plan, PlanError};
use crate::program::{Operand, Part, Participant, Program, StepKind};
use crate::recursive::Begun;

/// The racks of a plan's order.
pub(crate) struct Hierarchy {
    /// Where each begins, and where the last ends.
    starts: Vec<u32>,
    largest: u32,
    columns: u32,
}

/// Where a participant stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) rack: u32,
    /// The rack's first position.
    pub(crate) start: u32,
    /// How many stand in it.
    pub(crate) hosts: u32,
    /// Where it stands among them.
    pub(crate) index: u32,
}

impl Hierarchy {
    pub(crate) fn of(plan: &Plan) -> Self {
        let all = [plan.participants()];
        let racks = if plan.racks().is_empty() { all.as_slice() } else { plan.racks() };
        let mut starts = vec![0];
        starts.extend(racks.iter().scan(0, |end, hosts| {
            *end += hosts;
            Some(*end)
        }));
        let largest = racks.iter().copied().max().unwrap_or(1);
        Self { starts, largest, columns: racks.iter().copied().min().unwrap_or(1).max(1) }
    }

    /// How many racks.
    pub(crate) fn racks(&self) -> u32 {
        self.starts.len().saturating_sub(1) as u32
    }

    /// How many participants the largest has.
    pub(crate) fn largest(&self) -> u32 {
        self.largest
    }

    /// How many parts each rack adds up.
    pub(crate) fn columns(&self) -> u32 {
        self.columns
    }

    /// How many parts are added up by one each.
    pub(crate) fn parts(&self) -> u32 {
        self.columns * self.racks()
    }

    /// Where the participant at a position stands.
    pub(crate) fn place(&self, position: u32) -> Option<Place> {
        let rack = self.starts.partition_point(|start| *start <= position).checked_sub(1)?;
        let (start, end) = (*self.starts.get(rack)?, *self.starts.get(rack + 1)?);
        Some(Place { rack: rack as u32, start, hosts: end - start, index: position - start })
    }

    /// The rack behind another.
    pub(crate) fn next_rack(&self, rack: u32) -> u32 {
        (rack + 1) % self.racks().max(1)
    }

    /// The position of whoever stands at an index of the rack so many behind another.
    fn in_rack(&self, rack: u32, behind: u32, index: u32) -> Option<u32> {
        let rack = (rack + behind) % self.racks().max(1);
        Some(self.starts.get(rack as usize)? + index)
    }

    /// The position of whoever completes one of all [parts](Self::parts).
    pub(crate) fn owner(&self, part: u32) -> Option<u32> {
        let racks = self.racks().max(1);
        self.in_rack(part % racks, 0, part / racks)
    }

    /// The rack's part of its column that it deals with in a round between racks.
    pub(crate) fn across(&self, rack: u32, round: u32) -> u32 {
        back(rack, round + 1, self.racks())
    }

    /// The positions of so many racks from one on: where they begin, and how many.
    pub(crate) fn span(&self, first: u32, racks: u32) -> Option<(u32, u32)> {
        let place = |rack: u32| self.place(self.in_rack(rack, 0, 0)?);
        let hosts = (first..first + racks).map(|rack| Some(place(rack)?.hosts));
        Some((place(first)?.start, hosts.sum::<Option<u32>>()?))
    }
}

impl Place {
    /// The next round its rack.
    pub(crate) fn next(self) -> Self {
        Self { index: (self.index + 1) % self.hosts, ..self }
    }

    /// The part that it sends on in a round in which parts go to their owners. In the last round it is its
    /// own.
    pub(crate) fn scattered(self, round: u32) -> u32 {
        back(self.index, round + 1, self.hosts)
    }

    /// The part that it sends on in a round in which parts come from their owners.
    pub(crate) fn gathered(self, round: u32) -> u32 {
        back(self.index, round, self.hosts)
    }
}

/// So many places back round a ring.
fn back(place: u32, places: u32, all: u32) -> u32 {
    let all = u64::from(all.max(1));
    ((u64::from(place) + all - u64::from(places) % all) % all) as u32
}

/// The program of the participant at `position`, of several.
pub(crate) fn program(
    plan: &Plan,
    position: u32,
    me: Participant,
    local: &Local<'_>,
) -> Result<Program, PlanError> {
    let hierarchy = Hierarchy::of(plan);
    let here = hierarchy.place(position).ok_or(PlanError::Inconsistent)?;
    let mut begun = Begun::new(plan, me, local)?;
    let sums = staged(begun.builder.slot(1)?, Part::whole(0));
    let own = begun.own;
    let mut walk = Walk { places: begun.landed()?, begun, sums, source: own };
    let (columns, racks) = (hierarchy.columns(), hierarchy.racks());
    let within = Ring {
        next: plan.at(here.start + here.next().index, 0)?,
        previous: plan.at(here.start + back(here.index, 1, here.hosts), 0)?,
        hosts: here.hosts,
        index: here.index,
    };
    let column = |index| (index < columns).then_some(Part { block: 0, index, of: columns });
    walk.scatter(&within, column, racks == 1)?;
    if here.index < columns && racks > 1 {
        let at = |behind| {
            let position = hierarchy.in_rack(here.rack, behind, here.index);
            plan.at(position.ok_or(PlanError::Inconsistent)?, 0)
        };
        let across = Ring { next: at(1)?, previous: at(racks - 1)?, hosts: racks, index: here.rack };
        let part = |index| Some(Part { block: 0, index: here.index * racks + index, of: columns * racks });
        walk.scatter(&across, part, true)?;
        walk.gather(&across, part)?;
    }
    walk.gather(&within, column)?;
    walk.begun.finish()
}

/// A ring that parts go round, one of which belongs to each of the first.
struct Ring {
    next: Participant,
    previous: Participant,
    hosts: u32,
    index: u32,
}

/// A program on its way through the rings.
struct Walk<'a> {
    begun: Begun<'a>,
    /// Where the result goes.
    places: Vec<Operand>,
    /// Where sums wait that are not complete.
    sums: Operand,
    /// What is added on the next ring: the own contribution, or the sums of the ring before.
    source: Operand,
}

impl Walk<'_> {
    /// Adds to each part that comes by; the own one stays. `last`: then that is complete.
    fn scatter(
        &mut self,
        ring: &Ring,
        part: impl Fn(u32) -> Option<Part>,
        last: bool,
    ) -> Result<(), PlanError> {
        for round in 0..ring.hosts {
            let Some(part) = part(back(ring.index, round + 1, ring.hosts)) else { continue };
            let own = Operand { part, ..self.source };
            let sum = Operand { part, ..self.sums };
            let stays = round + 1 == ring.hosts;
            let destinations = if stays && last { self.places(part) } else { vec![sum] };
            if round > 0 {
                let last = stays && last;
                let sources = vec![peer(ring.previous, part), own];
                self.begun.builder.push(StepKind::Reduce { last }, sources, destinations);
            }
            if !stays {
                self.begun.builder.send(if round > 0 { sum } else { own }, ring.next);
            }
        }
        if ring.hosts > 1 {
            self.source = self.sums;
        }
        Ok(())
    }

    /// Sends the own complete part round, and takes the others.
    fn gather(&mut self, ring: &Ring, part: impl Fn(u32) -> Option<Part>) -> Result<(), PlanError> {
        for round in 0..ring.hosts {
            let Some(part) = part(back(ring.index, round, ring.hosts)) else { continue };
            let places = self.places(part);
            let from = *places.first().ok_or(PlanError::Inconsistent)?;
            if round > 0 {
                self.begun.builder.copy(peer(ring.previous, part), places);
            }
            if round + 1 < ring.hosts {
                self.begun.builder.send(from, ring.next);
            }
        }
        Ok(())
    }

    fn places(&self, part: Part) -> Vec<Operand> {
        self.places.iter().map(|place| Operand { part, ..*place }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::Group;
    use harmonaize_abi::Rank;

    #[test]
    fn every_part_has_one_owner_and_every_position_one_place() {
        for racks in [&[][..], &[7], &[1, 6], &[3, 4], &[2, 2, 3], &[1; 7]] {
            let group = Group::new((0..7).map(|rank| vec![Rank(rank)]).collect()).unwrap();
            let plan = Plan::in_sequence(group).with_racks(racks.to_vec()).unwrap();
            let hierarchy = Hierarchy::of(&plan);
            for position in 0..7 {
                let place = hierarchy.place(position).unwrap();
                assert_eq!(hierarchy.in_rack(place.rack, 0, place.index), Some(position));
            }
            let mut owners: Vec<u32> =
                (0..hierarchy.parts()).map(|part| hierarchy.owner(part).unwrap()).collect();
            owners.sort_unstable();
            owners.dedup();
            assert_eq!(owners.len() as u32, hierarchy.parts(), "{racks:?}");
            assert_eq!(hierarchy.span(1, hierarchy.racks()).unwrap().1, 7);
        }
    }
}
