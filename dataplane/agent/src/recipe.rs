//! From control's recipe to what the engine takes, checked: an agent runs no plan that it has not checked itself.

use crate::aggregation;
use harmonaize_abi::{Collective, Rank};
use harmonaize_api::v1::{self, Recipe};
use harmonaize_codec::Codec;
use harmonaize_core::{EpochPlan, Nanos, Timeouts};
use harmonaize_engine::{Aggregator, Peer};
use harmonaize_plan::{
    Access, Coding, Group, Local, Participant, Plan, Request, Retention, Shots, Tuning, check, program,
};
use harmonaize_transport::Introduction;
use std::collections::VecDeque;

/// Longest that participants have to answer before a time-out is declared.
const INQUIRY: u64 = 1_000_000_000;

/// A recipe that can be executed.
#[derive(Debug)]
pub struct Expanded {
    /// The plan under its epoch.
    pub plan: EpochPlan,
    /// Who we are.
    pub me: Participant,
    /// The others.
    pub peers: Vec<Peer>,
    /// The aggregator, if there is one.
    pub aggregator: Option<Aggregator>,
    /// Times.
    pub timeouts: Timeouts,
}

/// Why a recipe cannot be executed, for the operator.
#[derive(Debug, thiserror::Error)]
#[error("recipe for communicator {communicator:016x}, epoch {epoch}: {what}")]
pub struct RecipeError {
    communicator: u64,
    epoch: u64,
    what: String,
}

/// Plans that are kept in mind as proved.
const PROVED: usize = 32;

/// Plans that were proved lately: a change that leaves order and landing slots as they are needs no other proof.
#[derive(Debug, Default)]
pub struct Proved(VecDeque<(Plan, u32, bool)>);

impl Proved {
    /// Proves what was not proved yet.
    fn prove(&mut self, plan: &EpochPlan) -> Result<(), String> {
        let codes = plan.coding.is_some();
        let known = |(known, slots, coded): &(Plan, u32, bool)| {
            *known == plan.plan && *slots == plan.landing_slots && (*coded || !codes)
        };
        if !self.0.iter().any(known) {
            prove(plan)?;
            self.0.truncate(PROVED - 1);
            self.0.push_front((plan.plan.clone(), plan.landing_slots, codes));
        }
        Ok(())
    }
}

/// Expands a recipe.
///
/// # Errors
/// If anything in it does not fit together.
pub fn expand(recipe: &Recipe, proved: &mut Proved) -> Result<Expanded, RecipeError> {
    let error = |what: String| RecipeError { communicator: recipe.communicator, epoch: recipe.epoch, what };
    let members = recipe.participants.iter().map(|p| p.ranks.iter().map(|&rank| Rank(rank)).collect());
    let group = Group::new(members.collect()).ok_or_else(|| error("ranks missing or there twice".into()))?;
    let order = recipe.order.iter().map(|&participant| Participant(participant)).collect();
    let plan = Plan::new(group, order).map_err(|e| error(e.to_string()))?;
    let me = Participant(recipe.me);
    if plan.group().local(me).is_empty() {
        return Err(error(format!("participant {} has no rank", me.0)));
    }
    let tuning = recipe.tuning.as_ref().ok_or_else(|| error("no tuning".into()))?;
    let small = |name: &str, value: u64| {
        u32::try_from(value)
            .ok()
            .filter(|v| *v > 0)
            .ok_or_else(|| error(format!("{name} {value} out of range")))
    };
    let channels = u16::try_from(tuning.channels).ok().filter(|channels| (1..=4096).contains(channels));
    let told = recipe.aggregation.as_ref();
    let aggregation = told.map(|told| aggregation::read(told, plan.participants(), me)).transpose();
    let (rules, aggregator) = aggregation.map_err(error)?.unzip();
    let plan = EpochPlan {
        epoch: small("epoch", recipe.epoch)?,
        plan,
        tuning: Tuning {
            chunk_bytes: small("chunk", tuning.chunk_bytes)?,
            segment_bytes: small("segment", tuning.segment_bytes)?,
            copy_bytes: tuning.copy_bytes,
            one_shot_bytes: tuning.one_shot_bytes,
            two_shot_bytes: tuning.two_shot_bytes,
            ..Tuning::default()
        },
        channels: channels.ok_or_else(|| error(format!("{} channels", tuning.channels)))?,
        landing_slots: tuning.landing_slots,
        coding: recipe.coding.as_ref().map(coding).transpose().map_err(error)?,
        aggregation: rules,
    };
    let operation = Nanos(tuning.operation_timeout_ns);
    let timeouts = Timeouts { operation, inquiry: Nanos((operation.0 / 4).min(INQUIRY)) };
    proved.prove(&plan).map_err(error)?;
    let peers = recipe.peers.iter().map(|peer| introduce(peer).map_err(error)).collect::<Result<_, _>>()?;
    Ok(Expanded { plan, me, peers, aggregator, timeouts })
}

