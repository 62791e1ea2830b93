//! Requests of collectives that do not block, and the MPI's functions that wait for requests.
//!
//! To the MPI each is a generalized request, which this library completes once the operation has ended. So the MPI itself sees to
//! statuses, to arrays of mixed requests, and to freeing them.

use crate::abi::Handle;
use crate::pmpi::pmpi;
use crate::process::{Process, current, lock};
use crate::run::{land, wait};
use crate::task::Task;
use harmonaize_client::Error;
use harmonaize_staging::Flight;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::time::Duration;

/// How long waiting for any of several sleeps between two looks.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// A collective in flight.
#[derive(Debug)]
struct Flying {
    function: &'static str,
    flights: Vec<Flight>,
    task: Task,
    /// What the MPI's request returns: leaked to it until it is freed.
    result: &'static AtomicI32,
    request: Handle,
}

impl Flying {
    /// How all of it has ended; none while some has not.
    fn poll(&mut self, process: &Process) -> Option<Result<(), Error>> {
        for flight in &mut self.flights {
            match flight.operation.poll() {
                Ok(Some(_)) => {}
                Ok(None) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
        self.task.poll_mpi_part(process).map(|_| Ok(()))
    }
}

/// By request.
static FLYING: Mutex<BTreeMap<usize, Flying>> = Mutex::new(BTreeMap::new());

/// How many there are, so that programs without any look no further.
static COUNT: AtomicUsize = AtomicUsize::new(0);

extern "C" fn query(extra: *mut c_void, status: *mut c_void) -> c_int {
    if let Some(process) = current() {
        (pmpi().MPI_Status_set_elements)(status, process.abi.byte, 0);
        (pmpi().MPI_Status_set_cancelled)(status, 0);
    }
    // SAFETY: `make` has given the MPI this number, and it is freed after the last query.
    unsafe { &*extra.cast::<AtomicI32>() }.load(Ordering::Acquire)
}

extern "C" fn free(extra: *mut c_void) -> c_int {
    // SAFETY: `make` has leaked the number for this, and the MPI frees a request once, after this library has completed it.
    drop(unsafe { Box::from_raw(extra.cast::<AtomicI32>()) });
    0
}

extern "C" fn cancel(_extra: *mut c_void, _completed: c_int) -> c_int {
    0
}

/// Gives the program a request of an operation in flight.
pub(crate) fn make(
    function: &'static str,
    flights: Vec<Flight>,
    task: Task,
    to: *mut c_void,
) -> Result<(), String> {
    let process = current().ok_or("MPI_Finalize came in between")?;
    let extra = Box::into_raw(Box::new(AtomicI32::new(0)));
    if (pmpi().MPI_Grequest_start)(query, free, cancel, extra.cast(), to) != 0 {
        return Err("the MPI has made no request".to_owned());
    }
    // SAFETY: the number is there until the MPI frees the request, which is after this library has let go of it.
    let result = unsafe { &*extra };
    let request = process.abi.read(to, 0);
    let flying = Flying { function, flights, task, result, request };
    lock(&FLYING).insert(process.abi.known(request), flying);
    COUNT.fetch_add(1, Ordering::Release);
    Ok(())
}

/// Ends one: its output is in place, and the MPI knows.
fn finish(process: &Process, flying: Flying, ended: Result<(), Error>) {
    let Flying { function, flights, mut task, result, request } = flying;
    match ended.and_then(|()| flights.iter().try_for_each(land)) {
        Ok(()) => {
            task.land(process);
            result.store(task.wait_mpi_part(process), Ordering::Release);
        }
        Err(error) => {
            process.log(&format!("{function}: {error}"));
            result.store(process.abi.other_error, Ordering::Release);
        }
    }
    drop(flights);
    COUNT.fetch_sub(1, Ordering::Release);
    (pmpi().MPI_Grequest_complete)(request);
}

/// Those of an array of requests that are this library's.
fn own(process: &Process, count: c_int, requests: *const c_void) -> Vec<usize> {
    let count = usize::try_from(count).unwrap_or(0);
    if requests.is_null() {
        return Vec::new();
    }
    let known = lock(&FLYING);
    let all = (0..count).map(|at| process.abi.known(process.abi.read(requests, at)));
    all.filter(|request| known.contains_key(request)).collect()
}

/// Ends those that can be ended without waiting.
fn poll(process: &Process, requests: &[usize]) {
    for request in requests {
        let mut all = lock(&FLYING);
        let ended = all.get_mut(request).and_then(|flying| flying.poll(process));
        let flying = ended.and_then(|ended| Some((all.remove(request)?, ended)));
        drop(all);
        if let Some((flying, ended)) = flying {
            finish(process, flying, ended);
        }
    }
}

/// Ends all that can be ended without waiting. Returns whether there were any in flight, be it that another thread waits for them.
pub(crate) fn poll_all(process: &Process) -> bool {
    let some = COUNT.load(Ordering::Acquire) > 0;
    let all: Vec<usize> = lock(&FLYING).keys().copied().collect();
    poll(process, &all);
    some
}

/// Waits for each of these.
fn wait_for(process: &Process, requests: &[usize]) {
    for request in requests {
        let flying = lock(&FLYING).remove(request);
        if let Some(mut flying) = flying {
            let ended = flying.flights.iter_mut().try_for_each(|flight| wait(process, flight).map(|_| ()));
            finish(process, flying, ended);
        }
    }
}

/// Has this library's requests of an array ended before the MPI looks at them: all of them, or those that have ended by themselves.
fn prepare(count: c_int, requests: *const c_void, all: bool) {
    if COUNT.load(Ordering::Acquire) == 0 {
        return;
    }
    let Some(process) = current() else { return };
    let own = own(&process, count, requests);
    if all { wait_for(&process, &own) } else { poll(&process, &own) }
}

/// Whether an array has requests of this library's.
fn has_own(count: c_int, requests: *const c_void) -> bool {
    COUNT.load(Ordering::Acquire) > 0
        && current().is_some_and(|process| !own(&process, count, requests).is_empty())
}

/// Waits for a request.
#[unsafe(no_mangle)]
pub extern "C" fn MPI_Wait(request: *mut c_void, status: *mut c_void) -> c_int {
    prepare(1, request, true);
    (pmpi().MPI_Wait)(request, status)
}

/// Waits for all requests.
#[unsafe(no_mangle)]
pub extern "C" fn MPI_Waitall(count: c_int, requests: *mut c_void, statuses: *mut c_void) -> c_int {
    prepare(count, requests, true);
    (pmpi().MPI_Waitall)(count, requests, statuses)
}

/// Waits for one of the requests.
#[unsafe(no_mangle)]
pub extern "C" fn MPI_Waitany(
    count: c_int,
    requests: *mut c_void,
    index: *mut c_int,
    status: *mut c_void,
) -> c_int {
    while has_own(count, requests) {
        prepare(count, requests, false);
        let mut found: c_int = 0;
        let result = (pmpi().MPI_Testany)(count, requests, index, &raw mut found, status);
        if result != 0 || found != 0 {
            return result;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    (pmpi().MPI_Waitany)(count, requests, index, status)
}

/// Waits for some of the requests.
#[unsafe(no_mangle)]
pub extern "C" fn MPI_Waitsome(
    count: c_int,
    requests: *mut c_void,
    found: *mut c_int,
    indices: *mut c_int,
    statuses: *mut c_void,
) -> c_int {
    while has_own(count, requests) {
        prepare(count, requests, false);
        let mut some: c_int = 0;
        let result = (pmpi().MPI_Testsome)(count, requests, &raw mut some, indices, statuses);
        if result != 0 || some != 0 {
            if !found.is_null() {
                // SAFETY: the program gives a place for the number.
                unsafe { found.write(some) };
            }
            return result;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    (pmpi().MPI_Waitsome)(count, requests, found, indices, statuses)
}

/// Looks whether a request has ended.
#[unsafe(no_mangle)]
pub extern "C" fn MPI_Test(request: *mut c_void, flag: *mut c_int, status: *mut c_void) -> c_int {
    prepare(1, request, false);
    (pmpi().MPI_Test)(request, flag, status)
}

/// Looks whether all requests have ended.
#[unsafe(no_mangle)]
pub extern "C" fn MPI_Testall(
    count: c_int,
    requests: *mut c_void,
    flag: *mut c_int,
    statuses: *mut c_void,
) -> c_int {
    prepare(count, requests, false);
    (pmpi().MPI_Testall)(count, requests, flag, statuses)
}

/// Looks whether one of the requests has ended.
#[unsafe(no_mangle)]
pub extern "C" fn MPI_Testany(
    count: c_int,
    requests: *mut c_void,
    index: *mut c_int,
    flag: *mut c_int,
    status: *mut c_void,
) -> c_int {
    prepare(count, requests, false);
    (pmpi().MPI_Testany)(count, requests, index, flag, status)
}

/// Looks which requests have ended.
#[unsafe(no_mangle)]
pub extern "C" fn MPI_Testsome(
    count: c_int,
    requests: *mut c_void,
    found: *mut c_int,
    indices: *mut c_int,
    statuses: *mut c_void,
) -> c_int {
    prepare(count, requests, false);
    (pmpi().MPI_Testsome)(count, requests, found, indices, statuses)
}

/// Looks whether a request has ended, and leaves it.
#[unsafe(no_mangle)]
pub extern "C" fn MPI_Request_get_status(request: Handle, flag: *mut c_int, status: *mut c_void) -> c_int {
    if COUNT.load(Ordering::Acquire) > 0
        && let Some(process) = current()
    {
        poll(&process, &[process.abi.known(request)]);
    }
    (pmpi().MPI_Request_get_status)(request, flag, status)
}
