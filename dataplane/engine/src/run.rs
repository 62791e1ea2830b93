//! The thread that drives an engine: works while there is work, spins for a moment, then sleeps on everything that can wake it.

use crate::{Command, Engine};
use crossbeam::channel::{Receiver, Sender, TrySendError, bounded};
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Commands that may wait.
const COMMANDS: usize = 1024;
/// Frames or system calls of the transport per round.
const BUDGET: usize = 64;

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

/// Starts the thread, `engine-` and its number by name. It ends after [`Command::Stop`]. `spin` is how long it looks for work before it sleeps.
///
/// # Errors
/// If the kernel grants no descriptor or no thread.
pub fn start(engine: Engine, number: usize, spin: Duration) -> std::io::Result<(Handle, JoinHandle<()>)> {
    let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    crate::wake::watch(engine.wake(), bell.as_fd())?;
    let (sender, receiver) = bounded(COMMANDS);
    let handle = Handle { commands: sender, bell: Arc::clone(&bell) };
    let thread = std::thread::Builder::new()
        .name(format!("engine-{number}"))
        .spawn(move || run_loop(engine, &receiver, &bell, spin))?;
    Ok((handle, thread))
}

fn run_loop(mut engine: Engine, commands: &Receiver<Command>, bell: &OwnedFd, spin: Duration) {
    let mut idle_since: Option<Instant> = None;
    while !engine.stopped() {
        let mut worked = 0;
        while let Ok(command) = commands.try_recv() {
            engine.handle_command(command);
            worked += 1;
        }
        if engine.is_still() {
            match commands.recv() {
                Ok(command) => engine.handle_command(command),
                Err(_) => return,
            }
            continue;
        }
        worked += engine.progress(BUDGET);
        if worked > 0 {
            idle_since = None;
            continue;
        }
        let since = *idle_since.get_or_insert_with(Instant::now);
        if since.elapsed() < spin {
            std::thread::yield_now();
            continue;
        }
        if engine.prepare_sleep() && commands.is_empty() {
            sleep(&mut engine, bell);
        }
        engine.cancel_sleep();
        idle_since = None;
    }
}

/// Sleeps until something from outside brings work, or a timer is due.
fn sleep(engine: &mut Engine, bell: &OwnedFd) {
    let timeout = engine.sleep_timeout().map(|patience| Timespec {
        tv_sec: i64::try_from(patience.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: patience.subsec_nanos().into(),
    });
    let mut ready = [MaybeUninit::uninit(); 8];
    // An interrupted sleep is a short one; what is ready shows in the next round.
    let _ = epoll::wait(engine.wake(), &mut ready, timeout.as_ref());
    let mut count = [0; 8];
    let _ = rustix::io::read(bell, &mut count);
}
