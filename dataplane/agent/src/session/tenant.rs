//! What a tenant's connections and attachments hold together, counted against its quota, and how often they may ask.

use super::TenantRules;
use super::handover::Freeze;
use super::log_limit::LogLimit;
use super::rates::{Rates, TooOften};
use super::rdma::Rdma;
use super::request_quota::RequestQuota;
use crate::counters::{Counted, Counters};
use crate::telemetry::thread_time;
use harmonaize_abi::session::{RefusalKind, Refused, RegionRefused, RequestError};
use harmonaize_api::v1;
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Connections that may be shaking hands beyond a tenant's attachments.
const HANDSHAKES: u32 = 16;

/// How long an attachment waits for those before it to be gone.
const LEAVING: Duration = Duration::from_secs(1);

/// Descriptors of an attachment at most. It has its session, and four that came and belong to no request yet. Over RDMA a successor has
/// five more: a copy of the session, the completion queue's channel and a copy of it, and two by which the process comes to it. A mapped one
/// has four: for its memory, rings and doorbell, and one of memory on its way to it.
pub(crate) const ATTACHMENT_DESCRIPTORS: u32 = 10;

/// A tenant has not so much left of its quota. The text goes to the tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoRoom {
    /// Descriptors of the agent.
    #[error(
        "{more} descriptors of the agent are needed; {free} are left of the {most} that this tenant may have here; {remedy}, or have \
         the provider raise `descriptors`"
    )]
    Descriptors {
        /// How many are needed.
        more: u32,
        /// How many are left.
        free: u32,
        /// How many the tenant may have.
        most: u32,
        /// What the tenant can do.
        remedy: &'static str,
    },
    /// Memory of the agent, in bytes.
    #[error(
        "{bytes} bytes of the agent's memory are needed, {landing_bytes} for links to other hosts and {staging_bytes} for what \
         operations keep between their steps; {free} are left of the {most} that this tenant may have here; leave communicators, \
         or have the provider raise `landing`"
    )]
    Memory {
        /// How much is needed.
        bytes: u64,
        /// Of it for links.
        landing_bytes: u64,
        /// Of it for staging.
        staging_bytes: u64,
        /// How much is left.
        free: u64,
        /// How much the tenant may have.
        most: u64,
    },
}

/// What a tenant's attachments hold together.
#[derive(Debug, Default)]
struct Usage {
    connections: u32,
    attachments: u32,
    arena_bytes: u64,
    /// Beside arenas.
    regions: u32,
    /// Entries of rings.
    operations: u32,
    descriptors: u32,
    landing_bytes: u64,
    /// Of the same quota as what links receive into.
    staging_bytes: u64,
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
    /// What attachments have of it whose processes are gone.
    leaving: Mutex<Vec<Weak<Grant>>>,
    /// Outlives attachments, so that attaching anew gains nothing.
    requests: Mutex<RequestQuota>,
    rates: Mutex<Rates>,
    log: LogLimit,
    counters: Counters,
    pub(super) freeze: Arc<Freeze>,
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
        held.operations -= self.part.operations;
        held.descriptors -= self.part.descriptors;
        held.landing_bytes -= self.part.landing_bytes;
        held.staging_bytes -= self.part.staging_bytes;
    }
}

impl Tenant {
    /// Counts a message of so many bytes that one of its processes has sent. Returns until when no other is looked at, if it is not now.
    pub(super) fn read(&self, bytes: usize) -> Option<Instant> {
        self.rates().message(Instant::now(), bytes)
    }

    /// Counts processor time that its sessions have taken.
    fn spend(&self, took: Duration) {
        let quota = self.rules().quota;
        self.rates().spend(Instant::now(), took, &quota);
    }

    /// Returns until when its sessions rest, if they have taken more processor time than they may.
    pub(super) fn throttled_until(&self) -> Option<Instant> {
        let quota = self.rules().quota;
        self.rates().throttled_until(Instant::now(), &quota)
    }

