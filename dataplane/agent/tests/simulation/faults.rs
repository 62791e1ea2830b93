//! What happens to the world, and what may fail of it.

use crate::control::LEASE;
use crate::world::World;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use std::rc::Rc;
use std::time::Duration;
use tokio::time::sleep;

/// Something that happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// A session's connection ends.
    SessionCut { host: usize },
    /// Nothing gets through between an agent and control for a while.
    SessionSilent { host: usize, lasts: Duration },
    /// What agent and control say takes long, for a while.
    SessionSlow { host: usize, lasts: Duration },
    /// Control ends in order, and starts again.
    ControlStops { lasts: Duration },
    /// Control is killed, and starts again with what is stored.
    ControlKilled { lasts: Duration },
    /// An agent's task stands still.
    AgentStill { host: usize, lasts: Duration },
    /// An engine's thread stands still.
    EngineStill { host: usize, lasts: Duration },
    /// Messages between agents take longer.
    NetworkSlow { lasts: Duration },
    /// An operator has a communicator take another order.
    Reorder,
    /// An agent is killed with its tenants' processes; another takes its place.
    AgentKilled { host: usize },
    /// An agent ends in order, as when its host goes down; another takes its place.
    AgentStops { host: usize },
    /// A tenant's process is killed.
    ProcessKilled { rank: u32 },
    /// Links between two hosts end.
    LinksSevered { hosts: (usize, usize) },
    /// An agent has no session for longer than its lease.
    LeaseOver { host: usize },
}

impl Fault {
    /// One that no operation may fail of.
    pub(crate) fn gentle(random: &mut ChaCha8Rng, hosts: usize) -> Self {
        let host = random.random_range(0..hosts);
        let lasts = Duration::from_millis(random.random_range(100..8000));
        let short = Duration::from_millis(random.random_range(10..1500));
        match random.random_range(0..9) {
            0 => Self::SessionCut { host },
            1 => Self::SessionSilent { host, lasts },
            2 => Self::SessionSlow { host, lasts },
            3 => Self::ControlStops { lasts },
            4 => Self::ControlKilled { lasts },
            5 => Self::AgentStill { host, lasts: short },
            6 => Self::EngineStill { host, lasts: short },
            7 => Self::NetworkSlow { lasts },
            _ => Self::Reorder,
        }
    }

    /// One that ends communicators.
    pub(crate) fn hard(random: &mut ChaCha8Rng, hosts: usize) -> Self {
        let host = random.random_range(0..hosts);
        match random.random_range(0..5) {
            0 => Self::AgentKilled { host },
            4 => Self::AgentStops { host },
            1 => Self::ProcessKilled { rank: host as u32 },
            2 => Self::LinksSevered { hosts: (host, (host + 1) % hosts) },
            _ => Self::LeaseOver { host },
        }
    }

    /// Whether processes on a host end by it.
    pub(crate) fn kills(self, on: usize) -> bool {
        matches!(self, Self::AgentKilled { host } | Self::AgentStops { host } if host == on)
    }

    /// Whether messages between agents, or threads, are late by it.
    pub(crate) fn holds_up(self) -> bool {
        matches!(self, Self::AgentStill { .. } | Self::EngineStill { .. } | Self::NetworkSlow { .. })
    }

    pub(crate) async fn happen(self, world: Rc<World>) {
        world.happens(self);
        world.note(format_args!("{self:?}"));
        match self {
            Self::SessionCut { host } => world.wires.cut(host),
            Self::SessionSilent { host, lasts } => silent(&world, host, lasts).await,
            Self::SessionSlow { host, lasts } => {
                world.wires.set_delay(host, 700);
                sleep(lasts).await;
                world.wires.set_delay(host, 2);
            }
            Self::ControlStops { lasts } => {
                let mut control = world.control.lock().await;
                control.stop().await;
                sleep(lasts).await;
                control.start();
            }
            Self::ControlKilled { lasts } => {
                let mut control = world.control.lock().await;
                control.kill();
                sleep(lasts).await;
                control.start();
            }
            Self::AgentStill { host, lasts } => {
                world.stands_still(lasts);
                let host = world.host(host);
                host.agent_runs.send_replace(false);
                sleep(lasts).await;
                host.agent_runs.send_replace(true);
            }
            Self::EngineStill { host, lasts } => {
                world.stands_still(lasts);
                let host = world.host(host);
                host.engine_runs.send_replace(false);
                sleep(lasts).await;
                host.engine_runs.send_replace(true);
            }
            Self::NetworkSlow { lasts } => {
                world.network.set_delay(60);
                sleep(lasts).await;
                world.network.set_delay(3);
            }
            Self::Reorder => drop(world.reorder().await),
            Self::AgentKilled { host } => {
                world.harmed_by(self);
                world.replace_host(host);
            }
            Self::AgentStops { host } => {
                world.harmed_by(self);
                world.host(host).stop.notify_one();
                sleep(Duration::from_secs(1)).await;
                world.replace_host(host);
            }
            Self::ProcessKilled { rank } => {
                world.harmed_by(self);
                world.kill_process(rank).await;
            }
            Self::LinksSevered { hosts: (one, other) } => {
                world.harmed_by(self);
                world.network.sever(world.host(one).port, world.host(other).port);
            }
            Self::LeaseOver { host } => {
                sleep(Duration::ZERO).await;
                world.harmed_by(self);
                silent(&world, host, LEASE + Duration::from_secs(5)).await;
            }
        }
        world.note(format_args!("over: {self:?}"));
    }
}

async fn silent(world: &World, host: usize, lasts: Duration) {
    world.wires.set_open(host, false);
    sleep(lasts).await;
    world.wires.set_open(host, true);
}
