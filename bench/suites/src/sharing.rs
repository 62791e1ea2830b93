//! What tenants cost each other on agents: small operations beside others' large ones, and shares by weight.

mod idle;

use crate::lab::{Lab, Measured, options};
use crate::part::{self, Outcome, Part};
use crate::pictures::{chart, shares};
use crate::row::{Case, Row};
use crate::steady::{Steady, common, finish, nanos};
use crate::suite::Request;
use anyhow::{Context, Result};
use harmonaize_plot::{Axes, Chart, Series};
use harmonaize_testkit::clock::monotonic_ns;
use harmonaize_testkit::deployment::Tenant;
use harmonaize_testkit::job::{self, Programs};
use harmonaize_testkit::workspace::Binaries;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

const SMALL: u64 = 32 << 10;
const LARGE: u64 = 64 << 20;
/// Communicators that the other tenant keeps busy.
const OTHERS: [usize; 3] = [1, 2, 4];
/// Weights of three tenants, and how many communicators each has: the lightest has the most.
const WEIGHTS: [u32; 3] = [1, 2, 4];
const COMMUNICATORS: [usize; 3] = [4, 2, 1];
/// How far a share may be from its weight.
const OFF: f64 = 0.05;
/// How long jobs may take to join, and rates to settle.
const JOIN: Duration = Duration::from_secs(3);
const WARM_UP: Duration = Duration::from_millis(500);
/// Bytes of an operation of the victim's, on the host of the tenant that harms its agent and on another.
const OF_A_VICTIM: u64 = 64 << 10;
const BESIDE_A_VICTIM: Place =
    Place { what: "2 hosts, 10 Gbit/s", hosts: 2, ranks: &[0, 1], bar: TAIL, weighed: (LARGE, 1) };
/// Communicators of a tenant that behaves, each of as many processes as the victim's and with the same operations.
const BEHAVED: usize = 4;
/// What the tenant does that harms its agent, each in a process of its own.
const ATTACKS: [&str; 8] =
    ["scribble", "doorbell", "silent", "attach", "descriptors", "truncate", "maximal", "unmap"];
/// The least of a victim's throughput beside a tenant that behaves that it keeps beside one that harms its agent.
const THROUGHPUT: f64 = 0.7;
/// And the most of its 99th percentile.
const TAIL: f64 = 2.0;
/// How long a job may take.
const LIMIT: Duration = Duration::from_secs(120);

/// The suite's parts.
pub(crate) const PARTS: &[Part<Sharing>] = &[
    ("host", |suite| suite.small_beside("host", &ON_A_HOST, 1)),
    ("links", |suite| suite.small_beside("links", &ON_LINKS, 1)),
    ("classes", |suite| suite.small_beside("classes", &ON_A_HOST, 0)),
    ("link-classes", |suite| suite.small_beside("link-classes", &ON_LINKS, 0)),
    ("engine-weights", |suite| suite.weights(&ON_A_HOST)),
    ("link-weights", |suite| suite.weights(&ON_LINKS)),
    ("hostile", Sharing::hostile),
    ("idle", Sharing::idle),
];

/// Where ranks are, and the bar of a small operation's p99 beside large ones over that alone.
struct Place {
    what: &'static str,
    hosts: usize,
    ranks: &'static [usize],
    bar: f64,
    /// Bytes of operations that share by weight, and how many a communicator has under way. Each window holds dozens of the
    /// lightest tenant's, and all that share always have more to send.
    weighed: (u64, u64),
}

const ON_A_HOST: Place = Place { what: "one host", hosts: 1, ranks: &[0, 0], bar: 10.0, weighed: (LARGE, 1) };
const ON_LINKS: Place =
    Place { what: "4 hosts, 1 Gbit/s", hosts: 4, ranks: &[0, 1, 2, 3], bar: 5.0, weighed: (1 << 20, 8) };

/// What all parts need.
pub(crate) struct Sharing {
    request: Request,
    binaries: Binaries,
    stop: Arc<AtomicBool>,
}

/// Runs the parts that were asked for.
pub(crate) fn run(request: Request, binaries: Binaries, stop: Arc<AtomicBool>) -> Outcome {
    let only = request.only.clone();
    part::run(&Sharing { request, binaries, stop }, PARTS, &only)
}

/// The median and the 99th percentile of operations, us.
fn percentiles(measured: &[Measured]) -> Result<[f64; 2]> {
    let mut times = measured.first().context("nothing was timed")?.times_us.clone();
    times.sort_by(f64::total_cmp);
    let at = |part: usize| times.get((times.len() * part / 100).min(times.len().saturating_sub(1))).copied();
    at(50).zip(at(99)).map(|(p50, p99)| [p50, p99]).context("nothing was timed")
}

