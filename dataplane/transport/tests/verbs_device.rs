//! The RDMA transport conforms on real devices: of a host that has two, one with 10.0.0.1 and one with 10.0.0.2.

use harmonaize_transport::Transport;
use harmonaize_transport::tcp;
use harmonaize_transport::verbs::{Config, VerbsTransport};
use harmonaize_verbs::Devices;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

const ADDRESSES: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2)];

fn end(address: Ipv4Addr) -> Result<Box<dyn Transport>, String> {
    let tcp = tcp::Config {
        connect_timeout: Duration::from_secs(2),
        handshake_timeout: Duration::from_millis(300),
        ..tcp::Config::new(SocketAddr::from((address, 0)))
    };
    let transport = VerbsTransport::bind(Config::new(tcp), &Devices::of_host());
    Ok(Box::new(transport.map_err(|error| error.to_string())?))
}

/// Runs a case where there are devices. One at a time: software devices share one processor.
fn case(name: &str) -> Result<(), String> {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let devices = Devices::of_host();
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
