//! Every store keeps what it is given; the one in a file says precisely why it cannot be used.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_abi::CommunicatorId;
use harmonaize_identity::{Authority, CONTROL, ETCD, Folder, Protection, Use};
use harmonaize_store::etcd::{Election, Members, Role, Term};
use harmonaize_store::{
    Agreement, Change, Connection, Damage, Embedded, Epoch, Fabric, Job, JobBid, Link, Loss, Memory, Past,
    PastRank, Plan, Store, StoreError, Stored, Tenant, Withdrawal, WithdrawalKind, backup, restore,
};
use harmonaize_testkit::etcd::Member;
use harmonaize_testkit::process::Process;
use rustix::process::Signal;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long anything may take.
const LIMIT: Duration = Duration::from_secs(30);

fn changes() -> Vec<Change> {
    let epoch = Epoch {
        epoch: 7,
        order: vec![0, 2, 1],
        connections: vec![Connection { host: "h0".into(), source_port: 20_001 }],
        links: vec![Link { low: 0, high: 2, source_ports: vec![20_001] }],
        slowdown_ppm: 1_200_000,
        reason: "spine1 is congested".into(),
        ..Epoch::default()
    };
    let plan = |communicator| Plan {
        communicator,
        tenant: "a".into(),
        name: "world".into(),
        hosts: ["h0", "h1", "h2"].map(str::to_owned).to_vec(),
        next_epoch: 9,
        current: Some(epoch.clone()),
        pending: Some(Epoch { epoch: 8, ..epoch.clone() }),
        pinned: true,
        losses: vec![Loss { codec: "int8".into(), loss: 0.5, bytes: 1.25 }],
    };
    let withdrawal = |target: &str, kind: WithdrawalKind| Withdrawal {
        target: target.into(),
        kind: kind.into(),
        from_ns: 5,
        until_ns: 0,
        reason: "a fan".into(),
    };
    let agreement = |communicator, number| Agreement {
        communicator,
        number,
        since_ns: 6,
        constraints: vec![1, 2, 3],
        rate_bits: 1_000_000_000,
    };
    let past = |communicator, until_ns| Past {
        communicator,
        tenant: "a".into(),
        name: "world".into(),
        budget: vec![4],
        hosts: ["h0", "h1"].map(str::to_owned).to_vec(),
        ranks: vec![PastRank { rank: 1, host: "h1".into() }],
        agreement: (until_ns > 0).then(|| agreement(communicator, 3)),
        within_ns: 8,
        until_ns,
        prolonged: true,
    };
    let job = |tenant: &str, failures| Job {
        tenant: tenant.into(),
        name: "bert".into(),
        recent_failures: 1,
        failures,
        last_failure_ns: 9,
        unformed: true,
        bid: Some(JobBid { least_millionths: 650_000, further_millionths: 300_000, checkpoint_ns: 7 }),
        leaves_ns: 11,
    };
    vec![
        Change::Boot(41),
        Change::Fabric(Fabric { text: "[[host]]\nname = \"h0\"\n".into(), since_ns: 3 }),
        Change::Tenant(Tenant { name: "a".into(), added_ns: 1, ..Tenant::default() }),
        Change::Tenant(Tenant { name: "b".into(), added_ns: 2, ..Tenant::default() }),
        Change::NoTenant("a".into()),
        Change::Withdraw(withdrawal("spine0", WithdrawalKind::Drain)),
        Change::Withdraw(withdrawal("spine0", WithdrawalKind::Maintenance)),
        Change::Withdraw(withdrawal("leaf0:spine0", WithdrawalKind::Drain)),
        Change::Restore("spine0".into(), WithdrawalKind::Drain),
        Change::Restore("never".into(), WithdrawalKind::Drain),
        Change::Plan(Box::new(plan(1 << 40))),
        Change::Plan(Box::new(plan(2))),
        Change::NoPlan(CommunicatorId(2)),
        Change::NoPlan(CommunicatorId(99)),
        Change::Agreement(agreement(1 << 40, 1)),
        Change::Agreement(agreement(1 << 40, 2)),
        Change::Agreement(agreement(2, 1)),
        Change::NoAgreement(CommunicatorId(2)),
        Change::NoAgreement(CommunicatorId(99)),
        Change::Past(Box::new(past(1 << 41, 7))),
        Change::Past(Box::new(past(1 << 41, 0))),
        Change::Past(Box::new(past(2, 7))),
        Change::Past(Box::new(past(3, 7))),
        Change::NoPast(CommunicatorId(2)),
        Change::NoPast(CommunicatorId(99)),
        Change::Job(job("a", 1)),
        Change::Job(job("b", 1)),
        Change::Job(job("b", 2)),
        Change::NoJob("a".into(), "bert".into()),
        Change::NoJob("a".into(), "never".into()),
    ]
}

