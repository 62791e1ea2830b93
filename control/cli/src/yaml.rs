//! Values as YAML.

use serde::Serialize;
use serde_json::Value;

/// Keys that some readers of YAML take for something else than text.
const RESERVED: [&str; 9] = ["null", "true", "false", "yes", "no", "on", "off", "y", "n"];

/// A value as a document of YAML 1.2, whose strings are quoted.
pub(crate) fn document(value: &impl Serialize) -> String {
    // Messages have no keys but texts, and so can always be written.
    let value = serde_json::to_value(value).unwrap_or_default();
    let mut text = "---".to_owned();
    write(&mut text, &value, 0);
    text
}

/// Appends a value to the line that has begun. What it contains stands below, so many spaces to the right.
fn write(text: &mut String, value: &Value, indent: usize) {
    let margin = " ".repeat(indent);
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            text.push('\n');
            for (name, value) in fields {
                *text += &format!("{margin}{}:", key(name));
                write(text, value, indent + 2);
            }
        }
        Value::Array(items) if !items.is_empty() => {
            text.push('\n');
            for item in items {
                *text += &format!("{margin}-");
                write(text, item, indent + 2);
            }
        }
        value => *text += &format!(" {}\n", scalar(value)),
    }
}

/// A field's name, quoted where it could be read as something else.
fn key(name: &str) -> String {
    let usual = |c: char| c.is_ascii_lowercase() || c == '_';
    match name.chars().all(usual) && !name.is_empty() && !RESERVED.contains(&name) {
        true => name.to_owned(),
        false => scalar(&Value::String(name.to_owned())),
    }
}

/// A value without others in it, as in JSON. Control characters that JSON leaves as they are are escaped.
fn scalar(value: &Value) -> String {
    let escaped = |c: char| if c.is_control() { format!("\\u{:04x}", u32::from(c)) } else { c.to_string() };
    value.to_string().chars().map(escaped).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_value_is_a_document() {
        let row = json!({"host": "h0", "owner": null, "empty": [], "ranks": [{"rank": 0}, 1.5]});
        let expected = "---\nempty: []\nhost: \"h0\"\nowner: null\nranks:\n  -\n    rank: 0\n  - 1.5\n";
        assert_eq!(document(&row), expected);
    }

    #[test]
    fn what_is_written_is_read_again() {
        let odd = ["", "yes", "- a: b", "\"\\\n\u{1}\u{7f}", "#", "1e3", "\u{e9}"];
        let fields: serde_json::Map<String, Value> =
            odd.iter().map(|text| ((*text).to_owned(), json!([text, {}, u32::MAX, -1]))).collect();
        let value = Value::Object(fields);
        let text = document(&value);
        assert_eq!(serde_saphyr::from_str::<Value>(&text).unwrap(), value, "{text}");
    }
}
