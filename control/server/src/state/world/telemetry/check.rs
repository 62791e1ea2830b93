//! Whether a report may be believed to be well made. Nothing of one that is not has an effect.

use crate::state::job::communicator::Member;
use crate::state::output::SessionId;
use harmonaize_api::v1::{
    CompressedOperation, Congestion, CongestionCause, CongestionLevel, Link, Operation, Straggler,
    StragglerCause, TelemetryReport,
};

const MOST_LINKS: usize = 64;
const MOST_CHANGES: usize = 64;
const MOST_STRAGGLERS: usize = 64;
const MOST_OPERATIONS: usize = 256;
const MOST_OPEN: usize = 64;
/// Of one operation.
const MOST_RANKS: usize = 1024;
const MOST_NAME: usize = 64;

/// What can be told from the report alone, and the number of the one before.
pub(crate) fn report(report: &TelemetryReport, last: u64) -> Result<(), String> {
    if report.sequence <= last {
        return Err(format!("report {} after report {last}", report.sequence));
    }
    few("links", report.links.len(), MOST_LINKS)?;
    few("changes", report.changes.len(), MOST_CHANGES)?;
    few("stragglers", report.stragglers.len(), MOST_STRAGGLERS)?;
    few("operations", report.operations.len(), MOST_OPERATIONS)?;
    few("open operations", report.open.len(), MOST_OPEN)?;
    report.links.iter().try_for_each(link)?;
    report.changes.iter().try_for_each(congestion)?;
    report.stragglers.iter().try_for_each(straggler)?;
    report.open.iter().try_for_each(|one| operation(one, true))?;
    report.operations.iter().try_for_each(|one| operation(one, false))
}

fn few(what: &str, count: usize, most: usize) -> Result<(), String> {
    if count > most {
        return Err(format!("{count} {what}; at most {most}"));
    }
    Ok(())
}

/// A name goes to terminals and logs.
fn name(what: &str, text: &str) -> Result<(), String> {
    if text.len() > MOST_NAME || text.chars().any(char::is_control) {
        return Err(format!(
            "a {what} that is no name: at most {MOST_NAME} bytes without control characters"
        ));
    }
    Ok(())
}

fn link(link: &Link) -> Result<(), String> {
    name("link", &link.interface)?;
    link.congestion.as_ref().map_or(Ok(()), congestion)
}

pub(crate) fn congestion(found: &Congestion) -> Result<(), String> {
    name("link", &found.interface)?;
    name("path", &found.path)?;
    CongestionLevel::try_from(found.level).map_err(|_| format!("congestion of level {}", found.level))?;
    CongestionCause::try_from(found.cause).map_err(|_| format!("congestion of cause {}", found.cause))?;
    let million = [found.ecn_ce_ppm, found.lost_ppm].iter().all(|share| *share <= 1_000_000);
    if !million {
        return Err("a part of a million that is more".to_owned());
    }
    Ok(())
}

fn straggler(one: &Straggler) -> Result<(), String> {
    name("job", &one.job)?;
    name("host", &one.host)?;
    match StragglerCause::try_from(one.cause) {
        Ok(StragglerCause::Compute | StragglerCause::Network) => {}
        _ => return Err(format!("a straggler of kind {}", one.cause)),
    }
    if one.job.is_empty() == (one.communicator == 0) {
        return Err("a straggler of no communicator and no job, or of both".to_owned());
    }
    Ok(())
}

/// `open`: some of its ranks may not have ended it.
fn operation(operation: &Operation, open: bool) -> Result<(), String> {
    few("ranks of an operation", operation.ranks.len(), MOST_RANKS)?;
    few("edges of an operation", operation.edges.len(), MOST_RANKS)?;
    if !operation.ranks.is_sorted_by(|one, next| one.rank < next.rank) {
        return Err("ranks of an operation that do not ascend".to_owned());
    }
    if !operation.edges.is_sorted_by(|one, next| one.peer < next.peer) {
        return Err("edges of an operation that do not ascend".to_owned());
    }
    let early = |ended: u64, called: u64| if ended == 0 { !open } else { ended < called };
    if operation.ranks.iter().any(|rank| early(rank.ended_ns, rank.called_ns)) {
        return Err(format!("operation {} that ended before it was called", operation.operation));
    }
    let lost = |coded: &CompressedOperation| coded.error.is_nan() || coded.error >= 0.0;
    if !operation.compression.as_ref().is_none_or(lost) {
        return Err(format!("operation {} with an error below 0", operation.operation));
    }
    Ok(())
}

/// Whether an operation of a known communicator is told by one of its participants, and of its own ranks
/// alone.
pub(crate) fn part(operation: &Operation, from: SessionId, members: &[Member]) -> Result<(), String> {
    let own = members.iter().position(|member| member.session == Some(from));
    let Some((index, member)) = own.and_then(|index| Some((index, members.get(index)?))) else {
        return Err("an operation of a communicator that the agent has no part in".to_owned());
    };
    if operation.participant as usize != index {
        return Err(format!("participant {} speaks as {}", index, operation.participant));
    }
    if let Some(other) = operation.ranks.iter().find(|one| !member.ranks.contains(&one.rank)) {
        return Err(format!("an operation of rank {}, which is not the agent's", other.rank));
    }
    let peer = |peer: u32| (peer as usize) < members.len() && peer != operation.participant;
    if let Some(edge) = operation.edges.iter().find(|edge| !peer(edge.peer)) {
        return Err(format!("an edge to participant {}, which there is not", edge.peer));
    }
    Ok(())
}
