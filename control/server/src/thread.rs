//! The actor's thread: what the state computes holds up no connection, whose pings are answered on another.

use crate::actor::{Actor, Command};
use crate::metrics::panicked_elsewhere;
use std::future::Future;
use std::thread::JoinHandle;
use tokio::sync::{mpsc, oneshot};

/// The thread's name.
const NAME: &str = "state";

/// Has panics of this process counted from now on, as `harmonaize_control_panics_total` shows them. They are printed as before.
pub fn count_panics() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        // The state counts its own, by the work in which they were.
        if std::thread::current().name() != Some(NAME) {
            panicked_elsewhere();
        }
        before(panic);
    }));
}

/// An actor that runs on a thread of its own. Dropping it has the actor end as [`Running::until`] would, without waiting for it.
pub(crate) struct Running {
    thread: JoinHandle<std::io::Result<()>>,
    stop: oneshot::Sender<()>,
    /// Answers once the actor has ended, whyever.
    over: oneshot::Receiver<()>,
}

impl Running {
    /// Starts the thread.
    ///
    /// # Errors
    /// Where the system gives no thread.
    pub(crate) fn start(actor: Actor, commands: mpsc::Receiver<Command>) -> std::io::Result<Self> {
        let (stop, stopped) = oneshot::channel::<()>();
        let (ended, over) = oneshot::channel::<()>();
        let run = move || -> std::io::Result<()> {
            // Dropped last, and where the actor panics, too.
            let _ended = ended;
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
            runtime.block_on(actor.run(commands, async {
                let _ = stopped.await;
            }));
            Ok(())
        };
        let thread = std::thread::Builder::new().name(NAME.to_owned()).spawn(run)?;
        Ok(Self { thread, stop, over })
    }

    /// Has the actor end at `shutdown`, and waits until it has. Where it panicked the panic goes on here.
    ///
    /// # Errors
    /// Where the system gives the thread nothing that it could wait with.
    pub(crate) async fn until(self, shutdown: impl Future<Output = ()>) -> std::io::Result<()> {
        let Self { thread, stop, mut over } = self;
        let by_itself = tokio::select! {
            () = shutdown => false,
            _ = &mut over => true,
        };
        if !by_itself {
            let _ = stop.send(());
            let _ = over.await;
        }
        // It has nothing left to do.
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::keeper::Keeper;
    use crate::relay::Relay;
    use crate::state::{Controller, Instruction, SessionId};
    use harmonaize_api::PROTOCOL_VERSION;
    use harmonaize_api::v1::{self, from_agent, to_agent};
    use harmonaize_planner::HostId;
    use harmonaize_store::{Memory, Stored};
    use std::sync::Arc;
    use std::time::Duration;

    const LIMIT: Duration = Duration::from_secs(20);

    fn start() -> (Running, mpsc::Sender<Command>) {
        let (commands, queue) = mpsc::channel(8);
        (Running::start(actor(), queue).unwrap(), commands)
    }

    fn actor() -> Actor {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("topology.toml"), "[[host]]\nname = \"h0\"\n").unwrap();
        let path = folder.path().join("control.toml");
        let text = "listen = \"127.0.0.1:0\"\ninsecure_loopback = true\ntopology = \"topology.toml\"\n[[tenant]]\nname = \"a\"\n[[tenant]]\nname = \"b\"\n";
        std::fs::write(&path, text).unwrap();
        let config = Config::load(&path).unwrap();
        let keeper = Keeper::start(Box::new(Memory::new())).unwrap();
        Actor::new(config.settings, [7; 32], Stored::default(), keeper)
    }

    fn hello() -> v1::Hello {
        v1::Hello {
            protocol_version: PROTOCOL_VERSION,
            host: "h0".to_owned(),
            listen: "192.0.2.1:7200".to_owned(),
            ..v1::Hello::default()
        }
    }

    async fn metrics(commands: &mpsc::Sender<Command>) -> String {
        let (answer, page) = oneshot::channel();
        assert!(commands.send(Command::Metrics(answer)).await.is_ok());
        tokio::time::timeout(LIMIT, page).await.unwrap().unwrap().text().unwrap()
    }

    #[tokio::test]
    async fn others_go_on_while_the_state_computes() {
        let (running, commands) = start();
        let (go, let_on) = std::sync::mpsc::channel::<()>();
        let (answer, computed) = oneshot::channel();
        let computes = Command::Look(Box::new(move |_, _| {
            let _ = answer.send(let_on.recv_timeout(LIMIT).is_ok());
        }));
        assert!(commands.send(computes).await.is_ok());
        // All of this happens on the thread that would answer pings.
        tokio::time::sleep(Duration::from_millis(50)).await;
        go.send(()).unwrap();
        assert!(computed.await.unwrap(), "it was let on while it computed");
        tokio::time::timeout(LIMIT, running.until(async {})).await.unwrap().unwrap();
        assert!(commands.is_closed());
    }

