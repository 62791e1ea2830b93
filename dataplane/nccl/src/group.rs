//! Calls, alone or in groups: a group's calls start together at its end, and it has ended when all of them have.

use crate::registry::{Comm, Members, client_for};
use crate::result::{Failure, entry, ncclResult_t};
use harmonaize_client::{Error, JoinOptions, OperationOptions, Rank};
use harmonaize_staging::cuda::Stream;
use harmonaize_staging::stream::{self, Back, Batch};
use harmonaize_staging::{Call, Flight};
use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

/// How long the first rank waits for the others, at most; control has a limit of its own.
const JOIN_WITHIN: Duration = Duration::from_secs(600);

/// How long a call waits for an entry of the rings before it looks again.
const FULL: Duration = Duration::from_micros(50);

/// How long one wait lasts. Operations have time-outs of their own.
const SLICE: Duration = Duration::from_secs(3600);

/// How a communicator forms.
#[derive(Debug)]
pub(crate) enum Join {
    /// By its name.
    Named(String),
    /// Out of another one's ranks; none where this rank is in none of the new ones.
    Split {
        /// That communicator.
        parent: Arc<Comm>,
        /// Those of one color are together.
        color: Option<u32>,
        /// Orders them.
        key: u32,
    },
}

/// An operation of a communicator.
pub(crate) struct Submission {
    pub(crate) comm: Arc<Comm>,
    pub(crate) call: Call,
    /// Of a reduction that multiplies first.
    pub(crate) factor: Option<f64>,
    /// Whose order it runs in, where CUDA knows the memory.
    pub(crate) stream: Option<Stream>,
}

#[derive(Default)]
struct Open {
    depth: u32,
    joins: Vec<(Arc<Comm>, Join)>,
    calls: Vec<Submission>,
}

thread_local! {
    static OPEN: RefCell<Open> = RefCell::default();
}

impl Join {
    fn members(&self, comm: &Comm) -> Result<Option<Members>, Failure> {
        match self {
            Self::Named(name) => {
                let client = client_for(name)?;
                let options = JoinOptions {
                    timeout: JOIN_WITHIN,
                    job: harmonaize_client::job_from_env(),
                    ..JoinOptions::default()
                };
                let (rank, ranks) = comm.place();
                let communicator = client.join_with(name, rank, ranks, &options)?;
                Ok(Some(Members { client, communicator, name: name.clone() }))
            }
            Self::Split { parent, color, key } => {
                let Members { client, communicator, name } = parent.members()?;
                let split = communicator.split(*color, *key, JOIN_WITHIN)?;
                let client = Arc::clone(client);
                Ok(split.map(|communicator| Members { client, communicator, name: name.clone() }))
            }
        }
    }
}

/// Forms communicators, all at once: each waits for the other ranks.
fn form(joins: &[(Arc<Comm>, Join)]) -> Result<(), Failure> {
    let one = |(comm, join): &(Arc<Comm>, Join)| {
        let members = join.members(comm).inspect_err(|failure| comm.note(failure))?;
        if let Some(members) = members {
            comm.form(members);
        }
        Ok(())
    };
    if let [join] = joins {
        return one(join);
    }
    std::thread::scope(|scope| {
        let threads: Vec<_> = joins.iter().map(|join| scope.spawn(move || one(join))).collect();
        let panicked = |_| Err(Failure::internal("a panic while a communicator formed"));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).fold(Ok(()), Result::and)
    })
}

/// Starts an operation, once the rings have room for it: the ends of what is in flight make some.
fn start(submission: &Submission, flights: &mut [(Arc<Comm>, Option<Flight>)]) -> Result<Flight, Failure> {
    let Members { client, communicator, .. } = submission.comm.members()?;
    let own;
    let members = match submission.factor {
        None => communicator,
        factor => {
            own = communicator.with(OperationOptions { factor, ..OperationOptions::default() })?;
            &own
        }
    };
    loop {
        // SAFETY: the caller of the entry keeps its buffers until the entry, or its group's end, has returned.
        match unsafe { submission.call.start(client, members) } {
            Err(Error::TooMany { .. }) => {
                let mut moved = false;
                for (comm, flight) in flights.iter_mut() {
                    moved |= end(comm, flight, Duration::ZERO)?;
                }
                if !moved {
                    std::thread::sleep(FULL);
                }
            }
            started => return Ok(started?),
        }
    }
}

/// Waits for an operation, or only looks where the time is none. Returns whether it ends now; its output is in place then.
fn end(comm: &Comm, slot: &mut Option<Flight>, within: Duration) -> Result<bool, Failure> {
    let Some(flight) = slot else { return Ok(false) };
    let ended = match within.is_zero() {
        true => flight.operation.poll().transpose(),
        false => loop {
            match flight.operation.wait(within) {
                Err(Error::WaitTimeout { .. }) => {}
                ended => break Some(ended),
            }
        },
    };
    let Some(ended) = ended else { return Ok(false) };
    // SAFETY: as in `start`.
    let copied = ended.and_then(|_| unsafe { flight.landing.copy_out() });
    *slot = None;
    copied.map(|()| true).map_err(Failure::from).inspect_err(|failure| comm.note(failure))
}

