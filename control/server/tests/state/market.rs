//! Policy `market`: bids, prices, recalls of jobs that are outbid, and what holds whatever happens.

use super::jobs::{Play, ROUND, allocating, seeds};
use super::world::SECOND;
use harmonaize_abi::session::{BidError, HostPrice, JobBid, Price, RecallReason, RunnerOrder, WorkerState};
use harmonaize_api::v1::{self, AllocationReason, JobPhase};
use harmonaize_server::state::{LivePolicy, MarketSettings, RequestRefusal, Settings, WhatIfError};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;
use std::time::Duration;

/// The base price of all hosts.
const BASE: u64 = 500_000;

fn market() -> Settings {
    let base_prices = BTreeMap::from([(String::new(), Price(BASE))]);
    let market = MarketSettings { base_prices, longest_wait: Duration::from_secs(600) };
    Settings { market, ..allocating(LivePolicy::Market) }
}

fn play() -> Play {
    let mut play = Play::with(market());
    play.world.wait(ROUND);
    play
}

fn bids(play: &mut Play, job: &str, price: u64) {
    play.bids.insert(job.to_owned(), JobBid::of(Price(price)));
}

fn job(play: &Play, name: &str) -> v1::JobStatus {
    play.jobs().into_iter().find(|job| job.job == name).unwrap()
}

fn workers(play: &Play, runners: &[u64]) -> usize {
    runners.iter().filter(|runner| play.place(**runner).is_some()).count()
}

fn recalls(play: &Play, runners: &[u64]) -> Vec<(RecallReason, u64)> {
    let orders = runners.iter().flat_map(|runner| &play.runners[runner].orders);
    let recall = |order: &RunnerOrder| match order {
        RunnerOrder::Recall { reason, notice_ns, .. } => Some((*reason, *notice_ns)),
        _ => None,
    };
    orders.filter_map(recall).collect()
}

/// Two workers at 0.60 run; then four at 0.70 come, and one at 0.65.
fn outbid(play: &mut Play) -> (Vec<u64>, Vec<u64>) {
    for (job, price) in [("bert", 600_000), ("gpt", 700_000), ("small", 650_000)] {
        bids(play, job, price);
    }
    let bert = play.add_all("a", "bert", (2, 2));
    play.wait_seconds(3);
    assert_eq!((workers(play, &bert), job(play, "bert").price_millionths), (2, BASE));
    let gpt = play.add_all("b", "gpt", (4, 4));
    play.add(0, "b", "small", (1, 1));
    (bert, gpt)
}

#[test]
fn whoever_is_outbid_is_recalled_with_notice_and_told_why() {
    let mut play = play();
    let (bert, gpt) = outbid(&mut play);
    play.wait_seconds(40);
    play.check();
    assert_eq!((workers(&play, &bert), workers(&play, &gpt)), (0, 4));
    assert_eq!(recalls(&play, &bert), [(RecallReason::Suspended, 5_000_000_000); 2]);
    let told = job(&play, "bert");
    assert_eq!((told.phase(), told.reason()), (JobPhase::Waiting, AllocationReason::Outbid));
    assert_eq!(told.reason_text, "outbid: the price is 0.65, its bid 0.60");
    let reply = play.world.state.queries(play.world.now).jobs();
    let prices: Vec<(u64, u64)> =
        reply.kinds.iter().map(|kind| (kind.price_millionths, kind.base_price_millionths)).collect();
    assert_eq!((reply.policy.as_str(), prices), ("market", vec![(650_000, BASE)]));
    // Whoever bids most is listed first.
    let order: Vec<&str> = reply.jobs.iter().map(|job| job.job.as_str()).collect();
    assert_eq!(order, ["gpt", "small", "bert"]);
    // What its runners hear is the price of their own kind, coarsely.
    let price = Some(HostPrice { kind: String::new(), price: Price(650_000) });
    assert!(gpt.iter().all(|runner| play.runners[runner].price == price));
}

