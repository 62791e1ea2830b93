//! The bytes of handshake, frames and records are those that were released.

use super::LinkProtection::{self, Authenticated, Encrypted};
use super::frame::{Kind, Wire};
use super::handshake::{Hello, Proof, Reply, Status, Welcome};
use super::records::Records;
use crate::Landing;
use harmonaize_schemas::{Schema, bytes, check};
use zerocopy::IntoBytes;

const REMEDY: &str = "Agents of the release before could not talk to this one any more. Leave what is there as it is. Something new is \
    a new code or kind, and goes only to a peer that is known to have it.";

/// What the initiator sends first on a path of this protection.
fn record(protection: LinkProtection) -> Vec<u8> {
    let hello = Hello::new([1; 16], 2, 3, protection, [4; 32]);
    let records = Records::derive(protection, true, &[7; 32], &hello, &[5; 32]).unwrap().unwrap();
    let mut sealer = records.sealer;
    sealer.finish(b"a frame").unwrap()
}

#[test]
fn handshake_frames_and_records_are_those_released() {
    let secret = [7; 32];
    let hello = Hello::new([1; 16], 2, 3, Authenticated, [4; 32]);
    let reply = Reply::accept(&secret, &hello, [5; 32]);
    let proof = Proof::new(&secret, &hello, &[5; 32]);
    let mut lines = vec![
        bytes("Hello", hello.as_bytes()),
        bytes("Reply", reply.as_bytes()),
        bytes("Proof", proof.as_bytes()),
    ];
    let all = (0..=u16::MAX).filter_map(|code| Status::of(code.into()));
    for status in all {
        lines.push(bytes(&format!("Reply of {status:?}"), Reply::refuse(status).as_bytes()));
        lines.push(bytes(&format!("Proof of {status:?}"), Proof::refuse(status).as_bytes()));
        lines.push(bytes(&format!("Welcome of {status:?}"), Welcome::new(status).as_bytes()));
    }
    let landing = Landing { ring: 0x0102, sequence: 0x0304_0506 };
    for (kind, header) in [(Kind::Bare, 300), (Kind::Payload(landing, 0x0708_090a), 56), (Kind::Heartbeat, 0)]
    {
        lines.push(bytes(&format!("Frame of {kind:?}"), Wire::new(kind, header).as_bytes()));
    }
    for protection in [Authenticated, Encrypted] {
        lines.push(bytes(&format!("Record, {protection}"), &record(protection)));
    }
    let remedy = format!("{REMEDY} Test: cargo test -p harmonaize-transport released");
    check("links", Schema::Grows, &lines, &remedy).unwrap_or_else(|broken| panic!("{broken}"));
}
