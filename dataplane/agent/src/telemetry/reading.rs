//! How things stand at a moment, for whoever asks the thread.

use crate::telemetry::analysis::JobActivity;
use crate::telemetry::finding::LocatedStraggler;
use crate::telemetry::latencies::Latencies;
use crate::telemetry::links::MeasuredInterface;
use crate::telemetry::losses::Losses;
use crate::telemetry::own_flows::Traffic;
use crate::telemetry::pipeline::Events;
use crate::telemetry::rdma_ports::PortReading;
use crate::telemetry::series::Series;
use crate::telemetry::signals::OfInterface;
use harmonaize_abi::{CommunicatorId, Nanos};
use harmonaize_analysis::congestion::Congestion;
use harmonaize_analysis::marks::Operation;
use harmonaize_analysis::phases::Job;
use harmonaize_analysis::trace::Owner;
use harmonaize_events::{FlowKey, InterfaceTotals};
use harmonaize_loader::{Cost, Endpoints, Flows};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

/// How things stand. Times are CLOCK_MONOTONIC; counters count from when the programs were loaded.
#[derive(Clone, Debug, Default)]
pub struct Reading {
    /// When it was taken.
    pub time: Nanos,
    /// What is to be added to its times to get CLOCK_REALTIME.
    pub offset_ns: i64,
    /// Time since telemetry began.
    pub uptime: Duration,
    /// Processor time of the telemetry thread since it began.
    pub thread: Duration,
    /// Interfaces that are measured.
    pub links: Vec<LinkReading>,
    /// Every flow; empty where they were not asked for.
    pub flows: Arc<Flows>,
    /// What the kernel knows of the flows' ends; empty where flows were not asked for.
    pub endpoints: Arc<Endpoints>,
    /// How many flows there were when they were last read.
    pub flow_count: u64,
    /// Whose flows are, by their keys with interface 0.
    pub owners: Arc<HashMap<FlowKey, Owner>>,
    /// Own communicators.
    pub communicators: BTreeMap<CommunicatorId, Traffic>,
    /// What metrics tell of communicators, those that ended too.
    pub series: Arc<Series>,
    /// Own operations that have begun and not ended, oldest first.
    pub operations: Vec<Operation>,
    /// How links stand that something crossed lately.
    pub congestion: Vec<Congestion>,
    /// External jobs, and what they did lately.
    pub jobs: Vec<(Job, JobActivity)>,
    /// The external job of each flow that has one; empty where flows were not asked for.
    pub job_of: Arc<HashMap<FlowKey, u64>>,
    /// Stragglers now.
    pub stragglers: Vec<LocatedStraggler>,
    /// What was lost.
    pub losses: Losses,
    /// How long events took until what follows from them was decided.
    pub latencies: Latencies,
    /// Signs of congestion, by the interface's index.
    pub signals: BTreeMap<u32, OfInterface>,
    /// Ports of this host's RDMA devices.
    pub ports: Vec<PortReading>,
    /// What was found, how often.
    pub events: Events,
    /// What the programs cost; none where the kernel does not tell.
    pub cost: Option<Cost>,
    /// What cannot be had here, a sentence each.
    pub missing: Vec<String>,
}

/// An interface at a moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkReading {
    /// Which.
    pub measured: MeasuredInterface,
    /// What has crossed it.
    pub totals: InterfaceTotals,
}
