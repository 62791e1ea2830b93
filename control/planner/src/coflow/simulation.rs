//! Coflows on one big switch in virtual time, as fluids. Its ports send and receive at a rate, and there is no limit between
//! them.

use super::Discipline;
use super::ordered::ordered;
use super::port::{Class, Ports, max_min};
use super::workload::Workload;
use harmonaize_units::{Nanos, Rate};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Bytes that count as none: what rounding leaves.
pub(super) const NOTHING: f64 = 0.5;

/// The least time that passes between two events, in seconds.
pub(super) const INSTANT: f64 = 1e-9;

/// How coflows share the ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// Each transfer has its max-min fair share, as long as it lasts.
    Fair,
    /// A coflow goes before others by that discipline, sizes known. It has what it needs for all its transfers to end with the slowest,
    /// and what all leave free goes to the first that can use it.
    Ordered(Discipline),
    /// Likewise, least left first, where no size is known. A coflow shares max-min fairly among its transfers what those before it leave.
    LeastAttained,
}

/// Returns how long each coflow takes from its arrival to its last transfer's end. Ports send and receive at `rate`, which is not 0.
pub fn simulate(workload: &Workload, rate: Rate, sharing: Sharing) -> Vec<Nanos> {
    let bytes_per_second = rate.0.max(1) as f64 / 8.0;
    let ends = match sharing {
        Sharing::Fair => fair(workload, bytes_per_second),
        Sharing::Ordered(discipline) => ordered(workload, bytes_per_second, discipline, true),
        Sharing::LeastAttained => ordered(workload, bytes_per_second, Discipline::LeastRemaining, false),
    };
    let lasted =
        |(end, arrival): (f64, Nanos)| Nanos(((end - seconds(arrival)).max(0.0) * 1e9).round() as u64);
    ends.into_iter().zip(workload.coflows().iter().map(|coflow| coflow.arrival)).map(lasted).collect()
}

pub(super) fn seconds(time: Nanos) -> f64 {
    time.0 as f64 / 1e9
}

/// Transfers between two ports: they all have the same rate, so they end by their size and when they came.
#[derive(Debug, Default)]
struct Pair {
    /// Bytes that one has sent that has been there from the beginning.
    sent: f64,
    /// At which `sent` each ends, as bits, for floats that are not negative are ordered as those; and its coflow.
    ends: BinaryHeap<Reverse<(u64, usize)>>,
}

/// When each coflow ends, in seconds, where transfers share max-min fairly.
fn fair(workload: &Workload, rate: f64) -> Vec<f64> {
    let ports = workload.ports();
    let mut pairs: Vec<Pair> = Vec::new();
    pairs.resize_with(ports * ports, Pair::default);
    let mut open: Vec<usize> = workload.coflows().iter().map(|coflow| coflow.transfers.len()).collect();
    let mut ends: Vec<f64> = workload.coflows().iter().map(|coflow| seconds(coflow.arrival)).collect();
    let mut arrivals = workload.coflows().iter().enumerate().peekable();
    let mut busy: Vec<usize> = Vec::new();
    let (mut classes, mut rates) = (Vec::new(), Vec::new());
    let mut now = 0.0;
    loop {
        while let Some((index, coflow)) = arrivals.next_if(|(_, coflow)| seconds(coflow.arrival) <= now) {
            for transfer in &coflow.transfers {
                let place = transfer.from * ports + transfer.to;
                let Some(pair) = pairs.get_mut(place) else { continue };
                if pair.ends.is_empty() {
                    pair.sent = 0.0;
                    busy.push(place);
                }
                let end = pair.sent + transfer.bytes.0 as f64;
                pair.ends.push(Reverse((end.to_bits(), index)));
            }
        }
        let next = arrivals.peek().map_or(f64::INFINITY, |(_, coflow)| seconds(coflow.arrival));
        if busy.is_empty() {
            if next == f64::INFINITY {
                return ends;
            }
            now = next;
            continue;
        }
        classes.clear();
        classes.extend(busy.iter().map(|place| Class {
            ends: (place / ports, place % ports),
            flows: pairs.get(*place).map_or(0, |pair| pair.ends.len()) as f64,
        }));
        max_min(&mut Ports::all(ports, rate), &classes, &mut rates);
        let first_end = |(place, rate): (&usize, &f64)| {
            let pair = pairs.get(*place)?;
            let Reverse((end, _)) = pair.ends.peek()?;
            Some((f64::from_bits(*end) - pair.sent) / rate)
        };
        let lasts = busy.iter().zip(&rates).filter_map(first_end).fold(next - now, f64::min).max(INSTANT);
        now += lasts;
        for (place, rate) in busy.iter().zip(&rates) {
            let Some(pair) = pairs.get_mut(*place) else { continue };
            pair.sent += rate * lasts;
            while let Some(Reverse((end, coflow))) = pair.ends.peek().copied() {
                if f64::from_bits(end) > pair.sent + NOTHING {
                    break;
                }
                pair.ends.pop();
                if let (Some(open), Some(end)) = (open.get_mut(coflow), ends.get_mut(coflow)) {
                    *open -= 1;
                    *end = now;
                }
            }
        }
        busy.retain(|place| pairs.get(*place).is_some_and(|pair| !pair.ends.is_empty()));
    }
}
