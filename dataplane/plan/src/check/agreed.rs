//! What is agreed on between participants, by plan and request alone. For each link it says which messages go over it, in which order,
//! what each holds, and when. It also says what everybody's outputs hold in the end.
//!
//! Times are numbers that order what happens, nothing that a clock shows. They are such that each message is sent before it is received,
//! and received before the next one over its link is sent.

use crate::direct::AHEAD;
use crate::hierarchical::{Hierarchy, Place};
use crate::plan::{Algorithm, Plan, PlanError, Request};
use crate::program::{Encoding, Part, Participant, Stage};
use crate::recursive::{Folding, Role, sibling};
use crate::segmentation::CHAIN_PARTS;
use crate::tree::{depth, to_children, to_parent};
use harmonaize_abi::{Collective, Rank};

/// A message over a link.
#[derive(Clone, Copy, Debug)]
pub(super) struct AgreedMessage {
    pub(super) index: u32,
    pub(super) of: u32,
    pub(super) encoding: Encoding,
    pub(super) content: AgreedContent,
    /// When it is sent.
    pub(super) sent: u64,
    /// When it is received.
    pub(super) received: u64,
}

/// What a message holds, before it is encoded.
#[derive(Clone, Copy, Debug)]
pub(super) enum AgreedContent {
    /// It is empty.
    Nothing,
    /// A block of a rank's input.
    Input(Rank, u32),
    /// A sum of contributions.
    Sum(Sum),
    /// The complete sum, each part by who adds it up in the [results](Results::Once).
    Complete,
    /// The sum of so many leaves of [`Results::Tree`] from a first one on, as everybody adds them up. The number is a
    /// power of two.
    Tree(u32, u32),
}

/// Contributions to a block, those of `count` participants from position `start` of the order on, added up by one participant. All
/// that it calls so are the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Sum {
    pub(super) by: Participant,
    pub(super) block: u32,
    pub(super) start: u32,
    pub(super) count: u32,
    /// The positions round which they are counted, from a first one to before an end; `None`: round the whole order.
    pub(super) rack: Option<(u32, u32)>,
}

/// How every rank comes to the same bits of an AllReduce.
pub(super) enum Results {
    /// Nobody else has any.
    Own,
    /// All add contributions in the same order, each participant's as that of its [`Sum`].
    Alike(Vec<Sum>),
    /// All add these, a power of two, in the same pairs: two neighbours, then two such pairs, and so on.
    Tree(Vec<Sum>),
    /// Each part is added up by one, and perhaps encoded there.
    Once(Vec<(Part, Sum, Encoding)>),
}

/// See the module's documentation.
pub(super) struct Protocol<'a> {
    plan: &'a Plan,
    request: Request,
    all: u32,
    /// Most ranks of a participant.
    most: u32,
    /// Where the root's participant stands.
    root: u32,
}

impl<'a> Protocol<'a> {
    /// Of a request whose root is a rank of the group, where it has one.
    pub(super) fn new(plan: &'a Plan, request: Request) -> Self {
        let members = (0..plan.participants()).map(|each| plan.group().local(Participant(each)).len());
        let root =
            request.collective.is_rooted().then(|| plan.group().participant_of(request.root)).flatten();
        Self {
            plan,
            request,
            all: plan.participants(),
            most: members.max().unwrap_or(0) as u32,
            root: root.and_then(|root| plan.position(root)).unwrap_or(0),
        }
    }

    /// Whether complete sums are made of what was encoded.
    pub(super) fn codes(&self) -> bool {
        self.request.codes() && self.all > 1
    }