    #[tokio::test]
    async fn a_flood_of_one_tenant_s_joins_delays_no_other_s() {
        const FLOOD: u64 = 5000;
        let session = SessionId(1);
        let (commands, queue) = mpsc::channel(2 * FLOOD as usize);
        let (agent, mut answers) = mpsc::channel(2 * FLOOD as usize);
        let (ended, _ends) = oneshot::channel();
        let say = async |message: from_agent::Message| {
            assert!(commands.send(Command::Message(session, Box::new(message.into()))).await.is_ok());
        };
        let open = Command::Open { session, agent, ended, relay: Arc::new(Relay::new()) };
        assert!(commands.send(open).await.is_ok());
        say(from_agent::Message::Hello(hello())).await;
        // One host's agent speaks for both; each of these is answered at once, with a refusal. Served in the order in which they
        // come, they would all be before the other tenant's.
        let join = |tenant: &str, request, rank| {
            let (tenant, communicator) = (tenant.to_owned(), "c".to_owned());
            let join = v1::Join { request, tenant, communicator, rank, ranks: 1, ..v1::Join::default() };
            from_agent::Message::Join(join)
        };
        for request in 0..FLOOD {
            let (tenant, communicator) = ("a".to_owned(), "c".to_owned());
            let question = v1::Negotiate { request, tenant, communicator, propose: None };
            say(match request % 2 {
                0 => join("a", request, 9),
                _ => from_agent::Message::Negotiate(question),
            })
            .await;
        }
        say(join("b", FLOOD, 0)).await;
        let running = Running::start(actor(), queue).unwrap();
        let mut of_flood = 0;
        loop {
            let answer = tokio::time::timeout(LIMIT, answers.recv()).await.unwrap().unwrap().unwrap();
            match answer.message.unwrap() {
                to_agent::Message::JoinRefused(refused) if refused.request < FLOOD => of_flood += 1,
                to_agent::Message::Negotiated(_) => of_flood += 1,
                to_agent::Message::Form(_) => break,
                _ => {}
            }
        }
        assert!(of_flood <= 1, "{of_flood} of the flood's {FLOOD} requests were answered first");
        tokio::time::timeout(LIMIT, running.until(async {})).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_command_that_panics_costs_its_sender_alone() {
        let (running, commands) = start();
        let (answer, answered) = oneshot::channel::<()>();
        let panics = move |_: &mut Controller, _: Duration| {
            let _answer = answer;
            std::panic::resume_unwind(Box::new("of the state"));
        };
        assert!(commands.send(Command::Look(Box::new(panics))).await.is_ok());
        assert!(answered.await.is_err(), "it gets no answer");
        let (answer, answered) = oneshot::channel();
        assert!(commands.send(Command::Fabric(answer)).await.is_ok());
        tokio::time::timeout(LIMIT, answered).await.unwrap().unwrap();
        let text = metrics(&commands).await;
        for counted in ["{work=\"command\"} 1\n", "{work=\"message\"} 0\n"] {
            assert!(text.contains(&format!("harmonaize_control_panics_total{counted}")), "{text}");
        }
        tokio::time::timeout(LIMIT, running.until(async {})).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_message_that_panics_ends_its_session_alone() {
        if !cfg!(debug_assertions) {
            // Nothing looks at invariants.
            return;
        }
        let (running, commands) = start();
        let open = async |session| {
            let (agent, answers) = mpsc::channel(64);
            let (ended, ends) = oneshot::channel();
            let open = Command::Open { session, agent, ended, relay: Arc::new(Relay::new()) };
            assert!(commands.send(open).await.is_ok());
            (answers, ends)
        };
        let look = async |look: fn(&mut Controller, Duration)| {
            assert!(commands.send(Command::Look(Box::new(look))).await.is_ok());
        };
        let (mut answers, ends) = open(SessionId(1)).await;
        let (mut others, _others_end) = open(SessionId(2)).await;
        // A host has a session that is not there: whatever comes of the next message panics.
        look(|state, now| {
            state.message(now, SessionId(1), from_agent::Message::Hello(hello()).into());
            state.hosts.insert(HostId(9), SessionId(9));
        })
        .await;
        let (tenant, communicator) = ("a".to_owned(), "c".to_owned());
        let join = v1::Join { request: 1, tenant, communicator, ranks: 2, ..v1::Join::default() };
        let panics = Command::Message(SessionId(1), Box::new(from_agent::Message::Join(join).into()));
        assert!(commands.send(panics).await.is_ok());
        assert!(tokio::time::timeout(LIMIT, ends).await.unwrap().is_err(), "its session ends");
        while tokio::time::timeout(LIMIT, answers.recv()).await.unwrap().is_some() {}
        look(|state, _| {
            state.hosts.remove(&HostId(9));
        })
        .await;
        let text = metrics(&commands).await;
        for counted in ["{work=\"message\"} 1\n", "{work=\"command\"} 0\n"] {
            assert!(text.contains(&format!("harmonaize_control_panics_total{counted}")), "{text}");
        }
        // The other session goes on, and its host's place is free again.
        let says = Command::Message(SessionId(2), Box::new(from_agent::Message::Hello(hello()).into()));
        assert!(commands.send(says).await.is_ok());
        let answer = tokio::time::timeout(LIMIT, others.recv()).await.unwrap().unwrap().unwrap();
        assert!(matches!(answer.message, Some(to_agent::Message::Welcome(_))), "{answer:?}");
        tokio::time::timeout(LIMIT, running.until(async {})).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_task_that_panics_counts() {
        count_panics();
        let (running, commands) = start();
        let panics = tokio::spawn(async { assert_eq!(LIMIT, Duration::ZERO, "a fault of the test's") });
        assert!(panics.await.is_err());
        let text = metrics(&commands).await;
        let other = "harmonaize_control_panics_total{work=\"other\"} ";
        assert!(text.contains(other) && !text.contains(&format!("{other}0\n")), "{text}");
        tokio::time::timeout(LIMIT, running.until(async {})).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn panics_of_timers_and_acknowledgements_end_no_control() {
        if !cfg!(debug_assertions) {
            // Nothing looks at invariants.
            return;
        }
        let session = SessionId(1);
        let (running, commands) = start();
        let (agent, mut answers) = mpsc::channel(64);
        let (ended, _ends) = oneshot::channel();
        let open = Command::Open { session, agent, ended, relay: Arc::new(Relay::new()) };
        assert!(commands.send(open).await.is_ok());
        let (tenant, communicator) = ("a".to_owned(), "c".to_owned());
        let timeout_ns = 50_000_000;
        let join = v1::Join { request: 1, tenant, communicator, ranks: 2, timeout_ns, ..v1::Join::default() };
        // A rank waits for another, and then a host has a session that is not there: whatever plans panics.
        let broken = move |state: &mut Controller, now| {
            state.message(now, session, from_agent::Message::Hello(hello()).into());
            state.message(now, session, from_agent::Message::Join(join).into());
            state.hosts.insert(HostId(9), SessionId(9));
        };
        assert!(commands.send(Command::Look(Box::new(broken))).await.is_ok());
        loop {
            let answer = tokio::time::timeout(LIMIT, answers.recv()).await.unwrap().unwrap().unwrap();
            if let Some(to_agent::Message::JoinRefused(refused)) = answer.message {
                assert_eq!(refused.kind(), v1::JoinRefusedKind::Timeout, "{refused:?}");
                break;
            }
        }
        let (answer, stored) = oneshot::channel();
        let added = v1::AddTenantRequest { name: "new".to_owned(), ..v1::AddTenantRequest::default() };
        let instruct = Command::Instruct(Instruction::AddTenant(added), answer);
        assert!(commands.send(instruct).await.is_ok());
        assert!(tokio::time::timeout(LIMIT, stored).await.unwrap().is_err(), "it gets no answer");
        // The end of a session plans as well.
        assert!(commands.send(Command::Closed(session)).await.is_ok());
        let repaired = |state: &mut Controller, _: Duration| {
            state.hosts.remove(&HostId(9));
        };
        assert!(commands.send(Command::Look(Box::new(repaired))).await.is_ok());
        let (answer, tenants) = oneshot::channel();
        let known = move |state: &mut Controller, now| {
            let sessions = state.sessions.len() + state.hosts.len();
            let _ = answer.send((state.queries(now).tenants().tenants.len(), sessions));
        };
        assert!(commands.send(Command::Look(Box::new(known))).await.is_ok());
        assert_eq!(tokio::time::timeout(LIMIT, tenants).await.unwrap().unwrap(), (3, 0));
        let text = metrics(&commands).await;
        for work in ["timer", "store", "session"] {
            let none = format!("harmonaize_control_panics_total{{work=\"{work}\"}} 0\n");
            assert!(!text.contains(&none), "{work}: {text}");
        }
        tokio::time::timeout(LIMIT, running.until(async {})).await.unwrap().unwrap();
    }
}
