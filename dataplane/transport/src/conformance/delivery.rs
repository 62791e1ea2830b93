//! Frames and payloads arrive whole, in order, once, and where they were sent to.

use super::*;
use crate::Flow;
use crate::MAX_HEADER;

pub(super) fn comes_up(make: Maker<'_>) -> Outcome {
    for paths in 1..=4 {
        let mut pair = Pair::new(make)?;
        let links = pair.up(1, paths)?;
        for path in 0..paths as u16 {
            let [a, b] = [(At::A, links[0]), (At::B, links[1])]
                .map(|(at, link)| pair.side(at).transport.flow(link, path));
            ensure!(a == b.map(turned), "path {path} looks like {a:?} from one end, {b:?} from the other");
        }
        pair.run_until_idle();
        ensure!(pair.a.seen.is_empty() && pair.b.seen.is_empty(), "events beside Up with {paths} paths");
    }
    Ok(())
}

/// A flow as the other end sees it.
fn turned(flow: Flow) -> Flow {
    match flow {
        Flow::Tcp { local, remote } => Flow::Tcp { local: remote, remote: local },
        Flow::Roce { local, remote, local_pair, remote_pair, source_port } => Flow::Roce {
            local: remote,
            remote: local,
            local_pair: remote_pair,
            remote_pair: local_pair,
            source_port,
        },
    }
}

/// Header and payload sizes at every edge, in both directions.
pub(super) fn every_size(make: Maker<'_>) -> Outcome {
    const SLOT: u32 = 3 << 16;
    let mut pair = Pair::new(make)?;
    let [a, b] = pair.up(1, 1)?;
    for (from, link, to, far) in [(At::A, a, At::B, b), (At::B, b, At::A, a)] {
        let landing_ring = ring(SLOT, 2)?;
        pair.side(to).transport.attach_ring(far, 7, landing_ring.clone()).map_err(|e| e.to_string())?;
        let mut sequence = 0;
        for header_bytes in [0, 1, 15, 16, MAX_HEADER - 1, MAX_HEADER] {
            for bytes in [None, Some(0), Some(1), Some(4095), Some(65_536), Some(SLOT - 1), Some(SLOT)] {
                sequence += 1;
                let header = pattern(u64::from(sequence), header_bytes);
                let landing = Landing { ring: 7, sequence };
                let seed = u64::from(sequence) << 32;
                let payload = match bytes {
                    Some(bytes) => Some((landing, filled(seed, bytes as usize)?, Tag(seed))),
                    None => None,
                };
                pair.send(from, link, 0, &header, payload)?;
                if bytes.is_some() {
                    let event = pair.wait(from, link)?;
                    ensure!(event == OwnedEvent::Sent(Tag(seed)), "expected Sent({seed}), got {event:?}");
                }
                let event = pair.wait(to, far)?;
                let expected = OwnedEvent::Received { header, payload: bytes.map(|bytes| (landing, bytes)) };
                ensure!(event == expected, "header {header_bytes}, payload {bytes:?}: got {event:?}");
                let bytes = bytes.unwrap_or(0);
                let right = slot(&landing_ring, sequence, bytes)? == pattern(seed, bytes as usize);
                ensure!(right, "header {header_bytes}, payload {bytes}: wrong bytes");
            }
        }
    }
    Ok(())
}

/// Frames of one path arrive in the order sent, whatever their sizes.
pub(super) fn order_per_path(make: Maker<'_>) -> Outcome {
    const PATHS: usize = 3;
    const FRAMES: u32 = 600;
    let mut pair = Pair::new(make)?;
    let [a, b] = pair.up(1, PATHS)?;
    let landing_ring = ring(1 << 15, 4)?;
    pair.b.transport.attach_ring(b, 0, landing_ring).map_err(|e| e.to_string())?;
    let payload = filled(5, 1 << 15)?;
    let mut random = Random(11);
    for number in 0..FRAMES {
        let path = (number % PATHS as u32) as u16;
        let mut header = vec![path as u8];
        header.extend_from_slice(&number.to_le_bytes());
        let bytes = random.below(payload.bytes() + 1) as u64;
        let span = payload.range(0, bytes).map_err(|e| e.to_string())?;
        let with = random.below(3) == 0;
        let payload = with.then_some((Landing { ring: 0, sequence: number }, span, Tag(number.into())));
        pair.send(At::A, a, path, &header, payload)?;
    }
    let mut next: [u32; PATHS] = std::array::from_fn(|path| path as u32);
    for _ in 0..FRAMES {
        let OwnedEvent::Received { header, .. } = pair.wait(At::B, b)? else {
            return Err("not a frame".into());
        };
        let Some((&path, number)) = header.split_first() else { return Err("empty header".into()) };
        let number = u32::from_le_bytes(number.try_into().map_err(|_| "short header")?);
        let Some(expected) = next.get_mut(usize::from(path)) else { return Err("no such path".into()) };
        ensure!(number == *expected, "path {path}: frame {number} where {expected} was next");
        *expected += PATHS as u32;
    }
    Ok(())
}

