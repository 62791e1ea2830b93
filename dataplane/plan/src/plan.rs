//! A plan (who takes part, in which order), and the expansion of a request into each participant's program.

use crate::program::{Access, Buffer, Group, Participant, Program, Retention};
use crate::{
    allgather, allreduce, barrier, broadcast, direct, hierarchical, one_two_shot, pairwise, recursive,
    reduce, reducescatter,
};
use harmonaize_abi::{Blocks, Collective, Pattern, Rank};
use serde::{Deserialize, Serialize};

/// A group and the order in which rings and chains visit its participants. The group is the communicator's, the order
/// may change with an epoch, and so may the racks in which they stand.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Recipe", into = "Recipe")]
pub struct Plan {
    group: Group,
    order: Vec<Participant>,
    /// How many of the order each rack has, one after another; none where racks are not known.
    racks: Vec<u32>,
}

/// A plan as it is sent, before it is validated. Behind the participants `order` has the sizes of racks, where they are known: so plans
/// without racks are what they were before there were any.
#[derive(Clone, Serialize, Deserialize)]
struct Recipe {
    group: Group,
    order: Vec<Participant>,
}

/// Which collective, as far as its steps depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Request {
    /// Which.
    pub collective: Collective,
    /// The root; ignored by those that have none.
    pub root: Rank,
    /// Whether what goes between participants is coded; ignored by what is not [compressible](harmonaize_abi::CollectiveTraits).
    pub coded: bool,
    /// How what is not coded goes between participants; ignored by what goes pairwise.
    pub algorithm: Algorithm,
}

impl Request {
    /// Whether what goes between several participants is coded.
    pub(crate) fn codes(&self) -> bool {
        self.coded && self.collective.traits().compressible
    }

    /// Where data moves pairwise. It gives which block of the one's input is which block of the other's output; nothing if
    /// none is.
    pub(crate) fn pair(&self, from: Rank, to: Rank) -> Option<[u32; 2]> {
        let traits = self.collective.traits();
        let moves = traits.input_of.include(from, self.root) && traits.output_of.include(to, self.root);
        let block = |blocks: Blocks, other: Rank| if blocks == Blocks::PerRank { other.0 } else { 0 };
        moves.then_some([block(traits.input, to), block(traits.output, from)])
    }
}

/// How an operation goes between participants. One that its collective cannot take stands for [`Algorithm::Ring`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Algorithm {
    /// From one to the next by ring or chain, by dissemination, or pairwise.
    #[default]
    Ring,
    /// Straight from each to all.
    OneShot,
    /// Straight from each to the owners of the parts, and from these to all.
    TwoShot,
    /// Everything between partners that are twice as far from one another each time.
    RecursiveDoubling,
    /// Half of what is left between such partners, and back.
    RecursiveHalving,
    /// Along a binomial tree, from the root or to it.
    BinomialTree,
    /// By rings within each rack, and between racks by rings of those who own the same part.
    Hierarchical,
}

impl Algorithm {
    /// Every algorithm.
    pub const ALL: [Self; 7] = [
        Self::Ring,
        Self::OneShot,
        Self::TwoShot,
        Self::RecursiveDoubling,
        Self::RecursiveHalving,
        Self::BinomialTree,
        Self::Hierarchical,
    ];

    /// Those that data of a pattern can take.
    pub const fn of(pattern: Pattern) -> &'static [Self] {
        match pattern {
            Pattern::ReduceDistribute => &[
                Self::Ring,
                Self::OneShot,
                Self::TwoShot,
                Self::RecursiveDoubling,
                Self::RecursiveHalving,
                Self::Hierarchical,
            ],
            Pattern::Pairwise => &[Self::Ring],
            Pattern::Chain => &[Self::Ring, Self::OneShot, Self::BinomialTree],
            Pattern::Gather | Pattern::Dissemination => &[Self::Ring, Self::OneShot],
        }
    }

    /// The name that people read and type.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::OneShot => "one-shot",
            Self::TwoShot => "two-shot",
            Self::RecursiveDoubling => "recursive-doubling",
            Self::RecursiveHalving => "recursive-halving",
            Self::BinomialTree => "binomial-tree",
            Self::Hierarchical => "hierarchical",
        }
    }
}

impl core::fmt::Display for Algorithm {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.name())
    }
}

impl core::str::FromStr for Algorithm {
    type Err = ();
    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|each| each.name() == text).ok_or(())
    }
}

/// How operations that may lose something are coded, alike at all participants.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Coding {
    /// The codec: an index into `harmonaize_codec::Codec::NAMED`.
    pub codec: u16,
    /// In what chunks travel that would lose too much by it, if they hold there: as unbiased, and numbered alike.
    pub finer: Option<u16>,
    /// The most that an operation may lose. It is the squared error of its sum over the squares of all ranks' inputs, or of each chunk
    /// that is moved over its squares. `None`: no bound.
    pub max_error: Option<f64>,
}

