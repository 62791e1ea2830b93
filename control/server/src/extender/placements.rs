//! Where pods of jobs are about to run. A scheduler does not say which host it has chosen, and a worker's runner asks only when its pod has
//! started. Until then the host with the best score is taken to be the one.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// How long a placement is remembered. Then the pod's runner has asked, or the pod is elsewhere.
const REMEMBERED: Duration = Duration::from_secs(60);

/// Most placements of a tenant that are remembered, as many as a communicator has ranks; one more and its oldest is forgotten.
const MOST: usize = 1024;

/// Most bytes of what Kubernetes tells pods by.
const MOST_UID: usize = 64;

/// Where pods are taken to be about to run, by tenant, the oldest first.
#[derive(Debug, Default)]
pub(super) struct Placements(BTreeMap<String, VecDeque<Placement>>);

#[derive(Debug)]
struct Placement {
    since: Duration,
    job: String,
    pod: String,
    host: String,
}

impl Placements {
    /// Hosts of a job's other pods.
    pub(super) fn others(&mut self, now: Duration, (tenant, job): (&str, &str), pod: &str) -> Vec<String> {
        self.0.retain(|_, known| {
            while known.front().is_some_and(|first| first.since.saturating_add(REMEMBERED) <= now) {
                known.pop_front();
            }
            !known.is_empty()
        });
        let own = self.0.get(tenant).into_iter().flatten();
        let own = own.filter(|known| known.job == job && known.pod != pod);
        own.map(|known| known.host.clone()).collect()
    }

    /// A pod gets this host, it seems. A pod without a usable UID is not remembered.
    pub(super) fn add(&mut self, now: Duration, (tenant, job): (&str, &str), pod: &str, host: &str) {
        if pod.is_empty() || pod.len() > MOST_UID {
            return;
        }
        let own = self.0.entry(tenant.to_owned()).or_default();
        own.retain(|known| known.pod != pod);
        if own.len() >= MOST {
            own.pop_front();
        }
        let [job, pod, host] = [job, pod, host].map(str::to_owned);
        own.push_back(Placement { since: now, job, pod, host });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const JOB: (&str, &str) = ("a", "train");

    #[test]
    fn a_pod_has_one_host_for_a_minute() {
        let mut known = Placements::default();
        known.add(Duration::ZERO, JOB, "p0", "h0");
        known.add(Duration::ZERO, ("b", "train"), "p1", "h1");
        assert_eq!(known.others(Duration::ZERO, JOB, "p0"), [""; 0]);
        assert_eq!(known.others(Duration::ZERO, JOB, "p2"), ["h0"]);
        // It was scheduled again.
        known.add(Duration::from_secs(10), JOB, "p0", "h4");
        assert_eq!(known.others(Duration::from_secs(69), JOB, "p2"), ["h4"]);
        assert_eq!(known.others(Duration::from_secs(70), JOB, "p2"), [""; 0]);
        assert!(known.0.is_empty());
    }

    #[test]
    fn the_oldest_of_a_tenants_too_many_is_forgotten() {
        let mut known = Placements::default();
        known.add(Duration::ZERO, ("b", "train"), "first", "h7");
        for pod in 0..=MOST {
            known.add(Duration::ZERO, JOB, &pod.to_string(), &format!("h{pod}"));
        }
        known.add(Duration::ZERO, JOB, "", "h0");
        known.add(Duration::ZERO, JOB, &"x".repeat(MOST_UID + 1), "h0");
        let hosts = known.others(Duration::ZERO, JOB, "");
        assert_eq!((hosts.len(), hosts.first().map(String::as_str)), (MOST, Some("h1")));
        assert_eq!(known.others(Duration::ZERO, ("b", "train"), ""), ["h7"], "another tenant's");
    }
}
