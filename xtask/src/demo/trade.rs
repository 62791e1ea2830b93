//! Two elastic jobs and an inference tenant trade hosts: what was recorded of it, and what it was worth.

use super::timeline;
use harmonaize_testkit::placed::Steps;
use harmonaize_testkit::plans::{Decision, Placed, PlacedJob};
use harmonaize_testkit::served::Served;
use harmonaize_testkit::summary::Check;
use serde::Serialize;

/// Hours of the market that a second of the demo counts as.
const HOURS_A_SECOND: f64 = 1.0;

/// A job that takes part. Its tenant is named by the name's first letter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Trader {
    /// The tenant's name and its job's.
    pub tenant: &'static str,
    /// The job's name.
    pub job: &'static str,
    /// The fewest and the most workers.
    pub workers: (u32, u32),
    /// Whether it is elastic; the other one answers requests.
    pub elastic: bool,
}

impl Trader {
    /// Its name as people type it.
    pub fn name(&self) -> String {
        format!("{}/{}", self.tenant, self.job)
    }

    /// Its tenant's letter, as in the rest of the report.
    pub fn letter(&self) -> char {
        self.tenant.chars().next().map_or('?', |letter| letter.to_ascii_uppercase())
    }
}

/// What control said of all jobs at a time, which is CLOCK_REALTIME in nanoseconds.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// When.
    pub at_ns: u64,
    /// The jobs.
    pub jobs: Vec<PlacedJob>,
    /// What an hour of a host cost by control's last round, in millionths of a dollar.
    pub price_millionths: u64,
}

impl Sample {
    /// What it is of what control says, at a time. All hosts are of one kind.
    pub fn new(at_ns: u64, Placed { jobs, kinds }: Placed) -> Self {
        let price_millionths = kinds.first().map_or(0, |kind| kind.price_millionths);
        Self { at_ns, jobs, price_millionths }
    }

    /// What control said of one of them.
    pub fn of(&self, trader: &Trader) -> Option<&PlacedJob> {
        self.jobs.iter().find(|job| job.tenant == trader.tenant && job.job == trader.job)
    }

    /// Hosts of its workers.
    fn hosts(&self, trader: &Trader) -> &[String] {
        self.of(trader).map_or(&[], |job| job.hosts.as_slice())
    }

    /// What a job bids for its first hosts, so many, in millionths of a dollar an hour: a price each.
    fn bids(&self, trader: &Trader, hosts: usize) -> impl Iterator<Item = u64> {
        let bid = self.of(trader).and_then(|job| job.bid);
        let (least, further) = bid.map_or((0, 0), |bid| (bid.least_millionths, bid.further_millionths));
        let fewest = trader.workers.0 as usize;
        (0..hosts).map(move |host| if host < fewest { least } else { further })
    }

    /// The same together, in dollars.
    fn worth(&self, trader: &Trader, hosts: usize) -> f64 {
        dollars(self.bids(trader, hosts).sum())
    }

    /// Whether the jobs have hosts as control's market says, and run there. No bid that has a host is below the price, and none that has
    /// none is above it.
    pub fn is_settled(&self, traders: &[Trader]) -> bool {
        traders.iter().all(|trader| {
            let (Some(job), most) = (self.of(trader), trader.workers.1 as usize) else { return false };
            let (has, price) = (job.hosts.len(), self.price_millionths);
            let won = self.bids(trader, has).all(|bid| bid >= price);
            let lost = self.bids(trader, most).skip(has).all(|bid| bid <= price);
            won && lost && has <= most && (has == 0 || job.phase == "running")
        })
    }
}

/// Millionths of a dollar in dollars.
fn dollars(millionths: u64) -> f64 {
    millionths as f64 / 1e6
}

/// A bid of the inference tenant, and how control's market cleared.
#[derive(Debug, Clone, PartialEq)]
pub struct Cleared {
    /// When it bid, by CLOCK_REALTIME in nanoseconds.
    pub at_ns: u64,
    /// Requests a second of the inference tenant.
    pub load: f64,
    /// What an hour of a host cost at the end of the wait for control, in millionths of a dollar.
    pub price_millionths: u64,
    /// How many hosts each job had then, in the order of the traders.
    pub won: Vec<usize>,
    /// When control had placed the jobs as its market says; none where it did not.
    pub placed_ns: Option<u64>,
}

