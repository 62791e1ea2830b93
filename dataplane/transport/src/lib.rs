//! Bytes between agents: one trait, and an implementation for each kind of network.
//!
//! A *link* joins two agents for one communicator and epoch. It has one or more *paths* (TCP connections, queue pairs),
//! each in order, none ordered against another. A *frame* is a small header, opaque here, and a payload that lands at the
//! receiver in a *ring* of equal slots which the receiver attached beforehand: as with an RDMA write with immediate, the
//! sender names ring and sequence, the slot is `sequence % slots`, and nothing is allocated or copied aside. Who may send
//! how much into which ring is the business of the layer above (credits); a frame for a ring or a size that was never
//! attached ends the link.

#[cfg(feature = "conformance")]
pub mod conformance;
pub mod datagram;
pub mod loopback;
mod retry;
mod rings;
mod scheduler;
pub mod tcp;
mod timer;
mod uplink;
pub mod verbs;

pub use scheduler::Scheduler;
pub use tcp::LinkRefusal;
pub use uplink::{Owner, Uplink};

use harmonaize_abi::{CongestionControl, Tag};
use harmonaize_shm::Span;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

/// Most bytes that a frame's header may have.
pub const MAX_HEADER: usize = 512;

/// Most paths that a link may have.
pub const MAX_PATHS: u16 = 64;

/// A link of this endpoint. Never used again after it is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct LinkId(pub u64);

/// What control told both ends of a link about each other. Who does not present it is refused.
#[derive(Clone, PartialEq, Eq)]
pub struct Introduction {
    /// Names the link at both ends; unique per communicator, epoch and pair.
    pub name: [u8; 16],
    /// Shared secret, known to the two agents and control alone.
    pub secret: [u8; 32],
    /// Where the other end listens. Its connections come from the same address, and from no other are they taken.
    pub peer: SocketAddr,
    /// Whether this end connects (else it waits to be connected to).
    pub initiate: bool,
    /// One path per entry: the source port to connect from, 0 for any. The same at both ends.
    pub source_ports: Vec<u16>,
    /// Whether the link goes over TCP alone, also where links go over RDMA. The same at both ends.
    pub over_tcp: bool,
}

impl std::fmt::Debug for Introduction {
    /// Without the secret: introductions end up in logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, secret: _, peer, initiate, source_ports, over_tcp } = self;
        f.debug_tuple("Introduction").field(&(name, peer, initiate, source_ports, over_tcp)).finish()
    }
}

/// Where the payload of frames of one stream lands: `slots` slots of `slot_bytes` in `memory`.
#[derive(Clone, Debug)]
pub struct Ring {
    /// All slots, one after another.
    pub memory: Span,
    /// Size of a slot.
    pub slot_bytes: u32,
    /// How many.
    pub slots: u32,
}

/// Where a payload goes, or came to rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Landing {
    /// Ring at the receiver.
    pub ring: u16,
    /// The slot is `sequence % slots`.
    pub sequence: u32,
}

/// How urgent an operation is among its tenant's, and what a link carries among all that the network does.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
pub enum TrafficClass {
    /// Somebody waits for it.
    #[default]
    Latency,
    /// Neither.
    Normal,
    /// It may wait for others.
    Bulk,
}

impl TrafficClass {
    /// All, the most urgent first.
    pub const ALL: [Self; 3] = [Self::Latency, Self::Normal, Self::Bulk];
}

/// Something that happened on a link.
#[derive(Debug)]
pub enum Event<'a> {
    /// All paths are connected and authenticated: frames may be sent.
    Up,
    /// A frame arrived; its payload, if any, lies in its slot, or in the span that was posted for it.
    Received {
        /// The sender's header.
        header: &'a [u8],
        /// Where the payload is and how long.
        payload: Option<(Landing, u32)>,
        /// Whether the payload lies in the span that [`Transport::post`] gave, and not in the slot.
        posted: bool,
    },
    /// The payload of the frame sent with this tag may be overwritten (not: has been delivered).
    Sent {
        /// From [`Transport::send`].
        tag: Tag,
    },
    /// A device has carried out a message that was timed; see [`Transport::time_completions`].
    Completed {
        /// The path that it went on.
        path: u16,
        /// From handing it to the device until its completion was seen here.
        took: Duration,
        /// Payload bytes that the device had meanwhile for this endpoint, whether it has carried them out or not. This message's are
        /// among them.
        bytes: u64,
    },
    /// The link has ended, by the peer, the network, or a breach of protocol. Nothing follows.
    Down {
        /// Why, for the operator.
        reason: DownReason,
    },
}

