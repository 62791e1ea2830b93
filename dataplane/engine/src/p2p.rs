//! Messages from rank to rank. Each goes from a sender's tensor to a link, from a landing slot to a receiver's, or on one host from
//! tensor to tensor. Where a tensor is not mapped, each piece is fetched or stored.

use crate::Engine;
use crate::attachment::Attachment;
use crate::communicator_state::{CommunicatorState, Pending};
use crate::context::Context;
use crate::engine::{refusal, transfer};
use crate::execute::send_all;
use crate::passes::{Kernel, Pass, PassSharing, located};
use crate::slices::Slices;
use crate::step::ExecuteError;
use crate::table::{Key, Table};
use crate::transfer::{PendingTransfer, tag};
use crate::turns::Urgency;
use crate::validate::CheckedP2p;
use arrayvec::ArrayVec;
use harmonaize_abi::{ABI_VERSION, Completion, Cookie, Direction, Nanos, Rank, Status, StepId, Tag, Token};
use harmonaize_core::{P2pReceipt, PeerMessage};
use harmonaize_plan::MAX_STEP_PEERS;
use harmonaize_shm::{Memory, Span};
use harmonaize_transport::Transport;
use std::sync::Arc;

/// [`Completion::algorithm`] of a message within a host, and between two.
const ALGORITHMS: [u8; 2] = [1, 3];

/// What a piece still needs that is being fetched.
#[derive(Debug)]
pub(crate) enum Next {
    Send(PeerMessage),
    Store(PendingTransfer),
}

/// Pieces that are being fetched, and memory for them.
#[derive(Debug, Default)]
pub(crate) struct P2pState {
    fetched: Vec<(StepId, Span, Next)>,
    staging: Vec<Arc<Memory>>,
}

impl P2pState {
    /// What follows the fetch of a piece; none of one that goes to mapped tensors.
    pub(crate) fn next(&self, step: StepId) -> Option<&Next> {
        self.fetched.iter().find(|(of, ..)| *of == step).map(|(.., next)| next)
    }

    /// Goes on with a piece that another process was to fetch, and fetches it here.
    pub(crate) fn inherit(&mut self, step: StepId, here: &Span, next: Next) {
        self.staging.push(Arc::clone(here.memory()));
        self.fetched.push((step, here.clone(), next));
    }

    /// Memory for a piece that nothing else uses. Allocates only when more pieces are under way than ever before, or all that is unused is
    /// too small. There is never more of it than for all pieces that were under way at once.
    fn reserve(&mut self, bytes: u64) -> Result<Span, ExecuteError> {
        let unused = |memory: &Arc<Memory>| Arc::strong_count(memory) == 1;
        let fits = |memory: &&Arc<Memory>| unused(memory) && memory.bytes() as u64 >= bytes;
        if let Some(memory) = self.staging.iter().find(fits) {
            return Ok(Span::new(memory, 0, bytes)?);
        }
        if let Some(small) = self.staging.iter().position(unused) {
            self.staging.swap_remove(small);
        }
        let whole = usize::try_from(bytes).map_err(|_| ExecuteError::NoSource)?;
        let memory = Memory::private(whole)?;
        let span = Span::new(&memory, 0, bytes)?;
        self.staging.push(memory);
        Ok(span)
    }
}

/// One end of a piece: a tensor's bytes in mapped memory, or where an attachment has them.
enum End {
    Mapped(Span),
    Remote { attachment: Key, offset: u64 },
}

/// The bytes from `offset` on of a rank's tensor.
fn end_of(
    member: &CommunicatorState,
    attachments: &Table<Attachment>,
    (rank, token): (Rank, Token),
    (offset, bytes): (u64, u64),
    direction: Direction,
) -> Result<End, ExecuteError> {
    let local = member.local(rank).ok_or(ExecuteError::NoSource)?;
    let call = member.call(token).ok_or(ExecuteError::NoSource)?;
    let region = if direction == Direction::Send { call.input } else { call.output };
    let attachment = attachments.get(local.attachment).ok_or(ExecuteError::NoSource)?;
    Ok(match attachment.end.memory() {
        Some(regions) => {
            let (memory, at) = regions.locate(region.offset, region.bytes)?;
            End::Mapped(Span::new(memory, at.saturating_add(offset), bytes)?)
        }
        None => End::Remote { attachment: local.attachment, offset: region.offset.saturating_add(offset) },
    })
}

/// What is to be done of a piece after its memory here was.
enum Remainder {
    /// Nothing.
    Done,
    /// The copy, for the turn is over in its midst.
    Copy,
    /// A fetch or a store.
    Transfer(PendingTransfer),
}

