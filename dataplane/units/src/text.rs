//! TOML from people: values or an error that says which line, for topology and configuration alike.

use serde::de::DeserializeOwned;
use std::fmt;

/// A place in a text, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// Line.
    pub line: usize,
    /// Column, in characters.
    pub column: usize,
}

impl Position {
    /// The place of a byte; the end for a byte beyond it.
    pub fn of(text: &str, byte: usize) -> Self {
        let before = text.get(..byte).unwrap_or(text);
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or("").chars().count() + 1;
        Self { line, column }
    }
}

/// A text whose positions are asked for many times. They take a search instead of a walk through all of it.
/// Finds positions by line starts.
pub struct Lines<'a> {
    text: &'a str,
    starts: Vec<usize>,
}

impl<'a> Lines<'a> {
    /// Indexes the line starts of `text`.
    pub fn new(text: &'a str) -> Self {
        let starts = std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect();
        Self { text, starts }
    }

    /// The same as [`Position::of`].
    pub fn position(&self, byte: usize) -> Position {
        let byte = if self.text.is_char_boundary(byte) { byte } else { self.text.len() };
        let line = self.starts.partition_point(|start| *start <= byte);
        let start = self.starts.get(line.saturating_sub(1)).copied().unwrap_or(0);
        let column = self.text.get(start..byte).unwrap_or("").chars().count() + 1;
        Position { line, column }
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}", self.line, self.column)
    }
}

/// A text that is not TOML, or not what was asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {flaw}")]
pub struct TextError {
    /// Where.
    pub at: Position,
    /// What is wrong.
    pub flaw: TextFlaw,
}

/// What is wrong with a text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TextFlaw {
    /// It is not TOML, a key is unknown or missing, or a value is not of its kind. The reader of TOML says which.
    #[error("{0}")]
    Toml(String),
    /// A key that cannot change while what reads it runs.
    #[error(
        "`{key}` cannot change at run time{}: restart for it, or take the change back",
        if *gone { ", and is gone here" } else { "" }
    )]
    Unchangeable {
        /// Which.
        key: String,
        /// It is not there any more.
        gone: bool,
    },
}

/// Reads TOML into a value.
///
/// # Errors
/// Where the text is not TOML, a key is unknown or missing, or a value is not of its kind; with the line.
pub fn parse_toml<T: DeserializeOwned>(text: &str) -> Result<T, TextError> {
    toml::from_str(text).map_err(|error: toml::de::Error| {
        let byte = error.span().map_or(text.len(), |span| span.start);
        let flaw = TextFlaw::Toml(error.message().trim_end().replace('\n', "; "));
        TextError { at: Position::of(text, byte), flaw }
    })
}

/// The first key of a TOML text that is changed, new or gone since the text before. `changeable` keys do not count. The
/// error says where it stands, or begins where it is gone, and that it cannot change while what reads it runs.
///
/// # Errors
/// Names the key and its line. A text that is not TOML differs in nothing: who reads it has said so.
pub fn unchanged_but(changeable: &[&str], before: &str, now: &str) -> Result<(), TextError> {
    let values = |text: &str| text.parse::<toml::Table>().unwrap_or_default();
    let (old, new) = (values(before), values(now));
    let keys = new.keys().chain(old.keys()).filter(|key| !changeable.contains(&key.as_str()));
    let differing = keys.filter(|key| old.get(*key) != new.get(*key));
    let places = toml::de::DeTable::parse(now).map(|table| {
        let keys = table.get_ref().keys().map(|key| (key.get_ref().to_string(), key.span().start));
        keys.collect::<std::collections::BTreeMap<String, usize>>()
    });
    let places = places.unwrap_or_default();
    let place = |key: &String| places.get(key).copied().unwrap_or(now.len());
    let Some((byte, key)) = differing.map(|key| (place(key), key)).min() else { return Ok(()) };
    let flaw = TextFlaw::Unchangeable { key: key.clone(), gone: !new.contains_key(key) };
    Err(TextError { at: Position::of(now, byte), flaw })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Sample {
        #[allow(dead_code)]
        size: crate::Bytes,
    }

    #[test]
    fn errors_have_positions() {
        let cases = [
            ("size = 4", 1, 8, "invalid type: integer `4`, expected a size in quotes, such as \"4MiB\""),
            ("\n\nsise = \"4MiB\"", 3, 1, "unknown field `sise`, expected `size`"),
            ("# µ\nsize = \"4Mib\"", 2, 8, "`4Mib` is not a size"),
            ("size = ", 1, 8, ""),
        ];
        for (text, line, column, message) in cases {
            let error = parse_toml::<Sample>(text).unwrap_err();
            assert_eq!(error.at, Position { line, column }, "{text}: {error}");
            assert!(matches!(&error.flaw, TextFlaw::Toml(said) if said.starts_with(message)), "{error}");
        }
        assert_eq!(Position::of("a\nb", 99), Position { line: 2, column: 2 });
        for text in ["", "a", "\n", "µ\na\n\nbcµ", "a\n"] {
            for byte in 0..text.len() + 2 {
                assert_eq!(Lines::new(text).position(byte), Position::of(text, byte), "{text:?} {byte}");
            }
        }
    }

    #[test]
    fn keys_that_must_stay_are_named_with_their_line() {
        let before = "host = \"h0\"\nspin = \"50us\"\n[[tenant]]\nname = \"a\"\n[rdma]\nmtu = 1024\n";
        let changed = |now: &str| unchanged_but(&["tenant"], before, now);
        assert_eq!(changed(before), Ok(()));
        let spaced = before.replace("host = ", "# comment\nhost  =  ");
        assert_eq!(changed(&format!("{spaced}[[tenant]]\nname = \"b\"\n")), Ok(()));
        let expect = |now: String, (line, column): (usize, usize), key: &str, gone: bool| {
            let flaw = TextFlaw::Unchangeable { key: key.to_owned(), gone };
            assert_eq!(changed(&now), Err(TextError { at: Position { line, column }, flaw }));
        };
        expect(before.replace("50us", "60us"), (2, 1), "spin", false);
        expect(before.replace("1024", "4096"), (5, 2), "rdma", false);
        expect(before.replace("spin = \"50us\"\n", ""), (6, 1), "spin", true);
        expect(format!("listen = 1\n{before}"), (1, 1), "listen", false);
        assert_eq!(
            changed("").unwrap_err().to_string(),
            "line 1, column 1: `host` cannot change at run time, and is gone here: \
             restart for it, or take the change back"
        );
    }
}
