//! The RDMA transport conforms on real devices: of a host that has two, one with 10.0.0.1 and one with 10.0.0.2.

use harmonaize_transport::Transport;
use harmonaize_transport::conformance::CASES;
use harmonaize_transport::tcp;
use harmonaize_transport::verbs::{Config, VerbsTransport};
use harmonaize_verbs::Devices;
use std::net::{Ipv4Addr, SocketAddr};
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

/// Cases one after another: a software device has few resources, and a failure names its case.
#[test]
fn conforms_on_devices() {
    let devices = Devices::of_host();
    let missing = ADDRESSES.iter().find(|address| devices.find((**address).into()).is_err());
    if let Some(address) = missing {
        println!("SKIPPED: no RDMA device has {address}; /sys/class/infiniband says which there are");
        return;
    }
    let mut wrong = Vec::new();
    for (name, case) in CASES {
        let begun = std::time::Instant::now();
        let outcome = case(&mut || Ok([end(ADDRESSES[0])?, end(ADDRESSES[1])?]));
        println!("{name}: {outcome:?} in {:?}", begun.elapsed());
        wrong.extend(outcome.err().map(|why| format!("{name}: {why}")));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
