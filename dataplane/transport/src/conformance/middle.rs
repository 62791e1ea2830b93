//! Somebody between two ends of TCP connections, who changes what crosses them.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

/// What is changed: a bit of one byte in one direction of each connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Of what goes to the end that listens, else of what comes from there.
    pub to_listener: bool,
    /// The byte, counted from the connection's first.
    pub at: u64,
    /// The bit, 0 to 7.
    pub bit: u8,
}

/// Stands on the loopback device where one end believes that the other listens. Ends when dropped, with all its connections.
#[derive(Debug)]
pub struct Middle {
    address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    change: Option<Change>,
    over: AtomicBool,
    changed: AtomicU64,
}

impl Middle {
    /// Between whoever connects and `listener`; without a change everything crosses as it is.
    ///
    /// # Errors
    /// If the loopback device grants no port.
    pub fn new(listener: SocketAddr, change: Option<Change>) -> io::Result<Self> {
        let door = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = door.local_addr()?;
        let shared = Arc::new(Shared { change, over: AtomicBool::new(false), changed: AtomicU64::new(0) });
        let its = Arc::clone(&shared);
        let thread = std::thread::spawn(move || its.serve(&door, listener));
        Ok(Self { address, shared, thread: Some(thread) })
    }

    /// Where to connect to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// How many connections had their byte changed.
    pub fn changed(&self) -> u64 {
        self.shared.changed.load(Ordering::Relaxed)
    }
}

impl Drop for Middle {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
        // Wakes the thread that waits for connections.
        drop(TcpStream::connect(self.address));
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

impl Shared {
    fn serve(self: Arc<Self>, door: &TcpListener, listener: SocketAddr) {
        let (mut open, mut copies) = (Vec::new(), Vec::new());
        while let Ok((near, _)) = door.accept() {
            if self.over.load(Ordering::Relaxed) {
                break;
            }
            let Ok(far) = TcpStream::connect(listener) else { continue };
            for (from, to, to_listener) in [(&near, &far, true), (&far, &near, false)] {
                let (Ok(from), Ok(to)) = (from.try_clone(), to.try_clone()) else { continue };
                let change = self.change.filter(|change| change.to_listener == to_listener);
                let its = Arc::clone(&self);
                copies.push(std::thread::spawn(move || drop(its.copy(from, to, change))));
            }
            open.extend([near, far]);
        }
        for stream in open {
            drop(stream.shutdown(Shutdown::Both));
        }
        for copy in copies {
            drop(copy.join());
        }
    }

    fn copy(&self, mut from: TcpStream, mut to: TcpStream, change: Option<Change>) -> io::Result<()> {
        let (mut room, mut passed) = (vec![0; 64 << 10], 0);
        loop {
            let got = from.read(&mut room)?;
            if got == 0 {
                return to.shutdown(Shutdown::Write);
            }
            let bytes = room.get_mut(..got).unwrap_or_default();
            let byte = change.and_then(|change| Some((change, change.at.checked_sub(passed)?)));
            if let Some((change, at)) = byte
                && let Some(byte) = usize::try_from(at).ok().and_then(|at| bytes.get_mut(at))
            {
                *byte ^= 1 << (change.bit % 8);
                self.changed.fetch_add(1, Ordering::Relaxed);
            }
            passed += got as u64;
            to.write_all(bytes)?;
        }
    }
}
