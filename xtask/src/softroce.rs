//! `cargo xtask softroce`: verbs for real, on SoftRoCE devices of emulated hosts in a small virtual machine.

use crate::test::{Count, closing};
use crate::vm::initramfs::{Image, Initramfs};
use crate::vm::kernel::Kernel;
use crate::vm::machine::{GuestOutcome, Machine};
use crate::vm::programs::{self, Userland};
use crate::vm::{self, AMD64};
use anyhow::{Context, Result, bail};
use harmonaize_guest::{Job, Mark, Server, Step};
use harmonaize_testkit::packages::{self, Consent};
use harmonaize_testkit::strict;
use harmonaize_testkit::workspace::{cargo, executables};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

mod bench;
mod outcomes;
mod suites;

/// The emulated guest's architecture.
const ARCHITECTURE: &vm::Architecture = &AMD64;
const MEMORY_MIB: u32 = 1536;
const PROCESSORS: u32 = 2;
/// The boot, the hosts and the way out, on top of the steps' own limits.
const AROUND: Duration = Duration::from_secs(60);
/// How long a machine without a job may take when it is tried whether the processor can run guests.
const PROBE: Duration = Duration::from_secs(10);

const MODULES: &[&str] = &[
    "rdma_rxe",
    "ib_uverbs",
    "rdma_ucm",
    "veth",
    "bridge",
    "sch_netem",
    "sch_tbf",
    "sch_red",
    "sch_ingress",
    "cls_bpf",
    "cls_u32",
    "act_gact",
];
const PROGRAMS: &[&str] = &[
    "busybox",
    "ip",
    "tc",
    "rdma",
    "ping",
    "ibv_devices",
    "ibv_devinfo",
    "ibv_rc_pingpong",
    "ibv_ud_pingpong",
    "ib_write_bw",
    "ib_write_lat",
    "ib_send_lat",
];

/// What `cargo xtask softroce` takes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask softroce test --yes          what CI runs; installs what is missing without asking
  cargo xtask softroce test --only smoke   the devices alone, without this project's tests
  cargo xtask softroce bench --json out.json
                                           the suite rdma of the benchmarks, beside perftest
  cargo xtask softroce shell --hosts 2     a shell in the guest, with two hosts")]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Run the tests that need a device, then some of them again with lost packets
    Test(TestArgs),
    /// Run the suite rdma of the benchmarks on the guest's hosts
    Bench(bench::Args),
    /// Open a shell in a guest whose hosts are built
    Shell(Guest),
}

/// What a guest is given.
#[derive(Debug, Clone, clap::Args)]
pub struct Guest {
    /// Install missing packages without asking
    #[arg(long)]
    pub yes: bool,
    /// Emulated hosts, each with a device
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=16))]
    pub hosts: u32,
    /// Run the guest on the processor itself, where a short trial shows that this works
    #[arg(long)]
    pub kvm: bool,
}

/// What the tests take.
#[derive(Debug, Clone, clap::Args)]
pub struct TestArgs {
    #[command(flatten)]
    guest: Guest,
    /// Run the steps alone whose names begin with one of these, for example machine, smoke, bench, verbs, transport, telemetry, loss
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    only: Vec<String>,
}

impl TestArgs {
    fn wants(&self, step: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|name| step.starts_with(name))
    }
}

/// Runs the task.
pub fn run(args: &Args) -> Result<()> {
    match &args.action {
        Action::Test(args) => test(args),
        Action::Bench(args) => bench::run(args),
        Action::Shell(guest) => shell(guest),
    }
}

