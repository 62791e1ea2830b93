//! Trains of packets: what they look like, and what their arrival says.
//!
//! Whoever probes sends `count` datagrams back to back, then asks until it is answered. The answer counts what came before the
//! question, and says at which rate the second half came: the first may pass shapers whose buckets are full as if there
//! were none. All fields are little-endian; every datagram begins with [`Head`].

use std::collections::BTreeMap;
use std::net::SocketAddrV4;
use std::time::{Duration, Instant};
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const MAGIC: [u8; 4] = *b"HZtr";
const VERSION: u16 = 1;
/// Payload of a train's datagram: of 1500 bytes with the headers of IP and UDP.
pub(super) const PAYLOAD: usize = 1472;
/// Bytes of a datagram on the wire beside its payload: Ethernet, IP and UDP.
pub(super) const BESIDE: u64 = 14 + 20 + 8;
/// Most datagrams of a train.
pub(super) const MOST: u32 = super::MAX_TRAIN.div_ceil(PAYLOAD as u32);
/// Trains that are remembered; beyond, the oldest is forgotten.
const TRAINS: usize = 64;
/// How long one is remembered after the last sign of it.
const MEMORY: Duration = Duration::from_secs(2);

/// What a datagram is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Kind {
    /// One of a train.
    Wagon = 1,
    /// Asks what arrived; as long as an answer, so that nobody is sent more than came in his name.
    Ask = 2,
    /// What arrived.
    Answer = 3,
}

/// The beginning of every datagram.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Head {
    magic: [u8; 4],
    version: U16,
    kind: U16,
    /// Names the train; drawn by whoever sends it.
    pub(super) name: [u8; 16],
    /// Of how many datagrams the train is.
    pub(super) count: U32,
    /// In an answer: how many of them arrived.
    pub(super) received: U32,
    /// In an answer: at which rate, in bits on the wire a second.
    pub(super) bits: U64,
}

impl Head {
    pub(super) fn new(kind: Kind, name: [u8; 16], count: u32) -> Self {
        Self {
            magic: MAGIC,
            version: U16::new(VERSION),
            kind: U16::new(kind as u16),
            name,
            count: U32::new(count),
            received: U32::new(0),
            bits: U64::new(0),
        }
    }

    /// Reads a datagram's beginning; none where it is of no train.
    pub(super) fn read(datagram: &[u8]) -> Option<(Kind, Self)> {
        let (head, _) = Self::read_from_prefix(datagram).ok()?;
        let kind = match head.kind.get() {
            1 => Kind::Wagon,
            2 => Kind::Ask,
            3 => Kind::Answer,
            _ => return None,
        };
        (head.magic == MAGIC && head.version.get() == VERSION).then_some((kind, head))
    }
}

/// What came of a train.
#[derive(Debug)]
struct Train {
    /// When a datagram came, and its bytes on the wire.
    arrivals: Vec<(u64, u64)>,
    last: Instant,
}

impl Train {
    /// At which rate the second half came, in bits a second; 0 where fewer than two did, or all at once. Those that came together,
    /// as packets that some card or kernel had joined do, count as one.
    fn bits(&self) -> u64 {
        let half = self.arrivals.len() / 2;
        let tail = if self.arrivals.len() < 8 { 0 } else { half };
        let Some((first_ns, _)) = self.arrivals.get(tail) else { return 0 };
        let later = self.arrivals.iter().skip(tail).filter(|(at_ns, _)| at_ns > first_ns);
        let bytes: u64 = later.clone().map(|(_, bytes)| bytes).sum();
        let last_ns = later.map(|(at_ns, _)| *at_ns).max().unwrap_or(*first_ns);
        let span_ns = u128::from(last_ns.saturating_sub(*first_ns));
        let bits = (u128::from(bytes) * 8_000_000_000).checked_div(span_ns);
        bits.map_or(0, |bits| u64::try_from(bits).unwrap_or(u64::MAX))
    }
}

/// All trains that come in. Whatever anybody sends, it takes bounded memory.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    trains: BTreeMap<(SocketAddrV4, [u8; 16]), Train>,
}

impl Arrivals {
    /// Takes a datagram in that came at a time; the answer to it, if it wants one.
    pub(super) fn take(
        &mut self,
        now: Instant,
        from: SocketAddrV4,
        at_ns: u64,
        datagram: &[u8],
    ) -> Option<Head> {
        let (kind, head) = Head::read(datagram)?;
        let of = (from, head.name);
        match kind {
            Kind::Answer => None,
            Kind::Wagon => {
                if !self.trains.contains_key(&of) {
                    self.make_room(now);
                }
                let empty = || Train { arrivals: Vec::new(), last: now };
                let train = self.trains.entry(of).or_insert_with(empty);
                train.last = now;
                if train.arrivals.len() < MOST.min(head.count.get()) as usize {
                    train.arrivals.push((at_ns, datagram.len() as u64 + BESIDE));
                }
                None
            }
            Kind::Ask => {
                let train = self.trains.get(&of);
                let received = train.map_or(0, |train| train.arrivals.len() as u32);
                let bits = train.map_or(0, Train::bits);
                let answer = Head::new(Kind::Answer, head.name, head.count.get());
                Some(Head { received: U32::new(received), bits: U64::new(bits), ..answer })
            }
        }
    }

