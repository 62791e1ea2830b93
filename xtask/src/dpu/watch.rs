//! What the machines have said so far, and whether it is well.

use super::layout::{Place, Side};
use crate::vm::job::Mark;
use crate::vm::machine::Verdict;
use anyhow::{Result, bail};

/// Every machine's progress.
#[derive(Debug)]
pub(super) struct Watch {
    machines: Vec<Watched>,
}

#[derive(Debug)]
struct Watched {
    name: String,
    side: Side,
    /// The steps that are still to end well.
    expected: Vec<String>,
    /// What runs.
    current: Option<String>,
    ended: Vec<(String, f64)>,
    halted: Option<u32>,
    over: bool,
}

impl Watch {
    /// Nothing has been said yet.
    pub(super) fn new(places: &[Place]) -> Self {
        let watched = |place: &Place| Watched {
            name: place.name.clone(),
            side: place.side,
            expected: place.job.steps.iter().map(|step| step.name.clone()).collect(),
            current: None,
            ended: Vec::new(),
            halted: None,
            over: false,
        };
        Self { machines: places.iter().map(watched).collect() }
    }

    /// A line of a machine's console; an error if it says that something went wrong.
    pub(super) fn line(&mut self, machine: usize, line: &str) -> Result<()> {
        let Some(watched) = self.machines.get_mut(machine) else { return Ok(()) };
        let name = &watched.name;
        match Mark::find(line) {
            Some(Mark::Begin(step)) => watched.current = Some(step),
            Some(Mark::End { name: step, status, .. }) if !status.fine() => {
                bail!("{name}: {step} failed ({status})")
            }
            // An agent ends when it is told to, and nobody does.
            Some(Mark::End { name: step, .. }) if watched.side == Side::Unit && step == "agent" => {
                bail!("{name}: the agent ended")
            }
            Some(Mark::End { name: step, seconds, .. }) => {
                println!("{name:<6} {step:<20} {seconds:>7.2} s");
                watched.expected.retain(|expected| *expected != step);
                watched.ended.push((step, seconds));
                watched.current = None;
            }
            Some(Mark::Halt(failed)) => watched.halted = Some(failed),
            None => {}
        }
        Ok(())
    }

    /// How many steps the guest said had failed when it powered off.
    pub(super) fn halted(&self, machine: usize) -> Option<u32> {
        self.machines.get(machine)?.halted
    }

    /// A machine has ended; an error unless it is a host that had run all.
    pub(super) fn closed(&mut self, machine: usize, verdict: &Verdict) -> Result<()> {
        let Some(watched) = self.machines.get_mut(machine) else { return Ok(()) };
        let name = &watched.name;
        match verdict {
            Verdict::Done(0) if watched.side == Side::Host => {}
            Verdict::Done(failed) => bail!("{name} powered off, with {failed} failures"),
            Verdict::TimedOut => bail!("{name} did not end, {}", watched.place()),
            Verdict::Died(how) => bail!("{name} died, {}: {how}", watched.place()),
        }
        if let Some(step) = watched.expected.first() {
            bail!("{name} never ran {step}");
        }
        watched.over = true;
        Ok(())
    }

    /// Whether every host has run all.
    pub(super) fn done(&self) -> bool {
        self.machines.iter().filter(|watched| watched.side == Side::Host).all(|watched| watched.over)
    }

    /// What each machine is at, for whoever waits no longer.
    pub(super) fn state(&self) -> String {
        let waiting = self.machines.iter().filter(|watched| !watched.over);
        waiting.map(|watched| format!("{} {}", watched.name, watched.place())).collect::<Vec<_>>().join(", ")
    }
}

impl Watched {
    fn place(&self) -> String {
        match (&self.current, self.ended.last()) {
            (Some(step), _) => format!("at {step}"),
            (None, Some((step, _))) => format!("after {step}"),
            (None, None) => "while it booted".to_owned(),
        }
    }
}
