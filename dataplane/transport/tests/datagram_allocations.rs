//! Once a datagram endpoint is bound it does not allocate: not to send, not to receive, not for errors.

mod counting;

use counting::Counting;
use harmonaize_transport::datagram::{DatagramConfig, Datagrams};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

#[global_allocator]
static ALLOCATOR: Counting = Counting(counting::here);

#[test]
fn nothing_is_allocated_for_a_datagram() {
    let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
    let mut a = Datagrams::bind(any, DatagramConfig::default()).unwrap();
    let mut b = Datagrams::bind(any, DatagramConfig::default()).unwrap();
    let to = b.local_address();
    let nowhere = SocketAddr::from(([255, 255, 255, 255], 9));
    let (mut received, deadline) = (0_u64, Instant::now() + Duration::from_secs(60));
    let before = counting::so_far();
    assert!(before > 0, "the counter counts");
    for number in 0..20_000_usize {
        let bytes = if number % 100 < 50 { 1400 } else { number % 1400 };
        let to = if number % 1000 == 0 { nowhere } else { to };
        a.push(|room| {
            room[..bytes].fill(number as u8);
            Some((to, bytes))
        });
        if number % 40 == 39 {
            a.flush();
            while b.receive(&mut |_, _| received += 1) > 0 {}
        }
    }
    a.flush();
    let sent = a.counters().sent;
    while received < sent && Instant::now() < deadline {
        b.receive(&mut |_, _| received += 1);
    }
    assert_eq!(counting::so_far() - before, 0);
    assert_eq!((sent, received, a.counters().unsent), (19_980, 19_980, 20));
}
