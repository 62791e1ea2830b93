//! Lets go of attachments' ends beside the poll loop, which others' operations wait for: to unmap a large arena takes its time, and so does a
//! queue pair.

use harmonaize_shm::AgentEnd;
use std::io;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

/// See the module's documentation. Dropped, it waits until all are gone.
#[derive(Debug)]
pub(crate) struct Reaper {
    /// However many wait: who detaches them never does.
    ends: Option<Sender<Box<dyn AgentEnd>>>,
    thread: Option<JoinHandle<()>>,
}

impl Reaper {
    pub(crate) fn begin() -> io::Result<Self> {
        let (ends, gone) = channel::<Box<dyn AgentEnd>>();
        let thread = std::thread::Builder::new().name("detach".into()).spawn(move || {
            for end in gone {
                drop(end);
            }
        })?;
        Ok(Self { ends: Some(ends), thread: Some(thread) })
    }

    /// Drops an end before long.
    pub(crate) fn reap(&self, end: Box<dyn AgentEnd>) {
        if let Some(ends) = &self.ends {
            // Without the thread it is dropped here.
            let _ = ends.send(end);
        }
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        self.ends = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that lets attachments go has panicked");
        }
    }
}
