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

/// What is wrong with a report. The text goes to operators.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ReportFault {
    /// It is not newer than the one before.
    #[error("report {sequence} after report {last}")]
    Old {
        /// Its number.
        sequence: u64,
        /// The number of the one before.
        last: u64,
    },
    /// A list is longer than it may be.
    #[error("{count} {what}; at most {most}")]
    TooMany {
        /// Its entries.
        what: &'static str,
        /// How many there are.
        count: usize,
        /// How many there may be.
        most: usize,
    },
    /// A text is too long, or would change a terminal.
    #[error("a {0} that is no name: at most {MOST_NAME} bytes without control characters")]
    Name(&'static str),
    /// There is no such level.
    #[error("congestion of level {0}")]
    Level(i32),
    /// There is no such cause.
    #[error("congestion of cause {0}")]
    Cause(i32),
    /// A share is above all.
    #[error("a part of a million that is more")]
    Share,
    /// There is no such cause of a straggler.
    #[error("a straggler of kind {0}")]
    Straggler(i32),
    /// It names neither communicator nor job, or both.
    #[error("a straggler of no communicator and no job, or of both")]
    StragglerOf,
    /// Ranks or edges are out of order, or twice.
    #[error("{0} of an operation that do not ascend")]
    Unordered(&'static str),
    /// A rank has ended an operation before its call.
    #[error("operation {0} that ended before it was called")]
    Early(u64),
    /// What was lost is negative.
    #[error("operation {0} with an error below 0")]
    Loss(u64),
    /// The communicator has no participant at the agent.
    #[error("an operation of a communicator that the agent has no part in")]
    NoPart,
    /// It names another participant as the agent's.
    #[error("participant {own} speaks as {claimed}")]
    Participant {
        /// The agent's.
        own: usize,
        /// The one that it names.
        claimed: u32,
    },
    /// An operation of another agent's rank.
    #[error("an operation of rank {0}, which is not the agent's")]
    OperationRank(u32),
    /// The communicator has no such peer.
    #[error("an edge to participant {0}, which there is not")]
    Edge(u32),
    /// A finding on another agent's rank.
    #[error("a finding on rank {0}, which is not the agent's")]
    FindingRank(u32),
}

/// What can be told from the report alone, and the number of the one before.
pub(crate) fn report(report: &TelemetryReport, last: u64) -> Result<(), ReportFault> {
    if report.sequence <= last {
        return Err(ReportFault::Old { sequence: report.sequence, last });
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

fn few(what: &'static str, count: usize, most: usize) -> Result<(), ReportFault> {
    if count > most {
        return Err(ReportFault::TooMany { what, count, most });
    }
    Ok(())
}

/// A name goes to terminals and logs.
fn name(what: &'static str, text: &str) -> Result<(), ReportFault> {
    if text.len() > MOST_NAME || text.chars().any(char::is_control) {
        return Err(ReportFault::Name(what));
    }
    Ok(())
}

fn link(link: &Link) -> Result<(), ReportFault> {
    name("link", &link.interface)?;
    link.congestion.as_ref().map_or(Ok(()), congestion)
}

pub(crate) fn congestion(found: &Congestion) -> Result<(), ReportFault> {
    name("link", &found.interface)?;
    name("path", &found.path)?;
    CongestionLevel::try_from(found.level).map_err(|_| ReportFault::Level(found.level))?;
    CongestionCause::try_from(found.cause).map_err(|_| ReportFault::Cause(found.cause))?;
    let million = [found.ecn_ce_ppm, found.lost_ppm].iter().all(|share| *share <= 1_000_000);
    if !million {
        return Err(ReportFault::Share);
    }
    Ok(())
}

fn straggler(one: &Straggler) -> Result<(), ReportFault> {
    name("job", &one.job)?;
    name("host", &one.host)?;
    match StragglerCause::try_from(one.cause) {
        Ok(StragglerCause::Compute | StragglerCause::Network) => {}
        _ => return Err(ReportFault::Straggler(one.cause)),
    }
    if one.job.is_empty() == (one.communicator == 0) {
        return Err(ReportFault::StragglerOf);
    }
    Ok(())
}

/// `open`: some of its ranks may not have ended it.
fn operation(operation: &Operation, open: bool) -> Result<(), ReportFault> {
    few("ranks of an operation", operation.ranks.len(), MOST_RANKS)?;
    few("edges of an operation", operation.edges.len(), MOST_RANKS)?;
    if !operation.ranks.is_sorted_by(|one, next| one.rank < next.rank) {
        return Err(ReportFault::Unordered("ranks"));
    }
    if !operation.edges.is_sorted_by(|one, next| one.peer < next.peer) {
        return Err(ReportFault::Unordered("edges"));
    }
    let early = |ended: u64, called: u64| if ended == 0 { !open } else { ended < called };
    if operation.ranks.iter().any(|rank| early(rank.ended_ns, rank.called_ns)) {
        return Err(ReportFault::Early(operation.operation));
    }
    let lost = |coded: &CompressedOperation| coded.error.is_nan() || coded.error >= 0.0;
    if !operation.compression.as_ref().is_none_or(lost) {
        return Err(ReportFault::Loss(operation.operation));
    }
    Ok(())
}

/// Whether an operation of a known communicator is told by one of its participants, and of its own ranks
/// alone.
pub(crate) fn part(operation: &Operation, from: SessionId, members: &[Member]) -> Result<(), ReportFault> {
    let own = members.iter().position(|member| member.session == Some(from));
    let Some((index, member)) = own.and_then(|index| Some((index, members.get(index)?))) else {
        return Err(ReportFault::NoPart);
    };
    if operation.participant as usize != index {
        return Err(ReportFault::Participant { own: index, claimed: operation.participant });
    }
    if let Some(other) = operation.ranks.iter().find(|one| !member.ranks.contains(&one.rank)) {
        return Err(ReportFault::OperationRank(other.rank));
    }
    let peer = |peer: u32| (peer as usize) < members.len() && peer != operation.participant;
    if let Some(edge) = operation.edges.iter().find(|edge| !peer(edge.peer)) {
        return Err(ReportFault::Edge(edge.peer));
    }
    Ok(())
}
