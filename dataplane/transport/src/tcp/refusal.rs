//! Why an end has no link with a peer.

use super::records::LinkProtection;

/// Why an end refuses a link, or is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LinkRefusal {
    /// A link of no paths, or of more than a link may have.
    #[error("a link cannot have {0} paths")]
    Paths(usize),
    /// The ends count paths differently, over TCP.
    #[error("the two ends do not agree on the number of paths")]
    PathsDiffer,
    /// The same over RDMA, where both say.
    #[error("the peer has {theirs} paths, this agent {ours}")]
    PathCounts {
        /// The peer's.
        theirs: u16,
        /// This end's.
        ours: usize,
    },
    /// The peer speaks another version, over TCP.
    #[error("the peer speaks version {theirs}, this end version {ours}")]
    Version {
        /// The peer's.
        theirs: u16,
        /// This end's.
        ours: u16,
    },
    /// The same over RDMA.
    #[error("the peer speaks RDMA version {theirs}, not {ours}")]
    RdmaVersion {
        /// The peer's.
        theirs: u16,
        /// This end's.
        ours: u16,
    },
    /// The peer has links over TCP alone.
    #[error("the peer speaks TCP, this agent RDMA: set one transport")]
    NoRdma,
    /// Control has not introduced this end to the peer yet.
    #[error("the peer has not been introduced to this link")]
    NotIntroduced,
    /// The ends hold different secrets.
    #[error("the two ends hold different secrets")]
    Secret,
    /// Another has the link already.
    #[error("the link is up with someone else")]
    Up,
    /// The ends ask for different protection.
    #[error("{}", protections_differ(*ours, *theirs))]
    Protection {
        /// This end's.
        ours: LinkProtection,
        /// The peer's, by its number on the wire.
        theirs: u16,
    },
    /// The one peer that came was refused, in a process's own memory.
    #[error("the only peer that came has a wrong introduction")]
    Introduction,
    /// The peer's reason, in its words.
    #[error("by the peer: {0}")]
    ByPeer(String),
    /// The peer's reason has a number that is not known here.
    #[error("the peer refused for a reason unknown here")]
    Unknown,
}

/// What each end tells its operator where the two ask for different protections.
fn protections_differ(ours: LinkProtection, theirs: u16) -> String {
    if theirs == ours as u16 {
        return format!("this end and the peer ask for `{ours}` links, but the Hello was changed on the way");
    }
    let theirs = LinkProtection::of(theirs)
        .map_or_else(|| format!("of kind {theirs}"), |theirs| format!("`{theirs}`"));
    format!("this end's links are `{ours}`, the peer's {theirs}: set `protection` under [links] alike")
}
