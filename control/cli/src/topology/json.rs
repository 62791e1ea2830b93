//! JSON and YAML with the path to each value, for errors that say where.

use super::Source;
use super::draft::ImportError;
use super::problem::Problem;
use serde_json::Value;

/// A value within a file.
#[derive(Clone)]
pub(super) struct At<'a> {
    file: &'a str,
    path: String,
    value: &'a Value,
}

/// Reads YAML, of which JSON is a part.
///
/// # Errors
/// [`ImportError::Text`] with line and column.
pub(super) fn parse_yaml(source: &Source) -> Result<Value, ImportError> {
    // A node may be named `n` or `yes`.
    let options = serde_saphyr::options! { strict_booleans: true };
    serde_saphyr::from_str_with_options(&source.text, options).map_err(|error| {
        let place = error.location().map(|location| (location.line(), location.column()));
        let what = error.without_snippet().to_string();
        let what = Problem::Format(what.lines().next().unwrap_or_default().to_owned());
        match place {
            Some((line, column)) => ImportError::Text { file: source.name(), line, column, what },
            None => ImportError::Input { file: source.name(), path: "(its root)".to_owned(), what },
        }
    })
}

/// Reads JSON.
///
/// # Errors
/// [`ImportError::Text`] with line and column.
pub(super) fn parse_json(source: &Source) -> Result<Value, ImportError> {
    serde_json::from_str(&source.text).map_err(|error| ImportError::Text {
        file: source.name(),
        line: u64::try_from(error.line()).unwrap_or(u64::MAX),
        column: u64::try_from(error.column()).unwrap_or(u64::MAX),
        what: Problem::Format(error.to_string()),
    })
}

impl<'a> At<'a> {
    /// The root of a file.
    pub(super) const fn root(file: &'a str, value: &'a Value) -> Self {
        Self { file, path: String::new(), value }
    }

    /// The error that something is wrong here.
    pub(super) fn wrong(&self, what: Problem) -> ImportError {
        let path = if self.path.is_empty() { "(its root)" } else { &self.path };
        ImportError::Input { file: self.file.to_owned(), path: path.to_owned(), what }
    }

    /// The value of a key; none if this is no object, has no such key, or has null there.
    pub(super) fn get(&self, key: &str) -> Option<Self> {
        let value = self.value.get(key).filter(|value| !value.is_null())?;
        let path = if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) };
        Some(Self { file: self.file, path, value })
    }

    /// Keys with values.
    ///
    /// # Errors
    /// This is no object.
    pub(super) fn entries(&self) -> Result<Vec<(String, Self)>, ImportError> {
        let Some(object) = self.value.as_object() else {
            return Err(self.wrong(Problem::NoObject));
        };
        let at = |(key, value): (&String, &'a Value)| {
            let path = if self.path.is_empty() { key.clone() } else { format!("{}.{key}", self.path) };
            (key.clone(), Self { file: self.file, path, value })
        };
        Ok(object.iter().map(at).collect())
    }

    /// The elements of a list, or this alone where it is none.
    pub(super) fn elements(&self) -> Vec<Self> {
        let Some(list) = self.value.as_array() else { return vec![self.clone()] };
        let at = |(index, value)| Self { file: self.file, path: format!("{}[{index}]", self.path), value };
        list.iter().enumerate().map(at).collect()
    }

    /// The first element of a list, or this where it is none.
    pub(super) fn first(&self) -> Option<Self> {
        self.elements().into_iter().next()
    }

    /// A text or a number, where need be within a list or beneath `value`.
    pub(super) fn text(&self) -> Option<String> {
        match self.value {
            Value::String(text) => Some(text.clone()),
            Value::Number(number) => Some(number.to_string()),
            Value::Array(_) => self.first()?.text(),
            Value::Object(_) => match self.get("value")?.value {
                Value::String(text) => Some(text.clone()),
                _ => None,
            },
            _ => None,
        }
    }

    /// A text that must be there.
    ///
    /// # Errors
    /// There is none.
    pub(super) fn name(&self) -> Result<String, ImportError> {
        self.text().filter(|text| !text.is_empty()).ok_or_else(|| self.wrong(Problem::NoName))
    }

    /// Whether this is `true`.
    pub(super) fn is_true(&self) -> bool {
        self.value.as_bool() == Some(true)
            || self.first().is_some_and(|first| first.value.as_bool() == Some(true))
    }

    /// Values by their names: an object's keys, or the `name` of each element of a list.
    ///
    /// # Errors
    /// It is neither, or an element has no name.
    pub(super) fn named(&self) -> Result<Vec<(String, Self)>, ImportError> {
        if !self.value.is_array() {
            return self.entries();
        }
        let name = |element: Self| match element.get("name") {
            Some(name) => Ok((name.name()?, element)),
            None => Err(element.wrong(Problem::Missing("name"))),
        };
        self.elements().into_iter().map(name).collect()
    }
}
