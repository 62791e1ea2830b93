//! Panics in each kind of work: the communicator ends with a typed error everywhere, and nothing else does.

mod away;
mod coded;
#[allow(dead_code)]
#[path = "../../tests/engine/common.rs"]
mod common;
mod control_messages;
mod deaf;
mod gone;
mod idle;
mod midst;
#[path = "../../tests/engine/tap.rs"]
mod tap;

use crate::containment::{Task, fault};
use crate::{AttachmentId, Command, CommunicatorId, Engine, Epoch, Formation, LocalRank, Notice, PanicScope};
use common::{World, loopback, reduce, tcp};
use harmonaize_abi::{CommunicatorHandle, Rank, ReduceOp, Status, Submission};
use harmonaize_core::Failure;
use harmonaize_plan::Participant;
use harmonaize_transport::Transport;

const COUNT: usize = 20_000;
const OUTPUT: u64 = 1 << 20;
/// The communicator that panics, and the one beside it, on each attachment.
const VICTIM: u32 = 7;
const OTHER: u32 = 8;

fn world(transports: Vec<Box<dyn Transport + Send>>, away: bool) -> World {
    let mut world = World::with_away(transports, &[vec![0, 1], vec![2]], None, &|_| away);
    for me in 0..2 {
        let command = Command::Form(Box::new(formation(&world, 2, OTHER, Participant(me))));
        world.engines[me as usize].handle_command(command);
    }
    world.until("formed beside", |world| {
        let prepared = |n: &Notice| matches!(n, Notice::Prepared { communicator: CommunicatorId(2), .. });
        world.all_reported(prepared)
    });
    world
}

fn formation(world: &World, communicator: u8, handle: u32, me: Participant) -> Formation {
    let order: Vec<u32> = (0..world.group.participants()).collect();
    let mut peers = world.peers(Epoch(1), me);
    for peer in &mut peers {
        peer.introduction.as_mut().unwrap().name[3] = communicator;
    }
    let locals = world.group.local(me).iter();
    let local = |&rank: &Rank| LocalRank {
        rank,
        attachment: AttachmentId(rank.0.into()),
        handle: CommunicatorHandle(handle),
    };
    Formation {
        communicator: CommunicatorId(communicator.into()),
        tenant: u32::from(communicator),
        weight: 1,
        me,
        plan: world.plan(Epoch(1), &order),
        peers,
        aggregator: None,
        locals: locals.map(local).collect(),
    }
}

/// Calls an AllReduce at all ranks.
fn submit(world: &mut World, communicator: u32) {
    for (rank, tenant) in world.tenants.iter_mut().enumerate() {
        let call = reduce(ReduceOp::Sum, COUNT as u64, 0, OUTPUT);
        tenant.end.submit(&Submission { communicator, cookie: 100 + rank as u64, ..call }).unwrap();
    }
}

/// The statuses of the next completion of each rank, which is for its call.
fn statuses(world: &mut World) -> Vec<Status> {
    let done = world.completions();
    let cookies: Vec<u64> = done.iter().map(|completion| completion.cookie).collect();
    assert_eq!(cookies, [100, 101, 102], "each call is answered once");
    done.iter().map(|completion| Status::from_code(completion.status).unwrap()).collect()
}

fn failures(world: &World, engine: usize) -> Vec<(u64, Failure)> {
    let notices = world.notices[engine].lock().unwrap();
    let ended = |notice: &Notice| match notice {
        Notice::Ended { communicator, failure, .. } => Some((communicator.0, failure.clone())),
        _ => None,
    };
    notices.iter().filter_map(ended).collect()
}

fn panics(world: &World, engine: usize, scope: PanicScope) -> usize {
    let notices = world.notices[engine].lock().unwrap();
    notices
        .iter()
        .filter(|notice| matches!(notice, Notice::Panicked { scope: of, .. } if *of == scope))
        .count()
}

/// Whether nothing names a communicator that is gone.
fn is_clean(engine: &Engine) -> bool {
    let known = |key| engine.communicators.get(key).is_some();
    engine.links.values().all(|(key, ..)| known(*key))
        && engine.by_communicator.values().all(|key| known(*key))
        && engine.aftermath.panicked.is_empty()
        && engine.pending_transfers.is_empty()
}

