//! Which of several controls leads: the one whose record lives by a lease that it keeps.

use super::client::{Client, Members};
use super::wire::{KeyValue, Transaction};
use super::{
    Etcd, FORMAT, FORMAT_KEY, LEADER, WRITTEN, check_format, created, failed, find, get, mark, put, read,
    silent,
};
use crate::{StoreError, Stored};
use std::time::Duration;
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep, timeout, timeout_at};

/// How long a leader that is silent stays one, in seconds. It is the least that etcd gives with its usual election timeout.
const LEASE_SECONDS: i64 = 2;
const LEASE: Duration = Duration::from_secs(LEASE_SECONDS.unsigned_abs());
/// The pause between two signs of life of a leader.
const RENEWAL: Duration = Duration::from_millis(500);
/// The pause between two looks of who follows.
const POLL: Duration = Duration::from_millis(100);
/// How long the end of a leader's lease may take when it goes down.
const RESIGNATION: Duration = Duration::from_secs(1);

/// The time in which one control leads. Whatever it writes is refused once the time is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Term {
    /// That at which the leader's record was made.
    pub(super) revision: i64,
    pub(super) lease: i64,
}

/// What a control is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// Another leads, which has this name, or nobody is known to.
    Follows(Option<String>),
    /// It leads.
    Leads(Term),
}

/// Takes part in the election of a leader as long as it lives. Dropping it ends its own lead at once.
#[derive(Debug)]
pub struct Election {
    client: Client,
    role: watch::Receiver<Role>,
    /// Dropped, it ends the thread.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Election {
    /// Begins to take part, as `name`, on a thread of its own: nothing that control computes makes it late.
    ///
    /// # Errors
    /// Where the system gives no thread.
    pub fn join(members: Members, name: String) -> Result<Self, StoreError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| failed(&error))?;
        let client = Client::new(members, runtime.handle().clone());
        let (roles, role) = watch::channel(Role::Follows(None));
        let (stop, stopped) = oneshot::channel();
        let candidate = Candidate { client: client.clone(), name, roles, lease: None };
        let run = move || runtime.block_on(candidate.run(stopped));
        let thread = std::thread::Builder::new().name("election".to_owned()).spawn(run);
        let thread = Some(thread.map_err(|error| failed(&error))?);
        Ok(Self { client, role, stop: Some(stop), thread })
    }

    /// What this control is, from now on.
    pub fn role(&self) -> watch::Receiver<Role> {
        self.role.clone()
    }

    /// Reads what is stored, whoever leads.
    pub fn reader(&self) -> Reader {
        Reader { client: self.client.clone() }
    }

    /// The store of a term.
    pub fn store(&self, term: Term) -> Etcd {
        Etcd::new(self.client.clone(), term)
    }
}

/// Reads what is stored, as long as the [`Election`] lives that gave it.
#[derive(Clone, Debug)]
pub struct Reader {
    client: Client,
}

impl Reader {
    /// All that is stored, as of now.
    ///
    /// # Errors
    /// Where etcd does not answer, or a record makes no sense.
    pub async fn read(&self) -> Result<Stored, StoreError> {
        read(&self.client).await
    }
}

impl Drop for Election {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It has printed why it panicked.
            let _ = thread.join();
        }
    }
}

struct Candidate {
    client: Client,
    name: String,
    roles: watch::Sender<Role>,
    /// Its last one, if that may be in force still.
    lease: Option<i64>,
}

impl Candidate {
    async fn run(mut self, mut stopped: oneshot::Receiver<()>) {
        let mut told = String::new();
        loop {
            let stand = tokio::select! {
                stand = self.stand() => stand,
                _ = &mut stopped => break,
            };
            let (role, why) = match stand {
                Ok((Role::Leads(term), until)) => {
                    self.roles.send_replace(Role::Leads(term));
                    let why = tokio::select! {
                        why = keep(&self.client, term, until) => why,
                        _ = &mut stopped => break,
                    };
                    (Role::Follows(None), why)
                }
                Ok((role, _)) => (role, String::new()),
                Err(error) => (Role::Follows(None), error.to_string()),
            };
            if !why.is_empty() && why != told {
                tracing::warn!(%why, "this control does not lead");
            }
            told = why;
            self.roles.send_if_modified(|known| {
                let changed = *known != role;
                *known = role;
                changed
            });
            if timeout(POLL, &mut stopped).await.is_ok() {
                break;
            }
        }
        self.roles.send_replace(Role::Follows(None));
        if let Some(lease) = self.lease {
            let _ = timeout(RESIGNATION, self.client.revoke(lease)).await;
        }
    }

    /// Looks who leads, and begins to where nobody does; until when that is certain.
    async fn stand(&mut self) -> Result<(Role, Instant), StoreError> {
        let follows =
            |leader: &KeyValue| Role::Follows(Some(String::from_utf8_lossy(&leader.value).into_owned()));
        let look = Transaction { success: vec![get(LEADER), get(FORMAT_KEY)], ..Transaction::default() };
        let found = self.client.transact(look).await.map_err(|status| silent(&status))?;
        check_format(find(&found, 1))?;
        if let Some(leader) = find(&found, 0) {
            if self.lease == Some(leader.lease) {
                // Its own of a term that it has given up.
                self.client.revoke(leader.lease).await.map_err(|status| silent(&status))?;
                self.lease = None;
            }
            return Ok((follows(leader), Instant::now()));
        }
        let until = Instant::now() + LEASE;
        let granted = self.client.grant(LEASE_SECONDS).await.map_err(|status| silent(&status))?;
        self.lease = Some(granted.id);
        let begin = Transaction {
            compare: vec![created(LEADER, 0)],
            success: vec![
                put(LEADER, self.name.clone().into_bytes(), granted.id),
                put(WRITTEN, mark(granted.id, 0), 0),
                put(FORMAT_KEY, FORMAT.to_string().into_bytes(), 0),
            ],
            failure: vec![get(LEADER)],
        };
        let reply = self.client.transact(begin).await.map_err(|status| silent(&status))?;
        if !reply.succeeded {
            return Ok((find(&reply, 0).map_or(Role::Follows(None), follows), until));
        }
        let revision = reply.header.map_or(0, |header| header.revision);
        Ok((Role::Leads(Term { revision, lease: granted.id }), until))
    }
}

/// Keeps a leader's lease for as long as that succeeds in time; returns why it is over.
async fn keep(client: &Client, term: Term, mut until: Instant) -> String {
    let mut why = "etcd has not answered in time".to_owned();
    let mut pause = RENEWAL;
    loop {
        let asked = Instant::now();
        match timeout_at(until, client.keep(term.lease)).await {
            Ok(Ok(true)) => (until, pause) = (asked + LEASE, RENEWAL),
            Ok(Ok(false)) => return "its lease is over".to_owned(),
            Ok(Err(status)) => (why, pause) = (status.message().to_owned(), POLL),
            Err(_) => {}
        }
        if timeout_at(until, sleep(pause)).await.is_err() {
            return why;
        }
    }
}