/// What a participant knows of its own ranks. Participants need not agree on it: messages do not depend on it.
#[derive(Clone, Copy)]
pub struct Local<'a> {
    /// How each local rank's tensors are reached.
    pub access: &'a dyn Fn(Rank) -> Access,
    /// What keeps the inputs alive.
    pub retention: Retention,
    /// Whether inputs are multiplied as they are read: then none is sent from where it lies.
    pub scaled: bool,
}

/// Why there is no such plan or program.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The order leaves out a participant, repeats one, or names one that the group does not have.
    #[error("the order of {entries} participants is not a permutation of the group's {participants}")]
    Order {
        /// How many the group has.
        participants: u32,
        /// How many the order names.
        entries: usize,
    },
    /// The racks' sizes do not add up, or one is empty.
    #[error("racks of {racks:?} are not those of {participants} participants")]
    Racks {
        /// How many the group has.
        participants: u32,
        /// How many each rack has.
        racks: Vec<u32>,
    },
    /// The group has no such participant.
    #[error("participant {} is not in the group", .0.0)]
    Participant(Participant),
    /// The root is not a rank of the group.
    #[error("root {root} is not one of {ranks} ranks")]
    Root {
        /// The root asked for.
        root: Rank,
        /// Ranks of the group.
        ranks: u32,
    },
    /// An AllToAll cannot be in place.
    #[error("an AllToAll cannot hold back its outputs: it is never in place")]
    InPlace,
    /// What is coded is too large to be copied.
    #[error("a coded operation does not copy its inputs")]
    Copied,
    /// The program would need more staging slots or steps than can be counted.
    #[error("too many ranks for one program: it needs more than {0} staging slots or steps")]
    TooLarge(usize),
    /// An algorithm asked for an operand that it had not prepared: a bug.
    #[error("inconsistent algorithm")]
    Inconsistent,
}

impl Plan {
    /// A plan, if `order` names every participant of the group once.
    pub fn new(group: Group, order: Vec<Participant>) -> Result<Self, PlanError> {
        let error = || PlanError::Order { participants: group.participants(), entries: order.len() };
        let mut seen = vec![false; group.participants() as usize];
        if order.len() != seen.len() {
            return Err(error());
        }
        for participant in &order {
            let seen = seen.get_mut(participant.0 as usize).ok_or_else(error)?;
            if core::mem::replace(seen, true) {
                return Err(error());
            }
        }
        Ok(Self { group, order, racks: Vec::new() })
    }

    /// The same plan for participants that stand in racks: so many of the order in each, one after another. None: racks are not known.
    ///
    /// # Errors
    /// If the racks do not have all participants, or one has none.
    pub fn with_racks(self, racks: Vec<u32>) -> Result<Self, PlanError> {
        let participants = self.participants();
        let sum = racks.iter().fold(0_u32, |sum, hosts| sum.saturating_add(*hosts));
        if !racks.is_empty() && (sum != participants || racks.contains(&0)) {
            return Err(PlanError::Racks { participants, racks });
        }
        Ok(Self { racks, ..self })
    }

    /// The plan that visits participants by number.
    pub fn in_sequence(group: Group) -> Self {
        let order = (0..group.participants()).map(Participant).collect();
        Self { group, order, racks: Vec::new() }
    }

    /// Who drives which ranks.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Participants in the order of rings and chains.
    pub fn order(&self) -> &[Participant] {
        &self.order
    }

    /// How many of the order stand in each rack, one after another; none where racks are not known.
    pub fn racks(&self) -> &[u32] {
        &self.racks
    }

    /// How many participants.
    pub fn participants(&self) -> u32 {
        self.order.len() as u32
    }

    /// Where a participant stands in the order.
    pub fn position(&self, participant: Participant) -> Option<u32> {
        self.order.iter().position(|other| *other == participant).map(|position| position as u32)
    }

    /// Where the participant that drives the root stands.
    pub(crate) fn position_of_root(&self, root: Rank) -> Result<u32, PlanError> {
        let participant = self.group.participant_of(root);
        let unknown = PlanError::Root { root, ranks: self.group.ranks() };
        participant.and_then(|participant| self.position(participant)).ok_or(unknown)
    }

    /// Who stands `distance` places after `position`, counted round the ring.
    pub(crate) fn at(&self, position: u32, distance: u32) -> Result<Participant, PlanError> {
        let index = (u64::from(position) + u64::from(distance)) % u64::from(self.participants().max(1));
        self.order.get(index as usize).copied().ok_or(PlanError::Inconsistent)
    }
}

