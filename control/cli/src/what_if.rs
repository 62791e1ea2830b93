//! `harmonaize what-if`: what jobs would have if one more came, hosts came or went, or another policy allocated.

use crate::Failure;
use crate::jobs::{Workers, job_name, range};
use crate::output::PageArguments;
use crate::table::{row, table};
use crate::text::{clean, duration, number_of, visible};
use harmonaize_api::v1::{AssumedJob, JobChange, JobForecast, WhatIfReply, WhatIfRequest};
use harmonaize_client::{JobBid, Price};

/// Examples of `what-if`.
pub(crate) const HELP: &str = "\
Examples:
  harmonaize what-if --job bert-team/gpt --workers 2..8    as if this job came, on any host
  harmonaize what-if --job gpt --workers 4 --host h0,h1,h2,h3
  harmonaize what-if --without h3             as if this host were drained
  harmonaize what-if --with h4,h5 --policy least-attained
  harmonaize what-if --without h3 -o json | jq '.jobs[] | {job, change, hosts}'

Nothing changes. It shows what the next round would give to each job, if nothing else happened before it.";

/// Most characters of a reason.
const REASON_CHARS: usize = 600;

/// What `what-if` takes.
#[derive(clap::Args)]
pub(crate) struct WhatIf {
    /// As if this job came now: tenant/name, or a name alone, for a job that no tenant's limits bind.
    #[arg(long, value_name = "JOB", requires = "workers")]
    job: Option<String>,
    /// The fewest and the most workers of the job, on a host each.
    #[arg(long, value_name = "LEAST..MOST", requires = "job")]
    workers: Option<Workers>,
    /// Hosts where runners of the job would wait; all with an agent where none is named.
    #[arg(long, value_delimiter = ',', value_name = "HOST,...", requires = "job")]
    host: Vec<String>,
    /// Kinds of hosts that the job may have, of which it gets one; any where none is named.
    #[arg(long, value_delimiter = ',', value_name = "KIND,...", requires = "job")]
    kind: Vec<String>,
    /// What the job would bid for each worker, an hour; the base price where nothing is said.
    #[arg(long, value_name = "PRICE", requires = "job")]
    bid: Option<Price>,
    /// As if these hosts were drained.
    #[arg(long, value_delimiter = ',', value_name = "HOST,...")]
    without: Vec<String>,
    /// As if these hosts of the topology served: not drained, with an agent, and a runner of each job that may be there.
    #[arg(long, value_delimiter = ',', value_name = "HOST,...")]
    with: Vec<String>,
    /// As if this policy allocated.
    #[arg(long, value_parser = ["fifo", "least-attained", "market"])]
    policy: Option<String>,
    #[command(flatten)]
    pub(crate) print: PageArguments,
}

impl WhatIf {
    /// The question to control.
    ///
    /// # Errors
    /// Where nothing is assumed.
    pub(crate) fn request(&self) -> Result<WhatIfRequest, Failure> {
        let job = self.job.as_deref().zip(self.workers).map(|(job, Workers(least, most))| {
            let (tenant, name) = job.split_once('/').unwrap_or(("", job));
            AssumedJob {
                tenant: tenant.to_owned(),
                job: name.to_owned(),
                workers_min: least,
                workers_max: most,
                hosts: self.host.clone(),
                kinds: self.kind.clone(),
                bid: self.bid.map(|price| JobBid::of(price).into()),
            }
        });
        if job.is_none() && self.without.is_empty() && self.with.is_empty() && self.policy.is_none() {
            let text =
                "what if what? say --job NAME --workers 2..8, --without HOST, --with HOST or --policy POLICY";
            return Err(Failure::Usage(text.to_owned()));
        }
        Ok(WhatIfRequest {
            job,
            without_hosts: self.without.clone(),
            with_hosts: self.with.clone(),
            policy: self.policy.clone().unwrap_or_default(),
        })
    }
}

