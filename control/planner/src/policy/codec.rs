//! In which codec a communicator's tensors travel, by what its ranks let be lost and what the network passes.

use harmonaize_codec::{Budget, Choice, Codec, Controller, Level, Outlook};
use harmonaize_units::{Bytes, Nanos};
use std::fmt;
use std::time::Duration;

/// Bytes of an operation where agents have told of none.
const TYPICAL: u64 = 16 << 20;
/// Blocks of a tensor that agents look at, of 256 elements each.
const LOOKED: f64 = 32.0;
/// Which blocks are sent, and chunks' headers, for a byte of a tensor.
const PLACES: f64 = 0.001;

/// How the tensors of an epoch travel, and within which budget.
#[derive(Clone, Debug)]
pub struct CodecChoice {
    /// The codec.
    pub codec: Codec,
    /// What may be lost.
    pub budget: Budget,
    /// Why.
    pub reason: CodecReason,
    /// The codec of chunks that lose too much by the other.
    pub finer: Option<Codec>,
    /// What it was chosen by, where there was something to choose.
    pub outlook: Option<Outlook>,
    /// How much of a tensor is summed by it in a second, in bits. It is 0 where the codec is uncompressed, or not known.
    pub speed: u64,
}

impl CodecChoice {
    /// Tensors travel as they are, whatever the budget lets be lost; why.
    pub fn exact(budget: Budget, reason: CodecReason) -> Self {
        Self { codec: Codec::EXACT, budget, reason, finer: None, outlook: None, speed: 0 }
    }

    /// Whether agents are told the same of both.
    pub fn same(&self, other: &Self) -> bool {
        self.codec == other.codec && self.budget == other.budget
    }
}

/// Why tensors travel in a codec, or as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodecReason {
    /// Ranks let nothing be lost.
    Exact,
    /// An epoch of an earlier control has it.
    Recovered,
    /// Its tenant wants contributions added in one order.
    Ordered,
    /// An aggregator sums.
    Aggregated,
    /// The provider compresses nothing.
    Disabled,
    /// There is one host.
    OneHost,
    /// Hosts do not send to so many others directly.
    TooManyHosts,
    /// Operations of so many bytes gain nothing.
    SmallOperations(Bytes),
    /// Agents have no codec in common.
    NoCommonCodec,
    /// The network passes nothing now.
    NothingPasses,
    /// Operations end before the tenant waits for them.
    Overlapped,
    /// Operations of so many bytes are the fastest uncompressed, in this time.
    FastestExact(Bytes, Nanos),
    /// Operations of so many bytes take the first time, and uncompressed the second.
    Fastest(Bytes, Nanos, Nanos),
}

impl CodecReason {
    fn of(choice: Choice, bytes: f64) -> Self {
        let nanos = |seconds: f64| Nanos((seconds * 1e9).round() as u64);
        let (bytes, exact) = (Bytes(bytes as u64), nanos(choice.exact));
        match choice.codec {
            Codec::EXACT if choice.exact <= 0.0 => Self::Overlapped,
            Codec::EXACT => Self::FastestExact(bytes, exact),
            _ => Self::Fastest(bytes, nanos(choice.time), exact),
        }
    }
}

impl fmt::Display for CodecReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |time: &Nanos| time.0 as f64 / 1e6;
        let mib = |bytes: &Bytes| bytes.0 as f64 / f64::from(1 << 20);
        let text = match self {
            Self::Exact => "",
            Self::Recovered => "as before control restarted",
            Self::Ordered => "its tenant wants contributions added in one order",
            Self::Aggregated => "an aggregator sums",
            Self::Disabled => "compression is switched off",
            Self::OneHost => "nothing crosses a wire",
            Self::TooManyHosts => "too many hosts to send to each other directly",
            Self::SmallOperations(Bytes(bytes)) => {
                return write!(f, "operations of {bytes} bytes are too small to gain");
            }
            Self::NoCommonCodec => "no codec that all agents take",
            Self::NothingPasses => "nothing passes now",
            Self::Overlapped => "operations end before the tenant waits for them",
            Self::FastestExact(bytes, exact) => {
                let (exact, mib) = (ms(exact), mib(bytes));
                return write!(f, "nothing within the budget is faster than {exact:.3} ms for {mib:.1} MiB");
            }
            Self::Fastest(bytes, time, exact) => {
                let (time, exact, mib) = (ms(time), ms(exact), mib(bytes));
                return write!(f, "{time:.3} ms for {mib:.1} MiB, which take {exact:.3} ms exact");
            }
        };
        f.write_str(text)
    }
}

