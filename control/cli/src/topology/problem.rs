//! What is wrong at one place of an input.

/// Most nodes that a range may stand for.
pub(super) const MAX_RANGE: u64 = 16384;

/// What is wrong at one place of an input.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Problem {
    /// The text is not of its format; the words are its parser's.
    #[error("{0}")]
    Format(String),
    /// Something else stands where keys with values should.
    #[error("an object is expected")]
    NoObject,
    /// Something else stands where a name should.
    #[error("a name is expected")]
    NoName,
    /// A name that no node can have.
    #[error("a name of letters and digits is expected")]
    UnusableName,
    /// A key is missing.
    #[error("it has no `{0}`")]
    Missing(&'static str),
    /// A file's own name is no node's.
    #[error("its name is no name of a host; name each file as its host, such as h0.json")]
    FileName,
    /// Two files are of one node.
    #[error("its name is that of {0}")]
    FileTwice(String),
    /// A file that is not of lldpd.
    #[error("there is no `lldp`; is it the output of `lldpctl -f json`?")]
    NoLldp,
    /// A neighbour that cannot be named.
    #[error("it has neither name nor id")]
    NoNeighbourName,
    /// A neighbour whose name no node can have.
    #[error("its name has no letter and no digit")]
    NeighbourName,
    /// A file that is not of ibnetdiscover.
    #[error("no line with Switch or Ca; is it the output of `ibnetdiscover`?")]
    NoNodes,
    /// A cable to a node without a line.
    #[error("the cable leads to {0}, which the file does not describe")]
    UnknownPeer(String),
    /// A node that cannot be referred to.
    #[error("a node without its GUID in quotes: {0}")]
    NodeWithoutGuid(String),
    /// A node with two lines.
    #[error("a node that was described before: {0}")]
    NodeTwice(String),
    /// A port of no node.
    #[error("a port before any node: {0}")]
    PortBeforeNode(String),
    /// A port whose cable leads nowhere.
    #[error("a port without its peer's GUID in quotes: {0}")]
    PortWithoutPeer(String),
    /// A file that is not of topograph.
    #[error("there are neither `switches` nor `instances`; is it a file of topograph?")]
    NoSwitches,
    /// A node beneath two others.
    #[error("`{child}` hangs on `{other}` and on `{parent}`")]
    TwoParents {
        /// The node.
        child: String,
        /// The one above it.
        other: String,
        /// The other one.
        parent: String,
    },
    /// A capacity block without a description.
    #[error("no capacity block is named `{0}`")]
    UnknownBlock(String),
    /// A node without a description.
    #[error("it has the node `{0}`, which stands nowhere else")]
    UnknownNode(String),
    /// A range that does not end.
    #[error("a range ends with `]`")]
    OpenRange,
    /// A range without numbers.
    #[error("`{0}` is no range such as 1-4")]
    NoRange(String),
    /// A range of no node, or of very many.
    #[error("`{0}` has no number, or more than {MAX_RANGE}")]
    LargeRange(String),
}
