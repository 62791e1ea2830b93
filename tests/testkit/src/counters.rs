//! Bytes and packets that the devices of a namespace have carried.

use crate::namespace::Namespace;
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// What a device has carried since it was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Carried {
    /// Bytes that came in.
    pub received: u64,
    /// Bytes that left.
    pub sent: u64,
}

/// The counters of a namespace's devices: opened once inside, read from anywhere as often as needed.
#[derive(Debug)]
pub struct Counters {
    file: File,
}

impl Counters {
    /// Opens them.
    pub fn of(namespace: &Namespace) -> Result<Self> {
        let opened = namespace.enter(|| File::open("/proc/thread-self/net/dev"))?;
        let file = opened.with_context(|| format!("cannot read the counters of {}", namespace.name()))?;
        Ok(Self { file })
    }

    /// What each device has carried, by its name.
    pub fn read(&self) -> Result<BTreeMap<String, Carried>> {
        let mut text = Vec::with_capacity(4096);
        let mut part = [0; 4096];
        loop {
            let length = self.file.read_at(&mut part, text.len() as u64)?;
            text.extend_from_slice(part.get(..length).unwrap_or_default());
            if length == 0 {
                break;
            }
        }
        Ok(parsed(&String::from_utf8_lossy(&text)))
    }
}

/// Lines as `eth0: BYTES PACKETS 6 MORE BYTES PACKETS ...`; two of heading.
fn parsed(text: &str) -> BTreeMap<String, Carried> {
    let line = |line: &str| {
        let (name, figures) = line.split_once(':')?;
        let figures: Vec<u64> = figures.split_whitespace().map_while(|word| word.parse().ok()).collect();
        Some((name.trim().to_owned(), Carried { received: *figures.first()?, sent: *figures.get(8)? }))
    };
    text.lines().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_read() {
        let text = "Inter-|   Receive                            |  Transmit\n face |bytes    packets errs\n\
                    \x20   lo:       0       0    0    0    0     0          0         0        0       0    0    0    0     0       0          0\n\
                    port10:  130      2    0    0    0     0          0         0   1250    3    0    0    0     0       0          0\n";
        let found = parsed(text);
        assert_eq!(found.len(), 2);
        assert_eq!(found["port10"], Carried { received: 130, sent: 1250 });
        assert_eq!(found["lo"], Carried::default());
    }
}
