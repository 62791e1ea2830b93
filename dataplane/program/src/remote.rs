//! Commands on other hosts: names that reach one, and words as its shell takes them.

/// Whether a text is a name or an address of a host, behind a user's name or not. It is no option of the command that reaches it.
pub fn is_host(text: &str) -> bool {
    let fine = |letter: char| letter.is_ascii_alphanumeric() || ".:-_%[]".contains(letter);
    let is_name = |name: &str| !name.is_empty() && !name.starts_with('-') && name.chars().all(fine);
    let (user, name) = text.split_once('@').map_or((None, text), |(user, name)| (Some(user), name));
    user.is_none_or(is_name) && is_name(name)
}

/// A word as a shell takes it for one. It stays as it is where nothing in it means anything to a shell.
pub fn quoted(word: &str) -> String {
    let fine = |letter: char| letter.is_ascii_alphanumeric() || "-_./:=,@%+".contains(letter);
    if !word.is_empty() && word.chars().all(fine) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_names_or_addresses_and_no_options() {
        for host in ["n1", "root@n2.lab", "10.0.0.3", "fe80::1%eth0", "[fd00::1]"] {
            assert!(is_host(host), "{host}");
        }
        for text in
            ["", "@n2", "a@", "-oProxyCommand=x", "root@-oProxyCommand", "$(reboot)", "n1;reboot", "n2/x"]
        {
            assert!(!is_host(text), "{text}");
        }
    }

    #[test]
    fn words_are_quoted_where_a_shell_would_read_more() {
        for (word, expected) in [("a/b=c", "a/b=c"), ("", "''"), ("a b", "'a b'"), ("it's", r"'it'\''s'")] {
            assert_eq!(quoted(word), expected);
        }
    }
}
