//! A call of the program's as an operation of the provider's: which bytes are read and written, in which order.
//!
//! Collectives that only move elements go as bytes. So ranks whose types differ in layout, but not in size, carry the call alike: each
//! packs and unpacks by itself.

use crate::abi::Handle;
use crate::pmpi::pmpi;
use crate::process::Process;
use crate::reason::Reason;
use harmonaize_client::{Collective, Dtype, Rank, ReduceOp};
use harmonaize_staging::{Call, Counts, Kind, Piece};
use std::ffi::{c_int, c_void};
use std::ops::Range;

/// Staging memory of one piece of a collective, at most: larger ones go in several.
const CHUNK: usize = 8 << 20;

/// Most bytes of all blocks together where blocks differ: those go in one piece.
pub(crate) const UNEVEN_MOST: usize = 16 << 20;

/// Most ranks of an AllToAll by messages: each takes two of the operations in flight.
const MESSAGE_RANKS: u32 = 64;

/// Elements of the program's, one after the other.
#[derive(Clone, Copy, Debug)]
struct Part {
    address: usize,
    count: usize,
}

/// What an output's bytes become at the end, where the program's type has gaps.
#[derive(Debug)]
struct Unpack {
    dtype: Handle,
    parts: Vec<Part>,
    /// Whether the type is this call's own duplicate.
    owned: bool,
}

/// Blocks for each rank as the program gives them: address, counts, places, and their type.
type Blocks = (*const c_void, *const c_int, *const c_int, Handle);

/// Blocks of a call that the MPI moves, where the provider carries the others.
#[derive(Debug)]
struct MpiPart {
    request: Handle,
    /// What the request has ended with.
    result: Option<c_int>,
    /// Elements sent and received by rank, which the MPI reads until the request has ended.
    counts: [Vec<c_int>; 2],
}

/// A collective of the provider's on the program's memory.
#[derive(Debug)]
pub(crate) struct Task {
    collective: Collective,
    dtype: Dtype,
    reduce: ReduceOp,
    root: Rank,
    /// One a block.
    inputs: Vec<Piece>,
    outputs: Vec<Piece>,
    counts: Option<Counts>,
    /// Elements of each block, where all are alike.
    count: usize,
    /// Blocks of the larger of a rank's tensors.
    blocks: usize,
    /// What packed inputs and outputs lie in.
    packed: [Vec<u8>; 2],
    unpack: Option<Unpack>,
    /// Of an AllToAll by messages.
    mpi_part: Option<MpiPart>,
}

/// A call of the program's on a communicator.
pub(crate) struct Arguments<'a> {
    pub(crate) process: &'a Process,
    pub(crate) comm: Handle,
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    /// Whether the call returns before it has ended.
    pub(crate) nonblocking: bool,
}

/// A type's layout.
struct Layout {
    bytes: usize,
    extent: isize,
    plain: bool,
}

fn size(number: c_int) -> Result<usize, Reason> {
    usize::try_from(number).map_err(|_| Reason::Arguments)
}

/// Numbers by rank.
fn numbers<'a>(at: *const c_int, ranks: u32) -> Result<&'a [c_int], Reason> {
    if at.is_null() {
        return Err(Reason::Arguments);
    }
    // SAFETY: the program's array has a number for each rank, and stays as it is during the call.
    Ok(unsafe { std::slice::from_raw_parts(at, ranks as usize) })
}

/// Where elements of the program's lie. It may be before the address 0: where there are none, or their type has addresses of its own.
fn offset(address: usize, by: isize, times: c_int) -> Result<usize, Reason> {
    let by = isize::try_from(times).ok().and_then(|times| by.checked_mul(times));
    by.map(|by| address.wrapping_add_signed(by)).ok_or(Reason::Arguments)
}

