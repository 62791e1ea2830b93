//! How a collective runs: in pieces where it is large, while the MPI goes on with what it has to transfer.

use crate::abi::Handle;
use crate::communicator::Comm;
use crate::pmpi::pmpi;
use crate::process::{Process, current};
use crate::reason::Reason;
use crate::request;
use crate::task::{Arguments, Task};
use harmonaize_client::{Communicator, Error, Receipt};
use harmonaize_staging::{Call, Flight};
use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Pieces of an operation in flight: one is copied while another is under way.
const PIECES: usize = 2;

/// How long a wait lasts before the MPI goes on: at first, and at most.
const SLICES: [Duration; 2] = [Duration::from_micros(100), Duration::from_millis(1)];

/// How long a call waits for an entry of the rings or for staging memory before it looks again.
const FULL: Duration = Duration::from_micros(50);

/// Waits for an operation. The MPI goes on meanwhile: another rank may need a message of this one's before it calls the collective.
pub(crate) fn wait(process: &Process, flight: &mut Flight) -> Result<Receipt, Error> {
    let [mut slice, most] = SLICES;
    loop {
        match flight.operation.wait(slice) {
            Err(Error::WaitTimeout { .. }) => {
                process.progress();
                slice = (slice * 2).min(most);
            }
            ended => return ended,
        }
    }
}

/// Starts what a task consists of, once there is room for it.
fn start(process: &Process, communicator: &Communicator, call: &Call) -> Result<Flight, Error> {
    loop {
        // SAFETY: the program's buffers, and the task's, are there until the call, or its request, has ended.
        match unsafe { call.start(&process.client, communicator) } {
            // What is in flight makes room when it ends.
            Err(Error::TooMany { .. } | Error::NoRoom { .. }) if request::poll_all(process) => {
                process.progress();
                std::thread::sleep(FULL);
            }
            started => return started,
        }
    }
}

/// Puts the output in place of what has ended well.
pub(crate) fn land(flight: &Flight) -> Result<(), Error> {
    // SAFETY: as in `start`.
    unsafe { flight.landing.copy_out() }
}

fn blocking(process: &Process, communicator: &Communicator, task: &Task) -> Result<(), Error> {
    let mut flights: VecDeque<Flight> = VecDeque::with_capacity(PIECES);
    let finish = |flights: &mut VecDeque<Flight>, left: usize| {
        while flights.len() > left {
            let Some(mut flight) = flights.pop_front() else { break };
            wait(process, &mut flight)?;
            land(&flight)?;
        }
        Ok::<(), Error>(())
    };
    for range in task.chunks() {
        finish(&mut flights, PIECES - 1)?;
        flights.push_back(start(process, communicator, &task.call(&range))?);
    }
    finish(&mut flights, 0)?;
    task.land(process);
    Ok(())
}

/// Says what went wrong, and has the MPI do what the program wants done with errors of the communicator.
pub(crate) fn failed(process: &Process, function: &str, comm: Handle, error: &str) -> c_int {
    process.log(&format!("{function}: {error}"));
    let code = process.abi.other_error;
    (pmpi().MPI_Comm_call_errhandler)(comm, code);
    code
}

/// The provider's communicator, and what is to be done on it; an error says why the MPI carries the call.
fn prepared(
    process: &Process,
    comm: Handle,
    nonblocking: bool,
    task: impl FnOnce(&Arguments<'_>) -> Result<Task, Reason>,
) -> Result<(std::sync::Arc<Comm>, Task), Reason> {
    let known = Comm::of(process, comm, !nonblocking)?;
    let carrier = known.carrier.as_ref().map_err(|reason| *reason)?;
    let (rank, ranks) = (carrier.rank().0, carrier.ranks());
    let task = task(&Arguments { process, comm, rank, ranks, nonblocking })?;
    if nonblocking && task.chunks().nth(1).is_some() {
        return Err(Reason::LargeNonblocking);
    }
    Ok((known, task))
}

/// Runs a collective; none where the MPI is to carry it.
pub(crate) fn run(
    function: &'static str,
    comm: Handle,
    task: impl FnOnce(&Arguments<'_>) -> Result<Task, Reason>,
) -> Option<c_int> {
    let process = current()?;
    let ran = catch_unwind(AssertUnwindSafe(|| {
        let (known, task) = prepared(&process, comm, false, task)?;
        let Ok(communicator) = &known.carrier else { return Err(Reason::NoCommunicator) };
        process.carried.fetch_add(1, Ordering::Relaxed);
        // Others are not to wait for a rank that could not begin.
        let ended = blocking(&process, communicator, &task).inspect_err(|_| communicator.abort());
        Ok(ended.map_err(|error| error.to_string()))
    }));
    answered(&process, function, comm, ran.unwrap_or_else(|_| Ok(Err("a panic of the library".to_owned()))))
}

/// Begins a collective whose request the program waits for; none where the MPI is to carry it.
pub(crate) fn begin(
    function: &'static str,
    comm: Handle,
    to: *mut c_void,
    task: impl FnOnce(&Arguments<'_>) -> Result<Task, Reason>,
) -> Option<c_int> {
    let process = current()?;
    let begun = catch_unwind(AssertUnwindSafe(|| {
        let (known, task) = prepared(&process, comm, true, task)?;
        let Ok(communicator) = &known.carrier else { return Err(Reason::NoCommunicator) };
        process.carried.fetch_add(1, Ordering::Relaxed);
        let begun: Result<Vec<Flight>, Error> =
            task.calls().iter().map(|call| start(&process, communicator, call)).collect();
        let begun = begun.inspect_err(|_| communicator.abort());
        Ok(begun
            .map_err(|error| error.to_string())
            .and_then(|flights| request::make(function, flights, task, to)))
    }));
    answered(&process, function, comm, begun.unwrap_or_else(|_| Ok(Err("a panic of the library".to_owned()))))
}

fn answered(
    process: &Process,
    function: &'static str,
    comm: Handle,
    ended: Result<Result<(), String>, Reason>,
) -> Option<c_int> {
    match ended {
        Ok(Ok(())) => Some(0),
        Ok(Err(error)) => Some(failed(process, function, comm, &error)),
        Err(reason) => {
            process.fall_back(function, reason);
            None
        }
    }
}