#[test]
fn a_job_leaves_at_its_checkpoint_and_no_sooner() {
    let mut play = play();
    let checkpoint = JobBid { checkpoint_ns: 100_000_000_000, ..JobBid::of(Price(600_000)) };
    play.bids.insert("bert".to_owned(), checkpoint);
    bids(&mut play, "gpt", 700_000);
    let bert = play.add_all("a", "bert", (2, 2));
    play.wait_seconds(3);
    let gpt = play.add_all("b", "gpt", (4, 4));
    // Its workers have run for three seconds at most.
    play.wait_seconds(93);
    assert_eq!((workers(&play, &bert), workers(&play, &gpt)), (2, 0), "{:#?}", play.jobs());
    let told = job(&play, "bert");
    assert_eq!((told.phase(), told.reason()), (JobPhase::Running, AllocationReason::Outbid));
    assert!(told.reason_text.ends_with("it keeps what it has until its next checkpoint"), "{told:?}");
    // The next regular round is later.
    play.wait_seconds(10);
    assert_eq!((workers(&play, &bert), workers(&play, &gpt)), (0, 4), "{:#?}", play.jobs());
    assert_eq!(recalls(&play, &bert).len(), 2);
}

#[test]
fn a_bid_that_is_raised_wins_again() {
    let mut play = play();
    let (bert, gpt) = outbid(&mut play);
    play.wait_seconds(40);
    assert_eq!(play.set_bid("a", "bert", Some(JobBid::of(Price(720_000)).into())), "");
    play.wait_seconds(40);
    play.check();
    assert_eq!((workers(&play, &bert), workers(&play, &gpt)), (2, 0));
    let told = job(&play, "gpt");
    assert_eq!((told.reason(), job(&play, "small").phase()), (AllocationReason::NoRoom, JobPhase::Running));
    assert!(told.reason_text.contains("fewer hosts than its 4 are left"), "{told:?}");
}

#[test]
fn an_elastic_job_gives_up_what_is_worth_less_to_it() {
    let mut play = play();
    let bid = JobBid { further: Price(550_000), ..JobBid::of(Price(900_000)) };
    play.bids.insert("bert".to_owned(), bid);
    bids(&mut play, "gpt", 600_000);
    let bert = play.add_elastic((1, 4));
    play.wait_seconds(3);
    assert_eq!(workers(&play, &bert), 4);
    let gpt = play.add_all("b", "gpt", (2, 2));
    play.wait_seconds(40);
    play.check();
    assert_eq!((workers(&play, &bert), workers(&play, &gpt)), (2, 2));
    let told = job(&play, "bert");
    assert_eq!((told.reason(), told.price_millionths), (AllocationReason::Spare, 550_000));
    assert_eq!(told.reason_text, "1 of 2 are further ones, at 0.55 each; its bid for those 0.55");
}

#[test]
fn bids_outlive_a_restart_of_control() {
    let mut play = play();
    let (bert, _) = outbid(&mut play);
    let raised = JobBid { checkpoint_ns: 7, ..JobBid::of(Price(910_000)) };
    assert_eq!(play.set_bid("a", "bert", Some(raised.into())), "");
    play.restart();
    // Its runners say still what they were started with.
    assert!(bert.iter().all(|runner| play.runners[runner].bid == Some(JobBid::of(Price(600_000)))));
    play.wait_seconds(100);
    play.check();
    assert_eq!((job(&play, "bert").bid, workers(&play, &bert)), (Some(raised.into()), 2));
    // Without runners nothing is kept.
    bert.into_iter().for_each(|runner| play.die(runner));
    play.wait_seconds(60);
    assert!(play.world.stored.jobs.values().all(|job| job.name != "bert"), "{:?}", play.world.stored.jobs);
}

