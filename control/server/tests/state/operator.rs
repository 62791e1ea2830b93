//! Instructions of operators: what is refused and why, what is in effect when, and what a restart finds again.

use super::world::{SECOND, World, hello, join_of, running, settings};
use harmonaize_abi::{CommunicatorId, Nanos};
use harmonaize_api::v1::{self, JoinRefusedKind, from_agent, to_agent};
use harmonaize_server::state::testing::Testing as _;
use harmonaize_server::state::{Instruction, InstructionError, RequestRefusal, SessionId, Settings};
use harmonaize_store::{Change, Stored, Withdrawal, WithdrawalKind};
use std::time::Duration;

/// CLOCK_REALTIME at time 0.
const BEGAN: Nanos = Nanos(1_700_000_000_000_000_000);

/// A world whose store is a record of what it says is to be kept.
struct StoreLog {
    world: World,
    stored: Stored,
}

impl StoreLog {
    fn start(stored: Stored, seed: u8) -> Self {
        let mut stored = stored;
        stored.apply(&Change::Boot(stored.next_boot(1000)));
        let mut world = World::new(settings(4), seed);
        world.state.restore(stored.clone(), BEGAN);
        world.run_until_quiet();
        Self { world, stored }
    }

    fn new() -> Self {
        Self::start(Stored::default(), 7)
    }

    /// The same store under the next start.
    fn again(self) -> Self {
        Self::start(self.stored, 8)
    }

    fn instruct(&mut self, instruction: &Instruction) -> Result<(), InstructionError> {
        let changes = self.world.state.consider(self.world.now, instruction)?;
        changes.iter().for_each(|change| self.stored.apply(change));
        self.world.state.apply_stored(self.world.now, &changes);
        self.world.run_until_quiet();
        Ok(())
    }

    fn keep_plan(&mut self, id: u64) {
        self.stored.apply(&self.world.state.plan_change(CommunicatorId(id)));
    }

    fn drain(&mut self, target: &str) -> Result<(), InstructionError> {
        self.instruct(&drain(&[target]))
    }

    fn give_back(&mut self, target: &str, kind: WithdrawalKind) -> Result<(), InstructionError> {
        self.instruct(&Instruction::Restore { targets: vec![target.to_owned()], kind })
    }

    /// Targets, and whether they are in effect.
    fn listed(&self) -> Vec<(String, bool)> {
        let records = self.world.state.queries(self.world.now).withdrawals(None);
        records.into_iter().map(|record| (record.target, record.in_effect)).collect()
    }
}

fn drain(targets: &[&str]) -> Instruction {
    let targets = targets.iter().map(|target| (*target).to_owned()).collect();
    let kind = WithdrawalKind::Drain;
    Instruction::Withdraw { targets, kind, from: Nanos(0), until: Nanos(0), reason: "a\nfan".to_owned() }
}

fn window(target: &str, from: Duration, until: Duration) -> Instruction {
    let clock = |at: Duration| BEGAN.after(at);
    let (targets, kind) = (vec![target.to_owned()], WithdrawalKind::Maintenance);
    Instruction::Withdraw { targets, kind, from: clock(from), until: clock(until), reason: String::new() }
}

fn tenant(name: &str, add: bool) -> Instruction {
    let name = name.to_owned();
    match add {
        true => Instruction::AddTenant(v1::AddTenantRequest { name, ..Default::default() }),
        false => Instruction::RemoveTenant { name },
    }
}

