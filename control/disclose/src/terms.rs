//! Negotiation: whether what a tenant wants of a communicator can be promised; else why not, and what could be.
//!
//! What is told of the provider's fabric by that is a step of a ladder (twelve a decade) and no more: what is asked for is rounded
//! up to one before anything is tried, so that whoever asks for ever more finds the step and not the rate, and all numbers of
//! a counter-offer are steps too. Reasons name the tenant's own values, and of others only that they are there.
//! A counter-offer, proposed while nothing else changes, is agreed on.

use harmonaize_abi::Collective;
use harmonaize_abi::session::{
    BUSBW, Clause, Constraints, MAX_REASONS, OnFailure, Priority, REGROUP, Reason, TARGETS, Target,
};
use std::time::Duration;

/// Steps of a decade, E12 of IEC 60063.
const STEPS: [u64; 12] = [10, 12, 15, 18, 22, 27, 33, 39, 47, 56, 68, 82];

/// A time is promised if it is predicted so many times shorter, for predictions know nothing of queues and processors.
const TIME_MARGIN: f64 = 1.25;

/// For a bus bandwidth so many times its rate is set aside: headers and acknowledgements travel too.
const RATE_MARGIN: f64 = 1.1;

/// A share of the network in quarters of the usual one: what the planner weighs communicators by.
pub fn quarters(constraints: &Constraints) -> u32 {
    let priority = match constraints.priority {
        Priority::Low => 1,
        Priority::Normal => 4,
        Priority::High => 16,
    };
    constraints.weight.saturating_mul(priority)
}

/// What the provider knows of a communicator and can do for it. Rates are bits a second that each host sends along a ring.
pub struct ProviderState<'a> {
    /// Its ranks.
    pub ranks: u32,
    /// Its hosts.
    pub hosts: u32,
    /// The largest weight for this tenant.
    pub max_weight: u32,
    /// How long what is promised is kept at most for members that regroup.
    pub max_regroup: Duration,
    /// What its hosts could send at all.
    pub line_rate: f64,
    /// What can be set aside for it beside all that is promised.
    pub available_rate: f64,
    /// Why its sums cannot be of the same bits in every run; none where they can.
    pub unordered: Option<&'a str>,
    /// Seconds that an operation of a collective and of so many bytes takes at this rate, as predicted.
    pub time: &'a dyn Fn(Collective, u64, f64) -> f64,
}

/// What comes of a proposal.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// It can be promised.
    Promise {
        /// What is to be set aside, bits a second that each host sends; 0 for nothing.
        rate: f64,
    },
    /// It cannot.
    Refuse {
        /// Why.
        reasons: Vec<Reason>,
        /// What can; none where there is nobody to promise it to.
        counter: Option<Box<Constraints>>,
    },
}

/// Considers a proposal. Of one that makes no sense, that is said, and what comes of the nearest that does.
pub fn negotiate(proposal: &Constraints, house: &ProviderState<'_>) -> Outcome {
    let mut reasons = proposal.check().err().unwrap_or_default();
    reasons.truncate(MAX_REASONS);
    let asked = &if reasons.is_empty() { proposal.clone() } else { proposal.clamped() };
    let mut talk = Negotiation { house, reasons, counter: asked.clone() };
    talk.what_is_offered();
    talk.drop_unreachable();
    let step = talk.fit_available();
    let Negotiation { house, reasons, counter } = talk;
    match reasons.is_empty() {
        true => Outcome::Promise { rate: step.map_or(0.0, |step| house.rate(step)) },
        false => Outcome::Refuse { reasons, counter: Some(Box::new(counter)) },
    }
}

/// A proposal that is looked at: what is wrong with it, and what it becomes without that.
struct Negotiation<'t, 'h> {
    house: &'t ProviderState<'h>,
    reasons: Vec<Reason>,
    counter: Constraints,
}

impl Negotiation<'_, '_> {
    fn refuse(&mut self, clause: Clause, text: String) {
        self.reasons.push(Reason { clause, text });
    }

    fn what_is_offered(&mut self) {
        let most = self.house.max_weight;
        if self.counter.weight > most {
            self.refuse(
                Clause::Weight,
                format!("a weight of {}; this tenant has at most {most}", self.counter.weight),
            );
            self.counter.weight = most.max(1);
        }
        let longest = self.house.max_regroup;
        if let Some(OnFailure::Regroup { within }) = self.counter.on_failure
            && within > longest
        {
            let text = format!("{within:?} to regroup in; nothing is kept for longer than {longest:?}");
            self.refuse(Clause::OnFailure, text);
            // Where nothing is ever kept, what is had without a word on it.
            let offer = OnFailure::Regroup { within: longest };
            self.counter.on_failure = (longest >= REGROUP.0).then_some(offer);
        }
        if let Some(why) = self.house.unordered.filter(|_| self.counter.ordered) {
            self.refuse(Clause::Order, format!("sums of the same bits in every run: {why}"));
            self.counter.ordered = false;
        }
    }

    /// Takes out what no plan could ever reach.
    fn drop_unreachable(&mut self) {
        let top = self.house.max_step();
        let Some(top) = top.filter(|_| self.counter.wants_guarantee()) else {
            self.drop_guarantees(top.is_none(), "its hosts send too little");
            return;
        };
        if self.counter.min_busbw > step_rate(top) {
            let text = format!(
                "{} B/s of bus bandwidth; its hosts alone limit it to about {} B/s",
                self.counter.min_busbw,
                step_rate(top)
            );
            self.refuse(Clause::Bandwidth, text);
        }
        let targets = self.counter.completions.iter().map(|target| (Clause::Completion, *target));
        let targets = targets.chain(self.counter.iteration.map(|target| (Clause::Iteration, target)));
        for (clause, target) in targets.collect::<Vec<_>>() {
            if !self.house.meets(&target, top) {
                let best = self.house.promised_time(&target, top);
                let text = format!("{target}; no plan for these ranks reaches less than about {best:?}");
                self.refuse(clause, text);
            }
        }
        self.relax(Some(top));
    }

