//! The key of a flow, as the words that maps compare. Written in smaller pieces, it would be read back slowly by the
//! comparison, which waits for all of them.

use harmonaize_events::{Direction, FlowKey, FoldingSecret, Protocol, RequestKey, ShortKey};

/// A [`FlowKey`], word by word: 16 bytes on this side, 16 on the other, ports and queue pair, interface and the rest.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct PackedFlowKey([u64; 6]);

const _: () = assert!(size_of::<PackedFlowKey>() == size_of::<FlowKey>());
const _: () = assert!(size_of::<PackedRequestKey>() == size_of::<RequestKey>());

/// A [`RequestKey`], word by word.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct PackedRequestKey([u64; 5]);

/// A [`ShortKey`] in the first 12 bytes, word by word.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct PackedShortKey([u64; 2]);

impl PackedShortKey {
    /// What tables take.
    #[inline(always)]
    pub fn key(&self) -> &[u32; 3] {
        // SAFETY: three words of 32 bits lie within two of 64, which are aligned for them.
        unsafe { &*core::ptr::from_ref(&self.0).cast() }
    }
}

impl PackedFlowKey {
    /// Of no flow yet, at an interface: what the other words were they are still.
    #[inline(always)]
    pub fn begin(&mut self, interface: u32) {
        self.0[5] = u64::from(interface);
    }

    /// An IPv4 address in two words, mapped.
    #[inline(always)]
    pub fn mapped(address: u32) -> [u64; 2] {
        [0, 0xffff_0000 | u64::from(address) << 32]
    }

    /// Sets the addresses.
    #[inline(always)]
    pub fn place<const EGRESS: bool>(&mut self, source: [u64; 2], destination: [u64; 2]) {
        let (local, remote) = if EGRESS { (source, destination) } else { (destination, source) };
        [self.0[0], self.0[1]] = local;
        [self.0[2], self.0[3]] = remote;
    }

    /// Makes it the key of a connection.
    #[inline(always)]
    pub fn tcp<const EGRESS: bool>(&mut self, source: u16, destination: u16) {
        let (local, remote) = if EGRESS { (source, destination) } else { (destination, source) };
        self.0[4] = u64::from(local) | u64::from(remote) << 16;
        self.0[5] |= (Protocol::Tcp as u64) << 32;
    }

    /// Makes it the key of what goes to a queue pair.
    #[inline(always)]
    pub fn roce(&mut self, queue_pair: u32, direction: Direction) {
        self.0[4] = u64::from(queue_pair) << 32;
        self.0[5] |= (Protocol::Roce as u64) << 32 | (direction as u64) << 40;
    }

    /// That of the other direction, to another queue pair.
    #[inline(always)]
    pub fn reversed(&self, queue_pair: u32) -> Self {
        let [a, b, c, d, _, rest] = self.0;
        // Of two directions, 1 and 2, the other.
        Self([a, b, c, d, u64::from(queue_pair) << 32, rest ^ 3 << 40])
    }

    /// The destination queue pair.
    #[inline(always)]
    pub fn queue_pair(&self) -> u32 {
        (self.0[4] >> 32) as u32
    }

    /// The key of a connection in its table.
    #[inline(always)]
    pub fn short_tcp(&self, ipv4: bool, secret: &FoldingSecret) -> PackedShortKey {
        PackedShortKey([self.folded(ipv4, secret), self.0[4] & 0xffff_ffff])
    }

    /// The key of what goes to a queue pair in its table.
    #[inline(always)]
    pub fn short_roce(&self, ipv4: bool, secret: &FoldingSecret) -> PackedShortKey {
        PackedShortKey([self.folded(ipv4, secret), self.0[4] >> 32 | (self.0[5] >> 40 & 0xff) << 24])
    }

    #[inline(always)]
    fn folded(&self, ipv4: bool, secret: &FoldingSecret) -> u64 {
        let [a, b, c, d, _, rest] = self.0;
        ShortKey::fold([a, b, c, d], ipv4, rest as u32, secret)
    }

    /// Whether it is this flow, whose numbers are known to be.
    #[inline(always)]
    pub fn matches(&self, flow: &FlowKey) -> bool {
        // SAFETY: both are six words, and any words are a key.
        let other = unsafe { &*core::ptr::from_ref(flow).cast::<Self>() };
        let ([a, b, c, d, _, e], [f, g, h, i, _, j]) = (self.0, other.0);
        (a ^ f) | (b ^ g) | (c ^ h) | (d ^ i) | (e ^ j) == 0
    }

    /// As it stands in an entry.
    #[inline(always)]
    pub fn to_flow_key(&self) -> FlowKey {
        // SAFETY: both are six words, and any words are a flow's key.
        unsafe { core::mem::transmute::<[u64; 6], FlowKey>(self.0) }
    }

    /// The key of a request of this sequence number that leaves here, or else comes in.
    #[inline(always)]
    pub fn request(&self, sequence: u32, leaves: bool) -> PackedRequestKey {
        let [a, b, c, d, _, rest] = self.0;
        let last = u64::from(sequence) | rest << 32;
        PackedRequestKey(if leaves { [a, b, c, d, last] } else { [c, d, a, b, last] })
    }

    /// The flow for user space, with a direction.
    #[inline(always)]
    pub fn flow(&self, direction: Direction) -> FlowKey {
        let [a, b, c, d, e, rest] = self.0;
        let rest = rest & !(0xff << 40) | (direction as u64) << 40;
        // SAFETY: both are six words, and any words are a flow's key.
        unsafe { core::mem::transmute::<[u64; 6], FlowKey>([a, b, c, d, e, rest]) }
    }
}
