//! How long the planner takes for a large fabric, on one core: 10,000 hosts, 1,000 communicators, one event.
//!
//! `cargo run --release -p harmonaize-planner --example scale [-- --json] [--tight]`; `--tight`: spines so slow that every
//! communicator is held up by others, and all of them have to be looked at.

use harmonaize_abi::{CommunicatorId, CongestionCause, CongestionLevel};
use harmonaize_planner::{
    Bytes, Conditions, CongestionReport, Connection, Current, Drains, Estimates, HostId, Job, Nanos, Path,
    Plan, Policy, Rate, Request, Routes, Topology, check, plan,
};
use rand::{RngExt, SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;
use std::error::Error;
use std::fmt::Write as _;
use std::time::Instant;

const LEAVES: usize = 250;
const HOSTS: usize = 40;
const SPINES: usize = 16;
const JOBS: usize = 1000;
const CONNECTIONS: u32 = 4;
const SEED: u64 = 6;
const SMALL: u32 = 20;

/// Leaves of 40 hosts at 100 Gbit/s, 16 spines: 2:1 oversubscribed at 125 Gbit/s.
fn fabric(up: u64) -> Result<Topology, Box<dyn Error>> {
    let mut text = String::new();
    for spine in 0..SPINES {
        writeln!(text, "[[switch]]\nname = \"s{spine}\"\nkind = \"spine\"")?;
    }
    for leaf in 0..LEAVES {
        writeln!(text, "[[switch]]\nname = \"l{leaf}\"")?;
        for spine in 0..SPINES {
            writeln!(text, "[[link]]\nfrom = \"l{leaf}\"\nto = \"s{spine}\"\nrate = \"{up}Gbit/s\"")?;
        }
        for host in 0..HOSTS {
            writeln!(text, "[[host]]\nname = \"h{leaf}-{host}\"\nrack = \"r{leaf}\"")?;
            writeln!(text, "[[link]]\nfrom = \"h{leaf}-{host}\"\nto = \"l{leaf}\"\nrate = \"100Gbit/s\"")?;
        }
    }
    Ok(Topology::parse(&text)?)
}

/// Communicators of 4 to 16 hosts each. Every host is in one at most, and they are scattered over the racks in stretches of two.
fn jobs(rng: &mut ChaCha8Rng) -> Vec<Job> {
    let mut pairs: Vec<usize> = (0..LEAVES * HOSTS / 2).collect();
    pairs.shuffle(rng);
    let mut pairs = pairs.into_iter();
    (0..JOBS as u64).map(|communicator| job(communicator, &mut pairs, 1 << rng.random_range(1..4))).collect()
}

fn job(communicator: u64, pairs: &mut impl Iterator<Item = usize>, count: usize) -> Job {
    Job {
        communicator: CommunicatorId(communicator),
        hosts: pairs.take(count).flat_map(|pair| [HostId(2 * pair), HostId(2 * pair + 1)]).collect(),
        connections: CONNECTIONS,
        weight: 1,
        guaranteed: Rate(0),
        rate_limit: None,
        operation: Bytes(64 << 20),
        iteration_pattern: None,
        current: None,
        movable: true,
    }
}

fn run(jobs: &mut [Job], plan: &Plan) {
    for (job, assignment) in jobs.iter_mut().zip(&plan.assignments) {
        job.current = Some(Current {
            order: assignment.order.clone(),
            edges: assignment.edges.clone(),
            recent_changes: 0,
        });
    }
}

fn connections(jobs: &[Job]) -> Vec<(Connection, Path, Rate)> {
    let mut all = Vec::new();
    for job in jobs {
        let Some(current) = &job.current else { continue };
        let next = current.order.iter().cycle().skip(1);
        for ((from, to), hop) in current.order.iter().zip(next).zip(&current.edges) {
            let (Some(from), Some(to)) = (job.hosts.get(*from as usize), job.hosts.get(*to as usize)) else {
                continue;
            };
            for (port, path) in hop.paths.iter().enumerate() {
                let (communicator, from, to, port) = (job.communicator, *from, *to, port as u16);
                let connection = Connection { communicator, from, to, port };
                all.push((connection, path.clone(), Rate(0)));
            }
        }
    }
    all
}

fn request<'a>(topology: &'a Topology, conditions: &'a Conditions, jobs: &'a [Job]) -> Request<'a> {
    Request { topology, conditions, jobs, routes: Routes::All, policy: Policy::default() }
}

