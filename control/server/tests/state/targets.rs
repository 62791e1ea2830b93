//! Small operations with a target for their time, beside a tenant that fills the links. Tests say what drawn proposals come to,
//! whether promises are kept or their breach reported, and how many of those that an exact planner could keep are made.
//!
//! Control runs as it is, in virtual time; what operations take is a model's: connections share links alike (max-min) within what
//! agents hold them to, an operation takes what delays and rates make of it, and up to a fifth more. The exact planner knows that model, the
//! delays between the very hosts, and tries every choice of spines for all that is promised.

use super::fabric::{CrossTraffic, Fabric};
use super::world::{SECOND, operation as operation_of};
use harmonaize_abi::session::{Constraints, Negotiated};
use harmonaize_api::v1::EventKind;
use harmonaize_planner::{Bytes, DirectedLink, GroupCosts, HostCosts, HostId, Rate, delays};
use harmonaize_server::state::testing::Testing as _;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;
use std::time::Duration;

const CASES: u64 = 50;
const LINE: f64 = 1e9;
/// Most of a link that promises take together: others are never without.
const MOST: f64 = 0.9;
/// By up to this part of it an operation takes longer than delays and rates make it.
const LONGER: f64 = 0.2;
/// From one operation to the next, and how many there are before a stranger may come and after.
const EVERY: Duration = Duration::from_millis(100);
const EACH: u64 = 100;

/// What came of a proposal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Accepted,
    /// And what could be had was taken.
    Countered,
    Refused,
}

/// One case.
#[derive(Debug)]
struct Case {
    answer: Answer,
    /// Whether an exact planner could keep what was asked for.
    feasible: bool,
    /// Whether all its hosts stand in one rack.
    near: bool,
    /// Operations that took longer than was promised, of all; where something was promised.
    late: Option<(u64, u64)>,
    /// Whether the tenant was told that it is not kept.
    notified: bool,
    /// Whether a stranger came.
    disturbed: bool,
}

impl Case {
    /// As agreements are judged: more than one operation in a hundred, and at least two.
    fn is_broken(&self) -> bool {
        self.late.is_some_and(|(late, of)| late >= 2 && late * 100 > of)
    }
}

/// A ring's hosts, those of a rack beside each other, and what was promised to it in bits a second.
type Ring = (Vec<usize>, f64);

/// Returns the most bits a second that can be set aside for a ring. Other rings keep what they have, and every choice of spines is tried.
fn most_beside(ring: &[usize], others: &[Ring]) -> f64 {
    let rings: Vec<Ring> = std::iter::once((ring.to_vec(), 0.0)).chain(others.iter().cloned()).collect();
    let hops = |hosts: &[usize]| -> Vec<(usize, usize)> {
        hosts.iter().copied().zip(hosts.iter().copied().cycle().skip(1)).collect()
    };
    let crosses = |(from, to): &(usize, usize)| from / 4 != to / 4;
    let crossings: usize =
        rings.iter().map(|(hosts, _)| hops(hosts).iter().filter(|hop| crosses(hop)).count()).sum();
    let mut best = 0.0_f64;
    for spines in 0..1_usize << crossings {
        let (mut load, mut own, mut bit) = (BTreeMap::new(), Vec::new(), 0);
        for (index, (hosts, rate)) in rings.iter().enumerate() {
            for hop @ (from, to) in hops(hosts) {
                let mut links = vec![("out", from, 0), ("in", to, 0)];
                if crosses(&hop) {
                    let spine = spines >> bit & 1;
                    bit += 1;
                    links.extend([("up", from / 4, spine), ("down", to / 4, spine)]);
                }
                for link in links {
                    *load.entry(link).or_insert(0.0) += rate;
                    own.extend((index == 0).then_some(link));
                }
            }
        }
        if load.values().all(|load| *load <= LINE * MOST) {
            let left = own.iter().map(|link| LINE * MOST - load[link]).fold(f64::INFINITY, f64::min);
            best = best.max(left);
        }
    }
    best
}

/// Seconds of an operation over these hosts at that rate, by their own delays.
fn time(fabric: &Fabric, id: u64, hosts: &[usize], bytes: u64, rate: f64) -> f64 {
    let ring: Vec<HostId> = hosts.iter().copied().map(HostId).collect();
    let (delay, hop) = delays(&fabric.topology, &ring);
    let (rate, chunk) = (Rate(rate as u64), fabric.communicator(id).chunk);
    GroupCosts {
        hosts: hosts.len() as u32,
        delay,
        hop_delay: hop,
        direct_rate: rate,
        ring_rate: rate,
        chunk,
        straight: true,
        host: HostCosts::default(),
        racks: None,
    }
    .fastest(Bytes(bytes))
}