/// How a path looks on the wire, from this end: by this a measurement finds its traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flow {
    /// A connection.
    Tcp {
        /// This end of it.
        local: SocketAddr,
        /// The other end.
        remote: SocketAddr,
    },
    /// Two queue pairs on `RoCE` v2.
    Roce {
        /// This end's address.
        local: IpAddr,
        /// The other end's.
        remote: IpAddr,
        /// This end's queue pair: what comes in is for it.
        local_pair: u32,
        /// The other end's: what leaves is for it.
        remote_pair: u32,
        /// The source port that the path was opened with; 0: the device chose one. On the wire it is as
        /// [`source_port_on_wire`](harmonaize_verbs::source_port_on_wire) says.
        source_port: u16,
    },
}

/// Why a link ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DownReason {
    /// The peer closed it, or its process ended.
    #[error("closed by the peer")]
    Closed,
    /// It could not be connected in time.
    #[error("could not be connected: {0}")]
    Connect(String),
    /// The network failed, or the peer's host fell silent.
    #[error("network error: {0}")]
    Network(String),
    /// The peer presented a wrong introduction or version.
    #[error("refused: {0}")]
    Refused(LinkRefusal),
    /// The end has another link of this name.
    #[error("a link of this name is open already")]
    Taken,
    /// This end's RDMA device of this name was taken away.
    #[error("the RDMA device {0} is gone")]
    DeviceGone(String),
    /// The peer broke the protocol.
    #[error("protocol error: {0}")]
    Protocol(String),
    /// Something came on the connection that the peer did not make.
    #[error("not authentic: {0}")]
    Forged(String),
}

