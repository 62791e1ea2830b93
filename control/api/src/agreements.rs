//! Constraints, agreements, knobs and hints between the words of tenants and those of this interface, for agents and control alike.

use crate::v1::{self, budget::Kind};
use harmonaize_abi::Collective;
use harmonaize_abi::session::{
    Agreement, BatchChoice, BatchKnobs, Budget, Checkpoint, Choice, ChoiceReason, Clause, Constraints,
    Expected, Hints, Knobs, LearningRate, Negotiated, OnFailure, Priority, Reason, Record, Refusal, Target,
};
use std::time::Duration;

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl From<&Budget> for v1::Budget {
    fn from(budget: &Budget) -> Self {
        let lets = match budget {
            Budget::Exact => None,
            Budget::Vnmse(most) => Some(Kind::Vnmse(*most)),
            Budget::Codecs(names) => Some(Kind::Codecs(v1::CodecNames { names: names.clone() })),
            Budget::MatchBf16 => Some(Kind::MatchBf16(true)),
        };
        Self { kind: lets }
    }
}

impl From<&v1::Budget> for Budget {
    fn from(message: &v1::Budget) -> Self {
        match &message.kind {
            None | Some(Kind::MatchBf16(false)) => Self::Exact,
            Some(Kind::Vnmse(most)) => Self::Vnmse(*most),
            Some(Kind::Codecs(codecs)) => Self::Codecs(codecs.names.clone()),
            Some(Kind::MatchBf16(true)) => Self::MatchBf16,
        }
    }
}

impl From<&Target> for v1::Target {
    fn from(target: &Target) -> Self {
        let collective = target.collective.code().into();
        Self { collective, bytes: target.bytes, p99_ns: nanos(target.p99) }
    }
}

/// A collective by its code in descriptors; none that is not known here.
pub fn collective(code: u32) -> Option<Collective> {
    u8::try_from(code).ok().and_then(Collective::from_code)
}

impl From<&v1::Target> for Target {
    /// Of a collective that is not known here it makes an AllReduce: who keeps to it asks [`v1::Constraints::unknown`] first.
    fn from(target: &v1::Target) -> Self {
        let collective = collective(target.collective).unwrap_or(Collective::AllReduce);
        Self { collective, bytes: target.bytes, p99: Duration::from_nanos(target.p99_ns) }
    }
}

impl From<Priority> for v1::Priority {
    fn from(priority: Priority) -> Self {
        match priority {
            Priority::Low => Self::Low,
            Priority::Normal => Self::Normal,
            Priority::High => Self::High,
        }
    }
}

impl From<v1::Priority> for Priority {
    fn from(message: v1::Priority) -> Self {
        match message {
            v1::Priority::Unspecified | v1::Priority::Normal => Self::Normal,
            v1::Priority::Low => Self::Low,
            v1::Priority::High => Self::High,
        }
    }
}

impl From<&Constraints> for v1::Constraints {
    fn from(constraints: &Constraints) -> Self {
        Self {
            budget: constraints.budget.as_ref().map(Into::into),
            completions: constraints.completions.iter().map(Into::into).collect(),
            iteration: constraints.iteration.as_ref().map(Into::into),
            priority: v1::Priority::from(constraints.priority).into(),
            weight: constraints.weight,
            min_busbw: constraints.min_busbw,
            no_aggregation: !constraints.aggregation,
            continue_on_loss: false,
            on_failure: constraints.on_failure.map(|policy| v1::OnFailure {
                regroup_within_ns: match policy {
                    OnFailure::End => 0,
                    // None at all is out of range, and to be told so.
                    OnFailure::Regroup { within } => nanos(within).max(1),
                },
            }),
            ordered: constraints.ordered,
        }
    }
}

impl v1::Constraints {
    /// The first target's collective that is not known here, by its code.
    pub fn unknown(&self) -> Option<u32> {
        let mut codes = self.completions.iter().chain(&self.iteration).map(|target| target.collective);
        codes.find(|code| collective(*code).is_none())
    }
}

