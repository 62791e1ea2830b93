//! What holds for policies on any workload, in virtual time.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_allocator::{
    Allocation, AllocationError, Candidate, Configuration, Epoch, Facts, Fifo, Gavel, Inventory, Job, Kind,
    KindId, LeastAttained, MarketError, MarketPolicy, Model, Noise, Outcome, Placement, Policy, PolicyError,
    Pollux, PolluxSettings, Profile, ProfileError, Program, RangeError, Ranges, Round, Scaling, Settings,
    Sia, SiaSettings, SimulationError, StepModel, StepTime, Synthetic, check, finish_time_ratios, simulate,
};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::Duration;

/// More than any program here needs.
const LIMIT: Duration = Duration::from_secs(3600);

/// A policy's decisions are checked as they are made.
struct Watched<'a, P> {
    policy: P,
    rule: &'a mut dyn FnMut(&Round<'_>, &[Option<Allocation>]),
}

impl<P: Policy> Policy for Watched<'_, P> {
    fn name(&self) -> &'static str {
        self.policy.name()
    }

    fn needs_tuned_speeds(&self) -> bool {
        self.policy.needs_tuned_speeds()
    }

    fn allocate(&mut self, round: &Round<'_>) -> Result<Vec<Option<Allocation>>, PolicyError> {
        let given = self.policy.allocate(round)?;
        assert_eq!(check(round.inventory, &given), Ok(()));
        for (candidate, given) in round.jobs.iter().zip(&given) {
            let workers = given.as_ref().map_or(candidate.job.workers, Allocation::workers);
            assert!(candidate.job.ranges.workers.contains(&workers), "{} of {}", workers, candidate.job.name);
        }
        (self.rule)(round, &given);
        Ok(given)
    }
}

fn settings(adapts_batch: bool) -> Settings {
    Settings { round: 60, adapts_batch, rounds: 50_000 }
}

