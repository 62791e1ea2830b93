//! A model of iterations of compute and ring AllReduce, in virtual time and from a seed.
//!
//! Every rank computes, then sends around the ring: chunk `k` of a rank goes when it is there itself and chunk `k - 1` has
//! come from its neighbour. Edges are queues with a rate and a latency; a sender has a window under way, so a round trip is
//! the latency both ways and what waits at the edge, the window at most.

use crate::clean::Clean;
use harmonaize_analysis::Nanos;
use harmonaize_analysis::straggler::{EdgeTimes, Observed, RankTimes};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::time::Duration;

/// What is done to a run, from one iteration to another.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Injected {
    /// A rank, and by how much longer it computes.
    pub(crate) worker: Option<(u32, f64)>,
    /// The edge that leaves a rank, and which part of its rate is left.
    pub(crate) link: Option<(u32, f64)>,
    /// So does the edge that comes in.
    pub(crate) both_directions: bool,
    /// And it loses this part of its packets.
    pub(crate) loss: f64,
}

/// How a unit is seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum View {
    /// By marks: when ranks call and end, when the first and last bytes were handed over and arrived.
    Marks,
    /// By packets at all hosts.
    Packets,
}

/// A piece that left and arrived.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece {
    pub(crate) handed: f64,
    pub(crate) sent: f64,
    pub(crate) egressed: f64,
    pub(crate) arrived: f64,
    pub(crate) bytes: f64,
}

/// A run.
pub(crate) struct Ring {
    clean: Clean,
    pub(crate) ranks: usize,
    bytes: f64,
    random: ChaCha8Rng,
    offsets: Vec<(f64, f64)>,
    ends: Vec<f64>,
    iteration: u64,
}

