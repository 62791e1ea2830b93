//! The page that operators' browsers read. Its tests show to whom it is served, what it says, and how it
//! looks in a browser.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

mod browser;
mod http;

use harmonaize_planner::Topology;
use harmonaize_server::{Config, Server};
use harmonaize_testkit::agents::LeafSpine;
use std::net::SocketAddr;

/// A name that a page would run if it took it for markup.
const HOSTILE: &str = "<img_src=x_onerror=document.title='run'>";

/// Two racks of four hosts, and two spines.
const FABRIC: LeafSpine = LeafSpine { racks: 2, hosts: 4, spines: 2 };

fn config(fabric: LeafSpine) -> Config {
    let text = format!(
        "listen = \"127.0.0.1:0\"\npage = \"127.0.0.1:0\"\nmetrics = \"127.0.0.1:0\"\ntopology = \"\"\ninsecure_loopback = true\n\
         session_timeout = \"120s\"\nprepare_timeout = \"120s\"\nsource_ports = \"20000-29999\"\ntenant = [{{ name = \"a\" }}, {{ name = \"{HOSTILE}\" }}]\n"
    );
    Config::parse(&text, Topology::parse(&fabric.topology()).unwrap()).unwrap()
}

/// Where a control listens, and where it has its page.
async fn start(config: Config) -> (SocketAddr, SocketAddr) {
    let server = Server::bind(config).await.unwrap();
    let addresses = (server.local_address(), server.page_address().unwrap());
    tokio::spawn(server.run(std::future::pending()));
    addresses
}
