//! At which pace messages of sessions are read, and what becomes of an elected control whose state stands still.

use super::{Admission, KIBIBYTES, Lead, MESSAGES, RunError, begin, read};
use crate::access::{Access, Current, Speaker};
use crate::actor::Command;
use crate::config::Config;
use crate::leader::Commands;
use crate::relay::Relay;
use crate::state::SessionId;
use harmonaize_api::v1::{self, FromAgent, from_agent};
use harmonaize_identity::{Identity, Peer};
use harmonaize_planner::Topology;
use harmonaize_store::Memory;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, iter};
use tonic::Status;

const LIMIT: Duration = Duration::from_secs(30);

/// Reads what a host's agent says. It ends where the returned end is dropped.
fn session(
    number: u64,
    upstream: impl Stream<Item = Result<FromAgent, Status>> + Unpin + Send + 'static,
    commands: mpsc::Sender<Command>,
) -> oneshot::Sender<()> {
    let address = ([127, 0, 0, 1], 1).into();
    let peer = Peer { identity: Identity::Local, address, serial: String::new(), surplus_of: None };
    let access = Arc::new(Current::new(Access::insecure_loopback()));
    let admission = Admission { access, speaker: Speaker::new(peer), agent: mpsc::channel(1).0.downgrade() };
    let (end, ended) = oneshot::channel();
    let more = (LIMIT, Arc::new(Relay::new()));
    tokio::spawn(read(upstream, SessionId(number), admission, commands, ended, more));
    end
}

#[tokio::test]
async fn a_flood_is_read_slowly_and_another_session_at_once() {
    let (commands, mut queue) = mpsc::channel(64);
    let begun = Instant::now();
    let flood = std::iter::repeat_with(|| Ok(FromAgent::default()));
    let _flood = session(1, iter(flood), commands.clone());
    let (quiet, said) = mpsc::channel(1);
    let _quiet = session(2, ReceiverStream::new(said), commands);
    let burst = u64::from(MESSAGES.burst);
    let (mut flooded, mut answered) = (0, 0);
    while answered < 20 {
        let command = tokio::time::timeout(LIMIT, queue.recv()).await.unwrap();
        match command.unwrap() {
            Command::Message(SessionId(1), _) => flooded += 1,
            Command::Message(SessionId(2), _) => answered += 1,
            _ => panic!("a session ended"),
        }
        let earned = begun.elapsed().as_nanos() / MESSAGES.interval.as_nanos();
        assert!(u128::from(flooded) <= u128::from(burst) + earned, "{flooded}, of which {earned} are earned");
        // The other one has something to say while the flood is slowed, again and again.
        if flooded >= burst && flooded % 10 == 0 {
            let _ = quiet.try_send(Ok(FromAgent::default()));
        }
    }
}

#[tokio::test]
async fn large_messages_are_read_slowly() {
    const KIB: usize = 4096;
    let (commands, mut queue) = mpsc::channel(1);
    let begun = Instant::now();
    let flood = std::iter::repeat_with(|| {
        let failed = v1::Failed { detail: "x".repeat(KIB << 10), ..v1::Failed::default() };
        Ok(from_agent::Message::Failed(failed).into())
    });
    let _flood = session(1, iter(flood), commands);
    let burst = KIBIBYTES.burst as usize;
    for count in 1..=burst / KIB + 2 {
        assert!(timeout(LIMIT, queue.recv()).await.unwrap().is_some());
        let earned = begun.elapsed().as_nanos() / KIBIBYTES.interval.as_nanos();
        assert!((count * KIB) as u128 <= burst as u128 + earned, "{count}, with {earned} KiB earned");
    }
}

#[tokio::test]
async fn a_stuck_state_of_an_elected_control_is_left_behind() {
    let patience = Duration::from_millis(1500);
    let text = "listen = \"127.0.0.1:0\"\ntopology = \"\"\ninsecure_loopback = true\n";
    let topology = Topology::parse("[[host]]\nname = \"h0\"\n").unwrap();
    let (_in_force, settings) = watch::channel(Config::parse(text, topology).unwrap().settings);
    let (leads, commands) = Commands::new();
    let lead = Lead { leads, commands: commands.clone(), settings, topology: None };
    let (store, stored) = begin(Box::new(Memory::new()), None, |_| 1).unwrap();
    let ended = lead.lead(store, stored, Some(patience), std::future::pending());
    tokio::pin!(ended);
    assert!(timeout(patience * 2, &mut ended).await.is_err(), "it leads as long as it answers");
    let (go, let_on) = std::sync::mpsc::channel::<()>();
    let stands = Command::Look(Box::new(move |_, _| {
        let _ = let_on.recv();
    }));
    assert!(commands.queue().unwrap().send(stands).await.is_ok());
    let ended = timeout(LIMIT, ended).await.unwrap();
    assert!(matches!(ended, Err(RunError::Stuck(limit)) if limit == patience), "{ended:?}");
    assert!(commands.queue().is_err(), "another control is asked");
    drop(go);
}
