//! Processes that keep the rules.

use crate::hostile;
use crate::stub::{LIMIT, Stub, until};
use harmonaize_abi::session::{AgentRefusal, Answer, Request, RequestError, encode};
use harmonaize_agent::counters::Counted;
use harmonaize_client::{
    Access, AttachOptions, BatchKnobs, Budget, ChoiceReason, Clause, Client, Collective, Communicator,
    Constraints, Dtype, Error, EventCursor, EventKind, Hints, JoinOptions, JoinRefusal, Knobs, LearningRate,
    Negotiated, Operation, OperationOptions, Priority, Rank, ReduceOp, RefusalKind, RegroupOptions, Status,
    StragglerCause, Tensor,
};
use std::io::Write;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio_stream::StreamExt;

const ALL: [Access; 3] = [Access::Mapped, Access::Remote, Access::Rdma];

fn attach(stub: &Stub, access: Access) -> (Client, Communicator) {
    let client = Client::attach(&stub.path, stub.options(access)).unwrap();
    let comm = client.join("job", Rank(0), 1, LIMIT).unwrap();
    (client, comm)
}

fn filled(client: &Client, values: &[f32]) -> Tensor {
    let tensor = client.tensor(Dtype::F32, values.len() as u64).unwrap();
    tensor.write(0, values).unwrap();
    tensor
}

fn values(tensor: &Tensor) -> Vec<f32> {
    let mut values = vec![0f32; tensor.elements() as usize];
    tensor.read(0, &mut values).unwrap();
    values
}

#[test]
fn operations_complete_end_to_end() {
    for access in ALL {
        let stub = Stub::start();
        let (client, comm) = attach(&stub, access);
        let expected: Vec<f32> = (0..1000).map(|i| i as f32).collect();
        let (input, output) = (filled(&client, &expected), filled(&client, &[0.0; 1000]));
        for number in 0..100 {
            let mut operation = comm.all_reduce(&input, &output, ReduceOp::Sum).unwrap();
            assert_eq!(operation.wait(LIMIT).unwrap().operation.0, number);
            assert_eq!(operation.wait(LIMIT).unwrap().operation.0, number);
        }
        assert_eq!(values(&output), expected);
        comm.all_to_all(&output, &input).unwrap().wait(LIMIT).unwrap();
        comm.all_gather(&input, &output).unwrap().wait(LIMIT).unwrap();
        comm.reduce_scatter(&output, &input, ReduceOp::Average).unwrap().wait(LIMIT).unwrap();
        comm.all_gather_in_place(&input).unwrap().wait(LIMIT).unwrap();
        comm.reduce_scatter_in_place(&input, ReduceOp::Sum).unwrap().wait(LIMIT).unwrap();
        comm.broadcast(&input, Rank(0)).unwrap().wait(LIMIT).unwrap();
        comm.barrier().unwrap().wait(LIMIT).unwrap();
        let empty = client.tensor(Dtype::I8, 0).unwrap();
        comm.all_reduce_in_place(&empty, ReduceOp::Max).unwrap().wait(LIMIT).unwrap();
        assert_eq!(values(&input), expected);
        drop(comm);
        stub.knobs.expect("left 2");
        drop((client, input, output, empty));
        stub.knobs.expect("detached");
    }
}

#[test]
fn slices_are_tensors_and_wait_for_what_overlaps() {
    for access in ALL {
        let stub = Stub::start();
        let (client, comm) = attach(&stub, access);
        let whole = filled(&client, &(0..1000).map(|i| i as f32).collect::<Vec<_>>());
        let output = filled(&client, &[-1.0; 1000]);
        stub.knobs.hold.store(true, Ordering::Relaxed);
        let mut operations = Vec::new();
        for at in (0..1000).step_by(333) {
            let (from, to) = (whole.slice(at..(at + 100).min(1000)), output.slice(at..(at + 100).min(1000)));
            operations.push(comm.all_reduce(&from.unwrap(), &to.unwrap(), ReduceOp::Sum).unwrap());
        }
        let (taken, free) = (output.slice(432..=432).unwrap(), output.slice(433..440).unwrap());
        let in_use = comm.all_reduce_in_place(&taken, ReduceOp::Sum);
        assert!(matches!(in_use, Err(Error::InUse { bytes: 4 })), "{in_use:?}");
        assert!(matches!(comm.broadcast(&whole, Rank(0)), Err(Error::InUse { bytes: 400 })));
        operations.push(comm.all_reduce(&whole.slice(400..407).unwrap(), &free, ReduceOp::Sum).unwrap());
        stub.knobs.hold.store(false, Ordering::Relaxed);
        for operation in &mut operations {
            operation.wait(LIMIT).unwrap();
        }
        let found = values(&output);
        assert_eq!((found[99], found[100], found[333], found[999]), (99.0, -1.0, 333.0, 999.0));
        assert_eq!((found[432], found[433], found[439], found[440]), (432.0, 400.0, 406.0, -1.0));
        // In place, and in tensors that outlive the whole one.
        let tail = whole.slice(990..).unwrap();
        drop((whole, output));
        comm.all_reduce_in_place(&tail, ReduceOp::Sum).unwrap().wait(LIMIT).unwrap();
        tail.write(9, &[7.0_f32]).unwrap();
        assert_eq!(values(&tail)[7..], [997.0, 998.0, 7.0]);
        // Two slices of the same elements are in place as one tensor is.
        let (one, other) = (tail.slice(0..5).unwrap(), tail.slice(3..8).unwrap());
        comm.all_reduce(&tail.slice(0..5).unwrap(), &one, ReduceOp::Sum).unwrap().wait(LIMIT).unwrap();
        let outside =
            |range: std::ops::Range<u64>| matches!(tail.slice(range), Err(Error::OutOfRange { .. }));
        #[expect(clippy::reversed_empty_ranges, reason = "it is refused")]
        let backwards = 5..4;
        assert!(outside(0..11) && outside(11..11) && outside(backwards) && outside(1..u64::MAX));
        assert!(matches!(tail.slice(..=u64::MAX), Err(Error::OutOfRange { .. })));
        assert_eq!((tail.slice(10..).unwrap().bytes(), other.elements()), (0, 5));
        assert!(other.read(4, &mut [0.0_f32; 2]).is_err(), "a slice ends where it ends");
    }
}

