//! The table of all suites.

use crate::hosts::Hosts;
use crate::lab::Lab;
use crate::part::{self, Outcome, Part};
use crate::row::Row;
use crate::suite::{Bench, BenchBudget, Request, Run, Suite};
use crate::testbed::Testbed;
use crate::{
    aggregation, allocation, calls, codec, compression, control, cooperation, dataplane, rdma, sharing,
    small, state, sweep, telemetry, threads, torch, trust,
};
use anyhow::{Context, Result};
use harmonaize_testkit::packages;
use harmonaize_testkit::workspace::Binaries;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// What suites measure: agents and their control; with telemetry too; telemetry; codecs alone; agents without control's choices; policies.
const AGENTS: &[&str] = &["dataplane", "control/planner", "control/server"];
const LOOP: &[&str] = &["dataplane", "control", "ebpf"];
const SENSED: &[&str] = &["dataplane", "ebpf"];
const CODECS: &[&str] = &["dataplane/codec", "dataplane/kernels"];
const CARRIED: &[&str] = &["dataplane"];
const ALLOCATOR: &[&str] = &["control/allocator"];

/// All suites.
pub const SUITES: &[Suite] = &[
    Suite::whole(
        "shaped",
        AGENTS,
        "Four hosts, links of 1 Gbit/s: AllReduce, AllToAll, AllGather and ReduceScatter against one TCP stream's goodput",
        Run::Built(|request, binaries, stop| on_a_star(4, &request, binaries, stop, dataplane::shaped)),
    ),
    Suite {
        parts: |_| part::names(SERVICE),
        ..Suite::whole(
            "service",
            AGENTS,
            "Ranks on one host: what agent and rings add to the plan alone, and two threads of the engine against one. On two hosts: groups by split, an abort, a late rank. On four: what protected state costs, and a restore",
            Run::Built(|request, binaries, stop| {
                let only = request.only.clone();
                Ok(part::run(&(request, binaries, stop), SERVICE, &only))
            }),
        )
    },
    Suite {
        name: "sweep",
        rooms: AGENTS,
        about: "Sizes swept over each collective, beside Open MPI, MPICH, Intel MPI, oneCCL and Gloo: one host, and four namespaces; recorded trainings, of HARMONAIZE_MINA and HARMONAIZE_MCCS",
        parts: |_| sweep::parts(),
        run: Run::Built(|request, binaries, stop| sweep::run(&request, &binaries, &stop)),
    },
    Suite {
        name: "rdma",
        rooms: CARRIED,
        about: "The hosts of a testbed with RDMA devices, against perftest: needs --hosts",
        parts: |_| rdma::PARTS.to_vec(),
        run: Run::Alone(on_a_testbed),
    },
    Suite {
        parts: |request| match request.traces {
            Some(_) => telemetry::TRACES.to_vec(),
            None => part::names(telemetry::Budget::PARTS),
        },
        run: Run::Built(|request, binaries, stop| {
            if request.traces.is_none() {
                return Ok(Bench::<telemetry::Budget>::of(request, binaries, stop).run());
            }
            let budget = telemetry::Budget::smoke();
            telemetry::record(&Bench { budget, request, binaries, stop })?;
            Ok(Outcome::default())
        }),
        ..Suite::of_parts::<telemetry::Budget>(
            "telemetry",
            SENSED,
            "Four hosts: what telemetry costs, and whether what it finds is true, against the log of a training over Gloo and ours",
        )
    },
    Suite::of_parts::<control::Budget>(
        "control",
        LOOP,
        "Eight hosts, two racks, two spines: from congestion, drains and failures to better plans for what runs",
    ),
    Suite::of_parts::<compression::Budget>(
        "compression",
        CARRIED,
        "Four hosts: AllReduces in fewer bits against exact ones, and what control chooses on fast and slow links",
    ),
    Suite::of_parts::<aggregation::Budget>(
        "aggregation",
        AGENTS,
        "One core as an aggregator, beside what kernel and machine can; four and eight hosts with an aggregator against the same without",
    ),
    Suite::whole(
        "small",
        AGENTS,
        "Eight hosts far apart: small AllReduces along the ring, in one shot, in two, and as control chooses",
        Run::Built(|request, binaries, stop| small::run(&request, binaries, stop).map(Outcome::from)),
    ),
    Suite::of_parts::<cooperation::Budget>(
        "cooperation",
        LOOP,
        "Eight hosts, two racks, two spines: what tenants gain by being told, and what that tells them",
    ),
    Suite {
        parts: |_| part::names(sharing::PARTS),
        ..Suite::whole(
            "sharing",
            AGENTS,
            "What tenants cost each other: small operations beside others' large ones, and shares by weight, on one host and on full links",
            Run::Built(|request, binaries, stop| Ok(sharing::run(request, binaries, stop))),
        )
    },
    Suite {
        parts: |_| part::names(torch::PARTS),
        ..Suite::whole(
            "torch",
            AGENTS,
            "Trainings by PyTorch's DDP from the Python wheel, beside Gloo: on one host, and on four at 1 Gbit/s; what a small call adds in C and Python",
            Run::Built(torch::run),
        )
    },
    Suite {
        parts: |_| part::names(trust::PARTS),
        ..Suite::whole(
            "trust",
            AGENTS,
            "What operations bear beside cut management networks and tenants that come and go; what protection costs operations and control",
            Run::Built(|request, binaries, stop| Ok(trust::run(request, binaries, stop))),
        )
    },
    Suite {
        parts: |_| part::names(allocation::PARTS),
        ..Suite::whole(
            "allocation",
            ALLOCATOR,
            "Policies over recorded workloads in virtual time, beside what Gavel and Sia print: needs Sia's artifact in HARMONAIZE_SIA",
            Run::Alone(allocation::run),
        )
    },
    Suite::whole(
        "codec",
        CODECS,
        "One core: every codec's speed against memcpy, error and ratio, on synthetic tensors and float32 files of NumPy",
        Run::Alone(|request| codec::run(request).map(Outcome::from)),
    ),
];

