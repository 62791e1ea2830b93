//! Up to which sizes a communicator's operations go straight between all its hosts; chosen anew for every epoch.

use super::State;
use super::coding::MOST_HOSTS;
use super::communicator::Communicator;
use super::replan::Planned;
use harmonaize_abi::session::MAX_TARGET_BYTES;
use harmonaize_planner::{Bytes, Direct, HostId, Nanos, Rate, Reach, delays, exchange_rate, line_rate};

/// How a tenant's small operations go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Directly {
    /// As control finds fastest.
    #[default]
    Chosen,
    /// Along the ring, whatever their size.
    Never,
    /// In one shot up to [`FORCED`].
    OneShot,
    /// In two up to [`FORCED`].
    TwoShot,
}

/// Up to which size an operator's choice holds.
const FORCED: Bytes = Bytes(1 << 20);

/// How small operations go, and why.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Shots {
    pub sizes: Direct,
    /// In words.
    pub reason: String,
}

impl State {
    /// For the next epoch of a communicator, by this plan and with hosts in this order.
    pub(super) fn choose_shots(&self, id: u64, order: &[u32], planned: Option<&Planned>) -> Shots {
        let none = |reason: &str| Shots { sizes: Direct::default(), reason: reason.to_owned() };
        let Some(known) = self.communicators.get(&id) else { return Shots::default() };
        let hosts = known.members.len();
        if hosts < 2 {
            return none("nothing crosses a wire");
        }
        if let Some(why) = self.indirect(known) {
            return none(why);
        }
        let forced = |one_shot, two_shot| Shots {
            sizes: Direct { one_shot, two_shot },
            reason: "an operator chose".to_owned(),
        };
        match self.settings.direct.get(&known.tenant).copied().unwrap_or_default() {
            Directly::Chosen => {}
            Directly::Never => return forced(Bytes(0), Bytes(0)),
            Directly::OneShot => return forced(FORCED, Bytes(0)),
            Directly::TwoShot => return forced(Bytes(0), FORCED),
        }
        let members: Vec<HostId> = known.members.iter().map(|member| member.host).collect();
        let ring: Vec<HostId> = order.iter().filter_map(|at| members.get(*at as usize)).copied().collect();
        let conditions = self.estimates.conditions(&self.settings.topology, self.withdrawn());
        let direct = exchange_rate(&known.coding.usage, &conditions, &self.takers(id));
        let line = line_rate(&self.settings.topology, &members).0 as f64;
        let along = planned.map_or(direct.0 as f64, |planned| line / planned.slowdown.max(1.0));
        let (delay, hop) = delays(&self.settings.topology, &ring);
        let reach = Reach {
            hosts: hosts as u32,
            delay,
            hop,
            direct,
            ring: Rate(along as u64),
            chunk: known.tuning.chunk,
        };
        let sizes = reach.direct(known.shots.sizes);
        if self.sums(id).ordered {
            let sizes = Direct { two_shot: Bytes(MAX_TARGET_BYTES), ..sizes };
            return Shots {
                sizes,
                reason: "contributions are added in one order: its tenant wants that".to_owned(),
            };
        }
        Shots { sizes, reason: words(&reach, sizes) }
    }

    /// Why a communicator's operations cannot go straight from each of its hosts to all; none where they can.
    pub(super) fn indirect(&self, known: &Communicator) -> Option<&'static str> {
        if known.members.len() > MOST_HOSTS {
            return Some("too many hosts to send to each other directly");
        }
        (!self.all_can(known, |abilities| abilities.direct)).then_some("not all agents can")
    }
}

fn words(reach: &Reach, sizes: Direct) -> String {
    let Reach { delay, hop, direct, ring, .. } = reach;
    let time = |seconds: f64| Nanos((seconds * 1e9) as u64 / 1000 * 1000);
    let (one, two) = (sizes.one_shot, sizes.two_shot);
    format!(
        "{delay} one way between the farthest, {hop} along the ring; {direct} to all at once, {ring} along the ring; predicted for {one}: {} in one shot, {} in two, {} by the ring; for {two}: {} in two, {} by the ring",
        time(reach.one_shot(one)),
        time(reach.two_shot(one)),
        time(reach.ring(one)),
        time(reach.two_shot(two)),
        time(reach.ring(two)),
    )
}