/// What any store does; returns what it has in the end.
fn keeps_what_it_is_given(store: &mut dyn Store) -> Stored {
    assert_eq!(store.read().unwrap(), Stored::default());
    let mut model = Stored::default();
    for group in changes().chunks(3) {
        store.write(group).unwrap();
        group.iter().for_each(|change| model.apply(change));
        assert_eq!(store.read().unwrap(), model);
    }
    store.write(&[]).unwrap();
    store.write(&changes()).unwrap();
    assert_eq!(store.read().unwrap(), model, "carried out twice, nothing is different");
    assert_eq!((model.tenants.len(), model.withdrawals.len(), model.plans.len()), (1, 2, 1));
    assert!(model.agreements.len() == 1 && model.agreements[&CommunicatorId(1 << 40)].number == 2);
    assert_eq!(model.pasts.keys().copied().collect::<Vec<_>>(), [3, 1 << 41].map(CommunicatorId));
    let jobs: Vec<(&str, u32)> =
        model.jobs.iter().map(|((tenant, _), job)| (tenant.as_str(), job.failures)).collect();
    assert_eq!(jobs, [("b", 2)]);
    assert!(
        model.pasts[&CommunicatorId(3)].agreement.is_some()
            && model.pasts[&CommunicatorId(1 << 41)].agreement.is_none()
    );
    model
}

#[test]
fn in_memory() {
    keeps_what_it_is_given(&mut Memory::new());
}

#[test]
fn in_a_file_over_starts() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("control.redb");
    let model = keeps_what_it_is_given(&mut Embedded::open(&path).unwrap());
    assert_eq!(Embedded::open(&path).unwrap().read().unwrap(), model);
    let left = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(left.collect::<Vec<_>>(), ["control.redb"], "nothing else is left");
    let mode = std::os::unix::fs::PermissionsExt::mode(&path.metadata().unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
}

/// A member of etcd that is alone, or none where it is not installed.
fn etcd(folder: &Path) -> Option<(Member, Process)> {
    if !harmonaize_testkit::etcd::is_installed() {
        return None;
    }
    let member = Member::alone(folder).unwrap();
    let process = member.start_alone().unwrap();
    Some((member, process))
}

fn join(member: &Member, name: &str) -> Election {
    let addresses = vec![member.clients.to_string()];
    Election::join(Members { addresses, protection: Protection::InsecureLoopback }, name.to_owned()).unwrap()
}

/// Waits until a control leads.
fn leads(election: &Election) -> Term {
    until(election, |role| match role {
        Role::Leads(term) => Some(*term),
        Role::Follows(_) => None,
    })
}

