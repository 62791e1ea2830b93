//! What happens to a training, each when so much of its work is done, whoever trains.

use super::HOSTS;
use crate::bench::lab::Lab;
use crate::foreign::Foreign;
use crate::process::Process;
use anyhow::{Context, Result};
use rustix::process::Signal;
use std::time::{Duration, Instant};

/// Both ways between the racks.
const SPINES: [&str; 2] = ["spine0", "spine1"];
/// What the foreign flow takes of each spine.
const FOREIGN: f64 = 0.9;
/// The host that is drained, and the one that is lost; the first rank's is neither.
const DRAINED: usize = 3;
const LOST: usize = 6;

/// When it happens, as parts of the work, and how long it lasts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Moments {
    congested: f64,
    drained: f64,
    lost: f64,
    /// The foreign flow.
    flows: Duration,
    /// From the drain until the host is taken away.
    notice: Duration,
    /// Until a host is back.
    away: Duration,
}

impl Moments {
    /// For figures: moved a little from round to round, so that a loss does not always come as long after the state was saved.
    pub(super) fn of_round(round: usize) -> Self {
        // The golden ratio's multiples fill an interval evenly.
        let moved = 0.1 * (round as f64 * 0.618_034).fract();
        let (congested, drained, lost) = (0.1 + moved / 2.0, 0.4 + moved / 2.0, 0.75 + moved);
        let [flows, notice, away] = [10, 4, 5].map(Duration::from_secs);
        Self { congested, drained, lost, flows, notice, away }
    }

    /// As short as they show anything.
    pub(super) fn smoke() -> Self {
        let [flows, notice, away] = [3, 3, 1].map(Duration::from_secs);
        Self { congested: 0.1, drained: 0.4, lost: 0.7, flows, notice, away }
    }
}

/// What happens next.
#[derive(Debug)]
enum Next {
    Congestion,
    /// Two flows of one host, which share its link.
    Calm(Vec<Foreign>, Instant),
    Drain,
    TakenAway(Instant),
    Back(usize, Instant),
    Loss,
    Nothing,
}

/// The disturbances of one training.
#[derive(Debug)]
pub(super) struct Disturbances {
    moments: Moments,
    rate: u64,
    next: Next,
}

impl Disturbances {
    /// On links of `rate` bits a second.
    pub(super) fn new(moments: Moments, rate: u64) -> Self {
        Self { moments, rate, next: Next::Congestion }
    }

    /// Whether all of it has happened.
    pub(super) fn over(&self) -> bool {
        matches!(self.next, Next::Nothing)
    }

    /// Does what is due when this part of the work is done. `ranks` by host; `enter` starts one that takes part again.
    pub(super) fn advance(
        &mut self,
        lab: &mut Lab,
        done: f64,
        ranks: &mut [Option<Process>],
        enter: impl Fn(&Lab, &str, usize) -> Result<Process>,
    ) -> Result<()> {
        let Moments { congested, drained, lost, flows, notice, away } = self.moments;
        let next = std::mem::replace(&mut self.next, Next::Nothing);
        self.next = match next {
            Next::Congestion if done >= congested => {
                eprintln!("{:.0}%: a foreign flow on both spines for {flows:?}", done * 100.0);
                Next::Calm(self.congest(lab)?, Instant::now())
            }
            Next::Calm(running, since) if since.elapsed() >= flows => {
                running.into_iter().try_for_each(|flow| flow.stop().map(drop))?;
                Next::Drain
            }
            Next::Drain if done >= drained => {
                eprintln!("{:.0}%: a host is drained, and taken away {notice:?} later", done * 100.0);
                let host = host_name(lab, DRAINED)?;
                lab.deployment().harmonaize(&["drain", &host])?;
                Next::TakenAway(Instant::now())
            }
            Next::TakenAway(since) if since.elapsed() >= notice => {
                take_away(lab, DRAINED, ranks)?;
                Next::Back(DRAINED, Instant::now())
            }
            Next::Back(host, since) if since.elapsed() >= away => {
                bring_back(lab, host)?;
                let entered = enter(lab, &format!("{}", host + HOSTS), host)?;
                *ranks.get_mut(host).context("no such rank")? = Some(entered);
                if host == DRAINED { Next::Loss } else { Next::Nothing }
            }
            Next::Loss if done >= lost => {
                eprintln!("{:.0}%: a host is lost", done * 100.0);
                take_away(lab, LOST, ranks)?;
                Next::Back(LOST, Instant::now())
            }
            waiting => waiting,
        };
        Ok(())
    }

    fn congest(&self, lab: &Lab) -> Result<Vec<Foreign>> {
        // One host's two senders share what its link carries, so it carries both.
        let both = (FOREIGN * self.rate as f64) as u64 * SPINES.len() as u64;
        lab.fabric().set_rate("f1", Some(both))?;
        SPINES.iter().map(|spine| Foreign::start(lab.fabric(), "f0", "f1", spine, both)).collect()
    }
}

fn host_name(lab: &mut Lab, host: usize) -> Result<String> {
    let found = lab.deployment().hosts().get(host).map(|host| host.name.clone());
    found.with_context(|| format!("there is no host number {host}"))
}

/// Its cables, then its processes: nobody hears from it any more.
fn take_away(lab: &mut Lab, host: usize, ranks: &mut [Option<Process>]) -> Result<()> {
    let name = host_name(lab, host)?;
    lab.fabric().set_links(&name, false)?;
    lab.deployment().agent(host)?.signal(Signal::KILL)?;
    if let Some(mut rank) = ranks.get_mut(host).and_then(Option::take) {
        rank.signal(Signal::KILL)?;
    }
    Ok(())
}

fn bring_back(lab: &mut Lab, host: usize) -> Result<()> {
    let name = host_name(lab, host)?;
    lab.fabric().set_links(&name, true)?;
    lab.deployment().start_agent(host)?;
    lab.deployment().wait_until_ready()?;
    if host == DRAINED {
        lab.deployment().harmonaize(&["drain", &name, "--end"])?;
    }
    Ok(())
}
