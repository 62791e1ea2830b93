//! Container images, made without a daemon. Each is an archive of an OCI layout with one layer, of a program and the libraries that
//! it loads.

use super::contents::{Contents, Libraries, copy, files, mode, name};
use super::{Arch, Package, deb, empty, folder, tar};
use crate::aarch64::toolchain::{EMULATOR, Toolchain};
use anyhow::{Context, Result, bail};
use harmonaize_testkit::strict;
use harmonaize_testkit::workspace;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, UNIX_EPOCH};

/// An image.
pub(super) struct Image {
    /// Its name in a registry.
    pub name: &'static str,
    /// What it runs, always.
    entry: &'static [&'static str],
    /// The configuration that it runs with, unless something else is asked for.
    config: &'static str,
    /// Files of the list in it: the program, and configuration. The same files make the same layer.
    files: &'static [&'static str],
    /// The user that it runs as.
    pub user: &'static str,
    /// A folder that the user may write to.
    state: Option<&'static str>,
}

/// The files of a host's agent and of an aggregator: one program.
const AGENT: &[&str] =
    &["/usr/bin/harmonaize-agent", "/etc/harmonaize/agent.toml", "/etc/harmonaize/aggregator.toml"];

/// The images.
pub(super) const IMAGES: [Image; 3] = [
    Image {
        name: "harmonaize-agent",
        entry: &["/usr/bin/harmonaize-agent"],
        config: "/etc/harmonaize/agent.toml",
        files: AGENT,
        // A container's capabilities are root's alone.
        user: "0:0",
        state: None,
    },
    Image {
        name: "harmonaize-aggregator",
        entry: &["/usr/bin/harmonaize-agent", "--role", "aggregator"],
        config: "/etc/harmonaize/aggregator.toml",
        files: AGENT,
        user: USER,
        state: None,
    },
    Image {
        name: "harmonaize-control",
        entry: &["/usr/bin/harmonaize-control"],
        config: "/etc/harmonaize/control.toml",
        files: &[
            "/usr/bin/harmonaize-control",
            "/etc/harmonaize/control.toml",
            "/etc/harmonaize/topology.toml",
        ],
        user: USER,
        state: Some("var/lib/harmonaize"),
    },
];

/// Who runs what needs no privilege.
const USER: &str = "65532:65532";
/// What names the users, and says that hosts are looked for in `/etc/hosts` and by DNS.
const NAMES: [(&str, &str); 3] = [
    (
        "etc/passwd",
        "root:x:0:0:root:/:/usr/sbin/nologin\nharmonaize:x:65532:65532::/var/lib/harmonaize:/usr/sbin/nologin\n",
    ),
    ("etc/group", "root:x:0:\nharmonaize:x:65532:\n"),
    ("etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n"),
];

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

/// Where Debian's libraries of an architecture lie on this machine, and what dpkg knows of their packages.
pub(super) struct System {
    arch: Arch,
    root: PathBuf,
}

impl System {
    /// This machine's own, or those that are unpacked for the other architecture.
    pub(super) fn of(arch: Arch, toolchain: Option<&Toolchain>) -> Result<Self> {
        Ok(Self { arch, root: toolchain.map_or(Ok("/".into()), Toolchain::loaded)? })
    }

    /// The folder of libraries, as programs of the architecture look for it.
    fn libraries(&self) -> PathBuf {
        Path::new("usr/lib").join(format!("{}-linux-gnu", self.arch.machine()))
    }

