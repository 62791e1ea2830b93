//! Agreements and events, for people and for programs.

use crate::text::number_of;
use harmonaize_client::{
    Agreement, Budget, Clause, Collective, Constraints, Event, EventBatch, EventKind, OnFailure, Priority,
    Rank, Reason, Target,
};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

fn clause(clause: Clause) -> &'static str {
    match clause {
        Clause::Budget => "budget",
        Clause::Completion => "p99",
        Clause::Iteration => "iteration",
        Clause::Priority => "priority",
        Clause::Weight => "weight",
        Clause::Bandwidth => "min-busbw",
        Clause::Aggregation => "aggregation",
        Clause::OnFailure => "on-failure",
        Clause::Order => "ordered",
    }
}

fn clauses(of: &[Clause]) -> String {
    of.iter().map(|of| clause(*of)).collect::<Vec<_>>().join(", ")
}

fn policy(policy: OnFailure) -> String {
    match policy {
        OnFailure::End => "end".to_owned(),
        OnFailure::Regroup { within } => format!("regroup={}ns", within.as_nanos()),
    }
}

/// As options that would propose it.
fn options(constraints: &Constraints) -> String {
    let mut text = String::new();
    let target = |Target { collective, bytes, p99 }: &Target| {
        let time = format!("{bytes}B={}ns", p99.as_nanos());
        if *collective == Collective::AllReduce { time } else { format!("{collective}={time}") }
    };
    let mut add = |option: &str, value: String| {
        let gap = if text.is_empty() { "" } else { " " };
        let _ = write!(text, "{gap}--{option} {value}");
    };
    constraints.completions.iter().for_each(|wanted| add("p99", target(wanted)));
    constraints.iteration.iter().for_each(|wanted| add("iteration", target(wanted)));
    if constraints.min_busbw > 0 {
        add("min-busbw", format!("{}B/s", constraints.min_busbw));
    }
    if constraints.weight != 1 {
        add("weight", constraints.weight.to_string());
    }
    match constraints.priority {
        Priority::Normal => {}
        Priority::Low => add("priority", "low".to_owned()),
        Priority::High => add("priority", "high".to_owned()),
    }
    constraints.budget.iter().for_each(|wanted| add("budget", wanted.to_string()));
    constraints.on_failure.iter().for_each(|wanted| add("on-failure", policy(*wanted)));
    text += if constraints.aggregation { "" } else { " --no-aggregation" };
    text += if constraints.ordered { " --ordered" } else { "" };
    match text.trim() {
        "" => "--none".to_owned(),
        text => text.to_owned(),
    }
}

fn constraints_json(wanted: &Constraints) -> Value {
    let target = |target: &Target| json!({"collective": target.collective.name(), "bytes": target.bytes, "p99_ns": u64::try_from(target.p99.as_nanos()).unwrap_or(u64::MAX)});
    json!({
        "budget": wanted.budget.as_ref().map(Budget::to_string),
        "p99": wanted.completions.iter().map(target).collect::<Vec<_>>(),
        "iteration": wanted.iteration.as_ref().map(target),
        "priority": match wanted.priority {
            Priority::Low => "low",
            Priority::Normal => "normal",
            Priority::High => "high",
        },
        "weight": wanted.weight,
        "min_busbw": wanted.min_busbw,
        "aggregation": wanted.aggregation,
        "on_failure": wanted.on_failure.map(policy),
        "ordered": wanted.ordered,
    })
}

/// An agreement, as text.
pub(super) fn agreement(communicator: &str, agreement: &Agreement) -> String {
    if agreement.number == 0 {
        return format!("{communicator}: nothing is agreed on\n");
    }
    let since = SystemTime::UNIX_EPOCH + Duration::from_nanos(agreement.since_ns);
    let kept = match agreement.broken.as_slice() {
        [] => "kept".to_owned(),
        broken => format!("NOT KEPT: {}", clauses(broken)),
    };
    format!(
        "{communicator}: agreement {} since {}, {kept}\n  {}\n",
        agreement.number,
        humantime::format_rfc3339_seconds(since),
        options(&agreement.constraints),
    )
}

/// For a table: what is promised, whether it is kept, and how many operations were looked at and late.
pub(crate) fn agreement_cells(agreement: &Agreement) -> [String; 3] {
    let kept = match agreement.broken.as_slice() {
        [] => "yes".to_owned(),
        broken => format!("NO: {}", clauses(broken)),
    };
    let record = &agreement.record;
    [options(&agreement.constraints), kept, format!("{}, {} late", record.operations, record.late)]
}

pub(crate) fn agreement_json(agreement: &Agreement) -> Value {
    json!({
        "number": agreement.number,
        "constraints": constraints_json(&agreement.constraints),
        "since_ns": agreement.since_ns,
        "broken": agreement.broken.iter().map(|broken| clause(*broken)).collect::<Vec<_>>(),
        "record": record_json(agreement),
    })
}

/// Why not, and what instead.
pub(super) fn refusal(reasons: &[Reason], counter: Option<&Constraints>) -> String {
    let mut text = "not agreed on".to_owned();
    for reason in reasons {
        let _ = write!(text, "\n  {}: {}", clause(reason.clause), reason.text);
    }
    if let Some(counter) = counter {
        let _ = write!(text, "\ncould be had: {}", options(counter));
    }
    text
}

