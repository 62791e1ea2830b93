//! Control on the loopback beside made-up agents: what TLS costs it, and what many sessions and streams take.

use super::{Trust, case};
use crate::lab::measured;
use crate::row::{Better, Row, median};
use crate::runs::interleave;
use anyhow::{Context, Result, bail, ensure};
use harmonaize_identity::{Authority, CONTROL, Folder, Use};
use harmonaize_testkit::job;
use harmonaize_testkit::process::Process;
use harmonaize_testkit::topology::{Topology, racks};
use harmonaize_testkit::usage::processor_time;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Racks, hosts in each, and spines; and racks where there are many sessions: 10,000, and 200 in a smoke run.
const FABRIC: (usize, usize, usize) = (2, 4, 8);
const RACKS: [usize; 2] = [250, 5];
const A_RACK: usize = 40;
/// Racks of such hosts whose flows are followed, and for how many seconds: as usual, and in a smoke run. And what it may take of processors.
const FOLLOWED: [(usize, usize); 2] = [(25, 20), (5, 2)];
const PROCESSORS: f64 = 0.5;
/// The part of what agents are to send that must have come, for a figure to mean anything.
const SENT: f64 = 0.9;
/// Whose certificate is an operator's.
const OPERATOR: &str = "operator";
/// What TLS may cost: of joins a second, and of the time that a reaction takes.
const JOINS: f64 = 0.98;
const REACTION: f64 = 1.02;
/// How often joins are timed in a round: who else uses the machine comes and goes.
const JOIN_RUNS: usize = 4;
/// How long control may take to start, and agents to be done.
const START: Duration = Duration::from_secs(60);
const LIMIT: Duration = Duration::from_secs(600);

/// A topology with certificates for its hosts and for control, in a folder that ends with this.
struct Site {
    folder: TempDir,
    hosts: usize,
}

/// A running control.
struct Control<'a> {
    site: &'a Site,
    process: Process,
    address: String,
    tls: bool,
}

impl Site {
    fn make((number, hosts, spines): (usize, usize, usize)) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let topology = Topology::parse(&racks(number, hosts, spines, "1Gbit/s"))?;
        let first = topology.hosts().count();
        let address = |node: usize| {
            let [.., high, low] = u32::try_from(node - first).unwrap_or(0).to_be_bytes();
            vec![Ipv4Addr::new(10, 64, high, low)]
        };
        std::fs::write(folder.path().join("topology.toml"), topology.with_addresses(address)?)?;
        let authority = Authority::create()?;
        authority.issue(CONTROL, Use::Control)?.write(&Folder(folder.path().join("tls")))?;
        for name in (0..first).map(|host| format!("h{host}")).chain([OPERATOR.to_owned()]) {
            let own = folder.path().join("agents").join(&name);
            authority.issue(&name, Use::Session)?.write(&Folder(own))?;
        }
        Ok(Self { folder, hosts: first })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn start(&self, suite: &Trust, tls: bool) -> Result<Control<'_>> {
        let protection = if tls { "tls = \"tls\"" } else { "insecure_loopback = true" };
        let text = format!(
            "listen = \"127.0.0.1:0\"\n{protection}\ntopology = \"topology.toml\"\n\
             source_ports = \"20000-29999\"\n[[tenant]]\nname = \"a\"\n\
             [[operator]]\nname = \"{OPERATOR}\"\nrole = \"viewer\"\n"
        );
        let (name, config) = if tls { ("control", "control.toml") } else { ("plain", "plain.toml") };
        std::fs::write(self.path(config), text)?;
        let mut command = Command::new(suite.binaries.path("harmonaize-control")?);
        command.arg("--config").arg(self.path(config)).env("NO_COLOR", "1");
        let log = self.path(&format!("{name}.log"));
        let mut process = Process::start_here(name, &mut command, &log)?;
        let line = process.line_by(Instant::now() + START, |line| line.contains("control serves"))?;
        let address = line.split(' ').find_map(|word| word.strip_prefix("listen="));
        let address = address.context("control does not say where it listens")?.to_owned();
        Ok(Control { site: self, process, address, tls })
    }
}

