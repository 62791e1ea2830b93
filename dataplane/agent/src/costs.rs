//! What taking part in an operation costs this host: messages through the transport, and sums. Control chooses algorithms by it.

use getrandom::fill;
use harmonaize_abi::{Dtype, ReduceOp, View, ViewMut};
use harmonaize_api::v1;
use harmonaize_transport::tcp::{Config, LinkProtection, TcpTransport};
use harmonaize_transport::{Event, Introduction, LinkId, SendError, Transport};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Longest that a link to this process itself may take to come up.
const LINK_TIMEOUT: Duration = Duration::from_millis(200);
/// How long messages go there and back, and how often at least.
const TRIPS_TIME: Duration = Duration::from_millis(5);
const MIN_TRIPS: u32 = 16;
/// Bytes of a message, about as a header of the engine has.
const HEADER: usize = 64;
/// Elements that are added up, 256 KiB, and how often; the shortest time counts.
const ELEMENTS: usize = 1 << 16;
const TIMES: usize = 5;

/// Measured at the first call, in some ten milliseconds, with links that are protected so; none where it cannot be.
pub(crate) fn measure(protection: LinkProtection) -> Option<v1::HostCosts> {
    static COSTS: OnceLock<Option<v1::HostCosts>> = OnceLock::new();
    *COSTS.get_or_init(|| {
        let message = message(protection).or_else(|| {
            tracing::warn!("messages to this host itself cannot be measured: control takes its own figure");
            None
        })?;
        let reduced_byte_ps = reduced_byte()?;
        Some(v1::HostCosts { message_ns: u64::try_from(message.as_nanos()).ok()?.max(1), reduced_byte_ps })
    })
}

/// The time of a message between two endpoints on this thread while nothing else is on its way. It is what its sender and its
/// receiver do for it.
fn message(protection: LinkProtection) -> Option<Duration> {
    let any = || Config { protection, ..Config::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))) };
    let mut ends = [TcpTransport::bind(any()).ok()?, TcpTransport::bind(any()).ok()?];
    let (mut name, mut secret) = ([0; 16], [0; 32]);
    fill(&mut name).ok()?;
    fill(&mut secret).ok()?;
    let addresses = [1, 0].map(|other: usize| ends.get(other).map(TcpTransport::local_address));
    let mut links = Vec::new();
    for ((end, peer), initiate) in ends.iter_mut().zip(addresses).zip([true, false]) {
        let (peer, source_ports, over_tcp) = (peer?, vec![0], false);
        let introduction = Introduction { name, secret, peer, initiate, source_ports, over_tcp };
        links.push(end.open(introduction).ok()?);
    }
    let begun = Instant::now();
    let mut up = 0;
    while up < ends.len() {
        for end in &mut ends {
            end.progress(8, &mut |_, event| up += usize::from(matches!(event, Event::Up)));
        }
        if begun.elapsed() > LINK_TIMEOUT {
            return None;
        }
    }
    let [at_a, at_b]: [LinkId; 2] = links.try_into().ok()?;
    let [a, b] = &mut ends;
    round_trip((a, at_a), (b, at_b))?;
    let (begun, mut trips) = (Instant::now(), 0_u32);
    while trips < MIN_TRIPS || begun.elapsed() < TRIPS_TIME {
        round_trip((a, at_a), (b, at_b))?;
        round_trip((b, at_b), (a, at_a))?;
        trips += 1;
    }
    Some(begun.elapsed() / (2 * trips))
}

/// Sends a message, and waits for it.
fn round_trip((from, link): (&mut TcpTransport, LinkId), (to, _): (&mut TcpTransport, LinkId)) -> Option<()> {
    let begun = Instant::now();
    let (mut sent, mut arrived) = (false, false);
    while !arrived {
        if !sent {
            match from.send(link, 0, &[7; HEADER], None) {
                Ok(()) => sent = true,
                Err(SendError::Full) => {}
                Err(_) => return None,
            }
        }
        from.progress(8, &mut |_, _| {});
        to.progress(8, &mut |_, event| arrived |= matches!(event, Event::Received { .. }));
        if begun.elapsed() > LINK_TIMEOUT {
            return None;
        }
    }
    Some(())
}

/// Picoseconds to add up a byte of a tensor of f32.
fn reduced_byte() -> Option<u64> {
    let sources = [vec![1.0_f32; ELEMENTS], vec![2.0; ELEMENTS]];
    let mut sum = vec![0.0_f32; ELEMENTS];
    let mut least = Duration::MAX;
    for _ in 0..TIMES {
        let [one, other] = &sources;
        let views = [View::from(one.as_slice()), View::from(other.as_slice())];
        let begun = Instant::now();
        let to = [ViewMut::from(sum.as_mut_slice())];
        harmonaize_kernels::reduce(ReduceOp::Sum, Dtype::F32, &views, &to, None).ok()?;
        least = least.min(begun.elapsed());
    }
    let bytes = (ELEMENTS * size_of::<f32>()) as u128;
    u64::try_from(least.as_nanos() * 1000 / bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_measures_what_control_believes() {
        let costs = measure(LinkProtection::Authenticated).unwrap();
        assert!((1..=10_000_000).contains(&costs.message_ns), "{costs:?}");
        assert!((1..=1_000_000).contains(&costs.reduced_byte_ps), "{costs:?}");
        assert_eq!(measure(LinkProtection::None), Some(costs), "measured once");
    }
}