fn run(
    world: &Synthetic,
    policy: impl Policy,
    adapts_batch: bool,
    rule: &mut dyn FnMut(&Round<'_>, &[Option<Allocation>]),
) -> Outcome {
    // Gavel's rounds take six minutes, as in its paper. Where one is over before a job has restarted, two that take turns never train.
    let round = if policy.name() == "Gavel" { 360 } else { 60 };
    let settings = Settings { round, ..settings(adapts_batch) };
    let mut watched = Watched { policy, rule };
    simulate(&world.inventory, &world.models, &world.jobs, &mut watched, settings).unwrap()
}

fn small(seed: u64) -> Synthetic {
    Synthetic::new(seed, 12, 120.0).unwrap()
}

/// Pollux with a small search.
fn pollux(seed: u64) -> Pollux {
    Pollux::new(PolluxSettings { population: 12, generations: 12, seed, ..PolluxSettings::default() })
}

/// Nothing is asked beyond capacity and ranges.
fn nothing(_: &Round<'_>, _: &[Option<Allocation>]) {}

#[test]
fn two_jobs_that_take_turns_on_gavel_end() {
    let world = small(14_530_087_382_968_881_542);
    assert_eq!(run(&world, Gavel::default(), false, &mut nothing).jobs.len(), world.jobs.len());
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(12) })]

    #[test]
    fn every_policy_ends_all_jobs_within_capacity(seed: u64) {
        let world = small(seed);
        let outcomes = [
            run(&world, Fifo, false, &mut nothing),
            run(&world, LeastAttained, false, &mut nothing),
            run(&world, Gavel::default(), false, &mut nothing),
            run(&world, Sia::default(), true, &mut nothing),
            run(&world, pollux(seed), true, &mut nothing),
            run(&world, MarketPolicy::default(), true, &mut nothing),
        ];
        for outcome in outcomes {
            prop_assert_eq!(outcome.jobs.len(), world.jobs.len());
            for (job, ended) in world.jobs.iter().zip(&outcome.jobs) {
                prop_assert!(ended.started >= job.arrival && ended.ended > ended.started);
            }
        }
    }

    #[test]
    fn fifo_starts_jobs_by_arrival_and_never_stops_them(seed: u64) {
        let outcome = run(&small(seed), Fifo, false, &mut |round, given| {
            for (candidate, given) in round.jobs.iter().zip(given) {
                prop_assert_or_panic(candidate.current.is_none() || candidate.current == given.as_ref());
            }
        });
        let starts: Vec<f64> = outcome.jobs.iter().map(|job| job.started).collect();
        prop_assert!(starts.is_sorted(), "{:?}", starts);
        prop_assert!(outcome.jobs.iter().all(|job| job.restarts == 0));
    }

    #[test]
    fn who_had_less_waits_for_nobody_with_more(seed: u64) {
        run(&small(seed), LeastAttained, false, &mut |round, given| {
            let waits = |place: &usize| given[*place].is_none();
            for waiting in (0..given.len()).filter(waits) {
                let job = &round.jobs[waiting];
                for (kind, facts) in round.inventory.kinds() {
                    // What those take who had no more.
                    let before = round.jobs.iter().zip(given).filter(|(other, _)| other.attained <= job.attained);
                    let on_kind = before.filter_map(|(_, given)| given.as_ref()).filter(|given| given.kind == kind);
                    let taken: u32 = on_kind.map(Allocation::workers).sum();
                    assert!(taken + job.job.workers > facts.capacity(), "{} waits", job.job.name);
                }
            }
        });
    }

    #[test]
    fn sia_is_never_worse_than_a_greedy_choice(seed: u64) {
        let sia = Sia::default();
        run(&small(seed), sia, true, &mut |round, _| {
            let program = sia.program(round).unwrap();
            let chosen = program.solve(LIMIT).unwrap();
            let (best, gap) = (program.cost(&chosen), 1e-4 * program.cost(&chosen).abs() + 1e-9);
            for greedy in [greedy(&program, |it| it.cost), greedy(&program, |it| f64::from(it.workers))] {
                assert!(best <= program.cost(&greedy) + gap, "{best} {}", program.cost(&greedy));
            }
        });
    }

    #[test]
    fn sia_ends_a_job_of_any_range(least in 1..=10_u32, more in 0..=6_u32, tuned in 0..=6_u32) {
        let range = least..=least + more;
        let ended = lone_with(range.clone(), least + tuned.min(more));
        prop_assert!(ended.is_ok(), "{:?}: {:?}", range, ended);
    }

    #[test]
    fn a_program_without_time_has_a_feasible_solution(program in programs()) {
        let chosen = program.solve(Duration::ZERO).unwrap();
        prop_assert!(fits(&program, &chosen));
        // A job gets something wherever one more fits alone.
        let gets = chosen.iter().any(Option::is_some);
        let could = program.jobs.iter().flatten().any(|it| it.cost < 1.1 && it.workers <= program.capacity[it.kind.0]);
        prop_assert_eq!(gets, could);
        prop_assert!(program.cost(&chosen) <= program.idle_cost * program.jobs.len() as f64 + 1e-9);
    }

    #[test]
    fn the_program_finds_the_least_cost(program in programs()) {
        let chosen = program.solve(LIMIT).unwrap();
        prop_assert!(fits(&program, &chosen));
        let least = exhaustive(&program, &program.capacity, 0);
        prop_assert!(program.cost(&chosen) <= least + 1e-4 * least.abs() + 1e-9, "{} {least}", program.cost(&chosen));
    }
}

#[test]
fn what_a_job_must_get_it_gets_or_nothing_is_decided() {
    let must = Configuration { kind: KindId(0), workers: 4, cost: f64::MIN };
    let other = Configuration { workers: 2, cost: 0.5, ..must };
    for limit in [Duration::ZERO, LIMIT, Duration::MAX] {
        let solve = |accelerators| {
            let jobs = vec![vec![must], vec![other]];
            Program { capacity: vec![accelerators], idle_cost: 1.1, jobs }.solve(limit)
        };
        assert_eq!(solve(6).unwrap(), [Some(must), Some(other)]);
        assert_eq!(solve(5).unwrap(), [Some(must), None]);
        assert_eq!(solve(3), Err(PolicyError::DoNotFit));
    }
}

/// Whether each job gets what it may, and all together what there is.
fn fits(program: &Program, chosen: &[Option<Configuration>]) -> bool {
    let mut used = vec![0; program.capacity.len()];
    for choice in chosen.iter().flatten() {
        used[choice.kind.0] += choice.workers;
    }
    let may = |(job, choice): (&Vec<Configuration>, &Option<Configuration>)| {
        choice.is_none_or(|choice| job.contains(&choice))
    };
    program.jobs.iter().zip(chosen).all(may)
        && used.iter().zip(&program.capacity).all(|(used, all)| used <= all)
}

