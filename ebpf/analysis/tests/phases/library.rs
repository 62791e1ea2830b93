//! Jobs as libraries run them: rounds of messages of any collective, in virtual time and from a seed.

use super::training::Iteration;
use super::world::{DELAY_NS, Packet};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

const HEADERS: u64 = 66;
const SEGMENT: u64 = 1448;
const WINDOW: u64 = 256 << 10;
const MS: u64 = 1_000_000;

/// How a library's messages go over TCP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// Each receiver says first that it is ready, in a message of 48 bytes: torch's Gloo.
    Gloo,
    /// Messages of up to 64 KiB go at once. Longer ones are announced by the sender and asked for by the receiver, as Open MPI and
    /// MPICH do.
    Mpi,
}

/// How an AllReduce goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AllReduce {
    Ring,
    HalvingDoubling,
    /// A binomial tree to the first rank, and back.
    Tree,
}

/// How one rank's bytes get to all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Broadcast {
    Flat,
    Binomial,
    /// A binomial scatter, and a ring that gathers: MPICH's for long messages.
    ScatterGather,
}

/// What slows a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slow {
    /// It computes longer in its forward pass, by so much.
    Forward(u64),
    /// It waits for data before its forward pass, so before a broadcast of buffers too.
    Loading(u64),
    /// Its link has this many hundredths of the rate.
    Link(u64),
}

/// When ranks send point to point: each to the one that is so much further on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exchange {
    /// In the middle of the forward pass, over connections of their own. That is where parts of a sequence or a grid meet.
    Forward,
    /// The same over the connections of AllReduces.
    Shared,
    /// After each AllReduce but the last.
    Between,
}

/// A job.
#[derive(Debug, Clone)]
pub struct Job {
    pub hosts: Vec<u32>,
    pub port: u16,
    pub library: Library,
    pub all_reduce: AllReduce,
    pub start_ns: u64,
    pub iterations: usize,
    pub forward_ns: u64,
    pub backward_ns: u64,
    /// From an iteration's last result to the next one's beginning.
    pub step_ns: u64,
    /// This part of the compute is noise, of each rank its own.
    pub noise: f64,
    /// Bytes of each AllReduce; one is called as its part of the backward pass is done.
    pub buckets: Vec<u64>,
    /// Passes without AllReduces before the last of an iteration.
    pub accumulated: usize,
    /// Buffers that the first rank sends to all before each iteration's forward pass.
    pub buffers: Option<(Broadcast, u64)>,
    /// When each rank sends bytes to another, how far on that is, and how many.
    pub exchange: Option<(Exchange, usize, u64)>,
    /// So often an iteration ends with all sending so many bytes to the first rank.
    pub gather: Option<(usize, u64)>,
    /// After so many iterations all pause for so long, and reduce four bytes.
    pub evaluation: Option<(usize, u64)>,
    /// A pipeline in place of the AllReduces: so many micro-batches of so many bytes pass all ranks forward, then backward.
    pub pipeline: Option<(usize, u64)>,
    /// The AllReduces follow the pipeline, whose stages have connections of their own.
    pub reduces: bool,
    pub bytes_per_second: u64,
    /// A rank, from which iteration on, and what.
    pub slow: Option<(usize, usize, Slow)>,
}

impl Job {
    /// A plain job of four to eight hosts.
    pub fn any(random: &mut ChaCha8Rng) -> Self {
        let count = random.random_range(1..=4);
        let bytes = random.random_range(300_000..1_500_000);
        Self {
            hosts: (0..[4, 4, 6, 8][random.random_range(0..4)]).collect(),
            port: 20_000,
            library: Library::Gloo,
            all_reduce: AllReduce::Ring,
            start_ns: 1_000 * MS + random.random_range(0..50 * MS),
            iterations: 40,
            forward_ns: random.random_range(15 * MS..60 * MS),
            backward_ns: random.random_range(4 * MS..20 * MS),
            step_ns: random.random_range(MS / 2..6 * MS),
            noise: random.random_range(0.0..0.03),
            buckets: vec![bytes; count],
            accumulated: 0,
            buffers: None,
            exchange: None,
            gather: None,
            evaluation: None,
            pipeline: None,
            reduces: false,
            bytes_per_second: random.random_range(120_000_000..1_200_000_000),
            slow: None,
        }
    }