impl Ring {
    pub(crate) fn new(clean: &Clean, ranks: usize, bytes: f64, seed: u64) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let clean = clean.clone();
        let mut both = || (random.random_range(-1.0..1.0), random.random_range(-1.0..1.0));
        let offsets =
            (0..ranks).map(|_| both()).map(|(offset, drift)| (offset * clean.offset, drift * clean.drift));
        let offsets = offsets.collect();
        Self { clean, ranks, bytes, random, offsets, ends: vec![1e9; ranks], iteration: 0 }
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.random.random::<f64>()).ln()
    }

    fn chance(&mut self, probability: f64) -> bool {
        self.random.random::<f64>() < probability
    }

    fn compute(&mut self, common: f64, extra: f64) -> f64 {
        let clean = self.clean.clone();
        let mut time = clean.base * (1.0 + common) + self.exponential(clean.jitter) + extra;
        if self.chance(clean.pause_probability) {
            time += self.exponential(clean.pause);
        }
        time
    }

    /// The next iteration, as true times: when each rank called and ended, and what each edge carried.
    fn iterate(&mut self, injected: &Injected) -> (Vec<f64>, Vec<f64>, Vec<Vec<Piece>>, Vec<u64>) {
        let clean = self.clean.clone();
        let common = (self.random.random::<f64>() + self.random.random::<f64>() - 1.0) * clean.common * 2.4;
        let starts: Vec<f64> = (0..self.ranks)
            .map(|rank| {
                let extra = injected.worker.filter(|(slow, _)| *slow as usize == rank);
                self.ends[rank] + self.compute(common, extra.map_or(0.0, |(_, extra)| extra))
            })
            .collect();
        let chunk = self.bytes / self.ranks as f64;
        let segments = (chunk / clean.segment).ceil().max(1.0) as usize;
        let segment = chunk / segments as f64;
        let mut free = starts.clone();
        let mut there = vec![vec![0.0f64; segments]; self.ranks];
        let mut pieces = vec![Vec::new(); self.ranks];
        let mut repeats = vec![0; self.ranks];
        for step in 0..2 * (self.ranks - 1) {
            let mut arrived = there.clone();
            for rank in 0..self.ranks {
                let next = (rank + 1) % self.ranks;
                let slow = injected.link.filter(|(from, _)| {
                    *from as usize == rank || injected.both_directions && *from as usize == next
                });
                let rate = clean.rate * slow.map_or(1.0, |(_, part)| part);
                let mut delay = self.exponential(clean.turnaround);
                if self.chance(clean.stall_probability) {
                    delay += self.exponential(clean.stall);
                }
                for piece in 0..segments {
                    let ready =
                        if step == 0 { starts[rank] } else { there[rank][piece].max(starts[rank]) + delay };
                    let left = ready.max(free[rank]);
                    let mut takes = segment / rate;
                    if slow.is_some() && self.chance(1.0 - (1.0 - injected.loss).powf(segment / 1448.0)) {
                        repeats[rank] += 1;
                        takes += 2.0 * clean.latency + segment / rate;
                    }
                    free[rank] = left + takes;
                    let handed = ready.max(left - clean.window / rate);
                    let gone = free[rank];
                    arrived[next][piece] = gone + clean.latency;
                    pieces[rank].push(Piece {
                        handed,
                        sent: left,
                        egressed: gone,
                        arrived: gone + clean.latency,
                        bytes: segment,
                    });
                }
            }
            there = arrived;
        }
        let last = |rank: usize| there[rank].iter().copied().fold(starts[rank], f64::max);
        self.ends = (0..self.ranks).map(last).collect();
        (starts, self.ends.clone(), pieces, repeats)
    }

    fn clock(&self, rank: usize, time: f64) -> Option<Nanos> {
        let (offset, drift) = self.offsets[rank];
        Some(Nanos((time + offset + drift * time) as u64))
    }

    /// The next iteration as it is seen.
    pub(crate) fn next(&mut self, view: View, injected: &Injected) -> Observed {
        let (starts, ends, pieces, repeats) = self.iterate(injected);
        let ranks = (0..self.ranks).map(|rank| RankTimes {
            rank: rank as u32,
            start: self.clock(rank, starts[rank]),
            end: self.clock(rank, ends[rank]),
            waited: Duration::ZERO,
        });
        let edges = pieces.iter().zip(&repeats).enumerate().map(|(rank, (pieces, repeats))| {
            let to = (rank + 1) % self.ranks;
            let (first, last) = (pieces[0], pieces[pieces.len() - 1]);
            let packets = view == View::Packets;
            EdgeTimes {
                from: rank as u32,
                to: to as u32,
                first: self.clock(rank, if packets { first.sent } else { first.handed }),
                last: self.clock(rank, if packets { last.sent } else { last.handed }),
                arrived: self.clock(to, last.arrived),
                active: packets.then(|| Duration::from_nanos(active(pieces) as u64)),
                bytes: pieces.iter().map(|piece| piece.bytes).sum::<f64>() as u64,
                rtt: packets.then(|| Duration::from_nanos(rtt(&self.clean, pieces) as u64)),
                retransmissions: if packets { *repeats } else { 0 },
            }
        });
        let mut edges: Vec<EdgeTimes> = edges.collect();
        edges.sort_by_key(|edge| (edge.from, edge.to));
        let observed = Observed { unit: self.iteration, ranks: ranks.collect(), edges };
        self.iteration += 1;
        observed
    }
}

/// The sum of bursts, gaps of 500 us left out.
fn active(pieces: &[Piece]) -> f64 {
    let mut sum = 0.0;
    let mut until = f64::NEG_INFINITY;
    for piece in pieces {
        sum += if piece.sent - until > 5e5 { piece.egressed - piece.sent } else { piece.egressed - until };
        until = piece.egressed;
    }
    sum
}

/// The mean time from a piece leaving the sender's stack to its acknowledgement.
fn rtt(clean: &Clean, pieces: &[Piece]) -> f64 {
    let one = |piece: &Piece| piece.egressed - piece.handed + 2.0 * clean.latency;
    pieces.iter().map(one).sum::<f64>() / pieces.len() as f64
}
