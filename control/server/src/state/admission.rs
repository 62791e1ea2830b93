//! Who may join: tenants and names, and joins that are refused or over.

use super::{SessionId, State};
use harmonaize_api::v1::{self, JoinRefusedKind, to_agent};
use harmonaize_disclose::{JoinFailure, disclose_join};

/// Most bytes of a communicator's name.
const NAME_BYTES: usize = 128;

impl State {
    /// Whether there is such a tenant, and it can name a communicator so.
    pub(super) fn check_names(
        &self,
        tenant: &String,
        name: &str,
    ) -> Result<(), (JoinRefusedKind, JoinFailure)> {
        if !self.settings.tenants.contains(tenant) {
            return Err((JoinRefusedKind::UnknownTenant, JoinFailure::UnknownTenant));
        }
        if name.is_empty() || name.len() > NAME_BYTES || name.chars().any(char::is_control) {
            return Err((JoinRefusedKind::Invalid, JoinFailure::BadName { max: NAME_BYTES }));
        }
        Ok(())
    }

    /// An agent's open join is over; which one it was.
    pub(super) fn forget_join(
        &mut self,
        session: SessionId,
        request: u64,
    ) -> Option<((String, String), Option<u32>)> {
        self.sessions.get_mut(&session)?.joins.remove(&request)
    }

    pub(super) fn refuse_join(
        &mut self,
        to: SessionId,
        request: u64,
        kind: JoinRefusedKind,
        failure: &JoinFailure,
    ) {
        let told = disclose_join(failure);
        let ranks = told.ranks.iter().map(|rank| rank.0).collect();
        let refused = v1::JoinRefused { request, kind: kind.into(), text: told.text, ranks };
        self.send(to, to_agent::Message::JoinRefused(refused));
    }
}
