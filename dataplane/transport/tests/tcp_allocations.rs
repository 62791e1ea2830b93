//! Once a link is up, neither end allocates: not per frame, not per byte.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

mod counting;
mod frames;

use counting::Counting;
use frames::{FRAMES, Pair};
use harmonaize_transport::tcp::{Config, LinkProtection, TcpTransport};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

#[global_allocator]
static ALLOCATOR: Counting = Counting(counting::here);

#[test]
fn ten_thousand_frames_allocate_nothing() {
    for protection in [LinkProtection::None, LinkProtection::Authenticated, LinkProtection::Encrypted] {
        frames_allocate_nothing(protection, None);
        frames_allocate_nothing(protection, Some(30_000));
    }
}

fn frames_allocate_nothing(protection: LinkProtection, sender_bytes: Option<usize>) {
    let config = Config {
        protection,
        sender_bytes,
        // Signs of life and ticks are part of what is counted.
        peer_timeout: Duration::from_millis(400),
        ..Config::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
    };
    let ends = [config.clone(), config].map(|config| TcpTransport::bind(config).unwrap());
    let mut pair = Pair::new(ends, 2, false);
    let before = counting::so_far();
    assert!(before > 0, "the counter counts");
    let arrived = pair.traffic();
    pair.idle(Duration::from_millis(300));
    let allocations = counting::so_far() - before;
    assert_eq!((arrived, allocations), ((FRAMES, 0), 0), "((frames, wrong events), allocations)");
}
