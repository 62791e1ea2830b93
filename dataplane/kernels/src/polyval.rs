//! POLYVAL, a universal hash over GF(2^128) (RFC 8452, section 3). It takes 32 blocks at a time where the CPU multiplies four pairs of 64
//! bits without carries at once, else it does as the crate `polyval`.

#[cfg(target_arch = "x86_64")]
mod clmul;

use ::polyval::Polyval as Reference;
use ::polyval::universal_hash::UniversalHash;
use harmonaize_abi::{View, ViewMut};
use std::sync::atomic::{Ordering, compiler_fence};

/// Bytes of a block, of a key and of a hash.
pub const BLOCK: usize = 16;
/// Bytes that are copied and hashed at a time without those instructions: whole blocks.
const PIECE: usize = 64 * BLOCK;
/// Blocks that are multiplied before their sum is reduced.
#[cfg(target_arch = "x86_64")]
pub(crate) const GROUP: usize = 32;

/// The powers of a key, from that of a whole group down to the first. Zeros follow, for what is read behind
/// them.
#[cfg(target_arch = "x86_64")]
#[derive(Clone)]
#[repr(C, align(64))]
pub(crate) struct Powers(pub(crate) [[u8; BLOCK]; GROUP + 4]);

/// A key.
#[derive(Clone)]
pub struct Polyval {
    reference: Reference,
    /// Where the CPU can use them.
    #[cfg(target_arch = "x86_64")]
    powers: Option<Powers>,
}

impl std::fmt::Debug for Polyval {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Polyval")
    }
}

impl Polyval {
    /// The key of these bytes.
    pub fn new(key: [u8; BLOCK]) -> Self {
        let reference = Reference::new(&key.into());
        #[cfg(target_arch = "x86_64")]
        let powers = clmul::is_available().then(|| {
            let mut powers = [[0; BLOCK]; GROUP + 4];
            let mut power = key;
            // The hash of a block is its product with the key.
            for to in powers.iter_mut().take(GROUP).rev() {
                *to = power;
                power = hash_of(&reference, [&power, &[]]);
            }
            Powers(powers)
        });
        Self {
            reference,
            #[cfg(target_arch = "x86_64")]
            powers,
        }
    }

    /// The hash of two parts, one after the other, each filled up with zeros to whole blocks.
    ///
    /// Cost: of 8 KiB some 300 ns with AVX-512 and VPCLMULQDQ, of 1,392 bytes 60; elsewhere four to five times as much.
    pub fn hash(&self, parts: [&[u8]; 2]) -> [u8; BLOCK] {
        #[cfg(target_arch = "x86_64")]
        if let Some(powers) = &self.powers {
            // SAFETY: there are powers only where the CPU has the instructions.
            return unsafe { clmul::hash(powers, parts) };
        }
        hash_of(&self.reference, parts)
    }

    /// [`Self::hash`] of `first` and of what `from` has, which it copies to `to` on the way. What is hashed is what is copied, also
    /// where others write to `from` meanwhile. `None`, and nothing done, where the two differ in length.
    ///
    /// Cost: one pass. `from` and `to` may not overlap, or bytes are hashed that are no longer what they were.
    pub fn hash_copying(&self, first: &[u8], from: View<'_>, to: ViewMut<'_>) -> Option<[u8; BLOCK]> {
        let bytes = from.bytes();
        if bytes != to.bytes() {
            return None;
        }
        let (from, to) = (from.pointer(), to.pointer());
        #[cfg(target_arch = "x86_64")]
        if let Some(powers) = &self.powers {
            // SAFETY: there are powers only where the CPU has the instructions; the views have that many bytes.
            return Some(unsafe { clmul::hash_copying(powers, first, from, to, bytes) });
        }
        let mut hash = self.reference.clone();
        hash.update_padded(first);
        // Nobody else writes to it, and it stays in the first cache.
        let mut room = [0; PIECE];
        for at in (0..bytes).step_by(PIECE) {
            let Some(piece) = room.get_mut(..PIECE.min(bytes - at)) else { break };
            let (from, to) = (from.wrapping_add(at), to.wrapping_add(at));
            // SAFETY: so many bytes lie within the view, and the room is apart from it.
            unsafe { std::ptr::copy_nonoverlapping(from, piece.as_mut_ptr(), piece.len()) };
            // Else the compiler could copy from `from` once more below, where others may have written meanwhile.
            compiler_fence(Ordering::SeqCst);
            hash.update_padded(piece);
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(piece.as_ptr(), to, piece.len()) };
        }
        Some(hash.finalize().into())
    }
}

