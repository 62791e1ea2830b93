//! What agents say to control.

use crate::input::Input;
use harmonaize_agent::recipe::{VerifiedPlans, expand};
use harmonaize_api::PROTOCOL_VERSION;
use harmonaize_api::v1::{self, from_agent};
use harmonaize_planner::Topology;
use harmonaize_server::Config;
use harmonaize_server::state::{Controller, Output, SessionId, Settings};
use prost::Message;
use std::time::Duration;

const TOPOLOGY: &str = r#"
[[switch]]
name = "s0"
[[host]]
name = "h0"
[[host]]
name = "h1"
[[link]]
from = "h0"
to = "s0"
rate = "1Gbit/s"
delay = "50us"
[[link]]
from = "h1"
to = "s0"
rate = "1Gbit/s"
delay = "50us"
"#;

const CONFIG: &str = r#"
listen = "127.0.0.1:0"
topology = ""
insecure_loopback = true
lease = "30s"
paths = 2
source_ports = "20000-20099"
most_ranks = 64
most_communicators = 6
tenant = [{ name = "a" }, { name = "b" }]
"#;

fn settings() -> Settings {
    Config::parse(CONFIG, Topology::parse(TOPOLOGY).unwrap()).unwrap().settings
}

fn hello(host: usize) -> from_agent::Message {
    from_agent::Message::Hello(v1::Hello {
        protocol_version: PROTOCOL_VERSION,
        host: format!("h{host}"),
        listen: format!("10.0.0.{host}:4000"),
        build: "fuzz".to_owned(),
        ..v1::Hello::default()
    })
}

/// Most bytes of a recipe: with more participants a proof in an instrumented program takes seconds.
const MAX_RECIPE: usize = 1024;

/// A communicator that an agent would form, or why it does not.
pub(super) fn recipe(bytes: &[u8]) {
    let Some(Ok(recipe)) = (bytes.len() <= MAX_RECIPE).then(|| v1::Recipe::decode(bytes)) else { return };
    match expand(&recipe, &mut VerifiedPlans::default()) {
        Ok(expanded) => assert!(expanded.me.0 < expanded.plan.plan.participants()),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// Control with two agents, whose messages are the fuzzer's; what it answers can be sent.
pub(super) fn messages(bytes: &[u8]) {
    let mut input = Input(bytes);
    let mut control = Controller::new(settings(), [7; 32]);
    let mut now = Duration::from_secs(1);
    for host in 0..2 {
        control.message(now, SessionId(host), hello(host as usize).into());
    }
    while !input.is_empty() {
        let what = input.u8();
        let from = SessionId(u64::from(what % 3));
        match what >> 4 {
            0 => control.session_ended(now, from),
            1 => {
                now += Duration::from_millis(u64::from(input.u16()));
                control.expire(now);
            }
            2 => control.message(now, from, hello(usize::from(input.u8() % 2)).into()),
            _ => {
                let Ok(message) = v1::FromAgent::decode(input.piece()) else { continue };
                let again = v1::FromAgent::decode(&message.encode_to_vec()[..]).unwrap();
                control.message(now, from, again);
            }
        }
        let mut kept = Vec::new();
        for output in control.take_outputs() {
            match output {
                Output::Send(_, message) => {
                    let sent = v1::ToAgent { message: Some(message) };
                    assert!(v1::ToAgent::decode(&sent.encode_to_vec()[..]).is_ok());
                }
                Output::Keep(changes) => kept.extend(changes),
                _ => {}
            }
        }
        control.apply_stored(now, &kept);
        assert!(
            control.next_deadline().is_none_or(|due| due > now) || {
                control.expire(now);
                control.next_deadline().is_none_or(|due| due > now)
            }
        );
    }
}
