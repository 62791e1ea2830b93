//! `cargo xtask bench SUITE`: each bar is one row, measured beside what it is compared with.

use anyhow::{Context, Result, bail};
use clap::builder::{PossibleValue, PossibleValuesParser};
use harmonaize_suites::hosts::{self, Hosts};
use harmonaize_suites::part::{self, Outcome};
use harmonaize_suites::pictures;
use harmonaize_suites::report::Report;
use harmonaize_suites::stale;
use harmonaize_suites::suite::{Request, Run};
use harmonaize_suites::suites::{self, ByNames, SUITES};
use harmonaize_testkit::packages;
use harmonaize_testkit::workspace::{self, Binaries, Profile};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// The page of results.
const RESULTS: &str = "docs/performance/README.md";

/// What `cargo xtask bench` takes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask bench shaped                     a table on standard output
  cargo xtask bench sweep --yes                installs peers when missing; target/sweep/sweep.html and sweep.csv
  cargo xtask bench sweep --only host --ranks 4 --collectives all_reduce,alltoall --sizes 64K,64M
  cargo xtask bench rdma --hosts testbed.toml  hosts that are reached by ssh; programs are copied there
  cargo xtask bench rdma --hosts n1,n2         hosts whose agents run, by the installed package's programs
  cargo xtask bench sweep --hosts n1,n2 --agent /run/harmonaize/a/agent.sock --sizes 1K,1M --dry-run
  cargo xtask bench --report                   marks stale rows of the page of results
  cargo xtask bench codec gradients.npy        codecs, on a recorded tensor too
  cargo xtask bench codec --pytorch --yes      codecs, and PyTorch beside them

A file for --hosts:
  [[host]]
  name = \"n1\"                # also whom ssh asks for, unless `ssh` or `launcher` says otherwise
  ssh = \"root@n1.lab\"
  address = \"10.1.0.1\"       # on the fabric
  device = \"mlx5_0\"          # or with its port, mlx5_0:1
  gid_index = 3               # left out: the one for RoCEv2 with the address
Beside the hosts it may have `launcher` (such as \"ip netns exec {host}\", or \"local\"), `programs` (the folder where
they are installed on the hosts), `folder`, `control` (the address of it on the first host), `ports` and `rate`.")]
pub struct Args {
    /// Which rows
    #[arg(value_parser = names(), required_unless_present = "report")]
    pub suite: Option<String>,
    /// Mark the rows of docs/performance/README.md that more than 50 commits have made stale, and measure nothing
    #[arg(long, exclusive = true)]
    pub report: bool,
    /// Write the rows with their provenance as JSON too; `-` prints it on a line of standard output
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    #[command(flatten)]
    request: Request,
}

/// The suites' names.
fn names() -> PossibleValuesParser {
    PossibleValuesParser::new(SUITES.iter().map(|suite| PossibleValue::new(suite.name).help(suite.about)))
}

/// Runs the task.
pub fn run(args: &Args) -> Result<()> {
    if args.report {
        return mark_results();
    }
    let suite = args.suite.as_deref().and_then(suites::named).context("there is no such suite")?;
    let request = &args.request;
    let named = by_names(suite.name, request)?;
    if named.is_none() {
        part::check_names(suite.name, &(suite.parts)(request), &request.only)?;
    }
    if suite.name != "codec" && !request.files.is_empty() {
        bail!("only the suite codec takes files");
    }
    if suite.name != "codec" && request.pytorch {
        bail!("only the suite codec compares with PyTorch so");
    }
    if suite.name != "sweep"
        && !(request.ranks.is_empty()
            && request.collectives.is_empty()
            && (named.is_some() || request.sizes.is_empty()))
    {
        bail!(
            "only the suite sweep takes --sizes, --ranks and --collectives, and rdma --sizes by hosts' names"
        );
    }
    if let Some((suite, hosts)) = named {
        if request.dry_run {
            print!("{}", (suite.commands)(request, &hosts)?);
            return Ok(());
        }
        return finished(args, (suite.run)(request, &hosts)?);
    }
    let run = match suite.run {
        Run::Alone(run) => {
            let began = Instant::now();
            let outcome = run(request)?;
            eprintln!("{:.0} s", began.elapsed().as_secs_f64());
            return finished(args, outcome);
        }
        Run::Built(run) => run,
    };
    packages::require(&[packages::EMULATION, packages::BUILDING].concat(), request.consent())?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    eprintln!("Building (minutes, the first time)");
    let binaries =
        Binaries::build_with(Profile::Release, &["harmonaize-bench", "harmonaize-perf", "harmonaize-tests"])?;
    let began = Instant::now();
    let outcome = run(request.clone(), binaries, stop)?;
    eprintln!("{:.0} s without the build", began.elapsed().as_secs_f64());
    if request.traces.is_some() { Ok(()) } else { finished(args, outcome) }
}

