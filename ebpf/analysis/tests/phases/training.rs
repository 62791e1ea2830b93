//! Synthetic trainings: rings that reduce gradients by the bucket, with noise, and the truth about them; and other traffic.

use super::world::{DELAY_NS, Packet};
use rand::{Rng, RngExt};
use rand_chacha::ChaCha8Rng;

/// A training.
#[derive(Debug, Clone)]
pub struct Training {
    /// The ranks' hosts: each sends to the next.
    pub ring: Vec<u32>,
    pub port: u16,
    pub start_ns: u64,
    pub iterations: usize,
    /// From the end of an iteration to the first AllReduce called.
    pub compute_ns: u64,
    /// This part of it is noise, of each rank its own.
    pub noise: f64,
    /// Bytes of each AllReduce.
    pub buckets: Vec<u64>,
    /// From one AllReduce called to the next.
    pub bucket_gap_ns: u64,
    pub bytes_per_second: u64,
    /// A rank that computes longer from an iteration on, by so much.
    pub slow: Option<(usize, usize, u64)>,
}

/// What an iteration did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Iteration {
    /// When each rank called first.
    pub called_ns: Vec<u64>,
    /// When each had its result.
    pub done_ns: Vec<u64>,
}

impl Iteration {
    pub fn began_ns(&self) -> u64 {
        self.called_ns.iter().copied().min().unwrap_or(0)
    }

    pub fn ended_ns(&self) -> u64 {
        self.done_ns.iter().copied().max().unwrap_or(0)
    }
}

const HEADERS: u64 = 66;
const SEGMENT: u64 = 1448;

impl Training {
    pub fn any(random: &mut ChaCha8Rng) -> Self {
        let hosts = random.random_range(2..=16);
        let buckets = random.random_range(1..=4);
        let bytes = random.random_range(100_000..2_000_000);
        Self {
            ring: (0..hosts).collect(),
            port: 20_000,
            start_ns: 1_000_000_000 + random.random_range(0..50_000_000),
            iterations: 40,
            compute_ns: random.random_range(12_000_000..150_000_000),
            noise: random.random_range(0.0..0.05),
            buckets: vec![bytes; buckets],
            bucket_gap_ns: random.random_range(0..3_000_000),
            bytes_per_second: random.random_range(100_000_000..1_200_000_000),
            slow: None,
        }
    }

    /// Its packets, and what it did.
    pub fn run(&self, random: &mut ChaCha8Rng, packets: &mut Vec<Packet>) -> Vec<Iteration> {
        let ranks = self.ring.len();
        let mut ready = vec![self.start_ns; ranks];
        let mut log = Vec::new();
        for number in 0..self.iterations {
            let mut iteration = Iteration::default();
            for (rank, ready) in ready.iter_mut().enumerate() {
                let noise = self.compute_ns as f64 * self.noise * (random.random::<f64>() - 0.5) * 2.0;
                let late = self.slow.filter(|(slow, from, _)| *slow == rank && number >= *from);
                *ready += (self.compute_ns as f64 + noise) as u64 + late.map_or(0, |(.., by)| by);
            }
            iteration.called_ns = ready.clone();
            // When each rank may begin to send the next step.
            let mut free = ready.clone();
            for (bucket, bytes) in self.buckets.iter().enumerate() {
                let called: Vec<u64> =
                    iteration.called_ns.iter().map(|at| at + bucket as u64 * self.bucket_gap_ns).collect();
                free = self.reduce(random, packets, &called, &free, *bytes);
            }
            ready = free.iter().map(|end| end + random.random_range(20_000..200_000)).collect();
            iteration.done_ns = free;
            log.push(iteration);
        }
        log
    }

    /// One AllReduce by a ring. Gives when each rank has its result.
    fn reduce(
        &self,
        random: &mut ChaCha8Rng,
        packets: &mut Vec<Packet>,
        called: &[u64],
        free: &[u64],
        bytes: u64,
    ) -> Vec<u64> {
        let ranks = self.ring.len();
        let mut now: Vec<u64> = called.iter().zip(free).map(|(called, free)| *called.max(free)).collect();
        for (rank, at) in called.iter().enumerate() {
            // A word to who sends to me: I can receive.
            let jitter = random.random_range(20_000..80_000);
            self.packet(packets, rank, true, at + jitter, 48 + HEADERS);
        }
        let ready: Vec<u64> = called.iter().map(|at| at + 150_000).collect();
        for _ in 0..2 * (ranks - 1) {
            let mut ends = vec![0; ranks];
            for (rank, now) in now.iter().enumerate() {
                let next = (rank + 1) % ranks;
                let begin = *now.max(&ready[next]) + random.random_range(5_000..60_000);
                ends[next] = self.send(packets, rank, begin, bytes / ranks as u64);
            }
            now = now.iter().zip(&ends).map(|(now, end)| *now.max(end)).collect();
        }
        now
    }

