//! Rules on the tree's shape and its sources: names at the top, purity, unsafe code, first lines.

use super::source::{code_only, line_of, without_tests, word_offsets};
use super::{TextFile, Tree, Violation, violation};
use std::path::Path;

/// What may stand at the top, besides dot files and build outputs.
const TOP: &[&str] = &[
    "Cargo.toml",
    "Cargo.lock",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "dataplane",
    "ebpf",
    "control",
    "xtask",
    "bench",
    "tests",
    "docs",
    "target",
];

/// Rooms without clock, socket, thread, file or async runtime.
const PURE: &[&str] = &[
    "dataplane/plan",
    "dataplane/codec",
    "dataplane/core",
    "dataplane/aggregator",
    "control/planner",
    "control/allocator",
    "control/disclose",
    "ebpf/analysis",
];

/// Rooms that may hold unsafe code.
const UNSAFE: &[&str] = &[
    "dataplane/shm",
    "dataplane/kernels",
    // Only the calls on libibverbs.
    "dataplane/libibverbs",
    "dataplane/probe",
    "dataplane/transport",
    // Only copies from and to a tenant's own memory.
    "dataplane/staging",
    "dataplane/c",
    "dataplane/nccl",
    "dataplane/nccl-plugin",
    "dataplane/mpi",
    "dataplane/python",
    "ebpf",
    // Only the constructors of the tensor view.
    "dataplane/abi/src/view.rs",
    // A measuring program alone: rings of io_uring take addresses.
    "bench/src/bin/stream.rs",
];

/// What a pure room's code must not name. It is a path, or its last part in a group of imports from std.
const IMPURE: &[(&str, &str)] = &[
    ("std::net", "net"),
    ("std::thread", "thread"),
    ("std::fs", "fs"),
    ("std::os", "os"),
    ("std::process", "process"),
    ("std::time::Instant", "Instant"),
    ("std::time::SystemTime", "SystemTime"),
    ("tokio", ""),
    ("Instant::now", ""),
    ("SystemTime", ""),
];

/// Checks them all.
pub(super) fn check(tree: &Tree) -> Vec<Violation> {
    let mut found = top(tree);
    for file in &tree.rust {
        first_line(file, &mut found);
        let Some(code) = code_only(&file.text) else {
            found.push(violation(&file.path, 0, "no rule can be checked: this is no Rust"));
            continue;
        };
        unsafe_code(file, &code, &mut found);
        if PURE.iter().any(|room| file.path.starts_with(Path::new(room).join("src"))) && !is_test(&file.path)
        {
            purity(file, without_tests(&code), &mut found);
        }
    }
    for manifest in &tree.manifests {
        crate_root(tree, manifest, &mut found);
    }
    found
}

fn top(tree: &Tree) -> Vec<Violation> {
    let stray = tree.top.iter().filter(|name| !name.starts_with('.') && !TOP.contains(&name.as_str()));
    stray
        .map(|name| violation(Path::new(name), 0, "the top level is fixed, and this is not part of it"))
        .collect()
}

fn first_line(file: &TextFile, found: &mut Vec<Violation>) {
    let first = file.text.lines().next().unwrap_or_default();
    if first.strip_prefix("//!").is_none_or(|sentence| sentence.trim().len() <= 3) {
        found.push(violation(&file.path, 1, "a source file begins with a `//!` line that says what it is"));
    }
}

fn is_test(path: &Path) -> bool {
    path.file_stem().is_some_and(|stem| stem == "tests")
        || path.components().any(|part| part.as_os_str() == "tests")
}

/// Unsafe code stands in its rooms, and each use says why it is sound.
fn unsafe_code(file: &TextFile, code: &str, found: &mut Vec<Violation>) {
    let allowed = UNSAFE.iter().any(|place| file.path.starts_with(place));
    // Integration tests and benches are crates of their own, for example with a counting allocator.
    let product = file.path.components().any(|part| part.as_os_str() == "src");
    let lines: Vec<&str> = file.text.lines().collect();
    for at in word_offsets(code, "unsafe") {
        let line = line_of(code, at);
        if !allowed && product {
            found.push(violation(
                &file.path,
                line,
                "unsafe code belongs in shm, kernels, verbs, transport, probe, staging, c, nccl, nccl-plugin, mpi, python or ebpf",
            ));
        }
        let after = code.get(at + "unsafe".len()..).unwrap_or_default().trim_start();
        // Functions, and types of functions, say in their first lines what callers promise.
        let declares =
            after.starts_with("extern") && !after.split('{').next().is_some_and(|start| start.contains("fn"));
        let acts = after.starts_with('{') || after.starts_with("impl") || declares;
        let above = lines.get(line.saturating_sub(10)..line).unwrap_or_default();
        if acts && !above.iter().any(|text| text.contains("SAFETY:")) {
            found.push(violation(&file.path, line, "an unsafe block needs a `// SAFETY:` comment above it"));
        }
    }
}

fn purity(file: &TextFile, code: &str, found: &mut Vec<Violation>) {
    let mut report = |at: usize, what: &str| {
        let rule = format!("a pure room has no clock, socket, thread, file or async runtime: {what}");
        found.push(violation(&file.path, line_of(code, at), rule));
    };
    for (path, _) in IMPURE {
        word_offsets(code, path).for_each(|at| report(at, path));
    }
    for (start, _) in code.match_indices("use std::{") {
        let group = code.get(start..).and_then(|rest| rest.split(';').next()).unwrap_or_default();
        for (path, last) in IMPURE.iter().filter(|(_, last)| !last.is_empty()) {
            word_offsets(group, last).for_each(|at| report(start + at, path));
        }
    }
    for (start, _) in code.match_indices("use std::time::{") {
        let group = code.get(start..).and_then(|rest| rest.split(';').next()).unwrap_or_default();
        word_offsets(group, "Instant").for_each(|at| report(start + at, "std::time::Instant"));
    }
}

