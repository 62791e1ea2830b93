//! Agreements: what a tenant wants of its communicators, and what the provider promises.

use crate::client::harmonaize_client_t;
use crate::communicator::budget;
use crate::error::{Failure, call, given, text};
use crate::operation::cut;
use crate::options::{SizeFirst, read, write};
use crate::status::{HARMONAIZE_ERROR_COUNTER_OFFER, HARMONAIZE_ERROR_NOT_AGREED, harmonaize_status_t};
use harmonaize_client::{
    Agreement, Clause, Collective, Constraints, Negotiated, OnFailure, Priority, Reason, Target,
};
use std::ffi::{CStr, c_char};
use std::mem::MaybeUninit;
use std::time::Duration;

/// A collective, where a target names one.
pub type harmonaize_collective_t = u32;

/// AllReduce.
pub const HARMONAIZE_ALL_REDUCE: harmonaize_collective_t = 0;
/// AllToAll.
pub const HARMONAIZE_ALL_TO_ALL: harmonaize_collective_t = 1;
/// Broadcast.
pub const HARMONAIZE_BROADCAST: harmonaize_collective_t = 2;
/// Barrier.
pub const HARMONAIZE_BARRIER: harmonaize_collective_t = 3;
/// AllGather.
pub const HARMONAIZE_ALL_GATHER: harmonaize_collective_t = 4;
/// ReduceScatter.
pub const HARMONAIZE_REDUCE_SCATTER: harmonaize_collective_t = 5;
/// Reduce.
pub const HARMONAIZE_REDUCE: harmonaize_collective_t = 6;
/// Gather.
pub const HARMONAIZE_GATHER: harmonaize_collective_t = 7;
/// Scatter.
pub const HARMONAIZE_SCATTER: harmonaize_collective_t = 8;

/// The usual share of what is shared with others.
pub const HARMONAIZE_PRIORITY_NORMAL: u32 = 0;
/// A quarter of it; nothing is promised.
pub const HARMONAIZE_PRIORITY_LOW: u32 = 1;
/// Four times as much.
pub const HARMONAIZE_PRIORITY_HIGH: u32 = 2;

/// When it fails, its members may regroup, and nothing is kept for them.
pub const HARMONAIZE_ON_FAILURE_NOTHING: u32 = 0;
/// When it fails, it is over.
pub const HARMONAIZE_ON_FAILURE_END: u32 = 1;
/// When it fails, its place is kept for its members to regroup.
pub const HARMONAIZE_ON_FAILURE_REGROUP: u32 = 2;

/// What may be lost of tensors.
pub const HARMONAIZE_CLAUSE_BUDGET: u32 = 1;
/// Targets for single operations.
pub const HARMONAIZE_CLAUSE_COMPLETION: u32 = 2;
/// The target for an iteration.
pub const HARMONAIZE_CLAUSE_ITERATION: u32 = 4;
/// The priority.
pub const HARMONAIZE_CLAUSE_PRIORITY: u32 = 8;
/// The weight.
pub const HARMONAIZE_CLAUSE_WEIGHT: u32 = 16;
/// The least bus bandwidth.
pub const HARMONAIZE_CLAUSE_BANDWIDTH: u32 = 32;
/// Whether aggregators sum.
pub const HARMONAIZE_CLAUSE_AGGREGATION: u32 = 64;
/// What becomes of it when it fails.
pub const HARMONAIZE_CLAUSE_ON_FAILURE: u32 = 128;
/// The order of sums.
pub const HARMONAIZE_CLAUSE_ORDER: u32 = 256;

/// Most targets for single operations.
pub const HARMONAIZE_TARGETS: usize = 4;
/// Bytes of a budget's text in constraints, with the NUL at its end.
pub const HARMONAIZE_BUDGET_BYTES: usize = 120;

/// So many bytes are through within so long, in 99 of 100 cases.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct harmonaize_target_t {
    /// At most so many; 0: there is no target. Of a Barrier 1 will do.
    pub bytes: u64,
    /// Within so many nanoseconds, from the last rank's call.
    pub p99_ns: u64,
    /// Of what.
    pub collective: harmonaize_collective_t,
}