/// Waits until a control is what `wanted` looks for.
fn until<T>(election: &Election, wanted: impl Fn(&Role) -> Option<T>) -> T {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(found) = wanted(&election.role().borrow()) {
            return found;
        }
        assert!(Instant::now() < deadline, "{:?}", election.role().borrow());
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn tenant(name: &str) -> Change {
    Change::Tenant(Tenant { name: name.into(), ..Tenant::default() })
}

#[test]
fn in_etcd_over_leaders() {
    let folder = tempfile::tempdir().unwrap();
    let Some((member, _process)) = etcd(folder.path()) else { return };
    let first = join(&member, "first");
    let model = keeps_what_it_is_given(&mut first.store(leads(&first)));
    drop(first);
    let second = join(&member, "second");
    assert_eq!(second.store(leads(&second)).read().unwrap(), model);
}

#[test]
fn in_etcd_much_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let Some((member, _process)) = etcd(folder.path()) else { return };
    let leader = join(&member, "leader");
    let mut store = leader.store(leads(&leader));
    let many: Vec<Change> = (0..300).map(|number| tenant(&format!("t{number}"))).collect();
    store.write(&many).unwrap();
    let large = |communicator| Past { communicator, budget: vec![7; 400 << 10], ..Past::default() };
    let large: Vec<Change> = (0..12).map(|number| Change::Past(Box::new(large(number)))).collect();
    store.write(&large).unwrap();
    let stored = store.read().unwrap();
    assert_eq!((stored.tenants.len(), stored.pasts.len()), (300, 12));
    let too_large = Past { communicator: 1, budget: vec![7; 4 << 20], ..Past::default() };
    let error = store.write(&[Change::Past(Box::new(too_large))]).unwrap_err().to_string();
    assert!(error.starts_with("etcd: "), "{error}");
    store.write(&[tenant("after")]).unwrap();
}

#[test]
fn a_leader_that_another_has_followed_writes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let Some((member, process)) = etcd(folder.path()) else { return };
    let first = join(&member, "first");
    let mut late = first.store(leads(&first));
    late.write(&[tenant("before")]).unwrap();
    let second = join(&member, "second");
    until(&second, |role| (*role == Role::Follows(Some("first".into()))).then_some(()));
    // Its lease is taken from it, as if it had slept.
    let lease = member.etcdctl(None, &["lease", "list"]).unwrap();
    let lease = lease.lines().last().unwrap();
    member.etcdctl(None, &["lease", "revoke", lease]).unwrap();
    let (one, other) = (&first, &second);
    let deadline = Instant::now() + LIMIT;
    let (leader, term) = loop {
        let now = |election: &Election| match *election.role().borrow() {
            Role::Leads(term) => Some(term),
            Role::Follows(_) => None,
        };
        match late.write(&[tenant("late")]) {
            Err(StoreError::Superseded) => {}
            other => panic!("{other:?}"),
        }
        // Whichever stands first; a new term of the first is another term.
        if let Some(term) = now(other) {
            break (other, term);
        }
        if let Some(term) = now(one).filter(|term| one.store(*term).write(&[]).is_ok()) {
            break (one, term);
        }
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(20));
    };
    let mut store = leader.store(term);
    store.write(&[tenant("after")]).unwrap();
    assert!(matches!(late.write(&[tenant("late")]), Err(StoreError::Superseded)));
    let names: Vec<String> = store.read().unwrap().tenants.into_keys().collect();
    assert_eq!(names, ["after", "before"]);
    drop(process);
}

#[test]
fn etcd_is_open_to_control_alone() {
    let folder = tempfile::tempdir().unwrap();
    if !harmonaize_testkit::etcd::is_installed() {
        return;
    }
    let authority = Authority::create().unwrap();
    let issued = |name: &str, purpose: Use| {
        let place = Folder(folder.path().join(name));
        authority.issue(name, purpose).unwrap().write(&place).unwrap();
        place
    };
    let mut member = Member::alone(folder.path()).unwrap();
    member.tls = Some(issued(ETCD, Use::Etcd(member.clients.ip())));
    let _process = member.start_alone().unwrap();
    let join = |name: &str, protection| {
        let addresses = vec![member.clients.to_string()];
        Election::join(Members { addresses, protection }, name.to_owned()).unwrap()
    };
    let read = |election: &Election| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(election.reader().read())
    };
    let control = join("control", Protection::Mutual(issued(CONTROL, Use::Control)));
    control.store(leads(&control)).write(&[tenant("kept")]).unwrap();
    assert_eq!(read(&control).unwrap().tenants.len(), 1);
    let host = join("host", Protection::Mutual(issued("h0", Use::Session)));
    let plain = join("plain", Protection::InsecureLoopback);
    for stranger in [&host, &plain] {
        assert!(read(stranger).is_err());
        assert_eq!(*stranger.role().borrow(), Role::Follows(None));
    }
    drop(control);
    std::thread::sleep(Duration::from_millis(500));
    for stranger in [&host, &plain] {
        assert_eq!(*stranger.role().borrow(), Role::Follows(None), "nobody leads, and still it does not");
    }
}

