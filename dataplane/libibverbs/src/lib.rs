//! Verbs of the host's own RDMA devices: the calls of `harmonaize-verbs` on libibverbs, through rdma-sys.

mod objects;
mod post;

use harmonaize_shm::Pin;
use harmonaize_verbs::calls::{
    Calls, CompletionEntry, Created, GATHER, Handle, Kind, ReceiveEntry, Refused, Registered, SendEntry,
    Transition,
};
use harmonaize_verbs::{
    Access, AsyncEvent, Call, Completion, Depths, Devices, Gid, GidEntry, GidKind, Limits, LinkLayer, Mtu,
    Path, Port, PortState, Status,
};
use objects::{AddressHandle, Channel, Context, Domain, Queue, QueuePair, Region, made, object};
use rdma_sys::{
    ibv_access_flags, ibv_ah_attr, ibv_async_event, ibv_device_attr, ibv_event_type, ibv_gid, ibv_port_attr,
    ibv_port_state, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_init_attr, ibv_qp_state, ibv_qp_type, ibv_wc,
    ibv_wc_flags,
};
use rustix::io::Errno;
use std::ffi::{CStr, c_int};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

/// All RDMA devices of the host; none where its kernel has no RDMA.
pub fn host_devices() -> Devices {
    Devices::new(Arc::new(Libibverbs))
}

#[derive(Debug)]
struct Libibverbs;

/// Least wait before a peer without a receive request is asked again: 0.64 ms (`InfiniBand` 9.7.5.2.8, code 12).
const RNR_TIMER: u8 = 12;

/// Completions taken from the library at a time.
const BATCH: usize = 16;

/// What errno says after a call that returned null or -1.
fn errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Most verbs return the error; some return -1 and set errno.
fn outcome(code: c_int) -> Result<(), Errno> {
    match code {
        0 => Ok(()),
        code if code > 0 => Err(Errno::from_raw_os_error(code)),
        _ => Err(errno()),
    }
}

fn count(value: c_int) -> u32 {
    u32::try_from(value).unwrap_or(0)
}

fn flags(access: Access) -> u32 {
    let flag = |on: bool, flag: ibv_access_flags| if on { flag.0 } else { 0 };
    flag(access.local_write, ibv_access_flags::IBV_ACCESS_LOCAL_WRITE)
        | flag(access.remote_write, ibv_access_flags::IBV_ACCESS_REMOTE_WRITE)
        | flag(access.remote_read, ibv_access_flags::IBV_ACCESS_REMOTE_READ)
}

fn address(gid: Gid, lid: u16, path: &Path) -> ibv_ah_attr {
    // SAFETY: the struct is plain numbers, for which zero is a value.
    let mut attributes: ibv_ah_attr = unsafe { std::mem::zeroed() };
    attributes.grh.dgid = ibv_gid { raw: gid.0 };
    attributes.grh.flow_label = path.flow_label;
    attributes.grh.sgid_index = path.gid_index;
    attributes.grh.hop_limit = path.hop_limit;
    attributes.grh.traffic_class = path.traffic_class;
    attributes.dlid = lid;
    attributes.sl = path.service_level;
    attributes.is_global = 1;
    attributes.port_num = path.port;
    attributes
}

