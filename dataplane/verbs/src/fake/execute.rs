//! Work requests carried out: checks as a device does them, bytes moved, completions.

use super::Fault;
use super::state::{Device, Pair, Region, State, World};
use crate::calls::{CompletionEntry, GATHER, Kind, Piece, ReceiveEntry, SendEntry, Verb};
use crate::{AsyncEvent, GRH_BYTES, Gid, Status};
use harmonaize_shm::Memory;
use std::sync::Arc;

/// A range of a mapping.
type Range = (Arc<Memory>, u64, u64);

/// The ranges of a request, first ones first.
type Pieces = [Option<Range>; GATHER];

/// Carries out what the pair has waiting, unless its device holds it.
pub(super) fn run(world: &mut World, device: &str, number: u32) {
    loop {
        let Some(local) = world.devices.get_mut(device) else { return };
        if local.paused || local.lost {
            return;
        }
        let Some(pair) = local.pairs.get_mut(&number) else { return };
        let Some(entry) = pair.waiting.pop_front() else { return };
        let status = if pair.state == State::Error {
            Status::WorkRequestFlushed
        } else {
            let planned = local.faults.iter().position(|fault| matches!(fault, Fault::Complete(_)));
            match planned.and_then(|at| local.faults.remove(at)) {
                Some(Fault::Complete(status)) => status,
                _ => execute(world, device, number, &entry).err().unwrap_or(Status::Success),
            }
        };
        let Some(local) = world.devices.get_mut(device) else { return };
        if status != Status::Success {
            fail(local, number);
        }
        let Some(pair) = local.pairs.get(&number) else { return };
        let queue = pair.queue;
        if entry.signalled || status != Status::Success {
            local.complete(queue, CompletionEntry { status, ..blank(entry.id, number) });
        }
    }
}

fn blank(id: u64, number: u32) -> CompletionEntry {
    CompletionEntry {
        id,
        status: Status::Success,
        vendor: 0,
        with_immediate: false,
        immediate: 0,
        bytes: 0,
        number,
        source: 0,
    }
}

/// Puts a pair into the error state: its receive requests are flushed. Its sends are, when they are run.
pub(super) fn fail(device: &mut Device, number: u32) {
    let Some(pair) = device.pairs.get_mut(&number) else { return };
    pair.state = State::Error;
    let (queue, receives) = (pair.queue, std::mem::take(&mut pair.receives));
    for receive in receives {
        device.complete(
            queue,
            CompletionEntry { status: Status::WorkRequestFlushed, ..blank(receive.id, number) },
        );
    }
}

/// The bytes that a local key names, if they may be used so.
fn local(device: &Device, pair: &Pair, piece: &Piece, write: bool) -> Result<Range, Status> {
    let region = device.regions.get(&piece.key).filter(|region| region.domain == pair.domain);
    let region =
        region.filter(|region| !write || region.access.local_write).ok_or(Status::LocalProtection)?;
    within(region, piece.address, piece.bytes.into()).ok_or(Status::LocalProtection)
}

fn within(region: &Region, address: u64, bytes: u64) -> Option<Range> {
    let offset = address.checked_sub(region.memory.memory().address())?;
    let end = offset.checked_add(bytes)?;
    (end <= region.memory.memory().bytes() as u64)
        .then(|| (Arc::clone(region.memory.memory()), offset, bytes))
}

/// The bytes that a remote key names, if peers may use them so.
fn remote(device: &Device, pair: &Pair, entry: &SendEntry, bytes: u64) -> Result<Range, Status> {
    let read = entry.verb == Verb::Read;
    let may = |access: crate::Access| if read { access.remote_read } else { access.remote_write };
    let region = device.regions.get(&entry.remote_key).filter(|region| region.domain == pair.domain);
    let region = region.filter(|region| may(region.access) && may(pair.access));
    region.and_then(|region| within(region, entry.remote, bytes)).ok_or(Status::RemoteAccess)
}

/// Copies through a buffer of this thread's: both sides may be written by others meanwhile.
fn copy(from: &Range, to: &Range) -> Result<(), Status> {
    let mut buffer = [0; 4096];
    let mut done = 0;
    while done < from.2 {
        let bytes = (from.2 - done).min(buffer.len() as u64) as usize;
        let part = buffer.get_mut(..bytes).ok_or(Status::Fatal)?;
        from.0.read(from.1 + done, part).map_err(|_| Status::LocalProtection)?;
        to.0.write(to.1 + done, part).map_err(|_| Status::RemoteAccess)?;
        done += bytes as u64;
    }
    Ok(())
}

fn execute(world: &mut World, device: &str, number: u32, entry: &SendEntry) -> Result<(), Status> {
    let own = world.devices.get(device).ok_or(Status::Fatal)?;
    let pair = own.pairs.get(&number).ok_or(Status::Fatal)?;
    let pieces = entry.pieces.get(..entry.count).ok_or(Status::LocalLength)?;
    let write = entry.verb == Verb::Read;
    // In place: traffic on the fake allocates no more than on a device.
    let mut ranges: Pieces = [const { None }; GATHER];
    for (range, piece) in ranges.iter_mut().zip(pieces) {
        *range = Some(local(own, pair, piece, write)?);
    }
    let bytes = ranges.iter().flatten().map(|range| range.2).sum();
    if !own.up {
        return if pair.kind == Kind::Datagram { Ok(()) } else { Err(Status::TransportRetriesExceeded) };
    }
    let source = own.gid;
    match pair.kind {
        Kind::Datagram => {
            datagram(world, (device, number), entry, &ranges, bytes);
            Ok(())
        }
        Kind::Reliable => {
            let (gid, peer) = pair.remote;
            reliable(world, (source, number), (gid, peer), entry, &ranges, bytes)
        }
    }
}

