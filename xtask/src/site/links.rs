//! The check of a site's links. Each that stays in the site names a file of it, and an anchor that the file has.

use crate::tidy::documents::path_of;
use anyhow::{Context, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// Attributes that hold a link.
const LINKING: &[&str] = &["href", "src", "xlink:href"];

/// Elements whose text is no markup.
const RAW: &[&str] = &["script", "style"];

/// What a check found.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// How many pages there are.
    pub(super) pages: usize,
    /// How many different links they have, those out of the site left out.
    pub(super) links: usize,
    /// Those that lead nowhere, in the order of pages.
    pub(super) broken: Vec<Broken>,
}

/// A link that leads nowhere.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Broken {
    page: PathBuf,
    link: String,
    why: &'static str,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.page.display(), self.link, self.why)
    }
}

/// Checks the pages under `site`, but for those in its folder `generated`, which are followed to alone. Links to other servers are
/// not followed.
pub(super) fn check(site: &Path, generated: &str) -> Result<Found> {
    let mut files = BTreeMap::new();
    read(site, Path::new(""), &mut files)?;
    let mut found = Found::default();
    for (path, page) in &files {
        let Some(page) = page.as_ref().filter(|_| !path.starts_with(generated)) else { continue };
        found.pages += 1;
        for link in page.links.iter().filter(|link| is_inside(link)) {
            found.links += 1;
            if let Err(why) = follow(&files, path, link) {
                found.broken.push(Broken { page: path.clone(), link: link.clone(), why });
            }
        }
    }
    Ok(found)
}

/// The files of a site, and of those in HTML their anchors and links.
type Files = BTreeMap<PathBuf, Option<Page>>;

fn read(site: &Path, folder: &Path, files: &mut Files) -> Result<()> {
    let whole = site.join(folder);
    for entry in fs::read_dir(&whole).with_context(|| format!("cannot read {}", whole.display()))? {
        let entry = entry?;
        let path = folder.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            read(site, &path, files)?;
            continue;
        }
        let page = if path.extension().is_some_and(|ending| ending == "html") {
            let text = fs::read_to_string(entry.path())
                .with_context(|| format!("cannot read {}", path.display()))?;
            Some(Page::parse(&text))
        } else {
            None
        };
        files.insert(path, page);
    }
    Ok(())
}

/// Whether a link stays in the site: it begins with no scheme, and names no other server.
fn is_inside(link: &str) -> bool {
    let scheme = link.split(['/', '#', '?']).next().is_some_and(|first| first.contains(':'));
    !scheme && !link.starts_with("//")
}

/// Fails where a link of the page at `path` leads nowhere.
fn follow(files: &Files, path: &Path, link: &str) -> Result<(), &'static str> {
    let (target, anchor) = link.split_once('#').unwrap_or((link, ""));
    let target = decoded(target.split('?').next().unwrap_or_default());
    let file = match target.as_str() {
        "" => path.to_owned(),
        // A site may lie in any folder of a server, so no link begins at the server's root.
        _ => path_of(path, &target).ok_or("it leaves the site")?,
    };
    let page =
        files.get(&file).or_else(|| files.get(&file.join("index.html"))).ok_or("there is no such file")?;
    match page {
        Some(page) if !page.has(anchor) => Err("the page has no such anchor"),
        _ => Ok(()),
    }
}

/// What a page has that is about links.
#[derive(Debug, Default)]
struct Page {
    anchors: BTreeSet<String>,
    links: BTreeSet<String>,
}

impl Page {
    /// Reads markup as mdBook and rustdoc write it.
    fn parse(text: &str) -> Self {
        let mut page = Self::default();
        let mut rest = text;
        while let Some((_, tag)) = rest.split_once('<') {
            if let Some(comment) = tag.strip_prefix("!--") {
                rest = comment.split_once("-->").map_or("", |(_, after)| after);
                continue;
            }
            let of_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '-';
            let (name, attributes) = tag.split_at(tag.find(|letter| !of_name(letter)).unwrap_or(tag.len()));
            if name.is_empty() {
                rest = tag;
                continue;
            }
            rest = page.take_attributes(attributes);
            if RAW.contains(&name) {
                rest = rest.split_once(&format!("</{name}")).map_or("", |(_, after)| after);
            }
        }
        page
    }

