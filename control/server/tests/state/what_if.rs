//! What would happen to jobs if: asking changes nothing, and what is answered happens once the change is made.

use super::jobs::{Play, ROUND, Runner, allocating};
use super::world::SECOND;
use harmonaize_abi::Nanos;
use harmonaize_abi::session::RunnerError;
use harmonaize_api::v1::{self, AllocationReason, JobChange, JobPhase};
use harmonaize_server::state::{Instruction, LivePolicy, Settings, Terms, WhatIfError};
use harmonaize_store::WithdrawalKind;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeSet;

fn job(tenant: &str, job: &str, (workers_min, workers_max): (u32, u32)) -> v1::AssumedJob {
    let (tenant, job) = (tenant.to_owned(), job.to_owned());
    v1::AssumedJob { tenant, job, workers_min, workers_max, ..Default::default() }
}

fn of_job(job: v1::AssumedJob) -> v1::WhatIfRequest {
    v1::WhatIfRequest { job: Some(job), ..Default::default() }
}

fn of_policy(policy: LivePolicy) -> v1::WhatIfRequest {
    v1::WhatIfRequest { policy: policy.name().to_owned(), ..Default::default() }
}

fn of_hosts(without: &[usize], with: &[usize]) -> v1::WhatIfRequest {
    let names = |hosts: &[usize]| hosts.iter().map(|host| format!("h{host}")).collect();
    v1::WhatIfRequest { without_hosts: names(without), with_hosts: names(with), ..Default::default() }
}

/// What became of each job, with its hosts.
fn changes(reply: &v1::WhatIfReply) -> Vec<(&str, JobChange, usize)> {
    reply.jobs.iter().map(|job| (job.job.as_str(), job.change(), job.hosts.len())).collect()
}

impl Play {
    /// The answer to a question, which changes nothing.
    fn what_if(&mut self, request: &v1::WhatIfRequest) -> Result<v1::WhatIfReply, WhatIfError> {
        let before = format!("{:?}", self.world.state);
        let copy = self.world.state.queries(self.world.now).what_if(request);
        let reply = copy.and_then(|copy| copy.reply());
        assert_eq!(format!("{:?}", self.world.state), before, "{request:?}");
        assert!(self.world.state.take_outputs().is_empty(), "{request:?}");
        reply
    }

    fn instruct(&mut self, instruction: &Instruction) {
        let changes = self.world.state.consider(self.world.now, instruction).unwrap();
        self.world.state.apply_stored(self.world.now, &changes);
        self.world.run_until_quiet();
    }

    fn drain(&mut self, host: &str) {
        let (targets, kind) = (vec![host.to_owned()], WithdrawalKind::Drain);
        let (from, until) = (Nanos(0), Nanos(0));
        self.instruct(&Instruction::Withdraw { targets, kind, from, until, reason: String::new() });
    }

    fn is_drained(&self, host: &str) -> bool {
        let Some(id) = self.settings.topology.host(host) else { return false };
        self.world.state.queries(self.world.now).withdrawn().hosts.contains(&id)
    }

    /// What was assumed of hosts and a job comes true. The policy stays.
    fn make(&mut self, request: &v1::WhatIfRequest) {
        for host in &request.without_hosts {
            self.drain(host);
        }
        for host in &request.with_hosts {
            if self.is_drained(host) {
                let (targets, kind) = (vec![host.clone()], WithdrawalKind::Drain);
                self.instruct(&Instruction::Restore { targets, kind });
            }
            let number = number_of(host);
            for known in self.jobs() {
                let waits = self.runners.values().any(|runner| {
                    (runner.host, &runner.tenant, &runner.report.job) == (number, &known.tenant, &known.job)
                });
                if !waits && may_be(&self.settings, &known.tenant, number) {
                    let of = (known.tenant.as_str(), known.job.as_str());
                    let is_of = |runner: &Runner| (runner.tenant.as_str(), runner.report.job.as_str()) == of;
                    let elastic = self.runners.values().any(|runner| is_of(runner) && runner.elastic);
                    self.add_one(number, of, (known.workers_min, known.workers_max), elastic);
                }
            }
        }
        if let Some(job) = &request.job {
            for host in &job.hosts {
                let workers = (job.workers_min, job.workers_max);
                self.add(number_of(host), &job.tenant, &job.job, workers);
            }
        }
    }

