//! What tenants may call their communicators.

use super::MAX_NAME;

/// Whether a communicator can have this [full name](super::full_name): 1 to [`MAX_NAME`] bytes, all of them seen as they are.
///
/// Control characters, marks of direction and characters without a width are none: with them a name could look like another, or
/// change the line of a log or a table that it stands in.
pub fn is_name(name: &str) -> bool {
    !name.is_empty() && name.len() <= MAX_NAME && !name.chars().any(is_unseen)
}

/// Whether a character is not seen itself, or changes how others are.
fn is_unseen(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{ad}'
                | '\u{61c}'
                | '\u{115f}'..='\u{1160}'
                | '\u{180b}'..='\u{180f}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{3164}'
                | '\u{fe00}'..='\u{fe0f}'
                | '\u{feff}'
                | '\u{ffa0}'
                | '\u{fff0}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e0fff}'
        )
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::format;

    #[test]
    fn names_are_seen_as_they_are() {
        for name in ["world", "job/step 1", "größe", "日本", "a\u{301}", "x_1-2.3"] {
            assert!(is_name(name), "{name:?}");
        }
        assert!(is_name(&"x".repeat(MAX_NAME)) && !is_name(&"x".repeat(MAX_NAME + 1)) && !is_name(""));
    }

    #[test]
    fn control_direction_and_unseen_characters_are_refused() {
        for c in "\0\n\u{1b}\u{7f}\u{85}\u{ad}\u{61c}\u{200b}\u{200d}\u{200e}\u{2028}\u{202e}\u{2066}\u{feff}\u{e0041}".chars() {
            assert!(!is_name(&format!("a{c}b")), "{c:?}");
        }
    }
}
