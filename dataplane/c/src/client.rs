//! Attaching to the agent.

use crate::error::{Failure, call, create, free, given, result, text_if_any};
use crate::options::{SizeFirst, duration, read};
use crate::status::harmonaize_status_t;
use harmonaize_client::{Access, AttachOptions, Client, Place};
use std::ffi::c_char;
use std::mem::MaybeUninit;

/// How the agent reaches tensors: both map the arena.
pub const HARMONAIZE_ACCESS_MAPPED: u32 = 0;
/// Nothing is mapped: tensors travel over the socket.
pub const HARMONAIZE_ACCESS_REMOTE: u32 = 1;

/// An attachment to the agent. Any thread may use it, at the same time as others. It ends when it and all that came of it are
/// freed, in whichever order.
///
/// It belongs to the process that attached. In a child by `fork` every function answers `HARMONAIZE_ERROR_FORKED`, but
/// for those that free, which then do nothing to the parent's.
pub struct harmonaize_client_t(pub(crate) Client);

/// How to attach. What is 0 is as usual.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct harmonaize_attach_options_t {
    /// `sizeof` of this structure.
    pub size: usize,
    /// How the agent reaches tensors: `HARMONAIZE_ACCESS_...`.
    pub access: u32,
    /// Most operations in flight, a power of two; 64 as usual.
    pub entries: u32,
    /// Bytes for all tensors together, at first; 64 MiB as usual.
    pub arena_bytes: u64,
    /// Bytes up to which the arena grows by itself; as usual up to the tenant's quota. 1: it does not grow.
    pub max_arena_bytes: u64,
    /// Nanoseconds that waiting spins before it sleeps; 50 us as usual.
    pub spin_ns: u64,
    /// Nanoseconds that each answer of the agent may take during the handshake; 10 s as usual.
    pub timeout_ns: u64,
}

// SAFETY: integers, of which the first is the size.
unsafe impl SizeFirst for harmonaize_attach_options_t {}

impl harmonaize_attach_options_t {
    fn options(&self) -> Result<AttachOptions, Failure> {
        let access = match self.access {
            HARMONAIZE_ACCESS_MAPPED => Access::Mapped,
            HARMONAIZE_ACCESS_REMOTE => Access::Remote,
            other => return Err(Failure::argument(format!("{other} is no access"))),
        };
        let mut options = AttachOptions { access, ..AttachOptions::default() };
        if self.entries > 0 {
            options.entries = self.entries;
        }
        if self.arena_bytes > 0 {
            options.arena_bytes = self.arena_bytes;
        }
        if self.max_arena_bytes > 0 {
            options.max_arena_bytes = self.max_arena_bytes;
        }
        options.spin = duration(self.spin_ns).unwrap_or(options.spin);
        options.timeout = duration(self.timeout_ns).unwrap_or(options.timeout);
        Ok(options)
    }
}

/// Attaches to the agent through its socket. Without a path the environment names it: `HARMONAIZE_SOCKET`. Without options
/// everything is as usual. Blocks until the agent has answered.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_attach(
    socket: *const c_char,
    options: *const harmonaize_attach_options_t,
    client: Option<&mut MaybeUninit<Option<Box<harmonaize_client_t>>>>,
) -> harmonaize_status_t {
    create(client, || {
        // SAFETY: the caller gives options with the size that they have, or none.
        let options = unsafe { read(options) }?.options()?;
        // SAFETY: the caller gives a path with a NUL at its end, or none.
        let path = unsafe { text_if_any(socket, "the path of the agent's socket") }?;
        Ok(harmonaize_client_t(match path {
            Some(path) => Client::attach(path, options)?,
            None => Client::from_env(options)?,
        }))
    })
}

/// Says which rank a launcher has made this process, of how many: torchrun, Open MPI, MPICH, Intel MPI or Slurm, by the
/// variables that they set.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_place(
    rank: Option<&mut MaybeUninit<u32>>,
    ranks: Option<&mut MaybeUninit<u32>>,
) -> harmonaize_status_t {
    call(|| {
        let place = Place::from_env()?;
        result(rank)?.write(place.rank.0);
        result(ranks)?.write(place.ranks);
        Ok(())
    })
}

/// Makes the arena larger by at least so many bytes, so that tensors that come find room without waiting for the agent.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_grow(client: Option<&harmonaize_client_t>, bytes: u64) -> harmonaize_status_t {
    call(|| Ok(given(client, "client")?.0.grow(bytes)?))
}

/// Says how many bytes the arena has, with what it has grown by.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_arena_bytes(
    client: Option<&harmonaize_client_t>,
    bytes: Option<&mut MaybeUninit<u64>>,
) -> harmonaize_status_t {
    call(|| {
        result(bytes)?.write(given(client, "client")?.0.arena_bytes()?);
        Ok(())
    })
}

/// Frees a client. The attachment lasts as long as anything that came of it, tensors and regions apart. NULL does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_client_free(client: Option<Box<harmonaize_client_t>>) {
    free(client);
}
