//! Which algorithm operations take, by collective and size: as is predicted to be the fastest, where no operator decided.

use crate::algorithm::{GroupCosts, RackCosts};
use crate::ring_order::Racks;
use harmonaize_abi::Collective;
use harmonaize_plan::{Algorithm, AlgorithmRange, AlgorithmTable};
use harmonaize_units::{Bytes, Nanos};
use std::fmt;

/// A size that stands for all operations larger than any bounded range. Where a range begins above half of it, twice that
/// beginning stands instead.
const LARGE: u64 = 16 << 20;

/// An operator's choice for operations of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AlgorithmOverride {
    /// Which collective.
    pub collective: Collective,
    /// The smallest that it is for.
    pub from: Bytes,
    /// The largest that it is for.
    pub to: Bytes,
    /// How they go.
    pub algorithm: Algorithm,
}

impl AlgorithmOverride {
    /// Most of them for a collective, for one tenant and for everybody each. A table has room for so many ranges of sizes.
    pub const MAX: usize = 4;

    /// Whether contributions are still added in one order, whatever the plan's is.
    pub fn keeps_order(&self) -> bool {
        !sums(self.collective) || matches!(self.algorithm, Algorithm::OneShot | Algorithm::TwoShot)
    }

    fn covers(&self, collective: Collective, bytes: Bytes) -> bool {
        self.collective == collective && (self.from..=self.to).contains(&bytes)
    }
}

/// Which sizes take which algorithm, and why.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AlgorithmChoice {
    /// By collective and size.
    pub table: AlgorithmTable,
    /// What an operator decided of it.
    pub overrides: Vec<AlgorithmOverride>,
    /// What times are predicted from; none where nothing was.
    pub costs: Option<GroupCosts>,
    /// Why, where no operator decided.
    pub reason: AlgorithmReason,
    /// The racks of the order; none where no operation goes by them.
    pub racks: Racks,
}

/// Why operations go as they do, where no operator decided.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum AlgorithmReason {
    /// Nothing was decided.
    #[default]
    Undecided,
    /// There is one host.
    OneHost,
    /// An epoch of an earlier control has it.
    Recovered,
    /// Its tenant wants contributions added in one order.
    Ordered,
    /// It is predicted to be the fastest, by these costs.
    Fastest(GroupCosts),
}

impl fmt::Display for AlgorithmReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Self::Undecided => "",
            Self::OneHost => "nothing crosses a wire",
            Self::Recovered => "as before control restarted",
            Self::Ordered => "contributions are added in one order: its tenant wants that",
            Self::Fastest(costs) => {
                let GroupCosts {
                    delay,
                    hop_delay: hop,
                    direct_rate: direct,
                    ring_rate: ring,
                    host,
                    racks,
                    ..
                } = costs;
                let (message, added) = (Nanos((host.message * 1e9) as u64), host.reduced_byte * 1e9);
                write!(
                    f,
                    "{delay} one way between the farthest, {hop} along the ring; {direct} to all at once, {ring} along the ring; {message} a message, {added:.3} ns a byte that is added"
                )?;
                return match racks {
                    Some(RackCosts { racks, across, .. }) => {
                        write!(f, "; {racks} racks, {across} a host between them")
                    }
                    None => Ok(()),
                };
            }
        };
        f.write_str(text)
    }
}

/// How operations of a range of sizes go.
#[derive(Clone, Debug, PartialEq)]
pub struct AlgorithmStatus {
    /// Which collective.
    pub collective: Collective,
    /// The smallest.
    pub from: Bytes,
    /// The largest; none where there is no bound.
    pub to: Option<Bytes>,
    /// How they go.
    pub algorithm: Algorithm,
    /// A size among them, and what each algorithm that the collective can take there is predicted to take.
    pub predicted: Option<(Bytes, Vec<(Algorithm, Nanos)>)>,
    /// Whether an operator chose it by collective and size.
    pub overridden: bool,
}

impl AlgorithmChoice {
    /// The ring for all sizes, for a reason.
    pub fn ring(reason: AlgorithmReason) -> Self {
        Self { reason, ..Self::default() }
    }

    /// Takes the algorithm of the first of an operator's choices for a size. Without one it takes the one that is predicted to be
    /// the fastest, near the sizes of `before`. `ordered`: up to which size contributions are to be added in one order, which
    /// only direct exchanges do.
    pub fn new(
        costs: GroupCosts,
        before: &AlgorithmTable,
        overrides: &[AlgorithmOverride],
        ordered: Option<Bytes>,
    ) -> Self {
        let (chosen, reason) = match ordered {
            Some(most) => (in_order(&costs.choose(before), most.0), AlgorithmReason::Ordered),
            None => (costs.choose(before), AlgorithmReason::Fastest(costs)),
        };
        let kept = |one: &&AlgorithmOverride| ordered.is_none() || one.keeps_order();
        let overrides: Vec<AlgorithmOverride> = overrides.iter().filter(kept).copied().collect();
        let table = overlay(&chosen, &overrides);
        Self { table, overrides, costs: Some(costs), reason, racks: Racks::default() }
    }

