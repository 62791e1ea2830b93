//! The loopback transport conforms.

use harmonaize_transport::Transport;
use harmonaize_transport::loopback::Hub;
use std::time::Duration;

fn pair() -> Result<[Box<dyn Transport>; 2], String> {
    let hub = Hub::with_timeout(Duration::from_secs(1));
    let end = || hub.endpoint().map_err(|error| error.to_string());
    Ok([Box::new(end()?), Box::new(end()?)])
}

harmonaize_transport::conformance!(pair);

#[test]
fn supports_posts() {
    assert_eq!(harmonaize_transport::conformance::supports_posts(&mut pair), Ok(true));
}
