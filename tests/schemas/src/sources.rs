//! Structures that are encoded, read from their sources.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use syn::{Attribute, Fields, Item};

/// Newtypes that came after a release, and what each is: what crosses is the same.
const TRANSPARENT: &[(&str, &str)] = &[("Sequence", "u32")];

/// The encoded structures of some folders, by name. Where several are named alike, `file::Name` is one of them.
#[derive(Default)]
pub struct Sources {
    /// Each with the stem of its file's name.
    structures: BTreeMap<String, Vec<(String, Item)>>,
}

impl Sources {
    /// Of all sources beneath these folders of the workspace.
    ///
    /// # Errors
    /// Which file cannot be read as Rust.
    pub fn read(folders: &[&str]) -> Result<Self, String> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new("."));
        let mut sources = Self::default();
        for folder in folders {
            for file in rust_files(&root.join(folder))? {
                let wrong = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
                let text = std::fs::read_to_string(&file).map_err(|error| wrong(&error))?;
                let stem = file.file_stem().unwrap_or_default().to_string_lossy();
                sources.add(&stem, &text).map_err(|error| wrong(&error))?;
            }
        }
        Ok(sources)
    }

    fn add(&mut self, file: &str, text: &str) -> syn::Result<()> {
        for item in syn::parse_file(text)?.items {
            if let Some((name, item)) = encoded(item) {
                self.structures.entry(name).or_default().push((file.to_owned(), item));
            }
        }
        Ok(())
    }

    /// The same without these, which others than those that are looked for name.
    #[must_use]
    pub fn without(mut self, left_out: &[&str]) -> Self {
        for (name, items) in &mut self.structures {
            items.retain(|(file, _)| !left_out.contains(&format!("{file}::{name}").as_str()));
        }
        self.structures.retain(|_, items| !items.is_empty());
        self
    }

    /// Lines of all of them; those of `open` enums have one a variant.
    pub fn all(&self, open: &[&str]) -> Vec<String> {
        self.lines(self.structures.keys().map(String::as_str), open)
    }

    /// Lines of these structures and of all that they name, at any number of steps.
    ///
    /// # Errors
    /// Which of them there is not.
    pub fn reachable(&self, roots: &[&str]) -> Result<Vec<String>, String> {
        let mut found = BTreeSet::new();
        let mut open = roots.to_vec();
        while let Some(name) = open.pop() {
            let Some((name, items)) = self.structures.get_key_value(name) else {
                return Err(format!("there is no encoded structure {name}"));
            };
            if !found.insert(name.as_str()) {
                continue;
            }
            let text: String = items.iter().map(|(_, item)| shown(item)).collect();
            let named = text.split(|letter: char| !letter.is_alphanumeric() && letter != '_');
            let known = named.filter_map(|word| self.structures.get_key_value(word));
            open.extend(known.map(|(name, _)| name.as_str()));
        }
        Ok(self.lines(found.into_iter(), &[]))
    }

    fn lines<'a>(&self, names: impl Iterator<Item = &'a str>, open: &[&str]) -> Vec<String> {
        let mut lines = Vec::new();
        for name in names {
            for (file, item) in self.structures.get(name).into_iter().flatten() {
                match item {
                    Item::Enum(one) if open.contains(&format!("{file}::{name}").as_str()) => {
                        for (number, variant) in one.variants.iter().enumerate() {
                            let mut alone = one.clone();
                            alone.variants = std::iter::once(variant.clone()).collect();
                            lines.push(format!("{number}: {}", shown(&Item::Enum(alone))));
                        }
                    }
                    item => lines.push(shown(item)),
                }
            }
        }
        lines
    }
}

