//! Which links explain the congestion reports on paths: the fewest, found greedily. This is as in boolean tomography (Duffield,
//! "Network tomography of binary network performance characteristics", 2006).

use harmonaize_topology::{DirectedLink, Path};
use std::collections::{BTreeMap, BTreeSet};

/// A congested path.
pub(super) struct CongestedPath<'a> {
    pub(super) path: &'a Path,
    /// Whether it is among those that are counted as crossing their links.
    pub(super) active: bool,
}

/// What speaks against a link.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Attribution {
    /// Which of the paths it explains.
    pub(super) paths: BTreeSet<usize>,
    /// How many links explain the same as well.
    pub(super) equivalent_links: u32,
}

/// The links to blame. `crossing` says how many own connections cross a link, congested or not; `trust` how much sooner than
/// others it is believed to be congested. Time: the paths' links times the links blamed.
pub(super) fn attribute(
    paths: &[CongestedPath<'_>],
    crossing: &dyn Fn(DirectedLink) -> u32,
    trust: &dyn Fn(DirectedLink) -> f64,
) -> BTreeMap<DirectedLink, Attribution> {
    let mut over: BTreeMap<DirectedLink, BTreeSet<usize>> = BTreeMap::new();
    let mut clear: BTreeMap<DirectedLink, u32> = BTreeMap::new();
    for (index, suspicion) in paths.iter().enumerate() {
        for link in suspicion.path.links() {
            over.entry(*link).or_default().insert(index);
            let clear = clear.entry(*link).or_insert_with(|| crossing(*link));
            *clear = clear.saturating_sub(u32::from(suspicion.active));
        }
    }
    let mut blamed: BTreeMap<DirectedLink, Attribution> = BTreeMap::new();
    let mut open: BTreeSet<usize> = (0..paths.len()).collect();
    while !open.is_empty() {
        let merits: Vec<(DirectedLink, f64)> = over
            .iter()
            .map(|(link, reports)| {
                let explains = reports.intersection(&open).count() as f64;
                let against = f64::from(clear.get(link).copied().unwrap_or(0));
                (*link, trust(*link) * explains * explains / (reports.len() as f64 + against))
            })
            .collect();
        let best = merits.iter().map(|(_, merit)| *merit).fold(0.0, f64::max);
        if best <= 0.0 {
            break;
        }
        let alike: Vec<DirectedLink> =
            merits.iter().filter(|(_, merit)| *merit >= best * (1.0 - 1e-9)).map(|(link, _)| *link).collect();
        for link in &alike {
            let Some(reports) = over.remove(link) else { continue };
            blamed.insert(*link, Attribution { paths: reports, equivalent_links: alike.len() as u32 });
        }
        for index in alike.iter().filter_map(|link| blamed.get(link)).flat_map(|blame| &blame.paths) {
            open.remove(index);
        }
    }
    blamed
}
