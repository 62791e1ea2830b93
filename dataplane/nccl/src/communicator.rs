//! Communicators: how they form, what they are, how they end.

use crate::config::{check, ncclConfig_t};
use crate::group::{self, Join, rank_without};
use crate::registry::{Comm, find, lock, ncclComm_t, register, remove};
use crate::result::{Failure, entry, give, ncclInProgress, ncclResult_t};
use harmonaize_client::Rank;
use std::collections::BTreeSet;
use std::ffi::c_int;
use std::fmt::Write as _;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

/// The release whose ABI this is.
const VERSION: c_int = 23203;

const ID_BYTES: usize = 128;

/// What all ranks of a communicator know it by before it has formed.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ncclUniqueId {
    internal: [u8; ID_BYTES],
}

/// A split's color of ranks that are in no new communicator.
const NCCL_SPLIT_NOCOLOR: c_int = -1;
/// Operations in flight are aborted before ranks are shrunk off.
const NCCL_SHRINK_ABORT: c_int = 1;

impl ncclUniqueId {
    /// An id that nobody else has.
    fn new() -> Self {
        let mut internal = [0; ID_BYTES];
        for (part, number) in internal.chunks_exact_mut(8).zip(0..2_u64) {
            // Keys of the standard library's hashes are random.
            let random = RandomState::new().hash_one((number, std::process::id(), std::time::Instant::now()));
            part.copy_from_slice(&random.to_le_bytes());
        }
        Self { internal }
    }

    /// The name of the communicator.
    fn name(&self) -> String {
        let mut name = "nccl-".to_owned();
        for byte in self.internal.iter().take(16) {
            // Writing to a string does not fail.
            let _ = write!(name, "{byte:02x}");
        }
        name
    }
}

fn place(ranks: c_int, rank: c_int) -> Result<(u32, Rank), Failure> {
    let both = u32::try_from(ranks).ok().zip(u32::try_from(rank).ok()).filter(|(ranks, rank)| rank < ranks);
    let (ranks, rank) = both.ok_or_else(|| Failure::argument(format!("rank {rank} of {ranks}")))?;
    Ok((ranks, Rank(rank)))
}

/// Forms a communicator, and gives its handle: at once in a group, of which it forms at the end.
fn create(to: *mut ncclComm_t, comm: Arc<Comm>, join: Join) -> Result<(), Failure> {
    if to.is_null() {
        return Err(Failure::argument("where the communicator goes is NULL"));
    }
    let handle = register(Arc::clone(&comm));
    let joined = group::join(comm, join);
    if joined.is_err() {
        let _ = remove(handle);
    }
    joined.and_then(|()| give(handle, to, "where the communicator goes"))
}

fn create_named(
    to: *mut ncclComm_t,
    name: String,
    (ranks, rank): (c_int, c_int),
    device: c_int,
) -> Result<(), Failure> {
    let (ranks, rank) = place(ranks, rank)?;
    create(to, Comm::new(rank, ranks, device), Join::Named(name))
}

/// The release of NCCL whose ABI this is.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetVersion(version: *mut c_int) -> ncclResult_t {
    entry(|| give(VERSION, version, "where the version goes"))
}

/// Makes an id, of which one rank tells the others.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetUniqueId(id: *mut ncclUniqueId) -> ncclResult_t {
    entry(|| give(ncclUniqueId::new(), id, "where the id goes"))
}

/// Forms a communicator. Blocks until all ranks have joined.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommInitRank(
    comm: *mut ncclComm_t,
    ranks: c_int,
    id: ncclUniqueId,
    rank: c_int,
) -> ncclResult_t {
    entry(|| create_named(comm, id.name(), (ranks, rank), 0))
}

/// The same with a configuration.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommInitRankConfig(
    comm: *mut ncclComm_t,
    ranks: c_int,
    id: ncclUniqueId,
    rank: c_int,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    entry(|| {
        check(config)?;
        create_named(comm, id.name(), (ranks, rank), 0)
    })
}

/// The same by several ids, of which the first is enough.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommInitRankScalable(
    comm: *mut ncclComm_t,
    ranks: c_int,
    rank: c_int,
    ids: c_int,
    all: *mut ncclUniqueId,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    entry(|| {
        check(config)?;
        if ids < 1 || all.is_null() {
            return Err(Failure::argument("there is no id"));
        }
        // SAFETY: the caller gives an array with at least one id.
        let id = unsafe { all.read() };
        create_named(comm, id.name(), (ranks, rank), 0)
    })
}

/// Forms a communicator whose ranks are all this process's, one a device.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommInitAll(
    comms: *mut ncclComm_t,
    devices: c_int,
    list: *const c_int,
) -> ncclResult_t {
    entry(|| {
        if comms.is_null() || devices < 1 {
            return Err(Failure::argument(format!("{devices} devices, or no place for their communicators")));
        }
        let name = ncclUniqueId::new().name();
        let begun = group::ncclGroupStart();
        debug_assert_eq!(begun, 0, "opening a group does not fail");
        let one = |rank: c_int| {
            let at = usize::try_from(rank).map_err(|_| Failure::internal("a negative rank"))?;
            // SAFETY: the caller's list has so many devices where it has one.
            let device = if list.is_null() { rank } else { unsafe { list.add(at).read() } };
            // SAFETY: the caller's array has room for so many communicators.
            create_named(unsafe { comms.add(at) }, name.clone(), (devices, rank), device)
        };
        let created = (0..devices).try_for_each(one);
        created.and(group::end_group())
    })
}

