//! The end of a communicator or an operation, as its tenant sees it.

use crate::ranks::{list, sorted, verb};
use harmonaize_abi::{Direction, Dtype, OperationId, P2pSignature, Rank, Signature, Status};

/// Most calls that an error carries; a text groups them.
const MAX_CALLS: usize = 1024;

/// Most groups of calls that a text names.
const MAX_GROUPS: usize = 8;

/// What happened, as the provider knows it. `detail` is for the operator's log and never leaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Some ranks never called an operation that others called.
    Timeout {
        /// Number of the operation on its communicator, from 0.
        operation: OperationId,
        /// What the others called.
        signature: Signature,
        /// Who never did.
        missing: Vec<Rank>,
    },
    /// Ranks called different things as the same operation.
    Mismatch {
        /// Number of the operation on its communicator, from 0.
        operation: OperationId,
        /// Who called what, as far as it is known.
        calls: Vec<(Rank, Signature)>,
    },
    /// Ranks reported different things of one count of an uneven operation.
    Counts {
        /// Number of the operation on its communicator, from 0.
        operation: OperationId,
        /// Whose block.
        from: Rank,
        /// For whom, where each pair has a count.
        to: Option<Rank>,
        /// Who reported what, as far as it is known.
        reported: Vec<(Rank, u64)>,
    },
    /// A send or a receive made no progress in time.
    P2pTimeout {
        /// Who called it.
        rank: Rank,
        /// What.
        call: P2pSignature,
        /// Who has not called the other end; empty if that was called.
        missing: Vec<Rank>,
    },
    /// Both ends of a message were called with other types or sizes.
    P2pMismatch {
        /// Its number among those from the one rank to the other.
        number: u64,
        /// Who sent it.
        from: Rank,
        /// Who received it.
        to: Rank,
        /// Type and elements that were sent.
        sent: (Dtype, u64),
        /// Those that the receive was of.
        received: (Dtype, u64),
    },
    /// A process, an agent or a host was lost, and these ranks with it.
    RanksLost {
        /// Who.
        ranks: Vec<Rank>,
        /// For the operator.
        detail: String,
    },
    /// The provider ended the communicator: an operator's wish, or links that could not be made.
    Dissolved {
        /// For the operator.
        detail: String,
    },
    /// A rank aborted the communicator.
    Aborted {
        /// Who.
        rank: Rank,
    },
    /// A rank destroyed the communicator with operations in flight.
    Destroyed {
        /// Who, where it is known.
        ranks: Vec<Rank>,
    },
    /// A bug or broken invariant in an agent or in control.
    Internal {
        /// For the operator.
        detail: String,
    },
}

/// What a tenant is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantError {
    /// For programs.
    pub status: Status,
    /// The operation at which it showed, where there is one.
    pub operation: Option<OperationId>,
    /// The ranks concerned, ascending: missing, lost, or with differing calls.
    pub ranks: Vec<Rank>,
    /// Who called what, in rank order, where calls differ or some are missing.
    pub calls: Vec<(Rank, Signature)>,
    /// For people: one sentence about ranks and calls.
    pub text: String,
}

