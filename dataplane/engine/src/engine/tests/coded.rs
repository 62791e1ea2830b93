//! Coded actions whose turns are over in their midst: what others wait for, and what an abort leaves of them.

use super::common::{ARENA, World, call, loopback, reduce};
use super::{OTHER, VICTIM, formation};
use crate::table::Key;
use crate::turns::{SLICE, Turn, Urgency, Work};
use crate::{Command, CommunicatorId, Engine, Formation, Notice};
use harmonaize_abi::{Collective, Rank, ReduceOp, Region, Status, Submission, flags};
use harmonaize_codec::Codec;
use harmonaize_core::{Failure, Nanos};
use harmonaize_plan::{Coding, Participant, Tuning};

const COUNT: usize = 900_000;
const OUTPUT: u64 = 4 << 20;
const HALVES: [u64; 2] = [8 << 20, 12 << 20];
/// Where a small operation's tensors lie.
const BESIDE: u64 = 24 << 20;
/// Of a small operation, 32 KiB of u64.
const SMALL_COUNT: u64 = 4096;
/// Bytes that a slice reads and writes at most.
const SLICE_BYTES: u64 = 256 << 10;
/// What a turn costs beside its bytes, and how many bytes a nanosecond moves. The clock below moves by no other time.
const TURN: u64 = 1000;
const BYTES_PER_NANOSECOND: u64 = 8;

/// Chunks of 1 MiB, coded so, between two engines of a rank each. There is a second communicator beside, of some tenant.
fn world(name: &str, tenant: u32) -> World {
    let tuning = Tuning { chunk_bytes: 1 << 20, segment_bytes: 4 << 20, ..Tuning::default() };
    let codec = Codec::NAMED.iter().position(|(known, _)| *known == name).unwrap() as u16;
    let coding = Some(Coding { codec, finer: None, max_error: None });
    let ranks = [vec![0], vec![1]];
    let mut world =
        World::with_plan(loopback(2), &ranks, tuning, (ARENA, 2), coding, None, Vec::new(), &|_| false);
    form(&mut world, 2, OTHER, tenant);
    for rank in 0..2 {
        world.write_floats(rank, 0, &values(rank));
        world.write_floats(rank, HALVES[0], &residual(rank));
    }
    world
}

fn form(world: &mut World, communicator: u8, handle: u32, tenant: u32) {
    for me in 0..2 {
        let formation = Formation { tenant, ..formation(world, communicator, handle, Participant(me)) };
        world.engines[me as usize].handle_command(Command::Form(Box::new(formation)));
    }
    let of = CommunicatorId(communicator.into());
    world.until("formed beside", |world| {
        world.all_reported(
            |notice| matches!(notice, Notice::Prepared { communicator, .. } if *communicator == of),
        )
    });
}

fn values(rank: usize) -> Vec<f32> {
    (0..COUNT).map(|at| ((at * 7 + rank * 13) % 1009) as f32 - 504.0).collect()
}

fn residual(rank: usize) -> Vec<f32> {
    (0..COUNT).map(|at| ((at * 3 + rank * 5) % 17) as f32 / 8.0).collect()
}

/// Calls the large sum with feedback at both ranks.
fn call_large(world: &mut World, communicator: u32) {
    let region = |offset| Region { offset, bytes: 4 * COUNT as u64 };
    let sum = Submission {
        communicator,
        cookie: 1,
        flags: flags::FEEDBACK,
        residual_in: region(HALVES[0]),
        residual_out: region(HALVES[1]),
        ..reduce(ReduceOp::Sum, COUNT as u64, 0, OUTPUT)
    };
    world.tenants.iter_mut().for_each(|tenant| tenant.end.submit(&sum).unwrap());
}

/// An engine whose clock moves by what turns read and write alone. Each turn is over when it first looks at the time.
struct Virtual<'a> {
    engine: &'a mut Engine,
    clock: &'a mut u64,
    /// By turn: whose it was, if it did something.
    log: Vec<(Key, Turn)>,
}

impl Work for Virtual<'_> {
    fn now(&self) -> Nanos {
        Nanos(*self.clock)
    }

    fn alone(&self) -> bool {
        Work::alone(&*self.engine)
    }

    fn urgency(&self, key: Key) -> Option<Urgency> {
        Work::urgency(&*self.engine, key)
    }

    fn run(&mut self, _: Nanos, key: Key, _: Option<Nanos>) -> Turn {
        let now = Engine::now(self.engine);
        let turn = Work::run(&mut *self.engine, now, key, Some(Nanos(0)));
        if turn.worked > 0 {
            *self.clock += cost(&turn);
            self.log.push((key, turn));
        }
        turn
    }
}

fn cost(turn: &Turn) -> u64 {
    TURN + turn.touched / BYTES_PER_NANOSECOND
}

/// A round of an engine by that clock: what [`Engine::progress`] does but for timers. Returns whose turns there were.
fn round(engine: &mut Engine, clock: &mut u64) -> Vec<(Key, Turn)> {
    let now = Engine::now(engine);
    engine.poll_network(now, 64);
    engine.poll_tenants(now);
    engine.end_rests(now);
    let mut turns = std::mem::take(&mut engine.turns);
    let mut work = Virtual { engine: &mut *engine, clock: &mut *clock, log: Vec::new() };
    turns.run(Nanos(*work.clock), &mut work);
    let log = work.log;
    engine.turns = turns;
    engine.attachments.iter_mut().for_each(|attachment| attachment.flush().unwrap());
    log
}

