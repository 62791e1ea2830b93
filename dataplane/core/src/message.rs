//! Messages between participants: a fixed header on every frame, and rare control messages behind it.

use crate::Failure;
use harmonaize_abi::{
    ChannelId, Collective, Dtype, Epoch, OperationId, Rank, ReduceOp, SegmentId, Sequence, Signature,
};
use harmonaize_aggregator::Agreement;
use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Version of the messages between agents. A frame of another version ends the communicator.
pub const PROTOCOL_VERSION: u8 = 1;

/// Most bytes of an encoded message; lists in control messages are cut to fit.
pub const MAX_MESSAGE: usize = 512;

/// In [`Header::collective`]: [`Signature::uneven`].
pub(crate) const UNEVEN: u8 = 0x80;

/// Kinds of frames, as they stand in [`Header::kind`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[repr(u8)]
pub enum Kind {
    /// A piece of a tensor (the frame's payload), or an empty one.
    Data = 0,
    /// Slots of a landing ring are free again.
    Credit = 1,
    /// Nothing but the acknowledgement that every header carries.
    Acknowledge = 2,
    /// A [`Control`] message stands behind the header.
    Control = 3,
    /// A rank has called a send.
    Offer = 4,
    /// The receiver asks for a message that was offered.
    Pull = 5,
    /// A piece of a message (the frame's payload).
    Piece = 6,
    /// The receiver has all of a message.
    Received = 7,
}

impl Kind {
    /// The kind of an Offer, a Pull, a Piece or a Received.
    pub(crate) fn of_p2p(code: u8) -> Option<Self> {
        [Self::Offer, Self::Pull, Self::Piece, Self::Received].into_iter().find(|kind| *kind as u8 == code)
    }
}

/// Stands at the start of every frame between participants. 56 bytes, little endian as on every supported machine.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Serialize, Deserialize,
)]
#[repr(C)]
pub struct Header {
    /// [`PROTOCOL_VERSION`].
    pub version: u8,
    /// [`Kind`] code.
    pub kind: u8,
    /// Channel of a data, credit or piece frame.
    pub channel: ChannelId,
    /// Epoch whose streams a data, credit or piece frame belongs to.
    pub epoch: Epoch,
    /// Data and piece: number of the message on its stream (sender, receiver, channel, epoch); wraps. Pull: how often the receiver has
    /// asked for this message.
    pub sequence: Sequence,
    /// Data, credit and piece: how many messages of the reverse stream have been consumed; wraps.
    pub credit: u32,
    /// Data: number of the operation. Offer, pull, piece, received: number of the message among those of its two ranks.
    pub operation: u64,
    /// Data: number of the segment. Offer: elements. Pull and piece: the first byte.
    pub segment: u64,
    /// To the parent: every participant below has done every segment below this. To a child: everybody has.
    pub acknowledged: SegmentId,
    /// Data: [`Signature::count`]. Offer, pull, piece, received: the receiving rank.
    pub count: u64,
    /// Data: [`Signature::root`]. Offer, pull, piece, received: the sending rank.
    pub root: u32,
    /// Data: [`Signature::collective`], and 128 of [`Signature::uneven`].
    pub collective: u8,
    /// Data: [`Signature::dtype`]. Offer: the element type.
    pub dtype: u8,
    /// Data: [`Signature::reduce`].
    pub reduce: u8,
    /// The generation of `acknowledged`: how often segments were undone before, modulo 256.
    pub generation: u8,
}

const _: () = assert!(size_of::<Header>() == 56);

impl Header {
    /// A header of a kind that carries nothing else yet.
    pub fn new(kind: Kind, epoch: Epoch) -> Self {
        Self {
            version: PROTOCOL_VERSION,
            kind: kind as u8,
            channel: ChannelId(0),
            epoch,
            sequence: Sequence(0),
            credit: 0,
            operation: 0,
            segment: 0,
            acknowledged: SegmentId(0),
            count: 0,
            root: 0,
            collective: 0,
            dtype: 0,
            reduce: 0,
            generation: 0,
        }
    }

    /// Fills in the operation's signature.
    pub fn sign(&mut self, signature: &Signature) {
        self.count = signature.count;
        self.root = signature.root.0;
        self.collective = signature.collective.code() | if signature.uneven { UNEVEN } else { 0 };
        self.dtype = signature.dtype.code();
        self.reduce = signature.reduce.code();
    }

