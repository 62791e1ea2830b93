//! When flows are sampled, and what for: by the clock, fast while traffic begins or a congestion report is in the making,
//! and at once for a late round trip.

use crate::telemetry::active_flows::ActiveFlows;
use crate::telemetry::cpu_budget::{CpuBudget, nanoseconds};
use crate::telemetry::failed;
use crate::telemetry::own_flows::OwnFlows;
use harmonaize_analysis::trace::Record;
use harmonaize_events::{Event, EventKind};
use harmonaize_loader::Collector;
use std::time::Duration;

/// The most events that are taken in a row.
const EVENTS: usize = 4096;
/// The interval between two fast samples.
pub(crate) const FAST_INTERVAL: Duration = Duration::from_millis(1);
/// How long samples are fast after traffic began.
const BEGINNING_NS: u64 = 20_000_000;
/// How long samples go on after the last sign of traffic.
const QUIET_NS: u64 = 200_000_000;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Sampler {
    pub(crate) flows: ActiveFlows,
    pub(crate) budget: CpuBudget,
    /// When flows were last sampled.
    pub(crate) sampled_ns: u64,
    /// When a flow became active again last.
    pub(crate) woken_ns: u64,
    /// When there was last a sign of traffic.
    busy_ns: u64,
    /// Whether a late round trip since the last sample asks for one at once.
    urgent: bool,
}

/// What a sample is charged to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SampleKind {
    fast: bool,
    full: bool,
    late_rtt: bool,
}

impl Sampler {
    /// A sampler of the calling thread, which samples by the clock once per `interval` at most.
    pub(crate) fn new(interval: Duration) -> Self {
        let (flows, budget) = (ActiveFlows::default(), CpuBudget::new(interval));
        Self { flows, budget, sampled_ns: 0, woken_ns: 0, busy_ns: 0, urgent: false }
    }

    /// Takes events out of their queues, in the order of their times. Returns whether a round trip was late.
    pub(crate) fn read_events(
        &mut self,
        source: &mut dyn Collector,
        own_flows: &OwnFlows,
        into: &mut Vec<Event>,
    ) -> bool {
        into.clear();
        let (mut woken, mut late_rtt) = (false, false);
        let Self { flows, urgent, .. } = self;
        let read = source.read_events(EVENTS, &mut |event| {
            let flow = &event.flow;
            if EventKind::from_number(event.kind) == Some(EventKind::LateRtt) {
                late_rtt = true;
                *urgent |= is_news(event)
                    && if own_flows.any() { own_flows.has(flow) } else { flows.is_heavy(flow) };
            } else {
                woken |= flows.activate(flow);
            }
            into.push(*event);
        });
        if late_rtt {
            // They have a queue of their own.
            into.sort_by_key(|event| event.time_ns);
        }
        if let Err(error) = read {
            failed("reading events", &error);
        }
        if let Some(latest) = into.last().map(|event| event.time_ns) {
            self.busy_ns = self.busy_ns.max(latest);
            self.woken_ns = if woken { latest } else { self.woken_ns };
        }
        late_rtt
    }

    /// Whether there is traffic, or was until a moment ago.
    pub(crate) fn is_busy(&self, now_ns: u64) -> bool {
        self.flows.any_active() || now_ns.saturating_sub(self.busy_ns) < QUIET_NS
    }

    /// Returns when flows are sampled next; `pending`: a congestion report is in the making.
    pub(crate) fn next_sample_ns(&self, now_ns: u64, pending: bool) -> u64 {
        let begins = now_ns.saturating_sub(self.woken_ns) < BEGINNING_NS;
        let fast =
            (begins || pending) && self.budget.allows_fast_sample(now_ns) || self.acts_on_late_rtt(now_ns);
        let due_ns = self.budget.sample.due_ns();
        if fast { due_ns.min(self.sampled_ns.saturating_add(nanoseconds(FAST_INTERVAL))) } else { due_ns }
    }

    /// Samples active flows: all of them when that is due, else those that move much. To be charged when analysis has
    /// taken the records in, see [`Sampler::charge_sample`].
    pub(crate) fn sample(
        &mut self,
        source: &dyn Collector,
        now_ns: u64,
        into: &mut Vec<Record>,
    ) -> SampleKind {
        let full = self.budget.full_sample.is_due(now_ns);
        let kind = SampleKind {
            fast: !self.budget.sample.is_due(now_ns),
            full,
            late_rtt: self.acts_on_late_rtt(now_ns),
        };
        self.urgent = false;
        self.sampled_ns = now_ns;
        if let Err(error) = self.flows.sample(source, now_ns, full, into) {
            failed("sampling flows", &error);
        }
        kind
    }

    /// Charges a sample: `woke`, and the time since that was charged last.
    pub(crate) fn charge_sample(&mut self, now_ns: u64, kind: SampleKind, woke: Duration) {
        let budget = &mut self.budget;
        let mut spent = woke + budget.spent();
        if kind.full {
            // Else a sample of all would put off those of the few that move much.
            budget.full_sample.done(now_ns, std::mem::take(&mut spent));
        }
        match kind {
            SampleKind { fast: false, .. } => budget.sample.done(now_ns, spent),
            SampleKind { late_rtt: true, .. } => budget.late_rtt.used(now_ns, spent),
            SampleKind { .. } => budget.fast_sample.used(now_ns, spent),
        }
    }

    /// Reads all flows.
    pub(crate) fn read_all(&mut self, source: &mut dyn Collector, now_ns: u64, into: &mut Vec<Record>) {
        if let Err(error) = self.flows.read_all(source, now_ns, into) {
            failed("reading flows", &error);
        }
    }

    /// Whether flows are sampled for a late round trip.
    fn acts_on_late_rtt(&self, now_ns: u64) -> bool {
        self.urgent && self.budget.allows_late_rtt(now_ns)
    }
}

/// Whether a round trip took much longer than the one before: the queue has just grown.
fn is_news(late: &Event) -> bool {
    let took_ns = late.time_ns.saturating_sub(late.burst_ended_ns);
    let before_ns = late.burst_ended_ns.saturating_sub(late.burst_began_ns);
    late.burst_began_ns == 0 || took_ns / 2 >= before_ns
}
