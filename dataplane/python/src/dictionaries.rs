//! Constraints, agreements, hints and events as Python has them: dictionaries of plain values, or the same as JSON. Times are in seconds.

use crate::errors::argument;
use harmonaize_client::{
    Agreement, BatchChoice, BatchKnobs, Budget, Checkpoint, Choice, Clause, Collective, CongestionLevel,
    Constraints, Event, EventKind, Hints, Knobs, LearningRate, Negotiated, OnFailure, Priority, Rank, Target,
};
use pyo3::prelude::*;
use pyo3::types::PyString;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::time::Duration;

/// Reads a dictionary, or JSON.
pub(crate) fn read<T: DeserializeOwned>(given: &Bound<'_, PyAny>, what: &str) -> PyResult<T> {
    let py = given.py();
    let text = match given.cast::<PyString>() {
        Ok(text) => text.to_string(),
        Err(_) => py.import("json")?.call_method1("dumps", (given,))?.extract::<String>()?,
    };
    serde_json::from_str(&text).map_err(|error| argument(py, &format!("{what}: {error}")))
}

/// Gives a dictionary.
pub(crate) fn write<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    py.import("json")?.call_method1("loads", (value.to_string(),))
}

fn time(py: Python<'_>, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|error| argument(py, &format!("{seconds} s: {error}")))
}

fn collective(py: Python<'_>, name: &str) -> PyResult<Collective> {
    name.parse().map_err(|()| {
        let names = Collective::ALL.iter().map(|one| one.name()).collect::<Vec<_>>().join(", ");
        argument(py, &format!("there is no collective {name:?}; there are {names}"))
    })
}

/// A budget: "exact", "match bf16", `{"vnmse": 0.01}` or `{"codecs": ["bf16"]}`.
#[derive(Deserialize)]
#[serde(untagged)]
pub(crate) enum BudgetDictionary {
    Name(String),
    Vnmse { vnmse: f64 },
    Codecs { codecs: Vec<String> },
}

impl BudgetDictionary {
    pub(crate) fn budget(self, py: Python<'_>) -> PyResult<Budget> {
        match self {
            Self::Vnmse { vnmse } => Ok(Budget::Vnmse(vnmse)),
            Self::Codecs { codecs } => Ok(Budget::Codecs(codecs)),
            Self::Name(name) => match name.to_ascii_lowercase().replace(['_', '-'], " ").as_str() {
                "exact" => Ok(Budget::Exact),
                "match bf16" => Ok(Budget::MatchBf16),
                _ => {
                    let known = "\"exact\", \"match bf16\", {\"vnmse\": 0.01} and {\"codecs\": [\"bf16\"]}";
                    Err(argument(py, &format!("there is no budget {name:?}; there are {known}")))
                }
            },
        }
    }
}

/// A budget as Python gives it: a name, a number (vNMSE) or a dictionary.
pub(crate) fn budget(given: &Bound<'_, PyAny>) -> PyResult<Budget> {
    let py = given.py();
    if let Ok(vnmse) = given.extract::<f64>() {
        return Ok(Budget::Vnmse(vnmse));
    }
    if let Ok(name) = given.extract::<String>()
        && !name.trim_start().starts_with(['{', '"'])
    {
        return BudgetDictionary::Name(name).budget(py);
    }
    read::<BudgetDictionary>(given, "a budget")?.budget(py)
}

