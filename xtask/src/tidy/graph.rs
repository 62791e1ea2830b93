//! Rules on the crate graph: which room may depend on which, and where versions are written.

use super::{TextFile, Tree, Violation, violation};
use anyhow::{Context, Result};
use std::collections::{BTreeMap, BTreeSet};
use toml::{Table, Value};

/// The rooms, and the rooms that each may use directly, with spaces between; `tests` and `bench` may use all.
const ROOMS: &[(&str, &str)] = &[
    ("abi", ""),
    ("plan", "abi"),
    ("kernels", "abi"),
    ("codec", "abi kernels"),
    ("core", "abi plan codec aggregator"),
    ("aggregator", "abi kernels"),
    ("probe", "abi"),
    ("metrics", ""),
    ("program", ""),
    ("units", "abi"),
    ("shm", "abi"),
    ("verbs", "abi shm"),
    ("bindgen", ""),
    ("libibverbs", "shm verbs"),
    ("transport", "abi kernels shm verbs"),
    ("engine", "abi plan kernels codec core aggregator shm transport events"),
    (
        "agent",
        "abi plan kernels codec core aggregator shm verbs libibverbs transport engine api api-tenant \
         probe metrics program units disclose loader events analysis identity",
    ),
    ("client", "abi shm verbs libibverbs api-tenant"),
    ("perf", "client plot program"),
    ("c", "client"),
    ("staging", "client"),
    ("nccl", "client staging"),
    ("nccl-plugin", "client"),
    ("mpi", "client staging"),
    ("python", "client staging"),
    ("events", ""),
    ("programs", "events"),
    ("core-c", "events"),
    ("loader", "events core-c"),
    ("analysis", "abi events"),
    ("api", "abi"),
    ("api-tenant", ""),
    ("topology", "units"),
    ("planner", "abi plan codec aggregator topology units"),
    ("allocator", ""),
    ("disclose", "abi plan planner"),
    ("identity", ""),
    ("store", "abi identity planner"),
    (
        "server",
        "abi plan codec aggregator planner allocator program disclose store api api-tenant analysis identity \
         metrics units",
    ),
    ("cli", "abi api api-tenant client planner program events analysis identity"),
    (
        "fuzz",
        "abi plan kernels codec core aggregator shm transport engine probe api planner server agent \
         analysis",
    ),
    ("guest", ""),
    ("testkit", "api identity plan topology"),
    ("schemas", ""),
    ("plot", ""),
    ("suites", "testkit identity plan plot program"),
    ("xtask", "guest testkit identity suites plot"),
];

/// Rooms of which a tenant runs or reads the code.
const TENANT_FACING: &[&str] = &[
    "abi",
    "shm",
    "verbs",
    "libibverbs",
    "client",
    "staging",
    "c",
    "nccl",
    "nccl-plugin",
    "mpi",
    "python",
    "api-tenant",
];

/// Rooms with provider facts: out of reach of those, however many steps away.
const PROVIDER: &[&str] = &[
    "topology",
    "planner",
    "allocator",
    "store",
    "server",
    "api",
    "transport",
    "engine",
    "agent",
    "core",
    "disclose",
];

/// Checks the manifests.
pub(super) fn check(tree: &Tree) -> Result<Vec<Violation>> {
    let mut found = Vec::new();
    let mut edges: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut manifests: BTreeMap<String, &TextFile> = BTreeMap::new();
    for file in &tree.manifests {
        let manifest: Table =
            file.text.parse().with_context(|| format!("{} is not a manifest", file.path.display()))?;
        if let Some(workspace) = manifest.get("workspace").and_then(Value::as_table) {
            pinned(file, workspace, &mut found);
        }
        let name = manifest.get("package").and_then(|package| package.get("name")).and_then(Value::as_str);
        let Some(name) = name else { continue };
        let room = room(name).to_owned();
        inherited(file, name, &manifest, &mut found);
        let uses = tables(&manifest)
            .filter(|(kind, _)| *kind != "dev-dependencies")
            .flat_map(|(_, table)| table.keys())
            .filter_map(|dependency| dependency.strip_prefix("harmonaize-"));
        edges.insert(room.clone(), uses.map(str::to_owned).collect());
        manifests.insert(room, file);
    }
    for (room, uses) in &edges {
        let Some(file) = manifests.get(room) else { continue };
        allowed(file, room, uses, &mut found);
        if TENANT_FACING.contains(&room.as_str()) {
            check_disclosure(file, room, &edges, &mut found);
        }
    }
    Ok(found)
}

/// A crate's room: its name without the project's.
fn room(name: &str) -> &str {
    name.strip_prefix("harmonaize-").unwrap_or(name)
}

/// Every table of dependencies, those of single targets too.
fn tables(manifest: &Table) -> impl Iterator<Item = (&'static str, &Table)> {
    const KINDS: [&str; 3] = ["dependencies", "build-dependencies", "dev-dependencies"];
    let targets = manifest.get("target").and_then(Value::as_table);
    let targets = targets.into_iter().flat_map(|targets| targets.values()).filter_map(Value::as_table);
    std::iter::once(manifest).chain(targets).flat_map(|table| {
        KINDS.into_iter().filter_map(move |kind| Some((kind, table.get(kind)?.as_table()?)))
    })
}