/// The attributes of a step, and which of them it sets.
fn attributes(kind: Kind, transition: &Transition<'_>) -> (ibv_qp_attr, u32) {
    type Mask = ibv_qp_attr_mask;
    // SAFETY: the struct is plain numbers, for which zero is a value.
    let mut to: ibv_qp_attr = unsafe { std::mem::zeroed() };
    let mut mask = Mask::IBV_QP_STATE;
    match *transition {
        Transition::Init { port, access, queue_key } => {
            to.qp_state = ibv_qp_state::IBV_QPS_INIT;
            to.port_num = port;
            mask |= Mask::IBV_QP_PKEY_INDEX | Mask::IBV_QP_PORT;
            if kind == Kind::Datagram {
                to.qkey = queue_key;
                mask |= Mask::IBV_QP_QKEY;
            } else {
                to.qp_access_flags = flags(access);
                mask |= Mask::IBV_QP_ACCESS_FLAGS;
            }
        }
        Transition::ReadyToReceive { remote, path, mtu } => {
            to.qp_state = ibv_qp_state::IBV_QPS_RTR;
            to.ah_attr = address(remote.gid, remote.lid, path);
            to.path_mtu = mtu.code();
            to.dest_qp_num = remote.number;
            to.rq_psn = remote.psn;
            to.max_dest_rd_atomic = path.reads;
            to.min_rnr_timer = RNR_TIMER;
            mask =
                mask | Mask::IBV_QP_AV | Mask::IBV_QP_PATH_MTU | Mask::IBV_QP_DEST_QPN | Mask::IBV_QP_RQ_PSN;
            mask |= Mask::IBV_QP_MAX_DEST_RD_ATOMIC | Mask::IBV_QP_MIN_RNR_TIMER;
        }
        Transition::ReadyToSend { psn, path } => {
            to.qp_state = ibv_qp_state::IBV_QPS_RTS;
            to.sq_psn = psn;
            to.timeout = path.timeout;
            to.retry_cnt = path.retries;
            to.rnr_retry = path.receiver_not_ready_retries;
            to.max_rd_atomic = path.reads;
            mask |= Mask::IBV_QP_SQ_PSN | Mask::IBV_QP_TIMEOUT | Mask::IBV_QP_RETRY_CNT;
            mask |= Mask::IBV_QP_RNR_RETRY | Mask::IBV_QP_MAX_QP_RD_ATOMIC;
        }
        Transition::DatagramReadyToReceive => to.qp_state = ibv_qp_state::IBV_QPS_RTR,
        Transition::DatagramReadyToSend { psn } => {
            to.qp_state = ibv_qp_state::IBV_QPS_RTS;
            to.sq_psn = psn;
            mask |= Mask::IBV_QP_SQ_PSN;
        }
        Transition::Error => to.qp_state = ibv_qp_state::IBV_QPS_ERR,
    }
    (to, mask.0)
}

/// The kernel's name for a GID's kind.
fn kind(device: &str, port: u8, index: u8) -> GidKind {
    let file = format!("/sys/class/infiniband/{device}/ports/{port}/gid_attrs/types/{index}");
    match std::fs::read_to_string(file).unwrap_or_default().trim() {
        "RoCE v2" => GidKind::RoceV2,
        "IB/RoCE v1" => GidKind::InfiniBandOrRoceV1,
        _ => GidKind::Unknown,
    }
}

fn completion(from: &ibv_wc) -> Completion {
    // SAFETY: both members of the union are four bytes of any value.
    let immediate = unsafe { from.imm_data_invalidated_rkey_union.imm_data };
    Completion::from(CompletionEntry {
        id: from.wr_id,
        status: Status::from_code(from.status),
        vendor: from.vendor_err,
        with_immediate: from.wc_flags & ibv_wc_flags::IBV_WC_WITH_IMM.0 != 0,
        immediate: u32::from_be(immediate),
        bytes: from.byte_len,
        number: from.qp_num,
        source: from.src_qp,
    })
}

impl Calls for Libibverbs {
    fn names(&self) -> Result<Vec<String>, Errno> {
        objects::with_devices(|devices| devices.iter().map(|(name, _)| name.clone()).collect())
    }

    fn open(&self, name: &str) -> Result<Handle, Errno> {
        let opened = objects::with_devices(|devices| {
            let (_, device) = devices.iter().find(|(found, _)| found == name).ok_or(Errno::NODEV)?;
            Context::open(*device)
        })??;
        rustix::fs::fcntl_setfl(opened.async_fd(), rustix::fs::OFlags::NONBLOCK)?;
        Ok(Arc::new(opened))
    }

    fn limits(&self, context: &Handle) -> Result<Limits, Errno> {
        let context = object::<Context>(context)?;
        let mut attributes = MaybeUninit::<ibv_device_attr>::zeroed();
        // SAFETY: the context is open; the struct is plain numbers and zeroed, and the call fills it.
        let attributes = unsafe {
            outcome(rdma_sys::ibv_query_device(context.raw(), attributes.as_mut_ptr()))?;
            attributes.assume_init()
        };
        let reads = attributes.max_qp_rd_atom.min(attributes.max_qp_init_rd_atom).clamp(0, 255);
        Ok(Limits {
            ports: attributes.phys_port_cnt,
            queue_pairs: count(attributes.max_qp),
            work_requests: count(attributes.max_qp_wr),
            pieces: count(attributes.max_sge),
            completion_queues: count(attributes.max_cq),
            completions: count(attributes.max_cqe),
            regions: count(attributes.max_mr),
            region_bytes: attributes.max_mr_size,
            domains: count(attributes.max_pd),
            reads: reads as u8,
        })
    }

