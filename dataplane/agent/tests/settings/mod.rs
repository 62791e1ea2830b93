//! What control's operator decided, for tests of agents: everything has as long as it takes.

use harmonaize_planner::Topology;
use harmonaize_server::{Config, state};
use std::time::Duration;

/// Control on a port of the loopback, where anyone may do everything. It has one tenant, `a`, on hosts and links of this topology file;
/// all times are this long.
pub(crate) fn config(topology: &str, limit: Duration) -> Config {
    const TEXT: &str = r#"
        listen = "127.0.0.1:0"
        topology = ""
        insecure_loopback = true
        tenant = [{ name = "a" }]
    "#;
    let mut config = Config::parse(TEXT, Topology::parse(topology).unwrap()).unwrap();
    config.session_timeout = limit;
    config.settings =
        state::Settings { join_timeout: limit, prepare_timeout: limit, lease: limit, ..config.settings };
    config
}
