//! Putting the programs on interfaces, following interfaces that go and come back, and taking the programs off.

use crate::error::{Error, chain};
use crate::netlink;
use crate::programs::{Programs, classifier, program_name};
use crate::sys;
use aya::programs::links::{Link, LinkOrder};
use aya::programs::tc::{self, NlOptions, SchedClassifierLink, TcAttachOptions};
use aya::programs::{ProgramError, TcAttachType};
use harmonaize_events::{Direction, InterfaceTotals};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with};
use std::os::fd::OwnedFd;

/// How the programs are held on an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttachMode {
    /// Links that end with the process that holds them.
    Tcx,
    /// Filters of the clsact queueing discipline. They outlive a process that is killed, until the programs are attached
    /// to the interface again, which removes those left behind. One process at a time has them there.
    Clsact,
}

/// The programs on one interface.
#[derive(Debug)]
pub(crate) struct Attachment {
    index: u32,
    hook: AttachMode,
    links: Vec<SchedClassifierLink>,
    /// The program on XDP, until it is dropped.
    xdp: Option<OwnedFd>,
    /// The queueing discipline was not there before.
    discipline: bool,
    /// With clsact: that nobody else has filters there, until it is dropped.
    _sole: Option<OwnedFd>,
}

/// What happened to an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// It is gone, and its programs with it. What had crossed it is here for the last time.
    Detached {
        /// Its name.
        name: String,
        /// The index that it had.
        index: u32,
        /// What had crossed it.
        totals: Box<InterfaceTotals>,
    },
    /// An interface of its name is there again and has the programs: what crossed it meanwhile was not seen.
    Reattached {
        /// Its name.
        name: String,
        /// Its index now.
        index: u32,
    },
}

impl Programs {
    /// Attaches the programs to an interface of the calling thread's network namespace, and returns its index.
    ///
    /// # Errors
    /// There is no such interface, it has the programs already, or the kernel refuses.
    pub fn attach(&mut self, name: &str) -> Result<u32, Error> {
        if self.attachments.contains_key(name) {
            return Err(Error::Attached { name: name.to_owned() });
        }
        let index = index_of(name)?;
        // Listed first, or the first packets would be on an unknown interface.
        self.register(index)?;
        match self.hook(name, index) {
            Ok(attachment) => {
                self.attachments.insert(name.to_owned(), attachment);
                Ok(index)
            }
            Err(error) => {
                self.unregister(index)?;
                Err(error)
            }
        }
    }

    /// Takes the programs off an interface, and returns what had crossed it. Flows stay until they are read and forgotten.
    ///
    /// # Errors
    /// It does not have them, or the kernel refuses.
    pub fn detach(&mut self, name: &str) -> Result<InterfaceTotals, Error> {
        let not = || Error::NotAttached { name: name.to_owned() };
        let attachment = self.attachments.remove(name).ok_or_else(not)?;
        let index = attachment.index;
        let there = index_of(name).is_ok_and(|now| now == index);
        let taken = attachment.detach(there).map_err(|error| refused(name, &error));
        let totals = self.unregister(index)?;
        taken.map(|()| totals)
    }

    /// The interfaces that have the programs: name, index, and how.
    pub fn attached(&self) -> impl Iterator<Item = (&str, u32, AttachMode)> {
        self.attachments.iter().map(|(name, attachment)| (name.as_str(), attachment.index, attachment.hook))
    }

