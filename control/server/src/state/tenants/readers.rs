//! Tenants' processes that wait for events, by the agents' sessions that ask for them.

use crate::state::output::SessionId;
use harmonaize_abi::session::EventCursor;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Most readers of one tenant on one agent that wait at once.
pub(super) const MOST_READERS: usize = 1024;

/// One that waits.
#[derive(Debug)]
pub(super) struct Reader {
    pub(super) tenant: String,
    pub(super) from: EventCursor,
    /// How long it waits.
    pub(super) until: Duration,
}

/// All that wait, by the session and the number of its question.
#[derive(Debug, Default)]
pub(super) struct Readers {
    waiting: BTreeMap<(SessionId, u64), Reader>,
    /// The same by their ends.
    ends: BTreeSet<(Duration, SessionId, u64)>,
    /// How many of a tenant's wait on a session.
    counts: BTreeMap<(SessionId, String), usize>,
}

impl Readers {
    /// Whether a session's question waits.
    pub(super) fn waits(&self, session: SessionId, request: u64) -> bool {
        self.waiting.contains_key(&(session, request))
    }

    /// Whether one more of a tenant's may wait on a session.
    pub(super) fn has_room(&self, session: SessionId, tenant: &str) -> bool {
        self.counts.get(&(session, tenant.to_owned())).is_none_or(|count| *count < MOST_READERS)
    }

    /// One more waits.
    pub(super) fn add(&mut self, session: SessionId, request: u64, reader: Reader) {
        self.remove(session, request);
        *self.counts.entry((session, reader.tenant.clone())).or_default() += 1;
        self.ends.insert((reader.until, session, request));
        self.waiting.insert((session, request), reader);
    }

    /// One waits no longer.
    pub(super) fn remove(&mut self, session: SessionId, request: u64) {
        let Some(Reader { tenant, until, .. }) = self.waiting.remove(&(session, request)) else { return };
        self.ends.remove(&(until, session, request));
        if let std::collections::btree_map::Entry::Occupied(mut count) = self.counts.entry((session, tenant))
        {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }

    /// None of a session's waits any longer.
    pub(super) fn forget(&mut self, session: SessionId) {
        let gone = self.waiting.range((session, 0)..=(session, u64::MAX)).map(|((_, request), _)| *request);
        gone.collect::<Vec<_>>().into_iter().for_each(|request| self.remove(session, request));
    }

    /// Takes out the readers that `answer` has something for, given the number of the question. It asks for all, or for those that have
    /// waited until `late`.
    pub(super) fn answer<T>(
        &mut self,
        late: Option<Duration>,
        mut answer: impl FnMut(u64, &Reader) -> Option<T>,
    ) -> Vec<(SessionId, T)> {
        let keys: Vec<(SessionId, u64)> = match late {
            Some(late) => {
                let ends = self.ends.iter().take_while(|(until, ..)| *until <= late);
                ends.map(|(_, session, request)| (*session, *request)).collect()
            }
            None => self.waiting.keys().copied().collect(),
        };
        let answers = keys.into_iter().filter_map(|(session, request)| {
            let reader = self.waiting.get(&(session, request))?;
            answer(request, reader).map(|answer| (session, request, answer))
        });
        let answers: Vec<_> = answers.collect();
        answers.iter().for_each(|(session, request, _)| self.remove(*session, *request));
        answers.into_iter().map(|(session, _, answer)| (session, answer)).collect()
    }

    /// When the first has waited long enough.
    pub(super) fn next_timeout(&self) -> Option<Duration> {
        self.ends.first().map(|(until, ..)| *until)
    }
}
