//! Crashes of the machine at any operation on the disk. They come while changes are written and while a store is opened again. What
//! was acknowledged is there, and no group of changes in part. Each seed is a life of ten crashes; `HARMONAIZE_SEED` chooses the
//! first, `HARMONAIZE_RUNS` how many.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

mod disk;

use disk::Disk;
use harmonaize_abi::CommunicatorId;
use harmonaize_store::{
    Agreement, Change, Connection, Embedded, Epoch, Fabric, Job, Past, PastRank, Plan, Store, StoreError,
    Stored, Tenant, Withdrawal, WithdrawalKind,
};
use harmonaize_testkit::draw::number;
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha20Rng;
use std::path::Path;

fn change(random: &mut ChaCha20Rng) -> Change {
    let target = format!("spine{}", random.random_range(0..8));
    let kind = [WithdrawalKind::Drain, WithdrawalKind::Maintenance][random.random_range(0..2)];
    let tenant = format!("tenant{}", random.random_range(0..20));
    let communicator = u64::from(random.random_range(0_u32..40));
    match random.random_range(0..14) {
        0 => Change::Boot(random.next_u32()),
        1 => {
            let text = "x".repeat(random.random_range(0..20_000));
            Change::Fabric(Fabric { text, since_ns: random.next_u64() })
        }
        2 => Change::Tenant(Tenant { name: tenant, added_ns: random.next_u64(), ..Tenant::default() }),
        3 => Change::NoTenant(tenant),
        4 => {
            let (kind, until_ns) = (kind.into(), random.next_u64());
            Change::Withdraw(Withdrawal { target, kind, from_ns: 1, until_ns, reason: "why".into() })
        }
        5 => Change::Restore(target, kind),
        6 => {
            let connection = |index: u32| Connection { host: format!("h{index}"), source_port: index };
            let connections = (0..random.random_range(0..60)).map(connection).collect();
            let epoch = Epoch { epoch: random.next_u64(), connections, ..Epoch::default() };
            Change::Plan(Box::new(Plan { communicator, current: Some(epoch), ..Plan::default() }))
        }
        7 => Change::NoPlan(CommunicatorId(communicator)),
        8 => {
            let number = random.next_u64();
            Change::Agreement(Agreement { communicator, number, ..Agreement::default() })
        }
        9 => Change::NoAgreement(CommunicatorId(communicator)),
        10 => {
            let rank = |rank: u32| PastRank { rank, host: format!("h{rank}") };
            let ranks = (0..random.random_range(0..60)).map(rank).collect();
            let until_ns = random.next_u64();
            Change::Past(Box::new(Past { communicator, ranks, until_ns, ..Past::default() }))
        }
        11 => {
            let last_failure_ns = random.next_u64();
            Change::Job(Job { tenant, name: target, last_failure_ns, ..Job::default() })
        }
        12 => Change::NoJob(tenant, target),
        _ => Change::NoPast(CommunicatorId(communicator)),
    }
}

fn open(disk: &Disk) -> Result<Embedded, StoreError> {
    Embedded::on(disk.clone(), Path::new("disk"))
}

/// Opens it again, through crashes while that is done.
fn recover(disk: Disk, random: &mut ChaCha20Rng) -> (Disk, Embedded) {
    let mut disk = disk;
    for _ in 0..random.random_range(0..3) {
        disk.crash_after(random.random_range(1..12));
        drop(open(&disk));
        disk = Disk::new(disk.survives(random));
    }
    let store = open(&disk).expect("a store that can be opened again");
    (disk, store)
}

/// One crash; returns what survived.
fn crash(disk: Disk, before: &Stored, random: &mut ChaCha20Rng) -> (Disk, Stored) {
    let mut store = open(&disk).unwrap();
    assert_eq!(store.read().unwrap(), *before);
    disk.crash_after(random.random_range(1..120));
    let mut acknowledged = before.clone();
    let mut tried = before.clone();
    for _ in 0..200 {
        let group: Vec<Change> = (0..random.random_range(1..8)).map(|_| change(random)).collect();
        tried = acknowledged.clone();
        group.iter().for_each(|change| tried.apply(change));
        if store.write(&group).is_err() {
            break;
        }
        acknowledged = tried.clone();
    }
    drop(store);
    let (disk, store) = recover(Disk::new(disk.survives(random)), random);
    let found = store.read().unwrap();
    assert!(found == acknowledged || found == tried, "neither what was acknowledged nor that and the last");
    (disk, found)
}

/// Crashes of one life.
const CRASHES: usize = 10;

fn live(seed: u64, disk: Disk) {
    let mut random = ChaCha20Rng::seed_from_u64(seed);
    drop(open(&disk).unwrap());
    let (mut disk, mut stored) = (disk, Stored::default());
    for _ in 0..CRASHES {
        (disk, stored) = crash(disk, &stored, &mut random);
    }
}

#[test]
fn nothing_acknowledged_is_lost() {
    let (first, lives) = (number("HARMONAIZE_SEED", 1), number("HARMONAIZE_RUNS", 6));
    for seed in first..first.saturating_add(lives) {
        let life = std::panic::catch_unwind(|| live(seed, Disk::new(Vec::new())));
        assert!(
            life.is_ok(),
            "run again: HARMONAIZE_SEED={seed} HARMONAIZE_RUNS=1 cargo test -p harmonaize-store --test crashes"
        );
    }
}

/// That test can fail: on a disk that says that it has synced, and has not, acknowledged changes are lost.
#[test]
fn dropped_syncs_are_detected() {
    let caught = (1..=5).filter(|seed| {
        let disk = Disk::dropping_syncs();
        std::panic::catch_unwind(|| {
            drop(crash(disk, &Stored::default(), &mut ChaCha20Rng::seed_from_u64(*seed)))
        })
        .is_err()
    });
    assert!(caught.count() > 0);
}