    fn rates(&self) -> std::sync::MutexGuard<'_, Rates> {
        self.rates.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn new(
        rules: TenantRules,
        rdma: Option<Arc<Rdma>>,
        counters: &Counters,
        freeze: Arc<Freeze>,
    ) -> Arc<Self> {
        Arc::new(Self {
            freeze,
            name: rules.tenant.clone(),
            rules: RwLock::new(Arc::new(rules)),
            life: watch::Sender::new(Life::Served),
            rdma,
            usage: Mutex::default(),
            leaving: Mutex::default(),
            requests: Mutex::default(),
            rates: Mutex::default(),
            log: LogLimit::new(counters.clone()),
            counters: counters.clone(),
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

    /// Logs a line about the tenant, unless there are too many of them.
    pub(super) fn log(&self, line: impl FnOnce()) {
        self.log.log(self.rules().quota.log_lines, &self.name, line);
    }

    /// What the agent counts.
    pub(super) fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Takes note of a join. Fails if the tenant joins too often.
    pub(super) fn admit_join(&self, now: Instant) -> Result<(), TooOften> {
        self.rates().join(now, &self.rules().quota).inspect_err(|_| self.counters.add(Counted::JoinRefused))
    }

    /// Counts a question for control. Fails if it is one too many of all that the tenant asks here, and is not to be passed
    /// on.
    pub(super) fn admit_request(&self, now: Instant) -> Result<(), RequestError> {
        let attachments = self.usage().attachments;
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).take(now, attachments)
    }

    /// Room for a connection, or why there is none.
    pub(super) fn connection(self: &Arc<Self>, now: Instant) -> Result<Grant, Refused> {
        let attached = self.rates().attach(now, &self.rules().quota);
        if let Err(too_often) = attached {
            self.counters.add(Counted::AttachRefused);
            let text = too_often.describe("attach", "attaches");
            return Err(Refused { kind: RefusalKind::Attachments, text });
        }
        let mut held = self.usage();
        let most = self.rules().quota.attachments.saturating_add(HANDSHAKES);
        if held.connections >= most {
            let text = format!("{most} connections are open; close some");
            return Err(Refused { kind: RefusalKind::Attachments, text });
        }
        held.connections += 1;
        Ok(Grant { tenant: Arc::clone(self), part: Usage { connections: 1, ..Usage::default() } })
    }

    /// A process is gone, and the engine may have its memory still.
    pub(super) fn leaves(&self, grant: &Arc<Grant>) {
        self.leaving().push(Arc::downgrade(grant));
    }

    fn leaving(&self) -> std::sync::MutexGuard<'_, Vec<Weak<Grant>>> {
        let mut leaving = self.leaving.lock().unwrap_or_else(PoisonError::into_inner);
        leaving.retain(|grant| grant.strong_count() > 0);
        leaving
    }

    /// As [`Self::attachment`], after a moment's wait where it takes what processes that are gone had.
    pub(super) async fn attachment_when_free(
        self: &Arc<Self>,
        arena_bytes: u64,
        entries: u32,
    ) -> Result<Grant, Refused> {
        let deadline = Instant::now() + LEAVING;
        while !self.fits(arena_bytes, entries) && !self.leaving().is_empty() && Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        self.attachment(arena_bytes, entries)
    }

    /// Whether there is room for an attachment now.
    fn fits(&self, arena_bytes: u64, entries: u32) -> bool {
        let (held, quota) = (self.usage(), self.rules().quota);
        held.attachments < quota.attachments
            && arena_bytes <= quota.arena_bytes.saturating_sub(held.arena_bytes)
            && entries <= quota.operations.saturating_sub(held.operations)
            && ATTACHMENT_DESCRIPTORS <= quota.descriptors.saturating_sub(held.descriptors)
    }

    /// How many connections there are.
    pub(super) fn connections(&self) -> u32 {
        self.usage().connections
    }

    /// What another process of the agent's granted: a connection, and its attachment. The attachment has an arena of
    /// this size in bytes and rings of so many entries. It is granted whatever the quota is by now.
    pub(super) fn inherit(self: &Arc<Self>, (arena_bytes, operations): (u64, u32)) -> (Grant, Grant) {
        let descriptors = ATTACHMENT_DESCRIPTORS;
        let part = Usage { attachments: 1, arena_bytes, operations, descriptors, ..Usage::default() };
        (self.grant(Usage { connections: 1, ..Usage::default() }), self.grant(part))
    }

    /// The same of a region of this size.
    pub(super) fn inherit_region(self: &Arc<Self>, arena_bytes: u64) -> Grant {
        self.grant(Usage { arena_bytes, regions: 1, ..Usage::default() })
    }

    fn grant(self: &Arc<Self>, part: Usage) -> Grant {
        let mut held = self.usage();
        held.connections += part.connections;
        held.attachments += part.attachments;
        held.arena_bytes += part.arena_bytes;
        held.regions += part.regions;
        held.operations += part.operations;
        held.descriptors += part.descriptors;
        held.landing_bytes += part.landing_bytes;
        held.staging_bytes += part.staging_bytes;
        Grant { tenant: Arc::clone(self), part }
    }

    /// Room for an attachment, or why there is none. The attachment has an arena of this size in bytes and rings of so
    /// many entries.
    pub(super) fn attachment(self: &Arc<Self>, arena_bytes: u64, entries: u32) -> Result<Grant, Refused> {
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
        let left = quota.operations.saturating_sub(held.operations);
        if entries > left {
            self.counters.add(Counted::OperationsRefused);
            let text = format!(
                "{entries} ring entries were asked for, one for each operation in flight; {left} are left of the {} that this tenant \
                 may have; ask for fewer, detach processes, or have the provider raise `operations`",
                quota.operations
            );
            return Err(Refused { kind: RefusalKind::Entries, text });
        }
        let descriptors = ATTACHMENT_DESCRIPTORS;
        if let Err(full) = self.room_for_descriptors(&held, descriptors, "detach processes") {
            return Err(Refused { kind: RefusalKind::Attachments, text: full.to_string() });
        }
        let part =
            Usage { attachments: 1, arena_bytes, operations: entries, descriptors, ..Usage::default() };
        held.attachments += part.attachments;
        held.arena_bytes += part.arena_bytes;
        held.operations += part.operations;
        held.descriptors += part.descriptors;
        Ok(Grant { tenant: Arc::clone(self), part })
    }

    /// Whether so many more descriptors are within the quota.
    fn room_for_descriptors(&self, held: &Usage, more: u32, remedy: &'static str) -> Result<(), NoRoom> {
        let most = self.rules().quota.descriptors;
        let left = most.saturating_sub(held.descriptors);
        if more <= left {
            return Ok(());
        }
        self.counters.add(Counted::DescriptorsRefused);
        Err(NoRoom::Descriptors { more, free: left, most, remedy })
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

/// Runs a part of a session, whose processor time counts as the tenant's.
pub(super) async fn metered<T>(tenant: Arc<Tenant>, part: impl Future<Output = T>) -> T {
    let mut part = std::pin::pin!(part);
    std::future::poll_fn(|context| {
        let begun = thread_time();
        let polled = part.as_mut().poll(context);
        tenant.spend(thread_time().saturating_sub(begun));
        polled
    })
    .await
}

/// A tenant's limits, for those beside sessions that do something for it. Clones are of the same tenant.
#[derive(Clone, Debug)]
pub struct TenantLimits(pub(super) Arc<Tenant>);

impl TenantLimits {
    /// Those of a tenant that nothing is served for: for tests of what is beside sessions.
    pub fn of(quota: super::Quota, counters: &Counters) -> Self {
        let rules = TenantRules {
            tenant: "a".into(),
            socket: None,
            secret: None,
            addresses: Vec::new(),
            quota,
            remote: false,
            rdma: false,
            handshake: std::time::Duration::from_secs(5),
        };
        Self(Tenant::new(rules, None, counters, Arc::new(Freeze::new(false).0)))
    }
}

/// What a tenant's processes on this host have now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ProcessUsage {
    /// Bytes of tensor memory.
    pub tensor_bytes: u64,
    /// Entries of rings, each for an operation in flight.
    pub ring_entries: u64,
    /// Descriptors that the agent may need for their attachments. Those of links are told beside it.
    pub descriptors: u64,
}

/// What links to other agents take, and operations between their steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct LinkNeeds {
    /// One a path.
    pub descriptors: u32,
    /// What they receive into.
    pub landing_bytes: u64,
    /// What operations keep between their steps at most; none of communicators that a predecessor had.
    #[serde(skip)]
    pub staging_bytes: u64,
}

impl LinkNeeds {
    /// Of each the larger.
    pub fn max(self, other: Self) -> Self {
        Self {
            descriptors: self.descriptors.max(other.descriptors),
            landing_bytes: self.landing_bytes.max(other.landing_bytes),
            staging_bytes: self.staging_bytes.max(other.staging_bytes),
        }
    }

