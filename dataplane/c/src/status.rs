//! Statuses: what every function answers.

use std::ffi::{CStr, c_char};

/// What a function answers: `HARMONAIZE_OK`, `HARMONAIZE_IN_PROGRESS`, or an error. Codes are stable.
pub type harmonaize_status_t = i32;

/// Done.
pub const HARMONAIZE_OK: harmonaize_status_t = 0;
/// `harmonaize_test`, `harmonaize_seal`, `harmonaize_begin_seal`: what was begun before is in flight. No error.
pub const HARMONAIZE_IN_PROGRESS: harmonaize_status_t = 1;
/// NULL where something is needed, or a value that means nothing.
pub const HARMONAIZE_ERROR_INVALID_ARGUMENT: harmonaize_status_t = 2;
/// A bug of this library. The message of the panic is on standard error.
pub const HARMONAIZE_ERROR_BUG: harmonaize_status_t = 3;
/// An error for which this library has no status; its text says what.
pub const HARMONAIZE_ERROR_OTHER: harmonaize_status_t = 4;
/// Nobody answers where the agent should be.
pub const HARMONAIZE_ERROR_CONNECT: harmonaize_status_t = 5;
/// The agent refused the attachment.
pub const HARMONAIZE_ERROR_REFUSED: harmonaize_status_t = 6;
/// This library was built without RDMA.
pub const HARMONAIZE_ERROR_NO_RDMA: harmonaize_status_t = 7;
/// The agent broke the protocol, or is of another version.
pub const HARMONAIZE_ERROR_PROTOCOL: harmonaize_status_t = 8;
/// The agent died or closed the attachment. Attach again and join again.
pub const HARMONAIZE_ERROR_AGENT_LOST: harmonaize_status_t = 9;
/// The provider has ended the attachment.
pub const HARMONAIZE_ERROR_DETACHED: harmonaize_status_t = 10;
/// This process was forked from the one that attached. Attach in this one.
pub const HARMONAIZE_ERROR_FORKED: harmonaize_status_t = 11;
/// The kernel refused something.
pub const HARMONAIZE_ERROR_SYSTEM: harmonaize_status_t = 12;
/// Memory that cannot be had or reached.
pub const HARMONAIZE_ERROR_MEMORY: harmonaize_status_t = 13;
/// The arena has no room.
pub const HARMONAIZE_ERROR_NO_ROOM: harmonaize_status_t = 14;
/// Memory was not added to the attachment, or not let go.
pub const HARMONAIZE_ERROR_REGION: harmonaize_status_t = 15;
/// A tensor of another element type than is needed.
pub const HARMONAIZE_ERROR_DTYPE: harmonaize_status_t = 16;
/// Elements of this type are not so reduced.
pub const HARMONAIZE_ERROR_REDUCTION: harmonaize_status_t = 17;
/// Tensors, counts or ranks that do not fit the operation.
pub const HARMONAIZE_ERROR_SHAPE: harmonaize_status_t = 18;
/// Handles of several attachments in one call.
pub const HARMONAIZE_ERROR_FOREIGN: harmonaize_status_t = 19;
/// An operation in flight uses it, or another thread waits for it.
pub const HARMONAIZE_ERROR_IN_USE: harmonaize_status_t = 20;
/// As many operations as the rings hold are in flight or not yet waited for.
pub const HARMONAIZE_ERROR_TOO_MANY: harmonaize_status_t = 21;
/// Joining failed: `reason` of the error says why, `ranks` who is concerned.
pub const HARMONAIZE_ERROR_JOIN: harmonaize_status_t = 22;
/// A communicator does not go on with other ranks: `reason` and `ranks` as of a join.
pub const HARMONAIZE_ERROR_REGROUP: harmonaize_status_t = 23;
/// A communicator does not split: `reason` and `ranks` as of a join.
pub const HARMONAIZE_ERROR_SPLIT: harmonaize_status_t = 24;
/// A budget was not taken.
pub const HARMONAIZE_ERROR_BUDGET: harmonaize_status_t = 25;
/// Events cannot be read.
pub const HARMONAIZE_ERROR_EVENTS: harmonaize_status_t = 26;
/// Nothing came of a proposal or a question: no such communicator, or the provider cannot be asked now.
pub const HARMONAIZE_ERROR_AGREEMENT: harmonaize_status_t = 27;
/// A proposal was refused, and what could be had instead is not known. What was agreed on before still is.
pub const HARMONAIZE_ERROR_NOT_AGREED: harmonaize_status_t = 28;
/// A proposal was refused, and there is a counter-offer. What was agreed on before still is.
pub const HARMONAIZE_ERROR_COUNTER_OFFER: harmonaize_status_t = 29;
/// The tenant has asked the provider too much lately: `retry_after_ns` of the error says when it may again.
pub const HARMONAIZE_ERROR_TOO_OFTEN: harmonaize_status_t = 30;
/// Waiting took too long. What was waited for is still in flight and can be waited for again.
pub const HARMONAIZE_ERROR_WAIT_TIMEOUT: harmonaize_status_t = 31;
/// The operation's group has not ended, so it was not called.
pub const HARMONAIZE_ERROR_GROUP_OPEN: harmonaize_status_t = 32;
/// The group of this call has ended.
pub const HARMONAIZE_ERROR_GROUP_ENDED: harmonaize_status_t = 33;
/// The environment does not say what was looked for there: the agent's socket, or this process's rank.
pub const HARMONAIZE_ERROR_ENVIRONMENT: harmonaize_status_t = 34;
/// State is not protected: the ranks are in fewer failure domains than replicas need.
pub const HARMONAIZE_ERROR_TOO_FEW_DOMAINS: harmonaize_status_t = 35;
/// Nothing to restore or to write: no step was sealed by all ranks.
pub const HARMONAIZE_ERROR_NOTHING_SEALED: harmonaize_status_t = 36;
/// Nobody that is left has the states of these `ranks`, as they were when they were protected.
pub const HARMONAIZE_ERROR_TOO_MANY_LOST: harmonaize_status_t = 37;
/// Ranks protect, seal or restore with values that differ, or steps do not ascend.
pub const HARMONAIZE_ERROR_DIFFER: harmonaize_status_t = 38;
/// Others cannot go on: `ranks`, which have errors of their own.
pub const HARMONAIZE_ERROR_PEERS: harmonaize_status_t = 39;
/// A state that another rank sent cannot be read.
pub const HARMONAIZE_ERROR_DAMAGED: harmonaize_status_t = 40;
/// A file was not written.
pub const HARMONAIZE_ERROR_FILE: harmonaize_status_t = 41;
/// The agent does not speak this version of descriptors. This and all that follow are 64 more than the agent's status.
pub const HARMONAIZE_ERROR_BAD_VERSION: harmonaize_status_t = 65;
/// The agent knows no such collective, element type, reduction or flag.
pub const HARMONAIZE_ERROR_BAD_KIND: harmonaize_status_t = 66;
/// No such communicator on this attachment.
pub const HARMONAIZE_ERROR_BAD_COMMUNICATOR: harmonaize_status_t = 67;
/// A rank outside the communicator.
pub const HARMONAIZE_ERROR_BAD_RANK: harmonaize_status_t = 68;
/// A range outside a tensor or the arena.
pub const HARMONAIZE_ERROR_OUT_OF_RANGE: harmonaize_status_t = 69;
/// Input and output overlap without being the same.
pub const HARMONAIZE_ERROR_OVERLAP: harmonaize_status_t = 70;
/// Too many operations in flight at the agent.
pub const HARMONAIZE_ERROR_BUSY: harmonaize_status_t = 71;
/// Ranks called different operations; the text says who called what. The communicator has ended.
pub const HARMONAIZE_ERROR_MISMATCH: harmonaize_status_t = 72;
/// Some ranks did not call in time: `ranks`. The communicator has ended.
pub const HARMONAIZE_ERROR_TIMEOUT: harmonaize_status_t = 73;
/// A rank's process or host was lost: `ranks`. The communicator has ended.
pub const HARMONAIZE_ERROR_RANK_LOST: harmonaize_status_t = 74;
/// The communicator was destroyed with the operation in flight.
pub const HARMONAIZE_ERROR_DESTROYED: harmonaize_status_t = 75;
/// The provider ended the communicator.
pub const HARMONAIZE_ERROR_DISSOLVED: harmonaize_status_t = 76;
/// A bug or broken invariant in the agent; the communicator has ended.
pub const HARMONAIZE_ERROR_INTERNAL: harmonaize_status_t = 77;
/// A rank aborted the communicator: `ranks` names it.
pub const HARMONAIZE_ERROR_ABORTED: harmonaize_status_t = 78;
/// A time-out of operations that is longer than the operator allows.
pub const HARMONAIZE_ERROR_TIMEOUT_TOO_LONG: harmonaize_status_t = 79;

