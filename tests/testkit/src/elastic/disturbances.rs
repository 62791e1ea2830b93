//! What happens to an elastic training, each when so much of its work is done, whoever trains. There is cross traffic on both spines, a
//! host that is drained and then taken away, and a host that is lost.

use crate::clock::realtime_ns;
use crate::cross_traffic::CrossTraffic;
use crate::deployment::Deployment;
use crate::process::Process;
use anyhow::{Context, Result};
use rustix::process::Signal;
use std::time::{Duration, Instant};

/// Both ways between the racks.
const SPINES: [&str; 2] = ["spine0", "spine1"];
/// What the cross traffic takes of each spine.
const CROSS_TRAFFIC_SHARE: f64 = 0.9;

/// Where it happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Places {
    /// Rate of each link of a spine in bits a second.
    pub rate: u64,
    /// By position, the host that is drained; not the first rank's.
    pub drained: usize,
    /// And the one that is lost; it may be the same.
    pub lost: usize,
}

/// When it happens, as parts of the work, and how long it lasts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Moments {
    /// The cross traffic begins.
    pub congested: f64,
    /// A host is drained.
    pub drained: f64,
    /// A host is lost.
    pub lost: f64,
    /// How long the cross traffic lasts.
    pub flows: Duration,
    /// Whether it then goes on until the training accumulates more, or a host is to be drained.
    pub until_adapted: bool,
    /// From the drain until the host is taken away.
    pub notice: Duration,
    /// Until a host is back.
    pub away: Duration,
}

/// A disturbance's beginning or end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Cross traffic begins or ends.
    CrossTraffic,
    /// A host is drained: its leaving is announced.
    Drained,
    /// The drained host is taken away.
    TakenAway,
    /// A host is lost without a word.
    Lost,
    /// A host is back.
    Back,
}

/// What has happened, and when, by CLOCK_REALTIME.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Happened {
    /// When.
    pub at_ns: u64,
    /// What.
    pub kind: Kind,
    /// For people.
    pub what: String,
}

/// What happens next.
#[derive(Debug)]
enum Next {
    Congestion,
    /// Two flows of one host, which share its link.
    Calm(Vec<CrossTraffic>, Instant),
    Drain,
    TakenAway(Instant),
    /// After the drain, or else after the loss.
    Back {
        drained: bool,
        since: Instant,
    },
    Loss,
    Nothing,
}

/// The disturbances of one training.
#[derive(Debug)]
pub struct Disturbances {
    moments: Moments,
    places: Places,
    next: Next,
    /// In order.
    pub happened: Vec<Happened>,
}

impl Disturbances {
    /// None of it has happened yet.
    pub fn new(moments: Moments, places: Places) -> Self {
        Self { moments, places, next: Next::Congestion, happened: Vec::new() }
    }

    /// Whether all of it has happened.
    pub fn over(&self) -> bool {
        matches!(self.next, Next::Nothing)
    }

    fn note(&mut self, kind: Kind, what: String) -> Result<()> {
        eprintln!("{what}");
        self.happened.push(Happened { at_ns: realtime_ns()?, kind, what });
        Ok(())
    }

    /// Does what is due when this part of the work is done. `adapted`: whether the training has accumulated more than at first. `ranks` by
    /// host; `enter` starts one on a host that takes part again.
    pub fn advance(
        &mut self,
        deployment: &mut Deployment,
        (done, adapted): (f64, bool),
        ranks: &mut [Option<Process>],
        mut enter: impl FnMut(usize) -> Result<Process>,
    ) -> Result<()> {
        let Moments { congested, drained, lost, flows, until_adapted, notice, away } = self.moments;
        let Places { rate, drained: going, lost: losing } = self.places;
        let percent = done * 100.0;
        let next = std::mem::replace(&mut self.next, Next::Nothing);
        self.next = match next {
            Next::Congestion if done >= congested => {
                let (taken, each) = (CROSS_TRAFFIC_SHARE * 100.0, rate / 1_000_000);
                let what = format!(
                    "{percent:.0}%: cross traffic takes {taken:.0}% of both spines' {each} Mbit/s for {flows:?}"
                );
                self.note(Kind::CrossTraffic, what)?;
                Next::Calm(congest(deployment, rate)?, Instant::now())
            }
            Next::Calm(running, since)
                if since.elapsed() >= flows && (adapted || !until_adapted || done >= drained) =>
            {
                running.into_iter().try_for_each(|flow| flow.stop().map(drop))?;
                self.note(Kind::CrossTraffic, "the cross traffic ends".to_owned())?;
                Next::Drain
            }
            Next::Drain if done >= drained => {
                let host = host_name(deployment, going)?;
                let what = format!("{percent:.0}%: {host} is drained, and taken away {notice:?} later");
                self.note(Kind::Drained, what)?;
                deployment.harmonaize(&["drain", &host])?;
                Next::TakenAway(Instant::now())
            }
            Next::TakenAway(since) if since.elapsed() >= notice => {
                take_away(deployment, going, ranks)?;
                self.note(Kind::TakenAway, format!("{} is taken away", host_name(deployment, going)?))?;
                Next::Back { drained: true, since: Instant::now() }
            }
            Next::Back { drained, since } if since.elapsed() >= away => {
                let host = if drained { going } else { losing };
                bring_back(deployment, host, drained)?;
                self.note(Kind::Back, format!("{} is back", host_name(deployment, host)?))?;
                *ranks.get_mut(host).context("no such rank")? = Some(enter(host)?);
                if drained { Next::Loss } else { Next::Nothing }
            }
            Next::Loss if done >= lost => {
                let what = format!("{percent:.0}%: {} is lost", host_name(deployment, losing)?);
                self.note(Kind::Lost, what)?;
                take_away(deployment, losing, ranks)?;
                Next::Back { drained: false, since: Instant::now() }
            }
            waiting => waiting,
        };
        Ok(())
    }
}

/// Cross traffic over both spines, from the first rack to the second.
fn congest(deployment: &Deployment, rate: u64) -> Result<Vec<CrossTraffic>> {
    // One host's two senders share what its link carries, so it carries both.
    let both = (CROSS_TRAFFIC_SHARE * rate as f64) as u64 * SPINES.len() as u64;
    let fabric = deployment.fabric();
    fabric.set_rate("f1", Some(both))?;
    SPINES.iter().map(|spine| CrossTraffic::start(fabric, "f0", "f1", spine, both)).collect()
}

fn host_name(deployment: &Deployment, host: usize) -> Result<String> {
    let found = deployment.hosts().get(host).map(|host| host.name.clone());
    found.with_context(|| format!("there is no host number {host}"))
}

/// Its cables, then its processes: nobody hears from it any more.
fn take_away(deployment: &mut Deployment, host: usize, ranks: &mut [Option<Process>]) -> Result<()> {
    let name = host_name(deployment, host)?;
    deployment.fabric().set_links(&name, false)?;
    deployment.agent(host)?.signal(Signal::KILL)?;
    if let Some(mut rank) = ranks.get_mut(host).and_then(Option::take) {
        rank.signal(Signal::KILL)?;
    }
    Ok(())
}

fn bring_back(deployment: &mut Deployment, host: usize, drained: bool) -> Result<()> {
    let name = host_name(deployment, host)?;
    deployment.fabric().set_links(&name, true)?;
    deployment.start_agent(host)?;
    deployment.wait_until_ready()?;
    if drained {
        deployment.harmonaize(&["drain", &name, "--end"])?;
    }
    Ok(())
}
