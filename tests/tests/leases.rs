//! The path to control fails, or control, or certificates change. Operations go on, and hosts that die are noticed by their peers all
//! the same.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_client::{Client, Error, JoinRefusal, Rank, Status};
use harmonaize_identity::{Authority, write_file};
use harmonaize_testkit::deployment::{Deployment, Setup};
use harmonaize_tests::job::{deploy, options, run, sockets};
use harmonaize_tests::load::{forms_anew, in_phase, noticed_soon, under_load};
use harmonaize_tests::{STEP, star};
use rustix::process::Signal;
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

#[test]
fn a_cut_way_to_control_disturbs_no_operation() {
    let Some(mut deployment) = deploy(&star(3, "1Gbit/s"), noticed_soon) else { return };
    let own = sockets(&deployment, "a");
    let host = deployment.hosts()[1].name.clone();
    under_load(&own, |load| {
        load.goes_on();
        deployment.fabric().set_management(&host, false).unwrap();
        in_phase(&mut deployment, "recovering");
        load.goes_on();
        // Who asks there for something new is told so, in the time that it has.
        let client = Client::attach(&own[1], options(harmonaize_client::Access::Mapped, 8)).unwrap();
        match client.join("later", Rank(0), 1, Duration::from_secs(2)) {
            Err(Error::Join { kind: JoinRefusal::Unavailable, .. }) => {}
            other => panic!("{other:?}"),
        }
        load.goes_on();
        deployment.fabric().set_management(&host, true).unwrap();
        deployment.wait_until_ready().unwrap();
        in_phase(&mut deployment, "running");
        load.goes_on();
        forms_anew(&deployment, "new");
    });
}

#[test]
fn a_crash_of_control_disturbs_no_operation() {
    let Some(mut deployment) = deploy(&star(3, "1Gbit/s"), noticed_soon) else { return };
    under_load(&sockets(&deployment, "a"), |load| {
        load.goes_on();
        deployment.control().unwrap().signal(Signal::KILL).unwrap();
        load.goes_on();
        deployment.start_control().unwrap();
        deployment.wait_until_ready().unwrap();
        in_phase(&mut deployment, "running");
        load.goes_on();
        forms_anew(&deployment, "new");
    });
}

#[test]
fn a_restored_store_disturbs_no_operation() {
    let stored = |setup: &mut Setup| {
        noticed_soon(setup);
        setup.control += "store = \"control.redb\"\n";
    };
    let Some(mut deployment) = deploy(&star(3, "1Gbit/s"), stored) else { return };
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("copy");
    deployment.harmonaize(&["backup", copy.to_str().unwrap()]).unwrap();
    under_load(&sockets(&deployment, "a"), |load| {
        load.goes_on();
        deployment.control().unwrap().end().unwrap();
        deployment.restore_control(&copy).unwrap();
        load.goes_on();
        deployment.start_control().unwrap();
        deployment.wait_until_ready().unwrap();
        in_phase(&mut deployment, "running");
        load.goes_on();
        forms_anew(&deployment, "new");
    });
}

/// Waits until each agent has had sessions with so many certificates, by what control saw of them, and is connected.
fn sessions_with(deployment: &mut Deployment, certificates: usize) {
    let log = deployment.control().unwrap().log().to_owned();
    let count = |host: &str| {
        let text = fs::read_to_string(&log)?;
        let opened =
            text.lines().filter(|line| line.contains(&format!("session with a certificate who={host} ")));
        let serials = opened.filter_map(|line| line.split("serial=").nth(1)).collect::<BTreeSet<_>>();
        anyhow::Ok(serials.len())
    };
    let wrong = format!("not each agent has shown {certificates} certificates");
    let all = |this: &Deployment| {
        let counts: Result<Vec<_>, _> = this.hosts().iter().map(|host| count(&host.name)).collect();
        Ok(counts?.iter().all(|count| *count == certificates).then_some(()))
    };
    deployment.wait_until(&wrong, all).unwrap();
    deployment.wait_until_ready().unwrap();
    in_phase(deployment, "running");
}

