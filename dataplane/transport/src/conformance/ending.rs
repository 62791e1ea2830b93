//! Links that must not come up, and links that end: who is told what, and what is released.

use super::*;

/// The peer's introduction may come later than ours.
pub(super) fn late_peer(make: Maker<'_>) -> Outcome {
    for late in [At::A, At::B] {
        let mut pair = Pair::new(make)?;
        let early = if late == At::A { At::B } else { At::A };
        let introduction = pair.introduction(early, 1, 2);
        let first = pair.open(early, introduction)?;
        for _ in 0..10 {
            pair.run_once();
        }
        let introduction = pair.introduction(late, 1, 2);
        let second = pair.open(late, introduction)?;
        for (at, link) in [(early, first), (late, second)] {
            let event = pair.wait(at, link)?;
            ensure!(event == OwnedEvent::Up, "{late:?} late: got {event:?}");
        }
    }
    Ok(())
}

/// A peer that never comes ends the link in bounded time.
pub(super) fn absent_peer(make: Maker<'_>) -> Outcome {
    for at in [At::A, At::B] {
        let mut pair = Pair::new(make)?;
        let introduction = pair.introduction(at, 1, 1);
        let link = pair.open(at, introduction)?;
        let event = pair.wait(at, link)?;
        let right = matches!(event, OwnedEvent::Down(DownReason::Connect(_) | DownReason::Refused(_)));
        ensure!(right, "got {event:?}");
    }
    Ok(())
}

/// Who has the wrong secret is refused, and other links do not notice.
pub(super) fn wrong_secret(make: Maker<'_>) -> Outcome {
    let mut pair = Pair::new(make)?;
    let [good, far] = pair.up(9, 1)?;
    let mut wrong = pair.introduction(At::A, 1, 1);
    wrong.secret[31] ^= 1;
    let a = pair.open(At::A, wrong)?;
    let right = pair.introduction(At::B, 1, 1);
    let b = pair.open(At::B, right)?;
    for (at, link) in [(At::A, a), (At::B, b)] {
        let event = pair.wait(at, link)?;
        ensure!(matches!(event, OwnedEvent::Down(DownReason::Refused(_))), "{at:?} got {event:?}");
    }
    still_works(&mut pair, good, far)
}

pub(super) fn path_counts_differ(make: Maker<'_>) -> Outcome {
    let mut pair = Pair::new(make)?;
    let (two, three) = (pair.introduction(At::A, 1, 2), pair.introduction(At::B, 1, 3));
    let links = [(At::A, pair.open(At::A, two)?), (At::B, pair.open(At::B, three)?)];
    for (at, link) in links {
        let event = pair.wait(at, link)?;
        ensure!(matches!(event, OwnedEvent::Down(DownReason::Refused(_))), "{at:?} got {event:?}");
    }
    Ok(())
}

pub(super) fn same_name_twice(make: Maker<'_>) -> Outcome {
    let mut pair = Pair::new(make)?;
    let [good, far] = pair.up(1, 1)?;
    for at in [At::A, At::B] {
        let introduction = pair.introduction(at, 1, 1);
        let again = pair.side(at).transport.open(introduction);
        ensure!(matches!(again, Err(DownReason::Taken)), "{at:?}: {again:?}");
    }
    still_works(&mut pair, good, far)
}

fn breach(make: Maker<'_>, number: u16, bytes: usize) -> Outcome {
    let mut pair = Pair::new(make)?;
    let [good, far] = pair.up(9, 1)?;
    let [a, b] = pair.up(1, 1)?;
    pair.b.transport.attach_ring(b, 3, ring(1000, 2)?).map_err(|e| e.to_string())?;
    let landing = Landing { ring: number, sequence: 0 };
    pair.send(At::A, a, 0, b"bad", Some((landing, filled(1, bytes)?, Tag(1))))?;
    let event = pair.wait(At::B, b)?;
    ensure!(matches!(event, OwnedEvent::Down(DownReason::Protocol(_))), "got {event:?}");
    pair.wait_down(At::A, a)?;
    pair.run_until_idle();
    ensure!(pair.a.take(a).is_none() && pair.b.take(b).is_none(), "events after Down");
    let sent = pair.b.transport.send(b, 0, b"", None);
    ensure!(sent == Err(SendError::Down), "send after Down: {sent:?}");
    still_works(&mut pair, good, far)
}

pub(super) fn unknown_ring(make: Maker<'_>) -> Outcome {
    breach(make, 4, 10)?;
    breach(make, u16::MAX, 0)
}

pub(super) fn oversize_payload(make: Maker<'_>) -> Outcome {
    breach(make, 3, 1001)?;
    breach(make, 3, 1 << 20)
}

