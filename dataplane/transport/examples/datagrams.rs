//! Datagrams a second through an endpoint, and what of a core each end needs for them.
//!
//! `cargo run --release -p harmonaize-transport --example datagrams [-- SECONDS]`: a sender and a receiver, a thread each, on the
//! loopback device; payloads of 1,104 bytes (a header and 1 KiB of a tensor), one by one and cut by the kernel.

use harmonaize_transport::datagram::{DatagramConfig, Datagrams};
use rustix::time::{ClockId, clock_gettime};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const BYTES: usize = 1104;

/// What this thread has used of a processor, in seconds.
fn used() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Datagrams received in a second, and seconds of a core for a million of them at the sender and at the receiver.
fn rate(together: usize, time: Duration) -> std::io::Result<(f64, f64, f64, u64)> {
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let config = DatagramConfig { bytes: BYTES, gso_segments: together, ..DatagramConfig::default() };
    let (mut from, mut to) = (Datagrams::bind(any, config)?, Datagrams::bind(any, config)?);
    let (address, over) = (to.local_address(), AtomicBool::new(false));
    let begun = Instant::now();
    let (sender, receiver) = std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            while begun.elapsed() < time {
                for _ in 0..64 {
                    from.push(|_| Some((address, BYTES)));
                }
                from.flush();
            }
            over.store(true, Ordering::Relaxed);
            used()
        });
        let receiver = scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                let look = &mut |_: SocketAddr, bytes: &[u8]| _ = std::hint::black_box(bytes.first());
                if to.receive(look) == 0 {
                    std::thread::yield_now();
                }
            }
            used()
        });
        (sender.join().unwrap_or(f64::NAN), receiver.join().unwrap_or(f64::NAN))
    });
    let (sent, received) = (from.counters().sent as f64, to.counters().received as f64);
    let lost = from.counters().sent - to.counters().received;
    Ok((received / time.as_secs_f64(), sender / sent * 1e6, receiver / received * 1e6, lost))
}

fn main() -> std::io::Result<()> {
    let seconds = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(1.0);
    println!("together  received/s  sender us each  receiver us each  lost");
    for together in [1, 4, 16, 59] {
        let (rate, sender, receiver, lost) = rate(together, Duration::from_secs_f64(seconds))?;
        println!("{together:8}  {rate:10.0}  {sender:14.3}  {receiver:16.3}  {lost}");
    }
    Ok(())
}