/// Runs the tests, or says why this machine cannot.
pub(crate) fn test(args: &TestArgs) -> Result<()> {
    if let Some(reason) = missing() {
        return strict::skip("the tests on SoftRoCE", reason);
    }
    let begun = Instant::now();
    let (kernel, mut tree) = prepare(&args.guest)?;
    if args.wants("machine") {
        println!("== machine");
        outcomes::check(&kernel, args.guest.kvm).context("the machine's own test failed")?;
        println!("failing steps, a dying kernel and an endless guest are told apart");
    }
    let mut steps = suites::smoke(args.guest.hosts);
    if args.wants("bench") {
        bench::add(&mut tree, args.guest.hosts)?;
        steps.push(bench::smoke());
    }
    steps.extend(suites::project(&mut tree, args.guest.hosts, |step| args.wants(step))?);
    steps.retain(|step| args.wants(&step.name));
    if steps.is_empty() {
        if args.wants("machine") {
            return Ok(());
        }
        bail!("no step's name begins with {}", args.only.join(" or "));
    }
    let limit = steps.iter().map(|step| Duration::from_secs(step.limit_s)).sum::<Duration>() + AROUND;
    let expected: Vec<String> = steps.iter().map(|step| step.name.clone()).collect();
    let job = Job { hosts: args.guest.hosts, steps, ..Job::default() };
    let image = Image::write(&mut tree, &job, "test")?;
    println!(
        "Booting {} with {} hosts and {} steps; prepared in {:.1} s.",
        kernel.version(),
        job.hosts,
        job.steps.len(),
        begun.elapsed().as_secs_f64()
    );
    let mut report = Report::default();
    let outcome = machine(&kernel, image.path(), args.guest.kvm).run(limit, |line| report.line(line))?;
    println!("{}", report.table());
    println!("In all {:.1} s.", begun.elapsed().as_secs_f64());
    report.judge(&outcome, &expected)
}

fn shell(guest: &Guest) -> Result<()> {
    if let Some(reason) = missing() {
        bail!("{reason}");
    }
    let (kernel, mut tree) = prepare(guest)?;
    suites::project(&mut tree, guest.hosts, |_| true)?;
    let job = Job { hosts: guest.hosts, shell: true, ..Job::default() };
    let image = Image::write(&mut tree, &job, "shell")?;
    machine(&kernel, image.path(), guest.kvm).interact()
}

/// Why this machine cannot run the guest at all.
fn missing() -> Option<String> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Some("the guest runs this machine's programs, which have to be x86-64 Linux's".into());
    }
    if Command::new("dpkg-query").arg("--version").stdout(Stdio::null()).status().is_err() {
        return Some("the guest is made from Debian's packages, and this machine has no dpkg".into());
    }
    let absent = packages::missing(packages::SOFTROCE);
    if !absent.is_empty() && !rustix::process::geteuid().is_root() {
        let list = absent.join(" ");
        return Some(format!(
            "{list} not installed, and installing needs root: `sudo apt-get install {list}`"
        ));
    }
    None
}

/// The kernel, and a tree with everything but the job.
fn prepare(guest: &Guest) -> Result<(Kernel, Initramfs)> {
    let consent = Consent::from_flag(guest.yes);
    packages::require(packages::SOFTROCE, consent)?;
    packages::require(packages::BUILDING, consent)?;
    let kernel = Kernel::prepare(ARCHITECTURE)?;
    if guest.kvm {
        probe(&kernel)?;
    }
    let mut tree = base(&kernel)?;
    PROGRAMS.iter().try_for_each(|name| programs::add_installed(&mut tree, &Userland::here(), name))?;
    programs::add_verbs(&mut tree, &Userland::here())?;
    tree.file("/etc/passwd", "root:x:0:0:root:/root:/bin/sh\n");
    tree.file("/etc/hosts", "127.0.0.1 localhost\n");
    for name in applets()?.lines() {
        tree.link(&format!("/usr/lib/applets/{name}"), "/usr/bin/busybox");
    }
    tree.link("/usr/bin/sh", "busybox");
    tree.modules(kernel.modules(MODULES)?);
    Ok((kernel, tree))
}