pub(super) fn refusal_json(reasons: &[Reason], counter: Option<&Constraints>) -> Value {
    let reason = |reason: &Reason| json!({"clause": clause(reason.clause), "text": reason.text});
    json!({
        "reasons": reasons.iter().map(reason).collect::<Vec<_>>(),
        "counter": counter.map(constraints_json),
    })
}

/// How an agreement was kept.
pub(super) fn receipt(communicator: &str, agreement: &Agreement) -> String {
    let record = agreement.record;
    let kept = match agreement.broken.as_slice() {
        [] => "kept now".to_owned(),
        broken => format!("NOT KEPT now: {}", clauses(broken)),
    };
    format!(
        "{communicator}: {}, {} later than agreed; {:.1} MB/s of bus bandwidth lately; broken {}, {kept}\n",
        number_of(record.operations, "operation", "operations"),
        record.late,
        record.busbw as f64 / 1e6,
        number_of(record.breaches, "time", "times")
    )
}

pub(super) fn receipt_json(agreement: &Agreement) -> Value {
    json!({
        "agreement": agreement.number,
        "record": record_json(agreement),
        "broken": agreement.broken.iter().map(|broken| clause(*broken)).collect::<Vec<_>>(),
    })
}

fn record_json(agreement: &Agreement) -> Value {
    let record = agreement.record;
    json!({
        "operations": record.operations,
        "late": record.late,
        "busbw": record.busbw,
        "breaches": record.breaches,
    })
}

fn numbers(ranks: &[Rank]) -> Vec<u32> {
    ranks.iter().map(|Rank(rank)| *rank).collect()
}

fn time(ns: u64) -> String {
    humantime::format_rfc3339_seconds(SystemTime::UNIX_EPOCH + Duration::from_nanos(ns)).to_string()
}

/// Events, a line each.
pub(super) fn batch(batch: &EventBatch) -> String {
    let mut text = match batch.missed {
        0 => String::new(),
        missed => number_of(missed, "event was missed", "events were missed") + "\n",
    };
    for Event { communicator, kind, since_ns, .. } in &batch.events {
        let what = match kind {
            EventKind::Congestion(how) => format!("congestion: {}", how.as_str()),
            EventKind::Capacity(how) => format!("capacity lost: {}", how.as_str()),
            EventKind::Failure { ranks, regroup_by_ns: 0 } => format!("lost: ranks {:?}", numbers(ranks)),
            EventKind::Failure { ranks, regroup_by_ns } => {
                format!(
                    "lost: ranks {:?}; kept for the others until {}",
                    numbers(ranks),
                    time(*regroup_by_ns)
                )
            }
            EventKind::Maintenance { ranks, .. } if ranks.is_empty() => "maintenance: none".to_owned(),
            EventKind::Maintenance { ranks, at_ns } => {
                format!("maintenance: hosts of ranks {:?} from {}", numbers(ranks), time(*at_ns))
            }
            EventKind::PlanChanged => "plan changed".to_owned(),
            EventKind::Newcomers { waiting } => {
                format!("newcomers: {}", number_of(*waiting, "waits", "wait"))
            }
            EventKind::AgreementBroken { clauses } if clauses.is_empty() => "agreement kept again".to_owned(),
            EventKind::AgreementBroken { clauses: broken } => {
                format!("agreement NOT KEPT: {}", clauses(broken))
            }
            EventKind::AgreementEnded { clauses: lost } if lost == &[Clause::OnFailure] => {
                "agreement ENDED: its members have not regrouped in time".to_owned()
            }
            EventKind::AgreementEnded { clauses: lost } => {
                format!("agreement ENDED with the communicator before this one: {}", clauses(lost))
            }
            EventKind::Stragglers { cause, ranks } if ranks.is_empty() => {
                format!("late ({}): none", cause.as_str())
            }
            EventKind::Stragglers { cause, ranks } => {
                format!("late ({}): ranks {:?}", cause.as_str(), numbers(ranks))
            }
        };
        let _ = writeln!(text, "{} {communicator} {what}", time(*since_ns));
    }
    text
}