/// The workspace's table gives each dependency a version or a path inside the tree.
fn pinned(file: &TextFile, workspace: &Table, found: &mut Vec<Violation>) {
    let table = workspace.get("dependencies").and_then(Value::as_table);
    for (name, value) in table.into_iter().flatten() {
        let fine = value.is_str() || value.get("version").is_some() || name.starts_with("harmonaize-");
        if !fine || value.get("git").is_some() {
            let rule = format!("{name} needs a version in the workspace's table");
            found.push(violation(&file.path, line(file, name), rule));
        }
    }
}

/// A member takes every dependency from the workspace's table; itself with other features is the exception.
fn inherited(file: &TextFile, own: &str, manifest: &Table, found: &mut Vec<Violation>) {
    for (kind, table) in tables(manifest) {
        for (name, value) in table {
            let from_table = value.get("workspace").and_then(Value::as_bool) == Some(true);
            let itself = kind == "dev-dependencies" && name == own;
            if !from_table && !itself {
                let rule = format!("{name} must come from the workspace's table: `{name}.workspace = true`");
                found.push(violation(&file.path, line(file, name), rule));
            }
        }
    }
}

fn allowed(file: &TextFile, room: &str, uses: &BTreeSet<String>, found: &mut Vec<Violation>) {
    if matches!(room, "tests" | "bench") {
        return;
    }
    let Some((_, may)) = ROOMS.iter().find(|(name, _)| *name == room) else {
        let rule = format!("{room} is not a room that the crate graph knows (xtask/src/tidy/graph.rs)");
        found.push(violation(&file.path, 1, rule));
        return;
    };
    for other in uses.iter().filter(|other| may.split(' ').all(|one| one != *other)) {
        let rule = format!("{room} may not depend on {other}");
        found.push(violation(&file.path, line(file, &format!("harmonaize-{other}")), rule));
    }
}

/// No chain of dependencies leads from a tenant-facing room to provider facts.
fn check_disclosure(
    file: &TextFile,
    room: &str,
    edges: &BTreeMap<String, BTreeSet<String>>,
    found: &mut Vec<Violation>,
) {
    let mut seen = BTreeSet::from([room]);
    let mut open = vec![vec![room]];
    while let Some(chain) = open.pop() {
        let Some(uses) = chain.last().and_then(|last| edges.get(*last)) else { continue };
        for next in uses.iter().map(String::as_str) {
            let chain: Vec<&str> = chain.iter().copied().chain([next]).collect();
            if PROVIDER.contains(&next) {
                let rule = format!("a tenant-facing crate reaches provider facts: {}", chain.join(" -> "));
                let first = chain.get(1).copied().unwrap_or(next);
                found.push(violation(&file.path, line(file, &format!("harmonaize-{first}")), rule));
            } else if seen.insert(next) {
                open.push(chain);
            }
        }
    }
}

fn line(file: &TextFile, name: &str) -> usize {
    let begins = |text: &str| {
        text.trim_start().strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '.', '=']))
    };
    file.text.lines().position(begins).map_or(0, |at| at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn crates(manifests: &[(&str, &str)]) -> Vec<String> {
        let files = manifests.iter().map(|(name, rest)| TextFile {
            path: format!("{name}/Cargo.toml").into(),
            text: format!("[package]\nname = \"harmonaize-{name}\"\n{rest}"),
        });
        let tree = Tree { manifests: files.collect(), ..Tree::default() };
        check(&tree).unwrap().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn edges_are_listed() {
        let on = |other: &str| format!("[dependencies]\nharmonaize-{other}.workspace = true\n");
        assert_eq!(crates(&[("plan", &on("abi"))]), Vec::<String>::new());
        assert_eq!(crates(&[("plan", &on("engine"))]), ["plan/Cargo.toml:4: plan may not depend on engine"]);
        assert_eq!(crates(&[("tests", &on("agent"))]), Vec::<String>::new());
        assert!(crates(&[("utils", "")])[0].contains("utils is not a room"));
        let in_tests = "[dev-dependencies]\nharmonaize-engine.workspace = true\n";
        assert_eq!(crates(&[("plan", in_tests)]), Vec::<String>::new());
        let on_target = "[target.'cfg(unix)'.dependencies]\nharmonaize-engine.workspace = true\n";
        assert_eq!(crates(&[("plan", on_target)]).len(), 1);
    }

    #[test]
    fn tenants_do_not_reach_provider_facts() {
        let on = |other: &str| format!("[dependencies]\nharmonaize-{other}.workspace = true\n");
        let found = crates(&[("client", &on("shm")), ("shm", &on("abi")), ("abi", &on("planner"))]);
        assert!(found.iter().any(|line| line.contains("client -> shm -> abi -> planner")), "{found:?}");
    }

    #[test]
    fn versions_stand_in_one_table() {
        let own = "[dependencies]\nserde = \"1\"\n";
        assert!(crates(&[("plan", own)])[0].starts_with("plan/Cargo.toml:4: serde must come from"));
        let itself = "[dev-dependencies]\nharmonaize-plan = { path = \".\", features = [\"x\"] }\n";
        assert_eq!(crates(&[("plan", itself)]), Vec::<String>::new());
        let root = TextFile {
            path: "Cargo.toml".into(),
            text:
                "[workspace.dependencies]\na = \"1\"\nb = { git = \"x\" }\nharmonaize-c = { path = \"c\" }\n"
                    .into(),
        };
        let found = check(&Tree { manifests: vec![root], ..Tree::default() }).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].line, found[0].rule.starts_with("b needs a version")), (3, true));
    }
}