    /// Whether the next round gives what was answered.
    fn check_answer(&mut self, reply: &v1::WhatIfReply, context: &str) {
        assert_eq!(reply.round_ns % 1_000_000_000, 0, "a round at no whole second: {context}");
        self.wait_seconds((reply.round_ns / 1_000_000_000) as u32);
        let at_round = self.jobs();
        // Those that are to end have ended by then, and those that are to start have started.
        self.wait_seconds(8);
        let after = self.jobs();
        assert_eq!(at_round.len(), reply.jobs.len(), "{context}: {at_round:#?} {reply:#?}");
        for forecast in &reply.jobs {
            let of = |jobs: &[v1::JobStatus]| {
                let same =
                    |job: &&v1::JobStatus| (&job.tenant, &job.job) == (&forecast.tenant, &forecast.job);
                jobs.iter().find(same).cloned().unwrap_or_else(|| panic!("{context}: {forecast:#?}"))
            };
            if forecast.hosts.is_empty() {
                let phase = of(&at_round).phase();
                assert!(
                    matches!(phase, JobPhase::Waiting | JobPhase::Recalled),
                    "{context}: {at_round:#?} {forecast:#?}"
                );
            } else {
                let job = of(&after);
                assert_eq!(job.hosts, forecast.hosts, "{context}: {job:#?} {forecast:#?}");
                assert_eq!(job.reason(), forecast.reason(), "{context}: {job:#?} {forecast:#?}");
            }
        }
    }
}

fn number_of(host: &str) -> usize {
    host.strip_prefix('h').unwrap().parse().unwrap()
}

fn may_be(settings: &Settings, tenant: &str, host: usize) -> bool {
    settings.hosts.get(tenant).is_none_or(|hosts| hosts.contains(&format!("h{host}")))
}

#[test]
fn a_job_that_comes_takes_what_another_has_to_spare() {
    let mut play = Play::new(LivePolicy::Fifo);
    play.add_all("a", "bert", (1, 4));
    play.wait_seconds(5);
    let hosts = ["h0", "h1", "h2", "h3"].map(str::to_owned).to_vec();
    let request = of_job(v1::AssumedJob { hosts, ..job("b", "gpt", (2, 2)) });
    let reply = play.what_if(&request).unwrap();
    assert_eq!(changes(&reply), [("bert", JobChange::Shrinks, 2), ("gpt", JobChange::Starts, 2)]);
    assert_eq!((reply.jobs[0].hosts_now.len(), reply.jobs[0].hosts_otherwise.len()), (4, 4));
    assert_eq!([false, true], [reply.jobs[0].assumed, reply.jobs[1].assumed]);
    // Without hosts its runners are wherever there is an agent.
    assert_eq!(changes(&play.what_if(&of_job(job("b", "gpt", (2, 2)))).unwrap()), changes(&reply));
    play.make(&request);
    play.check_answer(&reply, "a job with runners on all hosts");
}

#[test]
fn an_elastic_job_shrinks_as_answered_and_its_workers_run_on() {
    let mut play = Play::new(LivePolicy::Fifo);
    let runners = play.add_elastic((1, 4));
    play.wait_seconds(5);
    let hosts = ["h0", "h1", "h2", "h3"].map(str::to_owned).to_vec();
    let request = of_job(v1::AssumedJob { hosts, ..job("b", "gpt", (2, 2)) });
    let reply = play.what_if(&request).unwrap();
    assert_eq!(changes(&reply), [("bert", JobChange::Shrinks, 2), ("gpt", JobChange::Starts, 2)]);
    play.make(&request);
    play.check_answer(&reply, "an elastic job");
    // It is asked of again once it is resized: nothing starts a worker twice.
    let policy = play.what_if(&of_policy(LivePolicy::Fifo)).unwrap();
    assert_eq!(changes(&policy), [("bert", JobChange::Stays, 2), ("gpt", JobChange::Stays, 2)]);
    assert!(runners.iter().all(|runner| play.runners[runner].started == 1), "{:#?}", play.runners);
}