/// The victim has ended everywhere, with a typed error, and the other goes on.
fn assert_contained(world: &mut World, what: &str) {
    assert!(!fault::is_armed(), "{what}: nothing has panicked");
    world.until("the end at both", |world| {
        (0..2).all(|engine| failures(world, engine).iter().any(|(id, _)| *id == 1))
    });
    let hit = (0..2).find(|engine| panics(world, *engine, PanicScope::Communicator) == 1).unwrap();
    let ranks = world.group.local(Participant(hit as u32)).to_vec();
    for engine in 0..2 {
        assert_eq!(
            failures(world, engine),
            [(1, Failure::Internal { ranks: ranks.clone() })],
            "{what}: engine {engine}, hit was {hit}"
        );
        assert!(is_clean(&world.engines[engine]), "{what}: engine {engine}");
    }
    assert_eq!(panics(world, 1 - hit, PanicScope::Communicator), 0, "{what}");
    submit(world, VICTIM);
    assert_eq!(statuses(world), [Status::Internal; 3], "{what}: later calls");
    submit(world, OTHER);
    assert_eq!(statuses(world), [Status::Ok; 3], "{what}: the other communicator");
}

/// How many communicators have turns, of all engines.
fn turns(world: &World) -> usize {
    world.engines.iter().map(|engine| engine.turns.iter().count()).sum()
}

/// A panic in this work while all ranks run an operation.
fn in_operation(mut world: World, task: Task, behind: u32) {
    fault::arm(task, behind);
    submit(&mut world, VICTIM);
    assert_eq!(statuses(&mut world), [Status::Internal; 3], "{task:?}");
    assert_contained(&mut world, &format!("{task:?} behind {behind}"));
}

#[test]
fn a_panic_in_an_operation_ends_its_communicator_alone() {
    for (task, behind) in [
        (Task::Call, 0),
        (Task::Call, 1),
        (Task::Step, 0),
        (Task::Step, 5),
        (Task::Turn, 0),
        (Task::Frame, 0),
        (Task::Frame, 7),
    ] {
        in_operation(world(loopback(2), false), task, behind);
    }
}

#[test]
fn the_same_over_tcp() {
    for (task, behind) in [(Task::Step, 3), (Task::Frame, 3)] {
        in_operation(world(tcp(2), false), task, behind);
    }
}

#[test]
fn a_transfers_panic_ends_its_communicator_alone() {
    in_operation(world(loopback(2), true), Task::Transfer, 2);
}

#[test]
fn timer_or_packet_panics_end_their_communicator_alone() {
    for task in [Task::Timer, Task::Packets] {
        let mut world = world(loopback(2), false);
        // Then one alone has turns, and its timers are looked at once a tick.
        world.until("rest", |world| turns(world) == 0);
        fault::arm(task, 0);
        submit(&mut world, VICTIM);
        world.until("a panic", |_| !fault::is_armed());
        // Its operation may have ended before that.
        statuses(&mut world);
        assert_contained(&mut world, &format!("{task:?}"));
    }
}

#[test]
fn a_panic_in_a_command_ends_its_communicator_alone() {
    let communicator = CommunicatorId(1);
    let commands: [fn(&World) -> Command; 4] = [
        |_| Command::Interleave { communicator: CommunicatorId(1), interleaving: None },
        |_| Command::AllPrepared { communicator: CommunicatorId(1), epoch: Epoch(1) },
        |_| Command::Leave { communicator: CommunicatorId(1), rank: Rank(0) },
        |world| Command::Change {
            communicator: CommunicatorId(1),
            plan: Box::new(world.plan(Epoch(2), &[1, 0])),
            peers: world.peers(Epoch(2), Participant(0)),
            aggregator: None,
        },
    ];
    for command in commands {
        let mut world = world(loopback(2), false);
        submit(&mut world, VICTIM);
        fault::arm(Task::Command, 0);
        let command = command(&world);
        let (what, leaves) = (format!("{command:?}"), matches!(command, Command::Leave { .. }));
        world.engines[0].progress(64);
        world.engines[0].handle_command(command);
        assert_eq!(statuses(&mut world), [Status::Internal; 3], "{what}");
        // Who has left is in no communicator any more.
        if !leaves {
            assert_contained(&mut world, &what);
        }
        assert!(failures(&world, 0).iter().all(|(id, _)| *id == communicator.0));
    }
}

