//! The set of descriptors that a sleeping loop waits on.

use rustix::event::epoll;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Adds a descriptor to the set that a sleeping loop waits on; closing it takes it out again.
pub(crate) fn watch(set: &OwnedFd, fd: BorrowedFd<'_>) -> std::io::Result<()> {
    Ok(epoll::add(set, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?)
}
