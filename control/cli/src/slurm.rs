//! `harmonaize slurm`: for operators whose hosts Slurm hands out.
//!
//! Slurm says which nodes are free, control which of them a job would get. They are printed as Slurm takes them.

use crate::Failure;
use crate::jobs::Workers;
use crate::operate::Operate;
use crate::output::PageArguments;
use crate::text::{clean, number_of, visible};
use crate::what_if;
use clap::Subcommand;
use harmonaize_api::v1::{AssumedJob, FabricHost, JobForecast, WhatIfRequest};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::process::Stdio;
use std::time::SystemTime;
use tokio::process::Command;

/// Examples of `slurm nodes`.
pub(crate) const NODES_HELP: &str = "\
Examples:
  harmonaize slurm nodes --workers 4                     a list of nodes, such as h[0-2,5]
  nodes=$(harmonaize slurm nodes --workers 4 --partition gpu --tenant bert-team --idle-only)
  sbatch --partition gpu --nodes 4 --nodelist \"$nodes\" train.sh
  harmonaize slurm nodes --workers 2..8 -o json | jq '{nodelist, excluded}'

Nodes come from `sinfo`, and of control they are the hosts of the same names. Those of them that control does not know, that
are drained there or that have no agent are left out, and standard error says so. Nothing changes, and nothing is kept
free: Slurm decides when the job comes. Control needs [allocator] in its configuration.";

/// What is done for Slurm.
#[derive(Subcommand)]
pub(crate) enum SlurmAction {
    /// Prints which free nodes of Slurm a job should have, for `sbatch --nodelist` and `srun --nodelist`.
    #[command(after_help = NODES_HELP)]
    Nodes(Nodes),
}

/// What `slurm nodes` takes.
#[derive(clap::Args)]
pub(crate) struct Nodes {
    /// How many nodes, or the fewest and the most.
    #[arg(long, value_name = "LEAST..MOST")]
    workers: Workers,
    /// Nodes of this partition of Slurm; of the default one without.
    #[arg(long, value_name = "PARTITION")]
    partition: Option<String>,
    /// The tenant whose job it is: where it may be, and how many ranks it may have. No limits bind without.
    #[arg(long, value_name = "TENANT")]
    tenant: Option<String>,
    /// Only nodes on which Slurm runs nothing; without, also those of which something is free.
    #[arg(long)]
    idle_only: bool,
    /// Kinds of hosts that the job may have, of which it gets one; any where none is named.
    #[arg(long, value_delimiter = ',', value_name = "KIND,...")]
    kind: Vec<String>,
    #[command(flatten)]
    print: PageArguments,
}

/// What `slurm nodes` answers.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Choice {
    /// The nodes as Slurm takes them.
    nodelist: String,
    /// The same one by one, by rank.
    hosts: Vec<String>,
    /// Free nodes that the job cannot have.
    excluded: Vec<Excluded>,
}

/// A free node that the job cannot have.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Excluded {
    host: String,
    reason: &'static str,
}

/// A node of Slurm, and its state there.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Node {
    name: String,
    state: String,
}

/// A line of `sinfo`: a node as one of its partitions has it.
#[derive(Debug, PartialEq, Eq)]
struct Line {
    node: Node,
    /// With a mark behind the default one.
    partition: String,
    /// Such as `up`, `down` or `drain`.
    availability: String,
}

impl Nodes {
    /// Chooses nodes.
    ///
    /// # Errors
    /// Where Slurm or control cannot be asked, or a job would get too few nodes.
    pub(crate) async fn run(&self, control: &mut Operate) -> Result<String, Failure> {
        let lines = sinfo(self.partition.as_deref()).await?;
        let free = self.free(up(lines, self.partition.as_deref())?)?;
        let (candidates, excluded) = usable(free, &control.fabric().await?.hosts);
        for (reason, hosts) in by_reason(&excluded) {
            let hosts: String = hostlist(&hosts).chars().map(visible).collect();
            eprintln!("harmonaize: left out, {reason}: {hosts}");
        }
        if candidates.is_empty() {
            return Err(Failure::Refused("control has no use of any free node of Slurm".to_owned()));
        }
        let reply = control.what_if(self.request(&candidates)).await?;
        let job = reply.jobs.into_iter().find(|job| job.assumed);
        let hosts = chosen(&candidates, job)?;
        let choice = Choice { nodelist: hostlist(&hosts), hosts, excluded };
        Ok(self.print.page(&choice, |choice| format!("{}\n", choice.nodelist)))
    }

