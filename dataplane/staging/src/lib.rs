//! Operations on memory that somebody else owns, such as torch's: copied into the arena before, and out of it after.
//!
//! The arena is the pool of staging memory: its pages stay, and taking a piece costs a lookup. Whoever sees to the end of an operation
//! copies out.
//!
//! Architecture invariant: the only unsafe code here copies between an address that the caller vouches for and a view of the arena.

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

/// Copies pieces into staging memory, from a byte on.
///
/// # Safety
/// The pieces can be read.
unsafe fn copy_in(staging: &client::Tensor, at: usize, pieces: &[Piece]) -> Result<(), Error> {
    let view = staging.view_mut()?;
    let mut at = at;
    for Piece { address, bytes } in pieces.iter().copied().filter(|piece| piece.bytes > 0) {
        let room = view.range(at, bytes);
        let room = room.ok_or_else(|| Error::Shape("inputs do not fit the operation".into()))?;
        // SAFETY: the caller vouches for the piece; staging memory is nobody else's.
        unsafe { std::ptr::copy_nonoverlapping(address as *const u8, room.pointer(), bytes) };
        at += bytes;
    }
    Ok(())
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

impl Call {
    /// Copies the inputs in and starts the operation.
    ///
    /// # Safety
    /// The inputs can be read, and nobody writes them meanwhile.
    ///
    /// # Errors
    /// As the client's call of that name; [`Error::NoRoom`] where the arena has no room for staging memory.
    pub unsafe fn start(&self, client: &client::Client, members: &Communicator) -> Result<Flight, Error> {
        let (dtype, size) = (self.dtype, self.dtype.size());
        let (inputs, outputs) = (bytes(&self.inputs), bytes(&self.outputs));
        let tensor = |bytes: usize| client.tensor(dtype, (bytes / size) as u64);
        let filled = |bytes: usize, at: usize| {
            let staging = tensor(bytes)?;
            // SAFETY: the caller vouches for the inputs.
            unsafe { copy_in(&staging, at, &self.inputs)? };
            Ok::<_, Error>(staging)
        };
        let (operation, from) = match self.kind {
            Kind::Send => {
                let staging = filled(inputs, 0)?;
                (members.send(&staging, self.root)?, Some((staging, 0)))
            }
            Kind::Receive => {
                let staging = tensor(outputs)?;
                (members.recv(&staging, self.root)?, Some((staging, 0)))
            }
            Kind::ReceiveAny => {
                let staging = tensor(outputs)?;
                (members.recv_any(&staging)?, Some((staging, 0)))
            }
            Kind::Collective(collective) => {
                self.start_collective(collective, members, (inputs, outputs), &tensor, &filled)?
            }
        };
        let outputs = if from.is_some() { self.outputs.clone() } else { Vec::new() };
        Ok(Flight { operation, landing: Landing { from, outputs } })
    }

    /// Starts a collective. Returns the staging memory with its output, and where in it that begins; none where it has none.
    fn start_collective(
        &self,
        collective: Collective,
        members: &Communicator,
        (inputs, outputs): (usize, usize),
        tensor: &dyn Fn(usize) -> Result<client::Tensor, Error>,
        filled: &dyn Fn(usize, usize) -> Result<client::Tensor, Error>,
    ) -> Result<(client::Operation, Option<(client::Tensor, usize)>), Error> {
        let (rank, ranks, root, reduce) = (members.rank(), members.ranks() as usize, self.root, self.reduce);
        let (at_root, own, size) = (rank == root, rank.0 as usize, self.dtype.size());
        // What stands before this rank's part, in bytes.
        let offset = |counts: &[u64], block: usize| match counts {
            [] => block * own,
            counts => counts.iter().take(own).sum::<u64>() as usize * size,
        };
        let counts = self.counts.as_ref().map_or(&[][..], |counts| &counts.own);
        let part = |staging: &client::Tensor| {
            let start = counts.iter().take(own).sum::<u64>();
            staging.slice(start..start + counts.get(own).copied().unwrap_or(0))
        };
        let (operation, staging, at) = match collective {
            Collective::Barrier => return Ok((members.barrier()?, None)),
            Collective::AllReduce => {
                let staging = filled(inputs, 0)?;
                (members.all_reduce_in_place(&staging, reduce)?, staging, 0)
            }
            Collective::Broadcast => {
                let staging = if at_root { filled(inputs, 0)? } else { tensor(outputs)? };
                (members.broadcast(&staging, root)?, staging, 0)
            }
            Collective::Reduce => {
                let staging = filled(inputs, 0)?;
                (members.reduce_in_place(&staging, reduce, root)?, staging, 0)
            }
            Collective::AllGather => {
                let staging = filled(outputs, offset(counts, inputs))?;
                let operation = match counts {
                    [] => members.all_gather_in_place(&staging)?,
                    counts => members.all_gather_v(&part(&staging)?, &staging, counts)?,
                };
                (operation, staging, 0)
            }
            Collective::ReduceScatter => {
                let staging = filled(inputs, 0)?;
                let operation = match counts {
                    [] => members.reduce_scatter_in_place(&staging, reduce)?,
                    counts => members.reduce_scatter_v(&staging, &part(&staging)?, reduce, counts)?,
                };
                (operation, staging, offset(counts, outputs))
            }
            Collective::Gather => {
                let staging =
                    if at_root { filled(outputs, offset(&[], inputs))? } else { filled(inputs, 0)? };
                (members.gather_in_place(&staging, root)?, staging, 0)
            }
            Collective::Scatter if at_root => {
                let staging = filled(inputs, 0)?;
                (members.scatter_in_place(&staging, root)?, staging, offset(&[], inputs / ranks.max(1)))
            }
            Collective::Scatter => {
                let staging = tensor(outputs)?;
                (members.scatter_in_place(&staging, root)?, staging, 0)
            }
            Collective::AllToAll => {
                let (from, into) = (filled(inputs, 0)?, tensor(outputs)?);
                let operation = match &self.counts {
                    None => members.all_to_all(&from, &into)?,
                    Some(Counts { own, received, most }) => {
                        members.all_to_all_v(&from, own, &into, received, *most)?
                    }
                };
                (operation, into, 0)
            }
        };
        Ok((operation, Some((staging, at))))
    }
}
