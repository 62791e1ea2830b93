//! Coflows over the ports of one big switch: as a text has them, or made up.

use harmonaize_units::{Bytes, Nanos};

/// Bytes of a megabyte of the text.
const MEGABYTE: f64 = 1_048_576.0;

/// Most ports, and most transfers of all coflows together, that are taken in.
const MAX_PORTS: usize = 4096;
const MAX_TRANSFERS: usize = 8_000_000;

/// Bytes from one port to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The port that sends.
    pub from: usize,
    /// The port that receives; it may be the same one, since a port is a rack of the text.
    pub to: usize,
    /// How much, at least one byte.
    pub bytes: Bytes,
}

/// Transfers that are worth something together alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Coflow {
    /// When all of them want to begin.
    pub arrival: Nanos,
    /// Of two ports one at most.
    pub transfers: Vec<Transfer>,
}

/// Coflows by their arrival, over ports that are numbered from 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    ports: usize,
    coflows: Vec<Coflow>,
}

/// Why a text has no coflows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line} of the coflows: {problem}")]
pub struct CoflowError {
    /// From 1.
    pub line: usize,
    /// What is wrong with it.
    pub problem: &'static str,
}

/// The numbers of a line.
struct Fields<'a> {
    line: usize,
    fields: std::str::SplitAsciiWhitespace<'a>,
}

impl<'a> Fields<'a> {
    fn error(&self, problem: &'static str) -> CoflowError {
        CoflowError { line: self.line, problem }
    }

    fn text(&mut self, problem: &'static str) -> Result<&'a str, CoflowError> {
        self.fields.next().ok_or(self.error(problem))
    }

    fn number(&mut self, problem: &'static str) -> Result<u64, CoflowError> {
        self.text(problem)?.parse().map_err(|_| self.error(problem))
    }

    /// A number of at most so much.
    fn bounded(&mut self, most: usize, problem: &'static str) -> Result<usize, CoflowError> {
        let number = usize::try_from(self.number(problem)?).map_err(|_| self.error(problem))?;
        if number > most { Err(self.error(problem)) } else { Ok(number) }
    }

    /// A port and its megabytes, `7:12.5`.
    fn sized(&mut self, ports: usize) -> Result<(usize, f64), CoflowError> {
        let problem = "no port with its megabytes, as 7:12.5";
        let (port, size) = self.text(problem)?.split_once(':').ok_or(self.error(problem))?;
        let port = port.parse().ok().filter(|port| *port < ports).ok_or(self.error(problem))?;
        let size = size.parse::<f64>().ok().filter(|size| (0.0..1e12).contains(size));
        Ok((port, size.ok_or(self.error(problem))?))
    }
}

impl Workload {
    /// Coflows over so many ports. None where a transfer names another port, or coflows are not in order of their arrival.
    pub fn new(ports: usize, coflows: Vec<Coflow>) -> Option<Self> {
        let inside =
            |transfer: &Transfer| transfer.from < ports && transfer.to < ports && transfer.bytes.0 > 0;
        let valid = coflows.is_sorted_by_key(|coflow| coflow.arrival)
            && coflows.iter().all(|coflow| coflow.transfers.iter().all(inside));
        valid.then_some(Self { ports, coflows })
    }

    /// Reads the text of the Coflow-Benchmark. It begins with the numbers of ports and coflows. Each coflow follows with a number, its
    /// arrival in milliseconds, how many ports send, which, how many receive, and which with its megabytes of 2^20 bytes. All senders
    /// send a receiver alike.
    ///
    /// # Errors
    /// Where a line is not so, names a port that there is not, or comes before an earlier coflow.
    pub fn parse(text: &str) -> Result<Self, CoflowError> {
        let mut lines = text
            .lines()
            .enumerate()
            .map(|(index, line)| Fields { line: index + 1, fields: line.split_ascii_whitespace() });
        let mut head = lines.next().ok_or(CoflowError { line: 1, problem: "nothing is there" })?;
        let ports = head.bounded(MAX_PORTS, "no number of ports")?;
        let count = head.number("no number of coflows")?;
        let (mut coflows, mut transfers): (Vec<Coflow>, usize) = (Vec::new(), 0);
        let mut last = head.line;
        for mut fields in lines {
            last = fields.line;
            let coflow = parse_coflow(&mut fields, ports, MAX_TRANSFERS - transfers)?;
            if coflows.last().is_some_and(|before| before.arrival > coflow.arrival) {
                return Err(fields.error("a coflow that comes before the one above"));
            }
            transfers += coflow.transfers.len();
            coflows.push(coflow);
        }
        if coflows.len() as u64 != count {
            return Err(CoflowError { line: last, problem: "not as many coflows as the first line says" });
        }
        Ok(Self { ports, coflows })
    }