/// What a tenant may know of a failure.
pub fn disclose(failure: &Failure) -> TenantError {
    let error = |status, operation, ranks: &[Rank], text| TenantError {
        status,
        operation,
        ranks: sorted(ranks),
        calls: Vec::new(),
        text,
    };
    match failure {
        Failure::Timeout { operation, signature, missing } => {
            let have = verb(missing, "has", "have");
            let who = list(missing);
            let text = format!("operation {operation}, {signature}: {who} {have} not arrived in time");
            error(Status::Timeout, Some(*operation), missing, text)
        }
        Failure::Mismatch { operation, calls } => mismatch(*operation, calls),
        Failure::Counts { operation, from, to, reported } => {
            let ranks: Vec<Rank> = reported.iter().map(|(rank, _)| *rank).collect();
            let what = match to {
                Some(to) => format!("what rank {from} sends rank {to}"),
                None => format!("the block of rank {from}"),
            };
            let mut groups: Vec<(u64, Vec<Rank>)> = Vec::new();
            for (rank, count) in reported {
                match groups.iter_mut().find(|(known, _)| known == count) {
                    Some((_, ranks)) => ranks.push(*rank),
                    None => groups.push((*count, vec![*rank])),
                }
            }
            let named = groups.iter().take(MAX_GROUPS);
            let named: Vec<String> =
                named.map(|(count, ranks)| format!("{count} elements by {}", list(ranks))).collect();
            let text =
                format!("operation {operation} differs between ranks: {what} has {}", named.join(", "));
            error(Status::Mismatch, Some(*operation), &ranks, text)
        }
        Failure::P2pTimeout { rank, call, missing } => {
            let (who, have) = (list(missing), verb(missing, "has", "have"));
            let late = match call.direction {
                _ if missing.is_empty() => "it has not moved".to_owned(),
                Direction::Send => format!("{who} {have} not received"),
                Direction::Receive => format!("{who} {have} not sent"),
            };
            error(Status::Timeout, None, missing, format!("{call} of rank {rank}: {late} in time"))
        }
        Failure::P2pMismatch { number, from, to, sent, received } => {
            let what = |(dtype, count): &(Dtype, u64)| format!("{count} x {dtype}");
            let text = format!(
                "message {number} from rank {from} to rank {to} differs: sent as {}, received as {}",
                what(sent),
                what(received)
            );
            error(Status::Mismatch, Some(OperationId(*number)), &[*from, *to], text)
        }
        Failure::RanksLost { ranks, detail: _ } => {
            let text = format!("{} {} lost", list(ranks), verb(ranks, "was", "were"));
            error(Status::RankLost, None, ranks, text)
        }
        Failure::Dissolved { detail: _ } => {
            error(Status::Dissolved, None, &[], "the provider ended the communicator".to_owned())
        }
        Failure::Aborted { rank } => {
            error(Status::Aborted, None, &[*rank], format!("{} aborted the communicator", list(&[*rank])))
        }
        Failure::Destroyed { ranks } if ranks.is_empty() => {
            error(Status::Destroyed, None, &[], "the communicator was destroyed".to_owned())
        }
        Failure::Destroyed { ranks } => {
            let text = format!("{} destroyed the communicator", list(ranks));
            error(Status::Destroyed, None, ranks, text)
        }
        Failure::Internal { detail: _ } => {
            error(Status::Internal, None, &[], "internal error; the communicator has ended".to_owned())
        }
    }
}