    /// Its packets, and what it did.
    pub fn run(&self, random: &mut ChaCha8Rng, packets: &mut Vec<Packet>) -> Vec<Iteration> {
        let ranks = self.hosts.len();
        let begin = (0..ranks).map(|_| self.start_ns + random.random_range(0..3 * MS)).collect();
        let mut run =
            Run { job: self, random, packets, now: begin, sends: vec![0; ranks], part: 100, beside: false };
        (0..self.iterations).map(|number| run.iterate(number)).collect()
    }
}

/// A message of a round: from, to, bytes.
type Message = (usize, usize, u64);

struct Run<'a> {
    job: &'a Job,
    random: &'a mut ChaCha8Rng,
    packets: &'a mut Vec<Packet>,
    /// When each rank goes on.
    now: Vec<u64>,
    /// When each rank's link is free.
    sends: Vec<u64>,
    /// The slow link's part of the rate, in hundredths.
    part: u64,
    /// Messages go over other connections than those of AllReduces.
    beside: bool,
}

impl Run<'_> {
    fn iterate(&mut self, number: usize) -> Iteration {
        let job = self.job;
        let slow = job.slow.filter(|(_, from, _)| number >= *from);
        if let Some((rank, _, Slow::Loading(by_ns))) = slow {
            self.now[rank] += by_ns;
        }
        if let Some((_, _, Slow::Link(part))) = slow {
            self.part = part;
        }
        if let Some((how, bytes)) = job.buffers {
            let rounds = broadcast(how, job.hosts.len(), bytes);
            self.collective(&rounds);
        }
        for _ in 0..job.accumulated {
            self.compute(job.forward_ns + job.backward_ns);
        }
        let iteration = match job.pipeline {
            Some((count, bytes)) => {
                self.beside = job.reduces;
                let stages = self.pipeline(count, bytes, slow);
                self.beside = false;
                if job.reduces { self.reduce() } else { stages }
            }
            None => {
                let within = job.exchange.map(|(when, ..)| when).filter(|when| *when != Exchange::Between);
                let first_ns = if within.is_some() { job.forward_ns / 2 } else { 0 };
                if let Some(when) = within {
                    self.compute(first_ns);
                    self.beside = when == Exchange::Forward;
                    self.exchange(when);
                    self.beside = false;
                }
                self.compute(job.forward_ns - first_ns);
                if let Some((rank, _, Slow::Forward(by_ns))) = slow {
                    self.now[rank] += by_ns;
                }
                self.reduce()
            }
        };
        let step_ns = job.step_ns;
        self.compute(step_ns);
        if let Some((_, bytes)) = job.gather.filter(|(every, _)| (number + 1).is_multiple_of(*every)) {
            let to_first = (1..job.hosts.len()).map(|rank| (rank, 0, bytes)).collect();
            self.collective(&[to_first]);
            self.compute(step_ns);
        }
        if let Some((_, pause_ns)) = job.evaluation.filter(|(every, _)| (number + 1).is_multiple_of(*every)) {
            self.compute(pause_ns);
            self.collective(&all_reduce(AllReduce::Tree, job.hosts.len(), 4));
        }
        iteration
    }

    /// Each rank sends to one that is further on, if it is time.
    fn exchange(&mut self, when: Exchange) {
        let ranks = self.hosts();
        if let Some((_, distance, bytes)) = self.job.exchange.filter(|(at, ..)| *at == when) {
            self.collective(&[(0..ranks).map(|rank| (rank, (rank + distance) % ranks, bytes)).collect()]);
        }
    }

    /// Every rank computes for this long, and a noise.
    fn compute(&mut self, ns: u64) {
        for now in &mut self.now {
            let noise = ns as f64 * self.job.noise * (self.random.random::<f64>() - 0.5) * 2.0;
            *now += (ns as f64 + noise) as u64 + self.random.random_range(10_000..100_000);
        }
    }

    /// The backward pass, its AllReduces called on the way and done one after the other.
    fn reduce(&mut self) -> Iteration {
        let job = self.job;
        let mut calls = Vec::new();
        // Stages have computed backward already.
        let backward_ns = if job.reduces { 0 } else { job.backward_ns };
        for _ in &job.buckets {
            self.compute(backward_ns / job.buckets.len() as u64);
            calls.push(self.now.clone());
        }
        let called_ns = calls[0].clone();
        self.now.clone_from(&called_ns);
        for (place, (bytes, called)) in job.buckets.iter().zip(calls).enumerate() {
            if place > 0 {
                self.exchange(Exchange::Between);
            }
            for (now, called) in self.now.iter_mut().zip(called) {
                *now = called.max(*now);
            }
            self.collective(&all_reduce(job.all_reduce, job.hosts.len(), *bytes));
        }
        Iteration { called_ns, done_ns: self.now.clone() }
    }

    /// All micro-batches forward through the ranks, then back: GPipe's schedule.
    fn pipeline(&mut self, count: usize, bytes: u64, slow: Option<(usize, usize, Slow)>) -> Iteration {
        let (job, ranks) = (self.job, self.hosts());
        let mut called_ns = vec![0; ranks];
        let mut done_ns = vec![0; ranks];
        let each = |pass_ns: u64| pass_ns / count as u64;
        for (forward, pass_ns) in [(true, each(job.forward_ns)), (false, each(job.backward_ns))] {
            for _ in 0..count {
                for place in 0..ranks {
                    let rank = if forward { place } else { ranks - 1 - place };
                    let more = match slow {
                        Some((slow, _, Slow::Forward(by_ns))) if slow == rank && forward => each(by_ns),
                        _ => 0,
                    };
                    let noise = 1.0 + job.noise * (self.random.random::<f64>() - 0.5) * 2.0;
                    self.now[rank] += (pass_ns as f64 * noise) as u64 + more;
                    if place + 1 == ranks {
                        continue;
                    }
                    let next = if forward { rank + 1 } else { rank - 1 };
                    if called_ns[rank] == 0 {
                        called_ns[rank] = self.now[rank];
                    }
                    if called_ns[next] == 0 {
                        called_ns[next] = self.now[next];
                    }
                    // The sender goes on at once.
                    let arrived_ns = self.message((rank, next, bytes), self.now[rank], self.now[next]);
                    self.now[next] = self.now[next].max(arrived_ns);
                    done_ns[next] = arrived_ns;
                }
            }
        }
        for (called, now) in called_ns.iter_mut().zip(&self.now) {
            *called = if *called == 0 { *now } else { *called };
        }
        if !job.reduces {
            let end = self.now.iter().copied().max().unwrap_or(0);
            self.now.fill(end);
        }
        Iteration { called_ns, done_ns }
    }

    fn hosts(&self) -> usize {
        self.job.hosts.len()
    }

    /// Rounds of messages; a rank goes on to the next as soon as its own part of one is done.
    fn collective(&mut self, rounds: &[Vec<Message>]) {
        for round in rounds {
            let entered = self.now.clone();
            for message in round {
                let (from, to, _) = *message;
                let jitter = self.random.random_range(5_000..60_000);
                let arrived_ns = self.message(*message, entered[from] + jitter, entered[to]);
                self.now[to] = self.now[to].max(arrived_ns);
                self.now[from] = self.now[from].max(self.sends[from]);
            }
        }
    }

    /// Sends a message that is there at one time and expected at another; gives when it has arrived.
    fn message(&mut self, (from, to, bytes): Message, there_ns: u64, expected_ns: u64) -> u64 {
        let mut begin_ns = there_ns;
        if self.job.library == Library::Gloo {
            let jitter = self.random.random_range(10_000..40_000);
            self.packet(to, from, expected_ns + jitter, 48 + HEADERS, 0);
            begin_ns = begin_ns.max(expected_ns + jitter + DELAY_NS);
        } else if bytes > 64 << 10 {
            self.packet(from, to, there_ns, 64 + HEADERS, 0);
            let asked_ns = expected_ns.max(there_ns + DELAY_NS) + self.random.random_range(10_000..40_000);
            self.packet(to, from, asked_ns, 48 + HEADERS, 0);
            begin_ns = begin_ns.max(asked_ns + DELAY_NS);
        }
        let slow = self.job.slow.is_some_and(|(rank, ..)| rank == from || rank == to);
        let rate = self.job.bytes_per_second * if slow { self.part } else { 100 } / 100;
        let handed_ns = begin_ns.max(self.sends[from]);
        let (mut at, mut left, mut sent) = (handed_ns, bytes, 0_u64);
        // No packet takes as long as the silence that ends a burst.
        let most = (rate / 5_000).clamp(SEGMENT, 45 * SEGMENT);
        while left > 0 {
            let part = left.min(most);
            let wire = part + part.div_ceil(SEGMENT) * HEADERS;
            // It waited behind what its sender's window allows.
            let takes_ns = wire * 1_000_000_000 / rate;
            let waited_ns = (at - handed_ns).min(WINDOW * 1_000_000_000 / rate);
            self.packet(from, to, at, wire, waited_ns + takes_ns + 2 * DELAY_NS);
            sent += 1;
            at += takes_ns;
            left -= part;
            if sent.is_multiple_of(2) || left == 0 {
                self.packet(to, from, at + 2 * DELAY_NS, HEADERS, 0);
            }
        }
        self.sends[from] = at;
        at.max(expected_ns) + DELAY_NS
    }

    /// A packet on the connection that two ranks have, or on the one beside it.
    fn packet(&mut self, from: usize, to: usize, time_ns: u64, bytes: u64, rtt_ns: u64) {
        let job = self.job;
        let port = |rank: usize, other: usize| {
            let (low, high) = (rank.min(other), rank.max(other));
            let beside = if self.beside { 500 } else { 0 };
            if rank == low { job.port + beside + (low * 16 + high) as u16 } else { job.port - 10_000 }
        };
        let (from_port, to_port) = (port(from, to), port(to, from));
        self.packets.push(Packet {
            time_ns,
            from: job.hosts[from],
            to: job.hosts[to],
            from_port,
            to_port,
            bytes,
            rtt_ns,
        });
    }
}

