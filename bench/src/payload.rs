//! Payloads that prove themselves. Every byte of an AllToAll's block follows from (seed, round, source, destination), so
//! a receiver knows what must have come, and a block that went astray is as wrong as one that was damaged.

use crate::seeded::SplitMix64;

/// Least bytes of a block: its first word carries the wish to stop.
pub const LEAST_BYTES: usize = 8;

const WORD: usize = size_of::<u64>();

/// Which block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Seed of the whole run.
    pub seed: u64,
    /// Round, from 0.
    pub round: u64,
    /// Rank that sends it.
    pub source: usize,
    /// Rank that it is for.
    pub destination: usize,
}

/// A block that is not what its source sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("round {}: block from rank {} to rank {} differs from byte {offset}", .block.round, .block.source, .block.destination)]
pub struct Damaged {
    /// Which.
    pub block: Block,
    /// First byte of the first word that differs.
    pub offset: usize,
}

impl Block {
    fn stream(&self) -> SplitMix64 {
        SplitMix64::named(self.seed, &[self.round, self.source as u64, self.destination as u64])
    }

    /// Writes the block's bytes. A source that wants to stop inverts the first word, which every rank sees in its own
    /// block of the same round: so all stop after the same round, without another message.
    pub fn fill(&self, bytes: &mut [u8], stop: bool) {
        let mut stream = self.stream();
        let mut mask = if stop { u64::MAX } else { 0 };
        for chunk in bytes.chunks_mut(WORD) {
            let word = (stream.next_u64() ^ mask).to_le_bytes();
            chunk.iter_mut().zip(word).for_each(|(byte, value)| *byte = value);
            mask = 0;
        }
    }

    /// Checks every byte; says whether the source wants to stop.
    pub fn verify(&self, bytes: &[u8]) -> Result<bool, Damaged> {
        let damaged = |offset| Damaged { block: *self, offset };
        let mut stream = self.stream();
        let (first, rest) = bytes.split_first_chunk::<WORD>().ok_or_else(|| damaged(0))?;
        let (found, expected) = (u64::from_le_bytes(*first), stream.next_u64());
        if found != expected && found != !expected {
            return Err(damaged(0));
        }
        for (number, chunk) in rest.chunks(WORD).enumerate() {
            let word = stream.next_u64().to_le_bytes();
            if word.get(..chunk.len()) != Some(chunk) {
                return Err(damaged((number + 1) * WORD));
            }
        }
        Ok(found != expected)
    }
}

/// Bytes of a block in a round. Most rounds have 256 KiB; every eighth has a size that is not a multiple of
/// anything.
pub fn block_bytes(round: u64) -> usize {
    const USUAL: usize = 256 << 10;
    const ODD: [usize; 6] = [LEAST_BYTES, 4095, 65_537, 1 << 20, 13, 300_007];
    if round % 8 != 7 {
        return USUAL;
    }
    ODD.get((round / 8) as usize % ODD.len()).copied().unwrap_or(USUAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: Block = Block { seed: 5, round: 9, source: 1, destination: 2 };

    #[test]
    fn blocks_verify_at_every_length() {
        for bytes in [8, 9, 15, 16, 17, 4095] {
            for stop in [false, true] {
                let mut block = vec![0; bytes];
                BLOCK.fill(&mut block, stop);
                assert_eq!(BLOCK.verify(&block), Ok(stop), "{bytes} bytes");
            }
        }
    }

    #[test]
    fn any_flipped_bit_is_found_where_it_is() {
        let mut block = vec![0; 29];
        BLOCK.fill(&mut block, false);
        for bit in 0..29 * 8 {
            block[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(BLOCK.verify(&block).unwrap_err().offset, bit / 64 * 8, "bit {bit}");
            block[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(BLOCK.verify(&block), Ok(false));
    }

    #[test]
    fn blocks_of_another_round_or_rank_fail() {
        let mut block = vec![0; 64];
        BLOCK.fill(&mut block, false);
        for other in [
            Block { round: 8, ..BLOCK },
            Block { source: 2, destination: 1, ..BLOCK },
            Block { destination: 3, ..BLOCK },
            Block { seed: 6, ..BLOCK },
        ] {
            assert_eq!(other.verify(&block).unwrap_err().offset, 0);
        }
        assert!(BLOCK.verify(&block[..7]).is_err());
    }

    #[test]
    fn rounds_have_room_for_the_first_word() {
        assert!((0..200).all(|round| block_bytes(round) >= LEAST_BYTES));
        assert_eq!(block_bytes(7), LEAST_BYTES);
    }
}
