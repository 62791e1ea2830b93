//! An aggregator on the fabric, end to end, with real agents and control. What it does is right while it serves, when it is killed
//! in the middle of operations, and when it comes back.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use anyhow::{Result, ensure};
use harmonaize_client::{Algorithm, Constraints, Dtype, Negotiated, Rank, ReduceOp};
use harmonaize_testkit::fabric::Faults;
use harmonaize_tests::aggregated::{Course, EACH, MOST, rounds_until, star, sum, through_everything, whole};
use harmonaize_tests::job::{Worker, at_all, joined, run, sockets, succeeded};
use harmonaize_tests::{STEP, star_with_aggregator};
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::time::Instant;

const HOSTS: usize = 4;
/// Elements of a rank's tensor; no multiple of a chunk's.
const ELEMENTS: usize = (1 << 17) + 3;

#[test]
fn sums_survive_an_aggregator_restart() {
    through_everything(&star_with_aggregator(HOSTS, 1000, "0us"), "pool = \"1MiB\"\n", 0, |worker, salt| {
        let (right, all) = sum(worker, salt, ELEMENTS)?;
        Ok(right && all)
    });
}

/// Small operations, which are done before all have their result. They are of sums, of what one rank has, and of
/// nothing.
#[test]
fn small_operations_are_right_through_the_same() {
    const RANKS: usize = 5;
    let entered: Vec<AtomicUsize> = (0..MOST).map(|_| AtomicUsize::new(0)).collect();
    let broadcasts = AtomicUsize::new(0);
    let barriers = AtomicUsize::new(0);
    // With a core that is said to be fast it pays for barriers of so few.
    let configuration = "pool = \"1MiB\"\npackets_per_second = 10_000_000\n";
    let topology = star_with_aggregator(RANKS, 1000, "0us");
    let told = through_everything(&topology, configuration, 0, |worker, salt| {
        let (given, summed) = sum(worker, salt, 6000)?;
        let root = Rank(salt as u32 % worker.ranks);
        let tensor = worker.client.tensor(Dtype::F32, 1500)?;
        let own = |rank| whole(rank, !salt, 1500);
        tensor.write(0, &own(worker.rank))?;
        let receipt = worker.communicator.broadcast(&tensor, root)?.wait(STEP)?;
        let mut found = vec![0_f32; 1500];
        tensor.read(0, &mut found)?;
        ensure!(found == own(root.0), "rank {}: not what {root} has, {salt}", worker.rank);
        broadcasts.fetch_add(usize::from(receipt.algorithm == Algorithm::Aggregated), SeqCst);
        entered[salt as usize].fetch_add(1, SeqCst);
        let receipt = worker.communicator.barrier()?.wait(STEP)?;
        ensure!(
            entered[salt as usize].load(SeqCst) == RANKS,
            "rank {} passed barrier {salt} alone",
            worker.rank
        );
        barriers.fetch_add(usize::from(receipt.algorithm == Algorithm::Aggregated), SeqCst);
        Ok(given && summed)
    });
    if told.is_none() {
        return;
    }
    let [broadcasts, barriers] = [broadcasts, barriers].map(AtomicUsize::into_inner);
    assert!(broadcasts >= RANKS && barriers >= RANKS, "{broadcasts} and {barriers} went by the aggregator");
}

/// One operation; how many ranks the aggregator was given it for, and for how many it did it all.
fn one_operation(workers: &[Worker], salt: &AtomicU64) -> (usize, usize) {
    let salt = salt.fetch_add(1, SeqCst);
    let ranks = at_all(workers, |worker| sum(worker, salt, ELEMENTS).unwrap());
    ranks.into_iter().fold((0, 0), |(given, whole), (was_given, all)| {
        (given + usize::from(was_given), whole + usize::from(was_given && all))
    })
}

/// A host loses the address from which it sends to its aggregator. Later there is no route for a while. Its worker goes on from the address
/// that is left, and once there is a route again.
#[test]
fn a_host_without_address_still_aggregates() {
    let Some(deployment) = star(HOSTS, "1MiB") else { return };
    let fabric = deployment.fabric();
    let (namespace, aggregator) = (fabric.hosts()[0].namespace.clone(), fabric.aggregators()[0].addresses[0]);
    let ip = |line: String| namespace.ip(&[line]).unwrap();
    let other = Ipv4Addr::new(10, 64, 1, 1);
    ip(format!("addr add {other}/16 dev eth0"));
    ip(format!("route add {aggregator}/32 dev eth0 src {other}"));
    // Sockets' addresses stand there as the machine's words (proc(5)).
    let sends_from_there = || {
        let sockets = namespace.enter(|| std::fs::read_to_string("/proc/thread-self/net/udp"));
        sockets.unwrap().unwrap().contains(&format!(" {:08X}:", u32::from_ne_bytes(other.octets())))
    };
    let workers = joined(&sockets(&deployment, "a"), "world");
    let salt = AtomicU64::new(0);
    let until = |wanted: usize| {
        let deadline = Instant::now() + 2 * STEP;
        while one_operation(&workers, &salt).1 != wanted {
            assert!(Instant::now() < deadline, "the aggregator never did it all for {wanted} ranks");
        }
    };
    until(HOSTS);
    assert!(sends_from_there());
    ip(format!("addr del {other}/16 dev eth0"));
    until(HOSTS);
    assert!(!sends_from_there());
    ip(format!("route add unreachable {aggregator}/32"));
    until(0);
    ip(format!("route del unreachable {aggregator}/32"));
    until(HOSTS);
    deployment.end().unwrap();
}

