//! What the telemetry thread answers to who asks how things stand.

use super::Thread;
use crate::telemetry::analysis::Analysis;
use crate::telemetry::clock::thread_time;
use crate::telemetry::failed;
use crate::telemetry::reading::{LinkReading, Reading};
use harmonaize_abi::Nanos;
use harmonaize_analysis::marks::Operation;
use harmonaize_events::{EndpointLosses, FlowKey};
use harmonaize_loader::{Endpoints, Flows};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// A read of all flows that is no older answers who asks for one.
const FRESH: Duration = Duration::from_millis(50);

impl Thread {
    /// Has flows' ends followed from now on. Returns whether they were not so far.
    pub(super) fn follow(&mut self, now: Nanos) -> bool {
        self.schedule.follow(now);
        let begun = self.source.watch_endpoints(true);
        begun.unwrap_or_else(|error| {
            failed("following the flows' ends", &error);
            false
        })
    }

    pub(super) fn reading(&mut self, now: Nanos, flows: bool) -> Reading {
        if flows && now.since(self.sampler.flows.last_read()) >= FRESH {
            self.sampler.read_all(self.source.as_mut(), now, &mut self.pipeline.records);
        }
        let mut endpoints = Endpoints::default();
        if flows && let Err(error) = self.source.read_endpoints(&mut endpoints) {
            failed("reading what the kernel knows of the flows' ends", &error);
        }
        let EndpointLosses { sockets_unplaced, queue_pairs_unplaced, .. } = endpoints.losses;
        let ends = sockets_unplaced.saturating_add(queue_pairs_unplaced);
        let pipeline = &mut self.pipeline;
        pipeline.losses.ends = pipeline.losses.ends.max(ends);
        let analysis = &pipeline.analysis;
        let known = self.sampler.flows.flows();
        let mut operations: Vec<Operation> = analysis.open().cloned().collect();
        operations.sort_by_key(|operation| operation.began);
        let totals = |index| self.source.totals(index).unwrap_or_default();
        Reading {
            time: now,
            offset_ns: pipeline.observer.realtime_offset_ns,
            uptime: now.since(self.begun),
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
            congestion: analysis.links().collect(),
            jobs: analysis.jobs().collect(),
            job_of: Arc::new(if flows { jobs_of(analysis, known) } else { HashMap::new() }),
            stragglers: analysis.stragglers().collect(),
            losses: pipeline.losses,
            latencies: pipeline.latencies.clone(),
            signals: pipeline.signals.interfaces().clone(),
            ports: self.ports.readings().to_vec(),
            events: pipeline.found.clone(),
            cost: self.source.cost().ok(),
            missing: self
                .links
                .missing()
                .chain(self.source.missing().iter().map(String::as_str))
                .map(str::to_owned)
                .collect(),
        }
    }
}

/// Returns the external job of each flow that has one.
fn jobs_of(analysis: &Analysis, flows: &Flows) -> HashMap<FlowKey, u64> {
    let keys = flows.tcp.iter().map(|(key, _)| key).chain(flows.roce.iter().map(|(key, _)| key));
    keys.filter_map(|key| Some((*key, analysis.job_of(key)?))).collect()
}
