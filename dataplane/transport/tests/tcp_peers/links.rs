//! Source ports, and links of different speed side by side.

use crate::raw::{Log, Seen, config, drive, introduction, turn};
use harmonaize_abi::Tag;
use harmonaize_shm::{Memory, Span};
use harmonaize_transport::tcp::{Acceptor, TcpTransport};
use harmonaize_transport::{DownReason, Landing, Ring, SendError, Transport};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::time::{Duration, Instant};

/// A port that was free a moment ago.
fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port()
}

#[test]
fn each_path_comes_from_its_source_port() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let mut a = TcpTransport::bind(config()).unwrap();
    let ports = vec![free_port(), free_port(), free_port()];
    let mut to = introduction(1, listener.local_addr().unwrap(), true);
    to.source_ports = ports.clone();
    a.open(to).unwrap();
    let mut log = Log::new();
    turn(&mut a, &mut log);
    turn(&mut a, &mut log);
    let mut seen: Vec<SocketAddr> = (0..3).map(|_| listener.accept().unwrap().1).collect();
    let mut expected: Vec<_> =
        ports.iter().map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, *port))).collect();
    seen.sort();
    expected.sort();
    assert_eq!(seen, expected);
}

#[test]
fn a_source_port_in_use_is_named() {
    let other = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = other.local_addr().unwrap().port();
    let mut a = TcpTransport::bind(config()).unwrap();
    let mut to = introduction(1, SocketAddr::from((Ipv4Addr::LOCALHOST, 1)), true);
    to.source_ports = vec![0, port];
    let link = a.open(to).unwrap();
    let mut log = Log::new();
    assert!(drive(&mut [(&mut a, &mut log)], &|logs| !logs[0].is_empty()));
    let (of, Seen::Down(DownReason::Connect(why))) = &log[0] else { panic!("{log:?}") };
    assert!(*of == link && why.contains(&port.to_string()) && why.contains("path 1"), "{why}");
}

#[test]
fn endpoints_of_one_address_get_their_own_links() {
    let acceptor = Acceptor::bind(&config()).unwrap();
    let to = acceptor.local_address();
    let mut a = TcpTransport::bind(config()).unwrap();
    let ends = || TcpTransport::accepting(&acceptor, config()).unwrap();
    let (mut first, mut second) = (ends(), ends());
    let mut logs = [Log::new(), Log::new(), Log::new()];
    let open = |end: &mut TcpTransport, name, initiate| end.open(introduction(name, to, initiate));
    let at_a = [1, 2].map(|name| open(&mut a, name, true).unwrap());
    let at_first = open(&mut first, 1, false).unwrap();
    let at_second = open(&mut second, 2, false).unwrap();
    let taken = open(&mut second, 1, false).unwrap_err();
    assert_eq!(taken, DownReason::Taken);
    let [log_a, log_first, log_second] = &mut logs;
    let up = |logs: &[&Log]| logs[0].len() == 2 && logs[1].len() == 1 && logs[2].len() == 1;
    assert!(drive(&mut [(&mut a, log_a), (&mut first, log_first), (&mut second, log_second)], &up));
    assert_eq!((&logs[1][..], &logs[2][..]), (&[(at_first, Seen::Up)][..], &[(at_second, Seen::Up)][..]));
    // One that ends takes nothing of the other's along, nor its names.
    drop(first);
    let again = open(&mut second, 1, false).unwrap();
    let [log_a, _, log_second] = &mut logs;
    let down = |logs: &[&Log]| logs[0].contains(&(at_a[0], Seen::Down(DownReason::Closed)));
    assert!(drive(&mut [(&mut a, log_a), (&mut second, log_second)], &down));
    let anew = open(&mut a, 1, true).unwrap();
    let [log_a, _, log_second] = &mut logs;
    let up = |logs: &[&Log]| logs[0].contains(&(anew, Seen::Up)) && logs[1].contains(&(again, Seen::Up));
    assert!(drive(&mut [(&mut a, log_a), (&mut second, log_second)], &up));
    second.send(at_second, 0, b"hello", None).unwrap();
    let [log_a, _, log_second] = &mut logs;
    let heard = |logs: &[&Log]| logs[0].contains(&(at_a[1], Seen::Frame(b"hello".to_vec())));
    assert!(drive(&mut [(&mut a, log_a), (&mut second, log_second)], &heard));
}