/// Traffic of others that congests a spine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flow {
    /// Which spine.
    pub spine: String,
    /// How many connections of the jobs crossed it in the flow's direction when it began.
    pub crossing: usize,
    /// What it sent, in bits.
    pub sent: u64,
    /// Its rate in bits a second.
    pub rate: u64,
    /// When it began and ended, by CLOCK_REALTIME in nanoseconds.
    pub span_ns: [u64; 2],
}

impl Flow {
    /// What it carried while it lasted, in bits a second.
    fn carried(&self) -> f64 {
        let [from, to] = self.span_ns;
        self.sent as f64 * 1e9 / (to.saturating_sub(from) as f64).max(1.0)
    }

    /// Whether it took nearly all that it was to take.
    fn is_full(&self) -> bool {
        self.carried() > 0.9 * self.rate as f64
    }
}

/// What was recorded.
#[derive(Debug, Default)]
pub struct Record {
    /// The jobs, in order.
    pub traders: Vec<Trader>,
    /// All hosts that are traded.
    pub hosts: Vec<String>,
    /// In the order of their times.
    pub samples: Vec<Sample>,
    /// Likewise.
    pub cleared: Vec<Cleared>,
    /// None where there was no traffic.
    pub flow: Option<Flow>,
    /// What control decided about plans meanwhile.
    pub decisions: Vec<Decision>,
    /// What came of the steps of each elastic job, in the order of the traders.
    pub steps: Vec<Steps>,
    /// What the inference tenant's ranks printed of their requests.
    pub served: Served,
    /// The prices that each job's runners were told, in dollars an hour, and in the order of the traders. Each once.
    pub prices_by_job: Vec<Vec<f64>>,
}

/// A time in which a job had a host.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Span {
    /// The host.
    pub host: String,
    /// The job.
    pub job: String,
    /// Its tenant's letter.
    pub tenant: char,
    /// Seconds since the trade began.
    pub from: f64,
    /// Likewise.
    pub to: f64,
}

/// A change of a job's hosts.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Change {
    /// Seconds since the trade began.
    pub at: f64,
    /// Which job.
    pub job: String,
    /// Hosts that it got.
    pub got: Vec<String>,
    /// Hosts that it lost.
    pub lost: Vec<String>,
    /// Why, as control says.
    pub why: String,
    /// What an hour of a host cost then, in dollars.
    pub price: f64,
    /// By its bids, what an hour of these hosts is worth to it, in dollars: below 0 where it lost them.
    pub worth: f64,
}

/// What the trade was worth to a job.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Worth {
    /// Which job.
    pub job: String,
    /// Hours that it had hosts.
    pub host_hours: f64,
    /// Steps that it did, or requests that it answered.
    pub done: u64,
    /// What its hosts were worth by its bids, in dollars.
    pub value: f64,
    /// What it paid, in dollars.
    pub paid: f64,
}

/// A price, and since when.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Price {
    /// Seconds since the trade began.
    pub at: f64,
    /// Requests a second of the inference tenant.
    pub load: f64,
    /// Dollars an hour of a host.
    pub price: f64,
}

/// What there is to show.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Trade {
    /// Hosts that were traded.
    pub hosts: Vec<String>,
    /// How long it took, in seconds.
    pub seconds: f64,
    /// Who ran where.
    pub spans: Vec<Span>,
    /// Every change, in the order of their times.
    pub changes: Vec<Change>,
    /// By job.
    pub worth: Vec<Worth>,
    /// In the order of their times.
    pub prices: Vec<Price>,
    /// What all hosts were worth to those who had them, beyond what they had been worth if nobody had traded; in dollars.
    pub gained: f64,
    /// The congested spine, and its seconds from and to.
    pub congested: Option<(String, f64, f64)>,
    /// What control found and decided of that: seconds, and what.
    pub decided: Vec<(f64, String)>,
    /// What happened, in sentences.
    #[serde(skip)]
    pub story: Vec<String>,
    /// Of the inference tenant's requests: what, figure.
    #[serde(skip)]
    pub requests: Vec<(String, String)>,
    /// What had to hold. They are in the summary.
    #[serde(skip)]
    pub checks: Vec<Check>,
}

