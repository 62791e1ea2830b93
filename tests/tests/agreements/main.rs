//! Agreements end to end. Tests run the tutorial of docs/tenants.md as it stands there, promises that others' proposals meet and a
//! restart of control does not end, what becomes of jobs that fail, and the commands for people.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

mod failures;
mod tutorial;

use harmonaize_abi::session::AgentRefusal;
use harmonaize_client::{Clause, Constraints, Error, Knobs, Negotiated, Priority, Rank};
use harmonaize_tests::job::{at_all, deploy, joined, sockets};
use harmonaize_tests::star;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long anything may take: a bound for machines that are busy with other things, and no figure.
const PATIENCE: Duration = Duration::from_secs(60);

/// Lines without what they begin with, and without empty ones.
fn lines(text: &str) -> Vec<&str> {
    text.lines().map(str::trim).filter(|line| !line.is_empty()).collect()
}

#[test]
fn the_tutorial_quotes_its_program() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    // What is said of slices, waiting and splits is run beside the tests of splits; of messages, memory and protected state, beside
    // theirs. The first program is the client's example.
    let example = "../../dataplane/client/examples/hello.rs";
    let programs = ["agreements/tutorial.rs", "splits.rs", "p2p.rs", "memory.rs", "protection.rs", example];
    let program = programs
        .map(|program| std::fs::read_to_string(root.join("tests/tests").join(program)).unwrap())
        .concat();
    let tutorial = std::fs::read_to_string(root.join("docs/tenants.md")).unwrap();
    let (program, mut quoted) = (lines(&program), 0);
    for block in tutorial.split("```rust\n").skip(1) {
        let block = lines(block.split("```").next().unwrap());
        assert!(program.windows(block.len()).any(|part| part == block), "not the program's: {block:#?}");
        quoted += block.len();
    }
    assert!(quoted >= 50, "{quoted} lines are quoted");
}

#[test]
fn the_tutorials_program_does_what_it_says() {
    let Some(deployment) = deploy(&star(3, "1Gbit/s"), |_| {}) else { return };
    let sockets = sockets(&deployment, "a");
    let told = at_all((0..3).zip(&sockets), |(rank, socket)| tutorial::train(socket, rank, 3, 5).unwrap());
    assert_eq!(told.iter().map(|told| told.agreement).collect::<Vec<_>>(), [1, 0, 0]);
    for told in told {
        assert!((5..=40).contains(&told.batches) && told.saved == 0, "{told:?}");
        assert!(told.sum >= 3.0 && told.sum % 3.0 == 0.0, "{told:?}");
    }
}

#[test]
fn the_tutorials_calls_do_what_they_say() {
    let Some(deployment) = deploy(&star(3, "1Gbit/s"), |_| {}) else { return };
    let sockets = sockets(&deployment, "a");
    let ranks = at_all((0..3).zip(&sockets), |(rank, socket)| tutorial::calls(socket, rank, 3).unwrap());
    for (rank, calls) in ranks.into_iter().enumerate() {
        // Three ranks, summed three times.
        assert_eq!(calls.sum, 27.0);
        // Of an element: squares of 14/3 on average and of 4 of the mean, so 11/3 without noise, and 32 of a sample's noise.
        let scale = calls.noise.unwrap().scale().unwrap();
        assert!((scale - 96.0 / 11.0).abs() < 1e-4, "{scale}");
        // So little noise that the smallest batch is the best.
        assert_eq!(calls.batch, (rank == 0).then_some((32, 0.1)));
    }
}