    /// The loader's path, as programs name it.
    fn loader(&self) -> &'static str {
        match self.arch {
            Arch::Amd64 => "usr/lib64/ld-linux-x86-64.so.2",
            Arch::Arm64 => "usr/lib/ld-linux-aarch64.so.1",
        }
    }

    fn find(&self, library: &str) -> Result<PathBuf> {
        let merged = self.root.join(self.libraries());
        let split = self.root.join("lib").join(merged.file_name().unwrap_or_default());
        let mut found = [merged, split].into_iter().map(|folder| folder.join(library));
        found.find(|path| path.is_file()).with_context(|| format!("{library} is not on this machine"))
    }

    /// What dpkg knows of a package.
    fn status(&self, package: &str) -> Result<Vec<u8>> {
        if self.arch != Arch::HOST {
            return Ok(fs::read(self.root.join("var/lib/dpkg/status.d").join(package))?);
        }
        let name = format!("{package}:{}", self.arch.name());
        let output = Command::new("dpkg-query").arg("--status").arg(&name).output()?;
        if !output.status.success() {
            bail!("dpkg does not know {name}: {}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(output.stdout)
    }
}

/// A layer that is made.
struct Layer {
    /// The digest of its archive, not compressed.
    id: String,
    compressed: Vec<u8>,
}

/// Makes them, and reads each back; the archives. Images of the same files have the same layer.
pub(super) fn make(package: &Package, contents: &Contents, system: &System) -> Result<Vec<PathBuf>> {
    let home = folder().join("oci");
    let (mut made, mut layers) = (Vec::new(), BTreeMap::new());
    for image in &IMAGES {
        let layer = match layers.entry((image.files, image.state)) {
            Entry::Occupied(layer) => layer.into_mut(),
            Entry::Vacant(place) => {
                empty(&home.join("root"))?;
                fill(contents, system, image, &home.join("root"))?;
                place.insert(pack(package, image, &home)?)
            }
        };
        let file = write(package, image, layer, &home)?;
        check(&file, package, system, image)?;
        made.push(file);
    }
    Ok(made)
}

/// Writes an image's archive.
fn write(package: &Package, image: &Image, layer: &Layer, home: &Path) -> Result<PathBuf> {
    let layout = home.join("layout");
    let blobs = layout.join("blobs/sha256");
    empty(&layout)?;
    fs::create_dir_all(&blobs)?;
    let config = blob(&blobs, CONFIG, &serde_json::to_vec(&describe(package, image, &layer.id)?)?)?;
    let layers = [blob(&blobs, LAYER, &layer.compressed)?];
    let manifest = json!({ "schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers });
    let mut manifest = blob(&blobs, MANIFEST, &serde_json::to_vec(&manifest)?)?;
    let tag = tag(package.version);
    if let Some(manifest) = manifest.as_object_mut() {
        manifest.insert("platform".into(), platform(package.arch));
        let names = json!({
            "org.opencontainers.image.ref.name": tag,
            // Where containerd and docker look.
            "io.containerd.image.name": format!("localhost/{}:{tag}", image.name),
        });
        manifest.insert("annotations".into(), names);
    }
    let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": [manifest] });
    fs::write(layout.join("index.json"), serde_json::to_vec(&index)?)?;
    fs::write(layout.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)?;
    let file = folder().join(format!("{}_{tag}_{}.oci.tar", image.name, package.arch.name()));
    let mut archive = tar::plain(package, &file);
    archive.args(["--create", "--owner=root:0", "--group=root:0"]);
    workspace::run(archive.arg("--directory").arg(&layout).args(["blobs", "index.json", "oci-layout"]))?;
    Ok(file)
}

/// The tag of a version: a plus may not stand in it.
pub(super) fn tag(version: &str) -> String {
    version.replace('+', "_")
}

fn platform(arch: Arch) -> Value {
    json!({ "architecture": arch.name(), "os": "linux" })
}

/// An image's configuration.
fn describe(package: &Package, image: &Image, layer: &str) -> Result<Value> {
    let created = UNIX_EPOCH + Duration::from_secs(package.time);
    let created = humantime::format_rfc3339_seconds(created).to_string();
    Ok(json!({
        "created": created,
        "architecture": package.arch.name(),
        "os": "linux",
        "config": {
            "User": image.user,
            // Nobody reads its log on a terminal.
            "Env": ["PATH=/usr/bin", "NO_COLOR=1"],
            "Entrypoint": image.entry,
            "Cmd": ["--config", image.config],
            "StopSignal": "SIGTERM",
            "Labels": {
                "org.opencontainers.image.title": image.name,
                "org.opencontainers.image.description": super::SUMMARY,
                "org.opencontainers.image.version": package.version,
                "org.opencontainers.image.licenses": "Apache-2.0 OR MIT",
            },
        },
        "rootfs": { "type": "layers", "diff_ids": [layer] },
        "history": [{ "created": created, "created_by": "cargo xtask package" }],
    }))
}

/// Puts the files of an image into its root.
fn fill(contents: &Contents, system: &System, image: &Image, root: &Path) -> Result<()> {
    let inside = |path: &str| root.join(path.trim_start_matches('/'));
    let mut programs = Vec::new();
    for path in image.files {
        let file = contents.files.iter().find(|file| file.path == *path);
        let file = file.with_context(|| format!("the list has no {path}"))?;
        copy(&contents.tree.join(path.trim_start_matches('/')), &inside(path), file.mode)?;
        if path.starts_with("/usr/bin/") {
            programs.push(inside(path));
        }
    }
    let own = Path::new("usr/share/doc/harmonaize/copyright");
    copy(&contents.tree.join(own), &root.join(own), 0o644)?;
    for package in load(system, programs, root)? {
        let notice = Path::new("usr/share/doc").join(package).join("copyright");
        copy(&Path::new("/").join(&notice), &root.join(&notice), 0o644)?;
        let status = inside("var/lib/dpkg/status.d").join(package);
        fs::create_dir_all(inside("var/lib/dpkg/status.d"))?;
        fs::write(&status, system.status(package)?)?;
        mode(&status, 0o644)?;
    }
    // Scanners read of it which Debian the packages are of.
    copy(Path::new("/etc/os-release"), &inside("etc/os-release"), 0o644)?;
    for (path, text) in NAMES {
        fs::write(inside(path), text)?;
        mode(&inside(path), 0o644)?;
    }
    symlink("usr/lib", inside("lib"))?;
    if system.loader().starts_with("usr/lib64/") {
        symlink("usr/lib64", inside("lib64"))?;
    }
    for folder in ["proc", "sys", "dev"] {
        fs::create_dir_all(inside(folder))?;
    }
    Ok(())
}

/// Copies what these files load, and what that loads; the packages that it is of.
fn load(system: &System, mut open: Vec<PathBuf>, root: &Path) -> Result<BTreeSet<&'static str>> {
    let (mut found, mut packages) = (BTreeSet::new(), BTreeSet::new());
    let libraries = root.join(system.libraries());
    while !open.is_empty() {
        for library in Libraries::of(system.arch, &std::mem::take(&mut open))?.names {
            if !found.insert(library.clone()) {
                continue;
            }
            packages.insert(deb::package_of(&library)?);
            let source = system.find(&library)?;
            let loader = library.starts_with("ld-linux");
            copy(
                &source,
                &if loader { root.join(system.loader()) } else { libraries.join(&library) },
                0o755,
            )?;
            open.push(source);
            if library == "libibverbs.so.1" {
                // It loads a device's driver by the files that name it.
                packages.insert("ibverbs-providers");
                for driver in files(&system.root.join(system.libraries()).join("libibverbs"))? {
                    copy(&driver, &libraries.join("libibverbs").join(name(&driver)?), 0o644)?;
                    open.push(driver);
                }
                for file in files(&system.root.join("etc/libibverbs.d"))? {
                    copy(&file, &root.join("etc/libibverbs.d").join(name(&file)?), 0o644)?;
                }
            }
        }
    }
    Ok(packages)
}

/// Packs the root in `home` as a layer.
fn pack(package: &Package, image: &Image, home: &Path) -> Result<Layer> {
    let (root, archive) = (home.join("root"), home.join("layer.tar"));
    let mut tar = tar::plain(package, &archive);
    tar.args(["--create", "--owner=root:0", "--group=root:0", "--directory"]).arg(&root);
    for entry in files(&root)? {
        tar.arg(name(&entry)?);
    }
    workspace::run(&mut tar)?;
    if let Some(state) = image.state {
        fs::create_dir_all(root.join(state))?;
        mode(&root.join(state), 0o700)?;
        let mut tar = tar::plain(package, &archive);
        let (user, group) = image.user.split_once(':').context("a user without a group")?;
        tar.args([format!("--owner=:{user}"), format!("--group=:{group}")]);
        workspace::run(tar.args(["--append", "--directory"]).arg(&root).arg(state))?;
    }
    let id = digest(&fs::read(&archive)?);
    let mut gzip = Command::new("gzip");
    gzip.args(["--no-name", "--stdout", if package.quick { "-1" } else { "-9" }]).arg(&archive);
    let output = gzip.output().context("cannot start gzip")?;
    if !output.status.success() {
        bail!("`{}` ended with {}", workspace::describe(&gzip), output.status);
    }
    fs::remove_file(&archive)?;
    Ok(Layer { id, compressed: output.stdout })
}

fn digest(bytes: &[u8]) -> String {
    let hex: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

/// Writes a blob; what describes it.
fn blob(blobs: &Path, kind: &str, bytes: &[u8]) -> Result<Value> {
    let digest = digest(bytes);
    fs::write(blobs.join(digest.trim_start_matches("sha256:")), bytes)?;
    Ok(json!({ "mediaType": kind, "digest": digest, "size": bytes.len() }))
}

/// Reads one back: each digest and size; and runs its program in the image's root, with the configuration there.
fn check(file: &Path, package: &Package, system: &System, image: &Image) -> Result<()> {
    let home = folder().join("oci/read");
    empty(&home)?;
    let extract = |archive: &Path, folder: &Path| {
        let mut tar = Command::new("tar");
        tar.args(["--extract", "--same-permissions", "--numeric-owner", "--file"]).arg(archive);
        workspace::run(tar.arg("--directory").arg(folder))
    };
    extract(file, &home)?;
    let index: Value = serde_json::from_slice(&fs::read(home.join("index.json"))?)?;
    let manifest = one(&index, "/manifests")?;
    let tagged = manifest.pointer("/annotations/org.opencontainers.image.ref.name").and_then(Value::as_str);
    if manifest.get("platform") != Some(&platform(package.arch)) || tagged != Some(&tag(package.version)) {
        bail!("the image is of another architecture or version: {manifest}");
    }
    let manifest: Value = serde_json::from_slice(&described(&home, manifest, MANIFEST)?)?;
    let config = manifest.get("config").context("a manifest without configuration")?;
    let config: Value = serde_json::from_slice(&described(&home, config, CONFIG)?)?;
    let packed = home.join("layer.tar.gz");
    fs::write(&packed, described(&home, one(&manifest, "/layers")?, LAYER)?)?;
    let plain = Command::new("gunzip").arg("--stdout").arg(&packed).output()?.stdout;
    if one(&config, "/rootfs/diff_ids")?.as_str() != Some(&digest(&plain)) {
        bail!("the layer is not the one of the image's configuration: {config}");
    }
    let root = home.join("root");
    empty(&root)?;
    extract(&packed, &root)?;
    runs(&root, &config, system, image)?;
    Ok(fs::remove_dir_all(&home)?)
}

/// Runs an image's program in its root as its configuration says, and its loader with the drivers of devices.
fn runs(root: &Path, config: &Value, system: &System, image: &Image) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return strict::skip(image.name, "running its program in its root needs root");
    }
    let words = |list: &str| -> Result<Vec<String>> {
        Ok(serde_json::from_value(config.pointer(list).with_context(|| format!("no {list}"))?.clone())?)
    };
    let (entry, arguments) = (words("/config/Entrypoint")?, words("/config/Cmd")?);
    let user = config.pointer("/config/User").and_then(Value::as_str).context("no user")?;
    let mut emulator = Vec::new();
    if system.arch != Arch::HOST {
        fs::copy(Path::new("/usr/bin").join(EMULATOR), root.join(EMULATOR))
            .context("there is no emulator")?;
        emulator = vec![format!("/{EMULATOR}")];
    }
    let version = vec!["--version".to_owned()];
    let check = [arguments, vec!["--check".to_owned()]].concat();
    let mut calls = vec![[entry.clone(), version.clone()].concat(), [entry.clone(), check].concat()];
    let drivers = system.libraries().join("libibverbs");
    if root.join(&drivers).is_dir() {
        let paths = files(&root.join(&drivers))?;
        let paths: Result<Vec<String>> =
            paths.iter().map(|path| Ok(format!("/{}/{}", drivers.display(), name(path)?))).collect();
        let loader = [format!("/{}", system.loader()), "--preload".into(), paths?.join(":")];
        calls.push([loader.to_vec(), entry.clone(), version].concat());
    }
    for call in calls {
        let mut chroot = Command::new("/usr/sbin/chroot");
        chroot.env_clear().arg(format!("--userspec={user}")).arg(root).args(&emulator).args(&call);
        let output = chroot.output().context("cannot start chroot")?;
        let (said, wrong) = (String::from_utf8(output.stdout)?, String::from_utf8_lossy(&output.stderr));
        let program = entry.first().and_then(|entry| entry.rsplit('/').next()).context("no program")?;
        let named =
            call.last().is_none_or(|last| last != "--version") || said.starts_with(&format!("{program} "));
        // The loader reports what it cannot load, and goes on.
        if !output.status.success() || !wrong.is_empty() || !named {
            bail!("{call:?} ended in the image {} with {}: {said}{wrong}", image.name, output.status);
        }
    }
    println!("the image {} has the blobs that it names, and its program runs in it", image.name);
    Ok(())
}

/// The only entry of a list.
fn one<'a>(value: &'a Value, list: &str) -> Result<&'a Value> {
    match value.pointer(list).and_then(Value::as_array).map(Vec::as_slice) {
        Some([only]) => Ok(only),
        _ => bail!("{list} has not one entry: {value}"),
    }
}