    /// Names of nodes that are free in Slurm.
    fn free(&self, nodes: BTreeSet<Node>) -> Result<Vec<String>, Failure> {
        // A mark behind a state, such as that of a node that does not answer, makes it another word.
        let is_free = |node: &Node| node.state == "idle" || (node.state == "mixed" && !self.idle_only);
        let of = self.partition.as_deref().map_or_else(String::new, |name| format!(" of partition {name}"));
        if nodes.is_empty() {
            return Err(Failure::Refused(format!("sinfo lists no node{of}; is the partition right?")));
        }
        let all = number_of(nodes.len(), "node", "nodes");
        let free: Vec<String> = nodes.into_iter().filter(is_free).map(|node| node.name).collect();
        match free.is_empty() {
            true => Err(Failure::Refused(format!("Slurm has no free node: none of {all}{of}"))),
            false => Ok(free),
        }
    }

    /// The question to control: a job that may be on these hosts.
    fn request(&self, candidates: &[String]) -> WhatIfRequest {
        let Workers(workers_min, workers_max) = self.workers;
        let (tenant, job) = (self.tenant.clone().unwrap_or_default(), job_name(SystemTime::now()));
        let (hosts, kinds) = (candidates.to_vec(), self.kind.clone());
        let job = AssumedJob { tenant, job, workers_min, workers_max, hosts, kinds, bid: None };
        WhatIfRequest { job: Some(job), ..WhatIfRequest::default() }
    }
}

/// The name of the job that control is asked about. Control refuses one that the tenant has, and so it is another each time.
fn job_name(now: SystemTime) -> String {
    let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    format!("slurm-nodes-{}-{}", std::process::id(), since.as_nanos())
}

/// The hosts that control would give the job, all of them candidates.
fn chosen(candidates: &[String], job: Option<JobForecast>) -> Result<Vec<String>, Failure> {
    let job = job.ok_or_else(|| Failure::Refused("control says nothing of the job".to_owned()))?;
    if job.hosts.is_empty() {
        let free = number_of(candidates.len(), "node", "nodes");
        return Err(Failure::Refused(format!("of {free} the job would get none: {}", what_if::why(&job))));
    }
    match job.hosts.iter().find(|host| !candidates.contains(host)) {
        Some(other) => {
            Err(Failure::Refused(format!("control chose {}, which was no candidate", clean(other))))
        }
        None => Ok(job.hosts),
    }
}

/// The nodes of partitions that start jobs: of those that `sinfo` was asked for, or else of the default one.
fn up(lines: Vec<Line>, partition: Option<&str>) -> Result<BTreeSet<Node>, Failure> {
    let (of, others): (Vec<Line>, Vec<Line>) =
        lines.into_iter().partition(|line| partition.is_some() || line.partition.ends_with('*'));
    let listed = |lines: &[Line], text: fn(&Line) -> String| {
        let texts: BTreeSet<String> = lines.iter().map(text).collect();
        texts.into_iter().collect::<Vec<_>>().join(", ")
    };
    if of.is_empty() && !others.is_empty() {
        let known = listed(&others, |line| clean(&line.partition));
        return Err(Failure::Refused(format!(
            "Slurm has no default partition; give --partition with one of: {known}"
        )));
    }
    let (up, down): (Vec<Line>, Vec<Line>) = of.into_iter().partition(|line| line.availability == "up");
    if up.is_empty() && !down.is_empty() {
        let known = listed(&down, |line| {
            let name = line.partition.trim_end_matches('*');
            format!("{} is {}", clean(name), clean(&line.availability))
        });
        return Err(Failure::Refused(format!("no job starts in this partition of Slurm: {known}")));
    }
    Ok(up.into_iter().map(|line| line.node).collect())
}

