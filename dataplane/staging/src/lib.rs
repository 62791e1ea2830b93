//! Operations on memory that somebody else owns, such as torch's: copied into the arena before, and out of it after.
//!
//! The arena is the pool of staging memory: its pages stay, and taking a piece costs a lookup. Of the host's memory, whoever sees to the
//! end of an operation copies out. Of a GPU's, CUDA's driver copies both ways, in the order of a [stream].
//!
//! Architecture invariant: unsafe code here copies between an address that the caller vouches for and a view of the arena, or calls
//! CUDA's driver as its manual says.

pub mod cuda;
pub mod stream;

use harmonaize_client as client;
use harmonaize_client::{Collective, Communicator, Dtype, Error, Rank, ReduceOp};

/// A piece of somebody's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where it begins.
    pub address: usize,
    /// How long it is.
    pub bytes: usize,
}

/// An operation's kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A collective.
    Collective(Collective),
    /// A message to the rank [`Call::root`].
    Send,
    /// A message from the rank [`Call::root`].
    Receive,
    /// A message from any rank.
    ReceiveAny,
}

/// Sizes of blocks that differ from rank to rank, in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts {
    /// By rank: what an AllToAll sends there; of any other collective that rank's block.
    pub own: Vec<u64>,
    /// By rank: what an AllToAll receives from there.
    pub received: Vec<u64>,
    /// The largest block between any two ranks of an AllToAll.
    pub most: u64,
}

/// An operation on somebody's memory.
#[derive(Clone, Debug)]
pub struct Call {
    /// What it does.
    pub kind: Kind,
    /// Of the elements.
    pub dtype: Dtype,
    /// How they are reduced, where they are.
    pub reduce: ReduceOp,
    /// The root, or the rank at the other end of a message.
    pub root: Rank,
    /// One after the other they are the operation's input. In place where the collective's input is a part of its output.
    pub inputs: Vec<Piece>,
    /// One after the other they become the operation's output.
    pub outputs: Vec<Piece>,
    /// Where blocks differ in size.
    pub counts: Option<Counts>,
}

/// An operation in flight, and where its output goes.
#[derive(Debug)]
pub struct Flight {
    /// The operation.
    pub operation: client::Operation,
    /// What is to be copied out once it has ended well.
    pub landing: Landing,
}

/// Staging memory that an operation's output is in, and where that goes.
#[derive(Debug)]
pub struct Landing {
    /// The staging memory, and where in it the output begins, in bytes.
    from: Option<(client::Tensor, usize)>,
    outputs: Vec<Piece>,
}

fn bytes(pieces: &[Piece]) -> usize {
    pieces.iter().fold(0_usize, |sum, piece| sum.saturating_add(piece.bytes))
}

impl Landing {
    /// Whether anything is to be copied out.
    pub fn is_empty(&self) -> bool {
        self.outputs.is_empty()
    }

    /// Copies the output out.
    ///
    /// # Safety
    /// The outputs of the [`Call`] can be written still, and nobody else reads or writes them meanwhile.
    ///
    /// # Errors
    /// Where the outputs are longer than what the operation gives, or after a fork.
    pub unsafe fn copy_out(&self) -> Result<(), Error> {
        let Some((staging, at)) = &self.from else { return Ok(()) };
        let view = staging.view()?;
        let mut at = *at;
        for Piece { address, bytes } in self.outputs.iter().copied().filter(|piece| piece.bytes > 0) {
            let piece = view.range(at, bytes);
            let piece = piece.ok_or_else(|| Error::Shape("outputs do not fit the operation".into()))?;
            // SAFETY: the caller vouches for the output; staging memory is nobody else's.
            unsafe { std::ptr::copy_nonoverlapping(piece.pointer(), address as *mut u8, bytes) };
            at += bytes;
        }
        Ok(())
    }
}

/// Staging memory of a call.
#[derive(Debug, Default)]
pub(crate) struct Staging {
    /// None of a Barrier.
    main: Option<client::Tensor>,
    /// What an AllToAll writes; anything else writes the first.
    into: Option<client::Tensor>,
    /// From which byte of the first on the inputs lie; none where there are none.
    fills: Option<usize>,
    /// From which byte of the written one on the outputs lie.
    lands: usize,
}

impl Staging {
    /// All of it.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &client::Tensor> {
        self.main.iter().chain(&self.into)
    }

    /// Where pieces go that follow one another from a byte of a tensor on.
    fn places<'a>(
        tensor: Option<&client::Tensor>,
        at: usize,
        pieces: &'a [Piece],
        what: &'static str,
    ) -> Result<Vec<(*mut u8, &'a Piece)>, Error> {
        let Some(tensor) = tensor else { return Ok(Vec::new()) };
        let (view, mut at) = (tensor.view_mut()?, at);
        let place = |piece: &'a Piece| {
            let room = view.range(at, piece.bytes);
            at += piece.bytes;
            room.map(|room| (room.pointer(), piece))
                .ok_or_else(|| Error::Shape(format!("{what} do not fit the operation")))
        };
        pieces.iter().filter(|piece| piece.bytes > 0).map(place).collect()
    }

    /// Where the inputs of a call go.
    pub(crate) fn inputs<'a>(&self, call: &'a Call) -> Result<Vec<(*mut u8, &'a Piece)>, Error> {
        match self.fills {
            Some(at) => Self::places(self.main.as_ref(), at, &call.inputs, "inputs"),
            None => Ok(Vec::new()),
        }
    }

    /// Where the outputs of a call come from.
    pub(crate) fn outputs<'a>(&self, call: &'a Call) -> Result<Vec<(*mut u8, &'a Piece)>, Error> {
        Self::places(self.into.as_ref().or(self.main.as_ref()), self.lands, &call.outputs, "outputs")
    }
}

