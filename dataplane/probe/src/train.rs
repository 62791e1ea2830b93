//! Trains of packets: what they look like, and what their arrival says.
//!
//! Whoever probes sends `count` datagrams back to back, then asks until it is answered. The answer counts what came before the
//! question, and says at which rate the second half came: the first may pass shapers whose buckets are full as if there
//! were none. All fields are little-endian; every datagram begins with [`Head`]. [`CrossTraffic`] in the answer
//! says what else came in meanwhile, where the kernel counts that, and how quick the quickest part of the train was.
//!
//! Control gives a [`TrainKey`] to whom it asks for trains. Of nobody else a train is begun or a question answered, and nothing is
//! looked at for his sake: what comes into a host is told to those alone who are to know it.

use harmonaize_abi::keyed;
use hmac::{Hmac, Mac};
use sha2::Sha256;
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::{Duration, Instant};
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const MAGIC: [u8; 4] = *b"HZtr";
const VERSION: u16 = 1;
/// Payload of a train's datagram: of 1500 bytes with the headers of IP and UDP.
pub(super) const PAYLOAD: usize = 1472;
/// Bytes of a datagram on the wire beside its payload: Ethernet, IP and UDP.
pub(super) const OVERHEAD_BYTES: u64 = 14 + 20 + 8;
/// Most datagrams of a train.
pub(super) const MOST: u32 = super::MAX_TRAIN.div_ceil(PAYLOAD as u32);
/// Trains that are remembered; beyond, the oldest is forgotten.
const TRAINS: usize = 64;
/// How long one is remembered after the last sign of it.
const MEMORY: Duration = Duration::from_secs(2);
/// Less than one part in so many of a train says nothing of what came beside it.
const PART: u64 = 4;
/// One part in so many of the second half is long enough to have a rate of its own.
const SPAN: u64 = 3;

/// What both ends of a train know beside control, and nobody else: who sends it, and who measures it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TrainKey(pub [u8; 32]);

impl std::fmt::Debug for TrainKey {
    /// Without the key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TrainKey")
    }
}

/// The key of trains from an address.
pub(super) type Keys = Box<dyn Fn(Ipv4Addr) -> TrainKey + Send>;

/// What a datagram is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Kind {
    /// One of a train.
    Data = 1,
    /// Asks what arrived; as long as an answer, so that nobody is sent more than came in his name.
    Request = 2,
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
    /// By HMAC-SHA256 with the key, cut: of the head with zeros here, and of an answer's [`CrossTraffic`].
    tag: [u8; 16],
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
            tag: [0; 16],
        }
    }

    /// With its tag, before what stands behind it.
    pub(super) fn sign(self, key: &TrainKey, behind: &[u8]) -> Self {
        Self {
            tag: self.mac(key, behind).finalize().into_bytes().first_chunk().copied().unwrap_or_default(),
            ..self
        }
    }

    /// Whether who knows the key has made it.
    pub(super) fn is_by(&self, key: &TrainKey, behind: &[u8]) -> bool {
        self.mac(key, behind).verify_truncated_left(&self.tag).is_ok()
    }

    fn mac(&self, key: &TrainKey, behind: &[u8]) -> Hmac<Sha256> {
        let mut mac = keyed(&key.0);
        mac.update(Self { tag: [0; 16], ..*self }.as_bytes());
        mac.update(behind);
        mac
    }

    /// Reads a datagram's beginning; none where it is of no train.
    pub(super) fn read(datagram: &[u8]) -> Option<(Kind, Self)> {
        let (head, _) = Self::read_from_prefix(datagram).ok()?;
        let kind = match head.kind.get() {
            1 => Kind::Data,
            2 => Kind::Request,
            3 => Kind::Answer,
            _ => return None,
        };
        (head.magic == MAGIC && head.version.get() == VERSION).then_some((kind, head))
    }
}

/// Stands behind the [`Head`] of a question, where nothing is known yet, and of its answer.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(super) struct CrossTraffic {
    cross_bps: U64,
    peak_bps: U64,
}

