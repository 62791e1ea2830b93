//! Programs in C that tests compile, with sanitizers, and run as ranks.

use harmonaize_testkit::workspace::root;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

/// What every program and header has to compile with.
pub const WARNINGS: &[&str] = &["-Wall", "-Wextra", "-Werror", "-pedantic"];

/// Returns what a command printed, once it has succeeded.
///
/// # Panics
/// If it has not.
#[expect(clippy::unwrap_used, reason = "support for tests")]
pub fn succeeded(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let (text, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}\n{text}{error}");
    text.into_owned()
}

/// A program with the folder of the library that it is linked with.
#[derive(Debug)]
pub struct Program {
    /// The program.
    pub path: PathBuf,
    library: PathBuf,
}

impl Program {
    /// Compiles a program of the tree into a folder, with sanitizers of addresses, leaks and undefined behaviour. Links it with a
    /// library of the folder `library`.
    ///
    /// # Panics
    /// If it does not compile.
    #[expect(clippy::unwrap_used, reason = "support for tests")]
    pub fn compile(source: &str, into: &Path, library: &Path, arguments: &[&str]) -> Self {
        let path = into.join(Path::new(source).file_stem().unwrap());
        let mut compile = Command::new("cc");
        compile.args(["-std=c11", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]);
        compile.args(WARNINGS).arg(root().join(source)).arg("-L").arg(library).args(arguments);
        succeeded(compile.arg("-pthread").arg("-o").arg(&path));
        Self { path, library: library.to_owned() }
    }

    /// Starts ranks on the host of a tenant's socket.
    ///
    /// # Panics
    /// If they do not start.
    #[expect(clippy::unwrap_used, reason = "support for tests")]
    pub fn start(
        &self,
        case: Option<&str>,
        ranks: std::ops::Range<u32>,
        all: u32,
        socket: &Path,
    ) -> Vec<Child> {
        let one = |rank: u32| {
            let mut command = Command::new(&self.path);
            command.args(case).env("HARMONAIZE_SOCKET", socket).env("LD_LIBRARY_PATH", &self.library);
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", all.to_string());
            command.env("ID", self.path.with_extension(case.unwrap_or("id")));
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        ranks.map(one).collect()
    }
}

/// Returns what each rank printed, once all have succeeded.
///
/// # Panics
/// If one has not, or has written to its standard error.
#[expect(clippy::unwrap_used, reason = "support for tests")]
pub fn printed(case: &str, ranks: Vec<Child>) -> Vec<String> {
    let ended: Vec<Output> = ranks.into_iter().map(|rank| rank.wait_with_output().unwrap()).collect();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let wrong = ended.iter().any(|output| !output.status.success() || !output.stderr.is_empty());
    let errors: Vec<String> = ended.iter().map(|output| text(&output.stderr)).collect();
    assert!(!wrong, "{case}: {errors:#?}");
    ended.iter().map(|output| text(&output.stdout)).collect()
}