impl Call {
    /// Copies the inputs in and starts the operation.
    ///
    /// # Safety
    /// The inputs can be read, and nobody writes them meanwhile.
    ///
    /// # Errors
    /// As the client's call of that name; [`Error::NoRoom`] where the arena has no room for staging memory.
    pub unsafe fn start(&self, client: &client::Client, members: &Communicator) -> Result<Flight, Error> {
        let staging = self.stage(client, members)?;
        for (room, piece) in staging.inputs(self)? {
            // SAFETY: the caller vouches for the piece; staging memory is nobody else's.
            unsafe { std::ptr::copy_nonoverlapping(piece.address as *const u8, room, piece.bytes) };
        }
        let operation = self.launch(members, &staging)?;
        let Staging { main, into, lands, .. } = staging;
        let from = into.or(main).map(|tensor| (tensor, lands));
        let outputs = if from.is_some() { self.outputs.clone() } else { Vec::new() };
        Ok(Flight { operation, landing: Landing { from, outputs } })
    }

    /// Takes staging memory for the call.
    pub(crate) fn stage(&self, client: &client::Client, members: &Communicator) -> Result<Staging, Error> {
        let (rank, ranks) = (members.rank(), members.ranks() as usize);
        let (at_root, own, size) = (rank == self.root, rank.0 as usize, self.dtype.size());
        let (inputs, outputs) = (bytes(&self.inputs), bytes(&self.outputs));
        // What stands before this rank's part, in bytes.
        let offset = |counts: &[u64], block: usize| match counts {
            [] => block * own,
            counts => counts.iter().take(own).sum::<u64>() as usize * size,
        };
        let counts = self.own_counts();
        // Bytes of staging memory, where in it the inputs begin, and where the outputs.
        let (all, fills, lands) = match self.kind {
            Kind::Collective(Collective::Barrier) => return Ok(Staging::default()),
            Kind::Send => (inputs, Some(0), 0),
            Kind::Receive | Kind::ReceiveAny => (outputs, None, 0),
            Kind::Collective(collective) => match collective {
                Collective::Broadcast | Collective::Scatter if !at_root => (outputs, None, 0),
                Collective::Scatter => (inputs, Some(0), offset(&[], inputs / ranks.max(1))),
                Collective::AllGather => (outputs, Some(offset(counts, inputs)), 0),
                Collective::Gather if at_root => (outputs, Some(offset(&[], inputs)), 0),
                Collective::ReduceScatter => (inputs, Some(0), offset(counts, outputs)),
                _ => (inputs, Some(0), 0),
            },
        };
        let tensor = |bytes: usize| client.tensor(self.dtype, (bytes / size) as u64);
        let apart = self.kind == Kind::Collective(Collective::AllToAll);
        let (main, into) = (tensor(all)?, apart.then(|| tensor(outputs)).transpose()?);
        Ok(Staging { main: Some(main), into, fills, lands })
    }

    fn own_counts(&self) -> &[u64] {
        self.counts.as_ref().map_or(&[][..], |counts| &counts.own)
    }

    /// Starts the operation on its staging memory.
    pub(crate) fn launch(
        &self,
        members: &Communicator,
        staging: &Staging,
    ) -> Result<client::Operation, Error> {
        let Some(main) = &staging.main else { return members.barrier() };
        let (root, reduce) = (self.root, self.reduce);
        let counts = self.own_counts();
        let part = || {
            let own = members.rank().0 as usize;
            let start = counts.iter().take(own).sum::<u64>();
            main.slice(start..start + counts.get(own).copied().unwrap_or(0))
        };
        let collective = match self.kind {
            Kind::Send => return members.send(main, root),
            Kind::Receive => return members.recv(main, root),
            Kind::ReceiveAny => return members.recv_any(main),
            Kind::Collective(collective) => collective,
        };
        match collective {
            Collective::Barrier => members.barrier(),
            Collective::AllReduce => members.all_reduce_in_place(main, reduce),
            Collective::Broadcast => members.broadcast(main, root),
            Collective::Reduce => members.reduce_in_place(main, reduce, root),
            Collective::AllGather if counts.is_empty() => members.all_gather_in_place(main),
            Collective::AllGather => members.all_gather_v(&part()?, main, counts),
            Collective::ReduceScatter if counts.is_empty() => members.reduce_scatter_in_place(main, reduce),
            Collective::ReduceScatter => members.reduce_scatter_v(main, &part()?, reduce, counts),
            Collective::Gather => members.gather_in_place(main, root),
            Collective::Scatter => members.scatter_in_place(main, root),
            Collective::AllToAll => match (&staging.into, &self.counts) {
                (into, None) => members.all_to_all(main, into.as_ref().unwrap_or(main)),
                (into, Some(Counts { own, received, most })) => {
                    members.all_to_all_v(main, own, into.as_ref().unwrap_or(main), received, *most)
                }
            },
        }
    }
}
