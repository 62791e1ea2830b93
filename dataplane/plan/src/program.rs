//! What a program is: steps in issue order, operands, ranges, dependencies.
//!
//! How a program runs. Each channel of a communicator runs the program of one segment after another. Steps are *issued*
//! in the order in which they stand: the next step waits until the steps in its `after` have completed, until a message
//! has arrived for each of its peer sources and until there is credit for each of its peer destinations. Issue order thus
//! fixes which message is which: on a channel, the k-th send from `p` to `q` is the k-th receive at `q` from `p`. Copying
//! and reducing complete at once; fetching, storing and sending complete later. A landing slot is free again when the step
//! that consumed its message has completed.
//!
//! All operands of a step have the same `index` and `of`; a step may read and write the same range (each element is read
//! before it is written). In place, writing a rank's own input to the same range of its output changes nothing.

use harmonaize_abi::Rank;
use serde::{Deserialize, Serialize};

/// Who executes a program: an agent with all its local ranks, counted from 0 within the communicator's group. The number
/// stays the same for the communicator's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Participant(pub u32);

/// Which ranks each participant drives. Every rank of `0..ranks` stands exactly once; every participant has at least one.
/// Participants keep their numbers; the order that rings and chains follow is the [`crate::Plan`]'s.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<Vec<Rank>>", into = "Vec<Vec<Rank>>")]
pub struct Group {
    members: Vec<Vec<Rank>>,
}

/// How the local ranks' memories are reached by their agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Access {
    /// Inputs and outputs can be operands of any step.
    Mapped,
    /// Inputs and outputs are operands of [`StepKind::Fetch`] and [`StepKind::Store`] only.
    Remote,
}

/// What keeps a segment's inputs alive until every participant has acknowledged it. So the segment can be run again in
/// another form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Retention {
    /// Output differs from input: nothing to do, but the operation completes only after the last acknowledgement.
    KeepInputs,
    /// In place: results wait in staging, and `committed` steps write them out after the acknowledgement.
    HoldOutputs,
    /// The first steps ([`Program::copying`]) copy (or reduce) the inputs into staging. It is kept until the
    /// acknowledgement, and the operation completes at once. The rule for small operations.
    CopyInputs,
}

/// A staging buffer of the channel, counted from 0. Its size stands in [`Program::slots`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Slot(pub u16);

/// Where an operand lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Buffer {
    /// A local rank's input tensor.
    Input(Rank),
    /// A local rank's output tensor.
    Output(Rank),
    /// A staging buffer. It holds one part of as many as its divisor says, from its start on; an operand may be a part of that part.
    Staging(Slot),
    /// The other end of a channel to a peer: a message that arrived (source) or that is sent (destination).
    /// At most one source and one destination of a step is the same peer.
    Peer(Participant),
}

/// A range of a tensor block's current segment. A tensor is 1 block or one per rank
/// ([`harmonaize_abi::Collective::blocks`]): block `b` of an input is what goes to rank `b`, block `b` of an output what
/// comes from rank `b`. A segment covers the same element range `lo..hi` of every block, as far as the block goes; part `index` of `of` covers elements
/// `lo + (hi-lo)*index/of .. lo + (hi-lo)*(index+1)/of` of the block.
///
/// Blocks may have different counts of elements ([`harmonaize_abi::Collective::counts`]). A program does not depend on them: each of
/// its operands names the count that its length follows from, and those of a step all name the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Part {
    /// Block of the tensor; of a staging buffer or a message, which of the counts its length follows from.
    pub block: u32,
    /// Which part of the segment.
    pub index: u32,
    /// Of how many.
    pub of: u32,
}

/// How an operand's elements are represented.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Encoding {
    /// As the tensor's element type.
    Exact,
    /// As a chunk of the epoch's codec, in as many bytes as it takes. They are at most those of the exact elements and
    /// [`CODED_ROOM`].
    Coded(Stage),
}

/// What a chunk holds. A step encodes from memory into one staging slot, from which it may be sent; it decodes into memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Stage {
    /// What one participant adds: decoded by the [`StepKind::Reduce`] that adds it to an exact sum in staging.
    Contribution,
    /// The complete sum, encoded once: decoded by a [`StepKind::Move`].
    Result,
    /// Elements of an input that are only moved, encoded once: decoded by a [`StepKind::Move`].
    Moved,
}

/// Bytes by which a chunk may be longer than its exact elements: its header, and padding.
pub const CODED_ROOM: u32 = 128;

/// One source or destination of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Operand {
    /// Where.
    pub buffer: Buffer,
    /// Which elements.
    pub part: Part,
    /// In which form.
    pub encoding: Encoding,
}

/// What a step does with its sources. Its result goes to every destination; a peer destination is sent from the first
/// memory destination of the step or, where there is none, straight from its only source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum StepKind {
    /// One source, copied to every destination. No source and no destination but peers: an empty message; no destination
    /// but a peer source: wait for a message.
    Move,
    /// Reduces one to [`MAX_SOURCES`] sources element by element, in their order. The result goes into at least one
    /// memory destination. `last` marks the step that completes the reduction of its range: an Average is divided there,
    /// by the number of ranks.
    Reduce {
        /// Whether the result is final.
        last: bool,
    },
    /// From a remote rank's input to staging; completes later.
    Fetch,
    /// From staging to a remote rank's output; completes later.
    Store,
}