/// The first status of those that an agent gives.
pub(crate) const OF_AGENT: harmonaize_status_t = HARMONAIZE_ERROR_BAD_VERSION - 1;

/// A short text for each.
const TEXTS: &[(harmonaize_status_t, &CStr)] = &[
    (HARMONAIZE_OK, c"done"),
    (HARMONAIZE_IN_PROGRESS, c"in flight"),
    (HARMONAIZE_ERROR_INVALID_ARGUMENT, c"invalid argument"),
    (HARMONAIZE_ERROR_BUG, c"a bug of the library"),
    (HARMONAIZE_ERROR_OTHER, c"another error"),
    (HARMONAIZE_ERROR_CONNECT, c"cannot connect to the agent"),
    (HARMONAIZE_ERROR_REFUSED, c"the agent refused the attachment"),
    (HARMONAIZE_ERROR_NO_RDMA, c"built without RDMA"),
    (HARMONAIZE_ERROR_PROTOCOL, c"cannot talk to the agent"),
    (HARMONAIZE_ERROR_AGENT_LOST, c"the agent is lost"),
    (HARMONAIZE_ERROR_DETACHED, c"the attachment was ended"),
    (HARMONAIZE_ERROR_FORKED, c"the attachment is another process's"),
    (HARMONAIZE_ERROR_SYSTEM, c"the kernel refused"),
    (HARMONAIZE_ERROR_MEMORY, c"memory cannot be had or reached"),
    (HARMONAIZE_ERROR_NO_ROOM, c"no room in the arena"),
    (HARMONAIZE_ERROR_REGION, c"memory beside the arena"),
    (HARMONAIZE_ERROR_DTYPE, c"wrong element type"),
    (HARMONAIZE_ERROR_REDUCTION, c"no such reduction of this type"),
    (HARMONAIZE_ERROR_SHAPE, c"sizes do not fit"),
    (HARMONAIZE_ERROR_FOREIGN, c"of another attachment"),
    (HARMONAIZE_ERROR_IN_USE, c"in use"),
    (HARMONAIZE_ERROR_TOO_MANY, c"too many operations in flight"),
    (HARMONAIZE_ERROR_JOIN, c"cannot join"),
    (HARMONAIZE_ERROR_REGROUP, c"cannot regroup"),
    (HARMONAIZE_ERROR_SPLIT, c"cannot split"),
    (HARMONAIZE_ERROR_BUDGET, c"the budget was not taken"),
    (HARMONAIZE_ERROR_EVENTS, c"no events"),
    (HARMONAIZE_ERROR_AGREEMENT, c"no agreement"),
    (HARMONAIZE_ERROR_NOT_AGREED, c"not agreed on"),
    (HARMONAIZE_ERROR_COUNTER_OFFER, c"not agreed on; there is a counter-offer"),
    (HARMONAIZE_ERROR_TOO_OFTEN, c"too many questions to the provider"),
    (HARMONAIZE_ERROR_WAIT_TIMEOUT, c"still in flight"),
    (HARMONAIZE_ERROR_GROUP_OPEN, c"the group has not ended"),
    (HARMONAIZE_ERROR_GROUP_ENDED, c"the group has ended"),
    (HARMONAIZE_ERROR_ENVIRONMENT, c"not in the environment"),
    (HARMONAIZE_ERROR_TOO_FEW_DOMAINS, c"too few failure domains"),
    (HARMONAIZE_ERROR_NOTHING_SEALED, c"no step was sealed"),
    (HARMONAIZE_ERROR_TOO_MANY_LOST, c"too many ranks are lost"),
    (HARMONAIZE_ERROR_DIFFER, c"ranks do not call alike"),
    (HARMONAIZE_ERROR_PEERS, c"other ranks cannot go on"),
    (HARMONAIZE_ERROR_DAMAGED, c"a damaged state"),
    (HARMONAIZE_ERROR_FILE, c"the file was not written"),
    (HARMONAIZE_ERROR_BAD_VERSION, c"descriptor version not supported"),
    (HARMONAIZE_ERROR_BAD_KIND, c"unknown collective, element type, reduction or flag"),
    (HARMONAIZE_ERROR_BAD_COMMUNICATOR, c"no such communicator"),
    (HARMONAIZE_ERROR_BAD_RANK, c"rank outside the communicator"),
    (HARMONAIZE_ERROR_OUT_OF_RANGE, c"out of range"),
    (HARMONAIZE_ERROR_OVERLAP, c"input and output overlap"),
    (HARMONAIZE_ERROR_BUSY, c"too many operations at the agent"),
    (HARMONAIZE_ERROR_MISMATCH, c"ranks called different operations"),
    (HARMONAIZE_ERROR_TIMEOUT, c"ranks did not call in time"),
    (HARMONAIZE_ERROR_RANK_LOST, c"a rank was lost"),
    (HARMONAIZE_ERROR_DESTROYED, c"communicator destroyed"),
    (HARMONAIZE_ERROR_DISSOLVED, c"ended by the provider"),
    (HARMONAIZE_ERROR_INTERNAL, c"internal error of the agent"),
    (HARMONAIZE_ERROR_ABORTED, c"aborted by a rank"),
    (HARMONAIZE_ERROR_TIMEOUT_TOO_LONG, c"time-out longer than the operator allows"),
];

/// A short text of a status; never NULL. What went wrong in particular is in `harmonaize_last_error`.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_status_text(status: harmonaize_status_t) -> *const c_char {
    let known = TEXTS.iter().find(|(of, _)| *of == status);
    known.map_or(c"no status of this version", |(_, text)| text).as_ptr()
}

/// The version of this library, such as "0.1.0"; never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_client::Status;
    use std::collections::BTreeSet;

    #[test]
    fn statuses_differ_and_the_agents_are_all_there() {
        let codes: BTreeSet<_> = TEXTS.iter().map(|(status, _)| *status).collect();
        assert_eq!(codes.len(), TEXTS.len());
        let of_agent = |code: &u16| Status::from_code(*code).is_some();
        for code in (1..u16::MAX).take_while(of_agent) {
            assert!(codes.contains(&(OF_AGENT + i32::from(code))), "{code}");
        }
    }

    #[test]
    fn unknown_statuses_have_a_text_too() {
        for status in [i32::MIN, -1, 64, i32::MAX] {
            assert_eq!(harmonaize_status_text(status), harmonaize_status_text(80));
        }
    }
}