#[test]
fn threads_share_a_communicator() {
    for access in ALL {
        let stub = Stub::start();
        let (client, comm) = attach(&stub, access);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (client, comm) = (&client, &comm);
                scope.spawn(move || {
                    for round in 0..50 {
                        let value = (thread * 100 + round) as f32;
                        let (input, output) = (filled(client, &[value; 300]), filled(client, &[0.0; 300]));
                        let mut operation = comm.all_reduce(&input, &output, ReduceOp::Sum).unwrap();
                        operation.wait(LIMIT).unwrap();
                        assert_eq!(values(&output), [value; 300]);
                    }
                });
            }
        });
        // One thread begins an operation, another waits for it.
        let mut operation = comm.barrier().unwrap();
        std::thread::spawn(move || operation.wait(LIMIT).unwrap()).join().unwrap();
    }
}

#[test]
fn one_of_several_operations_is_waited_for() {
    for access in ALL {
        let stub = Stub::start();
        let (client, comm) = attach(&stub, access);
        stub.knobs.hold.store(true, Ordering::Relaxed);
        let mut operations: Vec<_> = (0..5).map(|_| comm.barrier().unwrap()).collect();
        let timeout = Duration::from_millis(5);
        let early = Operation::wait_any(&mut operations, timeout);
        assert!(matches!(early, Err(Error::WaitTimeout { waited, .. }) if waited == timeout), "{early:?}");
        let late = Operation::wait_any_until(&mut operations, Instant::now() + timeout);
        assert!(matches!(late, Err(Error::WaitTimeout { .. })));
        stub.knobs.hold.store(false, Ordering::Relaxed);
        let mut ended = Vec::new();
        while !operations.is_empty() {
            let at = Operation::wait_any(&mut operations, LIMIT).unwrap();
            assert_eq!(Operation::wait_any(&mut operations, Duration::ZERO).unwrap(), at, "it stays ended");
            ended.push(operations.swap_remove(at).wait(Duration::ZERO).unwrap().operation.0);
        }
        ended.sort_unstable();
        assert_eq!(ended, [0, 1, 2, 3, 4]);
        assert!(matches!(Operation::wait_any::<Operation>(&mut [], LIMIT), Err(Error::Shape(_))));
        let (_other, elsewhere) = attach(&stub, access);
        let mut mixed = [comm.barrier().unwrap(), elsewhere.barrier().unwrap()];
        assert!(matches!(Operation::wait_any(&mut mixed, LIMIT), Err(Error::Foreign)));
        stub.knobs.fail.store(true, Ordering::Relaxed);
        let mut failed = [comm.barrier().unwrap()];
        assert_eq!(Operation::wait_any(&mut failed, LIMIT).unwrap(), 0);
        assert!(matches!(failed[0].wait(LIMIT), Err(Error::Operation { .. })));
        drop(client);
    }
}

#[test]
fn callbacks_run_in_turn_on_one_thread() {
    for access in ALL {
        let stub = Stub::start();
        let (client, comm) = attach(&stub, access);
        let (tell, told) = std::sync::mpsc::channel();
        for number in 0..20 {
            let tell = tell.clone();
            let called = move |result: Result<harmonaize_client::Receipt, Error>| {
                let thread = std::thread::current().name().map(str::to_owned);
                tell.send((result.unwrap().operation.0, thread)).unwrap();
                assert_ne!(number, 3, "one callback panics");
            };
            comm.barrier().unwrap().on_completion(called).unwrap();
        }
        for number in 0..20 {
            let (operation, thread) = told.recv_timeout(LIMIT).unwrap();
            assert_eq!((operation, thread.as_deref()), (number, Some("harmonaize-completions")));
        }
        // One that has ended already, and one that begins the next.
        let mut done = comm.barrier().unwrap();
        done.wait(LIMIT).unwrap();
        let comm = std::sync::Arc::new(comm);
        let (again, last) = (std::sync::Arc::clone(&comm), tell.clone());
        done.on_completion(move |_| {
            let next = again.barrier().unwrap();
            next.on_completion(move |result| last.send((result.unwrap().operation.0, None)).unwrap())
                .unwrap();
        })
        .unwrap();
        assert_eq!(told.recv_timeout(LIMIT).unwrap(), (21, None));
        stub.knobs.fail.store(true, Ordering::Relaxed);
        let (tell, told) = std::sync::mpsc::channel();
        comm.barrier().unwrap().on_completion(move |result| tell.send(result).unwrap()).unwrap();
        let failed = told.recv_timeout(LIMIT).unwrap();
        assert!(matches!(failed, Err(Error::Operation { status: Status::Mismatch, .. })), "{failed:?}");
        drop((client, comm));
        stub.knobs.expect("detached");
    }
}

#[test]
fn callbacks_hear_that_the_agent_is_lost() {
    let stub = Stub::start();
    let (client, comm) = attach(&stub, Access::Mapped);
    stub.knobs.hold.store(true, Ordering::Relaxed);
    let completions = client.completions().unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    comm.barrier().unwrap().on_completion(move |result| tell.send(result).unwrap()).unwrap();
    completions.clear();
    drop(stub);
    assert!(matches!(told.recv_timeout(LIMIT).unwrap(), Err(Error::AgentLost { .. })));
    assert!(readable(&completions, LIMIT));
}

fn readable(completions: &harmonaize_client::Completions, within: Duration) -> bool {
    let mut fds = [rustix::event::PollFd::new(completions, rustix::event::PollFlags::IN)];
    rustix::event::poll(&mut fds, Some(&within.try_into().unwrap())).unwrap() == 1
}

#[test]
fn a_descriptor_says_that_operations_have_ended() {
    for access in ALL {
        let stub = Stub::start();
        let (client, comm) = attach(&stub, access);
        let completions = client.completions().unwrap();
        assert!(readable(&completions, Duration::ZERO), "for what had ended before");
        completions.clear();
        for round in 0..20 {
            stub.knobs.hold.store(true, Ordering::Relaxed);
            let mut operation = comm.barrier().unwrap();
            let mut other = comm.barrier().unwrap();
            assert!(!readable(&completions, Duration::from_millis(1)), "round {round}");
            std::thread::scope(|scope| {
                // A thread that waits takes nothing from the descriptor.
                scope.spawn(|| other.wait(LIMIT).unwrap());
                stub.knobs.hold.store(false, Ordering::Relaxed);
                while operation.poll().unwrap().is_none() {
                    assert!(readable(&completions, LIMIT));
                    completions.clear();
                }
            });
            completions.clear();
        }
        let second = client.completions().unwrap();
        second.clear();
        comm.barrier().unwrap().wait(LIMIT).unwrap();
        assert!(readable(&second, LIMIT) && readable(&completions, LIMIT));
        drop((client, comm, second));
        assert!(!stub.knobs.log.lock().unwrap().iter().any(|line| line.contains("detached")));
        drop(completions);
        stub.knobs.expect("detached");
    }
}