fn prop_assert_or_panic(holds: bool) {
    assert!(holds, "a running job was moved");
}

/// Jobs in order, each with the configuration that is best by `by` among those that still fit.
fn greedy(program: &Program, by: impl Fn(&Configuration) -> f64) -> Vec<Option<Configuration>> {
    let mut free = program.capacity.clone();
    for must in program.jobs.iter().flatten().filter(|it| it.cost == f64::MIN) {
        free[must.kind.0] -= must.workers;
    }
    let mut choose = |job: &Vec<Configuration>| {
        let must = job.iter().find(|it| it.cost == f64::MIN);
        let fits = job.iter().filter(|it| it.cost < program.idle_cost && it.workers <= free[it.kind.0]);
        let chosen = must.or_else(|| fits.min_by(|one, other| by(one).total_cmp(&by(other)))).copied();
        if let Some(chosen) = chosen.filter(|it| it.cost != f64::MIN) {
            free[chosen.kind.0] -= chosen.workers;
        }
        chosen
    };
    program.jobs.iter().map(&mut choose).collect()
}

fn programs() -> impl Strategy<Value = Program> {
    let configuration = (0..2_usize, 0..4_u32, 1..=110_u32).prop_map(|(kind, power, cost)| Configuration {
        kind: KindId(kind),
        workers: 1 << power,
        cost: f64::from(cost) / 100.0,
    });
    let job = prop::collection::vec(configuration, 0..5);
    let jobs = prop::collection::vec(job, 0..6);
    (jobs, prop::collection::vec(1..=16_u32, 2)).prop_map(|(jobs, capacity)| Program {
        capacity,
        idle_cost: 1.1,
        jobs,
    })
}

/// The least cost of the jobs from one on, by trying all.
fn exhaustive(program: &Program, free: &[u32], from: usize) -> f64 {
    let Some(job) = program.jobs.get(from) else { return 0.0 };
    let idle = program.idle_cost + exhaustive(program, free, from + 1);
    job.iter().filter(|it| it.workers <= free[it.kind.0]).fold(idle, |least, it| {
        let mut left = free.to_vec();
        left[it.kind.0] -= it.workers;
        least.min(it.cost + exhaustive(program, &left, from + 1))
    })
}

/// One model of the synthetic ones on one kind of one host.
fn lone(accelerators: u32) -> (Inventory, Vec<Model>, Job) {
    let world = small(1);
    let kind = Kind { name: "only".to_owned(), hosts: 1, accelerators, job_hosts: 1 };
    let (name, ranges) = ("lone".to_owned(), ranges(&world.models[0]));
    let job = Job { name, arrival: 30.0, model: 0, workers: 2, batch: 256, ranges };
    (Inventory::new(vec![kind]).unwrap(), world.models, job)
}

/// What becomes of a job with such a range of workers, alone on six hosts of four accelerators, under Sia.
/// A job that has just come.
fn candidate<'a>(job: &'a Job, model: &'a Model, fitted: &'a [Option<StepModel>]) -> Candidate<'a> {
    Candidate {
        number: 0,
        job,
        model,
        age: 0.0,
        restarts: 0,
        attained: 0.0,
        is_starting: false,
        current: None,
        fitted,
        noise: Some(Noise { square: 1.0, variance: 1.0 }),
        most_workers: 1,
    }
}

fn lone_with(workers: RangeInclusive<u32>, tuned: u32) -> Result<Outcome, SimulationError> {
    let (_, models, job) = lone(4);
    let kind = Kind { name: "only".to_owned(), hosts: 6, accelerators: 4, job_hosts: 6 };
    let inventory = Inventory::new(vec![kind]).unwrap();
    let ranges = Ranges { workers, ..job.ranges.clone() };
    let job = Job { workers: tuned, ranges, ..job };
    let mut policy = Watched { policy: Sia::default(), rule: &mut nothing };
    simulate(&inventory, &models, &[job], &mut policy, settings(true))
}

#[test]
fn three_workers_exactly_are_given_by_sia() {
    let outcome = lone_with(3..=3, 3).unwrap();
    // Each round takes 60 seconds of three accelerators.
    assert!(outcome.jobs[0].given[0] > 0.0 && outcome.jobs[0].given[0] % 180.0 == 0.0, "{outcome:?}");
    assert_eq!(outcome.jobs[0].restarts, 0);
}

