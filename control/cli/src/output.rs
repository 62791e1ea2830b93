//! How replies are printed: for people, or for programs as JSON, as YAML, or by a template.

use crate::text::{line, page, visible};
use crate::yaml::document;
use serde::Serialize;
use serde_json::Value;
use serde_json_path::JsonPath;
use std::str::FromStr;

/// A format of `-o`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// The usual columns.
    Table,
    /// More columns.
    Wide,
    /// Complete, as JSON.
    Json,
    /// Complete, as YAML.
    Yaml,
    /// What a template selects.
    JsonPath(Template),
}

impl FromStr for Format {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text {
            "table" => Self::Table,
            "wide" => Self::Wide,
            "json" => Self::Json,
            "yaml" => Self::Yaml,
            text => {
                let template = text.strip_prefix("jsonpath=");
                let template = template.ok_or("none of table, wide, json, yaml and jsonpath=TEMPLATE")?;
                Self::JsonPath(template.parse()?)
            }
        })
    }
}

impl Format {
    /// A format of a page, which has no wide one.
    pub(crate) fn of_page(text: &str) -> Result<Self, String> {
        match text.parse()? {
            Self::Wide => Err("none of table, json, yaml and jsonpath=TEMPLATE".to_owned()),
            format => Ok(format),
        }
    }

    /// Whether programs read it, and no column.
    pub(crate) const fn is_for_programs(&self) -> bool {
        !matches!(self, Self::Table | Self::Wide)
    }

    /// A row for programs: an object a line, a document, or a line by the template.
    pub(crate) fn row(&self, row: &impl Serialize) -> String {
        match self {
            Self::Yaml => document(row),
            // Messages have no keys but texts, and so can always be written.
            Self::JsonPath(template) => template.text(&serde_json::to_value(row).unwrap_or_default()),
            Self::Table | Self::Wide | Self::Json => line(row),
        }
    }
}

/// How a page is printed.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct PageArguments {
    /// How it is printed: table, json, yaml, or by a template, such as `jsonpath={.agents[*].host}`.
    #[arg(short, long, value_name = "FORMAT", default_value = "table", value_parser = Format::of_page)]
    pub(crate) output: Format,
    /// The same as `-o json`.
    #[arg(long)]
    pub(crate) json: bool,
}

impl PageArguments {
    /// Whether programs read it.
    pub(crate) const fn is_for_programs(&self) -> bool {
        self.json || self.output.is_for_programs()
    }

    /// A reply as it is to be printed; `text` has it for people.
    pub(crate) fn page<T: Serialize>(&self, reply: &T, text: impl FnOnce(&T) -> String) -> String {
        match &self.output {
            Format::Yaml | Format::JsonPath(_) if !self.json => self.output.row(reply),
            Format::Table | Format::Wide if !self.json => text(reply),
            _ => page(reply),
        }
    }
}

/// A text with JSONPath expressions (RFC 9535) and quoted texts in braces, as kubectl has it; or one expression alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Template(Vec<Part>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    Path(JsonPath),
}

impl FromStr for Template {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        if !text.contains('{') {
            return Ok(Self(vec![Part::Path(expression(text)?)]));
        }
        let (mut parts, mut ahead) = (Vec::new(), text);
        while let Some((before, behind)) = ahead.split_once('{') {
            let (inner, after) = split_at_brace(behind).ok_or("a brace is not closed")?;
            parts.push(Part::Text(before.to_owned()));
            parts.push(match inner.starts_with('"') {
                true => Part::Text(serde_json::from_str(inner).map_err(|error| format!("{inner}: {error}"))?),
                false => Part::Path(expression(inner)?),
            });
            ahead = after;
        }
        parts.push(Part::Text(ahead.to_owned()));
        Ok(Self(parts))
    }
}

/// An expression, which need not name its root.
fn expression(text: &str) -> Result<JsonPath, String> {
    let rooted = match text.chars().next() {
        Some('$') => text.to_owned(),
        Some('@') => text.replacen('@', "$", 1),
        Some('.' | '[') => format!("${text}"),
        _ => return Err(format!("`{text}`: an expression begins with `.`, `[`, `@` or `$`")),
    };
    JsonPath::parse(&rooted).map_err(|error| format!("`{text}` is no JSONPath expression: {error}"))
}

/// What stands before and behind the first closing brace outside quotes.
fn split_at_brace(text: &str) -> Option<(&str, &str)> {
    let (mut quote, mut escaped) = (None, false);
    for (at, c) in text.char_indices() {
        match (quote, c) {
            _ if escaped => escaped = false,
            (Some(_), '\\') => escaped = true,
            (Some(open), c) if open == c => quote = None,
            (None, '"' | '\'') => quote = Some(c),
            (None, '}') => {
                let (inner, behind) = text.split_at(at);
                return Some((inner, behind.strip_prefix('}')?));
            }
            _ => {}
        }
    }
    None
}

impl Template {
    /// Lines with what the expressions select of a value, with spaces between several values. What is not there is empty.
    fn text(&self, value: &Value) -> String {
        let mut text = String::new();
        for part in &self.0 {
            match part {
                Part::Text(own) => text += own,
                Part::Path(path) => {
                    let selected: Vec<String> = path.query(value).into_iter().map(bare).collect();
                    text += &selected.join(" ");
                }
            }
        }
        if !text.ends_with('\n') {
            text.push('\n');
        }
        text
    }
}

/// A value as shells want it: a text without quotes, all else as JSON.
fn bare(value: &Value) -> String {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    text.chars().map(visible).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// What a template makes of a reply, or why it is none.
    fn selected(template: &str) -> Result<String, String> {
        let format: Format = format!("jsonpath={template}").parse()?;
        Ok(format.row(&json!({
            "build": "0.2.0",
            "agents": [
                {"host": "h0", "connected": true, "errors": 0, "report": {"ranks": [0, 1]}},
                {"host": "h\u{1b}1", "connected": false, "errors": 3, "report": null},
            ],
        })))
    }

    #[test]
    fn templates_select_as_kubectl_s_do() {
        let cases = [
            ("{.agents[*].host}", "h0 h?1\n"),
            (".agents[*].errors", "0 3\n"),
            (".build", "0.2.0\n"),
            ("{$.agents[0]['host']}: {@.agents[0].report}", "h0: {\"ranks\":[0,1]}\n"),
            ("{.agents[-1].errors} of {.build}{\"\\n\"}", "3 of 0.2.0\n"),
            ("{.agents[?(@.connected==false)].errors}", "3\n"),
            ("{.agents[?@.host == \"}\"].host}{.agents[?@.host == '}'].host}|", "|\n"),
            ("{..errors}", "0 3\n"),
            ("a {.nothing[3].here} b", "a  b\n"),
            ("{\"}{\"}", "}{\n"),
        ];
        for (template, expected) in cases {
            assert_eq!(selected(template).as_deref(), Ok(expected), "{template}");
        }
    }

    #[test]
    fn a_wrong_template_is_refused_by_its_wrong_part() {
        let cases = [
            ("{.agents", "a brace is not closed"),
            ("{range .agents[*]}{.host}{end}", "`range .agents[*]`: an expression begins with "),
            ("{.agents[}", "`.agents[` is no JSONPath expression: "),
            ("{\"\\q\"}", "\"\\q\": "),
            ("build", "`build`: an expression begins with "),
        ];
        for (template, start) in cases {
            let error = selected(template).unwrap_err();
            assert!(error.starts_with(start), "{template}: {error}");
        }
        assert!("csv".parse::<Format>().is_err() && Format::of_page("wide").is_err());
    }
}