fn mismatch(operation: OperationId, calls: &[(Rank, Signature)]) -> TenantError {
    let mut calls = calls.to_vec();
    calls.sort_by_key(|(rank, _)| *rank);
    calls.dedup();
    calls.truncate(MAX_CALLS);
    let mut groups: Vec<(Signature, Vec<Rank>)> = Vec::new();
    for (rank, signature) in &calls {
        match groups.iter_mut().find(|(known, _)| known == signature) {
            Some((_, ranks)) => ranks.push(*rank),
            None => groups.push((*signature, vec![*rank])),
        }
    }
    let named = groups.iter().take(MAX_GROUPS);
    let named: Vec<String> =
        named.map(|(signature, ranks)| format!("{} called {signature}", list(ranks))).collect();
    let others = if groups.len() > MAX_GROUPS { ", others called something else again" } else { "" };
    let text = format!("operation {operation} differs between ranks: {}{others}", named.join(", "));
    let ranks = sorted(&calls.iter().map(|(rank, _)| *rank).collect::<Vec<_>>());
    TenantError { status: Status::Mismatch, operation: Some(operation), ranks, calls, text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_abi::{Collective, ReduceOp};
    use proptest::prelude::*;

    fn sum(count: u64) -> Signature {
        Signature {
            collective: Collective::AllReduce,
            dtype: Dtype::F32,
            reduce: ReduceOp::Sum,
            root: Rank(0),
            count,
            uneven: false,
        }
    }

    #[test]
    fn names_the_end_of_a_message_that_is_missing() {
        let call = |direction, peer| P2pSignature { direction, peer, dtype: Dtype::F32, count: 4 };
        let of = |call: P2pSignature, missing: &[u32]| {
            let missing = missing.iter().copied().map(Rank).collect();
            disclose(&Failure::P2pTimeout { rank: Rank(2), call, missing })
        };
        let told = of(call(Direction::Receive, Some(Rank(3))), &[3]);
        assert_eq!((told.status, &*told.ranks), (Status::Timeout, &[Rank(3)][..]));
        assert_eq!(told.text, "receive(4 x f32, from rank 3) of rank 2: rank 3 has not sent in time");
        let told = of(call(Direction::Receive, None), &[0, 1]);
        assert_eq!(told.text, "receive(4 x f32, from any rank) of rank 2: ranks 0, 1 have not sent in time");
        let told = of(call(Direction::Send, Some(Rank(0))), &[]);
        assert_eq!(told.text, "send(4 x f32, to rank 0) of rank 2: it has not moved in time");
        let (sent, received) = ((Dtype::F32, 4), (Dtype::F64, 2));
        let told = disclose(&Failure::P2pMismatch { number: 7, from: Rank(1), to: Rank(0), sent, received });
        assert_eq!((told.status, &*told.ranks), (Status::Mismatch, &[Rank(0), Rank(1)][..]));
        let text = "message 7 from rank 1 to rank 0 differs: sent as 4 x f32, received as 2 x f64";
        assert_eq!(told.text, text);
    }

    #[test]
    fn names_each_rank_and_its_count() {
        let reported = vec![(Rank(0), 5), (Rank(3), 7), (Rank(1), 5)];
        let told =
            disclose(&Failure::Counts { operation: OperationId(2), from: Rank(1), to: None, reported });
        assert_eq!((told.status, told.operation), (Status::Mismatch, Some(OperationId(2))));
        assert_eq!(told.ranks, [Rank(0), Rank(1), Rank(3)]);
        let text = "the block of rank 1 has 5 elements by ranks 0, 1, 7 elements by rank 3";
        assert_eq!(told.text, format!("operation 2 differs between ranks: {text}"));
        let reported = vec![(Rank(1), 5), (Rank(2), 0)];
        let told = disclose(&Failure::Counts {
            operation: OperationId(2),
            from: Rank(1),
            to: Some(Rank(2)),
            reported,
        });
        assert!(told.text.contains("what rank 1 sends rank 2 has 5 elements by rank 1, 0"), "{}", told.text);
    }

    #[test]
    fn names_ranks_and_calls() {
        let told = disclose(&Failure::Timeout {
            operation: OperationId(7),
            signature: sum(3),
            missing: vec![Rank(2), Rank(1)],
        });
        assert_eq!((told.status, told.operation), (Status::Timeout, Some(OperationId(7))));
        assert_eq!(told.ranks, [Rank(1), Rank(2)]);
        assert_eq!(told.text, "operation 7, allreduce(3 x f32, sum): ranks 1, 2 have not arrived in time");

        let calls = vec![(Rank(2), sum(4)), (Rank(0), sum(3)), (Rank(1), sum(3))];
        let told = disclose(&Failure::Mismatch { operation: OperationId(0), calls });
        assert_eq!(told.calls, [(Rank(0), sum(3)), (Rank(1), sum(3)), (Rank(2), sum(4))]);
        let expected = "operation 0 differs between ranks: ranks 0, 1 called allreduce(3 x f32, sum), \
                        rank 2 called allreduce(4 x f32, sum)";
        assert_eq!(told.text, expected);

        let told = disclose(&Failure::RanksLost { ranks: vec![Rank(5)], detail: String::new() });
        assert_eq!((told.status, told.text.as_str()), (Status::RankLost, "rank 5 was lost"));

        let told = disclose(&Failure::Aborted { rank: Rank(2) });
        assert_eq!((told.status, told.ranks.as_slice()), (Status::Aborted, [Rank(2)].as_slice()));
        assert_eq!(told.text, "rank 2 aborted the communicator");
    }

    #[test]
    fn texts_stay_short() {
        let calls = (0..100_000).map(|rank| (Rank(rank), sum(u64::from(rank)))).collect();
        let told = disclose(&Failure::Mismatch { operation: OperationId(u64::MAX), calls });
        assert!(told.text.len() < 1024 && told.calls.len() == MAX_CALLS, "{}", told.text);
    }

    proptest! {
        /// What the operator's detail says changes nothing that the tenant sees.
        #[test]
        fn details_do_not_pass(ranks in proptest::collection::vec(0_u32..9, 0..9), a in ".{0,40}", b in ".{0,40}") {
            let ranks: Vec<Rank> = ranks.into_iter().map(Rank).collect();
            let pair = |make: &dyn Fn(String) -> Failure| (disclose(&make(a.clone())), disclose(&make(b.clone())));
            let lost = pair(&|detail| Failure::RanksLost { ranks: ranks.clone(), detail });
            let dissolved = pair(&|detail| Failure::Dissolved { detail });
            let internal = pair(&|detail| Failure::Internal { detail });
            for (left, right) in [lost, dissolved, internal] {
                prop_assert_eq!(left, right);
            }
        }

        /// Every word of a text is one that this room or the ABI has, or a number.
        #[test]
        fn texts_contain_no_names(ranks in proptest::collection::vec(0_u32..2000, 0..40), host in "[a-z]{4,8}[0-9]{1,3}",
                               octets: [u8; 4], port: u16) {
            let address = format!("{}.{}.{}.{}:{port}", octets[0], octets[1], octets[2], octets[3]);
            let ranks: Vec<Rank> = ranks.into_iter().map(Rank).collect();
            let detail = format!("{host} at {address} went away");
            for failure in [
                Failure::RanksLost { ranks: ranks.clone(), detail: detail.clone() },
                Failure::Dissolved { detail: detail.clone() },
                Failure::Internal { detail },
                Failure::Destroyed { ranks: ranks.clone() },
                Failure::Timeout { operation: OperationId(1), signature: sum(1), missing: ranks },
            ] {
                let text = disclose(&failure).text;
                prop_assert!(!text.contains(&host) && !text.contains(&address), "{}", text);
            }
        }
    }
}