/// A ring is used many times over, up to the end of the sequence numbers. Its last slot and its first are among those
/// used.
pub(super) fn ring_wraps(make: Maker<'_>) -> Outcome {
    let mut pair = Pair::new(make)?;
    let [a, b] = pair.up(1, 1)?;
    for (number, slots) in [(0, 1), (1, 2), (2, 3), (u16::MAX, 5)] {
        let landing_ring = ring(1000, slots)?;
        pair.b.transport.attach_ring(b, number, landing_ring.clone()).map_err(|e| e.to_string())?;
        for sequence in (0..40).chain(u32::MAX - 20..=u32::MAX) {
            let seed = u64::from(sequence) ^ u64::from(number) << 40;
            let landing = Landing { ring: number, sequence };
            pair.send(At::A, a, 0, b"", Some((landing, filled(seed, 1000)?, Tag(seed))))?;
            let event = pair.wait(At::B, b)?;
            let expected = OwnedEvent::Received { header: Vec::new(), payload: Some((landing, 1000)) };
            ensure!(event == expected, "got {event:?}");
            let right = slot(&landing_ring, sequence, 1000)? == pattern(seed, 1000);
            ensure!(right, "ring {number} of {slots} slots: wrong bytes for sequence {sequence}");
        }
    }
    Ok(())
}

/// A sender that never waits meets `Full` in the end, and can go on once the receiver has worked.
pub(super) fn full_then_progress(make: Maker<'_>) -> Outcome {
    let mut pair = Pair::new(make)?;
    let [a, b] = pair.up(1, 1)?;
    let landing_ring = ring(1 << 18, 4)?;
    pair.b.transport.attach_ring(b, 0, landing_ring).map_err(|e| e.to_string())?;
    let payload = filled(1, 1 << 18)?;
    let mut taken = 0_u32;
    for round in 0..3 {
        let before = taken;
        loop {
            let landing = Landing { ring: 0, sequence: taken };
            let frame = (landing, payload.clone(), Tag(taken.into()));
            match pair.a.transport.send(a, 0, &taken.to_le_bytes(), Some(frame)) {
                Ok(()) => taken += 1,
                Err(SendError::Full) => break,
                Err(error) => return Err(error.to_string()),
            }
            ensure!(taken - before < 1 << 20, "the queue has no bound");
            pair.a.progress(4);
        }
        for expected in before..taken {
            let event = pair.wait(At::B, b)?;
            let ours =
                matches!(&event, OwnedEvent::Received { header, .. } if *header == expected.to_le_bytes());
            ensure!(ours, "round {round}: frame {expected} expected, got {event:?}");
        }
    }
    Ok(())
}

/// Several links and rings carry different bytes at once and do not mix.
pub(super) fn links_and_rings_apart(make: Maker<'_>) -> Outcome {
    const LINKS: u8 = 5;
    const RINGS: u16 = 4;
    let mut pair = Pair::new(make)?;
    let mut links = Vec::new();
    for name in 0..LINKS {
        let [a, b] = pair.up(name, 2)?;
        let mut rings = Vec::new();
        for number in 0..RINGS {
            let landing_ring = ring(20_000, 3)?;
            pair.b.transport.attach_ring(b, number, landing_ring.clone()).map_err(|e| e.to_string())?;
            rings.push(landing_ring);
        }
        links.push((a, b, rings));
    }
    let seed = |name: usize, number: u16, sequence: u32| {
        (name as u64) << 48 | u64::from(number) << 32 | u64::from(sequence)
    };
    for sequence in 0..3 {
        for number in 0..RINGS {
            for (name, (a, _, _)) in links.iter().enumerate() {
                let seed = seed(name, number, sequence);
                let payload = filled(seed, 20_000)?;
                let landing = Landing { ring: number, sequence };
                pair.send(At::A, *a, number % 2, &seed.to_le_bytes(), Some((landing, payload, Tag(seed))))?;
            }
        }
    }
    for (name, (_, b, rings)) in links.iter().enumerate() {
        for _ in 0..3 * RINGS {
            let OwnedEvent::Received { header, payload: Some((landing, 20_000)) } = pair.wait(At::B, *b)?
            else {
                return Err("not a frame of 20,000 bytes".into());
            };
            let seed = seed(name, landing.ring, landing.sequence);
            ensure!(header == seed.to_le_bytes(), "link {name}: {landing:?} has another frame's header");
            let Some(landing_ring) = rings.get(usize::from(landing.ring)) else {
                return Err("no ring".into());
            };
            let right = slot(landing_ring, landing.sequence, 20_000)? == pattern(seed, 20_000);
            ensure!(right, "link {name}: wrong bytes at {landing:?}");
        }
    }
    Ok(())
}