/// Why links cannot go on in another process, for the operator.
#[derive(Debug, thiserror::Error)]
pub enum LinkHandOverError {
    /// No transport of this kind hands links over.
    #[error("links of this kind cannot be handed over")]
    Unsupported,
    /// Some still go over RDMA; epochs over TCP alone come first.
    #[error("{0} links go over RDMA, and queue pairs end with their process; try again")]
    QueuePairs(usize),
    /// A link is on its way up.
    #[error("a link is not up")]
    NotUp,
    /// Fewer connections came than the links have paths.
    #[error("a link's connection is missing")]
    NoConnection,
    /// Nothing makes keys of what came.
    #[error("a link's keys cannot be made")]
    NoKeys,
    /// The read buffer here is smaller than what was read there.
    #[error("more was read ahead than there is room for")]
    ReadAhead,
    /// The link has fewer paths than came.
    #[error("a link has too many paths")]
    TooManyPaths,
    /// The link has more paths than came.
    #[error("a link has too few paths")]
    TooFewPaths,
    /// The link cannot be awaited here.
    #[error(transparent)]
    Link(#[from] DownReason),
    /// The kernel refused.
    #[error(transparent)]
    System(#[from] std::io::Error),
    /// The links' state cannot be written or read.
    #[error(transparent)]
    State(#[from] postcard::Error),
}

/// Why a frame was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The path's queue is full; try again after progress.
    #[error("queue full")]
    Full,
    /// The link is not up.
    #[error("link not up")]
    Down,
    /// No such path, or a header over [`MAX_HEADER`].
    #[error("invalid frame")]
    Invalid,
}

/// An endpoint that a poll loop drives. Nothing blocks; nothing is allocated per frame once a link is up.
pub trait Transport {
    /// Where other agents connect to this one.
    fn local_address(&self) -> SocketAddr;

    /// Starts a link; [`Event::Up`] or [`Event::Down`] follows. A second link of the same name is refused. A peer with a
    /// wrong secret is told so at once, where it initiates; the end that waits goes on waiting for the right one, so that
    /// a stranger who knows the name cannot end a link, and goes down when its time to connect is over.
    fn open(&mut self, introduction: Introduction) -> Result<LinkId, DownReason>;

    /// Gives a link a ring to land payloads in. Before frames for it can arrive, that is before the layer above lets the
    /// peer know of it.
    fn attach_ring(&mut self, link: LinkId, ring: u16, memory: Ring) -> Result<(), DownReason>;

    /// Offers a span for the payload of one frame in place of its slot, which stays unused. True: the payload will lie
    /// there if it is exactly as long as the span, and its [`Event::Received`] says so; the span may be written from now
    /// until then, or until the link is closed or has reported [`Event::Down`], and not after. False: the payload goes to
    /// its slot, because it has begun to arrive, the span is empty or does not fit a slot, the slot has a post already, the
    /// ring is unknown, or the transport cannot do this.
    fn post(&mut self, link: LinkId, landing: Landing, span: Span) -> bool {
        let _ = (link, landing, span);
        false
    }

    /// Queues a frame. The header is copied; the payload is read until [`Event::Sent`] comes with `tag` (frames without
    /// payload get no `Sent`). The whole span is sent; one of no bytes is a payload too, and gets its `Sent`.
    fn send(
        &mut self,
        link: LinkId,
        path: u16,
        header: &[u8],
        payload: Option<(Landing, Span, Tag)>,
    ) -> Result<(), SendError>;

    /// What a path of a link that is up looks like on the wire. None if it crosses no wire that can be identified.
    fn flow(&self, link: LinkId, path: u16) -> Option<Flow> {
        let _ = (link, path);
        None
    }

    /// Bounds what a link sends, headers of the transport included, to so many bits a second. They are divided evenly
    /// among its paths; `None` takes the bound off. From the next bytes on. False: the transport cannot, or has no
    /// such link.
    fn pace(&mut self, link: LinkId, bits_per_second: Option<u64>) -> bool {
        let _ = (link, bits_per_second);
        false
    }

    /// Has a link's connections use a TCP congestion control, now or once they are made. With `None` they use the
    /// host's own. Where the host refuses it they have the host's own, and the log says so. A transport without TCP
    /// does nothing.
    fn set_congestion_control(&mut self, link: LinkId, control: Option<CongestionControl>) {
        let _ = (link, control);
    }

    /// Says who sends on a link, where tenants share what the host sends. Without it, or where the transport cannot bound what it sends,
    /// a link takes what it gets.
    fn set_owner(&mut self, link: LinkId, owner: Owner) {
        let _ = (link, owner);
    }

    /// Says how urgent what a link carries is, from the next bytes on, where packets are marked by it. A link begins as
    /// [`TrafficClass::Latency`].
    fn set_class(&mut self, link: LinkId, class: TrafficClass) {
        let _ = (link, class);
    }

    /// From now on some messages are timed, as [`Event::Completed`] tells: of each path at most one at a time, and one in a
    /// millisecond. A transport whose device tells no completions does nothing.
    fn time_completions(&mut self) {}

    /// Does at most about `budget` frames or system calls of work, and reports what happened. Returns how much was done
    /// (0: nothing to do).
    fn progress(&mut self, budget: usize, sink: &mut dyn FnMut(LinkId, Event<'_>)) -> usize;

    /// Ends a link. Payloads of frames not yet sent are released without `Sent`; queued frames without payload are still
    /// tried once, so that a last word gets out.
    fn close(&mut self, link: LinkId);

    /// Whether links are brought to the end of a frame, for [`Self::hand_over`]. [`Self::progress`] then goes on with frames that are
    /// under way, and begins to read no other.
    fn freeze(&mut self, frozen: bool) {
        let _ = frozen;
    }

    /// Whether all links have come to the end of a frame, with nothing left to send, since [`Self::freeze`].
    ///
    /// # Errors
    /// Why its links cannot be handed over, for the operator.
    fn is_frozen(&mut self) -> Result<bool, LinkHandOverError> {
        Err(LinkHandOverError::Unsupported)
    }

    /// What another process's endpoint of this kind needs to go on with all links. The links are
    /// [frozen](Self::is_frozen), and their descriptors come with it. Until [`Self::freeze`] ends this endpoint touches
    /// none of the connections.
    ///
    /// # Errors
    /// Why its links cannot be handed over, for the operator.
    fn hand_over(&mut self) -> Result<(Vec<u8>, Vec<OwnedFd>), LinkHandOverError> {
        Err(LinkHandOverError::Unsupported)
    }

    /// Goes on with the links of another endpoint, each under its [`LinkId`]. Rings are attached anew, before [`Self::progress`].
    ///
    /// # Errors
    /// What is wrong with them, for the operator.
    fn take_over(&mut self, links: &[u8], descriptors: Vec<OwnedFd>) -> Result<(), LinkHandOverError> {
        let _ = (links, descriptors);
        Err(LinkHandOverError::Unsupported)
    }

    /// Makes [`Self::wake_fd`] ready to wake its sleeper. False: something happened meanwhile, call `progress` again.
    fn prepare_sleep(&mut self) -> bool {
        true
    }

    /// A descriptor that is readable (level) whenever the network or a timer has work for `progress`. Sleep on it only
    /// after `progress` returned 0 (frames queued and input already taken in are not seen by it) and then
    /// [`Self::prepare_sleep`] returned true.
    fn wake_fd(&self) -> Option<BorrowedFd<'_>>;
}