/// Expands every algorithm for every participant, for mapped and for remote tensors and each way of keeping inputs, and has
/// the checker prove the whole: each output holds what it must, nobody waits on himself.
fn prove(plan: &EpochPlan) -> Result<(), String> {
    let retentions = [Retention::KeepInputs, Retention::CopyInputs, Retention::HoldOutputs];
    for &collective in Collective::ALL {
        for retention in retentions {
            // An AllToAll is never in place.
            if collective == Collective::AllToAll && retention == Retention::HoldOutputs {
                continue;
            }
            let can = match collective {
                Collective::AllReduce => true,
                Collective::AllToAll | Collective::AllGather => {
                    plan.coding.is_some_and(|coding| coding.exchanges)
                }
                Collective::ReduceScatter | Collective::Broadcast | Collective::Barrier => false,
            };
            let codes = can && retention != Retention::CopyInputs;
            let exact = |shots| Request { collective, root: Rank(0), coded: false, shots };
            let coded = Request { coded: true, ..exact(Shots::Many) };
            // An operation that began in an earlier epoch goes on in as many shots as it began in, whatever this one says.
            let shots: &[Shots] = match collective {
                Collective::AllReduce => &[Shots::Many, Shots::One, Shots::Two],
                Collective::AllToAll => &[Shots::Many],
                Collective::AllGather
                | Collective::ReduceScatter
                | Collective::Broadcast
                | Collective::Barrier => &[Shots::Many, Shots::One],
            };
            let coded = (codes && plan.coding.is_some()).then_some(coded);
            for request in shots.iter().map(|shots| exact(*shots)).chain(coded) {
                for access in [Access::Mapped, Access::Remote] {
                    prove_one(plan, request, retention, access)
                        .map_err(|error| format!("{collective}: {error}"))?;
                }
            }
        }
    }
    Ok(())
}

fn prove_one(plan: &EpochPlan, request: Request, retention: Retention, access: Access) -> Result<(), String> {
    let local = Local { access: &|_| access, retention };
    let everyone = (0..plan.plan.participants()).map(Participant);
    let programs = everyone.map(|participant| program(&plan.plan, request, participant, &local));
    let programs = programs.collect::<Result<Vec<_>, _>>().map_err(|error| error.to_string())?;
    let locals = vec![local; programs.len()];
    check(&plan.plan, request, &programs, plan.landing_slots, &locals).map_err(|error| error.to_string())?;
    Ok(())
}

/// How tensors travel, by a codec that is known here and within a bound that can be kept.
fn coding(told: &v1::Coding) -> Result<Coding, String> {
    match told.most {
        Some(most) if !(0.0..=1.0).contains(&most) => Err(format!("a bound of {most} on what a codec loses")),
        most => Ok(Coding {
            codec: number(&told.codec)?,
            finer: told.finer.as_deref().map(number).transpose()?,
            most,
            exchanges: told.exchanges,
            measured: told.measured,
        }),
    }
}

/// A codec's number.
fn number(name: &str) -> Result<u16, String> {
    let unknown = || format!("codec \"{}\" is not known here", name.chars().take(64).collect::<String>());
    let number = Codec::NAMED.iter().position(|(known, _)| *known == name).ok_or_else(unknown)?;
    Ok(number as u16)
}

