//! Which TCP congestion controls links to other agents can have on this host.

use crate::config::Config;
use crate::sandbox;
use harmonaize_abi::CongestionControl;

/// Most of them that control is told.
const MAX_CONTROLS: usize = 32;

/// Returns the controls that the kernel allows the engine's threads. It returns none where links go over RDMA, or the
/// kernel's list cannot be read.
pub(crate) fn controls(config: &Config) -> Vec<String> {
    if config.verbs.is_some() {
        return Vec::new();
    }
    // Those that are not for everybody take a privilege.
    let which = if sandbox::engines_administer(config) { "available" } else { "allowed" };
    let path = format!("/proc/sys/net/ipv4/tcp_{which}_congestion_control");
    std::fs::read_to_string(&path).map_or_else(
        |error| {
            tracing::warn!(path, %error, "control can choose no congestion control here");
            Vec::new()
        },
        |text| named(&text),
    )
}

/// Returns the names in the kernel's list.
fn named(list: &str) -> Vec<String> {
    let names = list.split_whitespace().filter(|name| name.parse::<CongestionControl>().is_ok());
    names.take(MAX_CONTROLS).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_list_is_read_by_name() {
        assert_eq!(named("reno bbr dctcp-reno\n"), ["reno", "bbr", "dctcp-reno"]);
        assert_eq!(named("reno sixteen-letters- b/r\n"), ["reno"]);
        let many: String = (0..40).map(|number| format!("c{number} ")).collect();
        assert_eq!(named(&many).len(), MAX_CONTROLS);
    }
}
