//! `harmonaize jobs`, `queue` and `why`: what jobs have, who waits, and why.

use crate::Failure;
use crate::table::{row, table};
use crate::text::{clean, duration, number_of};
use harmonaize_api::v1::{JobPhase, JobStatus, JobsReply, KindOfHosts};
use harmonaize_client::Price;
use std::str::FromStr;

/// Examples of `jobs`.
pub(crate) const JOBS_HELP: &str = "\
Examples:
  harmonaize jobs                             what each job has, where, and why
  harmonaize jobs -o json | jq '.jobs[] | {job, phase, hosts}'
  harmonaize jobs --watch=5s";

/// The policy under which hosts have prices.
const MARKET: &str = "market";

/// Examples of `queue`.
pub(crate) const QUEUE_HELP: &str = "\
Examples:
  harmonaize queue                            jobs that wait for hosts, the next one first
  harmonaize queue -o json | jq '.jobs[0]'";

/// Examples of `why`.
pub(crate) const WHY_HELP: &str = "\
Examples:
  harmonaize why bert-team/bert               why this job has the workers that it has
  harmonaize why bert -o jsonpath='{.reason}'";

/// The fewest and the most workers of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Workers(pub(crate) u32, pub(crate) u32);

impl FromStr for Workers {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (least, most) = text.split_once("..").unwrap_or((text, text));
        let number = |text: &str| text.trim().parse::<u32>();
        match (number(least), number(most)) {
            (Ok(least), Ok(most)) => Ok(Self(least, most)),
            _ => Err("no number of workers, such as 4, or a range, such as 2..8".to_owned()),
        }
    }
}

/// A job's name behind its tenant's, where it has one.
pub(crate) fn job_name(tenant: &str, job: &str) -> String {
    if tenant.is_empty() { clean(job) } else { format!("{}/{}", clean(tenant), clean(job)) }
}

/// A range of workers, or their number.
pub(crate) fn range(least: u32, most: u32) -> String {
    if least == most { least.to_string() } else { format!("{least}..{most}") }
}

fn name(job: &JobStatus) -> String {
    job_name(&job.tenant, &job.job)
}

/// What allocates, and over how many hosts.
fn head(reply: &JobsReply) -> String {
    let hosts = number_of(reply.hosts, "host", "hosts");
    let kinds: Vec<String> = reply.kinds.iter().map(kind_of_hosts).collect();
    let kinds = if kinds.is_empty() { String::new() } else { format!(" ({})", kinds.join(", ")) };
    match reply.policy.as_str() {
        "" => "control allocates no hosts: its configuration has no [allocator]\n".to_owned(),
        policy => format!(
            "{} on {hosts} with runners{kinds}, policy {}\n",
            number_of(reply.jobs.len(), "job", "jobs"),
            clean(policy)
        ),
    }
}

/// Hosts of a kind, and what they cost where they have a price.
fn kind_of_hosts(one: &KindOfHosts) -> String {
    let hosts = format!("{} {}", one.hosts, kind(&one.kind));
    match (Price(one.price_millionths), Price(one.base_price_millionths)) {
        (Price(0), _) => hosts,
        (price, base_price) => format!("{hosts} at {price}, at least {base_price}"),
    }
}

/// What a job bids, for its fewest workers and for further ones, and the price of what it has or bid for; nothing where none has one.
fn bid_and_price(job: &JobStatus) -> (String, String) {
    let bid = job.bid.map(|bid| (Price(bid.least_millionths), Price(bid.further_millionths)));
    let bid = match bid {
        None => "-".to_owned(),
        Some((least, further)) if least == further => least.to_string(),
        Some((least, further)) => format!("{least}, {further}"),
    };
    let price = Some(Price(job.price_millionths)).filter(|price| *price > Price(0));
    (bid, price.map_or_else(|| "-".to_owned(), |price| price.to_string()))
}

/// Whether hosts have prices.
fn has_prices(reply: &JobsReply) -> bool {
    reply.policy == MARKET
}

/// A kind of hosts.
fn kind(name: &str) -> String {
    if name.is_empty() { "-".to_owned() } else { clean(name) }
}

/// All jobs.
pub(crate) fn jobs(reply: &JobsReply) -> String {
    let mut rows = vec![row([
        "job",
        "phase",
        "workers",
        "range",
        "elastic",
        "generation",
        "age",
        "host time",
        "why",
        "kind",
        "hosts",
    ])];
    let priced = has_prices(reply);
    for head in rows.iter_mut().filter(|_| priced) {
        head.splice(8..8, ["bid".to_owned(), "price".to_owned()]);
    }
    rows.extend(reply.jobs.iter().map(|job| {
        let hosts: Vec<String> = job.hosts.iter().map(|host| clean(host)).collect();
        let mut cells = row([
            &name(job),
            &job.phase().text(),
            &job.hosts.len().to_string(),
            &range(job.workers_min, job.workers_max),
            if job.elastic { "yes" } else { "no" },
            &job.generation.to_string(),
            &duration(job.age_ns),
            &duration(job.attained_ns),
            &job.reason().text(),
            &kind(&job.kind),
            &hosts.join(","),
        ]);
        if priced {
            let (bid, price) = bid_and_price(job);
            cells.splice(8..8, [bid, price]);
        }
        cells
    }));
    page(reply, &rows)
}

