//! What TCP adds to the common suite: strangers, liars and broken peers, whoever is on the way, source ports, links side by side.

#[cfg(test)]
mod links;
#[cfg(test)]
mod protection;
#[cfg(test)]
mod raw;
#[cfg(test)]
mod unauthenticated;
