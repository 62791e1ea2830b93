//! Which payloads to come may land where they belong at once, and not in their slots.

use super::Scheduler;
use crate::action::Action;
use crate::channel::{Channel, Segment};
use crate::epoch::peers;
use crate::shared::Shared;
use harmonaize_abi::{ChannelId, Sequence, StepId};
use harmonaize_plan::{Buffer, Encoding, Operand, Participant, Step, StepKind};

/// How many steps ahead of the next to be issued are looked at.
const LOOKAHEAD: usize = 16;

/// Whether to post for a step.
enum PostDecision {
    Post(Participant, Sequence),
    /// Nothing to post, for good.
    Never,
    /// Perhaps once earlier steps have completed.
    Later,
}

impl Scheduler {
    /// The next payload on a channel that may be posted for. Cost: a look at each of the [`LOOKAHEAD`] steps and their
    /// predecessors that have not completed, and no allocation.
    pub(super) fn poll_post(&mut self, shared: &Shared, index: ChannelId) -> Option<Action> {
        let channel = self.channels.get_mut(usize::from(index.0))?;
        loop {
            let (at, segment, step) = channel.postable(LOOKAHEAD)?;
            let decision = decide(shared, index, channel, at, segment, step);
            if matches!(decision, PostDecision::Later) {
                return None;
            }
            channel.skip_posts_to(at);
            if let PostDecision::Post(peer, sequence) = decision {
                return Some(Action::Post { channel: index, step: StepId(at as u32), peer, sequence });
            }
        }
    }
}

/// Whether a message that a step copies to memory may lie there from its arrival on. It may if no earlier step has
/// still to read or write that memory.
fn decide(
    shared: &Shared,
    index: ChannelId,
    channel: &Channel,
    at: usize,
    segment: &Segment,
    step: &Step,
) -> PostDecision {
    let destination = step.destinations.iter().find(|operand| !matches!(operand.buffer, Buffer::Peer(_)));
    let (Some((peer, _)), Some(destination)) = (peers(&step.sources).next(), destination) else {
        return PostDecision::Never;
    };
    let coded = step.sources.iter().any(|operand| operand.encoding != Encoding::Exact);
    let empty = segment.elements(destination).1 == 0;
    if step.kind != StepKind::Move || coded || step.committed || empty || segment.resume.is_some() {
        return PostDecision::Never;
    }
    let Some(operation) = shared.operations.get(segment.operation) else { return PostDecision::Never };
    let mut ahead = 0;
    for (earlier, issued) in channel.incomplete_before(at) {
        let mut operands = earlier.sources.iter().chain(&earlier.destinations);
        if operands.any(|operand| overlap(segment, operand, destination, operation.in_place)) {
            return PostDecision::Later;
        }
        let from_peer = |(from, _): &(Participant, &Operand)| !issued && *from == peer;
        ahead += peers(&earlier.sources).filter(from_peer).count() as u32;
    }
    match shared.epochs.stream(segment.epoch, peer, index) {
        Some(stream) if stream.has_arrived(ahead) => PostDecision::Never,
        Some(stream) => {
            stream.expect(ahead).map_or(PostDecision::Later, |sequence| PostDecision::Post(peer, sequence))
        }
        None => PostDecision::Never,
    }
}

/// Whether two operands of one channel's segment may share memory. In place, a rank's output is its input.
fn overlap(segment: &Segment, one: &Operand, other: &Operand, in_place: bool) -> bool {
    let tensor = |operand: &Operand| match operand.buffer {
        Buffer::Input(rank) => Some((rank, !in_place)),
        Buffer::Output(rank) => Some((rank, false)),
        Buffer::Staging(_) | Buffer::Peer(_) => None,
    };
    match (one.buffer, other.buffer) {
        (Buffer::Staging(one), Buffer::Staging(other)) => one == other,
        _ => {
            let ((start, length), (from, count)) = (segment.elements(one), segment.elements(other));
            tensor(one).is_some()
                && tensor(one) == tensor(other)
                && one.part.block == other.part.block
                && start < from + count
                && from < start + length
        }
    }
}