fn introduce(peer: &v1::Peer) -> Result<Peer, String> {
    let at = |what: &str| format!("participant {}: {what}", peer.participant);
    let rate = (peer.rate_bits > 0).then_some(peer.rate_bits);
    if peer.carried {
        return Ok(Peer { participant: Participant(peer.participant), introduction: None, rate });
    }
    let ports = peer.source_ports.iter().map(|&port| u16::try_from(port));
    let source_ports: Vec<u16> = ports.collect::<Result<_, _>>().map_err(|_| at("source port"))?;
    if source_ports.is_empty() {
        return Err(at("no path"));
    }
    let introduction = Introduction {
        name: peer.link.as_slice().try_into().map_err(|_| at("link name of another length"))?,
        secret: peer.secret.as_slice().try_into().map_err(|_| at("secret of another length"))?,
        peer: peer.address.parse().map_err(|_| at("address"))?,
        initiate: peer.initiate,
        source_ports,
    };
    Ok(Peer { participant: Participant(peer.participant), introduction: Some(introduction), rate })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn recipe(hosts: u32, per_host: u32) -> Recipe {
        let participants = (0..hosts).map(|host| v1::Participant {
            ranks: (host * per_host..(host + 1) * per_host).collect(),
            host: format!("h{host}"),
        });
        let peer = |participant| v1::Peer {
            participant,
            address: "127.0.0.1:7200".into(),
            link: vec![1; 16],
            secret: vec![2; 32],
            initiate: true,
            source_ports: vec![0],
            ..v1::Peer::default()
        };
        Recipe {
            communicator: 7,
            epoch: 1,
            participants: participants.collect(),
            order: (0..hosts).rev().collect(),
            me: 0,
            peers: (1..hosts).map(peer).collect(),
            tuning: Some(v1::Tuning {
                channels: 4,
                chunk_bytes: 65536,
                segment_bytes: 262_144,
                copy_bytes: 4096,
                landing_slots: 2,
                operation_timeout_ns: 30_000_000_000,
                peer_timeout_ns: 5_000_000_000,
                one_shot_bytes: 8192,
                two_shot_bytes: 262_144,
            }),
            ..Recipe::default()
        }
    }

    #[test]
    fn right_recipes_are_expanded_and_proved() {
        for (hosts, per_host) in [(1, 1), (1, 9), (2, 1), (5, 3), (32, 2)] {
            let expanded = expand(&recipe(hosts, per_host), &mut Proved::default()).unwrap();
            assert_eq!(expanded.plan.plan.participants(), hosts);
            assert_eq!(expanded.peers.len() as u32, hosts - 1);
            let tuning = expanded.plan.tuning;
            assert_eq!((tuning.one_shot_bytes, tuning.two_shot_bytes), (8192, 262_144));
        }
    }

    #[test]
    fn links_that_go_on_need_no_introduction() {
        let mut recipe = recipe(3, 1);
        recipe.peers[1] = v1::Peer { participant: 2, carried: true, ..v1::Peer::default() };
        let mut proved = Proved::default();
        for epoch in 2..100 {
            recipe.epoch = epoch;
            let peers = expand(&recipe, &mut proved).unwrap().peers;
            assert_eq!(
                peers.iter().map(|peer| peer.introduction.is_some()).collect::<Vec<_>>(),
                [true, false]
            );
        }
        assert_eq!(proved.0.len(), 1, "the same plan is proved once");
        recipe.tuning.as_mut().unwrap().landing_slots = 0;
        assert!(expand(&recipe, &mut proved).is_err(), "another plan is proved anew");
    }

    #[test]
    fn what_does_not_fit_together_is_refused_and_named() {
        type Damage = (&'static str, fn(&mut Recipe));
        let mut coded = recipe(3, 1);
        coded.coding = Some(v1::Coding {
            codec: "int8".into(),
            most: Some(1e-3),
            exchanges: true,
            measured: true,
            finer: Some("bf16".into()),
        });
        let found = expand(&coded, &mut Proved::default()).unwrap().plan.coding.unwrap();
        let named = |number: u16| Codec::NAMED[usize::from(number)].1;
        assert_eq!((named(found.codec), found.most), (Codec::INT8, Some(1e-3)));
        assert_eq!(found.finer.map(named), Some(Codec::BF16));
        let damaged: [Damage; 12] = [
            ("codec \"bf17\"", |r| {
                let finer = Some("bf17".into());
                r.coding = Some(v1::Coding { codec: "int8".into(), finer, ..v1::Coding::default() })
            }),
            ("aggregation", |r| r.aggregation = Some(v1::Aggregation::default())),
            ("codec \"int9\"", |r| {
                r.coding = Some(v1::Coding { codec: "int9".into(), ..v1::Coding::default() })
            }),
            ("a bound of NaN", |r| {
                r.coding =
                    Some(v1::Coding { codec: "int8".into(), most: Some(f64::NAN), ..v1::Coding::default() });
            }),
            ("there twice", |r| r.participants[0].ranks = vec![1]),
            ("order", |r| r.order = vec![0, 0, 1]),
            ("no rank", |r| r.me = 9),
            ("tuning", |r| r.tuning = None),
            ("channels", |r| r.tuning.as_mut().unwrap().channels = 0),
            ("chunk", |r| r.tuning.as_mut().unwrap().chunk_bytes = 1 << 40),
            ("link name", |r| r.peers[0].link = vec![1]),
            ("no path", |r| r.peers[1].source_ports.clear()),
        ];
        for (what, damage) in damaged {
            let mut recipe = recipe(3, 1);
            damage(&mut recipe);
            let error = expand(&recipe, &mut Proved::default()).expect_err(what).to_string();
            assert!(error.contains(what) && error.contains("0000000000000007"), "{what}: {error}");
        }
    }
}