impl TryFrom<Recipe> for Plan {
    type Error = PlanError;
    fn try_from(recipe: Recipe) -> Result<Self, PlanError> {
        let Recipe { group, mut order } = recipe;
        let racks = order.split_off(order.len().min(group.participants() as usize));
        Self::new(group, order)?.with_racks(racks.into_iter().map(|hosts| hosts.0).collect())
    }
}

impl From<Plan> for Recipe {
    fn from(plan: Plan) -> Self {
        let racks = plan.racks.into_iter().map(Participant);
        Self { group: plan.group, order: plan.order.into_iter().chain(racks).collect() }
    }
}

/// What one participant has to do for one segment of a request. The messages between participants depend on plan and
/// request alone, so that each may have its own [`Local`]. Every program makes progress with one landing slot per peer.
pub fn program(
    plan: &Plan,
    request: Request,
    me: Participant,
    local: &Local<'_>,
) -> Result<Program, PlanError> {
    let position = plan.position(me).ok_or(PlanError::Participant(me))?;
    match request.collective {
        Collective::AllReduce if request.coded && plan.participants() > 1 => {
            direct::program(plan, position, me, local)
        }
        Collective::AllReduce if plan.participants() > 1 => match request.algorithm {
            Algorithm::OneShot => one_two_shot::one_shot(plan, None, position, me, local),
            Algorithm::TwoShot => one_two_shot::two_shot(plan, position, me, local),
            Algorithm::RecursiveDoubling => recursive::doubling(plan, position, me, local),
            Algorithm::RecursiveHalving => recursive::halving(plan, position, me, local),
            Algorithm::Hierarchical => hierarchical::program(plan, position, me, local),
            Algorithm::Ring | Algorithm::BinomialTree => allreduce::program(plan, position, me, local),
        },
        Collective::AllReduce => allreduce::program(plan, position, me, local),
        Collective::AllToAll | Collective::Gather | Collective::Scatter => {
            pairwise::program(plan, request, position, me, local)
        }
        Collective::AllGather => allgather::program(plan, request, position, me, local),
        Collective::ReduceScatter => reducescatter::program(plan, request.algorithm, position, me, local),
        Collective::Broadcast => broadcast::program(plan, request, position, me, local),
        Collective::Reduce => reduce::program(plan, request, position, me, local),
        Collective::Barrier if request.algorithm == Algorithm::OneShot => {
            one_two_shot::barrier(plan, position)
        }
        Collective::Barrier => barrier::program(plan, position),
    }
}

/// The peers that a program talks to, each list in ascending order and without repetition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Edges {
    /// Peers it sends to.
    pub to: Vec<Participant>,
    /// Peers it receives from.
    pub from: Vec<Participant>,
}

/// Whom a program sends to and receives from.
pub fn edges(program: &Program) -> Edges {
    let mut edges = Edges::default();
    for step in &program.steps {
        for (operands, peers) in [(&step.sources, &mut edges.from), (&step.destinations, &mut edges.to)] {
            peers.extend(operands.iter().filter_map(|operand| match operand.buffer {
                Buffer::Peer(peer) => Some(peer),
                _ => None,
            }));
        }
    }
    for peers in [&mut edges.to, &mut edges.from] {
        peers.sort_unstable();
        peers.dedup();
    }
    edges
}

/// Class of a request's algorithm among so many participants, as in a completion's receipt ([`harmonaize_abi::Completion::algorithm`]).
/// The classes: 1 within one host, 2 ring, 3 pairwise, 4 chain, 5 dissemination, 6 direct and coded, 7 direct in one shot, 8 direct in two, 10 recursive doubling, 11
/// recursive halving, 12 binomial tree, 13 hierarchical.
pub fn algorithm_code(participants: u32, request: Request) -> u8 {
    let coded = request.codes();
    match (request.collective.traits().pattern, request.algorithm) {
        _ if participants == 1 => 1,
        (Pattern::Pairwise, _) => 3,
        _ if coded => 6,
        (_, Algorithm::OneShot) => 7,
        (Pattern::ReduceDistribute, Algorithm::TwoShot) => 8,
        (Pattern::ReduceDistribute, Algorithm::RecursiveDoubling) => 10,
        (Pattern::ReduceDistribute, Algorithm::RecursiveHalving) => 11,
        (Pattern::ReduceDistribute, Algorithm::Hierarchical) => 13,
        (Pattern::Chain, Algorithm::BinomialTree) => 12,
        (Pattern::ReduceDistribute | Pattern::Gather, _) => 2,
        (Pattern::Chain, _) => 4,
        (Pattern::Dissemination, _) => 5,
    }
}
