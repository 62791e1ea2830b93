//! Coflows on one big switch, one before another.

use super::port::{Class, Ports, max_min};
use super::simulation::{INSTANT, NOTHING, seconds};
use super::workload::Workload;
use super::{Contender, Discipline, Remaining, class_end, service_order};
use harmonaize_units::Nanos;

/// Seconds after which rates are made anew where a transfer has ended, from when they were made. They are also made anew when a
/// coflow comes or ends. What that transfer had stays unused until then.
const ROUND: f64 = 0.1;

/// The part of a port below which nothing of it is free.
const FULL: f64 = 1e-9;

/// A transfer under way.
#[derive(Clone, Copy, Debug)]
struct Moving {
    ends: (usize, usize),
    /// Bytes.
    remaining: f64,
    /// Bytes a second.
    rate: f64,
}

/// A coflow under way.
#[derive(Debug)]
struct Active {
    index: usize,
    arrival: Nanos,
    transfers: Vec<Moving>,
    /// What ports have to move of it, all along and still.
    total: Ports,
    remaining: Ports,
}

impl Active {
    /// What it had of the port where that is most, as time at that rate.
    fn attained(&self, rate: f64) -> f64 {
        self.total.beside(&self.remaining).map(|(total, remaining)| total - remaining).fold(0.0, f64::max)
            / rate
    }

    /// In how many seconds it comes to the end of its class, by the rates of its transfers.
    fn class_ends(&self, ports: usize, rate: f64) -> f64 {
        let end = seconds(class_end(nanos(self.attained(rate)))) * rate;
        let mut rates = Ports::all(ports, 0.0);
        self.transfers.iter().for_each(|transfer| rates.add_both(transfer.ends, transfer.rate));
        let sent = self.total.beside(&self.remaining).map(|(total, remaining)| total - remaining);
        let moving = sent.zip(rates.each()).filter(|(_, rate)| *rate > 0.0);
        moving.map(|(sent, rate)| (end - sent) / rate).fold(f64::INFINITY, f64::min)
    }

    /// Takes of what is free what it needs for all transfers to end with the slowest. Takes nothing where one of its ports is
    /// full.
    fn take_needed(&mut self, free: &mut Ports, rate: f64) {
        let needs = self.remaining.beside(free).filter(|(remaining, _)| *remaining > NOTHING);
        let times =
            needs.map(|(remaining, free)| if free > FULL * rate { remaining / free } else { f64::INFINITY });
        let slowest = times.fold(0.0, f64::max);
        for transfer in &mut self.transfers {
            transfer.rate = if slowest > 0.0 { transfer.remaining / slowest } else { 0.0 };
            free.take_both(transfer.ends, transfer.rate);
        }
    }

    /// Takes of what is free whatever it can use.
    fn take_more(&mut self, free: &mut Ports, rate: f64) {
        for transfer in &mut self.transfers {
            let more = free.least(transfer.ends);
            if more > FULL * rate {
                transfer.rate += more;
                free.take_both(transfer.ends, more);
            }
        }
    }

    /// Takes its transfers' max-min shares of what is free.
    fn take_shares(&mut self, free: &mut Ports, classes: &mut Vec<Class>, rates: &mut Vec<f64>) {
        classes.clear();
        classes.extend(self.transfers.iter().map(|transfer| Class { ends: transfer.ends, flows: 1.0 }));
        max_min(free, classes, rates);
        self.transfers.iter_mut().zip(rates).for_each(|(transfer, rate)| transfer.rate = *rate);
    }

    /// Moves bytes for so many seconds.
    fn advance(&mut self, ports: usize, lasts: f64) {
        self.remaining = Ports::all(ports, 0.0);
        self.transfers.retain_mut(|transfer| {
            transfer.remaining -= transfer.rate * lasts;
            if transfer.remaining > NOTHING {
                self.remaining.add_both(transfer.ends, transfer.remaining);
            }
            transfer.remaining > NOTHING
        });
    }
}

fn nanos(seconds: f64) -> Nanos {
    Nanos((seconds * 1e9) as u64)
}

/// When each coflow ends, in seconds, where they are served by that discipline, their sizes known or not. Nobody is ever overdue: what is
/// free goes to whoever can use it.
pub(super) fn ordered(workload: &Workload, rate: f64, discipline: Discipline, sized: bool) -> Vec<f64> {
    let ports = workload.ports();
    let mut ends: Vec<f64> = workload.coflows().iter().map(|coflow| seconds(coflow.arrival)).collect();
    let mut arrivals = workload.coflows().iter().enumerate().peekable();
    let mut active: Vec<Active> = Vec::new();
    let (mut classes, mut rates) = (Vec::new(), Vec::new());
    let mut now = 0.0;
    loop {
        while let Some((index, coflow)) = arrivals.next_if(|(_, coflow)| seconds(coflow.arrival) <= now) {
            let moving = coflow.transfers.iter().map(|transfer| Moving {
                ends: (transfer.from, transfer.to),
                remaining: transfer.bytes.0 as f64,
                rate: 0.0,
            });
            let transfers: Vec<Moving> = moving.collect();
            let mut total = Ports::all(ports, 0.0);
            transfers.iter().for_each(|transfer| total.add_both(transfer.ends, transfer.remaining));
            let (arrival, remaining) = (coflow.arrival, total.clone());
            active.push(Active { index, arrival, transfers, total, remaining });
        }
        let next = arrivals.peek().map_or(f64::INFINITY, |(_, coflow)| seconds(coflow.arrival));
        active.retain(|coflow| !coflow.transfers.is_empty());
        if active.is_empty() {
            if next == f64::INFINITY {
                return ends;
            }
            now = next;
            continue;
        }
        let contender = |coflow: &Active| Contender {
            arrival: coflow.arrival,
            remaining: match sized {
                true => Remaining::Known(nanos(coflow.remaining.max() / rate)),
                false => Remaining::Unknown(nanos(coflow.attained(rate))),
            },
            overdue: false,
        };
        let contenders: Vec<Contender> = active.iter().map(contender).collect();
        let order = service_order(discipline, &contenders);
        let mut free = Ports::all(ports, rate);
        for index in &order {
            let Some(coflow) = active.get_mut(*index) else { continue };
            match sized {
                true => coflow.take_needed(&mut free, rate),
                false => coflow.take_shares(&mut free, &mut classes, &mut rates),
            }
        }
        for index in order.iter().filter(|_| sized) {
            active.get_mut(*index).into_iter().for_each(|coflow| coflow.take_more(&mut free, rate));
        }
        let mut until = next - now;
        let mut first = f64::INFINITY;
        for coflow in &mut active {
            let time = |transfer: &Moving| transfer.remaining / transfer.rate;
            let times = coflow.transfers.iter().map(time);
            let (least, most) = times.fold((f64::INFINITY, 0.0), |(least, most): (f64, f64), time| {
                (least.min(time), most.max(time))
            });
            (first, until) = (first.min(least), until.min(most));
            if !sized {
                until = until.min(coflow.class_ends(ports, rate));
            }
        }
        let lasts = until.min(first.max(ROUND)).max(INSTANT);
        now += lasts;
        for coflow in &mut active {
            coflow.advance(ports, lasts);
            if coflow.transfers.is_empty()
                && let Some(end) = ends.get_mut(coflow.index)
            {
                *end = now;
            }
        }
    }
}
