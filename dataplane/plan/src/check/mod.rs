//! The symbolic checker: runs all participants' programs together on symbols instead of bytes. It does so for every
//! segment length at once, and refuses what would compute a wrong result, race with itself, or wait for ever.
//!
//! Where ranks' counts differ it proves the same: all operands of a step, and both ends of a message, name the same count, so that
//! they have one length whatever it is, zero included. Every message is sent, however short.
//!
//! One run proves it for all timings: each participant issues its steps in a fixed order, each step waits only for what no
//! later event takes away again, and each channel has one sender and one receiver, so every execution that goes on as long
//! as it can ends in the same state. More landing slots only let a step be issued earlier, and a sequence of checked
//! programs is as free of deadlock as each of them, because each leaves every channel empty.
//!
//! [`check`] runs all participants, which takes the square of their number. [`check_own`] looks at one participant alone, in the
//! time that its own program takes, and if every participant passes it then [`check`] passes too:
//!
//! - **What arrives.** `agreed` says of each link which messages go over it and what each holds: an input, or a sum of known contributions that
//!   has a name. It knows no program, only plan and request, so both ends of a link read the same there. In the run of one participant a message
//!   brings just that: a named sum stands for itself, and is known to be of these contributions, in this place, complete or not, encoded so
//!   often. What the participant sends must be what is agreed on: the first sum that it sends under a name of its own gives that name its meaning if it
//!   is such a sum, and any other under that name must be the same symbol; what it passes on must be the symbol that it got.
//! - **Values.** Take all participants' runs together, in an order in which each message is sent before it is received. Each name is given its
//!   meaning by one participant, in a step before any that receives it. Putting meanings for names keeps equal symbols equal, and who is in a sum, where it
//!   belongs, whether it is complete and how often it was encoded are alike for a name and its meaning; the checks ask nothing else of symbols. So
//!   each step that passes alone passes with the real messages, which are those agreed on. Memory, slots and the order of steps are each
//!   participant's own.
//! - **Results.** That all ranks of an AllReduce end with the same bits is asked of each of them as equality with one name, or with one expression of named
//!   contributions, which is the same for all, a sum of all at once or of pairs of pairs; a message of such pairs is their expression, too; of a coded AllGather, with what the owner encodes.
//! - **Waiting.** A step can be issued once the one before it is, its messages have been sent, and of each link that it sends over the message before
//!   was received (one landing slot is the hardest). `agreed` gives each message a time at which it is sent, a later one at which it is
//!   received, before that at which the next over its link is sent; both ends check that. A step happens at one time, which is that of all messages that it sends
//!   and receives, and none before the step before it. So whatever a step waits for, but the step before it, is earlier: nobody waits for himself.
//! - **Nothing is left over.** Each end of a link sends or receives all that is agreed on, and no more.
//!
//! It may refuse what [`check`] would pass, say another order of messages that would do as well; no algorithm here needs it to.

mod agreed;
mod grid;
mod machine;
mod memory;
mod run;
mod shape;
mod single;
mod values;

use crate::plan::{Local, Plan, Request};
use crate::program::{Part, Participant, Program, Slot};
use harmonaize_abi::Rank;

/// What the programs cost.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// By participant.
    pub usage: Vec<Usage>,
    /// Messages of all participants together.
    pub messages: u64,
    /// Most times that any part of a result was encoded by a codec on its way.
    pub encodings: u32,
}

/// What one participant needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Usage {
    /// All staging slots together, in segments of one block. Multiply with a segment's elements for its elements (up to
    /// one more per slot, for the rounding).
    pub staging: f64,
    /// Messages sent.
    pub sent: u64,
    /// Messages received.
    pub received: u64,
}