/// Asks Slurm for its nodes.
async fn sinfo(partition: Option<&str>) -> Result<Vec<Line>, Failure> {
    let mut command = Command::new("sinfo");
    // Its JSON differs between versions of Slurm, and comes without the filter of partitions.
    command.args(["--noheader", "--Node", "--format", "%N %T %P %a"]);
    command.args(partition.map(|name| format!("--partition={name}"))).stdin(Stdio::null());
    let output = command.output().await.map_err(|error| {
        Failure::Refused(format!(
            "sinfo cannot be run: {error}; are Slurm's commands installed, and on PATH?"
        ))
    })?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        let text: String = text.trim().chars().map(visible).take(600).collect();
        return Err(Failure::Refused(format!("sinfo failed ({}): {text}", output.status)));
    }
    lines(&String::from_utf8_lossy(&output.stdout))
}

/// Reads what `sinfo` prints. A node of several partitions has several lines.
fn lines(text: &str) -> Result<Vec<Line>, Failure> {
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    let line = |line: &str| match line.split_whitespace().collect::<Vec<_>>().as_slice() {
        [name, state, partition, availability] => Ok(Line {
            node: Node { name: (*name).to_owned(), state: (*state).to_owned() },
            partition: (*partition).to_owned(),
            availability: (*availability).to_owned(),
        }),
        _ => {
            let text = format!("sinfo prints `{}`, not a node, its state and its partition", clean(line));
            Err(Failure::Refused(text))
        }
    };
    lines.map(line).collect()
}

/// Free nodes that a job can have, and the others with why not.
fn usable(free: Vec<String>, hosts: &[FabricHost]) -> (Vec<String>, Vec<Excluded>) {
    let known: BTreeMap<&str, &FabricHost> = hosts.iter().map(|host| (host.name.as_str(), host)).collect();
    let (mut candidates, mut excluded) = (Vec::new(), Vec::new());
    for host in free {
        let reason = match known.get(host.as_str()) {
            None => "not in control's topology",
            Some(host) if host.withdrawn => "drained or under maintenance",
            Some(host) if !host.connected => "no agent is connected",
            Some(_) => {
                candidates.push(host);
                continue;
            }
        };
        excluded.push(Excluded { host, reason });
    }
    (candidates, excluded)
}

/// Hosts that are left out, by why they are.
fn by_reason(excluded: &[Excluded]) -> BTreeMap<&str, Vec<String>> {
    let mut hosts: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for Excluded { host, reason } in excluded {
        hosts.entry(reason).or_default().push(host.clone());
    }
    hosts
}

/// A name that ends in a number, as a hostlist takes it apart: what stands before the number, its digits, and what they say.
fn numbered(name: &str) -> Option<(&str, usize, u64)> {
    let prefix = name.trim_end_matches(|c: char| c.is_ascii_digit());
    let digits = name.strip_prefix(prefix)?;
    let number = digits.parse().ok()?;
    (!prefix.is_empty()).then_some((prefix, digits.len(), number))
}