    /// What they are for control, which counts both memories as one.
    pub(crate) fn usage(self) -> v1::LinkUsage {
        let Self { descriptors, landing_bytes, staging_bytes } = self;
        v1::LinkUsage { descriptors, landing_bytes: landing_bytes.saturating_add(staging_bytes) }
    }

    /// What they are of a tenant's usage.
    fn part(self) -> Usage {
        let Self { descriptors, landing_bytes, staging_bytes } = self;
        Usage { descriptors, landing_bytes, staging_bytes, ..Usage::default() }
    }
}

/// What links take of a tenant's quota, given back when dropped.
#[derive(Debug)]
pub struct LinkGrant(Grant);

impl TenantLimits {
    /// Logs a line about the tenant, unless there are too many of them.
    pub fn log(&self, line: impl FnOnce()) {
        self.0.log(line);
    }

    /// What the tenant's processes have now.
    pub(crate) fn process_usage(&self) -> ProcessUsage {
        let held = self.0.usage();
        ProcessUsage {
            tensor_bytes: held.arena_bytes,
            ring_entries: held.operations.into(),
            descriptors: u64::from(held.attachments) * u64::from(ATTACHMENT_DESCRIPTORS),
        }
    }

    /// What another process of the agent's took for links.
    pub(crate) fn inherit_links(&self, needs: LinkNeeds) -> LinkGrant {
        LinkGrant(self.0.grant(needs.part()))
    }

