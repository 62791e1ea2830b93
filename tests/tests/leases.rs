//! The way to control fails, or control: operations go on, and hosts that die are noticed by their peers all the same.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_client::{Client, Error, JoinRefusal, Rank, Status};
use harmonaize_testkit::deployment::{Deployment, Setup};
use harmonaize_tests::job::{deploy, options, run, sockets};
use harmonaize_tests::load::{forms_anew, in_phase, noticed_soon, under_load};
use harmonaize_tests::{STEP, star};
use std::path::PathBuf;
use std::time::Duration;

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
        let control = deployment.control().unwrap().id().to_string();
        assert!(std::process::Command::new("kill").args(["-9", &control]).status().unwrap().success());
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

/// A user that is not root, as those of tenants that control adds.
const USER: u32 = 12_345;

/// An operator adds a tenant and removes it again and again, while strangers hold connections to control open and say nothing.
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
