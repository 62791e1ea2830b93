//! The TCP transport conforms.

use harmonaize_transport::Transport;
use harmonaize_transport::tcp::{Config, TcpTransport};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

fn config() -> Config {
    Config {
        connect_timeout: Duration::from_secs(1),
        handshake_timeout: Duration::from_millis(300),
        ..Config::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
    }
}

fn pair() -> Result<[Box<dyn Transport>; 2], String> {
    let end = || TcpTransport::bind(config()).map_err(|error| error.to_string());
    Ok([Box::new(end()?), Box::new(end()?)])
}

harmonaize_transport::conformance!(pair);

#[test]
fn supports_posts() {
    assert_eq!(harmonaize_transport::conformance::supports_posts(&mut pair), Ok(true));
}