/// What each communicator moves while all of them communicate, bits a second.
fn rates(fabric: &Fabric, all: &[(u64, usize)]) -> Vec<f64> {
    let mut left: BTreeMap<DirectedLink, f64> = BTreeMap::new();
    let paths: Vec<Vec<DirectedLink>> = all
        .iter()
        .map(|(id, _)| fabric.own_paths(*id).iter().flat_map(|path| path.links().to_vec()).collect())
        .collect();
    for link in paths.iter().flatten() {
        let strangers = fabric.cross_traffic.values().filter(|flow| flow.link == *link).map(|flow| flow.bits);
        left.insert(*link, LINE - strangers.sum::<u64>() as f64);
    }
    // Bulk goes along the ring here.
    let held = |(id, _): &(u64, usize)| {
        let ring = fabric.epoch(*id).rate_limits.ring;
        ring.map_or(f64::INFINITY, |rate| rate.0 as f64)
    };
    let held: Vec<f64> = all.iter().map(held).collect();
    let (mut rates, mut rising) = (vec![0.0; all.len()], vec![true; all.len()]);
    while rising.contains(&true) {
        let crossing = |link: &DirectedLink| {
            let each = paths.iter().zip(&rising).filter(|(_, rising)| **rising);
            each.map(|(path, _)| path.iter().filter(|of| *of == link).count()).sum::<usize>() as f64
        };
        let steps =
            left.iter().filter(|(link, _)| crossing(link) > 0.0).map(|(link, left)| left / crossing(link));
        let caps = (0..all.len()).filter(|index| rising[*index]).map(|index| held[index] - rates[index]);
        let step = steps.chain(caps).fold(f64::INFINITY, f64::min).max(0.0);
        let taken: Vec<(DirectedLink, f64)> =
            left.keys().map(|link| (*link, crossing(link) * step)).collect();
        taken.into_iter().for_each(|(link, taken)| *left.get_mut(&link).unwrap() -= taken);
        for index in 0..all.len() {
            if rising[index] {
                rates[index] += step;
                let full = paths[index].iter().any(|link| left[link] <= 1.0);
                rising[index] = !full && rates[index] + 1.0 < held[index];
            }
        }
    }
    rates
}

/// An operation as all agents tell of it.
fn report_operation(fabric: &mut Fabric, id: u64, operation: u64, bytes: u64, took: f64) {
    let began = 1_000_000_000_000 + operation * 1_000_000_000;
    for participant in 0..fabric.communicator(id).members.len() {
        let session = fabric.session(id, participant);
        let told =
            operation_of(id, operation, bytes, participant as u32, (began, began + (took * 1e9) as u64));
        fabric.state.take_operation(fabric.now, session, &told);
    }
}

/// So many hosts, those of a rack beside each other.
fn some(rng: &mut ChaCha8Rng, count: usize) -> Vec<usize> {
    let mut hosts: Vec<usize> = (0..8).collect();
    hosts.shuffle(rng);
    hosts.truncate(count);
    hosts.sort_unstable();
    hosts
}