#[test]
fn tenants_come_and_go() {
    let mut kept = StoreLog::new();
    let session = kept.world.agent(0);
    kept.world.join_as(session, "c", "world", 0, 1);
    assert_eq!(kept.world.refusal(session).kind(), JoinRefusedKind::UnknownTenant);
    for (bad, error) in [
        ("", InstructionError::BadName(String::new())),
        ("a b", InstructionError::BadName("a b".to_owned())),
        ("a/b", InstructionError::BadName("a/b".to_owned())),
        ("a", InstructionError::TenantThere("a".to_owned())),
    ] {
        assert_eq!(kept.instruct(&tenant(bad, true)), Err(error));
    }
    kept.instruct(&tenant("c", true)).unwrap();
    assert_eq!(kept.instruct(&tenant("c", true)), Err(InstructionError::TenantThere("c".to_owned())));
    kept.world.join_as(session, "c", "world", 0, 1);
    let id = kept.world.recipe(session).communicator;
    assert_eq!(kept.instruct(&tenant("c", false)), Err(InstructionError::TenantBusy("c".to_owned(), 1)));
    assert_eq!(kept.instruct(&tenant("a", false)), Err(InstructionError::Configured("a".to_owned())));
    assert_eq!(kept.instruct(&tenant("d", false)), Err(InstructionError::NoTenant("d".to_owned())));

    let mut kept = kept.again();
    let names = |kept: &StoreLog| {
        let tenants = kept.world.state.queries(Duration::ZERO).tenants().tenants.into_iter();
        tenants.map(|tenant| (tenant.name, tenant.configured)).collect::<Vec<_>>()
    };
    let [a, b, c] = ["a", "b", "c"].map(str::to_owned);
    assert_eq!(names(&kept), [(a.clone(), true), (b.clone(), true), (c, false)]);
    kept.instruct(&tenant("c", false)).unwrap();
    assert_eq!(names(&kept.again()), [(a, true), (b, true)]);
    assert_ne!(id, 0);
}

#[test]
fn joins_during_a_tenants_removal_are_refused() {
    let mut kept = StoreLog::new();
    let session = kept.world.agent(0);
    kept.instruct(&tenant("c", true)).unwrap();
    let removed = kept.world.state.consider(kept.world.now, &tenant("c", false)).unwrap();
    kept.world.join_as(session, "c", "alone", 0, 1);
    let id = kept.world.recipe(session).communicator;
    kept.world.join_as(session, "c", "waits", 0, 2);
    kept.world.state.apply_stored(kept.world.now, &removed);
    kept.world.run_until_quiet();
    match kept.world.received(session).as_slice() {
        [to_agent::Message::JoinRefused(refused), to_agent::Message::Dissolve(end)] => {
            assert_eq!((refused.kind(), end.communicator), (JoinRefusedKind::UnknownTenant, id));
        }
        other => panic!("{other:?}"),
    }
    let status = kept.world.status();
    assert!(status.communicators.is_empty() && status.waiting.is_empty(), "{status:?}");
}

#[test]
fn what_cannot_be_withdrawn() {
    let mut kept = StoreLog::new();
    let unknown = |what: &str| Err(InstructionError::Unknown(what.to_owned()));
    assert_eq!(kept.drain("h9"), unknown("host or switch `h9`"));
    let link = "link `leaf0:leaf1`; a link is named by its ends, such as leaf0:spine0";
    assert_eq!(kept.drain("leaf0:leaf1"), unknown(link));
    assert_eq!(kept.instruct(&drain(&[])), Err(InstructionError::Targets(0)));
    assert_eq!(kept.instruct(&drain(&["h0"; 1025])), Err(InstructionError::Targets(1025)));
    assert_eq!(kept.instruct(&drain(&["h0", "h9"])), unknown("host or switch `h9`"));
    assert_eq!(kept.listed(), [], "all or none");
    let minute = SECOND * 60;
    let window = |from, until| window("spine", from, until);
    assert_eq!(
        kept.instruct(&window(minute, minute)),
        Err(InstructionError::Window("ends before it begins"))
    );
    kept.world.wait(minute * 3);
    assert_eq!(kept.instruct(&window(minute, minute * 2)), Err(InstructionError::Window("is over already")));
    let not = |what: &str| Err(InstructionError::NotWithdrawn(what.to_owned()));
    assert_eq!(kept.give_back("spine", WithdrawalKind::Drain), not("spine is not drained"));
    assert_eq!(kept.give_back("spine", WithdrawalKind::Maintenance), not("spine has no maintenance"));
    assert_eq!(kept.give_back("h9", WithdrawalKind::Drain), unknown("host or switch `h9`"));
}

