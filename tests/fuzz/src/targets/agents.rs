//! What agents send each other.

use crate::input::Input;
use harmonaize_abi::{
    Collective, Direction, Dtype, Epoch, Nanos, P2pSignature, Rank, ReduceOp, Signature, Token, View, ViewMut,
};
use harmonaize_codec::{Codec, HEADER_BYTES, Header, Store, decode, header};
use harmonaize_core::{
    Action, Call, Communicator, Config, EpochPlan, MAX_MESSAGE, Message, P2pCall, PROTOCOL_VERSION, Payload,
};
use harmonaize_kernels::{Isa, codes};
use harmonaize_plan::{Access, AlgorithmTable, Group, Participant, Plan, Tuning};
use std::time::Duration;

/// A stream of frames.
pub(super) fn frames(bytes: &[u8]) {
    harmonaize_transport::tcp::fuzzing::stream(bytes);
}

/// The messages before the frames.
pub(super) fn handshake(bytes: &[u8]) {
    harmonaize_transport::tcp::fuzzing::handshake(bytes);
}

/// Records of a protected link, some of them changed on the way.
pub(super) fn records(bytes: &[u8]) {
    harmonaize_transport::tcp::fuzzing::records(bytes);
}

/// What agents over RDMA say of their queue pairs, and what lies in mailboxes.
pub(super) fn exchange(bytes: &[u8]) {
    harmonaize_transport::verbs::fuzzing::exchange(bytes);
}

/// A link over RDMA that comes up while somebody changes what its peer says.
pub(super) fn accept(bytes: &[u8]) {
    harmonaize_transport::verbs::fuzzing::accept(bytes);
}

/// Datagrams of trains, and what switches send back.
pub(super) fn probe(bytes: &[u8]) {
    harmonaize_probe::fuzzing::datagram(bytes);
}

const RANKS: u32 = 4;

/// Participant 0 of three, with two ranks.
fn participant() -> Communicator {
    let group = Group::new(vec![vec![Rank(0), Rank(3)], vec![Rank(1)], vec![Rank(2)]]).unwrap();
    let tuning = Tuning {
        chunk_bytes: 64,
        segment_bytes: 256,
        message_bytes: 32,
        copy_bytes: 128,
        algorithms: AlgorithmTable::RING,
    };
    let plan = EpochPlan {
        epoch: Epoch(1),
        plan: Plan::in_sequence(group),
        tuning,
        channels: 2,
        landing_slots: 4,
        coding: None,
        aggregation: None,
    };
    let access = vec![(Rank(0), Access::Mapped), (Rank(3), Access::Mapped)];
    Communicator::new(Config {
        me: Participant(0),
        plan,
        access,
        inquiry: Duration::from_millis(100),
        operations: 4,
    })
    .unwrap()
}

/// Carries out what the communicator asks for, and says whether it has ended. So many actions at most follow from one message.
fn settle(core: &mut Communicator, now: Nanos) -> bool {
    let (mut ended, p2p) = (false, core.p2p_channel());
    let mut left = 10_000;
    while let Some(action) = core.poll(now) {
        left -= 1;
        assert!(left > 0, "no end of actions");
        match action {
            Action::Step { channel, step, sends, .. } => {
                sends.iter().for_each(|_| core.handle_completion(now, channel, step));
            }
            Action::P2pSend { step, .. } | Action::P2pReceive { step, .. } | Action::P2pCopy { step, .. } => {
                core.handle_completion(now, p2p, step);
            }
            Action::Send { message, .. } => {
                let mut buffer = [0; MAX_MESSAGE];
                let used = message.encode(&mut buffer);
                assert!(Message::decode(&buffer[..used]).is_some(), "{message:?} cannot be read");
            }
            Action::Ended(_) => ended = true,
            _ => {}
        }
    }
    ended || core.failure().is_some()
}