/// One step.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Step {
    /// What it does.
    pub kind: StepKind,
    /// Operands read.
    pub sources: Vec<Operand>,
    /// Operands written.
    pub destinations: Vec<Operand>,
    /// Earlier steps (by index) that must have completed, not only been issued, before this one is issued.
    pub after: Vec<u32>,
    /// Whether it waits until every participant has acknowledged the segment. Committed steps stand last.
    pub committed: bool,
}

/// A participant's part in one segment of a collective.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Program {
    /// Steps in issue order.
    pub steps: Vec<Step>,
    /// Staging slots. Slot `i` holds a part of `slots[i]`, at most `ceil(segment elements of a block / slots[i])` elements, exact or coded.
    /// What is coded is such a part whole.
    pub slots: Vec<u32>,
    /// How many of the first steps secure the inputs under [`Retention::CopyInputs`], else 0. They talk to no peer; later
    /// steps read no input and overwrite none of the copies that they read. A segment that is run again under a plan of
    /// the same group skips these steps: the copies lie in the same slots whatever the order of participants.
    pub copying: u32,
}

/// Most peers that one step receives from or sends to.
pub const MAX_STEP_PEERS: usize = 4;

/// Most sources of a [`StepKind::Reduce`].
pub const MAX_SOURCES: usize = 8;

impl Group {
    /// A group from the ranks of each participant. `None` if a rank is missing, out of range or there twice, or a
    /// participant has none.
    pub fn new(members: Vec<Vec<Rank>>) -> Option<Self> {
        let ranks: usize = members.iter().map(Vec::len).sum();
        let mut seen = vec![false; ranks];
        for member in &members {
            if member.is_empty() {
                return None;
            }
            for rank in member {
                let seen = seen.get_mut(usize::try_from(rank.0).ok()?)?;
                if core::mem::replace(seen, true) {
                    return None;
                }
            }
        }
        (ranks > 0).then_some(Self { members })
    }

    /// How many participants.
    pub fn participants(&self) -> u32 {
        self.members.len() as u32
    }

    /// How many ranks.
    pub fn ranks(&self) -> u32 {
        self.members.iter().map(|member| member.len() as u32).sum()
    }

    /// The ranks that a participant drives; empty if there is no such participant.
    pub fn local(&self, participant: Participant) -> &[Rank] {
        self.members.get(participant.0 as usize).map_or(&[], Vec::as_slice)
    }

    /// Who drives a rank.
    pub fn participant_of(&self, rank: Rank) -> Option<Participant> {
        let index = self.members.iter().position(|member| member.contains(&rank))?;
        Some(Participant(index as u32))
    }
}

impl TryFrom<Vec<Vec<Rank>>> for Group {
    type Error = &'static str;
    fn try_from(members: Vec<Vec<Rank>>) -> Result<Self, Self::Error> {
        Self::new(members).ok_or("a rank is missing, out of range or there twice, or a participant has none")
    }
}

impl From<Group> for Vec<Vec<Rank>> {
    fn from(group: Group) -> Self {
        group.members
    }
}

impl Program {
    /// Elements of staging that a segment of `elements` elements (of a block) needs.
    pub fn staging_elements(&self, elements: u64) -> u64 {
        self.slots
            .iter()
            .map(|slot| elements.div_ceil(u64::from((*slot).max(1))))
            .fold(0, u64::saturating_add)
    }
}

impl Part {
    /// All of a block's segment.
    pub const fn whole(block: u32) -> Self {
        Self { block, index: 0, of: 1 }
    }

    /// The part that a slot of this divisor holds where this is in it. There is none where it would lie
    /// across two.
    pub const fn enclosing(self, divisor: u32) -> Option<Self> {
        match (divisor, self.of) {
            (0, _) | (_, 0) => None,
            (divisor, of) if of % divisor != 0 => None,
            (divisor, of) => {
                Some(Self { block: self.block, index: self.index / (of / divisor), of: divisor })
            }
        }
    }

    /// Elements before it in a slot of this divisor, of a block of which the segment covers `lo..hi`.
    pub const fn offset_in_slot(self, divisor: u32, lo: u64, hi: u64) -> u64 {
        match self.enclosing(divisor) {
            Some(slot) => self.elements(lo, hi).0.saturating_sub(slot.elements(lo, hi).0),
            None => 0,
        }
    }

    /// Start and length in elements within a block of which the segment covers `lo..hi`.
    pub const fn elements(self, lo: u64, hi: u64) -> (u64, u64) {
        let of = if self.of == 0 { 1 } else { self.of as u128 };
        let (span, index) = (hi.saturating_sub(lo) as u128, self.index as u128);
        let start = (span * index / of) as u64;
        let end = (span * (index + 1) / of) as u64;
        (lo + start, end - start)
    }
}

impl Operand {
    /// An operand in the tensor's own element type.
    pub const fn exact(buffer: Buffer, part: Part) -> Self {
        Self { buffer, part, encoding: Encoding::Exact }
    }
}
