//! The agent's socket and both kinds of attachment from a process's side, with a stub for the engine.

#[cfg(test)]
mod hostile;
#[cfg(test)]
mod stub;
#[cfg(test)]
mod tenants;