#[test]
fn workers_that_wait_for_another_one_are_not_forgotten() {
    let allocator = allocating(LivePolicy::Fifo).allocator;
    let mut play = Play::with(Settings { allocator, ..super::world::settings(6) });
    play.world.wait(ROUND);
    let add = |play: &mut Play, host: usize| play.add_one(host, ("a", "bert"), (3, 3), true);
    let members = [3, 4, 5].map(|host| add(&mut play, host));
    play.wait_seconds(3);
    for host in 0..2 {
        add(&mut play, host);
    }
    play.die(members[2]);
    let reply = play.what_if(&of_policy(LivePolicy::Fifo)).unwrap();
    assert_eq!(reply.jobs[0].hosts, ["h3", "h4", "h0"], "{reply:?}");
    play.check_answer(&reply, "a worker is lost");
}

#[test]
fn another_policy_would_let_the_other_job_run() {
    let mut play = Play::new(LivePolicy::Fifo);
    play.add_all("a", "bert", (4, 4));
    play.wait_seconds(5);
    play.add_all("b", "gpt", (4, 4));
    play.wait_seconds(5);
    let reply = play.what_if(&of_policy(LivePolicy::Fifo)).unwrap();
    assert_eq!(changes(&reply), [("bert", JobChange::Stays, 4), ("gpt", JobChange::Waits, 0)]);
    let reply = play.what_if(&of_policy(LivePolicy::LeastAttained)).unwrap();
    assert_eq!(reply.policy, "least-attained");
    assert_eq!(changes(&reply), [("gpt", JobChange::Starts, 4), ("bert", JobChange::Stops, 0)]);
    assert_eq!((reply.jobs[1].hosts_otherwise.len(), reply.jobs[1].reason()), (4, AllocationReason::NoRoom));
}

#[test]
fn hosts_that_go_or_come_change_who_runs() {
    let mut play = Play::new(LivePolicy::Fifo);
    play.add_all("a", "bert", (3, 4));
    play.wait_seconds(5);
    let reply = play.what_if(&of_hosts(&[0], &[])).unwrap();
    assert_eq!(changes(&reply), [("bert", JobChange::Shrinks, 3)]);
    assert_eq!(reply.jobs[0].hosts, ["h1", "h2", "h3"]);
    let reply = play.what_if(&of_hosts(&[0, 1], &[])).unwrap();
    assert_eq!(changes(&reply), [("bert", JobChange::Stops, 0)]);
    assert_eq!(reply.jobs[0].reason(), AllocationReason::TooFewRunners);
    play.drain("h0");
    play.wait_seconds(35);
    let request = of_hosts(&[], &[0]);
    let reply = play.what_if(&request).unwrap();
    assert_eq!(changes(&reply), [("bert", JobChange::Grows, 4)]);
    play.make(&request);
    play.check_answer(&reply, "h0 serves again");
}

#[test]
fn a_job_gets_hosts_of_one_rack_and_is_told_its_predicted_time() {
    // Even hosts are at one leaf, odd ones at the other.
    let mut play = Play::new(LivePolicy::Fifo);
    let forecast = |play: &mut Play, numbers: &[usize]| {
        let hosts = numbers.iter().map(|host| format!("h{host}")).collect();
        let reply = play.what_if(&of_job(v1::AssumedJob { hosts, ..job("b", "gpt", (2, 2)) })).unwrap();
        let job = reply.jobs.into_iter().next().unwrap();
        assert_eq!(job.operation_bytes, 1 << 20);
        (job.hosts, job.predicted_ns)
    };
    let (within, near) = forecast(&mut play, &[0, 1, 2, 3]);
    assert_eq!(within, ["h0", "h2"]);
    assert_eq!(forecast(&mut play, &[0, 1, 3]).0, ["h1", "h3"]);
    let (across, far) = forecast(&mut play, &[0, 1]);
    assert_eq!(across, ["h0", "h1"]);
    assert!(0 < near && near < far, "{near} ns within a rack, {far} ns across");
    // What is answered happens.
    let hosts = ["h0", "h1", "h3"].map(str::to_owned).to_vec();
    let request = of_job(v1::AssumedJob { hosts, ..job("b", "gpt", (2, 2)) });
    let reply = play.what_if(&request).unwrap();
    play.make(&request);
    play.check_answer(&reply, "runners on hosts of two racks");
}