/// Whoever sleeps on the descriptor after `progress` returned 0 is woken by a frame, and by a link's end.
pub(super) fn wakes_the_sleeper(make: Maker<'_>) -> Outcome {
    let mut pair = Pair::new(make)?;
    let [a, b] = pair.up(1, 1)?;
    for number in 0..50_u32 {
        pair.run_until_idle();
        pair.a.transport.send(a, 0, &number.to_le_bytes(), None).map_err(|e| e.to_string())?;
        let mut came = false;
        let deadline = Instant::now() + PATIENCE;
        while !came && Instant::now() < deadline {
            while pair.a.progress(16) > 0 {}
            if pair.b.transport.wake_fd().is_some() {
                ensure!(pair.sleep(PATIENCE), "not woken for frame {number}");
            }
            pair.b.progress(16);
            came = pair.b.take(b).is_some();
        }
        ensure!(came, "frame {number} never came");
    }
    pair.run_until_idle();
    pair.a.transport.close(a);
    let reason = pair.wait_down(At::B, b)?;
    ensure!(reason == DownReason::Closed, "got {reason:?}");
    Ok(())
}

/// Each tag comes back once, in its path's order, whether the frames were big or small.
pub(super) fn sent_exactly_once(make: Maker<'_>) -> Outcome {
    let mut pair = Pair::new(make)?;
    let [a, b] = pair.up(1, 1)?;
    let landing_ring = ring(1 << 17, 8)?;
    pair.b.transport.attach_ring(b, 0, landing_ring).map_err(|e| e.to_string())?;
    let payload = filled(1, 1 << 17)?;
    let mut random = Random(3);
    for tag in 0..400_u64 {
        let bytes = if random.below(2) == 0 { random.below(100) } else { random.below(payload.bytes()) };
        let span = payload.range(0, bytes as u64).map_err(|e| e.to_string())?;
        pair.send(At::A, a, 0, b"h", Some((Landing { ring: 0, sequence: tag as u32 }, span, Tag(tag))))?;
        pair.send(At::A, a, 0, b"between", None)?;
    }
    for tag in 0..400 {
        let event = pair.wait(At::A, a)?;
        ensure!(event == OwnedEvent::Sent(Tag(tag)), "expected Sent({tag}), got {event:?}");
    }
    pair.run_until_idle();
    ensure!(pair.a.seen.is_empty(), "more events: {:?}", pair.a.seen);
    Ok(())
}

pub(super) fn refuses_invalid_frames(make: Maker<'_>) -> Outcome {
    let mut pair = Pair::new(make)?;
    let introduction = pair.introduction(At::A, 1, 2);
    let early = pair.open(At::A, introduction)?;
    let sent = pair.a.transport.send(early, 0, b"", None);
    ensure!(sent == Err(SendError::Down), "before Up: {sent:?}");
    let introduction = pair.introduction(At::B, 1, 2);
    let far = pair.open(At::B, introduction)?;
    for (at, link) in [(At::A, early), (At::B, far)] {
        let event = pair.wait(at, link)?;
        ensure!(event == OwnedEvent::Up, "got {event:?}");
    }
    let sent = pair.a.transport.send(early, 2, b"", None);
    ensure!(sent == Err(SendError::Invalid), "no such path: {sent:?}");
    let sent = pair.a.transport.send(early, 0, &[0; MAX_HEADER + 1], None);
    ensure!(sent == Err(SendError::Invalid), "header too long: {sent:?}");
    let sent = pair.a.transport.send(LinkId(u64::MAX), 0, b"", None);
    ensure!(sent == Err(SendError::Down), "no such link: {sent:?}");
    pair.run_until_idle();
    ensure!(pair.b.seen.is_empty(), "something arrived: {:?}", pair.b.seen);
    Ok(())
}