    /// Takes what links and staging need of the tenant's quota.
    ///
    /// # Errors
    /// Where so much is not left: limit, what is left, and the remedy, for the tenant.
    pub fn links(&self, needs: LinkNeeds) -> Result<LinkGrant, NoRoom> {
        let LinkNeeds { descriptors, landing_bytes, staging_bytes } = needs;
        let mut held = self.0.usage();
        self.0.room_for_descriptors(&held, descriptors, "leave communicators")?;
        let most = self.0.rules().quota.landing_bytes;
        let left = most.saturating_sub(held.landing_bytes).saturating_sub(held.staging_bytes);
        let bytes = landing_bytes.saturating_add(staging_bytes);
        if bytes > left {
            self.0.counters.add(Counted::LandingRefused);
            return Err(NoRoom::Memory { bytes, landing_bytes, staging_bytes, free: left, most });
        }
        held.descriptors += descriptors;
        held.landing_bytes += landing_bytes;
        held.staging_bytes += staging_bytes;
        Ok(LinkGrant(Grant { tenant: Arc::clone(&self.0), part: needs.part() }))
    }
}

impl LinkGrant {
    /// What it holds.
    pub(crate) fn needs(&self) -> LinkNeeds {
        let Usage { descriptors, landing_bytes, staging_bytes, .. } = self.0.part;
        LinkNeeds { descriptors, landing_bytes, staging_bytes }
    }

    /// Holds another's, too.
    pub fn add(&mut self, mut other: Self) {
        let more = std::mem::take(&mut other.0.part);
        self.0.part.descriptors += more.descriptors;
        self.0.part.landing_bytes += more.landing_bytes;
        self.0.part.staging_bytes += more.staging_bytes;
    }