impl Trade {
    /// Of what was recorded.
    pub fn of(record: &Record) -> Self {
        let began = record.samples.first().map_or(0, |sample| sample.at_ns);
        let ended = record.samples.last().map_or(began, |sample| sample.at_ns);
        let at = |time_ns: u64| (time_ns as f64 - began as f64) / 1e9;
        let changes = changes(record, at);
        let worth: Vec<Worth> = (0..record.traders.len()).filter_map(|place| worth(record, place)).collect();
        let unmoved = unmoved(record);
        let gained = worth.iter().map(|one| one.value).sum::<f64>() - unmoved;
        let congested = record.flow.as_ref().map(|flow| {
            let [from, to] = flow.span_ns.map(at);
            (flow.spine.clone(), from, to)
        });
        let within = |decision: &&Decision| {
            record.flow.as_ref().is_some_and(|Flow { span_ns: [from, _], .. }| decision.at_ns >= *from)
        };
        let decided = record.decisions.iter().filter(within).flat_map(timeline::decision_events);
        let prices = record.cleared.iter().map(|one| {
            // The round that set it came after the bid.
            let priced = record
                .samples
                .iter()
                .find(|sample| sample.at_ns >= one.at_ns && sample.price_millionths == one.price_millionths);
            let since = priced.map_or(one.at_ns, |sample| sample.at_ns);
            Price { at: at(since).max(0.0), load: one.load, price: dollars(one.price_millionths) }
        });
        let mut trade = Self {
            hosts: record.hosts.clone(),
            seconds: at(ended),
            spans: spans(record, at),
            changes,
            worth,
            prices: prices.collect(),
            gained,
            congested,
            decided: decided.map(|(time, what)| (at(time), what)).collect(),
            story: Vec::new(),
            requests: record.served.figures(),
            checks: Vec::new(),
        };
        trade.checks = checks(record, &trade, at);
        trade.story = story(record, &trade);
        trade
    }
}

/// Who ran where: for each job and host the times for which control said so without a break.
fn spans(record: &Record, at: impl Fn(u64) -> f64) -> Vec<Span> {
    let mut spans: Vec<Span> = Vec::new();
    for host in &record.hosts {
        for trader in &record.traders {
            let mut since: Option<u64> = None;
            let last = record.samples.last().map(|sample| (sample.at_ns, false));
            let has = |sample: &Sample| (sample.at_ns, sample.hosts(trader).contains(host));
            for (time, has) in record.samples.iter().map(has).chain(last) {
                if has {
                    since.get_or_insert(time);
                } else if let Some(from) = since.take() {
                    let (host, job) = (host.clone(), trader.name());
                    spans.push(Span { host, job, tenant: trader.letter(), from: at(from), to: at(time) });
                }
            }
        }
    }
    spans
}

fn changes(record: &Record, at: impl Fn(u64) -> f64) -> Vec<Change> {
    let mut changes: Vec<Change> = Vec::new();
    let mut before: Vec<&[String]> = vec![&[]; record.traders.len()];
    for sample in &record.samples {
        for (trader, before) in record.traders.iter().zip(&mut before) {
            let now = sample.hosts(trader);
            let only = |these: &[String], those: &[String]| -> Vec<String> {
                these.iter().filter(|host| !those.contains(host)).cloned().collect()
            };
            let (got, lost) = (only(now, before), only(before, now));
            if !got.is_empty() || !lost.is_empty() {
                let why = match sample.of(trader) {
                    Some(job) => format!("{}: {}", job.reason, job.reason_text),
                    None => "control knows no runner of it".to_owned(),
                };
                let worth = sample.worth(trader, now.len()) - sample.worth(trader, before.len());
                let (at, job, price) = (at(sample.at_ns), trader.name(), dollars(sample.price_millionths));
                changes.push(Change { at, job, got, lost, why, price, worth });
            }
            *before = now;
        }
    }
    changes
}

/// Sums over all times between two samples. Each is given as the first sample, and hours of the market.
fn sum(record: &Record, of: impl Fn(&Sample, f64) -> f64) -> f64 {
    let stretch = |pair: &[Sample]| {
        let [one, next] = pair else { return 0.0 };
        of(one, next.at_ns.saturating_sub(one.at_ns) as f64 / 1e9 * HOURS_A_SECOND)
    };
    record.samples.windows(2).map(stretch).sum()
}