#[test]
fn a_rank_without_color_gets_no_communicator() {
    let stub = Stub::with(|rules| rules.quota.communicators = 2);
    let (client, comm) = attach(&stub, Access::Mapped);
    let part = comm.split(Some(7), 3, LIMIT).unwrap().unwrap();
    assert_eq!((part.name(), part.rank(), part.ranks()), ("job#1.7", Rank(0), 1));
    stub.knobs.expect("by Some(7) and 3");
    part.barrier().unwrap().wait(LIMIT).unwrap();
    let many = comm.split(Some(1), 0, LIMIT).unwrap_err();
    assert!(matches!(many, Error::Split { kind: JoinRefusal::Quota, .. }), "{many}");
    drop(part);
    assert!(comm.split(None, 0, LIMIT).unwrap().is_none());
    drop((client, comm));
}

#[test]
fn jobs_are_part_of_a_communicators_name() {
    let stub = Stub::start();
    let client = Client::attach(&stub.path, stub.options(Access::Mapped)).unwrap();
    let join = |job: &str, name: &str| {
        let options = JoinOptions { timeout: LIMIT, job: job.to_owned(), ..JoinOptions::default() };
        client.join_with(name, Rank(0), 1, &options).map(|comm| comm.name().to_owned())
    };
    assert_eq!(join("", "world").unwrap(), "world");
    assert_eq!(join("7", "world").unwrap(), "7/world");
    let (half, whole) = ("x".repeat(64), "x".repeat(128));
    let bad =
        [("a/b", "c"), ("a", "b/c"), ("", "a/b"), ("a#", "b"), ("", "a#1.0"), ("a", ""), (&half, &half)];
    for (job, name) in bad.into_iter().chain([("a\n", "b")]) {
        let refused = join(job, name).unwrap_err();
        assert!(
            matches!(refused, Error::Join { kind: JoinRefusal::Name, .. }),
            "{job:?} {name:?}: {refused}"
        );
    }
    assert_eq!(join("", &whole).unwrap(), whole);
}

#[test]
fn a_process_may_spin_for_ever() {
    for access in ALL {
        let stub = Stub::start();
        let options = AttachOptions { spin: Duration::MAX, ..stub.options(access) };
        let client = Client::attach(&stub.path, options).unwrap();
        let comm = client.join("job", Rank(0), 1, LIMIT).unwrap();
        comm.barrier().unwrap().wait(LIMIT).unwrap();
    }
}

#[test]
fn many_operations_are_in_flight_up_to_the_rings_entries() {
    for access in ALL {
        let stub = Stub::start();
        let client =
            Client::attach(&stub.path, AttachOptions { entries: 4, ..stub.options(access) }).unwrap();
        let comm = client.join("job", Rank(0), 1, LIMIT).unwrap();
        let tensors: Vec<_> = (0..4).map(|i| filled(&client, &[i as f32; 3000])).collect();
        let output = client.tensor(Dtype::F32, 3000).unwrap();
        stub.knobs.hold.store(true, Ordering::Relaxed);
        let mut operations: Vec<_> =
            tensors.iter().map(|tensor| comm.all_reduce(tensor, &output, ReduceOp::Sum).unwrap()).collect();
        assert!(matches!(comm.barrier(), Err(Error::TooMany { limit: 4 })));
        for operation in &mut operations {
            assert_eq!(operation.poll().unwrap(), None);
        }
        stub.knobs.hold.store(false, Ordering::Relaxed);
        for operation in operations.iter_mut().rev() {
            operation.wait(LIMIT).unwrap();
        }
        assert_eq!(values(&output), [3.0; 3000]);
        comm.barrier().unwrap().wait(LIMIT).unwrap();
    }
}

#[test]
fn polling_alone_brings_an_operation_to_its_end() {
    for access in ALL {
        let stub = Stub::start();
        let (client, comm) = attach(&stub, access);
        let tensor = filled(&client, &[2.0; 100]);
        let mut operation = comm.all_reduce_in_place(&tensor, ReduceOp::Sum).unwrap();
        until(|| operation.poll().unwrap().ok_or("not ended"));
        assert_eq!(operation.poll().unwrap().unwrap().operation.0, 0);
    }
}

#[test]
fn memory_of_an_operation_given_up_stays_taken_until_its_end() {
    for access in ALL {
        let stub = Stub::start();
        let options = AttachOptions { max_arena_bytes: 0, ..stub.options(access) };
        let client = Client::attach(&stub.path, options).unwrap();
        let comm = client.join("job", Rank(0), 1, LIMIT).unwrap();
        let half = (1 << 20) / 8 + 64;
        stub.knobs.hold.store(true, Ordering::Relaxed);
        let tensor = client.tensor(Dtype::F32, half).unwrap();
        drop(comm.all_reduce_in_place(&tensor, ReduceOp::Sum).unwrap());
        drop(tensor);
        let error = client.tensor(Dtype::F32, half).unwrap_err();
        assert!(matches!(error, Error::NoRoom { .. }), "{error}");
        stub.knobs.hold.store(false, Ordering::Relaxed);
        until(|| {
            comm.barrier().unwrap().wait(LIMIT).unwrap();
            client.tensor(Dtype::F32, half)
        });
    }
}

