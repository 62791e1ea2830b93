//! What the machines have said so far, and whether it is well.

use super::layout::{MachineSpec, Side};
use crate::vm::machine::GuestOutcome;
use anyhow::{Result, bail};
use harmonaize_guest::Mark;

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
    pub(super) fn new(places: &[MachineSpec]) -> Self {
        let watched = |place: &MachineSpec| Watched {
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
    pub(super) fn closed(&mut self, machine: usize, outcome: &GuestOutcome) -> Result<()> {
        let Some(watched) = self.machines.get_mut(machine) else { return Ok(()) };
        let name = &watched.name;
        match outcome {
            GuestOutcome::Done(0) if watched.side == Side::Host => {}
            GuestOutcome::Done(failed) => bail!("{name} powered off, with {failed} failures"),
            GuestOutcome::TimedOut => bail!("{name} did not end, {}", watched.place()),
            GuestOutcome::Died(how) => bail!("{name} died, {}: {how}", watched.place()),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dpu::layout::Order;
    use std::path::Path;

    /// One pair: the unit is machine 0, the host machine 1.
    fn watch(lines: &[(usize, &str)]) -> (Watch, Result<()>) {
        let mut watch = Watch::new(&Order { pairs: 1, seed: 1 }.places(Path::new("/s")));
        let said = lines.iter().try_for_each(|(machine, line)| watch.line(*machine, line));
        (watch, said)
    }

    const GOOD: &[(usize, &str)] = &[
        (0, "@@ end links 0 1.00"),
        (1, "@@ begin ping-of-unit"),
        (1, "Couldn't connect to 10.0.1.2:18600"),
        (1, "@@ end ping-of-unit 0 1.00"),
        (0, "@@ begin agent"),
        (1, "@@ begin all-reduce"),
        (1, "@@ end all-reduce 0 2.00"),
        (1, "@@ begin telemetry"),
        (1, "@@ end telemetry 0 1.00"),
        (1, "@@ halt 0"),
    ];

    #[test]
    fn a_run_ends_when_every_host_has() {
        let (mut watch, said) = watch(GOOD);
        said.unwrap();
        assert!(!watch.done(), "the emulator has not ended");
        assert_eq!(watch.halted(1), Some(0));
        watch.closed(1, &GuestOutcome::Done(0)).unwrap();
        assert!(watch.done());
        assert_eq!(watch.state(), "unit0 at agent");
    }

    #[test]
    fn a_host_that_left_something_out_has_failed() {
        let (mut watch, said) = watch(&GOOD[..4]);
        said.unwrap();
        let error = watch.closed(1, &GuestOutcome::Done(0)).unwrap_err().to_string();
        assert_eq!(error, "host0 never ran all-reduce");
    }

    #[test]
    fn whatever_fails_is_named_with_its_machine() {
        let said = |lines: &[(usize, &str)]| watch(lines).1.unwrap_err().to_string();
        assert_eq!(said(&[(1, "@@ end all-reduce 1 2.00")]), "host0: all-reduce failed (1)");
        assert_eq!(said(&[(0, "@@ end links 1 2.00")]), "unit0: links failed (1)");
        assert_eq!(said(&[(0, "@@ end agent 0 2.00")]), "unit0: the agent ended");
        let closed = |machine, outcome: &GuestOutcome| {
            let (mut watch, said) = watch(GOOD);
            said.unwrap();
            watch.closed(machine, outcome).unwrap_err().to_string()
        };
        assert_eq!(closed(0, &GuestOutcome::Done(0)), "unit0 powered off, with 0 failures");
        assert_eq!(closed(1, &GuestOutcome::Done(1)), "host0 powered off, with 1 failures");
        assert_eq!(closed(1, &GuestOutcome::TimedOut), "host0 did not end, after telemetry");
        assert_eq!(closed(0, &GuestOutcome::Died("killed".into())), "unit0 died, at agent: killed");
        assert_eq!(watch(&[]).0.state(), "unit0 while it booted, host0 while it booted");
    }
}