#[test]
fn a_job_gets_hosts_of_a_kind_that_it_names() {
    let mut text = super::topology::switch("leaf0");
    for (host, kind) in ["a100", "h100", "a100", "h100"].into_iter().enumerate() {
        text += &super::topology::host(host);
        text += &format!("kind = \"{kind}\"\n");
        text += &super::topology::link(&format!("h{host}"), "leaf0", "50us");
    }
    let allocator = allocating(LivePolicy::Fifo).allocator;
    let mut play = Play::with(Settings { allocator, ..super::world::settings_of(&text) });
    play.world.wait(ROUND);
    let asked = |play: &mut Play, workers: (u32, u32), kinds: &[&str]| {
        let kinds = kinds.iter().map(|kind| (*kind).to_owned()).collect();
        let reply = play.what_if(&of_job(v1::AssumedJob { kinds, ..job("b", "gpt", workers) }));
        reply.map(|reply| reply.jobs.into_iter().next().unwrap())
    };
    let job = asked(&mut play, (2, 4), &["h100"]).unwrap();
    assert_eq!((job.hosts, job.kind), (vec!["h1".to_owned(), "h3".to_owned()], "h100".to_owned()));
    // Of any kind, and of one at a time.
    assert_eq!(asked(&mut play, (1, 4), &[]).unwrap().hosts, ["h0", "h2"]);
    let waits = asked(&mut play, (3, 4), &["a100", "h100"]).unwrap();
    assert_eq!((waits.change(), waits.reason()), (JobChange::Waits, AllocationReason::TooFewRunners));
    assert_eq!((waits.kind.as_str(), waits.nearest_min), ("", 2));
    let unknown = asked(&mut play, (1, 1), &["b200"]).unwrap_err();
    assert_eq!(unknown.to_string(), "the topology has no host of kind `b200`; its kinds are: a100, h100");
    // What is told of jobs and hosts has their kinds.
    play.add_all("a", "bert", (2, 2));
    play.wait_seconds(3);
    let reply = play.world.state.queries(play.world.now).jobs();
    let kinds: Vec<(&str, u32)> = reply.kinds.iter().map(|one| (one.kind.as_str(), one.hosts)).collect();
    assert_eq!(kinds, [("a100", 2), ("h100", 2)]);
    assert_eq!((reply.jobs[0].kind.as_str(), reply.jobs[0].hosts.len()), ("a100", 2));
    let fabric = play.world.state.queries(play.world.now).topology();
    assert_eq!(fabric.hosts.iter().map(|host| host.kind.as_str()).next(), Some("a100"));
}

#[test]
fn links_that_another_job_uses_send_a_job_to_the_other_rack() {
    let mut play = Play::new(LivePolicy::Fifo);
    let others = [0, 2].map(|host| play.agents[&host]);
    play.world.ignore(&others);
    play.world.form(&others, "busy");
    let hosts = ["h0", "h1", "h2", "h3"].map(str::to_owned).to_vec();
    let request = of_job(v1::AssumedJob { hosts, ..job("b", "gpt", (2, 2)) });
    assert_eq!(play.what_if(&request).unwrap().jobs[0].hosts, ["h1", "h3"]);
    // What its own communicators have flow is not in its way.
    let own =
        of_job(v1::AssumedJob { job: "busy".to_owned(), tenant: "a".to_owned(), ..request.job.unwrap() });
    assert_eq!(play.what_if(&own).unwrap().jobs[0].hosts, ["h0", "h2"]);
}

#[test]
fn a_job_without_room_is_told_the_nearest_range() {
    let mut play = Play::new(LivePolicy::Fifo);
    play.add_all("a", "bert", (3, 3));
    play.wait_seconds(5);
    let free: Vec<String> = {
        let taken: BTreeSet<String> = play.jobs().into_iter().flat_map(|job| job.hosts).collect();
        (0..4).map(|host| format!("h{host}")).filter(|host| !taken.contains(host)).collect()
    };
    let asked = |job: v1::AssumedJob, play: &mut Play| {
        let reply = play.what_if(&of_job(job)).unwrap();
        let job = reply.jobs.into_iter().find(|job| job.assumed).unwrap();
        assert!(!job.reason_text.is_empty());
        (job.change(), job.reason(), (job.nearest_min, job.nearest_max))
    };
    let (waits, no_room) = (JobChange::Waits, AllocationReason::NoRoom);
    assert_eq!(asked(job("b", "gpt", (2, 4)), &mut play), (waits, no_room, (1, 4)));
    let on_free = v1::AssumedJob { hosts: free, ..job("b", "gpt", (2, 4)) };
    assert_eq!(asked(on_free, &mut play), (waits, AllocationReason::TooFewRunners, (1, 4)));
    let runs = asked(job("b", "gpt", (1, 4)), &mut play);
    assert_eq!((runs.0, runs.2), (JobChange::Starts, (0, 0)));
    // One that waits since earlier is not passed by.
    play.add_all("b", "gpt", (2, 2));
    play.wait_seconds(5);
    assert_eq!(asked(job("b", "next", (1, 1)), &mut play), (waits, no_room, (0, 0)));
}

