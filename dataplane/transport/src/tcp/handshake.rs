//! How a connection names its link and path, and both ends prove that they know the link's secret. Neither end sends
//! the secret.
//!
//! ```text
//! initiator                              acceptor
//!   Hello (version, name, path, protection, nonce) ->
//!                                     <- Reply (version, status, protection, nonce, proof over both)
//!   Proof (status, proof over both)    ->
//!                                     <- Welcome (status)
//! ```
//! A proof is HMAC-SHA256 (RFC 2104) keyed with the secret over who speaks, the whole Hello, and the acceptor's nonce:
//! a proof of one end is never one of the other, and none can be used again. Both ends must ask for the same protection of what
//! follows (`records`): a Hello whose protection was changed on the way gets a proof over another Hello, which the initiator refuses.

use super::records::LinkProtection;
use super::refusal::LinkRefusal;
use harmonaize_abi::keyed;
use hmac::Mac;
use subtle::ConstantTimeEq;
use zerocopy::little_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The version of handshake and frames that this end speaks.
pub(super) const VERSION: u16 = 1;

const HELLO_MAGIC: [u8; 8] = *b"HZlinkQ\n";
const REPLY_MAGIC: [u8; 8] = *b"HZlinkA\n";

/// How much of a Hello must be there to tell magic and version; the same in all versions.
pub(super) const PREFIX: usize = 10;
pub(super) const HELLO: usize = size_of::<Hello>();
pub(super) const REPLY: usize = size_of::<Reply>();
pub(super) const PROOF: usize = size_of::<Proof>();
pub(super) const WELCOME: usize = size_of::<Welcome>();

/// What one end says of the other's last message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Status {
    Accepted = 0,
    Version = 1,
    UnknownName = 2,
    Secret = 3,
    Paths = 4,
    Up = 5,
    /// What follows: the acceptor's protection, where the initiator asks for another.
    Plain = 6,
    Authenticated = 7,
    Encrypted = 8,
}

impl Status {
    pub(super) fn of(code: U16) -> Option<Self> {
        use Status::{Accepted, Authenticated, Encrypted, Paths, Plain, Secret, UnknownName, Up, Version};
        let all = [Accepted, Version, UnknownName, Secret, Paths, Up, Plain, Authenticated, Encrypted];
        all.into_iter().find(|status| *status as u16 == code.get())
    }

    /// The acceptor's refusal of a protection that is not its own.
    pub(super) fn of_protection(ours: LinkProtection) -> Self {
        match ours {
            LinkProtection::None => Self::Plain,
            LinkProtection::Authenticated => Self::Authenticated,
            LinkProtection::Encrypted => Self::Encrypted,
        }
    }

    /// Why the end that is refused has no link: the peer speaks `version`, and this end asks for `protection`.
    pub(super) fn refusal(self, version: u16, protection: LinkProtection) -> LinkRefusal {
        let differ =
            |theirs: LinkProtection| LinkRefusal::Protection { ours: protection, theirs: theirs as u16 };
        match self {
            // Who says so refuses nothing.
            Self::Accepted => LinkRefusal::Unknown,
            Self::Version => LinkRefusal::Version { theirs: version, ours: VERSION },
            Self::UnknownName => LinkRefusal::NotIntroduced,
            Self::Secret => LinkRefusal::Secret,
            Self::Paths => LinkRefusal::PathsDiffer,
            Self::Up => LinkRefusal::Up,
            Self::Plain => differ(LinkProtection::None),
            Self::Authenticated => differ(LinkProtection::Authenticated),
            Self::Encrypted => differ(LinkProtection::Encrypted),
        }
    }
}

/// First word of the initiator.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct Hello {
    magic: [u8; 8],
    version: U16,
    pub(super) path: U16,
    pub(super) paths: U16,
    /// The code of a [`LinkProtection`].
    pub(super) protection: U16,
    pub(super) name: [u8; 16],
    nonce: [u8; 32],
}

/// Answer of the acceptor.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct Reply {
    magic: [u8; 8],
    pub(super) version: U16,
    pub(super) status: U16,
    /// That of an accepted Hello, or 0, as of an agent that knows none.
    pub(super) protection: U16,
    reserved: [u8; 2],
    pub(super) nonce: [u8; 32],
    pub(super) proof: [u8; 32],
}

/// The initiator's proof, or that it refuses.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct Proof {
    pub(super) status: U16,
    reserved: [u8; 6],
    pub(super) proof: [u8; 32],
}

/// The acceptor's last word.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct Welcome {
    pub(super) status: U16,
    reserved: [u8; 6],
}

/// What the first bytes of a connection show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Prefix {
    Ours,
    OtherVersion,
    Unknown,
}

impl Hello {
    pub(super) fn new(
        name: [u8; 16],
        path: u16,
        paths: u16,
        protection: LinkProtection,
        nonce: [u8; 32],
    ) -> Self {
        let (version, path, paths) = (VERSION.into(), path.into(), paths.into());
        let protection = (protection as u16).into();
        Self { magic: HELLO_MAGIC, version, path, paths, protection, name, nonce }
    }

