//! The engine's threads: which of them serves whom, and what all of them say together.
//!
//! Each thread has an engine and a transport of its own; they share nothing that an operation touches. All attachments of a tenant
//! go to one thread, so that the local ranks of a communicator meet there, and its communicators share one window to aggregators.

use crate::counters::{Counted, Counters};
use harmonaize_engine::{Command, Handle, NotTaken, Status};
use std::collections::{HashMap, VecDeque};

/// One of the engine's threads, by its number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Thread(usize);

/// All of them.
#[derive(Debug)]
pub struct Engines {
    threads: Vec<EngineThread>,
    counters: Counters,
    placement: Placement,
    pending: HashMap<u64, Gathering>,
    /// The number under which threads were last asked for their status.
    last_request: u64,
}

/// A thread, and commands that it has no room for yet, in order. Whoever gives more of them waits meanwhile: see
/// [`Engines::is_late`].
#[derive(Debug)]
struct EngineThread {
    handle: Handle,
    waiting: VecDeque<Command>,
}

/// A status that not all threads have told yet.
#[derive(Debug)]
struct Gathering {
    /// What control calls it.
    id: u64,
    missing: usize,
    status: Status,
}

impl Engines {
    /// These threads, which run.
    pub fn new(threads: Vec<Handle>, counters: Counters) -> Self {
        let placement = Placement::new(threads.len());
        let threads = threads.into_iter().map(|handle| EngineThread { handle, waiting: VecDeque::new() });
        Self { threads: threads.collect(), counters, placement, pending: HashMap::new(), last_request: 0 }
    }

    /// Counts an attachment of a tenant; the thread that it belongs to.
    pub fn place(&mut self, tenant: &str) -> Thread {
        Thread(self.placement.place(tenant))
    }

    /// Counts an attachment of a tenant that is on this thread.
    pub fn place_on(&mut self, tenant: &str, thread: Thread) {
        self.placement.place_on(tenant, thread.0);
    }

    /// How many threads there are.
    pub fn count(&self) -> usize {
        self.threads.len()
    }

    /// Gives every thread a command, made for its number; whether all took it.
    pub fn command_all(&mut self, mut command: impl FnMut(usize) -> Command) -> bool {
        let given = (0..self.threads.len()).map(|number| self.command(Thread(number), command(number)));
        given.filter(|taken| !taken).count() == 0
    }

    /// An attachment of a tenant has ended.
    pub fn release(&mut self, tenant: &str) {
        self.placement.release(tenant);
    }

    /// Gives a thread a command, behind those before it. A thread that is late takes it later; false if it has ended.
    pub fn command(&mut self, thread: Thread, command: Command) -> bool {
        let Some(thread) = self.threads.get_mut(thread.0) else { return false };
        let given = match thread.waiting.is_empty() {
            true => thread.handle.command(command),
            false => Err(NotTaken::Late(Box::new(command))),
        };
        match given {
            Ok(()) => true,
            Err(NotTaken::Late(command)) => {
                if thread.waiting.is_empty() {
                    tracing::warn!("a thread of the engine does not keep up; tenants' requests wait for it");
                }
                self.counters.add(Counted::CommandLate);
                thread.waiting.push_back(*command);
                true
            }
            Err(NotTaken::Stopped(command)) => {
                tracing::error!(?command, "a thread of the engine has ended; a command is lost");
                self.counters.add(Counted::CommandLost);
                false
            }
        }
    }

    /// Whether commands wait for a thread: nothing that leads to more of them is to be taken in.
    pub fn is_late(&self) -> bool {
        self.threads.iter().any(|thread| !thread.waiting.is_empty())
    }

    /// Gives threads what waits for them, as far as they take it.
    pub fn flush(&mut self) {
        for thread in &mut self.threads {
            while let Some(command) = thread.waiting.pop_front() {
                match thread.handle.command(command) {
                    Ok(()) => {}
                    Err(NotTaken::Late(command)) => {
                        thread.waiting.push_front(*command);
                        break;
                    }
                    Err(NotTaken::Stopped(command)) => {
                        tracing::error!(?command, "a thread of the engine has ended; a command is lost");
                        self.counters.add(Counted::CommandLost);
                    }
                }
            }
        }
    }

    /// Asks all threads for their status, which [`Engines::gather`] puts together under `id`; whether all took it.
    pub fn ask_status(&mut self, id: u64) -> bool {
        self.last_request += 1;
        let request = self.last_request;
        let threads = (0..self.threads.len()).map(Thread);
        let missing = threads.filter(|thread| self.command(*thread, Command::Status { id: request })).count();
        if missing > 0 {
            self.pending.insert(request, Gathering { id, missing, status: Status::default() });
        }
        missing == self.threads.len()
    }

    /// Takes in a thread's status. With the last missing one it returns the status of all, under the id that it was
    /// asked for by.
    pub fn gather(&mut self, request: u64, status: Status) -> Option<(u64, Status)> {
        let gathering = self.pending.get_mut(&request)?;
        gathering.missing -= 1;
        gathering.status.communicators.extend(status.communicators);
        gathering.status.attachments.extend(status.attachments);
        if gathering.missing > 0 {
            return None;
        }
        self.pending.remove(&request).map(|gathering| (gathering.id, gathering.status))
    }

    /// Has all threads end.
    pub fn stop(&mut self) {
        for thread in (0..self.threads.len()).map(Thread) {
            self.command(thread, Command::Stop);
        }
    }
}

