//! Topologies as text, piece by piece, for tests and benchmarks.

use std::fmt::Display;

/// A switch of this name.
pub fn switch(name: impl Display) -> String {
    format!("[[switch]]\nname = \"{name}\"\n")
}

/// A link between two names.
pub fn link(from: impl Display, to: impl Display, rate: &str, delay: &str) -> String {
    format!("[[link]]\nfrom = \"{from}\"\nto = \"{to}\"\nrate = \"{rate}\"\ndelay = \"{delay}\"\n")
}

/// The host of this number and its link.
pub fn host(at: usize, to: impl Display, rate: &str, delay: &str) -> String {
    format!("[[host]]\nname = \"h{at}\"\n{}", link(format!("h{at}"), to, rate, delay))
}

/// Hosts at one switch.
pub fn star_text(hosts: usize, rate: &str, delay: &str) -> String {
    switch("s0") + &(0..hosts).map(|at| host(at, "s0", rate, delay)).collect::<String>()
}