#[test]
fn bids_that_make_no_sense_change_nothing() {
    let mut play = play();
    bids(&mut play, "bert", 600_000);
    let bert = play.add_all("a", "bert", (2, 2));
    play.wait_seconds(3);
    let before = job(&play, "bert");
    let further = BidError::Further { least: Price(600_000), further: Price(600_001) };
    let bid = |least_millionths, further_millionths, checkpoint_ns| {
        Some(v1::JobBid { least_millionths, further_millionths, checkpoint_ns })
    };
    for (name, bid, why) in [
        ("bert", bid(u64::MAX, 0, 0), BidError::Value.into()),
        ("bert", bid(600_000, 600_001, 0), further.into()),
        ("bert", bid(1, 1, u64::MAX), BidError::Checkpoint(u64::MAX).into()),
        ("bert", None, RequestRefusal::NoBid),
        ("other", bid(1, 1, 0), RequestRefusal::NoJob),
    ] {
        assert_eq!(play.set_bid("a", name, bid), why.to_string());
    }
    let unknown = RequestRefusal::UnknownTenant.to_string();
    assert_eq!(play.set_bid("nobody", "bert", bid(1, 1, 0)), unknown);
    let after = job(&play, "bert");
    assert_eq!((after.bid, after.phase(), workers(&play, &bert)), (before.bid, JobPhase::Running, 2));
    // A runner's senseless bid is refused too, and its job is as it was.
    play.bids.insert("bert".to_owned(), JobBid::of(Price(u64::MAX)));
    let runner = play.add(0, "a", "bert", (2, 2));
    assert_eq!(play.runners[&runner].refused, RequestRefusal::from(BidError::Value).to_string());
    assert_eq!(job(&play, "bert").bid, before.bid);
}

#[test]
fn without_a_market_nothing_is_bid_for() {
    let mut play = Play::new(LivePolicy::Fifo);
    bids(&mut play, "bert", 600_000);
    let bert = play.add_all("a", "bert", (2, 2));
    play.wait_seconds(3);
    assert_eq!((workers(&play, &bert), job(&play, "bert").price_millionths), (2, 0));
    assert!(bert.iter().all(|runner| play.runners[runner].price.is_none()));
    assert!(play.set_bid("a", "bert", Some(JobBid::of(Price(1)).into())).contains("have no prices"));
}

#[test]
fn what_if_has_the_price() {
    let mut play = play();
    outbid(&mut play);
    play.wait_seconds(40);
    let job = v1::AssumedJob {
        tenant: "a".to_owned(),
        job: "new".to_owned(),
        workers_min: 4,
        workers_max: 4,
        bid: Some(JobBid::of(Price(800_000)).into()),
        ..Default::default()
    };
    let asked = |job| v1::WhatIfRequest { job: Some(job), ..Default::default() };
    let queries = |play: &Play, job| {
        play.world.state.queries(play.world.now).what_if(&asked(job)).and_then(|copy| copy.reply())
    };
    let reply = queries(&play, job.clone()).unwrap();
    let new = reply.jobs.iter().find(|job| job.assumed).unwrap();
    assert_eq!((new.hosts.len(), new.price_millionths), (4, 700_000), "{reply:#?}");
    let senseless = v1::JobBid { least_millionths: 1, further_millionths: 2, checkpoint_ns: 0 };
    let error = queries(&play, v1::AssumedJob { bid: Some(senseless), ..job }).unwrap_err();
    assert!(matches!(error, WhatIfError::Bid(BidError::Further { .. })), "{error}");
}