#[test]
fn drains_hold_over_restarts_until_restored() {
    let mut kept = StoreLog::new();
    // Either way round, a link is the same; said twice, it is one.
    for target in ["spine:leaf1", "leaf1:spine", "h2", "spine"] {
        kept.drain(target).unwrap();
    }
    let listed: Vec<(String, bool)> =
        ["h2", "leaf1:spine", "spine"].map(|target| (target.to_owned(), true)).to_vec();
    assert_eq!(kept.listed(), listed);
    let mut kept = kept.again();
    assert_eq!(kept.listed(), listed);
    let withdrawn = kept.world.state.queries(Duration::ZERO).withdrawn();
    assert_eq!((withdrawn.hosts.len(), withdrawn.switches.len(), withdrawn.links.len()), (1, 1, 1));
    let record = &kept.world.state.queries(kept.world.now).withdrawals(None)[0];
    assert_eq!((record.reason.as_str(), record.target_kind.as_str()), ("a fan", "host"));
    kept.give_back("spine:leaf1", WithdrawalKind::Drain).unwrap();
    kept.give_back("spine", WithdrawalKind::Drain).unwrap();
    kept.give_back("h2", WithdrawalKind::Drain).unwrap();
    assert_eq!(*kept.world.state.queries(Duration::ZERO).withdrawn(), harmonaize_planner::Drains::default());
    assert_eq!(kept.again().listed(), []);
}

#[test]
fn drains_of_unknown_targets_have_no_effect() {
    let mut stored = Stored::default();
    let kind = WithdrawalKind::Drain;
    let gone =
        Withdrawal { target: "spine9".to_owned(), kind: kind.into(), from_ns: BEGAN.0, ..Default::default() };
    stored.apply(&Change::Withdraw(gone));
    let mut kept = StoreLog::start(stored, 7);
    assert_eq!(kept.listed(), [("spine9".to_owned(), false)]);
    assert_eq!(*kept.world.state.queries(Duration::ZERO).withdrawn(), harmonaize_planner::Drains::default());
    kept.give_back("spine9", kind).unwrap();
    assert_eq!(kept.again().listed(), []);
}

#[test]
fn a_drained_host_gets_no_new_communicators() {
    let mut kept = StoreLog::new();
    let sessions: Vec<SessionId> = (0..2).map(|host| kept.world.agent(host)).collect();
    let id = kept.world.form(&sessions, "before");
    kept.drain("h1").unwrap();
    kept.world.join(sessions[1], "after", 3, 4);
    let refused = kept.world.refusal(sessions[1]);
    assert_eq!(refused.kind(), JoinRefusedKind::Unavailable);
    assert_eq!(refused.text, "the provider takes no new communicators where rank 3 runs: maintenance");
    let [record] = &kept.world.state.queries(kept.world.now).withdrawals(None)[..] else { panic!("one") };
    assert_eq!((record.remaining, record.unknown_paths), (1, 0), "what runs there goes on");
    kept.give_back("h1", WithdrawalKind::Drain).unwrap();
    kept.world.join(sessions[1], "after", 0, 1);
    assert_ne!(kept.world.recipe(sessions[1]).communicator, id);
}

#[test]
fn maintenance_begins_and_ends_by_itself() {
    let mut kept = StoreLog::new();
    let minute = SECOND * 60;
    kept.instruct(&window("spine", minute * 2, minute * 3)).unwrap();
    kept.instruct(&window("h0", SECOND, minute)).unwrap();
    let deadline = |kept: &StoreLog| kept.world.state.next_deadline();
    assert_eq!(
        (kept.listed(), deadline(&kept)),
        (vec![("h0".into(), true), ("spine".into(), false)], Some(minute))
    );
    let mut kept = kept.again();
    kept.world.wait(minute - SECOND);
    assert_eq!(kept.listed(), [("h0".to_owned(), false), ("spine".to_owned(), false)]);
    assert_eq!(deadline(&kept), Some(minute * 2));
    let over = Change::Restore("h0".to_owned(), WithdrawalKind::Maintenance);
    let none = std::iter::empty();
    assert_eq!(kept.world.state.expired_withdrawals(kept.world.now, none), std::slice::from_ref(&over));
    // One that goes on is not removed after what says so was stored; another is.
    let go_on = window("h0", SECOND, minute * 5);
    let longer = kept.world.state.consider(kept.world.now, &go_on).unwrap();
    assert_eq!(kept.world.state.expired_withdrawals(kept.world.now, longer.iter()), []);
    let other = window("h1", SECOND, minute * 5);
    let other = kept.world.state.consider(kept.world.now, &other).unwrap();
    assert_eq!(kept.world.state.expired_withdrawals(kept.world.now, other.iter()), [over]);
    kept.world.wait(minute);
    assert_eq!(kept.world.state.queries(Duration::ZERO).withdrawn().switches.len(), 1);
    kept.world.wait(minute);
    assert_eq!(*kept.world.state.queries(Duration::ZERO).withdrawn(), harmonaize_planner::Drains::default());
}

