//! Three controls over three members of etcd. The leader is killed, stopped and cut off, its clock steps, members of etcd are killed,
//! or their disks are full, and a job computes all the while. `HARMONAIZE_SEED` chooses the faults, `HARMONAIZE_RUNS` how many there are.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_testkit::deployment::{Deployment, Setup};
use harmonaize_testkit::draw::{self, Draw};
use harmonaize_testkit::etcd;
use harmonaize_tests::job::{deploy, joined, sockets};
use harmonaize_tests::load::{forms_anew, in_phase, noticed_soon, under_load};
use harmonaize_tests::star;
use rustix::process::Signal;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// How long a new leader may take, where all is well but the fault.
const LIMIT: Duration = Duration::from_secs(60);

/// What happens to the machine of the leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// Its control dies.
    Kill,
    /// Its control stands still, and goes on later.
    Stop,
    /// Nobody reaches it, and it reaches nobody.
    Cut,
    /// Its member of etcd dies.
    KillEtcd,
    /// The disk of its member of etcd is full.
    FullDisk,
    /// Its control's clock goes to another time of day, and later back.
    ClockStep,
}

impl Fault {
    /// Whether the leader is lost by it, for sure.
    fn loses_the_leader(self) -> bool {
        matches!(self, Self::Kill | Self::Stop | Self::Cut)
    }
}

const FAULTS: [Fault; 6] =
    [Fault::Kill, Fault::Stop, Fault::Cut, Fault::KillEtcd, Fault::FullDisk, Fault::ClockStep];

/// How far a clock steps, seconds: more than any lease or time-out of control's.
const STEP: u64 = 1800;

/// Three hosts with agents, and three machines with a control and a member of etcd each.
fn three_controls() -> Option<Deployment> {
    if !etcd::is_installed() {
        return None;
    }
    deploy(&star(6, "1Gbit/s"), |setup: &mut Setup| {
        noticed_soon(setup);
        (setup.unmanaged_hosts, setup.replicated) = (3, true);
    })
}

/// The machine of the leader.
fn leader(deployment: &mut Deployment) -> usize {
    let wrong = "no control leads";
    let found = |this: &Deployment| {
        let roles = this.ask(&["leader"])?;
        Ok(roles.as_array().into_iter().flatten().position(|one| one["role"] == "leads"))
    };
    deployment.wait_until(wrong, found).unwrap()
}

fn known(deployment: &Deployment) -> BTreeSet<String> {
    let tenants = deployment.ask(&["tenants"]).unwrap();
    let names = tenants["tenants"].as_array().into_iter().flatten();
    names.map(|one| one["name"].as_str().unwrap_or_default().to_owned()).collect()
}

/// Tenants that control has acknowledged, and those for which no good answer came.
#[derive(Default)]
struct Tenants {
    acknowledged: BTreeSet<String>,
    unanswered: BTreeSet<String>,
}

impl Tenants {
    /// Adds tenants, each of a name of its own, until one is acknowledged.
    fn add(&mut self, deployment: &Deployment, name: &str) {
        let deadline = Instant::now() + LIMIT;
        for attempt in 0.. {
            let name = format!("{name}-{attempt}");
            let done = deployment.harmonaize(&["tenants", "add", &name]);
            let Err(error) = done else {
                self.acknowledged.insert(name);
                return;
            };
            assert!(Instant::now() < deadline, "{error:#}");
            // It may be added, and its answer lost.
            self.unanswered.insert(name);
        }
    }

    /// Checks that control has all that it acknowledged, and none that it was not asked for.
    fn check(&self, deployment: &Deployment, when: &str) {
        let listed = known(deployment);
        let lost: Vec<_> = self.acknowledged.difference(&listed).collect();
        let made: Vec<_> = listed.difference(&self.acknowledged).collect();
        assert!(lost.is_empty(), "{when}: {lost:?} are lost");
        assert!(made.iter().all(|name| self.unanswered.contains(*name)), "{when}: {made:?}");
    }
}

