//! Communicators by their handles, and the process's attachments to the agent.

use crate::result::{Failure, ncclResult_t, ncclSuccess};
use harmonaize_client::{AttachOptions, Client, Communicator, Rank};
use harmonaize_staging::stream::Lane;
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// A communicator's handle: a number, in the form of a pointer.
pub(crate) type ncclComm_t = *mut c_void;

/// Most operations in flight, as many as agents allow: a group has a send and a receive for each of 128 ranks. More wait for ends.
const ENTRIES: u32 = 256;

/// Locks what stays whole whoever panics.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a communicator is once it has formed.
#[derive(Debug)]
pub(crate) struct Members {
    pub(crate) client: Arc<Client>,
    pub(crate) communicator: Communicator,
    pub(crate) name: String,
}

/// A rank of a communicator.
#[derive(Debug)]
pub(crate) struct Comm {
    /// As the caller says, until it has formed: a split says where this rank is.
    place: (Rank, u32),
    pub(crate) device: c_int,
    /// Its calls on memory that CUDA knows start in order.
    pub(crate) lane: Lane,
    /// Unset until it has formed: in a group, until the group's end.
    members: OnceLock<Members>,
    /// Factors of reductions that multiply before they sum, by number.
    pub(crate) factors: Mutex<Vec<Option<f64>>>,
    /// How often ranks were shrunk off.
    pub(crate) shrunk: Mutex<u32>,
    failed: Mutex<ncclResult_t>,
}

impl Comm {
    pub(crate) fn new(rank: Rank, ranks: u32, device: c_int) -> Arc<Self> {
        let (factors, shrunk, failed) = (Mutex::default(), Mutex::default(), Mutex::new(ncclSuccess));
        let (lane, members) = (Lane::new(), OnceLock::new());
        Arc::new(Self { place: (rank, ranks), device, lane, members, factors, shrunk, failed })
    }

    /// Its rank, and of how many.
    pub(crate) fn place(&self) -> (Rank, u32) {
        let formed = self.members.get().map(|members| &members.communicator);
        formed.map_or(self.place, |communicator| (communicator.rank(), communicator.ranks()))
    }

    pub(crate) fn members(&self) -> Result<&Members, Failure> {
        let none = || Failure::usage("the communicator has not formed: its group has not ended");
        self.members.get().ok_or_else(none)
    }

    pub(crate) fn form(&self, members: Members) {
        // It forms once: whoever forms it has just made it.
        let _ = self.members.set(members);
    }

    /// Remembers how it failed, for who asks later.
    pub(crate) fn note(&self, failure: &Failure) {
        let mut failed = lock(&self.failed);
        if *failed == ncclSuccess {
            *failed = failure.result;
        }
    }

    pub(crate) fn failed(&self) -> ncclResult_t {
        *lock(&self.failed)
    }
}

#[derive(Debug)]
struct Registry {
    last: usize,
    open: Option<HashMap<usize, Arc<Comm>>>,
}

static REGISTRY: Mutex<Registry> = Mutex::new(Registry { last: 0, open: None });

/// Gives a communicator a handle.
pub(crate) fn register(comm: Arc<Comm>) -> ncclComm_t {
    let mut registry = lock(&REGISTRY);
    registry.last += 1;
    let number = registry.last;
    registry.open.get_or_insert_default().insert(number, comm);
    std::ptr::without_provenance_mut(number)
}

/// The communicator of a handle.
pub(crate) fn find(handle: ncclComm_t) -> Result<Arc<Comm>, Failure> {
    let registry = lock(&REGISTRY);
    let known = registry.open.as_ref().and_then(|open| open.get(&handle.addr()));
    known.cloned().ok_or_else(|| Failure::argument("no such communicator"))
}

/// Takes a handle's communicator away.
pub(crate) fn remove(handle: ncclComm_t) -> Result<Arc<Comm>, Failure> {
    let mut registry = lock(&REGISTRY);
    let known = registry.open.as_mut().and_then(|open| open.remove(&handle.addr()));
    known.ok_or_else(|| Failure::argument("no such communicator"))
}

/// Attachments of this process, which end with the last communicator that uses them, and how many of its ranks have joined each
/// communicator.
#[derive(Default)]
struct Attachments {
    process: u32,
    clients: Vec<Weak<Client>>,
    joined: HashMap<String, usize>,
}

static ATTACHMENTS: Mutex<Option<Attachments>> = Mutex::new(None);

/// An attachment for a rank that is about to join `name`: two ranks of one communicator have one each.
pub(crate) fn client_for(name: &str) -> Result<Arc<Client>, Failure> {
    let mut all = lock(&ATTACHMENTS);
    let process = std::process::id();
    // Those of a parent by `fork` are the parent's.
    let all = match &mut *all {
        Some(known) if known.process == process => known,
        other => other.insert(Attachments { process, ..Attachments::default() }),
    };
    let joined = all.joined.entry(name.to_owned()).or_default();
    let number = *joined;
    let client = match all.clients.get(number).and_then(Weak::upgrade) {
        Some(client) => client,
        None => {
            let options = AttachOptions { entries: ENTRIES, ..AttachOptions::default() };
            let client = Arc::new(Client::from_env(options)?);
            all.clients.resize(all.clients.len().max(number + 1), Weak::new());
            if let Some(slot) = all.clients.get_mut(number) {
                *slot = Arc::downgrade(&client);
            }
            client
        }
    };
    *joined += 1;
    Ok(client)
}
