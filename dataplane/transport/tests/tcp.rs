//! The TCP transport conforms, whatever protects its frames.

use harmonaize_transport::Transport;
use harmonaize_transport::tcp::{Config, LinkProtection, TcpTransport};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

/// Beyond `sender_bytes` another thread writes.
fn pair(protection: LinkProtection, sender_bytes: Option<usize>) -> Result<[Box<dyn Transport>; 2], String> {
    let config = || Config {
        protection,
        sender_bytes,
        connect_timeout: Duration::from_secs(1),
        handshake_timeout: Duration::from_millis(300),
        ..Config::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
    };
    let end = || TcpTransport::bind(config()).map_err(|error| error.to_string());
    Ok([Box::new(end()?), Box::new(end()?)])
}

mod plain {
    harmonaize_transport::conformance!(|| super::pair(super::LinkProtection::None, None));
}

mod authenticated {
    harmonaize_transport::conformance!(|| super::pair(super::LinkProtection::Authenticated, None));
}

mod encrypted {
    harmonaize_transport::conformance!(|| super::pair(super::LinkProtection::Encrypted, None));
}

mod plain_by_sender {
    harmonaize_transport::conformance!(|| super::pair(super::LinkProtection::None, Some(1)));
}

mod authenticated_by_sender {
    harmonaize_transport::conformance!(|| super::pair(super::LinkProtection::Authenticated, Some(1)));
}

mod encrypted_by_sender {
    harmonaize_transport::conformance!(|| super::pair(super::LinkProtection::Encrypted, Some(1)));
}

#[test]
fn supports_posts() {
    for protection in [LinkProtection::None, LinkProtection::Authenticated, LinkProtection::Encrypted] {
        assert_eq!(
            harmonaize_transport::conformance::supports_posts(&mut || pair(protection, None)),
            Ok(true)
        );
    }
}
