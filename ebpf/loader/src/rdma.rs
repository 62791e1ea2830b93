//! What RDMA devices count themselves, by port. The packets of a device that bypasses the kernel pass no program there; its counters
//! the kernel shows in sysfs.

use std::fs::{File, read_dir};
use std::io::Read;
use std::path::Path;

/// Where the kernel shows RDMA devices.
pub(crate) const DEVICES: &str = "/sys/class/infiniband";
/// The most devices, ports of a device, and ports in all that are read.
const MAX_PORTS: usize = 64;
/// The most bytes of a file that are read: a number, or an interface's name.
const MAX_TEXT: u64 = 64;
/// Entries of a port's table of addresses, of which the first that has an interface names the port's.
const ADDRESSES: u32 = 16;

/// What a port may count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortCounter {
    /// Packets that left.
    SentPackets,
    /// Bytes that left.
    SentBytes,
    /// Packets that came in.
    ReceivedPackets,
    /// Bytes that came in.
    ReceivedBytes,
    /// Congestion notifications (CNP) that came in and slowed a sender here down.
    NotificationsReceived,
    /// Congestion notifications that were sent.
    NotificationsSent,
    /// Packets that came in with ECN's mark.
    EcnMarked,
    /// Packets that came in out of sequence.
    OutOfSequence,
    /// Requests that came in once more.
    DuplicateRequests,
    /// NAKs that came in for a gap in the sequence.
    SequenceNaks,
    /// Acknowledgements that did not come in time.
    Timeouts,
    /// Times that a sender here began anew, after a NAK or a time-out.
    Retries,
    /// Queue pairs that failed after all retries.
    RetriesExceeded,
    /// NAKs that came in of a receiver that was not ready.
    ReceiverNotReady,
}

/// How many counters there are.
const COUNTERS: usize = PortCounter::ReceiverNotReady as usize + 1;

/// The files of a port, as mlx5 and SoftRoCE (rxe) name them: the counter and its unit. Of two files of a counter the first counts.
const FILES: [(PortCounter, &str, u64); 21] = {
    use PortCounter::*;
    [
        (SentPackets, "counters/port_xmit_packets", 1),
        (SentPackets, "hw_counters/sent_pkts", 1),
        (ReceivedPackets, "counters/port_rcv_packets", 1),
        (ReceivedPackets, "hw_counters/rcvd_pkts", 1),
        // In words of four bytes.
        (SentBytes, "counters/port_xmit_data", 4),
        (ReceivedBytes, "counters/port_rcv_data", 4),
        (NotificationsReceived, "hw_counters/rp_cnp_handled", 1),
        (NotificationsSent, "hw_counters/np_cnp_sent", 1),
        (EcnMarked, "hw_counters/np_ecn_marked_roce_packets", 1),
        (OutOfSequence, "hw_counters/out_of_sequence", 1),
        (OutOfSequence, "hw_counters/out_of_seq_request", 1),
        (DuplicateRequests, "hw_counters/duplicate_request", 1),
        (SequenceNaks, "hw_counters/packet_seq_err", 1),
        (SequenceNaks, "hw_counters/rcvd_seq_err", 1),
        (Timeouts, "hw_counters/local_ack_timeout_err", 1),
        (Retries, "hw_counters/roce_adp_retrans", 1),
        (Retries, "hw_counters/completer_retry_err", 1),
        (RetriesExceeded, "hw_counters/req_transport_retries_exceeded", 1),
        (RetriesExceeded, "hw_counters/retry_exceeded_err", 1),
        (ReceiverNotReady, "hw_counters/rnr_nak_retry_err", 1),
        (ReceiverNotReady, "hw_counters/rcvd_rnr_err", 1),
    ]
};

/// What a port has counted; none where the device does not count it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PortCounters([Option<u64>; COUNTERS]);

/// A port of an RDMA device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RdmaPort {
    /// The device's name.
    pub device: String,
    /// The port's number, from 1.
    pub number: u32,
    /// The name of the interface that has its addresses; empty where there is none.
    pub interface: String,
    /// What it has counted since the device was made.
    pub counters: PortCounters,
}