/// A crate that may not hold unsafe code forbids it at its root, so that the compiler checks it too.
fn crate_root(tree: &Tree, manifest: &TextFile, found: &mut Vec<Violation>) {
    let Some(folder) = manifest.path.parent().filter(|folder| folder.components().count() > 0) else {
        return;
    };
    let unsafe_room =
        UNSAFE.iter().any(|place| Path::new(place).starts_with(folder) || folder.starts_with(place));
    if unsafe_room {
        return;
    }
    for root in ["src/lib.rs", "src/main.rs"] {
        let path = folder.join(root);
        let Some(file) = tree.rust.iter().find(|file| file.path == path) else { continue };
        if !file.text.lines().any(|line| line.trim() == "#![forbid(unsafe_code)]") {
            found.push(violation(&path, 1, "the crate's root must say `#![forbid(unsafe_code)]`"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(path: &str, text: &str) -> Tree {
        Tree { rust: vec![TextFile { path: path.into(), text: text.into() }], ..Tree::default() }
    }

    fn rules(path: &str, text: &str) -> Vec<(usize, String)> {
        check(&tree(path, text)).into_iter().map(|found| (found.line, found.rule)).collect()
    }

    fn breaks(path: &str, text: &str, line: usize, part: &str) {
        let rules = rules(path, text);
        assert!(rules.iter().any(|(at, rule)| *at == line && rule.contains(part)), "{part}: {rules:?}");
    }

    #[test]
    fn the_top_is_fixed() {
        let names =
            |names: &[&str]| Tree { top: names.iter().map(|n| (*n).into()).collect(), ..Tree::default() };
        assert_eq!(check(&names(&["Cargo.toml", ".git", "docs", "target", ".deny.toml"])), []);
        assert_eq!(check(&names(&["scripts", "docs"]))[0].path, Path::new("scripts"));
    }

    #[test]
    fn a_source_begins_with_its_sentence() {
        breaks("a/src/lib.rs", "use x;\n", 1, "begins with");
        breaks("a/src/lib.rs", "//!\n", 1, "begins with");
    }

    #[test]
    fn a_source_that_cannot_be_read_keeps_no_rule() {
        breaks("dataplane/core/src/a.rs", "//! Sentence.\nfn x() {\n", 0, "no Rust");
    }

    #[test]
    fn unsafe_code_has_its_rooms_and_reasons() {
        let reasoned = "//! Sentence.\n// SAFETY: it is.\nunsafe { x() }\n";
        assert_eq!(rules("dataplane/shm/src/a.rs", reasoned), []);
        breaks("dataplane/engine/src/a.rs", reasoned, 3, "belongs in");
        breaks("dataplane/abi/src/lib.rs", reasoned, 3, "belongs in");
        assert_eq!(rules("dataplane/abi/src/view.rs", reasoned), []);
        breaks("dataplane/shm/src/a.rs", "//! Sentence.\nunsafe { x() }\n", 2, "SAFETY");
        breaks("dataplane/shm/src/a.rs", "//! Sentence.\nunsafe extern \"C\" { fn x(); }\n", 2, "SAFETY");
        assert_eq!(
            rules("dataplane/shm/src/a.rs", "//! Sentence.\ntype X = unsafe extern \"C\" fn();\n"),
            []
        );
        assert_eq!(rules("dataplane/core/src/a.rs", "//! No unsafe { here.\n#![forbid(unsafe_code)]\n"), []);
    }

    #[test]
    fn pure_rooms_take_time_and_bytes_as_arguments() {
        let core = "dataplane/core/src/a.rs";
        for line in [
            "use std::net::TcpStream;",
            "use std::{fmt, fs};",
            "let t = Instant::now();",
            "use std::time::{Duration, Instant};",
            "use std::{time::SystemTime};",
            "async fn f() { tokio::spawn(x) }",
            "std::thread::spawn(f);",
        ] {
            breaks(core, &format!("//! Sentence.\n{line}\n"), 2, "pure room");
            assert_eq!(rules("dataplane/engine/src/a.rs", &format!("//! Sentence.\n{line}\n")), [], "{line}");
        }
        let fine = "//! Sentence.\nuse std::time::Duration;\nuse std::{fmt, mem};\n// std::fs\n";
        assert_eq!(rules(core, fine), []);
        let in_tests = "//! Sentence.\n#[cfg(test)]\nmod tests {\n    use std::fs;\n}\n";
        assert_eq!(rules(core, in_tests), []);
    }

    #[test]
    fn safe_crates_forbid_unsafe_code() {
        let with = |room: &str, text: &str| {
            let mut tree = tree(&format!("{room}/src/lib.rs"), text);
            tree.manifests.push(TextFile { path: format!("{room}/Cargo.toml").into(), text: String::new() });
            check(&tree).len()
        };
        assert_eq!(with("dataplane/engine", "//! Sentence.\n"), 1);
        assert_eq!(with("dataplane/engine", "//! Sentence.\n#![forbid(unsafe_code)]\n"), 0);
        assert_eq!(with("dataplane/shm", "//! Sentence.\n"), 0);
        assert_eq!(with("dataplane/abi", "//! Sentence.\n"), 0);
    }
}
