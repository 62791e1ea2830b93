//! Which interfaces there are, and which has an address, in the calling thread's network namespace.

use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The list that the system made, given back when dropped.
struct List(*mut libc::ifaddrs);

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: the pointer came from getifaddrs, and is freed once.
        unsafe { libc::freeifaddrs(self.0) }
    }
}

impl List {
    fn read() -> io::Result<Self> {
        let mut first = std::ptr::null_mut();
        // SAFETY: the call writes a pointer to a list, which `List` frees.
        if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self(first))
    }

    fn entries(&self) -> impl Iterator<Item = &libc::ifaddrs> {
        let mut next = self.0;
        std::iter::from_fn(move || {
            // SAFETY: null at the end of the list, else an element of it, which lives as long as `self`.
            let entry = unsafe { next.as_ref() }?;
            next = entry.ifa_next;
            Some(entry)
        })
    }
}

/// The names of the interfaces that are up, loopback devices left out, in ascending order.
///
/// # Errors
/// The system does not tell.
pub fn interfaces_up() -> io::Result<Vec<String>> {
    let list = List::read()?;
    let up = libc::IFF_UP as libc::c_uint;
    let loopback = libc::IFF_LOOPBACK as libc::c_uint;
    let wanted = list.entries().filter(|entry| entry.ifa_flags & (up | loopback) == up);
    let mut names: Vec<String> = wanted.map(name_of).collect();
    names.sort_unstable();
    names.dedup();
    Ok(names)
}

/// The name of the interface that has an address; none where nobody has it.
///
/// # Errors
/// The system does not tell.
pub fn interface_with(address: IpAddr) -> io::Result<Option<String>> {
    let list = List::read()?;
    let found = list.entries().find(|entry| address_of(entry) == Some(address.to_canonical()));
    Ok(found.map(name_of))
}

fn name_of(entry: &libc::ifaddrs) -> String {
    // SAFETY: each element has a name that ends with a zero and lives as long as the element.
    unsafe { CStr::from_ptr(entry.ifa_name) }.to_string_lossy().into_owned()
}

fn address_of(entry: &libc::ifaddrs) -> Option<IpAddr> {
    if entry.ifa_addr.is_null() {
        return None;
    }
    // SAFETY: it is not null, and every address begins with its family.
    let family = i32::from(unsafe { (*entry.ifa_addr).sa_family });
    match family {
        libc::AF_INET => {
            // SAFETY: an address of this family is a sockaddr_in; read as bytes may lie.
            let address = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(IpAddr::V4(Ipv4Addr::from(address.sin_addr.s_addr.to_ne_bytes())))
        }
        libc::AF_INET6 => {
            // SAFETY: an address of this family is a sockaddr_in6; read as bytes may lie.
            let address = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(IpAddr::V6(Ipv6Addr::from(address.sin6_addr.s6_addr)).to_canonical())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_address_is_found_documentation_address_is_not() {
        assert_eq!(interface_with("127.0.0.1".parse().unwrap()).unwrap().as_deref(), Some("lo"));
        assert_eq!(interface_with("::ffff:127.0.0.1".parse().unwrap()).unwrap().as_deref(), Some("lo"));
        assert!(!interfaces_up().unwrap().contains(&"lo".to_owned()));
        assert_eq!(interface_with("203.0.113.7".parse().unwrap()).unwrap(), None);
        assert_eq!(interface_with("2001:db8::7".parse().unwrap()).unwrap(), None);
    }
}
