//! A join that will not happen, as its tenant sees it.

use crate::ranks::{list, sorted, verb};
use harmonaize_abi::Rank;
use std::time::Duration;

/// Most ranks that a refusal carries.
const MAX_RANKS: usize = 1000;

/// Why a join will not happen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JoinFailure {
    /// The provider does not know the tenant (any more).
    UnknownTenant,
    /// The communicator's name is empty, too long, or has characters that are not seen as they are.
    BadName {
        /// Most bytes that it may have.
        max: usize,
    },
    /// No ranks, or more than the provider allows.
    BadSize {
        /// As joined.
        ranks: u32,
        /// Most that it may be.
        max: u32,
    },
    /// A rank outside the communicator.
    RankOutside {
        /// As joined.
        rank: Rank,
        /// As joined.
        ranks: u32,
    },
    /// Another process is that rank.
    DuplicateRank {
        /// Which.
        rank: Rank,
    },
    /// A worker of the rank's job is gone before all had joined, and the job's workers start again.
    JobRestarts,
    /// Ranks do not agree on the size.
    SizeMismatch {
        /// Who is refused.
        rank: Rank,
        /// Its size.
        ranks: u32,
        /// Who joined first.
        first: Rank,
        /// And its size.
        first_ranks: u32,
    },
    /// The budget makes no sense.
    BadBudget {
        /// Why: the tenant's own words alone.
        why: String,
    },
    /// Ranks do not agree on the budget.
    BudgetMismatch {
        /// Who is refused.
        rank: Rank,
        /// Its budget, in words.
        budget: String,
        /// Who has joined with another.
        differing_ranks: Vec<Rank>,
        /// And which.
        other_budget: String,
    },
    /// Not all ranks joined in time.
    Timeout {
        /// Size of the communicator.
        ranks: u32,
        /// Who did not.
        missing: Vec<Rank>,
    },
    /// Too few came in time to go on with.
    Regroup {
        /// How many came.
        joined: u32,
        /// Fewest that were asked for.
        min_members: u32,
        /// Members that did not come.
        missing: Vec<Rank>,
    },
    /// The communicator to go on from is over, by what was agreed on for its failure.
    Expired {
        /// How long its members had to go on, if they could.
        within: Option<Duration>,
    },
    /// Not all ranks called split in time.
    SplitTimeout {
        /// Size of the communicator.
        ranks: u32,
        /// Who did not.
        missing: Vec<Rank>,
    },
    /// The rank waits for its split already.
    SplitTwice {
        /// Which.
        rank: Rank,
    },
    /// Ranks without which the communicator cannot split are gone.
    SplitLost {
        /// Which.
        ranks: Vec<Rank>,
    },
    /// The communicator that was to split is over.
    SplitOver,
    /// The split is done, and the rank wanted to be in none.
    LeftOut,
    /// The job has as many communicators as it may.
    TooManyCommunicators {
        /// Most that it may have.
        max: usize,
    },
    /// The tenant has communicators of as many jobs as it may.
    TooManyJobs {
        /// Most that it may have.
        max: usize,
    },
    /// The tenant has as many communicators as it may, on all hosts together.
    TooManyCommunicatorsInSum {
        /// What it has.
        used: usize,
        /// Most that it may have.
        max: usize,
    },
    /// The tenant would have more ranks than it may, on all hosts together.
    TooManyRanksInSum {
        /// Those that would come.
        ranks: u64,
        /// What it has.
        used: u64,
        /// Most that it may have.
        max: u32,
    },
    /// The tenant has more tensor memory than it may, on all hosts together.
    TooMuchMemoryInSum {
        /// What it has, in bytes.
        used: u64,
        /// Most that it may have, in bytes.
        max: u64,
    },
    /// The tenant's processes have more operations in flight than they may, on all hosts together.
    TooManyOperationsInSum {
        /// Entries of their rings.
        used: u64,
        /// Most that there may be.
        max: u32,
    },
    /// The tenant takes more descriptors of agents than it may, on all hosts together.
    TooManyDescriptorsInSum {
        /// Those of its processes and of links.
        used: u64,
        /// Most that there may be.
        max: u32,
    },
    /// The tenant's communicators take more memory of agents than they may, on all hosts together.
    TooMuchLandingInSum {
        /// What they take, in bytes.
        used: u64,
        /// Most that they may take, in bytes.
        max: u64,
    },
    /// The tenant's ranks join more often than they may, on all hosts together.
    JoinsTooOften {
        /// In the long run.
        per_second: u32,
        /// After a pause.
        at_once: u32,
        /// When the next may.
        after: Duration,
    },
    /// The rank's place takes no new communicators now.
    Maintenance {
        /// Who is refused.
        rank: Rank,
    },
    /// The provider cannot form communicators now.
    Unavailable {
        /// For the operator.
        detail: String,
    },
}

