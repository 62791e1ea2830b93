//! Made-up agents: over control's real interface each says what a test or a benchmark has it say.

mod fabric;

pub use fabric::{LeafSpine, Played};

use anyhow::{Context, Result, bail};
use harmonaize_api::PROTOCOL_VERSION;
use harmonaize_api::v1::provider_client::ProviderClient;
use harmonaize_api::v1::{self, from_agent, to_agent};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Status, Streaming};

/// How long control may take to say something.
pub const LIMIT: Duration = Duration::from_secs(20);

/// An agent's session with control.
#[derive(Debug)]
pub struct Agent {
    /// What goes to control. Dropped with this, the session ends.
    pub up: mpsc::Sender<v1::FromAgent>,
    down: Streaming<v1::ToAgent>,
    control: Channel,
}

/// What the agent of a host says first, if it can do nothing that is not asked of all.
pub fn hello_of(host: &str) -> v1::Hello {
    v1::Hello {
        protocol_version: PROTOCOL_VERSION,
        host: host.to_owned(),
        listen: "127.0.0.1:9".to_owned(),
        ..v1::Hello::default()
    }
}

impl Agent {
    /// Opens a session, in which nothing is said yet.
    ///
    /// # Errors
    /// What control answers where it opens none.
    pub async fn open(control: Channel) -> Result<Self, Status> {
        let (up, stream) = mpsc::channel(16);
        let mut client = ProviderClient::new(control.clone());
        let down = client.session(ReceiverStream::new(stream)).await?.into_inner();
        Ok(Self { up, down, control })
    }

    /// An answer to a question of control's, beside the session. Returns where its parts go, and the call that carries them, which ends
    /// with what control says of it.
    pub fn answer(
        &self,
    ) -> (mpsc::Sender<v1::AnswerPart>, impl Future<Output = Result<(), Status>> + Send + use<>) {
        let (parts, queue) = mpsc::channel(1);
        let mut client = ProviderClient::new(self.control.clone());
        (parts, async move { client.answer(ReceiverStream::new(queue)).await.map(|_| ()) })
    }

    /// The same for this agent; what control says to it first.
    ///
    /// # Errors
    /// Where control does not welcome it.
    pub async fn hello(control: Channel, hello: v1::Hello) -> Result<(Self, v1::Welcome)> {
        let mut agent = Self::open(control).await?;
        agent.send(from_agent::Message::Hello(hello)).await?;
        match agent.next().await? {
            to_agent::Message::Welcome(welcome) => Ok((agent, welcome)),
            other => bail!("no welcome but {other:?}"),
        }
    }

    /// Says something.
    ///
    /// # Errors
    /// Where the session is over.
    pub async fn send(&self, message: from_agent::Message) -> Result<()> {
        self.up.send(message.into()).await.context("the session is over")
    }

    /// What control says next; none where the session ends.
    ///
    /// # Errors
    /// Why control ends it, or that it says nothing in time.
    pub async fn next_or_end(&mut self) -> Result<Option<to_agent::Message>> {
        let next = tokio::time::timeout(LIMIT, self.down.message()).await.context("control says nothing")?;
        next?.map(|message| message.message.context("an empty message")).transpose()
    }

    /// What control says next.
    ///
    /// # Errors
    /// Where the session ends, or control says nothing in time.
    pub async fn next(&mut self) -> Result<to_agent::Message> {
        self.next_or_end().await?.context("the session is over")
    }

    /// The recipe of a communicator that has formed.
    ///
    /// # Errors
    /// Where control says anything else.
    pub async fn form(&mut self) -> Result<v1::Recipe> {
        match self.next().await? {
            to_agent::Message::Form(recipe) => Ok(recipe),
            other => bail!("no recipe but {other:?}"),
        }
    }

    /// All have prepared an epoch, and wait until control says that it is ready.
    ///
    /// # Errors
    /// Where control says anything else.
    pub async fn prepare(agents: &mut [&mut Self], communicator: u64, epoch: u64) -> Result<()> {
        for agent in agents.iter_mut() {
            agent
                .send(from_agent::Message::Prepared(v1::Prepared { communicator, epoch, links: None }))
                .await?;
        }
        for agent in agents {
            match agent.next().await? {
                to_agent::Message::Ready(ready) if ready == (v1::Ready { communicator, epoch }) => {}
                other => bail!("not ready but {other:?}"),
            }
        }
        Ok(())
    }
}