#[test]
fn ranges_beyond_sias_largest_size_have_configurations() {
    let (_, _, job) = steady();
    let kind = Kind { name: "only".to_owned(), hosts: 30, accelerators: 4, job_hosts: 30 };
    let inventory = Inventory::new(vec![kind]).unwrap();
    let alone = Placement { shape: vec![1], batch: 8, time: STEADY };
    let all = Scaling { hosts: 30, workers: 120, batch: 8, time: STEADY };
    let model = steady_model(Profile::new(vec![alone], vec![all], None).unwrap());
    let chosen = |workers: RangeInclusive<u32>, tuned| {
        let ranges = Ranges { workers, kinds: Vec::new(), batch: 8..=1000 };
        let job = Job { workers: tuned, ranges, ..job.clone() };
        let jobs = [Candidate { noise: None, most_workers: 0, ..candidate(&job, &model, &[None]) }];
        let round = Round { inventory: &inventory, seconds: 60.0, jobs: &jobs };
        let given = Sia::default().allocate(&round).unwrap();
        given[0].as_ref().map(Allocation::workers)
    };
    assert_eq!(chosen(65..=67, 66), Some(65));
    // Whole hosts are preferred where the range has some.
    assert_eq!(chosen(65..=70, 70), Some(68));
    assert_eq!(chosen(121..=130, 125), None, "there are 120");
}

#[test]
fn workers_without_a_pass_each_are_no_size() {
    let (_, models, job) = lone(4);
    let kind = Kind { name: "only".to_owned(), hosts: 6, accelerators: 4, job_hosts: 6 };
    let inventory = Inventory::new(vec![kind]).unwrap();
    // A pass has 8 samples at least: of a batch of 100 each of 12 workers has one, and each of 16 has not.
    let ranges = Ranges { batch: 64..=100, ..job.ranges.clone() };
    let job = Job { batch: 100, ranges, ..job };
    let fitted = [Some(StepModel {
        compute_base: 0.1,
        compute_sample: 0.01,
        hosts_base: 0.2,
        hosts_worker: 0.01,
        local_base: 0.05,
        local_worker: 0.001,
        overlap: 1.0,
    })];
    let jobs = [Candidate { most_workers: 24, ..candidate(&job, &models[0], &fitted) }];
    let round = Round { inventory: &inventory, seconds: 60.0, jobs: &jobs };
    let program = Sia::default().program(&round).unwrap();
    let sizes: Vec<u32> = program.jobs[0].iter().map(|it| it.workers).collect();
    assert_eq!(sizes, [1, 2, 4, 8, 12]);
}

#[test]
fn a_tuned_placement_that_no_profile_covers_is_refused() {
    let (inventory, models, job) = lone(16);
    // Of 64 samples each of 12 workers has 6, and no fewer than 8 were measured.
    let uncovered = Job { workers: 12, batch: 64, ..job.clone() };
    let later = Job { name: "later".to_owned(), arrival: 90.0, ..job };
    for policy in [&mut Fifo as &mut dyn Policy, &mut LeastAttained] {
        let jobs = [uncovered.clone(), later.clone()];
        let error = simulate(&inventory, &models, &jobs, policy, settings(false)).unwrap_err();
        assert!(matches!(error, SimulationError::Range(RangeError::Hole { .. })), "{error}");
        let text = error.to_string();
        assert!(text.starts_with("job lone was tuned for 12 workers and a batch of 64"), "{text}");
        assert!(text.ends_with("the nearest that is known has 8 samples"), "{text}");
    }
}

/// Steps of a second, whatever a job runs on.
const STEADY: StepTime = StepTime { step: 1.0, exchange: 0.25 };

/// A model of 90 steps with such a profile.
fn steady_model(profile: Profile) -> Model {
    let facts =
        Facts { name: "steady".to_owned(), epochs: 1, restart: 0.0, restart_guess: 0.0, slowdown: 1.0 };
    let epoch = Epoch { progress: 90.0, noise: Noise { square: 1.0, variance: 1.0 } };
    Model::new(facts, BTreeMap::from([(8, vec![epoch])]), vec![Some(profile)]).unwrap()
}

