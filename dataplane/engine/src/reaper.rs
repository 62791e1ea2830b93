//! Lets go of attachments' ends and memory beside the poll loop, which others' operations wait for. To unmap a large arena takes its time,
//! and so does a queue pair.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

/// See the module's documentation. Dropped, it waits until all are gone.
#[derive(Debug)]
pub(crate) struct Reaper {
    /// However many wait: who detaches them never does.
    gone: Option<Sender<Box<dyn Send>>>,
    thread: Option<JoinHandle<()>>,
}

impl Reaper {
    pub(crate) fn begin() -> io::Result<Self> {
        let (sender, gone) = channel::<Box<dyn Send>>();
        let thread = std::thread::Builder::new().name("detach".into()).spawn(move || {
            for one in gone {
                if catch_unwind(AssertUnwindSafe(move || drop(one))).is_err() {
                    tracing::error!("an attachment's end panicked as it went; what it held may stay");
                }
            }
        })?;
        Ok(Self { gone: Some(sender), thread: Some(thread) })
    }

    /// Drops something before long.
    pub(crate) fn reap(&self, gone: impl Send + 'static) {
        if let Some(sender) = &self.gone {
            // Without the thread it is dropped here.
            let _ = sender.send(Box::new(gone));
        }
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        self.gone = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that lets attachments go has panicked");
        }
    }
}