/// What jobs would have.
pub(crate) fn text(reply: &WhatIfReply) -> String {
    let changes = |job: &&JobForecast| !matches!(job.change(), JobChange::Stays | JobChange::Waits);
    let mut page = format!(
        "policy {}, next round in {}: {} of {} would change\n",
        clean(&reply.policy),
        duration(reply.round_ns),
        reply.jobs.iter().filter(changes).count(),
        number_of(reply.jobs.len(), "job", "jobs")
    );
    if reply.jobs.is_empty() {
        return page;
    }
    let mut rows =
        vec![row(["job", "range", "now", "otherwise", "then", "change", "why", "allreduce", "hosts"])];
    rows.extend(reply.jobs.iter().map(|job| {
        let hosts: Vec<String> = job.hosts.iter().map(|host| clean(host)).collect();
        row([
            &name(job),
            &range(job.workers_min, job.workers_max),
            &job.hosts_now.len().to_string(),
            &job.hosts_otherwise.len().to_string(),
            &job.hosts.len().to_string(),
            &job.change().text(),
            &job.reason().text(),
            &predicted(job),
            &hosts.join(","),
        ])
    }));
    if reply.jobs.iter().any(|job| job.price_millionths > 0) {
        let prices = reply.jobs.iter().map(|job| match job.price_millionths {
            0 => "-".to_owned(),
            price => Price(price).to_string(),
        });
        for (cells, price) in rows.iter_mut().zip(std::iter::once("price".to_owned()).chain(prices)) {
            cells.insert(7, price);
        }
    }
    page += &format!("\n{}", table(&rows));
    let waiting: Vec<&JobForecast> = reply.jobs.iter().filter(|job| job.hosts.is_empty()).collect();
    if !waiting.is_empty() {
        page.push('\n');
    }
    for job in waiting {
        page += &format!("{}: {}\n", name(job), why(job));
    }
    page
}

/// How long an AllReduce of the job would take, where that is predicted.
fn predicted(job: &JobForecast) -> String {
    if job.predicted_ns == 0 { "-".to_owned() } else { duration(job.predicted_ns) }
}

/// Why a job would wait, and for an assumed one what would not.
pub(crate) fn why(job: &JobForecast) -> String {
    let reason: String = job.reason_text.chars().map(visible).take(REASON_CHARS).collect();
    format!("{reason}{}", nearest(job))
}

fn name(job: &JobForecast) -> String {
    let name = job_name(&job.tenant, &job.job);
    if job.assumed { format!("+ {name}") } else { name }
}