    /// Judges the first [`PREFIX`] bytes.
    pub(super) fn prefix(bytes: &[u8]) -> Prefix {
        match bytes.split_at_checked(8) {
            Some((magic, [low, high, ..])) if magic == HELLO_MAGIC => {
                if u16::from_le_bytes([*low, *high]) == VERSION { Prefix::Ours } else { Prefix::OtherVersion }
            }
            _ => Prefix::Unknown,
        }
    }
}

impl Reply {
    pub(super) fn accept(secret: &[u8; 32], hello: &Hello, nonce: [u8; 32]) -> Self {
        Self {
            protection: hello.protection,
            nonce,
            proof: compute_mac(secret, b"acceptor ", hello, &nonce),
            ..Self::refuse(Status::Accepted)
        }
    }

    pub(super) fn refuse(status: Status) -> Self {
        let (version, status, protection) = (VERSION.into(), (status as u16).into(), 0.into());
        let (nonce, proof) = ([0; 32], [0; 32]);
        Self { magic: REPLY_MAGIC, version, status, protection, reserved: [0; 2], nonce, proof }
    }

    pub(super) fn is_ours(&self) -> bool {
        self.magic == REPLY_MAGIC
    }

    /// Whether who sent this knows the secret.
    pub(super) fn proves(&self, secret: &[u8; 32], hello: &Hello) -> bool {
        compute_mac(secret, b"acceptor ", hello, &self.nonce).ct_eq(&self.proof).into()
    }
}

impl Proof {
    pub(super) fn new(secret: &[u8; 32], hello: &Hello, nonce: &[u8; 32]) -> Self {
        Self { status: 0.into(), reserved: [0; 6], proof: compute_mac(secret, b"initiator", hello, nonce) }
    }

    pub(super) fn refuse(status: Status) -> Self {
        Self { status: (status as u16).into(), reserved: [0; 6], proof: [0; 32] }
    }

    /// Whether who sent this knows the secret.
    pub(super) fn proves(&self, secret: &[u8; 32], hello: &Hello, nonce: &[u8; 32]) -> bool {
        compute_mac(secret, b"initiator", hello, nonce).ct_eq(&self.proof).into()
    }
}

impl Welcome {
    pub(super) fn new(status: Status) -> Self {
        Self { status: (status as u16).into(), reserved: [0; 6] }
    }
}

fn compute_mac(secret: &[u8; 32], who: &[u8; 9], hello: &Hello, nonce: &[u8; 32]) -> [u8; 32] {
    let mut mac = keyed(secret);
    mac.update(who);
    mac.update(hello.as_bytes());
    mac.update(nonce);
    mac.finalize().into_bytes().into()
}

#[cfg(test)]
mod tests {
    use super::LinkProtection::Authenticated;
    use super::*;

    #[test]
    fn a_proof_is_bound_to_everything() {
        let secret = [7; 32];
        let hello = Hello::new([1; 16], 2, 3, Authenticated, [4; 32]);
        let reply = Reply::accept(&secret, &hello, [5; 32]);
        assert!(reply.proves(&secret, &hello));
        assert!(!reply.proves(&[8; 32], &hello));
        let proof = Proof::new(&secret, &hello, &[5; 32]);
        assert!(proof.proves(&secret, &hello, &[5; 32]));
        assert!(!proof.proves(&secret, &hello, &[6; 32]));
        assert_ne!(proof.proof, reply.proof, "one end's proof must not do for the other's");
        for other in [
            Hello::new([2; 16], 2, 3, Authenticated, [4; 32]),
            Hello::new([1; 16], 1, 3, Authenticated, [4; 32]),
            Hello::new([1; 16], 2, 4, Authenticated, [4; 32]),
            Hello::new([1; 16], 2, 3, LinkProtection::None, [4; 32]),
            Hello::new([1; 16], 2, 3, Authenticated, [5; 32]),
        ] {
            assert!(!reply.proves(&secret, &other));
            assert!(!proof.proves(&secret, &other, &[5; 32]));
        }
    }

    #[test]
    fn distinguishes_versions_and_unknown_peers() {
        let hello = Hello::new([1; 16], 0, 1, Authenticated, [0; 32]);
        let mut bytes: [u8; HELLO] = zerocopy::transmute!(hello);
        assert_eq!(Hello::prefix(&bytes[..PREFIX]), Prefix::Ours);
        bytes[8] += 1;
        assert_eq!(Hello::prefix(&bytes[..PREFIX]), Prefix::OtherVersion);
        bytes[0] += 1;
        assert_eq!(Hello::prefix(&bytes[..PREFIX]), Prefix::Unknown);
        assert_eq!(Hello::prefix(&[]), Prefix::Unknown);
    }
}