/// A job of 90 steps of a second each, on one or two workers of one host's two accelerators.
fn steady() -> (Inventory, Model, Job) {
    let kind = Kind { name: "only".to_owned(), hosts: 1, accelerators: 2, job_hosts: 1 };
    let placement = |workers, batch| Placement { shape: vec![workers], batch, time: STEADY };
    let placements = [1, 2].into_iter().flat_map(|workers| [2, 4, 8].map(|batch| placement(workers, batch)));
    let model = steady_model(Profile::new(placements.collect(), Vec::new(), None).unwrap());
    let ranges = Ranges { workers: 1..=2, kinds: Vec::new(), batch: 8..=8 };
    let job = Job { name: "steady".to_owned(), arrival: 0.0, model: 0, workers: 2, batch: 8, ranges };
    (Inventory::new(vec![kind]).unwrap(), model, job)
}

#[test]
fn sizes_in_a_hole_of_the_profile_are_not_given() {
    let (_, model, job) = steady();
    let kind = Kind { name: "only".to_owned(), hosts: 1, accelerators: 4, job_hosts: 1 };
    let inventory = Inventory::new(vec![kind]).unwrap();
    let ranges = Ranges { workers: 1..=4, ..job.ranges.clone() };
    let jobs = [Job { ranges, ..job }];
    let policies: [&mut dyn Policy; 3] = [&mut Sia::default(), &mut pollux(1), &mut MarketPolicy::default()];
    for policy in policies {
        let mut most = 0;
        let mut watched = Watched {
            policy,
            rule: &mut |_, given: &[Option<Allocation>]| {
                most = given.iter().flatten().map(Allocation::workers).fold(most, u32::max);
            },
        };
        simulate(&inventory, std::slice::from_ref(&model), &jobs, &mut watched, settings(true)).unwrap();
        assert_eq!(most, 2, "four were never measured");
    }
    // A policy that gives them ends with what is missing.
    let given = vec![Some(Allocation { kind: KindId(0), accelerators: vec![0, 1, 2, 3] })];
    let error = simulate(&inventory, &[model], &jobs, &mut Wrong(given), settings(true)).unwrap_err();
    let SimulationError::Profile { error: ProfileError::Hole { shape, .. }, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(shape, &[4]);
}

#[test]
fn finish_time_ratios_are_over_a_share_alone() {
    let (inventory, model, job) = steady();
    let (models, jobs) = ([model], [job.clone(), job]);
    let outcome = simulate(&inventory, &models, &jobs, &mut Fifo, settings(false)).unwrap();
    // Both arrive at 0, and the first decision is made at 60. The first runs to 150; the second begins at 180 and runs to 270.
    assert_eq!([0, 1].map(|job: usize| outcome.jobs[job].completion_time()), [150.0, 270.0]);
    // The first shares both of its decisions with the other; the second shares two of four.
    assert_eq!([0, 1].map(|job: usize| outcome.jobs[job].contention), [2.0, 1.5]);
    // Alone a job takes 150 s with two workers. With a share of 1 that is 300 s, and with one of 4/3 it is 225.
    let alone = || Box::new(Fifo) as Box<dyn Policy>;
    let ratios = finish_time_ratios(&inventory, &models, (&jobs, &outcome), &alone, settings(false)).unwrap();
    let ratios: Vec<f64> = ratios.into_iter().map(Option::unwrap).collect();
    assert!((ratios[0] - 0.5).abs() < 1e-12 && (ratios[1] - 1.2).abs() < 1e-12, "{ratios:?}");
}

#[test]
fn a_lone_job_takes_its_start_and_its_epochs() {
    let (inventory, models, job) = lone(4);
    let outcome = simulate(&inventory, &models, &[job], &mut Fifo, settings(false)).unwrap();
    let ended = &outcome.jobs[0];
    // It arrives before the first round's end, is given two accelerators there, and starts for 30 s.
    assert_eq!((ended.started, ended.restarts), (60.0, 0));
    assert!(ended.ended > 60.0 + models[0].facts().restart);
    let rounds = ((ended.ended - 60.0) / 60.0).ceil();
    assert_eq!(ended.given, [rounds * 120.0]);
    assert_eq!(outcome.makespan_hours(), ended.completion_time() / 3600.0);
}

#[test]
fn who_had_least_preempts_and_a_restart_is_counted() {
    let (inventory, models, job) = lone(2);
    let long = Job { model: 2, batch: 64, ranges: ranges(&models[2]), ..job.clone() };
    let short = Job { name: "short".to_owned(), arrival: 600.0, ..job };
    let run = |policy: &mut dyn Policy| {
        let jobs = [long.clone(), short.clone()];
        simulate(&inventory, &models, &jobs, policy, settings(false)).unwrap()
    };
    let (fifo, las) = (run(&mut Fifo), run(&mut LeastAttained));
    assert!(fifo.jobs[1].started >= fifo.jobs[0].ended);
    assert!(las.jobs[1].ended < fifo.jobs[1].ended && las.jobs[0].restarts > 0);
}

fn ranges(model: &Model) -> Ranges {
    let (least, most) = model.batches();
    Ranges { workers: 1..=64, kinds: Vec::new(), batch: least..=most }
}

#[test]
fn a_range_that_nothing_meets_names_the_nearest() {
    let (inventory, models, job) = lone(4);
    let refused = |job: Job| {
        let error = simulate(&inventory, &models, &[job], &mut Fifo, settings(false)).unwrap_err();
        let SimulationError::Range(error) = error else { panic!("{error}") };
        error
    };
    let ranged = |workers, kinds: Vec<KindId>, batch| Ranges { workers, kinds, batch };
    let batches = models[0].batches();
    let all = batches.0..=batches.1;
    let workers = refused(Job { workers: 8, ..job.clone() });
    let text = workers.to_string();
    assert!(text.ends_with("needs 8 workers of one kind; the nearest that fits are 4, on only"), "{text}");
    let outside = refused(Job { ranges: ranged(3..=4, Vec::new(), all.clone()), ..job.clone() });
    let text = outside.to_string();
    assert!(text.ends_with("workers of 3 to 4 do not hold 2; the nearest that do are 2 to 4"), "{text}");
    #[expect(clippy::reversed_empty_ranges, reason = "what is refused")]
    let empty = refused(Job { ranges: ranged(4..=2, Vec::new(), all.clone()), ..job.clone() });
    assert!(matches!(empty, RangeError::Empty { least: 4, most: 2, tuned: 2, .. }), "{empty}");
    let kinds = refused(Job { ranges: ranged(1..=4, vec![KindId(7)], all.clone()), ..job.clone() });
    assert!(matches!(&kinds, RangeError::Kinds { able, .. } if able == "only"), "{kinds}");
    let batch = refused(Job { ranges: ranged(1..=4, Vec::new(), 1..=batches.1), ..job.clone() });
    let RangeError::Batch { least: 1, recorded_least, recorded_most, .. } = batch else { panic!("{batch}") };
    assert_eq!((recorded_least, recorded_most), batches);
    let model = refused(Job { model: 99, ..job.clone() });
    assert!(matches!(model, RangeError::Model { model: 99, models: 4, .. }), "{model}");
    for arrival in [f64::NAN, f64::INFINITY, -1.0] {
        assert!(matches!(refused(Job { arrival, ..job.clone() }), RangeError::Arrival { .. }));
    }
}

/// Gives what is not there.
struct Wrong(Vec<Option<Allocation>>);

impl Policy for Wrong {
    fn name(&self) -> &'static str {
        "wrong"
    }

    fn allocate(&mut self, _: &Round<'_>) -> Result<Vec<Option<Allocation>>, PolicyError> {
        Ok(self.0.clone())
    }
}

