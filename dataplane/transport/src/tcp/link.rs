//! One link: its paths, from the first dial to the last, and what it waits for.

use super::awaited::Expected;
use super::congestion::HostCongestion;
use super::dial::Dial;
use super::handshake::Hello;
use super::path::Path;
use super::shares::Share;
use super::sys;
use crate::rings::Rings;
use crate::{DownReason, Introduction, TrafficClass};
use harmonaize_abi::CongestionControl;
use std::time::{Duration, Instant};

/// Pause before the second try to connect, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

#[derive(Debug)]
pub(super) struct Link {
    pub(super) introduction: Introduction,
    /// Lets the peer's connections in.
    pub(super) expected: Expected,
    /// When it must be up.
    pub(super) deadline: Instant,
    pub(super) up: bool,
    pub(super) slots: Vec<Slot>,
    pub(super) rings: Rings,
    /// Why our last try failed.
    pub(super) trouble: Option<DownReason>,
    /// What it may send, in bits a second.
    pub(super) rate: Option<u64>,
    /// The congestion control of its connections; none for the host's own.
    pub(super) congestion: Option<CongestionControl>,
    /// Its part in what the host sends.
    pub(super) share: Share,
    /// How urgent what it carries is.
    pub(super) class: TrafficClass,
    /// One path was closed by the peer: until then the others may still deliver.
    pub(super) ending: Option<Instant>,
}

/// What stands where a path should be.
#[derive(Debug)]
pub(super) enum Slot {
    /// The peer has to come.
    Absent,
    /// To be dialled at that time, with the pause after that.
    Retry(Instant, Duration),
    /// Being dialled; the pause if it fails.
    Dialling(Box<Dial>, Duration),
    Ready(Box<Path>),
}

impl Link {
    pub(super) fn new(
        introduction: Introduction,
        expected: Expected,
        now: Instant,
        timeout: Duration,
    ) -> Self {
        let slot = || if introduction.initiate { Slot::Retry(now, FIRST_PAUSE) } else { Slot::Absent };
        let slots = introduction.source_ports.iter().map(|_| slot()).collect();
        let (rings, deadline) = (Rings::default(), now + timeout);
        let (up, trouble, rate, share, ending) = (false, None, None, Share::default(), None);
        let (class, congestion) = (TrafficClass::default(), None);
        Self {
            introduction,
            expected,
            deadline,
            up,
            slots,
            rings,
            trouble,
            rate,
            congestion,
            share,
            class,
            ending,
        }
    }

    pub(super) fn path(&mut self, path: u16) -> Option<&mut Path> {
        match self.slots.get_mut(usize::from(path)) {
            Some(Slot::Ready(path)) => Some(path),
            _ => None,
        }
    }

    pub(super) fn paths(&mut self) -> impl Iterator<Item = (u16, &mut Path)> {
        self.slots.iter_mut().zip(0..).filter_map(|(slot, number)| match slot {
            Slot::Ready(path) => Some((number, &mut **path)),
            _ => None,
        })
    }

    /// Divides the link's rate, its own or its share of the host's, among the connections that it has. False if one of them cannot be paced.
    pub(super) fn pace(&mut self) -> bool {
        let paths = self.slots.len().max(1) as u64;
        // The kernel takes all ones for no bound; a rate of nothing would never let go of a byte.
        let each = self.rate.map(|bits| bits / 8).into_iter().chain(self.share.bound).min();
        let each = each.map_or(u64::MAX, |bytes| (bytes / paths).max(1));
        self.paths().fold(true, |able, (number, path)| match sys::set_pacing(path.socket(), each) {
            Ok(()) => able,
            Err(error) => {
                tracing::warn!(path = number, %error, "a connection cannot be paced");
                false
            }
        })
    }

    /// Has all its connections go by a congestion control, or by the host's own. That holds now and once they are made, also where the host
    /// refuses it.
    pub(super) fn control_congestion(&mut self, host: &HostCongestion, choice: Option<CongestionControl>) {
        let peer = self.introduction.peer;
        let taken =
            self.paths().fold(true, |taken, (_, path)| host.apply(path.socket(), choice, &peer) && taken);
        self.congestion = choice.filter(|_| taken);
    }

    /// Has all its packets carry a code point from now on.
    pub(super) fn mark(&mut self, dscp: u8) {
        let v4 = self.introduction.peer.ip().to_canonical().is_ipv4();
        for (number, path) in self.paths() {
            let (socket, field) = (path.socket(), u32::from(dscp) << 2);
            let done = if v4 { socket.set_tos_v4(field) } else { socket.set_tclass_v6(field) };
            if let Err(error) = done {
                tracing::warn!(path = number, %error, "a connection's packets cannot be marked");
            }
        }
    }

    /// Whether a connection that said hello may become a path.
    pub(super) fn accepts(&self, hello: &Hello) -> bool {
        let path = usize::from(hello.path.get());
        !self.introduction.initiate && !self.up && path < self.slots.len()
    }

    pub(super) fn is_complete(&self) -> bool {
        self.slots.iter().all(|slot| matches!(slot, Slot::Ready(_)))
    }

    /// A path that is not up was lost: ours to dial again, or the peer's.
    pub(super) fn lose(&mut self, path: u16, now: Instant, reason: Option<DownReason>) {
        if reason.is_some() {
            self.trouble = reason;
        }
        let initiate = self.introduction.initiate;
        if let Some(slot) = self.slots.get_mut(usize::from(path)) {
            let pause = if let Slot::Dialling(_, pause) = slot { *pause } else { FIRST_PAUSE };
            *slot = if initiate {
                Slot::Retry(now + pause, (2 * pause).min(LONGEST_PAUSE))
            } else {
                Slot::Absent
            };
        }
    }

    /// When the link next wants to be looked at, apart from ticks.
    pub(super) fn next(&self) -> Option<Instant> {
        if self.up {
            return self.ending;
        }
        let retries = self.slots.iter().filter_map(|slot| match slot {
            Slot::Retry(at, _) => Some(*at),
            _ => None,
        });
        retries.chain([self.deadline]).min()
    }

    /// Why the link did not come up in time.
    pub(super) fn too_late(&self, timeout: Duration) -> DownReason {
        let trouble = || self.trouble.clone();
        self.expected.trouble().or_else(trouble).unwrap_or_else(|| {
            let peer = self.introduction.peer;
            DownReason::Connect(if self.introduction.initiate {
                format!("{peer} did not answer within {timeout:?}")
            } else {
                format!("the peer did not come within {timeout:?}")
            })
        })
    }
}