impl PortCounters {
    /// Returns a counter; none where the device does not count it.
    pub fn get(&self, counter: PortCounter) -> Option<u64> {
        self.0.get(counter as usize).copied().flatten()
    }

    /// Returns the sum of some counters. Those that the device does not count add nothing.
    pub fn sum(&self, counters: &[PortCounter]) -> u64 {
        counters.iter().filter_map(|counter| self.get(*counter)).fold(0, u64::saturating_add)
    }

    /// The counters of a port whose files have these texts.
    fn read(text: impl Fn(&str) -> Option<String>) -> Self {
        Self::named(|name| text(name)?.trim().parse().ok())
    }

    /// The counters that have these values, by the names of their files.
    pub(crate) fn named(value: impl Fn(&str) -> Option<u64>) -> Self {
        let all = FILES.iter();
        all.filter_map(|(counter, name, unit)| Some((*counter, value(name)?.saturating_mul(*unit)))).collect()
    }
}

impl FromIterator<(PortCounter, u64)> for PortCounters {
    /// Of a counter that comes several times, the first value counts.
    fn from_iter<I: IntoIterator<Item = (PortCounter, u64)>>(counted: I) -> Self {
        let mut all = Self::default();
        for (counter, value) in counted {
            if let Some(place) = all.0.get_mut(counter as usize) {
                place.get_or_insert(value);
            }
        }
        all
    }
}

/// Reads all ports of this host's RDMA devices into `into`, whose memory is used again; at most 64.
///
/// Cost: some 30 files of a port are opened, and the driver may ask its device: tens to hundreds of microseconds a port.
pub fn read_rdma_ports(into: &mut Vec<RdmaPort>) {
    read_from(Path::new(DEVICES), into);
}

fn read_from(devices: &Path, into: &mut Vec<RdmaPort>) {
    into.clear();
    for device in names(devices) {
        let ports = devices.join(&device).join("ports");
        for number in names(&ports).iter().filter_map(|name| name.parse::<u32>().ok()) {
            if into.len() >= MAX_PORTS {
                return;
            }
            let port = ports.join(number.to_string());
            let counters = PortCounters::read(|name| text(&port.join(name)));
            let interface = |entry: u32| text(&port.join(format!("gid_attrs/ndevs/{entry}")));
            let interface = (0..ADDRESSES).find_map(interface).unwrap_or_default().trim().to_owned();
            into.push(RdmaPort { device: device.clone(), number, interface, counters });
        }
    }
}

/// The names in a folder, in ascending order.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let entries = read_dir(folder).into_iter().flatten().flatten().take(MAX_PORTS);
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names
}

