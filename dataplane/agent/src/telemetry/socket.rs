//! The Unix socket for operators' tools.

use anyhow::{Context, bail};
use rustix::process::geteuid;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_stream::{Stream, StreamExt};

/// A socket that listens. Its file goes with it.
#[derive(Debug)]
pub(crate) struct Socket {
    listener: UnixListener,
    uids: Vec<u32>,
    file: File,
}

/// Removes the file when dropped.
#[derive(Debug)]
pub(crate) struct File(PathBuf);

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Socket {
    /// Makes the socket, in place of a stale one that a dead agent left. Where this agent `succeeds` another that is about to end, it takes
    /// that one's place too. Only this process's user may connect, and `uids`. Within a tokio runtime.
    pub(crate) fn bind(path: &Path, uids: &[u32], succeeds: bool) -> anyhow::Result<Self> {
        make_room(path, succeeds)?;
        let shown = path.display();
        // Nobody may connect between bind and chmod: a socket takes nobody in before it listens, so it gets another name first.
        let name = path.file_name().with_context(|| format!("{shown} is no file's name"))?.to_string_lossy();
        let hidden = path.with_file_name(format!(".{name}.{}", std::process::id()));
        let _ = std::fs::remove_file(&hidden);
        let listener = UnixListener::bind(&hidden).with_context(|| format!("cannot bind {shown}"))?;
        let made = File(hidden.clone());
        let mode = if uids.is_empty() { 0o600 } else { 0o666 };
        std::fs::set_permissions(&hidden, std::fs::Permissions::from_mode(mode))
            .with_context(|| format!("cannot set the mode of {shown}"))?;
        std::fs::rename(&hidden, path).with_context(|| format!("cannot name {shown}"))?;
        std::mem::forget(made);
        let mut uids = uids.to_vec();
        uids.extend([0, geteuid().as_raw()]);
        Ok(Self { listener, uids, file: File(path.to_owned()) })
    }

    /// Connections of those who may connect; the others are closed at once.
    pub(crate) fn connections(self) -> (impl Stream<Item = std::io::Result<UnixStream>>, File) {
        let Self { listener, uids, file } = self;
        let may = move |stream: &UnixStream| {
            stream.peer_cred().is_ok_and(|peer| {
                let may = uids.contains(&peer.uid());
                if !may {
                    tracing::warn!(uid = peer.uid(), "may not see telemetry");
                }
                may
            })
        };
        let accepted = UnixListenerStream::new(listener);
        let known = accepted.filter_map(move |accepted| match accepted {
            Ok(stream) => may(&stream).then_some(Ok(stream)),
            // Out of descriptors, or the other end is gone already: the next may do better.
            Err(error) => {
                tracing::warn!(%error, "telemetry: a connection was not taken");
                None
            }
        });
        (known, file)
    }
}

/// What has the name is a socket that may be replaced, or nothing at all.
fn make_room(path: &Path, succeeds: bool) -> anyhow::Result<()> {
    let Ok(found) = std::fs::symlink_metadata(path) else { return Ok(()) };
    let shown = path.display();
    if !found.file_type().is_socket() {
        bail!("{shown} is there and no socket");
    }
    if succeeds {
        return Ok(());
    }
    if std::os::unix::net::UnixStream::connect(path).is_ok() {
        bail!("{shown} is another process's, which still listens");
    }
    std::fs::remove_file(path).with_context(|| format!("cannot remove the stale {shown}"))
}