    /// Every message from the participant at `position` to the one `distance` places on, in order.
    pub(super) fn messages(&self, position: u32, distance: u32) -> Result<Vec<AgreedMessage>, PlanError> {
        let link = Link {
            protocol: self,
            position,
            distance,
            from: self.plan.at(position, 0)?,
            to: self.plan.at(position, distance)?,
        };
        let straight = self.codes() || self.request.algorithm == Algorithm::OneShot;
        let next = distance == 1;
        match (self.request.collective, self.request.algorithm) {
            (Collective::AllReduce, _) if self.codes() => Ok(link.coded_sums()),
            (Collective::AllReduce, Algorithm::OneShot) => Ok(vec![link.contribution(0, Part::whole(0), 0)]),
            (Collective::AllReduce, Algorithm::TwoShot) => Ok(link.sums()),
            (Collective::AllReduce, Algorithm::RecursiveDoubling) => Ok(link.doubled()),
            (Collective::AllReduce, Algorithm::RecursiveHalving) => Ok(link.halved()),
            (Collective::AllReduce, Algorithm::Hierarchical) => link.nested(&Hierarchy::of(self.plan)),
            (Collective::AllReduce, _) if next => link.ring(),
            (Collective::AllToAll | Collective::Gather | Collective::Scatter, _) => Ok(link.blocks()),
            (Collective::AllGather, _) if straight => Ok(link.gathered()),
            (Collective::AllGather, _) if next => link.gathered_round(),
            (Collective::ReduceScatter, Algorithm::OneShot) => Ok(link.scattered()),
            (Collective::ReduceScatter, _) if next => link.scattered_round(),
            (Collective::Broadcast, _) => Ok(link.broadcast()),
            (Collective::Reduce, _) => Ok(link.reduced()),
            (Collective::Barrier, Algorithm::OneShot) => {
                Ok(vec![AgreedMessage::at(0, AgreedContent::Nothing)])
            }
            (Collective::Barrier, _) if distance.is_power_of_two() => {
                Ok(vec![AgreedMessage::at(2 * u64::from(distance.ilog2()), AgreedContent::Nothing)])
            }
            _ => Ok(Vec::new()),
        }
    }

    /// Into how many parts the results are divided that are added up by one each. It applies if the programs of all do
    /// not say so.
    pub(super) fn parts(plan: &Plan, request: Request) -> u32 {
        match request.algorithm {
            _ if request.collective != Collective::AllReduce || request.codes() => 1,
            Algorithm::RecursiveHalving => Folding::of(plan.participants()).partners(),
            Algorithm::Hierarchical => Hierarchy::of(plan).parts(),
            _ => 1,
        }
    }

    /// How all ranks come to the same result of an AllReduce.
    pub(super) fn results(&self) -> Result<Results, PlanError> {
        let of = self.all;
        if of == 1 {
            return Ok(Results::Own);
        }
        let complete = |by| Sum { by, block: 0, start: 0, count: of, rack: None };
        let part = |index| Part { block: 0, index, of };
        let owned = |form| (0..of).map(|index| (part(index), complete(Participant(index)), form)).collect();
        match self.request.algorithm {
            _ if self.codes() => Ok(Results::Once(owned(Encoding::Coded(Stage::Result)))),
            Algorithm::TwoShot => Ok(Results::Once(owned(Encoding::Exact))),
            Algorithm::OneShot => {
                let mut sums = vec![complete(Participant(0)); of as usize];
                for (start, by) in (0..).zip(self.plan.order()) {
                    let sum = sums.get_mut(by.0 as usize).ok_or(PlanError::Inconsistent)?;
                    *sum = Sum { by: *by, block: 0, start, count: 1, rack: None };
                }
                Ok(Results::Alike(sums))
            }
            Algorithm::RecursiveDoubling => {
                let folding = Folding::of(of);
                let leaf = |number: u32| {
                    let (start, count) = folding.span(number, 1);
                    Ok(Sum { by: self.plan.at(start, 0)?, block: 0, start, count, rack: None })
                };
                Ok(Results::Tree((0..folding.partners()).map(leaf).collect::<Result<_, _>>()?))
            }
            Algorithm::RecursiveHalving => {
                let folding = Folding::of(of);
                let owned = |index: u32| {
                    let owner = self.plan.at(folding.position(folding.owner(index)), 0)?;
                    Ok((Part { block: 0, index, of: folding.partners() }, complete(owner), Encoding::Exact))
                };
                Ok(Results::Once((0..folding.partners()).map(owned).collect::<Result<_, _>>()?))
            }
            Algorithm::Hierarchical => {
                let hierarchy = Hierarchy::of(self.plan);
                let owned = |index: u32| {
                    let owner = hierarchy.owner(index).ok_or(PlanError::Inconsistent)?;
                    let part = Part { block: 0, index, of: hierarchy.parts() };
                    Ok((part, complete(self.plan.at(owner, 0)?), Encoding::Exact))
                };
                Ok(Results::Once((0..hierarchy.parts()).map(owned).collect::<Result<_, _>>()?))
            }
            Algorithm::Ring | Algorithm::BinomialTree => {
                let chunk = |index| {
                    let by = self.plan.at(index, of - 1)?;
                    Ok((part(index), complete(by), Encoding::Exact))
                };
                Ok(Results::Once((0..of).map(chunk).collect::<Result<_, _>>()?))
            }
        }
    }
}