/// Which thread a tenant is on: from its first attachment to its last, that which had the fewest attachments then.
#[derive(Debug)]
struct Placement {
    /// Attachments of each thread.
    threads: Vec<usize>,
    /// Of each tenant that is attached, its thread and how many attachments it has.
    tenants: HashMap<String, (usize, usize)>,
}

impl Placement {
    fn new(threads: usize) -> Self {
        Self { threads: vec![0; threads], tenants: HashMap::new() }
    }

    fn place(&mut self, tenant: &str) -> usize {
        let thread = match self.tenants.get_mut(tenant) {
            Some((thread, count)) => {
                *count += 1;
                *thread
            }
            None => {
                let least = self.threads.iter().enumerate().min_by_key(|(_, count)| **count);
                let thread = least.map_or(0, |(thread, _)| thread);
                self.tenants.insert(tenant.to_owned(), (thread, 1));
                thread
            }
        };
        if let Some(count) = self.threads.get_mut(thread) {
            *count += 1;
        }
        thread
    }

    fn place_on(&mut self, tenant: &str, thread: usize) {
        self.tenants.entry(tenant.to_owned()).or_insert((thread, 0));
        self.place(tenant);
    }

    fn release(&mut self, tenant: &str) {
        let Some((thread, count)) = self.tenants.get_mut(tenant) else { return };
        *count -= 1;
        if let Some(of_thread) = self.threads.get_mut(*thread) {
            *of_thread -= 1;
        }
        if *count == 0 {
            self.tenants.remove(tenant);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_engine::{AttachmentId, AttachmentStatus, Engine, start};
    use harmonaize_transport::loopback::Hub;
    use std::sync::mpsc::{channel, sync_channel};
    use std::time::Duration;

    #[test]
    fn a_tenant_stays_on_the_thread_with_the_fewest() {
        let mut placement = Placement::new(3);
        let places = ["a", "a", "a", "b", "b", "c", "d", "a", "d"].map(|tenant| placement.place(tenant));
        assert_eq!(places, [0, 0, 0, 1, 1, 2, 2, 0, 2]);
        assert_eq!(placement.threads, [4, 2, 3]);
    }

    #[test]
    fn with_its_last_attachment_a_tenant_is_free() {
        let mut placement = Placement::new(2);
        assert_eq!(["a", "a", "b", "b"].map(|tenant| placement.place(tenant)), [0, 0, 1, 1]);
        placement.release("a");
        placement.release("b");
        placement.release("nobody");
        assert_eq!(["b", "b", "b"].map(|tenant| placement.place(tenant)), [1, 1, 1]);
        placement.release("a");
        (0..4).for_each(|_| placement.release("b"));
        assert_eq!(placement.threads, [0, 0]);
        assert_eq!(["b", "a"].map(|tenant| placement.place(tenant)), [0, 1]);
    }

    #[test]
    fn the_status_is_the_union_of_all_threads() {
        let (notices, heard) = channel();
        let hub = Hub::new();
        let (mut threads, mut running) = (Vec::new(), Vec::new());
        for number in 0..2 {
            let notices = notices.clone();
            let notify = Box::new(move |notice| notices.send(notice).unwrap());
            let engine = Engine::new(Box::new(hub.endpoint().unwrap()), notify).unwrap();
            let (thread, end) = start(engine, number, Duration::ZERO).unwrap();
            assert_eq!(end.thread().name(), Some(format!("engine-{number}").as_str()));
            threads.push(thread);
            running.push(end);
        }
        let mut engines = Engines::new(threads, Counters::default());
        assert!(engines.ask_status(70) && engines.ask_status(70));
        let mut told = Vec::new();
        for _ in 0..4 {
            let harmonaize_engine::Notice::Status { id, mut status } = heard.recv().unwrap() else {
                panic!()
            };
            let attachment = AttachmentId(id);
            status.attachments.push(AttachmentStatus { attachment, arena_bytes: 0, in_flight: 0 });
            told.extend(engines.gather(id, status).map(|(id, status)| (id, status.attachments.len())));
        }
        assert_eq!(told, [(70, 2), (70, 2)]);
        assert!(engines.pending.is_empty());
        engines.stop();
        running.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(!engines.ask_status(71) && engines.pending.is_empty());
    }

    #[test]
    fn a_late_thread_gets_every_command_in_order() {
        const COMMANDS: u64 = 3000;
        let (notices, heard) = sync_channel(0);
        let notify = Box::new(move |notice| notices.send(notice).unwrap());
        let engine = Engine::new(Box::new(Hub::new().endpoint().unwrap()), notify).unwrap();
        let (handle, thread) = start(engine, 0, Duration::ZERO).unwrap();
        let counters = Counters::default();
        let mut engines = Engines::new(vec![handle], counters.clone());
        // The thread waits in its first notice, so that no more than its queue holds is taken.
        for id in 0..COMMANDS {
            assert!(engines.command(Thread(0), Command::Status { id }));
        }
        assert!(engines.is_late());
        let late = counters.get(Counted::CommandLate);
        assert!((1000..COMMANDS).contains(&late), "{late} are late");
        for expected in 0..COMMANDS {
            let harmonaize_engine::Notice::Status { id, .. } = heard.recv().unwrap() else { panic!() };
            assert_eq!(id, expected);
            engines.flush();
        }
        assert!(!engines.is_late());
        engines.stop();
        thread.join().unwrap();
        assert!(!engines.command(Thread(0), Command::Stop));
        assert_eq!(counters.get(Counted::CommandLost), 1);
    }
}
