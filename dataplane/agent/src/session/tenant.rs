//! What a tenant's connections and attachments hold together, counted against its quota, and how often they may ask.

use super::TenantRules;
use super::rdma::Rdma;
use super::request_quota::RequestQuota;
use harmonaize_abi::session::{RefusalKind, Refused, RegionRefused, RequestError};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Instant;
use tokio::sync::watch;

/// Connections that may be shaking hands beyond a tenant's attachments.
const HANDSHAKES: u32 = 16;

/// What a tenant's attachments hold together.
#[derive(Debug, Default)]
struct Usage {
    connections: u32,
    attachments: u32,
    arena_bytes: u64,
    /// Beside arenas.
    regions: u32,
}

/// Whether a tenant's connections go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    /// They do.
    Served,
    /// They end: the tenant is served here no longer.
    Removed,
    /// They end: the agent goes down.
    AgentStops,
}

/// A tenant with what its connections need, however they came.
#[derive(Debug)]
pub(super) struct Tenant {
    pub(super) name: String,
    /// Those in force. What was granted by others before stays.
    rules: RwLock<Arc<TenantRules>>,
    life: watch::Sender<Life>,
    pub(super) rdma: Option<Arc<Rdma>>,
    usage: Mutex<Usage>,
    /// Outlives attachments, so that attaching anew gains nothing.
    requests: Mutex<RequestQuota>,
}

/// A part of a tenant's quota, given back when dropped.
#[derive(Debug)]
pub(super) struct Grant {
    tenant: Arc<Tenant>,
    part: Usage,
}

impl Drop for Grant {
    fn drop(&mut self) {
        let mut held = self.tenant.usage();
        held.connections -= self.part.connections;
        held.attachments -= self.part.attachments;
        held.arena_bytes -= self.part.arena_bytes;
        held.regions -= self.part.regions;
    }
}

impl Tenant {
    pub(super) fn new(rules: TenantRules, rdma: Option<Arc<Rdma>>) -> Arc<Self> {
        Arc::new(Self {
            name: rules.tenant.clone(),
            rules: RwLock::new(Arc::new(rules)),
            life: watch::Sender::new(Life::Served),
            rdma,
            usage: Mutex::default(),
            requests: Mutex::default(),
        })
    }

    /// The rules in force.
    pub(super) fn rules(&self) -> Arc<TenantRules> {
        Arc::clone(&self.rules.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// From now on these are in force.
    pub(super) fn set_rules(&self, rules: TenantRules) {
        *self.rules.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(rules);
    }

    /// Ends all connections.
    pub(super) fn end(&self, life: Life) {
        self.life.send_replace(life);
    }

    /// Completes once its connections are to end: why.
    pub(super) async fn ended(self: Arc<Self>) -> Life {
        let mut life = self.life.subscribe();
        let ended = life.wait_for(|life| *life != Life::Served).await;
        ended.map_or(Life::AgentStops, |life| *life)
    }

    fn usage(&self) -> std::sync::MutexGuard<'_, Usage> {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes note of a question for control; why it is not passed on, if it is one too many of all that the tenant asks here.
    pub(super) fn admit_request(&self, now: Instant) -> Result<(), RequestError> {
        let attachments = self.usage().attachments;
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).take(now, attachments)
    }

    /// Room for a connection, or why there is none.
    pub(super) fn connection(self: &Arc<Self>) -> Result<Grant, Refused> {
        let mut held = self.usage();
        let most = self.rules().quota.attachments.saturating_add(HANDSHAKES);
        if held.connections >= most {
            let text = format!("{most} connections are open; close some");
            return Err(Refused { kind: RefusalKind::Attachments, text });
        }
        held.connections += 1;
        Ok(Grant { tenant: Arc::clone(self), part: Usage { connections: 1, ..Usage::default() } })
    }

    /// Room for an attachment with an arena of this size, or why there is none.
    pub(super) fn attachment(self: &Arc<Self>, arena_bytes: u64) -> Result<Grant, Refused> {
        let (mut held, quota) = (self.usage(), self.rules().quota);
        if held.attachments >= quota.attachments {
            let text = format!("{} attachments are open, as many as this tenant may have", held.attachments);
            return Err(Refused { kind: RefusalKind::Attachments, text });
        }
        let left = quota.arena_bytes.saturating_sub(held.arena_bytes);
        if arena_bytes == 0 || arena_bytes > left {
            let text = format!(
                "an arena of {arena_bytes} bytes was asked for; 1 to {left} are possible (this tenant may have {} in all)",
                quota.arena_bytes
            );
            return Err(Refused { kind: RefusalKind::Arena, text });
        }
        held.attachments += 1;
        held.arena_bytes += arena_bytes;
        Ok(Grant {
            tenant: Arc::clone(self),
            part: Usage { attachments: 1, arena_bytes, ..Usage::default() },
        })
    }

    /// Room for a region of this size beside an arena, or why there is none.
    pub(super) fn region(self: &Arc<Self>, bytes: u64) -> Result<Grant, RegionRefused> {
        let (mut held, quota) = (self.usage(), self.rules().quota);
        let (limit, left) = (quota.arena_bytes, quota.arena_bytes.saturating_sub(held.arena_bytes));
        if bytes > left {
            return Err(RegionRefused::Bytes { asked: bytes, left, limit });
        }
        if held.regions >= quota.regions {
            return Err(RegionRefused::Regions { limit: quota.regions });
        }
        held.arena_bytes += bytes;
        held.regions += 1;
        let part = Usage { arena_bytes: bytes, regions: 1, ..Usage::default() };
        Ok(Grant { tenant: Arc::clone(self), part })
    }
}