#[test]
fn options_of_an_operation_reach_the_agent() {
    let stub = Stub::start();
    let client = Client::attach(&stub.path, stub.options(Access::Mapped)).unwrap();
    let join = |timeout| {
        let options = JoinOptions { timeout: LIMIT, operation_timeout: timeout, ..JoinOptions::default() };
        client.join_with("job", Rank(0), 1, &options)
    };
    let (hour, second) = (Duration::from_secs(3600), Duration::from_secs(1));
    let comm = join(Some(hour)).unwrap();
    let options = OperationOptions { class: 3, priority: 4, deadline: Some(second), ..Default::default() };
    let call = |options| comm.with(options).unwrap().barrier().unwrap().wait(LIMIT).unwrap();
    call(OperationOptions { iteration: 7, ..options });
    stub.knobs.expect("iteration 7: class 3, priority 4, deadline 1000000000, time-out 3600000000000");
    call(OperationOptions { iteration: 8, timeout: Some(second), ..Default::default() });
    stub.knobs.expect("iteration 8: class 0, priority 0, deadline 0, time-out 1000000000");
    // No time at all is not the usual time.
    call(OperationOptions { iteration: 9, timeout: Some(Duration::ZERO), ..Default::default() });
    stub.knobs.expect("iteration 9: class 0, priority 0, deadline 0, time-out 1");
    let next = comm.regroup(&RegroupOptions { timeout: LIMIT, ..Default::default() }).unwrap();
    next.with(OperationOptions { iteration: 10, ..Default::default() }).unwrap().barrier().unwrap();
    stub.knobs.expect("iteration 10: class 0, priority 0, deadline 0, time-out 3600000000000");

    let more = hour + Duration::from_nanos(1);
    for refused in [
        join(Some(more)).unwrap_err(),
        comm.with(OperationOptions { timeout: Some(more), ..options }).unwrap_err(),
        comm.regroup(&RegroupOptions { operation_timeout: Some(more), ..Default::default() }).unwrap_err(),
    ] {
        let Error::TimeoutTooLong { asked, longest } = refused else { panic!("{refused}") };
        assert_eq!((asked, longest), (more, hour));
    }
}

#[test]
fn an_abort_wakes_whoever_waits_although_the_agent_says_nothing() {
    for access in ALL {
        let stub = Stub::start();
        let options = AttachOptions { spin: Duration::ZERO, ..stub.options(access) };
        let client = Client::attach(&stub.path, options).unwrap();
        stub.knobs.hold.store(true, Ordering::Relaxed);
        let is_ours = |error: &Error| matches!(error, Error::Aborted { by: Some(Rank(0)) });
        for round in 0..20 {
            let comm = client.join("job", Rank(0), 1, LIMIT).unwrap();
            let mut operations = [comm.barrier().unwrap(), comm.barrier().unwrap()];
            let mut polled = comm.barrier().unwrap();
            assert!(polled.poll().unwrap().is_none());
            // One sleeps in the kernel, if it comes to that, and the other waits for it.
            let start = Instant::now();
            let errors = std::thread::scope(|scope| {
                let waiting = operations.each_mut().map(|operation| scope.spawn(|| operation.wait(LIMIT)));
                (0..round * 5).for_each(|_| std::thread::yield_now());
                comm.abort();
                comm.abort();
                waiting.map(|thread| thread.join().unwrap().unwrap_err())
            });
            assert!(errors.iter().all(is_ours) && start.elapsed() < LIMIT, "{errors:?}");
            for operation in &mut operations {
                assert!(is_ours(&operation.wait(LIMIT).unwrap_err()));
            }
            assert!(is_ours(&polled.poll().unwrap_err()));
            assert!(is_ours(&comm.barrier().unwrap_err()));
            assert!(is_ours(&comm.set_budget(&Budget::Exact).unwrap_err()));
            // The agent still ends them, and nothing is lost by then.
            drop((operations, polled));
            stub.knobs.hold.store(false, Ordering::Relaxed);
            let other = client.join("other", Rank(0), 1, LIMIT).unwrap();
            other.barrier().unwrap().wait(LIMIT).unwrap();
            stub.knobs.hold.store(true, Ordering::Relaxed);
        }
        let told = |line: &&String| line.starts_with("aborted");
        stub.knobs.expect("aborted");
        drop(client);
        stub.knobs.expect("detached");
        assert_eq!(stub.knobs.log.lock().unwrap().iter().filter(told).count(), 20);
    }
}

#[test]
fn waiting_in_vain_ends_and_can_be_repeated() {
    let stub = Stub::start();
    let (_client, comm) = attach(&stub, Access::Mapped);
    stub.knobs.hold.store(true, Ordering::Relaxed);
    let mut operation = comm.barrier().unwrap();
    let error = operation.wait(Duration::from_millis(5)).unwrap_err();
    assert!(matches!(error, Error::WaitTimeout { .. }), "{error}");
    stub.knobs.hold.store(false, Ordering::Relaxed);
    operation.wait(LIMIT).unwrap();
}

#[test]
fn threads_wait_together() {
    for access in ALL {
        let stub = Stub::start();
        let client =
            Client::attach(&stub.path, AttachOptions { spin: Duration::ZERO, ..stub.options(access) })
                .unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let client = &client;
                scope.spawn(move || {
                    let comm = client.join(&format!("job-{thread}"), Rank(0), 1, LIMIT).unwrap();
                    let input = filled(client, &[thread as f32; 500]);
                    let output = client.tensor(Dtype::F32, 500).unwrap();
                    for _ in 0..200 {
                        comm.all_reduce(&input, &output, ReduceOp::Sum).unwrap().wait(LIMIT).unwrap();
                    }
                    assert_eq!(values(&output), [thread as f32; 500]);
                });
            }
        });
    }
}

#[test]
fn a_failure_says_what_the_agent_knows() {
    for access in ALL {
        let stub = Stub::start();
        let (client, comm) = attach(&stub, access);
        stub.knobs.fail.store(true, Ordering::Relaxed);
        let tensor = filled(&client, &[0.0; 8]);
        let mut operation = comm.all_reduce_in_place(&tensor, ReduceOp::Sum).unwrap();
        let error = operation.wait(LIMIT).unwrap_err();
        let text = "allreduce(8 x f32, sum), operation 0, failed: ranks called different operations: \
                    because the test says so; ranks concerned: 3";
        assert_eq!(error.to_string(), text);
        let mut polled = comm.barrier().unwrap();
        let error = until(|| match polled.poll() {
            Ok(None) => Err("not ended"),
            Ok(Some(receipt)) => panic!("{receipt:?}"),
            Err(error) => Ok(error),
        });
        assert!(
            matches!(error, Error::Operation { status: Status::Mismatch, detail: Some(_), .. }),
            "{error}"
        );
    }
}

#[test]
fn the_agents_death_wakes_who_waits() {
    for access in ALL {
        let stub = Stub::start();
        let (_client, comm) = attach(&stub, access);
        stub.knobs.hold.store(true, Ordering::Relaxed);
        let mut operations: Vec<_> = (0..2).map(|_| comm.barrier().unwrap()).collect();
        let last = operations.pop();
        let waiter = std::thread::spawn(move || operations.remove(0).wait(LIMIT * 2));
        drop(stub);
        let error = waiter.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::AgentLost { .. }), "{error}");
        let mut last = last.unwrap();
        let error = until(|| last.poll().err().ok_or("not lost"));
        assert!(matches!(error, Error::AgentLost { .. }), "{error}");
        assert!(matches!(comm.barrier(), Err(Error::AgentLost { .. })));
    }
}

