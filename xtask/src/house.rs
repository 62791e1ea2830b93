//! `cargo xtask house`: what to look at in the sources. A report, which never fails for what it finds.

mod code;
mod findings;

use anyhow::{Result, bail};
use code::{FunctionInfo, Room};
use findings::{Findings, TypeSize};
use harmonaize_testkit::workspace;
use serde::Serialize;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// How many types and functions are listed.
const LISTED: usize = 20;

/// What `cargo xtask house` takes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask house                    a line for each room, the largest types, the longest functions
  cargo xtask house control/server     each pair, circle and impl of one room
  cargo xtask house --json             all of it, for a program")]
pub struct Args {
    /// Rooms to show in full, by their folders; a line for each where none is named
    #[arg(value_name = "FOLDER")]
    pub rooms: Vec<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// What is printed.
#[derive(Debug, Serialize)]
struct Report {
    rooms: Vec<Findings>,
    most_methods: Vec<TypeSize>,
    most_fields: Vec<TypeSize>,
    longest_functions: Vec<FunctionInfo>,
}

impl Report {
    fn of(rooms: Vec<Findings>) -> Self {
        let types = || rooms.iter().flat_map(|room| room.types.iter().cloned());
        let (mut by_methods, mut by_fields) = (types().collect::<Vec<_>>(), types().collect::<Vec<_>>());
        by_methods.sort_by_key(|found| std::cmp::Reverse(found.methods));
        by_fields.sort_by_key(|found| std::cmp::Reverse(found.fields));
        let flagged = by_methods.iter().filter(|found| found.flagged).count();
        by_methods.truncate(flagged.max(LISTED));
        by_fields.truncate(LISTED);
        let mut functions: Vec<FunctionInfo> =
            rooms.iter().flat_map(|room| room.functions.iter().cloned()).collect();
        functions.sort_by_key(|found| std::cmp::Reverse(found.lines));
        functions.truncate(LISTED);
        Self { rooms, most_methods: by_methods, most_fields: by_fields, longest_functions: functions }
    }

    /// For people; rooms in full where that was asked for.
    fn text(&self, full: bool) -> String {
        let mut text = format!(
            "{:<24} {:>5} {:>6} {:>16} {:>8} {:>8} {:>6}\n",
            "room", "files", "pairs", "parent and child", "circles", "largest", "impls"
        );
        for room in &self.rooms {
            let nested = room.pairs.iter().filter(|pair| pair.parent_and_child).count();
            let largest = room.circles.first().map_or(0, Vec::len);
            let (pairs, circles, impls) = (room.pairs.len(), room.circles.len(), room.stray_impls.len());
            let _ = writeln!(
                text,
                "{:<24} {:>5} {pairs:>6} {nested:>16} {circles:>8} {largest:>8} {impls:>6}",
                room.room.display(),
                room.files
            );
        }
        for room in self.rooms.iter().filter(|_| full) {
            details(&mut text, room);
        }
        text += "\nTypes of most methods (* over 60)\n";
        for found in &self.most_methods {
            let mark = if found.flagged { '*' } else { ' ' };
            let TypeSize { name, methods, method_files, .. } = found;
            let place = place(&found.file, found.line);
            let _ = writeln!(text, "{mark}{methods:>5} in {method_files:>2} files  {name:<24} {place}");
        }
        text += "\nTypes of most fields\n";
        for found in &self.most_fields {
            let _ =
                writeln!(text, "{:>6}  {:<24} {}", found.fields, found.name, place(&found.file, found.line));
        }
        text += "\nLongest functions\n";
        for found in &self.longest_functions {
            let _ =
                writeln!(text, "{:>6}  {:<32} {}", found.lines, found.name, place(&found.file, found.line));
        }
        text
    }
}

fn details(text: &mut String, room: &Findings) {
    let shown = |path: &Path| path.strip_prefix(&room.room).unwrap_or(path).display().to_string();
    let _ = writeln!(text, "\n{}: files that need each other", room.room.display());
    for pair in &room.pairs {
        let nested = if pair.parent_and_child { " (parent and child)" } else { "" };
        let _ = writeln!(text, "  {} <-> {}{nested}", shown(&pair.one), shown(&pair.other));
        let _ =
            writeln!(text, "    -> {}\n    <- {}", pair.one_needs.join(", "), pair.other_needs.join(", "));
    }
    let _ = writeln!(text, "{}: circles by imports", room.room.display());
    for circle in &room.circles {
        let files: Vec<String> = circle.iter().map(|path| shown(path)).collect();
        let _ = writeln!(text, "  {} files: {}", files.len(), files.join(", "));
    }
    let _ = writeln!(text, "{}: impls outside their types' modules", room.room.display());
    for stray in &room.stray_impls {
        let _ = writeln!(
            text,
            "  {}:{}: {} of {}",
            shown(&stray.file),
            stray.line,
            stray.name,
            shown(&stray.defined)
        );
    }
}

fn place(file: &Path, line: usize) -> String {
    format!("{}:{line}", file.display())
}

/// Runs the task.
pub fn run(args: &Args) -> Result<()> {
    let root = workspace::root();
    let all = crate::tidy::Tree::read(&root)?;
    let mut rooms: Vec<PathBuf> =
        all.manifests.iter().filter_map(|file| Some(file.path.parent()?.to_path_buf())).collect();
    rooms.retain(|folder| root.join(folder).join("src").is_dir());
    if let Some(unknown) = args.rooms.iter().find(|asked| !rooms.contains(&asked.components().collect())) {
        bail!("there is no room {}; `cargo xtask house` lists them", unknown.display());
    }
    let full = !args.rooms.is_empty();
    rooms.retain(|room| !full || args.rooms.iter().any(|asked| asked.components().eq(room.components())));
    let found: Result<Vec<Findings>> =
        rooms.into_iter().map(|room| Ok(Findings::of(room.clone(), &Room::read(&root, &room)?))).collect();
    let report = Report::of(found?);
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{}", report.text(full));
    }
    Ok(())
}
