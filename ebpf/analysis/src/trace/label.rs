//! A short text that is copied like a number.

use std::fmt;

/// A text of at most [`Label::CAPACITY`] bytes; longer ones are cut at a character.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Label([u8; Label::CAPACITY]);

impl Label {
    /// The most bytes that it holds.
    pub const CAPACITY: usize = 48;

    /// A text, cut to fit. It ends before its first NUL.
    pub fn new(text: &str) -> Self {
        let text = text.split('\0').next().unwrap_or_default();
        let mut end = text.len().min(Self::CAPACITY);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let mut label = [0; Self::CAPACITY];
        for (place, byte) in label.iter_mut().zip(text.bytes().take(end)) {
            *place = byte;
        }
        Self(label)
    }

    /// Its bytes, filled up with zeros.
    pub(super) const fn bytes(&self) -> &[u8; Self::CAPACITY] {
        &self.0
    }

    /// The label with such bytes; none where they are no text.
    pub(super) fn from_bytes(bytes: [u8; Self::CAPACITY]) -> Option<Self> {
        let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
        std::str::from_utf8(text).ok().map(Self::new)
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        let bytes = self.0.split(|byte| *byte == 0).next().unwrap_or_default();
        std::str::from_utf8(bytes).unwrap_or_default()
    }
}

impl Default for Label {
    fn default() -> Self {
        Self([0; Self::CAPACITY])
    }
}

impl From<&str> for Label {
    fn from(text: &str) -> Self {
        Self::new(text)
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_cut_at_characters_and_nul() {
        assert_eq!(Label::new("eth0").as_str(), "eth0");
        assert_eq!(Label::new("a\0b").as_str(), "a");
        assert_eq!(Label::default().as_str(), "");
        let long = format!("{}é", "x".repeat(47));
        assert_eq!(Label::new(&long).as_str(), "x".repeat(47));
        assert_eq!(Label::new(&"y".repeat(99)).as_str().len(), 48);
    }
}
