//! Congestion of links: none, mild or severe, by our own traffic or by others'.
//!
//! A [`Detector`] takes in a host's records, is told of the time with `advance`, and yields a [`Congestion`] whenever a
//! [`Link`]'s state or cause changes. A link is an interface one way, as a whole, or towards one other end (and, for RoCE, by
//! one source port, for an own TCP connection by its two ports, which choose among equal paths). Flows whose owner was told ([`Record::Owner`](crate::trace::Record::Owner))
//! are our own, all others' are others'. Amounts are kept by the millisecond, for 128 of them; a snapshot's new bytes are
//! spread over the time since the flow's last packet, or since its burst began.
//!
//! **Pressure.** Each signal is brought to a scale on which 1 is mild and 2 is severe, and the largest counts:
//! - *delay*: the least round trip of the last 3 ms (or the last one, for twice as long as it took) less the round trip at rest,
//!   which is the least of the last 1 to 2 minutes (10 to 20 while the link is congested). 1 at a unit
//!   and half of the rest, 2 at ten units and twice the rest. One that is under way counts as soon as it is twice as late as mild. A round trip of
//!   30 ms and more counts only if 32 KiB followed its packet: else an acknowledgement may have been delayed. The unit is what the
//!   link takes for [`Limits::queue_bytes`], but no less than twice the jitter; of either [`Limits::delay`] counts at most. The jitter is
//!   the least that 16 round trips in a row differed by within the last 1 to 2 minutes.
//! - *marks*: ECN marks, echoes of them, CNPs, as a part of the packets of the last 8 ms; *loss*: retransmissions, RoCE
//!   repeats, gaps and NAKs of the sequence, likewise. 1 at 2 of them and the mild part, 2 at 8 and the severe part.
//! - *load*, of an interface alone: bytes of the last 4 ms over its capacity; at most 1.5.
//!
//! What leaves is judged by round trips of what leaves, echoes and CNPs that come in, and what is sent again; what comes in by
//! marks on it, gaps, and what the other side sends again. A flow whose receiver holds it up (a zero window, a NAK of a receiver
//! that is not ready) says nothing of the network for 50 ms. An interface has the pressure that all of its paths have (with at
//! least a twentieth of its bytes each): their least, or its load.
//!
//! **RDMA ports.** What a device counts itself ([`Record::Port`](crate::trace::Record::Port)) is a path of its own, [`Path::Rdma`]. Its
//! marks, loss and load of the time between two readings are judged by the same parts, and two readings in a row make a state. It knows no round
//! trips and no owners, so its cause is unknown, and it says nothing of its interface as a whole.
//!
//! **Own queue pairs.** What the engine times ([`Record::Completion`](crate::trace::Record::Completion)) is a path too, [`Path::QueuePair`].
//! A message waited for as long as it took, less what the link takes for the bytes that the device had meanwhile. For that the link
//! has the most that a message showed lately, and at most what is stated. The least wait of four messages within 50 ms, less the wait at
//! rest, is judged as a delay is. Its unit is [`Limits::delay`], or twice the jitter where that is more: an engine that polls late lengthens
//! waits, too. Nor is it less than what the link takes for those bytes: a device that is slower than stated is no congestion. Its cause is
//! unknown. Without a stated rate nothing is found.
//!
//! **Starved.** A path on which all that was measured for 6 ms and two units came back later than at rest by a unit and twice the jitter, nearly
//! without a break, while what was acknowledged is less than 72% of what is stated, and no more through its interface; and that
//! has carried 80% of it over 40 ms within the last one or two minutes. What is acknowledged between the ends of two round trips was
//! sent between their beginnings, so that a queue shows as it grows, before its sender is held up; of a round trip under way it
//! is the most that can have been. Of a late round trip that the programs told, the end and the beginning are known, and it is held apart from the quick
//! ones before it, that ended in the same look. A path that has carried as much is starved, too, where such a round trip alone found a queue
//! of which 1 to 2.7 units are not of what was sent since the one before. They must be 0.2 units longer than the link takes for what the round trip
//! measures. That is bolder, for whoever has it proven. Others are the cause, at once. Kernels' own states of sockets could say more, and
//! cost too much to follow. Where other paths share the interface, they may have queues apart: then there must be room, too, while what
//! was late was acknowledged. A path that is starved again, while its state and cause stand, is no finding: it is handed out beside them.
//!
//! **Hysteresis.** A state is entered when its pressure has lasted [`Limits::dwell`] with [`Limits::evidence`] signals, and
//! left when the pressure was below 0.6 (severe: 1.4) for the hold, which doubles when the state comes back soon, from
//! [`Limits::exit_dwell`] up to [`Limits::max_exit_dwell`], as routes that flap are damped (RFC 2439).
//!
//! **Cause.** Others, where at least 15% of the bytes that were seen are theirs. Else, what others send may not be seen here, and
//! queues tell: between two packets, sent at `s` and `t`, that found queues of `q(s)` and `q(t)` (their round trips less the
//! rest), a link of capacity `C` that had our bytes alone would have a queue `q'` by `t`, from `q(s)`, what we sent, and `C`.
//! What is beyond it, `C (q(t) - q')`, is others'. Ours is `own / (seen + unseen)`; below 0.65 (the median of the last 3) others
//! are the cause, from 0.75 on we are. `C` is what is stated where the traffic ever came near it, else what passed between
//! such packets, `seen / (t - s + q(t) - q(s))`, if that is more than the link ever carried *without* a queue. Where all that is
//! known is what it carried without a queue, a queue at no more than that is others'. Without a queue, marks, loss and load are
//! ours if our millisecond peaks, on the path or its interface, reach 75% of the capacity. A path waits for our other paths where our
//! bytes take [`Limits::load`] of its interface, where what the queue got shorter by was sent before. The interface has at least the part
//! of its least congested path, since two packets on two paths, whose queues may lie apart, do not tell how one grew. For the same reason
//! an interface's bytes count over no less than the time between its two packets. An unseen flow next to which we send little is found only
//! as fast as our round trips follow each other; one that was there before us, and left us no rest to compare with, is not found.

