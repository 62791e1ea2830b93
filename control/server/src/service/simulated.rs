//! Control in a simulation: the same service, actor and state. They run on the caller's runtime and in its time, over connections that
//! somebody makes.

use super::{Door, MESSAGE_BYTES, Service, begin};
use crate::access::Current;
use crate::actor::Actor;
use crate::config::Config;
use crate::keeper::Keeper;
use crate::leader::{Commands, Leader};
use crate::relay::Relay;
use crate::service::STREAMS;
use harmonaize_api::v1::provider_server::ProviderServer;
use harmonaize_identity::{Connection, Places};
use harmonaize_store::{Store, StoreError};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;

/// A control that has no thread, socket, file or randomness of its own.
pub struct Simulated {
    /// What the operator decided; what it says of addresses and of the store has no effect.
    pub config: Config,
    /// What outlives it.
    pub store: Box<dyn Store>,
    /// How long the store takes for a group of changes.
    pub disk: Box<dyn FnMut() -> Duration + Send>,
    /// In place of the system's randomness.
    pub random: [u8; 32],
    /// Most commands that wait for the state.
    pub commands: usize,
    /// Most messages that wait for an agent.
    pub messages: usize,
}

impl std::fmt::Debug for Simulated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Simulated").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Simulated {
    /// Serves agents and operators that connect, until `shutdown`; then agents are told, as by a real one that goes down. If the future
    /// is dropped before, it is as if the process were killed: nothing more is said, decided or written. Its connections are to end then.
    ///
    /// # Errors
    /// If the store cannot be read or written at the start.
    ///
    /// # Panics
    /// Where the actor does.
    pub async fn run(
        self,
        connections: ReceiverStream<std::io::Result<Connection>>,
        shutdown: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), StoreError> {
        let [a, b, c, d, ..] = self.random;
        let first = u32::from_le_bytes([a, b, c, d]);
        let (store, stored) = begin(self.store, None, |stored| stored.next_boot(first))?;
        let (keeper, acks, writes) = Keeper::simulated(store, self.disk);
        let half = (self.config.session_timeout / 2).max(Duration::from_millis(50));
        let (leads, leader) = Commands::new();
        let (commands, queue) = mpsc::channel(self.commands);
        leads.send_replace(Leader::Here(commands));
        let actor = Actor::new(self.config.settings, self.random, stored, (keeper, acks));
        let service = Service {
            commands: leader,
            access: Arc::new(Current::new(self.config.access)),
            door: Door::Both,
            sessions: Arc::default(),
            places: Places::default(),
            watchers: Arc::new(Semaphore::new(1)),
            relay: Arc::new(Relay::new()),
            hello_timeout: self.config.session_timeout,
            listen: "control:1".into(),
            queue: self.messages,
        };
        let mut builder = tonic::transport::Server::builder()
            .http2_keepalive_interval(Some(half))
            .http2_keepalive_timeout(Some(half))
            .max_concurrent_streams(Some(STREAMS.1));
        let service = ProviderServer::new(service).max_decoding_message_size(MESSAGE_BYTES.0);
        let mut tasks = JoinSet::new();
        tasks.spawn(writes);
        tasks.spawn(async move {
            // Its end is that of sessions, which need no listener any more.
            let _ = builder.add_service(service).serve_with_incoming(connections).await;
        });
        let mut state = JoinSet::new();
        state.spawn(async move {
            actor.run(queue, shutdown).await;
        });
        if let Some(Err(error)) = state.join_next().await
            && error.is_panic()
        {
            std::panic::resume_unwind(error.into_panic());
        }
        Ok(())
    }
}