fn inflict(deployment: &mut Deployment, fault: Fault, at: usize, back: bool) {
    let host = deployment.replicas()[at].host.name.clone();
    match fault {
        Fault::Kill => deployment.replicas()[at].control.signal(Signal::KILL).unwrap(),
        Fault::Stop => deployment.replicas()[at].control.signal(Signal::STOP).unwrap(),
        Fault::Cut => deployment.fabric().set_management(&host, false).unwrap(),
        Fault::KillEtcd => deployment.replicas()[at].etcd.signal(Signal::KILL).unwrap(),
        Fault::FullDisk => deployment.replicas()[at].fill_disk(true).unwrap(),
        Fault::ClockStep => {
            let step = STEP as i64;
            deployment.replicas()[at].step_clock(if back { -step } else { step }).unwrap();
            // Control looks at it once a second.
            std::thread::sleep(Duration::from_secs(2));
        }
    }
}

fn heal(deployment: &mut Deployment, fault: Fault, at: usize) {
    let host = deployment.replicas()[at].host.name.clone();
    match fault {
        Fault::Kill => deployment.restart_replica(at).unwrap(),
        Fault::Stop => deployment.replicas()[at].control.signal(Signal::CONT).unwrap(),
        Fault::Cut => deployment.fabric().set_management(&host, true).unwrap(),
        Fault::KillEtcd => deployment.restart_etcd(at).unwrap(),
        Fault::FullDisk => {
            deployment.replicas()[at].fill_disk(false).unwrap();
            deployment.restart_etcd(at).unwrap();
        }
        Fault::ClockStep => deployment.replicas()[at].step_clock(0).unwrap(),
    }
}

fn median(times: &mut [Duration]) -> Option<Duration> {
    times.sort();
    times.get(times.len() / 2).copied()
}

#[test]
fn faults_of_the_leader_lose_nothing() {
    let (seed, runs) = (draw::seed(), draw::number("HARMONAIZE_RUNS", 10));
    let Some(mut deployment) = three_controls() else { return };
    eprintln!("HARMONAIZE_SEED={seed} HARMONAIZE_RUNS={runs}");
    let mut drawn = Draw::new(seed);
    let mut tenants = Tenants { acknowledged: known(&deployment), ..Tenants::default() };
    assert_eq!(tenants.acknowledged, ["a", "b"].map(str::to_owned).into());
    let mut times: Vec<(Fault, Duration)> = Vec::new();
    under_load(&sockets(&deployment, "a"), |load| {
        load.goes_on();
        for run in 0..runs {
            // Each kind comes as often as the others, in an order that is drawn.
            let kinds = FAULTS.len() as u64;
            let fault = FAULTS[if run < kinds { run } else { drawn.below(kinds) } as usize];
            std::thread::sleep(Duration::from_millis(drawn.below(700)));
            let at = leader(&mut deployment);
            inflict(&mut deployment, fault, at, drawn.below(2) == 0);
            let begun = Instant::now();
            tenants.add(&deployment, &format!("t{run}"));
            let took = begun.elapsed();
            eprintln!("fault {run}: {fault:?} at {at}: a change was acknowledged after {took:?}");
            times.push((fault, took));
            // A member goes on in the room that its files have, until that is full too. Then it ends.
            for more in 0.. {
                if fault != Fault::FullDisk || deployment.replicas()[at].etcd.status().unwrap().is_some() {
                    break;
                }
                tenants.add(&deployment, &format!("t{run}-{more}"));
            }
            load.goes_on();
            heal(&mut deployment, fault, at);
            deployment.wait_until_ready().unwrap();
            in_phase(&mut deployment, "running");
            tenants.check(&deployment, &format!("fault {run}: {fault:?}"));
            load.goes_on();
        }
        forms_anew(&deployment, "new");
    });
    for fault in FAULTS {
        let of = times.iter().filter(|(of, _)| *of == fault).map(|(_, took)| *took);
        eprintln!("{fault:?}: median {:?}", median(&mut of.collect::<Vec<_>>()));
    }
    let lost = times.iter().filter(|(fault, _)| fault.loses_the_leader()).map(|(_, took)| *took);
    eprintln!("a lost leader: median {:?}", median(&mut lost.collect::<Vec<_>>()));
}

