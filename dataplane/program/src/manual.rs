//! Man pages and completions, of the definition by which a program reads its arguments.

use clap::Command;
use clap_complete::{Shell, generate_to};
use std::io::Result;
use std::path::Path;

/// Shells, and the folder of each.
const SHELLS: [(Shell, &str); 3] = [(Shell::Bash, "bash"), (Shell::Zsh, "zsh"), (Shell::Fish, "fish")];

/// Writes a page for the program and for each of its commands, and completions for shells. Pages go to `man`, completions
/// to `bash`, `zsh` and `fish`, all in `folder`, which is made.
pub(crate) fn write(mut command: Command, folder: &Path) -> Result<()> {
    command = command.disable_help_subcommand(true);
    let name = command.get_name().to_owned();
    for (shell, own) in SHELLS {
        let own = folder.join(own);
        std::fs::create_dir_all(&own)?;
        generate_to(shell, &mut command, &name, own)?;
    }
    let pages = folder.join("man");
    std::fs::create_dir_all(&pages)?;
    clap_mangen::generate_to(command, pages)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Arg, Command};

    #[test]
    fn each_command_has_its_page() {
        let folder = tempfile::tempdir().unwrap();
        let sub = Command::new("status").about("Shows it").arg(Arg::new("json").long("json").num_args(0));
        write(Command::new("harmonaize").subcommand(sub), folder.path()).unwrap();
        let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
        assert!(read("man/harmonaize.1").contains("harmonaize\\-status(1)"));
        assert!(read("man/harmonaize-status.1").contains("Shows it"));
        for completion in ["bash/harmonaize.bash", "zsh/_harmonaize", "fish/harmonaize.fish"] {
            let text = read(completion);
            assert!(text.contains("status") && text.contains("json"), "{completion}: {text}");
        }
    }
}