    /// Takes in a tag's attributes, and returns what follows the tag.
    fn take_attributes<'a>(&mut self, attributes: &'a str) -> &'a str {
        let mut rest = attributes;
        loop {
            rest = rest.trim_start_matches(|letter: char| letter.is_whitespace() || letter == '/');
            match rest.strip_prefix('>') {
                Some(after) => return after,
                None if rest.is_empty() => return rest,
                None => {}
            }
            let ends_name = |letter: char| letter.is_whitespace() || matches!(letter, '=' | '>' | '/');
            let (name, after) = rest.split_at(rest.find(ends_name).unwrap_or(rest.len()));
            let Some(assigned) = after.trim_start().strip_prefix('=') else {
                rest = after;
                continue;
            };
            let assigned = assigned.trim_start();
            let quoted =
                ['"', '\''].into_iter().find_map(|quote| Some((assigned.strip_prefix(quote)?, quote)));
            let ends_bare = |letter: char| letter.is_whitespace() || letter == '>';
            let (value, after) = match quoted {
                Some((text, quote)) => text.split_once(quote).unwrap_or((text, "")),
                None => assigned.split_at(assigned.find(ends_bare).unwrap_or(assigned.len())),
            };
            if name == "id" {
                self.anchors.insert(unescaped(value));
            } else if LINKING.contains(&name) {
                self.links.insert(unescaped(value));
            }
            rest = after;
        }
    }

    /// Whether the page has an anchor, as it is written or without its percent signs: browsers look for both.
    fn has(&self, anchor: &str) -> bool {
        anchor.is_empty() || self.anchors.contains(anchor) || self.anchors.contains(&decoded(anchor))
    }
}

/// An attribute's value without HTML's escapes.
fn unescaped(value: &str) -> String {
    const ESCAPES: &[(&str, &str)] =
        &[("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&#39;", "'"), ("&#x27;", "'"), ("&amp;", "&")];
    ESCAPES.iter().fold(value.to_owned(), |text, (escape, sign)| text.replace(escape, sign))
}

/// A part of a link without its percent signs.
fn decoded(part: &str) -> String {
    let mut pieces = part.split('%');
    let mut bytes = pieces.next().unwrap_or_default().as_bytes().to_vec();
    for piece in pieces {
        let code = piece.get(..2).and_then(|digits| u8::from_str_radix(digits, 16).ok());
        bytes.push(code.unwrap_or(b'%'));
        bytes.extend_from_slice(
            if code.is_some() { piece.get(2..).unwrap_or_default() } else { piece }.as_bytes(),
        );
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is broken in a site whose page `a/page.html` has this body, beside `index.html`, a picture and a generated page.
    fn broken(body: &str) -> Vec<String> {
        let site = tempfile::tempdir().unwrap();
        fs::create_dir(site.path().join("a")).unwrap();
        fs::write(site.path().join("index.html"), "<h1 id='top-1'>x</h1>").unwrap();
        fs::write(site.path().join("a/a picture.svg"), "<svg></svg>").unwrap();
        fs::write(site.path().join("a/page.html"), body).unwrap();
        fs::create_dir(site.path().join("crates")).unwrap();
        fs::write(site.path().join("crates/x.html"), "<b id=f%3C><a href=gone>").unwrap();
        let found = check(site.path(), "crates").unwrap();
        assert_eq!(found.pages, 2);
        found.broken.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn links_that_lead_somewhere_are_fine() {
        let fine = r##"<!doctype html><p id="&lt;own&gt;"><a href="../index.html#top-1">1 < 2</a>
            <a class=x href = '../'>b</a><img src="a%20picture.svg"/><a href="#%3Cown%3E">c</a><a href=../crates/x.html#f%3C>d</a>
            <a href="https://example.org/gone.html">e</a><a href="mailto:a@example.org">f</a><a href="?x=1#">g</a>
            <script src="page.html">if (1 < 2) { "<a href='gone.html'>" }</script><!-- <a href="gone.html"> -->"##;
        assert_eq!(broken(fine), Vec::<String>::new());
    }

    #[test]
    fn links_that_lead_nowhere_are_named() {
        let why = |link: &str, why: &str| vec![format!("a/page.html: {link}: {why}")];
        assert_eq!(broken("<a href='gone.html'>"), why("gone.html", "there is no such file"));
        assert_eq!(broken("<br><img alt src=gone.svg>"), why("gone.svg", "there is no such file"));
        assert_eq!(broken("<a\nhref=\"..#gone\">"), why("..#gone", "the page has no such anchor"));
        assert_eq!(broken("<a href=#own>"), why("#own", "the page has no such anchor"));
        assert_eq!(broken("<a href='/index.html'>"), why("/index.html", "it leaves the site"));
        assert_eq!(broken("<a href='../../index.html'>"), why("../../index.html", "it leaves the site"));
    }

    #[test]
    fn markup_that_breaks_off_ends_the_page() {
        for text in
            ["<", "<a", "<a href", "<a href=", "<a href='x", "<a =", "<!--", "<script>", "<a href=%zz>", "</"]
        {
            let links = Page::parse(text).links.len();
            assert!(links <= 1, "{text}: {links}");
        }
        assert_eq!(decoded("%zz%4"), "%zz%4");
        assert_eq!(decoded("%C3%A9é"), "éé");
    }
}