impl CrossTraffic {
    /// Nothing is known.
    pub(super) const UNKNOWN: Self = Self { cross_bps: U64::new(u64::MAX), peak_bps: U64::new(u64::MAX) };

    /// Reads what stands behind a datagram's head; none where the datagram is too short.
    pub(super) fn read(datagram: &[u8]) -> Option<Self> {
        let (more, _) = Self::read_from_prefix(datagram.get(size_of::<Head>()..)?).ok()?;
        Some(more)
    }

    /// What else came in meanwhile, in bits a second.
    pub(super) fn cross_bps(&self) -> Option<u64> {
        measured(self.cross_bps)
    }

    /// At which rate the quickest part came, in bits a second.
    pub(super) fn peak_bps(&self) -> Option<u64> {
        measured(self.peak_bps)
    }
}

fn measured(field: U64) -> Option<u64> {
    Some(field.get()).filter(|value| *value != u64::MAX)
}

/// The answer to a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) head: Head,
    more: CrossTraffic,
}

impl Answer {
    /// As a datagram; no longer than the question was.
    pub(super) fn to_bytes(self) -> Vec<u8> {
        [self.head.as_bytes(), self.more.as_bytes()].concat()
    }
}

/// Bytes that each interface took in so far, and at which CLOCK_REALTIME that was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct InterfaceBytes {
    pub(super) at_ns: u64,
    pub(super) bytes: BTreeMap<String, u64>,
}

/// What came of a train.
#[derive(Debug)]
struct Train {
    /// When a datagram came, and its bytes on the wire.
    arrivals: Vec<(u64, u64)>,
    last: Instant,
    /// What interfaces had carried when half of it was there.
    half: Option<InterfaceBytes>,
    /// What else came in after that, in bits a second; said when the train was first asked about.
    cross_bps: Option<Option<u64>>,
}

impl Train {
    /// What came in beside the second half, in bits a second. Of the interfaces that may have carried it, it is what the one did that
    /// carried least. None where too little of it came between the two readings.
    fn measure_cross_traffic(&self, now: &InterfaceBytes) -> Option<u64> {
        let half = self.half.as_ref()?;
        let between = |at_ns: u64| half.at_ns < at_ns && at_ns <= now.at_ns;
        let later = self.arrivals.iter().filter(|(at_ns, _)| between(*at_ns));
        let bytes: u64 = later.clone().map(|(_, bytes)| bytes).sum();
        let all: u64 = self.arrivals.iter().map(|(_, bytes)| bytes).sum();
        let span_ns = later.map(|(at_ns, _)| *at_ns).max()?.checked_sub(half.at_ns)?;
        if bytes < all / PART {
            return None;
        }
        // Packets that were joined on the way count with one header.
        let least = bytes / 10 * 9;
        let came = |(name, before): (&String, &u64)| now.bytes.get(name)?.checked_sub(*before);
        let carried = half.bytes.iter().filter_map(came).filter(|came| *came >= least).min()?;
        let bits = u128::from(carried.saturating_sub(bytes)) * 8_000_000_000;
        u64::try_from(bits.checked_div(span_ns.into())?).ok()
    }

    /// The second half; all of a short train.
    fn tail(&self) -> &[(u64, u64)] {
        let tail = if self.arrivals.len() < 8 { 0 } else { self.arrivals.len() / 2 };
        self.arrivals.get(tail..).unwrap_or_default()
    }

    /// The rate at which the second half came, in bits a second. It is 0 where fewer than two packets came, or all at
    /// once. Those that came together, as packets that some card or kernel had joined do, count as one.
    fn bits(&self) -> u64 {
        let Some((first_ns, _)) = self.tail().first() else { return 0 };
        let later = self.tail().iter().filter(|(at_ns, _)| at_ns > first_ns);
        let bytes: u64 = later.clone().map(|(_, bytes)| bytes).sum();
        let last_ns = later.map(|(at_ns, _)| *at_ns).max().unwrap_or(*first_ns);
        rate(bytes, last_ns.saturating_sub(*first_ns)).unwrap_or(0)
    }

