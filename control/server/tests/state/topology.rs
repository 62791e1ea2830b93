//! Topologies as text, piece by piece. Links carry 1 Gbit/s.

pub(super) fn switch(name: &str) -> String {
    format!("[[switch]]\nname = \"{name}\"\n")
}

pub(super) fn host(name: usize) -> String {
    format!("[[host]]\nname = \"h{name}\"\n")
}

pub(super) fn link(from: &str, to: &str, delay: &str) -> String {
    format!("[[link]]\nfrom = \"{from}\"\nto = \"{to}\"\nrate = \"1Gbit/s\"\ndelay = \"{delay}\"\n")
}

pub(super) fn aggregator(number: usize, at: &str) -> String {
    format!("[[aggregator]]\nname = \"agg{number}\"\nswitch = \"{at}\"\nrate = \"4Gbit/s\"\n")
}

/// Hosts on one switch, `s0`.
pub(super) fn star(hosts: usize, delay: &str) -> String {
    let leg = |number| host(number) + &link(&format!("h{number}"), "s0", delay);
    switch("s0") + &(0..hosts).map(leg).collect::<String>()
}

/// Leaves under spines, all of which answer traces; `racks` are the leaves of the hosts.
pub(super) fn leaf_spine(racks: &[usize], spines: usize, mut delay: impl FnMut() -> String) -> String {
    let leaves = racks.iter().max().unwrap() + 1;
    let names = (0..leaves).map(|leaf| format!("leaf{leaf}"));
    let mut text = String::new();
    for (name, number) in names.chain((0..spines).map(|spine| format!("spine{spine}"))).zip(1..) {
        text += &switch(&name);
        text += &format!("addresses = [\"10.64.{}.{}\"]\n", number / 256, number % 256);
    }
    for (number, rack) in racks.iter().enumerate() {
        text += &format!("{}rack = \"r{rack}\"\n", host(number));
    }
    for (number, rack) in racks.iter().enumerate() {
        text += &link(&format!("h{number}"), &format!("leaf{rack}"), &delay());
    }
    for leaf in 0..leaves {
        for spine in 0..spines {
            text += &link(&format!("leaf{leaf}"), &format!("spine{spine}"), &delay());
        }
    }
    text
}