fn worth(record: &Record, place: usize) -> Option<Worth> {
    let trader = record.traders.get(place)?;
    let elastic = record.traders.iter().take(place).filter(|trader| trader.elastic).count();
    let done = match trader.elastic {
        true => record.steps.get(elastic).map_or(0, |steps| steps.done),
        false => record.served.requests() as u64,
    };
    let hosts = |sample: &Sample| sample.hosts(trader).len();
    Some(Worth {
        job: trader.name(),
        host_hours: sum(record, |sample, hours| hosts(sample) as f64 * hours),
        done,
        value: sum(record, |sample, hours| sample.worth(trader, hosts(sample)) * hours),
        paid: sum(record, |sample, hours| hosts(sample) as f64 * dollars(sample.price_millionths) * hours),
    })
}

/// What all hosts had been worth, in dollars, if those who got them first had kept them.
fn unmoved(record: &Record) -> f64 {
    let Some(first) = record.cleared.first() else { return 0.0 };
    let reached = |sample: &Sample| first.placed_ns.is_some_and(|placed| sample.at_ns >= placed);
    sum(record, |sample, hours| {
        let held = |place: usize, trader: &Trader| match reached(sample) {
            true => first.won.get(place).copied().unwrap_or(0),
            false => sample.hosts(trader).len(),
        };
        let places = record.traders.iter().enumerate();
        places.map(|(place, trader)| sample.worth(trader, held(place, trader)) * hours).sum()
    })
}

/// A host's way from an elastic job to the inference tenant, and from there to an elastic job.
fn traded(record: &Record, trade: &Trade) -> Vec<String> {
    let is_elastic = |job: &str| record.traders.iter().any(|one| one.elastic && one.name() == job);
    let mut ways = Vec::new();
    for host in &trade.hosts {
        let mut on: Vec<&Span> = trade.spans.iter().filter(|span| span.host == *host).collect();
        on.sort_by(|one, other| one.from.total_cmp(&other.from));
        for three in on.windows(3) {
            let [before, between, after] = three else { continue };
            if is_elastic(&before.job) && !is_elastic(&between.job) && is_elastic(&after.job) {
                ways.push(format!("{host} from {} to {} to {}", before.job, between.job, after.job));
            }
        }
    }
    ways
}

