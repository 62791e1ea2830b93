//! Rust source as the rules see it: comments and texts blanked, lines kept.

use proc_macro2::{Delimiter, Span, TokenStream, TokenTree};

/// The source with comments, string and character literals replaced by spaces; all else stands where it did. `None` where
/// it is no Rust.
pub fn code_only(text: &str) -> Option<String> {
    let mut code = Code { text: String::new(), line: 1, column: 0 };
    code.tokens(text.parse().ok()?);
    Some(code.text)
}

/// Code so far, and where it ends: the line from 1, the column from 0.
struct Code {
    text: String,
    line: usize,
    column: usize,
}

impl Code {
    fn tokens(&mut self, tokens: TokenStream) {
        for token in tokens {
            match token {
                TokenTree::Group(group) => {
                    let (open, close) = match group.delimiter() {
                        Delimiter::Parenthesis => ("(", ")"),
                        Delimiter::Brace => ("{", "}"),
                        Delimiter::Bracket => ("[", "]"),
                        Delimiter::None => ("", ""),
                    };
                    self.put(open, group.span_open());
                    self.tokens(group.stream());
                    self.put(close, group.span_close());
                }
                TokenTree::Ident(word) => self.put(&word.to_string(), word.span()),
                TokenTree::Punct(mark) => self.put(mark.as_char().encode_utf8(&mut [0; 4]), mark.span()),
                TokenTree::Literal(_) => {}
            }
        }
    }

    fn put(&mut self, piece: &str, span: Span) {
        let place = span.start();
        while self.line < place.line {
            self.text.push('\n');
            (self.line, self.column) = (self.line + 1, 0);
        }
        while self.column < place.column {
            self.text.push(' ');
            self.column += 1;
        }
        self.text += piece;
        self.column += piece.chars().count();
    }
}

/// The code before the file's inline test module, which stands at its end.
pub fn without_tests(code: &str) -> &str {
    let mut at = 0;
    let mut marked = None;
    for line in code.split_inclusive('\n') {
        let trimmed = line.trim_end();
        if trimmed == "#[cfg(test)]" {
            marked = Some(at);
        } else if trimmed.starts_with("mod ") && trimmed.ends_with('{') {
            if let Some(start) = marked {
                return code.get(..start).unwrap_or(code);
            }
        } else if !trimmed.starts_with("#[") {
            marked = None;
        }
        at += line.len();
    }
    code
}

/// The line, from 1, of a byte offset.
pub fn line_of(text: &str, offset: usize) -> usize {
    text.bytes().take(offset).filter(|byte| *byte == b'\n').count() + 1
}

/// Offsets of `word` in `code` where no identifier's letter touches its ends.
pub fn word_offsets<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let touches = |letter: Option<char>| letter.is_some_and(|l| l.is_alphanumeric() || l == '_');
    code.match_indices(word).map(|(at, _)| at).filter(move |at| {
        let before = code.get(..*at).and_then(|text| text.chars().next_back());
        let after = code.get(at + word.len()..).and_then(|text| text.chars().next());
        !touches(before) && !touches(after)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_texts_are_blanked() {
        let blanked = |text: &str| code_only(text).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(blanked("a // unsafe\nb"), "a b");
        assert_eq!(blanked("a /* x /* y */ z */ b"), "a b");
        assert_eq!(blanked(r#"a "un\"safe" b"#), "a b");
        assert_eq!(blanked("a r#\"x \" y\"# b"), "a b");
        assert_eq!(blanked("fn f<'a>(x: &'a u8) -> char { '\"' }"), "fn f<'a>(x: &'a u8) -> char { }");
        assert_eq!(blanked(r"a '\'' b"), "a b");
        assert_eq!(blanked("r#type b"), "r#type b");
        assert_eq!(code_only("\"a\nb\" c").unwrap(), "\n   c");
        assert_eq!(code_only("a \"open"), None);
    }

    #[test]
    fn the_test_module_is_cut() {
        let code = "fn a() {}\n#[cfg(test)]\nmod tests {\n    use std::fs;\n}\n";
        assert_eq!(without_tests(code), "fn a() {}\n");
        let only_one_item = "#[cfg(test)]\nuse x;\nmod y {\n}\n";
        assert_eq!(without_tests(only_one_item), only_one_item);
    }

    #[test]
    fn partial_words_do_not_match() {
        assert_eq!(word_offsets("Instant MyInstant Instants x.Instant", "Instant").count(), 2);
        assert_eq!(line_of("a\nb\nc", 4), 3);
    }
}