    /// The same with the racks of the order, if any operation goes by them.
    pub fn with_racks(self, racks: Racks) -> Self {
        let goes = self.table.ranges().any(|range| range.algorithm == Algorithm::Hierarchical);
        Self { racks: if goes { racks } else { Racks::default() }, ..self }
    }

    /// How operations go, collective after collective, each from the smallest on.
    pub fn status(&self) -> Vec<AlgorithmStatus> {
        let mut all = Vec::new();
        for &collective in Collective::ALL {
            let mut from = 0;
            let ranges = self.table.ranges().filter(|range| range.collective == collective);
            for up_to in ranges.map(|range| range.up_to).chain([u64::MAX]) {
                if up_to < from || from > 0 && !collective.has_data() {
                    break;
                }
                all.push(self.range(collective, from, up_to));
                let Some(next) = up_to.checked_add(1) else { break };
                from = next;
            }
        }
        all
    }

    fn range(&self, collective: Collective, from: u64, up_to: u64) -> AlgorithmStatus {
        let bounded = collective.has_data() && up_to < u64::MAX;
        let large = if collective.has_data() { from.saturating_mul(2).max(LARGE) } else { 0 };
        let at = Bytes(if bounded { up_to } else { large });
        let predict = |costs: &GroupCosts| {
            let by_racks = costs.racks.is_some();
            let all = Algorithm::of(collective.traits().pattern).iter();
            let all = all.filter(|algorithm| by_racks || **algorithm != Algorithm::Hierarchical);
            let time = |algorithm| Nanos((costs.time(collective, algorithm, at) * 1e9) as u64);
            (at, all.map(|algorithm| (*algorithm, time(*algorithm))).collect())
        };
        AlgorithmStatus {
            collective,
            from: Bytes(from),
            to: bounded.then_some(Bytes(up_to)),
            algorithm: self.table.choose(collective, from),
            predicted: self.costs.as_ref().map(predict),
            overridden: self.overrides.iter().any(|one| one.covers(collective, Bytes(from))),
        }
    }
}

/// Whether the order in which contributions are added follows from the algorithm.
fn sums(collective: Collective) -> bool {
    matches!(collective, Collective::AllReduce | Collective::ReduceScatter)
}

/// The same, but AllReduces and ReduceScatters of up to so many bytes by direct exchange.
fn in_order(table: &AlgorithmTable, most: u64) -> AlgorithmTable {
    let others = table.ranges().filter(|range| !sums(range.collective));
    let first = table.ranges().find(|range| range.collective == Collective::AllReduce);
    let one_shot = first.filter(|range| range.algorithm == Algorithm::OneShot).map_or(0, |range| range.up_to);
    let direct = AlgorithmTable::direct(one_shot, most);
    let ordered = direct.ranges().filter(|range| sums(range.collective));
    AlgorithmTable::new(others.chain(ordered)).unwrap_or(direct)
}

