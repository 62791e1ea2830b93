//! What tenants' processes send, and what they are sent.

use crate::input::Input;
use harmonaize_abi::session::{
    Answer, AuthRequest, Hello, Refused, Request, Welcome, decode, decode_first, encode, encode_first, length,
};
use harmonaize_abi::{Completion, Tag};
use harmonaize_shm::{AgentEnd, MappedEnd, MappedTenant, Memory, RemoteEnd, RemoteTenant, Span, TenantEnd};
use rustix::net::SendFlags;
use std::os::fd::OwnedFd;
use zerocopy::FromBytes;

/// What is read is written as it was, or is too long for a message.
pub(super) fn session(bytes: &[u8]) {
    let mut input = Input(bytes);
    let kind = input.u8() % 6;
    let message = input.0;
    // Whoever sent the bytes may have written a number in more bytes than it needs: the value counts, not they.
    macro_rules! again {
        ($kind:ty, $decode:ident, $encode:ident) => {
            if let Ok(read) = $decode::<$kind>(message)
                && let Ok(written) = $encode(&read)
            {
                assert_eq!(length(*written.first_chunk().unwrap()).unwrap(), written.len() - 4);
                let again: $kind = $decode(&written[4..]).unwrap();
                assert_eq!($encode(&again).unwrap(), written);
            }
        };
    }
    match kind {
        0 => again!(AuthRequest, decode_first, encode_first),
        1 => again!(Hello, decode_first, encode_first),
        2 => again!(Result<Welcome, Refused>, decode_first, encode_first),
        3 => again!(Answer, decode, encode),
        _ => again!(Request, decode, encode),
    }
    let Ok(request) = decode::<Request>(message) else { return };
    match request {
        Request::Negotiate { propose: Some(constraints), .. } => drop(constraints.check()),
        Request::Iteration { knobs, .. } if knobs.check().is_ok() => drop(knobs.fallback()),
        Request::Hint { hints, .. } => drop(hints.check()),
        Request::Batch { batch, .. } => drop(batch.check()),
        Request::Runner { report, .. } | Request::Elastic { report, .. } => drop(report.check()),
        Request::Bid { bid, .. } => drop(bid.check()),
        _ => {}
    }
}

/// What passes the checks lies in the memory.
pub(super) fn descriptor(bytes: &[u8]) {
    harmonaize_engine::fuzzing::descriptor(bytes);
}

/// Whatever stands in the rings' memory, each call ends with a value or an error.
pub(super) fn rings(bytes: &[u8]) {
    const ENTRIES: u32 = 4;
    let mut input = Input(bytes);
    let (mut end, [arena, rings, doorbell]) = MappedEnd::create(4096, ENTRIES, Box::new(())).unwrap();
    let room = rustix::fs::fstat(&rings).unwrap().st_size as u64;
    let theirs = Memory::map(rings.try_clone().unwrap(), room).unwrap();
    let bell: OwnedFd = doorbell.try_clone().unwrap();
    let mut tenant = MappedTenant::open([arena, rings, doorbell], 4096, ENTRIES).unwrap();
    while !input.is_empty() {
        match input.u8() % 10 {
            0..3 => {
                let (place, near) = (u64::from(input.u16()), input.u8());
                let value = if near < 128 { u64::from(near) } else { input.u64() };
                let _ = theirs.write(place * 8 % (room - 8), &value.to_le_bytes());
            }
            // A control word: each is on two cache lines of its own.
            3 => {
                let _ = theirs.write(u64::from(input.u8() % 6) * 128, &u64::from(input.u8()).to_le_bytes());
            }
            4 => drop(end.submission()),
            5 => drop(end.complete(&Completion::read_from_bytes(&input.array::<64>()).unwrap())),
            6 => drop((end.prepare_sleep(), end.flush())),
            7 => end.cancel_sleep(input.u8().is_multiple_of(2)),
            8 => drop((tenant.completion(), tenant.prepare_sleep())),
            _ => drop(rustix::net::send(&bell, &[input.u8(); 3], SendFlags::NOSIGNAL | SendFlags::DONTWAIT)),
        }
    }
}

/// Both ends of a stream of frames take any bytes from the other, while tensors are on their way.
pub(super) fn remote(bytes: &[u8]) {
    let mut input = Input(bytes);
    let quietly = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let memory = Memory::private(8192).unwrap();
    if input.u8() % 2 == 0 {
        let (mut end, theirs) = RemoteEnd::create(8192, 4).unwrap();
        let (mut done, mut tag) = (0, 0);
        while !input.is_empty() {
            tag += 1;
            let span = Span::new(&memory, 64 * u64::from(input.u8() % 64), u64::from(input.u8())).unwrap();
            match input.u8() % 3 {
                0 => drop(end.fetch(Tag(tag), u64::from(input.u16()), span)),
                1 => drop(end.store(Tag(tag), span, u64::from(input.u16()))),
                _ => {}
            }
            let _ = rustix::net::send(&theirs, input.piece(), quietly);
            while let Ok(1..) = end.progress(&mut |_| done += 1) {}
            while let Ok(Some(_)) = end.submission() {}
            assert!(done <= tag, "more transfers have ended than were begun");
        }
    } else {
        let (ours, theirs) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::STREAM,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        let mut tenant = RemoteTenant::open(ours, 8192, 4).unwrap();
        while !input.is_empty() {
            let _ = rustix::net::send(&theirs, input.piece(), quietly);
            while let Ok(1..) = tenant.progress() {}
            while let Ok(Some(_)) = tenant.completion() {}
        }
    }
}
