//! Rust source as the rules see it: comments and texts blanked, lines kept.

/// The source with comments, string and character literals replaced by spaces; line breaks stay.
pub fn code_only(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let skipped = skipped(rest, code.chars().next_back());
        let (taken, keep) = if skipped == 0 { (first.len_utf8(), true) } else { (skipped, false) };
        let (piece, next) = rest.split_at_checked(taken).unwrap_or((rest, ""));
        if keep {
            code.push_str(piece);
        } else {
            code.extend(piece.chars().map(|letter| if letter == '\n' { '\n' } else { ' ' }));
        }
        rest = next;
    }
    code
}

/// Bytes of the comment or literal that `rest` begins with, 0 for code; `before` is the code before it.
fn skipped(rest: &str, before: Option<char>) -> usize {
    let in_word = before.is_some_and(|letter| letter.is_alphanumeric() || letter == '_');
    if rest.starts_with("//") {
        return rest.find('\n').unwrap_or(rest.len());
    }
    if rest.starts_with("/*") {
        return block_comment(rest);
    }
    let prefix = rest.find(['"', '\'', '#']).filter(|_| !in_word).unwrap_or(0);
    if matches!(rest.get(..prefix), Some("r" | "br" | "cr"))
        && let Some(length) = raw_text(rest, prefix)
    {
        return length;
    }
    if rest.starts_with('"') {
        return 1 + escaped(rest.get(1..).unwrap_or(""), '"');
    }
    if rest.starts_with('\'') {
        let mut letters = rest.chars().skip(1);
        let literal = matches!((letters.next(), letters.next()), (Some('\\'), _) | (Some(_), Some('\'')));
        if literal {
            return 1 + escaped(rest.get(1..).unwrap_or(""), '\'');
        }
    }
    0
}

fn block_comment(rest: &str) -> usize {
    let (mut depth, mut at) = (0_usize, 0_usize);
    while let Some(left) = rest.get(at..).filter(|left| !left.is_empty()) {
        if left.starts_with("/*") {
            depth += 1;
            at += 2;
        } else if left.starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += left.chars().next().map_or(1, char::len_utf8);
        }
    }
    rest.len()
}

fn raw_text(rest: &str, prefix: usize) -> Option<usize> {
    let after = rest.get(prefix..)?;
    let marks = after.bytes().take_while(|byte| *byte == b'#').count();
    let body = after.get(marks..)?.strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(marks));
    let length = body.find(&end).map_or(body.len(), |at| at + end.len());
    Some(prefix + marks + 1 + length)
}

/// Bytes up to and with the closing quote.
fn escaped(body: &str, quote: char) -> usize {
    let mut escape = false;
    for (at, letter) in body.char_indices() {
        if escape {
            escape = false;
        } else if letter == '\\' {
            escape = true;
        } else if letter == quote {
            return at + letter.len_utf8();
        }
    }
    body.len()
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
        let blanked = |text: &str| code_only(text).split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(blanked("a // unsafe\nb"), "a b");
        assert_eq!(blanked("a /* x /* y */ z */ b"), "a b");
        assert_eq!(blanked(r#"a "un\"safe" b"#), "a b");
        assert_eq!(blanked("a r#\"x \" y\"# b"), "a b");
        assert_eq!(blanked("fn f<'a>(x: &'a u8) -> char { '\"' }"), "fn f<'a>(x: &'a u8) -> char { }");
        assert_eq!(blanked(r"a '\'' b"), "a b");
        assert_eq!(blanked("r#type b"), "r#type b");
        assert_eq!(code_only("\"a\nb\"").lines().count(), 2);
        assert_eq!(blanked("a \"open"), "a");
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
