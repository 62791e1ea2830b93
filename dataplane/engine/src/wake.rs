//! The set of descriptors that a sleeping loop waits on.

use crate::command::AttachmentId;
use rustix::event::{Timespec, epoll};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Most descriptors that one sleep tells of; what woke it beside them ends the next one at once.
const MOST_WOKEN: usize = 8;

/// A descriptor that no attachment's end has.
const OTHER: u64 = u64::MAX;

/// The attachments whose ends may have woken a loop.
#[derive(Debug, Default)]
pub(crate) struct Woken([Option<u64>; MOST_WOKEN]);

impl Woken {
    pub(crate) fn contains(&self, attachment: AttachmentId) -> bool {
        self.0.contains(&Some(attachment.0))
    }
}

/// Adds a descriptor to the set that a sleeping loop waits on; closing it takes it out again.
pub(crate) fn watch(set: &OwnedFd, fd: BorrowedFd<'_>) -> std::io::Result<()> {
    add(set, fd, OTHER)
}

/// As [`watch`], for an attachment's end.
pub(crate) fn watch_end(set: &OwnedFd, attachment: AttachmentId, fd: BorrowedFd<'_>) -> std::io::Result<()> {
    add(set, fd, attachment.0)
}

fn add(set: &OwnedFd, fd: BorrowedFd<'_>, number: u64) -> std::io::Result<()> {
    Ok(epoll::add(set, fd, epoll::EventData::new_u64(number), epoll::EventFlags::IN)?)
}

/// Sleeps until a descriptor of the set is ready, or so long. An interrupted sleep is a short one.
pub(crate) fn sleep(set: &OwnedFd, timeout: Option<&Timespec>) -> Woken {
    let mut ready = [MaybeUninit::uninit(); MOST_WOKEN];
    let mut woken = Woken::default();
    if let Ok((events, _)) = epoll::wait(set, &mut ready, timeout) {
        for (place, event) in woken.0.iter_mut().zip(events) {
            *place = Some(event.data.u64());
        }
    }
    woken
}