impl AgreedMessage {
    /// A message of a whole segment that is sent then, and received before anything else happens.
    fn at(sent: u64, content: AgreedContent) -> Self {
        Self { index: 0, of: 1, encoding: Encoding::Exact, content, sent, received: sent + 1 }
    }

    fn part(self, part: Part) -> Self {
        Self { index: part.index, of: part.of, ..self }
    }

    fn coded(self, stage: Stage) -> Self {
        Self { encoding: Encoding::Coded(stage), ..self }
    }
}

/// What goes over a link where partners exchange by powers of two.
enum Exchange {
    Nothing,
    /// The sender's number, and the level.
    Partners(Folding, u32, u32),
    ToNeighbour,
    FromNeighbour(Folding),
}

/// From one participant to another.
struct Link<'a> {
    protocol: &'a Protocol<'a>,
    position: u32,
    distance: u32,
    from: Participant,
    to: Participant,
}

impl Link<'_> {
    fn all(&self) -> u32 {
        self.protocol.all
    }

    fn ranks(&self, of: Participant) -> &[Rank] {
        self.protocol.plan.group().local(of)
    }

    /// The position so many places back.
    fn back(&self, places: u32) -> u32 {
        let all = u64::from(self.all());
        ((u64::from(self.position) + all - u64::from(places) % all) % all) as u32
    }

    fn part_of(&self, owner: Participant) -> Part {
        Part { block: 0, index: owner.0, of: self.all() }
    }

    /// What the sender itself adds.
    fn contribution(&self, block: u32, part: Part, sent: u64) -> AgreedMessage {
        let sum = Sum { by: self.from, block, start: self.position, count: 1, rack: None };
        AgreedMessage::at(sent, AgreedContent::Sum(sum)).part(part)
    }

    /// A sum that the sender has completed of the part that it owns.
    fn complete(&self, sent: u64) -> AgreedMessage {
        let sum = Sum { by: self.from, block: 0, start: 0, count: self.all(), rack: None };
        AgreedMessage::at(sent, AgreedContent::Sum(sum)).part(self.part_of(self.from))
    }

    /// AllReduce in two shots.
    fn sums(&self) -> Vec<AgreedMessage> {
        vec![self.contribution(0, self.part_of(self.to), 0), self.complete(2)]
    }

    /// The same coded: contributions are sent some rounds ahead of what is received.
    fn coded_sums(&self) -> Vec<AgreedMessage> {
        let ahead = |round: u32| 2 * (u64::from(round) + u64::from(AHEAD));
        let contribution = self.contribution(0, self.part_of(self.to), 2 * u64::from(self.distance));
        let contribution = AgreedMessage { received: ahead(self.distance) - 1, ..contribution };
        let complete = self.complete(ahead(self.all()));
        vec![contribution.coded(Stage::Contribution), complete.coded(Stage::Result)]
    }

    /// Between whom an exchange by powers of two has messages over this link. They are between partners, with the level at which these
    /// are, to a neighbour that takes part for the sender, or back to it.
    fn exchange(&self) -> Exchange {
        let folding = Folding::of(self.all());
        let to = (self.position + self.distance) % self.all();
        match (folding.role(self.position), folding.role(to)) {
            (Role::Partner(from, _), Role::Partner(to, _)) if (from ^ to).is_power_of_two() => {
                Exchange::Partners(folding, from, (from ^ to).trailing_zeros())
            }
            (Role::Neighbour(of), Role::Partner(..)) if of == to => Exchange::ToNeighbour,
            (Role::Partner(..), Role::Neighbour(of)) if of == self.position => {
                Exchange::FromNeighbour(folding)
            }
            _ => Exchange::Nothing,
        }
    }

    /// AllReduce by recursive doubling: to each partner what is added up by then.
    fn doubled(&self) -> Vec<AgreedMessage> {
        match self.exchange() {
            Exchange::ToNeighbour => vec![self.contribution(0, Part::whole(0), 0)],
            Exchange::Partners(_, from, level) => {
                let first = from >> level << level;
                vec![AgreedMessage::at(2 + 2 * u64::from(level), AgreedContent::Tree(first, 1 << level))]
            }
            Exchange::FromNeighbour(folding) => {
                let sent = 2 + 2 * u64::from(folding.levels());
                vec![AgreedMessage::at(sent, AgreedContent::Tree(0, folding.partners()))]
            }
            Exchange::Nothing => Vec::new(),
        }
    }

    /// AllReduce by recursive halving and doubling. Each partner gets the half that it adds up, and later what is complete
    /// here.
    fn halved(&self) -> Vec<AgreedMessage> {
        match self.exchange() {
            Exchange::ToNeighbour => vec![self.contribution(0, Part::whole(0), 0)],
            Exchange::Partners(folding, from, level) => {
                let (start, count) = folding.span(from >> level << level, 1 << level);
                let sum = AgreedContent::Sum(Sum { by: self.from, block: 0, start, count, rack: None });
                let part = Folding::owned(from, level + 1);
                let back = 2 * folding.levels() - level;
                vec![
                    AgreedMessage::at(2 + 2 * u64::from(level), sum).part(sibling(part)),
                    AgreedMessage::at(2 * u64::from(back), AgreedContent::Complete).part(part),
                ]
            }
            Exchange::FromNeighbour(folding) => {
                vec![AgreedMessage::at(2 + 4 * u64::from(folding.levels()), AgreedContent::Complete)]
            }
            Exchange::Nothing => Vec::new(),
        }
    }

    /// AllReduce along the ring: a chunk that begins here, then those that others have added to. Then what is complete, first the chunk
    /// that is so here.
    fn ring(&self) -> Result<Vec<AgreedMessage>, PlanError> {
        let of = self.all();
        let message = |round: u32| {
            let index = self.back(round);
            let sum = if round + 1 < of {
                Sum { by: self.from, block: 0, start: index, count: round + 1, rack: None }
            } else {
                Sum { by: self.protocol.plan.at(index, of - 1)?, block: 0, start: 0, count: of, rack: None }
            };
            Ok(AgreedMessage::at(2 * u64::from(round), AgreedContent::Sum(sum)).part(Part {
                block: 0,
                index,
                of,
            }))
        };
        (0..2 * (of - 1)).map(message).collect()
    }

    /// AllReduce by racks: within the rack, or between those who own the same part of theirs.
    fn nested(&self, hierarchy: &Hierarchy) -> Result<Vec<AgreedMessage>, PlanError> {
        let to = (self.position + self.distance) % self.all();
        let (Some(here), Some(there)) = (hierarchy.place(self.position), hierarchy.place(to)) else {
            return Err(PlanError::Inconsistent);
        };
        let owns = here.index < hierarchy.columns();
        if here.rack == there.rack && here.next().index == there.index {
            return Ok(self.nested_within(hierarchy, here));
        }
        if here.index == there.index && hierarchy.next_rack(here.rack) == there.rack && owns {
            return self.nested_across(hierarchy, here);
        }
        Ok(Vec::new())
    }

    /// Within a rack: sums of parts on their way to their owners, and complete parts from there.
    fn nested_within(&self, hierarchy: &Hierarchy, here: Place) -> Vec<AgreedMessage> {
        let part = |index| Part { block: 0, index, of: hierarchy.columns() };
        let sums = (0..here.hosts - 1).filter_map(|round| {
            let index = here.scattered(round);
            let start = here.start + (index + 1) % here.hosts;
            let rack = Some((here.start, here.start + here.hosts));
            let sum = AgreedContent::Sum(Sum { by: self.from, block: 0, start, count: round + 1, rack });
            let message = AgreedMessage::at(2 * u64::from(round), sum);
            (index < hierarchy.columns()).then(|| message.part(part(index)))
        });
        let begun = 2 * u64::from(hierarchy.largest()) + 4 * u64::from(hierarchy.racks());
        let complete = (0..here.hosts - 1).filter_map(|round| {
            let index = here.gathered(round);
            let message = AgreedMessage::at(begun + 2 * u64::from(round), AgreedContent::Complete);
            (index < hierarchy.columns()).then(|| message.part(part(index)))
        });
        sums.chain(complete).collect()
    }

    /// Between racks, among the owners of a part: along their ring, as [`Self::ring`] has it.
    fn nested_across(&self, hierarchy: &Hierarchy, here: Place) -> Result<Vec<AgreedMessage>, PlanError> {
        let (racks, begun) = (hierarchy.racks(), 2 * u64::from(hierarchy.largest()));
        let message = |round: u32| {
            let index = hierarchy.across(here.rack, round);
            let content = if round + 1 < racks {
                let (start, count) = hierarchy.span(index + 1, round + 1).ok_or(PlanError::Inconsistent)?;
                AgreedContent::Sum(Sum { by: self.from, block: 0, start, count, rack: None })
            } else {
                AgreedContent::Complete
            };
            let index = here.index * racks + index;
            let part = Part { block: 0, index, of: hierarchy.parts() };
            Ok(AgreedMessage::at(begun + 2 * u64::from(round), content).part(part))
        };
        (0..2 * (racks - 1)).map(message).collect()
    }

    /// AllToAll, Gather and Scatter: a message for each pair of ranks, in the round of this distance.
    fn blocks(&self) -> Vec<AgreedMessage> {
        let most = u64::from(self.protocol.most);
        let round = u64::from(self.distance) * 2 * most * most;
        let to = self.ranks(self.to);
        let pairs = self.ranks(self.from).iter().flat_map(|from| to.iter().map(move |to| (*from, *to)));
        let request = self.protocol.request;
        let pairs = pairs.filter_map(|(from, to)| request.pair(from, to).map(|[block, _]| (from, block)));
        let message = |(count, (from, block)): (u64, (Rank, u32))| {
            AgreedMessage::at(round + 2 * count, AgreedContent::Input(from, block))
        };
        (0_u64..).zip(pairs).map(message).map(|message| self.moved(message)).collect()
    }

    fn moved(&self, message: AgreedMessage) -> AgreedMessage {
        if self.protocol.codes() { message.coded(Stage::Moved) } else { message }
    }

    /// AllGather straight to all.
    fn gathered(&self) -> Vec<AgreedMessage> {
        let own = (0..).zip(self.ranks(self.from));
        own.map(|(pass, rank)| self.moved(AgreedMessage::at(2 * pass, AgreedContent::Input(*rank, 0))))
            .collect()
    }

    /// Of each pass, the ranks of participants so many places back.
    fn passing(&self, places: core::ops::Range<u32>) -> Result<Vec<(u64, u32, Rank)>, PlanError> {
        let mut passing = Vec::new();
        for pass in 0..self.protocol.most {
            for back in places.clone() {
                let owner = self.protocol.plan.at(self.back(back), 0)?;
                let rank = self.ranks(owner).get(pass as usize);
                passing.extend(rank.map(|rank| {
                    let sent = 2 * (u64::from(pass) * u64::from(self.all() + 1) + u64::from(back));
                    (sent, back, *rank)
                }));
            }
        }
        Ok(passing)
    }

    /// AllGather along the ring: the own block, then those that come by.
    fn gathered_round(&self) -> Result<Vec<AgreedMessage>, PlanError> {
        let passing = self.passing(0..self.all() - 1)?.into_iter();
        Ok(passing.map(|(sent, _, rank)| AgreedMessage::at(sent, AgreedContent::Input(rank, 0))).collect())
    }

    /// ReduceScatter straight to the owners.
    fn scattered(&self) -> Vec<AgreedMessage> {
        let to = (0..).zip(self.ranks(self.to));
        to.map(|(pass, rank)| self.contribution(rank.0, Part::whole(0), 2 * pass)).collect()
    }

    /// ReduceScatter along the ring: each block begins after its owner.
    fn scattered_round(&self) -> Result<Vec<AgreedMessage>, PlanError> {
        let message = |(sent, count, rank): (u64, u32, Rank)| {
            let sum = Sum { by: self.from, block: rank.0, start: self.back(count - 1), count, rack: None };
            AgreedMessage::at(sent, AgreedContent::Sum(sum))
        };
        Ok(self.passing(1..self.all())?.into_iter().map(message).collect())
    }

    /// The messages of a Reduce. They go from everybody to the root, or up the tree, or each to the next as
    /// far as there, part by part.
    fn reduced(&self) -> Vec<AgreedMessage> {
        let hops = self.back(self.protocol.root);
        match self.protocol.request.algorithm {
            _ if hops == 0 => Vec::new(),
            Algorithm::OneShot if hops + self.distance == self.all() => {
                vec![self.contribution(0, Part::whole(0), 0)]
            }
            Algorithm::BinomialTree if self.distance == self.all() - to_parent(hops) => {
                let count = to_parent(hops).min(self.all() - hops);
                let sum = Sum { by: self.from, block: 0, start: self.position, count, rack: None };
                let sent = 2 * u64::from(to_parent(hops).trailing_zeros());
                vec![AgreedMessage::at(sent, AgreedContent::Sum(sum))]
            }
            Algorithm::OneShot | Algorithm::BinomialTree => Vec::new(),
            _ if self.distance == 1 => {
                let sum =
                    Sum { by: self.from, block: 0, start: self.back(hops - 1), count: hops, rack: None };
                let sent = |index| 2 * u64::from(hops) + 4 * u64::from(index);
                let message = |index| AgreedMessage::at(sent(index), AgreedContent::Sum(sum));
                let of = CHAIN_PARTS;
                (0..of).map(|index| message(index).part(Part { block: 0, index, of })).collect()
            }
            _ => Vec::new(),
        }
    }

    /// The messages of a Broadcast. They go from the root to everybody, or down the tree, or each to the next
    /// but the last, part by part.
    fn broadcast(&self) -> Vec<AgreedMessage> {
        let holds = AgreedContent::Input(self.protocol.request.root, 0);
        let hops = self.back(self.protocol.root);
        match self.protocol.request.algorithm {
            Algorithm::OneShot if hops == 0 => vec![AgreedMessage::at(0, holds)],
            Algorithm::BinomialTree if to_children(hops, self.all()).any(|child| child == self.distance) => {
                vec![AgreedMessage::at(2 * u64::from(depth(hops)), holds)]
            }
            Algorithm::OneShot | Algorithm::BinomialTree => Vec::new(),
            _ if self.distance == 1 && hops + 1 < self.all() => {
                let of = CHAIN_PARTS;
                let part = |index| Part { block: 0, index, of };
                let sent = |index| 2 * u64::from(hops) + 4 * u64::from(index);
                (0..of).map(|index| AgreedMessage::at(sent(index), holds).part(part(index))).collect()
            }
            _ => Vec::new(),
        }
    }
}