fn of_budget(budget: &Budget) -> Value {
    match budget {
        Budget::Exact => json!("exact"),
        Budget::MatchBf16 => json!("match bf16"),
        Budget::Vnmse(most) => json!({ "vnmse": most }),
        Budget::Codecs(names) => json!({ "codecs": names }),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TargetDictionary {
    #[serde(default = "all_reduce")]
    collective: String,
    bytes: u64,
    seconds: f64,
}

fn all_reduce() -> String {
    Collective::AllReduce.name().to_owned()
}

impl TargetDictionary {
    fn target(self, py: Python<'_>) -> PyResult<Target> {
        let collective = collective(py, &self.collective)?;
        Ok(Target { collective, bytes: self.bytes, p99: time(py, self.seconds)? })
    }
}

fn of_target(target: &Target) -> Value {
    let Target { collective, bytes, p99 } = target;
    json!({ "collective": collective.name(), "bytes": bytes, "seconds": p99.as_secs_f64() })
}

#[derive(Clone, Copy, Default, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
enum PriorityDictionary {
    Low,
    #[default]
    Normal,
    High,
}

impl From<PriorityDictionary> for Priority {
    fn from(form: PriorityDictionary) -> Self {
        match form {
            PriorityDictionary::Low => Self::Low,
            PriorityDictionary::Normal => Self::Normal,
            PriorityDictionary::High => Self::High,
        }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum OnFailureDictionary {
    End,
    Regroup(f64),
}

/// [`Constraints`], where each may be left out.
#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct ConstraintsDictionary {
    budget: Option<BudgetDictionary>,
    p99: Vec<TargetDictionary>,
    iteration: Option<TargetDictionary>,
    priority: PriorityDictionary,
    weight: u32,
    min_busbw: u64,
    aggregation: bool,
    on_failure: Option<OnFailureDictionary>,
    ordered: bool,
}

impl Default for ConstraintsDictionary {
    fn default() -> Self {
        Self {
            budget: None,
            p99: Vec::new(),
            iteration: None,
            priority: PriorityDictionary::Normal,
            weight: 1,
            min_busbw: 0,
            aggregation: true,
            on_failure: None,
            ordered: false,
        }
    }
}

impl ConstraintsDictionary {
    pub(crate) fn constraints(self, py: Python<'_>) -> PyResult<Constraints> {
        let mut wanted = Constraints::new()
            .priority(self.priority.into())
            .weight(self.weight)
            .min_busbw(self.min_busbw)
            .aggregation(self.aggregation)
            .ordered(self.ordered);
        wanted.budget = self.budget.map(|budget| budget.budget(py)).transpose()?;
        for target in self.p99 {
            let Target { collective, bytes, p99 } = target.target(py)?;
            wanted = wanted.p99_of(collective, bytes, p99);
        }
        wanted.iteration = self.iteration.map(|target| target.target(py)).transpose()?;
        wanted.on_failure = match self.on_failure {
            None => None,
            Some(OnFailureDictionary::End) => Some(OnFailure::End),
            Some(OnFailureDictionary::Regroup(within)) => {
                Some(OnFailure::Regroup { within: time(py, within)? })
            }
        };
        Ok(wanted)
    }
}

fn of_constraints(constraints: &Constraints) -> Value {
    let priority = match constraints.priority {
        Priority::Low => "low",
        Priority::Normal => "normal",
        Priority::High => "high",
    };
    let on_failure = constraints.on_failure.map(|policy| match policy {
        OnFailure::End => json!("end"),
        OnFailure::Regroup { within } => json!({ "regroup": within.as_secs_f64() }),
    });
    json!({
        "budget": constraints.budget.as_ref().map(of_budget),
        "p99": constraints.completions.iter().map(of_target).collect::<Vec<_>>(),
        "iteration": constraints.iteration.as_ref().map(of_target),
        "priority": priority,
        "weight": constraints.weight,
        "min_busbw": constraints.min_busbw,
        "aggregation": constraints.aggregation,
        "on_failure": on_failure,
        "ordered": constraints.ordered,
    })
}

fn clause(clause: Clause) -> &'static str {
    match clause {
        Clause::Budget => "budget",
        Clause::Completion => "p99",
        Clause::Iteration => "iteration",
        Clause::Priority => "priority",
        Clause::Weight => "weight",
        Clause::Bandwidth => "min_busbw",
        Clause::Aggregation => "aggregation",
        Clause::OnFailure => "on_failure",
        Clause::Order => "ordered",
    }
}

fn clauses(list: &[Clause]) -> Vec<&'static str> {
    list.iter().map(|one| clause(*one)).collect()
}

fn seconds(ns: u64) -> f64 {
    Duration::from_nanos(ns).as_secs_f64()
}

/// An agreement.
pub(crate) fn of_agreement(agreement: &Agreement) -> Value {
    let record = agreement.record;
    json!({
        "number": agreement.number,
        "constraints": of_constraints(&agreement.constraints),
        "since": seconds(agreement.since_ns),
        "broken": clauses(&agreement.broken),
        "operations": record.operations,
        "late": record.late,
        "busbw": record.busbw,
        "breaches": record.breaches,
    })
}

/// What came of a proposal: `agreed` or not.
pub(crate) fn of_negotiated(outcome: &Negotiated) -> Value {
    match outcome {
        Negotiated::Agreed(agreement) => json!({ "agreed": true, "agreement": of_agreement(agreement) }),
        Negotiated::Refused { reasons, counter } => json!({
            "agreed": false,
            "reasons": reasons.iter().map(|reason| {
                json!({ "clause": clause(reason.clause), "text": reason.text })
            }).collect::<Vec<_>>(),
            "counter": counter.as_ref().map(of_constraints),
        }),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ExpectedDictionary {
    #[serde(default = "all_reduce")]
    collective: String,
    bytes: u64,
    #[serde(default)]
    overlapped: bool,
}

/// [`Hints`].
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct HintsDictionary {
    period: Option<f64>,
    sequence: Vec<ExpectedDictionary>,
    task_priority: u8,
}

impl HintsDictionary {
    pub(crate) fn hints(self, py: Python<'_>) -> PyResult<Hints> {
        let mut hints = Hints::new().task_priority(self.task_priority);
        hints.period = self.period.map(|period| time(py, period)).transpose()?;
        for ExpectedDictionary { collective: name, bytes, overlapped } in self.sequence {
            let collective = collective(py, &name)?;
            hints = if overlapped {
                hints.overlapped(collective, bytes)
            } else {
                hints.expect(collective, bytes)
            };
        }
        Ok(hints)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CheckpointDictionary {
    every: f64,
    cost: f64,
    last: f64,
    #[serde(default)]
    importance: PriorityDictionary,
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum LearningRateDictionary {
    #[default]
    Adascale,
    SquareRoot,
    Linear,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BatchDictionary {
    samples: (u32, u32),
    micro: (u32, u32),
    initial: u32,
    #[serde(default)]
    rule: LearningRateDictionary,
    square: f64,
    trace: f64,
    #[serde(default)]
    pass: f64,
    sample: f64,
    exchange: f64,
}

impl BatchDictionary {
    fn batch(self, py: Python<'_>) -> PyResult<BatchKnobs> {
        Ok(BatchKnobs {
            samples: self.samples,
            micro: self.micro,
            initial: self.initial,
            rule: match self.rule {
                LearningRateDictionary::Adascale => LearningRate::AdaScale,
                LearningRateDictionary::SquareRoot => LearningRate::SquareRoot,
                LearningRateDictionary::Linear => LearningRate::Linear,
            },
            square: self.square,
            trace: self.trace,
            pass: time(py, self.pass)?,
            sample: time(py, self.sample)?,
            exchange: time(py, self.exchange)?,
        })
    }
}

/// [`Knobs`], with [`BatchKnobs`] as one of them.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct KnobsDictionary {
    accumulate: Option<(u32, u32)>,
    checkpoint: Option<CheckpointDictionary>,
    batch: Option<BatchDictionary>,
}

impl KnobsDictionary {
    pub(crate) fn knobs(self, py: Python<'_>) -> PyResult<(Knobs, Option<BatchKnobs>)> {
        let checkpoint = match self.checkpoint {
            None => None,
            Some(CheckpointDictionary { every, cost, last, importance }) => Some(Checkpoint {
                every: time(py, every)?,
                cost: time(py, cost)?,
                last: time(py, last)?,
                importance: importance.into(),
            }),
        };
        let batch = self.batch.map(|batch| batch.batch(py)).transpose()?;
        Ok((Knobs { accumulate: self.accumulate.unwrap_or((1, 1)), checkpoint }, batch))
    }
}

/// A choice.
pub(crate) fn of_choice((choice, batch): (Choice, Option<BatchChoice>)) -> Value {
    let reason = format!("{:?}", choice.reason).to_ascii_lowercase();
    let mut value =
        json!({ "accumulate": choice.accumulate, "checkpoint": choice.checkpoint, "reason": reason });
    if let (Some(all), Some(BatchChoice { micro, learning_rate })) = (value.as_object_mut(), batch) {
        all.insert("batch".to_owned(), json!({ "micro": micro, "learning_rate": learning_rate }));
    }
    value
}

fn ranks(list: &[Rank]) -> Vec<u32> {
    list.iter().map(|rank| rank.0).collect()
}

fn level(level: CongestionLevel) -> String {
    format!("{level:?}").to_ascii_lowercase()
}

/// An event: what all have, and what its kind has.
pub(crate) fn of_event(event: &Event) -> Value {
    let (kind, more) = match &event.kind {
        EventKind::Congestion(found) => ("congestion", json!({ "level": level(*found) })),
        EventKind::Capacity(found) => ("capacity", json!({ "level": level(*found) })),
        EventKind::Failure { ranks: lost, regroup_by_ns } => {
            ("failure", json!({ "ranks": ranks(lost), "regroup_by": seconds(*regroup_by_ns) }))
        }
        EventKind::Maintenance { ranks: leaving, at_ns } => {
            ("maintenance", json!({ "ranks": ranks(leaving), "at": seconds(*at_ns) }))
        }
        EventKind::PlanChanged => ("plan_changed", json!({})),
        EventKind::Newcomers { waiting } => ("newcomers", json!({ "waiting": waiting })),
        EventKind::AgreementBroken { clauses: broken } => {
            ("agreement_broken", json!({ "clauses": clauses(broken) }))
        }
        EventKind::AgreementEnded { clauses: ended } => {
            ("agreement_ended", json!({ "clauses": clauses(ended) }))
        }
        EventKind::Stragglers { cause, ranks: late } => {
            ("stragglers", json!({ "cause": cause.as_str(), "ranks": ranks(late) }))
        }
    };
    let mut value = json!({
        "number": event.number,
        "communicator": event.communicator,
        "since": seconds(event.since_ns),
        "kind": kind,
    });
    if let (Some(all), Value::Object(more)) = (value.as_object_mut(), more) {
        all.extend(more);
    }
    value
}
