//! All communicators, and when something of each is due.

use crate::state::job::communicator::Communicator;
use crate::state::output::SessionId;
use crate::state::timed::{Due, Timed};
use harmonaize_abi::CommunicatorId;
use std::time::Duration;

/// Communicators by id.
pub(crate) type Communicators = Timed<CommunicatorId, Communicator>;

impl Due for Communicator {
    fn next_timeout(&self) -> Option<Duration> {
        Self::next_timeout(self)
    }
}

impl Communicators {
    /// Waits until then for an agent whose session has ended: in communicators that are in use data go on.
    /// Returns how many those are, and the others, which form, with its ranks.
    pub(crate) fn await_agent(
        &mut self,
        session: SessionId,
        until: Duration,
    ) -> (usize, Vec<(CommunicatorId, Vec<u32>)>) {
        let (mut in_use, mut forming) = (0, Vec::new());
        let theirs = self.iter().filter(|(_, communicator)| communicator.index_of(session).is_some());
        for id in theirs.map(|(id, _)| *id).collect::<Vec<_>>() {
            let Some(communicator) = self.get_mut(&id) else { continue };
            let forms = communicator.is_forming();
            let member = communicator.members.iter_mut().find(|member| member.session == Some(session));
            let Some(member) = member.filter(|member| !member.closed) else { continue };
            if forms {
                forming.push((id, member.ranks.clone()));
            } else {
                (member.session, member.lease) = (None, Some(until));
                in_use += 1;
            }
        }
        (in_use, forming)
    }
}
