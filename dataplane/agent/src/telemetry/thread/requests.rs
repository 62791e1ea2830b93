//! What the telemetry thread answers to who asks how things stand.

use super::Thread;
use crate::telemetry::clock::thread_time;
use crate::telemetry::failed;
use crate::telemetry::reading::{LinkReading, Reading};
use harmonaize_analysis::marks::Operation;
use harmonaize_events::{EndpointLosses, FlowKey};
use harmonaize_loader::{Endpoints, Flows};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// A reading of all flows that is no older answers who asks for one.
const FRESH_NS: u64 = 50_000_000;
/// How long segments are awaited before flows' ends are told to the first who asks, and how long they are followed for the next.
pub(super) const AWAITED: Duration = Duration::from_millis(20);
pub(super) const FOLLOWED: Duration = Duration::from_secs(10);

impl Thread {
    /// Somebody wants flows: their ends are followed from now on. True if they were not so far.
    pub(super) fn follow(&mut self, now_ns: u64) -> bool {
        self.requested_ns = now_ns;
        let begun = self.source.watch_endpoints(true);
        begun.unwrap_or_else(|error| {
            failed("following the flows' ends", &error);
            false
        })
    }

    /// Answers those who have waited for segments.
    pub(super) fn answer(&mut self, now_ns: u64) {
        if self.waiting.iter().all(|(due_ns, _)| *due_ns > now_ns) {
            return;
        }
        for (due_ns, reply) in std::mem::take(&mut self.waiting) {
            if due_ns <= now_ns {
                let _ = reply.send(Arc::new(self.reading(now_ns, true)));
            } else {
                self.waiting.push((due_ns, reply));
            }
        }
    }

    pub(super) fn reading(&mut self, now_ns: u64, flows: bool) -> Reading {
        if flows && now_ns.saturating_sub(self.sampler.read_ns()) >= FRESH_NS {
            self.read_flows(now_ns);
        }
        let mut endpoints = Endpoints::default();
        if flows && let Err(error) = self.source.read_endpoints(&mut endpoints) {
            failed("reading what the kernel knows of the flows' ends", &error);
        }
        let EndpointLosses { sockets_unplaced, queue_pairs_unplaced, .. } = endpoints.losses;
        let ends = sockets_unplaced.saturating_add(queue_pairs_unplaced);
        self.losses.ends = self.losses.ends.max(ends);
        let known = self.sampler.flows();
        let mut operations: Vec<Operation> = self.analysis.open().cloned().collect();
        operations.sort_by_key(|operation| operation.began_ns);
        let totals = |index| self.source.totals(index).unwrap_or_default();
        Reading {
            time_ns: now_ns,
            offset_ns: self.observer.realtime_offset_ns,
            uptime_ns: now_ns.saturating_sub(self.begun_ns),
            thread: thread_time(),
            links: self
                .links
                .measured()
                .iter()
                .map(|one| LinkReading { measured: one.clone(), totals: totals(one.index) })
                .collect(),
            flow_count: (known.tcp.len() + known.roce.len()) as u64,
            flows: Arc::new(if flows { known.clone() } else { Flows::default() }),
            endpoints: Arc::new(endpoints),
            owners: Arc::new(self.own_flows.owners().clone()),
            communicators: self.own_flows.communicators().clone(),
            series: self.own_flows.series(),
            operations,
            congestion: self.analysis.links().collect(),
            jobs: self.analysis.jobs().collect(),
            job_of: Arc::new(if flows { self.jobs_of(known) } else { HashMap::new() }),
            stragglers: self.analysis.stragglers().collect(),
            losses: self.losses,
            latencies: self.latencies,
            cost: self.source.cost().ok(),
            missing: self
                .links
                .missing()
                .chain(self.source.missing().iter().map(String::as_str))
                .map(str::to_owned)
                .collect(),
        }
    }

    fn jobs_of(&self, flows: &Flows) -> HashMap<FlowKey, u64> {
        let keys = flows.tcp.iter().map(|(key, _)| key).chain(flows.roce.iter().map(|(key, _)| key));
        keys.filter_map(|key| Some((*key, self.analysis.job_of(key)?))).collect()
    }
}
