//! Tells rare things with their reasons, through aya-log, in the object that is built for diagnosis; elsewhere all of it is nothing.
//!
//! At most one record each 10 ms a processor, with the number of those before it that were not told: a flood of hostile packets
//! must not become one of records. Everything is counted besides, as always.

/// Why something is told.
#[derive(Clone, Copy)]
#[repr(u32)]
pub enum Reason {
    /// A header ends beyond what the one before it, or the link, says.
    HeaderBeyondEnd,
    /// Headers go on deeper than is looked.
    TooDeep,
    /// The buffer is shorter than its headers, or they cannot be moved to its beginning.
    Truncated,
    /// The IP header contradicts the link's, or is shorter than one.
    Version,
    /// The IP packet's length contradicts the buffer's or its header's.
    Length,
    /// A fragment has no transport header of its own.
    Fragment,
    /// TCP's header reaches beyond its packet, or is shorter than one.
    TcpOffset,
    /// A datagram to the port of RoCE is no longer than its headers, or longer than its packet.
    UdpLength,
    /// The transport header of RoCE is of another version.
    Bth,
    /// The interface is not listed.
    UnregisteredInterface,
    /// The flow found no place in the table, or another has its short key.
    NoFlowSlot,
    /// The ring of events was full.
    RingFull,
}

/// Tells why; `headers` is up to where headers are known, in bytes.
#[inline(always)]
pub fn report(why: Reason, egress: bool, interface: u32, length: u32, headers: u32) {
    #[cfg(feature = "diagnosis")]
    told::report_reason(why as u32, u32::from(egress), interface, length, headers);
    #[cfg(not(feature = "diagnosis"))]
    let _ = (why, egress, interface, length, headers);
}

/// Notes what is found where too little of the stack is left to report it. Functions that call each other have
/// 512 bytes of it together, and Linux 6.1 counts a multiple of 32 for each.
#[inline(always)]
pub fn note_full_ring() {
    #[cfg(feature = "diagnosis")]
    told::note_full_ring();
}

/// Tells what was noted.
#[inline(always)]
pub fn report_noted(egress: bool, interface: u32, length: u32, headers: u32) {
    #[cfg(feature = "diagnosis")]
    if told::was_noted() {
        report(Reason::RingFull, egress, interface, length, headers);
    }
    #[cfg(not(feature = "diagnosis"))]
    let _ = (Reason::RingFull, egress, interface, length, headers);
}

#[cfg(feature = "diagnosis")]
mod told {
    use super::Reason;
    use crate::traffic;
    use aya_ebpf::macros::map;
    use aya_ebpf::maps::PerCpuArray;
    use aya_log_ebpf::warn;

    /// Between two records on a processor, in nanoseconds.
    const MIN_INTERVAL_NS: u64 = 10_000_000;

    /// When this processor last told something, and how much it has not told since.
    #[map]
    static TOLD: PerCpuArray<[u64; 2]> = PerCpuArray::with_max_entries(1, 0);

    /// Whether the ring of events was full.
    #[map]
    static FULL_RING: PerCpuArray<u32> = PerCpuArray::with_max_entries(1, 0);

    #[inline(always)]
    pub fn note_full_ring() {
        if let Some(full) = FULL_RING.get_ptr_mut(0) {
            // SAFETY: as below.
            unsafe { *full = 1 };
        }
    }

    #[inline(always)]
    pub fn was_noted() -> bool {
        // SAFETY: as below.
        FULL_RING.get_ptr_mut(0).is_some_and(|full| unsafe { core::mem::take(&mut *full) } != 0)
    }

    /// A global function: the verifier goes through it once.
    #[unsafe(no_mangle)]
    #[inline(never)]
    pub extern "C" fn report_reason(why: u32, egress: u32, interface: u32, length: u32, headers: u32) -> u32 {
        let Some(told) = TOLD.get_ptr_mut(0) else { return 0 };
        // SAFETY: the array's only entry is always there, and this processor runs nothing else of ours.
        let [last_ns, untold] = unsafe { &mut *told };
        let now = traffic::now();
        if *last_ns != 0 && !traffic::exceeds(now, *last_ns, MIN_INTERVAL_NS) {
            *untold += 1;
            return 0;
        }
        let before = *untold;
        (*last_ns, *untold) = (now, 0);
        macro_rules! report {
            ($($reason:ident $text:literal,)*) => {
                $(if why == Reason::$reason as u32 {
                    warn!(
                        (),
                        "interface {}, egress {}: {}; {} bytes, headers known up to {}, untold before {}",
                        interface, egress, $text, length, headers, before
                    );
                    return 1;
                })*
            };
        }
        report! {
            HeaderBeyondEnd "a header ends beyond its packet",
            TooDeep "headers deeper than is looked",
            Truncated "headers that the buffer does not have",
            Version "an IP header of another version or too short",
            Length "the IP length contradicts the buffer",
            Fragment "a fragment",
            TcpOffset "the TCP header contradicts the packet",
            UdpLength "the UDP length contradicts packet or headers",
            Bth "a RoCE header of another version",
            UnregisteredInterface "the interface is not registered",
            NoFlowSlot "no place in the table of flows",
            RingFull "the ring of events is full",
        }
        0
    }
}