/// The blob that a descriptor names, of that kind, size and digest.
fn described(layout: &Path, descriptor: &Value, kind: &str) -> Result<Vec<u8>> {
    let text = |key: &str| descriptor.get(key).and_then(Value::as_str).unwrap_or_default();
    let Some(hex) = text("digest").strip_prefix("sha256:") else { bail!("no digest: {descriptor}") };
    let bytes = fs::read(layout.join("blobs/sha256").join(hex))?;
    let size = descriptor.get("size").and_then(Value::as_u64);
    if text("mediaType") != kind || digest(&bytes) != text("digest") || size != Some(bytes.len() as u64) {
        bail!("what lies there is not what its descriptor says: {descriptor}");
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_blob_is_found() {
        let layout = tempfile::tempdir().unwrap();
        let blobs = layout.path().join("blobs/sha256");
        fs::create_dir_all(&blobs).unwrap();
        let descriptor = blob(&blobs, LAYER, b"abc").unwrap();
        // The digest of FIPS 180-2's example.
        let expected = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(descriptor.get("digest").and_then(Value::as_str), Some(expected));
        assert_eq!(described(layout.path(), &descriptor, LAYER).unwrap(), b"abc");
        assert!(described(layout.path(), &descriptor, CONFIG).is_err());
        fs::write(blobs.join(expected.trim_start_matches("sha256:")), "abd").unwrap();
        assert!(described(layout.path(), &descriptor, LAYER).is_err());
    }

    #[test]
    fn a_tag_has_no_plus() {
        assert_eq!(tag("0.1.0+20261128.g1"), "0.1.0_20261128.g1");
    }
}