/// A tree with the first process alone.
fn base(kernel: &Kernel) -> Result<Initramfs> {
    let init = executables(cargo().args(["build", "--workspace", "--bin", "init"]), &["init"])?;
    let (_, init) = init.first().context("cargo built no init")?;
    let mut tree = Initramfs::default();
    programs::add(&mut tree, &Userland::here(), init, "/init")?;
    tree.modules(kernel.modules(&[])?);
    Ok(tree)
}

fn applets() -> Result<String> {
    let output = Command::new("busybox").arg("--list").output().context("cannot start busybox")?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Boots a guest without a job on the processor itself: that `/dev/kvm` is there says little.
fn probe(kernel: &Kernel) -> Result<()> {
    let image = Image::write(&mut base(kernel)?, &Job::default(), "probe")?;
    let outcome = machine(kernel, image.path(), true).run(PROBE, |_| {})?;
    if outcome != GuestOutcome::Done(0) {
        bail!("--kvm does not work here: a guest without a job did not end well: {outcome:?}; leave it out");
    }
    Ok(())
}

fn machine<'a>(kernel: &'a Kernel, initramfs: &'a Path, kvm: bool) -> Machine<'a> {
    Machine {
        architecture: ARCHITECTURE,
        kernel,
        initramfs,
        memory_mib: MEMORY_MIB,
        processors: PROCESSORS,
        kvm,
        cards: Vec::new(),
    }
}

/// What the guest has said so far.
#[derive(Debug, Default)]
struct Report {
    /// The step that runs, and what its tests counted, if it is a test program.
    current: Option<(String, Option<Count>)>,
    rows: Vec<Row>,
    /// Tests that found something missing and did nothing: in this guest nothing may be missing.
    skipped: u64,
}

#[derive(Debug, PartialEq)]
struct Row {
    name: String,
    outcome: String,
    fine: bool,
    seconds: f64,
    count: Count,
}

impl Report {
    /// Takes a line of the console, and passes it on.
    fn line(&mut self, line: &str) {
        match Mark::find(line) {
            Some(Mark::Begin(name)) => {
                println!("== {name}");
                self.current = Some((name, None));
            }
            Some(Mark::End { name, status, seconds }) => {
                let counted = self.current.take().filter(|(current, _)| *current == name);
                let count = counted.and_then(|(_, count)| count);
                // A filter that matches nothing any more would pass for ever.
                let idle = count == Some(Count::default());
                self.rows.push(Row {
                    name,
                    outcome: if idle { "no tests".to_owned() } else { status.to_string() },
                    fine: status.fine() && !idle,
                    seconds,
                    count: count.unwrap_or_default(),
                });
            }
            Some(Mark::Halt(_)) => {}
            None => {
                if let (Some((_, count)), Some(more)) = (&mut self.current, closing(line)) {
                    count.get_or_insert_default().add(more);
                }
                if line.contains("SKIPPED") {
                    self.skipped += 1;
                }
                if !line.is_empty() {
                    println!("{line}");
                }
            }
        }
    }

    fn table(&self) -> String {
        let width = self.rows.iter().map(|row| row.name.len()).max().unwrap_or(0).max(4);
        let mut lines = vec![format!("\n{:<width$} {:>8}  {:<10} tests", "step", "seconds", "result")];
        for row in &self.rows {
            let result = if row.fine { "passed".to_owned() } else { format!("FAILED ({})", row.outcome) };
            let Count { passed, failed, .. } = row.count;
            let tests = match passed + failed {
                0 => String::new(),
                _ => format!("{passed} passed, {failed} failed"),
            };
            let line = format!("{:<width$} {:>8.2}  {result:<10} {tests}", row.name, row.seconds);
            lines.push(line.trim_end().to_owned());
        }
        lines.join("\n")
    }

    /// Fails unless the guest ended by itself, every expected step ended, and all of them well.
    fn judge(&self, outcome: &GuestOutcome, expected: &[String]) -> Result<()> {
        let at = self.current.as_ref().map_or("between two steps", |(name, _)| name);
        let failed: Vec<&str> =
            self.rows.iter().filter(|row| !row.fine).map(|row| row.name.as_str()).collect();
        match outcome {
            GuestOutcome::TimedOut => bail!("the guest ran past its time limit, at: {at}"),
            GuestOutcome::Died(how) => bail!("the guest died, at: {at}; {how}"),
            GuestOutcome::Done(0) if failed.is_empty() => {}
            GuestOutcome::Done(_) => bail!("failed: {}", failed.join(", ")),
        }
        if let Some(absent) = expected.iter().find(|name| self.rows.iter().all(|row| row.name != **name)) {
            bail!("the guest never ran {absent}");
        }
        let mut count = Count::default();
        self.rows.iter().for_each(|row| count.add(row.count));
        let Count { passed, failed, .. } = count;
        println!("{} steps passed; {passed} tests passed, {failed} failed", expected.len());
        if self.skipped > 0 {
            bail!("{} tests skipped themselves, and this guest has all that they need", self.skipped);
        }
        if failed > 0 { bail!("tests failed") } else { Ok(()) }
    }
}

/// A step with a server: both are one program, and the client is told of the server by `client`.
fn pair(
    name: String,
    program: &[&str],
    server: &[&str],
    client: &[&str],
    port: u16,
    limit: Duration,
) -> Step {
    let words = |more: &[&str]| [program, more].concat().into_iter().map(str::to_owned).collect();
    Step {
        name,
        command: words(client),
        server: Some(Server { command: words(server), port }),
        limit_s: limit.as_secs(),
        ..Step::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(lines: &[&str]) -> Report {
        let mut report = Report::default();
        lines.iter().for_each(|line| report.line(line));
        report
    }

    const GOOD: &[&str] = &[
        "@@ end modules 0 0.50",
        "@@ begin verbs",
        "test a ... ok",
        "test result: ok. 3 passed; 0 failed; 0 ignored",
        "@@ end verbs 0 1.00",
    ];

    fn judged(lines: &[&str], outcome: &GuestOutcome) -> String {
        let expected = ["verbs".to_owned()];
        report(lines).judge(outcome, &expected).map_or_else(|error| error.to_string(), |()| "passed".into())
    }

    #[test]
    fn a_run_passes_when_everything_expected_ended_well() {
        assert_eq!(judged(GOOD, &GuestOutcome::Done(0)), "passed");
        assert_eq!(report(GOOD).rows[1].count, Count { passed: 3, failed: 0, flaky: 0 });
        let expected = "\nstep     seconds  result     tests\nmodules     0.50  passed\n\
                        verbs       1.00  passed     3 passed, 0 failed";
        assert_eq!(report(GOOD).table(), expected);
    }

    #[test]
    fn every_other_end_is_a_failure() {
        assert_eq!(judged(&GOOD[..1], &GuestOutcome::Done(0)), "the guest never ran verbs");
        assert!(judged(&GOOD[..3], &GuestOutcome::TimedOut).ends_with("at: verbs"));
        assert!(judged(GOOD, &GuestOutcome::Died("killed".into())).contains("killed"));
        let bad = ["@@ begin verbs", "@@ end verbs signal-9 2.00"];
        assert_eq!(judged(&bad, &GuestOutcome::Done(1)), "failed: verbs");
        assert_eq!(judged(&bad, &GuestOutcome::Done(0)), "failed: verbs");
        let quiet = ["@@ begin verbs", "test result: FAILED. 1 passed; 2 failed", "@@ end verbs 0 2.00"];
        assert_eq!(judged(&quiet, &GuestOutcome::Done(0)), "tests failed");
        let idle = ["@@ begin verbs", "test result: ok. 0 passed; 0 failed", "@@ end verbs 0 2.00"];
        assert_eq!(judged(&idle, &GuestOutcome::Done(0)), "failed: verbs");
        let mut skipped = GOOD.to_vec();
        skipped.insert(2, "SKIPPED a: no device");
        assert!(judged(&skipped, &GuestOutcome::Done(0)).starts_with("1 tests skipped"));
    }
}