impl From<&v1::Constraints> for Constraints {
    fn from(message: &v1::Constraints) -> Self {
        Self {
            budget: message.budget.as_ref().map(Into::into),
            completions: message.completions.iter().map(Into::into).collect(),
            iteration: message.iteration.as_ref().map(Into::into),
            priority: message.priority().into(),
            weight: message.weight,
            min_busbw: message.min_busbw,
            aggregation: !message.no_aggregation,
            on_failure: message.on_failure.map(|said| match said.regroup_within_ns {
                0 => OnFailure::End,
                nanos => OnFailure::Regroup { within: Duration::from_nanos(nanos) },
            }),
            ordered: message.ordered,
        }
    }
}

impl From<Clause> for v1::Clause {
    fn from(clause: Clause) -> Self {
        match clause {
            Clause::Budget => Self::Budget,
            Clause::Completion => Self::Completion,
            Clause::Iteration => Self::Iteration,
            Clause::Priority => Self::Priority,
            Clause::Weight => Self::Weight,
            Clause::Bandwidth => Self::Bandwidth,
            Clause::Aggregation => Self::Aggregation,
            Clause::OnFailure => Self::OnFailure,
            Clause::Order => Self::Order,
        }
    }
}

impl v1::Clause {
    /// As tenants are told it; none for one that is not known here.
    pub fn to_abi(self) -> Option<Clause> {
        Some(match self {
            Self::Unspecified => return None,
            Self::Budget => Clause::Budget,
            Self::Completion => Clause::Completion,
            Self::Iteration => Clause::Iteration,
            Self::Priority => Clause::Priority,
            Self::Weight => Clause::Weight,
            Self::Bandwidth => Clause::Bandwidth,
            Self::Aggregation => Clause::Aggregation,
            Self::OnFailure => Clause::OnFailure,
            Self::Order => Clause::Order,
        })
    }
}

/// Clauses by number as tenants are told them; those that are not known here are left out.
pub fn clauses(numbers: &[i32]) -> Vec<Clause> {
    let known = numbers.iter().filter_map(|number| v1::Clause::try_from(*number).ok());
    known.filter_map(v1::Clause::to_abi).collect()
}

/// The other way.
pub fn clause_numbers(clauses: &[Clause]) -> Vec<i32> {
    clauses.iter().map(|clause| v1::Clause::from(*clause).into()).collect()
}

impl From<&Agreement> for v1::Agreement {
    fn from(agreement: &Agreement) -> Self {
        let Record { operations, late, busbw, breaches } = agreement.record;
        Self {
            number: agreement.number,
            constraints: Some((&agreement.constraints).into()),
            since_ns: agreement.since_ns,
            broken: clause_numbers(&agreement.broken),
            record: Some(v1::Record { operations, missed: late, busbw, breaches }),
        }
    }
}

impl From<&v1::Agreement> for Agreement {
    fn from(message: &v1::Agreement) -> Self {
        let v1::Record { operations, missed: late, busbw, breaches } = message.record.unwrap_or_default();
        Self {
            number: message.number,
            constraints: message.constraints.as_ref().map(Into::into).unwrap_or_default(),
            since_ns: message.since_ns,
            broken: clauses(&message.broken),
            record: Record { operations, late, busbw, breaches },
        }
    }
}

impl From<&Refusal> for v1::QuestionRefusedKind {
    fn from(refusal: &Refusal) -> Self {
        match refusal {
            Refusal::NoCommunicator(_) => Self::NoCommunicator,
            Refusal::Other(_) => Self::Unspecified,
        }
    }
}

impl v1::QuestionRefusedKind {
    fn refusal(self, text: String) -> Refusal {
        match self {
            Self::NoCommunicator => Refusal::NoCommunicator(text),
            Self::Unspecified => Refusal::Other(text),
        }
    }
}

impl v1::Negotiated {
    /// The answer to a question.
    pub fn answer(request: u64, outcome: &Result<Negotiated, Refusal>) -> Self {
        let mut answer = Self { request, ..Self::default() };
        match outcome {
            Err(refused) => {
                answer.refused = refused.to_string();
                answer.refused_kind = v1::QuestionRefusedKind::from(refused).into();
            }
            Ok(Negotiated::Agreed(agreement)) => answer.agreement = Some(agreement.into()),
            Ok(Negotiated::Refused { reasons, counter }) => {
                let reason = |reason: &Reason| v1::Reason {
                    clause: v1::Clause::from(reason.clause).into(),
                    text: reason.text.clone(),
                };
                answer.reasons = reasons.iter().map(reason).collect();
                answer.counter = counter.as_ref().map(Into::into);
            }
        }
        answer
    }