#[test]
fn a_bid_that_is_changed_between_rounds_tells_nothing_of_the_price() {
    let mut play = play();
    bids(&mut play, "bert", 640_000);
    bids(&mut play, "gpt", 606_000);
    let bert = play.add_all("a", "bert", (4, 4));
    play.add(0, "b", "gpt", (1, 1));
    play.wait_seconds(3);
    let price = |price| Some(HostPrice { kind: String::new(), price: Price(price) });
    assert_eq!(job(&play, "bert").price_millionths, 606_000);
    assert!(bert.iter().all(|runner| play.runners[runner].price == price(640_000)));
    // A runner that says that it has no worker is offered the same place again.
    for bid in [610_000, 600_000, 700_000] {
        assert_eq!(play.set_bid("a", "bert", Some(JobBid::of(Price(bid)).into())), "");
        let runner = play.runners.get_mut(&bert[0]).unwrap();
        (runner.price, runner.report.state) = (None, WorkerState::None);
        play.wait_seconds(2);
        assert_eq!(play.runners[&bert[0]].price, price(640_000), "after a bid of {bid}");
    }
}

/// What each job bids, by tenant and name.
fn standing(play: &Play) -> BTreeMap<(String, String), Option<v1::JobBid>> {
    play.jobs().into_iter().map(|job| ((job.tenant, job.job), job.bid)).collect()
}

/// A bid at the base price or above.
fn drawn(rng: &mut ChaCha8Rng) -> JobBid {
    let least = BASE + rng.random_range(0..6) * 50_000;
    let further = least - rng.random_range(0..=(least - BASE) / 50_000) * 50_000;
    let checkpoint_ns = [0, 20_000_000_000, 90_000_000_000][rng.random_range(0..3)];
    JobBid { least: Price(least), further: Price(further), checkpoint_ns }
}

#[test]
fn random_markets_with_faults_keep_their_word() {
    for seed in seeds() {
        println!("seed {seed}");
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let elastic = std::array::from_fn(|_| rng.random_range(0..2) == 0);
        let mut play = play();
        for name in ["j0", "j1", "j2"] {
            let bid = drawn(&mut rng);
            play.bids.insert(name.to_owned(), bid);
        }
        for _ in 0..400 {
            play.step(&mut rng, elastic);
            match rng.random_range(0..40) {
                0 => {
                    let known: Vec<(String, String)> = standing(&play).into_keys().collect();
                    if let Some((tenant, name)) = known.get(rng.random_range(0..known.len().max(1))) {
                        let bid: v1::JobBid = drawn(&mut rng).into();
                        if play.set_bid(tenant, name, Some(bid)).is_empty() {
                            assert_eq!(standing(&play)[&(tenant.clone(), name.clone())], Some(bid));
                        }
                    }
                }
                1 => {
                    let before = standing(&play);
                    play.restart();
                    for (key, bid) in standing(&play) {
                        // One whose agents were away may be new to control.
                        assert!(
                            before.get(&key).is_none_or(|before| *before == bid),
                            "{key:?} after a restart"
                        );
                    }
                }
                _ => {}
            }
            check_prices(&play);
        }
        play.calm_down();
        check_prices(&play);
    }
}

/// No price is below the base price, none that a job pays is above its bid, and each recall has its notice.
fn check_prices(play: &Play) {
    let reply = play.world.state.queries(play.world.now).jobs();
    assert!(reply.kinds.iter().all(|kind| kind.price_millionths >= BASE), "{:?}", reply.kinds);
    for job in &reply.jobs {
        assert!(job.price_millionths == 0 || job.price_millionths >= BASE, "{job:?}");
    }
    for runner in play.runners.values() {
        assert!(runner.price.as_ref().is_none_or(|told| told.price.0 >= BASE), "{runner:?}");
        for order in &runner.orders {
            if let RunnerOrder::Recall { notice_ns, .. } = order {
                assert!([5_000_000_000, 10_000_000_000].contains(notice_ns), "{order:?}");
            }
        }
    }
}

