//! The end of a communicator whose work has panicked.

use super::Engine;
use crate::command::Notice;
use crate::communicator_state::CommunicatorState;
use crate::containment::{PanicScope, Panicked, Task, contain, describe, guarded, note_event};
use crate::table::Key;
use harmonaize_abi::{ABI_VERSION, CommunicatorId, Completion, Epoch, Status as Code};
use harmonaize_core::{Control, Failure, Header, Kind, MAX_MESSAGE, Message};
use harmonaize_shm::EndError;
use harmonaize_transport::LinkId;
use std::time::Duration;

/// How long the agent may take to say that a process is gone, whose end of the rings is closed.
const DETACH_TIMEOUT: Duration = Duration::from_secs(1);

impl Engine {
    /// Does work for a communicator that takes more of the engine than its state. Returns none if the work has panicked.
    pub(super) fn contain<R>(
        &mut self,
        (key, task): (Key, Task),
        work: impl FnOnce(&mut Self) -> R,
    ) -> Option<R> {
        note_event(&mut self.communicators, &mut self.aftermath, (key, task));
        match guarded(task, || work(self)) {
            Ok(done) => Some(done),
            Err(cause) => {
                self.aftermath.panicked.push(Panicked::new(&mut self.communicators, (key, task), &*cause));
                None
            }
        }
    }

    /// Does the same work for each communicator.
    pub(super) fn for_each_communicator(&mut self, task: Task, mut work: impl FnMut(&mut CommunicatorState)) {
        for place in 0..self.communicators.places() {
            let Some(key) = self.communicators.key_at(place) else { continue };
            contain(&mut self.communicators, &mut self.aftermath, (key, task), &mut work);
        }
    }

    /// Does work on an attachment's rings. It is let go if that fails or panics; then none is returned.
    pub(super) fn rings<R>(
        &mut self,
        key: Key,
        work: impl FnOnce(&mut Self) -> Result<R, EndError>,
    ) -> Option<R> {
        let reason = match guarded(Task::Rings, || work(self)) {
            Ok(Ok(done)) => return Some(done),
            Ok(Err(EndError::Closed)) if self.awaits_detach(key) => return None,
            Ok(Err(error)) => error.to_string(),
            Err(cause) => {
                let reason = describe(Task::Rings, &*cause);
                self.pending_transfers.clear();
                self.log_panic(PanicScope::Attachment, reason.clone());
                reason
            }
        };
        self.broken.push((key, reason));
        None
    }

    /// Whether an attachment whose other side is gone stays a while. The agent has what the process asked last, such as an abort, and says
    /// after that that it is gone.
    fn awaits_detach(&mut self, key: Key) -> bool {
        let now = self.now();
        let attachment = self.attachments.get_mut(key);
        attachment.is_some_and(|attachment| now < attachment.closed.get_or_insert(now).after(DETACH_TIMEOUT))
    }

    /// Ends what has panicked. Returns how many communicators.
    ///
    /// Cost: a look at an empty list, where nothing has.
    pub(super) fn end_panicked(&mut self) -> usize {
        let mut count = 0;
        while let Some(panicked) = self.aftermath.panicked.pop() {
            self.end_one(panicked);
            count += 1;
        }
        count
    }

    /// Ends a communicator from what the engine knows of it. Of its state it reads only what never changes, and the list of
    /// calls.
    fn end_one(&mut self, panicked: Panicked) {
        let Panicked { key, remains, reason } = panicked;
        // A transfer that was not handed on is of this communicator.
        self.pending_transfers.clear();
        let id = self.by_communicator.iter().find(|(_, of)| **of == key).map(|(id, _)| *id);
        let Some(communicator) = id.or_else(|| remains.as_ref().map(|remains| remains.id)) else {
            return self.log_panic(PanicScope::Communicator, reason);
        };
        self.log_panic(PanicScope::Communicator, format!("communicator {:016x} {reason}", communicator.0));
        self.by_communicator.remove(&communicator);
        let ranks =
            remains.iter().flat_map(|remains| remains.locals.iter().map(|local| local.rank)).collect();
        let failure = Failure::Internal { ranks };
        // Links go first: once a tenant hears of the end, its tensors are its own again.
        self.abort_links(key, &failure);
        let ended = remains.as_ref().is_some_and(|remains| remains.ended);
        let calls: Vec<_> = remains
            .iter()
            .flat_map(|remains| remains.outstanding())
            .map(|(local, cookie)| (*local, cookie))
            .collect();
        if guarded(Task::Turn, move || drop(remains)).is_err() {
            tracing::error!(
                communicator = communicator.0,
                "what was left of a communicator panicked as it went"
            );
        }
        self.attachments.iter_mut().for_each(|attachment| attachment.mark_ended(key, Code::Internal));
        for (local, cookie) in calls {
            let completion = Completion {
                version: ABI_VERSION,
                status: Code::Internal.code(),
                communicator: local.handle.0,
                cookie: cookie.0,
                ..Completion::default()
            };
            self.report(local.attachment, &completion);
            self.rings(local.attachment, |engine| {
                engine.attachments.get_mut(local.attachment).map_or(Ok(()), |attachment| attachment.flush())
            });
        }
        if !ended {
            (self.notify)(Notice::Ended { communicator, failure, detail: reason });
        }
    }

    /// Tells peers over each link of a communicator that it has ended, and closes the links. A peer that the word does not reach sees the
    /// link's end.
    fn abort_links(&mut self, key: Key, failure: &Failure) {
        let links = self.links.iter().filter(|(_, (of, ..))| *of == key);
        let links: Vec<(LinkId, Epoch)> = links.map(|(link, (_, epoch, _))| (*link, *epoch)).collect();
        for (link, epoch) in links {
            let control = Some(Box::new(Control::Abort { failure: failure.clone() }));
            let mut buffer = [0; MAX_MESSAGE];
            let used = Message { header: Header::new(Kind::Control, epoch), control }.encode(&mut buffer);
            let sent = self.transport.send(link, 0, buffer.get(..used).unwrap_or(&[]), None);
            tracing::debug!(?link, ?sent, "the link of a communicator that has panicked");
            self.links.remove(&link);
            self.transport.close(link);
        }
        self.closed = self.now();
    }

    /// Logs a panic that one communicator or attachment pays for, and has it counted.
    pub(super) fn log_panic(&mut self, scope: PanicScope, reason: String) {
        tracing::error!(?scope, "contained: {reason}");
        (self.notify)(Notice::Panicked { scope, reason });
    }

    /// Does work for the communicator that a command names, unless there is none. Returns none if the work has panicked.
    pub(super) fn with_member<R>(
        &mut self,
        communicator: CommunicatorId,
        work: impl FnOnce(&mut CommunicatorState) -> R,
    ) -> Option<R> {
        let key = *self.by_communicator.get(&communicator)?;
        contain(&mut self.communicators, &mut self.aftermath, (key, Task::Command), work)
    }
}
