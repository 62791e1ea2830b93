//! The main job, end to end: real agents and control in network namespaces, tenants' ranks as threads of the test.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use anyhow::Result;
use harmonaize_client::{Access, Error, Rank, Status};
use harmonaize_testkit::deployment::Setup;
use harmonaize_testkit::namespace::Namespace;
use harmonaize_testkit::strict;
use harmonaize_tests::job::{Worker, deploy, options, run, run_with, sockets, succeeded};
use harmonaize_tests::{STEP, star};
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;

fn everything(worker: &Worker) -> Result<()> {
    worker.everything(&[0, 1, 100, 10_000, 400_000], STEP)
}

#[test]
fn two_agents_run_every_collective_for_mapped_tenants() {
    let Some(deployment) = deploy(&star(2, "10Gbit/s"), |_| ()) else { return };
    succeeded(run(&sockets(&deployment, "a"), "job", 1, everything));
}

#[test]
fn tenants_that_map_nothing_get_the_same_results() {
    let Some(deployment) = deploy(&star(3, "10Gbit/s"), |_| ()) else { return };
    let mixed = |rank: u32| if rank.is_multiple_of(2) { Access::Remote } else { Access::Mapped };
    succeeded(run_with(
        &sockets(&deployment, "a"),
        "remote",
        1,
        |_| options(Access::Remote, 192),
        everything,
    ));
    succeeded(run_with(&sockets(&deployment, "a"), "mixed", 2, |rank| options(mixed(rank), 192), everything));
}

/// Rooted calls that do not fit are refused at once. They are a rank without the tensor that its root gives, roots that are
/// none, and tensors of other sizes. A root that calls another size than others ends with an error that says so.
#[test]
fn rooted_calls_that_do_not_fit_are_refused() {
    let Some(deployment) = deploy(&star(2, "10Gbit/s"), |_| ()) else { return };
    let sum = harmonaize_client::ReduceOp::Sum;
    let refused = |worker: &Worker| -> Result<()> {
        let (ten, eleven) = (worker.tensor(&[1; 10])?, worker.tensor(&[1; 11])?);
        let communicator = &worker.communicator;
        let shape = |what: Result<_, harmonaize_client::Error>| {
            anyhow::ensure!(matches!(what, Err(harmonaize_client::Error::Shape(_))), "{:?}", what.err());
            Ok(())
        };
        shape(communicator.reduce(&ten, Some(&ten), sum, Rank(2)))?;
        shape(communicator.reduce(&ten, None, sum, Rank(worker.rank)))?;
        shape(communicator.reduce(&ten, Some(&eleven), sum, Rank(worker.rank)))?;
        shape(communicator.broadcast_into(None, &ten, Rank(worker.rank)))?;
        shape(communicator.gather(&ten, None, Rank(worker.rank)))?;
        shape(communicator.gather(&ten, Some(&eleven), Rank(worker.rank)))?;
        shape(communicator.gather(&ten, Some(&ten), Rank(worker.rank)))?;
        shape(communicator.gather_in_place(&eleven, Rank(worker.rank)))?;
        shape(communicator.scatter(None, &ten, Rank(worker.rank)))?;
        shape(communicator.scatter(Some(&ten), &ten, Rank(worker.rank)))?;
        shape(communicator.scatter_in_place(&ten, Rank(2)))?;
        worker.reduce(1, 10, Rank(1), false, STEP)
    };
    succeeded(run(&sockets(&deployment, "a"), "right", 1, refused));
    let ended = |worker: &Worker| -> Result<Option<Status>> {
        let reduced = worker.reduce(1, 10 + worker.rank as usize, Rank(0), true, STEP);
        let Err(error) = reduced else { return Ok(None) };
        match error.downcast_ref() {
            Some(Error::Operation { status, .. }) => Ok(Some(*status)),
            _ => Err(error),
        }
    };
    let ended = succeeded(run(&sockets(&deployment, "a"), "sizes", 1, ended));
    // Who only gives is done with a small operation once its input is copied, and may be told with the next one.
    assert!(ended[0].is_some(), "it went through at the root");
    assert!(ended.iter().flatten().all(|status| *status == Status::Mismatch), "{ended:?}");
}

