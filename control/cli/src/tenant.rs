//! What a tenant's people ask of the provider through the agent's socket for tenants. They are constraints and agreements, hints,
//! events, and how agreements were kept; and runners, which start its jobs' workers.

mod bid;
mod chrome;
mod run;
mod show;

pub(crate) use show::agreement_cells;

use crate::Failure;
use clap::{Args, Subcommand, ValueEnum};
use harmonaize_client::{
    Access, AttachOptions, Budget, Client, Collective, Constraints, Error, EventCursor, Expected, Hints,
    Negotiated, OnFailure, Price, Priority,
};
use harmonaize_planner::{Bytes, Nanos};
use std::io::Write;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Examples of `tenant`.
pub(crate) const HELP: &str = "\
Examples:
  harmonaize tenant constraints job                        what is promised, and what of it is not kept
  harmonaize tenant constraints job --weight 2 --min-busbw 80MB/s
  harmonaize tenant constraints serve --priority high --p99 64KiB=5ms --take
  harmonaize tenant constraints job --iteration 1GiB=2s --json
  harmonaize tenant constraints job --min-busbw 80MB/s --on-failure regroup=1min
  harmonaize tenant constraints job --none                 gives everything back
  harmonaize tenant hints job --period 50ms --bytes 64MiB  what is expected of it
  harmonaize tenant hints job --bytes 48MiB:hidden --bytes 16MiB --bytes alltoall=1MiB --task-priority 2
  harmonaize tenant hints job --none                       nothing any more
  harmonaize tenant events                                 what has happened from now on, for a while
  harmonaize tenant events --follow --json                 an object a line
  harmonaize tenant receipts job                           how the agreement was kept
  harmonaize tenant trace job-*.jsonl --out job.json       operations that processes wrote down, as a Chrome trace
  harmonaize tenant run --job bert --workers 2..8 -- ./train.py    a worker here when the provider gives this host to the job
  harmonaize tenant bid bert 0.65                          what each of the job's workers is worth an hour

The socket is that through which this tenant's processes attach: --socket, or HARMONAIZE_SOCKET. A proposal that is refused
is answered with what could be had; --take takes that. Hints promise nothing; each takes the place of what was said before.
Agreements and hints end with their communicator.";

/// Examples of `tenant constraints`.
const CONSTRAINTS_HELP: &str = "\
Examples:
  harmonaize tenant constraints job                        what is promised, and what of it is not kept
  harmonaize tenant constraints job --min-busbw 80MB/s --on-failure regroup=1min
  harmonaize tenant constraints serve --priority high --p99 64KiB=5ms --take
  harmonaize tenant constraints job --none                 gives everything back";

/// Examples of `tenant hints`.
const HINTS_HELP: &str = "\
Examples:
  harmonaize tenant hints job --period 50ms --bytes 64MiB
  harmonaize tenant hints job --bytes 48MiB:hidden --bytes 16MiB --bytes alltoall=1MiB --task-priority 2
  harmonaize tenant hints job --none                       nothing any more";

/// Examples of `tenant events`.
const EVENTS_HELP: &str = "\
Examples:
  harmonaize tenant events                                 what has happened from now on, for a while
  harmonaize tenant events --follow --json                 an object a line
  harmonaize tenant events --from 5f3a9c1200000001:17      goes on where another call ended";

/// Examples of `tenant receipts`.
const RECEIPTS_HELP: &str = "\
Examples:
  harmonaize tenant receipts job                           how the agreement was kept
  harmonaize tenant receipts job --json";

/// Examples of `tenant trace`.
const TRACE_HELP: &str = "\
Examples:
  harmonaize tenant trace job-*.jsonl --out job.json       of all ranks, for ui.perfetto.dev
  harmonaize tenant trace job-0.jsonl --torch profile.json --out both.json

The first files are those of HARMONAIZE_OPERATIONS. With --torch operations are put under what `export_chrome_trace` of
torch.profiler wrote, of the same host: by its time, as processes of their own.";

/// Most rounds of a negotiation with `--take`.
const ROUNDS: usize = 4;

/// How long members have to regroup, where no time is said.
const REGROUP_WITHIN: Duration = Duration::from_secs(30);