fn checks(record: &Record, trade: &Trade, at: impl Fn(u64) -> f64) -> Vec<Check> {
    let check = |what: &str, passed: bool, found: String| Check {
        what: what.to_owned(),
        passed,
        found,
        warns: false,
    };
    let ways = traded(record, trade);
    let others: Vec<&Trader> = record.traders.iter().filter(|trader| !trader.elastic).collect();
    let had = |trader: &&Trader| record.samples.iter().any(|sample| !sample.hosts(trader).is_empty());
    let requests = record.served.requests();
    let steps: Vec<String> = record
        .steps
        .iter()
        .map(|Steps { done, lost, twice, ended }| {
            format!("{done} done, {lost} lost, {twice} twice, {ended} when the last worker ended")
        })
        .collect();
    let elastic = record.traders.iter().filter(|trader| trader.elastic).count();
    let right =
        |steps: &Steps| steps.done > 0 && steps.lost == 0 && steps.twice == 0 && steps.ended == steps.done;
    let failures = record.samples.iter().flat_map(|sample| &sample.jobs).map(|job| job.failures).max();
    let late: Vec<String> = record
        .cleared
        .iter()
        .filter(|cleared| cleared.placed_ns.is_none())
        .map(|one| {
            format!("not at {:.2} dollars, where jobs had {:?} hosts", dollars(one.price_millionths), one.won)
        })
        .collect();
    let heard = |(trader, prices): (&Trader, &Vec<f64>)| {
        let prices: Vec<String> = prices.iter().map(|price| format!("{price:.2}")).collect();
        format!("{} {}", trader.name(), if prices.is_empty() { "none".to_owned() } else { prices.join(", ") })
    };
    let heard: Vec<String> = record.traders.iter().zip(&record.prices_by_job).map(heard).collect();
    let all_heard = !heard.is_empty()
        && record.prices_by_job.len() == record.traders.len()
        && record.prices_by_job.iter().all(|prices| !prices.is_empty());
    let moved = trade.changes.iter().filter(|change| others.iter().any(|trader| trader.name() == change.job));
    let moved: Vec<f64> = moved.map(|change| change.at).collect();
    let congested = record.flow.as_ref().is_some_and(|flow| {
        let [from, to] = flow.span_ns.map(&at);
        flow.crossing > 0 && flow.is_full() && moved.iter().any(|time| (from..=to).contains(time))
    });
    let flow = record.flow.as_ref().map_or_else(
        || "there was no cross traffic, as no connection crossed a spine".to_owned(),
        |flow| {
            let ([from, to], Flow { spine, crossing, .. }) = (flow.span_ns.map(&at), flow);
            let (carried, moved) = (flow.carried() / 1e6, seconds(&moved));
            format!(
                "{spine} from {from:.1} to {to:.1} s, which {crossing} connections crossed; others sent {carried:.0} Mbit/s over it; \
                 hosts moved at {moved}"
            )
        },
    );
    vec![
        check(
            "a host went from an elastic job to the inference tenant, and back to an elastic job",
            !ways.is_empty(),
            if ways.is_empty() { "no host did".to_owned() } else { ways.join("; ") },
        ),
        check(
            "the inference tenant got hosts, and answered requests there",
            !others.is_empty() && others.iter().all(had) && requests > 0,
            format!("{requests} requests"),
        ),
        check(
            "each step of both elastic jobs was done once, and their workers ended when asked",
            record.steps.len() == elastic && elastic > 0 && record.steps.iter().all(right),
            steps.join("; "),
        ),
        check(
            "no worker failed",
            failures == Some(0),
            failures.map_or("control named no job".to_owned(), |most| format!("{most} failures at most")),
        ),
        check(
            "control's market gave hosts to the highest bids each time, at one price",
            !record.cleared.is_empty() && late.is_empty(),
            if late.is_empty() { format!("{} times", record.cleared.len()) } else { late.join("; ") },
        ),
        check(
            "the runners of each job were told a price",
            all_heard,
            if heard.is_empty() { "none was".to_owned() } else { heard.join("; ") },
        ),
        check("a spine was congested while hosts moved", congested, flow),
    ]
}

fn seconds(times: &[f64]) -> String {
    let times: Vec<String> = times.iter().map(|time| format!("{time:.1}")).collect();
    if times.is_empty() { "no time".to_owned() } else { format!("{} s", times.join(", ")) }
}

fn story(record: &Record, trade: &Trade) -> Vec<String> {
    let mut story = Vec::new();
    for (number, cleared) in record.cleared.iter().enumerate() {
        let won: Vec<String> = record
            .traders
            .iter()
            .zip(&cleared.won)
            .map(|(trader, won)| format!("{} {won}", trader.name()))
            .collect();
        let again = if number == 0 { "At first" } else { "Then" };
        let idle = record.traders.iter().zip(&cleared.won).any(|(trader, won)| !trader.elastic && *won == 0);
        let idle = if idle { " None of these requests was made, as tenant C won no host." } else { "" };
        story.push(format!(
            "{again} tenant C had {:.0} requests a second. A host cost {:.2} dollars an hour. Hosts won: {}.{idle}",
            cleared.load,
            dollars(cleared.price_millionths),
            won.join(", ")
        ));
    }
    for worth in &trade.worth {
        story.push(format!(
            "The hosts of {} were worth {:.2} dollars by its bids, and it paid {:.2}.",
            worth.job, worth.value, worth.paid
        ));
    }
    story.push(match trade.gained >= 0.0 {
        true => {
            format!("Trading was worth {:.2} dollars more than keeping the first placement.", trade.gained)
        }
        false => {
            format!("Trading was worth {:.2} dollars less than keeping the first placement.", -trade.gained)
        }
    });
    story
}