pub(super) fn batch_json(batch: &EventBatch) -> Value {
    let event = |event: &Event| {
        let (name, mut told) = match &event.kind {
            EventKind::Congestion(how) => ("congestion", json!({"level": how.as_str()})),
            EventKind::Capacity(how) => ("capacity", json!({"level": how.as_str()})),
            EventKind::Failure { ranks, regroup_by_ns } => {
                ("failure", json!({"ranks": numbers(ranks), "regroup_by_ns": regroup_by_ns}))
            }
            EventKind::Maintenance { ranks, at_ns } => {
                ("maintenance", json!({"ranks": numbers(ranks), "at_ns": at_ns}))
            }
            EventKind::PlanChanged => ("plan_changed", json!({})),
            EventKind::Newcomers { waiting } => ("newcomers", json!({"waiting": waiting})),
            EventKind::AgreementBroken { clauses } => {
                let broken: Vec<_> = clauses.iter().map(|broken| clause(*broken)).collect();
                ("agreement_broken", json!({"broken": broken}))
            }
            EventKind::AgreementEnded { clauses } => {
                let lost: Vec<_> = clauses.iter().map(|lost| clause(*lost)).collect();
                ("agreement_ended", json!({"lost": lost}))
            }
            EventKind::Stragglers { cause, ranks } => {
                ("stragglers", json!({"cause": cause.as_str(), "ranks": numbers(ranks)}))
            }
        };
        if let Some(told) = told.as_object_mut() {
            told.insert("number".to_owned(), json!(event.number));
            told.insert("communicator".to_owned(), json!(event.communicator));
            told.insert("kind".to_owned(), json!(name));
            told.insert("since_ns".to_owned(), json!(event.since_ns));
        }
        told
    };
    json!({
        "missed": batch.missed,
        "events": batch.events.iter().map(event).collect::<Vec<_>>(),
        "cursor": format!("{:x}:{}", batch.cursor.feed, batch.cursor.next),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_client::{CongestionLevel, EventCursor, StragglerCause};

    #[test]
    fn a_counter_offer_can_be_typed() {
        let counter = Constraints::new()
            .p99(1 << 16, Duration::from_micros(1500))
            .p99_of(Collective::Broadcast, 1 << 10, Duration::from_micros(20))
            .min_busbw(18_000_000)
            .priority(Priority::High)
            .on_failure(OnFailure::Regroup { within: Duration::from_millis(1500) })
            .aggregation(false)
            .ordered(true);
        let reasons = [Reason { clause: Clause::Bandwidth, text: "too much".to_owned() }];
        let expected = "not agreed on\n  min-busbw: too much\ncould be had: --p99 65536B=1500000ns \
            --p99 broadcast=1024B=20000ns --min-busbw 18000000B/s --priority high --on-failure regroup=1500000000ns \
            --no-aggregation --ordered";
        assert_eq!(refusal(&reasons, Some(&counter)), expected);
        assert_eq!(refusal_json(&reasons, None)["reasons"][0]["clause"], "min-busbw");
        assert_eq!(options(&Constraints::new()), "--none");
    }

    #[test]
    fn agreements_say_whether_they_are_kept() {
        let mut told = Agreement { number: 2, since_ns: 1_700_000_000_000_000_000, ..Agreement::default() };
        assert_eq!(agreement("job", &told), "job: agreement 2 since 2023-11-14T22:13:20Z, kept\n  --none\n");
        told.broken = vec![Clause::Completion, Clause::Bandwidth];
        assert!(agreement("job", &told).contains("NOT KEPT: p99, min-busbw"));
        told.record.operations = 1;
        let lines = receipt("job", &told);
        assert!(lines.starts_with("job: 1 operation, 0 later than agreed; "), "{lines}");
        assert!(lines.ends_with("broken 0 times, NOT KEPT now: p99, min-busbw\n"), "{lines}");
        assert_eq!(agreement_json(&told)["broken"], json!(["p99", "min-busbw"]));
        assert_eq!(agreement("job", &Agreement::default()), "job: nothing is agreed on\n");
    }

    #[test]
    fn events_are_lines() {
        let event = |number, kind| Event { number, communicator: "job".to_owned(), kind, since_ns: 0 };
        let batch_of = EventBatch {
            missed: 2,
            events: vec![
                event(3, EventKind::Congestion(CongestionLevel::Severe)),
                event(4, EventKind::AgreementBroken { clauses: vec![Clause::Completion] }),
                event(5, EventKind::AgreementBroken { clauses: vec![] }),
                event(6, EventKind::Failure { ranks: vec![Rank(2)], regroup_by_ns: 30_000_000_000 }),
                event(7, EventKind::AgreementEnded { clauses: vec![Clause::OnFailure] }),
                event(8, EventKind::Stragglers { cause: StragglerCause::Network, ranks: vec![Rank(2)] }),
                event(9, EventKind::Stragglers { cause: StragglerCause::Compute, ranks: vec![] }),
            ],
            cursor: EventCursor { feed: 255, next: 10 },
        };
        let lines = "2 events were missed\n\
            1970-01-01T00:00:00Z job congestion: severe\n\
            1970-01-01T00:00:00Z job agreement NOT KEPT: p99\n\
            1970-01-01T00:00:00Z job agreement kept again\n\
            1970-01-01T00:00:00Z job lost: ranks [2]; kept for the others until 1970-01-01T00:00:30Z\n\
            1970-01-01T00:00:00Z job agreement ENDED: its members have not regrouped in time\n\
            1970-01-01T00:00:00Z job late (network): ranks [2]\n\
            1970-01-01T00:00:00Z job late (compute): none\n";
        assert_eq!(batch(&batch_of), lines);
        let told = batch_json(&batch_of);
        assert_eq!((&told["cursor"], &told["events"][0]["level"]), (&json!("ff:10"), &json!("severe")));
        assert_eq!(
            (&told["events"][5]["cause"], &told["events"][5]["ranks"]),
            (&json!("network"), &json!([2]))
        );
    }
}
