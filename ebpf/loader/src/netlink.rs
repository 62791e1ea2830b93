//! Netlink: interfaces by name, lists of anything, and the removal of a clsact queueing discipline that nobody uses. What else is
//! done by route netlink, the library beneath does.

use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send};
use std::io;
use std::os::fd::OwnedFd;

/// `NETLINK_ROUTE`, the usual one.
const ROUTE: Option<Protocol> = None;
const REMOVE_DISCIPLINE: u16 = 37;
const GET_FILTERS: u16 = 46;
const NEW_FILTER: u16 = 44;
const ERROR: u16 = 2;
const DONE: u16 = 3;
const REQUEST: u16 = 0x001;
const ACKNOWLEDGE: u16 = 0x004;
const DUMP: u16 = 0x300;

/// The clsact queueing discipline's handle and parent, and the places of its filters.
const HANDLE: u32 = 0xffff_0000;
const PARENT: u32 = 0xffff_fff1;
const FILTERS: [u32; 2] = [0xffff_fff2, 0xffff_fff3];

/// Bytes of `struct nlmsghdr`, and of `struct nlattr`.
const HEADER: usize = 16;
const ATTRIBUTE: usize = 4;
/// Of an attribute's kind, what is no flag.
const KIND: u16 = 0x3fff;
/// The most messages of a list that are read.
const MAX_MESSAGES: u32 = 1 << 16;

/// A list of the kernel that does not end.
#[derive(Debug, thiserror::Error)]
#[error(
    "the list has more than {MAX_MESSAGES} messages, the most that are read: look with `rdma` or `tc` what fills it"
)]
struct MessageLimit;

/// The index of an interface in the calling thread's network namespace.
pub(crate) fn index_of(name: &str) -> io::Result<u32> {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None)?;
    Ok(rustix::net::netdevice::name_to_index(socket, name)?)
}

/// Removes an interface's clsact queueing discipline unless it has filters.
pub(crate) fn remove_unused_clsact(index: u32) -> io::Result<()> {
    for place in FILTERS {
        if has_filters(index, place)? {
            return Ok(());
        }
    }
    let body = traffic_control(index, HANDLE, PARENT);
    let socket = ask(ROUTE, REMOVE_DISCIPLINE, ACKNOWLEDGE, &body)?;
    let mut buffer = vec![0; 8192];
    let received = receive(&socket, &mut buffer)?;
    for (kind, body) in messages(received) {
        if kind == ERROR {
            return refusal(body);
        }
    }
    Err(io::ErrorKind::InvalidData.into())
}

fn has_filters(index: u32, place: u32) -> io::Result<bool> {
    let mut found = false;
    list(ROUTE, GET_FILTERS, &traffic_control(index, 0, place), |kind, _| {
        found |= kind == NEW_FILTER;
        Ok(!found)
    })?;
    Ok(found)
}

/// `struct tcmsg`: family and padding, then words.
fn traffic_control(index: u32, handle: u32, parent: u32) -> Vec<u8> {
    [0, index, handle, parent, 0].into_iter().flat_map(u32::to_ne_bytes).collect()
}

/// Asks for a list, and hands each message of it to `with`: kind and body. It says whether to go on.
///
/// # Errors
/// What the kernel refuses it with, or an answer that ends in the midst or not at all. What `with` finds wrong.
pub(crate) fn list(
    protocol: Option<Protocol>,
    kind: u16,
    body: &[u8],
    with: impl FnMut(u16, &[u8]) -> io::Result<bool>,
) -> io::Result<()> {
    let socket = ask(protocol, kind, DUMP, body)?;
    read_list(|buffer| receive(&socket, buffer), with)
}

/// Reads a list to its end, or until `with` has enough of it. `receive` fills a buffer, and returns what came.
pub(crate) fn read_list(
    mut receive: impl FnMut(&mut [u8]) -> io::Result<&[u8]>,
    mut with: impl FnMut(u16, &[u8]) -> io::Result<bool>,
) -> io::Result<()> {
    let mut buffer = vec![0; 1 << 16];
    for _ in 0..MAX_MESSAGES {
        let received = receive(&mut buffer)?;
        if received.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        for (kind, body) in messages(received) {
            match kind {
                // A list that could not be made ends with the reason.
                DONE if body.is_empty() => return Ok(()),
                DONE | ERROR => return refusal(body),
                _ if with(kind, body)? => {}
                _ => return Ok(()),
            }
        }
    }
    Err(io::Error::other(MessageLimit))
}

/// A buffer's beginning, once a message is in it.
#[cfg(test)]
pub(crate) fn filled<'a>(buffer: &'a mut [u8], message: &[u8]) -> &'a [u8] {
    let (into, _) = buffer.split_at_mut(message.len());
    into.copy_from_slice(message);
    into
}