/// What a tenant wants of one communicator: intent, no mechanism. What is 0 is the provider's choice.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct harmonaize_constraints_t {
    /// `sizeof` of this structure.
    pub size: usize,
    /// What may be lost of its tensors, as text as when joining; empty: what its ranks said then.
    pub budget: [c_char; HARMONAIZE_BUDGET_BYTES],
    /// Targets for single operations.
    pub completions: [harmonaize_target_t; HARMONAIZE_TARGETS],
    /// A target for all operations of one iteration together.
    pub iteration: harmonaize_target_t,
    /// Least bus bandwidth of operations of 1 MiB and more, bytes a second.
    pub min_busbw: u64,
    /// How long its place is kept for its members to regroup, in nanoseconds.
    pub regroup_within_ns: u64,
    /// How much it matters beside others: `HARMONAIZE_PRIORITY_...`.
    pub priority: u32,
    /// Its share relative to others', 1 to 64; 0 is 1.
    pub weight: u32,
    /// What becomes of it when it fails: `HARMONAIZE_ON_FAILURE_...`.
    pub on_failure: u32,
    /// 1: no aggregator sums its operations.
    pub no_aggregation: u32,
    /// 1: its sums of floats have the same bits in every run.
    pub ordered: u32,
}

// SAFETY: integers, of which the first is the size.
unsafe impl SizeFirst for harmonaize_constraints_t {}

/// What the provider has promised for one communicator, and how it was kept.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct harmonaize_agreement_t {
    /// Counts the communicator's agreements from 1; 0 where nothing was ever agreed on.
    pub number: u64,
    /// Since when, in nanoseconds since 1970.
    pub since_ns: u64,
    /// Operations that were looked at.
    pub operations: u64,
    /// Those that took longer than a target lets them.
    pub late: u64,
    /// Bus bandwidth of the latest ones of 1 MiB and more, bytes a second.
    pub busbw: u64,
    /// How often a clause ceased to be kept.
    pub breaches: u64,
    /// What is not kept now: the sum of `HARMONAIZE_CLAUSE_...`.
    pub broken: u32,
}

/// The sum of clauses' numbers.
pub(crate) fn clause_bits(clauses: &[Clause]) -> u32 {
    clauses.iter().fold(0, |bits, clause| {
        bits | match clause {
            Clause::Budget => HARMONAIZE_CLAUSE_BUDGET,
            Clause::Completion => HARMONAIZE_CLAUSE_COMPLETION,
            Clause::Iteration => HARMONAIZE_CLAUSE_ITERATION,
            Clause::Priority => HARMONAIZE_CLAUSE_PRIORITY,
            Clause::Weight => HARMONAIZE_CLAUSE_WEIGHT,
            Clause::Bandwidth => HARMONAIZE_CLAUSE_BANDWIDTH,
            Clause::Aggregation => HARMONAIZE_CLAUSE_AGGREGATION,
            Clause::OnFailure => HARMONAIZE_CLAUSE_ON_FAILURE,
            Clause::Order => HARMONAIZE_CLAUSE_ORDER,
        }
    })
}

const NO_TARGET: harmonaize_target_t = harmonaize_target_t { bytes: 0, p99_ns: 0, collective: 0 };

impl harmonaize_target_t {
    fn target(&self) -> Result<Option<Target>, Failure> {
        let known = u8::try_from(self.collective).ok().and_then(Collective::from_code);
        let unknown = || Failure::argument(format!("{} is no collective", self.collective));
        let (collective, p99) = (known.ok_or_else(unknown)?, Duration::from_nanos(self.p99_ns));
        Ok((self.bytes > 0).then_some(Target { collective, bytes: self.bytes, p99 }))
    }
}