    fn port(&self, context: &Handle, number: u8) -> Result<Port, Errno> {
        let attributes = port_attributes(object::<Context>(context)?, number)?;
        let state = match attributes.state {
            ibv_port_state::IBV_PORT_DOWN => PortState::Down,
            ibv_port_state::IBV_PORT_INIT => PortState::Initialize,
            ibv_port_state::IBV_PORT_ARMED => PortState::Armed,
            ibv_port_state::IBV_PORT_ACTIVE => PortState::Active,
            ibv_port_state::IBV_PORT_ACTIVE_DEFER => PortState::ActiveDefer,
            _ => PortState::Unknown,
        };
        // IBV_LINK_LAYER_*: macros, which the bindings leave out.
        let link_layer = match attributes.link_layer {
            1 => LinkLayer::InfiniBand,
            2 => LinkLayer::Ethernet,
            _ => LinkLayer::Unknown,
        };
        let active_mtu = Mtu::from_code(attributes.active_mtu).ok_or(Errno::PROTO)?;
        Ok(Port { number, state, link_layer, active_mtu, lid: attributes.lid, gids: Vec::new() })
    }

    fn gids(&self, context: &Handle, port: u8) -> Result<Vec<GidEntry>, Errno> {
        let context = object::<Context>(context)?;
        let entries = port_attributes(context, port)?.gid_tbl_len.clamp(0, 256);
        let mut gids = Vec::new();
        for index in (0..entries).map_while(|index| u8::try_from(index).ok()) {
            let mut raw = ibv_gid { raw: [0; 16] };
            // SAFETY: the context is open, and the call fills the struct; every value of its 16 bytes is one.
            let gid = unsafe {
                if rdma_sys::ibv_query_gid(context.raw(), port, index.into(), &raw mut raw) != 0 {
                    continue;
                }
                Gid(raw.raw)
            };
            if !gid.is_empty() {
                gids.push(GidEntry { index, gid, kind: kind(context.name(), port, index) });
            }
        }
        Ok(gids)
    }

