//! Requests of tenants that wait until the queue to control has room.
//!
//! Only what asks something of control waits. Attaching, detaching, aborting, memory and the reason of a failure need no control, and
//! pass it by. What they make the agent say to control is bounded by joins that were let through before.

use crate::session::{AttachmentId, SessionRequest};
use harmonaize_abi::CommunicatorHandle;
use std::collections::VecDeque;

/// Requests that wait at most, of all tenants.
const MAX_WAITING: usize = 1024;

/// Requests of one tenant that wait at most: a quarter, so that no tenant has all places.
const TENANT_SHARE: usize = MAX_WAITING / 4;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Backlog(VecDeque<Waiting>);

/// A request that waits.
#[derive(Debug)]
struct Waiting {
    /// Whose it is.
    tenant: String,
    request: SessionRequest,
}

impl Backlog {
    /// Whether nothing waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a request is to wait. `room`: whether the queue to control has room.
    ///
    /// Cost: a look at each that waits.
    pub(crate) fn delays(&self, request: &SessionRequest, room: bool) -> bool {
        match request {
            SessionRequest::Join { .. }
            | SessionRequest::Regroup { .. }
            | SessionRequest::Split { .. }
            | SessionRequest::SetBudget { .. }
            | SessionRequest::Ask { .. } => !room || !self.is_empty(),
            // It does not overtake what the same process asked before.
            SessionRequest::Leave { attachment, .. } => {
                self.0.iter().any(|waiting| waiting.request.attachment() == *attachment)
            }
            SessionRequest::Attached { .. }
            | SessionRequest::AddRegion { .. }
            | SessionRequest::RemoveRegion { .. }
            | SessionRequest::Abort { .. }
            | SessionRequest::Detail { .. }
            | SessionRequest::Detached { .. } => false,
        }
    }

    /// Has a request wait behind the others. Returns it if its tenant, or all together, have as many there as they may.
    ///
    /// A budget takes the place of the one that its rank set before, so that of each rank one waits at most. Budgets and leaving are
    /// never returned.
    pub(crate) fn push(&mut self, tenant: &str, request: SessionRequest) -> Option<SessionRequest> {
        if let Some(rank) = rank_of_budget(&request) {
            self.0.retain(|waiting| rank_of_budget(&waiting.request) != Some(rank));
        } else if !matches!(request, SessionRequest::Leave { .. }) {
            let own = self.0.iter().filter(|waiting| waiting.tenant == tenant).count();
            if own >= TENANT_SHARE || self.0.len() >= MAX_WAITING {
                return Some(request);
            }
        }
        self.0.push_back(Waiting { tenant: tenant.to_owned(), request });
        None
    }

    /// Returns the request that has waited longest; it waits no more.
    pub(crate) fn pop(&mut self) -> Option<SessionRequest> {
        self.0.pop_front().map(|waiting| waiting.request)
    }

    /// Drops what waits of an attachment that has ended: nobody waits for an answer.
    pub(crate) fn forget(&mut self, attachment: AttachmentId) {
        self.0.retain(|waiting| waiting.request.attachment() != attachment);
    }
}

/// Returns the attachment and communicator whose budget a request sets.
fn rank_of_budget(request: &SessionRequest) -> Option<(AttachmentId, CommunicatorHandle)> {
    match request {
        SessionRequest::SetBudget { attachment, communicator, .. } => Some((*attachment, *communicator)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_abi::session::{Budget, Regrouping};
    use std::time::Duration;
    use tokio::sync::oneshot;

    fn regroup(attachment: u64) -> SessionRequest {
        SessionRequest::Regroup {
            attachment: AttachmentId(attachment),
            who: Regrouping::Newcomer { name: "job".into() },
            key: 0,
            min_ranks: 1,
            timeout: Duration::from_secs(1),
            reply: oneshot::channel().0,
        }
    }

    fn set_budget(attachment: u64, communicator: u32, most: f64) -> SessionRequest {
        let (attachment, budget) = (AttachmentId(attachment), Budget::Vnmse(most));
        let communicator = CommunicatorHandle(communicator);
        SessionRequest::SetBudget { attachment, communicator, budget }
    }

    fn leave(attachment: u64) -> SessionRequest {
        SessionRequest::Leave { attachment: AttachmentId(attachment), communicator: CommunicatorHandle(1) }
    }

    #[test]
    fn one_tenant_fills_its_share_alone() {
        let mut backlog = Backlog::default();
        let waits = |backlog: &mut Backlog, tenant: &str| {
            (0..2 * MAX_WAITING).take_while(|_| backlog.push(tenant, regroup(1)).is_none()).count()
        };
        assert_eq!(waits(&mut backlog, "a"), TENANT_SHARE);
        assert_eq!(["b", "c", "d", "e"].map(|tenant| waits(&mut backlog, tenant)), [256, 256, 256, 0]);
        assert!(backlog.push("a", leave(1)).is_none() && backlog.push("a", set_budget(1, 1, 0.5)).is_none());
        backlog.forget(AttachmentId(1));
        assert!(backlog.is_empty());
    }

    #[test]
    fn the_last_budget_of_a_rank_waits_alone() {
        let mut backlog = Backlog::default();
        for (attachment, communicator, most) in [(1, 1, 0.1), (1, 2, 0.2), (2, 1, 0.3), (1, 1, 0.4)] {
            assert!(backlog.push("a", set_budget(attachment, communicator, most)).is_none());
        }
        let mut left = Vec::new();
        while let Some(request) = backlog.pop() {
            let SessionRequest::SetBudget { attachment, communicator, budget } = request else { panic!() };
            left.push((attachment.0, communicator.0, budget));
        }
        let [b2, b3, b4] = [0.2, 0.3, 0.4].map(Budget::Vnmse);
        assert_eq!(left, [(1, 2, b2), (2, 1, b3), (1, 1, b4)]);
    }

    #[test]
    fn leaving_waits_behind_its_own_process_alone() {
        let mut backlog = Backlog::default();
        assert!(!backlog.delays(&leave(1), false));
        assert!(backlog.push("a", regroup(1)).is_none());
        assert!(backlog.delays(&leave(1), true) && !backlog.delays(&leave(2), false));
        assert!(backlog.delays(&regroup(2), true), "nobody overtakes those that wait");
        let detached = SessionRequest::Detached { attachment: AttachmentId(1) };
        assert!(!backlog.delays(&detached, false));
    }
}