    /// Makes up so many coflows over 150 ports, 526 an hour. Narrow and wide, short and long ones have the shares that the paper on Varys
    /// gives. Few of them have nearly all bytes. The same for the same seed.
    pub fn generate(seed: u64, coflows: usize) -> Self {
        let mut random = Random(seed);
        let (ports, mut arrival) = (150, 0.0);
        let coflows = (0..coflows).map(|_| {
            // They come in bunches: most soon after the last one, and then none for long.
            let mean = if random.chance(0.8) { 4.0 } else { 18.5 };
            arrival -= mean * (1.0 - random.unit()).ln();
            let kind = random.unit();
            // How many send and receive, and megabytes that one sends another.
            let (senders, receivers, size) = if kind < 0.6 {
                (random.between(1.0, 12.0), random.between(1.0, 3.0), random.between(0.3, 4.0))
            } else if kind < 0.76 {
                (random.between(1.0, 6.0), random.between(1.0, 8.0), random.between(5.0, 300.0))
            } else if kind < 0.88 {
                (random.between(10.0, 147.0), random.between(8.0, 100.0), random.between(0.5, 4.0))
            } else if random.chance(0.5) {
                (random.between(5.0, 100.0), random.between(10.0, 100.0), random.between(5.0, 280.0))
            } else {
                (random.between(100.0, 147.0), random.between(100.0, 147.0), random.between(5.0, 280.0))
            };
            let from = random.ports(ports, senders.round() as usize);
            let to = random.ports(ports, receivers.round() as usize);
            let mut transfers = Vec::with_capacity(from.len() * to.len());
            for to in to {
                let bytes = Bytes((size * random.between(0.5, 2.0) * MEGABYTE) as u64 + 1);
                transfers.extend(from.iter().map(|from| Transfer { from: *from, to, bytes }));
            }
            Coflow { arrival: Nanos((arrival * 1e9) as u64), transfers }
        });
        let coflows = coflows.collect();
        Self { ports, coflows }
    }

    /// How many ports there are.
    pub fn ports(&self) -> usize {
        self.ports
    }

    /// All coflows, by their arrival.
    pub fn coflows(&self) -> &[Coflow] {
        &self.coflows
    }
}

fn parse_coflow(fields: &mut Fields<'_>, ports: usize, most: usize) -> Result<Coflow, CoflowError> {
    fields.number("no number of the coflow")?;
    let arrival = fields.number("no arrival in milliseconds")?;
    let mut senders = Vec::new();
    for _ in 0..fields.bounded(ports, "no number of senders")? {
        senders.push(fields.bounded(ports.saturating_sub(1), "no port of a sender")?);
    }
    let receivers = fields.bounded(ports, "no number of receivers")?;
    if senders.len() * receivers > most {
        return Err(fields.error("too many transfers"));
    }
    let mut transfers = Vec::with_capacity(senders.len() * receivers);
    for _ in 0..receivers {
        let (to, size) = fields.sized(ports)?;
        let bytes = Bytes((size * MEGABYTE / senders.len().max(1) as f64).round() as u64);
        if bytes.0 > 0 {
            transfers.extend(senders.iter().map(|from| Transfer { from: *from, to, bytes }));
        }
    }
    if fields.fields.next().is_some() {
        return Err(fields.error("more than its receivers"));
    }
    let arrival = arrival.checked_mul(1_000_000).ok_or(fields.error("an arrival that is too late"))?;
    Ok(Coflow { arrival: Nanos(arrival), transfers })
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// From 0 to below 1.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn chance(&mut self, part: f64) -> bool {
        self.unit() < part
    }

    /// As often in each octave.
    fn between(&mut self, least: f64, most: f64) -> f64 {
        least * (most / least).powf(self.unit())
    }

    /// So many different ports, at least one.
    fn ports(&mut self, ports: usize, count: usize) -> Vec<usize> {
        let mut all: Vec<usize> = (0..ports).collect();
        let count = count.clamp(1, ports);
        for at in 0..count {
            let other = at + (self.unit() * (ports - at) as f64) as usize;
            all.swap(at, other.min(ports - 1));
        }
        all.truncate(count);
        all
    }
}