impl Control<'_> {
    fn name(&self) -> &'static str {
        if self.tls { "with TLS" } else { "without" }
    }

    /// Has the site's agents say and time something.
    fn time<T: DeserializeOwned>(&mut self, suite: &Trust, what: &str, count: usize) -> Result<T> {
        let mut command = Command::new(suite.binaries.path("agents")?);
        command.args([what, "--control", &self.address, "--count", &count.to_string()]);
        command.args(["--pid", &self.process.id().to_string()]);
        command.arg("--topology").arg(self.site.path("topology.toml"));
        if self.tls {
            command.arg("--tls").arg(self.site.path("agents"));
            command.arg("--records").arg(self.site.path("tls"));
        }
        let log = self.site.path("agents.log");
        let mut agents = [Process::start_here("the made-up agents", &mut command, &log)?];
        job::wait(&mut agents, LIMIT, || self.check(suite))?;
        let told = measured(&std::fs::read_to_string(&log)?)?;
        told.into_iter().next().context("nothing was timed")
    }

    fn check(&mut self, suite: &Trust) -> Result<()> {
        ensure!(!suite.stop.load(Ordering::Relaxed), "interrupted");
        match self.process.status()? {
            Some(status) => bail!("control ended with {status}: {}", self.process.log_tail(4096)),
            None => Ok(()),
        }
    }
}

/// Joins, and the reaction to congestion, with TLS and without; and what TLS alone takes for a join's messages.
pub(super) fn tls(suite: &Trust) -> Result<Vec<Row>> {
    #[derive(Deserialize)]
    struct Records {
        us_a_join: f64,
        messages: usize,
    }
    #[derive(Deserialize)]
    struct Joins {
        joins_per_second: f64,
    }
    #[derive(Deserialize)]
    struct Reactions {
        reactions_us: Vec<f64>,
    }
    let (joins, reports) = if suite.request.smoke { (40, 2) } else { (5000, 20) };
    let site = Site::make(FABRIC)?;
    let mut controls = [site.start(suite, true)?, site.start(suite, false)?];
    let formed = interleave(JOIN_RUNS * suite.rounds(), controls.len(), |which| {
        let control = controls.get_mut(which).context("no such control")?;
        let before = processor_time(control.process.id())?;
        let formed: Joins = control.time(suite, "joins", joins)?;
        let took = processor_time(control.process.id())?.saturating_sub(before);
        let each = took.as_secs_f64() * 1e6 / joins as f64;
        eprintln!(
            "{}: {:.0} joins a second, {each:.0} us of control's",
            control.name(),
            formed.joins_per_second
        );
        Ok((formed.joins_per_second, each))
    })?;
    let reacted = interleave(suite.rounds(), controls.len(), |which| {
        let control = controls.get_mut(which).context("no such control")?;
        let reacted: Reactions = control.time(suite, "reactions", reports)?;
        let reaction = median(&reacted.reactions_us).context("no reaction")?;
        eprintln!("{}: {reaction:.0} us from a report to all proposals", control.name());
        Ok(reaction)
    })?;
    let [control, _] = &mut controls;
    let (mut least, mut messages) = (Vec::new(), 0);
    for _ in 0..suite.rounds() {
        let records: Records = control.time(suite, "records", joins)?;
        eprintln!("{} messages opened and sealed in memory: {:.2} us", records.messages, records.us_a_join);
        least.push(records.us_a_join);
        messages = records.messages;
    }
    let ([over, plain], [reaction, plain_reaction]) = (formed.as_slice(), reacted.as_slice()) else {
        bail!("{} contestants of two", formed.len())
    };
    let row = |what: &str, better, bar, ours: &[f64], plain: &[f64]| {
        let what = format!("control over TLS: {what}");
        case(what, better, bar).of(0, site.hosts).compare(ours, plain, "without TLS")
    };
    let [rates, plain_rates] = [over, plain].map(|runs| runs.iter().map(|run| run.0).collect::<Vec<_>>());
    let [times, plain_times] = [over, plain].map(|runs| runs.iter().map(|run| run.1).collect::<Vec<_>>());
    let added: Vec<_> = times.iter().zip(&plain_times).map(|(over, plain)| over - plain).collect();
    let reference = format!("its {messages} messages opened and sealed in memory");
    let added =
        case("control over TLS: us of processor time that TLS adds to a join", Better::Less, f64::INFINITY)
            .of(0, site.hosts)
            .compare(&added, &least, &reference);
    Ok(vec![
        added,
        row("joins a second, of two hosts each", Better::More, JOINS, &rates, &plain_rates),
        row("us of control's processor time a join", Better::Less, f64::INFINITY, &times, &plain_times),
        row("us from a congestion report to all proposals", Better::Less, REACTION, reaction, plain_reaction),
    ])
}

