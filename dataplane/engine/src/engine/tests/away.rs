//! A hand-over while a transfer for an aggregator waits for a process that has not come.

use super::common::{ARENA, SMALL, World, distant, loopback};
use crate::aggregated::Purpose;
use crate::transfer::{PendingTransfer, tag};
use crate::{Command, Notice};
use harmonaize_abi::{ChannelId, Completion, SegmentId, Submission, Tag};
use harmonaize_shm::{AgentEnd, EndError, InheritedEnd, Memory, Regions, Span};
use std::os::fd::BorrowedFd;

/// An end whose process has not come.
#[derive(Debug)]
struct Awaited(Box<dyn AgentEnd>);

impl AgentEnd for Awaited {
    fn submission(&mut self) -> Result<Option<Submission>, EndError> {
        self.0.submission()
    }

    fn complete(&mut self, completion: &Completion) -> Result<(), EndError> {
        self.0.complete(completion)
    }

    fn memory(&self) -> Option<&Regions> {
        None
    }

    fn arena_bytes(&self) -> u64 {
        self.0.arena_bytes()
    }

    fn entries(&self) -> u32 {
        self.0.entries()
    }

    fn hand_over(&self) -> Result<InheritedEnd, EndError> {
        self.0.hand_over()
    }

    fn is_away(&self) -> bool {
        true
    }

    fn fetch(&mut self, _: Tag, _: u64, _: Span) -> Result<(), EndError> {
        Err(EndError::Full)
    }

    fn store(&mut self, _: Tag, _: Span, _: u64) -> Result<(), EndError> {
        Err(EndError::Full)
    }

    fn progress(&mut self, done: &mut dyn FnMut(Tag)) -> Result<usize, EndError> {
        self.0.progress(done)
    }

    fn flush(&mut self) -> Result<(), EndError> {
        self.0.flush()
    }

    fn prepare_sleep(&mut self) -> bool {
        self.0.prepare_sleep()
    }

    fn cancel_sleep(&mut self, woken: bool) {
        self.0.cancel_sleep(woken);
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.0.wake_fd()
    }
}

/// What hosts do again is left behind. What was held is done for all others, and goes along.
#[test]
fn what_hosts_do_again_is_left_behind() {
    for (purpose, store, goes_along) in [(Purpose::Fetch, false, false), (Purpose::CopyOut, true, true)] {
        let ends = &mut |_: u32| {
            let (end, tenant) = distant(ARENA);
            (Box::new(Awaited(end)) as Box<dyn AgentEnd>, tenant)
        };
        let mut world = World::with_ends(loopback(1), &[vec![0]], SMALL, 2, None, (None, Vec::new()), ends);
        let engine = &mut world.engines[0];
        let attachment = engine.attachments.key_at(0).unwrap();
        let communicator = engine.communicators.key_at(0).unwrap();
        let channel = ChannelId(1);
        let away = &mut engine.communicators.get_mut(communicator).unwrap().away;
        let step = away[usize::from(channel.0)].begin(SegmentId(1), purpose, 1);
        let span = Span::new(&Memory::private(64).unwrap(), 0, 64).unwrap();
        let tag = tag(communicator, channel, step);
        let asked = PendingTransfer { attachment, tag, store, offset: 0, span };
        engine.attachments.get_mut(attachment).unwrap().transfer(asked).unwrap();
        engine.handle_command(Command::HandOver { thread: 0 });
        let told = world.notices[0].lock().unwrap().pop();
        let image = match told {
            Some(Notice::HandedOver { image: Ok(image), .. }) => image,
            other => panic!("{other:?}"),
        };
        assert_eq!(image.state.starts_with(&[0xff; 20]), goes_along, "{purpose:?}");
        // Called off, it goes on.
        engine.handle_command(Command::Resume);
        assert_eq!(engine.attachments.get(attachment).unwrap().waiting().count(), 1, "{purpose:?}");
    }
}
