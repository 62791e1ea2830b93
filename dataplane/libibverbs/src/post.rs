//! Work requests as linked lists of libibverbs' structs, built in memory that is kept.

use super::objects::{AddressHandle, QueuePair, object};
use super::outcome;
use harmonaize_verbs::Depths;
use harmonaize_verbs::calls::{GATHER, Piece, ReceiveEntry, Refused, SendEntry, Verb};
use rdma_sys::{ibv_recv_wr, ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wr_opcode, rdma_t, ud_t};
use rustix::io::Errno;
use std::ffi::c_int;
use std::sync::PoisonError;

/// Room for the structs of one post.
pub(super) struct Scratch {
    sends: Vec<ibv_send_wr>,
    receives: Vec<ibv_recv_wr>,
    pieces: Vec<[ibv_sge; GATHER]>,
}

// SAFETY: the pointers in it are written and read within one post, under a lock; in between they mean nothing.
unsafe impl Send for Scratch {}

impl Scratch {
    pub(super) fn with_room(depths: &Depths) -> Self {
        let (sends, receives) = (depths.sends as usize, depths.receives as usize);
        Self {
            sends: Vec::with_capacity(sends),
            receives: Vec::with_capacity(receives),
            pieces: Vec::with_capacity(sends.max(receives)),
        }
    }
}

fn sge(piece: &Piece) -> ibv_sge {
    ibv_sge { addr: piece.address, length: piece.bytes, lkey: piece.key }
}

fn send_request(entry: &SendEntry) -> Result<ibv_send_wr, Errno> {
    // SAFETY: numbers, pointers, and unions of them, for which zero is a value.
    let mut request: ibv_send_wr = unsafe { std::mem::zeroed() };
    request.wr_id = entry.id;
    request.num_sge = entry.count.min(GATHER) as c_int;
    request.opcode = match entry.verb {
        Verb::Write => ibv_wr_opcode::IBV_WR_RDMA_WRITE,
        Verb::WriteWithImmediate => ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM,
        Verb::Read => ibv_wr_opcode::IBV_WR_RDMA_READ,
        Verb::Send => ibv_wr_opcode::IBV_WR_SEND,
    };
    if entry.signalled {
        request.send_flags |= ibv_send_flags::IBV_SEND_SIGNALED.0;
    }
    if entry.inline {
        request.send_flags |= ibv_send_flags::IBV_SEND_INLINE.0;
    }
    request.imm_data_invalidated_rkey_union.imm_data = entry.immediate.to_be();
    if let Some((handle, number, key)) = &entry.destination {
        let ah = object::<AddressHandle>(handle)?.raw();
        request.wr.ud = ud_t { ah, remote_qpn: *number, remote_qkey: *key };
    } else {
        request.wr.rdma = rdma_t { remote_addr: entry.remote, rkey: entry.remote_key };
    }
    Ok(request)
}

/// How many requests come before the one that was refused.
fn taken<T>(list: &[T], refused: *const T) -> usize {
    list.iter().position(|request| std::ptr::eq(request, refused)).unwrap_or(0)
}

/// Posts the entries as one list.
pub(super) fn send(pair: &QueuePair, entries: &[SendEntry]) -> Result<(), Refused> {
    let mut scratch = pair.scratch().lock().unwrap_or_else(PoisonError::into_inner);
    let Scratch { sends, pieces, .. } = &mut *scratch;
    sends.clear();
    pieces.clear();
    for entry in entries {
        sends.push(send_request(entry).map_err(|errno| Refused { taken: 0, errno })?);
        pieces.push(entry.pieces.each_ref().map(sge));
    }
    let mut next = std::ptr::null_mut();
    for (request, pieces) in sends.iter_mut().zip(pieces.iter_mut()).rev() {
        request.sg_list = pieces.as_mut_ptr();
        request.next = next;
        next = request;
    }
    if next.is_null() {
        return Ok(());
    }
    let mut bad = std::ptr::null_mut();
    // SAFETY: the pair lives; the list ends with null, its structs and pieces stay in place under the lock and are copied by
    // the call. The memory that the pieces name is registered and held until the requests are settled; of inline requests
    // it is read by the call itself.
    let posted = outcome(unsafe { rdma_sys::ibv_post_send(pair.raw(), next, &raw mut bad) });
    posted.map_err(|errno| Refused { taken: taken(sends, bad), errno })
}

/// Posts the entries as one list.
pub(super) fn receive(pair: &QueuePair, entries: &[ReceiveEntry]) -> Result<(), Refused> {
    let mut scratch = pair.scratch().lock().unwrap_or_else(PoisonError::into_inner);
    let Scratch { receives, pieces, .. } = &mut *scratch;
    receives.clear();
    pieces.clear();
    for entry in entries {
        let num_sge = c_int::from(entry.piece.bytes > 0);
        let (next, sg_list) = (std::ptr::null_mut(), std::ptr::null_mut());
        receives.push(ibv_recv_wr { wr_id: entry.id, next, sg_list, num_sge });
        pieces.push([sge(&entry.piece); GATHER]);
    }
    let mut next = std::ptr::null_mut();
    for (request, pieces) in receives.iter_mut().zip(pieces.iter_mut()).rev() {
        request.sg_list = pieces.as_mut_ptr();
        request.next = next;
        next = request;
    }
    if next.is_null() {
        return Ok(());
    }
    let mut bad = std::ptr::null_mut();
    // SAFETY: as in `send`; the memory is held until the requests are settled or the pair is destroyed.
    let posted = outcome(unsafe { rdma_sys::ibv_post_recv(pair.raw(), next, &raw mut bad) });
    posted.map_err(|errno| Refused { taken: taken(receives, bad), errno })
}
