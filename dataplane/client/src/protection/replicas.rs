//! Which ranks store replicas of which rank's state.

use crate::ProtectionError;
use std::collections::BTreeSet;

/// A rank's state: its rank, the ranks that store replicas, and the failure domains of all these.
struct Placed {
    owner: u32,
    holders: Vec<u32>,
    domains: Vec<u64>,
}

/// By rank, the ranks that store its replicas: each in another failure domain, none in the rank's own. The same at all ranks that know
/// the same domains.
///
/// Where `ranks >= (replicas + 1) * largest domain`, every rank stores exactly `replicas` states; no placement does so elsewhere. Along the
/// ranks sorted by domain, replica `k` of each is `k` times the largest domain further. That leaves all domains before it, and gives each
/// rank one. Elsewhere a replica goes to who has fewest.
pub(crate) fn place(domains: &[u64], replicas: u32) -> Result<Vec<Vec<u32>>, ProtectionError> {
    let distinct: BTreeSet<u64> = domains.iter().copied().collect();
    if distinct.len() <= replicas as usize {
        return Err(ProtectionError::TooFewDomains { replicas, domains: distinct.len() as u32 });
    }
    let size = |domain: &u64| domains.iter().filter(|other| *other == domain).count();
    let largest = distinct.iter().map(size).max().unwrap_or(0);
    let mut order: Vec<(u64, u32)> = domains.iter().copied().zip(0..).collect();
    order.sort_unstable();
    let mut loads = vec![0_u32; order.len()];
    let placed = |&(domain, owner): &(u64, u32)| Placed { owner, holders: Vec::new(), domains: vec![domain] };
    let mut states: Vec<Placed> = order.iter().map(placed).collect();
    for replica in 1..=replicas as usize {
        for (position, state) in states.iter_mut().enumerate() {
            let first = position + replica * largest;
            let free = (first..first + order.len()).filter_map(|at| {
                let at = at % order.len();
                let (domain, rank) = *order.get(at)?;
                let load = *loads.get(at)?;
                (!state.domains.contains(&domain)).then_some((load, at, domain, rank))
            });
            // The first of those with the least.
            if let Some((_, at, domain, rank)) = free.min_by_key(|(load, ..)| *load) {
                state.holders.push(rank);
                state.domains.push(domain);
                if let Some(load) = loads.get_mut(at) {
                    *load += 1;
                }
            }
        }
    }
    states.sort_unstable_by_key(|state| state.owner);
    Ok(states.into_iter().map(|state| state.holders).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protection::random::Random;

    #[test]
    fn neighbours_on_two_hosts_store_each_other() {
        assert_eq!(place(&[7, 7, 9, 9], 1).unwrap(), [[2], [3], [0], [1]]);
        assert_eq!(place(&[1, 2, 3], 2).unwrap(), [[1, 2], [2, 0], [0, 1]]);
        assert_eq!(place(&[5], 0).unwrap(), [[0_u32; 0]]);
    }

    #[test]
    fn too_few_domains_are_refused() {
        for (domains, replicas, found) in [(&[1, 1, 1][..], 1, 1), (&[1, 2], 2, 2), (&[], 0, 0)] {
            match place(domains, replicas) {
                Err(ProtectionError::TooFewDomains { replicas: of, domains }) => {
                    assert_eq!((of, domains), (replicas, found));
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn replicas_leave_their_domains_and_balance_where_they_can() {
        let mut balanced = 0;
        for seed in 0..10_000 {
            let mut random = Random(seed);
            let hosts = 1 + random.below(8);
            let domains: Vec<u64> = (0..1 + random.below(32)).map(|_| random.below(hosts) * 977).collect();
            let distinct: BTreeSet<u64> = domains.iter().copied().collect();
            let replicas = random.below(distinct.len() as u64) as u32;
            let holders = place(&domains, replicas).unwrap();
            let mut loads = vec![0; domains.len()];
            for (owner, holders) in holders.iter().enumerate() {
                let mut of: BTreeSet<u64> = holders.iter().map(|rank| domains[*rank as usize]).collect();
                assert!(of.insert(domains[owner]), "seed {seed}: rank {owner} beside its replica");
                assert_eq!(
                    of.len(),
                    replicas as usize + 1,
                    "seed {seed}: replicas of {owner} share a domain"
                );
                holders.iter().for_each(|rank| loads[*rank as usize] += 1);
            }
            let size = |domain: &u64| domains.iter().filter(|other| *other == domain).count();
            let largest = distinct.iter().map(size).max().unwrap();
            if domains.len() >= (replicas as usize + 1) * largest {
                assert!(loads.iter().all(|load| *load == replicas), "seed {seed}: {loads:?}");
                balanced += 1;
            }
        }
        println!("{balanced} of 10000 placements can balance, and do");
        assert!((1_000..10_000).contains(&balanced));
    }
}
