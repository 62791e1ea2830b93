//! Counts what crosses an interface, per flow and direction, and tells at once what is worth knowing at once.
//!
//! Two programs, one for each direction, on the traffic control hooks (tcx or clsact); and a third, on XDP, that can stand for
//! the one of ingress: it sees what comes in before the network stack does. None changes a packet or its way.
//! Headers are read straight from the packet: a helper call for each would double the cost. Whatever a packet claims, it
//! is counted in exactly one class of its interface.
#![no_std]
#![no_main]
// For the one instruction that adds atomically: the compiler has no name for it on this machine.
#![feature(asm_experimental_arch)]

mod diagnosis;
mod headers;
mod key;
mod maps;
mod roce;
mod tcp;
mod traffic;

use aya_ebpf::bindings::{__sk_buff, xdp_md};
use aya_ebpf::macros::{classifier, xdp};
use aya_ebpf::programs::{TcContext, XdpContext};
use core::mem::MaybeUninit;
use diagnosis::Reason;
use harmonaize_events::{HEADERS_END, Totals};
use headers::{Buffer, Class, PacketInfo};

/// Lets the packet go on, to the next program or on its way.
const NEXT: i32 = -1;
/// The same on XDP.
const PASS: u32 = 2;

/// What comes in.
#[classifier]
pub fn count_ingress(context: TcContext) -> i32 {
    count::<false>(&context);
    NEXT
}

/// What leaves.
#[classifier]
pub fn count_egress(context: TcContext) -> i32 {
    count::<true>(&context);
    NEXT
}

/// What comes in, before the stack: single packets as the device has them, also those that the stack will drop.
#[xdp]
pub fn count_xdp(context: XdpContext) -> u32 {
    process_xdp(context.ctx);
    PASS
}

#[inline(always)]
fn count<const EGRESS: bool>(context: &TcContext) {
    let skb = context.skb.skb;
    let pass = |last: u32| if EGRESS { process_egress(skb, last) } else { process_ingress(skb, last) };
    if pass(0) != 0 {
        // The headers lie outside the buffer's first piece: have the kernel move them there. Rare.
        // Where it cannot, the second look has to do with what is there.
        let _ = context.pull_data(context.len().min(HEADERS_END as u32));
        pass(1);
    }
}

/// Counts a buffer; 1 when its headers cannot be reached and this is not the last look.
#[inline(always)]
fn process<const EGRESS: bool>(buffer: &Buffer, last: u32) -> u32 {
    let Some(totals) = maps::totals::<EGRESS>(buffer.interface) else {
        maps::losses(|losses| losses.unregistered += 1);
        diagnosis::report(Reason::UnregisteredInterface, EGRESS, buffer.interface, buffer.length, 0);
        return 0;
    };
    let mut place = MaybeUninit::<PacketInfo>::uninit();
    // SAFETY: it is words alone, and nobody reads one before it was written: what every class needs is written here, and who finds
    // the class of a connection or queue pair has written the rest. The verifier holds that against every way through.
    // Clearing all of it first would be a tenth of what a packet costs beside clock and look-up.
    let seen = unsafe { &mut *place.as_mut_ptr() };
    seen.key.begin(buffer.interface);
    seen.headers = 0;
    let class = match headers::read::<EGRESS>(buffer, seen) {
        Ok(class) | Err(class) => class,
    };
    if class == Class::Unreachable && last == 0 {
        return 1;
    }
    account::<EGRESS>(buffer, class, seen, totals);
    0
}

/// Counts a buffer for its interface and its flow.
#[inline(always)]
fn account<const EGRESS: bool>(buffer: &Buffer, class: Class, seen: &mut PacketInfo, totals: &mut Totals) {
    let packets = buffer.packets(seen.headers);
    let bytes = u64::from(buffer.length) + (packets - 1) * u64::from(seen.headers);
    totals.buffers += 1;
    totals.buffer_bytes += u64::from(buffer.length);
    totals.packets += packets;
    totals.bytes += bytes;
    seen.packets = packets;
    seen.bytes = bytes;
    seen.segment_size = buffer.segment_size;
    let placed = match class {
        Class::Tcp => {
            totals.tcp += packets;
            if EGRESS { tcp_egress(seen) } else { tcp_ingress(seen) }
        }
        Class::Roce => {
            totals.roce += packets;
            if EGRESS { roce_egress(seen) } else { roce_ingress(seen) }
        }
        Class::Other => return totals.other += packets,
        Class::Unreachable => {
            totals.other += packets;
            return buffer.diagnose::<EGRESS>(seen.headers);
        }
        Class::Fragment => {
            totals.fragments += packets;
            return buffer.diagnose::<EGRESS>(seen.headers);
        }
        Class::Malformed => {
            totals.malformed += packets;
            return buffer.diagnose::<EGRESS>(seen.headers);
        }
    };
    if placed == 0 {
        totals.unplaced += packets;
        diagnosis::report(Reason::NoFlowSlot, EGRESS, buffer.interface, buffer.length, seen.headers);
    }
    diagnosis::report_noted(EGRESS, buffer.interface, buffer.length, seen.headers);
}

// Global functions, with names of their own, are what the verifier goes through once, whoever calls them. A loop instead of
// two calls would be refused by kernels before Linux 6.8, depending on how the compiler lays it out.

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn process_ingress(skb: *mut __sk_buff, last: u32) -> u32 {
    process::<false>(&Buffer::from_skb(skb), last)
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn process_egress(skb: *mut __sk_buff, last: u32) -> u32 {
    process::<true>(&Buffer::from_skb(skb), last)
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn process_xdp(xdp: *mut xdp_md) -> u32 {
    process::<false>(&Buffer::from_xdp(xdp), 1)
}

// These return 0 when the flow finds no place in the table.

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn tcp_ingress(seen: *const PacketInfo) -> u32 {
    traffic::packet_info(seen).map_or(0, |seen| u32::from(tcp::count::<false>(seen)))
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn tcp_egress(seen: *const PacketInfo) -> u32 {
    traffic::packet_info(seen).map_or(0, |seen| u32::from(tcp::count::<true>(seen)))
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn roce_ingress(seen: *const PacketInfo) -> u32 {
    traffic::packet_info(seen).map_or(0, |seen| u32::from(roce::count::<false>(seen)))
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn roce_egress(seen: *const PacketInfo) -> u32 {
    traffic::packet_info(seen).map_or(0, |seen| u32::from(roce::count::<true>(seen)))
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
