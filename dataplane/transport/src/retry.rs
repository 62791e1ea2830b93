//! System calls that a signal may interrupt.

use std::io;

/// Calls again while a signal interrupts. A negative result is the thread's last error.
pub(crate) fn retry<T>(mut call: impl FnMut() -> T) -> io::Result<usize>
where
    usize: TryFrom<T>,
{
    loop {
        match usize::try_from(call()) {
            Ok(count) => return Ok(count),
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}
