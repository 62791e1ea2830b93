//! What TCP adds to the common suite. It covers unauthenticated, lying and broken peers, intruders on the route, source
//! ports, and links side by side.

#[cfg(test)]
mod links;
#[cfg(test)]
mod protection;
#[cfg(test)]
mod raw;
#[cfg(test)]
mod unauthenticated;