    /// The rate of the quickest part of the second half, of a third of its bytes at least. None where it had no such part. Who sends
    /// steadily beside a train spreads all of its parts. A hold-up, of a processor or by a burst, spreads some of them.
    fn peak_bps(&self) -> Option<u64> {
        let tail = self.tail();
        let least = tail.iter().map(|(_, bytes)| bytes).sum::<u64>() / SPAN;
        // What came by the end of each: those that came together are one.
        let (mut ends, mut sum) = (Vec::with_capacity(tail.len()), 0_u64);
        for (at, (at_ns, bytes)) in tail.iter().enumerate() {
            sum += bytes;
            if tail.get(at + 1).is_none_or(|(next_ns, _)| next_ns > at_ns) {
                ends.push((*at_ns, sum));
            }
        }
        let mut quickest = None;
        let mut until = 0;
        for (from_ns, before) in &ends {
            while ends.get(until).is_some_and(|(_, sum)| sum.saturating_sub(*before) < least.max(1)) {
                until += 1;
            }
            let Some((until_ns, sum)) = ends.get(until) else { break };
            quickest = quickest.max(rate(sum - before, until_ns.saturating_sub(*from_ns)));
        }
        quickest
    }
}

/// So many bytes in so much time, in bits a second; none in no time.
fn rate(bytes: u64, span_ns: u64) -> Option<u64> {
    let bits = (u128::from(bytes) * 8_000_000_000).checked_div(u128::from(span_ns))?;
    Some(u64::try_from(bits).unwrap_or(u64::MAX))
}

/// All trains that come in. Whatever anybody sends, it takes bounded memory.
pub(super) struct Arrivals {
    trains: BTreeMap<(SocketAddrV4, [u8; 16]), Train>,
    keys: Keys,
}

impl Arrivals {
    pub(super) fn new(keys: Keys) -> Self {
        Self { trains: BTreeMap::new(), keys }
    }

