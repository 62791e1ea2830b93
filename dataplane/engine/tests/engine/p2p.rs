//! Messages from rank to rank through engines, rings and transports, beside collectives.

use crate::common::{SMALL, World, call, loopback, tcp};
use harmonaize_abi::Rank;
use harmonaize_abi::{
    ABI_VERSION, ANY_RANK, Collective, Completion, Direction, Dtype, Region, Status, Submission,
};
use harmonaize_core::Failure;
use harmonaize_engine::{Command, CommunicatorStatus, Notice};
use harmonaize_transport::Transport;

pub(crate) fn message(direction: Direction, peer: u32, count: u64, at: u64) -> Submission {
    let region = Region { offset: at, bytes: count * 8 };
    let (input, output) = match direction {
        Direction::Send => (region, Region::default()),
        Direction::Receive => (Region::default(), region),
    };
    Submission {
        version: ABI_VERSION,
        collective: direction.code(),
        dtype: Dtype::U64.code(),
        root: peer,
        count,
        input,
        output,
        cookie: at,
        ..Submission::default()
    }
}

fn content(from: usize, to: usize, count: usize) -> Vec<u64> {
    (0..count as u64).map(|at| at << 16 | (from as u64) << 8 | to as u64).collect()
}

/// So many completions of each rank.
fn completions(world: &mut World, each: usize) -> Vec<Vec<Completion>> {
    let mut done = vec![Vec::new(); world.tenants.len()];
    world.until("completions", |world| {
        for (tenant, done) in world.tenants.iter_mut().zip(&mut done) {
            done.extend(tenant.end.completion().unwrap());
        }
        done.iter().all(|done: &Vec<Completion>| done.len() >= each)
    });
    done
}

const SENT: u64 = 4 << 20;
const RECEIVED: u64 = 8 << 20;

/// Each to the next around, itself if it is alone, and an AllReduce at once.
fn around(world: &mut World, count: usize, any: bool) {
    let n = world.tenants.len();
    for rank in 0..n {
        let (next, before) = ((rank + 1) % n, (rank + n - 1) % n);
        world.write(rank, SENT, &content(rank, next, count));
        world.write(rank, 0, &[1, 2, 3]);
        let from = if any { ANY_RANK } else { before as u32 };
        if rank % 2 == 0 {
            world.submit(rank, call(Collective::AllReduce, 3, 1, 0, 0, 0));
        }
        world.submit(rank, message(Direction::Receive, from, count as u64, RECEIVED));
        world.submit(rank, message(Direction::Send, next as u32, count as u64, SENT));
        if rank % 2 == 1 {
            world.submit(rank, call(Collective::AllReduce, 3, 1, 0, 0, 0));
        }
    }
    for (rank, done) in completions(world, 3).iter().enumerate() {
        let (next, before) = ((rank + 1) % n, (rank + n - 1) % n);
        assert!(done.iter().all(|done| done.status == 0), "{done:?}, {:?}", world.notices);
        let of = |cookie: u64| done.iter().find(|done| done.cookie == cookie).unwrap();
        assert_eq!((of(SENT).peer, of(RECEIVED).peer), (next as u32, before as u32));
        assert!(
            world.read(rank, RECEIVED, count) == content(before, rank, count),
            "{count} for {rank} of {n}"
        );
        assert_eq!(world.read(rank, 0, 3), [n as u64, 2 * n as u64, 3 * n as u64]);
    }
}

/// `slice`: after how many bytes copies give up their turns, if they do.
fn all_arrive(
    transports: fn(usize) -> Vec<Box<dyn Transport + Send>>,
    away: &dyn Fn(u32) -> bool,
    slice: Option<usize>,
) {
    for ranks in
        [vec![vec![0]], vec![vec![0, 1]], vec![vec![0], vec![1]], vec![vec![0, 3], vec![1, 2], vec![4]]]
    {
        let mut world = World::with_away(transports(ranks.len()), &ranks, None, away);
        slice.into_iter().for_each(|bytes| world.slice_actions(bytes));
        for count in [0, 1, 511, 512, 513, 100_000] {
            around(&mut world, count, false);
            around(&mut world, count, true);
        }
    }
}

#[test]
fn messages_arrive_on_one_host_and_between_hosts() {
    all_arrive(loopback, &|_| false, None);
    all_arrive(tcp, &|_| false, None);
}

#[test]
fn messages_arrive_in_slices() {
    all_arrive(loopback, &|_| false, Some(3000));
    all_arrive(loopback, &|rank| rank % 2 == 1, Some(20_000));
}