/// A reply of those that wait alone, in its order: that of the policy, the next one first.
pub(crate) fn waiting(mut reply: JobsReply) -> JobsReply {
    reply.jobs.retain(|job| job.phase() == JobPhase::Waiting);
    reply
}

/// Those that wait.
pub(crate) fn queue(reply: &JobsReply) -> String {
    let mut rows = vec![row(["place", "job", "range", "runners", "age", "host time", "why"])];
    let priced = has_prices(reply);
    for head in rows.iter_mut().filter(|_| priced) {
        head.splice(6..6, ["bid".to_owned(), "price".to_owned()]);
    }
    rows.extend((1..).zip(&reply.jobs).map(|(place, job): (u32, _)| {
        let mut cells = row([
            &place.to_string(),
            &name(job),
            &range(job.workers_min, job.workers_max),
            &job.runners.to_string(),
            &duration(job.age_ns),
            &duration(job.attained_ns),
            &job.reason().text(),
        ]);
        if priced {
            let (bid, price) = bid_and_price(job);
            cells.splice(6..6, [bid, price]);
        }
        cells
    }));
    page(reply, &rows)
}

fn page(reply: &JobsReply, rows: &[Vec<String>]) -> String {
    let head = head(reply);
    if reply.jobs.is_empty() { head } else { format!("{head}\n{}", table(rows)) }
}

/// The one job of this name, with its tenant's before a slash or without.
pub(crate) fn find(reply: JobsReply, job_name: &str) -> Result<JobStatus, Failure> {
    let named = |job: &JobStatus| match job_name.split_once('/') {
        Some((tenant, name)) => job.tenant == tenant && job.job == name,
        None => job.job == job_name,
    };
    let mut found: Vec<JobStatus> = reply.jobs.into_iter().filter(named).collect();
    let Some(first) = found.pop() else {
        return Err(Failure::NotFound(format!("no job is named {}; see `harmonaize jobs`", clean(job_name))));
    };
    if found.is_empty() {
        return Ok(first);
    }
    let names: Vec<String> = found.iter().chain([&first]).map(name).collect();
    Err(Failure::Refused(format!("several jobs are named so; say which: {}", names.join(", "))))
}

