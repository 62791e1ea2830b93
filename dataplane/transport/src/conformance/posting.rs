//! Spans offered for payloads in place of their slots: which receive, which do not, and when they are let go.

use super::*;

const SLOT: u32 = 3 << 16;

/// A link whose end `b` has ring 7 with slots of [`SLOT`] bytes.
fn ready(make: Maker<'_>, slots: u32) -> Result<(Pair, [LinkId; 2], Ring), String> {
    let mut pair = Pair::new(make)?;
    let links = pair.up(1, 1)?;
    let ring = ring(SLOT, slots)?;
    pair.b.transport.attach_ring(links[1], 7, ring.clone()).map_err(|e| e.to_string())?;
    Ok((pair, links, ring))
}

fn post(pair: &mut Pair, link: LinkId, sequence: u32, span: &Span) -> bool {
    pair.b.transport.post(link, Landing { ring: 7, sequence }, span.clone())
}

/// Sends a payload that only `sequence` gives.
fn send(pair: &mut Pair, link: LinkId, sequence: u32, bytes: u32) -> Outcome {
    let payload = (Landing { ring: 7, sequence }, filled(u64::from(sequence), bytes as usize)?, Tag(0));
    pair.send(At::A, link, 0, b"header", Some(payload))
}

/// Waits for a payload of [`send`] and compares it where the transport reports that it is. Returns whether that is the
/// posted span.
fn received(
    pair: &mut Pair,
    b: LinkId,
    ring: &Ring,
    (sequence, bytes): (u32, u32),
    span: &Span,
) -> Result<bool, String> {
    let event = pair.wait(At::B, b)?;
    let (header, payload) = (b"header".to_vec(), Some((Landing { ring: 7, sequence }, bytes)));
    let posted = matches!(event, OwnedEvent::Posted { .. });
    let expected = if posted {
        OwnedEvent::Posted { header, payload }
    } else {
        OwnedEvent::Received { header, payload }
    };
    ensure!(event == expected, "got {event:?} for {expected:?}");
    let content = if posted { read(span) } else { slot(ring, sequence, bytes)? };
    let right = content == pattern(u64::from(sequence), bytes as usize);
    ensure!(right, "payload {sequence} of {bytes} bytes, posted: {posted}: wrong bytes");
    Ok(posted)
}

pub(super) fn supports_posts(make: Maker<'_>) -> Result<bool, String> {
    let (mut pair, [_, b], _) = ready(make, 1)?;
    Ok(post(&mut pair, b, 0, &blank(100)?))
}

/// A payload of any size goes to the span posted for it and leaves its slot alone. The next one has the slot.
pub(super) fn posted_receives(make: Maker<'_>) -> Outcome {
    let (mut pair, [a, b], ring) = ready(make, 2)?;
    let mut sequence = u32::MAX - 5;
    for bytes in [1, 15, 4095, 65_536, SLOT - 1, SLOT] {
        let span = blank(bytes as usize)?;
        let before = slot(&ring, sequence, SLOT)?;
        let taken = post(&mut pair, b, sequence, &span);
        send(&mut pair, a, sequence, bytes)?;
        let posted = received(&mut pair, b, &ring, (sequence, bytes), &span)?;
        ensure!(posted == taken, "{bytes} bytes: post said {taken}, receipt {posted}");
        ensure!(!posted || slot(&ring, sequence, SLOT)? == before, "{bytes} bytes: the slot was written");
        for _ in 0..2 {
            sequence = sequence.wrapping_add(1);
            send(&mut pair, a, sequence, bytes)?;
            let posted = received(&mut pair, b, &ring, (sequence, bytes), &span)?;
            ensure!(!posted, "a payload that had no post says that it had");
        }
        sequence = sequence.wrapping_add(1);
    }
    Ok(())
}

/// A payload that is there, or a later one, cannot be posted for any more.
pub(super) fn posted_too_late(make: Maker<'_>) -> Outcome {
    let (mut pair, [a, b], ring) = ready(make, 2)?;
    let span = blank(1000)?;
    for sequence in 0..5 {
        send(&mut pair, a, sequence, 1000)?;
        received(&mut pair, b, &ring, (sequence, 1000), &span)?;
        ensure!(!post(&mut pair, b, sequence, &span), "taken though the payload is there");
        ensure!(sequence < 2 || !post(&mut pair, b, sequence - 2, &span), "taken for the payload before");
    }
    ensure!(read(&span) == vec![0; 1000], "written though refused");
    Ok(())
}