    /// Sends a step's bytes to the next rank; gives when they are there.
    fn send(&self, packets: &mut Vec<Packet>, rank: usize, begin: u64, bytes: u64) -> u64 {
        let (mut at, mut left, mut sent) = (begin, bytes, 0_u64);
        while left > 0 {
            let part = left.min(45 * SEGMENT);
            let wire = part + part.div_ceil(SEGMENT) * HEADERS;
            self.packet(packets, rank, false, at, wire);
            sent += 1;
            at += wire * 1_000_000_000 / self.bytes_per_second;
            left -= part;
            if sent % 2 == 0 || left == 0 {
                self.packet(packets, (rank + 1) % self.ring.len(), true, at + 2 * DELAY_NS, HEADERS);
            }
        }
        at + DELAY_NS
    }

    /// A packet on the connection from a rank to the next, or back on the one from the rank before.
    fn packet(&self, packets: &mut Vec<Packet>, rank: usize, back: bool, time_ns: u64, bytes: u64) {
        let ranks = self.ring.len();
        let other = if back { (rank + ranks - 1) % ranks } else { (rank + 1) % ranks };
        let (from, to) = (self.ring[rank], self.ring[other]);
        // The connection belongs to its sender.
        let own = self.port + if back { other } else { rank } as u16;
        let (from_port, to_port) = if back { (9000, own) } else { (own, 9000) };
        packets.push(Packet { time_ns, from, to, from_port, to_port, bytes, rtt_ns: 0 });
    }
}

/// Words between hosts, without meaning: heartbeats to the first host, by connections of their own.
pub fn chatter(random: &mut ChaCha8Rng, hosts: u32, from_ns: u64, until_ns: u64, packets: &mut Vec<Packet>) {
    for host in 1..hosts {
        let mut at = from_ns + random.random_range(0..1_000_000_000);
        while at < until_ns {
            let port = 31_000 + host as u16;
            packets.push(Packet {
                time_ns: at,
                from: host,
                to: 0,
                from_port: port,
                to_port: 29_500,
                bytes: 120,
                rtt_ns: 0,
            });
            let back = at + 300_000;
            packets.push(Packet {
                time_ns: back,
                from: 0,
                to: host,
                from_port: 29_500,
                to_port: port,
                bytes: 90,
                rtt_ns: 0,
            });
            at += random.random_range(100_000_000..1_000_000_000);
        }
    }
}

/// Requests and answers at random times between random hosts: of random sizes, or all alike.
pub fn requests(
    random: &mut ChaCha8Rng,
    hosts: u32,
    (from_ns, until_ns): (u64, u64),
    mean_ns: u64,
    alike: Option<u64>,
    packets: &mut Vec<Packet>,
) {
    let client = random.random_range(0..hosts);
    let server = (client + random.random_range(1..hosts)) % hosts;
    let port = random.random_range(40_000..60_000);
    let mut at = from_ns;
    while at < until_ns {
        let size =
            |random: &mut ChaCha8Rng| 5_000 + (random.next_u32() % (1 << random.random_range(8..20))) as u64;
        for (from, to, from_port, to_port, delay) in
            [(client, server, port, 80, 0), (server, client, 80, port, 400_000)]
        {
            let bytes = alike.unwrap_or_else(|| size(random));
            packets.push(Packet { time_ns: at + delay, from, to, from_port, to_port, bytes, rtt_ns: 0 });
        }
        let uniform: f64 = random.random::<f64>().max(1e-9);
        at += (-uniform.ln() * mean_ns as f64) as u64 + 1;
    }
}

/// A transfer without a pause.
pub fn transfer(
    random: &mut ChaCha8Rng,
    hosts: u32,
    (from_ns, until_ns): (u64, u64),
    packets: &mut Vec<Packet>,
) {
    let from = random.random_range(0..hosts);
    let to = (from + random.random_range(1..hosts)) % hosts;
    let from_port = random.random_range(40_000..60_000);
    let mut at = from_ns;
    while at < until_ns {
        packets.push(Packet { time_ns: at, from, to, from_port, to_port: 22, bytes: 65_000, rtt_ns: 0 });
        at += random.random_range(100_000..450_000);
    }
}
