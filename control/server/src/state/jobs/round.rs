//! A round: which hosts each job has until the next, by a policy of the allocator.

use super::links::Predictions;
use crate::state::settings::LivePolicy;
use harmonaize_abi::session::{BidError, JobBid, Price};
use harmonaize_allocator::{
    Allocation, AllocationError, Candidate, Demand, Epoch, Facts, Fifo, Inventory, InventoryError, Job, Kind,
    KindId, LeastAttained, MarketError, Model, ModelError, Noise, Placement, Policy, PolicyError, Profile,
    ProfileError, Ranges, Round, StepTime, Traded, clear_jobs,
};
use harmonaize_api::v1::AllocationReason;
use harmonaize_planner::{HostId, Topology};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::num::TryFromIntError;
use std::time::Duration;

/// How often a round clears the market at most. Each time it does so without those that have won, and find their hosts taken.
const MOST_CLEARINGS: u32 = 4;

/// Why a policy cannot decide. The text goes to operators.
#[derive(Debug, thiserror::Error)]
pub(super) enum ShareError {
    /// More hosts than are counted.
    #[error(transparent)]
    Hosts(#[from] TryFromIntError),
    /// The hosts make no inventory.
    #[error(transparent)]
    Inventory(#[from] InventoryError),
    /// The jobs make no profile.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// The jobs make no model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The policy fails.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The policy gives what is not there.
    #[error(transparent)]
    Allocation(#[from] AllocationError),
    /// The market does not clear.
    #[error(transparent)]
    Market(#[from] MarketError),
    /// A price is none.
    #[error(transparent)]
    Price(#[from] BidError),
}

/// What a round decides by.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules<'a> {
    /// The policy.
    pub policy: LivePolicy,
    /// What an hour of a host costs at least, by kind.
    pub base_prices: &'a BTreeMap<String, Price>,
}

impl Rules<'_> {
    /// What an hour of a host of a kind costs at least.
    fn base_price(&self, kind: &str) -> Price {
        self.base_prices.get(kind).copied().unwrap_or_default()
    }
}

/// The price of a kind, for a job that has hosts of it, or has bid for them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Quote {
    /// The kind; empty for hosts of which none is named.
    pub kind: String,
    /// The price of a worker, an hour.
    pub price: Price,
}

/// A job that a round decides about.
#[derive(Clone, Debug)]
pub(super) struct Wish {
    /// The tenant's name, and the job's.
    pub key: (String, String),
    /// The job's number, in order of arrival.
    pub number: usize,
    /// The fewest and the most workers.
    pub workers: (u32, u32),
    /// Since when it is there.
    pub arrived: Duration,
    /// What its workers have had: time of hosts.
    pub attained: Duration,
    /// Hosts where it may have a worker.
    pub hosts: BTreeSet<HostId>,
    /// How many of one kind it could have without other jobs.
    pub most_hosts: usize,
    /// Hosts that it has, by rank.
    pub current: Vec<HostId>,
    /// What it bids; the base price where its tenant has said nothing.
    pub bid: Option<JobBid>,
    /// It keeps its hosts: until its next cheap moment.
    pub stays: bool,
}

/// What a round decided about a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Share {
    /// Its hosts, by rank: those that it had come first. None: it waits.
    pub hosts: Vec<HostId>,
    /// Why.
    pub reason: AllocationReason,
    /// The same for people.
    pub text: String,
    /// The price of the kind that it has or bid for.
    pub quote: Option<Quote>,
}

impl Share {
    fn none(reason: AllocationReason, text: String) -> Self {
        Self { hosts: Vec::new(), reason, text, quote: None }
    }
}

/// What a round decided.
#[derive(Clone, Debug, Default)]
pub(super) struct Shared {
    /// About each job.
    pub shares: Vec<Share>,
    /// The price of each kind for which jobs could bid.
    pub prices: BTreeMap<String, Price>,
}

/// What each job has until the next round: the policy gives the fewest workers of a job's range, or nothing. Hosts that are left over go
/// to those that run, one to each in turn. All hosts of a job are of one kind. Of hosts that nobody else needs more, a job gets those where
/// its operations are predicted to take least. In a market a job gets as many workers as its bids win, and none is left over for others.
/// Where hosts that a bid has won are kept by others, the market is cleared again without that bid.
///
/// # Errors
/// Why the policy cannot decide.
pub(super) fn share(
    rules: Rules<'_>,
    now: Duration,
    wishes: &[Wish],
    predictions: Predictions<'_>,
) -> Result<Shared, ShareError> {
    let (policy, topology) = (rules.policy, predictions.topology());
    let mut shares: Vec<Share> = wishes
        .iter()
        .map(|wish| {
            let (hosts, least) = (wish.most_hosts, wish.workers.0);
            if hosts >= least as usize {
                return Share::none(AllocationReason::NoRoom, String::new());
            }
            let of =
                if by_kind(topology, wish.hosts.iter().copied()).len() > 1 { " of one kind" } else { "" };
            let text = format!("its runners are on {hosts} hosts{of} that may be used, and it needs {least}");
            Share::none(AllocationReason::TooFewRunners, text)
        })
        .collect();
    let enough = |wish: &Wish| most_of_one_kind(topology, wish.hosts.iter().copied());
    let feasible = |wish: &Wish| wish.workers.0 > 0 && enough(wish) >= wish.workers.0 as usize;
    // Between rounds, too, nobody passes by an earlier job that could use what is free.
    let lacks = |wish: &Wish| !feasible(wish) && wish.most_hosts >= wish.workers.0 as usize;
    let first = wishes.iter().position(lacks).filter(|_| policy == LivePolicy::Fifo);
    let reached = wishes.iter().take(first.unwrap_or(wishes.len()));
    let considered: Vec<usize> =
        reached.enumerate().filter(|(_, wish)| feasible(wish)).map(|(at, _)| at).collect();
    let of = |at: &usize| wishes.get(*at);
    let pool: BTreeSet<HostId> =
        considered.iter().filter_map(of).flat_map(|wish| wish.hosts.iter().copied()).collect();
    let pools: Vec<(&str, Vec<HostId>)> = by_kind(topology, pool.into_iter()).into_iter().collect();
    let mut places = Places::new(wishes, predictions);
    // Who has hosts keeps them before others are placed; first of all who stays for a while.
    let order =
        |at: &usize| of(at).map_or(2, |wish| 2 - u8::from(!wish.current.is_empty()) - u8::from(wish.stays));
    let (mut bidding, mut clearings) = (considered, 0);
    let (mut running, prices) = loop {
        clearings += 1;
        places.taken.clear();
        let bidders: Vec<&Wish> = bidding.iter().filter_map(of).collect();
        let Decided { given, quotes, prices } = match policy {
            LivePolicy::Market => clear(rules, &pools, &bidders)?,
            LivePolicy::Fifo => decide(now, &pools, &bidders, |round| Fifo.allocate(round))?,
            LivePolicy::LeastAttained => {
                decide(now, &pools, &bidders, |round| in_place(round, LeastAttained.allocate(round)?))?
            }
        };
        let mut decisions: Vec<(usize, Option<Given>, Option<Quote>)> =
            bidding.iter().zip(given).zip(quotes).map(|((at, given), quote)| (*at, given, quote)).collect();
        decisions.sort_by_key(|(at, ..)| order(at));
        let (mut running, mut without, mut unplaced) = (Vec::new(), Vec::new(), BTreeSet::new());
        for (at, given, quote) in decisions {
            let (Some(wish), Some(share)) = (wishes.get(at), shares.get_mut(at)) else { continue };
            // Who stays was outbid in the first clearing, and has its price.
            let quote = share.quote.take().filter(|_| wish.stays).or(quote);
            *share = Share { quote, ..Share::none(AllocationReason::NoRoom, String::new()) };
            if wish.stays {
                share.hosts = places.keep(&wish.current);
                continue;
            }
            let Some(given) = given else { continue };
            let Some((kind, pool)) = pools.get(given.kind.0) else { continue };
            let preferred = given.preferred.iter().filter_map(|each| pool.get(*each as usize).copied());
            let preferred: Vec<HostId> = preferred.collect();
            let hosts = places.take((wish, *kind), &[], &preferred, wish.workers.0 as usize);
            if hosts.is_empty() {
                without.push((at, given.most));
            } else {
                share.hosts = hosts;
                running.push((at, *kind, given.most));
            }
        }
        // The policy counts hosts, also those where the job has no runner. Another kind may have room where it has some.
        for (at, most) in without {
            let (Some(wish), Some(share)) = (wishes.get(at), shares.get_mut(at)) else { continue };
            for (kind, _) in &pools {
                let price = prices.get(*kind).copied();
                let bid = wish.bid.map_or(rules.base_price(kind), |bid| bid.least);
                if price.is_some_and(|price| price > bid) {
                    continue;
                }
                share.hosts = places.take((wish, *kind), &[], &[], wish.workers.0 as usize);
                if !share.hosts.is_empty() {
                    share.quote = price.map(|price| Quote { kind: (*kind).to_owned(), price });
                    running.push((at, *kind, most));
                    break;
                }
            }
            if share.hosts.is_empty() {
                unplaced.insert(at);
            }
        }
        // What it has won stands idle, and another's bid must not have lost to that.
        if policy != LivePolicy::Market || unplaced.is_empty() || clearings >= MOST_CLEARINGS {
            break (running, prices);
        }
        bidding.retain(|at| !unplaced.contains(at));
    };
    running.sort_unstable();
    loop {
        let mut grew = false;
        for (at, kind, most) in &running {
            let (Some(wish), Some(share)) = (wishes.get(*at), shares.get_mut(*at)) else { continue };
            if share.hosts.len() < *most as usize {
                let more = places.take((wish, *kind), &share.hosts, &[], 1);
                grew |= !more.is_empty();
                share.hosts.extend(more);
            }
        }
        if !grew {
            break;
        }
    }
    for (wish, share) in wishes.iter().zip(&mut shares) {
        share.hosts = by_rank(&wish.current, &share.hosts);
        if share.reason != AllocationReason::TooFewRunners {
            (share.reason, share.text) = reason(rules, wish, share);
        }
    }
    Ok(Shared { shares, prices })
}

/// Why a job that could run has what it has.
fn reason(rules: Rules<'_>, wish: &Wish, share: &Share) -> (AllocationReason, String) {
    let (named, has, (least, most)) = (rules.policy.name(), share.hosts.len(), wish.workers);
    let more = has.saturating_sub(least as usize);
    let Some(Quote { kind, price }) = &share.quote else {
        return match has {
            0 => (
                AllocationReason::NoRoom,
                format!("policy {named} gives hosts that it could use to other jobs"),
            ),
            _ if has >= most as usize => (AllocationReason::Most, format!("it has all {most} that it may")),
            _ if more > 0 => (
                AllocationReason::Spare,
                format!("{more} of {has} are spare, and go once another job needs them"),
            ),
            _ => (
                AllocationReason::Least,
                format!("policy {named} gives it its fewest, {least}; no other is spare"),
            ),
        };
    };
    let of = if kind.is_empty() { String::new() } else { format!(" of kind {kind}") };
    let bid = wish.bid.unwrap_or(JobBid::of(rules.base_price(kind)));
    let (first, further) = (bid.least, bid.further);
    let outbid = format!("outbid: the price{of} is {price}, its bid {first}");
    match has {
        _ if wish.stays => (
            AllocationReason::Outbid,
            format!("{outbid}, for further ones {further}; it keeps what it has until its next checkpoint"),
        ),
        0 if first < *price => (AllocationReason::Outbid, outbid),
        0 if first == *price && first > rules.base_price(kind) => (
            AllocationReason::Outbid,
            format!("outbid: its bid {first} is the highest that gets no host{of}, and so the price"),
        ),
        0 => (
            AllocationReason::NoRoom,
            format!(
                "the price{of} is {price}, its bid {first}; fewer hosts than its {least} are left at that"
            ),
        ),
        _ if has >= most as usize => (
            AllocationReason::Most,
            format!("it has all {most} that it may, at {price} each{of}; its bid {first}"),
        ),
        _ if more > 0 => (
            AllocationReason::Spare,
            format!("{more} of {has} are further ones, at {price} each{of}; its bid for those {further}"),
        ),
        _ => (
            AllocationReason::Least,
            format!(
                "it has its fewest, {least}, at {price} each{of}; its bid {first}, for further ones {further}"
            ),
        ),
    }
}

/// Hosts by kind; under an empty one those of which none is named.
fn by_kind(topology: &Topology, hosts: impl Iterator<Item = HostId>) -> BTreeMap<&str, Vec<HostId>> {
    let mut kinds: BTreeMap<&str, Vec<HostId>> = BTreeMap::new();
    for host in hosts {
        kinds.entry(topology.kind(host)).or_default().push(host);
    }
    kinds
}

/// How many of these hosts are of the kind that most are of.
pub(super) fn most_of_one_kind(topology: &Topology, hosts: impl Iterator<Item = HostId>) -> usize {
    by_kind(topology, hosts).values().map(Vec::len).max().unwrap_or(0)
}

/// A job's place in the policy's order: the least goes first. `bid` is for each of its fewest workers.
pub(super) fn precedence(
    policy: LivePolicy,
    (attained, bid): (Duration, Price),
    number: usize,
) -> (u128, usize) {
    match policy {
        LivePolicy::Fifo => (0, number),
        LivePolicy::LeastAttained => (attained.as_nanos(), number),
        LivePolicy::Market => (u128::from(u64::MAX - bid.0), number),
    }
}

/// What a policy gives to the jobs that a round considers, in their order.
struct Decided {
    given: Vec<Option<Given>>,
    /// The price of the kind for which each has bid.
    quotes: Vec<Option<Quote>>,
    /// The price of each kind.
    prices: BTreeMap<String, Price>,
}

/// Hosts for a job's fewest workers.
struct Given {
    /// Their kind, by its place among the pools.
    kind: KindId,
    /// Places of those that the policy prefers in the kind's pool.
    preferred: Vec<u32>,
    /// The most workers that it may have.
    most: u32,
}

/// Returns what the market gives. Each host of the pools is traded.
fn clear(rules: Rules<'_>, pools: &[(&str, Vec<HostId>)], wishes: &[&Wish]) -> Result<Decided, ShareError> {
    let traded = |(name, hosts): &(&str, Vec<HostId>)| -> Result<Traded, ShareError> {
        let base_price = rules.base_price(name).an_hour();
        Ok(Traded { name: (*name).to_owned(), units: u32::try_from(hosts.len())?, base_price })
    };
    let traded: Vec<Traded> = pools.iter().map(traded).collect::<Result<_, _>>()?;
    let demand = |wish: &&Wish| -> Result<Demand, ShareError> {
        let usable = pools
            .iter()
            .map(|(_, pool)| u32::try_from(pool.iter().filter(|host| wish.hosts.contains(host)).count()));
        Ok(Demand {
            units: wish.workers,
            usable: usable.collect::<Result<_, _>>()?,
            highest: wish.bid.map(|bid| (bid.least.an_hour(), bid.further.an_hour())),
            current: current(wish, pools).0,
        })
    };
    let demands: Vec<Demand> = wishes.iter().map(demand).collect::<Result<_, _>>()?;
    let cleared = clear_jobs(&traded, &demands)?;
    let prices: Vec<Price> =
        cleared.prices.iter().map(|price| Price::new(*price)).collect::<Result<_, _>>()?;
    let named = |kind: KindId| pools.get(kind.0).map(|(name, _)| (*name).to_owned());
    let quote = |kind: Option<KindId>| {
        let kind = kind?;
        Some(Quote { kind: named(kind)?, price: *prices.get(kind.0)? })
    };
    let given = cleared
        .won
        .into_iter()
        .map(|won| won.map(|won| Given { kind: won.kind, preferred: Vec::new(), most: won.units }));
    Ok(Decided {
        given: given.collect(),
        quotes: cleared.bid_for.into_iter().map(quote).collect(),
        prices: pools.iter().zip(&prices).map(|((name, _), price)| ((*name).to_owned(), *price)).collect(),
    })
}

/// Returns what `allocate`, the policy, gives of these hosts by kind. How fast live jobs compute on which kind is not known. So it sees kinds as alike,
/// and favours the one of which a job has hosts.
fn decide(
    now: Duration,
    pools: &[(&str, Vec<HostId>)],
    wishes: &[&Wish],
    allocate: impl FnOnce(&Round<'_>) -> Result<Vec<Option<Allocation>>, PolicyError>,
) -> Result<Decided, ShareError> {
    let (quotes, prices) = (vec![None; wishes.len()], BTreeMap::new());
    if pools.is_empty() {
        return Ok(Decided { given: Vec::new(), quotes, prices });
    }
    let kind = |(name, hosts): &(&str, Vec<HostId>)| -> Result<Kind, ShareError> {
        let hosts = u32::try_from(hosts.len())?;
        Ok(Kind { name: (*name).to_owned(), hosts, accelerators: 1, job_hosts: hosts })
    };
    let kinds: Result<Vec<Kind>, ShareError> = pools.iter().map(kind).collect();
    let inventory = Inventory::new(kinds?)?;
    let model =
        |favoured: Option<KindId>| any_model(wishes.iter().map(|wish| wish.workers.0), pools.len(), favoured);
    let (any, favouring) = (model(None)?, inventory.kinds().map(|(id, _)| model(Some(id))));
    let favouring: Vec<Model> = favouring.collect::<Result<_, _>>()?;
    let current: Vec<(Option<KindId>, Option<Allocation>)> =
        wishes.iter().map(|wish| current(wish, pools)).collect();
    let jobs: Vec<Job> = wishes
        .iter()
        .map(|wish| {
            let (least, most) = wish.workers;
            Job {
                name: wish.number.to_string(),
                arrival: wish.arrived.as_secs_f64(),
                model: 0,
                workers: least,
                batch: least,
                ranges: Ranges { workers: least..=most, kinds: kinds_for(wish, pools), batch: least..=least },
            }
        })
        .collect();
    let candidates: Vec<Candidate<'_>> = wishes
        .iter()
        .zip(&jobs)
        .zip(&current)
        .map(|((wish, job), (kind, current))| Candidate {
            number: wish.number,
            job,
            model: kind.and_then(|kind| favouring.get(kind.0)).unwrap_or(&any),
            age: now.saturating_sub(wish.arrived).as_secs_f64(),
            restarts: 0,
            attained: wish.attained.as_secs_f64(),
            is_starting: false,
            current: current.as_ref(),
            fitted: &[],
            noise: None,
            most_workers: wish.workers.1,
        })
        .collect();
    let round = Round { inventory: &inventory, seconds: 0.0, jobs: &candidates };
    let given = allocate(&round)?;
    harmonaize_allocator::check(&inventory, &given)?;
    let of = |(given, wish): (Option<Allocation>, &&Wish)| {
        let Allocation { kind, accelerators: preferred } = given?;
        Some(Given { kind, preferred, most: wish.workers.1 })
    };
    Ok(Decided { given: given.into_iter().zip(wishes).map(of).collect(), quotes, prices })
}

/// The same jobs have hosts, and those that run have theirs as before, where that goes. Else one that comes first by the policy could take
/// theirs though others are free.
fn in_place(
    round: &Round<'_>,
    given: Vec<Option<Allocation>>,
) -> Result<Vec<Option<Allocation>>, PolicyError> {
    let won = round.jobs.iter().zip(&given).filter(|(_, given)| given.is_some());
    let won: Vec<Candidate<'_>> = won.map(|(job, _)| job.clone()).collect();
    let kept = Fifo.allocate(&Round { jobs: &won, ..*round })?;
    if kept.contains(&None) {
        return Ok(given);
    }
    let mut kept = kept.into_iter();
    Ok(given.into_iter().map(|given| given.and_then(|_| kept.next().flatten())).collect())
}

/// The kind of most hosts that a job has, and as many of them as its fewest workers; no such hosts where those are too few.
fn current(wish: &Wish, pools: &[(&str, Vec<HostId>)]) -> (Option<KindId>, Option<Allocation>) {
    let usable = || wish.current.iter().filter(|host| wish.hosts.contains(host));
    let count = |pool: &[HostId]| usable().filter(|host| pool.binary_search(host).is_ok()).count();
    let counts = pools.iter().enumerate().map(|(at, (_, pool))| (count(pool), Reverse(at), pool));
    let Some((_, Reverse(at), pool)) = counts.filter(|(count, ..)| *count > 0).max() else {
        return (None, None);
    };
    let place = |host: &HostId| u32::try_from(pool.binary_search(host).ok()?).ok();
    let accelerators: Vec<u32> = usable().filter_map(place).take(wish.workers.0 as usize).collect();
    let (kind, whole) = (KindId(at), accelerators.len() == wish.workers.0 as usize);
    (Some(kind), whole.then_some(Allocation { kind, accelerators }))
}

/// The kinds that a job may get: those of which it could have enough hosts.
fn kinds_for(wish: &Wish, pools: &[(&str, Vec<HostId>)]) -> Vec<KindId> {
    let enough = |(_, pool): &(&str, Vec<HostId>)| {
        pool.iter().filter(|host| wish.hosts.contains(host)).count() >= wish.workers.0 as usize
    };
    let able = pools.iter().enumerate().filter(|(_, pool)| enough(pool));
    able.map(|(at, _)| KindId(at)).collect()
}

/// A model whose steps take as long with any of these numbers of workers, on each of so many kinds. On one that is favoured they take
/// half: a job that has hosts of it gets others only where it has no room.
fn any_model(
    workers: impl Iterator<Item = u32>,
    kinds: usize,
    favoured: Option<KindId>,
) -> Result<Model, ShareError> {
    let counts: BTreeSet<u32> = workers.chain([1]).collect();
    let profile = |kind: usize| {
        let step = if favoured.is_some_and(|favoured| favoured.0 != kind) { 2.0 } else { 1.0 };
        let placement = |count: &u32| Placement {
            shape: vec![1; *count as usize],
            batch: 1,
            time: StepTime { step, exchange: 0.0 },
        };
        Profile::new(counts.iter().map(placement).collect(), Vec::new(), None).map(Some)
    };
    let profiles: Result<Vec<_>, _> = (0..kinds).map(profile).collect();
    let epoch = Epoch { progress: 1.0, noise: Noise { square: 1.0, variance: 1.0 } };
    let records = BTreeMap::from([(1, vec![epoch]), (u32::MAX, vec![epoch])]);
    let facts = Facts { name: "any".to_owned(), epochs: 1, restart: 0.0, restart_guess: 0.0, slowdown: 1.0 };
    Ok(Model::new(facts, records, profiles?)?)
}

/// Hosts that are taken, those that jobs had, and how many jobs may use each.
struct Places<'a> {
    taken: BTreeSet<HostId>,
    occupied: BTreeSet<HostId>,
    users: BTreeMap<HostId, usize>,
    predictions: Predictions<'a>,
}

impl<'a> Places<'a> {
    fn new(wishes: &[Wish], predictions: Predictions<'a>) -> Self {
        let mut users: BTreeMap<HostId, usize> = BTreeMap::new();
        for host in wishes.iter().flat_map(|wish| &wish.hosts) {
            *users.entry(*host).or_default() += 1;
        }
        let occupied = wishes.iter().flat_map(|wish| &wish.current).copied().collect();
        Self { taken: BTreeSet::new(), occupied, users, predictions }
    }