    fn make_room(&mut self, now: Instant) {
        self.trains.retain(|_, train| now.saturating_duration_since(train.last) < MEMORY);
        if self.trains.len() >= TRAINS
            && let Some(oldest) = self.trains.iter().min_by_key(|(_, train)| train.last).map(|(of, _)| *of)
        {
            self.trains.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::Ipv4Addr;

    fn from(port: u16) -> SocketAddrV4 {
        SocketAddrV4::new(Ipv4Addr::new(10, 0, 0, 1), port)
    }

    fn wagon(name: u8, count: u32) -> Vec<u8> {
        let mut bytes = Head::new(Kind::Wagon, [name; 16], count).as_bytes().to_vec();
        bytes.resize(PAYLOAD, 0);
        bytes
    }

    fn asked(arrivals: &mut Arrivals, port: u16, name: u8) -> (u32, u64) {
        let ask = Head::new(Kind::Ask, [name; 16], 100);
        let answer = arrivals.take(Instant::now(), from(port), 0, ask.as_bytes()).unwrap();
        assert_eq!((Head::read(answer.as_bytes()), answer.name), (Some((Kind::Answer, answer)), [name; 16]));
        (answer.received.get(), answer.bits.get())
    }

    #[test]
    fn the_second_half_tells_the_rate() {
        let (mut arrivals, now) = (Arrivals::default(), Instant::now());
        // Half passes at once, then 1514 bytes come each 12,112 ns: a gigabit a second.
        for at in 0..100_u64 {
            let at_ns = 1_000 + at.saturating_sub(50) * 12_112;
            assert_eq!(arrivals.take(now, from(1), at_ns, &wagon(1, 100)), None);
        }
        assert_eq!(asked(&mut arrivals, 1, 1), (100, 1_000_000_000));
        assert_eq!(asked(&mut arrivals, 2, 1), (0, 0), "another sender's");
        assert_eq!(asked(&mut arrivals, 1, 2), (0, 0), "another train");
        for (count, expected) in [(1, 0), (2, 1_000_000_000), (7, 1_000_000_000)] {
            let name = 10 + count as u8;
            for at in 0..count {
                arrivals.take(now, from(1), at * 12_112, &wagon(name, 100));
            }
            assert_eq!(asked(&mut arrivals, 1, name), (count as u32, expected));
        }
    }

    #[test]
    fn packets_that_came_together_count_as_one() {
        let (mut arrivals, now) = (Arrivals::default(), Instant::now());
        // Groups of 44, each of which is there when its last packet is; the half is within the fourth.
        for at in 0..268_u64 {
            let whole = (at / 44 * 44 + 44).min(268);
            assert_eq!(arrivals.take(now, from(1), whole * 12_112, &wagon(1, 268)), None);
        }
        assert_eq!(asked(&mut arrivals, 1, 1), (268, 1_000_000_000));
    }

    #[test]
    fn floods_take_bounded_memory() {
        let (mut arrivals, now) = (Arrivals::default(), Instant::now());
        for port in 0..1000 {
            for _ in 0..3 {
                arrivals.take(now + Duration::from_micros(port.into()), from(port), 7, &wagon(1, u32::MAX));
            }
        }
        assert_eq!(arrivals.trains.len(), TRAINS);
        for _ in 0..3 * MOST {
            arrivals.take(now, from(1), 7, &wagon(2, u32::MAX));
        }
        assert_eq!(asked(&mut arrivals, 1, 2), (MOST, 0));
        for _ in 0..50 {
            arrivals.take(now, from(1), 7, &wagon(3, 20));
        }
        assert_eq!(asked(&mut arrivals, 1, 3).0, 20);
        arrivals.take(now + 2 * MEMORY, from(1), 7, &wagon(4, 20));
        assert_eq!(arrivals.trains.len(), 1);
    }

    proptest! {
        #[test]
        fn any_datagrams_are_taken(
            datagrams in proptest::collection::vec(
                (proptest::collection::vec(any::<u8>(), 0..60), any::<bool>(), any::<u64>(), 0..4_u16), 0..40
            ),
        ) {
            let (mut arrivals, now) = (Arrivals::default(), Instant::now());
            for (mut bytes, ours, at_ns, kind) in datagrams {
                if ours && bytes.len() >= 24 {
                    let head = Head { kind: U16::new(kind), ..Head::new(Kind::Ask, [kind as u8; 16], 9) };
                    bytes[..24].copy_from_slice(&head.as_bytes()[..24]);
                }
                let answer = arrivals.take(now, from(kind), at_ns, &bytes);
                prop_assert!(answer.is_none_or(|answer| answer.as_bytes().len() <= bytes.len()));
            }
        }
    }
}