    /// Tries what is left beside what others have been promised; the step that can be promised.
    fn fit_available(&mut self) -> Option<usize> {
        let needed = self.house.required_step(&self.counter)?;
        let fits = |step: &usize| self.house.rate(*step) <= self.house.available_rate;
        if fits(&needed) {
            return Some(needed);
        }
        let lower = (0..needed).rev().find(fits);
        let text = "not to be had beside what others are promised now";
        let before = self.counter.clone();
        self.relax(lower);
        if before.min_busbw != self.counter.min_busbw {
            self.refuse(Clause::Bandwidth, format!("{} B/s of bus bandwidth: {text}", before.min_busbw));
        }
        let lost = before.completions.iter().find(|target| !self.counter.completions.contains(target));
        if let Some(target) = lost {
            self.refuse(Clause::Completion, format!("{target}: {text}"));
        }
        if before.iteration != self.counter.iteration
            && let Some(Target { bytes, p99, .. }) = before.iteration
        {
            self.refuse(Clause::Iteration, format!("an iteration's {bytes} B within {p99:?}: {text}"));
        }
        lower
    }

    /// Nothing can be promised, if something was wanted.
    fn drop_guarantees(&mut self, refused: bool, why: &str) {
        if refused && self.counter.wants_guarantee() {
            self.refuse(Clause::Bandwidth, format!("nothing can be promised: {why}"));
            self.relax(None);
        }
    }

    /// Lessens all that is wanted to what a step gives; without one to nothing.
    fn relax(&mut self, step: Option<usize>) {
        let counter = &mut self.counter;
        let Some(step) = step else {
            (counter.min_busbw, counter.iteration) = (0, None);
            counter.completions.clear();
            return;
        };
        counter.min_busbw = counter.min_busbw.min(step_rate(step));
        let (house, longest) = (&self.house, TARGETS.1);
        for target in counter.completions.iter_mut().chain(&mut counter.iteration) {
            if !house.meets(target, step) {
                target.p99 = house.promised_time(target, step);
            }
        }
        // Rounding must not make a smaller operation's target the longer one.
        counter.order_times();
        counter.completions.retain(|target| target.p99 <= longest);
        counter.iteration = counter.iteration.filter(|target| target.p99 <= longest);
    }
}

impl ProviderState<'_> {
    /// Bits a second that each host sends for a step of bus bandwidth, with what travels beside.
    fn rate(&self, step: usize) -> f64 {
        step_rate(step) as f64 * 8.0 * RATE_MARGIN / self.busbw_of_rate()
    }

    /// Bus bandwidth over what a host sends: of several ranks on a host, one host's bytes are all of theirs.
    fn busbw_of_rate(&self) -> f64 {
        let part = |of: u32| 1.0 - 1.0 / f64::from(of.max(2));
        part(self.ranks) / part(self.hosts)
    }

    /// The largest step that its hosts could send.
    fn max_step(&self) -> Option<usize> {
        let most = self.line_rate / 8.0 / RATE_MARGIN * self.busbw_of_rate();
        (0..steps()).rev().find(|step| step_rate(*step) as f64 <= most * (1.0 + 1e-9))
    }

    /// Whether a target can be promised at a step.
    fn meets(&self, target: &Target, step: usize) -> bool {
        let time = (self.time)(target.collective, target.bytes, self.rate(step)) * TIME_MARGIN;
        time <= target.p99.as_secs_f64() * (1.0 + 1e-9)
    }

    /// The time that can be promised at a step, rounded up to a step of its own.
    fn promised_time(&self, target: &Target, step: usize) -> Duration {
        let nanos = (self.time)(target.collective, target.bytes, self.rate(step)) * TIME_MARGIN * 1e9;
        let micros = (nanos / 1e3).ceil().clamp(0.0, 1e15) as u64;
        Duration::from_micros(rounded_up(micros))
    }

    /// The least step that gives all that is wanted; none where nothing is.
    fn required_step(&self, constraints: &Constraints) -> Option<usize> {
        if !constraints.wants_guarantee() {
            return None;
        }
        let targets = || constraints.completions.iter().chain(&constraints.iteration);
        let enough = |step: usize| {
            step_rate(step) >= constraints.min_busbw && targets().all(|target| self.meets(target, step))
        };
        // What is enough stays so with more.
        let (mut lower, mut upper) = (0, steps());
        while lower < upper {
            let middle = lower + (upper - lower) / 2;
            if enough(middle) { upper = middle } else { lower = middle + 1 }
        }
        Some(lower.min(steps() - 1))
    }
}

/// How many steps there are, of bus bandwidth.
fn steps() -> usize {
    let decades = (BUSBW.1 / BUSBW.0).ilog10() as usize;
    decades * STEPS.len() + 1
}

/// Bytes a second of a step.
fn step_rate(step: usize) -> u64 {
    let mantissa = STEPS.get(step % STEPS.len()).copied().unwrap_or(10);
    let decade = 10_u64.saturating_pow((step / STEPS.len()).min(18) as u32);
    (BUSBW.0 / 10).saturating_mul(mantissa).saturating_mul(decade)
}

/// The next number of the ladder, from 10 up.
fn rounded_up(number: u64) -> u64 {
    let mut decade = 1_u64;
    loop {
        let step = STEPS.iter().map(|step| step.saturating_mul(decade)).find(|step| *step >= number);
        match step {
            Some(step) => return step,
            None => decade = decade.saturating_mul(10),
        }
    }
}

#[cfg(test)]
mod tests;
