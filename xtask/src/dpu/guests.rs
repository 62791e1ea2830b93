//! What the guests are made of: kernels, programs and libraries of both architectures.

use super::layout::{BINARIES, MachineSpec, SECRET, Side, TENANT};
use crate::aarch64::toolchain::Toolchain;
use crate::aarch64::tree::{Tree, unpacked};
use crate::aarch64::{self};
use crate::vm::initramfs::{Image, Initramfs};
use crate::vm::kernel::Kernel;
use crate::vm::programs::{self, Userland};
use crate::vm::{AMD64, ARM64, Architecture};
use anyhow::{Context, Result};
use harmonaize_testkit::workspace::{Binaries, Profile};
use std::path::PathBuf;

const MODULES: &[&str] =
    &["virtio_pci", "virtio_net", "rdma_rxe", "ib_uverbs", "rdma_ucm", "sch_ingress", "cls_bpf"];
const PROGRAMS: &[&str] = &["busybox", "ip", "rdma", "ibv_rc_pingpong"];

/// Debian's arm64 packages from which an offload unit's programs come. With them are the libraries that
/// they need beside those which our own programs link.
const PACKAGES: &[&str] = &[
    "iproute2",
    "busybox-static",
    "ibverbs-utils",
    "libbpf1",
    "libbsd0",
    "libcap2",
    "libelf1",
    "libmd0",
    "libmnl0",
    "zlib1g",
];

/// The architecture of a machine.
pub(super) fn architecture(side: Side) -> &'static Architecture {
    match side {
        Side::Unit => &ARM64,
        Side::Host => &AMD64,
    }
}

/// Everything but the jobs.
#[derive(Debug)]
pub(super) struct Guests {
    unit: Guest,
    host: Guest,
}

#[derive(Debug)]
struct Guest {
    kernel: Kernel,
    from: Userland,
    init: PathBuf,
    /// The project's programs: name and file.
    ours: Vec<(String, PathBuf)>,
}

impl Guests {
    /// Fetches and builds what is missing; the programs for offload units have been built.
    pub(super) fn prepare(toolchain: &Toolchain) -> Result<Self> {
        let folder = toolchain.programs();
        let ours = ["harmonaize-agent", "harmonaize-control"];
        let ours = ours.map(|name| (name.to_owned(), folder.join(name))).to_vec();
        let roots = vec![packages()?, toolchain.sysroot().to_path_buf(), toolchain.c_library().to_path_buf()];
        let kernel = Kernel::prepare(&ARM64)?;
        let unit = Guest { kernel, from: Userland::new(&ARM64, roots), init: folder.join("init"), ours };
        let built = Binaries::build_with(Profile::Dev, &["harmonaize-guest", "harmonaize-tests"])?;
        let (init, ours) = (built.path("init")?, vec![(TENANT.to_owned(), built.path(TENANT)?)]);
        let host = Guest { kernel: Kernel::prepare(&AMD64)?, from: Userland::here(), init, ours };
        Ok(Self { unit, host })
    }

    fn of(&self, side: Side) -> &Guest {
        match side {
            Side::Unit => &self.unit,
            Side::Host => &self.host,
        }
    }

    /// The kernel of a machine.
    pub(super) fn kernel(&self, side: Side) -> &Kernel {
        &self.of(side).kernel
    }

    /// The files of a machine.
    pub(super) fn image(&self, place: &MachineSpec, secret: &str) -> Result<Image> {
        let guest = self.of(place.side);
        let mut tree = Initramfs::default();
        programs::add(&mut tree, &guest.from, &guest.init, "/init")?;
        PROGRAMS.iter().try_for_each(|name| programs::add_installed(&mut tree, &guest.from, name))?;
        programs::add_verbs(&mut tree, &guest.from)?;
        for (name, path) in &guest.ours {
            programs::add(&mut tree, &guest.from, path, &format!("{BINARIES}/{name}"))?;
        }
        tree.modules(guest.kernel.modules(MODULES)?);
        tree.file("/etc/passwd", "root:x:0:0:root:/root:/bin/sh\n");
        tree.file("/etc/hosts", "127.0.0.1 localhost\n");
        for (path, contents) in &place.files {
            tree.file(path, contents.as_str());
        }
        tree.private(SECRET, secret);
        Image::write(&mut tree, &place.job, &place.name)
    }
}

/// The folder with the unpacked packages of offload units.
fn packages() -> Result<PathBuf> {
    let asked = PACKAGES.join(" ");
    let home = aarch64::folder().join("guest");
    let contents = |_: &_, _: &str| Ok(unpacked(PACKAGES));
    let tree = Tree { home, key: "iproute2", request: &asked, size: 4, contents };
    let (_, folder, _) = tree.find(&mut None)?.context("Debian's package lists do not name iproute2")?;
    Ok(folder)
}
