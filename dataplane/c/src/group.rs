//! Groups: calls that are submitted together, or not at all.

use crate::client::harmonaize_client_t;
use crate::error::{Failure, call, create, free, given};
use crate::status::harmonaize_status_t;
use harmonaize_client::{Communicator, Error, Group};
use std::mem::MaybeUninit;
use std::sync::{Mutex, PoisonError};

/// Calls that are checked one by one and submitted together when the group ends. Any thread may use it, at the same time as
/// others. Freed before its end, none of them was called.
pub struct harmonaize_group_t(Mutex<Option<Group>>);

impl harmonaize_group_t {
    /// The same membership, whose calls go into the group.
    pub(crate) fn grouped(&self, communicator: &Communicator) -> Result<Communicator, Failure> {
        let group = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(communicator.grouped(group.as_ref().ok_or(Error::GroupEnded)?)?)
    }
}

/// Begins a group. Calls go into it on communicators that are `harmonaize_grouped`.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_group_begin(
    client: Option<&harmonaize_client_t>,
    group: Option<&mut MaybeUninit<Option<Box<harmonaize_group_t>>>>,
) -> harmonaize_status_t {
    create(group, || Ok(harmonaize_group_t(Mutex::new(Some(given(client, "client")?.0.group())))))
}

/// Submits a group's calls, in their order. From now on their operations can be waited for. The handle is still to be freed.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_group_end(group: Option<&harmonaize_group_t>) -> harmonaize_status_t {
    call(|| {
        let group = given(group, "group")?.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        Ok(group.ok_or(Error::GroupEnded)?.end()?)
    })
}

/// Frees a group. NULL does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn harmonaize_group_free(group: Option<Box<harmonaize_group_t>>) {
    free(group);
}
