//! The process: from `MPI_Init` to `MPI_Finalize`, and what it counts meanwhile.

use crate::abi::{Abi, Handle};
use crate::communicator::{self, Comm};
use crate::pmpi::pmpi;
use crate::reason::Reason;
use harmonaize_client::{AttachOptions, Client, DebugLevel};
use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_char, c_int};
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

/// Operations in flight, at most.
const ENTRIES: u32 = 256;

/// A process whose collectives go by the provider.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) abi: Abi,
    pub(crate) client: Client,
    /// The attribute of communicators that says which of [`Self::comms`] they are.
    pub(crate) keyval: c_int,
    /// A communicator on which nothing is ever sent: probing it lets the MPI go on. Of all ranks: MPICH looks at no network for one alone.
    idle: Handle,
    pub(crate) comms: Mutex<HashMap<usize, Arc<Comm>>>,
    pub(crate) debug: Option<DebugLevel>,
    /// Collectives of fewer bytes are the MPI's: as rank 0 says.
    pub(crate) min_bytes: u64,
    rank: c_int,
    /// Calls that the provider has carried.
    pub(crate) carried: AtomicU64,
    /// Calls that went to the MPI, by function and reason.
    fallen_back: Mutex<BTreeMap<(&'static str, Reason), u64>>,
}

static PROCESS: RwLock<Option<Arc<Process>>> = RwLock::new(None);

/// Locks what stays whole whoever panics.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// This process, where its collectives go by the provider.
pub(crate) fn current() -> Option<Arc<Process>> {
    PROCESS.read().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Says something on standard error, in one piece: ranks share it.
fn log(rank: c_int, text: &str) {
    // Whoever has closed it does not want it.
    let _ = std::io::stderr().write_all(format!("harmonaize-mpi rank {rank}: {text}\n").as_bytes());
}

impl Process {
    /// Says something on standard error.
    pub(crate) fn log(&self, text: &str) {
        log(self.rank, text);
    }

    /// Counts a call that goes to the MPI; tells of the first of its kind.
    pub(crate) fn fall_back(&self, function: &'static str, reason: Reason) {
        let count = {
            let mut all = lock(&self.fallen_back);
            let count = all.entry((function, reason)).or_default();
            *count += 1;
            *count
        };
        if count == 1 && self.debug.is_some() {
            self.log(&format!("{function} goes to the MPI: {reason}"));
        }
    }

    /// Lets the MPI go on, whose transfers stand still otherwise while this thread waits here.
    pub(crate) fn progress(&self) {
        let mut found: c_int = 0;
        (pmpi().MPI_Iprobe)(0, 0, self.idle, &raw mut found, self.abi.no_status());
    }

    fn sum_up(&self) {
        if self.debug.is_none() {
            return;
        }
        let fallen_back = lock(&self.fallen_back);
        let by: u64 = fallen_back.values().sum();
        self.log(&format!("{} calls by the provider, {by} by the MPI", self.carried.load(Ordering::Relaxed)));
        for ((function, reason), count) in &*fallen_back {
            self.log(&format!("{count} times {function} by the MPI: {reason}"));
        }
    }
}

/// The variable with the bytes below which the MPI carries a collective.
const MIN_BYTES: &str = "HARMONAIZE_MPI_MIN_BYTES";

/// What a process begins with.
struct Beginning {
    abi: Abi,
    client: Client,
    debug: Option<DebugLevel>,
    min_bytes: u64,
}

/// Attaches; an error says why collectives stay with the MPI.
fn attach() -> Result<Beginning, String> {
    let abi = Abi::find()?;
    let min_bytes = match std::env::var(MIN_BYTES) {
        Ok(text) if !text.is_empty() => {
            text.parse().map_err(|_| format!("{MIN_BYTES}={text} is no number of bytes"))?
        }
        _ => 0,
    };
    let options = AttachOptions { entries: ENTRIES, ..AttachOptions::default() };
    let debug = DebugLevel::from_env().map_err(|error| error.to_string())?;
    let client = Client::from_env(options).map_err(|error| error.to_string())?;
    Ok(Beginning { abi, client, debug, min_bytes })
}

/// Begins once the MPI is there: all ranks attach, or none uses the provider.
fn begin() {
    let attached = catch_unwind(attach).unwrap_or_else(|_| Err("a panic of the library".to_owned()));
    // The constants are needed to agree. Where they are not known, that is so at all ranks.
    let constants = match &attached {
        Ok(Beginning { abi, .. }) => Ok((abi.comm_world, abi.int, abi.min)),
        Err(_) => Abi::find().map(|abi| (abi.comm_world, abi.int, abi.min)),
    };
    let (world, int, min) = match constants {
        Ok(constants) => constants,
        Err(why) => {
            eprintln!("harmonaize-mpi: {why}; collectives go to the MPI");
            return;
        }
    };
    let mut rank: c_int = 0;
    (pmpi().MPI_Comm_rank)(world, &raw mut rank);
    let (own, mut first) = (if attached.is_ok() { c_int::MAX } else { rank }, 0);
    let (from, to) = ((&raw const own).cast(), (&raw mut first).cast());
    let agreed = (pmpi().MPI_Allreduce)(from, to, 1, int, min, world);
    let Beginning { abi, client, debug, mut min_bytes } = match attached {
        Ok(attached) if agreed == 0 && first == c_int::MAX => attached,
        // The first rank of those that could not speaks for all.
        Err(why) if first == rank => {
            log(rank, &format!("{why}; collectives of all ranks go to the MPI"));
            return;
        }
        _ => return,
    };
    let bytes = c_int::try_from(size_of_val(&min_bytes)).unwrap_or_default();
    (pmpi().MPI_Bcast)((&raw mut min_bytes).cast(), bytes, abi.byte, 0, world);
    let (mut keyval, mut idle) = (0, Handle(0));
    let made = (pmpi().MPI_Comm_create_keyval)(
        communicator::not_copied,
        communicator::deleted,
        &raw mut keyval,
        std::ptr::null_mut(),
    );
    let duplicated = (pmpi().MPI_Comm_dup)(abi.comm_world, (&raw mut idle).cast());
    debug_assert_eq!((made, duplicated), (0, 0), "the MPI ends the program where these fail");
    let process = Arc::new(Process {
        abi,
        client,
        keyval,
        idle,
        comms: Mutex::default(),
        debug,
        min_bytes,
        rank,
        carried: AtomicU64::new(0),
        fallen_back: Mutex::default(),
    });
    *PROCESS.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&process));
    // So that collectives that do not block have their communicator.
    let formed = catch_unwind(AssertUnwindSafe(|| Comm::of(&process, world, true)));
    debug_assert!(formed.is_ok(), "forming a communicator does not panic");
}

