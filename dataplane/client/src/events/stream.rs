//! Events as a stream, for programs that run on tokio.

use super::Events;
use crate::{Error, EventBatch, EventCursor};
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::Handle;
use tokio::time::Sleep;
use tokio_stream::Stream;

/// How long the agent is asked to wait for events. A reader that comes after this one waits for its turn so long at most.
const WAIT: Duration = Duration::from_secs(3);

fn system(source: std::io::Error) -> Error {
    Error::System { call: "epoll", source }
}

/// The tenant's events as a stream of batches, each with at least one event or with how many were missed. After an error it ends: who
/// wants to go on makes another from [`EventStream::cursor`]. It waits where it has asked too often. Threads may use the attachment meanwhile as they like.
///
/// ```no_run
/// # use harmonaize_client::{AttachOptions, Client, Error};
/// use tokio_stream::StreamExt;
///
/// # async fn follow() -> Result<(), Error> {
/// # let client = Client::attach("/run/harmonaize/tenant.sock", AttachOptions::default())?;
/// let mut events = client.events(None).into_stream()?;
/// while let Some(batch) = events.next().await {
///     for event in batch?.events {
///         println!("{}: {:?}", event.communicator, event.kind);
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct EventStream {
    events: Events,
    session: AsyncFd<OwnedFd>,
    /// What the agent is to answer, and whether another reader has asked it.
    request: Option<(u64, bool)>,
    /// Until the agent may be asked again.
    pause: Option<Pin<Box<Sleep>>>,
    runtime: Handle,
    ended: bool,
}

impl Events {
    /// The same as a stream. It needs no thread: tokio watches the session's descriptor.
    ///
    /// # Errors
    /// [`Error::System`] outside of a tokio runtime, or if the descriptor cannot be watched.
    ///
    /// # Panics
    /// In a tokio runtime that was built without I/O or time.
    pub fn into_stream(self) -> Result<EventStream, Error> {
        let none = |error| system(std::io::Error::other(error));
        let runtime = Handle::try_current().map_err(none)?;
        let session = self.shared.session().map_err(system)?;
        #[expect(
            deprecated,
            reason = "for descriptors that are not owned; the one that takes its place is unsafe"
        )]
        let session = AsyncFd::with_interest(session, Interest::READABLE).map_err(system)?;
        Ok(EventStream { events: self, session, request: None, pause: None, runtime, ended: false })
    }
}

impl EventStream {
    /// As [`Events::cursor`].
    pub fn cursor(&self) -> Option<EventCursor> {
        self.events.cursor()
    }

    fn poll_batch(&mut self, context: &mut Context<'_>) -> Poll<Result<EventBatch, Error>> {
        loop {
            if let Some(pause) = &mut self.pause {
                ready!(pause.as_mut().poll(context));
                self.pause = None;
            }
            let (id, stale) = match self.request {
                Some(asked) => asked,
                None => *self.request.insert(self.events.ask(WAIT)?),
            };
            let Poll::Ready(answer) = self.events.shared.poll_answer(context, id) else {
                // All that had come has been looked at. What has come since is looked at once more.
                ready!(self.session.poll_read_ready(context)).map_err(system)?.clear_ready();
                continue;
            };
            self.request = None;
            let answer = answer?;
            if stale {
                continue;
            }
            let batch = match self.events.took(answer) {
                Err(Error::TooOften { retry_after: again }) => {
                    let _inside = self.runtime.enter();
                    self.pause = Some(Box::pin(tokio::time::sleep(again)));
                    continue;
                }
                batch => batch?,
            };
            if batch.missed > 0 || !batch.events.is_empty() {
                return Poll::Ready(Ok(batch));
            }
        }
    }
}

impl Stream for EventStream {
    type Item = Result<EventBatch, Error>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        if this.ended {
            return Poll::Ready(None);
        }
        let batch = ready!(this.poll_batch(context));
        this.ended = batch.is_err();
        Poll::Ready(Some(batch))
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        if let Some((id, _)) = self.request
            && let Ok(mut state) = self.events.shared.lock()
        {
            state.abandoned = Some(id);
        }
    }
}
