//! A remote attachment: agent and tenant share no memory. Descriptors, completions and tensor bytes are frames on a stream
//! socket, and the tenant's process serves the agent's fetches and stores. The stand-in for an offload unit that reaches the
//! host's memory over a bus or a network.

mod agent;
mod channel;
mod frame;
mod tenant;

pub use agent::RemoteEnd;
pub use tenant::RemoteTenant;

/// Most fetches, and as many stores, that the agent may have asked for at a time.
pub const REMOTE_DEPTH: usize = 256;

#[cfg(test)]
mod tests;