#[test]
fn a_panic_in_a_report_ends_its_communicator_alone() {
    let mut world = world(loopback(2), false);
    fault::arm(Task::Report, 0);
    world.engines[0].handle_command(Command::Status { id: 5 });
    let reported = world.notices[0].lock().unwrap().iter().any(|notice| match notice {
        Notice::Status { id: 5, status } => {
            status.communicators.iter().any(|known| known.communicator == CommunicatorId(2))
        }
        _ => false,
    });
    assert!(reported, "of the other there is a report");
    assert_contained(&mut world, "a report");
}

#[test]
fn a_panic_as_a_communicator_forms_leaves_nothing() {
    let mut world = world(loopback(2), false);
    let links = world.engines[0].links.len();
    fault::arm(Task::Command, 0);
    let command = Command::Form(Box::new(formation(&world, 3, 9, Participant(0))));
    world.engines[0].handle_command(command);
    let refused =
        |notice: &Notice| matches!(notice, Notice::PrepareFailed { communicator: CommunicatorId(3), .. });
    assert!(world.notices[0].lock().unwrap().iter().any(refused));
    assert_eq!(panics(&world, 0, PanicScope::Communicator), 1);
    assert_eq!(world.engines[0].links.len(), links);
    assert!(is_clean(&world.engines[0]));
    for communicator in [VICTIM, OTHER] {
        submit(&mut world, communicator);
        assert_eq!(statuses(&mut world), [Status::Ok; 3]);
    }
}

#[test]
fn a_panic_at_an_attachment_s_rings_ends_that_attachment_alone() {
    let mut world = world(loopback(2), false);
    // Of engine 0 the first attachment is rank 0's; its communicators lose that rank with nothing in flight.
    fault::arm(Task::Rings, 0);
    world.until("a panic", |_| !fault::is_armed());
    let let_go = |notice: &Notice| matches!(notice, Notice::Detached { attachment: AttachmentId(0), .. });
    assert_eq!(world.notices[0].lock().unwrap().iter().filter(|notice| let_go(notice)).count(), 1);
    assert_eq!(panics(&world, 0, PanicScope::Attachment), 1);
    assert_eq!(world.engines[0].attachments.iter().count(), 1);
    assert_eq!((failures(&world, 0), failures(&world, 1)), (Vec::new(), Vec::new()));
    assert!(is_clean(&world.engines[0]));
}

/// So that a round costs nothing for communicators that do nothing.
#[test]
fn a_communicator_without_operations_rests_until_something_happens_to_it() {
    let mut world = world(loopback(2), false);
    world.until("rest", |world| turns(world) == 0);
    submit(&mut world, OTHER);
    let (mut most, mut done) = (0, vec![]);
    world.until("its completions", |world| {
        most = most.max(turns(world));
        done.extend(world.tenants.iter_mut().filter_map(|tenant| tenant.end.completion().unwrap()));
        done.len() == 3
    });
    assert!(done.iter().all(|completion| completion.status == Status::Ok.code()));
    assert_eq!(most, 2, "the other communicator rests on");
    world.until("rest again", |world| turns(world) == 0);
    // Its time-outs go on while it waits for a rank that does not come.
    let call = Submission { timeout_ns: 500_000_000, ..reduce(ReduceOp::Sum, COUNT as u64, 0, OUTPUT) };
    let call = Submission { communicator: VICTIM, cookie: 100, ..call };
    world.tenants[0].end.submit(&call).unwrap();
    world.until("rest with a call", |world| {
        turns(world) == 0 && world.engines[0].communicators.iter().any(|member| member.calls_in_flight() == 1)
    });
    let waits = |(_, key): &(_, _)| {
        world.engines[0].communicators.get(*key).is_some_and(|member| member.calls_in_flight() == 1)
    };
    assert!(world.engines[0].resting.iter().any(waits), "its time-out is noted");
    assert_eq!(world.completion(0).status, Status::Timeout.code());
}
