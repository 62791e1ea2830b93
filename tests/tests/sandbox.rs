//! What an agent has given up once it runs: it goes on, reloads and is upgraded without.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_testkit::deployment::{Deployment, socket};
use harmonaize_tests::job::{deploy, run, sockets};
use harmonaize_tests::{STEP, star};
use rustix::process::Signal;
use std::path::Path;
use std::time::Instant;

/// What an agent with telemetry may have: as in `linux/capability.h`, CHOWN, DAC_OVERRIDE, FOWNER, NET_BIND_SERVICE, NET_ADMIN, NET_RAW,
/// SYS_NICE, PERFMON and BPF.
const MAY_HAVE: [u32; 9] = [0, 1, 3, 10, 12, 13, 23, 38, 39];
/// Threads on which what tenants and peers send is worked on.
const WITHOUT: [&str; 4] = ["engine-", "acceptor", "sender", "detach"];

/// Holds all threads of the agent of the first host against what they may have; how many have nothing.
fn confined(deployment: &mut Deployment) -> usize {
    let id = deployment.agent(0).unwrap().id();
    let mut without = 0;
    for task in std::fs::read_dir(format!("/proc/{id}/task")).unwrap() {
        let path = task.unwrap().path();
        let read = |name: &str| std::fs::read_to_string(path.join(name));
        let (Ok(status), Ok(stat)) = (read("status"), read("stat")) else { continue };
        let value = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(":\t"));
            line.unwrap_or_else(|| panic!("no {name} in {status}")).trim()
        };
        assert_eq!((value("Seccomp"), value("NoNewPrivs")), ("2", "1"), "{status}");
        let nothing = WITHOUT.iter().any(|name| value("Name").starts_with(name));
        let most = MAY_HAVE.iter().filter(|_| !nothing).fold(0_u64, |bits, number| bits | 1 << number);
        for set in ["CapEff", "CapPrm", "CapInh", "CapAmb"] {
            let bits = u64::from_str_radix(value(set), 16).unwrap();
            assert_eq!(bits & !most, 0, "{set} of {status}");
        }
        // Whose sessions the first thread serves waits for the others: see proc(5), field 19.
        let nice = stat.rsplit_once(") ").and_then(|(_, fields)| fields.split(' ').nth(16)).unwrap();
        let first = path.ends_with(id.to_string());
        assert!(!(nothing || first) || nice == if first { "10" } else { "0" }, "nice {nice} of {status}");
        without += usize::from(nothing);
    }
    without
}

/// Adds a tenant to the first host's configuration and has it read again. Returns once its socket is there; fails with what the
/// log says of it.
fn add_tenant(deployment: &mut Deployment, name: &str, path: &Path) -> Result<(), String> {
    let host = deployment.hosts()[0].clone();
    let config = host.folder.join("agent.toml");
    let mut text = std::fs::read_to_string(&config).unwrap();
    text += &format!("\n[[tenant]]\nname = \"{name}\"\nsocket = {path:?}\nuids = [0]\n");
    std::fs::write(&config, text).unwrap();
    deployment.agent(0).unwrap().signal(Signal::HUP).unwrap();
    let (shown, deadline) = (path.display().to_string(), Instant::now() + STEP);
    while Instant::now() < deadline {
        if path.exists() {
            return Ok(());
        }
        let log = deployment.agent(0).unwrap().log_tail(1 << 20);
        if let Some(line) = log.lines().find(|line| line.contains(&shown) && line.contains("ERROR")) {
            return Err(line.to_owned());
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("nothing came of tenant {name}");
}

#[test]
fn an_agent_works_without_what_it_gave_up() {
    let set_up = |setup: &mut harmonaize_testkit::deployment::Setup| {
        setup.agent += "handover = \"{folder}/handover.sock\"\n";
        setup.measure("1Gbit/s");
    };
    let Some(mut deployment) = deploy(&star(2, "1Gbit/s"), set_up) else { return };
    let sums = |deployment: &Deployment, job: &str| {
        for result in run(&sockets(deployment, "a"), job, 1, |worker| worker.sum(1, 100_000, true, STEP)) {
            result.unwrap();
        }
    };
    sums(&deployment, "before");
    assert!(confined(&mut deployment) >= 2, "no engine and no acceptor");
    // Nothing is made beside the folders that the configuration named at the start.
    let inside = socket(&deployment.hosts()[0], "a").with_file_name("c.sock");
    add_tenant(&mut deployment, "c", &inside).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let outside = elsewhere.path().join("d.sock");
    let refused = add_tenant(&mut deployment, "d", &outside).unwrap_err();
    assert!(refused.contains("Permission denied") && refused.contains("[sandbox]"), "{refused}");
    sums(&deployment, "reloaded");
    // A successor reads the configuration anew.
    deployment.upgrade_agent(0).unwrap();
    assert!(confined(&mut deployment) >= 2, "no engine and no acceptor");
    assert!(outside.exists());
    sums(&deployment, "upgraded");
}