#[test]
fn a_restored_etcd_has_what_was_saved_and_ends_no_job() {
    let Some(mut deployment) = three_controls() else { return };
    let mut tenants = Tenants { acknowledged: known(&deployment), ..Tenants::default() };
    let folder = tempfile::tempdir().unwrap();
    let snapshot = folder.path().join("snapshot");
    under_load(&sockets(&deployment, "a"), |load| {
        tenants.add(&deployment, "saved");
        deployment.save_etcd(&snapshot).unwrap();
        Tenants::default().add(&deployment, "after");
        load.goes_on();
        deployment.restore_etcd(&snapshot).unwrap();
        deployment.wait_until_ready().unwrap();
        in_phase(&mut deployment, "running");
        tenants.check(&deployment, "what was saved is back, and what came after it is not");
        load.goes_on();
        forms_anew(&deployment, "new");
        tenants.add(&deployment, "anew");
        tenants.check(&deployment, "a change after it");
    });
}

#[test]
fn a_follower_answers_what_is_stored_and_changes_nothing() {
    let Some(mut deployment) = three_controls() else { return };
    let mut tenants = Tenants { acknowledged: known(&deployment), ..Tenants::default() };
    tenants.add(&deployment, "c");
    let at = leader(&mut deployment);
    let host = &deployment.replicas()[(at + 1) % 3].host;
    let (follower, folder) = (host.management, host.folder.join("control"));
    let asked = |arguments: &[&str]| {
        let control = format!("{follower}:7101");
        deployment.harmonaize(&[&["--control", &control], arguments].concat())
    };
    assert!(asked(&["tenants"]).unwrap().contains('c'));
    assert!(asked(&["topology"]).unwrap().contains("h0"));
    let ranks = joined(&sockets(&deployment, "a"), "kept");
    let fields = ["tenant", "name", "epoch", "order", "predicted_ns", "slowdown_ppm", "share_bps", "reason"];
    let plan = |said: String| {
        let reply: serde_json::Value = serde_json::from_str(&said).unwrap();
        let plan = &reply["plans"][0];
        (plan["name"] == "kept").then(|| fields.map(|field| plan[field].clone()))
    };
    // It is written a moment after the leader has it.
    let deadline = Instant::now() + LIMIT;
    loop {
        let here = asked(&["plans", "--json"]).unwrap();
        let [stored, leaders] =
            [here.clone(), deployment.harmonaize(&["plans", "--json"]).unwrap()].map(plan);
        if stored.is_some() && stored == leaders {
            break;
        }
        assert!(Instant::now() < deadline, "{here}, and not {leaders:?}");
    }
    // A topology without a host that has ranks is refused, as the leader would: this control may lead next.
    let topology = std::fs::read_to_string(folder.join("topology.toml")).unwrap();
    std::fs::write(folder.join("topology.toml"), topology.replace("\"h0\"", "\"renamed\"")).unwrap();
    let deadline = Instant::now() + LIMIT;
    let refused = "the topology lacks host `h0`, which has ranks";
    while !std::fs::read_to_string(folder.join("log")).unwrap().contains(refused) {
        assert!(Instant::now() < deadline, "{}", asked(&["topology"]).unwrap());
        std::thread::sleep(Duration::from_millis(50));
    }
    let topology = asked(&["topology"]).unwrap();
    assert!(topology.contains("h0") && !topology.contains("renamed"), "{topology}");
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("copy");
    asked(&["backup", copy.to_str().unwrap()]).unwrap();
    let copy = std::fs::read(copy).unwrap();
    assert!(copy.windows(4).any(|bytes| bytes == b"kept"), "{} bytes without the communicator", copy.len());
    drop(ranks);
    let refused = asked(&["tenants", "add", "d"]).unwrap_err().to_string();
    assert!(refused.contains("this control follows the one at"), "{refused}");
    tenants.check(&deployment, "a follower was asked to add one");
}