#[test]
fn two_tenants_and_several_communicators_share_the_agents() {
    let Some(deployment) = deploy(&star(4, "10Gbit/s"), |_| ()) else { return };
    let (a, b) = (sockets(&deployment, "a"), sockets(&deployment, "b"));
    std::thread::scope(|scope| {
        let sums =
            scope.spawn(|| run(&a, "sums", 2, |w| (0..20).try_for_each(|i| w.sum(i, 100_000, true, STEP))));
        let other = scope.spawn(|| run(&a, "other", 1, everything));
        let exchanges = run(&b, "sums", 1, |w| (0..20).try_for_each(|i| w.exchange(i, 50_000, STEP)));
        succeeded(exchanges);
        succeeded(sums.join().unwrap());
        succeeded(other.join().unwrap());
    });
}

/// A 64 MiB operation under way over TCP changes its ring order midway; the sums stay the same bits.
#[test]
fn a_running_operation_changes_its_ring_order() {
    let Some(mut deployment) = deploy(&star(4, "1Gbit/s"), |_| ()) else { return };
    let control = deployment.operators_address();
    let operator = deployment.operator();
    let namespace = deployment.fabric().control();
    let harmonaize = deployment.binaries().path("harmonaize").unwrap();
    let command = move |arguments: &[&str]| {
        let mut command = std::process::Command::new(&harmonaize);
        command.arg("--control").arg(control.to_string()).arg("--tls").arg(&operator).args(arguments);
        let output = namespace.enter(|| command.output()).unwrap().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let status = || -> serde_json::Value { serde_json::from_str(&command(&["status", "--json"])).unwrap() };
    let work = |worker: &Worker| -> Result<()> {
        let count = (64 << 20) / 8;
        let input = worker.tensor(&Worker::input(worker.rank, 9, count))?;
        let output = worker.tensor(&vec![0; count])?;
        worker.communicator.barrier()?.wait(STEP)?;
        let mut operation =
            worker.communicator.all_reduce(&input, &output, harmonaize_client::ReduceOp::Sum)?;
        if worker.rank == 0 {
            let communicator = status()["communicators"][0]["communicator"].as_str().unwrap().to_owned();
            command(&["reorder", &communicator, "h0,h2,h1,h3"]);
            assert!(operation.poll()?.is_none(), "the operation ended before the change was under way");
        }
        operation.wait(Duration::from_secs(60))?;
        let mut expected = vec![0_u64; count];
        for rank in 0..worker.ranks {
            expected
                .iter_mut()
                .zip(Worker::input(rank, 9, count))
                .for_each(|(sum, v)| *sum = sum.wrapping_add(v));
        }
        anyhow::ensure!(worker.contents(&output)? == expected, "wrong sum");
        if worker.rank == 0 {
            let communicator = &status()["communicators"][0];
            anyhow::ensure!(communicator["epoch"] == 2, "still under the first plan: {communicator}");
        }
        worker.communicator.barrier()?.wait(STEP)?;
        Ok(())
    };
    succeeded(run(&sockets(&deployment, "a"), "job", 1, work));
    deployment.check().unwrap();
}

#[test]
fn links_go_by_the_congestion_control_that_an_operator_chose() {
    let kernel = |name: &str| std::fs::read_to_string(format!("/proc/sys/net/ipv4/tcp_{name}")).unwrap();
    let (own, allowed) = (kernel("congestion_control"), kernel("allowed_congestion_control"));
    let Some(other) = allowed.split_whitespace().find(|name| *name != own.trim()) else {
        return strict::skip_test(format!("this kernel lets anybody have {} alone", own.trim()));
    };
    let choose = |setup: &mut Setup| {
        setup.control += &format!("[[congestion_control]]\nroute = \"rack\"\nname = \"{other}\"\n");
    };
    let Some(deployment) = deploy(&star(2, "1Gbit/s"), choose) else { return };
    let [here, there] = [0, 1].map(|at: usize| &deployment.hosts()[at]);
    let namespace = deployment.fabric().namespace(&here.name);
    let peer = there.addresses[0].to_string();
    succeeded(run(&sockets(&deployment, "a"), "world", 1, |worker| {
        worker.sum(1, 1000, true, STEP)?;
        if worker.rank == 0 {
            let mut list = Command::new("ss");
            list.args(["-tinH", "state", "established", "dst", &peer]);
            let listed = String::from_utf8(namespace.enter(move || list.output())??.stdout)?;
            let words: Vec<&str> = listed.split_whitespace().collect();
            let has = words.contains(&other) && !words.contains(&own.trim());
            anyhow::ensure!(has, "not {other}: {listed}");
        }
        worker.communicator.barrier()?.wait(STEP)?;
        if worker.rank == 0 {
            let plan = &deployment.ask(&["plans"])?["plans"][0]["congestion_controls"][0];
            let shown = [&plan["route"], &plan["name"], &plan["reason_code"]];
            anyhow::ensure!(shown == ["rack", other, "operator"], "{plan}");
        }
        worker.communicator.barrier()?.wait(STEP)?;
        Ok(())
    }));
    deployment.end().unwrap();
}

/// Bytes that leave a device in packets of a code point, counted from now on.
fn count_marked(namespace: &Namespace, device: &str, code_points: &[u8]) {
    let mut lines = vec![format!("qdisc add dev {device} clsact")];
    for (priority, dscp) in (1..).zip(code_points) {
        // The second byte of an IPv4 header behind that of Ethernet, without the bits of ECN.
        let program = format!("5,48 0 0 15,84 0 0 252,21 0 1 {},6 0 0 4294967295,6 0 0 0", dscp << 2);
        lines.push(format!(
            "filter add dev {device} egress prio {priority} bpf bytecode \"{program}\" \
             action mirred egress mirror dev counted continue"
        ));
    }
    // A device that is down takes the copies.
    namespace.ip(&["link add counted type ifb".to_owned()]).unwrap();
    namespace.tc(&lines).unwrap();
}

/// What was counted, by code point.
fn marked(namespace: &Namespace, device: &str) -> Vec<u64> {
    let mut show = Command::new("tc");
    show.args(["-s", "filter", "show", "dev", device, "egress"]);
    let output = namespace.enter(move || show.output()).unwrap().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let counts = said.lines().filter_map(|line| line.trim().strip_prefix("Sent "));
    counts.map(|count| count.split_once(' ').unwrap().0.parse().unwrap()).collect()
}

#[test]
fn packets_are_marked_by_the_class_of_what_they_carry() {
    let marks = |setup: &mut Setup| setup.agent += "[links]\ndscp = { latency = 46, bulk = 8 }\n";
    let Some(deployment) = deploy(&star(2, "1Gbit/s"), marks) else { return };
    let fabric = deployment.fabric();
    let node = fabric.topology().ends().next().unwrap();
    let device = &fabric.layout().ends_of(node).next().unwrap().1.device;
    let namespace = fabric.namespace(&deployment.hosts()[0].name);
    count_marked(&namespace, device, &[46, 8]);
    let counted = Mutex::new(vec![marked(&namespace, device)]);
    succeeded(run(&sockets(&deployment, "a"), "world", 1, |worker| {
        for count in [100, 1 << 20, 100] {
            for salt in 0..5 {
                worker.sum(salt, count, true, STEP)?;
            }
            if worker.rank == 0 {
                counted.lock().unwrap().push(marked(&namespace, device));
            }
            worker.communicator.barrier()?.wait(STEP)?;
        }
        Ok(())
    }));
    let counted = counted.into_inner().unwrap();
    let [small, large, again] =
        [0, 1, 2].map(|at| [0, 1].map(|dscp| counted[at + 1][dscp] - counted[at][dscp]));
    assert!(small[0] > 0 && small[1] == 0, "{counted:?}");
    assert!(large[1] >= 5 << 23, "{counted:?}");
    assert!(again[0] > 0 && again[1] < 1 << 20, "{counted:?}");
    deployment.end().unwrap();
}
