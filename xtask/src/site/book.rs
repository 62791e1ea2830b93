//! What mdBook reads: its configuration, the table of contents, and the pages. Links to other files of the tree lead to copies.

use crate::tidy::documents::path_of;
use anyhow::{Context, Result};
use maud::{DOCTYPE, html};
use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

/// The site's folder of the crates' documentation.
pub(super) const CRATES: &str = "crates";

/// The first pages, before the doors.
const FIRST: &[&str] = &["README.md", "docs/glossary.md"];

/// The doors, and the pages behind each. A page is named by its path in the tree, or in [`MADE`].
const DOORS: &[(&str, &[&str])] = &[
    ("Operate", &["docs/operators.md", "docs/testbed.md"]),
    ("Train", &["docs/tenants.md", "docs/python.md", "docs/threat-model.md", "client.md"]),
    (
        "Measure",
        &[
            "docs/performance/README.md",
            "docs/performance/aggregation.md",
            "docs/performance/allocation.md",
            "docs/performance/compression.md",
            "docs/performance/control.md",
            "docs/performance/cooperation.md",
            "docs/performance/dataplane.md",
            "docs/performance/sharing.md",
            "docs/performance/sweep.md",
            "docs/performance/telemetry.md",
            "docs/performance/torch.md",
            "docs/performance/trust.md",
        ],
    ),
    ("Observe", &["observe.md"]),
    (
        "Develop",
        &[
            "docs/developing.md",
            "docs/ARCHITECTURE.md",
            "docs/protocol.md",
            "crates.md",
            "docs/decisions/README.md",
            "docs/decisions/aggregation.md",
            "docs/decisions/codecs.md",
            "docs/decisions/control.md",
            "docs/decisions/dataplane.md",
            "docs/decisions/telemetry.md",
            "docs/decisions/tenants.md",
        ],
    ),
];

/// The last page.
const LAST: &str = "CHANGELOG.md";