/// Why programs must not run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CheckError {
    /// Not one program and one set of local facts per participant.
    #[error("{programs} programs and {locals} locals for {participants} participants")]
    Participants {
        /// Participants of the plan.
        participants: u32,
        /// Programs given.
        programs: usize,
        /// Locals given.
        locals: usize,
    },
    /// The root is not a rank of the group.
    #[error("root {0} is not a rank of the group")]
    Root(Rank),
    /// Parts divide the tensors more finely than the checker is willing to follow.
    #[error("too many ranks, or parts too fine, to check")]
    TooFine,
    /// A step is wrong.
    #[error("participant {}, step {step}: {fault}", .participant.0)]
    Step {
        /// Whose.
        participant: Participant,
        /// Which.
        step: u32,
        /// What is wrong.
        fault: Fault,
    },
    /// Nobody can go on.
    #[error("deadlock: participant {} waits at step {step} for {wait}", .participant.0)]
    Deadlock {
        /// One of those who wait.
        participant: Participant,
        /// The step that it cannot issue.
        step: u32,
        /// For what.
        wait: Wait,
    },
    /// A message that nobody receives.
    #[error("{count} messages from participant {} to {} are never received", .from.0, .to.0)]
    Unreceived {
        /// Sender.
        from: Participant,
        /// Receiver.
        to: Participant,
        /// How many.
        count: usize,
    },
    /// A message that somebody waits for in vain.
    #[error("{count} messages from participant {} to {} are never sent", .from.0, .to.0)]
    Unsent {
        /// Sender.
        from: Participant,
        /// Receiver.
        to: Participant,
        /// How many.
        count: usize,
    },
    /// The plan has no such participant.
    #[error("there is no participant {}", .0.0)]
    Participant(Participant),
    /// An output does not hold its result in the end.
    #[error("rank {rank}'s output block {block} holds {found}")]
    Output {
        /// Whose output.
        rank: Rank,
        /// Which block.
        block: u32,
        /// What is wrong with it.
        found: Found,
    },
}

/// What a step that cannot be issued waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Wait {
    /// A message.
    #[error("a message from participant {}", .0.0)]
    Message(Participant),
    /// A free landing slot.
    #[error("credit from participant {}", .0.0)]
    Credit(Participant),
}

/// What an output holds instead of its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Found {
    /// It was not written everywhere.
    #[error("nothing in some places")]
    Nothing,
    /// Another block or rank's data, or an incomplete reduction.
    #[error("something else than its result")]
    Other,
    /// The inputs are all there, but no step marked the reduction as complete.
    #[error("a reduction that was not completed")]
    Unfinished,
    /// Reduced or encoded another way than another rank's, so that the bits may differ.
    #[error("a result that was computed differently from another rank's")]
    Different,
}

/// What is wrong with a step.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// A kind of step with sources that it cannot have.
    #[error("wrong number or kind of sources")]
    Sources,
    /// A kind of step with destinations that it cannot have.
    #[error("wrong number or kind of destinations")]
    Destinations,
    /// The same destination, or the same peer, twice.
    #[error("the same operand twice")]
    Repeated,
    /// Operands of different lengths, or a range that does not exist.
    #[error("operands do not have the same length, or {0:?} is no range")]
    Part(Part),
    /// No such local rank, peer or slot, or the participant itself as peer.
    #[error("an operand's place does not exist")]
    Buffer,
    /// A mapped rank's tensor where only a remote one can be, or the other way round.
    #[error("rank {0}'s memory cannot be reached by this kind of step")]
    Access(Rank),
    /// A reduction in a collective that has none.
    #[error("this collective does not reduce")]
    Reduce,
    /// An input that is to be multiplied, and is sent from where it lies.
    #[error("sends an input that is to be multiplied before")]
    Unscaled,
    /// A form that this kind of step cannot read or write, or coded elements where nothing is coded.
    #[error("elements in a form in which they cannot be here")]
    Encoding,
    /// A contribution that was reduced or encoded before, or a result that is not complete.
    #[error("encodes what is not what its stage says")]
    Stage,
    /// Waits for a step that is not before it.
    #[error("waits for step {0}, which is not before it")]
    After(u32),
    /// A committed step before another, or one that talks to a peer.
    #[error("committed steps stand last and talk to nobody")]
    Committed,
    /// Copying steps where none are due, or one that talks to a peer.
    #[error("copying steps are for CopyInputs among several, stand first and talk to nobody")]
    Copying,
    /// The part can be larger than the slot.
    #[error("{0:?} may be too small for its content")]
    SlotSize(Slot),
    /// Reads memory that nothing wrote, or that holds another part.
    #[error("reads what is not there")]
    Undefined,
    /// Reads an input that an output in place has overwritten.
    #[error("reads rank {0}'s input after it was overwritten")]
    Overwritten(Rank),
    /// Overwrites an input that another attempt might need.
    #[error("overwrites rank {0}'s input before the segment was acknowledged")]
    Uncommitted(Rank),
    /// Reads an input that the tenant may have changed since, or overwrites its copy.
    #[error("uses an input, or overwrites its copy, after the copying steps")]
    Copied,
    /// Touches memory that an unfinished step uses.
    #[error("touches memory of step {0} without waiting for it")]
    Unordered(u32),
    /// The message that arrives is not the one expected.
    #[error("expects another message than participant {} sends", .0.0)]
    Message(Participant),
    /// Sends something else than was agreed on, or more.
    #[error("sends participant {} what was not agreed on", .0.0)]
    Unagreed(Participant),
    /// Sends or receives in another order than was agreed on, in which somebody might wait for himself.
    #[error("sends to participant {} or receives from it in another order than was agreed on", .0.0)]
    Untimely(Participant),
    /// Adds elements of different positions.
    #[error("reduces elements that do not belong together")]
    Mixed,
    /// Adds a rank's contribution twice.
    #[error("counts rank {0} twice")]
    Twice(Rank),
    /// Adds to a completed reduction.
    #[error("reduces a result that was already completed")]
    AfterLast,
    /// Completes a reduction that lacks contributions.
    #[error("completes a reduction that lacks rank {0}")]
    Incomplete(Rank),
}

