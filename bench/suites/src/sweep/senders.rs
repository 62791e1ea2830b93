//! Part senders: bare streams between two namespaces that nothing shapes, by each method that Linux has to send, in turn.

use super::Site;
use crate::lab::{Streamed, Streams};
use crate::row::{Case, Row};
use crate::runs::interleave;
use crate::suite::Request;
use anyhow::{Context, Result};
use harmonaize_testkit::workspace::Binaries;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The part's name.
pub(super) const PART: &str = "senders";
/// Bytes of one run, usually and in a smoke run.
const BYTES: (u64, u64) = (2 << 30, 64 << 20);
/// The methods of program `stream`, and on how many streams. The first is what the transport does.
const METHODS: [(&str, usize); 6] =
    [("write", 1), ("ring", 1), ("zero-copy", 1), ("write", 2), ("write", 4), ("ring", 4)];

/// The rows: the goodput of each method against the first's, and what both ends take of a processor.
pub(super) fn measure(request: &Request, binaries: &Binaries, stop: &Arc<AtomicBool>) -> Result<Vec<Row>> {
    let (rounds, bytes) =
        if request.smoke { (request.rounds_of((1, 1)), BYTES.1) } else { (request.rounds(), BYTES.0) };
    let mut lab = Site::Unshaped.lab(binaries.clone(), Arc::clone(stop))?;
    let taken = interleave(rounds, METHODS.len(), |which| {
        let (method, streams) = *METHODS.get(which).context("no such method")?;
        let ran = lab.streams(&Streams { bytes, streams, method })?;
        eprintln!("  {method}, {streams}: {:.2} GB/s", ran.bytes_per_second / 1e9);
        Ok(ran)
    })?;
    lab.end().context("the lab did not end in order")?;
    let mut rows = Vec::new();
    let of = |which: usize, value: fn(&Streamed) -> f64| -> Vec<f64> {
        taken.get(which).into_iter().flatten().map(value).collect()
    };
    for (which, (method, streams)) in METHODS.iter().enumerate() {
        let title = format!("bare TCP between two namespaces, unshaped, {method}, streams: {streams}");
        let case = |what: &str| Case::more("sweep", format!("{title}: {what}"), 1.0).of(bytes, 2).stated();
        let speed = |ran: &Streamed| ran.bytes_per_second / 1e9;
        rows.push(case("GB/s").compare(&of(which, speed), &of(0, speed), "one stream, write"));
        let less = |what: &str| Case::less("sweep", format!("{title}: {what}"), 1.0).of(bytes, 2).stated();
        let sender = |ran: &Streamed| ran.sender_seconds;
        let receiver = |ran: &Streamed| ran.receiver_seconds;
        let by_write = "one stream, write";
        rows.push(less("sender's s of a processor").compare(&of(which, sender), &of(0, sender), by_write));
        rows.push(less("receiver's s of a processor").compare(
            &of(which, receiver),
            &of(0, receiver),
            by_write,
        ));
    }
    Ok(rows)
}
