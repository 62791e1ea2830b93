//! Which tenants agents serve beside their own.

use crate::state::ctx::Ctx;
use crate::state::effects::Effects;
use harmonaize_api::v1::{self, to_agent};
use harmonaize_store::Tenant;

/// Tells all agents which tenants they shall serve beside their own, where that was `before` and is another
/// now.
pub(crate) fn announce_tenants(ctx: &Ctx<'_>, effects: &mut Effects, before: &[Tenant]) {
    if ctx.operator.served() == before {
        return;
    }
    for (id, session) in ctx.sessions {
        let tenants = ctx.operator.served_at(&ctx.host_name(session.host));
        effects.send(*id, to_agent::Message::ServeTenants(v1::ServeTenants { tenants }));
    }
}