    /// What it says, as tenants are told it.
    pub fn outcome(self) -> Result<Negotiated, Refusal> {
        if !self.refused.is_empty() {
            return Err(self.refused_kind().refusal(self.refused));
        }
        if let Some(agreement) = &self.agreement {
            return Ok(Negotiated::Agreed(agreement.into()));
        }
        let reason =
            |reason: v1::Reason| Some(Reason { clause: reason.clause().to_abi()?, text: reason.text });
        let reasons = self.reasons.into_iter().filter_map(reason).collect();
        Ok(Negotiated::Refused { reasons, counter: self.counter.as_ref().map(Into::into) })
    }
}

impl v1::BeginIteration {
    /// What is left to the provider.
    pub fn knobs(&self) -> Knobs {
        let checkpoint = self.checkpoint.map(|said| Checkpoint {
            every: Duration::from_nanos(said.every_ns),
            cost: Duration::from_nanos(said.cost_ns),
            last: Duration::from_nanos(said.last_ns),
            importance: said.importance().into(),
        });
        Knobs { accumulate: (self.accumulate_min, self.accumulate_max), checkpoint }
    }

    /// The batch, if that is left to the provider.
    pub fn batch(&self) -> Option<BatchKnobs> {
        self.batch.map(|given| BatchKnobs {
            samples: (given.samples_min, given.samples_max),
            micro: (given.micro_min, given.micro_max),
            initial: given.initial,
            rule: match given.rule() {
                v1::LearningRate::AdaScale => LearningRate::AdaScale,
                v1::LearningRate::SquareRoot => LearningRate::SquareRoot,
                v1::LearningRate::Linear => LearningRate::Linear,
            },
            square: given.square,
            trace: given.trace,
            pass: Duration::from_nanos(given.pass_ns),
            sample: Duration::from_nanos(given.sample_ns),
            exchange: Duration::from_nanos(given.exchange_ns),
        })
    }

    /// A question with these knobs.
    pub fn of(
        request: u64,
        tenant: &str,
        communicator: String,
        knobs: &Knobs,
        batch: Option<&BatchKnobs>,
    ) -> Self {
        let checkpoint =
            knobs.checkpoint.map(|Checkpoint { every, cost, last, importance }| v1::Checkpoint {
                every_ns: nanos(every),
                cost_ns: nanos(cost),
                last_ns: nanos(last),
                importance: v1::Priority::from(importance).into(),
            });
        Self {
            request,
            tenant: tenant.to_owned(),
            communicator,
            accumulate_min: knobs.accumulate.0,
            accumulate_max: knobs.accumulate.1,
            checkpoint,
            batch: batch.map(Into::into),
        }
    }
}

impl From<&BatchKnobs> for v1::BatchKnobs {
    fn from(batch: &BatchKnobs) -> Self {
        let rule = match batch.rule {
            LearningRate::AdaScale => v1::LearningRate::AdaScale,
            LearningRate::SquareRoot => v1::LearningRate::SquareRoot,
            LearningRate::Linear => v1::LearningRate::Linear,
        };
        Self {
            samples_min: batch.samples.0,
            samples_max: batch.samples.1,
            micro_min: batch.micro.0,
            micro_max: batch.micro.1,
            initial: batch.initial,
            rule: rule.into(),
            square: batch.square,
            trace: batch.trace,
            pass_ns: nanos(batch.pass),
            sample_ns: nanos(batch.sample),
            exchange_ns: nanos(batch.exchange),
        }
    }
}