impl Arguments<'_> {
    fn layout(&self, dtype: Handle) -> Result<Layout, Reason> {
        if let Some(plain) = self.process.abi.plain(dtype) {
            let extent = isize::try_from(plain.bytes).map_err(|_| Reason::Arguments)?;
            return Ok(Layout { bytes: plain.bytes, extent, plain: true });
        }
        let (mut bytes, mut lower, mut extent): (c_int, isize, isize) = (0, 0, 0);
        if (pmpi().MPI_Type_size)(dtype, &raw mut bytes) != 0
            || (pmpi().MPI_Type_get_extent)(dtype, &raw mut lower, &raw mut extent) != 0
        {
            return Err(Reason::Arguments);
        }
        Ok(Layout { bytes: size(bytes)?, extent, plain: false })
    }

    fn reduction(&self, dtype: Handle, operation: Handle) -> Result<(Dtype, ReduceOp), Reason> {
        let abi = &self.process.abi;
        let dtype = abi.plain(dtype).and_then(|plain| plain.dtype);
        let both = dtype.zip(abi.operation(operation));
        both.filter(|(dtype, reduce)| reduce.takes(*dtype)).ok_or(Reason::Reduction)
    }

    fn root(&self, root: c_int) -> Result<Rank, Reason> {
        let root = u32::try_from(root).ok().filter(|root| *root < self.ranks);
        root.map(Rank).ok_or(Reason::Arguments)
    }

    fn is_in_place(&self, buffer: *const c_void) -> bool {
        buffer.addr() == self.process.abi.in_place
    }

    fn empty(&self, collective: Collective, dtype: Dtype, count: usize) -> Task {
        Task {
            collective,
            dtype,
            reduce: ReduceOp::Sum,
            root: Rank(0),
            inputs: Vec::new(),
            outputs: Vec::new(),
            counts: None,
            count,
            blocks: collective.max_blocks(self.ranks) as usize,
            packed: [Vec::new(), Vec::new()],
            unpack: None,
            mpi_part: None,
        }
    }

    /// A task that reduces, without its tensors, and the layout of their type.
    fn reducing(
        &self,
        collective: Collective,
        dtype: Handle,
        operation: Handle,
        count: c_int,
    ) -> Result<(Task, Layout), Reason> {
        let ((of, reduce), count) = (self.reduction(dtype, operation)?, size(count)?);
        let layout = self.layout(dtype)?;
        Ok((Task { reduce, ..self.empty(collective, of, count) }, layout))
    }

    /// Where an input is: in place of the output, or apart.
    fn source(&self, send: *const c_void, recv: *mut c_void) -> *const c_void {
        if self.is_in_place(send) { recv.cast_const() } else { send }
    }

    /// This rank's block of an AllGather as the input: that of the output where it is in place.
    fn own_block(
        &self,
        task: &mut Task,
        (send, count, dtype): (*const c_void, c_int, Handle),
        (outputs, of, layout): (&[Part], Handle, &Layout),
    ) -> Result<(), Reason> {
        if self.is_in_place(send) {
            let own = outputs.get(self.rank as usize).copied().ok_or(Reason::Arguments)?;
            return self.input(task, of, layout, &[own]);
        }
        self.input(task, dtype, &self.layout(dtype)?, &[part(send, size(count)?)])
    }

    /// The pieces of an input: packed where its type has gaps.
    fn input(&self, task: &mut Task, dtype: Handle, layout: &Layout, parts: &[Part]) -> Result<(), Reason> {
        if layout.plain {
            task.inputs = pieces(parts.iter().map(|part| (part.address, part.count * layout.bytes)));
            return Ok(());
        }
        let total: usize = parts.iter().map(|part| part.count * layout.bytes).sum();
        let whole = c_int::try_from(total).map_err(|_| Reason::Arguments)?;
        let [packed, _] = &mut task.packed;
        packed.resize(total, 0);
        let mut position: c_int = 0;
        let own = self.process.abi.comm_self;
        for part in parts {
            let count = c_int::try_from(part.count).map_err(|_| Reason::Arguments)?;
            let from = std::ptr::with_exposed_provenance(part.address);
            let to = packed.as_mut_ptr().cast();
            (pmpi().MPI_Pack)(from, count, dtype, to, whole, &raw mut position, own);
        }
        let begin = packed.as_ptr().expose_provenance();
        task.inputs = in_row(begin, parts, layout);
        Ok(())
    }

    /// The pieces of an output: where its type has gaps, of memory beside it.
    fn output(&self, task: &mut Task, dtype: Handle, layout: &Layout, parts: &[Part]) -> Result<(), Reason> {
        if layout.plain {
            task.outputs = pieces(parts.iter().map(|part| (part.address, part.count * layout.bytes)));
            return Ok(());
        }
        let total = parts.iter().map(|part| part.count * layout.bytes).sum();
        c_int::try_from(total).map_err(|_| Reason::Arguments)?;
        let [_, packed] = &mut task.packed;
        packed.resize(total, 0);
        let begin = packed.as_mut_ptr().expose_provenance();
        task.outputs = in_row(begin, parts, layout);
        let mut own = dtype;
        if self.nonblocking {
            // The program may free its type as soon as the call has returned.
            own = Handle(0);
            if (pmpi().MPI_Type_dup)(dtype, (&raw mut own).cast()) != 0 {
                return Err(Reason::Arguments);
            }
        }
        task.unpack = Some(Unpack { dtype: own, parts: parts.to_vec(), owned: self.nonblocking });
        Ok(())
    }

    /// Blocks of so many elements that follow one another.
    fn blocks(&self, at: *const c_void, count: usize, layout: &Layout) -> Result<Vec<Part>, Reason> {
        let block = |rank: u32| {
            let count_c = c_int::try_from(count).map_err(|_| Reason::Arguments)?;
            let elements = c_int::try_from(rank).ok().and_then(|rank| rank.checked_mul(count_c));
            let address = offset(at.expose_provenance(), layout.extent, elements.ok_or(Reason::Arguments)?)?;
            Ok(Part { address, count })
        };
        (0..self.ranks).map(block).collect()
    }

    pub(crate) fn allreduce(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        count: c_int,
        dtype: Handle,
        operation: Handle,
    ) -> Result<Task, Reason> {
        let (mut task, layout) = self.reducing(Collective::AllReduce, dtype, operation, count)?;
        let (from, count) = (self.source(send, recv), task.count);
        self.input(&mut task, dtype, &layout, &[part(from, count)])?;
        self.output(&mut task, dtype, &layout, &[part(recv, count)])?;
        self.filled(task)
    }

    pub(crate) fn reduce(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        count: c_int,
        dtype: Handle,
        operation: Handle,
        root: c_int,
    ) -> Result<Task, Reason> {
        let (mut task, layout) = self.reducing(Collective::Reduce, dtype, operation, count)?;
        task.root = self.root(root)?;
        let count = task.count;
        let at_root = task.root.0 == self.rank;
        let from = if at_root { self.source(send, recv) } else { send };
        self.input(&mut task, dtype, &layout, &[part(from, count)])?;
        if at_root {
            self.output(&mut task, dtype, &layout, &[part(recv, count)])?;
        }
        self.filled(task)
    }

    pub(crate) fn bcast(
        &self,
        buffer: *mut c_void,
        count: c_int,
        dtype: Handle,
        root: c_int,
    ) -> Result<Task, Reason> {
        let (count, layout) = (size(count)?, self.layout(dtype)?);
        let mut task = self.empty(Collective::Broadcast, Dtype::U8, count * layout.bytes);
        task.root = self.root(root)?;
        let parts = [part(buffer, count)];
        if task.root.0 == self.rank {
            self.input(&mut task, dtype, &layout, &parts)?;
        } else {
            self.output(&mut task, dtype, &layout, &parts)?;
        }
        self.filled(task)
    }

    pub(crate) fn allgather(
        &self,
        send: *const c_void,
        send_count: c_int,
        send_type: Handle,
        recv: *mut c_void,
        recv_count: c_int,
        recv_type: Handle,
    ) -> Result<Task, Reason> {
        let (count, layout) = (size(recv_count)?, self.layout(recv_type)?);
        let mut task = self.empty(Collective::AllGather, Dtype::U8, count * layout.bytes);
        let outputs = self.blocks(recv, count, &layout)?;
        self.own_block(&mut task, (send, send_count, send_type), (&outputs, recv_type, &layout))?;
        self.output(&mut task, recv_type, &layout, &outputs)?;
        self.filled(task)
    }

    #[expect(clippy::too_many_arguments, reason = "MPI's own")]
    pub(crate) fn allgatherv(
        &self,
        send: *const c_void,
        send_count: c_int,
        send_type: Handle,
        recv: *mut c_void,
        recv_counts: *const c_int,
        places: *const c_int,
        recv_type: Handle,
    ) -> Result<Task, Reason> {
        let layout = self.layout(recv_type)?;
        let outputs = self.placed(recv, recv_counts, places, &layout)?;
        let counts = outputs.iter().map(|part| (part.count * layout.bytes) as u64).collect();
        let mut task = self.empty(Collective::AllGather, Dtype::U8, 0);
        self.own_block(&mut task, (send, send_count, send_type), (&outputs, recv_type, &layout))?;
        self.output(&mut task, recv_type, &layout, &outputs)?;
        self.uneven(task, counts)
    }

    pub(crate) fn alltoall(
        &self,
        send: *const c_void,
        send_count: c_int,
        send_type: Handle,
        recv: *mut c_void,
        recv_count: c_int,
        recv_type: Handle,
    ) -> Result<Task, Reason> {
        let (count, layout) = (size(recv_count)?, self.layout(recv_type)?);
        let mut task = self.empty(Collective::AllToAll, Dtype::U8, count * layout.bytes);
        let outputs = self.blocks(recv, count, &layout)?;
        if self.is_in_place(send) {
            self.input(&mut task, recv_type, &layout, &outputs)?;
        } else {
            let layout = self.layout(send_type)?;
            let inputs = self.blocks(send, size(send_count)?, &layout)?;
            self.input(&mut task, send_type, &layout, &inputs)?;
        }
        self.output(&mut task, recv_type, &layout, &outputs)?;
        self.filled(task)
    }

    /// Blocks until all ranks have called, to agree on the largest block and on whether the provider carries it. Where it may not block
    /// it goes by messages.
    #[expect(clippy::too_many_arguments, reason = "MPI's own")]
    pub(crate) fn alltoallv(
        &self,
        send: *const c_void,
        send_counts: *const c_int,
        send_places: *const c_int,
        send_type: Handle,
        recv: *mut c_void,
        recv_counts: *const c_int,
        recv_places: *const c_int,
        recv_type: Handle,
    ) -> Result<Task, Reason> {
        if self.nonblocking {
            let input = (send, send_counts, send_places, send_type);
            return self.by_messages(input, (recv.cast_const(), recv_counts, recv_places, recv_type));
        }
        let made = || {
            let layout = self.layout(recv_type)?;
            let outputs = self.placed(recv, recv_counts, recv_places, &layout)?;
            let bytes = |parts: &[Part], layout: &Layout| -> Vec<u64> {
                parts.iter().map(|part| (part.count * layout.bytes) as u64).collect()
            };
            let received = bytes(&outputs, &layout);
            let mut task = self.empty(Collective::AllToAll, Dtype::U8, 0);
            let own = if self.is_in_place(send) {
                self.input(&mut task, recv_type, &layout, &outputs)?;
                received.clone()
            } else {
                let layout = self.layout(send_type)?;
                let inputs = self.placed(send, send_counts, send_places, &layout)?;
                self.input(&mut task, send_type, &layout, &inputs)?;
                bytes(&inputs, &layout)
            };
            self.output(&mut task, recv_type, &layout, &outputs)?;
            Ok((task, own, received))
        };
        let made: Result<_, Reason> = made();
        let own = match &made {
            Ok((_, own, received)) => {
                let most = own.iter().chain(received).max().copied().unwrap_or(0);
                let total = own.iter().sum::<u64>().max(received.iter().sum());
                [most, total]
            }
            Err(_) => [u64::MAX >> 1; 2],
        };
        let mut all = [0_u64; 2];
        let abi = &self.process.abi;
        let (from, to) = ((&raw const own).cast(), (&raw mut all).cast());
        let agreed = (pmpi().MPI_Allreduce)(from, to, 2, abi.int64, abi.max, self.comm);
        let [most, total] = all;
        match made {
            Ok((mut task, own, received)) if agreed == 0 && total <= UNEVEN_MOST as u64 => {
                self.is_enough(total)?;
                task.counts = Some(Counts { own, received, most });
                Ok(task)
            }
            Ok(_) => Err(Reason::LargeUneven),
            Err(reason) => Err(reason),
        }
    }

    /// An AllToAll of messages, which need nothing that all ranks agree on. Both ends of a block know its size: small and large ones are
    /// left to the MPI, whose collective all ranks begin.
    fn by_messages(&self, input: Blocks, output: Blocks) -> Result<Task, Reason> {
        if self.ranks > MESSAGE_RANKS {
            return Err(Reason::TooManyRanks);
        }
        let (send, _, send_places, send_type) = input;
        let (recv, _, recv_places, recv_type) = output;
        let source = if self.is_in_place(send) { output } else { input };
        let (from, inputs, sent) = self.divided(source)?;
        let (into, outputs, received) = self.divided(output)?;
        let mut task = self.empty(Collective::AllToAll, Dtype::U8, 0);
        self.input(&mut task, source.3, &from, &inputs)?;
        self.output(&mut task, recv_type, &into, &outputs)?;
        if sent.iter().chain(&received).any(|count| *count > 0) {
            self.process.fall_back("MPI_Ialltoallv", Reason::SomeBlocks);
        }
        let mut request = Handle(0);
        let begun = (pmpi().MPI_Ialltoallv)(
            send,
            sent.as_ptr(),
            send_places,
            send_type,
            recv.cast_mut(),
            received.as_ptr(),
            recv_places,
            recv_type,
            self.comm,
            (&raw mut request).cast(),
        );
        let result = (begun != 0).then_some(begun);
        task.mpi_part = Some(MpiPart { request, result, counts: [sent, received] });
        Ok(task)
    }

    /// Blocks divided between provider and MPI: the layout of an element, blocks with those of the MPI's empty, and the MPI's counts.
    fn divided(&self, blocks: Blocks) -> Result<(Layout, Vec<Part>, Vec<c_int>), Reason> {
        let (at, counts, places, dtype) = blocks;
        let layout = self.layout(dtype)?;
        let mut parts = self.placed(at, counts, places, &layout)?;
        let mut left = numbers(counts, self.ranks)?.to_vec();
        for (part, left) in parts.iter_mut().zip(&mut left) {
            let bytes = part.count.saturating_mul(layout.bytes).saturating_mul(self.ranks as usize);
            if bytes <= CHUNK && bytes as u64 >= self.process.min_bytes {
                *left = 0;
            } else {
                part.count = 0;
            }
        }
        Ok((layout, parts, left))
    }

    pub(crate) fn reduce_scatter_block(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        count: c_int,
        dtype: Handle,
        operation: Handle,
    ) -> Result<Task, Reason> {
        let (mut task, layout) = self.reducing(Collective::ReduceScatter, dtype, operation, count)?;
        let (from, count) = (self.source(send, recv), task.count);
        let inputs = self.blocks(from, count, &layout)?;
        self.input(&mut task, dtype, &layout, &inputs)?;
        self.output(&mut task, dtype, &layout, &[part(recv, count)])?;
        self.filled(task)
    }

    pub(crate) fn reduce_scatter(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        counts: *const c_int,
        dtype: Handle,
        operation: Handle,
    ) -> Result<Task, Reason> {
        let all = numbers(counts, self.ranks)?;
        if let [first, others @ ..] = all
            && others.iter().all(|count| count == first)
        {
            return self.reduce_scatter_block(send, recv, *first, dtype, operation);
        }
        let (mut task, layout) = self.reducing(Collective::ReduceScatter, dtype, operation, 0)?;
        let from = self.source(send, recv);
        let counts: Vec<usize> = all.iter().map(|count| size(*count)).collect::<Result<_, _>>()?;
        let total = counts.iter().sum();
        let own = counts.get(self.rank as usize).copied().ok_or(Reason::Arguments)?;
        self.input(&mut task, dtype, &layout, &[part(from, total)])?;
        self.output(&mut task, dtype, &layout, &[part(recv, own)])?;
        self.uneven(task, counts.into_iter().map(|count| count as u64).collect())
    }

    pub(crate) fn barrier(&self) -> Result<Task, Reason> {
        match self.process.min_bytes {
            0 => Ok(self.empty(Collective::Barrier, Dtype::U8, 0)),
            _ => Err(Reason::Few),
        }
    }

    /// The task, unless the MPI is to carry so many bytes.
    fn filled(&self, task: Task) -> Result<Task, Reason> {
        let bytes = task.count.saturating_mul(task.blocks);
        // Some rank may have to pack what is moved, and packs numbers of bytes that are an `int`.
        if !task.collective.reduces() && c_int::try_from(bytes).is_err() {
            return Err(Reason::Huge);
        }
        self.is_enough(bytes.saturating_mul(task.dtype.size()) as u64).map(|()| task)
    }

    /// The task with counts that all ranks give alike, likewise.
    fn uneven(&self, mut task: Task, own: Vec<u64>) -> Result<Task, Reason> {
        let total = own.iter().sum::<u64>().saturating_mul(task.dtype.size() as u64);
        self.is_enough(total)?;
        if total > UNEVEN_MOST as u64 {
            return Err(Reason::LargeUneven);
        }
        let most = own.iter().max().copied().unwrap_or(0);
        task.counts = Some(Counts { own, received: Vec::new(), most });
        Ok(task)
    }

    /// Whether so many bytes are for the provider.
    fn is_enough(&self, bytes: u64) -> Result<(), Reason> {
        match bytes {
            0 => Err(Reason::Nothing),
            bytes if bytes < self.process.min_bytes => Err(Reason::Few),
            _ => Ok(()),
        }
    }

    /// A block for each rank, where the program has placed it.
    fn placed(
        &self,
        at: *const c_void,
        counts: *const c_int,
        places: *const c_int,
        layout: &Layout,
    ) -> Result<Vec<Part>, Reason> {
        let both = numbers(counts, self.ranks)?.iter().zip(numbers(places, self.ranks)?);
        both.map(|(count, place)| {
            let address = offset(at.expose_provenance(), layout.extent, *place)?;
            Ok(Part { address, count: size(*count)? })
        })
        .collect()
    }
}