fn ask(protocol: Option<Protocol>, kind: u16, flags: u16, body: &[u8]) -> io::Result<OwnedFd> {
    let socket =
        rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?;
    let mut message = Vec::with_capacity(HEADER + body.len());
    message.extend(((HEADER + body.len()) as u32).to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend((REQUEST | flags).to_ne_bytes());
    // Sequence number and port.
    message.extend([0; 8]);
    message.extend(body);
    send(&socket, &message, SendFlags::empty())?;
    Ok(socket)
}

/// Appends an attribute of 32 bits to a request.
pub(crate) fn push_number(into: &mut Vec<u8>, kind: u16, value: u32) {
    into.extend(((ATTRIBUTE + size_of::<u32>()) as u16).to_ne_bytes());
    into.extend(kind.to_ne_bytes());
    into.extend(value.to_ne_bytes());
}

/// The attributes in a message, or within another attribute: kind and value. What is cut off ends them.
pub(crate) fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let (length, rest) = bytes.split_first_chunk::<2>()?;
        let (kind, _) = rest.split_first_chunk::<2>()?;
        let length = usize::from(u16::from_ne_bytes(*length));
        let value = bytes.get(ATTRIBUTE..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_ne_bytes(*kind) & KIND, value))
    })
}

fn receive<'a>(socket: &OwnedFd, buffer: &'a mut [u8]) -> io::Result<&'a [u8]> {
    let (_, length) = recv(socket, &mut *buffer, RecvFlags::empty())?;
    Ok(buffer.get(..length).unwrap_or_default())
}

/// The messages in what was received: kind and body.
fn messages(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let (length, rest) = bytes.split_first_chunk::<4>()?;
        let (kind, _) = rest.split_first_chunk::<2>()?;
        let length = u32::from_ne_bytes(*length) as usize;
        let body = bytes.get(HEADER..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_ne_bytes(*kind), body))
    })
}

fn refusal(body: &[u8]) -> io::Result<()> {
    match body.first_chunk::<4>().map(|code| i32::from_ne_bytes(*code)) {
        Some(0) => Ok(()),
        Some(code) => Err(io::Error::from_raw_os_error(-code)),
        None => Err(io::ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_taken_apart_whatever_they_claim() {
        let mut bytes = Vec::new();
        for (kind, body) in [(NEW_FILTER, &[1, 2, 3, 4, 5][..]), (DONE, &[])] {
            bytes.extend(((HEADER + body.len()) as u32).to_ne_bytes());
            bytes.extend(kind.to_ne_bytes());
            bytes.extend([0; 10]);
            bytes.extend(body);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        let found: Vec<_> = messages(&bytes).collect();
        assert_eq!(found, [(NEW_FILTER, &[1, 2, 3, 4, 5][..]), (DONE, &[][..])]);
        for length in [0u32, 3, 15, 1 << 30, u32::MAX] {
            bytes[..4].copy_from_slice(&length.to_ne_bytes());
            assert_eq!(messages(&bytes).count(), 0, "{length}");
        }
        assert_eq!(refusal(&(-2i32).to_ne_bytes()).unwrap_err().raw_os_error(), Some(2));
        assert!(refusal(&0i32.to_ne_bytes()).is_ok());
        assert!(refusal(&[]).is_err());
    }

    #[test]
    fn an_endless_list_ends_once_enough_is_read() {
        let message = |kind: u16| [&20_u32.to_ne_bytes()[..], &kind.to_ne_bytes(), &[0; 14]].concat();
        let read = |most: u32| {
            let mut seen = 0;
            let ended = read_list(
                |buffer| Ok(filled(buffer, &message(NEW_FILTER))),
                |_, _| {
                    seen += 1;
                    Ok(seen < most)
                },
            );
            (seen, ended.map_err(|error| error.to_string()))
        };
        assert_eq!(read(3), (3, Ok(())));
        let (seen, ended) = read(u32::MAX);
        assert_eq!(seen, MAX_MESSAGES);
        assert!(ended.unwrap_err().contains("65536 messages"));
        let mut answers = vec![message(DONE), message(NEW_FILTER)];
        let whole =
            read_list(|buffer| Ok(filled(buffer, &answers.pop().unwrap_or_default())), |_, _| Ok(true));
        assert!(whole.is_ok());
        let cut = read_list(|_| Ok(&[]), |_, _| Ok(true)).unwrap_err();
        assert_eq!(cut.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn attributes_are_taken_apart_whatever_they_claim() {
        let mut bytes = Vec::new();
        push_number(&mut bytes, 3 | 0x8000, 7);
        bytes.extend([5_u16, 2].map(u16::to_ne_bytes).concat());
        bytes.extend(b"a\0\0\0");
        let seven = 7_u32.to_ne_bytes();
        assert_eq!(attributes(&bytes).collect::<Vec<_>>(), [(3, &seven[..]), (2, &b"a"[..])]);
        // The padding of the last one may be cut off, and nothing else of it.
        assert_eq!(attributes(&bytes[..13]).count(), 2);
        assert_eq!(attributes(&bytes[..12]).count(), 1);
        for length in [0_u16, 3, 17, u16::MAX] {
            bytes[..2].copy_from_slice(&length.to_ne_bytes());
            assert_eq!(attributes(&bytes).count(), 0, "{length}");
        }
    }

    #[test]
    fn the_loopback_has_an_index() {
        assert_eq!(index_of("lo").unwrap(), 1);
        assert!(index_of("no-such-device").is_err());
    }
}
