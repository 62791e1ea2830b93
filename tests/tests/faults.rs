//! What goes wrong costs its own communicator a clear error within a bounded time, and nobody else anything.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_client::{
    Access, Client, Dtype, Error, EventKind, JoinOptions, JoinRefusal, OperationOptions, Rank, ReduceOp,
    RegroupOptions, Status,
};
use harmonaize_testkit::deployment::Setup;
use harmonaize_tests::job::{Worker, at_all, deploy, joined, options, run, sockets};
use harmonaize_tests::load::under_load;
use harmonaize_tests::{STEP, star};
use std::path::PathBuf;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// Times short enough for a test.
fn shorten_timeouts(setup: &mut Setup) {
    setup.control = "join_timeout = \"2s\"\n".into();
    setup.tenant += "\noperation_timeout = \"1s\"\n";
    setup.agent = "peer_timeout = \"1s\"\n".into();
}

/// While `scenario` runs for tenant `a`, tenant `b` keeps computing through these sockets of its; all of it right.
fn with_undisturbed_tenant(undisturbed: &[PathBuf], scenario: impl FnOnce()) {
    under_load(undisturbed, |load| {
        scenario();
        load.goes_on();
    });
}

/// Status, ranks concerned and calls of a failed operation.
fn failure(error: &Error) -> (Status, Vec<Rank>, usize) {
    match error {
        Error::Operation { status, detail: Some(detail), .. } => {
            (*status, detail.ranks.clone(), detail.calls.len())
        }
        other => panic!("no operation failed with a reason: {other:?}"),
    }
}

/// Asserts that the operation failed because this rank was lost.
fn assert_lost<T: std::fmt::Debug>(result: &anyhow::Result<T>, rank: u32) {
    let error = result.as_ref().expect_err("a rank was lost");
    let (status, ranks, _) = failure(downcast(error));
    assert_eq!((status, ranks), (Status::RankLost, vec![Rank(rank)]), "{error:#}");
}

/// Begins an AllReduce.
fn begin_sum(worker: &Worker, elements: usize) -> anyhow::Result<harmonaize_client::Operation> {
    let tensor = worker.tensor(&Worker::input(worker.rank, 1, elements))?;
    Ok(worker.communicator.all_reduce_in_place(&tensor, ReduceOp::Sum)?)
}

/// Begins a large AllReduce once all ranks are there.
fn begin(worker: &Worker, elements: usize) -> anyhow::Result<harmonaize_client::Operation> {
    worker.communicator.barrier()?.wait(STEP)?;
    begin_sum(worker, elements)
}

fn downcast(error: &anyhow::Error) -> &Error {
    error.downcast_ref().unwrap_or_else(|| panic!("not an error of the client: {error:#}"))
}

