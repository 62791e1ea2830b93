//! What operations find while they run. A job with a rhythm is quiet most of the time: links may carry what it sends on average, and
//! its operations still take many times as long as alone.

use super::model::{LinkIndex, Ring};
use super::search::Search;
use super::shares::{FairFlow, Shares};
use std::collections::{BTreeMap, BTreeSet};

/// How many times as long each job's operations take as where only its hosts' own links limit. `each` is what was predicted of shares
/// and slowdowns on average. That is the same for who always communicates. Who has a rhythm is thought to ask for all that its hosts
/// can send, beside others that have what they have on average. Time: for each such job, the links of those that meet it.
pub(super) fn slowdowns(search: &Search<'_, '_>, each: &[(f64, f64)]) -> Vec<f64> {
    let model = &*search.model;
    let mut found: Vec<f64> = each.iter().map(|(_, slowdown)| *slowdown).collect();
    let lines: Vec<f64> = model.jobs().iter().map(|job| model.line_rate(job)).collect();
    let bursts = |index: &usize| {
        let (line, demand) = (lines.get(*index), model.demand.get(*index));
        let has = each.get(*index).is_some_and(|(rate, _)| *rate >= 1.0);
        has && line.zip(demand).is_some_and(|(line, demand)| *demand < line * (1.0 - 1e-9))
    };
    let bursts: Vec<usize> = (0..each.len()).filter(bursts).collect();
    if bursts.is_empty() {
        return found;
    }
    let usages: Vec<Vec<(LinkIndex, f64)>> = search.rings.iter().map(Ring::usage).collect();
    let mut crossing: BTreeMap<LinkIndex, Vec<usize>> = BTreeMap::new();
    for (index, usage) in usages.iter().enumerate() {
        usage.iter().for_each(|(link, _)| crossing.entry(*link).or_default().push(index));
    }
    let flow = |index: usize, demand: f64| {
        let (job, usage) = (model.jobs().get(index)?, usages.get(index)?);
        let (weight, least) = (f64::from(job.weight.max(1)), job.guaranteed.0 as f64);
        Some(FairFlow { usage, weight, demand, guaranteed: least })
    };
    let rate = |index: usize| each.get(index).map_or(0.0, |(rate, _)| *rate);
    let mut shares = Shares::default();
    for index in bursts {
        let own = usages.get(index).into_iter().flatten();
        let beside: BTreeSet<usize> =
            own.filter_map(|(link, _)| crossing.get(link)).flatten().copied().collect();
        let line = lines.get(index).copied().unwrap_or(0.0);
        let others = beside.into_iter().filter(|other| *other != index);
        let flows = flow(index, line).into_iter().chain(others.filter_map(|other| flow(other, rate(other))));
        let flows: Vec<FairFlow<'_>> = flows.collect();
        let burst = shares.fill(&model.capacity, &flows).first().copied().unwrap_or(0.0);
        if let Some(found) = found.get_mut(index) {
            *found = (line / burst.max(rate(index))).max(1.0);
        }
    }
    found
}