/// What a codec is chosen by.
#[derive(Clone, Copy, Debug)]
pub struct CodecRequest<'a> {
    /// The time.
    pub now: Duration,
    /// What all ranks let be lost.
    pub budget: &'a Budget,
    /// What operations came to.
    pub controller: &'a Controller,
    /// The codec of the epoch in use.
    pub current: Codec,
    /// The codecs that all agents have.
    pub levels: &'a [Level],
    /// How many hosts there are.
    pub hosts: usize,
    /// The bytes of an operation; 0 where that is not known.
    pub operation: Bytes,
    /// Operations that are no larger gain nothing.
    pub copy_threshold: Bytes,
    /// The bytes of a chunk.
    pub chunk: Bytes,
}

/// What the network passes of an operation, in bytes a second.
#[derive(Clone, Copy, Debug)]
pub struct CodecRates {
    /// Uncompressed, along the ring as planned.
    pub exact: f64,
    /// Compressed, from each host to all.
    pub coded: f64,
    /// For how long the tenant computes beside an operation.
    pub overlapped: Duration,
}

impl CodecRates {
    /// Returns the outlook on an AllReduce of so many bytes between so many hosts.
    pub fn outlook(&self, hosts: usize, bytes: f64, chunk: Bytes) -> Outlook {
        let hosts = hosts as f64;
        Outlook {
            wire: 2.0 * (hosts - 1.0) / hosts * bytes,
            encoded: bytes,
            decoded: (2.0 * hosts - 1.0) / hosts * bytes,
            rate: self.exact,
            coded_rate: self.coded,
            overlapped: self.overlapped.as_secs_f64(),
            chunks: bytes / chunk.0.max(1) as f64,
        }
    }
}

impl CodecRequest<'_> {
    /// Returns the codec that makes the tenant wait least. `rates` is called where there is something to choose.
    pub fn choose(&self, rates: impl FnOnce(f64) -> CodecRates) -> CodecChoice {
        let budget = self.budget.clone();
        let Bytes(told) = self.operation;
        if told > 0 && told <= self.copy_threshold.0 {
            return CodecChoice::exact(budget, CodecReason::SmallOperations(self.operation));
        }
        if self.levels.is_empty() {
            return CodecChoice::exact(budget, CodecReason::NoCommonCodec);
        }
        let bytes = if told == 0 { TYPICAL as f64 } else { told as f64 };
        let rates = rates(bytes);
        if rates.exact < 1.0 || rates.coded < 1.0 {
            let codec = self.current;
            return CodecChoice { codec, ..CodecChoice::exact(budget, CodecReason::NothingPasses) };
        }
        let outlook = rates.outlook(self.hosts, bytes, self.chunk);
        let choice = self.controller.choose(self.now, self.budget, self.current, self.levels, &outlook);
        let (codec, reason) = (choice.codec, CodecReason::of(choice, bytes));
        if codec == Codec::EXACT {
            return CodecChoice { outlook: Some(outlook), ..CodecChoice::exact(budget, reason) };
        }
        let finer = self.controller.finer(self.budget, codec, self.levels, &outlook);
        let speed = (8.0 * bytes / (choice.time + outlook.overlapped).max(1e-9)) as u64;
        CodecChoice { codec, budget, reason, finer, outlook: Some(outlook), speed }
    }
}

/// Returns the codecs that all agents have, each as slow as at the slowest. Their losses are an operation's, in which each element is
/// encoded twice, and where errors of several ranks may be alike.
pub fn common_levels<'a>(mut agents: impl Iterator<Item = &'a [Level]>) -> Vec<Level> {
    let mut levels = agents.next().unwrap_or_default().to_vec();
    let mut count = 1.0;
    for theirs in agents {
        count += 1.0;
        levels.retain_mut(|level| {
            let same = theirs.iter().find(|other| other.codec == level.codec);
            same.is_some_and(|other| {
                level.encode = level.encode.min(other.encode);
                level.decode = level.decode.min(other.decode);
                true
            })
        });
    }
    for level in &mut levels {
        level.loss *= if level.codec.is_unbiased() { 2.0 } else { count + 1.0 };
    }
    levels
}