#[test]
fn promises_bind_others_and_outlive_control() {
    let store = |setup: &mut harmonaize_testkit::deployment::Setup| {
        setup.control += "store = \"control.redb\"\n";
    };
    let Some(mut deployment) = deploy(&star(3, "1Gbit/s"), store) else { return };
    let ours = joined(&sockets(&deployment, "a"), "job");
    let theirs = joined(&sockets(&deployment, "b"), "job");
    let wanted = Constraints::new().min_busbw(80_000_000).priority(Priority::High);
    assert_eq!(ours[0].client.agreement("job").unwrap().number, 0);
    let Negotiated::Agreed(agreement) = ours[1].client.propose("job", &wanted).unwrap() else {
        panic!("refused")
    };
    assert!(agreement.number == 1 && agreement.constraints == wanted);

    // Others find what is left, and take that.
    let wished = Constraints::new().min_busbw(60_000_000);
    let refused = theirs[0].client.propose("job", &wished).unwrap();
    let Negotiated::Refused { reasons, counter: Some(counter) } = refused else { panic!("{refused:?}") };
    assert_eq!(reasons[0].clause, Clause::Bandwidth);
    assert!(counter.min_busbw > 0 && counter.min_busbw < 30_000_000, "{counter:?}");
    let taken = theirs[0].client.negotiate("job", &wished, |counter, _| Some(counter.clone())).unwrap();
    assert!(matches!(&taken, Negotiated::Agreed(agreement) if agreement.constraints == counter), "{taken:?}");

    // Bad input: it is refused here or by control, and nothing changes.
    let low = Constraints::new().priority(Priority::Low).min_busbw(1_000_000);
    let refused = ours[0].client.propose("job", &low).unwrap();
    let Negotiated::Refused { reasons, counter: Some(counter) } = refused else { panic!("{refused:?}") };
    assert!(reasons[0].clause == Clause::Priority && counter.priority == Priority::Normal, "{counter:?}");
    let nobody = ours[0].client.propose("jobs", &wanted).unwrap_err();
    assert!(matches!(nobody, Error::NoCommunicator(_)), "{nobody}");
    let knobs = Knobs { accumulate: (2, 1), checkpoint: None };
    assert!(ours[0].client.iteration("job", &knobs).is_err());
    let flood =
        (0..20).find_map(|_| theirs[1].client.propose("job", &wished).err()).expect("a flood is stopped");
    assert!(matches!(&flood, Error::Agreement(text) if text.contains("too many proposals")), "{flood}");

    // All operations go on as before, by paces or without.
    at_all(ours.iter().chain(&theirs), |worker| worker.sum(7, 1 << 16, true, PATIENCE).unwrap());

    deployment.control().unwrap().end().unwrap();
    let deadline = Instant::now() + PATIENCE;
    let away = loop {
        match ours[0].client.agreement("job") {
            Err(Error::Agreement(text)) => break text,
            other => assert!(Instant::now() < deadline, "{other:?}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    assert_eq!(away, AgentRefusal::Away.to_string());
    // An iteration waits for nobody.
    let alone = ours[0].client.iteration("job", &Knobs { accumulate: (3, 9), checkpoint: None }).unwrap();
    assert_eq!((alone.accumulate, alone.checkpoint), (3, false));
    deployment.start_control().unwrap();
    let again = loop {
        match ours[0].client.agreement("job") {
            Ok(agreement) if agreement.number > 0 => break agreement,
            other => assert!(Instant::now() < deadline, "{other:?}"),
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    assert_eq!((again.number, again.constraints, again.since_ns), (1, wanted, agreement.since_ns));
    assert_eq!(ours[0].communicator.rank(), Rank(0));
}

#[test]
fn people_ask_by_the_command_line() {
    let Some(deployment) = deploy(&star(2, "1Gbit/s"), |_| {}) else { return };
    let sockets = sockets(&deployment, "a");
    let _workers = joined(&sockets, "job");
    let socket = sockets[1].to_str().unwrap();
    let tenant = |line: &str| {
        let words: Vec<&str> = ["tenant", "--socket", socket].into_iter().chain(line.split(' ')).collect();
        deployment.harmonaize(&words).map_err(|error| format!("{error:#}"))
    };
    assert_eq!(tenant("constraints job").unwrap(), "job: nothing is agreed on\n");
    let told = tenant("constraints job --min-busbw 40MB/s --p99 64KiB=1s").unwrap();
    assert!(told.contains("agreement 1") && told.contains("--min-busbw 40000000B/s"), "{told}");
    let refused = tenant("constraints job --min-busbw 4GB/s").unwrap_err();
    assert!(refused.contains("could be had: --min-busbw"), "{refused}");
    let told = tenant("constraints job --min-busbw 4GB/s --take --json").unwrap();
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    assert_eq!(told["number"], 2);
    assert!(told["constraints"]["min_busbw"].as_u64().unwrap() > 40_000_000, "{told}");
    assert!(tenant("receipts job").unwrap().contains("0 operations"));
    assert_eq!(tenant("hints job --period 50ms --bytes 64MiB --task-priority 2").unwrap(), "job: noted\n");
    let plans = deployment.harmonaize(&["plans"]).unwrap();
    assert!(plans.contains("its tenant expects a period of 50ms, 1 operations of 64MiB together"), "{plans}");
    assert!(tenant("hints job --period 0s").unwrap_err().contains("1ms to 3600s are possible"));
    assert!(tenant("hints jobs --period 1s").unwrap_err().contains("no communicator `jobs`"));
    let events: serde_json::Value =
        serde_json::from_str(&tenant("events --wait 0s --json").unwrap()).unwrap();
    assert_eq!(events["missed"], 0);
    let from = format!("events --wait 0s --from {}", events["cursor"].as_str().unwrap());
    tenant(&from).unwrap();
    let unknown = tenant("constraints jobs").unwrap_err();
    assert!(unknown.contains("no communicator `jobs`"), "{unknown}");
}