    /// The operation's signature, if its codes are known.
    pub fn signature(&self) -> Option<Signature> {
        Some(Signature {
            collective: Collective::from_code(self.collective & !UNEVEN)?,
            dtype: Dtype::from_code(self.dtype)?,
            reduce: ReduceOp::from_code(self.reduce)?,
            root: Rank(self.root),
            count: self.count,
            uneven: self.collective & UNEVEN != 0,
        })
    }
}

/// The rare messages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Control {
    /// Asks which ranks have called this operation, and what, before a time-out is declared.
    Inquire {
        /// Number of the operation.
        operation: OperationId,
        /// One of its counts that is in doubt.
        count: Option<u32>,
    },
    /// Answer to [`Control::Inquire`].
    Answer {
        /// Number of the operation.
        operation: OperationId,
        /// As asked.
        count: Option<u32>,
        /// The answerer's ranks that have not called it.
        missing: Vec<Rank>,
        /// What one of its ranks called.
        call: Option<(Rank, Signature)>,
        /// What one of its ranks reported of that count.
        reported: Option<(Rank, u64)>,
    },
    /// A rank left with nothing in flight; operations from this number on cannot happen.
    Left {
        /// Who.
        rank: Rank,
        /// Number of operations it took part in.
        operations: u64,
    },
    /// Tells the leader that this epoch's links are up here.
    Prepared {
        /// The new epoch.
        epoch: Epoch,
    },
    /// Asks, from the leader, for a promise of how far the receiver goes before the switch.
    Propose {
        /// The new epoch.
        epoch: Epoch,
    },
    /// Answer to [`Control::Propose`]: no segment from `below` on begins here before the commit.
    Promise {
        /// The new epoch.
        epoch: Epoch,
        /// First segment not promised to the old epoch.
        below: SegmentId,
    },
    /// From the leader: segments from `segment` on run under the new epoch.
    Commit {
        /// The new epoch.
        epoch: Epoch,
        /// The first segment of the new epoch.
        segment: SegmentId,
    },
    /// Gives up an epoch: to the leader because it cannot be prepared here, from the leader for everybody.
    Withdrawn {
        /// The epoch that will not be.
        epoch: Epoch,
    },
    /// The communicator has ended.
    Abort {
        /// Why.
        failure: Failure,
    },
    /// Agrees, to the leader or from it, on who sums an epoch's segments. Only where the epoch has an aggregator.
    Aggregation {
        /// The epoch.
        epoch: Epoch,
        /// Of a Resume: the generation of acknowledgements from here on.
        generation: u8,
        /// What.
        agreement: Agreement,
    },
}

/// The payload of a frame that arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Payload {
    /// Its length.
    pub bytes: u32,
    /// It lies where an [`crate::Action::Post`] reported, and not in its landing slot.
    pub posted: bool,
}

/// A message to send: header, and control message if any.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// The header.
    pub header: Header,
    /// Behind it, for [`Kind::Control`].
    pub control: Option<Box<Control>>,
}

impl Message {
    /// Writes the message into `buffer` and returns its length. Lists too long to fit are cut.
    pub fn encode(&self, buffer: &mut [u8; MAX_MESSAGE]) -> usize {
        let (head, tail) = buffer.split_at_mut(size_of::<Header>());
        head.copy_from_slice(self.header.as_bytes());
        let Some(control) = &self.control else { return size_of::<Header>() };
        let mut control = control.clone();
        loop {
            match postcard::to_slice(&*control, tail) {
                Ok(used) => return size_of::<Header>() + used.len(),
                Err(_) if !control.shorten() => return size_of::<Header>(),
                Err(_) => {}
            }
        }
    }

    /// Reads a message, or says `None` if it is none of this version.
    pub fn decode(bytes: &[u8]) -> Option<(Header, Option<Control>)> {
        let (header, rest) = Header::read_from_prefix(bytes).ok()?;
        if header.version != PROTOCOL_VERSION {
            return None;
        }
        if header.kind != Kind::Control as u8 {
            return Some((header, None));
        }
        Some((header, Some(postcard::from_bytes(rest).ok()?)))
    }
}

