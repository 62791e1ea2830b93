//! What TCP adds to the common suite: strangers, liars and broken peers, source ports, links side by side.

#[cfg(test)]
mod links;
#[cfg(test)]
mod raw;
#[cfg(test)]
mod unauthenticated;