    /// Keeps so much at most, and gives the rest back.
    pub fn shrink_to(&mut self, needs: LinkNeeds) {
        let part = &mut self.0.part;
        let descriptors = part.descriptors.saturating_sub(needs.descriptors);
        let landing_bytes = part.landing_bytes.saturating_sub(needs.landing_bytes);
        part.descriptors -= descriptors;
        let staging_bytes = part.staging_bytes.saturating_sub(needs.staging_bytes);
        part.landing_bytes -= landing_bytes;
        part.staging_bytes -= staging_bytes;
        let mut held = self.0.tenant.usage();
        held.descriptors -= descriptors;
        held.landing_bytes -= landing_bytes;
        held.staging_bytes -= staging_bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::super::Quota;
    use super::*;

    /// A refusal says what was asked for, the limit, what is left, and what to do.
    fn assert_contains(text: &str, words: &[&str]) {
        assert!(words.iter().all(|word| text.contains(word)), "{words:?} in {text}");
    }

    fn paths_of(descriptors: u32) -> LinkNeeds {
        LinkNeeds { descriptors, ..LinkNeeds::default() }
    }

    #[test]
    fn operations_and_descriptors_are_counted_and_come_free() {
        let counters = Counters::default();
        let limits = TenantLimits::of(
            Quota { operations: 96, descriptors: 2 * ATTACHMENT_DESCRIPTORS + 7, ..Quota::default() },
            &counters,
        );
        let tenant = &limits.0;
        let first = tenant.attachment(1 << 20, 64).unwrap();
        let refused = tenant.attachment(1 << 20, 64).unwrap_err();
        assert_eq!((refused.kind, counters.get(Counted::OperationsRefused)), (RefusalKind::Entries, 1));
        assert_contains(&refused.text, &["64 ring entries", "32 are left", "96", "`operations`"]);
        let second = tenant.attachment(1 << 20, 32).unwrap();
        let mut paths = limits.links(paths_of(4)).unwrap();
        let descriptors = u64::from(2 * ATTACHMENT_DESCRIPTORS);
        let of_processes = ProcessUsage { tensor_bytes: 2 << 20, ring_entries: 96, descriptors };
        assert_eq!(limits.process_usage(), of_processes, "those of links are told beside it");
        let text = limits.links(paths_of(4)).unwrap_err().to_string();
        assert_contains(
            &text,
            &["4 descriptors", "3 are left", "27", "leave communicators", "`descriptors`"],
        );
        paths.add(limits.links(paths_of(3)).unwrap());
        paths.shrink_to(paths_of(4));
        drop(limits.links(paths_of(3)).unwrap());
        assert!(limits.links(paths_of(4)).is_err());
        drop(first);
        let refused = tenant.attachment(1 << 20, 128).unwrap_err();
        assert_contains(&refused.text, &["128 ring entries", "64 are left"]);
        let third = tenant.attachment(1 << 20, 64).unwrap();
        drop(second);
        // Places for another attachment, but not for its descriptors.
        let _rest = limits.links(paths_of(ATTACHMENT_DESCRIPTORS - 1)).unwrap();
        let refused = tenant.attachment(1 << 20, 1).unwrap_err();
        assert_eq!((refused.kind, counters.get(Counted::DescriptorsRefused)), (RefusalKind::Attachments, 3));
        assert_contains(
            &refused.text,
            &["10 descriptors", "4 are left", "detach processes", "`descriptors`"],
        );
        drop((third, paths));
        let held = tenant.usage();
        assert_eq!((held.attachments, held.operations, held.descriptors), (0, 0, ATTACHMENT_DESCRIPTORS - 1));
    }

    #[test]
    fn a_quota_that_is_reloaded_is_in_force_at_once() {
        let counters = Counters::default();
        let limits = TenantLimits::of(Quota { attachments: 1, attaches: 1, ..Quota::default() }, &counters);
        let (tenant, now) = (&limits.0, Instant::now());
        drop(tenant.connection(now).unwrap());
        let refused = tenant.connection(now).unwrap_err();
        assert_eq!((refused.kind, counters.get(Counted::AttachRefused)), (RefusalKind::Attachments, 1));
        assert_contains(&refused.text, &["attach too often", "1 a second", "1 at once", "`attaches`"]);
        let rules = tenant.rules();
        tenant.set_rules(TenantRules { quota: Quota { attaches: 100, ..rules.quota }, ..(*rules).clone() });
        // What was had by the rules before still counts: a second's worth of these.
        let later = now + Duration::from_millis(500);
        let admitted = (0..1000).filter(|_| tenant.connection(later).is_ok()).count();
        assert_eq!(admitted, 50);
    }

    #[test]
    fn processor_time_is_that_of_the_sessions_own_tenant() {
        let (counters, quota) = (Counters::default(), Quota { session_percent: 1, ..Quota::default() });
        let [spins, other] = [(); 2].map(|()| TenantLimits::of(quota, &counters).0);
        let session = async {
            let begun = thread_time();
            while thread_time() - begun < Duration::from_millis(50) {}
        };
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(metered(Arc::clone(&spins), session));
        assert!(spins.throttled_until().is_some() && other.throttled_until().is_none());
    }

    #[test]
    fn joins_beyond_the_rate_are_refused() {
        let counters = Counters::default();
        let limits = TenantLimits::of(Quota { joins: 5, ..Quota::default() }, &counters);
        let now = Instant::now();
        assert_eq!((0..1000).filter(|_| limits.0.admit_join(now).is_ok()).count(), 600);
        assert_eq!(counters.get(Counted::JoinRefused), 400);
        let text = limits.0.admit_join(now).unwrap_err().describe("join", "joins");
        assert_contains(&text, &["join too often", "5 a second", "600 at once", "`joins`"]);
    }
}
