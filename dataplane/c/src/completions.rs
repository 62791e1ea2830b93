//! A descriptor that says when operations have ended.

use crate::client::harmonaize_client_t;
use crate::error::{call, create, free, given, result};
use crate::status::harmonaize_status_t;
use harmonaize_client::Completions;
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};

/// A descriptor for `poll` or `epoll`: readable once operations of the attachment have ended, until it is cleared. Readable at
/// first. Any thread may use it, at the same time as others.
pub struct harmonaize_completions_t(Completions);

/// Makes a descriptor that says when operations of this attachment have ended.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_completions_create(
    client: Option<&harmonaize_client_t>,
    completions: Option<&mut MaybeUninit<Option<Box<harmonaize_completions_t>>>>,
) -> harmonaize_status_t {
    create(completions, || Ok(harmonaize_completions_t(given(client, "client")?.0.completions()?)))
}

/// Says which descriptor it is. It is the library's: not to be closed, read or written.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_completions_descriptor(
    completions: Option<&harmonaize_completions_t>,
    descriptor: Option<&mut MaybeUninit<c_int>>,
) -> harmonaize_status_t {
    call(|| {
        result(descriptor)?.write(given(completions, "completions")?.0.as_fd().as_raw_fd());
        Ok(())
    })
}

/// Makes the descriptor unreadable until the next end. To be called before operations are tested: what ends in between makes it
/// readable again.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_completions_clear(
    completions: Option<&harmonaize_completions_t>,
) -> harmonaize_status_t {
    call(|| {
        given(completions, "completions")?.0.clear();
        Ok(())
    })
}

/// Frees it, and closes the descriptor. NULL does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_completions_free(completions: Option<Box<harmonaize_completions_t>>) {
    free(completions);
}
