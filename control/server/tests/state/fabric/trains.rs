//! Trains over the fabric: what strangers and our own connections leave of them.

use super::{CongestionCause, CongestionLevel, DirectedLink, Fabric, HostId, Path, SwitchId, v1};
use rand::RngExt;

/// Links' rate, and what a connection of ours sends while it sends, in bits a second.
const CAPACITY: f64 = 1e9;
const OWN: f64 = 8e8;

impl Fabric {
    /// Agents say, once, that others starve a communicator's connections over a link.
    pub(crate) fn report_starved(&mut self, id: u64, link: DirectedLink) {
        for host in 0..self.agents.len() {
            let Some(session) = self.agents[host].session else { continue };
            let sends = self.sends(host).into_iter();
            for (id, epoch, peer, port, _) in
                sends.filter(|(of, .., path)| *of == id && path.links().contains(&link))
            {
                let congestion = v1::Congestion {
                    level: CongestionLevel::Severe.into(),
                    cause: CongestionCause::CrossTraffic.into(),
                    own_bps: 500_000_000,
                    capacity_bps: 1_000_000_000,
                    starved: true,
                    ..v1::Congestion::default()
                };
                self.report(session, (id, epoch, peer, port), congestion);
            }
        }
    }

    /// The path that a probe is to take.
    pub(super) fn probed_path(&self, host: usize, question: &v1::ProbePath) -> Option<Path> {
        let to = self.host_at(&question.address);
        let switch = |hop: &v1::Hop| self.topology.switch_at(hop.addresses[0].parse().unwrap()).unwrap();
        let via: Vec<SwitchId> = question.via.iter().map(switch).collect();
        let mut paths = self.topology.equal_cost_paths(HostId(host), to).into_iter();
        paths.find(|path| self.topology.switches_of(path) == via)
    }

    pub(super) fn probe(&mut self, host: usize, asked: &v1::ProbePath) -> v1::PathProbed {
        let path = self.probed_path(host, asked).expect("a path that exists");
        let dead = path.links().iter().any(|link| self.dead.contains(&link.link));
        let (question, packets_sent) = (asked.request, 46);
        if dead {
            return v1::PathProbed { request: question, unreachable: true, ..v1::PathProbed::default() };
        }
        let worst = path.links().iter().map(|link| self.cross_traffic_on(*link)).max().unwrap_or(0) as f64;
        let noise = 1.0 - self.rng.random_range(0.0..0.05);
        let lie = if self.agents[host].liar { 0.3 } else { 1.0 };
        let came = CAPACITY * CAPACITY / (CAPACITY + worst) * noise * lie;
        let mut best = (0.0, 0.0);
        for _ in 0..asked.trains.max(1) {
            let (received, beside) = self.shared(host, &path, came);
            if received > best.0 {
                best = (received, beside);
            }
            if received >= asked.enough_bps as f64 || received <= asked.spread_bps as f64 {
                break;
            }
        }
        v1::PathProbed {
            request: question,
            received_bps: best.0 as u64,
            sent_bps: 1_000_000_000,
            packets_sent,
            packets_received: packets_sent,
            source_port: 50000,
            cross_traffic_bps: Some(best.1 as u64),
            ..v1::PathProbed::default()
        }
    }

    /// What is left of a train that comes to its last link, and what passes beside it. `came` is the train's rate. Connections of other
    /// hosts' that share that link send now and then.
    fn shared(&mut self, host: usize, path: &Path, came: f64) -> (f64, f64) {
        if self.busy == 0.0 {
            return (came, 0.0);
        }
        let others: Vec<Path> = (0..self.agents.len())
            .filter(|other| *other != host)
            .flat_map(|other| self.sends(other))
            .map(|(.., other)| other)
            .collect();
        let sharing = others.iter().filter(|other| other.links().last() == path.links().last()).count();
        let sending = (0..sharing).filter(|_| self.rng.random_bool(self.busy)).count();
        let own = if sending == 0 { 0.0 } else { OWN };
        let scale = (CAPACITY / (came + own)).min(1.0);
        (came * scale, own * scale)
    }
}
