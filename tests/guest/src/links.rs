//! The guest's network cards: each found by its address, named, brought up, with a SoftRoCE device on it.

use crate::hosts;
use anyhow::{Context, Result};
use harmonaize_guest::{Link, MTU};
use std::fmt::Write;
use std::fs;
use std::path::Path;

/// Brings up the links, and waits until their devices are ready.
pub(crate) fn build(links: &[Link]) -> Result<()> {
    // Nobody speaks it here, and its announcements would only cost time.
    let silent = Path::new("/proc/sys/net/ipv6/conf/all/disable_ipv6");
    if silent.exists() {
        fs::write(silent, "1").context("cannot turn off IPv6")?;
    }
    let cards = cards(Path::new("/sys/class/net"))?;
    fs::write("/run/links", commands(links, &cards)?)?;
    hosts::call(&["ip", "-batch", "/run/links"])?;
    for Link { name, device, .. } in links {
        hosts::call(&["rdma", "link", "add", device, "type", "rxe", "netdev", name])?;
    }
    links.iter().try_for_each(|link| hosts::ready(&link.device))
}

/// The cards that the kernel has found: address and name.
fn cards(folder: &Path) -> Result<Vec<(String, String)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let entry = entry?;
        let mac = fs::read_to_string(entry.path().join("address")).unwrap_or_default();
        found.push((mac.trim().to_owned(), entry.file_name().to_string_lossy().into_owned()));
    }
    Ok(found)
}

fn commands(links: &[Link], cards: &[(String, String)]) -> Result<String> {
    let mut text = String::from("link set lo up\n");
    for Link { mac, name, address, .. } in links {
        let card = cards.iter().find(|(found, _)| found == mac);
        let (_, card) = card.with_context(|| format!("the machine has no card {mac} for {name}"))?;
        if card != name {
            writeln!(text, "link set {card} name {name}")?;
        }
        writeln!(text, "link set {name} mtu {MTU} up\naddr add {address} dev {name}")?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_are_found_by_their_address() {
        let folder = tempfile::tempdir().unwrap();
        for (name, mac) in [("eth0", "02:00:00:00:00:01\n"), ("lo", "00:00:00:00:00:00\n")] {
            fs::create_dir(folder.path().join(name)).unwrap();
            fs::write(folder.path().join(name).join("address"), mac).unwrap();
        }
        let mut cards = cards(folder.path()).unwrap();
        cards.sort();
        let link = |mac: &str| Link {
            mac: mac.into(),
            name: "fabric".into(),
            address: "10.0.0.1/24".into(),
            device: "rxe0".into(),
        };
        let expected = "link set lo up\nlink set eth0 name fabric\nlink set fabric mtu 4200 up\n\
                        addr add 10.0.0.1/24 dev fabric\n";
        assert_eq!(commands(&[link("02:00:00:00:00:01")], &cards).unwrap(), expected);
        let error = commands(&[link("02:00:00:00:00:02")], &cards).unwrap_err().to_string();
        assert_eq!(error, "the machine has no card 02:00:00:00:00:02 for fabric");
    }
}
