//! Once an RDMA link is up and each kind of frame has flowed, neither end allocates. That is so for each frame, for each
//! byte, and when it goes to sleep.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

mod counting;
mod frames;

use counting::Counting;
use frames::{FRAMES, Pair};
use harmonaize_transport::tcp;
use harmonaize_transport::verbs::{Config, VerbsTransport};
use harmonaize_verbs::fake::Fabric;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

#[global_allocator]
static ALLOCATOR: Counting = Counting(counting::here);

/// Two ends with a link of three paths, and small mailboxes. One end has two devices and the other has one. Messages of
/// credit alone are needed too.
fn pair() -> Pair<VerbsTransport> {
    let fabric = Fabric::new();
    for (name, address) in [("a0", 1), ("a1", 2), ("b0", 3)] {
        fabric.add(name, Ipv4Addr::new(10, 0, 0, address)).unwrap();
    }
    fabric.stop_recording();
    let end = |devices: &[&str]| {
        let tcp = tcp::Config {
            // Signs of life and ticks are part of what is counted.
            peer_timeout: Duration::from_millis(400),
            ..tcp::Config::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
        };
        let devices = devices.iter().map(|name| (*name).to_owned()).collect();
        let config = Config { devices, mailbox_slots: 16, ..Config::new(tcp) };
        VerbsTransport::bind(config, &fabric.devices()).unwrap()
    };
    Pair::new([end(&["a0", "a1"]), end(&["b0"])], 3, true)
}

#[test]
fn ten_thousand_frames_allocate_nothing() {
    let mut pair = pair();
    // The first frames from a mapping register it, and each queue grows to what it needs.
    assert_eq!(pair.traffic(), (FRAMES, 0), "(frames, wrong events)");
    let before = counting::so_far();
    assert!(before > 0, "the counter counts");
    let arrived = pair.traffic();
    pair.idle(Duration::from_millis(1300));
    let allocations = counting::so_far() - before;
    assert_eq!((arrived, allocations), ((FRAMES, 0), 0), "((frames, wrong events), allocations)");
}