    /// Looks after interfaces that are gone or were replaced by others of their name, in the calling thread's network
    /// namespace. An interface that is gone is attached again by `attach` once it is back, or here if it is back already.
    ///
    /// # Errors
    /// As for [`Programs::attach`]; a later call goes on.
    pub fn refresh(&mut self) -> Result<Vec<Change>, Error> {
        let moved: Vec<(String, u32)> = self
            .attachments
            .iter()
            .filter(|(name, attachment)| index_of(name).ok() != Some(attachment.index))
            .map(|(name, attachment)| (name.clone(), attachment.index))
            .collect();
        let mut changes = Vec::new();
        for (name, index) in moved {
            // Nothing to take off: its programs went with it.
            drop(self.attachments.remove(&name).map(|attachment| attachment.detach(false)));
            let totals = Box::new(self.unregister(index)?);
            changes.push(Change::Detached { name: name.clone(), index, totals });
            match self.attach(&name) {
                Ok(index) => changes.push(Change::Reattached { name, index }),
                Err(Error::NoInterface { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(changes)
    }

    fn hook(&mut self, name: &str, index: u32) -> Result<Attachment, Error> {
        let hook = if self.kernel.tcx && !self.clsact { AttachMode::Tcx } else { AttachMode::Clsact };
        let mut discipline = false;
        let mut sole = None;
        if hook == AttachMode::Clsact {
            // Whose filters are there already is not said by them: those of who lives would be taken for left behind.
            sole = Some(claim(name, index)?);
            // Ours if it was not there; it may also be one that was left behind with our filters.
            discipline = tc::qdisc_add_clsact(name).is_ok();
            for direction in [Direction::Ingress, Direction::Egress] {
                let stray = tc::qdisc_detach_program(name, side(direction), program_name(direction));
                discipline |= stray.is_ok();
            }
        }
        let early = if self.xdp { Some(self.attach_xdp_program(name, index)?) } else { None };
        let mut attachment =
            Attachment { index, hook, links: Vec::new(), xdp: early, discipline, _sole: sole };
        for direction in [Direction::Ingress, Direction::Egress] {
            if attachment.xdp.is_some() && direction == Direction::Ingress {
                continue;
            }
            let program = classifier(&mut self.ebpf, program_name(direction))?;
            let options = match hook {
                AttachMode::Tcx => TcAttachOptions::TcxOrder(LinkOrder::default()),
                AttachMode::Clsact => TcAttachOptions::Netlink(NlOptions::default()),
            };
            let link = program
                .attach_with_options(name, side(direction), options)
                .and_then(|id| program.take_link(id));
            match link {
                Ok(link) => attachment.links.push(link),
                Err(error) => {
                    let error = refused(name, &error);
                    drop(attachment.detach(true));
                    return Err(error);
                }
            }
        }
        Ok(attachment)
    }

    /// Attaches the program on XDP, in the device's driver. Where that cannot, it attaches it in the stack's own path before all
    /// else.
    fn attach_xdp_program(&mut self, name: &str, index: u32) -> Result<OwnedFd, Error> {
        let program = self.xdp_program()?;
        sys::attach_xdp(program, index, false)
            .or_else(|_| sys::attach_xdp(program, index, true))
            .map_err(|error| Error::Attach { name: name.to_owned(), reason: format!("XDP: {error}") })
    }
}

impl Attachment {
    /// Removes the programs, and the queueing discipline if it came with them and nobody else uses it by now.
    fn detach(mut self, there: bool) -> Result<(), ProgramError> {
        let mut done = Ok(());
        drop(self.xdp.take());
        for link in self.links.drain(..) {
            let detached = link.detach();
            if there {
                done = done.and(detached);
            }
        }
        if there && self.discipline {
            let removed = netlink::remove_unused_clsact(self.index);
            done = done.and(removed.map_err(ProgramError::IOError));
        }
        done
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        for name in self.attachments.keys().cloned().collect::<Vec<_>>() {
            drop(self.detach(&name));
        }
    }
}

/// Claims an interface of this network namespace, with a socket bound to a name. The kernel lets one process have that name,
/// while it lives.
fn claim(name: &str, index: u32) -> Result<OwnedFd, Error> {
    let failed = |reason: String| Error::Attach { name: name.to_owned(), reason };
    let call = |error: rustix::io::Errno| match error {
        rustix::io::Errno::ADDRINUSE => failed("another process measures it, by clsact".to_owned()),
        error => failed(format!("claiming it: {error}")),
    };
    let claimed = format!("harmonaize-telemetry/{index}");
    let address = SocketAddrUnix::new_abstract_name(claimed.as_bytes()).map_err(call)?;
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
    let socket = socket.map_err(call)?;
    bind(&socket, &address).map_err(call)?;
    Ok(socket)
}

fn side(direction: Direction) -> TcAttachType {
    match direction {
        Direction::Ingress => TcAttachType::Ingress,
        Direction::Egress => TcAttachType::Egress,
    }
}

fn index_of(name: &str) -> Result<u32, Error> {
    netlink::index_of(name).map_err(|_| Error::NoInterface { name: name.to_owned() })
}

fn refused(name: &str, error: &ProgramError) -> Error {
    Error::Attach { name: name.to_owned(), reason: chain(error) }
}