/// The prices that a job's runners printed as told, in dollars an hour. Each once, the lowest first.
pub fn printed_prices<'a>(logs: impl Iterator<Item = &'a str>) -> Vec<f64> {
    let price = |line: &'a str| -> Option<f64> {
        let (_, rest) = line.split_once(": the price is ")?;
        rest.split_once(' ')?.0.parse().ok()
    };
    let mut prices: Vec<f64> = logs.flat_map(str::lines).filter_map(price).collect();
    prices.sort_by(f64::total_cmp);
    prices.dedup();
    prices
}

#[cfg(test)]
pub(super) mod example {
    use super::*;
    use harmonaize_testkit::lines::Line;
    use harmonaize_testkit::plans::PlacedBid;

    const TRADERS: [Trader; 3] = [
        Trader { tenant: "a", job: "pretrain", workers: (1, 2), elastic: true },
        Trader { tenant: "b", job: "finetune", workers: (1, 2), elastic: true },
        Trader { tenant: "c", job: "answers", workers: (2, 2), elastic: false },
    ];

    /// Tenths of seconds since the trade began, as a time.
    pub(in super::super) fn ns(tenths: u64) -> u64 {
        1_000_000_000_000 + tenths * 100_000_000
    }

    fn job(trader: &Trader, hosts: &[&str], (least_millionths, further_millionths): (u64, u64)) -> PlacedJob {
        let (reason, reason_text) = match hosts {
            [] => ("outbid", "the price is above its bid"),
            _ => ("spare", "policy <market>"),
        };
        PlacedJob {
            tenant: trader.tenant.into(),
            job: trader.job.into(),
            phase: if hosts.is_empty() { "waiting" } else { "running" }.into(),
            hosts: hosts.iter().map(|host| (*host).to_owned()).collect(),
            failures: 0,
            reason: reason.into(),
            reason_text: reason_text.into(),
            bid: Some(PlacedBid { least_millionths, further_millionths }),
        }
    }

    /// While the load is low, and while it is high: what the inference tenant bids, and the price.
    const LOW: (u64, u64) = (180_000, 300_000);
    const HIGH: (u64, u64) = (1_800_000, 900_000);

    fn sample(tenths: u64, (own, price_millionths): (u64, u64), hosts: &[&[&str]]) -> Sample {
        let bids = [(3_000_000, 900_000), (2_500_000, 700_000), (own, own)];
        let jobs = TRADERS.iter().zip(hosts).zip(bids).map(|((trader, hosts), bid)| job(trader, hosts, bid));
        Sample { at_ns: ns(tenths), jobs: jobs.collect(), price_millionths }
    }

    fn cleared(tenths: u64, load: f64, (_, price): (u64, u64), won: [usize; 3], placed: u64) -> Cleared {
        let (won, placed_ns) = (won.to_vec(), Some(ns(placed)));
        Cleared { at_ns: ns(tenths), load, price_millionths: price, won, placed_ns }
    }