impl v1::IterationChoice {
    /// The answer to a question.
    pub fn answer(request: u64, choice: Result<(Choice, Option<BatchChoice>), Refusal>) -> Self {
        match choice {
            Err(refused) => {
                let refused_kind = v1::QuestionRefusedKind::from(&refused).into();
                Self { request, refused: refused.to_string(), refused_kind, ..Self::default() }
            }
            Ok((Choice { accumulate, checkpoint, reason: because }, batch)) => {
                let because = match because {
                    ChoiceReason::Usual | ChoiceReason::Unknown => v1::ChoiceReason::Usual,
                    ChoiceReason::Slow => v1::ChoiceReason::Slow,
                    ChoiceReason::Maintenance => v1::ChoiceReason::Maintenance,
                    ChoiceReason::Due => v1::ChoiceReason::Due,
                };
                let batch = batch
                    .map(|BatchChoice { micro, learning_rate }| v1::BatchChoice { micro, learning_rate });
                Self { request, accumulate, checkpoint, reason: because.into(), batch, ..Self::default() }
            }
        }
    }

    /// What it says, as tenants are told it.
    pub fn choice(self) -> Result<(Choice, Option<BatchChoice>), Refusal> {
        let because = match self.reason() {
            v1::ChoiceReason::Usual => ChoiceReason::Usual,
            v1::ChoiceReason::Slow => ChoiceReason::Slow,
            v1::ChoiceReason::Maintenance => ChoiceReason::Maintenance,
            v1::ChoiceReason::Due => ChoiceReason::Due,
        };
        if !self.refused.is_empty() {
            return Err(self.refused_kind().refusal(self.refused));
        }
        let batch =
            self.batch.map(|v1::BatchChoice { micro, learning_rate }| BatchChoice { micro, learning_rate });
        Ok((Choice { accumulate: self.accumulate, checkpoint: self.checkpoint, reason: because }, batch))
    }
}

impl From<&Hints> for v1::Hints {
    fn from(hints: &Hints) -> Self {
        let expected = |expected: &Expected| v1::ExpectedOperation {
            collective: expected.collective.code().into(),
            bytes: expected.bytes,
            overlapped: !expected.critical,
        };
        Self {
            period_ns: hints.period.map_or(0, nanos),
            sequence: hints.sequence.iter().map(expected).collect(),
            task_priority: hints.task_priority.into(),
        }
    }
}

impl v1::Hints {
    /// As tenants say it; none where a collective is not known here.
    pub fn to_abi(&self) -> Option<Hints> {
        let expected = |said: &v1::ExpectedOperation| {
            Some(Expected {
                collective: collective(said.collective)?,
                bytes: said.bytes,
                critical: !said.overlapped,
            })
        };
        Some(Hints {
            period: (self.period_ns > 0).then(|| Duration::from_nanos(self.period_ns)),
            sequence: self.sequence.iter().map(expected).collect::<Option<_>>()?,
            task_priority: u8::try_from(self.task_priority).unwrap_or(u8::MAX),
        })
    }
}

impl v1::Hinted {
    /// The answer to hints.
    pub fn answer(request: u64, outcome: Result<(), Refusal>) -> Self {
        let Err(refused) = outcome else { return Self { request, ..Self::default() } };
        let refused_kind = v1::QuestionRefusedKind::from(&refused).into();
        Self { request, refused: refused.to_string(), refused_kind }
    }

