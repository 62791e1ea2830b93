//! Both ends in one thread, and an agent's end against nonsense.

use super::frame::{Header, kind};
use super::{REMOTE_DEPTH, RemoteEnd, RemoteTenant};
use crate::{AgentEnd, Breach, EndError, Memory, Span, TenantEnd};
use harmonaize_abi::{Completion, Submission, Tag};
use proptest::prelude::*;
use rustix::net::{RecvFlags, SendFlags};
use std::os::fd::OwnedFd;
use zerocopy::IntoBytes;

const ARENA: u64 = 1 << 20;

fn pair() -> (RemoteEnd, RemoteTenant) {
    let (agent, socket) = RemoteEnd::create(ARENA, 4).unwrap();
    (agent, RemoteTenant::open(socket, ARENA, 4).unwrap())
}

fn staging(bytes: usize) -> (std::sync::Arc<Memory>, Span) {
    let memory = Memory::private(bytes.max(1)).unwrap();
    let span = Span::new(&memory, 0, bytes as u64).unwrap();
    (memory, span)
}

/// Runs both ends until neither has anything to do; the tags that ended.
fn settle(agent: &mut RemoteEnd, tenant: &mut RemoteTenant) -> Vec<u64> {
    let mut ended = Vec::new();
    while agent.progress(&mut |tag| ended.push(tag.0)).unwrap() + tenant.progress().unwrap() > 0 {}
    ended
}

#[test]
fn descriptors_and_completions_cross() {
    let (mut agent, mut tenant) = pair();
    assert!(agent.prepare_sleep() && tenant.prepare_sleep());
    for cookie in 0..4 {
        tenant.submit(&Submission { cookie, ..Default::default() }).unwrap();
    }
    settle(&mut agent, &mut tenant);
    assert!(!agent.prepare_sleep());
    for cookie in 0..4 {
        assert_eq!(agent.submission().unwrap().unwrap().cookie, cookie);
        agent.complete(&Completion { cookie, operation: 9, ..Default::default() }).unwrap();
    }
    assert_eq!(agent.submission().unwrap(), None);
    agent.flush().unwrap();
    settle(&mut agent, &mut tenant);
    assert!(!tenant.prepare_sleep());
    for cookie in 0..4 {
        assert_eq!(tenant.completion().unwrap().unwrap().cookie, cookie);
    }
    assert_eq!(tenant.completion().unwrap(), None);
}

/// Payloads that exceed the socket's buffer many times over, both ways at once, and empty ones.
#[test]
fn tensor_bytes_cross_in_order() {
    let (mut agent, mut tenant) = pair();
    let pattern: Vec<u8> = (0..ARENA).map(|i| (i * 7 % 251) as u8).collect();
    tenant.memory().write(0, &pattern).unwrap();
    let (whole, into) = staging(ARENA as usize);
    agent.fetch(Tag(1), 0, into).unwrap();
    agent.fetch(Tag(2), 5, staging(0).1).unwrap();
    let (part, into) = staging(100);
    agent.fetch(Tag(3), ARENA - 100, into).unwrap();
    assert_eq!(settle(&mut agent, &mut tenant), [1, 2, 3]);
    let mut seen = vec![0; ARENA as usize];
    whole.read(0, &mut seen).unwrap();
    assert_eq!(seen, pattern);
    part.read(0, &mut seen[..100]).unwrap();
    assert_eq!(seen[..100], pattern[ARENA as usize - 100..]);

    let (other, _) = staging(ARENA as usize);
    other.write(0, &vec![3; ARENA as usize]).unwrap();
    agent.store(Tag(4), Span::new(&other, 0, ARENA - 1).unwrap(), 1).unwrap();
    agent.fetch(Tag(5), 0, Span::new(&whole, 0, ARENA).unwrap()).unwrap();
    agent.store(Tag(6), staging(0).1, 0).unwrap();
    assert_eq!(settle(&mut agent, &mut tenant), [4, 5, 6]);
    whole.read(0, &mut seen).unwrap();
    assert_eq!(seen[0], pattern[0]);
    assert!(seen[1..].iter().all(|byte| *byte == 3));
}

