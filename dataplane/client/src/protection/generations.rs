//! Which states a rank has whole, and from which step and whom all ranks restore.

use crate::ProtectionError;
use harmonaize_abi::Rank;
use std::collections::{BTreeMap, BTreeSet};

/// What a rank has of its own state and of those that it stores for others. It has them of the step that was sealed last, and of the
/// one before.
///
/// A generation begins only once all ranks have the one before it whole. So whenever ranks are lost, one generation is whole everywhere,
/// from the first that was.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    /// The newest first.
    generations: [Generation; 2],
    committed: Option<u64>,
}

#[derive(Debug, Default)]
struct Generation {
    step: Option<u64>,
    /// Ranks whose state is whole here.
    whole: BTreeSet<u32>,
}

impl Ledger {
    /// The step that was sealed last.
    pub(crate) fn newest(&self) -> Option<u64> {
        self.generations[0].step
    }

    /// The newest step of which this rank knows that all ranks have it whole.
    pub(crate) fn committed(&self) -> Option<u64> {
        self.committed
    }

    /// Begins a generation in place of the older one. All ranks have the newest whole.
    pub(crate) fn begin(&mut self, step: u64) {
        self.committed = self.newest();
        self.generations.swap(0, 1);
        self.generations[0] = Generation { step: Some(step), whole: BTreeSet::new() };
    }

    /// The state of a rank is here, of the newest generation.
    pub(crate) fn mark_whole(&mut self, owner: u32) {
        self.generations[0].whole.insert(owner);
    }

    /// Whether a rank's state is here, of the newest generation if there is one.
    pub(crate) fn is_whole(&self, owner: u32) -> bool {
        let [newest, _] = &self.generations;
        newest.step.is_none() || newest.whole.contains(&owner)
    }

    /// The generations' steps, the newest first, and of which ranks the state is whole.
    pub(crate) fn whole(&self) -> [(Option<u64>, &BTreeSet<u32>); 2] {
        self.generations.each_ref().map(|generation| (generation.step, &generation.whole))
    }
}

/// What a rank brings to a restore.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Report {
    /// Nothing of a newcomer.
    pub(crate) member: Option<Member>,
    pub(crate) committed: Option<u64>,
    pub(crate) stored: Vec<StoredState>,
    /// Ranks whose states this one asks for, beside its own.
    pub(crate) requests: Vec<u32>,
}

/// Who a rank was when its state was protected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    /// Which protection.
    pub(crate) id: u64,
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
}

/// A state that is whole at a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StoredState {
    pub(crate) owner: u32,
    pub(crate) step: u64,
    pub(crate) bytes: u64,
}

impl Report {
    pub(crate) fn encode(&self) -> Vec<u64> {
        let member = self.member.map_or([0; 4], |of| [1, of.id, of.rank.into(), of.ranks.into()]);
        let committed = self.committed.map_or([0; 2], |step| [1, step]);
        let stored = self.stored.iter().flat_map(|state| [state.owner.into(), state.step, state.bytes]);
        let mut numbers = [member.as_slice(), &committed, &[self.stored.len() as u64]].concat();
        numbers.extend(stored);
        numbers.extend(self.requests.iter().map(|rank| u64::from(*rank)));
        numbers
    }

    /// The report in a peer's numbers; `None` where they are none.
    pub(crate) fn decode(numbers: &[u64]) -> Option<Self> {
        let (&[is_member, id, rank, ranks, is_committed, committed, states], more) =
            numbers.split_first_chunk::<7>()?;
        let (rank, ranks) = (u32::try_from(rank).ok()?, u32::try_from(ranks).ok()?);
        let bytes = usize::try_from(states).ok()?.checked_mul(3)?;
        let (stored, requests) = more.split_at_checked(bytes)?;
        let state = |state: &[u64; 3]| {
            let &[owner, step, bytes] = state;
            Some(StoredState { owner: u32::try_from(owner).ok()?, step, bytes })
        };
        let (stored, _) = stored.as_chunks::<3>();
        Some(Self {
            member: (is_member == 1).then_some(Member { id, rank, ranks }),
            committed: (is_committed == 1).then_some(committed),
            stored: stored.iter().map(state).collect::<Option<_>>()?,
            requests: requests.iter().map(|rank| u32::try_from(*rank).ok()).collect::<Option<_>>()?,
        })
    }
}

/// How all ranks restore.
#[derive(Debug)]
pub(crate) struct RestorePlan {
    pub(crate) step: u64,
    /// Ranks as they were, of which none is left.
    pub(crate) lost: Vec<Rank>,
    /// In the order in which every rank begins its own.
    pub(crate) transfers: Vec<StateTransfer>,
}