/// The same, but for what an operator decided.
fn overlay(table: &AlgorithmTable, overrides: &[AlgorithmOverride]) -> AlgorithmTable {
    let mut ranges: Vec<AlgorithmRange> = Vec::new();
    for &collective in Collective::ALL {
        let own = || overrides.iter().filter(move |one| one.collective == collective);
        let decided = own().flat_map(|one| [one.from.0.checked_sub(1), Some(one.to.0)]).flatten();
        let chosen = table.ranges().filter(|range| range.collective == collective);
        let mut ends: Vec<u64> = chosen.map(|range| range.up_to).chain(decided).collect();
        ends.sort_unstable();
        ends.dedup();
        for up_to in ends {
            let decided = own().find(|one| one.covers(collective, Bytes(up_to))).map(|one| one.algorithm);
            let algorithm = decided.unwrap_or_else(|| table.choose(collective, up_to));
            ranges.push(AlgorithmRange { collective, up_to, algorithm });
        }
    }
    AlgorithmTable::new(ranges).unwrap_or(*table)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::HostCosts;
    use harmonaize_units::Rate;

    fn costs() -> GroupCosts {
        GroupCosts {
            hosts: 4,
            delay: Nanos(50_000),
            hop_delay: Nanos(50_000),
            direct_rate: Rate(1_000_000_000),
            ring_rate: Rate(1_000_000_000),
            chunk: Bytes(64 << 10),
            straight: true,
            host: HostCosts::default(),
            racks: None,
        }
    }

    fn choice(overrides: &[AlgorithmOverride], ordered: Option<u64>) -> AlgorithmChoice {
        AlgorithmChoice::new(costs(), &AlgorithmTable::RING, overrides, ordered.map(Bytes))
    }

    #[test]
    fn racks_are_kept_where_an_operation_goes_by_them() {
        let racks = |algorithm| {
            let one = AlgorithmOverride {
                collective: Collective::AllReduce,
                from: Bytes(0),
                to: Bytes(1 << 30),
                algorithm,
            };
            let choice = AlgorithmChoice::new(costs(), &AlgorithmTable::RING, &[one], None);
            choice.with_racks(Racks { sizes: vec![1, 3], from: 2 }).racks.sizes
        };
        assert_eq!(racks(Algorithm::Hierarchical), [1, 3]);
        assert!(racks(Algorithm::Ring).is_empty());
    }

    #[test]
    fn an_order_of_contributions_takes_direct_exchanges() {
        let free = choice(&[], None);
        assert_eq!(free.reason, AlgorithmReason::Fastest(costs()));
        assert_eq!(
            free.reason.to_string(),
            "50us one way between the farthest, 50us along the ring; 1Gbit/s to all at once, 1Gbit/s along the ring; 10us a message, 0.000 ns a byte that is added"
        );
        assert_eq!(free.table, costs().choose(&AlgorithmTable::RING));
        let ring = AlgorithmOverride {
            collective: Collective::AllReduce,
            from: Bytes(0),
            to: Bytes(u64::MAX),
            algorithm: Algorithm::Ring,
        };
        let ordered = choice(&[ring], Some(1 << 30));
        assert_eq!(ordered.reason, AlgorithmReason::Ordered);
        let ordered = ordered.table;
        assert_eq!(ordered.choose(Collective::AllReduce, 1 << 30), Algorithm::TwoShot);
        assert_eq!(ordered.choose(Collective::ReduceScatter, 1 << 30), Algorithm::OneShot);
        for bytes in [0, 100, 1000, 10_000] {
            let algorithm = ordered.choose(Collective::AllReduce, bytes);
            assert!(matches!(algorithm, Algorithm::OneShot | Algorithm::TwoShot), "{bytes}: {algorithm}");
        }
        let broadcast = |table: &AlgorithmTable| table.choose(Collective::Broadcast, 1000);
        assert_eq!(broadcast(&ordered), broadcast(&free.table));
    }

    #[test]
    fn the_first_override_that_covers_a_size_decides() {
        let over = |to, algorithm| AlgorithmOverride {
            collective: Collective::AllReduce,
            from: Bytes(0),
            to: Bytes(to),
            algorithm,
        };
        let both = [over(1000, Algorithm::Ring), over(u64::MAX, Algorithm::TwoShot)];
        let table = choice(&both, None).table;
        let found = [0, 1000, 1001, 1 << 40].map(|bytes| table.choose(Collective::AllReduce, bytes));
        assert_eq!(found, [Algorithm::Ring, Algorithm::Ring, Algorithm::TwoShot, Algorithm::TwoShot]);
    }

    #[test]
    fn an_override_holds_from_its_first_byte_to_its_last() {
        let (collective, algorithm) = (Collective::AllReduce, Algorithm::RecursiveHalving);
        let one = AlgorithmOverride { collective, from: Bytes(1000), to: Bytes(2000), algorithm };
        {
            let (before, after) = (choice(&[], None).table, choice(&[one], None));
            for bytes in [0, 1, 999, 1000, 1500, 2000, 2001, 30_000, u64::MAX] {
                let decided = (1000..=2000).contains(&bytes);
                let expected = if decided { algorithm } else { before.choose(collective, bytes) };
                assert_eq!(after.table.choose(collective, bytes), expected, "{bytes}");
            }
            assert_eq!(after.table.choose(Collective::Barrier, 0), before.choose(Collective::Barrier, 0));
            let status = after.status();
            let decided: Vec<_> = status.iter().filter(|range| range.overridden).collect();
            assert!(!decided.is_empty() && decided.iter().all(|range| range.algorithm == algorithm));
            let (at, times) = decided[0].predicted.clone().unwrap();
            assert_eq!((at, times.len()), (Bytes(2000), 5));
        }
    }

    #[test]
    fn every_size_has_its_line() {
        let status = choice(&[], None).status();
        for collective in Collective::ALL {
            let lines: Vec<_> = status.iter().filter(|line| line.collective == *collective).collect();
            assert_eq!((lines[0].from, lines[lines.len() - 1].to), (Bytes(0), None), "{collective}");
            for two in lines.windows(2) {
                assert_eq!(two[0].to.map(|to| to.0 + 1), Some(two[1].from.0), "{collective}");
            }
        }
    }
}
