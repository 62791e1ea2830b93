//! What libbpf says goes into errors instead of onto the standard error output.

use libbpf_rs::{PrintLevel, set_print};
use std::cell::RefCell;

/// The most lines that an error carries: the last ones, which say why.
const MAX_LINES: usize = 25;
/// The most bytes that are kept: a verifier's log may be megabytes long.
const MAX_LOG_BYTES: usize = 1 << 20;

thread_local! {
    /// The library calls back on the thread that called it.
    static LOG: RefCell<String> = const { RefCell::new(String::new()) };
}

fn note(_: PrintLevel, text: String) {
    LOG.with_borrow_mut(|said| {
        if said.len() > MAX_LOG_BYTES {
            said.clear();
        }
        said.push_str(&text);
    });
}

/// From here on, what this thread has the library say is kept.
pub(crate) fn begin() {
    LOG.with_borrow_mut(String::clear);
    set_print(Some((PrintLevel::Warn, note)));
}

/// The last lines since.
pub(crate) fn tail() -> String {
    let said = LOG.with_borrow_mut(std::mem::take);
    let lines: Vec<&str> = said.lines().filter(|line| !line.trim().is_empty()).collect();
    lines.get(lines.len().saturating_sub(MAX_LINES)..).unwrap_or_default().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_tail_is_retained() {
        begin();
        (0..40).for_each(|line| note(PrintLevel::Warn, format!("line {line}\n")));
        let kept = tail();
        assert_eq!(kept.lines().count(), MAX_LINES);
        assert_eq!((kept.lines().next(), kept.lines().last()), (Some("line 15"), Some("line 39")));
        assert_eq!(tail(), "");
    }
}