/// A suite that runs on hosts by their names: nothing is emulated there, and nothing built.
#[derive(Debug, Clone, Copy)]
pub struct ByNames {
    /// The commands that it would run, for a person to read.
    pub commands: fn(&Request, &Hosts) -> Result<String>,
    /// Measures.
    pub run: fn(&Request, &Hosts) -> Result<Outcome>,
}

/// How the suite of that name runs on hosts by their names, if it does.
pub fn by_names(suite: &str) -> Option<ByNames> {
    match suite {
        "rdma" => Some(ByNames { commands: rdma::named::commands, run: rdma::named::run }),
        "sweep" => Some(ByNames { commands: sweep::named::commands, run: sweep::named::run }),
        _ => None,
    }
}

/// The suite of that name.
pub fn named(name: &str) -> Option<&'static Suite> {
    SUITES.iter().find(|suite| suite.name == name)
}

/// A suite on hosts around one switch, with links of 1 Gbit/s.
fn on_a_star(
    hosts: usize,
    request: &Request,
    binaries: Binaries,
    stop: Arc<AtomicBool>,
    suite: fn(&mut Lab, &Request) -> Result<Vec<Row>>,
) -> Result<Outcome> {
    let mut lab = Lab::build(hosts, "1Gbit/s", binaries, stop)?;
    suite(&mut lab, request).map(Outcome::from)
}

/// What a part of the suite service is given.
type Service = (Request, Binaries, Arc<AtomicBool>);

/// The parts of the suite service.
const SERVICE: &[Part<Service>] = &[
    ("added", |(request, binaries, stop)| {
        let mut lab = Lab::build(1, "1Gbit/s", binaries.clone(), Arc::clone(stop))?;
        dataplane::service(&mut lab, request)
    }),
    ("threads", |(request, binaries, stop)| threads::scale(request, binaries, stop)),
    ("calls", |(request, binaries, stop)| calls::measure(request, binaries, stop)),
    ("state", |(request, binaries, stop)| state::measure(request, binaries, stop)),
];

/// The suite rdma on a testbed's hosts: nothing is emulated, and nothing built where the hosts have the programs.
fn on_a_testbed(request: &Request) -> Result<Outcome> {
    let file = request.hosts.as_ref().context(
        "the suite rdma needs --hosts FILE or names of hosts; `cargo xtask bench --help` shows both, and `cargo xtask softroce bench` has its own",
    )?;
    let testbed = Testbed::read(Path::new(file))?;
    if testbed.programs.is_none() {
        packages::require(packages::BUILDING, request.consent())?;
    }
    let budget = if request.smoke { rdma::Budget::smoke() } else { rdma::Budget::new(request) };
    rdma::run(testbed, budget)
}
