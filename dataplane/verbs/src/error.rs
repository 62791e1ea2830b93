//! Why a verbs call failed: the call, the object, the kernel's answer, and what to do about it.

use rustix::io::Errno;
use std::fmt;

/// A verbs call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Call {
    /// `ibv_get_device_list`.
    ListDevices,
    /// `ibv_open_device`.
    OpenDevice,
    /// `ibv_query_device`.
    QueryDevice,
    /// `ibv_query_port`.
    QueryPort,
    /// `ibv_query_gid`.
    QueryGid,
    /// `ibv_get_async_event`.
    AsyncEvent,
    /// `ibv_alloc_pd`.
    AllocateDomain,
    /// `ibv_reg_mr`.
    Register,
    /// `ibv_create_comp_channel`.
    CreateChannel,
    /// `ibv_create_cq`.
    CreateCompletionQueue,
    /// `ibv_req_notify_cq`.
    Arm,
    /// `ibv_get_cq_event`.
    TakeEvent,
    /// `ibv_poll_cq`.
    Poll,
    /// `ibv_create_qp`.
    CreateQueuePair,
    /// `ibv_modify_qp` to INIT.
    ToInit,
    /// `ibv_modify_qp` to RTR.
    ToReadyToReceive,
    /// `ibv_modify_qp` to RTS.
    ToReadyToSend,
    /// `ibv_modify_qp` to ERR.
    ToError,
    /// `ibv_post_send`.
    PostSend,
    /// `ibv_post_recv`.
    PostReceive,
    /// `ibv_create_ah`.
    CreateAddressHandle,
    /// `ibv_destroy_qp`, of which only the fake records.
    DestroyQueuePair,
    /// `ibv_destroy_cq`, of which only the fake records.
    DestroyCompletionQueue,
    /// `ibv_dereg_mr`, of which only the fake records.
    Deregister,
    /// `ibv_dealloc_pd`, of which only the fake records.
    FreeDomain,
    /// `ibv_close_device`, of which only the fake records.
    CloseDevice,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ListDevices => "ibv_get_device_list",
            Self::OpenDevice => "ibv_open_device",
            Self::QueryDevice => "ibv_query_device",
            Self::QueryPort => "ibv_query_port",
            Self::QueryGid => "ibv_query_gid",
            Self::AsyncEvent => "ibv_get_async_event",
            Self::AllocateDomain => "ibv_alloc_pd",
            Self::Register => "ibv_reg_mr",
            Self::CreateChannel => "ibv_create_comp_channel",
            Self::CreateCompletionQueue => "ibv_create_cq",
            Self::Arm => "ibv_req_notify_cq",
            Self::TakeEvent => "ibv_get_cq_event",
            Self::Poll => "ibv_poll_cq",
            Self::CreateQueuePair => "ibv_create_qp",
            Self::ToInit => "ibv_modify_qp(INIT)",
            Self::ToReadyToReceive => "ibv_modify_qp(RTR)",
            Self::ToReadyToSend => "ibv_modify_qp(RTS)",
            Self::ToError => "ibv_modify_qp(ERR)",
            Self::PostSend => "ibv_post_send",
            Self::PostReceive => "ibv_post_recv",
            Self::CreateAddressHandle => "ibv_create_ah",
            Self::DestroyQueuePair => "ibv_destroy_qp",
            Self::DestroyCompletionQueue => "ibv_destroy_cq",
            Self::Deregister => "ibv_dereg_mr",
            Self::FreeDomain => "ibv_dealloc_pd",
            Self::CloseDevice => "ibv_close_device",
        })
    }
}

