//! Rules on the documents: links inside the tree resolve, and named tasks exist.

use super::{Tree, Violation, violation};
use clap::CommandFactory;
use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

/// Checks every Markdown file.
pub(super) fn check(tree: &Tree) -> Vec<Violation> {
    let tasks: BTreeSet<String> =
        crate::task::Arguments::command().get_subcommands().map(|task| task.get_name().to_owned()).collect();
    let mut found = Vec::new();
    for document in &tree.documents {
        let mut fenced = false;
        for (index, line) in document.text.lines().enumerate() {
            if line.trim_start().starts_with("```") {
                fenced = !fenced;
            }
            for name in named_tasks(line).filter(|name| !tasks.contains(*name)) {
                let rule = format!("there is no task `cargo xtask {name}`");
                found.push(violation(&document.path, index + 1, rule));
            }
            for target in links(line).filter(|_| !fenced) {
                if !resolves(tree, &document.path, target) {
                    found.push(violation(
                        &document.path,
                        index + 1,
                        format!("the link to {target} leads nowhere"),
                    ));
                }
            }
        }
    }
    found
}

/// The words after `cargo xtask`, where they are names (not placeholders).
fn named_tasks(line: &str) -> impl Iterator<Item = &str> {
    line.match_indices("cargo xtask ").filter_map(|(at, before)| {
        let rest = line.get(at + before.len()..)?;
        let of_name = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '-';
        let end = rest.find(|letter| !of_name(letter)).unwrap_or(rest.len());
        rest.get(..end).filter(|name| !name.is_empty() && !name.starts_with('-'))
    })
}

/// The targets of Markdown links in a line.
fn links(line: &str) -> impl Iterator<Item = &str> {
    line.match_indices("](").filter_map(|(at, _)| {
        let target = line.get(at + 2..)?.split(')').next()?;
        target.split_whitespace().next()
    })
}

fn resolves(tree: &Tree, document: &Path, target: &str) -> bool {
    if target.contains("://") || target.starts_with("mailto:") || target.starts_with('#') {
        return true;
    }
    let file = target.split('#').next().unwrap_or_default();
    path_of(document, file).is_some_and(|path| path.as_os_str().is_empty() || tree.paths.contains(&path))
}

/// The path in the tree of a document's link to a file; none outside.
pub(crate) fn path_of(document: &Path, file: &str) -> Option<PathBuf> {
    let folder = document.parent().unwrap_or(Path::new(""));
    let mut path = PathBuf::new();
    for part in folder.join(file).components() {
        match part {
            Component::Normal(name) => path.push(name),
            Component::ParentDir if path.pop() => {}
            Component::CurDir => {}
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::TextFile;

    fn found(text: &str) -> Vec<String> {
        let document = TextFile { path: "docs/guide.md".into(), text: text.into() };
        let paths = ["docs", "docs/guide.md", "docs/other.md", "README.md"].map(PathBuf::from).to_vec();
        let tree = Tree { documents: vec![document], paths, ..Tree::default() };
        check(&tree).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn links_resolve() {
        let fine = "[a](other.md) [b](../README.md#top) [c](https://example.org) [d](#here) [e](.)\n";
        assert_eq!(found(fine), Vec::<String>::new());
        assert_eq!(found("\n[a](gone.md)"), ["docs/guide.md:2: the link to gone.md leads nowhere"]);
        assert_eq!(found("[a](../../etc/passwd)").len(), 1);
        assert_eq!(found("```\n[a](gone.md)\n```\n"), Vec::<String>::new());
    }

    #[test]
    fn tasks_exist() {
        assert_eq!(
            found(
                "run `cargo xtask tidy`, `cargo xtask aarch64`, `cargo xtask TASK` or `cargo xtask --help`"
            ),
            Vec::<String>::new()
        );
        assert_eq!(found("`cargo xtask fly`"), ["docs/guide.md:1: there is no task `cargo xtask fly`"]);
    }
}