/// What a session takes of control's memory, and how long joins take while all are open.
pub(super) fn sessions(suite: &Trust) -> Result<Vec<Row>> {
    #[derive(Deserialize)]
    struct Open {
        bytes_a_session: f64,
        opened_s: f64,
        joins_ms: Vec<f64>,
    }
    let (racks, joins) = if suite.request.smoke { (RACKS[1], 50) } else { (RACKS[0], 500) };
    let (rounds, site) = (suite.rounds(), Site::make((racks, A_RACK, FABRIC.2))?);
    let mut figures = [const { Vec::new() }; 3];
    for round in 1..=rounds {
        let open: Open = site.start(suite, true)?.time(suite, "sessions", joins)?;
        let mut times = open.joins_ms;
        times.sort_by(f64::total_cmp);
        let at = |part: usize| times.get(times.len() * part / 100).copied().context("no join");
        let (kib, p50, p99) = (open.bytes_a_session / 1024.0, at(50)?, at(99)?);
        eprintln!(
            "run {round}/{rounds}: {} sessions in {:.1} s, {kib:.1} KiB each; joins p50 {p50:.2} ms, p99 {p99:.2} ms",
            site.hosts, open.opened_s
        );
        figures.iter_mut().zip([kib, p50, p99]).for_each(|(figures, figure)| figures.push(figure));
    }
    let what = ["KiB of control's memory a session", "p50 ms of a join", "p99 ms of a join"];
    let row = |(figures, what): (&Vec<f64>, &str)| {
        let what = format!("{} sessions over TLS: {what}", site.hosts);
        case(what, Better::Less, 1.0).of(0, site.hosts).state(figures)
    };
    Ok(figures.iter().zip(what).map(row).collect())
}

/// What of processors control takes while an operator follows the flows of all hosts.
pub(super) fn streams(suite: &Trust) -> Result<Vec<Row>> {
    #[derive(Deserialize)]
    struct Streams {
        processors: f64,
        flows_per_second: f64,
        expected: f64,
    }
    let [usual, smoke] = FOLLOWED;
    let (racks, seconds) = if suite.request.smoke { smoke } else { usual };
    let rounds = suite.rounds();
    let site = Site::make((racks, A_RACK, FABRIC.2))?;
    let mut control = site.start(suite, true)?;
    let mut processors = Vec::new();
    for round in 1..=rounds {
        let followed: Streams = control.time(suite, "streams", seconds)?;
        let Streams { processors: taken, flows_per_second, expected } = followed;
        ensure!(
            suite.request.smoke || flows_per_second >= expected * SENT,
            "{flows_per_second:.0} flows came a second, of {expected:.0}: agents have too little time"
        );
        eprintln!(
            "run {round}/{rounds}: {flows_per_second:.0} flows a second, {taken:.3} processors of control's"
        );
        processors.push(taken);
    }
    let what = format!("the flows of {} agents are followed over TLS: processors of control's", site.hosts);
    Ok(vec![case(what, Better::Less, 1.0).of(0, site.hosts).limit(&processors, PROCESSORS)])
}