/// Everybody gets a new certificate of the same authority, and the one before is revoked. Then everybody gets one of another
/// authority, and the one before is trusted no more. So whoever has a session afterwards has shown the new one, and control too.
#[test]
fn new_certificates_and_authorities_disturb_no_operation() {
    let Some(mut deployment) = deploy(&star(2, "1Gbit/s"), noticed_soon) else { return };
    let everybody = deployment.identities();
    under_load(&sockets(&deployment, "a"), |load| {
        load.goes_on();
        sessions_with(&mut deployment, 1);
        let before = tempfile::tempdir().unwrap();
        let mut revoked = Vec::new();
        for (number, folder) in everybody.iter().enumerate() {
            let copies = ["crt", "key"].map(|kind| before.path().join(format!("{number}.{kind}")));
            fs::copy(folder.certificate(), &copies[0]).unwrap();
            fs::copy(folder.key(), &copies[1]).unwrap();
            revoked.push(copies[0].clone());
        }
        deployment.certify(deployment.authority()).unwrap();
        load.goes_on();
        for folder in &everybody {
            deployment.authority().revoke(&folder.revoked(), &revoked).unwrap();
        }
        sessions_with(&mut deployment, 2);
        load.goes_on();

        // An agent with the certificate from before is not let in, until it finds another.
        let (host, agent) = (deployment.hosts()[1].name.clone(), everybody[3].clone());
        let files = [(agent.certificate(), "3.crt"), (agent.key(), "3.key")];
        let good = files.clone().map(|(path, _)| fs::read(path).unwrap());
        for (path, copy) in &files {
            write_file(path, &fs::read(before.path().join(copy)).unwrap(), 0o600).unwrap();
        }
        deployment.fabric().set_management(&host, false).unwrap();
        in_phase(&mut deployment, "recovering");
        deployment.fabric().set_management(&host, true).unwrap();
        let refused = |this: &str| this.contains("handshake refused") && this.contains("Revoked");
        deployment.control().unwrap().line_by(Instant::now() + STEP, refused).unwrap();
        load.goes_on();
        for ((path, _), good) in files.iter().zip(good) {
            write_file(path, &good, 0o600).unwrap();
        }
        sessions_with(&mut deployment, 2);

        // Another authority: both are trusted, all have its certificates, and then the first one goes.
        let (next, roots) = (Authority::create().unwrap(), tempfile::tempdir().unwrap());
        next.save(roots.path()).unwrap();
        let root = fs::read_to_string(roots.path().join("ca.crt")).unwrap();
        for folder in &everybody {
            let both = fs::read_to_string(folder.authorities()).unwrap() + &root;
            write_file(&folder.authorities(), both.as_bytes(), 0o644).unwrap();
        }
        deployment.certify(&next).unwrap();
        load.goes_on();
        for folder in &everybody {
            write_file(&folder.authorities(), root.as_bytes(), 0o644).unwrap();
        }
        sessions_with(&mut deployment, 3);
        load.goes_on();
        forms_anew(&deployment, "new");
    });
}

/// A user that is not root, as those of tenants that control adds.
const USER: u32 = 12_345;

/// An operator adds a tenant and removes it again and again. Meanwhile strangers hold connections to control open and say
/// nothing.
#[test]
fn tenants_come_and_go_beside_a_job() {
    let adjust = |setup: &mut Setup| {
        noticed_soon(setup);
        setup.agent += "[control_tenants]\nsockets = \"{folder}\"\n";
    };
    let Some(mut deployment) = deploy(&star(2, "1Gbit/s"), adjust) else { return };
    let places: Vec<PathBuf> = deployment.hosts().iter().map(|host| host.folder.join("c.sock")).collect();
    let served = |deployment: &Deployment, wanted: usize| {
        let count = deployment.hosts_that_serve("c")?;
        Ok((count == wanted && places.iter().all(|place| place.exists() == (wanted > 0))).then_some(()))
    };
    under_load(&sockets(&deployment, "a"), |load| {
        load.goes_on();
        for _ in 0..5 {
            deployment.harmonaize(&["tenants", "add", "c", "--uid", &USER.to_string()]).unwrap();
            deployment.wait_until("the tenant is not served", |this| served(this, 2)).unwrap();
            std::thread::scope(|scope| {
                // As its user, of this thread alone.
                let job = scope.spawn(|| {
                    let user = rustix::thread::Uid::from_raw(USER);
                    rustix::thread::set_thread_res_uid(user, user, user).unwrap();
                    let client =
                        Client::attach(&places[0], options(harmonaize_client::Access::Mapped, 8)).unwrap();
                    let communicator = client.join("short", Rank(0), 1, STEP).unwrap();
                    communicator.barrier().unwrap().wait(STEP).unwrap();
                    communicator
                });
                drop(job.join().unwrap());
            });
            // Control hears of the last rank's end from the agent.
            deployment
                .wait_until("the tenant is busy", |this| {
                    Ok(this.harmonaize(&["tenants", "remove", "c"]).ok().map(drop))
                })
                .unwrap();
            deployment.wait_until("the tenant is served still", |this| served(this, 0)).unwrap();
            load.goes_on();
        }
        harmonaize_identity::raise_open_files();
        let control = deployment.control_address();
        let connect =
            || (0..1100).filter_map(|_| std::net::TcpStream::connect(control).ok()).collect::<Vec<_>>();
        let idle = deployment.hosts()[0].namespace.enter(connect).unwrap();
        assert!(idle.len() > 500, "{} strangers", idle.len());
        let host = deployment.hosts()[1].name.clone();
        deployment.fabric().set_management(&host, false).unwrap();
        in_phase(&mut deployment, "recovering");
        deployment.fabric().set_management(&host, true).unwrap();
        deployment.wait_until_ready().unwrap();
        load.goes_on();
        drop(idle);
    });
}

/// A host that dies while nobody hears of it at control either.
#[test]
fn a_dead_host_is_lost_before_its_lease_is_over() {
    let Some(mut deployment) = deploy(&star(3, "1Gbit/s"), noticed_soon) else { return };
    let host = deployment.hosts()[2].name.clone();
    let agent = deployment.agent(2).unwrap().id().to_string();
    let outcomes = run(&sockets(&deployment, "a"), "dies", 1, |worker| {
        worker.sum(1, 1000, true, STEP)?;
        if worker.rank == 0 {
            deployment.fabric().set_management(&host, false)?;
            std::process::Command::new("kill").args(["-9", &agent]).status()?;
        }
        for round in 2.. {
            worker.sum(round, 20_000, true, STEP)?;
        }
        Ok(())
    });
    for outcome in &outcomes[..2] {
        let error = outcome.as_ref().expect_err("a rank was lost");
        match error.downcast_ref() {
            Some(Error::Operation { status: Status::RankLost, detail: Some(detail), .. }) => {
                assert_eq!(detail.ranks, [Rank(2)]);
            }
            _ => panic!("{error:#}"),
        }
    }
}