/// Carries out a request at the peer of a connected pair.
fn reliable(
    world: &mut World,
    from: (Gid, u32),
    to: (Gid, u32),
    entry: &SendEntry,
    pieces: &Pieces,
    bytes: u64,
) -> Result<(), Status> {
    let unreachable = Status::TransportRetriesExceeded;
    let device = world.at(to.0).ok_or(unreachable)?;
    let pair = device.pairs.get_mut(&to.1).ok_or(unreachable)?;
    let open = matches!(pair.state, State::ReadyToReceive | State::ReadyToSend);
    if !open || pair.kind != Kind::Reliable || pair.remote != from {
        return Err(unreachable);
    }
    if entry.verb == Verb::WriteWithImmediate && pair.receives.is_empty() {
        return Err(Status::ReceiverNotReadyRetriesExceeded);
    }
    let pair = device.pairs.get(&to.1).ok_or(unreachable)?;
    if bytes > 0 {
        let range = match remote(device, pair, entry, bytes) {
            Ok(range) => range,
            Err(status) => {
                // The responder of a bad key fails too.
                device.push_event(AsyncEvent::QueuePairFatal(to.1));
                fail(device, to.1);
                return Err(status);
            }
        };
        let mut at = range.1;
        for piece in pieces.iter().flatten() {
            let there = (Arc::clone(&range.0), at, piece.2);
            let (from, to) = if entry.verb == Verb::Read { (&there, piece) } else { (piece, &there) };
            copy(from, to)?;
            at += piece.2;
        }
    }
    if entry.verb == Verb::WriteWithImmediate {
        let pair = device.pairs.get_mut(&to.1).ok_or(unreachable)?;
        let receive = pair.receives.pop_front().ok_or(Status::ReceiverNotReadyRetriesExceeded)?;
        let (queue, immediate) = (pair.queue, entry.immediate);
        let arrived = CompletionEntry {
            with_immediate: true,
            immediate,
            bytes: u32::try_from(bytes).unwrap_or(u32::MAX),
            ..blank(receive.id, to.1)
        };
        device.complete(queue, arrived);
    }
    Ok(())
}

/// Delivers a datagram to whoever it reaches; lost where there is nobody, no buffer or a wrong key.
fn datagram(world: &mut World, from: (&str, u32), entry: &SendEntry, pieces: &Pieces, bytes: u64) {
    let Some((handle, number, key)) = &entry.destination else { return };
    let Some(address) = handle.downcast_ref::<super::objects::Address>() else { return };
    let header = world.devices.get(from.0).map_or([0; GRH_BYTES], |device| header(device.gid));
    for device in world.devices.values_mut() {
        if !device.up || device.lost {
            continue;
        }
        let gid = device.gid;
        let reached = |(at, pair): (&u32, &Pair)| {
            let named = gid == address.gid && at == number;
            let takes = pair.kind == Kind::Datagram && pair.queue_key == *key;
            (takes && named).then_some(*at)
        };
        let reached: Vec<u32> = device.pairs.iter().filter_map(reached).collect();
        for at in reached {
            let Some(pair) = device.pairs.get_mut(&at) else { continue };
            let Some(receive) = pair.receives.pop_front() else { continue };
            let queue = pair.queue;
            let status = land(device, at, &receive, &header, pieces, bytes).err().unwrap_or(Status::Success);
            let bytes = u32::try_from(bytes + GRH_BYTES as u64).unwrap_or(u32::MAX);
            let arrived = CompletionEntry { status, bytes, source: from.1, ..blank(receive.id, at) };
            device.complete(queue, arrived);
            if status != Status::Success {
                fail(device, at);
            }
        }
    }
}

/// What stands before a datagram's payload: of IPv4 its header in the last 20 bytes, else the global routing header. Of both the version
/// and the sender alone.
fn header(from: crate::Gid) -> [u8; GRH_BYTES] {
    let mut header = [0; GRH_BYTES];
    let mut set = |at: usize, bytes: &[u8]| {
        header.iter_mut().skip(at).zip(bytes).for_each(|(to, byte)| *to = *byte);
    };
    match from.ip() {
        Some(std::net::IpAddr::V4(address)) => {
            set(20, &[0x45]);
            set(32, &address.octets());
        }
        _ => {
            set(0, &[0x60]);
            set(8, &from.0);
        }
    }
    header
}

fn land(
    device: &Device,
    number: u32,
    receive: &ReceiveEntry,
    header: &[u8],
    pieces: &Pieces,
    bytes: u64,
) -> Result<(), Status> {
    let pair = device.pairs.get(&number).ok_or(Status::Fatal)?;
    let (memory, offset, room) = local(device, pair, &receive.piece, true)?;
    if bytes + GRH_BYTES as u64 > room {
        return Err(Status::LocalLength);
    }
    memory.write(offset, header).map_err(|_| Status::LocalProtection)?;
    let mut at = offset + GRH_BYTES as u64;
    for piece in pieces.iter().flatten() {
        copy(piece, &(Arc::clone(&memory), at, piece.2))?;
        at += piece.2;
    }
    Ok(())
}
