//! What the kernel knows of TCP's sockets, by connections over the loopback interface.

use crate::support::collector;
use harmonaize_events::{Socket, SocketKey};
use harmonaize_loader::{EndpointOptions, Endpoints, Options, Programs, own_namespace};
use rustix::net::sockopt::{set_socket_linger, set_socket_reuseaddr};
use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
use std::io::{Read, Write};
use std::net::{SocketAddrV4, TcpListener, TcpStream};
use std::time::Duration;

/// Connects from a port, any if it is 0, with a socket that is a user's. It is closed without waiting for what is still on its way.
fn connected(user: u32, port: u16, to: SocketAddrV4) -> TcpStream {
    // A thread has a user of its own for what it makes.
    let made = std::thread::spawn(move || {
        // SAFETY: it changes nothing but this thread's credentials.
        unsafe { libc::setfsuid(user) };
        socket(AddressFamily::INET, SocketType::STREAM, None).unwrap()
    });
    let socket = made.join().unwrap();
    set_socket_reuseaddr(&socket, true).unwrap();
    set_socket_linger(&socket, Some(Duration::ZERO)).unwrap();
    bind(&socket, &SocketAddrV4::new(*to.ip(), port)).unwrap();
    connect(&socket, &to).unwrap();
    socket.into()
}

/// What is known of the end that connected.
fn find_socket(collector: &mut Programs, near: SocketAddrV4, far: SocketAddrV4) -> Option<Socket> {
    let mut endpoints = Endpoints::default();
    collector.read_endpoints(&mut endpoints).unwrap();
    let ports = |key: &SocketKey| (key.local_port, key.remote_port);
    let found = endpoints.sockets.iter().find(|(key, _)| ports(key) == (near.port(), far.port()));
    found.map(|(_, socket)| *socket)
}

fn address(stream: &TcpStream) -> SocketAddrV4 {
    match stream.local_addr().unwrap() {
        std::net::SocketAddr::V4(address) => address,
        other => panic!("{other}"),
    }
}

/// A connection with the addresses and ports of one that is over is its own user's. It counts its own samples.
#[test]
fn reused_connection_tuple_has_its_own_owner() {
    let own_types = std::path::PathBuf::from("/sys/kernel/btf/vmlinux");
    for types in [None, Some(own_types)] {
        let namespaces = vec![own_namespace().unwrap()];
        let endpoints =
            EndpointOptions { types, namespaces, interval: Duration::ZERO, ..EndpointOptions::default() };
        let Some(mut collector) = collector(Options { endpoints: Some(endpoints), ..Options::default() })
        else {
            return;
        };
        if collector.tracing().and_then(|tracing| tracing.tcp()).is_none() {
            harmonaize_testkit::strict::skip_test(format_args!(
                "this kernel does not show its sockets: {:?}",
                collector.missing()
            ));
            return;
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let std::net::SocketAddr::V4(to) = listener.local_addr().unwrap() else { panic!("another family") };
        let mut port = 0;
        let mut samples = Vec::new();
        for (user, rounds) in [(4242, 20), (4243, 1), (0, 1)] {
            let mut near = connected(user, port, to);
            let (mut far, _) = listener.accept().unwrap();
            for _ in 0..rounds {
                near.write_all(b"?").unwrap();
                far.read_exact(&mut [0]).unwrap();
                far.write_all(b"!").unwrap();
                near.read_exact(&mut [0]).unwrap();
            }
            let socket = find_socket(&mut collector, address(&near), to).unwrap();
            assert_eq!((socket.user, socket.state), (user, 1), "{socket:?}");
            samples.push(socket.samples);
            port = address(&near).port();
            let from = address(&near);
            drop((near, far));
            // What is over is its owner's until another takes its place.
            let socket = find_socket(&mut collector, from, to).unwrap();
            assert_eq!((socket.user, socket.state), (user, 7), "{socket:?}");
        }
        assert!(samples[0] > 20 && samples[1] < 20 && samples[2] < 20, "{samples:?}");
    }
}
