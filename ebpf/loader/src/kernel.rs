//! What this kernel, and this process in it, can do for telemetry.

use aya::maps::MapType;
use aya::programs::{ProgramType, SchedClassifier, TcAttachType};
use std::fmt;

/// A capability that telemetry needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capability {
    /// CAP_BPF: programs and tables.
    Bpf,
    /// CAP_NET_ADMIN: programs on interfaces.
    NetAdmin,
    /// CAP_PERFMON: programs that reckon with pointers as compilers do, and those that read the kernel's own structures.
    Perfmon,
}

impl Capability {
    /// Its number in `linux/capability.h`.
    const fn number(self) -> u32 {
        match self {
            Self::Bpf => 39,
            Self::NetAdmin => 12,
            Self::Perfmon => 38,
        }
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bpf => "CAP_BPF",
            Self::NetAdmin => "CAP_NET_ADMIN",
            Self::Perfmon => "CAP_PERFMON",
        })
    }
}

/// CAP_SYS_ADMIN stands for the others, as it did before they were split off.
const SYS_ADMIN: u32 = 21;

/// What was found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Kernel {
    /// The kernel's release, as `uname -r` says.
    pub release: String,
    /// It describes its own types (`/sys/kernel/btf/vmlinux`). The programs of this crate do without.
    pub btf: bool,
    /// It has the classifier programs of traffic control.
    pub classifier: bool,
    /// It has ring buffers (Linux 5.8).
    pub ring_buffer: bool,
    /// Programs can be attached as tcx links (Linux 6.6); else by the clsact queueing discipline.
    pub tcx: bool,
    /// Capabilities that the calling thread lacks. While there are some, the kernel does not tell what it has.
    pub missing: Vec<Capability>,
}

impl Kernel {
    /// Looks, without changing anything. Needs no privilege, but sees less without.
    pub fn probe() -> Self {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
        let missing = missing(effective(&status));
        Self {
            release: std::fs::read_to_string("/proc/sys/kernel/osrelease")
                .unwrap_or_default()
                .trim()
                .to_owned(),
            btf: std::path::Path::new("/sys/kernel/btf/vmlinux").exists(),
            classifier: aya::sys::is_program_supported(ProgramType::SchedClassifier).unwrap_or(false),
            ring_buffer: aya::sys::is_map_supported(MapType::RingBuf).unwrap_or(false),
            // Every network namespace has its loopback.
            tcx: SchedClassifier::query_tcx("lo", TcAttachType::Ingress).is_ok(),
            missing,
        }
    }

    /// What is missing for the programs, if anything.
    pub(crate) fn lacks(&self) -> Option<crate::Error> {
        if !self.missing.is_empty() {
            return Some(crate::Error::Privilege { missing: self.missing.clone() });
        }
        let needs = [
            (self.classifier, "classifier programs of traffic control (CONFIG_NET_CLS_BPF)"),
            (self.ring_buffer, "BPF ring buffers (Linux 5.8)"),
        ];
        let (_, what) = needs.into_iter().find(|(there, _)| !there)?;
        Some(crate::Error::Kernel { release: self.release.clone(), what })
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = |there: bool| if there { "yes" } else { "no" };
        write!(
            f,
            "Linux {}: classifier programs {}, ring buffers {}, tcx {}, own types (BTF) {}",
            self.release,
            word(self.classifier),
            word(self.ring_buffer),
            word(self.tcx),
            word(self.btf)
        )?;
        for capability in &self.missing {
            write!(f, "; this process lacks {capability}")?;
        }
        Ok(())
    }
}

/// The effective capabilities in the text of `/proc/thread-self/status`.
fn effective(status: &str) -> u64 {
    let field = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    field.and_then(|field| u64::from_str_radix(field.trim(), 16).ok()).unwrap_or(0)
}

fn missing(effective: u64) -> Vec<Capability> {
    let has = |number: u32| effective & (1 << number) != 0;
    let all = [Capability::Bpf, Capability::NetAdmin, Capability::Perfmon];
    // The administrator's capability includes the others, not the network's.
    let lacks = |capability: &Capability| {
        !(has(capability.number()) || *capability != Capability::NetAdmin && has(SYS_ADMIN))
    };
    all.into_iter().filter(lacks).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_read_from_the_status() {
        let status = "Name:\tx\nCapPrm:\t000001ffffffffff\nCapEff:\t000000c000001000\nCapBnd:\t0\n";
        assert_eq!(missing(effective(status)), []);
        assert_eq!(missing(effective("CapEff:\t000000c000000000")), [Capability::NetAdmin]);
        assert_eq!(missing(effective("CapEff:\t0000008000001000")), [Capability::Perfmon]);
        assert_eq!(missing(1 << SYS_ADMIN), [Capability::NetAdmin]);
        let all = [Capability::Bpf, Capability::NetAdmin, Capability::Perfmon];
        assert_eq!(missing(effective("")), all);
    }
}
