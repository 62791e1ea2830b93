//! The tenant's events: what the provider tells of the network while collectives run.

use crate::attach::Client;
use crate::shared::Shared;
use crate::{Error, EventBatch, EventCursor, ProtocolError, RequestKind};
use harmonaize_abi::session::{ALL_EVENTS, Answer, Request};
use std::sync::Arc;
use std::time::{Duration, Instant};

#[cfg(feature = "async")]
mod stream;

#[cfg(feature = "async")]
pub use stream::EventStream;

/// How much longer than asked the answer may take: the provider is asked over the network.
const GRACE: Duration = Duration::from_secs(5);

/// For so long a poll that found nothing stands for the next. A job may poll in each of its steps, however short they are.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// A reader of the tenant's events, over all its communicators, also those of other processes.
///
/// ```no_run
/// # use harmonaize_client::{AttachOptions, Client};
/// # use std::time::Duration;
/// # fn main() -> Result<(), harmonaize_client::Error> {
/// # let client = Client::attach("/run/harmonaize/tenant.sock", AttachOptions::default())?;
/// let mut events = client.events(None);
/// loop {
///     for event in events.read(Duration::from_secs(60))?.events {
///         println!("{}: {:?}", event.communicator, event.kind);
///     }
/// }
/// # }
/// ```
#[derive(Debug)]
pub struct Events {
    shared: Arc<Shared>,
    cursor: Option<EventCursor>,
    /// When it last found nothing, and where it stood.
    nothing: Option<(Instant, EventCursor)>,
}

impl Client {
    /// A reader that goes on from `from`, where another one [stood](Events::cursor), maybe in another process. Without `from`, it
    /// begins with what happens after its first [`Events::read`]. One reader of an attachment can wait at a time.
    pub fn events(&self, from: Option<EventCursor>) -> Events {
        Events { shared: Arc::clone(self.shared()), cursor: from, nothing: None }
    }
}

impl Events {
    /// Where this reader stands: kept, it lets a later one go on there. None before the first read has returned.
    pub fn cursor(&self) -> Option<EventCursor> {
        self.cursor
    }

    /// The next events. Returns as soon as there are some, or without any after `wait`; a `wait` of zero looks and returns, and within
    /// 50 ms of a look that found nothing returns at once. The batch says how many were missed because the reader came too late for them.
    ///
    /// # Errors
    /// [`Error::Events`] where the cursor is not of this tenant's feed (then begin without one), the provider cannot tell now, or
    /// another reader of this attachment waits; [`Error::TooOften`] where the tenant has asked the provider too much and `wait` is
    /// over before it may again. The reader stands where it stood.
    pub fn read(&mut self, wait: Duration) -> Result<EventBatch, Error> {
        if let Some((_, cursor)) =
            self.nothing.filter(|(at, _)| wait.is_zero() && at.elapsed() < POLL_INTERVAL)
        {
            return Ok(EventBatch { missed: 0, events: Vec::new(), cursor });
        }
        let until = Instant::now().checked_add(wait);
        loop {
            let left = until.map_or(wait, |until| until.saturating_duration_since(Instant::now()));
            let (id, stale) = self.ask(left)?;
            let deadline = Instant::now().checked_add(left).and_then(|at| at.checked_add(GRACE));
            let Some(answer) = self.shared.wait(deadline, |state| state.answer(id))? else {
                self.shared.lock()?.abandoned = Some(id);
                return Err(Error::Events(format!("no answer from the agent within {GRACE:?}")));
            };
            if stale {
                continue;
            }
            let answer = match self.took(answer) {
                Err(Error::TooOften { retry_after: again }) if !left.is_zero() => {
                    std::thread::sleep(again.min(left));
                    continue;
                }
                answer => answer?,
            };
            // The provider ends long waits by itself.
            let over = until.is_some_and(|until| Instant::now() >= until);
            if over || wait.is_zero() || answer.missed > 0 || !answer.events.is_empty() {
                return Ok(answer);
            }
        }
    }

    /// The number of the request to be answered next, and whether a reader before this one left it. The answer to such a one is
    /// nobody's, and then it is to be asked again.
    fn ask(&self, wait: Duration) -> Result<(u64, bool), Error> {
        let mut state = self.shared.lock()?;
        if let Some(id) = state.abandoned.take() {
            return Ok((id, true));
        }
        let (from, wait_ns) = (self.cursor, u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX));
        state.request(|id| Request::Events { id: id | ALL_EVENTS, from, wait_ns }).map(|id| (id, false))
    }

    /// Goes on from what the agent answered.
    fn took(&mut self, answer: Answer) -> Result<EventBatch, Error> {
        let read: Result<EventBatch, _> = match answer {
            Answer::AllEvents { read, .. } => read.map(Into::into),
            // An agent of release 0.1.0.
            Answer::Events { read, .. } => read.map(Into::into),
            _ => return Err(ProtocolError::Unexpected(RequestKind::Events).into()),
        };
        let batch = read.map_err(|why| Error::from_request_error(why, Error::Events))?;
        self.cursor = Some(batch.cursor);
        let nothing = batch.missed == 0 && batch.events.is_empty();
        self.nothing = nothing.then(|| (Instant::now(), batch.cursor));
        Ok(batch)
    }
}