/// A job of so many workers has hosts, its next checkpoint is an hour away, and one that bids more has come. None waits longer than 40 s.
fn outbid_without_checkpoint(workers: (u32, u32)) -> (Play, Vec<u64>, Vec<u64>) {
    let mut settings = market();
    settings.market.longest_wait = SECOND * 40;
    let mut play = Play::with(settings);
    play.world.wait(ROUND);
    let checkpoint = JobBid { checkpoint_ns: 3_600_000_000_000, ..JobBid::of(Price(600_000)) };
    play.bids.insert("bert".to_owned(), checkpoint);
    bids(&mut play, "gpt", 700_000);
    let bert = play.add_all("a", "bert", workers);
    play.wait_seconds(3);
    let gpt = play.add_all("b", "gpt", (4, 4));
    (play, bert, gpt)
}

#[test]
fn who_cannot_wait_longer_leaves_without_a_checkpoint() {
    let (mut play, bert, gpt) = outbid_without_checkpoint((2, 2));
    play.wait_seconds(65);
    assert_eq!((workers(&play, &bert), workers(&play, &gpt)), (2, 0), "{:#?}", play.jobs());
    play.wait_seconds(15);
    assert_eq!((workers(&play, &bert), workers(&play, &gpt)), (0, 4), "{:#?}", play.jobs());
}

#[test]
fn who_is_outbid_gains_no_time_by_workers_that_start_again() {
    let (mut play, bert, gpt) = outbid_without_checkpoint((1, 4));
    play.wait_seconds(45);
    // It is outbid, and its workers start again because one has no runner any more.
    let generation = job(&play, "bert").generation;
    play.die(bert[3]);
    play.wait_seconds(10);
    assert!(job(&play, "bert").generation > generation, "{:#?}", play.jobs());
    assert_eq!((workers(&play, &bert), workers(&play, &gpt)), (3, 0), "{:#?}", play.jobs());
    play.wait_seconds(25);
    assert_eq!((workers(&play, &bert), workers(&play, &gpt)), (0, 4), "{:#?}", play.jobs());
}

#[test]
fn a_bid_is_changed_eight_times_a_minute_at_most() {
    let mut play = play();
    bids(&mut play, "bert", 600_000);
    play.add_all("a", "bert", (2, 2));
    play.wait_seconds(3);
    let set = |play: &mut Play, price| play.set_bid("a", "bert", Some(JobBid::of(Price(price)).into()));
    for price in 700_001..=700_008 {
        assert_eq!(set(&mut play, price), "");
    }
    let refused = set(&mut play, 700_009);
    assert_eq!(refused, RequestRefusal::BidChangedTooOften { most: 8, seconds: 8 }.to_string());
    // The bid before stands, and to say it again is no change.
    assert_eq!(job(&play, "bert").bid.map(|bid| bid.least_millionths), Some(700_008));
    assert_eq!(set(&mut play, 700_008), "");
    play.wait_seconds(8);
    assert_eq!(set(&mut play, 700_009), "");
}

#[test]
fn a_restart_of_control_gives_who_is_outbid_no_time() {
    let (mut play, bert, gpt) = outbid_without_checkpoint((2, 2));
    play.wait_seconds(45);
    let leaves = |play: &Play| -> Vec<bool> {
        let stored = play.world.stored.jobs.values().filter(|job| job.name == "bert");
        stored.map(|job| job.leaves_ns > 0).collect()
    };
    assert_eq!((leaves(&play), workers(&play, &bert)), (vec![true], 2), "{:#?}", play.jobs());
    play.restart();
    // The first round is later than that time.
    play.wait_seconds(45);
    assert_eq!((workers(&play, &bert), workers(&play, &gpt)), (0, 4), "{:#?}", play.jobs());
    assert_eq!(leaves(&play), [false], "it is to leave nothing any more");
}