/// Why something could not be had or done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VerbsError {
    /// A call failed.
    #[error("{call} on {object}: {source}{}", hint(*call, *source))]
    Failed {
        /// Which.
        call: Call,
        /// The object and its state, in words.
        object: String,
        /// What the kernel or the provider's library said.
        source: Errno,
    },
    /// Memory could not be registered because too much of it is pinned already.
    #[error(
        "ibv_reg_mr of {bytes} bytes on {device}: {errno}: pinned memory is limited to {limit} (RLIMIT_MEMLOCK); raise it \
         with `ulimit -l unlimited`, or `LimitMEMLOCK=infinity` in the systemd unit"
    )]
    Memlock {
        /// Asked for.
        bytes: u64,
        /// On which device.
        device: String,
        /// ENOMEM or EPERM, as some kernels say.
        errno: Errno,
        /// The limit, "unlimited" or in bytes.
        limit: String,
    },
    /// The device has no queue pair left.
    #[error(
        "no queue pair left on {device} ({errno}): it has {most} in all, and a control group may have fewer (rdma.max); end \
         some communicators, or use fewer paths"
    )]
    QueuePairsExhausted {
        /// Which device.
        device: String,
        /// What it said.
        errno: Errno,
        /// How many it has.
        most: u32,
    },
    /// No device of that name.
    #[error("no RDMA device {name}; there are: {}", if present.is_empty() { "none".to_owned() } else { present.join(", ") })]
    NoSuchDevice {
        /// Asked for.
        name: String,
        /// The names that exist.
        present: Vec<String>,
    },
    /// No device's port has the address.
    #[error(
        "no RDMA device has the address {address}; it must stand in a port's GID table (see `show_gids`, or \
             /sys/class/infiniband/*/ports/*/gids)"
    )]
    NoSuchAddress {
        /// Asked for.
        address: std::net::IpAddr,
    },
    /// A GID index without an entry.
    #[error("GID index {index} of {device} port {port} is empty; used are: {used:?}")]
    NoSuchGid {
        /// Which device.
        device: String,
        /// Which of its ports.
        port: u8,
        /// Asked for.
        index: u8,
        /// Those with an entry.
        used: Vec<u8>,
    },
    /// Neither a name nor a name with a port.
    #[error("{name:?} is no device: write its name, as mlx5_0, or with its port, as mlx5_0:1")]
    BadDevice {
        /// Asked for.
        name: String,
    },
    /// No device was named, and there is more than one to choose from, or none.
    #[error("name the RDMA device; ports that are active: {}", if active.is_empty() { "none".to_owned() } else { active.join(", ") })]
    WhichDevice {
        /// Devices with their ports.
        active: Vec<String>,
    },
    /// Not one that packets can have.
    #[error("an MTU of {bytes} bytes: it must be 256, 512, 1024, 2048 or 4096")]
    BadMtu {
        /// Asked for.
        bytes: usize,
    },
    /// The port is not active.
    #[error("port {port} of {device} is {state}, not ACTIVE")]
    PortDown {
        /// Which device.
        device: String,
        /// Which of its ports.
        port: u8,
        /// What it is.
        state: crate::PortState,
    },
    /// The path's MTU is more than a port's.
    #[error(
        "an MTU of {requested} is over the {active} of {device} port {port}; lower it, or raise the interface's"
    )]
    MtuTooLarge {
        /// Asked for.
        requested: crate::Mtu,
        /// What the port has.
        active: crate::Mtu,
        /// Which device.
        device: String,
        /// Which of its ports.
        port: u8,
    },
    /// A parameter that the field's words have no room for.
    #[error("{what} of {value} is out of range (at most {most})")]
    OutOfRange {
        /// Which.
        what: &'static str,
        /// Asked for.
        value: u64,
        /// The most.
        most: u64,
    },
    /// The queue has no room for as many work requests.
    #[error("queue full: {requested} work requests, room for {room}; settle completions first")]
    Full {
        /// Asked for.
        requested: usize,
        /// Free entries.
        room: usize,
    },
    /// A span that its region does not cover, or a region of another domain.
    #[error("the span does not lie in the registered region, or the region is of another domain")]
    NotRegistered,
    /// A completion of another queue pair.
    #[error("a completion of queue pair {found:#x} was given to {expected:#x}")]
    ForeignCompletion {
        /// Whose it is.
        found: u32,
        /// To whom it was given.
        expected: u32,
    },
    /// The device is gone, or has failed for good.
    #[error("RDMA device {device} is lost; what stood on it must be closed")]
    DeviceLost {
        /// Which.
        device: String,
    },
}

impl VerbsError {
    pub(crate) fn failed(call: Call, object: impl Into<String>) -> impl FnOnce(Errno) -> Self {
        let object = object.into();
        move |source| Self::Failed { call, object, source }
    }
}

fn hint(call: Call, errno: Errno) -> &'static str {
    match (call, errno) {
        (Call::OpenDevice, Errno::ACCESS | Errno::PERM) => {
            " (may this user open /dev/infiniband/uverbs*? a container must be given the device)"
        }
        (Call::ToReadyToReceive | Call::CreateAddressHandle, Errno::INVAL) => {
            " (is the GID index the one of the peer's network, and the MTU within the port's?)"
        }
        (Call::ToReadyToReceive | Call::CreateAddressHandle, Errno::TIMEDOUT | Errno::HOSTUNREACH) => {
            " (the peer's address did not resolve: is there a route, and does it answer?)"
        }
        (Call::CreateCompletionQueue | Call::AllocateDomain, Errno::NOMEM) => {
            " (locked memory or the device's own is used up: see `ulimit -l` and the device's limits)"
        }
        (_, Errno::AGAIN) => " (a control group's limit is reached: see `rdma.max` in its folder)",
        _ => "",
    }
}