#[test]
fn queues_are_bounded_and_ranges_checked() {
    let (mut agent, mut tenant) = pair();
    assert!(matches!(agent.fetch(Tag(0), ARENA, staging(1).1), Err(EndError::Memory(_))));
    assert!(matches!(agent.store(Tag(0), staging(1).1, u64::MAX), Err(EndError::Memory(_))));
    for tag in 0..REMOTE_DEPTH as u64 {
        agent.fetch(Tag(tag), 0, staging(8).1).unwrap();
        agent.store(Tag(1000 + tag), staging(8).1, 8).unwrap();
    }
    assert!(matches!(agent.fetch(Tag(0), 0, staging(1).1), Err(EndError::Full)));
    assert!(matches!(agent.store(Tag(0), staging(1).1, 0), Err(EndError::Full)));
    assert_eq!(settle(&mut agent, &mut tenant).len(), 2 * REMOTE_DEPTH);
    agent.fetch(Tag(0), 0, staging(1).1).unwrap();
    // A tenant that never reads its completions has broken the rule.
    let mut taken = 0;
    while agent.complete(&Completion::default()).is_ok() {
        taken += 1;
        assert!(taken <= 4 + 2 * REMOTE_DEPTH);
    }
}

/// Writes raw frames as the tenant.
fn says(socket: &OwnedFd, frames: &[&[u8]]) {
    for frame in frames {
        rustix::net::send(socket, frame, SendFlags::NOSIGNAL).unwrap();
    }
}

fn header(kind: u32, tag: u64, bytes: u64) -> Header {
    Header { kind, reserved: 0, tag, offset: 0, bytes }
}

#[test]
fn nonsense_ends_the_attachment() {
    let cases: [(&[Header], Breach); 7] = [
        (&[header(99, 0, 0)], Breach::UnknownKind),
        (&[header(kind::COMPLETION, 0, 0)], Breach::UnknownKind),
        (&[Header { reserved: 1, ..header(kind::SUBMISSION, 0, 0) }], Breach::Reserved),
        (&[header(kind::FETCH_DATA, 8, 16)], Breach::FetchOrder),
        (&[header(kind::FETCH_DATA, 7, u64::MAX)], Breach::FetchOrder),
        (&[header(kind::STORE_DONE, 7, 0)], Breach::StoreOrder),
        (&[header(kind::STORE_DONE, 9, 0)], Breach::StoreUnsent),
    ];
    for (frames, expected) in cases {
        let (mut agent, socket) = RemoteEnd::create(ARENA, 4).unwrap();
        agent.fetch(Tag(7), 0, staging(16).1).unwrap();
        agent.store(Tag(9), staging(ARENA as usize).1, 0).unwrap();
        for frame in frames {
            says(&socket, &[frame.as_bytes()]);
        }
        let error = agent.progress(&mut |_| panic!("nothing can have ended")).unwrap_err();
        assert!(matches!(error, EndError::Protocol(breach) if breach == expected), "{error}");
        assert!(!agent.prepare_sleep());
        assert!(matches!(agent.progress(&mut |_| {}), Err(EndError::Closed)));
    }
}

#[test]
fn a_tenant_that_dies_midway_is_noticed() {
    let (mut agent, socket) = RemoteEnd::create(ARENA, 4).unwrap();
    agent.fetch(Tag(7), 0, staging(16).1).unwrap();
    agent.flush().unwrap();
    says(&socket, &[header(kind::FETCH_DATA, 7, 16).as_bytes(), &[1; 10]]);
    assert!(agent.progress(&mut |_| panic!("not yet")).unwrap() > 0);
    drop(socket);
    assert!(matches!(agent.progress(&mut |_| panic!("never")), Err(EndError::Closed)));
    assert!(!agent.prepare_sleep());
}

#[test]
fn frames_may_come_byte_by_byte() {
    let (mut agent, socket) = RemoteEnd::create(ARENA, 4).unwrap();
    let (memory, into) = staging(3);
    agent.fetch(Tag(7), 0, into).unwrap();
    let submission = Submission { cookie: 5, ..Default::default() };
    let mut bytes = header(kind::SUBMISSION, 0, 0).as_bytes().to_vec();
    bytes.extend_from_slice(submission.as_bytes());
    bytes.extend_from_slice(header(kind::FETCH_DATA, 7, 3).as_bytes());
    bytes.extend_from_slice(&[1, 2, 3]);
    let mut ended = Vec::new();
    for byte in bytes {
        assert!(ended.is_empty());
        says(&socket, &[&[byte]]);
        agent.progress(&mut |tag| ended.push(tag.0)).unwrap();
    }
    assert_eq!(ended, [7]);
    assert_eq!(agent.submission().unwrap(), Some(submission));
    let mut seen = [0; 3];
    memory.read(0, &mut seen).unwrap();
    assert_eq!(seen, [1, 2, 3]);
}

