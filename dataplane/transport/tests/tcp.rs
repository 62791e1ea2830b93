//! The TCP transport conforms, whatever protects its frames.

use harmonaize_transport::Transport;
use harmonaize_transport::tcp::{Config, LinkProtection, TcpTransport};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

fn pair(protection: LinkProtection) -> Result<[Box<dyn Transport>; 2], String> {
    let config = || Config {
        protection,
        connect_timeout: Duration::from_secs(1),
        handshake_timeout: Duration::from_millis(300),
        ..Config::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
    };
    let end = || TcpTransport::bind(config()).map_err(|error| error.to_string());
    Ok([Box::new(end()?), Box::new(end()?)])
}

mod plain {
    harmonaize_transport::conformance!(|| super::pair(super::LinkProtection::None));
}

mod authenticated {
    harmonaize_transport::conformance!(|| super::pair(super::LinkProtection::Authenticated));
}

mod encrypted {
    harmonaize_transport::conformance!(|| super::pair(super::LinkProtection::Encrypted));
}

#[test]
fn supports_posts() {
    for protection in [LinkProtection::None, LinkProtection::Authenticated, LinkProtection::Encrypted] {
        assert_eq!(harmonaize_transport::conformance::supports_posts(&mut || pair(protection)), Ok(true));
    }
}
