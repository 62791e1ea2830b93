//! Files that tests compare with: `HARMONAIZE_GOLDEN=write cargo test -p harmonaize-cli` makes them anew.

use std::path::Path;

/// Fails unless the file, by its path in the project, says the same.
pub(crate) fn same(path: &str, content: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    if std::env::var_os("HARMONAIZE_GOLDEN").is_some_and(|wish| wish == "write") {
        std::fs::write(&file, content).unwrap();
        return;
    }
    let known = std::fs::read_to_string(&file).unwrap_or_default();
    if known == content {
        return;
    }
    let differs = known.lines().zip(content.lines()).position(|(old, new)| old != new);
    let line = differs.unwrap_or(known.lines().count().min(content.lines().count()));
    panic!(
        "{path} differs at line {}:\n- {}\n+ {}\n(HARMONAIZE_GOLDEN=write makes it anew)",
        line + 1,
        known.lines().nth(line).unwrap_or("(its end)"),
        content.lines().nth(line).unwrap_or("(its end)"),
    );
}