#[test]
fn joining_fails_with_reasons() {
    let stub = Stub::with(|rules| (rules.quota.communicators, rules.quota.ranks) = (2, 8));
    let (client, first) = attach(&stub, Access::Mapped);
    let refusal = |name: &str, rank, ranks| match client.join(name, Rank(rank), ranks, LIMIT).unwrap_err() {
        Error::Join { kind, concerned, text, .. } => (kind, concerned, text),
        other => panic!("{other}"),
    };
    assert_eq!(refusal("job", 1, 3).0, JoinRefusal::Timeout);
    assert_eq!(refusal("job", 1, 3).1, [Rank(0), Rank(2)]);
    for (name, rank, ranks, kind) in [
        ("", 0, 1, JoinRefusal::Name),
        ("a\nb", 0, 1, JoinRefusal::Name),
        ("a\u{202e}b", 0, 1, JoinRefusal::Name),
        ("a\u{200b}", 0, 1, JoinRefusal::Name),
        (&"x".repeat(129), 0, 1, JoinRefusal::Name),
        ("job", 1, 1, JoinRefusal::Rank),
        ("job", 0, 0, JoinRefusal::Rank),
        ("job", 0, 9, JoinRefusal::Quota),
    ] {
        assert_eq!(refusal(name, rank, ranks).0, kind, "{name:?} {rank} of {ranks}");
    }
    let second = client.join("other", Rank(0), 1, LIMIT).unwrap();
    assert_eq!(refusal("third", 0, 1).0, JoinRefusal::Quota);
    drop(second);
    client.join("third", Rank(0), 1, LIMIT).unwrap();
    drop(first);
}

#[test]
fn one_reader_at_a_time_gets_event_batches() {
    let stub = Stub::start();
    let (client, _comm) = attach(&stub, Access::Mapped);
    let mut reader = client.events(None);
    assert!(matches!(reader.read(LIMIT), Err(Error::Events(text)) if text == "none today"));
    assert_eq!(reader.cursor(), None);
    let mut reader = client.events(Some(EventCursor { feed: 9, next: 4 }));
    let batch = reader.read(LIMIT).unwrap();
    assert_eq!((batch.missed, batch.events[0].number, reader.cursor().unwrap().next), (2, 4, 5));
    let EventKind::Failure { ranks, .. } = &batch.events[0].kind else { panic!("{batch:?}") };
    assert_eq!(ranks.len(), 1024, "as many as a message may list");
    // The first of these is not answered while there is somebody who could.
    std::thread::scope(|scope| {
        let mut waiting = client.events(Some(EventCursor { feed: 0, next: 0 }));
        scope.spawn(move || waiting.read(Duration::ZERO).unwrap_err());
        stub.knobs.expect("events from Some(EventCursor { feed: 0, next: 0 }) within 0ns");
        let error = reader.read(LIMIT).unwrap_err();
        let why = AgentRefusal::AwaitsEvents.to_string();
        assert!(matches!(&error, Error::Events(text) if *text == why), "{error}");
        assert_eq!(reader.cursor().unwrap().next, 5);
    });
}

/// A process of release 0.1.0 asks for events by an id of its own. It could not read events that it does not know.
#[test]
fn older_processes_get_the_events_they_know() {
    let stub = Stub::start();
    let from = Some(EventCursor { feed: 8, next: 4 });
    let batch = hostile::good(&stub).events(from).read(LIMIT).unwrap();
    let late = EventKind::Stragglers { cause: StragglerCause::Network, ranks: vec![Rank(3)] };
    assert_eq!((batch.events.len(), &batch.events[1].kind), (2, &late));
    let (mut stream, _descriptors) = hostile::attach(&stub, Access::Mapped);
    stream.write_all(&encode(&Request::Events { id: 7, from, wait_ns: 0 }).unwrap()).unwrap();
    let Answer::Events { id: 7, read: Ok(read) } = hostile::next_answer(&stream) else { panic!("no events") };
    assert_eq!((read.events.len(), read.events[0].number, read.cursor.next), (1, 4, 6));
}

/// A process of release 0.2.0 asks by an id of its own. It could not read the answer whose kind states that no
/// communicator runs.
#[test]
fn older_processes_read_why_no_communicator_runs() {
    let stub = Stub::start();
    let hints = Hints::new().period(Duration::from_millis(50));
    let client = Client::attach(&stub.path, stub.options(Access::Mapped)).unwrap();
    let error = client.hint("none", &hints).unwrap_err();
    assert!(matches!(&error, Error::NoCommunicator(text) if text == "none runs"), "{error}");
    let (mut stream, _descriptors) = hostile::attach(&stub, Access::Mapped);
    let request = Request::Hint { id: 7, communicator: "none".into(), hints };
    stream.write_all(&encode(&request).unwrap()).unwrap();
    let refused = Some(RequestError::Refused("none runs".into()));
    assert_eq!(hostile::next_answer(&stream), Answer::Hinted { id: 7, refused });
}

#[test]
fn hints_are_checked_and_passed_on() {
    let stub = Stub::start();
    let client = Client::attach(&stub.path, stub.options(Access::Mapped)).unwrap();
    let refusal = |name: &str, hints: &Hints| match client.hint(name, hints).unwrap_err() {
        Error::Agreement(text) => text,
        other => panic!("{other}"),
    };
    let hints = Hints::new().period(Duration::from_millis(50)).expect(Collective::AllReduce, 64 << 20);
    client.hint("job", &hints).unwrap();
    stub.knobs.expect(&format!("hints for job: {hints:?}"));
    assert_eq!(refusal("job", &Hints::new()), AgentRefusal::Away.to_string(), "nobody answers");
    for wrong in [hints.clone().task_priority(8), hints.clone().expect(Collective::AllReduce, 0)] {
        assert_eq!(refusal("job", &wrong), wrong.check().unwrap_err().to_string());
    }
    assert_eq!(refusal("", &hints), AgentRefusal::CommunicatorName.to_string());
    let logged = stub.knobs.log.lock().unwrap().iter().filter(|line| line.contains("hints")).count();
    assert_eq!(logged, 2, "what makes no sense is not passed on");
}

/// What the stream tells next, in a runtime of its own.
fn within<T>(runtime: &tokio::runtime::Runtime, future: impl Future<Output = T>) -> T {
    runtime.block_on(async { tokio::time::timeout(LIMIT, future).await.unwrap() })
}

