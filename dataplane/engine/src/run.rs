//! The thread that drives an engine. It works while there is work, spins for a moment, then sleeps on everything that can wake
//! it.
//!
//! Where no operation is under way, what comes by the network are peers' signs of life, one soon after the other where there are many
//! links. The thread would be busy for as long as peers take to give theirs. So it reads what is there, and leaves the rest for a moment.
//! It does so only where all is read, and not where an operator has it spin for longer than that moment.

use crate::wake::Woken;
use crate::{Command, Engine};
use crossbeam::channel::{Receiver, Sender, TrySendError, bounded};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Commands that may wait.
const COMMANDS: usize = 1024;
/// Frames or system calls of the transport per round.
pub(crate) const BUDGET: usize = 64;
/// For how long what comes by the network is left where nobody waits for it.
pub(crate) const DOZE: Duration = Duration::from_millis(1);

/// Why an engine did not take a command, which is within.
#[derive(Debug, thiserror::Error)]
pub enum NotTaken {
    /// As many commands wait as may; try again.
    #[error("the engine does not keep up with its commands")]
    Late(Box<Command>),
    /// Its thread has ended, and takes none any more.
    #[error("the engine has stopped")]
    Stopped(Box<Command>),
}

/// A running engine's thread. Clones reach the same engine.
#[derive(Clone, Debug)]
pub struct Handle {
    commands: Sender<Command>,
    bell: Arc<OwnedFd>,
}

impl Handle {
    /// Gives the engine a command.
    ///
    /// # Errors
    /// If it cannot keep up, or has stopped; the command comes back.
    pub fn command(&self, command: Command) -> Result<(), NotTaken> {
        match self.commands.try_send(command) {
            Ok(()) => {
                // A full counter means that the bell is ringing already.
                let _ = rustix::io::write(&*self.bell, &1_u64.to_ne_bytes());
                Ok(())
            }
            Err(TrySendError::Full(command)) => Err(NotTaken::Late(Box::new(command))),
            Err(TrySendError::Disconnected(command)) => Err(NotTaken::Stopped(Box::new(command))),
        }
    }
}

/// An engine with its queue of commands: what its thread runs, or who drives it by hand.
pub struct Runner {
    engine: Engine,
    commands: Receiver<Command>,
    bell: Arc<OwnedFd>,
}

impl std::fmt::Debug for Runner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Runner").field("commands", &self.commands.len()).finish_non_exhaustive()
    }
}

/// Gives an engine a queue of so many commands; nothing runs yet.
///
/// # Errors
/// If the kernel grants no descriptor.
pub fn prepare(engine: Engine, commands: usize) -> std::io::Result<(Handle, Runner)> {
    let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    crate::wake::watch(engine.wake(), bell.as_fd())?;
    engine.passes.set_bell(&bell);
    let (sender, commands) = bounded(commands);
    Ok((Handle { commands: sender, bell: Arc::clone(&bell) }, Runner { engine, commands, bell }))
}

/// Starts the thread, `engine-` and its number by name. It ends after [`Command::Stop`]. `spin` is how long it looks for work before it sleeps.
///
/// # Errors
/// If the kernel grants no descriptor or no thread.
pub fn start(engine: Engine, number: usize, spin: Duration) -> std::io::Result<(Handle, JoinHandle<()>)> {
    let (handle, runner) = prepare(engine, COMMANDS)?;
    let thread =
        std::thread::Builder::new().name(format!("engine-{number}")).spawn(move || runner.run(spin))?;
    Ok((handle, thread))
}

impl Runner {
    /// One round: all commands that wait, then [`Engine::progress`]. Returns how much was done; none once the engine has stopped.
    pub fn round(&mut self) -> Option<usize> {
        if self.engine.stopped() {
            return None;
        }
        let mut worked = 0;
        while let Ok(command) = self.commands.try_recv() {
            self.engine.handle_command(command);
            worked += 1;
        }
        Some(worked + self.engine.progress(BUDGET))
    }

    /// As [`Engine::sleep_timeout`].
    pub fn sleep_timeout(&mut self) -> Option<Duration> {
        self.engine.sleep_timeout()
    }

    /// Whether the rest may be left for a moment, after a round that did so much. It found some work, and as it seems all of it.
    pub(crate) fn may_doze(&self, worked: usize, spin: Duration) -> bool {
        (1..BUDGET).contains(&worked) && spin < DOZE && self.engine.is_idle()
    }

    fn run(mut self, spin: Duration) {
        let mut idle_since: Option<Instant> = None;
        while let Some(worked) = self.round() {
            if self.engine.is_still() {
                self.engine.passes.busy();
                match self.commands.recv() {
                    Ok(command) => self.engine.handle_command(command),
                    Err(_) => return,
                }
                continue;
            }
            let dozes = self.may_doze(worked, spin);
            if worked > 0 && !dozes {
                self.engine.passes.busy();
                idle_since = None;
                continue;
            }
            // Signs of life keep no thread from helping another.
            self.engine.passes.quiet();
            if self.engine.passes.help() > 0 {
                idle_since = None;
                continue;
            }
            if dozes {
                idle_since = None;
                self.doze();
                continue;
            }
            let since = *idle_since.get_or_insert_with(Instant::now);
            if since.elapsed() < spin {
                std::thread::yield_now();
                continue;
            }
            let quiet = self.engine.prepare_sleep() && self.commands.is_empty();
            let woken = if quiet { sleep(&mut self.engine, &self.bell, None) } else { Woken::default() };
            self.engine.cancel_sleep(&woken);
            idle_since = None;
        }
    }

    /// Sleeps for a moment, which a tenant, a command, another thread's pass or a timer ends, and nothing that comes by the network.
    fn doze(&mut self) {
        let quiet =
            self.engine.prepare_doze() && self.commands.is_empty() && self.engine.attend_network(false);
        let woken = if quiet { sleep(&mut self.engine, &self.bell, Some(DOZE)) } else { Woken::default() };
        if quiet {
            self.engine.attend_network(true);
        }
        self.engine.cancel_sleep(&woken);
    }
}

/// Sleeps until something from outside brings work, or a timer is due, and at most so long.
fn sleep(engine: &mut Engine, bell: &OwnedFd, most: Option<Duration>) -> Woken {
    let patience = engine.sleep_timeout().into_iter().chain(most).min();
    let timeout = patience.map(|patience| Timespec {
        tv_sec: i64::try_from(patience.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: patience.subsec_nanos().into(),
    });
    // What is ready shows in the next round.
    let woken = crate::wake::sleep(engine.wake(), timeout.as_ref());
    let mut count = [0; 8];
    let _ = rustix::io::read(bell, &mut count);
    woken
}
