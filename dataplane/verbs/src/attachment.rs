//! An attachment over RDMA. Agent and tenant share no memory, and perhaps no machine, but a network that RDMA crosses. It is
//! that of a host's function and its offload unit, or of two functions of one device.
//!
//! One reliable queue pair joins them. Descriptors and completions are written, with immediate, into mailboxes (`channel`); the
//! agent reads and writes the tenant's arena, which the tenant registered, so its process sleeps meanwhile. Results are written
//! before the completion on the same queue pair, and so are there when it is.
//!
//! What protects whom: each attachment has a protection domain of its own at the agent, in which the peer may write the
//! mailbox and nothing else. The tenant's keys end with its queue pair and regions: with the detachment at the latest.

mod agent;
mod channel;
mod succession;
mod tenant;

pub use agent::{AgentOffer, RdmaEnd, SuccessorEnd};
pub use succession::Rejoin;
pub use tenant::{RdmaTenant, TenantOffer};