fn key_of(world: &World, engine: usize, communicator: u64) -> Key {
    world.engines[engine].by_communicator[&CommunicatorId(communicator)]
}

/// How many engines have the communicator in the midst of an action.
fn in_midst(world: &World, communicator: u64) -> usize {
    let unfinished = |engine: &usize| {
        let member = world.engines[*engine].communicators.get(key_of(world, *engine, communicator));
        member.is_some_and(|member| member.unfinished.is_some())
    };
    (0..2).filter(unfinished).count()
}

/// Whatever arrives in a round is served in the next, behind one slice at most. No round is longer than 50 us and a slice.
#[test]
fn a_small_operation_waits_for_a_round_and_a_slice_of_coded_ones() {
    for (name, tenant) in [("rotated 4", 0), ("int8", 0), ("rotated 1", 2), ("bf16", 2)] {
        let mut world = world(name, tenant);
        call_large(&mut world, VICTIM);
        let (mut clocks, mut sliced, mut ended) = ([0; 2], 0, [0; 2]);
        let slice = TURN + SLICE_BYTES / BYTES_PER_NANOSECOND;
        for number in 0.. {
            assert!(number < 20_000, "{name}: {ended:?} have ended");
            let asked = number % 10 == 5;
            if asked {
                let sum = Submission {
                    communicator: OTHER,
                    cookie: 0,
                    ..call(Collective::AllReduce, SMALL_COUNT, 1, BESIDE, BESIDE + (64 << 10), 0)
                };
                world.tenants.iter_mut().for_each(|tenant| tenant.end.submit(&sum).unwrap());
            }
            for (engine, clock) in clocks.iter_mut().enumerate() {
                let [victim, other] = [1, 2].map(|id| key_of(&world, engine, id));
                let before = *clock;
                let log = round(&mut world.engines[engine], clock);
                let took = *clock - before;
                assert!(took <= SLICE.0 + slice, "{name}: a round of {took} ns: {log:?}");
                let waits = log.iter().take_while(|(key, _)| *key != other);
                let waits: u64 = waits.map(|(_, turn)| cost(turn)).sum();
                assert!(!asked || waits <= slice, "{name} beside tenant {tenant}: {waits} ns: {log:?}");
                for (key, turn) in &log {
                    assert!(turn.touched <= SLICE_BYTES, "{name}: {turn:?}");
                    sliced += usize::from(*key == victim && turn.unfinished);
                }
            }
            for tenant in &mut world.tenants {
                tenant.end.progress().unwrap();
                while let Some(done) = tenant.end.completion().unwrap() {
                    assert_eq!(done.status, Status::Ok.code(), "{name}");
                    ended[done.cookie as usize] += 1;
                }
            }
            if ended[1] == 2 {
                break;
            }
        }
        assert!(sliced > 20, "{name}: {sliced} turns were over in the midst of an action");
        assert!(ended[0] >= 4, "{name}: {} small ones ended beside the large one", ended[0]);
    }
}

/// Of what an operation leaves that is aborted between two slices, its tenant has what it owed before, to the bit. So it can call it again.
#[test]
fn an_abort_between_slices_leaves_what_was_owed() {
    let outcome = |world: &World| -> Vec<Vec<u32>> {
        let bits = |rank, at| world.read_floats(rank, at, COUNT).iter().map(|v| v.to_bits()).collect();
        (0..2)
            .flat_map(|rank| [OUTPUT, HALVES[1]].map(|at| (rank, at)))
            .map(|(rank, at)| bits(rank, at))
            .collect()
    };
    let mut undisturbed = world("int8", 2);
    call_large(&mut undisturbed, VICTIM);
    assert!(undisturbed.completions().iter().all(|done| done.status == Status::Ok.code()));
    let expected = outcome(&undisturbed);
    for slices in [1, 2, 4, 9, 17, 33] {
        let mut world = world("int8", 2);
        call_large(&mut world, VICTIM);
        let (mut clocks, mut seen, mut rounds) = ([0; 2], 0, 0);
        while seen < slices {
            for (engine, clock) in world.engines.iter_mut().zip(&mut clocks) {
                round(engine, clock);
            }
            for tenant in &mut world.tenants {
                tenant.end.progress().unwrap();
            }
            seen += usize::from(in_midst(&world, 1) > 0);
            rounds += 1;
            assert!(rounds < 2000, "{seen} of {slices} rounds in the midst of an action");
        }
        for engine in &mut world.engines {
            let failure = Failure::Aborted { rank: Rank(0) };
            engine.handle_command(Command::Dissolve { communicator: CommunicatorId(1), failure });
        }
        let done = world.completions();
        assert!(done.iter().all(|done| done.status == Status::Aborted.code()), "{slices}: {done:?}");
        let left = outcome(&world);
        world.run_rounds(200);
        assert!(outcome(&world) == left, "{slices}: written after the end");
        for rank in 0..2 {
            assert!(
                world.read_floats(rank, HALVES[0], COUNT) == residual(rank),
                "{slices}: rank {rank}'s debt"
            );
            assert!(world.read_floats(rank, 0, COUNT) == values(rank), "{slices}: rank {rank}'s input");
        }
        form(&mut world, 3, 9, 3);
        call_large(&mut world, 9);
        assert!(world.completions().iter().all(|done| done.status == Status::Ok.code()), "{slices}");
        assert!(outcome(&world) == expected, "{slices}: called again, it comes to other bits");
    }
}
