//! What goes wrong with frames to hosts and aggregators. Some are lost, some come twice, and others overtake some.

use super::Fabric;
use anyhow::Result;

/// Of a million frames that come to each host and each aggregator, each by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// How many are lost.
    pub lost: u32,
    /// How many come twice.
    pub twice: u32,
    /// How many take a way of their own, on which they are overtaken.
    pub late: u32,
}

impl Fabric {
    /// Has every host and aggregator see these faults from now on: what is sent together is cut before the wire. Programs for traffic control
    /// draw a number for each frame; a device that is down takes what is lost, and one with a slow queue what is late. To be called once.
    pub fn set_faults(&self, faults: Faults) -> Result<()> {
        for end in self.topology.ends() {
            let mut devices = vec!["link add lost type ifb".to_owned(), "link add late type ifb".to_owned()];
            devices.push("link set late up".to_owned());
            let mut filters =
                vec!["qdisc add dev late root tbf rate 100mbit burst 10kb latency 20ms".to_owned()];
            for (_, own, _) in self.layout.ends_of(end) {
                let device = &own.device;
                devices.push(format!("link set {device} gso_max_segs 1"));
                filters.push(format!("qdisc add dev {device} clsact"));
                let all = [
                    (faults.twice, format!("ingress mirror dev {device} continue")),
                    (faults.lost, "egress redirect dev lost".to_owned()),
                    (faults.late, "egress redirect dev late".to_owned()),
                ];
                for (priority, (chance, action)) in (1..).zip(all) {
                    filters.push(format!(
                        "filter add dev {device} ingress prio {priority} bpf bytecode \"{}\" action mirred {action}",
                        drawn(chance)
                    ));
                }
            }
            self.node(end).ip(&devices)?;
            self.node(end).tc(&filters)?;
        }
        Ok(())
    }
}

/// A program that so many of a million frames match. It loads a random number (SKF_AD_RANDOM of linux/filter.h). If that is above the
/// chance's part of all there is no match, else there is.
fn drawn(of_a_million: u32) -> String {
    let most = u64::from(of_a_million.min(1_000_000)) * u64::from(u32::MAX) / 1_000_000;
    format!("4,32 0 0 4294963256,37 1 0 {most},6 0 0 4294967295,6 0 0 0")
}
