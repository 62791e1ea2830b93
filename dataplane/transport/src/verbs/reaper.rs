//! Destroys queue pairs beside the endpoint's thread, which others' links wait for. A driver may need long for it. rxe waits for
//! packets that still hold on to it, up to 200 ticks of the kernel's clock, and once a port is down they do.

use super::path::Path;
use std::io;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

/// See the module's documentation. Dropped, it waits until all are destroyed.
#[derive(Debug)]
pub(super) struct Reaper {
    /// However many wait: who ends them never does.
    paths: Option<Sender<Path>>,
    thread: Option<JoinHandle<()>>,
}

impl Reaper {
    pub(super) fn begin() -> io::Result<Self> {
        let (paths, stopped) = channel::<Path>();
        let thread = std::thread::Builder::new().name("reaper".into()).spawn(move || {
            for path in stopped {
                drop(path);
            }
        })?;
        Ok(Self { paths: Some(paths), thread: Some(thread) })
    }

    /// Releases what a path holds, and destroys it before long.
    pub(super) fn destroy(&self, mut path: Path) {
        path.stop();
        path.release();
        if let Some(paths) = &self.paths {
            // Without the thread it is destroyed here.
            let _ = paths.send(path);
        }
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        self.paths = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that destroys queue pairs has panicked");
        }
    }
}
