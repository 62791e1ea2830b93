//! Which algorithm operations take, by their size: one-shot, two-shot, else the ring.

use crate::algorithm::{DirectThresholds, GroupCosts};
use harmonaize_units::{Bytes, Nanos};

/// How a tenant's small operations go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AlgorithmPolicy {
    /// As is predicted to be the fastest.
    #[default]
    Chosen,
    /// Along the ring, whatever their size.
    Never,
    /// One-shot up to 1 MiB.
    OneShot,
    /// Two-shot up to 1 MiB.
    TwoShot,
}

/// Up to which size an operator's choice holds.
const FORCED: Bytes = Bytes(1 << 20);

/// Up to which sizes operations take which algorithm, and why.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AlgorithmChoice {
    /// The largest operations of one-shot and of two-shot.
    pub sizes: DirectThresholds,
    /// Why, as text.
    pub reason: String,
}

impl AlgorithmChoice {
    /// The ring for all sizes, for a reason.
    pub fn ring(reason: &str) -> Self {
        Self { sizes: DirectThresholds::default(), reason: reason.to_owned() }
    }

    /// What an operator decided; none where it is to be chosen.
    pub fn forced(policy: AlgorithmPolicy) -> Option<Self> {
        let (one_shot, two_shot) = match policy {
            AlgorithmPolicy::Chosen => return None,
            AlgorithmPolicy::Never => (Bytes(0), Bytes(0)),
            AlgorithmPolicy::OneShot => (FORCED, Bytes(0)),
            AlgorithmPolicy::TwoShot => (Bytes(0), FORCED),
        };
        Some(Self { sizes: DirectThresholds { one_shot, two_shot }, reason: "an operator chose".to_owned() })
    }

    /// What is predicted to be the fastest, near the sizes `before`. `ordered`: up to which size contributions are to be added in one
    /// order, which the ring does not.
    pub fn fastest(reach: &GroupCosts, before: DirectThresholds, ordered: Option<Bytes>) -> Self {
        let sizes = reach.thresholds(before);
        match ordered {
            Some(two_shot) => Self {
                sizes: DirectThresholds { two_shot, ..sizes },
                reason: "contributions are added in one order: its tenant wants that".to_owned(),
            },
            None => Self { sizes, reason: prediction(reach, sizes) },
        }
    }
}

fn prediction(reach: &GroupCosts, sizes: DirectThresholds) -> String {
    let GroupCosts { delay, hop_delay: hop, direct_rate: direct, ring_rate: ring, .. } = reach;
    let time = |seconds: f64| Nanos((seconds * 1e9) as u64 / 1000 * 1000);
    let (one, two) = (sizes.one_shot, sizes.two_shot);
    format!(
        "{delay} one way between the farthest, {hop} along the ring; {direct} to all at once, {ring} along the ring; predicted for {one}: {} in one shot, {} in two, {} by the ring; for {two}: {} in two, {} by the ring",
        time(reach.one_shot(one)),
        time(reach.two_shot(one)),
        time(reach.ring(one)),
        time(reach.two_shot(two)),
        time(reach.ring(two)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_units::Rate;

    #[test]
    fn an_order_of_contributions_takes_two_shots() {
        let reach = GroupCosts {
            hosts: 4,
            delay: Nanos(50_000),
            hop_delay: Nanos(50_000),
            direct_rate: Rate(1_000_000_000),
            ring_rate: Rate(1_000_000_000),
            chunk: Bytes(64 << 10),
        };
        let free = AlgorithmChoice::fastest(&reach, DirectThresholds::default(), None);
        assert!(
            free.reason.contains("along the ring")
                && free.sizes == reach.thresholds(DirectThresholds::default())
        );
        let ordered = AlgorithmChoice::fastest(&reach, DirectThresholds::default(), Some(Bytes(1 << 30)));
        assert_eq!((ordered.sizes.one_shot, ordered.sizes.two_shot), (free.sizes.one_shot, Bytes(1 << 30)));
    }

    #[test]
    fn an_operator_decides_first() {
        assert_eq!(AlgorithmChoice::forced(AlgorithmPolicy::Chosen), None);
        let forced = |policy| AlgorithmChoice::forced(policy).unwrap().sizes;
        assert_eq!(forced(AlgorithmPolicy::Never), DirectThresholds::default());
        assert_eq!(forced(AlgorithmPolicy::OneShot).one_shot, FORCED);
        assert_eq!(
            forced(AlgorithmPolicy::TwoShot),
            DirectThresholds { one_shot: Bytes(0), two_shot: FORCED }
        );
    }
}
