//! What a machine lacks: a test or task that needs it is skipped, or fails where nothing may be skipped.

use crate::fabric;
use anyhow::{Result, bail};
use std::ffi::OsStr;
use std::fmt::Display;

/// The variable under which a skip is a failure; `cargo xtask ci --strict` sets it to 1.
pub const VARIABLE: &str = "HARMONAIZE_STRICT";

/// Whether a skip is a failure.
pub fn is_strict() -> bool {
    means_strict(std::env::var_os(VARIABLE).as_deref())
}

fn means_strict(value: Option<&OsStr>) -> bool {
    value.is_some_and(|value| !value.is_empty() && value != "0")
}

/// Says that `what` is skipped, and why; an error where nothing may be skipped.
pub fn skip(what: &str, why: impl Display) -> Result<()> {
    decide(is_strict(), what, &why)
}

fn decide(strict: bool, what: &str, why: &dyn Display) -> Result<()> {
    if strict {
        bail!("{what}: {why}; nothing may be skipped here ({VARIABLE})");
    }
    eprintln!("SKIPPED: {what}: {why}");
    Ok(())
}

/// Says that the test that calls this is skipped, and why.
///
/// # Panics
/// Where nothing may be skipped.
pub fn skip_test(why: impl Display) {
    let decided = decide(is_strict(), "this test", &why);
    assert!(decided.is_ok(), "{}", decided.err().map_or_else(String::new, |error| error.to_string()));
}

/// Whether this process may make network namespaces; says that the calling test is skipped where it may not.
///
/// # Panics
/// Where it may not, and nothing may be skipped.
pub fn can_make_namespaces() -> bool {
    let can = fabric::privileged();
    if !can {
        skip_test("it makes network namespaces, which needs root");
    }
    can
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_decides() {
        let means = |value: Option<&str>| means_strict(value.map(OsStr::new));
        assert_eq!(
            [None, Some(""), Some("0"), Some("1"), Some("yes")].map(means),
            [false, false, false, true, true]
        );
    }

    #[test]
    fn a_strict_skip_names_what_is_missing() {
        assert!(decide(false, "offload units", &"no qemu").is_ok());
        let error = decide(true, "offload units", &"no qemu").unwrap_err().to_string();
        assert!(error.starts_with("offload units: no qemu; nothing may be skipped"), "{error}");
    }
}
