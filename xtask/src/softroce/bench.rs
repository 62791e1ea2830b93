//! `cargo xtask softroce bench`: `cargo xtask bench rdma` inside the guest, whose hosts are a testbed with a local launcher.

use super::{AROUND, Guest, Report, machine, missing, prepare};
use crate::bench::write_json;
use crate::vm::initramfs::{Image, Initramfs};
use crate::vm::programs::{self, Userland};
use anyhow::{Context, Result, bail};
use harmonaize_guest::{Job, Step};
use harmonaize_suites::{part, rdma, report};
use harmonaize_testkit::workspace::{Binaries, Profile, cargo, executables};
use std::fmt::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Where the guest has our programs.
const PROGRAMS: &str = "/usr/lib/harmonaize";
/// The guest's description of its hosts.
const TESTBED: &str = "/etc/testbed.toml";
/// What runs beside perftest.
const OURS: [&str; 4] = ["wire", "collective", "harmonaize-agent", "harmonaize-control"];
/// How long a round may take. It takes a minute or two on an idle machine: perftest runs polling and asleep, and loss and failures
/// have their rounds too.
const PER_ROUND: Duration = Duration::from_secs(240);
/// What is beside rounds: agents that start, links that are slow.
const BESIDE: Duration = Duration::from_secs(240);
const SMOKE: Duration = Duration::from_secs(240);

/// What `cargo xtask softroce bench` takes.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    guest: Guest,
    /// Write the rows with their provenance as JSON too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Interleaved runs of each contestant
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=50))]
    rounds: u32,
    /// These parts alone: stream, latency, allreduce, loss, slow, failure, aggregated
    #[arg(long, value_delimiter = ',', value_name = "PART")]
    only: Vec<String>,
}

/// Runs the suite; fails where a row does not reach its bar.
pub(super) fn run(args: &Args) -> Result<()> {
    part::check_names("rdma", rdma::PARTS, &args.only)?;
    if let Some(reason) = missing() {
        bail!("{reason}");
    }
    let (kernel, mut tree) = prepare(&args.guest)?;
    eprintln!("Building (minutes, the first time)");
    add(&mut tree, args.guest.hosts)?;
    let mut words = vec!["--rounds".to_owned(), args.rounds.to_string(), "--json".into(), "-".into()];
    if !args.only.is_empty() {
        words.extend(["--only".into(), args.only.join(",")]);
    }
    let limit = PER_ROUND * args.rounds + BESIDE;
    let step = step("rdma", &words, limit);
    let job = Job { hosts: args.guest.hosts, steps: vec![step], ..Job::default() };
    let image = Image::write(&mut tree, &job, "bench")?;
    println!("Booting {} with {} hosts.", kernel.version(), job.hosts);
    let (begun, mut report, mut measured) = (Instant::now(), Report::default(), None);
    let outcome = machine(&kernel, image.path(), args.guest.kvm).run(limit + AROUND, |line| {
        if line.starts_with("{\"provenance\"") {
            measured = serde_json::from_str::<report::Report>(line).ok();
        } else {
            report.line(line);
        }
    })?;
    println!("In all {:.0} s.", begun.elapsed().as_secs_f64());
    if let Some(path) = &args.json {
        let mut measured = measured.context("the guest printed no rows")?;
        // The guest knows its machine; the tree and the day are known here.
        let machine = measured.provenance.machine;
        measured.provenance = report::Provenance { machine, ..report::Provenance::here(&measured.rows) };
        write_json(path, &measured)?;
    }
    report.judge(&outcome, &["rdma".to_owned()])
}

/// A step that shows that all of the suite's programs run; for the tests.
pub(super) fn smoke() -> Step {
    step("bench", &["--smoke".to_owned()], SMOKE)
}

fn step(name: &str, more: &[String], limit: Duration) -> Step {
    let mut step = Step::new(name, &["/usr/bin/xtask", "bench", "rdma", "--hosts", TESTBED], limit);
    step.command.extend_from_slice(more);
    step
}

/// Adds the programs, and the description of the guest's hosts.
pub(super) fn add(tree: &mut Initramfs, hosts: u32) -> Result<()> {
    let task = executables(cargo().args(["build", "--workspace", "--bin", "xtask"]), &["xtask"])?;
    let (_, task) = task.first().context("cargo built no xtask")?;
    programs::add(tree, &Userland::here(), task, "/usr/bin/xtask")?;
    let binaries = Binaries::build_with(Profile::Release, &["harmonaize-bench"])?;
    for name in OURS {
        programs::add(tree, &Userland::here(), &binaries.path(name)?, &format!("{PROGRAMS}/{name}"))?;
    }
    tree.file(TESTBED, testbed(hosts)?);
    Ok(())
}

/// The hosts as `vm::hosts` builds them. All share a namespace, so that commands start where the suite runs; and a port
/// goes down at the switch, so that the host's routes stay.
fn testbed(hosts: u32) -> Result<String> {
    let mut text = format!(
        "launcher = 'local'\nprograms = '{PROGRAMS}'\nfolder = '/tmp/bench'\ncontrol = '127.0.0.1'\nrate = '1Gbit/s'\n\
         [faults]\nlossy = '/usr/bin/tc -n sw qdisc add dev p{{index}} root netem loss 1%'\n\
         lossless = '/usr/bin/tc -n sw qdisc del dev p{{index}} root'\n\
         slow = '/usr/bin/tc -n sw qdisc add dev p{{index}} root netem rate 40mbit limit 100000'\n\
         fast = '/usr/bin/tc -n sw qdisc del dev p{{index}} root'\n\
         down = '/usr/bin/ip -n sw link set p{{index}} down'\nup = '/usr/bin/ip -n sw link set p{{index}} up'\n"
    );
    for host in 0..hosts {
        writeln!(text, "[[host]]\nname = 'h{host}'\naddress = '10.0.0.{}'\ndevice = 'rxe{host}'", host + 1)?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_suites::testbed::Testbed;

    #[test]
    fn the_guests_hosts_are_a_testbed() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), testbed(4).unwrap()).unwrap();
        let testbed = Testbed::read(file.path()).unwrap();
        assert_eq!(testbed.hosts.len(), 4);
        assert_eq!(testbed.hosts[3].device, "rxe3");
        assert!(testbed.faults.unwrap().down.contains("p{index}"));
    }
}