/// How long operations took, the quickest first: alone, and beside each number of others' communicators.
fn times_taken(place: &Place, whose: &str, alone: Vec<f64>, beside: &[Vec<f64>]) -> Chart {
    let cases = OTHERS.iter().zip(beside).map(|(others, took)| (format!("beside {others}"), took.clone()));
    let series = std::iter::once(("alone".to_owned(), alone)).chain(cases).map(|(name, took)| {
        let points = shares(&name, &took).points.into_iter().map(|(us, share)| (share, us)).collect();
        Series { name, points }
    });
    let title =
        format!("AllReduce of 32 KiB, {}: alone, and beside {whose} communicators of 64 MiB", place.what);
    Chart { axes: Axes::LogY, ..chart(title, ("percentile", "us"), series.collect(), Vec::new()) }
}

impl Sharing {
    /// A lab with two more tenants, `b` and `c`.
    fn lab(&self, place: &Place, weights: &[u32]) -> Result<Lab> {
        Lab::build_with(place.hosts, "1Gbit/s", self.binaries.clone(), Arc::clone(&self.stop), |mut setup| {
            let more = [("b", 3002), ("c", 3003)].map(|(name, user)| Tenant { name: name.to_owned(), user });
            setup.tenants.extend(more);
            setup.weights = weights.to_vec();
            // One thread is shared; of two, each has tenants of its own.
            setup.agent += if weights.is_empty() { "" } else { "[engine]\nthreads = 1\n" };
            setup
        })
    }

    /// A tenant's small operations alone, and beside large ones of another tenant's, or of its own where `other` is 0.
    fn small_beside(&self, part: &str, place: &Place, other: usize) -> Result<Vec<Row>> {
        let whose = if other == 0 { "its own tenant's" } else { "another tenant's" };
        let rounds = self.request.rounds();
        let window = Duration::from_secs(if self.request.smoke { 2 } else { 10 });
        let mut lab = self.lab(place, &[])?;
        let mut alone = [const { Vec::new() }; 2];
        let mut beside = [const { [const { Vec::new() }; 2] }; OTHERS.len()];
        let (mut took_alone, mut took_beside) = (Vec::new(), [const { Vec::new() }; OTHERS.len()]);
        for round in 1..=rounds {
            let small = self.small(&mut lab, place)?;
            let [p50, p99] = percentiles(&small)?;
            took_alone.extend(small.into_iter().flat_map(|measured| measured.times_us));
            eprint!("run {round}/{rounds}, {}: alone p50 {p50:.1} us, p99 {p99:.1} us", place.what);
            alone.iter_mut().zip([p50, p99]).for_each(|(figures, figure)| figures.push(figure));
            for ((others, figures), took) in OTHERS.iter().zip(&mut beside).zip(&mut took_beside) {
                let until = monotonic_ns()? + nanos(JOIN + window);
                let jobs = self.endless(&mut lab, other, place, *others, (LARGE, 1), until)?;
                std::thread::sleep(JOIN);
                let small = self.small(&mut lab, place)?;
                let [p50, p99] = percentiles(&small)?;
                took.extend(small.into_iter().flat_map(|measured| measured.times_us));
                let large = finish(&mut lab, jobs, LIMIT)?;
                let rate = common(&large, until, WARM_UP)
                    .map_or(f64::NAN, |interval| large.iter().map(|one| one.rate(interval)).sum());
                eprint!(
                    "; beside {others} p50 {p50:.1}, p99 {p99:.1}, the large ones {:.1} MB/s",
                    rate / 1e6
                );
                figures.iter_mut().zip([p50, p99]).for_each(|(figures, figure)| figures.push(figure));
            }
            eprintln!();
        }
        lab.end().context("the lab did not end in order")?;
        if let Some(folder) = &self.request.figures {
            times_taken(place, whose, took_alone, &took_beside).write(folder, &format!("sharing-{part}"))?;
        }
        let [alone_p50, alone_p99] = &alone;
        let rows = OTHERS.iter().zip(&beside).flat_map(|(others, [p50, p99])| {
            let case = |figure: &str| {
                let what = format!(
                    "allreduce f32, {}, beside {others} of {whose} of 64 MiB: {figure} us",
                    place.what
                );
                Case::less("sharing", what, place.bar).of(SMALL, place.ranks.len())
            };
            [
                case("p99").compare(p99, alone_p99, "alone"),
                case("p50").stated().compare(p50, alone_p50, "alone"),
            ]
        });
        Ok(rows.collect())
    }