impl From<&Target> for harmonaize_target_t {
    fn from(target: &Target) -> Self {
        let p99_ns = nanos(target.p99);
        Self { bytes: target.bytes, p99_ns, collective: target.collective.code().into() }
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// A priority by its number.
pub(crate) fn priority(number: u32) -> Result<Priority, Failure> {
    match number {
        HARMONAIZE_PRIORITY_NORMAL => Ok(Priority::Normal),
        HARMONAIZE_PRIORITY_LOW => Ok(Priority::Low),
        HARMONAIZE_PRIORITY_HIGH => Ok(Priority::High),
        other => Err(Failure::argument(format!("{other} is no priority"))),
    }
}

/// 0 or 1.
fn flag(value: u32, what: &str) -> Result<bool, Failure> {
    match value {
        0 | 1 => Ok(value == 1),
        other => Err(Failure::argument(format!("{what} is {other}; it is 0 or 1"))),
    }
}

impl harmonaize_constraints_t {
    fn constraints(&self) -> Result<Constraints, Failure> {
        let bytes = self.budget.map(|letter| letter.to_ne_bytes()[0]);
        let text = CStr::from_bytes_until_nul(&bytes).ok().and_then(|text| text.to_str().ok());
        let text = text.ok_or_else(|| Failure::argument("the budget is no text with a NUL at its end"))?;
        let mut wanted = Constraints::new();
        if !text.is_empty() {
            wanted = wanted.budget(budget(text)?);
        }
        for target in &self.completions {
            if let Some(Target { collective, bytes, p99 }) = target.target()? {
                wanted = wanted.p99_of(collective, bytes, p99);
            }
        }
        wanted.iteration = self.iteration.target()?;
        wanted.min_busbw = self.min_busbw;
        wanted.weight = self.weight.max(1);
        wanted.priority = priority(self.priority)?;
        let within = Duration::from_nanos(self.regroup_within_ns);
        wanted.on_failure = match self.on_failure {
            HARMONAIZE_ON_FAILURE_NOTHING => None,
            HARMONAIZE_ON_FAILURE_END => Some(OnFailure::End),
            HARMONAIZE_ON_FAILURE_REGROUP => Some(OnFailure::Regroup { within }),
            other => return Err(Failure::argument(format!("{other} says nothing of failures"))),
        };
        wanted.aggregation = !flag(self.no_aggregation, "no_aggregation")?;
        wanted.ordered = flag(self.ordered, "ordered")?;
        Ok(wanted)
    }
}

impl From<&Constraints> for harmonaize_constraints_t {
    fn from(wanted: &Constraints) -> Self {
        let mut completions = [NO_TARGET; HARMONAIZE_TARGETS];
        completions.iter_mut().zip(&wanted.completions).for_each(|(to, from)| *to = from.into());
        let (on_failure, regroup_within_ns) = match wanted.on_failure {
            None => (HARMONAIZE_ON_FAILURE_NOTHING, 0),
            Some(OnFailure::End) => (HARMONAIZE_ON_FAILURE_END, 0),
            Some(OnFailure::Regroup { within }) => (HARMONAIZE_ON_FAILURE_REGROUP, nanos(within)),
        };
        Self {
            size: size_of::<Self>(),
            budget: cut(&wanted.budget.as_ref().map_or_else(String::new, ToString::to_string)),
            completions,
            iteration: wanted.iteration.as_ref().map_or(NO_TARGET, Into::into),
            min_busbw: wanted.min_busbw,
            regroup_within_ns,
            priority: match wanted.priority {
                Priority::Normal => HARMONAIZE_PRIORITY_NORMAL,
                Priority::Low => HARMONAIZE_PRIORITY_LOW,
                Priority::High => HARMONAIZE_PRIORITY_HIGH,
            },
            weight: wanted.weight,
            on_failure,
            no_aggregation: u32::from(!wanted.aggregation),
            ordered: wanted.ordered.into(),
        }
    }
}

impl From<&Agreement> for harmonaize_agreement_t {
    fn from(agreement: &Agreement) -> Self {
        let record = agreement.record;
        Self {
            number: agreement.number,
            since_ns: agreement.since_ns,
            operations: record.operations,
            late: record.late,
            busbw: record.busbw,
            breaches: record.breaches,
            broken: clause_bits(&agreement.broken),
        }
    }
}

/// Why not, for people.
fn refusal(reasons: &[Reason]) -> String {
    let texts: Vec<&str> = reasons.iter().map(|reason| reason.text.as_str()).collect();
    format!("not agreed on: {}", texts.join("; "))
}

/// Gives an agreement to a caller.
///
/// # Safety
/// `constraints` is NULL, or points to as many bytes as its size says.
unsafe fn agreed(
    reached: &Agreement,
    agreement: Option<&mut MaybeUninit<harmonaize_agreement_t>>,
    constraints: *mut harmonaize_constraints_t,
) -> Result<(), Failure> {
    if let Some(agreement) = agreement {
        agreement.write(reached.into());
    }
    // SAFETY: as the caller has promised.
    unsafe { write(constraints, &(&reached.constraints).into()) }
}

/// Proposes what the provider shall promise for the tenant's communicator of this name. What is agreed on takes the place of
/// what was before; constraints of zeros give everything back. `outcome` becomes what is agreed on, or after
/// `HARMONAIZE_ERROR_COUNTER_OFFER` what could be had: to take that, propose it. Its size is to be set; it and `agreement` may be
/// NULL. The error's text has the reasons.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_propose(
    client: Option<&harmonaize_client_t>,
    communicator: *const c_char,
    wanted: *const harmonaize_constraints_t,
    agreement: Option<&mut MaybeUninit<harmonaize_agreement_t>>,
    outcome: *mut harmonaize_constraints_t,
) -> harmonaize_status_t {
    call(|| {
        let client = &given(client, "client")?.0;
        // SAFETY: the caller gives a name with a NUL at its end.
        let communicator = unsafe { text(communicator, "the communicator's name") }?;
        // SAFETY: the caller gives constraints with the size that they have, or none.
        let wanted = unsafe { read(wanted) }?.constraints()?;
        match client.propose(communicator, &wanted)? {
            // SAFETY: the caller gives a place with the size that it has, or none.
            Negotiated::Agreed(reached) => unsafe { agreed(&reached, agreement, outcome) },
            Negotiated::Refused { reasons, counter: Some(counter) } => {
                // SAFETY: as above.
                unsafe { write(outcome, &(&counter).into()) }?;
                Err(Failure::new(HARMONAIZE_ERROR_COUNTER_OFFER, refusal(&reasons)))
            }
            Negotiated::Refused { reasons, counter: None } => {
                Err(Failure::new(HARMONAIZE_ERROR_NOT_AGREED, refusal(&reasons)))
            }
        }
    })
}

/// Says what the provider has promised for the communicator of this name, what of it is not kept now, and how it was kept. The
/// size of `constraints` is to be set; it and `agreement` may be NULL.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_agreement(
    client: Option<&harmonaize_client_t>,
    communicator: *const c_char,
    agreement: Option<&mut MaybeUninit<harmonaize_agreement_t>>,
    constraints: *mut harmonaize_constraints_t,
) -> harmonaize_status_t {
    call(|| {
        let client = &given(client, "client")?.0;
        // SAFETY: the caller gives a name with a NUL at its end.
        let communicator = unsafe { text(communicator, "the communicator's name") }?;
        let reached = client.agreement(communicator)?;
        // SAFETY: the caller gives a place with the size that it has, or none.
        unsafe { agreed(&reached, agreement, constraints) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_client::Budget;

    #[test]
    fn constraints_survive_the_way_to_c_and_back() {
        let wanted = Constraints::new()
            .budget(Budget::Codecs(vec!["int8".to_owned(), "rotated 4".to_owned()]))
            .p99(1 << 16, Duration::from_millis(5))
            .p99_of(Collective::Barrier, 1, Duration::from_micros(70))
            .iteration(48 << 20, Duration::from_secs(1))
            .priority(Priority::High)
            .weight(3)
            .min_busbw(60_000_000)
            .on_failure(OnFailure::Regroup { within: Duration::from_secs(9) })
            .aggregation(false)
            .ordered(true);
        for wanted in [wanted, Constraints::new()] {
            assert_eq!(harmonaize_constraints_t::from(&wanted).constraints().unwrap(), wanted);
        }
    }

    #[test]
    fn wrong_constraints_are_named() {
        let wrong = |change: fn(&mut harmonaize_constraints_t)| {
            let mut constraints = harmonaize_constraints_t::from(&Constraints::new());
            change(&mut constraints);
            constraints.constraints().unwrap_err().text
        };
        assert!(wrong(|it| it.priority = 7).contains("7 is no priority"));
        assert!(wrong(|it| it.on_failure = 9).contains('9'));
        assert!(wrong(|it| it.ordered = 2).contains("ordered is 2"));
        assert!(wrong(|it| it.iteration.collective = 300).contains("300 is no collective"));
        assert!(wrong(|it| it.budget = [1; HARMONAIZE_BUDGET_BYTES]).contains("NUL"));
        assert!(wrong(|it| it.budget = cut("vnmse=many")).contains("many"));
    }

    #[test]
    fn every_collective_and_clause_has_a_number_of_its_own() {
        let header = include_str!("../include/harmonaize.h");
        for collective in Collective::ALL {
            let code = collective.code();
            let named = header.lines().filter(|line| {
                let squeezed = line.replace('_', "").to_lowercase();
                squeezed == format!("#define harmonaize{} {code}", collective.name())
            });
            assert_eq!(named.count(), 1, "{collective}");
        }
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
        assert_eq!(clause_bits(&all), (1 << all.len()) - 1);
    }
}
