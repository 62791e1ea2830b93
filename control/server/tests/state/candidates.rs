//! Which hosts another scheduler may place a job's worker on, and how good they are.

use super::jobs::{Play, allocating};
use super::world::{World, operation, settings};
use harmonaize_abi::Nanos;
use harmonaize_planner::HostId;
use harmonaize_server::state::testing::Testing as _;
use harmonaize_server::state::{AllocatorSettings, Instruction, LivePolicy, NextWorker, Settings, Unfit};
use harmonaize_store::WithdrawalKind;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Agents that are away so long after control's start do not come back.
const RETURN: Duration = Duration::from_secs(30);

/// The scores of hosts for a job of tenant `a`.
fn scores(world: &World, job: &str, assumed: &[&str]) -> BTreeMap<String, u8> {
    scores_at(world, world.now + RETURN, job, assumed)
}

fn scores_at(world: &World, now: Duration, job: &str, assumed: &[&str]) -> BTreeMap<String, u8> {
    let assumed = assumed.iter().map(|host| (*host).to_owned()).collect();
    let worker = NextWorker { tenant: "a".to_owned(), job: job.to_owned(), workers: 3, assumed };
    let hosts: Vec<String> = (0..9).chain(0..2).map(|host| format!("h{host}")).collect();
    let before = format!("{:?}", world.state);
    let candidates = world.state.queries(now).candidates(&worker, &hosts).unwrap();
    assert_eq!(format!("{:?}", world.state), before);
    candidates.scores(|| false).into_iter().map(|(host, score)| (host.to_owned(), score)).collect()
}

/// Hosts with the full score.
fn best(scores: &BTreeMap<String, u8>) -> Vec<&str> {
    scores.iter().filter(|(_, score)| **score == 10).map(|(host, _)| host.as_str()).collect()
}

#[test]
fn hosts_that_cannot_serve_are_told_apart() {
    let hosts = BTreeMap::from([("b".to_owned(), BTreeSet::from(["h1".to_owned()]))]);
    let mut world = World::new(Settings { hosts, ..settings(4) }, 7);
    let gone = [0, 1, 2].map(|host| world.agent(host))[0];
    world.gone(gone);
    let (targets, kind, from, until) = (vec!["h2".to_owned()], WithdrawalKind::Drain, Nanos(0), Nanos(0));
    let drain = Instruction::Withdraw { targets, kind, from, until, reason: String::new() };
    let changes = world.state.consider(world.now, &drain).unwrap();
    world.state.apply_stored(world.now, &changes);
    let fits = |tenant: &str, hosts: &[&str]| {
        let hosts: Vec<String> = hosts.iter().map(|host| (*host).to_owned()).collect();
        world.state.queries(world.now + RETURN).fits(tenant, &hosts)
    };
    for (tenant, host, expected) in [
        ("a", "h1", Ok(HostId(1))),
        ("b", "h1", Ok(HostId(1))),
        ("b", "h2", Err(Unfit::Elsewhere)),
        ("a", "h2", Err(Unfit::Drained)),
        ("a", "h0", Err(Unfit::NoAgent)),
        ("a", "h3", Err(Unfit::NoAgent)),
        ("a", "leaf0", Err(Unfit::NoHost)),
        ("a", "", Err(Unfit::NoHost)),
        ("c", "h1", Err(Unfit::NoTenant)),
    ] {
        assert_eq!(fits(tenant, &[host]), [expected], "{tenant} {host}");
    }
    // The order is that of the names, of which one may come twice.
    let [one, none] = [Ok(HostId(1)), Err(Unfit::NoHost)];
    assert_eq!(fits("a", &["h1", "x", "h1"]), [one, none, one]);
    assert_eq!(scores(&world, "train", &[]).into_keys().collect::<Vec<_>>(), ["h1"]);
}

#[test]
fn agents_have_time_to_come_back_when_control_begins_to_lead() {
    let mut world = World::new(settings(4), 7);
    world.agent(1);
    let hosts = ["h0", "h1", "x"].map(str::to_owned);
    let worker = NextWorker { tenant: "a".to_owned(), job: "j".to_owned(), workers: 2, assumed: Vec::new() };
    let fits = |after: Duration| {
        let queries = world.state.queries(after);
        (queries.fits("a", &hosts), queries.candidates(&worker, &hosts).err())
    };
    let of = |host: Unfit| vec![Err(host), Ok(HostId(1)), Err(Unfit::NoHost)];
    assert_eq!(fits(RETURN - Duration::from_nanos(1)), (of(Unfit::NotYet), Some(Unfit::NotYet)));
    assert_eq!(fits(RETURN), (of(Unfit::NoAgent), None));
    // As short as the allocator waits for runners, and never longer.
    let of_round = |round| {
        let allocator =
            allocating(LivePolicy::Fifo).allocator.map(|known| AllocatorSettings { round, ..known });
        Settings { allocator, ..settings(2) }.return_time()
    };
    assert_eq!(of_round(RETURN / 10), RETURN / 10);
    assert_eq!(of_round(RETURN * 10), RETURN);
}

#[test]
fn hosts_beside_the_jobs_communicator_score_highest() {
    let mut world = World::new(settings(8), 7);
    let sessions: Vec<_> = (0..8).map(|host| world.agent(host)).collect();
    world.form(&[sessions[1], sessions[3]], "train");
    let beside = scores(&world, "train", &[]);
    assert_eq!(best(&beside), ["h1", "h3", "h5", "h7"], "{beside:?}");
    // What the scheduler has placed itself counts too.
    let assumed = scores(&world, "other", &["h2", "nowhere"]);
    assert_eq!(best(&assumed), ["h0", "h2", "h4", "h6"], "{assumed:?}");
}

#[test]
fn links_of_other_jobs_cost_a_host_its_score() {
    let mut world = World::new(settings(8), 7);
    let sessions: Vec<_> = (0..8).map(|host| world.agent(host)).collect();
    let idle = scores(&world, "train", &["h0"]);
    assert_eq!((idle["h2"], idle["h4"]), (10, 10), "{idle:?}");
    world.form(&[sessions[2], sessions[3]], "other");
    let shared = scores(&world, "train", &["h0"]);
    assert!(shared["h2"] < shared["h4"] && shared["h4"] == 10, "{shared:?}");
    // Its own is no other.
    let own = scores(&world, "other", &["h0"]);
    assert_eq!(own["h2"], 10, "{own:?}");
}

#[test]
fn links_of_silent_jobs_cost_nobody_a_score() {
    let mut world = World::new(settings(8), 7);
    let sessions: Vec<_> = (0..8).map(|host| world.agent(host)).collect();
    let id = world.form(&[sessions[2], sessions[3]], "other");
    world.now += RETURN;
    world.state.take_operation(world.now, sessions[2], &operation(id, 1, 1 << 20, 0, (1, 2)));
    let busy = scores_at(&world, world.now, "train", &["h0"]);
    assert!(busy["h2"] < 10, "{busy:?}");
    let silent = scores(&world, "train", &["h0"]);
    assert_eq!(silent["h2"], 10, "{silent:?}");
}

#[test]
fn runners_of_a_job_tell_where_it_is() {
    let mut play = Play::with(allocating(LivePolicy::Fifo));
    play.add(3, "a", "bert", (1, 1));
    let scores = scores(&play.world, "bert", &[]);
    assert_eq!(best(&scores), ["h1", "h3"], "{scores:?}");
}
