//! What fuzzers call: readers of connections, which are private otherwise.

use super::handshake::{HELLO, Hello, PREFIX, PROOF, Prefix, Proof, REPLY, Reply, Status, WELCOME, Welcome};
use super::inbox::{Inbox, Input};
use super::records::{LinkProtection, Opened, Records};
use super::sys::Piece;
use crate::rings::Rings;
use crate::{Event, Landing, Ring};
use harmonaize_shm::{Memory, Span};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use zerocopy::FromBytes;

/// Takes a stream in, with two rings and a span that is posted. The stream comes in pieces of the lengths that its
/// first bytes give.
///
/// # Panics
/// Where a frame lands that no ring has room for.
pub fn stream(bytes: &[u8]) {
    let Some(([piece, post], bytes)) = bytes.split_first_chunk::<2>() else { return };
    let Ok(memory) = Memory::private(8192) else { return };
    let span = |offset, bytes| Span::new(&memory, offset, bytes).ok();
    let Ok((ours, mut theirs)) = UnixStream::pair() else { return };
    let _ = (ours.set_nonblocking(true), theirs.set_nonblocking(true));
    let (mut rings, mut inbox) = (Rings::default(), Inbox::new(2048, None));
    for (number, offset, slot_bytes) in [(3, 0, 512), (4, 4096, 64)] {
        let Some(memory) = span(offset, 2048) else { return };
        let attached = rings.attach(number, Ring { memory, slot_bytes, slots: 4 });
        assert!(attached.is_ok(), "{attached:?}");
    }
    if let Some(span) = span(7000, u64::from(*post)) {
        rings.post(Landing { ring: 3, sequence: 0 }, span);
    }
    for piece in bytes.chunks(usize::from(*piece).max(1) * 8) {
        if theirs.write(piece).is_err() {
            return;
        }
        loop {
            let mut sink = |event: Event<'_>| {
                if let Event::Received { payload: Some((landing, bytes)), .. } = event {
                    assert!(matches!((landing.ring, bytes), (3, ..=512) | (4, ..=64)), "{landing:?} {bytes}");
                }
            };
            match inbox.next(&mut rings, &mut sink) {
                Ok(true) => {}
                Ok(false) => match inbox.read(ours.as_fd(), &rings) {
                    Ok(Ok(Input::More | Input::Last | Input::Partial)) => {}
                    Ok(Ok(Input::End)) | Err(_) => return,
                    Ok(Err(_)) => break,
                },
                Err(_) => return,
            }
        }
    }
}

/// Takes records in: three of the peer's with the changes that the bytes say, or the bytes themselves.
///
/// # Panics
/// Where anything is given on that is no beginning of what the peer sealed.
pub fn records(bytes: &[u8]) {
    let Some((mode, edits)) = bytes.split_first() else { return };
    let protection = if mode & 1 == 0 { LinkProtection::Authenticated } else { LinkProtection::Encrypted };
    let hello = Hello::new([1; 16], 0, 1, protection, [2; 32]);
    let end = |initiate| Records::derive(protection, initiate, &[3; 32], &hello, &[4; 32]);
    let (Ok(Some(mut theirs)), Ok(Some(mut ours))) = (end(true), end(false)) else { return };
    let plain: [Vec<u8>; 3] = [1, 40, 300].map(|bytes| (0..bytes).map(|at| (at * 7) as u8).collect());
    let mut wires = plain.each_ref().map(|data| theirs.sealer.finish(data).unwrap_or_default());
    wires.rotate_left(usize::from(mode >> 1) % 3);
    let mut wire = wires.concat();
    for edit in edits.chunks_exact(3) {
        if let [low, high, change] = *edit
            && let Some(byte) = wire.get_mut(usize::from(u16::from_le_bytes([low, high])))
        {
            *byte ^= change;
        }
    }
    let (sent, most) = if mode & 128 == 0 { (&wire[..], plain.concat()) } else { (edits, Vec::new()) };
    let Ok((socket, mut peer)) = UnixStream::pair() else { return };
    if socket.set_nonblocking(true).is_err()
        || peer.set_nonblocking(true).is_err()
        || peer.write(sent).is_err()
    {
        return;
    }
    drop(peer);
    let (mut room, mut all) = ([0; 100], Vec::new());
    loop {
        let mut piece = [Piece { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() }];
        // SAFETY: the piece is `room`, which nothing else touches meanwhile.
        match unsafe { ours.opener.receive(socket.as_fd(), &mut piece) } {
            Ok(Ok(Opened::Bytes(got, _))) => all.extend_from_slice(room.get(..got).unwrap_or_default()),
            Ok(Ok(Opened::Partial)) => {}
            Ok(Ok(Opened::End) | Err(_)) | Err(_) => break,
        }
    }
    assert!(most.starts_with(&all), "what the peer did not seal came out: {all:?}");
}

/// Reads each message of the handshake.
///
/// # Panics
/// Where somebody who does not know the secret proves that he does.
pub fn handshake(bytes: &[u8]) {
    const SECRET: [u8; 32] = [7; 32];
    let ours = Hello::new([1; 16], 0, 1, LinkProtection::None, [2; 32]);
    let known = Hello::prefix(bytes) != Prefix::Unknown;
    assert!(!known || bytes.len() >= PREFIX, "a short prefix passes");
    if let Some(Ok(hello)) = bytes.get(..HELLO).map(Hello::read_from_bytes) {
        let reply = Reply::accept(&SECRET, &hello, [3; 32]);
        assert!(reply.proves(&SECRET, &hello), "our own proof is wrong");
    }
    if let Some(Ok(reply)) = bytes.get(..REPLY).map(Reply::read_from_bytes) {
        assert!(!reply.proves(&SECRET, &ours), "a stranger's proof is right");
        let _ =
            Status::of(reply.status).map(|status| status.refusal(reply.version.get(), LinkProtection::None));
    }
    if let Some(Ok(proof)) = bytes.get(..PROOF).map(Proof::read_from_bytes) {
        assert!(!proof.proves(&SECRET, &ours, &[3; 32]), "a stranger's proof is right");
    }
    if let Some(Ok(welcome)) = bytes.get(..WELCOME).map(Welcome::read_from_bytes) {
        let _ = Status::of(welcome.status);
    }
}
