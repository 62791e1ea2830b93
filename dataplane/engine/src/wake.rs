//! The set of descriptors that a sleeping loop waits on.

use crate::command::AttachmentId;
use rustix::event::{Timespec, epoll};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

/// The most descriptors that one sleep reports; others that are ready end the next one at once.
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

/// From now on a descriptor of [`watch`] ends sleeps, or does not.
pub(crate) fn attend(set: &OwnedFd, fd: BorrowedFd<'_>, attends: bool) -> std::io::Result<()> {
    let flags = if attends { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
    Ok(epoll::modify(set, fd, epoll::EventData::new_u64(OTHER), flags)?)
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

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use std::os::fd::AsFd;

    #[test]
    fn ends_beyond_one_sleeps_report_are_in_the_next() {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let ends: Vec<OwnedFd> = (0..2 * MOST_WOKEN as u64)
            .map(|number| {
                let end = eventfd(1, EventfdFlags::CLOEXEC).unwrap();
                watch_end(&set, AttachmentId(number), end.as_fd()).unwrap();
                end
            })
            .collect();
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let woken = [(); 2].map(|()| sleep(&set, Some(&at_once)));
        let reported = |number| woken.iter().any(|woken| woken.contains(AttachmentId(number)));
        assert!((0..ends.len() as u64).all(reported), "{woken:?}");
    }
}