#[test]
fn senseless_questions_are_refused_by_kind() {
    let mut settings = allocating(LivePolicy::Fifo);
    settings.terms.insert("b".to_owned(), Terms { ranks: Some(3), ..Terms::default() });
    let mut play = Play::with(settings.clone());
    play.add(0, "a", "bert", (1, 1));
    let mut refused = |request: v1::WhatIfRequest| play.what_if(&request).unwrap_err();
    assert_eq!(refused(v1::WhatIfRequest::default()), WhatIfError::Nothing);
    assert_eq!(refused(of_hosts(&[9], &[])), WhatIfError::Host("h9".to_owned()));
    assert_eq!(refused(of_hosts(&[], &[9])), WhatIfError::Host("h9".to_owned()));
    assert_eq!(refused(of_hosts(&[1], &[1])), WhatIfError::Contradiction("h1".to_owned()));
    let on = v1::AssumedJob { hosts: vec!["leaf0".to_owned()], ..job("b", "gpt", (1, 1)) };
    assert_eq!(refused(of_job(on)), WhatIfError::Host("leaf0".to_owned()));
    let policy = v1::WhatIfRequest { policy: "sia".to_owned(), ..Default::default() };
    assert!(matches!(refused(policy), WhatIfError::Policy(_)));
    assert_eq!(refused(of_job(job("c", "gpt", (1, 1)))), WhatIfError::Tenant("c".to_owned()));
    assert_eq!(refused(of_job(job("b", "g/pt", (1, 1)))), WhatIfError::Job(RunnerError::Job));
    assert_eq!(refused(of_job(job("a", "bert", (1, 1)))), WhatIfError::JobThere("a/bert".to_owned()));
    let empty = refused(of_job(job("b", "gpt", (4, 2))));
    assert_eq!(empty, WhatIfError::Job(RunnerError::Workers { least: 4, most: 2 }));
    assert!(empty.to_string().ends_with("the nearest range is 4..4"), "{empty}");
    let many = refused(of_job(job("b", "gpt", (4, 6))));
    assert_eq!(many, WhatIfError::Workers { range: (4, 6), most: 3 });
    assert!(many.to_string().ends_with("the nearest range is 3..3"), "{many}");
    let mut none = Play::with(Settings { allocator: None, ..settings });
    assert_eq!(none.what_if(&of_hosts(&[0], &[])), Err(WhatIfError::NoAllocator));
}

#[test]
fn without_agents_a_job_could_wait_nowhere() {
    let mut play = Play::new(LivePolicy::Fifo);
    for session in std::mem::take(&mut play.agents).into_values() {
        play.world.gone(session);
    }
    assert_eq!(play.what_if(&of_job(job("b", "gpt", (1, 1)))), Err(WhatIfError::NoAgent));
    let serves = v1::WhatIfRequest { job: Some(job("b", "gpt", (1, 1))), ..of_hosts(&[], &[2]) };
    assert_eq!(play.what_if(&serves).unwrap().jobs[0].hosts, ["h2"]);
}