#[test]
fn a_clock_that_is_set_back_lets_nobody_stay_beyond_the_longest_wait() {
    let (mut play, bert, gpt) = outbid_without_checkpoint((2, 2));
    play.wait_seconds(45);
    // What was stored is so much later than what the clock says now.
    let stored = &mut play.world.stored.jobs;
    let leaving: Vec<_> = stored.values_mut().filter(|job| job.leaves_ns > 0).collect();
    assert_eq!(leaving.len(), 1, "{leaving:?}");
    leaving.into_iter().for_each(|job| job.leaves_ns += 3_600_000_000_000);
    play.restart();
    play.wait_seconds(60);
    assert_eq!((workers(&play, &bert), workers(&play, &gpt)), (2, 0), "{:#?}", play.jobs());
    // The first round was after thirty seconds, and the longest wait is forty.
    play.wait_seconds(25);
    assert_eq!((workers(&play, &bert), workers(&play, &gpt)), (0, 4), "{:#?}", play.jobs());
}

/// Jobs of two workers have all hosts, with so many seconds between their checkpoints. One comes that bids more and needs all four, and
/// another of two that would have what it does not get.
fn staggered(checkpoints: [u64; 2]) -> (Play, [Vec<u64>; 4]) {
    let mut play = play();
    let seconds = 1_000_000_000;
    for (name, price, checkpoint) in [
        ("first", 600_000, checkpoints[0]),
        ("second", 650_000, checkpoints[1]),
        ("large", 900_000, 0),
        ("small", 700_000, 550),
    ] {
        let bid = JobBid { checkpoint_ns: checkpoint * seconds, ..JobBid::of(Price(price)) };
        play.bids.insert(name.to_owned(), bid);
    }
    let [first, second] = ["first", "second"].map(|name| play.add_all("a", name, (2, 2)));
    play.wait_seconds(3);
    assert_eq!([workers(&play, &first), workers(&play, &second)], [2, 2], "{:#?}", play.jobs());
    let large = play.add_all("b", "large", (4, 4));
    let small = play.add_all("b", "small", (2, 2));
    (play, [first, second, large, small])
}

#[test]
fn whoever_comes_between_leaves_with_the_last_for_a_large_job() {
    let (mut play, [first, second, large, small]) = staggered([100, 170]);
    play.wait_seconds(107);
    // The first has left at its checkpoint, and its hosts are not idle for more than a minute.
    let running = |play: &Play| [&first, &second, &large, &small].map(|runners| workers(play, runners));
    assert_eq!(running(&play), [0, 2, 0, 2], "{:#?}", play.jobs());
    let told = job(&play, "large");
    assert_eq!(told.reason(), AllocationReason::NoRoom);
    assert!(told.reason_text.ends_with("it has won hosts that others keep until they leave"), "{told:?}");
    // Its own checkpoint would be much later.
    play.wait_seconds(75);
    assert_eq!(running(&play), [0, 0, 4, 0], "{:#?}", play.jobs());
    play.check();
}

#[test]
fn freed_hosts_are_kept_for_a_large_job_within_the_notice() {
    let (mut play, [first, second, large, small]) = staggered([100, 103]);
    play.wait_seconds(115);
    let running = [&first, &second, &large, &small].map(|runners| workers(&play, runners));
    assert_eq!(running, [0, 0, 4, 0], "{:#?}", play.jobs());
    assert!(small.iter().all(|runner| play.runners[runner].started == 0), "{:#?}", play.runners);
}