    /// What it says.
    pub fn outcome(self) -> Result<(), Refusal> {
        if self.refused.is_empty() { Ok(()) } else { Err(self.refused_kind().refusal(self.refused)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn everything() -> Constraints {
        Constraints::new()
            .budget(Budget::Codecs(vec!["bf16".to_owned()]))
            .p99(1 << 10, Duration::from_micros(50))
            .p99(1 << 20, Duration::from_millis(5))
            .p99_of(Collective::AllGather, 1 << 20, Duration::from_millis(5))
            .iteration(1 << 30, Duration::from_secs(2))
            .priority(Priority::High)
            .weight(3)
            .min_busbw(125_000_000)
            .aggregation(false)
            .on_failure(OnFailure::Regroup { within: Duration::from_secs(30) })
    }

    #[test]
    fn constraints_round_trip() {
        let exact = Constraints::new().budget(Budget::Exact).priority(Priority::Low);
        let ends = Constraints::new().on_failure(OnFailure::End);
        let ordered = Constraints::new().ordered(true);
        for constraints in [everything(), exact, ends, ordered, Constraints::new()] {
            assert_eq!(Constraints::from(&v1::Constraints::from(&constraints)), constraints);
        }
        let mut strange = v1::Constraints::from(&everything());
        assert_eq!(strange.unknown(), None);
        strange.iteration = Some(v1::Target { collective: 300, ..Default::default() });
        assert_eq!(strange.unknown(), Some(300));
        let all = [
            Clause::Budget,
            Clause::Completion,
            Clause::Iteration,
            Clause::Priority,
            Clause::Weight,
            Clause::Bandwidth,
            Clause::Aggregation,
            Clause::OnFailure,
            Clause::Order,
        ];
        assert_eq!(clauses(&clause_numbers(&all)), all);
        assert_eq!(clauses(&[0, 99, -1]), []);
        let agreement = Agreement {
            number: 2,
            constraints: everything(),
            since_ns: 5,
            broken: vec![Clause::Bandwidth],
            record: Record { operations: 1, late: 2, busbw: 3, breaches: 4 },
        };
        let reasons = vec![Reason { clause: Clause::Weight, text: "too much".to_owned() }];
        for outcome in [
            Err(Refusal::Other("no".to_owned())),
            Err(Refusal::NoCommunicator("none".to_owned())),
            Ok(Negotiated::Agreed(agreement)),
            Ok(Negotiated::Refused { reasons: reasons.clone(), counter: Some(everything()) }),
            Ok(Negotiated::Refused { reasons, counter: None }),
        ] {
            let answer = v1::Negotiated::answer(9, &outcome);
            assert_eq!((answer.request, answer.outcome()), (9, outcome));
        }
    }

    #[test]
    fn knobs_and_choices_arrive() {
        let second = Duration::from_secs(1);
        let of = |importance| {
            let checkpoint = Checkpoint { every: second * 60, cost: second, last: second * 7, importance };
            Knobs { accumulate: (1, 8), checkpoint: Some(checkpoint) }
        };
        for knobs in [of(Priority::Low), of(Priority::Normal), of(Priority::High), Knobs::default()] {
            let asked = v1::BeginIteration::of(3, "a", "job".to_owned(), &knobs, None);
            assert_eq!((asked.request, asked.knobs(), asked.batch()), (3, knobs, None));
        }
        for rule in [LearningRate::AdaScale, LearningRate::SquareRoot, LearningRate::Linear] {
            let batch = BatchKnobs {
                samples: (1, 2),
                micro: (3, 4),
                initial: 5,
                rule,
                square: -6.0,
                trace: 7.0,
                pass: second * 8,
                sample: second * 9,
                exchange: second * 10,
            };
            let asked = v1::BeginIteration::of(3, "a", "job".to_owned(), &Knobs::default(), Some(&batch));
            assert_eq!(asked.batch(), Some(batch));
        }
        for because in [ChoiceReason::Usual, ChoiceReason::Slow, ChoiceReason::Maintenance, ChoiceReason::Due]
        {
            let choice = Choice { accumulate: 4, checkpoint: true, reason: because };
            for batch in [None, Some(BatchChoice { micro: 16, learning_rate: 1.5 })] {
                let chosen = Ok((choice, batch));
                assert_eq!(v1::IterationChoice::answer(1, chosen.clone()).choice(), chosen);
            }
        }
        for refused in [Refusal::Other("no".to_owned()), Refusal::NoCommunicator("none".to_owned())] {
            assert_eq!(v1::IterationChoice::answer(1, Err(refused.clone())).choice(), Err(refused));
        }
    }

    #[test]
    fn hints_arrive() {
        let all = Hints::new()
            .period(Duration::from_millis(50))
            .expect(Collective::AllReduce, 1 << 20)
            .overlapped(Collective::AllToAll, 7)
            .expect(Collective::Barrier, 0)
            .task_priority(7);
        for hints in [all, Hints::new()] {
            assert_eq!(v1::Hints::from(&hints).to_abi(), Some(hints));
        }
        let strange = v1::ExpectedOperation { collective: 300, ..Default::default() };
        assert_eq!(v1::Hints { sequence: vec![strange], ..Default::default() }.to_abi(), None);
        let refusals = ["no".into(), Refusal::NoCommunicator("none".to_owned())].map(Err);
        for outcome in refusals.into_iter().chain([Ok(())]) {
            assert_eq!(v1::Hinted::answer(1, outcome.clone()).outcome(), outcome);
        }
    }
}