impl Control {
    /// Halves the longest list; false when there is nothing left to cut.
    fn shorten(&mut self) -> bool {
        fn halve<T>(list: &mut Vec<T>) -> bool {
            list.truncate(list.len() / 2);
            true
        }
        match self {
            Self::Answer { missing, .. } if !missing.is_empty() => halve(missing),
            Self::Abort { failure } => failure.shorten(),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_abi::{Direction, P2pSignature};
    use harmonaize_aggregator::Summation;
    use harmonaize_schemas::{Schema, bytes, check};

    const CALL: Signature = Signature {
        collective: Collective::AllReduce,
        dtype: Dtype::F32,
        reduce: ReduceOp::Sum,
        root: Rank(0),
        count: 1000,
        uneven: false,
    };

    fn failures() -> Vec<Failure> {
        let (operation, ranks) = (OperationId(300), vec![Rank(1), Rank(200)]);
        let call =
            P2pSignature { direction: Direction::Send, peer: Some(Rank(2)), dtype: Dtype::U8, count: 9 };
        vec![
            Failure::Timeout { operation, signature: Some(CALL), missing: ranks.clone() },
            Failure::Mismatch { operation, calls: vec![(Rank(1), CALL)] },
            Failure::Counts { operation, from: Rank(1), to: Some(Rank(2)), reported: vec![(Rank(1), 5)] },
            Failure::P2pTimeout { rank: Rank(1), call, missing: ranks.clone() },
            Failure::P2pMismatch {
                number: 4,
                from: Rank(1),
                to: Rank(2),
                sent: (Dtype::U8, 9),
                received: (Dtype::F32, 9),
            },
            Failure::RanksLost { ranks: ranks.clone() },
            Failure::Dissolved,
            Failure::Aborted { rank: Rank(1) },
            Failure::Internal { ranks },
        ]
    }

    fn controls() -> Vec<Control> {
        let (operation, epoch, segment) = (OperationId(300), Epoch(3), SegmentId(400));
        let agreements = [
            Agreement::Ask { session: 1 },
            Agreement::Stop { session: 2 },
            Agreement::Stopped { session: 2, done: segment, done_everywhere: SegmentId(3) },
            Agreement::Resume { session: 2, from: segment, summation: Summation::Hosts },
            Agreement::Done { session: 2, below: segment },
            Agreement::DoneEverywhere { below: segment },
            Agreement::HaveSums { session: 2, below: segment, worker: 5 },
        ];
        let mut controls = vec![
            Control::Inquire { operation, count: Some(3) },
            Control::Answer {
                operation,
                count: None,
                missing: vec![Rank(1)],
                call: Some((Rank(2), CALL)),
                reported: Some((Rank(2), 5)),
            },
            Control::Left { rank: Rank(1), operations: 300 },
            Control::Prepared { epoch },
            Control::Propose { epoch },
            Control::Promise { epoch, below: segment },
            Control::Commit { epoch, segment },
            Control::Withdrawn { epoch },
        ];
        controls.extend(failures().into_iter().map(|failure| Control::Abort { failure }));
        controls.extend(agreements.map(|agreement| Control::Aggregation {
            epoch,
            generation: 200,
            agreement,
        }));
        controls
    }

    #[test]
    fn messages_are_those_released() {
        let mut lines = Vec::new();
        let mut add = |name: String, message: &Message| {
            let mut buffer = [0; MAX_MESSAGE];
            let length = message.encode(&mut buffer);
            lines.push(bytes(&name, &buffer[..length]));
        };
        let kinds = [
            Kind::Data,
            Kind::Credit,
            Kind::Acknowledge,
            Kind::Offer,
            Kind::Pull,
            Kind::Piece,
            Kind::Received,
        ];
        for kind in kinds {
            let mut header = Header::new(kind, Epoch(0x0102_0304));
            header.sign(&CALL);
            header.channel = ChannelId(0x0506);
            (header.sequence, header.credit) = (Sequence(7), 8);
            (header.operation, header.segment, header.acknowledged) = (9, 10, SegmentId(11));
            header.generation = 12;
            add(format!("{kind:?}"), &Message { header, control: None });
        }
        for control in controls() {
            let name = format!("{control:?}");
            let header = Header::new(Kind::Control, Epoch(1));
            add(name, &Message { header, control: Some(Box::new(control)) });
        }
        let remedy = "Agents of the release before could not share a communicator with this one any more. Leave messages as they are. A \
            new one goes only into communicators whose agents all know it (what an agent can do is in its Hello to control), and needs a \
            line here. Test: cargo test -p harmonaize-core released";
        check("messages", Schema::Grows, &lines, remedy).unwrap_or_else(|broken| panic!("{broken}"));
    }
}
