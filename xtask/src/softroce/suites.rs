//! The steps of the tests on SoftRoCE: the devices by known programs, then this project's tests, also with loss.

use super::pair;
use crate::vm::initramfs::Initramfs;
use crate::vm::programs::{self, Userland};
use anyhow::{Context, Result, bail};
use harmonaize_guest::Step;
use harmonaize_testkit::workspace::{self, Binaries, Profile, executables};
use std::process::Stdio;
use std::time::Duration;

/// Where the guest has control and agent.
const BINARIES: &str = "/usr/lib/harmonaize";

/// A ping-pong takes under a second; the rest is for a machine that is busy.
const SMOKE_LIMIT: Duration = Duration::from_secs(30);

/// One of the project's test programs that needs a device.
struct Suite {
    /// The step's name.
    name: &'static str,
    package: &'static str,
    target: &'static str,
    limit: Duration,
    /// The tests that run again with lost packets, by a part of their names.
    with_loss: Option<&'static str>,
    /// Whether it starts control and agents.
    deploys: bool,
}

impl Suite {
    const fn of(name: &'static str, package: &'static str, target: &'static str, seconds: u64) -> Self {
        let limit = Duration::from_secs(seconds);
        Self { name, package, target, limit, with_loss: None, deploys: false }
    }
}

const SUITES: &[Suite] = &[
    Suite::of("verbs", "harmonaize-libibverbs", "device", 120),
    Suite { with_loss: Some("stress"), ..Suite::of("transport", "harmonaize-libibverbs", "transport", 180) },
    Suite::of("telemetry", "harmonaize-loader", "guest", 120),
    Suite {
        with_loss: Some("every_collective"),
        deploys: true,
        ..Suite::of("collectives", "harmonaize-tests", "softroce", 540)
    },
];

/// Ping-pongs with checked contents: each host to the next, and the first to itself.
pub(super) fn smoke(hosts: u32) -> Vec<Step> {
    let wire = (0..hosts).map(|host| (host, (host + 1) % hosts));
    wire.chain([(0, 0)])
        .zip(18_600_u16..)
        .map(|((from, to), port)| {
            let words = |host: u32| {
                let port = port.to_string();
                let (device, index) = (format!("rxe{host}"), format!("{{gid:rxe{host}}}"));
                ["-d".into(), device, "-g".into(), index, "-p".into(), port].map(|word: String| word)
            };
            let (server, mut client) = (words(to), words(from).to_vec());
            client.push("127.0.0.1".into());
            let program = ["ibv_rc_pingpong", "-c", "-s", "65536", "-n", "50"];
            let name = format!("smoke-{from}-to-{to}");
            pair(name, &program, &strs(&server), &strs(&client), port, SMOKE_LIMIT)
        })
        .collect()
}

fn strs(words: &[String]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}

/// Builds the project's tests that need a device into the tree, and returns their steps. Only those with a step that is
/// wanted are built.
pub(super) fn project(tree: &mut Initramfs, hosts: u32, wanted: impl Fn(&str) -> bool) -> Result<Vec<Step>> {
    let there = test_targets()?;
    let exists = |suite: &&Suite| {
        there.iter().any(|(package, target)| package == suite.package && target == suite.target)
    };
    let wanted = |suite: &&Suite| wanted(suite.name) || wanted(&format!("loss-{}", suite.name));
    let suites: Vec<&Suite> = SUITES.iter().filter(exists).filter(wanted).collect();
    if suites.is_empty() {
        return Ok(Vec::new());
    }
    // The whole workspace's features, as `cargo xtask test` has built it already.
    let mut arguments = vec!["test", "--no-run", "--workspace"];
    let targets: Vec<&str> = suites.iter().map(|suite| suite.target).collect();
    for suite in &suites {
        arguments.extend(["--test", suite.target]);
    }
    let built = executables(workspace::cargo().args(&arguments), &targets)?;
    let (here, mut steps, mut again) = (Userland::here(), Vec::new(), Vec::new());
    for suite in suites {
        let path = built.iter().find(|(target, _)| target == suite.target).map(|(_, path)| path);
        let Some(path) = path else { bail!("cargo built no test {} of {}", suite.target, suite.package) };
        let program = format!("/usr/bin/{}-{}", suite.name, suite.target);
        programs::add(tree, &here, path, &program)?;
        let mut step = Step::new(suite.name, &[&program, "--nocapture"], suite.limit);
        step.environment.insert("HARMONAIZE_GUEST".into(), "its devices may be taken away".into());
        if suite.deploys {
            let binaries = Binaries::build_with(Profile::Dev, &["harmonaize-bench"])?;
            for name in ["harmonaize", "harmonaize-agent", "harmonaize-control", "train"] {
                programs::add(tree, &here, &binaries.path(name)?, &format!("{BINARIES}/{name}"))?;
            }
            step.environment.insert("HARMONAIZE_BINARIES".into(), BINARIES.into());
        }
        if let Some(tests) = suite.with_loss {
            let mut step = step.clone();
            step.name = format!("loss-{}", suite.name);
            step.command.push(tests.into());
            // Once in about a hundred runs a device's path stays without an answer in all its seven tries, 3.8 s long.
            step.repeats = true;
            again.push(step);
        }
        steps.push(step);
    }
    if !again.is_empty() {
        steps.extend(lossy(hosts));
        steps.extend(again);
        steps.push(lost());
    }
    Ok(steps)
}