/// Spans that fit no payload, or not this one, receive nothing.
pub(super) fn posted_wrongly(make: Maker<'_>) -> Outcome {
    let (mut pair, [a, b], ring) = ready(make, 2)?;
    let (large, empty, right) = (blank(SLOT as usize + 1)?, blank(0)?, blank(1000)?);
    ensure!(!post(&mut pair, b, 0, &large), "larger than a slot");
    ensure!(!post(&mut pair, b, 0, &empty), "of no bytes");
    let unknown = pair.b.transport.post(b, Landing { ring: 6, sequence: 0 }, right.clone());
    ensure!(!unknown, "for a ring that is not there");
    ensure!(!post(&mut pair, LinkId(u64::MAX), 0, &right), "for a link that is not there");
    let taken = post(&mut pair, b, 0, &right);
    ensure!(!post(&mut pair, b, 0, &right) || !taken, "twice");
    ensure!(!post(&mut pair, b, 2, &right) || !taken, "for a slot that has a post");
    for (sequence, bytes) in [(0, 999), (1, 1001), (2, 1000)] {
        send(&mut pair, a, sequence, bytes)?;
        let posted = received(&mut pair, b, &ring, (sequence, bytes), &right)?;
        ensure!(!posted, "a payload of {bytes} bytes went to a span of 1000");
    }
    ensure!(read(&right) == vec![0; 1000], "a span was written by a payload of another size");
    Ok(())
}

/// A span is posted before, while or after the payload comes. The payload lies where the receipt reports, and a refused
/// span is not touched.
pub(super) fn posted_at_any_time(make: Maker<'_>) -> Outcome {
    let (mut pair, [a, b], ring) = ready(make, 4)?;
    let mut random = Random(17);
    let payload = |sequence: u32| 1 + sequence.wrapping_mul(7919) % SLOT;
    for round in 0..100 {
        let first = round * 4;
        let mut spans = Vec::new();
        let mut taken = Vec::new();
        for sequence in first..first + 4 {
            send(&mut pair, a, sequence, payload(sequence))?;
        }
        for sequence in first..first + 4 {
            for _ in 0..random.below(4) {
                pair.a.progress(1);
                pair.b.progress(1);
            }
            let span = blank(payload(sequence) as usize)?;
            taken.push(post(&mut pair, b, sequence, &span));
            spans.push(span);
        }
        for ((sequence, span), taken) in (first..).zip(&spans).zip(taken) {
            let posted = received(&mut pair, b, &ring, (sequence, payload(sequence)), span)?;
            ensure!(posted == taken, "{sequence}: post said {taken}, receipt {posted}");
            ensure!(
                posted || read(span).iter().all(|byte| *byte == 0),
                "{sequence}: a refused span was written"
            );
        }
    }
    Ok(())
}

/// Nothing is held, written or taken any more when a link has ended, though a payload was coming in.
pub(super) fn end_releases_posts(make: Maker<'_>) -> Outcome {
    for ours in [false, true] {
        let (mut pair, [a, b], _) = ready(make, 8)?;
        let memory = Memory::private(8 * SLOT as usize).map_err(|e| e.to_string())?;
        for sequence in 0..8 {
            let offset = u64::from(sequence * SLOT);
            let span = Span::new(&memory, offset, SLOT.into()).map_err(|e| e.to_string())?;
            post(&mut pair, b, sequence, &span);
        }
        for sequence in 0..4 {
            send(&mut pair, a, sequence, SLOT)?;
            pair.a.progress(1);
            pair.b.progress(1);
        }
        if ours {
            pair.b.transport.close(b);
        } else {
            pair.a.transport.close(a);
            pair.wait_down(At::B, b)?;
        }
        let held = Arc::strong_count(&memory) - 1;
        ensure!(held == 0, "{held} posted spans still held after the end");
        let span = Span::new(&memory, 0, memory.bytes() as u64).map_err(|e| e.to_string())?;
        write(&span, &pattern(3, memory.bytes()));
        pair.run_until_idle();
        ensure!(read(&span) == pattern(3, memory.bytes()), "a posted span was written after the end");
        ensure!(!post(&mut pair, b, 7, &blank(100)?), "taken after the end");
    }
    Ok(())
}