/// Why a job has what it has.
pub(crate) fn why(job: &JobStatus) -> String {
    let workers = number_of(job.hosts.len(), "worker", "workers");
    let mut text = format!(
        "{}: {}, {workers} of {}, generation {}{}\n",
        name(job),
        job.phase().text(),
        range(job.workers_min, job.workers_max),
        job.generation,
        if job.elastic { ", elastic" } else { "" }
    );
    text += &format!("  {}: {}\n", job.reason().text(), clean(&job.reason_text));
    if job.bid.is_some() || job.price_millionths > 0 {
        let (bid, price) = bid_and_price(job);
        text += &format!("  bid {bid}, price {price}\n");
    }
    if job.failures > 0 {
        text += &format!(
            "  {} ended because a worker failed\n",
            number_of(job.failures, "generation", "generations")
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_api::v1::{AllocationReason, JobBid};

    fn job(tenant: &str, job: &str, phase: JobPhase, attained_ns: u64) -> JobStatus {
        JobStatus {
            tenant: tenant.to_owned(),
            job: job.to_owned(),
            workers_min: 2,
            workers_max: 8,
            phase: phase.into(),
            generation: 3,
            hosts: if phase == JobPhase::Running {
                vec!["h0".to_owned(), "h1".to_owned()]
            } else {
                Vec::new()
            },
            runners: 4,
            age_ns: 90_000_000_000,
            attained_ns,
            failures: 1,
            reason: AllocationReason::NoRoom.into(),
            reason_text: "policy least-attained gives the hosts to 1 other jobs".to_owned(),
            elastic: tenant == "a",
            kind: if phase == JobPhase::Running { "a100".to_owned() } else { String::new() },
            bid: None,
            price_millionths: 0,
        }
    }

    fn reply() -> JobsReply {
        let jobs = vec![
            job("b", "gpt", JobPhase::Waiting, 9_000_000_000),
            job("a", "bert", JobPhase::Running, 5),
            job("b", "bert", JobPhase::Waiting, 1_000_000_000),
        ];
        JobsReply { policy: "least-attained".to_owned(), hosts: 4, jobs, kinds: Vec::new() }
    }

    #[test]
    fn workers_are_a_number_or_a_range() {
        assert_eq!(
            ["4", "2..8", " 2 .. 8 "].map(str::parse),
            [Ok(Workers(4, 4)), Ok(Workers(2, 8)), Ok(Workers(2, 8))]
        );
        for wrong in ["", "..", "2..", "two", "-1..2", "2..4294967296"] {
            assert!(wrong.parse::<Workers>().unwrap_err().contains("2..8"), "{wrong}");
        }
    }

    #[test]
    fn the_queue_has_the_order_of_the_reply() {
        let waiting = waiting(reply());
        let names: Vec<String> = waiting.jobs.iter().map(name).collect();
        assert_eq!(names, ["b/gpt", "b/bert"]);
        let text = queue(&waiting);
        assert!(text.contains("2 jobs on 4 hosts with runners, policy least-attained"), "{text}");
        assert!(text.contains("no_room"), "{text}");
    }

    #[test]
    fn one_name_of_two_tenants_is_refused() {
        assert!(matches!(find(reply(), "bert"), Err(Failure::Refused(text)) if text.contains("a/bert")));
        assert!(matches!(find(reply(), "other"), Err(Failure::NotFound(_))));
        let text = why(&find(reply(), "b/bert").unwrap());
        assert!(text.starts_with("b/bert: waiting, 0 workers of 2..8, generation 3\n"), "{text}");
        assert!(text.contains("no_room: policy least-attained gives"), "{text}");
        assert!(jobs(&reply()).contains("h0,h1"));
    }

    #[test]
    fn kinds_of_hosts_stand_above_and_beside_jobs() {
        let kinds = [("", 1), ("a100", 3)].map(|(kind, hosts)| KindOfHosts {
            kind: kind.to_owned(),
            hosts,
            ..KindOfHosts::default()
        });
        let reply = JobsReply { kinds: kinds.to_vec(), ..reply() };
        let head = "3 jobs on 4 hosts with runners (1 -, 3 a100), policy least-attained\n";
        let text = jobs(&reply);
        assert!(text.starts_with(head), "{text}");
        let line = text.lines().find(|line| line.trim_start().starts_with("a/bert")).unwrap();
        assert!(line.ends_with("  a100  h0,h1"), "{text}");
        assert!(queue(&waiting(reply)).contains("(1 -, 3 a100)"));
    }

    #[test]
    fn prices_and_bids_stand_beside_jobs_that_bid() {
        let (price_millionths, base_price_millionths) = (650_000, 500_000);
        let kind = "a100".to_owned();
        let kinds = vec![KindOfHosts { kind, hosts: 4, price_millionths, base_price_millionths }];
        let mut reply = JobsReply { policy: "market".to_owned(), kinds, ..reply() };
        for job in &mut reply.jobs {
            job.price_millionths = price_millionths;
        }
        let bid = JobBid { least_millionths: 600_000, further_millionths: 300_000, checkpoint_ns: 0 };
        reply.jobs[0].bid = Some(bid);
        let text = jobs(&reply);
        assert!(
            text.starts_with(
                "3 jobs on 4 hosts with runners (4 a100 at 0.65, at least 0.50), policy market\n"
            )
        );
        let line = |text: &str, job: &str| {
            let line = text.lines().find(|line| line.contains(job)).unwrap();
            line.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        assert!(line(&text, "age").contains("host time bid price why"), "{text}");
        assert!(line(&text, "b/gpt").contains("9.0s 0.60, 0.30 0.65 no_room"), "{text}");
        assert!(line(&text, "a/bert").contains("- 0.65 no_room a100"), "{text}");
        let waiting = waiting(reply);
        assert!(line(&queue(&waiting), "b/gpt").contains("0.60, 0.30 0.65 no_room"));
        assert!(why(&waiting.jobs[0]).contains("  bid 0.60, 0.30, price 0.65\n"));
    }

    #[test]
    fn an_elastic_job_is_shown_as_one() {
        let text = jobs(&reply());
        let cells = |job: &str| -> Vec<&str> {
            let line = text.lines().find(|line| line.trim_start().starts_with(job)).unwrap();
            line.split_whitespace().take(5).collect()
        };
        assert_eq!(cells("job"), ["job", "phase", "workers", "range", "elastic"]);
        assert_eq!(cells("a/bert"), ["a/bert", "running", "2", "2..8", "yes"]);
        assert_eq!(cells("b/bert"), ["b/bert", "waiting", "0", "2..8", "no"]);
        let text = why(&find(reply(), "a/bert").unwrap());
        assert!(text.starts_with("a/bert: running, 2 workers of 2..8, generation 3, elastic\n"), "{text}");
        let json = serde_json::to_value(find(reply(), "a/bert").unwrap()).unwrap();
        assert_eq!(json["elastic"], true);
    }
}