/// The suite and the hosts, where it is to run on hosts by their names.
fn by_names(suite: &str, request: &Request) -> Result<Option<(ByNames, Hosts)>> {
    let names = request.hosts.as_deref().and_then(hosts::names);
    let Some(names) = names else {
        if request.hosts.is_some() && suite != "rdma" {
            bail!("only the suite rdma takes a file of --hosts; suites rdma and sweep take names");
        }
        if request.dry_run || !request.types.is_empty() {
            bail!("--dry-run and --types are for --hosts by name");
        }
        return Ok(None);
    };
    let found = suites::by_names(suite).context("only the suites rdma and sweep take --hosts")?;
    Ok(Some((found, Hosts::new(&names, &request.agent, &request.programs)?)))
}

/// Prints what came of parts. It is an error where one failed, or where a bar was not reached and bars are
/// held.
fn finished(args: &Args, outcome: Outcome) -> Result<()> {
    let report = Report::new(outcome.rows);
    print_report(args, &report)?;
    if !outcome.problems.is_empty() {
        bail!("{}", outcome.problems.join("; "));
    }
    match report.judged() {
        (failed, judged) if failed > 0 && !args.request.smoke => {
            bail!("{failed} of {judged} rows with a bar do not reach it")
        }
        _ => Ok(()),
    }
}

/// Prints the report, as JSON too where that was asked for.
fn print_report(args: &Args, report: &Report) -> Result<()> {
    println!("{}", report.markdown());
    if let (Some(folder), Some(suite)) = (&args.request.figures, &args.suite) {
        pictures::of_rows(folder, suite, &report.rows)?;
        pictures::of_ideals(folder, suite, &report.rows)?;
    }
    match &args.json {
        Some(path) if path.as_os_str() == "-" => println!("{}", serde_json::to_string(report)?),
        Some(path) => write_json(path, report)?,
        None => {}
    }
    Ok(())
}

/// Writes a report to a file.
pub(crate) fn write_json<T: serde::Serialize + ?Sized>(path: &Path, report: &T) -> Result<()> {
    let text = serde_json::to_string_pretty(report)? + "\n";
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Marks the rows of the page of results that are stale, and says which.
fn mark_results() -> Result<()> {
    let path = workspace::root().join(RESULTS);
    let page = std::fs::read_to_string(&path).with_context(|| format!("cannot read {RESULTS}"))?;
    let marked = stale::mark(&page, stale::rooms, stale::newer);
    marked.unknown.iter().for_each(|row| eprintln!("not known: {row}"));
    println!(
        "{RESULTS}: {} rows, {} of them older than {} commits of what they measure{}",
        marked.rows,
        marked.stale,
        stale::MOST_COMMITS,
        if marked.text == page { "; the marks are right" } else { "; the marks are written anew" }
    );
    std::fs::write(&path, marked.text).with_context(|| format!("cannot write {RESULTS}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory, Parser};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn an_unknown_part_is_refused_before_building() {
        let wrong = |line: &str| {
            let line = Line::try_parse_from(format!("bench {line}").split(' ')).unwrap();
            run(&line.args).unwrap_err().to_string()
        };
        assert_eq!(
            wrong("control --only onset,typo"),
            "the suite control has no part typo; it has onset, order, stagger, drain, cut, planner, page"
        );
        let lines =
            ["rdma --only typo", "telemetry --only gloo-long", "telemetry --traces /tmp --only packet"];
        for line in lines {
            assert!(wrong(line).contains("has no part"), "{line}");
        }
        for suite in ["shaped", "small", "codec"] {
            let expected = format!("the suite {suite} has no parts; leave --only out");
            assert_eq!(wrong(&format!("{suite} --only large")), expected);
        }
    }

    #[test]
    fn hosts_go_with_two_suites_by_name() {
        let said = |line: &str| {
            let line = Line::try_parse_from(format!("bench {line}").split(' ')).unwrap();
            run(&line.args).map_err(|error| format!("{error:#}"))
        };
        assert_eq!(said("rdma --hosts n1,n2 --dry-run"), Ok(()));
        assert_eq!(said("sweep --hosts n1,root@n2 --collectives all_reduce --dry-run"), Ok(()));
        let wrong = [
            ("control --hosts n1,n2", "only the suites rdma and sweep take --hosts"),
            ("sweep --hosts testbed.toml", "only the suite rdma takes a file"),
            ("rdma --hosts n1", "two to 64 names"),
            ("rdma --hosts n1,-oProxyCommand=x", "no name or address"),
            ("rdma --hosts n1,n2 --ranks 4 --dry-run", "only the suite sweep takes"),
            ("rdma --dry-run", "are for --hosts by name"),
            ("sweep --types half", "are for --hosts by name"),
        ];
        for (line, part) in wrong {
            let error = said(line).unwrap_err();
            assert!(error.contains(part), "{line}: {error}");
        }
    }

    #[test]
    fn the_help_names_every_part() {
        let help = Line::command().render_long_help().to_string();
        let help: Vec<&str> = help.split(|c: char| !c.is_ascii_alphanumeric() && c != '-').collect();
        for suite in SUITES {
            let line = Line::try_parse_from(["bench", suite.name]).unwrap();
            for part in (suite.parts)(&line.args.request) {
                assert!(help.contains(&part), "{part} of {}", suite.name);
            }
        }
    }
}