/// Ages of links are counted from it.
#[test]
fn a_topology_says_when_it_was_answered() {
    let mut kept = StoreLog::new();
    let told = |kept: &StoreLog| Nanos(kept.world.state.queries(kept.world.now).topology().now_ns);
    assert_eq!(told(&kept), BEGAN.after(kept.world.now));
    kept.world.wait(SECOND);
    assert_eq!(told(&kept), BEGAN.after(kept.world.now));
}

fn ports(recipe: &v1::Recipe) -> Vec<u32> {
    recipe.peers.iter().flat_map(|peer| peer.source_ports.clone()).collect()
}

#[test]
fn a_restart_finds_ports_and_numbers_again() {
    let mut kept = StoreLog::new();
    let sessions: Vec<SessionId> = (0..2).map(|host| kept.world.agent(host)).collect();
    let recipes = kept.world.join_all(&sessions, &join_of("a", "world", 0, 0));
    let id = recipes[0].communicator;
    assert_eq!(id >> 32, 1000, "the first start of a store has the number that it was given");
    kept.world.prepare(&sessions, id, 1);
    kept.keep_plan(id);
    // A change that agents prepare, and that control does not live to see in use.
    assert_eq!(kept.world.reorder(id, &["h1", "h0"]), Ok(2));
    kept.keep_plan(id);
    let plan = &kept.stored.plans[&CommunicatorId(id)];
    assert_eq!((plan.next_epoch, plan.hosts.join(" ").as_str()), (3, "h0 h1"));
    assert_eq!([&plan.current, &plan.pending].map(|epoch| epoch.as_ref().unwrap().epoch), [1, 2]);

    let mut kept = kept.again();
    let mut agents = Vec::new();
    for (host, recipe) in recipes.iter().enumerate() {
        agents.push(kept.world.hello(hello(host, running(recipe))));
    }
    for agent in &agents {
        let heard = kept.world.received(*agent);
        let calm = |message: &to_agent::Message| {
            matches!(message, to_agent::Message::Welcome(_) | to_agent::Message::Ready(_))
        };
        assert!(heard.iter().all(calm), "nothing is disturbed: {heard:?}");
    }
    // Another communicator of the same hosts gets other ports, and an id of this start.
    for (rank, agent) in agents.iter().enumerate() {
        kept.world.join(*agent, "other", rank as u32, 2);
    }
    let other = kept.world.recipe(agents[0]);
    assert_eq!(other.communicator >> 32, 1001);
    let taken = ports(&recipes[0]);
    assert!(
        !taken.is_empty() && ports(&other).iter().all(|port| !taken.contains(port)),
        "{taken:?} {other:?}"
    );
    // No epoch's number is given twice.
    kept.world.received(agents[1]);
    assert_eq!(kept.world.reorder(id, &["h1", "h0"]), Ok(3));
}

#[test]
fn plans_of_lost_communicators_are_forgotten() {
    let mut kept = StoreLog::new();
    let session = kept.world.agent(0);
    let id = kept.world.form(&[session], "alone");
    kept.keep_plan(id);
    let mut kept = kept.again();
    let recovery = settings(4).lease;
    assert!(kept.world.state.lost_plans(recovery - SECOND).is_empty());
    assert_eq!(kept.world.state.next_deadline(), Some(recovery));
    assert_eq!(kept.world.state.lost_plans(recovery), [CommunicatorId(id)]);
    assert_eq!(kept.world.state.plan_change(CommunicatorId(id)), Change::NoPlan(CommunicatorId(id)));
    assert!(kept.world.state.lost_plans(recovery).is_empty());
}

