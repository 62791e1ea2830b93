//! What a tenant's processes take from an agent and nobody else misses.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

mod whole;

use harmonaize_agent::run::run_on;
use harmonaize_client::{AttachOptions, Client};
use harmonaize_testkit::topology::star;
use std::future::poll_fn;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::task::Poll;
use std::time::{Duration, Instant};
use whole::{Agent, LIMIT, background, control_with};

fn options() -> AttachOptions {
    AttachOptions { timeout: LIMIT, arena_bytes: 1 << 16, ..AttachOptions::default() }
}

/// Attaches once the agent listens.
fn attached(socket: &Path) -> Client {
    let begun = Instant::now();
    while !socket.exists() {
        assert!(begun.elapsed() < LIMIT, "the agent made no socket");
        std::thread::yield_now();
    }
    Client::attach(socket, options()).unwrap()
}

/// A way to control for one connection, and what comes each time that something came from the agent.
fn way_to(control: SocketAddr) -> (SocketAddr, Receiver<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, (seen, from_agent)) = (listener.local_addr().unwrap(), channel());
    std::thread::spawn(move || {
        let (mut near, _) = listener.accept().unwrap();
        let mut far = TcpStream::connect(control).unwrap();
        let (mut back, mut answers) = (near.try_clone().unwrap(), far.try_clone().unwrap());
        std::thread::spawn(move || std::io::copy(&mut answers, &mut back));
        let mut bytes = vec![0; 1 << 16];
        while let Ok(count @ 1..) = near.read(&mut bytes) {
            if far.write_all(&bytes[..count]).is_err() || seen.send(()).is_err() {
                return;
            }
        }
    });
    (address, from_agent)
}

/// Whatever tenants do to the thread that serves their sessions: here it stands still.
#[test]
fn a_stalled_thread_of_tenants_keeps_the_session_with_control() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("a.sock");
    // Control asks for a sign of life each second.
    let (control, _control) = control_with(&star(2, "10Gbit/s"), Duration::from_secs(2));
    let (way, from_agent) = way_to(control);
    let Agent { config, devices, .. } = Agent::new("h0", way, &socket);
    let ((stall, stalls), (stalled, is_stalled)) = (channel::<Receiver<()>>(), channel());
    let _agent = background(move |_| async move {
        // Asked at each turn of the loop that takes tenants' requests, on the thread of their sessions.
        let stop = poll_fn(move |_| match stalls.try_recv() {
            Ok(over) => {
                stalled.send(()).unwrap();
                let _ = over.recv();
                Poll::Pending
            }
            Err(TryRecvError::Empty) => Poll::Pending,
            Err(TryRecvError::Disconnected) => Poll::Ready(()),
        });
        run_on(&devices, config, stop).await.unwrap();
    });
    drop(attached(&socket));
    from_agent.recv_timeout(LIMIT).expect("a session with control");

    let (go_on, over) = channel();
    stall.send(over).unwrap();
    is_stalled.recv_timeout(LIMIT).unwrap();
    let served = Arc::new(AtomicBool::new(false));
    let done = Arc::clone(&served);
    let attaching = std::thread::spawn(move || {
        let client = attached(&socket);
        done.store(true, Ordering::SeqCst);
        client
    });
    // What was under way does not count.
    from_agent.try_iter().for_each(drop);
    for _ in 0..4 {
        from_agent.recv_timeout(LIMIT).expect("control has answers while tenants have none");
    }
    assert!(!served.load(Ordering::SeqCst), "another thread serves tenants");
    go_on.send(()).unwrap();
    drop(attaching.join().unwrap());
}