/// Splits a communicator: ranks of one color are one new communicator, ordered by key. All ranks call it.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommSplit(
    comm: ncclComm_t,
    color: c_int,
    key: c_int,
    new: *mut ncclComm_t,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    entry(|| {
        let parent = find(comm)?;
        check(config)?;
        if color < NCCL_SPLIT_NOCOLOR {
            return Err(Failure::argument(format!("a color of {color}")));
        }
        // Keys are signed here, and their order is what counts.
        let key = key.cast_unsigned() ^ (1 << 31);
        let color = u32::try_from(color).ok();
        if new.is_null() {
            return Err(Failure::argument("where the communicator goes is NULL"));
        }
        let (rank, ranks) = parent.place();
        let own = Comm::new(rank, ranks, parent.device);
        let join = Join::Split { parent, color, key };
        match color {
            Some(_) => create(new, own, join),
            None => give(std::ptr::null_mut(), new, "where the communicator goes")
                .and_then(|()| group::join(own, join)),
        }
    })
}

/// Forms a communicator of all ranks but the excluded ones, who do not call it.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommShrink(
    comm: ncclComm_t,
    excluded: *mut c_int,
    count: c_int,
    new: *mut ncclComm_t,
    config: *mut ncclConfig_t,
    flags: c_int,
) -> ncclResult_t {
    entry(|| {
        let parent = find(comm)?;
        check(config)?;
        let members = parent.members()?;
        let (own, all) = parent.place();
        let count = usize::try_from(count).map_err(|_| Failure::argument(format!("{count} ranks")))?;
        if excluded.is_null() || count == 0 {
            return Err(Failure::argument("no rank is excluded"));
        }
        // SAFETY: the caller's list has so many ranks.
        let list = unsafe { std::slice::from_raw_parts(excluded, count) };
        let known = |rank: &c_int| u32::try_from(*rank).ok().filter(|rank| *rank < all);
        let ranks: Option<BTreeSet<u32>> = list.iter().map(known).collect();
        let ranks = ranks.ok_or_else(|| Failure::argument(format!("excluded ranks {list:?}")))?;
        let ranks: Vec<u32> = ranks.into_iter().collect();
        let rank = rank_without(own, &ranks);
        let rank = rank.ok_or_else(|| Failure::argument(format!("rank {own} excludes itself")))?;
        if flags & NCCL_SHRINK_ABORT != 0 {
            members.communicator.abort();
        }
        let number = {
            let mut shrunk = lock(&parent.shrunk);
            *shrunk += 1;
            *shrunk
        };
        // All who stay have shrunk it as often, of the same ranks.
        let ids: Vec<String> = ranks.iter().map(u32::to_string).collect();
        let name = format!("{}-{number}-{}", members.name, ids.join("."));
        let left = all.saturating_sub(u32::try_from(ranks.len()).unwrap_or(u32::MAX));
        create(new, Comm::new(rank, left, parent.device), Join::Named(name))
    })
}

/// Ends a rank's use of a communicator.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDestroy(comm: ncclComm_t) -> ncclResult_t {
    entry(|| remove(comm).map(drop))
}

/// Nothing is left to be flushed: calls have ended when they return.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommFinalize(comm: ncclComm_t) -> ncclResult_t {
    entry(|| find(comm).map(drop))
}

/// Ends the communicator for all ranks, and this rank's use of it. Whoever waits is woken.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommAbort(comm: ncclComm_t) -> ncclResult_t {
    entry(|| {
        if let Ok(members) = remove(comm)?.members() {
            members.communicator.abort();
        }
        Ok(())
    })
}

/// Ends the communicator for all ranks. Ranks can be shrunk off still.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommRevoke(comm: ncclComm_t, _flags: c_int) -> ncclResult_t {
    entry(|| {
        find(comm)?.members()?.communicator.abort();
        Ok(())
    })
}

/// How the communicator failed, if it has; in progress while its group has not ended.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommGetAsyncError(comm: ncclComm_t, error: *mut ncclResult_t) -> ncclResult_t {
    entry(|| {
        let comm = find(comm)?;
        let found = match (comm.failed(), comm.members()) {
            (0, Err(_)) => ncclInProgress,
            (failed, _) => failed,
        };
        give(found, error, "where the error goes")
    })
}

/// How many ranks it has.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommCount(comm: ncclComm_t, count: *mut c_int) -> ncclResult_t {
    entry(|| {
        let (_, ranks) = find(comm)?.place();
        give(c_int::try_from(ranks).unwrap_or(c_int::MAX), count, "where the number goes")
    })
}

/// Its rank's device, as the caller named it; 0 where it did not.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommCuDevice(comm: ncclComm_t, device: *mut c_int) -> ncclResult_t {
    entry(|| give(find(comm)?.device, device, "where the device goes"))
}

/// Its rank.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommUserRank(comm: ncclComm_t, rank: *mut c_int) -> ncclResult_t {
    entry(|| {
        let (own, _) = find(comm)?.place();
        give(c_int::try_from(own.0).unwrap_or(c_int::MAX), rank, "where the rank goes")
    })
}
