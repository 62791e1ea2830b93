//! Hosts that jobs have won in a market, and that others keep until their next cheap moments. Those do not all leave at once. Without
//! claims a host that one has left goes to whoever bids next, and a large job never finds all of its hosts free together.

use super::round::{Share, Wish};
use harmonaize_planner::HostId;
use std::collections::BTreeMap;
use std::time::Duration;

/// A host that a job has won.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Claim {
    /// The job's number.
    job: usize,
    /// When the last one leaves that keeps some of the job's hosts.
    until: Duration,
}

/// What jobs have won, and wait for.
#[derive(Clone, Debug, Default)]
pub(super) struct Claims(BTreeMap<HostId, Claim>);

impl Claims {
    /// Of jobs that get hosts if all who are outbid leave now, by `first`, and get none while some stay, by `then`. `leaves` says when each
    /// one leaves. All are in the same order.
    pub(super) fn of(wishes: &[Wish], leaves: &[Option<Duration>], first: &[Share], then: &[Share]) -> Self {
        let last = |is_among: &dyn Fn(&Wish) -> bool| {
            let stay = wishes.iter().zip(leaves).filter(|(wish, _)| wish.stays && is_among(wish));
            stay.filter_map(|(_, leaves)| *leaves).max()
        };
        let mut claims = BTreeMap::new();
        for ((wish, won), gets) in wishes.iter().zip(first).zip(then) {
            if won.hosts.is_empty() || !gets.hosts.is_empty() {
                continue;
            }
            let keeps_some = |wish: &Wish| wish.current.iter().any(|host| won.hosts.contains(host));
            // Others may have moved to its hosts, as theirs are kept.
            if let Some(until) = last(&keeps_some).or_else(|| last(&|_| true)) {
                claims.extend(won.hosts.iter().map(|host| (*host, Claim { job: wish.number, until })));
            }
        }
        Self(claims)
    }

    /// Forgets claims of jobs that are no more.
    pub(super) fn retain(&mut self, is_there: impl Fn(usize) -> bool) {
        self.0.retain(|_, claim| is_there(claim.job));
    }

    /// Whether a job has won hosts, and waits.
    pub(super) fn has(&self, job: usize) -> bool {
        self.0.values().any(|claim| claim.job == job)
    }

    /// Whether nobody but another job is to have a host: all of that one's hosts are left `by` then.
    pub(super) fn reserves(&self, host: HostId, job: usize, by: Duration) -> bool {
        self.0.get(&host).is_some_and(|claim| claim.job != job && claim.until <= by)
    }

    /// Has no job ask for what is reserved for another one. Returns whether any had.
    pub(super) fn withhold(&self, wishes: &mut [Wish], by: Duration) -> bool {
        let mut withheld = false;
        for wish in wishes.iter_mut().filter(|wish| !wish.stays) {
            let before = wish.hosts.len();
            wish.hosts.retain(|host| !self.reserves(*host, wish.number, by));
            withheld |= wish.hosts.len() < before;
        }
        withheld
    }

    /// When a job is to leave these hosts, if it has some that another one has won.
    pub(super) fn leaves(&self, hosts: &[HostId], job: usize) -> Option<Duration> {
        let claims = hosts.iter().filter_map(|host| self.0.get(host));
        claims.filter(|claim| claim.job != job).map(|claim| claim.until).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_api::v1::AllocationReason;

    const SECOND: Duration = Duration::from_secs(1);

    fn hosts(numbers: &[usize]) -> Vec<HostId> {
        numbers.iter().copied().map(HostId).collect()
    }

    fn wish(number: usize, current: &[usize], stays: bool) -> Wish {
        Wish {
            key: ("a".to_owned(), number.to_string()),
            number,
            workers: (1, 4),
            arrived: Duration::ZERO,
            attained: Duration::ZERO,
            hosts: hosts(&[0, 1, 2, 3]).into_iter().collect(),
            most_hosts: 4,
            current: hosts(current),
            bid: None,
            stays,
        }
    }

    fn share(numbers: &[usize]) -> Share {
        let (reason, text) = (AllocationReason::Least, String::new());
        Share { hosts: hosts(numbers), reason, text, quote: None }
    }

    /// Job 0 wins all. Jobs 1 and 2 keep hosts 0 and 1 for 20 s and 50 s; host 2 is left by job 3, and host 3 by nobody.
    fn claimed() -> (Vec<Wish>, Claims) {
        let wishes =
            vec![wish(0, &[], false), wish(1, &[0], true), wish(2, &[1], true), wish(3, &[2], false)];
        let first = [share(&[0, 1, 2, 3]), share(&[]), share(&[]), share(&[])];
        let then = [share(&[]), share(&[0]), share(&[1]), share(&[2])];
        let leaves = [None, Some(SECOND * 20), Some(SECOND * 50), Some(SECOND * 10)];
        let claims = Claims::of(&wishes, &leaves, &first, &then);
        (wishes, claims)
    }

    #[test]
    fn hosts_are_reserved_until_the_last_one_leaves() {
        let (mut wishes, claims) = claimed();
        assert_eq!([claims.has(0), claims.has(3)], [true, false]);
        assert!(!claims.withhold(&mut wishes, SECOND * 49), "the last one leaves later");
        assert!(claims.withhold(&mut wishes, SECOND * 50));
        let left: Vec<usize> = wishes.iter().map(|wish| wish.hosts.len()).collect();
        assert_eq!(left, [4, 4, 4, 0], "who stays keeps its own, and the winner may have all");
    }

    #[test]
    fn whoever_has_a_won_host_meanwhile_leaves_with_the_last() {
        let (_, mut claims) = claimed();
        assert_eq!(claims.leaves(&hosts(&[2]), 3), Some(SECOND * 50));
        assert_eq!((claims.leaves(&hosts(&[2]), 0), claims.leaves(&hosts(&[7]), 3)), (None, None));
        claims.retain(|job| job != 0);
        assert_eq!(claims.leaves(&hosts(&[2]), 3), None, "the winner is no more");
    }

    #[test]
    fn who_gets_hosts_or_wins_none_claims_nothing() {
        let wishes = [wish(0, &[], false), wish(1, &[0], true)];
        let leaves = [None, Some(SECOND)];
        let of = |first: &[usize], then: &[usize]| {
            Claims::of(&wishes, &leaves, &[share(first), share(&[])], &[share(then), share(&[0])]).has(0)
        };
        assert_eq!([of(&[0], &[]), of(&[0], &[1]), of(&[], &[])], [true, false, false]);
    }
}