/// Hosts, tenants' limits and jobs that are drawn, some time after control started or before its first round.
fn drawn(rng: &mut ChaCha8Rng, policy: LivePolicy, settled: bool) -> Play {
    let hosts = rng.random_range(2..=8);
    let mut settings = Settings { allocator: allocating(policy).allocator, ..super::world::settings(hosts) };
    if rng.random_range(0..3) == 0 {
        let ranks = Some(rng.random_range(1..=hosts as u32));
        settings.terms.insert("a".to_owned(), Terms { ranks, ..Terms::default() });
    }
    if rng.random_range(0..3) == 0 {
        let names = some_hosts(rng, hosts).into_iter().map(|host| format!("h{host}")).collect();
        settings.hosts.insert("b".to_owned(), names);
    }
    let mut play = Play::with(settings);
    if settled {
        play.world.wait(ROUND);
    }
    for host in 0..hosts {
        play.add(host, "a", "base", (1, 3));
    }
    for number in 0..rng.random_range(0..5) {
        if settled {
            play.wait_seconds(rng.random_range(0..40));
        }
        let job = drawn_job(rng, &play.settings, &format!("job{number}"));
        // Every other job is elastic.
        for host in &job.hosts {
            let of = (job.tenant.as_str(), job.job.as_str());
            play.add_one(number_of(host), of, (job.workers_min, job.workers_max), number % 2 == 1);
        }
        if rng.random_range(0..4) == 0 {
            play.drain(&format!("h{}", rng.random_range(0..hosts)));
        }
    }
    play
}

/// Some hosts, at least one.
fn some_hosts(rng: &mut ChaCha8Rng, hosts: usize) -> BTreeSet<usize> {
    let mut some: BTreeSet<usize> = (0..hosts).filter(|_| rng.random_range(0..3) > 0).collect();
    some.insert(rng.random_range(0..hosts));
    some
}

/// A job that its tenant may have, with runners on some hosts where the tenant may be.
fn drawn_job(rng: &mut ChaCha8Rng, settings: &Settings, name: &str) -> v1::AssumedJob {
    let hosts = settings.topology.hosts().len();
    let tenant = ["a", "b"][rng.random_range(0..2)];
    let allowed: Vec<usize> = (0..hosts).filter(|host| may_be(settings, tenant, *host)).collect();
    let ranks = settings.terms.get(tenant).and_then(|terms| terms.ranks).unwrap_or(u32::MAX);
    let least = rng.random_range(1..=ranks.min(allowed.len() as u32).min(4));
    let most = least + rng.random_range(0..4);
    let on = some_hosts(rng, allowed.len()).into_iter().map(|at| format!("h{}", allowed[at])).collect();
    v1::AssumedJob { hosts: on, ..job(tenant, name, (least, most)) }
}

fn seeds() -> Vec<u64> {
    match std::env::var("HARMONAIZE_SEED") {
        Ok(seed) => vec![seed.parse().unwrap()],
        Err(_) => (0..60).collect(),
    }
}

#[test]
fn what_is_answered_happens_once_hosts_and_jobs_change() {
    for seed in seeds() {
        println!("seed {seed}");
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let policy = LivePolicy::ALL[rng.random_range(0..2)];
        let mut play = drawn(&mut rng, policy, true);
        play.wait_seconds(4);
        // The last round is carried out, and the next some time ahead.
        while !(5..=20).contains(&(play.what_if(&of_policy(policy)).unwrap().round_ns / 1_000_000_000)) {
            play.wait(SECOND);
        }
        let hosts = play.settings.topology.hosts().len();
        let (mut without, mut with) = (Vec::new(), Vec::new());
        for host in 0..hosts {
            match rng.random_range(0..6) {
                0 => without.push(host),
                1 => with.push(host),
                _ => {}
            }
        }
        let mut request = of_hosts(&without, &with);
        if request == v1::WhatIfRequest::default() || rng.random_range(0..2) == 0 {
            request.job = Some(drawn_job(&mut rng, &play.settings, "new"));
        }
        let reply = play.what_if(&request).unwrap();
        play.make(&request);
        play.check_answer(&reply, &format!("seed {seed}, policy {}, {request:?}", policy.name()));
    }
}

#[test]
fn what_is_answered_happens_under_the_other_policy() {
    for seed in seeds() {
        println!("seed {seed}");
        for [configured, assumed] in
            [[LivePolicy::Fifo, LivePolicy::LeastAttained], [LivePolicy::LeastAttained, LivePolicy::Fifo]]
        {
            // No round has been yet, so that both have the same behind them.
            let mut play = drawn(&mut ChaCha8Rng::seed_from_u64(seed), configured, false);
            let reply = play.what_if(&of_policy(assumed)).unwrap();
            let mut other = drawn(&mut ChaCha8Rng::seed_from_u64(seed), assumed, false);
            other.check_answer(&reply, &format!("seed {seed}, policy {}", assumed.name()));
        }
    }
}