#[test]
fn an_etcd_that_is_silent_has_nobody_lead() {
    let folder = tempfile::tempdir().unwrap();
    let Some((member, mut process)) = etcd(folder.path()) else { return };
    let leader = join(&member, "leader");
    let mut store = leader.store(leads(&leader));
    store.write(&[tenant("before")]).unwrap();
    process.signal(Signal::STOP).unwrap();
    until(&leader, |role| (*role == Role::Follows(None)).then_some(()));
    // It may be carried out later, or not at all: etcd has it in hand.
    store.write(&[tenant("unknown")]).unwrap_err();
    process.signal(Signal::CONT).unwrap();
    let term = leads(&leader);
    assert!(matches!(store.write(&[tenant("late")]), Err(StoreError::Superseded)));
    let stored = leader.store(term).read().unwrap();
    assert!(stored.tenants.contains_key("before") && !stored.tenants.contains_key("late"), "{stored:?}");
}

#[test]
fn numbers_of_starts() {
    let mut stored = Stored::default();
    assert_eq!(stored.next_boot(77), 77);
    stored.boot = Some(u32::MAX);
    assert_eq!(stored.next_boot(77), 0);
}

fn refusal(path: &Path) -> StoreError {
    Embedded::open(path).expect_err("not to be opened")
}

#[test]
fn two_servers_on_one_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("control.redb");
    let mut first = Embedded::open(&path).unwrap();
    let error = refusal(&path);
    let StoreError::InUse { owner, .. } = &error else { panic!("{error}") };
    assert!(owner.is_none_or(|pid| pid == std::process::id()), "{error}");
    assert!(error.to_string().contains("is a second control server running on it?"), "{error}");
    first.write(&[Change::Boot(1)]).unwrap();
    assert_eq!(first.read().unwrap().boot, Some(1), "the first goes on");
    drop(first);
    assert_eq!(Embedded::open(&path).unwrap().read().unwrap().boot, Some(1));
}

/// Control servers that start at once on a file that is not there yet: one has it, whatever the order.
#[test]
fn two_servers_that_make_it_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("control.redb");
    let start = std::sync::Barrier::new(8);
    let opened: Vec<_> = std::thread::scope(|scope| {
        let open = || {
            start.wait();
            Embedded::open(&path)
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(open)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(opened.iter().filter(|opened| opened.is_ok()).count(), 1);
    for refused in opened.iter().filter_map(|opened| opened.as_ref().err()) {
        assert!(matches!(refused, StoreError::InUse { .. }), "{refused}");
    }
}

#[test]
fn what_is_no_store() {
    let folder = tempfile::tempdir().unwrap();
    assert!(matches!(refusal(folder.path()), StoreError::Open { .. }));
    assert!(matches!(refusal(&folder.path().join("no/folder")), StoreError::Open { .. }));
    let text = folder.path().join("text");
    std::fs::write(&text, "listen = \"127.0.0.1:0\"\n".repeat(1000)).unwrap();
    assert!(matches!(refusal(&text), StoreError::Damaged { why: Damage::Database(_), .. }));
    assert!(std::fs::read_to_string(&text).unwrap().starts_with("listen"), "and it is left as it was");
}

#[test]
fn newer_format_is_not_modified() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("control.redb");
    drop(Embedded::open(&path).unwrap());
    let database = redb::Database::open(&path).unwrap();
    let write = database.begin_write().unwrap();
    let meta = redb::TableDefinition::<&str, &[u8]>::new("meta");
    write.open_table(meta).unwrap().insert("format", 2_u32.to_le_bytes().as_slice()).unwrap();
    write.commit().unwrap();
    drop(database);
    assert!(matches!(refusal(&path), StoreError::Format { found: 2, supported: 1, .. }));
}

/// A file that an earlier control wrote lacks what came later. Nothing of that kind is there, and it can be written.
#[test]
fn a_file_of_before_is_read_and_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("control.redb");
    let mut store = Embedded::open(&path).unwrap();
    store.write(&changes()).unwrap();
    let mut model = store.read().unwrap();
    drop(store);
    let database = redb::Database::open(&path).unwrap();
    let write = database.begin_write().unwrap();
    let pasts = redb::TableDefinition::<u64, &[u8]>::new("pasts");
    assert!(write.delete_table(pasts).unwrap());
    write.commit().unwrap();
    drop(database);
    let kept = std::mem::take(&mut model.pasts);
    let mut store = Embedded::open(&path).unwrap();
    assert_eq!(store.read().unwrap(), model);
    let again: Vec<Change> = kept.into_values().map(|past| Change::Past(Box::new(past))).collect();
    store.write(&again).unwrap();
    again.iter().for_each(|change| model.apply(change));
    assert_eq!(store.read().unwrap(), model);
}