#[test]
fn hosts_that_came_between_rounds_end_the_wait_for_them() {
    let mut settings = market();
    settings.market.longest_wait = SECOND * 40;
    let mut play = Play::with(settings);
    play.world.wait(ROUND);
    let far = |price| JobBid { checkpoint_ns: 3_600_000_000_000, ..JobBid::of(Price(price)) };
    for (name, price) in [("first", 600_000), ("second", 650_000), ("bert", 900_000)] {
        play.bids.insert(name.to_owned(), far(price));
    }
    let others = ["first", "second"].map(|name| play.add_all("b", name, (2, 2)));
    play.wait_seconds(3);
    let bert = play.add_elastic((2, 4));
    // Two rounds have let it win, and the hosts are others' for eight seconds more.
    play.wait_seconds(60);
    assert_eq!(workers(&play, &bert), 0, "{:#?}", play.jobs());
    others.into_iter().flatten().for_each(|runner| play.die(runner));
    assert_eq!(play.set_bid("a", "bert", Some(far(910_000).into())), "");
    play.wait_seconds(3);
    assert_eq!(workers(&play, &bert), 2, "{:#?}", play.jobs());
    // Whoever bids more for all waits for as long as for anybody's.
    bids(&mut play, "late", 1_000_000);
    let late = play.add_all("b", "late", (4, 4));
    play.wait_seconds(15);
    assert_eq!((workers(&play, &bert), workers(&play, &late)), (2, 0), "{:#?}", play.jobs());
    assert_eq!(job(&play, "bert").reason(), AllocationReason::Outbid);
    play.wait_seconds(60);
    assert_eq!((workers(&play, &bert), workers(&play, &late)), (0, 4), "{:#?}", play.jobs());
}

#[test]
fn without_a_bid_a_job_ranks_by_the_base_price() {
    let mut play = play();
    bids(&mut play, "low", BASE - 1);
    bids(&mut play, "high", BASE + 1);
    for name in ["low", "none", "high"] {
        play.add_all("a", name, (4, 4));
    }
    play.wait_seconds(3);
    let order: Vec<String> = play.jobs().into_iter().map(|job| job.job).collect();
    assert_eq!(order, ["high", "none", "low"]);
}

/// Small jobs come and go, with checkpoints that are far apart or near. One that needs all hosts bids more than all of them.
#[test]
fn random_staggered_checkpoints_starve_nobody() {
    const LONGEST_WAIT: u32 = 120;
    for seed in seeds() {
        println!("seed {seed}");
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut settings = market();
        settings.market.longest_wait = SECOND * LONGEST_WAIT;
        let mut play = Play::with(settings);
        play.world.wait(ROUND);
        let (mut small, mut large, mut allowed) = (Vec::new(), None, 0);
        for second in 0..2000_u32 {
            match rng.random_range(0..30) {
                0..4 if small.len() < 6 => {
                    let name = format!("s{second}");
                    let checkpoint_ns = rng.random_range(1..400) * 1_000_000_000;
                    play.bids.insert(name.clone(), JobBid { checkpoint_ns, ..drawn(&mut rng) });
                    let workers = rng.random_range(1..=2);
                    small.push((name.clone(), play.add_all("a", &name, (workers, workers))));
                }
                4 if !small.is_empty() => {
                    let (_, runners) = small.swap_remove(rng.random_range(0..small.len()));
                    runners.into_iter().for_each(|runner| play.die(runner));
                }
                5 if !small.is_empty() => {
                    let (name, _) = &small[rng.random_range(0..small.len())];
                    let bid = drawn(&mut rng);
                    play.set_bid("a", name, Some(bid.into()));
                }
                6 if rng.random_range(0..40) == 0 => {
                    play.restart();
                    // What it knows of waits is stored of who leaves, and not of who waits.
                    allowed += LONGEST_WAIT + 80;
                }
                _ => {}
            }
            if large.is_none() && second > 60 && rng.random_range(0..40) == 0 {
                bids(&mut play, "large", 900_000);
                large = Some(play.add_all("b", "large", (4, 4)));
                // A round, the longest wait, the notice, and time to ask.
                allowed = second + LONGEST_WAIT + 60;
            }
            play.wait(SECOND);
            play.check();
            check_prices(&play);
            if let Some(runners) = &large
                && workers(&play, runners) == 4
            {
                break;
            }
            let waits = large.is_some() && second > allowed;
            assert!(!waits, "it waits since long: {:#?} at {second} s", play.jobs());
        }
        assert!(large.is_some_and(|runners| workers(&play, &runners) == 4), "it has never come");
    }
}