/// The beginning of a file; none where it cannot be read, or is no text.
pub(crate) fn text(path: &Path) -> Option<String> {
    let mut text = String::new();
    File::open(path).ok()?.take(MAX_TEXT).read_to_string(&mut text).ok()?;
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::PortCounter::*;
    use super::*;

    /// The files of a ConnectX's port by mlx5, as `grep . counters/* hw_counters/*` prints them.
    const MLX5: &str = "\
        counters/VL15_dropped:0\ncounters/port_rcv_data:2500\ncounters/port_rcv_packets:17\n\
        counters/port_xmit_data:1000\ncounters/port_xmit_packets:9\nhw_counters/duplicate_request:5\n\
        hw_counters/implied_nak_seq_err:0\nhw_counters/lifespan:10\nhw_counters/local_ack_timeout_err:2\n\
        hw_counters/np_cnp_sent:33\nhw_counters/np_ecn_marked_roce_packets:44\nhw_counters/out_of_buffer:0\n\
        hw_counters/out_of_sequence:6\nhw_counters/packet_seq_err:7\nhw_counters/rnr_nak_retry_err:1\n\
        hw_counters/roce_adp_retrans:3\nhw_counters/rp_cnp_handled:22\nhw_counters/rp_cnp_ignored:0\n\
        hw_counters/rx_write_requests:80";

    /// Those of a SoftRoCE device.
    const RXE: &str = "\
        hw_counters/ack_deferred:12\nhw_counters/completer_retry_err:4\nhw_counters/duplicate_request:3\n\
        hw_counters/lifespan:10\nhw_counters/link_downed:0\nhw_counters/out_of_seq_request:8\n\
        hw_counters/rcvd_pkts:2000\nhw_counters/rcvd_rnr_err:0\nhw_counters/rcvd_seq_err:2\n\
        hw_counters/rdma_recvs:0\nhw_counters/rdma_sends:0\nhw_counters/retry_exceeded_err:1\n\
        hw_counters/retry_rnr_exceeded_err:0\nhw_counters/send_err:0\nhw_counters/send_rnr_err:0\n\
        hw_counters/sent_pkts:1500";

    fn parsed(recorded: &str) -> PortCounters {
        let files = || recorded.lines().filter_map(|line| line.trim().split_once(':'));
        PortCounters::read(|name| {
            files().find(|(file, _)| *file == name).map(|(_, text)| format!("{text}\n"))
        })
    }

    #[test]
    fn counters_of_mlx5_are_read_by_name() {
        let counted = [
            (SentPackets, 9),
            (SentBytes, 4000),
            (ReceivedPackets, 17),
            (ReceivedBytes, 10_000),
            (NotificationsReceived, 22),
            (NotificationsSent, 33),
            (EcnMarked, 44),
            (OutOfSequence, 6),
            (DuplicateRequests, 5),
            (SequenceNaks, 7),
            (Timeouts, 2),
            (Retries, 3),
            (ReceiverNotReady, 1),
        ];
        let counters = parsed(MLX5);
        assert_eq!(counters, counted.into_iter().collect::<PortCounters>());
        assert_eq!(counters.get(RetriesExceeded), None);
        assert_eq!(counters.sum(&[SequenceNaks, RetriesExceeded, Timeouts]), 9);
    }

    #[test]
    fn counters_of_softroce_are_read_by_name() {
        let counted = [
            (SentPackets, 1500),
            (ReceivedPackets, 2000),
            (OutOfSequence, 8),
            (DuplicateRequests, 3),
            (SequenceNaks, 2),
            (Retries, 4),
            (RetriesExceeded, 1),
            (ReceiverNotReady, 0),
        ];
        assert_eq!(parsed(RXE), counted.into_iter().collect::<PortCounters>());
    }

    #[test]
    fn odd_text_is_no_counter() {
        for odd in ["", "N/A", "-1", "18446744073709551616", "1 2", "0x10"] {
            assert_eq!(PortCounters::read(|_| Some(odd.to_owned())), PortCounters::default(), "{odd}");
        }
        let most = PortCounters::read(|_| Some(u64::MAX.to_string()));
        assert_eq!(most.get(SentBytes), Some(u64::MAX));
        assert_eq!(most.sum(&[SentBytes, ReceivedBytes]), u64::MAX);
    }

    #[test]
    fn ports_are_found_with_their_interfaces() {
        let folder = std::env::temp_dir().join(format!("harmonaize-rdma-{}", std::process::id()));
        let write = |path: &str, bytes: &[u8]| {
            let path = folder.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
        };
        write("mlx5_0/ports/1/gid_attrs/ndevs/3", b"eth0\n");
        write("mlx5_0/ports/1/hw_counters/rp_cnp_handled", b"5\n");
        write("mlx5_0/ports/1/hw_counters/np_cnp_sent", b"\xff\n");
        write("mlx5_0/ports/1/hw_counters/out_of_sequence", &[b'9'; 1000]);
        write("mlx5_0/ports/none/hw_counters/rp_cnp_handled", b"5\n");
        write("ib0/ports/2/state", b"4: ACTIVE\n");
        let mut ports = vec![RdmaPort::default()];
        read_from(&folder, &mut ports);
        let port = |device: &str, number, interface: &str, counted: &[(PortCounter, u64)]| RdmaPort {
            device: device.into(),
            number,
            interface: interface.into(),
            counters: counted.iter().copied().collect(),
        };
        let found = [port("ib0", 2, "", &[]), port("mlx5_0", 1, "eth0", &[(NotificationsReceived, 5)])];
        assert_eq!(ports, found);
        std::fs::remove_dir_all(&folder).unwrap();
        read_from(&folder, &mut ports);
        assert_eq!(ports, []);
    }
}
