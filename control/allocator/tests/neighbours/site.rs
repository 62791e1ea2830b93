//! A site drawn from a seed, where tenants' jobs bid for hosts by rounds. The adversary has a job on each of twelve hosts.
//!
//! The market is the allocator's, and prices pass the room through which tenants are told anything. Which hosts a job gets follows
//! control's round, without predictions of links, checkpoints and faults.

use harmonaize_abi::session::Price;
use harmonaize_allocator::{ClearedJobs, Demand, KindId, Traded, clear_jobs};
use harmonaize_disclose::coarse_price;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// The adversary's jobs, each with one worker on a host of its own.
pub(super) const JOBS: usize = 12;
const RACKS: usize = 8;
const HOSTS_A_RACK: usize = 6;
/// Half of the racks are of each.
const KINDS: usize = 2;
const TENANTS: usize = 8;
/// Most jobs of other tenants at once.
const MOST_OTHERS: usize = 30;
const BASE_PRICE: f64 = 0.5;
/// Whoever bids so much is seldom outbid.
const HIGH: f64 = 3.0;
/// How often control's round clears the market at most.
const MOST_CLEARINGS: u32 = 4;

/// What the adversary bids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Strategy {
    /// Much for each job, all the time.
    Steady,
    /// Another price for each job in each round.
    Ladder,
    /// Much for half of the jobs, for others in each round.
    Turns,
}

/// What the adversary hears of a job in a round, and what there was to hear. Prices are logarithms, and no number where none is told.
#[derive(Clone, Copy, Debug)]
pub(super) struct Observation {
    /// Whether it has its host after the round: an offer or a recall says so.
    pub has: bool,
    /// What the tenant is told.
    pub disclosed: f64,
    /// The price itself.
    pub exact: f64,
    /// The price, if each rack were a market of its own.
    pub by_rack: f64,
    /// Whether another tenant's first worker came to the rack.
    pub came: bool,
}

/// All that came of one site.
pub(super) struct Seen {
    /// The kind of each job's host, which its tenant knows.
    pub kinds: Vec<usize>,
    /// The rack of each job's host: what is to be found out.
    pub racks: Vec<usize>,
    /// The tenant that had most hosts of that rack for longest: likewise.
    pub neighbours: Vec<usize>,
    /// By rounds and jobs.
    pub rounds: Vec<Vec<Observation>>,
}

/// Another tenant.
struct Tenant {
    /// Racks on whose hosts it has runners.
    racks: BTreeSet<usize>,
    /// What it pays for a worker, about.
    worth: f64,
    /// Whether it bids more than usually, and has more jobs.
    busy: bool,
}

struct Job {
    /// None: the adversary.
    tenant: Option<usize>,
    workers: (u32, u32),
    /// What its first workers and its further ones are worth.
    worth: (f64, f64),
    /// Hosts on which it has runners.
    runners: BTreeSet<usize>,
    hosts: Vec<usize>,
}

struct Site {
    rng: ChaCha8Rng,
    strategy: Strategy,
    /// Of each host.
    racks: Vec<usize>,
    kinds: Vec<usize>,
    tenants: Vec<Tenant>,
    /// In order of arrival: first the adversary's.
    jobs: Vec<Job>,
    /// Of each host, as a round begins: whether a job has it, and how many may use it.
    users: Vec<(bool, usize)>,
}

/// What the adversary sees of a site in so many rounds.
pub(super) fn watch(seed: u64, strategy: Strategy, rounds: usize) -> Seen {
    let mut site = Site::new(seed, strategy);
    let own: Vec<usize> = site.jobs.iter().filter_map(|job| job.runners.first().copied()).collect();
    let mut had = vec![[0_usize; TENANTS]; RACKS];
    let mut seen = Vec::new();
    for _ in 0..rounds {
        site.go_on();
        seen.push(site.round(&own));
        for (rack, had) in had.iter_mut().enumerate() {
            site.count(rack).iter().zip(had).for_each(|(now, had)| *had += now);
        }
    }
    let racks: Vec<usize> = own.iter().map(|host| site.racks[*host]).collect();
    let most = |rack: &usize| (0..TENANTS).max_by_key(|tenant| had[*rack][*tenant]).unwrap();
    Seen {
        kinds: own.iter().map(|host| site.kinds[*host]).collect(),
        neighbours: racks.iter().map(most).collect(),
        racks,
        rounds: seen,
    }
}