#[test]
fn events_come_as_a_stream_while_threads_wait_for_operations() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for access in ALL {
        let stub = Stub::start();
        let options = AttachOptions { spin: Duration::ZERO, ..stub.options(access) };
        let client = Client::attach(&stub.path, options).unwrap();
        let comm = client.join("job", Rank(0), 1, LIMIT).unwrap();
        let outside = client.events(None).into_stream().unwrap_err();
        assert!(matches!(outside, Error::System { .. }), "no runtime: {outside}");
        let entered = runtime.enter();
        let mut stream = client.events(Some(EventCursor { feed: 9, next: 4 })).into_stream().unwrap();
        let mut none = client.events(None).into_stream().unwrap();
        drop(entered);
        // A thread takes what comes for all; it wakes the task, whoever of both was there first.
        stub.knobs.hold.store(true, Ordering::Relaxed);
        let mut operation = comm.barrier().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| operation.wait(LIMIT).unwrap());
            for number in 4..104 {
                let batch = within(&runtime, stream.next()).unwrap().unwrap();
                assert_eq!((batch.missed, batch.events[0].number), (2, number));
            }
            stub.knobs.hold.store(false, Ordering::Relaxed);
            comm.barrier().unwrap().wait(LIMIT).unwrap();
        });
        assert_eq!(stream.cursor().unwrap().next, 104);
        let refused = within(&runtime, none.next()).unwrap().unwrap_err();
        assert!(matches!(refused, Error::Events(text) if text == "none today"));
        assert!(within(&runtime, none.next()).is_none(), "it ends with an error");
    }
}

#[test]
fn who_comes_after_a_stream_that_was_dropped_gets_its_turn() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let stub = Stub::start();
    let (client, comm) = attach(&stub, Access::Mapped);
    let waiting = || {
        let _entered = runtime.enter();
        client.events(Some(EventCursor { feed: 0, next: 0 })).into_stream().unwrap()
    };
    let mut first = waiting();
    let asked = |stream: &mut harmonaize_client::EventStream| {
        // One look is enough to ask.
        within(&runtime, async {
            tokio::select! { biased; _ = stream.next() => panic!(), () = async {} => {} }
        });
    };
    asked(&mut first);
    stub.knobs.expect("events from Some(EventCursor { feed: 0, next: 0 }) within 3s");
    drop(first);
    // Neither the next, which is dropped too, nor who reads after it is refused.
    asked(&mut waiting());
    std::thread::scope(|scope| {
        let mut reader = client.events(Some(EventCursor { feed: 9, next: 7 }));
        let reading = scope.spawn(move || reader.read(LIMIT).unwrap());
        drop(comm);
        assert_eq!(reading.join().unwrap().events[0].number, 7);
    });
    let entered = runtime.enter();
    let mut stream = client.events(Some(EventCursor { feed: 9, next: 8 })).into_stream().unwrap();
    drop(entered);
    assert_eq!(within(&runtime, stream.next()).unwrap().unwrap().events[0].number, 8);
    // An agent that is gone is told once.
    let mut lost = waiting();
    asked(&mut lost);
    drop(stub);
    let error = within(&runtime, lost.next()).unwrap().unwrap_err();
    assert!(matches!(error, Error::AgentLost { .. }), "{error}");
    assert!(within(&runtime, lost.next()).is_none());
}

#[test]
fn members_and_newcomers_regroup_and_are_told_who_is_in() {
    let stub = Stub::start();
    let (client, comm) = attach(&stub, Access::Mapped);
    let options = RegroupOptions { timeout: LIMIT, min_ranks: 2, ..RegroupOptions::default() };
    let next = comm.regroup(&options).unwrap();
    stub.knobs.expect("regroup Member { communicator: 2 } by 0, 2 at least");
    assert_eq!((next.rank(), next.ranks(), next.before()), (Rank(0), 2, &[Some(Rank(1)), None][..]));
    drop(comm);
    stub.knobs.expect("left 2");
    let again = next.regroup(&RegroupOptions { key: Some(7), ..options.clone() }).unwrap();
    stub.knobs.expect("regroup Member { communicator: 3 } by 7, 2 at least");
    drop(client.enter("job", &options).unwrap());
    stub.knobs.expect("regroup Newcomer { name: \"job\" } by 4294967295, 2 at least");
    let refused = client.enter("", &options).unwrap_err();
    assert!(matches!(refused, Error::Regroup { kind: JoinRefusal::Name, .. }), "{refused}");
    let many = RegroupOptions { min_ranks: u32::MAX, ..options };
    let refused = again.regroup(&many).unwrap_err();
    assert!(matches!(refused, Error::Regroup { kind: JoinRefusal::Quota, .. }), "{refused}");
}

#[test]
fn budgets_are_looked_at_before_anybody_hears_of_them() {
    let stub = Stub::start();
    let (client, comm) = attach(&stub, Access::Mapped);
    let join = |budget| {
        let options = JoinOptions { timeout: LIMIT, budget, ..JoinOptions::default() };
        client.join_with("other", Rank(0), 1, &options)
    };
    for (budget, words) in [
        (Budget::Vnmse(f64::NAN), "a bound of NaN"),
        (Budget::Vnmse(2.0), "a bound of 2 on vNMSE"),
        (Budget::Codecs(vec!["int9".to_owned()]), "no codec is called \"int9\""),
    ] {
        let error = join(budget.clone()).unwrap_err();
        assert!(
            matches!(&error, Error::Join { kind: JoinRefusal::Budget, text, .. } if text.contains(words))
        );
        let error = comm.set_budget(&budget).unwrap_err();
        assert!(matches!(&error, Error::Budget(text) if text.contains(words)), "{error}");
    }
    join(Budget::MatchBf16).unwrap();
    comm.set_budget(&Budget::Vnmse(1e-3)).unwrap();
    stub.knobs.expect("budget of 2: Vnmse(0.001)");
}