/// What a tenant asks.
#[derive(Args)]
pub(crate) struct Tenant {
    /// The agent's socket for this tenant.
    #[arg(long, global = true, env = "HARMONAIZE_SOCKET", value_name = "PATH")]
    socket: Option<PathBuf>,
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Shows what is promised for a communicator, or proposes something else.
    #[command(after_help = CONSTRAINTS_HELP)]
    Constraints {
        /// Its name.
        communicator: String,
        #[command(flatten)]
        constraints: ProposedConstraints,
        /// Take the counter-offer if there is one.
        #[arg(long, requires = "constraints")]
        take: bool,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Says what is expected of a communicator: for the provider's first plans, until it has measured.
    #[command(after_help = HINTS_HELP)]
    Hints {
        /// Its name.
        communicator: String,
        #[command(flatten)]
        expected: Expectations,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Shows the tenant's events.
    #[command(after_help = EVENTS_HELP)]
    Events {
        /// Go on from here: what `--json` says as `cursor`.
        #[arg(long, value_name = "FEED:NEXT")]
        from: Option<Cursor>,
        /// How long to wait for the first.
        #[arg(long, value_name = "DURATION", default_value = "5s")]
        wait: Nanos,
        /// Go on for ever.
        #[arg(short, long)]
        follow: bool,
        /// As JSON, an object a line.
        #[arg(long)]
        json: bool,
    },
    /// Shows how a communicator's agreement was kept.
    #[command(after_help = RECEIPTS_HELP)]
    Receipts {
        /// Its name.
        communicator: String,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Starts a worker of a job here when the provider says so, and ends it likewise.
    #[command(after_help = run::HELP)]
    Run(run::Run),
    /// Changes what a job bids, where the provider's hosts have prices.
    #[command(after_help = bid::HELP)]
    Bid {
        /// The job's name.
        job: String,
        /// The highest price of each of its fewest workers, an hour.
        price: Price,
        #[command(flatten)]
        terms: bid::BidTerms,
    },
    /// Becomes a worker's command; for `run` alone.
    #[command(hide = true)]
    Become(run::Become),
    /// Makes a Chrome trace of operations that processes wrote down; without the agent.
    #[command(after_help = TRACE_HELP)]
    Trace {
        /// What they wrote.
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
        /// A trace of torch.profiler, into which operations are put.
        #[arg(long, value_name = "FILE")]
        torch: Option<PathBuf>,
        /// Where the trace goes.
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
    },
}

/// What is proposed; what is left out is the provider's choice.
#[derive(Args)]
#[group(id = "constraints")]
struct ProposedConstraints {
    /// Nothing: what was promised is given back.
    #[arg(
        long,
        conflicts_with_all = [
            "p99",
            "iteration",
            "min_busbw",
            "weight",
            "priority",
            "budget",
            "no_aggregation",
            "on_failure",
            "ordered",
        ]
    )]
    none: bool,
    /// Operations of up to SIZE (of an AllReduce where nothing else is named) end within TIME in 99 of 100 cases; up to four times.
    #[arg(long, value_name = "[COLLECTIVE=]SIZE=TIME")]
    p99: Vec<Target>,
    /// An iteration's operations, SIZE together, take at most TIME together; predicted as an AllReduce where nothing else is named.
    #[arg(long, value_name = "[COLLECTIVE=]SIZE=TIME")]
    iteration: Option<Target>,
    /// Least bus bandwidth.
    #[arg(long, value_name = "SIZE/s")]
    min_busbw: Option<Busbw>,
    /// Its share relative to others'.
    #[arg(long, value_name = "N")]
    weight: Option<u32>,
    /// How much it matters.
    #[arg(long)]
    priority: Option<PriorityArg>,
    /// What may be lost of tensors: exact, bf16, vnmse=0.01, or names of codecs separated by commas.
    #[arg(long, value_name = "BUDGET")]
    budget: Option<Budget>,
    /// Nothing is to be summed on the way.
    #[arg(long)]
    no_aggregation: bool,
    /// What becomes of it when it fails: it is over, or it is kept for its members to regroup, 30s where nothing else is said.
    #[arg(long, value_name = "end|regroup[=DURATION]")]
    on_failure: Option<Policy>,
    /// Sums of floats have the same bits in every run.
    #[arg(long)]
    ordered: bool,
}

/// What is expected; what is left out is not known.
#[derive(Args)]
#[group(required = true, multiple = true)]
struct Expectations {
    /// Nothing any more.
    #[arg(long, conflicts_with_all = ["period", "bytes", "task_priority"])]
    none: bool,
    /// Of an iteration, if nobody else slows it.
    #[arg(long, value_name = "DURATION")]
    period: Option<Nanos>,
    /// An operation of an iteration, again for each, in order: an AllReduce where nothing else is named, and `hidden` where the job
    /// computes meanwhile.
    #[arg(long, value_name = "[COLLECTIVE=]SIZE[:hidden]")]
    bytes: Vec<Operation>,
    /// How much it matters beside others of this tenant, 0 to 7.
    #[arg(long, value_name = "N")]
    task_priority: Option<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Operation(Expected);

impl FromStr for Operation {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (what, critical) = match text.strip_suffix(":hidden") {
            Some(what) => (what, false),
            None => (text, true),
        };
        let (collective, bytes) = sized(what)?;
        Ok(Self(Expected { collective, bytes, critical }))
    }
}

/// [COLLECTIVE=]SIZE.
fn sized(text: &str) -> Result<(Collective, u64), String> {
    let (collective, size) = text.split_once('=').unwrap_or((Collective::AllReduce.name(), text));
    let known = || Collective::ALL.iter().map(|one| one.name()).collect::<Vec<_>>().join(", ");
    let collective = collective.parse().map_err(|()| format!("`{collective}` is none of {}", known()))?;
    let size: Bytes = size.parse().map_err(|error| format!("{error}"))?;
    Ok((collective, size.0))
}

impl Expectations {
    fn hints(self) -> Hints {
        Hints {
            period: self.period.map(Into::into),
            sequence: self.bytes.into_iter().map(|Operation(expected)| expected).collect(),
            task_priority: self.task_priority.unwrap_or(0),
        }
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum PriorityArg {
    /// A quarter of the usual share.
    Low,
    /// The usual share.
    Normal,
    /// Four times the usual share.
    High,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Target(harmonaize_client::Target);

impl FromStr for Target {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (what, time) = text.rsplit_once('=').ok_or("no SIZE=TIME, such as 64KiB=5ms")?;
        let (collective, bytes) = sized(what)?;
        let time: Nanos = time.parse().map_err(|error| format!("{error}"))?;
        Ok(Self(harmonaize_client::Target { collective, bytes, p99: time.into() }))
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Busbw(u64);

impl FromStr for Busbw {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let size = text.strip_suffix("/s").ok_or("no bandwidth, such as 80MB/s")?;
        let size: Bytes = size.parse().map_err(|error| format!("{error}"))?;
        Ok(Self(size.0))
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Policy(OnFailure);

impl FromStr for Policy {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let within = match text.split_once('=') {
            _ if text == "end" => return Ok(Self(OnFailure::End)),
            None if text == "regroup" => REGROUP_WITHIN,
            Some(("regroup", time)) => {
                let time: Nanos = time.parse().map_err(|error| format!("{error}"))?;
                time.into()
            }
            _ => return Err("neither `end` nor `regroup`, such as regroup=30s".to_owned()),
        };
        Ok(Self(OnFailure::Regroup { within }))
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Cursor(EventCursor);

impl FromStr for Cursor {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once(':').and_then(|(feed, next)| {
            Some(EventCursor { feed: u64::from_str_radix(feed, 16).ok()?, next: next.parse().ok()? })
        });
        parts.map(Self).ok_or_else(|| "no cursor, such as 5f3a9c1200000001:17".to_owned())
    }
}

impl ProposedConstraints {
    /// What is proposed, if anything is.
    fn constraints(self) -> Option<Constraints> {
        let mut constraints = Constraints::new();
        for Target(target) in self.p99 {
            constraints = constraints.p99_of(target.collective, target.bytes, target.p99);
        }
        constraints.iteration = self.iteration.map(|Target(target)| target);
        constraints.min_busbw = self.min_busbw.map_or(0, |Busbw(least)| least);
        constraints.weight = self.weight.unwrap_or(1);
        constraints.priority = match self.priority {
            Some(PriorityArg::Low) => Priority::Low,
            None | Some(PriorityArg::Normal) => Priority::Normal,
            Some(PriorityArg::High) => Priority::High,
        };
        constraints.budget = self.budget;
        constraints.aggregation = !self.no_aggregation;
        constraints.on_failure = self.on_failure.map(|Policy(policy)| policy);
        constraints.ordered = self.ordered;
        let said = constraints != Constraints::new() || self.weight.is_some() || self.priority.is_some();
        (self.none || said).then_some(constraints)
    }
}

impl Tenant {
    pub(crate) fn run(self, runtime: &tokio::runtime::Runtime) -> Result<String, Failure> {
        let Self { socket, action } = self;
        let client = || attached(socket.clone());
        match action {
            Action::Constraints { communicator, constraints: proposed, take, json } => {
                constraints(&client()?, &communicator, proposed.constraints(), take, json)
            }
            Action::Hints { communicator, expected, json } => {
                client()?.hint(&communicator, &expected.hints()).map_err(refused)?;
                Ok(match json {
                    true => {
                        let noted = serde_json::json!({"communicator": communicator, "outcome": "noted"});
                        format!("{noted:#}\n")
                    }
                    false => format!("{communicator}: noted\n"),
                })
            }
            Action::Events { from, wait, follow, json } => {
                events(&client()?, from, wait.into(), follow, json)
            }
            Action::Receipts { communicator, json } => {
                let agreement = client()?.agreement(&communicator).map_err(refused)?;
                Ok(match json {
                    true => format!("{:#}\n", show::receipt_json(&agreement)),
                    false => show::receipt(&communicator, &agreement),
                })
            }
            Action::Run(asked) => runtime.block_on(asked.run(socket)),
            Action::Bid { job, price, terms } => match terms.bid(Some(price))? {
                Some(bid) => bid::set(&client()?, &job, bid),
                None => Ok(String::new()),
            },
            Action::Become(asked) => asked.run(),
            Action::Trace { files, torch, out } => chrome::write(&files, torch.as_deref(), &out),
        }
    }
}

fn attached(socket: Option<PathBuf>) -> Result<Client, Failure> {
    let none = "which agent? say --socket PATH, or set HARMONAIZE_SOCKET";
    let socket = socket.ok_or_else(|| Failure::Usage(none.to_owned()))?;
    // Nothing is ever sent: the least that an attachment can be.
    let options =
        AttachOptions { access: Access::Mapped, arena_bytes: 4096, entries: 1, ..AttachOptions::default() };
    Client::attach(socket.clone(), options).map_err(|error| match error {
        Error::Connect { source, .. } => {
            Failure::NoSocket { socket: socket.display().to_string(), why: source.to_string() }
        }
        error => Failure::Refused(error.to_string()),
    })
}

fn refused(error: Error) -> Failure {
    match error {
        Error::NoCommunicator(text) => Failure::NotFound(text),
        error => Failure::Refused(error.to_string()),
    }
}

fn constraints(
    client: &Client,
    communicator: &str,
    constraints: Option<Constraints>,
    take: bool,
    json: bool,
) -> Result<String, Failure> {
    let outcome = match &constraints {
        None => Negotiated::Agreed(client.agreement(communicator).map_err(refused)?),
        Some(constraints) => {
            let mut rounds = if take { ROUNDS } else { 0 };
            let amend = |counter: &Constraints, _: &[_]| {
                rounds = rounds.checked_sub(1)?;
                Some(counter.clone())
            };
            client.negotiate(communicator, constraints, amend).map_err(refused)?
        }
    };
    match outcome {
        Negotiated::Agreed(agreement) => Ok(match json {
            true => format!("{:#}\n", show::agreement_json(&agreement)),
            false => show::agreement(communicator, &agreement),
        }),
        Negotiated::Refused { reasons, counter } if json => {
            out(&format!("{:#}\n", show::refusal_json(&reasons, counter.as_ref())));
            Err(Failure::Refused("not agreed on".to_owned()))
        }
        Negotiated::Refused { reasons, counter } => {
            Err(Failure::Refused(show::refusal(&reasons, counter.as_ref())))
        }
    }
}

/// Writes to whoever reads; whether there is somebody. A reader that has seen enough, such as `head`, is no failure.
fn out(text: &str) -> bool {
    let mut out = std::io::stdout();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_ok()
}

fn events(
    client: &Client,
    from: Option<Cursor>,
    wait: Duration,
    follow: bool,
    json: bool,
) -> Result<String, Failure> {
    let mut events = client.events(from.map(|Cursor(from)| from));
    loop {
        let batch = events.read(wait).map_err(|error| Failure::Refused(error.to_string()))?;
        let text = match json {
            true => format!("{}\n", show::batch_json(&batch)),
            false => show::batch(&batch),
        };
        if !follow {
            return Ok(text);
        }
        if !out(&text) {
            return Ok(String::new());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use clap::error::ErrorKind;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        tenant: Tenant,
    }

    fn constraints(line: &str) -> Option<Constraints> {
        let line = Line::try_parse_from(line.split(' ')).unwrap();
        match line.tenant.action {
            Action::Constraints { constraints: proposed, .. } => proposed.constraints(),
            _ => panic!("no constraints"),
        }
    }

    #[test]
    fn only_a_typed_refusal_is_not_found() {
        let text = || "no communicator".to_owned();
        assert!(matches!(refused(Error::NoCommunicator(text())), Failure::NotFound(_)));
        assert!(matches!(refused(Error::Agreement(text())), Failure::Refused(_)));
    }

    #[test]
    fn what_is_typed_is_what_is_proposed() {
        let ms = Duration::from_millis(1);
        assert_eq!(constraints("tenant constraints job"), None);
        assert_eq!(constraints("tenant constraints job --none"), Some(Constraints::new()));
        assert_eq!(constraints("tenant constraints job --weight 1"), Some(Constraints::new()));
        let all = "tenant constraints job --p99 1MiB=20ms --p99 64KiB=5ms --p99 allgather=2MiB=7ms --iteration 1GiB=2s --min-busbw 80MB/s \
            --weight 2 --priority high --budget vnmse=0.01 --no-aggregation --on-failure regroup=1500ms";
        let expected = Constraints::new()
            .p99(64 << 10, ms * 5)
            .p99(1 << 20, ms * 20)
            .p99_of(Collective::AllGather, 2 << 20, ms * 7)
            .iteration(1 << 30, ms * 2000)
            .min_busbw(80_000_000)
            .weight(2)
            .priority(Priority::High)
            .budget(Budget::Vnmse(0.01))
            .aggregation(false)
            .on_failure(OnFailure::Regroup { within: ms * 1500 });
        assert_eq!(constraints(all), Some(expected));
        let policy =
            |text| constraints(&format!("tenant constraints job --on-failure {text}")).unwrap().on_failure;
        assert_eq!(policy("end"), Some(OnFailure::End));
        assert_eq!(policy("regroup"), Some(OnFailure::Regroup { within: REGROUP_WITHIN }));
        let ordered = Constraints::new().ordered(true);
        assert_eq!(constraints("tenant constraints job --ordered"), Some(ordered));
        let codecs = constraints("tenant constraints job --budget int8,bf16").unwrap().budget;
        assert_eq!(codecs, Some(Budget::Codecs(vec!["int8".to_owned(), "bf16".to_owned()])));
    }

    #[test]
    fn counter_offers_need_a_proposal() {
        let wrong = |line: &str| Line::try_parse_from(line.split(' ')).err().map(|error| error.kind());
        let proposals = [
            "--p99 64KiB=5ms",
            "--iteration 1GiB=2s",
            "--min-busbw 80MB/s",
            "--weight 2",
            "--priority high",
            "--budget exact",
            "--no-aggregation",
            "--on-failure end",
            "--ordered",
        ];
        for proposal in proposals {
            let with_none = format!("tenant constraints job --none {proposal}");
            assert_eq!(wrong(&with_none), Some(ErrorKind::ArgumentConflict), "{proposal}");
            assert_eq!(wrong(&format!("tenant constraints job --take {proposal}")), None, "{proposal}");
        }
        assert_eq!(wrong("tenant constraints job --none --take"), None);
        assert_eq!(wrong("tenant constraints job --take"), Some(ErrorKind::MissingRequiredArgument));
    }

    #[test]
    fn what_is_expected_is_what_is_typed() {
        let hints = |line: &str| match Line::try_parse_from(line.split(' ')).map(|line| line.tenant.action) {
            Ok(Action::Hints { expected, .. }) => Some(expected.hints()),
            Ok(_) => panic!("no hints"),
            Err(_) => None,
        };
        let all =
            "tenant hints job --period 50ms --bytes 48MiB:hidden --bytes alltoall=1MiB --task-priority 2";
        let expected = Hints::new()
            .period(Duration::from_millis(50))
            .overlapped(Collective::AllReduce, 48 << 20)
            .expect(Collective::AllToAll, 1 << 20)
            .task_priority(2);
        assert_eq!(hints(all), Some(expected));
        assert_eq!(hints("tenant hints job --none"), Some(Hints::new()));
        for line in
            ["tenant hints job", "tenant hints job --none --period 1s", "tenant hints job --bytes x=1MiB"]
        {
            assert_eq!(hints(line), None, "{line}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_said_so() {
        assert!("5ms".parse::<Target>().unwrap_err().contains("64KiB=5ms"));
        assert!("64KiB=5".parse::<Target>().unwrap_err().contains("not a duration"));
        assert!("end=3s".parse::<Policy>().unwrap_err().contains("regroup=30s"));
        assert!("regroup=3".parse::<Policy>().unwrap_err().contains("not a duration"));
        assert!("80MB".parse::<Busbw>().unwrap_err().contains("80MB/s"));
        assert!("7".parse::<Cursor>().is_err() && "x:1".parse::<Cursor>().is_err());
        assert_eq!("ff:3".parse(), Ok(Cursor(EventCursor { feed: 255, next: 3 })));
    }
}
