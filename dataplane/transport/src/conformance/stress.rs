//! Random traffic both ways over several links and paths, from a printed seed, every byte checked.

use super::*;
use crate::MAX_HEADER;

const LINKS: u8 = 3;
const SLOTS: u32 = 4;
const FRAMES: u32 = 150;

/// One direction of one path: a ring at the receiver, as many source slots at the sender, credits in between.
struct Stream {
    from: At,
    near: LinkId,
    far: LinkId,
    path: u16,
    number: u16,
    ring: Ring,
    source: Span,
    slot_bytes: u32,
    /// Next to send, next to arrive, next to be reported sent, and how many the receiver gave back.
    next: u32,
    arrived: u32,
    sent: u32,
    returned: u32,
    /// Arrived and not yet given back: the receiver owes a frame that says so.
    unreturned: u32,
}

impl Stream {
    fn seed(&self, sequence: u32) -> u64 {
        (u64::from(self.number) << 48) ^ (self.near.0 << 34) ^ u64::from(sequence)
    }

    /// The frame's header: what a receiver needs to check it, and noise of any length.
    fn header(&self, sequence: u32) -> Vec<u8> {
        let mut random = Random(!self.seed(sequence));
        let mut header = vec![b'd'];
        header.extend_from_slice(&sequence.to_le_bytes());
        let noise = if random.below(4) == 0 { random.below(MAX_HEADER - 5) } else { random.below(40) };
        header.extend_from_slice(&pattern(random.next(), noise));
        header
    }

    /// Bytes of the payload: often small, sometimes none, sometimes the whole slot.
    fn bytes(&self, sequence: u32) -> u32 {
        let mut random = Random(self.seed(sequence) ^ 0x5151);
        let bound = match random.below(8) {
            0 => return self.slot_bytes,
            1 => return 0,
            2..=4 => 300.min(self.slot_bytes),
            _ => self.slot_bytes,
        };
        random.below(bound as usize) as u32
    }

    fn payload(&self, sequence: u32) -> Vec<u8> {
        pattern(self.seed(sequence), self.bytes(sequence) as usize)
    }