/// Any messages of peers, between calls of the own ranks and pauses: the communicator goes on or ends.
pub(super) fn communicator(bytes: &[u8]) {
    let mut input = Input(bytes);
    let mut core = participant();
    let mut now = Nanos(1_000_000);
    let mut token = 0;
    while !input.is_empty() {
        let (what, from) = (input.u8(), Participant(u32::from(input.u8() % 3)));
        token += 1;
        let timeout = Duration::from_secs(10);
        match what % 8 {
            0 => {
                let kind = usize::from(input.u8());
                let collective = Collective::ALL[kind % Collective::ALL.len()];
                let reduce = if collective.reduces() { ReduceOp::Max } else { ReduceOp::Sum };
                let root = Rank(if collective.is_rooted() { kind as u32 % RANKS } else { 0 });
                let count = if collective.has_data() { u64::from(input.u8()) } else { 0 };
                let dtype = if collective.has_data() { Dtype::U32 } else { Dtype::U8 };
                let signature = Signature { collective, dtype, reduce, root, count, uneven: false };
                let call = Call { signature, counts: None, in_place: false, token: Token(token), timeout };
                let _ = core.handle_call(now, Rank(if from.0 == 0 { 0 } else { 3 }), call);
            }
            1 => {
                let direction = if input.u8() % 2 == 0 { Direction::Send } else { Direction::Receive };
                let peer = Some(Rank(u32::from(input.u8()) % RANKS));
                let signature = P2pSignature { direction, peer, dtype: Dtype::U8, count: input.u8().into() };
                let call = P2pCall { signature, token: Token(token), timeout };
                let _ = core.handle_p2p_call(now, Rank(if from.0 == 0 { 0 } else { 3 }), call);
            }
            2 => {
                now = Nanos(now.0 + u64::from(input.u8()) * 1_000_000);
                core.handle_timeout(now);
            }
            3 if from.0 == 0 => core.handle_rank_departed(Rank(3)),
            3 if what >= 128 => core.handle_link_down(Epoch(1), from),
            _ => {
                let mut message = input.array::<56>().to_vec();
                message[0] = PROTOCOL_VERSION;
                message.extend(input.piece());
                let payload = Payload { bytes: input.u8().into(), posted: false };
                if let Some((header, control)) = Message::decode(&message) {
                    core.handle_frame(now, from, Epoch(1), header, control, payload);
                }
            }
        }
        if settle(&mut core, now) {
            return;
        }
        if core.poll_timeout().is_some_and(|due| due <= now) {
            core.handle_timeout(now);
            let _ = settle(&mut core, now);
        }
    }
}

/// A chunk is decoded, or refused and nothing is written; every instruction set makes the same of it.
pub(super) fn chunk(bytes: &[u8]) {
    const GUARD: usize = 16;
    const UNTOUCHED: u32 = 0x5c5c_5c5c;
    let mut chunk = bytes.to_vec();
    // A check that is wrong would hide all behind it.
    if let Some((head, check)) =
        chunk.get_mut(..HEADER_BYTES).and_then(|head| head.split_last_chunk_mut::<4>())
    {
        let fold = |hash: u32, byte: &u8| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
        *check = head.iter().fold(0x811c_9dc5, fold).to_le_bytes();
    }
    let Ok(Header { codec, payload, elements, seed, .. }) = header(View::from(&chunk[..])) else { return };
    let elements = elements as usize;
    if elements > 1 << 14 {
        return;
    }
    let fresh = || vec![f32::from_bits(UNTOUCHED); elements + 2 * GUARD];
    let check = |values: &[f32], written: bool| {
        let untouched = |part: &[f32]| part.iter().all(|value| value.to_bits() == UNTOUCHED);
        assert!(untouched(&values[..GUARD]) && untouched(&values[GUARD + elements..]), "outside was written");
        assert!(written || untouched(values), "it was refused, and wrote");
    };
    let mut values = fresh();
    let to = ViewMut::from(&mut values[GUARD..GUARD + elements]);
    let decoded = decode(View::from(&chunk[..]), Store::Add, to);
    check(&values, decoded.is_ok());
    let Some(payload) = chunk[HEADER_BYTES..].get(..payload as usize) else { return };
    let mut first = None;
    for isa in Isa::ALL.iter().copied().filter(|isa| isa.is_available()) {
        let mut values = fresh();
        let (from, to) = (View::from(payload), ViewMut::from(&mut values[GUARD..GUARD + elements]));
        let decoded = match codec {
            Codec::Fixed(code) => codes::decode(isa, code, seed, from, Store::Add, to),
            Codec::NonzeroBlocks => codes::decode_nonzero(isa, from, Store::Add, to),
        };
        check(&values, decoded.is_ok());
        // Any NaN is as good as another.
        let bits = |value: &f32| if value.is_nan() { u32::MAX } else { value.to_bits() };
        let this = (decoded, values.iter().map(bits).collect::<Vec<u32>>());
        let first = first.get_or_insert_with(|| this.clone());
        assert!(*first == this, "{codec:?}: another result by {isa}");
    }
}
