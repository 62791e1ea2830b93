//! Somebody on the way between two agents changes a bit: an operation fails, or is right.

use crate::common::{SMALL, World, call};
use crate::tap::{Hooks, Tap};
use harmonaize_abi::{Collective, Status};
use harmonaize_transport::Transport;
use harmonaize_transport::conformance::{Change, Middle};
use harmonaize_transport::tcp::{Config, LinkProtection, TcpTransport};
use std::net::SocketAddr;

const ELEMENTS: u64 = 20_000;

/// Has others connect to somebody on the way.
struct Detour(SocketAddr);

impl Hooks for Detour {
    fn address(&self) -> Option<SocketAddr> {
        Some(self.0)
    }
}

/// Sums of two agents with a bit changed on each of their connections. It returns how many completed as right,
/// and as lost.
fn sums(protection: LinkProtection, change: Change) -> (usize, usize, u64) {
    let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
    let bind = || TcpTransport::bind(Config { protection, ..Config::new(any) }).unwrap();
    let (first, second) = (bind(), bind());
    let middle = Middle::new(second.local_address(), Some(change)).unwrap();
    let detour = Tap { inner: Box::new(second), hooks: Detour(middle.address()) };
    let transports: Vec<Box<dyn Transport + Send>> = vec![Box::new(first), Box::new(detour)];
    let mut world = World::new(transports, &[vec![0], vec![1]], SMALL);
    let values = |rank: u64| (0..ELEMENTS).map(move |at| at * 3 + rank * 1_000_003);
    for rank in 0..2 {
        world.write(rank, 0, &values(rank as u64).collect::<Vec<_>>());
        world.submit(rank, call(Collective::AllReduce, ELEMENTS, 1, 0, 1 << 20, 0));
    }
    let sums: Vec<u64> = values(0).zip(values(1)).map(|(one, other)| one + other).collect();
    let (mut right, mut lost) = (0, 0);
    for (rank, completion) in world.completions().into_iter().enumerate() {
        if completion.status == Status::Ok.code() {
            assert_eq!(world.read(rank, 1 << 20, sums.len()), sums, "rank {rank}: wrong, with {change:?}");
            right += 1;
        } else {
            assert_eq!(completion.status, Status::RankLost.code(), "rank {rank}: {completion:?}");
            lost += 1;
        }
    }
    (right, lost, middle.changed())
}

#[test]
fn a_tampered_operation_fails_or_is_right() {
    for protection in [LinkProtection::Authenticated, LinkProtection::Encrypted] {
        for to_listener in [true, false] {
            for at in (10_000..70_000).step_by(6_007) {
                let change = Change { to_listener, at, bit: (at % 8) as u8 };
                let (right, lost, changed) = sums(protection, change);
                assert!(changed > 0 && right + lost == 2, "{change:?}: {right} right, {lost} lost");
                assert!(lost > 0, "{change:?}: the change was not noticed");
            }
        }
    }
}

/// Else the test above could not fail.
#[test]
#[should_panic(expected = "wrong, with")]
fn without_protection_sums_are_wrong() {
    sums(LinkProtection::None, Change { to_listener: true, at: 30_000, bit: 3 });
}