    /// Sends the next frame if the receiver has a slot and the source slot is free.
    fn step(&mut self, pair: &mut Pair) -> Result<bool, String> {
        if self.next == FRAMES || self.next - self.returned == SLOTS || self.next - self.sent == SLOTS {
            return Ok(false);
        }
        let payload = self.payload(self.next);
        let offset = u64::from(self.next % SLOTS) * u64::from(self.slot_bytes);
        let span = self.source.range(offset, payload.len() as u64).map_err(|e| e.to_string())?;
        write(&span, &payload);
        let landing = Landing { ring: self.number, sequence: self.next };
        let frame = Some((landing, span, Tag(u64::from(self.number) << 32 | u64::from(self.next))));
        let header = self.header(self.next);
        match pair.side(self.from).transport.send(self.near, self.path, &header, frame) {
            Ok(()) => {
                self.next += 1;
                Ok(true)
            }
            Err(SendError::Full) => Ok(false),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Gives slots back to the sender, on the same path against the stream.
    fn give_back(&mut self, pair: &mut Pair) -> Result<bool, String> {
        if self.unreturned == 0 {
            return Ok(false);
        }
        let mut header = vec![b'c'];
        header.extend_from_slice(&self.number.to_le_bytes());
        header.extend_from_slice(&self.unreturned.to_le_bytes());
        let to = if self.from == At::A { At::B } else { At::A };
        match pair.side(to).transport.send(self.far, self.path, &header, None) {
            Ok(()) => {
                self.unreturned = 0;
                Ok(true)
            }
            Err(SendError::Full) => Ok(false),
            Err(error) => Err(error.to_string()),
        }
    }

    fn arrive(&mut self, header: &[u8], landing: Landing, bytes: u32) -> Outcome {
        let expected = Landing { ring: self.number, sequence: self.arrived };
        ensure!(landing == expected, "{landing:?} came where {expected:?} was next");
        ensure!(header == self.header(self.arrived), "{landing:?}: wrong header");
        let payload = self.payload(self.arrived);
        ensure!(bytes as usize == payload.len(), "{landing:?}: {bytes} bytes, not {}", payload.len());
        ensure!(slot(&self.ring, landing.sequence, bytes)? == payload, "{landing:?}: wrong bytes");
        self.arrived += 1;
        self.unreturned += 1;
        Ok(())
    }

    /// The source slot is ours again: spoil it, so that a read that comes too late shows.
    fn sent(&mut self, sequence: u32) -> Outcome {
        ensure!(sequence == self.sent, "tag {sequence} came where {} was next", self.sent);
        let offset = u64::from(sequence % SLOTS) * u64::from(self.slot_bytes);
        let span = self.source.range(offset, u64::from(self.slot_bytes)).map_err(|e| e.to_string())?;
        write(&span, &vec![0xEE; self.slot_bytes as usize]);
        self.sent += 1;
        Ok(())
    }
}

/// A seed from the environment variable `HARMONAIZE_SEED`, else from the clock.
fn seed() -> u64 {
    let given = std::env::var("HARMONAIZE_SEED").ok().and_then(|seed| seed.parse().ok());
    given.unwrap_or_else(|| {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        since.map_or(1, |since| since.as_nanos() as u64)
    })
}

pub(super) fn stress(make: Maker<'_>) -> Outcome {
    let seed = seed();
    println!("HARMONAIZE_SEED={seed}");
    traffic(make, seed).map_err(|wrong| format!("HARMONAIZE_SEED={seed}: {wrong}"))
}

fn streams(pair: &mut Pair, random: &mut Random) -> Result<Vec<Stream>, String> {
    let mut streams = Vec::new();
    for name in 0..LINKS {
        let paths = 1 + random.below(3);
        let [a, b] = pair.up(name, paths)?;
        for path in 0..paths as u16 {
            for (from, near, far) in [(At::A, a, b), (At::B, b, a)] {
                let most = 1 << (4 + random.below(15));
                let slot_bytes = 1 + random.below(most) as u32;
                let to = if from == At::A { At::B } else { At::A };
                let number = path * 100 + u16::from(from == At::A);
                let landing = ring(slot_bytes, SLOTS)?;
                pair.side(to)
                    .transport
                    .attach_ring(far, number, landing.clone())
                    .map_err(|e| e.to_string())?;
                let source = blank((slot_bytes * SLOTS) as usize)?;
                let (next, arrived, sent, returned, owed) = (0, 0, 0, 0, 0);
                streams.push(Stream {
                    from,
                    near,
                    far,
                    path,
                    number,
                    ring: landing,
                    source,
                    slot_bytes,
                    next,
                    arrived,
                    sent,
                    returned,
                    unreturned: owed,
                });
            }
        }
    }
    Ok(streams)
}

fn traffic(make: Maker<'_>, seed: u64) -> Outcome {
    let mut random = Random(seed);
    let mut pair = Pair::new(make)?;
    let mut streams = streams(&mut pair, &mut random)?;
    let mut deadline = Instant::now() + PATIENCE;
    while streams.iter().any(|stream| stream.returned < FRAMES || stream.sent < FRAMES) {
        let mut moved = false;
        for _ in 0..random.below(12) {
            let which = random.below(streams.len());
            if let Some(stream) = streams.get_mut(which) {
                moved |= stream.step(&mut pair)?;
            }
        }
        let at = if random.below(2) == 0 { At::A } else { At::B };
        let budget = 1 + random.below(40);
        moved |= pair.side(at).progress(budget) > 0;
        while let Some((link, event)) = pair.side(at).seen.pop_front() {
            take(&mut streams, at, link, event)?;
        }
        for stream in &mut streams {
            if random.below(3) == 0 {
                moved |= stream.give_back(&mut pair)?;
            }
        }
        if moved {
            deadline = Instant::now() + PATIENCE;
        }
        ensure!(Instant::now() < deadline, "nothing moves any more");
    }
    pair.run_until_idle();
    ensure!(pair.a.seen.is_empty() && pair.b.seen.is_empty(), "events after the last frame");
    Ok(())
}

fn take(streams: &mut [Stream], at: At, link: LinkId, event: OwnedEvent) -> Outcome {
    match event {
        OwnedEvent::Received { header, payload: Some((landing, bytes)) } => {
            let to_us = |s: &&mut Stream| s.from != at && s.far == link && s.number == landing.ring;
            let stream = streams.iter_mut().find(to_us).ok_or("a frame of no stream")?;
            stream.arrive(&header, landing, bytes)
        }
        OwnedEvent::Received { header, payload: None } => {
            let (Some(number), Some(count)) = (header.get(1..3), header.get(3..7)) else {
                return Err("a short credit".into());
            };
            let number = number.try_into().map(u16::from_le_bytes).map_err(|_| "credit")?;
            let count = count.try_into().map(u32::from_le_bytes).map_err(|_| "credit")?;
            let ours = |s: &&mut Stream| s.from == at && s.near == link && s.number == number;
            streams.iter_mut().find(ours).ok_or("credit of no stream")?.returned += count;
            Ok(())
        }
        OwnedEvent::Sent(Tag(tag)) => {
            let ours = |s: &&mut Stream| s.from == at && s.near == link && u64::from(s.number) == tag >> 32;
            streams.iter_mut().find(ours).ok_or("a tag of no stream")?.sent(tag as u32)
        }
        event => Err(format!("{event:?} on {link:?} at {at:?}")),
    }
}
