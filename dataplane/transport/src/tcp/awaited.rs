//! What the acceptor and the endpoints of one listening address share: who is waited for, and who has come.
//!
//! Endpoints touch it when a link is opened, is up, or ends. No frame does.

use super::bell::Bell;
use super::handshake::{Hello, Proof, Status, VERSION};
use super::incoming::Incoming;
use super::pulse::Pulses;
use super::records::LinkProtection;
use crate::{DownReason, Introduction, LinkRefusal};
use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Most connections that an endpoint has not taken yet; those beyond are closed, and their peers come again.
const MAX_ARRIVALS: usize = 1024;

type Name = [u8; 16];

/// The introductions of all endpoints, and the acceptor's bell.
#[derive(Debug)]
pub(super) struct Awaited {
    table: Mutex<Table>,
    bell: Bell,
    /// Paths for which the acceptor gives signs of life.
    pub(super) pulses: Pulses,
}

#[derive(Debug, Default)]
struct Table {
    /// Links that wait to be connected to, and those that have been.
    links: HashMap<Name, Entry>,
    /// How many links, of either direction, there are with each address.
    addresses: HashMap<IpAddr, usize>,
    /// What was added since the acceptor last looked.
    added: Vec<Name>,
    rejected: Rejected,
    forged: u64,
    over: bool,
}

/// Connections that were closed because control had introduced nobody of their address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rejected {
    /// How many.
    pub count: u64,
    /// Where the last one came from.
    pub last: Option<IpAddr>,
}

#[derive(Debug)]
struct Entry {
    secret: [u8; 32],
    paths: usize,
    protection: LinkProtection,
    up: bool,
    /// Why someone who came was refused.
    trouble: Option<(Status, LinkRefusal)>,
    to: Arc<Arrivals>,
}

/// What is to become of a connection that names a link.
pub(super) enum Admission {
    /// Prove this secret to it.
    Answer([u8; 32]),
    /// Its link is not open here yet.
    Wait,
    Refuse(Status),
}

impl Entry {
    /// Refuses someone who came, and keeps why.
    fn refuse(&mut self, status: Status) -> Admission {
        self.trouble = Some((status, status.refusal(VERSION, self.protection)));
        Admission::Refuse(status)
    }
}

fn judge(hello: &Hello, entry: Option<&mut Entry>) -> Admission {
    let Some(entry) = entry else { return Admission::Wait };
    if entry.up {
        Admission::Refuse(Status::Up)
    } else if usize::from(hello.paths.get()) != entry.paths || usize::from(hello.path.get()) >= entry.paths {
        entry.refuse(Status::Paths)
    } else if hello.protection.get() != entry.protection as u16 {
        let why = LinkRefusal::Protection { ours: entry.protection, theirs: hello.protection.get() };
        let status = Status::of_protection(entry.protection);
        entry.trouble = Some((status, why));
        Admission::Refuse(status)
    } else {
        Admission::Answer(entry.secret)
    }
}

impl Awaited {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { table: Mutex::default(), bell: Bell::new()?, pulses: Pulses::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn bell(&self) -> &Bell {
        &self.bell
    }

    /// Has the acceptor end.
    pub(super) fn end(&self) {
        self.lock().over = true;
        self.bell.ring();
    }

    /// The names that were added since the last call; none at the end.
    pub(super) fn take_added(&self) -> Option<Vec<Name>> {
        let mut table = self.lock();
        (!table.over).then(|| std::mem::take(&mut table.added))
    }

    /// Whether control has introduced a peer of this address for a link that is open; else counts a stranger.
    pub(super) fn admits(&self, address: IpAddr) -> bool {
        let mut table = self.lock();
        let introduced = table.addresses.contains_key(&address);
        if !introduced {
            table.rejected.count += 1;
            table.rejected.last = Some(address);
        }
        introduced
    }

    pub(super) fn rejected(&self) -> Rejected {
        self.lock().rejected
    }

    /// A link was ended by a record that its peer did not make.
    pub(super) fn count_forged(&self) {
        self.lock().forged += 1;
    }

    pub(super) fn forged(&self) -> u64 {
        self.lock().forged
    }

    /// What is to become of a connection that says hello.
    pub(super) fn judge(&self, hello: &Hello) -> Admission {
        judge(hello, self.lock().links.get_mut(&hello.name))
    }