#[test]
fn what_a_policy_gives_must_be_there() {
    let (inventory, models, job) = lone(4);
    let refused = |given: Vec<Option<Allocation>>| {
        simulate(&inventory, &models, std::slice::from_ref(&job), &mut Wrong(given), settings(false))
            .unwrap_err()
    };
    let of_allocation = |given| match refused(given) {
        SimulationError::Allocation { error, .. } => error,
        error => panic!("{error}"),
    };
    let given = |kind, accelerators| Some(Allocation { kind: KindId(kind), accelerators });
    let not_there = AllocationError::NotFree { job: 0, kind: "only".to_owned(), accelerator: 4 };
    assert_eq!(of_allocation(vec![given(0, vec![4])]), not_there);
    assert_eq!(of_allocation(vec![given(3, vec![0])]), AllocationError::UnknownKind { job: 0, kind: 3 });
    assert_eq!(of_allocation(Vec::new()), AllocationError::Count { given: 0, jobs: 1 });
    let endless = SimulationError::Endless { unfinished: 1, jobs: 1, rounds: 50_000 };
    assert_eq!(refused(vec![None]), endless);
    let no_time = Settings { round: 0, ..settings(false) };
    assert_eq!(simulate(&inventory, &models, &[job], &mut Fifo, no_time), Err(SimulationError::Round));
}