/// What a tenant is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantRefusal {
    /// The ranks concerned, ascending; at most a thousand.
    pub ranks: Vec<Rank>,
    /// One sentence.
    pub text: String,
}

/// What a tenant may know of a join that will not happen.
pub fn disclose_join(failure: &JoinFailure) -> TenantRefusal {
    let (ranks, text) = match failure {
        JoinFailure::UnknownTenant => (vec![], "the provider does not know this tenant".to_owned()),
        JoinFailure::BadName { max: most } => {
            let rule = "no control characters, and none that are not seen or change how text runs";
            (vec![], format!("a communicator's name has 1 to {most} bytes, {rule}"))
        }
        JoinFailure::BadSize { ranks, max: most } => {
            (vec![], format!("a communicator of {ranks} ranks is not possible; 1 to {most} are"))
        }
        JoinFailure::RankOutside { rank, ranks } => {
            (vec![*rank], format!("rank {rank} lies outside a communicator of {ranks} ranks"))
        }
        JoinFailure::DuplicateRank { rank } => {
            (vec![*rank], format!("another process is rank {rank} of this communicator already"))
        }
        JoinFailure::JobRestarts => {
            let text = "a worker of the job is gone, and not all had joined: the job's workers start again";
            (vec![], text.to_owned())
        }
        JoinFailure::SizeMismatch { rank, ranks, first, first_ranks } => (
            vec![*first],
            format!(
                "rank {rank} joins a communicator of {ranks} ranks, but rank {first} one of {first_ranks}"
            ),
        ),
        JoinFailure::BadBudget { why } => (vec![], why.clone()),
        JoinFailure::BudgetMismatch { rank, budget, differing_ranks: others, other_budget: theirs } => {
            let have = verb(others, "has", "have");
            let text = format!(
                "rank {rank} joins with the budget \"{budget}\", but {} {have} joined with \"{theirs}\"",
                list(others)
            );
            (sorted(others).into_iter().take(MAX_RANKS).collect(), text)
        }
        JoinFailure::Timeout { ranks, missing } => {
            let have = verb(missing, "has", "have");
            let text = format!("{} of {ranks} {have} not joined in time", list(missing));
            (sorted(missing).into_iter().take(MAX_RANKS).collect(), text)
        }
        JoinFailure::Regroup { joined: came, min_members: least, missing } => {
            let of = if missing.is_empty() { String::new() } else { format!("; not {}", list(missing)) };
            let enough = if came < least {
                format!(", and {least} are the fewest to go on with")
            } else {
                String::new()
            };
            let text = format!("{came} came in time{of}{enough}");
            (sorted(missing).into_iter().take(MAX_RANKS).collect(), text)
        }
        JoinFailure::Expired { within: None } => {
            (vec![], "the communicator is over: it was agreed on that it ends where it fails".to_owned())
        }
        JoinFailure::Expired { within: Some(within) } => (
            vec![],
            format!("the communicator is over: its members had {within:?} to regroup, as it was agreed on"),
        ),
        JoinFailure::SplitTimeout { ranks, missing } => {
            let have = verb(missing, "has", "have");
            let text = format!("{} of {ranks} {have} not called split in time", list(missing));
            (sorted(missing).into_iter().take(MAX_RANKS).collect(), text)
        }
        JoinFailure::SplitTwice { rank } => {
            (vec![*rank], format!("rank {rank} waits for a split of this communicator already"))
        }
        JoinFailure::SplitLost { ranks } => {
            let text = format!("{} {} gone, and all must call split", list(ranks), verb(ranks, "is", "are"));
            (sorted(ranks).into_iter().take(MAX_RANKS).collect(), text)
        }
        JoinFailure::SplitOver => (vec![], "the communicator that was to split is over".to_owned()),
        JoinFailure::LeftOut => (vec![], "the rank named no color".to_owned()),
        JoinFailure::TooManyCommunicators { max: most } => {
            (vec![], format!("the job has {most} communicators, the most that the provider allows"))
        }
        JoinFailure::TooManyJobs { max: most } => (
            vec![],
            format!("the tenant has communicators of {most} jobs, the most that the provider allows"),
        ),
        JoinFailure::TooManyCommunicatorsInSum { used, max: most } => (
            vec![],
            format!(
                "the tenant has {used} of {most} communicators on all hosts together; end some, or ask the provider for a \
                 larger `communicators`"
            ),
        ),
        JoinFailure::TooManyRanksInSum { ranks, used, max: most } => (
            vec![],
            format!(
                "the tenant has {used} of {most} ranks on all hosts together, and {ranks} more do not fit; end \
                 communicators, or ask the provider for a larger `ranks`"
            ),
        ),
        JoinFailure::TooMuchMemoryInSum { used, max: most } => (
            vec![],
            format!(
                "the tenant's processes have {used} bytes of tensor memory on all hosts together, of {most} that it may have; \
                 detach some, or ask the provider for a larger `arena`"
            ),
        ),
        JoinFailure::TooManyOperationsInSum { used, max: most } => (
            vec![],
            format!(
                "the tenant's processes have rings for {used} operations in flight on all hosts together, of {most} that it may have; \
                 detach some or have smaller rings, or ask the provider for a larger `operations`"
            ),
        ),
        JoinFailure::TooManyDescriptorsInSum { used, max: most } => (
            vec![],
            format!(
                "the tenant's processes and links have {used} descriptors of agents on all hosts together, of {most} that it may \
                 have; leave communicators or detach processes, or ask the provider for a larger `descriptors`"
            ),
        ),
        JoinFailure::TooMuchLandingInSum { used, max: most } => (
            vec![],
            format!(
                "the tenant's communicators have {used} bytes of agents' memory on all hosts together, of {most} that it may have; \
                 leave communicators, or ask the provider for a larger `landing`"
            ),
        ),
        JoinFailure::JoinsTooOften { per_second, at_once, after } => (
            vec![],
            format!(
                "this tenant's ranks join too often: {per_second} a second are possible on all hosts together, and {at_once} \
                 at once; do so again in {} ms, or ask the provider for a larger `joins`",
                after.as_millis() + 1
            ),
        ),
        JoinFailure::Maintenance { rank } => (
            vec![*rank],
            format!("the provider takes no new communicators where rank {rank} runs: maintenance"),
        ),
        JoinFailure::Unavailable { detail: _ } => {
            (vec![], "the provider cannot form communicators now; try again later".to_owned())
        }
    };
    TenantRefusal { ranks, text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_missing_ranks() {
        let told = disclose_join(&JoinFailure::Timeout { ranks: 8, missing: vec![Rank(5), Rank(3)] });
        assert_eq!(told.ranks, [Rank(3), Rank(5)]);
        assert_eq!(told.text, "ranks 3, 5 of 8 have not joined in time");
        let missing: Vec<Rank> = (1..5000).map(Rank).collect();
        let told = disclose_join(&JoinFailure::Timeout { ranks: 5000, missing });
        assert_eq!(
            (told.ranks.len(), told.text.as_str()),
            (1000, "ranks 1-4999 of 5000 have not joined in time")
        );
    }

    #[test]
    fn says_that_it_is_over_and_why() {
        let text = |within| disclose_join(&JoinFailure::Expired { within }).text;
        assert!(text(None).contains("agreed on that it ends"));
        assert!(text(Some(Duration::from_secs(30))).contains("had 30s to regroup"));
    }

    #[test]
    fn says_that_the_jobs_workers_start_again() {
        let told = disclose_join(&JoinFailure::JobRestarts);
        assert!(told.ranks.is_empty() && told.text.contains("start again"), "{told:?}");
    }

    #[test]
    fn details_do_not_pass() {
        let told = |detail: &str| disclose_join(&JoinFailure::Unavailable { detail: detail.to_owned() });
        assert_eq!(told("control at 10.0.0.1:7000 is away"), told(""));
    }
}
