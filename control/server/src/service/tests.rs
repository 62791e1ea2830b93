//! At which pace messages of sessions are read.

use super::{Admission, MESSAGES, read};
use crate::access::{Access, Current, Speaker};
use crate::actor::Command;
use crate::relay::Relay;
use crate::state::SessionId;
use harmonaize_api::v1::FromAgent;
use harmonaize_identity::{Identity, Peer};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};
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