    fn async_fd<'a>(&self, context: &'a Handle) -> Result<BorrowedFd<'a>, Errno> {
        Ok(object::<Context>(context)?.async_fd())
    }

    fn async_event(&self, context: &Handle) -> Result<Option<AsyncEvent>, Errno> {
        let context = object::<Context>(context)?;
        let mut event = MaybeUninit::<ibv_async_event>::zeroed();
        // SAFETY: the context is open, and the call fills the struct. The kind is read as a number, for a newer kernel may
        // know more kinds than the enumeration of the bindings; the element only as the member that the kind stands for.
        // What it points to lives until the event is acknowledged, which comes last.
        unsafe {
            if rdma_sys::ibv_get_async_event(context.raw(), event.as_mut_ptr()) != 0 {
                return match errno() {
                    Errno::AGAIN | Errno::INTR => Ok(None),
                    errno => Err(errno),
                };
            }
            let kind = (&raw const (*event.as_ptr()).event_type).cast::<u32>().read();
            let element = &raw const (*event.as_ptr()).element;
            let port = || u8::try_from((*element).port_num).unwrap_or(0);
            let is = |named: ibv_event_type| kind == named as u32;
            let event_kind = if is(ibv_event_type::IBV_EVENT_DEVICE_FATAL) {
                AsyncEvent::DeviceFatal
            } else if is(ibv_event_type::IBV_EVENT_PORT_ACTIVE) {
                AsyncEvent::PortActive(port())
            } else if is(ibv_event_type::IBV_EVENT_PORT_ERR) {
                AsyncEvent::PortDown(port())
            } else if is(ibv_event_type::IBV_EVENT_GID_CHANGE) {
                AsyncEvent::GidsChanged(port())
            } else if is(ibv_event_type::IBV_EVENT_CQ_ERR) {
                AsyncEvent::CompletionQueueError
            } else if is(ibv_event_type::IBV_EVENT_QP_FATAL)
                || is(ibv_event_type::IBV_EVENT_QP_REQ_ERR)
                || is(ibv_event_type::IBV_EVENT_QP_ACCESS_ERR)
            {
                AsyncEvent::QueuePairFatal((*(*element).qp).qp_num)
            } else {
                AsyncEvent::Other(kind)
            };
            rdma_sys::ibv_ack_async_event(event.as_mut_ptr());
            Ok(Some(event_kind))
        }
    }

    fn present(&self, context: &Handle) -> bool {
        object::<Context>(context).is_ok_and(Context::present)
    }

    fn domain(&self, context: &Handle) -> Result<Handle, Errno> {
        let open = object::<Context>(context)?;
        // SAFETY: the context is open, and stays so while the domain holds it.
        unsafe {
            let raw = made(rdma_sys::ibv_alloc_pd(open.raw()))?;
            Ok(Arc::new(Domain::new(raw, Arc::clone(context))))
        }
    }

    fn register(&self, domain: &Handle, memory: &Pin, access: Access) -> Result<Registered, Errno> {
        let of = object::<Domain>(domain)?;
        let address = std::ptr::with_exposed_provenance_mut(memory.memory().address() as usize);
        // SAFETY: the mapping lives while the region holds it, so the device reaches only memory that is mapped, and no
        // reference to its bytes ever exists.
        let region = unsafe {
            let raw =
                rdma_sys::ibv_reg_mr(of.raw(), address, memory.memory().bytes(), flags(access) as c_int);
            Region::new(made(raw)?, Arc::clone(domain), memory.clone())
        };
        let (local_key, remote_key) = region.keys();
        Ok(Registered { handle: Arc::new(region), local_key, remote_key })
    }

    fn completion_queue(&self, context: &Handle, entries: u32) -> Result<(Handle, u32), (Call, Errno)> {
        let of = |call| move |errno| (call, errno);
        let open = object::<Context>(context).map_err(of(Call::CreateCompletionQueue))?;
        let entries = c_int::try_from(entries).map_err(|_| (Call::CreateCompletionQueue, Errno::INVAL))?;
        // SAFETY: the context is open, and stays so while the channel holds it.
        let channel = unsafe {
            let raw = made(rdma_sys::ibv_create_comp_channel(open.raw())).map_err(of(Call::CreateChannel))?;
            Channel::new(raw, Arc::clone(context))
        };
        rustix::fs::fcntl_setfl(channel.fd(), rustix::fs::OFlags::NONBLOCK)
            .map_err(of(Call::CreateChannel))?;
        // SAFETY: context and channel live while the queue holds the channel.
        let queue = unsafe {
            let raw = rdma_sys::ibv_create_cq(open.raw(), entries, std::ptr::null_mut(), channel.raw(), 0);
            Queue::new(made(raw).map_err(of(Call::CreateCompletionQueue))?, channel)
        };
        let entries = queue.entries();
        Ok((Arc::new(queue), entries))
    }

    fn channel_fd<'a>(&self, queue: &'a Handle) -> Result<BorrowedFd<'a>, Errno> {
        Ok(object::<Queue>(queue)?.channel().fd())
    }

    fn arm(&self, queue: &Handle) -> Result<(), Errno> {
        // SAFETY: the queue lives.
        outcome(unsafe { rdma_sys::ibv_req_notify_cq(object::<Queue>(queue)?.raw(), 0) })
    }

    fn take_events(&self, queue: &Handle) -> Result<u32, Errno> {
        let queue = object::<Queue>(queue)?;
        let mut taken = 0;
        loop {
            let (mut of, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: the channel lives and is this queue's alone, so every event is the queue's.
            let code =
                unsafe { rdma_sys::ibv_get_cq_event(queue.channel().raw(), &raw mut of, &raw mut context) };
            let failed = (code != 0).then(errno);
            if failed == Some(Errno::INTR) {
                continue;
            }
            let Some(errno) = failed else {
                taken += 1;
                continue;
            };
            if taken > 0 {
                // SAFETY: as many events of this queue were taken; destroying it waits for all to be acknowledged.
                unsafe { rdma_sys::ibv_ack_cq_events(queue.raw(), taken) };
            }
            return if errno == Errno::AGAIN { Ok(taken) } else { Err(errno) };
        }
    }

    fn poll(&self, queue: &Handle, into: &mut Vec<Completion>, most: usize) -> Result<usize, Errno> {
        let queue = object::<Queue>(queue)?;
        let mut all = 0;
        while all < most {
            let asked = (most - all).min(BATCH);
            let mut raw = [const { MaybeUninit::<ibv_wc>::uninit() }; BATCH];
            // SAFETY: the queue lives, and there is room for as many as are asked for.
            let found =
                unsafe { rdma_sys::ibv_poll_cq(queue.raw(), asked as c_int, raw.as_mut_ptr().cast()) };
            let Ok(found) = usize::try_from(found) else { return Err(Errno::IO) };
            for one in raw.iter().take(found) {
                // SAFETY: the call has filled as many as it said.
                into.push(completion(unsafe { one.assume_init_ref() }));
            }
            all += found;
            if found < asked {
                break;
            }
        }
        Ok(all)
    }

    fn queue_pair(
        &self,
        domain: &Handle,
        queue: &Handle,
        kind: Kind,
        depths: &Depths,
    ) -> Result<Created, Errno> {
        let (of, completions) = (object::<Domain>(domain)?, object::<Queue>(queue)?);
        // SAFETY: numbers and pointers, for which zero is a value.
        let mut asked: ibv_qp_init_attr = unsafe { std::mem::zeroed() };
        asked.send_cq = completions.raw();
        asked.recv_cq = completions.raw();
        asked.cap.max_send_wr = depths.sends;
        asked.cap.max_recv_wr = depths.receives;
        asked.cap.max_send_sge = GATHER as u32;
        asked.cap.max_recv_sge = 1;
        asked.cap.max_inline_data = depths.inline_bytes;
        asked.qp_type = match kind {
            Kind::Reliable => ibv_qp_type::IBV_QPT_RC,
            Kind::Datagram => ibv_qp_type::IBV_QPT_UD,
        };
        // SAFETY: domain and queue live; the call reads what is asked for, and writes there what it gave.
        let raw = made(unsafe { rdma_sys::ibv_create_qp(of.raw(), &raw mut asked) })?;
        let depths = Depths { inline_bytes: asked.cap.max_inline_data, ..*depths };
        let scratch = Mutex::new(post::Scratch::with_room(&depths));
        // SAFETY: the pair was made above, from these.
        let pair = unsafe { QueuePair::new(raw, kind, scratch, Arc::clone(domain), Arc::clone(queue)) };
        let number = pair.number();
        Ok(Created { handle: Arc::new(pair), number, depths })
    }

    fn modify(&self, pair: &Handle, transition: &Transition<'_>) -> Result<(), Errno> {
        let pair = object::<QueuePair>(pair)?;
        let (mut to, mask) = attributes(pair.kind(), transition);
        // SAFETY: the pair lives; the call reads the attributes that the mask names.
        outcome(unsafe { rdma_sys::ibv_modify_qp(pair.raw(), &raw mut to, mask as c_int) })
    }

    fn post_send(&self, pair: &Handle, entries: &[SendEntry]) -> Result<(), Refused> {
        let none = |errno| Refused { taken: 0, errno };
        post::send(object::<QueuePair>(pair).map_err(none)?, entries)
    }

    fn post_receive(&self, pair: &Handle, entries: &[ReceiveEntry]) -> Result<(), Refused> {
        let none = |errno| Refused { taken: 0, errno };
        post::receive(object::<QueuePair>(pair).map_err(none)?, entries)
    }

    fn address_handle(&self, domain: &Handle, gid: Gid, path: &Path) -> Result<Handle, Errno> {
        let of = object::<Domain>(domain)?;
        let mut to = address(gid, 0, path);
        // SAFETY: the domain lives while the handle holds it; the call reads the attributes.
        unsafe {
            let raw = made(rdma_sys::ibv_create_ah(of.raw(), &raw mut to))?;
            Ok(Arc::new(AddressHandle::new(raw, Arc::clone(domain))))
        }
    }
}

fn port_attributes(context: &Context, number: u8) -> Result<ibv_port_attr, Errno> {
    let mut attributes = MaybeUninit::<ibv_port_attr>::zeroed();
    // SAFETY: the context is open; the struct is plain numbers and zeroed, and the call fills it.
    unsafe {
        outcome(rdma_sys::___ibv_query_port(context.raw(), number, attributes.as_mut_ptr()))?;
        Ok(attributes.assume_init())
    }
}

/// A device's name.
///
/// # Safety
/// The device must be of a list, or of a context, that lives.
unsafe fn device_name(device: *mut rdma_sys::ibv_device) -> String {
    // SAFETY: the device lives; its name is a C string inside it.
    let name = unsafe {
        let name = rdma_sys::ibv_get_device_name(device);
        if name.is_null() {
            return String::new();
        }
        CStr::from_ptr(name)
    };
    name.to_string_lossy().into_owned()
}