/// Agents learn of tenants that were added for their hosts, and those that come later too. Such a tenant may be nowhere else.
/// One that the configuration has is as there.
#[test]
fn added_tenants_reach_the_agents_that_shall_serve_them() {
    let mut kept = StoreLog::new();
    let (here, there) = (kept.world.agent(1), kept.world.agent(0));
    let told = |kept: &mut StoreLog, session| match kept.world.received(session).as_slice() {
        [to_agent::Message::ServeTenants(told)] => told.tenants.clone(),
        other => panic!("{other:?}"),
    };
    let asked = v1::AddTenantRequest {
        name: "c".to_owned(),
        uids: vec![7],
        hosts: vec!["h1".to_owned()],
        quota: Some(v1::TenantQuota { attachments: 3, ..Default::default() }),
    };
    let unknown = InstructionError::Unknown("host `h9`".to_owned());
    for (wrong, expected) in [
        (v1::AddTenantRequest { uids: vec![7, 0], ..asked.clone() }, InstructionError::Users),
        (v1::AddTenantRequest { uids: Vec::new(), ..asked.clone() }, InstructionError::QuotaOfNobody),
        (v1::AddTenantRequest { hosts: vec!["h9".to_owned()], ..asked.clone() }, unknown),
    ] {
        assert_eq!(kept.instruct(&Instruction::AddTenant(wrong)), Err(expected));
    }
    kept.instruct(&Instruction::AddTenant(asked.clone())).unwrap();
    let served = v1::AddedTenant { name: "c".to_owned(), uids: vec![7], quota: asked.quota };
    assert_eq!((told(&mut kept, here), told(&mut kept, there)), (vec![served.clone()], vec![]));
    kept.world.join_as(there, "c", "world", 0, 1);
    assert_eq!(kept.world.refusal(there).kind(), JoinRefusedKind::UnknownTenant);
    // Nor does the agent there ask anything else for it.
    for (agent, elsewhere) in [(there, true), (here, false)] {
        let asked = v1::ReadEvents { tenant: "c".to_owned(), ..Default::default() };
        kept.world.send(agent, from_agent::Message::ReadEvents(asked));
        let read = only!(kept.world.received(agent), EventsRead);
        let why = RequestRefusal::Elsewhere.to_string();
        assert_eq!(read.refused == why, elsewhere, "{}", read.refused);
        let asked =
            v1::Hint { tenant: "c".to_owned(), communicator: "world".to_owned(), ..Default::default() };
        kept.world.send(agent, from_agent::Message::Hint(asked));
        let hinted = only!(kept.world.received(agent), Hinted);
        assert_eq!(hinted.refused == why, elsewhere, "{}", hinted.refused);
    }
    let serves =
        v1::TenantServed { name: "c".to_owned(), socket: "/c.sock".to_owned(), ..Default::default() };
    kept.world.send(here, from_agent::Message::TenantsServed(v1::TenantsServed { tenants: vec![serves] }));
    let record = |kept: &StoreLog| kept.world.state.queries(SECOND).tenants().tenants.pop().unwrap();
    let at = v1::TenantAtHost { host: "h1".to_owned(), socket: "/c.sock".to_owned(), refused: String::new() };
    assert_eq!((record(&kept).hosts, record(&kept).at), (asked.hosts.clone(), vec![at]));

    // After a restart it is in the welcome.
    let mut kept = kept.again();
    let session = kept.world.hello(hello(1, vec![]));
    let welcome = only!(kept.world.received(session), Welcome);
    assert_eq!(welcome.serve, [served]);
    let configure = |kept: &mut StoreLog, tenants: &[&str]| {
        let tenants = tenants.iter().map(|name| (*name).to_owned()).collect();
        let again = Settings { tenants, ..settings(4) };
        kept.world.state.configure(SECOND * 2, again).unwrap();
        kept.world.run_until_quiet();
    };
    configure(&mut kept, &["a", "c"]);
    assert!(told(&mut kept, session).is_empty() && record(&kept).configured);
    kept.world.join_as(session, "b", "world", 0, 1);
    assert_eq!(kept.world.refusal(session).kind(), JoinRefusedKind::UnknownTenant, "gone from the file");
    kept.world.join_as(session, "a", "world", 0, 1);
    let id = kept.world.recipe(session).communicator;
    configure(&mut kept, &["c"]);
    let end = only!(kept.world.received(session), Dissolve);
    assert_eq!((end.communicator, end.kind()), (id, v1::FailureKind::Operator));
}