/// A state that goes to a rank, perhaps from itself. Ranks are those of now, but for the owner.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StateTransfer {
    pub(crate) owner: u32,
    pub(crate) bytes: u64,
    pub(crate) from: u32,
    pub(crate) to: u32,
    /// Whether it goes back to its owner.
    pub(crate) own: bool,
}

/// Agrees on the newest step that is whole of every rank, present or lost. It also agrees on who gives whom which
/// state. The same at all ranks that have the same reports, which are by rank.
pub(crate) fn agree(reports: &[Report]) -> Result<RestorePlan, ProtectionError> {
    let mut members = reports.iter().filter_map(|report| report.member);
    let first = members.next().ok_or(ProtectionError::NothingSealed)?;
    if members.any(|other| (other.id, other.ranks) != (first.id, first.ranks)) {
        return Err(ProtectionError::Differ("they restore from different protections".into()));
    }
    // By step and owner, who has it and in how many bytes.
    let mut steps = BTreeMap::<u64, BTreeMap<u32, Vec<(u32, u64)>>>::new();
    for (at, report) in (0..).zip(reports) {
        for state in report.stored.iter().filter(|state| state.owner < first.ranks) {
            steps.entry(state.step).or_default().entry(state.owner).or_default().push((at, state.bytes));
        }
    }
    let Some((step, owners)) = steps.iter().rfind(|(_, owners)| owners.len() == first.ranks as usize) else {
        let committed = reports.iter().filter_map(|report| report.committed).max();
        let owners = steps.get(&committed.ok_or(ProtectionError::NothingSealed)?);
        let missing = |owner: &u32| !owners.is_some_and(|owners| owners.contains_key(owner));
        let ranks = (0..first.ranks).filter(missing).map(Rank).collect();
        return Err(ProtectionError::TooManyLost { ranks });
    };
    let mut transfers = Vec::new();
    for (to, report) in (0..).zip(reports) {
        let back = report.member.map(|member| (true, member.rank));
        let others = report.requests.iter().map(|owner| (false, *owner));
        for (own, owner) in back.into_iter().chain(others) {
            let absent = ProtectionError::NoRank { rank: Rank(owner), ranks: first.ranks };
            let sources = owners.get(&owner).ok_or(absent)?;
            // Ranks that ask for the same state share out who sends it.
            let other = sources.get(to as usize % sources.len().max(1));
            if let Some(&(from, bytes)) = sources.iter().find(|(at, _)| *at == to).or(other) {
                transfers.push(StateTransfer { owner, bytes, from, to, own });
            }
        }
    }
    let left: BTreeSet<u32> = reports.iter().filter_map(|report| Some(report.member?.rank)).collect();
    let lost = (0..first.ranks).filter(|rank| !left.contains(rank)).map(Rank).collect();
    Ok(RestorePlan { step: *step, lost, transfers })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protection::random::Random;
    use crate::protection::replicas::place;

    /// A rank that seals step after step, and what lies in its images.
    #[derive(Default)]
    struct Sealing {
        ledger: Ledger,
        /// The step of each owner's image, the newest generation first; `None` while it is overwritten.
        images: [BTreeMap<u32, Option<u64>>; 2],
        /// Generations begun, and votes given and counted.
        begun: usize,
        voted: usize,
        counted: usize,
        /// Whether its agent copies its tensors still.
        copying: bool,
        /// Holders that have not acknowledged, and how far each is.
        sending: BTreeMap<u32, u8>,
        /// Owners whose replica has not come.
        receiving: BTreeSet<u32>,
    }

    impl Sealing {
        fn is_done(&self) -> bool {
            !self.copying && self.sending.is_empty() && self.receiving.is_empty()
        }

        fn image(&self, owner: u32, step: u64) -> bool {
            self.images.iter().any(|images| images.get(&owner) == Some(&Some(step)))
        }
    }

    struct World {
        domains: Vec<u64>,
        replicas: u32,
        holders: Vec<Vec<u32>>,
        ranks: Vec<Sealing>,
        /// Of each call of `seal`, the ranks that had the step before whole.
        votes: Vec<Vec<bool>>,
    }

    const FIRST_STEP: u64 = 10;

    impl World {
        fn new(random: &mut Random) -> Self {
            let hosts = 2 + random.below(4);
            let domains: Vec<u64> =
                (0..hosts).chain((0..random.below(6)).map(|_| random.below(hosts))).collect();
            let replicas = random.below(hosts.min(3)) as u32;
            let holders = place(&domains, replicas).unwrap();
            let ranks = domains.iter().map(|_| Sealing::default()).collect();
            Self { domains, replicas, holders, ranks, votes: Vec::new() }
        }

        fn begin(&mut self, rank: usize, step: u64) {
            let stored = (0..).zip(&self.holders).filter(|(_, holders)| holders.contains(&(rank as u32)));
            let receiving = stored.map(|(owner, _)| owner).collect();
            let sealing = &mut self.ranks[rank];
            sealing.ledger.begin(step);
            sealing.images.swap(0, 1);
            sealing.images[0] = BTreeMap::from([(rank as u32, None)]);
            sealing.copying = true;
            sealing.receiving = receiving;
            sealing.begun += 1;
        }

        /// Something that a rank does, or nothing where it has to wait.
        fn advance(&mut self, rank: usize, random: &mut Random) {
            let sealing = &mut self.ranks[rank];
            if random.below(3) == 0 {
                if sealing.voted == sealing.counted {
                    self.votes.resize(self.votes.len().max(sealing.voted + 1), Vec::new());
                    self.votes[sealing.voted].push(sealing.is_done());
                    sealing.voted += 1;
                } else if self.votes[sealing.counted].len() == self.domains.len() {
                    let call = sealing.counted;
                    sealing.counted += 1;
                    if self.votes[call].iter().all(|done| *done) {
                        self.begin(rank, FIRST_STEP + call as u64);
                    }
                }
                return;
            }
            let (begun, step) = (sealing.begun, sealing.ledger.newest());
            if sealing.copying && random.below(2) == 0 {
                sealing.copying = false;
                sealing.images[0].insert(rank as u32, step);
                sealing.ledger.mark_whole(rank as u32);
                sealing.sending = self.holders[rank].iter().map(|holder| (*holder, 0)).collect();
                return;
            }
            let count = sealing.sending.len() as u64;
            if count == 0 {
                return;
            }
            let holder = *sealing.sending.keys().nth(random.below(count) as usize).unwrap();
            let owner = rank as u32;
            let progress = sealing.sending[&holder];
            let receiver = &mut self.ranks[holder as usize];
            match progress {
                // Nothing lands before the holder has begun, too.
                0 if receiver.begun < begun => return,
                0 => {
                    receiver.images[0].insert(owner, None);
                }
                1 => {
                    receiver.images[0].insert(owner, step);
                    receiver.ledger.mark_whole(owner);
                    receiver.receiving.remove(&owner);
                }
                _ => {
                    self.ranks[rank].sending.remove(&holder);
                    return;
                }
            }
            self.ranks[rank].sending.insert(holder, progress + 1);
        }

        /// The newest step that is whole at every rank.
        fn whole_everywhere(&self) -> Option<u64> {
            let whole = |step: &u64| {
                (0..).zip(&self.holders).all(|(owner, holders): (u32, _)| {
                    holders.iter().chain([&owner]).all(|rank| self.ranks[*rank as usize].image(owner, *step))
                })
            };
            (FIRST_STEP..FIRST_STEP + self.votes.len() as u64).rev().find(whole)
        }

        fn report(&self, rank: usize, requests: Vec<u32>) -> Report {
            let ledger = &self.ranks[rank].ledger;
            let of = |(step, whole): (Option<u64>, &BTreeSet<u32>)| {
                let state = |owner: &u32| Some(StoredState { owner: *owner, step: step?, bytes: 64 });
                whole.iter().filter_map(state).collect::<Vec<_>>()
            };
            let member = Member { id: 5, rank: rank as u32, ranks: self.domains.len() as u32 };
            Report {
                member: Some(member),
                committed: ledger.committed(),
                stored: ledger.whole().map(of).concat(),
                requests,
            }
        }
    }

    /// One job that seals, loses ranks at some moment, and restores. Whether the loss was promised to be survived, and was.
    fn lose(seed: u64) -> (bool, bool) {
        let mut random = Random(seed);
        let mut world = World::new(&mut random);
        let ranks = world.domains.len();
        for _ in 0..random.below(120 * ranks as u64) {
            let rank = random.below(ranks as u64) as usize;
            world.advance(rank, &mut random);
        }
        let mut hosts: Vec<u64> =
            world.domains.iter().copied().collect::<BTreeSet<_>>().into_iter().collect();
        let most = if random.below(4) == 0 { hosts.len() as u64 } else { u64::from(world.replicas) + 1 };
        let losses = random.below(most) as usize;
        for _ in losses..hosts.len() {
            hosts.swap_remove(random.below(hosts.len() as u64) as usize);
        }
        let is_lost = |rank: usize| hosts.contains(&world.domains[rank]);
        let survivors: Vec<usize> = (0..ranks).filter(|rank| !is_lost(*rank)).collect();
        let mut requests =
            |_: &usize| (0..random.below(3)).map(|_| random.below(ranks as u64) as u32).collect();
        let mut reports: Vec<Report> =
            survivors.iter().map(|rank| world.report(*rank, requests(rank))).collect();
        reports.push(Report { requests: (0..ranks as u32).collect(), ..Report::default() });
        for report in &reports {
            assert_eq!(Report::decode(&report.encode()).as_ref(), Some(report), "seed {seed}");
        }
        let whole = world.whole_everywhere();
        let promised = losses <= world.replicas as usize && whole.is_some();
        match agree(&reports) {
            Ok(plan) => {
                assert!(
                    whole.is_none_or(|whole| plan.step >= whole),
                    "seed {seed}: {plan:?} after {whole:?}"
                );
                let requested: usize = reports.iter().map(|report| report.requests.len()).sum();
                assert_eq!(plan.transfers.len(), survivors.len() + requested, "seed {seed}");
                for transfer in &plan.transfers {
                    let source = survivors[transfer.from as usize];
                    let right = world.ranks[source].image(transfer.owner, plan.step);
                    assert!(right, "seed {seed}: {transfer:?} of step {} is torn or older", plan.step);
                    let back = transfer.own.then(|| survivors[transfer.to as usize] as u32);
                    assert!(back.is_none_or(|owner| owner == transfer.owner && transfer.from == transfer.to));
                }
                let lost: Vec<Rank> =
                    (0..ranks).filter(|rank| is_lost(*rank)).map(|rank| Rank(rank as u32)).collect();
                assert_eq!(plan.lost, lost, "seed {seed}");
                (promised, true)
            }
            Err(error) => {
                assert!(!promised, "seed {seed}: {error}, after {losses} hosts of step {whole:?}");
                if let ProtectionError::TooManyLost { ranks } = error {
                    assert!(!ranks.is_empty(), "seed {seed}");
                    for Rank(rank) in ranks {
                        let holders = world.holders[rank as usize].iter().chain([&rank]);
                        assert!(
                            holders.copied().all(|rank| is_lost(rank as usize)),
                            "seed {seed}: rank {rank}"
                        );
                    }
                }
                (promised, false)
            }
        }
    }

    #[test]
    fn every_loss_promised_to_be_survived_is() {
        let (mut promised, mut beyond, mut refused) = (0, 0, 0);
        for seed in 0..10_000 {
            match lose(seed) {
                (true, true) => promised += 1,
                (true, false) => panic!("seed {seed}: a promise was not kept"),
                (false, true) => beyond += 1,
                (false, false) => refused += 1,
            }
        }
        println!(
            "seeds 0 to 9999: {promised} losses promised and survived, {beyond} more survived, {refused} not"
        );
        assert!(promised > 2_000 && beyond > 100 && refused > 100, "{promised}, {beyond}, {refused}");
    }

    #[test]
    fn a_generation_without_the_own_state_is_not_whole() {
        let mut ledger = Ledger::default();
        assert!(ledger.is_whole(1), "nothing was sealed");
        ledger.begin(3);
        assert!(!ledger.is_whole(1));
        ledger.mark_whole(2);
        assert!(!ledger.is_whole(1) && ledger.is_whole(2));
        ledger.mark_whole(1);
        assert!(ledger.is_whole(1));
    }

    #[test]
    fn what_peers_send_is_checked() {
        let member = |id| Some(Member { id, rank: 0, ranks: 2 });
        let stored =
            vec![StoredState { owner: 0, step: 3, bytes: 8 }, StoredState { owner: 1, step: 3, bytes: 8 }];
        let report = Report { member: member(1), stored, ..Report::default() };
        let numbers = report.encode();
        assert_eq!(Report::decode(&numbers), Some(report.clone()));
        assert_eq!(Report::decode(&numbers[..numbers.len() - 1]), None);
        assert_eq!(Report::decode(&[0; 6]), None);
        assert_eq!(Report::decode(&[0, 0, 0, 0, 0, 0, u64::MAX]), None);
        assert_eq!(Report::decode(&[1, 0, 1 << 32, 0, 0, 0, 0]), None);
        assert!(matches!(agree(&[]), Err(ProtectionError::NothingSealed)));
        let other = Report { member: member(2), ..Report::default() };
        assert!(matches!(agree(&[report.clone(), other]), Err(ProtectionError::Differ(_))));
        let greedy = Report { requests: vec![2], ..report };
        assert!(matches!(agree(&[greedy]), Err(ProtectionError::NoRank { rank: Rank(2), ranks: 2 })));
    }
}
