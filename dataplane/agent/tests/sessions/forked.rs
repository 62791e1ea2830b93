//! Processes that fork: a child cannot harm what it has inherited.

use crate::stub::{LIMIT, Stub};
use harmonaize_client::{Access, AttachOptions, Client, Dtype, Error, JoinOptions, Rank, ReduceOp};
use rustix::process::{Pid, WaitOptions, waitpid};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Runs `child` in a forked process; whether it came to its end.
fn fork(child: impl FnOnce()) -> bool {
    // SAFETY: the child's libc has put its allocator right, as it does for every fork; nothing that other threads may have locked is used
    // there, and it leaves by `_exit`.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let ended = catch_unwind(AssertUnwindSafe(child)).is_ok();
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(!ended)) };
    }
    let (begin, pid) = (Instant::now(), Pid::from_raw(pid));
    loop {
        if let Some((_, status)) = waitpid(pid, WaitOptions::NOHANG).unwrap() {
            return status.exit_status() == Some(0);
        }
        assert!(begin.elapsed() < LIMIT, "the child hangs");
        std::thread::yield_now();
    }
}

fn forked<T>(result: Result<T, Error>) -> bool {
    matches!(result, Err(Error::Forked))
}

#[test]
fn a_child_gets_an_error_and_the_parent_goes_on() {
    for access in [Access::Mapped, Access::Remote, Access::Rdma] {
        let stub = Stub::start();
        let client = Client::attach(&stub.path, stub.options(access)).unwrap();
        let comm = client.join("job", Rank(0), 1, LIMIT).unwrap();
        let tensor = client.tensor(Dtype::F32, 8).unwrap();
        tensor.write(0, &[1.0_f32; 8]).unwrap();
        let completions = client.completions().unwrap();
        stub.knobs.hold.store(true, Ordering::Relaxed);
        let mut operation = comm.all_reduce_in_place(&tensor, ReduceOp::Sum).unwrap();
        // A thread of the parent sleeps on the attachment meanwhile, and its locks are whoever's.
        std::thread::scope(|scope| {
            scope.spawn(|| client.events(None).read(Duration::from_millis(50)));
            let right = fork(|| {
                assert!(forked(operation.poll()) && forked(operation.wait(LIMIT)));
                assert!(forked(comm.barrier()) && forked(comm.all_reduce_in_place(&tensor, ReduceOp::Sum)));
                assert!(forked(tensor.write(0, &[2.0_f32; 8])) && forked(tensor.read(0, &mut [0.0_f32; 8])));
                assert!(forked(client.tensor(Dtype::F32, 1)) && forked(client.feedback(1)));
                assert!(forked(client.join_with("job", Rank(0), 1, &JoinOptions::default())));
                assert!(forked(client.agreement("job")) && forked(client.completions()));
                assert!(forked(client.events(None).read(Duration::ZERO)));
                completions.clear();
            });
            assert!(right, "{access:?}");
        });
        // What the child inherited it may drop.
        let mut inherited = Some((client, comm, tensor, operation, completions));
        assert!(fork(|| drop(inherited.take())), "{access:?}");
        let (client, comm, tensor, mut operation, completions) = inherited.take().unwrap();
        assert!(!stub.knobs.log.lock().unwrap().iter().any(|line| line.contains("detached")));
        stub.knobs.hold.store(false, Ordering::Relaxed);
        operation.wait(LIMIT).unwrap();
        comm.all_reduce_in_place(&tensor, ReduceOp::Sum).unwrap().wait(LIMIT).unwrap();
        let mut values = [0.0_f32; 8];
        tensor.read(0, &mut values).unwrap();
        assert_eq!(values, [1.0; 8], "no child wrote");
        drop((client, comm, tensor, operation, completions));
        stub.knobs.expect("detached");
    }
}

#[test]
fn a_childs_copy_of_a_region_lets_nothing_go() {
    let stub = Stub::start();
    let client = Client::attach(&stub.path, stub.options(Access::Mapped)).unwrap();
    let comm = client.join("job", Rank(0), 1, LIMIT).unwrap();
    let fd = crate::memory::memfd(2, rustix::fs::SealFlags::SHRINK);
    let (region, other) = (client.register(&fd, 0..4096).unwrap(), client.register(&fd, 4096..8192).unwrap());
    let tensor = region.tensor(Dtype::U64, 0, 8).unwrap();
    let mut inherited = Some((region, tensor, other));
    assert!(fork(|| {
        assert!(forked(client.grow(1)) && forked(client.register(&fd, 0..4096)));
        let (region, tensor, other) = inherited.take().unwrap();
        assert!(forked(tensor.write(0, &[1_u64])) && forked(other.unregister()));
        drop((region, tensor));
    }));
    let (region, tensor, other) = inherited.take().unwrap();
    comm.all_reduce_in_place(&tensor, ReduceOp::Sum).unwrap().wait(LIMIT).unwrap();
    assert!(!stub.knobs.log.lock().unwrap().iter().any(|line| line.contains("gone")));
    other.unregister().unwrap();
    drop((region, tensor));
}

#[test]
fn the_parents_end_is_seen_though_a_child_lives_on() {
    let stub = Stub::start();
    let client = Client::attach(&stub.path, stub.options(Access::Mapped)).unwrap();
    let (read, write) = rustix::pipe::pipe().unwrap();
    // SAFETY: the child reads from a pipe, and leaves by `_exit`.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        drop(write);
        let _ = rustix::io::read(&read, &mut [0_u8; 1]);
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(0) };
    }
    drop(client);
    stub.knobs.expect("detached");
    drop(write);
    waitpid(Pid::from_raw(pid), WaitOptions::empty()).unwrap();
}

#[test]
fn a_child_may_attach_itself() {
    let stub = Stub::start();
    let path = stub.path.clone();
    let parents = Client::attach(&path, stub.options(Access::Mapped)).unwrap();
    assert!(fork(|| {
        assert!(forked(parents.tensor(Dtype::F32, 1)));
        let options = AttachOptions { arena_bytes: 1 << 20, ..AttachOptions::default() };
        let client = Client::attach(&path, options).unwrap();
        let comm = client.join("job", Rank(0), 1, LIMIT).unwrap();
        comm.barrier().unwrap().wait(LIMIT).unwrap();
    }));
    let comm = parents.join("job", Rank(0), 1, LIMIT).unwrap();
    comm.barrier().unwrap().wait(LIMIT).unwrap();
}
