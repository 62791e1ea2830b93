//! Programs of this tree and of the release before work together. They do in every pairing of agent, control, client and
//! command line.

use super::{sums_go_on, under_load, with_place};
use harmonaize_abi::session::{
    Answer, Hello, Refused, Request, Welcome, decode, decode_first, encode, encode_first,
};
use harmonaize_core::{MAX_MESSAGE, Message};
use harmonaize_testkit::deployment::Deployment;
use harmonaize_testkit::release::Release;
use harmonaize_testkit::workspace::{self, Binaries, Profile};
use harmonaize_tests::job::{deploy, sockets};
use harmonaize_tests::star;
use std::collections::BTreeMap;
use std::process::Command;

/// Tenants and operators of both releases use what runs: AllReduces are right, and the status names all hosts.
fn check(deployment: &mut Deployment, what: &str, programs: [&Binaries; 2]) {
    deployment.wait_until_ready().unwrap();
    sums_go_on(deployment, 1);
    for binaries in programs {
        let folder = binaries.folder().display();
        let mut perf = Command::new(binaries.path("harmonaize-perf").unwrap());
        perf.args("all_reduce --ranks 2 -b 64 -e 1M -f 128 -n 3".split_whitespace());
        for socket in sockets(deployment, "a") {
            perf.arg("--agent").arg(socket);
        }
        let output = perf.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        let right = output.status.success() && text.contains("# Out of bounds values : 0 OK");
        assert!(right, "{what}, a tenant of {folder}: {text}");
        deployment.set_binaries(binaries);
        let status = deployment.status().unwrap();
        assert_eq!(status["agents"].as_array().map(Vec::len), Some(2), "{what}, {folder}: {status}");
    }
}

/// A host's agent is succeeded by another release's under load. A successor whose state has another form is refused, and nothing fails.
fn upgrade(deployment: &mut Deployment, position: usize, other: &Binaries, hands_over: bool) {
    deployment.set_binaries(other);
    under_load(deployment, |deployment| {
        let done = deployment.upgrade_agent(position);
        if hands_over {
            return done.unwrap();
        }
        println!("{:#}", done.expect_err("its state has another form"));
        deployment.start_agent(position).unwrap();
    });
}

fn pairings(old: &Binaries, hands_over: bool) {
    let adjust = |setup: &mut _| {
        with_place(setup);
        setup.binaries = old.clone();
    };
    let Some(mut deployment) = deploy(&star(2, "10Gbit/s"), adjust) else { return };
    let deployment = &mut deployment;
    let new = &Binaries::build_with(Profile::Dev, &["harmonaize-perf"]).unwrap();
    let both = [old, new];
    upgrade(deployment, 0, new, hands_over);
    check(deployment, "control before, agents now and before", both);
    deployment.set_binaries(new);
    deployment.start_control().unwrap();
    check(deployment, "control now, agents now and before", both);
    deployment.set_binaries(old);
    deployment.start_agent(0).unwrap();
    check(deployment, "control now, agents before", both);
    for position in 0..2 {
        upgrade(deployment, position, new, hands_over);
    }
    deployment.set_binaries(old);
    deployment.start_control().unwrap();
    check(deployment, "control before, agents now", both);
    for position in 0..2 {
        upgrade(deployment, position, old, hands_over);
    }
    check(deployment, "all before again", both);
}

#[test]
#[ignore = "builds the programs of the release before: cargo xtask soak --suite release"]
fn programs_of_two_releases_work_together() {
    let before = Release::before().unwrap();
    pairings(&before.build().unwrap(), before.hands_over().unwrap());
}

/// What programs of a release encode, by the locked schema of that name.
fn recorded(schema: &str) -> BTreeMap<String, Vec<u8>> {
    let file = workspace::root().join("tests/schemas/released").join(schema);
    let text = std::fs::read_to_string(file).unwrap();
    let examples = text.lines().filter_map(|line| line.rsplit_once(" = "));
    let byte = |byte: &str| u8::from_str_radix(byte, 16).unwrap();
    examples.map(|(name, bytes)| (name.to_owned(), bytes.split(' ').map(byte).collect())).collect()
}

#[test]
fn recorded_messages_of_agents_are_read() {
    let messages = recorded("messages.txt");
    assert!(!messages.is_empty());
    for (name, bytes) in messages {
        let (header, control) = Message::decode(&bytes).unwrap_or_else(|| panic!("{name} is not read"));
        if let Some(control) = &control {
            assert_eq!(format!("{control:?}"), name);
        }
        let mut again = [0; MAX_MESSAGE];
        let length = Message { header, control: control.map(Box::new) }.encode(&mut again);
        assert_eq!(again[..length], bytes, "{name}");
    }
}

#[test]
fn recorded_messages_of_a_session_are_read() {
    let recorded = recorded("tenants-numbers.txt");
    let body = |name: &str| &recorded[name][4..];
    let hello: Hello = decode_first(body("Hello")).unwrap();
    assert_eq!(encode_first(&hello).unwrap(), recorded["Hello"]);
    let welcome: Result<Welcome, Refused> = decode_first(body("Welcome")).unwrap();
    assert_eq!(encode_first(&welcome).unwrap(), recorded["Welcome"]);
    for name in ["Request::Leave", "Request::Events"] {
        let request: Request = decode(body(name)).unwrap();
        assert_eq!(encode(&request).unwrap(), recorded[name]);
    }
    for name in ["Answer::Left", "Answer::AllEvents"] {
        let answer: Answer = decode(body(name)).unwrap();
        assert_eq!(encode(&answer).unwrap(), recorded[name]);
    }
}
