//! What frameworks call beside collectives, between two hosts. It covers groups that form by split, an abort, and a rank that
//! comes late.

use crate::lab::Lab;
use crate::row::{Case, Row};
use crate::suite::Request;
use anyhow::{Context, Result};
use harmonaize_testkit::workspace::Binaries;
use serde::Deserialize;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

const HOSTS: usize = 2;
/// Groups that form, ranks of each, and the ranks of the jobs of which they form. So many ranks are on all
/// hosts together.
const GROUPS: u64 = 64;
const SIZE: usize = 8;
const JOBS: [usize; 2] = [8, 64];
/// Seconds that all groups may take to form.
const FORMED: f64 = 2.0;
/// Seconds from an abort to the last rank's error.
const FREED: f64 = 1.0;
/// Seconds by which the last rank is late, and those of a smoke run.
const LATE: (u64, u64) = (60, 2);
/// How long a job may take beside them.
const LIMIT: Duration = Duration::from_secs(120);

/// What rank 0 prints.
#[derive(Deserialize)]
struct Timed {
    seconds: f64,
    #[serde(default)]
    after: f64,
}

/// The rows. Each round has a fabric and agents of its own; only the first has a late rank.
pub(crate) fn measure(request: &Request, binaries: &Binaries, stop: &Arc<AtomicBool>) -> Result<Vec<Row>> {
    let rounds = if request.smoke { request.rounds_of((1, 1)) } else { request.rounds() };
    let late = if request.smoke { LATE.1 } else { LATE.0 };
    let (mut formed, mut freed) = ([const { Vec::new() }; JOBS.len()], Vec::new());
    let mut waited = None;
    for round in 1..=rounds {
        let mut lab = Lab::build(HOSTS, "1Gbit/s", binaries.clone(), Arc::clone(stop))?;
        eprint!("run {round}/{rounds}: {GROUPS} groups");
        for (ranks, formed) in JOBS.into_iter().zip(&mut formed) {
            let (groups, size) = (GROUPS.to_string(), SIZE.to_string());
            let arguments = ["groups", "--groups", &groups, "--size", &size];
            let seconds = timed(&mut lab, ranks, &arguments, LIMIT)?.seconds;
            eprint!(" of {ranks} ranks in {seconds:.3} s;");
            formed.push(seconds);
        }
        let seconds = timed(&mut lab, SIZE, &["abort"], LIMIT)?.seconds;
        eprintln!(" free {seconds:.4} s after an abort");
        freed.push(seconds);
        if waited.is_none() {
            let delay = late.to_string();
            let limit = LIMIT + Duration::from_secs(late);
            let found = timed(&mut lab, SIZE, &["late", "--seconds", &delay], limit)?;
            eprintln!(
                "waited {:.3} s, and {:.4} s more once the last had called",
                found.seconds, found.after
            );
            waited = Some(found);
        }
        lab.end().context("the lab did not end in order")?;
    }
    let less = |what: String, ranks| Case::less("service", what, 1.0).of(0, ranks);
    let mut rows = Vec::new();
    for (ranks, formed) in JOBS.into_iter().zip(&formed) {
        let what =
            format!("{GROUPS} groups of {SIZE} ranks by split of {ranks}, 2 hosts: s until all have formed");
        rows.push(less(what, ranks).limit(formed, FORMED));
    }
    let what = "abort while 7 of 8 ranks wait, 2 hosts: s until the last is free";
    rows.push(less(what.to_owned(), SIZE).limit(&freed, FREED));
    if let Some(Timed { seconds, after }) = waited {
        let what = "allreduce of 8 ranks, 2 hosts, right in the end: s waited for the last";
        rows.push(Case::more("service", what, 1.0).of(8, SIZE).limit(&[seconds], late as f64));
        let what = "likewise: s from the last one's call to the last sum";
        rows.push(Case::less("service", what, 1.0).of(8, SIZE).state(&[after]));
    }
    Ok(rows)
}

/// Runs one call with so many ranks, as many on either host.
fn timed(lab: &mut Lab, ranks: usize, call: &[&str], limit: Duration) -> Result<Timed> {
    let hosts: Vec<usize> = (0..ranks).map(|rank| rank * HOSTS / ranks).collect();
    lab.figures("calls", &hosts, call, limit)?.pop().context("no figure")
}
