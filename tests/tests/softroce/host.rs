//! What tests do to the guest's hosts, and undo: links down, devices gone, limits.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// For a guest whose processor is emulated.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The guest's own: nobody's device is taken away who has not said that this may be.
const PERMISSION: &str = "HARMONAIZE_GUEST";

/// Whether all of the guest's devices are here.
pub(crate) fn present(hosts: usize) -> bool {
    (0..hosts).all(|host| Path::new(&format!("/sys/class/infiniband/rxe{host}")).exists())
}

/// Whether a test may break hosts; if not, says so loudly.
pub(crate) fn may_break(hosts: usize) -> bool {
    let may = present(hosts) && std::env::var_os(PERMISSION).is_some();
    if !may {
        println!("SKIPPED: this test takes devices away, which it does in `cargo xtask softroce test` alone");
    }
    may
}

/// Waits until something holds.
pub(crate) fn until(wrong: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "{wrong}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs a command of the guest, which must succeed.
pub(crate) fn run(words: &str) {
    let status = command(words).status().unwrap();
    assert!(status.success(), "`{words}` ended with {status}");
}

fn command(words: &str) -> Command {
    let mut words = words.split(' ');
    let mut command = Command::new(words.next().unwrap());
    command.args(words);
    command
}

/// Host `0`: its link `h0`, its device `rxe0`, its address 10.0.0.1.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Host(pub(crate) u32);

impl Host {
    /// The device's name.
    pub(crate) fn device(self) -> String {
        format!("rxe{}", self.0)
    }

    /// Its address.
    pub(crate) fn address(self) -> std::net::Ipv4Addr {
        std::net::Ipv4Addr::new(10, 0, 0, self.0 as u8 + 1)
    }

    fn sysfs(self) -> PathBuf {
        PathBuf::from(format!("/sys/class/infiniband/{}", self.device()))
    }

    /// Waits until its device's port is active and has its address.
    pub(crate) fn wait_until_active(self) {
        let port = self.sysfs().join("ports/1");
        let gid = format!("0000:0000:0000:0000:0000:ffff:0a00:{:04x}", self.0 + 1);
        until("a device has no active port, or no address", || {
            let state = std::fs::read_to_string(port.join("state")).unwrap_or_default();
            let gids = std::fs::read_dir(port.join("gids")).into_iter().flatten().flatten();
            let mut gids = gids.filter_map(|entry| std::fs::read_to_string(entry.path()).ok());
            state.contains("ACTIVE") && gids.any(|found| found.trim() == gid)
        });
    }

    /// What its device has counted.
    pub(crate) fn counter(self, name: &str) -> u64 {
        let path = self.sysfs().join("ports/1/hw_counters").join(name);
        std::fs::read_to_string(path).unwrap().trim().parse().unwrap()
    }

    /// Takes its link down, as a cable pulled; with it goes the device's port.
    pub(crate) fn link_down(self) -> Broken {
        run(&format!("ip link set h{} down", self.0));
        Broken { host: self, removal: None }
    }

    /// Pulls its cable at the switch: the device's port has no carrier, the host keeps its address and routes.
    pub(crate) fn unplug(self) -> Broken {
        run(&format!("ip -n sw link set p{} down", self.0));
        Broken { host: self, removal: None }
    }

    /// Has its packets of more than `bytes` bytes dropped by the switch.
    pub(crate) fn narrow(self, bytes: u32) -> Broken {
        run(&format!("ip -n sw link set p{} mtu {bytes}", self.0));
        Broken { host: self, removal: None }
    }

    /// Gives its link an MTU, and with it the device's port.
    pub(crate) fn link_mtu(self, bytes: u32) -> Broken {
        run(&format!("ip link set h{} mtu {bytes}", self.0));
        Broken { host: self, removal: None }
    }

    /// Has the kernel take its device away. That command ends once nobody has the device open any more.
    pub(crate) fn remove_device(self) -> Broken {
        let removal = command(&format!("rdma link delete {}", self.device())).spawn().unwrap();
        Broken { host: self, removal: Some(removal) }
    }
}

/// A host that is broken until this is dropped.
#[derive(Debug)]
pub(crate) struct Broken {
    host: Host,
    removal: Option<Child>,
}

impl Broken {
    /// The device is gone, which means that whoever had it open has closed it.
    pub(crate) fn wait_until_removed(&mut self) {
        let mut removal = self.removal.take().unwrap();
        until("somebody still has the removed device open", || removal.try_wait().unwrap().is_some());
        assert!(!self.host.sysfs().exists());
    }

    /// As it was before.
    pub(crate) fn mend(mut self) {
        self.restore();
        self.host.wait_until_active();
    }

    fn restore(&mut self) {
        let Host(number) = self.host;
        if let Some(mut removal) = self.removal.take() {
            until("somebody still has the removed device open", || removal.try_wait().unwrap().is_some());
        }
        run(&format!("ip -n sw link set p{number} mtu 4200 up"));
        run(&format!("ip link set h{number} mtu 4200"));
        run(&format!("ip link set h{number} up"));
        let (address, table) = (self.host.address(), 100 + number);
        run(&format!("ip route replace 10.0.0.0/24 dev h{number} src {address} table {table}"));
        if !self.host.sysfs().exists() {
            run(&format!("rdma link add {} type rxe netdev h{number}", self.host.device()));
        }
    }
}

impl Drop for Broken {
    fn drop(&mut self) {
        // A test that has failed says why; the next one finds the host whole, or fails too.
        if !std::thread::panicking() {
            self.restore();
        } else {
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.restore()));
        }
    }
}

/// A control group with a limit on a device's objects, which this process is in until it is dropped.
#[derive(Debug)]
pub(crate) struct Limited(PathBuf);

impl Limited {
    /// At most `objects` objects (queue pairs, regions, completion queues...) of a device, beyond those that there are.
    pub(crate) fn objects(device: &str, objects: u32) -> Self {
        let group = PathBuf::from("/sys/fs/cgroup");
        std::fs::write(group.join("cgroup.subtree_control"), "+rdma").unwrap();
        let group = group.join("limited");
        std::fs::create_dir_all(&group).unwrap();
        std::fs::write(group.join("rdma.max"), format!("{device} hca_object={objects}")).unwrap();
        std::fs::write(group.join("cgroup.procs"), std::process::id().to_string()).unwrap();
        Self(group)
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        let _ = std::fs::write("/sys/fs/cgroup/cgroup.procs", std::process::id().to_string());
        let _ = std::fs::remove_dir(&self.0);
    }
}