/// A copy is a store's file, of which another is made; the one that was there is kept.
#[test]
fn a_copy_is_restored() {
    let folder = tempfile::tempdir().unwrap();
    let (path, copy) = (folder.path().join("control.redb"), folder.path().join("copy"));
    let mut store = Embedded::open(&path).unwrap();
    store.write(&changes()).unwrap();
    let mut model = store.read().unwrap();
    std::fs::write(&copy, backup(model.clone()).unwrap()).unwrap();
    assert_eq!(Embedded::open(&copy).unwrap().read().unwrap(), model, "a copy is a store itself");
    store.write(&[Change::NoTenant("b".into())]).unwrap();
    let later = store.read().unwrap();
    assert!(matches!(restore(&copy, &path, 7), Err(StoreError::InUse { .. })), "control runs on it");
    drop(store);
    model.boot = Some(7);
    let (restored, kept) = restore(&copy, &path, 7).unwrap();
    assert_eq!(restored, model);
    assert_eq!(Embedded::open(&path).unwrap().read().unwrap(), model);
    assert_eq!(Embedded::open(&kept.unwrap()).unwrap().read().unwrap(), later);
    // Where there is none, and where there is a damaged one.
    let elsewhere = folder.path().join("other.redb");
    assert!(restore(&copy, &elsewhere, 8).unwrap().1.is_none());
    std::fs::write(&elsewhere, "no store").unwrap();
    assert!(restore(&copy, &elsewhere, 9).unwrap().1.is_some());
    assert_eq!(Embedded::open(&elsewhere).unwrap().read().unwrap().boot, Some(9));
    // What is no copy leaves the store alone.
    for bad in [&b""[..], b"no store", &std::fs::read(&copy).unwrap()[..5000]] {
        std::fs::write(&copy, bad).unwrap();
        let refused = restore(&copy, &path, 10);
        assert!(matches!(&refused, Err(StoreError::Damaged { path, .. }) if *path == copy), "{refused:?}");
    }
    assert_eq!(Embedded::open(&path).unwrap().read().unwrap(), model);
    let mut left: Vec<_> =
        std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["control.redb", "control.redb.replaced", "copy", "other.redb", "other.redb.replaced"]);
}

/// Bytes that change under a store are found, not believed: an error, or what was there.
#[test]
fn damage_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("control.redb");
    let mut store = Embedded::open(&path).unwrap();
    store.write(&changes()).unwrap();
    let model = store.read().unwrap();
    drop(store);
    let whole = std::fs::read(&path).unwrap();
    let (mut found, step) = (0, whole.len() / 97);
    for at in (0..whole.len()).step_by(step.max(1)) {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x5a;
        std::fs::write(&path, &bytes).unwrap();
        match Embedded::open(&path).and_then(|store| store.read()) {
            Ok(stored) => assert_eq!(stored, model, "byte {at}"),
            Err(_) => found += 1,
        }
    }
    // Most of the file is empty pages, whose bytes say nothing.
    assert!(found > 0);
}