/// From here on one packet in a hundred is lost on its way to each host.
fn lossy(hosts: u32) -> impl Iterator<Item = Step> {
    (0..hosts).map(|host| {
        let port = format!("p{host}");
        let words = ["tc", "-n", "sw", "qdisc", "add", "dev", &port, "root", "netem", "loss", "1%"];
        Step::new(&format!("loss-on-{port}"), &words, Duration::from_secs(10))
    })
}

/// Fails unless packets were lost: a test of recovery that had nothing to recover from has shown nothing.
fn lost() -> Step {
    let script = "/usr/bin/tc -n sw -s qdisc show | grep -A1 netem | grep -o 'dropped [0-9]*'; \
                  /usr/bin/tc -n sw -s qdisc show | grep -A1 netem | grep -q 'dropped [1-9]'";
    let mut step = Step::new("loss-counted", &["/usr/bin/sh", "-c", script], Duration::from_secs(10));
    step.environment.insert("PATH".into(), "/usr/bin:/usr/lib/applets".into());
    step
}

/// Packages and names of the workspace's integration tests.
fn test_targets() -> Result<Vec<(String, String)>> {
    let mut cargo = workspace::cargo();
    cargo.args(["metadata", "--no-deps", "--format-version", "1"]).stderr(Stdio::inherit());
    let output = cargo.output().context("cannot start cargo")?;
    if !output.status.success() {
        bail!("`{}` ended with {}", workspace::describe(&cargo), output.status);
    }
    let metadata: Metadata =
        serde_json::from_slice(&output.stdout).context("cargo's metadata has changed")?;
    let mut found = Vec::new();
    for package in metadata.packages {
        let tests =
            package.targets.into_iter().filter(|target| target.kind.iter().any(|kind| kind == "test"));
        found.extend(tests.map(|target| (package.name.clone(), target.name)));
    }
    Ok(found)
}

#[derive(serde::Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(serde::Deserialize)]
struct Package {
    name: String,
    targets: Vec<Target>,
}

#[derive(serde::Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_ping_in_a_ring() {
        let steps = smoke(3);
        let names: Vec<&str> = steps.iter().map(|step| step.name.as_str()).collect();
        assert_eq!(names, ["smoke-0-to-1", "smoke-1-to-2", "smoke-2-to-0", "smoke-0-to-0"]);
        let server = steps[2].server.as_ref().unwrap();
        assert_eq!(server.port, 18_602);
        assert!(server.command.join(" ").ends_with("-d rxe0 -g {gid:rxe0} -p 18602"), "{server:?}");
        assert!(steps[2].command.join(" ").ends_with("-d rxe2 -g {gid:rxe2} -p 18602 127.0.0.1"));
    }

    #[test]
    fn the_tree_names_its_tests() {
        assert!(test_targets().unwrap().contains(&("xtask".to_owned(), "emulate".to_owned())));
    }
}