/// Pages that the site alone has, for what no page of the tree is about. They are links into pages, and to
/// crates.
const MADE: &[(&str, &str)] = &[
    (
        "client.md",
        "# Interfaces of the client

- [Rust](crates/harmonaize_client/index.html)
- [C](dataplane/c/include/harmonaize.h)
- [Python](docs/python.md)
",
    ),
    (
        "observe.md",
        "# What is observed

- [Daily commands](docs/operators.md#daily-commands)
- [Telemetry](docs/operators.md#telemetry): one host with `harmonaize-agent observe`, all of them with `harmonaize top`, traces
- [What findings mean, and what to do](docs/operators.md#what-findings-mean-and-what-to-do)
- [The page](docs/operators.md#the-page) of the fabric in a browser
- [Metrics](docs/operators.md#metrics), rules, dashboards and the [runbook](docs/operators.md#runbook)
",
    ),
    (
        "crates.md",
        "# Crates

[The architecture](docs/ARCHITECTURE.md#code-map) says what each crate is for. What others build on:

- [`harmonaize-client`](crates/harmonaize_client/index.html), the tenant's library
- [`harmonaize-abi`](crates/harmonaize_abi/index.html), what tenant and agent share byte for byte
- [`harmonaize-plan`](crates/harmonaize_plan/index.html), collectives as programs, and their checker
- [`harmonaize-codec`](crates/harmonaize_codec/index.html), compressed tensors
- [`harmonaize-api`](crates/harmonaize_api/index.html), the provider's gRPC interface

The list beside each of these pages has all others.
",
    ),
];

/// mdBook's configuration.
const CONFIGURATION: &str = r#"[book]
title = "harmonaize"
language = "en"

[build]
create-missing = false
use-default-preprocessors = false

[output.html]
no-section-label = true
smart-punctuation = false
input-404 = ""

[output.html.print]
enable = false

[output.html.playground]
runnable = false
"#;

/// The endings of files that a browser shows; others are copied as text.
const SHOWN: &[&str] = &["csv", "html", "json", "png", "svg"];

/// Every page, in the order of the book.
fn pages() -> impl Iterator<Item = &'static str> {
    let doors = DOORS.iter().flat_map(|(_, pages)| *pages);
    FIRST.iter().chain(doors).chain([&LAST]).copied()
}

/// Writes everything that mdBook reads of the tree under `root` into `folder`.
pub(super) fn write(root: &Path, folder: &Path) -> Result<()> {
    let source = folder.join("src");
    put(&folder.join("book.toml"), CONFIGURATION)?;
    let (mut titles, mut files) = (Vec::new(), BTreeSet::new());
    for name in pages() {
        let text = match MADE.iter().find(|(made, _)| *made == name) {
            Some((_, text)) => (*text).to_owned(),
            None => fs::read_to_string(root.join(name)).with_context(|| format!("cannot read {name}"))?,
        };
        let title = text.lines().next().and_then(|line| line.strip_prefix("# "));
        titles
            .push((name, title.with_context(|| format!("{name} does not begin with its title"))?.to_owned()));
        let text = rewritten(root, Path::new(name), &text, &mut files);
        put(&source.join(page_file(name)), &text)?;
    }
    put(&source.join("SUMMARY.md"), summary(&titles))?;
    for file in &files {
        take(root, &source, file)?;
    }
    Ok(())
}

/// The file of a page: mdBook makes a folder's first page of `index.md`.
fn page_file(name: &str) -> String {
    match name.strip_suffix("README.md") {
        Some(folder) => format!("{folder}index.md"),
        None => name.to_owned(),
    }
}

/// The table of contents of pages and their titles. Pages of a folder stand below its first.
fn summary(titles: &[(&str, String)]) -> String {
    let entry = |name: &str| {
        let title = titles.iter().find(|(page, _)| *page == name).map_or(name, |(_, title)| title);
        format!("[{title}]({})\n", page_file(name))
    };
    let mut text = String::from("# Summary\n\n");
    FIRST.iter().for_each(|page| text += &entry(page));
    for (door, pages) in DOORS {
        let _ = write!(text, "\n# {door}\n\n");
        for page in *pages {
            let folder = page.rsplit_once('/').map_or("", |(folder, _)| folder);
            let first = format!("{folder}/README.md");
            let below = *page != first && pages.contains(&first.as_str());
            let _ = write!(text, "{}- {}", if below { "  " } else { "" }, entry(page));
        }
    }
    text + "\n---\n\n" + &entry(LAST)
}

/// A page's text with links to what the site has. The files that are no pages, and must be there, are added to `files`.
fn rewritten(root: &Path, page: &Path, text: &str, files: &mut BTreeSet<PathBuf>) -> String {
    let (mut fenced, mut written) = (false, String::new());
    for line in text.lines() {
        fenced ^= line.trim_start().starts_with("```");
        let mut parts = line.split("](");
        written += parts.next().unwrap_or_default();
        for part in parts {
            let (target, after) = part.split_once(')').unwrap_or((part, ""));
            let (link, anchor) = target.split_at(target.find('#').unwrap_or(target.len()));
            let path =
                path_of(page, link).filter(|path| !fenced && !link.is_empty() && root.join(path).exists());
            let link = match path {
                Some(path) if pages().any(|page| Path::new(page) == path) => page_file(link),
                Some(path) => {
                    let link = shown_as(link, root.join(&path).is_dir());
                    files.insert(path);
                    link
                }
                None => link.to_owned(),
            };
            let end = part.get(target.len()..part.len() - after.len()).unwrap_or_default();
            written += &["](", &link, anchor, end, after].concat();
        }
        written.push('\n');
    }
    written
}

/// The link to the copy of a file or folder, of the link to itself.
fn shown_as(link: &str, folder: bool) -> String {
    match link.rsplit_once('.') {
        _ if folder => format!("{}/index.html", link.trim_end_matches('/')),
        // mdBook takes `.md.txt` for a page.
        Some((stem, "md")) => format!("{stem}.txt"),
        Some((_, ending)) if SHOWN.contains(&ending) => link.to_owned(),
        _ => format!("{link}.txt"),
    }
}

/// Copies a file to where [`shown_as`] has it. Of a folder, its files, with a list of them.
fn take(root: &Path, source: &Path, path: &Path) -> Result<()> {
    let from = root.join(path);
    let to = source.join(shown_as(&path.to_string_lossy(), from.is_dir()));
    if !from.is_dir() {
        let bytes = fs::read(&from).with_context(|| format!("cannot read {}", from.display()))?;
        return put(&to, bytes);
    }
    let mut names = Vec::new();
    for entry in fs::read_dir(&from).with_context(|| format!("cannot read {}", from.display()))? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    names.sort();
    for name in &names {
        take(root, source, &path.join(name))?;
    }
    let list = html! {
        (DOCTYPE)
        html lang="en" {
            head { meta charset="utf-8"; title { (path.display()) } }
            body {
                h1 { (path.display()) }
                ul { @for name in &names { li { a href=(shown_as(name, false)) { (name) } } } }
            }
        }
    };
    put(&to, list.into_string())
}

/// Writes a file, and makes its folder.
fn put(path: &Path, bytes: impl AsRef<[u8]>) -> Result<()> {
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::Tree;
    use harmonaize_testkit::workspace;

    #[test]
    fn the_book_has_each_page_once() {
        let tree = Tree::read(&workspace::root()).unwrap();
        let documents = tree.documents.iter().map(|document| document.path.to_string_lossy().into_owned());
        let mut expected: Vec<String> = documents
            .filter(|path| path.starts_with("docs/") || !path.contains('/'))
            .chain(MADE.iter().map(|(name, _)| (*name).to_owned()))
            .collect();
        let mut listed: Vec<&str> = pages().collect();
        expected.sort();
        listed.sort_unstable();
        assert_eq!(listed, expected);
    }

    #[test]
    fn links_lead_to_what_the_site_has() {
        let root = tempfile::tempdir().unwrap();
        for file in
            ["README.md", "docs/operators.md", "docs/a.svg", "docs/examples/b.toml", "bench/NOTICE.md"]
        {
            put(&root.path().join(file), "text").unwrap();
        }
        let mut files = BTreeSet::new();
        let page = Path::new("docs/tenants.md");
        let mut link = |target: &str| {
            let text = rewritten(root.path(), page, &format!("a [b]({target}), `c`"), &mut files);
            text.trim_end().strip_prefix("a [b](").unwrap().strip_suffix("), `c`").unwrap().to_owned()
        };
        assert_eq!(link("operators.md#top"), "operators.md#top");
        assert_eq!(link("../README.md#try-it"), "../index.md#try-it");
        assert_eq!(link("#here"), "#here");
        assert_eq!(link("https://example.org/README.md"), "https://example.org/README.md");
        assert_eq!(link("gone.md"), "gone.md");
        assert_eq!(link("a.svg"), "a.svg");
        assert_eq!(link("examples"), "examples/index.html");
        assert_eq!(link("../bench/NOTICE.md"), "../bench/NOTICE.txt");
        let fenced = "```\n[b](examples/b.toml)\n```\n[b](examples/b.toml) [open](x\n";
        let text = rewritten(root.path(), page, fenced, &mut files);
        assert_eq!(text, "```\n[b](examples/b.toml)\n```\n[b](examples/b.toml.txt) [open](x\n");
        let expected = ["bench/NOTICE.md", "docs/a.svg", "docs/examples", "docs/examples/b.toml"];
        assert_eq!(files.iter().map(|path| path.to_str().unwrap()).collect::<Vec<_>>(), expected);

        let source = root.path().join("src");
        files.iter().for_each(|file| take(root.path(), &source, file).unwrap());
        assert_eq!(fs::read_to_string(source.join("bench/NOTICE.txt")).unwrap(), "text");
        let list = fs::read_to_string(source.join("docs/examples/index.html")).unwrap();
        assert!(list.contains("<a href=\"b.toml.txt\">b.toml</a>"), "{list}");
        assert!(source.join("docs/examples/b.toml.txt").is_file());
    }

    #[test]
    fn pages_of_a_folder_stand_below_its_first() {
        let titles = [("docs/performance/README.md", "Results".to_owned()), (LAST, "Changes".to_owned())];
        let text = summary(&titles);
        assert!(
            text.contains("# Measure\n\n- [Results](docs/performance/index.md)\n  - [docs/performance/"),
            "{text}"
        );
        assert!(text.contains("\n- [docs/testbed.md](docs/testbed.md)\n"), "{text}");
        assert!(text.ends_with("\n---\n\n[Changes](CHANGELOG.md)\n"), "{text}");
    }
}
