//! By which congestion control connections go: each link's, else the host's own.

use super::Config;
use harmonaize_abi::CongestionControl;
use socket2::{Domain, Socket, Type};
use std::io;
use std::net::SocketAddr;

/// The host's own congestion control: the configuration's, else the system's.
#[derive(Debug)]
pub(super) struct HostCongestion(Option<CongestionControl>);

impl HostCongestion {
    /// Finds it out of a new socket.
    ///
    /// # Errors
    /// Where the kernel makes no socket.
    pub(super) fn new(config: &Config) -> io::Result<Self> {
        let Some(named) = &config.congestion else {
            let fresh = Socket::new(Domain::for_address(config.listen), Type::STREAM, None)?;
            return Ok(Self(control_of(&fresh)));
        };
        Ok(Self(named.parse().ok()))
    }

    /// Has a connection go by a congestion control, or by the host's own. False: the host refuses it, and the connection has the host's own.
    pub(super) fn apply(
        &self,
        socket: &Socket,
        choice: Option<CongestionControl>,
        peer: &SocketAddr,
    ) -> bool {
        let set = |control: CongestionControl| socket.set_tcp_congestion(control.as_str().as_bytes());
        if let Some(control) = choice {
            let Err(error) = set(control) else { return true };
            tracing::warn!(%control, %peer, %error, "the host refuses a congestion control; a link has the host's own");
        }
        if let Some(own) = self.0
            && let Err(error) = set(own)
        {
            tracing::warn!(control = %own, %peer, %error, "a connection keeps the congestion control that it has");
        }
        choice.is_none()
    }

    /// Returns by which congestion control a connection goes, where that is not the host's own.
    pub(super) fn other(&self, socket: &Socket) -> Option<CongestionControl> {
        control_of(socket).filter(|control| Some(*control) != self.0)
    }
}

/// Returns by which congestion control a connection goes.
fn control_of(socket: &Socket) -> Option<CongestionControl> {
    let name = socket.tcp_congestion().ok()?;
    let name = name.split(|byte| *byte == 0).next()?;
    str::from_utf8(name).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::control_of;
    use crate::tcp::{Config, LinkProtection, TcpTransport};
    use crate::{Event, Introduction, LinkId, Transport};
    use harmonaize_abi::CongestionControl;
    use std::time::{Duration, Instant};

    fn end() -> TcpTransport {
        let protection = LinkProtection::None;
        TcpTransport::bind(Config { protection, ..Config::new("127.0.0.1:0".parse().unwrap()) }).unwrap()
    }

    /// A control that anybody may choose and that is not the host's own. Every kernel has `reno`, so there is one where
    /// the own is another.
    fn other(own: CongestionControl) -> CongestionControl {
        let allowed = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_allowed_congestion_control").unwrap();
        let mut names = allowed.split_whitespace().filter_map(|name| name.parse().ok());
        names.find(|name| *name != own).unwrap_or(own)
    }

    /// A link of two paths between both ends, not up yet.
    fn open(ends: &mut [TcpTransport; 2], name: u8) -> [LinkId; 2] {
        let addresses = [1, 0].map(|other: usize| ends[other].local_address());
        [0, 1].map(|at: usize| {
            let introduction = Introduction {
                name: [name; 16],
                secret: [2; 32],
                peer: addresses[at],
                initiate: at == 0,
                source_ports: vec![0, 0],
                over_tcp: false,
            };
            ends[at].open(introduction).unwrap()
        })
    }

    fn up(ends: &mut [TcpTransport; 2], links: usize) {
        let (mut up, deadline) = (0, Instant::now() + Duration::from_secs(20));
        while up < 2 * links {
            assert!(Instant::now() < deadline, "{up} ends of {links} links are up");
            for end in &mut *ends {
                end.progress(8, &mut |_, event| up += usize::from(matches!(event, Event::Up)));
            }
        }
    }

    /// What the kernel says of a link's connections, which all have the same.
    fn found(end: &mut TcpTransport, link: LinkId) -> CongestionControl {
        let link = end.links.get_mut(&link).unwrap();
        let mut all: Vec<_> = link.paths().map(|(_, path)| control_of(path.socket()).unwrap()).collect();
        all.dedup();
        assert_eq!(all.len(), 1, "{all:?}");
        all[0]
    }

    #[test]
    fn each_end_of_a_link_has_its_own_choice() {
        let mut ends = [end(), end()];
        let own = ends[0].host_congestion.0.unwrap();
        let other = other(own);
        let (dialled, taken_in) = (open(&mut ends, 1), open(&mut ends, 2));
        ends[0].set_congestion_control(dialled[0], Some(other));
        ends[1].set_congestion_control(taken_in[1], Some(other));
        up(&mut ends, 2);
        let found: Vec<_> = [dialled, taken_in]
            .iter()
            .flat_map(|links| [0, 1].map(|at: usize| found(&mut ends[at], links[at])))
            .collect();
        assert_eq!(found, [other, own, own, other]);
    }

    #[test]
    fn a_link_that_is_up_changes_and_returns() {
        let mut ends = [end(), end()];
        let own = ends[0].host_congestion.0.unwrap();
        let other = other(own);
        let link = open(&mut ends, 1)[0];
        up(&mut ends, 1);
        let found = [Some(other), None, Some(own)].map(|control| {
            ends[0].set_congestion_control(link, control);
            found(&mut ends[0], link)
        });
        assert_eq!(found, [other, own, own]);
        ends[0].set_congestion_control(LinkId(99), Some(other));
    }

    #[test]
    fn what_the_host_refuses_leaves_its_own_and_the_link_up() {
        let mut ends = [end(), end()];
        let own = ends[0].host_congestion.0.unwrap();
        let unknown = Some("no-such".parse().unwrap());
        let links = open(&mut ends, 1);
        for (end, link) in ends.iter_mut().zip(links) {
            end.set_congestion_control(link, unknown);
        }
        up(&mut ends, 1);
        assert_eq!([0, 1].map(|at: usize| found(&mut ends[at], links[at])), [own, own]);
        ends[0].set_congestion_control(links[0], Some(other(own)));
        ends[0].set_congestion_control(links[0], unknown);
        assert_eq!(found(&mut ends[0], links[0]), own, "not what it had before");
    }

    #[test]
    fn a_link_that_is_taken_over_keeps_its_choice() {
        let mut ends = [end(), end()];
        let own = ends[0].host_congestion.0.unwrap();
        let other = other(own);
        let link = open(&mut ends, 1)[0];
        ends[0].set_congestion_control(link, Some(other));
        up(&mut ends, 1);
        ends[0].freeze(true);
        let deadline = Instant::now() + Duration::from_secs(20);
        while !ends[0].is_frozen().unwrap() {
            assert!(Instant::now() < deadline, "the link comes to no rest");
            ends[0].progress(8, &mut |_, _| {});
        }
        let (links, descriptors) = ends[0].hand_over().unwrap();
        let mut successor = end();
        successor.take_over(&links, descriptors).unwrap();
        assert_eq!(found(&mut successor, link), other);
        successor.set_congestion_control(link, None);
        assert_eq!(found(&mut successor, link), own);
    }
}