/// Queues operations in their streams, and returns. Failures afterwards are the communicators'.
fn queue(calls: Vec<Submission>) -> Result<(), Failure> {
    let comms: Vec<Arc<Comm>> = calls.iter().map(|call| Arc::clone(&call.comm)).collect();
    let part = |submission: Submission| {
        let Members { client, communicator, .. } = submission.comm.members()?;
        let options = OperationOptions { factor: submission.factor, ..OperationOptions::default() };
        let (members, stream) = (communicator.with(options)?, submission.stream.unwrap_or_default());
        Ok(stream::Submission::new(client, members, submission.comm.lane, submission.call, stream)?)
    };
    let parts: Result<Vec<_>, Failure> = calls.into_iter().map(part).collect();
    // SAFETY: NCCL's callers keep their buffers until their streams have passed the call.
    let queued =
        parts.and_then(|parts| unsafe { Batch::submit(parts, Back::InOrder) }.map_err(Failure::from));
    queued?.on_end(move |outcome| {
        if let Err(failure) = outcome {
            let failure = failure.clone().into();
            comms.iter().for_each(|comm| comm.note(&failure));
        }
    });
    Ok(())
}

/// Starts operations: those on memory that CUDA knows in the order of their streams, and all others now, for which it waits. Returns the
/// first failure.
fn run(calls: Vec<Submission>) -> Result<(), Failure> {
    let (queued, calls): (Vec<_>, Vec<_>) = calls.into_iter().partition(|call| call.stream.is_some());
    let mut result = if queued.is_empty() { Ok(()) } else { queue(queued) };
    let mut flights: Vec<(Arc<Comm>, Option<Flight>)> = Vec::with_capacity(calls.len());
    for submission in &calls {
        submission.comm.lane.wait();
        match start(submission, &mut flights) {
            Ok(flight) => flights.push((Arc::clone(&submission.comm), Some(flight))),
            Err(failure) => {
                submission.comm.note(&failure);
                result = Err(failure);
                break;
            }
        }
    }
    for (comm, flight) in &mut flights {
        result = result.and(end(comm, flight, SLICE).map(drop));
    }
    result
}

/// Runs an operation, at the group's end where one is open.
pub(crate) fn submit(submission: Submission) -> Result<(), Failure> {
    let alone = OPEN.with_borrow_mut(|open| match open.depth {
        0 => Some(submission),
        _ => {
            open.calls.push(submission);
            None
        }
    });
    alone.map_or(Ok(()), |submission| run(vec![submission]))
}

/// Forms a communicator, at the group's end where one is open.
pub(crate) fn join(comm: Arc<Comm>, join: Join) -> Result<(), Failure> {
    let alone = OPEN.with_borrow_mut(|open| match open.depth {
        0 => Some((comm, join)),
        _ => {
            open.joins.push((comm, join));
            None
        }
    });
    alone.map_or(Ok(()), |alone| form(&[alone]))
}

/// Ends a group.
pub(crate) fn end_group() -> Result<(), Failure> {
    let whole = OPEN.with_borrow_mut(|open| match open.depth {
        0 => Err(Failure::usage("ncclGroupEnd without ncclGroupStart")),
        1 => Ok(Some(std::mem::take(open))),
        _ => {
            open.depth -= 1;
            Ok(None)
        }
    })?;
    let Some(Open { joins, calls, .. }) = whole else { return Ok(()) };
    form(&joins)?;
    run(calls)
}

/// The rank in a communicator of which `excluded` are taken out; none for one of those.
pub(crate) fn rank_without(rank: Rank, excluded: &[u32]) -> Option<Rank> {
    let before = excluded.iter().filter(|other| **other < rank.0).count();
    let stays = !excluded.contains(&rank.0);
    stays.then(|| Rank(rank.0.saturating_sub(u32::try_from(before).unwrap_or(u32::MAX))))
}

/// Opens a group of this thread. Groups nest; the outermost one's end counts.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> ncclResult_t {
    entry(|| {
        OPEN.with_borrow_mut(|open| open.depth += 1);
        Ok(())
    })
}

/// Ends a group: forms its communicators, then runs its operations, and waits for all.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> ncclResult_t {
    entry(end_group)
}

/// What a simulation of NCCL's finds.
type ncclSimInfo_t = c_void;

/// As [`ncclGroupEnd`]; nothing is known of how long the group takes, so its estimate stays as the caller has set it.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupSimulateEnd(_simulation: *mut ncclSimInfo_t) -> ncclResult_t {
    ncclGroupEnd()
}
