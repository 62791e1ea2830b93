//! When flows are sampled, and what for. By the clock, fast while traffic begins or a congestion report is in the making,
//! and at once for a late round trip.

use crate::telemetry::active_flows::ActiveFlows;
use crate::telemetry::cpu_budget::CpuBudget;
use crate::telemetry::failed;
use crate::telemetry::own_flows::OwnFlows;
use harmonaize_abi::Nanos;
use harmonaize_analysis::trace::Record;
use harmonaize_events::{Event, EventKind};
use harmonaize_loader::Collector;
use std::time::Duration;

/// The most events that are taken in a row.
const EVENTS: usize = 4096;
/// The interval between two fast samples.
pub(crate) const FAST_INTERVAL: Duration = Duration::from_millis(1);
/// How long samples are fast after traffic began.
const BEGINNING: Duration = Duration::from_millis(20);
/// How long samples go on after the last sign of traffic.
pub(crate) const QUIET: Duration = Duration::from_millis(200);

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Sampler {
    pub(crate) flows: ActiveFlows,
    pub(crate) budget: CpuBudget,
    /// When flows were last sampled.
    pub(crate) sampled: Nanos,
    /// When a flow became active again last.
    pub(crate) woken: Nanos,
    /// When there was last a sign of traffic.
    busy: Nanos,
    /// Whether a late round trip since the last sample asks for one at once.
    urgent: bool,
    /// Whether there were events at the last look: more may gather.
    pub(crate) gathers: bool,
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
        Self {
            flows,
            budget,
            sampled: Nanos(0),
            woken: Nanos(0),
            busy: Nanos(0),
            urgent: false,
            gathers: false,
        }
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
        self.gathers = !into.is_empty();
        if let Some(latest) = into.last().map(|event| Nanos(event.time_ns)) {
            self.busy = self.busy.max(latest);
            self.woken = if woken { latest } else { self.woken };
        }
        late_rtt
    }

    /// Whether there is traffic, or was until a moment ago.
    pub(crate) fn is_busy(&self, now: Nanos) -> bool {
        self.flows.any_active() || now.since(self.busy) < QUIET
    }

    /// Returns when flows are sampled next; `pending`: a congestion report is in the making.
    pub(crate) fn next_sample(&self, now: Nanos, pending: bool) -> Nanos {
        let begins = now.since(self.woken) < BEGINNING;
        let fast = (begins || pending) && self.budget.allows_fast_sample(now) || self.acts_on_late_rtt(now);
        let due = self.budget.sample.due();
        if fast { due.min(self.sampled.after(FAST_INTERVAL)) } else { due }
    }

    /// Samples active flows: all of them when that is due, else those that move much. To be charged when analysis has
    /// taken the records in, see [`Sampler::charge_sample`].
    pub(crate) fn sample(
        &mut self,
        source: &dyn Collector,
        now: Nanos,
        into: &mut Vec<Record>,
    ) -> SampleKind {
        let full = self.budget.full_sample.is_due(now);
        let kind =
            SampleKind { fast: !self.budget.sample.is_due(now), full, late_rtt: self.acts_on_late_rtt(now) };
        self.urgent = false;
        self.sampled = now;
        if let Err(error) = self.flows.sample(source, now, full, into) {
            failed("sampling flows", &error);
        }
        kind
    }

    /// Charges a sample: `woke`, and the time since that was charged last.
    pub(crate) fn charge_sample(&mut self, now: Nanos, kind: SampleKind, woke: Duration) {
        let budget = &mut self.budget;
        let mut spent = woke + budget.spent();
        if kind.full {
            // Else a sample of all would put off those of the few that move much.
            budget.full_sample.done(now, std::mem::take(&mut spent));
        }
        match kind {
            SampleKind { fast: false, .. } => budget.sample.done(now, spent),
            SampleKind { late_rtt: true, .. } => budget.late_rtt.used(now, spent),
            SampleKind { .. } => budget.fast_sample.used(now, spent),
        }
    }

    /// Reads all flows.
    pub(crate) fn read_all(&mut self, source: &mut dyn Collector, now: Nanos, into: &mut Vec<Record>) {
        if let Err(error) = self.flows.read_all(source, now, into) {
            failed("reading flows", &error);
        }
    }

    /// Whether flows are sampled for a late round trip.
    fn acts_on_late_rtt(&self, now: Nanos) -> bool {
        self.urgent && self.budget.allows_late_rtt(now)
    }
}

/// Whether a round trip took much longer than the one before: the queue has just grown.
fn is_news(late: &Event) -> bool {
    let took = late.time_ns.saturating_sub(late.burst_ended_ns);
    let before = late.burst_ended_ns.saturating_sub(late.burst_began_ns);
    late.burst_began_ns == 0 || took / 2 >= before
}