    /// A victim beside a tenant that behaves, beside one that harms its agent, and beside each attack alone. The other tenant's processes run
    /// only where nobody else's would, so that what they cost is what agents do for them.
    fn hostile(&self) -> Result<Vec<Row>> {
        let rounds = self.request.rounds();
        let (window, of_one) = if self.request.smoke { (3, 1) } else { (60, 10) };
        let program = self.binaries.path("hostile")?;
        let programs = Programs::publish(program.parent().context("no folder")?, &["hostile"])?;
        let program = programs.path("hostile");
        let mut lab =
            Lab::build_with(2, "10Gbit/s", self.binaries.clone(), Arc::clone(&self.stop), |mut setup| {
                setup.tenants.push(Tenant { name: "b".to_owned(), user: 3002 });
                // Who attaches without end would keep its own tenant's other processes out.
                setup.tenant += "\nattaches = 100000\n";
                setup
            })?;
        lab.yield_processors(1)?;
        let mut calm = [const { Vec::new() }; 2];
        let mut harmed = [const { Vec::new() }; 2];
        let mut of_each = [const { [const { Vec::new() }; 2] }; ATTACKS.len()];
        let note = |figures: &mut [Vec<f64>; 2], (rate, p99): (f64, f64), beside: &str| {
            eprintln!("  beside {beside}: {rate:.0} operations a second, p99 {p99:.0} us");
            figures.iter_mut().zip([rate, p99]).for_each(|(figures, figure)| figures.push(figure));
        };
        for round in 1..=rounds {
            eprintln!("run {round}/{rounds}:");
            let until = monotonic_ns()? + nanos(JOIN + Duration::from_secs(window));
            let jobs = self.endless(&mut lab, 1, &BESIDE_A_VICTIM, BEHAVED, (OF_A_VICTIM, 1), until)?;
            std::thread::sleep(JOIN);
            note(&mut calm, self.victim(&mut lab, until)?, "one that behaves");
            finish(&mut lab, jobs, LIMIT)?;
            note(
                &mut harmed,
                self.beside_attacks(&mut lab, &program, &ATTACKS, window, round)?,
                "one that harms",
            );
            for (attack, figures) in ATTACKS.iter().zip(&mut of_each) {
                note(figures, self.beside_attacks(&mut lab, &program, &[attack], of_one, round)?, attack);
            }
        }
        lab.end().context("the lab did not end in order")?;
        let what = |of: &str, figure: &str| format!("allreduce f32, 2 hosts, beside {of}: {figure}");
        let reference = format!("beside {BEHAVED} communicators as the victim's");
        let row = |of: &str, [rates, tails]: &[Vec<f64>; 2], barred: bool| {
            let case = |case: Case| {
                let case = case.of(OF_A_VICTIM, BESIDE_A_VICTIM.ranks.len());
                if barred { case } else { case.stated() }
            };
            [
                case(Case::more("sharing", what(of, "operations a second"), THROUGHPUT))
                    .compare(rates, &calm[0], &reference),
                case(Case::less("sharing", what(of, "p99 us"), TAIL)).compare(tails, &calm[1], &reference),
            ]
        };
        let mut rows = row("a tenant that harms its agent", &harmed, true).to_vec();
        for (attack, figures) in ATTACKS.iter().zip(&of_each) {
            rows.extend(row(&format!("its attack `{attack}` alone"), figures, false));
        }
        Ok(rows)
    }

    /// The victim beside these attacks, each by a process of its own.
    fn beside_attacks(
        &self,
        lab: &mut Lab,
        program: &Path,
        attacks: &[&str],
        window: u64,
        seed: usize,
    ) -> Result<(f64, f64)> {
        let until = monotonic_ns()? + nanos(JOIN + Duration::from_secs(window));
        let seconds = (JOIN.as_secs() + window).to_string();
        let processes: Vec<(String, Vec<String>)> = attacks
            .iter()
            .enumerate()
            .map(|(number, attack)| {
                let arguments = ["--attack", attack, "--seconds", &seconds, "--seed", &seed.to_string()];
                (format!("{attack}{number}"), arguments.map(str::to_owned).to_vec())
            })
            .collect();
        let mut processes = lab.processes_of(1, 0, "hostile", program, &processes)?;
        std::thread::sleep(JOIN);
        let figures = self.victim(lab, until)?;
        job::wait(&mut processes, LIMIT, || lab.check())?;
        Ok(figures)
    }

