//! The RDMA transport conforms on real devices: of a host that has two, one with 10.0.0.1 and one with 10.0.0.2.

use harmonaize_transport::Transport;
use harmonaize_transport::datagram::{DatagramConfig, RdmaDatagrams, RdmaPort};
use harmonaize_transport::tcp;
use harmonaize_transport::verbs::{Config, VerbsTransport};
use harmonaize_verbs::PortOptions;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const ADDRESSES: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2)];

fn end(address: Ipv4Addr) -> Result<Box<dyn Transport>, String> {
    let tcp = tcp::Config {
        connect_timeout: Duration::from_secs(2),
        handshake_timeout: Duration::from_millis(300),
        ..tcp::Config::new(SocketAddr::from((address, 0)))
    };
    let transport = VerbsTransport::bind(Config::new(tcp), &harmonaize_libibverbs::host_devices());
    Ok(Box::new(transport.map_err(|error| error.to_string())?))
}

/// One case at a time: software devices share one processor.
static ALONE: Mutex<()> = Mutex::new(());

/// Runs a case where there are devices.
fn case(name: &str) -> Result<(), String> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let devices = harmonaize_libibverbs::host_devices();
    if let Some(address) = ADDRESSES.iter().find(|address| devices.find((**address).into()).is_err()) {
        println!("SKIPPED {name}: no RDMA device has {address}; /sys/class/infiniband says which there are");
        return Ok(());
    }
    harmonaize_transport::conformance::run(name, &mut || Ok([end(ADDRESSES[0])?, end(ADDRESSES[1])?]))
}

macro_rules! cases {
    ($($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                case(stringify!($name)).unwrap();
            }
        )*

        #[test]
        fn no_case_left_out() {
            let known = harmonaize_transport::conformance::CASES.iter().map(|(name, _)| *name);
            assert_eq!(known.collect::<Vec<_>>(), [$(stringify!($name)),*]);
        }
    };
}

cases!(comes_up every_size order_per_path ring_wraps full_then_progress links_and_rings_apart wakes_the_sleeper
    sent_exactly_once refuses_invalid_frames late_peer absent_peer wrong_secret path_counts_differ same_name_twice
    unknown_ring oversize_payload peer_closes last_word close_releases_payloads dropped_endpoint name_again_after_close
    posted_receives posted_too_late posted_wrongly posted_at_any_time end_releases_posts stress);

/// Datagrams of all sizes, of which none need be lost where each is answered before the next.
#[test]
fn datagrams_are_whole_and_of_their_sender() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let devices = harmonaize_libibverbs::host_devices();
    let open = |address: Ipv4Addr| {
        let (wanted, address) = (PortOptions::default(), address.into());
        let port = RdmaPort { devices: devices.clone(), options: wanted, address };
        RdmaDatagrams::open(&port, 0x1717, DatagramConfig { bytes: 8192, ..DatagramConfig::default() })
    };
    let (Ok(mut one), Ok(mut two)) = (open(ADDRESSES[0]), open(ADDRESSES[1])) else {
        println!("SKIPPED datagrams: no RDMA devices have {ADDRESSES:?}");
        return;
    };
    let most = one.max_bytes();
    for (turn, bytes) in [1, 79, 80, 1000, most - 1, most].into_iter().cycle().take(70).enumerate() {
        let sent: Vec<u8> = (0..bytes).map(|at| (at * 7 + turn) as u8).collect();
        let (to, from) = (two.local_address(), one.local_address());
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut found = false;
        while !found {
            assert!(Instant::now() < deadline, "datagram {turn} of {bytes} bytes does not come");
            assert!(one.push(|room| {
                room.get_mut(..bytes)?.copy_from_slice(&sent);
                Some((to, bytes))
            }));
            let again = Instant::now() + Duration::from_millis(200);
            while !found && Instant::now() < again {
                two.receive(&mut |sender, came| {
                    assert_eq!(sender, from);
                    found |= came == sent;
                });
            }
        }
        one.receive(&mut |_, _| ());
        assert!(!one.failed() && !two.failed());
        std::mem::swap(&mut one, &mut two);
    }
}