/// What an assumed job could have parsed for.
fn nearest(job: &JobForecast) -> String {
    match (job.assumed, job.nearest_min) {
        (false, _) => String::new(),
        (true, 0) => "; no range would get hosts".to_owned(),
        (true, least) => {
            format!("; the nearest range that would get hosts is {}", range(least, job.nearest_max))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_api::v1::AllocationReason;

    fn hosts(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn forecast(tenant: &str, job: &str) -> JobForecast {
        JobForecast {
            tenant: tenant.to_owned(),
            job: job.to_owned(),
            workers_min: 2,
            workers_max: 8,
            ..Default::default()
        }
    }

    fn reply() -> WhatIfReply {
        let shrinks = JobForecast {
            hosts_now: hosts(&["h0", "h1", "h2", "h3"]),
            hosts_otherwise: hosts(&["h0", "h1", "h2", "h3"]),
            hosts: hosts(&["h0", "h1"]),
            change: JobChange::Shrinks.into(),
            reason: AllocationReason::Least.into(),
            reason_text: "policy fifo gives it its fewest, 2; no other is spare".to_owned(),
            predicted_ns: 8_600_000,
            operation_bytes: 1 << 20,
            ..forecast("a", "bert")
        };
        let starts = JobForecast {
            hosts: hosts(&["h2", "h3"]),
            change: JobChange::Starts.into(),
            reason: AllocationReason::Least.into(),
            ..forecast("b", "gpt\u{1b}[2J")
        };
        let waits = JobForecast {
            workers_min: 6,
            assumed: true,
            change: JobChange::Waits.into(),
            reason: AllocationReason::NoRoom.into(),
            reason_text: "policy fifo gives hosts that it could use to other jobs".to_owned(),
            nearest_min: 3,
            nearest_max: 8,
            ..forecast("", "new")
        };
        let jobs = vec![shrinks, starts, waits];
        WhatIfReply { policy: "fifo".to_owned(), round_ns: 12_000_000_000, jobs }
    }

    #[test]
    fn answers_as_text() {
        assert_eq!(
            text(&reply()),
            "policy fifo, next round in 12.0s: 2 of 3 jobs would change

  job        range  now  otherwise  then  change   why      allreduce  hosts
  a/bert      2..8    4          4     2  shrinks  least    8.6ms      h0,h1
  b/gpt?[2J   2..8    0          0     2  starts   least    -          h2,h3
  + new       6..8    0          0     0  waits    no_room  -

+ new: policy fifo gives hosts that it could use to other jobs; the nearest range that would get hosts is 3..8
"
        );
        let mut priced = reply();
        priced.jobs[0].price_millionths = 650_000;
        let page = text(&priced);
        assert!(page.contains("  why      price  allreduce  hosts"), "{page}");
        assert!(page.contains("  least    0.65   8.6ms"), "{page}");
        let mut nothing = reply();
        nothing.jobs.retain(|job| job.assumed);
        nothing.jobs[0].nearest_min = 0;
        assert!(text(&nothing).ends_with("; no range would get hosts\n"), "{}", text(&nothing));
        nothing.jobs.clear();
        assert_eq!(text(&nothing), "policy fifo, next round in 12.0s: 0 of 0 jobs would change\n");
        let value = serde_json::to_value(reply()).unwrap();
        let job = &value["jobs"][2];
        assert_eq!((&job["change"], &job["reason"]), (&"waits".into(), &"no_room".into()));
    }

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        what_if: WhatIf,
    }

    fn parsed(arguments: &[&str]) -> Result<WhatIf, clap::error::ErrorKind> {
        let all = ["what-if"].iter().chain(arguments);
        let parsed = <Line as clap::Parser>::try_parse_from(all);
        parsed.map(|parsed| parsed.what_if).map_err(|error| error.kind())
    }

    #[test]
    fn what_is_assumed_can_be_combined() {
        let line = "--job b/gpt --workers 2..8 --bid 0.65 --host h0,h1 --kind a100,h100 --without h3 --with h4,h5 --policy fifo";
        let request = parsed(&line.split(' ').collect::<Vec<_>>()).unwrap().request().unwrap();
        let job = AssumedJob {
            hosts: hosts(&["h0", "h1"]),
            kinds: hosts(&["a100", "h100"]),
            bid: Some(JobBid::of(Price(650_000)).into()),
            ..AssumedJob::default()
        };
        let job = AssumedJob { tenant: "b".to_owned(), job: "gpt".to_owned(), workers_min: 2, ..job };
        let expected = WhatIfRequest {
            job: Some(AssumedJob { workers_max: 8, ..job }),
            without_hosts: hosts(&["h3"]),
            with_hosts: hosts(&["h4", "h5"]),
            policy: "fifo".to_owned(),
        };
        assert_eq!(request, expected);
        let request = parsed(&["--job", "gpt", "--workers", "4"]).unwrap().request().unwrap();
        let job = request.job.unwrap();
        assert_eq!((job.tenant.as_str(), job.job.as_str(), job.workers_min), ("", "gpt", 4));
    }

    #[test]
    fn nothing_or_half_of_a_job_is_wrong_usage() {
        assert!(
            matches!(parsed(&[]).unwrap().request(), Err(Failure::Usage(text)) if text.contains("--job"))
        );
        for wrong in [
            ["--job", "gpt"],
            ["--workers", "2..8"],
            ["--host", "h0"],
            ["--kind", "a100"],
            ["--bid", "0.65"],
            ["--policy", "sia"],
        ] {
            assert!(parsed(&wrong).is_err(), "{wrong:?}");
        }
    }
}