#[test]
fn messages_arrive_where_tensors_are_not_mapped() {
    all_arrive(loopback, &|_| true, None);
    all_arrive(tcp, &|rank| rank % 2 == 1, None);
}

/// Messages match in the order of the sends, though a later one is shorter. A rank that sends to two is not held up by the one
/// that is late.
#[test]
fn messages_match_in_order_and_wait_for_nobody_else() {
    let mut world = World::new(loopback(2), &[vec![0], vec![1, 2]], SMALL);
    world.write(0, 0, &content(0, 1, 5000));
    world.write(0, SENT, &[7]);
    world.submit(0, message(Direction::Send, 1, 5000, 0));
    world.submit(0, message(Direction::Send, 1, 1, SENT));
    world.submit(0, message(Direction::Send, 2, 1, SENT));
    world.submit(2, message(Direction::Receive, 0, 1, RECEIVED));
    let mut done = Vec::new();
    world.until("the message to rank 2", |world| {
        done.extend(world.tenants[2].end.completion().unwrap());
        !done.is_empty()
    });
    assert_eq!(world.read(2, RECEIVED, 1), [7]);
    world.submit(1, message(Direction::Receive, 0, 5000, RECEIVED));
    world.submit(1, message(Direction::Receive, ANY_RANK, 1, 0));
    world.until("the messages to rank 1", |world| {
        done.extend(world.tenants[1].end.completion().unwrap());
        done.len() == 3
    });
    assert!(done.iter().all(|done| done.status == 0), "{done:?}");
    assert!(world.read(1, RECEIVED, 5000) == content(0, 1, 5000));
    assert_eq!(world.read(1, 0, 1), [7]);
    assert!(done.iter().any(|done| (done.cookie, done.operation) == (0, 1)), "{done:?}");
}

fn status(world: &mut World, engine: usize) -> CommunicatorStatus {
    world.engines[engine].handle_command(Command::Status { id: 1 });
    let mut told = world.notices[engine].lock().unwrap();
    match told.pop() {
        Some(Notice::Status { status, .. }) => status.communicators[0].clone(),
        other => panic!("{other:?}"),
    }
}

/// The status that control makes of it. An operation counts once for all ranks of a host, and a message is no
/// operation.
#[test]
fn a_status_has_the_operations_and_whom_messages_wait_for() {
    let mut world = World::new(loopback(2), &[vec![0, 1], vec![2]], SMALL);
    around(&mut world, 513, false);
    let all = [0, 1].map(|engine| status(&mut world, engine));
    assert!(all.iter().all(|of| of.completed == 1 && of.in_flight.is_empty() && of.messages.is_empty()));
    world.submit(0, message(Direction::Send, 2, 5, SENT));
    world.submit(1, message(Direction::Receive, ANY_RANK, 5, RECEIVED));
    world.until("both calls", |world| status(world, 0).messages.len() == 2);
    let told = status(&mut world, 0).messages;
    let awaits = |rank| &told.iter().find(|one| one.rank == Rank(rank)).unwrap().awaits;
    assert_eq!((awaits(0).as_slice(), awaits(1).as_slice()), (&[Rank(2)][..], &[Rank(0), Rank(2)][..]));
    world.submit(2, message(Direction::Receive, 0, 5, RECEIVED));
    world.until("the message", |world| status(world, 0).messages.len() == 1);
}

#[test]
fn ends_that_differ_end_the_communicator_and_say_so() {
    let mut world = World::new(loopback(2), &[vec![0], vec![1]], SMALL);
    world.submit(0, message(Direction::Send, 1, 10, 0));
    world.submit(1, message(Direction::Receive, 0, 11, 0));
    let done = completions(&mut world, 1);
    assert!(done.iter().flatten().all(|done| done.status == Status::Mismatch.code()), "{done:?}");
    let told = world.notices[0].lock().unwrap();
    let ended = told.iter().find_map(|notice| match notice {
        Notice::Ended { failure, .. } => Some(failure.clone()),
        _ => None,
    });
    let Some(Failure::P2pMismatch { sent: (_, 10), received: (_, 11), .. }) = ended else {
        panic!("{ended:?}")
    };
}

#[test]
fn a_receive_that_nobody_sends_ends_at_its_timeout() {
    let mut world = World::new(loopback(2), &[vec![0], vec![1]], SMALL);
    let impatient = Submission { timeout_ns: 50_000_000, ..message(Direction::Receive, 1, 4, 0) };
    world.submit(0, impatient);
    let mut done = None;
    world.until("the end", |world| {
        done = done.or(world.tenants[0].end.completion().unwrap());
        done.is_some()
    });
    assert_eq!(done.unwrap().status, Status::Timeout.code());
}
