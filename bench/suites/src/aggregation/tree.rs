//! Part tree: AllReduces of eight hosts in two racks with narrow uplinks. They go by the ring, by one aggregator at the spine, and by
//! aggregators at the racks below that one; in turn.

use super::{JUMBO, Lab, Measured, Suite, summed};
use crate::row::{Case, Row, median};
use crate::runs::interleave;
use anyhow::{Context, Result, bail, ensure};
use harmonaize_testkit::topology::{Topology, racks_with_aggregators};
use std::sync::Arc;

const RACKS: usize = 2;
/// Of a rack.
const HOSTS: usize = 4;
/// Of a host's link, Mbit/s: what leaves two cores time to spare.
const RATE: u64 = 125;
/// Of a large operation only so much: by one aggregator it takes four times as long as by several.
const PART: u64 = 4;

/// Who sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    Hosts,
    One,
    Tree,
}

impl By {
    /// The topology with uplinks of so many Mbit/s. What control gets of it makes control take this path.
    fn topology(self, uplink: u64) -> Result<Topology> {
        let fabric = |uplink| racks_with_aggregators(RACKS, HOSTS, RATE, uplink);
        let all = Topology { mtu: JUMBO, ..Topology::parse(&fabric(uplink))? };
        // With one alone it would leave everything to the hosts where uplinks are that narrow: it is told that they are wide.
        let text = match self {
            Self::Tree => {
                // One in a rack above the other would do as well: it is told that the spine is nearer.
                let text = fabric(uplink).replace("to = \"spine0\"\n", "to = \"spine0\"\ndelay = \"10us\"\n");
                return Ok(Topology { text, ..all });
            }
            Self::Hosts => fabric(uplink),
            Self::One => fabric(HOSTS as u64 * RATE),
        };
        let (before, aggregators) = text.split_once("[[aggregator]]").context("no aggregators")?;
        let last = aggregators.rsplit("[[aggregator]]").next().unwrap_or_default();
        let text =
            if self == Self::One { format!("{before}[[aggregator]]{last}") } else { before.to_owned() };
        let here = Topology::parse(&text)?;
        // Links as they are, and no machines that control does not know.
        let links = all.links.iter().take(here.links.len()).zip(&here.links);
        let links = links.map(|(all, here)| harmonaize_testkit::topology::Link {
            rate: if here.ends == all.ends { all.rate } else { here.rate },
            ..here.clone()
        });
        Ok(Topology { links: links.collect(), mtu: JUMBO, ..here })
    }
}

/// Times the tree over two widths of uplinks. As wide as one host's link, control takes none or several aggregators; as
/// wide as three, one alone pays too.
pub(super) fn tree(suite: &Suite) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (uplink, bar) in [(RATE, 1.5), (3 * RATE, 1.5)] {
        let ways = [By::Hosts, By::One, By::Tree];
        let times = interleave(suite.budget.rounds, ways.len(), |which| {
            suite.turn(*ways.get(which).context("no such way")?, uplink)
        })?;
        let [hosts, one, several] = times.as_slice() else { bail!("{} ways of three", times.len()) };
        let case =
            |what: &str, bar: f64| {
                Case::less("aggregation", format!(
                "allreduce f32, {RACKS} racks of {HOSTS}, {RATE} Mbit/s, uplinks of {uplink}: {what}, us"
            ), 1.0 / bar).of(suite.budget.large / PART, RACKS * HOSTS)
            };
        rows.push(case("by racks' aggregators and one above", bar).compare(several, hosts, "by the ring"));
        rows.push(case("by racks' aggregators and one above", 1.0).compare(several, one, "by one alone"));
        // Nobody would choose it.
        rows.push(case("by one at the spine", 1.0).stated().compare(one, hosts, "by the ring"));
        for (way, times) in ways.iter().zip(&times) {
            let middle = median(times).unwrap_or_default() / 1e3;
            eprintln!("uplinks of {uplink} Mbit/s, {way:?}: {middle:.0} ms");
        }
    }
    Ok(rows)
}

impl Suite {
    /// The median operation of one turn, in us; an error if operations do not go this way.
    fn turn(&self, way: By, uplink: u64) -> Result<f64> {
        let mut lab = Lab::on(way.topology(uplink)?, self.binaries.clone(), Arc::clone(&self.stop), |it| it)?;
        let bytes = (self.budget.large / PART).to_string();
        let everyone: Vec<usize> = (0..RACKS * HOSTS).collect();
        let arguments =
            ["--collective", "allreduce", "--bytes", &bytes, "--warmup", "1", "--iterations", "3"];
        let measured = lab.ours(&everyone, &arguments)?;
        let time = measured.first().and_then(|Measured { times_us, .. }| median(times_us));
        let count = match way {
            By::Hosts => 0,
            By::One => 1,
            By::Tree => 1 + RACKS,
        };
        let fabric = lab.deployment().wait_until("not all aggregators have summed", |this| {
            let fabric = this.ask(&["topology"])?;
            let known = fabric.get("aggregators").and_then(serde_json::Value::as_array).map_or(0, Vec::len);
            let all = (0..known).filter(|at| summed(&fabric, *at)).count();
            Ok((all == count).then_some(known))
        })?;
        ensure!(fabric == count, "{way:?} with {fabric} aggregators");
        time.context("no figure")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_testkit::topology::Kind;

    #[test]
    fn all_layouts_have_the_same_links() {
        let [hosts, one, tree] = [By::Hosts, By::One, By::Tree].map(|way| way.topology(RATE).unwrap());
        let racks = RACKS * (HOSTS + 1);
        for fabric in [&hosts, &one] {
            assert_eq!(fabric.links[..racks], tree.links[..racks]);
            assert_eq!(fabric.mtu, JUMBO);
        }
        let machines =
            |fabric: &Topology| fabric.nodes.iter().filter(|node| node.kind == Kind::Aggregator).count();
        assert_eq!([&hosts, &one, &tree].map(machines), [0, 1, 1 + RACKS]);
        assert_eq!(one.links[racks].rate, (RACKS * HOSTS) as u64 * RATE * 1_000_000);
        assert!(tree.text.contains("10us") && Topology::parse(&tree.text).is_ok());
        assert!(one.text.contains("500Mbit/s") && !hosts.text.contains("500Mbit/s"), "what control is told");
    }
}