/// Most symbols that all ranks' tensors may have together.
const MAX_CELLS: u64 = 1 << 26;

/// Checks the programs of all participants, in their order by number. Each channel from each peer has `landing_slots`
/// landing slots (1 is the hardest). `locals` are what each program was made for.
pub fn check(
    plan: &Plan,
    request: Request,
    programs: &[Program],
    landing_slots: u32,
    locals: &[Local<'_>],
) -> Result<Report, CheckError> {
    let participants = plan.participants();
    if programs.len() != participants as usize || locals.len() != participants as usize {
        return Err(CheckError::Participants {
            participants,
            programs: programs.len(),
            locals: locals.len(),
        });
    }
    rooted(plan, request)?;
    let grid = grid(plan, request, (programs, 1), plan.group().ranks())?;
    for (me, (program, local)) in (0..participants).map(Participant).zip(programs.iter().zip(locals)) {
        shape::check(plan, request, me, program, local)?;
    }
    run::Run::new(plan, request, programs, locals, landing_slots, grid).finish()
}

/// Checks the program of one participant alone, against what is agreed on between participants by plan and request. Where each participant's
/// program passes this, all pass [`check`] together (the module says why), whatever their own locals are: so each may check its own,
/// if nobody runs any before all have.
///
/// Takes time and memory in proportion to the program, the participants, and the ranks' outputs.
///
/// # Errors
/// What is wrong with the program; [`CheckError::Deadlock`] without landing slots, [`CheckError::Unsent`] and
/// [`CheckError::Unreceived`] where messages are left over at this end.
pub fn check_own(
    plan: &Plan,
    request: Request,
    me: Participant,
    program: &Program,
    landing_slots: u32,
    local: &Local<'_>,
) -> Result<Usage, CheckError> {
    rooted(plan, request)?;
    let parts = agreed::Protocol::parts(plan, request);
    let programs = (core::slice::from_ref(program), parts);
    let grid = grid(plan, request, programs, plan.group().local(me).len() as u32)?;
    shape::check(plan, request, me, program, local)?;
    let alone = single::SingleCheck::new(plan, request, me, program, local, grid)?;
    if let Some(peer) = alone.sends_to().filter(|_| landing_slots == 0) {
        return Err(CheckError::Deadlock { participant: me, step: 0, wait: Wait::Credit(peer) });
    }
    alone.finish()
}

/// Whether there is a root where there must be one.
fn rooted(plan: &Plan, request: Request) -> Result<(), CheckError> {
    let needed = request.collective.is_rooted();
    if needed && plan.group().participant_of(request.root).is_none() {
        return Err(CheckError::Root(request.root));
    }
    Ok(())
}

/// The grid of programs whose participants drive so many ranks, and of so many parts.
fn grid(
    plan: &Plan,
    request: Request,
    (programs, parts): (&[Program], u32),
    ranks: u32,
) -> Result<grid::Grid, CheckError> {
    let grid = grid::Grid::new(programs, parts).ok_or(CheckError::TooFine)?;
    let blocks = request.collective.max_blocks(plan.group().ranks());
    let tensor = u64::from(blocks) * u64::from(grid.atoms());
    if tensor.saturating_mul(u64::from(ranks)) > MAX_CELLS {
        return Err(CheckError::TooFine);
    }
    Ok(grid)
}