impl Site {
    /// A site with the adversary alone.
    fn new(seed: u64, strategy: Strategy) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed ^ 0x9e1c);
        let mut racks: Vec<usize> = (0..RACKS * HOSTS_A_RACK).map(|host| host / HOSTS_A_RACK).collect();
        racks.shuffle(&mut rng);
        let kinds = racks.iter().map(|rack| rack % KINDS).collect();
        let mut hosts: Vec<usize> = (0..racks.len()).collect();
        hosts.shuffle(&mut rng);
        let own = |host: &usize| Job {
            tenant: None,
            workers: (1, 1),
            worth: (HIGH, HIGH),
            runners: BTreeSet::from([*host]),
            hosts: Vec::new(),
        };
        let jobs = hosts.iter().take(JOBS).map(own).collect();
        let tenant = |rng: &mut ChaCha8Rng| {
            let mut racks: Vec<usize> = (0..RACKS).collect();
            racks.shuffle(rng);
            racks.truncate(rng.random_range(2..=5));
            let worth = rng.random_range(0.5..2.0);
            Tenant { racks: racks.into_iter().collect(), worth, busy: rng.random_bool(0.5) }
        };
        let tenants = (0..TENANTS).map(|_| tenant(&mut rng)).collect();
        Self { rng, strategy, racks, kinds, tenants, jobs, users: Vec::new() }
    }

    /// Jobs go and come, tenants become busy, and the adversary bids.
    fn go_on(&mut self) {
        let rng = &mut self.rng;
        self.jobs.retain(|job| job.tenant.is_none() || !rng.random_bool(1.0 / 15.0));
        for tenant in &mut self.tenants {
            tenant.busy ^= rng.random_bool(1.0 / 20.0);
        }
        for _ in 0..rng.random_range(0..=4) {
            let number = rng.random_range(0..TENANTS);
            let tenant = &self.tenants[number];
            if self.jobs.len() >= JOBS + MOST_OTHERS || !(tenant.busy || rng.random_bool(0.3)) {
                continue;
            }
            let least = rng.random_range(1..=3);
            let worth = tenant.worth * rng.random_range(0.7..1.3);
            let runners = (0..self.racks.len()).filter(|host| tenant.racks.contains(&self.racks[*host]));
            self.jobs.push(Job {
                tenant: Some(number),
                workers: (least, least + rng.random_range(0..=3)),
                worth: (worth, worth * rng.random_range(0.5..1.0)),
                runners: runners.collect(),
                hosts: Vec::new(),
            });
        }
        for job in self.jobs.iter_mut().filter(|job| job.tenant.is_none()) {
            let worth = match self.strategy {
                Strategy::Steady => HIGH,
                Strategy::Ladder => BASE_PRICE * rng.random_range(0.0..(HIGH / BASE_PRICE).ln()).exp(),
                Strategy::Turns => HIGH * f64::from(u8::from(rng.random_bool(0.5))),
            };
            job.worth = (worth, worth);
        }
    }

    /// What a job bids for each of its fewest workers and each further one.
    fn bid(&self, job: &Job) -> (Price, Price) {
        let busy = job.tenant.is_some_and(|tenant| self.tenants[tenant].busy);
        let of = |worth: f64| Price::new(if busy { worth * 1.4 } else { worth }).unwrap();
        (of(job.worth.0), of(job.worth.1))
    }

    /// How many hosts of a rack each other tenant has.
    fn count(&self, rack: usize) -> [usize; TENANTS] {
        let mut count = [0; TENANTS];
        for job in &self.jobs {
            if let Some(tenant) = job.tenant {
                count[tenant] += job.hosts.iter().filter(|host| self.racks[**host] == rack).count();
            }
        }
        count
    }

    /// Clears the market for these jobs, with hosts parted so.
    fn clear(&self, pool: &BTreeSet<usize>, part: &[usize], parts: usize, bidding: &[usize]) -> ClearedJobs {
        let within = |hosts: &BTreeSet<usize>| {
            let mut units = vec![0_u32; parts];
            hosts.iter().for_each(|host| units[part[*host]] += 1);
            units
        };
        let named = |units| Traded { name: String::new(), units, base_price: BASE_PRICE };
        let traded: Vec<Traded> = within(pool).into_iter().map(named).collect();
        let demand = |at: &usize| {
            let job = &self.jobs[*at];
            let (least, further) = self.bid(job);
            Demand {
                units: job.workers,
                usable: within(&job.runners),
                highest: Some((least.an_hour(), further.an_hour())),
                current: job.hosts.first().map(|host| KindId(part[*host])),
            }
        };
        let demands: Vec<Demand> = bidding.iter().map(demand).collect();
        clear_jobs(&traded, &demands).unwrap()
    }

    /// Control's round: hosts by bids, and those that cannot be placed do not bid again. Returns what the adversary hears.
    fn round(&mut self, own: &[usize]) -> Vec<Observation> {
        let pool: BTreeSet<usize> = self.jobs.iter().flat_map(|job| job.runners.iter().copied()).collect();
        let of = |host: usize| {
            let users = self.jobs.iter().filter(|job| job.runners.contains(&host)).count();
            (self.jobs.iter().any(|job| job.hosts.contains(&host)), users)
        };
        self.users = (0..self.racks.len()).map(of).collect();
        let mut bidding: Vec<usize> = (0..self.jobs.len()).collect();
        let racks = self.clear(&pool, &self.racks, RACKS, &bidding).prices;
        let mut prices = vec![f64::NAN; self.jobs.len()];
        let (mut running, mut taken, mut placed);
        let mut clearings = 0;
        loop {
            clearings += 1;
            let cleared = self.clear(&pool, &self.kinds, KINDS, &bidding);
            (running, taken) = (Vec::new(), BTreeSet::new());
            placed = vec![Vec::new(); self.jobs.len()];
            let mut order: Vec<usize> = (0..bidding.len()).collect();
            order.sort_by_key(|at| self.jobs[bidding[*at]].hosts.is_empty());
            let mut without = Vec::new();
            for at in order {
                let job = bidding[at];
                prices[job] = cleared.bid_for[at].map_or(f64::NAN, |kind| cleared.prices[kind.0]);
                let Some(won) = cleared.won[at] else { continue };
                placed[job] = self.take(&mut taken, (job, won.kind.0), &[], self.jobs[job].workers.0);
                if placed[job].is_empty() {
                    without.push((job, won.units));
                } else {
                    running.push((job, won.kind.0, won.units));
                }
            }
            let mut unplaced = BTreeSet::new();
            for (job, most) in without {
                let bid = self.bid(&self.jobs[job]).0.an_hour();
                let affords = (0..KINDS).filter(|kind| cleared.prices[*kind] <= bid);
                for kind in affords {
                    placed[job] = self.take(&mut taken, (job, kind), &[], self.jobs[job].workers.0);
                    if !placed[job].is_empty() {
                        prices[job] = cleared.prices[kind];
                        running.push((job, kind, most));
                        break;
                    }
                }
                if placed[job].is_empty() {
                    unplaced.insert(job);
                }
            }
            if unplaced.is_empty() || clearings >= MOST_CLEARINGS {
                break;
            }
            bidding.retain(|job| !unplaced.contains(job));
        }
        running.sort_unstable();
        let mut grew = true;
        while grew {
            grew = false;
            for (job, kind, most) in &running {
                if placed[*job].len() < *most as usize {
                    let more = self.take(&mut taken, (*job, *kind), &placed[*job], 1);
                    grew |= !more.is_empty();
                    placed[*job].extend(more);
                }
            }
        }
        let before: Vec<[usize; TENANTS]> = (0..RACKS).map(|rack| self.count(rack)).collect();
        let had: Vec<bool> = self.jobs.iter().map(|job| !job.hosts.is_empty()).collect();
        self.jobs.iter_mut().zip(placed).for_each(|(job, hosts)| job.hosts = hosts);
        let came =
            |rack: usize| self.count(rack).iter().zip(&before[rack]).any(|(now, had)| *now > 0 && *had == 0);
        let heard = |(at, host): (usize, &usize)| {
            let (job, rack) = (&self.jobs[at], self.racks[*host]);
            let has = !job.hosts.is_empty();
            // Orders tell the price: to start, to end, and at each round to who asks while it runs.
            let price = Price::new(prices[at]).ok().filter(|_| has || had[at]);
            let log = |price: Option<Price>| price.map_or(f64::NAN, |price| price.an_hour().ln());
            Observation {
                has,
                disclosed: log(price.map(|price| coarse_price(price, Some(self.bid(job).0)))),
                exact: log(price),
                by_rack: log(price.and_then(|_| Price::new(racks[rack]).ok())),
                came: came(rack),
            }
        };
        own.iter().enumerate().map(heard).collect()
    }

    /// Takes hosts of a kind for a job beside those that it `has`, or none. First those that it had, then those that no other job had, then
    /// those that fewest others may use, then those in the racks where it has most.
    fn take(
        &self,
        taken: &mut BTreeSet<usize>,
        (at, kind): (usize, usize),
        has: &[usize],
        count: u32,
    ) -> Vec<usize> {
        let (job, count) = (&self.jobs[at], count as usize);
        let free = job.runners.iter().filter(|host| !taken.contains(*host) && self.kinds[**host] == kind);
        let (mut had, mut new): (Vec<usize>, Vec<usize>) = free.partition(|host| job.hosts.contains(host));
        if had.len() + new.len() < count {
            return Vec::new();
        }
        had.truncate(count);
        let own: Vec<usize> = has.iter().chain(&had).map(|host| self.racks[*host]).collect();
        let beside = |host: &usize| own.iter().filter(|rack| **rack == self.racks[*host]).count();
        new.sort_by_cached_key(|host| (self.users[*host], Reverse(beside(host)), *host));
        let lacks = count - had.len();
        had.extend(new.into_iter().take(lacks));
        taken.extend(&had);
        had
    }
}
