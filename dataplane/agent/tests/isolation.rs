//! What a tenant's or unknown processes take from an agent and nobody else misses. They take its thread of sessions,
//! and its descriptors.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

mod whole;

use harmonaize_agent::run::run_on;
use harmonaize_client::{AttachOptions, Client, Dtype, Rank, ReduceOp};
use harmonaize_testkit::topology::star;
use std::future::poll_fn;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::task::Poll;
use std::time::{Duration, Instant};
use whole::{Agent, LIMIT, background, control_with};

/// The files that the agent's process may have open at first, and at most.
const FILES: (usize, usize) = (64, 384);
/// Connections to each of the agent's listeners.
const FLOOD: usize = 400;

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

/// A proxy to control for one connection, and what comes each time that something came from the agent.
fn proxy_to(control: SocketAddr) -> (SocketAddr, Receiver<()>) {
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

/// Whatever tenants do to the thread that serves their sessions: here it stands still. It does so for longer than a session with
/// control may be silent. Were that session on it, control would take the host for lost, and with it every tenant's communicators there.
#[test]
fn a_stalled_thread_of_tenants_keeps_the_session_with_control() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("a.sock");
    // Control asks for a sign of life each second.
    let (control, _control) = control_with(&star(2, "10Gbit/s"), Duration::from_secs(2));
    let (proxy, from_agent) = proxy_to(control);
    let Agent { config, devices, .. } = Agent::new("h0", proxy, &socket);
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
    let victim = attached(&socket);
    let communicator = victim.join("victim", Rank(0), 1, LIMIT).unwrap();
    let tensor = victim.tensor(Dtype::U64, 10).unwrap();
    let operate = || communicator.all_reduce_in_place(&tensor, ReduceOp::Sum).unwrap().wait(LIMIT).unwrap();
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
        operate();
    }
    assert!(!served.load(Ordering::SeqCst), "another thread serves tenants");
    go_on.send(()).unwrap();
    operate();
    // The way to control takes one connection: had control ended the session, nobody would join any more.
    let late = attaching.join().unwrap();
    drop(late.join("late", Rank(0), 1, LIMIT).unwrap());
}

/// The agent as a process that may open few files.
fn with_few_files(config: &Path) -> Child {
    let (first, most) = FILES;
    let script = format!("ulimit -S -n {first} && ulimit -H -n {most} && exec \"$0\" --config \"$1\"");
    let mut command = Command::new("sh");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_harmonaize-agent")]).arg(config);
    command.env_remove("RUST_LOG").stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn connections_without_end_leave_an_agent_descriptors() {
    harmonaize_identity::raise_open_files();
    let folder = tempfile::tempdir().unwrap();
    let sockets = ["a", "b"].map(|tenant| folder.path().join(tenant));
    let free = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (listen, metrics) = (free(), free());
    let mut text = format!(
        "host = \"h0\"\ncontrol = \"127.0.0.1:1\"\ninsecure_loopback = true\nlisten = \"{listen}\"\nmetrics = \"{metrics}\"\n"
    );
    let user = rustix::process::getuid().as_raw();
    for (tenant, socket) in ["a", "b"].iter().zip(&sockets) {
        text += &format!("[[tenant]]\nname = \"{tenant}\"\nsocket = {socket:?}\nuids = [{user}]\n");
    }
    let config = folder.path().join("agent.toml");
    std::fs::write(&config, text).unwrap();
    let mut agent = with_few_files(&config);
    let mut log = BufReader::new(agent.stderr.take().unwrap()).lines().map_while(Result::ok);
    assert!(log.any(|line| line.contains("agent is up")), "the agent has ended");
    std::thread::spawn(move || log.for_each(drop));

    let strangers = [listen, metrics].map(|at| {
        let connected = (0..FLOOD).filter_map(|_| TcpStream::connect(at).ok());
        connected.collect::<Vec<_>>()
    });
    let others: Vec<UnixStream> = (0..FLOOD).filter_map(|_| UnixStream::connect(&sockets[0]).ok()).collect();
    assert!(others.len() == FLOOD && strangers.iter().all(|all| all.len() > FLOOD / 2));
    drop(attached(&sockets[1]));
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", agent.id())).unwrap();
    let files = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    let files: Vec<&str> = files.split_whitespace().take(2).collect();
    assert_eq!(files, [FILES.1.to_string(), FILES.1.to_string()], "raised, and no further");
    agent.kill().unwrap();
    agent.wait().unwrap();
}