#[test]
fn senseless_constraints_are_refused_without_asking_control() {
    let stub = Stub::start();
    let (client, _comm) = attach(&stub, Access::Mapped);
    let clauses = |constraints: &Constraints| -> Vec<Clause> {
        match client.propose("job", constraints).unwrap() {
            Negotiated::Refused { reasons, counter: None } => {
                reasons.iter().map(|reason| reason.clause).collect()
            }
            other => panic!("{other:?}"),
        }
    };
    let low = Constraints::new().priority(Priority::Low).min_busbw(1_000_000);
    let expected: [(Constraints, Vec<Clause>); 4] = [
        (Constraints::new().weight(0), vec![Clause::Weight]),
        (low.clone(), vec![Clause::Priority]),
        (Constraints::new().budget(Budget::Vnmse(2.0)), vec![Clause::Budget]),
        (
            low.weight(99).budget(Budget::Codecs(vec![])),
            vec![Clause::Weight, Clause::Priority, Clause::Budget],
        ),
    ];
    for (constraints, expected) in expected {
        assert_eq!(clauses(&constraints), expected, "{constraints:?}");
    }
    for name in ["", "a\nb", &"x".repeat(129)] {
        let error = client.propose(name, &Constraints::new()).unwrap_err();
        let why = AgentRefusal::CommunicatorName.to_string();
        assert!(matches!(&error, Error::Agreement(text) if *text == why), "{error}");
    }
    let wanted = Constraints::new().weight(2);
    let agreed = client.propose("job", &wanted).unwrap();
    assert!(
        matches!(&agreed, Negotiated::Agreed(agreement) if agreement.constraints == wanted),
        "{agreed:?}"
    );
    stub.knobs.expect("negotiates for job");
    // Nobody answers: that is said, and an iteration is chosen for by the agent.
    let error = client.agreement("job").unwrap_err();
    let why = AgentRefusal::Away.to_string();
    assert!(matches!(&error, Error::Agreement(text) if *text == why), "{error}");
    let knobs = |least, most| Knobs { accumulate: (least, most), checkpoint: None };
    let choice = client.iteration("job", &knobs(2, 5)).unwrap();
    assert_eq!((choice.accumulate, choice.checkpoint, choice.reason), (2, false, ChoiceReason::Unknown));
    let error = client.iteration("job", &knobs(5, 2)).unwrap_err();
    let why = knobs(5, 2).check().unwrap_err().to_string();
    assert!(matches!(&error, Error::Agreement(text) if *text == why), "{error}");
    // So is one with a batch: the job goes on with its own.
    let batch = |samples| BatchKnobs {
        samples,
        micro: (1, 8),
        initial: 8,
        rule: LearningRate::Linear,
        square: 1.0,
        trace: 1.0,
        pass: Duration::ZERO,
        sample: Duration::from_millis(1),
        exchange: Duration::from_millis(1),
    };
    let (choice, chosen) = client.iteration_with_batch("job", &knobs(2, 5), &batch((8, 64))).unwrap();
    assert_eq!((choice.accumulate, choice.reason, chosen), (2, ChoiceReason::Unknown, None));
    let error = client.iteration_with_batch("job", &knobs(2, 5), &batch((8, 4))).unwrap_err();
    let why = batch((8, 4)).check().unwrap_err().to_string();
    assert!(matches!(&error, Error::Agreement(text) if *text == why), "{error}");
}

#[test]
fn a_join_is_given_up_when_its_process_goes() {
    let stub = Stub::start();
    let (client, comm) = attach(&stub, Access::Mapped);
    std::thread::scope(|scope| {
        let joining = scope.spawn(|| client.join("never", Rank(1), 2, Duration::ZERO));
        stub.knobs.expect("join 1/2");
        let error = joining.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::Join { kind: JoinRefusal::Timeout, .. }), "{error}");
    });
    drop((client, comm));
    stub.knobs.expect("join given up");
    stub.knobs.expect("detached");
}

#[test]
fn attachments_are_refused_with_reasons() {
    let refusal = |stub: &Stub, options| match Client::attach(&stub.path, options).unwrap_err() {
        Error::Refused { kind, .. } => kind,
        other => panic!("{other}"),
    };
    let stub = Stub::with(|rules| {
        (rules.quota.attachments, rules.quota.arena_bytes, rules.remote) = (2, 2 << 20, false);
    });
    let mapped = stub.options(Access::Mapped);
    assert_eq!(refusal(&stub, stub.options(Access::Remote)), RefusalKind::Access);
    for entries in [0, 3, 512, 1 << 31] {
        assert_eq!(refusal(&stub, AttachOptions { entries, ..mapped.clone() }), RefusalKind::Entries);
    }
    for arena_bytes in [0, (2 << 20) + 1, u64::MAX] {
        assert_eq!(refusal(&stub, AttachOptions { arena_bytes, ..mapped.clone() }), RefusalKind::Arena);
    }
    let first = Client::attach(&stub.path, AttachOptions { arena_bytes: 5000, ..mapped.clone() }).unwrap();
    assert_eq!(refusal(&stub, AttachOptions { arena_bytes: 2 << 20, ..mapped.clone() }), RefusalKind::Arena);
    let second = Client::attach(&stub.path, mapped.clone()).unwrap();
    assert_eq!(refusal(&stub, mapped.clone()), RefusalKind::Attachments);
    drop((first, second));
    // What they held comes back when the agent has seen them go.
    until(|| Client::attach(&stub.path, AttachOptions { arena_bytes: 2 << 20, ..mapped.clone() }));

    let mine = rustix::process::getuid().as_raw();
    let stub = Stub::with(|rules| rules.socket.as_mut().unwrap().uids = vec![mine + 1, mine + 2]);
    assert_eq!(refusal(&stub, mapped), RefusalKind::User);
}

/// Who attaches, joins or asks for operations beyond the limits hears which, what is left, and what to do. Whoever attaches later is served.
#[test]
fn limits_are_named_to_who_passes_them() {
    let stub = Stub::with(|rules| {
        let quota = &mut rules.quota;
        (quota.attachments, quota.attaches, quota.joins, quota.log_lines) = (4, 4, 1, 1);
        quota.operations = 3 * 64;
    });
    let options = stub.options(Access::Mapped);
    let attach = || Client::attach(&stub.path, options.clone());
    let text = |error: Error| error.to_string();
    let clients: Vec<Client> = (0..3).map(|_| attach().unwrap()).collect();
    let refused = text(attach().unwrap_err());
    for word in ["64 ring entries", "0 are left", "192", "`operations`"] {
        assert!(refused.contains(word), "{word} in {refused}");
    }
    // Four were at once: of the next, the first that comes too early says so.
    let refused = (0..10_000).find_map(|_| match attach().unwrap_err() {
        Error::Refused { kind: RefusalKind::Attachments, text } => Some(text),
        _ => None,
    });
    let refused = refused.expect("no limit");
    for word in ["4 a second", "4 at once", "`attaches`"] {
        assert!(refused.contains(word), "{word} in {refused}");
    }
    // Other limits may refuse joins before: only the one on joins counts as it refuses.
    let is_counted = || stub.counters.get(Counted::JoinRefused) > 0;
    let refused = (0..1000).find_map(|number| {
        match clients[0].join(&format!("j{number}"), Rank(0), 1, LIMIT).map(drop) {
            Err(Error::Join { kind: JoinRefusal::Quota, text, .. }) if is_counted() => Some(text),
            _ => None,
        }
    });
    let refused = refused.expect("no limit");
    for word in ["1 a second", "600 at once", "`joins`"] {
        assert!(refused.contains(word), "{word} in {refused}");
    }
    for (what, least) in [
        (Counted::OperationsRefused, 1),
        (Counted::AttachRefused, 1),
        (Counted::JoinRefused, 1),
        (Counted::LogLine, 3),
    ] {
        let count = stub.counters.get(what);
        assert!(count >= least, "{what:?}: {count}");
    }
    drop(clients);
    until(attach);
}

