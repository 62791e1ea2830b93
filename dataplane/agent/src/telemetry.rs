//! What crosses this host's interfaces. Programs in the kernel measure it. One thread, which is no part of any
//! operation's path, brings it together with the engine's marks and analyses it.
//!
//! The thread sleeps on the programs' ring of events. It looks at flows under way at short intervals and at all of them
//! seldom, and rests in proportion to what that cost, so that it takes less than 2% of a core with ten thousand flows. What
//! does not fit is lost and counted. Where the kernel or the privileges lack something, there is no telemetry, which is
//! said, and everything else runs on.
//!
//! Records go to analysis and into traces; findings go to whoever listens ([`Findings`]), and to the decision loop
//! ([`Setup::decide`]) within the thread. Everybody else asks the thread through its [`Handle`].

mod active_flows;
mod analysis;
mod answers;
mod begin;
mod clock;
mod completions;
mod congestion_reports;
mod cpu_budget;
mod cpu_pressure;
mod finding;
mod handle;
mod latencies;
mod links;
mod losses;
mod metrics;
mod names;
mod own_flows;
mod pipeline;
mod rdma_ports;
mod reading;
mod replay;
mod report;
mod sampler;
mod series;
mod service;
mod signals;
mod socket;
mod tap;
mod thread;
pub(crate) mod to_proto;
mod unmeasured;
mod view;

pub use analysis::JobActivity;
pub use answers::Answers;
pub(crate) use begin::own_endpoints;
pub use begin::{Running, Shown, begin};
pub(crate) use clock::{realtime_ns, thread_time};
pub use completions::CompletionDelays;
pub use finding::{Finding, Findings, Found, LocatedStraggler};
pub use handle::Handle;
pub use latencies::Latencies;
pub use links::MeasuredInterface;
pub(crate) use links::late_rtt_limit;
pub use losses::Losses;
pub use names::Names;
pub use own_flows::{EpochLinks, Traffic};
pub use pipeline::Events;
pub use rdma_ports::PortReading;
pub use reading::{LinkReading, Reading};
pub use replay::{replay, replay_merged};
pub use series::Series;
pub use signals::{Counts, OfInterface};
pub use tap::{Part, parts};
pub use thread::{Setup, start};

pub(crate) use harmonaize_loader::Error as Failed;

/// Says that something failed that telemetry can go on without.
pub(crate) fn failed(what: &str, error: &dyn std::fmt::Display) {
    tracing::warn!("telemetry: {what} failed: {error}");
}