fn case(seed: u64) -> Case {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut fabric = Fabric::traced(seed, 1);
    let mut others: Vec<Ring> = Vec::new();
    let mut all: Vec<(u64, usize)> = Vec::new();
    for number in 0..rng.random_range(1..4) {
        let count = rng.random_range(2..7);
        let (hosts, name) = (some(&mut rng, count), format!("bulk{number}"));
        all.push((fabric.form("b", &name, &hosts), hosts[0]));
        fabric.run(SECOND * 3);
        let busbw = rng.random_range(5_000_000..50_000_000);
        let wanted = rng.random_bool(0.6).then(|| Constraints::new().min_busbw(busbw));
        let outcome = wanted.and_then(|wanted| fabric.negotiate("b", &name, Some(&wanted)));
        let promised = matches!(outcome, Some(Ok(Negotiated::Agreed(_)))).then_some(busbw as f64 * 8.0);
        others.extend(promised.map(|rate| (hosts, rate)));
        fabric.run(SECOND * 2);
    }
    let count = rng.random_range(2..5);
    let hosts = some(&mut rng, count);
    let id = fabric.form("a", "requests", &hosts);
    all.push((id, hosts[0]));
    fabric.run(SECOND * 3);
    let bytes = 1_u64 << rng.random_range(12..21);
    let best = time(&fabric, id, &hosts, bytes, LINE * MOST);
    let p99 = best * (rng.random_range(0.5_f64.ln()..8_f64.ln())).exp();
    let p99 = Duration::from_micros((p99 * 1e6) as u64);
    let room = most_beside(&hosts, &others);
    let feasible = room > 1.0 && time(&fabric, id, &hosts, bytes, room) * (1.0 + LONGER) <= p99.as_secs_f64();
    fabric.read(0, 1, "a", None, Duration::ZERO);
    let from = fabric.read.pop().unwrap().cursor.unwrap();
    let asked = Constraints::new().p99(bytes, p99);
    let (answer, promised) = match fabric.negotiate("a", "requests", Some(&asked)) {
        Some(Ok(Negotiated::Agreed(_))) => (Answer::Accepted, Some(p99)),
        Some(Ok(Negotiated::Refused { counter, .. })) => {
            let offer = counter.filter(|counter| !counter.completions.is_empty());
            let taken = offer.map(|offer| match fabric.negotiate("a", "requests", Some(&offer)) {
                Some(Ok(Negotiated::Agreed(agreement))) => agreement.constraints.completions[0].p99,
                other => panic!("seed {seed}: what was offered is not given: {other:?}"),
            });
            (if taken.is_some() { Answer::Countered } else { Answer::Refused }, taken)
        }
        other => panic!("seed {seed}: {other:?}"),
    };
    fabric.run(SECOND * 3);
    let disturbed = rng.random_bool(0.5);
    let (mut late, mut number) = (0, 0);
    for stranger in [false, true] {
        if stranger && disturbed {
            let paths = fabric.own_paths(id);
            let path = &paths[rng.random_range(0..paths.len())];
            let link = path.links()[rng.random_range(0..path.links().len())];
            fabric
                .cross_traffic
                .insert(0, CrossTraffic { link, bits: rng.random_range(300_000_000..950_000_000) });
            fabric.sample_all();
        }
        for _ in 0..EACH {
            fabric.run(EVERY);
            let rate = *rates(&fabric, &all).last().unwrap();
            let took = time(&fabric, id, &hosts, bytes, rate.max(1e6));
            let took = took * (1.0 + rng.random_range(0.0..LONGER));
            late += u64::from(promised.is_some_and(|p99| took > p99.as_secs_f64()));
            report_operation(&mut fabric, id, number, bytes, took);
            number += 1;
        }
    }
    fabric.run(SECOND * 2);
    fabric.read(0, 1, "a", Some(from), Duration::ZERO);
    let events = fabric.read.pop().unwrap().events;
    let mut broken = events.iter().filter(|event| event.kind() == EventKind::AgreementBroken);
    Case {
        answer,
        feasible,
        near: hosts.iter().all(|host| host / 4 == hosts[0] / 4),
        late: promised.map(|_| (late, number)),
        notified: broken.any(|event| event.clauses().count() > 0),
        disturbed,
    }
}

#[test]
fn time_targets_are_kept_or_breaches_reported() {
    let cases: Vec<Case> = (0..CASES).map(case).collect();
    let count = |wanted: &dyn Fn(&Case) -> bool| cases.iter().filter(|case| wanted(case)).count();
    let of = |answer: Answer| count(&|case| case.answer == answer);
    let feasible = [true, false].map(|near| count(&|case| case.feasible && case.near == near));
    let kept = |case: &Case| case.feasible && case.answer == Answer::Accepted;
    let accepted = [true, false].map(|near| count(&|case| kept(case) && case.near == near));
    let unreported = count(&|case| case.is_broken() && !case.notified);
    println!(
        "{{\"cases\": {CASES}, \"accepted\": {}, \"countered\": {}, \"refused\": {}, \"feasible\": {feasible:?}, \"feasible_accepted\": \
         {accepted:?}, \"disturbed\": {}, \"broken\": {}, \"calm_broken\": {}, \"unreported\": {unreported}}}",
        of(Answer::Accepted),
        of(Answer::Countered),
        of(Answer::Refused),
        count(&|case| case.disturbed),
        count(&Case::is_broken),
        count(&|case| case.is_broken() && !case.disturbed),
    );
    assert_eq!(unreported, 0, "{cases:#?}");
    assert_eq!(
        count(&|case| case.is_broken() && !case.disturbed),
        0,
        "nothing came, and it is broken: {cases:#?}"
    );
    let wrongly = count(&|case| case.answer == Answer::Accepted && !case.feasible);
    assert_eq!(wrongly, 0, "promised, and no planner could keep it: {cases:#?}");
    assert!(count(&|case| case.disturbed && case.late.is_some()) >= 10 && count(&Case::is_broken) >= 3);
    let (accepted, feasible): (usize, usize) = (accepted.iter().sum(), feasible.iter().sum());
    assert!(feasible >= 20 && accepted * 5 >= feasible * 4, "{accepted} of {feasible}");
}