/// Begins the MPI, then the use of the provider.
#[unsafe(no_mangle)]
pub extern "C" fn MPI_Init(count: *mut c_int, arguments: *mut *mut *mut c_char) -> c_int {
    let result = (pmpi().MPI_Init)(count, arguments);
    if result == 0 {
        begin();
    }
    result
}

/// Begins the MPI for threads, then the use of the provider.
#[unsafe(no_mangle)]
pub extern "C" fn MPI_Init_thread(
    count: *mut c_int,
    arguments: *mut *mut *mut c_char,
    required: c_int,
    provided: *mut c_int,
) -> c_int {
    let result = (pmpi().MPI_Init_thread)(count, arguments, required, provided);
    if result == 0 {
        begin();
    }
    result
}

/// Ends the use of the provider, then the MPI.
#[unsafe(no_mangle)]
pub extern "C" fn MPI_Finalize() -> c_int {
    let process = PROCESS.write().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(process) = process {
        process.sum_up();
        // Nobody leaves while others are still in an operation.
        (pmpi().MPI_Barrier)(process.abi.comm_world);
        lock(&process.comms).clear();
        let (mut keyval, mut idle) = (process.keyval, process.idle);
        (pmpi().MPI_Comm_free)((&raw mut idle).cast());
        (pmpi().MPI_Comm_free_keyval)(&raw mut keyval);
        drop(process);
    }
    (pmpi().MPI_Finalize)()
}