fn rust_files(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let wrong = |error: std::io::Error| format!("{}: {error}", folder.display());
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(wrong)? {
        let path = entry.map_err(wrong)?.path();
        if path.is_dir() {
            found.extend(rust_files(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// An item that is encoded, message or plain bytes, without what is for people and for the compiler.
fn encoded(item: Item) -> Option<(String, Item)> {
    match item {
        Item::Struct(mut one) if is_encoded(&one.attrs) => {
            bare(&mut one.attrs);
            bare_fields(&mut one.fields);
            one.vis = syn::Visibility::Inherited;
            Some((one.ident.to_string(), Item::Struct(one)))
        }
        Item::Enum(mut one) if is_encoded(&one.attrs) => {
            bare(&mut one.attrs);
            for variant in &mut one.variants {
                bare(&mut variant.attrs);
                bare_fields(&mut variant.fields);
            }
            one.vis = syn::Visibility::Inherited;
            Some((one.ident.to_string(), Item::Enum(one)))
        }
        _ => None,
    }
}

fn is_encoded(attributes: &[Attribute]) -> bool {
    attributes.iter().filter(|one| one.path().is_ident("derive")).any(|one| {
        let mut found = false;
        let _ = one.parse_nested_meta(|meta| {
            let last = meta.path.segments.last();
            found |= last.is_some_and(|last| last.ident == "Serialize" || last.ident == "IntoBytes");
            Ok(())
        });
        found
    })
}

/// Whether an attribute only bounds how much of a list is taken in: what crosses is the same list.
fn is_bound(attribute: &Attribute) -> bool {
    let syn::Meta::List(list) = &attribute.meta else { return false };
    list.tokens.to_string().starts_with("deserialize_with = \"bounded::<")
}

/// Leaves what the encoding depends on.
fn bare(attributes: &mut Vec<Attribute>) {
    attributes.retain(|one| one.path().is_ident("repr") || (one.path().is_ident("serde") && !is_bound(one)));
}

fn bare_fields(fields: &mut Fields) {
    for field in fields {
        bare(&mut field.attrs);
        field.vis = syn::Visibility::Inherited;
        let syn::Type::Path(one) = &mut field.ty else { continue };
        let Some(last) = one.path.segments.last_mut() else { continue };
        if let Some((_, is)) = TRANSPARENT.iter().find(|(newtype, _)| last.ident == newtype) {
            last.ident = syn::Ident::new(is, last.ident.span());
        }
    }
}

/// One line. Where a structure lies makes no difference to what is encoded, so names are without modules.
fn shown(item: &Item) -> String {
    let file = syn::File { shebang: None, attrs: Vec::new(), items: vec![item.clone()] };
    let text = prettyplease::unparse(&file).split_whitespace().collect::<Vec<_>>().join(" ");
    let mut parts = text.split("::");
    let mut line = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let before = line.trim_end_matches(|letter: char| letter.is_alphanumeric() || letter == '_').len();
        if line[before..].starts_with(|letter: char| letter.is_lowercase()) {
            line.truncate(before);
        } else {
            line.push_str("::");
        }
        line.push_str(part);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "/// A.\n#[derive(Clone, Serialize)] pub struct A { /// One.\n pub one: u8, #[serde(skip)] two: B }\n\
        #[derive(Clone)] struct C;\n#[derive(zerocopy::IntoBytes)] #[repr(C)] struct B(u16);\n\
        #[derive(Serialize)] enum D { X, Y { #[serde(deserialize_with = \"bounded::<2, _, _>\")] z: u8 } }";

    fn sources() -> Sources {
        let mut sources = Sources::default();
        sources.add("file", SOURCE).unwrap();
        sources
    }

    #[test]
    fn what_is_encoded_is_described_and_nothing_else() {
        let a = "struct A { one: u8, #[serde(skip)] two: B, }";
        assert_eq!(sources().all(&[]), [a, "#[repr(C)] struct B(u16);", "enum D { X, Y { z: u8 }, }"]);
        assert_eq!(sources().reachable(&["A"]).unwrap(), [a, "#[repr(C)] struct B(u16);"]);
        assert!(sources().reachable(&["C"]).unwrap_err().contains("no encoded structure C"));
    }

    #[test]
    fn later_newtypes_are_what_they_are_of() {
        let mut sources = Sources::default();
        sources.add("file", "#[derive(Serialize)] struct A { one: Sequence, two: Sequences }").unwrap();
        assert_eq!(sources.all(&[]), ["struct A { one: u32, two: Sequences, }"]);
    }

    #[test]
    fn an_open_enum_has_a_line_a_variant() {
        let lines = sources().all(&["file::D", "other::A"]);
        assert_eq!(lines[2..], ["0: enum D { X, }", "1: enum D { Y { z: u8 }, }"]);
    }

    #[test]
    fn what_others_name_is_left_out() {
        let mut sources = sources();
        sources.add("other", "#[derive(Serialize)] struct B([one::two::B; C::D]);").unwrap();
        let lines = sources.without(&["file::B", "other::D"]).reachable(&["A", "D"]).unwrap();
        assert_eq!(lines[1..], ["struct B([B; C::D]);", "enum D { X, Y { z: u8 }, }"]);
    }
}