/// From an agreement on that nothing is summed on the path no operation goes by the aggregator. Once it is given back they do
/// again.
#[test]
fn agreement_without_aggregation_disables_it() {
    let Some(deployment) = star(HOSTS, "1MiB") else { return };
    let workers = joined(&sockets(&deployment, "a"), "world");
    let salt = AtomicU64::new(0);
    let served = || one_operation(&workers, &salt).0;
    let settle = |wanted: usize| {
        let deadline = Instant::now() + STEP;
        while served() != wanted {
            assert!(Instant::now() < deadline, "{wanted} ranks' never went by the aggregator");
        }
        (0..EACH).for_each(|_| assert_eq!(served(), wanted));
    };
    settle(HOSTS);
    for (allowed, ranks) in [(false, 0), (true, HOSTS)] {
        let outcome = workers[1].client.propose("world", &Constraints::new().aggregation(allowed)).unwrap();
        assert!(matches!(outcome, Negotiated::Agreed(_)), "{outcome:?}");
        settle(ranks);
        let plans = deployment.harmonaize(&["plans"]).unwrap();
        assert_eq!(plans.contains("the tenant wants none"), !allowed, "{plans}");
    }
    deployment.end().unwrap();
}

/// Frames are lost, come twice, and are overtaken. With more lost than that, links' connections would not always be made in the
/// ten seconds that they have.
#[test]
fn sums_are_right_on_a_bad_network() {
    let Some(mut deployment) = star(HOSTS, "1MiB") else { return };
    deployment.fabric().set_faults(Faults { lost: 20_000, twice: 10_000, late: 50_000 }).unwrap();
    let sockets = sockets(&deployment, "a");
    let served = rounds_until(
        &sockets,
        |served| served >= HOSTS,
        |worker, salt| {
            let (given, all) = sum(worker, salt, ELEMENTS)?;
            let (small, _) = sum(worker, salt, 2000)?;
            Ok(usize::from(given && all) + usize::from(small))
        },
    );
    assert!(served >= HOSTS, "the aggregator did nothing");
    let counts = deployment.wait_until("it tells nothing", |this| {
        let told = this.ask(&["topology"])?;
        let tenants = &told["aggregators"][0]["report"]["tenants"];
        Ok((tenants[0]["sums"].as_u64() > Some(0)).then(|| tenants.clone()))
    });
    println!("{}", counts.unwrap());
    deployment.end().unwrap();
}

/// A tenant borrows what it can of a pool before the other comes, which has its slots at once. The pool is too small for all, and the
/// first has several communicators.
#[test]
fn a_hog_takes_no_guaranteed_slot() {
    let Some(mut deployment) = star(HOSTS, "64KiB") else { return };
    let (hog, other) = (sockets(&deployment, "a"), sockets(&deployment, "b"));
    let course = Course::default();
    // How many of the hog's ranks have begun, and whether the other tenant is through.
    let through = |(_, done): (u64, u64)| done > 0;
    let served = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let hogs: Vec<_> = ["one", "two", "three"]
            .into_iter()
            .map(|name| {
                let (hog, course) = (&hog, &course);
                scope.spawn(move || run(hog, name, 1, |worker| hoard(worker, course, &through)))
            })
            .collect();
        let begun = course.wait(|(begun, _)| begun == 3 * HOSTS as u64);
        let outcomes = run(&other, "world", 1, |worker| {
            for salt in 0..EACH {
                let (given, all) = sum(worker, salt, ELEMENTS)?;
                served.fetch_add(usize::from(given && all), SeqCst);
            }
            Ok(())
        });
        course.change(|at| at.1 = 1);
        for outcomes in std::iter::once(outcomes).chain(hogs.into_iter().map(|hog| hog.join().unwrap())) {
            succeeded(outcomes);
        }
        begun.unwrap();
    });
    let counts = deployment.wait_until("it tells nothing", |this| {
        let told = this.ask(&["topology"])?;
        let tenants = &told["aggregators"][0]["report"]["tenants"];
        Ok((tenants.as_array().map(Vec::len) == Some(2)).then(|| tenants.clone()))
    });
    println!("{}", counts.unwrap());
    assert_eq!(served.into_inner(), HOSTS * EACH as usize, "the other tenant's sums went by the hosts");
    deployment.end().unwrap();
}

/// Sums one tensor after the other until the other tenant is through; all ranks stop after the same.
fn hoard(worker: &Worker, course: &Course, through: &(dyn Fn((u64, u64)) -> bool + Sync)) -> Result<()> {
    let tensor = worker.client.tensor(Dtype::F32, ELEMENTS as u64)?;
    let zeros = vec![0_f32; ELEMENTS];
    for operation in 0_u64.. {
        tensor.write(0, &zeros)?;
        // One element says who has seen the end.
        let seen = f32::from(u8::from(through(*course.reached.lock().unwrap())));
        tensor.write(0, &[seen])?;
        worker.communicator.all_reduce_in_place(&tensor, ReduceOp::Sum)?.wait(STEP)?;
        let mut found = [0_f32];
        tensor.read(0, &mut found)?;
        if operation == 0 {
            course.change(|at| at.0 += 1);
        }
        if found[0] > 0.0 {
            break;
        }
    }
    Ok(())
}
