//! Files that tests compare with: with `HARMONAIZE_GOLDEN=write` before its command a test writes them anew.

use crate::workspace;
use clap::Command;

/// Whether tests write such files: the environment has `HARMONAIZE_GOLDEN=write`.
pub fn writes() -> bool {
    std::env::var_os("HARMONAIZE_GOLDEN").is_some_and(|wish| wish == "write")
}

/// Compares a text with the file of this path in the workspace. It writes the file instead where the
/// environment has `HARMONAIZE_GOLDEN=write`.
///
/// # Panics
/// If the file has another text, or cannot be written.
pub fn same(path: &str, content: &str) {
    let file = workspace::root().join(path);
    if writes() {
        let folder = file.parent().map_or(Ok(()), std::fs::create_dir_all);
        let written = folder.and_then(|()| std::fs::write(&file, content));
        assert!(written.is_ok(), "{path}: {written:?}");
        return;
    }
    let committed = std::fs::read_to_string(&file).unwrap_or_default();
    let difference = difference(&committed, content).unwrap_or_default();
    assert!(difference.is_empty(), "{path} {difference}\n(HARMONAIZE_GOLDEN=write makes it anew)");
}

/// The first line in which two texts differ.
fn difference(committed: &str, content: &str) -> Option<String> {
    if committed == content {
        return None;
    }
    let differs = committed.lines().zip(content.lines()).position(|(old, new)| old != new);
    let line = differs.unwrap_or(committed.lines().count().min(content.lines().count()));
    let of = |text: &str| text.lines().nth(line).unwrap_or("(its end)").to_owned();
    Some(format!("differs at line {}:\n- {}\n+ {}", line + 1, of(committed), of(content)))
}

/// Returns what `--help` prints of a program and of each of its commands, without values of the environment.
pub fn help(program: Command) -> String {
    let program = without_values(program);
    let mut text = String::new();
    append_help(&mut text, &program, &program, &[program.get_name()]);
    text
}

fn without_values(command: Command) -> Command {
    command.mut_args(|argument| argument.hide_env_values(true)).mut_subcommands(without_values)
}

fn append_help(text: &mut String, program: &Command, command: &Command, words: &[&str]) {
    // To the parser a page of help is an error.
    let outcome = program.clone().try_get_matches_from(words.iter().copied().chain(["--help"]));
    let page = outcome.err().map_or_else(String::new, |error| error.to_string());
    *text += &format!("$ {} --help\n", words.join(" "));
    text.extend(page.trim_end().lines().flat_map(|line| [line.trim_end(), "\n"]));
    *text += "\n";
    for inner in command.get_subcommands() {
        append_help(text, program, inner, &[words, &[inner.get_name()]].concat());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Arg;

    #[test]
    fn each_command_has_its_help_without_values() {
        let at = Arg::new("at").long("at").env("PATH").help("Where it is").required(true);
        let inner = Command::new("inner").about("Works within").subcommand(Command::new("most"));
        let text = help(Command::new("outer").arg(at).subcommand(inner));
        let heads: Vec<&str> = text.lines().filter(|line| line.starts_with("$ ")).collect();
        assert_eq!(heads, ["$ outer --help", "$ outer inner --help", "$ outer inner most --help"]);
        assert!(text.contains("Where it is [env: PATH]\n") && text.contains("\nWorks within\n"), "{text}");
    }

    #[test]
    fn the_first_line_that_differs_is_shown() {
        assert_eq!(difference("a\nb\n", "a\nb\n"), None);
        assert_eq!(difference("a\nb\n", "a\nc\n").unwrap(), "differs at line 2:\n- b\n+ c");
        assert_eq!(difference("a\n", "a\nc\n").unwrap(), "differs at line 2:\n- (its end)\n+ c");
    }
}