/// The rounds of an AllReduce.
fn all_reduce(how: AllReduce, ranks: usize, bytes: u64) -> Vec<Vec<Message>> {
    let powers = |most: usize| {
        std::iter::successors(Some(1), |power| Some(power * 2)).take_while(move |one| *one < most)
    };
    match how {
        AllReduce::Ring => {
            let part = (bytes / ranks as u64).max(1);
            let round: Vec<Message> = (0..ranks).map(|rank| (rank, (rank + 1) % ranks, part)).collect();
            vec![round; 2 * (ranks - 1)]
        }
        AllReduce::HalvingDoubling => {
            // Ranks beyond the power of two hand theirs over first, and get the result last.
            let whole = 1 << ranks.ilog2();
            let beyond: Vec<Message> = (whole..ranks).map(|rank| (rank, rank - whole, bytes)).collect();
            let round = |distance: usize| -> Vec<Message> {
                let part = bytes * distance as u64 / whole as u64;
                (0..whole).map(|rank| (rank, rank ^ distance, part)).collect()
            };
            let there: Vec<Vec<Message>> = powers(whole).map(round).collect();
            let back = beyond.iter().map(|(from, to, bytes)| (*to, *from, *bytes)).collect();
            [beyond]
                .into_iter()
                .chain(there.iter().rev().cloned())
                .chain(there.iter().cloned())
                .chain([back])
                .collect()
        }
        AllReduce::Tree => {
            let round = |distance: usize| -> Vec<Message> {
                let sends = (0..ranks).filter(|rank| rank % (2 * distance) == distance);
                sends.map(|rank| (rank, rank - distance, bytes)).collect()
            };
            let there: Vec<Vec<Message>> = powers(ranks).map(round).collect();
            let back = broadcast(Broadcast::Binomial, ranks, bytes);
            there.into_iter().chain(back).collect()
        }
    }
}

/// The rounds of a broadcast from the first rank.
fn broadcast(how: Broadcast, ranks: usize, bytes: u64) -> Vec<Vec<Message>> {
    let distances = (0..ranks.next_power_of_two().ilog2()).rev().map(|power| 1_usize << power);
    let binomial = |share: bool| {
        let part = |distance: usize| if share { bytes * distance as u64 / ranks as u64 } else { bytes };
        let round = |distance: usize| -> Vec<Message> {
            let sends = (0..ranks).filter(|rank| rank % (2 * distance) == 0 && rank + distance < ranks);
            sends.map(|rank| (rank, rank + distance, part(distance))).collect()
        };
        distances.clone().map(round).collect::<Vec<_>>()
    };
    match how {
        Broadcast::Flat => vec![(1..ranks).map(|rank| (0, rank, bytes)).collect()],
        Broadcast::Binomial => binomial(false),
        Broadcast::ScatterGather => {
            let round: Vec<Message> =
                (0..ranks).map(|rank| (rank, (rank + 1) % ranks, bytes / ranks as u64)).collect();
            binomial(true).into_iter().chain(vec![round; ranks - 1]).collect()
        }
    }
}