    /// Takes a datagram in that came at a time; the answer to it, if it wants one. `carried` reads what interfaces have carried: twice
    /// a train at most. Of a train that is known the tag is not looked at again: its name is nobody else's to know.
    pub(super) fn take(
        &mut self,
        now: Instant,
        from: SocketAddrV4,
        at_ns: u64,
        datagram: &[u8],
        carried: &mut dyn FnMut() -> InterfaceBytes,
    ) -> Option<Answer> {
        let (kind, head) = Head::read(datagram)?;
        let of = (from, head.name);
        if !self.trains.contains_key(&of) && !head.is_by(&(self.keys)(*from.ip()), &[]) {
            return None;
        }
        match kind {
            Kind::Answer => None,
            Kind::Data => {
                if !self.trains.contains_key(&of) {
                    self.make_room(now);
                }
                let empty = || Train { arrivals: Vec::new(), last: now, half: None, cross_bps: None };
                let train = self.trains.entry(of).or_insert_with(empty);
                train.last = now;
                let count = MOST.min(head.count.get()) as usize;
                if train.arrivals.len() < count {
                    train.arrivals.push((at_ns, datagram.len() as u64 + OVERHEAD_BYTES));
                }
                if train.half.is_none() && train.arrivals.len() >= count.div_ceil(2) {
                    train.half = Some(carried());
                }
                None
            }
            Kind::Request => {
                CrossTraffic::read(datagram)?;
                let train = self.trains.get_mut(&of);
                let beside = train.and_then(|train| {
                    if train.cross_bps.is_none() {
                        train.cross_bps = Some(train.measure_cross_traffic(&carried()));
                    }
                    train.cross_bps.flatten()
                });
                let train = self.trains.get(&of);
                let received = train.map_or(0, |train| train.arrivals.len() as u32);
                let bits = train.map_or(0, Train::bits);
                let answer = Head::new(Kind::Answer, head.name, head.count.get());
                let head = Head { received: U32::new(received), bits: U64::new(bits), ..answer };
                let field = |value: Option<u64>| U64::new(value.unwrap_or(u64::MAX));
                let quickest = train.and_then(Train::peak_bps);
                let more = CrossTraffic { cross_bps: field(beside), peak_bps: field(quickest) };
                let head = head.sign(&(self.keys)(*from.ip()), more.as_bytes());
                Some(Answer { head, more })
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

    const KEY: TrainKey = TrainKey([5; 32]);

    fn arrivals() -> Arrivals {
        Arrivals::new(Box::new(|_| KEY))
    }

    fn from(port: u16) -> SocketAddrV4 {
        SocketAddrV4::new(Ipv4Addr::new(10, 0, 0, 1), port)
    }

    fn wagon(name: u8, count: u32) -> Vec<u8> {
        let mut bytes = Head::new(Kind::Data, [name; 16], count).sign(&KEY, &[]).as_bytes().to_vec();
        bytes.resize(PAYLOAD, 0);
        bytes
    }

    /// He would learn what comes into the host, and each look at its interfaces costs it time.
    #[test]
    fn of_a_stranger_nothing_is_looked_at_and_he_hears_nothing() {
        let mine = |from: Ipv4Addr| TrainKey([from.octets()[3]; 32]);
        let mut arrivals = Arrivals::new(Box::new(mine));
        let mut look = || panic!("the interfaces are looked at");
        let ask = |key: u8| {
            let head = Head::new(Kind::Request, [1; 16], 1).sign(&TrainKey([key; 32]), &[]);
            [head.as_bytes(), CrossTraffic::UNKNOWN.as_bytes()].concat()
        };
        for key in [0, 2] {
            let head = Head::new(Kind::Data, [1; 16], 1).sign(&TrainKey([key; 32]), &[]);
            assert_eq!(arrivals.take(Instant::now(), from(1), 0, head.as_bytes(), &mut look), None);
            assert_eq!(arrivals.take(Instant::now(), from(1), 0, &ask(key), &mut look), None, "key {key}");
        }
        let unsigned = Head::new(Kind::Data, [1; 16], 1);
        assert_eq!(arrivals.take(Instant::now(), from(1), 0, unsigned.as_bytes(), &mut look), None);
        assert!(arrivals.trains.is_empty());
        // The right one is from 10.0.0.1; it hears that nothing came.
        let answer = arrivals.take(Instant::now(), from(1), 0, &ask(1), &mut look).unwrap();
        let bytes = answer.to_bytes();
        let (head, behind) = (Head::read(&bytes).unwrap().1, &bytes[size_of::<Head>()..]);
        assert!(head.is_by(&TrainKey([1; 32]), behind) && !head.is_by(&TrainKey([2; 32]), behind));
        assert!(!Head { received: U32::new(1), ..head }.is_by(&TrainKey([1; 32]), behind));
    }

    fn request(arrivals: &mut Arrivals, port: u16, name: u8) -> (u32, u64) {
        let ask = [
            Head::new(Kind::Request, [name; 16], 100).sign(&KEY, &[]).as_bytes(),
            CrossTraffic::UNKNOWN.as_bytes(),
        ]
        .concat();
        let answer = arrivals.take(Instant::now(), from(port), 0, &ask, &mut InterfaceBytes::default);
        let (answer, bytes) = (answer.unwrap().head, answer.unwrap().to_bytes());
        assert_eq!((Head::read(&bytes), answer.name), (Some((Kind::Answer, answer)), [name; 16]));
        assert_eq!(bytes.len(), ask.len(), "an answer is as long as its question");
        (answer.received.get(), answer.bits.get())
    }

    fn carried(at_ns: u64, bytes: &[(&str, u64)]) -> InterfaceBytes {
        InterfaceBytes {
            at_ns,
            bytes: bytes.iter().map(|(name, bytes)| ((*name).to_owned(), *bytes)).collect(),
        }
    }

    /// What a train of 100 that arrives in step reports to have come beside it. It is read `late` nanoseconds after half of it was there.
    fn beside(late: u64, half: &[(&str, u64)], end: &[(&str, u64)]) -> Option<u64> {
        let (mut arrivals, now) = (arrivals(), Instant::now());
        for at in 0..100_u64 {
            let mut look = || carried(49 * 12_112 + late, half);
            assert_eq!(arrivals.take(now, from(1), at * 12_112, &wagon(1, 100), &mut look), None);
        }
        let mut ask = Head::new(Kind::Request, [1; 16], 100).sign(&KEY, &[]).as_bytes().to_vec();
        ask.extend(CrossTraffic::UNKNOWN.as_bytes());
        let told = arrivals.take(now, from(1), 0, &ask, &mut || carried(2_000_000, end)).unwrap();
        let again = arrivals.take(now, from(1), 0, &ask, &mut || carried(9_000_000, &[])).unwrap();
        assert_eq!((told, told.to_bytes().len()), (again, ask.len()), "it is said once");
        let short = arrivals.take(now, from(1), 0, &ask[..ask.len() - 1], &mut InterfaceBytes::default);
        assert_eq!(short, None, "an answer is no longer than its question");
        CrossTraffic::read(&told.to_bytes()).unwrap().cross_bps()
    }

    /// How quick a train of 120 was in all, and its quickest part, in bits a second. Each of its datagrams takes the
    /// nanoseconds that `takes` gives.
    fn quickest(takes: impl Fn(u64) -> u64) -> (u64, Option<u64>) {
        let (mut arrivals, now, mut at_ns) = (arrivals(), Instant::now(), 0);
        for at in 0..120 {
            at_ns += takes(at);
            arrivals.take(now, from(1), at_ns, &wagon(1, 120), &mut InterfaceBytes::default);
        }
        let ask = [
            Head::new(Kind::Request, [1; 16], 120).sign(&KEY, &[]).as_bytes(),
            CrossTraffic::UNKNOWN.as_bytes(),
        ]
        .concat();
        let told = arrivals.take(now, from(1), 0, &ask, &mut InterfaceBytes::default).unwrap();
        (told.head.bits.get(), CrossTraffic::read(&told.to_bytes()).unwrap().peak_bps())
    }

    #[test]
    fn steady_traffic_spreads_the_whole_train() {
        assert_eq!(quickest(|_| 12_112), (1_000_000_000, Some(1_000_000_000)));
        assert_eq!(quickest(|_| 18_168), (666_666_666, Some(666_666_666)));
        // Wherever a hold-up is, a third of the train was not in it.
        for held_up in 0..120 {
            let (whole, part) = quickest(|at| 12_112 + if at == held_up { 400_000 } else { 0 });
            assert!(part >= Some(1_000_000_000), "{held_up}: {whole} {part:?}");
        }
        // Those that came together are one.
        let (whole, part) = quickest(|at| if at % 11 == 0 { 11 * 18_168 } else { 0 });
        assert!(whole < 700_000_000 && part.is_some_and(|part| part < 700_000_000), "{whole} {part:?}");
        assert_eq!(quickest(|_| 0), (0, None));
    }

    #[test]
    fn what_came_beside_a_train_is_told() {
        let half = [("lo", 5), ("eth0", 1_000_000), ("eth1", 7)];
        // 50 of 1514 bytes, and as much of others; what another interface carried is none of it.
        let end = |eth0: u64| [("lo", 6), ("eth0", 1_000_000 + eth0), ("eth1", 7_000_000)];
        assert_eq!(beside(0, &half, &end(2 * 50 * 1514)), Some(1_000_000_000));
        assert_eq!(beside(0, &half, &end(50 * 1514)), Some(0));
        assert_eq!(beside(0, &half, &end(50 * 1480)), Some(0), "joined packets have fewer headers");
        // Of what it took until the thread looked, it is known of both.
        assert_eq!(beside(20 * 12_112, &half, &end(2 * 30 * 1514)), Some(1_000_000_000));
        assert_eq!(beside(40 * 12_112, &half, &end(50 * 1514)), None, "too little was left of it");
        assert_eq!(beside(0, &half, &[]), None);
        assert_eq!(beside(0, &[], &end(0)), None, "nobody counts");
    }

    #[test]
    fn the_second_half_tells_the_rate() {
        let (mut arrivals, now) = (arrivals(), Instant::now());
        // Half passes at once, then 1514 bytes come each 12,112 ns: a gigabit a second.
        for at in 0..100_u64 {
            let at_ns = 1_000 + at.saturating_sub(50) * 12_112;
            assert_eq!(
                arrivals.take(now, from(1), at_ns, &wagon(1, 100), &mut InterfaceBytes::default),
                None
            );
        }
        assert_eq!(request(&mut arrivals, 1, 1), (100, 1_000_000_000));
        assert_eq!(request(&mut arrivals, 2, 1), (0, 0), "another sender's");
        assert_eq!(request(&mut arrivals, 1, 2), (0, 0), "another train");
        for (count, expected) in [(1, 0), (2, 1_000_000_000), (7, 1_000_000_000)] {
            let name = 10 + count as u8;
            for at in 0..count {
                arrivals.take(now, from(1), at * 12_112, &wagon(name, 100), &mut InterfaceBytes::default);
            }
            assert_eq!(request(&mut arrivals, 1, name), (count as u32, expected));
        }
    }

    #[test]
    fn packets_that_came_together_count_as_one() {
        let (mut arrivals, now) = (arrivals(), Instant::now());
        // Groups of 44, each of which is there when its last packet is; the half is within the fourth.
        for at in 0..268_u64 {
            let whole = (at / 44 * 44 + 44).min(268);
            assert_eq!(
                arrivals.take(now, from(1), whole * 12_112, &wagon(1, 268), &mut InterfaceBytes::default),
                None
            );
        }
        assert_eq!(request(&mut arrivals, 1, 1), (268, 1_000_000_000));
    }

    #[test]
    fn floods_take_bounded_memory() {
        let (mut arrivals, now) = (arrivals(), Instant::now());
        for port in 0..1000 {
            for _ in 0..3 {
                let at = now + Duration::from_micros(port.into());
                arrivals.take(at, from(port), 7, &wagon(1, u32::MAX), &mut InterfaceBytes::default);
            }
        }
        assert_eq!(arrivals.trains.len(), TRAINS);
        for _ in 0..3 * MOST {
            arrivals.take(now, from(1), 7, &wagon(2, u32::MAX), &mut InterfaceBytes::default);
        }
        assert_eq!(request(&mut arrivals, 1, 2), (MOST, 0));
        for _ in 0..50 {
            arrivals.take(now, from(1), 7, &wagon(3, 20), &mut InterfaceBytes::default);
        }
        assert_eq!(request(&mut arrivals, 1, 3).0, 20);
        arrivals.take(now + 2 * MEMORY, from(1), 7, &wagon(4, 20), &mut InterfaceBytes::default);
        assert_eq!(arrivals.trains.len(), 1);
    }

    proptest! {
        #[test]
        fn any_datagrams_are_taken(
            datagrams in proptest::collection::vec(
                (proptest::collection::vec(any::<u8>(), 0..60), any::<bool>(), any::<u64>(), 0..4_u16), 0..40
            ),
        ) {
            let (mut arrivals, now) = (arrivals(), Instant::now());
            for (mut bytes, ours, at_ns, kind) in datagrams {
                if ours && bytes.len() >= 24 {
                    let head = Head { kind: U16::new(kind), ..Head::new(Kind::Request, [kind as u8; 16], 9) };
                    bytes[..24].copy_from_slice(&head.as_bytes()[..24]);
                }
                let mut carried = || carried(at_ns, &[("eth0", at_ns)]);
                let answer = arrivals.take(now, from(kind), at_ns, &bytes, &mut carried);
                prop_assert!(answer.is_none_or(|answer| answer.to_bytes().len() <= bytes.len()));
            }
        }
    }
}
