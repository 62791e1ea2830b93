//! The kernel's modules: which exist, and in which order to load those that are wanted.

use anyhow::{Context, Result, bail};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Modules that another asks for by name at run time, which nobody answers in a guest without modprobe.
const RUNTIME_DEPENDENCIES: &[(&str, &str)] = &[("rdma_rxe", "crc32_generic")];

/// What a kernel's package has: modules by name, and the names built into the kernel.
#[derive(Debug, Default)]
pub(super) struct Modules {
    files: BTreeMap<String, PathBuf>,
    builtin: BTreeSet<String>,
}

impl Modules {
    /// Reads `lib/modules/RELEASE`.
    pub(super) fn find(folder: &Path) -> Result<Self> {
        let list = folder.join("modules.builtin");
        let list = fs::read_to_string(&list).with_context(|| format!("cannot read {}", list.display()))?;
        let builtin = list.lines().filter_map(|line| name(Path::new(line.trim()))).collect();
        let mut files = BTreeMap::new();
        let mut folders = vec![folder.join("kernel")];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))? {
                let path = entry?.path();
                if path.is_dir() {
                    folders.push(path);
                } else if let Some(name) = name(&path) {
                    files.insert(name, path);
                }
            }
        }
        Ok(Self { files, builtin })
    }

    /// Names and contents of the wanted modules and all that they depend on, each after what it depends on.
    pub(super) fn load(&self, wanted: &[&str]) -> Result<Vec<(String, Vec<u8>)>> {
        let mut contents = BTreeMap::new();
        let order = self.order(wanted, |name, path| {
            let bytes = read(path)?;
            let names = depends(&bytes);
            contents.insert(name.to_owned(), bytes);
            Ok(names)
        })?;
        Ok(order
            .into_iter()
            .filter_map(|name| {
                let bytes = contents.remove(&name)?;
                Some((name, bytes))
            })
            .collect())
    }

    fn order(
        &self,
        requested: &[&str],
        mut depends: impl FnMut(&str, &Path) -> Result<Vec<String>>,
    ) -> Result<Vec<String>> {
        let mut order: Vec<String> = Vec::new();
        let mut seen = BTreeSet::new();
        // A module comes twice: to look at what it depends on, and, once those are done, to be loaded.
        let mut todo: Vec<(String, bool)> =
            requested.iter().rev().map(|name| (name.replace('-', "_"), false)).collect();
        while let Some((name, ready)) = todo.pop() {
            if ready {
                order.push(name);
                continue;
            }
            if self.builtin.contains(&name) || !seen.insert(name.clone()) {
                continue;
            }
            let Some(path) = self.files.get(&name) else {
                bail!("the kernel's package has no module {name}")
            };
            let first = RUNTIME_DEPENDENCIES
                .iter()
                .filter(|(asker, _)| *asker == name)
                .map(|(_, asked)| (*asked).to_owned());
            let first: Vec<String> = first.chain(depends(&name, path)?).collect();
            todo.push((name, true));
            todo.extend(first.into_iter().rev().map(|name| (name, false)));
        }
        Ok(order)
    }
}

/// The name of the module in a file: `_` for `-`, as the kernel has it.
fn name(path: &Path) -> Option<String> {
    let file = path.file_name()?.to_str()?;
    let stem = [".ko", ".ko.xz", ".ko.zst"].iter().find_map(|ending| file.strip_suffix(ending))?;
    Some(stem.replace('-', "_"))
}

fn read(path: &Path) -> Result<Vec<u8>> {
    let program = match path.extension().and_then(|ending| ending.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        _ => return fs::read(path).with_context(|| format!("cannot read {}", path.display())),
    };
    let output = Command::new(program).arg("-dcq").arg(path).output();
    let output = output.with_context(|| format!("cannot start {program}"))?;
    if !output.status.success() {
        bail!("{program} cannot unpack {}", path.display());
    }
    Ok(output.stdout)
}

/// What a module's `.modinfo` says after `depends=`: names, of which the kernel needs each before it.
fn depends(module: &[u8]) -> Vec<String> {
    let field = module.split(|byte| *byte == 0).find_map(|text| text.strip_prefix(b"depends="));
    let field = String::from_utf8_lossy(field.unwrap_or_default());
    field.split(',').filter(|name| !name.is_empty()).map(|name| name.replace('-', "_")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn modules(names: &[&str], builtin: &[&str]) -> Modules {
        Modules {
            files: names.iter().map(|name| ((*name).to_owned(), PathBuf::from(name))).collect(),
            builtin: builtin.iter().map(|name| (*name).to_owned()).collect(),
        }
    }

    fn order(modules: &Modules, wanted: &[&str], edges: &[(&str, &str)]) -> Result<Vec<String>> {
        modules.order(wanted, |name, _| {
            Ok(edges.iter().filter(|(from, _)| *from == name).map(|(_, to)| (*to).to_owned()).collect())
        })
    }

    #[test]
    fn modules_load_once_after_their_dependencies() {
        let all = modules(&["rdma_rxe", "ib_core", "ib_uverbs", "udp_tunnel", "crc32_generic"], &["crc32"]);
        let edges = [
            ("rdma_rxe", "ib_core"),
            ("rdma_rxe", "udp_tunnel"),
            ("rdma_rxe", "crc32"),
            ("ib_uverbs", "ib_core"),
        ];
        let found = order(&all, &["ib-uverbs", "rdma_rxe"], &edges).unwrap();
        assert_eq!(found, ["ib_core", "ib_uverbs", "crc32_generic", "udp_tunnel", "rdma_rxe"]);
    }

    #[test]
    fn unknown_and_cyclic_modules_are_handled() {
        let all = modules(&["a", "b"], &[]);
        assert_eq!(order(&all, &["a"], &[("a", "b"), ("b", "a")]).unwrap(), ["b", "a"]);
        let error = order(&all, &["a"], &[("a", "gone")]).unwrap_err().to_string();
        assert!(error.contains("no module gone"), "{error}");
    }

    #[test]
    fn names_and_dependencies_are_read() {
        assert_eq!(name(Path::new("kernel/net/sched/sch-x.ko.xz")).as_deref(), Some("sch_x"));
        assert_eq!(name(Path::new("modules.order")), None);
        assert_eq!(
            depends(b"\x7fELF..\0license=GPL\0depends=ib-core,udp_tunnel\0x"),
            ["ib_core", "udp_tunnel"]
        );
        assert!(depends(b"license=GPL\0depends=\0").is_empty() && depends(b"").is_empty());
    }
}