/// Returns the bytes that an operation of so many hosts put on the wire, relative to the uncompressed ones. None where there were
/// none.
pub fn coded_ratio(hosts: usize, bytes: Bytes, saved: Bytes) -> Option<f64> {
    let exact = 2.0 * (hosts as f64 - 1.0) / hosts as f64 * bytes.0 as f64;
    (exact >= 1.0).then(|| (1.0 - saved.0 as f64 / exact).max(0.0))
}

/// Returns the same of an operation that would leave out blocks of zeros. It goes by how many of the blocks that agents looked at were
/// zeros, in the inputs of a host's ranks and in the sum.
pub fn nonzero_ratio(inputs: impl Iterator<Item = Option<u32>>, sum: Option<u32>) -> Option<f64> {
    let part = |zeros: Option<u32>| zeros.map(|zeros| 1.0 - (f64::from(zeros) / LOOKED).min(1.0));
    // A host sends what any of its ranks has.
    let sent: Option<f64> = inputs.map(part).sum();
    Some((sent?.min(1.0) + part(sum)?) / 2.0 + PLACES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_codec_is_as_slow_as_at_the_slowest_agent() {
        let fast = Level::typical(Codec::rotated(4));
        let slow = Level { encode: fast.encode / 2.0, ..fast };
        let (one, other) = ([fast, Level::typical(Codec::NonzeroBlocks)], [slow]);
        let [level] = common_levels([&one[..], &other].into_iter()).try_into().unwrap();
        assert_eq!((level.codec, level.encode, level.decode), (fast.codec, slow.encode, fast.decode));
        assert!(level.loss > fast.loss, "each element is encoded twice");
        assert_eq!(common_levels([&one[..], &[]].into_iter()), [], "an agent has none");
    }

    #[test]
    fn ratios_are_of_the_uncompressed_bytes() {
        let ratio = |hosts, bytes, saved| coded_ratio(hosts, Bytes(bytes), Bytes(saved));
        assert_eq!(ratio(2, 1000, 250), Some(0.75));
        assert_eq!((ratio(1, 1000, 0), ratio(2, 10, 20)), (None, Some(0.0)));
        assert_eq!(nonzero_ratio([Some(16)].into_iter(), Some(32)), Some(0.25 + PLACES));
        assert_eq!(nonzero_ratio([Some(0), None].into_iter(), Some(0)), None, "a rank has not looked");
    }

    #[test]
    fn a_codec_is_chosen_where_it_saves_time() {
        let levels = [Level::typical(Codec::rotated(4))];
        let request = CodecRequest {
            now: Duration::ZERO,
            budget: &Budget::Vnmse(0.1),
            controller: &Controller::default(),
            current: Codec::EXACT,
            levels: &levels,
            hosts: 4,
            operation: Bytes(0),
            copy_threshold: Bytes(1 << 10),
            chunk: Bytes(1 << 16),
        };
        let rates = |rate| move |_| CodecRates { exact: rate, coded: rate, overlapped: Duration::ZERO };
        let slow = request.choose(rates(1e7));
        assert_eq!((slow.codec, slow.speed > 0), (levels[0].codec, true), "{slow:?}");
        let small = CodecRequest { operation: Bytes(1024), ..request };
        for (choice, reason) in [
            (CodecRequest { levels: &[], ..request }.choose(rates(1e7)), CodecReason::NoCommonCodec),
            (small.choose(rates(1e7)), CodecReason::SmallOperations(Bytes(1024))),
            (request.choose(rates(0.0)), CodecReason::NothingPasses),
        ] {
            assert_eq!((choice.codec, choice.speed, choice.reason), (Codec::EXACT, 0, reason));
        }
        let fast = request.choose(rates(1e12));
        assert!(matches!(fast.reason, CodecReason::FastestExact(Bytes(TYPICAL), _)), "{fast:?}");
    }
}