    /// The endpoint to which a connection with this proof goes.
    ///
    /// # Errors
    /// What to refuse it with.
    pub(super) fn verify(
        &self,
        hello: &Hello,
        proof: &Proof,
        nonce: &[u8; 32],
    ) -> Result<Arc<Arrivals>, Status> {
        let mut table = self.lock();
        let entry = table.links.get_mut(&hello.name).ok_or(Status::UnknownName)?;
        if let Admission::Refuse(status) = judge(hello, Some(entry)) {
            return Err(status);
        }
        if proof.proves(&entry.secret, hello, nonce) {
            return Ok(Arc::clone(&entry.to));
        }
        if entry.trouble.as_ref().is_none_or(|(status, _)| *status != Status::Secret) {
            tracing::warn!(link = ?hello.name, "a connection with a wrong secret was refused");
        }
        entry.refuse(Status::Secret);
        Err(Status::Secret)
    }
}

/// A link that is open, as the acceptor knows it; dropped, it is forgotten there.
#[derive(Debug)]
pub(super) struct Expected {
    awaited: Arc<Awaited>,
    name: Name,
    peer: IpAddr,
    /// Whether the peer connects.
    accepts: bool,
}

impl Expected {
    /// Lets the peer's connections in; those that prove the introduction come to `to`.
    ///
    /// # Errors
    /// If an endpoint waits for one of this name already.
    pub(super) fn enter(
        awaited: &Arc<Awaited>,
        introduction: &Introduction,
        protection: LinkProtection,
        to: &Arc<Arrivals>,
    ) -> Result<Self, DownReason> {
        let Introduction { name, secret, peer, initiate, source_ports, over_tcp: _ } = introduction;
        let mut table = awaited.lock();
        if !initiate {
            if table.links.contains_key(name) {
                return Err(DownReason::Taken);
            }
            let (paths, to) = (source_ports.len(), Arc::clone(to));
            let entry = Entry { secret: *secret, paths, protection, up: false, trouble: None, to };
            table.links.insert(*name, entry);
            table.added.push(*name);
        }
        let peer = peer.ip().to_canonical();
        *table.addresses.entry(peer).or_default() += 1;
        drop(table);
        if !initiate {
            awaited.bell.ring();
        }
        Ok(Self { awaited: Arc::clone(awaited), name: *name, peer, accepts: !initiate })
    }

    /// The link is up: who comes now is too late.
    pub(super) fn set_up(&self) {
        if self.accepts
            && let Some(entry) = self.awaited.lock().links.get_mut(&self.name)
        {
            entry.up = true;
        }
    }

    /// Why someone who came was refused.
    pub(super) fn trouble(&self) -> Option<DownReason> {
        let table = self.awaited.lock();
        let (_, why) = table.links.get(&self.name).filter(|_| self.accepts)?.trouble.as_ref()?;
        Some(DownReason::Refused(why.clone()))
    }
}

impl Drop for Expected {
    fn drop(&mut self) {
        let mut table = self.awaited.lock();
        if self.accepts {
            table.links.remove(&self.name);
        }
        if let Some(count) = table.addresses.get_mut(&self.peer) {
            *count -= 1;
            if *count == 0 {
                table.addresses.remove(&self.peer);
            }
        }
    }
}

/// Connections that have proved an introduction of one endpoint, which it has not taken yet.
#[derive(Debug)]
pub(super) struct Arrivals {
    arrived: Mutex<Vec<(Incoming, Hello)>>,
    bell: Bell,
}

impl Arrivals {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { arrived: Mutex::default(), bell: Bell::new()? })
    }

    pub(super) fn bell(&self) -> &Bell {
        &self.bell
    }

    /// Hands the endpoint a connection.
    pub(super) fn push(&self, guest: Incoming, hello: Hello) {
        let mut arrived = self.arrived.lock().unwrap_or_else(PoisonError::into_inner);
        if arrived.len() < MAX_ARRIVALS {
            arrived.push((guest, hello));
            drop(arrived);
            self.bell.ring();
        }
    }

    /// All that have come since the last call.
    pub(super) fn take(&self) -> Vec<(Incoming, Hello)> {
        self.bell.silence();
        std::mem::take(&mut *self.arrived.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