/// Names as a hostlist of Slurm: those that differ in the numbers at their ends share brackets, as in `h[0-2,5],login`.
fn hostlist(names: &[String]) -> String {
    let mut parts = BTreeSet::new();
    let mut by_prefix: BTreeMap<&str, BTreeSet<(usize, u64)>> = BTreeMap::new();
    for name in names {
        match numbered(name) {
            Some((prefix, digits, number)) => {
                by_prefix.entry(prefix).or_default().insert((digits, number));
            }
            None => {
                parts.insert(name.clone());
            }
        }
    }
    let padded = |number: u64, width: usize| format!("{number:0width$}");
    for (prefix, numbers) in by_prefix {
        // Digits of the first, the first and the last of numbers in a row, each as Slurm would write it behind the first.
        let mut ranges: Vec<(usize, u64, u64)> = Vec::new();
        for (digits, number) in numbers {
            match ranges.last_mut() {
                Some((width, _, last))
                    if last.checked_add(1) == Some(number) && padded(number, *width).len() == digits =>
                {
                    *last = number;
                }
                _ => ranges.push((digits, number, number)),
            }
        }
        let range = |(width, first, last): &(usize, u64, u64)| match first == last {
            true => padded(*first, *width),
            false => format!("{}-{}", padded(*first, *width), padded(*last, *width)),
        };
        parts.insert(match ranges.as_slice() {
            [(width, first, last)] if first == last => format!("{prefix}{}", padded(*first, *width)),
            ranges => format!("{prefix}[{}]", ranges.iter().map(range).collect::<Vec<_>>().join(",")),
        });
    }
    parts.into_iter().collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `sinfo --noheader --Node --format "%N %T %P %a"` of Slurm 22.05 prints, of nodes in one partition or two.
    const SINFO: &str = "\
h0 mixed all* up
h0 mixed gpu up
h1 idle all* up
h1 idle old down
h2 idle* all* up
h3 drained all* up
h4 allocated all* up
h5 idle gpu up
h6 idle old down
h9 unknown* all* up
";

    #[derive(clap::Parser)]
    struct Arguments {
        #[command(flatten)]
        nodes: Nodes,
    }

    fn parsed(arguments: &[&str]) -> Nodes {
        let all = ["nodes", "--workers"].iter().chain(arguments);
        <Arguments as clap::Parser>::try_parse_from(all).unwrap().nodes
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn refusal<T: std::fmt::Debug>(outcome: Result<T, Failure>) -> String {
        match outcome {
            Err(Failure::Refused(text)) => text,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn free_nodes_are_those_without_a_mark() {
        let nodes = || up(lines(SINFO).unwrap(), None).unwrap();
        let free = |arguments: &[&str]| parsed(arguments).free(nodes()).unwrap();
        assert_eq!(free(&["2"]), ["h0", "h1"]);
        assert_eq!(free(&["2", "--idle-only"]), ["h1"]);
    }

    #[test]
    fn without_a_free_node_the_partition_is_named() {
        let nodes = |text: &str| up(lines(text).unwrap(), Some("gpu")).unwrap();
        let of = |text: &str| refusal(parsed(&["2", "--partition", "gpu"]).free(nodes(text)));
        assert_eq!(of("\n"), "sinfo lists no node of partition gpu; is the partition right?");
        assert_eq!(
            of("h3 down* gpu up\nh4 drained gpu up\n"),
            "Slurm has no free node: none of 2 nodes of partition gpu"
        );
    }

    #[test]
    fn partitions_are_not_mixed() {
        let of = |text: &str, partition| up(lines(text).unwrap(), partition);
        let names = |partition| -> Vec<String> {
            of(SINFO, partition).unwrap().into_iter().map(|node| node.name).collect()
        };
        assert_eq!(names(None), ["h0", "h1", "h2", "h3", "h4", "h9"]);
        // Here `sinfo` has left others out itself; nodes of one that is down do not count.
        assert_eq!(names(Some("all,gpu,old")), ["h0", "h1", "h2", "h3", "h4", "h5", "h9"]);
        assert_eq!(
            refusal(of("h0 idle gpu up\nh1 idle gpu up\nh1 idle cpu up\n", None)),
            "Slurm has no default partition; give --partition with one of: cpu, gpu"
        );
        assert_eq!(
            refusal(of("h0 idle all* drain\nh1 idle all* drain\nh2 idle gpu up\n", None)),
            "no job starts in this partition of Slurm: all is drain"
        );
        assert_eq!(of("", None).unwrap(), BTreeSet::new());
    }

    #[test]
    fn no_job_has_the_name_that_is_asked_about() {
        let now = SystemTime::UNIX_EPOCH + std::time::Duration::from_nanos(1_796_000_000_123_456_789);
        let name = job_name(now);
        assert!(name.len() <= 63 && name.ends_with("-1796000000123456789"), "{name}");
        assert_ne!(name, job_name(now + std::time::Duration::from_nanos(1)));
    }

    #[test]
    fn what_is_no_node_and_state_is_refused() {
        for wrong in [
            "h0",
            "h0 idle",
            "h0 idle gpu",
            "h0 idle gpu up 1",
            "NODELIST STATE\nslurm_load_node: Unable to contact\u{1b} controller",
        ] {
            let text = refusal(lines(wrong));
            assert!(text.starts_with("sinfo prints `") && !text.contains('\u{1b}'), "{text}");
        }
    }

    #[test]
    fn hosts_that_control_cannot_use_are_left_out() {
        let host = |name: &str, connected: bool, withdrawn: bool| FabricHost {
            name: name.to_owned(),
            connected,
            withdrawn,
            ..FabricHost::default()
        };
        let hosts = [host("h0", true, false), host("h1", true, true), host("h2", false, false)];
        let (candidates, excluded) = usable(names(&["h0", "h1", "h2", "h9", "h10"]), &hosts);
        assert_eq!(candidates, ["h0"]);
        let reasons: Vec<(&str, String)> =
            by_reason(&excluded).into_iter().map(|(reason, hosts)| (reason, hostlist(&hosts))).collect();
        let expected = [
            ("drained or under maintenance", "h1".to_owned()),
            ("no agent is connected", "h2".to_owned()),
            ("not in control's topology", "h[9-10]".to_owned()),
        ];
        assert_eq!(reasons, expected);
    }

    #[test]
    fn control_is_asked_about_the_candidates_alone() {
        let request = parsed(&["2..4", "--tenant", "a", "--kind", "a100"]).request(&names(&["h0", "h1"]));
        let job = request.job.clone().unwrap();
        assert_eq!((job.tenant.as_str(), job.workers_min, job.workers_max), ("a", 2, 4));
        assert_eq!((job.hosts, job.kinds), (names(&["h0", "h1"]), names(&["a100"])));
        assert_eq!(WhatIfRequest { job: None, ..request }, WhatIfRequest::default());
    }

    #[test]
    fn an_answer_that_helps_nobody_is_refused() {
        let chosen = |job: Option<JobForecast>| chosen(&names(&["h0", "h1"]), job);
        let of =
            |hosts: &[&str]| JobForecast { hosts: names(hosts), assumed: true, ..JobForecast::default() };
        assert_eq!(chosen(Some(of(&["h1", "h0"]))).unwrap(), ["h1", "h0"]);
        assert!(refusal(chosen(Some(of(&["h1", "h2"])))).contains("h2, which was no candidate"));
        let reason_text = "its runners are on 2 hosts that may be used, and it needs 3".to_owned();
        let waits = JobForecast { reason_text, nearest_min: 2, nearest_max: 3, ..of(&[]) };
        let expected = "of 2 nodes the job would get none: its runners are on 2 hosts that may be used, and it \
                        needs 3; the nearest range that would get hosts is 2..3";
        assert_eq!(refusal(chosen(Some(waits))), expected);
        assert!(refusal(chosen(None)).contains("nothing of the job"));
    }

    #[test]
    fn hostlists_are_slurm_s() {
        for (hosts, expected) in [
            (&["h2", "h0", "h1", "h5"][..], "h[0-2,5]"),
            (&["h7"], "h7"),
            (&["n8", "n9", "n10", "n12"], "n[8-10,12]"),
            (&["n09", "n10", "n08"], "n[08-10]"),
            (&["n9", "n09", "n10"], "n[9,09-10]"),
            (&["n099", "n100", "n1000"], "n[099-100,1000]"),
            (&["login", "h1", "login1", "r1-n1", "r1-n2"], "h1,login,login1,r1-n[1-2]"),
            (
                &["h18446744073709551615", "h18446744073709551616"],
                "h18446744073709551615,h18446744073709551616",
            ),
            (&["12", "gpu-a"], "12,gpu-a"),
            (&[], ""),
        ] {
            assert_eq!(hostlist(&names(hosts)), expected, "{hosts:?}");
        }
    }
}
