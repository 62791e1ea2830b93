//! What control's operator decided, for tests of agents: everything has as long as it takes.

use harmonaize_planner::Topology;
use harmonaize_server::{Access, Config, state};
use std::time::Duration;

/// One tenant, `a`, on hosts and links of this topology file, and all times this long.
pub(crate) fn settings(topology: &str, limit: Duration) -> state::Settings {
    state::Settings {
        topology: Topology::parse(topology).unwrap(),
        tenants: vec!["a".to_owned()],
        join_timeout: limit,
        prepare_timeout: limit,
        lease: limit,
        paths: 1,
        source_ports: None,
        most_ranks: 64,
        most_communicators: 8,
        telemetry_interval: Duration::from_secs(1),
        replan: true,
        turns: true,
        compression: true,
        algorithms: Vec::new(),
        terms: Default::default(),
        most_weight: 8,
        longest_regroup: Duration::from_secs(600),
    }
}

/// Control with these settings on a port of the loopback, where anyone may do everything; it keeps nothing.
pub(crate) fn config(settings: state::Settings, limit: Duration) -> Config {
    Config {
        listen: "127.0.0.1:0".parse().unwrap(),
        access: Access::insecure_loopback(),
        session_timeout: limit,
        settings,
        listen_operators: None,
        store: None,
        source: None,
    }
}
