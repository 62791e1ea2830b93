//! Parameters of DCQCN, where a driver shows them: whether a device slows down at congestion notifications, and how. Linux's `mlx5` has them
//! in debugfs, the vendor's own driver in sysfs.

use crate::rdma::{DEVICES, names, text};
use std::collections::BTreeMap;
use std::path::Path;

/// Where `mlx5` has a folder for each device, by its address on the bus.
const DEBUG: &str = "/sys/kernel/debug/mlx5";
/// Where the kernel shows interfaces.
const INTERFACES: &str = "/sys/class/net";
/// Folders of an interface by the vendor's driver: what receives notifications, and what sends them.
const PARTS: [(&str, &str); 2] = [("ecn/roce_rp", "rp_"), ("ecn/roce_np", "np_")];
/// The most parameters of a device, and the longest name.
const MAX_PARAMETERS: usize = 64;
const MAX_NAME: usize = 48;

/// The parameters of DCQCN of an RDMA device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Dcqcn {
    /// The device's name.
    pub device: String,
    /// By name, as the driver has it: `rp_` before those of who is slowed down, `np_` before those of who sends notifications. Units
    /// are the driver's.
    pub parameters: BTreeMap<String, u64>,
}

/// Reads the parameters of all RDMA devices that show some into `into`, whose memory is used again.
///
/// Cost: some 20 files of a device, for each of which the driver asks it. Nothing without a device.
pub fn read_dcqcn(into: &mut Vec<Dcqcn>) {
    read_from([DEVICES, DEBUG, INTERFACES].map(Path::new), into);
}

fn read_from([devices, debug, interfaces]: [&Path; 3], into: &mut Vec<Dcqcn>) {
    into.clear();
    for device in names(devices) {
        let bus = devices.join(&device).join("device");
        let mut parameters = BTreeMap::new();
        let link = std::fs::read_link(&bus).unwrap_or_default();
        if let Some(address) = link.file_name() {
            add(&debug.join(address).join("cc_params"), "", &mut parameters);
        }
        for interface in names(&bus.join("net")) {
            for (part, prefix) in PARTS {
                let part = interfaces.join(&interface).join(part);
                add(&part, prefix, &mut parameters);
                add(&part.join("enable"), &format!("{prefix}enable_"), &mut parameters);
            }
        }
        if !parameters.is_empty() {
            into.push(Dcqcn { device, parameters });
        }
    }
}

/// Adds the numbers in a folder's files. What is no number, or has an odd name, is passed over.
fn add(folder: &Path, prefix: &str, into: &mut BTreeMap<String, u64>) {
    let sound = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    for name in names(folder) {
        if name.len() > MAX_NAME || !name.bytes().all(sound) || into.len() >= MAX_PARAMETERS {
            continue;
        }
        if let Some(value) = text(&folder.join(&name)).and_then(|text| text.trim().parse().ok()) {
            into.entry(format!("{prefix}{name}")).or_insert(value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_of_both_drivers_are_read_and_odd_ones_passed_over() {
        let folder = std::env::temp_dir().join(format!("harmonaize-dcqcn-{}", std::process::id()));
        let write = |path: &str, bytes: &[u8]| {
            let path = folder.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
        };
        for (device, address) in [("mlx5_0", "0000:03:00.0"), ("mlx5_1", "0000:04:00.0"), ("rxe0", "eth9")] {
            std::fs::create_dir_all(folder.join("devices").join(device)).unwrap();
            std::fs::create_dir_all(folder.join("bus").join(address)).unwrap();
            let (to, at) =
                (folder.join("bus").join(address), folder.join("devices").join(device).join("device"));
            std::os::unix::fs::symlink(to, at).unwrap();
        }
        write("debug/0000:03:00.0/cc_params/rp_ai_rate", b"5\n");
        write("debug/0000:03:00.0/cc_params/np_cnp_dscp", b"48\n");
        write("debug/0000:03:00.0/cc_params/rp_gd", b"N/A\n");
        write("debug/0000:03:00.0/cc_params/rp_max_rate", b"-1\n");
        write("debug/0000:03:00.0/cc_params/rp_threshold", &[b'9'; 1000]);
        write("debug/0000:03:00.0/cc_params/rp_\"odd\"", b"1\n");
        write("bus/0000:04:00.0/net/eth1/address", b"00\n");
        write("interfaces/eth1/ecn/roce_rp/enable/3", b"1\n");
        write("interfaces/eth1/ecn/roce_rp/rpg_ai_rate", b"10\n");
        write("interfaces/eth1/ecn/roce_np/min_time_between_cnps", b"4\n");
        let read = |into: &mut Vec<Dcqcn>| {
            let [devices, debug, interfaces] =
                ["devices", "debug", "interfaces"].map(|part| folder.join(part));
            read_from([&devices, &debug, &interfaces], into);
        };
        let mut found = vec![Dcqcn::default()];
        read(&mut found);
        let of = |device: &str, parameters: &[(&str, u64)]| Dcqcn {
            device: device.into(),
            parameters: parameters.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect(),
        };
        let first = of("mlx5_0", &[("np_cnp_dscp", 48), ("rp_ai_rate", 5)]);
        let second = [("np_min_time_between_cnps", 4), ("rp_enable_3", 1), ("rp_rpg_ai_rate", 10)];
        assert_eq!(found, [first, of("mlx5_1", &second)]);
        std::fs::remove_dir_all(&folder).unwrap();
        read(&mut found);
        assert_eq!(found, []);
    }
}
