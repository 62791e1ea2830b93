//! How often tenants have asked for something lately, and when they may again.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Most for one communicator, and for all of a tenant together, within [`PER`].
const MOST: (usize, usize) = (8, 128);

/// See [`MOST`].
const PER: Duration = Duration::from_secs(60);

/// When tenants have asked for something, for which communicator.
#[derive(Debug, Default)]
pub(super) struct Lately {
    asked: BTreeMap<String, VecDeque<(Duration, u64)>>,
}

impl Lately {
    /// Takes note of a tenant's asking; what it is told if this is one too many. `what` names such questions.
    pub(super) fn asks(&mut self, now: Duration, tenant: &str, id: u64, what: &str) -> Result<(), String> {
        let lately = self.asked.entry(tenant.to_owned()).or_default();
        lately.retain(|(at, _)| now.saturating_sub(*at) < PER);
        let of_one = lately.iter().filter(|(_, of)| *of == id);
        let (most, most_of_all) = MOST;
        let first_of_one = of_one.clone().next().filter(|_| of_one.count() >= most);
        let first_of_all = lately.front().filter(|_| lately.len() >= most_of_all);
        match first_of_one.or(first_of_all) {
            Some((at, _)) => {
                let seconds = at.saturating_add(PER).saturating_sub(now).as_secs() + 1;
                Err(format!(
                    "too many {what}: {most} for a communicator and {most_of_all} of a tenant are possible in {PER:?}; the next in {seconds} s"
                ))
            }
            None => {
                lately.push_back((now, id));
                Ok(())
            }
        }
    }

    /// A tenant is gone.
    pub(super) fn forget(&mut self, tenant: &str) {
        self.asked.remove(tenant);
    }
}