fn hash_of(key: &Reference, parts: [&[u8]; 2]) -> [u8; BLOCK] {
    let mut hash = key.clone();
    for part in parts {
        hash.update_padded(part);
    }
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    /// RFC 8452, appendix A.
    #[test]
    fn the_example_of_the_specification() {
        let hex = |text: &str| u128::from_str_radix(text, 16).unwrap().to_be_bytes();
        let key = Polyval::new(hex("25629347589242761d31f826ba4b757b"));
        let blocks = [hex("4f4f95668c83dfb6401762bb2d01a262"), hex("d1a24ddd2721d006bbe45f20d3c9f362")];
        let expected = hex("f7a3b47b846119fae5b7866cf5e5b77e");
        assert_eq!(key.hash([&blocks[0], &blocks[1]]), expected);
        assert_eq!(key.hash([&blocks.concat(), &[]]), expected);
    }

    /// Every length up to three groups, at any address, after parts of any length.
    #[test]
    fn all_instructions_give_the_reference_s_hash() {
        let mut random = ChaCha8Rng::seed_from_u64(7);
        let bytes: Vec<u8> = (0..9000).map(|_| random.random()).collect();
        for length in (0..1600).chain([4096, 8191, 8192, 8272]) {
            let key = Polyval::new(random.random());
            let at = random.random_range(0..64);
            let before = random.random_range(0..700);
            for before in [0, 64, before] {
                let parts = [&bytes[64..64 + before], &bytes[at..at + length]];
                assert_eq!(key.hash(parts), hash_of(&key.reference, parts), "{before} and {length} bytes");
            }
        }
    }

    /// What is hashed and what is copied is the same, and nothing beside is written. By the CPU's instructions, and without them.
    #[test]
    fn a_copy_on_the_way_changes_no_hash_and_nothing_beside() {
        let mut random = ChaCha8Rng::seed_from_u64(8);
        let bytes: Vec<u8> = (0..17_000).map(|_| random.random()).collect();
        for length in (0..1600).chain([2047, 2048, 2049, 8191, 8192, 8272, 16_383, 16_384]) {
            let key = Polyval::new(random.random());
            #[cfg(target_arch = "x86_64")]
            let plain = Polyval { powers: None, ..key.clone() };
            #[cfg(not(target_arch = "x86_64"))]
            let plain = key.clone();
            let [at, to_at, before] = [64_usize, 64, 40].map(|most| random.random_range(0..most));
            let (first, from) = (&bytes[..before], &bytes[at..at + length]);
            let expected = hash_of(&key.reference, [first, from]);
            for key in [key, plain] {
                let mut to = vec![0xa5_u8; length + 128];
                let room = ViewMut::from(&mut to[to_at..to_at + length]);
                assert_eq!(key.hash_copying(first, View::from(from), room), Some(expected), "{length} bytes");
                assert_eq!(&to[to_at..to_at + length], from, "{length} bytes");
                let beside = to[..to_at].iter().chain(&to[to_at + length..]);
                assert!(beside.copied().all(|byte| byte == 0xa5), "{length} bytes to {to_at}");
            }
        }
    }

    #[test]
    fn a_copy_to_another_length_is_none() {
        let key = Polyval::new([3; BLOCK]);
        let mut to = [7_u8; 4];
        for length in [0, 3, 5] {
            assert!(
                key.hash_copying(&[], View::from(&[1_u8; 5][..length]), ViewMut::from(&mut to[..])).is_none()
            );
            assert_eq!(to, [7; 4]);
        }
    }

    #[test]
    fn a_key_is_not_shown() {
        assert_eq!(format!("{:?}", Polyval::new([3; BLOCK])), "Polyval");
    }
}
