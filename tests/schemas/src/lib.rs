//! Locked schemas: what a release encodes, as lines of a committed file that a test holds the tree against.
//!
//! A line is a structure with its fields in order, a variant of an open enum, a number, or the bytes of an example. Lines may be added
//! to a [`Schema::Grows`] and never change or go, so whoever was built at a release reads what later ones send it. A
//! [`Schema::Exact`] is of one version, which its file's name has.
#![forbid(unsafe_code)]

mod sources;

pub use sources::Sources;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// How a schema may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schema {
    /// Lines may be added.
    Grows,
    /// Any change is another version, and so another file.
    Exact,
}

/// The line of an example's encoding.
pub fn bytes(name: &str, encoded: &[u8]) -> String {
    encoded.iter().fold(format!("{name} ="), |mut line, byte| {
        let _ = write!(line, " {byte:02x}");
        line
    })
}

/// Compares lines with the committed file of this name (`tests/schemas/released/NAME.txt`).
/// With `HARMONAIZE_GOLDEN=write` it is written where that breaks no promise.
///
/// # Errors
/// Which lines differ, and `remedy`, for whoever changed the tree.
pub fn check(name: &str, schema: Schema, lines: &[String], remedy: &str) -> Result<(), String> {
    let write = std::env::var_os("HARMONAIZE_GOLDEN").is_some_and(|wish| wish == "write");
    let file = folder().join(format!("{name}.txt"));
    let committed = match std::fs::read_to_string(&file) {
        Ok(text) => Some(text),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => return Err(format!("{}: {error}", file.display())),
    };
    let text = lines.iter().fold(String::new(), |text, line| text + line + "\n");
    let broken = committed.as_deref().map_or(Vec::new(), |committed| broken(committed, &text, schema));
    if !broken.is_empty() {
        return Err(format!("{name} breaks what was released:\n- {}\n{remedy}", broken.join("\n- ")));
    }
    if committed.as_deref() == Some(&text) {
        return Ok(());
    }
    if write {
        return std::fs::write(&file, text).map_err(|error| format!("{}: {error}", file.display()));
    }
    Err(format!(
        "{} is not up to date, and nothing that was released breaks: write it with `HARMONAIZE_GOLDEN=write` before this test's command",
        file.display()
    ))
}

/// What of the committed text does not hold any more.
fn broken(committed: &str, now: &str, schema: Schema) -> Vec<String> {
    let (before, after): (BTreeSet<_>, BTreeSet<_>) = (committed.lines().collect(), now.lines().collect());
    let gone = before.difference(&after).map(|line| format!("gone or changed: {line}"));
    let new = after.difference(&before).filter(|_| schema == Schema::Exact);
    gone.chain(new.map(|line| format!("new or changed: {line}"))).collect()
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("released")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_added_line_breaks_exact_schemas_alone() {
        assert_eq!(broken("a\nb\n", "a\nb\nc\n", Schema::Grows), Vec::<String>::new());
        assert_eq!(broken("a\nb\n", "a\nb\nc\n", Schema::Exact), ["new or changed: c"]);
    }

    #[test]
    fn a_changed_line_breaks_every_schema() {
        let changed = broken("a 1\nb\n", "a 2\nb\n", Schema::Grows);
        assert_eq!(changed, ["gone or changed: a 1"]);
        assert_eq!(broken("a\n", "", Schema::Exact), ["gone or changed: a"]);
    }

    #[test]
    fn bytes_are_shown_in_their_order() {
        assert_eq!(bytes("Hello", &[1, 0xab, 0]), "Hello = 01 ab 00");
    }
}