    /// Of tenants A and B each gives a host to tenant C, and gets it back.
    pub(in super::super) fn record() -> Record {
        let request = |request| Line::Served { at_us: 1, request, collective_us: 5_000 };
        let (whole, part): ([&[&str]; 3], [&[&str]; 3]) =
            ([&["h0", "h1"], &["h2", "h3"], &[]], [&["h0"], &["h2"], &[]]);
        let [a, b, _] = part;
        Record {
            traders: TRADERS.to_vec(),
            hosts: ["h0", "h1", "h2", "h3"].map(str::to_owned).to_vec(),
            samples: vec![
                sample(0, LOW, &[]),
                sample(10, LOW, &whole),
                sample(50, LOW, &whole),
                sample(60, HIGH, &part),
                sample(70, HIGH, &[a, b, &["h1", "h3"]]),
                sample(170, HIGH, &[a, b, &["h1", "h3"]]),
                sample(180, LOW, &part),
                sample(200, LOW, &whole),
                sample(240, LOW, &whole),
            ],
            cleared: vec![
                cleared(0, 2.0, LOW, [2, 2, 0], 10),
                cleared(55, 20.0, HIGH, [1, 1, 2], 70),
                cleared(175, 2.0, LOW, [2, 2, 0], 200),
            ],
            flow: Some(Flow {
                spine: "spine1".into(),
                crossing: 2,
                sent: 20_000_000,
                rate: 1_000_000,
                span_ns: [ns(30), ns(240)],
            }),
            decisions: Vec::new(),
            steps: [100, 90].map(|done| Steps { done, lost: 0, twice: 0, ended: done }).to_vec(),
            served: Served::of(&[vec![request(0), request(1)]]),
            prices_by_job: vec![vec![0.3, 0.9], vec![0.3], vec![0.9]],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::example::{ns, record};
    use super::*;

    fn passed(change: impl FnOnce(&mut Record)) -> Vec<bool> {
        let mut record = record();
        change(&mut record);
        Trade::of(&record).checks.iter().map(|check| check.passed).collect()
    }

    /// Which checks fail.
    fn failed(change: impl FnOnce(&mut Record)) -> Vec<usize> {
        let passed = passed(change);
        assert_eq!(passed.len(), 7);
        passed.iter().enumerate().filter(|(_, passed)| !**passed).map(|(place, _)| place).collect()
    }

    fn is_near(found: f64, expected: f64) -> bool {
        (found - expected).abs() < 1e-6
    }

    /// Changes the hosts of a tenant's job from a time on.
    fn place(record: &mut Record, tenant: &str, tenths: u64, hosts: &[&str]) {
        let late = record.samples.iter_mut().filter(|sample| sample.at_ns >= ns(tenths));
        for job in late.flat_map(|sample| &mut sample.jobs).filter(|job| job.tenant == tenant) {
            job.hosts = hosts.iter().map(|host| (*host).to_owned()).collect();
        }
    }

    #[test]
    fn a_trade_passes_all_checks() {
        assert_eq!(failed(|_| {}), [0; 0]);
        assert!(Trade::of(&record()).checks.iter().all(|check| !check.warns), "each fails the demo");
    }

    #[test]
    fn no_trade_fails() {
        assert_eq!(failed(|record| place(record, "c", 0, &[])), [0, 1, 6]);
        let kept = |record: &mut Record| {
            place(record, "a", 180, &["h0"]);
            place(record, "b", 180, &["h2"]);
        };
        assert_eq!(failed(kept), [0], "hosts did not go back");
    }

    #[test]
    fn unanswered_requests_fail() {
        assert_eq!(failed(|record| record.served = Served::default()), [1]);
    }

    #[test]
    fn lost_and_repeated_steps_fail() {
        assert_eq!(failed(|record| record.steps[1].lost = 1), [2]);
        assert_eq!(failed(|record| record.steps[0].twice = 1), [2]);
        assert_eq!(failed(|record| record.steps[1].done = 0), [2]);
        assert_eq!(failed(|record| record.steps.truncate(1)), [2]);
        assert_eq!(failed(|record| record.steps[0].ended = 99), [2], "who hung was killed");
    }

    #[test]
    fn failures_and_other_placements_fail() {
        assert_eq!(failed(|record| record.samples[4].jobs[0].failures = 1), [3]);
        assert_eq!(failed(|record| record.cleared[1].placed_ns = None), [4]);
        assert_eq!(failed(|record| record.cleared[2].placed_ns = None), [4]);
    }

    #[test]
    fn prices_are_those_that_runners_printed() {
        let line =
            |price: &str| format!("answers: the price is {price} an hour of a worker, or a little less\n");
        let (one, other) = (line("0.90") + "{\"event\":\"x\"}\n" + &line("0.30"), line("0.90"));
        assert_eq!(printed_prices([one.as_str(), other.as_str()].into_iter()), [0.3, 0.9]);
        assert!(
            printed_prices(["the price is what it is", "a: the price is much now"].into_iter()).is_empty()
        );
    }

    #[test]
    fn untold_prices_fail() {
        assert_eq!(failed(|record| record.prices_by_job[1].clear()), [5]);
        assert_eq!(failed(|record| record.prices_by_job.truncate(2)), [5]);
    }

    #[test]
    fn the_market_is_settled_once_the_highest_bids_have_hosts() {
        let settled = |change: fn(&mut Sample)| {
            let mut sample = record().samples[4].clone();
            change(&mut sample);
            sample.is_settled(&record().traders)
        };
        assert!(
            record().samples.iter().skip(4).step_by(4).all(|sample| sample.is_settled(&record().traders))
        );
        assert!(settled(|_| {}));
        assert!(!settled(|sample| sample.price_millionths = 890_000), "a bid above the price has no host");
        assert!(!settled(|sample| sample.price_millionths = 1_800_001), "one below it has some");
        assert!(!settled(|sample| sample.jobs[2].hosts.clear()), "the highest bid has none yet");
        assert!(!settled(|sample| sample.jobs[0].phase = "recalled".to_owned()));
        assert!(!settled(|sample| sample.jobs.truncate(2)), "control does not know it yet");
    }

    #[test]
    fn calm_spines_fail() {
        assert_eq!(failed(|record| record.flow = None), [6]);
        let flow = |change: fn(&mut Flow)| failed(|record| change(record.flow.as_mut().unwrap()));
        assert_eq!(flow(|flow| flow.span_ns[1] = ns(60)), [6], "it ended before hosts moved");
        assert_eq!(flow(|flow| flow.span_ns[0] = ns(190)), [6], "it began after that");
        assert_eq!(flow(|flow| flow.crossing = 0), [6], "nobody crossed it");
        assert_eq!(flow(|flow| flow.sent /= 8), [6], "it was a trickle");
    }

    #[test]
    fn nothing_recorded_fails_everything() {
        assert_eq!(failed(|record| *record = Record::default()), [0, 1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn hosts_are_worth_what_was_bid_while_they_were_held() {
        let trade = Trade::of(&record());
        let worth: Vec<[f64; 3]> =
            trade.worth.iter().map(|worth| [worth.host_hours, worth.value, worth.paid]).collect();
        let expected = [[32.0, 77.1, 16.8], [32.0, 63.8, 16.8], [22.0, 39.6, 19.8]];
        assert_eq!(worth.len(), expected.len());
        for (worth, expected) in worth.iter().flatten().zip(expected.as_flattened()) {
            assert!(is_near(*worth, *expected), "{worth} {expected}");
        }
        assert_eq!(trade.worth.iter().map(|worth| worth.done).collect::<Vec<_>>(), [100, 90, 2]);
        // With all hosts as at first A had 89.7 and B 73.6.
        assert!(is_near(trade.gained, 180.5 - 163.3), "{}", trade.gained);
        let unmade: Vec<bool> =
            trade.story.iter().take(3).map(|line| line.contains("None of these")).collect();
        assert_eq!(unmade, [true, false, true], "{:?}", trade.story);
        assert!(
            trade.story.iter().any(|line| line.contains("was worth 17.20 dollars more")),
            "{:?}",
            trade.story
        );
    }

    #[test]
    fn changes_have_price_and_reason() {
        let trade = Trade::of(&record());
        let found: Vec<(f64, &str, usize, usize)> = trade
            .changes
            .iter()
            .map(|change| (change.at, change.job.as_str(), change.got.len(), change.lost.len()))
            .collect();
        let (a, b, c) = ("a/pretrain", "b/finetune", "c/answers");
        let expected = [
            (1.0, a, 2, 0),
            (1.0, b, 2, 0),
            (6.0, a, 0, 1),
            (6.0, b, 0, 1),
            (7.0, c, 2, 0),
            (18.0, c, 0, 2),
            (20.0, a, 1, 0),
            (20.0, b, 1, 0),
        ];
        assert_eq!(found, expected);
        let prices: Vec<f64> = trade.changes.iter().map(|change| change.price).collect();
        assert_eq!(prices, [0.3, 0.3, 0.9, 0.9, 0.9, 0.3, 0.3, 0.3]);
        let worth = [3.9, 3.2, -0.9, -0.7, 3.6, -0.36, 0.9, 0.7];
        for (change, worth) in trade.changes.iter().zip(worth) {
            assert!(is_near(change.worth, worth), "{change:?}");
        }
        assert_eq!(trade.changes[2].why, "spare: policy <market>");
        assert_eq!(trade.changes[5].why, "outbid: the price is above its bid");
        assert_eq!(trade.spans.len(), 8);
    }

    #[test]
    fn figures_are_json_and_checks_are_the_summarys() {
        let json = serde_json::to_value(Trade::of(&record())).unwrap();
        assert_eq!(json["worth"][2]["job"], "c/answers");
        assert_eq!(json["spans"][0]["host"], "h0");
        assert!(json.get("checks").is_none() && json.get("story").is_none(), "{json}");
    }
}
