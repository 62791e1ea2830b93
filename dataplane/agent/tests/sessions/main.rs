//! The agent's socket and address, and all kinds of attachment from a process's side, with a stub for the engine.

#[cfg(test)]
mod forked;
#[cfg(test)]
mod hostile;
#[cfg(test)]
mod memory;
#[cfg(test)]
mod network;
#[cfg(test)]
mod rdma;
#[cfg(test)]
mod stub;
#[cfg(test)]
mod successor;
#[cfg(test)]
mod tenants;