mod bins;
mod cause;
mod completion;
mod detector;
mod finding;
mod flow;
mod hysteresis;
mod monitor;
mod port;
mod queue_jump;
mod starved;
mod windowed;

pub use detector::Detector;
pub use finding::{Congestion, Link, Path, Signals};

use std::time::Duration;

/// What a link's capacity is taken from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Capacity {
    /// What was seen: what the link carried while a queue stood, and the most that it carried while none did. It is what is
    /// stated where that is close (70%), or nothing was seen. It is right where the narrowest place of a path may lie behind
    /// the interface.
    #[default]
    Seen,
    /// What is stated.
    Stated,
}

/// A busy host lengthens round trips by as much: of shorter ones most would be its own.
const BUSY_HOST: Duration = Duration::from_micros(2500);

/// What decides.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// The bytes from which a link's queue is mild, and so news. A mild queue also takes half of the link's round trip at rest.
    /// Ten times as many bytes are severe. A host hands over as much at once.
    pub queue_bytes: u64,
    /// The same as a time. No queue needs to be longer to be news, and this is all that is known where no rate is.
    pub delay: Duration,
    /// Of a million packets, so many marked: mild, and severe. At least 2 and 8 packets.
    pub ecn_ce_ppm: (u32, u32),
    /// Of a million packets, so many lost or sent again: mild, and severe. At least 2 and 8 packets.
    pub lost_ppm: (u32, u32),
    /// The part of the capacity in use that makes an interface mildly congested.
    pub load: f64,
    /// How long a pressure must last.
    pub dwell: Duration,
    /// In which time so many round trips, marks, losses (or readings of the load) must speak for it.
    pub evidence: u64,
    /// How long a state is kept when the pressure is gone; doubled each time that it comes back soon,
    pub exit_dwell: Duration,
    /// up to this.
    pub max_exit_dwell: Duration,
    /// How soon is soon, at least.
    pub calm: Duration,
    /// How long another cause must seem right before it is told; doubled each time that it turns again soon.
    pub cause_dwell: Duration,
    /// How long the least round trip counts, at least; ten times as long while the link is congested.
    pub min_rtt_window: Duration,
    /// What a link's capacity is taken from.
    pub capacity: Capacity,
    /// At most so many flows.
    pub max_flows: usize,
    /// At most so many links: an interface is two, a path of it two more. Each takes 13 KiB.
    pub max_links: usize,
    /// At most so many findings wait to be fetched; beyond, the oldest is dropped and counted.
    pub max_findings: usize,
}

impl Limits {
    /// The time that a link of so many bytes a second takes for [`Limits::queue_bytes`]. It is [`Limits::delay`] where the rate
    /// is 0, not known.
    fn queue_unit(&self, bytes_per_second: u64) -> Duration {
        let nanos = u128::from(self.queue_bytes) * 1_000_000_000;
        nanos
            .checked_div(bytes_per_second.into())
            .map_or(self.delay, |nanos| Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)))
    }

    /// How much longer than the least a round trip must be to be late. The link has so many bytes a second, and a jitter that is not known;
    /// 0: nor is its rate.
    pub fn late_rtt_limit(&self, bytes_per_second: u64) -> Duration {
        self.queue_unit(bytes_per_second).max(BUSY_HOST)
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            queue_bytes: 64 << 10,
            delay: Duration::from_micros(500),
            ecn_ce_ppm: (20_000, 200_000),
            lost_ppm: (10_000, 50_000),
            load: 0.9,
            dwell: Duration::from_millis(1),
            evidence: 2,
            exit_dwell: Duration::from_millis(50),
            max_exit_dwell: Duration::from_secs(30),
            calm: Duration::from_secs(2),
            cause_dwell: Duration::from_millis(2),
            min_rtt_window: Duration::from_secs(60),
            capacity: Capacity::Seen,
            max_flows: 1 << 16,
            max_links: 4096,
            max_findings: 1024,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shortest_queue_goes_by_the_rate() {
        let limits = Limits::default();
        let unit = |rate| limits.queue_unit(rate).as_nanos();
        assert_eq!([12_500_000, 1_250_000_000, 12_500_000_000].map(unit), [5_242_880, 52_428, 5_242]);
        assert_eq!(limits.queue_unit(0), limits.delay, "nothing is known");
        let late = |rate| limits.late_rtt_limit(rate).as_nanos();
        assert_eq!(
            [25_000_000, 125_000_000, 12_500_000_000, 0].map(late),
            [2_621_440, 2_500_000, 2_500_000, 2_500_000]
        );
    }
}