/// Copies a piece of a message of `whole` bytes.
fn copy(
    (passes, slices): (&mut PassSharing, &mut Slices),
    whole: u64,
    from: &Span,
    to: &Span,
) -> Result<Remainder, ExecuteError> {
    let pass = Pass {
        kernel: &Kernel::Copy,
        whole: usize::try_from(whole).unwrap_or(usize::MAX),
        sources: &[located(from)],
        destinations: &[located(to)],
    };
    Ok(if passes.run(&[pass], slices)? { Remainder::Done } else { Remainder::Copy })
}

impl Engine {
    /// Sends a piece.
    pub(crate) fn p2p_send(
        &mut self,
        key: Key,
        from: (Rank, Token),
        (offset, step): (u64, StepId),
        message: PeerMessage,
    ) {
        let Some(member) = self.communicators.get_mut(key) else { return };
        let range = (offset, u64::from(message.bytes));
        let tag = tag(key, member.core.p2p_channel(), step);
        match end_of(member, &self.attachments, from, range, Direction::Send) {
            Ok(End::Mapped(span)) => send_piece(member, self.transport.as_mut(), message, &span, tag),
            Ok(End::Remote { attachment, offset }) => match member.p2p.reserve(range.1) {
                Ok(span) => {
                    member.p2p.fetched.push((step, span.clone(), Next::Send(message)));
                    let fetch = PendingTransfer { attachment, tag, store: false, offset, span };
                    transfer(&mut self.attachments, &mut self.broken, fetch);
                }
                Err(error) => member.fail_internal(&error.to_string()),
            },
            Err(error) => member.fail_internal(&error.to_string()),
        }
    }

    /// Stores a piece that has landed, or goes on with it. Returns whether its memory here is done with.
    pub(crate) fn p2p_receive(
        &mut self,
        now: Nanos,
        key: Key,
        to: (Rank, Token),
        (offset, step): (u64, StepId),
        message: PeerMessage,
        slices: &mut Slices,
    ) -> bool {
        let Some(member) = self.communicators.get_mut(key) else { return true };
        let bytes = u64::from(message.bytes);
        if !slices.is_resumed() {
            member.bytes_received += bytes;
        }
        let channel = member.core.p2p_channel();
        let mut sources = ArrayVec::<PeerMessage, MAX_STEP_PEERS>::new();
        sources.push(message);
        let context = Context { member, attachments: &self.attachments, channel, sources: &sources };
        let landed = context.landing(message.header.epoch, message.peer, bytes);
        let landed = landed
            .ok_or(ExecuteError::NoSource)
            .and_then(|(memory, at, bytes)| Span::new(memory, at, bytes).map_err(ExecuteError::from));
        let stored = landed.and_then(|from| {
            match end_of(member, &self.attachments, to, (offset, bytes), Direction::Receive)? {
                End::Mapped(to) => copy((&mut self.passes, slices), 0, &from, &to),
                End::Remote { attachment, offset } => {
                    let tag = tag(key, channel, step);
                    Ok(Remainder::Transfer(PendingTransfer {
                        attachment,
                        tag,
                        store: true,
                        offset,
                        span: from,
                    }))
                }
            }
        });
        match stored {
            Ok(Remainder::Done) => member.core.handle_completion(now, channel, step),
            Ok(Remainder::Copy) => return false,
            Ok(Remainder::Transfer(store)) => transfer(&mut self.attachments, &mut self.broken, store),
            Err(error) => member.fail_internal(&error.to_string()),
        }
        true
    }

    /// Copies from one local rank's tensor to another's, or goes on with it. Returns whether its memory here is done with.
    pub(crate) fn p2p_copy(
        &mut self,
        now: Nanos,
        key: Key,
        (from, to): ((Rank, Token), (Rank, Token)),
        range: (u64, u64),
        step: StepId,
        slices: &mut Slices,
    ) -> bool {
        let Some(member) = self.communicators.get_mut(key) else { return true };
        let channel = member.core.p2p_channel();
        let tag = tag(key, channel, step);
        let attachments = &self.attachments;
        let whole = member.call(from.1).map_or(0, |call| call.input.bytes);
        let ends = end_of(member, attachments, from, range, Direction::Send)
            .and_then(|from| Ok((from, end_of(member, attachments, to, range, Direction::Receive)?)));
        let first = ends.and_then(|ends| match ends {
            (End::Mapped(from), End::Mapped(to)) => copy((&mut self.passes, slices), whole, &from, &to),
            (End::Mapped(span), End::Remote { attachment, offset }) => {
                Ok(Remainder::Transfer(PendingTransfer { attachment, tag, store: true, offset, span }))
            }
            (End::Remote { attachment, offset }, End::Mapped(span)) => {
                Ok(Remainder::Transfer(PendingTransfer { attachment, tag, store: false, offset, span }))
            }
            (End::Remote { attachment, offset }, End::Remote { attachment: theirs, offset: there }) => {
                let span = member.p2p.reserve(range.1)?;
                let store = PendingTransfer {
                    attachment: theirs,
                    tag,
                    store: true,
                    offset: there,
                    span: span.clone(),
                };
                member.p2p.fetched.push((step, span.clone(), Next::Store(store)));
                Ok(Remainder::Transfer(PendingTransfer { attachment, tag, store: false, offset, span }))
            }
        });
        match first {
            Ok(Remainder::Done) => member.core.handle_completion(now, channel, step),
            Ok(Remainder::Copy) => return false,
            Ok(Remainder::Transfer(first)) => transfer(&mut self.attachments, &mut self.broken, first),
            Err(error) => member.fail_internal(&error.to_string()),
        }
        true
    }

