//! The calls on libibverbs.

use crate::calls::*;
use crate::*;
use harmonaize_shm::Memory;
use rustix::io::Errno;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct Libibverbs;

impl Calls for Libibverbs {
    fn names(&self) -> Result<Vec<String>, Errno> {
        Err(Errno::NOSYS)
    }
    fn open(&self, _name: &str) -> Result<Handle, Errno> {
        Err(Errno::NOSYS)
    }
    fn limits(&self, _context: &Handle) -> Result<Limits, Errno> {
        Err(Errno::NOSYS)
    }
    fn port(&self, _context: &Handle, _port: u8) -> Result<Port, Errno> {
        Err(Errno::NOSYS)
    }
    fn gids(&self, _context: &Handle, _port: u8) -> Result<Vec<GidEntry>, Errno> {
        Err(Errno::NOSYS)
    }
    fn async_fd<'a>(&self, _context: &'a Handle) -> Result<BorrowedFd<'a>, Errno> {
        Err(Errno::NOSYS)
    }
    fn async_event(&self, _context: &Handle) -> Result<Option<AsyncEvent>, Errno> {
        Err(Errno::NOSYS)
    }
    fn domain(&self, _context: &Handle) -> Result<Handle, Errno> {
        Err(Errno::NOSYS)
    }
    fn register(
        &self,
        _domain: &Handle,
        _memory: &Arc<Memory>,
        _access: Access,
    ) -> Result<Registered, Errno> {
        Err(Errno::NOSYS)
    }
    fn completion_queue(&self, _context: &Handle, _entries: u32) -> Result<(Handle, u32), (Call, Errno)> {
        Err((Call::CreateCompletionQueue, Errno::NOSYS))
    }
    fn channel_fd<'a>(&self, _queue: &'a Handle) -> Result<BorrowedFd<'a>, Errno> {
        Err(Errno::NOSYS)
    }
    fn arm(&self, _queue: &Handle) -> Result<(), Errno> {
        Err(Errno::NOSYS)
    }
    fn take_events(&self, _queue: &Handle) -> Result<u32, Errno> {
        Err(Errno::NOSYS)
    }
    fn poll(&self, _queue: &Handle, _into: &mut Vec<Completion>, _most: usize) -> Result<usize, Errno> {
        Err(Errno::NOSYS)
    }
    fn queue_pair(
        &self,
        _domain: &Handle,
        _queue: &Handle,
        _kind: Kind,
        _depths: &Depths,
    ) -> Result<Created, Errno> {
        Err(Errno::NOSYS)
    }
    fn modify(&self, _pair: &Handle, _transition: &Transition<'_>) -> Result<(), Errno> {
        Err(Errno::NOSYS)
    }
    fn post_send(&self, _pair: &Handle, _entries: &[SendEntry]) -> Result<(), Refused> {
        Err(Refused { taken: 0, errno: Errno::NOSYS })
    }
    fn post_receive(&self, _pair: &Handle, _entries: &[ReceiveEntry]) -> Result<(), Refused> {
        Err(Refused { taken: 0, errno: Errno::NOSYS })
    }
    fn address_handle(&self, _domain: &Handle, _gid: Gid, _path: &Path) -> Result<Handle, Errno> {
        Err(Errno::NOSYS)
    }
    fn attach(&self, _pair: &Handle, _group: Gid) -> Result<(), Errno> {
        Err(Errno::NOSYS)
    }
    fn detach(&self, _pair: &Handle, _group: Gid) -> Result<(), Errno> {
        Err(Errno::NOSYS)
    }
}