    /// Takes these, which a job has.
    fn keep(&mut self, hosts: &[HostId]) -> Vec<HostId> {
        hosts.iter().copied().filter(|host| self.taken.insert(*host)).collect()
    }

    /// Takes so many hosts of a kind for a job beside those that it `has` in this round, or none. First those that it had. Hosts that
    /// nothing reaches come last. Of the others it gets those that no other job had, then those that fewest others may use. Of them it
    /// gets those with the best predictions, then preferred ones.
    fn take(
        &mut self,
        (wish, kind): (&Wish, &str),
        has: &[HostId],
        preferred: &[HostId],
        count: usize,
    ) -> Vec<HostId> {
        let topology = self.predictions.topology();
        let free = wish.hosts.iter().filter(|host| !self.taken.contains(host)).copied();
        let free = free.filter(|host| topology.kind(*host) == kind);
        let (mut had, mut new): (Vec<HostId>, Vec<HostId>) =
            free.partition(|host| wish.current.contains(host));
        if had.len() + new.len() < count {
            return Vec::new();
        }
        let users = |host: &HostId| self.users.get(host).copied().unwrap_or(0);
        had.sort_by_cached_key(|host| (users(host), !preferred.contains(host), *host));
        had.truncate(count);
        let lacks = count - had.len();
        if lacks > 0 {
            let mut all: BTreeSet<HostId> = has.iter().chain(&had).copied().collect();
            // A worker alone has no operation: with another one links tell.
            let workers = (all.len() + lacks).max(2);
            let mut rank = |new: &mut Vec<HostId>, all: &BTreeSet<HostId>| {
                let scores = self.predictions.scores(&wish.key, all, new, workers);
                new.sort_by_cached_key(|host| {
                    let score = scores.get(host).copied();
                    let taste = (Reverse(score), !preferred.contains(host), *host);
                    (score == Some(0), self.occupied.contains(host), users(host), taste)
                });
            };
            rank(&mut new, &all);
            if all.is_empty() && lacks > 1 {
                // Who is to be beside whom is known once the first has a place.
                let mut others = new.split_off(1);
                all.extend(&new);
                rank(&mut others, &all);
                new.append(&mut others);
            }
            had.extend(new.into_iter().take(lacks));
        }
        self.taken.extend(&had);
        had
    }
}

/// Hosts by rank: those that a job had in their order, then the others.
fn by_rank(before: &[HostId], hosts: &[HostId]) -> Vec<HostId> {
    let mut others: Vec<HostId> = hosts.iter().filter(|host| !before.contains(host)).copied().collect();
    others.sort_unstable();
    before.iter().filter(|host| hosts.contains(host)).copied().chain(others).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::jobs::links::Links;
    use harmonaize_planner::{Conditions, DirectedLink, LinkId, LinkUse, Node, Rate};

    fn hosts(numbers: &[usize]) -> Vec<HostId> {
        numbers.iter().copied().map(HostId).collect()
    }

    fn wish(number: usize, workers: (u32, u32), on: &[usize], current: &[usize]) -> Wish {
        let arrived = Duration::from_secs(number as u64);
        let attained = Duration::from_secs(10 * current.len() as u64);
        let (on, current, most_hosts) = (hosts(on).into_iter().collect(), hosts(current), on.len());
        let (key, bid, stays) = (("a".to_owned(), number.to_string()), None, false);
        Wish { key, number, workers, arrived, attained, hosts: on, most_hosts, current, bid, stays }
    }

    fn shared(policy: LivePolicy, wishes: &[Wish]) -> Vec<(Vec<HostId>, AllocationReason)> {
        let topology = racks(4, [""; 4]);
        let conditions = Conditions::clear(&topology);
        shared_on(&topology, conditions, policy, wishes)
    }

    fn shared_on(
        topology: &Topology,
        conditions: Conditions,
        policy: LivePolicy,
        wishes: &[Wish],
    ) -> Vec<(Vec<HostId>, AllocationReason)> {
        let links = Links::unused(conditions);
        let predictions = Predictions::new(topology, &links);
        let rules = Rules { policy, base_prices: &BTreeMap::new() };
        let shares = share(rules, Duration::from_secs(100), wishes, predictions).unwrap().shares;
        shares.into_iter().map(|share| (share.hosts, share.reason)).collect()
    }

    /// Four hosts of these kinds in racks of so many; links 0 and 1 join both leaves to the spine.
    fn racks(of: usize, kinds: [&str; 4]) -> Topology {
        let switch = |name| format!("[[switch]]\nname = \"{name}\"\n");
        let link = |from: &str, to: &str| {
            let ends = format!("from = \"{from}\"\nto = \"{to}\"");
            format!("[[link]]\n{ends}\nrate = \"1Gbit/s\"\ndelay = \"50us\"\n")
        };
        let mut text = ["spine", "leaf0", "leaf1"].map(switch).concat();
        text += &["leaf0", "leaf1"].map(|leaf| link(leaf, "spine")).concat();
        for (at, kind) in kinds.into_iter().enumerate() {
            let kind = if kind.is_empty() { String::new() } else { format!("kind = \"{kind}\"\n") };
            text += &format!("[[host]]\nname = \"h{at}\"\n{kind}");
            text += &link(&format!("h{at}"), &format!("leaf{}", at / of));
        }
        Topology::parse(&text).unwrap()
    }

    #[test]
    fn two_hosts_of_a_rack_beat_two_across_a_full_spine() {
        let topology = racks(2, [""; 4]);
        let mut conditions = Conditions::clear(&topology);
        for (link, forward) in [(0, true), (0, false), (1, true), (1, false)] {
            conditions.set_available(DirectedLink { link: LinkId(link), forward }, Rate(10_000_000));
        }
        let of = |wishes: &[Wish]| shared_on(&topology, conditions.clone(), LivePolicy::Fifo, wishes);
        // By their numbers 0 and 2 would come first.
        assert_eq!(of(&[wish(0, (2, 2), &[0, 2, 3], &[])])[0].0, hosts(&[2, 3]));
        // One that grows stays in its rack while it can.
        assert_eq!(of(&[wish(0, (1, 2), &[0, 1, 2, 3], &[3])])[0].0, hosts(&[3, 2]));
        assert_eq!(of(&[wish(0, (1, 2), &[0, 1, 3], &[3])])[0].0, hosts(&[3, 0]));
        // Nobody moves for a better place, and hosts that others need more are left to them.
        assert_eq!(of(&[wish(0, (2, 2), &[0, 1, 2, 3], &[0, 2])])[0].0, hosts(&[0, 2]));
        let shares = of(&[wish(0, (2, 2), &[0, 2, 3], &[]), wish(1, (1, 1), &[3], &[])]);
        assert_eq!([&shares[0].0, &shares[1].0], [&hosts(&[0, 2]), &hosts(&[3])]);
    }

    #[test]
    fn a_job_has_hosts_of_one_kind() {
        let topology = racks(2, ["a100", "h100", "a100", "h100"]);
        for policy in LivePolicy::ALL {
            let of = |wishes: &[Wish]| shared_on(&topology, Conditions::clear(&topology), policy, wishes);
            let all = &[0, 1, 2, 3];
            assert_eq!(of(&[wish(0, (2, 4), all, &[])]), [(hosts(&[0, 2]), AllocationReason::Least)]);
            let shares = of(&[wish(0, (2, 2), all, &[]), wish(1, (1, 4), all, &[])]);
            assert_eq!([&shares[0].0, &shares[1].0], [&hosts(&[0, 2]), &hosts(&[1, 3])]);
            // Three hosts are there, and of no kind three.
            let shares = of(&[wish(0, (3, 3), all, &[])]);
            assert_eq!(shares[0].0, []);
            // It goes on with the one that it has, and gets another of that kind.
            assert_eq!(of(&[wish(0, (2, 2), all, &[3])])[0].0, hosts(&[3, 1]));
        }
    }

    #[test]
    fn a_kind_without_room_leaves_the_others() {
        let topology = racks(2, ["a100", "a100", "h100", "h100"]);
        for policy in LivePolicy::ALL {
            let of = |wishes: &[Wish]| {
                let shares = shared_on(&topology, Conditions::clear(&topology), policy, wishes);
                shares.into_iter().map(|(hosts, _)| hosts).collect::<Vec<_>>()
            };
            // By number there is an a100 for the second, and it has no runner there.
            let new =
                [wish(0, (1, 1), &[0], &[]), wish(1, (1, 1), &[0, 2], &[]), wish(2, (1, 1), &[1, 3], &[])];
            assert_eq!(of(&new), [hosts(&[0]), hosts(&[2]), hosts(&[3])]);
            // One that lost a worker goes to another kind, as its own has no second host.
            let lost = [wish(0, (1, 1), &[1], &[1]), wish(1, (2, 2), &[0, 1, 2, 3], &[0])];
            assert_eq!(of(&lost), [hosts(&[1]), hosts(&[2, 3])]);
        }
    }

    #[test]
    fn most_hosts_decide_a_jobs_kind() {
        let topology = racks(2, ["a100", "h100", "h100", "a100"]);
        let wishes = [wish(0, (2, 4), &[0, 1, 2, 3], &[0, 1, 2])];
        let shares = shared_on(&topology, Conditions::clear(&topology), LivePolicy::Fifo, &wishes);
        assert_eq!(shares[0].0, hosts(&[1, 2]));
    }

    #[test]
    fn who_comes_first_leaves_others_their_kind() {
        let topology = racks(2, ["a100", "a100", "h100", "h100"]);
        let all = &[0, 1, 2, 3];
        // The second has had less.
        let wishes = [wish(0, (2, 2), all, &[0, 1]), wish(1, (2, 2), all, &[])];
        for policy in LivePolicy::ALL {
            let shares = shared_on(&topology, Conditions::clear(&topology), policy, &wishes);
            assert_eq!([&shares[0].0, &shares[1].0], [&hosts(&[0, 1]), &hosts(&[2, 3])]);
        }
    }

    #[test]
    fn who_lacks_a_host_gets_an_idle_one() {
        let topology = racks(2, [""; 4]);
        let of = |wishes: &[Wish]| {
            shared_on(&topology, Conditions::clear(&topology), LivePolicy::Fifo, wishes)
                .into_iter()
                .map(|(hosts, _)| hosts)
                .collect::<Vec<_>>()
        };
        let all = &[0, 1, 2, 3];
        // Host 1 is the better place, and another job's.
        let lost = [wish(0, (2, 2), all, &[0]), wish(1, (1, 1), all, &[1])];
        assert_eq!(of(&lost), [hosts(&[0, 2]), hosts(&[1])]);
        // Hosts beyond the fewest stay too, where nobody needs them.
        let spare = [wish(0, (1, 2), all, &[0]), wish(1, (1, 2), all, &[1, 2])];
        assert_eq!(of(&spare), [hosts(&[0, 3]), hosts(&[1, 2])]);
    }

    #[test]
    fn too_few_hosts_of_one_kind_are_said_to_be() {
        let topology = racks(2, ["a100", "h100", "a100", ""]);
        let links = Links::unused(Conditions::clear(&topology));
        let wishes = [Wish { most_hosts: 2, ..wish(0, (3, 3), &[0, 1, 2, 3], &[]) }];
        let predictions = Predictions::new(&topology, &links);
        let rules = Rules { policy: LivePolicy::Fifo, base_prices: &BTreeMap::new() };
        let shares = share(rules, Duration::from_secs(100), &wishes, predictions).unwrap().shares;
        let text = "its runners are on 2 hosts of one kind that may be used, and it needs 3";
        assert_eq!((shares[0].reason, shares[0].text.as_str()), (AllocationReason::TooFewRunners, text));
    }

    #[test]
    fn a_host_on_a_taken_link_is_the_last_choice() {
        let topology = racks(2, [""; 4]);
        let mut conditions = Conditions::clear(&topology);
        let link = topology.links_at(Node::Host(HostId(0)))[0];
        for forward in [true, false] {
            conditions.set_available(DirectedLink { link, forward }, Rate(10_000_000));
        }
        let shares = shared_on(&topology, conditions, LivePolicy::Fifo, &[wish(0, (2, 2), &[0, 1, 2], &[])]);
        assert_eq!(shares[0].0, hosts(&[1, 2]));
    }

    #[test]
    fn a_host_that_nothing_reaches_comes_last() {
        let topology = racks(2, [""; 4]);
        let mut conditions = Conditions::clear(&topology);
        conditions.restrict(topology.links_at(Node::Host(HostId(0)))[0], LinkUse::Failed);
        // Fewer jobs may use it.
        let wishes = [wish(0, (2, 2), &[0, 1, 2], &[]), wish(1, (1, 1), &[1, 2, 3], &[])];
        let shares = shared_on(&topology, conditions, LivePolicy::Fifo, &wishes);
        assert_eq!([&shares[0].0, &shares[1].0], [&hosts(&[1, 2]), &hosts(&[3])]);
    }

    #[test]
    fn one_job_alone_has_all_that_it_may() {
        let shares = shared(LivePolicy::Fifo, &[wish(0, (2, 3), &[0, 1, 2, 3], &[])]);
        assert_eq!(shares, [(hosts(&[0, 1, 2]), AllocationReason::Most)]);
    }

    #[test]
    fn who_has_spare_hosts_makes_room_and_keeps_its_first() {
        let wishes = [wish(0, (1, 4), &[0, 1, 2, 3], &[3, 2, 1, 0]), wish(1, (2, 2), &[0, 1, 2, 3], &[])];
        let shares = shared(LivePolicy::Fifo, &wishes);
        assert_eq!(shares[0].1, AllocationReason::Spare);
        assert_eq!((shares[0].0.len(), shares[1].0.len()), (2, 2));
        assert!(shares[0].0.iter().all(|host| !shares[1].0.contains(host)));
    }

    #[test]
    fn too_few_runners_hold_nobody_back() {
        let wishes = [wish(0, (3, 3), &[0, 1], &[]), wish(1, (2, 2), &[0, 1], &[])];
        let shares = shared(LivePolicy::Fifo, &wishes);
        assert_eq!(shares[0], (vec![], AllocationReason::TooFewRunners));
        assert_eq!(shares[1], (hosts(&[0, 1]), AllocationReason::Most));
    }

    #[test]
    fn first_in_is_not_passed_by_between_rounds() {
        // The first could have three hosts, of which two are others'.
        let first = Wish { most_hosts: 3, ..wish(0, (2, 2), &[0], &[]) };
        let wishes = [first, wish(1, (1, 1), &[0], &[])];
        let fifo = shared(LivePolicy::Fifo, &wishes);
        assert_eq!([&fifo[0].0, &fifo[1].0], [&hosts(&[]), &hosts(&[])]);
        assert_eq!(shared(LivePolicy::LeastAttained, &wishes)[1].0, hosts(&[0]));
    }

    #[test]
    fn first_in_waits_for_nobody_and_least_attained_takes_turns() {
        let wishes = [wish(0, (2, 2), &[0, 1], &[0, 1]), wish(1, (2, 2), &[0, 1], &[])];
        let fifo = shared(LivePolicy::Fifo, &wishes);
        assert_eq!((fifo[0].0.len(), fifo[1].clone()), (2, (vec![], AllocationReason::NoRoom)));
        let least = shared(LivePolicy::LeastAttained, &wishes);
        assert_eq!((least[0].clone(), least[1].0.len()), ((vec![], AllocationReason::NoRoom), 2));
    }

    #[test]
    fn a_job_is_placed_where_its_runners_are() {
        let wishes = [wish(0, (1, 1), &[0, 1, 2], &[]), wish(1, (1, 1), &[0], &[])];
        assert_eq!(shared(LivePolicy::Fifo, &wishes)[1].0, hosts(&[0]));
    }
    /// What a market decides about jobs on four hosts at a base price of 0.5: hosts, reasons and texts, and the price.
    fn traded(wishes: &[Wish]) -> (Vec<(usize, AllocationReason, String)>, Price) {
        let topology = racks(2, ["a100"; 4]);
        let links = Links::unused(Conditions::clear(&topology));
        let base_prices = BTreeMap::from([("a100".to_owned(), Price(500_000))]);
        let rules = Rules { policy: LivePolicy::Market, base_prices: &base_prices };
        let predictions = Predictions::new(&topology, &links);
        let Shared { shares, prices } = share(rules, Duration::from_secs(100), wishes, predictions).unwrap();
        let of = |share: Share| (share.hosts.len(), share.reason, share.text);
        (shares.into_iter().map(of).collect(), prices["a100"])
    }

    fn bidding(wish: Wish, price: u64) -> Wish {
        Wish { bid: Some(JobBid::of(Price(price))), ..wish }
    }

    #[test]
    fn whoever_bids_more_takes_hosts_and_the_other_is_told_the_price() {
        let all = &[0, 1, 2, 3];
        let wishes = [
            bidding(wish(0, (2, 2), all, &[0, 1]), 600_000),
            bidding(wish(1, (3, 3), all, &[]), 700_000),
            bidding(wish(2, (1, 1), all, &[]), 650_000),
            bidding(wish(3, (1, 1), all, &[]), 640_000),
        ];
        let (shares, price) = traded(&wishes);
        assert_eq!(price, Price(640_000));
        assert_eq!(shares.iter().map(|share| share.0).collect::<Vec<_>>(), [0, 3, 1, 0]);
        let text = "outbid: the price of kind a100 is 0.64, its bid 0.60";
        assert_eq!((shares[0].1, shares[0].2.as_str()), (AllocationReason::Outbid, text));
        assert_eq!(shares[1].2, "it has all 3 that it may, at 0.64 each of kind a100; its bid 0.70");
    }

    #[test]
    fn below_the_base_price_nobody_gets_a_host() {
        let (shares, price) = traded(&[bidding(wish(0, (1, 4), &[0, 1, 2, 3], &[]), 490_000)]);
        let text = "outbid: the price of kind a100 is 0.50, its bid 0.49";
        assert_eq!((price, shares), (Price(500_000), vec![(0, AllocationReason::Outbid, text.to_owned())]));
        // Without a bid it is the base price.
        let (shares, price) = traded(&[wish(0, (1, 4), &[0, 1, 2, 3], &[])]);
        assert_eq!((price, shares[0].0, shares[0].1), (Price(500_000), 4, AllocationReason::Most));
    }

    #[test]
    fn who_stays_until_a_checkpoint_keeps_its_hosts() {
        let all = &[0, 1, 2, 3];
        let loses = bidding(wish(0, (2, 2), all, &[0, 1]), 600_000);
        let wins = bidding(wish(1, (3, 3), all, &[]), 700_000);
        let (shares, _) = traded(&[Wish { stays: true, ..loses.clone() }, wins.clone()]);
        assert_eq!((shares[0].0, shares[0].1, shares[1].0), (2, AllocationReason::Outbid, 0));
        assert!(shares[0].2.ends_with("it keeps what it has until its next checkpoint"), "{shares:?}");
        assert!(shares[1].2.ends_with("fewer hosts than its 3 are left at that"), "{shares:?}");
        let (shares, _) = traded(&[loses, wins]);
        assert_eq!((shares[0].0, shares[1].0), (0, 3));
    }

    #[test]
    fn a_bid_for_hosts_that_are_taken_puts_nobody_out() {
        // The second wins a host, and has a runner where the first keeps its own alone.
        let wishes = [
            bidding(wish(0, (1, 1), &[0], &[0]), 800_000),
            bidding(wish(1, (1, 1), &[0], &[]), 900_000),
            bidding(wish(2, (1, 1), &[1], &[1]), 600_000),
        ];
        let (shares, price) = traded(&wishes);
        assert_eq!(shares.iter().map(|share| share.0).collect::<Vec<_>>(), [1, 0, 1], "{shares:?}");
        assert_eq!((price, shares[1].1), (Price(500_000), AllocationReason::NoRoom));
        // Nor does one that waits for hosts until another's checkpoint.
        let all = &[0, 1, 2, 3];
        let stays = Wish { stays: true, ..bidding(wish(0, (2, 2), all, &[0, 1]), 600_000) };
        let wishes = [
            stays,
            bidding(wish(1, (4, 4), all, &[]), 700_000),
            bidding(wish(2, (1, 1), all, &[2]), 550_000),
        ];
        let (shares, _) = traded(&wishes);
        assert_eq!(shares.iter().map(|share| share.0).collect::<Vec<_>>(), [2, 0, 1], "{shares:?}");
        assert!(
            shares[0].2.starts_with("outbid: the price of kind a100 is 0.60, its bid 0.60"),
            "{shares:?}"
        );
    }

    #[test]
    fn the_highest_bid_without_a_host_is_the_price() {
        let all = &[0, 1, 2, 3];
        let wishes =
            [bidding(wish(0, (4, 4), all, &[]), 700_000), bidding(wish(1, (1, 1), all, &[]), 600_000)];
        let (shares, price) = traded(&wishes);
        let text = "outbid: its bid 0.60 is the highest that gets no host of kind a100, and so the price";
        assert_eq!(
            (price, shares[1].1, shares[1].2.as_str()),
            (Price(600_000), AllocationReason::Outbid, text)
        );
    }
}
