//! Which communicator of the provider's carries the collectives of one of the MPI's.

use crate::abi::Handle;
use crate::pmpi::pmpi;
use crate::process::{Process, current, lock};
use crate::reason::Reason;
use harmonaize_client::{Communicator, Error, JoinOptions, Rank};
use std::ffi::{c_int, c_void};
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

/// How long ranks wait for each other when a communicator forms. All of them are in the call already.
const JOIN_WITHIN: Duration = Duration::from_secs(60);

/// Random bytes that name a communicator.
const ID_BYTES: usize = 16;

/// A communicator of the MPI's.
#[derive(Debug)]
pub(crate) struct Comm {
    /// None where all ranks have agreed that its collectives stay with the MPI, and why.
    pub(crate) carrier: Result<Communicator, Reason>,
}

/// Attributes do not go to a communicator's duplicates: those have members of their own at the provider.
pub(crate) extern "C" fn not_copied(
    _comm: Handle,
    _keyval: c_int,
    _extra: *mut c_void,
    _value: *mut c_void,
    _copy: *mut c_void,
    copied: *mut c_int,
) -> c_int {
    if !copied.is_null() {
        // SAFETY: the MPI gives a place for a number.
        unsafe { copied.write(0) };
    }
    0
}

/// A communicator goes: this rank leaves the provider's.
pub(crate) extern "C" fn deleted(
    _comm: Handle,
    _keyval: c_int,
    value: *mut c_void,
    _extra: *mut c_void,
) -> c_int {
    if let Some(process) = current() {
        let gone = lock(&process.comms).remove(&value.addr());
        drop(gone);
    }
    0
}

impl Comm {
    /// That of a communicator of the MPI's. One that has none yet forms where it may: then all its ranks are here.
    pub(crate) fn of(process: &Process, comm: Handle, may_form: bool) -> Result<Arc<Self>, Reason> {
        if process.abi.known(comm) == process.abi.known(process.abi.comm_null) {
            return Err(Reason::NoCommunicator);
        }
        let (mut value, mut found): (*mut c_void, c_int) = (std::ptr::null_mut(), 0);
        (pmpi().MPI_Comm_get_attr)(comm, process.keyval, (&raw mut value).cast(), &raw mut found);
        if found != 0 {
            let known = lock(&process.comms).get(&value.addr()).cloned();
            return known.ok_or(Reason::GoneCommunicator);
        }
        if !may_form {
            return Err(Reason::NoBlockingCall);
        }
        let formed = Arc::new(Self::form(process, comm));
        let number = {
            let mut comms = lock(&process.comms);
            let number = (1..).find(|number| !comms.contains_key(number)).unwrap_or(usize::MAX);
            comms.insert(number, Arc::clone(&formed));
            number
        };
        (pmpi().MPI_Comm_set_attr)(comm, process.keyval, std::ptr::without_provenance_mut(number));
        Ok(formed)
    }

    fn form(process: &Process, comm: Handle) -> Self {
        let carrier = Self::join(process, comm);
        Self { carrier }
    }

    /// Joins with all ranks of a communicator, or none does.
    fn join(process: &Process, comm: Handle) -> Result<Communicator, Reason> {
        let abi = &process.abi;
        let (mut inter, mut rank, mut ranks): (c_int, c_int, c_int) = (0, 0, 0);
        (pmpi().MPI_Comm_test_inter)(comm, &raw mut inter);
        if inter != 0 {
            return Err(Reason::Intercommunicator);
        }
        (pmpi().MPI_Comm_rank)(comm, &raw mut rank);
        (pmpi().MPI_Comm_size)(comm, &raw mut ranks);
        if ranks < 2 {
            return Err(Reason::OneRank);
        }
        let mut id = [0_u8; ID_BYTES];
        let mut fine = rank != 0 || getrandom::fill(&mut id).is_ok();
        let bytes = c_int::try_from(ID_BYTES).unwrap_or_default();
        (pmpi().MPI_Bcast)((&raw mut id).cast(), bytes, abi.byte, 0, comm);
        let mut name = "mpi-".to_owned();
        for byte in id {
            // Writing to a string does not fail.
            let _ = write!(name, "{byte:02x}");
        }
        let place = u32::try_from(rank).ok().zip(u32::try_from(ranks).ok());
        let mut options = JoinOptions {
            timeout: JOIN_WITHIN,
            job: harmonaize_client::job_from_env(),
            operation_timeout: Some(Duration::MAX),
            ..JoinOptions::default()
        };
        let joined = place.filter(|_| fine).map(|(rank, ranks)| {
            // The MPI waits for a late rank for ever; the provider as long as its operator allows.
            match process.client.join_with(&name, Rank(rank), ranks, &options) {
                Err(Error::TimeoutTooLong { longest, .. }) => {
                    options.operation_timeout = Some(longest);
                    process.client.join_with(&name, Rank(rank), ranks, &options)
                }
                joined => joined,
            }
        });
        if let Some(Err(error)) = &joined {
            process.log(&format!("{error}; this communicator's collectives go to the MPI"));
        }
        let joined = joined.and_then(Result::ok);
        fine = joined.is_some();
        let (own, mut all) = (c_int::from(fine), 0);
        let (from, to) = ((&raw const own).cast(), (&raw mut all).cast());
        (pmpi().MPI_Allreduce)(from, to, 1, abi.int, abi.min, comm);
        joined.filter(|_| all == 1).ok_or(Reason::NotJoined)
    }
}