#[test]
fn adapting_jobs_end_sooner_than_tuned_ones() {
    let world = Synthetic::new(7, 30, 240.0).unwrap();
    let mut by_name: BTreeMap<&str, f64> = BTreeMap::new();
    by_name.insert("fifo", run(&world, Fifo, false, &mut nothing).mean_completion_hours());
    by_name.insert("gavel", run(&world, Gavel::default(), false, &mut nothing).mean_completion_hours());
    by_name.insert("sia", run(&world, Sia::default(), true, &mut nothing).mean_completion_hours());
    by_name.insert("pollux", run(&world, pollux(1), true, &mut nothing).mean_completion_hours());
    by_name
        .insert("market", run(&world, MarketPolicy::default(), true, &mut nothing).mean_completion_hours());
    for adapting in ["sia", "pollux", "market"] {
        let hours = by_name[adapting];
        assert!(hours < by_name["gavel"] && hours < by_name["fifo"], "{adapting}: {by_name:?}");
    }
}

#[test]
fn pollux_decides_the_same_from_one_seed() {
    let world = small(5);
    let outcome = |seed| run(&world, pollux(seed), true, &mut nothing);
    assert_eq!(outcome(1), outcome(1));
    assert_ne!(outcome(1), outcome(2));
}

#[test]
fn settings_that_are_no_numbers_are_refused() {
    let (inventory, models, job) = lone(4);
    let refused = |policy: &mut dyn Policy| {
        let jobs = std::slice::from_ref(&job);
        match simulate(&inventory, &models, jobs, policy, settings(true)).unwrap_err() {
            SimulationError::Policy(error) => error,
            error => panic!("{error}"),
        }
    };
    let idle_cost = SiaSettings { idle_cost: f64::INFINITY, ..SiaSettings::default() };
    assert_eq!(refused(&mut Sia::new(idle_cost)), PolicyError::IdleCost(f64::INFINITY));
    let idle_worth = PolluxSettings { idle_worth: 0.0, ..PolluxSettings::default() };
    let error = refused(&mut Pollux::new(idle_worth));
    assert!(matches!(error, PolicyError::IdleWorth { idle_worth: 0.0, .. }), "{error}");
    let fairness = PolluxSettings { fairness: f64::NAN, ..PolluxSettings::default() };
    let error = refused(&mut Pollux::new(fairness));
    assert!(matches!(error, PolicyError::IdleWorth { fairness, .. } if fairness.is_nan()), "{error}");
    for price in [f64::NAN, f64::INFINITY, -1.0] {
        let error = refused(&mut MarketPolicy::new(price));
        assert!(
            matches!(error, PolicyError::Market(MarketError::Value { what: "a base price", .. })),
            "{error}"
        );
    }
}

#[test]
fn gavel_without_time_gives_all_kinds_alike() {
    let world = small(6);
    let outcome = run(&world, Gavel::new(Duration::ZERO), false, &mut nothing);
    assert_eq!(outcome.jobs.len(), world.jobs.len());
}

#[test]
fn a_goodput_that_is_no_number_is_an_error() {
    let world = small(3);
    let job = &world.jobs[0];
    let nowhere = StepModel {
        compute_base: f64::NAN,
        compute_sample: 0.1,
        hosts_base: 0.1,
        hosts_worker: 0.1,
        local_base: 0.1,
        local_worker: 0.1,
        overlap: 1.0,
    };
    let fitted = [Some(nowhere), None, None];
    let jobs = [Candidate { age: f64::NAN, ..candidate(job, &world.models[job.model], &fitted) }];
    let round = Round { inventory: &world.inventory, seconds: 60.0, jobs: &jobs };
    // Nothing is known that could be compared, so that the job waits and nothing breaks.
    assert_eq!(Sia::default().allocate(&round).unwrap(), [None]);
}
