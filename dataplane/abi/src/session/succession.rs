//! What becomes of an attachment over RDMA whose agent has a successor. Its queue pair ends with the agent's process, and its session
//! goes on.

use super::PairEnd;
use serde::{Deserialize, Serialize};

/// A bit of the id of [`Request::Detail`](super::Request::Detail), of whichever communicator. The process is attached over RDMA, and
/// reads [`Answer::Succession`](super::Answer::Succession). Agents of any release answer as ever.
pub const SUCCESSORS: u64 = 1 << 59;

/// What becomes of the queue pair.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Succession {
    /// The agent is about to hand over: from now on that the queue pair fails means nothing.
    Begins,
    /// It does not hand over: the queue pair stays.
    CalledOff,
    /// The successor's queue pair. The process joins a new one to it and sends [`Request::Reconnect`](super::Request::Reconnect), and
    /// nothing through the queue pair before [`Succession::Connected`].
    Connect {
        /// Where it is.
        end: PairEnd,
        /// How many descriptors agents have taken since the attachment began. Those after them are written once more.
        taken: u64,
    },
    /// The successor's queue pair is joined to the process's.
    Connected,
}