    /// A victim's operations until a time of CLOCK_MONOTONIC: how many a second, and the 99th percentile, us.
    fn victim(&self, lab: &mut Lab, until: u64) -> Result<(f64, f64)> {
        let arguments = options(&[("--bytes", OF_A_VICTIM), ("--in-flight", 1), ("--until-ns", until)]);
        let job = lab.start_of(0, "steady", BESIDE_A_VICTIM.ranks, &arguments)?;
        let steady = finish(lab, vec![job], LIMIT)?.pop().context("no figures")?;
        let rate = steady.rate(common(std::slice::from_ref(&steady), until, WARM_UP)?) / OF_A_VICTIM as f64;
        let measured = Measured { bytes: steady.bytes, times_us: steady.took_us, wire_bytes: 0, busy: 0.0 };
        let [_, p99] = percentiles(&[measured])?;
        Ok((rate, p99))
    }

    /// Small operations back to back.
    fn small(&self, lab: &mut Lab, place: &Place) -> Result<Vec<Measured>> {
        let iterations = if self.request.smoke { 200 } else { 2000 };
        let arguments = options(&[("--bytes", SMALL), ("--warmup", 50), ("--iterations", iterations)]);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        lab.ours(place.ranks, &arguments)
    }

    /// Starts so many communicators of a tenant that always have other operations, so many at once.
    fn endless(
        &self,
        lab: &mut Lab,
        tenant: usize,
        place: &Place,
        communicators: usize,
        (bytes, at_once): (u64, u64),
        until: u64,
    ) -> Result<Vec<harmonaize_testkit::job::Job>> {
        let arguments = options(&[("--bytes", bytes), ("--in-flight", at_once), ("--until-ns", until)]);
        let start = |_| lab.start_of(tenant, "steady", place.ranks, &arguments);
        (0..communicators).map(start).collect()
    }

    /// Three tenants of different weights, all with large operations: what each moves of what all do.
    fn weights(&self, place: &Place) -> Result<Vec<Row>> {
        let rounds = self.request.rounds();
        let window = Duration::from_secs(if self.request.smoke { 2 } else { 10 });
        let whole: u32 = WEIGHTS.iter().sum();
        let mut off = [const { Vec::new() }; WEIGHTS.len()];
        for round in 1..=rounds {
            let mut lab = self.lab(place, &WEIGHTS)?;
            let until = monotonic_ns()? + nanos(JOIN + window);
            let jobs = COMMUNICATORS
                .iter()
                .enumerate()
                .map(|(tenant, count)| self.endless(&mut lab, tenant, place, *count, place.weighed, until))
                .collect::<Result<Vec<_>>>()?;
            let steady = finish(&mut lab, jobs.into_iter().flatten().collect(), LIMIT)?;
            lab.end().context("the lab did not end in order")?;
            let interval = common(&steady, until, WARM_UP)?;
            let mut rest = steady.as_slice();
            let rates = COMMUNICATORS.map(|count| {
                let (of, others) = rest.split_at(count.min(rest.len()));
                rest = others;
                of.iter().map(|one: &Steady| one.rate(interval)).sum::<f64>()
            });
            let all: f64 = rates.iter().sum();
            eprint!("run {round}/{rounds}, {}:", place.what);
            for ((rate, weight), off) in rates.iter().zip(WEIGHTS).zip(&mut off) {
                let due = all * f64::from(weight) / f64::from(whole);
                eprint!(" weight {weight}: {:.3} of all;", rate / all);
                off.push((rate / due - 1.0).abs());
            }
            eprintln!();
        }
        let rows = WEIGHTS.iter().zip(COMMUNICATORS).zip(&off).map(|((weight, count), off)| {
            let what = format!(
                "allreduce f32, {}, weights 1:2:4: how far weight {weight} with {count} communicators is off its share",
                place.what
            );
            Case::less("sharing", what, 1.0).of(place.weighed.0, place.ranks.len()).limit(off, OFF)
        });
        Ok(rows.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_sorted_times() {
        let times_us = (0..100).rev().map(f64::from).collect();
        let measured = [Measured { bytes: SMALL, times_us, wire_bytes: 0, busy: 0.0 }];
        assert_eq!(percentiles(&measured).unwrap(), [50.0, 99.0]);
        assert!(percentiles(&[]).is_err());
    }

    #[test]
    fn a_picture_has_times_by_percentile() {
        let beside = [30.0, 40.0, 50.0].map(|us| vec![us]);
        let picture = times_taken(&ON_A_HOST, "another tenant's", vec![20.0, 10.0], &beside);
        let names: Vec<&str> = picture.series.iter().map(|series| series.name.as_str()).collect();
        assert_eq!(names, ["alone", "beside 1", "beside 2", "beside 4"]);
        let alone = [(0.0, 0.0), (0.0, 10.0), (50.0, 10.0), (50.0, 20.0), (100.0, 20.0)];
        assert_eq!(picture.series[0].points, alone);
        assert!(picture.svg().unwrap().contains("beside 4"));
    }
}
