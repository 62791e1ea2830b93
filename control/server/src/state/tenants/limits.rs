//! How often tenants may ask for something, by communicator and in all.

use harmonaize_abi::CommunicatorId;
use harmonaize_units::{Gcra, Quota};
use std::collections::BTreeMap;
use std::time::Duration;

/// For one communicator, and for all of a tenant together: as many at once, and as many in [`PER`].
const MOST: (u32, u32) = (8, 128);

/// See [`MOST`].
const PER: Duration = Duration::from_secs(60);

/// A tenant asks too often. The text goes to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "too many {what}: {one} for a communicator and {all} of a tenant are possible in {PER:?}; the next in {seconds} s",
    one = MOST.0,
    all = MOST.1
)]
pub struct OverLimit {
    what: &'static str,
    /// How long until the next is possible, rounded up.
    seconds: u64,
}

/// What tenants asked for lately.
#[derive(Debug, Default)]
pub(crate) struct TenantLimits {
    tenants: BTreeMap<String, RequestRate>,
}

/// What one tenant asked for.
#[derive(Debug, Default)]
struct RequestRate {
    all: Gcra,
    /// By communicator, those of late.
    each: BTreeMap<CommunicatorId, Gcra>,
}

impl TenantLimits {
    /// Takes note that a tenant asks for something of a communicator. `what` names such questions.
    ///
    /// # Errors
    /// What it is told where this is one too many.
    pub(crate) fn take(
        &mut self,
        now: Duration,
        tenant: &str,
        id: CommunicatorId,
        what: &'static str,
    ) -> Result<(), OverLimit> {
        let quota = |burst: u32| Quota { interval: PER / burst, burst };
        let (of_one, of_all) = (quota(MOST.0), quota(MOST.1));
        let RequestRate { all, each } = self.tenants.entry(tenant.to_owned()).or_default();
        each.retain(|_, asked| !asked.is_idle(now));
        let one = each.entry(id).or_default();
        let next = one.next(of_one).max(all.next(of_all));
        if next > now {
            let seconds = next.saturating_sub(now).as_secs() + 1;
            return Err(OverLimit { what, seconds });
        }
        one.charge(now, of_one);
        all.charge(now, of_all);
        Ok(())
    }

    /// A tenant is gone.
    pub(crate) fn forget(&mut self, tenant: &str) {
        self.tenants.remove(tenant);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_communicator_and_all_of_a_tenant_are_limited() {
        let (mut limits, now) = (TenantLimits::default(), Duration::from_secs(7));
        let taken = |limits: &mut TenantLimits, now, id| {
            (0..20).filter(|_| limits.take(now, "a", id, "hints").is_ok()).count()
        };
        assert_eq!((0..20).map(|id| taken(&mut limits, now, CommunicatorId(id))).sum::<usize>(), 128);
        assert_eq!(
            taken(&mut limits, now + PER / 8, CommunicatorId(0)),
            1,
            "one is earned in an eighth of the time"
        );
        assert_eq!(taken(&mut limits, now + PER * 2, CommunicatorId(0)), 8);
        let refused = limits.take(now + PER * 2, "a", CommunicatorId(0), "hints");
        assert_eq!(refused, Err(OverLimit { what: "hints", seconds: 8 }));
        limits.forget("a");
        assert_eq!(taken(&mut limits, now + PER * 2, CommunicatorId(0)), 8);
    }
}