/// Two racks of four hosts and two spines, 2:1 oversubscribed, two communicators; a spine loses half, so many times.
fn small(rng: &mut ChaCha8Rng) -> Result<(), Box<dyn Error>> {
    let mut text = String::new();
    for (switch, name) in ["s0", "s1", "l0", "l1"].into_iter().enumerate() {
        writeln!(text, "[[switch]]\nname = \"{name}\"")?;
        for host in (0..4).filter(|_| switch > 1) {
            writeln!(
                text,
                "[[host]]\nname = \"{name}-{host}\"\n[[link]]\nfrom = \"{name}-{host}\"\nto = \"{name}\""
            )?;
            writeln!(text, "rate = \"200Mbit/s\"")?;
        }
        for spine in (0..2).filter(|_| switch > 1) {
            writeln!(text, "[[link]]\nfrom = \"{name}\"\nto = \"s{spine}\"\nrate = \"200Mbit/s\"")?;
        }
    }
    let topology = Topology::parse(&text)?;
    let mut hosts: Vec<HostId> = (0..8).map(HostId).collect();
    hosts.shuffle(rng);
    let all = |communicator| Job {
        communicator,
        hosts: hosts.clone(),
        connections: 4,
        ..job(0, &mut std::iter::empty(), 0)
    };
    let mut jobs = [all(CommunicatorId(0)), all(CommunicatorId(1))];
    let clear = Conditions::clear(&topology);
    let first = plan(&request(&topology, &clear, &jobs));
    run(&mut jobs, &first);
    let mut conditions = clear.clone();
    for path in topology.equal_cost_paths(HostId(0), HostId(7)).iter().take(1) {
        path.links()
            .iter()
            .skip(1)
            .take(2)
            .for_each(|link| conditions.set_available(*link, Rate(100_000_000)));
    }
    for _ in 0..SMALL {
        check(&request(&topology, &conditions, &jobs), &plan(&request(&topology, &conditions, &jobs)))?;
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let json = std::env::args().any(|argument| argument == "--json");
    let tight = std::env::args().any(|argument| argument == "--tight");
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let mut times = Vec::new();
    let begin = Instant::now();
    let topology = fabric(if tight { 12 } else { 125 })?;
    times.push(("read the topology", begin.elapsed()));
    let mut jobs = jobs(&mut rng);
    let hosts: usize = jobs.iter().map(|job| job.hosts.len()).sum();

    let clear = Conditions::clear(&topology);
    let begin = Instant::now();
    let first = plan(&request(&topology, &clear, &jobs));
    times.push(("plan all from nothing", begin.elapsed()));
    check(&request(&topology, &clear, &jobs), &first)?;
    run(&mut jobs, &first);

    let mut estimates = Estimates::default();
    let begin = Instant::now();
    let active = connections(&jobs);
    let congested: Vec<(Connection, Path, Rate)> = {
        let link =
            active.iter().find_map(|(_, path, _)| path.links().get(1).filter(|_| path.links().len() == 4));
        active
            .iter()
            .filter(|(_, path, _)| link.is_some_and(|link| path.links().contains(link)))
            .cloned()
            .collect()
    };
    estimates.active(&topology, Nanos(0), active);
    times.push(("take in all connections", begin.elapsed()));

    let begin = Instant::now();
    for (connection, path, _) in &congested {
        let (connection, path) = (*connection, path.clone());
        let (level, cause) = (CongestionLevel::Severe, CongestionCause::CrossTraffic);
        let report = CongestionReport {
            connection,
            path,
            level,
            cause,
            own_rate: Rate(0),
            had_loss: true,
            cross_traffic: None,
        };
        estimates.apply_report(&topology, Nanos(1_000_000), report);
    }
    times.push(("take in the congestion reports of one event", begin.elapsed()));
    let begin = Instant::now();
    let conditions = estimates.conditions(&topology, &Drains::default());
    let second = plan(&request(&topology, &conditions, &jobs));
    let planned = begin.elapsed();
    times.push(("plan anew for one event", planned));
    let begin = Instant::now();
    check(&request(&topology, &conditions, &jobs), &second)?;
    times.push(("check the plan", begin.elapsed()));
    let changed = second.assignments.iter().filter(|assignment| assignment.changed).count();

    let begin = Instant::now();
    small(&mut rng)?;
    times.push(("plan anew for one event on two racks and two spines", begin.elapsed() / SMALL));

    if json {
        println!(
            "{{\"hosts\": {}, \"communicators\": {}, \"members\": {hosts}, \"verdicts\": {}, \"replan_ms\": {:.1}, \
             \"changed\": {changed}, \"slowdown_before\": {:.4}, \"slowdown_after\": {:.4}}}",
            topology.hosts().len(),
            jobs.len(),
            congested.len(),
            planned.as_secs_f64() * 1e3,
            second.before.slowdown,
            second.after.slowdown,
        );
        return Ok(());
    }
    println!(
        "{} hosts, {} switches, {} links; {} communicators over {hosts} hosts, {CONNECTIONS} connections a hop; seed {SEED}",
        topology.hosts().len(),
        topology.switches().len(),
        topology.links().len(),
        jobs.len(),
    );
    for (what, time) in times {
        println!("{:>10.1} ms  {what}", time.as_secs_f64() * 1e3);
    }
    println!("first plan: {}", first.after);
    println!("{} congestion reports: {changed} communicators change; {}", congested.len(), second.reason);
    Ok(())
}