fn part(at: *const c_void, count: usize) -> Part {
    Part { address: at.expose_provenance(), count }
}

fn pieces(parts: impl Iterator<Item = (usize, usize)>) -> Vec<Piece> {
    parts.map(|(address, bytes)| Piece { address, bytes }).collect()
}

/// A piece for each part, one after the other.
fn in_row(begin: usize, parts: &[Part], layout: &Layout) -> Vec<Piece> {
    let mut at = begin;
    let piece = |part: &Part| {
        let piece = Piece { address: at, bytes: part.count * layout.bytes };
        at += piece.bytes;
        piece
    };
    parts.iter().map(piece).collect()
}

impl Task {
    /// In how many elements of each block it goes at once: a fact that is the same at all ranks.
    fn chunk(&self) -> usize {
        (CHUNK / (self.dtype.size() * self.blocks.max(1))).max(1)
    }

    /// The pieces that it goes in, by elements of each block.
    pub(crate) fn chunks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (whole, chunk) = (self.count, self.chunk());
        let pieces = if self.counts.is_some() { 1 } else { whole.div_ceil(chunk).max(1) };
        (0..pieces).map(move |piece| piece * chunk..((piece + 1) * chunk).min(whole))
    }

    /// A piece of it as the provider's operation.
    pub(crate) fn call(&self, range: &Range<usize>) -> Call {
        let element = self.dtype.size();
        let cut = |pieces: &[Piece]| match &self.counts {
            Some(_) => pieces.to_vec(),
            None => {
                let bytes = range.len() * element;
                let address = |piece: &Piece| piece.address + range.start * element;
                pieces.iter().map(|piece| Piece { address: address(piece), bytes }).collect()
            }
        };
        Call {
            kind: Kind::Collective(self.collective),
            dtype: self.dtype,
            reduce: self.reduce,
            root: self.root,
            inputs: cut(&self.inputs),
            outputs: cut(&self.outputs),
            counts: self.counts.clone(),
        }
    }

    /// What is started of it where the call does not block: the operation, or a message from and to each rank.
    pub(crate) fn calls(&self) -> Vec<Call> {
        if self.mpi_part.is_none() {
            return vec![self.call(&self.chunks().next().unwrap_or(0..0))];
        }
        let message = |kind, root, inputs, outputs| Call {
            kind,
            root,
            inputs,
            outputs,
            dtype: self.dtype,
            reduce: self.reduce,
            counts: None,
        };
        let filled = |pieces: &[Piece]| -> Vec<(Rank, Piece)> {
            (0..).map(Rank).zip(pieces.iter().copied()).filter(|(_, piece)| piece.bytes > 0).collect()
        };
        let received = filled(&self.outputs).into_iter();
        let received = received.map(|(rank, piece)| message(Kind::Receive, rank, Vec::new(), vec![piece]));
        let sent = filled(&self.inputs).into_iter();
        received.chain(sent.map(|(rank, piece)| message(Kind::Send, rank, vec![piece], Vec::new()))).collect()
    }

    /// What the MPI's part has ended with: none where it has not, and 0 where there is none.
    pub(crate) fn poll_mpi_part(&mut self, process: &Process) -> Option<c_int> {
        let Some(left) = &mut self.mpi_part else { return Some(0) };
        if left.result.is_none() {
            let mut ended: c_int = 0;
            let code =
                (pmpi().MPI_Test)((&raw mut left.request).cast(), &raw mut ended, process.abi.no_status());
            left.result = (ended != 0 || code != 0).then_some(code);
        }
        left.result
    }

    /// Waits for the MPI's part, and returns what it has ended with.
    pub(crate) fn wait_mpi_part(&mut self, process: &Process) -> c_int {
        let Some(left) = &mut self.mpi_part else { return 0 };
        let request = (&raw mut left.request).cast();
        *left.result.get_or_insert_with(|| (pmpi().MPI_Wait)(request, process.abi.no_status()))
    }

    /// Puts the output where the program wants it, once all pieces are there.
    pub(crate) fn land(&self, process: &Process) {
        let Some(Unpack { parts, dtype, .. }) = &self.unpack else { return };
        let [_, packed] = &self.packed;
        let whole = c_int::try_from(packed.len()).unwrap_or(c_int::MAX);
        let mut position: c_int = 0;
        for part in parts {
            let count = c_int::try_from(part.count).unwrap_or_default();
            let to = std::ptr::with_exposed_provenance_mut(part.address);
            let from = packed.as_ptr().cast();
            (pmpi().MPI_Unpack)(from, whole, &raw mut position, to, count, *dtype, process.abi.comm_self);
        }
    }
}

impl Drop for MpiPart {
    fn drop(&mut self) {
        // Of a call that has failed the MPI may read the counts still.
        if self.result.is_none() {
            for counts in &mut self.counts {
                let _: &mut [c_int] = std::mem::take(counts).leak();
            }
        }
    }
}

impl Drop for Unpack {
    fn drop(&mut self) {
        if self.owned {
            (pmpi().MPI_Type_free)((&raw mut self.dtype).cast());
        }
    }
}