pub(super) fn peer_closes(make: Maker<'_>) -> Outcome {
    for (closes, stays) in [(At::A, At::B), (At::B, At::A)] {
        let mut pair = Pair::new(make)?;
        let [good, far] = pair.up(9, 1)?;
        let links = pair.up(1, 3)?;
        let [ours, theirs] = if closes == At::A { links } else { [links[1], links[0]] };
        pair.side(closes).transport.close(ours);
        let event = pair.wait(stays, theirs)?;
        ensure!(event == OwnedEvent::Down(DownReason::Closed), "{stays:?} got {event:?}");
        pair.run_until_idle();
        let silent = pair.side(closes).take(ours).is_none() && pair.side(stays).take(theirs).is_none();
        ensure!(silent, "events after the end");
        let sent = pair.side(closes).transport.send(ours, 0, b"", None);
        ensure!(sent == Err(SendError::Down), "send after close: {sent:?}");
        still_works(&mut pair, good, far)?;
    }
    Ok(())
}

/// Frames without payload that were queued before `close` arrive, though the payloads before them are gone.
pub(super) fn queued_headers_arrive_after_close(make: Maker<'_>) -> Outcome {
    for paths in 1..=3_u16 {
        let mut pair = Pair::new(make)?;
        let [a, b] = pair.up(1, usize::from(paths))?;
        for path in 0..paths {
            pair.send(At::A, a, path, &[path as u8], None)?;
        }
        pair.a.transport.close(a);
        let mut heard = 0;
        loop {
            match pair.wait(At::B, b)? {
                OwnedEvent::Received { header, payload: None } if header.len() == 1 => heard += 1,
                OwnedEvent::Down(DownReason::Closed) => break,
                event => return Err(format!("got {event:?}")),
            }
        }
        ensure!(heard == paths, "{heard} of {paths} last words arrived");
    }
    Ok(())
}

/// After `close` no payload is held or reported, though many were queued.
pub(super) fn close_releases_payloads(make: Maker<'_>) -> Outcome {
    let mut pair = Pair::new(make)?;
    let [a, b] = pair.up(1, 1)?;
    let landing = ring(1 << 20, 2)?;
    let landing_memory = landing.memory.clone();
    pair.b.transport.attach_ring(b, 0, landing).map_err(|e| e.to_string())?;
    let memory = Memory::private(1 << 20).map_err(|e| e.to_string())?;
    let mut queued = 0;
    for sequence in 0..32 {
        let span = Span::new(&memory, 0, 1 << 20).map_err(|e| e.to_string())?;
        let frame = (Landing { ring: 0, sequence }, span, Tag(sequence.into()));
        queued += usize::from(pair.a.transport.send(a, 0, b"", Some(frame)).is_ok());
        pair.a.progress(2);
    }
    ensure!(queued > 0, "nothing was taken");
    pair.a.seen.clear();
    pair.a.transport.close(a);
    let held = Arc::strong_count(&memory) - 1;
    ensure!(held == 0, "{held} spans still held after close");
    let reason = pair.wait_down(At::B, b)?;
    ensure!(reason == DownReason::Closed, "got {reason:?}");
    pair.run_until_idle();
    ensure!(pair.a.seen.is_empty(), "events after close: {:?}", pair.a.seen);
    drop(pair);
    ensure!(landing_memory.bytes() == 2 << 20, "the ring's memory changed");
    Ok(())
}

/// An endpoint that goes away takes its links with it.
pub(super) fn dropped_endpoint(make: Maker<'_>) -> Outcome {
    let mut pair = Pair::new(make)?;
    let [_, first] = pair.up(1, 1)?;
    let [_, second] = pair.up(2, 2)?;
    let Pair { a, b } = pair;
    drop(a);
    let [spare, _] = make()?;
    let mut pair = Pair { a: Side { transport: spare, seen: VecDeque::new() }, b };
    for link in [first, second] {
        let event = pair.wait(At::B, link)?;
        ensure!(event == OwnedEvent::Down(DownReason::Closed), "got {event:?}");
    }
    Ok(())
}

/// A name is free again once its link has ended at both ends; the number is new.
pub(super) fn name_again_after_close(make: Maker<'_>) -> Outcome {
    let mut pair = Pair::new(make)?;
    let mut old = Vec::new();
    for _ in 0..5 {
        let [a, b] = pair.up(1, 2)?;
        ensure!(!old.contains(&a), "{a:?} was used before");
        old.push(a);
        still_works(&mut pair, a, b)?;
        pair.b.transport.close(b);
        pair.wait_down(At::A, a)?;
    }
    Ok(())
}

/// A frame there and one back.
fn still_works(pair: &mut Pair, a: LinkId, b: LinkId) -> Outcome {
    for (from, link, to, far) in [(At::A, a, At::B, b), (At::B, b, At::A, a)] {
        pair.send(from, link, 0, b"still here", None)?;
        let event = pair.wait(to, far)?;
        let expected = OwnedEvent::Received { header: b"still here".to_vec(), payload: None };
        ensure!(event == expected, "another link was disturbed: {event:?}");
    }
    Ok(())
}