#[test]
fn mismatched_calls_name_rank_and_call() {
    let Some(deployment) = deploy(&star(3, "10Gbit/s"), shorten_timeouts) else { return };
    with_undisturbed_tenant(&sockets(&deployment, "b"), || {
        type Calls = (&'static str, fn(&Worker) -> Result<harmonaize_client::Operation, Error>);
        let odd: [Calls; 4] = [
            ("count", |w| {
                w.communicator.all_reduce_in_place(&w.client.tensor(Dtype::U64, 999)?, ReduceOp::Sum)
            }),
            ("type", |w| {
                w.communicator.all_reduce_in_place(&w.client.tensor(Dtype::F32, 1000)?, ReduceOp::Sum)
            }),
            ("reduction", |w| {
                w.communicator.all_reduce_in_place(&w.client.tensor(Dtype::U64, 1000)?, ReduceOp::Max)
            }),
            ("collective", |w| w.communicator.barrier()),
        ];
        for (what, call) in odd {
            let results = run(&sockets(&deployment, "a"), what, 1, |worker| {
                worker.sum(1, 500, true, STEP)?;
                let tensor = worker.client.tensor(Dtype::U64, 1000)?;
                let operation = if worker.rank == 1 {
                    call(worker)
                } else {
                    worker.communicator.all_reduce_in_place(&tensor, ReduceOp::Sum)
                };
                operation?.wait(STEP)?;
                Ok(())
            });
            for (rank, result) in results.iter().enumerate() {
                let error = result.as_ref().expect_err("a mismatch is an error");
                let (status, ranks, calls) = failure(downcast(error));
                assert_eq!((status, calls), (Status::Mismatch, 2), "{what}, rank {rank}: {error:#}");
                assert!(ranks.contains(&Rank(1)), "{what}, rank {rank}: {error:#}");
                assert!(error.to_string().contains("rank 1 called"), "{what}, rank {rank}: {error:#}");
            }
        }
    });
}

#[test]
fn a_timeout_names_missing_ranks() {
    let Some(deployment) = deploy(&star(3, "10Gbit/s"), shorten_timeouts) else { return };
    with_undisturbed_tenant(&sockets(&deployment, "b"), || {
        let absent = Barrier::new(6);
        let results = run(&sockets(&deployment, "a"), "late", 2, |worker| {
            worker.sum(1, 500, true, STEP)?;
            let result =
                if [3, 4].contains(&worker.rank) { Ok(()) } else { worker.sum(2, 9_000, false, STEP) };
            absent.wait();
            result
        });
        for (rank, result) in results.iter().enumerate().filter(|(rank, _)| ![3, 4].contains(rank)) {
            let error = result.as_ref().expect_err("a time-out");
            let (status, ranks, _) = failure(downcast(error));
            assert_eq!((status, ranks), (Status::Timeout, vec![Rank(3), Rank(4)]), "rank {rank}: {error:#}");
            assert!(error.to_string().contains("operation 1"), "{error:#}");
        }
    });
}

/// Options with a time-out of so many seconds.
fn timeout(seconds: u64) -> OperationOptions {
    OperationOptions { timeout: Some(Duration::from_secs(seconds)), ..OperationOptions::default() }
}

/// Rank 0 calls a Barrier and waits so long in vain; then rank 1 comes, and both succeed.
fn wait_for_a_late_rank(sockets: &[PathBuf], job: &str, late: Duration, options: OperationOptions) {
    let late_now = Barrier::new(2);
    let results = run(sockets, job, 1, |worker| {
        let communicator = worker.communicator.with(options)?;
        if worker.rank == 1 {
            late_now.wait();
            communicator.barrier()?.wait(STEP)?;
            return Ok(());
        }
        let mut operation = communicator.barrier()?;
        let waited = operation.wait(late);
        late_now.wait();
        anyhow::ensure!(matches!(waited, Err(Error::WaitTimeout { .. })), "{waited:?}");
        operation.wait(STEP)?;
        Ok(())
    });
    results.into_iter().for_each(|result| result.unwrap());
}

#[test]
fn a_call_or_its_join_sets_the_timeout() {
    let ceiling = Duration::from_secs(20);
    let adjust = |setup: &mut Setup| setup.tenant += "\noperation_timeout = \"20s\"\n";
    let Some(deployment) = deploy(&star(2, "10Gbit/s"), adjust) else { return };
    let sockets = sockets(&deployment, "a");
    wait_for_a_late_rank(&sockets, "patient", Duration::from_millis(1500), timeout(15));
    let (joined, over) = (Barrier::new(2), Barrier::new(2));
    std::thread::scope(|scope| {
        let (sockets, joined, over) = (&sockets, &joined, &over);
        let rank = |rank: usize, operation_timeout| {
            let client = Client::attach(&sockets[rank], options(Access::Mapped, 1)).unwrap();
            let options = JoinOptions { timeout: STEP, operation_timeout, ..JoinOptions::default() };
            let job = client.join_with("ranks differ", Rank(rank as u32), 2, &options).unwrap();
            joined.wait();
            (client, job)
        };
        let impatient = scope.spawn(move || {
            let (_client, job) = rank(0, Some(Duration::from_millis(500)));
            // The call's own time-out is longer than the join's.
            let mut operation = job.with(timeout(15)).unwrap().barrier().unwrap();
            let waited = operation.wait(Duration::from_millis(1000));
            assert!(matches!(waited, Err(Error::WaitTimeout { .. })), "{waited:?}");
            over.wait();
            operation.wait(STEP).unwrap();
            let result = job.barrier().unwrap().wait(STEP);
            over.wait();
            result.unwrap_err()
        });
        let (client, job) = rank(1, None);
        over.wait();
        job.barrier().unwrap().wait(STEP).unwrap();
        over.wait();
        // The other did not wait for as long as this one would have.
        let mut errors = vec![job.barrier().unwrap().wait(STEP).unwrap_err()];
        errors.push(impatient.join().unwrap());
        for error in &errors {
            assert_eq!(failure(error), (Status::Timeout, vec![Rank(1)], 0), "{error}");
        }
        let asked = ceiling + Duration::from_millis(1);
        let more = JoinOptions { operation_timeout: Some(asked), ..JoinOptions::default() };
        for refused in [
            client.join_with("too patient", Rank(0), 1, &more).unwrap_err(),
            job.with(OperationOptions { timeout: Some(asked), ..Default::default() }).unwrap_err(),
        ] {
            let Error::TimeoutTooLong { longest, .. } = refused else { panic!("{refused}") };
            assert_eq!(longest, ceiling);
        }
    });
}

#[test]
#[ignore = "takes a minute; cargo xtask soak --suite late runs it"]
fn an_operation_waits_a_minute_for_a_late_rank() {
    let Some(deployment) = deploy(&star(2, "10Gbit/s"), |_| ()) else { return };
    let usual = OperationOptions::default();
    wait_for_a_late_rank(&sockets(&deployment, "a"), "late", Duration::from_secs(60), usual);
}

#[test]
fn who_waits_hears_soon_of_a_lost_host() {
    let adjust = |setup: &mut Setup| setup.agent = "peer_timeout = \"1s\"\n".into();
    let Some(deployment) = deploy(&star(3, "1Gbit/s"), adjust) else { return };
    let over = Barrier::new(3);
    let results = run(&sockets(&deployment, "a"), "dark", 1, |worker| {
        worker.sum(1, 1000, true, STEP)?;
        if worker.rank == 2 {
            over.wait();
            return Ok(());
        }
        let mut operation = worker.communicator.barrier()?;
        if worker.rank == 0 {
            deployment.fabric().set_links("h2", false)?;
        }
        // Not as long as the operation may wait.
        let result = operation.wait(STEP);
        over.wait();
        Ok(result.map(drop)?)
    });
    results[..2].iter().for_each(|result| assert_lost(result, 2));
}

#[test]
fn an_abort_frees_all_ranks_whoever_they_wait_for() {
    let Some(deployment) = deploy(&star(3, "1Gbit/s"), |_| ()) else { return };
    with_undisturbed_tenant(&sockets(&deployment, "b"), || {
        let (called, heard, aborted) = (Barrier::new(6), Barrier::new(6), std::sync::Mutex::new(None));
        let results = run(&sockets(&deployment, "a"), "aborts", 2, |worker| {
            worker.sum(1, 500, true, STEP)?;
            let job = &worker.communicator;
            // Rank 1 never calls it.
            let operation = (worker.rank != 1).then(|| begin_sum(worker, 100_000)).transpose()?;
            called.wait();
            let error = std::thread::scope(|scope| {
                let waiting = operation.map(|mut operation| {
                    scope.spawn(move || operation.wait(STEP).expect_err("it was aborted"))
                });
                if worker.rank == 4 {
                    *aborted.lock().unwrap() = Some(Instant::now());
                    job.abort();
                }
                waiting.map(|thread| thread.join().unwrap())
            });
            let seen = Instant::now();
            let by = |error: &Error| match error {
                Error::Aborted { by } => Ok(*by),
                other => Err(anyhow::anyhow!("{other:?}")),
            };
            // Whoever did not wait finds it out by its next call, which is another one than the others': it must not come first.
            heard.wait();
            let error = match error {
                Some(error) => error,
                None => job.barrier()?.wait(STEP).expect_err("it was aborted"),
            };
            anyhow::ensure!(by(&error)? == Some(Rank(4)), "{error}");
            let again = match job.barrier() {
                Ok(mut operation) => operation.wait(STEP).expect_err("it is over"),
                Err(error) => error,
            };
            anyhow::ensure!(by(&again)? == Some(Rank(4)), "{again}");
            job.abort();
            let next = job.regroup(&RegroupOptions { timeout: STEP, ..Default::default() })?;
            next.barrier()?.wait(STEP)?;
            Ok(seen)
        });
        let aborted = aborted.lock().unwrap().unwrap();
        for (rank, seen) in results.into_iter().enumerate() {
            let took = seen.unwrap_or_else(|error| panic!("rank {rank}: {error:#}")) - aborted;
            println!("rank {rank} heard of the abort after {took:?}");
            // A second is promised; a busy machine may take longer.
            assert!(took < Duration::from_secs(10), "rank {rank} heard of the abort after {took:?}");
        }
    });
}

#[test]
fn impossible_joins_are_refused_with_reason() {
    let Some(deployment) = deploy(&star(2, "10Gbit/s"), shorten_timeouts) else { return };
    let sockets = sockets(&deployment, "a");
    let attach = |host: usize| Client::attach(&sockets[host], options(Access::Mapped, 1)).unwrap();
    let (first, second) = (attach(0), attach(1));
    let kind = |error: Error| match error {
        Error::Join { kind, concerned, .. } => (kind, concerned),
        other => panic!("{other}"),
    };
    assert_eq!(kind(first.join("j", Rank(2), 2, STEP).unwrap_err()).0, JoinRefusal::Rank);
    let missing = kind(first.join("alone", Rank(0), 3, STEP).unwrap_err());
    assert_eq!(missing, (JoinRefusal::Timeout, vec![Rank(1), Rank(2)]));
    // Control lets a rank wait for 2 s; who is less patient is told sooner, with the same reason.
    let missing = kind(first.join("impatient", Rank(1), 2, Duration::from_millis(300)).unwrap_err());
    assert_eq!(missing, (JoinRefusal::Timeout, vec![Rank(0)]));
    // Of two that want the same rank, the one that comes later is refused.
    let both = std::thread::scope(|scope| {
        let rivals =
            [&first, &second].map(|client| scope.spawn(|| client.join("taken", Rank(0), 2, STEP).map(drop)));
        rivals.map(|rival| kind(rival.join().unwrap().unwrap_err()))
    });
    assert!(both.contains(&(JoinRefusal::Taken, vec![Rank(0)])), "{both:?}");
    assert!(both.contains(&(JoinRefusal::Timeout, vec![Rank(1)])), "{both:?}");
}

#[test]
fn a_dead_process_ends_its_communicator_only() {
    let Some(deployment) = deploy(&star(3, "1Gbit/s"), shorten_timeouts) else { return };
    with_undisturbed_tenant(&sockets(&deployment, "b"), || {
        let began = Instant::now();
        let results = run(&sockets(&deployment, "a"), "dies", 1, |worker| {
            let mut operation = begin(worker, 4 << 20)?;
            if worker.rank == 2 {
                return Ok(()); // The attachment is dropped with the operation in flight.
            }
            operation.wait(STEP)?;
            Ok(())
        });
        results[..2].iter().for_each(|result| assert_lost(result, 2));
        assert!(began.elapsed() < STEP);
    });
}

#[test]
fn a_dead_agent_ends_its_communicators_only() {
    let Some(mut deployment) = deploy(&star(3, "1Gbit/s"), shorten_timeouts) else { return };
    let agent = deployment.agent(2).unwrap().id();
    with_undisturbed_tenant(&sockets(&deployment, "b")[..2], || {
        let results = run(&sockets(&deployment, "a"), "dies", 1, |worker| {
            let mut operation = begin(worker, 8 << 20)?;
            if worker.rank == 0 {
                std::process::Command::new("kill").args(["-9", &agent.to_string()]).status()?;
            }
            operation.wait(STEP)?;
            Ok(())
        });
        results[..2].iter().for_each(|result| assert_lost(result, 2));
        let error = results[2].as_ref().expect_err("the agent was lost");
        assert!(matches!(downcast(error), Error::AgentLost { .. }), "{error:#}");
    });
    // It comes back, and its host's tenants go on.
    deployment.start_agent(2).unwrap();
    deployment.wait_until_ready().unwrap();
    let results = run(&sockets(&deployment, "a"), "again", 1, |w| w.sum(3, 1000, true, STEP));
    results.into_iter().for_each(|result| result.unwrap());
}

#[test]
fn a_vanished_host_is_detected_by_timeout() {
    let Some(deployment) = deploy(&star(3, "1Gbit/s"), shorten_timeouts) else { return };
    with_undisturbed_tenant(&sockets(&deployment, "b")[..2], || {
        let results = run(&sockets(&deployment, "a"), "dark", 1, |worker| {
            let mut operation = begin(worker, 8 << 20)?;
            if worker.rank == 0 {
                deployment.fabric().set_links("h2", false)?;
            }
            let began = Instant::now();
            let result = operation.wait(STEP);
            anyhow::ensure!(began.elapsed() < Duration::from_secs(5), "too late: {:?}", began.elapsed());
            Ok(result?)
        });
        results[..2].iter().for_each(|result| assert_lost(result, 2));
    });
}

#[test]
fn an_early_leave_fails_the_next_operation() {
    let Some(deployment) = deploy(&star(2, "10Gbit/s"), shorten_timeouts) else { return };
    let gone = Barrier::new(2);
    let results = run(&sockets(&deployment, "a"), "leaves", 1, |worker| {
        worker.sum(1, 100_000, true, STEP)?;
        if worker.rank == 1 {
            gone.wait();
            return Ok(());
        }
        gone.wait();
        worker.sum(2, 10, true, STEP)
    });
    assert!(results[1].is_ok(), "{:?}", results[1]);
    assert_lost(&results[0], 1);
}

#[test]
fn status_says_whom_an_operation_waits_for() {
    let Some(deployment) = deploy(&star(2, "10Gbit/s"), |_| ()) else { return };
    let waiting = || -> anyhow::Result<()> {
        let deadline = Instant::now() + STEP;
        loop {
            let status = deployment.status()?;
            let operation = &status["communicators"][0]["in_flight"][0];
            if operation["waiting_for"] == serde_json::json!([3]) {
                anyhow::ensure!(operation["operation"] == 1, "{operation}");
                anyhow::ensure!(operation["call"] == "allreduce(500 x u64, sum)", "{operation}");
                return Ok(());
            }
            anyhow::ensure!(Instant::now() < deadline, "status never said so: {status:#}");
        }
    };
    let seen = Barrier::new(4);
    let results = run(&sockets(&deployment, "a"), "waits", 2, |worker| {
        worker.sum(1, 100, true, STEP)?;
        let tensor = worker.tensor(&[1; 500])?;
        let operation =
            (worker.rank != 3).then(|| worker.communicator.all_reduce_in_place(&tensor, ReduceOp::Sum));
        let shown = if worker.rank == 0 { waiting() } else { Ok(()) };
        seen.wait();
        shown?;
        match operation {
            Some(operation) => operation?,
            None => worker.communicator.all_reduce_in_place(&tensor, ReduceOp::Sum)?,
        }
        .wait(STEP)?;
        Ok(())
    });
    results.into_iter().for_each(|result| result.unwrap());
}

#[test]
fn a_missing_privilege_is_named_with_remedy() {
    let Some(deployment) = deploy(&star(1, "10Gbit/s"), |_| ()) else { return };
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let config = folder.path().join("agent.toml");
    let socket = folder.path().join("a.sock");
    let text = format!(
        "host = \"h0\"\ncontrol = \"127.0.0.1:1\"\ninsecure_loopback = true\nlisten = \"127.0.0.1:0\"\n\
         [[tenant]]\nname = \"a\"\nsocket = \"{}\"\nuids = [4711]\n",
        socket.display()
    );
    std::fs::write(&config, text).unwrap();
    // Under a folder that any user may enter.
    let agent = folder.path().join("harmonaize-agent");
    std::fs::copy(deployment.binaries().path("harmonaize-agent").unwrap(), &agent).unwrap();
    let mut command = std::process::Command::new("setpriv");
    command
        .args(["--reuid", "65534", "--regid", "65534", "--clear-groups"])
        .arg(&agent)
        .arg("--config")
        .arg(&config);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{said}");
    assert!(said.contains("4711") && said.contains("CAP_CHOWN"), "{said}");
    assert!(!socket.exists(), "the socket that nobody can use is still there");
}

/// Goes on with whoever else does; where each rank was before.
fn regroup(worker: &mut Worker) -> Vec<Option<Rank>> {
    let next = worker.communicator.regroup(&RegroupOptions { timeout: STEP, ..Default::default() }).unwrap();
    (worker.rank, worker.ranks) = (next.rank().0, next.ranks());
    worker.communicator = next;
    worker.communicator.before().to_vec()
}

fn ranks<const N: usize>(before: [u32; N]) -> Vec<Option<Rank>> {
    before.map(|rank| Some(Rank(rank))).to_vec()
}

#[test]
fn a_job_regroups_on_loss_drain_and_join() {
    let Some(mut deployment) = deploy(&star(4, "10Gbit/s"), shorten_timeouts) else { return };
    let (own, others) = (sockets(&deployment, "a"), sockets(&deployment, "b"));
    with_undisturbed_tenant(&others[..1], || {
        let mut workers = joined(&own, "job");
        let agent = deployment.agent(3).unwrap().id().to_string();
        // Whoever has its sum may still have to send others theirs.
        at_all(&mut workers, |worker| worker.sum(1, 1000, false, STEP).unwrap());
        let errors = at_all(&mut workers, |worker| {
            if worker.rank == 3 {
                let killed = std::process::Command::new("kill").args(["-9", &agent]).status();
                assert!(killed.unwrap().success());
            }
            worker.sum(2, 100_000, false, STEP).unwrap_err()
        });
        assert!(matches!(downcast(&errors[3]), Error::AgentLost { .. }));
        for error in &errors[..3] {
            assert_eq!(failure(downcast(error)).1, [Rank(3)], "{error:#}");
        }
        drop(workers.pop());
        // At once, although the lost one might have come back, and as if the operation had never been called.
        assert!(at_all(&mut workers, regroup).iter().all(|before| *before == ranks([0, 1, 2])));
        at_all(&mut workers, |worker| worker.sum(2, 100_000, false, STEP).unwrap());

        deployment.start_agent(3).unwrap();
        deployment.wait_until_ready().unwrap();
        let mut events = workers[0].client.events(None);
        events.read(Duration::ZERO).unwrap();
        let entered = std::thread::scope(|scope| {
            let newcomer = scope.spawn(|| {
                let client = Client::attach(&own[3], options(Access::Mapped, 16)).unwrap();
                let options = RegroupOptions { timeout: STEP, ..Default::default() };
                let communicator = client.enter("job", &options).unwrap();
                let (rank, ranks) = (communicator.rank().0, communicator.ranks());
                Worker { client, communicator, rank, ranks }
            });
            let announced = |kind: &EventKind| matches!(kind, EventKind::Newcomers { waiting: 1 });
            let deadline = Instant::now() + STEP;
            while !events.read(STEP).unwrap().events.iter().any(|event| announced(&event.kind)) {
                assert!(Instant::now() < deadline, "nobody was told of the newcomer");
            }
            // Until then nobody was held up.
            at_all(&mut workers, |worker| worker.sum(3, 1000, true, STEP).unwrap());
            let expected = [ranks([0, 1, 2]), vec![None]].concat();
            assert!(at_all(&mut workers, regroup).iter().all(|before| *before == expected));
            newcomer.join().unwrap()
        });
        assert_eq!((entered.rank, entered.ranks), (3, 4));
        workers.push(entered);
        at_all(&mut workers, |worker| worker.sum(4, 100_000, true, STEP).unwrap());

        let host = deployment.hosts()[1].name.clone();
        deployment.harmonaize(&["drain", &host]).unwrap();
        let drained = workers.remove(1);
        assert!(at_all(&mut workers, regroup).iter().all(|before| *before == ranks([0, 2, 3])));
        at_all(&mut workers, |worker| {
            worker.exchange(5, 1000, STEP).unwrap();
            worker.gather(6, 50_000, true, STEP).unwrap();
            worker.scatter(7, 50_000, true, STEP).unwrap();
        });
        match drained.communicator.regroup(&RegroupOptions::default()) {
            Err(Error::Regroup { kind: JoinRefusal::Unavailable, .. }) => {}
            other => panic!("a drained host got {other:?}"),
        }
    });
}