/// Another end goes on in another's place, wherever the tenant's frames break off. What was still to be sent is.
#[test]
fn an_inherited_end_goes_on_in_the_midst_of_frames() {
    let submission = |cookie| {
        let submission = Submission { cookie, ..Default::default() };
        [header(kind::SUBMISSION, 0, 0).as_bytes(), submission.as_bytes()].concat()
    };
    for broken in 0..=submission(2).len() {
        let (mut agent, socket) = RemoteEnd::create(ARENA, 4).unwrap();
        says(&socket, &[&submission(1), &submission(2)[..broken]]);
        while agent.progress(&mut |_| panic!("nothing was asked for")).unwrap() > 0 {}
        for cookie in [7, 8, 9] {
            agent.complete(&Completion { cookie, ..Default::default() }).unwrap();
        }
        let mut heir = RemoteEnd::inherit(agent.hand_over().unwrap(), ARENA).unwrap();
        drop(agent);
        says(&socket, &[&submission(2)[broken..], &submission(3)]);
        while heir.progress(&mut |_| panic!("nothing was asked for")).unwrap() > 0 {}
        for cookie in [1, 2, 3] {
            assert_eq!(heir.submission().unwrap().unwrap().cookie, cookie, "broken off after {broken} bytes");
        }
        let mut tenant = RemoteTenant::open(socket, ARENA, 4).unwrap();
        tenant.memory().write(5, &[3; 40]).unwrap();
        let (whole, into) = staging(40);
        heir.fetch(Tag(6), 5, into).unwrap();
        assert_eq!(settle(&mut heir, &mut tenant), [6]);
        let mut seen = [0; 40];
        whole.read(0, &mut seen).unwrap();
        assert_eq!(seen, [3; 40]);
        for cookie in [7, 8, 9] {
            assert_eq!(tenant.completion().unwrap().unwrap().cookie, cookie);
        }
    }
}

#[test]
fn what_is_no_end_is_not_inherited() {
    let (mut agent, mut tenant) = pair();
    let (_memory, into) = staging(8);
    agent.fetch(Tag(1), 0, into).unwrap();
    assert!(!agent.rests() && agent.hand_over().is_err(), "a fetch is under way");
    assert_eq!(settle(&mut agent, &mut tenant), [1]);
    let mut theirs = agent.hand_over().unwrap();
    theirs.taken[0] = u64::MAX;
    assert!(RemoteEnd::inherit(theirs, ARENA).is_err());
    let mut theirs = agent.hand_over().unwrap();
    theirs.put[0] = 8;
    assert!(RemoteEnd::inherit(theirs, ARENA).is_err(), "its file has less");
    let mut theirs = agent.hand_over().unwrap();
    theirs.entries = 3;
    assert!(RemoteEnd::inherit(theirs, ARENA).is_err());
    let mut theirs = agent.hand_over().unwrap();
    drop(theirs.descriptors.pop());
    assert!(RemoteEnd::inherit(theirs, ARENA).is_err());
    assert!(crate::MappedEnd::inherit(agent.hand_over().unwrap(), &mut |_| None).is_err());
}

/// While frames wait for a tenant that does not read, the agent may sleep, and wakes when it reads.
#[test]
fn output_that_waits_does_not_keep_the_agent_awake() {
    let readable = |agent: &RemoteEnd| {
        let mut fds =
            [rustix::event::PollFd::from_borrowed_fd(agent.wake_fd(), rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
    };
    let (mut agent, socket) = RemoteEnd::create(ARENA, 4).unwrap();
    agent.store(Tag(1), staging(ARENA as usize).1, 0).unwrap();
    while agent.progress(&mut |_| {}).unwrap() > 0 {}
    assert!(agent.prepare_sleep());
    assert!(!readable(&agent));
    let mut left = size_of::<Header>() + ARENA as usize;
    let mut buffer = vec![0; 1 << 16];
    while left > 0 {
        let (received, _) = rustix::net::recv(&socket, &mut buffer[..], RecvFlags::empty()).unwrap();
        left -= received;
        agent.progress(&mut |_| {}).unwrap();
    }
    assert!(agent.prepare_sleep());
    assert!(!readable(&agent));
    says(&socket, &[header(kind::STORE_DONE, 1, 0).as_bytes()]);
    assert!(readable(&agent));
}

proptest! {
    #[test]
    fn any_bytes_end_with_an_error_or_wait_for_more(
        frames in prop::collection::vec((0u32..8, 0u64..4, 0u64..40, prop::collection::vec(any::<u8>(), 0..140)), 0..20),
    ) {
        let (mut agent, socket) = RemoteEnd::create(ARENA, 4).unwrap();
        for tag in 0..4 {
            agent.fetch(Tag(tag), 0, staging(16 + tag as usize).1).unwrap();
            agent.store(Tag(tag), staging(8).1, 0).unwrap();
        }
        for (kind, tag, bytes, body) in frames {
            says(&socket, &[header(kind, tag, bytes).as_bytes(), &body]);
            if agent.progress(&mut |_| {}).is_err() {
                break;
            }
            let _ = agent.submission();
        }
    }
}