/// Tenants come, change and go while others are attached and operate.
#[test]
fn tenants_come_change_and_go_while_others_are_served() {
    for access in ALL {
        let stub = Stub::start();
        let own = crate::stub::rules(stub.path.clone());
        let place = stub.path.with_file_name("other.sock");
        let mut other = crate::stub::rules(place.clone());
        (other.tenant, other.secret) = ("other".into(), None);
        let (client, comm) = attach(&stub, access);
        let tensor = filled(&client, &[1.0; 8]);
        let works = || comm.all_reduce_in_place(&tensor, ReduceOp::Sum).unwrap().wait(LIMIT).unwrap();
        for _ in 0..3 {
            stub.apply(vec![own.clone(), other.clone()]).unwrap();
            let theirs = Client::attach(&place, stub.options(access)).unwrap();
            let joined = theirs.join("job", Rank(0), 1, LIMIT).unwrap();
            works();
            stub.apply(vec![own.clone()]).unwrap();
            assert!(!place.exists());
            let ended = loop {
                match joined.barrier().and_then(|mut barrier| barrier.wait(LIMIT).map(drop)) {
                    Ok(()) => std::thread::yield_now(),
                    Err(error) => break error,
                }
            };
            let removed = matches!(&ended, Error::Detached { kind: RefusalKind::Removed, .. });
            assert!(removed, "{access:?}: {ended}");
            works();
        }
    }

    // A quota that shrinks below what is in use ends nothing, and lets nobody in; other users, and another place.
    let stub = Stub::start();
    let (client, comm) = attach(&stub, Access::Mapped);
    let mut rules = crate::stub::rules(stub.path.clone());
    let mine = rustix::process::getuid().as_raw();
    (rules.quota.arena_bytes, rules.socket.as_mut().unwrap().uids) = (1 << 19, vec![mine, mine + 1]);
    stub.apply(vec![rules.clone()]).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&stub.path).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o666);
    let refused = Client::attach(&stub.path, stub.options(Access::Mapped)).unwrap_err();
    assert!(matches!(refused, Error::Refused { kind: RefusalKind::Arena, .. }), "{refused}");
    let moved = stub.path.with_file_name("moved.sock");
    let socket = rules.socket.as_mut().unwrap();
    (socket.path, rules.quota.arena_bytes) = (stub.path.with_file_name("none").join("a.sock"), 1 << 30);
    assert!(stub.apply(vec![rules.clone()]).is_err());
    assert!(Client::attach(&stub.path, stub.options(Access::Mapped)).is_err(), "nothing has changed");
    rules.socket.as_mut().unwrap().path.clone_from(&moved);
    stub.apply(vec![rules]).unwrap();
    assert!(!stub.path.exists());
    Client::attach(&moved, stub.options(Access::Mapped)).unwrap();
    comm.barrier().unwrap().wait(LIMIT).unwrap();
    drop((comm, client));
}

#[test]
fn mistakes_of_the_caller_are_told() {
    let stub = Stub::start();
    let (client, comm) = attach(&stub, Access::Mapped);
    let (other, _other_comm) = attach(&stub, Access::Mapped);
    let (small, large) = (client.tensor(Dtype::F32, 4).unwrap(), client.tensor(Dtype::F32, 5).unwrap());
    let (bytes, foreign) = (client.tensor(Dtype::U8, 4).unwrap(), other.tensor(Dtype::F32, 4).unwrap());
    assert!(matches!(comm.all_reduce(&small, &large, ReduceOp::Sum), Err(Error::Shape(_))));
    assert!(matches!(comm.all_reduce(&small, &bytes, ReduceOp::Sum), Err(Error::Dtype { .. })));
    assert!(matches!(comm.all_reduce(&small, &foreign, ReduceOp::Sum), Err(Error::Foreign)));
    assert!(matches!(comm.broadcast(&small, Rank(1)), Err(Error::Shape(_))));
    assert!(matches!(comm.all_gather(&small, &large), Err(Error::Shape(_))));
    assert!(matches!(comm.all_gather(&bytes, &small), Err(Error::Dtype { .. })));
    assert!(matches!(comm.all_gather(&small, &foreign), Err(Error::Foreign)));
    assert!(matches!(comm.reduce_scatter(&small, &large, ReduceOp::Sum), Err(Error::Shape(_))));
    assert!(matches!(comm.reduce_scatter(&small, &bytes, ReduceOp::Sum), Err(Error::Dtype { .. })));
    let flags = client.tensor(Dtype::Bool, 4).unwrap();
    for (tensor, reduce) in [(&flags, ReduceOp::Average), (&small, ReduceOp::BitXor)] {
        let refused = comm.all_reduce_in_place(tensor, reduce);
        assert!(matches!(refused, Err(Error::Reduction { .. })), "{refused:?}");
    }
    assert!(matches!(small.write(0, &[0u8; 4]), Err(Error::Dtype { .. })));
    assert!(matches!(small.write(1, &[0f32; 4]), Err(Error::OutOfRange { .. })));
    assert!(matches!(small.read(u64::MAX, &mut [0f32; 4]), Err(Error::OutOfRange { .. })));
    assert!(matches!(client.tensor(Dtype::F64, u64::MAX), Err(Error::NoRoom { .. })));
    let nowhere = Client::attach(stub.path.with_extension("none"), stub.options(Access::Mapped));
    assert!(matches!(nowhere, Err(Error::Connect { .. })));
}