#[test]
fn a_link_whose_peer_does_not_read_holds_up_no_other() {
    let mut a = TcpTransport::bind(config()).unwrap();
    let mut fast = TcpTransport::bind(config()).unwrap();
    let mut stuck = TcpTransport::bind(config()).unwrap();
    let links = [
        a.open(introduction(1, fast.local_address(), true)).unwrap(),
        a.open(introduction(2, stuck.local_address(), true)).unwrap(),
    ];
    let at_fast = fast.open(introduction(1, a.local_address(), false)).unwrap();
    let at_stuck = stuck.open(introduction(2, a.local_address(), false)).unwrap();
    let ring = || {
        let memory = Span::new(&Memory::private(4 << 16).unwrap(), 0, 4 << 16).unwrap();
        Ring { memory, slot_bytes: 1 << 16, slots: 4 }
    };
    fast.attach_ring(at_fast, 0, ring()).unwrap();
    stuck.attach_ring(at_stuck, 0, ring()).unwrap();
    let (mut at_a, mut at_fast, mut at_stuck) = (Log::new(), Log::new(), Log::new());
    let mut ends = [(&mut a, &mut at_a), (&mut fast, &mut at_fast), (&mut stuck, &mut at_stuck)];
    assert!(drive(&mut ends, &|logs| logs.iter().map(|log| log.len()).sum::<usize>() == 4));
    let payload = Span::new(&Memory::private(1 << 16).unwrap(), 0, 1 << 16).unwrap();
    let mut full = false;
    for sequence in 0..2000 {
        let landing = Landing { ring: 0, sequence };
        // The stuck one is offered as much as it takes, always.
        loop {
            match a.send(links[1], 0, b"", Some((landing, payload.clone(), Tag(0)))) {
                Ok(()) => {}
                Err(SendError::Full) => break full = true,
                Err(error) => panic!("{error}"),
            }
        }
        a.send(links[0], 0, &sequence.to_le_bytes(), Some((landing, payload.clone(), Tag(0)))).unwrap();
        let expected = Seen::Frame(sequence.to_le_bytes().to_vec());
        let arrived = drive(&mut [(&mut a, &mut at_a), (&mut fast, &mut at_fast)], &|logs| {
            logs[1].last().is_some_and(|(_, seen)| *seen == expected)
        });
        assert!(arrived, "frame {sequence} did not arrive");
    }
    assert!(full);
}

/// How long frames take over a link of two paths whose rate is bounded. The bound is set before the link is up,
/// or after.
fn paced(bits_per_second: Option<u64>, early: bool) -> Duration {
    let (mut a, mut b) = (TcpTransport::bind(config()).unwrap(), TcpTransport::bind(config()).unwrap());
    let two = |peer, initiate| {
        let mut introduction = introduction(1, peer, initiate);
        introduction.source_ports = vec![0, 0];
        introduction
    };
    let at_a = a.open(two(b.local_address(), true)).unwrap();
    let at_b = b.open(two(a.local_address(), false)).unwrap();
    let memory = Span::new(&Memory::private(1 << 20).unwrap(), 0, 1 << 20).unwrap();
    b.attach_ring(at_b, 0, Ring { memory, slot_bytes: 1 << 18, slots: 4 }).unwrap();
    if early {
        assert!(a.pace(at_a, bits_per_second));
    }
    let (mut from, mut to) = (Log::new(), Log::new());
    assert!(drive(&mut [(&mut a, &mut from), (&mut b, &mut to)], &|logs| logs
        .iter()
        .all(|log| log.len() == 1)));
    assert!(early || a.pace(at_a, bits_per_second));
    let payload = Span::new(&Memory::private(1 << 18).unwrap(), 0, 1 << 18).unwrap();
    let begun = Instant::now();
    for sequence in 0..16 {
        let landing = Landing { ring: 0, sequence };
        a.send(at_a, sequence as u16 % 2, &[], Some((landing, payload.clone(), Tag(0)))).unwrap();
    }
    assert!(drive(&mut [(&mut a, &mut from), (&mut b, &mut to)], &|logs| logs[1].len() == 17), "{to:?}");
    begun.elapsed()
}

#[test]
fn a_link_keeps_to_its_rate_over_all_its_paths() {
    // 34 Mbit at 80 Mbit/s: over loopback TCP begins with ten segments of 64 KiB on each connection, unpaced.
    for early in [true, false] {
        let took = paced(Some(80_000_000), early);
        assert!(took >= Duration::from_millis(200), "{took:?}");
    }
    paced(None, false);
    let mut none = TcpTransport::bind(config()).unwrap();
    assert!(!none.pace(harmonaize_transport::LinkId(7), Some(1)), "there is no such link");
}
