//! Proves a plan before it leaves, from the request alone: nothing of how it was found.

use super::model::{is_order, joins};
use super::{Assignment, CheckError, Job, Plan, Request, Routes};
use crate::conditions::LinkUse;
use harmonaize_topology::HostId;
use harmonaize_topology::{DirectedLink, Path, PathFinder};
use harmonaize_units::Rate;
use std::collections::BTreeMap;

/// Proves a plan: orders are permutations, paths lead where they should and avoid what passes nothing, shares fit.
///
/// # Errors
/// The first thing that is wrong.
pub fn check(request: &Request<'_>, plan: &Plan) -> Result<(), CheckError> {
    let (jobs, found) = (request.jobs.len(), plan.assignments.len());
    let pairs = || request.jobs.iter().zip(&plan.assignments);
    if jobs != found || pairs().any(|(job, assignment)| job.communicator != assignment.communicator) {
        return Err(CheckError::Jobs { jobs, found });
    }
    let mut paths = PathFinder::new(request.topology);
    let mut load: BTreeMap<DirectedLink, f64> = BTreeMap::new();
    for (job, assignment) in pairs() {
        check_one(request, &mut paths, job, assignment)?;
        let share = assignment.share.0 as f64;
        for hop in &assignment.edges {
            let part = share / hop.paths.len().max(1) as f64;
            hop.paths.iter().flat_map(Path::links).for_each(|link| *load.entry(*link).or_default() += part);
        }
    }
    for (link, shares) in load {
        let available = request.conditions.available(link);
        if shares > available.0 as f64 * 1.000_001 + 1000.0 {
            let link = request.topology.link_name(link);
            return Err(CheckError::Overcommitted { link, shares: Rate(shares as u64), available });
        }
    }
    Ok(())
}

fn check_one(
    request: &Request<'_>,
    path_finder: &mut PathFinder<'_>,
    job: &Job,
    assignment: &Assignment,
) -> Result<(), CheckError> {
    let communicator = job.communicator;
    if !is_order(&assignment.order, job.hosts.len()) {
        return Err(CheckError::Order(communicator));
    }
    let count = if job.hosts.len() < 2 { 0 } else { job.hosts.len() };
    let mirrored = match assignment.edges.as_slice() {
        [there, back] => there.paths.iter().map(Path::reversed).eq(back.paths.iter().cloned()),
        _ => true,
    };
    if assignment.edges.len() != count || !mirrored {
        return Err(CheckError::Edges(communicator));
    }
    let host = |at: &u32| job.hosts.get(*at as usize).copied().unwrap_or(HostId(usize::MAX));
    let next = assignment.order.iter().cycle().skip(1);
    for (hop, ((from, to), paths)) in assignment.order.iter().zip(next).zip(&assignment.edges).enumerate() {
        let (from, to) = (host(from), host(to));
        if !paths.paths.iter().all(|path| joins(request, path, from, to)) {
            return Err(CheckError::Path { communicator, edge: hop });
        }
        let worst = paths.paths.iter().map(|path| (request.conditions.path(path), path)).max();
        if let Some((usable, path)) =
            worst.filter(|(usable, _)| assignment.changed && *usable > LinkUse::Open)
        {
            let other = match request.routes {
                Routes::All => path_finder.between(from, to),
                Routes::Listed(known) => known.get(&(from, to)).cloned().unwrap_or_default(),
                Routes::Hashed => Vec::new(),
            };
            let better = |other: &Path| {
                // Of two participants one link carries both path_finder, so both must be better.
                let back =
                    if count == 2 { request.conditions.path(&other.reversed()) } else { LinkUse::Open };
                request.conditions.path(other).max(back) < usable
            };
            if other.iter().any(better) {
                let at = path.links().iter().find(|link| request.conditions.usable(**link) == usable);
                let link = at.map_or_else(String::new, |link| request.topology.link_name(*link));
                return Err(CheckError::Forbidden { communicator, edge: hop, link });
            }
        }
    }
    Ok(())
}
