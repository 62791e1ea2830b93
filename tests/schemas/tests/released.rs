//! Structures that cross between programs of two releases are those that were released.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_schemas::{Schema, Sources, check};

/// Enums of the tenants' interface that may have variants of their own in later releases. An agent reads those of requests, and gives
/// an answer to none but such a request, and a process passes over events that it does not know. A process of an earlier release would
/// not read what else is new.
const OPEN: &[&str] = &["session::Answer", "session::Request", "event::EventKind"];

/// They are between tenants and agents alone. `core` and `plan` have structures of these names, which agents exchange.
const OF_TENANTS: &[&str] = &["session::Answer", "session::Request"];

/// It is between an agent and its successor alone. A message of agents is named so.
const OF_SUCCESSORS: &[&str] = &["aggregation::Aggregation"];

fn hold(name: &str, schema: Schema, lines: &[String], remedy: &str) {
    let remedy = format!("{remedy} Test: cargo test -p harmonaize-schemas");
    check(name, schema, lines, &remedy).unwrap_or_else(|broken| panic!("{broken}"));
}

#[test]
fn tenants_structures_are_those_released() {
    let sources = Sources::read(&["dataplane/abi/src", "dataplane/shm/src/remote"]).unwrap();
    let remedy = "Processes that were built at the release before could not use this agent any more. Leave the structure as it is, and \
        add a `Request` at the end, with an `Answer` of its own at the end. If that cannot be, raise ABI_VERSION, have agents go on with \
        ABI_VERSION - 1, and only then begin this file anew.";
    hold("tenants", Schema::Grows, &sources.all(OPEN), remedy);
}

#[test]
fn agents_structures_are_those_released() {
    let folders = ["dataplane/abi/src", "dataplane/aggregator/src", "dataplane/core/src"];
    let messages = Sources::read(&folders)
        .unwrap()
        .without(&[OF_TENANTS, OF_SUCCESSORS].concat())
        .reachable(&["Control", "Header", "Wire"])
        .unwrap();
    // These have types of their own alone.
    let datagrams = ["dataplane/probe/src", "dataplane/transport/src/verbs"].map(|folder| {
        let sources = Sources::read(&[folder]).unwrap();
        if folder.contains("probe") {
            sources.reachable(&["Head", "CrossTraffic"]).unwrap()
        } else {
            sources.reachable(&["Head"]).unwrap()
        }
    });
    let remedy = "Agents and aggregators of the release before could not work with this one any more. Leave the structure as it is. What \
        is new goes only to those that are known to have it: what an agent can do is in its Hello to control.";
    hold("agents", Schema::Grows, &[messages, datagrams.concat()].concat(), remedy);
}

#[test]
fn a_changed_state_is_handed_over_by_another_version() {
    let folders = [
        "dataplane/abi/src",
        "dataplane/agent/src",
        "dataplane/aggregator/src",
        "dataplane/codec/src",
        "dataplane/core/src",
        "dataplane/engine/src",
        "dataplane/plan/src",
        "dataplane/transport/src",
    ];
    let sources = Sources::read(&folders).unwrap().without(OF_TENANTS);
    let roots = [
        "Greeting",
        "Offer",
        "Description",
        "Signal",
        "Image",
        "AggregatedImage",
        "WaitingImage",
        "LinkImage",
        "Communicator",
    ];
    let source = include_str!("../../../dataplane/agent/src/handover.rs");
    let version = source.lines().find_map(|line| line.strip_prefix("pub const VERSION: u32 = ")).unwrap();
    let name = format!("handover.v{}", version.trim_end_matches(';'));
    let remedy = "A successor would misread the state of an agent before it. Raise `VERSION` in dataplane/agent/src/handover.rs and name \
        this file after it (git mv): such a successor is refused, and the agent goes on. Operators then drain the host, so say it in \
        CHANGELOG.md.";
    hold(&name, Schema::Exact, &sources.reachable(&roots).unwrap(), remedy);
}
