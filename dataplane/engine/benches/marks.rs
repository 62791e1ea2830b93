//! What a mark of an own operation costs the poll loop. It is in nanoseconds to write one into the queue, beside a look at the clock,
//! which is part of it, and beside a queue that nobody reads. Figures are medians of rounds in turn.
#![allow(missing_docs, clippy::unwrap_used, clippy::indexing_slicing)] // no part of the product

use harmonaize_engine::{MarkWriter, marks};
use harmonaize_events::{Mark, MarkKind};
use rustix::time::{ClockId, clock_gettime};
use std::hint::black_box;
use std::time::Instant;

const ROUNDS: usize = 101;
/// Marks of a round; the queue has room for all of them.
const MARKS: u64 = 4096;

fn main() {
    let (writer, reader) = marks(MARKS as usize);
    let mut times = [const { Vec::new() }; 3];
    for _ in 0..ROUNDS {
        times[0].push(each(|number| write(&writer, number)));
        // Another thread does that, whose time is its own; here it leaves the queue in this processor's caches.
        assert_eq!(std::iter::from_fn(|| reader.read()).count() as u64, MARKS);
        times[1].push(each(|number| write(&MarkWriter::default(), number)));
        times[2].push(each(|_| _ = black_box(clock_gettime(ClockId::Monotonic))));
    }
    assert_eq!(reader.lost(), 0);
    println!("ns, medians of {ROUNDS} rounds of {MARKS}");
    for (name, mut times) in
        ["a mark", "a mark that nobody reads", "a look at the clock"].into_iter().zip(times)
    {
        times.sort_by(f64::total_cmp);
        let [first, median, last] = [0, times.len() / 2, times.len() - 1].map(|at| times[at]);
        println!("{name:<26} {median:>7.1} ({first:.1} to {last:.1})");
    }
}

/// Nanoseconds of each call.
fn each(call: impl Fn(u64)) -> f64 {
    let begun = Instant::now();
    (0..MARKS).for_each(call);
    begun.elapsed().as_nanos() as f64 / MARKS as f64
}

/// Writes a mark as a message's.
fn write(writer: &MarkWriter, number: u64) {
    let bytes = black_box(65_536);
    writer.write(MarkKind::Sent, || Mark {
        communicator: 1,
        operation: number >> 4,
        segment: number,
        bytes,
        epoch: 3,
        peer: 1,
        ..Mark::default()
    });
}