    /// Reports a send or a receive that has ended well.
    pub(crate) fn p2p_complete(&mut self, key: Key, rank: Rank, token: Token, receipt: &P2pReceipt) {
        let Some(member) = self.communicators.get_mut(key) else { return };
        let within = member.local(receipt.peer).is_some();
        let Some(call) = member.call(token).copied() else { return };
        let Some(local) = member.local(rank).copied() else { return };
        let [inside, between] = ALGORITHMS;
        let bits = receipt.wire_bytes.saturating_mul(8 * 256) / receipt.signature.count.max(1);
        let completion = Completion {
            version: ABI_VERSION,
            status: Status::Ok.code(),
            communicator: local.handle.0,
            cookie: call.cookie.0,
            operation: receipt.number,
            wire_bytes: receipt.wire_bytes,
            bits_per_element_x256: u32::try_from(bits).unwrap_or(u32::MAX),
            algorithm: if within { inside } else { between },
            peer: receipt.peer.0,
            ..Completion::default()
        };
        member.forget(token);
        self.report(local.attachment, &completion);
    }
}

fn send_piece(
    member: &mut CommunicatorState,
    transport: &mut dyn Transport,
    message: PeerMessage,
    span: &Span,
    tag: Tag,
) {
    let empty = send_all(member, transport, &[message], Some(span), tag);
    debug_assert_eq!(empty, 0, "a piece has bytes");
}

/// A fetch or store of a piece has ended. Returns the transfer that follows from it.
pub(crate) fn handle_transferred(
    now: Nanos,
    member: &mut CommunicatorState,
    transport: &mut dyn Transport,
    (key, step): (Key, StepId),
) -> Option<PendingTransfer> {
    let channel = member.core.p2p_channel();
    match member.p2p.fetched.iter().position(|(of, ..)| *of == step) {
        None => member.core.handle_completion(now, channel, step),
        Some(at) => match member.p2p.fetched.swap_remove(at) {
            (_, span, Next::Send(message)) => {
                send_piece(member, transport, message, &span, tag(key, channel, step));
            }
            (.., Next::Store(store)) => return Some(store),
        },
    }
    None
}

/// Takes a descriptor of a send or a receive in.
pub(crate) fn submit(
    now: Nanos,
    member: &mut CommunicatorState,
    rank: Rank,
    (cookie, timeout, urgency): (Cookie, std::time::Duration, Urgency),
    checked: CheckedP2p,
) -> Result<(), Status> {
    let CheckedP2p { signature, input, output } = checked;
    let pending = Pending { rank: Some(rank), cookie, input, output, feedback: None, factor: 1.0, urgency };
    let token = member.remember(pending).ok_or(Status::Busy)?;
    let call = harmonaize_core::P2pCall { signature, token, timeout };
    let result = member.core.handle_p2p_call(now, rank, call);
    result.map_err(|error| {
        member.forget(token);
        refusal(&error)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growing_pieces_leave_no_memory_behind() {
        let mut p2p = P2pState::default();
        let mut under_way: Vec<Span> = (0..3).map(|_| p2p.reserve(64).unwrap()).collect();
        for bytes in 1..20_000_u64 {
            drop(under_way.remove(0));
            under_way.push(p2p.reserve(bytes).unwrap());
            assert_eq!(p2p.staging.len(), 3, "{bytes}");
        }
        // What is large enough serves small ones, too.
        drop(under_way);
        let large = p2p.reserve(10).unwrap();
        assert!(large.memory().bytes() >= 10 && p2p.staging.len() == 3);
    }
}
